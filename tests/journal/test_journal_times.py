"""Timestamps of a journal never decrease, whoever appends, and so a look-up by time is exact."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from children import start
from faults import ClockPort

import kvspool
from kvspool import system
from kvspool.journal import Batch
from kvspool.journal.index import STRIDE
from kvspool.record import NO_TIME

FORMATS = ["kvj", "sej"]
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def times(log: Any) -> list[int]:
    return [record.timestamp for record in log.read()]


def create(path: Path, format: str, segment_bytes: int = 300) -> Any:
    return kvspool.create(path, format=format, segment_bytes=segment_bytes)  # type: ignore[call-overload]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_times_never_decrease_with_many_writers_and_look_ups_are_exact(tmp_path: Path, format: str) -> None:
    create(tmp_path / "log", format, 100_000).close()

    def write() -> None:
        with kvspool.open(tmp_path / "log", timeout=60) as log:
            for at in range(600):
                log.append_many([b"x" * 40] * (1 + at % 3))

    for wait in [start(write) for _ in range(4)]:
        wait()
    with kvspool.open(tmp_path / "log") as log:
        found = times(log)
        assert len(found) == 4 * 1200
        assert found == sorted(found)
        for time in random.Random(1).sample(found, 100):
            moment = EPOCH + timedelta(microseconds=-(-time // 1000))
            first = next(at for at, one in enumerate(found) if one >= (moment - EPOCH) // timedelta(microseconds=1) * 1000)
            assert next(iter(log.read(moment))).sequence == first


@pytest.mark.parametrize("format", FORMATS)
def test_a_clock_that_goes_back_and_earlier_times_of_the_caller_become_the_latest_one(tmp_path: Path, format: str) -> None:
    with create(tmp_path / "log", format) as log, system.replaced(ClockPort(500, 100, 900)):
        log.append(b"first")
        log.append(b"clock went back")
        log.append(b"given", timestamp=7)
        log.append_batch(Batch([b"a", b"b", b"c"], timestamps=[600, 3, 800]))
        log.append_batch(Batch([b"none", b"d"], timestamps=[NO_TIME, 4]))
        assert times(log) == [500, 500, 500, 600, 600, 800, NO_TIME, 800]
        assert log.stats().last_timestamp == 800


def test_columns_keep_to_the_order_of_time_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    with create(tmp_path / "log", "kvj") as log, system.replaced(ClockPort(500)):
        log.append(b"first", timestamp=400)
        values = pyarrow.array([b"a", b"b", b"c", b"d"])
        log.append_arrow(pyarrow.record_batch({"value": values, "timestamp": pyarrow.array([450, None, 3, 600], pyarrow.int64())}))
        log.append_arrow(pyarrow.record_batch({"value": values}))
        assert times(log) == [400, 450, 500, 500, 600, *[600] * 4]


def test_records_that_a_hub_takes_in_keep_to_the_order_of_time_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from kvspool import arrow

    with create(tmp_path / "log", "kvj") as log:
        log.append(b"first", timestamp=400)
        columns = {
            "timestamp": pyarrow.array([300, 500, 450], pyarrow.int64()),
            "type": pyarrow.array([0, 0, 0], pyarrow.int32()),
            "key": pyarrow.array([None, b"k", None], pyarrow.binary()),
            "value": pyarrow.array([b"a", b"b", b"c"], pyarrow.binary()),
            "codec": pyarrow.array([0, 0, 0], pyarrow.uint8()),
        }
        batch = pyarrow.record_batch([columns[name].cast(arrow.RECORDS.field(name).type) for name in arrow.RECORDS.names], arrow.RECORDS)
        with arrow.Records(batch) as records:
            log.append_records(records, 1)
        assert times(log) == [400, 400, 500, 500]


def lose_the_page(log: Any) -> None:
    os.unlink(log.format.lock_file(log.path))


def restart(log: Any) -> None:
    """Let the page be of another run of the machine, and know less than the segments."""
    path = log.format.lock_file(log.path)
    path.write_bytes(path.read_bytes()[:8] + bytes(200))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fault", [lose_the_page, restart])
@pytest.mark.parametrize("count", [1, 2, 9, 10])
def test_the_latest_time_is_known_after_a_crash_also_over_segments(
    tmp_path: Path, format: str, fault: Callable[[Any], None], count: int
) -> None:
    with create(tmp_path / "log", format, 100) as log:  # two or three records fill a segment
        for at in range(count):
            log.append(b"x" * 20, timestamp=1000 + at)
        fault(log)
    with kvspool.open(tmp_path / "log") as log, system.replaced(ClockPort(5)):
        log.append(b"the clock went back")
        assert times(log) == [*range(1000, 1000 + count), 1000 + count - 1]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_latest_time_is_known_when_a_writer_was_killed_before_it_said_so(tmp_path: Path, format: str) -> None:
    with create(tmp_path / "log", format) as log:
        log.append(b"before", timestamp=10)

        class Killing(system.Port):
            def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
                super().write(fd, data, at)
                os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            with system.replaced(Killing()):
                log.append(b"of the dead one", timestamp=99)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        log.append(b"after", timestamp=50)
        assert times(log) == [10, 99, 99]


@pytest.mark.parametrize("format", FORMATS)
def test_a_look_up_in_a_journal_whose_times_go_back_ends_and_gives_a_record_of_that_time(tmp_path: Path, format: str) -> None:
    noise = random.Random(3)
    path = tmp_path / "log"
    with create(path, format, 3 * STRIDE) as log:
        encode = type(log.format).encode

        def as_earlier_versions(self: Any, batch: Batch, start: int, place: Any) -> Any:
            return encode(self, batch, start, place._replace(last=NO_TIME))

        log.format.encode = as_earlier_versions.__get__(log.format)
        for at in range(700):
            log.append(b"x" * 10_000, timestamp=1_000_000 * (at + noise.randrange(5)))
        found = times(log)
        assert found != sorted(found)
    with kvspool.open(path) as log:
        for at in range(0, 700, 50):
            records = log.read(EPOCH + timedelta(milliseconds=at))
            assert abs(next(iter(records)).sequence - at) <= 5
