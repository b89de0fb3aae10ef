"""The window of a task list as a model: what workers are given, whichever is killed at whatever store; and mutants that the model finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Killed
from windows import INTERPRETED, Shared

from kvspool.kernel import machine
from kvspool.kernel import tasks_py as words
from kvspool.kernel.tasks import TaskWindow

SIZE = 8
KEYS = 5


class Task:
    def __init__(self, sequence: int, mark: int) -> None:
        self.sequence, self.mark, self.is_over = sequence, mark, False


class Model:
    """The expected behaviour: workers take, finish, give back and end. It raises AssertionError for a broken rule."""

    def __init__(self, shared: Shared, seed: int) -> None:
        self.random = random.Random(seed)
        self.shared = shared
        self.records = 0
        self.done: set[int] = set()
        self.unsure: set[int] = set()  # their acknowledgement was cut off by a kill
        self.held: dict[int, dict[int, int]] = {}  # of each living worker: sequences and marks
        self.windows: dict[int, Any] = {}
        self.begun: dict[int, int] = {}  # with an order: the highest sequence of each key that was given out

    def key(self, sequence: int) -> int:
        return sequence * 7 % KEYS

    def start(self, owner: int) -> None:
        self.windows[owner] = self.shared.window(owner)
        self.held[owner] = {}
        assert self.windows[owner].release(owner) >= 0

    def step(self) -> None:
        choices = [self.append, self.take, self.take, self.finish, self.finish, self.give_back, self.end]
        self.random.choice(choices)()

    def append(self) -> None:
        self.records += self.random.randrange(4)

    def _owner(self) -> int:
        return self.random.choice(list(self.windows))

    def take(self) -> None:
        owner = self._owner()
        window = self.windows[owner]
        if self.shared.is_ordered:
            after = window.word(words.NEXT)
            window.admit(after, [self.key(sequence) for sequence in range(after, self.records)])
        sequences: list[int] = []
        marks: list[int] = []
        window.take(self.random.randrange(1, 4), self.records, 0, sequences, marks)
        for sequence, mark in zip(sequences, marks, strict=True):
            assert sequence not in self.done, f"{sequence} was acknowledged, and given out again"
            assert all(sequence not in held for held in self.held.values()), f"{sequence} was given to two living workers"
            assert sequence < self.records
            if self.shared.is_ordered:
                for held in self.held.values():
                    assert all(self.key(other) != self.key(sequence) for other in held), f"two of the key of {sequence} at once"
                before = [one for one in range(sequence) if self.key(one) == self.key(sequence)]
                assert all(one in self.done or one in self.unsure for one in before), f"{sequence} came before an earlier one of its key"
            self.held[owner][sequence] = mark

    def finish(self) -> None:
        owner = self._owner()
        held = self.held[owner]
        if held:
            sequence = self.random.choice(list(held))
            mark = held.pop(sequence)
            self.unsure.add(sequence)
            assert self.windows[owner].finish(sequence, mark) >= 0, f"{sequence} was lost by a living worker"
            self.unsure.discard(sequence)
            self.done.add(sequence)
            assert self.windows[owner].finish(sequence, mark) == words.LOST

    def give_back(self) -> None:
        owner = self._owner()
        held = self.held[owner]
        if held:
            sequence = self.random.choice(list(held))
            mark = held.pop(sequence)
            assert self.windows[owner].put_back(sequence, mark, self.random.choice([0, 1])) == 0
            assert self.windows[owner].finish(sequence, mark) == words.LOST

    def end(self) -> None:
        """A worker ends; another one takes its number later."""
        owner = self._owner()
        self.held[owner] = {}
        survivor = self.random.choice(list(self.windows))
        assert self.windows[survivor].release(owner) >= 0

    def kill(self, owner: int) -> None:
        """The process of a worker was killed at a store."""
        self.held[owner] = {}
        del self.windows[owner]
        self.shared.counted.left = -1
        self.start(owner)

    def finish_everything(self) -> None:
        for owner in list(self.windows):
            for sequence, mark in list(self.held[owner].items()):
                del self.held[owner][sequence]
                assert self.windows[owner].finish(sequence, mark) >= 0
                self.done.add(sequence)
        for _ in range(20 * self.records + 20):
            self.take()
            for owner, held in self.held.items():
                for sequence, mark in list(held.items()):
                    del held[sequence]
                    assert self.windows[owner].finish(sequence, mark) >= 0
                    self.done.add(sequence)
        window = next(iter(self.windows.values()))
        missing = set(range(self.records)) - self.done - self.unsure
        assert not missing, f"{sorted(missing)} were never given out"
        assert window.word(words.LOW) == window.word(words.NEXT) == self.records


def play(seed: int, *, is_ordered: bool, kind: Any = INTERPRETED, kills: bool = False, path: Path | None = None, steps: int = 60) -> None:
    """Play one random history; raises AssertionError if a rule was broken."""
    shared = Shared(SIZE, is_ordered=is_ordered, kind=kind, path=path)
    try:
        model = Model(shared, seed)
        for owner in (1, 2, 3):
            model.start(owner)
        for _ in range(steps):
            if kills and model.random.random() < 0.3:
                shared.counted.left = model.random.randrange(12)
            before = {owner: dict(held) for owner, held in model.held.items()}
            try:
                model.step()
            except Killed:
                _kill_the_one(model, before)
            shared.counted.left = -1
        model.finish_everything()
    finally:
        shared.close()


def _kill_the_one(model: Model, before: dict[int, dict[int, int]]) -> None:
    """Kill all workers: each may have been the one at the store."""
    for owner in list(before):
        if owner in model.windows:
            model.kill(owner)
        else:
            model.start(owner)
        model.held[owner] = {}


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("kind", list(dict.fromkeys([INTERPRETED, TaskWindow])), ids=lambda kind: kind.__module__.rpartition(".")[2])
def test_no_task_is_lost_given_twice_or_given_after_its_end(kind: Any, is_ordered: bool, tmp_path: Path) -> None:
    for seed in range(300):
        play(seed, is_ordered=is_ordered, kind=kind, path=tmp_path / "locks")


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_the_rules_hold_if_workers_are_killed_at_any_store(is_ordered: bool) -> None:
    for seed in range(600):
        play(seed, is_ordered=is_ordered, kills=True)


class LostAck(INTERPRETED):  # type: ignore[misc]
    """Finishes a task only sometimes."""

    def finish_one(self, sequence: int, mark: int) -> bool:
        if sequence % 11 == 10:
            self.change(sequence, mark, words.READY, 0)
            return True
        return bool(super().finish_one(sequence, mark))


class Twice(INTERPRETED):  # type: ignore[misc]
    """Releases the tasks of all workers if one ends."""

    def release(self, owner: int) -> int:
        low = self.word(words.LOW)
        for sequence in range(low, low + self.window):
            mark = self.mark_of(sequence)
            if self.age(sequence, mark) == 0 and mark & words.STATE == words.TAKEN and sequence % 2:
                self.make_ready(sequence, mark)
        return int(super().release(owner))


class NoFence(INTERPRETED):  # type: ignore[misc]
    """Accepts a late acknowledgement."""

    def finish_one(self, sequence: int, mark: int) -> bool:
        return bool(super().finish_one(sequence, self.mark_of(sequence)))


class Forgotten(INTERPRETED):  # type: ignore[misc]
    """Doesn't find the tasks of an ended worker again."""

    def make_ready(self, sequence: int, mark: int) -> None:
        self.change(sequence, mark, words.READY, 0)


class EarlyLow(INTERPRETED):  # type: ignore[misc]
    """Stores LOW before the tasks are done."""

    def advance(self) -> None:
        machine.store(self.words, words.LOW, max(self.word(words.LOW), self.word(words.NEXT) - 1))


class NextFirst(INTERPRETED):  # type: ignore[misc]
    """Moves NEXT before the mark is stored: a kill between the two loses the task."""

    def give(self, sequence: int, mark: int, state: int, until: int, sequences: list[int], marks: list[int]) -> None:
        if sequence == self.word(words.NEXT):
            machine.store(self.words, words.NEXT, sequence + 1)
        super().give(sequence, mark, state, until, sequences, marks)


class NoOrder(INTERPRETED):  # type: ignore[misc]
    """Lets all tasks of a key be ready."""

    def admit_one(self, sequence: int, bucket: int) -> None:
        super().admit_one(sequence, sequence)


MUTANTS = [(LostAck, False), (Twice, False), (NoFence, False), (Forgotten, False), (EarlyLow, False), (NextFirst, False), (NoOrder, True)]


@pytest.mark.parametrize(("mutant", "is_ordered"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_the_model_finds_a_mutant(mutant: Any, is_ordered: bool) -> None:
    def histories() -> Iterator[None]:
        for seed in range(3000):
            play(seed, is_ordered=is_ordered, kind=mutant, kills=seed % 2 == 1)
            yield

    with pytest.raises((AssertionError, KeyError)):
        for _ in histories():
            pass
