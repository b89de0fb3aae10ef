"""The shards that a hub stores. Each is a journal, and its records alone are the deduplication state: exactly once, without a window.

    [root]/[client].[bit].[index]/                    a journal of the format kvj
    [root]/[client].[bit].[index]/generations.json    the logs that its records came from

**High-water mark.** A client's records are stored when the journal holds them; no other state exists. The journal's next sequence is the
mark. A batch below the mark is compared with the stored records, and not written again. A batch that begins after the mark is refused,
unless the client declares the sequences between as lost forever. Those sequences are skipped, and every reader gets a Gap for them.

**Generations.** A client whose log was recreated begins again at sequence 0, with another log id. Its records follow in the same journal
after those of the previous log. A generation has a `base`: the journal's sequence of its record 0. The first base is 0, so that the
journal has the client's own sequences. See docs/decisions/0023-generations.md.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

import kvspool
from hub.client_ids import check_client
from hub.errors import Conflict, Fenced, HubFull, Malformed, Restored, RootInUse, Unexpected
from hub.protocol.ingest import LAST
from hub.protocol.reading import Generation
from hub.root import columns
from hub.root.columns import SequencedBatch
from hub.security import private
from kvspool import system
from kvspool.arrow import Records
from kvspool.errors import Corruption, KvspoolError, LockTimeout, LogExists, OutOfRange
from kvspool.journal import Journal
from kvspool.opening import logs
from kvspool.options import TIMEOUT
from kvspool.system import disk, documents
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle
from shard import descriptors, route
from shard.errors import ShardError
from shard.merged import Log
from shard.shardset import open_shard

GENERATIONS = "generations.json"
MIRRORED = "mirror.json"  # in a shard that is pulled from another hub; see `mirror`
PRIVATE = ".hub"  # directory of the hub's own files, next to the shards
MOST_OPEN = 1024  # open shards, if half of the descriptors suffice for them
MOST_GENERATIONS = 8192
_ID = re.compile("[0-9a-f]{32}")
_LARGEST_FILE = 1 << 20  # bytes of a table of generations


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
    2^bits shards.
    """

    first: int = 0
    next: int = 0
    used: int = 0
    last_timestamp: int = 0
    generation: int = 0
    bits: int = 0


class Shard(Handle):
    """One client's shard. Its methods can be called by several threads."""

    def __init__(self, path: Path, changed: Callable[[], None] = lambda: None) -> None:
        """Open the shard. changed: called after new records or generations.

        Raises the errors of opening a journal, and Corruption for an invalid table of generations.
        """
        self.path = path
        self._changed = changed
        self.lock = threading.RLock()
        self._place = _place(path)
        self._end: int | None = None  # of the journal, after our last append: the next append checks it
        self.journal: Journal = kvspool.open(path, format="kvj")
        try:
            self.generations = load_generations(path / GENERATIONS)
            if not self.generations and self.journal.end():
                # Without it the records' log is unknown; beginning at sequence 0 again would store all of them twice.
                raise Corruption(f"{path} has records, but no {GENERATIONS}; restore it from a copy of the shard")
            self.sizes = ShardSizes()
            self.count()
        except BaseException:
            self.journal.close()
            raise

    def is_stale(self) -> bool:
        """Return whether the path now has another shard, or none. Raises Corruption for an invalid table of generations."""
        return _place(self.path) != self._place or load_generations(self.path / GENERATIONS) != self.generations

    def enter(self, log: bytes, end: int) -> tuple[int, bool]:
        """Begin to store a log that ends at sequence `end`. Return its next sequence, and whether the log was known.

        A new log begins a generation, on disk on return. Raises Fenced, Restored, Conflict, HubFull.
        """
        with self.lock, self._writing():
            if self.generations and self.generations[-1].log == log.hex():
                expected = self.next(log)
                if end < expected:
                    raise Restored(
                        f"the log of {self.path.name} ends at sequence {end}, but the hub has it up to {expected}: it was restored from an "
                        "older state. Copy it to a new log (kvspool copy) and ship that one"
                    )
                return expected, True
            self._refuse_fenced(log)
            if len(self.generations) >= MOST_GENERATIONS:
                raise Conflict(f"{self.path.name}: {MOST_GENERATIONS} logs were already shipped to it, which is the limit")
            base = self.journal.sync() if self.generations else 0  # or a Gap after a crash of the machine would go to the wrong log
            self._store([*self.generations, Generation(log.hex(), max(base, self.journal.end()))])
            self._changed()
            return 0, False

    def next(self, log: bytes) -> int:
        """Return the log's next sequence: every one below is stored, or lost. Raises Fenced."""
        with self.lock:
            base = self._base(log)
            return max(0, self.journal.end() - base)

    def put(self, log: bytes, rows: SequencedBatch, after: int) -> Outcome:
        """Store records; on return they survive a crash of this process.

        after: sequences of the log from `after` up to the first record are lost forever. Stored records are compared, not written again.
        Raises Unexpected, Conflict, Fenced, HubFull, and Corruption or Poisoned if a person has to repair the shard.
        """
        with self.lock, self._writing():
            base = self._base(log)
            if rows.end + base >= LAST:
                raise Malformed(f"sequence {rows.end} is larger than a hub's largest one")
            rows = SequencedBatch(rows.first + base, rows.batch, rows.laid_out)
            is_next = rows.first == after + base == self._end
            journal_end = rows.first if is_next else self.journal.end()
            end = max(base, journal_end)
            if end < after + base:
                raise Unexpected(f"{self.path.name}: sequence {end - base} comes next, not {after}", end - base)
            new = rows if rows.first >= end else self._without_known(rows, end)
            if new.batch.num_rows:
                self._append(new, journal_end)
                self._changed()
            stored, expected = new.batch.num_rows, max(end, new.end)
            return Outcome(expected - base, stored, rows.batch.num_rows - stored, expected - end - stored)

    def count(self) -> ShardSizes:
        """Count the shard's content; between two counts, sizes are estimated from ingested bytes."""
        with self.lock:
            self.sizes = count(self.path, self.journal, self.generations)
            return self.sizes

    def _note(self, rows: SequencedBatch, records: Records) -> None:
        last, used = records.time_of(records.rows - 1), self.sizes.used + records.size
        self.sizes = self.sizes._replace(next=rows.end, used=used, last_timestamp=max(0, last, self.sizes.last_timestamp))

    def sync(self) -> None:
        """Write all stored records to disk. After a failure of the disk, this and every later call raises Poisoned."""
        with self._writing():
            self.journal.sync()

    def close(self) -> None:
        """Close the files."""
        self.journal.close()

    def _without_known(self, rows: SequencedBatch, expected: int) -> SequencedBatch:
        """Return the records that are not stored yet. Raises Conflict if the stored ones differ."""
        known = rows.part(rows.first, min(rows.end, expected))
        at = columns.first_difference(self.journal, known)
        if at is not None:
            raise Conflict(
                f"{self.path.name}: record {at} was sent again with other bytes than the stored ones; two logs have the same id, or one "
                "was restored from an older state. Copy it to a new log (kvspool copy) and ship that one"
            )
        return rows.part(min(rows.end, expected), rows.end)

    def _append(self, rows: SequencedBatch, journal_end: int) -> None:
        """Append records if the journal ends where expected, which is checked under its own lock."""
        self._end = None
        with rows.laid_out or Records(rows.batch) as records:
            try:
                self.journal.append_records(records, rows.first, journal_end)
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
        disk.replace(self.path / GENERATIONS, msgspec.json.encode(generations), 0o600)
        self.generations = generations


def count(path: Path, log: Log, generations: list[Generation]) -> ShardSizes:
    """Return the content of a shard."""
    stats = log.stats()
    generation = max(0, len(generations) - 1)
    return ShardSizes(stats.first_sequence, stats.next_sequence, stats.used, stats.last_timestamp, generation, _bits(path))


class Store(Handle):
    """All shards under a hub root. Only one process at a time opens it; threads may share it. Raises RootInUse."""

    def __init__(self, root: Path, changed: Callable[[str, int], None] = lambda client, index: None) -> None:
        """Open a root. changed: called with client and shard index after something new was stored; it must return quickly.

        Raises AccessError for a root that other users may write, before creating anything there.
        """
        private.check_directory(root)
        self.root = root
        self._changed = changed
        folder = root / PRIVATE
        with suppress(FileExistsError):
            system.port.make_directory(folder)
        self._lock_file = Descriptor(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not system.port.try_lock_file(self._lock_file.number, shared=False):
            self._lock_file.close()
            raise RootInUse(f"another hub serves {root}; stop it first")
        self._most_open = descriptors.affordable(MOST_OPEN, 2)
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}  # by client
        self._open: OrderedDict[tuple[str, int], Shard] = OrderedDict()
        self._used: dict[tuple[str, int], int] = {}
        self._sizes: dict[tuple[str, int], ShardSizes] = {}
        self._to_count: list[tuple[tuple[str, int], Path]] = []

    def enter(self, client: str, bits: int) -> None:
        """Create a client's missing shards. Raises Malformed for an invalid id, Conflict for another number of shards, HubFull."""
        try:
            check_client(client)
            names = [route.directory_name(client, bits, index) for index in range(1 << route.check_bits(bits))]
        except ValueError as error:
            raise Malformed(str(error)) from None
        with self._making_of(client):
            try:
                found = route.scan(self.root).get(client)
                if found is not None and found.bits != bits:
                    raise Conflict(f"client {client} has {1 << found.bits} shards here, not {1 << bits}")
            except ShardError as error:
                raise Conflict(str(error)) from None
            if found is not None and any(os.path.lexists(path / MIRRORED) for _, path in found.paths(self.root)):
                raise Fenced(f"client {client} is mirrored here from another hub; ship to that one")
            try:
                for name in names:
                    if found is None or _is_unmade(self.root / name):
                        with suppress(LogExists):
                            kvspool.create(self.root / name, format="kvj").close()
            except KvspoolError:
                raise
            except OSError as error:
                raise HubFull(f"the shards of {client} can't be created: {error}") from error
            with self._lock:  # they count from now on, not only from their turn
                for index in range(1 << bits):
                    self._sizes.setdefault((client, index), ShardSizes(bits=bits))

    def _making_of(self, client: str) -> threading.Lock:
        """Return the lock held while a client's shards are created: a thousand take seconds, in which other clients continue."""
        with self._lock:
            return self._making.setdefault(client, threading.Lock())

    def take(self, client: str, bits: int, index: int) -> Shard:
        """Return a shard, open until `give_back`. Raises LogNotFound."""
        key = client, index
        with self._lock:
            shard = self._open.pop(key, None)
            if shard is not None and shard.is_stale():
                shard = None  # it was removed, or replaced by a copy; its other users get an error
            if shard is None:
                shard = Shard(self.root / route.directory_name(client, bits, index), partial(self._changed, client, index))
            self._open[key] = shard
            self._used[key] = self._used.get(key, 0) + 1
            self._close_idle(self._most_open)
            return shard

    def give_back(self, client: str, index: int) -> None:
        """Release a shard that `take` has returned."""
        with self._lock:
            self._used[client, index] -= 1
            if not self._used[client, index]:
                del self._used[client, index]

    # Sizes.

    def count(self, most: int | None = None) -> int:
        """Count the content of some shards, at most `most`, in turn. Return how many are left of this turn. None: count all.

        Shards that were never counted count as empty, but exist. Shards of local clients are not the hub's journals.
        """
        if not self._to_count:
            before = set(self._sizes)
            self._to_count = list(self._paths())
            with self._lock:
                new = {key: sizes for key, sizes in self._sizes.items() if key not in before}  # created in the meantime
                self._sizes = {key: self._sizes.get(key, ShardSizes(bits=_bits(path))) for key, path in self._to_count} | new
        for _ in range(len(self._to_count) if most is None else min(most, len(self._to_count))):
            key, path = self._to_count.pop()
            with suppress(KvspoolError, OSError):  # it is being created or removed, or damaged, which others report
                with self._lock:
                    shard = self._open.get(key)
                if shard is not None:
                    shard.count()
                else:
                    with open_shard(path, TIMEOUT) as log:
                        self._sizes[key] = count(path, log, load_generations(path / GENERATIONS))
        return len(self._to_count)

    def sizes(self) -> dict[str, dict[int, ShardSizes]]:
        """Return the counted content of each client's shards."""
        with self._lock:
            known = self._sizes | {key: shard.sizes for key, shard in self._open.items()}
        found: dict[str, dict[int, ShardSizes]] = {}
        for (client, index), sizes in sorted(known.items()):
            found.setdefault(client, {})[index] = sizes
        return found

    def _paths(self) -> Iterator[tuple[tuple[str, int], Path]]:
        """Yield each shard under the root, and its path."""
        for client, found in route.scan(self.root).items():
            if client:
                with suppress(ShardError):
                    yield from (((client, index), path) for index, path in found.paths(self.root))

    def close(self) -> None:
        """Close all shards and release the root."""
        with self._lock:
            self._used.clear()
            try:
                self._close_idle(0)
            finally:
                if not self._lock_file.is_closed:
                    with self._lock_file as fd:
                        system.port.unlock_file(fd)

    def _close_idle(self, most: int) -> None:
        """Close unused shards, the least recently used first, until at most `most` are open."""
        for key in list(self._open):
            if len(self._open) <= most:
                break
            if key not in self._used:
                shard = self._open.pop(key)
                self._sizes[key] = shard.sizes
                shard.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _is_unmade(path: Path) -> bool:
    """Return whether a shard doesn't exist, or its creation was interrupted by a crash; a damaged one exists."""
    try:
        return not logs.lies_at(path)
    except (KvspoolError, ValueError):
        return False


def root_id(root: Path) -> str:
    """Return the unique id of a hub root, 32 hex digits; a new id is on disk on return.

    A copy of the root has the same id. Raises Corruption.
    """
    path = root / PRIVATE / "id"
    with suppress(FileExistsError):
        system.port.make_directory(path.parent)
    with suppress(FileNotFoundError):
        found = disk.read(path, 64).strip()
        if re.fullmatch(b"[0-9a-f]{32}", found):
            return found.decode()
        raise Corruption(f"{path} is no id of a hub root; restore it from a copy, or remove it: then mirrors treat this as another hub")
    disk.replace(path, system.port.random(16).hex().encode(), 0o600)
    return root_id(root)


def _bits(path: Path) -> int:
    return (route.parse_name(path.name) or ("", 0, 0))[1]


def load_generations(path: Path) -> list[Generation]:
    """Return the table of generations at a path; empty if there is none. Raises Corruption."""
    try:
        found = documents.load(
            path, list[Generation], _LARGEST_FILE, "is no table of generations", "restore it from a copy of the shard"
        )
    except FileNotFoundError:
        return []
    bases, logs = [one.base for one in found], [one.log for one in found]
    if not found or bases != sorted(bases) or bases[0] < 0 or bases[-1] >= LAST:
        raise Corruption(f"{path} is no table of generations: the bases are out of order; restore it from a copy of the shard")
    if len(set(logs)) < len(logs) or not all(_ID.fullmatch(log) for log in logs):
        raise Corruption(f"{path} is no table of generations: a log id is invalid or listed twice; restore it from a copy")
    return found


def generations(log: Log, path: Path, end: int) -> list[Generation]:
    """Return the logs that the records of a shard below `end` came from: itself, if it was written here. Raises Corruption."""
    known = load_generations(path / GENERATIONS)
    if known or not end or not log.log_id:
        return known
    return [Generation(log.log_id.hex(), 0)]


def _place(path: Path) -> tuple[int, int] | None:
    found = system.port.look_up(path)
    return None if found is None else (found.st_dev, found.st_ino)
