"""One shard that is pulled from another hub: a journal that has the same records, sequences and generations as the source's.

    [root]/[client].[bit].[index]/mirror.json     the id of the root that it is pulled from

Where to go on is what the journal itself says, and each pull begins with the last record that is there, which the source has to have just
as it is. What is lost there is left out here, so that readers get the same Gap in the same place.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pyarrow as pa

import kvspool
from hub.client.remote import RemoteHub
from hub.client_ids import check_client
from hub.errors import Conflict, Fenced, HubFull, Malformed, Restored, ShardDamaged, Unexpected
from hub.protocol.ingest import LAST
from hub.protocol.reading import ShardState
from hub.root import columns
from hub.root.columns import SequencedBatch
from hub.root.store import GENERATIONS, MIRRORED, PRIVATE, load_generations
from kvspool import arrow, disk, documents, system
from kvspool.errors import Corruption, KvspoolError, NotAFile, OutOfRange, Poisoned
from kvspool.journal import Journal
from kvspool.options import Isolation
from kvspool.record import Gap
from shard import route

TURN_BYTES = 32 << 20  # bytes that are pulled of a shard before it is the others' turn
LEAST_ROWS = 1024  # of a turn
LARGEST_MARK = 4096  # bytes


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says that a shard is pulled from another hub. root: the id of that one's root."""

    root: str


class MirroredShard:
    """One shard on its way from the source. One thread uses it."""

    def __init__(self, root: Path, source: str, state: ShardState) -> None:
        """Name a shard of the source, whose root has the id `source`; nothing is made yet."""
        self.path = root / route.directory_name(state.client, state.bits, state.shard)
        self.state = state
        self.pulled = 0  # records
        self.bytes = 0
        self.lost = 0  # sequences that lay in Gaps
        self.error: Exception | None = None
        self.retry_at = 0.0
        self.is_settled = False  # nothing is to be done until the source says more
        self._root = root
        self._source = source
        self._journal: Journal | None = None
        self._last: SequencedBatch | None = None  # the last record that is stored here
        self._next = 0
        self._row_bytes = 100.0  # of a record, so far

    @property
    def next(self) -> int:
        """Return the sequence below which all is here, or lost."""
        return self._next

    @property
    def behind(self) -> int:
        """Return how many sequences the source has more."""
        return max(0, self.state.next - self._next)

    def pull(self, hub: RemoteHub, isolation: Isolation, timeout: float) -> None:
        """Store what the source has more, some of it; the call returns when it survives the death of this process.

        timeout: seconds for it. Raises Restored, Fenced and Conflict if the source is not what the shard was pulled from; ShardDamaged,
        HubFull, Unreachable and whatever else the source says; the system's OSError where files can't be read. What came before an error is
        stored.
        """
        journal = self._open()
        if self.state.error:
            raise ShardDamaged(f"{self.path.name}: the source can't read it: {self.state.error}")
        self._agree()
        if self.state.next < self._next:
            raise self._restored(self.state.next)
        first = self._next if self._last is None else self._last.first
        rows = max(LEAST_ROWS, int(TURN_BYTES / self._row_bytes))
        state = self.state
        items = hub.batches(
            state.client, state.shard, first, end=state.next, limit=rows, coded=True, isolation=isolation, timeout=timeout
        )
        try:
            with closing(items):  # type: ignore[type-var]
                self._take(items, journal, first)
        except Unexpected as error:
            raise self._restored(error.expected) from None

    def _restored(self, end: int) -> Restored:
        return Restored(
            f"{self.path.name}: it goes up to sequence {self._next} here, but at the source the next one is {end}: that was restored from "
            "an older state. Nothing was changed"
        )

    def sync(self) -> None:
        """Put everything that was stored so far on disk. Raises HubFull if the disk fails."""
        if self._journal is not None:
            try:
                self._journal.sync()
            except (OSError, Poisoned) as error:
                raise HubFull(f"{self.path.name} can't be put on disk: {error}", 60.0) from error

    def close(self) -> None:
        """Give the files back; the next pull opens them again."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def is_of(self, source: str, state: ShardState) -> bool:
        """Return whether this is the place for a shard of a source."""
        return self._source == source and (self.state.client, self.state.bits, self.state.shard) == (state.client, state.bits, state.shard)

    # Opening.

    def _open(self) -> Journal:
        """Have the journal open; it is made if it isn't there. Raises Conflict for what is none of ours."""
        if self._journal is None:
            if not self.path.is_dir():
                self._make()
            self._check_mark()
            try:
                self._journal = kvspool.open(self.path, format="kvj")
                self._next = max(self._next, self._journal.end())
                self._last = self._last_row(self._journal)
            except (KvspoolError, OSError) as error:
                self.close()
                raise ShardDamaged(f"{self.path}: {error}") from error
        return self._journal

    def _make(self) -> None:
        """Make the journal, with its mark: under another name first, so that nobody ever sees it without."""
        others = [self._root / route.directory_name(self.state.client, bits, 0) for bits in range(route.MOST_BITS + 1)]
        if any(system.port.look_up(path) is not None for bits, path in enumerate(others) if bits != self.state.bits):
            raise Conflict(f"client {self.state.client} has another number of shards in {self._root} than at the source; nothing was done")
        new = self._root / PRIVATE / "new" / self.path.name
        with suppress(FileNotFoundError):
            shutil.rmtree(new)
        try:
            for directory in (new.parent.parent, new.parent):
                with suppress(FileExistsError):
                    system.port.make_directory(directory)
            kvspool.create(new, format="kvj").close()
            disk.replace(new / MIRRORED, msgspec.json.encode(Mark(self._source)), 0o600)
            disk.put_in_place(new, self.path)
        except OSError as error:
            raise HubFull(f"{self.path} can't be made: {error}") from error

    def _check_mark(self) -> None:
        try:
            mark = documents.from_json(documents.read(self.path / MIRRORED, LARGEST_MARK), Mark)
        except FileNotFoundError:
            raise Conflict(f"{self.path} is a shard of its own, not pulled from another hub; choose another root") from None
        except (ValueError, NotAFile) as error:
            raise ShardDamaged(f"{self.path / MIRRORED} is damaged: {error}") from None
        if mark.root != self._source:
            raise Conflict(
                f"{self.path} was pulled from the hub root {mark.root}, but the source is {self._source}: another hub, or one that was set "
                "up anew. Nothing was changed; move the shard away if it is to be pulled from there"
            )

    def _last_row(self, journal: Journal) -> SequencedBatch | None:
        """Return the last record; None if there is none that can be read."""
        end = journal.end()
        if end <= journal.first():
            return None
        with closing(journal.cursor(end - 1, bounded=True)) as cursor:
            found = arrow.next_batch(cursor, 1, coded=True, bytes=1 << 16)
        if isinstance(found, Gap) or not found.num_rows:
            return None
        return SequencedBatch(end - 1, found.select(columns.SCHEMA.names))

    def _agree(self) -> None:
        """Take over the source's generations; those that are here already must be the first of them. Raises Restored, Fenced, HubFull."""
        ours, theirs = load_generations(self.path / GENERATIONS), self.state.generations
        if ours == theirs:
            return
        if ours[: len(theirs)] == theirs:
            raise Restored(
                f"{self.path.name} has had {len(ours)} logs, but {len(theirs)} at the source: that was restored from an older state. "
                "Nothing was changed"
            )
        if theirs[: len(ours)] != ours:
            raise Fenced(f"{self.path.name}: the source's records come from another log than those that are here. Nothing was changed")
        try:
            disk.replace(self.path / GENERATIONS, msgspec.json.encode(theirs), 0o600)
        except OSError as error:
            raise HubFull(f"{self.path.name} can't take over what its records come from: {error}") from error

    # Storing.

    def _take(self, items: Iterator[pa.RecordBatch | Gap], journal: Journal, place: int) -> None:
        """Store what comes; `place` is the sequence that comes next. Raises Malformed for anything that is silently missing."""
        for item in items:
            if isinstance(item, Gap):
                if item.first > place or item.last < place:
                    raise Malformed(f"{self.path.name}: the source lost {item.first} to {item.last} where sequence {place} comes next")
                place = item.last + 1
                self.lost += max(0, place - self._next)
                self._next = max(self._next, place)
                continue
            rows = _rows(item)
            if rows.first != place:
                raise Malformed(f"{self.path.name}: the source gave sequence {rows.first} where {place} comes next")
            place = rows.end
            self._store(self._without_last(rows), journal)

    def _without_last(self, rows: SequencedBatch) -> SequencedBatch:
        """Return the records without the one that is here already. Raises Conflict if it is another one."""
        last = self._last
        if last is None or rows.first >= last.end:
            return rows
        if not rows.part(last.first, last.end).batch.equals(last.batch):
            raise Conflict(
                f"{self.path.name}: record {last.first} is another one at the source than the one that was pulled: the source was restored "
                "from an older state, or is another hub. Nothing was changed"
            )
        return rows.part(last.end, rows.end)

    def _store(self, rows: SequencedBatch, journal: Journal) -> None:
        count, size = rows.batch.num_rows, rows.size
        if not count:
            return
        try:
            columns.append(journal, rows)
        except OutOfRange:
            raise Conflict(f"{self.path.name}: somebody else appends to the mirror's shard") from None
        except (ValueError, TypeError) as error:
            raise Malformed(f"{self.path.name}: the source gave records that no journal takes: {error}") from None
        except (OSError, Poisoned, Corruption) as error:
            self.close()  # what is there of it is seen when it is opened again
            raise HubFull(f"{self.path.name} takes no records: {error}") from error
        self._next = rows.end
        self._last = SequencedBatch(rows.end - 1, rows.batch.take(pa.array([count - 1])))  # a copy: the batch's memory goes
        self.pulled += count
        self.bytes += size
        self._row_bytes = max(1.0, size / count)


def check_state(state: ShardState) -> ShardState:
    """Return what a hub said of a shard, or raise Malformed if that can't be."""
    try:
        route.directory_name(check_client(state.client), state.bits, state.shard)
    except ValueError as error:
        raise Malformed(f"the source names a shard that can't be: {error}") from None
    logs = state.generations
    if not 0 <= state.first <= state.next < LAST or any(one.base > other.base for one, other in zip(logs, logs[1:], strict=False)):
        raise Malformed(f"the source says of client {state.client}, shard {state.shard}, what can't be")
    if any(not re.fullmatch("[0-9a-f]{32}", log.log) or not 0 <= log.base < LAST for log in logs):
        raise Malformed(f"the source names a log of client {state.client}, shard {state.shard}, that can't be")
    return state


def _rows(batch: pa.RecordBatch) -> SequencedBatch:
    """Return a coded batch that came from a hub, checked. Raises Malformed."""
    if not batch.schema.equals(arrow.CODED_SCHEMA) or not batch.num_rows:
        raise Malformed(f"a batch has rows and the columns {arrow.CODED_SCHEMA.names} and their types, not {str(batch.schema)[:500]!r}")
    records = batch.select(columns.SCHEMA.names)
    columns.check(records)
    sequences = batch.column("sequence")
    first = sequences[0].as_py()
    if first is None or first < 0 or not sequences.equals(pa.array(range(first, first + batch.num_rows), pa.int64())):
        raise Malformed("a batch's sequences have to go up by one")
    return SequencedBatch(first, records)
