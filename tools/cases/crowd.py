"""Several processes at once: concurrent writers, and readers that report to the bench.

All are forked from a server that has already imported kvspool, so that 64 of them start in a moment, without the threads of this process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier
from typing import Any

PATIENCE = 60.0  # seconds until a process that does not answer is abandoned
Work = tuple[int, Callable[[], object]]  # operations per call, and the call
Setup = Callable[[Path], AbstractContextManager[Work]]  # opens the requirements of the work

crowd = multiprocessing.get_context("forkserver")
crowd.set_forkserver_preload(["kvspool", "cases.crowd"])
_gate: Barrier


def together(setup: Setup, path: Path, processes: int, seconds: float) -> float:
    """Let processes work at once for some seconds, and return the operations per second in all."""
    gate = crowd.Barrier(processes)
    with ProcessPoolExecutor(processes, crowd, initializer=_meet_at, initargs=(gate,)) as pool:
        spans = list(pool.map(_work, [setup] * processes, [path] * processes, [seconds] * processes))
    first, last = min(begin for begin, _, _ in spans), max(end for _, end, _ in spans)
    return sum(done for _, _, done in spans) / (last - first)


def _meet_at(gate: Barrier) -> None:
    global _gate
    _gate = gate


def _work(setup: Setup, path: Path, seconds: float) -> tuple[float, float, int]:
    """Work until the time is over. Return start, end, and the number of operations."""
    with setup(path) as (things, call):
        call()
        _gate.wait(PATIENCE)
        done, begin = 0, time.monotonic()
        while (now := time.monotonic()) < begin + seconds or not done:
            call()
            done += things
        return begin, now, done


@contextmanager
def reading(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `target(connection, *arguments)` in a process, and yield the other end of its connection once it has reported that it is ready.
    """
    ours, theirs = crowd.Pipe()
    process = crowd.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        process.join(PATIENCE)
    finally:
        process.kill()
        process.join()
        ours.close()


def received(connection: Connection) -> Any:
    """Return the next message of a process. Raises TimeoutError, and EOFError if it has ended."""
    if not connection.poll(PATIENCE):
        raise TimeoutError(f"a process of the bench has not answered for {PATIENCE:g} s")
    return connection.recv()
