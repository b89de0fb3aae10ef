"""The attempts of a program to work with a server that may be away: their state, and how often they failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from kvspool import system
from kvspool.system.handles import Handle

AttemptState = Literal["connecting", "connected", "waiting", "stopped", "failed"]


class Attempts(Handle):
    """The attempts of one thread. `stop` and all attributes are also for other threads.

    error: why the last attempt failed; "" after one that succeeded. outages: attempts that failed. failures: those since the last success.
    """

    def __init__(self) -> None:
        self.state: AttemptState = "connecting"
        self.error = ""
        self.outages = 0
        self.failures = 0
        self._stop = threading.Event()
        self._retry_at = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note at the end of the `with` block whether an error ended it."""
        try:
            yield
            self.state = "stopped"
        except BaseException:
            self.state = "failed"
            raise

    def succeed(self) -> None:
        """Note an attempt that succeeded."""
        self.state, self.error, self.failures = "connected", "", 0

    def fail(self, error: Exception) -> None:
        """Note an attempt that failed."""
        self.outages += 1
        self.failures += 1
        self.error = str(error)

    def wait(self, seconds: float) -> None:
        """Wait before the next attempt, at most until `stop` is called."""
        self._retry_at = system.port.monotonic() + seconds
        self.state = "waiting"
        self._stop.wait(seconds)

    @property
    def retry_in(self) -> float:
        """Return the seconds until the next attempt; 0 while none is waited for."""
        return max(0.0, self._retry_at - system.port.monotonic()) if self.state == "waiting" else 0.0

    def stop(self) -> None:
        """Let the program end."""
        self._stop.set()

    @property
    def is_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stop.is_set()
