"""The messages of Arrow Flight: the bytes are those of Flight's own classes and of protobuf, and hostile ones are refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import flight

from hub.errors import Malformed
from hub.server.flight import Action, Data, Endpoint, FlightDescriptor, Info, encode_action_type, encode_data, encode_result, only_bytes

BYTES, TEXT, NUMBER, INT64, MESSAGE = 12, 9, 14, 3, 11  # types of protobuf's fields
SHAPES: dict[str, list[tuple[str, int, int, str]]] = {
    "FlightDescriptor": [("type", 1, INT64, ""), ("cmd", 2, BYTES, ""), ("path", 3, TEXT, "repeated")],
    "FlightData": [
        ("flight_descriptor", 1, MESSAGE, "FlightDescriptor"),
        ("data_header", 2, BYTES, ""),
        ("app_metadata", 3, BYTES, ""),
        ("data_body", 1000, BYTES, ""),
    ],
    "Action": [("type", 1, TEXT, ""), ("body", 2, BYTES, "")],
    "ActionType": [("type", 1, TEXT, ""), ("description", 2, TEXT, "")],
    "Ticket": [("ticket", 1, BYTES, "")],
}


def generated() -> dict[str, Any]:
    """Return protobuf's own classes of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="flight_test.proto", package="test", syntax="proto3")
    for name, fields in SHAPES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, more in fields:
            label = 3 if more == "repeated" else 1
            of = f".test.{more}" if kind == MESSAGE else None
            message.field.add(name=field, number=number, type=kind, label=label, type_name=of)  # type: ignore[arg-type]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[attr-defined]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"test.{name}")) for name in SHAPES}


PROTOBUF = generated()
PARSERS: dict[str, Any] = {
    "FlightDescriptor": FlightDescriptor.parse,
    "FlightData": Data.parse,
    "Action": Action.parse,
    "Ticket": only_bytes,
}


def flight_s_own(message: Any) -> bytes:
    return bytes(message.serialize())


# Messages that the hub reads.


@pytest.mark.parametrize("path", [("JFK",), ("JFK", "3"), ("é",)], ids=str)
def test_a_descriptor_of_a_path_is_read_and_written(path: tuple[str, ...]) -> None:
    data = flight_s_own(flight.FlightDescriptor.for_path(*path))
    assert FlightDescriptor.parse(data) == FlightDescriptor(path=tuple(part.encode() for part in path))
    assert FlightDescriptor.parse(data).encode() == data


@pytest.mark.parametrize("command", [b"", b"query", b"x" * 300])
def test_a_descriptor_of_a_command_is_read_and_written(command: bytes) -> None:
    data = flight_s_own(flight.FlightDescriptor.for_command(command))
    assert FlightDescriptor.parse(data) == FlightDescriptor(command=command)
    assert FlightDescriptor.parse(data).encode() == data


def test_tickets_criteria_and_actions_are_read() -> None:
    assert only_bytes(flight_s_own(flight.Ticket(b"ticket"))) == b"ticket"
    assert only_bytes(b"") == b""
    assert Action.parse(flight_s_own(flight.Action("changes", b"{}"))) == Action("changes", b"{}")
    assert Action.parse(flight_s_own(flight.Action("é", b""))) == Action("é", b"")


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300))
def test_data_is_read_without_a_copy(header: bytes, metadata: bytes, body: bytes) -> None:
    sent = PROTOBUF["FlightData"](data_header=header, app_metadata=metadata, data_body=body).SerializeToString()
    assert encode_data(header, metadata, len(body)) + body == sent
    received = bytearray(sent)
    found = Data.parse(memoryview(received))
    assert (found.header, found.metadata, found.body) == (header, metadata, body)
    if body:
        received[-1] ^= 1
        assert found.body != body


def test_data_of_flight_s_own_client_is_read() -> None:
    inner = PROTOBUF["FlightDescriptor"](type=2, cmd=b"open")
    sent = PROTOBUF["FlightData"](flight_descriptor=inner, app_metadata=b"m").SerializeToString()
    assert FlightDescriptor.parse(Data.parse(sent).descriptor) == FlightDescriptor(command=b"open")


# Messages that the hub writes.


@pytest.mark.parametrize("size", [-1, 0, 1, 1 << 40])
@pytest.mark.parametrize("metadata", [b"", b"m" * 200])
def test_a_flight_is_written_as_flight_writes_it(size: int, metadata: bytes) -> None:
    schema = pa.schema([("a", pa.int8())])
    endpoints = [flight.FlightEndpoint(b"one", [], app_metadata=metadata), flight.FlightEndpoint(b"", [])]
    for chosen in ([], endpoints):
        wanted = flight.FlightInfo(schema, flight.FlightDescriptor.for_path("JFK"), chosen, size, size, app_metadata=metadata)
        ours = [Endpoint(b"one", metadata), Endpoint(b"")][: len(chosen)]
        data = Info(schema.serialize(), FlightDescriptor((b"JFK",)), ours, size, size, metadata).encode()
        assert data == flight_s_own(wanted)
        assert flight.FlightInfo.deserialize(data) == wanted


@pytest.mark.parametrize("body", [b"", b"answer", b"x" * 20_000])
def test_results_and_actions_are_written_as_flight_writes_them(body: bytes) -> None:
    assert encode_result(body) == flight_s_own(flight.Result(body))
    wanted = PROTOBUF["ActionType"](type="kind", description="what it does").SerializeToString()
    assert encode_action_type("kind", "what it does") == wanted


# Hostile bytes.

PIECES = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda number, kind, rest: bytes([number << 3 | kind]) + rest, st.integers(0, 15), st.integers(0, 7), st.binary(max_size=20)),
    st.builds(lambda number, text: bytes([number << 3 | 2, len(text)]) + text, st.integers(1, 4), st.binary(max_size=20)),
    st.sampled_from([b"\xc2\x3e\x03abc", b"\x08\x01", b"\x08\x02", b"\x1a\x01\xff", b"\x0d1234", b"\x0912345678", b"\x80" * 11]),
)


@pytest.mark.parametrize("name", PARSERS)
@given(parts=st.lists(PIECES, max_size=5))
@example(parts=[b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"])
def test_bytes_are_refused_if_protobuf_refuses_them_and_else_mean_the_same(name: str, parts: list[bytes]) -> None:
    data = b"".join(parts)
    try:
        found = PARSERS[name](data)
    except Malformed:
        return
    wanted = PROTOBUF[name]()
    try:
        wanted.ParseFromString(data)
    except DecodeError:
        inner = found.descriptor if name == "FlightData" else b""
        with pytest.raises(Malformed):  # only of what is parsed later
            FlightDescriptor.parse(inner)
        return
    if name == "FlightDescriptor":
        assert wanted.type in (1, 2)
        path = tuple(part.encode() for part in wanted.path)
        assert found == (FlightDescriptor(path) if wanted.type == 1 else FlightDescriptor(command=wanted.cmd))
    elif name == "FlightData":
        assert (found.header, found.metadata, found.body) == (wanted.data_header, wanted.app_metadata, wanted.data_body)
    elif name == "Action":
        assert found == (wanted.type, wanted.body)
    else:
        assert found == wanted.ticket


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # no size
        b"\x0a\x05abc",  # cut
        b"\x0b",  # a group
        b"\x02\x00",  # field 0
        b"\x08\x01",  # a number where bytes must be
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a size of 2^64 - 1
        b"\x80" * 10,
    ],
    ids=repr,
)
def test_a_broken_message_is_malformed(data: bytes) -> None:
    for parse in (only_bytes, Action.parse, Data.parse):
        with pytest.raises(Malformed):
            parse(data)


def test_a_descriptor_without_a_known_type_is_malformed() -> None:
    for data in (b"", b"\x08\x07", b"\x12\x01x", b"\x0a\x01x"):
        with pytest.raises(Malformed):
            FlightDescriptor.parse(data)
