"""Export the records of a log to a file, and import a file into a log: JSON lines, Parquet, and directories of kvspool v1.

**JSON lines.** One object for each record: sequence, timestamp (ns since 1970), type, codec (its name), key, value. A key or value that
JSON can't represent exactly is stored in base64 as `key_base64` or `value_base64`. A key of null is no key. A record without a time has no
timestamp; in Parquet it is null.

**Parquet.** The columns of `read_arrow`, and codec (int32); a row group for each batch. Needs the extra `arrow`.

Values survive an export and import byte for byte, except keyed ones, since their key table belongs to the log. The file holds them decoded
(in Parquet as plain MessagePack), and a log that has a key table encodes them again. Sequences are the log's: an import assigns new ones,
in order. Timestamps are kept unless they decrease.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from kvspool.engine import times
from kvspool.engine.iteration import gathered
from kvspool.errors import NotImportable
from kvspool.log import Log
from kvspool.options import OnGap, Start
from kvspool.record import NO_TIME, Codec, Gap, Record, plain
from kvspool.spool.appending import Row
from kvspool.spool.spool import Spool

if TYPE_CHECKING:
    import pyarrow

FORMATS = ("jsonl", "parquet")
BATCH = 1024  # records appended, or written as one row group, at once
BATCH_BYTES = 4 << 20  # bytes of keys and values in them

Progress = Callable[[int], None]
_NAMES = {codec.name.lower(): codec for codec in Codec if codec != Codec.PAD}
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class Exported(msgspec.Struct, frozen=True):
    """The result of an export. lost: records that could not be read, not counting numbers left out after a restart; gaps: all of them."""

    records: int
    lost: int
    gaps: list[Gap]


class Imported(msgspec.Struct, frozen=True):
    """The result of an import; first_sequence and last_sequence are None if it was empty. torn: files of kvspool v1 with an incomplete
    end.
    """

    records: int
    first_sequence: int | None
    last_sequence: int | None
    torn: list[str] = []


class Line(msgspec.Struct):
    """A line of a file to import; missing members have these values."""

    timestamp: int = -1
    type: int = 0
    codec: str | int = "raw"
    key: str | None = None
    key_base64: str | None = None
    value: msgspec.Raw = msgspec.Raw(b"")
    value_base64: str | None = None


_LINES = msgspec.json.Decoder(Line)


# Export.


def export(
    log: Log,
    file: IO[bytes],
    format: str = "jsonl",
    *,
    start: Start = "earliest",
    end: int | None = None,
    on_gap: OnGap = "raise",
    progress: Progress | None = None,
) -> Exported:
    """Write the present records to a binary file, up to sequence `end` (not included) if that is given.

    format: "jsonl" or "parquet". on_gap: "raise" ends with GapError at the first lost record; "yield" and "skip" continue, and the result
    lists the Gaps. progress: called with the number of records so far. Raises the errors of `Log.read`, Undecodable for a keyed value whose
    keys are damaged, OSError of the file, ValueError. All records before an error are in the file.
    """
    if format not in FORMATS:
        raise ValueError(f"a format is one of {', '.join(FORMATS)}, not {format!r}")
    gaps: list[Gap] = []
    records = _records(log.read(start, on_gap="raise" if on_gap == "raise" else "yield"), end, gaps)
    write = _write_lines if format == "jsonl" else _write_parquet
    count = 0
    for written in write(log, file, records):
        count += written
        if progress is not None:
            progress(count)
    lost = sum(gap.count for gap in gaps if gap.reason != "machine restart")  # those numbers were left out on purpose
    return Exported(count, lost, gaps)


def _records(items: Iterable[Record | Gap], end: int | None, gaps: list[Gap]) -> Iterator[Record]:
    """Yield the records before the sequence `end`, and note the Gaps between them."""
    for item in items:
        if isinstance(item, Gap):
            if end is not None and item.first >= end:
                break
            gaps.append(item)
            continue
        if end is not None and item.sequence >= end:
            break
        yield item


def _write_lines(log: Log, file: IO[bytes], records: Iterable[Record]) -> Iterator[int]:
    has_times = "timestamps" in log.capabilities
    lines = (_to_json(_members(record, has_time=has_times)) + b"\n" for record in records)
    for batch in gathered(lines, len, BATCH, BATCH_BYTES):
        file.write(b"".join(batch))
        yield len(batch)


def _members(record: Record, *, has_time: bool = True) -> dict[str, Any]:
    """Return a record as the members of its line."""
    members: dict[str, Any] = {"sequence": record.sequence, "timestamp": record.timestamp, "type": record.type}
    if not has_time or record.timestamp == NO_TIME:
        del members["timestamp"]
    members["codec"] = _name(record.codec)
    for name, content in (("key", _text(record.key)), ("value", _content(record))):
        if isinstance(content, bytes):
            members[f"{name}_base64"] = base64.b64encode(content).decode()
        else:
            members[name] = content
    return members


def _name(codec: int) -> str | int:
    return next((name for name, known in _NAMES.items() if known == codec), codec)


def _text(value: bytes | None) -> str | bytes | None:
    """Return bytes as text if they are UTF-8, else unchanged."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _content(record: Record) -> Any:
    """Return the value if JSON can restore it byte for byte; its bytes otherwise."""
    value = plain(record)
    if record.codec == Codec.JSON:
        return msgspec.Raw(value) if _is_line(value) else value
    if record.codec not in (Codec.MSGPACK, Codec.KEYED):
        return _text(value)
    try:
        said = _to_json(msgspec.msgpack.decode(value))
        return msgspec.Raw(said) if _to_msgpack(msgspec.json.decode(said)) == value else value
    except (ValueError, TypeError, OverflowError, RecursionError):
        return value


def _is_line(value: bytes) -> bool:
    """Return whether these bytes can be part of a line, and be cut out of it again."""
    try:
        msgspec.json.decode(value)
        value.decode()
    except (ValueError, RecursionError):
        return False
    return value == value.strip() and b"\n" not in value and b"\r" not in value


def _write_parquet(log: Log, file: IO[bytes], records: Iterable[Record]) -> Iterator[int]:
    import pyarrow as pa
    from pyarrow import parquet

    from kvspool import arrow

    about = {"kvspool.log_id": log.log_id.hex(), "kvspool.codec": log.stats().codec}
    about["kvspool.keyed"] = "values of codec 4 are plain MessagePack here"
    schema = arrow.SCHEMA.insert(3, pa.field("codec", pa.int32())).with_metadata(about)
    has_times = "timestamps" in log.capabilities
    rows = ((one.sequence, _known_time(one, has_times), one.type, one.codec, one.key, plain(one)) for one in records)
    with parquet.ParquetWriter(file, schema) as writer:
        for batch in gathered(rows, _row_bytes, BATCH, BATCH_BYTES):
            columns = zip(*batch, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema), row_group_size=len(batch))
            yield len(batch)


def _known_time(record: Record, has_times: bool) -> int | None:
    return record.timestamp if has_times and record.timestamp != NO_TIME else None


def _row_bytes(row: tuple[int, int | None, int, int, bytes | None, bytes]) -> int:
    return len(row[4] or b"") + len(row[5])


# Import.


def import_(log: Spool, file: IO[bytes], format: str = "jsonl", *, progress: Progress | None = None) -> Imported:
    """Append the records of a binary file, in order, in batches that are appended whole or not at all.

    format: "jsonl" or "parquet". Raises NotImportable for an invalid record, with its line or row and the number of imported records; the
    errors of `Log.append_many` (a batch without room is not appended); ValueError; OSError of the file.
    """
    if format not in FORMATS:
        raise ValueError(f"a format is one of {', '.join(FORMATS)}, not {format!r}")
    return append_rows(log, _lines(file) if format == "jsonl" else _parquet_rows(file), progress)


def append_rows(log: Spool, rows: Iterable[Row], progress: Progress | None = None, torn: list[str] | None = None) -> Imported:
    """Append rows in batches that are published at once; an error reports how many were appended."""
    batch: list[Row] = []
    size = count = 0
    first = last = None
    most = min(BATCH_BYTES, log.capacity // 8)

    def append() -> None:
        nonlocal batch, size, count, first, last
        if batch:
            sequences = log.append_rows(batch)
            first = sequences.start if first is None else first
            last, count = sequences.stop - 1, count + len(batch)
            batch, size = [], 0
            if progress is not None:
                progress(count)

    try:
        for row in rows:
            needed = len(row.value) + len(row.key or b"") + 64
            if len(batch) == BATCH or size + needed > most:
                append()
            batch.append(row)
            size += needed
        append()
    except Exception as error:
        done = f"{count} records were imported before" + ("" if first is None else f", sequences {first} to {last}")
        if isinstance(error, NotImportable):
            raise NotImportable(f"{error}; {done}") from error
        error.add_note(done)
        raise
    return Imported(count, first, last, torn or [])


def _lines(file: IO[bytes]) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield _row(_LINES.decode(line))
        except (ValueError, RecursionError) as error:
            raise NotImportable(f"line {number}: {error}") from error


def _row(line: Line) -> Row:
    codec = line.codec if isinstance(line.codec, int) else _NAMES.get(line.codec, -1)
    if not 0 <= codec < Codec.PAD:
        raise ValueError(f"there is no codec {line.codec!r}; codecs are {', '.join(_NAMES)}")
    if (line.value_base64 is None) == (bytes(line.value) == b""):
        raise ValueError("a record has either value or value_base64")
    key = None if line.key is None else line.key.encode()
    if line.key_base64 is not None:
        key = base64.b64decode(line.key_base64, validate=True)
    return Row(key, _value(line, codec), _within(line.type, 255, "type"), codec, _time(line.timestamp))


def _value(line: Line, codec: int) -> bytes:
    """Return the bytes of a line's value."""
    if line.value_base64 is not None:
        return base64.b64decode(line.value_base64, validate=True)
    raw = bytes(line.value)
    if codec == Codec.JSON:
        return raw
    value = msgspec.json.decode(raw)
    if codec in (Codec.MSGPACK, Codec.KEYED):
        return _to_msgpack(value)
    if not isinstance(value, str):
        raise ValueError(f"a value of codec {_name(codec)} is a string, not {type(value).__name__}")
    return value.encode()


def _within(number: int, most: int, name: str) -> int:
    if not 0 <= number <= most:
        raise ValueError(f"a {name} is 0..{most}, not {number}")
    return number


def _time(timestamp: int) -> int:
    if timestamp != -1:
        times.check(timestamp)
    return timestamp


def _parquet_rows(file: IO[bytes]) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        source = parquet.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise NotImportable(f"not a Parquet file: {error}") from error
    names = set(source.schema_arrow.names)
    if "value" not in names:
        raise NotImportable("a column named value is missing")
    number = 0
    for batch in source.iter_batches(BATCH):
        columns = [_column(batch, name, kind) for name, kind in _KINDS.items()]
        for timestamp, type, codec, key, value in zip(*columns, strict=True):
            number += 1
            try:
                if value is None:
                    raise ValueError("a value is never null")
                when = -1 if timestamp is None else timestamp
                yield Row(key, value, _within(type or 0, 255, "type"), _within(codec or 0, 254, "codec"), _time(when))
            except ValueError as error:
                raise NotImportable(f"row {number}: {error}") from error


_KINDS = {"timestamp": "int64", "type": "int64", "codec": "int64", "key": "binary", "value": "binary"}


def _column(batch: pyarrow.RecordBatch, name: str, kind: str) -> list[Any]:
    import pyarrow as pa

    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column = batch.column(name)
    try:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns", column.type.tz))
        values: list[Any] = column.cast(kind).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise NotImportable(f"column {name} is {column.type}: {error}") from error
    return values


# Import of a directory of kvspool v1.


def import_v1(log: Spool, path: Path, *, unread: bool = False, progress: Progress | None = None) -> Imported:
    """Append the records of a spool directory of kvspool v1, which are dicts of strings, in the order in which they were written.

    unread: only those after the position of its reader. An incomplete frame at the end of a file ends that file, and is listed in `torn`.
    Any other fault raises NotImportable, with file, byte and the number of imported records.
    """
    from kvspool.opening import v1

    torn: list[str] = []

    def rows() -> Iterator[Row]:
        for pairs in v1.records(path, unread=unread, torn=torn):
            yield Row(None, _to_msgpack(pairs), 0, Codec.KEYED, -1)

    return append_rows(log, rows(), progress, torn)
