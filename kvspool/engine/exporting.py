"""Export the records of a log to a file: JSON lines or Parquet; `kvspool.transfer.exchange` describes both and imports them."""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from kvspool.engine.cursor import Cursor
from kvspool.engine.iteration import Iteration
from kvspool.engine.moving import Mover, Target, limited
from kvspool.engine.reports import Exported
from kvspool.engine.rows import FILE, Room, Rows, batches
from kvspool.engine.stats import LogStats
from kvspool.errors import MissingExtra
from kvspool.options import OnGap, Start
from kvspool.record import NO_TIME, Codec, codec_name
from kvspool.system.handles import Handle

FORMATS = ("jsonl", "parquet")
BATCH = 1024  # records written as one row group, or appended at once
BATCH_BYTES = 4 << 20  # bytes of keys and values in them

CODECS = {codec.name.lower(): codec for codec in Codec if codec != Codec.PAD}
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class Exportable(Protocol):
    """The part of `kvspool.Log` for an export."""

    @property
    def capabilities(self) -> frozenset[str]: ...

    @property
    def log_id(self) -> bytes: ...

    @property
    def room(self) -> Room: ...

    def cursor(self, start: Start, *, bounded: bool = False, end: int | None = None) -> Cursor: ...

    def extent(self) -> tuple[int, int]: ...

    def sequence_at(self, start: Start) -> int: ...

    def stats(self) -> LogStats: ...


def export(
    log: Exportable,
    file: IO[bytes],
    format: str = "jsonl",
    *,
    start: Start = "earliest",
    end: int | None = None,
    limit: int | None = None,
    on_gap: OnGap = "raise",
    progress: Callable[[int], object] | None = None,
) -> Exported:
    """Write the present records to a binary file, up to sequence `end` (not included) if that is given, and at most `limit` records.

    format: "jsonl" or "parquet". on_gap: "raise" ends with GapError at the first lost record; "yield" and "skip" continue, and the result
    lists the Gaps. progress: called with the number of records so far. Raises the errors of `Log.read`, Undecodable for a keyed value whose
    keys are damaged, OSError of the file, ValueError. All records before an error are in the file.
    """
    if format not in FORMATS:
        raise ValueError(f"a format is one of {', '.join(FORMATS)}, not {format!r}")
    begin, stop = log.sequence_at(start), log.extent()[1]
    stop = stop if end is None else min(end, stop)
    with LinesTarget(file) if format == "jsonl" else ParquetTarget(file, log) as target:
        mover = Mover(target, log.room, on_gap=on_gap)
        if begin < stop:
            reading = Iteration(log.cursor(begin, bounded=True, end=stop))
            tell = None if progress is None else lambda: progress(mover.records)
            mover.move(limited(batches(reading, has_times=log.room.timestamps, rows=BATCH), limit), tell)
    lost = sum(gap.count for gap in mover.gaps if gap.reason != "machine restart")  # those numbers were left out on purpose
    return Exported(mover.records, lost, mover.gaps)


class FileTarget(Target, Handle):
    """A binary file, which stores all fields."""

    room = FILE

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(Path(str(getattr(file, "name", ""))))
        self._file = file

    def append(self, rows: Rows, at: int | None = None) -> range:
        self.write(rows)
        return range(rows.first, rows.end)

    @abstractmethod
    def write(self, rows: Rows) -> None:
        """Write a batch."""

    def close(self) -> None:
        """Finish the file, which the caller closes."""


class LinesTarget(FileTarget):
    """JSON lines."""

    format = "jsonl"

    def write(self, rows: Rows) -> None:
        self._file.write(b"".join([_to_json(members(rows, row)) + b"\n" for row in range(len(rows.values))]))


class ParquetTarget(FileTarget):
    """A Parquet file, with a row group for each batch."""

    format = "parquet"

    def __init__(self, file: IO[bytes], log: Exportable) -> None:
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            raise MissingExtra.of("arrow", "a Parquet file needs the package pyarrow", error) from error

        from kvspool.engine.columns import SCHEMA

        super().__init__(file)
        about = {"kvspool.log_id": log.log_id.hex(), "kvspool.codec": log.stats().codec}
        about["kvspool.keyed"] = "values of codec 4 are plain MessagePack here"
        self._schema = SCHEMA.insert(3, pa.field("codec", pa.int32())).with_metadata(about)
        self._writer = parquet.ParquetWriter(file, self._schema)

    def write(self, rows: Rows) -> None:
        import pyarrow as pa

        times = [None if timestamp == NO_TIME else timestamp for timestamp in rows.timestamps]
        columns = (range(rows.first, rows.end), times, rows.types, list(rows.codecs), rows.keys, rows.values)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema), row_group_size=len(rows.values))

    def close(self) -> None:
        self._writer.close()


def members(rows: Rows, row: int) -> dict[str, Any]:
    """Return a record as the members of its line."""
    found: dict[str, Any] = {"sequence": rows.first + row, "timestamp": rows.timestamps[row], "type": rows.types[row]}
    if rows.timestamps[row] == NO_TIME:
        del found["timestamp"]
    codec = rows.codecs[row]
    found["codec"] = codec_name(codec)
    for name, content in (("key", _text(rows.keys[row])), ("value", _content(rows.values[row], codec))):
        if isinstance(content, bytes):
            found[f"{name}_base64"] = base64.b64encode(content).decode()
        else:
            found[name] = content
    return found


def _text(value: bytes | None) -> str | bytes | None:
    """Return bytes as text if they are UTF-8, else unchanged."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _content(value: bytes, codec: int) -> Any:
    """Return the value if JSON can restore it byte for byte; its bytes otherwise."""
    if codec == Codec.JSON:
        return msgspec.Raw(value) if _is_line(value) else value
    if codec not in (Codec.MSGPACK, Codec.KEYED):
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
