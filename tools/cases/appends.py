"""One record per call: one writer, several, a shard set, and a burst."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from cases.case import VALUE, Bar, Bench, Row
from cases.crowd import Setup, Work, together

PIECE = 100  # records between two looks at the clock
BITS = 4  # of the shard set
CROWDS = {4: "four processes", 16: "sixteen processes"}


def appends(log: Any, count: int = PIECE) -> None:
    """Append records one by one."""
    for _ in repeat(None, count):
        log.append(VALUE)


def writes(fd: int) -> None:
    """Write values one by one."""
    for _ in repeat(None, PIECE):
        os.write(fd, VALUE)


@contextmanager
def appending(path: Path) -> Iterator[Work]:
    """Open a log for a process of a crowd."""
    import kvspool

    with kvspool.open(path) as log:
        yield PIECE, partial(appends, log)


@contextmanager
def bursting(path: Path) -> Iterator[Work]:
    """Open a log's `writer()` for a process of a crowd."""
    import kvspool

    with kvspool.open(path) as log, log.writer() as writer:
        yield PIECE, partial(appends, writer)


@contextmanager
def writing(path: Path) -> Iterator[Work]:
    """Open a file with O_APPEND for a process of a crowd."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield PIECE, partial(writes, fd)
    os.close(fd)


def in_all(bench: Bench, setup: Setup, path: Path, processes: int) -> Callable[[], float]:
    """Return a function that measures the rate of so many processes; it starts with an empty file, if there is one."""

    def measure() -> float:
        if path.is_file():
            os.truncate(path, 0)
        return together(setup, path, bench.size(processes, 2), bench.seconds)

    return measure


def one(bench: Bench) -> Iterator[Row]:
    """append by one writer, compared with a slice store of the value into a mapping"""
    with bench.ring() as log:
        ours = partial(bench.rate, PIECE, partial(appends, log))
        yield bench.row("append, one writer", "M/s", ours, "slice store", bench.floors.store, Bar(ratio=0.8))


def several(bench: Bench) -> Iterator[Row]:
    """append by 4 and 16 processes, in all, compared with os.write with O_APPEND by as many"""
    with bench.ring() as log:
        for processes, name in CROWDS.items():
            floor = in_all(bench, writing, bench.folder / "written", processes)
            yield bench.row(
                f"append, {name}", "M/s", in_all(bench, appending, log.path, processes),
                f"os.write, {name}", floor, Bar(ratio=2.5),
            )  # fmt: skip


def burst(bench: Bench) -> Iterator[Row]:
    """writer().append by 1 and 4 processes, compared with append by as many"""
    with bench.ring() as log:
        for processes, name in ((1, "one writer"), (4, "four processes")):
            ours, plain = (in_all(bench, setup, log.path, processes) for setup in (bursting, appending))
            yield bench.row(f"writer().append, {name}", "M/s", ours, f"append, {name}", plain, Bar(ratio=0.7))


def keyed(bench: Bench) -> Iterator[Row]:
    """append with a key to a shard set, compared with append to one log"""
    import shard

    keys = [b"%d" % number for number in range(PIECE)]
    with bench.ring() as log, shard.create(bench.folder / "shards", bits=BITS, capacity="4MiB") as shards:
        for _ in range(bench.size(1500, 1)):  # every page is written twice
            shards.append_many([VALUE] * 1000, keys=[b"%d" % number for number in range(1000)])
        shards.sync()

        def append() -> None:
            for key in keys:
                shards.append(VALUE, key=key)

        plain = partial(bench.rate, PIECE, partial(appends, log))
        yield bench.row("append with a key, 16 shards", "M/s", partial(bench.rate, PIECE, append), "append", plain, Bar(ratio=0.7))
