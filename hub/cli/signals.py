"""SIGINT and SIGTERM of commands that run until they are stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK = 0.5  # seconds between two looks for a signal


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[None]:
    """Call a function at each SIGINT and SIGTERM inside the `with` block. Use it in the main thread."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait(is_over: threading.Event) -> None:
    """Wait for an event that `stopping` sets. Use it in the main thread.

    Python calls handlers in this thread only, and nothing wakes it for a signal that another thread has received.
    """
    while not is_over.wait(LOOK):
        pass
