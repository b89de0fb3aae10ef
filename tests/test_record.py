"""Records, gaps, and values as bytes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kvspool import Codec, Gap, Record, errors
from kvspool.record import decode, encode


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (1_700_000_000_123_456_789, datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)),
        (999_999_999, datetime(1970, 1, 1, 0, 0, 0, 999999, tzinfo=UTC)),
        (2**63 - 1, datetime(2262, 4, 11, 23, 47, 16, 854775, tzinfo=UTC)),
    ],
)
def test_the_time_is_utc_cut_to_microseconds(timestamp: int, expected: datetime) -> None:
    assert Record(0, timestamp, 0, None, b"").time == expected


def test_records_are_values() -> None:
    assert Record(1, 2, 3, b"k", b"v") == Record(1, 2, 3, b"k", b"v", 0)
    assert Record(1, 2, 3, None, b"v") != Record(1, 2, 3, b"", b"v")
    with pytest.raises(AttributeError):
        Record(1, 2, 3, None, b"v").sequence = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "codec", "data"),
    [
        (b"\xff", Codec.RAW, b"\xff"),
        ("grüße".encode(), Codec.TEXT, "grüße"),
        (b'{"a":[1,2.5,null]}', Codec.JSON, {"a": [1, 2.5, None]}),
        (b"\x81\xa1a\xc4\x01b", Codec.MSGPACK, {"a": b"b"}),
    ],
)
def test_data_is_what_the_codec_says(value: bytes, codec: Codec, data: Any) -> None:
    assert Record(0, 0, 0, None, value, codec).data == data


@pytest.mark.parametrize(
    ("value", "codec"),
    [
        (b"\xff", Codec.TEXT),
        (b"{", Codec.JSON),
        (b"", Codec.JSON),
        (b"[" * 100_000, Codec.JSON),
        (b"\xc1", Codec.MSGPACK),
        (b"", Codec.MSGPACK),
        (b"\x91" * 100_000, Codec.MSGPACK),
        (b"\xdd\xff\xff\xff\xff", Codec.MSGPACK),
    ],
)
def test_bytes_that_are_not_what_the_codec_says_are_undecodable_and_still_there(value: bytes, codec: Codec) -> None:
    record = Record(17, 0, 0, None, value, codec)
    with pytest.raises(errors.Undecodable, match=f"record 17 isn't valid {codec.name}"):
        record.data  # noqa: B018
    assert record.value == value


@pytest.mark.parametrize("codec", [4, 77, 255])
def test_an_unknown_codec_is_undecodable(codec: int) -> None:
    with pytest.raises(errors.Undecodable, match=f"record 3 has codec {codec}"):
        decode(b"", codec, 3)


@pytest.mark.parametrize("structured", [Codec.JSON, Codec.MSGPACK])
@pytest.mark.parametrize("value", [None, True, 0, -1, 2**63, 1.5, [], {}, {"a": [None, "b"]}, ["x"] * 1000])
def test_a_value_with_structure_comes_back(structured: Codec, value: Any) -> None:
    stored, codec = encode(value, structured)
    assert codec == structured
    assert decode(stored, codec, 0) == value


def test_a_gap_counts_both_its_ends() -> None:
    assert Gap(5, 5, "damaged").count == 1
    assert Gap(0, 2**32 - 1, "machine restart").count == 2**32
    assert str(Gap(5, 6, "damaged", "/a")) == "2 records lost (damaged): sequences 5 to 6 of /a"
