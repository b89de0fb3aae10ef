"""Queues in QewQew's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

from cases.case import NO_BAR, RING, THOUSAND, VALUE, Bar, Bench, Row, timed


def puts(queue: Any, count: int) -> None:
    """Put values one by one."""
    for _ in repeat(None, count):
        queue.put(VALUE)


def gets(queue: Any, count: int) -> None:
    """Get values one by one."""
    for _ in repeat(None, count):
        queue.get()


def put_batches(queue: Any, count: int) -> None:
    """Put a thousand values at once."""
    for _ in repeat(None, count // 1000):
        queue.put_many(THOUSAND)


def get_batches(queue: Any, count: int) -> None:
    """Get a thousand values at once."""
    for _ in repeat(None, count // 1000):
        queue.get_many(1000)


VERBS = {
    "put": (puts, 1, Bar(figure=0.5)),
    "get": (gets, 1, NO_BAR),
    "put_many of 1000": (put_batches, 1000, NO_BAR),
    "get_many of 1000": (get_batches, 1000, NO_BAR),
}


def verbs(bench: Bench) -> Iterator[Row]:
    """queues: put, get, put_many and get_many, compared with os.write"""
    from kvspool.queue import ChunkQueue

    count = bench.size(200_000, 2000)
    with ChunkQueue.create(bench.folder / "queue", chunk_bytes=bench.size(RING, 1 << 20)) as queue:

        def measure(work: Callable[[Any, int], None]) -> float:
            queue.clear()
            if work in (gets, get_batches):
                put_batches(queue, count)
            return timed(count, partial(work, queue, count))

        for name, (work, batch, bar) in VERBS.items():
            floor_name = "os.write" if batch == 1 else f"os.write of {batch}"
            floor = partial(bench.floors.write, batch)
            yield bench.row(f"queue: {name}", "M/s", partial(measure, work), floor_name, floor, bar)


def durable(bench: Bench) -> Iterator[Row]:
    """queues: durable put, compared with os.write and fdatasync"""
    from kvspool.queue import ChunkQueue

    fd = os.open(bench.folder / "flushed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def flush() -> None:
        os.write(fd, VALUE)
        os.fdatasync(fd)

    with ChunkQueue.create(bench.folder / "queue", chunk_bytes=bench.size(RING, 1 << 20), durability="disk") as queue:
        ours, floor = partial(bench.rate, 1, partial(queue.put, VALUE)), partial(bench.rate, 1, flush)
        yield bench.row("queue: durable put", "k/s", ours, "os.write+fdatasync", floor)
    os.close(fd)
