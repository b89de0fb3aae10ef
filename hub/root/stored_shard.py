"""One shard that a hub stores; see `hub.root.store`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import kvspool
from hub.errors import Conflict, Fenced, HubFull, Malformed, Restored, Unexpected
from hub.protocol.ingest import LAST
from hub.protocol.reading import Generation
from hub.root import columns
from hub.root import generations as tables
from hub.root.columns import SequencedBatch
from hub.root.file_version import JournalVersion
from hub.root.generations import GENERATIONS, MOST_GENERATIONS, load_generations
from hub.root.open_journals import OpenJournal, OpenJournals
from kvspool import system
from kvspool.arrow import Records
from kvspool.errors import Corruption, KvspoolError, LockTimeout, LogVanished, OutOfRange
from kvspool.journal import Journal
from kvspool.journal import files as journals
from kvspool.journal.places import Places
from kvspool.journal.stats import Glance, glance
from kvspool.opening import logs
from kvspool.system.handles import Handle
from shard import route
from shard.merged import Log

PATIENCE = 1.0  # seconds to wait for a lock of another program; meanwhile other shards of the same call wait


class Outcome(NamedTuple):
    """The result of a batch.

    expected: the log's next sequence; stored: records that were written; duplicates: records that were stored before; lost: sequences that
    were skipped.
    """

    expected: int
    stored: int = 0
    duplicates: int = 0
    lost: int = 0


class ShardSizes(NamedTuple):
    """The content of a shard.

    used: bytes on disk; generation: how often its log was recreated; last_timestamp: ns since 1970, 0 for none; bits: its client has
    2^bits shards; segments: 0 if unknown.
    """

    first: int = 0
    next: int = 0
    used: int = 0
    last_timestamp: int = 0
    generation: int = 0
    bits: int = 0
    segments: int = 0


class Shard(Handle):
    """One client's shard. Its methods can be called by several threads. Its journal is open while it is used; see `open_journals`."""

    def __init__(
        self,
        path: Path,
        changed: Callable[[], None] = lambda: None,
        journals: OpenJournals | None = None,
        known: CountedShard | None = None,
        *,
        is_announced: bool = False,
    ) -> None:
        """Open the shard. changed: called after new records or generations. known: its last count, which may be outdated. is_announced:
        it was made for its log, and has no record.

        Raises the errors of opening a journal, and Corruption for an invalid table of generations.
        """
        self.path = path
        self._changed = changed
        self.lock = threading.RLock()
        self._place = _place(path)
        self._id = b""  # of the journal, once it was opened
        self._end: int | None = None  # of the journal, after our last append: the next append checks it
        self._journal = OpenJournal(OpenJournals(1) if journals is None else journals, self._open)
        self.generations: list[Generation] = []
        self._is_announced = is_announced
        self.counted = known or CountedShard()
        try:
            self.generations = load_generations(path / GENERATIONS)
            if not (is_announced and self.generations):
                self.count()
            if not self.generations and self.sizes.next:
                # Without it the records' log is unknown; beginning at sequence 0 again would store all of them twice.
                raise Corruption(f"{path} has records, but no {GENERATIONS}; restore it from a copy of the shard")
        except BaseException:
            self._journal.close()
            raise

    def _open(self) -> Journal:
        journal = kvspool.open(self.path, format="kvj", timeout=PATIENCE)
        self._id = self._id or journal.log_id
        if _place(self.path) != self._place or journal.log_id != self._id:
            journal.close()
            raise LogVanished(f"{self.path} was removed or replaced")
        return journal

    @property
    def journal(self) -> Journal:
        """Return the journal, open at this moment; `using` keeps it open."""
        with self.using() as journal:
            return journal

    def using(self) -> AbstractContextManager[Journal]:
        """Keep the journal open inside the `with` block, which gets it."""
        return self._journal.used()

    @property
    def is_open(self) -> bool:
        """Return whether the journal is open."""
        return self._journal.journal is not None

    @property
    def sizes(self) -> ShardSizes:
        """Return the counted content; between two counts, it is estimated from ingested bytes."""
        return self.counted.sizes

    def is_stale(self) -> bool:
        """Return whether the path now has another shard, or none. Raises Corruption for an invalid table of generations."""
        return _place(self.path) != self._place or load_generations(self.path / GENERATIONS) != self.generations

    def enter(self, log: bytes, end: int) -> tuple[int, bool]:
        """Begin to store a log that ends at sequence `end`. Return its next sequence, and whether the log was known.

        A new log begins a generation, on disk on return. Raises Fenced, Restored, Conflict, HubFull.
        """
        with self.lock, self._writing():
            if self.generations and self.generations[-1].log == log.hex():
                is_known, self._is_announced = not self._is_announced, False
                expected = self.next(log) if is_known else 0
                if end < expected:
                    raise Restored(
                        f"the log of {self.path.name} ends at sequence {end}, but the hub has it up to {expected}: it was restored from an "
                        "older state. Copy it to a new log (kvspool copy) and ship that one"
                    )
                return expected, is_known
            self._refuse_fenced(log)
            if len(self.generations) >= MOST_GENERATIONS:
                raise Conflict(f"{self.path.name}: {MOST_GENERATIONS} logs were already shipped to it, which is the limit")
            with self.using() as journal:
                base = journal.sync() if self.generations else 0  # or a Gap after a crash of the machine would go to the wrong log
                end = journal.end()
            self._store([*self.generations, Generation(log.hex(), max(base, end))])
            self._changed()
            return 0, False

    def next(self, log: bytes) -> int:
        """Return the log's next sequence: every one below is stored, or lost. Raises Fenced."""
        with self.lock:
            base = self._base(log)
            if self.counted.is_current:
                return max(0, self.sizes.next - base)
            with self.using() as journal:
                return max(0, journal.end() - base)

    def put(self, log: bytes, rows: SequencedBatch, after: int) -> Outcome:
        """Store records; on return they survive a crash of this process.

        after: sequences of the log from `after` up to the first record are lost forever. Stored records are compared, not written again.
        Raises Unexpected, Conflict, Fenced, HubFull, and Corruption or Poisoned if a person has to repair the shard.
        """
        with self.lock, self._writing(), self.using() as journal:
            base = self._base(log)
            if rows.end + base >= LAST:
                raise Malformed(f"sequence {rows.end} is larger than a hub's largest one")
            rows = SequencedBatch(rows.first + base, rows.batch, rows.laid_out)
            is_next = rows.first == after + base == self._end
            journal_end = rows.first if is_next else journal.end()
            end = max(base, journal_end)
            if end < after + base:
                raise Unexpected(f"{self.path.name}: sequence {end - base} comes next, not {after}", end - base)
            new = rows if rows.first >= end else self._without_known(journal, rows, end)
            if new.batch.num_rows:
                self._append(journal, new, journal_end)
                self._changed()
            stored, expected = new.batch.num_rows, max(end, new.end)
            return Outcome(expected - base, stored, rows.batch.num_rows - stored, expected - end - stored)

    def count(self) -> ShardSizes:
        """Count the shard's content, unless the last count is still right."""
        with self.lock:
            if not self.counted.is_current:
                self.counted = CountedShard.at(self.path, self.generations) or self._count_opened()
            return self.sizes

    def _count_opened(self) -> CountedShard:
        with self.using() as journal:
            return CountedShard.of(self.path, journal, self.generations)

    def _note(self, rows: SequencedBatch, records: Records) -> None:
        last, used = records.time_of(records.rows - 1), self.sizes.used + records.size
        sizes = self.sizes._replace(next=rows.end, used=used, last_timestamp=max(0, last, self.sizes.last_timestamp), segments=0)
        self.counted = CountedShard(sizes, tuple(self.generations))

    def sync(self) -> None:
        """Write all stored records to disk. After a failure of the disk, this and every later call raises Poisoned."""
        with self._writing(), self.using() as journal:
            journal.sync()

    def close(self) -> None:
        """Close the files. A later call opens them again, if the shard is still there."""
        self._journal.close()

    def _without_known(self, journal: Journal, rows: SequencedBatch, expected: int) -> SequencedBatch:
        """Return the records that are not stored yet. Raises Conflict if the stored ones differ."""
        known = rows.part(rows.first, min(rows.end, expected))
        at = columns.first_difference(journal, known)
        if at is not None:
            raise Conflict(
                f"{self.path.name}: record {at} was sent again with other bytes than the stored ones; two logs have the same id, or one "
                "was restored from an older state. Copy it to a new log (kvspool copy) and ship that one"
            )
        return rows.part(min(rows.end, expected), rows.end)

    def _append(self, journal: Journal, rows: SequencedBatch, journal_end: int) -> None:
        """Append records if the journal ends where expected, which is checked under its own lock."""
        self._end = None
        with rows.laid_out or Records(rows.batch) as records:
            try:
                journal.append_records(records, rows.first, journal_end)
            except OutOfRange:
                raise Conflict(f"{self.path.name}: another program appends to the hub's shard") from None
            self._note(rows, records)
        self._end = rows.end

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise HubFull for transient errors: no space, no descriptors, a lock held by another process."""
        try:
            yield
        except LockTimeout as error:
            raise HubFull(f"{self.path.name}: {error}") from error
        except KvspoolError:
            raise
        except OSError as error:
            raise HubFull(f"{self.path.name}: {error}") from error

    def _base(self, log: bytes) -> int:
        if not self.generations or self.generations[-1].log != log.hex():
            self._refuse_fenced(log)
            raise Fenced(f"{self.path.name}: no shipper has announced that log here")
        return self.generations[-1].base

    def _refuse_fenced(self, log: bytes) -> None:
        if any(generation.log == log.hex() for generation in self.generations):
            raise Fenced(
                f"{self.path.name}: another log has replaced this one. Two clients have the same id, or this log was "
                "replaced before"
            )

    def _store(self, generations: list[Generation]) -> None:
        tables.store(self.path, generations)
        self.generations = generations
        self.counted = CountedShard(self.sizes, tuple(generations))


class CountedShard(NamedTuple):
    """The counted content of a shard.

    logs: those that its records came from. version: of its journal before the count; None: another count may differ.
    """

    sizes: ShardSizes = ShardSizes()
    logs: tuple[Generation, ...] = ()
    version: JournalVersion | None = None

    @property
    def is_current(self) -> bool:
        """Return whether the shard has certainly not changed since the count."""
        return self.version is not None and self.version.is_current

    @classmethod
    def of(cls, path: Path, log: Log, table: list[Generation] | None = None) -> CountedShard:
        """Count an open shard. table: its generations, if the caller has them."""
        version = JournalVersion.of(log)
        stats = log.stats()
        segments = getattr(stats, "segments", 0)  # of a ring: none
        found = Glance(stats.first_sequence, stats.next_sequence, stats.used, segments, stats.last_timestamp)
        return cls._counted(path, found, log.log_id.hex(), table, version)

    @classmethod
    def at(cls, path: Path, table: list[Generation] | None = None) -> CountedShard | None:
        """Count a shard without opening it; None if that isn't possible. Raises the errors of opening it, and Corruption."""
        place = journals.find(path) if system.port.look_up(path / logs.CONTROL_FILE) is None else None
        if place is None:
            return None
        places = Places(path, place[0])
        bases = places.bases()
        version = JournalVersion.at(path, places.segments, bases)
        found = glance(places, bases)
        return None if found is None else cls._counted(path, found, place[1].id, table, version)

    @classmethod
    def _counted(
        cls, path: Path, found: Glance, id: str, table: list[Generation] | None, version: JournalVersion | None
    ) -> CountedShard:
        """Return a count. id: that of the journal, in hex; nothing if it has none."""
        table = load_generations(path / GENERATIONS) if table is None else table
        shipped = table if table or not found.next or not id else [Generation(id, 0)]
        generation = max(0, len(table) - 1)
        sizes = ShardSizes(found.first, found.next, found.used, found.last_timestamp, generation, _bits(path), found.segments)
        return cls(sizes, tuple(shipped), version)


def _bits(path: Path) -> int:
    return (route.parse_name(path.name) or ("", 0, 0))[1]


def _place(path: Path) -> str:
    """Return the identity of the directory at a path; nothing if there is none."""
    try:
        return system.port.identity(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
