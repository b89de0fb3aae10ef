"""How ranges are cut into tasks: everything once, in order, the same each time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import MARKS

pytest.importorskip("pyspark")
from hub.spark.planning import LARGEST_TASK, TASK, TASKS, ReadTask, plan, size
from hub.spark.shards import ShardKey, ShardRange

pytestmark = MARKS[1:]

SIZES = st.lists(
    st.one_of(st.integers(0, 20), st.integers(0, 3 * TASK), st.integers(0, 3 * LARGEST_TASK)),
    max_size=40,
)
LEAST = st.none() | st.integers(1, 200)
MOST = st.none() | st.integers(1000, 2 * LARGEST_TASK)


def ranges(sizes: list[int]) -> list[ShardRange]:
    return [ShardRange(ShardKey("t", at), "", 10 * at, 10 * at + size) for at, size in enumerate(sizes)]


def pieces(tasks: list[ReadTask]) -> list[ShardRange]:
    return [one for task in tasks for one in task.ranges]


@given(SIZES, LEAST, MOST)
def test_every_sequence_is_read_once_and_in_order(sizes: list[int], least: int | None, most: int | None) -> None:
    tasks = plan(ranges(sizes), min_partitions=least, max_records=most)
    assert plan(ranges(sizes), min_partitions=least, max_records=most) == tasks
    joined: list[ShardRange] = []
    for piece in pieces(tasks):
        assert size(piece) > 0
        if joined and joined[-1].key == piece.key:
            assert joined[-1].end == piece.first
            joined[-1] = ShardRange(piece.key, "", joined[-1].first, piece.end)
        else:
            joined.append(piece)
    assert joined == [one for one in ranges(sizes) if size(one)]


@given(SIZES, LEAST, MOST)
def test_tasks_are_as_many_and_as_large_as_was_asked_for(sizes: list[int], least: int | None, most: int | None) -> None:
    tasks = plan(ranges(sizes), min_partitions=least, max_records=most)
    assert all(task.records <= (most or max(LARGEST_TASK, sum(sizes) // TASKS + 1)) for task in tasks)
    assert len(tasks) >= min(least or 0, sum(sizes))
    if least is not None and least > len(ranges(sizes)) and most is None and max(sizes, default=0) <= LARGEST_TASK:
        assert len(tasks) == min(least, sum(sizes))


@given(SIZES)
def test_neighbours_that_are_small_share_a_task(sizes: list[int]) -> None:
    tasks = plan(ranges(sizes))
    assert all(one.records + size(other.ranges[0]) > TASK for one, other in pairwise(tasks))


@given(st.integers(1, 10 * LARGEST_TASK), st.integers(1, 50))
def test_parts_of_a_range_are_of_one_size(count: int, least: int) -> None:
    sizes = [size(piece) for piece in pieces(plan(ranges([count]), min_partitions=least))]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ([], {}, []),
        ([0, 0], {}, []),
        ([5], {}, [[5]]),
        ([5] * 4, {}, [[5, 5, 5, 5]]),
        ([TASK] * 4, {}, [[TASK]] * 4),
        ([TASK // 2] * 4, {}, [[TASK // 2, TASK // 2]] * 2),
        ([1_000_000] * 4, {}, [[1_000_000]] * 4),
        ([1_000_000, 5, 5], {}, [[1_000_000], [5, 5]]),
        ([2 * LARGEST_TASK], {}, [[LARGEST_TASK]] * 2),
        ([10], {"min_partitions": 3}, [[3], [3], [4]]),
        ([3], {"min_partitions": 5}, [[1]] * 3),
        ([100, 10], {"min_partitions": 4}, [[33], [33], [34], [10]]),
        ([5] * 4, {"min_partitions": 2}, [[5, 5], [5, 5]]),
        ([5] * 4, {"max_records": 10}, [[5, 5], [5, 5]]),
        ([25], {"max_records": 10}, [[8], [8], [9]]),
    ],
)
def test_examples(sizes: list[int], options: dict[str, int], expected: list[list[int]]) -> None:
    assert [[size(one) for one in task.ranges] for task in plan(ranges(sizes), **options)] == expected
