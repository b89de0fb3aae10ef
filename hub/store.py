"""The shards that a hub keeps: each a journal, whose own records say what the hub has. That makes it exactly once, with no window.

    [root]/[client].[bit].[index]/                    a journal of the format kvj
    [root]/[client].[bit].[index]/generations.json    which log its records came from

**High-water mark.** What a client sent is stored when the journal holds it, and nothing else remembers it: the sequence that the journal
expects next is the mark. A batch that lies below the mark is compared with what is there, and not written again; one that begins behind
it is refused, unless the client declares that what lies between is lost for ever: then those sequences are left out, which every reader
gets as a Gap.

**Generations.** A client whose log was made anew begins at sequence 0 again, under another log id. Its records go on in the same journal,
behind those of the log before: a generation has a `base`, the sequence of the journal that its record 0 has. The first one has base 0, so
that the journal has the client's own sequences. See docs/decisions/0023-generations.md.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

import kvspool
from hub import columns
from hub.columns import Rows
from hub.errors import Conflict, Fenced, HubFull, Malformed, Restored, RootInUse, Unexpected
from hub.root import check_client
from hub.wire import LAST
from kvspool import system
from kvspool.errors import Corruption, KvspoolError, LockTimeout, LogExists, OutOfRange
from kvspool.journal import Journal
from kvspool.journal.appender import flush_directory
from shard import route
from shard.errors import ShardError

GENERATIONS = "generations.json"
PRIVATE = ".hub"  # directory of what is the hub's own, beside the shards
MOST_OPEN = 1024  # shards that are kept open; each takes up to 4 descriptors
MOST_GENERATIONS = 8192
_ID = re.compile("[0-9a-f]{32}")
_LARGEST_FILE = 1 << 20  # bytes of a table of generations


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One log of a client. log: its id, in hex; base: the sequence of the journal that its record 0 has."""

    log: str
    base: int


class Outcome(NamedTuple):
    """What became of a batch. expected: the sequence of the log that comes next; stored, duplicates: records that were written, and those
    that were there already; lost: sequences that were left out."""

    expected: int
    stored: int = 0
    duplicates: int = 0
    lost: int = 0


class Shard:
    """One client's shard. Its methods may be called by several threads."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises what opening a journal does, and Corruption for a table of generations that can't be."""
        self.path = path
        self.lock = threading.RLock()
        self._place = _place(path)
        self.journal: Journal = kvspool.open(path, format="kvj")
        try:
            self.generations = _load(path / GENERATIONS)
            if not self.generations and self.journal.end():
                # Without it nobody can say whose the records are; to begin at sequence 0 again would store all of them twice.
                raise Corruption(f"{path} has records, but no {GENERATIONS}; bring it back from a copy of the shard")
        except BaseException:
            self.journal.close()
            raise

    def is_stale(self) -> bool:
        """Return whether another shard lies under the path now, or none. Raises Corruption for a table of generations that can't be."""
        return _place(self.path) != self._place or _load(self.path / GENERATIONS) != self.generations

    def enter(self, log: bytes, end: int) -> tuple[int, bool]:
        """Begin to take in a log that goes up to sequence `end`. Return the sequence that is expected next, and whether the log was known.

        One that is new begins a generation, on disk when the call returns. Raises Fenced, Restored, Conflict, HubFull.
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
                raise Conflict(f"{self.path.name}: {MOST_GENERATIONS} logs were shipped to it already, one after the other; no more can be")
            base = self.journal.sync() if self.generations else 0  # a Gap, if the machine dies, would be blamed on the wrong log
            self._store([*self.generations, Generation(log.hex(), max(base, self.journal.end()))])
            return 0, False

    def next(self, log: bytes) -> int:
        """Return the sequence of a log that is expected next: every one below is stored, or lost. Raises Fenced."""
        with self.lock:
            base = self._base(log)
            return max(0, self.journal.end() - base)

    def put(self, log: bytes, rows: Rows, after: int) -> Outcome:
        """Store records; they survive the death of this process when the call returns.

        after: the log's sequences from there up to the first of these are lost for ever. What is stored already is compared, not written
        again. Raises Unexpected, Conflict, Fenced, HubFull, and Corruption or Poisoned for what a person has to repair.
        """
        with self.lock, self._writing():
            base = self._base(log)
            end = max(base, self.journal.end())
            if rows.end + base >= LAST:
                raise Malformed(f"sequence {rows.end} is beyond what a hub can number")
            if end < after + base:
                raise Unexpected(f"{self.path.name}: sequence {end - base} comes next, not {after}", end - base)
            rows = Rows(rows.first + base, rows.batch)
            new = rows if rows.first >= end else self._without_known(rows, end)
            if new.batch.num_rows:
                self._append(new)
            stored, expected = new.batch.num_rows, max(end, new.end)
            return Outcome(expected - base, stored, rows.batch.num_rows - stored, expected - end - stored)

    def sync(self) -> None:
        """Put everything that was stored so far on disk. Raises Poisoned if the disk fails, and from then on."""
        with self._writing():
            self.journal.sync()

    def close(self) -> None:
        """Give the files back."""
        self.journal.close()

    def _without_known(self, rows: Rows, expected: int) -> Rows:
        """Return the part of the records that is not stored yet. Raises Conflict if the part that is stored is another one there."""
        known = rows.part(rows.first, min(rows.end, expected))
        at = columns.first_difference(self.journal, known)
        if at is not None:
            raise Conflict(
                f"{self.path.name}: record {at} came again with other bytes than those that are stored; two logs have the same id, or one "
                "was restored from an older state. Copy it to a new log (kvspool copy) and ship that one"
            )
        return rows.part(min(rows.end, expected), rows.end)

    def _append(self, rows: Rows) -> None:
        try:
            columns.append(self.journal, rows)
        except OutOfRange:
            raise Conflict(f"{self.path.name}: somebody else appends to the hub's shard") from None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise HubFull for what may pass by itself: no room, no descriptors, a lock that others hold."""
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
            raise Fenced(f"{self.path.name}: that log was never begun here")
        return self.generations[-1].base

    def _refuse_fenced(self, log: bytes) -> None:
        if any(generation.log == log.hex() for generation in self.generations):
            raise Fenced(
                f"{self.path.name}: another log has taken this one's place. Two clients have the same id, or a log came back that had been "
                "replaced"
            )

    def _store(self, generations: list[Generation]) -> None:
        _replace(self.path / GENERATIONS, msgspec.json.encode(generations))
        self.generations = generations


class Store:
    """All shards under a hub root. One process at a time has it; threads may use it. Raises RootInUse."""

    def __init__(self, root: Path) -> None:
        self.root = root
        private = root / PRIVATE
        with suppress(FileExistsError):
            system.port.make_directory(private)
        self._lock_fd = system.port.open(private / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not system.port.try_lock_file(self._lock_fd, shared=False):
            system.port.close(self._lock_fd)
            raise RootInUse(f"another hub serves {root}; stop it first")
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, int], Shard] = OrderedDict()
        self._used: dict[tuple[str, int], int] = {}

    def enter(self, client: str, bits: int) -> None:
        """Make a client's shards where they are missing. Raises Malformed for an id that can't be, Conflict for another number, HubFull."""
        try:
            check_client(client)
            names = [route.directory_name(client, bits, index) for index in range(1 << route.check_bits(bits))]
        except ValueError as error:
            raise Malformed(str(error)) from None
        with self._lock:
            try:
                found = route.scan(self.root).get(client)
                if found is not None and found.bits != bits:
                    raise Conflict(f"client {client} has {1 << found.bits} shards here, not {1 << bits}")
            except ShardError as error:
                raise Conflict(str(error)) from None
            try:
                for index in found.missing if found is not None else range(1 << bits):
                    with suppress(LogExists):
                        kvspool.create(self.root / names[index], format="kvj").close()
            except KvspoolError:
                raise
            except OSError as error:
                raise HubFull(f"no shards can be made for {client}: {error}") from error

    def take(self, client: str, bits: int, index: int) -> Shard:
        """Return a shard, open until it is given back. Raises LogNotFound."""
        key = client, index
        with self._lock:
            shard = self._open.pop(key, None)
            if shard is not None and shard.is_stale():
                shard = None  # somebody took it away, or put a copy in its place; who uses it still is told so
            if shard is None:
                shard = Shard(self.root / route.directory_name(client, bits, index))
            self._open[key] = shard
            self._used[key] = self._used.get(key, 0) + 1
            self._close_idle(MOST_OPEN)
            return shard

    def give_back(self, client: str, index: int) -> None:
        """Say that a shard is of no more use to who took it."""
        with self._lock:
            self._used[client, index] -= 1
            if not self._used[client, index]:
                del self._used[client, index]

    def close(self) -> None:
        """Close all shards, and let another hub have the root."""
        with self._lock:
            self._used.clear()
            try:
                self._close_idle(0)
            finally:
                fd, self._lock_fd = self._lock_fd, -1
                if fd >= 0:
                    system.port.unlock_file(fd)
                    system.port.close(fd)

    def _close_idle(self, most: int) -> None:
        """Close shards that nobody uses until no more than `most` are open, those first that were used longest ago."""
        for key in list(self._open):
            if len(self._open) <= most:
                break
            if key not in self._used:
                self._open.pop(key).close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _load(path: Path) -> list[Generation]:
    """Return the table of generations; empty if there is none. Raises Corruption."""
    try:
        fd = system.port.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return []
    try:
        data = system.port.read(fd, _LARGEST_FILE, 0)
    finally:
        system.port.close(fd)
    try:
        found = msgspec.json.decode(data, type=list[Generation])
    except (ValueError, RecursionError) as error:
        raise Corruption(f"{path} is no table of generations: {error}; bring it back from a copy of the shard") from None
    bases, logs = [one.base for one in found], [one.log for one in found]
    if not found or bases != sorted(bases) or bases[0] < 0 or bases[-1] >= LAST:
        raise Corruption(f"{path} is no table of generations: the bases are out of order; bring it back from a copy of the shard")
    if len(set(logs)) < len(logs) or not all(_ID.fullmatch(log) for log in logs):
        raise Corruption(f"{path} is no table of generations: an id of a log is none, or stands there twice; bring it back from a copy")
    return found


def _place(path: Path) -> tuple[int, int] | None:
    found = system.port.look_up(path)
    return None if found is None else (found.st_dev, found.st_ino)


def _replace(path: Path, data: bytes) -> None:
    """Write a small file, on disk, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    fd = system.port.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        system.port.write(fd, data, 0)
        system.port.flush(fd)
    finally:
        system.port.close(fd)
    system.port.rename(temporary, path)
    flush_directory(path.parent)
