"""The group commit of a journal: one flush for all who wait, nobody acknowledged too early, and every leader replaced."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from children import Died, in_child

import kvspool
from kvspool import _group_py as groups
from kvspool import _tail_py as tails
from kvspool import errors, filesystems, system
from kvspool.journal import Journal, control
from kvspool.journal.durability import Flusher

FORMATS: dict[str, dict[str, Any]] = {"kvj": {}, "sej": {}, "fflg": {}, "fixed": {"item_bytes": 50, "items_per_blob": 1000}}


def create(path: Path, name: str = "kvj", **limits: Any) -> Journal:
    return kvspool.create(path, format=name, **{**FORMATS[name], **limits})  # type: ignore[no-any-return,call-overload]


@pytest.fixture(params=FORMATS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with create(tmp_path / "log", request.param) as log:
        yield log


def value(number: int) -> bytes:
    return (b"%d " % number).ljust(50, b"x")


def words(path: Path) -> list[int]:
    """Return the words of a journal's tail."""
    with kvspool.open(path) as log:
        assert isinstance(log, Journal)
        data = control.tail_file(log.format.lock_file(log.path)).read_bytes()
    return list(memoryview(data).cast("Q"))


class Flushing(system.Port):
    """Notes which files are flushed and written, and does what it is told before a flush of records."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.flushed: list[str] = []
        self.written: list[str] = []
        self.before = before

    def flush_data(self, fd: int) -> None:
        self.flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        self.before()
        super().flush_data(fd)

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        self.written.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        super().write(fd, data, at)


def the_long_way() -> Any:
    """What counts the flushes that go the long way."""
    return mock.patch.object(Flusher, "_flush", autospec=True, side_effect=Flusher._flush)


def test_a_durable_append_is_one_flush_of_the_segment_and_no_write_of_the_page(log: Journal) -> None:
    log.append(value(0))
    with system.replaced(Flushing()) as port, the_long_way() as long:
        assert isinstance(port, Flushing)
        for number in range(1, 6):
            assert log.append(value(number), durable=True) == number
            assert log.stats().synced_sequence == number + 1
        lock_file = log.format.lock_file(log.path).name
        assert len(port.flushed) == 5 and lock_file not in port.flushed + port.written
        assert log.sync() == 6
        assert len(port.flushed) == 5, "all of it is on disk already"
    assert long.call_count == 0


def test_what_the_tail_says_is_on_disk_survives_the_long_way_and_is_seen_by_others(log: Journal) -> None:
    log.append(value(0), durable=True)
    log.append_many([value(1)])
    with kvspool.open(log.path) as other:
        assert isinstance(other, Journal)
        assert other.stats().synced_sequence == 1
        assert [record.sequence for record in other.read(isolation="synced")] == [0]
        assert other.append_many([value(2)], durable=True) == range(2, 3)
        assert log.stats().synced_sequence == 3


def test_a_flush_covers_what_is_appended_before_it_begins_and_nothing_that_comes_meanwhile(log: Journal) -> None:
    with kvspool.open(log.path) as other:
        other.append(value(0))
        with system.replaced(Flushing(lambda: other.append(value(2)))):
            assert log.append(value(1), durable=True) == 1
        assert log.stats().synced_sequence == 2


def test_a_segment_that_begins_during_a_flush_is_flushed_for_the_next_one(tmp_path: Path) -> None:
    with create(tmp_path / "log", segment_bytes=300) as log, kvspool.open(log.path) as other:
        log.append(value(0))

        def grow() -> None:
            for number in range(2, 12):
                assert other.append(value(number)) == number

        with system.replaced(Flushing(grow)) as port:
            assert isinstance(port, Flushing)
            assert log.append(value(1), durable=True) == 1
            port.before = lambda: None
            port.flushed.clear()
            assert log.append(value(12), durable=True) == 12
            assert port.flushed == [f"{log.segments_apart().bases()[-1]:016x}.kvj"] or len(port.flushed) == 1
        assert log.stats().synced_sequence == 13
        assert log.verify().is_sound


def test_records_that_were_taken_back_during_a_flush_do_not_count_as_flushed(tmp_path: Path) -> None:
    with create(tmp_path / "log", "fixed") as log, kvspool.open(log.path) as other:
        log.append(value(0), durable=True)
        log.append_many([value(number) for number in range(1, 9)])
        looks: list[int] = []

        def rewind() -> None:
            if not looks:
                looks.append(0)
                other.rewind(2)  # type: ignore[union-attr]
                for number in range(8):
                    other.append(value(100 + number))
                return
            looks.append(log.stats().synced_sequence)

        with system.replaced(Flushing(rewind)):
            log.append(value(9), durable=True)
        assert len(looks) == 2 and looks[1] <= 2, "the new records had to be flushed, and nobody said before that they were"
        assert log.stats().synced_sequence == 10


def test_a_segment_that_was_replaced_by_a_copy_is_flushed_as_the_copy(log: Journal) -> None:
    log.append(value(0), durable=True)
    path = log.segments_apart().path_of(0)
    with kvspool.open(log.path) as other:
        shutil.copy(path, path.with_name("aside"))
        path.with_name("aside").rename(path)
        other.append(value(1))
        inodes: list[int] = []

        class Noting(system.Port):
            def flush_data(self, fd: int) -> None:
                inodes.append(os.fstat(fd).st_ino)
                super().flush_data(fd)

        with system.replaced(Noting()):
            assert log.sync() == 2
    assert inodes == [path.stat().st_ino]


# Flushes that fail.


def fail() -> None:
    raise OSError(errno.EIO, "a broken disk")


def test_a_flush_that_fails_poisons_the_journal_for_all_at_once_and_for_good(log: Journal) -> None:
    with kvspool.open(log.path) as other:
        other.append(value(0), durable=True)
        with system.replaced(Flushing(fail)), pytest.raises(errors.NotDurable, match="the flush to disk failed"):
            log.append(value(1), durable=True)
        for one in (log, other):
            assert isinstance(one, Journal)
            for attempt in (lambda one=one: one.append(value(2)), lambda one=one: one.append_many([value(2)]), one.sync):
                with pytest.raises(errors.Poisoned):
                    attempt()
            assert one.stats().sync_error == errno.EIO
    assert control.last_word(log.format.lock_file(log.path)).sync_error == errno.EIO
    kvspool.repair(log.path)
    with kvspool.open(log.path) as other:
        assert other.append(value(2), durable=True) == 2


def test_killed_between_the_failure_and_the_page_the_others_still_refuse_and_write_it_down(log: Journal) -> None:
    log.append(value(0))

    def die() -> None:
        with mock.patch.object(Flusher, "_poison", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            with kvspool.open(log.path) as child, system.replaced(Flushing(fail)):
                child.append(value(1), durable=True)

    with pytest.raises(Died, match="SIGKILL"):
        in_child(die)
    with pytest.raises(errors.Poisoned):
        log.append(value(2))
    assert control.last_word(log.format.lock_file(log.path)).sync_error == errno.EIO
    with kvspool.open(log.path) as other, pytest.raises(errors.Poisoned):
        other.append(value(2))


def test_a_word_of_an_error_that_nobody_stored_stops_nobody(log: Journal) -> None:
    log.append(value(0), durable=True)
    path = control.tail_file(log.format.lock_file(log.path))
    for word in (1, errno.EIO, 1 << 40, (1 << 64) - 1):
        with path.open("r+b") as file:
            file.seek(8 * tails.ERROR)
            file.write(word.to_bytes(8, "little"))
        assert log.append(value(1), durable=True) >= 1
        assert words(log.path)[tails.ERROR] == 0


@pytest.mark.parametrize("hostile", [0, 1, 2, 1 << 40, (1 << 64) - 1])
def test_whatever_the_words_of_a_group_say_a_durable_append_is_one_flush(log: Journal, hostile: int) -> None:
    log.append(value(0), durable=True)
    path = control.tail_file(log.format.lock_file(log.path))
    for at in [tails.TURNS, *range(tails.GROUP, tails.GROUP + groups.WORDS)]:
        with path.open("r+b") as file:
            file.seek(8 * at)
            file.write(hostile.to_bytes(8, "little"))
        with system.replaced(Flushing()) as port:
            assert isinstance(port, Flushing)
            sequence = log.append(value(1), durable=True, timeout=60)
            assert len(port.flushed) == 1
        assert log.stats().synced_sequence == sequence + 1


# Leaders and followers.


def _append_and_tell(path: Path, results: Any, before: Callable[[], object] | None) -> None:
    with kvspool.open(path) as log, system.replaced(system.port if before is None else Flushing(before)):
        try:
            results.put(log.append(value(0), durable=True, timeout=60))
        except errors.KvspoolError as error:
            results.put(type(error).__name__)


@pytest.mark.parametrize("end", ["killed", "stopped and killed", "stopped and continued", "failing"])
def test_followers_never_sleep_on_when_their_leader_is_gone(log: Journal, end: str) -> None:
    """A leader dies, stands still or fails in the midst of a flush while others wait for it."""
    context = multiprocessing.get_context("fork")
    begun, go_on, results = context.Event(), context.Event(), context.SimpleQueue()

    def hold() -> None:
        begun.set()
        go_on.wait(60)
        fail()

    leader = context.Process(target=_append_and_tell, args=(log.path, results, hold))
    leader.start()
    assert begun.wait(60)
    followers = [context.Process(target=_append_and_tell, args=(log.path, results, None)) for _ in range(4)]
    deadline = time.monotonic() + 60
    for count, follower in enumerate(followers, 2):
        follower.start()
        while words(log.path)[tails.GROUP + groups.CAME] < count and time.monotonic() < deadline:
            time.sleep(0.001)
    assert results.empty(), "nobody returns before a flush has ended"
    assert leader.pid is not None
    if end.startswith("stopped"):
        os.kill(leader.pid, signal.SIGSTOP)
        with pytest.raises(errors.NotDurable, match="another process flushes"):
            log.append(value(0), durable=True, timeout=0.01)
        assert results.empty()
    if "killed" in end:
        os.kill(leader.pid, signal.SIGKILL)
    else:
        os.kill(leader.pid, signal.SIGCONT)
        go_on.set()
    for process in (leader, *followers):
        process.join(60)
        assert process.exitcode is not None
    if "killed" in end:
        assert sorted(results.get() for _ in range(4)) == [1, 2, 3, 4]
        last = log.append(value(0), durable=True)
        assert log.stats().synced_sequence == last + 1
    else:
        assert [results.get() for _ in range(5)] == ["NotDurable"] * 5
        with pytest.raises(errors.Poisoned):
            log.sync()


def test_threads_of_one_handle_share_flushes(log: Journal) -> None:
    done: list[int] = []

    def work() -> None:
        done.extend(log.append(value(0), durable=True) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(80))
    assert log.stats().synced_sequence == 80


def test_an_exception_out_of_a_signal_handler_leaves_the_lock_free_and_nothing_poisoned(log: Journal) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with system.replaced(Flushing(interrupt)):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                log.append(value(0), durable=True)
    with kvspool.open(log.path) as other:
        assert other.sync(timeout=0) == 2
    assert log.append(value(0), durable=True) == 2


def test_a_signal_handler_in_the_midst_of_a_flush_is_refused(log: Journal) -> None:
    with system.replaced(Flushing(lambda: log.sync(timeout=5))), pytest.raises(errors.NotDurable, match="signal handler"):
        log.append(value(0), durable=True)
    assert log.append(value(1), durable=True) == 1


def _write_and_note(path: Path, number: int, note: Path) -> None:
    with kvspool.open(path) as log, note.open("ab", buffering=0) as ledger:
        while True:
            sequence = log.append(value(number), durable=True, timeout=60)
            ledger.write(b"%d %d\n" % (sequence, log.stats().synced_sequence))  # type: ignore[union-attr]


def test_writers_that_are_killed_at_random_leave_every_acknowledged_record_flushed(tmp_path: Path) -> None:
    """A ledger outside notes each acknowledgement, and how far all was said to be on disk then; one writer after the other is killed."""
    choose = random.Random(5)
    context = multiprocessing.get_context("fork")
    with create(tmp_path / "log", segment_bytes=20_000) as log:
        notes = [tmp_path / f"note{number}" for number in range(40)]
        running: list[Any] = []
        for number, note in enumerate(notes):
            running.append(context.Process(target=_write_and_note, args=(log.path, number, note), daemon=True))
            running[-1].start()
            if len(running) > 4:
                time.sleep(choose.random() * 0.02)
                process = running.pop(choose.randrange(len(running)))
                process.kill()
                process.join(60)
        for process in running:
            process.kill()
            process.join(60)
        end = log.append(value(0), durable=True, timeout=60)
        records = {record.sequence: record.value for record in log.read()}
        assert sorted(records) == list(range(end + 1))
        count = 0
        for number, note in enumerate(notes):
            for line in note.read_bytes().splitlines(keepends=True) if note.exists() else ():
                if line.endswith(b"\n"):
                    sequence, synced = map(int, line.split())
                    assert sequence < synced <= end + 1 and records[sequence] == value(number)
                    count += 1
        assert count > 20
        assert log.verify().is_sound


# Without a tail.


def test_where_no_tail_can_be_mapped_a_durable_append_goes_the_long_way(tmp_path: Path) -> None:
    with mock.patch.object(filesystems, "KILLING", filesystems.SAFE), create(tmp_path / "log") as log, the_long_way() as long:
        log.append(value(0))
        assert log.append(value(1), durable=True) == 1
        assert log.sync() == 2
        assert long.call_count == 1
        assert log.stats().synced_sequence == 2


def test_a_leader_in_a_forked_child_does_not_hold_the_parents_lock(log: Journal) -> None:
    log.append(value(0), durable=True)

    def child() -> None:
        assert log.append(value(1), durable=True) == 1

    in_child(child)
    assert log.append(value(2), durable=True, timeout=5) == 2
