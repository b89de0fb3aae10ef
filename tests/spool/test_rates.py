"""Rates: what writers and readers count, under clocks that do as they like, and what is made of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import Run
from loops import twins
from rings import lock_twin

import hub
import kvspool
from kvspool import Gap, Spool, system
from kvspool.cli import watch
from kvspool.engine import times
from kvspool.kernel import frames_py as frames
from kvspool.spool import format, spool_files
from kvspool.spool.rates import Bucket, Rate, Rates, count_gap, rates, together

START = 1_700_000_000  # seconds since the epoch, and 20 seconds into a minute
SECOND = 1_000_000_000
FRAME = 136  # bytes that a value of 100 takes


class Clock(system.Port):
    """A clock that does not move until it is set; `waits` many sleeps end with Ctrl-C."""

    def __init__(self, seconds: float = START, waits: int = 0) -> None:
        super().__init__()
        self.seconds = seconds
        self.waits = waits

    def now(self) -> int:
        return int(self.seconds * SECOND)

    def sleep(self, seconds: float) -> None:
        self.waits -= 1
        if self.waits <= 0:
            raise KeyboardInterrupt
        self.seconds += seconds


@pytest.fixture
def clock(interpreted: None) -> Iterator[Clock]:
    """Let logs use the interpreted twin, which asks this clock."""
    with system.replaced(clock := Clock()):
        yield clock


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as made:
        yield made


def fill(log: Spool, count: int) -> None:
    log.append_many([bytes(100)] * count)


def words_of(log: Spool) -> Any:
    assert log._files is not None
    return log._files.control.cast("Q")


def test_rates_are_of_whole_seconds_and_series_of_what_happened(log: Spool, clock: Clock) -> None:
    fill(log, 10)
    clock.seconds += 0.5
    log.append(bytes(100))
    clock.seconds += 0.5
    fill(log, 3)
    found = log.stats().rates
    assert found.time == START + 1
    assert found.seconds == [Bucket(START, 11, 11 * FRAME, 0), Bucket(START + 1, 3, 3 * FRAME, 0)]
    assert found.minutes == [Bucket(START - 20, 14, 14 * FRAME, 0)]
    assert found.hours == [Bucket(START - START % 3600, 14, 14 * FRAME, 0)]
    assert found.last_second == Rate(11, 11 * FRAME, 0)
    assert found.last_minute == Rate(11 / 60, 11 * FRAME / 60, 0)
    assert found.last_hour == Rate(0, 0, 0), "no whole minute is over"
    clock.seconds = START + 100
    assert log.stats().rates.last_hour == Rate(14 / 3600, 14 * FRAME / 3600, 0)


def test_series_have_64_buckets(log: Spool, clock: Clock) -> None:
    for second in range(200):
        clock.seconds = START + second
        fill(log, second + 1)
    found = log.stats().rates
    assert [bucket.time for bucket in found.seconds] == list(range(START + 136, START + 200))
    assert [bucket.records for bucket in found.seconds] == list(range(137, 201))
    assert sum(bucket.records for bucket in found.minutes) == 200 * 201 // 2
    assert found.last_minute.records == sum(range(140, 200)) / 60
    clock.seconds = START + 65 * 3600
    quiet = log.stats().rates
    assert quiet == Rates(int(clock.seconds), *[Rate(0, 0, 0)] * 3, [], [], [])


def test_a_clock_that_jumps_ahead_and_back_leaves_nothing_that_stays_wrong(log: Spool, clock: Clock) -> None:
    fill(log, 1)
    for jump in (10 * 365 * 86400, -10 * 365 * 86400, 64, -64):
        clock.seconds = START + jump
        fill(log, 5)
        assert log.stats().rates.seconds[-1] == Bucket(START + jump, 5, 5 * FRAME, 0)
    clock.seconds = START
    fill(log, 2)
    assert log.stats().rates.seconds[-1].records == 2
    assert all(START - 64 < bucket.time <= START for bucket in log.stats().rates.seconds)


def test_a_record_counts_when_it_is_appended_whatever_its_timestamp_says(log: Spool, clock: Clock) -> None:
    fill(log, 1)
    log.append(bytes(100), timestamp=5)
    log.append(bytes(100), timestamp=clock.now() + times.MOST_AHEAD)
    log.append_many([bytes(100)] * 2, timestamp=7)
    assert log.stats().rates.seconds == [Bucket(START, 5, 5 * FRAME, 0)]
    fill(log, 3)
    assert log.stats().rates.seconds == [Bucket(START, 8, 8 * FRAME, 0)]


def test_a_batch_published_in_pieces_counts_once(log: Spool, clock: Clock) -> None:
    fill(log, 2000)
    (found,) = log.stats().rates.seconds
    assert found.records == 2000
    assert 2000 * FRAME <= found.bytes <= 2000 * FRAME + 100 * FRAME


def test_readers_count_the_gaps_they_are_given(log: Spool, clock: Clock) -> None:
    fill(log, 2000)
    reading = log.follow(0, on_gap="yield", timeout=0)
    assert isinstance(next(reading), Gap)
    reading.close()
    assert [bucket.gaps for bucket in log.stats().rates.seconds] == [1]
    clock.seconds += 1
    assert isinstance(next(log.read(0, on_gap="yield")), Gap)
    found = log.stats().rates
    assert [(bucket.records, bucket.gaps) for bucket in found.seconds] == [(2000, 1), (0, 1)]
    assert (found.last_second.gaps, found.minutes[0].gaps, found.hours[0].gaps) == (1, 2, 2)


def test_a_user_without_write_permission_counts_nothing(log: Spool, clock: Clock) -> None:
    fill(log, 2000)
    with kvspool.open(log.path) as reader:
        assert reader._files is not None
        reader._files.can_ask = False
        assert isinstance(next(reader.read(0, on_gap="yield")), Gap)
    assert log.stats().rates.seconds[0].gaps == 0


def test_any_content_is_read_and_counted_on(log: Spool, clock: Clock) -> None:
    words = words_of(log)
    chance = random.Random(3)
    for content in ([2**64 - 1] * 1024, [chance.getrandbits(64) for _ in range(1024)], [START] * 1024):
        for at, word in enumerate(content):
            words[frames.RATES + at] = word
        log.stats()
        fill(log, 4)
        count_gap(words, clock.now())
        assert log.stats().rates.seconds[-1].time == START
    for at in range(frames.RATES, frames.RATES + 1024):
        words[at] = 2**64 - 1
    at = frames.RATES + frames.RATE_WORDS * (START % 64)
    words[at] = START
    fill(log, 4)
    assert (words[at + 1], words[at + 2]) == (3, 4 * FRAME - 1), "counts wrap"


def test_only_the_words_of_rates_are_touched(log: Spool, clock: Clock) -> None:
    fill(log, 2000)
    assert isinstance(next(log.read(0, on_gap="yield")), Gap)
    control = (log.path / format.CONTROL_FILE).read_bytes()
    assert any(control[format.GAPS_AT : 12288])
    assert not any(control[11776:65536])


def test_both_twins_count_the_same(tmp_path: Path) -> None:
    counted = []
    for twin in twins("kvspool.kernel.frames"):
        ring, control = memoryview(bytearray(4096)), memoryview(bytearray(format.control_bytes(4096)))
        writer = twin.FrameWriter(ring, control, 0, None, memoryview(bytes(48)))
        for second in (5, 6, 6, 70, 4000):
            writer.begin()
            writer.put_many(None, [b"v"] * 20, 0, bytes(20), 1)
            writer.clock = second * SECOND
            writer.publish()
        counted.append(bytes(control[format.RATES_AT : 12288]))
        found = rates(control.cast("Q"), 4000 * SECOND)
        assert [(bucket.time, bucket.records) for bucket in found.minutes] == [(3960, 20)]
        assert [(bucket.time, bucket.records) for bucket in found.hours] == [(0, 80), (3600, 20)]
    assert len(set(counted)) == 1 and any(counted[0])


@pytest.mark.parametrize("twin", twins("kvspool.kernel.frames"), ids=lambda twin: twin.__name__)
def test_the_clock_of_the_machine_counts(twin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_files, "FrameWriter", twin.FrameWriter)
    monkeypatch.setattr(spool_files, "AppendLock", lock_twin(twin).AppendLock)
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.append(b"one")
        log.append_many([b"two", b"three"])
        assert sum(bucket.records for bucket in log.stats().rates.hours) == 3


def test_rates_of_several_logs_add_up() -> None:
    nothing = Rate(0, 0, 0)
    one = Rates(START, nothing, nothing, nothing, [Bucket(START - 1, 2, 3, 4)], [], [Bucket(START - START % 3600, 1, 1, 1)])
    other = Rates(START + 1, nothing, nothing, nothing, [Bucket(START - 1, 10, 10, 0), Bucket(START, 5, 6, 0)], [], [])
    both = together([one, other])
    assert both.time == START + 1
    assert both.seconds == [Bucket(START - 1, 12, 13, 4), Bucket(START, 5, 6, 0)]
    assert both.hours == one.hours
    assert both.last_second == Rate(5, 6, 0)
    assert together([]).seconds == []


# The command.


def test_stats_show_rates(log: Spool, clock: Clock, run: Run) -> None:
    fill(log, 7)
    clock.seconds += 1
    assert "7.0 records/s (952 B/s) over the last second" in run("stats", log.path).out
    shown = run("stats", log.path, "--json").object["rates"]
    assert shown["seconds"] == [{"time": START, "records": 7, "bytes": 952, "gaps": 0}]


def test_watch_draws_until_it_is_interrupted(log: Spool, clock: Clock, run: Run) -> None:
    fill(log, 800)
    clock.seconds += 1
    fill(log, 100)
    clock.waits = 2
    shown = run("stats", log.path, "--watch", code=130).out
    assert shown.count("last 64 seconds") == shown.count("last 64 minutes") == 4
    assert "records/s" in shown and "bytes/s" in shown and "█▁" in shown and "800" in shown
    assert max(map(len, shown.splitlines())) < 80


def test_watch_as_json_is_an_object_for_each_interval(log: Spool, clock: Clock, run: Run) -> None:
    fill(log, 8)
    clock.waits = 3
    lines = run("stats", log.path, "--watch", "--json", "--interval", "0.5", code=130).objects
    assert [line["time"] - START for line in lines] == [0, 0, 1]
    assert [line["last_second"]["records"] for line in lines] == [0, 0, 8]


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "soon"])
def test_an_interval_that_is_none_is_wrong_usage(interval: str, run: Run) -> None:
    run("stats", "x", "--watch", "--interval", interval, code=2)


def test_bars() -> None:
    assert watch.bars([0, 1, 4, 8]) == " ▂▅█"
    assert watch.bars([0.0] * 64) == " " * 64
    assert watch.bars([0.001, 1e12]) == "▁█"


def test_watch_adds_up_all_shards_of_a_hub_root(tmp_path: Path, clock: Clock) -> None:
    with hub.create(tmp_path / "root") as root:
        for client in ("A", "B"):
            with root.create_client(client, bits=1, capacity="64KiB") as shards:
                shards.append_many([b"value"] * 10)
                assert sum(bucket.records for bucket in watch._rates(shards).seconds) == 10
        assert sum(bucket.records for bucket in watch._rates(root).seconds) == 20
