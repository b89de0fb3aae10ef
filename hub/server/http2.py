"""HTTP/2 of one connection: received bytes become messages of its streams, and what the streams send becomes bytes. It does no I/O.

The library h2 has the control frames, their states and the compression of headers. DATA and WINDOW_UPDATE are handled here, because h2
would cost several times as much for each record. So h2 knows of no window. It sees the end of a stream as an empty DATA frame.

**Windows.** That of the connection is as large as possible. Those of the streams bound what may arrive; see `hub.server.streams`.

**Control frames** cost the hub more than their sender. A connection may send `control_frames` at once, and then `control_rate` a second.
Each `USEFUL` bytes of messages, in either direction, allow another one, each message `MESSAGE_WORTH`, and each successful call
`CALL_WORTH`. A cancelled call counts as `RESET_COST` frames.
"""

from __future__ import annotations

import struct
from typing import Protocol

import msgspec

from hub.server.budget import Budget, Share
from hub.server.call import Code, Status
from hub.server.limits import Limits, Reason
from hub.server.status_headers import TRAILERS_ONLY, encoded, end_headers
from hub.server.streams import HELD, WireStream
from kvspool import system
from kvspool.errors import MissingExtra

try:
    from h2.config import H2Configuration
    from h2.connection import H2Connection
    from h2.errors import ErrorCodes
    from h2.events import Event, RemoteSettingsChanged, RequestReceived, StreamEnded, StreamReset
    from h2.exceptions import ProtocolError
    from h2.settings import SettingCodes, Settings
except ImportError as _error:
    raise MissingExtra.of("hub", "the hub's server needs the package h2", _error) from _error

PREFACE = 24  # bytes that a client sends first
FRAME = 9  # bytes of a frame's head
LARGEST_FRAME = 1 << 20  # bytes of DATA that a client may send in one frame
LARGEST_SENT = 1 << 18  # bytes of DATA that we send in one frame, if the client takes so much
DIRECT = 1 << 15  # bytes of a frame that are read right into their message
USEFUL = 1 << 13  # bytes of messages that allow one more control frame
RESET_COST = 20
MESSAGE_WORTH = 2  # control frames that a message in either direction allows, as windows for its stream and the connection
CALL_WORTH = 8  # control frames that a completed call allows
SHORT = 64  # bytes of DATA without an end of a message that count as a control frame
HELD_BY_CONNECTION = 1 << 20  # bytes that wait for memory
LARGEST_WINDOW = (1 << 31) - 1
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 7, 8, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
_HEAD = struct.Struct(">HBBBI")  # length in two parts, kind, flags, stream
_UPDATE = struct.Struct(">HBBBII")


class Violation(Exception):
    """The client has broken a rule, so the connection ends with an error code of HTTP/2."""

    def __init__(self, reason: Reason, code: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code


class Budgets(msgspec.Struct):
    """The budgets of a listener. standing: for credit ahead. held: bytes that wait for memory, of all connections."""

    received: Budget
    standing: Budget
    working: Budget
    unsent: Budget
    most_held: int
    held: int = 0


class SessionHost(Protocol):
    """The connection of a session."""

    def begin(self, stream: WireStream, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin a call."""

    def has_output(self) -> None:
        """Call `output` soon."""


class _Control(H2Connection):
    MAX_CLOSED_STREAMS = 256  # that it remembers; 65,536 would be 13 MB


def _settings(limits: Limits, streams: int) -> Settings:
    return Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_bytes,
            SettingCodes.MAX_FRAME_SIZE: LARGEST_FRAME,
        },
    )


class Http2Session:
    """One connection. Used on the event loop."""

    def __init__(self, limits: Limits, memory: Budgets, host: SessionHost) -> None:
        self.received, self.standing = memory.received, memory.standing
        self.received_share = Share(max(memory.received.most // 4, min(memory.received.most, limits.message_bytes + (1 << 20))))
        self.standing_share = Share(memory.standing.most // 4)
        self.message_bytes = limits.message_bytes
        self.streams: dict[int, WireStream] = {}
        self.last_stream = 0
        self.is_ready = False  # the client's preface and settings are here
        self.is_ending = False  # no new streams
        self.bytes_in = self.bytes_out = 0  # of messages
        self._limits = limits
        self._memory = memory
        self._host = host
        self._held = 0
        self._need = PREFACE  # bytes until the next frame can be handled
        self._partial = bytearray()  # of it
        self._has_preface = False
        self._left = 0  # bytes of the present DATA frame
        self._padding = 0  # bytes after them
        self._current: WireStream | None = None  # of the present DATA frame; None: it is dropped
        self._ends = 0  # the stream that ends with the present DATA frame
        self._completed = 0  # messages of that stream before the frame
        self._frame_size = 0
        self._is_padding = False  # the rest of the present DATA frame, which was paid for
        self._header_block = 0  # bytes of an unfinished block of headers
        self._credit = LARGEST_WINDOW  # of the client for the connection
        self._window = HELD  # ours
        self._stream_window = HELD  # of new streams
        self._frame_most = 1 << 14
        self.frames_left = LARGEST_WINDOW  # that h2 may handle before `receive` stops; its owner sets it for each turn
        self._ready: dict[WireStream, None] = {}
        self._tokens = float(limits.control_frames)
        self._tokens_at = system.port.monotonic()
        self._useful = 0  # bytes that count for tokens
        self._h2 = _Control(H2Configuration(client_side=False, header_encoding=None))
        self._h2.decoder.max_header_list_size = limits.header_bytes
        self._h2.max_inbound_frame_size = LARGEST_FRAME
        self._h2.local_settings = _settings(limits, limits.streams)
        self._h2.initiate_connection()
        self._h2.local_settings = _settings(limits, LARGEST_WINDOW)  # h2 would cut the connection; we refuse the stream
        self._control = bytearray(self._h2.data_to_send())
        self._control += _UPDATE.pack(0, 4, WINDOW_UPDATE, 0, 0, LARGEST_WINDOW - HELD)

    # In.

    def destination(self) -> memoryview | None:
        """Return where the next bytes of the connection belong, if that is known to be one message."""
        if self._left < DIRECT or self._current is None:
            return None
        return self._current.inward.destination(self._left, DIRECT)

    def arrived(self, size: int) -> None:
        """Note that `size` bytes were written to the destination. Raises Violation."""
        assert self._current is not None
        self._left -= size
        self._current.inward.filled(size)
        if not self._left:
            self._end_data()

    def receive(self, data: memoryview) -> int:
        """Take in bytes while `frames_left`. Return how many were used. Raises Violation."""
        at, end = 0, len(data)
        while at < end and self.frames_left > 0:
            if self._left:
                size = min(self._left, end - at)
                if self._current is not None:
                    self._current.inward.receive(data[at : at + size])
                at += size
                self._left -= size
                if not self._left:
                    self._end_data()
            elif self._partial:
                size = min(self._need - len(self._partial), end - at)
                self._partial += data[at : at + size]
                at += size
                if len(self._partial) < self._need:
                    break
                frame = memoryview(bytes(self._partial))
                self._need = self._measure(frame)
                if self._need <= len(frame):
                    self._partial.clear()
                    self._frame(frame)
            else:
                rest = data[at:]
                need = self._measure(rest)
                if need > len(rest):
                    self._partial += rest
                    self._need = need
                    return end
                self._frame(rest[:need])
                at += need
        return at

    def _measure(self, data: memoryview) -> int:
        """Return how many bytes are needed to handle the next frame: of DATA, only its head."""
        if not self._has_preface:
            return PREFACE
        if len(data) < FRAME:
            return FRAME
        high, low, kind, flags, _ = _HEAD.unpack_from(data)
        if kind == DATA:
            return FRAME + 1 if flags & PADDED else FRAME
        size: int = high << 8 | low
        if size > 2 * self._limits.header_bytes:
            raise Violation(Reason.PROTOCOL, ErrorCodes.FRAME_SIZE_ERROR, f"a frame of kind {kind} has {size} bytes")
        return FRAME + size

    def _frame(self, frame: memoryview) -> None:
        if not self._has_preface:
            self._has_preface = True
            self._feed(frame)
            return
        high, low, kind, flags, number = _HEAD.unpack_from(frame)
        number &= LARGEST_WINDOW
        size = high << 8 | low
        if not self.is_ready and kind != SETTINGS:
            raise Violation(Reason.PROTOCOL, ErrorCodes.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if self._header_block and kind != CONTINUATION:
            raise Violation(Reason.PROTOCOL, ErrorCodes.PROTOCOL_ERROR, "a frame within a block of headers")
        if kind == DATA:
            self._begin_data(frame, size, flags, number)
            return
        self._pay(1)
        if kind == WINDOW_UPDATE:
            if size != 4:
                raise Violation(Reason.PROTOCOL, ErrorCodes.FRAME_SIZE_ERROR, f"a WINDOW_UPDATE of {size} bytes")
            self._widened(number, int.from_bytes(frame[FRAME:], "big") & LARGEST_WINDOW)
        elif kind == GOAWAY:
            self.is_ending = True  # h2 would stop sending on the streams that remain
        else:
            if kind in (HEADERS, CONTINUATION):
                self._header_block += size
                if self._header_block > 2 * self._limits.header_bytes:
                    raise Violation(Reason.PROTOCOL, ErrorCodes.ENHANCE_YOUR_CALM, "a block of headers is too large")
                if flags & END_HEADERS:
                    self._header_block = 0
                else:
                    self._header_block = max(1, self._header_block)
            self._feed(frame)

    def _feed(self, frame: memoryview | bytes) -> None:
        """Let h2 handle a frame."""
        self.frames_left -= 1
        try:
            for event in self._h2.receive_data(frame):
                self._handle(event)
        except ProtocolError as error:
            raise Violation(Reason.PROTOCOL, error.error_code, f"{type(error).__name__}: {str(error)[:200]}") from None
        self._control += self._h2.data_to_send()
        self._host.has_output()

    def _handle(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            self._begin(event.stream_id, event.headers)
        elif isinstance(event, StreamEnded):
            if (stream := self.streams.get(event.stream_id)) is not None:
                stream.inward.end()
        elif isinstance(event, StreamReset):
            if (stream := self.streams.get(event.stream_id)) is not None:
                self._pay(RESET_COST)
                self.drop(stream)
        elif isinstance(event, RemoteSettingsChanged):
            self._settings_changed()

    def _begin(self, number: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.last_stream = number
        if self.is_ending or len(self.streams) >= self._limits.streams:
            self._pay(RESET_COST)
            self._h2.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            return
        stream = WireStream(number, self, self._stream_window)
        self.streams[number] = stream
        self._host.begin(stream, headers)

    def _settings_changed(self) -> None:
        settings = self._h2.remote_settings
        self.is_ready = True
        change = settings.initial_window_size - self._stream_window
        self._stream_window = settings.initial_window_size
        self._frame_most = min(settings.max_frame_size, LARGEST_SENT)
        for stream in self.streams.values() if change else ():
            stream.outward.window += change
            self.wake(stream)

    def _begin_data(self, frame: memoryview, size: int, flags: int, number: int) -> None:
        padding = 0
        if flags & PADDED:
            padding = 1 + frame[FRAME]
            if padding > size:
                raise Violation(Reason.PROTOCOL, ErrorCodes.PROTOCOL_ERROR, "a frame is shorter than its padding")
        if size > LARGEST_FRAME:
            raise Violation(Reason.PROTOCOL, ErrorCodes.FRAME_SIZE_ERROR, f"a DATA frame has {size} bytes")
        stream = self.streams.get(number)
        if stream is None and (number > self.last_stream or not number & 1):
            raise Violation(Reason.PROTOCOL, ErrorCodes.PROTOCOL_ERROR, f"DATA of stream {number}, which was never open")
        self._credit -= size
        if stream is not None:
            if stream.inward.has_ended:
                raise Violation(Reason.PROTOCOL, ErrorCodes.STREAM_CLOSED, f"DATA after the end of stream {number}")
            if size > stream.inward.credit:
                raise Violation(Reason.PROTOCOL, ErrorCodes.FLOW_CONTROL_ERROR, f"DATA beyond the window of stream {number}")
            stream.inward.credit -= padding  # that of the rest is taken as it arrives
            self._completed = stream.inward.completed
            self._useful += size
            self.bytes_in += size
        if self._credit < LARGEST_WINDOW // 2:
            self._control += _UPDATE.pack(0, 4, WINDOW_UPDATE, 0, 0, LARGEST_WINDOW - self._credit)
            self._credit = LARGEST_WINDOW
            self._host.has_output()
        self._current = stream
        self._frame_size, self._is_padding = size, False
        self._left = size - padding
        self._padding = max(0, padding - 1)
        self._ends = number if flags & END_STREAM else 0
        if not self._left:
            self._end_data()

    def _end_data(self) -> None:
        """Handle the end of a DATA frame."""
        stream = self._current
        if stream is not None:
            self._useful += (stream.inward.completed - self._completed) * MESSAGE_WORTH * USEFUL
        if stream is not None and self._frame_size < SHORT and stream.inward.completed == self._completed and not self._ends:
            self._pay(1)
        elif stream is None:
            self._pay(max(self._frame_size / USEFUL, self._frame_size < SHORT and not self._is_padding))
        if self._padding:
            self._left, self._padding, self._current = self._padding, 0, None
            self._frame_size, self._is_padding = 0, True
            return
        number, self._ends, self._current = self._ends, 0, None
        if number in self.streams:
            self._feed(_HEAD.pack(0, 0, DATA, END_STREAM, number))

    def _widened(self, number: int, size: int) -> None:
        """Handle a WINDOW_UPDATE."""
        if not size:
            raise Violation(Reason.PROTOCOL, ErrorCodes.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0 bytes")
        if not number:
            self._window += size
            if self._window > LARGEST_WINDOW:
                raise Violation(Reason.PROTOCOL, ErrorCodes.FLOW_CONTROL_ERROR, "the connection's window is too large")
            for stream in self.streams.values():
                if stream.outward.is_sendable:
                    self.wake(stream)
        elif (found := self.streams.get(number)) is not None:
            found.outward.window += size
            if found.outward.window > LARGEST_WINDOW:
                raise Violation(Reason.PROTOCOL, ErrorCodes.FLOW_CONTROL_ERROR, f"the window of stream {number} is too large")
            self.wake(found)
        elif number > self.last_stream:
            raise Violation(Reason.PROTOCOL, ErrorCodes.PROTOCOL_ERROR, f"a window of stream {number}, which was never open")

    def _pay(self, cost: float) -> None:
        """Count control frames. Raises Violation for too many."""
        self._tokens -= cost
        if self._tokens >= 0:
            return
        now = system.port.monotonic()
        earned = (now - self._tokens_at) * self._limits.control_rate + self._useful / USEFUL
        self._tokens_at, self._useful = now, 0
        self._tokens = min(self._limits.control_frames, self._tokens + earned)
        if self._tokens < 0:
            raise Violation(Reason.CONTROL_FRAMES, ErrorCodes.ENHANCE_YOUR_CALM, "too many control frames")

    # Requests of the streams.

    def widen(self, stream: WireStream, size: int) -> None:
        """Let the client send `size` bytes more of a stream."""
        self._control += _UPDATE.pack(0, 4, WINDOW_UPDATE, 0, stream.number, size)
        self._host.has_output()

    def hold(self, change: int) -> bool:
        """Count bytes that wait for a grant; return whether they are too many."""
        self._held += change
        self._memory.held += change
        return self._held > HELD_BY_CONNECTION or self._memory.held > self._memory.most_held

    def wake(self, stream: WireStream) -> None:
        """Send what the stream has to send, soon."""
        self._ready[stream] = None
        self._host.has_output()

    def fail(self, stream: WireStream, status: Status) -> None:
        """End the stream's call with an error."""
        stream.finish(status)
        stream.cancel()

    def drop(self, stream: WireStream) -> None:
        """Forget a stream whose client doesn't want it any more."""
        self._forget(stream)
        stream.cancel()

    def reset(self, stream: WireStream, code: int) -> None:
        """Reset a stream."""
        if stream.number in self.streams:
            self._h2.reset_stream(stream.number, code)
            self._control += self._h2.data_to_send()
            self.drop(stream)
            self._host.has_output()

    def _forget(self, stream: WireStream) -> None:
        self.streams.pop(stream.number, None)
        self._ready.pop(stream, None)
        if self._current is stream:
            self._current = None
        stream.close()
        self._host.has_output()  # it may have been the last one

    # Out.

    @property
    def unsent_control(self) -> int:
        """Return how many bytes of control frames are unsent."""
        return len(self._control)

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self._h2.ping(b"kvspool?")
        self._control += self._h2.data_to_send()
        self._host.has_output()

    def say_goodbye(self, code: int = 0, message: str = "") -> None:
        """Announce that no new call is accepted. The present ones continue, unless there is an error."""
        if not self.is_ending or code:
            self.is_ending = True
            content = struct.pack(">II", self.last_stream, code) + message.encode()[:200]
            self._control += _HEAD.pack(0, len(content), GOAWAY, 0, 0) + content
            self._host.has_output()

    def output(self, most: int) -> bytearray:
        """Return the next bytes to send, about `most`; each stream has its turn."""
        out, self._control = self._control, bytearray()
        while self._ready and len(out) < most:
            stream = next(iter(self._ready))
            del self._ready[stream]
            self._send(stream, out)
        return out

    def _send(self, stream: WireStream, out: bytearray) -> None:
        """Send the next frames of a stream."""
        outward, status = stream.outward, stream.status
        if not stream.has_headers and (stream.metadata is not None or outward.unsent):
            stream.has_headers = True
            self._h2.send_headers(stream.number, TRAILERS_ONLY + encoded(stream.metadata or []))
            out += self._h2.data_to_send()
        if outward.is_sendable and self._window > 0:
            size = min(outward.unsent, outward.window, self._window, self._frame_most)
            out += _HEAD.pack(size >> 8, size & 0xFF, DATA, 0, stream.number)
            sent = outward.messages
            outward.take(size, out)
            self._useful += (outward.messages - sent) * MESSAGE_WORTH * USEFUL
            self._window -= size
            self._useful += size
            self.bytes_out += size
            if outward.is_sendable and self._window > 0:
                self._ready[stream] = None
        if status is not None and not outward.unsent:
            self._end(stream, status, out)

    def _end(self, stream: WireStream, status: Status, out: bytearray) -> None:
        """Send the trailers."""
        if status.code == Code.OK:
            self._useful += CALL_WORTH * USEFUL
        headers = end_headers(status)
        self._h2.send_headers(stream.number, headers if stream.has_headers else TRAILERS_ONLY + headers, end_stream=True)
        if not stream.inward.has_ended:
            self._h2.reset_stream(stream.number, ErrorCodes.NO_ERROR)
        out += self._h2.data_to_send()
        self._forget(stream)

    def close(self) -> None:
        """Drop all streams: the connection has ended."""
        for stream in list(self.streams.values()):
            self.drop(stream)
