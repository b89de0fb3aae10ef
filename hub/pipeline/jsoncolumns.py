"""JSON objects to columns by Arrow's parser, for batches that leave no doubt; a few times faster than one object after the other.

The result is that of the decoder of objects, or None: then that decoder takes the batch, and says which values are bad, and why.

The values are joined with newlines, so it must be certain that each has exactly one object. Each begins with { and ends with }. After a }
inside an object no { may follow, and no text may have a newline. So no object has parts of two values, and each value has at least one.
If there are as many objects as values, each has one.
"""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json

from hub.pipeline.schema import SchemaField

_PARSED = {
    "tinyint": pa.int64(),
    "smallint": pa.int64(),
    "int": pa.int64(),
    "bigint": pa.int64(),
    "string": pa.string(),
    "float": pa.float64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.string(),
}
"""The types of the parsed columns, by the kinds of fields; other kinds are left to the decoder of objects."""
_TIME = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})$"


@lru_cache(8)
def options(fields: tuple[SchemaField, ...]) -> json.ParseOptions | None:
    """Return the options of the parser for some fields; None if a field has a kind that needs the decoder of objects."""
    if not fields or any(field.kind.name not in _PARSED for field in fields):
        return None
    schema = pa.schema([pa.field(field.name, _PARSED[field.kind.name]) for field in fields])
    return json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")


def columns(values: pa.Array, fields: tuple[SchemaField, ...]) -> list[pa.Array] | None:
    """Return the columns of JSON objects; None if the decoder of objects must decide. values: binary."""
    parsing = options(fields)
    if parsing is None or not len(values) or values.null_count:
        return None
    if not pc.all(pc.and_(pc.starts_with(values, b"{"), pc.ends_with(values, b"}"))).as_py():
        return None
    try:
        joined = pc.binary_join(pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values), b"\n")
        joined.cast(pa.string())  # the parser doesn't check UTF-8
        data = joined[0].as_buffer()
        reading = json.ReadOptions(use_threads=False, block_size=data.size + 1)
        found = json.read_json(pa.BufferReader(data), read_options=reading, parse_options=parsing)
        if found.num_rows != len(values):
            return None
        return [_column(found.column(field.name).combine_chunks(), field) for field in fields]
    except (pa.ArrowException, ValueError):
        return None


def _column(column: pa.Array, field: SchemaField) -> pa.Array:
    """Return a parsed column with its final type. Raises ArrowInvalid for values that don't fit, or might be read in another way."""
    kind = field.kind
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if kind.name == "timestamp" and not pc.all(pc.match_substring_regex(column, _TIME), skip_nulls=True, min_count=0).as_py():
        raise pa.ArrowInvalid("another notation of times")
    if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column), skip_nulls=True, min_count=0).as_py():
        raise pa.ArrowInvalid("NaN and Infinity are no JSON")
    return column.cast(kind.arrow, safe=kind.name != "float")
