"""The source of a copy: a spool, a journal, a queue, or a directory of kvspool v1, read in batches of columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kvspool.engine.iteration import Iteration, gathered
from kvspool.engine.rows import AROUND, BYTES, ROWS, VALUES, Room, Rows, batches, values_of
from kvspool.errors import OutOfRange
from kvspool.log import Log
from kvspool.opening import logs, v1
from kvspool.options import Start
from kvspool.record import Codec, Gap
from kvspool.system.handles import Handle
from kvspool.transfer import queues

_to_msgpack = msgspec.msgpack.Encoder().encode


class Source(ABC):
    """A source. room: fields that its records can store; torn: places of incomplete frames."""

    format: str
    room: Room
    has_sequences = True  # its own sequences, which stay the same while others use it

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn: list[str] = []

    @abstractmethod
    def range(self) -> range:
        """Return the present sequences, as far as they are known."""

    @abstractmethod
    def begin(self, start: Start) -> int:
        """Return the sequence of a start; see `Log.read`."""

    @abstractmethod
    def read(self, start: int, end: int | None) -> Iterator[Rows | Gap]:
        """Yield the present records from one sequence up to another, which is not included."""

    @abstractmethod
    def most_bytes(self) -> int:
        """Return an upper bound for the bytes of keys and values."""

    @property
    def identity(self) -> list[str]:
        """Return the identity of the source, by which a resumed copy recognizes it."""
        return [self.format, str(self.path)]

    @property
    def options(self) -> dict[str, Any]:
        """Return options for a log of the same format; other formats use only its codec."""
        return {}

    def one(self, sequence: int) -> Rows | None:
        """Return the record with a sequence; None if it doesn't exist."""
        if sequence not in self.range():
            return None
        found = next(self.read(sequence, sequence + 1), None)
        return found if isinstance(found, Rows) else None

    @abstractmethod
    def close(self) -> None:
        """Release all files and locks."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LogSource(Source, Handle):
    """A spool or a journal."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.path)
        self._log = log
        self.format = log.kind
        self.room = log.room
        self.log_id = log.log_id.hex() if log.always_has_id else ""

    @property
    def identity(self) -> list[str]:
        return [*super().identity, self.log_id]

    @property
    def options(self) -> dict[str, Any]:
        return {"codec": self._log.stats().codec, **self._log.limits()}

    def range(self) -> range:
        return range(*self._log.extent())

    def begin(self, start: Start) -> int:
        return self.range().start if start == "earliest" else self._log.sequence_at(start)

    def read(self, start: int, end: int | None) -> Iterator[Rows | Gap]:
        return batches(Iteration(self._log.cursor(start, bounded=True, end=end)), has_times=self.room.timestamps, rows=ROWS)

    def most_bytes(self) -> int:
        return self._log.stats().used

    def close(self) -> None:
        self._log.close()


class QueueSource(Source, Handle):
    """The entries of a queue, which stay there. They are numbered from 0 on, so a copy can resume only if none was taken meanwhile."""

    format = "queue"
    room = VALUES
    has_sequences = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._queue = queues.open(path)
        self._first = queues.first(self._queue)

    @property
    def identity(self) -> list[str]:
        return [*super().identity, *map(str, self._first)]

    def range(self) -> range:
        return range(self._queue.qsize())

    def begin(self, start: Start) -> int:
        return _number(start, self.range())

    def read(self, start: int, end: int | None) -> Iterator[Rows | Gap]:
        yield from _batches(iter(self._queue), start, end, Codec.RAW)

    def most_bytes(self) -> int:
        return int(self._queue.stats().bytes)

    def close(self) -> None:
        self._queue.close()


class V1Source(Source, Handle):
    """A directory of kvspool v1: its records are numbered from 0 on. Their values are maps of strings, here in MessagePack."""

    format = "v1"
    room = Room(codecs=True)
    unread = False  # only records after the position of its reader

    def range(self) -> range:
        return range(sum(1 for _ in v1.records(self.path, unread=self.unread, torn=[])))

    def begin(self, start: Start) -> int:
        return 0 if start == "earliest" else _number(start, self.range())

    def read(self, start: int, end: int | None) -> Iterator[Rows | Gap]:
        torn: list[str] = []
        values = (_to_msgpack(pairs) for pairs in v1.records(self.path, unread=self.unread, torn=torn))
        yield from _batches(values, start, end, Codec.KEYED)
        self.torn = torn

    def most_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir())

    def close(self) -> None:
        return None


def _number(start: Start, there: range) -> int:
    if isinstance(start, str):
        return there.start if start == "earliest" else there.stop
    if not isinstance(start, int):
        raise OutOfRange("there are no times; start from a number")
    if not there.start <= start <= there.stop:
        raise OutOfRange(f"{start} is outside the numbers of the records, 0 to {there.stop}")
    return start


def _batches(values: Iterator[bytes], start: int, end: int | None, codec: int) -> Iterator[Rows]:
    for batch in gathered(islice(values, start, end), _value_bytes, ROWS, BYTES):
        yield values_of(start, batch, codec)
        start += len(batch)


def _value_bytes(value: bytes) -> int:
    return len(value) + AROUND


def open(path: Path, format: str | None, options: dict[str, Any], timeout: float) -> Source:
    """Open a source.

    format: of the source, None: detect it; options: those of `kvspool.open` for that format. Raises the errors of `kvspool.open`.
    """
    if format == "v1" or (format is None and v1.is_spool(path)):
        return V1Source(path)
    if format == "queue" or (format is None and queues.is_queue(path)):
        return QueueSource(path)
    return LogSource(logs.open(path, format=format, timeout=timeout, **options))
