"""Exceptions out of a signal handler: a real alarm raises them, wherever the code is then."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupt(Exception):
    """What the signal handler raises."""


class interrupted:
    """Raise Interrupt after so many seconds, wherever the code inside is then; and again, if that place swallows exceptions."""

    def __init__(self, seconds: float, again: float = 0.002) -> None:
        self.times = (seconds, again)

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, self.handle)
        signal.setitimer(signal.ITIMER_REAL, *self.times)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)

    def handle(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code in (interrupted.__enter__.__code__, interrupted.__exit__.__code__):
                return  # the code inside has not begun, or is over
            frame = frame.f_back
        raise Interrupt
