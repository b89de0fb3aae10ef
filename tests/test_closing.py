"""Closing a handle ends its iterations with Closed, closing an iteration ends it quietly; in whatever thread or task it waits."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from alarms import called

import hub
import kvspool
from kvspool import Spool, system
from kvspool.engine import eventloops, iteration, wakeups
from kvspool.engine.iteration import Iterations
from kvspool.errors import Closed
from kvspool.kernel import frames_py as frames
from shard import ShardSet, route
from shard.kernel.merge import FollowingLoops

DEADLINE = 60.0  # seconds; a follower that is not woken sleeps for an hour


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing but a wake-up end a sleep."""
    loops = sys.modules[FollowingLoops.__module__]  # of the twin that is in use
    for module in (wakeups, eventloops, iteration, loops):
        monkeypatch.setattr(module, "POLL", 3600.0)


class Sleeping(system.Port):
    """Reports when a follower sleeps on inotify."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = threading.Event()

    def wait_readable(self, fd: int, timeout: float) -> bool:
        if timeout:
            self.asleep.set()
        return super().wait_readable(fd, timeout)


@pytest.fixture
def sleeping() -> Iterator[Sleeping]:
    port = Sleeping()
    with system.replaced(port):
        yield port


class Case(NamedTuple):
    """A source of records, the call that closes its handle, and the spool whose followers sleep on its word."""

    source: Any
    close: Callable[[], None]
    spool: Spool | None = None


def spool(path: Path) -> Case:
    log = kvspool.create(path, capacity=65536)
    log.append(b"first")
    return Case(log, log.close, log)


def spool_reader(path: Path) -> Case:
    log = spool(path).source
    reader = log.reader("reader")
    return Case(reader, reader.close, log)


def log_of_a_spool_reader(path: Path) -> Case:
    log = spool(path).source
    return Case(log.reader("reader"), log.close, log)


def journal(path: Path, form: str) -> Case:
    options = {"item_bytes": 8, "items_per_blob": 100} if form == "fixed" else {}
    log: Any = kvspool.create(path, format=form, **options)  # type: ignore[call-overload]
    log.append(b"12345678")
    return Case(log, log.close)


def journal_reader(path: Path) -> Case:
    reader = journal(path, "kvj").source.reader("reader")
    return Case(reader, reader.close)


def journal_of_a_reader(path: Path) -> Case:
    log = journal(path, "kvj").source
    return Case(log.reader("reader"), log.close)


def shard_set(path: Path) -> Case:
    shards = ShardSet.create(path, bits=1)
    shards.append(b"first")
    return Case(shards, shards.close)


def journals_in_shards(path: Path) -> Case:
    shards = ShardSet.create(path, bits=1, format="kvj")
    shards.append(b"first")
    return Case(shards, shards.close)


def hub_root(path: Path) -> Case:
    root = hub.create(path)
    with root.create_client("JFK", bits=1) as client:
        client.append(b"first")
    return Case(root, root.close)


def hub_reader(path: Path) -> Case:
    reader = hub_root(path).source.reader("reader")
    return Case(reader, reader.close)


def root_of_a_hub_reader(path: Path) -> Case:
    root = hub_root(path).source
    return Case(root.reader("reader"), root.close)


CASES: dict[str, Callable[[Path], Case]] = {
    "spool": spool,
    "spool reader": spool_reader,
    "log of a spool reader": log_of_a_spool_reader,
    "kvj": lambda path: journal(path, "kvj"),
    "sej": lambda path: journal(path, "sej"),
    "fflg": lambda path: journal(path, "fflg"),
    "fixed": lambda path: journal(path, "fixed"),
    "journal reader": journal_reader,
    "journal of a reader": journal_of_a_reader,
    "shard set": shard_set,
    "journals in shards": journals_in_shards,
    "hub root": hub_root,
    "hub reader": hub_reader,
    "root of a hub reader": root_of_a_hub_reader,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    found = CASES[request.param](tmp_path / "log")
    yield found
    found.close()


class Follower(threading.Thread):
    """Collects all items of an iteration."""

    def __init__(self, items: Any) -> None:
        super().__init__(daemon=True)
        self.items = items
        self.got: list[Any] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for item in self.items:
                self.got.append(item)
        except BaseException as error:
            self.error = error

    def has_ended(self) -> bool:
        self.join(DEADLINE)
        return not self.is_alive()


def await_sleeper(log: Spool) -> None:
    """Return when a follower has asked to be woken: what it does next is to sleep."""
    while not log._live().control[frames.WANTED * 8 + frames.SLEEPS]:
        pass


def test_closing_the_handle_ends_a_follower_that_sleeps(sleeping: Sleeping, case: Case) -> None:
    follower = Follower(case.source.follow())
    if case.spool is None:
        assert sleeping.asleep.wait(DEADLINE)
    else:
        await_sleeper(case.spool)
    case.close()
    assert follower.has_ended()
    assert isinstance(follower.error, Closed) and "closed" in str(follower.error)
    assert len(follower.got) == 1
    for _ in range(2):
        with pytest.raises(Closed):
            next(follower.items)


def test_closing_a_follower_that_sleeps_ends_it_quietly(sleeping: Sleeping, case: Case) -> None:
    follower = Follower(case.source.follow())
    if case.spool is None:
        assert sleeping.asleep.wait(DEADLINE)
    else:
        await_sleeper(case.spool)
    follower.items.close()
    assert follower.has_ended()
    assert follower.error is None
    assert next(follower.items, None) is None
    case.close()
    assert next(follower.items, None) is None


@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize("spin", [0.0, 3600.0])
@pytest.mark.parametrize("of_reader", [False, True])
def test_closing_ends_a_follower_of_a_spool_that_sleeps_or_spins(tmp_path: Path, of_reader: bool, spin: float, is_quiet: bool) -> None:
    with kvspool.create(tmp_path / "log") as log:
        source: Any = log.reader("reader") if of_reader else log
        follower = Follower(source.follow(spin=spin))
        log.append(b"first")
        if not spin:
            await_sleeper(log)
        while not follower.got:
            pass
        (follower.items if is_quiet else source).close()
        assert follower.has_ended()
        assert follower.error is None if is_quiet else isinstance(follower.error, Closed), follower.error
        with pytest.raises(StopIteration if is_quiet else Closed):
            next(follower.items)


@pytest.mark.parametrize("spin", [0.0, 3600.0])
@pytest.mark.parametrize("is_quiet", [False, True])
def test_closing_leaves_the_memory_to_the_thread_that_waits_in_it(tmp_path: Path, is_quiet: bool, spin: float) -> None:
    with kvspool.create(tmp_path / "log") as log:
        log.append(b"first")
        items: Any = log.follow(spin=spin)
        log.append(b"second")
        next(items)
        next(items)
        was_closed: list[bool] = []

        def close(*_: object) -> None:
            if items._batch.waiting and not was_closed:
                (items if is_quiet else log).close()
                was_closed.append(items.cursor.reader.closed)

        with called(close):
            with pytest.raises(StopIteration if is_quiet else Closed):
                next(items)
        assert set(was_closed) == {False}  # an alarm may come into the handler of another one
        assert items.cursor.reader.closed


def test_closing_the_handle_ends_iterations_that_have_copied_records_out(case: Case) -> None:
    for _ in range(3):
        if hasattr(case.source, "append"):
            case.source.append(b"12345678")
    items = case.source.read()
    next(items)
    case.close()
    for _ in range(2):
        with pytest.raises(Closed):
            next(items)
    items.close()


def test_an_iteration_that_has_ended_stays_as_it_is(case: Case) -> None:
    items = case.source.read(limit=1)
    assert len(list(items)) == 1
    case.close()
    assert next(items, None) is None


@pytest.mark.parametrize("name", ["spool", "spool reader", "log of a spool reader", "kvj", "sej"])
def test_closing_the_handle_in_another_thread_ends_a_task_that_follows(name: str, tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        items = case.source.follow_async()
        await anext(items)
        waiting = asyncio.create_task(anext(items))
        while items._watcher is None or items._watcher._waiter._sleeper is None:
            await asyncio.sleep(0)
        await asyncio.to_thread(case.close)
        with pytest.raises(Closed):
            await waiting
        with pytest.raises(Closed):
            await anext(items)
        await items.aclose()

    asyncio.run(asyncio.wait_for(work(CASES[name](tmp_path / "log")), DEADLINE))


@pytest.mark.parametrize("name", ["spool", "kvj"])
def test_closing_an_iteration_in_another_task_ends_it_quietly(name: str, tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        items = case.source.follow_async()
        await anext(items)
        waiting = asyncio.create_task(anext(items))
        while items._watcher is None or items._watcher._waiter._sleeper is None:
            await asyncio.sleep(0)
        await items.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting
        case.close()

    asyncio.run(asyncio.wait_for(work(CASES[name](tmp_path / "log")), DEADLINE))


@pytest.mark.parametrize("name", ["spool", "spool reader", "kvj", "journal reader", "journals in shards", "hub reader"])
def test_closing_at_any_moment_ends_followers_with_a_prefix_of_the_records(name: str, tmp_path: Path) -> None:
    for turn in range(20):
        case = CASES[name](tmp_path / str(turn))
        items = case.source.follow()
        first = next(items)
        follower = Follower(items)
        log = first_log(tmp_path / str(turn), first)
        for _ in range(turn):
            log.append_many([b"more"] * 10)
        case.close()
        assert follower.has_ended()
        assert isinstance(follower.error, Closed)
        assert [record.sequence for record in follower.got] == list(range(1, 1 + len(follower.got)))
        log.close()


def first_log(path: Path, record: Any) -> Any:
    """Return the log that holds a record."""
    if not hasattr(record, "shard"):
        return kvspool.open(path)
    return kvspool.open(path / route.directory_name(getattr(record, "client", ""), 1, record.shard))


def test_closing_an_iterator_of_a_durable_reader_passes_over_no_record(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log") as log, log.reader("reader") as reader:
        log.append_many([b"%d" % number for number in range(5)])
        for items in (reader.read(), reader.follow(timeout=0)):
            before = reader.sequence
            assert next(items).sequence == before
            items.close()
            assert next(items, None) is None
            assert reader.sequence == before + 1
        assert [record.sequence for record in reader.read()] == [2, 3, 4]


def test_closing_an_iteration_in_another_thread_while_it_copies_a_record_ends_it_quietly(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    raised: list[BaseException] = []
    try:
        with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
            log.append_many([b"x" * 20] * 3000)
            sys.setswitchinterval(1e-6)
            for _ in range(20):
                reading, has_begun = log.read(), threading.Event()

                def read(reading: Any = reading, has_begun: threading.Event = has_begun) -> None:
                    try:
                        for record in reading:
                            if record.sequence == 300:
                                has_begun.set()
                    except BaseException as error:
                        raised.append(error)

                thread = threading.Thread(target=read)
                thread.start()
                assert has_begun.wait(60)
                reading.close()
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert raised == []


class Contested(OrderedDict[Any, Any]):
    """Open segments that another thread releases, too, as soon as one does."""

    def __init__(self, segments: Any) -> None:
        super().__init__(segments._open)
        self.segments = segments

    def popitem(self, last: bool = True) -> tuple[Any, Any]:
        super().popitem(last)
        return super().popitem(last)

    def values(self) -> Any:
        self.segments.close()
        return super().values()


def test_two_threads_may_release_a_journal_at_once(tmp_path: Path) -> None:
    """The thread that closes an iteration, and the one that it wakes."""
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append(b"first")
        items: Any = log.follow()
        next(items)
        segments = items.cursor.segments
        (segment,) = segments._open.values()
        segments._open = Contested(segments)
        items.close()
        assert not segments._open and segment._file.is_closed


def test_an_iteration_that_is_added_while_the_handle_is_closed_ends_too(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log") as log:
        iterations = Iterations()
        iterations.end("the log was closed")
        with pytest.raises(Closed, match="the log was closed"):
            next(iterations.add(log.follow()))


def test_dropped_iterations_are_not_kept(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log") as log:
        for _ in range(3):
            list(log.read())
        assert not log._iterations._all
