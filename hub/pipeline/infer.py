"""Infer a schema from a sample of records.

Whole numbers become bigint, because the sample may have only small ones; text stays text, whatever its content. If records disagree, the
most frequent kind is used, and the others will be bad records; `Inferred.notes` reports them, so that a person can decide. A field that
is null in the whole sample is omitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date, datetime
from typing import Any, NamedTuple

import msgspec

from hub.pipeline.errors import SchemaError
from hub.pipeline.schema import Kind, SchemaField, check, ddl, parse_schema

MOST_NOTES = 20
_SCALARS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int, its base class
    (int, "bigint"),
    (float, "double"),
    (str, "string"),
    (bytes, "binary"),
    (datetime, "timestamp"),  # before date, its base class
    (date, "date"),
)
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, TypeError)


class Inferred(NamedTuple):
    """A schema, and notes for the user."""

    fields: tuple[SchemaField, ...]
    records: int  # examined
    notes: tuple[str, ...]

    @property
    def ddl(self) -> str:
        """The schema in the notation of a job."""
        return ddl(self.fields)


def infer(values: Iterable[bytes], decode: Callable[[bytes], Any]) -> Inferred:
    """Return the schema of values. decode: converts one to dicts, lists and scalars. Raises SchemaError if no field can be inferred."""
    rows: list[dict[Any, Any]] = []
    notes: Counter[str] = Counter()
    records = 0
    for value in values:
        records += 1
        try:
            row = decode(value)
        except _ERRORS as error:
            notes[f"not decoded: {error}"[:200]] += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            notes[f"not a map: {type(row).__name__}"] += 1
    if not rows:
        why = f": {next(iter(notes))}" if notes else ""
        raise SchemaError(f"[KVSPOOL_NO_SCHEMA] nothing to infer from: {records:,} records, none of them a map{why}; give [decode] schema")
    fields = _fields(rows, "", notes)
    if not fields:
        raise SchemaError("[KVSPOOL_NO_SCHEMA] all fields are null in the sample; give [decode] schema")
    _check_names(fields)
    said = tuple(f"{count:,} of {records:,} records: {note}" for note, count in notes.most_common(MOST_NOTES))
    return Inferred(check(fields), records, said)


def _fields(rows: list[dict[Any, Any]], path: str, notes: Counter[str]) -> tuple[SchemaField, ...]:
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            if not isinstance(name, str) or not name:
                notes[f"{path or 'the map'} has the key {name!r}, which is no text; it is ignored"] += 1
            elif value is not None:
                values.setdefault(name, []).append(value)
    found = ((name, _kind(some, f"{path}.{name}".lstrip("."), notes)) for name, some in values.items())
    return tuple(SchemaField(name, kind) for name, kind in found if kind is not None)


def _kind(values: list[Any], path: str, notes: Counter[str]) -> Kind | None:
    """Return the kind of most values; None if there is none."""
    counts = Counter(_name(value) for value in values)
    if set(counts) == {"bigint", "double"}:
        return Kind("double")
    most, _ = counts.most_common(1)[0]
    for name, count in counts.items():
        if name != most:
            notes[f"{path} is {name}, and {most} in most; they will be bad records"] += count
    if most == "struct":
        fields = _fields([value for value in values if isinstance(value, dict)], path, notes)
        return Kind("struct", fields) if fields else None
    if most == "array":
        items = [item for value in values if isinstance(value, (list, tuple)) for item in value if item is not None]
        kind = _kind(items, f"{path}[]", notes) if items else None
        return None if kind is None else Kind("array", (kind,))
    return None if most == "?" else Kind(most)


def _name(value: Any) -> str:
    if isinstance(value, dict):
        return "struct"
    if isinstance(value, (list, tuple)):
        return "array"
    return next((name for kind, name in _SCALARS if isinstance(value, kind)), "?")


def _check_names(fields: tuple[SchemaField, ...]) -> None:
    """Raise SchemaError for names that a schema can't express."""
    if parse_schema(ddl(fields)) != fields:
        raise SchemaError("[KVSPOOL_NO_SCHEMA] the fields have names that a schema can't express; give [decode] schema")
