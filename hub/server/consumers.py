"""Durable readers of a hub root that are moved over the network: where a program on another host has come to, so that retention can follow.

    commit-positions   move one, or make it
    readers            those that are ours; all for an admin
    delete-reader      forget one

Such a reader has an owner: the principal who made it moves it, and nobody else. It reads clients that he may read, and has a place only
in shards that he named, so it holds back nothing elsewhere. What he names is checked against the shards that are there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from hub.client_ids import check_client
from hub.errors import Conflict, Malformed, NotAllowed, NotFound, QuotaExceeded, Unexpected
from hub.protocol import reading
from hub.protocol.ingest import LAST
from hub.protocol.reading import LARGEST_COMMIT, MOST_PLACES, CommitPositions, Committed, ReaderName, ReaderPlace, Readers, ReaderState
from hub.root import lease, positions, reader
from hub.root.lease import ReaderLease
from hub.root.positions import Key, Position, StoredPositions
from hub.security.access import Principal
from hub.server.shard_index import MayRead, ShardIndex
from kvspool import Spool, system
from kvspool.errors import KvspoolError, NoSuchReader, ReaderBusy
from kvspool.handles import Handle
from kvspool.journal.offsets import check_name
from kvspool.spool.spool import TIMEOUT
from shard import route
from shard.shardset import open_shard

MOST_READERS = 1024  # under a root
MOST_OF_ONE = 64  # readers that a principal may have
_encode = msgspec.json.Encoder().encode

ACTIONS = [
    ("commit-positions", 'move a durable reader: {"reader": name, "places": [{"client": id, "shard": number, "next": sequence}]}'),
    ("readers", "the durable readers that are moved over the network and belong to who asks; all of them for an admin"),
    ("delete-reader", 'forget one of these: {"reader": name}'),
]


class Consumers(Handle):
    """Serves the actions. Its methods are called on Flight's threads."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        self._root: Path = index.root
        self._moving = threading.Lock()  # one reader after the other is moved, once what lies below its places is on disk

    def act(self, kind: str, body: bytes, principal: Principal, may_read: MayRead) -> bytes:
        """Return what an action answers. Raises HubError."""
        if kind == "commit-positions":
            return _encode(self.commit(reading.decode(CommitPositions, body, LARGEST_COMMIT), principal, may_read))
        if kind == "readers":
            return _encode(self.readers(principal))
        return _encode(self.delete(reading.decode(ReaderName, body).reader, principal))

    def commit(self, asked: CommitPositions, principal: Principal, may_read: MayRead) -> Committed:
        """Move a reader in the shards that are named, on disk when it returns; nothing has moved if it raises.

        A shard that isn't there is passed over. Raises Malformed, NotAllowed, Unexpected for a sequence that isn't written, QuotaExceeded
        for too many readers, Conflict while a process of the hub's host has the reader open.
        """
        wanted = _checked(asked, may_read)
        path = positions.path_of(self._root, asked.reader)
        self._before(path, asked.reader, principal)  # nothing is left behind by what he may not
        moved = {key: self._place(key, where, wanted[key]) for key, where in self._index.paths(wanted).items()}
        with self._moving, _taken(self._root, asked.reader):
            before = self._before(path, asked.reader, principal)
            places = {key: one for key, one in {**before.places, **moved}.items() if self._is_there(key, one)}
            if places != before.places or not before.owner:
                positions.store(path, places, principal.name)
        return Committed(len(places), len(wanted) - len(moved))

    def _before(self, path: Path, name: str, principal: Principal) -> StoredPositions:
        """Return where a reader stands, which must be the principal's; nowhere for a new one, which he may have."""
        stored = positions.load(path)
        if stored is None:
            self._check_room(principal)
            return StoredPositions({})
        if stored.owner != principal.name:
            whose = f"{stored.owner}'s" if stored.owner else "one of the hub's own host"
            raise NotAllowed(f"the reader {name!r} is {whose}; take another name")
        return stored

    def _check_room(self, principal: Principal) -> None:
        names = positions.names(self._root)
        if len(names) >= MOST_READERS:
            raise QuotaExceeded(f"the hub has {len(names)} durable readers, and keeps {MOST_READERS} at most; delete one")
        if sum(state.owner == principal.name for state in self._owned()) >= MOST_OF_ONE:
            raise QuotaExceeded(f"{principal.name} has {MOST_OF_ONE} durable readers; delete one")

    def _place(self, key: Key, path: Path, next: int) -> Position:
        """Return a place in a shard, below which everything is on disk."""
        bits = (route.parse_name(path.name) or ("", 0, 0))[1]
        with closing(open_shard(path, TIMEOUT)) as log:
            end = log.end()
            if next > end:
                raise Unexpected(f"client {key[0]}, shard {key[1]}: the next record will be {end}, so no reader can be at {next}", end)
            if not isinstance(log, Spool):
                log.settle(next)
            return Position(bits, next, positions.log_id(log))

    def _is_there(self, key: Key, position: Position) -> bool:
        return system.port.look_up(self._root / route.directory_name(key[0], position.bits, key[1])) is not None

    def readers(self, principal: Principal) -> Readers:
        """Return the readers of a principal; those of everybody to an admin."""
        return Readers([one for one in self._owned() if principal.may_administer or one.owner == principal.name])

    def _owned(self) -> Iterator[ReaderState]:
        """Yield the readers that have an owner; one whose places can't be read has none that could be told."""
        for name in positions.names(self._root):
            path = positions.path_of(self._root, name)
            try:
                stored = positions.load(path)
            except KvspoolError:
                continue
            status = system.port.look_up(path)
            if stored is not None and stored.owner and status is not None:
                places = [ReaderPlace(*key, one.sequence) for key, one in sorted(stored.places.items())]
                yield ReaderState(name, stored.owner, status.st_mtime_ns, places)

    def delete(self, name: str, principal: Principal) -> Readers:
        """Forget a reader, and return those that are left. Raises NotFound, NotAllowed, Conflict while it is open."""
        if name not in (one.name for one in self.readers(principal).readers):
            raise NotFound(f"you have no reader {name[:200]!r} here")
        try:
            reader.delete(self._root, name)
        except NoSuchReader as error:
            raise NotFound(str(error)) from None
        except ReaderBusy as error:
            raise Conflict(str(error)) from None
        return self.readers(principal)


@contextmanager
def _taken(root: Path, name: str) -> Iterator[None]:
    """Take a reader's name inside the `with` block. Raises Conflict if it is open elsewhere."""
    positions.make_directory(root)
    try:
        taken = ReaderLease(positions.path_of(root, name).with_suffix(lease.SUFFIX), name)
    except ReaderBusy as error:
        raise Conflict(str(error)) from None
    with closing(taken):
        yield


def _checked(asked: CommitPositions, may_read: MayRead) -> dict[Key, int]:
    """Return where a reader is to stand, by shard. Raises Malformed for what can't be, and NotAllowed."""
    try:
        check_name(asked.reader)
        for place in asked.places:
            check_client(place.client)
    except ValueError as error:
        raise Malformed(str(error)) from None
    wanted = {(place.client, place.shard): place.next for place in asked.places}
    if len(wanted) < len(asked.places) or len(wanted) > MOST_PLACES:
        raise Malformed(f"places are up to {MOST_PLACES:,} shards, each once")
    for (client, index), next in wanted.items():
        if not 0 <= next < LAST or not 0 <= index < 1 << route.MOST_BITS:
            raise Malformed(f"client {client}, shard {index}: sequence {next} can't be")
    for client in {client for client, _ in wanted}:
        if not may_read(client):
            raise NotAllowed(f"you may not read client {client}")
    return wanted
