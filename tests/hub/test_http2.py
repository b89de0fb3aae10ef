"""HTTP/2 of the hub's server, frame by frame: every rule that a client may break, and windows, padding and memory."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import pytest
from echo_service import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameClient,
    frame,
    headers,
    listening,
    message,
    until,
)
from h2.errors import ErrorCodes

from hub.server.budget import Budget
from hub.server.call import Status
from hub.server.http2 import Budgets, Http2Session, Violation
from hub.server.limits import Limits, Reason
from hub.server.streams import AHEAD, HELD, OVERHEAD, UNREAD, WireStream

Work = Callable[[FrameClient], None]


class Host:
    """A connection without a socket: collects the streams that begin."""

    def __init__(self) -> None:
        self.begun: list[WireStream] = []

    def begin(self, stream: WireStream, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun.append(stream)

    def has_output(self) -> None:
        pass


def session_of(host: Host, **limits: Any) -> Http2Session:
    loop = asyncio.get_running_loop()
    given = Limits(**limits)
    budgets = (Budget(size, loop) for size in (given.received_bytes, given.received_bytes // 4, given.working_bytes, given.unsent_bytes))
    return Http2Session(given, Budgets(*budgets, given.received_bytes // 8), host)


CALL = PREFACE + frame(SETTINGS) + headers(1, "Echo", user_agent="x" * 300)
CONTENT = message(b"one") + message(b"") + message(b"x" * 300)
WAYS = {
    "one frame": frame(DATA, END_STREAM, 1, CONTENT),
    "frames of 7 bytes": b"".join(frame(DATA, 0, 1, CONTENT[at : at + 7]) for at in range(0, len(CONTENT), 7)) + frame(DATA, END_STREAM, 1),
    "padding": frame(DATA, PADDED, 1, b"\x05" + CONTENT + bytes(5)) + frame(DATA, PADDED | END_STREAM, 1, b"\xff" + bytes(255)),
    "padding of no bytes": frame(DATA, PADDED | END_STREAM, 1, b"\x00" + CONTENT),
    "only padding": frame(DATA, 0, 1, CONTENT) + frame(DATA, PADDED, 1, b"\x03" + bytes(3)) + frame(DATA, END_STREAM, 1),
    "trailers": frame(DATA, 0, 1, CONTENT) + frame(HEADERS, END_STREAM | END_HEADERS, 1, b"\0\x01a\x01b"),
    "others between": frame(DATA, 0, 1, CONTENT[:4]) + frame(PING, 0, 0, bytes(8)) + frame(99, 0, 0, b"?") + frame(DATA, 1, 1, CONTENT[4:]),
}


@pytest.mark.parametrize("size", [1, 2, 3, 9, 10, 11, 100, 1 << 20])
@pytest.mark.parametrize("way", WAYS)
def test_messages_are_the_same_however_their_bytes_arrive(way: str, size: int) -> None:
    async def run() -> list[bytes]:
        host = Host()
        session = session_of(host)
        data = memoryview(CALL + WAYS[way])
        for at in range(0, len(data), size):
            session.receive(data[at : at + size])
        (stream,) = host.begun
        found = []
        while (one := await stream.read()) is not None:
            found.append(bytes(one.data))
            one.release()
        assert session.received.used == 0
        return found

    assert asyncio.run(run()) == [b"one", b"", b"x" * 300]


def test_a_session_begins_no_more_calls_than_it_may_in_a_turn_and_loses_none() -> None:
    async def run() -> None:
        host = Host()
        session = session_of(host)
        session.receive(memoryview(PREFACE + frame(SETTINGS)))
        rest = memoryview(b"".join(headers(number, "Echo") for number in range(1, 21, 2)))
        for begun in (4, 8, 10):
            session.frames_left = 4
            rest = rest[session.receive(rest) :]
            assert len(host.begun) == begun
        assert not rest

    asyncio.run(run())


def test_a_large_message_is_received_right_into_its_own_memory() -> None:
    async def run() -> None:
        host = Host()
        session = session_of(host)
        content = bytes(range(256)) * 400
        session.receive(memoryview(CALL + frame(DATA, 0, 1, message(content)[:60000])))
        (stream,) = host.begun
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        session.output(1 << 20)
        rest = message(content)[60000:]
        assert session.destination() is None
        session.receive(memoryview(frame(DATA, END_STREAM, 1, rest)[:9]))
        taken = 0
        while (target := session.destination()) is not None:
            some = rest[taken : taken + min(len(target), 5000)]
            target[: len(some)] = some
            session.arrived(len(some))
            taken += len(some)
        assert taken > 0
        session.receive(memoryview(rest[taken:]))
        received = await reading
        assert received is not None and bytes(received.data) == content
        assert await stream.read() is None

    asyncio.run(run())


def test_the_window_of_a_stream_is_what_has_memory() -> None:
    """A client that sends all it may, in the worst case, stays within the budget, the bytes without a grant and the credit ahead."""

    async def run() -> None:
        host = Host()
        session = session_of(host, received_bytes=8 << 20, message_bytes=4 << 20)
        session.receive(memoryview(PREFACE + frame(SETTINGS)))
        for number in range(1, 40, 2):
            session.receive(memoryview(headers(number, "Echo")))
        size = 1 << 20
        tasks = []
        for stream in host.begun:
            session.receive(memoryview(frame(DATA, 0, stream.number, message(bytes(size))[:100])))
            tasks.append(asyncio.ensure_future(stream.read()))
        await asyncio.sleep(0)
        granted = [stream for stream in host.begun if stream.inward.partial]
        assert 0 < len(granted) <= session.received.most // size
        allowed = sum(stream.inward.credit for stream in granted)
        assert allowed <= session.received.most + session.standing.most + len(granted) * HELD
        for stream in host.begun:
            if stream not in granted:
                assert stream.inward.credit <= HELD - 100
        finished = granted[0]
        rest = memoryview(message(bytes(size)))[100:]
        for at in range(0, len(rest), 10000):
            session.receive(memoryview(frame(DATA, 0, finished.number, bytes(rest[at : at + 10000]))))
        received = await tasks[host.begun.index(finished)]
        assert received is not None and len(received) == size
        session.drop(granted[1])
        await asyncio.sleep(0.01)
        assert len([stream for stream in host.begun if stream.inward.partial]) == len(granted) - 1, "the next one waits for its grant"
        received.release()
        await asyncio.sleep(0.01)
        assert len([stream for stream in host.begun if stream.inward.partial]) >= len(granted) - 1
        session.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert session.received.used == 0 and session.standing.used == 0

    asyncio.run(run())


def test_a_client_that_ends_within_a_message_is_an_error() -> None:
    async def run() -> None:
        host = Host()
        session = session_of(host)
        session.receive(memoryview(CALL + frame(DATA, END_STREAM, 1, message(b"abc")[:-1])))
        with pytest.raises(Status, match="within a message"):
            await host.begun[0].read()
        session.close()
        assert session.received.used == 0

    asyncio.run(run())


def test_a_stream_that_is_not_read_gets_no_more_credit_than_ahead() -> None:
    async def run() -> None:
        host = Host()
        session = session_of(host)
        session.receive(memoryview(CALL))
        (stream,) = host.begun
        asyncio.ensure_future(stream.read()).cancel()
        sent = 0
        one = message(bytes(10000))
        while stream.inward.credit >= len(one):
            session.receive(memoryview(frame(DATA, 0, 1, one)))
            sent += len(one)
            assert sent < 2 * AHEAD, "no back-pressure"
        assert session.received.used <= AHEAD + len(one) + OVERHEAD
        session.close()

    asyncio.run(run())


def test_large_messages_of_a_slow_handler_arrive_in_their_own_memory_up_to_a_limit() -> None:
    async def run() -> None:
        host = Host()
        session = session_of(host)
        session.receive(memoryview(CALL))
        inward = host.begun[0].inward
        reading = asyncio.ensure_future(host.begun[0].read())
        await asyncio.sleep(0)
        one = message(bytes(1_900_000))
        sent = 0
        while inward.credit > 0 and sent < 20 * len(one):
            at = sent % len(one)
            piece = one[at : at + min(len(one) - at, inward.credit, 100_000)]
            session.receive(memoryview(frame(DATA, 0, 1, piece)))
            sent += len(piece)
        assert inward.completed == 3, "the third one is not copied when it is its turn"
        assert sent <= UNREAD + AHEAD + len(one), "no back-pressure"
        reading.cancel()
        session.close()
        assert session.received.used == 0

    asyncio.run(run())


def test_random_bytes_raise_nothing_but_violations() -> None:
    import random

    async def run(seed: int) -> None:
        draw = random.Random(seed)
        host = Host()
        session = session_of(host)
        good = CALL + WAYS[draw.choice(list(WAYS))] + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 5)) + frame(RST_STREAM, 0, 1, bytes(4))
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(PREFACE), len(data))] = draw.randrange(256)
        at = 0
        try:
            while at < len(data):
                size = draw.choice([1, 5, 50, 5000])
                session.receive(memoryview(bytes(data[at : at + size])))
                session.output(1000)
                at += size
        except Violation:
            pass
        session.close()
        assert session.received.used == session.standing.used == 0

    for seed in range(2000):
        try:
            asyncio.run(run(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


BROKEN: dict[str, tuple[bytes, ErrorCodes]] = {
    "another first frame": (frame(PING, 0, 0, bytes(8)), ErrorCodes.PROTOCOL_ERROR),
    "data of no stream": (frame(SETTINGS) + frame(DATA, 0, 5, b"x"), ErrorCodes.PROTOCOL_ERROR),
    "data on stream 0": (frame(SETTINGS) + frame(DATA, 0, 0, b"x"), ErrorCodes.PROTOCOL_ERROR),
    "more padding than bytes": (frame(SETTINGS) + headers(1, "Echo") + frame(DATA, PADDED, 1, b"\x09" + b"x"), ErrorCodes.PROTOCOL_ERROR),
    "beyond the window": (
        frame(SETTINGS) + headers(1, "Idle") + b"".join(frame(DATA, 0, 1, bytes(16000)) for _ in range(5)),
        ErrorCodes.FLOW_CONTROL_ERROR,
    ),
    "data after the end": (frame(SETTINGS) + headers(1, "Idle") + frame(DATA, 1, 1) + frame(DATA, 0, 1, b"x"), ErrorCodes.STREAM_CLOSED),
    "a huge frame": (frame(SETTINGS) + headers(1, "Idle") + b"\x20\x00\x00\x00\x00" + struct.pack(">I", 1), ErrorCodes.FRAME_SIZE_ERROR),
    "a huge ping": (frame(SETTINGS) + b"\x01\x00\x00\x06\x00" + bytes(4), ErrorCodes.FRAME_SIZE_ERROR),
    "a window of nothing": (frame(SETTINGS) + frame(WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCodes.PROTOCOL_ERROR),
    "a window that is short": (frame(SETTINGS) + frame(WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCodes.FRAME_SIZE_ERROR),
    "a window of no stream": (frame(SETTINGS) + frame(WINDOW_UPDATE, 0, 9, b"\0\0\0\1"), ErrorCodes.PROTOCOL_ERROR),
    "too large a window": (frame(SETTINGS) + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ErrorCodes.FLOW_CONTROL_ERROR),
    "too large a window of a stream": (
        frame(SETTINGS) + headers(1, "Idle") + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"),
        ErrorCodes.FLOW_CONTROL_ERROR,
    ),
    "headers in pieces without an end": (
        frame(SETTINGS) + headers(1, "Echo", flags=0) + b"".join(frame(CONTINUATION, 0, 1, bytes(1000)) for _ in range(100)),
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
    "a frame within headers": (frame(SETTINGS) + headers(1, "Echo", flags=0) + frame(DATA, 0, 1, b"x"), ErrorCodes.PROTOCOL_ERROR),
    "a header list that is too large": (
        frame(SETTINGS) + headers(1, "Echo", x_large="y" * 10000, x_larger="y" * 10000),
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
    "broken compression of headers": (frame(SETTINGS) + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff"), ErrorCodes.PROTOCOL_ERROR),
    "an even stream": (frame(SETTINGS) + headers(2, "Echo"), ErrorCodes.PROTOCOL_ERROR),
    "a stream twice": (frame(SETTINGS) + headers(3, "Idle") + headers(1, "Idle"), ErrorCodes.PROTOCOL_ERROR),
    "a flood of pings": (frame(SETTINGS) + frame(PING, 0, 0, bytes(8)) * 20000, ErrorCodes.ENHANCE_YOUR_CALM),
    "a flood of settings": (frame(SETTINGS) * 20000, ErrorCodes.ENHANCE_YOUR_CALM),
    "a flood of empty data of a call that is gone": (
        frame(SETTINGS) + headers(1, "Idle") + frame(RST_STREAM, 0, 1, bytes(4)) + frame(DATA, 0, 1) * 20000,
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
    "a flood of empty data": (frame(SETTINGS) + headers(1, "Idle") + frame(DATA, 0, 1) * 20000, ErrorCodes.ENHANCE_YOUR_CALM),
    "a flood of unknown frames": (frame(SETTINGS) + frame(77, 0, 0) * 20000, ErrorCodes.ENHANCE_YOUR_CALM),
    "a flood of priorities": (frame(SETTINGS) + frame(2, 0, 1, bytes([0, 0, 0, 3, 9])) * 20000, ErrorCodes.ENHANCE_YOUR_CALM),
    "calls that are cancelled at once": (
        frame(SETTINGS) + b"".join(headers(2 * n + 1, "Idle") + frame(RST_STREAM, 0, 2 * n + 1, bytes(4)) for n in range(5000)),
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_client_that_breaks_a_rule_loses_its_connection_with_the_reason(rule: str) -> None:
    data, code = BROKEN[rule]

    async def run() -> None:
        session = session_of(Host())
        with pytest.raises(Violation) as caught:
            session.receive(memoryview(PREFACE + data))
        assert caught.value.code == code
        assert caught.value.reason == (Reason.CONTROL_FRAMES if rule.startswith(("a flood", "calls")) else Reason.PROTOCOL)

    asyncio.run(run())


@pytest.mark.parametrize("rule", ["another first frame", "beyond the window", "data after the end"])
def test_the_reason_is_sent_and_others_are_served(rule: str) -> None:
    data, code = BROKEN[rule]
    with listening() as (listener, _, events), FrameClient(listener.address) as other, FrameClient(listener.address, begin=False) as client:
        client.send(PREFACE, data)
        assert client.error() == code
        assert other.is_alive()
        until(lambda: [reason for reason, _ in events] == [Reason.PROTOCOL], "the event")


def test_what_is_no_preface_ends_the_connection() -> None:
    with listening() as (listener, _, _), FrameClient(listener.address, begin=False) as client:
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.error() == ErrorCodes.PROTOCOL_ERROR


def test_a_ping_is_answered_and_settings_are_acknowledged() -> None:
    with listening() as (listener, _, _), FrameClient(listener.address) as client:
        assert client.find(SETTINGS, flags=ACK) is not None
        assert client.is_alive()


def test_streams_beyond_the_limit_are_refused_alone() -> None:
    with listening(limits={"streams": 3}) as (listener, service, _), FrameClient(listener.address) as client:
        client.send(*(headers(number, "Idle") for number in (1, 3, 5, 7)))
        refused = client.find(RST_STREAM)
        assert refused is not None
        assert refused[2:] == (7, int(ErrorCodes.REFUSED_STREAM).to_bytes(4, "big"))
        client.send(frame(RST_STREAM, 0, 3, bytes(4)), headers(9, "Echo"), frame(DATA, END_STREAM, 9, message(b"x")))
        answer = client.find(DATA, 9)
        assert answer is not None and answer[3] == message(b"x")
        service.wait("begun", 4)


@pytest.mark.parametrize(
    ("flag", "size", "status"), [(1, 3, b"12"), (0, 1 << 30, b"8")], ids=["compressed messages", "a message that is too large"]
)
def test_a_message_is_refused_at_its_head(flag: int, size: int, status: bytes) -> None:
    with listening() as (listener, service, _), FrameClient(listener.address) as client:
        client.send(headers(1, "Echo"), frame(DATA, 0, 1, bytes([flag]) + size.to_bytes(4, "big") + b"abc"))
        found = client.find(HEADERS, 1, END_STREAM)
        assert found is not None and b"grpc-status" in decoded(found[3]) and decoded(found[3])[b"grpc-status"] == status
        assert client.find(RST_STREAM, 1) is not None, "the client need not end its half"
        assert client.is_alive()
        until(lambda: listener.stats().calls == 0, "the end of the handler")


def decoded(block: bytes) -> dict[bytes, bytes]:
    from hpack import Decoder

    return {bytes(name): bytes(value) for name, value in Decoder().decode(block, raw=True)}


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"content_type": "text/html"}, b"12"),
        ({"grpc_encoding": "gzip"}, b"12"),
        ({"grpc_timeout": "soon"}, b"3"),
        ({"x_bin": "!"}, b"3"),
        ({"token": "wrong"}, b"16"),
    ],
)
def test_a_call_is_refused_by_its_headers(more: dict[str, str], status: bytes) -> None:
    with listening() as (listener, service, _), FrameClient(listener.address) as client:
        client.send(headers(1, "Echo", **more))
        found = client.find(HEADERS, 1, END_STREAM)
        assert found is not None and decoded(found[3])[b"grpc-status"] == status
        assert client.is_alive()
        assert service.begun == 0


def test_answers_wait_for_the_windows_of_the_client() -> None:
    with listening() as (listener, _, _), FrameClient(listener.address, begin=False) as client:
        client.send(PREFACE, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)))
        client.send(headers(1, "Echo"), frame(DATA, END_STREAM, 1, message(b"0123456789abcdef")))
        sent = b""
        while len(sent) < 10:
            found = client.find(DATA, 1)
            assert found is not None
            sent += found[3]
        assert sent == message(b"0123456789abcdef")[:10]
        assert client.is_alive()
        client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 13)))
        found = client.find(DATA, 1)
        assert found is not None
        sent += found[3]
        assert len(sent) == 13
        client.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 100)))
        found = client.find(DATA, 1)
        assert found is not None
        assert sent + found[3] == message(b"0123456789abcdef")
        assert client.find(HEADERS, 1, END_STREAM) is not None


def test_the_window_of_the_connection_holds_for_all_streams() -> None:
    with listening() as (listener, _, _), FrameClient(listener.address, begin=False) as client:
        client.send(PREFACE, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)), headers(1, "Wide"), headers(3, "Wide"))
        taken = 0
        while taken < 65535:
            found = client.find(DATA)
            assert found is not None
            taken += len(found[3])
        assert taken == 65535
        assert client.is_alive()
        client.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1000)))
        found = client.find(DATA)
        assert found is not None and len(found[3]) == 1000


def test_shutdown_announces_itself_and_waits_for_present_calls() -> None:
    with listening() as (listener, service, _), FrameClient(listener.address) as client:
        client.send(headers(1, "Echo"))
        service.wait("begun", 1)
        import threading

        closing = threading.Thread(target=lambda: listener.close(grace=60))
        closing.start()
        goaway = client.find(GOAWAY)
        assert goaway is not None and goaway[3] == struct.pack(">II", 1, 0)
        client.send(headers(3, "Echo"))
        refused = client.find(RST_STREAM, 3)
        assert refused is not None and refused[3] == int(ErrorCodes.REFUSED_STREAM).to_bytes(4, "big")
        client.send(frame(DATA, END_STREAM, 1, message(b"last")))
        found = client.find(DATA, 1)
        assert found is not None and found[3] == message(b"last")
        assert client.error() is None
        closing.join()


def test_a_client_that_sends_goaway_gets_the_answers_of_its_calls() -> None:
    with listening() as (listener, _, _), FrameClient(listener.address) as client:
        client.send(headers(1, "Echo"), frame(GOAWAY, 0, 0, bytes(8)), frame(DATA, END_STREAM, 1, message(b"x")))
        found = client.find(DATA, 1)
        assert found is not None and found[3] == message(b"x")
