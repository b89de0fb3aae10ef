"""The memory of batches that readers were sent and have not taken yet: bounded for the hub as a whole.

A stream has one batch in memory, from when it is read until the reader has taken it. While those of all streams have `most` bytes, no other
batch is read, but for the few that are being read at that moment. Where that lasts because readers take nothing, the connection of the one
that has stood still longest is cut, so that the others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hub.errors import HubFull
from kvspool import system
from kvspool.handles import Handle

MOST = 256 << 20  # bytes
AT_ONCE = 4  # batches that are read at the same time: each may be one large record
PATIENCE = 10.0  # seconds for which a reader may take nothing while others wait for its memory
POLL = 0.25  # seconds between two looks whether a waiting client is still there


class Reads(Handle):
    """The streams of a hub. Thread-safe."""

    def __init__(self, most: int = MOST, patience: float = PATIENCE) -> None:
        self._most = most
        self._patience = patience
        self._streams: set[Stream] = set()
        self._held = 0
        self._reading = 0
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Return how many bytes were sent and not taken."""
        return self._held

    @contextmanager
    def stream(self, is_over: Callable[[], bool] = lambda: False, cut: Callable[[], object] = lambda: None) -> Iterator[Stream]:
        """Count a stream while the `with` block runs. is_over: whether its reader is gone; cut: cuts the reader's connection."""
        stream = Stream(self, is_over, cut)
        with self._changed:
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._changed:
                self._streams.discard(stream)
            self.hold(stream, 0)

    @contextmanager
    def turn(self, stream: Stream) -> Iterator[None]:
        """Wait until a batch may be read, and count it as being read while the `with` block runs. Raises HubFull if the
        reader is gone."""
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

    def hold(self, stream: Stream, size: int) -> None:
        """Count so many bytes of a stream as sent and not taken."""
        with self._changed:
            self._held += size - stream.held
            stream.held = size
            stream.since = system.port.monotonic()
            self._changed.notify_all()

    def _may_read(self) -> bool:
        return self._reading < AT_ONCE and (self._held < self._most or not self._held)

    def _cut_slowest(self) -> None:
        """Cut the reader that has taken nothing for longest, if that is too long. Its stream ends soon, and is not chosen again."""
        holding = [stream for stream in self._streams if stream.held]
        if self._held >= self._most and holding:
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
        self.held = 0
        self.since = 0.0
        self._reads = reads

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Say that the batch before was taken; wait until the next one may be read, and read it inside the `with` block. Raises HubFull
        if the reader is gone."""
        self._reads.hold(self, 0)
        if self.is_over():
            raise gone()
        with self._reads.turn(self):
            yield

    def sends(self, size: int) -> None:
        """Say that a batch of so many bytes is about to be sent."""
        self._reads.hold(self, size)


def gone() -> HubFull:
    """Return the error that ends a call whose client is gone; no client gets it."""
    return HubFull("the client is gone")
