"""The interface of a journal for producers; see `kvspool.producers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from kvspool import producers
from kvspool.engine.iteration import Iteration
from kvspool.engine.ledger import Ledger
from kvspool.errors import Unsupported
from kvspool.journal.cursor import Cursor
from kvspool.journal.format import Batch
from kvspool.log import CAPABILITIES
from kvspool.producers import Booking, ColumnPieces, Pieces
from kvspool.record import Record
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.columns import Columns
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Control, Page
    from kvspool.journal.format import Format
    from kvspool.options import Durability


T = TypeVar("T")


class Place(NamedTuple):
    """The ledger's location and the word `pending` of a journal, for the owner of the append lock."""

    directory: Path
    log_id: bytes
    mode: int
    control: Control

    def set_pending(self, number: int) -> None:
        self.control.set_pending(number)


class ListedRows:
    """Encoded records."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.count = batch.rows

    def records(self) -> list[tuple[bytes | None, bytes, int, int]]:
        batch = self.batch
        keys = batch.keys or [None] * self.count
        codecs = batch.codecs if batch.codecs is not None else bytes([batch.codec]) * self.count
        return [(key, value, batch.type, codec) for key, value, codec in zip(keys, batch.values, codecs, strict=True)]

    def chosen(self, numbers: list[int]) -> ListedRows:
        keys, values, codecs = self.batch.keys, self.batch.values, self.batch.codecs
        return ListedRows(
            self.batch._replace(
                keys=None if keys is None else [keys[number] for number in numbers],
                values=[values[number] for number in numbers],
                codecs=None if codecs is None else bytes(codecs[number] for number in numbers),
            )
        )


class ProducingJournal(Protocol):
    """What `kvspool.journal.Journal` does for its producers; see there."""

    path: Path
    format: Format
    timeout: float
    durability: Durability

    @property
    def kind(self) -> str: ...

    @property
    def log_id(self) -> bytes: ...

    def append_booked(self, rows: Any, booking: Booking, timeout: float | None, durable: bool) -> None: ...

    def cursor(self, start: int, *, bounded: bool = False, end: int | None = None) -> Cursor: ...

    def ensure_log_id(self, timeout: float | None = None) -> bytes: ...

    def first(self) -> int: ...

    def mode(self) -> int: ...

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Batch: ...

    def sync(self, timeout: float | None = None) -> int: ...

    def under_lock(self, timeout: float, work: Callable[[Appender, Page], T]) -> T: ...


class JournalProducing(Handle):
    """One journal, as its producers use it."""

    def __init__(self, log: ProducingJournal) -> None:
        """Raises Unsupported for a format without producers."""
        if not log.format.has_producers:
            raise Unsupported(log.kind, "producers", CAPABILITIES["producers"])
        self._log = log
        self.path = log.path
        self.timeout = log.timeout

    @property
    def is_durable(self) -> bool:
        return self._log.durability == "disk"

    def sync(self, timeout: float | None) -> None:
        self._log.sync(timeout)

    def prepared_rows(self, values: Iterable[Any], keys: Iterable[Any] | None, type: int, timestamp: int | None) -> ListedRows:
        return ListedRows(self._log.prepare(values, keys, type, timestamp))

    def columns(self, batch: Any, codec: int) -> Columns:
        from kvspool.journal.columns import JournalColumns

        return JournalColumns(batch, codec)

    def column_rows(self, pieces: Pieces, codec: int) -> ColumnPieces:
        for part, _ in pieces:
            self._log.format.check_columns(part)  # type: ignore[arg-type]
        return ColumnPieces(pieces, codec)

    def append_booked(self, rows: Any, booking: Booking, timeout: float | None, durable: bool) -> None:
        booking.is_durable = durable or self.is_durable
        self._log.ensure_log_id(timeout)
        self._log.append_booked(rows.batch if isinstance(rows, ListedRows) else _rows(rows), booking, timeout, durable)

    def change(self, change: Callable[[producers.Place, int], int], timeout: float | None = None) -> int:
        timeout = self._log.timeout if timeout is None else timeout
        return self._log.under_lock(timeout, lambda appender, page: change(self.place(appender.control), page.next_sequence))

    def place(self, control: Control) -> Place:
        """Return the location of an account, for the owner of the append lock."""
        return Place(self.path, self._log.log_id, self._log.mode(), control)

    def ledger(self) -> Ledger | None:
        return Ledger.open(self.path, self._log.log_id, to_read=True)

    def stored_records(self, first: int, count: int) -> Iterator[Record]:
        with closing(self._log.cursor(max(first, self._log.first()), bounded=True, end=first + count)) as cursor:
            for one in Iteration(cursor, None, "skip"):
                if first <= one.sequence < first + count:
                    yield one


def _rows(rows: ColumnPieces) -> Any:
    from kvspool.journal.columns import ColumnRows

    parts = [part for part, _ in rows.pieces]
    return ColumnRows(parts, [numbers for _, numbers in rows.pieces])  # type: ignore[arg-type]
