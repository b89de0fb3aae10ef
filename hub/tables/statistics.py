"""The statistics of a Parquet file that a Delta table's log holds: readers skip files by them.

Least and largest values come from the file's own statistics. Values that could mislead a reader are left out: of columns
with NaN or infinity, and of binary and nested columns. So are those of columns after the first 32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow.parquet import FileMetaData

MOST_COLUMNS = 32
LONGEST_TEXT = 32  # characters
LAST_CHARACTER = "\U0010ffff"


def of_file(metadata: FileMetaData, schema: pa.Schema, has_nan: set[str]) -> str:
    """Return the statistics of a file as JSON. schema: of the file; has_nan: its columns with NaN."""
    least: dict[str, Any] = {}
    largest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for field, leaf in _plain(schema):
        found = [group.column(leaf).statistics for group in groups]
        if any(one is None or not one.has_null_count for one in found):
            continue
        nulls[field.name] = sum(one.null_count for one in found)
        full = [one for group, one in zip(groups, found, strict=True) if one.null_count < group.num_rows]
        if not full or field.name in has_nan or not all(one.has_min_max for one in full) or not _is_ordered(field.type):
            continue
        lows, highs = [one.min for one in full], [one.max for one in full]
        if all(_is_usable(bound, field.type) for bound in (*lows, *highs)):
            low, high = min(lows), max(highs)
            least[field.name], largest[field.name] = _least(low), _largest(high)
    return json.dumps({"numRecords": metadata.num_rows, "minValues": least, "maxValues": largest, "nullCount": nulls})


def _plain(schema: pa.Schema) -> Iterator[tuple[pa.Field, int]]:
    """Yield the first columns that aren't nested, each with the number of its leaf in the file."""
    leaf = 0
    for number, field in enumerate(schema):
        leaves = _leaves(field.type)
        if number < MOST_COLUMNS and not pa.types.is_nested(field.type):
            yield field, leaf
        leaf += leaves


def _leaves(kind: pa.DataType) -> int:
    if not pa.types.is_nested(kind):
        return 1
    if pa.types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))


def _is_ordered(kind: pa.DataType) -> bool:
    test = pa.types
    return bool(
        test.is_integer(kind) or test.is_floating(kind) or test.is_string(kind) or test.is_date(kind) or test.is_timestamp(kind)
        or test.is_boolean(kind) or test.is_decimal(kind)
    )  # fmt: skip


def _is_usable(bound: Any, kind: pa.DataType) -> bool:
    """Return whether a bound of a row group can be in the log. JSON has no infinity, and NaN, which other writers store, has no order."""
    if isinstance(bound, float):
        return math.isfinite(bound)
    return isinstance(bound, Decimal) or not pa.types.is_decimal(kind)


def _least(value: Any) -> Any:
    if isinstance(value, Decimal):
        return math.nextafter(float(value), -math.inf)
    return value[:LONGEST_TEXT] if isinstance(value, str) else _json(value)


def _largest(value: Any) -> Any:
    if isinstance(value, Decimal):
        return math.nextafter(float(value), math.inf)
    if not isinstance(value, str):
        return _json(value)
    return value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + LAST_CHARACTER


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return f"{text}Z" if value.tzinfo is not None else text
    if isinstance(value, date):
        return value.isoformat()
    return value
