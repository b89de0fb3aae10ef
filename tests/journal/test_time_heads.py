"""Figures and trims read the time of a record from the head of its frame, however large it is; searches by time go by checked records."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from faults import CountingPort

import kvspool
from kvspool import system
from kvspool.journal import Journal, Retention

LARGE = 4 << 20
FEW = 16 << 10  # bytes that one look at a log may read
TIMES = [1_000_000_000 * number for number in (5, 6, 7, 8)]


def bytes_read(work: Any) -> int:
    with system.replaced(CountingPort()) as port:
        work()
    assert isinstance(port, CountingPort)
    return port.count


@pytest.fixture(params=["kvj", "sej"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A journal of four segments, each of which begins with a large record that ends it."""
    with kvspool.create(tmp_path / "log", format=request.param, segment_bytes="1MiB") as made:
        for time in TIMES:
            made.append(b"x" * LARGE, timestamp=time)
    with kvspool.open(tmp_path / "log") as opened:
        yield opened


def test_stats_read_the_head_of_the_first_record_alone(log: Journal) -> None:
    assert log.stats().first_timestamp == TIMES[0]
    assert bytes_read(log.stats) < FEW
    with kvspool.open(log.path) as other:
        assert bytes_read(other.stats) < FEW


@pytest.mark.parametrize("format", ["fflg", "fixed"])
def test_stats_of_formats_without_times_read_no_record(tmp_path: Path, format: str) -> None:
    options: dict[str, Any] = {"item_bytes": LARGE, "items_per_blob": 2} if format == "fixed" else {}
    with kvspool.create(tmp_path / "log", format=format, **options) as log:
        log.append(b"x" * LARGE)
        assert bytes_read(log.stats) < FEW
        assert log.stats().first_timestamp == 0


def test_stats_of_an_archive_decompress_one_piece_of_it(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes="1MiB") as log:
        log.append(system.port.random(LARGE), timestamp=7)
        log.append(b"next", timestamp=8)
        log.archive()
        assert [path.suffix for path in sorted((tmp_path / "log" / "kvj").iterdir())][0] == ".zst"
    with kvspool.open(tmp_path / "log") as log:
        assert log.stats().first_timestamp == 7
        assert bytes_read(log.stats) < 256 << 10, "one piece of zstd is 128 KiB"


def test_a_search_by_time_reads_the_first_records_of_few_segments(log: Journal) -> None:
    for number, time in enumerate(TIMES):
        moment = datetime.fromtimestamp(time / 1e9, UTC)
        assert log.place(moment).sequence == number
    first = bytes_read(lambda: log._places._first_sound_time(log.bases()[0]))
    steering = bytes_read(lambda: log._places._last_begun(TIMES[-1], log.bases()))
    if log.format.has_checksums:
        assert LARGE <= first < 4 * LARGE, "the record as a whole, in growing pieces"
        assert steering <= 3 * first, "of the five segments, the last of which is empty, at most three"
    else:
        assert steering < FEW


def test_a_search_by_time_reads_little_where_the_first_records_are_small(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes="16KiB") as log:
        log.append_many([b"x" * 1000] * 800, timestamp=5)
        segments = len(log.bases())
        assert bytes_read(lambda: log._places._last_begun(4, log.bases())) < segments.bit_length() * 2 * 4096


@pytest.mark.parametrize("size", [20, 6000])
def test_no_flipped_bit_in_the_head_of_a_first_record_leads_a_search_by_time_astray(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log"
    with kvspool.create(path, format="kvj", segment_bytes=4 * size) as log:
        for number in range(20):
            log.append(b"z" * size, timestamp=1_700_000_000_000_000_000 + number * 1_000_000_000)
        bases = log.bases()
        assert len(bases) > 4
        damaged = bases[len(bases) // 2]
        file = path / "kvj" / str(log.format.name_of(damaged))
        begin = log.format.header_bytes
    sound = file.read_bytes()
    for bit in range(8 * begin, 8 * (begin + 32), 7):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with kvspool.open(path) as log:
            there = {record.sequence for record in log.read(on_gap="skip")}
            for number in (1, damaged - 1, damaged, damaged + 1, 18):
                moment = datetime.fromtimestamp(1_700_000_000 + number, UTC)
                found = [record.sequence for record in log.read(moment, on_gap="skip")]
                assert found == [sequence for sequence in sorted(there) if sequence >= number], (bit - 8 * begin, number)


@pytest.mark.parametrize("size", [20, 6000])
def test_a_flipped_bit_in_an_archive_leads_no_search_by_time_astray(tmp_path: Path, size: int) -> None:
    pytest.importorskip("zstandard")
    path = tmp_path / "log"
    with kvspool.create(path, format="kvj", segment_bytes=4 * size) as log:
        for number in range(20):
            log.append(system.port.random(size), timestamp=1_700_000_000_000_000_000 + number * 1_000_000_000)
        log.archive()
        bases = log.bases()
        damaged = bases[len(bases) // 2]
        file = path / "kvj" / f"{log.format.name_of(damaged)}.zst"
    sound = file.read_bytes()
    for at in range(40, 72, 3):  # the frame's head, which is stored as it is, or nearly so
        data = bytearray(sound)
        data[at] ^= 0x10
        file.write_bytes(data)
        with kvspool.open(path) as log:
            there = [record.sequence for record in log.read(on_gap="skip")]
            for number in (1, damaged - 1, damaged, damaged + 1, 18):
                moment = datetime.fromtimestamp(1_700_000_000 + number, UTC)
                found = [record.sequence for record in log.read(moment, on_gap="skip")]
                assert found == [sequence for sequence in there if sequence >= number], (at, number)


def test_a_trim_by_age_reads_the_head_of_a_last_record_alone(log: Journal) -> None:
    assert bytes_read(lambda: log.trim(Retention(max_age=1), dry_run=True)) < 2 * FEW
    plan = log.trim(Retention(max_age=1), dry_run=True).plan
    if log.format.name == "sej":
        assert [one.newest for one in plan.segments][: len(TIMES)] == TIMES


def test_a_first_record_that_is_torn_or_damaged_has_no_time(log: Journal) -> None:
    path = next(iter(sorted((log.path / log.format.segments_in(log.path).name).iterdir())))
    data = path.read_bytes()
    begin = log.format.header_bytes
    path.write_bytes(data[: LARGE // 2])
    assert log.stats().first_timestamp == 0
    for at in (4, 8) if log.format.name == "kvj" else (0, 17, 18):  # size and sequence; offset and sizes
        path.write_bytes(data[: begin + at] + b"\xff" * 8 + data[begin + at + 8 :])
        assert log.stats().first_timestamp == 0
        assert bytes_read(log.stats) < FEW
    path.write_bytes(data)
    assert log.stats().first_timestamp == TIMES[0]


def test_a_small_first_record_is_checked_before_its_time_is_believed(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append(b"small", timestamp=5)
        path = log.path / "kvj" / "0000000000000000.kvj"
        data = bytearray(path.read_bytes())
        data[log.format.header_bytes + 20] ^= 1  # of the timestamp
        path.write_bytes(data)
        assert log.stats().first_timestamp == 0


def test_a_first_record_after_left_out_sequences_says_the_time(tmp_path: Path) -> None:
    from kvspool.journal.format import JournalBatch

    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_batch(JournalBatch([b"later"], timestamp=9), at=5)
        assert log.stats().first_timestamp == 9
