"""Compare the shards of several hubs that have copies of the same clients: which hub has what, and what is missing where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec

from hub.client import timeline
from hub.client.answers import gather
from hub.client.connection import Security
from hub.client.one_hub import OneHub
from hub.errors import Conflict, HubError
from hub.protocol.reading import ShardState, check_state
from hub.root.generations import generations
from hub.root.root import HubRoot

TIMEOUT = 15.0  # seconds for a hub to answer
OWN = ""  # the location of a root on this host, which is compared with hubs

States = dict[tuple[str, int], ShardState]


class CopyState(msgspec.Struct, frozen=True):
    """A shard at one hub. first, next: its oldest and its next sequence, in the common numbering; missing: records that only other hubs
    have, after `next`; error: why the hub can't read it, "" if it can.
    """

    hub: str
    first: int
    next: int
    missing: int
    error: str = ""


class ComparedShard(msgspec.Struct, frozen=True):
    """A shard at all hubs. next: the largest of their next sequences; complete: number of hubs with all records up to there.

    stored: the sequence below which the records are at one hub, at two, and so on. error: why the hubs can't be compared.
    """

    client: str
    shard: int
    next: int
    complete: int
    stored: list[int]
    copies: list[CopyState]
    error: str = ""


class Comparison(msgspec.Struct, frozen=True):
    """Several hubs. hubs: why each one doesn't answer, "" if it does. copies: number of hubs that each shard should be at."""

    hubs: dict[str, str]
    copies: int
    shards: list[ComparedShard]

    def troubles(self) -> list[str]:
        """Return what is wrong, and what to do, a sentence each; empty if each shard is at enough hubs."""
        found = [f"{hub} doesn't answer: {why.removeprefix(f'{hub}: ')}" for hub, why in self.hubs.items() if why]
        for one in self.shards:
            name = f"{one.client}, shard {one.shard}"
            if one.error:
                found.append(f"{name}: {one.error}")
            elif one.complete < self.copies:
                found.append(f"{name}: {self._advice(one)}")
        return found

    def _advice(self, one: ComparedShard) -> str:
        lacking = ", ".join(f"{copy.hub} lacks {copy.missing:,} records" for copy in one.copies if copy.missing)
        words = f"{one.complete} of {self.copies} hubs have all records"
        if not lacking:
            return f"{words}; ship it with --copies {self.copies}"
        return f"{words}; {lacking}. Its shipper sends them; without a shipper, stop that hub and run kvspool hub rejoin"


def compare(locations: Sequence[str], security: Security, copies: int | None = None) -> Comparison:
    """Ask all hubs for their shards, at once, and compare them. copies: number of hubs that each shard should be at; None: all.

    A hub that doesn't answer within 15 seconds is left out, with the reason. Raises ValueError for an invalid location.
    """
    states, errors = _ask(locations, security)
    hubs = {location: str(errors.get(location, "")) for location in locations}
    return Comparison(hubs, len(locations) if copies is None else copies, compared(states))


def _ask(locations: Sequence[str], security: Security) -> tuple[dict[str, States], dict[str, HubError]]:
    """Return the shards at each hub that answers, and the errors of the others."""

    def ask(location: str) -> States:
        with closing(OneHub(location, security, TIMEOUT)) as hub:
            return {(one.client, one.shard): check_state(one) for one in hub.changes().shards}

    with ThreadPoolExecutor(len(locations), "kvspool hub status") as pool:
        return gather({pool.submit(ask, location): location for location in locations})


def compared(states: Mapping[str, States]) -> list[ComparedShard]:
    """Return the shards of all hubs, in order."""
    keys = sorted({key for found in states.values() for key in found})
    return [_shard(key, {hub: found[key] for hub, found in states.items() if key in found}) for key in keys]


def _shard(key: tuple[str, int], there: dict[str, ShardState]) -> ComparedShard:
    sound = {hub: state for hub, state in there.items() if not state.error}
    damaged = [CopyState(hub, 0, 0, 0, state.error) for hub, state in there.items() if state.error]
    try:
        table = timeline.merged(sound.values())
    except Conflict as error:
        return ComparedShard(*key, 0, 0, [], damaged, str(error))
    extents = {hub: timeline.extent(table, state) for hub, state in sound.items()}
    stored = sorted((end for _, end in extents.values()), reverse=True)
    last = max(stored, default=0)
    copies = [CopyState(hub, first, end, last - end) for hub, (first, end) in extents.items()]
    return ComparedShard(*key, last, stored.count(last), stored, sorted([*copies, *damaged], key=lambda one: one.hub))


def missing_elsewhere(root: HubRoot, locations: Sequence[str], security: Security) -> tuple[int, int]:
    """Return how many records no other hub has, and in how many shards. locations: of the other hubs.

    Raises the error of a hub that doesn't answer, and those of reading the root.
    """
    states, errors = _ask(locations, security)
    for error in errors.values():
        raise error
    found = []
    for one in compared({**states, OWN: states_of(root)}):
        if one.error:
            raise Conflict(f"client {one.client}, shard {one.shard}: {one.error}")
        ends = {copy.hub: copy.next for copy in one.copies if not copy.error}
        own = ends.pop(OWN, 0)
        found.append(max(0, own - max(ends.values(), default=0)))
    return sum(found), sum(count > 0 for count in found)


def states_of(root: HubRoot) -> States:
    """Return the shards in a root."""
    found: States = {}
    for client in root.clients():
        with root.client(client) as shards:
            for index, log in enumerate(shards.shards):
                first, end = log.extent()
                found[client, index] = ShardState(client, shards.bits, index, first, end, generations(log, log.path, end))
    return found
