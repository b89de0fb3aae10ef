"""One stream of HTTP/2, with the messages of one call in both directions. It does no I/O.

**In.** A message is five bytes, with its size, and its content. Its memory is granted when the size is known, and the client may send it
only then. Until that, and beyond the granted message, at most `HELD` bytes can arrive, because the window is no larger. While there is
memory, a stream that has sent much gets a credit ahead. So no round trip is paid for each message.

**Out.** Messages wait in a queue, without copies, until the client's window lets them out. Their memory is released as they leave.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from hub.server.budget import Budget, Grant, MemoryRequest, Share
from hub.server.call import Code, Message, Metadata, Status
from kvspool import system

if TYPE_CHECKING:
    from collections.abc import Iterable

HELD = (1 << 16) - 1  # bytes of a stream that may arrive without a grant: the initial window of HTTP/2
AHEAD = 2 << 20  # bytes of credit of a stream that sends much
UNREAD = 2 * AHEAD  # bytes of messages that wait to be read; from half of them on, no more credit is given ahead of a message
MOST_WAITING = 64  # messages that wait to be read
MUCH = 1 << 15  # bytes of a message for which a credit ahead is worth it
UNSENT = 1 << 20  # bytes of a stream that may be unsent when a write returns
OVERHEAD = 512  # bytes of memory that each message counts in addition
HEAD = 5  # bytes before a message: whether it is compressed, and its size


class Incoming(Protocol):
    """The connection of a stream, as far as received messages need it."""

    received: Budget
    received_share: Share
    standing: Budget  # for credit ahead; never waited for
    standing_share: Share
    message_bytes: int

    def widen(self, stream: WireStream, size: int) -> None:
        """Let the client send `size` bytes more."""

    def hold(self, change: int) -> bool:
        """Count bytes that wait for a grant; return whether they are too many."""

    def wake(self, stream: WireStream) -> None:
        """Send what the stream has to send, soon."""

    def fail(self, stream: WireStream, status: Status) -> None:
        """End the stream's call with an error."""


class Assembly:
    """The received half of a stream: bytes become messages."""

    def __init__(self, stream: WireStream, connection: Incoming) -> None:
        self.credit = HELD  # bytes that the client may send now
        self.has_ended = False  # the client sends no more
        self.began = system.port.monotonic()  # when the memory of the present message was granted
        self.completed = 0  # messages
        self._stream = stream
        self._connection = connection
        self._held = bytearray()  # without a grant of their message
        self._counted = 0  # of them: those beyond the credit ahead, for which memory is reserved
        self._inbox: deque[Message] = deque()
        self._unread = 0  # bytes in the inbox
        self._size = -1  # of the present message; -1: not known
        self._filled = 0
        self._buffer: memoryview | None = None  # of the present message
        self._grant: Grant | None = None
        self._request: MemoryRequest | None = None
        self._ahead: Grant | None = None
        self._is_busy = False  # has sent large messages
        self._is_read = False  # a handler has begun to read
        self._reader: asyncio.Future[None] | None = None
        self._is_over = False

    @property
    def partial(self) -> int:
        """Return the size of an incomplete message whose memory is granted."""
        return self._size if self._buffer is not None else 0

    @property
    def rate(self) -> float:
        """Return the bytes a second of an incomplete message, since its memory was granted."""
        return self._filled / max(system.port.monotonic() - self.began, 1e-3)

    def destination(self, most: int, least: int) -> memoryview | None:
        """Return where the next bytes of the stream belong, at most `most` of them; None if that is less than `least`, or not known."""
        if self._buffer is None or self._held or self._size - self._filled < least:
            return None
        return self._buffer[self._filled : min(self._size, self._filled + most)]

    def filled(self, size: int) -> None:
        """Note that `size` bytes were written to the destination."""
        self.credit -= size
        self._filled += size
        if self._filled == self._size:
            self._complete()
            self._open_window()

    def receive(self, data: memoryview) -> None:
        """Take in bytes of the stream."""
        if self._is_over:
            return
        self.credit -= len(data)
        if self._buffer is not None and not self._held:
            size = min(len(data), self._size - self._filled)
            self._buffer[self._filled : self._filled + size] = data[:size]
            self._filled += size
            if self._filled < self._size:
                return
            self._complete()
            data = data[size:]
        if self._held:
            self._hold(data)
            self._use_held()
        elif data:
            self._hold(data[self._use(data) :])
        self._open_window()

    def _hold(self, data: memoryview) -> None:
        if data and not self._is_over:
            self._held += data
            if self._count_held():
                status = Status(Code.RESOURCE_EXHAUSTED, "the hub has no memory for more messages; retry in 2 s")
                self._connection.fail(self._stream, status)

    def _count_held(self) -> bool:
        """Count the held bytes for which no memory is reserved; return whether they are too many."""
        count = max(0, len(self._held) - (0 if self._ahead is None else self._ahead.size))
        change, self._counted = count - self._counted, count
        return self._connection.hold(change) and change > 0

    def _use_held(self) -> None:
        if self._held and not self._is_over:
            with memoryview(self._held) as held:
                used = self._use(held)
            if used:
                del self._held[:used]
                self._count_held()

    def _use(self, data: memoryview) -> int:
        """Make messages of bytes, while their memory is granted and few of them wait. Return how many bytes were used."""
        at = 0
        while not self._is_over:
            if self._buffer is not None:
                size = min(len(data) - at, self._size - self._filled)
                self._buffer[self._filled : self._filled + size] = data[at : at + size]
                self._filled += size
                at += size
                if self._filled < self._size:
                    break
                self._complete()
            elif self._request is not None or self._is_full() or len(data) - at < HEAD:
                break
            elif self._size < 0:
                if not self._begin(data[at], int.from_bytes(data[at + 1 : at + HEAD], "big"), len(data) - at - HEAD):
                    break
                at += HEAD
                self._ask()
        return at

    def _begin(self, compressed: int, size: int, there: int) -> bool:
        """Begin a message. Return False if it has to wait for a reader, or is refused."""
        if compressed:
            self._connection.fail(self._stream, Status(Code.UNIMPLEMENTED, "compressed messages are not supported"))
            return False
        if size > self._connection.message_bytes:
            words = f"a message has {size} bytes, but at most {self._connection.message_bytes} are allowed"
            self._connection.fail(self._stream, Status(Code.RESOURCE_EXHAUSTED, words))
            return False
        if not self._is_read and size > there and size > HELD - HEAD:
            return False  # it gets its memory when a handler reads
        self._size, self._filled = size, 0
        return True

    def _ask(self) -> None:
        """Ask for the memory of the present message."""
        connection = self._connection
        size = self._size + OVERHEAD
        self._is_busy = self._is_busy or self._size >= MUCH
        grant = connection.received.try_grant(size, connection.received_share)
        if grant is not None:
            self._allocate(grant)
        elif not connection.received.fits(size, connection.received_share):
            connection.fail(self._stream, Status(Code.RESOURCE_EXHAUSTED, f"the hub has no memory for a message of {self._size} bytes"))
        else:
            self._request = connection.received.request(size, connection.received_share, self._granted)

    def _granted(self, grant: Grant) -> None:
        """Continue after a grant that had to wait."""
        self._request = None
        if self._is_over:
            grant.release()
            return
        self._allocate(grant)
        self._proceed()
        self._wake()

    def _allocate(self, grant: Grant) -> None:
        self._grant = grant
        self._buffer = memoryview(bytearray(self._size))
        self.began = system.port.monotonic()
        if not self._size:
            self._complete()

    def _complete(self) -> None:
        assert self._buffer is not None
        self.completed += 1
        self._inbox.append(Message(self._buffer, self._grant))
        self._unread += self._size + OVERHEAD
        self._buffer, self._grant, self._size = None, None, -1
        self._wake()

    def _is_full(self) -> bool:
        return self._unread >= UNREAD or len(self._inbox) >= MOST_WAITING

    def _proceed(self) -> None:
        self._use_held()
        self._open_window()

    def _open_window(self) -> None:
        """Let the client send the present message, and what may arrive without a grant."""
        if self.has_ended or self._is_over:
            return
        if self._buffer is not None:
            needed = self._size - self._filled
        elif self._request is not None or self._size >= 0 or self._is_full() or len(self._held) >= HEAD:
            return
        else:
            needed = 0
        if self._is_busy and self._ahead is None:
            self._ahead = self._connection.standing.try_grant(AHEAD, self._connection.standing_share)
        target = needed + HELD
        if self._ahead is not None and self._unread < UNREAD // 2:
            target += self._ahead.size
        missing = target - self.credit - len(self._held)
        if missing >= max(MUCH, target >> 2) or (missing > 0 and self.credit < min(needed, MUCH)):
            self.credit += missing
            self._connection.widen(self._stream, missing)

    async def read(self) -> Message | None:
        """Return the next message; None after the last one."""
        if not self._is_read:
            self._is_read = True
            self._proceed()
        while not self._inbox:
            if self._is_over:
                raise Status(Code.CANCELLED, "the call is over")
            if self.has_ended and self._request is None:
                if self._held or self._size >= 0:
                    raise Status(Code.INTERNAL, "the client has ended the call within a message")
                return None
            assert self._reader is None, "two tasks read one call"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        was_full = self._is_full()
        message = self._inbox.popleft()
        self._unread -= len(message) + OVERHEAD
        if was_full or self._held:
            self._proceed()
        return message

    def end(self) -> None:
        """Note that the client has sent its last byte."""
        self.has_ended = True
        self._give_up_ahead()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)  # it looks for itself

    def _give_up_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.release()
            self._ahead = None
            self._count_held()

    def close(self) -> None:
        """Release everything; bytes that still arrive are dropped."""
        if self._is_over:
            return
        self._is_over = True
        if self._request is not None:
            self._connection.received.cancel(self._request)
        if self._grant is not None:
            self._grant.release()
        self._buffer = self._grant = self._request = None
        for message in self._inbox:
            message.release()
        self._inbox.clear()
        self._held = bytearray()
        self._give_up_ahead()
        self._count_held()
        self._wake()


class SendQueue:
    """The sent half of a stream: messages that wait for the client's window."""

    def __init__(self, window: int) -> None:
        self.window = window  # bytes that the client takes now; may be below 0
        self.unsent = 0
        self.messages = 0  # completely sent
        self.stalled_since = system.port.monotonic()
        self._parts: deque[memoryview] = deque()
        self._rooms: deque[tuple[int, Grant]] = deque()  # bytes of each message that are unsent, and its grant
        self._writers: deque[asyncio.Future[None]] = deque()

    @property
    def is_sendable(self) -> bool:
        """Return whether bytes could be sent now."""
        return self.unsent > 0 and self.window > 0

    def put(self, parts: Iterable[memoryview], room: Grant) -> None:
        """Queue a message."""
        size = 0
        start = len(self._parts)
        self._parts.append(memoryview(b""))
        for part in parts:
            self._parts.append(part)
            size += len(part)
        self._parts[start] = memoryview(b"\0" + size.to_bytes(4, "big"))
        if not self.unsent:
            self.stalled_since = system.port.monotonic()
        self.unsent += size + HEAD
        self._rooms.append((size + HEAD, room))

    def take(self, size: int, out: bytearray) -> None:
        """Move `size` bytes to the end of `out`."""
        self.window -= size
        self._note_sent(size)
        while size:
            part = self._parts[0]
            if len(part) > size:
                out += part[:size]
                self._parts[0] = part[size:]
                return
            out += part
            size -= len(part)
            self._parts.popleft()

    def _note_sent(self, size: int) -> None:
        self.unsent -= size
        self.stalled_since = system.port.monotonic()
        while size:
            left, room = self._rooms[0]
            if left > size:
                self._rooms[0] = left - size, room
                break
            room.release()
            self._rooms.popleft()
            self.messages += 1
            size -= left
        if self.unsent <= UNSENT:
            self._wake()

    async def drained(self) -> None:
        """Wait until little is unsent."""
        while self.unsent > UNSENT:
            writer = asyncio.get_running_loop().create_future()
            self._writers.append(writer)
            await writer

    def _wake(self) -> None:
        while self._writers:
            writer = self._writers.popleft()
            if not writer.done():
                writer.set_result(None)

    def close(self) -> None:
        """Drop what is unsent."""
        self._parts.clear()
        self.unsent = 0
        for _, room in self._rooms:
            room.release()
        self._rooms.clear()
        self._wake()


class WireStream:
    """One stream: both halves, and how its call ends. It is the call's `CallStream`."""

    def __init__(self, number: int, connection: Incoming, window: int) -> None:
        self.number = number
        self.inward = Assembly(self, connection)
        self.outward = SendQueue(window)
        self.metadata: Metadata | None = None  # initial, to be sent
        self.has_headers = False  # the response's headers were sent
        self.status: Status | None = None  # of the end, to be sent after the queue
        self.is_over = False  # nothing is sent any more
        self.cancel: Callable[[], object] = lambda: None  # ends the handler; set by the connection
        self._connection = connection

    async def read(self) -> Message | None:
        """Return the next message; None after the last one."""
        return await self.inward.read()

    async def write(self, parts: Sequence[memoryview], room: Grant) -> None:
        """Queue a message, and wait while too much of the stream is unsent."""
        if self.is_over or self.status is not None:
            room.release()
            raise Status(Code.CANCELLED, "the call is over")
        self.outward.put(parts, room)
        self._connection.wake(self)
        await self.outward.drained()

    def send_metadata(self, metadata: Metadata) -> None:
        """Send the initial metadata."""
        assert not self.has_headers and self.metadata is None, "the initial metadata was sent"
        self.metadata = metadata
        self._connection.wake(self)

    def finish(self, status: Status) -> None:
        """Send a status after what is unsent. Nothing more is received."""
        if self.status is None and not self.is_over:
            self.status = status
            self.inward.close()
            self._connection.wake(self)

    def abort(self, status: Status) -> None:
        """End the call with an error, without what is unsent."""
        self.outward.close()
        self._connection.fail(self, status)

    def close(self) -> None:
        """Drop everything: the stream was reset, or its connection closed."""
        self.is_over = True
        self.inward.close()
        self.outward.close()
