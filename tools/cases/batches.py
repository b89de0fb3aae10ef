"""Many records in one call: lists of values, and Arrow tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cases.appends import in_all
from cases.case import RING, THOUSAND, VALUE, Bar, Bench, LeftOut, Row
from cases.crowd import Work

RINGS = {"64 MiB": RING, "1 GiB": 1 << 30}
LARGE = {1024: (200, Bar(old=1.6)), 65_536: (20, Bar(ratio=2))}  # size of a value: how many in a call, and the bar


@contextmanager
def appending(path: Path) -> Iterator[Work]:
    """Open a log for a process of a crowd."""
    import kvspool

    with kvspool.open(path) as log:
        yield 1000, partial(log.append_many, THOUSAND)


@contextmanager
def writing(path: Path) -> Iterator[Work]:
    """Open a file with O_APPEND for a process of a crowd."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield 1000, partial(os.write, fd, VALUE * 1000)
    os.close(fd)


def one(bench: Bench) -> Iterator[Row]:
    """append_many of 1000, compared with os.write of 1000 values at once"""
    with bench.ring() as log:
        ours = partial(bench.rate, 1000, partial(log.append_many, THOUSAND))
        yield bench.row("append_many of 1000", "M/s", ours, "os.write of 1000", partial(bench.floors.write, 1000), Bar(ratio=1.5))


def several(bench: Bench) -> Iterator[Row]:
    """append_many of 1000 by four processes, compared with os.write of 1000 values by as many"""
    with bench.ring() as log:
        floor = in_all(bench, writing, bench.folder / "written", 4)
        yield bench.row("append_many of 1000, four processes", "M/s", in_all(bench, appending, log.path, 4), "os.write of 1000", floor)


def large(bench: Bench) -> Iterator[Row]:
    """append_many of values of 1 KiB and 64 KiB, compared with a copy with a CRC32C from C"""
    with bench.ring() as log:
        for size, (batch, bar) in LARGE.items():
            batch = bench.size(batch, 2)
            ours = partial(bench.rate, batch, partial(log.append_many, [bytes(size)] * batch))
            floor = partial(bench.floors.memcpy, size, is_checked=True)
            yield bench.row(f"append_many of {batch}, {size} bytes each", "ns", ours, "memcpy with CRC32C", floor, bar)


def columns() -> Any:
    """Return pyarrow. Raises LeftOut if it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise LeftOut("not measured: pyarrow is not installed; it comes with the extra arrow") from None
    return pyarrow


def arrow(bench: Bench) -> Iterator[Row]:
    """append_arrow and read_arrow in rings of 64 MiB and 1 GiB, compared with a copy from C"""
    table = columns().table({"value": [VALUE] * bench.size(200_000, 1000)})
    for name, capacity in RINGS.items():
        with bench.ring(capacity, name) as log:
            held = log.stats().records
            for verb, things, work in (
                ("append_arrow", len(table), partial(log.append_arrow, table)),
                ("read_arrow", held, log.read_arrow),
            ):
                ours = partial(bench.rate, things, work)
                yield bench.row(f"{verb}, a ring of {name}", "ns", ours, "memcpy", bench.floors.memcpy, Bar(figure=25, old=1.7))
