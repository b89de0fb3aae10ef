"""The memory under the loops: what they are made of is checked once, and a close by another thread costs them Closed and nothing else."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from loops import twins
from rings import HOLDER, SEED, Ring

import kvspool
from kvspool.engine.flushing import LONGEST_SLEEP
from kvspool.engine.wakeups import SLICE
from kvspool.errors import Closed, Reentered
from kvspool.kernel import chunks_py
from kvspool.kernel import frames_py as frames
from kvspool.kernel import group_py as groups
from kvspool.queue import ChunkQueue
from kvspool.record import Record
from kvspool.spool import format

MakeRing = Callable[..., Ring]
CAPACITY = 65536
DEADLINE = 60.0


def control_of(capacity: int) -> memoryview:
    return memoryview(bytearray(format.control_bytes(capacity)))


def makers(twin: ModuleType) -> dict[str, Callable[[Any, Any], Any]]:
    return {
        "Ring": lambda data, control: twin.Ring(data, control, SEED),
        "FrameReader": lambda data, control: twin.FrameReader(data, control, SEED, 0, 0),
        "FrameScanner": lambda data, control: twin.FrameScanner(data, control, SEED),
        "FrameWriter": lambda data, control: twin.FrameWriter(data, control, SEED, None, memoryview(HOLDER)),
    }


def flush_group(twin: ModuleType, data: Any, control: Any) -> Any:
    """Return a group of the twin for a ring."""
    module = importlib.import_module(twin.__name__.replace("frames", "group"))
    return module.FlushGroup(twin.Ring(data, control, SEED), control, frames.FLUSH_GROUP, frames.SYNC_LOCK)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", ["Ring", "FrameReader", "FrameScanner", "FrameWriter"])
def test_memory_that_can_not_be_a_logs_is_refused_when_the_object_is_made(twin: ModuleType, name: str) -> None:
    make = makers(twin)[name]
    make(memoryview(bytearray(CAPACITY)), control_of(CAPACITY))
    for data, control in [(0, 8 * CAPACITY), (24, 8 * CAPACITY), (CAPACITY + 4, 8 * CAPACITY)]:
        with pytest.raises(ValueError, match="a ring has 32 bytes at least"):
            make(memoryview(bytearray(data)), memoryview(bytearray(control)))
    whole = len(control_of(CAPACITY))
    needed = 8 * (frames.INDEX + frames.INDEX_WORDS)
    for size in (0, needed - 8, whole + 4):
        with pytest.raises(ValueError, match=f"the control block of a ring of {CAPACITY} bytes has {needed} bytes at least"):
            make(memoryview(bytearray(CAPACITY)), memoryview(bytearray(size)))
    with pytest.raises(ValueError, match="the control block of a ring of 131072 bytes"):
        make(memoryview(bytearray(2 * CAPACITY)), memoryview(bytearray(needed)))
    with pytest.raises((ValueError, TypeError, BufferError)):
        make(memoryview(bytearray(2 * CAPACITY))[::2], control_of(CAPACITY))


@pytest.mark.parametrize("name", ["Ring", "FrameReader", "FrameScanner", "FrameWriter"])
def test_compiled_memory_at_an_odd_address_is_refused(twin: ModuleType, name: str) -> None:
    if twin.__name__.endswith("_py"):
        pytest.skip("the interpreted twin has no pointers")
    make, odd = makers(twin)[name], control_of(CAPACITY)
    with pytest.raises(ValueError, match="not a multiple of 8"):
        make(memoryview(bytearray(CAPACITY + 8))[4:-4], control_of(CAPACITY))
    with pytest.raises(ValueError, match="not a multiple of 8"):
        make(memoryview(bytearray(CAPACITY)), memoryview(bytearray(len(odd) + 8))[4:-4])


def test_whatever_stores_refuses_read_only_memory(twin: ModuleType) -> None:
    data, control = memoryview(bytearray(CAPACITY)), control_of(CAPACITY)
    for one, other in ((data.toreadonly(), control), (data, control.toreadonly())):
        with pytest.raises(ValueError, match="read-only"):
            makers(twin)["FrameWriter"](one, other)
    with pytest.raises(ValueError, match="read-only"):
        flush_group(twin, data, control.toreadonly())
    with pytest.raises(ValueError, match="48 bytes"):
        twin.FrameWriter(data, control, SEED, None, memoryview(bytes(40)))
    reader = makers(twin)["FrameReader"](data.toreadonly(), control.toreadonly())
    assert reader.mark() == (0, 0, 0)
    for store in (lambda: reader.request_wake_up(1), reader.wake_readers, reader.rouse):
        with pytest.raises(ValueError, match="read-only"):
            store()
    scanner = makers(twin)["FrameScanner"](data.toreadonly(), control.toreadonly())
    for change in (
        lambda: scanner.erase(0, 64, 0),
        lambda: scanner.cut(0, 64, 0),
        scanner.clear_index,
        lambda: scanner.enter_run(0, 64),
    ):
        with pytest.raises(ValueError, match="read-only"):
            change()
    assert not any(control)


def test_a_number_that_is_no_words_ways_or_blocks_is_refused(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, CAPACITY)
    reader, words = ring.reader(0, 0), len(ring.control) // 8
    assert reader.word(words - 1) == 0
    for call in (
        lambda: reader.word(words),
        lambda: reader.word(-1),
        lambda: reader.wait_word(words, 0, 1),
        lambda: reader.wait_word(-1, 0, 1),
        lambda: reader.entry(-1),
        lambda: reader.entry(1),
        lambda: reader.request_wake_up(-1),
        lambda: reader.request_wake_up(2),
    ):
        with pytest.raises(IndexError):
            call()
    reader.edge = words
    for call in (reader.edge_now, lambda: reader.spin(1, 1)):
        with pytest.raises(IndexError):
            call()


def test_columns_without_room_for_the_limit_are_refused(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, CAPACITY)
    ring.fill([b"x"] * 20)

    def gather(limit: int, **short: int) -> int:
        sizes = {"sequences": 16, "timestamps": 16, "types": 16, "key_offsets": 17, "keys": 64, "key_bits": 2}
        sizes |= {"value_offsets": 17, "values": 64, "codecs": 16}
        codes = {"sequences": "q", "timestamps": "q", "types": "i", "key_offsets": "i", "value_offsets": "i"}
        views = []
        for name, size in (sizes | short).items():
            code = codes.get(name, "B")
            views.append(memoryview(bytearray(size * {"q": 8, "i": 4, "B": 1}[code])).cast(code))
        found: int = ring.reader(0, 0).gather(ring.mark()[0], limit, *views)
        return found

    assert gather(16) == 16
    short = {"sequences": 15, "timestamps": 15, "types": 15, "key_offsets": 16, "key_bits": 1, "value_offsets": 16, "codecs": 15}
    for name, size in short.items():
        with pytest.raises(ValueError, match="too short for 16 records"):
            gather(16, **{name: size})


def test_an_object_whose_init_never_ran_touches_no_memory(twin: ModuleType) -> None:
    for name in ("FrameReader", "FrameScanner", "FrameWriter"):
        one = getattr(twin, name).__new__(getattr(twin, name))
        for method, arguments in (("word", (0,)), ("mark", ()), ("head", ()), ("entry", (0,)), ("wake_readers", ()), ("rouse", ())):
            with pytest.raises((Closed, AttributeError)):
                getattr(one, method)(*arguments)


def test_a_flush_group_has_memory_of_its_own_or_raises(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, CAPACITY)
    group = flush_group(twin, ring.data, ring.control)
    words = memoryview(bytearray(64))
    kind = type(group)
    for at in (-1, 5, 8, 1 << 40):
        with pytest.raises(ValueError, match="4 words"):
            kind(ring.reader(0, 0), words, at, 0)
    kind(ring.reader(0, 0), words, 4, 0)
    never_made = kind.__new__(kind)
    group.close()
    for one in (never_made, group):
        with pytest.raises((Closed, AttributeError)):
            one.come(0, 1, 0, 1)


def test_a_writer_is_not_closed_in_the_middle_of_an_append(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, CAPACITY)
    writer = ring.writer()

    def work(writer: Any) -> int:
        with pytest.raises(Reentered):
            writer.close()
        first = writer.begin()
        writer.put_many(None, [b"one"], 0, bytes(1), 7)
        writer.publish()
        return int(first)

    assert writer.locked(work) == 0
    assert ring.mark()[1] == 1
    writer.close()
    writer.publish()
    writer.ring()
    for call in (writer.begin, lambda: writer.append(None, b"", 0, 0, 7), lambda: writer.locked(work)):
        with pytest.raises(Closed):
            call()


def test_a_close_ends_calls_that_wait_in_other_threads(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, CAPACITY)
    group = flush_group(twin, ring.data, ring.control)
    group.lock_fd = ring.lock_file
    reader, spinner = ring.reader(0, 0), ring.reader(0, 0)
    ring.fill([b"x"])
    spinner.position = ring.mark()[0]
    # Another thread of the first group leads, so this one waits.
    assert group.come(1, 1, 10**9, LONGEST_SLEEP) == groups.LEADS
    found: list[Any] = []
    began = threading.Barrier(4)

    def run(call: Callable[[], Any]) -> None:
        began.wait(DEADLINE)
        try:
            found.append(call())
        except Closed:
            found.append(Closed)

    calls: list[Callable[[], Any]] = [
        lambda: group.come(1, 2, 3 * 10**10, LONGEST_SLEEP),
        lambda: reader.wait_word(frames.TAIL, ring.mark()[0], 10**7),
        lambda: spinner.spin(3 * 10**10, SLICE),
    ]
    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    began.wait(DEADLINE)
    for one in (group, reader, spinner):
        one.close()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert set(found) <= {Closed, None, False}
    assert Closed in found
    group.leave(1, 0)


def test_a_close_while_records_are_made_ends_the_copying(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, CAPACITY)
    ring.fill([b"x"] * 9)
    reader = ring.reader(0, 0)

    def make(*fields: Any) -> Record:
        if fields[0] == 4:
            reader.close()
        return Record(*fields)

    assert [record.sequence for record in reader.fetch(ring.mark()[0], 9, make)] == [0, 1, 2, 3, 4]
    with pytest.raises(Closed):
        reader.fetch(ring.mark()[0], 9, make)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("codec", ["msgpack", "keyed"])
def test_threads_that_use_a_handle_while_one_closes_it_get_closed_and_nothing_else(tmp_path: Path, codec: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec=codec) as log:
        log.append_many([{"n": number} for number in range(40)])
        with log.reader("r") as reader:
            list(reader.read(limit=5))
            reader.commit()
    for _ in range(20):
        close_among_threads(kvspool.open(tmp_path / "log"))


def close_among_threads(handle: kvspool.Spool) -> None:
    verbs: list[Callable[[], Any]] = [
        handle.stats,
        handle.extent,
        handle.end,
        handle.readers,
        handle.verify,
        handle.producers,
        handle.has_vanished,
        lambda: [record.data for record in handle.read(on_gap="skip")],
        lambda: list(handle.follow(timeout=0, limit=50, on_gap="skip")),
        lambda: handle.append(b"new"),
        lambda: handle.append_many([{"n": 1}, {"m": 2}]),
        lambda: handle.records_from(3),
        handle.sync,
    ]
    assert_only_closed(handle.close, verbs)


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_share_iterators_with_one_that_closes_them_end_quietly(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY) as log:
        log.append_many([b"%d" % number for number in range(300)])
        for _ in range(20):
            following = [log.follow(290, timeout=30, spin=spin) for spin in (0.0, 0.0, 0.0, 20.0)]
            started = threading.Barrier(len(following) + 1)
            wrong: list[BaseException] = []

            def read(one: Any, started: threading.Barrier = started, wrong: list[BaseException] = wrong) -> None:
                started.wait(DEADLINE)
                try:
                    got = [record.sequence for record in one]
                    assert got == list(range(290, 290 + len(got)))
                except Closed:
                    pass
                except BaseException as error:
                    wrong.append(error)

            threads = [threading.Thread(target=read, args=(one,)) for one in following]
            for thread in threads:
                thread.start()
            started.wait(DEADLINE)
            for one in following:
                one.close()
            for thread in threads:
                thread.join(DEADLINE)
                assert not thread.is_alive()
            assert not wrong, wrong


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_use_a_queue_while_one_closes_it_get_closed_and_nothing_else(tmp_path: Path) -> None:
    ChunkQueue.create(tmp_path / "queue", chunk_bytes=4096).close()
    for _ in range(20):
        queue = ChunkQueue.open(tmp_path / "queue")

        def use(queue: ChunkQueue = queue) -> None:
            queue.put_many([b"x" * 300] * 30)
            while queue.qsize() > 20:
                queue.get_many(10, block=False)
            list(queue)

        assert_only_closed(queue.close, [use, use, queue.stats, partial(queue.put, b"y"), queue.qsize])


def assert_only_closed(close: Callable[[], None], verbs: list[Callable[[], Any]]) -> None:
    """Call each verb again and again in a thread of its own, close when all have been called, and see what ends them."""
    started = threading.Barrier(len(verbs) + 1)
    ends: list[BaseException] = []

    def use(verb: Callable[[], Any]) -> None:
        try:
            verb()
            started.wait(DEADLINE)
            while True:
                verb()
        except BaseException as error:
            ends.append(error)

    threads = [threading.Thread(target=use, args=(verb,)) for verb in verbs]
    for thread in threads:
        thread.start()
    started.wait(DEADLINE)
    close()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), f"{thread.name} never ended after the close"
    wrong = [error for error in ends if not isinstance(error, Closed)]
    assert not wrong, wrong


@pytest.mark.parametrize("loops", twins("kvspool.kernel.chunks"), ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_ends_of_a_queue_refuse_memory_that_is_not_their_chunks(loops: ModuleType, tmp_path: Path) -> None:
    def chunk(size: int, view: Any) -> Any:
        return SimpleNamespace(fd=-1, size=size, view=view)

    good = chunk(64, memoryview(bytearray(64)))
    for bad in (chunk(72, memoryview(bytearray(64))), chunk(8, memoryview(bytearray(64))), chunk(64, memoryview(bytes(64)))):
        for first, last in ((good, bad), (bad, good)):
            ends = loops.Ends()
            with pytest.raises(ValueError, match="a chunk of"):
                ends.attach(1, first, last)
            assert ends.place(b"x") == chunks_py.LOOK
            assert (ends.peek(), ends.take(), ends.take_many(3), ends.stop) == (None, None, [], chunks_py.LOOK)
            assert ends.place_many([b"x"], 0) == 0
            assert not ends.is_drained()
            ends.advance(12)
    for call in (loops.count, lambda *place: loops.copies(*place, 5)):
        assert call(memoryview(bytearray(64)), 10, 64)
        for at, tail in ((-1, 64), (10, 65), (65, 64), (10, -1)):
            with pytest.raises(ValueError, match="of a chunk of 64 bytes"):
                call(memoryview(bytearray(64)), at, tail)
