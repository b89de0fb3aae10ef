"""A client of HTTP/2 that does what no library of gRPC lets one do: calls without messages, in bursts, and answers that stay unread."""

from __future__ import annotations

import socket
import struct
from typing import Self

HEADERS, DATA, SETTINGS = 1, 0, 4
END_STREAM, END_HEADERS = 1, 4
_FIRST_ENTRY = 62  # of the table that grows with each header that was sent
SERVICE = "/arrow.flight.protocol.FlightService/"


class RawClient:
    """One connection, over which nothing is read but by `ask`."""

    def __init__(self, location: str, token: str = "") -> None:
        host, _, port = location.partition("//")[2].rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._answers = self._socket.makefile("rb")
        self._token = token
        self._stream = 1
        self._method = ""  # the first one: its headers are in the table of both ends
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, b""))

    def begin(self, method: str, count: int) -> None:
        """Begin calls of a method, all at once, by their headers alone: 15 bytes for each."""
        self._socket.sendall(b"".join(self._headers(method) for _ in range(count)))

    def call(self, method: str, message: bytes, count: int) -> None:
        """Make calls with one message."""
        data = struct.pack(">BI", 0, len(message)) + message
        for _ in range(count):
            stream = self._stream
            self._socket.sendall(self._headers(method) + _frame(DATA, END_STREAM, stream, data))

    def ask(self, method: str, message: bytes) -> None:
        """Make a call with one message, and read until something comes of it: calls that were begun before it have begun at the hub."""
        stream = self._stream
        self.call(method, message, 1)
        while True:
            head = self._answers.read(9)
            if len(head) < 9:
                raise ConnectionResetError("the hub has ended the connection")
            self._answers.read(int.from_bytes(head[:3], "big"))
            if int.from_bytes(head[5:], "big") == stream:
                return

    def _headers(self, method: str) -> bytes:
        stream, self._stream = self._stream, self._stream + 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": SERVICE + method,
            ":authority": "hub",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        if method != self._method:
            kind = b"\x00" if self._method else b"\x40"  # only the headers of the first method go into the table
            self._method = self._method or method
            return _frame(HEADERS, END_HEADERS, stream, b"".join(kind + _text(name) + _text(value) for name, value in headers.items()))
        return _frame(HEADERS, END_HEADERS, stream, bytes(0x80 | (_FIRST_ENTRY + at) for at in reversed(range(len(headers)))))

    def close(self) -> None:
        """End the connection."""
        self._answers.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ticket(content: bytes) -> bytes:
    """Return the message that asks DoGet for the records that a ticket names."""
    assert len(content) < 128
    return b"\x0a" + bytes([len(content)]) + content


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
