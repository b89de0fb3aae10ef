"""The lock file of a journal: the writers' locks, and the end of the journal.

**Locks.** The program that owns the format holds an exclusive `flock` on the file while it writes. Each of kvspool's writing handles holds
a shared one: many of them write at once, and the original and kvspool exclude each other. Among kvspool's handles one byte is the append
lock, another one the flush lock.

**Page.** The file's content is kvspool's (its size is 0 for the original): the end of the last segment and the next sequence, so that a
writer continues without reading the segments. It is read and written with `pread` and `pwrite` under the append lock, never mapped, since
other programs may change it. It is trusted only if it matches the segment, in the same boot of the machine; otherwise the segments decide.

**Tail.** The end of the journal is also in a separate file next to it, which all writers map: see `tail_py`. An append in one step changes
only that file. Its first word is the append lock, whose locked bytes are in the lock file. The byte that older versions lock for each
append is the lock's gate, so old and new versions exclude each other. `read` combines both files. `write` marks in the tail that the page
counts, until `tell` resets that. If no such file can be mapped, each append locks the byte, and writes the page.

A writer holds a shared lock on one more byte, whose offset is derived from the inode number of the tail's file. So if that file is removed
or replaced, no other file is used before all writers that have it mapped close it.

**An error of a flush** must not be lost: the kernel reports it once. So it is stored immediately, without a lock, after the page and in the
tail's file. All readers of the page take it from there (`note_error`); the next writer with the append lock writes it into the page.

**A removed file.** The original removes the file when it closes. So after locking it, a writer checks whether the name still refers to it,
and at each append whether it still has a name.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.checksums import checksum, sealed
from kvspool.engine.layout import Layout
from kvspool.errors import Closed, KvspoolError, LockTimeout, LogVanished, NotAFile
from kvspool.journal.tail import COPY, TAIL
from kvspool.kernel import tail_py as tails
from kvspool.kernel.frames import crc32c
from kvspool.kernel.group import FlushGroup
from kvspool.kernel.lock_py import OWNER, WRITER_SLOTS_AT
from kvspool.kernel.tail import Tail
from kvspool.record import NO_TIME
from kvspool.system import filesystems, holders
from kvspool.system.descriptor import Descriptor, OpenFile

MAGIC = b"kvJRNL01"
APPEND, SYNC, ADMIN = 1 << 20, (1 << 20) + 1, (1 << 20) + 2  # locked bytes: far after the content, so that it may grow
USED_AT, USED = 1 << 40, 1 << 40  # each writer locks one of these bytes, shared: that of the tail's file
TAIL_BYTES = 4096  # of the tail's file
UNFIT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENODEV, errno.EOPNOTSUPP)  # if a process can have no tail
TRIES = 5
FRESH = 50_000  # ns for which a tail's check of names counts: about the time between the check and the write of the slow path
PAUSE = 2_000  # ns between two appends, in which the caller can't rename or remove anything
NOT_BEGUN = (1 << 64) - 1  # `end`, during the creation of a new segment
End = tuple[int, int, int, int, int]  # content of a tail: base, end, next sequence, latest timestamp, synced sequence


class Page(NamedTuple):
    """The state shared by writers. All zeros in a file created by the original."""

    magic: Annotated[bytes, "8s", "kvJRNL01"]
    boot: Annotated[bytes, "16s", "the run of the machine that wrote it"]
    base: Annotated[int, "Q", "first sequence of the last segment"]
    end: Annotated[int, "Q", "bytes of the last segment that are whole; the largest number: it is being made"]
    next_sequence: Annotated[int, "Q", "of the next record"]
    last_timestamp: Annotated[int, "q", "ns since the Unix epoch, of the last record; the smallest number: not known"]
    synced_sequence: Annotated[int, "Q", "every record below it is on disk"]
    sync_error: Annotated[int, "Q", "errno of the first failed flush; 0: none"]
    holder_pid: Annotated[int, "Q", "who appended last: process id"]
    holder_start: Annotated[int, "Q", "its start, in clock ticks since boot"]
    holder_boot: Annotated[int, "Q", "its boot"]
    holder_namespace: Annotated[int, "Q", "its pid namespace"]
    checksum: Annotated[int, "I", "CRC32C of what stands before it"]


PAGE = Layout(Page)
PENDING_AT = 112  # after the page: number + 1 of the state of a batch that is being appended (u32), and its complement; zeros: none
_PENDING = struct.Struct("<2I")
ERROR_AT = 120  # after that: errno of a failed flush in this boot of the machine, as the word returned by `error_word`; 0: none
CONTENT = 128  # bytes of the file
NO_RUN = bytes(16)  # `boot` of an invalid page


class Control(OpenFile):
    """One handle's view of the lock file. It has its own descriptor, which is never inherited, and never mapped."""

    def __init__(self, path: Path, mode: int | None) -> None:
        """Open the lock file for writing; `mode`: create it with these permission bits if it doesn't exist. Raises the system's OSError."""
        self.path = path
        self._mode = mode
        self._process = system.port.process_id()
        self.holder = holders.ours()
        self.boot_id = system.port.boot_id()
        self.pending = 0  # as of the last `read`
        self.owes_error = False  # whether the page lacked the error of a failed flush
        self.renewals = 0  # how often the file was replaced after a removal
        self._must_enter = False  # a new file replaced a removed one, and the original may write to it
        self._page: Page | None = None  # as last read or written
        self.tail: Tail | None = None  # after the append lock was taken, if a tail can be mapped
        self.group: FlushGroup | None = None  # of waiters for a flush, with the tail
        self._has_looked = False  # whether it can
        self._guard = threading.RLock()
        self._users: dict[object, list[Descriptor]] = {}  # flushes under way, with files that they may still use
        self._is_closed = False
        self._file = self._open()

    def _open(self) -> Descriptor:
        flags = os.O_RDWR | (os.O_CREAT if self._mode is not None else 0)
        try:
            return Descriptor(self.path, flags, self._mode or 0)
        except FileNotFoundError:
            raise LogVanished(f"{self.path.parent} was removed; open the path again if it exists") from None

    def enter(self, timeout: float) -> None:
        """Keep the original's writer out, together with all of kvspool's handles. Raises LockTimeout if it is writing."""
        locks.wait_for(self._try_enter, timeout, lambda: f"a writer of another program holds {self.path}; close it")
        self._must_enter = False

    def _try_enter(self) -> bool | None:
        if not system.port.try_lock_file(self.fd, shared=True):
            return None
        if self.is_in_place():
            return True
        self._renew()  # removed or replaced by its previous holder
        return None

    def _renew(self) -> None:
        """Open the file that now has the name; one of the two is open at any moment, also after an exception."""
        file = self._open()
        self._must_enter = True
        self._close_tail()
        with self._guard:
            self._file, file = file, self._file
            for kept in self._users.values():
                kept.append(file)  # it closes with the last of them
            if not self._users:
                file.close()

    def lock(self, timeout: float, byte: int = APPEND) -> None:
        """Take one of the locks among kvspool's writers. LockTimeout names the last writer."""
        try:
            self._take(timeout, byte)
            while byte == APPEND and (self._must_enter or system.port.status(self.fd).st_nlink == 0):  # removed: others lock another one
                self.renewals += 1
                self.unlock(byte)
                self._renew()
                self.enter(timeout)
                self._take(timeout, byte)
        except BaseException:
            self.unlock(byte)
            raise

    def _take(self, timeout: float, byte: int) -> None:
        if byte == APPEND and not self._has_looked:
            self.tail, self.group = self._share_tail(timeout) or (None, None)
            self._has_looked = True
        tail = self.tail
        if byte != APPEND or tail is None:
            locks.acquire(self.fd, byte, timeout, self.who)
        else:
            locks.wait_for(lambda: tail.lock.take(self) or None, timeout, self.who, partial(locks.rest, tail.lock))
            tail.sign()

    def unlock(self, byte: int = APPEND) -> None:
        """Release one of the locks, whether it is held or not. A current append of another thread keeps its own."""
        if byte == APPEND and self.tail is not None:
            if self.tail.lock.taken_by is self:
                self.tail.lock.free()
        else:
            system.port.unlock(self.fd, byte)

    def who(self) -> str:
        """Name the last writer, for waiters of the append lock."""
        words = (0, 0, 0, 0) if self.tail is None else self.tail.signed_by()
        if not words[0]:
            page = self.seen()
            words = (page.holder_pid, page.holder_start, page.holder_boot, page.holder_namespace)
        who = holders.describe(words) if words[0] else "another process"
        return f"{who} was the last to append to {self.path.parent}, and may hold its lock"

    def sign_flush(self) -> None:
        """Store that this process leads a flush, for its waiters."""
        tail = self.tail  # another thread may reopen the lock file
        if tail is not None:
            tail.sign(tails.LEADER)

    def flusher(self) -> str:
        """Name the process that led the last flush, for its waiters."""
        tail = self.tail
        words = (0, 0, 0, 0) if tail is None else tail.signed_by(tails.LEADER)
        who = holders.describe(words) if words[0] else "another process"
        return f"{who} led the last flush, and may hold it"

    # The tail.

    def _share_tail(self, timeout: float) -> tuple[Tail, FlushGroup] | None:
        """Return the common tail of all writers of this lock file; None if there can be none. Raises LockTimeout if others use one whose
        file was removed.
        """
        path = tail_file(self.path)
        try:
            name = filesystems.of(path.parent)
            if name not in filesystems.SAFE or name in filesystems.KILLING:
                return None
            return locks.wait_for(lambda: self._try_tail(path), timeout, lambda: f"writers use an earlier {path}; close them")
        except (LockTimeout, NotAFile):
            raise
        except OSError as error:
            if error.errno in UNFIT:
                return None
            raise

    def _try_tail(self, path: Path) -> tuple[Tail, FlushGroup] | None:
        file = Descriptor(path, os.O_RDWR | os.O_CREAT, 0o600 if self._mode is None else self._mode)
        with file as fd:
            status = system.port.status(fd)
            if status.st_size < TAIL_BYTES:
                system.port.allocate(fd, TAIL_BYTES)
            byte = USED_AT + (status.st_ino * 0x9E3779B1 ^ status.st_dev) % USED
            try:
                is_ours = system.port.try_share(self.fd, byte, 1) and file.is_at(path) and self._is_only_tail(byte)
                memory = memoryview(system.port.map(fd, TAIL_BYTES, writable=True)) if is_ours else None
            except BaseException:
                system.port.unlock(self.fd, byte)
                raise
        if memory is None:
            system.port.unlock(self.fd, byte)
            return None
        lock = locks.append_lock(memory, tails.LOCK, self.fd, APPEND)
        holder = memoryview(struct.pack("<4Q", *self.holder))
        tail = Tail(memory, lock, self.fd, _seed(self.boot_id, status), holder, FRESH, PAUSE)
        group = FlushGroup(tail, memory, tails.GROUP, SYNC)
        group.lock_fd = self.fd
        return tail, group

    def _is_only_tail(self, byte: int) -> bool:
        """Return whether no process uses a tail in another file, according to the locked bytes."""
        below = system.port.locked_from(self.fd, USED_AT, byte - USED_AT) if byte > USED_AT else -1
        after = system.port.locked_from(self.fd, byte + 1, USED_AT + USED - byte)
        return below < 0 and after < 0

    def _close_tail(self) -> None:
        tail, group = self.tail, self.group
        self.tail, self.group, self._has_looked = None, None, False
        if group is not None:
            group.close()
        if tail is not None:
            tail.close()

    # The page.

    def read(self) -> Page:
        """Under the append lock: return the page, updated from the tail; all zeros if there is no valid one."""
        data = self._data()
        number, complement = _PENDING.unpack(data[PENDING_AT:ERROR_AT].ljust(_PENDING.size, b"\0"))
        self.pending = number if number ^ complement == 0xFFFF_FFFF else 0
        page = self._page = self._parsed(data)
        self.owes_error = page.sync_error != 0 and parse(data).sync_error == 0
        return page

    def seen(self) -> Page:
        """Return the result of `read`, without the lock: a page during a write is invalid."""
        return self._parsed(self._data())

    def _data(self) -> bytes:
        return system.port.read(self.fd, CONTENT, 0)

    def _parsed(self, data: bytes) -> Page:
        page, tail = parse(data), self.tail
        if tail is not None and page.boot == self.boot_id:
            page = _joined(page, tail.found(), tail.synced())
        else:
            page = with_tail(page, self.path, self.boot_id)
        error = page.sync_error or _error_after(data) or (0 if tail is None else tail.error())
        return page._replace(magic=MAGIC, sync_error=error) if error else page

    def set_pending(self, number: int) -> None:
        """Under the append lock: mark that a producer's batch is being appended (number + 1 of its state), or none (0)."""
        if self.tail is not None:
            self.tail.tell_elsewhere()
        self.pending = number
        system.port.write(self.fd, _PENDING.pack(number, number ^ 0xFFFF_FFFF if number else 0), PENDING_AT)

    def write(self, page: Page) -> None:
        """Replace the page, under the append lock; it counts, and not the tail, until `tell`."""
        before, tail = self._page, self.tail
        if tail is not None:
            tail.tell_elsewhere()
        is_doubtful = before is None or self.boot_id != before.boot or self.boot_id != page.boot
        if is_doubtful or (before is not None and page.next_sequence < before.next_sequence):
            self._note_rewind()
        if page.sync_error:
            self.note_error(page.sync_error)
        elif before is not None and before.sync_error:  # all was written again
            self._store_error(0)
        self._page = page
        system.port.write(self.fd, pack(page), 0)

    def _note_rewind(self) -> None:
        """Under the append lock: mark that the journal's end may have moved back. Raises OSError if other handles might not notice."""
        before = self._page
        if self.tail is not None:
            self.tail.note_rewind()
        elif before is None or before.boot in (self.boot_id, NO_RUN):  # the tail of an earlier boot is invalid
            _void_tail(self.path)

    def note_error(self, error: int) -> None:
        """Store the errno of a failed flush immediately. Needs no lock. If a store fails, the caller's next steps do it."""
        with suppress(OSError, KvspoolError):
            self._store_error(error)

    def _store_error(self, error: int) -> None:
        """Store an errno after the page, and in the tail for appends in one step; 0: all was written again since."""
        tail = self.tail
        if tail is not None:
            tail.fail(error)
        try:
            system.port.write(self.fd, tails.error_word(_seed_of_run(self.boot_id), error).to_bytes(8, "little"), ERROR_AT)
        finally:
            if tail is None:
                _store_in_tail(self.path, lambda fd: {tails.ERROR: tails.error_word(_seed(self.boot_id, system.port.status(fd)), error)})

    def tell(self, base: int) -> bool:
        """Under the append lock, after success: copy the page to the tail. base: of the segment that is open for writing.

        Returns whether it did: False if the next append has to read the page.
        """
        page, tail = self._page, self.tail
        if page is None or tail is None or page.boot != self.boot_id or page.base != base:
            return False
        if page.end == NOT_BEGUN or page.sync_error or self.pending:
            return False
        end = (page.base, page.end, page.next_sequence, page.last_timestamp, page.synced_sequence)
        if tail.found() != end or not tail.is_valid():
            tail.tell(*end)
        return True

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep the file and its locks during the `with` block: `close` is postponed until its end. A file that is reopened meanwhile stays
        open, too. Raises Closed.
        """
        user = object()
        try:
            with self._guard:
                if self._is_closed:
                    raise Closed(f"{self.path} was closed by this handle; open the journal again")
                self._users[user] = []
            yield
        finally:
            try:
                self._let_go(user)
            except BaseException:  # from a signal handler, perhaps before it was done
                self._let_go(user)
                raise

    def _let_go(self, user: object) -> None:
        """End the effect of `held_open`; repeating this is harmless."""
        with self._guard:
            self._users.pop(user, None)
            if self._is_closed and not self._users:
                self._release()

    def close(self) -> None:
        """Release all locks, and close the file: at once, or at the end of the last flush under way."""
        if self._process != system.port.process_id():  # a forked child, where no other thread uses it
            self._guard, self._users = threading.RLock(), {}
        with self._guard:
            self._is_closed = True
            if not self._users:
                self._release()

    def _release(self) -> None:
        self._close_tail()
        locks.give_back_file(self._file, self._process)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # otherwise `__init__` failed before it opened it
            self._release()


NOTHING = Page(bytes(8), bytes(16), 0, 0, 0, NO_TIME, 0, 0, 0, 0, 0, 0, 0)


def pack(page: Page) -> bytes:
    """Return the bytes of a page, with its checksum."""
    return sealed(PAGE.pack(page))


def parse(data: bytes) -> Page:
    """Parse a page; NOTHING for invalid bytes."""
    if len(data) < PAGE.size or data[:8] != MAGIC:
        return NOTHING
    page = PAGE.unpack(data)
    return page if page.checksum == checksum(data[: PAGE.size - 4]) else NOTHING


def look(path: Path) -> Page:
    """Return the page of a read-only lock file, with the tail, and with the error of a flush; NOTHING if there is none, or it is of an
    earlier boot of the machine.
    """
    data, boot_id = content(path), system.port.boot_id()
    page = parse(data)
    return with_error(with_tail(page, path, boot_id) if page.boot == boot_id else NOTHING, data)


def with_tail(page: Page, path: Path, boot_id: bytes) -> Page:
    """Return the page of a lock file, updated from the tail of the same boot: the synced sequence, and in this boot, `boot_id`, the end of
    the journal.
    """
    if page is NOTHING:
        return page
    end, synced = _tail_at(path, page.boot)
    return _joined(page, end if page.boot == boot_id else None, synced)


def with_error(page: Page, data: bytes) -> Page:
    """Return the page of a lock file with this content, with the error of a flush that only the word after it has."""
    error = 0 if page.sync_error else _error_after(data)
    return page._replace(sync_error=error) if error else page


def _error_after(data: bytes) -> int:
    """Return the errno of a failed flush in this boot of the machine, from the content of a lock file; 0: none."""
    word = int.from_bytes(data[ERROR_AT:CONTENT], "little")
    return tails.error_in(_seed_of_run(system.port.boot_id()), word) if word else 0


def _seed_of_run(boot_id: bytes) -> int:
    return crc32c(0xFFFF_FFFF, boot_id)


def note_error(path: Path, error: int) -> None:
    """Do as `Control.note_error`, for a caller without an open lock file; not if the file is not writable."""
    with suppress(OSError, KvspoolError), closing(Control(path, None)) as held:
        held.note_error(error)


def flush_noted(flush: Callable[[], None], note: Callable[[int], None]) -> None:
    """Call `flush`. The errno of an OSError is stored before any other code runs, and the error raised."""
    try:
        flush()
    except OSError as error:
        number = error.errno or errno.EIO
        try:
            note(number)
        except BaseException:  # from a signal handler, perhaps before it was stored
            note(number)
            raise
        raise


def _joined(page: Page, tail: End | None, synced: int) -> Page:
    """Return the page with the end of the tail, unless that is an earlier one, and with the tail's synced sequence."""
    page = page._replace(synced_sequence=max(synced, page.synced_sequence))
    if tail is None or tail[:2] < (page.base, page.end):
        return page
    base, end, sequence, latest, _ = tail
    latest = max(latest, page.last_timestamp)
    return page._replace(base=base, end=end, next_sequence=sequence, last_timestamp=latest)


def tail_file(path: Path) -> Path:
    """Return the path of the tail's file for a lock file."""
    return path.with_name(f"{path.name}.tail")


def is_appended_to(path: Path, fd: int) -> bool:
    """Return whether a writer now holds the append lock of a lock file; `fd` is open to the file."""
    if not system.port.is_shared(fd, APPEND):
        return system.port.is_locked(fd, APPEND)
    slot = 0  # compiled writers share the gate while they are open: then the word counts
    with suppress(OSError), Descriptor(tail_file(path), os.O_RDONLY) as tail:
        slot = int.from_bytes(system.port.read(tail, 8, 8 * tails.LOCK), "little") & OWNER
    return slot != 0 and system.port.is_locked(fd, WRITER_SLOTS_AT + slot - 1)


def _void_tail(path: Path) -> None:
    """Do as `Tail.note_rewind` in the tail's file of a lock file, under the append lock."""

    def words(fd: int) -> dict[int, int]:
        rewinds = int.from_bytes(system.port.read(fd, 8, 8 * tails.REWINDS), "little")
        copies = (tails.COPIES, tails.COPIES + tails.COPY_WORDS)
        return {**{at + tails.CHECK: 0 for at in copies}, tails.REWINDS: (rewinds + tails.STEP) & tails.WORD}

    _store_in_tail(path, words)


def _store_in_tail(path: Path, words: Callable[[int], dict[int, int]]) -> None:
    """Store words, by their number, in the tail's file of a lock file, without mapping it; nothing if there is no file.

    words: returns them for the open file.
    """
    try:
        file = Descriptor(tail_file(path), os.O_RDWR)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # of a link: links are not followed
            return
        raise
    with file as fd:
        for at, word in words(fd).items():
            system.port.write(fd, word.to_bytes(8, "little"), 8 * at)


def _seed(boot_id: bytes, status: os.stat_result) -> int:
    return crc32c(0xFFFF_FFFF, boot_id + struct.pack("<2Q", status.st_ino, status.st_dev))


def _tail_at(path: Path, boot_id: bytes) -> tuple[End | None, int]:
    """Return the end in the tail of a lock file, without a lock, None if the page counts, or the end is unknown; and the synced sequence,
    which is valid in either case.
    """
    with suppress(OSError):
        for _ in range(TRIES):  # a writer may be changing it
            with Descriptor(tail_file(path), os.O_RDONLY) as fd:
                data, seed = system.port.read(fd, TAIL.size, 0), _seed(boot_id, system.port.status(fd))
            if len(data) < TAIL.size:
                return None, 0
            count = TAIL.unpack(data).state
            at = TAIL.offset("copies") + COPY.size * ((count >> 2) & 1)
            copy = COPY.unpack(data, at)
            if copy.check == tails.HIGH | crc32c(seed, data[at : at + COPY.offset("check")]):
                return None if count & tails.ELSEWHERE else copy[:5], copy.synced
    return None, 0


def last_word(path: Path) -> Page:
    """Do as `look`, also for an earlier boot of the machine."""
    data = content(path)
    return with_error(with_tail(parse(data), path, system.port.boot_id()), data)


def content(path: Path) -> bytes:
    """Return the content of a lock file; nothing if there is none, or it is not readable."""
    try:
        file = Descriptor(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return b""
    with file as fd:
        for _ in range(TRIES):  # a writer may be replacing the page
            data = system.port.read(fd, CONTENT, 0)
            if parse(data) is not NOTHING:
                break
    return data
