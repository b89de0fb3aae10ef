"""A durable reader of a hub root: a name, and a position in every shard, that outlive the process.

It is open in one process at a time. Its position moves with each returned record and Gap. `commit` stores all positions at once; the next
open resumes there: each record of each shard once, in the shard's order. Records returned after the last commit are returned again.

**New and removed shards.** A shard without a position is read from its earliest record. A commit drops only the positions in shards whose
directory is gone. If a directory holds another log than the one of the reader's position, the reader gets the error `ShardReplaced`.

**Durability.** `commit` returns when the positions, and before them the records of journals, are on disk. So after a crash of the machine
a position is never ahead of the stored records; a spool's recovery assigns no number twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import msgspec

from hub.errors import ShardReplaced
from hub.root import lease, positions
from hub.root.following import FollowingRoot
from hub.root.lease import ReaderLease
from hub.root.positions import Key, Position
from hub.root.records import HubRecord
from hub.root.shards import RootShards
from kvspool import Gap, Record, system
from kvspool.engine.iteration import AsyncReading, TurnReading, check_spin
from kvspool.errors import Closed, Corruption, KvspoolError, LogNotFound, NoSuchReader, ReaderBusy, UnknownVersion
from kvspool.options import Isolation, OnGap
from kvspool.reader import OpenReader
from kvspool.system import forks
from kvspool.system.disk import flush_directory
from shard import route
from shard.merge import LOOK_AROUND, Cursor, FollowingMerge, Merge, NoGaps
from shard.merged import Log

R = TypeVar("R", covariant=True)


class ShardLag(msgspec.Struct, frozen=True):
    """The lag of a reader in one shard. sequence: of the next record; records: the available ones from there to the end."""

    client: str
    shard: int
    sequence: int
    records: int


class HubLag(msgspec.Struct, frozen=True):
    """The lag of a reader: in records over all existing shards, and in each."""

    records: int
    shards: list[ShardLag]


class HubReaderStats(msgspec.Struct, frozen=True):
    """The state of a durable reader, for other processes.

    lag: after its committed positions; None if that can't be read, and `problem` says why. updated: time of its last commit, ns since the
    Unix epoch. holder: the process that has it open, or "". owner: the principal that moves it over the network, or "" for a reader of this
    host.
    """

    name: str
    lag: HubLag | None
    updated: int
    holder: str
    problem: str = ""
    owner: str = ""


class HubReader(OpenReader):
    """An open durable reader. Get it from `HubRoot.reader`; use it in one thread.

    Closing does not commit. A forked child reopens it on use at the last commit, which fails with ReaderBusy while the parent has it open.
    """

    HELPERS = frozenset("cursor drop forked has_turn lose_turn pass_by pending root take_turn".split())

    def __init__(self, root: RootShards, name: str, start: str | datetime, isolation: Isolation) -> None:
        super().__init__(name, isolation)
        self.root = root
        self.pending: deque[ShardReplaced] = deque()  # errors: the next iterator raises these first
        self._start = start
        self._path = positions.path_of(root.path, name)
        self._positions: dict[Key, Position] = {}
        self._passed: dict[Key, tuple[int, int]] = {}  # returned since: the sequence after it, and its time
        self._committed: dict[Key, Position] = {}
        self._turn: HubReading[Any] | None = None  # the iterator that reads from our position
        self._lease: ReaderLease | None = None
        self._attach()
        forks.register(self)

    def _attach(self) -> None:
        """Take the name and load the committed positions; a new reader is stored at once, so that it holds back the records it will read.
        """
        positions.make_directory(self.root.path)
        taken = ReaderLease(self._path.with_suffix(lease.SUFFIX), self.name)
        try:
            positions.absorb(self._path)  # of a group that has ended
            stored = positions.load(self._path)
            self._passed.clear()
            if stored is None:
                self._positions = self._all_at(self._start, passes_damaged=True)
                positions.store(self._path, self._positions)
            elif stored.owner:
                raise ReaderBusy(f"the reader {self.name!r} belongs to {stored.owner}, and is moved over the network; take another name")
            else:
                self._positions = stored.places
            self._committed = dict(self._positions)
        except BaseException:
            taken.close()
            raise
        self._lease = taken

    # Reading.

    @overload
    def read(self, *, limit: int | None = ..., on_gap: NoGaps = ...) -> HubReading[HubRecord]: ...

    @overload
    def read(self, *, limit: int | None = ..., on_gap: OnGap = ...) -> HubReading[HubRecord | Gap]: ...

    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> HubReading[HubRecord | Gap]:
        """Iterate over the stored records (`HubRecord`) from the reader's position; see `HubRoot.read`."""
        self._check_open()
        return self._iterations.add(HubReading(self, limit, on_gap, None, is_bounded=True))

    @overload
    def follow(
        self, *, timeout: float | None = ..., limit: int | None = ..., on_gap: NoGaps = ..., spin: float = ...
    ) -> HubReading[HubRecord]: ...

    @overload
    def follow(
        self, *, timeout: float | None = ..., limit: int | None = ..., on_gap: OnGap = ..., spin: float = ...
    ) -> HubReading[HubRecord | Gap]: ...

    def follow(
        self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise", spin: float = 0.0
    ) -> HubReading[HubRecord | Gap]:
        """Iterate over the records from the reader's position, and wait for more, and for more clients; see `HubRoot.follow`.

        Raises Closed as soon as any thread closes the reader, or the root.
        """
        self._check_open()
        return self._iterations.add(HubReading(self, limit, on_gap, timeout, is_bounded=False, spin=spin))

    @overload
    def follow_async(self, *, timeout: float | None = ..., limit: int | None = ..., on_gap: NoGaps = ...) -> AsyncReading[HubRecord]: ...

    @overload
    def follow_async(
        self, *, timeout: float | None = ..., limit: int | None = ..., on_gap: OnGap = ...
    ) -> AsyncReading[HubRecord | Gap]: ...

    def follow_async(
        self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise"
    ) -> AsyncReading[HubRecord | Gap]:
        """Iterate with `async for` over the records from the reader's position, and wait for more in the event loop; see `follow`."""
        self._check_open()
        reading: HubReading[Any] = self._iterations.add(HubReading(self, None, on_gap, 0.0, is_bounded=False))
        return AsyncReading(reading, reading.sleep, limit, timeout, LOOK_AROUND)

    def commit(self) -> dict[Key, int]:
        """Store the reader's positions, after all returned records, in all shards at once. Returns them.

        On disk on return. After an error either the old or the new ones are stored: the system's OSError; Poisoned if the disk fails.
        """
        self._check_open()
        names = set(system.port.names(self.root.path))
        gone = [key for key, one in self._positions.items() if route.directory_name(key[0], one.bits, key[1]) not in names]
        current = {key: self._place(key) for key in self._positions.keys() - set(gone)}
        if current != self._committed:
            self._flush_read(current)
            positions.store(self._path, current)
            self._committed = current
        for key in gone:
            if self._turn is None or not self._turn.reads(key):  # otherwise the iterator may yet return the rest of it
                self.drop(key)
        return {key: one.sequence for key, one in current.items()}

    def _flush_read(self, current: dict[Key, Position]) -> None:
        """Write the read records of journals to disk; otherwise a crash of the machine could leave the positions ahead of them."""
        for key, one in current.items():
            if one != self._committed.get(key):
                path = self.root.path / route.directory_name(key[0], one.bits, key[1])
                log = self.root.open_log(key, path, may_be_gone=True)
                if log is not None:
                    log.flush_for_commit(one.sequence)

    # Moving.

    @property
    def positions(self) -> dict[Key, int]:
        """Return the next sequence of each shard, by client and shard."""
        return {key: self._place(key).sequence for key in self._positions}

    @property
    def committed(self) -> dict[Key, int]:
        """Return the next sequence of each shard as of the last commit."""
        return {key: one.sequence for key, one in self._committed.items()}

    def seek(self, places: Mapping[Key, int]) -> None:
        """Move to these sequences in the given shards; the positions in others don't change. Does not commit.

        An overwritten or trimmed record gives a Gap. Raises LogNotFound for a shard that doesn't exist, OutOfRange for a sequence that has
        not been written, ValueError for an invalid one: no position has changed then.
        """
        self._check_open()
        paths = dict(self.root.shard_paths())
        moved = {}
        for key, sequence in places.items():
            if isinstance(sequence, bool) or not isinstance(sequence, int):
                raise ValueError(f"a position is a sequence, not {sequence!r}")
            log = self.root.open_log(key, paths[key], may_be_gone=True) if key in paths else None
            if log is None:
                raise LogNotFound(f"{self.root.path} has no shard {key!r}")
            moved[key] = place_of(paths[key], log, log.sequence_at(sequence))
        self._move(moved)

    def seek_time(self, time: datetime) -> None:
        """Move to the first record at or after an aware datetime, in each shard. Does not commit."""
        if not isinstance(time, datetime):
            raise TypeError(f"a time is an aware datetime, not {type(time).__name__}")
        self._check_open()
        self._move(self._all_at(time))

    def rewind(self) -> None:
        """Move to the oldest record of each shard. Does not commit."""
        self._check_open()
        self._move(self._all_at("earliest"))

    def _all_at(self, start: str | datetime, *, passes_damaged: bool = False) -> dict[Key, Position]:
        """Return the positions of a start in all shards. passes_damaged: omit shards that can't be opened, for a new reader."""
        return {key: place_of(path, log, log.sequence_at(start)) for key, path, log in self.root.logs(passes_damaged=passes_damaged)}

    def _move(self, moved: dict[Key, Position]) -> None:
        self._positions.update(moved)
        for key in moved:
            self._passed.pop(key, None)
        self._turn = None

    def lag(self) -> HubLag:
        """Return the number of records after the reader's positions."""
        self._check_open()
        return measure(self.root, {key: self._place(key) for key in self._positions})

    # For the iterators.

    def cursor(self, key: Key, path: Path, log: Log, bounded: bool) -> Cursor:
        """Return a cursor at the reader's position in a shard; at its earliest record without a position, or with one in another log."""
        position = self._place(key) if key in self._positions else None
        bits = _bits(path)
        why = "" if position is None or position.bits != bits else positions.why_replaced(position, log)
        if position is not None and position.bits == bits and not why:
            return log.cursor(position.sequence, bounded=bounded, isolation=self.isolation)
        cursor = log.cursor("earliest", bounded=bounded, isolation=self.isolation)
        self._move_one(key, place_of(path, log, int(cursor.sequence)))
        if why and position is not None:
            self.pending.append(ShardReplaced(str(path), *key, position.sequence, int(cursor.sequence), why))
        return cursor

    def _move_one(self, key: Key, position: Position) -> None:
        self._passed.pop(key, None)
        self._positions[key] = position

    def pass_by(self, key: Key, item: Record | Gap) -> None:
        """Move past a returned item of a shard."""
        self._passed[key] = (item.last + 1, 0) if isinstance(item, Gap) else (item.sequence + 1, item.timestamp)

    def drop(self, key: Key) -> None:
        """Drop the position in a removed shard."""
        self._positions.pop(key, None)
        self._passed.pop(key, None)

    def take_turn(self, reading: HubReading[Any]) -> None:
        """Let an iterator begin at the reader's position; the read-ahead of another iterator is dropped."""
        if self._turn is not None:
            self._turn.release()
        self._turn = reading

    def has_turn(self, reading: HubReading[Any]) -> bool:
        """Return whether the iterator is the one that reads from the reader's position."""
        self._check_open()
        return self._turn is reading

    def lose_turn(self) -> None:
        """Let the next iterator begin at the reader's position; the read-ahead of this one counts as not returned."""
        self._turn = None

    def _place(self, key: Key) -> Position:
        passed = self._passed.get(key)
        return self._positions[key] if passed is None else self._positions[key]._replace(sequence=passed[0], time=passed[1])

    # Open and closed.

    def _check_open(self) -> None:
        """Raise Closed; in a forked child, first take the name again."""
        if self._is_closed:
            raise Closed(self._closed_words())
        if self._lease is None or not self._lease.is_ours:
            self.forked()
            self._attach()

    def forked(self) -> None:
        """Detach in a forked child: the name belongs to the parent."""
        self._release()

    def _release(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()
        taken, self._lease = self._lease, None
        if taken is not None:
            taken.close()

    def __repr__(self) -> str:
        return f"<HubReader {self.name!r} of {self.root.path}{' closed' if self.closed else ''}>"


class HubReading(TurnReading, Iterator[R], Generic[R]):
    """Moves the reader's position with each returned item. `missed` counts sequences in Gaps.

    Several iterators of a reader take turns: each begins at the reader's position. `seek` has the same effect, even inside a loop.
    """

    def __init__(
        self, owner: HubReader, limit: int | None, on_gap: OnGap, timeout: float | None, is_bounded: bool, spin: float = 0.0
    ) -> None:
        super().__init__(limit, on_gap, timeout)
        self._owner = owner
        self._spin = check_spin(spin)
        self._is_bounded = is_bounded
        self._merge: Merge[Any] | None = None

    def __next__(self) -> R:
        while self._left != 0:
            merge = self._merge
            if merge is None or not self._owner.has_turn(self):
                merge = self._begin()
            self._raise_pending()
            item = self._take(merge)
            if not isinstance(item, Gap):
                if self._left > 0:
                    self._left = 0 if self._is_closed else self._left - 1
                return item  # type: ignore[no-any-return]
            if self._shows(item):
                return item  # type: ignore[return-value]  # `R` includes Gap then
        if self._why:
            raise Closed(self._why)
        raise StopIteration

    def _take(self, merge: Merge[Any]) -> Any:
        try:
            item = next(merge)
            self._owner.pass_by(merge.last, item)
            return item
        except StopIteration:
            if self._is_bounded:
                self._owner.lose_turn()
                self.close()
            if self._why:
                raise Closed(self._why) from None
            raise
        except KvspoolError:
            raise
        except BaseException:
            self._owner.lose_turn()  # interrupted: an item may have been taken that was not returned
            raise

    def _raise_pending(self) -> None:
        """Raise a pending error of the reader."""
        pending = self._owner.pending
        if self._on_gap == "skip":
            pending.clear()
        if pending:
            raise pending.popleft()

    async def sleep(self, left: float) -> None:
        """Sleep in a task until there may be more; see `FollowingMerge.sleep`."""
        if isinstance(self._merge, FollowingMerge):
            await self._merge.sleep(left)

    def _begin(self) -> Merge[Any]:
        owner = self._owner
        owner.has_turn(self)  # raises Closed before anything is opened
        owner.take_turn(self)
        self.release()
        if self._is_bounded:
            merge: Merge[Any] = Merge(None, "yield")
            owner.root.add_shards(merge, partial(owner.cursor, bounded=True), is_bounded=True)
        else:
            merge = _Following(owner, self._timeout, self._spin)
            try:
                merge.add_new()
            except BaseException:
                merge.close()
                raise
        self._merge = merge
        if self._is_closed:  # by another thread, which could not close this merge
            merge.close()
        return merge

    def reads(self, key: Key) -> bool:
        """Return whether records of a shard may yet be returned."""
        return self._merge is not None and key in self._merge.sources

    def release(self) -> None:
        """Close the logs that are read; the next call reopens them."""
        merge, self._merge = self._merge, None
        if merge is not None:
            merge.close()


class _Following(FollowingRoot):
    """Reads each shard from the reader's position there."""

    def __init__(self, owner: HubReader, timeout: float | None, spin: float) -> None:
        super().__init__(owner.root, None, "yield", timeout, owner.isolation, spin)
        self._owner = owner

    def add_new(self) -> None:
        self.root.add_shards(self, partial(self._owner.cursor, bounded=False), is_bounded=False)

    def drop(self, key: Any) -> None:
        super().drop(key)
        self._owner.drop(key)


def measure(root: RootShards, places: Mapping[Key, Position], *, reads_all: bool = True) -> HubLag:
    """Return the lag of positions after which shards have more records.

    A position outside its shard's log counts as the earliest. reads_all: shards without a position count from their earliest record.
    """
    lags = []
    for key, path, log in root.logs():
        position = places.get(key)
        if position is None and not reads_all:
            continue
        if position is None or position.bits != _bits(path) or positions.why_replaced(position, log):
            position = place_of(path, log, log.sequence_at("earliest"))
        lags.append(ShardLag(*key, position.sequence, log.records_from(position.sequence)))
    return HubLag(sum(one.records for one in lags), lags)


def listing(root: RootShards) -> list[HubReaderStats]:
    """Return the state of each durable reader, by name."""
    found = []
    for name in positions.names(root.path):
        path = positions.path_of(root.path, name)
        holder = lease.holder(path.with_suffix(lease.SUFFIX))
        status = system.port.look_up(path)
        updated = 0 if status is None else status.st_mtime_ns
        try:
            stored = positions.load(path)
        except (Corruption, UnknownVersion) as error:
            found.append(HubReaderStats(name, None, updated, holder, str(error)))
            continue
        if stored is not None:
            try:
                lag = measure(root, stored.places, reads_all=not stored.owner)
            except KvspoolError as error:  # of a shard
                found.append(HubReaderStats(name, None, updated, holder, str(error), stored.owner))
            else:
                found.append(HubReaderStats(name, lag, updated, holder, owner=stored.owner))
    return found


def delete(root: Path, name: str) -> None:
    """Delete a reader. Raises NoSuchReader, ReaderBusy, ValueError."""
    path = positions.path_of(root, name)
    if system.port.look_up(path) is None:
        raise NoSuchReader(f"{root} has no reader {name!r}")
    lock = path.with_suffix(lease.SUFFIX)
    taken = ReaderLease(lock, name)
    try:
        for gone in (*positions.parts(path), path, path.with_name(f"{path.name}.tmp"), lock):
            if system.port.look_up(gone) is not None:
                system.port.remove(gone)
        flush_directory(path.parent, done=f"the reader {name!r} of {root} was deleted")
    finally:
        taken.close()


def _bits(path: Path) -> int:
    return (route.parse_name(path.name) or ("", 0, 0))[1]


def place_of(path: Path, log: Log, sequence: int) -> Position:
    """Return the position of a sequence in the log of a shard."""
    return Position(_bits(path), sequence, positions.log_id(log))
