"""The contents of a micro-batch: a share for each shard, and not too little at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hub.spark.admission import Delay, share
from hub.spark.shards import ShardKey

A, B, C = (ShardKey(topic, 0) for topic in "abc")

keys = st.builds(ShardKey, st.sampled_from("abc"), st.integers(0, 3))
backlogs = st.dictionaries(keys, st.tuples(st.integers(0, 1 << 62), st.integers(-3, 40) | st.integers(0, 1 << 61)), max_size=8)


def test_shards_share_in_proportion_and_a_small_one_is_not_starved() -> None:
    assert share({A: 0, B: 100, C: 7}, {A: 2_000_000, B: 1_000_100, C: 8}, 300_000) == {A: 200_000, B: 100_099, C: 8}
    assert share({A: 0, B: 0}, {A: 10, B: 20}, 30) == {A: 10, B: 20}
    assert share({A: 5, B: 9, C: 0}, {A: 50, B: 90, C: 0}, 1) == {A: 6, B: 10, C: 0}


def test_a_shard_without_a_start_goes_to_its_end() -> None:
    assert share({A: 0}, {A: 10, B: 7}, 3) == {A: 3, B: 7}


@given(backlogs, st.integers(1, 100) | st.integers(1, 1 << 62))
def test_nothing_goes_backwards_or_beyond_and_the_sum_is_bounded(places: dict[ShardKey, tuple[int, int]], most: int) -> None:
    starts = {key: start for key, (start, _) in places.items()}
    ends = {key: start + backlog for key, (start, backlog) in places.items()}
    shared = share(starts, ends, most)
    waiting = [key for key in ends if ends[key] > starts[key]]
    assert list(shared) == list(ends)
    assert all(starts[key] < shared[key] <= ends[key] for key in waiting)
    assert all(shared[key] == ends[key] for key in ends.keys() - waiting)
    taken = sum(shared[key] - starts[key] for key in waiting)
    backlog = sum(ends[key] - starts[key] for key in waiting)
    assert taken == min(max(most, len(waiting)), backlog)


@given(backlogs, st.integers(1, 50))
def test_batch_after_batch_every_shard_comes_to_its_end_and_each_record_is_in_one_batch(
    places: dict[ShardKey, tuple[int, int]], most: int
) -> None:
    starts = {key: start for key, (start, _) in places.items()}
    ends = {key: start + min(max(backlog, 0), 20) for key, (start, backlog) in places.items()}
    batches = 0
    while starts != ends:
        following = share(starts, ends, most)
        assert all(starts[key] <= following[key] for key in starts) and following != starts
        starts, batches = following, batches + 1
    assert batches <= 20 * len(places)


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_batch_waits_for_enough_records_or_for_the_longest_delay() -> None:
    clock = Clock()
    delay = Delay(100, 60.0, clock)
    assert not delay.holds_back(1)  # a query's first one
    clock.now += 59
    assert delay.holds_back(99)
    assert not delay.holds_back(100)
    clock.now += 59
    assert delay.holds_back(1)  # counted from the batch before
    clock.now += 1
    assert not delay.holds_back(1)
    assert delay.holds_back(1)


def test_silence_begins_no_batch_and_what_comes_after_a_long_one_goes_at_once() -> None:
    clock = Clock()
    delay = Delay(100, 60.0, clock)
    assert not delay.holds_back(0)
    assert not delay.holds_back(5)
    clock.now += 600
    assert not delay.holds_back(0)
    assert not delay.holds_back(5)
    assert delay.holds_back(5)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=60), st.integers(1, 100), st.integers(0, 100))
def test_no_record_is_held_back_for_longer_than_is_said(arrivals: list[tuple[int, int]], least: int, longest: int) -> None:
    clock = Clock()
    delay = Delay(least, longest, clock)
    waiting, since, last = 0, clock.now, None
    for seconds, records in arrivals:
        clock.now += seconds
        since = clock.now if waiting == 0 else since
        waiting += records
        if delay.holds_back(waiting):
            assert 0 < waiting < least and last is not None and clock.now - last < longest
        elif waiting:
            waiting, last = 0, clock.now
