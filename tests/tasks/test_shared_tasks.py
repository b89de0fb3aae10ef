"""Tasks of shard sets and hub roots: workers take tasks of all shards, also of new ones."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, process
from endings import Ending
from schedules import some

import hub
import kvspool
import shard
from kvspool import system
from kvspool.errors import NoSuchReader, ReaderBusy
from kvspool.kernel import tasks_py as words
from kvspool.tasks.dead import DeadLetter

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Subject:
    """A shard set or a hub root with four shards."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.is_hub = kind.startswith("hub")
        options: dict[str, Any] = {"format": "kvj"} if "kvj" in kind else {"capacity": "1MiB"}
        self.writer: Any = hub.create(path).create_client("A", bits=2, **options) if self.is_hub else shard.create(path, bits=2, **options)

    def open(self) -> Any:
        return hub.open(self.path) if self.is_hub else shard.open(self.path)

    def append(self, count: int, start: int = 0) -> None:
        names = [b"%d" % at for at in range(start, start + count)]
        self.writer.append_many(names, keys=names)


@pytest.fixture(params=["set of spools", "set of kvj", "hub of kvj", "hub of spools"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return Subject(tmp_path / "root", request.param)


def test_workers_share_the_records_of_all_shards(subject: Subject) -> None:
    subject.append(400)
    seen: list[int] = []
    with subject.open() as logs, logs.tasks("t") as one, logs.tasks("t") as two:
        while tasks := one.take(30) + two.take(30):
            seen += [int(task.value) for task in tasks]
            one.ack_many(tasks)
        assert sorted(seen) == list(range(400))
        states = logs.task_stats()
        assert len(states) == 4
        assert {one.name for one in states} == {"t"}
        assert all(one.low == one.next for one in states)
        assert all(len(one.workers) == 2 for one in states)


def test_a_task_names_its_shard(subject: Subject) -> None:
    subject.append(8)
    with subject.open() as logs, logs.tasks("t") as worker:
        for task in worker.follow(timeout=0):
            place = ("A", task.record.shard) if subject.is_hub else task.record.shard
            assert task.shard == place
            task.ack()


def test_a_waiting_worker_gets_the_tasks_of_a_killed_one(subject: Subject) -> None:
    subject.append(20)

    def work(say: Callable[[bytes], None]) -> None:
        with subject.open() as logs, logs.tasks("t") as worker:
            taken: list[Any] = []
            while tasks := worker.take(20):
                taken += tasks
            say(b"." if len(taken) == 20 else b"!")
            signal.pause()

    with process(work) as (pid, said), subject.open() as logs, logs.tasks("t") as worker:
        assert said() == b"."
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        seen = []
        for task in worker.follow(limit=20, timeout=30):
            seen.append(int(task.value))
            assert task.deliveries == 2
            task.ack()
        assert sorted(seen) == list(range(20))


def test_records_of_a_key_are_in_order(subject: Subject) -> None:
    for at in range(12):
        subject.writer.append(b"%d" % at, key=b"%d" % (at % 3))
    with subject.open() as logs, logs.tasks("t", order="key") as one, logs.tasks("t", order="key") as two:
        done: dict[bytes, list[int]] = {}
        while tasks := one.take(2) + two.take(2):
            assert len({task.key for task in tasks}) == len(tasks)
            for task in tasks:
                done.setdefault(task.key, []).append(int(task.value))
                task.ack()
        assert sorted(done.values()) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_dead_letters_are_next_to_the_root(subject: Subject) -> None:
    subject.append(4)
    with subject.open() as logs, logs.tasks("t") as worker:
        tasks: list[Any] = []
        while found := worker.take(10):
            tasks += found
        tasks[0].reject("bad")
        worker.ack_many(tasks)
    with kvspool.open(subject.path.with_name("root.t.dead")) as dead:
        (letter,) = [record.decode(DeadLetter) for record in dead.read()]
    assert letter.value == tasks[0].value
    number = tasks[0].record.shard
    assert letter.shard == (f"A/{number}" if subject.is_hub else f"{number}")


def test_a_list_resumes_and_can_be_deleted(subject: Subject) -> None:
    subject.append(100)
    with subject.open() as logs:
        with logs.tasks("t") as worker:
            taken = worker.take(10)
            worker.ack_many(taken)
            with pytest.raises(ReaderBusy):
                logs.delete_tasks("t")
            with pytest.raises(ReaderBusy):
                logs.group("t")
        with logs.tasks("t") as worker:
            rest = 0
            for task in worker.follow(timeout=0):
                rest += 1
                task.ack()
            assert rest == 100 - len(taken)
        logs.delete_tasks("t")
        assert logs.task_stats() == []
        with pytest.raises(NoSuchReader):
            logs.delete_tasks("t")
        with logs.tasks("t") as worker:
            assert worker.take(1)


def test_a_forked_child_is_another_worker(subject: Subject) -> None:
    subject.append(4)
    with subject.open() as logs, logs.tasks("t") as worker:

        def work(say: Callable[[bytes], None]) -> None:
            count = 0
            for task in worker.follow(timeout=0):
                task.ack()
                count += 1
            worker.close()
            say(b"%d" % count)

        with process(work) as (_, said):
            assert said() == b"4"
        assert worker.take() == []


def test_the_window_is_shared_by_the_shards(subject: Subject) -> None:
    with subject.open() as logs, logs.tasks("t", window=1024):
        assert [one.window for one in logs.task_stats()] == [256] * 4


def test_shards_of_a_new_client_are_taken(tmp_path: Path) -> None:
    subject = Subject(tmp_path / "root", "hub of kvj")
    subject.append(4)
    with subject.open() as root, root.tasks("t") as worker:
        for task in worker.follow(timeout=0):
            task.ack()

        def later() -> None:
            with root.create_client("B", bits=0, format="kvj") as other:
                other.append(b"new")

        threading.Timer(0.1, later).start()
        (task,) = worker.take(wait=30)
        assert (task.value, task.shard) == (b"new", ("B", 0))


def test_positions_of_a_hub_root_hold_back_what_is_not_acknowledged(tmp_path: Path) -> None:
    subject = Subject(tmp_path / "root", "hub of kvj")
    subject.append(100)
    with subject.open() as root:
        with root.tasks("t") as worker:
            tasks: list[Any] = []
            while found := worker.take(100):
                tasks += found
            kept = next(task for task in tasks if task.shard == ("A", 0))
            worker.ack_many([task for task in tasks if task is not kept])
            for source in worker._sources:
                source.keep()
            assert source.window.word(words.LOW) > 0
        assert root.held("A", 0) == kept.sequence
        with pytest.raises(ReaderBusy):
            root.reader("t")


def test_records_that_are_put_back_on_a_root_are_tasks_of_a_shard_of_their_own(tmp_path: Path) -> None:
    subject = Subject(tmp_path / "root", "hub of kvj")
    subject.append(8)
    with subject.open() as root:
        with pytest.raises(NoSuchReader):
            root.requeue("t")
        with root.tasks("t") as worker, root.tasks("t") as other:
            assert root.requeue("t") == 0
            bad, *others = worker.take(1) + [task for _ in range(8) for task in worker.take(8)]
            worker.ack_many(others)
            bad.reject("no address")
            with Later(lambda: root.requeue("t")):  # while both wait
                (again,) = other.take(wait=20)
            assert (again.shard, again.record.client, again.sequence, again.deliveries) == ((".requeued", 0), ".requeued", 0, 1)
            assert (again.data, again.key) == (bad.data, bad.key)
            again.reject("still none")
            first, second = root.dead_letters("t"), root.requeue("t")
            assert [(one.shard, one.sequence) for one in first] == [(".requeued/0", 0)]
            assert second == 1
            assert root.requeue("t") == 0
            (third,) = worker.take(wait=20)
            third.ack()
        states = {one.shard: one for one in root.task_stats()}
        assert (states[".requeued"].low, states[".requeued"].next) == (2, 2)
        assert sum(one.dead for one in states.values()) == 2
        root.delete_tasks("t")
        assert root.task_stats() == []
        assert root.dead_letters("t") == []
        assert [name for name in os.listdir(subject.path / ".hub" / "readers") if "requeued" in name] == []


class Later:
    """Calls a function in another thread a moment after the `with` block began."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._timer = threading.Timer(0.2, function)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.join()


def test_each_record_is_put_back_once_if_the_caller_is_killed_at_any_call(tmp_path: Path) -> None:
    subject = Subject(tmp_path / "root", "hub of kvj")
    subject.append(4)
    kills = 0

    def put_back() -> None:
        with system.replaced(Ending(nth, signal.SIGKILL)), subject.open() as root:
            root.requeue("t")

    with subject.open() as root:
        for nth in some(range(1, 1000), 17):
            with root.tasks("t", max_deliveries=None) as worker:
                tasks = [task for _ in range(12) for task in worker.take(8)]
                assert sorted(int(task.value) for task in tasks) == list(range(4)), f"killed at call {nth - 17}"
                tasks[0].reject("again")
            try:
                in_child(put_back)
                break
            except Died:
                kills += 1
            root.requeue("t")
            assert root.dead_letters("t") == []
    assert kills > 10
