"""What a shipper and a hub say to each other, over one Arrow Flight `DoExchange`; the protocol is described in docs/formats/hub.md.

Every message is MessagePack in the `app_metadata` of a Flight message: the client's beside a record batch or alone, the hub's always alone.
Nothing that comes over the wire is believed before it was decoded into one of these and checked.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

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
BATCH_BYTES = 1 << 20  # that a shipper aims at
LARGEST_BATCH = 64 << 20  # bytes of a batch that a hub takes; one record may be that large
LAST = (1 << 63) - 1  # no sequence reaches it

Level = Literal["process", "disk"]
"""What an acknowledged record survives: the death of the hub's process, or that of its machine."""

M = TypeVar("M")


class Log(msgspec.Struct, frozen=True, array_like=True):
    """One log that is to be shipped. index: its shard; id: 16 bytes that no other log has; end: the sequence that its next record gets."""

    index: int
    id: bytes
    end: int


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The command of the call's descriptor. bits: the client has 2^bits shards; logs: those that come in this call."""

    version: int
    client: str
    bits: int
    logs: list[Log]


class Put(msgspec.Struct, frozen=True, tag="put", array_like=True):
    """Beside a record batch: it holds the records from `first` on, without a gap.

    after: the sequences from `after` up to `first` are lost for ever; equal to `first` if none is. ask: acknowledge all that came so far.
    end: the sequence that the log's next record gets.
    """

    index: int
    first: int
    after: int
    end: int
    ask: bool


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Answer with what is stored. ends: the next sequence of each log, by shard."""

    ends: dict[int, int]


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """The client ends the call on purpose: one that ends without this was cut."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a shard goes on. next: the sequence that the hub expects; is_known: whether it has seen this log before."""

    index: int
    next: int
    is_known: bool


class Opened(msgspec.Struct, frozen=True, tag="opened", array_like=True):
    """The hub's first word. level: what an acknowledgement means; batch_bytes: of the largest batch that it takes."""

    version: int
    level: Level
    batch_bytes: int
    places: list[Place]


class Stored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """Every record of shard `index` below `next` is stored, for each pair. asked: how many times the client had asked by then."""

    places: list[tuple[int, int]]
    asked: int


Reason = Literal["malformed", "not-allowed", "full", "quota", "conflict", "fenced", "restored", "unexpected", "damaged", "not-found"]


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """What came for a shard was not stored, nor will be what comes for it in this call. index -1: the call as a whole.

    expected: the sequence that comes next, for "unexpected". retry_after: seconds; 0: trying again is of no use.
    """

    reason: Reason
    message: str
    index: int = -1
    expected: int = -1
    retry_after: float = 0.0


FromClient = Put | Ping | Done
FromHub = Opened | Stored | Refused

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
    """Return the first word of a client. Raises Malformed."""
    opening = _decode(_opening, data)
    if opening.version != VERSION:
        raise Malformed(f"version {opening.version} of the protocol; this hub speaks version {VERSION}")
    if not 0 < len(opening.logs) <= 1024 or len({log.index for log in opening.logs}) < len(opening.logs):
        raise Malformed("an opening names 1 to 1024 logs, each of another shard")
    for log in opening.logs:
        if not 0 <= log.index < 1 << opening.bits <= 1024 or len(log.id) != 16 or not 0 <= log.end < LAST:
            raise Malformed(f"no log that can be: shard {log.index} of {opening.bits} bits, an id of {len(log.id)} bytes, end {log.end}")
    return opening


def decode_from_client(data: bytes) -> FromClient:
    """Return a message of a client. Raises Malformed."""
    message: FromClient = _decode(_from_client, data)
    if isinstance(message, Put) and not 0 <= message.after <= message.first < LAST:
        raise Malformed(f"a batch from sequence {message.first} on, lost from {message.after} on")
    return message


def decode_from_hub(data: bytes) -> FromHub:
    """Return a message of a hub. Raises Malformed."""
    message: FromHub = _decode(_from_hub, data)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    if len(data) > LARGEST_MESSAGE:
        raise Malformed(f"a message of {len(data)} bytes; at most {LARGEST_MESSAGE} are possible")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"no message of this protocol: {error}") from None


def refusal(error: HubError, index: int = -1) -> Refused:
    """Return how a hub says this error to a client."""
    expected = error.expected if isinstance(error, Unexpected) else -1
    return Refused(_NAMES[type(error)], str(error), index, expected, error.retry_after or 0.0)


def error_of(refused: Refused) -> HubError:
    """Return the error that a hub spoke of."""
    kind = _REASONS[refused.reason]
    if kind is Unexpected:
        return Unexpected(refused.message, refused.expected)
    error = kind(refused.message)
    error.retry_after = refused.retry_after or None
    return error
