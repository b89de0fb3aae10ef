"""Journals of every format: one record per call, batches, scans, and columns."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cases.appends import PIECE, appends
from cases.batches import columns
from cases.case import NO_BAR, THOUSAND, VALUE, Bar, Bench, Row, exhaust, timed

BLOB = 1 << 18  # items
FORMATS: dict[str, dict[str, Any]] = {
    "kvj": {},
    "sej": {},
    "fflg": {"total_bytes": "300MB"},  # the size limit of the journal on disk
    "fixed": {"item_bytes": len(VALUE), "items_per_blob": BLOB},
}
ONE_PER_CALL = {"kvj": Bar(ratio=0.6), "sej": Bar(ratio=0.6), "fflg": Bar(ratio=0.4), "fixed": Bar(ratio=0.4)}
FAST = Bar(figure=5)
SCANNED = {"kvj": FAST, "sej": FAST, "fflg": NO_BAR, "fixed": Bar(figure=10)}
RECORDS = 500_000


def create(bench: Bench, name: str) -> Any:
    """Create an empty journal, replacing an existing one."""
    import kvspool

    path = bench.folder / name
    shutil.rmtree(path, ignore_errors=True)
    return kvspool.create(path, format=name, **FORMATS[name])


def filled(bench: Bench, name: str) -> Any:
    """Create a journal with some records."""
    log = create(bench, name)
    for _ in range(count_of(bench) // 1000):
        log.append_many(THOUSAND)
    return log


def count_of(bench: Bench) -> int:
    """Return the number of records of a filled journal."""
    return bench.size(RECORDS, 2000)


def one(name: str, bench: Bench) -> Iterator[Row]:
    """append to a {}, one record per call, compared with os.write with O_APPEND"""

    def measure() -> float:
        with create(bench, name) as log:
            return bench.rate(PIECE, partial(appends, log))

    yield bench.row(f"append, {name}", "M/s", measure, "os.write", bench.floors.write, ONE_PER_CALL[name])


def many(name: str, bench: Bench) -> Iterator[Row]:
    """append_many of 1000 to a {}, compared with os.write of 1000 values"""

    def measure() -> float:
        with create(bench, name) as log:
            log.append_many(THOUSAND)
            count = count_of(bench)
            return timed(count, lambda: [log.append_many(THOUSAND) for _ in range(count // 1000)])

    floor = partial(bench.floors.write, 1000)
    yield bench.row(f"append_many of 1000, {name}", "M/s", measure, "os.write of 1000", floor, FAST)


def scan(name: str, bench: Bench) -> Iterator[Row]:
    """a {} read from its beginning, to values and to records, compared with os.read"""
    with filled(bench, name) as log:
        held = count_of(bench)
        floor = partial(bench.rate, held, lambda: read_through(files(log.path)))
        for verb, read, bar in (("values", values_of(log), SCANNED[name]), ("records", log.read, NO_BAR)):
            ours = partial(bench.rate, held, lambda read=read: exhaust(read()))
            yield bench.row(f"scan to {verb}, {name}", "M/s", ours, "os.read", floor, bar)


def values_of(log: Any) -> Callable[[], Any]:
    """Return the verb that reads only values."""
    return log.replay if hasattr(log, "replay") else log.read_values  # type: ignore[no-any-return]


def files(path: Path) -> list[Path]:
    """Return the files of a journal."""
    return [file for file in path.rglob("*") if file.is_file()]


def read_through(paths: list[Path], size: int = 1 << 18) -> None:
    """Read files in pieces."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while os.read(fd, size):
            pass
        os.close(fd)


def get(bench: Bench) -> Iterator[Row]:
    """get of a fixed, compared with os.pread"""
    with filled(bench, "fixed") as log:
        places = random.Random(1).sample(range(min(count_of(bench), BLOB)), PIECE)  # in the first blob
        size = log.format.record_bytes
        first = max(files(log.path), key=os.path.getsize)
        fd = os.open(first, os.O_RDONLY)

        def pread() -> None:
            for place in places:
                os.pread(fd, size, place * size)

        ours = partial(bench.rate, PIECE, lambda: [log.item(place) for place in places])
        yield bench.row("get, fixed", "k/s", ours, "os.pread", partial(bench.rate, PIECE, pread), Bar(figure=200))
        os.close(fd)


def arrow(bench: Bench) -> Iterator[Row]:
    """append_arrow to a kvj and read_arrow, compared with os.write and os.read of as many bytes"""
    table = columns().table({"value": [VALUE] * count_of(bench)})

    def append() -> float:
        with create(bench, "kvj") as log:
            log.append(VALUE)
            return timed(len(table), partial(log.append_arrow, table))

    yield bench.row("append_arrow, kvj", "M/s", append, "os.write of 1000", partial(bench.floors.write, 1000))
    with filled(bench, "kvj") as log:
        floor = partial(bench.rate, len(table), lambda: read_through(files(log.path)))
        yield bench.row("read_arrow, kvj", "M/s", partial(bench.rate, len(table), log.read_arrow), "os.read", floor)
