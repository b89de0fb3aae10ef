"""The cost of larger rings and more durable readers, compared with the smallest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from cases.appends import appends
from cases.case import THOUSAND, Bench, Row
from cases.wakeups import latencies, on_log

CAPACITIES = {"1 MiB": 1 << 20, "64 MiB": 64 << 20, "1 GiB": 1 << 30, "8 GiB": 8 << 30}
READERS = (0, 1, 32)
COUNT = 1000


def capacities(bench: Bench) -> Iterator[Row]:
    """an append, a wake-up, an opening and a seek in rings of 1 MiB to 8 GiB; best in memory: --directory /dev/shm"""
    import kvspool

    measured: dict[str, dict[str, list[float]]] = {}
    for name, capacity in CAPACITIES.items():
        capacity = min(capacity, bench.size(capacity, 2 << 20))
        with kvspool.create(bench.folder / name, capacity=capacity) as log:
            large = [bytes(min(1 << 16, capacity >> 4))] * 16
            for _ in range(2 * capacity // (len(large[0]) * len(large))):
                log.append_many(large)
            log.append_many(THOUSAND)
            log.sync()
            for _ in range(bench.rounds):
                for verb, cost in _costs(bench, log).items():
                    measured.setdefault(verb, {}).setdefault(name, []).append(cost)
        shutil.rmtree(bench.folder / name)
    for verb, costs in measured.items():
        yield from _rows(f"growth: {verb}", costs)


def readers(bench: Bench) -> Iterator[Row]:
    """an append while a log has 0, 1 and 32 durable readers"""
    import kvspool

    costs: dict[str, list[float]] = {}
    for count in READERS:
        with ExitStack() as stack:
            log = stack.enter_context(kvspool.create(bench.folder / f"attached{count}", capacity="1MiB"))
            for number in range(count):
                stack.enter_context(log.reader(f"{number}"))
            costs[f"{count} durable readers"] = [_cost(bench, COUNT, partial(appends, log, COUNT)) for _ in range(bench.rounds)]
    yield from _rows("growth: append", costs)


def _rows(name: str, costs: dict[str, list[float]]) -> Iterator[Row]:
    (smallest, floors), *_ = costs.items()
    for size, found in costs.items():
        yield Row(f"{name}, {size}", "us", smallest, list(zip(found, floors, strict=True)))


def _costs(bench: Bench, log: Any) -> dict[str, float]:
    """Return microseconds: of an append, of a wake-up (p50), of opening the log, of a seek by sequence and by time."""
    import kvspool

    stats = log.stats()
    middle = (stats.first_sequence + stats.next_sequence) // 2
    when = next(log.read(middle, limit=1)).time
    wake_ups = latencies(bench, on_log, log.append, log.path, {})
    return {
        "open": _cost(bench, 1, lambda: kvspool.open(log.path).close()),
        "seek by sequence": _cost(bench, 1, lambda: next(log.read(middle, limit=1))),
        "seek by time": _cost(bench, 1, lambda: next(log.read(when, limit=1))),
        "append": _cost(bench, COUNT, partial(appends, log, COUNT)),
        "wake-up": wake_ups[len(wake_ups) // 2] / 1000,
    }


def _cost(bench: Bench, things: int, work: Any) -> float:
    return 1e6 / bench.rate(things, work)
