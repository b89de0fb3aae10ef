"""Seats: where a reader that follows one log sleeps on a POSIX semaphore, the quickest way to be woken.

A log has six. A reader takes one by its lock, makes a semaphore of its own with the log's id and the seat's number in its name, and
counts the seat's word up, so that writers who know an older semaphore open the new one. Who finds no seat free sleeps on inotify, as
who waits for many logs does.

A reader that is killed leaves its semaphore behind. Its lock is free then, and whoever takes a seat of that log next removes it, as
`clear` does: under that lock, since a semaphore belongs to who holds its seat. So there are never more than six for a log. A post that
goes astray costs latency, never a record: no sleep is longer than `wakeups.POLL`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import posix_ipc

from kvspool import forks, locks, system
from kvspool._frames import Bell
from kvspool.descriptor import Descriptor
from kvspool.handles import Handle
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool.spool.pair import Pair


def take(pair: Pair) -> Seat | None:
    """Return a free seat of a log; None if there is none, if the log was closed, or if semaphores can't be had here."""
    with pair.in_use() as is_open:
        return _take(pair) if is_open else None


def _take(pair: Pair) -> Seat | None:
    log_id = pair.header.log_id
    file = pair.open_lock()
    try:
        fd = file.number
        mode = system.port.status(fd).st_mode
        # Writers of other users could not open a semaphore of ours, whatever its mode: the umask applies to it.
        number = 0 if mode & 0o022 else _lock_free(fd)
        if number:
            _clear(fd, log_id, number)
            semaphore = system.port.make_semaphore(_name(log_id, number), 0o666 & mode)
            words = pair.control.cast("Q")
            words[format.SEAT_WORDS + number] = (words[format.SEAT_WORDS + number] + 1) % (1 << 64)
            return Seat(file, _name(log_id, number), Bell(semaphore, number, 0))
    except (posix_ipc.Error, OSError):
        pass  # no room or no right for semaphores: inotify serves as well
    file.close()
    return None


def clear(pair: Pair) -> list[int]:
    """Remove the semaphores that killed readers left behind, and return their seats. Raises LogVanished, OSError."""
    with pair.open_lock() as fd:
        return _clear(fd, pair.header.log_id)


def _lock_free(fd: int) -> int:
    """Return the number of a free seat, locked; 0 if there is none."""
    return next((number for number in format.SEATS if system.port.try_lock(fd, format.SEAT_LOCKS + number)), 0)


def _clear(fd: int, log_id: bytes, ours: int = 0) -> list[int]:
    """Remove the semaphores of free seats; `ours` is locked through the same descriptor, and stays so."""
    left = []
    for number in format.SEATS:
        if number != ours and system.port.try_lock(fd, format.SEAT_LOCKS + number):
            with suppress(posix_ipc.PermissionsError):  # another user's
                if system.port.remove_semaphore(_name(log_id, number)):
                    left.append(number)
            system.port.unlock(fd, format.SEAT_LOCKS + number)
    return left


class Seat(Handle):
    """A seat that was taken; its lock, held by a descriptor of its own, is what makes it ours."""

    _file: Descriptor | None = None

    def __init__(self, file: Descriptor, name: str, bell: Bell) -> None:
        self.number = bell.number
        self.bell = bell
        self.is_ours = True
        self._name = name
        self._file = file
        self._process = system.port.process_id()
        forks.register(self)

    def wake(self) -> None:
        """Wake the thread that sleeps in the seat."""
        self.bell.ring()

    def leave(self) -> None:
        """Give the seat back, its semaphore removed. Another thread that sleeps there is woken."""
        if self._file is None or self._file.is_closed:
            return
        if self.is_ours:
            system.port.remove_semaphore(self._name)
        try:
            locks.give_back(self._file, self._process)
        finally:
            self.bell.close()

    def forked(self) -> None:
        """In a forked child: the seat is the parent's; only our copy of its descriptor goes."""
        self.is_ours = False
        self.bell.sleepers = 0  # they are threads of the parent
        self.leave()

    def __del__(self) -> None:
        if hasattr(self, "_process"):  # otherwise an exception out of a signal handler cut `__init__` off
            self.leave()


def wake(pair: Pair, wanted: int, bells: list[Bell | None]) -> None:
    """Wake who asked for it: `wanted` has a byte for each seat, and the lowest one for who watches by inotify."""
    if wanted >> 8:
        ring(pair, wanted, bells)
    if wanted & 0xFF:
        pair.wake()


def ring(pair: Pair, wanted: int, bells: list[Bell | None]) -> None:
    """Wake who sleeps in the seats whose byte of `wanted` is set; `bells` keeps what a writer knows of each seat, for the next time."""
    words = pair.control.cast("Q")
    for number in format.SEATS:
        if wanted >> (8 * number) & 0xFF:
            taken = words[format.SEAT_WORDS + number]
            bell = bells[number]
            if bell is None or bell.taken != taken:
                bells[number] = None
                semaphore = system.port.open_semaphore(_name(pair.header.log_id, number))
                bell = bells[number] = None if semaphore is None else Bell(semaphore, number, taken)
            if bell is not None:
                bell.ring()


def _name(log_id: bytes, seat: int) -> str:
    return f"/kvspool.{log_id.hex()}.{seat}"
