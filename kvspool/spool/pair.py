"""The two files of a spool: made whole, checked when opened, mapped.

**Durability.** `create` builds both files under a temporary name beside the target, flushes them, and renames the directory into place: no
process ever sees half a spool, and a spool that can be seen survives a crash of the machine.

**Trust.** Everything in the headers is checked before a byte is mapped: a file shorter than its header says would kill the process with
SIGBUS at the first load behind its end. For the same reason the disk space is reserved in full when the spool is made.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvspool import system
from kvspool._frames import FrameReader, FrameSurvey, FrameWriter
from kvspool.errors import (
    Corruption,
    FormatError,
    LogExists,
    LogNotFound,
    LogVanished,
    MismatchedPair,
    NotALog,
    Truncated,
    UnknownVersion,
)
from kvspool.layout import Layout
from kvspool.record import STRUCTURED, Codec
from kvspool.spool import epochs, format, rates
from kvspool.spool.keys import KeyTable
from kvspool.spool.seats import Bells

H = TypeVar("H", format.Header, format.DataHeader)
_UNWRITABLE = (errno.EACCES, errno.EROFS, errno.EPERM)


def create(path: Path, *, capacity: int, codec: int, mode: int, policy: int = 0, reader_expiry: int = 0) -> Pair:
    """Make a spool at `path`, on disk when the call returns, and return its open files.

    capacity: size of the ring in bytes, a multiple of 4096. mode: permission bits of the two files; the directory can be entered by all
    who may read them. policy: its place in `format.POLICIES`. reader_expiry: ns, 0 for never. Raises LogExists, or the system's OSError (no
    space, no permission), and leaves nothing behind then.
    """
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise LogExists(f"{path} exists already; kvspool.open opens it")
    log_id = system.port.random(16)
    building = path.with_name(f".{path.name}.{log_id.hex()}.new")
    try:
        system.port.make_directory(building, 0o700)
        _write_data(building / format.DATA_FILE, log_id, capacity, mode)
        _write_control(building / format.CONTROL_FILE, log_id, capacity, codec, mode, policy, reader_expiry)
        _flush_directory(building, 0o700 | mode & 0o444 | (mode & 0o444) >> 2)
        pair = Pair(building)  # opened first: once the log can be seen, nothing but a broken disk can fail
        try:
            _publish(building, path)
        except BaseException:
            pair.close()
            raise
        pair.path = path
        return pair
    except BaseException as error:
        if isinstance(error, OSError):
            error.add_note(f"while creating the spool {path} of {capacity} bytes; nothing was left behind")
        _discard(building)
        raise


def _publish(building: Path, path: Path) -> None:
    try:
        system.port.rename(building, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise LogExists(f"{path} exists already; kvspool.open opens it") from error
        raise
    try:
        _flush_directory(path.parent, None)
    except BaseException:
        system.port.rename(path, building)
        raise


def _write_data(path: Path, log_id: bytes, capacity: int, mode: int) -> None:
    header = format.DataHeader(format.DATA_MAGIC, format.VERSION, format.DATA_START, capacity, log_id, b"", 0)
    _write_file(path, format.DATA_START + capacity, _sealed(format.DATA_HEADER, header), mode)


def _write_control(path: Path, log_id: bytes, capacity: int, codec: int, mode: int, policy: int, reader_expiry: int) -> None:
    size = format.control_bytes(capacity)
    now = system.port.now()
    header = format.Header(
        format.CONTROL_MAGIC, format.VERSION, format.DATA_START, size, capacity, log_id, now, policy, codec, b"", reader_expiry, b"", 0
    )
    epoch = epochs.packed(log_id, format.Epoch(system.port.boot_id(), 0, 0, 0, 0, 0, format.TRUE, 0))
    _write_file(path, size, _sealed(format.HEADER, header) + epoch, mode)


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


def _flush_directory(path: Path, mode: int | None) -> None:
    fd = system.port.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if mode is not None:
            system.port.set_mode(fd, mode)
        system.port.flush(fd)
    finally:
        system.port.close(fd)


def _discard(building: Path) -> None:
    """Remove what an unfinished `create` left under its temporary name."""
    for name in (format.DATA_FILE, format.CONTROL_FILE):
        with suppress(FileNotFoundError):
            system.port.remove(building / name)
    with suppress(FileNotFoundError):
        system.port.remove_directory(building)


class Pair:
    """An open spool: descriptors and mappings of its two files.

    The ring is mapped for reading; `writer` maps it once more for writing, so that a reader's fault can't touch it. A user who may only
    read gets everything but `can_ask`: nobody will ring for him, he has to look by himself.
    """

    def __init__(self, path: Path) -> None:
        """Open and check both files. Raises LogNotFound, NotALog, UnknownVersion, MismatchedPair, Truncated, Corruption."""
        self.path = path
        self._files: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._lock_fd = -1
        self.is_closed = False
        self._guard = threading.Lock()
        self._users = 0
        self.key_table: KeyTable | None = None
        self._bells: Bells | None = None
        try:
            self._open()
        except BaseException:
            self._release()
            raise

    def _open(self) -> None:
        self.control_fd, self.can_ask = self._open_file(format.CONTROL_FILE)
        self.header = self._read_header()
        self.data_fd, self.can_write = self._open_file(format.DATA_FILE)
        self._check_data()
        self.seed = format.frame_seed(self.header.log_id)
        control_map = self._map(self.control_fd, self.header.control_bytes, self.can_ask)
        self.control = memoryview(control_map)
        ring_map = self._map(self.data_fd, format.DATA_START + self.header.capacity, writable=False)
        self.ring = memoryview(ring_map)[format.DATA_START :]
        self._bells = Bells(self.header.log_id, self.control)
        if self.header.codec == Codec.KEYED:
            self.key_table = KeyTable(self.control[format.KEYS_AT : format.INDEX_AT], self.header.log_id)

    def _open_file(self, name: str) -> tuple[int, bool]:
        """Return a descriptor of the file, for writing where that is allowed, and whether it was."""
        path = self.path / name
        try:
            try:
                # For writing even when only reading: on overlayfs that is what makes later stores visible. Not blocking, since
                # what lies there may turn out to be a FIFO.
                fd, writable = system.port.open(path, os.O_RDWR | os.O_NONBLOCK), True
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
                fd, writable = system.port.open(path, os.O_RDONLY | os.O_NONBLOCK), False
        except FileNotFoundError:
            if not os.path.lexists(self.path):
                raise LogNotFound(f"{self.path} does not exist; kvspool.create makes a log") from None
            raise NotALog(f"{self.path} is no spool: it has no {name}") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
                raise NotALog(f"{path} is not a regular file: {error.strerror}") from error
            raise
        self._files.append(fd)
        if not stat.S_ISREG(system.port.status(fd).st_mode):
            raise NotALog(f"{path} is not a regular file")
        return fd, writable

    def _read_header(self) -> format.Header:
        path = self.path / format.CONTROL_FILE
        raw = system.port.read(self.control_fd, format.HEADER.size, 0)
        header = _checked(format.HEADER, raw, path, format.CONTROL_MAGIC)
        _check_capacity(header.capacity, header.data_start, path)
        is_known = header.policy < len(format.POLICIES) and header.codec in STRUCTURED.values()
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
        return FrameWriter(
            self.map_ring(), self.control, self.seed, self.lock_fd, memoryview(holder), self.header.policy != 0, self.header.reader_expiry
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

    def open_lock(self) -> int:
        """Return a new descriptor for locks of this log. Raises LogVanished or MismatchedPair if another file lies there now."""
        path = self.path / format.CONTROL_FILE
        try:
            fd = system.port.open(path, os.O_RDWR | os.O_NONBLOCK)
        except FileNotFoundError:
            raise LogVanished(f"{self.path} was deleted while it was open; open it again if it exists") from None
        try:
            ours, found = system.port.status(self.control_fd), system.port.status(fd)
            if (ours.st_dev, ours.st_ino) != (found.st_dev, found.st_ino):
                raise MismatchedPair(f"{self.path} was replaced by another log while it was open; open it again")
        except BaseException:
            system.port.close(fd)
            raise
        return fd

    def wake(self, wanted: int) -> None:
        """Wake who asked for it: `wanted` is the word with a byte for each seat.

        Inotify sees a write to the file, never a store through a mapping.
        """
        if wanted & 0xFF:
            system.port.write(self.control_fd, b"\1", format.BELL_AT)
        if wanted >> 8:
            for seat in format.SEATS:
                if wanted >> (8 * seat) & 0xFF:
                    self._post(seat)

    def count_gap(self) -> None:
        """Count a Gap that a reader was given, where we may write."""
        if self.can_ask and not self.is_closed:
            rates.count_gap(self.control.cast("Q"), system.port.now())

    def _post(self, seat: int) -> None:
        if self._bells is not None:
            self._bells.post(seat)

    def has_vanished(self) -> bool:
        """Return whether the files were deleted; what is mapped can still be read."""
        return system.port.status(self.control_fd).st_nlink == 0 or system.port.status(self.data_fd).st_nlink == 0

    def give_up_locks(self) -> None:
        """In a forked child: close the lock descriptor, which is the parent's. No other thread is there any more."""
        self._guard = threading.Lock()
        self._users = 0
        if self._lock_fd >= 0:
            self._files.remove(self._lock_fd)
            system.port.close(self._lock_fd)
            self._lock_fd = -1

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
        if self._bells is not None:
            self._bells.close()
        self._bells = None
        self.control = self.ring = memoryview(b"")
        while self._maps:
            _close_map(self._maps.pop().close)
        while self._files:
            system.port.close(self._files.pop())
        self._lock_fd = -1

    def __del__(self) -> None:
        self.is_closed = True
        self._release()


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
