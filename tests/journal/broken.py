"""Systems for the tests of journals: one that was restarted, one that is quick because it never flushes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from faults import FILE_CALLS, FailingPort

from kvspool.system import Port

CALLS = (*FILE_CALLS, "truncate", "remove", "names")
CHANGES = ("open", "write", "truncate", "set_mode", "flush", "flush_data", "rename", "remove", "make_directory", "try_lock", "close")


class RestartedPort(Port):
    """The machine was restarted; the `number`-th time."""

    def __init__(self, number: int = 1) -> None:
        super().__init__()
        self._boot = number.to_bytes(16, "big")

    def boot_id(self) -> bytes:
        return self._boot


class UnflushedPort(Port):
    """Flushes nothing, where what is tested has nothing to do with that."""

    def flush(self, fd: int) -> None:
        return None

    def flush_data(self, fd: int) -> None:
        return None


class MeanwhilePort(Port):
    """Calls a function once, after the n-th look at a file, counted from 1."""

    def __init__(self, nth: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.left = nth
        for name in ("status", "read", "names", "look_up"):
            setattr(self, name, self._counting(getattr(self, name), act))

    def _counting(self, call: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            found = call(*args, **options)
            self.left -= 1
            if self.left == 0:
                act()
            return found

        return counted


def failing(nth: int, number: int) -> FailingPort:
    """Return a port whose n-th call of those that journals make fails once."""
    gc.collect()  # what earlier tests left to the collector must not be closed meanwhile
    return FailingPort(nth, number, only=CALLS)
