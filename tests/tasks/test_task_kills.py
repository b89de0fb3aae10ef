"""A worker that is killed at any system call or opcode: what it had ended stays ended, and nothing is forgotten or out of order."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaigns import campaign
from children import Died, in_child
from endings import Ending
from faults import FailingPort
from schedules import some
from task_logs import create

import kvspool
from kvspool import system

Fuse = campaign("tasks").Fuse
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
RECORDS, KEYS, DELIVERIES = 14, 4, 3
KINDS = [("spool", None), ("kvj", None), ("spool", "key")]


def live(path: Path, order: Any, say: Callable[[str, int], None]) -> None:
    """The life of a worker: it says what it is about to do with a task, in a capital letter, and what it has done."""
    with kvspool.open(path) as log, log.tasks("t", max_deliveries=DELIVERIES, order=order, lease=600, window=64) as worker:
        turn = 0
        while tasks := worker.take(3):
            for task in tasks:
                say("t", task.sequence)
            for task in tasks:
                name = "AERXM"[turn % 5]
                turn += 1
                say(name, task.sequence)
                if name == "A":
                    task.ack()
                elif name == "E":
                    task.extend()
                    task.ack()
                elif name == "R":
                    task.retry()
                elif name == "X":
                    task.reject("bad")
                else:
                    worker.ack_many([task])
                say(name.lower(), task.sequence)


def check(log: Any, order: Any, said: list[tuple[str, int]]) -> None:
    """Let another worker handle the rest. Raises AssertionError if a promise is broken."""
    ended = {sequence for name, sequence in said if name in "aemx"}
    begun = {sequence for name, sequence in said if name in "AEMX"}
    rejected = {sequence for name, sequence in said if name == "x"}
    given: list[int] = []
    with log.tasks("t", max_deliveries=None, order=order, window=64) as worker:
        while tasks := worker.take(3):
            given += [task.sequence for task in tasks]
            worker.ack_many(tasks)
    assert not ended & set(given), "given out after its end"
    assert len(given) == len(set(given))
    dead = [one.sequence for one in log.dead_letters("t")]
    assert len(dead) == len(set(dead))
    assert rejected <= set(dead)
    often = {sequence for sequence, count in Counter(sequence for name, sequence in said if name == "t").items() if count >= DELIVERIES}
    assert set(given) | begun | often == set(range(RECORDS)), "forgotten"
    assert set(dead) <= begun | often
    if order is not None:
        for key in range(KEYS):
            of_key = [sequence for sequence in given if sequence % KEYS == key]
            assert of_key == sorted(of_key)
            assert all(first > last for first in of_key for last in ended if last % KEYS == key), "a later one of its key was ended before"
    (state,) = log.task_stats()
    assert state.low == state.next == RECORDS


def filled(path: Path, kind: str) -> Any:
    log = create(path, kind)
    log.append_many([b"%d" % at for at in range(RECORDS)], keys=[b"%d" % (at % KEYS) for at in range(RECORDS)])
    return log


def killed_at(log: Any, order: Any, arm: Callable[[], Any]) -> bool:
    """Run the life of a worker in a child, which `arm` lets be killed; return whether it was."""
    reads, writes = os.pipe()

    def work() -> None:
        with arm():
            live(log.path, order, lambda name, sequence: os.write(writes, b"%c%c" % (ord(name), sequence)) and None)

    try:
        in_child(work)
        is_killed = False
    except Died as death:
        assert death.signal == signal.SIGKILL
        is_killed = True
    os.close(writes)
    with open(reads, "rb") as pipe:
        found = pipe.read()
    check(log, order, [(chr(found[at]), found[at + 1]) for at in range(0, len(found), 2)])
    return is_killed


@pytest.mark.parametrize(("kind", "order"), KINDS)
def test_a_worker_that_is_killed_at_any_system_call_forgets_and_repeats_nothing(tmp_path: Path, kind: str, order: Any) -> None:
    kills = 0
    for nth in some(range(1, 5000), 83):
        with filled(tmp_path / f"log{nth}", kind) as log:
            if not killed_at(log, order, lambda nth=nth: system.replaced(Ending(nth, signal.SIGKILL))):
                break
            kills += 1
    assert kills > 3


@pytest.mark.parametrize(("kind", "order"), KINDS[1:])
def test_a_worker_that_is_killed_at_any_opcode_forgets_and_repeats_nothing(tmp_path: Path, kind: str, order: Any) -> None:
    kills = 0
    for nth in some(range(1, 200_000), 5003):
        with filled(tmp_path / f"log{nth}", kind) as log:
            if not killed_at(log, order, lambda nth=nth: Fuse(nth)):
                break
            kills += 1
    assert kills > 3


@pytest.mark.parametrize(("kind", "order"), KINDS[1:])
def test_a_full_disk_at_any_system_call_forgets_and_repeats_nothing(tmp_path: Path, kind: str, order: Any) -> None:
    """From some call on the disk is full. The worker ends with a typed error or the system's, and another one handles the rest."""
    for nth in some(range(1, 2000), 23):
        said: list[tuple[str, int]] = []
        with filled(tmp_path / f"log{nth}", kind) as log:
            only = ("write", "allocate", "flush_data", "flush", "make_directory", "rename", "link")
            with system.replaced(FailingPort(nth, errno.ENOSPC, only, every=True)) as port:
                try:
                    live(log.path, order, lambda name, sequence, said=said: said.append((name, sequence)))
                except (OSError, kvspool.KvspoolError):
                    pass
            check(log, order, said)
        if not port.failed:
            return
    pytest.fail("it has too many calls")
