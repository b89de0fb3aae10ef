"""A port that sends its own process a signal before the n-th call."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kvspool import system

CALLS = [name for name, value in vars(system.Port).items() if callable(value) and not name.startswith("_")]


class Ending(system.Port):
    """Sends its own process a signal before the n-th call."""

    def __init__(self, nth: int, number: int) -> None:
        self._left, self._number = nth, number

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), self._number)


def _counted(name: str) -> Callable[..., Any]:
    def call(self: Ending, *args: Any, **options: Any) -> Any:
        self._count()
        return getattr(system.Port(), name)(*args, **options)

    return call


for _name in CALLS:
    setattr(Ending, _name, _counted(_name))
