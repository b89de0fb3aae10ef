"""Repair: a poisoned or damaged log takes records again, and nothing that is sound is lost."""

from __future__ import annotations

import errno
import os
import random
import signal
from pathlib import Path

import pytest
from children import Died, in_child, writing
from commands import Run
from faults import FailingPort
from images import OTHER_BOOT, ReadOnly

import kvspool
from kvspool import errors, system
from kvspool.kernel import frames_py as frames
from kvspool.spool import format, recovery
from kvspool.spool.format import STRIDE

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


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
    monkeypatch.setattr(recovery, "touch", lambda view: touched.append(len(view)))
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
def test_a_damaged_control_block_is_recreated_from_the_records(tmp_path: Path, word: str, value: int) -> None:
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


def test_the_command_says_what_was_done(poisoned: Path, run: Run) -> None:
    assert "takes records again" in run("repair", poisoned).out
    with (poisoned / format.CONTROL_FILE).open("r+b") as file:
        file.seek(frames.TAIL * 8)
        file.write(bytes([1]))
    assert run("repair", poisoned, "--json").object["recovery"]["records"] == 100


class Flushes(system.Port):
    """Notes what is done to spool.dat and spool.ctl, in order; the n-th flush fails, if `nth` is not 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int = 0) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.left = nth
        touch = recovery.touch

        def noted(view: memoryview) -> None:
            self.calls.append(f"rewrite {len(view)}")
            touch(view)

        monkeypatch.setattr(recovery, "touch", noted)

    def write(self, fd: int, data: bytes, at: int) -> None:
        if at in format.CHECKPOINTS_AT and len(data) == format.CHECKPOINT.size:
            self.calls.append("checkpoint")
        super().write(fd, data, at)

    def flush_data(self, fd: int) -> None:
        self.calls.append(f"flush {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().flush_data(fd)


def damage(path: Path) -> None:
    """Damage the control block, so that it doesn't say where the log ends."""
    with (path / format.CONTROL_FILE).open("r+b") as file:
        file.seek(frames.TAIL * 8)
        file.write(bytes([1]))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_is_written_only_when_every_page_is_on_disk(poisoned: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool) -> None:
    if is_damaged:
        damage(poisoned)
    port = Flushes(monkeypatch)
    with system.replaced(port):
        assert (kvspool.repair(poisoned).recovery is not None) == is_damaged
    rewritten = ["rewrite 65536", f"rewrite {format.control_bytes(65536)}"]
    at = port.calls.index("checkpoint")
    assert port.calls[:3] == [*rewritten, f"flush {format.DATA_FILE}"]
    assert f"flush {format.DATA_FILE}" in port.calls[at:]


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("was_poisoned", [False, True])
def test_a_repair_of_a_damaged_log_that_fails_leaves_it_poisoned_and_can_be_run_again(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch, nth: int, was_poisoned: bool
) -> None:
    if not was_poisoned:
        kvspool.repair(poisoned)
    with kvspool.open(poisoned) as log:
        damage(poisoned)
        with system.replaced(Flushes(monkeypatch, nth)), pytest.raises(errors.Poisoned, match="salvage"):
            kvspool.repair(poisoned)
        with pytest.raises(errors.Poisoned):
            log.append(b"refused")
        port = Flushes(monkeypatch)
        with system.replaced(port):
            assert kvspool.repair(poisoned).verify.records == 100
        assert port.calls[0] == "rewrite 65536"
        assert log.append(b"taken") >= 100


def test_a_repair_that_is_killed_before_its_first_flush_leaves_a_damaged_log_poisoned(tmp_path: Path) -> None:
    class Deadly(system.Port):
        def flush_data(self, fd: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    def repair() -> None:
        with system.replaced(Deadly()):
            kvspool.repair(tmp_path / "log")

    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"x"] * 100)
        damage(tmp_path / "log")
        with pytest.raises(Died):
            in_child(repair)
        with pytest.raises(errors.Poisoned):
            log.append(b"refused")
        assert kvspool.repair(tmp_path / "log").verify.records == 100
        assert log.append(b"taken") >= 100


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_recovery_after_one_whose_flush_failed_writes_every_page_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"x"] * 100)

    class Restarted(Flushes):
        def boot_id(self) -> bytes:
            return OTHER_BOOT

    with system.replaced(Restarted(monkeypatch, nth)), pytest.raises(errors.Poisoned):
        kvspool.open(tmp_path / "log")
    port = Restarted(monkeypatch)
    with system.replaced(port), kvspool.open(tmp_path / "log") as log:
        assert port.calls[0] == "rewrite 65536"
        assert port.calls.count("checkpoint") == 1
        assert len(list(log.read(on_gap="skip"))) == 100
        log.append(b"taken")
