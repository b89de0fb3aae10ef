"""Shards at hub servers, for the driver; tasks use `ranges`.

There may be several hubs. Each hub, or each group of hubs with the same clients (`h1|h2`), has clients of its own. A client that moved from
one hub to another has its earlier records at the first. A shard is read from any hub that has the records. Its sequences are those of a
`hub.client.timeline`: the same at every hub. If it is unknown which of two logs came first: Conflict.

**Outages.** While a hub is down, the driver keeps its last known state. So a stream waits, or continues with the other hubs of the group.
If no hub of a group has answered for `timeout` seconds: Unreachable, [KVSPOOL_HUB_UNREACHABLE].
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hub.client import timeline
from hub.client.outage import FIRST_BACKOFF, LATER, Outage
from hub.client.timeline import Table
from hub.errors import Conflict, HubError, HubFull, NotAllowed, NotFound, QuotaExceeded, ShardDamaged, Unexpected, Unreachable
from hub.protocol import reading
from hub.protocol.reading import ShardState, Ticket
from hub.spark import offsets
from hub.spark.endpoints import TIMEOUT, HubEndpoint
from hub.spark.options import Credentials
from hub.spark.ranges import HubRange, Part
from hub.spark.selection import ALL, Selection
from hub.spark.shards import Extent, ShardKey, ShardOffsets
from kvspool import system
from kvspool.options import Isolation
from kvspool.system.handles import Handle, close_all

if TYPE_CHECKING:
    from hub.client.one_hub import OneHub

IDLE = 50  # looks without news before the next one waits: an idle query asks some 90 times a second
WAIT = 0.2  # seconds of that wait, for all hubs together
EVERYTHING = 30.0  # seconds between two requests for all shards of a hub, because removals are not reported
DAMAGE = 5.0  # seconds for which a shard may be unreadable: it may be in creation
COMMITS = 1.0  # seconds between two commits of a durable reader: each is a flush of the hub's disk
_logger = logging.getLogger("kvspool")
States = dict[ShardKey, ShardState]


class HubShards:
    """The shards at several hubs; see `SparkShards`. Use it in one thread of one process."""

    def __init__(
        self,
        locations: tuple[str, ...],
        selection: Selection = ALL,
        *,
        credentials: Credentials = Credentials(),  # noqa: B008 - it is frozen
        timeout: float = TIMEOUT,
        reader: str | None = None,
        isolation: Isolation = "appended",
        columns: frozenset[str] | None = None,
        local_root: Path | None = None,
    ) -> None:
        """Name the hubs, or groups of hubs such as `h1|h2`, without a request. Raises ValueError for an invalid location.

        timeout: longest outage of a hub or group, in seconds. reader: the durable reader that `commit` moves at each hub; a new one is
        created at the oldest records by the first look. isolation, columns, local_root: see `HubRange`.
        """
        self.locations = locations
        self._selection = selection
        self._reader = reader
        self._range = {"isolation": isolation, "columns": columns, "local_root": local_root}
        self._groups: list[list[_Hub]] = []
        self._tables: dict[ShardKey, Table] = {}
        names = [group.split("|") for group in locations]
        has_others = sum(map(len, names)) > 1
        for group in names:
            ends = [HubEndpoint(location, credentials, timeout, has_others) for location in group]
            self._groups.append([_Hub(one, selection, reader, isolation, self._tables, is_alone=len(group) == 1) for one in ends])
        self._hubs = [hub for group in self._groups for hub in group]
        self._pool = ThreadPoolExecutor(len(self._hubs), "kvspool hubs") if has_others else None
        self._asking: dict[_Hub, Future[bool]] = {}
        self._seen: dict[_Hub, States] = {}  # the states that `_extents` shows
        self._extents: dict[ShardKey, Extent] | None = None
        self._cache: dict[ShardKey, tuple[list[ShardState], Extent]] = {}
        self._noted: list[ShardOffsets] = []  # the last offsets of the checkpoint
        self._are_rights_checked = False
        self._in_vain = 0  # looks since the last news
        self._timeout = timeout
        self._is_running = False  # the query has seen its shards, now or before its checkpoint
        self._disputed_since: float | None = None  # since when the order of a client's logs is unknown

    def expect(self, noted: ShardOffsets) -> None:
        """See `SparkShards.expect`."""
        self._noted = [*self._noted[-1:], noted]
        self._is_running = True
        for key, table in noted.bases.items():
            known = {one.log: one.base for one in self._tables.get(key, ())}
            if not any(one.log in known for one in table) or any(known.get(one.log, one.base) != one.base for one in table):
                self._tables[key] = table
        self._cache = {}
        self._extents = None

    def away(self) -> dict[str, str]:
        """See `SparkShards.away`."""
        return {hub.endpoint.location: hub.outage.why for hub in self._hubs if hub.outage.is_away}

    def look(self) -> dict[ShardKey, Extent]:
        """See `SparkShards.look`; one call to each hub, for any number of shards. A hub that is down keeps its last known state.

        After many looks without news, one waits up to a fifth of a second for a change.

        Raises Unreachable for a hub or group that is down for too long, NotAllowed, Conflict if a hub that is alone has another root than
        before, or the order of a client's logs is unknown: a running query first waits for a shipper to show it to a hub that was away.
        ShardDamaged.
        """
        self._in_vain += 1
        wait = WAIT / len(self._hubs) if self._in_vain > IDLE else 0.0
        while True:
            if self._ask(wait):
                self._extents, self._in_vain = None, 0
            waiting = self._missing()
            if not waiting:
                try:
                    extents = self._look()
                except Conflict:
                    if not (waiting := [hub for hub in self._hubs if hub.outage.is_away and len(self._hubs) > 1]):
                        if not self._may_be_resolved():
                            raise  # no hub that is away can show the order of the logs
                        system.port.sleep(FIRST_BACKOFF)
                        continue
                else:
                    self._disputed_since = None
                    if not (waiting := self._doubtful(extents)):
                        self._is_running = True
                        return extents
            wait_for([self._asking[hub] for hub in waiting if hub in self._asking])
            self._check_patience(waiting)
            due = min(hub.outage.retry_at for hub in waiting)
            system.port.sleep(max(FIRST_BACKOFF, due - system.port.monotonic()))

    def _may_be_resolved(self) -> bool:
        """Return whether a running query should wait longer, until the hubs know the order of a client's logs.

        Until the client's shipper returns, a hub that was away has only an earlier log. One that lost its disk has only a later one.
        """
        now = system.port.monotonic()
        if self._disputed_since is None:
            self._disputed_since = now
        return self._is_running and now - self._disputed_since < self._timeout

    def _look(self) -> dict[ShardKey, Extent]:
        """Return the extents, as of the last answers of the hubs."""
        if not self._are_rights_checked:
            self._check_rights()
            self._are_rights_checked = True
        if self._extents is None:
            self._in_vain = 0
            self._seen = {hub: hub.states for hub in self._hubs if hub.root}
            self._extents = {key: self._extent(key, owners) for key, owners in sorted(self._owners().items())}
        return self._extents

    def _ask(self, wait: float) -> bool:
        """Ask all hubs for changes. Return whether there are any. A hub that is away is not waited for, unless no other has its clients."""
        if self._pool is None:
            has_changed = self._hubs[0].look(wait)
        else:
            for hub in self._hubs:
                if hub not in self._asking:
                    self._asking[hub] = self._pool.submit(hub.look, wait)
            lost = {hub for group in self._groups if all(one.outage.is_away for one in group) for hub in group}
            wait_for([future for hub, future in self._asking.items() if hub in lost or not hub.outage.is_away])
            done = [hub for hub, future in self._asking.items() if future.done()]
            has_changed = any([self._asking.pop(hub).result() for hub in done])
        for group in self._groups:
            if all(hub.outage.expired() is not None for hub in group):
                raise _unreachable(group)
        self._check_damage()
        return has_changed

    def _missing(self) -> list[_Hub]:
        """Return hubs that have never answered, and without which clients may be missing. One hub of a group may be away."""
        found = []
        for group in self._groups:
            unknown = [hub for hub in group if not hub.is_known]
            if len(unknown) > 1 or len(group) == 1 or not all(hub.outage.is_away for hub in unknown):
                found += unknown
        return found

    def _doubtful(self, extents: Mapping[ShardKey, Extent]) -> list[_Hub]:
        """Return hubs that don't answer, and may have what a checkpoint notes and no other hub has."""
        unknown = [hub for hub in self._hubs if not hub.is_known or (hub.outage.is_away and len(self._hubs) > 1)]
        if unknown:
            for noted in self._noted:
                for key, at in noted.next.items():
                    extent = extents.get(key)
                    if extent is None or at < extent.first or not offsets.is_in_log(noted, key, extent):
                        return unknown
        return []

    def _check_patience(self, waiting: list[_Hub]) -> None:
        """Raise Unreachable for hubs that are needed and have been away for too long."""
        late = [hub for hub in waiting if hub.outage.expired() is not None]
        if late:
            raise _unreachable(late)

    def _check_damage(self) -> None:
        """Raise ShardDamaged for a shard that no hub can read."""
        for hub in self._hubs:
            for key, error in hub.damage().items():
                if not any(key in other.states and key not in other.damaged for other in self._hubs):
                    raise error

    def _check_rights(self) -> None:
        """Raise NotAllowed for a selected client that may not be read: hubs don't list it."""
        asked = self._selection.topics or {key.topic for key in self._selection.shards or ()}
        known = [hub for hub in self._hubs if not hub.outage.is_away]
        for client in sorted(asked - {key.topic for hub in self._hubs for key in hub.states}):
            if known and not any(hub.may_read(client) for hub in known):
                raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {', '.join(self.locations)}: you may not read client {client}")

    def _owners(self) -> dict[ShardKey, list[_Hub]]:
        """Return the hubs that have each shard, in their order."""
        owners: dict[ShardKey, list[_Hub]] = {}
        for hub, states in self._seen.items():
            for key in states:
                owners.setdefault(key, []).append(hub)
        return owners

    def _extent(self, key: ShardKey, hubs: list[_Hub]) -> Extent:
        """Return the extent of a shard at some hubs. Raises Conflict."""
        states = [self._seen[hub][key] for hub in hubs]
        known, extent = self._cache.get(key, ([], None))
        if extent is None or known != states:
            extent = self._joined(key, hubs, states)
            self._cache[key] = states, extent
        return extent

    def _joined(self, key: ShardKey, hubs: list[_Hub], states: list[ShardState]) -> Extent:
        try:
            if len({state.bits for state in states}) > 1:
                raise Conflict("they have another number of its shards")
            table = self._tables[key] = timeline.merged(states, self._tables.get(key, ()))
        except Conflict as error:
            raise Conflict(
                f"[KVSPOOL_CLIENT_AT_TWO_HUBS] client {key.topic}, shard {key.partition}: "
                f"{' and '.join(hub.endpoint.location for hub in hubs)} have different logs of it: {error}; "
                "name one of the hubs, or other clients"
            ) from None
        extents = [timeline.extent(table, state) for state in states]
        late = [hub.endpoint.location for hub, state in zip(hubs, states, strict=True) if timeline.has_hidden(table, state)]
        words = f"{', '.join(late)} has returned with records that the query has passed, of an earlier log" if late else ""
        first, end = min(first for first, _ in extents), max(end for _, end in extents)
        extent = Extent(first, end, table[0].log if table else "", table, words)
        if len(self._hubs) > 1:  # the hub that had the records is away or has lost its disk, and the others lag
            ours = [noted.next[key] for noted in self._noted if key in noted.next and offsets.is_in_log(noted, key, extent)]
            extent = extent._replace(end=max(end, *ours, 0))
        return extent

    def _having(self, key: ShardKey) -> list[_Hub]:
        if self._extents is None or key not in self._extents:
            self.look()
        hubs = self._owners().get(key)
        if not hubs:
            raise NotFound(f"{', '.join(self.locations)}: there is no partition {key.partition} of {key.topic}")
        return hubs

    def range(self, key: ShardKey, first: int, end: int) -> HubRange:
        """See `SparkShards.range`."""
        self._in_vain = 0
        having, table = self._having(key), self._tables.get(key, ())
        wanted = timeline.cut(table, timeline.within(table, first, end))
        parts = []
        for hub in self._hubs:
            group = next(group for group in self._groups if hub in group)
            if hub in having or (not hub.is_known and any(other in having for other in group)):
                parts.append(hub.part(self._seen.get(hub, {}).get(key), wanted))
        parts.sort(key=lambda part: bool(part.away))
        log_id = table[0].log if table else ""
        return HubRange(key, log_id, first, end, tuple(parts), table=wanted, **self._range)  # type: ignore[arg-type]

    def has_ordered_times(self, key: ShardKey) -> bool:
        """See `SparkShards.has_ordered_times`: shipped records have the times that their client set."""
        return False

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """See `SparkShards.sequence_at`; of a group, one hub that answers is enough. Raises Unreachable, NotAllowed, ShardDamaged."""
        having, table = self._having(key), self._tables.get(key, ())
        while True:
            found: list[int | None] = []
            silent: list[_Hub] = []
            for group in self._groups:
                ours = [hub for hub in group if hub in having]
                answers = [answer for hub in ours if (answer := hub.sequence_at(self._seen[hub][key], table, timestamp)) is not None]
                found += [at for at, in answers]
                silent += [] if answers else ours
            if not silent:
                return min((at for at in found if at is not None), default=None)
            self._check_patience(silent)
            silent[0].outage.pause()

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """See `SparkShards.commit`; sent to the hubs within about a second, at the next `look` or `close`, or after an outage.

        Raises NotAllowed for another user's reader, QuotaExceeded for too many.
        """
        for hub in self._hubs if self._reader is not None else ():
            hub.commit(ends, may_send=hub not in self._asking)

    def close(self) -> None:
        """See `SparkShards.close`; commits noted positions."""
        try:
            close_all(self._hubs)
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)


class _Hub:
    """The driver's view of one hub. outage: its retries while it doesn't answer. Its `look` may run in another thread than the rest."""

    def __init__(
        self,
        endpoint: HubEndpoint,
        selection: Selection,
        reader: str | None,
        isolation: Isolation,
        tables: Mapping[ShardKey, Table],
        *,
        is_alone: bool,
    ) -> None:
        """tables: the timelines of the shards. is_alone: no other hub has its clients."""
        self.endpoint = endpoint
        self.root = ""
        self.states: States = {}
        self.is_known = False
        self.outage = Outage(endpoint.location, endpoint.timeout)
        self.damaged: dict[ShardKey, tuple[float, str]] = {}  # since when a shard is unreadable, and why
        self._selection = selection
        self._isolation = isolation
        self._is_alone = is_alone
        self._token = ""
        self._news = False  # a change that `look` has not reported yet
        self._everything_at = 0.0
        self._answered = 0.0  # when it last answered, in seconds since 1970
        self._hub: OneHub | None = None
        self._reader = _Reader(endpoint.location, reader, tables, is_alone=is_alone) if reader is not None else None

    def look(self, wait: float) -> bool:
        """Ask for changes, and wait up to `wait` seconds for one. Return whether there was any.

        During an outage the last known state is kept.
        """
        if system.port.monotonic() < self.outage.retry_at:
            return False
        is_new = self._hub is None
        self.outage.begin()
        try:
            self._news |= self._ask(self._connected(), wait)
            if self._reader is not None:
                self._reader.hold(self._connected(), self.states)
        except LATER as error:
            self._fail(error)
            return False
        except NotAllowed as error:
            self._disconnect()
            if is_new:
                raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {error}") from None
            return False  # the token may have changed
        now = system.port.monotonic()
        self.is_known = self.is_known or not any(now - since <= DAMAGE for since, _ in self.damaged.values())
        self.outage.succeeded()
        self._answered = system.port.now() / 1e9
        news, self._news = self._news, False
        return news

    def part(self, state: ShardState | None, table: Table) -> Part:
        """Return the hub's part of a shard, for a task. table: the timeline of the task."""
        if state is not None:
            state = msgspec.structs.replace(state, generations=list(timeline.cut(state.generations, table)))
        return Part(self.endpoint, self.root, state, self._answered, self.outage.why)

    def _fail(self, error: Exception) -> None:
        self._disconnect()
        self.outage.note(error)

    def _connected(self) -> OneHub:
        if self._hub is None:
            self._hub = self.endpoint.connect()
        return self._hub

    def _ask(self, hub: OneHub, wait: float) -> bool:
        """Store the hub's answer. Return whether it has changes."""
        now = system.port.monotonic()
        is_whole = now >= self._everything_at
        changes = hub.changes("") if is_whole else hub.changes(self._token, wait)
        if self.root not in ("", changes.root):
            self._accept_root(changes.root)
            if not is_whole:
                return False  # the next look asks for everything
        self.root, self._token = changes.root, changes.token
        if not is_whole and not changes.shards:
            return False
        states = self._selected(changes.shards)
        if is_whole:
            self._everything_at = now + EVERYTHING
            self.damaged = {key: since for key, since in self.damaged.items() if key in states}
        new = states if is_whole else self.states | states
        known, ours = self.states, {key: state for key, state in new.items() if key not in self.damaged}
        self.states = ours | {key: known[key] for key in self.damaged if key in known}
        return self.states != known

    def _accept_root(self, root: str) -> None:
        """Forget what is known of another root. Raises Conflict if no other hub has the clients."""
        if self._is_alone:
            words = f"[KVSPOOL_HUB_REPLACED] {self.endpoint.location} serves another hub root than before"
            raise Conflict(f"{words}; if that is intended, run the query again, a stream from a new checkpoint")
        _logger.warning("%s serves another hub root than before", self.endpoint.location)
        self.root, self._everything_at, self.damaged = root, 0.0, {}
        if self._reader is not None:
            self._reader.forget()

    def _selected(self, states: list[ShardState]) -> States:
        """Return the selected shards that have ever had a record, and note unreadable ones. Raises Malformed."""
        found: States = {}
        for state in states:
            reading.check_state(state)
            key = ShardKey(state.client, state.shard)
            if not self._selection.has(key):
                continue
            if state.error:
                self.damaged.setdefault(key, (system.port.monotonic(), state.error))
            else:
                self.damaged.pop(key, None)
            if state.error or state.next:
                found[key] = state
        return found

    def damage(self) -> dict[ShardKey, ShardDamaged]:
        """Return the shards that have been unreadable for some time; until then they may be in creation."""
        found = {}
        for key, (since, words) in list(self.damaged.items()):
            if system.port.monotonic() - since > DAMAGE:
                where = f"{self.endpoint.location}: topic {key.topic}, partition {key.partition}"
                found[key] = ShardDamaged(f"[KVSPOOL_SHARD_DAMAGED] {where} can't be read: {words}")
        return found

    def may_read(self, client: str) -> bool:
        """Return whether a client that isn't listed may be read, if it exists."""
        try:
            self._connected().shards(client)
        except NotAllowed:
            return False
        except HubError:
            pass
        return True

    def sequence_at(self, state: ShardState, table: Table, timestamp: int) -> tuple[int | None] | None:
        """Return the first sequence of a timeline whose record is not older than a time; in it None if there is none. None: no answer.

        Raises NotAllowed.
        """
        from hub.root.columns import SequencedBatch

        ticket = Ticket(state.client, state.shard, start_time=timestamp, limit=1, isolation=self._isolation, columns=["sequence"])
        if system.port.monotonic() < self.outage.retry_at:
            return None
        self.outage.begin()
        try:
            found = [item.first for item in self._connected().items(ticket, self.endpoint.stream) if isinstance(item, SequencedBatch)]
        except LATER as error:
            self._fail(error)
            return None
        self.outage.succeeded()
        return (timeline.from_hub(table, state, found[0]) if found else None,)

    def commit(self, ends: Mapping[ShardKey, int], *, may_send: bool) -> None:
        """Move the durable reader: now, if the hub isn't being asked, or at a later look."""
        assert self._reader is not None
        self._reader.note({key: end for key, end in ends.items() if key in self.states or not self._is_alone})
        if self.is_known and may_send and not self.outage.retry_at:
            try:
                self._reader.flush(self._connected(), self.states)
            except LATER as error:
                self._fail(error)

    def _disconnect(self) -> None:
        hub, self._hub = self._hub, None
        self._everything_at = 0.0  # our identity and the hub's may be others the next time
        if hub is not None:
            hub.close()

    def close(self) -> None:
        """Commit noted positions, and close the connection."""
        if self._reader is not None and self.is_known and not self.outage.retry_at:
            with suppress(HubError):
                self._reader.flush(self._connected(), self.states, at_once=True)
        self._disconnect()


class _Reader(Handle):
    """The durable reader of a query at one hub. Its positions are the hub's sequences; noted ones are those of the timeline."""

    def __init__(self, location: str, name: str, tables: Mapping[ShardKey, Table], *, is_alone: bool) -> None:
        self._location = location
        self._is_alone = is_alone
        self._name = name
        self._tables = tables
        self._lock = threading.RLock()
        self._places: dict[ShardKey, int] | None = None  # committed positions
        self._new: dict[ShardKey, int] = {}  # positions of shards that are new to the reader
        self._noted: dict[ShardKey, int] = {}  # positions to commit
        self._due_at = 0.0

    def hold(self, hub: OneHub, states: States) -> None:
        """Create positions at the oldest records of shards that are new to the reader; send noted ones when they are due."""
        if self._places is None:
            known = next((one.places for one in hub.readers() if one.name == self._name), None)
            self._places = {ShardKey(place.client, place.shard): place.next for place in known or []}
            if known is None:
                hub.commit(self._name, {})
        self._new = {key: states[key].first for key in states.keys() - self._places}
        self.flush(hub, states)

    def note(self, ends: Mapping[ShardKey, int]) -> None:
        """Note the next positions."""
        with self._lock:
            self._noted |= ends

    def forget(self) -> None:
        """Forget what the hub has: its root was replaced."""
        self._places = None

    def flush(self, hub: OneHub, states: States, *, at_once: bool = False) -> None:
        """Send noted positions if they are due. Raises as `OneHub.commit`, except Conflict: the reader is briefly in use."""
        now = system.port.monotonic()
        with self._lock:
            noted = {key: end for key, end in self._noted.items() if key in states}
        ends = {key: timeline.at_hub(self._tables.get(key, ()), states[key], end) for key, end in noted.items()}
        places = {key: at for key, at in (self._new | ends).items() if (self._places or {}).get(key) != at}
        if not places or (now < self._due_at and not at_once):
            return
        self._due_at = now + COMMITS
        try:
            hub.commit(self._name, {(key.topic, key.partition): at for key, at in places.items()})
        except Conflict as error:
            _logger.warning("%s: the durable reader %s is moved later: %s", self._location, self._name, error)
            return
        except Unexpected as error:
            if self._is_alone:
                raise
            _logger.warning("%s has lost records, so the durable reader %s is moved later: %s", self._location, self._name, error)
            return
        except NotAllowed as error:
            raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {self._location}: {error}") from None
        self._places, self._new = {**(self._places or {}), **places}, {}
        with self._lock:  # a hub that lags gets a position again, when it has the records
            done = [key for key, end in noted.items() if timeline.extent(self._tables.get(key, ()), states[key])[1] >= end]
            for key in done:
                if self._noted.get(key) == noted[key]:
                    del self._noted[key]


def _unreachable(hubs: list[_Hub]) -> Exception:
    """Return the error of hubs that have not answered for too long."""
    errors = [error for hub in hubs if (error := hub.outage.expired()) is not None]
    if len(errors) == 1:
        return errors[0]
    words = "; ".join(f"{hub.endpoint.location}: {hub.outage.why}" for hub in hubs)
    if any(isinstance(error, HubFull | QuotaExceeded) for error in errors):
        return HubFull(f"[KVSPOOL_HUB_REFUSES] no hub accepts the query: {words}")
    advice = "start one, check the network, or increase the option hubTimeout"
    return Unreachable(f"[KVSPOOL_HUB_UNREACHABLE] no hub answers: {words}; {advice}")
