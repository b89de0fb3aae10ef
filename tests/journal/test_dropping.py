"""Dropping the oldest segments: whole ones, the oldest first, never the last."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvspool
from kvspool.journal.dropping import whole_before
from kvspool.record import Gap


def test_a_segment_goes_when_the_next_one_begins_at_or_before_the_sequence() -> None:
    assert whole_before([0, 3, 6], 2) == []
    assert whole_before([0, 3, 6], 3) == [0]
    assert whole_before([0, 3, 6], 5) == [0]
    assert whole_before([0, 3, 6], 6) == [0, 3]
    assert whole_before([0, 3, 6], 1 << 64) == [0, 3]
    assert whole_before([0], 1 << 64) == []


def test_dropped_segments_are_one_gap_for_later_readers_and_nothing_to_present_ones(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=100) as log:
        log.append_many([b"x" * 10] * 10)
        reading = log.read()
        assert next(reading).sequence == 0
        assert log.trim(before=6).removed_segments == 2
        assert log.trim(before=6).removed_segments == 0
        assert [record.sequence for record in log.read()] == [6, 7, 8, 9]
        gap = next(iter(log.read(1, on_gap="yield")))
        assert isinstance(gap, Gap)
        assert (gap.first, gap.last, gap.reason) == (1, 5, "trimmed")
        assert [reading.__next__().sequence, reading.__next__().sequence] == [1, 2]
        with pytest.raises(kvspool.GapError) as caught:
            next(reading)
        assert (caught.value.gap.first, caught.value.gap.last) == (3, 5)
        assert next(reading).sequence == 6
        assert log.append(b"y") == 10
