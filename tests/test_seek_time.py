"""A seek by time in a damaged log: the Gap is exactly the damage, and no record before the time comes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from loops import IS_SECOND_RUN

import kvspool
from kvspool import Gap, Spool
from kvspool.spool import format

SECOND = 1_000_000_000  # ns
COUNT = 60  # records, one for each second


def value(number: int) -> bytes:
    return b"value-%03d-" % number


def fill(path: Path, kind: str, size: int = 0) -> None:
    options = {"kvj": {"segment_bytes": 600}, "spool": {"capacity": "1MiB"}}[kind]
    with kvspool.create(path, format=kind, **options) as log:  # type: ignore[call-overload]
        for number in range(COUNT):
            log.append(value(number) + bytes(size), timestamp=number * SECOND)


def files_of(path: Path, kind: str) -> list[Path]:
    return [path / format.DATA_FILE] if kind == "spool" else sorted(path.glob("kvj/*.kvj"))


def damage(path: Path, kind: str, numbers: list[int]) -> None:
    """Change a byte in each of these records."""
    for file in files_of(path, kind):
        data = bytearray(file.read_bytes())
        for number in numbers:
            at = data.find(value(number))
            if at >= 0:
                data[at] ^= 1
        file.write_bytes(data)


def at(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def check(items: Iterator[Any], second: int, damaged: set[int]) -> None:
    """Expect every sound record from a second on, and before each of them exactly the Gap of the damage."""
    found: list[int] = []
    lost: list[int] = []
    for item in items:
        if isinstance(item, Gap):
            assert item.reason == "damaged"
            lost += range(item.first, item.last + 1)
        else:
            found.append(item.sequence)
    assert found == [number for number in range(second, COUNT) if number not in damaged]
    assert set(lost) <= damaged
    assert {number for number in damaged if number >= second} <= set(lost)
    assert len(lost) == len(set(lost))


def sealed(kind: str, numbers: set[int]) -> set[int]:
    """Return the numbers without the last record: damage there is Corruption in a journal."""
    return numbers - {COUNT - 1} if kind == "kvj" else numbers


@pytest.mark.parametrize("kind", ["spool", "kvj"])
def test_a_seek_to_the_time_of_a_damaged_record_reports_exactly_that_record(kind: str, tmp_path: Path) -> None:
    fill(tmp_path / "log", kind)
    damage(tmp_path / "log", kind, [40])
    with kvspool.open(tmp_path / "log") as log:
        items = log.read(at(40), on_gap="yield")
        gap = next(items)
        assert (gap.first, gap.last, gap.reason) == (40, 40, "damaged")
        assert next(items).sequence == 41
        assert items.missed == 1
        assert next(log.read(at(42))).sequence == 42
        assert next(log.read(at(39))).sequence == 39
        with log.reader("reader") as reader:
            reader.seek_time(at(40))
            assert reader.sequence == 40
            assert next(reader.read(on_gap="yield")) == gap
            reader.commit()
            assert reader.committed == 41


@pytest.mark.parametrize("kind", ["spool", "kvj"])
@pytest.mark.parametrize("seed", range(3 if IS_SECOND_RUN else 6))
def test_a_seek_by_time_is_exact_whatever_is_damaged(kind: str, seed: int, tmp_path: Path) -> None:
    fill(tmp_path / "log", kind, 5000 if seed % 2 and kind == "spool" else 0)
    chosen = random.Random(seed)
    begins = [chosen.randrange(COUNT) for _ in range(seed + 1)]
    damaged = sealed(kind, {number for begin in begins for number in range(begin, min(COUNT, begin + chosen.randrange(1, 12)))})
    damage(tmp_path / "log", kind, sorted(damaged))
    with kvspool.open(tmp_path / "log") as log:
        for second in range(COUNT):
            check(log.read(at(second), on_gap="yield"), second, damaged)


@pytest.mark.parametrize("kind", ["spool", "kvj"])
def test_a_seek_to_a_time_before_all_records_reports_damage_at_the_begin(kind: str, tmp_path: Path) -> None:
    fill(tmp_path / "log", kind)
    damage(tmp_path / "log", kind, [0, 1])
    with kvspool.open(tmp_path / "log") as log:
        for second in (0, 1):
            check(log.read(at(second), on_gap="yield"), 0, {0, 1})


def test_a_seek_by_time_in_a_ring_whose_oldest_record_is_damaged_is_exact(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        for number in range(300):
            log.append(value(number), timestamp=number * SECOND)
        first = log.stats().first_sequence
        assert first > 0
        oldest = next(log.read(first)).value
    file = tmp_path / "log" / format.DATA_FILE
    data = bytearray(file.read_bytes())
    data[data.index(oldest)] ^= 1
    file.write_bytes(data)
    with kvspool.open(tmp_path / "log", format="spool") as log:
        for second in (0, first):
            items = log.read(at(second), on_gap="yield")
            gap = next(items)
            assert (gap.first, gap.last) == (first, first)
            assert next(items).sequence == first + 1


def test_a_seek_passes_a_damaged_header_of_a_segment(tmp_path: Path) -> None:
    fill(tmp_path / "log", "kvj")
    file = files_of(tmp_path / "log", "kvj")[2]
    data = bytearray(file.read_bytes())
    data[:8] = b"\xff" * 8
    file.write_bytes(data)
    with kvspool.open(tmp_path / "log") as log:
        for second in range(COUNT):
            check(log.read(at(second), on_gap="yield"), second, set())
            check(log.read(second, on_gap="yield"), second, set())


def test_a_seek_by_time_in_a_journal_finds_records_before_corruption(tmp_path: Path) -> None:
    fill(tmp_path / "log", "kvj")
    damage(tmp_path / "log", "kvj", [COUNT - 1])
    with kvspool.open(tmp_path / "log") as log:
        assert next(log.read(at(COUNT - 2))).sequence == COUNT - 2


def test_a_stale_frame_of_an_earlier_lap_is_no_place_to_seek_to(tmp_path: Path) -> None:
    fill(tmp_path / "log", "spool")
    file = tmp_path / "log" / format.DATA_FILE
    data = bytearray(file.read_bytes())
    first, second, stale = (data.index(value(number)) for number in (40, 41, 10))
    size = second - first
    begin = first - 32
    data[begin : begin + size] = data[stale - 32 : stale - 32 + size]
    file.write_bytes(data)
    with kvspool.open(tmp_path / "log", format="spool") as log:
        assert isinstance(log, Spool)
        items = log.read(at(40), on_gap="yield")
        assert [(gap.first, gap.last) for gap in [next(items)]] == [(40, 40)]
        assert next(items).sequence == 41
