"""The task lists of a log."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import LockTimeout, NoSuchReader, ReaderBusy
from kvspool.groups.share import beside
from kvspool.options import Isolation, Start
from kvspool.record import Record
from kvspool.system import disk
from kvspool.system.handles import close_all
from kvspool.tasks import stats
from kvspool.tasks.files import TaskFile, file_name, remove_other, workers_in
from kvspool.tasks.layout import TaskHeader, Wanted
from kvspool.tasks.source import Keep, TaskLog, TaskSource, keep_in_reader
from kvspool.tasks.stats import TaskStats
from kvspool.tasks.verb import HasTasks
from kvspool.tasks.worker import Sources, TaskWorker

CREATION = 0.5  # seconds that another worker may take to create the list, with the durable reader open


def log_task_file(path: Path, name: str) -> Path:
    """Return the path of the file of a task list of a log, in the hidden directory next to the log."""
    return beside(path) / file_name(name)


class LogTasks(HasTasks):
    """The task lists of a log."""

    path: Path

    @abstractmethod
    def check_open(self) -> None:
        """Raise Closed if the handle was closed."""

    @abstractmethod
    def _check_capability(self, capability: str) -> None:
        """Raise Closed, or Unsupported for a missing capability."""

    @abstractmethod
    def open_reader(self, name: str, start: Start = "earliest", *, isolation: Isolation = "appended") -> Any:
        """Open a durable reader, also that of a task list; see `reader`."""

    @abstractmethod
    def remove_reader(self, name: str | int) -> None:
        """Delete a durable reader, also one whose name is that of a task list; see `kvspool.Log.delete_reader`."""

    def refuse_task_name(self, name: object) -> None:
        """Raise ReaderBusy if there is a task list of that name."""
        if isinstance(name, str) and system.port.look_up(log_task_file(self.path, name)) is not None:
            raise ReaderBusy(f"{name!r} is a task list of {self.path}: use tasks({name!r}), or delete it with delete_tasks")

    def task_stats(self) -> list[TaskStats]:
        self.check_open()
        found = [stats.look(path) for path in stats.task_files(beside(self.path))]
        return sorted((one for one in found if one is not None), key=lambda one: one.name)

    def delete_tasks(self, name: str) -> None:
        self.check_open()
        delete(self, name)

    def _task_path(self) -> Path:
        return self.path

    def _task_sources(self, name: str, start: Any, wanted: Wanted) -> LogSources:
        self._check_capability("tasks")
        return LogSources([self], [start], wanted)  # type: ignore[list-item]


class LogSources(Sources):
    """Opens the sources of a worker of some logs, whose shards are their numbers."""

    def __init__(
        self, logs: Sequence[TaskLog], starts: Sequence[Any], wanted: Wanted, placed: Callable[[int], Callable[..., Any]] = lambda _: Record
    ) -> None:
        """placed: returns the function that creates the records of a shard."""
        self._logs = logs
        self._starts = starts
        self._wanted = wanted
        self._placed = placed

    def open(self, worker: TaskWorker) -> list[TaskSource]:
        found: list[TaskSource] = []
        try:
            for shard, (log, start) in enumerate(zip(self._logs, self._starts, strict=True)):
                found.append(open_source(log, shard, worker, start, self._wanted, self._placed(shard)))
        except BaseException:
            close_all(found)
            raise
        return found


def open_source(
    log: TaskLog, shard: Hashable, worker: TaskWorker, start: Any, wanted: Wanted, make: Callable[..., Any] = Record
) -> TaskSource:
    """Enter the task list of one log, which is created if there is none.

    The durable reader is open meanwhile: so no process deletes or renames the log, and the position is known.
    """
    path = log_task_file(log.path, worker.name)
    with _reader_of(log, worker.name, start) as reader:
        disk.make_directory(path.parent)
        source = enter(log, shard, worker, path, reader.sequence, wanted, partial(keep_in_reader, log, worker.name), make)
        if reader.sequence != reader.committed:
            reader.commit()
    return source


def enter(
    log: TaskLog,
    shard: Hashable,
    worker: TaskWorker,
    path: Path,
    position: int,
    wanted: Wanted,
    keep: Keep,
    make: Callable[..., Any] = Record,
) -> TaskSource:
    """Enter the task list in a file, which is created if there is none. position: of the durable reader."""
    header = TaskHeader(worker.name, wanted.window, wanted.is_ordered, log.log_id.ljust(16, b"\0"))
    remove_other(path, header)
    file = TaskFile(path, header, position, log.timeout)
    try:
        if file.header.is_ordered != wanted.is_ordered:
            order = "with" if file.header.is_ordered else "without"
            raise ValueError(f"the task list {worker.name!r} of {log.path} was created {order} an order by key; use the same one")
        source = TaskSource(log, shard, file, worker, keep, make)
        source.moved_to(position)
    except BaseException:
        file.close()
        raise
    return source


def _reader_of(log: TaskLog, name: str, start: Any) -> Any:
    """Open the durable reader of a list. Workers have it open for moments only; another process has it for longer."""
    busy: list[ReaderBusy] = []
    path = log_task_file(log.path, name)
    until = system.port.monotonic() + CREATION

    def attempt() -> Any:
        try:
            return log.open_reader(name, start)
        except ReaderBusy as error:
            busy.append(error)
            if system.port.monotonic() > until and system.port.look_up(path) is None:
                raise
            return None

    try:
        return locks.wait_for(attempt, log.timeout, lambda: "the durable reader of the list is open")
    except LockTimeout:
        raise busy[-1] from None


def delete(log: Any, name: str) -> None:
    """Delete the task list of a log, and its durable reader. Raises NoSuchReader, ReaderBusy."""
    path = log_task_file(log.path, name)
    if system.port.look_up(path) is None:
        raise NoSuchReader(f"{log.path} has no task list {name!r}")
    with _reader_of(log, name, "earliest"):  # no worker enters meanwhile
        if workers_in(path):
            raise ReaderBusy(f"the task list {name!r} of {log.path} has workers; close them first")
        system.port.remove(path)
        disk.flush_directory(path.parent, done=f"the task list {name!r} was deleted")
    log.remove_reader(name)
