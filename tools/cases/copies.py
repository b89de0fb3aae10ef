"""Copies from one log to another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cases.case import THOUSAND, Bar, Bench, Row, timed
from cases.journals import count_of, files, filled


def to_kvj(source: str, bench: Bench) -> Iterator[Row]:
    """a copy of a {} to a kvj, compared with a copy of the kvj's files with a flush"""
    import kvspool

    count, target = count_of(bench), bench.folder / "copied"
    if source == "spool":
        log = kvspool.create(bench.folder / "spool", capacity=bench.size(128 << 20, 1 << 20))
        for _ in range(count // 1000):
            log.append_many(THOUSAND)
    else:
        log = filled(bench, source)
    log.close()

    def copied() -> float:
        shutil.rmtree(target, ignore_errors=True)
        return timed(count, partial(kvspool.copy, log.path, target, format="kvj"))

    floor = partial(timed, count, lambda: copied_and_flushed(files(target), bench.folder / "copied.floor"))
    yield bench.row(f"copy, {source} to kvj", "M/s", copied, "the files, copied and flushed", floor, Bar(figure=0.5))


def copied_and_flushed(sources: list[Path], target: Path) -> None:
    """Copy files into one, in pieces of 4 MiB, and flush it."""
    with open(target, "wb", buffering=0) as other:
        for source in sources:
            with open(source, "rb", buffering=0) as one:
                while data := one.read(4 << 20):
                    other.write(data)
        os.fdatasync(other.fileno())
