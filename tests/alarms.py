"""Exceptions out of a signal handler: a real alarm raises them, wherever the code is then, or a tracer, at each place in turn."""

from __future__ import annotations

import dis
import gc
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvspool
import shard

PACKAGES = tuple(str(Path(str(one.__file__)).parent) for one in (kvspool, shard))


class Interrupt(Exception):
    """Raised by the signal handler."""


class called:
    """Call `handler` out of a signal handler after so many seconds, and then again and again, while the code inside runs."""

    def __init__(self, handler: Callable[[int, FrameType | None], None], seconds: float = 0.005, again: float = 0.005) -> None:
        self.handler = handler
        self.times = (seconds, again)

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, self.handler)
        signal.setitimer(signal.ITIMER_REAL, *self.times)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


class interrupted(called):
    """Raise Interrupt after so many seconds, wherever the code inside is then; and again, if that place swallows exceptions."""

    def __init__(self, seconds: float, again: float = 0.002) -> None:
        super().__init__(self.handle, seconds, again)

    def handle(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code in (called.__enter__.__code__, called.__exit__.__code__):
                return  # the code inside has not begun, or is over
            frame = frame.f_back
        raise Interrupt


class Tracer:
    """Raises Interrupt at the n-th place, from 1, where the interpreter runs signal handlers: as a function begins, and after a call or a
    jump back. 0: nowhere, and `seen` counts the places.

    The opcode after a call is traced, not the call. A place counts only if both have the same exception handler: otherwise the
    interpreter would pass by the handler that a signal within the call goes to.
    """

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.seen = 0
        self.error: Interrupt | None = None
        self._before: dict[FrameType, int] = {}  # byte of the opcode that ran last

    def run(self, operation: Callable[[], Any]) -> bool:
        """Return whether it was interrupted."""
        before = sys.gettrace()
        gc.disable()  # an Interrupt in a __del__ of older garbage would interrupt nothing
        sys._getframe().f_trace_opcodes = True  # of any frame: otherwise Python 3.12 doesn't look for those that ask later
        sys.settrace(self._trace)
        try:
            operation()
        except Interrupt as error:
            self.error = error
            return True
        finally:
            sys.settrace(before)
            gc.enable()
            self._before.clear()
        return self.seen >= self.nth > 0  # swallowed on the way

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGES) and not frame.f_code.co_filename.endswith("contextlib.py"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            self._come()
        elif event == "opcode":
            before = self._before.get(frame, 0)
            self._before[frame] = frame.f_lasti
            is_place = dis.opname[frame.f_code.co_code[before]].startswith(("CALL", "JUMP_BACKWARD"))
            if is_place and handler_at(frame.f_code, before) == handler_at(frame.f_code, frame.f_lasti):
                self._come()
        elif event == "return":
            self._before.pop(frame, None)
        return self._trace

    def _come(self) -> None:
        self.seen += 1
        if self.seen == self.nth:
            raise Interrupt


@cache
def handlers(code: CodeType) -> list[Any]:
    return dis._parse_exception_table(code)  # type: ignore[attr-defined, no-any-return]


def handler_at(code: CodeType, byte: int) -> Any:
    """Return the part of the exception table that counts at a byte of the code."""
    return next((entry for entry in handlers(code) if entry.start <= byte < entry.end), None)
