"""Sleeping workers of real processes and threads: two of them watch, and a record is taken at once, whichever is killed or stopped."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import process
from task_logs import create

import kvspool
from kvspool.errors import Closed
from kvspool.kernel import tasks_py as words
from kvspool.tasks.source import PATIENCE as PATIENCE_NS

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
PATIENCE = 30.0
FIRST, SECOND = words.WATCHERS, words.WATCHERS + 2  # the places


@pytest.fixture(params=["spool", "kvj"])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A log whose waiting workers look only after a wake-up: the looks without one are hours apart."""
    for module in ("kvspool.tasks.worker", "kvspool.tasks.source", "kvspool.engine.wakeups"):
        monkeypatch.setattr(f"{module}.POLL", 3600.0)
    return create(tmp_path / "log", request.param)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stop(pid: int, window: Any) -> None:
    """Stop a worker while it does not have the lock of the list: if it had, all others would have to wait."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    while window.skip_below(0) == words.BUSY:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)


def test_threads_that_wait_take_each_record_at_once_and_end_at_once(log: Any) -> None:
    seen: list[bytes] = []

    def work(one: Any) -> None:
        try:
            for task in one.follow():
                task.ack()
                seen.append(task.value)
        except Closed:
            pass

    workers = [log.tasks("t") for _ in range(6)]
    threads = [threading.Thread(target=work, args=(one,)) for one in [*workers, workers[0]]]
    for thread in threads:
        thread.start()
    for at in range(50):
        log.append(b"%d" % at)
        until(lambda at=at: len(seen) > at)
    for one in workers:
        one.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert sorted(map(int, seen)) == list(range(50))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_record_is_taken_at_once_if_a_watching_worker_is_killed_or_stopped(log: Any, number: signal.Signals) -> None:
    reads, writes = os.pipe()

    def work(say: Callable[[bytes], None]) -> None:
        with kvspool.open(log.path) as ours, ours.tasks("t") as worker:
            for task in worker.follow():
                os.write(writes, task.value)
                task.ack()

    observer = log.tasks("t")
    window, file = observer._sources[0].window, observer._sources[0].file
    started = [process(work) for _ in range(5)]
    try:
        for one in started:
            one.__enter__()
        for value, place in ((b"a", FIRST), (b"b", SECOND), (b"c", FIRST)):
            until(lambda: {window.word(FIRST), window.word(SECOND)} <= file.workers().keys())
            victim = file.workers()[window.word(place)].pid
            if number == signal.SIGSTOP:
                stop(victim, window)
            else:
                os.kill(victim, number)
            log.append(value)
            assert select.select([reads], [], [], PATIENCE)[0]
            assert os.read(reads, 1) == value
            if number == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)
    finally:
        observer.close()
        for one in started:
            one.__exit__(None, None, None)
        os.close(reads)
        os.close(writes)


def test_a_place_that_is_not_renewed_is_taken(log: Any) -> None:
    log.append_many([b"a", b"b", b"c"])
    workers = [log.tasks("t") for _ in range(3)]
    windows = [one._sources[0].window for one in workers]
    assert [window.stand_watch(PATIENCE_NS) == words.WATCHES for window in windows] == [True, True, False]
    windows[2].set_word(FIRST + 1, 1)  # as if it had been renewed long ago
    assert windows[2].stand_watch(PATIENCE_NS) == words.WATCHES
    windows[2].set_word(SECOND + 1, words.NONE)  # as after a restart of the machine
    assert windows[0].stand_watch(PATIENCE_NS) == words.WATCHES
    assert (windows[0].word(FIRST), windows[0].word(SECOND)) == (windows[2].owner, windows[0].owner)
    for one in workers:
        one.close()
    assert observed(log) == (0, 0)


def observed(log: Any) -> tuple[int, int]:
    with log.tasks("t") as one:
        window = one._sources[0].window
        return window.word(FIRST), window.word(SECOND)
