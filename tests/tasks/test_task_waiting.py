"""Waiting workers as a model: two watch, the others rest, and no wake-up is lost, whichever is killed or stopped at whatever step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from faults import Killed
from windows import INTERPRETED, Shared

from kvspool import system
from kvspool.kernel import machine
from kvspool.kernel import tasks_py as words
from kvspool.tasks.source import PATIENCE

SIZE = 64
MOST, FEW = 6, 3  # workers
RUNS, WATCHES, RESTS, WORKS = "runs", "sleeps on inotify", "rests", "works on a task"
OMITTED = (
    "the check between the request and the sleep",
    "the comparison of the calls",
    "the call of a called worker",
    "the check for ended workers after the watch",
)


class Calls(system.Port):
    """Counts the calls of the futex, and has a clock that stands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def wake_word(self, memory: memoryview, at: int, most: int) -> None:
        self.calls += 1

    def monotonic(self) -> float:
        return 1.0


class Worker:
    """A worker: `steps` is its program, which stops after each step that others can notice."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.window = world.shared.window(number)
        self.state = RUNS
        self.is_stopped = False
        self.has_watcher = self.has_event = self.hears_of_ends = False
        self.held: list[tuple[int, int]] = []
        self.handled = 0
        self.steps = self.program()

    def program(self) -> Iterator[None]:
        world = self.world
        self.window.release(self.number)
        yield from self._after_call()
        has_waited = is_armed = False
        while True:
            if self.hears_of_ends:
                self.hears_of_ends = False
                yield from self._reap()
            yield from self._take()
            if self.held:
                if has_waited:
                    has_waited = is_armed = False
                    self.window.end_watch(PATIENCE)
                    yield from self._after_call()
                yield from self._finish()
            elif not is_armed:
                has_waited = world.passes_calls_on
                calls = self.window.stand_watch(PATIENCE)
                yield from self._after_call()
                if calls != words.WATCHES:
                    yield from self._rest(calls)
                    continue
                has_waited = True
                if not self.has_watcher:
                    self.has_watcher = True
                    self.hears_of_ends = world.reaps_once_more
                yield
                world.is_wanted = True
                self.window.ask()
                is_armed = True
                yield
                if not world.checks_again:
                    is_armed = False
                    yield from self._watch()
            else:
                is_armed = False
                yield from self._watch()

    def _after_call(self) -> Iterator[None]:
        """Do the rest of a call of the window: write to the file, and wake a worker."""
        yield
        if self.window.must_ring:
            self.window.must_ring = False
            self.world.ring()
            yield
        if self.window.must_call:
            self.window.call_one()
            self.world.call_one()
            yield

    def _reap(self) -> Iterator[None]:
        for number in sorted(self.world.ended):
            self.window.release(number)
            self.world.ended.discard(number)
            yield from self._after_call()

    def _take(self) -> Iterator[None]:
        sequences: list[int] = []
        marks: list[int] = []
        self.window.take(1, self.world.records, 0, sequences, marks)
        self.held += zip(sequences, marks, strict=True)
        yield from self._after_call()

    def _finish(self) -> Iterator[None]:
        self.handled += 1
        self.state = WORKS
        yield
        sequence, mark = self.held.pop()
        if self.world.chance.random() < 0.2:
            self.window.put_back(sequence, mark, 0)
        else:
            self.window.finish(sequence, mark)
        yield from self._after_call()

    def _rest(self, calls: int) -> Iterator[None]:
        if not self.world.compares_calls or self.window.word(words.CALLS) == calls:
            self.state = RESTS
            self.world.sleepers.append(self)
        yield

    def _watch(self) -> Iterator[None]:
        if not self.has_event:
            self.state = WATCHES
        yield
        self.has_event = False


class World:
    """A log, its task list, and the workers. omitted: one of OMITTED, for a mutant of their program."""

    def __init__(self, seed: int, kind: Any, omitted: str = "") -> None:
        self.chance = random.Random(seed)
        self.shared = Shared(SIZE, kind=kind)
        self.checks_again = omitted != "the check between the request and the sleep"
        self.compares_calls = omitted != "the comparison of the calls"
        self.passes_calls_on = omitted != "the call of a called worker"
        self.reaps_once_more = omitted != "the check for ended workers after the watch"
        self.records = 0
        self.is_wanted = False  # the byte that asks a writer to wake the watchers of its log
        self.sleepers: deque[Worker] = deque()
        self.ended: set[int] = set()  # workers that were killed, and whose tasks are not released
        self.workers = {number: Worker(self, number) for number in range(1, self.chance.randrange(FEW, MOST + 1) + 1)}

    # The kernel.

    def ring(self) -> None:
        for one in self.workers.values():
            if one.has_watcher:
                one.has_event = True
                if one.state is WATCHES:
                    one.state = RUNS

    def call_one(self) -> None:
        if self.sleepers:
            self.sleepers.popleft().state = RUNS

    def append(self) -> None:
        self.records += 1
        if self.is_wanted:
            self.is_wanted = False
            self.ring()

    def kill(self, worker: Worker) -> None:
        del self.workers[worker.number]
        if worker in self.sleepers:
            self.sleepers.remove(worker)
        self.ended.add(worker.number)
        for one in self.workers.values():
            one.hears_of_ends |= one.has_watcher
        self.ring()

    # The schedule.

    def step(self, worker: Worker, stores: int = -1) -> None:
        """Let a worker do a step; it is killed after so many stores."""
        self.shared.counted.left = stores
        try:
            next(worker.steps)
        except Killed:
            self.shared.counted.left = -1
            self.kill(worker)
        self.shared.counted.left = -1

    def run(self, *, fault: str = "") -> int:
        """Let the workers run until none can, in any order, with at most one fault at any step. Return how many ran."""
        ran: set[int] = set()
        events = [self.append] * self.chance.randrange(4) if fault else []
        if fault in ("kill", "stop"):
            events.insert(self.chance.randrange(len(events) + 1), lambda: self._fail(fault))
        for _ in range(100_000):
            able = [one for one in self.workers.values() if one.state is RUNS and not one.is_stopped]
            if events and (not able or self.chance.random() < 0.1):
                events.pop()()
            elif able:
                one = self.chance.choice(able)
                ran.add(one.number)
                self.step(one)
            else:
                break
        else:
            raise AssertionError("the workers never sleep")
        self.check()
        return len(ran)

    def _fail(self, fault: str) -> None:
        if not self.workers:
            return
        woken = [one for one in self.workers.values() if one.state is RUNS]
        one = self.chance.choice(woken if woken and self.chance.random() < 0.7 else list(self.workers.values()))
        if fault == "kill":
            if one.state is RUNS:
                self.step(one, self.chance.randrange(8))
            if one.number in self.workers:
                self.kill(one)
        else:
            one.is_stopped = True

    def check(self) -> None:
        """Nothing moves any more: raise AssertionError if a worker that can run sleeps although there is a task."""
        if all(one.is_stopped or one.state is WORKS for one in self.workers.values()):
            return
        window = next(iter(self.workers.values())).window
        held = {sequence for one in self.workers.values() for sequence, _ in one.held}
        low, after = window.word(words.LOW), window.word(words.NEXT)
        waiting = [sequence for sequence in range(low, after) if window.state_of(sequence) in (words.READY, words.TAKEN)]
        assert after == self.records or after - low >= SIZE, f"record {after} is there, and all sleep"
        assert held.issuperset(waiting), f"{waiting} are given to no worker that lives, and all sleep"

    def finish(self, part: float) -> None:
        """Let some of the workers finish their tasks."""
        for one in self.workers.values():
            if one.state is WORKS and self.chance.random() < part:
                one.state = RUNS
        self.run()

    def recover(self) -> None:
        """Continue a stopped worker; if few workers are left, start others."""
        for one in self.workers.values():
            one.is_stopped = False
        self.run()
        self.finish(0.5)
        for number in set(range(1, MOST + 1)) - self.workers.keys() if len(self.workers) < FEW else ():
            self.ended.discard(number)  # the new worker releases the tasks of the one that had its number
            self.workers[number] = Worker(self, number)
        self.run()


def play(seed: int, kind: Any = INTERPRETED, omitted: str = "") -> None:
    """Play one random history with many faults, one at a time. Raises AssertionError if a wake-up is lost."""
    with system.replaced(Calls()):
        world = World(seed, kind, omitted)
        world.run()
        for _ in range(12):
            for _ in range(world.chance.randrange(4)):
                world.append()
            world.run(fault=world.chance.choice(["none", "kill", "kill", "stop"]))
            world.recover()
        for _ in range(100):
            world.finish(1.0)
        assert world.records == world.shared.window(1).word(words.LOW)


def test_no_wake_up_is_lost_whichever_worker_is_killed_or_stopped_at_any_step() -> None:
    for seed in range(60):
        play(seed)


def test_a_record_wakes_two_workers_that_watch_and_one_that_rests() -> None:
    with system.replaced(Calls()):
        for seed in range(50):
            world = World(seed, INTERPRETED)
            world.run()
            states = [one.state for one in world.workers.values()]
            assert (states.count(WATCHES), states.count(RESTS)) == (2, len(states) - 2)
            world.append()
            world.chance.random = lambda: 1.0  # type: ignore[method-assign]  # nothing is given back
            assert world.run() <= 4
            assert sum(one.handled for one in world.workers.values()) == 1


class NoCall(INTERPRETED):  # type: ignore[misc]
    """Frees a place without a call."""

    def free_place(self, owner: int) -> None:
        for place in range(2):
            if self.word(words.WATCHERS + 2 * place) == owner:
                machine.store(self.words, words.WATCHERS + 2 * place, 0)

    def end_watch(self, patience: int) -> int:
        self.free_place(self.owner)
        return 0


class NoCallAgain(INTERPRETED):  # type: ignore[misc]
    """Doesn't call again while the other place is free: the called worker may have been killed."""

    def stand_watch(self, patience: int) -> int:
        found = int(super().stand_watch(patience))
        self.must_call = False
        return found


class OnePlace(INTERPRETED):  # type: ignore[misc]
    """Lets one worker watch: no other one notices its end."""

    def is_free(self, place: int, clock: int, patience: int) -> bool:
        return place == 0 and bool(super().is_free(place, clock, patience))


class KeptPlace(INTERPRETED):  # type: ignore[misc]
    """Leaves an ended worker its place."""

    def release(self, owner: int) -> int:
        self.is_releasing = True
        try:
            return int(super().release(owner))
        finally:
            self.is_releasing = False

    def free_place(self, owner: int) -> None:
        if not self.is_releasing:
            super().free_place(owner)


@pytest.mark.parametrize("mutant", [NoCall, NoCallAgain, OnePlace, KeptPlace], ids=lambda mutant: mutant.__name__)
def test_the_model_finds_a_mutant(mutant: Any) -> None:
    with pytest.raises(AssertionError):
        for seed in range(1000):
            play(seed, mutant)


@pytest.mark.parametrize("omitted", OMITTED)
def test_the_model_finds_an_omitted_step_of_the_program(omitted: str) -> None:
    with pytest.raises(AssertionError):
        for seed in range(1000):
            play(seed, omitted=omitted)
