"""The threads of a listener: short work is done by one at a time, and work that takes long holds up nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest
from shipping import PATIENCE, eventually

from hub.server import worker_pool
from hub.server.worker_pool import WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    one = WorkerPool(4, "tested")
    yield one
    one.shutdown()


def blocked(pool: WorkerPool) -> tuple[Future[bool], threading.Event, threading.Event]:
    """Submit work that waits. Return its future, an event that it sets at its begin, and the one for which it waits."""
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end.wait(PATIENCE)

    return pool.submit(work), has_begun, may_end


def test_short_work_is_done_by_one_thread_at_a_time_in_its_order(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "QUICK", PATIENCE)
    inside, order, overlaps = threading.Lock(), [], []

    def work(number: int) -> int:
        if not inside.acquire(blocking=False):
            overlaps.append(number)
            return number
        order.append(number)
        threading.Event().wait(0.0001)
        inside.release()
        return number

    found = [pool.submit(work, number) for number in range(500)]
    assert [one.result(PATIENCE) for one in found] == list(range(500))
    assert (order, overlaps) == (list(range(500)), [])


def test_work_that_takes_long_holds_up_no_other_while_there_is_a_thread(pool: WorkerPool) -> None:
    slow = [blocked(pool) for _ in range(3)]
    for _, has_begun, _ in slow:
        assert has_begun.wait(PATIENCE)
    assert [pool.submit(pow, number, 2).result(PATIENCE) for number in range(100)] == [number**2 for number in range(100)]
    last, late = blocked(pool), pool.submit(pow, 3, 2)
    assert last[1].wait(PATIENCE)
    assert not late.done(), "there are only four threads"
    slow[0][2].set()
    assert late.result(PATIENCE) == 9
    for future, _, may_end in (*slow, last):
        may_end.set()
        assert future.result(PATIENCE)


def test_work_that_comes_while_a_thread_watches_the_last_one_waits_for_nothing(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watching thread that is not needed any more must not be counted as one that takes the next work."""
    monkeypatch.setattr(worker_pool, "QUICK", 10 * PATIENCE)
    for _ in range(50):
        first, has_begun, may_end = blocked(pool)
        assert has_begun.wait(PATIENCE)
        second = pool.submit(pow, 2, 2)  # a thread watches from now on, for long
        may_end.set()
        assert (first.result(PATIENCE), second.result(PATIENCE)) == (True, 4)
        assert pool.submit(pow, 3, 2).result(PATIENCE) == 9


def test_an_error_reaches_the_caller_and_ends_no_thread(pool: WorkerPool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(PATIENCE)
    with pytest.raises(SystemExit):
        pool.submit(exit, 1).result(PATIENCE)
    assert pool.submit(divmod, 7, 2).result(PATIENCE) == (3, 1)


def test_cancelled_work_is_not_begun(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "QUICK", PATIENCE)
    first, has_begun, may_end = blocked(pool)
    assert has_begun.wait(PATIENCE)
    called: list[int] = []
    second, third = pool.submit(called.append, 2), pool.submit(called.append, 3)
    assert second.cancel()
    may_end.set()
    third.result(PATIENCE)
    assert first.result() and called == [3]


def test_a_pool_that_is_shut_down_does_what_it_has_and_takes_no_more() -> None:
    pool = WorkerPool(2, "tested")
    found = [pool.submit(pow, number, 2) for number in range(100)]
    pool.shutdown()
    assert [one.result() for one in found] == [number**2 for number in range(100)]
    with pytest.raises(RuntimeError):
        pool.submit(pow, 2, 2)


def test_a_pool_that_is_shut_down_may_drop_work() -> None:
    pool = WorkerPool(1, "tested")
    first, has_begun, may_end = blocked(pool)
    assert has_begun.wait(PATIENCE)
    second = pool.submit(pow, 2, 2)
    pool.shutdown(wait=False, cancel_futures=True)
    may_end.set()
    assert first.result(PATIENCE)
    with pytest.raises(CancelledError):
        second.result()


def test_the_threads_of_a_pool_that_is_shut_down_while_work_waits_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "QUICK", 0.0)
    pool = WorkerPool(3, "tested")
    many = [blocked(pool) for _ in range(3)]
    for _, has_begun, _ in many:
        assert has_begun.wait(PATIENCE)
    for _, _, may_end in many:
        may_end.set()
    eventually(lambda: pool._idle == 3)
    monkeypatch.setattr(worker_pool, "QUICK", 10 * PATIENCE)
    first, has_begun, may_end = blocked(pool)
    assert has_begun.wait(PATIENCE)
    last = pool.submit(pow, 3, 2)  # one thread watches the first work now, and another one waits without an end
    eventually(lambda: pool._is_watched)
    pool.shutdown(wait=False)
    threading.Event().wait(0.1)  # both have found that this work may not begin yet
    may_end.set()
    assert (first.result(PATIENCE), last.result(PATIENCE)) == (True, 9)
    for thread in pool._threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_work_is_done_by_fewer_threads_where_the_system_permits_no_more(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="permits no thread"):
            pool.submit(pow, 2, 2)
    first, has_begun, may_end = blocked(pool)
    assert has_begun.wait(PATIENCE)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        second = pool.submit(pow, 2, 2)
    assert not second.done()
    may_end.set()
    assert (first.result(PATIENCE), second.result(PATIENCE)) == (True, 4)
    slow = [blocked(pool) for _ in range(4)]
    for _, has_begun, _ in slow:
        assert has_begun.wait(PATIENCE), "it starts threads again"
    for future, _, may_end in slow:
        may_end.set()
        assert future.result(PATIENCE)


def test_many_callers_get_their_results(pool: WorkerPool) -> None:
    def caller(number: int, results: list[int]) -> None:
        results += (pool.submit(pow, number, step % 5).result(PATIENCE) for step in range(200))

    all_results: list[list[int]] = [[] for _ in range(6)]
    threads = [threading.Thread(target=caller, args=(number, results)) for number, results in enumerate(all_results)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert all_results == [[pow(number, step % 5) for step in range(200)] for number in range(6)]
    assert len(pool._threads) <= 4
