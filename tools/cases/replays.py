"""All records of a full ring, read again."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from cases.case import Bar, Bench, Row, exhaust, in_unit, timed

BARS = {"values": Bar(old=1.4), "records": Bar(old=1.3)}
LATER = 3  # replays of a warm process


def replay(log: Any, verb: str) -> Callable[[], None]:
    """Return a function that reads a whole log as "values" or "records"."""
    read = {"values": log.read_values, "records": log.read}[verb]
    return lambda: exhaust(read())


def warm(verb: str, bench: Bench) -> Iterator[Row]:
    """replay to {}, compared with a copy from C"""
    with bench.ring() as log:
        ours = partial(bench.rate, log.stats().records, replay(log, verb))
        yield bench.row(f"replay to {verb}", "M/s", ours, "memcpy", bench.floors.memcpy, BARS[verb])


def fresh(bench: Bench) -> Iterator[Row]:
    """replay in a fresh process, compared with the same process when it is warm"""
    with bench.ring() as log:
        path, held = log.path, log.stats().records
    for verb in BARS:
        pairs = [_in_a_process(path, verb, held) for _ in range(bench.rounds)]
        yield Row(f"replay to {verb}, fresh process", "M/s", "the same process, warm", pairs, Bar(ratio=0.8))


def _in_a_process(path: Path, verb: str, held: int) -> tuple[float, float]:
    """Return the rates of a new interpreter's first replay, and of later ones."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        first, *later = pool.submit(_replays, path, verb, held).result()
    return first, statistics.median(later)


def _replays(path: Path, verb: str, held: int) -> list[float]:
    import kvspool

    with kvspool.open(path) as log:
        return [in_unit(timed(held, replay(log, verb)), "M/s") for _ in range(1 + LATER)]
