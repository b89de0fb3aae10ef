"""The two files of a spool: made whole, checked when opened, mapped.

**Durability.** `create` builds both files under a temporary name beside the target, flushes them, and renames the directory into place: no
process ever sees half a spool, and a spool that can be seen survives a crash of the machine.

**Trust.** Everything in the headers is checked before a byte is mapped: a file shorter than its header says would kill the process with
SIGBUS at the first load behind its end. For the same reason the disk space is reserved in full when the spool is made.

**Resizing** puts a new pair in the place of the old one. Who has the old one open finds its word `moved` set and asks for the `successor`.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvspool import _frames_py as frames
from kvspool import disk, ledger, system
from kvspool._frames import FrameReader, FrameSurvey, FrameWriter
from kvspool.errors import (
    Corruption,
    FormatError,
    LogExists,
    LogNotFound,
    LogVanished,
    MismatchedPair,
    NotAFile,
    NotALog,
    Truncated,
    UnknownVersion,
)
from kvspool.layout import Layout
from kvspool.record import STRUCTURED, Codec
from kvspool.spool import epochs, format, making, rates
from kvspool.spool.keys import KeyTable

LEDGER_FILES = (ledger.NAME, f"{ledger.NAME}.tmp")
H = TypeVar("H", format.Header, format.DataHeader)
_NO_WORDS = memoryview(b"").cast("Q")
_UNWRITABLE = (errno.EACCES, errno.EROFS, errno.EPERM)


def create(
    path: Path,
    *,
    capacity: int,
    codec: int,
    mode: int,
    policy: int = 0,
    reader_expiry: int = 0,
    durability: int = 0,
    sync_interval: int = 0,
) -> Pair:
    """Make a spool at `path`, on disk when the call returns, and return its open files.

    capacity: size of the ring in bytes, a multiple of 4096. mode: permission bits of the two files; the directory can be entered by all
    who may read them. policy: its place in `format.POLICIES`. reader_expiry: ns, 0 for never. durability: its place in
    `format.DURABILITIES`; sync_interval: ns, 0 for not given. Raises LogExists, or the system's OSError (no space, no permission), and
    leaves nothing behind then.
    """
    making.remove_dead(path, discard)
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise LogExists(f"{path} exists already; kvspool.open opens it")
    header = format.Header(
        magic=format.CONTROL_MAGIC,
        version=format.VERSION,
        data_start=format.DATA_START,
        control_bytes=format.control_bytes(capacity),
        capacity=capacity,
        log_id=b"",
        created=system.port.now(),
        policy=policy,
        codec=codec,
        durability=durability,
        spare=b"",
        reader_expiry=reader_expiry,
        sync_interval=sync_interval,
        origin=b"",
        resizes=0,
        reserved=b"",
        crc=0,
    )
    try:
        with making.directory(path, discard) as made:
            fill(made.path, header._replace(log_id=made.id), mode)
            pair = Pair(made.path)  # opened first: once the log can be seen, nothing but a broken disk can fail
            try:
                _publish(made, path)
            except BaseException:
                pair.close()
                raise
            pair.path = path
            return pair
    except OSError as error:
        error.add_note(f"while creating the spool {path} of {capacity} bytes; nothing was left behind")
        raise


def fill(building: Path, header: format.Header, mode: int, epoch: format.Epoch | None = None) -> None:
    """Put the two files of an empty log into an empty directory, on disk when the call returns.

    epoch: what is known of restarts of the machine; None for a log that saw none.
    """
    if epoch is None:
        epoch = format.Epoch(system.port.boot_id(), 0, 0, 0, 0, 0, format.TRUE, 0)
    _write_data(building / format.DATA_FILE, header.log_id, header.capacity, mode)
    head = _sealed(format.HEADER, header) + epochs.packed(header.log_id, epoch)
    _write_file(building / format.CONTROL_FILE, header.control_bytes, head, mode)
    disk.flush_directory(building, 0o700 | mode & 0o444 | (mode & 0o444) >> 2)


def _publish(made: making.Making, path: Path) -> None:
    try:
        system.port.rename(made.path, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise LogExists(f"{path} exists already; kvspool.open opens it") from error
        raise
    try:
        disk.flush_directory(path.parent)
        made.release()
    except BaseException:
        system.port.rename(path, made.path)
        raise


def _write_data(path: Path, log_id: bytes, capacity: int, mode: int) -> None:
    header = format.DataHeader(format.DATA_MAGIC, format.VERSION, format.DATA_START, capacity, log_id, b"", 0)
    _write_file(path, format.DATA_START + capacity, _sealed(format.DATA_HEADER, header), mode)


def _sealed(layout: Layout[H], record: H) -> bytes:
    """Return the bytes of a header whose last field is the checksum of the ones before."""
    body = layout.pack(record)[:-4]
    return body + format.checksum(body).to_bytes(4, "little")


def _write_file(path: Path, size: int, header: bytes, mode: int) -> None:
    fd = system.port.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        system.port.allocate(fd, size)
        system.port.write(fd, header, 0)
        system.port.set_mode(fd, mode)
        system.port.flush(fd)
    finally:
        system.port.close(fd)


def discard(building: Path) -> None:
    """Remove what an unfinished `create` or `resize` left under its temporary name."""
    for name in (format.DATA_FILE, format.CONTROL_FILE, format.LOCK_FILE, *LEDGER_FILES):
        with suppress(FileNotFoundError):
            system.port.remove(building / name)
    with suppress(FileNotFoundError):
        system.port.remove_directory(building)


class Pair:
    """An open spool: descriptors and mappings of its two files.

    The ring is mapped for reading, and so is `front`, the page before it, which holds the checkpoints; `writer` maps the ring once more for
    writing, so that a reader's fault can't touch it. A user who may only read gets everything but `can_ask`: nobody will ring for him, he
    has to look by himself.
    """

    def __init__(self, path: Path) -> None:
        """Open and check both files. Raises LogNotFound, NotALog, UnknownVersion, MismatchedPair, Truncated, Corruption."""
        self.path = path
        self._files: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._lock_fd = -1
        self._sync_lock_fd = -1
        self.is_closed = False
        self._guard = threading.Lock()
        self._users = 0
        self.key_table: KeyTable | None = None
        self._words = _NO_WORDS
        self._successor: Pair | None = None
        try:
            self._open_one_pair()
            self._map_files()
        except BaseException:
            self._release()
            raise

    def _open_one_pair(self) -> None:
        """Open the files until they belong together.

        A function of its own: since Python 3.12 an exception out of a signal handler at the jump
        back of a loop may pass by the `try` around it."""
        while not self._open_files():
            self._release()

    def _open_files(self) -> bool:
        """Open and check the files; False if the log was resized just then, so that they aren't a pair."""
        try:
            self.control_fd, self.can_ask = self._open_file(format.CONTROL_FILE)
            self.header = self._read_header()
            self.lock_file_fd = self._open_file(format.LOCK_FILE)[0] if self.header.resizes else self.control_fd
            self.data_fd, self.can_write = self._open_file(format.DATA_FILE)
            self._check_data()
        except (MismatchedPair, NotALog):
            if not self._files or self._lies_at(self.path / format.CONTROL_FILE, self._files[0]):
                raise
            return False
        return True

    def _map_files(self) -> None:
        self.seed = format.frame_seed(self.header.log_id)
        control_map = self._map(self.control_fd, self.header.control_bytes, self.can_ask)
        self.control = memoryview(control_map)
        self._words = self.control.cast("Q")
        ring_map = self._map(self.data_fd, format.DATA_START + self.header.capacity, writable=False)
        self.front = memoryview(ring_map)[: format.DATA_START]
        self.ring = memoryview(ring_map)[format.DATA_START :]
        if self.header.codec == Codec.KEYED:
            self.key_table = KeyTable(self.control[format.KEYS_AT : format.INDEX_AT], self.header.log_id)

    def _open_file(self, name: str) -> tuple[int, bool]:
        """Return a descriptor of the file, for writing where that is allowed, and whether it was."""
        path = self.path / name
        try:
            try:
                # For writing even when only reading: on overlayfs that is what makes later stores visible.
                fd, writable = system.port.open(path, os.O_RDWR), True
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
                fd, writable = system.port.open(path, os.O_RDONLY), False
        except FileNotFoundError:
            if not os.path.lexists(self.path):
                raise LogNotFound(f"{self.path} does not exist; kvspool.create makes a log") from None
            raise NotALog(f"{self.path} is no spool: it has no {name}") from None
        except NotAFile as error:
            raise NotALog(str(error)) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise NotALog(f"{path} is not a regular file: {error.strerror}") from error
            raise
        self._files.append(fd)
        return fd, writable

    def _read_header(self) -> format.Header:
        path = self.path / format.CONTROL_FILE
        raw = system.port.read(self.control_fd, format.HEADER.size, 0)
        header = _checked(format.HEADER, raw, path, format.CONTROL_MAGIC)
        _check_capacity(header.capacity, header.data_start, path)
        is_known = header.policy < len(format.POLICIES) and header.codec in STRUCTURED.values()
        is_known = is_known and header.durability < len(format.DURABILITIES)
        if header.control_bytes != format.control_bytes(header.capacity) or not is_known:
            raise Corruption(f"{path}: its header contradicts itself")
        self._check_size(self.control_fd, header.control_bytes, path)
        return header

    def _check_data(self) -> None:
        path = self.path / format.DATA_FILE
        raw = system.port.read(self.data_fd, format.DATA_HEADER.size, 0)
        data = _checked(format.DATA_HEADER, raw, path, format.DATA_MAGIC)
        if (data.log_id, data.capacity, data.data_start) != (self.header.log_id, self.header.capacity, self.header.data_start):
            raise MismatchedPair(
                f"{self.path}: {format.CONTROL_FILE} is of log {self.header.log_id.hex()}, {format.DATA_FILE} of {data.log_id.hex()}"
            )
        self._check_size(self.data_fd, format.DATA_START + data.capacity, path)

    def _check_size(self, fd: int, size: int, path: Path) -> None:
        found = system.port.status(fd).st_size
        if found < size:
            raise Truncated(f"{path} has {found} bytes; its header says {size}")

    def _map(self, fd: int, size: int, writable: bool) -> mmap.mmap:
        mapping = system.port.map(fd, size, writable=writable)
        self._maps.append(mapping)
        return mapping

    def reader(self, position: int, sequence: int) -> FrameReader:
        """Return a reader of frames that stands at `position` and expects `sequence` there."""
        return FrameReader(self.ring, self.control, self.seed, position, sequence)

    def writer(self, holder: bytes) -> FrameWriter:
        """Return the writer of frames; `holder` are the words that name it. Raises PermissionError for who may only read."""
        if not self.is_writable:
            raise PermissionError(errno.EACCES, "no permission to append to this spool", os.fspath(self.path))
        keeps_unread, expiry = self.header.policy != 0, self.header.reader_expiry
        return FrameWriter(
            self.map_ring(), self.control, self.seed, self.lock_fd, memoryview(holder), keeps_unread, expiry, self, self.data_fd
        )

    @property
    def is_writable(self) -> bool:
        """Return whether this user may change both files."""
        return self.can_write and self.can_ask

    def map_ring(self) -> memoryview:
        """Map the ring once more, for writing."""
        return memoryview(self._map(self.data_fd, format.DATA_START + self.header.capacity, writable=True))[format.DATA_START :]

    def survey(self, ring: memoryview) -> FrameSurvey:
        """Return what finds every sound frame, and what erases some if `ring` is writable."""
        return FrameSurvey(ring, self.control, self.seed)

    @property
    def lock_fd(self) -> int:
        """Return the descriptor for the append lock: of its own open file description, never mapped."""
        if self._lock_fd < 0:
            self._lock_fd = self.open_lock()
            self._files.append(self._lock_fd)
        return self._lock_fd

    @property
    def sync_lock_fd(self) -> int:
        """Return the descriptor for the sync lock, as `lock_fd`."""
        if self._sync_lock_fd < 0:
            self._sync_lock_fd = self.open_lock()
            self._files.append(self._sync_lock_fd)
        return self._sync_lock_fd

    def open_lock(self) -> int:
        """Return a new descriptor for locks of this log. Raises LogVanished or MismatchedPair if another file lies there now.

        A log keeps the file of its locks when it is resized: as spool.lck, beside a new spool.ctl.
        """
        names = [format.LOCK_FILE] if self.header.resizes else [format.CONTROL_FILE, format.LOCK_FILE]
        for name in names:
            try:
                fd = system.port.open(self.path / name, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                if _is_same(system.port.status(self.lock_file_fd), system.port.status(fd)):
                    return fd
            except BaseException:
                system.port.close(fd)
                raise
            system.port.close(fd)
        if not os.path.lexists(self.path / format.CONTROL_FILE):
            raise LogVanished(f"{self.path} was deleted while it was open; open it again if it exists")
        raise MismatchedPair(f"{self.path} was replaced by another log while it was open; open it again")

    # A log that was resized lies in new files at the same path.

    @property
    def origin(self) -> bytes:
        """Return the id of the log, which no resize changes; the header's `log_id` is that of these two files."""
        return self.header.origin if self.header.resizes else self.header.log_id

    @property
    def may_have_moved(self) -> bool:
        """Return whether to ask `successor`: one load."""
        words = self._words
        return len(words) > frames.MOVED and words[frames.MOVED] != 0

    def successor(self) -> Pair | None:
        """Return the open files in which the log goes on since it was resized, the newest ones; None if it still lies in these.

        Raises MismatchedPair if another log lies at the path.
        """
        with self.in_use() as is_open:
            if is_open and self._successor is None and self.may_have_moved:
                found = self._find_successor()
                if self._successor is None:  # no lock: two threads that look at once may open the files twice
                    self._successor = found
        newest = self._successor
        return newest if newest is None or not newest.may_have_moved else newest.successor() or newest

    def _find_successor(self) -> Pair | None:
        if self.is_in_place():
            self._stay()
            if self.is_in_place():
                return None
        try:
            found = Pair(self.path)
        except LogNotFound:
            return None
        if found.origin != self.origin or found.header.resizes <= self.header.resizes:
            found.close()
            raise MismatchedPair(f"{self.path} was replaced by another log while it was open; open it again")
        if found.key_table is not None and self.key_table is not None:
            found.key_table.go_on(self.key_table)
        return found

    def _stay(self) -> None:
        """Take back the word `moved` if whoever stored it died before the new files were in place."""
        if not (self.can_ask and self.can_write):
            return
        fd = self.open_lock()
        try:
            if system.port.try_lock(fd, format.APPEND_LOCK):
                if self.is_in_place():
                    self._words[frames.MOVED] = 0
                system.port.unlock(fd, format.APPEND_LOCK)
        finally:
            system.port.close(fd)

    def is_in_place(self) -> bool:
        """Return whether these are the files that lie at the path."""
        return self._lies_at(self.path / format.CONTROL_FILE, self.control_fd)

    def _lies_at(self, path: Path, ours: int) -> bool:
        try:
            fd = system.port.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return _is_same(system.port.status(ours), system.port.status(fd))
        finally:
            system.port.close(fd)

    def wake(self) -> None:
        """Wake who sleeps on inotify: it sees a write to the file, never a store through a mapping."""
        system.port.write(self.control_fd, b"\1", format.BELL_AT)

    def count_gap(self) -> None:
        """Count a Gap that a reader was given, where we may write."""
        if self.can_ask and not self.is_closed:
            rates.count_gap(self.control.cast("Q"), system.port.now())

    def copy_accounts(self, successor: Pair) -> None:
        """Under all locks, for who resizes: give the new files the list of producers too, on disk, after what a killed one has left was
        accounted for."""
        pending = self._words[frames.PENDING]
        if pending:
            ledger.settle(self.path, self.origin, pending - 1, self.reader(0, 0).mark()[1])
            self._words[frames.PENDING] = 0
        found = ledger.Ledger.open(self.path, self.origin, to_read=True)
        if found is not None:
            with found:
                found.copy_to(successor.path)

    def has_vanished(self) -> bool:
        """Return whether the log's files were deleted; what is mapped can still be read."""
        if system.port.status(self.control_fd).st_nlink and system.port.status(self.data_fd).st_nlink:
            return False
        try:
            successor = self.successor()
        except (MismatchedPair, NotALog):
            return True  # another log, or something else, lies there now
        return successor is None or successor.has_vanished()

    def give_up_locks(self) -> None:
        """In a forked child: close the lock descriptors, which are the parent's. No other thread is there any more."""
        self._guard = threading.Lock()
        self._users = 0
        for fd in (self._lock_fd, self._sync_lock_fd):
            if fd >= 0:
                self._files.remove(fd)
                system.port.close(fd)
        self._lock_fd = self._sync_lock_fd = -1

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """Keep the files open inside the `with` block, which gets False if they are closed already.

        For what another thread's `close` must not come into: the number of a closed descriptor is soon that of another file.
        """
        with self._guard:
            is_open = not self.is_closed
            self._users += is_open
        try:
            yield is_open
        finally:
            with self._guard:
                self._users -= is_open
                is_last = self.is_closed and not self._users
            if is_last:
                self._release()

    def close(self) -> None:
        """Close the descriptors and unmap, as soon as nobody is `in_use` any more."""
        with self._guard:
            self.is_closed = True
            is_used = self._users > 0
        if not is_used:
            self._release()

    def _release(self) -> None:
        """Close the descriptors and unmap, except what a view of the memory still needs."""
        if self.key_table is not None:
            self.key_table.close()
        self.control = self.front = self.ring = memoryview(b"")
        self._words = _NO_WORDS
        while self._maps:
            _close_map(self._maps.pop().close)
        self._lock_fd = self._sync_lock_fd = -1
        with ExitStack() as closing:  # all of them, even if one fails
            while self._files:
                closing.callback(system.port.close, self._files.pop())

    def __del__(self) -> None:
        self.is_closed = True
        self._release()


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _close_map(close: Callable[[], None]) -> None:
    with suppress(BufferError):  # an iterator still looks at it; the mapping goes when the last view does
        close()


def _checked(layout: Layout[H], raw: bytes, path: Path, magic: bytes) -> H:
    """Return the header in `raw`, of which no byte was believed before."""
    if len(raw) < len(magic) or raw[: len(magic)] != magic:
        raise NotALog(f"{path} is no file of a spool: it doesn't begin with {magic.decode()}")
    if len(raw) < layout.size:
        raise Truncated(f"{path} has {len(raw)} bytes, less than its header")
    record = layout.unpack(raw)
    if record.version != format.VERSION:
        raise UnknownVersion(
            f"{path} has format version {record.version}; this kvspool reads version {format.VERSION}: upgrade to open it"
        )
    if format.checksum(raw[: layout.size - 4]) != record.crc:
        raise Corruption(f"{path}: the checksum of its header doesn't match")
    return record


def _check_capacity(capacity: int, data_start: int, path: Path) -> None:
    if not format.LEAST_CAPACITY <= capacity <= format.MOST_CAPACITY or capacity % format.PAGE or data_start != format.DATA_START:
        raise FormatError(f"{path}: a ring of {capacity} bytes at {data_start} is not possible in this version")
