"""Quotas and the disk's low-water mark, by a clock and a disk that the tests hold in their hands."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from clocks import StoppedClock
from hypothesis import given
from hypothesis import strategies as st

import kvspool
from hub import errors
from hub.errors import HubError, HubFull, QuotaExceeded
from hub.security.quotas import INTERVAL, LEAST_FILES, MOST_CALLS, MOST_OF_CONNECTION, Meter, Meters, Quota, Space, TokenBucket
from kvspool import system

GIB = 1 << 30


class Disk(StoppedClock):
    """A disk of which the test says how much is free."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 100 * GIB
        self.free_files = 1_000_000
        self.files = 2_000_000
        self.looks = 0

    def free_space(self, path: str | os.PathLike[str]) -> os.statvfs_result:
        self.looks += 1
        return os.statvfs_result((4096, 512, 0, 0, self.free // 512, self.files, self.free_files, self.free_files, 0, 255))


@pytest.fixture
def disk() -> Iterator[Disk]:
    with system.replaced(Disk()) as disk:
        assert isinstance(disk, Disk)
        yield disk


# Rates.


def test_what_is_beyond_the_burst_is_paid_for_by_waiting(disk: Disk) -> None:
    bucket = TokenBucket(100, burst=50)
    assert bucket.take(50) == 0
    assert bucket.take(100) == pytest.approx(1.0)
    assert bucket.take(10) == pytest.approx(1.1)
    disk.pass_(1.1)
    assert bucket.take(0) == 0
    disk.pass_(1000)
    assert bucket.take(60) == pytest.approx(0.1)


def test_a_caller_without_patience_takes_nothing_of_an_incomplete_amount(disk: Disk) -> None:
    bucket = TokenBucket(10, burst=2)
    assert [bucket.try_take(1) for _ in range(4)] == [True, True, False, False]
    disk.pass_(0.1)
    assert [bucket.try_take(1) for _ in range(2)] == [True, False]


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 5)), max_size=30))
def test_a_peer_that_waits_as_asked_never_takes_more_than_rate_and_burst(steps: list[tuple[float, float]]) -> None:
    with system.replaced(Disk()) as clock:
        assert isinstance(clock, Disk)
        bucket, began, taken = TokenBucket(100, burst=70), clock.monotonic(), 0.0
        for amount, pause in steps:
            wait = bucket.take(amount)
            taken += amount
            clock.pass_(wait + pause)
            assert taken <= 70 + 100 * (clock.monotonic() - began) + 1e-3


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=30))
def test_a_peer_that_waits_as_asked_gets_the_whole_rate(amounts: list[float]) -> None:
    with system.replaced(Disk()) as clock:
        assert isinstance(clock, Disk)
        bucket, began = TokenBucket(100, burst=70), clock.monotonic()
        for amount in amounts:
            clock.pass_(bucket.take(amount))
        assert clock.monotonic() - began <= max(0.0, sum(amounts) - 70) / 100 + 1e-3


def test_a_rate_of_nothing_is_none(disk: Disk) -> None:
    with pytest.raises(ValueError):
        TokenBucket(0)


# Quotas.


def test_bytes_are_counted_until_there_are_too_many_and_go_again(disk: Disk) -> None:
    meter = Meter("jfk", Quota(bytes=1000))
    meter.stored = 500
    meter.store(500)
    with pytest.raises(QuotaExceeded) as caught:
        meter.store(1)
    assert str(caught.value) == "jfk may have no more bytes: its quota is 1000"
    assert caught.value.retry_after
    assert meter.stored == 1000
    meter.release(300)
    meter.store(300)
    meter.release(5000)
    assert meter.stored == 0


def test_shards_and_connections_have_their_limits(disk: Disk) -> None:
    meter = Meter("jfk", Quota(shards=2, connections=1))
    with meter.shards("jfk", 2, lambda: {}), meter.shards("jfk", 2, lambda: {"jfk": 2}):
        for client, known in (("jfk-1", {}), ("jfk-1", {"jfk": 2})):
            with pytest.raises(QuotaExceeded, match="shards"), meter.shards(client, 1, lambda known=known: known):
                pytest.fail("a third shard was let in")
    with meter.shards("jfk-1", 1, lambda: {"jfk": 1}), meter.shards("jfk-1", 1, lambda: {"jfk": 1}):
        pass
    with meter.call("one"), meter.call("one"):
        with pytest.raises(QuotaExceeded, match="connections"), meter.call("another"):
            pytest.fail("a second connection was let in")
        assert meter.calls == 2
    with pytest.raises(RuntimeError), meter.call("another"):
        raise RuntimeError
    assert meter.calls == 0


def test_without_a_quota_everything_passes_and_is_counted(disk: Disk) -> None:
    meter = Meter("jfk")
    meter.store(1 << 60)
    assert meter.pace(1 << 60) == 0
    with meter.call(1), meter.call(2):
        assert (meter.stored, meter.calls) == (1 << 60, 2)


def test_the_rate_is_of_all_calls_of_a_principal(disk: Disk) -> None:
    meter = Meter("jfk", Quota(rate=1000))
    assert meter.pace(1000) == 0
    assert meter.pace(500) == pytest.approx(0.5)
    assert meter.pace(500) == pytest.approx(1.0)


def test_who_does_not_wait_brings_no_more(disk: Disk) -> None:
    meter = Meter("jfk", Quota(rate=1000))
    assert meter.pace(1000) == 0
    assert meter.pace(6000) == pytest.approx(6.0)
    with pytest.raises(QuotaExceeded, match="bytes a second") as caught:
        meter.pace(1)
    assert caught.value.retry_after == pytest.approx(6.0)
    disk.pass_(1.0)
    assert meter.pace(1000) == pytest.approx(6.0)


def test_a_new_quota_holds_at_once_and_keeps_what_was_counted(disk: Disk) -> None:
    meters = Meters()
    meter = meters.of("jfk", Quota(bytes=100, rate=10))
    meter.store(80)
    meter.pace(40)
    assert meters.of("jfk", Quota(bytes=50, rate=10)) is meter
    with pytest.raises(QuotaExceeded):
        meter.store(1)
    assert meter.stored == 80
    assert meter.pace(0) > 0  # the same rate forgets no debt
    meters.of("jfk", Quota(bytes=100, rate=20))
    meter.store(20)
    assert meter.pace(0) == 0
    assert meters.of("lga", Quota()) is not meter


def test_threads_together_store_no_more_than_the_quota(disk: Disk) -> None:
    meter = Meter("jfk", Quota(bytes=1000, connections=3))
    stored: list[int] = []

    def store() -> None:
        for _ in range(100):
            try:
                with meter.call(threading.get_ident()):
                    meter.store(7)
                    stored.append(7)
            except QuotaExceeded:
                pass

    threads = [threading.Thread(target=store) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(stored) == meter.stored == 994
    assert meter.calls == 0


# The disk.


def test_ingest_stops_below_the_mark_and_continues_above_the_higher_one(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = Space(tmp_path, low=8 * GIB, high=10 * GIB)
    space.admit(GIB)
    below, above = [(8 * GIB - 512, True), (9 * GIB, True), (10 * GIB - 512, True)], [(10 * GIB, False), (8 * GIB, False)]
    for free, is_full in [(8 * GIB, False), *below, *above]:
        disk.free = free
        disk.pass_(1.01 * INTERVAL)
        if is_full:
            with pytest.raises(HubFull) as caught:
                space.admit(0)
            assert caught.value.retry_after and caught.value.retry_after > 0
        else:
            space.admit(0)
        assert space.is_full == is_full
    assert [record.getMessage().split("ingest ")[1].split(",")[0] for record in caplog.records] == ["stops", "continues"]


def test_the_disk_is_asked_ten_times_a_second_at_most(disk: Disk, tmp_path: Path) -> None:
    space = Space(tmp_path, low=GIB)
    assert disk.looks == 1
    for _ in range(1000):
        disk.pass_(0.001)
        space.admit(1)
    assert 9 <= disk.looks <= 11


def test_between_two_looks_no_more_is_let_in_than_there_is_room_for(disk: Disk, tmp_path: Path) -> None:
    space = Space(tmp_path, low=8 * GIB)
    disk.free = 8 * GIB + 1024
    disk.pass_(1.01 * INTERVAL)
    space.admit(600)
    with pytest.raises(HubFull) as caught:
        space.admit(600)
    assert caught.value.retry_after is not None and 0 < caught.value.retry_after < 2 * INTERVAL
    assert not space.is_full  # admitted bytes may be in files that existed before
    space.admit(400)
    disk.pass_(1.01 * INTERVAL)
    space.admit(1000)


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 0.3)), max_size=60))
def test_what_is_let_in_and_written_never_takes_the_disk_below_the_mark(steps: list[tuple[int, float]]) -> None:
    with system.replaced(Disk()) as disk:
        assert isinstance(disk, Disk)
        disk.free = 8192 * 512
        space = Space("/", low=4096 * 512)
        for blocks, pause in steps:
            try:
                space.admit(blocks * 512)
                disk.free -= blocks * 512
            except HubFull:
                pass
            assert disk.free >= space.low
            disk.pass_(pause)


def test_a_disk_without_room_for_files_is_full_and_one_that_does_not_count_them_is_not(disk: Disk, tmp_path: Path) -> None:
    space = Space(tmp_path, low=GIB)
    disk.free_files = LEAST_FILES - 1
    disk.pass_(1.01 * INTERVAL)
    with pytest.raises(HubFull):
        space.admit(1)
    disk.files = disk.free_files = 0
    disk.pass_(1.01 * INTERVAL)
    space.admit(1)


def test_the_real_disk_is_asked(tmp_path: Path) -> None:
    space = Space(tmp_path, low=0)
    found = os.statvfs(tmp_path)
    assert 0 < space.free <= found.f_blocks * found.f_frsize
    space.admit(1)
    with pytest.raises(HubFull):
        Space(tmp_path, low=1 << 62).admit(1)
    with pytest.raises(FileNotFoundError):
        Space(tmp_path / "none", low=0)
    for low, high in ((2, 1), (-1, 1)):
        with pytest.raises(ValueError):
            Space(tmp_path, low=low, high=high)


def test_every_error_of_a_hub_is_listed_and_says_when_to_try_again() -> None:
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HubError)]
    assert len(found) >= 6
    for one in found:
        assert issubclass(one, kvspool.KvspoolError)
        assert one.__doc__ and 1 <= one.exit_code <= 9
        assert errors.__doc__ is not None and one.__name__ in errors.__doc__
    assert HubFull("x", 2.0).retry_after == 2.0
    assert QuotaExceeded("x").retry_after is None


@pytest.mark.parametrize(("connections", "limit"), [(None, MOST_CALLS), (MOST_CALLS + 5, MOST_CALLS + 5)])
def test_the_calls_of_a_peer_are_limited(disk: Disk, connections: int | None, limit: int) -> None:
    meter = Meter("jfk", Quota(connections=connections))
    with ExitStack() as calls:
        for number in range(limit):
            calls.enter_context(meter.call(number))
        with pytest.raises(QuotaExceeded) as caught, meter.call(0):
            pass
        assert caught.value.retry_after
    with meter.call(0):
        assert meter.calls == 1


def test_the_calls_on_one_connection_are_limited(disk: Disk) -> None:
    meter = Meter("jfk")
    with ExitStack() as calls:
        for _ in range(MOST_OF_CONNECTION):
            calls.enter_context(meter.call("one"))
        with pytest.raises(QuotaExceeded, match="one connection"), meter.call("one"):
            pass
        with meter.call("another"):
            assert meter.calls == MOST_OF_CONNECTION + 1
    assert meter.calls == 0
