"""One flush for all who wait for one: what a handle does with its `FlushGroup`, of whatever kind its log is."""

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
REENTERED = "a signal handler may not flush a handle in the middle of a flush of it; let it use a handle of its own"


def flush_for_all(
    group: FlushGroup,
    sequence: int,
    timeout: float,
    flush: Callable[[], T],
    path: Path,
    error: Callable[[], int],
    leader: Callable[[], str] = lambda: "another process flushes",
) -> T | None:
    """Return when every record below `sequence` is on disk: another process or thread flushes, or this one does, for all who wait.

    flush: puts all that was appended before it is called on disk, and says so. If this thread calls it, its result is returned, and the
    caller has to check how far it came; otherwise None. error: returns the errno of the first failed flush. leader: says which process
    may flush. Raises what `flush` does; Poisoned if an earlier flush failed, LockTimeout after `timeout` seconds, Closed, Reentered.
    """
    done: T | None = None
    thread = threading.get_ident()
    if group.leader == thread:
        raise Reentered(REENTERED)
    try:
        found = group.come(sequence, thread, int(min(LONGEST_TIMEOUT, timeout) * 1e9))
        if found == groups.LEADS:
            done = flush()
    finally:
        try:
            group.leave(thread)
        except BaseException:  # out of a signal handler, perhaps before the lock was released
            group.leave(thread)
            raise
    if found == groups.FAILED:
        raise Poisoned(f"{path}: a flush to disk failed before (errno {error()}); copy it to a sound disk")
    if found == groups.LATE:
        who = "another thread flushes" if group.leader else leader()
        raise LockTimeout(f"{path}: the lock of a flush isn't free yet: {who}")
    return done
