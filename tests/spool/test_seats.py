"""Seats: a reader of one log sleeps on a semaphore of its own; none is left behind that the next one can't use."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
from children import Died, in_child, start

import kvspool
from kvspool import Spool, errors, system
from kvspool import _frames_py as frames
from kvspool.cli import main
from kvspool.spool import cursor, format, seats


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        yield log


def semaphores(log: Spool) -> set[int]:
    """Return the seats whose semaphores the system has."""
    prefix = f"sem.kvspool.{log.log_id.hex()}."
    return {int(name.removeprefix(prefix)) for name in os.listdir("/dev/shm") if name.startswith(prefix)}


def take(log: Spool) -> seats.Seat | None:
    assert log._pair is not None
    return seats.take(log._pair)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but a bell end a sleep."""
    monkeypatch.setattr(cursor, "POLL", 60.0)


def await_sleeper(log: Spool, seat: int = 1) -> None:
    """Return when the reader in a seat has asked to be woken: what it does next is to sleep."""
    assert log._pair is not None
    deadline = time.monotonic() + 30
    while not log._pair.control[frames.WANTED * 8 + seat]:
        assert time.monotonic() < deadline, "the reader never asked to be woken"
        time.sleep(0.001)


def in_thread(following: Iterator[Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread that follows, and return it and what it has got."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(following))
    thread.start()
    return thread, got


def test_six_readers_have_a_seat_and_the_seventh_sleeps_on_inotify(log: Spool) -> None:
    taken = [take(log) for _ in range(6)]
    assert [seat.number for seat in taken if seat] == list(format.SEATS)
    assert semaphores(log) == set(format.SEATS)
    assert take(log) is None
    assert taken[2] is not None
    taken[2].leave()
    assert semaphores(log) == {1, 2, 4, 5, 6}
    again = take(log)
    assert again is not None and again.number == 3
    for seat in (*taken, again):
        assert seat is not None
        seat.leave()
    assert semaphores(log) == set()


def test_a_sleeper_is_woken_by_the_post_alone(patient: None, log: Spool) -> None:
    with closing(log.follow(limit=3)) as following:
        thread, got = in_thread(following)
        for at in range(3):
            await_sleeper(log)
            log.append(b"%d" % at)
        thread.join()
    assert [record.value for record in got] == [b"0", b"1", b"2"]
    assert semaphores(log) == set()


@pytest.mark.parametrize("append", ["append", "append_many"])
def test_a_writer_that_knows_the_bell_needs_nothing_else_to_ring_it(patient: None, log: Spool, append: str) -> None:
    class Deaf(system.Port):
        def open_semaphore(self, name: str) -> Any:
            raise AssertionError("it was open already")

    with closing(log.follow(limit=3)) as following:
        thread, got = in_thread(following)
        await_sleeper(log)
        log.append(b"first")
        for _ in range(2):
            await_sleeper(log)
            with system.replaced(Deaf()):
                getattr(log, append)(b"x" if append == "append" else [b"x"])
        thread.join()
    assert len(got) == 3


def test_a_sleeper_that_another_thread_closes_wakes_up_and_is_over(patient: None, log: Spool) -> None:
    following = log.follow()
    thread, got = in_thread(following)
    await_sleeper(log)
    following.close()
    thread.join()
    assert got == []
    assert semaphores(log) == set()
    assert log.append(b"goes on") == 0


def test_a_writer_opens_the_new_semaphore_of_a_seat_that_was_taken_anew(patient: None, log: Spool) -> None:
    for at in range(3):
        with closing(log.follow("latest", limit=1)) as following:
            thread, got = in_thread(following)
            await_sleeper(log)
            log.append(b"%d" % at)  # the same handle all the time, which knows the semaphore of before
            thread.join()
        assert [record.value for record in got] == [b"%d" % at]


def dozing(log: Spool, **how: Any) -> tuple[cursor.Following, threading.Thread, list[Any]]:
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
    next_batch = cursor.Following._next_batch
    monkeypatch.setattr(cursor.Following, "_next_batch", lambda self, most: looks.append(most) or next_batch(self, most))
    following, thread, got = dozing(log, limit=20)
    for at in range(2, 20):
        await_sleeper(log)
        log.append(b"%d" % at)
    thread.join()
    following.close()
    assert [record.value for record in got] == [b"%d" % at for at in range(20)]
    assert len(looks) == 1


def test_who_dozes_is_over_when_another_thread_closes_it(patient: None, log: Spool) -> None:
    following, thread, got = dozing(log)
    following.close()
    thread.join()
    assert [record.sequence for record in got] == [0, 1]
    assert semaphores(log) == set()


def test_who_dozes_is_told_exactly_what_was_overwritten_meanwhile(patient: None, log: Spool) -> None:
    following, thread, got = dozing(log, on_gap="yield", limit=4)
    assert log._pair is not None
    assert following._seat is not None
    while not following._seat.bell.sleepers:  # it asks first, and looks once more
        time.sleep(0.001)
    log._pair.control[frames.WANTED * 8 + 1] = 0  # nobody wakes it before all of that is written
    last = log.append_many([bytes(1000)] * 200)[-1]
    first = log.stats().first_sequence
    log._pair.control[frames.WANTED * 8 + 1] = 1
    log.append(b"awake")
    thread.join()
    following.close()
    assert isinstance(got[2], kvspool.Gap)
    assert (got[2].first, got[2].last, got[2].reason) == (2, got[3].sequence - 1, "overrun")
    assert first <= got[3].sequence <= last


def test_who_dozes_goes_on_in_the_new_files_of_a_log_that_is_resized(log: Spool) -> None:
    following, thread, got = dozing(log, limit=4)
    kvspool.resize(log.path, 131072)
    log.append(b"2")
    log.append(b"3")
    thread.join()
    following.close()
    assert [(record.sequence, record.value) for record in got] == [(at, b"%d" % at) for at in range(4)]


def test_who_dozes_ends_quietly_after_the_timeout(log: Spool) -> None:
    following, thread, got = dozing(log, timeout=0.6)
    thread.join()
    following.close()
    assert len(got) == 2
    assert log.append(b"goes on") == 2


@pytest.mark.parametrize("what", ["deleted", "closed"])
def test_who_dozes_learns_that_the_log_has_gone(tmp_path: Path, what: str) -> None:
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


def test_a_signal_handler_may_take_records_from_the_iterator_that_dozes(patient: None, log: Spool) -> None:
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


def test_closing_while_a_seat_is_taken_leaves_no_seat_taken(log: Spool) -> None:
    handle = kvspool.open(log.path)

    class Closing(system.Port):
        def make_semaphore(self, name: str, mode: int) -> Any:
            handle.close()  # as another thread would, just then
            return super().make_semaphore(name, mode)

    with closing(handle.follow()) as following, system.replaced(Closing()), pytest.raises(errors.Closed):
        next(following)
    seat = take(log)
    assert seat is not None
    assert seat.number == 1
    seat.leave()


def test_the_seat_of_a_killed_reader_is_free_and_its_semaphore_replaced(log: Spool) -> None:
    def be_killed() -> None:
        seat = take(log)
        assert seat is not None and seat.number == 1
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Exception, match="SIGKILL"):
        in_child(be_killed, 30)
    assert semaphores(log) == {1}
    posix_ipc.Semaphore(f"/kvspool.{log.log_id.hex()}.1").release()  # a post that it never took
    seat = take(log)
    assert seat is not None and seat.number == 1
    assert semaphores(log) == {1}
    with pytest.raises(posix_ipc.BusyError):
        posix_ipc.Semaphore(f"/kvspool.{log.log_id.hex()}.1").acquire(0)
    seat.leave()
    assert semaphores(log) == set()


def killed_in_their_seats(log: Spool, count: int) -> None:
    """Leave the semaphores of so many readers behind, that were killed in their sleep."""
    sleepers = [start(lambda: list(log.follow("latest")), 60) for _ in range(count)]
    for number in range(1, count + 1):
        await_sleeper(log, number)
    for wait in sleepers:
        os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(Died, match="SIGKILL"):
            wait()


def test_whoever_takes_a_seat_removes_what_killed_readers_left_in_the_others(log: Spool) -> None:
    killed_in_their_seats(log, 4)
    assert semaphores(log) == {1, 2, 3, 4}
    with closing(log.follow(timeout=0.001)) as following:
        assert list(following) == []
        assert semaphores(log) == {1}
    assert semaphores(log) == set()


def test_seats_are_cleared_of_the_dead_and_never_of_the_living(log: Spool) -> None:
    stays = take(log)
    assert stays is not None and stays.number == 1
    wait = start(lambda: list(log.follow("latest")), 60)
    await_sleeper(log, 2)
    assert seats.clear(log._live()) == []
    os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(Died, match="SIGKILL"):
        wait()
    assert semaphores(log) == {1, 2}
    assert seats.clear(log._live()) == [2]
    assert semaphores(log) == {1}
    assert seats.clear(log._live()) == []
    stays.leave()


def test_the_doctor_removes_what_killed_readers_left(log: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    killed_in_their_seats(log, 2)
    assert semaphores(log) == {1, 2}
    assert main(["doctor", str(log.path)]) == 0
    assert "2 killed readers" in capsys.readouterr().out
    assert semaphores(log) == set()


def test_a_reader_that_looks_before_it_sleeps_needs_no_bell(patient: None, log: Spool) -> None:
    with closing(log.follow(limit=50, spin=60)) as following:
        thread, got = in_thread(following)
        for at in range(50):
            log.append(b"%d" % at)
        thread.join()
        assert following._seat is None, "it never slept"
    assert [record.value for record in got] == [b"%d" % at for at in range(50)]


def test_a_reader_that_looked_in_vain_goes_to_sleep_and_ends_in_time(log: Spool) -> None:
    with closing(log.follow(timeout=0.02, spin=0.001)) as following:
        assert list(following) == []
        assert following._seat is not None
    with pytest.raises(ValueError, match="spin"):
        log.follow(spin=-1)


def test_a_reader_that_looks_is_over_when_another_thread_closes_it(log: Spool) -> None:
    following = log.follow(spin=60)
    thread, got = in_thread(following)
    system.port.sleep(0.01)
    following.close()
    thread.join()
    assert got == []


def test_a_forked_child_takes_a_seat_of_its_own_and_leaves_its_parents_alone(log: Spool) -> None:
    log.append(b"first")
    with closing(log.follow(timeout=0.001)) as following:
        assert [record.value for record in following] == [b"first"]
        assert following._seat is not None and following._seat.number == 1

        def follow_too() -> int:
            assert list(following) == []
            assert following._seat is not None
            number = following._seat.number
            following.close()
            return number

        assert in_child(follow_too, 30) == 2
        assert semaphores(log) == {1}
        assert take_number_in_child(log) == 2, "the parent's seat is still locked"
    assert semaphores(log) <= {2}


def take_number_in_child(log: Spool) -> int:
    def number() -> int:
        seat = take(log)
        assert seat is not None
        seat.leave()
        return seat.number

    return int(in_child(number, 30))  # type: ignore[call-overload]


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
    assert semaphores(log) == set()


def test_without_the_right_to_a_semaphore_nobody_fails(log: Spool) -> None:
    class Forbidden(system.Port):
        def open_semaphore(self, name: str) -> None:
            return None

    with closing(log.follow(timeout=0)) as following:
        assert list(following) == []
        with system.replaced(Forbidden()):
            log.append(b"x")
        assert [record.value for record in following] == [b"x"]
