"""Ports whose clocks move only when a test moves them, or during waits."""

from __future__ import annotations

import time

from kvspool.system import Port


class StoppedClock(Port):
    """The real system, but for its clocks and its sleep, which moves them."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._began = time.time_ns()

    def pass_(self, seconds: float) -> None:
        """Let time pass."""
        self.offset += seconds

    def now(self) -> int:
        return self._began + int(self.offset * 1e9)

    def monotonic(self) -> float:
        return 1000.0 + self.offset

    def sleep(self, seconds: float) -> None:
        self.pass_(seconds)


class WaitingClock(Port):
    """The real system, but for a clock that moves only during sleeps and waits; notes how long each was."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1000.0
        self.waits: list[float] = []
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.time

    def wait_readable(self, fd: int, timeout: float) -> bool:
        if super().wait_readable(fd, 0):
            return True
        self.waits.append(timeout)
        self.time += timeout
        return False

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += seconds
