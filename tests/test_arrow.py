"""Records as Arrow columns: what journals take and give, and batches with codecs, of spools too."""

from __future__ import annotations

import errno
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from faults import FailingPort
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import twins

import kvspool
from kvspool import Codec, Gap, Record, system
from kvspool.errors import GapError, OutOfRange, TooLarge, Unsupported
from kvspool.journal import Batch, Journal, columns
from kvspool.journal.format import Before
from kvspool.journal.formats import kvj
from kvspool.kernel import kvj_py
from kvspool.record import NO_TIME
from kvspool.spool import Spool
from kvspool.system import Port

pa = pytest.importorskip("pyarrow")

from kvspool import arrow  # noqa: E402
from kvspool.engine.columns import items_of  # noqa: E402

LAST_TIME = system.port.now()  # later than a day after it is refused


class Unflushed(Port):
    """Flushes nothing, where what is tested has nothing to do with that."""

    def flush(self, fd: int) -> None:
        return None

    def flush_data(self, fd: int) -> None:
        return None


KVJ_TWINS = twins("kvspool.kernel.kvj")


@pytest.fixture(params=KVJ_TWINS, ids=lambda module: module.__name__.rpartition(".")[2])
def kvj_twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The interpreted loops over kvj frames, then the compiled ones if they were built; all journals of this process use them."""
    monkeypatch.setattr(kvj, "kvj", request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "port", Unflushed())


def fields(batch: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a coded batch, or of one without codecs, with timestamps as numbers."""
    batch.validate(full=True)
    columns = (column.cast(pa.int64()) if number == 1 else column for number, column in enumerate(batch))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def stored(log: Journal | Spool) -> list[Any]:
    """Return what reading record by record gives: rows as `fields` has them, and Gaps."""
    return [one if isinstance(one, Gap) else _fields_of(one) for one in log.read(on_gap="yield")]


def _fields_of(record: Record) -> tuple[Any, ...]:
    return record.sequence, record.timestamp, record.type, record.key, record.value, record.codec


def gathered(cursor: Any, **options: Any) -> list[Any]:
    """Return the same out of batches."""
    found: list[Any] = []
    for batch in arrow.batches(cursor, coded=True, **options):
        if isinstance(batch, Gap):
            found.append(batch)
        else:
            assert batch.schema == arrow.CODED_SCHEMA
            found.extend(fields(batch))
    return found


# Into journals.

ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.binary(max_size=5), st.just(b"k" * 300)),
        st.one_of(st.binary(max_size=20), st.just(b"v" * 700)),
        st.one_of(st.none(), st.integers(0, 255)),
        st.one_of(st.none(), st.sampled_from([NO_TIME, -1, 0, 1, LAST_TIME]), st.integers(NO_TIME, LAST_TIME)),
        st.sampled_from([Codec.RAW, Codec.TEXT, Codec.JSON, Codec.MSGPACK]),
    ),
    max_size=30,
)
BINARY = {"binary": pa.binary(), "large_binary": pa.large_binary()}


def as_batch(rows: list[tuple[Any, ...]], kind: Any = None) -> Any:
    """Return rows of key, value, type, timestamp and codec as a record batch."""
    kind = kind or pa.binary()
    columns = list(zip(*rows, strict=True)) or [()] * 5
    types = {"key": kind, "value": kind, "type": pa.int16(), "timestamp": pa.int64(), "codec": pa.uint8()}
    return pa.record_batch({name: pa.array(column, of) for (name, of), column in zip(types.items(), columns, strict=True)})


def expected(rows: list[tuple[Any, ...]], first: int) -> list[tuple[Any, ...]]:
    return [(first + at, time, type or 0, key, value, codec) for at, (key, value, type, time, codec) in enumerate(rows)]


def with_known_times(found: list[Any], rows: list[tuple[Any, ...]]) -> list[Any]:
    """Return rows that were found with the times that were given, None for the present one, once it is seen that they are those, or the
    latest one before them."""
    out, last = [], NO_TIME
    for row, (*_, time, _codec) in zip(found, rows, strict=True):
        if time is None:
            assert row[1] == last or 0 <= system.port.now() - row[1] < 60_000_000_000
        else:
            assert row[1] == (time if time == NO_TIME else max(time, last))
        last = max(last, row[1])
        out.append((row[0], time, *row[2:]))
    return out


@pytest.mark.parametrize("twin", KVJ_TWINS, ids=lambda module: module.__name__)
@pytest.mark.parametrize("kind", BINARY)
@given(ROWS, ROWS, st.integers(0, 1 << 40), st.integers(0, 5), st.integers(1, 3000), st.integers(1, 40), st.integers(1, 2000))
@settings(max_examples=40)
def test_rows_come_out_of_a_journal_as_they_went_in(
    twin: ModuleType, kind: str, first: Any, second: Any, at: int, cut: int, segment_bytes: int, most: int, room: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as root:
        patch.setattr(kvj, "kvj", twin)
        patch.setattr(kvj, "PIECE", 200)
        patch.setattr(system, "port", Unflushed())
        with kvspool.create(f"{root}/log", format="kvj", segment_bytes=segment_bytes) as log:
            left_out = as_batch(first, BINARY[kind]).slice(cut)
            begin = at if first[cut:] else 0
            assert log.append_arrow(left_out, at=at) == range(begin, begin + len(first[cut:]))
            behind = begin + len(first[cut:])
            table = pa.Table.from_batches([as_batch(part, BINARY[kind]) for part in (second[:cut], second[cut:])])
            assert log.append_arrow(table) == (range(behind, behind + len(second)) if second else range(0))
            given_rows, everything = [*first[cut:], *second], stored(log)
            known = with_known_times([row for row in everything if not isinstance(row, Gap)], given_rows)
            assert known == [*expected(first[cut:], begin), *expected(second, behind)]
            with kvspool.open(f"{root}/log") as other:
                found = gathered(other.cursor(bounded=True), most=most, bytes=room)
            assert found == everything
            table = log.read_arrow(on_gap="skip")
            assert fields(table) == [row[:5] for row in everything if not isinstance(row, Gap)]


def test_frames_are_those_of_the_other_way(kvj_twin: ModuleType, tmp_path: Path) -> None:
    rows = [(b"k%d" % at if at % 3 else None, b"v" * (at % 50), at % 256, at - 100, at % 4) for at in range(3000)]
    keys, values, types, times, codecs = zip(*rows, strict=True)
    with (
        kvspool.create(tmp_path / "a", format="kvj", segment_bytes=20000) as one,
        kvspool.create(tmp_path / "b", format="kvj", segment_bytes=20000) as other,
    ):
        one.append_batch(Batch(list(values), list(keys), 0, 0, list(types), list(times), 0, bytes(codecs)))
        other.append_arrow(as_batch(rows))
        names = sorted(path.name for path in (tmp_path / "a/kvj").iterdir())
        assert len(names) > 4
        assert names == sorted(path.name for path in (tmp_path / "b/kvj").iterdir())
        for name in names:
            assert (tmp_path / "a/kvj" / name).read_bytes() == (tmp_path / "b/kvj" / name).read_bytes()
        assert one.stats().last_timestamp == other.stats().last_timestamp == 2899


def as_records(rows: list[tuple[Any, ...]]) -> Any:
    """Return rows of key, value, type, timestamp and codec in the schema `RECORDS`."""
    keys, values, types, times, codecs = list(zip(*rows, strict=True)) or [()] * 5
    stamps = pa.array([time or 0 for time in times], pa.int64()).cast(arrow.RECORDS.field(0).type)
    of = (pa.array([type or 0 for type in types], pa.int32()), pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
    return pa.RecordBatch.from_arrays([stamps, *of, pa.array(codecs, pa.uint8())], schema=arrow.RECORDS)


@pytest.mark.parametrize("twin", KVJ_TWINS, ids=lambda module: module.__name__)
@given(ROWS, st.integers(0, 1 << 40), st.integers(0, 12), st.integers(1, 3000), st.booleans())
@settings(max_examples=40)
def test_records_become_the_frames_that_any_batch_does(
    twin: ModuleType, rows: Any, at: int, cut: int, segment_bytes: int, have_all_keys: bool
) -> None:
    rows = [(key or b"" if have_all_keys else key, value, type or 0, time or 0, codec) for key, value, type, time, codec in rows]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as root:
        patch.setattr(kvj, "kvj", twin)
        patch.setattr(columns, "kvj", twin)
        patch.setattr(kvj, "PIECE", 200)
        patch.setattr(system, "port", Unflushed())
        options: Any = {"format": "kvj", "segment_bytes": segment_bytes}
        with kvspool.create(f"{root}/a", **options) as one, kvspool.create(f"{root}/b", **options) as other:
            one.append_arrow(as_batch(rows).slice(cut), at=at)
            with arrow.Records(as_records(rows).slice(cut)) as records:
                assert len(other.append_records(records, at, 0)) == records.rows == len(rows[cut:])
        one_segments, other_segments = (sorted(Path(root, name, "kvj").iterdir()) for name in "ab")
        assert [path.name for path in one_segments] == [path.name for path in other_segments]
        assert [path.read_bytes() for path in one_segments] == [path.read_bytes() for path in other_segments]


def test_records_go_where_the_journal_ends_or_nowhere(kvj_twin: ModuleType, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log, arrow.Records(as_records([(None, b"x", 0, 0, 0)] * 3)) as records:
        log.append_records(records, 0, 0)
        for behind in (2, 4):
            with pytest.raises(OutOfRange, match="continues at sequence 3"):
                log.append_records(records, max(3, behind), behind)
        assert log.end() == 3
        assert log.append_records(records, 5, 3) == range(5, 8)


@pytest.mark.parametrize("twin", KVJ_TWINS, ids=lambda module: module.__name__)
@given(st.data())
def test_records_that_contradict_themselves_are_found(twin: ModuleType, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 20))
    number = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 30)
    some, more = {"min_size": rows, "max_size": rows}, {"min_size": rows + 1, "max_size": rows + 1}
    places = st.lists(st.integers(0, 30), **more).map(sorted) | st.lists(number, **more)
    keys, values = data.draw(places), data.draw(places)
    types = data.draw(st.lists(st.integers(0, 255), **some) | st.lists(number, **some))
    codecs = bytes(data.draw(st.lists(st.integers(0, 4), **some)))
    bit, bits = data.draw(st.integers(0, 7)), data.draw(st.none() | st.binary(min_size=4, max_size=4))
    ints = (memoryview(pa.array(each, pa.int32()).buffers()[1]).cast("B").cast("i") for each in (keys, values, types))
    key_places, value_places, kinds = (view[: len(view)] for view in ints)
    fault, found, key, value = twin.check_columns(
        rows, bits, bit, key_places[: rows + 1], 30, value_places[: rows + 1], 30, kinds[:rows], codecs, Codec.MSGPACK
    )
    lies = any(each != sorted(each) or each[0] < 0 or each[-1] > 30 for each in (keys, values))
    assert bool(fault) == (lies or not all(0 <= each <= 255 for each in types) or max(codecs) > Codec.MSGPACK)
    if not fault:
        has_key = [bits is None or bool(bits[(bit + at) >> 3] >> ((bit + at) & 7) & 1) for at in range(rows)]
        assert found == sum(has_key)
        assert key == max((end - begin for (begin, end), has in zip(pairwise(keys), has_key, strict=True) if has), default=0)
        assert value == max(end - begin for begin, end in pairwise(values))


@pytest.mark.parametrize("twin", KVJ_TWINS, ids=lambda module: module.__name__)
def test_offsets_that_go_round_are_found(twin: ModuleType) -> None:
    """Each difference of two of them is a positive number in 32 bits."""
    plain, round = (memoryview(array("i", numbers)) for numbers in ([0] * 5, (0, 1_500_000_000, -2_000_000_000, -1, 20)))
    types, codecs = memoryview(array("i", [0] * 4)), bytes(4)
    assert twin.check_columns(4, None, 0, plain, 20, plain, 20, types, codecs, Codec.MSGPACK) == (kvj_py.SOUND, 4, 0, 0)
    assert twin.check_columns(4, None, 0, plain, 20, round, 20, types, codecs, Codec.MSGPACK)[0] == kvj_py.OFFSETS
    assert twin.check_columns(4, None, 0, round, 20, plain, 20, types, codecs, Codec.MSGPACK)[0] == kvj_py.OFFSETS


def test_the_loops_see_aligned_numbers() -> None:
    """Those of a batch that came over a network may begin at any address."""
    for by in range(9):
        view = items_of(pa.py_buffer(bytes(by) + array("q", [1, -2, 3]).tobytes())[by:], "q")
        assert list(view) == [1, -2, 3] and pa.py_buffer(view).address % 8 == 0


PLACES = st.integers(0, 40)
FAR = st.sampled_from([-(1 << 31), -(1 << 30), -1, 0, 1 << 30, (1 << 31) - 1])


@st.composite
def batches_of_buffers(draw: st.DrawFn) -> Any:
    """Draw a batch in the schema `RECORDS` whose buffers hold anything, at any address, but are as long as they have to be."""
    rows, front = draw(st.integers(1, 9)), draw(st.integers(0, 9))
    count = front + rows

    def buffer(data: bytes) -> Any:
        by = draw(st.integers(0, 8))
        return pa.py_buffer(bytes(by) + data)[by:]

    def several(of: st.SearchStrategy[int], number: int) -> list[int]:
        return draw(st.lists(of, min_size=number, max_size=number))

    def fixed(at: int, code: str, *of: st.SearchStrategy[int]) -> Any:
        items = several(draw(st.sampled_from(of)), count)
        return pa.Array.from_buffers(arrow.RECORDS.field(at).type, rows, [None, buffer(array(code, items).tobytes())], 0, front)

    def binary(bits: Any, nulls: int) -> Any:
        if draw(st.booleans()):
            places = sorted(several(PLACES, count + 1))
        else:
            between = several(PLACES | FAR, rows - 1)
            if draw(st.booleans()):  # round all numbers of 32 bits, in steps that are none back
                between = sorted(between, key=lambda place: place & 0xFFFF_FFFF)
            places = [*several(PLACES | FAR, front), draw(PLACES), *between, 40]
        buffers = [bits, buffer(array("i", places).tobytes()), buffer(bytes(range(40)))]
        return pa.Array.from_buffers(pa.binary(), rows, buffers, nulls, front)

    bits = draw(st.none() | st.binary(min_size=3, max_size=3).map(buffer))
    nulls = 0 if bits is None else draw(st.sampled_from([-1, -1, -1, 0, rows]))  # -1: Arrow counts them
    good, any_codec = st.integers(0, 255), st.integers(0, Codec.MSGPACK)
    times = fixed(0, "q", st.integers(-(1 << 63), LAST_TIME))
    types = fixed(1, "i", good, good, st.integers(-1, 256), FAR)
    codecs = fixed(4, "B", any_codec, any_codec, st.integers(0, 255))
    columns = [times, types, binary(bits, nulls), binary(None, 0), codecs]
    return pa.RecordBatch.from_arrays(columns, schema=arrow.RECORDS)


@contextmanager
def using(twin: ModuleType) -> Iterator[None]:
    """Let records be looked at and become frames by a twin, in memory that nobody had before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvj, "kvj", twin)
        patch.setattr(columns, "kvj", twin)
        patch.setattr(columns, "_rooms", columns._Rooms())
        yield


def laid_out(twin: ModuleType, batch: Any) -> Any:
    """Return the records of a batch, or what is wrong with it."""
    with using(twin):
        try:
            return arrow.Records(batch)
        except ValueError as error:
            return str(error)


def frames_of(twin: ModuleType, records: Any, segment_bytes: int, sequence: int) -> list[bytes]:
    """Return the pieces that records become where so many bytes of each segment are left."""
    format, pieces, done, last = kvj.Kvj(segment_bytes), [], 0, NO_TIME
    with using(twin):
        while done < records.rows:
            place = Before(sequence + done, 0, kvj.HEADER.size, 0, last)
            data, count, last = format.encode_records(records, done, place)
            assert count > 0
            pieces.append(bytes(data))
            done += count
        records.close()
    return pieces


@pytest.mark.skipif(len(KVJ_TWINS) < 2, reason="needs the compiled twin")
@given(batches_of_buffers(), st.integers(1, 300), st.integers(0, (1 << 63) - 100))
def test_twins_agree_on_whatever_lies_in_the_buffers(batch: Any, segment_bytes: int, sequence: int) -> None:
    one, other = (laid_out(twin, batch) for twin in KVJ_TWINS)
    if isinstance(one, str):
        assert one == other
    else:
        assert [one.rows, one.size, one.longest_key, one.longest_value] == [other.rows, other.size, other.longest_key, other.longest_value]
        batch.validate(full=True)
        ours, theirs = (frames_of(twin, each, segment_bytes, sequence) for twin, each in zip(KVJ_TWINS, (one, other), strict=True))
        values, types, codecs = (batch.column(name).to_pylist() for name in ("value", "type", "codec"))
        keys = [key.as_py() for key in batch.column("key")]
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        whole, count, _ = kvj_py.encode(values, keys, types, times, bytes(codecs), 0, 0, 0, 0, sequence, 1 << 20, NO_TIME)
        assert ours == theirs and count == batch.num_rows and b"".join(ours) == whole


@pytest.mark.parametrize("column", ["string", "large_string", "string_view", "binary_view", "fixed_size"])
def test_kinds_of_columns(column: str, kvj_twin: ModuleType, tmp_path: Path) -> None:
    kinds = {"string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view(), "binary_view": pa.binary_view()}
    kind = kinds.get(column, pa.binary(2))
    values = ["ab", "cd", "ef"] if "string" in column else [b"ab", b"cd", b"ef"]
    batch = pa.record_batch({"value": pa.array(values, kind), "key": pa.array([None, *values[1:]], kind)}).slice(1)
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_arrow(batch, codec=Codec.TEXT)
        assert [(record.key, record.value, record.codec) for record in log] == [(b"cd", b"cd", 1), (b"ef", b"ef", 1)]


def test_timestamps_of_all_kinds(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_arrow(pa.record_batch({"value": [b""], "timestamp": pa.array([-3], pa.timestamp("ms", "UTC"))}))
        log.append_arrow(pa.record_batch({"value": [b""], "timestamp": pa.array([-3], pa.timestamp("ns"))}))
        assert [record.timestamp for record in log] == [-3_000_000, -3]
        with pytest.raises(ValueError, match="timestamp doesn't fit"):
            log.append_arrow(pa.record_batch({"value": [b""], "timestamp": pa.array([1 << 60], pa.timestamp("s"))}))
        with pytest.raises(TypeError, match="timestamp is double"):
            log.append_arrow(pa.record_batch({"value": [b""], "timestamp": [1.0]}))


REFUSED = [
    ({"value": [b"a", None]}, ValueError, "value has nulls"),
    ({"key": [b"a"]}, ValueError, "value is missing"),
    ({"value": [b"a"], "sequence": [1]}, ValueError, "sequence.*timestamp and codec"),
    ({"value": [1]}, TypeError, "value is int64"),
    ({"value": [b"a"], "type": [256]}, ValueError, "type doesn't fit"),
    ({"value": [b"a"], "type": [-1]}, ValueError, "type doesn't fit"),
    ({"value": [b"a"], "codec": [None]}, ValueError, "codec has nulls"),
    ({"value": [b"a"], "codec": [300]}, ValueError, "codec doesn't fit"),
    ({"value": [b"a"], "codec": [5]}, ValueError, "codec is one of"),
    ({"value": [b"a"], "codec": [Codec.PAD]}, ValueError, "codec is one of"),
    ({"value": [b"a"], "codec": [Codec.KEYED]}, ValueError, "key table"),
    ({"value": [b"a"], "key": [bytes(65535)]}, TooLarge, "65534"),
]


@pytest.mark.parametrize(("columns", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_is_refused_writes_nothing(columns: dict[str, list[Any]], error: type[Exception], words: str, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        for batch in (pa.record_batch(columns), pa.Table.from_batches([pa.record_batch(columns)])):
            with pytest.raises(error, match=words):
                log.append_arrow(batch)
        assert log.end() == 0
        for codec in (Codec.KEYED, Codec.PAD, 17):
            with pytest.raises(ValueError, match="codec|keyed"):
                log.append_arrow(pa.record_batch({"value": [b""]}), codec=codec)
        with pytest.raises(OutOfRange, match="continues at sequence 1"):
            log.append_arrow(pa.record_batch({"value": [b""]}), at=log.append(b"") - 1)


def test_a_table_is_one_append(unflushed: None, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        empty = pa.record_batch({"value": pa.array([], pa.binary())})
        some = [pa.record_batch({"value": [b"%d" % at, b"x"]}) for at in range(3)]
        assert log.append_arrow(pa.Table.from_batches([empty, some[0], empty, *some[1:], empty])) == range(6)
        assert log.append_arrow(pa.Table.from_batches([], schema=empty.schema)) == range(0)
        assert log.append_arrow(pa.table({"value": [b"last"]}), durable=True) == range(6, 7)
        assert log.stats().synced_sequence == 7
        assert [record.value for record in log] == [b"0", b"x", b"1", b"x", b"2", b"x", b"last"]


@pytest.mark.parametrize("nth", range(1, 14))
def test_a_disk_that_fails_in_the_midst_of_a_table(nth: int, kvj_twin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvj, "PIECE", 100)
    table = pa.Table.from_batches([pa.record_batch({"value": [b"%d%d" % (part, row) for row in range(5)]}) for part in range(3)])
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=400) as log:
        log.append(b"before")
        with monkeypatch.context() as patch:
            patch.setattr(system, "port", FailingPort(nth, errno.ENOSPC, ("write",), every=True))
            with pytest.raises(OSError, match="No space") as failed:
                log.append_arrow(table)
        (note,) = failed.value.__notes__
        there = int(note.split()[0])
        assert "of 15 records were appended, from sequence 1 on" in note
        expected = [b"before", *table["value"].to_pylist()[:there]]
        with kvspool.open(tmp_path / "log") as other:
            assert [record.value for record in other] == expected
        assert log.append_arrow(table) == range(1 + there, 16 + there)
        assert [record.value for record in log] == [*expected, *table["value"].to_pylist()]


def test_other_formats_take_what_they_have_room_for(tmp_path: Path) -> None:
    rows = [(b"k", b"a", 3, -7, Codec.RAW), (None, b"bc", 0, 5, Codec.RAW)]
    with kvspool.create(tmp_path / "sej", format="sej") as log:
        with pytest.raises(Unsupported, match="has no codecs"):
            log.append_arrow(as_batch([(b"k", b"a", 3, -7, Codec.TEXT)]))
        assert log.append_arrow(pa.Table.from_batches([as_batch(rows), as_batch(rows)])) == range(4)
        once = [(-7, 3, b"k", b"a", 0), (5, 0, None, b"bc", 0)]
        again = [(5, *row[1:]) for row in once]
        assert stored(log) == [(at, *row) for at, row in enumerate(once + again)]
        assert gathered(log.cursor(bounded=True)) == stored(log)
        with pytest.raises(TooLarge, match="sej"):
            log.append_arrow(pa.record_batch({"value": [b""], "key": [b"k" * 200]}))
        with pytest.raises(OutOfRange, match="continues"):
            log.append_arrow(as_batch(rows), at=9)
    with kvspool.create(tmp_path / "fixed", format="fixed", item_bytes=3, items_per_blob=4) as log:
        assert log.append_arrow(pa.table({"value": [b"%03d" % at for at in range(10)]})) == range(10)
        assert log.read_arrow(2, limit=7)["value"].to_pylist() == [b"%03d" % at for at in range(2, 9)]
        with pytest.raises(ValueError, match="bytes"):
            log.append_arrow(pa.table({"value": [b"long"]}))
        with pytest.raises(Unsupported, match="has no timestamps"):
            log.append_arrow(as_batch(rows))
        with pytest.raises(Unsupported, match="has no keys"):
            log.append_arrow(pa.table({"value": [b"abc"], "key": [b"k"]}))
    with kvspool.create(tmp_path / "fflg", format="fflg") as log:
        assert log.append_arrow(pa.table({"value": [b"a", b"bb"]})) == range(2)
        assert gathered(log.cursor(bounded=True)) == stored(log) == [(0, 0, 0, None, b"a", 0), (1, 0, 0, None, b"bb", 0)]


# Out of journals.


@pytest.fixture
def history(kvj_twin: ModuleType, unflushed: None, tmp_path: Path) -> Iterator[Journal]:
    """A journal of eight segments, with 60 records."""
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=300) as log:
        log.append_many([b"value %02d" % number for number in range(60)], keys=[b"key"] * 60)
        assert len(log.bases()) == 8
        yield log


def test_starts_limits_and_ends(history: Journal) -> None:
    assert history.read_arrow("latest").num_rows == 0
    assert history.read_arrow(7, limit=20)["sequence"].to_pylist() == list(range(7, 27))
    assert history.read_arrow(limit=0).schema == arrow.SCHEMA
    cursor = history.cursor(3, bounded=True, end=11)
    assert [row[0] for row in gathered(cursor)] == list(range(3, 11))
    for wrong in ({"limit": -1}, {"on_gap": "yield"}):
        with pytest.raises(ValueError, match="limit|on_gap"):
            history.read_arrow(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 byte"):
        arrow.next_batch(cursor, bytes=0)


def test_only_what_is_on_disk(history: Journal) -> None:
    synced = history.stats().synced_sequence
    assert 0 < synced < 60
    assert history.read_arrow(isolation="synced")["sequence"].to_pylist() == list(range(synced))
    cursor = history.cursor(isolation="synced")
    assert [row[0] for row in gathered(cursor)] == list(range(synced))
    history.sync()
    assert [row[0] for row in gathered(cursor)] == list(range(synced, 60))


def test_a_cursor_goes_on_where_more_comes(history: Journal) -> None:
    cursor = history.cursor(58)
    assert [row[0] for row in gathered(cursor)] == [58, 59]
    assert arrow.next_batch(cursor).num_rows == 0
    history.append_many([b"more"] * 30)
    assert [row[0] for row in gathered(cursor)] == list(range(60, 90))


@pytest.mark.parametrize("segment_bytes", [1 << 20, 64 << 20])
def test_batches_are_bounded(segment_bytes: int, kvj_twin: ModuleType, unflushed: None, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=segment_bytes) as log:
        log.append_arrow(pa.table({"value": [bytes([65 + at % 26]) * 1000 for at in range(3000)]}))
        sizes = [batch.num_rows for batch in arrow.batches(log.cursor(bounded=True), most=700, bytes=500_500)]
        assert sum(sizes) == 3000
        assert max(sizes) == 500
        sizes = [batch.num_rows for batch in arrow.batches(log.cursor(bounded=True), most=300)]
        assert max(sizes) == 300
        if segment_bytes > 3 << 20:  # it goes on over what is read at once
            assert sizes == [300] * 10
        assert log.read_arrow()["value"].to_pylist() == [bytes([65 + at % 26]) * 1000 for at in range(3000)]


@pytest.mark.parametrize("form", ["kvj", "sej"])
def test_a_record_that_is_larger_than_a_batch_comes_alone(form: Any, kvj_twin: ModuleType, tmp_path: Path) -> None:
    values = [b"a", b"b" * 1_000_000, b"c", b"d" * 10, b"e"]
    with kvspool.create(tmp_path / "log", format=form) as log:
        log.append_many(values)
        batches = [batch["value"].to_pylist() for batch in arrow.batches(log.cursor(bounded=True), bytes=500_000)]
        assert batches == [[b"a"], [b"b" * 1_000_000], [b"c", b"d" * 10, b"e"]]
        found = [batch["value"].to_pylist() for batch in arrow.batches(log.cursor(2, bounded=True), bytes=2)]
        assert sum(found, []) == values[2:]
        assert [b"d" * 10] in found


def test_gaps_lie_between_batches(history: Journal) -> None:
    whole = stored(history)
    path = history._segments.path_of(history.bases()[2])
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    history._segments.path_of(history.bases()[5]).unlink()
    with kvspool.open(history.path) as log:
        found = stored(log)
        gaps = [one for one in found if isinstance(one, Gap)]
        assert [gap.reason for gap in gaps] == ["damaged", "damaged"]
        assert gathered(log.cursor(bounded=True)) == found
        assert gathered(log.cursor(bounded=True), most=3) == found
        cursor = log.cursor(bounded=True)
        assert gathered(cursor, bytes=10) == found
        assert cursor.missed == sum(gap.count for gap in gaps)
        for kind in ("coded", "plain"):
            assert len([one for one in arrow.batches(log.cursor(bounded=True), coded=kind == "coded") if isinstance(one, Gap)]) == 2
        kept = [row for row in found if not isinstance(row, Gap)]
        assert set(kept) < set(whole)
        assert fields(log.read_arrow(on_gap="skip")) == [row[:5] for row in kept]
        with pytest.raises(GapError, match="damaged"):
            log.read_arrow()


def test_every_flipped_bit_is_found(kvj_twin: ModuleType, unflushed: None, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=100) as log:
        log.append_many([b"a", b"bc", b"d"], keys=[None, b"key", b""], timestamp=1)
        path = log._segments.path_of(0)
        assert log.bases() == [0, 3]
    whole = path.read_bytes()
    for bit in range(8 * 24, 8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with kvspool.open(tmp_path / "log") as log:
            found = gathered(log.cursor(bounded=True))
            assert found == stored(log)
        hit = 0 if bit < 8 * (24 + 29) else 1 if bit < 8 * (24 + 29 + 33) else 2
        assert [(one.first, one.last) if isinstance(one, Gap) else one[0] for one in found] == [
            (at, at) if at == hit else at for at in range(3)
        ]


def test_archives_are_read_as_segments(history: Journal) -> None:
    pytest.importorskip("zstandard")
    before = stored(history)
    assert history.archive().segments
    assert gathered(history.cursor(bounded=True)) == before


def test_sequences_beyond_the_column(kvj_twin: ModuleType, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_many([b"a", b"b", b"c"])
        log.append_arrow(pa.table({"value": [b"d", b"e"]}), at=(1 << 63) - 1)
        found = gathered(cursor := log.cursor(bounded=True), limit=4)
        assert [one.last if isinstance(one, Gap) else one[0] for one in found] == [0, 1, 2, (1 << 63) - 2, (1 << 63) - 1]
        with pytest.raises(OutOfRange, match="doesn't fit into a column"):
            arrow.next_batch(cursor)


# Codecs out of spools.


@pytest.mark.parametrize("codec", ["json", "msgpack", "keyed"])
def test_batches_of_a_spool_with_codecs(codec: str, tmp_path: Path) -> None:
    values: list[Any] = [b"raw", "text", {"a": [1], "b": {"c": None}}, b"", {"a": 2}]
    with kvspool.create(tmp_path / "log", capacity=1 << 16, codec=codec) as log:
        log.append_many(values, keys=[None, b"", b"k", None, b"kk"], type=9)
        batch = arrow.next_batch(log.cursor(), coded=True)
        assert batch.schema == arrow.CODED_SCHEMA
        rows = fields(batch)
        structured = Codec.JSON if codec == "json" else Codec.MSGPACK
        assert [row[5] for row in rows] == [Codec.RAW, Codec.TEXT, structured, Codec.RAW, structured]
        assert [log.decode(row[4], row[5]) for row in rows] == values
        plain = arrow.next_batch(log.cursor())
        assert plain.schema == arrow.SCHEMA
        assert fields(plain) == [row[:5] for row in stored(log)]
        if codec != "keyed":
            assert rows == stored(log)
        assert [fields(one) for one in arrow.batches(log.cursor(), most=2, coded=True)] == [rows[:2], rows[2:4], rows[4:]]


def test_rows_without_keyed_values_of_a_keyed_spool_are_handed_out_as_they_lie(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=1 << 16, codec="keyed") as log:
        log.append_many([b"a", "b"])
        assert fields(arrow.next_batch(log.cursor(), coded=True)) == stored(log)


def test_bytes_bound_a_batch_of_a_spool(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=1 << 16) as log:
        log.append_many([b"x" * 10, b"y" * 500, *[b"z" * 10] * 6])
        sizes = [batch["value"].to_pylist() for batch in arrow.batches(log.cursor(), bytes=35)]
        assert sizes == [[b"x" * 10], [b"y" * 500], [b"z" * 10] * 3, [b"z" * 10] * 3]
        with pytest.raises(ValueError, match="at least 1 byte"):
            arrow.next_batch(log.cursor(), bytes=-1)


# From one log into another.


@pytest.mark.parametrize("source", ["spool", "kvj"])
def test_a_mirror_is_the_same_log(source: Any, kvj_twin: ModuleType, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "source", format=source) as log, kvspool.create(tmp_path / "mirror", format="kvj") as mirror:
        log.append_many([b"raw", "text", {"a": 1}], keys=[b"k", None, b""], type=3)
        log.append_many([{"b": at} for at in range(200)])
        for batch in arrow.batches(log.cursor(), most=7, coded=True):
            first = batch["sequence"][0].as_py()
            assert mirror.append_arrow(batch.drop_columns(["sequence"]), at=first) == range(first, first + batch.num_rows)
        assert stored(mirror) == stored(log)
        assert len(list(pairwise(mirror))) == 202
