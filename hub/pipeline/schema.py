"""Schemas in Spark's notation: "carrier string, dep_delay int, tags array<string>, place struct<lat: double, lon: double>".

They are parsed without Spark, for three uses: Spark needs text, the decoder needs Python types, and its output needs Arrow types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date, datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

import msgspec

from hub.pipeline.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow

INFER = "infer"
DEEPEST = 20  # nested types
MOST_FIELDS = 2000

_NAME = re.compile(r"`((?:[^`]|``)+)`|([A-Za-z_][A-Za-z_0-9]*)")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_ALIASES = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint", "real": "float"}
_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_PYTHON: dict[str, Any] = {
    **{name: Annotated[int, msgspec.Meta(ge=-(1 << (bits - 1)), le=(1 << (bits - 1)) - 1)] for name, bits in _BITS.items()},
    "string": str,
    "float": float,
    "double": float,
    "boolean": bool,
    "binary": bytes,
    "timestamp": datetime,
    "date": date,
}


class Kind(NamedTuple):
    """A type. parts: of an array its item; of a map key and value; of a struct its fields."""

    name: str
    parts: tuple[Any, ...] = ()

    @property
    def ddl(self) -> str:
        """The type in Spark's notation."""
        if self.name == "struct":
            return f"struct<{', '.join(f'{_quoted(field.name)}: {field.kind.ddl}' for field in self.parts)}>"
        return f"{self.name}<{', '.join(part.ddl for part in self.parts)}>" if self.parts else self.name

    @property
    def python(self) -> Any:
        """The type for a decoder."""
        if self.name == "array":
            item: Any = self.parts[0].python | None
            return list[item]
        if self.name == "map":
            value: Any = self.parts[1].python | None
            return dict[str, value]
        if self.name == "struct":
            make: Any = TypedDict  # with names that are known only now
            return make("Fields", {field.name: field.kind.python | None for field in self.parts}, total=False)
        return _PYTHON[self.name]

    @property
    def arrow(self) -> pyarrow.DataType:
        """The type of a column."""
        import pyarrow as pa

        if self.name == "array":
            return pa.list_(self.parts[0].arrow)
        if self.name == "map":
            return pa.map_(self.parts[0].arrow, self.parts[1].arrow)
        if self.name == "struct":
            return pa.struct([pa.field(field.name, field.kind.arrow) for field in self.parts])
        made: dict[str, Callable[[], pa.DataType]] = {
            "tinyint": pa.int8,
            "smallint": pa.int16,
            "int": pa.int32,
            "bigint": pa.int64,
            "string": pa.string,
            "float": pa.float32,
            "double": pa.float64,
            "boolean": pa.bool_,
            "binary": pa.binary,
            "date": pa.date32,
        }
        return pa.timestamp("us", "UTC") if self.name == "timestamp" else made[self.name]()


class SchemaField(NamedTuple):
    """A field of a record, or of a struct in one."""

    name: str
    kind: Kind


def parse_schema(text: str) -> tuple[SchemaField, ...]:
    """Return the fields of a schema. Raises SchemaError with the position of the mistake."""
    parser = _Parser(text)
    fields = tuple(parser.fields(" "))
    if parser.at < len(text):
        raise parser.wrong("a comma or the end")
    return check(fields)


def check(fields: tuple[SchemaField, ...]) -> tuple[SchemaField, ...]:
    """Return fields that can be the columns of a pipeline. Raises SchemaError."""
    seen: set[str] = set()
    for field in fields:
        if field.name.lower() in seen:
            raise SchemaError(f"the field {field.name!r} is repeated; Spark ignores case")
        seen.add(field.name.lower())
    if len(fields) > MOST_FIELDS:
        raise SchemaError(f"{len(fields)} fields; at most {MOST_FIELDS}")
    reserved = seen & {"record", "event_time"}
    if reserved:
        raise SchemaError(
            f"a field can't be named {min(reserved)!r}, which every row has: record is its origin, event_time its time; "
            "leave it out, or use codec text or raw with get_json_object in [select]"
        )
    return fields


def ddl(fields: tuple[SchemaField, ...]) -> str:
    """Return fields in Spark's notation."""
    return ", ".join(f"{_quoted(field.name)} {field.kind.ddl}" for field in fields)


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`"


class _Parser:
    """Reads a schema from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._depth = 0

    def fields(self, between: str) -> Iterator[SchemaField]:
        """Yield "NAME TYPE, NAME TYPE", or with a colon between name and type as in structs."""
        while True:
            name = self._name()
            self._skip()
            if not self._take(":") and between == ":":
                raise self.wrong("a colon")
            yield SchemaField(name, self._kind())
            self._skip()
            if not self._take(","):
                return

    def wrong(self, expected: str) -> SchemaError:
        """Return the error for the text at the current position."""
        found = self.text[self.at : self.at + 20] or "the end"
        return SchemaError(f"{expected} expected at character {self.at + 1}, not {found!r}")

    def _name(self) -> str:
        self._skip()
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise self.wrong("a field's name")
        self.at = found.end()
        return found[1].replace("``", "`") if found[1] else found[2]

    def _kind(self) -> Kind:
        self._skip()
        found = _PLAIN_NAME.match(self.text, self.at)
        if found is None:
            raise self.wrong("a type")
        name = _ALIASES.get(found[0].lower(), found[0].lower())
        if name not in _PYTHON and name not in ("array", "map", "struct"):
            raise self.wrong(f"a type ({', '.join(sorted(_PYTHON))}, array<...>, map<...>, struct<...>)")
        self.at = found.end()
        return Kind(name) if name in _PYTHON else self._compound(name)

    def _compound(self, name: str) -> Kind:
        self._depth += 1
        if self._depth > DEEPEST:
            raise SchemaError(f"more than {DEEPEST} nested types")
        self._demand("<")
        parts: tuple[Any, ...]
        if name == "struct":
            parts = tuple(self.fields(":"))
        elif name == "array":
            parts = (self._kind(),)
        else:
            key = self._kind()
            self._demand(",")
            parts = (key, self._kind())
            if key.name != "string":
                raise SchemaError(f"the keys of a map must be strings, not {key.ddl}")
        self._demand(">")
        self._depth -= 1
        return Kind(name, parts)

    def _demand(self, mark: str) -> None:
        self._skip()
        if not self._take(mark):
            raise self.wrong(mark)

    def _take(self, mark: str) -> bool:
        is_there = self.text.startswith(mark, self.at)
        self.at += is_there
        return is_there

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
