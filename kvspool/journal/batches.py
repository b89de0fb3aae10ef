"""Prepare batches of records for a journal: encoded, and checked against its format."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from kvspool.engine import times
from kvspool.journal.format import LAST_TIME, Format, JournalBatch, JournalRows, joined
from kvspool.log import unsupported
from kvspool.producers import ColumnPieces, ListedRows, ProducerRows
from kvspool.record import NO_TIME, Codec, encode, encode_keys, listed

if TYPE_CHECKING:
    from kvspool.journal.columns import JournalColumns


def prepare(
    format: Format, codec: Codec, values: Iterable[Any], keys: Iterable[bytes | str | None] | None, type: int, timestamp: int | None
) -> JournalBatch:
    """Encode and check values; see `Log.prepare`. codec: of those that are neither bytes nor str."""
    encoded, codecs = _encoded(listed(values), codec)
    if timestamp is None:
        timestamp = None if format.has_timestamps else 0
    elif format.has_timestamps:
        times.refuse_ahead(timestamp)
    else:
        raise unsupported(format.name, "timestamps")
    batch = JournalBatch(encoded, None if keys is None else listed(keys, "keys"), type, timestamp, codecs=codecs)  # type: ignore[arg-type]
    try:
        check(format, batch)
    except TypeError:
        if not any(isinstance(key, str) for key in batch.keys or ()):
            raise
        batch = batch._replace(keys=encode_keys(batch.keys))  # separately, since most keys are bytes and nothing is checked twice
        check(format, batch)
    return batch


def _encoded(values: list[Any], codec: Codec) -> tuple[list[bytes], bytes | None]:
    """Return the bytes of values, and their codecs if they are not all raw."""
    if set(map(builtins.type, values)) <= {bytes}:
        return values, None
    encoded = [encode(value, codec) for value in values]
    return [value for value, _ in encoded], bytes(codec for _, codec in encoded)


def prepare_columns(format: Format, parts: Sequence[JournalColumns], rows: memoryview | None) -> JournalRows:
    """Check columns, and return the given rows (int32 numbers; None: all) of each part, as the format appends them."""
    from kvspool.journal.columns import ColumnRows

    for part in parts:
        if not format.has_timestamps and part.has_times:
            raise unsupported(format.name, "timestamps")
        if not format.has_codecs and part.has_codecs:
            raise unsupported(format.name, "codecs")
    if not format.has_columns:
        batch = joined([part.listed(rows) for part in parts])
        if not format.has_timestamps:
            batch = batch._replace(timestamp=0, timestamps=None)
        check(format, batch)
        return batch
    for part in parts:
        format.check_columns(part)
    return ColumnRows(parts, [rows] * len(parts))


def of_producer(rows: ProducerRows) -> JournalRows:
    """Return the rows of a producer as an appender takes them."""
    if isinstance(rows, ListedRows):
        return rows.batch  # type: ignore[no-any-return]
    assert isinstance(rows, ColumnPieces)
    from kvspool.journal.columns import ColumnRows

    return ColumnRows([part for part, _ in rows.pieces], [numbers for _, numbers in rows.pieces])  # type: ignore[misc]


def check(format: Format, batch: JournalBatch) -> None:
    """Raise TypeError, ValueError, Unsupported or TooLarge for an invalid batch."""
    for name, many in (("keys", batch.keys), ("types", batch.types), ("timestamps", batch.timestamps)):
        if many is not None and len(many) != len(batch.values):
            raise ValueError(f"{len(many)} {name} for {len(batch.values)} values; there must be one for each")
    kinds = set(map(builtins.type, batch.keys or ()))
    if not kinds <= {bytes, NoneType}:
        raise TypeError(f"a key is bytes, str or None, not {', '.join(kind.__name__ for kind in kinds - {bytes, NoneType})}")
    types, times = batch.types or (batch.type,), batch.timestamps or (batch.timestamp or 0,)
    if not 0 <= min(types) <= max(types) <= 255:
        raise ValueError("a type is a number from 0 to 255")
    if not NO_TIME <= min(times) <= max(times) <= LAST_TIME:
        raise ValueError("a timestamp is ns since 1970 in 64 bits, signed")
    if not format.has_keys and bytes in kinds:
        raise unsupported(format.name, "keys")
    if not format.has_types and any(types):
        raise unsupported(format.name, "types")
    if not format.has_timestamps and not {0, NO_TIME}.issuperset(times):
        raise unsupported(format.name, "timestamps")
    format.check(batch)
