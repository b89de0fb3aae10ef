"""Dead letters: records that were rejected, or given out too often, each moved to a log of their own exactly once.

**One move at a time**, under a locked byte of the task list's file. Before the append, the end of the dead-letter log and the record's
sequence are stored in that file, on disk. The append is on disk before the task is done. So a worker that gets the lock after another one
was killed looks from that end on whether the record is there: then it only lets the task be done, otherwise nothing happened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from kvspool import system
from kvspool.importing import import_whole
from kvspool.kernel import tasks_py as words
from kvspool.record import Codec, Record, decode, plain
from kvspool.system import holders
from kvspool.system.handles import Handle
from kvspool.tasks import layout
from kvspool.tasks.task import Task, TaskHolder

PUT_BACK = "requeue"  # the durable reader of a dead-letter log: records before it were put back


class DeadLetter(msgspec.Struct, frozen=True):
    """A record of a dead-letter log, as its value. Its key and type are those of the original record.

    tasks: the name of the task list. log, log_id, shard, sequence: the origin of the record; shard is that of a shard set or a hub root, as
    text. deliveries: how often it was given out. error: the text of the last error, or the reason of the rejection. worker: the process
    that moved it. time: when it was moved, timestamp: of the record, both ns since the Unix epoch. value, codec: as they were stored.
    """

    tasks: str
    log: str
    log_id: bytes
    shard: str
    sequence: int
    deliveries: int
    error: str
    worker: str
    time: int
    timestamp: int
    value: bytes
    codec: int = Codec.RAW


class DeadLetters(Handle):
    """The dead-letter log of a task list, which is created when the first record is moved there. Threads exclude each other."""

    def __init__(self, target: Any, name: str, origin: Path) -> None:
        """target: a path, or an open log, which stays open. name: of the task list; origin: the path of its log."""
        self.path = Path(target.path if hasattr(target, "append") else target)
        self._name = name
        self._origin = origin
        self._given = target if hasattr(target, "append") else None
        self._log: Any = None

    def _opened(self) -> Any:
        if self._given is not None:
            return self._given
        if self._log is None or self._log.closed:
            self._log = import_whole("kvspool.opening.logs").create(self.path, format="kvj", codec="msgpack", exist_ok=True)
        return self._log

    def bury(self, source: TaskHolder, task: Task, reason: str) -> None:
        """Move the record of a DYING task to the dead-letter log, and let the task be done; on disk when this returns.

        Raises LockTimeout, and the errors of an append: the task is DYING then, and moved once its worker ends.
        """
        window, file = source.window, source.file
        with source.burying, file.locked(layout.BURY_LOCK, "moves a record to the dead letters of"):
            log = self._opened()
            self._finish_last(source, log)
            if window.state_of(task.sequence) != words.DYING:
                return  # it was moved by a worker that was killed afterwards
            window.set_word(words.BURIED_FROM, log.end())
            window.set_word(words.BURYING, task.sequence + 1)
            file.flush()
            record = task.record
            log.append(self._letter(source, task, reason), durable=True, **_marked(log, record))
            source.call(lambda: window.bury(task.sequence))
            window.set_word(words.BURYING, 0)

    def _finish_last(self, source: TaskHolder, log: Any) -> None:
        """Under the lock: finish the move of a worker that was killed, if its record is in the log."""
        window = source.window
        burying = window.word(words.BURYING)
        if not burying:
            return
        sequence = burying - 1
        if self._has(log, window.word(words.BURIED_FROM), source, sequence):
            source.call(lambda: window.bury(sequence))
        window.set_word(words.BURYING, 0)

    def _has(self, log: Any, start: int, source: TaskHolder, sequence: int) -> bool:
        first, end = log.extent()
        if start > end:
            return False
        for record in log.read(max(first, start), on_gap="skip"):
            letter = record.decode(DeadLetter)
            if (letter.tasks, letter.log_id, letter.shard, letter.sequence) == (self._name, source.log_id, _shown(source.shard), sequence):
                return True
        return False

    def _letter(self, source: TaskHolder, task: Task, reason: str) -> DeadLetter:
        deliveries = task.deliveries
        if source.max_deliveries is not None:
            deliveries = min(deliveries, source.max_deliveries)
        return letter_of(task.record, self._name, self._origin, source.log_id, _shown(source.shard), deliveries, reason)

    def close(self) -> None:
        """Close the log, unless it was given open."""
        log, self._log = self._log, None
        if log is not None:
            log.close()


def letter_of(record: Record, tasks: str, log: Path, log_id: bytes, shard: str, deliveries: int, error: str) -> DeadLetter:
    """Return the dead letter of a record, which this process gives up now. The arguments are fields of `DeadLetter`."""
    return DeadLetter(
        tasks=tasks,
        log=os.fspath(log),
        log_id=log_id,
        shard=shard,
        sequence=record.sequence,
        deliveries=deliveries,
        error=error,
        worker=holders.describe(holders.ours()),
        time=system.port.now(),
        timestamp=record.timestamp,
        value=plain(record),
        codec=Codec.MSGPACK if record.codec == Codec.KEYED else record.codec,
    )


def _marked(log: Any, record: Any) -> dict[str, Any]:
    """Return the key and type of a record, as far as a log can store them."""
    found: dict[str, Any] = {}
    if record.key is not None and "keys" in log.capabilities:
        found["key"] = record.key
    if record.type and "types" in log.capabilities:
        found["type"] = record.type
    return found


def _shown(shard: Any) -> str:
    return "/".join(map(str, shard)) if isinstance(shard, tuple) else str(shard)


def path_beside(path: Path, name: str) -> Path:
    """Return the default path of a dead-letter log: next to the log, with both names."""
    safe = "".join(one if one.isalnum() or one in "-_." else f"%{ord(one):x}" for one in name)
    return path.with_name(f"{path.name}.{safe}.dead")


def listed(path: Path) -> list[DeadLetter]:
    """Return the dead letters in the log at a path that were not put back; none without a log."""
    if system.port.look_up(path) is None:
        return []
    with closing(import_whole("kvspool.opening.logs").open(path)) as dead:
        start = max((one.sequence or 0 for one in dead.readers() if one.name == PUT_BACK), default=0)
        return [record.decode(DeadLetter) for record in dead.read(max(start, dead.extent()[0]), on_gap="skip")]


def put_back(log: Any, path: Path, name: str) -> int:
    """Append the records of the dead letters at a path to a log, or to a shard set, and return how many.

    A durable reader of the dead-letter log notes which were put back. With producers each one is appended once, whatever is killed.
    """
    if system.port.look_up(path) is None:
        return 0
    count = 0
    with closing(import_whole("kvspool.opening.logs").open(path)) as dead, dead.reader(PUT_BACK) as reader:
        append = _appending(log, f"requeue {name} {dead.log_id.hex()}")
        for record in reader.read(on_gap="skip"):
            letter = record.decode(DeadLetter)
            if letter.tasks == name:
                append(record.sequence, decode(letter.value, letter.codec, letter.sequence), _marked(log, record))
                count += 1
            reader.commit()
    return count


def _appending(log: Any, producer: str) -> Callable[[int, Any, dict[str, Any]], object]:
    """Return a function that appends a value with a number, a key and a type."""
    if "producers" not in log.capabilities:
        return lambda number, value, marks: log.append(value, durable=True, **marks)
    appender = log.producer(producer)

    def append(number: int, value: Any, marks: dict[str, Any]) -> None:
        keys = [marks["key"]] if "key" in marks else None
        kinds = {"type": marks["type"]} if "type" in marks else {}
        appender.append_many([value], batch=number, keys=keys, durable=True, **kinds)

    return append
