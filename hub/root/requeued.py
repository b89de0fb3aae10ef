"""Records that were put back on a task list of a hub root. They are in a log of their own, which its workers share as one more shard.

Each shard of a root has one writer, the hub, and the sequences of its client's log. So no other record can be appended to it. The log is
next to the positions of the durable reader with the list's name. It keeps records until they are acknowledged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvspool
from hub.root import positions
from hub.root.positions import Key
from hub.root.records import HubRecord
from kvspool import system
from kvspool.engine.retention import Retention
from kvspool.tasks.dead import put_back
from kvspool.tasks.layout import Wanted
from kvspool.tasks.single import log_task_file, open_source
from kvspool.tasks.source import TaskSource
from kvspool.tasks.stats import TaskStats, look
from kvspool.tasks.worker import TaskWorker
from shard.kernel.merge import placed

KEY: Key = (".requeued", 0)  # no client has such an id
SUFFIX = ".requeued"


def path_of(root: Path, name: str) -> Path:
    """Return the path of the log of a task list. Raises ValueError for an invalid name."""
    return positions.path_of(root, name).with_suffix(SUFFIX)


def requeue(root: Path, name: str, dead_letters: Path) -> int:
    """Append the records of the dead letters at a path to the log, which is created if there is none, and return how many."""
    if system.port.look_up(dead_letters) is None:
        return 0
    positions.make_directory(root)
    rules = Retention(by_consumers=True)
    with kvspool.create(path_of(root, name), format="kvj", codec="msgpack", retention=rules, exist_ok=True) as log:
        return put_back(log, dead_letters, name)


def found(root: Path, name: str) -> dict[Key, Path]:
    """Return the log as a shard of the root; nothing if no record was put back."""
    path = path_of(root, name)
    return {} if system.port.look_up(path) is None else {KEY: path}


def source(log: Any, worker: TaskWorker, wanted: Wanted) -> TaskSource:
    """Enter the task list of the open log."""
    return open_source(log, KEY, worker, "earliest", wanted, placed(HubRecord, KEY[1], KEY[0]))


def state(root: Path, name: str) -> TaskStats | None:
    """Return the state of the task list of the log; None if there is none."""
    return look(log_task_file(path_of(root, name), name), KEY[0])


def unread(root: Path, name: str, states: list[TaskStats]) -> int:
    """Return the number of records of the log that no worker was given."""
    if not found(root, name):
        return 0
    with kvspool.open(path_of(root, name)) as log:
        first, end = log.extent()
    return max(0, end - max(first, max((one.next for one in states if one.shard == KEY[0]), default=0)))


def delete(root: Path, name: str) -> None:
    """Delete the log."""
    if found(root, name):
        kvspool.delete(path_of(root, name))
