"""Readers of one log sleep on a word of it: one wake-up reaches all of them, and a killed one leaves nothing to clean up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
from children import Died, start

import kvspool
from kvspool import Spool, errors, system
from kvspool.engine import iteration
from kvspool.engine.wakeups import SLICE
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import TWIN
from kvspool.spool.format import SYNCED as SYNCED_WORD

ASLEEP = 1 << 8 * frames.SLEEPS  # in the word `wanted`


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        yield log


def word(log: Spool, at: int) -> int:
    return log._live().reader(0, 0).word(at)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but a bell end a sleep."""
    monkeypatch.setattr(iteration, "POLL", 60.0)


def await_sleeper(log: Spool) -> None:
    """Return when a reader has asked to be woken: what it does next is to sleep."""
    deadline = time.monotonic() + 30
    while not word(log, frames.WANTED) & ASLEEP:
        assert time.monotonic() < deadline, "the reader never asked to be woken"
        time.sleep(0.001)


def sleepers_of(log: Spool, count: int, limit: int) -> list[Any]:
    """Start processes that follow a log from now on, and return the functions that wait for what they got; all of them sleep."""
    name = f"/kvspool.test.{os.getpid()}"
    ready = posix_ipc.Semaphore(name, posix_ipc.O_CREX, initial_value=0)
    try:

        def follow() -> list[bytes]:
            following = log.follow("latest", limit=limit)
            ready.release()
            return [record.value for record in following]

        sleepers = [start(follow, 60) for _ in range(count)]
        for _ in sleepers:
            ready.acquire(30)
    finally:
        ready.close()
        posix_ipc.unlink_semaphore(name)
    for sleeper in sleepers:
        await_state(sleeper.pid, "sleeping")
    await_sleeper(log)
    return sleepers


def await_state(pid: int, state: str) -> None:
    """Return when a process is in a state of the kernel: "sleeping", "stopped"."""
    deadline = time.monotonic() + 30
    while system.port.process_state(pid) != state:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_thread(following: Iterator[Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread that follows, and return it and what it has got."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(following))
    thread.start()
    return thread, got


@pytest.mark.parametrize("append", ["append", "append_many"])
def test_a_sleeper_is_woken_by_the_ring_alone(patient: None, log: Spool, append: str) -> None:
    with closing(log.follow(limit=3)) as following:
        thread, got = in_thread(following)
        for at in range(3):
            await_sleeper(log)
            value = b"%d" % at
            getattr(log, append)(value if append == "append" else [value])
        thread.join()
    assert [record.value for record in got] == [b"0", b"1", b"2"]
    assert word(log, frames.WANTED) == 0, "the next append has no process to wake"


def test_a_sleeper_that_another_thread_closes_wakes_up_and_is_over(patient: None, log: Spool) -> None:
    following = log.follow()
    thread, got = in_thread(following)
    await_sleeper(log)
    following.close()
    thread.join()
    assert got == []
    assert log.append(b"goes on") == 0


def waiting(log: Spool, **how: Any) -> tuple[iteration.Following, threading.Thread, list[Any]]:
    """Follow in a thread that has got two records, and sleeps in the step in which it looked for the third."""
    following = log.follow(**how)
    thread, got = in_thread(following)
    for at in range(2):
        await_sleeper(log)
        log.append(b"%d" % at)
    await_sleeper(log)
    return following, thread, got


def test_records_that_come_one_after_the_other_need_no_look_at_anything_else(
    patient: None, log: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    next_batch = iteration.Following._next_batch
    monkeypatch.setattr(iteration.Following, "_next_batch", lambda self, most: looks.append(most) or next_batch(self, most))
    following, thread, got = waiting(log, limit=20)
    for at in range(2, 20):
        await_sleeper(log)
        log.append(b"%d" % at)
    thread.join()
    following.close()
    assert [record.value for record in got] == [b"%d" % at for at in range(20)]
    assert len(looks) == 1


def test_a_waiting_follower_is_over_when_another_thread_closes_it(patient: None, log: Spool) -> None:
    following, thread, got = waiting(log)
    following.close()
    thread.join()
    assert [record.sequence for record in got] == [0, 1]


class Telling(system.Port):
    """Says when the interpreted twin sleeps. The compiled one asks and sleeps in one step, in which no other thread runs Python."""

    def __init__(self) -> None:
        self.is_asleep = threading.Event()
        if TWIN == "compiled":
            self.is_asleep.set()

    def wait_word(self, words: Any, at: int, expected: int, timeout: float) -> None:
        self.is_asleep.set()
        super().wait_word(words, at, expected, timeout)


def test_a_waiting_follower_learns_exactly_what_was_overwritten_meanwhile(patient: None, log: Spool) -> None:
    following, thread, got = waiting(log, on_gap="yield", limit=4)
    control = log._live().control
    with system.replaced(Telling()) as port:
        if TWIN != "compiled":  # a sleep that this port sees
            log._live().reader(0, 0).rouse()
        assert port.is_asleep.wait(30)  # type: ignore[attr-defined]
        control[frames.WANTED * 8 + frames.SLEEPS] = 0  # no append wakes it before all of that is written
        last = log.append_many([bytes(1000)] * 200)[-1]
        first = log.stats().first_sequence
        control[frames.WANTED * 8 + frames.SLEEPS] = 1
        log.append(b"awake")
        thread.join()
    following.close()
    assert isinstance(got[2], kvspool.Gap)
    assert (got[2].first, got[2].last, got[2].reason) == (2, got[3].sequence - 1, "overrun")
    assert first <= got[3].sequence <= last


def test_a_waiting_follower_continues_in_the_new_files_of_a_log_that_is_resized(log: Spool) -> None:
    following, thread, got = waiting(log, limit=4)
    kvspool.resize(log.path, 131072)
    log.append(b"2")
    log.append(b"3")
    thread.join()
    following.close()
    assert [(record.sequence, record.value) for record in got] == [(at, b"%d" % at) for at in range(4)]


def test_a_waiting_follower_ends_quietly_after_the_timeout(log: Spool) -> None:
    following, thread, got = waiting(log, timeout=0.6)
    thread.join()
    following.close()
    assert len(got) == 2
    assert log.append(b"goes on") == 2


@pytest.mark.parametrize("what", ["deleted", "closed"])
def test_a_waiting_follower_learns_that_the_log_has_gone(tmp_path: Path, what: str) -> None:
    log = kvspool.create(tmp_path / "gone", capacity=65536)
    following = log.follow()
    raised: list[type[errors.KvspoolError]] = []

    def follow() -> None:
        try:
            list(following)
        except errors.KvspoolError as error:
            raised.append(type(error))

    thread = threading.Thread(target=follow)
    thread.start()
    for at in range(2):
        await_sleeper(log)
        log.append(b"%d" % at)
    await_sleeper(log)
    if what == "deleted":
        shutil.rmtree(log.path)
    else:
        log.close()
    thread.join()
    following.close()
    log.close()
    assert raised == [errors.LogVanished if what == "deleted" else errors.Closed]


def test_a_signal_ends_the_sleep_and_its_handlers_exception_comes_through(log: Spool) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    def when_asleep() -> None:
        await_sleeper(log)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with closing(log.follow()) as following:
            log.append(b"first")
            assert next(following).value == b"first"
            thread = threading.Thread(target=when_asleep)
            thread.start()
            with pytest.raises(Interrupt):
                next(following)
            thread.join()
            log.append(b"second")
            assert next(following).value == b"second"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_take_records_from_the_iterator_that_waits(patient: None, log: Spool) -> None:
    polled: list[bytes] = []
    taken: list[bytes] = []

    def handler(*_: object) -> None:
        log.append(b"2")
        polled.extend(record.value for record in following.poll())
        for value in (b"3", b"4"):
            log.append(value)
        taken.append(next(following).value)
        log.append(b"5")

    def feed() -> None:
        for at in range(2):
            await_sleeper(log)
            log.append(b"%d" % at)
        await_sleeper(log)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=feed)
    try:
        with closing(log.follow()) as following:
            thread.start()
            got = [next(following).value for _ in range(4)]
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert (polled, taken, got) == ([b"2"], [b"3"], [b"0", b"1", b"4", b"5"])


def test_a_thread_that_wakes_watchers_leaves_sleepers_to_the_thread_that_published(log: Spool) -> None:
    def work(writer: Any) -> bool:
        writer.begin()
        writer.put_many(None, [b"value"], 0, None, -1, 40)
        writer.publish()
        log.ring(writer)  # another thread of this handle
        return True

    log.append(b"so that it is open for writing")
    log._live().reader(0, 0).request_wake_up(frames.SLEEPS)
    rings = word(log, frames.RINGS)
    log._locked(work, 5)
    assert word(log, frames.RINGS) == rings + 1


def test_one_append_wakes_every_sleeping_reader_whatever_their_number(patient: None, log: Spool) -> None:
    readers = [kvspool.open(log.path) for _ in range(20)]
    followings = [one.follow("latest", limit=2) for one in readers]
    sleepers = sleepers_of(log, 4, limit=2)
    threads = [in_thread(following) for following in followings]
    rings = word(log, frames.RINGS)
    log.append(b"first")
    assert word(log, frames.RINGS) == rings + 1
    while not all(len(got) == 1 for _, got in threads):
        time.sleep(0.001)
    log.append(b"second")
    for thread, got in threads:
        thread.join()
        assert [record.value for record in got] == [b"first", b"second"]
    for sleeper in sleepers:
        assert sleeper() == [b"first", b"second"]
    for one in readers:
        one.close()


def test_killed_and_stopped_sleepers_cost_one_wake_up(log: Spool) -> None:
    sleepers = sleepers_of(log, 3, limit=51)
    for sleeper in sleepers[:2]:
        os.kill(sleeper.pid, signal.SIGKILL)
        with pytest.raises(Died, match="SIGKILL"):
            sleeper()
    stopped = sleepers[2].pid
    os.kill(stopped, signal.SIGSTOP)
    await_state(stopped, "stopped")
    rings = word(log, frames.RINGS)
    for at in range(50):
        log.append(b"%d" % at)
    assert word(log, frames.RINGS) == rings + 1
    os.kill(stopped, signal.SIGCONT)
    log.append(b"50")
    assert sleepers[2]() == [b"%d" % at for at in range(51)]


@pytest.mark.parametrize("rings", [0, 1, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF])
def test_whatever_the_words_say_no_record_is_lost(log: Spool, rings: int) -> None:
    with closing(log.follow(limit=2)) as following:
        words = log._live().control.cast("Q")
        words[frames.WANTED] = 0xFFFFFFFFFFFFFFFF
        words[frames.RINGS] = rings
        thread, got = in_thread(following)
        await_sleeper(log)
        log.append(b"0")
        await_sleeper(log)
        words[frames.WANTED] = 0  # no wake-up is asked for: then the sleeper looks again after a while
        log.append(b"1")
        thread.join()
        words.release()
    assert [record.value for record in got] == [b"0", b"1"]


def test_a_reader_that_may_not_write_sleeps_for_a_moment_at_a_time(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvspool.open(log.path) as reader:
        files = reader._live()
        reader_of = files.reader
        ring, control = files.ring, files.control.toreadonly()
        monkeypatch.setattr(files, "reader", lambda *place: frames_of(reader_of(0, 0))(ring, control, files.seed, *place))
        with closing(reader.follow(limit=3)) as following:
            thread, got = in_thread(following)
            for at in range(3):
                log.append(b"%d" % at)
                while thread.is_alive() and len(got) <= at and at < 2:
                    time.sleep(0.001)
            thread.join()
    assert [record.value for record in got] == [b"0", b"1", b"2"]
    assert word(log, frames.WANTED) == 0


def frames_of(reader: Any) -> Any:
    return type(reader)


OTHER_TWIN = """
import sys, kvspool
from kvspool.kernel import frames
from kvspool.engine import iteration
iteration.POLL = 60.0
with kvspool.open(sys.argv[1]) as log:
    print(frames.TWIN, flush=True)
    if sys.argv[2] == "append":
        log.append(b"record")
    else:
        print(next(log.follow("latest")).value, flush=True)
"""


@pytest.mark.parametrize("what", ["append", "follow"])
def test_each_twin_wakes_the_other(patient: None, log: Spool, what: str) -> None:
    environment = {**os.environ, "KVSPOOL_NO_EXTENSIONS": "1" if TWIN == "compiled" else ""}
    command = [sys.executable, "-W", "ignore", "-c", OTHER_TWIN, str(log.path), what]
    if what == "append":
        with closing(log.follow("latest", limit=1)) as following:
            thread, got = in_thread(following)
            await_sleeper(log)
            said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout
            thread.join()
            assert [record.value for record in got] == [b"record"]
    else:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
            await_sleeper(log)
            log.append(b"record")
            said, _ = other.communicate(timeout=60)
            assert other.returncode == 0
            assert said.endswith("b'record'\n")
    if said.startswith(TWIN):
        pytest.skip("NOT PROVEN HERE: the compiled twin is not built")


def test_a_reader_that_looks_before_it_sleeps_needs_no_bell(patient: None, log: Spool) -> None:
    with closing(log.follow(limit=50, spin=60)) as following:
        thread, got = in_thread(following)
        for at in range(50):
            log.append(b"%d" % at)
        thread.join()
        assert word(log, frames.WANTED) == 0, "it never slept"
    assert [record.value for record in got] == [b"%d" % at for at in range(50)]


def test_a_reader_that_looked_in_vain_goes_to_sleep_and_ends_in_time(log: Spool) -> None:
    with closing(log.follow(timeout=0.02, spin=0.001)) as following:
        assert list(following) == []
        assert word(log, frames.WANTED) & ASLEEP
    with pytest.raises(ValueError, match="spin"):
        log.follow(spin=-1)


def test_a_reader_that_looks_is_over_when_another_thread_closes_it(log: Spool) -> None:
    following = log.follow(spin=60)
    thread, got = in_thread(following)
    system.port.sleep(0.01)
    following.close()
    thread.join()
    assert got == []


def test_a_forked_child_sleeps_and_wakes_as_its_parent_does(patient: None, log: Spool) -> None:
    log.append(b"first")
    with closing(log.follow(limit=3)) as following:
        assert next(following).value == b"first"  # it waits from now on
        child = start(lambda: [record.value for record in following], 60)
        await_sleeper(log)
        thread, got = in_thread(following)
        log.append(b"second")
        await_sleeper(log)
        log.append(b"third")
        thread.join()
        assert child() == [record.value for record in got] == [b"second", b"third"]


def test_readers_in_other_processes_are_all_woken(log: Spool, tmp_path: Path) -> None:
    ready, tell = os.pipe()

    def follow() -> list[bytes]:
        with kvspool.open(log.path) as mine, closing(mine.follow("latest", limit=20)) as following:
            os.write(tell, b"x")
            return [record.value for record in following]

    waits = [start(follow) for _ in range(3)]
    for _ in waits:
        os.read(ready, 1)
    for at in range(20):
        log.append(b"%d" % at)
    for wait in waits:
        assert wait() == [b"%d" % at for at in range(20)]
    os.close(ready)
    os.close(tell)


def test_a_reader_that_spins_forever_is_no_other_one(log: Spool) -> None:
    log.append(b"first")
    with closing(log.follow(limit=2, timeout=5, spin=1e300)) as following:
        assert next(following).value == b"first"
        log.append(b"second")
        assert next(following).value == b"second"


def test_a_spin_ends_although_the_word_of_what_is_on_disk_is_nonsense(log: Spool) -> None:
    log.append(b"first", durable=True)
    with closing(log.follow(isolation="synced", timeout=5)) as following:
        assert next(following).value == b"first"
        kept = word(log, SYNCED_WORD)
        memory = log._live().control.cast("Q")
        memory[SYNCED_WORD] = (1 << 64) - 1
        assert not following.cursor.frames.spin(100_000, SLICE)
        memory[SYNCED_WORD] = kept
        memory.release()


def test_the_spin_is_a_part_of_the_timeout(log: Spool) -> None:
    waits: list[float] = []

    class Recorded(system.Port):
        def wait_word(self, words: memoryview, at: int, expected: int, timeout: float) -> None:
            waits.append(timeout)

    if TWIN == "compiled":
        pytest.skip("the compiled reader sleeps past the port")
    log.append(b"first")
    with system.replaced(Recorded()), closing(log.follow(timeout=0.05, spin=0.05)) as following:
        assert [record.value for record in following] == [b"first"]
    assert all(wait == 0 for wait in waits)
