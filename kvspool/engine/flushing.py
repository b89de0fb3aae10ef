"""One flush for all waiting callers: the use of a handle's `FlushGroup`, for logs of every kind.

**Gathering.** The next group gathers during a flush, and for a moment after it: a leader waits until as many callers have arrived as the
last flush has woken. At worst its flush begins `LONGEST_GATHER` later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvspool.errors import LockTimeout, Poisoned, Reentered
from kvspool.kernel import group_py as groups

if TYPE_CHECKING:
    from kvspool.kernel.group import FlushGroup

T = TypeVar("T")
LONGEST_TIMEOUT = 1e9  # seconds, so that nanoseconds fit into a word
LONGEST_SLEEP = 2_000_000  # ns until a check whether the leader is alive
LONGEST_GATHER = 100_000  # ns that a flush waits for those woken by the previous one
REENTERED = "a signal handler may not flush a handle during a flush of it; let it use its own handle"


def flush_for_all(
    group: FlushGroup,
    sequence: int,
    timeout: float,
    flush: Callable[[], T],
    path: Path,
    error: Callable[[], int],
    leader: Callable[[], str] = lambda: "another process flushes",
) -> T | None:
    """Return when every record below `sequence` is on disk: another process or thread flushes, or this one does, for all waiting callers.

    flush: flushes all records appended before the call, and publishes that. If this thread calls it, its result is returned, and the caller
    has to check how far it reached; otherwise None. error: returns the errno of the first failed flush. leader: describes the process that
    may flush. Raises the errors of `flush`; Poisoned if an earlier flush failed, LockTimeout after `timeout` seconds, Closed, Reentered.
    """
    done: T | None = None
    size = 0  # approximate number of callers of this flush
    thread = threading.get_ident()
    if group.leader == thread:
        raise Reentered(REENTERED)
    try:
        found = group.come(sequence, thread, int(min(LONGEST_TIMEOUT, timeout) * 1e9), LONGEST_SLEEP)
        if found == groups.LEADS:
            size = group.gather(LONGEST_GATHER)
            done = flush()
    finally:
        try:
            group.leave(thread, size)
        except BaseException:  # from a signal handler, perhaps before the lock was released
            group.leave(thread, size)
            raise
    if found == groups.FAILED:
        raise Poisoned(f"{path}: an earlier flush to disk failed (errno {error()}); copy it to a working disk")
    if found == groups.LATE:
        who = "another thread flushes" if group.leader else leader()
        raise LockTimeout(f"{path}: the flush lock is still held: {who}")
    return done
