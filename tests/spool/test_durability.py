from __future__ import annotations

import errno
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, start
from faults import ClockPort, FailingPort

import kvspool
from kvspool import Spool, errors, system
from kvspool.engine import locks
from kvspool.kernel import frames_py as frames
from kvspool.kernel import group_py as groups
from kvspool.options import Isolation
from kvspool.record import Gap
from kvspool.spool import checkpoints, durability, format, slots

SECOND = 1_000_000_000
THREAD = "kvspool sync"


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "large", capacity="64KiB") as log:
        yield log


class Flushes(ClockPort):
    """Notes where checkpoints are written and which files are flushed; the clock does not move."""

    def __init__(self) -> None:
        super().__init__(SECOND)
        self.calls: list[str] = []

    def write(self, fd: int, data: bytes, at: int) -> None:
        if at in format.CHECKPOINTS_AT:
            self.calls.append(f"checkpoint {at}")
        super().write(fd, data, at)

    def flush_data(self, fd: int) -> None:
        self.calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        super().flush_data(fd)

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def values(log: Spool, isolation: Isolation = "appended") -> list[bytes]:
    return [record.value for record in log.read(isolation=isolation)]


def word(log: Spool, at: int) -> int:
    return log._live().reader(0, 0).word(at)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


# Appends that wait for the disk.


def newest(log: Spool) -> format.Checkpoint:
    """Return the newest checkpoint in the file."""
    raw = (log.path / format.DATA_FILE).read_bytes()[: format.DATA_START]
    return checkpoints.newest(memoryview(raw), log._live().header)[1]


def test_a_durable_append_is_one_flush_that_takes_a_checkpoint_along(large: Spool) -> None:
    data, control = format.DATA_FILE, format.CONTROL_FILE
    with system.replaced(Flushes()) as port:
        assert isinstance(port, Flushes)
        appends: list[Callable[[], object]] = [
            lambda: large.append(b"one", durable=True),
            lambda: large.append_many([b"two", b"three"], durable=True),
            lambda: large.append({"four": 4}, key=b"k", durable=True),
            lambda: large.append(b"x" * 9000, durable=True),
        ]
        for number, append in enumerate(appends, 1):
            synced = word(large, format.SYNCED)
            append()
            assert port.taken() == [f"checkpoint {format.CHECKPOINTS_AT[(number + 1) % 2]}", data]
            found = newest(large)
            assert (found.generation, found.tail, found.synced) == (number, word(large, frames.TAIL), synced)
        large.append(b"five")
        large.append_many([], durable=True)
        assert port.taken() == []
        assert (large.sync(), port.taken()) == (6, ["checkpoint 1024", data, control])
        assert (large.sync(), port.taken()) == (6, [control]), "what readers commit is no append"


def test_a_sync_puts_on_disk_what_readers_have_committed(large: Spool) -> None:
    large.append_many([b"one", b"two"], durable=True)
    on_disk: list[bytes] = []

    class Copying(system.Port):
        def flush_data(self, fd: int) -> None:
            super().flush_data(fd)
            on_disk.append(Path(os.readlink(f"/proc/self/fd/{fd}")).read_bytes())

    with large.reader("one") as reader:
        next(reader.read())
        reader.commit()
        with system.replaced(Copying()):
            large.sync()
        (control,) = on_disk
        (slot,) = slots.Slots(memoryview(control), large.log_id).taken()
        assert slot.commit().sequence == 1


def test_arrow_rows_can_be_durable(large: Spool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    large.append_arrow(pyarrow.table({"value": [b"one", b"two"]}), durable=True)
    assert large.stats().synced_sequence == 2


def test_who_appends_meanwhile_is_not_waited_for(large: Spool) -> None:
    class Busy(system.Port):
        def flush_data(self, fd: int) -> None:
            super().flush_data(fd)
            large.append(b"meanwhile")

    with system.replaced(Busy()):
        large.append(b"one", durable=True)
    assert large.stats().synced_sequence == 1
    assert large.stats().unsynced_records > 0


def test_the_lag_is_shown_in_records_and_bytes(log: Spool) -> None:
    assert (log.stats().durability, log.stats().sync_interval) == ("memory", 0.0)
    log.append_many([b"x"] * 3, durable=True)
    log.append_many([b"x"] * 2)
    stats = log.stats()
    assert (stats.synced_sequence, stats.unsynced_records, stats.unsynced_bytes) == (3, 2, 80)
    log.append_many([b"x"] * 1000)
    stats = log.stats()
    assert (stats.unsynced_records, stats.unsynced_bytes) == (stats.records, stats.used), "what is overwritten is no lag"


# Levels.


def test_the_level_is_the_logs_unless_the_handle_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with kvspool.create(path, capacity=4096, durability="disk") as log:
        assert (log.durability, log.stats().durability) == ("disk", "disk")
    with kvspool.open(path) as log:
        log.append(b"one")
        assert log.stats().synced_sequence == 1
    with kvspool.open(path, durability="memory") as log:
        log.append(b"two")
        assert log.stats().synced_sequence == 1
    with kvspool.create(tmp_path / "os", capacity=4096, durability="os", sync_interval=2.5):
        pass
    with kvspool.open(tmp_path / "os") as log:
        assert (log.stats().durability, log.stats().sync_interval) == ("os", 2.5)
    with kvspool.open(tmp_path / "os", durability="os", sync_interval=7) as log:
        assert log.stats().sync_interval == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"durability": "hub"},
        {"durability": ""},
        {"sync_interval": 1.0},
        {"durability": "disk", "sync_interval": 1.0},
        {"durability": "os", "sync_interval": 0},
        {"durability": "os", "sync_interval": float("nan")},
        {"durability": "os", "sync_interval": 1e10},
    ],
    ids=str,
)
def test_a_level_or_interval_that_cannot_be_is_refused(tmp_path: Path, log: Spool, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="durability|sync_interval"):
        kvspool.create(tmp_path / "other", capacity=4096, **wrong)
    with pytest.raises(ValueError, match="durability|sync_interval"):
        kvspool.open(log.path, **wrong)
    assert not (tmp_path / "other").exists()


def test_closing_at_the_level_disk_syncs(tmp_path: Path) -> None:
    with system.replaced(Flushes()) as port:
        assert isinstance(port, Flushes)
        with kvspool.create(tmp_path / "log", capacity=4096, durability="disk") as log:
            log.append(b"one")
            log.append(b"two")
            assert port.taken() == ["checkpoint 1024", format.DATA_FILE, "checkpoint 1536", format.DATA_FILE]
        assert port.taken() == [format.CONTROL_FILE]


# The background thread of the level "os".


def test_the_thread_begins_at_the_first_append_and_flushes_automatically(tmp_path: Path) -> None:
    flushed = threading.Event()

    class Watching(system.Port):
        def flush_data(self, fd: int) -> None:
            super().flush_data(fd)
            flushed.set()

    kvspool.create(tmp_path / "log", capacity=4096).close()
    with kvspool.open(tmp_path / "log", durability="os", sync_interval=0.001) as log:
        assert list(log) == []
        assert threads() == []
        with system.replaced(Watching()):
            log.append(b"one")
            assert len(threads()) == 1
            assert flushed.wait(30)
    assert threads() == []


def test_closing_syncs_what_the_thread_had_not_come_to_and_ends_it(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, durability="os", sync_interval=1000) as log:
        log.append(b"one")
        assert (len(threads()), log.stats().synced_sequence) == (1, 0)
    assert threads() == []
    with kvspool.open(tmp_path / "log") as log:
        assert (log.stats().synced_sequence, newest(log).tail) == (1, word(log, frames.TAIL))


def test_the_thread_of_a_handle_without_references_ends(tmp_path: Path) -> None:
    log = kvspool.create(tmp_path / "log", capacity=4096, durability="os", sync_interval=0.001)
    log.append(b"one")
    (thread,) = threads()
    del log
    thread.join(30)
    assert not thread.is_alive()


def test_a_process_that_ends_without_closing_syncs(tmp_path: Path) -> None:
    code = f"""
import kvspool
log = kvspool.create({str(tmp_path / "log")!r}, capacity=4096, durability="os", sync_interval=1000)
log.append(b"one")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with kvspool.open(tmp_path / "log") as log:
        assert log.stats().synced_sequence == 1


def test_a_flush_of_the_thread_that_fails_poisons_the_next_append_and_ends_it(tmp_path: Path) -> None:
    log = kvspool.create(tmp_path / "log", capacity=4096, durability="os", sync_interval=0.001)
    with system.replaced(FailingPort(1, errno.EIO, ("flush_data",))):
        log.append(b"one")
        (thread,) = threads()
        thread.join(30)
    assert not thread.is_alive()
    assert log.stats().sync_error == errno.EIO
    with pytest.raises(errors.Poisoned):
        log.append(b"two")
    with pytest.raises(errors.Poisoned):
        log.close()
    assert log.closed


def test_a_forked_child_has_no_thread_until_it_appends(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, durability="os", sync_interval=1000) as log:
        log.append(b"parent")

        def use() -> tuple[int, int, int]:
            before = len(threads())
            log.append(b"child")
            after = len(threads())
            log.close()
            return before, after, len(threads())

        assert in_child(use) == (0, 1, 0)
        assert in_child(log.close) is None
        assert len(threads()) == 1
        assert log.stats().synced_sequence == 2, "the child synced when it closed"
        assert values(log) == [b"parent", b"child"]


# Errors.


@pytest.mark.parametrize("every", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_flush_that_fails_is_nobodys_success(large: Spool, nth: int, every: bool) -> None:
    """The kernel reports a failure once: later callers must get it from the log."""
    acknowledged = 0
    with kvspool.open(large.path) as other, system.replaced(FailingPort(nth, errno.EIO, ("flush_data",), every)):
        with pytest.raises(errors.Poisoned) as caught:
            for _ in range(9):
                large.append(b"x", durable=True)
                acknowledged += 1
        assert f"sequences {acknowledged} to {acknowledged} were appended" in caught.value.__notes__[0]
        calls: list[Callable[[], object]] = [other.sync, large.sync, lambda: other.append(b"y"), lambda: other.append(b"y", durable=True)]
        for call in calls:
            with pytest.raises(errors.Poisoned):
                call()
        assert values(other) == [b"x"] * (acknowledged + 1)
        assert other.stats().synced_sequence == acknowledged == nth - 1


def test_a_waiter_whose_record_was_covered_before_the_failure_succeeds(log: Spool) -> None:
    log.append(b"x", durable=True)
    log._live().control.cast("Q")[frames.SYNC_ERROR] = errno.EIO
    assert log._flusher is not None
    with pytest.raises(errors.Poisoned):
        log._flusher.flush_below(1, 10)


def test_a_long_wait_is_an_error_that_says_that_the_record_was_appended(log: Spool) -> None:
    fd = os.open(log.path / format.CONTROL_FILE, os.O_RDWR)
    locks.acquire(fd, format.SYNC_LOCK, 0, str)
    with pytest.raises(errors.NotDurable, match="sequences 0 to 1 were appended") as caught:
        log.append_many([b"one", b"two"], durable=True, timeout=0.01)
    assert caught.value.sequences == range(2)
    assert isinstance(caught.value.__cause__, errors.LockTimeout)
    os.close(fd)
    assert values(log) == [b"one", b"two"]
    assert log.append(b"three", durable=True) == 2


def test_a_thread_that_waits_too_long_for_another_one_says_so(log: Spool) -> None:
    flushing, go_on = threading.Event(), threading.Event()

    class Slow(system.Port):
        def flush_data(self, fd: int) -> None:
            flushing.set()
            go_on.wait(30)

    log.append(b"x")
    with system.replaced(Slow()):
        thread = threading.Thread(target=log.sync)
        thread.start()
        assert flushing.wait(30)
        with pytest.raises(errors.LockTimeout, match="another thread flushes"):
            log.sync(timeout=0.01)
        go_on.set()
        thread.join()
    assert log.sync() == 1


def test_an_exception_out_of_a_signal_handler_leaves_the_lock_free_and_nothing_poisoned(log: Spool) -> None:
    class Interrupting(system.Port):
        def flush_data(self, fd: int) -> None:
            raise KeyboardInterrupt

    with system.replaced(Interrupting()):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                log.append(b"x", durable=True)
    with kvspool.open(log.path) as other:
        assert other.sync(timeout=0) == 2
    assert log.append(b"x", durable=True) == 2


def test_a_lock_that_cannot_be_given_back_leaves_no_leader(log: Spool) -> None:
    log.append(b"x", durable=True)
    assert log._flusher is not None
    group = log._flusher._group
    assert group.come(2, 7, 0, 1) == groups.LEADS
    fd, group.lock_fd = group.lock_fd, 1_000_000
    with pytest.raises(OSError, match="Errno 9"):
        group.leave(7, 0)
    group.lock_fd = fd
    assert log.append(b"goes on", durable=True, timeout=0) == 1
    with kvspool.open(log.path) as other:
        assert other.append(b"another one", durable=True, timeout=0) == 2


def test_an_exception_in_the_first_append_leaves_a_handle_that_continues(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvspool.spool.spool.SpoolFlusher", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append(b"x")
    assert log.append(b"y", durable=True) == 0


def test_a_signal_handler_that_flushes_in_the_middle_of_a_flush_is_refused(log: Spool) -> None:
    class Handling(system.Port):
        def flush_data(self, fd: int) -> None:
            with pytest.raises(errors.NotDurable) as caught:
                log.append(b"handler", durable=True)
            assert isinstance(caught.value.__cause__, errors.Reentered)
            with pytest.raises(errors.Reentered):
                log.sync()
            super().flush_data(fd)

    with system.replaced(Handling()):
        log.append(b"x", durable=True)
    assert log.sync() == len(values(log))


@pytest.mark.parametrize("durability", ["os", "disk"])
def test_closing_while_another_thread_flushes_harms_no_other_thread(tmp_path: Path, durability: Any) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    for _ in range(20):
        log = kvspool.open(tmp_path / "log", durability=durability)
        log.append(b"x")
        found: queue.Queue[BaseException] = queue.Queue()

        def use(log: Spool = log, found: queue.Queue[BaseException] = found) -> None:
            try:
                while True:
                    log.append(b"y", durable=True)
            except errors.KvspoolError as error:
                found.put(error)

        thread = threading.Thread(target=use)
        thread.start()
        log.close()
        thread.join()
        ended = found.get()
        assert isinstance(ended.__cause__ if isinstance(ended, errors.NotDurable) else ended, errors.Closed)
    with kvspool.open(tmp_path / "log") as log:
        assert log.stats().sync_error == 0
        log.append(b"goes on", durable=True)
    assert threads() == []


# Several processes.


def _append_durably(path: Path, gate: Any, results: Any, count: int) -> None:
    class Counting(system.Port):
        flushes = 0

        def flush_data(self, fd: int) -> None:
            Counting.flushes += 1
            time.sleep(0.002)  # as on a disk; in memory a flush may end before any other process needs it
            super().flush_data(fd)

    with system.replaced(Counting()), kvspool.open(path) as log:
        gate.wait(60)
        for _ in range(count):
            sequence = log.append(b"x" * 100, durable=True)
            assert log.stats().synced_sequence > sequence
    results.put(Counting.flushes)


def test_eight_processes_share_flushes_and_each_record_is_on_disk_when_its_append_returns(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity="4MiB").close()
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(8), context.SimpleQueue()
    writers = [context.Process(target=_append_durably, args=(tmp_path / "log", gate, results, 50)) for _ in range(8)]
    for writer in writers:
        writer.start()
    flushes = sum(results.get() for _ in writers)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8
    with kvspool.open(tmp_path / "log") as log:
        assert (log.stats().records, log.stats().unsynced_records) == (400, 0)
    assert flushes < 400


def test_threads_share_flushes(large: Spool) -> None:
    flushing, go_on = threading.Event(), threading.Event()

    class Slow(Flushes):
        def flush_data(self, fd: int) -> None:
            flushing.set()
            go_on.wait(30)
            super().flush_data(fd)

    with system.replaced(Slow()) as port:
        assert isinstance(port, Slow)
        first = threading.Thread(target=large.append, args=(b"x",), kwargs={"durable": True})
        first.start()
        assert flushing.wait(30)
        others = [threading.Thread(target=large.append, args=(b"x",), kwargs={"durable": True}) for _ in range(7)]
        for thread in others:
            thread.start()
        while large.stats().records < 8:
            pass
        go_on.set()
        for thread in (first, *others):
            thread.join()
        assert port.calls.count(format.DATA_FILE) == 2, "one for the first, one for all others"
        assert format.CONTROL_FILE not in port.calls


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_during_a_flush_the_lock_is_free_and_others_continue(log: Spool, when: str) -> None:
    class Dying(system.Port):
        def flush_data(self, fd: int) -> None:
            if when == "after":
                super().flush_data(fd)
            os.kill(os.getpid(), signal.SIGKILL)

    def die() -> None:
        with system.replaced(Dying()):
            log.append(b"child", durable=True)

    with pytest.raises(Died, match="SIGKILL"):
        in_child(die)
    assert log.stats().unsynced_records == 1
    assert log.append(b"parent", durable=True, timeout=0) == 1
    assert log.stats().unsynced_records == 0


class Flushing(system.Port):
    """Reports the begin of a flush of the records, and then calls a function."""

    def __init__(self, begun: Any, act: Callable[[], object]) -> None:
        self.begun, self.act = begun, act

    def flush_data(self, fd: int) -> None:
        self.begun.set()
        self.act()
        super().flush_data(fd)


def _append_and_tell(path: Path, results: Any, act: Callable[[], object] | None, begun: Any) -> None:
    with kvspool.open(path) as log, system.replaced(system.port if act is None else Flushing(begun, act)):
        try:
            results.put(log.append(b"x", durable=True, timeout=60))
        except errors.KvspoolError as error:
            results.put(type(error).__name__)


def _wait_for_sleepers(log: Spool, count: int) -> None:
    deadline = time.monotonic() + 60
    while word(log, frames.FLUSH_GROUP + groups.CAME) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    assert word(log, frames.FLUSH_GROUP + groups.CAME) >= count


@pytest.mark.parametrize("end", ["killed", "stopped and killed", "stopped and continued", "failing"])
def test_followers_never_sleep_on_when_their_leader_is_gone(large: Spool, end: str) -> None:
    """A leader is killed, is stopped or fails during a flush while others, in processes and in a thread, wait for it."""
    context = multiprocessing.get_context("fork")
    begun, fail, results = context.Event(), context.Event(), context.SimpleQueue()

    def hold() -> None:
        fail.wait(60)
        raise OSError(errno.EIO, "a broken disk")

    leader = context.Process(target=_append_and_tell, args=(large.path, results, hold, begun))
    leader.start()
    assert begun.wait(60)
    followers = [context.Process(target=_append_and_tell, args=(large.path, results, None, None)) for _ in range(4)]
    thread_results: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=_append_and_tell, args=(large.path, thread_results, None, None))
    for count, follower in enumerate([*followers, thread], 2):
        follower.start()
        _wait_for_sleepers(large, count)  # one by one: interpreted, two who come at once may count as one
    assert results.empty() and thread_results.empty(), "no append returns before a flush has ended"
    assert leader.pid is not None
    if end.startswith("stopped"):
        os.kill(leader.pid, signal.SIGSTOP)
        with pytest.raises(errors.NotDurable):
            large.append(b"impatient", durable=True, timeout=0.01)
        assert results.empty() and thread_results.empty()
    if "killed" in end:
        os.kill(leader.pid, signal.SIGKILL)
    else:
        os.kill(leader.pid, signal.SIGCONT)
        fail.set()
    thread.join(60)
    for process in (leader, *followers):
        process.join(60)
        assert process.exitcode is not None
    found = [results.get() for _ in range(4 if "killed" in end else 5)] + [thread_results.get(timeout=60)]
    if "killed" in end:
        assert sorted(found) == [1, 2, 3, 4, 5]
        assert large.append(b"y", durable=True) == large.stats().synced_sequence - 1
    else:
        assert found == ["Poisoned"] * 6
        with pytest.raises(errors.Poisoned):
            large.sync()


@pytest.mark.parametrize("hostile", [0, 1, 2, 1 << 40, (1 << 64) - 1])
def test_whatever_the_hints_of_a_group_say_a_durable_append_returns_when_its_record_is_on_disk(large: Spool, hostile: int) -> None:
    words = large._live().control.cast("Q")
    for at in range(frames.FLUSH_GROUP, frames.FLUSH_GROUP + groups.WORDS):
        words[at] = hostile
        with system.replaced(Flushes()) as port:
            assert isinstance(port, Flushes)
            sequence = large.append(b"x", durable=True, timeout=60)
            assert port.calls.count(format.DATA_FILE) == 1
        assert large.stats().synced_sequence == sequence + 1


def test_a_record_that_an_earlier_flush_covers_costs_no_flush_and_no_lock(large: Spool) -> None:
    large.append(b"x", durable=True)
    fd = os.open(large.path / format.CONTROL_FILE, os.O_RDWR)
    locks.acquire(fd, format.SYNC_LOCK, 0, str)
    assert large._flusher is not None
    with system.replaced(Flushes()) as port:
        assert isinstance(port, Flushes)
        large._flusher.flush_below(1, 0)
        assert port.calls == []
    os.close(fd)


# Readers that see only what is on disk.


def test_a_synced_reader_sees_nothing_before_a_sync_and_exactly_up_to_it_after(log: Spool) -> None:
    log.append_many([b"one", b"two"])
    following = log.follow(isolation="synced", timeout=0)
    cursor = log.cursor(isolation="synced")
    with log.reader("r", isolation="synced") as reader:

        def seen() -> list[list[bytes]]:
            return [
                values(log, "synced"),
                list(log.read_values(isolation="synced")),
                [record.value for record in reader.read()],
                [record.value for record in following],
                cursor.advance(lambda end: cursor.reader.fetch(end, 100, None)),  # type: ignore[list-item]
            ]

        assert seen() == [[], [], [], [], []]
        log.sync()
        log.append(b"three")
        assert seen() == [[b"one", b"two"]] * 5
        log.append(b"four", durable=True)
        assert seen() == [[b"one", b"two", b"three", b"four"]] * 2 + [[b"three", b"four"]] * 3
    following.close()


def test_a_sync_wakes_its_waiters_although_an_append_has_cleared_the_wish_before(log: Spool) -> None:
    wakes: list[int] = []

    class Listening(system.Port):
        def write(self, fd: int, data: bytes, at: int) -> None:
            wakes.append(at)
            super().write(fd, data, at)

    reader = log._live().reader(0, 0)
    with system.replaced(Listening()):
        reader.request_wake_up(0)
        log.append(b"x")
        assert wakes == [format.WAKE_AT]
        assert (word(log, frames.WANTED), word(log, format.SYNCED)) == (0, 0), "woken for nothing: it asks again"
        reader.request_wake_up(0)
        log.sync()
        assert wakes == [format.WAKE_AT, format.CHECKPOINTS_AT[0], format.WAKE_AT]
        assert word(log, frames.WANTED) == 0
        log.sync()
        assert wakes.count(format.WAKE_AT) == 2


def test_a_synced_follower_in_another_process_gets_each_record_once_it_is_on_disk(log: Spool) -> None:
    def follow() -> list[bytes]:
        with kvspool.open(log.path) as own, own.follow(isolation="synced", limit=20, timeout=30) as following:
            found = []
            for record in following:
                assert own.stats().synced_sequence > record.sequence
                found.append(record.value)
            return found

    wait = start(follow)
    for at in range(10):
        log.append(b"%d" % (2 * at))
        log.append(b"%d" % (2 * at + 1), durable=True)
    assert wait() == [b"%d" % at for at in range(20)]


def test_a_synced_reader_that_is_overrun_before_anybody_syncs_gets_an_exact_gap(log: Spool) -> None:
    log.append(b"x", durable=True)
    following = log.follow(isolation="synced", on_gap="yield", timeout=0)
    assert [record.sequence for record in following] == [0]
    log.append_many([b"x"] * 1000)
    first = log.stats().first_sequence
    assert list(log.read(isolation="synced")) == []
    assert list(following) == []
    log.sync()
    gap, *records = following
    assert (gap, records[0].sequence, records[-1].sequence) == (Gap(1, first - 1, "overrun", str(log.path)), first, 1000)
    following.close()


def test_damage_at_the_end_of_what_is_on_disk_is_one_exact_gap(log: Spool) -> None:
    log.append_many([b"one", b"two"], durable=True)
    log.append(b"three")
    with open(log.path / format.DATA_FILE, "r+b") as file:
        file.seek(format.DATA_START + 40 + 33)
        file.write(b"!")
    following = log.follow(isolation="synced", on_gap="yield", timeout=0)
    assert [record.value for record in following] == [b"one"]
    log.sync()
    gap, record = following
    assert (gap, record.value) == (Gap(1, 1, "damaged", str(log.path)), b"three")
    following.close()


@pytest.mark.parametrize("hostile", [1, 7, 44, 1 << 40, (1 << 64) - 1, (1 << 64) - 8])
def test_hostile_words_of_a_sync_never_hang_a_reader_or_a_sync(log: Spool, hostile: int) -> None:
    log.append_many([b"one", b"two", b"three"])
    words = log._live().control.cast("Q")

    def use() -> int:
        for at in (format.SYNCED, format.SYNCED_SEQ):
            words[at] = hostile
        for isolation in ("appended", "synced"):
            list(log.read(isolation=isolation, on_gap="skip"))  # type: ignore[arg-type]
            list(log.follow(isolation=isolation, on_gap="skip", timeout=0))  # type: ignore[arg-type]
        log.stats()
        return log.sync()

    assert in_child(use, 30) == 3
    assert word(log, format.SYNCED_SEQ) == 3


def test_the_thread_survives_that_the_process_has_no_descriptor_left_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    flush = durability.SpoolFlusher.flush

    def failing(flusher: durability.SpoolFlusher, timeout: float) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        flush(flusher, timeout)

    monkeypatch.setattr(durability.SpoolFlusher, "flush", failing)
    with kvspool.create(tmp_path / "log", capacity=4096, durability="os", sync_interval=0.01) as log:
        log.append(b"x")
        failed.wait(60)
        deadline = time.monotonic() + 60
        while log.stats().synced_sequence == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert log.stats().synced_sequence == 1
