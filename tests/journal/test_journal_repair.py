"""Torn and damaged ends when a writer begins, and repairs: removed and kept bytes, the file with the removed ones, kills in between."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import append_lock
import pytest
from children import Died, in_child, start
from faults import FailingPort, KillingPort
from images import Rebooted
from schedules import some
from small_sej import EACH, SIZE, flip, make, segment

import kvspool
from kvspool import Gap, Record, system
from kvspool.errors import Corruption, LockTimeout, Poisoned
from kvspool.journal import Journal, control
from kvspool.journal.formats import FORMATS, Kvj, Sej


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Journal]:
    with make(tmp_path / "log") as made:
        yield made


def items(log: Journal) -> list[Any]:
    """Return all that a reader gets: sequences, and Gaps as pairs."""
    return [(item.first, item.last) if isinstance(item, Gap) else item.sequence for item in log.read(on_gap="yield")]


def is_whole(log: Journal) -> bool:
    """Return whether every record has the value that was appended as this one."""
    return all(int(item.value) == item.sequence for item in log.read(on_gap="yield") if isinstance(item, Record))


def kept(log: Journal) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.path.iterdir() if ".removed-" in path.name}


# Writers that begin.


@pytest.mark.parametrize("is_known", [True, False], ids=["same run", "other run"])
def test_every_truncation_of_the_last_200_bytes_with_writers_alive(tmp_path: Path, is_known: bool) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append_many([b"%010d" % number for number in range(12)])
        whole = segment(log, 0).read_bytes()
        with kvspool.open(log.path, format="sej") as other, kvspool.open(log.path, format="sej") as third:
            other.append(b"%010d" % 12)
            third.append(b"%010d" % 13)
            whole = segment(log, 0).read_bytes()
            for cut in range(1, 201):
                with append_lock.held(log):
                    with segment(log, 0).open("r+b") as file:
                        file.truncate(0)
                        file.write(whole[:-cut])
                    if not is_known:
                        log.control(1).write(log.control(1).read()._replace(boot=bytes(16)))
                left = (len(whole) - cut) // SIZE
                assert third.append(b"%010d" % left) == left
                assert other.append(b"%010d" % (left + 1)) == left + 1
                assert log.append(b"%010d" % (left + 2)) == left + 2
                assert items(log) == list(range(left + 3)) and is_whole(log)
                torn = [one.torn[-1] for one in (log, other, third) if one.torn]
                if (len(whole) - cut) % SIZE:
                    assert third.torn[-1].data == whole[left * SIZE : len(whole) - cut]
                assert len(torn) <= 1, "only who appended first had something to cut"


@pytest.mark.parametrize("is_known", [True, False], ids=["same run", "other run"])
def test_garbage_after_the_end_is_cut_by_the_next_writer_and_costs_no_record(tmp_path: Path, is_known: bool) -> None:
    chance = random.Random(7)
    with kvspool.create(tmp_path / "log", format="sej") as log, kvspool.open(log.path, format="sej") as other:
        expected = 0
        for trial in range(200):
            size = chance.choice((1, 7, 8, 17, 18, 26, 40, 300, 3000))
            kinds: list[bytes] = [chance.randbytes(size), bytes(size), b"\xff" * size, expected.to_bytes(8, "big") + chance.randbytes(size)]
            garbage = kinds[trial % 4]
            if expected:
                with append_lock.held(log), segment(log, 0).open("ab") as file:
                    file.write(garbage)
                    if not is_known:
                        log.control(1).write(log.control(1).read()._replace(boot=bytes(16)))
            who = (log, other)[trial % 2]
            assert who.append_many([b"%010d" % expected, b"%010d" % (expected + 1)]) == range(expected, expected + 2)
            expected += 2
            if trial:
                assert who.torn[-1].size == len(garbage) and who.torn[-1].data == garbage
        assert items(log) == list(range(expected)) and is_whole(log)
        assert log.verify().is_sound


def test_writers_killed_next_to_each_other_leave_every_acknowledged_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kvspool.create(path, format="sej", segment_bytes=5000).close()
    chance = random.Random(3)

    def append(notes: Path) -> None:
        with kvspool.open(path, format="sej") as log, notes.open("a", encoding="utf-8") as file:
            while True:
                sequences = log.append_many([b"%d" % os.getpid() * 40] * 5)
                file.write(f"{sequences[0]} {sequences[-1]} {os.getpid()}\n")
                file.flush()

    notes = [tmp_path / f"notes{number}" for number in range(3)]
    for _ in range(12):
        children = [start(lambda note=note: append(note)) for note in notes]  # type: ignore[misc]
        signal.sigtimedwait([], chance.uniform(0.03, 0.1))
        for child in children:
            os.kill(child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        for child in children:
            with pytest.raises(Died):
                child()
    with kvspool.open(path, format="sej") as log:
        records = {record.sequence: record.value for record in log.read()}
        assert sorted(records) == list(range(len(records)))
        for note in notes:
            for line in note.read_text(encoding="utf-8").splitlines():
                first, last, pid = map(int, line.split())
                assert all(records[sequence] == b"%d" % pid * 40 for sequence in range(first, last + 1))


def test_damage_with_records_after_it_is_no_torn_end(log: Journal) -> None:
    path = segment(log, 30)
    flip(path, SIZE + 19, 3)
    before = path.read_bytes()
    log.append(b"%010d" % 35)  # the writers know where the end is
    log.close()
    (log.path / "jnl.lck").unlink()
    with kvspool.open(log.path, format="sej") as mine:
        with pytest.raises(Corruption, match="byte 36 is damaged, where sequence 31 .* byte 72, .* kvspool repair"):
            mine.append(b"x")
        assert path.read_bytes()[: len(before)] == before and mine.torn == []
        report = mine.repair()
        assert report.begun == [32]
        assert items(mine) == [*range(31), (31, 31), *range(32, 36)]
        assert mine.append(b"%010d" % 36) == 36 and is_whole(mine)


# Repairs.


def test_of_a_sound_journal_changes_nothing(log: Journal) -> None:
    before = {path.name: path.read_bytes() for path in log.path.rglob("*.jnl")}
    report = kvspool.repair(log.path)
    assert report.removed == [] and report.begun == [] and report.verify.is_sound  # type: ignore[union-attr]
    assert {path.name: path.read_bytes() for path in log.path.rglob("*.jnl")} == before
    assert log.append(b"%010d" % 35) == 35


def test_damage_in_the_middle_of_a_segment(log: Journal) -> None:
    path = segment(log, 10)
    flip(path, 3 * SIZE + 19, 2)
    bad = path.read_bytes()[3 * SIZE : 4 * SIZE]
    report = log.repair()
    (one,) = report.removed
    assert (one.segment, one.position, one.sequence, one.size) == (path.name, 3 * SIZE, 13, SIZE)
    assert Path(one.kept) == log.path / f"{path.name}.removed-{3 * SIZE}" and Path(one.kept).read_bytes() == bad
    assert report.begun == [14]
    assert [(place.first, place.last, place.size) for place in report.verify.damaged] == [(13, 13, 0)]
    assert items(log) == [*range(13), (13, 13), *range(14, 35)] and is_whole(log)
    assert log.append(b"%010d" % 35) == 35
    again = log.repair()
    assert again.removed == [] and again.begun == []


def test_several_places_in_one_segment_and_in_the_last_one(log: Journal) -> None:
    for base, number in ((10, 1), (10, 5), (10, 6), (10, 9), (30, 0), (30, 3)):
        flip(segment(log, base), number * SIZE + 35, 1)
    log.repair()
    assert items(log) == [*range(11), (11, 11), 12, 13, 14, (15, 16), 17, 18, (19, 19), *range(20, 30), (30, 30), 31, 32, (33, 33), 34]
    assert is_whole(log)
    assert log.append(b"%010d" % 35) == 35
    assert items(log)[-1] == 35
    with log.reader("r") as reader:
        assert [(item.first, item.last) for item in reader.read(on_gap="yield") if isinstance(item, Gap)][-1] == (33, 33)


def test_a_segment_that_no_writer_can_continue(log: Journal) -> None:
    path = segment(log, 10)
    path.write_bytes(path.read_bytes()[: 2 * SIZE] + b"\xee" * 1000)
    report = log.repair()
    assert [(one.position, one.sequence, one.size) for one in report.removed] == [(2 * SIZE, 12, 1000)]
    assert items(log) == [*range(12), (12, 19), *range(20, 35)]
    assert kept(log) == {f"{path.name}.removed-{2 * SIZE}": b"\xee" * 1000}


def test_garbage_at_the_end_and_numbers_that_were_given_out_are_not_given_out_again(log: Journal) -> None:
    path = segment(log, 30)
    log.sync()
    path.write_bytes(path.read_bytes()[: 2 * SIZE] + b"\xee" * 50)
    report = log.repair()
    assert report.begun == [35] and kept(log) == {f"{path.name}.removed-{2 * SIZE}": b"\xee" * 50}
    assert log.append(b"%010d" % 35) == 35
    assert items(log) == [*range(32), (32, 34), 35]
    path.write_bytes(path.read_bytes() + b"more")
    log.repair()
    assert len(kept(log)) == 2  # the first file is never written over


def test_a_torn_end_is_cut_and_kept(log: Journal) -> None:
    path = segment(log, 30)
    with path.open("ab") as file:
        file.write((35).to_bytes(8, "big"))
    report = log.repair()
    assert [(one.position, one.size) for one in report.removed] == [(5 * SIZE, 8)] and report.verify.is_sound
    assert kept(log) == {f"{path.name}.removed-{5 * SIZE}": (35).to_bytes(8, "big")}


def test_a_journal_that_another_program_has_made(log: Journal) -> None:
    log.close()
    for name in ("jnl.lck", "kvspool.json"):
        (log.path / name).unlink()
    flip(segment(log, 0), 4)
    assert kvspool.repair(log.path).begun == [1]  # type: ignore[union-attr]
    with kvspool.open(log.path) as mine:
        assert items(mine) == [(0, 0), *range(1, 35)]


def test_a_repair_waits_for_writers_and_gives_up(log: Journal) -> None:
    with kvspool.open(log.path, format="sej") as other, append_lock.held(other), pytest.raises(LockTimeout):
        log.repair(timeout=0.05)
    assert log.repair().verify.is_sound


def test_readers_continue_over_a_repair(log: Journal) -> None:
    flip(segment(log, 10), 3 * SIZE + 19, 2)
    reading = log.read(on_gap="yield")
    follower = log.follow(timeout=0.1, on_gap="yield")
    first = [next(reading).sequence for _ in range(11)]
    assert [next(follower).sequence for _ in range(13)] == list(range(13))
    log.repair()
    log.append(b"%010d" % 35)
    assert first + [item.sequence for item in reading if isinstance(item, Record)] == [*range(13), *range(14, 35)]
    rest = list(follower)
    assert [(item.first, item.last) for item in rest if isinstance(item, Gap)] == [(13, 13)]
    assert [item.sequence for item in rest if isinstance(item, Record)] == list(range(14, 36))


# Poisoned.


def poison(log: Journal) -> None:
    with system.replaced(FailingPort(1, errno.EIO, only=("flush_data",))), pytest.raises(Poisoned):
        log.sync()
    with pytest.raises(Poisoned):
        log.append(b"x")


def test_a_poisoned_journal_is_rewritten_and_takes_records_again(log: Journal) -> None:
    with kvspool.open(log.path, format="sej") as other:
        other.append(b"%010d" % 35)
        poison(log)
        number = segment(log, 30).stat().st_ino
        report = log.repair()
        assert (report.sync_error, report.written_anew) == (errno.EIO, 1)
        assert segment(log, 30).stat().st_ino != number, "new blocks"
        assert other.append(b"%010d" % 36) == 36  # its descriptor is of the old file
        assert log.append(b"%010d" % 37) == 37
        assert log.sync() == 38 and items(other) == list(range(38)) and is_whole(other)


@pytest.mark.parametrize("call", ["flush", "write", "rename", "open"])
def test_a_disk_that_still_fails_leaves_it_poisoned(log: Journal, call: str) -> None:
    poison(log)
    nth = 0
    while True:
        nth += 1
        port = FailingPort(nth, errno.EIO, only=(call,))
        try:
            with system.replaced(port):
                log.repair()
        except (OSError, Poisoned):
            assert port.failed
            if control.Control(log.path / "jnl.lck", None).read().sync_error:
                with pytest.raises(Poisoned):
                    log.append(b"x")
        else:
            break
    assert items(log) == list(range(35)) and log.append(b"%010d" % 35) == 35
    assert not (log.path / "kvspool.repair.tmp").exists()


def test_the_poison_outlasts_a_restart_and_a_repair_lifts_it_then_too(log: Journal) -> None:
    poison(log)
    log.close()
    with system.replaced(Rebooted()), kvspool.open(log.path, format="sej") as mine:
        with pytest.raises(Poisoned):
            mine.append(b"x")
        mine.repair()
        assert mine.append(b"%010d" % 35) == 35


# Kills.


@pytest.mark.parametrize("appends", [False, True], ids=["repaired again", "after an append"])
def test_killed_at_any_step_the_next_repair_brings_the_same(log: Journal, tmp_path: Path, appends: bool) -> None:
    poison(log)
    log.close()
    for base, number in ((10, 3), (10, 7), (30, 1), (30, 3)):
        flip(segment(log, base), number * SIZE + 19, 3)
    expected = [*range(13), (13, 13), 14, 15, 16, (17, 17), *range(18, 31), (31, 31), 32, (33, 33), 34]
    for nth in some(range(1, 1000), 2, int(appends)):
        path = tmp_path / f"copy{nth}"
        shutil.copytree(log.path, path)

        def repaired(path: Path = path, nth: int = nth) -> None:
            with system.replaced(KillingPort(nth, ("write", "truncate", "rename", "flush", "remove"))):
                kvspool.repair(path)

        try:
            in_child(repaired)
        except Died as death:
            assert death.signal == signal.SIGKILL
        else:
            break
        with kvspool.open(path, format="sej") as mine:
            with suppress(Corruption):  # there was damage in the last segment, and may be still
                for item in mine.read(on_gap="yield"):
                    assert isinstance(item, Gap) or int(item.value) == item.sequence
            if appends:
                with pytest.raises((Poisoned, Corruption)):
                    mine.append(b"%010d" % 35)
            mine.repair()
            assert items(mine) == expected, nth
            assert mine.append(b"%010d" % 35) == 35 and is_whole(mine)
        shutil.rmtree(path)
    assert nth > 20


# Whatever happens to a segment, in formats with a header, and with damaged frames of known size, too.


class Headed(Sej):
    """sej with a header before the frames."""

    name = "headed"
    header_bytes = 12

    @classmethod
    def lies_at(cls, path: Path, *, is_sure: bool) -> bool:
        return is_sure and super().lies_at(path, is_sure=True)

    def header(self, base: int) -> bytes:
        return b"HEAD" + base.to_bytes(8, "big")

    def check_header(self, data: bytes, base: int) -> int:
        if len(data) < 12:
            return 0
        if data != self.header(base):
            raise Corruption(f"the header of the segment from {base} on is another one")
        return 12


class Sized(Sej):
    """sej with records of one size, so that damage never hides where the next one begins."""

    name = "sized"

    @classmethod
    def lies_at(cls, path: Path, *, is_sure: bool) -> bool:
        return is_sure and super().lies_at(path, is_sure=True)

    def after_damage(self, position: int, sequence: int) -> tuple[int, int] | None:
        return position + SIZE, sequence + 1

    def after_jump(self, data: bytes, sequence: int, found: int) -> tuple[int, int] | None:
        return SIZE, sequence + 1


@pytest.fixture(params=[Sej, Kvj, Headed, Sized], ids=lambda known: known.name)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a format that can be opened."""
    monkeypatch.setitem(FORMATS, request.param.name, request.param)
    return str(request.param.name)


def damage(path: Path, chance: random.Random) -> None:
    """Do something to a file."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    kind = chance.choice(("flip", "cut", "garbage", "zeros", "remove", "insert"))
    if kind == "remove":
        path.unlink()
        return
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "garbage":
        data[at:] = chance.randbytes(chance.randrange(1, 300))
    elif kind == "zeros":
        data[at : at + 20] = bytes(len(data[at : at + 20]))
    else:
        data[at:at] = chance.randbytes(30)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_done_to_a_segment_a_repair_leaves_a_journal_that_accounts_for_all(
    tmp_path: Path, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvspool.journal.verify.PAUSE", 0.0)  # no process writes
    chance = random.Random(seed)
    limits = {"segment_bytes": EACH * SIZE}
    with kvspool.create(tmp_path / "log", format=name, **limits) as log:  # type: ignore[call-overload]
        log.append_many([b"%010d" % number for number in range(35)])
        for base in chance.sample(log.bases(), chance.choice((1, 1, 2))):
            damage(segment(log, base), chance)
    with kvspool.open(tmp_path / "log", format=name) as log:  # type: ignore[call-overload]
        before = log.verify()
        directory = log.format.segments_in(log.path)
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        report = log.repair()
        assert before.records + before.damaged_records >= 35 - before.first_sequence, "each record is sound, or said to be lost"
        assert before.records <= 35 and (name == "sized" or before.records + before.damaged_records <= 35)
        assert report.verify.records >= before.records
        assert [place for place in report.verify.damaged if place.size and name != "sized"] == []
        assert all(Path(one.kept).stat().st_size == one.size for one in report.removed)
        after = {path.name: path.stat().st_size for path in directory.iterdir()}
        headers = len(log.format.header(0)) * (len(after) - len(sizes))
        assert sum(after.values()) + sum(one.size for one in report.removed) >= sum(sizes.values()) + headers
        assert name != "kvj" or is_whole(log), "its checksums find every flipped bit"
        found = items(log)
        covered = [number for item in found for number in (range(item[0], item[1] + 1) if isinstance(item, tuple) else [item])]
        assert covered == list(range(log.first(), log.end()))
        again = log.repair()
        assert again.removed == [] and again.begun == [] and again.headers == []
        end = log.end()
        assert log.append(b"%010d" % end) == end and items(log)[-1] == end


def test_a_damaged_header_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "headed", Headed)
    with kvspool.create(tmp_path / "log", format="headed", segment_bytes=EACH * SIZE) as log:  # type: ignore[call-overload]
        log.append_many([b"%010d" % number for number in range(35)])
        for base in (log.bases()[1], log.bases()[-1]):
            flip(segment(log, base), 2)
        report = log.repair()
        assert report.headers == [log.bases()[1], log.bases()[-1]] and report.verify.is_sound
        assert items(log) == list(range(35)) and is_whole(log)
        assert [data[:2] for data in kept(log).values()] == [b"HE", b"HE"]


@pytest.mark.parametrize("size", [0, 5, 11])
def test_a_header_that_is_not_all_there_costs_its_segment_and_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setitem(FORMATS, "headed", Headed)
    with kvspool.create(tmp_path / "log", format="headed", segment_bytes=EACH * SIZE) as log:  # type: ignore[call-overload]
        log.append_many([b"%010d" % number for number in range(35)])
        base, after = log.bases()[1:3]
        os.truncate(segment(log, base), size)
        (place,) = log.verify().damaged
        assert (place.position, place.size, place.first, place.last) == (0, size, base, after - 1)
        assert log.repair().headers == [base]
        assert items(log) == [*range(base), (base, after - 1), *range(after, 35)]
