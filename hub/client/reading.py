"""Read the records of one shard of a hub one by one, over the batches that the hub sends."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hub.root.records import HubRecord
from kvspool.engine.iteration import check
from kvspool.errors import GapError
from kvspool.options import OnGap
from kvspool.record import Gap
from kvspool.system.handles import ClosingHandle

if TYPE_CHECKING:
    import pyarrow

R = TypeVar("R", covariant=True)
COLUMNS = ("sequence", "timestamp", "type", "key", "value", "codec")


class RemoteReading(Iterator[R], ClosingHandle, Generic[R]):
    """Iterates over the records (`HubRecord`) of a shard, and over Gaps according to `on_gap`. `missed`: sequences in Gaps so far."""

    def __init__(self, batches: Generator[pyarrow.RecordBatch | Gap], client: str, shard: int, on_gap: OnGap) -> None:
        check(None, on_gap)
        self.missed = 0
        self._batches = batches
        self._on_gap = on_gap
        self._client = client
        self._shard = shard
        self._rows: Iterator[tuple[Any, ...]] = iter(())

    def __next__(self) -> R:
        while (row := next(self._rows, None)) is None:
            item = next(self._batches)
            if not isinstance(item, Gap):
                columns = [item.column(name) for name in COLUMNS]
                columns[1] = columns[1].cast("int64")
                self._rows = zip(*(column.to_pylist() for column in columns), strict=True)
                continue
            self.missed += item.count
            if self._on_gap == "raise":
                raise GapError(item)
            if self._on_gap == "yield":
                return item  # type: ignore[return-value]  # `R` includes Gap then
        sequence, timestamp, type, key, value, codec = row
        found: Any = HubRecord(sequence, timestamp, type, key, value, codec, shard=self._shard, client=self._client)
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the iteration, and the stream of the hub."""
        self._rows = iter(())
        self._batches.close()
