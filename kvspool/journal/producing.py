"""The interface of a journal for producers; see `kvspool.producers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvspool.engine.iteration import Iteration
from kvspool.engine.producer_table import ProducerTable
from kvspool.journal.cursor import SegmentCursor
from kvspool.journal.format import JournalBatch
from kvspool.log import unsupported
from kvspool.producers import BatchTransaction, ColumnPieces, ListedRows, Pieces, TableLocation
from kvspool.record import Record
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.columns import Columns
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Control, Page
    from kvspool.journal.format import Format
    from kvspool.options import Durability


T = TypeVar("T")


class ProducingJournal(Protocol):
    """The part of `kvspool.journal.Journal` for its producers."""

    path: Path
    format: Format
    timeout: float
    durability: Durability

    @property
    def kind(self) -> str: ...

    @property
    def log_id(self) -> bytes: ...

    def append_in_transaction(self, rows: Any, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None: ...

    def cursor(self, start: int, *, bounded: bool = False, end: int | None = None) -> SegmentCursor: ...

    def ensure_log_id(self, timeout: float | None = None) -> bytes: ...

    def first(self) -> int: ...

    def columns_of(self, batch: Any, codec: int) -> Columns: ...

    def mode(self) -> int: ...

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> JournalBatch: ...

    def sync(self, timeout: float | None = None) -> int: ...

    def under_lock(self, timeout: float, work: Callable[[Appender, Page], T]) -> T: ...


class JournalProducing(Handle):
    """One journal, as its producers use it."""

    def __init__(self, log: ProducingJournal) -> None:
        """Raises Unsupported for a format without producers."""
        if not log.format.has_producers:
            raise unsupported(log.kind, "producers")
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
        return self._log.columns_of(batch, codec)

    def column_rows(self, pieces: Pieces, codec: int) -> ColumnPieces:
        for part, _ in pieces:
            self._log.format.check_columns(part)  # type: ignore[arg-type]
        return ColumnPieces(pieces, codec)

    def append_in_transaction(self, rows: Any, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None:
        transaction.is_durable = durable or self.is_durable
        self._log.ensure_log_id(timeout)
        self._log.append_in_transaction(rows.batch if isinstance(rows, ListedRows) else _rows(rows), transaction, timeout, durable)

    def change(self, change: Callable[[TableLocation, int], int], timeout: float | None = None) -> int:
        timeout = self._log.timeout if timeout is None else timeout
        return self._log.under_lock(timeout, lambda appender, page: change(self.location(appender.control), page.next_sequence))

    def location(self, control: Control) -> TableLocation:
        """Return the location of the producer table, for the owner of the append lock."""
        return TableLocation(self.path, self._log.log_id, self._log.mode(), control.set_pending)

    def producer_table(self) -> ProducerTable | None:
        return ProducerTable.open(self.path, self._log.log_id, to_read=True)

    def stored_records(self, first: int, count: int) -> Iterator[Record]:
        with closing(self._log.cursor(max(first, self._log.first()), bounded=True, end=first + count)) as cursor:
            for one in Iteration(cursor, None, "skip"):
                if first <= one.sequence < first + count:
                    yield one


def _rows(rows: ColumnPieces) -> Any:
    from kvspool.journal.columns import ColumnRows

    parts = [part for part, _ in rows.pieces]
    return ColumnRows(parts, [numbers for _, numbers in rows.pieces])  # type: ignore[arg-type]
