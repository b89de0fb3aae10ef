"""Following from an event loop: the records that a thread would get, while the loop continues to run; and nothing is left over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from children import in_child, start
from faults import BlindPort, ReadOnlyPort

import kvspool
from kvspool import Gap, Spool, errors, system
from kvspool.engine import eventloops, iteration
from kvspool.engine.following import AsyncFollowing
from kvspool.kernel import frames_py as frames

WANTED = frames.WANTED * 8  # the byte of who sleeps on inotify


@pytest.fixture
def notifiers(open_files: Callable[[], set[str]]) -> Callable[[], set[str]]:
    """Return the inotify descriptors that are open."""
    return lambda: {name for name in open_files() if name.endswith("inotify")}


@pytest.fixture
def run(notifiers: Callable[[], set[str]]) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine, for a minute at most; nothing that it opened may be left, even before its loop is closed."""

    async def guarded(work: Coroutine[Any, Any, Any]) -> Any:
        before = notifiers()
        result = await asyncio.wait_for(work, 60)
        await asyncio.sleep(0)
        assert notifiers() == before
        return result

    return lambda work: asyncio.run(guarded(work))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but an event end a sleep."""
    monkeypatch.setattr(iteration, "POLL", 50.0)
    monkeypatch.setattr(eventloops, "POLL", 50.0)


async def asleep(log: Spool) -> None:
    """Return when a follower has asked for a wake-up by inotify, and the loop is about to sleep."""
    assert log._files is not None
    while not log._files.control[WANTED]:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)


async def values(items: AsyncFollowing) -> list[bytes]:
    return [record.value async for record in items]


def test_a_sleeping_task_is_woken_by_the_event_alone(run: Any, patient: None, log: Spool) -> None:
    async def work() -> list[bytes]:
        task = asyncio.create_task(values(log.follow_async(limit=3)))
        for at in range(3):
            await asleep(log)
            log.append(b"%d" % at)
        return await task

    assert run(work()) == [b"0", b"1", b"2"]


def test_many_logs_in_one_loop_share_one_descriptor(
    run: Any, patient: None, tmp_path: Path, notifiers: Callable[[], set[str]]
) -> None:
    logs = [kvspool.create(tmp_path / f"log{at}", capacity=4096) for at in range(5)]

    async def work() -> list[list[bytes]]:
        tasks = [asyncio.create_task(values(log.follow_async(limit=2))) for log in (*logs, logs[0])]
        for log in logs:
            await asleep(log)
        assert len(notifiers()) == 1
        for at, log in enumerate(logs):
            log.append_many([b"%d" % at, b"!"])
        return await asyncio.gather(*tasks)

    assert run(work()) == [[b"%d" % at, b"!"] for at in (0, 1, 2, 3, 4, 0)]
    for log in logs:
        log.close()


def test_another_process_wakes_the_loop_which_continues_meanwhile(run: Any, patient: None, log: Spool) -> None:
    def write() -> None:
        with kvspool.open(log.path) as mine:
            while not mine._live().control[WANTED]:
                system.port.sleep(0.001)
            mine.append(b"from elsewhere")

    async def work() -> tuple[list[bytes], int]:
        task, turns = asyncio.create_task(values(log.follow_async(limit=1))), 0
        await asyncio.sleep(0)
        wait = start(write)
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        wait()
        return await task, turns

    got, turns = run(work())
    assert got == [b"from elsewhere"]
    assert turns > 0


def test_a_log_that_always_has_more_lets_other_tasks_run(run: Any, log: Spool) -> None:
    log.append_many([b"x"] * 50)
    turns = []

    async def count() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def work() -> None:
        other = asyncio.create_task(count())
        async for record in log.follow_async(limit=500):
            log.append(record.value)
        other.cancel()

    run(work())
    assert len(turns) > 5


def test_a_cancelled_wait_leaves_nothing_and_loses_no_record(
    run: Any, patient: None, log: Spool, notifiers: Callable[[], set[str]]
) -> None:
    async def work() -> list[bytes]:
        items = log.follow_async()
        before, got = notifiers(), []
        for at in range(20):
            log._live().control[WANTED] = 0  # what the last one asked for
            task = asyncio.ensure_future(anext(items))
            await asleep(log)
            assert notifiers() != before
            log.append(b"%d" % at)  # the event is under way when the task is cancelled
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert notifiers() == before
            got.append((await anext(items)).value)
        await items.aclose()
        return got

    assert run(work()) == [b"%d" % at for at in range(20)]


def test_a_task_that_is_cancelled_while_another_one_sleeps_costs_that_one_nothing(run: Any, patient: None, log: Spool) -> None:
    async def work() -> list[bytes]:
        stays, goes = (asyncio.create_task(values(log.follow_async(limit=1))) for _ in range(2))
        await asleep(log)
        goes.cancel()
        await asyncio.gather(goes, return_exceptions=True)
        log.append(b"x")
        return await stays

    assert run(work()) == [b"x"]


def test_leaving_the_loop_early_leaves_nothing(run: Any, log: Spool) -> None:
    log.append(b"x")

    async def work() -> None:
        async for record in log.follow_async(timeout=9):
            assert record.value == b"x"
            break
        async with log.follow_async(timeout=9) as items:
            assert (await anext(items)).value == b"x"
        async with aclosing(log.follow_async(timeout=9)) as items:
            await anext(items)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(items), 0.01)
        assert [item async for item in items] == []

    run(work())


def test_gaps_are_what_they_are_to_a_thread(run: Any, log: Spool) -> None:
    log.append_many([b"%08d" % at for at in range(300)])

    async def work() -> None:
        items = log.follow_async(0, timeout=0.01, on_gap="yield")
        assert await anext(items) == Gap(0, 197, "overrun", str(log.path))
        assert (await anext(items)).sequence == 198
        items = log.follow_async(0, timeout=0.01)
        with pytest.raises(errors.GapError):
            await anext(items)
        assert (await anext(items)).sequence == 198
        items = log.follow_async(0, timeout=0.01, on_gap="skip")
        assert len(await values(items)) == 102
        assert items.missed == 198

    run(work())


def test_a_log_that_is_deleted_or_closed_says_so(run: Any, tmp_path: Path) -> None:
    async def deleted(log: Spool) -> None:
        task = asyncio.create_task(values(log.follow_async()))
        await asleep(log)
        for name in os.listdir(log.path):
            os.unlink(log.path / name)
        with pytest.raises(errors.LogVanished):
            await task

    async def closed(log: Spool) -> None:
        task = asyncio.create_task(values(log.follow_async()))
        await asleep(log)
        log.close()
        with pytest.raises(errors.Closed):
            await task

    for at, work in enumerate((deleted, closed)):
        with kvspool.create(tmp_path / f"{at}", capacity=4096) as log:
            run(work(log))


@pytest.mark.parametrize("instances", [True, False])
def test_without_inotify_every_record_comes_all_the_same(run: Any, log: Spool, instances: bool) -> None:
    async def work() -> list[bytes]:
        task = asyncio.create_task(values(log.follow_async(limit=2)))
        await asleep(log)
        log.append(b"a")
        await asleep(log)
        log.append(b"b")
        return await task

    with system.replaced(BlindPort(instances=instances)):
        assert run(work()) == [b"a", b"b"]


def test_a_user_without_write_permission_polls(run: Any, log: Spool) -> None:
    with system.replaced(ReadOnlyPort()):
        reading = kvspool.open(log.path)

    async def work() -> list[bytes]:
        task = asyncio.create_task(values(reading.follow_async(limit=1)))
        await asyncio.sleep(0)
        log.append(b"x")
        return await task

    with reading:
        assert run(work()) == [b"x"]


def test_a_forked_child_follows_in_a_loop_of_its_own_and_leaves_its_parents_alone(run: Any, patient: None, log: Spool) -> None:
    async def work() -> list[bytes]:
        task = asyncio.create_task(values(log.follow_async(limit=1)))
        await asleep(log)

        def follow_too() -> list[bytes]:
            asyncio._set_running_loop(None)
            log.append(b"from the child")
            return asyncio.run(values(log.follow_async(limit=1)))

        assert in_child(follow_too, 30) == [b"from the child"]
        return await task

    assert run(work()) == [b"from the child"]
