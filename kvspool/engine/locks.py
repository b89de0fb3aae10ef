"""Locks between processes: bytes of a file, and the append lock, a word whose owner holds such a byte (`lock_py`).

`spool.format` says at each byte's name what it protects. The rules, and their reasons:

- The descriptor belongs to the lock alone. It is never mapped: a mapping duplicates it, and would hold the lock until it is unmapped.
- It is never inherited: closed on exec, and dropped in a forked child (`forks`).
- It excludes other open file descriptions, not threads that share this one: each handle first takes a thread lock.
- Waiting is bounded. A lock is never broken by force after a time: the kernel frees a dead holder's lock at once, so the holder is alive
  or stopped, and may still be writing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvspool import system
from kvspool.errors import LockTimeout
from kvspool.kernel.lock import AppendLock
from kvspool.kernel.lock_py import GATE
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

T = TypeVar("T")
FIRST_PAUSE = 20e-6  # seconds; a holder needs less to append one record
LONGEST_PAUSE = 2e-3  # seconds; the longest delay of a waiter after the lock became free

# Of the append lock, in ns. Before the first and the last poll of a word that another process owns: each poll takes the word's cache line
# from the owner. So waiters poll seldom, and the owner appends a few more records meanwhile. The processors then also exchange all other
# lines less often.
POLLS = 4_000, 16_000
# The first sleep, and the longest that no event ends. The owner's appends in the first one outweigh the cost of the wake-up.
SLEEPS = 400_000, 2_000_000


def append_lock(control: memoryview, at: int, fd: int, gate: int = GATE) -> AppendLock:
    """Return the append lock of a handle: word `at` of `control`; `fd` is its own descriptor of the file with the bytes."""
    return AppendLock(control, at, fd, int.from_bytes(system.port.random(8), "little"), gate, POLLS, SLEEPS)


def wait_for(
    attempt: Callable[[], T | None], timeout: float, holder: Callable[[], str], rest: Callable[[float], None] | None = None
) -> T:
    """Call `attempt` repeatedly for up to `timeout` seconds until it returns something other than None, and return that.

    After that time it raises LockTimeout, which names the `holder`. `rest` replaces the sleep between two attempts.
    """
    got = attempt()
    if got is not None:
        return got
    deadline = system.port.monotonic() + timeout
    pause = FIRST_PAUSE
    while (got := attempt()) is None:
        if system.port.monotonic() >= deadline:
            raise LockTimeout(f"no lock within {timeout:g} s: {holder()}")
        if rest is None:
            system.port.sleep(pause)
        else:
            rest(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE)
    return got


def acquire(fd: int, byte: int, timeout: float, holder: Callable[[], str]) -> None:
    """Lock a byte, waiting up to `timeout` seconds; see `wait_for`."""
    wait_for(lambda: system.port.try_lock(fd, byte) or None, timeout, holder)


def give_back(file: Descriptor, process: int) -> None:
    """Release all locks of a descriptor that `process` opened, and close it if it is open.

    Closing alone would not suffice: a child that another thread forks at this moment has the descriptor too, until it executes a program.
    Such a child releases nothing: the locks are its parent's.
    """
    if file.is_closed:
        return
    with file as fd:
        if process == system.port.process_id():
            system.port.unlock_all(fd)


def give_back_file(file: Descriptor, process: int) -> None:
    """Do as `give_back`, with the lock of the whole file."""
    if file.is_closed:
        return
    with file as fd:
        if process == system.port.process_id():
            system.port.unlock_file(fd)
            system.port.unlock_all(fd)


class _Hold(Handle):
    """A lock for a `with` block, released at its end even if a signal handler raises there."""

    def __exit__(self, *_: object) -> None:
        try:
            self._release()
        except BaseException:  # from a signal handler, perhaps before the lock was released
            self._release()
            raise

    def _release(self) -> None:
        """Release the lock, if it is held. It may be called again."""
        raise NotImplementedError


class held(_Hold):
    """Hold a byte's lock of a descriptor for the `with` block; see `acquire`.

    An exception from a signal handler may prevent `__exit__` from running. The lock is then released when this object is collected,
    together with the exception's traceback. The descriptor may be closed by then, and its number reused for another log: then it is left
    alone.
    """

    _is_held = False

    def __init__(self, file: Descriptor, byte: int, timeout: float, holder: Callable[[], str]) -> None:
        self._file = file
        self._byte = byte
        self._timeout = timeout
        self._holder = holder
        self._process = system.port.process_id()
        self._token = object()  # of this hold

    def __enter__(self) -> None:
        self._is_held = True  # as far as we know, until it is released
        self._file.holds[self._byte] = self._token
        try:
            acquire(self._file.number, self._byte, self._timeout, self._holder)
        except BaseException:  # from a signal handler, perhaps after the lock was taken
            self._release()
            raise

    def _release(self) -> None:
        # A later hold of the same byte, and that of the parent of a forked child, must not be released.
        is_ours = self._file.holds.get(self._byte) is self._token and self._process == system.port.process_id()
        if is_ours and not self._file.is_closed:
            system.port.unlock(self._file.number, self._byte)
        self._is_held = False

    def __del__(self) -> None:
        if self._is_held:
            self._release()


class appending(_Hold):
    """Hold an append lock for the `with` block, waiting up to `timeout` seconds; see `wait_for`, and `held` for interrupts.

    file: the descriptor of a lock whose owner may close it without closing the lock.
    """

    _token: object = None  # of this hold

    def __init__(self, lock: AppendLock, timeout: float, holder: Callable[[], str], file: Descriptor | None = None) -> None:
        self._lock = lock
        self._file = file
        self._timeout = timeout
        self._holder = holder
        self._process = system.port.process_id()
        self._token = object()

    def __enter__(self) -> None:
        try:
            wait_for(lambda: self._lock.take(self._token) or None, self._timeout, self._holder, partial(rest, self._lock))
        except BaseException:  # from a signal handler, perhaps after the lock was taken
            self._release()
            raise

    def _release(self) -> None:
        # A later hold, and that of the parent of a forked child, must not be released.
        is_ours = self._lock.taken_by is self._token and self._process == system.port.process_id()
        if is_ours and not (self._file is not None and self._file.is_closed):
            self._lock.free()

    def __del__(self) -> None:
        if self._token is not None:
            self._release()


def rest(lock: AppendLock, pause: float) -> None:
    """Sleep until the append lock is free, at most `pause` seconds."""
    lock.rest(int(pause * 1e9))
