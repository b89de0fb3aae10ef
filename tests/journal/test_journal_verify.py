"""Verification of every frame: its findings, and that it reports no false damage while others write, trim and are killed."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import append_lock
import pytest
from children import Died, in_child, start
from faults import FailingPort, ReadOnlyPort
from images import Rebooted
from small_sej import EACH, SIZE, flip, make, segment

import kvspool
from kvspool import system
from kvspool.journal import Journal, Retention, control, verify


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Journal]:
    with make(tmp_path / "log") as made:
        yield made


def places(log: Journal) -> list[tuple[str, int, int, int, int]]:
    report = log.verify()
    assert not report.is_sound or not report.damaged
    return [(place.segment[12:16], place.position, place.size, place.first, place.last) for place in report.damaged]


def test_a_sound_journal(log: Journal) -> None:
    seen: list[tuple[int, int]] = []
    report = log.verify(progress=lambda done, all: seen.append((done, all)))
    assert report.is_sound
    assert (report.records, report.bytes, report.first_sequence, report.next_sequence) == (35, 35 * SIZE, 0, 35)
    assert (report.segments, report.damaged_records, report.trimmed, report.torn_bytes, report.foreign) == (4, 0, 0, 0, [])
    assert seen[-1] == (35 * SIZE, 35 * SIZE)
    assert kvspool.verify(log.path) == report


def test_a_journal_counts_as_written_to_while_an_append_is_under_way_and_not_while_a_writer_is_open(log: Journal) -> None:
    log.append(b"%010d" % 35)
    assert not verify.is_written_to(log)
    with append_lock.held(log):
        assert verify.is_written_to(log)
    assert not verify.is_written_to(log)


def test_damage_in_a_sealed_segment_costs_the_record_it_is_in(log: Journal) -> None:
    flip(segment(log, 10), 3 * SIZE + 18, 5)  # the size of a value
    assert places(log) == [("000a", 3 * SIZE, SIZE, 13, 13)]
    assert log.verify().records == 34


def test_damage_in_the_last_segment_is_found_although_the_writers_say_that_all_is_well(log: Journal) -> None:
    flip(segment(log, 30), 2 * SIZE + 35)
    assert places(log) == [("001e", 2 * SIZE, SIZE, 32, 32)]


def test_several_places(log: Journal) -> None:
    flip(segment(log, 0), 18, 7)
    flip(segment(log, 0), 5 * SIZE + 34, 7)
    flip(segment(log, 30), 4 * SIZE + 17, 7)
    assert places(log) == [("0000", 0, SIZE, 0, 0), ("0000", 5 * SIZE, SIZE, 5, 5), ("001e", 4 * SIZE, SIZE, 34, 34)]


@pytest.mark.parametrize("at", [*range(8), *range(17, 22), *range(32, 36)])
def test_every_flipped_bit_of_a_size_or_an_offset_is_found_and_costs_one_record(
    log: Journal, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvspool.journal.verify.PAUSE", 0.0)  # no process writes
    for base, number in ((10, 4), (10, 0), (10, 9), (30, 1)):
        for bit in range(8):
            flip(segment(log, base), number * SIZE + at, bit)
            assert places(log) == [(f"{base:04x}", number * SIZE, SIZE, base + number, base + number)], (base, number, bit)
            flip(segment(log, base), number * SIZE + at, bit)
    assert log.verify().is_sound


def test_a_missing_segment(log: Journal) -> None:
    segment(log, 10).unlink()
    assert places(log) == [("0000", EACH * SIZE, 0, 10, 19)]
    assert log.verify().damaged_records == 10


def test_a_sealed_segment_that_was_cut(log: Journal) -> None:
    os.truncate(segment(log, 10), 4 * SIZE + 7)
    assert places(log) == [("000a", 4 * SIZE, 7, 14, 19)]
    os.truncate(segment(log, 10), 4 * SIZE)
    assert places(log) == [("000a", 4 * SIZE, 0, 14, 19)]
    os.truncate(segment(log, 10), 0)
    assert places(log) == [("000a", 0, 0, 10, 19)]


def test_an_end_that_is_not_what_writers_and_flushes_have_promised(log: Journal) -> None:
    os.truncate(segment(log, 30), 2 * SIZE)
    assert places(log) == [("001e", 2 * SIZE, 0, 32, 34)]
    with system.replaced(Rebooted()):
        assert log.verify().is_sound  # no process had flushed them


def test_a_record_that_was_appended_in_one_step_is_missed_too(log: Journal) -> None:
    log.append(b"%010d" % 35)
    log.append(b"%010d" % 36)
    os.truncate(segment(log, 30), 5 * SIZE)
    assert places(log) == [("001e", 5 * SIZE, 0, 35, 36)]


def test_what_a_flush_has_promised_is_missed_after_a_restart_too(log: Journal) -> None:
    log.sync()
    os.truncate(segment(log, 30), 2 * SIZE)
    with system.replaced(Rebooted()):
        assert places(log) == [("001e", 2 * SIZE, 0, 32, 34)]


@pytest.mark.parametrize("size", [1, 17, 18, 25, 35])
def test_a_torn_end_is_what_a_killed_writer_leaves_and_no_damage(log: Journal, size: int) -> None:
    frame = segment(log, 0).read_bytes()[:SIZE]
    with segment(log, 30).open("ab") as file:
        file.write(((35).to_bytes(8, "big") + frame[8:])[:size])
    report = log.verify()
    assert report.is_sound and report.torn_bytes == size and report.records == 35
    log.append(b"x")
    assert log.verify().torn_bytes == 0


def test_garbage_at_the_end_is_damage(log: Journal) -> None:
    with segment(log, 30).open("ab") as file:
        file.write(b"\xff" * 100)
    assert places(log) == [("001e", 5 * SIZE, 100, 35, 34)]
    assert log.verify().damaged_records == 0


def test_a_torn_end_that_is_completed_meanwhile_is_none(log: Journal) -> None:
    frame = (35).to_bytes(8, "big") + segment(log, 0).read_bytes()[8:SIZE]
    log.close()
    (log.path / "jnl.lck").unlink()  # as the original leaves it
    path = segment(log, 30)
    with path.open("ab") as file:
        file.write(frame[:20])

    class Completing(system.Port):
        def sleep(self, seconds: float) -> None:
            if path.stat().st_size < 6 * SIZE:
                with path.open("ab") as file:
                    file.write(frame[20:])

    with kvspool.open(log.path, format="sej") as mine, system.replaced(Completing()):
        report = mine.verify()
    assert report.is_sound and report.torn_bytes == 0 and report.records == 36


def test_a_torn_end_while_a_writer_has_the_lock_is_none(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvspool.journal import verify

    monkeypatch.setattr(verify, "PATIENCE", 0.2)
    with append_lock.held(log):
        with segment(log, 30).open("ab") as file:
            file.write((35).to_bytes(8, "big"))
        report = log.verify()
    assert report.is_sound and report.torn_bytes == 0


def test_a_torn_end_while_the_original_has_the_journal_is_none(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvspool.journal import verify

    monkeypatch.setattr(verify, "PATIENCE", 0.2)
    log.close()
    with segment(log, 30).open("ab") as file, (log.path / "jnl.lck").open("rb") as theirs:
        file.write((35).to_bytes(8, "big"))  # what its buffer has given out so far
        file.flush()
        fcntl.flock(theirs, fcntl.LOCK_EX)
        report = kvspool.verify(log.path)
    assert report.is_sound and report.torn_bytes == 0  # type: ignore[union-attr]
    assert kvspool.verify(log.path).torn_bytes == 8  # type: ignore[union-attr]


def test_names_that_mean_nothing_here(log: Journal) -> None:
    (log.path / "jnl/notes.txt").write_text("")
    (log.path / "jnl/000000000000000A.jnl").write_text("")
    os.mkfifo(log.path / "jnl/0000000000000005.jnl")
    report = log.verify()
    assert report.foreign == ["000000000000000A.jnl", "notes.txt"]
    assert report.problems == ["0000000000000005.jnl has a segment's name and is not a file"]


def test_settings_lock_file_and_readers(log: Journal) -> None:
    for name in ("ahead", "fine", "short"):
        log.reader(name).close()
    (log.path / "ofs/ahead.ofs").write_bytes((99).to_bytes(8, "big"))
    (log.path / "ofs/short.ofs").write_bytes(b"1234567")
    (log.path / "kvspool.json").write_text("{")
    with (log.path / "jnl.lck").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff")
    problems = " | ".join(log.verify().problems)
    for words in ("'ahead' is at sequence 99, but 35", "'short' has lost its position", "kvspool.json", "jnl.lck"):
        assert words in problems
    assert "fine" not in problems
    assert len(log.verify().problems) == 4


def test_the_original_program_at_the_same_time_and_no_lock_file(log: Journal) -> None:
    log.close()
    (log.path / "jnl.lck").unlink()
    (log.path / "kvspool.json").unlink()
    assert kvspool.verify(log.path).is_sound
    (log.path / "jnl.lck").write_bytes(b"")
    assert kvspool.verify(log.path).is_sound


def test_a_poisoned_journal_says_so(log: Journal) -> None:
    with system.replaced(FailingPort(1, errno.EIO, only=("flush_data",))), pytest.raises(kvspool.errors.Poisoned):
        log.sync()
    assert log.verify().sync_error == errno.EIO


def test_it_changes_nothing(log: Journal) -> None:
    flip(segment(log, 10), 3 * SIZE + 18)
    before = {path: path.read_bytes() for path in log.path.rglob("*") if path.is_file()}
    log.verify()
    assert {path: path.read_bytes() for path in log.path.rglob("*") if path.is_file()} == before


def test_no_false_alarm_while_writers_append_and_are_killed_and_trimmers_trim(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kvspool.create(path, format="sej", segment_bytes=2000).close()

    def append() -> None:
        with kvspool.open(path, format="sej") as log:
            while True:
                log.append_many([b"x" * 300] * 3)

    def remove() -> None:
        with kvspool.open(path, format="sej") as log:
            while True:
                log.trim(Retention(max_bytes=20_000))

    over = threading.Event()

    def kill_and_start() -> None:
        while not over.is_set():
            victim = start(append)
            over.wait(0.03)
            os.kill(victim.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(Died):
                victim()

    trimmer, writer = start(remove), start(append)
    killer = threading.Thread(target=kill_and_start)
    killer.start()
    try:
        with kvspool.open(path, format="sej") as log:
            while log.end() < 100:
                pass
            reports = [log.verify() for _ in range(60)]
    finally:
        over.set()
        killer.join()
        for child in (trimmer, writer):
            os.kill(child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(Died):
                child()
    assert [report for report in reports if not report.is_sound] == []
    assert reports[-1].next_sequence > reports[0].next_sequence > 0
    assert control.look(path / "jnl.lck").next_sequence >= reports[-1].next_sequence


def test_all_that_was_there_may_be_trimmed_during_the_look(log: Journal) -> None:
    class Trimming(system.Port):
        def open(self, path: Any, flags: int, mode: int = 0o600) -> int:
            if str(path).endswith("000a.jnl") and log.end() == 35:
                log.append_many([b"x" * 10] * 40)
                log.trim(before=70)
            return super().open(path, flags, mode)

    with kvspool.open(log.path, format="sej") as mine, system.replaced(Trimming()):
        report = mine.verify()
    assert report.is_sound and log.bases() == [70]
    assert (report.records, report.trimmed, report.next_sequence) == (10, 60, 70)


def test_any_call_may_fail(log: Journal) -> None:
    nth = 0
    while True:
        nth += 1
        port = FailingPort(nth, errno.EIO, only=("open", "read", "status", "names"))
        try:
            with system.replaced(port):
                report = log.verify()
        except OSError as error:
            assert error.errno == errno.EIO
        if not port.failed:
            break
    assert nth > 10 and report.is_sound


def test_readers_without_write_permission_can_verify(log: Journal) -> None:
    with system.replaced(ReadOnlyPort()):
        assert in_child(lambda: kvspool.verify(log.path).is_sound)
