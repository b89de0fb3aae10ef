"""Logs with tasks, and workers in processes of their own."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvspool

KINDS = ("spool", "kvj", "sej", "fflg")


def create(path: Path, kind: str, **options: Any) -> Any:
    """Create a log of a kind."""
    options = {"capacity": "1MiB", **options} if kind == "spool" else {"format": kind, **options}
    return kvspool.create(path, **options)


@contextmanager
def process(work: Callable[[Callable[[bytes], None]], None]) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Run `work(say)` in a forked process. Yield its id, and a function that returns its next byte; it is killed at the end."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reads)
            work(lambda word: os.write(writes, word) and None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writes)
    try:
        yield pid, lambda: os.read(reads, 1)
    finally:
        os.close(reads)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
