"""Split ranges into tasks. Pure functions, so the same ranges give the same tasks, with their rows in the same order.

A task costs some 15 ms of a core before it reads a record, as much as reading 50,000. Small ranges share a task, and large ones have their
own. Spark doesn't report the number of cores to a source; users who know it can set `minPartitions`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition

from hub.spark.shards import ShardRange

TASK = 1 << 16  # records that justify a task
LARGEST_TASK = 1 << 21  # records above which a range is split, because other cores may be idle
TASKS = 64  # small ranges are combined into about as many tasks


@dataclass(frozen=True)
class ReadTask(InputPartition):
    """The ranges of one task, in order."""

    ranges: tuple[ShardRange, ...]

    @property
    def records(self) -> int:
        """Return the number of records, as far as the sequences show."""
        return sum(map(size, self.ranges))


def size(one: ShardRange) -> int:
    """Return the number of sequences of a range."""
    return one.end - one.first


def plan(ranges: Iterable[ShardRange], *, min_partitions: int | None = None, max_records: int | None = None) -> list[ReadTask]:
    """Return the tasks for some ranges, in their order; none for empty ranges.

    min_partitions: the least number of tasks, if there are enough records; a range is split, or split further, only if necessary.
    max_records: of one task, at most.
    """
    whole = [one for one in ranges if one.first < one.end]
    most = LARGEST_TASK if max_records is None else max_records
    parts = [-(-size(one) // most) for one in whole]
    _split_further(whole, parts, min_partitions or 0)
    pieces = [piece for one, count in zip(whole, parts, strict=True) for piece in _pieces(one, count)]
    return _bundled(pieces, min_partitions or 0, max_records)


def _split_further(whole: list[ShardRange], parts: list[int], least: int) -> None:
    """Increment the parts of the ranges with the largest parts until there are enough."""
    missing = least - sum(parts)
    if missing <= 0:
        return
    largest = [(-size(one) / count, at) for at, (one, count) in enumerate(zip(whole, parts, strict=True)) if size(one) > count]
    heapq.heapify(largest)
    while missing and largest:
        _, at = heapq.heappop(largest)
        parts[at] += 1
        missing -= 1
        if size(whole[at]) > parts[at]:
            heapq.heappush(largest, (-size(whole[at]) / parts[at], at))


def _pieces(one: ShardRange, count: int) -> list[ShardRange]:
    """Return a range in parts whose sizes differ by at most one."""
    edges = [one.first + size(one) * at // count for at in range(count + 1)]
    return [replace(one, first=first, end=end) for first, end in zip(edges, edges[1:], strict=False)]


def _bundled(pieces: list[ShardRange], least: int, max_records: int | None) -> list[ReadTask]:
    """Return tasks of small neighbouring ranges, but at least `least` tasks."""
    total = sum(map(size, pieces))
    room = max(TASK, -(-total // TASKS))
    if least:
        room = min(room, -(-total // least))
    if max_records is not None:
        room = min(room, max_records)
    spare = len(pieces) - least  # how many pieces may join another one
    tasks: list[list[ShardRange]] = []
    filled = 0
    for piece in pieces:
        if tasks and spare > 0 and filled + size(piece) <= room:
            tasks[-1].append(piece)
            filled += size(piece)
            spare -= 1
        else:
            tasks.append([piece])
            filled = size(piece)
    return [ReadTask(tuple(task)) for task in tasks]
