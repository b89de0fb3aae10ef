"""Locks between processes: bytes of a file, and the append lock, a word whose owner such a byte keeps alive (`lock_py`).

What a byte protects is written at its byte's name in `spool.format`. The rules, and why:

- The descriptor belongs to the lock alone. It is never mapped: a mapping duplicates it, and would hold the lock for as long as it lives.
- It is never inherited: closed on exec, and given up in a forked child (`forks`).
- It excludes other open file descriptions, not threads that share this one: each handle has a thread lock in front.
- Waiting is bounded. A lock is never broken because time has passed: a dead holder's lock is freed by the kernel at once, so whoever
  holds one is alive or stopped, and may still be writing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvspool import system
from kvspool.errors import LockTimeout
from kvspool.kernel.lock import AppendLock
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

T = TypeVar("T")
FIRST_PAUSE = 20e-6  # seconds; a holder that appends one record needs less
LONGEST_PAUSE = 2e-3  # seconds; what a waiter may lose after the lock became free


def wait_for(
    attempt: Callable[[], T | None], timeout: float, holder: Callable[[], str], rest: Callable[[float], None] | None = None
) -> T:
    """Return what `attempt` returns once it isn't None, trying again and again for up to `timeout` seconds.

    LockTimeout names the `holder` if that was too short. `rest` takes the place of the sleep between two attempts.
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
    """Release all locks of a descriptor that `process` opened, and close it, unless it was closed before.

    Closing alone would not do: a child that another thread forks at this moment has the descriptor too, until it runs a program of its own.
    Such a child releases nothing: the locks are its parent's.
    """
    if file.is_closed:
        return
    with file as fd:
        if process == system.port.process_id():
            system.port.unlock_all(fd)


def give_back_file(file: Descriptor, process: int) -> None:
    """As `give_back`, with the lock of the whole file."""
    if file.is_closed:
        return
    with file as fd:
        if process == system.port.process_id():
            system.port.unlock_file(fd)
            system.port.unlock_all(fd)


class _Hold(Handle):
    """A lock that is held inside a `with` block, and released at its end whatever a signal handler raises there."""

    def __exit__(self, *_: object) -> None:
        try:
            self._release()
        except BaseException:  # out of a signal handler, perhaps before the lock was released
            self._release()
            raise

    def _release(self) -> None:
        """Release the lock, unless that was done. It may be called again."""
        raise NotImplementedError


class held(_Hold):
    """Hold a byte's lock of a descriptor inside the `with` block; see `acquire`.

    An exception out of a signal handler may keep `__exit__` from running at all. The lock is then released when this object is collected,
    as late as the exception's traceback is. The descriptor may be closed by then, and its number another log's: it is left alone.
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
        self._is_held = True  # as far as we know, until it was released
        self._file.holds[self._byte] = self._token
        try:
            acquire(self._file.number, self._byte, self._timeout, self._holder)
        except BaseException:  # out of a signal handler, perhaps after the lock was taken
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
    """Hold an append lock inside the `with` block, waiting up to `timeout` seconds; see `wait_for`, and `held` for interrupts.

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
        except BaseException:  # out of a signal handler, perhaps after the lock was taken
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
    """Sleep until the append lock is free, `pause` seconds at most."""
    lock.rest(int(pause * 1e9))
