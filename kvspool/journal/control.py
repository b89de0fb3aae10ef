"""The lock file of a journal: who may write, and where the journal ends.

**Locks.** The program whose format it is holds the whole file by `flock` for as long as it writes. So does each of our handles that
has appended, but shared: many of ours write at once, and the original and ours exclude each other. Among ours one byte is the
append lock, another one the lock of a flush.

**Page.** The file's content is ours (its size is 0 for the original): where the last segment ends and which sequence comes next, so that
a writer goes on without a look at the segments. It is read and written with `pread` and `pwrite` under the append lock, never mapped: it
is in other programs' reach. It is believed as far as it agrees with the file that it speaks of, in the same run of the machine; otherwise
the segments say what is true.

**Tail.** Where the journal ends stands in a file of our own beside it, too, which all writers map: see `tail_py`. An append in one step
changes that one alone. Its first word is the append lock, whose locked bytes lie in the lock file. The byte that older versions lock for
each append is the lock's gate, so they and we exclude each other. `read` returns what both files say together; `write` says in the tail
that the page counts, until `tell` takes that back. Where no such file can be mapped, each append locks the byte, and writes the page.

A writer locks, shared, one more byte, whose place is made of the number of the tail's file. So nobody uses another file in its place, when
it was removed, or replaced, before the last one who has it mapped closes it.

**An error of a flush** must not get lost: the kernel reports it once. So it is stored at once, without a lock, behind the page and in the
tail's file. All who read the page take it from there (`note_error`); the next writer with the append lock writes it into the page.

**A file that was removed.** The original removes the file when it closes. So whoever has locked it looks whether its name still stands
for it, and at each append whether it still has one.
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
from kvspool.engine.layout import Layout
from kvspool.errors import Closed, KvspoolError, LockTimeout, LogVanished, NotAFile
from kvspool.kernel import tail_py as tails
from kvspool.kernel.frames import crc32c
from kvspool.kernel.group import FlushGroup
from kvspool.kernel.lock import AppendLock
from kvspool.kernel.lock_py import SLOT, SLOTS_AT
from kvspool.kernel.tail import Tail
from kvspool.record import NO_TIME
from kvspool.system import filesystems, holders
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

MAGIC = b"kvJRNL01"
APPEND, SYNC, ADMIN = 1 << 20, (1 << 20) + 1, (1 << 20) + 2  # the bytes that are locked: far behind the content, so that it may grow
USED_AT, USED = 1 << 40, 1 << 40  # of these bytes each writer locks one, shared: that of the tail's file
TAIL_BYTES = 4096  # of the tail's file
UNFIT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENODEV, errno.EOPNOTSUPP)  # of who can have no tail
TRIES = 5
NOT_BEGUN = (1 << 64) - 1  # `end`, while a new segment is being made
End = tuple[int, int, int, int, int]  # what a tail says: base, end, next sequence, latest timestamp, synced sequence


class Page(NamedTuple):
    """What the writers tell each other. All of it is zero in a file that the original has made."""

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
PENDING_AT = 112  # behind the page: number + 1 of the account of a batch that is being appended (u32), and its complement; zeros: none
_PENDING = struct.Struct("<2I")
ERROR_AT = 120  # behind that: errno of a flush that failed in this run of the machine, as the word that `error_word` returns; 0: none
CONTENT = 128  # bytes of the file
NO_RUN = bytes(16)  # `boot` of a page that is not to be believed


class Control(Handle):
    """One handle's view of the lock file. The descriptor is its own, is never inherited, and never mapped."""

    def __init__(self, path: Path, mode: int | None) -> None:
        """Open the lock file for writing; `mode`: make it, with these permission bits, if it isn't there. Raises the system's OSError."""
        self.path = path
        self._mode = mode
        self._process = system.port.process_id()
        self.holder = holders.ours()
        self.boot_id = system.port.boot_id()
        self.pending = 0  # as it was at the last `read`
        self.owes_error = False  # whether the page did not say then that a flush has failed
        self.renewals = 0  # how often the file was another one, since somebody had removed it
        self._must_enter = False  # a new file took the place of one that was removed, and the original may write to it
        self._page: Page | None = None  # as it was read or written last
        self.tail: Tail | None = None  # once the append lock was taken, and if a tail can be mapped
        self.group: FlushGroup | None = None  # of those who wait for a flush, with the tail
        self._has_looked = False  # whether it can
        self._guard = threading.RLock()
        self._users: dict[object, list[Descriptor]] = {}  # flushes under way, with the files that they may use still
        self._is_closed = False
        self._file = self._open()

    @property
    def fd(self) -> int:
        """Return the number of the open file. Raises Closed."""
        return self._file.number

    def _open(self) -> Descriptor:
        flags = os.O_RDWR | (os.O_CREAT if self._mode is not None else 0)
        try:
            return Descriptor(self.path, flags, self._mode or 0)
        except FileNotFoundError:
            raise LogVanished(f"{self.path.parent} is gone; open the path again if it exists") from None

    def enter(self, timeout: float) -> None:
        """Shut the original's writer out, together with all of ours. Raises LockTimeout if it is in."""
        locks.wait_for(self._try_enter, timeout, lambda: f"a writer of another program holds {self.path}; close it")
        self._must_enter = False

    def _try_enter(self) -> bool | None:
        if not system.port.try_lock_file(self.fd, shared=True):
            return None
        if self.is_in_place():
            return True
        self._renew()  # removed, or replaced, by the one who had it before
        return None

    def _renew(self) -> None:
        """Open the file that has the name now; one of the two is open at any moment, also after an exception."""
        file = self._open()
        self._must_enter = True
        self._close_tail()
        with self._guard:
            self._file, file = file, self._file
            for kept in self._users.values():
                kept.append(file)  # it closes with the last of them
            if not self._users:
                file.close()

    def is_in_place(self) -> bool:
        """Return whether the name stands for the file that we have open."""
        ours, there = system.port.status(self.fd), system.port.look_up(self.path)
        return there is not None and (ours.st_ino, ours.st_dev) == (there.st_ino, there.st_dev)

    def is_gone(self) -> bool:
        """Return whether no name stands for the file any more."""
        return system.port.status(self.fd).st_nlink == 0

    def lock(self, timeout: float, byte: int = APPEND) -> None:
        """Take one of the locks among our own writers. LockTimeout names who appended last."""
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
        """Release one of the locks, whether it is held or not. An append that another thread is in the middle of keeps its own."""
        if byte == APPEND and self.tail is not None:
            if self.tail.lock.taken_by is self:
                self.tail.lock.free()
        else:
            system.port.unlock(self.fd, byte)

    def who(self) -> str:
        """Say who appended last, for who waits for the append lock."""
        words = (0, 0, 0, 0) if self.tail is None else self.tail.signed_by()
        if not words[0]:
            page = self.seen()
            words = (page.holder_pid, page.holder_start, page.holder_boot, page.holder_namespace)
        who = holders.describe(words) if words[0] else "another process"
        return f"{who} has appended to {self.path.parent} last, and may hold its lock"

    def sign_flush(self) -> None:
        """Note that this process leads a flush, for those who wait for it."""
        tail = self.tail  # another thread may open the lock file anew
        if tail is not None:
            tail.sign(tails.LEADER)

    def flusher(self) -> str:
        """Say who led the last flush, for those who wait for one."""
        tail = self.tail
        words = (0, 0, 0, 0) if tail is None else tail.signed_by(tails.LEADER)
        who = holders.describe(words) if words[0] else "another process"
        return f"{who} has led the last flush, and may hold it"

    # The tail.

    def _share_tail(self, timeout: float) -> tuple[Tail, FlushGroup] | None:
        """Return the tail that all writers of this lock file use; None where there can be none. Raises LockTimeout if others use one whose
        file was removed."""
        path = tail_file(self.path)
        try:
            name = filesystems.of(path.parent)
            if name not in filesystems.SAFE or name in filesystems.KILLING:
                return None
            return locks.wait_for(lambda: self._try_tail(path), timeout, lambda: f"writers use a file that {path} no longer is; close them")
        except (LockTimeout, NotAFile):
            raise
        except OSError as error:
            if error.errno in UNFIT:
                return None
            raise

    def _try_tail(self, path: Path) -> tuple[Tail, FlushGroup] | None:
        with Descriptor(path, os.O_RDWR | os.O_CREAT, 0o600 if self._mode is None else self._mode) as fd:
            status = system.port.status(fd)
            if status.st_size < TAIL_BYTES:
                system.port.allocate(fd, TAIL_BYTES)
            byte = USED_AT + (status.st_ino * 0x9E3779B1 ^ status.st_dev) % USED
            try:
                is_ours = system.port.try_share(self.fd, byte, 1) and self._is_only_tail(byte, path, status)
                memory = memoryview(system.port.map(fd, TAIL_BYTES, writable=True)) if is_ours else None
            except BaseException:
                system.port.unlock(self.fd, byte)
                raise
        if memory is None:
            system.port.unlock(self.fd, byte)
            return None
        lock = AppendLock(memory, tails.LOCK, self.fd, int.from_bytes(system.port.random(8), "little"), APPEND)
        holder = memoryview(struct.pack("<4Q", *self.holder))
        tail = Tail(memory, lock, self.fd, _seed(self.boot_id, status), holder)
        group = FlushGroup(tail, memory, tails.GROUP, SYNC)
        group.lock_fd = self.fd
        return tail, group

    def _is_only_tail(self, byte: int, path: Path, status: os.stat_result) -> bool:
        """Return whether nobody uses a tail in another file, and this one lies at its path."""
        there = system.port.look_up(path)
        is_there = there is not None and (there.st_ino, there.st_dev) == (status.st_ino, status.st_dev)
        below = system.port.locked_from(self.fd, USED_AT, byte - USED_AT) if byte > USED_AT else -1
        behind = system.port.locked_from(self.fd, byte + 1, USED_AT + USED - byte)
        return is_there and below < 0 and behind < 0

    def _close_tail(self) -> None:
        tail, group = self.tail, self.group
        self.tail, self.group, self._has_looked = None, None, False
        if group is not None:
            group.close()
        if tail is not None:
            tail.close()

    # The page.

    def read(self) -> Page:
        """Under the append lock: return the page, with what the tail says; one that is all zero if there is none that can be believed."""
        data = self._data()
        number, complement = _PENDING.unpack(data[PENDING_AT:ERROR_AT].ljust(_PENDING.size, b"\0"))
        self.pending = number if number ^ complement == 0xFFFF_FFFF else 0
        page = self._page = self._parsed(data)
        self.owes_error = page.sync_error != 0 and parse(data).sync_error == 0
        return page

    def seen(self) -> Page:
        """Return what `read` does, without the lock: a page that is being written is one that can't be believed."""
        return self._parsed(self._data())

    def _data(self) -> bytes:
        return system.port.read(self.fd, CONTENT, 0)

    def _parsed(self, data: bytes) -> Page:
        page, tail = parse(data), self.tail
        if tail is not None and page.boot == self.boot_id:
            page = _joined(page, tail.found(), tail.synced())
        else:
            page = with_tail(page, self.path, self.boot_id)
        error = page.sync_error or _error_behind(data) or (0 if tail is None else tail.error())
        return page._replace(magic=MAGIC, sync_error=error) if error else page

    def set_pending(self, number: int) -> None:
        """Under the append lock: say that a producer's batch is being appended (number + 1 of its account), or that none is (0)."""
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
            self._turn_back()
        if page.sync_error:
            self.note_error(page.sync_error)
        elif before is not None and before.sync_error:  # all was written anew
            self._store_error(0)
        self._page = page
        system.port.write(self.fd, pack(page), 0)

    def _turn_back(self) -> None:
        """Under the append lock: say that the journal's end may have gone back. Raises OSError if others might not learn that."""
        before = self._page
        if self.tail is not None:
            self.tail.turn_back()
        elif before is None or before.boot in (self.boot_id, NO_RUN):  # the tail of an earlier run counts for nothing
            _void_tail(self.path)

    def note_error(self, error: int) -> None:
        """Say at once that a flush has failed with this errno. Needs no lock. What can't be written is left to the caller's next steps."""
        with suppress(OSError, KvspoolError):
            self._store_error(error)

    def _store_error(self, error: int) -> None:
        """Store an errno behind the page, and for those who append in one step; 0: all was written anew since."""
        tail = self.tail
        if tail is not None:
            tail.fail(error)
        try:
            system.port.write(self.fd, tails.error_word(_seed_of_run(self.boot_id), error).to_bytes(8, "little"), ERROR_AT)
        finally:
            if tail is None:
                _store_in_tail(self.path, lambda fd: {tails.ERROR: tails.error_word(_seed(self.boot_id, system.port.status(fd)), error)})

    def tell(self, base: int) -> bool:
        """Under the append lock, when all is in order: let the tail say what the page does. base: of the segment that is open for writing.

        Returns whether it does: False where the next append has to look at the page.
        """
        page, tail = self._page, self.tail
        if page is None or tail is None or page.boot != self.boot_id or page.base != base:
            return False
        if page.end == NOT_BEGUN or page.sync_error or self.pending:
            return False
        end = (page.base, page.end, page.next_sequence, page.last_timestamp, page.synced_sequence)
        if tail.found() != end or not tail.is_told():
            tail.tell(*end)
        return True

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep the file and its locks inside the `with` block: `close` is put off until its end. A file that is opened anew meanwhile
        stays open, too. Raises Closed."""
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
            except BaseException:  # out of a signal handler, perhaps before it was done
                self._let_go(user)
                raise

    def _let_go(self, user: object) -> None:
        """End what `held_open` has begun, unless that was done."""
        with self._guard:
            self._users.pop(user, None)
            if self._is_closed and not self._users:
                self._release()

    def close(self) -> None:
        """Release all locks, and close the file: at once, or at the end of the last flush under way."""
        if self._process != system.port.process_id():  # a forked child, where nobody else uses it
            self._guard, self._users = threading.RLock(), {}
        with self._guard:
            self._is_closed = True
            if not self._users:
                self._release()

    def _release(self) -> None:
        self._close_tail()
        locks.give_back_file(self._file, self._process)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # otherwise `__init__` did not come so far as to open it
            self._release()


NOTHING = Page(bytes(8), bytes(16), 0, 0, 0, NO_TIME, 0, 0, 0, 0, 0, 0, 0)


def checksum(data: bytes) -> int:
    """Return the CRC32C of some bytes."""
    return crc32c(0xFFFF_FFFF, data) ^ 0xFFFF_FFFF


def pack(page: Page) -> bytes:
    """Return the bytes of a page, with its checksum."""
    data = PAGE.pack(page)[:-4]
    return data + checksum(data).to_bytes(4, "little")


def parse(data: bytes) -> Page:
    """Return the page that some bytes are; NOTHING for bytes that are none."""
    if len(data) < PAGE.size or data[:8] != MAGIC:
        return NOTHING
    page = PAGE.unpack(data)
    return page if page.checksum == checksum(data[: PAGE.size - 4]) else NOTHING


def look(path: Path) -> Page:
    """Return what a lock file that one may only read says, with the tail, and with the error of a flush; NOTHING if there is none, or it is
    of an earlier run of the machine."""
    data, boot_id = content(path), system.port.boot_id()
    page = parse(data)
    return with_error(with_tail(page, path, boot_id) if page.boot == boot_id else NOTHING, data)


def with_tail(page: Page, path: Path, boot_id: bytes) -> Page:
    """Return the page of a lock file, and in it what the tail of the same run of the machine says: how far all is on disk, and in this run,
    `boot_id`, where the journal ends."""
    if page is NOTHING:
        return page
    end, synced = _tail_at(path, page.boot)
    return _joined(page, end if page.boot == boot_id else None, synced)


def with_error(page: Page, data: bytes) -> Page:
    """Return the page of a lock file with this content, and in it the error of a flush that only the word behind it says."""
    error = 0 if page.sync_error else _error_behind(data)
    return page._replace(sync_error=error) if error else page


def _error_behind(data: bytes) -> int:
    """Return the errno of a flush that has failed in this run of the machine, as the content of a lock file says it; 0: none."""
    word = int.from_bytes(data[ERROR_AT:CONTENT], "little")
    return tails.error_in(_seed_of_run(system.port.boot_id()), word) if word else 0


def _seed_of_run(boot_id: bytes) -> int:
    return crc32c(0xFFFF_FFFF, boot_id)


def note_error(path: Path, error: int) -> None:
    """As `Control.note_error`, for the caller that has no lock file open; not if it may not be written to."""
    with suppress(OSError, KvspoolError), closing(Control(path, None)) as held:
        held.note_error(error)


def flush_noted(flush: Callable[[], None], note: Callable[[int], None]) -> None:
    """Call `flush`. An OSError is noted, with its errno, before any other code runs, and raised."""
    try:
        flush()
    except OSError as error:
        number = error.errno or errno.EIO
        try:
            note(number)
        except BaseException:  # out of a signal handler, perhaps before it was noted
            note(number)
            raise
        raise


def _joined(page: Page, tail: End | None, synced: int) -> Page:
    """Return the page with the end that the tail says, unless it is an earlier one, and with how far all is on disk by then."""
    page = page._replace(synced_sequence=max(synced, page.synced_sequence))
    if tail is None or tail[:2] < (page.base, page.end):
        return page
    base, end, sequence, latest, _ = tail
    latest = max(latest, page.last_timestamp)
    return page._replace(base=base, end=end, next_sequence=sequence, last_timestamp=latest)


def tail_file(path: Path) -> Path:
    """Return the file of the tail that belongs to a lock file."""
    return path.with_name(f"{path.name}.tail")


def is_appended_to(path: Path, fd: int) -> bool:
    """Return whether a writer has the append lock of a lock file at this moment; `fd` is open to the file."""
    if not system.port.is_shared(fd, APPEND):
        return system.port.is_locked(fd, APPEND)
    slot = 0  # compiled writers have a share of the gate as long as they are open: the word counts
    with suppress(OSError), Descriptor(tail_file(path), os.O_RDONLY) as tail:
        slot = int.from_bytes(system.port.read(tail, 8, 8 * tails.LOCK), "little") & SLOT
    return slot != 0 and system.port.is_locked(fd, SLOTS_AT + slot - 1)


def _void_tail(path: Path) -> None:
    """Do in the tail's file of a lock file, under the append lock, what `Tail.turn_back` does."""

    def words(fd: int) -> dict[int, int]:
        turns = int.from_bytes(system.port.read(fd, 8, 8 * tails.TURNS), "little")
        copies = (tails.COPIES, tails.COPIES + tails.COPY_WORDS)
        return {**{at + tails.CHECK: 0 for at in copies}, tails.TURNS: (turns + tails.STEP) & tails.WORD}

    _store_in_tail(path, words)


def _store_in_tail(path: Path, words: Callable[[int], dict[int, int]]) -> None:
    """Store words, by their number, in the tail's file of a lock file, without mapping it; nothing if no file is there.

    words: returns them for the open file.
    """
    try:
        file = Descriptor(tail_file(path), os.O_RDWR)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):  # of a link: nobody follows it
            return
        raise
    with file as fd:
        for at, word in words(fd).items():
            system.port.write(fd, word.to_bytes(8, "little"), 8 * at)


def _seed(boot_id: bytes, status: os.stat_result) -> int:
    return crc32c(0xFFFF_FFFF, boot_id + struct.pack("<2Q", status.st_ino, status.st_dev))


def _tail_at(path: Path, boot_id: bytes) -> tuple[End | None, int]:
    """Return what the tail of a lock file says, without a lock, None if the page counts, or that can't be known; and the sequence below
    which all is on disk, which it says in either case."""
    with suppress(OSError):
        for _ in range(TRIES):  # a writer may be changing it
            with Descriptor(tail_file(path), os.O_RDONLY) as fd:
                data, seed = system.port.read(fd, 8 * tails.WORDS, 0), _seed(boot_id, system.port.status(fd))
            if len(data) < 8 * tails.WORDS:
                return None, 0
            count = int.from_bytes(data[8 * tails.COUNT : 8 * tails.COUNT + 8], "little")
            at = 8 * (tails.COPIES + tails.COPY_WORDS * ((count >> 2) & 1))
            copy = data[at : at + 8 * tails.CHECK]
            check = int.from_bytes(data[at + 8 * tails.CHECK : at + 8 * tails.CHECK + 8], "little")
            if check == tails.HIGH | crc32c(seed, copy):
                base, end, sequence, latest, synced = struct.unpack("<3QqQ", copy)
                return None if count & tails.ELSEWHERE else (base, end, sequence, latest, synced), synced
    return None, 0


def last_word(path: Path) -> Page:
    """As `look`, also of an earlier run of the machine."""
    data = content(path)
    return with_error(with_tail(parse(data), path, system.port.boot_id()), data)


def content(path: Path) -> bytes:
    """Return the content of a lock file; nothing if there is none, or it may not be read."""
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
