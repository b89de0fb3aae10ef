"""The limit of memory of batches that were sent to readers and not yet received, for the whole hub.

A stream holds one batch in memory, from reading it until the reader has received it. While all streams hold `most` bytes, no other batch is
read, except those in progress. If that lasts because readers receive nothing, the longest stalled one's connection is cut, so that the
others can continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hub.errors import HubFull
from kvspool import system
from kvspool.system.handles import Handle

MOST = 256 << 20  # bytes
AT_ONCE = 4  # concurrently read batches: each may be one large record
PATIENCE = 10.0  # seconds that a reader may stall while others wait for its memory
POLL = 0.25  # seconds between two checks whether a waiting client is still connected


class Reads(Handle):
    """The streams of a hub. Thread-safe."""

    def __init__(self, most: int = MOST, patience: float = PATIENCE) -> None:
        self._most = most
        self._patience = patience
        self._streams: set[Stream] = set()
        self._unread = 0
        self._reading = 0
        self._changed = threading.Condition()

    @property
    def unread(self) -> int:
        """Return how many bytes were sent and not received."""
        return self._unread

    @contextmanager
    def stream(self, is_over: Callable[[], bool] = lambda: False, cut: Callable[[], object] = lambda: None) -> Iterator[Stream]:
        """Count a stream inside the `with` block. is_over: whether its reader is gone; cut: cuts the reader's connection."""
        stream = Stream(self, is_over, cut)
        with self._changed:
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._changed:
                self._streams.discard(stream)
            self.count_unread(stream, 0)

    @contextmanager
    def turn(self, stream: Stream) -> Iterator[None]:
        """Wait for the permission to read a batch, and count it as being read inside the `with` block. Raises HubFull if the reader is
        gone.
        """
        with self._changed:
            while not self._may_read():
                if stream.is_over():
                    raise gone()
                self._cut_slowest()
                self._changed.wait(POLL)
            self._reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def count_unread(self, stream: Stream, size: int) -> None:
        """Count bytes of a stream as sent and not received."""
        with self._changed:
            self._unread += size - stream.unread
            stream.unread = size
            stream.since = system.port.monotonic()
            self._changed.notify_all()

    def _may_read(self) -> bool:
        return self._reading < AT_ONCE and (self._unread < self._most or not self._unread)

    def _cut_slowest(self) -> None:
        """Cut the longest stalled reader, if it exceeds the limit. Its stream ends soon, and is not chosen again."""
        holding = [stream for stream in self._streams if stream.unread]
        if self._unread >= self._most and holding:
            slowest = min(holding, key=lambda stream: stream.since)
            now = system.port.monotonic()
            if now - slowest.since > self._patience:
                slowest.since = now
                slowest.cut()


class Stream:
    """One stream, used by the thread of its call."""

    def __init__(self, reads: Reads, is_over: Callable[[], bool], cut: Callable[[], object]) -> None:
        self.is_over = is_over
        self.cut = cut
        self.unread = 0
        self.since = 0.0
        self._reads = reads

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note that the previous batch was received; wait for the permission to read the next one, and read it inside the `with` block.

        Raises HubFull if the reader is gone.
        """
        self._reads.count_unread(self, 0)
        if self.is_over():
            raise gone()
        with self._reads.turn(self):
            yield

    def sends(self, size: int) -> None:
        """Note that a batch of `size` bytes is about to be sent."""
        self._reads.count_unread(self, size)


def gone() -> HubFull:
    """Return the error that ends a call whose client is gone; no client gets it."""
    return HubFull("the client is gone")
