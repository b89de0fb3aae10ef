"""A hub killed at every opcode of its work on a shard: all acknowledged records are there; the client ships the rest, once, in order.

Each operation runs once, traced, and every state that a kill could leave is restored and opened by another hub, to which the client's log
is shipped again as a shipper does it; see `crash_states`. A kill during a write leaves a beginning of it: that is a state, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_states import Copy, File, Run, State
from schedules import ALL
from shipping import LOG, OTHER, contents, numbered

import kvspool
from hub.errors import Fenced
from hub.root.store import Shard, Store

PREFIXES = 10_000 if ALL else 12  # of one write, at most
CHOICES = 400 if ALL else 3  # ways to tear a change of what was there already
Log = tuple[bytes, str, int, int]  # id, what its records say, from which sequence on it has them, and its end
ONE: Log = (LOG, "one", 0, 9)
GAP: Log = (LOG, "one", 6, 9)
TWO: Log = (OTHER, "two", 2, 5)


def ship(shard: Shard, log: Log, said: Callable[[int], None] = lambda sequence: None) -> None:
    """Do as a shipper does: ask, and send all from the last record on that the hub has, two at a time."""
    id, text, first, end = log
    expected, is_known = shard.enter(id, end)
    at = sent = max(expected - 1, 0) if is_known else 0
    at = max(at, first)
    while at < end:
        rows = numbered(at, min(at + 2, end), text)
        said(shard.put(id, rows, min(sent, at)).expected)
        at = sent = rows.end


class Case:
    """A shard that has something, and logs that are shipped to it when the hub is killed."""

    def __init__(self, root: Path, before: list[Log], logs: list[Log]) -> None:
        self.root, self.before, self.logs = root, before, logs
        self.said = (0, 0)  # which of the logs, and below which sequence it was acknowledged
        kvspool.create(root / "shard", format="kvj", segment_bytes=300).close()
        shard = Shard(root / "shard")
        for log in before:
            ship(shard, log)
        shard.close()

    def run(self) -> None:
        shard = Shard(self.root / "shard")
        for number, log in enumerate(self.logs):

            def note(sequence: int, number: int = number) -> None:
                self.said = (number, sequence)

            ship(shard, log, note)
            shard.sync()
        shard.close()

    def check(self, root: Path, said: tuple[int, int]) -> None:
        """Check that all acknowledged records are there before anything is sent again, and all records afterwards."""
        shard = Shard(root / "shard")
        number, sequence = said
        try:
            expected, _ = shard.enter(*[(log[0], log[3]) for log in self.logs][number])
            assert expected >= sequence
        except Fenced:
            assert number + 1 < len(self.logs)  # it was all there by then
        for log in self.logs:
            try:
                ship(shard, log)
            except Fenced:
                assert log is not self.logs[-1]
        held = [(row.value.decode(), at) for at, row in contents(shard.journal).items()]
        shard.close()
        wanted: list[tuple[str, int]] = []
        base = 0
        is_known = any(log[0] == self.logs[0][0] for log in self.before)
        for _, text, first, end in self.logs if is_known else self.before + self.logs:
            wanted += [(f"{text} {at}", base + at) for at in range(first, end)]
            base += end
        assert held == wanted


CASES: dict[str, tuple[list[Log], list[Log]]] = {
    "a log that goes on": ([(LOG, "one", 0, 4)], [ONE]),
    "what is there already": ([ONE], [ONE]),
    "a gap at the beginning": ([], [GAP]),
    "a new generation": ([ONE], [TWO]),
    "two generations": ([], [ONE, TWO]),
}


def states(case: Case) -> Iterator[State]:
    """Yield what a kill can leave: each state between two opcodes, torn ones, and the beginnings of each write."""
    run = Run(case.run, case.root, lambda: case.said)
    before: State | None = None
    for state in run.states:
        if before is not None:
            yield from _beginnings(before, state)
        before = state
    yield from run.crashes(CHOICES)


def _beginnings(before: State, after: State) -> Iterator[State]:
    for number, file in after.files.items():
        was = before.files.get(number)
        if was is None or len(file.content) <= len(was.content) or not file.content.startswith(was.content):
            continue
        lengths = range(len(was.content) + 1, len(file.content))
        for length in lengths[:: max(1, len(lengths) // PREFIXES)]:
            files = {**before.files, number: File(file.mode, file.content[:length])}
            yield State(before.directories, before.names, files, before.said)


@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_any_opcode_loses_and_doubles_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    case = Case(tmp_path / "run", *CASES[name])
    count = 0
    with Copy(tmp_path / "copy") as copy:
        for state in states(case):
            case.check(copy.become(state), state.said)
            count += 1
    assert count >= 4


def test_a_kill_at_any_opcode_of_making_a_client_s_shards_leaves_what_the_next_hub_finishes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    def make() -> None:
        with Store(tmp_path / "run") as store:
            store.enter("client", 1)

    make_run = Run(make, tmp_path / "run")
    with Copy(tmp_path / "copy") as copy:
        for state in make_run.states:
            with Store(copy.become(state)) as store:
                store.enter("client", 1)
                for index in range(2):
                    shard = store.take("client", 1, index)
                    ship(shard, ONE)
                    assert len(contents(shard.journal)) == ONE[3]
                    store.give_back("client", index)
    assert len(make_run.states) > 20
