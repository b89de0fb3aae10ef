"""The messages of Arrow Flight in protobuf's wire format, without generated code: see Flight.proto of Apache Arrow.

Received messages are untrusted: a message that protobuf would not parse raises Malformed. Unknown fields are skipped. The bytes of a parsed
message are views of the received memory, so that a batch is not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hub.errors import Malformed

SERVICE = "/arrow.flight.protocol.FlightService/"

Bytes = bytes | memoryview
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_PATH, _COMMAND = 1, 2  # types of a descriptor
_BODY = 1000  # field of the body of a FlightData, which is the last one of every implementation
_EMPTY = memoryview(b"")
_SMALL = [bytes((number,)) for number in range(0x80)]


class FlightDescriptor(NamedTuple):
    """The subject of a call: a path, or a command."""

    path: tuple[bytes, ...] = ()
    command: bytes = b""

    @classmethod
    def parse(cls, data: Bytes) -> FlightDescriptor:
        """Parse a FlightDescriptor. Raises Malformed, also for a descriptor of an unknown type."""
        kind, command, path = 0, b"", []
        for number, value in _fields(data):
            if number == 1:
                kind = _number(value)
            elif number == 2:
                command = bytes(_view(value))
            elif number == 3:
                path.append(_text(value).encode())
        if kind == _PATH:
            return cls(tuple(path))
        if kind == _COMMAND:
            return cls(command=command)
        raise Malformed(f"a descriptor of the unknown type {kind}")

    def encode(self) -> bytes:
        """Return the FlightDescriptor."""
        if self.path:
            return _encode_number(1, _PATH) + b"".join(_encode(3, part) for part in self.path)
        return _encode_number(1, _COMMAND) + _encode_some(2, self.command)


class Data(NamedTuple):
    """One message of a stream. header: a message of Arrow's IPC format, without its body; metadata: the application's."""

    descriptor: Bytes = b""
    header: Bytes = b""
    metadata: Bytes = b""
    body: memoryview = _EMPTY

    @classmethod
    def parse(cls, data: Bytes) -> Data:
        """Parse a FlightData. Raises Malformed."""
        found: dict[int, memoryview] = {}
        for number, value in _fields(data):
            if number in (1, 2, 3, _BODY):
                found[number] = _view(value)
        return cls(found.get(1, _EMPTY), found.get(2, _EMPTY), found.get(3, _EMPTY), found.get(_BODY, _EMPTY))


def encode_data(header: Bytes = b"", metadata: Bytes = b"", body: int = 0) -> bytes:
    """Return the beginning of a FlightData, after which its body follows, of `body` bytes."""
    start = _encode_some(2, header) + _encode_some(3, metadata)
    return start + _varint(_BODY << 3 | _LENGTH) + _varint(body) if body else start


class Action(NamedTuple):
    """A question about the hub as a whole."""

    kind: str = ""
    body: bytes = b""

    @classmethod
    def parse(cls, data: Bytes) -> Action:
        """Parse an Action. Raises Malformed."""
        kind, body = "", b""
        for number, value in _fields(data):
            if number == 1:
                kind = _text(value)
            elif number == 2:
                body = bytes(_view(value))
        return cls(kind, body)


class Endpoint(NamedTuple):
    """One part of a flight, to be read with a ticket from this server."""

    ticket: bytes
    metadata: bytes = b""

    def encode(self) -> bytes:
        """Return the FlightEndpoint. It has no location."""
        return _encode(1, _encode_some(1, self.ticket)) + _encode_some(4, self.metadata)


class Info(NamedTuple):
    """The description of a flight. schema: an encapsulated message of Arrow's IPC format."""

    schema: Bytes
    descriptor: FlightDescriptor
    endpoints: list[Endpoint]
    records: int
    size: int
    metadata: bytes

    def encode(self) -> bytes:
        """Return the FlightInfo."""
        return b"".join(
            (
                _encode_some(1, self.schema),
                _encode(2, self.descriptor.encode()),
                *(_encode(3, endpoint.encode()) for endpoint in self.endpoints),
                _encode_number(4, self.records),
                _encode_number(5, self.size),
                _encode_some(7, self.metadata),
            )
        )


def only_bytes(data: Bytes) -> bytes:
    """Return the only field of a message: of a Ticket, or of Criteria. Raises Malformed."""
    found = b""
    for number, value in _fields(data):
        if number == 1:
            found = bytes(_view(value))
    return found


def encode_result(body: bytes) -> bytes:
    """Return a Result, or a SchemaResult."""
    return _encode_some(1, body)


def encode_action_type(kind: str, description: str) -> bytes:
    """Return an ActionType."""
    return _encode_some(1, kind.encode()) + _encode_some(2, description.encode())


# The wire format.


def _fields(data: Bytes) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each field. Raises Malformed."""
    view, at = memoryview(data), 0
    while at < len(view):
        tag, at = _read_varint(view, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise Malformed(f"a field with the number {number}")
        if kind == _VARINT:
            value, at = _read_varint(view, at)
            yield number, value
            continue
        if kind == _LENGTH:
            size, at = _read_varint(view, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise Malformed(f"a field of the unknown wire type {kind}")
        if size > len(view) - at:
            raise Malformed(f"a field of {size} bytes, of which only {len(view) - at} were sent")
        if kind == _LENGTH:
            yield number, view[at : at + size]
        at += size


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return a number, and where the next one begins."""
    found = 0
    for place, byte in enumerate(view[at : at + 10]):
        found |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return found & (1 << 64) - 1, at + place + 1
    raise Malformed("a number that doesn't end")


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise Malformed("bytes where a number must be")
    return value


def _view(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise Malformed("a number where bytes must be")
    return value


def _text(value: int | memoryview) -> str:
    try:
        return str(_view(value), "utf-8")
    except UnicodeDecodeError:
        raise Malformed("a text that isn't UTF-8") from None


def _varint(number: int) -> bytes:
    if 0 <= number < 0x80:
        return _SMALL[number]
    found = bytearray()
    number &= (1 << 64) - 1
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _encode(number: int, value: Bytes) -> bytes:
    return b"".join((_varint(number << 3 | _LENGTH), _varint(len(value)), value))


def _encode_some(number: int, value: Bytes) -> bytes:
    """Return a field; nothing for an empty one, which is the default."""
    return _encode(number, value) if value else b""


def _encode_number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value) if value else b""
