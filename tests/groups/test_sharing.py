"""The assignment and the hand-over of shards as a model, and mutants of it that the model must reject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvspool.groups import sharing
from kvspool.groups.layout import ABSENT, GroupShard, GroupState, Member, digest

STEPS = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def member(slot: int, token: int) -> Member:
    return Member(slot, token, 0, 0, (1000 + token, 0, 0, 0))


class Group(RuleBasedStateMachine):
    """Members that live outside of the state: each knows what it reads, and what it has returned and not committed.

    positions: the committed position of each shard; reads: for each living member, its shards and the position that it has reached.
    """

    sharing: Any = sharing

    def __init__(self) -> None:
        super().__init__()
        self.state = GroupState()
        self.tokens = 0
        self.names = 0
        self.reads: dict[int, dict[bytes, int]] = {}
        self.silent: dict[int, dict[bytes, int]] = {}  # by token: members that others have removed, and that still live
        self.positions: dict[bytes, int] = {}

    def of(self, slot: int) -> dict[bytes, int]:
        return self.reads[self.token(slot)]

    def token(self, slot: int) -> int:
        return next(one.token for one in self.state.members if one.slot == slot)

    def slots(self) -> list[int]:
        return [one.slot for one in self.state.members]

    @rule()
    @precondition(lambda self: len(self.state.members) < 6)
    def join(self) -> None:
        self.tokens += 1
        slot = next(slot for slot in range(1, 8) if slot not in self.slots())
        self.state = self.sharing.joined(self.state, member(slot, self.tokens))
        self.reads[self.tokens] = {}

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: len(self.state.shards) < 12)
    def add_shards(self, count: int) -> None:
        found = [one.digest for one in self.state.shards]
        for _ in range(count):
            self.names += 1
            found.append(digest(str(self.names)))
            self.positions[found[-1]] = 0
        self.state = self.sharing.with_shards(self.state, found)

    @rule(data=st.data())
    @precondition(lambda self: self.state.members)
    def acquire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots()))
        self.state = self.sharing.acquired(self.state, slot)
        for name in self.sharing.owned(self.state, slot):
            self.of(slot).setdefault(name, self.positions[name])

    @rule(data=st.data())
    @precondition(lambda self: self.state.members)
    def read(self, data: st.DataObject) -> None:
        """Return a record of a shard that is not to be released."""
        slot = data.draw(st.sampled_from(self.slots()))
        for one in self.state.shards:
            if one.digest in self.of(slot) and one.target == slot:
                self.of(slot)[one.digest] += 1

    @rule(data=st.data())
    @precondition(lambda self: self.state.members)
    def commit(self, data: st.DataObject) -> None:
        """Commit all shards, and release those that others are to own."""
        slot = data.draw(st.sampled_from(self.slots()))
        self.positions.update(self.of(slot))
        self.release(slot)

    @rule(data=st.data())
    @precondition(lambda self: self.state.members)
    def attend(self, data: st.DataObject) -> None:
        """Release shards that others are to own, if all is committed."""
        self.release(data.draw(st.sampled_from(self.slots())))

    def release(self, slot: int) -> None:
        leaving = [one.digest for one in self.state.shards if one.owner == slot and one.target != slot]
        clean = [name for name in leaving if self.of(slot).get(name) == self.positions[name]]
        self.state = self.sharing.released(self.state, slot, clean)
        for name in clean:
            del self.of(slot)[name]

    @rule(data=st.data())
    @precondition(lambda self: self.state.members)
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots()))
        del self.reads[self.token(slot)]
        self.state = self.sharing.without(self.state, {slot})

    @rule(data=st.data())
    @precondition(lambda self: self.state.members)
    def fall_silent(self, data: st.DataObject) -> None:
        """A member is stopped, and removed: its shards are locked until they are displaced."""
        slot = data.draw(st.sampled_from(self.slots()))
        token = self.token(slot)
        self.silent[token] = self.reads.pop(token)
        self.state = self.sharing.without(self.state, {slot}, displaced={slot})
        for one in self.state.shards:
            if one.digest in self.silent[token]:
                assert one.former == 1000 + token or one.former, "its lock may still be held"

    @rule()
    def displace(self) -> None:
        former = {one.digest for one in self.state.shards if one.former}
        self.state = self.sharing.cleared(self.state, former)
        self.silent.clear()  # their fences are closed: they can't commit, so they don't count as owners

    # The promises.

    @invariant()
    def no_shard_has_two_owners(self) -> None:
        readers = [name for reads in (*self.reads.values(), *self.silent.values()) for name in reads]
        assert len(readers) == len(set(readers))

    @invariant()
    def the_state_knows_what_each_member_reads(self) -> None:
        for slot in self.slots():
            assert set(self.of(slot)) <= set(self.sharing.owned(self.state, slot))

    @invariant()
    def no_shard_moves_before_its_owner_has_committed(self) -> None:
        for reads in self.reads.values():
            for name, at in reads.items():
                assert at >= self.positions[name]

    @invariant()
    def each_shard_is_to_have_one_owner_and_shares_are_even(self) -> None:
        slots = self.slots()
        targets = [one.target for one in self.state.shards]
        if not slots:
            assert targets == [ABSENT] * len(targets)
            return
        assert set(targets) <= set(slots)
        counts = [targets.count(slot) for slot in slots]
        assert max(counts) - min(counts) <= 1

    @invariant()
    def positions_never_skip(self) -> None:
        """The next owner begins at the committed position."""
        for slot in self.slots():
            for name in self.of(slot):
                assert self.of(slot)[name] >= self.positions[name]

    def teardown(self) -> None:
        """Once all members attend and commit, every shard has its target as the owner."""
        if not self.state.members:
            return
        self.displace()
        for _ in range(2):
            for slot in self.slots():
                self.positions.update(self.of(slot))
                self.release(slot)
            for slot in self.slots():
                self.state = self.sharing.acquired(self.state, slot)
                for name in self.sharing.owned(self.state, slot):
                    self.of(slot).setdefault(name, self.positions[name])
                    self.no_shard_has_two_owners()
        assert all(one.owner == one.target for one in self.state.shards)


def test_the_model_keeps_every_promise() -> None:
    run_state_machine_as_test(Group, settings=STEPS)


# Mutants.


def owns_what_others_own(state: GroupState, slot: int) -> GroupState:
    """Acquire every shard of which it is the target, though another member still owns it."""
    shards = (one._replace(owner=slot, epoch=one.epoch + 1) if one.target == slot else one for one in state.shards)
    return state._replace(shards=tuple(shards))


def forgets_shards_of_the_dead(state: GroupState, slots: Any, *, displaced: Any = ()) -> GroupState:
    """Leave the shards of ended members with their target."""
    members = tuple(one for one in state.members if one.slot not in slots)
    return state._replace(members=members)


def takes_shards_away(state: GroupState, one: Member) -> GroupState:
    """Give shards of others to a new member at once."""
    joined = sharing.joined(state, one)
    shards = (one._replace(owner=ABSENT) if one.owner != one.target else one for one in joined.shards)
    return joined._replace(shards=tuple(shards))


def ignores_locks(state: GroupState, slot: int) -> GroupState:
    """Acquire a shard whose former owner is stopped, and not fenced."""
    shards = (
        one._replace(owner=slot, epoch=one.epoch + 1) if one.owner == ABSENT and one.target == slot else one for one in state.shards
    )
    return state._replace(shards=tuple(shards))


def shares_nothing_new(state: GroupState, digests: Any) -> GroupState:
    """Know new shards, but give them to no member."""
    known = {one.digest: one for one in state.shards}
    return state._replace(shards=tuple(known.get(digest) or GroupShard(digest) for digest in digests))


MUTANTS: list[tuple[str, Callable[..., GroupState]]] = [
    ("acquired", owns_what_others_own),
    ("acquired", ignores_locks),
    ("without", forgets_shards_of_the_dead),
    ("joined", takes_shards_away),
    ("with_shards", shares_nothing_new),
]


class Mutated:
    """The module with one function replaced."""

    def __init__(self, name: str, function: Callable[..., GroupState]) -> None:
        self.__dict__[name] = function

    def __getattr__(self, name: str) -> Any:
        return getattr(sharing, name)


@pytest.mark.parametrize(("name", "function"), MUTANTS, ids=[function.__name__ for _, function in MUTANTS])
def test_the_model_rejects_a_mutant(name: str, function: Callable[..., GroupState]) -> None:
    mutant = type("Mutant", (Group,), {"sharing": Mutated(name, function)})
    with pytest.raises((AssertionError, StopIteration, KeyError, ExceptionGroup)):
        run_state_machine_as_test(mutant, settings=settings(STEPS, max_examples=3000))  # it ends with the first counterexample


# The assignment alone.

owners = st.lists(st.integers(0, 6), max_size=40)


@given(owners, st.lists(st.integers(1, 6), min_size=1, max_size=6, unique=True))
@settings(deadline=None, max_examples=50)
def test_as_few_shards_move_as_possible(before: list[int], slots: list[int]) -> None:
    shards = [GroupShard(digest(str(at)), owner if owner in slots else ABSENT) for at, owner in enumerate(before)]
    targets = sharing.shares(slots, shards)
    counts = sorted(targets.count(slot) for slot in slots)
    assert set(targets) <= set(slots) and counts[-1] - counts[0] <= 1
    moved = sum(one.owner != ABSENT and one.owner != target for one, target in zip(shards, targets, strict=True))
    held = sorted((sum(one.owner == slot for one in shards) for slot in slots), reverse=True)
    base, extra = divmod(len(shards), len(slots))
    assert moved == sum(max(0, count - base - (at < extra)) for at, count in enumerate(held))


def test_nothing_moves_when_nothing_changes() -> None:
    shards = [GroupShard(digest(str(at)), 1 + at % 3) for at in range(10)]
    assert sharing.shares([1, 2, 3], shards) == [one.owner for one in shards]
