"""Many logs read as one: the order, the waiting, and what happens when the system has no more to give."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from alarms import Interrupt, Tracer
from children import in_child, start
from clocks import WaitingClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import ALL

import kvspool
import shard
from kvspool import Gap, system
from kvspool.errors import Corruption, LogVanished
from kvspool.journal import JournalBatch
from kvspool.kernel.frames import TWIN
from kvspool.record import NO_TIME
from shard import ShardSet
from shard.merge import LOOK_AROUND, FollowingMerge, Merge

SMALL = 4096
KINDS: dict[str, dict[str, Any]] = {"spool": {"capacity": 65536}, "keyed": {"capacity": 65536, "codec": "keyed"}, "kvj": {"format": "kvj"}}
TIMES = st.lists(st.lists(st.integers(1, 6), max_size=12).map(sorted), min_size=4, max_size=4)
"""The timestamps of the records of four shards; few different ones, so that most of them tie."""


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[ShardSet]:
    """Four shards of 64 KiB each."""
    with shard.create(tmp_path / "root", prefix="p", bits=2, capacity=65536) as shards:
        yield shards


def fill(shards: ShardSet, times: list[list[int]]) -> None:
    """Append to each shard, whatever its keys are, a record for each timestamp."""
    for index, stamps in enumerate(times):
        for at, timestamp in enumerate(stamps):
            shards.shards[index].append([index, at], timestamp=timestamp)


def places(records: Any) -> list[tuple[int, int, int]]:
    return [(record.timestamp, record.shard, record.sequence) for record in records]


def inotify_descriptors() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:inotify"
        except FileNotFoundError:
            continue
    return count


# Order.


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(times=TIMES, more=TIMES, limit=st.none() | st.integers(0, 60))
def test_a_merge_is_a_sort_by_timestamp_that_keeps_each_shard_s_order(
    times: list[list[int]], more: list[list[int]], limit: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder, shard.create(folder, prefix="p", bits=2, capacity=SMALL) as shards:
        fill(shards, times)
        model = sorted((timestamp, index, at) for index, stamps in enumerate(times) for at, timestamp in enumerate(stamps))
        assert places(shards.read(limit=limit)) == model[:limit]

        with closing(shards.follow(timeout=0)) as following:
            assert places(following) == model
            fill(shards, more)
            # A timestamp never goes back within a shard, so what is appended late is stamped as late as what it follows.
            late = sorted(
                (max([timestamp, *stamps[-1:]]), index, at + len(stamps))
                for index, stamps in enumerate(times)
                for at, timestamp in enumerate(more[index])
            )
            assert places(following) == late


def test_records_of_the_same_timestamp_come_shard_by_shard_and_in_order(shards: ShardSet) -> None:
    fill(shards, [[7] * 5] * 4)
    assert places(shards) == [(7, index, at) for index in range(4) for at in range(5)]


def test_more_records_than_a_batch_holds_come_in_order(shards: ShardSet) -> None:
    count = LOOK_AROUND * 2 + 17
    for index in range(4):
        for at in range(count):
            shards.shards[index].append(b"", timestamp=1000 + at * 4 + index)
    assert places(shards) == [(1000 + at * 4 + index, index, at) for at in range(count) for index in range(4)]


def test_a_record_that_comes_late_is_returned_late_whatever_its_timestamp(shards: ShardSet) -> None:
    with closing(shards.follow(timeout=0)) as following:
        shards.shards[0].append("new", timestamp=1000)
        assert next(following).data == "new"
        shards.shards[1].append("old", timestamp=10)
        assert next(following).data == "old"


def test_a_silent_shard_that_speaks_is_heard_while_another_one_never_stops(shards: ShardSet) -> None:
    with closing(shards.follow()) as following:
        shards.shards[0].append_many([b""] * 3 * LOOK_AROUND, timestamp=5)
        assert next(following).shard == 0
        shards.shards[1].append("me too", timestamp=1)
        heard = next(at for at, record in enumerate(following) if record.shard == 1)
    assert heard <= LOOK_AROUND


def test_a_gap_comes_before_the_records_that_follow_it(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=SMALL) as shards:
        shards.shards[0].append_many([b""] * 20, timestamp=1)
        shards.shards[1].append_many([bytes(100)] * 100, timestamp=2)
        got = list(shards.read(start={1: 3}, on_gap="yield"))
        assert isinstance(got[0], Gap)
        first = shards.stats()[1].first_sequence
        assert (got[0].first, got[0].last) == (3, first - 1)
        assert places(got[1:]) == [(1, 0, at) for at in range(20)] + [(2, 1, at) for at in range(first, 100)]


def test_a_record_that_is_stamped_after_the_last_time_stops_no_log_and_comes_last(tmp_path: Path) -> None:
    make = """
import sys, shard
from kvspool import system
class Wrong(system.Port):
    def now(self):
        return 2**63 + 5
shards = shard.create(sys.argv[1], prefix="p", bits=1, capacity=65536)
shards.shards[0].append("early", timestamp=1)
with system.replaced(Wrong()):
    shards.shards[0].append("late")
shards.shards[1].append("other", timestamp=2)
"""
    # Compiled, a writer can't have a clock that is so wrong.
    subprocess.run([sys.executable, "-c", make, tmp_path / "root"], check=True, env={**os.environ, "KVSPOOL_NO_EXTENSIONS": "1"})
    with shard.open(tmp_path / "root", prefix="p") as shards:
        for reading in (shards.read(), shards.follow(timeout=0)):
            assert [record.data for record in reading] == ["early", "other", "late"]


def test_records_without_a_time_come_first(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=1, format="sej") as shards:
        shards.shards[0].append_batch(JournalBatch([b"1970"], timestamps=[0]))
        shards.shards[1].append_batch(JournalBatch([b"none"], timestamps=[NO_TIME]))
        assert [record.value for record in shards.read()] == [b"none", b"1970"]


def test_a_merge_counts_more_lost_records_than_an_int64_holds(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", first_sequence=(1 << 63) + 9) as log:
        log.append(b"first")
        with closing(Merge(on_gap="skip")) as merge:
            merge.add("log", log.cursor(0, bounded=True), kvspool.Record)
            assert [record.value for record in merge] == [b"first"]
            assert merge.missed == (1 << 63) + 9


def test_a_limit_and_a_timeout_may_be_any_number_but_a_timeout_of_nan_is_refused(shards: ShardSet) -> None:
    shards.append_many([b"v"] * 9)
    assert len(list(shards.read(limit=10**30))) == 9
    for timeout in (-1e9, float("-inf"), -1, 0):
        with system.replaced(WaitingClock()) as clock, closing(shards.follow(timeout=timeout, limit=10**30)) as following:
            assert len(list(following)) == 9
            assert isinstance(clock, WaitingClock)
            assert clock.waits == []
    with pytest.raises(ValueError, match="timeout is a number of seconds, not nan"):
        shards.follow(timeout=float("nan"))


def test_an_empty_merge_ends_at_once() -> None:
    assert list(Merge()) == []
    with closing(FollowingMerge(timeout=0)) as following:
        assert list(following) == []


def test_a_closed_merge_is_over(shards: ShardSet) -> None:
    fill(shards, [[1, 2], [1], [], [3]])
    reading = shards.read()
    next(reading)
    reading.close()
    assert list(reading) == []
    following = shards.follow()
    next(following)
    following.close()
    following.close()
    assert list(following) == []


# Waiting.


def test_a_follower_wakes_for_each_of_64_shards_on_one_descriptor(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=6, capacity=SMALL) as shards:
        before = inotify_descriptors()
        ready, tell = os.pipe()
        turn, pass_on = os.pipe()

        def append() -> None:
            for index in range(64):
                os.read(turn, 1)
                shards.shards[index].append(index)
            os.read(ready, 1)

        wait = start(append)
        with closing(shards.follow()) as following:
            for index in range(64):
                # The child appends only now, while we are about to sleep, or asleep.
                os.write(pass_on, b"x")
                record = next(following)
                assert (record.shard, record.data) == (index, index)
            assert inotify_descriptors() == before + 1
        assert inotify_descriptors() == before
        os.write(tell, b"x")
        wait()
        for fd in (ready, tell, turn, pass_on):
            os.close(fd)


def test_a_follower_ends_after_the_timeout_without_a_record(shards: ShardSet) -> None:
    with system.replaced(WaitingClock()) as clock, closing(shards.follow(timeout=1.75)) as following:
        assert list(following) == []
        assert isinstance(clock, WaitingClock)
        assert clock.time == 1001.75
        assert clock.waits == [0.5, 0.5, 0.5, 0.25]
        # Each record restarts the timeout.
        shards.append("one")
        assert len(list(following)) == 1
        assert clock.time == 1003.5


def test_a_timeout_of_0_takes_what_is_there(shards: ShardSet) -> None:
    shards.append_many([b"v"] * 9)
    with system.replaced(WaitingClock()) as clock, closing(shards.follow(timeout=0)) as following:
        assert len(list(following)) == 9
        assert isinstance(clock, WaitingClock)
        assert clock.waits == []


def test_a_writer_that_appends_between_the_last_look_and_the_sleep_is_not_missed(shards: ShardSet) -> None:
    class Sneaky(WaitingClock):
        """Appends at the last moment before the sleep, and then lets only the bell end it."""

        left = 3

        def wait_readable(self, fd: int, timeout: float) -> bool:
            if self.left:
                self.left -= 1
                shards.shards[self.left].append("sneaked in")
            return system.Port.wait_readable(self, fd, 30)

    with system.replaced(Sneaky()), closing(shards.follow(limit=3)) as following:
        assert [record.shard for record in following] == [2, 1, 0]


class Exhausted(WaitingClock):
    """A system that has no inotify instance left, or no watch."""

    def __init__(self, number: int, watches: int = -1) -> None:
        super().__init__()
        self.number = number
        self.watches = watches

    def inotify(self) -> Any:
        if self.watches < 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().inotify()

    def add_watch(self, *arguments: Any) -> int:
        self.watches -= 1
        if self.watches < 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().add_watch(*arguments)


@pytest.mark.parametrize(
    ("number", "watches"),
    [(errno.EMFILE, -1), (errno.ENFILE, -1), (errno.ENOMEM, -1), (errno.ENOSPC, 0), (errno.ENOSPC, 2), (errno.ENOMEM, 3)],
    ids=str,
)
def test_a_follower_without_inotify_looks_often_and_misses_nothing(shards: ShardSet, number: int, watches: int) -> None:
    class Appending(Exhausted):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if len(self.sleeps) <= 8:
                shards.append(len(self.sleeps))

    with system.replaced(Appending(number, watches)) as clock, closing(shards.follow(timeout=1)) as following:
        assert [record.data for record in following] == list(range(1, 9))
        assert isinstance(clock, Exhausted)
        assert max(clock.sleeps) <= 0.005
        assert clock.waits == []


@pytest.mark.parametrize("watches", [-1, 0, 3])
def test_another_failure_of_inotify_is_raised_and_leaves_nothing_open(
    shards: ShardSet, left_open: Callable[..., set[str]], watches: int
) -> None:
    with system.replaced(Exhausted(errno.EACCES, watches)), closing(shards.follow()) as following:
        assert left_open(PermissionError, lambda: next(following)) == set()


def test_a_queue_of_events_that_ran_over_costs_nothing(shards: ShardSet) -> None:
    class Overflowing(WaitingClock):
        """Reports an overflow instead of the events."""

        def read_events(self, fd: int) -> bytes:
            super().read_events(fd)
            return (0xFFFFFFFF).to_bytes(4, "little") + (0x4000).to_bytes(4, "little") + bytes(8)

        def wait_readable(self, fd: int, timeout: float) -> bool:
            if not self.waits:
                shards.shards[3].append("behind the overflow")
            return super().wait_readable(fd, timeout)

    with system.replaced(Overflowing()), closing(shards.follow(limit=1)) as following:
        assert next(following).data == "behind the overflow"


def test_a_follower_that_may_only_read_looks_often(shards: ShardSet) -> None:
    shards.append_many([b"before"] * 4)

    class ReadOnly(WaitingClock):
        def open(self, path: Any, flags: int, mode: int = 0o600) -> int:
            if flags & os.O_RDWR:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return super().open(path, flags, mode)

        def wait_readable(self, fd: int, timeout: float) -> bool:
            if len(self.waits) == 2:
                shards.append("seen")
            return super().wait_readable(fd, timeout)

    with system.replaced(ReadOnly()) as clock, shard.open(shards.root) as readers:
        with pytest.raises(PermissionError):
            readers.append(b"v")
        with closing(readers.follow("latest", timeout=1)) as following:
            assert [record.data for record in following] == ["seen"]
        assert isinstance(clock, WaitingClock)
        assert max(clock.waits) <= 0.005


def test_a_merge_without_a_watcher_fails_as_python_does() -> None:
    class Unarmed(FollowingMerge):
        def arm(self) -> Any:
            return None

    def follow() -> str:
        with pytest.raises(AttributeError) as caught:
            next(Unarmed(timeout=1))
        return str(caught.value)

    assert in_child(follow) == "'NoneType' object has no attribute 'wait'"


# Exceptions out of signal handlers.


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_that_an_exception_ended_is_made_again(tmp_path: Path, kind: str) -> None:
    class Interrupting(WaitingClock):
        """Raises when the n-th watch is added. Later, appends at the last moment before a sleep, and notes whether that ends it."""

        def __init__(self, nth: int) -> None:
            super().__init__()
            self.nth = nth
            self.woken: list[bool] = []

        def add_watch(self, *arguments: Any) -> int:
            self.nth -= 1
            if self.nth == 0:
                raise Interrupt
            return super().add_watch(*arguments)

        def wait_readable(self, fd: int, timeout: float) -> bool:
            if timeout == 0:
                return super().wait_readable(fd, 0)
            shards.shards[len(self.woken) % 2].append("wakes")
            self.woken.append(system.Port.wait_readable(self, fd, 0))
            return self.woken[-1]

    with shard.create(tmp_path / "root", prefix="p", bits=1, **KINDS[kind]) as shards:
        for one in shards.shards:
            one.append("first")
        interrupts = 0
        for nth in range(1, 8):
            with system.replaced(Interrupting(nth)) as port, closing(shards.follow("latest", timeout=0)) as following:
                assert isinstance(port, Interrupting)
                with suppress(Interrupt):
                    assert list(following) == []
                    break
                interrupts += 1
                for _ in range(2):
                    for one in shards.shards:
                        one.append("after")
                    assert sorted(record.shard for record in following) == [0, 1]
                following.timeout = None
                assert [next(following).shard for _ in range(6)] == [0, 1] * 3
                assert port.woken == [True] * 6
        assert interrupts >= 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waits", [False, True], ids=["read", "follow"])
def test_an_exception_out_of_a_signal_handler_costs_a_merge_no_record_wherever_it_is_raised(tmp_path: Path, kind: str, waits: bool) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=1, **KINDS[kind]) as shards:

        def append(number: int) -> None:
            for at, one in enumerate(shards.shards):
                one.append_many([{"key": at}] * number)

        append(2)
        is_interrupted = True
        places = count(1, 1 if ALL else 7 if TWIN == "compiled" else 17)  # interpreted, there are some hundred
        while is_interrupted:
            nth = next(places)
            got: list[list[int]] = [[] for _ in shards.shards]

            def take() -> None:
                for record in reading:
                    got[record.shard].append(record.sequence)  # noqa: B023

            first = shards.shards[0].stats().next_sequence if waits else 0
            with closing(shards.follow("latest", timeout=0) if waits else shards.read()) as reading:
                if waits:
                    assert list(reading) == []
                    append(2)
                is_interrupted = Tracer(nth).run(take)
                take()
                if waits:
                    append(1)
                    take()
                assert got == [list(range(first, first + (3 if waits else 2)))] * 2, nth
                assert reading.missed == 0
        assert nth > 20


# Logs that vanish.


def test_a_shard_that_was_deleted_ends_the_following_with_an_error_after_its_last_record(shards: ShardSet) -> None:
    shards.append("last", key=b"k")
    with system.replaced(WaitingClock()), closing(shards.follow()) as following:
        shutil.rmtree(shards.root / "p.2.003")
        assert next(following).data == "last"
        with pytest.raises(LogVanished, match=r"p\.2\.003 was deleted or replaced while it was open"):
            next(following)


def test_a_shard_that_was_replaced_ends_the_following_with_an_error(shards: ShardSet) -> None:
    with system.replaced(WaitingClock()), closing(shards.follow()) as following:
        shutil.rmtree(shards.root / "p.2.001")
        kvspool.create(shards.root / "p.2.001", capacity=SMALL).close()
        with pytest.raises(LogVanished, match=r"p\.2\.001"):
            next(following)


def test_what_was_there_before_a_deletion_can_still_be_read(shards: ShardSet) -> None:
    fill(shards, [[1, 5], [2], [3], [4]])
    reading = shards.read()
    shutil.rmtree(shards.root)
    assert [record.timestamp for record in reading] == [1, 2, 3, 4, 5]


def test_a_child_that_inherits_a_following_merge_takes_no_event_from_its_parent(shards: ShardSet) -> None:
    ready, tell = os.pipe()
    with closing(shards.follow(timeout=60)) as following:

        def child() -> list[Any]:
            os.write(tell, b"x")
            return [next(following).data for _ in range(2)]

        wait = start(child)
        os.read(ready, 1)
        shards.append("one", key=b"k")
        assert next(following).data == "one"
        shards.append("two", key=b"k")
        assert next(following).data == "two"
        assert wait() == ["one", "two"]
    os.close(ready)
    os.close(tell)


@pytest.mark.parametrize("waits", [False, True])
def test_a_log_that_turns_out_damaged_after_some_records_stops_no_other_and_its_error_comes_once(tmp_path: Path, waits: bool) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=1, format="kvj") as shards:
        for index, one in enumerate(shards.shards):
            one.append_many([b"x" * 100] * 5, timestamp=1000 * (index + 1))
        segment = next(iter(sorted((tmp_path / "root" / "p.1.000").rglob("*.kvj"))))
    with open(segment, "r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"\xff")
    with shard.open(tmp_path / "root", prefix="p") as shards:
        handed_out: list[Any] = []
        reading = shards.follow(timeout=0) if waits else shards.read()
        while len(handed_out) < 20:
            try:
                handed_out.append(next(reading).shard)
            except StopIteration:
                break
            except Corruption as error:
                handed_out.append(type(error))
        assert handed_out == [*[0] * 4, Corruption, *[1] * 5]
