"""Shards at hub servers, as the driver sees them; `ranges` is what tasks read.

One hub or several. A client that moved from one to another has its earlier records at the first: where both name the same logs, its shards
are read as one, and what the newer hub lacks comes from the older one. Where they don't, nobody can say whose records are right: Conflict.

**A hub that is down.** The driver keeps what it knew of it, so that a stream waits; for `timeout` seconds without a word from it. Then it
is Unreachable, [KVSPOOL_HUB_UNREACHABLE].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hub.errors import Conflict, HubError, NotAllowed, NotFound, ShardDamaged
from hub.protocol.reading import ShardState, Ticket
from hub.spark.endpoints import FIRST_BACKOFF, LATER, STREAM, TIMEOUT, Backoff, HubEndpoint
from hub.spark.options import Credentials
from hub.spark.ranges import HubRange, Part
from hub.spark.selection import ALL, Selection
from hub.spark.shards import Extent, ShardKey
from kvspool import system
from kvspool.handles import close_all
from kvspool.options import Isolation

if TYPE_CHECKING:
    from hub.client.remote import RemoteHub

IDLE = 50  # looks in vain, after which one waits: a query that has nothing to do asks some 90 times a second
WAIT = 0.2  # seconds that it waits for, at all hubs together
EVERYTHING = 30.0  # seconds after which a hub is asked for all of its shards: it doesn't tell which ones were removed
DAMAGE = 5.0  # seconds for which a shard may be unreadable: it may be being made
COMMITS = 1.0  # seconds between two commits of a durable reader: each is a flush of the hub's disk
_logger = logging.getLogger("kvspool")


class HubShards:
    """The shards at some hubs; see `Shards`. Use it in one thread of one process."""

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
        """Name the hubs; nothing is said to them yet. ValueError for what is no location.

        timeout: seconds for which a hub may be down. reader: the durable reader that `commit` moves at each hub; a new one stands at the
        oldest records from the first look on. isolation, columns, local_root: see `HubRange`.
        """
        self.locations = locations
        self._selection = selection
        self._reader = reader
        self._range = {"isolation": isolation, "columns": columns, "local_root": local_root}
        self._hubs = [_Hub(HubEndpoint(location, credentials, timeout), selection, reader, isolation) for location in locations]
        self._pool = ThreadPoolExecutor(len(self._hubs), "kvspool hubs") if len(self._hubs) > 1 else None
        self._extents: dict[ShardKey, Extent] | None = None
        self._in_vain = 0  # looks since something was new, or read

    def look(self) -> dict[ShardKey, Extent]:
        """See `Shards.look`; one call to each hub, whatever number of shards it has. What a hub that is down had is what it has.

        After many that found nothing new it waits up to a fifth of a second for something to change, and no longer than that takes.

        Raises Unreachable for one that is down for too long, NotAllowed, Conflict for a client whose logs at two hubs are not the same, or
        a hub whose root is another one than before, ShardDamaged.
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
        """Raise NotAllowed for a client that is asked for by name and may not be read: a hub doesn't say that it is there."""
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
        """See `Shards.range`."""
        self._in_vain = 0
        hubs = self._having(key)
        parts = tuple(Part(hub.endpoint, hub.root, hub.states[key].bits, hub.states[key].first, hub.states[key].next) for hub in hubs)
        return HubRange(key, _log_id(hubs[0].states[key]), first, end, parts, **self._range)  # type: ignore[arg-type]

    def has_ordered_times(self, key: ShardKey) -> bool:
        """See `Shards.has_ordered_times`: the times of what is shipped are the client's word."""
        return False

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """See `Shards.sequence_at`. Raises Unreachable, NotAllowed, ShardDamaged."""
        found = [hub.sequence_at(key, timestamp) for hub in self._having(key)]
        return min((sequence for sequence in found if sequence is not None), default=None)

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """See `Shards.commit`; at the hubs within a second or so, at the next `look` or `close`. A hub that is down hears of it later.

        Raises NotAllowed for a reader that belongs to somebody else, QuotaExceeded where there are too many.
        """
        for hub in self._hubs if self._reader is not None else ():
            hub.commit(ends)

    def close(self) -> None:
        """See `Shards.close`; commits what is noted."""
        try:
            close_all(self._hubs)
        finally:
            if self._pool is not None:
                self._pool.shutdown()


class _Hub:
    """One hub, as the driver knows it. patience: with it, if it is down."""

    def __init__(self, endpoint: HubEndpoint, selection: Selection, reader: str | None, isolation: Isolation) -> None:
        self.endpoint = endpoint
        self.root = ""
        self.states: dict[ShardKey, ShardState] = {}
        self.is_known = False
        self.backoff = Backoff(endpoint)
        self._selection = selection
        self._isolation = isolation
        self._damaged: dict[ShardKey, tuple[float, str]] = {}  # since when a shard can't be read, and why
        self._token = ""
        self._news = False  # something has changed that `look` hasn't told yet
        self._everything_at = 0.0
        self._hub: RemoteHub | None = None
        self._reader = _Reader(endpoint.location, reader) if reader is not None else None

    def look(self, wait: float) -> bool:
        """Ask what has changed, and wait up to `wait` seconds for it; return whether anything has. While the hub is down: what was known is
        what there is."""
        if system.port.monotonic() < self.backoff.retry_at:
            return False
        is_new = self._hub is None
        try:
            self._news |= self._ask(self._connected(), wait)
            if self._reader is not None:
                self._reader.hold(self._connected(), {key: state.first for key, state in self.states.items()})
        except LATER as error:
            self._fail(error)
            return False
        except NotAllowed as error:
            self._let_go()
            if is_new:
                raise NotAllowed(f"[KVSPOOL_NOT_ALLOWED] {error}") from None
            return False  # the token may be another one by now
        self._check_damage()
        self.is_known = self.is_known or not self._damaged
        self.backoff.succeeded()
        news, self._news = self._news, False
        return news

    def _fail(self, error: Exception) -> None:
        self._let_go()
        self.backoff.failed(error)

    def _connected(self) -> RemoteHub:
        if self._hub is None:
            self._hub = self.endpoint.connect()
        return self._hub

    def _ask(self, hub: RemoteHub, wait: float) -> bool:
        """Take over what the hub says; return whether it is anything new."""
        now = system.port.monotonic()
        is_whole = now >= self._everything_at
        changes = hub.changes("") if is_whole else hub.changes(self._token, wait)
        if self.root not in ("", changes.root):
            words = f"[KVSPOOL_HUB_REPLACED] {self.endpoint.location} serves another hub root than before"
            raise Conflict(f"{words}; if that is meant, run the query again, a stream from a new checkpoint")
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
        """Return the shards that are asked for and had a record once, and note which ones can't be read. Raises Malformed."""
        from hub.client.mirrored_shard import check_state

        found: dict[ShardKey, ShardState] = {}
        for state in states:
            check_state(state)
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
        """Raise ShardDamaged for a shard that can't be read for some time; until then it may be one that is being made."""
        for key, (since, words) in self._damaged.items():
            if system.port.monotonic() - since > DAMAGE:
                where = f"{self.endpoint.location}: topic {key.topic}, partition {key.partition}"
                raise ShardDamaged(f"[KVSPOOL_SHARD_DAMAGED] {where} can't be read: {words}")

    def may_read(self, client: str) -> bool:
        """Return whether a client that isn't seen may be read, if it comes."""
        try:
            self._connected().shards(client)
        except NotAllowed:
            return False
        except HubError:
            pass
        return True

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """Return the first sequence whose record is not older than a time, None if there is none. Raises Unreachable, NotAllowed."""
        from hub.root.columns import SequencedBatch

        ticket = Ticket(*key, start_time=timestamp, limit=1, isolation=self._isolation, columns=["sequence"])
        while True:
            self.backoff.pause()
            try:
                found = [item.first for item in self._connected().items(ticket, STREAM) if isinstance(item, SequencedBatch)]
                self.backoff.succeeded()
                return found[0] if found else None
            except LATER as error:
                self._fail(error)

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """Let the durable reader stand there, now or at a later look."""
        assert self._reader is not None
        self._reader.note({key: min(end, self.states[key].next) for key, end in ends.items() if key in self.states})
        if self.is_known and not self.backoff.retry_at:
            try:
                self._reader.flush(self._connected())
            except LATER as error:
                self._fail(error)

    def _let_go(self) -> None:
        hub, self._hub = self._hub, None
        self._everything_at = 0.0  # we may be somebody else the next time, and so may the hub
        if hub is not None:
            hub.close()

    def close(self) -> None:
        """Commit what is noted, and end the connection."""
        if self._reader is not None and self.is_known and not self.backoff.retry_at:
            with suppress(HubError):
                self._reader.flush(self._connected(), at_once=True)
        self._let_go()


class _Reader:
    """The durable reader of a query at one hub."""

    def __init__(self, location: str, name: str) -> None:
        self._location = location
        self._name = name
        self._places: dict[ShardKey, int] | None = None  # where it stands
        self._noted: dict[ShardKey, int] = {}  # where it is to stand
        self._due_at = 0.0

    def hold(self, hub: RemoteHub, firsts: Mapping[ShardKey, int]) -> None:
        """Let it stand at the oldest record of each shard that is new to it; send what is noted, when that is due."""
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
        """Note where it is to stand."""
        places = self._places or {}
        self._noted |= {key: end for key, end in ends.items() if places.get(key) != end}

    def flush(self, hub: RemoteHub, *, at_once: bool = False) -> None:
        """Send what is noted, if it is due. Raises what `RemoteHub.commit` does, but Conflict: somebody has the reader for a moment."""
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
    """Return what some hubs have of a shard, the one with the newest records first. Raises Conflict if they don't have the same logs."""
    states = [hub.states[key] for hub in hubs]
    for hub, state in zip(hubs[1:], states[1:], strict=True):
        ours, theirs = ([(one.log, one.base) for one in which.generations] for which in (states[0], state))
        if states[0].bits != state.bits or not ours or ours[: len(theirs)] != theirs[: len(ours)]:
            raise Conflict(
                f"[KVSPOOL_CLIENT_AT_TWO_HUBS] client {key.topic}, shard {key.partition}: {hubs[0].endpoint.location} and "
                f"{hub.endpoint.location} have different logs of it, so nobody can say which records come first; name one of the "
                "hubs, or other clients"
            )
    return Extent(min(state.first for state in states), states[0].next, _log_id(states[0]))


def _log_id(state: ShardState) -> str:
    """Return the id of the log that the first records came from: later ones went on in the same sequences."""
    return state.generations[0].log if state.generations else ""
