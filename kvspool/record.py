"""The items of a reader, Record and Gap, and the codecs that encode values as bytes."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvspool import keyed
from kvspool.errors import Undecodable, Unencodable
from kvspool.gap import Gap as Gap

T = TypeVar("T")
NO_TIME = -(1 << 63)  # the timestamp of a record that has no time, in a journal of the format sej


class Codec(IntEnum):
    """The encoding of a value's bytes; one byte of each frame."""

    RAW = 0
    TEXT = 1
    JSON = 2
    MSGPACK = 3
    KEYED = 4  # MessagePack with its log's key table; see `keyed`
    PAD = 255  # no record: the frame fills the end of the ring


def codec_name(codec: int) -> str | int:
    """Return the name of a codec, as in JSON; the number of an unknown one."""
    try:
        return Codec(codec).name.lower()
    except ValueError:
        return codec


STRUCTURED = {"json": Codec.JSON, "msgpack": Codec.MSGPACK, "keyed": Codec.KEYED}
"""The codecs that a log can have for values that are neither bytes nor str."""
PORTABLE = {codec.name.lower(): codec for codec in (Codec.RAW, Codec.TEXT, Codec.JSON, Codec.MSGPACK)}
"""The codecs whose values mean the same in every log. Those of KEYED belong to the key table of one log."""

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


class _OfALog(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The fields after those of every record, also of subclasses."""

    key_table: keyed.Keys | msgspec.UnsetType = msgspec.UNSET


class Record(_OfALog, frozen=True, gc=False):
    """One record as it was appended.

    sequence: its number in the log; the first is 0, each next one is 1 more. timestamp: ns since the Unix epoch; never smaller than that of
    the previous record of the log. type: the caller's number, 0..255. key: bytes, or None if none was given (an empty key is a key). value:
    the stored bytes; `data` decodes them. codec: their encoding, a `Codec`. key_table: resolves the keys of keyed values, in records of a
    log with a key table. Comparisons ignore it, and a pickled record includes a copy.
    """

    sequence: int
    timestamp: int
    type: int
    key: bytes | None
    value: bytes
    codec: int = Codec.RAW

    @property
    def data(self) -> Any:
        """Return the appended value: bytes, str, or the decoded JSON or MessagePack.

        Raises Undecodable if the bytes don't match the codec.
        """
        return decode(self.value, self.codec, self.sequence, self.key_table)

    def decode(self, type: builtins.type[T]) -> T:
        """Return the value as a `type`: a `msgspec.Struct`, a dataclass, `dict[str, int]`, or any type that msgspec supports.

        Raises Undecodable if the bytes don't match the codec, or the value is of another type.
        """
        return decode_as(self.value, self.codec, self.sequence, self.key_table, type)

    @property
    def time(self) -> datetime:
        """Return the timestamp as an aware datetime in UTC, cut to microseconds; for a record without a time, the earliest datetime."""
        if self.timestamp == NO_TIME:
            return datetime.min.replace(tzinfo=UTC)
        seconds, rest = divmod(self.timestamp, 1_000_000_000)
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000)


def listed(many: Iterable[T], what: str = "values") -> list[T]:
    """Return values or keys to append as a list that the caller owns. Raises TypeError for a single str or bytes."""
    if isinstance(many, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{what} are an iterable with one for each record, not one {many.__class__.__name__}")
    return list(many)


def encode_keys(keys: list[Any] | None) -> list[Any] | None:
    """Return keys as they are stored; see `encode_key`."""
    return None if keys is None else [encode_key(key) for key in keys]


def encode_key(key: Any) -> Any:
    """Return a key as it is stored: UTF-8 of a str; anything else unchanged, to be checked later. Raises Unencodable for lone
    surrogates.
    """
    if not isinstance(key, str):
        return key
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise Unencodable(f"a key is bytes, or a str that UTF-8 can encode: {error}") from error


def check_codec(codec: int) -> int:
    """Return the codec of values that are appended as they are. Raises ValueError for an unknown one, and for KEYED."""
    if codec == Codec.KEYED:
        raise ValueError("keyed values belong to the log whose key table they name; append them decoded, or as MessagePack")
    if codec not in PORTABLE.values():
        raise ValueError(f"codec is one of kvspool.Codec, and not PAD, not {codec!r}")
    return codec


def encode(value: Any, structured: Codec, pack: Callable[[Any], bytes] | None = None) -> tuple[bytes, Codec]:
    """Return the bytes of a value and their codec.

    bytes-like values are stored as they are, str as UTF-8, everything else by the log's `structured` codec: dict, list, numbers, None,
    dates, dataclasses, `msgspec.Struct`; `pack` is the log's own encoder. Raises Unencodable for values that the codec doesn't take.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), Codec.RAW
    try:
        if isinstance(value, str):
            return value.encode(), Codec.TEXT
        return (pack or _ENCODE[structured])(value), structured
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Unencodable(f"{structured.name} can't encode this {type(value).__name__}: {error}") from error


def decode(value: bytes, codec: int, sequence: int | None, keys: keyed.Keys | msgspec.UnsetType = msgspec.UNSET) -> Any:
    """Decode the stored bytes. Raises Undecodable if they don't match `codec`. `keys` is the log's key table, if it has one."""
    return _decoded(value, codec, sequence, keys, _DECODE.get(codec))


def decode_as(value: bytes, codec: int, sequence: int | None, keys: keyed.Keys | msgspec.UnsetType, type: type[T]) -> T:
    """Decode the stored bytes as a `type`; see `decode`. Raises Undecodable if they are of another type."""
    if codec == Codec.JSON:
        return _decoded(value, codec, sequence, keys, partial(msgspec.json.decode, type=type))  # type: ignore[no-any-return]
    if codec == Codec.MSGPACK:
        return _decoded(value, codec, sequence, keys, partial(msgspec.msgpack.decode, type=type))  # type: ignore[no-any-return]
    data = decode(value, codec, sequence, keys)
    if codec == Codec.KEYED:
        # MessagePack again, so that msgspec converts types as for that codec.
        data = _ENCODE[Codec.MSGPACK](data)
        return _decoded(data, codec, sequence, keys, partial(msgspec.msgpack.decode, type=type))  # type: ignore[no-any-return]
    return _decoded(data, codec, sequence, keys, partial(msgspec.convert, type=type))  # type: ignore[no-any-return]


def plain(record: Record) -> bytes:
    """Return the bytes of a value without the log's key table: MessagePack where it was keyed."""
    return _ENCODE[Codec.MSGPACK](record.data) if record.codec == Codec.KEYED else record.value


def _decoded(
    value: Any, codec: int, sequence: int | None, keys: keyed.Keys | msgspec.UnsetType, understand: Callable[[Any], Any] | None
) -> Any:
    what = "the value" if sequence is None else f"record {sequence}"
    if understand is None and (codec != Codec.KEYED or not isinstance(keys, keyed.Keys)):
        raise Undecodable(f"{what} has codec {codec}, which this version or this log doesn't support")
    try:
        return keyed.unpack(value, keys) if understand is None else understand(value)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise Undecodable(f"{what} is of another type: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"{what} isn't valid {Codec(codec).name}: {error}") from error
