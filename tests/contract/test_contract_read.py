"""Reads of a log of any kind: starts, limits, isolation, Gaps, followers in threads and event loops, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from kinds import lose_oldest

import kvspool
from kvspool.errors import GapError, OutOfRange, Unsupported
from kvspool.log import Log
from kvspool.record import Gap


def sequences(items: Any) -> list[int]:
    return [item.sequence for item in items]


def test_a_read_has_every_record_from_its_start_on(filled: Log) -> None:
    assert [record.value for record in filled] == [b"%04d" % number for number in range(30)]
    for start in (0, 1, 7, 29):
        assert sequences(filled.read(start)) == list(range(start, 30))
        assert list(filled.read_values(start)) == [b"%04d" % number for number in range(start, 30)]
        assert sequences(filled.follow(start, timeout=0)) == list(range(start, 30))
    assert sequences(filled.read("earliest")) == list(range(30))
    assert list(filled.read("latest")) == list(filled.read(30)) == []


@pytest.mark.parametrize("verb", ["read", "read_values", "follow", "follow_async"])
def test_starts_that_cannot_be_are_refused(filled: Log, verb: str) -> None:
    call: Callable[..., Any] = getattr(filled, verb)
    for late in (31, 1 << 63, 1 << 64, 1 << 70):
        with pytest.raises(OutOfRange, match="the next one"):
            call(late)
    for wrong in (-1, True, "soon", None, 1.5, datetime(2020, 1, 1)):  # the last one has no zone
        with pytest.raises(ValueError):
            call(wrong)


@pytest.mark.parametrize("verb", ["read", "read_values", "follow", "follow_async", "read_arrow"])
@pytest.mark.parametrize("arguments", [{"limit": -1}, {"on_gap": "ignore"}, {"on_gap": None}, {"isolation": "committed"}], ids=str)
def test_options_that_cannot_be_are_refused(filled: Log, verb: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        getattr(filled, verb)(**arguments)


def test_a_follower_refuses_times_that_are_none(filled: Log) -> None:
    with pytest.raises(ValueError):
        filled.follow(timeout=float("nan"))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            filled.follow(spin=wrong)


@pytest.mark.parametrize("limit", [0, 1, 5, 29, 30, 31, 10**6, None])
def test_a_limit_ends_a_read(filled: Log, limit: int | None) -> None:
    most = 30 if limit is None else min(limit, 30)
    assert sequences(filled.read(limit=limit)) == list(range(most))
    assert len(list(filled.read_values(limit=limit))) == most
    assert sequences(filled.follow(limit=limit, timeout=0)) == list(range(most))
    assert filled.read_arrow(limit=limit).num_rows == most


def test_a_read_ends_where_the_log_ended_when_it_began(filled: Log) -> None:
    reading = filled.read(25)
    assert next(reading).sequence == 25
    filled.append_many([b"late"] * 5)
    assert sequences(reading) == [26, 27, 28, 29]


def test_two_reads_do_not_disturb_each_other(filled: Log) -> None:
    one, other = filled.read(), filled.read(5)
    assert [next(one).sequence, next(other).sequence, next(one).sequence, next(other).sequence] == [0, 5, 1, 6]


def test_get_returns_one_record(filled: Log) -> None:
    assert [filled.get(number).value for number in (0, 13, 29)] == [b"0000", b"0013", b"0029"]
    with pytest.raises(OutOfRange):
        filled.get(30)
    with pytest.raises(OutOfRange):
        filled.get(99)
    with pytest.raises(ValueError):
        filled.get(-1)
    with pytest.raises(TypeError):
        filled.get("latest")  # type: ignore[arg-type]


def test_get_names_the_record_that_is_not_written(log: Log) -> None:
    with pytest.raises(OutOfRange, match="sequence 0 .* is not written yet"):
        log.get(0)
    log.append(b"four")
    with pytest.raises(OutOfRange, match="sequence 1 .* is not written yet"):
        log.get(1)
    for wrong in (2.0, "2", None):
        with pytest.raises(TypeError):
            log.get(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError), log.view(wrong):  # type: ignore[arg-type]
            pass


def test_get_of_a_record_that_is_appended_during_the_call_raises_out_of_range(filled: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    look: Callable[..., Any] = filled._cursor_at

    def look_before_an_append(*arguments: Any, **options: Any) -> Any:
        cursor = look(*arguments, **options)
        filled.append(b"late")
        return cursor

    monkeypatch.setattr(filled, "_cursor_at", look_before_an_append)
    with pytest.raises(OutOfRange, match="sequence 30 "):
        filled.get(30)


def test_last_returns_no_more_records_than_asked_for_next_to_a_writer(filled: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    look: Callable[..., tuple[int, int]] = filled.extent

    def look_before_appends(*arguments: Any) -> tuple[int, int]:
        found = look(*arguments)
        filled.append_many([b"late"] * 5)
        return found

    monkeypatch.setattr(filled, "extent", look_before_appends)
    assert sequences(filled.last()) == [34]
    assert sequences(filled.last(3)) == [37, 38, 39]


def test_last_returns_the_newest_records_in_order(filled: Log) -> None:
    assert sequences(filled.last()) == [29]
    assert sequences(filled.last(3)) == [27, 28, 29]
    assert sequences(filled.last(99)) == list(range(30))
    assert filled.last(0) == []
    with pytest.raises(ValueError):
        filled.last(-1)


def test_a_view_shows_the_stored_bytes_and_ends_with_its_block(filled: Log) -> None:
    with filled.view(13) as value:
        assert isinstance(value, memoryview)
        assert value == b"0013"
    with pytest.raises(ValueError):
        value.tobytes()
    with pytest.raises(OutOfRange), filled.view(30):
        pass


def test_a_read_from_a_time_begins_at_the_first_record_that_is_not_earlier(log: Log) -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for number in range(30):
        log.append(b"%04d" % number, timestamp=number * 1_000_000_000 if "timestamps" in log.capabilities else None)
    if "timestamps" not in log.capabilities:
        with pytest.raises(Unsupported):
            log.read(epoch)
        return
    assert sequences(log.read(epoch + timedelta(seconds=17))) == list(range(17, 30))
    assert sequences(log.read(epoch + timedelta(seconds=16.5))) == list(range(17, 30))
    assert sequences(log.follow((epoch + timedelta(seconds=17)).astimezone(timezone(timedelta(hours=2))), timeout=0)) == list(range(17, 30))
    assert log.get(17).time == epoch + timedelta(seconds=17)
    assert sequences(log.read(epoch + timedelta(days=1))) == []
    assert sequences(log.read(datetime.min.replace(tzinfo=UTC))) == list(range(30))
    assert sequences(log.read(datetime.max.replace(tzinfo=UTC))) == []


def test_isolation_hides_what_is_not_on_disk(log: Log) -> None:
    log.append_many([b"disk"] * 3, durable=True)
    synced = log.extent("synced")[1]
    log.append_many([b"more"] * 2)
    assert synced == 3
    assert sequences(log.read(isolation="synced")) == [0, 1, 2]
    assert len(list(log.read_values(isolation="synced"))) == 3
    assert log.read_arrow(isolation="synced").num_rows == 3
    assert sequences(log.follow(isolation="synced", timeout=0)) == [0, 1, 2]
    later = log.follow("latest", isolation="synced", timeout=30)  # after the last one on disk
    syncing = threading.Timer(0.01, log.sync)
    syncing.start()
    assert [next(later).sequence, next(later).sequence] == [3, 4]
    syncing.join()
    later.close()


# Records that are lost.


@pytest.fixture
def lost(log: Log) -> tuple[Log, int]:
    """A log that has lost its first records; and the sequence of the oldest one that is left."""
    return log, lose_oldest(log)


def test_a_gap_says_exactly_which_records_are_lost(lost: tuple[Log, int]) -> None:
    log, first = lost
    end = log.extent()[1]
    reading = log.read(0)
    with pytest.raises(GapError) as raised:
        next(reading)
    gap = raised.value.gap
    assert (gap.first, gap.last, gap.count, gap.path) == (0, first - 1, first, str(log.path))
    assert gap.reason == ("overrun" if log.kind == "spool" else "trimmed")
    assert f"{first} records lost ({gap.reason}): sequences 0 to {first - 1}" in str(raised.value)
    assert sequences(reading) == list(range(first, end))
    assert reading.missed == first
    yielded = list(log.read(0, on_gap="yield"))
    assert yielded[0] == gap
    assert not any(isinstance(item, Gap) for item in yielded[1:])
    assert len(list(log.read(0, on_gap="yield", limit=2))) == 3  # a Gap does not count against the limit
    assert sequences(log.read(0, on_gap="skip", limit=2)) == [first, first + 1]
    skipping = log.read(0, on_gap="skip")
    assert sequences(skipping) == list(range(first, end))
    assert skipping.missed == first
    assert sequences(log.read("earliest")) == list(range(first, end))
    assert len(log) == end - first


def test_a_lost_record_raises_its_gap(lost: tuple[Log, int]) -> None:
    log, first = lost
    with pytest.raises(GapError):
        log.get(first - 1)
    with pytest.raises(GapError), log.view(0):
        pass
    with pytest.raises(GapError):
        log.read_arrow(0)
    assert log.read_arrow(0, on_gap="skip").num_rows == len(log)
    assert log.get(first).sequence == first


# Followers.


@pytest.mark.parametrize("spin", [0.0, 0.01])
def test_a_follower_gets_records_as_they_come(log: Log, spin: float) -> None:
    with kvspool.open(log.path) as other:
        following = log.follow(timeout=30, spin=spin)
        thread = threading.Thread(target=lambda: [other.append(b"%04d" % number) for number in range(50)])
        thread.start()
        assert [next(following).value for _ in range(50)] == [b"%04d" % number for number in range(50)]
        thread.join()
        following.close()


def test_a_follower_ends_after_its_timeout_and_can_be_asked_again(log: Log) -> None:
    following = log.follow(timeout=0)
    assert list(following) == []
    log.append(b"four")
    assert sequences(following) == [0]
    assert list(log.follow(timeout=-1, spin=0.5)) == list(log)


def test_an_event_loop_follows_a_log_while_it_does_other_work(log: Log) -> None:
    async def run() -> list[bytes]:
        found = []
        async with log.follow_async(timeout=30) as following:
            asyncio.get_running_loop().call_later(0.01, log.append_many, [b"%04d" % number for number in range(10)])
            async for record in following:
                found.append(record.value)
                if len(found) == 10:
                    break
        return found

    assert asyncio.run(run()) == [b"%04d" % number for number in range(10)]


def test_a_cancelled_wait_of_an_event_loop_loses_no_record(log: Log) -> None:
    async def run() -> list[int]:
        following = log.follow_async()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(following), 0.01)
        log.append_many([b"four"] * 2)
        found = [(await anext(following)).sequence for _ in range(2)]
        await following.aclose()
        return found

    assert asyncio.run(run()) == [0, 1]
