"""The interface of a spool for producers; see `kvspool.producers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvspool.engine.iteration import Iteration
from kvspool.engine.producer_table import ProducerTable
from kvspool.producers import BatchTransaction, ColumnPieces, ListedRows, Pieces, TableLocation
from kvspool.record import Record
from kvspool.spool.cursor import RingCursor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.columns import Columns
    from kvspool.spool.appending import Prepared


class ProducingSpool(Protocol):
    """The methods of a spool that its producers use; see `kvspool.spool.Spool`."""

    path: Path
    timeout: float
    is_durable: bool

    @property
    def log_id(self) -> bytes: ...

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Prepared: ...

    def columns_of(self, batch: Any, codec: int) -> Columns: ...

    def prepare_columns(self, parts: list[Columns], rows: None = None, codec: int = 0) -> Any: ...

    def append_in_transaction(self, batch: Any, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None: ...

    def change_producers(self, change: Callable[[TableLocation, int], int], timeout: float | None = None) -> int: ...

    def cursor(self, start: int, *, bounded: bool = False, end: int | None = None) -> RingCursor: ...

    def sync(self, timeout: float | None = None) -> int: ...


class SpoolProducing(Handle):
    """One spool, as its producers use it."""

    def __init__(self, log: ProducingSpool) -> None:
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
        return self._log.columns_of(batch, codec)

    def column_rows(self, pieces: Pieces, codec: int) -> ColumnPieces:
        self._log.prepare_columns([part for part, _ in pieces], None, codec)
        return ColumnPieces(pieces, codec)

    def append_in_transaction(self, rows: Any, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None:
        transaction.is_durable = durable = durable or self._log.is_durable
        batch = rows.batch._replace(stored=0) if isinstance(rows, ListedRows) else rows  # its size is unknown if some rows were chosen
        self._log.append_in_transaction(batch, transaction, timeout, durable)

    def change(self, change: Callable[[TableLocation, int], int], timeout: float | None = None) -> int:
        return self._log.change_producers(change, timeout)

    def producer_table(self) -> ProducerTable | None:
        return ProducerTable.open(self._log.path, self._log.log_id, to_read=True)

    def stored_records(self, first: int, count: int) -> Iterator[Record]:
        cursor = self._log.cursor(first, bounded=True, end=first + count)
        for one in Iteration(cursor, None, "skip"):
            if first <= one.sequence < first + count:
                yield one
