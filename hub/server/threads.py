"""A limit on the threads of the hub's process, enforced by the kernel.

In a flood of calls gRPC creates threads faster than Python can refuse them: each thread first waits for the interpreter. If no thread can
be started, gRPC refuses the call itself (RESOURCE_EXHAUSTED), in microseconds. So `follow` lets this process have as many threads as its
calls need, and `SPARE` more, but never more than its limit at the start.

The kernel counts all threads of a user, and never limits root. So `look` counts those of the user's other processes. If threads that are
invisible here, such as another container's, use up the limit, `look` releases it.
"""

from __future__ import annotations

import logging
import threading

from kvspool import system
from kvspool.system.handles import Handle

OWN = 96  # threads of the hub itself: gRPC, the proxy, the housekeeping, the page
SPARE = 160  # threads for calls about to be refused, and for new ones
STEP = 64  # calls between two changes of the limit
_logger = logging.getLogger("kvspool.hub")


class Threads(Handle):
    """The limit of this process. Thread-safe. of_call: threads that a call may have."""

    def __init__(self, of_call: int = 1) -> None:
        self._of_call = of_call
        self._lock = threading.Lock()
        self._calls = 0
        self._others = 0
        self._most = -1  # the last limit set
        self._before = system.port.thread_limit()  # never exceeded, and restored at the end
        self._is_given_up = False

    def start(self) -> bool:
        """Begin to limit. Return whether the kernel enforces it: it doesn't for root."""
        if system.port.user_id() == 0:
            self._is_given_up = True
        self.look()
        return not self._is_given_up

    def follow(self, calls: int) -> None:
        """Adapt the limit to the number of concurrent calls."""
        with self._lock:
            self._calls = calls
            self._set()

    def look(self) -> None:
        """Count the threads of the user's other processes, and check whether a thread can be started."""
        if self._is_given_up:
            return
        ours, all_of_user = system.port.count_threads()
        with self._lock:
            self._others = all_of_user - ours
            self._set()
            allowed = self._most - self._others
        try:
            probe = threading.Thread(target=lambda: None, name="hub probe", daemon=True)
            probe.start()
        except RuntimeError:
            if ours < allowed - SPARE // 2:
                self.close()
                _logger.warning("invisible threads of this user use up the limit of the hub's own; the limit was released")
        else:
            probe.join()

    def close(self) -> None:
        """Restore the original limit."""
        with self._lock:
            if not self._is_given_up:
                self._is_given_up = True
                system.port.limit_threads(self._before)

    @property
    def _allowed(self) -> int:
        return OWN + SPARE + (self._calls // STEP + 1) * STEP * self._of_call

    def _set(self) -> None:
        most = min(self._others + self._allowed, self._before)
        if most != self._most and not self._is_given_up:
            self._most = most
            try:
                system.port.limit_threads(most)
            except (OSError, ValueError) as error:
                self._is_given_up = True
                _logger.warning("the kernel does not limit the hub's threads: %s", error)
