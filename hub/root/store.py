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
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import kvspool
from hub.client_ids import check_client
from hub.errors import Conflict, Fenced, HubFull, Malformed, RootInUse
from hub.root import draining
from hub.root.catalogue import Catalogue
from hub.root.draining import Drain
from hub.root.generations import GENERATIONS as GENERATIONS
from hub.root.generations import MOST_GENERATIONS as MOST_GENERATIONS
from hub.root.generations import generations as generations
from hub.root.generations import load_generations as load_generations
from hub.root.making import NewShard, ShardMaker
from hub.root.open_journals import OpenJournals
from hub.root.stored_shard import CountedShard as CountedShard
from hub.root.stored_shard import Outcome as Outcome
from hub.root.stored_shard import Shard as Shard
from hub.root.stored_shard import ShardSizes as ShardSizes
from hub.security import private
from kvspool import system
from kvspool.errors import Corruption, KvspoolError, LogExists
from kvspool.opening import logs
from kvspool.options import TIMEOUT
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import ClosingHandle, close_all
from shard import descriptors, route
from shard.errors import ShardError
from shard.shardset import open_shard

MIRRORED = "mirror.json"  # in a shard that is pulled from another hub; see `mirror`
STRIPES = 64  # locks for shards that are opened, so that hundreds can be opened at once
LOOKS = 8  # unchanged shards that are passed for each one that is counted
MIRROR_LOCK = "mirror."  # beginning of the names of mirrors' locks, before the short name of the source
PRIVATE = ".hub"  # directory of the hub's own files, next to the shards
MOST_OPEN = 4096  # open journals, if half of the descriptors suffice for them
PER_JOURNAL = 4  # descriptors of one that is appended to; a read or a new segment takes more for a moment
Key = tuple[str, int]  # client and shard


class Store(ClosingHandle):
    """All shards under a hub root. Only one process at a time opens it; threads may share it. Raises RootInUse."""

    def __init__(
        self,
        root: Path,
        changed: Callable[[str, int], None] = lambda client, index: None,
        catalogue: Catalogue | None = None,
    ) -> None:
        """Open a root. changed: called with client and shard index after something new was stored; it must return quickly.

        catalogue: that of the root, if the caller has one. Raises AccessError for a root that other users may write, before creating
        anything there.
        """
        private.check_directory(root)
        self.root = root
        self._changed = changed
        folder = root / PRIVATE
        self._lock_file = lock_root(root)
        self.drain = Drain(folder)
        self.catalogue = Catalogue(root) if catalogue is None else catalogue
        self._maker = ShardMaker(root, folder)
        self._maker.clean()
        self._journals = OpenJournals(descriptors.affordable(MOST_OPEN, 2, PER_JOURNAL))
        self._lock = threading.Lock()  # held for a few steps, never while a file is opened or written
        self._entering: dict[str, threading.Lock] = {}  # by client
        self._opening = [threading.Lock() for _ in range(STRIPES)]
        self._shards: dict[Key, Shard] = {}
        self._used: Counter[Key] = Counter()
        self._counted: dict[str, dict[int, CountedShard]] = {}
        self._known_changes = -1  # of the catalogue, in `_counted`
        self._to_count: list[Key] = []
        self._announced: set[Key] = set()  # shards that were made for their logs, and not taken yet

    # Shards.

    def enter(self, client: str, bits: int, logs: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """Create a client's missing shards, all of them with one flush. Raises Malformed for an invalid id, Conflict for another number
        of shards, HubFull.

        logs: the logs that are about to be shipped, by shard: a new shard expects its log.
        """
        try:
            check_client(client)
            names = [route.directory_name(client, bits, index) for index in range(1 << route.check_bits(bits))]
        except ValueError as error:
            raise Malformed(str(error)) from None
        if self.drain.is_set:
            raise HubFull(draining.WORDS, draining.RETRY)
        with self._entering_of(client):
            found = self.catalogue.client(client)
            try:
                if found is not None and found.bits != bits:
                    raise Conflict(f"client {client} has {1 << found.bits} shards here, not {1 << bits}")
            except ShardError as error:
                raise Conflict(str(error)) from None
            if found is not None and any(os.path.lexists(path / MIRRORED) for _, path in found.paths(self.root)):
                raise Fenced(f"client {client} is mirrored here from another hub; ship to that one, or `kvspool hub promote` this one")
            there = set() if found is None else found.indexes[bits]
            unmade = [at for at, name in enumerate(names) if at not in there or self._is_unmade(client, at, self.root / name)]
            try:
                self._make([(names[index], logs.get(index, b"")) for index in unmade])
                if logs:
                    self._announced.update((client, index) for index in unmade)
            except KvspoolError:
                raise
            except OSError as error:
                raise HubFull(f"the shards of {client} can't be created: {error}") from error
            with self._lock:  # they count from now on, not only from their turn
                counted = self._counted.setdefault(client, {})
                for index in range(1 << bits):
                    counted.setdefault(index, CountedShard(ShardSizes(bits=bits)))

    def _make(self, shards: list[tuple[str, bytes]]) -> None:
        """Make shards, given their names and logs. A name with the leftovers of a crash gets its shard in place."""
        there = {name for name, _ in shards if os.path.lexists(self.root / name)}
        new = [NewShard(name, log.hex()) for name, log in shards if name not in there]
        if new:
            self._maker.make(new)
        for name in sorted(there):
            with suppress(LogExists):
                kvspool.create(self.root / name, format="kvj").close()

    def _is_unmade(self, client: str, index: int, path: Path) -> bool:
        """Return whether the creation of a shard was interrupted by a crash; a damaged one exists."""
        if (client, index) in self._shards:
            return False
        counted = self._counted.get(client, {}).get(index)
        if counted is not None and counted.is_current:
            return False
        try:
            return not logs.lies_at(path)
        except (KvspoolError, ValueError):
            return False

    def _entering_of(self, client: str) -> threading.Lock:
        """Return the lock held while a client's shards are created: a thousand take seconds, in which other clients continue."""
        with self._lock:
            return self._entering.setdefault(client, threading.Lock())

    def take(self, client: str, bits: int, index: int) -> Shard:
        """Return a shard, to be used until `give_back`. Raises LogNotFound."""
        key = client, index
        with self._opening[hash(key) % STRIPES]:
            shard = self._shards.get(key)
            if shard is not None and shard.is_stale():
                shard.close()  # it was removed, or replaced by a copy; its other users get an error
                shard = None
            if shard is None:
                path = self.root / route.directory_name(client, bits, index)
                known = self._counted.get(client, {}).get(index)
                changed = partial(self._changed, client, index)
                shard = Shard(path, changed, self._journals, known, is_announced=key in self._announced)
                self._announced.discard(key)
            with self._lock:
                self._shards[key] = shard
                self._used[key] += 1
            return shard

    def give_back(self, client: str, index: int) -> None:
        """Release a shard that `take` has returned."""
        with self._lock:
            self._used[client, index] -= 1
            if not self._used[client, index]:
                del self._used[client, index]

    @property
    def open_journals(self) -> int:
        """Return how many journals are open now."""
        return len(self._journals)

    # Sizes.

    def count(self, most: int | None = None) -> int:
        """Count the content of some shards, at most `most`, in turn. Return how many are left of this turn. None: count all.

        Shards that were never counted count as empty, but exist. Shards of local clients are not the hub's journals. A shard that has not
        changed since its last count is not opened.
        """
        if not self._to_count:
            self._to_count = self._keys()
        looks = len(self._to_count) if most is None else most * LOOKS
        while self._to_count and looks > 0 and (most is None or most > 0):
            looks -= 1
            if self._is_counted_again(*self._to_count.pop()) and most is not None:
                most -= 1
        return len(self._to_count)

    def _keys(self) -> list[Key]:
        """Return each shard under the root, and begin to count new ones."""
        changes = self.catalogue.changes
        clients = self.catalogue.clients()
        if self._known_changes == changes == self.catalogue.changes:
            with self._lock:
                return [(client, index) for client, counted in self._counted.items() for index in counted]
        self._known_changes = self.catalogue.changes
        bits = {}
        for client, found in clients.items():
            with suppress(ShardError):
                bits[client] = found.bits, found.indexes[found.bits]
        with self._lock:
            used = {client for client, _ in self._used}
            for client in self._counted.keys() - bits.keys() - used:
                for index in self._counted.pop(client):
                    self._drop(client, index)
            for client, (number, indexes) in bits.items():
                counted = self._counted.setdefault(client, {})
                for index in counted.keys() - indexes:
                    if (client, index) not in self._used:
                        del counted[index]
                        self._drop(client, index)
                for index in indexes - counted.keys():
                    counted[index] = CountedShard(ShardSizes(bits=number))
        return [(client, index) for client, (_, indexes) in bits.items() for index in indexes]

    def _drop(self, client: str, index: int) -> None:
        shard = self._shards.pop((client, index), None)
        if shard is not None:
            shard.close()

    def _is_counted_again(self, client: str, index: int) -> bool:
        """Count a shard, unless it is unchanged. Return whether it was counted."""
        counted = self._last_count((client, index))
        if counted is None or counted.is_current:
            return False
        with suppress(KvspoolError, OSError):  # it is being created or removed, or damaged, which others report
            self._count_again((client, index), counted)
        return True

    def look(self, client: str, index: int) -> CountedShard | None:
        """Return the present content of a shard; None if the hub doesn't know it, or can't read it.

        An unchanged shard is not opened. If a batch is being stored, the content before it is returned.
        """
        counted = self._last_count((client, index))
        if counted is None or counted.is_current:
            return counted
        try:
            return self._count_again((client, index), counted)
        except (KvspoolError, OSError):
            return None

    def _last_count(self, key: Key) -> CountedShard | None:
        shard = self._shards.get(key)
        return shard.counted if shard is not None else self._counted.get(key[0], {}).get(key[1])

    def _count_again(self, key: Key, before: CountedShard) -> CountedShard:
        shard = self._shards.get(key)
        if shard is None:
            path = self.root / route.directory_name(key[0], before.sizes.bits, key[1])
            new = CountedShard.at(path) or self._count_opened(path)
        elif shard.lock.acquire(blocking=False):
            try:
                shard.count()
                new = shard.counted
            finally:
                shard.lock.release()
        else:
            return shard.counted
        with self._lock:
            if key[1] in self._counted.get(key[0], ()):
                self._counted[key[0]][key[1]] = new
        return new

    @staticmethod
    def _count_opened(path: Path) -> CountedShard:
        with open_shard(path, TIMEOUT) as log:
            return CountedShard.of(path, log)

    def has_sealed(self, client: str) -> bool:
        """Return whether a client may have segments besides the last one of each shard, as of the last counts."""
        counts = [self._last_count((client, index)) for index in list(self._counted.get(client, ()))]
        return any(one is not None and one.sizes.segments != 1 for one in counts)

    def sizes(self) -> dict[str, dict[int, ShardSizes]]:
        """Return the counted content of each client's shards."""
        with self._lock:
            shards = self._shards
            return {
                client: {
                    index: counted.sizes if (shard := shards.get((client, index))) is None else shard.sizes
                    for index, counted in sorted(self._counted[client].items())
                }
                for client in sorted(self._counted)
            }

    def shard_counts(self) -> dict[str, int]:
        """Return the number of each client's shards."""
        with self._lock:
            return {client: len(counted) for client, counted in self._counted.items()}

    def used(self) -> dict[str, int]:
        """Return the counted bytes of each client."""
        with self._lock:
            shards = self._shards
            return {
                client: sum((shards.get((client, index)) or counted).sizes.used for index, counted in of.items())
                for client, of in self._counted.items()
            }

    def close(self) -> None:
        """Close all shards and release the root."""
        with self._lock:
            self._used.clear()
            shards, self._shards = self._shards, {}
        try:
            close_all(shards.values())
        finally:
            self.catalogue.close()
            if not self._lock_file.is_closed:
                with self._lock_file as fd:
                    system.port.unlock_file(fd)


def lock_root(root: Path) -> Descriptor:
    """Return the descriptor of the lock that the only hub of a root holds. Raises RootInUse."""
    return take_lock(root, "lock", f"another hub serves {root}")


def take_lock(root: Path, name: str, holder: str) -> Descriptor:
    """Return the descriptor of a held lock of a root. holder: words about its holder. Raises RootInUse."""
    folder = root / PRIVATE
    with suppress(FileExistsError):
        system.port.make_directory(folder)
    file = Descriptor(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    if not system.port.try_lock_file(file.number, shared=False):
        file.close()
        raise RootInUse(f"{holder}; stop it first")
    return file


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
