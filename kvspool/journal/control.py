"""The lock file of a journal: who may write, and where the journal ends.

**Locks.** The program whose format it is holds the whole file by `flock` for as long as it writes. So does each of our handles that
has appended, but shared: many of ours write at once, and the original and ours exclude each other. Among ours one byte is the
append lock, another one the lock of a flush.

**Page.** The file's content is ours (its size is 0 for the original): where the last segment ends and which sequence comes next, so that
a writer goes on without a look at the segments. It is read and written with `pread` and `pwrite` under the append lock, never mapped: it
is in other programs' reach. It is believed as far as it agrees with the file that it speaks of, in the same run of the machine; otherwise
the segments say what is true.

**A file that was removed.** The original removes the file when it closes. So whoever has locked it looks whether its name still stands
for it, and at each append whether it still has one.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Annotated, NamedTuple

from kvspool import holders, locks, system
from kvspool._frames import crc32c
from kvspool.descriptor import Descriptor
from kvspool.errors import LogVanished
from kvspool.handles import Handle
from kvspool.layout import Layout
from kvspool.record import NO_TIME

MAGIC = b"kvJRNL01"
APPEND, SYNC, ADMIN = 1 << 20, (1 << 20) + 1, (1 << 20) + 2  # the bytes that are locked: far behind the content, so that it may grow
TRIES = 5
NOT_BEGUN = (1 << 64) - 1  # `end`, while a new segment is being made


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
        self.renewals = 0  # how often the file was another one, since somebody had removed it
        self._must_enter = False  # a new file took the place of one that was removed, and the original may write to it
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
        self._file, file = file, self._file
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
            locks.acquire(self.fd, byte, timeout, self._who)
            while byte == APPEND and (self._must_enter or system.port.status(self.fd).st_nlink == 0):  # removed: others lock another one
                self.renewals += 1
                self._renew()
                self.enter(timeout)
                locks.acquire(self.fd, byte, timeout, self._who)
        except BaseException:
            self.unlock(byte)
            raise

    def unlock(self, byte: int = APPEND) -> None:
        """Release one of the locks, whether it is held or not."""
        system.port.unlock(self.fd, byte)

    def _who(self) -> str:
        page = self.read()
        words = (page.holder_pid, page.holder_start, page.holder_boot, page.holder_namespace)
        who = holders.describe(words) if page.holder_pid else "another process"
        return f"{who} has appended to {self.path.parent} last, and may hold its lock"

    def read(self) -> Page:
        """Return the page; one that is all zero if there is none that can be believed."""
        data = system.port.read(self.fd, PENDING_AT + _PENDING.size, 0)
        number, complement = _PENDING.unpack(data[PENDING_AT:].ljust(_PENDING.size, b"\0"))
        self.pending = number if number ^ complement == 0xFFFF_FFFF else 0
        return parse(data)

    def set_pending(self, number: int) -> None:
        """Under the append lock: say that a producer's batch is being appended (number + 1 of its account), or that none is (0)."""
        system.port.write(self.fd, _PENDING.pack(number, number ^ 0xFFFF_FFFF if number else 0), PENDING_AT)

    def write(self, page: Page) -> None:
        """Replace the page, under the append lock."""
        system.port.write(self.fd, pack(page), 0)

    def close(self) -> None:
        """Let go of all locks."""
        locks.give_back_file(self._file, self._process)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # otherwise `__init__` did not come so far as to open it
            self.close()


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
    """Return the page of a lock file that one may only read; NOTHING if there is none, or it is not of this run of the machine."""
    page = last_word(path)
    return page if page.boot == system.port.boot_id() else NOTHING


def last_word(path: Path) -> Page:
    """As `look`, also of an earlier run of the machine."""
    try:
        file = Descriptor(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return NOTHING
    with file as fd:
        for _ in range(TRIES):  # a writer may be replacing it
            page = parse(system.port.read(fd, PAGE.size, 0))
            if page is not NOTHING:
                break
    return page
