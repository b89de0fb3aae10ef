"""Seats: where a reader that follows one log sleeps on a POSIX semaphore, the quickest way to be woken.

A log has six. A reader takes one by its lock, makes a semaphore of its own with the log's id and the seat's number in its name, and
counts the seat's word up, so that writers who know an older semaphore open the new one. Who finds no seat free sleeps on inotify, as
who waits for many logs does.

A reader that is killed leaves its semaphore behind; the next one in that seat replaces it. So there are never more than six for a log. A
post that goes astray costs latency, never a record: no sleep is longer than `wakeups.POLL`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import posix_ipc

from kvspool import forks, system
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool.spool.pair import Pair


def take(pair: Pair) -> Seat | None:
    """Return a free seat of a log; None if there is none, or semaphores can't be had here."""
    log_id = pair.header.log_id
    fd = pair.open_lock()
    try:
        mode = system.port.status(fd).st_mode
        if mode & 0o022:
            # Writers of other users could not open a semaphore of ours, whatever its mode: the umask applies to it.
            system.port.close(fd)
            return None
        for number in format.SEATS:
            if system.port.try_lock(fd, format.SEAT_LOCKS + number):
                semaphore = system.port.make_semaphore(_name(log_id, number), 0o666 & mode)
                words = pair.control.cast("Q")
                words[format.SEAT_WORDS + number] = (words[format.SEAT_WORDS + number] + 1) % (1 << 64)
                return Seat(number, _name(log_id, number), fd, semaphore)
    except (posix_ipc.Error, OSError):
        pass  # no room or no right for semaphores: inotify serves as well
    system.port.close(fd)
    return None


class Seat:
    """A seat that was taken; its lock, held by a descriptor of its own, is what makes it ours."""

    def __init__(self, number: int, name: str, fd: int, semaphore: posix_ipc.Semaphore) -> None:
        self.number = number
        self.is_ours = True
        self._is_asleep = False
        self._name = name
        self._fd = fd
        self._semaphore = semaphore
        forks.register(self)

    def wait(self, timeout: float) -> None:
        """Sleep until a writer posts, `timeout` seconds at most."""
        self._is_asleep = True
        try:
            system.port.wait_semaphore(self._semaphore, timeout)
        finally:
            self._is_asleep = False
            if self._fd < 0:
                self._semaphore.close()

    def leave(self) -> None:
        """Give the seat back, its semaphore removed. Another thread that sleeps there is woken."""
        if self._fd < 0:
            return
        if self.is_ours:
            system.port.remove_semaphore(self._name)
        fd, self._fd = self._fd, -1  # before it is closed: one that fails has closed all the same, and its number is soon another file's
        try:
            system.port.close(fd)
        finally:
            if self._is_asleep and self.is_ours:
                # Its memory must not go while the other thread looks at it: that one closes it when it is awake.
                self._semaphore.release()
            else:
                self._semaphore.close()

    def forked(self) -> None:
        """In a forked child: the seat is the parent's; only our copy of its descriptor goes."""
        self.is_ours = False
        self.leave()

    def __del__(self) -> None:
        self.leave()


class Bells:
    """A writer's side: the semaphores of the seats that asked to be woken."""

    def __init__(self, log_id: bytes, control: memoryview) -> None:
        self._log_id = log_id
        self._words = control.cast("Q")
        self._known: dict[int, tuple[int, posix_ipc.Semaphore | None]] = {}

    def post(self, seat: int) -> None:
        """Wake the reader in a seat, if it is still there."""
        taken = self._words[format.SEAT_WORDS + seat]
        known, semaphore = self._known.get(seat, (None, None))
        if known != taken:
            if semaphore is not None:
                semaphore.close()
            semaphore = system.port.open_semaphore(_name(self._log_id, seat))
            self._known[seat] = taken, semaphore
        if semaphore is not None:
            semaphore.release()


    def close(self) -> None:
        """Let go of the semaphores; they stay with those who sleep on them."""
        while self._known:
            _, semaphore = self._known.popitem()[1]
            if semaphore is not None:
                semaphore.close()


def _name(log_id: bytes, seat: int) -> str:
    return f"/kvspool.{log_id.hex()}.{seat}"
