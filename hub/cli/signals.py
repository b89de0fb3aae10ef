"""SIGINT and SIGTERM of commands that run until they are stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """Call a function at each SIGINT and SIGTERM inside the `with` block. Use it in the main thread."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
