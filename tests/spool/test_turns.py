"""Asking for the append lock, being woken when it is released, and for how long its keeper may go on."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import closing
from types import ModuleType

import pytest
from faults import ClockPort
from rings import Ring

from kvspool import _frames_py as frames
from kvspool import errors, locks, system
from kvspool.descriptor import Descriptor
from kvspool.spool import format, turns

MakeRing = Callable[..., Ring]
LONG = 10**12  # ns that no test lasts


@pytest.fixture
def ring(make_ring: MakeRing, twin: ModuleType) -> Ring:
    return make_ring(twin)


@pytest.fixture
def other(ring: Ring) -> Iterator[int]:
    """Another open file description of the ring's lock."""
    fd = os.open(f"/proc/self/fd/{ring.lock_file}", os.O_RDWR)
    yield fd
    os.close(fd)


def test_a_release_between_asking_and_waiting_is_noticed(ring: Ring) -> None:
    waiter, holder = ring.reader(0, 0), ring.writer()
    seen = waiter.ask()
    assert ring.words[frames.ASKED] == 1
    holder.pass_on()
    assert ring.words[frames.ASKED] == 0
    waiter.wait_for_release(seen, LONG)


@pytest.mark.parametrize("before", [0, 2**32 - 1, 2**64 - 1])
def test_the_count_of_releases_may_begin_anywhere(ring: Ring, before: int) -> None:
    ring.words[frames.RELEASED] = before
    seen = ring.reader(0, 0).ask()
    ring.writer().pass_on()
    ring.reader(0, 0).wait_for_release(seen, LONG)


def test_nobody_releases_and_the_wait_ends_all_the_same(ring: Ring) -> None:
    waiter = ring.reader(0, 0)
    waiter.wait_for_release(waiter.ask(), 1000)
    waiter.wait_for_release(waiter.ask(), 0)
    assert ring.words[frames.ASKED] == 1


def test_a_closed_handle_waits_for_nothing(ring: Ring) -> None:
    waiter = ring.reader(0, 0)
    waiter.close()
    with pytest.raises(errors.Closed):
        waiter.ask()
    with pytest.raises(errors.Closed):
        waiter.wait_for_release(0, LONG)
    waiter.pass_on()


def test_a_waiter_is_patient_before_it_asks(ring: Ring) -> None:
    turn = turns.Turn(ring.reader(0, 0))
    turn.rest(locks.FIRST_PAUSE)
    assert ring.words[frames.ASKED] == 0
    turn.rest(turns.PATIENCE)
    assert ring.words[frames.ASKED] == 1
    ring.writer().pass_on()
    turn.rest(locks.LONGEST_PAUSE)
    assert ring.words[frames.ASKED] == 1, "it asks anew"


def test_whoever_holds_the_lock_for_a_while_wakes_who_asked_meanwhile(ring: Ring, other: int) -> None:
    waiter = ring.reader(0, 0)
    file = Descriptor.__new__(Descriptor)  # of a file in memory, which has no path
    file.holds = {}
    file._file = select.epoll.fromfd(os.dup(other))
    with closing(file), turns.held(file, ring.reader(0, 0), 0, str):
        seen = waiter.ask()
    waiter.wait_for_release(seen, LONG)
    assert not system.port.is_locked(ring.lock_file, format.APPEND_LOCK)
    seen = waiter.ask()
    ring.writer().append(None, b"x", 0, 0, -1)
    waiter.wait_for_release(seen, LONG)


def put(writer: frames.FrameWriter) -> int:
    writer.begin()
    writer.put_many(None, [b"x"], 0, b"\0", -1)
    writer.publish()
    return writer.next_sequence


def test_the_lock_is_kept_until_another_one_asks_and_a_quantum_is_over(make_ring: MakeRing, interpreted: None) -> None:
    ring = make_ring(frames)
    writer = ring.writer()
    now = 10**18
    with system.replaced(ClockPort(now)):
        assert writer.locked(put, True) == 1
    with system.replaced(ClockPort(now + 10 * frames.QUANTUM)):
        assert writer.append_kept(None, b"x", 0, 0, -1) == 1
    assert writer.is_kept, "nobody asked"
    ring.words[frames.ASKED] = 1
    with system.replaced(ClockPort(now + frames.QUANTUM - 1)):
        assert writer.append_kept(None, b"x", 0, 0, -1) == 2
    assert writer.is_kept, "it has hardly begun"
    with system.replaced(ClockPort(now + frames.QUANTUM)):
        assert writer.append_kept(None, b"x", 0, 0, -1) == 3
    assert not writer.is_kept
    assert ring.words[frames.ASKED] == 0
    assert writer.append_kept(None, b"x", 0, 0, -1) == frames.BUSY


def test_a_clock_that_is_set_back_makes_no_quantum_longer(make_ring: MakeRing, interpreted: None) -> None:
    ring = make_ring(frames)
    writer = ring.writer()
    with system.replaced(ClockPort(10**18)):
        writer.locked(put, True)
    ring.words[frames.ASKED] = 1
    with system.replaced(ClockPort(10**17)):
        writer.append_kept(None, b"x", 0, 0, -1)
    assert not writer.is_kept


def test_who_gave_way_waits_until_the_other_one_has_had_the_lock(make_ring: MakeRing, interpreted: None) -> None:
    ring = make_ring(frames)
    writer, slept = ring.writer(), []

    class Sleeping(ClockPort):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    for is_taken in (False, True):
        with system.replaced(Sleeping(0, 0, frames.QUANTUM)):
            writer.locked(put, True)
            ring.words[frames.ASKED] = 1
            writer.append_kept(None, b"x", 0, 0, -1)
            assert not writer.is_kept
            if is_taken:
                ring.writer().pass_on()
            writer.let_others()
            writer.let_others()
            assert round(sum(slept) * 1e9) == (0 if is_taken else frames.QUANTUM)
            slept.clear()


def test_work_that_has_to_wait_or_fails_gives_a_kept_lock_back(ring: Ring, other: int) -> None:
    writer = ring.writer()

    def fail(_: object) -> None:
        assert system.port.is_locked(other, format.APPEND_LOCK)
        raise ZeroDivisionError

    assert writer.locked(put, True) == 1
    assert writer.is_kept
    assert writer.locked(put) == 2
    assert writer.is_kept
    assert writer.locked(lambda _: False) is False
    assert not writer.is_kept
    writer.locked(put, True)
    with pytest.raises(ZeroDivisionError):
        writer.locked(fail)
    assert not writer.is_kept
    assert not system.port.is_locked(other, format.APPEND_LOCK)


def test_nothing_gives_the_lock_up_in_the_midst_of_the_work(ring: Ring, other: int) -> None:
    writer = ring.writer()

    def work(_: object) -> bool:
        writer.give_up()
        assert writer.append(None, b"x", 0, 0, -1) == frames.BUSY
        assert writer.append_kept(None, b"x", 0, 0, -1) == frames.BUSY
        assert system.port.is_locked(other, format.APPEND_LOCK)
        return True

    for _ in range(2):
        assert writer.locked(work, True)
        assert writer.is_kept
    writer.give_up()
    writer.give_up()
    assert not system.port.is_locked(other, format.APPEND_LOCK)


def test_closing_gives_a_kept_lock_up(ring: Ring, other: int) -> None:
    writer = ring.writer()
    writer.locked(put, True)
    writer.close()
    assert not system.port.is_locked(other, format.APPEND_LOCK)
    writer.give_up()
