"""A handle that is used in a forked child: it shares neither lock nor place with its parent's."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, start, writing
from trees import tree

import kvspool
from kvspool import Gap, Record, Spool, errors
from kvspool.system import forks

libc = ctypes.PyDLL(None)
FORKS = [pytest.param(os.fork, id="os.fork"), pytest.param(libc.fork, id="libc.fork")]
# Python warns of a fork while other threads run; that is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        yield log


def values(items: Any) -> list[bytes]:
    return [item.value for item in items]


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("has_written", [False, True])
def test_parent_and_child_append_to_one_dense_log(log: Spool, fork: Any, has_written: bool) -> None:
    expected = 0
    if has_written:
        expected = log.append(b"before") + 1

    def child() -> dict[int, bytes]:
        mine = {log.append(b"child %d" % at): b"child %d" % at for at in range(100)}
        many = log.append_many([b"child many"] * 50)
        return mine | dict.fromkeys(many, b"child many")

    wait = start(child, fork=fork)
    acknowledged = {log.append(b"parent %d" % at): b"parent %d" % at for at in range(100)}
    acknowledged |= wait()
    assert sorted(acknowledged) == list(range(expected, expected + 250))
    assert {record.sequence: record.value for record in log.read(expected)} == acknowledged


@pytest.mark.parametrize("fork", FORKS)
def test_a_child_reads_and_follows_what_the_parent_appends_meanwhile(log: Spool, fork: Any) -> None:
    log.append(b"before")
    ready_read, ready_write = os.pipe()

    def child() -> list[bytes]:
        assert values(log) == [b"before"]
        with closing(log.follow(limit=21)) as following:
            got = [next(following).value]
            os.write(ready_write, b"!")
            return got + values(following)

    wait = start(child, fork=fork)
    assert os.read(ready_read, 1)
    for at in range(20):
        log.append(b"%d" % at)
    assert wait() == [b"before", *(b"%d" % at for at in range(20))]
    os.close(ready_read)
    os.close(ready_write)


@pytest.mark.parametrize("fork", FORKS)
def test_an_iterator_from_before_the_fork_goes_on_in_both(log: Spool, fork: Any) -> None:
    log.append_many([b"%d" % at for at in range(1000)])
    with closing(log.follow(limit=1010)) as following:
        assert next(following).sequence == 0

        def child() -> list[int]:
            log.append(b"from the child")
            return [record.sequence for record in following]

        wait = start(child, fork=fork)
        log.append_many([b"from the parent"] * 9)
        assert wait() == list(range(1, 1010))
        assert [record.sequence for record in following] == list(range(1, 1010))


@pytest.mark.parametrize("fork", FORKS)
def test_a_child_that_ends_or_closes_takes_nothing_from_its_parent(log: Spool, fork: Any) -> None:
    log.append(b"a")
    reading = log.follow(timeout=0)
    assert next(reading).value == b"a"

    def child() -> None:
        log.append(b"b")
        reading.close()
        log.close()
        gc.collect()

    in_child(child, fork=fork)
    assert log.append(b"c") == 2
    assert values(reading) == [b"b", b"c"]
    reading.close()


def test_a_child_does_not_get_the_lock_that_its_parent_holds_and_its_unlock_does_not_free_it(log: Spool) -> None:
    log.append(b"a")
    log.timeout = 0.02

    def child() -> str:
        try:
            log.append(b"stolen")
        except errors.LockTimeout as error:
            return str(error)
        return "stolen"

    with writing(log) as writer:
        writer.begin()
        assert f"locked by process {os.getpid()}" in in_child(child)
        assert f"locked by process {os.getpid()}" in in_child(child)
        writer.put_many(None, [b"b"], 0, b"\0", 7)
        writer.publish()
    assert values(log) == [b"a", b"b"]


def test_a_fork_while_another_thread_holds_the_handles_lock_leaves_a_child_that_works(log: Spool) -> None:
    log.append(b"a")
    holding, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with writing(log) as writer:
            writer.begin()
            writer.put_many(None, [b"of the thread"], 0, b"\0", 7)
            holding.set()
            forked.wait(60)
            writer.publish()

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)

    def child() -> int:
        assert values(log) == [b"a"]
        os.write(pipe[1], b"!")
        return log.append(b"of the child")

    pipe = os.pipe()
    wait = start(child)
    assert os.read(pipe[0], 1)
    forked.set()
    thread.join()
    assert wait() == 2
    assert values(log) == [b"a", b"of the thread", b"of the child"]
    for fd in pipe:
        os.close(fd)


def test_a_fork_while_another_thread_uses_files_from_before_a_resize_leaves_an_iterator_that_goes_on(log: Spool) -> None:
    log.append_many([b"a", b"b"])
    items = log.follow(timeout=0)
    assert next(items).value == b"a"
    before = items.cursor.files
    kvspool.resize(log.path, capacity="128KiB")
    log.append(b"c")
    holding, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with before._guard:  # as `in_use` does for a moment
            holding.set()
            forked.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60)

    wait = start(lambda: values(items), 20)
    forked.set()
    thread.join()
    assert wait() == values(items) == [b"b", b"c"]


def test_a_fork_while_another_thread_uses_files_from_before_a_resize_leaves_files_that_can_be_closed(log: Spool) -> None:
    items = log.follow(timeout=0)
    before = items.cursor.files
    kvspool.resize(log.path, capacity="128KiB")
    log.append(b"a")
    using, forked = threading.Event(), threading.Event()

    def use() -> None:
        with before.in_use():
            using.set()
            forked.wait(60)

    thread = threading.Thread(target=use)
    thread.start()
    assert using.wait(60)

    def child() -> int:
        before.close()
        return len(before._descriptors)

    wait = start(child, 20)
    forked.set()
    thread.join()
    assert wait() == 0
    assert values(items) == [b"a"]


def test_a_fork_while_another_thread_appends_all_the_time(log: Spool) -> None:
    stop = threading.Event()
    mine: dict[int, bytes] = {}

    def append() -> None:
        while not stop.is_set():
            mine[log.append(b"thread")] = b"thread"

    thread = threading.Thread(target=append)
    thread.start()
    try:
        theirs: dict[int, bytes] = {}
        for at in range(15):
            theirs[in_child(lambda at=at: log.append(b"child %d" % at))] = b"child %d" % at  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
    assert len(theirs) == 15
    everything = mine | theirs
    assert sorted(everything) == list(range(len(mine) + 15))
    for item in log.read(0, on_gap="yield"):
        assert isinstance(item, Gap) or item.value == everything[item.sequence]


def test_a_grandchild_works_too(log: Spool) -> None:
    log.append(b"parent")

    def child() -> list[bytes]:
        log.append(b"child")
        in_child(lambda: log.append(b"grandchild"))
        log.append(b"child again")
        return values(log)

    assert in_child(child) == [b"parent", b"child", b"grandchild", b"child again"]
    assert log.append(b"parent again") == 4


def _worker(log: Spool, name: int, results: Any) -> None:
    results.put([log.append(b"%d" % name, key=b"%d" % at) for at in range(40)])


def test_processes_of_multiprocessing_share_an_inherited_handle(log: Spool) -> None:
    context = multiprocessing.get_context("fork")
    log.append(b"first")
    results: Any = context.SimpleQueue()
    workers = [context.Process(target=_worker, args=(log, name, results)) for name in range(3)]
    for worker in workers:
        worker.start()
    mine = [log.append(b"parent") for _ in range(40)]
    theirs = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sorted(mine + sum(theirs, [])) == list(range(1, 161))
    assert all(isinstance(record, Record) for record in log.read(0, on_gap="yield"))


def test_a_log_replaced_since_the_fork_is_not_taken_for_the_old_one(log: Spool, tmp_path: Path) -> None:
    log.append(b"a")

    def child() -> None:
        log.path.rename(tmp_path / "moved")
        kvspool.create(log.path, capacity=4096).close()
        before = tree(tmp_path)
        for _ in range(2):
            with pytest.raises(errors.MismatchedFiles):
                log.append(b"x")
            with pytest.raises(errors.MismatchedFiles):
                log.read()
        assert tree(tmp_path) == before

    in_child(child)


def test_a_log_closed_before_the_fork_stays_closed(log: Spool) -> None:
    log.append(b"a")
    log.close()

    def child() -> str:
        try:
            log.append(b"x")
        except errors.Closed:
            return "closed"
        return "open"

    assert in_child(child) == "closed"


def test_a_childs_death_under_the_lock_frees_it(log: Spool) -> None:
    log.append(b"a")
    pipe = os.pipe()

    def child() -> None:
        with writing(log) as writer:
            writer.begin()
            writer.put_many(None, [b"never"], 0, b"\0", 7)
            os.write(pipe[1], b"!")
            signal.pause()

    wait = start(child)
    assert os.read(pipe[0], 1)
    log.timeout = 0.0
    with pytest.raises(errors.LockTimeout):
        log.append(b"x")
    os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    os.waitid(os.P_PID, wait.pid, os.WEXITED | os.WNOWAIT)  # type: ignore[attr-defined]
    assert log.append(b"b") == 1
    assert values(log) == [b"a", b"b"]
    with pytest.raises(Died, match="SIGKILL"):
        wait()
    for fd in pipe:
        os.close(fd)


def test_a_child_that_never_uses_the_handle_keeps_no_lock_of_a_dead_parent(log: Spool) -> None:
    said_read, said_write = os.pipe()
    stop_read, stop_write = os.pipe()

    def parent_to_be_killed() -> None:
        with writing(log) as writer:
            writer.begin()
            if os.fork() == 0:
                os.write(said_write, b"b")
                os.read(stop_read, 1)
                os._exit(0)
            os.write(said_write, b"a")
            signal.pause()

    wait = start(parent_to_be_killed)
    said = os.read(said_read, 1) + os.read(said_read, 1)
    assert sorted(said) == list(b"ab")
    os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    os.waitid(os.P_PID, wait.pid, os.WEXITED | os.WNOWAIT)  # type: ignore[attr-defined]
    log.timeout = 0.0
    try:
        assert log.append(b"free") == 0
    finally:
        os.write(stop_write, b"!")
        with pytest.raises(Died):
            wait()
        for fd in (said_read, said_write, stop_read, stop_write):
            os.close(fd)


def test_handles_are_registered_weakly(log: Spool) -> None:
    assert log in forks._handles
    gc.collect()  # what earlier tests have left
    count = len(forks._handles)
    other = kvspool.open(log.path)
    assert len(forks._handles) == count + 2  # the handle and its files
    del other
    gc.collect()
    assert len(forks._handles) == count


def test_a_child_closes_a_handle_in_the_midst_of_an_append_by_another_thread_of_its_parent(log: Spool) -> None:
    appending, forked = threading.Event(), threading.Event()

    def work(writer: Any) -> bool:
        appending.set()
        return forked.wait(60)

    thread = threading.Thread(target=log._locked, args=(work, 60.0))
    thread.start()
    assert appending.wait(60)

    def child() -> tuple[bool, int]:
        files = log._files
        assert files is not None
        log.close()
        return log.closed, len(files._descriptors)

    try:
        wait = start(child, 20)
    finally:
        forked.set()
        thread.join()
    assert wait() == (True, 0)
    assert log.append(b"the parent goes on") == 0


def test_a_fork_inside_the_use_of_files_keeps_them_open_in_the_child_until_its_end(log: Spool) -> None:
    files = log._live()
    with ExitStack() as using:
        using.enter_context(files.held_open())

        def child() -> tuple[bool, int]:
            files.close()
            is_open = bool(files._descriptors)
            using.close()
            return is_open, len(files._descriptors)

        assert in_child(child) == (True, 0)
