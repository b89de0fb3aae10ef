"""The mirror: pulls the shards of a hub into its own hub root, exactly once, through outages of any length.

One call asks the source which shards have changed, and waits there for a change. Each shard with new records is pulled for a turn, then the
next one. Only the stored records determine where to resume. After a crash or an outage each shard begins with its last record. The source
must have that record as well.

The resulting root can itself be served by a hub, to readers and to other mirrors. It accepts no records from shippers of mirrored
clients.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from hub.client import hubs
from hub.client.connection import Security
from hub.client.mirrored_shard import MirroredShard
from hub.client.remote import RemoteHub
from hub.client.ship_status import MirrorStatus, ShardMirrorStatus
from hub.errors import Conflict, HubError, HubFull, Malformed, NotAllowed, QuotaExceeded, Unreachable
from hub.protocol import reading
from hub.protocol.ingest import VERSION, Level
from hub.protocol.reading import ShardState
from hub.root.root import HubRoot
from hub.root.store import MIRROR_LOCK, root_id, take_lock
from hub.security import private
from kvspool import system
from kvspool.errors import KvspoolError, LogExists
from kvspool.options import Isolation
from kvspool.system.attempts import Attempts
from kvspool.system.handles import ClosingHandle
from kvspool.system.pauses import growing
from shard import descriptors

IMPATIENT_WAIT = 0.05  # seconds, with `until_empty`
WAIT = 1.0  # seconds that the source is asked to wait for a change; `stop` may take as long
TURN = 30.0  # longest turn of a shard, in seconds
LONGEST_TURN = 600.0
RETRY = 30.0  # seconds until a shard that could not be pulled is retried
MOST_OPEN = 256  # open shards
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 30.0  # seconds
logger = logging.getLogger("kvspool.mirror")


class Mirror(ClosingHandle):
    """Pulls the shards of a hub into a hub root. `run` pulls in the calling thread until `stop` is called."""

    def __init__(
        self,
        source: str,
        root: str | os.PathLike[str],
        *,
        clients: str | Sequence[str] = "*",
        security: Security | Callable[[], Security] = Security(),  # noqa: B008 - it is frozen
        level: Level = "process",
        isolation: Isolation | None = None,
        turn: float = TURN,
        is_own: bool = False,
    ) -> None:
        """Open the root; a missing one is created.

        Raises RootInUse if another mirror pulls that source into it, AccessError if other users may write it, ValueError, and the errors of
        `HubRoot.open`.

        source: `grpc+tls://host:port` or `grpc://host:port`. clients: a pattern (`*`, `?`, `[...]`) of ids, or several. security: may be a
        function that is called for each connection. level: durability of a pulled record: it survives a crash of this process, or ("disk")
        of the machine. isolation: "synced" pulls only records on the source's disk; None: "synced" if the source's level is "disk". turn:
        seconds after which a stream without records counts as dead. is_own: see `MirroredShard`.
        """
        self.source = hubs.check(source)
        self._patterns = [clients] if isinstance(clients, str) else list(clients)
        self._security = security if callable(security) else lambda: security
        self._level: Level = level
        self._isolation = isolation
        self._turn = turn
        self._is_own = is_own
        with suppress(LogExists):
            HubRoot.create(root).close()
        with HubRoot.open(root) as found:
            self.root = found.path
        private.check_directory(self.root)
        self._id = root_id(self.root)
        lock = f"{MIRROR_LOCK}{hubs.name(self.source)}"
        self._lock = take_lock(self.root, lock, f"another mirror pulls {self.source} into {self.root}")
        self._shards: dict[tuple[str, int], MirroredShard] = {}
        self._open: dict[tuple[str, int], MirroredShard] = {}  # the most recently used ones are last
        self._attempts = Attempts()

    # Running.

    def run(self, *, until_empty: bool = False) -> None:
        """Pull until `stop` is called from another thread or a signal handler; `until_empty`: until all the source's records are stored
        here.

        An outage is no error: the mirror retries until the source is back. A shard that can't be pulled is retried now and then; with
        `until_empty`, its error is raised once the others are done. Raises Conflict if the source serves this same root.
        """
        with self._attempts.running():
            while not self._attempts.is_stopped:
                try:
                    self._attempts.state = "connecting"
                    with RemoteHub(self.source, security=self._security()) as hub:
                        self._session(hub, until_empty)
                    break
                except HubError as error:
                    least = self._note(error)
                    self._attempts.wait(max(least, growing(self._attempts.failures, FIRST_BACKOFF, LONGEST_BACKOFF)))
            errors = [shard.error for shard in self._shards.values() if shard.error is not None]
            if until_empty and errors and not self._attempts.is_stopped:
                raise errors[0]

    def stop(self) -> None:
        """Make `run` return."""
        self._attempts.stop()

    @property
    def is_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._attempts.is_stopped

    def _session(self, hub: RemoteHub, until_empty: bool) -> None:
        """Pull until `stop` is called, all records are stored, or the connection breaks."""
        server = hub.server()
        if server.version != VERSION:
            raise Malformed(f"{self.source} speaks version {server.version} of the protocol; this is version {VERSION}")
        if server.root == self._id:
            raise Conflict(f"{self.source} serves {self.root} itself; a mirror needs a root of its own")
        self._attempts.succeed()
        isolation: Isolation = self._isolation or ("synced" if server.level == "disk" else "appended")
        token, wait = "", 0.0
        while not self._attempts.is_stopped:
            changes = hub.changes(token, wait)
            if changes.root != server.root:
                raise Unreachable(f"{self.source} is now another hub than before")
            token = changes.token
            self._note_states(changes.shards, server.root)
            is_busy = self._pull_all(hub, isolation)
            if until_empty and not is_busy and not changes.shards and all(one.is_current or one.error for one in self._shards.values()):
                return
            wait = 0.0 if is_busy else IMPATIENT_WAIT if until_empty else WAIT

    def _note_states(self, states: list[ShardState], source: str) -> None:
        """Store the states of the source's shards."""
        for state in sorted(states, key=lambda state: (state.client, state.shard)):  # in order, like other creators of shards
            reading.check_state(state)
            if not any(fnmatch.fnmatchcase(state.client, pattern) for pattern in self._patterns):
                continue
            key = state.client, state.shard
            shard = self._shards.get(key)
            if shard is None or not shard.is_of(source, state):
                self._close_shard(key)
                shard = self._shards[key] = MirroredShard(self.root, source, state, is_own=self._is_own)
            shard.state, shard.is_current = state, False

    def _pull_all(self, hub: RemoteHub, isolation: Isolation) -> bool:
        """Give a turn to every shard with new records. Return whether one of them may have more. Raises errors that concern all of them."""
        is_busy = False
        for key, shard in self._shards.items():
            if self._attempts.is_stopped:
                break
            if shard.is_current or shard.retry_at > system.port.monotonic():
                continue
            self._keep_open(key, shard)
            before = shard.next
            try:
                shard.pull(hub, isolation, self._turn)
                self._succeed(shard, before)
            except Unreachable:
                if shard.next == before:  # nothing arrived
                    self._turn = min(2 * self._turn, LONGEST_TURN)
                    raise
                shard.error, shard.retry_at = None, 0.0
            except (HubFull, QuotaExceeded):
                raise
            except (KvspoolError, OSError) as error:
                self._fail(shard, error)
            is_busy = is_busy or not (shard.is_current or shard.retry_at)
        return is_busy

    def _succeed(self, shard: MirroredShard, before: int) -> None:
        """Note a turn that ended without an error."""
        if self._level == "disk":
            shard.sync()
        shard.error = None
        shard.is_current = shard.behind == 0
        stands_still = shard.next == before and not shard.is_current
        shard.retry_at = system.port.monotonic() + WAIT if stands_still else 0.0

    def _fail(self, shard: MirroredShard, error: KvspoolError | OSError) -> None:
        """Note that a shard can't be pulled; the others continue."""
        if str(shard.error) != str(error):
            logger.error("%s", error)
        shard.error = error
        shard.retry_at = system.port.monotonic() + RETRY

    def _note(self, error: HubError) -> float:
        """Note why a connection ended. Return the shortest time to wait, in seconds. Raises the error if a retry is useless."""
        if self._attempts.error != str(error):  # otherwise it was reported at the last attempt
            logger.warning("%s", error)
        self._attempts.fail(error)
        if isinstance(error, HubFull | QuotaExceeded):
            return error.retry_after or 0.0
        if not isinstance(error, Unreachable | NotAllowed):
            raise error
        return 0.0

    def _keep_open(self, key: tuple[str, int], shard: MirroredShard) -> None:
        """Keep a shard open; if many are open, close the least recently used one."""
        self._open.pop(key, None)
        self._open[key] = shard
        if len(self._open) > descriptors.affordable(MOST_OPEN, 2):
            self._close_shard(next(iter(self._open)))

    def _close_shard(self, key: tuple[str, int]) -> None:
        shard = self._open.pop(key, None)
        if shard is not None:
            shard.close()

    # Maintenance.

    def status(self) -> MirrorStatus:
        """Return the mirror's current state. Can be called by other threads."""
        known = list(self._shards.values())
        shards = [
            ShardMirrorStatus(
                one.state.client, one.state.shard, str(one.path), one.pulled, one.next, one.behind, one.lost, str(one.error or "")
            )
            for one in known
        ]
        return MirrorStatus(
            source=self.source,
            root=str(self.root),
            state=self._attempts.state,
            behind=sum(shard.behind for shard in shards),
            pulled=sum(shard.pulled for shard in shards),
            bytes=sum(one.bytes for one in known),
            lost=sum(shard.lost for shard in shards),
            outages=self._attempts.outages,
            retry_in=self._attempts.retry_in,
            error=self._attempts.error,
            shards=shards,
        )

    def close(self) -> None:
        """Release the root."""
        for key in list(self._open):
            self._close_shard(key)
        if not self._lock.is_closed:
            with self._lock as fd:
                system.port.unlock_file(fd)
