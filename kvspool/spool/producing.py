"""The interface of a spool for producers; see `kvspool.producers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvspool import producers, system
from kvspool.engine.iteration import Iteration
from kvspool.engine.ledger import Ledger
from kvspool.kernel import frames_py as frames
from kvspool.producers import Booking, ColumnPieces, Pieces
from kvspool.record import Record
from kvspool.spool.cursor import Cursor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.columns import Columns
    from kvspool.spool.appending import Prepared
    from kvspool.spool.pair import Pair


class Place(NamedTuple):
    """The ledger's location and the word `pending` of a spool, for the owner of the append lock."""

    directory: Path
    log_id: bytes
    mode: int
    words: memoryview

    @classmethod
    def of(cls, pair: Pair) -> Place:
        with pair.held_open():
            mode = system.port.status(pair.control_fd).st_mode & 0o777
        return cls(pair.path, pair.origin, mode, pair.control.cast("Q"))

    def set_pending(self, number: int) -> None:
        self.words[frames.PENDING] = number


class ListedRows:
    """A prepared batch."""

    def __init__(self, batch: Prepared) -> None:
        self.batch = batch
        self.count = len(batch.values)

    def records(self) -> list[tuple[bytes | None, bytes, int, int]]:
        batch = self.batch
        keys = batch.keys or [None] * self.count
        return [(key, value, batch.type, codec) for key, value, codec in zip(keys, batch.values, batch.codecs, strict=True)]

    def chosen(self, numbers: list[int]) -> ListedRows:
        keys, values, codecs = self.batch.keys, self.batch.values, self.batch.codecs
        return ListedRows(
            self.batch._replace(
                keys=None if keys is None else [keys[number] for number in numbers],
                values=[values[number] for number in numbers],
                codecs=bytes(codecs[number] for number in numbers),
                stored=0,
            )
        )


class Appending(Protocol):
    """What a spool does for its producers; see `kvspool.spool.Spool`."""

    path: Path
    timeout: float
    is_durable: bool

    @property
    def log_id(self) -> bytes: ...

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Prepared: ...

    def check_columns(self, parts: list[Columns], codec: int) -> None: ...

    def append_booked(self, batch: Any, booking: Booking, timeout: float | None, durable: bool) -> None: ...

    def change_accounts(self, change: Callable[[Place, int], int], timeout: float | None = None) -> int: ...

    def cursor(self, start: int, *, bounded: bool = False, end: int | None = None) -> Cursor: ...

    def sync(self, timeout: float | None = None) -> int: ...


class SpoolProducing(Handle):
    """One spool, as its producers use it."""

    def __init__(self, log: Appending) -> None:
        self._log = log
        self.path = log.path
        self.timeout = log.timeout

    @property
    def is_durable(self) -> bool:
        return self._log.is_durable

    def sync(self, timeout: float | None) -> None:
        self._log.sync(timeout)

    def prepared_rows(self, values: Iterable[Any], keys: Iterable[Any] | None, type: int, timestamp: int | None) -> ListedRows:
        return ListedRows(self._log.prepare(values, keys, type, timestamp))

    def columns(self, batch: Any, codec: int) -> Columns:
        from kvspool.engine import columns

        return columns.Columns(batch)

    def column_rows(self, pieces: Pieces, codec: int) -> ColumnPieces:
        self._log.check_columns([part for part, _ in pieces], codec)
        return ColumnPieces(pieces, codec)

    def append_booked(self, rows: Any, booking: Booking, timeout: float | None, durable: bool) -> None:
        booking.is_durable = durable = durable or self._log.is_durable
        self._log.append_booked(rows.batch if isinstance(rows, ListedRows) else rows, booking, timeout, durable)

    def change(self, change: Callable[[producers.Place, int], int], timeout: float | None = None) -> int:
        return self._log.change_accounts(change, timeout)

    def ledger(self) -> Ledger | None:
        return Ledger.open(self._log.path, self._log.log_id, to_read=True)

    def stored_records(self, first: int, count: int) -> Iterator[Record]:
        cursor = self._log.cursor(first, bounded=True, end=first + count)
        for one in Iteration(cursor, None, "skip"):
            if first <= one.sequence < first + count:
                yield one
