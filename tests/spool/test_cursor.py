"""Cursors against writers that overtake them at chosen moments: a writer runs inside the reader's own call."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvspool
from kvspool import Gap, Record, Spool, errors
from kvspool.engine.iteration import Iteration
from kvspool.kernel import frames_py as frames
from kvspool.spool import format
from kvspool.spool.cursor import RingCursor

VALUE = 40  # bytes of a frame with an 8-byte value; 102 of them and 16 bytes fill the ring of 4096


def append(log: Spool, count: int) -> None:
    first = log.stats().next_sequence
    log.append_many([b"%08d" % (first + at) for at in range(count)])


def overtaken(log: Spool, cursor: RingCursor, *moves: int) -> Callable[[int], list[Record]]:
    """Return a `take` that lets a writer append so many records before each of its first copies."""
    left = iter(moves)

    def take(end: int) -> list[Record]:
        append(log, next(left, 0))
        return cursor.reader.fetch(end, 256, Record)  # type: ignore[no-any-return]

    return take


def drain(cursor: RingCursor, take: Callable[[int], list[Record]]) -> list[Record | Gap]:
    items: list[Record | Gap] = []
    while got := cursor.advance(take):
        items += [got] if isinstance(got, Gap) else got
    return items


def account(items: list[Record | Gap]) -> tuple[int, int]:
    """Check that the items are dense and true, and return the first sequence and the one after the last."""
    first = expected = items[0].first if isinstance(items[0], Gap) else items[0].sequence
    for item in items:
        if isinstance(item, Gap):
            assert item.first == expected
            expected = item.last + 1
        else:
            assert (item.sequence, item.value) == (expected, b"%08d" % expected)
            expected += 1
    return first, expected


@pytest.mark.parametrize("moves", [(1,), (50,), (103,), (500,), (60, 60), (1, 103), (200,) * 3, (200,) * 9, (103,) * 20, (1000, 1, 1000)])
def test_a_follower_that_is_overtaken_accounts_for_every_sequence(log: Spool, moves: tuple[int, ...]) -> None:
    append(log, 100)
    cursor = log.cursor(0)
    take = overtaken(log, cursor, *moves)
    items = drain(cursor, take)
    while cursor.sequence < 100 + sum(moves):
        items += drain(cursor, take)
    assert account(items) == (0, 100 + sum(moves))
    assert cursor.missed == sum(item.count for item in items if isinstance(item, Gap))
    assert {item.reason for item in items if isinstance(item, Gap)} <= {"overrun"}


@pytest.mark.parametrize("moves", [(1,), (50,), (103,), (500,), (5, 5), (5, 5, 5), (5,) * 12, (60, 60), (200,) * 9])
def test_a_bounded_reader_that_is_overtaken_accounts_up_to_its_end_and_no_further(log: Spool, moves: tuple[int, ...]) -> None:
    append(log, 102)
    cursor = log.cursor(0, bounded=True)
    items = drain(cursor, overtaken(log, cursor, *moves))
    assert account(items) == (0, 102)


def test_a_bounded_reader_that_is_overtaken_stays_in_its_bounds_where_the_index_is_of_no_help(log: Spool) -> None:
    append(log, 102)
    cursor = log.cursor(0, bounded=True)
    overtake = overtaken(log, cursor, 5, 5)
    assert log._files is not None

    def take(end: int) -> list[Record]:
        got = overtake(end)
        log._files.control[format.INDEX_AT : format.INDEX_AT + 8] = bytes(8)  # type: ignore[union-attr]
        return got

    assert account(drain(cursor, take)) == (0, 102)


def test_a_follower_that_is_overtaken_again_and_again_ends_up_at_the_tail(log: Spool) -> None:
    append(log, 100)
    cursor = log.cursor(0)
    got = cursor.advance(overtaken(log, cursor, *[150] * 30))
    assert isinstance(got, Gap)
    assert got.last >= 100 + 150, "it did not wait for the writer to rest"


def test_of_a_large_ring_a_reader_that_is_overtaken_twice_continues_ahead_of_the_writer(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        append(log, 30_000)
        cursor = log.cursor(0)
        items = drain(cursor, overtaken(log, cursor, 100, 100))
        assert account(items) == (0, 30_200)
        kept = sum(isinstance(item, Record) for item in items)
        assert kept > 15_000, "most of the ring can still be read"


def test_a_bound_by_sequence_ends_there(log: Spool) -> None:
    append(log, 50)
    cursor = log.cursor(10, bounded=True, end=20)
    assert [item.sequence for item in drain(cursor, lambda end: cursor.reader.fetch(end, 7, Record))] == list(range(10, 20))  # type: ignore[union-attr]


@pytest.mark.parametrize(("start", "end"), [(0, 10), (0, 49), (5, 30)])
def test_a_bounded_range_that_is_overwritten_is_one_gap(log: Spool, start: int, end: int) -> None:
    append(log, 50)
    cursor = log.cursor(start, bounded=True, end=end)
    append(log, 200)
    assert drain(cursor, lambda bound: cursor.reader.fetch(bound, 7, Record)) == [Gap(start, end - 1, "overrun", str(log.path))]


def damage(log: Spool, *sequences: int) -> None:
    with open(log.path / format.DATA_FILE, "r+b") as file:
        for sequence in sequences:
            file.seek(format.DATA_START + sequence * VALUE + 34)
            file.write(b"?")


@pytest.mark.parametrize("which", [(0,), (5,), (19,), (3, 4, 5), (0, 1), (18, 19), (2, 7, 19), tuple(range(20))])
@pytest.mark.parametrize("bounded", [True, False])
def test_damage_costs_the_damaged_records_alone(log: Spool, which: tuple[int, ...], bounded: bool) -> None:
    append(log, 20)
    damage(log, *which)
    cursor = log.cursor(0, bounded=bounded)
    items = drain(cursor, overtaken(log, cursor))
    assert account(items) == (0, 20)
    lost = [at for item in items if isinstance(item, Gap) for at in range(item.first, item.last + 1)]
    assert lost == list(which)
    assert all(item.reason == "damaged" for item in items if isinstance(item, Gap))
    append(log, 1)
    if not bounded:
        assert [item.sequence for item in drain(cursor, overtaken(log, cursor))] == [20]  # type: ignore[union-attr]


def test_records_that_come_while_damage_at_the_end_is_passed_over_are_not_lost(log: Spool) -> None:
    append(log, 10)
    damage(log, 9)
    cursor = log.cursor(0)
    assert len(cursor.advance(lambda end: cursor.reader.fetch(end, 256, Record))) == 9  # type: ignore[arg-type]
    left = iter([5])

    def take(end: int) -> list[Record]:
        got = cursor.reader.fetch(end, 256, Record)
        append(log, next(left, 0))
        return got  # type: ignore[no-any-return]

    items = drain(cursor, take)
    assert [item for item in items if isinstance(item, Gap)] == [Gap(9, 9, "damaged", str(log.path))]
    assert account(items) == (9, 15)


def test_damage_that_is_overwritten_meanwhile_is_an_overrun(log: Spool) -> None:
    append(log, 102)
    damage(log, 0)
    cursor = log.cursor(0)
    reader = cursor.reader

    def take(end: int) -> list[Record]:
        got = reader.fetch(end, 256, Record)
        if reader.stop == frames.DAMAGED:
            append(log, 30)
        return got  # type: ignore[no-any-return]

    items = drain(cursor, take)
    assert account(items)[0] == 0
    assert isinstance(items[0], Gap)
    assert items[0].last >= 29


def test_numbers_that_were_left_out_are_a_machine_restart(log: Spool) -> None:
    append(log, 3)
    words = log._files.control.cast("Q")  # type: ignore[union-attr]
    for mark in (frames.MARKS, frames.MARKS + frames.MARK_WORDS):
        if words[mark] == words[frames.TAIL]:
            words[mark + 1] = 1 << 32
    words.release()
    assert log.append(b"after") == 1 << 32
    items = list(log.read(0, on_gap="yield"))
    assert items[3] == Gap(3, (1 << 32) - 1, "machine restart", str(log.path))
    assert [item.sequence for item in (*items[:3], items[4])] == [0, 1, 2, 1 << 32]


# The iterators.


def test_a_poll_gives_what_is_there_and_never_raises_for_a_gap(log: Spool) -> None:
    append(log, 5)
    with closing(log.follow(0, on_gap="raise")) as following:
        assert [record.sequence for record in following.poll(3)] == [0, 1, 2]
        assert [record.sequence for record in following.poll()] == [3, 4]
        assert following.poll() == []
        append(log, 300)
        assert following.poll() == [Gap(5, 202, "overrun", str(log.path))]
        assert [record.sequence for record in following.poll(1)] == [203]


def test_a_closed_iterator_is_over(log: Spool) -> None:
    append(log, 5)
    for reading in (log.read(), log.follow()):
        assert next(reading).sequence == 0
        reading.close()
        assert list(reading) == []
        reading.close()


def test_a_cursor_of_a_closed_log_says_so(log: Spool) -> None:
    append(log, 5)
    cursor = log.cursor()
    log.close()
    with pytest.raises(errors.Closed, match=str(log.path)):
        cursor.advance(lambda end: [])
    cursor.close()


def test_the_cursor_says_which_sequence_comes_next(log: Spool) -> None:
    append(log, 5)
    cursor = log.cursor(2)
    assert cursor.sequence == 2
    cursor.advance(lambda end: cursor.reader.fetch(end, 2, None))
    assert cursor.sequence == 4


def test_a_reader_asks_for_the_bell_and_looks_again_before_it_sleeps(log: Spool) -> None:
    looks: list[Any] = []
    with closing(log.follow(timeout=0)) as following:
        ask = following.cursor.reader.request_wake_up
        append(log, 1)
        assert next(following).sequence == 0
        assert list(following) == []
        assert ask(0) == VALUE
        looks.append(log.append(b"rings"))
        assert log._files is not None
        assert log._files.control[format.WAKE_AT] == 1
        assert [record.sequence for record in following] == looks


@pytest.mark.parametrize("seed", range(5))
def test_an_iteration_that_is_overtaken_between_two_records_accounts_for_every_sequence(log: Spool, seed: int) -> None:
    noise = random.Random(seed)
    append(log, 100)
    items: list[Record | Gap] = []
    with Iteration(log.cursor(0)) as reading:
        for item in reading:
            items.append(item)
            if noise.random() < 0.2 and log.stats().next_sequence < 4000:
                append(log, noise.choice([1, 5, 60, 103, 250]))
        assert reading.missed == sum(item.count for item in items if isinstance(item, Gap)) > 0
    assert account(items) == (0, log.stats().next_sequence)


def test_records_and_values_continue_after_damage_anywhere(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        append(log, 1000)
        with open(log.path / format.DATA_FILE, "r+b") as file:
            for sequence in (300, 301, 700):  # beyond what is copied out at first
                file.seek(format.DATA_START + sequence * VALUE + 35)
                file.write(b"?")
        with log.read(on_gap="yield") as records, log.read_values(on_gap="yield") as values:
            found = [item if isinstance(item, Gap) else item.value for item in records]
            assert found == list(values)
        expected: list[Any] = [b"%08d" % at for at in range(1000) if at not in (301, 700)]
        expected[300] = Gap(300, 301, "damaged", str(log.path))
        expected.insert(699, Gap(700, 700, "damaged", str(log.path)))
        assert found == expected
        assert len(list(log.read_values(limit=500, on_gap="skip"))) == 500
        with log.read_values(on_gap="raise") as values:
            assert [next(values) for _ in range(300)] == found[:300]
            with pytest.raises(errors.GapError):
                next(values)
            assert next(values) == b"%08d" % 302


@pytest.mark.parametrize("read", [Spool.read, Spool.read_values])
def test_closing_the_log_ends_an_iteration_at_the_next_record(tmp_path: Path, read: Callable[[Spool], Iteration]) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        append(log, 1000)
        items = iter(read(log))
        for _ in range(600):
            next(items)
        log.close()
        with pytest.raises(errors.Closed):
            next(items)


def test_an_iteration_returns_what_is_appended_while_it_runs(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        append(log, 600)
        with Iteration(log.cursor(0), 650, "raise") as reading:
            assert [record.sequence for record in reading] == list(range(600))
            append(log, 100)
            assert [record.sequence for record in reading] == list(range(600, 650))
            assert reading.is_over


def test_an_iteration_over_a_cursor_ends_when_the_log_is_closed_whatever_is_appended(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as writing, kvspool.open(tmp_path / "log") as log:
        append(writing, 1000)
        reading = Iteration(log.cursor(0))
        for _ in range(600):
            next(reading)
        log.close()
        with pytest.raises(errors.Closed):
            for item in reading:
                writing.append(item.value)
