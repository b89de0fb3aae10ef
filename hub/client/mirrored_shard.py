"""One shard that is pulled from another hub: a journal with the same records, sequences and generations as the source's.

    [root]/[client].[bit].[index]/mirror.json     the id of the source's root

The journal itself determines where to resume. Each pull begins with its last record, which must be identical at the source. Records lost
at the source are skipped here, so that readers get the same Gap at the same position.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pyarrow as pa

import kvspool
from hub.client.remote import RemoteHub
from hub.errors import Conflict, Fenced, HubFull, Malformed, Restored, ShardDamaged, Unexpected
from hub.protocol.reading import ShardState
from hub.root import columns
from hub.root.columns import SequencedBatch
from hub.root.store import GENERATIONS, MIRRORED, PRIVATE, load_generations
from kvspool import arrow, system
from kvspool.errors import Corruption, KvspoolError, NotAFile, OutOfRange, Poisoned
from kvspool.journal import Journal
from kvspool.options import Isolation
from kvspool.record import Gap
from kvspool.system import disk, documents
from shard import route

TURN_BYTES = 32 << 20  # bytes pulled of a shard per turn
LEAST_ROWS = 1024  # of a turn
LARGEST_MARK = 4096  # bytes


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Marks a shard as pulled from another hub. root: the id of that hub's root."""

    root: str


class MirroredShard:
    """One shard pulled from the source. Use it in one thread."""

    def __init__(self, root: Path, source: str, state: ShardState, *, is_own: bool = False) -> None:
        """Describe a shard of the source, whose root has the id `source`, without creating anything.

        is_own: the root is that of a hub that is being brought up to date. Then the shard may exist without a mark, and be ahead.
        """
        self.path = root / route.directory_name(state.client, state.bits, state.shard)
        self.state = state
        self.pulled = 0  # records
        self.bytes = 0
        self.lost = 0  # sequences in Gaps
        self.error: Exception | None = None
        self.retry_at = 0.0
        self.is_current = False  # nothing to do until the source reports more
        self._root = root
        self._source = source
        self._is_own = is_own
        self._journal: Journal | None = None
        self._last: SequencedBatch | None = None  # the last stored record
        self._next = 0
        self._is_on_disk = False  # its name
        self._row_bytes = 100.0  # average of the records so far

    @property
    def next(self) -> int:
        """Return the sequence below which all records are stored here, or lost."""
        return self._next

    @property
    def behind(self) -> int:
        """Return how many more sequences the source has."""
        return max(0, self.state.next - self._next)

    def pull(self, hub: RemoteHub, isolation: Isolation, timeout: float) -> None:
        """Store some of the source's new records; on return they survive a crash of this process.

        timeout: seconds. Raises Restored, Fenced and Conflict if the source is not the one that the shard was pulled from; ShardDamaged,
        HubFull, Unreachable and other errors of the source; the system's OSError for unreadable files. Records received before an error are
        stored.
        """
        journal = self._open()
        if self.state.error:
            raise ShardDamaged(f"{self.path.name}: the source can't read it: {self.state.error}")
        if self._is_ahead():
            return
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
            with closing(items):
                self._take(items, journal, first)
        except Unexpected as error:
            raise self._restored(error.expected) from None

    def _is_ahead(self) -> bool:
        """Return whether the source has only an earlier part of the logs that are here, whose shippers bring it up to date."""
        ours, theirs = load_generations(self.path / GENERATIONS), self.state.generations
        is_earlier = ours[: len(theirs)] == theirs and (len(theirs) < len(ours) or self.state.next <= self._next)
        return self._is_own and bool(ours) and is_earlier

    def _restored(self, end: int) -> Restored:
        return Restored(
            f"{self.path.name}: it ends at sequence {self._next} here, but at {end} at the source: the source was restored from "
            "an older state. Nothing was changed"
        )

    def sync(self) -> None:
        """Write all stored records to disk. Raises HubFull if the disk fails."""
        if self._journal is not None:
            try:
                self._journal.sync()
            except (OSError, Poisoned) as error:
                raise HubFull(f"{self.path.name} can't be written to disk: {error}", 60.0) from error

    def close(self) -> None:
        """Close the files; the next pull opens them again."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def is_of(self, source: str, state: ShardState) -> bool:
        """Return whether this object is for a shard of a source."""
        return self._source == source and (self.state.client, self.state.bits, self.state.shard) == (state.client, state.bits, state.shard)

    # Opening.

    def _open(self) -> Journal:
        """Return the open journal, created if it is missing. Raises Conflict for a journal that isn't the mirror's."""
        if self._journal is None:
            if not self.path.is_dir():
                self._make()
            self._check_mark()
            self._flush_name()
            try:
                self._journal = kvspool.open(self.path, format="kvj")
                self._next = max(self._next, self._journal.end())
                self._last = self._last_row(self._journal)
            except (KvspoolError, OSError) as error:
                self.close()
                raise ShardDamaged(f"{self.path}: {error}") from error
        return self._journal

    def _make(self) -> None:
        """Create the journal with its mark: under another name first, so that it is never visible without its mark."""
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
            system.port.rename(new, self.path)
        except OSError as error:
            raise HubFull(f"{self.path} can't be created: {error}") from error

    def _flush_name(self) -> None:
        """Flush the journal's name, once: also one whose creator was killed, or whose flush failed. Raises HubFull."""
        if not self._is_on_disk:
            try:
                disk.flush_directory(self._root)
            except OSError as error:
                raise HubFull(f"the name of {self.path} can't be written to disk: {error}") from error
            self._is_on_disk = True

    def _check_mark(self) -> None:
        try:
            mark = documents.from_json(documents.read(self.path / MIRRORED, LARGEST_MARK), Mark)
        except FileNotFoundError:
            if self._is_own:
                return
            raise Conflict(f"{self.path} was not pulled from another hub; choose another root") from None
        except (ValueError, NotAFile) as error:
            raise ShardDamaged(f"{self.path / MIRRORED} is damaged: {error}") from None
        if mark.root != self._source:
            raise Conflict(
                f"{self.path} was pulled from the hub root {mark.root}, but the source is {self._source}: another hub, or one that was "
                "recreated. Nothing was changed; move the shard away to pull it from there"
            )

    def _last_row(self, journal: Journal) -> SequencedBatch | None:
        """Return the last record; None if there is no readable one."""
        end = journal.end()
        if end <= journal.first():
            return None
        with closing(journal.cursor(end - 1, bounded=True)) as cursor:
            found = arrow.next_batch(cursor, 1, coded=True, bytes=1 << 16)
        if isinstance(found, Gap) or not found.num_rows:
            return None
        return SequencedBatch(end - 1, found.select(columns.SCHEMA.names))

    def _agree(self) -> None:
        """Take over the source's generations; the local ones must be the first of them. Raises Restored, Fenced, HubFull."""
        ours, theirs = load_generations(self.path / GENERATIONS), self.state.generations
        if ours == theirs:
            return
        if ours[: len(theirs)] == theirs:
            raise Restored(
                f"{self.path.name} has had {len(ours)} logs, but {len(theirs)} at the source: the source was restored from an older state. "
                "Nothing was changed"
            )
        if theirs[: len(ours)] != ours:
            raise Fenced(f"{self.path.name}: the source's records come from another log than the stored ones. Nothing was changed")
        try:
            disk.replace(self.path / GENERATIONS, msgspec.json.encode(theirs), 0o600)
        except OSError as error:
            raise HubFull(f"{self.path.name} can't store its table of generations: {error}") from error

    # Storing.

    def _take(self, items: Iterator[pa.RecordBatch | Gap], journal: Journal, place: int) -> None:
        """Store the received items; `place` is the next sequence. Raises Malformed for records that are missing without a Gap."""
        for item in items:
            if isinstance(item, Gap):
                if item.first > place or item.last < place:
                    raise Malformed(f"{self.path.name}: the source lost {item.first} to {item.last}, but sequence {place} is next")
                place = item.last + 1
                self.lost += max(0, place - self._next)
                self._next = max(self._next, place)
                continue
            rows = _rows(item)
            if rows.first != place:
                raise Malformed(f"{self.path.name}: the source sent sequence {rows.first}, but {place} is next")
            place = rows.end
            self._store(self._without_last(rows), journal)

    def _without_last(self, rows: SequencedBatch) -> SequencedBatch:
        """Return the records without the one that is stored already. Raises Conflict if that differs."""
        last = self._last
        if last is None or rows.first >= last.end:
            return rows
        if not rows.part(last.first, last.end).batch.equals(last.batch):
            raise Conflict(
                f"{self.path.name}: record {last.first} at the source differs from the pulled one: the source was restored "
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
            raise Conflict(f"{self.path.name}: another program appends to the mirror's shard") from None
        except (ValueError, TypeError) as error:
            raise Malformed(f"{self.path.name}: the source sent records that no journal accepts: {error}") from None
        except (OSError, Poisoned, Corruption) as error:
            self.close()  # reopening finds how much was stored
            raise HubFull(f"{self.path.name} can't store records: {error}") from error
        self._next = rows.end
        self._last = SequencedBatch(rows.end - 1, rows.batch.take(pa.array([count - 1])))  # a copy, so that the batch's memory is freed
        self.pulled += count
        self.bytes += size
        self._row_bytes = max(1.0, size / count)


def _rows(batch: pa.RecordBatch) -> SequencedBatch:
    """Return a coded batch from a hub after checking it. Raises Malformed."""
    if not batch.schema.equals(arrow.CODED_SCHEMA) or not batch.num_rows:
        raise Malformed(f"a batch needs rows and the columns {arrow.CODED_SCHEMA.names}, not {str(batch.schema)[:500]!r}")
    records = batch.select(columns.SCHEMA.names)
    columns.check(records)
    sequences = batch.column("sequence")
    first = sequences[0].as_py()
    if first is None or first < 0 or not sequences.equals(pa.array(range(first, first + batch.num_rows), pa.int64())):
        raise Malformed("a batch's sequences must be consecutive")
    return SequencedBatch(first, records)
