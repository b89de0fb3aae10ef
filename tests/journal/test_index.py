"""The sparse index: the same positions as without it, whatever its file holds."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from schedules import ALL

import kvspool
from kvspool.journal import Journal, JournalBatch, index

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
COUNT = 3000


@pytest.fixture(params=["sej", "kvj"])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(index, "STRIDE", 1000)
    monkeypatch.setattr("kvspool.journal.places.STRIDE", 1000)
    monkeypatch.setattr(index, "WORTHWHILE", 2)
    with kvspool.create(tmp_path / "log", format=request.param, segment_bytes=40_000) as log:  # type: ignore[call-overload]
        random_ = random.Random(1)
        values = [b"%d" % number + b"x" * random_.choice([0, 1, 60, 3000 if number % 500 == 7 else 0]) for number in range(COUNT)]
        start = round(BEGIN.timestamp()) * 10**9
        log.append_batch(JournalBatch(values, timestamps=[start + number // 3 * 10**9 for number in range(COUNT)]))
        yield log


def reopened(log: Journal) -> Journal:
    return kvspool.open(log.path)  # type: ignore[return-value]


def places_are_right(log: Journal) -> None:
    for sequence in range(0, COUNT, 17):
        record = next(log.read(sequence))
        assert record.sequence == sequence and record.value.startswith(b"%d" % sequence)
        assert next(log.read(BEGIN + timedelta(seconds=sequence // 3))).sequence == sequence // 3 * 3


def test_places(log: Journal) -> None:
    assert log.stats().segments > 2
    places_are_right(log)
    files = sorted((log.path / "index").iterdir())
    assert len(files) > 2 and all(len(index.load(path, int(path.stem, 16))) > 5 for path in files)
    with reopened(log) as other:
        places_are_right(other)


def test_few_bytes_are_read(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    places_are_right(log)
    with reopened(log) as other:
        read: list[int] = []
        real = index.walk
        monkeypatch.setattr("kvspool.journal.places.walk", lambda *given: read.append(given[2]) or real(*given))  # type: ignore[func-returns-value]
        place = other.place(COUNT - COUNT // 8)
        assert 0 <= place.position - read[-1] <= 8000, "a stride, and the frames that reach over its end"


@pytest.mark.parametrize("seed", range(20 if ALL else 5))
def test_a_damaged_index_costs_time_and_nothing_else(log: Journal, seed: int) -> None:
    places_are_right(log)
    random_ = random.Random(seed)
    for path in (log.path / "index").iterdir():
        data = bytearray(path.read_bytes())
        match seed:
            case 0:
                data = bytearray()
            case 1:
                data = data[: len(data) // 2]
            case 2:
                data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
            case _:  # sound in itself, and wrong
                base = int(path.stem, 16)
                entries = [
                    index.SegmentIndexEntry(one.position + random_.randrange(-3, 3), one.sequence + random_.randrange(2), one.timestamp)
                    for one in index.load(path, base)
                ]
                index.store(path, base, entries)
                data = bytearray(path.read_bytes())
        path.write_bytes(data)
    with reopened(log) as other:
        places_are_right(other)


def test_an_index_of_another_segment_is_none(log: Journal) -> None:
    places_are_right(log)
    first, second, *_ = sorted((log.path / "index").iterdir())
    second.write_bytes(first.read_bytes())
    assert index.load(second, int(second.stem, 16)) == []
    with reopened(log) as other:
        places_are_right(other)


def test_it_grows_with_its_segment(log: Journal) -> None:
    with reopened(log) as other:
        for number in range(COUNT, COUNT + 500):
            log.append(b"%d" % number)
            if number % 50 == 0:
                assert next(other.read(number - 3)).value.startswith(b"%d" % (number - 3))
