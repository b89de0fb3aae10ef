"""The shipper: follows the logs of a client and sends what comes to a hub, exactly once, through outages of any length.

Each log is a lane with a durable reader; one call carries all lanes. What the hub has acknowledged is committed, and nothing else: after
a death or an outage the hub says what it has, and the lanes go on from there. What was not acknowledged is in the log, so it needs no
memory here: a lane reads it again.

**Batches.** What is there is sent at once, up to `batch_bytes` of each lane in turn; where less is there, the shipper waits for `linger`
seconds, so that single records travel together. Up to `window` bytes are on their way without an acknowledgement.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

import kvspool
import shard
from hub import hubs
from hub.client import check_client
from hub.columns import Rows
from hub.connection import SILENCE, Connection, Security
from hub.errors import HubError, HubFull, NotAllowed, QuotaExceeded, Unexpected, Unreachable
from hub.lane import Lane
from hub.wire import BATCH_BYTES, VERSION, Opening
from hub.wire import Log as LogOnWire
from kvspool import system
from kvspool.errors import NotALog
from kvspool.queue import ChunkQueue
from kvspool.spool.cursor import Isolation
from kvspool.wakeups import BLIND_POLL, POLL, Watcher
from shard.shardset import Log

LINGER = 0.002  # seconds
WINDOW = 8 << 20  # bytes
MOST_ROWS = 16_384  # of a batch
COMMIT_INTERVAL = 0.1  # seconds between two commits of the durable readers
PING_INTERVAL = 5.0  # seconds without anything to send after which the hub is asked whether it is there
IMPATIENT_POLL = 0.05  # seconds between two looks, for who ends when nothing more comes
FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 30.0  # seconds
LONGEST_BLIND_POLL = 0.05  # seconds between two looks where no event will come, after a while without any
KEEP_ALIVE = 1.0  # seconds between two signs of life of the durable readers during an outage
logger = logging.getLogger("kvspool.ship")

State = Literal["connecting", "connected", "waiting", "stopped", "failed"]


class LaneStatus(msgspec.Struct, frozen=True):
    """One log on its way. sent: records, those that went twice counted twice; acknowledged: sequence below which the hub has all; behind:
    records that it hasn't; lost: sequences that were overwritten before they could be sent; error: why it is not shipped any more."""

    shard: int
    path: str
    sent: int
    acknowledged: int
    behind: int
    lost: int
    error: str


class ShipStatus(msgspec.Struct, frozen=True):
    """What a shipper does. outages: connections that broke; retry_in: seconds until the next attempt, in the state "waiting"."""

    client: str
    hub: str
    state: State
    behind: int
    sent: int
    bytes: int
    lost: int
    outages: int
    retry_in: float
    error: str
    lanes: list[LaneStatus]


class Shipper:
    """Ships one log, or one shard set, as the client `client` to a hub. `run` does it in the calling thread until `stop`."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        hub: str | Sequence[str],
        *,
        client: str,
        security: Security | Callable[[], Security] = Security(),  # noqa: B008 - it is frozen
        choose: hubs.Choice = "hash",
        isolation: Isolation | None = None,
        linger: float = LINGER,
        batch_bytes: int = BATCH_BYTES,
        window: int = WINDOW,
        silence: float = SILENCE,
    ) -> None:
        """Take the source's durable readers. Raises what opening it raises, ReaderBusy if it is being shipped, ValueError.

        hub: `grpc+tls://host:port` or `grpc://host:port`; of several, one is chosen: see `hubs.chosen`. security: or a function that gives
        it anew for each connection, so that tokens and certificates can change. isolation: "synced" ships only what is on disk here; None:
        so if the hub's own level is "disk". silence: seconds after which a hub that owes an answer counts as dead.
        """
        self.client = check_client(client)
        self.hub = hubs.chosen(client, [hub] if isinstance(hub, str) else list(hub), choose)
        self._security = security if callable(security) else lambda: security
        self._isolation = isolation
        self.linger = linger
        self.batch_bytes = batch_bytes
        self.window = window
        self._silence = silence
        self._logs = open_source(Path(os.path.abspath(source)))
        self.lanes: list[Lane] = []
        try:
            for index, log in enumerate(self._logs):
                self.lanes.append(Lane(index, log, hubs.name(self.hub)))
        except BaseException:
            self.close()
            raise
        self._stop = threading.Event()
        self._state: State = "connecting"
        self._error = ""
        self._outages = 0
        self._bytes = 0
        self._retry_at = 0.0

    # Running.

    def run(self, *, until_empty: bool = False) -> None:
        """Ship until `stop` is called from another thread or a signal handler; `until_empty`: until the hub has all that is there.

        An outage is no error: it goes on until the hub is back. Raises the error of the lanes if none of them can be shipped any more.
        """
        backoff = FIRST_BACKOFF
        while not self._stop.is_set():
            try:
                self._state = "connecting"
                with self._connect() as connection:
                    backoff = FIRST_BACKOFF
                    _Call(self, connection, self._open_lanes(connection), until_empty).run()
                    connection.finish()
                    self._live()
                break
            except HubError as error:
                retry_after = self._note(error)
                self._rest(max(retry_after, backoff * (0.5 + _random())))
                backoff = min(2 * backoff, LONGEST_BACKOFF)
        self._state = "stopped"
        for lane in self._live():
            lane.commit()

    def stop(self) -> None:
        """Let `run` come to its end."""
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._stop.is_set()

    def _connect(self) -> Connection:
        lanes = self._live()
        logs = [LogOnWire(lane.index, lane.id, lane.log.end()) for lane in lanes]
        opening = Opening(VERSION, self.client, len(self.lanes).bit_length() - 1, logs)
        return Connection(self.hub, self._security(), opening, self._silence)

    def _open_lanes(self, connection: Connection) -> Isolation:
        """Let the lanes begin where the hub says. Return what they may read."""
        opened = connection.opened
        self._state, self._error = "connected", ""
        isolation: Isolation = self._isolation or ("synced" if opened.level == "disk" else "appended")
        for place in opened.places:
            self.lanes[place.index].open(place, isolation)
        return isolation

    def _live(self) -> list[Lane]:
        """Return the lanes that can be shipped. Raises the error of the first one if there is none."""
        lanes = [lane for lane in self.lanes if lane.error is None]
        if not lanes:
            self._state = "failed"
            error = self.lanes[0].error
            assert error is not None
            raise error
        return lanes

    def _note(self, error: HubError) -> float:
        """Note why a connection ended. Return how long to wait at least. Raises the error if trying again is of no use."""
        self._outages += 1
        self._error = str(error)
        logger.warning("%s", error)
        if isinstance(error, HubFull | QuotaExceeded):
            return error.retry_after or LONGEST_BACKOFF
        if not isinstance(error, Unreachable | NotAllowed | Unexpected):
            self._state = "failed"
            raise error
        return 0.0

    def _rest(self, seconds: float) -> None:
        """Wait before the next attempt; the durable readers say meanwhile that they are alive."""
        self._state = "waiting"
        self._retry_at = system.port.monotonic() + seconds
        while (left := self._retry_at - system.port.monotonic()) > 0 and not self._stop.wait(min(left, KEEP_ALIVE)):
            for lane in self._live():
                lane.commit()

    def counted(self, size: int) -> None:
        """Count a batch that was sent."""
        self._bytes += size

    # Looking after it.

    def status(self) -> ShipStatus:
        """Return what the shipper does at this moment; for other threads too."""
        lanes = [
            LaneStatus(lane.index, str(lane.log.path), lane.records, lane.acked, lane.behind, lane.lost, str(lane.error or ""))
            for lane in self.lanes
        ]
        return ShipStatus(
            client=self.client,
            hub=self.hub,
            state=self._state,
            behind=sum(lane.behind for lane in lanes),
            sent=sum(lane.sent for lane in lanes),
            bytes=self._bytes,
            lost=sum(lane.lost for lane in lanes),
            outages=self._outages,
            retry_in=max(0.0, self._retry_at - system.port.monotonic()) if self._state == "waiting" else 0.0,
            error=self._error,
            lanes=lanes,
        )

    def close(self) -> None:
        """Give the durable readers and the logs back."""
        for lane in self.lanes:
            lane.close()
        for log in self._logs:
            log.close()

    def __enter__(self) -> Shipper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Call:
    """One connection of a shipper, from its opening until it is stopped or breaks."""

    def __init__(self, shipper: Shipper, connection: Connection, isolation: Isolation, until_empty: bool) -> None:
        self._shipper = shipper
        self._connection = connection
        self._until_empty = until_empty
        self._lanes = [lane for lane in shipper.lanes if lane.cursor is not None and lane.error is None]
        self._held: tuple[Lane, Rows] | None = None  # the batch that is to be sent next: it asks if it is the last one of a round
        self._unanswered: deque[int] = deque()  # bytes that each question without an answer covers
        self._unasked = 0
        self._committed = self._pinged = system.port.monotonic()
        self._must_sync = isolation == "synced"
        self._bed = _Bed(self._lanes)

    def run(self) -> None:
        """Send what comes, and note what was stored. Raises what the connection breaks with."""
        try:
            while self._lanes and not self._shipper.is_stopping:
                size = self._round()
                is_full = sum(self._unanswered) >= self._shipper.window
                if is_full or (size < self._shipper.batch_bytes and self._connection.is_owed):
                    self._connection.hear()
                self._take_answers()
                if size < self._shipper.batch_bytes and not is_full:
                    if not size and self._is_finished():
                        return
                    self._rest(is_idle=not size)
        finally:
            self._bed.close()
            for lane in self._lanes:
                lane.commit()

    def _round(self) -> int:
        """Send a batch of each lane that has one; return their bytes. The last one asks for an acknowledgement of all."""
        size = 0
        for lane in self._lanes:
            if self._must_sync and lane.log.end() > lane.sent:
                lane.log.sync()  # nobody else may ever do it
            rows = lane.next_rows(MOST_ROWS)
            if rows is not None:
                size += rows.batch.nbytes
                self._send_held(ask=self._unasked >= self._shipper.batch_bytes)
                self._held = lane, rows
        self._send_held(ask=True)
        return size

    def _send_held(self, *, ask: bool) -> None:
        if self._held is not None:
            (lane, rows), self._held = self._held, None
            size = rows.batch.nbytes
            self._unasked += size
            if ask:
                self._unanswered.append(self._unasked)
                self._unasked = 0
            self._connection.put(lane.put(rows, ask), rows.batch)
            self._shipper.counted(size)
            self._pinged = system.port.monotonic()

    def _take_answers(self) -> None:
        """Note what the hub has stored and refused."""
        stored, refused = self._connection.stored, self._connection.refused
        while len(self._unanswered) > self._connection.asked - self._connection.answered:
            self._unanswered.popleft()
        for lane in list(self._lanes):
            lane.acked = max(lane.acked, stored.pop(lane.index, 0))
            if lane.index in refused:
                self._refuse(lane, refused.pop(lane.index))
        now = system.port.monotonic()
        if now >= self._committed + COMMIT_INTERVAL:
            self._committed = now
            for lane in self._lanes:
                lane.commit()

    def _refuse(self, lane: Lane, error: HubError) -> None:
        """The hub takes no more of a lane in this call: try again in another one, or never."""
        if isinstance(error, HubFull | QuotaExceeded | Unexpected):
            raise error
        logger.error("shard %d of %s: %s", lane.index, self._shipper.client, error)
        lane.error = error
        self._lanes.remove(lane)

    def _is_finished(self) -> bool:
        """Return whether all is acknowledged that there was to ship, for who waits for that."""
        return self._until_empty and not self._unanswered and all(lane.behind == 0 for lane in self._lanes)

    def _rest(self, *, is_idle: bool) -> None:
        """Little or nothing is there: wait until more comes, and then a moment for what comes with it."""
        if is_idle:
            now = system.port.monotonic()
            if now >= self._pinged + PING_INTERVAL:
                self._pinged = now
                self._unanswered.append(0)
                self._connection.ping({lane.index: lane.log.end() for lane in self._lanes})
            self._bed.sleep(IMPATIENT_POLL if self._until_empty else POLL)
        if self._shipper.linger:
            system.port.sleep(self._shipper.linger)


class _Bed:
    """Sleeps until one of several logs has more: on one inotify descriptor for all."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes
        self._watcher = Watcher()
        self._watched: dict[int, object] = {}

    def sleep(self, timeout: float) -> None:
        """Sleep up to `timeout` seconds; may end early, or for nothing. Raises LogVanished."""
        is_rung = True
        for lane in self._lanes:
            cursor = lane.cursor
            assert cursor is not None
            if lane.index not in self._watched or self._watched[lane.index] != cursor.files:
                self._watched[lane.index] = cursor.files
                cursor.watch(self._watcher, lane.index)
                timeout = 0  # what came before is not reported
            cursor.ask()
            is_rung = is_rung and cursor.is_rung
        if timeout and any(lane.log.end() > lane.sent for lane in self._lanes):
            return
        if is_rung and not self._watcher.is_blind:
            is_known = self._watcher.wait(timeout) is not None
        else:
            is_known = self._doze(timeout)
        if not is_known:
            for lane in self._lanes:
                if lane.cursor is not None:
                    lane.cursor.refuse_vanished()

    def _doze(self, timeout: float) -> bool:
        """Sleep where nobody wakes us, since the system has no watch left: only the ends are looked at, and more seldom as time goes by.

        A process with many shippers would use a processor up by looking at everything every few milliseconds.
        """
        left, pause = timeout, BLIND_POLL
        while left > 0 and not any(lane.log.end() > lane.sent for lane in self._lanes):
            system.port.sleep(min(left, pause))
            left -= pause
            pause = min(2 * pause, LONGEST_BLIND_POLL)
        return False

    def close(self) -> None:
        self._watcher.close()


def open_source(path: Path) -> list[Log]:
    """Open a log, or the logs of a shard set, in order. Raises NotALog for a queue, and what opening raises."""
    try:
        log = kvspool.open(path)
    except NotALog:
        return list(shard.open(path).shards)
    if isinstance(log, ChunkQueue):
        log.close()
        raise NotALog(f"{path} is a queue; only logs that keep sequences can be shipped")
    return [log]


def _random() -> float:
    """Return a number from 0 up to 1."""
    return int.from_bytes(system.port.random(4), "little") / (1 << 32)
