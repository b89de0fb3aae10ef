"""Durable appends: each is on disk when the call returns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cases.appends import in_all
from cases.case import RING, VALUE, Bar, Bench, Row
from cases.crowd import Work


@contextmanager
def appending(path: Path) -> Iterator[Work]:
    """Open a log for a process of a crowd."""
    import kvspool

    with kvspool.open(path) as log:
        yield 1, partial(log.append, VALUE, durable=True)


@contextmanager
def writing(path: Path) -> Iterator[Work]:
    """Open a file with O_APPEND for a process of a crowd that flushes each of its writes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write() -> None:
        os.write(fd, VALUE)
        os.fdatasync(fd)

    yield 1, write
    os.close(fd)


def durable(kind: str, bench: Bench) -> Iterator[Row]:
    """append(durable=True) to a {} by 1 and 8 writers, compared with os.write and fdatasync by as many"""
    import kvspool

    options = {"capacity": bench.size(RING, 1 << 20)} if kind == "spool" else {}
    kvspool.create(bench.folder / kind, format=kind, **options).close()
    for processes, name, bar in ((1, "one writer", 0.9), (8, "eight writers", 1.5)):
        yield bench.row(
            f"durable append, {kind}, {name}", "k/s", in_all(bench, appending, bench.folder / kind, processes),
            f"os.write+fdatasync, {name}", in_all(bench, writing, bench.folder / "flushed", processes), Bar(ratio=bar),
        )  # fmt: skip
