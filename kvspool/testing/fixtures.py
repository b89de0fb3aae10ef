"""Fixtures of pytest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvspool

if TYPE_CHECKING:
    from kvspool.log import Log

MEMORY = Path("/dev/shm")
CAPACITY = "1MiB"  # of a log that says nothing else; a fixed size is reserved in full


@pytest.fixture
def kvspool_directory() -> Iterator[Path]:
    """An empty directory in memory, if this host has /dev/shm; removed after the test with all logs in it."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvspool-test-", dir=place) as directory:
        yield Path(directory)


@pytest.fixture
def make_kvspool_log(kvspool_directory: Path) -> Iterator[Callable[..., Log]]:
    """A function that creates a log and closes it after the test: `make_kvspool_log("name", format="kvj")`.

    The name is optional, the options are those of `kvspool.create`.
    """
    with ExitStack() as logs:
        count = 0

        def make(name: str | None = None, **options: Any) -> Log:
            nonlocal count
            count += 1
            if options.get("format", "spool") == "spool":
                options.setdefault("capacity", CAPACITY)
            log: Log = logs.enter_context(kvspool.create(kvspool_directory / (name or f"log{count}"), **options))
            return log

        yield make


@pytest.fixture
def kvspool_log(make_kvspool_log: Callable[..., Log]) -> Log:
    """An empty log of 1 MiB in memory."""
    return make_kvspool_log("log")
