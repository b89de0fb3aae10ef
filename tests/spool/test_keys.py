"""The key table: golden bytes, killed and concurrent writers, a full, a damaged and a hostile one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import Killed

import kvspool
from kvspool import Spool, system
from kvspool.errors import LockTimeout, Poisoned, Undecodable
from kvspool.spool import format
from kvspool.spool.keys import HEAD, KeyTable

LOG_ID = bytes(range(16))
SIZE = format.INDEX_AT - format.KEYS_AT


class Memory:
    """Memory that raises `Killed` before the n-th store of at most 8 bytes; 0: never."""

    def __init__(self, view: memoryview, state: list[int]) -> None:
        self.view = view
        self.state = state  # stores left, stores done

    def cast(self, code: str) -> Memory:
        return Memory(self.view.cast(code), self.state)  # type: ignore[call-overload]

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, at: Any) -> Any:
        return self.view[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        pieces = [(at, value)]
        if isinstance(at, slice):
            pieces = [(slice(at.start + n, at.start + len(value[: n + 8])), value[n : n + 8]) for n in range(0, len(value), 8)]
        for place, piece in pieces:
            self.state[0] -= 1
            self.state[1] += 1
            if self.state[0] == 0:
                raise Killed
            self.view[place] = piece


def no_flush() -> None:
    pass


def table_in(region: Any) -> KeyTable:
    return KeyTable(region, LOG_ID)


def names(table: KeyTable) -> list[str]:
    assert list(table.keys.names) == list(range(len(table.keys.names)))
    return list(table.keys.names.values())


def test_the_table_has_its_golden_bytes() -> None:
    region = bytearray(SIZE)
    table_in(memoryview(region)).add(["user", "é"], no_flush)
    expected = struct.pack("<Q56x", 18) + bytes.fromhex("0400 fb8edc0c 75736572 0200 54b60227 c3a9")
    assert region[: len(expected)].hex() == expected.hex()
    assert not any(region[len(expected) :])
    again = table_in(memoryview(region))
    assert again.indexes == {"user": 0, "é": 1} and names(again) == ["user", "é"]


def test_keys_are_added_once_and_found_by_all() -> None:
    region = memoryview(bytearray(SIZE))
    one, other = table_in(region), table_in(region)
    flushes: list[int] = []
    one.add(["a", "b", "a"], lambda: flushes.append(one._words[0]))
    other.add(["b", "c"], lambda: flushes.append(one._words[0]))
    other.add(["a", "b", "c"], lambda: flushes.append(one._words[0]))
    assert flushes == [0, 14], "each addition is flushed once, before it is published"
    one.look()
    assert one.indexes == other.indexes == {"a": 0, "b": 1, "c": 2}
    one.close()
    one.look()
    one.refresh()
    assert one.keys.name(2) == "c"
    with pytest.raises(ValueError, match="key 3 is not"):
        one.keys.name(3)


def test_a_key_that_another_process_added_is_looked_up() -> None:
    region = memoryview(bytearray(SIZE))
    one, other = table_in(region), table_in(region)
    other.add(["a"], no_flush)
    assert one.keys.names == {}
    assert one.keys.name(0) == "a"


def test_a_writer_killed_at_any_store_leaves_a_valid_table() -> None:
    before, added = ["first", "second"], ["third", "a longer key that takes several stores", "é"]
    stores = 0
    at = 0
    while at == 0 or at <= stores:
        region = memoryview(bytearray(SIZE))
        table_in(region).add(before, no_flush)
        state = [at, 0]
        dying = table_in(Memory(region, state))
        try:
            dying.add(added, no_flush)
            stores = state[1]
        except Killed:
            reader = table_in(region)
            assert reader.indexes == {"first": 0, "second": 1}, "nothing was published"
            assert names(reader) == (before + added)[: len(names(reader))]
            table_in(region).add(["é", "other"], no_flush)
            after = table_in(region)
            assert {*before, "é", "other"} <= set(after.indexes)
            assert [after.indexes[key] for key in before] == [0, 1]
            assert len(set(after.indexes.values())) == len(after.indexes)
            reader.look()
            assert reader.indexes == after.indexes and reader.keys.names == after.keys.names
        at += 1
    assert stores == 10


def test_a_failed_flush_publishes_nothing() -> None:
    region = memoryview(bytearray(SIZE))
    table = table_in(region)

    def fail() -> None:
        raise OSError(errno.EIO, "")

    with pytest.raises(OSError):
        table.add(["a"], fail)
    assert table_in(region).indexes == {}


def test_a_full_table_takes_no_more_and_stays_as_it_is() -> None:
    region = memoryview(bytearray(SIZE))
    table = table_in(region)
    table.add([f"{at:060}" for at in range(1000)], no_flush)
    assert table.is_full and 500 < len(table.indexes) < 600
    content = bytes(region)
    table.add(["more"], no_flush)
    assert bytes(region) == content and table_in(region).indexes == table.indexes


@pytest.mark.parametrize("used", [1, 7, 2**63, 2**64 - 1, SIZE, SIZE - HEAD])
def test_a_used_that_is_wrong_ends_the_additions_and_no_look_up(used: int) -> None:
    region = memoryview(bytearray(SIZE))
    table_in(region).add(["a"], no_flush)
    used = 8 if used == 7 else used
    region.cast("Q")[0] = used
    table = table_in(region)
    assert names(table) == ["a"] and table.is_full
    content = bytes(region)
    table.add(["b"], no_flush)
    assert bytes(region) == content


def test_damaged_entries_are_unknown_and_never_written_over() -> None:
    region = memoryview(bytearray(SIZE))
    table_in(region).add(["one", "two", "three"], no_flush)
    sound = bytes(region)
    for bit in range(8 * HEAD, 8 * (HEAD + 29)):
        region[:] = sound
        region[bit >> 3] ^= 1 << (bit & 7)
        table = table_in(region)
        assert names(table) == ["one", "two", "three"][: min(2, ((bit >> 3) - HEAD) // 9)] and table.is_full
        content = bytes(region)
        table.add(["four"], no_flush)
        assert bytes(region) == content


def test_sound_entries_that_are_no_keys_end_the_table() -> None:
    for key in (b"\xff", b"x" * 65, b""):
        region = memoryview(bytearray(SIZE))
        table = table_in(region)
        entry = table._entry(key, 0)
        region[HEAD : HEAD + len(entry)] = entry
        assert names(table_in(region)) == []


def test_any_content_is_a_table() -> None:
    chance = random.Random(5)
    for _ in range(50):
        region = memoryview(bytearray(chance.randbytes(SIZE)))
        table = table_in(region)
        table.add(["a"], no_flush)
        assert table.keys.names == {}
    ones = table_in(memoryview(bytearray(b"\xff" * SIZE)))
    assert ones.keys.names == {} and ones.is_full


# In a log.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kvspool.create(tmp_path / "log", capacity="1MiB", codec="keyed").close()
    return tmp_path / "log"


def test_the_table_of_a_log_is_where_the_format_says(path: Path) -> None:
    with kvspool.open(path) as log:
        log.append({"user": 1})
        control = (path / format.CONTROL_FILE).read_bytes()
        assert control[format.KEYS_AT : format.KEYS_AT + 8] == (10).to_bytes(8, "little")
        assert control[format.KEYS_AT + HEAD + 6 :][:4] == b"user"


def test_a_stream_of_ever_new_keys_fills_the_table_and_continues(path: Path) -> None:
    with kvspool.open(path) as log:
        values = [{f"{at:050}": at, "n": at} for at in range(800)]
        log.append_many(values)
        assert [record.data for record in log.read()] == values
        assert log._files is not None and log._files.key_table is not None and log._files.key_table.is_full


def test_a_damaged_table_costs_the_records_that_name_it(path: Path) -> None:
    with kvspool.open(path) as log:
        log.append_many([{"a": 1}, {"b": 2}, "text"])
    with open(path / format.CONTROL_FILE, "r+b") as file:
        file.seek(format.KEYS_AT + HEAD + 7 + 6)
        file.write(b"x")
    with kvspool.open(path) as log:
        first, second, third = log.read()
        assert (first.data, third.data) == ({"a": 1}, "text")
        with pytest.raises(Undecodable, match="record 1 isn't valid KEYED: key 1 is not in the log's key table"):
            second.data  # noqa: B018
        log.append({"a": 3, "b": 4})
        assert list(log.read(3))[0].data == {"a": 3, "b": 4}, "new keys stay in the record"


class BrokenDisk(system.Port):
    def flush_data(self, fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_poisons_the_log(path: Path) -> None:
    with kvspool.open(path) as log:
        log.append({"a": 1})
        with system.replaced(BrokenDisk()):
            log.append({"a": 2})
            with pytest.raises(Poisoned):
                log.append({"b": 1})
        with pytest.raises(Poisoned):
            log.append({"a": 1})
        assert [record.data for record in log.read()] == [{"a": 1}, {"a": 2}]


def test_a_long_wait_for_the_key_lock_is_an_error(path: Path) -> None:
    with kvspool.open(path) as holder, kvspool.open(path, timeout=0) as log:
        log.append({"a": 1})
        fd = system.port.open(path / format.CONTROL_FILE, os.O_RDWR)
        assert system.port.try_lock(fd, format.KEYS_LOCK)
        with pytest.raises(LockTimeout, match="another process adds keys"):
            log.append({"b": 1})
        log.append({"a": 2})
        os.close(fd)
        log.append({"b": 3})
        assert [record.data for record in holder.read()] == [{"a": 1}, {"a": 2}, {"b": 3}]


def _add(path: Path, seed: int, barrier: Any) -> None:
    chance = random.Random(seed)
    with kvspool.open(path) as log:
        barrier.wait(30)
        for at in range(40):
            log.append({f"k{chance.randrange(60)}": at, "who": seed, f"own{seed}.{at}": {f"k{chance.randrange(60)}": 1}})


def test_many_processes_add_keys_at_once(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    writers = [context.Process(target=_add, args=(path, seed, barrier)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    with kvspool.open(path) as log:
        records = [record.data for record in log.read()]
        assert log._files is not None and log._files.key_table is not None
        known = list(log._files.key_table.keys.names.values())
    assert len(records) == 160 and len(known) == len(set(known)) > 160
    for seed in range(4):
        chance, mine = random.Random(seed), iter([record for record in records if record["who"] == seed])
        for at in range(40):
            first = f"k{chance.randrange(60)}"
            assert next(mine) == {first: at, "who": seed, f"own{seed}.{at}": {f"k{chance.randrange(60)}": 1}}


def killed_at(nth: int, operation: Callable[[], object]) -> bool:
    """Run the operation in a child that is killed at its n-th call to the system; return whether there was one."""

    class Dying(system.Port):
        left = nth

        def __getattribute__(self, name: str) -> Any:
            if name in ("flush_data", "fence", "try_lock", "unlock"):
                Dying.left -= 1
                if Dying.left == 0:
                    os.kill(os.getpid(), 9)
            return super().__getattribute__(name)

    child = os.fork()
    if child == 0:
        try:
            with system.replaced(Dying()):
                operation()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 9


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_killed_while_it_adds_keys_stops_no_other_process(path: Path) -> None:
    def append() -> None:
        with kvspool.open(path) as fresh:
            fresh.append({"new": 1, "old": 2})

    with kvspool.open(path, timeout=0) as log:
        log.append({"old": 0})
        deaths = 0
        while killed_at(deaths + 1, append):
            deaths += 1
            if deaths == 1:
                log.append({"old": 1})
        assert deaths >= 4
        log.append({"new": 3})
        assert [record.data for record in log.read()][-1] == {"new": 3}
        assert all(set(record.data) <= {"old", "new"} for record in log.read())


def test_a_log_of_another_codec_has_no_table(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.append({"a": 1})
        assert not any((log.path / format.CONTROL_FILE).read_bytes()[format.KEYS_AT : format.INDEX_AT])
        assert isinstance(log, Spool)
