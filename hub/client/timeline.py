"""The sequences of a shard that several hubs have: one numbering for readers, whatever hub they read from.

A hub appends the records of a client's logs one after the other. A record's sequence there is that in its log, plus the base of the log's
generation. Hubs with different histories have different bases: one was away when a log ended, or has lost its disk. So a record is
identified by its log's id and its sequence in that log. A *timeline* has a base for each log that is large enough for the records of every
hub. It equals the table of a hub that is alone, and the common table of hubs that agree.

    hub a    first log, 100 records    second log, base 100        timeline    first log, base 0
    hub b    first log, 60 records     second log, base 60                     second log, base 100

A timeline only grows: later logs are added at its end, and a base that was used stays. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hub.errors import Conflict
from hub.protocol.ingest import LAST
from hub.protocol.reading import Generation, ShardState

Table = tuple[Generation, ...]


class LogPosition(NamedTuple):
    """A position that means the same at every hub: the id of a log of the shard, 32 hex digits, and a sequence in it."""

    log: str
    sequence: int


class Span(NamedTuple):
    """The place of one log: the sequences first..end-1 of a timeline are those at the hub, minus `shift`. base: at the hub."""

    log: str
    base: int
    first: int
    end: int
    shift: int

    @property
    def generation(self) -> Generation | None:
        """Return the generation at the hub; None for a log without an id."""
        return Generation(self.log, self.base) if self.log else None


def merged(states: Iterable[ShardState], known: Table = ()) -> Table:
    """Return the timeline of a shard at several hubs. known: the bases that a reader has used before.

    Empty for a shard at one hub whose log has no id. Raises Conflict if it is unknown which log came first.
    """
    having = [state for state in states if state.next or state.generations]
    if not all(state.generations for state in having):
        if len(having) > 1:
            raise Conflict("a log has no id, so its records at two hubs can't be compared")
        return ()
    if len(having) == 1 and tuple(having[0].generations[: len(known)]) == known:
        return tuple(having[0].generations)
    there = {one.log for state in having for one in state.generations}
    if known and not any(one.log in there for one in known):
        return merged(having)  # all logs were replaced
    order = _ordered([[one.log for one in known], *([one.log for one in state.generations] for state in having)])
    rooms = dict.fromkeys(order, 0)
    for state in having:
        for log, room in _rooms(state).items():
            rooms[log] = max(rooms[log], room)
    fixed = {one.log: one.base for one in known}
    bases: dict[str, int] = {}
    for at, log in enumerate(order):
        if log in fixed:
            bases[log] = fixed[log]
        elif at:
            bases[log] = bases[order[at - 1]] + rooms[order[at - 1]]
        else:
            bases[log] = _first_base(order, rooms, fixed, having)
    return tuple(Generation(log, bases[log]) for log in order)


def _first_base(order: list[str], rooms: dict[str, int], fixed: dict[str, int], states: list[ShardState]) -> int:
    """Return the base of the oldest log: below the first known one, by its room; it may be negative."""
    below = 0
    for log in order:
        if log in fixed:
            return fixed[log] - below
        below += rooms[log]
    return max((one.base for state in states for one in state.generations[:1] if one.log == order[0]), default=0)


def _ordered(chains: list[list[str]]) -> list[str]:
    """Return all logs in the only order that agrees with every chain. Raises Conflict if there are several, or none."""
    longest = max(chains, key=len)
    if all(chain == longest[: len(chain)] for chain in chains):
        return longest
    following: dict[str, set[str]] = {log: set() for chain in chains for log in chain}
    before = dict.fromkeys(following, 0)
    for chain in chains:
        for log, after in zip(chain, chain[1:], strict=False):
            if after not in following[log]:
                following[log].add(after)
                before[after] += 1
    order: list[str] = []
    free = [log for log, count in before.items() if not count]
    while free:
        if len(free) > 1:
            raise Conflict(f"logs {free[0][:8]} and {free[1][:8]} are at different hubs, so the order of the records is unknown")
        log = free.pop()
        order.append(log)
        for after in following[log]:
            before[after] -= 1
            if not before[after]:
                free.append(after)
    if len(order) < len(following):
        raise Conflict("two hubs have the logs in different orders, so the order of the records is unknown")
    return order


def _rooms(state: ShardState) -> dict[str, int]:
    """Return the number of sequences that a hub has for each log."""
    ends = [*(one.base for one in state.generations[1:]), state.next]
    return {one.log: max(0, end - one.base) for one, end in zip(state.generations, ends, strict=False)}


def spans(timeline: Table, generations: Sequence[Generation]) -> list[Span]:
    """Return the places of a hub's logs, in order. The last one has no end, because its log grows.

    Logs that the timeline lacks are left out, and records that have no place in it.
    """
    if not timeline:
        return [Span("", 0, 0, LAST, 0)]
    limits = {one.log: (one.base, after) for one, after in zip(timeline, [*(one.base for one in timeline[1:]), LAST], strict=True)}
    found = []
    for at, one in enumerate(generations):
        if one.log in limits:
            base, limit = limits[one.log]
            end = limit if at + 1 == len(generations) else min(limit, base + generations[at + 1].base - one.base)
            if max(base, 0) < end:
                found.append(Span(one.log, one.base, max(base, 0), end, one.base - base))
    return found


def span_at(places: Sequence[Span], sequence: int) -> Span | None:
    """Return the place that has a sequence of the timeline."""
    return next((one for one in places if one.first <= sequence < one.end), None)


def extent(timeline: Table, state: ShardState) -> tuple[int, int]:
    """Return the sequences of a timeline for which a hub may have records: the first one, and the one after the last."""
    places = spans(timeline, state.generations)
    if not places:
        return 0, 0
    return _from_hub(places, state.first), max(places[0].first, min(places[-1].end, state.next - places[-1].shift))


def _from_hub(places: list[Span], sequence: int) -> int:
    """Return the first sequence of the timeline that is not before one of the hub."""
    for one in places:
        if sequence < one.end + one.shift:
            return max(one.first, sequence - one.shift)
    return places[-1].end


def at_hub(timeline: Table, state: ShardState, sequence: int) -> int:
    """Return the hub's sequence of the first record that is not before one of the timeline; its end if there is none."""
    for one in spans(timeline, state.generations):
        if sequence < one.end:
            return min(max(sequence, one.first) + one.shift, state.next)
    return state.next


def from_hub(timeline: Table, state: ShardState, sequence: int) -> int:
    """Return the timeline's sequence of a position at a hub. The inverse of `at_hub`."""
    places = spans(timeline, state.generations)
    return _from_hub(places, sequence) if places else 0


def has_hidden(timeline: Table, state: ShardState) -> bool:
    """Return whether a hub has records that a timeline has no place for: they came after a reader had passed their log's end."""
    known = {one.log: after.base - one.base for one, after in zip(timeline, timeline[1:], strict=False)}
    return any(room > known.get(log, LAST) for log, room in _rooms(state).items())


def noted(timeline: Table, first: int, end: int) -> Table:
    """Return the part of a timeline that a checkpoint needs for the sequences from `first` to `end`, both included.

    Empty for a timeline that needs none: a single log, from 0 on.
    """
    return () if len(timeline) == 1 and not timeline[0].base else within(timeline, first, end)


def within(timeline: Table, first: int, end: int) -> Table:
    """Return the logs of a timeline that have the sequences from `first` to `end`, both included."""
    limits = [*(one.base for one in timeline[1:]), LAST]
    return tuple(one for one, limit in zip(timeline, limits, strict=False) if one.base <= end and first < limit)


def cut(table: Sequence[Generation], logs: Sequence[Generation]) -> Table:
    """Return the part of a table with some logs, and the next entry, which ends the last of them."""
    wanted = {one.log for one in logs}
    found = [at for at, one in enumerate(table) if one.log in wanted]
    return tuple(table[found[0] : found[-1] + 2]) if found else ()


def position(table: Table, sequence: int) -> LogPosition | None:
    """Return the position of a sequence in its log; None without ids of logs."""
    ours = [one for one in table if one.base <= sequence]
    return LogPosition(ours[-1].log, sequence - ours[-1].base) if ours else None


def sequence_of(table: Table, place: LogPosition) -> int | None:
    """Return the sequence of a position; None if its log is not there."""
    return next((max(0, one.base + place.sequence) for one in table if one.log == place.log), None)


def moved(before: Table, table: Table, sequence: int) -> int:
    """Return the sequence in a timeline of a place in another timeline of the shard: in the same log. Unchanged without that log."""
    place = position(before, sequence)
    found = None if place is None else sequence_of(table, place)
    return sequence if found is None else found
