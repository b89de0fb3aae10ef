"""How ranges are cut into tasks: pure functions, so the same ranges give the same tasks, with their rows in the same order.

A task costs some 15 ms of a core before it reads a record, and reading 50,000 takes as long: small ranges share a task, and large ones
have one each. How many cores there are nobody tells a source; `minPartitions` is for who knows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition

from hub.spark.shards import ShardRange

TASK = 1 << 16  # records that are worth a task
LARGEST_TASK = 1 << 21  # records, from which on a range is cut: other cores may have nothing to do
TASKS = 64  # that many ranges are brought down to, if more than one goes into each


@dataclass(frozen=True)
class Task(InputPartition):
    """What one task reads: ranges, one after the other."""

    ranges: tuple[ShardRange, ...]

    @property
    def records(self) -> int:
        """Return how many records that is, as far as the numbers tell."""
        return sum(map(size, self.ranges))


def size(one: ShardRange) -> int:
    """Return how many sequences a range has."""
    return one.end - one.first


def plan(ranges: Iterable[ShardRange], *, min_partitions: int | None = None, max_records: int | None = None) -> list[Task]:
    """Return the tasks for some ranges, in their order; none for empty ones.

    min_partitions: at least so many tasks, as far as there are records; no range is split, or split further, without need. max_records: of
    one task, at most.
    """
    whole = [one for one in ranges if one.first < one.end]
    most = LARGEST_TASK if max_records is None else max_records
    parts = [-(-size(one) // most) for one in whole]
    _split_further(whole, parts, min_partitions or 0)
    pieces = [piece for one, count in zip(whole, parts, strict=True) for piece in _pieces(one, count)]
    return _bundled(pieces, min_partitions or 0, max_records)


def _split_further(whole: list[ShardRange], parts: list[int], least: int) -> None:
    """Count up the parts of the ranges whose parts are the largest, until there are enough."""
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
    """Return a range in parts whose sizes differ by one at most."""
    edges = [one.first + size(one) * at // count for at in range(count + 1)]
    return [replace(one, first=first, end=end) for first, end in zip(edges, edges[1:], strict=False)]


def _bundled(pieces: list[ShardRange], least: int, max_records: int | None) -> list[Task]:
    """Return tasks of neighbours that are small, but no fewer than `least` of them."""
    total = sum(map(size, pieces))
    room = max(TASK, -(-total // TASKS))
    if least:
        room = min(room, -(-total // least))
    if max_records is not None:
        room = min(room, max_records)
    spare = len(pieces) - least  # how often two may go together
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
    return [Task(tuple(task)) for task in tasks]
