"""A task: a record that one worker handles and acknowledges."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol, Self, TypeVar

import msgspec

from kvspool.kernel.tasks_py import COUNT_AT, COUNTS
from kvspool.record import Record
from kvspool.system import logger

T = TypeVar("T")


class TaskHolder(Protocol):
    """The worker's access to the log of a task, and to its task list."""

    shard: Any
    log_id: bytes
    window: Any
    file: Any
    burying: threading.Lock
    max_deliveries: int | None

    def call(self, method: Callable[[], int]) -> int: ...

    def ack(self, task: Task) -> None: ...

    def ack_many(self, tasks: list[Task]) -> list[Task]: ...

    def retry(self, task: Task, delay: float, error: str) -> None: ...

    def reject(self, task: Task, reason: str) -> None: ...

    def extend(self, task: Task, lease: float | None) -> None: ...


class Task(msgspec.Struct, eq=False, gc=False):
    """A record that was given to this worker, and to no other living one.

    `with task:` acknowledges it at the end of the block. If the block raises an Exception, that is logged, the task is given back for a
    retry, and the program continues after the block. Others, such as KeyboardInterrupt, also give it back, and are raised.

    record: see `kvspool.Record`. sequence: of the record. mark: proof that the task is this worker's. is_over: whether it was acknowledged,
    given back or rejected here.
    """

    record: Record
    sequence: int
    mark: int
    source: TaskHolder
    is_over: bool = False

    @property
    def data(self) -> Any:
        """Return the appended value; see `kvspool.Record.data`."""
        return self.record.data

    def decode(self, type: builtins.type[T]) -> T:
        """Return the value as a `type`; see `kvspool.Record.decode`."""
        return self.record.decode(type)

    @property
    def value(self) -> bytes:
        """Return the stored bytes of the value."""
        return self.record.value

    @property
    def key(self) -> bytes | None:
        """Return the record's key."""
        return self.record.key

    @property
    def type(self) -> int:
        """Return the record's type."""
        return self.record.type

    @property
    def timestamp(self) -> int:
        """Return the record's time, ns since the Unix epoch."""
        return self.record.timestamp

    @property
    def time(self) -> datetime:
        """Return the record's time; see `kvspool.Record.time`."""
        return self.record.time

    @property
    def shard(self) -> Any:
        """Return the shard of the record: 0 for a log, the number in a shard set, client and number in a hub root."""
        return self.source.shard

    @property
    def deliveries(self) -> int:
        """Return how often the record was given to a worker, this time included."""
        return self.mark >> COUNT_AT & COUNTS

    def ack(self) -> None:
        """Acknowledge the task: the record is never given to a worker again. Nothing happens if the task is over.

        At the level "disk" it is on disk when this returns; all waiting calls share one flush. Raises LeaseLost if it was given to another
        worker meanwhile; Poisoned, LockTimeout, Closed, or the system's OSError.
        """
        self.source.ack(self)

    def retry(self, delay: float = 0.0, error: str = "") -> None:
        """Give the task back: a worker gets it again, after `delay` seconds at the earliest. Nothing happens if the task is over.

        After `max_deliveries` it becomes a dead letter with the text `error` instead. Raises the errors of `ack`.
        """
        self.source.retry(self, delay, error)

    def reject(self, reason: str) -> None:
        """Move the record to the dead-letter log, with the reason. Nothing happens if the task is over. Raises the errors of `ack`."""
        self.source.reject(self, reason)

    def extend(self, lease: float | None = None) -> None:
        """Let the lease begin again: for `lease` seconds (default: as before; without a lease nothing happens). Raises LeaseLost."""
        self.source.extend(self, lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: builtins.type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if kind is None:
            self.source.ack(self)
            return False
        self.source.retry(self, 0.0, describe(kind, error))
        if not issubclass(kind, Exception):
            return False
        import traceback

        logger.warn("record %d was given back for a retry:\n%s", self.sequence, "".join(traceback.format_exception(error)).rstrip())
        return True


def describe(kind: builtins.type[BaseException], error: BaseException | None) -> str:
    """Return the text of an exception for a dead letter."""
    text = "" if error is None else str(error)
    return f"{kind.__name__}: {text}" if text else kind.__name__
