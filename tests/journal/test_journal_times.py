"""Timestamps of a journal never decrease, whichever process appends, and so a look-up by time is exact."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from children import start
from faults import ClockPort, CountingPort
from small_sej import flip

import kvspool
from kvspool import system
from kvspool.errors import TimeUnknown
from kvspool.journal import JournalBatch, control
from kvspool.journal.index import STRIDE
from kvspool.record import NO_TIME

FORMATS = ["kvj", "sej"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
        log.append_many([b"first"])  # the compiled twin's `append` asks the clock itself
        log.append_many([b"clock went back"])
        log.append(b"given", timestamp=7)
        log.append_batch(JournalBatch([b"a", b"b", b"c"], timestamps=[600, 3, 800]))
        log.append_batch(JournalBatch([b"none", b"d"], timestamps=[NO_TIME, 4]))
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

        def as_earlier_versions(self: Any, batch: JournalBatch, start: int, place: Any) -> Any:
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


HOUR = 3_600_000_000_000
VALUE = b"x" * 1000


def segments(log: Any) -> list[Path]:
    return sorted(log.format.segments_in(log.path).glob(f"*.{log.format.name}*"))


def as_after_a_power_cut(lock: Path, page: bytes) -> None:
    lock.write_bytes(control.pack(control.parse(page)._replace(boot=b"\1" * 16)))


def as_from_a_backup(lock: Path, page: bytes) -> None:
    lock.write_bytes(page)


def as_lost(lock: Path, page: bytes) -> None:
    lock.unlink()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fault", [as_after_a_power_cut, as_from_a_backup, as_lost])
@pytest.mark.parametrize("left", ["header", "part of a header", "records without a time"])
def test_times_do_not_go_back_with_a_stale_page_and_a_last_segment_that_says_none(
    tmp_path: Path, format: str, fault: Callable[[Path, bytes], None], left: str
) -> None:
    with create(tmp_path / "log", format, 4096) as log:
        log.append(VALUE, timestamp=HOUR)
        lock = log.format.lock_file(log.path)
        stale = lock.read_bytes()
        while len(log.bases()) < 2:
            log.append(VALUE, timestamp=2 * HOUR)
        log.append_batch(JournalBatch([VALUE], timestamps=[NO_TIME]))
        last = log.format.segments_in(log.path) / log.format.name_of(log.bases()[-1])
        header = log.format.header_bytes
    if left != "records without a time":
        os.truncate(last, header if left == "header" else header // 2)
    fault(lock, stale)
    with kvspool.open(tmp_path / "log") as log, system.replaced(ClockPort(HOUR)):
        log.append(b"after")
        assert times(log)[-1] == 2 * HOUR


def test_an_open_handle_looks_for_the_latest_time_again_when_the_lock_file_is_another_one(tmp_path: Path) -> None:
    with create(tmp_path / "log", "kvj", 4096) as log, system.replaced(ClockPort(*[HOUR] * 9)):
        log.append(VALUE, timestamp=HOUR)
        log.append_many([VALUE] * 3, timestamp=2 * HOUR)
        log.append_batch(JournalBatch([VALUE], timestamps=[NO_TIME]))
        for _ in range(2):
            lose_the_page(log)
            log.append_batch(JournalBatch([VALUE], timestamps=[NO_TIME]))
        lose_the_page(log)
        log.append(b"after")
        assert times(log)[-1] == 2 * HOUR


def full_then_empty(path: Path, *, archived: bool = False) -> list[Path]:
    """Make a journal of a segment whose four records have later and later times, and an empty one, without a lock file."""
    with create(path, "kvj", 4096) as log:
        log.append_batch(JournalBatch([VALUE] * 4, timestamps=[HOUR, 2 * HOUR, 3 * HOUR, 4 * HOUR]))
        log.append(VALUE)
        if archived:
            log.archive()
        found = segments(log)
    os.truncate(found[-1], 24)
    (path / "lock").unlink()
    return found


@pytest.mark.parametrize("at", [3, 24 + 100, 24 + 1028 + 100, 24 + 3 * 1028 - 1])
def test_the_latest_time_is_found_after_damage_in_an_older_segment(tmp_path: Path, at: int) -> None:
    flip(full_then_empty(tmp_path / "log")[0], at)
    with kvspool.open(tmp_path / "log") as log, system.replaced(ClockPort(5)):
        assert log.append(b"after") == 4
        assert [record.timestamp for record in log.read(on_gap="skip")][-2:] == [4 * HOUR] * 2


def a_broken_archive(path: Path) -> None:
    flip(path, path.stat().st_size - 3)


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [a_broken_archive, a_fifo])
def test_an_older_segment_that_cannot_be_read_refuses_no_append(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    pytest.importorskip("zstandard")
    damage(full_then_empty(tmp_path / "log", archived=True)[0])
    with kvspool.open(tmp_path / "log") as log:
        assert log.append(b"after") == 4
        assert next(log.read(4)).value == b"after"


class Unreadable(system.Port):
    """Refuses to open a file, or to read from it."""

    def __init__(self, path: Path, number: int, *, to_open: bool) -> None:
        self._path, self._error, self._to_open = str(path), OSError(number, os.strerror(number)), to_open

    def open(self, path: Any, flags: int, mode: int = 0o600) -> int:  # type: ignore[override]
        if self._to_open and os.fspath(path) == self._path:
            raise self._error
        return system.Port.open(path, flags, mode)

    def read(self, fd: int, size: int, at: int) -> bytes:
        if not self._to_open and os.readlink(f"/proc/self/fd/{fd}") == self._path:
            raise self._error
        return super().read(fd, size, at)


def three_segments(path: Path, format: str, newest: int) -> list[Path]:
    """Make a journal of two segments whose records end at an hour and two hours, and one of `newest`, without a lock file."""
    with create(path, format, 4096) as log:
        for time in (HOUR, 2 * HOUR, newest):
            log.append_batch(JournalBatch([VALUE], timestamps=[time]))
            count = len(log.bases())
            while time != newest and len(log.bases()) == count:
                log.append(VALUE, timestamp=time)
        found = [log.format.segments_in(path) / log.format.name_of(base) for base in log.bases()]
        lock = log.format.lock_file(path)
    assert len(found) == 3
    lock.unlink()
    return found


FAULTS = [(errno.EIO, False), (errno.EACCES, True), (errno.ELOOP, True), (errno.EMFILE, True)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("number", "to_open"), FAULTS)
def test_an_older_segment_that_the_system_does_not_read_refuses_no_append_after_one_with_a_time(
    tmp_path: Path, format: str, number: int, to_open: bool
) -> None:
    path = three_segments(tmp_path / "log", format, 3 * HOUR)[1]
    with kvspool.open(tmp_path / "log") as log, system.replaced(Unreadable(path, number, to_open=to_open)) as port:
        port.now = lambda: HOUR  # type: ignore[method-assign]
        sequence = log.append(b"after")
        assert next(iter(log.read(sequence))).timestamp == 3 * HOUR


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("number", "to_open"), FAULTS)
def test_an_append_is_refused_while_the_system_does_not_read_the_segment_with_the_latest_time(
    tmp_path: Path, format: str, number: int, to_open: bool
) -> None:
    found = three_segments(tmp_path / "log", format, NO_TIME)
    sizes = [path.stat().st_size for path in found]
    with kvspool.open(tmp_path / "log") as log:
        with system.replaced(Unreadable(found[1], number, to_open=to_open)), pytest.raises(TimeUnknown) as raised:
            log.append(b"refused")
        assert (raised.value.path, raised.value.errno) == (str(found[1]), number)
        assert str(found[1]) in str(raised.value) and os.strerror(number) in str(raised.value)
        assert [path.stat().st_size for path in found] == sizes
        with system.replaced(ClockPort(HOUR)):
            sequence = log.append(b"after")
        assert next(iter(log.read(sequence))).timestamp == 2 * HOUR


@pytest.mark.parametrize("format", FORMATS)
def test_an_append_is_refused_while_the_segment_with_the_latest_time_is_a_link(tmp_path: Path, format: str) -> None:
    path = three_segments(tmp_path / "log", format, NO_TIME)[1]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with kvspool.open(tmp_path / "log") as log:
        with pytest.raises(TimeUnknown, match=path.name):
            log.append(b"refused")
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
        with system.replaced(ClockPort(HOUR)):
            sequence = log.append(b"after")
        assert next(iter(log.read(sequence))).timestamp == 2 * HOUR


def test_a_repair_that_leaves_the_last_segment_empty_keeps_the_latest_time(tmp_path: Path) -> None:
    with create(tmp_path / "log", "kvj", 4096) as log:
        log.append_many([VALUE] * 4, timestamp=HOUR)
        log.append(VALUE, timestamp=HOUR)
        last = segments(log)[-1]
        lose_the_page(log)
    flip(last, 24 + 50)
    with kvspool.open(tmp_path / "log") as log, system.replaced(ClockPort(5)):
        log.repair()
        log.append(b"after")
        assert times(log) == [HOUR] * 5


@pytest.mark.parametrize("format", FORMATS)
def test_records_without_a_time_hide_no_others_from_a_look_up(tmp_path: Path, format: str) -> None:
    chosen = random.Random(7)
    for number in range(6):
        path = tmp_path / f"log{number}"
        with create(path, format, 300) as log:
            known = [NO_TIME if chosen.random() < 0.7 else 1000 * at for at in range(60)]
            for time in known:
                log.append_batch(JournalBatch([b"x" * 40], timestamps=[time]))
            for at in range(60):
                found = [record.timestamp for record in log.read(EPOCH + timedelta(microseconds=at))]
                timed = [time for time in found if time != NO_TIME]
                assert timed == [time for time in known if time >= 1000 * at]


def test_a_journal_without_times_is_not_walked_at_each_open(tmp_path: Path) -> None:
    with create(tmp_path / "log", "kvj", 1 << 20) as log:
        log.append_batch(JournalBatch([VALUE] * 1500, timestamps=[NO_TIME] * 1500))
    port = CountingPort()
    with kvspool.open(tmp_path / "log") as log, system.replaced(port):
        log.append_batch(JournalBatch([VALUE], timestamps=[NO_TIME]))
    assert port.count < 1 << 16
