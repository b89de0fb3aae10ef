"""Checkpoints say what is on disk, exactly."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from images import crash_images as images

from kvspool.kernel import frames_py as frames
from kvspool.spool import checkpoints, format


def test_a_checkpoint_begins_with_the_sequence_of_the_frame_at_its_head(twin: ModuleType, make_ring: Callable[..., Any]) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([b"x" * 60] * 50)
    ring.words[frames.MIN_SEQ] += 2  # as a writer leaves it that is killed before it has stored the head
    state = checkpoints.state(ring.reader(0, 0))
    assert (state.head, state.min_seq) == ring.earliest()
    assert (state.tail, state.next_seq, state.timestamp) == ring.mark()


def test_if_the_oldest_frame_is_damaged_the_control_blocks_word_counts(twin: ModuleType, make_ring: Callable[..., Any]) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([b"x" * 60] * 50)
    head, least = ring.earliest()
    ring.data[head % 1024 + 40] ^= 1
    assert checkpoints.state(ring.reader(0, 0))[:2] == (head, least)


def test_an_empty_log_has_a_state_too(twin: ModuleType, make_ring: Callable[..., Any]) -> None:
    ring = make_ring(twin, 1024, position=512, sequence=9)
    assert checkpoints.state(ring.reader(0, 0)) == (512, 9, 512, 9, 0)


def test_the_older_one_is_overwritten_and_a_torn_one_does_not_count() -> None:
    disk = images.blank(4096)
    for number in range(1, 6):
        state = checkpoints.State(0, 0, 8 * number, number, number)
        at, raw = checkpoints.successor(disk.front, disk.header, state, 8 * number + 8, bytes(16))
        assert at == format.CHECKPOINTS_AT[(number + 1) % 2]
        for size in range(0, len(raw), 8):
            before = bytes(disk.front[at : at + len(raw)])
            disk.front[at : at + size] = raw[:size]
            assert checkpoints.newest(disk.front, disk.header)[1].tail == 8 * (number - 1)
            disk.front[at : at + len(raw)] = before
        disk.front[at : at + len(raw)] = raw
        newest = checkpoints.newest(disk.front, disk.header)[1]
        assert (newest.tail, newest.synced) == (8 * number, 8 * number), "nothing after the tail is known to be on disk"
