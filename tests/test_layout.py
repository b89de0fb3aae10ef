"""Records declared once, and their bytes."""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

import pytest

from kvspool.engine.layout import Layout


class Sample(NamedTuple):
    """One of each kind of field."""

    magic: Annotated[bytes, "4s", "what it is"]
    small: Annotated[int, "B", "a byte"]
    signed: Annotated[int, "q", "a word at an odd offset"]
    rest: Annotated[bytes, "3s", ""]


def test_fields_stand_one_after_the_other_without_padding() -> None:
    layout = Layout(Sample)
    assert layout.size == 16
    assert [(field.name, field.offset, field.size, field.code) for field in layout.fields] == [
        ("magic", 0, 4, "4s"),
        ("small", 4, 1, "B"),
        ("signed", 5, 8, "q"),
        ("rest", 13, 3, "3s"),
    ]
    assert [layout.offset(name) for name in Sample._fields] == [0, 4, 5, 13]


def test_pack_and_unpack_are_each_others_opposite() -> None:
    layout = Layout(Sample)
    sample = Sample(b"KVSP", 255, -2, b"xyz")
    data = layout.pack(sample)
    assert data == b"KVSP\xff\xfe\xff\xff\xff\xff\xff\xff\xffxyz"
    assert layout.unpack(data) == sample
    assert layout.unpack(memoryview(b"??" + data), at=2) == sample
    assert isinstance(layout.unpack(data), Sample)


def test_the_byte_order_can_be_chosen() -> None:
    assert Layout(Sample, ">").pack(Sample(b"", 0, 1, b""))[5:13] == bytes(7) + b"\1"


def test_what_does_not_fit_is_an_error() -> None:
    layout = Layout(Sample)
    with pytest.raises(struct.error):
        layout.pack(Sample(b"", 256, 0, b""))
    with pytest.raises(struct.error):
        layout.unpack(bytes(15))
    with pytest.raises(struct.error):
        layout.unpack(bytes(20), at=5)
    with pytest.raises(StopIteration):
        layout.offset("missing")


def test_the_table_is_markdown() -> None:
    assert Layout(Sample).table().splitlines() == [
        "| at | size | field | meaning |",
        "|---|---|---|---|",
        "| 0 | 4 | magic | what it is |",
        "| 4 | 1 | small | a byte |",
        "| 5 | 8 | signed | a word at an odd offset |",
        "| 13 | 3 | rest |  |",
    ]
