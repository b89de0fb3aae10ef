"""The state of task lists, as seen from outside: from their files, without a lock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import Corruption, UnknownVersion
from kvspool.kernel import tasks_py as words
from kvspool.kernel.tasks import TaskWindow
from kvspool.system import disk, holders
from kvspool.system.descriptor import Descriptor
from kvspool.tasks import layout
from kvspool.tasks.files import SUFFIX, read_header


class TaskWorkerStats(msgspec.Struct, frozen=True):
    """A worker. pid and process: the number, and a description. joined: ns since the Unix epoch. tasks: how many it has."""

    pid: int
    process: str
    joined: int
    tasks: int


class TaskStats(msgspec.Struct, frozen=True):
    """The state of a task list.

    shard: as text, of a shard set or a hub root. order: "key" or None. window: its size. low: the lowest sequence that is not acknowledged.
    next: the first sequence that was given to no worker; with an order, that was not admitted. taken, delayed, ready, held, dying: tasks
    with a worker; given back with a delay that has not passed; given back, for any worker; after another one with the same key; on the
    way to the dead letters. repeated: deliveries of tasks that had been given before; dead: records that became dead letters; both since
    the list was created, and approximate after crashes. waits_for: why workers wait although there are records; empty if they don't.
    problem: why the list can't be read.
    """

    name: str
    shard: str
    order: str | None
    window: int
    low: int
    next: int
    taken: int
    delayed: int
    ready: int
    held: int
    dying: int
    repeated: int
    dead: int
    workers: list[TaskWorkerStats]
    waits_for: str
    problem: str = ""

    @property
    def used(self) -> int:
        """Return the tasks of the window from the lowest one that is not acknowledged to the highest one that was given out."""
        return self.next - self.low


def workers_of(shards: list[TaskStats]) -> list[TaskWorkerStats]:
    """Return the workers of a list, given the state in each shard. Those of one process in several shards count as one."""
    if len(shards) == 1:
        return shards[0].workers
    found: dict[tuple[int, str], TaskWorkerStats] = {}
    for one in (worker for shard in shards for worker in shard.workers):
        key = one.pid, one.process.partition(" (")[0]  # without its state, which may have changed from one shard to the next
        before = found.get(key, msgspec.structs.replace(one, tasks=0))
        joined, tasks = min(before.joined, one.joined), before.tasks + one.tasks
        found[key] = msgspec.structs.replace(one, joined=joined, tasks=tasks)
    return list(found.values())


def task_files(directory: Path) -> list[Path]:
    """Return the paths of the files of task lists in a directory, which may not exist."""
    return [directory / name for name in sorted(disk.names(directory)) if name.endswith(SUFFIX)]


def look(path: Path, shard: str = "") -> TaskStats | None:
    """Return the state of a list by its file; None if there is none. A damaged one is shown with the name of its file."""
    try:
        with Descriptor(path, os.O_RDONLY) as fd:
            header = read_header(path, fd)
            data = bytearray(system.port.read(fd, header.size, 0))
            if len(data) != header.size:
                return None  # it is being removed
            memory = memoryview(data)
            window = TaskWindow(
                memory[layout.MEMORY_AT :], locks.append_lock(memory[layout.MEMORY_AT :], 0, -1), header.window, header.is_ordered, 0
            )
            workers = _workers(memory, window, fd)
    except FileNotFoundError:
        return None
    except (Corruption, UnknownVersion) as error:
        return TaskStats(path.name.removesuffix(SUFFIX), shard, None, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, [], "", str(error))
    counts = window.counts()
    low, after = window.word(words.LOW), window.word(words.NEXT)
    reason = _reason(window, header.window, low, after, {number: one.process for number, one in workers.items()})
    return TaskStats(
        header.name,
        shard,
        "key" if header.is_ordered else None,
        header.window,
        low,
        after,
        counts[words.TAKEN],
        counts[words.DELAYED],
        counts[words.READY],
        counts[words.HELD],
        counts[words.DYING],
        window.word(words.REPEATED),
        window.word(words.DEAD),
        list(workers.values()),
        reason,
    )


def _workers(memory: memoryview, window: TaskWindow, fd: int) -> dict[int, TaskWorkerStats]:
    """Return the living workers, by number."""
    tasks: dict[int, int] = {}
    for sequence in range(window.word(words.LOW), window.word(words.NEXT)):
        if window.state_of(sequence) in (words.TAKEN, words.DYING):
            owner = window.mark_of(sequence) >> words.OWNER_AT & words.OWNERS
            tasks[owner] = tasks.get(owner, 0) + 1
    found = {}
    for number in range(1, min(window.word(words.WORKERS), layout.MOST_WORKERS) + 1):
        one: Any = layout.WORKER.unpack(memory, layout.WORKERS_AT + (number - 1) * layout.WORKER.size)
        if one.pid and system.port.is_locked(fd, layout.LIFE + number):
            found[number] = TaskWorkerStats(one.pid, holders.describe(one[:4]), one.joined, tasks.get(number, 0))
    return found


def _reason(window: TaskWindow, size: int, low: int, after: int, processes: dict[int, str]) -> str:
    """Return why workers wait although there are records."""
    if after - low < size:
        return ""
    state = window.state_of(low)
    owner = processes.get(window.mark_of(low) >> words.OWNER_AT & words.OWNERS, "a worker that has ended")
    where = {
        words.TAKEN: f"with {owner}",
        words.DELAYED: "waiting for its next attempt",
        words.READY: "waiting for a worker",
        words.HELD: "waiting for an earlier record with the same key",
        words.DYING: "on the way to the dead letters",
    }.get(state, "being acknowledged")
    return f"the window of {size} tasks is full until record {low} is acknowledged, which is {where}"
