"""Tasks of single logs: each record is given to one living worker, acknowledged in any order, and never forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import process
from faults import NoFlushPort
from task_logs import KINDS, create

import kvspool
from kvspool import Gap, GapError, system
from kvspool.errors import (
    Closed,
    Corruption,
    LeaseLost,
    NoSuchReader,
    ReaderBusy,
    TooManyWorkers,
    UnknownVersion,
    Unsupported,
)
from kvspool.kernel import tasks_py as words
from kvspool.tasks import layout
from kvspool.tasks.dead import DeadLetter
from kvspool.tasks.single import log_task_file

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(params=KINDS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with create(tmp_path / "log", request.param) as log:
        yield log


@pytest.fixture
def spool(tmp_path: Path) -> Any:
    with create(tmp_path / "log", "spool") as log:
        yield log


def append(log: Any, count: int, start: int = 0) -> None:
    log.append_many([b"%d" % at for at in range(start, start + count)])


def values(tasks: list[Any]) -> list[int]:
    return [int(task.value) for task in tasks]


def letters(log: Any, name: str = "t") -> list[Any]:
    path = log.path.with_name(f"{log.path.name}.{name}.dead")
    if not path.exists():
        return []
    with kvspool.open(path) as dead:
        return [record.decode(DeadLetter) for record in dead.read()]


# Giving tasks out.


def test_each_record_is_given_once_and_acknowledged_in_any_order(log: Any) -> None:
    append(log, 300)
    with log.tasks("t") as one, log.tasks("t") as two:
        first, second = one.take(100), two.take(150)
        assert sorted(values(first + second)) == list(range(250))
        two.ack_many(list(reversed(second)))
        third = two.take(100)
        assert values(third) == list(range(250, 300))
        for task in reversed(first):
            assert task.deliveries == 1
            one.ack(task)
        two.ack_many(third)
        assert one.take(10) == two.take(10) == []
    (state,) = log.task_stats()
    assert (state.low, state.next, state.taken, state.workers, state.waits_for) == (300, 300, 0, [], "")
    assert [(one.name, one.sequence) for one in log.readers()] == [("t", 300)]


def test_a_task_has_the_fields_of_its_record(spool: Any) -> None:
    spool.append({"a": 1}, key=b"k", type=7)
    with spool.tasks("t") as worker:
        (task,) = worker.take()
        record = spool.get(0)
        assert (task.record, task.data, task.key, task.type, task.value) == (record, {"a": 1}, b"k", 7, record.value)
        assert (task.sequence, task.timestamp, task.time, task.shard) == (0, record.timestamp, record.time, 0)
        assert task.decode(dict[str, int]) == {"a": 1}


def test_a_loop_acknowledges_and_an_exception_is_a_retry(log: Any) -> None:
    append(log, 5)
    seen: list[tuple[int, int]] = []
    with log.tasks("t") as worker:
        for task in worker.follow(timeout=0):
            with task:
                seen.append((int(task.value), task.deliveries))
                if task.sequence == 2 and task.deliveries == 1:
                    raise RuntimeError("once")
            assert task.is_over
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1), (4, 1)]
    assert log.task_stats()[0].low == 5


def test_a_worker_that_leaves_gives_its_tasks_to_others(log: Any) -> None:
    append(log, 10)
    with log.tasks("t") as one:
        with log.tasks("t") as two:
            two.take(5)
        again = one.take(10)
        assert sorted(values(again)) == list(range(10))
        assert sorted(task.deliveries for task in again) == [1] * 5 + [2] * 5


def test_start_and_the_position_of_a_durable_reader_count_for_a_new_list(log: Any) -> None:
    append(log, 10)
    with log.tasks("late", "latest") as worker:
        assert worker.take(10) == []
        append(log, 1, 10)
        assert values(worker.take(10)) == [10]
    with log.reader("r") as reader:
        assert len(list(reader.read(limit=4))) == 4
        reader.commit()
    with log.tasks("r") as worker:
        assert values(worker.take(2)) == [4, 5]


def test_names_of_readers_groups_and_task_lists_are_one_space(log: Any) -> None:
    append(log, 3)
    with log.tasks("t"):
        for attempt in (log.reader, log.group, log.delete_reader, log.delete_tasks):
            with pytest.raises(ReaderBusy):
                attempt("t")
    with pytest.raises(ReaderBusy, match="task list"):
        log.reader("t")
    with log.group("g"), pytest.raises(ReaderBusy):
        log.tasks("g")
    log.delete_tasks("t")
    assert log.task_stats() == []
    with pytest.raises(NoSuchReader):
        log.delete_tasks("t")
    with log.reader("t") as reader:
        assert reader.sequence == 0


def test_take_waits_for_a_task(log: Any) -> None:
    with log.tasks("t") as worker:
        threading.Timer(0.1, append, (log, 3)).start()
        tasks = worker.take(10, wait=30)
        assert values(tasks) == list(range(len(tasks)))
        assert tasks


def test_a_waiting_worker_gets_what_another_one_gives_back(log: Any) -> None:
    append(log, 1)
    with log.tasks("t") as one, log.tasks("t") as two:
        (task,) = one.take()
        threading.Timer(0.1, task.retry).start()
        (again,) = two.take(wait=30)
        assert (again.sequence, again.deliveries) == (0, 2)


def test_a_delayed_task_comes_later(log: Any) -> None:
    append(log, 2)
    with log.tasks("t") as worker:
        one, two = worker.take(2)
        one.retry(delay=0.2)
        two.ack()
        assert worker.take() == []
        assert log.task_stats()[0].delayed == 1
        (again,) = worker.take(wait=30)
        assert (again.sequence, again.deliveries) == (0, 2)


def test_arguments_are_checked(spool: Any) -> None:
    for arguments in ({"window": 0}, {"order": "x"}, {"lease": 0}, {"max_deliveries": 0}, {"window": 1 << 21}):
        with pytest.raises(ValueError, match=r".+"):
            spool.tasks("t", **arguments)
    with spool.tasks("t") as worker:
        with pytest.raises(ValueError, match="at least 1"):
            worker.take(0)
        append(spool, 1)
        with pytest.raises(ValueError, match="delay"):
            worker.take()[0].retry(delay=-1)
    with pytest.raises(ValueError, match="order by key"):
        spool.tasks("t", order="key")
    with pytest.raises(Closed):
        worker.take()


def test_a_log_whose_sequences_are_reused_has_no_tasks(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="fixed", item_bytes=4, items_per_blob=4) as log:
        with pytest.raises(Unsupported, match="tasks"):
            log.tasks("t")
        assert log.task_stats() == []


# Kills, stops, leases.


def test_tasks_of_a_killed_worker_go_to_a_waiting_one(log: Any) -> None:
    append(log, 8)

    def work(say: Callable[[bytes], None]) -> None:
        with kvspool.open(log.path) as mine, mine.tasks("t") as worker:
            tasks = worker.take(8)
            worker.ack_many(tasks[:4])
            say(b".")
            signal.pause()

    with process(work) as (pid, said):
        assert said() == b"."
        with log.tasks("t") as worker:
            assert worker.take(8) == []
            threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
            tasks = worker.take(8, wait=30)
            assert values(tasks) == [4, 5, 6, 7]
            assert all(task.deliveries == 2 for task in tasks)


def test_a_busy_worker_notices_a_kill(spool: Any) -> None:
    append(spool, 4)

    def work(say: Callable[[bytes], None]) -> None:
        with kvspool.open(spool.path) as mine, mine.tasks("t") as worker:
            worker.take(2)
            say(b".")
            signal.pause()

    with process(work) as (pid, said), spool.tasks("t") as worker:
        assert said() == b"."
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        seen = set()
        for task in worker.follow(limit=20, timeout=10):
            seen.add(int(task.value))
            task.ack()
            append(spool, 1, 100 + len(seen))
            system.port.sleep(0.006)  # a handler that takes longer than the time between two checks
        assert {0, 1} <= seen


def test_a_stopped_worker_keeps_its_tasks_without_a_lease(spool: Any) -> None:
    append(spool, 1)

    def work(say: Callable[[bytes], None]) -> None:
        with kvspool.open(spool.path) as mine, mine.tasks("t") as worker:
            (task,) = worker.take()
            os.kill(os.getpid(), signal.SIGSTOP)
            task.ack()
            say(b"a")

    with process(work) as (pid, said), spool.tasks("t") as worker:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert worker.take(wait=0.7) == []
        os.kill(pid, signal.SIGCONT)
        assert said() == b"a"
        assert worker.take() == []


def test_a_lease_that_ended_is_lost_and_the_late_ack_changes_nothing(log: Any) -> None:
    append(log, 3)
    with log.tasks("t", lease=0.05) as slow, log.tasks("t") as other:
        tasks = slow.take(3)
        tasks[2].extend(60)
        again = other.take(3, wait=30)
        while len(again) < 2:
            again += other.take(3, wait=30)
        assert values(again) == [0, 1]
        with pytest.raises(LeaseLost, match="lease ended") as caught:
            tasks[0].ack()
        assert caught.value.sequences == (0,)
        with pytest.raises(LeaseLost) as caught:
            slow.ack_many(tasks[1:])
        assert caught.value.sequences == (1,)
        for call in (tasks[0].ack, tasks[0].retry, tasks[0].extend):
            call()  # it is over
        other.ack_many(again)
        assert log.task_stats()[0].low == 3


def test_a_lease_without_another_worker_is_still_valid(spool: Any) -> None:
    append(spool, 1)
    with spool.tasks("t", lease=0.01) as worker:
        (task,) = worker.take()
        system.port.sleep(0.05)
        task.ack()
        assert spool.task_stats()[0].low == 1


# Dead letters.


def test_a_rejected_record_is_moved_to_the_dead_letters(log: Any) -> None:
    append(log, 3)
    with log.tasks("t") as worker:
        tasks = worker.take(3)
        tasks[1].reject("no good")
        worker.ack_many(tasks)
        assert worker.take() == []
    (letter,) = letters(log)
    assert (letter.tasks, letter.sequence, letter.deliveries, letter.error, letter.value) == ("t", 1, 1, "no good", b"1")
    assert (letter.log, letter.log_id) == (str(log.path), log.log_id)
    assert log.task_stats()[0].low == 3


def test_a_record_that_fails_too_often_is_moved_with_the_text_of_the_error(log: Any) -> None:
    append(log, 2)
    with log.tasks("t", max_deliveries=3) as worker:
        for task in worker.follow(timeout=0):
            with task:
                if task.sequence == 0:
                    raise RuntimeError(f"attempt {task.deliveries}")
    (letter,) = letters(log)
    assert (letter.sequence, letter.deliveries, letter.error) == (0, 3, "RuntimeError: attempt 3")


def test_a_record_that_kills_its_workers_becomes_a_dead_letter(spool: Any) -> None:
    append(spool, 1)
    for _ in range(2):
        with spool.tasks("t", max_deliveries=2) as worker:
            assert len(worker.take()) == 1
    with spool.tasks("t", max_deliveries=2) as worker:
        assert worker.take() == []
    (letter,) = letters(spool)
    assert letter.deliveries == 2


def test_dead_letters_go_to_a_given_log_with_key_and_type(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log") as log, kvspool.create(tmp_path / "dead", format="kvj") as dead:
        log.append({"a": 1}, key=b"k", type=3)
        with log.tasks("t", dead_letters=dead) as worker:
            worker.take()[0].reject("x")
        (record,) = dead.read()
        assert (record.key, record.type) == (b"k", 3)
        assert record.decode(DeadLetter).value == b'{"a":1}'


# Order by key.


def test_records_of_a_key_come_one_at_a_time_and_in_order(spool: Any) -> None:
    for at in range(9):
        spool.append(b"%d" % at, key=b"%d" % (at % 3))
    with spool.tasks("t", order="key") as one, spool.tasks("t", order="key") as two:
        first = one.take(9)
        assert values(first) == [0, 1, 2]
        assert two.take(9) == []
        assert spool.task_stats()[0].held == 6
        first[1].ack()
        (task,) = two.take(9)
        assert values([task]) == [4]
        first[0].retry()
        assert values(two.take(9)) == [0]
        task.reject("no good")
        assert values(one.take(9)) == [7]


def test_records_without_a_key_are_in_no_order(log: Any) -> None:
    append(log, 50)
    with log.tasks("t", order="key") as worker:
        assert values(worker.take(50)) == list(range(50))


def test_order_survives_the_end_of_a_worker(spool: Any) -> None:
    for at in range(6):
        spool.append(b"%d" % at, key=b"same")
    seen = []
    for _ in range(3):
        with spool.tasks("t", order="key") as worker:
            (task,) = worker.take(6)
            seen.append(int(task.value))
    with spool.tasks("t", order="key", max_deliveries=None) as worker:
        for task in worker.follow(timeout=0):
            seen.append(int(task.value))
            task.ack()
    assert seen == [0, 0, 0, 0, 1, 2, 3, 4, 5]


# The window.


def test_a_full_window_lets_workers_wait_and_says_for_what(log: Any) -> None:
    append(log, 100)
    with log.tasks("t", window=64) as one, log.tasks("t") as two:
        assert len(one.take(1000)) == 64
        assert two.take() == []
        (state,) = log.task_stats()
        assert "full until record 0 is acknowledged" in state.waits_for
        assert str(os.getpid()) in state.waits_for
        with log.tasks("t") as three:
            pass
        assert three.closed
    with log.tasks("t") as worker:
        tasks = worker.take(64)
        threading.Timer(0.1, worker.ack_many, (tasks,)).start()
        with log.tasks("t") as other:
            assert values(other.take(wait=30)) == [64]


def test_a_full_window_ends_with_the_acknowledgement_of_the_lowest_task(log: Any) -> None:
    append(log, 70)
    with log.tasks("t", window=64) as worker:
        tasks = worker.take(70)
        worker.ack_many(tasks[1:])
        assert worker.take() == []
        tasks[0].ack()
        assert values(worker.take(70)) == list(range(64, 70))


# Records that are lost, policies, and retention.


def test_overwritten_records_are_a_gap_for_one_worker(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        append(log, 1)
        with log.tasks("t") as one, log.tasks("t") as two:
            append(log, 1000)
            with pytest.raises(GapError) as caught:
                one.take(5)
            gap = caught.value.gap
            assert gap.first == 0
            assert gap.reason == "overrun"
            assert one.take(1, on_gap="skip")[0].sequence == gap.last + 1
            assert two.take(1)[0].sequence == gap.last + 2
            append(log, 1000)
            items = list(two.follow(timeout=0, on_gap="yield", limit=3))
            assert sum(isinstance(item, Gap) for item in items) == 1


def test_a_taken_record_that_was_overwritten_is_a_gap_when_it_is_given_out_again(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        append(log, 2)
        with log.tasks("t") as worker, log.tasks("t") as other:
            one, two = worker.take(2)
            append(log, 1000)
            one.retry()
            with pytest.raises(GapError) as caught:
                other.take()
            assert (caught.value.gap.first, caught.value.gap.last) == (0, 0)
            two.ack()
        assert log.task_stats()[0].low >= 2


@pytest.mark.parametrize("policy", ["block", "raise"])
def test_writers_wait_for_the_lowest_task_that_is_not_acknowledged(tmp_path: Path, policy: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy=policy, timeout=0.2) as log, log.tasks("t") as worker:
        with pytest.raises(kvspool.errors.SpoolFull):
            append_one_by_one(log, 1000)
        tasks = worker.take(10)
        worker.ack_many(tasks[1:])
        assert worker.take(wait=0.05)
        with pytest.raises(kvspool.errors.SpoolFull):
            log.append(b"x" * 100)
        tasks[0].ack()
        worker.take(1000)
        worker.take(wait=0.05)  # stores the position before it sleeps
        log.append(b"x" * 100)


def append_one_by_one(log: Any, count: int) -> None:
    for at in range(count):
        log.append(b"%d" % at)


def test_retention_keeps_records_that_are_not_acknowledged(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=4096) as log:
        for _ in range(20):
            append(log, 100)
        with log.tasks("t") as worker:
            tasks = worker.take(1000)
            worker.ack_many(tasks[10:])
        log.trim(before=log.end())
        assert log.extent()[0] <= 10
        with log.tasks("t") as worker:
            assert [task.sequence for task in worker.take(12)] == [*range(10), 1000, 1001]


def test_a_jump_of_sequences_is_passed(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        append(log, 2)
        pa = pytest.importorskip("pyarrow")
        log.append_arrow(pa.table({"value": [b"7"]}), at=1 << 40)
        with log.tasks("t", window=64) as worker:
            tasks = worker.take(5)
            assert values(tasks) == [0, 1]
            first = worker.take(5, on_gap="skip")
            assert first == []
            worker.ack_many(tasks)
            found = list(worker.follow(timeout=0, on_gap="skip"))
            assert [task.sequence for task in found] == [1 << 40]
            found[0].ack()
        assert log.task_stats()[0].low == (1 << 40) + 1


# Forks, threads, event loops, closing.


def test_a_forked_child_is_another_worker(log: Any) -> None:
    append(log, 4)
    with log.tasks("t") as worker:
        (task,) = worker.take()

        def work(say: Callable[[bytes], None]) -> None:
            try:
                task.ack()
            except LeaseLost:
                say(b"L")
            (mine,) = worker.take()
            say(b"%d" % mine.sequence)
            mine.ack()
            worker.close()
            say(b"e")

        with process(work) as (_, said):
            assert [said(), said(), said()] == [b"L", b"1", b"e"]
        task.ack()
        assert values(worker.take(4)) == [2, 3]


def test_threads_share_a_worker(spool: Any) -> None:
    append(spool, 3000)
    seen: list[int] = []
    with spool.tasks("t") as worker:

        def work() -> None:
            for task in worker.follow(timeout=0.2):
                seen.append(int(task.value))
                task.ack()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(seen) == list(range(3000))


def test_an_event_loop_gets_tasks_while_it_does_other_work(log: Any) -> None:
    async def main() -> list[int]:
        seen = []
        with log.tasks("t") as worker:

            async def later() -> None:
                await asyncio.sleep(0.05)
                append(log, 5)

            other = asyncio.create_task(later())
            async with worker.follow_async(limit=5, timeout=30) as tasks:
                async for task in tasks:
                    with task:
                        seen.append(int(task.value))
            await other
        return seen

    assert asyncio.run(main()) == list(range(5))


def test_a_cancelled_wait_loses_no_task(spool: Any) -> None:
    async def main() -> None:
        with spool.tasks("t") as worker:
            waiting = asyncio.create_task(anext(worker.follow_async()))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            append(spool, 1)
            assert values(worker.take()) == [0]

    asyncio.run(main())


@pytest.mark.parametrize("what", ["worker", "log"])
def test_closing_ends_a_wait_in_another_thread(spool: Any, what: str) -> None:
    worker = spool.tasks("t")
    found: list[Any] = []

    def wait() -> None:
        try:
            found.extend(worker.follow())
        except Closed as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    system.port.sleep(0.1)
    (worker if what == "worker" else spool).close()
    thread.join(30)
    assert isinstance(found[0], Closed)
    worker.close()


# The disk, and files of others.


def test_acknowledgements_of_the_level_disk_are_flushed(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", durability="disk") as log:
        append(log, 10)
        with log.tasks("t") as worker:
            tasks = worker.take(10)
            window = worker._sources[0].window
            worker.ack_many(tasks[:4])
            assert window.word(words.SYNCED) == 4
            tasks[4].ack()
            assert window.word(words.SYNCED) == 5
            assert window.word(words.SAFE) == 10


def test_a_failed_flush_is_reported_and_stays_reported(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", durability="disk") as log:
        append(log, 2)
        worker = log.tasks("t")
        one, two = worker.take(2)
        with system.replaced(NoFlushPort()), pytest.raises(kvspool.errors.Poisoned, match="bad disk"):
            one.ack()
        with pytest.raises(kvspool.errors.Poisoned, match="earlier flush"):
            two.ack()
        worker.close()


def restarted(log: Any, name: str = "t") -> None:
    """Let the machine have been restarted since the list was used."""
    path = log_task_file(log.path, name)
    data = bytearray(path.read_bytes())
    at = layout.MEMORY_AT + 8 * words.BOOT
    data[at : at + 16] = bytes(16)
    path.write_bytes(data)


def test_after_a_restart_of_the_machine_what_is_safe_is_not_given_again(log: Any) -> None:
    append(log, 20)
    with log.tasks("t") as worker:
        tasks = worker.take(20)
        worker.ack_many(tasks[:8] + tasks[12:14])
        worker._sources[0].window.set_word(words.SAFE, 13)
        worker._sources[0].keep = lambda: None
    restarted(log)
    with log.tasks("t") as worker:
        again = worker.take(20)
        assert sorted(values(again)) == [8, 9, 10, 11, *range(13, 20)]
        worker.ack_many(again)
        assert worker.take() == []
        assert log.task_stats()[0].low == 20


def test_any_mixture_of_old_and_new_pages_is_safe_after_a_restart(tmp_path: Path) -> None:
    """Pages of the file reach the disk in any order: no task is forgotten, and nothing is forgotten that was flushed."""
    with kvspool.create(tmp_path / "log", format="kvj", durability="disk") as log:
        append(log, 2000)
        path = log_task_file(log.path, "t")
        with log.tasks("t", window=512) as worker:
            acked = 0
            images = []
            for _ in range(8):
                tasks = worker.take(200)
                worker.ack_many(tasks[1:])
                images.append((path.read_bytes(), {task.sequence for task in tasks[1:]}))
                tasks[0].ack()
                acked += len(tasks)
        done: set[int] = set()
        for number in range(1, len(images)):
            (old, finished), (new, _) = images[number - 1], images[number]
            done |= finished
            for choice in range(1, 64, 7):
                mixed = bytearray(new)
                for page in range(layout.MEMORY_AT // 4096, len(new) // 4096 + 1):
                    if choice >> (page % 6) & 1:
                        mixed[4096 * page : 4096 * page + 4096] = old[4096 * page : 4096 * page + 4096]
                path.write_bytes(mixed)
                restarted(log)
                _restore_reader(log, 0)
                with log.tasks("t") as worker:
                    given: set[int] = set()
                    while tasks := worker.take(100):
                        given |= {task.sequence for task in tasks}
                        worker.ack_many(tasks)
                assert not given & done, f"image {number}, pages {choice:#b}: acknowledged tasks were given out again"
                assert given | done | images[number][1] | {0} >= set(range(200 * number, 2000)), "a task was forgotten"


def _restore_reader(log: Any, sequence: int) -> None:
    with log.open_reader("t") as reader:
        reader.seek(sequence)
        reader.commit()


def test_a_worker_that_enters_while_others_work_gives_nothing_out_again(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are appended, taken and acknowledged after the new worker has looked for the end of the log."""
    log.append_many([b"%d" % at for at in range(10)])
    one = log.tasks("t")
    one.ack_many(one.take(10))
    end = type(log).end

    def late_end(self: Any) -> int:
        found = int(end(self))
        with monkeypatch.context() as unpatched:
            unpatched.setattr(type(log), "end", end)
            log.append_many([b"later"] * 5)
            one.ack_many(one.take(5))
        return found

    monkeypatch.setattr(type(log), "end", late_end)
    two = log.tasks("t")
    assert two.take(10) == []
    (state,) = log.task_stats()
    assert state.low == state.next >= 15


def test_a_log_that_was_cut_gives_its_new_records_out(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        append(log, 10)
        with log.tasks("t") as worker:
            worker.ack_many(worker.take(10))
    kvspool.delete(tmp_path / "log")
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        append(log, 5)
        with log.tasks("t") as worker:
            assert values(worker.take(10)) == list(range(5))


def test_a_full_disk_leaves_no_list(tmp_path: Path) -> None:
    class Full(system.Port):
        def allocate(self, fd: int, size: int) -> None:
            raise OSError(28, "No space left on device")

    with create(tmp_path / "log", "spool") as log:
        append(log, 3)
        with system.replaced(Full()), pytest.raises(OSError, match="No space left"):
            log.tasks("t")
        assert log.task_stats() == []
        with log.tasks("t") as worker:
            assert values(worker.take(3)) == [0, 1, 2]


def test_a_damaged_file_is_refused_and_can_be_removed(log: Any) -> None:
    append(log, 5)
    with log.tasks("t") as worker:
        worker.take(1)[0].ack()
    path = log_task_file(log.path, "t")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sound = path.read_bytes()
    version = bytearray(sound)
    version[8] = 9
    for data, error in ((sound[:100], Corruption), (b"x" * len(sound), Corruption), (bytes(version), UnknownVersion), (b"", Corruption)):
        path.write_bytes(data)
        with pytest.raises(error, match="tasks-"):
            log.tasks("t")
        assert log.task_stats()[0].problem
    path.unlink()
    with log.tasks("t") as worker:
        assert values(worker.take(5)) == [1, 2, 3, 4]


def test_any_bytes_of_the_window_give_typed_errors_or_tasks(spool: Any) -> None:
    import random

    append(spool, 50)
    with spool.tasks("t", window=64) as worker:
        worker.ack_many(worker.take(20))
    path = log_task_file(spool.path, "t")
    sound = path.read_bytes()
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(sound)
        for _ in range(chance.choice([1, 4, 60])):
            at = chance.randrange(layout.MEMORY_AT, len(data) & ~7) & ~7
            data[at : at + 8] = chance.choice([chance.randbytes(8), b"\xff" * 8, bytes(8)])
        path.write_bytes(data)
        try:
            with spool.tasks("t") as worker:
                worker.ack_many(worker.take(100, on_gap="skip"))
            spool.task_stats()
        except kvspool.KvspoolError:
            pass


def test_the_number_of_workers_is_limited(spool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_WORKERS", 2)
    with spool.tasks("t"), spool.tasks("t"), pytest.raises(TooManyWorkers):
        spool.tasks("t")


# Names of logs.


def test_a_renamed_log_keeps_its_task_lists_and_a_deleted_one_takes_them_along(tmp_path: Path) -> None:
    for kind in ("spool", "kvj", "sej"):
        path, new = tmp_path / f"log-{kind}", tmp_path / f"new-{kind}"
        with create(path, kind) as log:
            append(log, 10)
            with log.tasks("t") as worker:
                tasks = worker.take(10)
                worker.ack_many(tasks[1:])
                for attempt in (lambda: kvspool.rename(path, new), lambda: kvspool.delete(path)):  # noqa: B023
                    with pytest.raises(kvspool.errors.LogInUse, match="in use|task list"):
                        attempt()
        kvspool.rename(path, new)
        assert not log_task_file(path, "t").exists()
        with kvspool.open(new) as log, log.tasks("t") as worker:
            assert values(worker.take(10)) == [0]
        kvspool.delete(new)
        assert [name.name for name in tmp_path.iterdir() if kind in name.name] == []


def test_a_deleted_log_leaves_no_task_list(log: Any) -> None:
    append(log, 3)
    path = log.path
    with log.tasks("t") as worker:
        worker.take(1)
    with log.group("g") as member:
        member.attend()
    log.close()
    kvspool.delete(path)
    assert list(path.parent.iterdir()) == []
