"""The verb `tasks` of logs, shard sets and hub roots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

from kvspool.engine.iteration import Iterations
from kvspool.tasks import layout
from kvspool.tasks.dead import DeadLetter, DeadLetters, listed, path_beside, put_back
from kvspool.tasks.source import lease_ns
from kvspool.tasks.stats import TaskStats
from kvspool.tasks.worker import Sources, TaskWorker


class HasTasks(ABC):
    """A log, a shard set or a hub root, whose records workers can share as tasks."""

    _iterations: Iterations

    def tasks(
        self,
        name: str,
        start: Any = "earliest",
        *,
        max_deliveries: int | None = 5,
        lease: float | None = None,
        order: Literal["key"] | None = None,
        window: int = 65_536,
        dead_letters: Any = None,
    ) -> TaskWorker:
        """Become a worker of the task list `name`, whose workers share the records: each record is given to one living worker at a time.

        name: as of a durable reader; the list has that reader's position. start: where a new list begins, as in `reader`; a durable reader
        of that name becomes a list that begins at its position. max_deliveries: after so many deliveries without an acknowledgement, a
        record becomes a dead letter; None: never. lease: seconds after which a task is given to another worker although this one lives;
        None: never. order: "key": of records with the same key one at a time, and in order. window: most records from the lowest one that
        is not acknowledged to the highest one that was given out, rounded up to a power of two; many shards share it, with at least 64 for
        each. order and window are those with which the list was created. dead_letters: path of the dead-letter log, or an open log; by
        default the path of this log with the list's name and ".dead" added.

        Raises ReaderBusy while a durable reader or a group of that name is open, TooManyWorkers, ValueError, LockTimeout, Corruption,
        UnknownVersion, Unsupported, and the errors of `reader`. Raises PermissionError if this process may not write to the log.
        """
        if order not in (None, "key"):
            raise ValueError(f'order is "key" or None, not {order!r}')
        if max_deliveries is not None and not 1 <= max_deliveries <= 10_000:
            raise ValueError(f"max_deliveries is 1 to 10000, or None for no limit, not {max_deliveries}")
        sources = self._task_sources(name, start, layout.Wanted(layout.check_window(window), order == "key"))
        letters = DeadLetters(path_beside(self._task_path(), name) if dead_letters is None else dead_letters, name, self._task_path())
        return self._iterations.add(TaskWorker(name, sources, lease_ns(lease), max_deliveries, letters))

    @abstractmethod
    def task_stats(self) -> list[TaskStats]:
        """Return the state of each task list, by name: its workers, its window, and the reason why workers wait. Raises Closed."""

    @abstractmethod
    def delete_tasks(self, name: str) -> None:
        """Delete a task list and the position of its durable reader; the records and dead letters stay.

        Raises NoSuchReader; ReaderBusy while it has workers.
        """

    def dead_letters(self, name: str, dead_letters: Any = None) -> list[DeadLetter]:
        """Return the dead letters of a task list that were not put back. dead_letters: path of their log, as in `tasks`."""
        return listed(path_beside(self._task_path(), name) if dead_letters is None else Path(dead_letters))

    def requeue(self, name: str, dead_letters: Any = None) -> int:
        """Append the records of the dead letters of a task list to the log again, and return how many. Each is put back once.

        dead_letters: path of their log, as in `tasks`. In a hub root they are appended to a log of the task list, which its workers share
        as the shard (".requeued", 0), because only clients append to other shards. In logs without producers a crash may put one record
        back twice. Raises ReaderBusy while another process does the same, NoSuchReader for a hub root without such a list, and the errors
        of `append`.
        """
        return put_back(self, path_beside(self._task_path(), name) if dead_letters is None else Path(dead_letters), name)

    @abstractmethod
    def _task_sources(self, name: str, start: Any, wanted: layout.Wanted) -> Sources:
        """Return the opener of the sources of a list."""

    @abstractmethod
    def _task_path(self) -> Path:
        """Return the path next to which dead letters are stored."""
