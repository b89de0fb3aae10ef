"""The group commit of a journal: one flush for all waiters, no append acknowledged too early, and every leader replaced."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from children import Died, in_child

import kvspool
from kvspool import errors, system
from kvspool.engine import flushing
from kvspool.journal import Journal, control
from kvspool.journal.durability import JournalFlusher
from kvspool.kernel import group_py as groups
from kvspool.kernel import machine as native
from kvspool.kernel import tail_py as tails
from kvspool.kernel.frames import crc32c
from kvspool.system import filesystems
from kvspool.system.descriptor import Descriptor

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
    """Notes which files are flushed and written, and calls a function before a flush of records."""

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
    """Return a patch that counts the flushes by the long way."""
    return mock.patch.object(JournalFlusher, "_flush", autospec=True, side_effect=JournalFlusher._flush)


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
        assert len(looks) == 2 and looks[1] <= 2, "the new records had to be flushed, and were not reported as flushed before that"
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


def test_a_flush_of_records_that_are_gone_is_no_success(log: Journal) -> None:
    log.append(value(0), durable=True)
    path = log.segments_apart().path_of(0)
    size = path.stat().st_size
    log.append(value(1))
    log.append(value(2))
    os.truncate(path, size)
    with pytest.raises(errors.Truncated, match="from sequence 1 on were removed before they were on disk"):
        log._flusher.flush_below(3, 5)
    assert log.sync() == 1
    assert log.append(value(3), durable=True) == 1


def test_another_journal_at_the_same_path_is_not_flushed_instead(log: Journal, tmp_path: Path) -> None:
    log.append(value(0), durable=True)
    log.append(value(1))
    with create(tmp_path / "other", log.format.name) as other:
        other.append_many([value(number) for number in range(5)])
    log.path.rename(tmp_path / "away")
    (tmp_path / "other").rename(log.path)
    with system.replaced(Flushing()) as port:
        assert isinstance(port, Flushing)
        with pytest.raises(errors.LogVanished):
            log.sync(timeout=1)
        assert port.flushed == []


@pytest.mark.parametrize("level", ["memory", "os"])
def test_threads_that_wait_for_a_flush_continue_after_the_lock_file_was_removed(log: Journal, level: Any) -> None:
    log.append(value(0), durable=True)
    inside, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def hold() -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    with kvspool.open(log.path, durability=level, sync_interval=0.01 if level == "os" else None) as ours, kvspool.open(log.path) as other:
        leading = other if level == "os" else ours
        other.append(value(1))
        ours.append(value(2))
        ours.sync()  # type: ignore[union-attr]
        with system.replaced(Flushing(hold)):
            threads = [threading.Thread(target=lambda: done.append(leading.append(value(3), durable=True, timeout=60)))]
            threads[0].start()
            assert inside.wait(60)
            came = words(log.path)[tails.GROUP + groups.CAME]
            ours.append(value(4))
            if level == "memory":
                threads.append(threading.Thread(target=lambda: done.append(ours.append(value(5), durable=True, timeout=60))))
                threads[1].start()
            deadline = time.monotonic() + 60
            while words(log.path)[tails.GROUP + groups.CAME] == came and time.monotonic() < deadline:
                time.sleep(0.001)
            log.format.lock_file(log.path).unlink()
            ours.append_many([value(6)])
            go_on.set()
            for thread in threads:
                thread.join(60)
        assert sorted(done) == ([3, 5] if level == "memory" else [3])
        last = ours.append(value(7))
        if level == "memory":
            ours.sync()  # type: ignore[union-attr]
        deadline = time.monotonic() + 60
        while log.stats().synced_sequence <= last and time.monotonic() < deadline:
            time.sleep(0.001)
        assert log.stats().synced_sequence == last + 1, "the thread of the level os flushes on"


def test_a_leader_whose_lock_file_was_removed_before_its_flush_does_not_flush_next_to_the_new_leader(log: Journal) -> None:
    log.append(value(0), durable=True)
    held, sign = log.control(5), control.Control.sign_flush
    groups_then, leads = [held.group], []

    def renew(held: control.Control) -> None:
        sign(held)
        if len(groups_then) == 1:
            log.format.lock_file(log.path).unlink()
            thread = threading.Thread(target=lambda: log.append_many([value(2)]))
            thread.start()
            thread.join(60)
            groups_then.append(held.group)

    def note() -> None:
        assert held.group is not None
        leads.append((held.group, held.group.leader))

    with system.replaced(Flushing(note)), mock.patch.object(control.Control, "sign_flush", renew):
        assert log.append(value(1), durable=True, timeout=60) == 1
        assert leads == [], "the first writer with the new lock file has flushed all that was there"
        assert log.append(value(3), durable=True) == 3
    assert groups_then[0] is not groups_then[1] is not None
    assert leads == [(groups_then[1], threading.get_ident())]


def test_a_flush_that_comes_while_the_lock_file_is_reopened_waits_for_its_group(log: Journal) -> None:
    log.append(value(0), durable=True)
    log.append(value(1))
    came = threading.Event()
    alone: list[object] = []
    share, locked = control.Control._share_tail, Journal.locked
    other = threading.Thread(target=lambda: log._flusher.flush_below(2, 60))

    def slowly(held: control.Control, timeout: float) -> Any:
        other.start()
        assert came.wait(60)
        return share(held, timeout)

    def note_locked(journal: Journal, timeout: float, work: Any) -> Any:
        came.set()
        return locked(journal, timeout, work)

    def note_alone(*arguments: object) -> int:
        alone.append(arguments)
        came.set()
        return 2

    flush_alone = mock.patch.object(JournalFlusher, "_flush_alone", note_alone)
    with mock.patch.object(control.Control, "_share_tail", slowly), mock.patch.object(Journal, "locked", note_locked), flush_alone:
        log.format.lock_file(log.path).unlink()
        log.append_many([value(2)])
        other.join(60)
    assert not other.is_alive() and alone == []


def test_a_sync_waits_for_all_locks_together_within_its_timeout(tmp_path: Path) -> None:
    class Clock(system.Port):
        time = 0.0

        def monotonic(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            self.time += seconds
            if self.time >= 4:
                holder.unlock()

    with mock.patch.object(filesystems, "KILLING", filesystems.SAFE), create(tmp_path / "log") as log, kvspool.open(log.path) as other:
        assert isinstance(other, Journal)
        log.append(value(0))
        holder = other.control(5)
        holder.lock(5)
        holder.lock(5, control.SYNC)
        with system.replaced(Clock()) as port, pytest.raises(errors.LockTimeout):
            assert isinstance(port, Clock)
            log.sync(timeout=5)
        assert 5 <= port.time < 5.1
        holder.unlock(control.SYNC)
        assert log.sync() == 1


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
        with mock.patch.object(JournalFlusher, "_poison", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            with kvspool.open(log.path) as child, system.replaced(Flushing(fail)):
                child.append(value(1), durable=True)

    with pytest.raises(Died, match="SIGKILL"):
        in_child(die)
    with pytest.raises(errors.Poisoned):
        log.append(value(2))
    assert control.last_word(log.format.lock_file(log.path)).sync_error == errno.EIO
    with kvspool.open(log.path) as other, pytest.raises(errors.Poisoned):
        other.append(value(2))


def test_an_error_is_known_to_all_although_the_handle_is_closed_during_the_flush(log: Journal) -> None:
    with kvspool.open(log.path) as other:
        assert isinstance(other, Journal)
        other.append(value(0), durable=True)

        def close_and_fail() -> None:
            thread = threading.Thread(target=log.close)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            with pytest.raises(errors.LockTimeout):  # the flush continues, and keeps its lock
                other.sync(timeout=0.01)
            fail()

        with system.replaced(Flushing(close_and_fail)), pytest.raises(errors.NotDurable, match="the flush to disk failed"):
            log.append(value(1), durable=True)
        with pytest.raises(errors.Poisoned):
            other.append(value(2))
        assert other.stats().sync_error == errno.EIO
    with kvspool.open(log.path, timeout=0) as other, pytest.raises(errors.Poisoned):
        other.append(value(2))


@pytest.mark.parametrize("has_tail", [True, False])
def test_an_error_is_known_to_all_although_another_writer_has_the_append_lock(tmp_path: Path, has_tail: bool) -> None:
    bare = mock.patch.object(filesystems, "KILLING", filesystems.SAFE)
    with nullcontext() if has_tail else bare, create(tmp_path / "log", "fflg") as log, kvspool.open(log.path) as other:
        assert isinstance(other, Journal)
        blank = b"abc" + bytes(8)  # a flush goes the long way
        log.append(blank)
        other.append(blank)

        def block_and_fail() -> None:
            other.control(5).lock(5)
            fail()

        with system.replaced(Flushing(block_and_fail)), pytest.raises(errors.NotDurable, match="the flush to disk failed"):
            log.append(blank, durable=True, timeout=0.05)
        assert other.stats().sync_error == errno.EIO
        other.control(5).unlock()
        for one in (other, log):
            with pytest.raises(errors.Poisoned):
                one.append(blank)


def test_an_exception_out_of_a_signal_handler_loses_no_error_of_a_flush(log: Journal) -> None:
    attempts: list[int] = []
    store = control.Control._store_error

    def interrupted(held: control.Control, error: int) -> None:
        attempts.append(error)
        if len(attempts) == 1:
            raise KeyboardInterrupt
        store(held, error)

    with mock.patch.object(control.Control, "_store_error", autospec=True, side_effect=interrupted):
        with system.replaced(Flushing(fail)), pytest.raises(KeyboardInterrupt):
            log.append(value(0), durable=True)
    with kvspool.open(log.path) as other:
        for one in (log, other):
            with pytest.raises(errors.Poisoned):
                one.append(value(1))


def test_after_a_flush_that_failed_no_reader_commits_what_may_not_be_on_disk(log: Journal) -> None:
    log.append_many([value(number) for number in range(2)], durable=True)
    log.append_many([value(number) for number in range(2, 5)])
    with system.replaced(Flushing(fail)), pytest.raises(errors.NotDurable):
        log.append(value(5), durable=True)
    with log.reader("r") as reader:
        assert len(list(reader.read(limit=2))) == 2
        assert reader.commit() == 2
        assert len(list(reader.read(limit=1))) == 1
        with pytest.raises(errors.Poisoned):
            reader.commit()
    assert log.offsets.load("r") == 2


def test_an_error_that_the_kernel_reported_to_another_flush_is_no_success_here(log: Journal) -> None:
    path = log.format.lock_file(log.path)
    log.append_many([value(number) for number in range(3)])
    with system.replaced(Flushing(lambda: control.note_error(path, errno.EIO))):
        with log.reader("r") as reader:
            assert len(list(reader.read(limit=2))) == 2
            with pytest.raises(errors.Poisoned):
                reader.commit()
    log.repair()
    log.append(value(3))
    with (
        system.replaced(Flushing(lambda: control.note_error(path, errno.EIO))),
        pytest.raises(errors.NotDurable, match="a flush to disk failed"),
    ):
        log.append(value(4), durable=True)


def test_an_error_is_after_the_page_in_this_run_of_the_machine_until_a_repair(log: Journal) -> None:
    path = log.format.lock_file(log.path)
    log.append(value(0), durable=True)
    control.note_error(path, errno.EIO)
    state = crc32c(crc32c(0xFFFF_FFFF, system.port.boot_id()), struct.pack("<3QI", errno.EIO, 0, 0, 0))
    assert path.read_bytes()[120:] == struct.pack("<2I", errno.EIO, state)
    assert control.parse(path.read_bytes()).sync_error == 0
    assert log.stats().sync_error == log.verify().sync_error == errno.EIO
    with pytest.raises(errors.Poisoned):
        log.append(value(1))
    assert control.parse(path.read_bytes()).sync_error == errno.EIO
    log.repair()
    assert path.read_bytes()[120:] == bytes(8)
    assert log.append(value(1), durable=True) == 1


@pytest.mark.parametrize("word", [1, errno.EIO, 1 << 40, (1 << 64) - 1, tails.error_word(crc32c(0xFFFF_FFFF, bytes(16)), errno.EIO)])
def test_a_word_after_the_page_from_an_earlier_run_stops_no_writer(log: Journal, word: int) -> None:
    log.append(value(0), durable=True)
    with log.format.lock_file(log.path).open("r+b") as file:
        file.seek(control.ERROR_AT)
        file.write(word.to_bytes(8, "little"))
    with kvspool.open(log.path) as other:
        assert other.append(value(1), durable=True) == 1
        assert other.stats().sync_error == 0  # type: ignore[union-attr]


def test_a_word_of_an_error_that_no_flush_stored_stops_no_writer(log: Journal) -> None:
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
    for at in [tails.REWINDS, *range(tails.GROUP, tails.GROUP + groups.WORDS)]:
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
    """A leader is killed, is stopped or fails during a flush while others wait for it."""
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
    assert results.empty(), "no append returns before a flush has ended"
    assert leader.pid is not None
    if end.startswith("stopped"):
        os.kill(leader.pid, signal.SIGSTOP)
        with pytest.raises(errors.NotDurable, match=f"process {leader.pid} .* led the last flush, and may hold it"):
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


def test_a_signal_handler_during_a_flush_is_refused(log: Journal) -> None:
    with system.replaced(Flushing(lambda: log.sync(timeout=5))), pytest.raises(errors.NotDurable, match="signal handler"):
        log.append(value(0), durable=True)
    assert log.append(value(1), durable=True) == 1


def test_a_flush_of_a_signal_handler_during_an_append_is_refused_at_once_and_frees_no_lock(log: Journal) -> None:
    log.append(value(0))
    log.append(value(1))
    with kvspool.open(log.path) as other:

        def come_in(*_: object) -> None:
            with system.replaced(Flushing()) as port, pytest.raises(errors.Reentered):
                assert isinstance(port, Flushing)
                log.sync(timeout=1)
            assert port.flushed == []
            with pytest.raises(errors.LockTimeout):
                other.append(value(2), timeout=0.01)

        log.under_lock(5, come_in)
        assert other.append(value(2)) == 2


class Waits(groups.Progress):
    def look(self, sequence: int) -> int:
        return groups.WAITS


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_exception_out_of_a_signal_handler_at_the_unlock_keeps_no_flush_lock(tmp_path: Path, error: type[BaseException]) -> None:
    """The loops of the interpreted twin; compiled, no handler comes in there."""
    unlock = native.unlock
    attempts: list[int] = []

    def interrupted(fd: int, at: int) -> None:
        attempts.append(at)
        if len(attempts) == 1:
            raise error
        unlock(fd, at)

    (tmp_path / "file").touch()
    with Descriptor(tmp_path / "file", os.O_RDWR) as fd, Descriptor(tmp_path / "file", os.O_RDWR) as other:
        group = groups.FlushGroup(Waits(), memoryview(bytearray(8 * groups.WORDS)), 0, 5)
        group.lock_fd = fd
        with mock.patch.object(native, "unlock", interrupted), pytest.raises(error):
            flushing.flush_for_all(group, 1, 1.0, lambda: None, tmp_path, lambda: 0)  # type: ignore[arg-type]
        assert group.leader == 0
        assert system.port.try_lock(other, 5)


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
        notes: list[Path] = []
        running: list[Any] = []
        while len(notes) < 40 or sum(note.read_bytes().count(b"\n") for note in notes if note.exists()) <= 20:
            notes.append(tmp_path / f"note{len(notes)}")
            running.append(context.Process(target=_write_and_note, args=(log.path, len(notes) - 1, notes[-1]), daemon=True))
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
        for number, note in enumerate(notes):
            for line in note.read_bytes().splitlines(keepends=True) if note.exists() else ():
                if line.endswith(b"\n"):
                    sequence, synced = map(int, line.split())
                    assert sequence < synced <= end + 1 and records[sequence] == value(number)
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


def test_a_writer_without_a_tail_that_rewinds_takes_back_what_the_tail_says(tmp_path: Path) -> None:
    with create(tmp_path / "log", "fixed") as log:
        for number in range(10):
            log.append(value(number))
        log.sync()
    with mock.patch.object(filesystems, "KILLING", filesystems.SAFE), kvspool.open(tmp_path / "log") as bare:
        bare.rewind(5)  # type: ignore[union-attr]
        for number in range(7):
            bare.append(value(100 + number))
        assert bare.stats().synced_sequence == 5  # type: ignore[union-attr]
        assert bare.end() == 12
    with kvspool.open(tmp_path / "log") as log, system.replaced(Flushing()) as port:
        assert isinstance(log, Journal) and isinstance(port, Flushing)
        assert log.stats().synced_sequence == 5
        assert log.sync() == 12 and len(port.flushed) == 1


def test_a_writer_that_can_not_change_the_tail_does_not_rewind(tmp_path: Path) -> None:
    class Refusing(system.Port):
        def open(self, path: Any, flags: int, mode: int = 0o600) -> int:
            if os.fspath(path).endswith(".tail") and flags & os.O_RDWR:
                raise PermissionError(errno.EACCES, "not ours")
            return super().open(path, flags, mode)

    with create(tmp_path / "log", "fixed") as log:
        log.append_many([value(number) for number in range(10)], durable=True)
    with system.replaced(Refusing()), kvspool.open(tmp_path / "log") as bare:
        with pytest.raises(PermissionError):
            bare.rewind(5)  # type: ignore[union-attr]
        assert bare.end() == bare.stats().synced_sequence == 10  # type: ignore[union-attr]
        assert bare.append(value(10)) == 10


# Changes during a flush, and files that must not be left over.


def bare() -> Any:
    """Where journals that are opened have no tail."""
    return mock.patch.object(filesystems, "KILLING", filesystems.SAFE)


def test_a_sync_flushes_what_a_killed_writer_left_after_the_end_that_the_tail_says(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log, create(tmp_path / "model") as model:
        log.append(value(0), durable=True)
        path = log.segments_apart().path_of(0)
        size = path.stat().st_size
        for number in range(2):
            model.append(value(number))
        with path.open("ab") as file:
            file.write(model.segments_apart().path_of(0).read_bytes()[size:])
        assert [record.sequence for record in log.read()] == [0, 1]
        with system.replaced(Flushing()) as port:
            assert isinstance(port, Flushing)
            assert log.sync() == 2 and len(port.flushed) == 1


def test_an_error_whose_first_note_fails_is_in_the_page(tmp_path: Path) -> None:
    failed: list[int] = []

    class Full(Flushing):
        def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
            if at == control.ERROR_AT and not failed:
                failed.append(at)
                raise OSError(errno.ENOSPC, "no room")
            super().write(fd, data, at)

    with bare(), create(tmp_path / "log") as log, kvspool.open(tmp_path / "log") as other:
        log.append(value(0))
        other.append(value(1))
        with system.replaced(Full(fail)), pytest.raises(errors.NotDurable):
            log.append(value(2), durable=True)
        assert failed
        with pytest.raises(errors.Poisoned):
            other.append(value(3))


@pytest.mark.parametrize("has_tail", [True, False])
def test_a_flush_next_to_a_rewind_of_later_records_is_repeated(tmp_path: Path, has_tail: bool) -> None:
    flushes: list[int] = []
    with nullcontext() if has_tail else bare(), create(tmp_path / "log", "fixed") as log, kvspool.open(tmp_path / "log") as other:
        log.append(value(0), durable=True)

        def take_back() -> None:
            flushes.append(0)
            if len(flushes) < 3:
                other.rewind(other.append(value(9)))  # type: ignore[union-attr]

        with system.replaced(Flushing(take_back)):
            assert log.append(value(1), durable=True) == 1
        assert len(flushes) == 3 and log.stats().synced_sequence == 2


def test_a_tail_that_was_restored_does_not_count_for_records_that_are_fewer(tmp_path: Path) -> None:
    flushed: list[str] = []

    class Noting(system.Port):
        def flush(self, fd: int) -> None:
            flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
            super().flush(fd)

    with create(tmp_path / "log", "fixed") as log:
        for number in range(10):
            log.append(value(number), durable=True)
        path = control.tail_file(log.format.lock_file(log.path))
        before = path.read_bytes()
        log.rewind(5)  # type: ignore[attr-defined]
        for number in range(4):
            log.append(value(100 + number))
        segment = log.segments_apart().path_of(0)
    with path.open("r+b") as file:
        file.write(before)
    with kvspool.open(tmp_path / "log") as log, system.replaced(Noting()):
        assert log.sync() == 9  # type: ignore[union-attr]
    assert str(segment) in flushed


def test_an_error_of_a_handler_at_the_unlock_keeps_no_flush_lock(tmp_path: Path) -> None:
    """As `test_an_exception_out_of_a_signal_handler_at_the_unlock_keeps_no_flush_lock`, with an errno, as the system's errors have it."""
    unlock, attempts = native.unlock, []

    def interrupted(fd: int, at: int) -> None:
        attempts.append(at)
        if len(attempts) == 1:
            raise TimeoutError(errno.ETIMEDOUT, "a handler's")
        unlock(fd, at)

    (tmp_path / "file").touch()
    with Descriptor(tmp_path / "file", os.O_RDWR) as fd, Descriptor(tmp_path / "file", os.O_RDWR) as other:
        group = groups.FlushGroup(Waits(), memoryview(bytearray(8 * groups.WORDS)), 0, 5)
        group.lock_fd = fd
        with mock.patch.object(native, "unlock", interrupted), pytest.raises(TimeoutError):
            flushing.flush_for_all(group, 1, 1.0, lambda: None, tmp_path, lambda: 0)  # type: ignore[arg-type]
        assert group.leader == 0
        assert system.port.try_lock(other, 5)


def test_a_flush_keeps_the_lock_file_open_that_it_has_and_no_longer(log: Journal) -> None:
    log.append(value(0))
    held = log.control(5)
    with held.held_open():
        fd = held.fd
        log.format.lock_file(log.path).unlink()
        log.append_many([value(1)])
        assert held.fd != fd and os.fstat(fd).st_nlink == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_exception_where_a_flush_has_just_begun_leaves_no_user_of_the_lock_file(log: Journal) -> None:
    log.append(value(0))
    held = log.control(5)

    class Interrupted(dict):  # type: ignore[type-arg]
        def __setitem__(self, user: object, files: object) -> None:
            super().__setitem__(user, files)
            raise KeyboardInterrupt

    users = held._users = Interrupted()
    with pytest.raises(KeyboardInterrupt), held.held_open():
        pass
    assert not users


def test_without_a_tail_one_thread_of_a_handle_flushes_at_a_time(tmp_path: Path) -> None:
    with bare(), create(tmp_path / "log") as log:
        log.append(value(0))
        inside: list[int] = []

        def sync() -> None:
            with pytest.raises(errors.LockTimeout, match="another thread is still flushing"):
                log._flusher.flush_below(1, 0)
            inside.append(0)

        def meet() -> None:
            thread = threading.Thread(target=sync)
            thread.start()
            thread.join(60)
            with pytest.raises(errors.Reentered):
                log._flusher.flush_below(1, 1)

        with system.replaced(Flushing(meet)):
            assert log.sync() == 1
        assert inside == [0]
