"""Exceptions out of signal handlers, raised wherever Python runs one: they cost a journal no record, no lock and no descriptor."""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alarms import Interrupt, Tracer, interrupted
from loops import IS_SECOND_RUN
from parking import parked
from schedules import ALL

import kvspool
from kvspool.journal import Journal, Retention
from kvspool.journal.appender import IS_ONE_STEP

FORMATS: dict[str, dict[str, Any]] = {
    "kvj": {"segment_bytes": 200},
    "sej": {"segment_bytes": 200},
    "fflg": {"segment_bytes": 10_000},
    "fixed": {"item_bytes": 8, "items_per_blob": 4},
}
BEFORE = [b"%08d" % at for at in range(10)]
POINTS = 200 if ALL else 5 if IS_SECOND_RUN else 10  # of each operation
ALARMS = 1000 if ALL else 75


def append(log: Any) -> None:
    log.append(b"--new---")


def append_the_long_way(log: Any) -> None:
    log.append_many([b"--new---"])


def append_over_segments(log: Any) -> None:
    log.append_many([b"--new---"] * (700 if log.format.name == "fflg" else 9))


def recover(log: Any) -> None:
    segments = log.segments_apart()
    with open(segments.path_of(segments.bases()[-1]), "ab") as file:
        file.write(b"\1\2\3")
    log.append(b"--new---")


def find_another_lock_file(log: Any) -> None:
    log.append(b"--new---")
    os.unlink(log.format.lock_file(log.path))
    log.append(b"--new---")


def open_append_and_close(log: Any) -> None:
    with kvspool.open(log.path, timeout=0) as one:
        one.append(b"--new---")


def sync(log: Any) -> None:
    log.append(b"--new---")
    log.sync()


def trim(log: Any) -> None:
    log.trim(before=5)


def read(log: Any) -> None:
    assert len(list(log.read())) >= len(BEFORE)
    assert list(log.follow("latest", timeout=0)) == []


def commit(log: Any) -> None:
    with log.reader("me") as reader:
        assert len(list(reader.read(limit=2))) == 2
        reader.commit()


def look_up_time(log: Any) -> None:
    log.place(datetime(2020, 1, 1, tzinfo=UTC))


def produce(log: Any) -> None:
    with suppress(kvspool.errors.KvspoolError):  # an interrupted batch is another one's, by then
        log.producer("me").append_many([b"--new---"] * 2, batch=1)


def verify_and_repair(log: Any) -> None:
    assert log.verify().is_sound
    log.repair()


def archive(log: Any) -> None:
    log.archive()
    log.unarchive()


def rewind(log: Any) -> None:
    log.rewind(7)


def prune(log: Any) -> None:
    log.prune(5)


OF_ALL = [append, append_the_long_way, append_over_segments, recover, open_append_and_close]
OF_SOME = {
    "kvj": [find_another_lock_file, sync, trim, read, commit, verify_and_repair, look_up_time, produce, archive],
    "sej": [look_up_time],
    "fflg": [sync, commit],
    "fixed": [rewind, prune, read],
}
CASES = [(name, operation) for name in FORMATS for operation in [*OF_ALL, *OF_SOME.get(name, [])]]


def descriptors() -> dict[int, str]:
    """Return what each descriptor of this process leads to."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(FileNotFoundError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def made(directory: Path, name: str) -> Path:
    """Return a directory with a journal of some records in it."""
    directory.mkdir()
    with kvspool.create(directory / "log", format=name, **FORMATS[name]) as log:  # type: ignore[call-overload]
        log.append_many(BEFORE)
    return directory


def interrupted_at(nth: int, path: Path, operation: Callable[[Any], None], decoy: Path) -> int:
    """Let an operation be interrupted at a place, and see whether all is well then; return how many places it had before that."""
    before = descriptors()
    tracer = Tracer(nth)
    with kvspool.open(path) as log, kvspool.open(path, timeout=0) as other:
        assert isinstance(log, Journal)
        assert log.append(b"--first-") == other.append(b"--other-") - 1
        assert tracer.run(lambda: operation(log)) == (nth > 0)
        tracer.error = None
        strangers = [os.open(decoy, os.O_RDONLY) for _ in range(4)]
        theirs = other.append(b"other---")  # the lock is free
        assert log.append(b"same----") == theirs + 1  # and the handle works
        records = list(log.read())
        assert [record.sequence for record in records] == list(range(records[0].sequence, theirs + 2))
        assert [record.value for record in records[-2:]] == [b"other---", b"same----"]
        kept = [record.value for record in records if record.value not in (b"--new---", b"other---", b"same----")]
        removed = BEFORE[7:] + [b"--first-", b"--other-"] if operation is rewind and kept[-1:] == BEFORE[6:7] else []
        assert kept == [*BEFORE, b"--first-", b"--other-"][records[0].sequence :][: len(kept) if removed else None]
        assert operation in (trim, prune) or records[0].sequence == 0
        with log.reader("me") as reader:
            assert reader.sequence in ((0, 2) if operation is commit else (0, records[0].sequence))
        log.sync()
    assert {os.fstat(number).st_ino for number in strangers} == {os.stat(decoy).st_ino}
    for number in strangers:
        os.close(number)
    if descriptors() != before:
        gc.collect()
    assert descriptors() == before
    return tracer.seen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt as a generator is closed
@pytest.mark.parametrize(("name", "operation"), CASES, ids=[f"{name} {operation.__name__}" for name, operation in CASES])
def test_a_journal_survives_an_exception_out_of_a_signal_handler_at_any_place(
    tmp_path: Path, name: str, operation: Callable[[Any], None]
) -> None:
    if operation is archive:
        pytest.importorskip("zstandard")
    start = made(tmp_path / "template", name)
    decoy = tmp_path / "decoy"
    decoy.write_bytes(b"another file")
    places = 0
    for number in range(POINTS + 1):
        nth = 0 if number == 0 else 1 + (number - 1) * places // POINTS
        run = tmp_path / "run"
        shutil.copytree(start, run)
        seen = interrupted_at(nth, run / "log", operation, decoy)
        shutil.rmtree(run)
        places = places or seen
    assert places > (1 if operation is append and IS_ONE_STEP else 20)


def keep_settings(log: Any) -> None:
    log.set_retention(Retention(max_bytes=1 << 30))


LATE = 40  # places at the end of an operation
UNDER_LOCK = [("kvj", append_the_long_way), ("kvj", trim), ("kvj", keep_settings), ("fixed", rewind), ("fixed", prune)]


@pytest.mark.parametrize(("name", "operation"), UNDER_LOCK, ids=[f"{name} {operation.__name__}" for name, operation in UNDER_LOCK])
def test_the_append_lock_is_free_while_an_exception_from_the_end_of_an_operation_is_remembered(
    tmp_path: Path, name: str, operation: Callable[[Any], None]
) -> None:
    start = made(tmp_path / "template", name)
    places = count_places(start, tmp_path / "count", operation)
    assert places > LATE
    for nth in range(places - LATE, places + 1):
        run = shutil.copytree(start, tmp_path / f"run{nth}")
        with kvspool.open(run / "log") as log, kvspool.open(run / "log", timeout=0) as other:
            log.append(b"--first-")
            tracer = Tracer(nth)
            assert tracer.run(lambda log=log: operation(log))  # type: ignore[misc]
            assert tracer.error is not None, "with its traceback, which has what the frames had"
            other.append(b"other---")
            log.append(b"same----")


def count_places(start: Path, run: Path, operation: Callable[[Any], None]) -> int:
    shutil.copytree(start, run)
    tracer = Tracer(0)
    with kvspool.open(run / "log") as log:
        log.append(b"--first-")
        tracer.run(lambda: operation(log))
    return tracer.seen


def in_thread(operation: Callable[[], Any]) -> None:
    """Run an operation where no tracer interrupts it."""
    thread = threading.Thread(target=operation)
    thread.start()
    thread.join()


def is_handed_over(error: Interrupt | None) -> bool:
    """Return whether an exception was raised between the follower and its caller."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)] if error else []
    return [name for name in names if name not in ("_trace", "_come")][-1:] == ["__next__"]


def follow_two(following: Any, other: Any, got: list[bytes]) -> None:
    """Get one record that is there, and one that is written while the follower knows of none."""
    got.append(next(following).value)
    in_thread(lambda: other.append(b"second--"))
    got.append(next(following).value)


def follow_interrupted(nth: int, log: Any, other: Any) -> int:
    """Let a waiting follower be interrupted at a place, and see whether it returns each record once; return how many places it had."""
    following = parked(log, other)
    expected = [b"first---", b"second--", b"third---"]
    got: list[bytes] = []
    other.append(expected[0])
    tracer = Tracer(nth)
    tracer.run(lambda: follow_two(following, other, got))
    is_there = log.last(1)[0].value == b"second--"
    for value in expected[2 if is_there else 1 :]:
        other.append(value)
    while got[-1:] != expected[-1:]:
        got.append(next(following).value)
    missing = [value for value in expected if value not in got]
    assert got == [value for value in expected if value not in missing]
    assert len(missing) <= is_handed_over(tracer.error)
    following.close()
    return tracer.seen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt while inotify is opened
@pytest.mark.parametrize("name", ["kvj", "sej", "fflg"])
def test_a_waiting_follower_survives_an_exception_out_of_a_signal_handler_at_any_place(tmp_path: Path, name: str) -> None:
    made(tmp_path / "made", name)
    with kvspool.open(tmp_path / "made" / "log") as log, kvspool.open(tmp_path / "made" / "log", timeout=0) as other:
        places = 0
        for number in range(POINTS + 1):
            seen = follow_interrupted(0 if number == 0 else 1 + (number - 1) * places // POINTS, log, other)
            places = places or seen
    gc.collect()
    assert places > (1 if IS_ONE_STEP else 20)


@pytest.mark.timeout(120, method="thread")  # the alarm is ours
@pytest.mark.parametrize("name", FORMATS)
def test_appends_continue_whatever_real_alarms_raise_in_between(no_collector: None, tmp_path: Path, name: str) -> None:
    before = descriptors()
    limits = FORMATS[name] if name == "fixed" else {"segment_bytes": 10_000}
    acknowledged: list[int] = []
    noise = random.Random(1)
    with kvspool.create(tmp_path / "log", format=name, **limits) as log, kvspool.open(log.path, timeout=0) as other:

        def work() -> None:
            while True:
                sequence = log.append(b"acknowle")
                acknowledged.append(sequence)

        for _ in range(ALARMS):
            with suppress(Interrupt), interrupted(noise.uniform(5e-5, 2e-3), 1.0):
                work()
            other.append(b"-other--")
        records = list(log.read())
    assert [record.sequence for record in records] == list(range(len(records)))
    assert acknowledged
    assert all(records[sequence].value == b"acknowle" for sequence in acknowledged)
    assert len(records) - len(acknowledged) <= 2 * ALARMS
    assert descriptors() == before
