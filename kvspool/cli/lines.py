"""Read lines in batches that never wait for later input."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kvspool.cli.options import BadInput
from kvspool.engine import sizes
from kvspool.system.handles import Handle

CHUNK = 1 << 16  # bytes; the size of a pipe
BATCH_BYTES = 1 << 20  # bytes; limits a batch of long lines
LOOK = 0.5  # seconds between two looks for a signal that another thread, such as one that flushes, has received


def standard_input(command: str) -> int:
    """Return the descriptor of standard input, and say how to end it on a terminal. Raises BadInput if it is closed."""
    if sys.stdin is None:
        raise BadInput(f"standard input is closed; {command} reads lines from it")
    fd = sys.stdin.fileno()
    if os.isatty(fd):
        print("one record a line; Ctrl-D ends", file=sys.stderr)
    return fd


@dataclass(frozen=True)
class LineBatch:
    """Some lines, without their line ends; `first` is the number of the first one, counted from 1."""

    first: int
    lines: list[bytes]

    def __str__(self) -> str:
        last = self.first + len(self.lines) - 1
        return f"line {last}" if last == self.first else f"lines {self.first} to {last}"


class LineReader(Handle):
    """Reads lines from a descriptor, without Python's buffers, so that `select` shows whether more input is available."""

    def __init__(self, fd: int, *, most: int, longest: int) -> None:
        """Read from `fd`, in batches of at most `most` lines; a line of more than `longest` bytes is BadInput."""
        self._fd = fd
        self._most = most
        self._longest = longest
        self._lines: list[bytes] = []
        self._bytes = 0
        self._first = 1
        self._rest = bytearray()

    def batches(self) -> Iterator[LineBatch]:
        """Yield the batches: when one is full, when the input pauses, and at its end."""
        while True:
            ready, _, _ = select.select([self._fd], [], [], 0 if self._lines else LOOK)
            if not ready:
                if self._lines:
                    yield self._take()
                continue
            chunk = os.read(self._fd, CHUNK)
            if not chunk:
                break
            *lines, end = chunk.split(b"\n")
            for line in lines:
                self._add(line)
                if len(self._lines) == self._most or self._bytes >= BATCH_BYTES:
                    yield self._take()
            self._rest += end
            if len(self._rest) > self._longest:
                raise BadInput(f"line {self._first + len(self._lines)} is longer than {sizes.show(self._longest)}")
        if self._rest:
            self._add(b"")
        if self._lines:
            yield self._take()

    def _add(self, line: bytes) -> None:
        if self._rest:
            line = bytes(self._rest) + line
            self._rest.clear()
        self._lines.append(line)
        self._bytes += len(line)

    def _take(self) -> LineBatch:
        batch = LineBatch(self._first, self._lines)
        self._first += len(self._lines)
        self._lines, self._bytes = [], 0
        return batch
