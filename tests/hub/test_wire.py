"""The messages: what is encoded comes back, and nothing else gets in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hub.errors import Conflict, HubError, HubFull, Malformed, QuotaExceeded, Unexpected
from hub.protocol import ingest
from hub.protocol.ingest import Acknowledged, Done, Opened, Opening, Ping, Put, Refused, ResumePoint, ShippedLog

SEQUENCES = st.integers(0, ingest.LAST)
INDEXES = st.integers(0, ingest.MOST_SHARDS - 1)
FROM_CLIENT: list[Any] = [Put(3, 10, 8, 20, True), Ping({0: 5, 1023: ingest.LAST}), Done()]
FROM_HUB: list[Any] = [
    Opened(ingest.VERSION, "disk", 1 << 20, [ResumePoint(0, 7, True), ResumePoint(5, 0, False)]),
    Acknowledged([(0, 7), (1, 9)], 3),
    Refused("unexpected", "why", 2, 17, 0.5),
]
OPENING = Opening(ingest.VERSION, "JFK", 1, [ShippedLog(0, b"a" * 16, 5), ShippedLog(1, b"b" * 16, 0)])


def test_what_is_encoded_comes_back() -> None:
    assert ingest.decode_opening(ingest.encode(OPENING)) == OPENING
    assert [ingest.decode_from_client(ingest.encode(message)) for message in FROM_CLIENT] == FROM_CLIENT
    assert [ingest.decode_from_hub(ingest.encode(message)) for message in FROM_HUB] == FROM_HUB


@given(INDEXES, SEQUENCES, SEQUENCES, SEQUENCES, st.booleans())
def test_every_put_that_can_be_comes_back(index: int, one: int, other: int, end: int, ask: bool) -> None:
    put = Put(index, max(one, other), min(one, other), end, ask)
    assert ingest.decode_from_client(ingest.encode(put)) == put


@pytest.mark.parametrize(
    "opening",
    [
        msgspec.structs.replace(OPENING, version=2),
        msgspec.structs.replace(OPENING, client=""),
        msgspec.structs.replace(OPENING, client="../other"),
        msgspec.structs.replace(OPENING, client="a/b"),
        msgspec.structs.replace(OPENING, client="a" * 101),
        msgspec.structs.replace(OPENING, bits=-1),
        msgspec.structs.replace(OPENING, bits=11),
        msgspec.structs.replace(OPENING, bits=1 << 62),
        msgspec.structs.replace(OPENING, logs=[]),
        msgspec.structs.replace(OPENING, logs=[OPENING.logs[0]] * 2),
        msgspec.structs.replace(OPENING, logs=[ShippedLog(2, b"a" * 16, 0)]),
        msgspec.structs.replace(OPENING, logs=[ShippedLog(-1, b"a" * 16, 0)]),
        msgspec.structs.replace(OPENING, logs=[ShippedLog(0, b"a" * 15, 0)]),
        msgspec.structs.replace(OPENING, logs=[ShippedLog(0, b"a" * 16, -1)]),
        msgspec.structs.replace(OPENING, logs=[ShippedLog(0, b"a" * 16, 1 << 63)]),
    ],
    ids=lambda opening: str(opening)[:60],
)
def test_an_opening_that_can_not_be_is_refused(opening: Opening) -> None:
    with pytest.raises(Malformed):
        ingest.decode_opening(ingest.encode(opening))


@pytest.mark.parametrize(
    "message",
    [
        Put(-1, 0, 0, 0, False),
        Put(1024, 0, 0, 0, False),
        Put(0, -1, -1, 0, False),
        Put(0, 5, 6, 7, False),
        Put(0, 1 << 63, 0, 0, False),
        Put(0, 0, 0, 1 << 63, False),
        Ping({-1: 0}),
        Ping({1024: 0}),
        Ping({0: -1}),
        FROM_HUB[1],
    ],
    ids=repr,
)
def test_a_message_that_no_client_sends_is_refused(message: Any) -> None:
    with pytest.raises(Malformed):
        ingest.decode_from_client(ingest.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        Opened(2, "disk", 1, []),
        Opened(1, "disk", 0, []),
        Opened(1, "memory", 1, []),  # type: ignore[arg-type]
        Opened(1, "disk", 1, [ResumePoint(-1, 0, True)]),
        Opened(1, "disk", 1, [ResumePoint(0, -1, True)]),
        Opened(1, "disk", 1, [ResumePoint(0, 0, True), ResumePoint(0, 1, True)]),
        Acknowledged([(1024, 0)], 0),
        Acknowledged([(0, 1 << 63)], 0),
        Acknowledged([(0, 1), (0, 2)], 0),
        Refused("nothing", "why"),  # type: ignore[arg-type]
        Refused("full", "why", -2),
        Refused("full", "why", 1024),
        Refused("full", "why", 0, 0, float("nan")),
        Refused("full", "why", 0, 0, float("inf")),
        Done(),
    ],
    ids=repr,
)
def test_a_message_that_no_hub_sends_is_refused(message: Any) -> None:
    with pytest.raises(Malformed):
        ingest.decode_from_hub(ingest.encode(message))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x91" * 200)
@example(b"\xdd\xff\xff\xff\xff")
def test_hostile_bytes_are_no_message(data: bytes) -> None:
    for decode in (ingest.decode_opening, ingest.decode_from_client, ingest.decode_from_hub):
        with pytest.raises(Malformed):
            decode(data)


@given(st.sampled_from([OPENING, *FROM_CLIENT, *FROM_HUB]), st.data())
def test_a_message_with_a_wrong_byte_is_one_that_was_checked_or_none(message: Any, data: st.DataObject) -> None:
    encoded = bytearray(ingest.encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    for decode in (ingest.decode_opening, ingest.decode_from_client, ingest.decode_from_hub):
        try:
            found = decode(bytes(encoded))
        except Malformed:
            continue
        assert decode(ingest.encode(found)) == found


def test_a_message_that_is_too_large_is_not_decoded() -> None:
    with pytest.raises(Malformed, match="the limit is"):
        ingest.decode_from_hub(bytes(ingest.LARGEST_MESSAGE + 1))


@pytest.mark.parametrize("kind", ingest._REASONS.values())
def test_each_error_comes_over_the_wire(kind: type[HubError]) -> None:
    error = Unexpected("why", 12) if kind is Unexpected else kind("why")
    if isinstance(error, HubFull | QuotaExceeded):
        error.retry_after = 7.0
    refused = ingest.decode_from_hub(ingest.encode(ingest.refusal(error, 5)))
    assert isinstance(refused, Refused) and refused.index == 5
    found = ingest.error_of(refused)
    assert type(found) is kind and str(found) == "why"
    assert getattr(found, "expected", None) == getattr(error, "expected", None)
    assert getattr(found, "retry_after", None) == getattr(error, "retry_after", None)


def test_a_hub_can_neither_make_a_client_wait_forever_nor_write_on_its_terminal() -> None:
    found = ingest.error_of(Refused("full", "\x1b[2J" + "x" * 5000, retry_after=1e300))
    assert isinstance(found, HubFull) and found.retry_after == ingest.LONGEST_RETRY
    assert str(found).startswith("?[2J") and len(str(found)) <= 1000
    assert isinstance(ingest.error_of(Refused("conflict", "x")), Conflict)
