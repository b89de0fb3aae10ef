"""A task's input from hubs: a range of a shard's sequences, streamed.

Every sequence arrives in a batch or in a Gap. Each stream continues after the received items, so nothing is repeated or silently missing. A
range names the files of its secrets, which the task's host must have; only a token given as text is sent along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hub.errors import Fenced, Malformed, NotAllowed, NotFound, ShardDamaged, Unexpected
from hub.protocol.reading import Ticket
from hub.root.store import PRIVATE, generations
from hub.spark.endpoints import LATER, Backoff, HubEndpoint, connected, disconnect, is_repeated
from hub.spark.errors import DataLossError
from hub.spark.shards import ShardRange
from kvspool import Gap
from kvspool.errors import KvspoolError
from kvspool.options import TIMEOUT as LOCK_TIMEOUT
from kvspool.options import Isolation
from kvspool.system import disk
from shard import route
from shard.shardset import open_shard

if TYPE_CHECKING:
    import pyarrow

    from hub.client.remote import RemoteHub


class Part(NamedTuple):
    """A hub's part of a shard: the sequences first..end-1. root: id of the hub's root; bits: the client has 2^bits shards; answered: when
    the hub last answered the driver, in seconds since 1970.
    """

    endpoint: HubEndpoint
    root: str
    bits: int
    first: int
    end: int
    answered: float = 0.0


@dataclass(frozen=True)
class HubRange(ShardRange):
    """Sequences of a shard at hubs.

    parts: the hub with the newest ones first; columns: the columns of `kvspool.arrow.SCHEMA` to read, None for all; local_root: the hub's
    root, which a task on the hub's host reads directly.
    """

    parts: tuple[Part, ...]
    isolation: Isolation = "appended"
    columns: frozenset[str] | None = None
    local_root: Path | None = None

    def batches(self) -> Iterator[pyarrow.RecordBatch | Gap]:
        """See `ShardRange.batches`; the batches have the selected columns. Raises Unreachable, NotAllowed, ShardDamaged."""
        yield from self._read(self.parts, self.first, self.end)

    def _read(self, parts: tuple[Part, ...], first: int, end: int, reason: str = "trimmed") -> Iterator[pyarrow.RecordBatch | Gap]:
        """Yield the records of the first hub; the next one may have those that it lacks. reason: of a Gap of records that no hub has."""
        part, others = parts[0], parts[1:]
        if end > part.end:  # an older hub doesn't have it
            yield from self._read(parts, first, part.end, reason) if first < part.end else ()
            yield Gap(max(first, part.end), end - 1, reason, self._where(part))
            return
        for item in self._from(part, first, end):
            if isinstance(item, Gap) and others:
                yield from self._read(others, item.first, item.last + 1, item.reason)
            else:
                yield item

    def _from(self, part: Part, first: int, end: int) -> Iterator[pyarrow.RecordBatch | Gap]:
        path = self._local_path(part)
        if path is not None:
            yield from self._directly(path, first, end)
        else:
            yield from self._streamed(part, first, end)

    # Over the network.

    def _streamed(self, part: Part, next: int, end: int) -> Iterator[pyarrow.RecordBatch | Gap]:
        """Stream from a hub. A new stream continues after the items of a broken one, and nothing is repeated."""
        backoff = Backoff(part.endpoint, part.answered if is_repeated() else None)
        while next < end:
            try:
                backoff.begin()
                hub, is_new = connected(part.endpoint)
                try:
                    for item, after in self._checked(hub, part, next, end):
                        backoff.succeeded()
                        next = after
                        yield item
                        backoff.begin()  # the reader may have taken its time
                except NotAllowed as error:
                    if is_new:
                        raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {self._where(part)}: {error}") from None
                    disconnect(part.endpoint)  # the token may have changed
                    continue
            except ShardDamaged as error:
                raise ShardDamaged(f"[KVSPOOL_SHARD_DAMAGED] {self._where(part)}, from sequence {next}: {error}") from None
            except LATER as error:
                disconnect(part.endpoint)
                backoff.failed(error)
                backoff.pause()

    def _checked(self, hub: RemoteHub, part: Part, next: int, end: int) -> Iterator[tuple[pyarrow.RecordBatch | Gap, int]]:
        """Yield the items of a stream up to the end, each with the sequence after it. Raises Malformed if any is silently missing."""
        from hub.root.columns import SequencedBatch

        columns = None if self.columns is None else _in_order(self.columns)
        ticket = Ticket(*self.key, next, end, isolation=self.isolation, columns=columns, log=self.log_id)
        try:
            for item in hub.items(ticket, part.endpoint.stream):
                if isinstance(item, int):
                    is_next = item <= next or next == end  # the hub may have stopped after the end, in a Gap
                else:
                    is_next = item.first == next and (item.end if isinstance(item, SequencedBatch) else item.last + 1) <= end
                if not is_next:
                    raise Malformed(f"[KVSPOOL_DATA_LOSS] {self._where(part)}: sequence {next} is missing in the hub's answer")
                if isinstance(item, SequencedBatch):
                    next = item.end
                    yield item.batch, next
                elif isinstance(item, Gap):
                    next = item.last + 1
                    yield item, next
        except (Fenced, NotFound, Unexpected) as error:
            raise self._replaced(str(error)) from None
        if next < end:
            raise self._replaced(f"it ends at sequence {next}")

    # On the hub's own host.

    def _local_path(self, part: Part) -> Path | None:
        """Return the directory of the shard if this host has the root of this hub."""
        if self.local_root is None:
            return None
        root = self.local_root
        with suppress(OSError, KvspoolError):
            if disk.read(root / PRIVATE / "id", 64).decode("ascii", "replace").strip() == part.root:
                return root / route.directory_name(self.key.topic, part.bits, self.key.partition)
        return None

    def _directly(self, path: Path, first: int, end: int) -> Iterator[pyarrow.RecordBatch | Gap]:
        from kvspool import arrow

        with closing(open_shard(path, LOCK_TIMEOUT)) as log:
            known = generations(log, path, log.end())
            if log.end() < end or [one.log for one in known[:1]] != [self.log_id]:
                raise self._replaced(f"{path} has another log, or ends at sequence {log.end()}")
            if self.isolation == "synced":
                log.sync()
            with closing(log.cursor(first, bounded=True, end=end)) as cursor:
                for item in arrow.batches(cursor):
                    yield item if isinstance(item, Gap) or self.columns is None else item.select(_in_order(self.columns))

    def _replaced(self, why: str) -> DataLossError:
        return DataLossError(
            f"[KVSPOOL_LOG_REPLACED] topic {self.key.topic}, partition {self.key.partition}: the log at the hub was replaced since the "
            f"query was planned: {why}; run the query again, a stream from a new checkpoint"
        )

    def _where(self, part: Part) -> str:
        return f"{part.endpoint.location}/{self.key.topic}/{self.key.partition}"


def _in_order(columns: frozenset[str]) -> list[str]:
    from kvspool import arrow

    return [name for name in arrow.SCHEMA.names if name in columns]
