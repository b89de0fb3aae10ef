"""What a reader gets: a Record, or a Gap in its place. And how a value becomes bytes: the codecs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from enum import IntEnum
from typing import Any

import msgspec

from kvspool.errors import Undecodable, Unencodable


class Codec(IntEnum):
    """How the bytes of a value are to be understood; one byte of each frame."""

    RAW = 0
    TEXT = 1
    JSON = 2
    MSGPACK = 3
    PAD = 255  # no record: the frame fills the end of the ring


STRUCTURED = {"json": Codec.JSON, "msgpack": Codec.MSGPACK}
"""The codecs that a log can have for values that are neither bytes nor str."""

_ENCODE: dict[Codec, Callable[[Any], bytes]] = {
    Codec.JSON: msgspec.json.Encoder().encode,
    Codec.MSGPACK: msgspec.msgpack.Encoder().encode,
}
_DECODE: dict[int, Callable[[bytes], Any]] = {
    Codec.RAW: bytes,
    Codec.TEXT: bytes.decode,
    Codec.JSON: msgspec.json.Decoder().decode,
    Codec.MSGPACK: msgspec.msgpack.Decoder().decode,
}


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as it was appended.

    sequence: its number in the log; the first is 0, each next one is 1 more.
    timestamp: ns since the Unix epoch; never smaller than the one before it in the same log.
    type: the caller's number, 0..255.
    key: bytes, or None where none was given (an empty key is a key).
    value: the stored bytes; `data` decodes them.
    codec: how they are to be understood, a `Codec`.
    """

    sequence: int
    timestamp: int
    type: int
    key: bytes | None
    value: bytes
    codec: int = Codec.RAW

    @property
    def data(self) -> Any:
        """Return the value as it was appended: bytes, str, or what JSON or MessagePack makes of it.

        Raises Undecodable if the bytes are not what the codec says.
        """
        return decode(self.value, self.codec, self.sequence)

    @property
    def time(self) -> datetime:
        """Return the timestamp as an aware datetime in UTC, cut to microseconds."""
        seconds, rest = divmod(self.timestamp, 1_000_000_000)
        return datetime.fromtimestamp(seconds, timezone.utc).replace(microsecond=rest // 1000)


class Gap(msgspec.Struct, frozen=True, gc=False):
    """The records first..last (both included) that a reader can't get any more.

    reason: "overrun" (overwritten before they were read), "expired" (overwritten because a durable reader had not moved for the
    log's `reader_expiry`), "damaged" (their bytes don't match their checksums) or "machine restart" (numbers that were left
    out, because a crash of the machine may have taken their records).
    path: the directory of the log.
    """

    first: int
    last: int
    reason: str
    path: str = ""

    @property
    def count(self) -> int:
        """Return how many sequences are missing."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        if self.count == 1:
            return f"1 record lost ({self.reason}): sequence {self.first} of {self.path}"
        return f"{self.count} records lost ({self.reason}): sequences {self.first} to {self.last} of {self.path}"


def encode(value: Any, structured: Codec) -> tuple[bytes, Codec]:
    """Return the bytes of a value and their codec.

    bytes-like values are stored as they are, str as UTF-8, everything else by the log's `structured` codec: dict, list, numbers,
    None, dates, dataclasses, `msgspec.Struct`. Raises Unencodable for what that codec doesn't take.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), Codec.RAW
    try:
        if isinstance(value, str):
            return value.encode(), Codec.TEXT
        return _ENCODE[structured](value), structured
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Unencodable(f"{structured.name} can't hold this {type(value).__name__}: {error}") from error


def decode(value: bytes, codec: int, sequence: int) -> Any:
    """Return what the stored bytes mean; Undecodable if they are not what `codec` says."""
    try:
        return _DECODE[codec](value)
    except KeyError:
        raise Undecodable(f"record {sequence} has codec {codec}, which this version doesn't know") from None
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"record {sequence} isn't valid {Codec(codec).name}: {error}") from error
