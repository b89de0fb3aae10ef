"""The groups of a hub root: each member reads its shards as one, and stores their positions in a part of its own.

The parts belong to the positions of the durable reader with the group's name; see `positions`. Members hold that reader's lock together, so
it can't be open at the same time. A member stores its part without a lock, so that one that is stopped keeps no other one from a commit. A
part that a silent member replaces too late has no effect; see `kvspool.groups.fencing`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import structs

from hub.errors import ShardReplaced
from hub.root import lease, positions
from hub.root.lease import ReaderLease
from hub.root.positions import Key, Position
from hub.root.reader import place_of
from hub.root.records import HubRecord
from hub.root.shards import RootShards
from kvspool import system
from kvspool.engine.wakeups import ENTERED, Watcher
from kvspool.errors import KvspoolError, LogNotFound, ReaderBusy, Revoked
from kvspool.groups.fencing import replace_fenced
from kvspool.groups.share import Arm, Fence, GroupLag
from kvspool.groups.single import lag_of
from kvspool.groups.stats import GroupStats, group_files, look
from kvspool.options import Isolation
from kvspool.record import Gap
from shard import route
from shard.groups import MergedShare, reached
from shard.kernel.merge import placed
from shard.merge import UNREADABLE, Merge
from shard.merged import Log

_ROOT = "the root itself"  # the key of its watch


class HubShare(MergedShare[Key]):
    """The shards of a hub root. A shard's name in the group is that of its directory."""

    def __init__(self, root: RootShards, name: str, start: str | datetime, isolation: Isolation) -> None:
        """Take the name of the durable reader, together with other members. Raises ReaderBusy, ValueError."""
        self._root = root
        self._name = name
        self._start = start
        self._isolation = isolation
        self._path = positions.path_of(root.path, name)
        self._shards: dict[str, Key] = {}
        self._paths: dict[Key, Path] = {}
        self._positions: dict[Key, Position] = {}  # of owned shards
        self._committed: dict[Key, Position] = {}
        self._fences: dict[Key, Fence] = {}
        self._part: Path | None = None
        positions.make_directory(root.path)
        self._lease = ReaderLease(self._path.with_suffix(lease.SUFFIX), name, shared=True)

    def shards(self) -> dict[str, Key]:
        return self._shards

    def look(self) -> bool:
        found = {path.name: (key, path) for key, path in self._root.shard_paths()}
        before, self._shards = self._shards, {name: key for name, (key, _) in found.items()}
        self._paths = dict(found.values())
        return self._shards != before

    def entered(self, token: int) -> None:
        self._part = positions.part_of(self._path, token)

    def recover(self, tokens: Collection[int]) -> None:
        """Merge the parts of ended members; at first, store the positions of a new group, so that it holds back what it will read."""
        if system.port.look_up(self._path) is None:
            start = {key: place_of(path, log, log.sequence_at(self._start)) for key, path, log in self._root.logs(passes_damaged=True)}
            positions.store(self._path, start)
        positions.absorb(self._path, tokens)

    def take(self, key: Key, fence: Fence) -> None:
        stored = positions.load_alone(self._path) or positions.StoredPositions({})
        if stored.owner:
            raise ReaderBusy(f"the reader {self._name!r} belongs to {stored.owner}, and is moved over the network; take another name")
        path = self._paths[key]
        position = stored.places.get(key)
        if position is None or position.bits != (route.parse_name(path.name) or ("", 0, 0))[1]:
            log = self._log(key)
            position = place_of(path, log, log.sequence_at("earliest"))
        self._positions[key] = self._committed[key] = position
        self._fences[key] = fence

    def give(self, keys: Collection[Key]) -> None:
        """Merge the committed positions of these shards, then remove them from our part."""
        ours = {key: self._committed[key] for key in keys if key in self._committed}
        if ours and self._part is not None and system.port.look_up(self._part) is not None:
            positions.merge(self._path, ours)
            rest = {key: one for key, one in self._committed.items() if key not in ours}
            if rest:
                positions.store(self._part, rest)
            else:
                system.port.remove(self._part)
        self.drop(keys)

    def drop(self, keys: Collection[Key]) -> None:
        for key in keys:
            for places in (self._positions, self._committed, self._fences):
                places.pop(key, None)

    def displace(self, key: Key, pid: int) -> None:
        """Nothing: no shard has a lock of its own, and `recover` has closed the part of the former owner."""

    # Positions.

    def position(self, key: Key) -> int:
        return self._positions[key].sequence

    def is_clean(self, key: Key) -> bool:
        return self._positions.get(key) == self._committed.get(key)

    def passed(self, items: Mapping[Key, Any]) -> None:
        for key, item in items.items():
            time = 0 if isinstance(item, Gap) else item.timestamp
            self._positions[key] = self._positions[key]._replace(sequence=reached(item), time=time)

    def commit(self, keys: Iterable[Key]) -> None:
        if self._positions == self._committed or self._part is None:
            return
        for key, one in self._positions.items():
            if one != self._committed[key]:
                log = self._root.open_log(key, self._paths[key], may_be_gone=True) if key in self._paths else None
                if log is not None:
                    log.flush_for_commit(one.sequence)
        current = dict(self._positions)
        positions.make_parts(self._path)
        replace_fenced(self._part, positions.pack(current), 0o600, f"{self._part} has the positions of a member", self._fence)
        self._committed = current

    def _fence(self) -> None:
        """Raise Revoked if this member lost its shards: a silent one loses all of them."""
        for fence in list(self._fences.values())[:1]:
            try:
                fence()
            except Revoked as error:
                raise Revoked(str(error), tuple(self._fences)) from None

    def seek(self, places: Mapping[Key, int]) -> None:
        moved = {}
        for key, sequence in places.items():
            if isinstance(sequence, bool) or not isinstance(sequence, int):
                raise TypeError(f"a position is a sequence, not {sequence!r}")
            log = self._log(key)
            moved[key] = place_of(self._paths[key], log, log.sequence_at(sequence))
        self._positions.update(moved)

    def lag(self, keys: Collection[Key]) -> GroupLag:
        found = lag_of([self._log(key).lag(self._positions[key].sequence) for key in keys])
        assert found is not None
        return found

    def _log(self, key: Key) -> Log:
        log = self._root.open_log(key, self._paths[key], may_be_gone=True) if key in self._paths else None
        if log is None:
            raise LogNotFound(f"{self._root.path} has no shard {key!r} any more")
        return log

    def _open(self, keys: Collection[Key], merge: Merge[Any], *, bounded: bool) -> None:
        for key in sorted(keys):
            try:
                log = self._root.open_log(key, self._paths[key], may_be_gone=True) if key in self._paths else None
                if log is not None:
                    merge.add(key, self._cursor(key, log, merge, bounded=bounded), placed(HubRecord, key[1], key[0]))
            except UNREADABLE as error:
                merge.refuse(key, error)

    def _cursor(self, key: Key, log: Log, merge: Merge[Any], *, bounded: bool) -> Any:
        position = self._positions[key]
        why = positions.why_replaced(position, log)
        if not why:
            return log.cursor(position.sequence, bounded=bounded, isolation=self._isolation)
        cursor = log.cursor("earliest", bounded=bounded, isolation=self._isolation)
        self._positions[key] = place_of(self._paths[key], log, int(cursor.sequence))
        merge.refuse(key, ShardReplaced(str(self._paths[key]), *key, position.sequence, int(cursor.sequence), why))
        return cursor

    def armed(self, arm: Arm) -> Arm:
        def arm_all(watcher: Watcher) -> None:
            watcher.watch(self._root.path, ENTERED, _ROOT)
            arm(watcher)

        return arm_all

    def close(self) -> None:
        self._lease.close()


def listing(root: RootShards) -> list[GroupStats]:
    """Return the state of each group of a root, by name."""
    found = []
    shards = {path.name: key for key, path in root.shard_paths()}
    for path in group_files(positions.directory_of(root.path)):
        one = look(path, shards)
        if one is not None:
            try:
                lag = _lag_of_stored(root, positions.path_of(root.path, one.name))
            except (KvspoolError, ValueError) as error:
                one = structs.replace(one, problem=one.problem or str(error))
            else:
                one = structs.replace(one, lag=lag)
            found.append(one)
    return found


def _lag_of_stored(root: RootShards, path: Path) -> GroupLag | None:
    """Return the lag of committed positions; shards without one count from their earliest record."""
    stored = positions.load(path)
    if stored is None:
        return None
    lags = []
    for key, shard_path, log in root.logs():
        position = stored.places.get(key)
        is_sound = position is not None and shard_path.name == route.directory_name(key[0], position.bits, key[1])
        sequence = position.sequence if position is not None and is_sound and not positions.why_replaced(position, log) else log.extent()[0]
        lags.append(log.lag(sequence))
    return lag_of(lags)

