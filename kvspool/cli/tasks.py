"""`kvspool tasks`: show the task lists of a log, a shard set or a hub root, and their dead letters, or put these back."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvspool.cli import options, output, plugins
from kvspool.cli.options import BadInput
from kvspool.cli.stats import when
from kvspool.errors import NoSuchReader
from kvspool.tasks.stats import TaskStats, TaskWorkerStats, workers_of
from kvspool.tasks.verb import HasTasks

if TYPE_CHECKING:
    from rich.table import Table

    from kvspool.tasks.dead import DeadLetter

NAME = "tasks"
SUMMARY = "show the task lists of a log, a shard set or a hub root, and their dead letters"
DESCRIPTION = """\
Show task lists: how many tasks are with a worker, given back, delayed, or waiting for an earlier one with the same key; the workers; and
why they wait, if the window is full. With --dead the records that were rejected or given out too often; with --requeue these are appended
to the log again. With --json one object for each list, or for each dead letter, with the field names of the library."""
EXAMPLES = """\
  kvspool tasks events
  kvspool tasks events thumbnails --json | jq .taken
  kvspool tasks events thumbnails --dead
  kvspool tasks events thumbnails --requeue"""


class ListReport(msgspec.Struct, frozen=True):
    """A task list, with the sums of all shards; see `kvspool.tasks.stats.TaskStats`. dead: dead letters that were not put back.

    used: tasks of the window from the lowest one that is not acknowledged to the highest one that was given out.
    """

    name: str
    order: str | None
    window: int
    used: int
    shards: int
    taken: int
    delayed: int
    ready: int
    held: int
    dying: int
    repeated: int
    dead: int
    workers: list[TaskWorkerStats]
    waits_for: list[str]
    problems: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log, shard set or hub root")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the task list (default: all)")
    options.add_json(parser, "one JSON object for each list, or for each dead letter")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--dead", action="store_true", help="list the dead letters that were not put back")
    forms.add_argument("--requeue", action="store_true", help="append the records of the dead letters to the log again")
    parser.add_argument("--dead-letters", type=Path, metavar="LOG", help="the dead-letter log (default: next to the log)")


def run(arguments: argparse.Namespace) -> int:
    """Print the lists or dead letters, or put these back."""
    with plugins.opened(arguments.path) as log:
        if not isinstance(log, HasTasks):
            raise BadInput(f"{arguments.path} is a queue; queues have no tasks")
        if arguments.dead or arguments.requeue:
            return _dead(log, arguments)
        lists = _reports(log, [one for one in log.task_stats() if arguments.name in (None, one.name)])
    if arguments.name is not None and not lists:
        raise _no_list(arguments)
    for one in lists:
        if arguments.json:
            output.print_json(one)
        else:
            _print(one)
    if not lists and not arguments.json:
        print(f"{output.escape(str(arguments.path))} has no task list")
    return 0


def _no_list(arguments: argparse.Namespace) -> NoSuchReader:
    return NoSuchReader(f"{arguments.path} has no task list {arguments.name!r}")


def _dead(log: HasTasks, arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        raise BadInput("--dead and --requeue need the NAME of a task list")
    found = log.dead_letters(arguments.name, arguments.dead_letters)
    if not found and all(one.name != arguments.name for one in log.task_stats()):
        raise _no_list(arguments)
    if arguments.requeue:
        count = log.requeue(arguments.name, arguments.dead_letters)
        print(output.escape(f"put {output.counted(count, 'record')} of {arguments.name!r} back"))
        return 0
    if arguments.json:
        for one in found:
            output.print_json(one)
    else:
        output.print_table(_table(found))
    return 0


def _reports(log: HasTasks, states: Iterable[TaskStats]) -> list[ListReport]:
    """Return the sums of each list."""
    by_name: dict[str, list[TaskStats]] = {}
    for one in states:
        by_name.setdefault(one.name, []).append(one)
    return [_report(log, name, shards) for name, shards in sorted(by_name.items())]


def _report(log: HasTasks, name: str, shards: list[TaskStats]) -> ListReport:
    return ListReport(
        name=name,
        order=shards[0].order,
        window=sum(one.window for one in shards),
        used=sum(one.used for one in shards),
        shards=len(shards),
        taken=sum(one.taken for one in shards),
        delayed=sum(one.delayed for one in shards),
        ready=sum(one.ready for one in shards),
        held=sum(one.held for one in shards),
        dying=sum(one.dying for one in shards),
        repeated=sum(one.repeated for one in shards),
        dead=len(log.dead_letters(name)),
        workers=workers_of(shards),
        waits_for=[_placed(one, one.waits_for) for one in shards if one.waits_for],
        problems=[_placed(one, one.problem) for one in shards if one.problem],
    )


def _placed(one: TaskStats, words: str) -> str:
    return f"shard {one.shard}: {words}" if one.shard else words


def _print(one: ListReport) -> None:
    counts = f"{one.taken:,} with {output.counted(len(one.workers), 'worker')}, {one.ready:,} given back, {one.delayed:,} delayed"
    order = f", {one.held:,} after others with the same key" if one.order else ""
    window = f"{one.used:,} of the window of {one.window:,} used, {output.counted(one.shards, 'shard')}"
    print(output.escape(f"{one.name}: {counts}{order}, {one.repeated:,} repeated, {output.counted(one.dead, 'dead letter')}; {window}"))
    for words in (*one.waits_for, *one.problems):
        print(output.escape(words))
    if one.workers:
        output.print_table(_workers(one.workers))


def _workers(workers: list[TaskWorkerStats]) -> Table:
    return output.rows(("process", "joined", "tasks"), [(one.process, when(one.joined), f"{one.tasks:,}") for one in workers])


def _table(found: list[DeadLetter]) -> Table:
    """Return a row for each dead letter."""
    titles = ("shard", "sequence", "deliveries", "moved", "error", "value")
    rows = [(one.shard, str(one.sequence), str(one.deliveries), when(one.time), one.error, _short(one.value)) for one in found]
    return output.rows(titles, rows)


def _short(value: bytes) -> str:
    return value[: output.LONGEST].decode("utf-8", "backslashreplace")


