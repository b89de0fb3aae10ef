"""One direction of a relayed connection: bytes from one socket go to another, unread.

A pipe connects the two sockets, and `splice` moves the bytes through it inside the kernel: they never reach user space. A relay reads only
after it has written all it had read, so a slow sink stops its source; at most one pipe of bytes is buffered. Idle relays hold no pipe,
they share a few. If the system has no descriptors for a pipe, or no splice for sockets, a smaller buffer with `recv` and `send`
replaces it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from typing import Protocol

CHUNK = 1 << 18  # bytes per step: larger steps were no faster
BUFFER_CHUNK = 1 << 16
SPARE_PIPES = 4
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)  # no resources for a socket or a pipe


class Carrier(Protocol):
    """A buffer for bytes in transit: `buffered` is their number. Both calls raise BlockingIOError instead of waiting."""

    @property
    def buffered(self) -> int: ...

    def fill(self, source: socket.socket, limit: int) -> int:
        """Read from the source into the empty buffer. Return the number of bytes, at most `limit`; 0: the source has ended."""

    def drain(self, sink: socket.socket) -> None:
        """Write some of the buffer to the sink."""

    def close(self) -> None: ...


class Pipe:
    """Moves bytes inside the kernel. Raises OSError without descriptors."""

    def __init__(self) -> None:
        self.buffered = 0
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with suppress(OSError):  # if the kernel refuses a larger pipe, it keeps its size
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, CHUNK)

    def fill(self, source: socket.socket, limit: int) -> int:
        self.buffered = os.splice(source.fileno(), self._in, min(limit, CHUNK), flags=os.SPLICE_F_NONBLOCK)
        return self.buffered

    def drain(self, sink: socket.socket) -> None:
        self.buffered -= os.splice(self._out, sink.fileno(), self.buffered, flags=os.SPLICE_F_NONBLOCK)

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)


class Buffer:
    """Moves bytes through user space, if nothing better is available."""

    def __init__(self) -> None:
        self._data = memoryview(b"")

    @property
    def buffered(self) -> int:
        return len(self._data)

    def fill(self, source: socket.socket, limit: int) -> int:
        self._data = memoryview(source.recv(min(limit, BUFFER_CHUNK)))
        return len(self._data)

    def drain(self, sink: socket.socket) -> None:
        self._data = self._data[sink.send(self._data) :]

    def close(self) -> None:
        self._data = memoryview(b"")


class Carriers:
    """Lends carriers to the relays of one thread."""

    def __init__(self) -> None:
        self._has_pipes = sockets_can_splice()
        self._spare: list[Pipe] = []

    def take(self) -> Carrier:
        """Return an empty carrier: a pipe, if the system has one."""
        if self._spare:
            return self._spare.pop()
        if self._has_pipes:
            with suppress(OSError):
                return Pipe()
        return Buffer()

    def give_back(self, carrier: Carrier) -> None:
        """Take back a carrier, which may hold bytes that are no longer needed."""
        if isinstance(carrier, Pipe) and not carrier.buffered and len(self._spare) < SPARE_PIPES:
            self._spare.append(carrier)
        else:
            carrier.close()

    def close(self) -> None:
        while self._spare:
            self._spare.pop().close()


class Relay:
    """Relays bytes from `source` to `sink`, both non-blocking; `count` is the number of bytes so far."""

    __slots__ = ("_carrier", "_carriers", "count", "has_ended", "sink", "source")

    def __init__(self, source: socket.socket, sink: socket.socket, carriers: Carriers) -> None:
        self.source, self.sink = source, sink
        self.count = 0
        self.has_ended = False
        self._carriers = carriers
        self._carrier: Carrier | None = None

    @property
    def is_stalled(self) -> bool:
        """Return whether there are bytes that the sink has not accepted yet."""
        return self._carrier is not None

    def receive(self, limit: int = CHUNK) -> int | None:
        """Read available bytes, while the relay isn't stalled. Return their number; None: none now; 0: the source has ended."""
        carrier = self._carriers.take()
        try:
            received = carrier.fill(self.source, limit)
        except BlockingIOError:
            received = None
        except BaseException:
            self._carriers.give_back(carrier)
            raise
        if received:
            self.count += received
            self._carrier = carrier
        else:
            self._carriers.give_back(carrier)
        return received

    def send(self) -> bool:
        """Write received bytes to the sink. Return whether it accepted all of them."""
        carrier = self._carrier
        if carrier is not None:
            try:
                while carrier.buffered:
                    carrier.drain(self.sink)
            except BlockingIOError:
                return False
            self.drop()
        return True

    def end(self) -> None:
        """Signal the end of the stream to the sink."""
        self.has_ended = True
        self.sink.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        """Drop the bytes in transit."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            self._carriers.give_back(carrier)


def sockets_can_splice() -> bool:
    """Return whether this system can splice from and to sockets: every Linux can, some emulations can't."""
    try:
        pipe = Pipe()
    except OSError:
        return True  # unknown without descriptors; `Carriers.take` tries again
    one, other = socket.socketpair()
    try:
        one.send(b"?")
        pipe.fill(other, 1)
        pipe.drain(other)
    except OSError:
        return False
    else:
        return one.recv(1) == b"?"
    finally:
        pipe.close()
        one.close()
        other.close()
