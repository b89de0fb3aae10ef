"""Verify: what is damaged, and nothing else, while others write."""

from __future__ import annotations

import os
import pty
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from children import start
from commands import Run
from images import Rebooted

import kvspool
from kvspool import errors, system
from kvspool.cli import progress
from kvspool.spool import format
from kvspool.spool.format import STRIDE


def damage(path: Path, at: int, size: int = 1) -> None:
    with (path / format.DATA_FILE).open("r+b") as file:
        file.seek(format.DATA_START + at)
        piece = file.read(size)
        file.seek(format.DATA_START + at)
        file.write(bytes(byte ^ 255 for byte in piece))


def test_a_sound_log_is_counted(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        assert log.verify().is_sound
        log.append_many([b"12345"] * 10, keys=[b"k"] * 10)
        report = log.verify()
        assert (report.records, report.bytes, report.damaged, report.is_sound) == (10, 60, [], True)


@pytest.mark.parametrize("at", range(10))
def test_a_damaged_record_is_named_by_position_and_sequence(tmp_path: Path, at: int, run: Run) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"12345678"] * 10)
        damage(log.path, at * 40 + 33)
        report = log.verify()
        assert (report.records, report.damaged_records, report.is_sound) == (9, 1, False)
        (place,) = report.damaged
        assert (place.position, place.size, place.first, place.last) == (at * 40, 40, at, at)
    run("verify", tmp_path / "log", "--json", code=5)
    run("verify", tmp_path / "log", code=5)


def test_no_false_alarm_while_a_writer_overwrites_what_is_looked_at(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=8192) as log:
        log.append_many([b"first" * 9] * 200)
        stop = threading.Event()

        def write() -> None:
            with kvspool.open(log.path) as writer:
                while not stop.is_set():
                    writer.append_many([b"more" * 9] * 20)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            reports = [log.verify() for _ in range(50)]
        finally:
            stop.set()
            thread.join()
        assert all(report.is_sound for report in reports)
        assert all(report.records + report.overrun == report.next_sequence - report.first_sequence for report in reports)


def test_no_false_alarm_while_other_processes_write(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=16384) as log:

        def write() -> int:
            return len([log.append_many([b"more" * 9] * 7) for _ in range(3000)])

        writers = [start(write) for _ in range(2)]
        reports = [log.verify() for _ in range(200)]
        assert [wait() for wait in writers] == [3000, 3000]
        assert all(report.is_sound for report in reports)
        assert all(report.records + report.overrun == report.next_sequence - report.first_sequence for report in reports)


def test_a_restart_of_the_machine_is_no_damage(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"a"] * 3)
    with system.replaced(Rebooted()), kvspool.open(tmp_path / "log") as log:
        log.append(b"b")
        report = log.verify()
        assert (report.records, report.left_out, report.is_sound) == (4, STRIDE - 3, True)


def test_damage_before_a_restart_is_distinguished_from_what_was_left_out(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"12345678"] * 3)
    with system.replaced(Rebooted()), kvspool.open(tmp_path / "log") as log:
        log.append_many([b"12345678"] * 3)
        damage(log.path, 80 + 33)
        report = log.verify()
        assert report.records + report.damaged_records + report.left_out == report.next_sequence - report.first_sequence
        (place,) = report.damaged
        assert (place.position, place.size) == (80, 40)


def test_a_damaged_key_table_and_a_reader_without_a_place_are_problems(tmp_path: Path, run: Run) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536, codec="keyed") as log:
        log.append({"a": 1, "b": 2})
        log.reader("one").close()
        assert log.verify().is_sound
        with (log.path / format.CONTROL_FILE).open("r+b") as file:
            file.seek(format.KEYS_AT + format.KEY_TABLE.size + 8)
            file.write(b"\xff")
            file.seek(format.SLOTS_AT + 128)
            file.write(b"\xff" * 64)
    with kvspool.open(tmp_path / "log") as log:
        first, second = log.verify().problems
        assert "key table has lost all keys after 1" in first
        assert "'one' (slot 0) has lost its position" in second
    run("verify", tmp_path / "log", code=5)


def test_a_control_block_without_an_end_is_damage(tmp_path: Path, run: Run) -> None:
    kvspool.create(tmp_path / "log", capacity=65536).close()
    with (tmp_path / "log" / format.CONTROL_FILE).open("r+b") as file:
        file.seek(320)
        file.write(bytes([8]))
    with pytest.raises(errors.Corruption):
        kvspool.verify(tmp_path / "log")
    run("verify", tmp_path / "log", code=5)


def test_the_command_prints_the_report_and_shows_its_progress_on_a_terminal(tmp_path: Path, run: Run) -> None:
    with kvspool.create(tmp_path / "log", capacity=1 << 20) as log:
        log.append_many([b"12345"] * 1000)
        told: list[tuple[int, int]] = []
        log.verify(lambda done, all: told.append((done, all)))
        assert told == sorted(told) and told[-1] == (40000, 40000) and len(told) > 3
    assert run("verify", tmp_path / "log", "--json").object["records"] == 1000
    master, slave = pty.openpty()
    before = os.dup(2)
    try:
        os.dup2(slave, 2)
        with open(2, "w", closefd=False) as terminal, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", terminal)
            with progress.shown("checking") as tell:
                tell(1, 2)
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(slave)
    shown = b""
    with suppress(OSError):  # EIO: that is all
        while piece := os.read(master, 65536):
            shown += piece
    os.close(master)
    assert b"checking" in shown
