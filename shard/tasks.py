"""The task lists of a shard set: one window for each shard, and workers that take tasks of all of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvspool.tasks.layout import LEAST_WINDOW, Wanted, check_window
from kvspool.tasks.single import LogSources, log_task_file
from kvspool.tasks.source import TaskSource
from kvspool.tasks.stats import TaskStats, look, task_files
from kvspool.tasks.worker import TaskWorker
from shard import descriptors
from shard.merged import Log


def part_of(wanted: Wanted, shards: int) -> Wanted:
    """Return the settings for one of many shards, which share the window."""
    return wanted._replace(window=check_window(max(LEAST_WINDOW, wanted.window // max(1, shards))))


class ShardSources(LogSources):
    """Opens the sources of a worker of a shard set."""

    def __init__(self, root: Path, shards: list[Log], start: Any, wanted: Wanted, placed: Callable[[int], Callable[..., Any]]) -> None:
        starts = [start.get(index, "earliest") if isinstance(start, Mapping) else start for index in range(len(shards))]
        super().__init__(shards, starts, part_of(wanted, len(shards)), placed)
        self._root = root

    def open(self, worker: TaskWorker) -> list[TaskSource]:
        with descriptors.for_logs(self._root, len(self._logs)):
            return super().open(worker)


def listing(shards: list[Log], names: Callable[[int], str]) -> list[TaskStats]:
    """Return the state of each task list in each shard."""
    found = [look(path, names(index)) for index, log in enumerate(shards) for path in task_files(log_task_file(log.path, "").parent)]
    return sorted((one for one in found if one is not None), key=lambda one: (one.name, one.shard))
