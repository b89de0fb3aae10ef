"""Salvage: everything that is sound comes out of a damaged pair."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from commands import Run

import kvspool
from kvspool.errors import Corruption, LogNotFound, NotALog
from kvspool.spool import format
from kvspool.spool.salvage import _Ring


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with kvspool.create(tmp_path / "source", capacity=8192, codec="msgpack") as log:
        for at in range(400):
            log.append({"n": at}, key=None if at % 3 else b"k%d" % at, type=at % 7, timestamp=1000 + at)
    return tmp_path / "source"


def records(path: Path) -> list[tuple[object, ...]]:
    with kvspool.open(path) as log:
        return [(item.timestamp, item.type, item.key, item.value, item.codec) for item in log.read(on_gap="skip")]


def spoil(path: Path, at: int, size: int = 128) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xaa" * size)


@pytest.mark.parametrize("harm", ["nothing", "no control", "control", "data header", "short"])
def test_all_that_is_sound_comes_out_whatever_became_of_the_control_block(source: Path, tmp_path: Path, harm: str) -> None:
    kept = records(source)
    if harm == "no control":
        (source / format.CONTROL_FILE).unlink()
    elif harm == "control":
        spoil(source / format.CONTROL_FILE, 0, 65536)
    elif harm == "data header":
        spoil(source / format.DATA_FILE, 0)
    elif harm == "short":
        os.truncate(source / format.DATA_FILE, format.DATA_START + 4000)
    report = kvspool.salvage(source, tmp_path / "target")
    found = records(tmp_path / "target")
    assert len(found) == report.records
    assert bool(report.damage) == (harm != "nothing")
    if harm == "short":
        assert found == [record for record in kept if record in found] and found
    else:
        # Records that were passed over, but not overwritten yet, may come out too: before all others.
        assert found[-len(kept) :] == kept
    with kvspool.open(tmp_path / "target") as log:
        assert log.stats().synced_sequence == report.records
        assert log.append(b"goes on") == report.records


@pytest.mark.parametrize(
    ("capacity", "values", "given"),
    [
        (1 << 20, [], 4096),
        (1 << 20, [b"small"], 4096),
        (1 << 20, [b"x" * 2000], 8192),  # a record takes a quarter of the ring
        (1 << 20, [b"x" * 100] * 1000, 1 << 18),
        (12288, [b"x" * 1000] * 50, 12288),
    ],
)
def test_the_new_log_is_as_large_as_what_was_found(tmp_path: Path, capacity: int, values: list[bytes], given: int) -> None:
    with kvspool.create(tmp_path / "source", capacity=capacity) as log:
        for value in values:
            log.append(value)
        kept = list(log.read_values())
    report = kvspool.salvage(tmp_path / "source", tmp_path / "target")
    with kvspool.open(tmp_path / "target") as log:
        assert log.capacity == given
        assert list(log.read_values())[-len(kept) :] == kept
        assert log.stats().records == report.records


def test_the_records_of_a_full_ring_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0
    frames = _Ring.frames

    def counted(ring: Any) -> Any:
        nonlocal passes
        passes += 1
        return frames(ring)

    monkeypatch.setattr(_Ring, "frames", counted)
    with kvspool.create(tmp_path / "source", capacity=1 << 16) as log:
        log.append_many([b"x" * 1000] * 100)
        kept = log.stats().records
    assert kvspool.salvage(tmp_path / "source", tmp_path / "target").records >= kept
    assert passes == 1


def test_a_damaged_record_is_left_out(source: Path, tmp_path: Path, run: Run) -> None:
    kept = records(source)
    spoil(source / format.DATA_FILE, format.DATA_START + 4096, 1)
    run("salvage", source, tmp_path / "target")
    found = records(tmp_path / "target")
    assert len([record for record in kept if record not in found]) == 1


def test_the_command_prints_the_report(source: Path, tmp_path: Path, run: Run) -> None:
    report = run("salvage", source, tmp_path / "target", "--json").object
    assert report["missing"] == 0 and report["last_sequence"] == 399


def test_what_can_not_be_salvaged_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LogNotFound):
        kvspool.salvage(tmp_path / "nowhere", tmp_path / "target")
    with pytest.raises(NotALog):
        kvspool.salvage(tmp_path, tmp_path / "target")
    spoil(source / format.CONTROL_FILE, 0)
    spoil(source / format.DATA_FILE, 0)
    with pytest.raises(Corruption):
        kvspool.salvage(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def keyed_source(path: Path) -> list[object]:
    """Make a log of keyed values, of which some are in each other's keys, and return what they mean."""
    values: list[object] = [{f"key {at % 9}": at, "n": {"deep": [at]}} for at in range(50)]
    with kvspool.create(path, capacity=65536, codec="keyed", policy="block") as log:
        log.append_many(values)
    return values


@pytest.mark.parametrize("harm", ["nothing", "control header"])
def test_keyed_values_keep_their_meaning(tmp_path: Path, harm: str) -> None:
    values = keyed_source(tmp_path / "source")
    if harm != "nothing":
        spoil(tmp_path / "source" / format.CONTROL_FILE, 0)
    report = kvspool.salvage(tmp_path / "source", tmp_path / "target")
    assert (report.records, report.undecodable) == (50, 0)
    with kvspool.open(tmp_path / "target") as log:
        assert [record.data for record in log.read()] == values
        log.append({"another key": 1})
        assert [record.data for record in log.read()] == [*values, {"another key": 1}]
        assert log.stats().policy == ("block" if harm == "nothing" else "overwrite")


def test_values_that_name_lost_keys_become_raw_and_never_get_another_meaning(tmp_path: Path) -> None:
    values = keyed_source(tmp_path / "source")
    with kvspool.open(tmp_path / "source") as log:
        stored = list(log.read_values())
    # The keys are: key 0, n, deep, key 1, key 2 ... Only the first four stay.
    spoil(tmp_path / "source" / format.CONTROL_FILE, format.KEYS_AT + 64 + (6 + 5) + (6 + 1) + (6 + 4) + (6 + 5), 8)
    report = kvspool.salvage(tmp_path / "source", tmp_path / "target")
    assert report.records == 50 and 0 < report.undecodable < 50
    with kvspool.open(tmp_path / "target") as log:
        log.append_many([{f"new {at}": at} for at in range(9)])
        for number, record in enumerate(log.read(limit=50)):
            if record.codec == kvspool.Codec.RAW:
                assert record.value == stored[number]
            else:
                assert record.data == values[number]
        assert sum(record.codec == kvspool.Codec.RAW for record in log.read()) == report.undecodable


def test_a_damaged_log_of_many_laps_gives_its_records_in_order(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "source", capacity=16384) as log:
        for at in range(2000):
            log.append(b"%d" % at * (1 + at % 50))
        kept = [record.value for record in log.read()]
    for at in range(0, 16384, 4096):
        spoil(tmp_path / "source" / format.DATA_FILE, format.DATA_START + at + 100, 1)
    report = kvspool.salvage(tmp_path / "source", tmp_path / "target")
    with kvspool.open(tmp_path / "target") as log:
        found = [record.value for record in log.read()]
    assert len([value for value in kept if value not in found]) <= 4
    assert [value for value in found if value in kept] == [value for value in kept if value in found]
    assert report.missing <= 4
