"""A task's input from hubs: a range of a shard's sequences, streamed.

Every sequence arrives in a batch or in a Gap, from any hub that has it; see `hub.client.copies`. A range names the files of its secrets,
which the task's host must have; only a token given as text is sent along.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from hub.client.copies import Answer, Copy, CopyReader, HubLink
from hub.client.outage import FIRST_BACKOFF, LONGEST_BACKOFF
from hub.client.timeline import Table
from hub.errors import Fenced, HubError, HubFull, NotAllowed, NotFound, QuotaExceeded, ShardDamaged, Unexpected, Unreachable
from hub.protocol.reading import ShardState, Ticket
from hub.root.store import PRIVATE, generations
from hub.spark import endpoints
from hub.spark.endpoints import HubEndpoint
from hub.spark.errors import DataLossError
from hub.spark.shards import ShardKey, ShardRange
from kvspool import Gap, system
from kvspool.errors import KvspoolError, OutOfRange
from kvspool.options import TIMEOUT as LOCK_TIMEOUT
from kvspool.options import Isolation
from kvspool.system import disk
from shard import route
from shard.shardset import open_shard

if TYPE_CHECKING:
    import pyarrow

    from hub.root.columns import SequencedBatch
    from shard.merged import Log


class Part(NamedTuple):
    """A hub's part of a shard.

    root: id of the hub's root; state: of the shard, as the driver has seen it, None if it has not; answered: when the hub last answered the
    driver, in seconds since 1970; away: why it doesn't answer the driver, "" if it does.
    """

    endpoint: HubEndpoint
    root: str
    state: ShardState | None
    answered: float = 0.0
    away: str = ""


@dataclass(frozen=True)
class HubRange(ShardRange):
    """Sequences of a shard at hubs.

    parts: the preferred hub first; columns: the columns of `kvspool.arrow.SCHEMA` to read, None for all; local_root: the hub's root, which
    a task on the hub's host reads directly; table: the logs of the sequences, see `hub.client.timeline`.
    """

    parts: tuple[Part, ...]
    isolation: Isolation = "appended"
    columns: frozenset[str] | None = None
    local_root: Path | None = None
    table: Table = ()

    def batches(self) -> Iterator[pyarrow.RecordBatch | Gap]:
        """See `ShardRange.batches`; the batches have the selected columns. Raises Unreachable, NotAllowed, ShardDamaged."""
        copies = [self._copy(part) for part in self.parts]
        columns = None if self.columns is None else _in_order(self.columns)
        ticket = Ticket(*self.key, isolation=self.isolation, columns=columns, log=self.log_id)
        reader = CopyReader(ticket, self.table, copies, _Patience(self).wait)
        try:
            with closing(reader.read(self.first, self.end)) as items:
                for item in items:
                    yield item if isinstance(item, Gap) else item.batch
        finally:
            for copy, part in zip(copies, self.parts, strict=True):
                endpoints.note_failure(part.endpoint, copy.outage.why)

    def _copy(self, part: Part) -> Copy:
        is_repeated = endpoints.is_repeated()
        outage = endpoints.outage_of(part.endpoint, part.answered if is_repeated else None, part.away)
        if is_repeated:
            endpoints.disconnect(part.endpoint)  # an old connection may be broken, and the task may have only one attempt
        path = self._local_path(part)
        if path is not None:
            return Copy(str(path), outage, lambda: (_Directory(path, self.key), True))
        connect = partial(endpoints.connected, part.endpoint, endpoints.AGAIN if is_repeated else endpoints.CALL)
        disconnect = partial(endpoints.disconnect, part.endpoint)
        return Copy(part.endpoint.location, outage, connect, disconnect, part.state, part.endpoint.stream)

    def _local_path(self, part: Part) -> Path | None:
        """Return the directory of the shard if this host has the root of this hub."""
        if self.local_root is None or part.state is None:
            return None
        root = self.local_root
        with suppress(OSError, KvspoolError):
            if disk.read(root / PRIVATE / "id", 64).decode("ascii", "replace").strip() == part.root:
                return root / route.directory_name(self.key.topic, part.state.bits, self.key.partition)
        return None


class _Patience:
    """Waits for hubs that may yet have the next records, and raises the errors of a query."""

    def __init__(self, one: HubRange) -> None:
        self._key = one.key
        self._timeout = max(part.endpoint.timeout for part in one.parts)
        self._waits_for: tuple[int, float] | None = None  # a sequence that no hub has yet, and since when
        self._backoff = FIRST_BACKOFF

    def wait(self, at: int, answers: Mapping[Copy, Answer]) -> None:
        """Return when the hubs are to be asked again; see `CopyReader`."""
        away = [copy for copy, answer in answers.items() if answer.what == "away"]
        if not away and (len(answers) == 1 or all(answer.error for answer in answers.values())):
            self._fail(at, answers)
        if away and all(copy.outage.expired() is not None for copy in away):
            self._fail(at, answers)
        now = system.port.monotonic()
        if self._waits_for is None or self._waits_for[0] != at:
            self._waits_for, self._backoff = (at, now), FIRST_BACKOFF
        if not away and now - self._waits_for[1] >= self._timeout:
            self._fail(at, answers)
        due = min((copy.outage.retry_at for copy in away), default=now + self._backoff)
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
        system.port.sleep(max(0.0, due - now))

    def _fail(self, at: int, answers: Mapping[Copy, Answer]) -> NoReturn:
        """Raise the error of a range that no hub has, with the reason of each."""
        if len(answers) > 1:
            self._fail_at_all(at, answers)
        ((copy, answer),) = answers.items()
        where = f"{copy.location}/{self._key.topic}/{self._key.partition}"
        if answer.what == "away":
            raise copy.outage.expired() or Unreachable(answer.why)
        if answer.error is None:
            raise self._replaced(answer.why)
        if isinstance(answer.error, NotAllowed):
            raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {where}: {answer.error}")
        if isinstance(answer.error, ShardDamaged):
            raise ShardDamaged(f"[KVSPOOL_SHARD_DAMAGED] {where}, from sequence {at}: {answer.error}")
        raise answer.error

    def _fail_at_all(self, at: int, answers: Mapping[Copy, Answer]) -> NoReturn:
        reasons = "; ".join(f"{copy.location}: {answer.why}" for copy, answer in answers.items())
        words = f"topic {self._key.topic}, partition {self._key.partition}: no hub has sequence {at}: {reasons}"
        if all(answer.what == "lacks" for answer in answers.values()):
            raise self._replaced(reasons)
        for answer in answers.values():
            if answer.what == "away":
                kind = HubFull if isinstance(answer.error, HubFull | QuotaExceeded) else Unreachable
                raise kind(f"[{'KVSPOOL_HUB_REFUSES' if kind is HubFull else 'KVSPOOL_HUB_UNREACHABLE'}] {words}")
        for answer in answers.values():
            if isinstance(answer.error, NotAllowed):
                raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {words}")
            if answer.error is not None:
                raise ShardDamaged(f"[KVSPOOL_SHARD_DAMAGED] {words}")
        raise Unexpected(f"[KVSPOOL_HUBS_LAG] {words}. Repeat the query when a hub has caught up with the client", at)

    def _replaced(self, why: str) -> DataLossError:
        return DataLossError(
            f"[KVSPOOL_LOG_REPLACED] topic {self._key.topic}, partition {self._key.partition}: the log at the hub was replaced since the "
            f"query was planned: {why}; run the query again, a stream from a new checkpoint"
        )


class _Directory(HubLink):
    """A shard under a hub's root on this host, read as that hub would send it."""

    def __init__(self, path: Path, key: ShardKey) -> None:
        self._path = path
        self._key = key

    def shards(self, client: str) -> list[ShardState]:
        """See `HubLink.shards`; only the one shard."""
        bits = (route.parse_name(self._path.name) or ("", 0, 0))[1]
        try:
            with closing(open_shard(self._path, LOCK_TIMEOUT)) as log:
                first, end = log.extent()
                return [ShardState(client, bits, self._key.partition, first, end, generations(log, self._path, end))]
        except KvspoolError as error:
            raise NotFound(f"{self._path}: {error}") from None

    def items(self, ticket: Ticket, timeout: float | None = None) -> Generator[SequencedBatch | Gap | int]:
        """See `HubLink.items`."""
        try:
            with closing(open_shard(self._path, LOCK_TIMEOUT)) as log:
                known = generations(log, self._path, log.end())
                is_ours = not ticket.log or [one.log for one in known[:1]] == [ticket.log]
                if not is_ours or (ticket.generation is not None and ticket.generation not in known):
                    raise Fenced(f"{self._path} has another log")
                if ticket.isolation == "synced":
                    log.sync()
                yield from _read(log, ticket)
        except HubError:
            raise
        except OutOfRange as error:
            raise Unexpected(f"{self._path}: {error}", 0) from None
        except KvspoolError as error:
            raise ShardDamaged(f"{self._path}: {error}") from None


def _read(log: Log, ticket: Ticket) -> Generator[SequencedBatch | Gap | int]:
    from hub.root.columns import SequencedBatch
    from kvspool import arrow

    end = log.end() if ticket.end is None else min(ticket.end, log.end())
    with closing(log.cursor(ticket.start, bounded=True, end=end)) as cursor:
        for item in arrow.batches(cursor):
            if isinstance(item, Gap):
                yield item
            else:
                wanted = item if ticket.columns is None else item.select(ticket.columns)
                yield SequencedBatch(item.column("sequence")[0].as_py(), wanted)
    yield end


def _in_order(columns: frozenset[str]) -> list[str]:
    from kvspool import arrow

    return [name for name in arrow.SCHEMA.names if name in columns]
