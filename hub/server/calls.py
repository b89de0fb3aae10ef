"""Limits on the number of concurrent calls: they count from a call's headers on, before its first message is read.

Arrow Flight gives each call a thread, and a call of DoExchange, DoPut or Handshake keeps it while its client sends no message. So such
calls are counted for each principal as soon as their token is known, and all calls of the hub together. Calls beyond a limit are
refused in their own thread, which ends then. `Threads` makes the kernel refuse the thread itself. Many refusals of a principal within a
second are a flood: the principal's connections are cut.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable

from hub.errors import HubError, HubFull, QuotaExceeded
from hub.security.quotas import LATER
from kvspool import system
from kvspool.system.handles import Handle

MOST = 2048  # concurrent calls of a hub
MOST_OPENING = 256  # calls of one principal with an unread first message
FLOOD = 1000  # refused calls of one principal within `WINDOW`
WINDOW = 1.0  # seconds
MANY = 50  # refused calls within `WINDOW` after which threads that wait for the interpreter interrupt its owner less often:
CALM = 0.1  # seconds; hundreds that ask for it every 5 ms would use up the processor
_USUAL = sys.getswitchinterval()
_WAITING = frozenset({"DO_EXCHANGE", "DO_PUT", "HANDSHAKE"})  # methods whose handler reads the first message


class Calls(Handle):
    """Counts the calls of a hub. Thread-safe.

    changed: called with their number after each change, under the lock. flooded: called with the name of a principal that floods the hub.
    Both must be quick.
    """

    def __init__(
        self, changed: Callable[[int], None] = lambda count: None, flooded: Callable[[str], None] = lambda principal: None
    ) -> None:
        self._changed = changed
        self._flooded = flooded
        self._refused: Counter[str] = Counter()
        self._window_ends = 0.0
        self._is_calm = False  # the interpreter's switch interval was increased for a flood
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
        """Count a call of a method. Raises HubFull and QuotaExceeded for too many."""
        try:
            return self._begin(method, principal)
        except HubError:
            self.refuse(principal)
            raise

    def _begin(self, method: str, principal: str) -> Call:
        waits = method in _WAITING
        with self._lock:
            if self._count >= MOST:
                raise HubFull(f"the hub has {MOST} concurrent calls, which is the limit", LATER)
            if waits and self._opening[principal] >= MOST_OPENING:
                raise QuotaExceeded(f"{principal} has {MOST_OPENING} calls without a message, which is the limit", LATER)
            if waits:
                self._opening[principal] += 1
            self._count += 1
            self._changed(self._count)
        return Call(self, principal if waits else None)

    def refuse(self, principal: str) -> None:
        """Count a refused call of a principal, or of a caller without a valid token."""
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

    def restore_switch_interval(self, *, at_once: bool = False) -> None:
        """Restore the interpreter's switch interval after a flood. Call it from time to time, and `at_once` at the end."""
        with self._lock:
            if self._is_calm and (at_once or system.port.monotonic() >= self._window_ends):
                self._is_calm = False
                sys.setswitchinterval(_USUAL)

    def open(self, principal: str) -> None:
        """Stop counting a call as waiting for its first message."""
        with self._lock:
            self._opening[principal] -= 1
            if not self._opening[principal]:
                del self._opening[principal]

    def end(self) -> None:
        """Stop counting a call."""
        with self._lock:
            self._count -= 1
            self._changed(self._count)


class Call:
    """One call. principal: counted as its call without a first message, or None."""

    def __init__(self, calls: Calls, principal: str | None) -> None:
        self._calls = calls
        self._principal = principal
        self._is_over = False

    def open(self) -> None:
        """Note that the first message was read."""
        principal, self._principal = self._principal, None
        if principal is not None:
            self._calls.open(principal)

    def end(self) -> None:
        """Note that the call is over; a second time has no effect."""
        self.open()
        if not self._is_over:
            self._is_over = True
            self._calls.end()
