"""Forked processes that work together: their rate, and the time until one takes over from a killed one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

from cases.case import NO_BAR, Bar, Bench, Row

Worker = Callable[[int, int, int], None]
"""Writes a byte to the first pipe when it is ready, waits for one of the second, and reports records to the third."""


def shared_rate(work: Worker, processes: int, records: int, unit: int = 1) -> float:
    """Return the records per second of all processes together, since all are ready. A reported byte counts its value times `unit`."""
    ready, go, done = os.pipe(), os.pipe(), os.pipe()
    started = [forked(partial(work, ready[1], go[0], done[1])) for _ in range(processes)]
    try:
        read_bytes(ready[0], processes)
        began = time.perf_counter()
        os.write(go[1], b"." * processes)
        left = records
        while left > 0:
            left -= unit * sum(os.read(done[0], 1 << 16))
        return (records - left) / (time.perf_counter() - began)
    finally:
        end_all(started, *ready, *go, *done)


def takeover_time(own: Callable[[int], None], stand_by: Callable[[int, int], None]) -> float:
    """Return the seconds until a process that waits has what a killed one had.

    Both write a byte to the first pipe when they are ready. `stand_by` writes the time, 8 bytes in ns, to the second one.
    """
    ready, took = os.pipe(), os.pipe()
    owner = forked(partial(own, ready[1]))
    read_bytes(ready[0], 1)
    standby = forked(partial(stand_by, ready[1], took[1]))
    try:
        read_bytes(ready[0], 1)
        time.sleep(0.05)
        began = time.monotonic_ns()
        os.kill(owner, signal.SIGKILL)
        return (int.from_bytes(os.read(took[0], 8), "little") - began) / 1e9
    finally:
        end_all([owner, standby], *ready, *took)


def takeover_rows(bench: Bench, name: str, times: list[float], bar: Bar) -> Iterator[Row]:
    """Return the rows of the median, with its bar, and of the 99th percentile."""
    times = sorted(times)
    for which, at, its_bar in (("median", len(times) // 2, bar), ("99th percentile", len(times) * 99 // 100, Bar(figure=100))):
        yield Row(f"{name} after SIGKILL, {which}", "ms", "", [(times[at] * 1e3, None)], NO_BAR if bench.is_short else its_bar)


def forked(work: Callable[[], None]) -> int:
    """Return the process that runs `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def read_bytes(fd: int, count: int) -> None:
    """Read so many bytes of a pipe."""
    while count > 0:
        count -= len(os.read(fd, count))


def end_all(processes: list[int], *descriptors: int) -> None:
    """Kill processes, and close descriptors."""
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for fd in descriptors:
        os.close(fd)
