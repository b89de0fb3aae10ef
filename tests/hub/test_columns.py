"""Batches from untrusted clients, and how a journal stores them."""

from __future__ import annotations

import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shipping import Row, batch, contents, numbered, row_of

import kvspool
from hub.errors import HubFull, Malformed
from hub.root import columns
from hub.root.columns import SequencedBatch
from kvspool import Gap
from kvspool.record import Codec

ROWS = [Row(b"", None, 0, -5), Row(b"value", b"", 255, 1 << 62), Row(b"{}", b"k" * 300, 7, 0, Codec.JSON), Row(b"\xff", b"\0", 1, 9)]
GOOD = batch(*ROWS)


def raised(rows: list[Row]) -> list[Row]:
    """Return rows as a journal keeps them: times never decrease."""
    return [row._replace(timestamp=max(one.timestamp for one in rows[: at + 1])) for at, row in enumerate(rows)]


def replaced(name: str, column: pa.Array) -> pa.RecordBatch:
    """Return a batch whose column is another one, of whatever type."""
    at = columns.SCHEMA.get_field_index(name)
    arrays = [column if each == at else GOOD.column(each) for each in range(GOOD.num_columns)]
    return pa.RecordBatch.from_arrays(arrays, names=columns.SCHEMA.names)


def with_offsets(name: str, *numbers: int) -> pa.RecordBatch:
    """Return a batch as it comes over the wire: 20 bytes in a column of 4 rows, with unchecked offsets."""
    plain = struct.pack("<5i", 0, 3, 7, 18, 20)
    sent = rewritten(replaced(name, pa.array([b"xxx", b"xxxx", b"x" * 11, b"xx"], pa.binary())), plain, struct.pack("<5i", *numbers))
    return sent


def rewritten(batch: pa.RecordBatch, old: bytes, new: bytes) -> pa.RecordBatch:
    """Return a batch as it comes over the wire with some bytes exchanged."""
    schema = pa.schema([pa.field(field.name, field.type) for field in batch.schema])
    data = batch.serialize().to_pybytes()
    assert old in data and len(old) == len(new)
    return pa.ipc.read_record_batch(pa.py_buffer(data.replace(old, new)), schema)


def times_in(data: bytes) -> pa.Array:
    """Return a column of four times whose buffer is the given bytes."""
    return pa.Array.from_buffers(columns.SCHEMA.field(0).type, 4, [None, pa.py_buffer(data)])


BAD: dict[str, Any] = {
    "other names": pa.RecordBatch.from_arrays(GOOD.columns, names=list("abcde")),
    "a column too few": GOOD.select(["timestamp", "type", "key", "value"]),
    "a column too many": GOOD.append_column("sequence", pa.array(range(4))),
    "large binary": replaced("value", GOOD.column("value").cast(pa.large_binary())),
    "text": replaced("key", pa.array(["a", "b", "c", "d"])),
    "a dictionary": replaced("value", GOOD.column("value").dictionary_encode()),
    "another zone": replaced("timestamp", GOOD.column("timestamp").cast(pa.timestamp("ns", "Europe/Berlin"))),
    "another unit": replaced("timestamp", pa.array([1, 2, 3, 4], pa.int64()).cast(pa.timestamp("us", "UTC"))),
    "no rows": GOOD.slice(0, 0),
    "a null value": replaced("value", pa.array([b"", None, b"", b""], pa.binary())),
    "a null time": replaced("timestamp", pa.array([1, None, 1, 1], pa.int64()).cast(pa.timestamp("ns", "UTC"))),
    "a null type": replaced("type", pa.array([1, None, 1, 1], pa.int32())),
    "a null codec": replaced("codec", pa.array([0, None, 0, 0], pa.uint8())),
    "a type below": replaced("type", pa.array([0, 0, -1, 0], pa.int32())),
    "a type above": replaced("type", pa.array([0, 256, 0, 0], pa.int32())),
    "no codec": replaced("codec", pa.array([0, 0, 200, 0], pa.uint8())),
    "a keyed codec": replaced("codec", pa.array([0, 0, Codec.KEYED, 0], pa.uint8())),
    "a key that is too long": replaced("key", pa.array([b"", b"", b"", b"k" * 65536], pa.binary())),
    "offsets that go back": with_offsets("value", 0, 5, 3, 6, 8),
    "offsets beyond the data": with_offsets("value", 0, 5, 6, 7, 21),
    "offsets far beyond the data": with_offsets("value", 0, 1, 1, 1, 2**31 - 1),
    "offsets below zero": with_offsets("value", -5, 0, 0, 0, 0),
    "offsets that go round": with_offsets("value", 0, 1_500_000_000, -2_000_000_000, -1, 20),
    "offsets of a key that go round": with_offsets("key", 0, 1_500_000_000, -2_000_000_000, -1, 20),
    "offsets of a key beyond the data": with_offsets("key", 0, 5, 6, 7, 1 << 30),
    "more rows than numbers": rewritten(batch(*[Row(b"x")] * 12345), struct.pack("<q", 12345), struct.pack("<q", 12346)),
    "nulls that nobody counted": rewritten(batch(*[Row(b"", b"k"), Row(b"")] * 32), b"U" * 8, b"\0" * 8),
}


def test_a_good_batch_passes() -> None:
    columns.check(GOOD)
    columns.check(GOOD.slice(1, 2))
    columns.check(batch(Row(b"x", b"k" * 65534)))
    columns.check(replaced("timestamp", times_in(bytes(39))))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused(name: str) -> None:
    with pytest.raises(Malformed):
        columns.check(BAD[name])


def test_a_batch_that_is_too_large_is_refused() -> None:
    rows = batch(*[Row(b"x" * 100)] * 10)
    columns.check(rows, rows.nbytes)
    with pytest.raises(Malformed, match="accepts"):
        columns.check(rows, rows.nbytes - 1)
    many = pa.RecordBatch.from_arrays([pa.nulls(columns.MOST_ROWS + 1, field.type) for field in columns.SCHEMA], schema=columns.SCHEMA)
    with pytest.raises(Malformed, match="records"):
        columns.check(many)


def test_how_large_a_batch_is_is_asked_when_it_has_its_buffers() -> None:
    """Arrow reads the first and the last offset for that, wherever they should be."""
    sent = batch(*[Row(b"x")] * 12345).serialize().to_pybytes()
    short = pa.ipc.read_record_batch(pa.py_buffer(sent.replace(struct.pack("<q", 4 * 12346), struct.pack("<q", 4))), columns.SCHEMA)
    with pytest.raises(Malformed, match="contradict themselves"):
        columns.check(short, 1)


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 20), min_size=5, max_size=5), st.sampled_from(["key", "value"]))
def test_whatever_passes_can_be_walked_over(numbers: list[int], name: str) -> None:
    hostile = with_offsets(name, *numbers)
    try:
        columns.check(hostile)
    except Malformed:
        assert sorted(numbers) != numbers or numbers[0] < 0 or numbers[-1] > 20
    else:
        assert sorted(numbers) == numbers  # otherwise the next line may be the last one of this process
        assert list(accumulate(map(len, hostile.column(name).to_pylist()), initial=numbers[0])) == numbers


def test_records_are_in_the_journal_as_they_came_and_come_out_so(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as journal:
        columns.append(journal, SequencedBatch(0, GOOD))
        columns.append(journal, SequencedBatch(10, GOOD.slice(1, 3)))
        assert list(contents(journal).values()) == raised([*ROWS, *ROWS[1:]])
        cursor = journal.cursor(0)
        first = columns.next_rows(cursor, 100)
        assert isinstance(first, SequencedBatch) and first.first == 0 and first.batch.equals(batch(*raised(ROWS)))
        gap = columns.next_rows(cursor, 100)
        assert isinstance(gap, Gap) and (gap.first, gap.last) == (4, 9)
        second = columns.next_rows(cursor, 2)
        assert isinstance(second, SequencedBatch) and second.first == 10 and second.batch.equals(batch(*raised(ROWS)).slice(1, 2))
        assert columns.next_rows(cursor, 1) is not None and columns.next_rows(cursor, 1) is None
        cursor.close()


def test_the_values_of_a_keyed_spool_travel_as_messagepack(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", codec="keyed") as log:
        log.append({"altitude": 12, "speed": 3})
        record = next(iter(log.read()))
        cursor = log.cursor(0)
        rows = columns.next_rows(cursor, 5)
        assert isinstance(rows, SequencedBatch) and record.codec == Codec.KEYED
        columns.check(rows.batch)
        with kvspool.create(tmp_path / "journal", format="kvj") as journal:
            columns.append(journal, rows)
            found = next(iter(journal.read()))
            assert found.data == {"altitude": 12, "speed": 3} and row_of(found) == row_of(record)
        cursor.close()


def test_a_cut_takes_as_much_as_fits_and_at_least_one() -> None:
    rows = SequencedBatch(5, batch(*(Row(b"x" * size) for size in (10, 10, 500, 10, 10))))
    left: SequencedBatch | None = rows
    parts = []
    while left is not None:
        part, left = left.cut(150)
        parts.append(part)
    assert [part.first for part in parts] == sorted({part.first for part in parts}) and parts[0].first == 5
    assert sum(part.batch.num_rows for part in parts) == 5
    assert all(part.batch.nbytes <= 150 or part.batch.num_rows == 1 for part in parts)
    assert rows.cut(1 << 20) == (rows, None)


def test_records_whose_times_the_journal_has_raised_are_the_same_when_repeated(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as journal:
        columns.append(journal, SequencedBatch(0, GOOD))
        columns.append(journal, SequencedBatch(4, GOOD))  # all of them earlier than the latest
        for first in (0, 4):
            assert columns.first_difference(journal, SequencedBatch(first, GOOD)) is None
            for at in range(4):
                assert columns.first_difference(journal, SequencedBatch(first + at, GOOD.slice(at, 2))) is None
                other = batch(*[row._replace(timestamp=(1 << 62) + 1) if number == at else row for number, row in enumerate(ROWS)])
                assert columns.first_difference(journal, SequencedBatch(first, other)) == first + at


def test_records_lost_in_a_crash_and_sent_again_after_later_ones_are_the_same(tmp_path: Path) -> None:
    rows = [Row(b"%d" % at, None, 0, at) for at in range(6)]
    with kvspool.create(tmp_path / "log", format="kvj") as journal:
        columns.append(journal, SequencedBatch(0, batch(*rows[:3])))
        latest = [row._replace(timestamp=9) for row in rows[3:]]  # the latest time outlived the crash
        columns.append(journal, SequencedBatch(3, batch(*latest)))
        assert columns.first_difference(journal, SequencedBatch(0, batch(*rows))) is None
        assert columns.first_difference(journal, SequencedBatch(0, batch(*rows[:4], rows[4]._replace(value=b"x"), rows[5]))) == 4


def test_the_first_difference_is_found(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as journal:
        columns.append(journal, numbered(0, 10))
        columns.append(journal, numbered(20, 30))
        assert columns.first_difference(journal, numbered(0, 10)) is None
        assert columns.first_difference(journal, numbered(3, 5)) is None
        assert columns.first_difference(journal, numbered(22, 24)) is None
        assert columns.first_difference(journal, numbered(8, 12)) == 10  # the hub has left that out
        assert columns.first_difference(journal, numbered(12, 14)) == 12
        assert columns.first_difference(journal, numbered(4, 8, "another")) == 4
        other = numbered(5, 8).batch.to_pylist()
        for name, value in {"value": b"x", "key": None, "type": 2, "timestamp": 7, "codec": Codec.TEXT}.items():
            changed = [dict(row) for row in other]
            changed[1][name] = value
            rows = SequencedBatch(5, pa.RecordBatch.from_pylist(changed, columns.SCHEMA))
            assert columns.first_difference(journal, rows) == 6, name


def test_what_was_trimmed_can_not_differ(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=200) as journal:
        columns.append(journal, numbered(0, 20))
        journal.trim(before=10)
        first = journal.first()
        assert 0 < first <= 10
        assert columns.first_difference(journal, numbered(0, 20)) is None
        assert columns.first_difference(journal, numbered(0, first, "another")) is None
        assert columns.first_difference(journal, numbered(0, 20, "another")) == first


def test_what_is_damaged_can_not_differ(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as journal:
        columns.append(journal, numbered(0, 20))
        path = next((tmp_path / "log" / "kvj").iterdir())
        data = bytearray(path.read_bytes())
        data[data.index(b"record 7")] ^= 1
        path.write_bytes(data)
        assert columns.first_difference(journal, numbered(0, 20)) is None
        assert columns.first_difference(journal, numbered(8, 20, "another")) == 8


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_damaged_compressed_batch_is_malformed_wherever_it_is_damaged(codec: str) -> None:
    sent = batch(*[Row(b"value %d" % number * 40, b"key", 1, number) for number in range(200)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_batch(sent)
    data = sink.getvalue().to_pybytes()
    messages = list(pa.ipc.MessageReader.open_stream(data))
    end = len(data) - 8  # of the stream's mark
    refused = 0
    for at in range(end - messages[1].body.size, end):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        try:
            with columns.decoding():
                columns.check(pa.ipc.open_stream(bytes(damaged)).read_next_batch())
        except (Malformed, HubFull):  # the latter for a size that no hub has
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("error", [OSError(104, "Connection reset by peer"), OSError("the stream was closed"), OSError(5, "zstd")])
def test_other_errors_of_the_system_are_no_damage(error: OSError) -> None:
    with pytest.raises(OSError) as raised, columns.decoding():
        raise error
    assert raised.value is error
