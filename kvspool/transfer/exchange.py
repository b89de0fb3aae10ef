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
from kvspool.engine.exporting import BATCH, BATCH_BYTES, CODECS, FORMATS
from kvspool.engine.moving import Mover
from kvspool.engine.rows import AROUND, FILE, Room, Rows, columns_of
from kvspool.errors import MissingExtra, NotImportable
from kvspool.gap import Gap
from kvspool.log import Log
from kvspool.record import NO_TIME, Codec, Record, codec_name
from kvspool.transfer import targets
from kvspool.transfer.sources import V1Source

if TYPE_CHECKING:
    import pyarrow

Progress = Callable[[int], None]
_to_msgpack = msgspec.msgpack.Encoder().encode


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


# Import.


def import_(log: Log, file: IO[bytes], format: str = "jsonl", *, progress: Progress | None = None) -> Imported:
    """Append the records of a binary file, in order, in batches that are appended whole or not at all.

    format: "jsonl" or "parquet". Raises NotImportable for an invalid record, with its line or row and the number of imported records;
    NotKept if a record has a field that the log can't store; the errors of `Log.append_many` (a batch without room is not appended);
    ValueError; OSError of the file.
    """
    if format not in FORMATS:
        raise ValueError(f"a format is one of {', '.join(FORMATS)}, not {format!r}")
    name = str(getattr(file, "name", "the file"))
    return _imported(log, _batches(_lines(file) if format == "jsonl" else _parquet_rows(file)), FILE, name, progress)


def _imported(log: Log, items: Iterable[Rows | Gap], room: Room, name: str, progress: Progress | None) -> Imported:
    """Move records to the end of a log; an error reports how many were appended."""
    target = targets.of(log)
    target.is_lossy = True  # a spool overwrites its oldest records, as for every append
    mover = Mover(target, room, name=name)
    try:
        mover.move(items, None if progress is None else lambda: progress(mover.records))
    except Exception as error:
        done = f"{mover.records} record{'s were' if mover.records != 1 else ' was'} imported before"
        if mover.records:
            done += f", sequences {mover.first} to {mover.last}"
        if isinstance(error, NotImportable):
            raise NotImportable(f"{error}; {done}") from error
        error.add_note(done)
        raise
    return Imported(mover.records, mover.first, mover.last)


def _batches(records: Iterable[Record]) -> Iterator[Rows]:
    """Yield records in batches. Of a batch with an invalid record, nothing is yielded."""
    batch: list[Record] = []
    first = size = 0
    for record in records:
        needed = len(record.value) + len(record.key or b"") + AROUND
        if batch and (len(batch) == BATCH or size + needed > BATCH_BYTES):
            yield columns_of(batch)._replace(first=first)
            first, size, batch = first + len(batch), 0, []
        batch.append(record)
        size += needed
    if batch:
        yield columns_of(batch)._replace(first=first)


def _lines(file: IO[bytes]) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield _record(_LINES.decode(line))
        except (ValueError, RecursionError) as error:
            raise NotImportable(f"line {number}: {error}") from error


def _record(line: Line) -> Record:
    codec = line.codec if isinstance(line.codec, int) else CODECS.get(line.codec, -1)
    if not 0 <= codec < Codec.PAD:
        raise ValueError(f"there is no codec {line.codec!r}; codecs are {', '.join(CODECS)}")
    if (line.value_base64 is None) == (bytes(line.value) == b""):
        raise ValueError("a record has either value or value_base64")
    key = None if line.key is None else line.key.encode()
    if line.key_base64 is not None:
        key = base64.b64decode(line.key_base64, validate=True)
    return Record(0, _time(line.timestamp), _within(line.type, 255, "type"), key, _value(line, codec), codec)


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
        raise ValueError(f"a value of codec {codec_name(codec)} is a string, not {type(value).__name__}")
    return value.encode()


def _within(number: int, most: int, name: str) -> int:
    if not 0 <= number <= most:
        raise ValueError(f"a {name} is 0..{most}, not {number}")
    return number


def _time(timestamp: int) -> int:
    if timestamp == -1:
        return NO_TIME
    times.check(timestamp)
    return timestamp


def _parquet_rows(file: IO[bytes]) -> Iterator[Record]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtra.of("arrow", "a Parquet file needs the package pyarrow", error) from error
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
                yield Record(0, _time(when), _within(type or 0, 255, "type"), key, value, _within(codec or 0, 254, "codec"))
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


def import_v1(log: Log, path: Path, *, unread: bool = False, progress: Progress | None = None) -> Imported:
    """Append the records of a spool directory of kvspool v1, which are dicts of strings, in the order in which they were written.

    unread: only those after the position of its reader. An incomplete frame at the end of a file ends that file, and is listed in `torn`.
    Any other fault raises NotImportable, with file, byte and the number of imported records.
    """
    source = V1Source(path)
    source.unread = unread
    done = _imported(log, source.read(0, None), source.room, str(path), progress)
    return msgspec.structs.replace(done, torn=source.torn)
