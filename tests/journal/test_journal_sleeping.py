"""A follower of a journal sleeps until the file is written, and wakes for all that can happen to it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvspool
from kvspool import errors
from kvspool.engine import iteration
from kvspool.engine.wakeups import POLL
from kvspool.journal import Journal

SMALL = 200  # bytes of a segment, which is full after a few records


@pytest.fixture(params=["kvj", "sej", "fflg"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    with kvspool.create(tmp_path / "log", format=request.param) as log:
        assert isinstance(log, Journal)
        yield log


@pytest.fixture
def rolling(tmp_path: Path) -> Iterator[Journal]:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=SMALL) as log:
        assert isinstance(log, Journal)
        yield log


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but an event end a sleep."""
    monkeypatch.setattr(iteration, "POLL", 60.0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an item with each look that followers take at everything."""
    found: list[int] = []
    next_batch = iteration.Following._next_batch
    monkeypatch.setattr(iteration.Following, "_next_batch", lambda self, most: found.append(most) or next_batch(self, most))
    return found


def await_sleep(following: Any) -> None:
    """Return when the follower waits for events of the segment that it reads. The watcher also has a user while it is set up."""
    deadline = time.monotonic() + 30
    waiter = following._waiter
    while waiter._watched != waiter._cursor.base or not waiter._watcher._users:
        assert time.monotonic() < deadline, "the follower never slept"
        time.sleep(0.001)


class Waiting:
    """A follower in a thread, which has got two records, each after a sleep, and sleeps again."""

    def __init__(self, log: Journal, **options: Any) -> None:
        self.got: list[Any] = []
        self.raised: list[BaseException] = []
        self.following: Any = log.follow(**options)
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()
        for at in range(2):
            self.await_items(at)
            log.append(b"%d" % at)
        self.await_items(2)

    def _follow(self) -> None:
        try:
            for item in self.following:
                self.got.append(item)
        except BaseException as error:
            self.raised.append(error)

    def await_items(self, count: int) -> None:
        """Return when the follower has returned so many items, and sleeps."""
        deadline = time.monotonic() + 30
        while len(self.got) < count:
            assert time.monotonic() < deadline, f"the follower has {len(self.got)} items instead of {count}"
            time.sleep(0.001)
        await_sleep(self.following)

    def values(self) -> list[bytes]:
        """Return the followed values, when the follower has ended."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.following.close()
        return [item.value for item in self.got]


def numbers(count: int) -> list[bytes]:
    return [b"%d" % at for at in range(count)]


def test_each_record_wakes_the_follower(patient: None, log: Journal, looks: list[int]) -> None:
    began = time.monotonic()
    waiting = Waiting(log, limit=20)
    for at in range(2, 20):
        waiting.await_items(at)
        log.append(b"%d" % at)
    assert waiting.values() == numbers(20)
    assert [item.sequence for item in waiting.got] == list(range(20))
    # One look at everything, and one more for each half second without a record.
    assert len(looks) <= 1 + 2 * (time.monotonic() - began) / POLL


def test_records_that_come_together_are_all_returned(patient: None, log: Journal) -> None:
    waiting = Waiting(log, limit=5002)
    log.append_many([b"%d" % at for at in range(2, 5002)])
    assert waiting.values() == numbers(5002)


def test_a_record_larger_than_what_is_read_at_once_is_returned(patient: None, log: Journal) -> None:
    waiting = Waiting(log, limit=5)
    large = os.urandom(100_000)
    log.append(large)
    log.append(b"3")
    waiting.await_items(4)
    log.append(b"4")
    assert waiting.values() == [b"0", b"1", large, b"3", b"4"]


def test_a_new_segment_wakes_the_follower(patient: None, rolling: Journal) -> None:
    waiting = Waiting(rolling, limit=60)
    for at in range(2, 60):
        if at % 5:
            waiting.await_items(at)
        rolling.append(b"%d" % at)
    assert waiting.values() == numbers(60)


def test_bytes_of_another_program_wake_the_follower(patient: None, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "model", format="sej") as model, kvspool.create(tmp_path / "log", format="sej") as log:
        assert isinstance(log, Journal)
        assert isinstance(model, Journal)
        model.append_many(numbers(5))
        path = next(tmp_path.glob("log/**/*.jnl"))
        frames = next(tmp_path.glob("model/**/*.jnl")).read_bytes()
        size = len(frames) // 5
        waiting = Waiting(log, limit=5)
        with open(path, "ab", buffering=0) as file:
            for at in range(2 * size, 5 * size, 5):  # frames in pieces
                file.write(frames[at : min(at + 5, 5 * size)])
        assert waiting.values() == numbers(5)


def test_a_record_that_is_damaged_is_reported(patient: None, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        assert isinstance(log, Journal)
        waiting = Waiting(log)
        with open(next(tmp_path.glob("log/**/*.kvj")), "ab", buffering=0) as file:
            file.write(b"\0" * 100)
        waiting.thread.join(60)
        assert [type(error) for error in waiting.raised] == [errors.Corruption]
        assert waiting.values() == numbers(2)


def test_a_segment_that_becomes_shorter_is_reported(log: Journal) -> None:
    waiting = Waiting(log)
    segment = waiting.following.cursor.segments.plain_path(0)
    os.truncate(segment, segment.stat().st_size - 1)
    waiting.thread.join(60)
    assert [type(error) for error in waiting.raised] == [errors.Truncated]
    assert waiting.values() == numbers(2)


@pytest.mark.parametrize("what", ["iteration", "journal"])
def test_closing_ends_the_sleep(patient: None, log: Journal, what: str) -> None:
    waiting = Waiting(log)
    if what == "iteration":
        waiting.following.close()
    else:
        log.close()
    assert waiting.values() == numbers(2)
    assert [type(error) for error in waiting.raised] == ([] if what == "iteration" else [errors.Closed])


def test_a_journal_that_is_deleted_ends_the_sleep(log: Journal) -> None:
    waiting = Waiting(log)
    shutil.rmtree(log.path)
    waiting.thread.join(60)
    assert [type(error) for error in waiting.raised] == [errors.LogVanished]


def test_the_iteration_ends_quietly_after_the_timeout(log: Journal) -> None:
    waiting = Waiting(log, timeout=0.6)
    assert waiting.values() == numbers(2)
    assert log.append(b"goes on") == 2


def test_a_signal_handler_may_take_records_from_the_iterator_that_sleeps(patient: None, log: Journal) -> None:
    polled: list[bytes] = []
    taken: list[bytes] = []
    ready = threading.Event()

    def handler(*_: object) -> None:
        log.append_many([b"2", b"3"])
        polled.extend(record.value for record in following.poll(1))
        taken.append(next(following).value)
        log.append(b"4")
        ready.set()

    def feed() -> None:
        for at in range(2):
            await_sleep(following)
            log.append(b"%d" % at)
            while len(got) <= at:
                time.sleep(0.001)
        await_sleep(following)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        ready.wait(30)
        log.append(b"5")

    got: list[bytes] = []
    following: Any = log.follow(limit=4)
    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=feed)
    thread.start()
    try:
        while (record := next(following, None)) is not None:
            got.append(record.value)
    finally:
        thread.join()
        following.close()
        signal.signal(signal.SIGUSR1, before)
    assert (polled, taken, got) == ([b"2"], [b"3"], [b"0", b"1", b"4"])  # the limit counts the items that `next` has returned
