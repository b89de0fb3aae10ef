"""The first lap of a new ring, whose pages no append has written yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from cases.case import FRAME, THOUSAND, Bar, Bench, Row, in_unit, timed

CAPACITY = 256 << 20


def first(bench: Bench) -> Iterator[Row]:
    """append_many in the first lap of a new ring, compared with its third lap"""
    import kvspool

    capacity = bench.size(CAPACITY, 1 << 20)
    calls = capacity // (FRAME * len(THOUSAND))

    def laps(number: int) -> tuple[float, float]:
        with kvspool.create(bench.folder / f"new{number}", capacity=capacity) as log:
            rates = [timed(calls * len(THOUSAND), lambda: [log.append_many(THOUSAND) for _ in range(calls)]) for _ in range(3)]
        shutil.rmtree(log.path)
        return in_unit(rates[0], "M/s"), in_unit(rates[2], "M/s")

    pairs = [laps(number) for number in range(bench.rounds)]
    yield Row("first lap of a new ring, append_many", "M/s", "its third lap", pairs, Bar(ratio=0.85))
