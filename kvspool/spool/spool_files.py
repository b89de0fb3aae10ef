"""The two open files of a spool: checked when opened, mapped.

**Trust.** Everything in the headers is checked before a byte is mapped: a file shorter than its header says would kill the process with
SIGBUS at the first load after its end. For the same reason the disk space is reserved in full when the spool is created.

**Resizing** replaces the old pair by a new one. Open handles see `moved` set and switch to the `successor`.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvspool import system
from kvspool.engine import locks, producer_table
from kvspool.errors import (
    Closed,
    Corruption,
    LogNotFound,
    LogVanished,
    MismatchedFiles,
    NotAFile,
    NotALog,
    Truncated,
    UnknownVersion,
)
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import FrameReader, FrameScanner, FrameWriter
from kvspool.kernel.lock import AppendLock
from kvspool.options import DURABILITIES
from kvspool.producers import TableLocation
from kvspool.record import STRUCTURED, Codec
from kvspool.spool import format, rates, restored
from kvspool.spool.headers import check_capacity, checked
from kvspool.spool.keys import KeyTable
from kvspool.system import disk, filesystems, forks, holders
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

_NO_WORDS = memoryview(b"").cast("Q")
_UNWRITABLE = (errno.EACCES, errno.EROFS, errno.EPERM)


class MappedParts(NamedTuple):
    """The mapped parts of the two files. A view keeps its mapping alive, so its memory stays valid after the pair is closed."""

    front: memoryview  # the page before the ring, with the checkpoints
    ring: memoryview
    control: memoryview


class SpoolFiles(Handle):
    """An open spool: descriptors and mappings of its two files.

    The ring is mapped read-only, and so is `front`, the page before it with the checkpoints; `writer` maps the ring again for writing, so
    that a fault of a reader can't change it. A user with read permission only gets everything but `can_ask`: no writer wakes it, so it
    polls. The same holds for every user on a file system where a store may kill the process, unless the caller accepts that risk.

    Threads may use a pair while another one closes it: `front`, `ring` and `control` raise Closed from then on. Code that uses a descriptor
    does so inside `held_open`, since the number of a closed one is soon reused for another file.
    """

    def __init__(self, path: Path, *, allow_unsafe_fs: bool = False) -> None:
        """Open and check both files. Raises LogNotFound, NotALog, UnknownVersion, MismatchedFiles, Truncated, Corruption."""
        self.path = path
        self.allow_unsafe_fs = allow_unsafe_fs
        self._kills = False  # whether a store may kill the process
        self._descriptors: list[Descriptor] = []
        self._maps: list[mmap.mmap] = []
        self._lock: Descriptor | None = None
        self._append_lock: AppendLock | None = None
        self._sync_lock: Descriptor | None = None
        self.is_closed = False
        self._guard = threading.RLock()  # a signal handler may interrupt
        self._users: list[int] = []  # threads, each once for every use
        self._key_table: KeyTable | None = None
        self._memory: MappedParts | None = None
        self._words = _NO_WORDS
        self._writable: mmap.mmap | None = None  # populated, until a writer takes it
        self._successor: SpoolFiles | None = None
        try:
            self._kills = not allow_unsafe_fs and filesystems.kills(path)
            self._open_matching()
            self._map_files()
        except BaseException:
            self._release()
            raise
        forks.register(self)

    def _open_matching(self) -> None:
        """Open the files until they belong together.

        A separate function: since Python 3.12, an exception from a signal handler at the backward jump of a loop may bypass the `try`
        around it.
        """
        while not self._open_files():
            self._release()

    def _open_files(self) -> bool:
        """Open and check the files; False if the log was resized meanwhile, so that they aren't a pair."""
        try:
            self._control, self.can_ask = self._open_file(format.CONTROL_FILE)
            self.header = self._read_header()
            self._lock_file = self._open_file(format.LOCK_FILE)[0] if self.header.resizes else self._control
            self._data, self.can_write = self._open_file(format.DATA_FILE)
            self._check_data()
        except (MismatchedFiles, NotALog):
            if not self._descriptors or self._lies_at(self.path / format.CONTROL_FILE, self._descriptors[0].number):
                raise
            return False
        return True

    @property
    def control_fd(self) -> int:
        """Return the number of the control file. Raises Closed, like the following ones."""
        return self._control.number

    @property
    def data_fd(self) -> int:
        """Return the number of the data file."""
        return self._data.number

    @property
    def lock_file_fd(self) -> int:
        """Return the number of the file whose bytes are locked; nothing is locked through it."""
        return self._lock_file.number

    def _map_files(self) -> None:
        self.seed = format.frame_seed(self.header.log_id)
        control_map = self._map(self.control_fd, self.header.control_bytes, self.can_ask)
        data_map = self._map(self.data_fd, format.DATA_START + self.header.capacity, writable=False)
        control, data = memoryview(control_map), memoryview(data_map)
        self._memory = MappedParts(data[: format.DATA_START], data[format.DATA_START :], control)
        self._words = control.cast("Q")
        if self.header.codec == Codec.KEYED:
            self._key_table = self._open_key_table(control)

    def _open_key_table(self, control: memoryview) -> KeyTable:
        return KeyTable(control[format.KEYS_AT : format.INDEX_AT], self.header.log_id, control.cast("Q"))

    @property
    def key_table(self) -> KeyTable | None:
        """Return the key table, if the log has one: another object after a recovery, which may have lost keys."""
        table, memory = self._key_table, self._memory
        if table is not None and memory is not None and table.is_outdated:
            # No lock: two threads at once may open it twice.
            self._key_table = self._open_key_table(memory.control)
            table.close()
            table = self._key_table
        return table

    @property
    def memory(self) -> MappedParts:
        """Return the mapped parts. Raises Closed."""
        memory = self._memory
        if memory is None:
            raise self._closed()
        return memory

    @property
    def front(self) -> memoryview:
        """Return the page before the ring. Raises Closed."""
        return self.memory.front

    @property
    def ring(self) -> memoryview:
        """Return the ring, for reading. Raises Closed."""
        return self.memory.ring

    @property
    def control(self) -> memoryview:
        """Return the control block, for writing where that is allowed. Raises Closed."""
        return self.memory.control

    def _closed(self) -> Closed:
        return Closed(f"{self.path} was closed; open it again")

    def _open_file(self, name: str) -> tuple[Descriptor, bool]:
        """Return a descriptor of the file, writable if permitted, and whether it is."""
        path = self.path / name
        try:
            try:
                if self._kills:
                    raise PermissionError(errno.EPERM, "a store there may kill the process", os.fspath(path))
                # Writable even for a reader: on overlayfs this makes later stores visible.
                file, writable = Descriptor(path, os.O_RDWR), True
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
                file, writable = Descriptor(path, os.O_RDONLY), False
        except FileNotFoundError:
            if not os.path.lexists(self.path):
                raise LogNotFound(f"{self.path} does not exist; kvspool.create creates a log") from None
            raise NotALog(f"{self.path} is not a spool: it has no {name}") from None
        except NotAFile as error:
            raise NotALog(str(error)) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise NotALog(f"{path} is not a regular file: {error.strerror}") from error
            raise
        self._descriptors.append(file)
        return file, writable

    def _read_header(self) -> format.ControlHeader:
        path = self.path / format.CONTROL_FILE
        raw = system.port.read(self.control_fd, format.HEADER.size, 0)
        header = checked(format.HEADER, raw, path, format.CONTROL_MAGIC)
        check_capacity(header.capacity, header.data_start, path)
        is_known = header.policy < len(format.POLICIES) and header.codec in STRUCTURED.values()
        if not is_known or header.durability >= len(DURABILITIES):  # the header is sound: its checksum was right
            raise UnknownVersion(f"{path}: a newer kvspool created this log, with an unknown codec, policy or durability; upgrade kvspool")
        if header.control_bytes != format.control_bytes(header.capacity):
            raise Corruption(f"{path}: its header contradicts itself")
        self._check_size(self.control_fd, header.control_bytes, path)
        return header

    def _check_data(self) -> None:
        path = self.path / format.DATA_FILE
        raw = system.port.read(self.data_fd, format.DATA_HEADER.size, 0)
        data = checked(format.DATA_HEADER, raw, path, format.DATA_MAGIC)
        if (data.log_id, data.capacity, data.data_start) != (self.header.log_id, self.header.capacity, self.header.data_start):
            raise MismatchedFiles(
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
        """Return a reader of frames at `position` that expects `sequence` there."""
        _, ring, control = self.memory
        return FrameReader(ring, control, self.seed, position, sequence)

    def writer(self, holder: bytes) -> FrameWriter:
        """Return the writer of frames; `holder` contains the words that name it. Raises PermissionError without write permission."""
        if not self.is_writable:
            raise self.refusal("append to")
        keeps_unread = self.header.policy != 0
        mapping, self._writable = self._writable, None
        whole = memoryview(mapping or self._map(self.data_fd, format.DATA_START + self.header.capacity, writable=True))
        front, ring = whole[: format.DATA_START], whole[format.DATA_START :]
        return FrameWriter(ring, self.control, self.seed, self.append_lock, memoryview(holder), keeps_unread, self, self.data_fd, front)

    def populate(self, touched: int) -> None:
        """Map the ring for the first writer of these files: with all touched pages of a new log."""
        mapping = self._map(self.data_fd, format.DATA_START + self.header.capacity, writable=True)
        system.port.populate(mapping, format.DATA_START + touched)
        self._writable = mapping

    def refusal(self, what: str) -> Exception:
        """Return the error for a process without write permission that wants to do `what` with the log."""
        if self._kills:
            return filesystems.killing(self.path, f"It was opened for reading only, so it is not possible to {what} it")
        return PermissionError(errno.EACCES, f"no permission to {what} this spool", os.fspath(self.path))

    @property
    def is_writable(self) -> bool:
        """Return whether this process may change both files."""
        return self.can_write and self.can_ask

    def map_ring(self) -> memoryview:
        """Map the ring once more, for writing."""
        return memoryview(self._map(self.data_fd, format.DATA_START + self.header.capacity, writable=True))[format.DATA_START :]

    def scanner(self, ring: memoryview) -> FrameScanner:
        """Return the scanner that finds every sound frame, and erases some if `ring` is writable."""
        return FrameScanner(ring, self.control, self.seed)

    @property
    def append_lock(self) -> AppendLock:
        """Return the append lock of this handle. Its slot is taken at the first use, and freed when the files are closed."""
        if self._append_lock is None:
            self._append_lock = self.append_lock_by(self.lock_fd)
        return self._append_lock

    def append_lock_by(self, fd: int) -> AppendLock:
        """Return a separate append lock for a descriptor from `open_lock`, which the caller closes."""
        return locks.append_lock(self.control, frames.LOCK, fd)

    @property
    def lock_fd(self) -> int:
        """Return the number of `lock`."""
        return self.lock.number

    @property
    def lock(self) -> Descriptor:
        """Return the descriptor for the locks of this handle: of its own open file description, never mapped."""
        if self._lock is None:
            self._lock = self.open_lock()
        return self._lock

    @property
    def sync_lock_fd(self) -> int:
        """Return the descriptor for the sync lock, like `lock_fd`."""
        if self._sync_lock is None:
            self._sync_lock = self.open_lock()
        return self._sync_lock.number

    def open_lock(self) -> Descriptor:
        """Return a new descriptor for locks of this log. Raises LogVanished or MismatchedFiles if the file was removed or replaced.

        A log keeps its lock file in a resize: as spool.lck, next to a new spool.ctl.
        """
        with self.held_open():
            return self._open_lock()

    def _open_lock(self) -> Descriptor:
        names = [format.LOCK_FILE] if self.header.resizes else [format.CONTROL_FILE, format.LOCK_FILE]
        for name in names:
            try:
                file = Descriptor(self.path / name, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                if _is_same(system.port.status(self.lock_file_fd), system.port.status(file.number)):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()
        if not os.path.lexists(self.path / format.CONTROL_FILE):
            raise LogVanished(f"{self.path} was deleted while it was open; open it again if it exists")
        raise MismatchedFiles(f"{self.path} was replaced by another log while it was open; open it again")

    def is_locked(self, at: int) -> bool:
        """Return whether an open file description of any process has locked byte `at`. Raises Closed."""
        with self.held_open():
            return system.port.is_locked(self.lock_file_fd, at)

    # After a resize the log is in new files at the same path.

    @property
    def origin(self) -> bytes:
        """Return the id of the log, which no resize changes; the header's `log_id` is that of these two files."""
        return self.header.origin if self.header.resizes else self.header.log_id

    @property
    def may_have_moved(self) -> bool:
        """Return whether to check `successor`: one load."""
        words = self._words
        return len(words) > frames.MOVED and words[frames.MOVED] != 0

    def successor(self) -> SpoolFiles | None:
        """Return the newest open files of the log after a resize; None if it is still in these. Raises LogVanished, MismatchedFiles."""
        with self.in_use() as is_open:
            if is_open and self._successor is None and self.may_have_moved:
                found = self._find_successor()
                if self._successor is None:  # no lock: two threads at once may open the files twice
                    self._successor = found
        newest = self._successor
        return newest if newest is None or not newest.may_have_moved else newest.successor() or newest

    def _find_successor(self) -> SpoolFiles | None:
        if self.is_in_place():
            with suppress(OSError):  # readers continue; the next writer retries, and reports the error
                self.stay()
            if self.is_in_place():
                return None
        try:
            found = SpoolFiles(self.path, allow_unsafe_fs=self.allow_unsafe_fs)
        except (LogNotFound, NotALog):  # a deletion or renaming has set the word, too
            raise self._vanished() from None
        if found.origin != self.origin or found.header.resizes <= self.header.resizes:
            found.close()
            raise MismatchedFiles(f"{self.path} was replaced by another log while it was open; open it again")
        if found.key_table is not None and self.key_table is not None:
            found.key_table.go_on(self.key_table)
        return found

    def doubt_name(self) -> None:
        """Set the word `moved` of new files: their name is not on disk. Files without write permission are left alone."""
        if self.is_writable:
            self._words[frames.MOVED] = 1

    def trust_name(self) -> None:
        """Reset the word `moved` of files whose name the caller has flushed; see `stay`."""
        self._reset_moved(lambda: None)

    def stay(self) -> None:
        """Reset the word `moved` of files that are in place: left by a creation or resize that crashed, or whose last flush failed.

        Either these are the old files, which were not replaced, or new ones, whose name may not be on disk. So the directory is flushed
        first: no record is appended to files that a crash of the machine could take away, or replace by the old ones. Raises the system's
        OSError if the flush fails; the word stays then.
        """
        self._reset_moved(self._flush_name)

    def _reset_moved(self, before: Callable[[], None]) -> None:
        """Under the append lock, if it is free: call `before`, and reset the word `moved`, unless the files are no longer in place."""
        if not self.is_writable:
            return
        with self.open_lock() as fd:
            lock = self.append_lock_by(fd)
            if lock.take():
                try:
                    if self.may_have_moved and self.is_in_place():
                        before()
                        self._words[frames.MOVED] = 0
                finally:
                    lock.free()

    def _flush_name(self) -> None:
        try:
            disk.flush_directory(self.path.parent)
        except OSError as error:
            error.add_note(f"while flushing {self.path.parent}: {self.path}, new or resized, takes no records before its name is on disk")
            raise

    def is_in_place(self) -> bool:
        """Return whether these files are the ones at the path."""
        return self._lies_at(self.path / format.CONTROL_FILE, self.control_fd)

    def refuse_elsewhere(self) -> None:
        """Raise LogVanished if these files are not at the path. Under a lock that a deletion needs, the answer stays true."""
        if not self.is_in_place():
            raise self._vanished()

    def _vanished(self) -> LogVanished:
        return LogVanished(f"{self.path} was deleted, moved or replaced while it was open; open it again if it exists")

    def _lies_at(self, path: Path, ours: int) -> bool:
        try:
            file = Descriptor(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        with file as fd:
            return _is_same(system.port.status(ours), system.port.status(fd))

    def wake(self) -> None:
        """Wake sleepers on inotify: it reports a write to the file, but no store through a mapping. Readers also poll, so errors don't
        matter.
        """
        with self.in_use() as is_open, suppress(OSError):
            if is_open:
                system.port.write(self.control_fd, b"\1", format.WAKE_AT)

    def describe_owner(self) -> str:
        """Name the last owner of the append lock: a hint, since it may have changed meanwhile."""
        reader = self.reader(0, 0)
        who = holders.describe([reader.word(frames.HOLDER + 2 + at) for at in range(4)])
        if not self.append_lock.is_gate_open():
            return (
                f"handles of the compiled kvspool have {self.path} open; the last writer was {who}. This process runs the interpreted one, "
                f"which appends only while they are closed: build its extension (python setup.py build_ext --inplace), or install a wheel"
            )
        return f"{self.path} is locked by {who}"

    def count_gap(self) -> None:
        """Count a Gap returned to a reader, if we may write."""
        memory = self._memory
        if self.can_ask and memory is not None:
            rates.count_gap(memory.control.cast("Q"), system.port.now())

    def copy_producers(self, successor: SpoolFiles) -> None:
        """Under all locks, during a resize: copy the list of producers to the new files, on disk, after resolving the leftovers of a killed
        process.
        """
        self.resolve_pending()
        found = producer_table.ProducerTable.open(self.path, self.origin, to_read=True)
        if found is not None:
            with found:
                found.copy_to(successor.path)

    def table_location(self) -> TableLocation:
        """Return the location of the producer table, for the owner of the append lock. Raises Closed."""
        with self.held_open():
            self.refuse_elsewhere()
            mode = system.port.status(self.control_fd).st_mode & 0o777
        return TableLocation(self.path, self.origin, mode, partial(self.control.cast("Q").__setitem__, frames.PENDING))

    def resolve_pending(self) -> None:
        """Under the append lock: resolve a producer's batch that a killed process has left."""
        words = self.control.cast("Q")
        if words[frames.PENDING]:
            self.refuse_elsewhere()
            producer_table.resolve(self.path, self.origin, words[frames.PENDING] - 1, self.reader(0, 0).mark()[1])
            words[frames.PENDING] = 0

    def add_keys(self, table: KeyTable, keys: list[str], flush: Callable[[], None], timeout: float) -> bool:
        """Add missing keys to the key table, while it has room; False if the log was resized before. `flush` flushes spool.ctl."""
        table.look()
        if table.is_full or all(key in table.indexes for key in keys):
            return True
        with locks.held(self.lock, format.KEYS_LOCK, timeout, lambda: "another process adds keys"):
            is_ours = not self.may_have_moved or self.is_in_place()
            # A key table restored from a copy gets no key before a recovery: the next append refuses it.
            if is_ours and not restored.is_older(self.front, self.control):
                table.add(keys, flush)
            return is_ours

    def has_vanished(self) -> bool:
        """Return whether the log's files were deleted; mapped data can still be read."""
        with self.held_open():
            if system.port.status(self.control_fd).st_nlink and system.port.status(self.data_fd).st_nlink:
                return False
        try:
            successor = self.successor()
        except (MismatchedFiles, LogVanished):
            return True
        return successor is None or successor.has_vanished()

    def forked(self) -> None:
        """In a forked child: close the lock descriptors, which are the parent's. The child has no other thread.

        This includes files from before a resize: no handle refers to them any more, but iterators do.
        """
        self._guard = threading.RLock()  # a signal handler may interrupt
        ours = threading.get_ident()  # a signal handler or destructor may fork inside `in_use`
        self._users = [thread for thread in self._users if thread == ours]
        if self._append_lock is not None:
            self._append_lock.close()
            self._append_lock = None
        for file in (self._lock, self._sync_lock):
            if file is not None:
                file.close()
        self._lock = self._sync_lock = None

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """Keep the files open during the `with` block, which gets False if they are closed already.

        For code during which no other thread may close them: the number of a closed descriptor is soon reused for another file.
        """
        thread = threading.get_ident()
        with self._guard:
            is_open = not self.is_closed
            if is_open:
                self._users.append(thread)
        try:
            yield is_open
        finally:
            with self._guard:
                if thread in self._users and is_open:  # not so in a child that another thread forked
                    self._users.remove(thread)
                is_last = is_open and self.is_closed and not self._users
            if is_last:
                self._release()

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep the files open during the `with` block, as `in_use` does. Raises Closed."""
        with self.in_use() as is_open:
            if not is_open:
                raise self._closed()
            yield

    def close(self) -> None:
        """Close the descriptors and unmap, as soon as no thread is inside `in_use`."""
        with self._guard:
            is_last = not self.is_closed and not self._users
            self.is_closed = True
        if is_last:
            self._release()

    def _release(self) -> None:
        """Close the descriptors and unmap, except memory that a view still needs."""
        if self._key_table is not None:
            self._key_table.close()
        if self._append_lock is not None:
            self._append_lock.close()
        self._memory = None
        self._words = _NO_WORDS
        self._writable = None
        while self._maps:
            _close_map(self._maps.pop().close)
        with ExitStack() as closing:  # all of them, even if one fails
            for file in (*self._descriptors, self._lock, self._sync_lock):
                if file is not None:
                    closing.callback(file.close)
            self._descriptors, self._lock, self._sync_lock = [], None, None

    def __del__(self) -> None:
        if hasattr(self, "_words"):  # otherwise `__init__` failed before it opened anything
            self.is_closed = True
            self._release()


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _close_map(close: Callable[[], None]) -> None:
    with suppress(BufferError):  # an iterator still uses it; the mapping is freed with the last view
        close()
