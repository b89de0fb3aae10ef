"""Shards at hub servers, for the driver; tasks use `ranges`.

There may be several hubs. A client that moved from one to another has its earlier records at the first. If both hubs name the same logs,
the shards are read as one, and the older hub supplies records that the newer one lacks. Otherwise it is unknown whose records are right:
Conflict.

**Outages.** While a hub is down, the driver keeps its last known state, so that a stream waits. After `timeout` seconds without an answer
it raises Unreachable, [KVSPOOL_HUB_UNREACHABLE].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hub.errors import Conflict, HubError, NotAllowed, NotFound, ShardDamaged
from hub.protocol import reading
from hub.protocol.reading import ShardState, Ticket
from hub.spark.endpoints import FIRST_BACKOFF, LATER, TIMEOUT, Backoff, HubEndpoint
from hub.spark.options import Credentials
from hub.spark.ranges import HubRange, Part
from hub.spark.selection import ALL, Selection
from hub.spark.shards import Extent, ShardKey
from kvspool import system
from kvspool.options import Isolation
from kvspool.system.handles import close_all

if TYPE_CHECKING:
    from hub.client.remote import RemoteHub

IDLE = 50  # looks without news before the next one waits: an idle query asks some 90 times a second
WAIT = 0.2  # seconds of that wait, for all hubs together
EVERYTHING = 30.0  # seconds between two requests for all shards of a hub, because removals are not reported
DAMAGE = 5.0  # seconds for which a shard may be unreadable: it may be in creation
COMMITS = 1.0  # seconds between two commits of a durable reader: each is a flush of the hub's disk
_logger = logging.getLogger("kvspool")


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
        """Name the hubs, without a request. Raises ValueError for an invalid location.

        timeout: longest outage of a hub, in seconds. reader: the durable reader that `commit` moves at each hub; a new one is created at
        the oldest records by the first look. isolation, columns, local_root: see `HubRange`.
        """
        self.locations = locations
        self._selection = selection
        self._reader = reader
        self._range = {"isolation": isolation, "columns": columns, "local_root": local_root}
        self._hubs = [_Hub(HubEndpoint(location, credentials, timeout), selection, reader, isolation) for location in locations]
        self._pool = ThreadPoolExecutor(len(self._hubs), "kvspool hubs") if len(self._hubs) > 1 else None
        self._extents: dict[ShardKey, Extent] | None = None
        self._in_vain = 0  # looks since the last news

    def look(self) -> dict[ShardKey, Extent]:
        """See `SparkShards.look`; one call to each hub, for any number of shards. A hub that is down keeps its last known state.

        After many looks without news, one waits up to a fifth of a second for a change.

        Raises Unreachable for a hub that is down for too long, NotAllowed, Conflict for a client with different logs at two hubs or a hub
        with another root than before, ShardDamaged.
        """
        self._in_vain += 1
        wait = WAIT / len(self._hubs) if self._in_vain > IDLE else 0.0
        while True:
            have_changed = list((map if self._pool is None else self._pool.map)(lambda hub: hub.look(wait), self._hubs))
            missing = [hub for hub in self._hubs if not hub.is_known]
            if not missing:
                break
            system.port.sleep(FIRST_BACKOFF)
            missing[0].backoff.pause()
        if self._extents is None:
            self._check_rights()
        if self._extents is None or any(have_changed):
            self._in_vain = 0
            self._extents = {key: _extent(key, hubs) for key, hubs in sorted(self._owners().items())}
        return self._extents

    def _check_rights(self) -> None:
        """Raise NotAllowed for a selected client that may not be read: hubs don't list it."""
        asked = self._selection.topics or {key.topic for key in self._selection.shards or ()}
        for client in sorted(asked - {key.topic for hub in self._hubs for key in hub.states}):
            if not any(hub.may_read(client) for hub in self._hubs):
                raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {', '.join(self.locations)}: you may not read client {client}")

    def _owners(self) -> dict[ShardKey, list[_Hub]]:
        """Return the hubs that have each shard, the one with the newest records first."""
        owners: dict[ShardKey, list[_Hub]] = {}
        for hub in self._hubs:
            for key in hub.states:
                owners.setdefault(key, []).append(hub)
        for key, hubs in owners.items():
            if len(hubs) > 1:
                hubs.sort(key=lambda hub: (hub.states[key].next, hub.endpoint.location), reverse=True)
        return owners

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
        hubs = self._having(key)
        parts = tuple(hub.part(key) for hub in hubs)
        return HubRange(key, _log_id(hubs[0].states[key]), first, end, parts, **self._range)  # type: ignore[arg-type]

    def has_ordered_times(self, key: ShardKey) -> bool:
        """See `SparkShards.has_ordered_times`: shipped records have the times that their client set."""
        return False

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """See `SparkShards.sequence_at`. Raises Unreachable, NotAllowed, ShardDamaged."""
        found = [hub.sequence_at(key, timestamp) for hub in self._having(key)]
        return min((sequence for sequence in found if sequence is not None), default=None)

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """See `SparkShards.commit`; sent to the hubs within about a second, at the next `look` or `close`, or after an outage.

        Raises NotAllowed for another user's reader, QuotaExceeded for too many.
        """
        for hub in self._hubs if self._reader is not None else ():
            hub.commit(ends)

    def close(self) -> None:
        """See `SparkShards.close`; commits noted positions."""
        try:
            close_all(self._hubs)
        finally:
            if self._pool is not None:
                self._pool.shutdown()


class _Hub:
    """The driver's view of one hub. patience: its retries during an outage."""

    def __init__(self, endpoint: HubEndpoint, selection: Selection, reader: str | None, isolation: Isolation) -> None:
        self.endpoint = endpoint
        self.root = ""
        self.states: dict[ShardKey, ShardState] = {}
        self.is_known = False
        self.backoff = Backoff(endpoint)
        self._selection = selection
        self._isolation = isolation
        self._damaged: dict[ShardKey, tuple[float, str]] = {}  # since when a shard is unreadable, and why
        self._token = ""
        self._news = False  # a change that `look` has not reported yet
        self._everything_at = 0.0
        self._answered = 0.0  # when it last answered, in seconds since 1970
        self._hub: RemoteHub | None = None
        self._reader = _Reader(endpoint.location, reader) if reader is not None else None

    def look(self, wait: float) -> bool:
        """Ask for changes, and wait up to `wait` seconds for one. Return whether there was any.

        During an outage the last known state is kept.
        """
        if system.port.monotonic() < self.backoff.retry_at:
            return False
        is_new = self._hub is None
        self.backoff.begin()
        try:
            self._news |= self._ask(self._connected(), wait)
            if self._reader is not None:
                self._reader.hold(self._connected(), {key: state.first for key, state in self.states.items()})
        except LATER as error:
            self._fail(error)
            return False
        except NotAllowed as error:
            self._disconnect()
            if is_new:
                raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {error}") from None
            return False  # the token may have changed
        self._check_damage()
        self.is_known = self.is_known or not self._damaged
        self.backoff.succeeded()
        self._answered = system.port.now() / 1e9
        news, self._news = self._news, False
        return news

    def part(self, key: ShardKey) -> Part:
        """Return the hub's part of a shard, for a task."""
        state = self.states[key]
        return Part(self.endpoint, self.root, state.bits, state.first, state.next, self._answered)

    def _fail(self, error: Exception) -> None:
        self._disconnect()
        self.backoff.failed(error)

    def _connected(self) -> RemoteHub:
        if self._hub is None:
            self._hub = self.endpoint.connect()
        return self._hub

    def _ask(self, hub: RemoteHub, wait: float) -> bool:
        """Store the hub's answer. Return whether it has changes."""
        now = system.port.monotonic()
        is_whole = now >= self._everything_at
        changes = hub.changes("") if is_whole else hub.changes(self._token, wait)
        if self.root not in ("", changes.root):
            words = f"[KVSPOOL_HUB_REPLACED] {self.endpoint.location} serves another hub root than before"
            raise Conflict(f"{words}; if that is intended, run the query again, a stream from a new checkpoint")
        self.root, self._token = changes.root, changes.token
        if not is_whole and not changes.shards:
            return False
        states = self._selected(changes.shards)
        if is_whole:
            self._everything_at = now + EVERYTHING
            self._damaged = {key: since for key, since in self._damaged.items() if key in states}
        new = states if is_whole else self.states | states
        known, self.states = self.states, {key: state for key, state in new.items() if key not in self._damaged}
        self.states |= {key: known[key] for key in self._damaged if key in known}
        return self.states != known

    def _selected(self, states: list[ShardState]) -> dict[ShardKey, ShardState]:
        """Return the selected shards that have ever had a record, and note unreadable ones. Raises Malformed."""
        found: dict[ShardKey, ShardState] = {}
        for state in states:
            reading.check_state(state)
            key = ShardKey(state.client, state.shard)
            if not self._selection.has(key):
                continue
            if state.error:
                self._damaged.setdefault(key, (system.port.monotonic(), state.error))
            else:
                self._damaged.pop(key, None)
            if state.error or state.next:
                found[key] = state
        return found

    def _check_damage(self) -> None:
        """Raise ShardDamaged for a shard that has been unreadable for some time; until then it may be in creation."""
        for key, (since, words) in self._damaged.items():
            if system.port.monotonic() - since > DAMAGE:
                where = f"{self.endpoint.location}: topic {key.topic}, partition {key.partition}"
                raise ShardDamaged(f"[KVSPOOL_SHARD_DAMAGED] {where} can't be read: {words}")

    def may_read(self, client: str) -> bool:
        """Return whether a client that isn't listed may be read, if it exists."""
        try:
            self._connected().shards(client)
        except NotAllowed:
            return False
        except HubError:
            pass
        return True

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """Return the first sequence whose record is not older than a time; None if there is none. Raises Unreachable, NotAllowed."""
        from hub.root.columns import SequencedBatch

        ticket = Ticket(*key, start_time=timestamp, limit=1, isolation=self._isolation, columns=["sequence"])
        while True:
            self.backoff.pause()
            self.backoff.begin()
            try:
                found = [item.first for item in self._connected().items(ticket, self.endpoint.stream) if isinstance(item, SequencedBatch)]
                self.backoff.succeeded()
                return found[0] if found else None
            except LATER as error:
                self._fail(error)

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """Move the durable reader, now or at a later look."""
        assert self._reader is not None
        self._reader.note({key: min(end, self.states[key].next) for key, end in ends.items() if key in self.states})
        if self.is_known and not self.backoff.retry_at:
            try:
                self._reader.flush(self._connected())
            except LATER as error:
                self._fail(error)

    def _disconnect(self) -> None:
        hub, self._hub = self._hub, None
        self._everything_at = 0.0  # our identity and the hub's may be others the next time
        if hub is not None:
            hub.close()

    def close(self) -> None:
        """Commit noted positions, and close the connection."""
        if self._reader is not None and self.is_known and not self.backoff.retry_at:
            with suppress(HubError):
                self._reader.flush(self._connected(), at_once=True)
        self._disconnect()


class _Reader:
    """The durable reader of a query at one hub."""

    def __init__(self, location: str, name: str) -> None:
        self._location = location
        self._name = name
        self._places: dict[ShardKey, int] | None = None  # committed positions
        self._noted: dict[ShardKey, int] = {}  # positions to commit
        self._due_at = 0.0

    def hold(self, hub: RemoteHub, firsts: Mapping[ShardKey, int]) -> None:
        """Create positions at the oldest records of shards that are new to the reader; send noted ones when they are due."""
        if self._places is None:
            known = next((one.places for one in hub.readers() if one.name == self._name), None)
            self._places = {ShardKey(place.client, place.shard): place.next for place in known or []}
            if known is None:
                hub.commit(self._name, {})
        new = firsts.keys() - self._places
        if new:
            self._noted = {key: firsts[key] for key in new} | self._noted
        self.flush(hub)

    def note(self, ends: Mapping[ShardKey, int]) -> None:
        """Note the next positions."""
        places = self._places or {}
        self._noted |= {key: end for key, end in ends.items() if places.get(key) != end}

    def flush(self, hub: RemoteHub, *, at_once: bool = False) -> None:
        """Send noted positions if they are due. Raises as `RemoteHub.commit`, except Conflict: the reader is briefly in use."""
        now = system.port.monotonic()
        if not self._noted or (now < self._due_at and not at_once):
            return
        self._due_at = now + COMMITS
        try:
            hub.commit(self._name, {(key.topic, key.partition): next for key, next in self._noted.items()})
        except Conflict as error:
            _logger.warning("%s: the durable reader %s is moved later: %s", self._location, self._name, error)
            return
        except NotAllowed as error:
            raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {self._location}: {error}") from None
        self._places = {**(self._places or {}), **self._noted}
        self._noted = {}


def _extent(key: ShardKey, hubs: list[_Hub]) -> Extent:
    """Return the extent of a shard at several hubs, the one with the newest records first. Raises Conflict if their logs differ."""
    states = [hub.states[key] for hub in hubs]
    for hub, state in zip(hubs[1:], states[1:], strict=True):
        ours, theirs = ([(one.log, one.base) for one in which.generations] for which in (states[0], state))
        if states[0].bits != state.bits or not ours or ours[: len(theirs)] != theirs[: len(ours)]:
            raise Conflict(
                f"[KVSPOOL_CLIENT_AT_TWO_HUBS] client {key.topic}, shard {key.partition}: {hubs[0].endpoint.location} and "
                f"{hub.endpoint.location} have different logs of it, so the order of the records is unknown; "
                "name one of the hubs, or other clients"
            )
    return Extent(min(state.first for state in states), states[0].next, _log_id(states[0]))


def _log_id(state: ShardState) -> str:
    """Return the id of the log of the first records; later logs continued the same sequences."""
    return state.generations[0].log if state.generations else ""
