"""The task lists of a shard set: one window for each shard, and workers that take tasks of all of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvspool.engine.wakeups import Watcher
from kvspool.system.handles import close_all
from kvspool.tasks.layout import LEAST_WINDOW, Wanted, check_window
from kvspool.tasks.single import log_task_file, open_source
from kvspool.tasks.source import TaskSource
from kvspool.tasks.stats import TaskStats, look, task_files
from kvspool.tasks.worker import TaskWorker
from shard import descriptors
from shard.merged import Log


def part_of(wanted: Wanted, shards: int) -> Wanted:
    """Return the settings for one of many shards, which share the window."""
    return wanted._replace(window=check_window(max(LEAST_WINDOW, wanted.window // max(1, shards))))


class ShardSources:
    """Opens the sources of a worker of a shard set; see `kvspool.tasks.worker.Sources`."""

    def __init__(self, root: Path, shards: list[Log], start: Any, wanted: Wanted, placed: Callable[[int], Callable[..., Any]]) -> None:
        """placed: returns the function that creates the records of a shard."""
        self._root = root
        self._shards = shards
        self._start = start
        self._wanted = part_of(wanted, len(shards))
        self._placed = placed

    def open(self, worker: TaskWorker) -> list[TaskSource]:
        """Return a source for each shard."""
        found: list[TaskSource] = []
        try:
            with descriptors.for_logs(self._root, len(self._shards)):
                for index, log in enumerate(self._shards):
                    start = self._start.get(index, "earliest") if isinstance(self._start, Mapping) else self._start
                    found.append(open_source(log, index, worker, start, self._wanted, self._placed(index)))
        except BaseException:
            close_all(found)
            raise
        return found

    def renewed(self, worker: TaskWorker, sources: list[TaskSource]) -> list[TaskSource]:
        """Return the same ones."""
        return sources

    def watch(self, watcher: Watcher) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def listing(shards: list[Log], names: Callable[[int], str]) -> list[TaskStats]:
    """Return the state of each task list in each shard."""
    found = [look(path, names(index)) for index, log in enumerate(shards) for path in task_files(log_task_file(log.path, "").parent)]
    return sorted((one for one in found if one is not None), key=lambda one: (one.name, one.shard))
