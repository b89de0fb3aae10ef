"""The append lock of a journal, held by a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvspool.journal import Journal
from kvspool.journal.appender import Appender
from kvspool.journal.control import Page


@contextmanager
def held(log: Journal, timeout: float = 5) -> Iterator[tuple[Appender, Page]]:
    """Hold the lock inside the `with` block, as `Journal.under_lock` does while a function runs."""
    appender = log._open_appender(timeout)
    try:
        appender._enter(timeout)
        yield appender, appender._resolved_end()
    finally:
        appender._leave()
