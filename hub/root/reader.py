"""A durable reader of a hub root: a name, and a place in every shard, that outlive the process.

Open in one place at a time. Its place moves with each record and Gap that is handed out; `commit` stores all places at once, so that it is
resumed there: each record of each shard once, in the shard's order. What was handed out after the last commit comes again.

**Shards that come and go.** One that the reader has no place in is read from its earliest record. A commit drops the places in shards whose
directory is gone, and only those. Where a directory holds another log than the one in which the reader has its place, it is told:
`ShardReplaced`.

**Durability.** `commit` returns when the positions are on disk, and the records of journals before them too. It never stands ahead of what
a crash of the machine leaves: a spool's recovery gives no number twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from hub.errors import ShardReplaced
from hub.root import lease, positions
from hub.root.following import FollowingRoot
from hub.root.lease import ReaderLease
from hub.root.positions import Key, Position
from hub.root.shards import RootShards
from kvspool import Gap, Record, Spool, forks, system
from kvspool.disk import flush_directory
from kvspool.errors import Closed, Corruption, GapError, KvspoolError, LogNotFound, NoSuchReader, ReaderBusy, UnknownVersion
from kvspool.handles import Handle
from kvspool.iteration import Iterations, check, check_timeout
from kvspool.options import Isolation, OnGap, check_isolation
from shard import route
from shard.merge import Cursor, Merge
from shard.shardset import Log


class ShardLag(msgspec.Struct, frozen=True):
    """How far a reader is behind in one shard. sequence: of the record that comes next; records: from there to the end, as far as they are
    still there."""

    client: str
    shard: int
    sequence: int
    records: int


class HubLag(msgspec.Struct, frozen=True):
    """How far a reader is behind: in records over all shards that are there, and in each."""

    records: int
    shards: list[ShardLag]


class HubReaderStats(msgspec.Struct, frozen=True):
    """A durable reader as others see it. lag: of what it has committed; None where that can't be read, and `problem` says why. updated:
    when it last committed, ns since the Unix epoch. holder: who has it open now, empty for nobody. owner: the principal who moves it over
    the network, empty for a reader of this host."""

    name: str
    lag: HubLag | None
    updated: int
    holder: str
    problem: str = ""
    owner: str = ""


class HubReader(Handle):
    """A durable reader that is open. Get it from `HubRoot.reader`; use it in one thread.

    Closing does not commit. In a forked child it opens anew when it is used, from the last commit, which fails with ReaderBusy as long as
    the parent has it open.
    """

    def __init__(self, root: RootShards, name: str, start: str | datetime, isolation: Isolation) -> None:
        self.name = name
        self.isolation = check_isolation(isolation)
        self.root = root
        self.told: deque[ShardReplaced] = deque()  # what the next iterator raises first
        self._start = start
        self._path = positions.path_of(root.path, name)
        self._positions: dict[Key, Position] = {}
        self._passed: dict[Key, tuple[int, int]] = {}  # what was handed out since: the sequence behind it, and its time
        self._committed: dict[Key, Position] = {}
        self._turn: HubReading | None = None  # the iterator that begins where we stand
        self._lease: ReaderLease | None = None
        self._is_closed = False
        self._iterations = Iterations()
        self._attach()
        forks.register(self)

    def _attach(self) -> None:
        """Take the name, and stand where the last commit was; a new reader is stored at once, so that it holds back what it will read."""
        positions.make_directory(self.root.path)
        taken = ReaderLease(self._path.with_suffix(lease.SUFFIX), self.name)
        try:
            stored = positions.load(self._path)
            self._passed.clear()
            if stored is None:
                self._positions = self._all_at(self._start, passes_damaged=True)
                positions.store(self._path, self._positions)
            elif stored.owner:
                raise ReaderBusy(f"the reader {self.name!r} is {stored.owner}'s, who moves it over the network; take another name")
            else:
                self._positions = stored.places
            self._committed = dict(self._positions)
        except BaseException:
            taken.close()
            raise
        self._lease = taken

    # Reading.

    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> HubReading:
        """Iterate over the records (`HubRecord`) that are there now, from the reader's place on; see `HubRoot.read`."""
        self._check_open()
        return self._iterations.add(HubReading(self, limit, on_gap, None, is_bounded=True))

    def follow(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> HubReading:
        """Iterate over the records from the reader's place on, and wait for more, and for more clients; see `HubRoot.follow`.

        Raises Closed as soon as any thread closes the reader, or the root.
        """
        self._check_open()
        return self._iterations.add(HubReading(self, limit, on_gap, timeout, is_bounded=False))

    def commit(self) -> dict[Key, int]:
        """Store the reader's places: behind everything that was handed out so far, in all shards at once. Returns them.

        On disk when it returns. What goes wrong leaves the old ones or the new ones: the system's OSError; Poisoned if the disk fails.
        """
        self._check_open()
        names = set(system.port.names(self.root.path))
        gone = [key for key, one in self._positions.items() if route.directory_name(key[0], one.bits, key[1]) not in names]
        current = {key: self._place(key) for key in self._positions.keys() - set(gone)}
        if current != self._committed:
            self._settle(current)
            positions.store(self._path, current)
            self._committed = current
        for key in gone:
            if self._turn is None or not self._turn.reads(key):  # otherwise what is left of it may yet be handed out
                self.drop(key)
        return {key: one.sequence for key, one in current.items()}

    def _settle(self, current: dict[Key, Position]) -> None:
        """Put what was read of journals on disk, or a crash of the machine would leave us ahead of what is there."""
        for key, one in current.items():
            if one != self._committed.get(key):
                path = self.root.path / route.directory_name(key[0], one.bits, key[1])
                log = self.root.open_log(key, path, may_be_gone=True)
                if log is not None and not isinstance(log, Spool):
                    log.settle(one.sequence)

    # Moving.

    @property
    def positions(self) -> dict[Key, int]:
        """Return the sequence that comes next in each shard, by client and shard."""
        return {key: self._place(key).sequence for key in self._positions}

    def seek(self, places: Mapping[Key, int]) -> None:
        """Go on at these sequences in the shards that they are for; the others stay. Not committed yet.

        One that was overwritten or trimmed gives a Gap. Raises LogNotFound for a shard that is not there, OutOfRange for a sequence that
        has not been written, ValueError for what is none: nothing has moved then.
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
            moved[key] = _position(paths[key], log, _sequence(log, sequence))
        self._move(moved)

    def seek_time(self, time: datetime) -> None:
        """Go on at the first record at or after an aware datetime, in each shard. Not committed yet."""
        if not isinstance(time, datetime):
            raise TypeError(f"a time is an aware datetime, not {type(time).__name__}")
        self._check_open()
        self._move(self._all_at(time))

    def rewind(self) -> None:
        """Go on at the oldest record of each shard. Not committed yet."""
        self._check_open()
        self._move(self._all_at("earliest"))

    def _all_at(self, start: str | datetime, *, passes_damaged: bool = False) -> dict[Key, Position]:
        """Return the places of a start in all shards. passes_damaged: leave out shards that can't be opened, for a new reader."""
        return {key: _position(path, log, _sequence(log, start)) for key, path, log in self.root.logs(passes_damaged=passes_damaged)}

    def _move(self, moved: dict[Key, Position]) -> None:
        self._positions.update(moved)
        for key in moved:
            self._passed.pop(key, None)
        self._turn = None

    def lag(self) -> HubLag:
        """Return how far the reader's places are behind the ends of the shards."""
        self._check_open()
        return measure(self.root, {key: self._place(key) for key in self._positions})

    # For the iterators.

    def cursor(self, key: Key, path: Path, log: Log, bounded: bool) -> Cursor:
        """Return a cursor of a shard at the reader's place there; at its earliest record if it has none, or one in another log."""
        position = self._place(key) if key in self._positions else None
        bits = _bits(path)
        why = "" if position is None or position.bits != bits else positions.why_replaced(position, log)
        if position is not None and position.bits == bits and not why:
            return log.cursor(position.sequence, bounded=bounded, isolation=self.isolation)
        cursor = log.cursor("earliest", bounded=bounded, isolation=self.isolation)
        self._move_one(key, _position(path, log, int(cursor.sequence)))
        if why and position is not None:
            self.told.append(ShardReplaced(str(path), *key, position.sequence, int(cursor.sequence), why))
        return cursor

    def _move_one(self, key: Key, position: Position) -> None:
        self._passed.pop(key, None)
        self._positions[key] = position

    def pass_by(self, key: Key, item: Record | Gap) -> None:
        """Stand behind what was handed out of a shard."""
        self._passed[key] = (item.last + 1, 0) if isinstance(item, Gap) else (item.sequence + 1, item.timestamp)

    def drop(self, key: Key) -> None:
        """Have no place any more in a shard that is gone."""
        self._positions.pop(key, None)
        self._passed.pop(key, None)

    def take_turn(self, reading: HubReading) -> None:
        """Let an iterator begin where the reader stands; what another one has copied out in advance is dropped."""
        if self._turn is not None:
            self._turn.let_go()
        self._turn = reading

    def has_turn(self, reading: HubReading) -> bool:
        """Return whether the iterator stands where the reader does."""
        self._check_open()
        return self._turn is reading

    def lose_turn(self) -> None:
        """Let the next iterator begin anew: what this one has copied out counts as not handed out."""
        self._turn = None

    def _place(self, key: Key) -> Position:
        passed = self._passed.get(key)
        return self._positions[key] if passed is None else self._positions[key]._replace(sequence=passed[0], time=passed[1])

    # Open and closed.

    def _check_open(self) -> None:
        """Raise Closed; in a forked child, take the name anew first."""
        if self._is_closed:
            raise Closed(self._closed_words())
        if self._lease is None or not self._lease.is_ours:
            self.forked()
            self._attach()

    @property
    def closed(self) -> bool:
        """Return whether the reader was closed."""
        return self._is_closed

    def close(self) -> None:
        """Give the reader up, for others to open. Nothing is committed. Its iterations raise Closed, those in other threads at once."""
        self._is_closed = True
        try:
            self.end(self._closed_words())
        finally:
            self._let_go()

    def end(self, why: str) -> None:
        """End all iterations: the reader, or its root, was closed."""
        self._iterations.end(why)

    def _closed_words(self) -> str:
        return f"the reader {self.name!r} was closed; open it again"

    def forked(self) -> None:
        """In a forked child: the name is the parent's."""
        self._let_go()

    def _let_go(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.let_go()
        taken, self._lease = self._lease, None
        if taken is not None:
            taken.close()

    def __enter__(self) -> HubReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<HubReader {self.name!r} of {self.root.path}{' closed' if self.closed else ''}>"


class HubReading(Iterator[Any], Handle):
    """Moves the reader's place with everything that it hands out. `lost` counts sequences that lay in Gaps.

    Several iterators of a reader take turns: each begins where the reader stands. `seek` works the same way, even in the midst of a loop.
    """

    def __init__(self, owner: HubReader, limit: int | None, on_gap: OnGap, timeout: float | None, is_bounded: bool) -> None:
        self.lost = 0
        self._owner = owner
        self._left = check(limit, on_gap)
        self._on_gap = on_gap
        self._timeout = check_timeout(timeout)
        self._is_bounded = is_bounded
        self._merge: Merge | None = None
        self._is_closed = False
        self._why = ""  # the iteration ended, if its reader or root was closed

    def __next__(self) -> Any:
        while self._left != 0:
            merge = self._merge
            if merge is None or not self._owner.has_turn(self):
                merge = self._begin()
            self._tell()
            item = self._take(merge)
            if not isinstance(item, Gap):
                if self._left > 0:
                    self._left = 0 if self._is_closed else self._left - 1
                return item
            self.lost += item.count
            if self._on_gap == "raise":
                raise GapError(item)
            if self._on_gap == "yield":
                return item
        if self._why:
            raise Closed(self._why)
        raise StopIteration

    def _take(self, merge: Merge) -> Any:
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
            self._owner.lose_turn()  # interrupted: something may have been taken out that nobody got
            raise

    def _tell(self) -> None:
        """Raise what the reader is to be told."""
        told = self._owner.told
        if self._on_gap == "skip":
            told.clear()
        if told:
            raise told.popleft()

    def _begin(self) -> Merge:
        owner = self._owner
        owner.has_turn(self)  # raises Closed, before anything is opened
        owner.take_turn(self)
        self.let_go()
        if self._is_bounded:
            merge = Merge(None, "yield")
            owner.root.add_shards(merge, partial(owner.cursor, bounded=True), is_bounded=True)
        else:
            merge = _Following(owner, self._timeout)
            try:
                merge.add_new()
            except BaseException:
                merge.close()
                raise
        self._merge = merge
        if self._is_closed:  # by another thread, which did not find this one
            merge.close()
        return merge

    def reads(self, key: Key) -> bool:
        """Return whether a shard may yet be handed out."""
        return self._merge is not None and key in self._merge.sources

    def let_go(self) -> None:
        """Close the logs that are read; the next call begins anew."""
        merge, self._merge = self._merge, None
        if merge is not None:
            merge.close()

    def close(self) -> None:
        """Release all logs; the iteration is over. Another thread that waits in it wakes, and its iteration ends."""
        self._is_closed = True
        self._left = 0
        self.let_go()

    def end(self, why: str) -> None:
        """Close the iteration because its reader or root was closed: every call raises Closed with the words `why`."""
        if self._left != 0:
            self._why = why
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Following(FollowingRoot):
    """Reads each shard from the reader's place there on."""

    def __init__(self, owner: HubReader, timeout: float | None) -> None:
        super().__init__(owner.root, None, "yield", timeout, owner.isolation)
        self._owner = owner

    def add_new(self) -> None:
        self.root.add_shards(self, partial(self._owner.cursor, bounded=False), is_bounded=False)

    def drop(self, key: Any) -> None:
        super().drop(key)
        self._owner.drop(key)


def measure(root: RootShards, places: Mapping[Key, Position], *, reads_all: bool = True) -> HubLag:
    """Return how far some places are behind the ends of the shards that are there now; one that isn't in its shard's log, at its end, or
    isn't there at all, counts as the earliest. reads_all: also in shards without a place."""
    lags = []
    for key, path, log in root.logs():
        position = places.get(key)
        if position is None and not reads_all:
            continue
        if position is None or position.bits != _bits(path) or positions.why_replaced(position, log):
            position = _position(path, log, _sequence(log, "earliest"))
        lags.append(ShardLag(*key, position.sequence, log.records_from(position.sequence)))
    return HubLag(sum(one.records for one in lags), lags)


def listing(root: RootShards) -> list[HubReaderStats]:
    """Return what is known of each durable reader, by name."""
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
    """Forget a reader. Raises NoSuchReader, ReaderBusy, ValueError."""
    path = positions.path_of(root, name)
    if system.port.look_up(path) is None:
        raise NoSuchReader(f"{root} has no reader {name!r}")
    lock = path.with_suffix(lease.SUFFIX)
    taken = ReaderLease(lock, name)
    try:
        for gone in (path, path.with_name(f"{path.name}.tmp"), lock):
            if system.port.look_up(gone) is not None:
                system.port.remove(gone)
        flush_directory(path.parent, done=f"the reader {name!r} of {root} was deleted")
    finally:
        taken.close()


def _bits(path: Path) -> int:
    return (route.parse_name(path.name) or ("", 0, 0))[1]


def _position(path: Path, log: Log, sequence: int) -> Position:
    return Position(_bits(path), sequence, positions.log_id(log))


def _sequence(log: Log, start: int | str | datetime) -> int:
    return int(log.cursor(start).sequence) if isinstance(log, Spool) else log.place(start).sequence


