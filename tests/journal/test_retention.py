"""Removed and kept segments: the rules, their combinations, kills and crashes in between, and other users of the journal meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, start
from faults import FailingPort, KillingPort

import kvspool
from kvspool import Gap, system
from kvspool.errors import Corruption, GapError, OutOfRange
from kvspool.journal import Floor, Journal, Retention, settings, trim

EACH = 10  # records in each segment
SIZE = 26 + 10  # bytes of each record


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """A journal of four full segments and an empty one."""
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=EACH * SIZE) as made:
        made.append_many([b"%010d" % number for number in range(4 * EACH)])
        yield made


def bases(log: Journal) -> list[int]:
    return log.segments_apart().bases()


def going(log: Journal, retention: Retention) -> list[int]:
    return [one.base for one in trim.plan(log, retention).going]


def stand(log: Journal, name: str, sequence: int) -> None:
    with log.reader(name) as reader:
        reader.seek(sequence)
        reader.commit()


# The rules.


def test_bytes(log: Journal) -> None:
    assert going(log, Retention(max_bytes=4 * EACH * SIZE)) == []
    assert going(log, Retention(max_bytes=4 * EACH * SIZE - 1)) == [0]
    assert going(log, Retention(max_bytes=2 * EACH * SIZE)) == [0, 10]
    assert going(log, Retention(max_bytes=0)) == [0, 10, 20, 30]


def test_the_last_segment_stays_even_if_it_is_all_there_is(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append_many([b"x"] * 10)
        report = log.trim(Retention(max_bytes=0, max_age=0, force=True))
        assert (report.removed_segments, report.first_sequence) == (0, 0)
        assert report.plan.segments[0].why == "the last segment always stays"


def test_age_is_that_of_the_newest_record(tmp_path: Path) -> None:
    now = time.time_ns()
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=SIZE * 2) as log:
        for age in (900, 800, 700, 50, 40, 30):
            log.append(b"x" * 10, timestamp=now - age * 10**9)
        plan = trim.plan(log, Retention(max_age=100))
        assert [one.goes for one in plan.segments] == [True, False, False, False]
        assert [round(one.age, -1) for one in plan.segments[:3]] == [800, 50, 30]
        assert going(log, Retention(max_age=45)) == [0, 2]


def test_a_record_without_a_time_is_as_old_as_its_file(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=SIZE) as log:
        log.append(b"x" * 10, timestamp=-(1 << 63))
        assert going(log, Retention(max_age=1000)) == []
        long_ago = time.time() - 5000
        os.utime(tmp_path / "log/jnl/0000000000000000.jnl", (long_ago, long_ago))
        assert going(log, Retention(max_age=1000)) == [0]


def test_what_all_durable_readers_have_read(log: Journal) -> None:
    assert going(log, Retention(by_consumers=True)) == []  # no reader has read anything
    stand(log, "quick", 40)
    assert going(log, Retention(by_consumers=True)) == [0, 10, 20, 30]
    stand(log, "slow", 19)
    plan = trim.plan(log, Retention(by_consumers=True))
    assert [(one.base, one.goes, one.held_by) for one in plan.segments] == [
        (0, True, []),
        (10, False, ["slow"]),
        (20, False, ["slow"]),
        (30, False, ["slow"]),
        (40, False, ["slow"]),
    ]
    assert plan.segments[1].why == "'slow' has yet to read it"
    stand(log, "slow", 20)
    assert going(log, Retention(by_consumers=True)) == [0, 10]


def test_a_limit_waits_for_readers_unless_it_is_forced(log: Journal) -> None:
    stand(log, "slow", 15)
    assert going(log, Retention(max_bytes=0)) == [0]
    forced = Retention(max_bytes=EACH * SIZE, force=True)
    report = log.trim(forced)
    assert bases(log) == [30, 40]
    assert [(one.name, one.first, one.last) for one in report.left_behind] == [("slow", 15, 29)]
    with log.reader("slow") as reader:
        gap, *records = reader.read(on_gap="yield")
        assert (gap.first, gap.last, gap.reason) == (15, 29, "trimmed")
        assert [record.sequence for record in records] == list(range(30, 40))


@pytest.mark.parametrize(
    ("floor", "left"),
    [
        (25, 20),
        (Floor(sequence=30), 30),
        (Floor(records=11), 20),
        (Floor(records=10), 30),
        (Floor(bytes=2 * EACH * SIZE), 20),
        (Floor(bytes=2 * EACH * SIZE + 1), 10),
        (Floor(segments=1), 40),
        (Floor(segments=4), 10),
        (Floor(segments=99), 0),
        (Floor(segments=2, records=25), 10),
    ],
)
def test_the_floor_is_never_passed(log: Journal, floor: Floor | int, left: int) -> None:
    stand(log, "reader", 40)
    log.trim(Retention(max_bytes=0, max_age=0, by_consumers=True, floor=floor, force=True))
    assert bases(log)[0] == left


def test_the_floor_of_the_journal_holds_in_a_manual_trim(log: Journal) -> None:
    log.set_retention(Retention(floor=20))
    log.trim(before=40, force=True)
    assert bases(log)[0] == 20


def test_before(log: Journal) -> None:
    assert log.trim(before=9).removed_segments == 0
    assert log.trim(before=29).removed_records == 20
    assert bases(log) == [20, 30, 40]
    with pytest.raises(OutOfRange):
        log.trim(before=41)
    with pytest.raises(ValueError, match="no rule to apply"):
        log.trim()
    with pytest.raises(ValueError, match="no rule to apply"):
        log.trim(Retention(floor=3))
    stand(log, "slow", 20)
    assert log.trim(before=40).removed_segments == 0
    assert log.trim(before=40, force=True).removed_segments == 2


def test_a_dry_run_says_what_a_trim_does_and_does_nothing(log: Journal) -> None:
    stand(log, "slow", 5)
    rules = Retention(max_bytes=EACH * SIZE, force=True)
    said = log.trim(rules, dry_run=True)
    assert bases(log) == [0, 10, 20, 30, 40]
    done = log.trim(rules)
    assert bases(log) == [30, 40]
    for name in ("removed_segments", "removed_records", "removed_bytes", "first_sequence", "left_behind"):
        assert getattr(said, name) == getattr(done, name), name


def test_a_reader_whose_place_cannot_be_read_holds_everything(log: Journal) -> None:
    stand(log, "lost", 40)
    (log.path / "ofs/lost.ofs").write_bytes(b"short")
    assert going(log, Retention(max_bytes=0, by_consumers=True)) == []
    assert going(log, Retention(max_bytes=0, force=True)) == [0, 10, 20, 30]


@pytest.mark.parametrize("wrong", [{"max_bytes": -1}, {"max_age": -1.0}, {"max_age": float("nan")}, {"floor": -1}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not"):
        Retention(**wrong)
    with pytest.raises(ValueError, match="negative"):
        Floor(records=-1)


# Automatic retention.


def test_the_writer_that_begins_a_segment_applies_the_rules_of_the_journal(tmp_path: Path) -> None:
    rules = Retention(max_bytes=3 * EACH * SIZE, floor=Floor(segments=1))
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=EACH * SIZE, retention=rules) as log:
        assert log.retention == rules
        log.append_many([b"x" * 10] * 100)  # in one batch
        assert bases(log) == [70, 80, 90, 100]
    with kvspool.open(tmp_path / "log", format="sej") as log:
        log.append_many([b"x" * 10] * 10)
        assert bases(log) == [80, 90, 100, 110]
        with kvspool.open(tmp_path / "log", format="sej") as other:
            other.set_retention(Retention(max_bytes=EACH * SIZE))
        log.append_many([b"x" * 10] * 10)  # a handle that was open before
        assert bases(log) == [110, 120]
        log.set_retention(None)
        log.append_many([b"x" * 10] * 100)
        assert bases(log)[0] == 110


def test_a_reader_that_is_waited_for_lets_a_journal_grow(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=EACH * SIZE, retention=Retention(max_bytes=0)) as log:
        stand(log, "slow", 0)
        log.append_many([b"x" * 10] * 50)
        assert bases(log)[0] == 0
        stand(log, "slow", 50)
        log.append_many([b"x" * 10] * 10)
        assert bases(log) == [50, 60]  # what the reader has yet to read is there


@pytest.mark.parametrize("call", ["remove", "names"])
def test_a_trim_that_fails_is_no_failure_of_the_append(tmp_path: Path, call: str) -> None:
    class Refusing(system.Port):
        def _refuse(self, *_: Any) -> Any:
            raise PermissionError(errno.EACCES, "refused")

    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=EACH * SIZE, retention=Retention(max_bytes=0)) as log:
        log.append(b"x" * 10)
        port = Refusing()
        setattr(port, call, port._refuse)
        with system.replaced(port):
            assert log.append_many([b"x" * 10] * 30) == range(1, 31)
        assert isinstance(log.trim_error, PermissionError)
        assert len(bases(log)) == 4
        log.append_many([b"x" * 10] * 9)
        assert log.trim_error is None and bases(log) == [40]


def test_damaged_settings_are_no_failure_of_the_append(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=EACH * SIZE, retention=Retention(max_bytes=0)) as log:
        (tmp_path / "log" / settings.NAME).write_text("{")
        log.append_many([b"x" * 10] * 30)
        assert isinstance(log.trim_error, Corruption) and len(bases(log)) == 4


# Others meanwhile.


def test_a_cursor_in_a_removed_segment_gets_an_exact_gap(log: Journal) -> None:
    reading = log.read(on_gap="raise")
    assert [next(reading).sequence for _ in range(3)] == [0, 1, 2]
    reading.poll(7)
    follower = log.follow(timeout=0)
    next(follower)
    log.trim(before=30)
    with pytest.raises(GapError) as caught:
        for _ in reading:
            pass
    assert (caught.value.gap.last, caught.value.gap.reason) == (29, "trimmed")
    assert next(reading).sequence == 30


CALLS = ("remove", "flush", "write")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_step_it_leaves_a_journal_without_a_hole(log: Journal, tmp_path: Path, after: bool) -> None:
    log.close()
    nth = 0
    while True:
        nth += 1
        path = tmp_path / f"copy{nth}"
        shutil.copytree(log.path, path)

        def trimmed(path: Path = path, nth: int = nth) -> None:
            with system.replaced(KillingPort(nth, CALLS, when="after" if after else "before")), kvspool.open(path, format="sej") as mine:
                mine.trim(before=40)

        try:
            in_child(trimmed)
        except Died as death:
            assert death.signal == signal.SIGKILL
        else:
            break
        with kvspool.open(path, format="sej") as mine:
            left = bases(mine)
            assert left == list(range(left[0], 41, EACH))
            assert [record.sequence for record in mine.read()] == list(range(left[0], 40))
            assert mine.append_many([b"%010d" % number for number in range(2 * EACH)]) == range(40, 40 + 2 * EACH)
            mine.trim(before=40)
            assert bases(mine) == [40, 50, 60]
    assert nth > 12, "three calls for each of four segments"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_step_of_an_append_that_trims_it_costs_nothing_that_was_acknowledged(tmp_path: Path, after: bool) -> None:
    path = tmp_path / "log"
    kvspool.create(path, format="sej", segment_bytes=EACH * SIZE, retention=Retention(max_bytes=2 * EACH * SIZE)).close()
    acknowledged = 0

    def appended(nth: int) -> int:
        with kvspool.open(path, format="sej") as mine:
            first = mine.append(b"%010d" % mine.end())
            with system.replaced(KillingPort(nth, CALLS, when="after" if after else "before")):
                mine.append_many([b"%010d" % number for number in range(first + 1, first + 1 + 2 * EACH)])
            return mine.end()

    nth = 0
    while True:
        nth += 1
        try:
            acknowledged = in_child(lambda: appended(nth))  # noqa: B023
        except Died as death:
            assert death.signal == signal.SIGKILL
        with kvspool.open(path, format="sej") as mine:
            mine.append_many([b"%010d" % number for number in range(mine.end(), mine.end() + EACH)])
            left = bases(mine)
            assert left == list(range(left[0], mine.end() + 1, EACH))
            assert [(record.sequence, int(record.value)) for record in mine.read()] == [(n, n) for n in range(left[0], mine.end())]
            assert len(left) <= 4 and mine.verify().is_sound
        if acknowledged:
            break
    assert nth > 8


def test_a_name_is_gone_from_the_disk_before_the_next_one_is_removed(log: Journal) -> None:
    calls: list[str] = []

    class Noting(system.Port):
        def remove(self, path: Any) -> None:
            calls.append(f"remove {Path(path).name.lstrip('0')}")
            super().remove(path)

        def flush(self, fd: int) -> None:
            calls.append(f"flush {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
            super().flush(fd)

    with system.replaced(Noting()):
        log.trim(before=20)
    assert calls == ["remove .jnl", "flush jnl", "remove .idx", "remove a.jnl", "flush jnl", "remove a.idx"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_any_call_may_fail_and_the_next_trim_continues(log: Journal, number: int) -> None:
    calls = ("open", "read", "write", "flush", "status", "remove", "names")
    nth = 0
    while True:
        nth += 1
        port = FailingPort(nth, number, only=calls)
        try:
            with system.replaced(port):
                log.trim(before=log.end() - 2)
        except OSError as error:
            assert error.errno == number
        left = bases(log)
        assert left == list(range(left[0], log.end() + 1, EACH))
        if not port.failed:
            break
        if len(left) < 4:
            log.append_many([b"%010d" % number for number in range(2 * EACH)])
    assert nth > 10


def test_trimmers_appenders_and_readers_at_once_account_for_every_sequence(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kvspool.create(path, format="sej", segment_bytes=EACH * SIZE).close()
    count = 400

    def append() -> int:
        with kvspool.open(path, format="sej") as log:
            for number in range(count):
                log.append(b"%010d" % number)
        return 0

    def remove() -> int:
        removed = 0
        with kvspool.open(path, format="sej") as log:
            is_over = False
            while not is_over:
                is_over = log.end() == 2 * count  # one trim after the last append: the others may all be too early
                removed += log.trim(Retention(max_bytes=3 * EACH * SIZE)).removed_segments
        return removed

    def read() -> tuple[int, int]:
        with kvspool.open(path, format="sej") as log:
            seen, next_one = 0, 0
            for item in log.follow(timeout=30, on_gap="yield"):
                first, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
                assert first == next_one, (first, next_one)
                assert not isinstance(item, Gap) or item.reason == "trimmed"
                seen, next_one = seen + (not isinstance(item, Gap)), last + 1
                if next_one == 2 * count:
                    return seen, next_one
        raise AssertionError(f"nothing came behind {next_one}")

    waiting = [start(function) for function in (read, read, remove, remove, append, append)]
    results = [wait() for wait in waiting]
    assert results[0][1] == results[1][1] == 2 * count
    assert results[2] + results[3] > 10
    with kvspool.open(path, format="sej") as log:
        left = bases(log)
        assert left == list(range(left[0], 2 * count + 1, EACH))


def test_the_index_of_a_removed_segment_goes_with_it(log: Journal) -> None:
    (log.path / "index").mkdir()
    for base in bases(log):
        log._segments.index_path(base).write_bytes(b"")
    log.trim(before=20)
    assert sorted(path.name for path in (log.path / "index").iterdir()) == [f"{base:016x}.idx" for base in (20, 30, 40)]


def test_a_reader_that_commits_meanwhile_is_heard(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two holds of the lock a reader goes back: what it reads next stays."""
    monkeypatch.setattr(trim, "AT_ONCE", 1)
    stand(log, "reader", 40)
    removed = trim.drop

    def drop(segments: Any, bases: list[int]) -> list[int]:
        if bases == [10]:
            stand(log, "reader", 25)
        return removed(segments, bases)

    monkeypatch.setattr(trim, "drop", drop)
    log.trim(Retention(by_consumers=True))
    assert bases(log) == [20, 30, 40]


# Readers that the journal doesn't know of.


def test_remote_readers_hold_records_as_its_own_do_and_are_shown(log: Journal) -> None:
    own, places = Retention(by_consumers=True), {"hub:a": 25, "hub:b": 12}
    assert [one.base for one in log.trim(own, dry_run=True, elsewhere=lambda: places).plan.going] == [0]
    stand(log, "near", 5)
    assert log.trim(own, dry_run=True, elsewhere=lambda: places).removed_segments == 0
    log.delete_reader("near")
    report = log.trim(Retention(max_bytes=0, force=True), elsewhere=lambda: {**places, "hub:unknown": -1})
    assert [(one.name, one.first, one.last) for one in report.left_behind] == [("hub:a", 25, 39), ("hub:b", 12, 39)]
    assert report.plan.segments[0].held_by == ["hub:unknown"]


def test_readers_elsewhere_are_asked_again_under_the_lock(log: Journal) -> None:
    answers = iter([{"hub:a": 40}, {"hub:a": 15}])
    assert log.trim(Retention(by_consumers=True), elsewhere=lambda: next(answers, {"hub:a": 15})).removed_segments == 1


def test_no_more_go_at_once_than_was_said(log: Journal) -> None:
    assert log.trim(Retention(max_bytes=0), most=3, dry_run=True).first_sequence == 30
    assert [log.trim(Retention(max_bytes=0), most=3).removed_segments for _ in range(3)] == [3, 1, 0]
    assert bases(log) == [40]
