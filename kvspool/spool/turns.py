"""Whose turn it is to append: who waits for the append lock asks for it, and is woken when it was released.

A writer may keep the lock between its appends (`writer`). So a waiter sets the word `asked`, which the holder looks at after each append,
and sleeps on the word `released`. Both are hints. A word that is set for no reason costs one hand-over; a wake-up that is lost costs a
waiter two milliseconds, after which it asks anew. Only the lock decides.
"""

from __future__ import annotations

from collections.abc import Callable

from kvspool import locks, system
from kvspool._frames import Ring
from kvspool.descriptor import Descriptor
from kvspool.spool import format

PATIENCE = 200e-6  # the pause, in seconds, at which a waiter begins to ask: who holds the lock for one call needs less
LONGEST = int(locks.LONGEST_PAUSE * 1e9)  # ns of one sleep: a holder that was killed wakes nobody


class Turn:
    """One wait for the append lock of a log."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._seen: int | None = None

    def rest(self, pause: float) -> None:
        """Between two attempts to take the lock: sleep for the `pause`; after some of them ask for it, and sleep until it was released."""
        if pause < PATIENCE:
            system.port.sleep(pause)
        else:
            if self._seen is not None:
                self._ring.wait_for_release(self._seen, LONGEST)
            self._seen = self._ring.ask()


class held(locks.held):
    """Hold the append lock of a descriptor inside the `with` block, and wake who asked for it meanwhile; see `locks.held`."""

    def __init__(self, file: Descriptor, ring: Ring, timeout: float, holder: Callable[[], str]) -> None:
        super().__init__(file, format.APPEND_LOCK, timeout, holder, Turn(ring).rest)
        self._ring = ring

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._ring.pass_on()
