"""Durable readers of a hub root that are moved over the network: positions of programs on other hosts, so that retention can follow.

    commit-positions   move a reader, or create it
    readers            list one's own readers; an admin gets all
    delete-reader      delete a reader

Such a reader has an owner: only the principal that created it may move it. It reads clients that its owner may read, and has positions
only in shards that its owner named, so it holds back nothing elsewhere. The named shards are checked against the existing ones.
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
from kvspool import system
from kvspool.errors import KvspoolError, NoSuchReader, ReaderBusy
from kvspool.journal.offsets import check_name
from kvspool.options import TIMEOUT
from kvspool.system.handles import Handle
from shard import route
from shard.shardset import open_shard

MOST_READERS = 1024  # under a root
MOST_OF_ONE = 64  # readers per principal
_encode = msgspec.json.Encoder().encode

ACTIONS = [
    ("commit-positions", 'move a durable reader: {"reader": name, "places": [{"client": id, "shard": number, "next": sequence}]}'),
    ("readers", "the caller's durable readers that are moved over the network; an admin gets all of them"),
    ("delete-reader", 'delete one of these: {"reader": name}'),
]


class Consumers(Handle):
    """Serves the actions. Its methods are called on Flight's threads."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        self._root: Path = index.root
        self._moving = threading.Lock()  # one reader is moved at a time, after the records below its positions are on disk

    def act(self, kind: str, body: bytes, principal: Principal, may_read: MayRead) -> bytes:
        """Return the answer to an action. Raises HubError."""
        if kind == "commit-positions":
            return _encode(self.commit(reading.decode(CommitPositions, body, LARGEST_COMMIT), principal, may_read))
        if kind == "readers":
            return _encode(self.readers(principal))
        return _encode(self.delete(reading.decode(ReaderName, body).reader, principal))

    def commit(self, asked: CommitPositions, principal: Principal, may_read: MayRead) -> Committed:
        """Move a reader in the named shards, on disk on return; after an error nothing has moved.

        A missing shard is ignored. Raises Malformed, NotAllowed, Unexpected for a sequence that isn't written, QuotaExceeded for too many
        readers, Conflict while a process of the hub's host has the reader open.
        """
        wanted = _checked(asked, may_read)
        path = positions.path_of(self._root, asked.reader)
        self._before(path, asked.reader, principal)  # checked first, so that a refused call leaves no files
        moved = {key: self._place(key, where, wanted[key]) for key, where in self._index.paths(wanted).items()}
        with self._moving, _taken(self._root, asked.reader):
            before = self._before(path, asked.reader, principal)
            places = {key: one for key, one in {**before.places, **moved}.items() if self._is_there(key, one)}
            if places != before.places or not before.owner:
                positions.store(path, places, principal.name)
        return Committed(len(places), len(wanted) - len(moved))

    def _before(self, path: Path, name: str, principal: Principal) -> StoredPositions:
        """Return the stored positions of a reader of this principal; empty ones for a new reader."""
        stored = positions.load(path)
        if stored is None:
            self._check_room(principal)
            return StoredPositions({})
        if stored.owner != principal.name:
            whose = f"{stored.owner}" if stored.owner else "the hub's own host"
            raise NotAllowed(f"the reader {name!r} belongs to {whose}; take another name")
        return stored

    def _check_room(self, principal: Principal) -> None:
        names = positions.names(self._root)
        if len(names) >= MOST_READERS:
            raise QuotaExceeded(f"the hub has {len(names)} durable readers, of at most {MOST_READERS}; delete one")
        if sum(state.owner == principal.name for state in self._owned()) >= MOST_OF_ONE:
            raise QuotaExceeded(f"{principal.name} has {MOST_OF_ONE} durable readers; delete one")

    def _place(self, key: Key, path: Path, next: int) -> Position:
        """Return a position in a shard, below which everything is on disk."""
        bits = (route.parse_name(path.name) or ("", 0, 0))[1]
        with closing(open_shard(path, TIMEOUT)) as log:
            end = log.end()
            if next > end:
                raise Unexpected(f"client {key[0]}, shard {key[1]}: the next record will be {end}, so no reader can be at {next}", end)
            log.flush_for_commit(next)
            return Position(bits, next, positions.log_id(log))

    def _is_there(self, key: Key, position: Position) -> bool:
        return system.port.look_up(self._root / route.directory_name(key[0], position.bits, key[1])) is not None

    def readers(self, principal: Principal) -> Readers:
        """Return the readers of a principal; an admin gets those of all principals."""
        return Readers([one for one in self._owned() if principal.may_administer or one.owner == principal.name])

    def _owned(self) -> Iterator[ReaderState]:
        """Yield the readers with an owner; the owner of damaged positions is unknown."""
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
        """Delete a reader, and return the remaining ones. Raises NotFound, NotAllowed, Conflict while it is open."""
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
    """Hold a reader's name inside the `with` block. Raises Conflict if it is open elsewhere."""
    positions.make_directory(root)
    try:
        taken = ReaderLease(positions.path_of(root, name).with_suffix(lease.SUFFIX), name)
    except ReaderBusy as error:
        raise Conflict(str(error)) from None
    with closing(taken):
        yield


def _checked(asked: CommitPositions, may_read: MayRead) -> dict[Key, int]:
    """Return a reader's new positions by shard. Raises Malformed for invalid ones, and NotAllowed."""
    try:
        check_name(asked.reader)
        for place in asked.places:
            check_client(place.client)
    except ValueError as error:
        raise Malformed(str(error)) from None
    wanted = {(place.client, place.shard): place.next for place in asked.places}
    if len(wanted) < len(asked.places) or len(wanted) > MOST_PLACES:
        raise Malformed(f"places must be up to {MOST_PLACES:,} shards, each once")
    for (client, index), next in wanted.items():
        if not 0 <= next < LAST or not 0 <= index < 1 << route.MOST_BITS:
            raise Malformed(f"client {client}, shard {index}: sequence {next} is impossible")
    for client in {client for client, _ in wanted}:
        if not may_read(client):
            raise NotAllowed(f"you may not read client {client}")
    return wanted
