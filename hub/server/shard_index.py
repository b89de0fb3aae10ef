"""The shard index: the end of each shard under a hub root, and its changes, which mirrors request for all shards at once.

The hub notes its own writes (`note`). Writes and trims of local processes are found by a check of every shard. Each listing makes one, and
callers that wait for changes make one from time to time. A check looks only at shards whose files have changed, and opens no segment if
the page of their writers tells enough. So a listing of thousands of shards takes less than a second. Between two parts of a check, calls
whose client has gone end, and readers find their shards.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import threading
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from hub.client_ids import check_client
from hub.errors import NotFound
from hub.protocol.reading import Changes, ShardState
from hub.root.catalogue import Catalogue
from hub.root.file_version import JournalVersion
from hub.root.store import CountedShard, generations, root_id
from kvspool import system
from kvspool.errors import KvspoolError
from kvspool.options import TIMEOUT
from kvspool.system.handles import Handle
from shard import descriptors
from shard.errors import ShardError
from shard.merged import Log
from shard.route import ShardDirectories
from shard.shardset import open_shard

LOOK = 0.25  # seconds between two checks of all shards
REST = 30  # times the duration of such a check, before the next one
PART = 0.2  # seconds of a check without a pause
GATHER = 0.005  # seconds to gather simultaneous changes
MOST_OPEN = 512  # logs kept open between two checks; the others are opened each time
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)  # there may be room later
MayRead = Callable[[str], bool]
Key = tuple[str, int]
T = TypeVar("T")
LookUp = Callable[[str, int], CountedShard | None]
logger = logging.getLogger("kvspool.hub")


class Runs(Protocol):
    """Calls a function on a thread; see `Call.run`."""

    async def __call__(self, work: Callable[..., T], /, *arguments: object) -> T: ...


class ShardIndex(Handle):
    """The states of all shards under a root. Its coroutines are for one event loop, its functions for any thread."""

    def __init__(self, root: Path, catalogue: Catalogue | None = None) -> None:
        """catalogue: that of the root, if the caller has one."""
        self.root = root
        self.look_up: LookUp = lambda client, index: None  # the content of a shard, as the hub's store knows it
        self._catalogue = Catalogue(root) if catalogue is None else catalogue
        self._found_at = -1  # the catalogue's changes when the paths were found
        self._versions: dict[Key, JournalVersion | None] = {}  # before the states were found
        self._sizes: dict[Key, int] = {}  # bytes of the shards, if known
        self.root_id = root_id(root)
        self._run = system.port.random(8).hex()  # tokens of another run are invalid
        self._noted: set[Key] = set()
        self._waiting: list[Callable[[], object]] = []  # wake the coroutines that wait for a change
        self._noting = threading.Lock()
        self._turn = asyncio.Lock()  # one coroutine at a time checks; the others take no thread meanwhile
        self._looking = threading.Lock()
        self._paths: dict[Key, tuple[int, Path]] = {}  # with the bits
        self._found: dict[str, tuple[ShardDirectories, dict[Key, tuple[int, Path]]]] = {}  # by client, with its part of the paths
        self._logs: dict[Key, tuple[str, Log]] = {}  # with the identity of its directory
        self._states: dict[Key, tuple[int, ShardState]] = {}  # with its version
        self._left: set[Key] = set()  # shards to check
        self._all_since: float | None = None  # when the present check of all shards began
        self._version = 0
        self._next_look = math.inf
        self._was_asked = False  # for all shards: the first check of thousands takes seconds, and may wait until then
        self._rest = LOOK
        self._is_closed = False

    def note(self, client: str, index: int) -> None:
        """Note that something was stored in a shard."""
        self._wake((client, index))

    def _wake(self, *changed: Key) -> None:
        with self._noting:
            self._noted.update(changed)
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    async def changes(self, since: str, wait: float, may_read: MayRead, run: Runs) -> Changes:
        """Return the changes since a token, of clients that may be read; waits up to `wait` seconds for one."""
        deadline = system.port.monotonic() + wait
        while True:
            token, found = await self._since(since, may_read, run)
            left = deadline - system.port.monotonic()
            if found or left <= 0 or self._is_closed:
                return Changes(self.root_id, token, found)
            if await self._is_noted(min(left, self._rest)):
                await asyncio.sleep(GATHER)

    def look(self, since: str, may_read: MayRead) -> Changes:
        """Return the changes since a token, of clients that may be read. It blocks, but doesn't wait for a change."""
        self._begin_check(since)
        while not self._check_some():
            pass
        return Changes(self.root_id, *self._changed_since(since, may_read))

    async def _is_noted(self, seconds: float) -> bool:
        """Wait for a noted change. Return whether there was one."""
        loop, noted = asyncio.get_running_loop(), asyncio.Event()
        with self._noting:
            if self._noted or self._is_closed:
                return not self._is_closed
            wake = partial(loop.call_soon_threadsafe, noted.set)
            self._waiting.append(wake)
        try:
            await asyncio.wait_for(noted.wait(), seconds)
        except TimeoutError:
            return False
        finally:
            with self._noting:
                if wake in self._waiting:
                    self._waiting.remove(wake)
        return not self._is_closed

    async def states(self, may_read: MayRead, run: Runs) -> dict[str, list[ShardState]]:
        """Return the shards of each client that may be read, in order."""
        found: dict[str, list[ShardState]] = {}
        for state in (await self._since("", may_read, run))[1]:
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
        if not all(self._is_there(key) for key in keys):
            with self._looking:
                self._find_paths()
        paths = self._paths
        return {key: paths[key][1] for key in keys if key in paths}

    def _is_there(self, key: Key) -> bool:
        found = self._paths.get(key)
        return found is not None and system.port.look_up(found[1]) is not None

    def close(self) -> None:
        """End all waits, and close all files."""
        self._is_closed = True
        self._wake()
        with self._looking:
            self._catalogue.close()
            while self._logs:
                self._logs.popitem()[1][1].close()

    async def _since(self, since: str, may_read: MayRead, run: Runs) -> tuple[str, list[ShardState]]:
        """Return a new token, and the changes since the given one."""
        async with self._turn:
            await run(self._begin_check, since)
            while not await run(self._check_some):
                pass
            return await run(self._changed_since, since, may_read)

    @property
    def token(self) -> str:
        """Return a token: later changes are those since the last check."""
        return f"{self._run}.{self._version}"

    def _known(self, since: str) -> int | None:
        """Return the version of a token; None if it is of another run, or none."""
        run, _, version = since.partition(".")
        return int(version) if run == self._run and version.isascii() and version.isdigit() and len(version) < 20 else None

    def _changed_since(self, since: str, may_read: MayRead) -> tuple[str, list[ShardState]]:
        """Return a new token, and the changes since the given one, as of the last check."""
        with self._looking:
            known = self._known(since) or 0
            new = [state for changed, state in self._states.values() if changed > known]
            token = self.token
        clients = {client for client in {state.client for state in new} if may_read(client)}
        return token, sorted((state for state in new if state.client in clients), key=lambda state: (state.client, state.shard))

    def _begin_check(self, since: str) -> None:
        """Collect the shards with noted changes; all of them if due, or if the token is unknown. Nothing before all were asked for once."""
        with self._looking:
            if self._is_closed:
                return
            now = system.port.monotonic()
            is_whole = self._known(since) is None or now >= self._next_look
            if not is_whole and not self._was_asked:
                return
            self._was_asked = True
            with self._noting:
                noted, self._noted = self._noted, set()
            if is_whole:
                self._find_paths()
                noted = set(self._paths)
                self._all_since = now
            elif not noted <= self._paths.keys():
                self._find_paths()
            self._left |= noted

    def _check_some(self) -> bool:
        """Check the collected shards for a while. Return whether all were checked."""
        with self._looking:
            end = system.port.monotonic() + PART
            while self._left and not self._is_closed:
                self._check(self._left.pop())
                if system.port.monotonic() > end:
                    return False
            if self._all_since is not None:
                now = system.port.monotonic()
                self._rest = max(LOOK, REST * (now - self._all_since))
                self._next_look = now + self._rest
                self._all_since = None
            return True

    def _check(self, key: Key) -> None:
        """Check one shard, if it still exists and has changed. Raises OSError for a lack of resources; the shard is checked again then."""
        if key not in self._paths:
            return
        if key in self._states and (version := self._versions.get(key)) is not None and version.is_current:
            return
        try:
            state = self._state(key, *self._paths[key])
        except BaseException:
            self._left.add(key)
            raise
        if key not in self._states or self._states[key][1] != state:
            self._version += 1
            self._states[key] = self._version, state

    def _find_paths(self) -> None:
        """Find the shards under the root, and forget removed ones. Incomplete sets are ignored."""
        clients = self._catalogue.clients()
        if self._catalogue.changes == self._found_at:
            return
        self._found_at = self._catalogue.changes
        known, self._found = self._found, {}
        paths: dict[Key, tuple[int, Path]] = {}
        for client, found in clients.items():
            last = known.get(client)
            ours = last[1] if last is not None and last[0] is found else self._paths_of(client, found)
            self._found[client] = found, ours
            paths |= ours
        self._paths = paths  # at once: other threads use it without the lock
        for noted in (self._states, self._versions, self._sizes):
            for key in noted.keys() - paths.keys():
                noted.pop(key)
        for key in self._logs.keys() - paths.keys():
            self._close_log(key)

    def _paths_of(self, client: str, found: ShardDirectories) -> dict[Key, tuple[int, Path]]:
        """Return the bits and the directories of a client's shards; of none if it has no complete set of them."""
        try:
            check_client(client)
            return {(client, index): (found.bits, path) for index, path in found.paths(self.root)}
        except ShardError as error:
            logger.warning("%s: %s", self.root, error)
        except ValueError:
            pass  # not a client's
        return {}

    def _state(self, key: Key, bits: int, path: Path) -> ShardState:
        """Check one shard. Its version is read first, then its end, so that the generations describe all records before it."""
        counted = self.look_up(*key)
        if counted is not None and counted.version is not None:
            self._versions[key], self._sizes[key] = counted.version, counted.sizes.used
            first = counted.sizes.first
            return ShardState(key[0], bits, key[1], first, max(first, counted.sizes.next), list(counted.logs))
        self._versions.pop(key, None)
        self._sizes.pop(key, None)
        try:
            log = self._log(key, path)
            try:
                version = JournalVersion.of(log)
                first, end = log.extent()
                state = ShardState(key[0], bits, key[1], first, end, generations(log, path, end))
            finally:
                if key not in self._logs:
                    log.close()
        except (KvspoolError, OSError) as error:
            self._close_log(key)
            if is_scarce(error):
                raise  # not an error of the shard
            return ShardState(key[0], bits, key[1], 0, 0, [], shown(error, self.root))
        self._versions[key] = version
        return state

    def used(self, state: ShardState) -> int:
        """Return the bytes of a shard's records, as of its state; 0 if they can't be read."""
        key = state.client, state.shard
        known = self._sizes.get(key)
        if known is not None:
            return known
        try:
            with closing(open_shard(self.path(*key), TIMEOUT)) as log:
                used = int(log.stats().used)
        except (KvspoolError, OSError):
            return 0  # its state has the error
        if self._versions.get(key) is not None:
            self._sizes[key] = used
        return used

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
