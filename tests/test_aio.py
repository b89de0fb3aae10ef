"""`kvspool.aio`: appends and flushes that can be awaited, which never block the event loop."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import anyio
import pytest

import kvspool
import shard
from kvspool import errors, system
from kvspool.aio import AsyncLog
from kvspool.engine import locks

KINDS = pytest.mark.parametrize("kind", ["spool", "kvj"])


class SlowDisk(system.Port):
    """Counts flushes, each of which waits until `may_flush` is set; fails with `error`."""

    def __init__(self) -> None:
        self.may_flush = threading.Event()
        self.flushes = 0
        self.error: OSError | None = None

    def flush_data(self, fd: int) -> None:
        self.flushes += 1
        assert self.may_flush.wait(60)
        if self.error is not None:
            raise self.error
        super().flush_data(fd)


def create(tmp_path: Path, kind: str = "spool", **options: object) -> kvspool.Log:
    return kvspool.create(tmp_path / "log", format=kind, **({"capacity": "64KiB"} if kind == "spool" else {}), **options)  # type: ignore[arg-type]


@KINDS
def test_other_tasks_run_during_a_flush_and_all_that_wait_share_the_next_one(tmp_path: Path, kind: str) -> None:
    disk = SlowDisk()

    async def run() -> None:
        async with AsyncLog(create(tmp_path, kind)) as log:
            first = asyncio.create_task(log.append(b"first", durable=True))
            while disk.flushes == 0:
                await asyncio.sleep(0.001)
            later = [asyncio.create_task(log.append(b"later", durable=True)) for _ in range(50)]
            assert await log.append(b"in memory") >= 1  # while the disk is busy
            await asyncio.sleep(0)
            assert not first.done() and not any(task.done() for task in later)
            disk.may_flush.set()
            assert await first == 0
            assert len({await task for task in later}) == 50
            assert log.log.stats().synced_sequence == 52
            assert await log.sync() == 52

    with system.replaced(disk):
        asyncio.run(run())
    assert disk.flushes <= 6  # two for the appends, and those of checkpoints at the begin and the end


@KINDS
def test_a_failed_flush_says_that_the_record_was_appended(tmp_path: Path, kind: str) -> None:
    disk = SlowDisk()
    disk.may_flush.set()
    disk.error = OSError(5, "Input/output error")

    async def run() -> None:
        log = AsyncLog(create(tmp_path, kind))
        with pytest.raises(errors.NotDurable) as caught:
            await log.append(b"value", durable=True)
        assert caught.value.sequences == range(1)
        with pytest.raises((errors.Poisoned, OSError)):
            await log.sync()
        assert [record.value for record in log.log.read()] == [b"value"]
        await log.close()

    with system.replaced(disk):
        asyncio.run(run())


def test_an_append_that_waits_for_the_lock_or_for_room_leaves_the_loop_free(tmp_path: Path) -> None:
    async def run() -> None:
        with create(tmp_path) as other:
            other.append(b"x")
            async with AsyncLog(kvspool.open(tmp_path / "log")) as log:
                held, free = threading.Event(), threading.Event()

                def hold() -> None:
                    with locks.appending(other._live().append_lock, 5, lambda: "the test"):  # type: ignore[attr-defined]
                        held.set()
                        free.wait(60)

                holder = threading.Thread(target=hold)
                holder.start()
                held.wait(60)
                waiting = asyncio.create_task(log.append(b"y", timeout=60))
                for _ in range(20):
                    await asyncio.sleep(0.001)
                assert not waiting.done()
                after = asyncio.create_task(log.append(b"z"))  # stays after the one that waits
                await asyncio.sleep(0.001)
                free.set()
                assert (await waiting, await after) == (1, 2)
                holder.join()
                assert await log.append(b"in the loop again", timeout=0) == 3

    asyncio.run(run())


def test_an_append_to_a_full_log_waits_for_its_reader(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncLog(create(tmp_path, policy="block")) as log:
            with log.log.reader("slow") as reader:
                with pytest.raises(errors.SpoolFull):
                    for _ in range(100):
                        await log.append(bytes(2000), timeout=0)
                waiting = asyncio.create_task(log.append(bytes(2000), timeout=60))
                await asyncio.sleep(0.01)
                assert not waiting.done()
                for _ in reader.read():
                    pass
                reader.commit()
                assert await waiting > 20

    asyncio.run(run())


def test_a_log_of_the_level_disk_flushes_in_a_thread(tmp_path: Path) -> None:
    disk = SlowDisk()
    disk.may_flush.set()

    async def run() -> None:
        async with AsyncLog(create(tmp_path, durability="disk")) as log:
            before = disk.flushes
            assert await log.append_many([b"a", b"b"], keys=["1", "2"]) == range(2)
            assert await log.append(b"c") == 2
            assert disk.flushes > before and log.log.stats().synced_sequence == 3

    with system.replaced(disk):
        asyncio.run(run())


def test_a_cancelled_follower_and_a_cancelled_append_lose_nothing(tmp_path: Path) -> None:
    """Cancelled by a scope of anyio, as frameworks on it do."""

    async def run() -> None:
        async with AsyncLog(create(tmp_path)) as log:
            found = []
            for _ in range(3):
                with anyio.move_on_after(0.02):
                    async for record in log.follow(start=len(found)):
                        found += [record.value]
                await log.append(b"%d" % len(found))
            with anyio.move_on_after(0.0):
                await log.append(b"cancelled", durable=True)
            values = [record.value async for record in log.follow(timeout=0)]
            assert values[:3] == [b"0", b"1", b"2"] and found == [b"0", b"1"]

    asyncio.run(run())


def test_all_that_is_awaited_refuses_another_event_loop_than_that_of_asyncio(tmp_path: Path) -> None:
    trio = pytest.importorskip("trio")
    log = create(tmp_path)
    log.append(b"there")
    shards = shard.create(tmp_path / "shards", bits=1, capacity="64KiB")

    async def enter() -> None:
        async with AsyncLog(log):
            pass

    waits = [
        log.follow_async().__anext__,
        log.reader("reader").follow_async().__anext__,
        log.group("group").follow_async().__anext__,
        log.tasks("tasks").follow_async().__anext__,
        shards.follow_async().__anext__,
        enter,
        AsyncLog(log).sync,
        AsyncLog(log).close,
        partial(AsyncLog(log).append, b"durable", durable=True),
    ]
    for wait in waits:
        for run in (trio.run, partial(anyio.run, backend="trio")):
            with pytest.raises(errors.NoEventLoop, match="use its backend asyncio.*trio.to_thread.run_sync"):
                run(wait)
    shards.close()
    log.close()


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        log = AsyncLog(create(tmp_path))
        await log.close()
        with pytest.raises(errors.Closed):
            await log.append(b"x")
        with pytest.raises(errors.Closed):
            await log.sync()

    asyncio.run(run())
