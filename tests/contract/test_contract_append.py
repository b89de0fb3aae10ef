"""Appends to a log of any kind: order and sequences, whole batches, keys, durability, writers and producers; and what they refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kinds import create

import kvspool
from kvspool.errors import Closed, KvspoolError, Unencodable, Unsupported
from kvspool.log import Log
from kvspool.record import Codec


def test_each_append_gets_the_next_sequence(log: Log) -> None:
    assert [log.append(b"%04d" % number) for number in range(40)] == list(range(40))
    assert log.append_many([b"more"] * 3) == range(40, 43)
    assert log.append_many([]).start == 43  # all empty ranges are equal
    assert log.append_many(value for value in (b"next", b"last")) == range(43, 45)
    assert [record.sequence for record in log.read()] == list(range(45))
    assert log.extent() == (0, 45)


def test_an_append_is_seen_by_every_other_handle_when_it_returns(log: Log) -> None:
    with kvspool.open(log.path) as other:
        for number in range(20):
            log.append(b"%04d" % number)
            assert other.last()[0].value == b"%04d" % number
            assert other.append(b"mine") == 2 * number + 1
            assert log.get(2 * number + 1).value == b"mine"


def test_threads_of_two_handles_get_different_sequences(log: Log) -> None:
    found: dict[int, bytes] = {}

    def write(handle: Log, name: int) -> None:
        for number in range(50):
            value = b"%d.%02d" % (name, number)
            found[handle.append(value)] = value

    with kvspool.open(log.path) as other:
        threads = [threading.Thread(target=write, args=(handle, name)) for name, handle in enumerate((log, log, other, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == list(range(200))
    assert [record.value for record in log] == [found[number] for number in range(200)]


@pytest.mark.parametrize("wrong", ["abcd", b"abcd", bytearray(b"abcd"), memoryview(b"abcd")], ids=lambda wrong: type(wrong).__name__)
def test_one_value_is_no_batch(log: Log, wrong: Any) -> None:
    with pytest.raises(TypeError, match="values are an iterable with one for each record, not one"):
        log.append_many(wrong)
    with pytest.raises(TypeError, match="keys are an iterable"):
        log.append_many([b"four"] * 4, keys=wrong)
    with log.writer() as writer, pytest.raises(TypeError, match="values are an iterable"):
        writer.append_many(wrong)
    assert len(log) == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"type": 256}, ValueError),
        ({"type": -1}, ValueError),
        ({"timestamp": 1 << 63}, ValueError),
        ({"key": 7}, TypeError),
        ({"key": ["k"]}, TypeError),
        ({"key": bytearray(b"k")}, TypeError),
    ],
)
def test_bad_arguments_append_nothing(log: Log, arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        log.append(b"four", **arguments)
    many = {"keys" if name == "key" else name: [value] if name == "key" else value for name, value in arguments.items()}
    with pytest.raises(error):
        log.append_many([b"four"], **many)
    assert len(log) == 0


def test_a_batch_with_one_bad_value_appends_nothing(log: Log) -> None:
    with pytest.raises(Unencodable):
        log.append_many([b"four", object(), b"four"])
    with pytest.raises(Unencodable):
        log.append(object())
    with pytest.raises(ValueError):
        log.append_many([b"four"] * 3, keys=[None, None])
    assert len(log) == 0


def test_each_record_has_the_type_of_its_append(log: Log) -> None:
    if "types" not in log.capabilities:
        with pytest.raises(Unsupported):
            log.append(b"four", type=9)
        return
    log.append(b"four", type=255)
    log.append_many([b"four"] * 2, type=9)
    log.append(b"four")
    assert [record.type for record in log] == [255, 9, 9, 0]


def test_keys_are_bytes_or_text(log: Log) -> None:
    if "keys" not in log.capabilities:
        with pytest.raises(Unsupported):
            log.append(b"four", key="k")
        return
    log.append(b"four", key="ключ")
    log.append({"four": 4}, key="k")
    log.append(b"four", key="k" * 100)
    log.append_many([b"four"] * 3, keys=["k", b"l", None])
    with log.writer() as writer:
        writer.append(b"four", key="w")
        writer.append_many([b"four"], keys=["x"])
    if "producers" in log.capabilities:
        log.producer("one").append_many([b"four"], keys=["p"], batch=0)
    keys = [record.key for record in log]
    assert keys[:6] == ["ключ".encode(), b"k", b"k" * 100, b"k", b"l", None]
    assert keys[6:8] == [b"w", b"x"]
    assert keys[8:] in ([], [b"p"])
    with pytest.raises(Unencodable):
        log.append(b"four", key="\ud800")


def test_a_key_of_a_subclass_of_bytes_is_refused_before_anything_is_written(log: Log) -> None:
    if "keys" not in log.capabilities:
        return

    class Key(bytes):
        pass

    with log.writer() as writer:
        calls: list[Callable[[], object]] = [
            lambda: log.append(b"four", key=Key(b"k")),
            lambda: log.append_many([b"four"] * 2, keys=[b"k", Key(b"k")]),
            lambda: log.append_many(["text"] * 2, keys=["k", Key(b"k")]),
            lambda: writer.append(b"four", key=Key(b"k")),
            lambda: writer.append_many([b"four"] * 2, keys=[b"k", Key(b"k")]),
        ]
        for _ in range(2):
            for call in calls:
                with pytest.raises(TypeError):
                    call()
            assert len(log) == 0
            log.sync()


def test_times_and_codecs_are_refused_where_the_kind_has_no_room_for_them(log: Log) -> None:
    pa = pytest.importorskip("pyarrow")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("timestamps", lambda: log.append(b"four", timestamp=7)),
        ("timestamps", lambda: log.append(b"four", timestamp=0)),
        ("timestamps", lambda: log.append_many([b"four"], timestamp=7)),
        ("timestamps", lambda: log.append_arrow(pa.table({"value": [b"four"] * 2, "timestamp": [None, 7]}))),
        ("codecs", lambda: log.append_arrow(pa.table({"value": [b"four"]}), codec=Codec.TEXT)),
    ]
    if log.kind != "spool":
        columns = {"value": pa.array([b"four"] * 2), "codec": pa.array([0, 1], pa.uint8())}
        calls.append(("codecs", lambda: log.append_arrow(pa.table(columns))))
    for capability, call in calls:
        if capability in log.capabilities:
            call()
            continue
        before = len(log)
        with pytest.raises(Unsupported) as raised:
            call()
        assert raised.value.capability == capability
        assert len(log) == before


def test_arrow_columns_without_times_and_codecs_are_appended_to_every_kind(log: Log) -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {"value": [b"four"] * 2, "timestamp": pa.array([None, None], pa.int64())}
    if log.kind != "spool":
        columns["codec"] = pa.array([0, 0], pa.uint8())
    assert log.append_arrow(pa.table(columns)) == range(2)
    assert log.append_arrow(pa.table({"value": pa.array([], pa.binary())})).start == 2


def test_values_come_back_as_they_were_where_the_kind_keeps_codecs(log: Log) -> None:
    if "codecs" not in log.capabilities:
        assert log.get(log.append("four")).value == b"four"
        return
    values = [b"raw", "text", {"a": [1, None]}, 7, None]
    log.append_many(values)
    assert [record.data for record in log] == values


def test_timestamps_never_decrease(log: Log) -> None:
    if "timestamps" not in log.capabilities:
        log.append(b"four")
        assert log.last()[0].timestamp == 0
        return
    with kvspool.open(log.path) as other:
        log.append(b"four", timestamp=1000)
        other.append(b"four", timestamp=10)
        other.append_many([b"four"] * 2, timestamp=2000)
        log.append(b"four", timestamp=1500)
    assert [record.timestamp for record in log] == [1000, 1000, 2000, 2000, 2000]


@pytest.mark.parametrize("level", ["memory", "os", "disk"])
def test_a_durable_append_is_on_disk_when_it_returns(kind: str, tmp_path: Path, level: Any) -> None:
    with create(kind, tmp_path / "log", durability=level) as log:
        log.append(b"four")
        if level == "disk":
            assert log.extent("synced")[1] == 1
        log.append(b"four", durable=True)
        assert log.extent("synced")[1] == 2
        log.append_many([b"four"] * 2, durable=True)
        assert log.extent("synced")[1] == 4
        log.append(b"four")
        assert log.sync() == 5
        assert log.extent("synced")[1] == 5


def test_a_writer_appends_until_it_is_closed(log: Log) -> None:
    with log.writer() as writer:
        assert [writer.append(b"%04d" % number) for number in range(20)] == list(range(20))
        assert writer.append_many([b"four"] * 2) == range(20, 22)
        assert writer.sync() == 22
        assert not writer.closed
    assert writer.closed
    for call in (lambda: writer.append(b"four"), lambda: writer.append_many([b"four"]), writer.sync):
        with pytest.raises(Closed):
            call()
    assert log.append(b"four") == 22  # the log stays open


def test_a_producers_batch_is_stored_once(log: Log) -> None:
    if "producers" not in log.capabilities:
        assert log.producers() == []
        with pytest.raises(Unsupported):
            log.forget_producers(["one"])
        return
    for _ in range(2):
        stored = log.producer("one").append_many([b"a", b"b"], batch=0)
    assert stored.records == 2
    assert [one.name for one in log.producers()] == ["one"]
    assert [record.value for record in log] == [b"a", b"b"]
    assert log.forget_producers(["one"]) == 1
    assert log.producers() == []


def test_an_arrow_batch_is_appended_and_read_whole(log: Log) -> None:
    pa = pytest.importorskip("pyarrow")
    columns: dict[str, Any] = {"value": [b"%04d" % number for number in range(50)]}
    if "keys" in log.capabilities:
        columns["key"] = [None if number % 3 else b"k%d" % number for number in range(50)]
    assert log.append_arrow(pa.table(columns)) == range(50)
    table = log.read_arrow()
    assert table.column("sequence").to_pylist() == list(range(50))
    assert table.column("value").to_pylist() == columns["value"]
    assert table.column("key").to_pylist() == columns.get("key", [None] * 50)
    assert log.read_arrow(45, limit=3).column("sequence").to_pylist() == [45, 46, 47]
    for wrong in ({"key": [b"k"]}, {"value": [None]}, {"value": [b"four"], "other": [1]}):
        with pytest.raises((ValueError, TypeError, KvspoolError)):
            log.append_arrow(pa.table(wrong))
    assert len(log) == 50
