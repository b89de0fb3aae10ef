"""Durable readers of a log of any kind: one position for each name, which moves with the returned records; the last commit is kept."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from children import in_child
from kinds import lose_oldest

import kvspool
from kvspool.errors import Closed, GapError, NoSuchReader, OutOfRange, ReaderBusy, Unsupported
from kvspool.log import Log
from kvspool.reader import Lag


def sequences(items: Any) -> list[int]:
    return [item.sequence for item in items]


def test_a_reader_continues_after_its_last_commit(filled: Log) -> None:
    with filled.reader("r") as reader:
        assert (reader.sequence, reader.committed) == (0, 0)
        assert sequences(reader.read(limit=10)) == list(range(10))
        assert (reader.sequence, reader.committed) == (10, 0)
        assert reader.commit() == 10
        assert reader.committed == 10
        assert sequences(reader.read(limit=5)) == list(range(10, 15))  # not committed
    with filled.reader("r") as reader:
        assert sequences(reader.read()) == list(range(10, 30))
        assert reader.commit() == 30
    with kvspool.open(filled.path) as other, other.reader("r") as reader:
        assert list(reader.read()) == []
        filled.append(b"more")
        assert sequences(reader.read()) == [30]


@pytest.mark.parametrize(("start", "sequence"), [("earliest", 0), ("latest", 30), (7, 7), (30, 30)])
def test_a_new_reader_begins_at_its_start_and_an_old_one_does_not(filled: Log, start: Any, sequence: int) -> None:
    with filled.reader("r", start=start) as reader:
        assert reader.sequence == sequence
    with filled.reader("r", start=3) as reader:
        assert reader.sequence == sequence


def test_bad_arguments_make_no_reader(filled: Log) -> None:
    for arguments in ({"start": "soon"}, {"start": -1}, {"isolation": "committed"}):
        with pytest.raises(ValueError):
            filled.reader("r", **arguments)  # type: ignore[arg-type]
    with pytest.raises(OutOfRange):
        filled.reader("r", start=31)
    with pytest.raises(ValueError):
        filled.reader("r" * 5000)
    assert filled.readers() == []


def test_a_reader_is_open_only_once(filled: Log) -> None:
    with filled.reader("r"), kvspool.open(filled.path) as other:
        for log in (filled, other):
            with pytest.raises(ReaderBusy):
                log.reader("r")
            with pytest.raises(ReaderBusy):
                log.delete_reader("r")
        log.reader("s").close()
    filled.reader("r").close()


def test_a_place_moves_with_each_record_that_is_returned(filled: Log) -> None:
    with filled.reader("r") as reader:
        reading = reader.read()
        for number in range(5):
            assert next(reading).sequence == number
            assert reader.sequence == number + 1
        reading.close()
        assert reader.sequence == 5


def test_a_commit_counts_what_was_returned_and_not_what_was_copied_in_advance(log: Log) -> None:
    log.append_many([b"%04d" % number for number in range(1000)])
    with log.reader("r") as reader:
        for record in reader.follow(timeout=30):
            if record.sequence == 599:
                break
        assert reader.commit() == reader.committed == reader.sequence == 600
        next(reader.read())
    with log.reader("r", start="latest") as reader:
        assert sequences(reader.read()) == list(range(600, 1000))


def test_a_loop_continues_where_its_reader_is_moved_to(filled: Log) -> None:
    with filled.reader("r") as reader:
        seen = []
        for record in reader.read(limit=12):
            seen.append(record.sequence)
            if len(seen) == 3:
                reader.seek(15)
            if record.sequence == 18:
                reader.rewind()
        assert seen == [0, 1, 2, 15, 16, 17, 18, 0, 1, 2, 3, 4]
        assert (reader.sequence, reader.committed) == (5, 0)


@pytest.mark.parametrize("verb", ["read", "follow"])
def test_a_seek_in_the_last_turn_of_a_loop_with_a_limit_counts(filled: Log, verb: str) -> None:
    with filled.reader("r") as reader:
        iteration = getattr(reader, verb)(limit=5)
        for record in iteration:
            if record.sequence == 4:
                reader.seek(4)
        assert (reader.sequence, reader.commit()) == (4, 4)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iteration)
        assert reader.sequence == 4
        assert sequences(reader.read(limit=1)) == [4]


def test_an_iteration_of_a_reader_ends_in_a_forked_child(filled: Log) -> None:
    def in_the_child() -> bool:
        with pytest.raises((Closed, ReaderBusy)):
            next(iteration)
        return True

    with filled.reader("r") as reader:
        iteration = reader.read()
        assert next(iteration).sequence == 0
        assert in_child(in_the_child)
        assert next(iteration).sequence == 1


def test_iterations_of_a_reader_take_turns(filled: Log) -> None:
    with filled.reader("r") as reader:
        one, other = reader.read(), reader.follow(timeout=0)
        assert [next(one).sequence, next(other).sequence, next(one).sequence, next(other).sequence] == [0, 1, 2, 3]
        reader.seek(20)
        assert next(one).sequence == 20
        reader.rewind()
        assert next(other).sequence == 0


def test_a_reader_seeks_and_rewinds(filled: Log) -> None:
    with filled.reader("r") as reader:
        reader.seek(12)
        assert sequences(reader.read(limit=2)) == [12, 13]
        assert reader.committed == 0
        reader.seek(30)
        assert list(reader.read()) == []
        for wrong, error in ((31, OutOfRange), (-1, ValueError), ("latest", TypeError)):
            with pytest.raises(error):
                reader.seek(wrong)  # type: ignore[arg-type]
        assert reader.sequence == 30
        reader.rewind()
        assert reader.sequence == 0
        reader.seek(9)
        reader.commit()
    with filled.reader("r") as reader:
        assert reader.sequence == 9


def test_a_reader_seeks_a_time(log: Log) -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    has_times = "timestamps" in log.capabilities
    for number in range(9):
        log.append(b"four", timestamp=number * 1_000_000_000 if has_times else None)
    with log.reader("r") as reader:
        with pytest.raises(TypeError):
            reader.seek_time(3)  # type: ignore[arg-type]
        if not has_times:
            with pytest.raises(Unsupported):
                reader.seek_time(epoch)
            with pytest.raises(Unsupported):
                log.reader("new", start=epoch)
            return
        reader.seek_time(epoch + timedelta(seconds=4))
        assert reader.sequence == 4
    with log.reader("new", start=epoch + timedelta(seconds=6)) as reader:
        assert next(reader.read()).sequence == 6


def test_a_reader_follows(log: Log) -> None:
    with log.reader("r") as reader, kvspool.open(log.path) as other:
        thread = threading.Thread(target=lambda: [other.append(b"%04d" % number) for number in range(30)])
        thread.start()
        assert sequences(reader.follow(timeout=30, limit=30, spin=0.001)) == list(range(30))
        thread.join()
        assert list(reader.follow(timeout=0)) == []
        assert reader.commit() == 30


def test_a_reader_follows_in_an_event_loop(filled: Log) -> None:
    async def run(reader: Any) -> list[int]:
        found = []
        async with reader.follow_async(timeout=30, limit=31) as following:
            async for record in following:
                found.append(record.sequence)
                assert reader.sequence == record.sequence + 1
                if len(found) == 30:
                    filled.append(b"more")
        return found

    with filled.reader("r") as reader:
        assert asyncio.run(run(reader)) == list(range(31))
        assert reader.commit() == 31


def test_a_reader_with_isolation_gets_only_what_is_on_disk(log: Log) -> None:
    log.append_many([b"disk"] * 3, durable=True)
    log.append_many([b"more"] * 2)
    with log.reader("r", isolation="synced") as reader, log.reader("new", "latest", isolation="synced") as new:
        assert reader.isolation == "synced"
        assert new.sequence == 3
        assert sequences(reader.read()) == [0, 1, 2]
        assert list(reader.follow(timeout=0)) == []
        log.sync()
        assert sequences(reader.read()) == [3, 4]


def test_a_view_of_a_reader_moves_it_when_its_block_has_ended_well(filled: Log) -> None:
    with filled.reader("r", start=4) as reader:
        with pytest.raises(KeyError), reader.view():
            raise KeyError
        assert reader.sequence == 4
        with reader.view() as value:
            assert value == b"0004"
        assert reader.sequence == 5
        reader.seek(30)
        with pytest.raises(OutOfRange), reader.view():
            pass
        assert reader.sequence == 30


def test_a_lag_counts_what_is_left_to_read(filled: Log) -> None:
    with filled.reader("r", start=25) as reader:
        lag = reader.lag()
        assert lag.records == 5
        assert lag.bytes > 20
        assert (lag.seconds > 0) == ("timestamps" in filled.capabilities)
        list(reader.read())
        assert reader.lag() == Lag(0, 0, 0.0)
        (listed,) = filled.readers()
        assert (listed.name, listed.sequence, listed.damaged, listed.expired) == ("r", 25, False, False)
        assert listed.lag is not None
        assert listed.lag.records == 5


def test_a_deleted_reader_starts_afresh(filled: Log) -> None:
    with filled.reader("r", start=9):
        pass
    filled.delete_reader("r")
    assert filled.readers() == []
    with pytest.raises(NoSuchReader):
        filled.delete_reader("r")
    with filled.reader("r") as reader:
        assert reader.sequence == 0


def test_a_closed_reader_raises_closed(filled: Log) -> None:
    reader = filled.reader("r")
    reading, following = reader.read(), reader.follow()
    next(reading)
    reader.close()
    reader.close()
    assert reader.closed
    assert "closed" in repr(reader)
    calls: tuple[Any, ...] = (reader.read, reader.follow, reader.follow_async, reader.commit, reader.rewind, reader.lag)
    for call in (*calls, lambda: reader.seek(0), lambda: next(reading), lambda: next(following)):
        with pytest.raises(Closed):
            call()
    with pytest.raises(Closed), reader.view():
        pass


def test_closing_the_log_ends_its_readers(filled: Log) -> None:
    reader = filled.reader("r")
    reading = reader.read()
    next(reading)
    filled.close()
    for call in (reader.read, reader.commit, lambda: next(reading)):
        with pytest.raises(Closed):
            call()
    reader.close()


def test_a_reader_gets_the_gap_that_came_before_its_place_and_stands_after_it(log: Log) -> None:
    with log.reader("r") as reader:
        first = lose_oldest(log)
        with pytest.raises(GapError) as raised:
            next(reader.read())
        assert raised.value.gap.last == first - 1
        assert reader.sequence == first
        reader.seek(0)
        with pytest.raises(GapError), reader.view():
            pass
        assert reader.sequence == first
        reader.seek(0)
        skipping = reader.read(on_gap="skip", limit=1)
        assert next(skipping).sequence == first
        assert skipping.missed == first
