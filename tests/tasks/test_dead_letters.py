"""A record that is rejected becomes one dead letter, at whatever system call its worker ends."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from faults import FailingPort
from task_logs import create

import kvspool
from kvspool import system


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_move_is_finished_by_others_if_its_worker_ends_at_any_system_call(tmp_path: Path) -> None:
    """The worker ends at each call of the port during a rejection; there is always exactly one dead letter."""
    for at in range(1, 300):
        path = tmp_path / f"log{at}"
        with create(path, "spool") as log:
            log.append_many([b"0", b"1"])
            worker = log.tasks("t")
            tasks = worker.take(2)
            with system.replaced(FailingPort(at, errno.EIO, every=True)) as port:
                try:
                    tasks[0].reject("no good")
                except (OSError, kvspool.KvspoolError):
                    pass
            worker._sources[0].file.close()  # as the kernel does at the end of a process
            with log.tasks("t") as other:
                found = other.take(2)
                for task in found:
                    if task.sequence == 0:
                        task.reject("no good")
                    else:
                        task.ack()
            assert len(log.dead_letters("t")) == 1, f"ended at call {at}"
            assert log.task_stats()[0].low == 2
            if not port.failed:
                return
    pytest.fail("the rejection has too many calls")
