"""The messages between a shipper and a hub, over one Arrow Flight `DoExchange`; docs/formats/hub.md describes the protocol.

Every message is MessagePack in the `app_metadata` of a Flight message: the client's with a record batch or alone, the hub's always alone.
Received data is untrusted until it was decoded into one of these types and checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from hub.client_ids import check_client
from hub.errors import (
    Conflict,
    Fenced,
    HubError,
    HubFull,
    Malformed,
    NotAllowed,
    NotFound,
    QuotaExceeded,
    Restored,
    ShardDamaged,
    Unexpected,
)

VERSION = 1
LARGEST_MESSAGE = 1 << 20  # bytes of one of these
MOST_ROWS = 1 << 20  # of a batch
BATCH_BYTES = 2 << 20  # target size of a shipper's batches
LARGEST_BATCH = 64 << 20  # largest batch that a hub accepts; one record may be that large
LAST = (1 << 63) - 1  # no sequence reaches it
MOST_BITS, MOST_SHARDS = 10, 1024
LONGEST_RETRY = 3600.0  # longest delay that a hub can ask for, in seconds
_LONGEST_TEXT = 1000  # characters of a hub's message that are sent, and shown
LONGEST_ECHO = 200  # characters of an error about a message, which may repeat parts of it

Level = Literal["process", "disk"]
"""Durability of an acknowledged record: it survives a crash of the hub's process, or of its machine."""

M = TypeVar("M")


class ShippedLog(msgspec.Struct, frozen=True, array_like=True):
    """One log to ship. index: its shard; id: 16 unique bytes; end: the sequence of its next record."""

    index: int
    id: bytes
    end: int


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The command of the call's descriptor. bits: the client has 2^bits shards; logs: those shipped in this call."""

    version: int
    client: str
    bits: int
    logs: list[ShippedLog]


class Put(msgspec.Struct, frozen=True, tag="put", array_like=True):
    """Sent with a record batch: it has the records from `first` on, without a gap.

    after: the sequences from `after` up to `first` are lost forever; equal to `first` if none is. ask: acknowledge all batches so far. end:
    the sequence of the log's next record. elsewhere: another hub has the sequences below it, so this hub doesn't count them as lost.
    """

    index: int
    first: int
    after: int
    end: int
    ask: bool
    elsewhere: int = 0


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Asks for an acknowledgement. ends: the next sequence of each log, by shard."""

    ends: dict[int, int]


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The client ends the call in order: a call that ends without this was broken."""


class ResumePoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a shard continues. next: the sequence that the hub expects; is_known: whether it has seen this log before; time: timestamp of
    the last record that it has of this log, 0 for none.
    """

    index: int
    next: int
    is_known: bool
    time: int = 0


class Opened(msgspec.Struct, frozen=True, tag="opened", array_like=True):
    """The hub's first message. level: durability of acknowledged records; batch_bytes: largest accepted batch."""

    version: int
    level: Level
    batch_bytes: int
    places: list[ResumePoint]


class Acknowledged(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """Every record of shard `index` below `next` is stored, for each pair. asked: how many questions of the client are answered."""

    places: list[tuple[int, int]]
    asked: int


Reason = Literal["malformed", "not-allowed", "full", "quota", "conflict", "fenced", "restored", "unexpected", "damaged", "not-found"]


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """A batch of a shard was not stored, nor will be later ones in this call. index -1: the whole call.

    expected: the next sequence, for "unexpected". retry_after: seconds; 0: a retry is useless.
    """

    reason: Reason
    message: str
    index: int = -1
    expected: int = -1
    retry_after: float = 0.0


FromClient = Put | Ping | Done
FromHub = Opened | Acknowledged | Refused

_REASONS: dict[Reason, type[HubError]] = {
    "malformed": Malformed,
    "not-allowed": NotAllowed,
    "full": HubFull,
    "quota": QuotaExceeded,
    "conflict": Conflict,
    "fenced": Fenced,
    "restored": Restored,
    "unexpected": Unexpected,
    "damaged": ShardDamaged,
    "not-found": NotFound,
}
_NAMES = {kind: reason for reason, kind in _REASONS.items()}
_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(FromClient)
_from_hub = msgspec.msgpack.Decoder(FromHub)
_opening = msgspec.msgpack.Decoder(Opening)


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode_opening(data: bytes) -> Opening:
    """Return the first message of a client. Raises Malformed."""
    opening = _decode(_opening, data)
    if opening.version != VERSION:
        raise Malformed(f"version {opening.version} of the protocol; this hub speaks version {VERSION}")
    try:
        check_client(opening.client)
    except ValueError as error:
        raise Malformed(str(error)) from None
    if not 0 <= opening.bits <= MOST_BITS:
        raise Malformed(f"{opening.bits} bits: a client must have 1 to {MOST_SHARDS} shards")
    _check_indexes([log.index for log in opening.logs])
    if not opening.logs:
        raise Malformed("an opening must name at least one log")
    for log in opening.logs:
        if log.index >= 1 << opening.bits or len(log.id) != 16:
            raise Malformed(f"an impossible log: shard {log.index} of {opening.bits} bits, an id of {len(log.id)} bytes")
        _check_sequence(log.end)
    return opening


def decode_from_client(data: bytes) -> FromClient:
    """Return a message of a client. Raises Malformed."""
    message: FromClient = _decode(_from_client, data)
    if isinstance(message, Put):
        _check_indexes([message.index])
        for sequence in (message.after, message.first, message.end, message.elsewhere):
            _check_sequence(sequence)
        if message.after > message.first:
            raise Malformed(f"a batch from sequence {message.first} on, lost from {message.after} on")
    elif isinstance(message, Ping):
        _check_indexes(message.ends)
        for sequence in message.ends.values():
            _check_sequence(sequence)
    return message


def decode_from_hub(data: bytes) -> FromHub:
    """Return a message of a hub. Raises Malformed."""
    message: FromHub = _decode(_from_hub, data)
    if isinstance(message, Opened):
        _check_indexes([place.index for place in message.places])
        for place in message.places:
            _check_sequence(place.next)
            _check_sequence(place.time)
        if message.version != VERSION or message.batch_bytes < 1:
            raise Malformed(f"a hub that speaks version {message.version} of the protocol, not {VERSION}, or accepts no batch")
    elif isinstance(message, Acknowledged):
        _check_indexes([index for index, _ in message.places])
        for _, sequence in message.places:
            _check_sequence(sequence)
    elif not -1 <= message.index < MOST_SHARDS or not math.isfinite(message.retry_after):
        raise Malformed(f"a refusal of shard {message.index}, for {message.retry_after} s")
    return message


def _check_indexes(indexes: Iterable[int]) -> None:
    """Raise Malformed unless these are distinct shards."""
    indexes = list(indexes)
    if len(set(indexes)) < len(indexes) or not all(0 <= index < MOST_SHARDS for index in indexes):
        raise Malformed(f"shards must be numbers from 0 to {MOST_SHARDS - 1}, each once")


def _check_sequence(sequence: int) -> None:
    if not 0 <= sequence <= LAST:
        raise Malformed(f"an impossible sequence: {sequence}")


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    if len(data) > LARGEST_MESSAGE:
        raise Malformed(f"a message of {len(data)} bytes; the limit is {LARGEST_MESSAGE}")
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, and so is text that isn't UTF-8
        raise Malformed(f"not a message of this protocol: {str(error)[:LONGEST_ECHO]}") from None


def refusal(error: HubError, index: int = -1) -> Refused:
    """Return the message for an error."""
    expected = error.expected if isinstance(error, Unexpected) else -1
    return Refused(_NAMES[type(error)], str(error)[:_LONGEST_TEXT], index, expected, error.retry_after or 0.0)


def error_of(refused: Refused) -> HubError:
    """Return the error in a message."""
    kind = _REASONS[refused.reason]
    message = "".join(character if character.isprintable() else "?" for character in refused.message[:_LONGEST_TEXT])
    if kind is Unexpected:
        return Unexpected(message, refused.expected)
    error = kind(message)
    error.retry_after = min(refused.retry_after, LONGEST_RETRY) if refused.retry_after > 0 else None
    return error
