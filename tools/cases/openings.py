"""Opening a journal of many segments.

All but the last segment are sparse files, each with one real message whose value is a hole. The last is full of messages of 100 bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cases.case import NO_BAR, THOUSAND, VALUE, Bar, Bench, Row

SEGMENTS = 100
SEGMENT = 100_000_000  # bytes
HEAD = 26  # overhead of a message of the format sej, in bytes
BAR = Bar(figure=20_000)


def made(bench: Bench) -> Path:
    """Create the journal."""
    import kvspool

    path, size, segments = bench.folder / "large", bench.size(SEGMENT, 500_000), bench.size(SEGMENTS, 3)
    with kvspool.create(path, format="sej", segment_bytes=size, first_sequence=segments - 1) as log:
        for _ in range((size - 1) // (len(VALUE) + HEAD) // len(THOUSAND)):
            log.append_many(THOUSAND)
        log.sync()
    for base in range(segments - 1):
        with open(path / "jnl" / f"{base:016x}.jnl", "wb") as file:
            file.write(base.to_bytes(8, "big") + time.time_ns().to_bytes(8, "big") + bytes(2) + (size - HEAD).to_bytes(4, "big"))
            file.seek(size - 4)
            file.write(size.to_bytes(4, "big"))
    return path


def many(bench: Bench) -> Iterator[Row]:
    """opening a sej of 100 segments of 100 MB, compared with listing, opening and stat"""
    path = made(bench)
    floor = partial(bench.rate, 1, partial(listed, path))
    for name, work, bar in (
        ("open, find the end", ended, BAR),
        ("open, append", appended, BAR),
        ("open, append after a crash", recovered, NO_BAR),
    ):
        yield bench.row(f"{name}, 100 x 100 MB", "us", partial(bench.rate, 1, partial(work, path)), "list, open and stat", floor, bar)


def listed(path: Path) -> None:
    """Find the last segment without kvspool."""
    last = max(os.listdir(path / "jnl"))
    fd = os.open(path / "jnl" / last, os.O_RDWR)
    os.fstat(fd)
    os.close(fd)


def ended(path: Path) -> None:
    """Open the journal, and find its end."""
    import kvspool

    with kvspool.open(path) as log:
        log.end()


def appended(path: Path) -> None:
    """Open the journal, and append a record."""
    import kvspool

    with kvspool.open(path) as log:
        log.append(VALUE)


def recovered(path: Path) -> None:
    """Do the same without the control page, as after a crash."""
    os.truncate(path / "jnl.lck", 0)
    appended(path)
