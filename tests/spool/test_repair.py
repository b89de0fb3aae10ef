"""Repair: a poisoned or damaged log takes records again, and nothing that is sound is lost."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from children import writing
from faults import FailingPort
from images import ReadOnly

import kvspool
from kvspool import _frames_py as frames
from kvspool import errors, system
from kvspool.cli import main
from kvspool.spool import format
from kvspool.spool.recovery import STRIDE


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"before"] * 100)
        with system.replaced(FailingPort(1, 5, ("flush_data",))), pytest.raises(errors.Poisoned):
            log.sync()
        with pytest.raises(errors.Poisoned):
            log.append(b"refused")
    return tmp_path / "log"


def test_a_poisoned_log_takes_records_again_once_all_of_it_could_be_flushed(poisoned: Path) -> None:
    with kvspool.open(poisoned) as other:
        report = kvspool.repair(poisoned)
        assert (report.sync_error, report.recovery, report.verify.records) == (5, None, 100)
        assert report.verify.is_sound and not report.verify.sync_error
        assert other.append(b"after") == 100
        assert other.stats().synced_sequence == 100
        assert other.sync() == 101
        assert [record.value for record in other] == [b"before"] * 100 + [b"after"]


def test_every_page_is_made_dirty_before_the_flush(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr(sys.modules["kvspool.spool.repair"], "_touch", lambda view: touched.append(len(view)))
    kvspool.repair(poisoned)
    assert touched == [65536, format.control_bytes(65536)]


@pytest.mark.parametrize("nth", [1, 2])
def test_a_disk_that_still_fails_leaves_the_log_poisoned(poisoned: Path, nth: int) -> None:
    with system.replaced(FailingPort(nth, 5, ("flush_data",))), pytest.raises(errors.Poisoned, match="salvage"):
        kvspool.repair(poisoned)
    with kvspool.open(poisoned) as log:
        with pytest.raises(errors.Poisoned):
            log.append(b"refused")
        assert len(list(log)) == 100


@pytest.mark.parametrize("word", ["tail", "head", "mark_a_tail", "min_seq"])
@pytest.mark.parametrize("value", [8, 12345, 1 << 40, (1 << 64) - 8])
def test_a_damaged_control_block_is_made_anew_from_the_records(tmp_path: Path, word: str, value: int) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"first"] * 50)
        log.sync()
        log.append_many([b"second"] * 50)
    with (tmp_path / "log" / format.CONTROL_FILE).open("r+b") as file:
        for name in (word, "mark_b_tail") if word == "mark_a_tail" else (word,):
            file.seek(format.CONTROL_AT + format.CONTROL.offset(name))
            file.write(value.to_bytes(8, "little"))
    report = kvspool.repair(tmp_path / "log")
    assert report.verify.is_sound
    with kvspool.open(tmp_path / "log") as log:
        records = list(log.read(on_gap="skip"))
        assert [record.value for record in records] == [b"first"] * 50 + [b"second"] * 50
        assert log.append(b"third") in (100, STRIDE)


def test_a_log_that_is_in_order_stays_as_it_is(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy="block") as log:
        choose = random.Random(1)
        for _ in range(300):
            log.append(choose.randbytes(choose.randrange(300)))
        before = list(log)
        report = kvspool.repair(tmp_path / "log")
        assert report.recovery is None and report.verify.records == len(before)
        assert list(log) == before
        assert log.append(b"goes on") == 300


def test_it_is_refused_while_a_writer_holds_the_log(poisoned: Path) -> None:
    with kvspool.open(poisoned) as log, writing(log), pytest.raises(errors.LockTimeout, match="locked by another process"):
        kvspool.repair(poisoned, timeout=0)
    with kvspool.open(poisoned) as log:
        assert log.stats().sync_error == 5


def test_it_needs_the_right_to_write(poisoned: Path) -> None:
    with system.replaced(ReadOnly()), pytest.raises(PermissionError):
        kvspool.repair(poisoned)


def test_the_command_says_what_was_done(poisoned: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["repair", str(poisoned)]) == 0
    assert b"takes records again" in capfdbinary.readouterr().out
    with (poisoned / format.CONTROL_FILE).open("r+b") as file:
        file.seek(frames.TAIL * 8)
        file.write(bytes([1]))
    assert main(["repair", str(poisoned), "--json"]) == 0
    report = json.loads(capfdbinary.readouterr().out)
    assert report["recovery"]["records"] == 100
