"""The owners of shards: the changes of a group's state, as functions without I/O. The group's lock is held when one is stored.

**Hand-over.** A shard has an `owner`, which reads it, and a `target`, which is to own it. An owner that is no longer the target stops
reading the shard, and releases it after its commit. Only then, or after the owner's end, the target acquires it. So at no time a shard has
two owners, and no shard moves before its owner has committed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvspool.groups.layout import ABSENT, GroupShard, GroupState, Member


def shares(members: Sequence[int], shards: Sequence[GroupShard]) -> list[int]:
    """Return the target of each shard: numbers of shards differ by at most one, and as few shards as possible move.

    members: slots in the order in which they joined. A shard belongs to its owner; without one, to its target.
    """
    if not members:
        return [ABSENT] * len(shards)
    holds = [one.owner or one.target for one in shards]
    counts = {slot: holds.count(slot) for slot in members}
    base, extra = divmod(len(shards), len(members))
    largest = sorted(members, key=lambda slot: -counts[slot])[:extra]  # stable: the earliest of equals
    room = {slot: base + (slot in largest) for slot in members}
    found = [ABSENT] * len(shards)
    for has_owner in (True, False):  # an unowned shard moves at no cost
        for at, one in enumerate(shards):
            slot = holds[at]
            if bool(one.owner) is has_owner and room.get(slot, 0):
                found[at] = slot
                room[slot] -= 1
    free = (slot for slot in members for _ in range(room[slot]))
    return [slot or next(free) for slot in found]


def targeted(state: GroupState) -> GroupState:
    """Return a state with the present targets."""
    targets = shares([one.slot for one in state.members], state.shards)
    return state._replace(shards=tuple(one._replace(target=to) for one, to in zip(state.shards, targets, strict=True)))


def joined(state: GroupState, member: Member) -> GroupState:
    """Return a state with one more member."""
    return targeted(state._replace(members=(*state.members, member)))


def without(state: GroupState, slots: Collection[int], *, displaced: Collection[int] = ()) -> GroupState:
    """Return a state without some members, whose shards have no owner now. displaced: those of them that may still hold locks."""
    former = {one.slot: one.holder[0] for one in state.members if one.slot in displaced}
    members = tuple(one for one in state.members if one.slot not in slots)
    shards = tuple(_without(one, slots, former) for one in state.shards)
    return targeted(state._replace(members=members, shards=shards))


def _without(shard: GroupShard, slots: Collection[int], former: Mapping[int, int]) -> GroupShard:
    if shard.target in slots:
        shard = shard._replace(target=ABSENT)
    if shard.owner in former:
        return shard._replace(owner=ABSENT, former=former[shard.owner], epoch=shard.epoch + 1)
    return shard._replace(owner=ABSENT) if shard.owner in slots else shard


def with_shards(state: GroupState, digests: Sequence[bytes]) -> GroupState:
    """Return a state with exactly these shards: new ones have no owner, others are forgotten."""
    known = {one.digest: one for one in state.shards}
    return targeted(state._replace(shards=tuple(known.get(digest) or GroupShard(digest) for digest in digests)))


def cleared(state: GroupState, digests: Collection[bytes]) -> GroupState:
    """Return a state in which no former owner holds the lock of these shards."""
    return state._replace(shards=tuple(one._replace(former=0) if one.digest in digests else one for one in state.shards))


def acquired(state: GroupState, slot: int) -> GroupState:
    """Return a state in which a member owns all shards without an owner of which it is the target."""
    return state._replace(
        shards=tuple(one._replace(owner=slot, epoch=one.epoch + 1) if is_due(one, slot) else one for one in state.shards)
    )


def is_due(shard: GroupShard, slot: int) -> bool:
    """Return whether a member may own a shard now: it is the target, and there is no owner, nor a former one with the lock."""
    return shard.owner == ABSENT and shard.target == slot and not shard.former


def released(state: GroupState, slot: int, digests: Collection[bytes]) -> GroupState:
    """Return a state in which a member no longer owns these shards."""
    return state._replace(
        shards=tuple(one._replace(owner=ABSENT) if one.owner == slot and one.digest in digests else one for one in state.shards)
    )


def owned(state: GroupState, slot: int) -> dict[bytes, GroupShard]:
    """Return the shards that a member owns, by digest."""
    return {one.digest: one for one in state.shards if one.owner == slot}
