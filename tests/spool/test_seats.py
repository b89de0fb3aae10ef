"""Seats: a reader of one log sleeps on a semaphore of its own; none is left behind that the next one can't use."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import posix_ipc
import pytest
from children import in_child, start

import kvspool
from kvspool import Spool, system
from kvspool.spool import format, seats


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


class Asleep(system.Port):
    """Says when somebody sleeps on a semaphore, and lets nothing but a post wake him."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeping = threading.Event()

    def wait_semaphore(self, semaphore: Any, timeout: float) -> None:
        self.sleeping.set()
        semaphore.acquire(60)


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


def test_a_sleeper_is_woken_by_the_post_alone(log: Spool) -> None:
    port, got = Asleep(), []
    with system.replaced(port), closing(log.follow(limit=3)) as following:
        thread = threading.Thread(target=lambda: got.extend(following))
        thread.start()
        for at in range(3):
            assert port.sleeping.wait(30)
            port.sleeping.clear()
            log.append(b"%d" % at)
        thread.join()
    assert [record.value for record in got] == [b"0", b"1", b"2"]
    assert semaphores(log) == set()


def test_a_sleeper_that_another_thread_closes_wakes_up_and_is_over(log: Spool) -> None:
    port, got = Asleep(), ["not over"]
    with system.replaced(port):
        following = log.follow()
        thread = threading.Thread(target=lambda: got.__setitem__(slice(None), following))
        thread.start()
        assert port.sleeping.wait(30)
        following.close()
        thread.join()
    assert got == []
    assert semaphores(log) == set()
    assert log.append(b"goes on") == 0


def test_a_writer_opens_the_new_semaphore_of_a_seat_that_was_taken_anew(log: Spool) -> None:
    for at in range(3):
        port, got = Asleep(), []
        with system.replaced(port), closing(log.follow("latest", limit=1)) as following:
            thread = threading.Thread(target=lambda got=got, following=following: got.extend(following))
            thread.start()
            assert port.sleeping.wait(30)
            log.append(b"%d" % at)  # the same handle all the time, which knows the semaphore of before
            thread.join()
        assert [record.value for record in got] == [b"%d" % at]


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
        seat._semaphore.acquire(0)
    seat.leave()
    assert semaphores(log) == set()


def test_a_forked_child_takes_a_seat_of_its_own_and_leaves_its_parents_alone(log: Spool) -> None:
    log.append(b"first")
    with closing(log.follow(timeout=0)) as following:
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
