"""Several hubs that have the same clients' records, read as one; see `hub.client.remote`.

Sequences are those of a shard's `timeline`, which stays the same while this object exists. A hub that doesn't answer is left out, and asked
again after a while. Meanwhile its clients and states are missing in lists, but never its records: see `hub.client.copies`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn, TypeVar

import msgspec

from hub.client import timeline
from hub.client.answers import gather
from hub.client.connection import Security
from hub.client.copies import Answer, Copy, CopyReader, no_hub_has
from hub.client.one_hub import OneHub
from hub.client.outage import LATER, Outage
from hub.client.timeline import Table
from hub.errors import Conflict, Fenced, HubError, NotFound, Unexpected, Unreachable
from hub.protocol import reading
from hub.protocol.reading import Changes, Committed, ReaderPlace, ReaderState, ServerInfo, ShardState, Ticket
from hub.root.columns import SequencedBatch
from kvspool import system
from kvspool.errors import Closed
from kvspool.record import Gap
from kvspool.system.handles import Handle, close_all

GRACE = 1.0  # seconds for the other hubs, after the first one has answered
AT_ONCE = 1.0  # seconds
AGAIN = 0.2  # seconds before all hubs are asked once more for a record
SLICE = 1.0  # seconds of one wait for changes
MANY = 8  # clients, above which the states of all are asked for
THREADS = 4  # for each hub: a call of one that says nothing takes its thread until the timeout
T = TypeVar("T")
Key = tuple[str, int]  # client and shard
States = dict[Key, ShardState]


class _Member(OneHub):
    """One of the hubs. pending: positions of durable readers that it doesn't have yet, in sequences of the timeline."""

    def __init__(self, location: str, security: Security, timeout: float) -> None:
        super().__init__(location, security, timeout, has_others=True)
        self.outage = Outage(location)
        self.patience = timeout
        self.pending: dict[str, dict[Key, int]] = {}
        self.known: States = {}  # as `changes` has reported them
        self.root = ""

    def do(self, call: Callable[[_Member], T]) -> T:
        """Return the result of a call, and note whether the hub answers. A call that fails at once is repeated: its connection was old."""
        self.outage.begin()
        began = system.port.monotonic()
        try:
            try:
                found = call(self)
            except Unreachable:
                if self.outage.is_away or system.port.monotonic() - began > AT_ONCE:
                    raise
                found = call(self)
        except LATER as error:
            self.outage.note(error)
            raise
        except HubError:
            self.outage.succeeded()
            raise
        self.outage.succeeded()
        return found


class SeveralHubs(Handle):
    """The calls of `OneHub`, to any or all of several hubs. Can be shared by threads."""

    def __init__(self, locations: list[str], security: Security, timeout: float) -> None:
        """See `OneHub`. The first location is the preferred one."""
        self.location = ",".join(locations)
        self._members = [_Member(location, security, timeout) for location in locations]
        self._pool = ThreadPoolExecutor(THREADS * len(locations), "kvspool hubs")
        self._timelines: dict[Key, Table] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def away(self) -> dict[str, str]:
        """See `RemoteHub.away`."""
        return {one.location: one.outage.why for one in self._members if one.outage.is_away}

    # Questions to any hub, and to all.

    def server(self) -> ServerInfo:
        """Return the description of a hub that answers."""
        errors: dict[str, HubError] = {}
        for member in sorted(self._members, key=lambda one: one.outage.is_away):
            try:
                return member.do(OneHub.server)
            except HubError as error:
                errors[member.location] = error
        _raise(errors)

    def clients(self, pattern: str = "*") -> list[str]:
        """Return the clients of all hubs that answer."""
        return sorted({client for found in self._all(lambda one: one.clients(pattern)).values() for client in found})

    def shards(self, client: str) -> list[ShardState]:
        """Return a client's shards, as all hubs that answer have them together."""
        return [self._joined(key, states) for key, states in sorted(_by_key(self._states(client)).items())]

    def _all(self, call: Callable[[_Member], T], *, least: float = GRACE, everyone: bool = False) -> dict[_Member, T]:
        """Return the results of all hubs that answer: after the first one, the others have `least` seconds.

        Hubs that were away a moment ago are not asked, unless there is no other, or `everyone` is. Raises the error of all of them if none
        answers.
        """
        if self._is_closed:
            raise Closed(f"the connection to {self.location} was closed; connect again")
        errors: dict[_Member, HubError] = {}
        now = system.port.monotonic()
        for is_resting in (False, True):
            some = [one for one in self._members if (one.outage.retry_at > now and not everyone) == is_resting]
            found, failed = gather({self._pool.submit(one.do, call): one for one in some}, least)
            errors |= failed
            if found:
                return found
        _raise({one.location: errors.get(one) or Unreachable("no answer") for one in self._members})

    # Shards.

    def _states(self, client: str, *, everyone: bool = False) -> dict[_Member, States]:
        """Return the shards of a client at each hub that answers. Raises NotFound if all hubs lack it."""
        lacking: list[NotFound] = []

        def ask(member: _Member) -> States:
            try:
                found = [reading.check_state(state) for state in member.shards(client)]
            except NotFound as error:
                lacking.append(error)
                return {}
            return {(state.client, state.shard): state for state in found if state.client == client}

        found = self._all(ask, everyone=everyone)
        if not any(found.values()):
            if not everyone and len(found) < len(self._members):
                return self._states(client, everyone=True)
            self._refuse_missing(lacking, found)
        return found

    def _refuse_missing(self, lacking: list[NotFound], asked: Mapping[_Member, object]) -> None:
        """Raise NotFound for what no hub has, or Unreachable if a hub has not answered."""
        if lacking and len(asked) == len(self._members):
            raise NotFound(f"{self.location}: {lacking[0]}")
        if lacking:
            away = {one.location: Unreachable(one.outage.why or "no answer") for one in self._members if one not in asked}
            _raise({**{one.location: lacking[0] for one in asked}, **away})

    def _table(self, key: Key, states: Mapping[_Member, ShardState]) -> Table:
        """Return the timeline of a shard. Raises Conflict, also once for a hub that returns with records of an earlier log: only then do
        later sequences change.
        """
        if len({state.bits for state in states.values()}) > 1:
            raise Conflict(f"client {key[0]} has another number of shards at {' and '.join(one.location for one in states)}")
        with self._lock:
            try:
                table = timeline.merged(states.values(), self._timelines.get(key, ()))
            except Conflict as error:
                raise Conflict(f"client {key[0]}, shard {key[1]}: {', '.join(one.location for one in states)}: {error}") from None
            self._timelines[key] = table
            is_short = any(one.base < 0 for one in table)  # the oldest log that was known is not the first one
            late = [one.location for one, state in states.items() if is_short or timeline.has_hidden(table, state)]
            if late:
                del self._timelines[key]
                raise Conflict(
                    f"client {key[0]}, shard {key[1]}: {', '.join(late)} has returned with records of an earlier log that the other hubs "
                    "lack. The sequences after them have changed: read again, from a LogPosition or from the beginning"
                )
            return table

    def _joined(self, key: Key, states: Mapping[_Member, ShardState]) -> ShardState:
        """Return the state of a shard at several hubs."""
        sound = {one: state for one, state in states.items() if not state.error}
        if not sound:
            return next(iter(states.values()))
        table = self._table(key, sound)
        extents = [timeline.extent(table, state) for state in sound.values() if state.next or state.generations] or [(0, 0)]
        bits = next(iter(sound.values())).bits
        return ShardState(*(key[0], bits, key[1]), min(first for first, _ in extents), max(end for _, end in extents), list(table))

    def changes(self, since: str = "", wait: float = 0.0) -> Changes:
        """Return the shards that have changed at any hub."""
        deadline = system.port.monotonic() + wait
        tokens = _tokens(since, len(self._members))
        while True:
            left = deadline - system.port.monotonic()
            now = max(0.0, min(left, SLICE))
            found = self._all(lambda one: one.changes(tokens.get(one.location, ""), now), least=now + GRACE)  # noqa: B023
            changed: set[Key] = set()
            for member, changes in found.items():
                changed |= _note(member, changes, is_whole=not tokens.get(member.location))
                tokens[member.location] = changes.token
            if changed or left <= 0:
                states = _by_key({one: one.known for one in self._members})
                shards = [self._joined(key, states[key]) for key in sorted(changed) if key in states]
                roots = ",".join(one.root or "-" for one in self._members)
                return Changes(roots, msgspec.json.encode(tokens).decode(), shards)

    # Durable readers.

    def commit(self, reader: str, places: Mapping[Key, int]) -> Committed:
        """Move a durable reader at all hubs that answer; the others get the positions with the next commit."""
        with self._lock:
            for member in self._members:
                member.pending.setdefault(reader, {}).update(places)
            clients = sorted({client for member in self._members for client, _ in member.pending[reader]})
        there = self._all(lambda one: _states_of(one, clients))
        for key, states in _by_key(there).items():
            self._joined(key, states)
        answers = self._all(lambda one: self._commit_at(one, reader, clients, there), least=self._members[0].patience)
        missing = [key for key in places if not any(key in states for states in there.values())]
        return Committed(max(answer.places for answer in answers.values()), len(missing))

    def _commit_at(self, member: _Member, reader: str, clients: list[str], there: Mapping[_Member, States]) -> Committed:
        """Send a hub its positions, as sequences there: of the next record that it has."""
        states = there[member] if member in there else _states_of(member, clients)
        with self._lock:
            places = {key: at for key, at in member.pending[reader].items() if key in states and not states[key].error}
            tables = {key: self._timelines.get(key, ()) for key in places}
        answer = OneHub.commit(member, reader, {key: timeline.at_hub(tables[key], states[key], at) for key, at in places.items()})
        with self._lock:
            pending = member.pending.get(reader, {})
            for key, at in places.items():
                if pending.get(key) == at <= timeline.extent(tables[key], states[key])[1]:
                    del pending[key]  # a hub that lags gets it again
        return answer

    def readers(self) -> list[ReaderState]:
        """Return the durable readers of all hubs that answer, each with its highest positions."""

        def ask(member: _Member) -> tuple[list[ReaderState], States]:
            found = member.readers()
            return found, _states_of(member, sorted({place.client for one in found for place in one.places}))

        answers = self._all(ask)
        for key, states in _by_key({one: states for one, (_, states) in answers.items()}).items():
            self._joined(key, states)
        updated: dict[tuple[str, str], int] = {}
        places: dict[tuple[str, str], dict[Key, int]] = {}
        for found, there in answers.values():
            for one in found:
                name = one.name, one.owner
                updated[name] = max(updated.get(name, 0), one.updated)
                ours = places.setdefault(name, {})
                for place in one.places:
                    key = place.client, place.shard
                    at = timeline.from_hub(self._timelines.get(key, ()), there[key], place.next) if key in there else place.next
                    ours[key] = max(ours.get(key, 0), at)
        return [
            ReaderState(*name, updated[name], [ReaderPlace(*key, at) for key, at in sorted(ours.items())])
            for name, ours in sorted(places.items())
        ]

    def delete_reader(self, name: str) -> dict[str, str]:
        """Delete a durable reader at all hubs that answer. Return the others, with the reason. Raises NotFound if no hub has it."""
        lacking: list[NotFound] = []

        def delete(member: _Member) -> bool:
            with self._lock:
                member.pending.pop(name, None)
            try:
                OneHub.delete_reader(member, name)
            except NotFound as error:
                lacking.append(error)
                return False
            return True

        found = self._all(delete, least=self._members[0].patience)
        if not any(found.values()):
            self._refuse_missing(lacking, found)
        return {one.location: one.outage.why or "no answer" for one in self._members if one not in found}

    # Records.

    def items(self, ticket: Ticket, timeout: float | None = None) -> Generator[SequencedBatch | Gap | int]:
        """Yield the result of a ticket from any hub that has the records; see `OneHub.items`. The sequences are those of the timeline."""
        reading.decode_ticket(msgspec.json.encode(ticket))  # raises Malformed
        key = ticket.client, ticket.shard
        whole, states = self._whole(key)
        if isinstance(ticket.start, int) and ticket.start > whole.next and len(states) < len(self._members):
            whole, states = self._whole(key, everyone=True)
        if ticket.log and [one.log for one in whole.generations[:1]] != [ticket.log]:
            raise Fenced(f"client {ticket.client}, shard {ticket.shard}: another log has replaced {ticket.log}")
        first, end = self._first(ticket, whole, states), whole.next if ticket.end is None else min(ticket.end, whole.next)
        if first > whole.next:
            self._refuse_late(ticket, first, whole.next, states)
        copies = []
        for one in self._members:
            state = states.get(one)
            copies.append(Copy(one.location, one.outage, partial(_linked, one), state=state, timeout=timeout))

        repeated = -1

        def give_up(at: int, answers: Mapping[Copy, Answer]) -> None:
            nonlocal repeated
            if at == repeated or not any(answer.what == "away" for answer in answers.values()):
                raise no_hub_has(*key, at, answers)
            repeated = at  # all connections may have been cut at the same time: once more
            system.port.sleep(AGAIN)

        reader = CopyReader(ticket, tuple(whole.generations), copies, give_up)
        after = first
        for item in reader.read(first, end, ticket.limit):
            after = item.last + 1 if isinstance(item, Gap) else item.end
            yield item
        yield after

    def _whole(self, key: Key, *, everyone: bool = False) -> tuple[ShardState, dict[_Member, ShardState]]:
        """Return the state of a shard, and that at each hub that has it. Raises NotFound, Conflict."""
        states = {one: found[key] for one, found in self._states(key[0], everyone=everyone).items() if key in found}
        if not states:
            raise NotFound(f"{self.location}: client {key[0]} has no shard {key[1]}")
        return self._joined(key, states), states

    def _first(self, ticket: Ticket, whole: ShardState, states: Mapping[_Member, ShardState]) -> int:
        """Return where a ticket starts."""
        if ticket.first_time is not None:
            return self._first_since(ticket, whole, states)
        if ticket.start == "earliest":
            return whole.first if ticket.end is None else min(whole.first, ticket.end)
        return whole.next if isinstance(ticket.start, str) else ticket.start

    def _first_since(self, ticket: Ticket, whole: ShardState, states: Mapping[_Member, ShardState]) -> int:
        """Return the first sequence whose record is not older than a time, at any hub that answers."""
        asked = Ticket(ticket.client, ticket.shard, start_time=ticket.start_time, limit=1, isolation=ticket.isolation, columns=["sequence"])

        def ask(member: _Member) -> int | None:
            if member not in states or states[member].error:
                return None
            found = [item.first for item in member.items(asked, member.patience) if isinstance(item, SequencedBatch)]
            return timeline.from_hub(tuple(whole.generations), states[member], found[0]) if found else None

        return min((at for at in self._all(ask).values() if at is not None), default=whole.next)

    def _refuse_late(self, ticket: Ticket, first: int, end: int, states: Mapping[_Member, ShardState]) -> NoReturn:
        """Raise the error of a start that no hub has yet."""
        words = f"client {ticket.client}, shard {ticket.shard}: the next record will be {end}, there is no {first}"
        away = {one.location: Unreachable(one.outage.why) for one in self._members if one not in states and one.outage.is_away}
        if away:
            _raise({**{one.location: Unexpected(words, end) for one in states}, **away})
        raise Unexpected(words, end)

    def close(self) -> None:
        """Close all connections. Streams in progress raise Closed."""
        self._is_closed = True
        close_all(self._members)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _linked(member: _Member) -> tuple[_Member, bool]:
    return member, False


def _states_of(member: _Member, clients: list[str]) -> States:
    """Return the shards of some clients at a hub; those that it has."""
    found: list[ShardState] = []
    if len(clients) > MANY:
        found = [state for state in member.changes().shards if state.client in set(clients)]
    else:
        for client in clients:
            try:
                found += member.shards(client)
            except NotFound:
                continue
    return {(state.client, state.shard): reading.check_state(state) for state in found}


def _by_key(found: Mapping[_Member, States]) -> dict[Key, dict[_Member, ShardState]]:
    """Return the states of each shard at each hub."""
    keys: dict[Key, dict[_Member, ShardState]] = {}
    for member, states in found.items():
        for key, state in states.items():
            keys.setdefault(key, {})[member] = state
    return keys


def _note(member: _Member, changes: Changes, *, is_whole: bool) -> set[Key]:
    """Store the changes at a hub. Return the changed shards."""
    if is_whole or member.root not in ("", changes.root):
        member.known = {}
    member.root = changes.root
    new = {(state.client, state.shard): reading.check_state(state) for state in changes.shards}
    member.known = {**member.known, **new}
    return set(new)


def _tokens(since: str, count: int) -> dict[str, str]:
    """Return the tokens of the hubs, by location; none for a token of another form."""
    try:
        found = msgspec.json.decode(since, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if len(found) <= count else {}


def _raise(errors: Mapping[str, HubError]) -> NoReturn:
    """Raise one error for those of several hubs: Unreachable if any may answer later."""
    words = "; ".join(f"{location}: {str(error).removeprefix(f'{location}: ')}" for location, error in errors.items())
    kinds = {type(error) for error in errors.values()}
    later = [error for error in errors.values() if isinstance(error, LATER)]
    error = later[0] if later else next(iter(errors.values()))
    if later and len(kinds) > 1:
        raise Unreachable(words)
    error.args = (words, *error.args[1:])
    raise error
