"""A queue in one process, compared with `queue.Queue`."""

from __future__ import annotations

import os
import queue as standard
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvspool import errors, system
from kvspool.queue import ChunkQueue, QueueEmpty, QueueFull, format

Make = Callable[..., ChunkQueue]


def names(path: Path) -> set[str]:
    return set(os.listdir(path.parent))


def test_entries_come_out_as_they_went_in_over_many_chunks(twin: ModuleType, make: Make) -> None:
    entries = [bytes([at]) * (at % 53) for at in range(200)]
    one = make()
    for entry in entries:
        one.put(entry)
    assert one.qsize() == 200
    assert len(one) > 50
    assert list(one) == entries
    assert [one.get() for _ in entries] == entries
    assert one.empty()


def test_batches_go_in_and_come_out_over_many_chunks(twin: ModuleType, make: Make) -> None:
    entries = [b"%d" % at for at in range(500)]
    one = make()
    one.put_many(entries)
    got = []
    while not one.empty():
        got.append(one.get_many(7))
    assert [entry for batch in got for entry in batch] == entries
    assert max(map(len, got)) == 7


@pytest.mark.parametrize("length", [0, 1, 65534, 65535])
def test_entries_of_every_length_that_the_format_has(twin: ModuleType, make: Make, length: int) -> None:
    one = make(chunk_bytes=70_000)
    one.put(b"y" * length)
    one.put(b"z" * length)
    assert [one.get(), one.get()] == [b"y" * length, b"z" * length]


def test_an_entry_over_65535_bytes_is_refused_and_not_stored_modulo_65536(twin: ModuleType, make: Make) -> None:
    one = make(chunk_bytes=200_000)
    for count in (0, 1):  # the first chunk is there the second time
        with pytest.raises(errors.TooLarge):
            one.put(b"x" * 65536)
        with pytest.raises(ValueError, match="65535"):
            one.put_many([b"small", b"x" * 65540])
        assert one.qsize() == count
        one.put(b"small")
    assert list(one) == [b"small", b"small"]


def test_the_loops_themselves_take_no_entry_over_65535_bytes(twin: ModuleType, make: Make) -> None:
    one = make(chunk_bytes=200_000)
    one.put(b"a")
    with one._held() as chain:
        assert chain.ends.place(b"x" * 65536) != 0
        assert chain.ends.place_many([b"b", b"x" * 65536, b"c"], 0) == 1
    assert list(one) == [b"a", b"b"]


def test_an_entry_that_no_chunk_holds_is_refused(make: Make) -> None:
    one = make(chunk_bytes=64)
    one.put(b"x" * 52)
    with pytest.raises(errors.TooLarge):
        one.put(b"x" * 53)
    assert list(one) == [b"x" * 52]


def test_a_second_chunk_in_one_session(twin: ModuleType, make: Make, path: Path) -> None:
    """The original crashes there."""
    one = make()
    one.put(b"a" * 40)
    one.put(b"b" * 40)
    assert len(one) == 2
    assert names(path) == {"queue.dat", "queue.dat.1", "queue.dat.2"}
    assert [one.get(), one.get()] == [b"a" * 40, b"b" * 40]


@pytest.mark.parametrize("count", [0, 1, 10])
def test_clear_then_put_keeps_what_was_put(twin: ModuleType, make: Make, count: int) -> None:
    """The original loses it."""
    one = make()
    one.put_many([b"old" * 10] * count)
    one.clear()
    assert one.empty()
    one.put(b"new")
    with ChunkQueue.open(one.path) as other:
        assert list(other) == [b"new"]
    assert one.get() == b"new"


def test_an_empty_queue_is_empty_for_queue_queues_users_too(twin: ModuleType, make: Make) -> None:
    one = make()
    for call in (one.get_nowait, one.peek_nowait, lambda: one.get(False), lambda: one.get(timeout=0.01), lambda: one.get_many(3, False)):
        with pytest.raises(standard.Empty):
            call()
    with pytest.raises(QueueEmpty):
        one.get_if(lambda entry: True, block=False)
    with pytest.raises(ValueError, match="non-negative"):
        one.get(timeout=-1)


def test_a_bounded_queue_is_full_until_an_entry_is_taken(twin: ModuleType, make: Make) -> None:
    one = make(max_chunks=2)
    for at in range(4):
        one.put(b"%020d" % at, timeout=0)
    assert not one.full(), "there is room for a smaller one"
    one.put(b"12345678", timeout=0)
    assert one.full()
    for call in (lambda: one.put_nowait(b""), lambda: one.put(b"", timeout=0.01)):
        with pytest.raises(standard.Full):
            call()
    one.get()
    assert one.full(), "the chunk is in use yet"
    one.get()
    one.put_nowait(b"more")
    assert one.qsize() == 4


def test_a_batch_that_finds_no_room_says_how_much_of_it_was_put(make: Make) -> None:
    one = make(max_chunks=1)
    with pytest.raises(QueueFull) as caught:
        one.put_many([b"%020d" % at for at in range(5)], block=False)
    assert caught.value.placed == 2
    assert list(one) == [b"%020d" % at for at in range(2)]


def test_a_bound_of_one_chunk_goes_round(twin: ModuleType, make: Make) -> None:
    one = make(max_chunks=1)
    for at in range(20):
        one.put_nowait(b"%040d" % at)
        assert one.get_nowait() == b"%040d" % at


def test_a_bound_in_bytes_is_one_in_chunks(make: Make) -> None:
    assert make(max_bytes=1000).max_chunks == 15
    with pytest.raises(ValueError, match="leave 0"):
        make(max_bytes=63)


def test_peek_leaves_the_entry_and_get_takes_the_same(twin: ModuleType, make: Make) -> None:
    one = make()
    one.put_many([b"a", b"b"])
    assert (one.peek(), one.peek_nowait(), one.get(), one.peek()) == (b"a", b"a", b"a", b"b")


def test_get_if_takes_the_entry_only_if_the_predicate_says_so(twin: ModuleType, make: Make) -> None:
    one = make()
    one.put_many([b"a" * 40, b"b" * 40])
    assert one.get_if(lambda entry: entry.startswith(b"b")) is None
    assert one.qsize() == 2
    assert one.get_if(lambda entry: entry.startswith(b"a")) == b"a" * 40
    with pytest.raises(ZeroDivisionError):
        one.get_if(lambda entry: 1 / 0)
    assert list(one) == [b"b" * 40]


def test_get_if_asks_about_the_next_entry_if_another_process_takes_the_first_meanwhile(twin: ModuleType, make: Make) -> None:
    one, other = make(), make()
    one.put_many([b"a", b"b"])
    asked = []

    def predicate(entry: bytes) -> bool:
        asked.append(entry)
        if entry == b"a":
            assert other.get() == b"a"
        return True

    assert one.get_if(predicate) == b"b"
    assert asked == [b"a", b"b"]
    assert one.empty()


def test_draining_takes_one_entry_at_a_time(make: Make) -> None:
    one = make()
    one.put_many([b"a", b"b", b"c"])
    for entry in one.drain():
        if entry == b"b":
            break
    assert list(one.drain()) == [b"c"]


def test_iterating_continues_over_chunks_that_another_process_takes_meanwhile(twin: ModuleType, make: Make) -> None:
    one = make()
    one.put_many([b"%040d" % at for at in range(6)])
    entries = iter(one)
    assert next(entries) == b"%040d" % 0
    one.get_many(4)
    assert list(entries) == [b"%040d" % at for at in (4, 5)]


def test_consumed_chunks_go_at_once(twin: ModuleType, make: Make, path: Path) -> None:
    one = make()
    one.put_many([b"%040d" % at for at in range(4)])
    for left in (3, 2, 1):
        one.get()
        assert len(names(path)) == left + 1
    one.get()
    assert len(one) == 1


def test_an_emptied_queue_removes_all_its_files_when_the_last_handle_is_closed(twin: ModuleType, make: Make, path: Path) -> None:
    one, other = make(), make()
    one.put(b"a")
    other.get()
    other.close()
    assert names(path) == {"queue.dat", "queue.dat.1"}
    one.close()
    assert names(path) == set()


def test_a_header_that_a_killed_process_left_without_its_bytes_is_one_of_an_empty_queue(make: Make, path: Path) -> None:
    path.touch()
    one = make()
    assert path.read_bytes() == bytes(2)
    one.put(b"a")
    assert list(make()) == [b"a"]


def test_who_puts_into_a_queue_before_its_maker_has_gone_on_loses_nothing(interpreted: None, make: Make, path: Path) -> None:
    class Racing(system.Port):
        """Another handle opens the queue, and puts, as soon as its name is there."""

        def flush(self, fd: int) -> None:
            super().flush(fd)
            if stat.S_ISDIR(os.fstat(fd).st_mode) and not others:
                others.append(ChunkQueue.open(path))
                others[0].put(b"a")

    others: list[ChunkQueue] = []
    with system.replaced(Racing()):
        one = make()
    assert list(one) == [b"a"]
    others[0].close()


def test_of_two_handles_that_are_closed_at_once_the_second_removes_the_files(interpreted: None, make: Make, path: Path) -> None:
    class Late(system.Port):
        """Closes the other handle when the first one's share is not yet given back with its descriptor."""

        def unlock_all(self, fd: int) -> None:
            if not other._is_closed:
                other.close()
            super().unlock_all(fd)

    one, other = make(), make()
    one.put(b"a")
    other.get()
    with system.replaced(Late()):
        one.close()
    assert names(path) == set()


def test_a_queue_with_entries_stays_and_so_does_one_that_was_only_looked_at(make: Make, path: Path) -> None:
    one = make()
    one.close()
    assert names(path) == {"queue.dat"}
    with make() as one:
        one.put(b"a")
    with make() as one:
        assert one.peek() == b"a"
    assert names(path) == {"queue.dat", "queue.dat.1"}


def test_files_are_private_unless_told_otherwise(make: Make, path: Path) -> None:
    old = os.umask(0)
    try:
        make().put(b"a")
    finally:
        os.umask(old)
    for name in names(path):
        assert stat.S_IMODE((path.parent / name).stat().st_mode) == 0o600


def test_chunks_have_the_mode_of_the_header_whatever_the_umask_is(make: Make, path: Path) -> None:
    old = os.umask(0o077)
    try:
        make(mode=0o640).put(b"a")
    finally:
        os.umask(old)
    for name in names(path):
        assert stat.S_IMODE((path.parent / name).stat().st_mode) == 0o640


def test_creating_at_an_occupied_path_and_opening_at_a_free_one(path: Path) -> None:
    with pytest.raises(errors.LogNotFound):
        ChunkQueue.open(path)
    ChunkQueue.create(path).close()
    with pytest.raises(errors.LogExists):
        ChunkQueue.create(path)
    path.unlink()
    path.write_bytes(b"abc")
    with pytest.raises(errors.NotALog):
        ChunkQueue.open(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(errors.NotALog):
        ChunkQueue.open(path)


def test_a_closed_queue_says_so(twin: ModuleType, make: Make) -> None:
    one = make()
    one.put(b"a")
    one.close()
    one.close()
    for call in (one.get, one.qsize, one.sync, lambda: one.put(b"b"), lambda: len(one)):
        with pytest.raises(errors.Closed):
            call()


@pytest.mark.parametrize("item", ["text", None, 7, [b"x"]])
def test_only_bytes_are_entries(make: Make, item: object) -> None:
    with pytest.raises(TypeError):
        make().put(item)  # type: ignore[arg-type]


def test_bytes_like_items_are_entries(twin: ModuleType, make: Make) -> None:
    class Bytes(bytes):
        pass

    one = make()
    one.put_many([bytearray(b"a"), memoryview(b"b"), Bytes(b"c")])
    one.put(Bytes(b"d"))
    assert list(one) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_bytes": 63},
        {"chunk_bytes": 1 << 31},
        {"max_chunks": 0},
        {"max_chunks": 65535},
        {"durability": "none"},
        {"sync_interval": 1.0},
    ],
)
def test_options_that_mean_nothing_are_refused(make: Make, path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        make(**options)
    assert names(path) == set()


def test_ids_go_from_65534_to_1_and_never_are_0() -> None:
    assert [format.following(id) for id in (1, 65533, 65534, 65535)] == [2, 65534, 1, 1]
    assert [format.preceding(id) for id in (2, 1, 65534)] == [1, 65534, 65533]


def test_a_chain_goes_over_the_end_of_the_ids(twin: ModuleType, make: Make, path: Path) -> None:
    path.write_bytes((65533).to_bytes(2, "big"))
    (path.parent / "queue.dat.65533").write_bytes(format.FRESH + bytes(54))
    one = make()
    one.put_many([b"%040d" % at for at in range(4)])
    assert names(path) == {"queue.dat", *(f"queue.dat.{id}" for id in (65533, 65534, 1, 2))}
    assert [one.get() for _ in range(4)] == [b"%040d" % at for at in range(4)]


def test_when_every_id_is_taken_the_queue_is_full(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    monkeypatch.setattr(format, "MODULUS", 5)
    one = make()
    for at in range(4):
        one.put_nowait(b"%052d" % at)
    with pytest.raises(QueueFull, match="every chunk id"):
        one.put_nowait(bytes(52))
    assert one.full()
    one.get()
    one.put_nowait(b"%052d" % 4)
    assert [one.get() for _ in range(4)] == [b"%052d" % at for at in range(1, 5)]


def test_a_file_that_was_left_without_entries_is_replaced(make: Make, path: Path) -> None:
    one = make()
    for content in (b"", bytes(64), format.FRESH + bytes(54)):
        one.put(bytes(40))
        next_id = format.following(max(int(name.rpartition(".")[2]) for name in names(path) if name != "queue.dat"))
        (path.parent / f"queue.dat.{next_id}").write_bytes(content)
        one.put(bytes(40))
    assert one.qsize() == 6


def test_a_file_that_was_left_with_entries_is_never_overwritten(make: Make, path: Path) -> None:
    one = make()
    one.put(bytes(40))
    content = format.CHUNK_HEAD.pack(format.ChunkHead(10, 13, 0)) + b"\0\1a" + bytes(51)
    (path.parent / "queue.dat.2").write_bytes(content)
    with pytest.raises(errors.Corruption, match="nothing refers to it"):
        one.put(bytes(40))
    assert (path.parent / "queue.dat.2").read_bytes() == content
    assert list(one) == [bytes(40)]


def test_opening_removes_the_empty_chunk_that_a_killed_process_left_at_either_end(make: Make, path: Path) -> None:
    one = make()
    one.put_many([bytes(40)] * 3)
    one.get()
    for id in (1, 4):
        (path.parent / f"queue.dat.{id}").write_bytes(format.FRESH + bytes(54))
    make()
    assert names(path) == {"queue.dat", "queue.dat.2", "queue.dat.3"}


def test_a_queue_whose_header_is_deleted_or_replaced_is_gone_for_those_who_had_it_open(make: Make, path: Path) -> None:
    one = make()
    one.put(b"a")
    one._ends.look_at = 0  # as a second later
    path.unlink()
    with pytest.raises(errors.LogVanished):
        one.put(b"b")
    path.write_bytes(bytes(2))
    for call in (one.get, one.qsize, lambda: one.put(b"b")):
        with pytest.raises(errors.LogVanished):
            call()
    assert path.read_bytes() == bytes(2)


def test_a_chunk_that_is_deleted_under_an_open_queue_is_an_error(twin: ModuleType, make: Make, path: Path) -> None:
    one = make()
    one.put(b"a")
    (path.parent / "queue.dat.1").unlink()
    for call in (lambda: one.put(b"b"), one.get, one.qsize):
        with pytest.raises(errors.Corruption, match="does not exist"):
            call()


def test_a_chunk_that_is_truncated_under_an_open_queue_kills_no_process(twin: ModuleType, make: Make, path: Path) -> None:
    one = make(chunk_bytes=1 << 20)
    one.put(bytes(5000))
    os.truncate(path.parent / "queue.dat.1", 100)
    for call in (lambda: one.put(b"b"), one.get, one.peek, one.clear, one.qsize):
        with pytest.raises(errors.Truncated):
            call()


def test_a_chunk_that_is_truncated_during_an_iteration_kills_no_process(twin: ModuleType, make: Make, path: Path) -> None:
    one = make(chunk_bytes=1 << 20)
    one.put_many([bytes(100)] * 2000)
    entries = iter(one)
    next(entries)
    os.truncate(path.parent / "queue.dat.1", 100)
    with pytest.raises(errors.Truncated):
        list(entries)


def test_threads_share_a_handle(twin: ModuleType, make: Make) -> None:
    one = make(chunk_bytes=256, max_chunks=20)
    got: list[bytes] = []

    def put(name: int) -> None:
        for at in range(300):
            one.put(b"%d %d" % (name, at), timeout=30)

    def get() -> None:
        while (entry := one.get(timeout=30)) != b"end":
            got.append(entry)

    putters = [threading.Thread(target=put, args=(name,)) for name in range(3)]
    getters = [threading.Thread(target=get) for _ in range(3)]
    for thread in (*putters, *getters):
        thread.start()
    for thread in putters:
        thread.join()
    one.put_many([b"end"] * 3)
    for thread in getters:
        thread.join()
    assert sorted(got) == sorted(b"%d %d" % (name, at) for name in range(3) for at in range(300))
    assert one.empty()


def test_a_handle_used_inside_an_operation_of_itself_refuses_and_the_operation_continues(interpreted: None, make: Make) -> None:
    class Interrupting(system.Port):
        """Runs a signal handler, as it were, while the lock is held."""

        def status(self, fd: int) -> os.stat_result:
            if self.armed:
                self.armed = False
                with pytest.raises(errors.Reentered):
                    one.put(b"inner")
            return super().status(fd)

        armed = False

    one = make()
    one.put(b"first")
    port = Interrupting()
    with system.replaced(port):
        port.armed = True
        one.put(b"outer")
        assert not port.armed
    assert list(one) == [b"first", b"outer"]


def test_stats_say_what_is_there(make: Make) -> None:
    one = make(max_chunks=9)
    one.put_many([b"abc", b"", b"x" * 50])
    stats = one.stats()
    assert (stats.chunks, stats.entries, stats.bytes, stats.size, stats.chunk_bytes, stats.max_chunks) == (2, 3, 53, 128, 64, 9)


def test_a_new_handle_continues_with_chunks_of_the_size_that_it_finds(path: Path) -> None:
    with ChunkQueue.create(path, chunk_bytes=100) as one:
        one.put(bytes(80))
    with ChunkQueue.open(path) as one:
        one.put(bytes(80))
        assert one.stats().size == 200
