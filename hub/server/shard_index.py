"""The shard index: the end of each shard under a hub root, and its changes, which mirrors request for all shards at once.

The hub notes its own writes (`note`). Writes and trims of local processes are found by a check of every shard from time to time, while a
caller waits for changes.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from hub.client_ids import check_client
from hub.errors import NotFound
from hub.protocol.reading import Changes, ShardState
from hub.root.store import generations, root_id
from hub.server.reads import gone
from kvspool import system
from kvspool.errors import KvspoolError
from kvspool.options import TIMEOUT
from kvspool.system.handles import Handle
from shard import descriptors, route
from shard.errors import ShardError
from shard.merged import Log
from shard.shardset import open_shard

LOOK = 0.25  # seconds between two checks of all shards
REST = 10  # times the duration of such a check, before the next one
GATHER = 0.005  # seconds to gather simultaneous changes
MOST_OPEN = 512  # logs kept open between two checks; the others are opened each time
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)  # there may be room later
MayRead = Callable[[str], bool]
IsOver = Callable[[], bool]  # whether the caller of a call is gone
POLL = 0.5  # seconds between two checks whether a waiting caller is still connected
Key = tuple[str, int]
logger = logging.getLogger("kvspool.hub")


class ShardIndex(Handle):
    """The states of all shards under a root. Its methods can be called by several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root_id = root_id(root)
        self._run = system.port.random(8).hex()  # tokens of another run are invalid
        self._noted: set[Key] = set()
        self._changed = threading.Condition()
        self._looking = threading.Lock()  # one thread at a time checks; later changes are left to the next one
        self._paths: dict[Key, tuple[int, Path]] = {}  # with the bits
        self._logs: dict[Key, tuple[str, Log]] = {}  # with the identity of its directory
        self._states: dict[Key, tuple[int, ShardState]] = {}  # with its version
        self._version = 0
        self._next_look = 0.0
        self._rest = LOOK
        self._is_closed = False

    def note(self, client: str, index: int) -> None:
        """Note that something was stored in a shard."""
        with self._changed:
            self._noted.add((client, index))
            self._changed.notify_all()

    def changes(self, since: str, wait: float, may_read: MayRead, is_over: IsOver = lambda: False) -> Changes:
        """Return the changes since a token, of clients that may be read; waits up to `wait` seconds for one.

        is_over: asked from time to time whether the caller is gone.
        """
        deadline = system.port.monotonic() + wait
        while True:
            token, found = self._since(since, may_read, is_over)
            left = deadline - system.port.monotonic()
            if found or left <= 0 or self._is_closed or is_over():
                return Changes(self.root_id, token, found)
            with self._changed:
                is_noted = self._changed.wait_for(lambda: self._noted or self._is_closed, min(left, self._rest, POLL))
            if is_noted and not self._is_closed:
                system.port.sleep(GATHER)

    def states(self, may_read: MayRead, is_over: IsOver = lambda: False) -> dict[str, list[ShardState]]:
        """Return the shards of each client that may be read, in order. Raises HubFull if the caller is gone."""
        found: dict[str, list[ShardState]] = {}
        for state in self._since("", may_read, is_over)[1]:
            found.setdefault(state.client, []).append(state)
        return found

    def path(self, client: str, index: int) -> Path:
        """Return the directory of a shard. Raises NotFound."""
        found = self.paths([(client, index)])
        if not found:
            raise NotFound(f"there is no client {client} here, or it has no shard {index}")
        return found[client, index]

    def paths(self, keys: Collection[Key]) -> dict[Key, Path]:
        """Return the directories of those shards that exist. The root is listed at most once, for any number of unknown keys."""
        with self._looking:
            if not all(self._is_there(key) for key in keys):
                self._find_paths()
            return {key: self._paths[key][1] for key in keys if key in self._paths}

    def _is_there(self, key: Key) -> bool:
        return key in self._paths and system.port.look_up(self._paths[key][1]) is not None

    def close(self) -> None:
        """End all waits, and close all files."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with self._looking:
            while self._logs:
                self._logs.popitem()[1][1].close()

    def _since(self, since: str, may_read: MayRead, is_over: IsOver) -> tuple[str, list[ShardState]]:
        """Return a new token, and the changes since the given one. Raises HubFull if the caller is gone."""
        while not self._looking.acquire(timeout=POLL):
            if is_over():
                raise gone()
        try:
            run, _, version = since.partition(".")
            known = int(version) if run == self._run and version.isascii() and version.isdigit() and len(version) < 20 else 0
            if not self._is_closed:
                self._look(at_all=not known)
            new = [state for changed, state in self._states.values() if changed > known]
            token = f"{self._run}.{self._version}"
        finally:
            self._looking.release()
        clients = {client for client in {state.client for state in new} if may_read(client)}
        return token, sorted((state for state in new if state.client in clients), key=lambda state: (state.client, state.shard))

    def _look(self, *, at_all: bool) -> None:
        """Check the shards with noted changes; all of them if requested or due."""
        with self._changed:
            noted, self._noted = self._noted, set()
        began = system.port.monotonic()
        if at_all or began >= self._next_look or not noted <= self._paths.keys():
            self._find_paths()
            noted = set(self._paths)
        for key in noted & self._paths.keys():
            state = self._state(key, *self._paths[key])
            if key not in self._states or self._states[key][1] != state:
                self._version += 1
                self._states[key] = self._version, state
        if noted == self._paths.keys():
            now = system.port.monotonic()
            self._rest = max(LOOK, REST * (now - began))
            self._next_look = now + self._rest

    def _find_paths(self) -> None:
        """Find the shards under the root, and forget removed ones. Incomplete sets are ignored."""
        self._paths = {}
        for client, found in route.scan(self.root).items():
            try:
                check_client(client)
                self._paths |= {(client, index): (found.bits, path) for index, path in found.paths(self.root)}
            except ShardError as error:
                logger.warning("%s: %s", self.root, error)
            except ValueError:
                continue  # not a client's
        for key in [key for key in self._states if key not in self._paths]:
            del self._states[key]
        for key in [key for key in self._logs if key not in self._paths]:
            self._close_log(key)

    def _state(self, key: Key, bits: int, path: Path) -> ShardState:
        """Check one shard. Its end is read first, so that the generations describe all records before it."""
        try:
            log = self._log(key, path)
            try:
                first, end = log.extent()
                return ShardState(key[0], bits, key[1], first, end, generations(log, path, end))
            finally:
                if key not in self._logs:
                    log.close()
        except (KvspoolError, OSError) as error:
            self._close_log(key)
            if is_scarce(error):
                raise  # not an error of the shard
            return ShardState(key[0], bits, key[1], 0, 0, [], shown(error, self.root))

    def _log(self, key: Key, path: Path) -> Log:
        """Return the log of a shard, reopened if it was recreated; it is kept open if there are not too many."""
        identity = system.port.identity(path)
        if key in self._logs and self._logs[key][0] != identity:
            self._close_log(key)
        if key in self._logs:
            return self._logs[key][1]
        log = open_shard(path, TIMEOUT)
        if len(self._logs) < descriptors.affordable(MOST_OPEN, 4):
            self._logs[key] = identity, log
        return log

    def _close_log(self, key: Key) -> None:
        if key in self._logs:
            self._logs.pop(key)[1].close()


def is_scarce(error: Exception) -> bool:
    """Return whether an error of the system means a lack of resources, which may be transient."""
    return isinstance(error, OSError) and not isinstance(error, KvspoolError) and error.errno in SCARCE


def shown(error: Exception, root: Path) -> str:
    """Return an error's text for another host, without the path of the root."""
    return f"{type(error).__name__}: {error}".replace(f"{root}{'/'}", "")
