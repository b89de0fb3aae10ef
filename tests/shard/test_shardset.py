"""The sharded log: what goes where, what a reader gets, and what a root may look like."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from children import Died, in_child, start
from faults import TouchingPort

import hub
import kvspool
import shard
from kvspool import Gap, GapError, system
from kvspool.engine import locks
from kvspool.errors import LogExists, LogNotFound, NotALog, OutOfRange, TooLarge, Unencodable, UnsafeFilesystem
from kvspool.record import Codec
from kvspool.spool import format
from shard import ConflictingShardSets, IncompleteShardSet, Place, ShardSet, route
from shard.errors import AppendedToSomeShards
from shard.shardset import default_capacity

SMALL = 4096
SECOND = 1_000_000_000
WRITTEN = 300  # records into a ring that holds a third of them


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[ShardSet]:
    """Four shards of 64 KiB each."""
    with shard.create(tmp_path / "root", prefix="p", bits=2, capacity=65536) as shards:
        yield shards


def key_of(index: int, bits: int) -> bytes:
    """Return the first key that belongs to a shard."""
    return next(key for key in (b"key-%d" % at for at in itertools.count()) if route.shard_of(key, bits) == index)


def values(records: Any) -> list[Any]:
    return [record.data for record in records]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# Making and opening.


def test_the_rings_of_a_set_are_brought_into_memory_only_when_asked(tmp_path: Path) -> None:
    port = TouchingPort(1 << 40)
    with system.replaced(port):
        shard.create(tmp_path / "root", prefix="p", bits=1, capacity=SMALL).close()
        assert port.touched == []
        shard.create(tmp_path / "root", prefix="q", bits=1, capacity=SMALL, prefill=True).close()
        assert port.touched == [(4096, 8192)] * 2


@pytest.mark.parametrize(("bits", "capacity"), [(0, 64 << 20), (2, 16 << 20), (6, 1 << 20), (10, 1 << 20)])
def test_by_default_the_rings_of_a_set_have_in_all_what_one_log_has_and_one_has_1_mib_at_least(bits: int, capacity: int) -> None:
    assert default_capacity(bits) == capacity


def test_four_shards_take_the_disk_space_of_one_log(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=2, capacity=None) as shards:
        assert {stats.capacity for stats in shards.stats()} == {16 << 20}
        shards.append(b"one")
    kvspool.create(tmp_path / "log", prefill=False).close()
    taken = [sum(path.stat().st_blocks * 512 for path in (tmp_path / name).rglob("*")) for name in ("root", "log")]
    assert 64 << 20 <= taken[1] <= taken[0] < 66 << 20


@pytest.mark.parametrize(
    "options", [{"capcity": 4096}, {"bit": 2}, {"format": "kvj", "capacity": 4096}, {"format": "sej", "prefill": True}]
)
def test_create_refuses_options_that_no_shard_has(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="did you mean|a journal in the format"):
        shard.create(tmp_path / "root", prefix="p", bits=1, **options)
    with hub.create(tmp_path / "hub") as root, pytest.raises(TypeError, match="did you mean|a journal in the format"):
        root.create_client("client", bits=1, **options)
    assert os.listdir(tmp_path) == ["hub"] and os.listdir(tmp_path / "hub") == []


def test_a_set_that_may_exist_is_opened_if_its_shards_have_the_settings(tmp_path: Path) -> None:
    shard.create(tmp_path / "root", prefix="p", bits=1, capacity=SMALL).close()
    for options in ({}, {"capacity": SMALL}):
        with shard.create(tmp_path / "root", prefix="p", bits=1, exist_ok=True, **options) as shards:
            assert {stats.capacity for stats in shards.stats()} == {SMALL}
    with pytest.raises(LogExists, match=r"p.1.000 exists with other settings .*: policy overwrite -> block, capacity 4.0 KiB -> 8.0 KiB"):
        shard.create(tmp_path / "root", prefix="p", bits=1, exist_ok=True, capacity=2 * SMALL, policy="block")


def test_create_makes_a_log_for_each_shard_and_the_root_for_its_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with shard.create(root, prefix="p", bits=2, capacity=SMALL, codec="msgpack", mode=0o640) as shards:
        assert (shards.prefix, shards.bits, len(shards.shards)) == ("p", 2, 4)
        assert {stats.codec for stats in shards.stats()} == {"msgpack"}
    assert names(root) == ["p.2.000", "p.2.001", "p.2.002", "p.2.003"]
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / "p.2.003" / format.CONTROL_FILE).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("prefix", "bits", "expected"), [("", 1, ["1.000", "1.001"]), ("p", 0, ["p"]), ("-", 0, ["-"])])
def test_create_names_the_directories_as_the_format_does(tmp_path: Path, prefix: str, bits: int, expected: list[str]) -> None:
    with shard.create(tmp_path / "root", prefix=prefix, bits=bits, capacity=SMALL) as shards:
        places = [shards.append(b"v", key=b"k"), shards.append(b"v")]
        assert {place.shard for place in places} <= set(range(1 << bits))
    assert names(tmp_path / "root") == expected
    with shard.open(tmp_path / "root") as shards:
        assert (shards.prefix, shards.bits) == (prefix, bits)
        assert len(list(shards)) == 2


def test_create_without_bits_or_prefix_is_refused_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a prefix"):
        shard.create(tmp_path / "root", bits=0)
    assert names(tmp_path) == []


@pytest.mark.parametrize("prefix", ["../x", "a/b", "a.b", "a\n", "a\0", "é"], ids=ascii)
def test_a_bad_prefix_is_refused_and_nothing_is_made(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match="a prefix may have only the characters"):
        shard.create(tmp_path / "root", prefix=prefix, bits=1)
    with pytest.raises(ValueError, match="a prefix may have only the characters"):
        shard.open(tmp_path, prefix=prefix)
    assert names(tmp_path) == []


@pytest.mark.parametrize("bits", [-1, 11, True, "1"], ids=repr)
def test_bad_bits_are_refused_and_nothing_is_made(tmp_path: Path, bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits must be 0\.\.10"):
        shard.create(tmp_path / "root", prefix="p", bits=bits)
    assert names(tmp_path) == []


def test_a_set_that_is_there_is_refused_unless_it_may_be(shards: ShardSet) -> None:
    shards.append("kept", key=b"k")
    with pytest.raises(LogExists, match="has a shard set with prefix 'p' already; shard.open opens it"):
        shard.create(shards.root, prefix="p", bits=2)
    with shard.create(shards.root, prefix="p", bits=2, exist_ok=True) as again:
        assert values(again) == ["kept"]


@pytest.mark.parametrize("exist_ok", [False, True])
def test_another_number_of_shards_for_a_prefix_is_refused(shards: ShardSet, exist_ok: bool) -> None:
    before = names(shards.root)
    with pytest.raises(ConflictingShardSets, match="prefix 'p' has 2 bits already, not 3"):
        shard.create(shards.root, prefix="p", bits=3, exist_ok=exist_ok)
    assert names(shards.root) == before


def test_a_set_whose_last_shards_are_missing_is_completed(shards: ShardSet) -> None:
    shards.append("kept", key=key_of(1, 2))
    shutil.rmtree(shards.root / "p.2.002")
    shutil.rmtree(shards.root / "p.2.003")
    with pytest.raises(IncompleteShardSet, match=r"2 of the 4 shards of prefix 'p' are missing: p\.2\.002, p\.2\.003$"):
        shard.open(shards.root)
    with shard.create(shards.root, prefix="p", bits=2, capacity=SMALL) as again:
        assert values(again) == ["kept"]
        assert [stats.capacity for stats in again.stats()] == [65536, 65536, SMALL, SMALL]


@pytest.mark.parametrize(("renames", "expected"), [(1, []), (3, ["p.2.000", "p.2.001"])])
def test_a_create_that_was_killed_is_resumed(tmp_path: Path, renames: int, expected: list[str]) -> None:
    root = tmp_path / "root"

    class Killing(system.Port):
        def rename_new(self, *arguments: Any) -> None:
            nonlocal renames
            renames -= 1
            if not renames:
                os.kill(os.getpid(), signal.SIGKILL)
            super().rename_new(*arguments)

    def create() -> None:
        with system.replaced(Killing()):
            shard.create(root, prefix="p", bits=2, capacity=SMALL)

    with pytest.raises(Died) as death:
        in_child(create)

    assert death.value.signal == signal.SIGKILL
    assert [name for name in names(root) if not name.startswith(".")] == expected
    with pytest.raises(IncompleteShardSet if expected else LogNotFound):
        shard.open(root, prefix="p")
    with shard.create(root, prefix="p", bits=2, capacity=SMALL) as shards:
        assert len(shards.shards) == 4
        for index in range(4):
            shards.append(index, key=key_of(index, 2))
        assert sorted(values(shards)) == [0, 1, 2, 3]


def test_two_processes_may_create_the_same_set_at_once(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    gate, release = os.pipe()

    def create() -> bytes:
        os.close(release)
        os.read(gate, 1)
        with shard.create(root, prefix="p", bits=4, capacity=SMALL, exist_ok=True) as shards:
            shards.append(b"mine", key=b"k")
            return shards.shards[0].log_id

    waits = [start(create) for _ in range(3)]
    os.close(release)
    os.close(gate)

    assert len({wait() for wait in waits}) == 1
    with shard.open(root) as shards:
        assert len(shards.shards) == 16
        assert values(shards) == [b"mine"] * 3


def test_a_root_that_another_process_makes_at_the_same_moment_is_used(tmp_path: Path) -> None:
    root = tmp_path / "root"

    class Overtaken(system.Port):
        def make_directory(self, path: Any, mode: int = 0o700) -> None:
            if Path(path) == root:
                super().make_directory(path, mode)
            super().make_directory(path, mode)

    with system.replaced(Overtaken()), shard.create(root, prefix="p", bits=1, capacity=SMALL) as shards:
        assert len(shards.shards) == 2


def test_the_parent_of_the_root_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        shard.create(tmp_path / "none" / "root", prefix="p", bits=1)
    assert names(tmp_path) == []


def test_a_disk_without_room_for_all_shards_leaves_those_before_and_create_continues(tmp_path: Path) -> None:
    class Full(system.Port):
        left = 3  # files

        def allocate(self, fd: int, size: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")
            super().allocate(fd, size)

    with system.replaced(Full()), pytest.raises(OSError, match="No space left") as failure:
        shard.create(tmp_path / "root", prefix="p", bits=1, capacity=SMALL)
    assert "p.1.001" in failure.value.__notes__[0]
    assert names(tmp_path / "root") == ["p.1.000"]
    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=SMALL) as shards:
        assert len(shards.shards) == 2


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    class Network(system.Port):
        def mounts(self) -> str:
            return "1 0 0:1 / / rw - nfs4 server:/ rw"

    with system.replaced(Network()):
        with pytest.raises(UnsafeFilesystem):
            shard.create(tmp_path / "root", prefix="p", bits=1, capacity=SMALL)
        with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=SMALL, allow_unsafe_fs=True) as shards:
            assert len(shards.shards) == 2


def test_open_takes_the_only_set_and_asks_for_the_prefix_of_several(tmp_path: Path) -> None:
    with shard.create(tmp_path, prefix="b", bits=1, capacity=SMALL) as shards:
        shards.append("of b")
    with shard.open(tmp_path) as shards:
        assert shards.prefix == "b"
    shard.create(tmp_path, prefix="", bits=2, capacity=SMALL).close()
    with pytest.raises(ValueError, match="several shard sets; give a prefix: '', 'b'"):
        shard.open(tmp_path)
    with shard.open(tmp_path, prefix="b") as shards:
        assert values(shards) == ["of b"]
    with shard.open(tmp_path, prefix="") as shards:
        assert (shards.bits, values(shards)) == (2, [])


def test_what_is_not_there_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(LogNotFound, match="is not a directory"):
        shard.open(tmp_path / "none")
    with pytest.raises(LogNotFound, match="has no shard set with prefix ''; it has none"):
        shard.open(tmp_path)
    shard.create(tmp_path, prefix="p", bits=1, capacity=SMALL).close()
    with pytest.raises(LogNotFound, match="has no shard set with prefix 'q'; it has 'p'"):
        shard.open(tmp_path, prefix="q")


def test_a_missing_shard_is_an_error_that_names_it(shards: ShardSet) -> None:
    shutil.rmtree(shards.root / "p.2.001")
    with pytest.raises(IncompleteShardSet, match=r"1 of the 4 shards of prefix 'p' are missing: p\.2\.001$"):
        shard.open(shards.root)


def test_two_numbers_of_shards_under_one_prefix_are_an_error(shards: ShardSet) -> None:
    kvspool.create(shards.root / "p.1.000", capacity=SMALL).close()
    with pytest.raises(ConflictingShardSets, match="prefix 'p' has shards of 1 and of 2 bits"):
        shard.open(shards.root)
    with pytest.raises(ConflictingShardSets):
        shard.create(shards.root, prefix="p", bits=2, exist_ok=True)


def test_an_index_beyond_the_bits_is_an_error(shards: ShardSet) -> None:
    kvspool.create(shards.root / "p.2.004", capacity=SMALL).close()
    with pytest.raises(ConflictingShardSets, match="has 2 bits, but a shard with index 0x4"):
        shard.open(shards.root)


def test_a_shard_that_is_no_log_is_an_error_and_leaves_nothing_open(shards: ShardSet, open_files: Callable[[], set[str]]) -> None:
    shards.close()
    (shards.root / "p.2.003" / format.CONTROL_FILE).write_bytes(b"something else" * 100)
    before = open_files()
    with pytest.raises(NotALog, match=r"p\.2\.003"):
        shard.open(shards.root)
    assert open_files() == before


def test_kvspool_open_says_who_opens_a_root(shards: ShardSet) -> None:
    with pytest.raises(NotALog, match=r"shard\.open"):
        kvspool.open(shards.root)


def test_every_error_of_a_root_is_a_shard_error_and_a_kvspool_error() -> None:
    for error in (IncompleteShardSet, ConflictingShardSets):
        assert issubclass(error, shard.ShardError)
        assert issubclass(error, kvspool.KvspoolError)
        assert error.exit_code == 4


# Where a record goes.


def test_append_says_where_the_record_went(shards: ShardSet) -> None:
    place = shards.append({"n": 1}, key=b"hello", type=3, timestamp=77)
    assert place == Place(route.shard_of(b"hello", 2), 0)
    (record,) = shards.read()
    assert (record.shard, record.sequence, record.key, record.type, record.timestamp) == (place.shard, 0, b"hello", 3, 77)
    assert record.data == {"n": 1}
    assert shards.append("again", key=b"hello") == Place(place.shard, 1)


def test_records_without_a_key_take_turns(shards: ShardSet) -> None:
    turns = [shards.append(b"v").shard for _ in range(8)]
    assert sorted(turns[:4]) == [0, 1, 2, 3]
    assert turns[4:] == turns[:4]
    written = shards.append_many([b"v"] * 40)
    assert {index: len(sequences) for index, sequences in written.items()} == dict.fromkeys(range(4), 10)
    assert {record.key for record in shards.read()} == {None}


def test_an_empty_key_is_a_key(shards: ShardSet) -> None:
    home = 0x1CD9 & 3
    assert [shards.append(b"v", key=b"").shard for _ in range(5)] == [home] * 5
    assert set(shards.append_many([b"v"] * 5, keys=[b""] * 5)) == {home}
    assert {record.key for record in shards.read()} == {b""}


def test_append_many_puts_each_value_into_its_key_s_shard_in_order(shards: ShardSet) -> None:
    keys = [b"key-%d" % (at % 13) for at in range(100)]
    written = shards.append_many((at for at in range(100)), keys=iter(keys), type=9)

    assert {index: len(sequences) for index, sequences in written.items()} == {
        index: sum(route.shard_of(key, 2) == index for key in keys) for index in range(4)
    }
    for record in shards.read():
        assert record.key == keys[record.data]
        assert record.shard == route.shard_of(record.key, 2)
        assert record.type == 9
    for index, one in enumerate(shards.shards):
        assert values(one) == [at for at, key in enumerate(keys) if route.shard_of(key, 2) == index]


def test_append_many_of_nothing_appends_nothing(shards: ShardSet) -> None:
    assert shards.append_many([]) == {}
    assert list(shards) == []


def test_the_same_key_goes_to_the_same_shard_in_every_process_and_handle(shards: ShardSet) -> None:
    keys = [b"key-%d" % at for at in range(50)]
    ours = {key: shards.append(b"v", key=key).shard for key in keys}

    def theirs() -> dict[bytes, int]:
        with shard.open(shards.root) as again:
            return {key: again.append(b"v", key=key).shard for key in reversed(keys)}

    assert in_child(theirs) == ours
    with shard.open(shards.root) as again:
        assert {key: again.shard_of(key) for key in keys} == ours
    assert {key: route.shard_of(key, 2) for key in keys} == ours
    assert len(list(shards)) == 100


@pytest.mark.parametrize(
    ("values", "keys", "error"),
    [
        ([b"a", object(), b"c"], None, Unencodable),
        ([b"a", b"b", bytes(20_000)], None, TooLarge),
        ([b"a"] * 40 + [{1: object()}], None, Unencodable),
        ([b"a", b"b"], [b"k"], ValueError),
        ([b"a", b"b"], [b"k", 7], TypeError),
        ("ab", None, TypeError),
        ([b"a", b"b"], "kk", TypeError),
        ([b"a", b"b"], [b"k", bytearray(b"k")], TypeError),
        ([b"a", b"b"], [b"k", bytes(65_535)], TooLarge),
    ],
)
def test_nothing_is_written_if_one_of_the_values_or_keys_cannot_be(
    shards: ShardSet, values: list[Any], keys: list[Any] | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        shards.append_many(values, keys=keys)
    assert list(shards) == []


@pytest.mark.parametrize(("options", "error"), [({"type": 256}, ValueError), ({"type": -1}, ValueError), ({"timestamp": -1}, ValueError)])
def test_a_bad_type_or_timestamp_is_refused(shards: ShardSet, options: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        shards.append_many([b"a", b"b"], **options)
    with pytest.raises(error):
        shards.append(b"a", **options)
    assert list(shards) == []


@pytest.mark.parametrize("key", [["text"], 1, bytearray(b"k")], ids=repr)
def test_a_key_that_is_neither_bytes_nor_text_is_refused(shards: ShardSet, key: Any) -> None:
    with pytest.raises(TypeError, match="a key must be bytes, str or None"):
        shards.append(b"v", key=key)
    assert list(shards) == []


def test_a_lock_that_another_writer_holds_ends_a_batch_with_what_was_appended(shards: ShardSet) -> None:
    keys = [key_of(index, 2) for index in range(4)]
    with shard.open(shards.root, timeout=0.01) as impatient:
        with kvspool.open(shards.root / "p.2.002") as other:
            lock = other._live().append_lock
            with locks.appending(lock, 1, str), pytest.raises(AppendedToSomeShards, match="2 of 4 shards") as failure:
                impatient.append_many([0, 1, 2, 3], keys=keys)
            with locks.appending(lock, 1, str), pytest.raises(kvspool.errors.LockTimeout):
                impatient.append_many([2, 3], keys=keys[2:])
    assert failure.value.parts == {0: [range(1)], 1: [range(1)]}
    assert isinstance(failure.value.__cause__, kvspool.errors.LockTimeout)
    assert values(shards) == [0, 1]


# Arrow.


def arrow_batch(count: int) -> Any:
    pa = pytest.importorskip("pyarrow")
    return pa.RecordBatch.from_pydict(
        {
            "value": pa.array([b"value-%d" % at for at in range(count)], pa.binary()),
            "key": pa.array([None if at % 5 == 0 else b"key-%d" % (at % 7) for at in range(count)], pa.binary()),
            "type": pa.array([at % 200 for at in range(count)], pa.int32()),
            "timestamp": pa.array([1000 + at for at in range(count)], pa.timestamp("ns")),
        }
    )


def test_append_arrow_puts_each_row_into_its_key_s_shard_in_order(shards: ShardSet) -> None:
    batch = arrow_batch(300)
    written = shards.append_arrow(batch, codec=Codec.TEXT)

    assert sum(len(part) for parts in written.values() for part in parts) == 300
    rows = batch.drop_columns(["timestamp"]).to_pylist()  # which pyarrow would give as an object of pandas
    keyed = 0
    without: dict[int, int] = {}
    for record in shards.read():
        at = int(record.data.removeprefix("value-"))
        row = rows[at]
        assert (record.key, record.type, record.timestamp) == (row["key"], row["type"], 1000 + at)
        assert record.codec == Codec.TEXT
        if record.key is None:
            without[record.shard] = without.get(record.shard, 0) + 1
        else:
            assert record.shard == route.shard_of(record.key, 2)
            keyed += 1
    assert keyed == 240
    assert without == dict.fromkeys(range(4), 15)
    for one in shards.shards:
        found = [int(record.value.removeprefix(b"value-")) for record in one]
        assert found == sorted(found)


def test_append_arrow_takes_a_table_a_slice_and_a_batch_without_keys(shards: ShardSet) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_batches([arrow_batch(10).slice(3, 4), arrow_batch(10).slice(9)])
    written = shards.append_arrow(table)
    assert sum(len(part) for parts in written.values() for part in parts) == 5
    assert sorted(record.value for record in shards) == [b"value-%d" % at for at in (3, 4, 5, 6, 9)]
    assert shards.append_arrow(arrow_batch(10).slice(0, 0)) == {}
    written = shards.append_arrow(pa.RecordBatch.from_pydict({"value": [b"x"] * 8}))
    assert {index: [len(part) for part in parts] for index, parts in written.items()} == dict.fromkeys(range(4), [2])


def test_append_arrow_and_append_agree_on_the_shard_of_a_key(shards: ShardSet) -> None:
    pa = pytest.importorskip("pyarrow")
    keys = [b"", b"a", b"hello", b"key-000000000", b"key-000000001"]
    one_by_one = [shards.append(key, key=key).shard for key in keys]
    shards.append_arrow(pa.RecordBatch.from_pydict({"value": keys, "key": keys}))
    for index, key in zip(one_by_one, keys, strict=True):
        assert [record.shard for record in shards if record.key == key] == [index, index]


def test_append_arrow_writes_nothing_if_a_row_of_the_batch_cannot_be(shards: ShardSet) -> None:
    pa = pytest.importorskip("pyarrow")
    good = [b"v"] * 20
    for columns, error in (
        ({"value": [*good, None]}, ValueError),
        ({"value": [*good, bytes(20_000)]}, TooLarge),
        ({"value": good, "key": [*good[1:], bytes(65_535)]}, TooLarge),
        ({"value": good, "type": [*([0] * 19), 256]}, ValueError),
        ({"key": good}, ValueError),
        ({"value": good, "colour": good}, ValueError),
        ({"value": list(range(20))}, TypeError),
    ):
        with pytest.raises(error):
            shards.append_arrow(pa.RecordBatch.from_pydict(columns))
    assert list(shards) == []


def test_append_arrow_writes_nothing_if_a_row_of_the_table_s_last_part_cannot_be(shards: ShardSet) -> None:
    pa = pytest.importorskip("pyarrow")
    parts = [pa.RecordBatch.from_pydict({"value": [value] * 8}) for value in (b"small", bytes(20_000))]
    with pytest.raises(TooLarge):
        shards.append_arrow(pa.Table.from_batches(parts))
    assert list(shards) == []


# Reading.


def test_read_starts_at_a_sequence_of_each_shard_and_the_others_at_the_earliest(shards: ShardSet) -> None:
    for index in range(4):
        shards.append_many([(index, at) for at in range(3)], keys=[key_of(index, 2)] * 3)
    got = {(record.shard, record.sequence) for record in shards.read(start={1: 2, 3: 3})}
    assert got == {(0, 0), (0, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)}
    assert len(list(shards.read(start={}))) == 12


def test_a_start_at_the_latest_gives_only_what_comes_after(shards: ShardSet) -> None:
    shards.append_many(["before"] * 8)
    assert list(shards.read(start="latest")) == []
    with closing(shards.follow(start="latest", timeout=0, limit=2)) as following:
        assert list(following) == []
    with closing(shards.follow(start="latest", limit=2)) as following:
        shards.append_many(["after"] * 4)
        assert values(following) == ["after", "after"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({4: 0}, ValueError),
        ({-1: 0}, ValueError),
        ({0: 1}, OutOfRange),
        ({0: -1}, ValueError),
        (datetime(2026, 1, 1), ValueError),
        ("newest", ValueError),
        (True, ValueError),
    ],
    ids=repr,
)
def test_a_start_that_can_not_be_is_refused(shards: ShardSet, given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        shards.read(start=given)


@pytest.mark.parametrize("options", [{"start": {9: 0}}, {"start": "newest"}, {"on_gap": "ignore"}], ids=repr)
def test_a_follow_that_is_refused_leaves_nothing_open(
    shards: ShardSet, left_open: Callable[..., set[str]], options: dict[str, Any]
) -> None:
    assert left_open(ValueError, lambda: shards.follow(**options)) == set()


@pytest.fixture
def overrun(tmp_path: Path) -> Iterator[tuple[ShardSet, dict[int, Gap]]]:
    """Two rings of 4 KiB, the second of which was written over; and the gap of a reader that wants everything."""
    with shard.create(tmp_path / "tiny", prefix="t", bits=1, capacity=SMALL) as shards:
        shards.append_many(list(range(3)), keys=[key_of(0, 1)] * 3, timestamp=5)
        for at in range(WRITTEN):
            shards.append(at, key=key_of(1, 1), timestamp=10 + at)
        first = shards.stats()[1].first_sequence
        assert 0 < first < WRITTEN
        yield shards, {1: Gap(0, first - 1, "overrun", str(shards.root / "t.1.001"))}


def test_a_gap_is_raised_once_and_the_reading_continues_after_it(overrun: tuple[ShardSet, dict[int, Gap]]) -> None:
    shards, gaps = overrun
    reading = shards.read(start={0: 0, 1: 0})
    got: list[Any] = []
    raised: list[Gap] = []
    while True:
        try:
            got.append(next(reading))
        except GapError as error:
            raised.append(error.gap)
        except StopIteration:
            break
    assert raised == [gaps[1]]
    assert reading.missed == gaps[1].count
    assert [record.data for record in got if record.shard == 0] == [0, 1, 2]
    assert [record.data for record in got if record.shard == 1] == list(range(gaps[1].last + 1, WRITTEN))


def test_a_gap_does_not_count_as_a_record_of_the_limit(overrun: tuple[ShardSet, dict[int, Gap]]) -> None:
    shards, gaps = overrun
    got = list(shards.read(start={0: 3, 1: 0}, on_gap="yield", limit=2))
    assert got[0] == gaps[1]
    assert [record.sequence for record in got[1:]] == [gaps[1].last + 1, gaps[1].last + 2]


def test_a_follower_that_is_overrun_accounts_for_every_sequence(overrun: tuple[ShardSet, dict[int, Gap]]) -> None:
    shards, _ = overrun
    with closing(shards.follow(start={1: 0}, on_gap="yield", timeout=0)) as following:
        got = list(following)
        shards.append_many([bytes(100)] * 200, keys=[key_of(1, 1)] * 200)
        got += list(following)
    expected = 0
    for item in got:
        if isinstance(item, Gap):
            assert item.first == expected
            expected = item.last + 1
        elif item.shard == 1:
            assert item.sequence == expected
            expected += 1
    assert expected == WRITTEN + 200


# Maintenance.


def test_a_durable_append_is_on_disk_in_its_shard_and_a_synced_reader_sees_nothing_else(shards: ShardSet) -> None:
    shards.append("one", key=key_of(0, 2))
    shards.append("two", key=key_of(1, 2), durable=True)
    shards.append_many(["three", "four"], keys=[key_of(2, 2), key_of(3, 2)], durable=True)
    assert [stats.synced_sequence for stats in shards.stats()] == [0, 1, 1, 1]
    assert [record.data for record in shards.read(isolation="synced")] == ["two", "three", "four"]
    with shards.follow(isolation="synced", timeout=0) as following:
        assert [record.data for record in following] == ["two", "three", "four"]
        shards.sync()
        assert [record.data for record in following] == ["one"]


def test_a_set_can_be_made_with_a_durability(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", bits=1, capacity=SMALL, durability="disk") as shards:
        shards.append_many([b"v"] * 4)
        assert [stats.unsynced_records for stats in shards.stats()] == [0, 0]


def test_sync_says_for_each_shard_below_which_sequence_all_is_on_disk(shards: ShardSet) -> None:
    assert shards.sync() == dict.fromkeys(range(4), 0)
    shards.append_many([b"v"] * 5, keys=[key_of(2, 2)] * 5)
    assert shards.sync() == {0: 0, 1: 0, 2: 5, 3: 0}
    assert [stats.synced_sequence for stats in shards.stats()] == [0, 0, 5, 0]


def test_stats_say_what_each_shard_holds(shards: ShardSet) -> None:
    shards.append_many([b"v"] * 3, keys=[key_of(1, 2)] * 3, timestamp=99)
    stats = shards.stats()
    assert [one.records for one in stats] == [0, 3, 0, 0]
    assert [one.path for one in stats] == [str(shards.root / f"p.2.00{index}") for index in range(4)]
    assert (stats[1].last_timestamp, stats[1].capacity) == (99, 65536)
    assert msgspec.json.decode(msgspec.json.encode(stats))[1]["records"] == 3


def test_closing_gives_back_every_file_and_mapping(tmp_path: Path, open_files: Callable[[], set[str]]) -> None:
    before = open_files()
    with shard.create(tmp_path / "root", prefix="p", bits=3, capacity=SMALL) as shards:
        shards.append_many([b"v"] * 100)
        shards.sync()
        with closing(shards.follow(timeout=0)) as following:
            assert len(list(following)) == 100
        assert len(open_files()) > len(before)
    assert open_files() == before


def test_a_set_survives_a_fork(shards: ShardSet) -> None:
    shards.append("parent", key=b"k")

    def child() -> list[Any]:
        seen = values(shards)
        shards.append("child", key=b"k")
        return [seen, values(shards), shards.shard_of(b"k")]

    seen, both, index = in_child(child)
    assert seen == ["parent"]
    assert both == ["parent", "child"]
    assert index == shards.shard_of(b"k")
    shards.append("parent again", key=b"k")
    assert values(shards) == ["parent", "child", "parent again"]


def test_parent_and_children_append_to_every_shard_at_once_and_lose_nothing(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=2, capacity="1MiB") as shards:
        gate, release = os.pipe()

        def append(name: int) -> None:
            if name:
                os.close(release)
                os.read(gate, 1)
            for at in range(0, 500, 10):
                shards.append_many([[name, at + more] for more in range(5)], keys=[b"key-%d" % (at + more) for more in range(5)])
                for more in range(5, 10):
                    shards.append([name, at + more], key=b"key-%d" % (at + more))

        waits = [start(lambda name=name: append(name)) for name in (1, 2, 3)]  # type: ignore[misc]
        os.close(release)
        append(0)
        for wait in waits:
            wait()
        os.close(gate)

        seen: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
        for record in shards:
            name, at = record.data
            assert record.shard == route.shard_of(b"key-%d" % at, 2)
            seen[name].append(at)
        assert {name: sorted(found) for name, found in seen.items()} == dict.fromkeys(range(4), list(range(500)))
        for one in shards.shards:
            of_each: dict[int, list[int]] = {}
            for name, at in values(one):
                of_each.setdefault(name, []).append(at)
            assert all(found == sorted(found) for found in of_each.values())


def test_1024_shards_are_made_and_read(tmp_path: Path) -> None:
    class Quick(system.Port):
        def flush(self, fd: int) -> None:
            """Skip it: there are no power cuts here."""

    with system.replaced(Quick()):
        shards = shard.create(tmp_path / "root", prefix="p", bits=10, capacity=SMALL)
    with shards:
        keys = [b"key-%d" % at for at in range(3000)]
        shards.append_many(keys, keys=keys)
        assert sorted(record.value for record in shards) == sorted(keys)
    assert len(names(tmp_path / "root")) == 1024


@pytest.mark.parametrize("lines", range(1, 20))
def test_a_batch_that_is_interrupted_at_any_line_says_which_parts_are_stored(tmp_path: Path, lines: int) -> None:
    left = lines

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_name not in ("_append_parts", "for_logs"):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    with ShardSet.create(tmp_path / "set", bits=1, prefix="p", capacity=65536) as log:
        keys = [key_of(index, 1) for index in range(2)]
        sys.settrace(interrupt)
        try:
            log.append_many([b"a", b"b"], keys=keys)
        except KeyboardInterrupt as error:
            parts = getattr(error, "parts", {})
            assert parts == {index: [range(one.end())] for index, one in enumerate(log.shards) if one.end()}
        else:
            assert left > 0
        finally:
            sys.settrace(before)


class Stubborn(Exception):
    """Raised by a shard as it is closed."""


def test_all_shards_are_closed_though_some_fail_and_the_first_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ShardSet.create(tmp_path / "set", bits=2, prefix="p", capacity=65536)
    broken = (log.shards[1], log.shards[2])
    close = kvspool.Spool.close

    def fail(one: kvspool.Spool) -> None:
        close(one)
        if one in broken:
            raise Stubborn(one.path.name)

    with monkeypatch.context() as patch:
        patch.setattr(kvspool.Spool, "close", fail)
        with pytest.raises(Stubborn, match="p.2.001"):
            log.close()
    assert all(one.closed for one in log.shards)


def test_a_merge_closes_all_its_sources_though_one_fails(shards: ShardSet) -> None:
    merge = shards.read()
    first, *others = [source.reading for source in merge.sources.values()]
    closed = []
    first.close = lambda: closed.append(first) or 1 / 0
    for one in others:
        one.close = partial(closed.append, one)
    with pytest.raises(ZeroDivisionError):
        merge.close()
    assert len(closed) == 4


def test_a_text_key_goes_where_its_utf_8_goes(shards: ShardSet) -> None:
    for key in ("", "k", "ключ", "N14228"):
        place = shards.append(b"value", key=key)
        assert place.shard == shards.shard_of(key) == shards.shard_of(key.encode())
        assert shards.append_many([b"value"], keys=[key]).keys() == {place.shard}
        assert shards.shards[place.shard].get(place.sequence).key == key.encode()
    assert {record.key for record in shards} == {b"", b"k", "ключ".encode(), b"N14228"}
    with pytest.raises(Unencodable):
        shards.append(b"value", key="\ud800")


def test_a_key_of_a_subclass_of_bytes_is_refused_before_anything_is_written(shards: ShardSet) -> None:
    class Key(bytes):
        pass

    wrong = Key(key_of(3, 2))
    for call in (
        lambda: shards.append_many([b"1", b"2"], keys=[key_of(0, 2), wrong]),
        lambda: shards.append(b"1", key=wrong),
        lambda: shards.producer("one").append_many([b"1", b"2"], keys=[key_of(0, 2), wrong], batch=0),
    ):
        with pytest.raises(TypeError):
            call()
    assert sum(one.records for one in shards.stats()) == 0
