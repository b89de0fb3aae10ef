"""A service that answers each call as its method says, and a listener with it; and a client of raw frames. No gRPC, no Flight."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from hub.server.call import Call, Code, Status
from hub.server.limits import Address, Limits, Reason
from hub.server.listener import Listener
from kvspool import system

GUARD = 60.0  # seconds after which a test hangs
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class EchoService:
    """`begun`, `blocked`, `cancelled` and `ended` count handlers. Calls with a header "token: wrong" are not admitted."""

    def __init__(self) -> None:
        self.begun = self.blocked = self.cancelled = self.ended = 0
        self.changed = threading.Condition()
        self.calls: list[Call] = []
        self.gate = threading.Event()  # for the method Block
        self.read: list[bytes] = []

    def admit(self, call: Call) -> None:
        """Authenticate."""
        if call.values("token") == ["wrong"]:
            raise Status(Code.UNAUTHENTICATED, "not authenticated: 100 % – sicher")
        call.link.authenticated("caller")

    async def serve(self, call: Call) -> None:
        """Do what the method says."""
        self._count("begun", call)
        try:
            await getattr(self, call.method.rpartition("/")[2].lower())(call)
        except asyncio.CancelledError:
            self._count("cancelled")
            raise
        finally:
            self._count("ended")

    def _count(self, name: str, call: Call | None = None) -> None:
        with self.changed:
            setattr(self, name, getattr(self, name) + 1)
            if call is not None:
                self.calls.append(call)
            self.changed.notify_all()

    def wait(self, name: str, count: int) -> None:
        """Wait until so many handlers have begun, were cancelled or ended."""
        with self.changed:
            assert self.changed.wait_for(lambda: getattr(self, name) >= count, GUARD), f"{getattr(self, name)} of {count} {name}"

    async def echo(self, call: Call) -> None:
        """Send each message back."""
        async for message in call:
            with message:
                await call.write(bytes(message.data))

    async def count(self, call: Call) -> None:
        """Send the sum of the messages' sizes at the end."""
        total = 0
        async for message in call:
            with message:
                total += len(message)
        await call.write(str(total).encode())

    async def keep(self, call: Call) -> None:
        """Read messages and keep them."""
        async for message in call:
            self.read.append(bytes(message.data[:8]))

    async def idle(self, call: Call) -> None:
        """Read nothing, and never end."""
        await asyncio.Event().wait()

    async def wide(self, call: Call) -> None:
        """Send messages of 1 MiB without an end."""
        while True:
            room = await call.room(1 << 20)
            await call.write(bytes(1 << 20), room=room)

    async def block(self, call: Call) -> None:
        """Block a thread until `gate` is open."""
        await call.run(self._wait_for_gate)

    def _wait_for_gate(self) -> None:
        self._count("blocked")
        self.gate.wait()

    async def fail(self, call: Call) -> None:
        """Raise an unforeseen error."""
        raise RuntimeError("unforeseen")

    async def refuse(self, call: Call) -> None:
        """Raise a status with trailers, after a message."""
        call.send_metadata([("begin", "yes")])
        await call.write(b"one")
        raise Status(Code.ALREADY_EXISTS, "it exists", [("reason", "twice"), ("reason-bin", b"\x00\xff")])

    async def say(self, call: Call) -> None:
        """Send the metadata, the identity of the client and the parts of a message."""
        call.trailers.append(("last", "yes"))
        pairs = sorted(f"{name}={value!r}" for name, value in call.metadata if name.startswith("x-"))
        await call.write(b"; ".join(pair.encode() for pair in pairs), b"|", memoryview(call.caller.identity.encode()))


@contextmanager
def listening(service: Any = None, **options: Any) -> Iterator[tuple[Listener, Any, list[tuple[Reason, Address]]]]:
    """Serve an echo service; yield the listener, the service and the events."""
    service = EchoService() if service is None else service
    events: list[tuple[Reason, Address]] = []
    limits = Limits(**{"threads": 2, **options.pop("limits", {})})
    with Listener(service, limits=limits, on_event=lambda *event: events.append(event), **options) as listener:
        try:
            yield listener, service, events
        finally:
            getattr(service, "gate", threading.Event()).set()


def until(condition: Any, what: str) -> None:
    """Wait for a condition."""
    end = system.port.monotonic() + GUARD
    while not condition():
        assert system.port.monotonic() < end, f"never: {what}"
        system.port.sleep(0.01)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def headers(stream: int, method: str, flags: int = END_HEADERS, **more: str) -> bytes:
    """Return the frame that begins a call, without compression."""
    fields = {":method": "POST", ":scheme": "http", ":path": f"/test/{method}", ":authority": "x", "content-type": "application/grpc"}
    fields |= {name.replace("_", "-"): value for name, value in more.items()}
    return frame(HEADERS, flags, stream, b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items()))


def _text(text: str) -> bytes:
    if len(text) < 127:
        return bytes([len(text)]) + text.encode()
    rest, size = len(text) - 127, b"\x7f"
    while rest >= 128:
        size += bytes([rest % 128 + 128])
        rest //= 128
    return size + bytes([rest]) + text.encode()


def message(content: bytes) -> bytes:
    """Return a message of gRPC."""
    return b"\0" + len(content).to_bytes(4, "big") + content


class FrameClient:
    """A connection on which a test sends and reads frames."""

    def __init__(self, address: Address, begin: bool = True) -> None:
        self.socket = socket.create_connection(address, timeout=GUARD)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")
        if begin:
            self.send(PREFACE, frame(SETTINGS))

    def send(self, *frames: bytes) -> None:
        """Send bytes. A server that has closed the connection is ignored."""
        self.socket.sendall(b"".join(frames))

    def next(self) -> tuple[int, int, int, bytes] | None:
        """Return kind, flags, stream and content of the next frame; None at the end."""
        try:
            head = self._file.read(9)
            if len(head) < 9:
                return None
            return head[3], head[4], int.from_bytes(head[5:], "big"), self._file.read(int.from_bytes(head[:3], "big"))
        except ConnectionResetError:
            return None

    def find(self, kind: int, stream: int | None = None, flags: int = 0) -> tuple[int, int, int, bytes] | None:
        """Return the next frame of a kind, of a stream, with flags; None if the connection ends before."""
        while (found := self.next()) is not None:
            if found[0] == kind and stream in (None, found[2]) and found[1] & flags == flags:
                return found
        return None

    def error(self) -> int | None:
        """Read until the end, and return the error code of the last GOAWAY; None without one."""
        code = None
        while (found := self.next()) is not None:
            if found[0] == GOAWAY:
                code = int.from_bytes(found[3][4:8], "big")
        return code

    def is_alive(self) -> bool:
        """Return whether the server answers a PING."""
        self.send(frame(PING, 0, 0, b"12345678"))
        return self.find(PING, flags=ACK) is not None

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
