"""How many calls a hub has at one time: counted from a call's headers on, before its first message is read.

Arrow Flight gives each call a thread, and a call of DoExchange, DoPut or Handshake keeps it while its client sends no message. So such
calls are counted for each principal as soon as their token is known, and all calls of the hub together. Calls beyond a bound are refused
in the thread that they got, which ends then. `Threads` has the kernel refuse the thread itself. A principal of whom many are refused
within a second sends a flood: its connections are cut.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable

from hub.errors import HubError, HubFull, QuotaExceeded
from hub.security.quotas import LATER
from kvspool import system
from kvspool.handles import Handle

MOST = 2048  # calls of a hub at one time
MOST_OPENING = 256  # calls of one principal whose first message was not read yet
FLOOD = 1000  # calls of one principal that are refused within `WINDOW`
WINDOW = 1.0  # seconds
MANY = 50  # refused calls within `WINDOW`, after which threads that wait for the interpreter leave the one that has it alone:
CALM = 0.1  # seconds; hundreds that ask for it every 5 ms leave no processor for it
_USUAL = sys.getswitchinterval()
_WAITING = frozenset({"DO_EXCHANGE", "DO_PUT", "HANDSHAKE"})  # methods whose handler reads the first message itself


class Calls(Handle):
    """Counts the calls of a hub. Thread-safe.

    changed: called with their number whenever it changes, under the lock. flooded: called with the name of a principal that sends a flood.
    Both must be quick.
    """

    def __init__(
        self, changed: Callable[[int], None] = lambda count: None, flooded: Callable[[str], None] = lambda principal: None
    ) -> None:
        self._changed = changed
        self._flooded = flooded
        self._refused: Counter[str] = Counter()
        self._window_ends = 0.0
        self._is_calm = False  # the interpreter's interval was changed for a flood
        self._opening: Counter[str] = Counter()
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def opening(self) -> int:
        """Return how many calls wait for their first message."""
        return self._opening.total()

    def begin(self, method: str, principal: str) -> Call:
        """Count a call of a method. Raises HubFull and QuotaExceeded if there are too many."""
        try:
            return self._begin(method, principal)
        except HubError:
            self.refuse(principal)
            raise

    def _begin(self, method: str, principal: str) -> Call:
        waits = method in _WAITING
        with self._lock:
            if self._count >= MOST:
                raise HubFull(f"the hub has {MOST} calls under way, and takes no more at one time", LATER)
            if waits and self._opening[principal] >= MOST_OPENING:
                raise QuotaExceeded(f"{principal} has {MOST_OPENING} calls without a message, and may have no more at one time", LATER)
            if waits:
                self._opening[principal] += 1
            self._count += 1
            self._changed(self._count)
        return Call(self, principal if waits else None)

    def refuse(self, principal: str) -> None:
        """Count a refused call of a principal, or of a caller without a good token."""
        now = system.port.monotonic()
        with self._lock:
            if now >= self._window_ends:
                self._refused.clear()
                self._window_ends = now + WINDOW
            self._refused[principal] += 1
            is_flood = self._refused[principal] % FLOOD == 0
            if self._refused[principal] == MANY:
                self._is_calm = True
                sys.setswitchinterval(CALM)
        if is_flood:
            self._flooded(principal)

    def settle(self, *, at_once: bool = False) -> None:
        """After refused calls, go back to the interpreter's usual interval. Call it now and then, and `at_once` in the end."""
        with self._lock:
            if self._is_calm and (at_once or system.port.monotonic() >= self._window_ends):
                self._is_calm = False
                sys.setswitchinterval(_USUAL)

    def open(self, principal: str) -> None:
        """Count a call no longer among those that wait for their first message."""
        with self._lock:
            self._opening[principal] -= 1
            if not self._opening[principal]:
                del self._opening[principal]

    def end(self) -> None:
        """Count a call no longer."""
        with self._lock:
            self._count -= 1
            self._changed(self._count)


class Call:
    """One call. principal: the one for whom it counts as waiting for its first message, or None."""

    def __init__(self, calls: Calls, principal: str | None) -> None:
        self._calls = calls
        self._principal = principal
        self._is_over = False

    def open(self) -> None:
        """Say that the first message was read."""
        principal, self._principal = self._principal, None
        if principal is not None:
            self._calls.open(principal)

    def end(self) -> None:
        """Say that the call is over; a second time changes nothing."""
        self.open()
        if not self._is_over:
            self._is_over = True
            self._calls.end()
