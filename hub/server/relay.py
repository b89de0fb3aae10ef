"""One way of a connection that is passed on: bytes that come from one socket go to another, and nobody looks into them.

Between two sockets lies a pipe, and `splice` moves the bytes through it inside the kernel: they never come to user space. A flow reads only
when all that it had read has gone on, so a sink that takes nothing stops its source; what lies between them is at most what a pipe
takes. Idle flows hold no pipe, they share a few. Where the system has no more descriptors for a pipe, or no splice for sockets, a buffer
of a smaller size does the same by `recv` and `send`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from typing import Protocol

CHUNK = 1 << 18  # bytes that are moved at once: larger ones were no faster
BUFFER_CHUNK = 1 << 16
SPARE_PIPES = 4
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC)  # nothing is left of what a socket or a pipe needs


class Carrier(Protocol):
    """What holds the bytes on their way: `held` says how many. Both calls raise BlockingIOError rather than wait."""

    @property
    def held(self) -> int: ...

    def fill(self, source: socket.socket, limit: int) -> int:
        """Take in what the source has, while nothing is held; returns how many bytes, `limit` at most. 0: the source has ended."""

    def drain(self, sink: socket.socket) -> None:
        """Give the sink some of what is held."""

    def close(self) -> None: ...


class Pipe:
    """Carries bytes inside the kernel. Raises OSError where there are no descriptors for it."""

    def __init__(self) -> None:
        self.held = 0
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with suppress(OSError):  # above what the kernel grants a user, a pipe keeps the size that it has
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, CHUNK)

    def fill(self, source: socket.socket, limit: int) -> int:
        self.held = os.splice(source.fileno(), self._in, min(limit, CHUNK), flags=os.SPLICE_F_NONBLOCK)
        return self.held

    def drain(self, sink: socket.socket) -> None:
        self.held -= os.splice(self._out, sink.fileno(), self.held, flags=os.SPLICE_F_NONBLOCK)

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)


class Buffer:
    """Carries bytes through user space, where there is nothing better."""

    def __init__(self) -> None:
        self._data = memoryview(b"")

    @property
    def held(self) -> int:
        return len(self._data)

    def fill(self, source: socket.socket, limit: int) -> int:
        self._data = memoryview(source.recv(min(limit, BUFFER_CHUNK)))
        return len(self._data)

    def drain(self, sink: socket.socket) -> None:
        self._data = self._data[sink.send(self._data) :]

    def close(self) -> None:
        self._data = memoryview(b"")


class Carriers:
    """Lends carriers to the flows of one thread."""

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
        """Take back a carrier, which may hold bytes that nobody wants any more."""
        if isinstance(carrier, Pipe) and not carrier.held and len(self._spare) < SPARE_PIPES:
            self._spare.append(carrier)
        else:
            carrier.close()

    def close(self) -> None:
        while self._spare:
            self._spare.pop().close()


class Relay:
    """Passes on what comes from `source` to `sink`, both of which never block; `count` is how many bytes came so far."""

    __slots__ = ("_carrier", "_carriers", "count", "has_ended", "sink", "source")

    def __init__(self, source: socket.socket, sink: socket.socket, carriers: Carriers) -> None:
        self.source, self.sink = source, sink
        self.count = 0
        self.has_ended = False
        self._carriers = carriers
        self._carrier: Carrier | None = None

    @property
    def is_stalled(self) -> bool:
        """Return whether there are bytes that the sink did not take yet."""
        return self._carrier is not None

    def receive(self, limit: int = CHUNK) -> int | None:
        """Take in what there is, while the flow isn't stalled. Returns how many bytes; None: nothing now; 0: nothing ever again."""
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
        """Give the sink what was received; returns whether it took all."""
        carrier = self._carrier
        if carrier is not None:
            try:
                while carrier.held:
                    carrier.drain(self.sink)
            except BlockingIOError:
                return False
            self.drop()
        return True

    def end(self) -> None:
        """Tell the sink that nothing more will come."""
        self.has_ended = True
        self.sink.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        """Give up what is on its way."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            self._carriers.give_back(carrier)


def sockets_can_splice() -> bool:
    """Return whether this system can splice from and to sockets: every Linux does, not everything that calls itself one."""
    try:
        pipe = Pipe()
    except OSError:
        return True  # ask again when there are descriptors: `Carriers.take` does
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
