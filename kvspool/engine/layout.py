"""Declare a binary record once: names, types, codes and meanings in one place.

    class Point(NamedTuple):
        x: Annotated[int, "I", "east of the origin, mm"]
        y: Annotated[int, "I", "north of the origin, mm"]

    POINT = Layout(Point)
    POINT.pack(Point(1, 2)); POINT.unpack(data, at=64).x; POINT.offset("y")

The format pages contain these tables (`Layout.table`), and a test compares the two, so they stay equal.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

T = TypeVar("T", bound=tuple[Any, ...])


class Field(NamedTuple):
    """One field of a layout: its offset, size, struct code, name and meaning."""

    offset: int
    size: int
    code: str
    name: str
    meaning: str


class Layout(Generic[T]):
    """The byte layout of a NamedTuple whose fields are `Annotated[type, struct code, meaning]`."""

    def __init__(self, record: type[T], order: str = "<") -> None:
        """Compile the declaration; `order` is the byte order in the notation of `struct`, without padding."""
        self.record = record
        self.fields: list[Field] = []
        hints = get_type_hints(record, include_extras=True)
        codes = order
        for name in record._fields:  # type: ignore[attr-defined]
            code, meaning = hints[name].__metadata__
            size = struct.calcsize(order + code)
            self.fields.append(Field(struct.calcsize(codes), size, code, name, meaning))
            codes += code
        self._struct = struct.Struct(codes)
        self.size = self._struct.size

    def pack(self, record: T) -> bytes:
        """Return the bytes of a record; struct.error if a field doesn't fit."""
        return self._struct.pack(*record)

    def unpack(self, data: bytes | memoryview, at: int = 0) -> T:
        """Return the record at offset `at`; struct.error if it exceeds `data`."""
        return self.record(*self._struct.unpack_from(data, at))

    def offset(self, name: str) -> int:
        """Return the offset of a field in bytes."""
        return next(field.offset for field in self.fields if field.name == name)

    def table(self) -> str:
        """Return the layout as a Markdown table: at, size, field, meaning."""
        rows = [f"| {field.offset} | {field.size} | {field.name} | {field.meaning} |" for field in self.fields]
        return "\n".join(["| at | size | field | meaning |", "|---|---|---|---|", *rows])
