"""Many waiting readers: the cost of an append, and the readers' latency."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from cases.case import Bar, Bench, Row
from cases.crowd import PATIENCE, reading, received
from cases.floors import compiled
from cases.wakeups import on_log, stamp

READERS = (1, 16, 64)
GAP = 0.004  # seconds between two records, in which all readers begin to wait


class Times(NamedTuple):
    """Medians, in ns: of an append, and of the median reader's wake-up."""

    append: float
    wake_up: float


def of_log(bench: Bench, log: Any, readers: int) -> Times:
    """Append records while readers of a log wait."""
    count = bench.size(250, 5)
    with ExitStack() as stack:
        readings = [stack.enter_context(reading(on_log, count, log.path, {})) for _ in range(readers)]
        for connection in readings:
            received(connection)
        time.sleep(0.1)
        times = append_times(log, count)
        wake_ups = [statistics.median(received(connection)) for connection in readings]
    return Times(statistics.median(times), statistics.median(wake_ups))


def append_times(log: Any, count: int) -> list[int]:
    """Return the ns of each of so many appends, with enough time between them for readers to begin to wait."""
    return [_append(log) for _ in range(count)]


def _append(log: Any) -> int:
    time.sleep(GAP)
    message = stamp()
    start = time.monotonic_ns()
    log.append(message)
    return time.monotonic_ns() - start


def of_futex(bench: Bench, readers: int) -> Times:
    """Let a program in C do the same with one futex word."""
    command = [compiled(bench.folder, "sleepers.c"), str(readers), str(bench.size(250, 5)), str(round(GAP * 1e6))]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=PATIENCE).stdout
    return Times(*map(float, said.split()))


def sleeping(bench: Bench) -> Iterator[Row]:
    """append while 1, 16 and 64 readers sleep, and their wake-up, compared with a broadcast futex in C"""
    import kvspool

    with kvspool.create(bench.folder / "bell", capacity="1MiB") as log:
        for readers in READERS:
            number = bench.size(readers, min(readers, 2))
            pairs = bench.alternate(lambda number=number: of_log(bench, log, number), lambda number=number: of_futex(bench, number))
            asleep = "1 reader sleeps" if readers == 1 else f"{readers} readers sleep"
            for at, name in enumerate((f"append while {asleep}", f"wake-up while {asleep}, median")):
                found = [(ours[at] / 1000, None if floor is None else floor[at] / 1000) for ours, floor in pairs]
                yield Row(name, "us", "broadcast futex in C", found, Bar(ratio=1.5))
