"""Ports to a system that misbehaves on purpose; see `kvspool.system`."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import signal
import stat
from collections.abc import Callable
from typing import Any, Literal

from kvspool.spool import format
from kvspool.system import Port


class Killed(BaseException):
    """Raised where a process would be killed: instead of a store or a call of the system."""


class ReadOnlyPort(Port):
    """Files that this user may only read."""

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return super().open(path, flags, mode)


class NoFlushPort(Port):
    """A disk on which no data can be flushed."""

    def flush_data(self, fd: int) -> None:
        raise OSError(errno.EIO, "bad disk")


FILE_CALLS = (
    "open",
    "close",
    "read",
    "write",
    "allocate",
    "set_mode",
    "status",
    "flush_data",
    "flush",
    "make_directory",
    "rename",
    "rename_new",
    "map",
    "mounts",
    "try_lock",
    "inotify",
    "add_watch",
)


# Every call, except for those that only look at the clock or the process.
EVERY_CALL = tuple(name for name in dir(Port) if not name.startswith("_") and name not in ("now", "monotonic", "process_id", "fence"))


class FailingPort(Port):
    """Lets the n-th of the calls that can fail, counted from 1, fail with an errno (`every`: and all after it); `failed` names it then.

    A close that fails has closed all the same, as on Linux. `only` restricts what is counted.
    """

    def __init__(self, nth: int, number: int, only: tuple[str, ...] = FILE_CALLS, every: bool = False) -> None:
        super().__init__()
        self.left = nth
        self.number = number
        self.failed = ""
        self.every = every
        for name in only:
            setattr(self, name, self._failing(name, getattr(self, name)))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 or (self.every and self.left < 0):
                self.failed = self.failed or name
                if name == "close":
                    call(*args, **options)
                raise OSError(self.number, os.strerror(self.number))
            return call(*args, **options)

        return counted


class DirectoryPort(Port):
    """Lets the n-th flush of a directory fail, counted from 1 (`every`: and all after it); `has_failed` says so then."""

    def __init__(self, nth: int, every: bool = False) -> None:
        super().__init__()
        self.left = nth
        self.every = every
        self.has_failed = False

    def flush(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self.left -= 1
            if self.left == 0 or (self.every and self.left < 0):
                self.has_failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().flush(fd)


class RecordingPort(Port):
    """Notes the name of each call that can fail, and of those that take a name away."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        for name in (*FILE_CALLS, "remove", "remove_directory"):
            setattr(self, name, self._noting(name, getattr(self, name)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return call(*args, **options)

        return noted


class TouchingPort(Port):
    """Notes which bytes of the ring's file were written after its flush, and which were populated."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.flushed: list[int] = []
        self.touched: list[tuple[int, int]] = []
        self.populated = 0

    def available_memory(self) -> int:
        return self.memory

    def flush(self, fd: int) -> None:
        super().flush(fd)
        self.flushed.append(os.fstat(fd).st_ino)

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        super().write(fd, data, at)
        name = os.readlink(f"/proc/self/fd/{fd}")
        if at >= format.DATA_START and name.endswith(format.DATA_FILE) and os.fstat(fd).st_ino in self.flushed:
            assert not any(data)
            self.touched.append((at, at + len(data)))

    def populate(self, memory: mmap.mmap, size: int) -> None:
        super().populate(memory, size)
        self.populated = size


class CountingPort(Port):
    """Counts the bytes that are read from files."""

    def __init__(self) -> None:
        self.count = 0

    def read(self, fd: int, size: int, at: int) -> bytes:
        data = super().read(fd, size, at)
        self.count += len(data)
        return data


class ClockPort(Port):
    """A wall clock that returns the given times, then repeats the last one."""

    def __init__(self, *times: int) -> None:
        super().__init__()
        self.times = list(times)

    def now(self) -> int:
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


class BlindPort(Port):
    """The kernel has no inotify instance (`instances`) or no watch left to give."""

    def __init__(self, *, instances: bool) -> None:
        super().__init__()
        self.instances = instances
        self.refused = 0

    def inotify(self) -> Any:
        if self.instances:
            self.refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().inotify()

    def add_watch(self, notifier: Any, path: Any, mask: int) -> int:
        self.refused += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class KillingPort(Port):
    """Kills the process at the n-th of some calls, counted from 1: before it, after it, or before it but with half of it if it writes."""

    def __init__(self, nth: int, only: tuple[str, ...] = EVERY_CALL, *, when: Literal["before", "after", "half"] = "before") -> None:
        super().__init__()
        self.left = nth
        self.when = when
        for name in only:
            setattr(self, name, self._killing(name, getattr(self, name)))

    def _killing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            self.left -= 1
            is_last = self.left == 0
            if is_last and self.when == "half" and name == "write":
                os.pwrite(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
            if is_last and self.when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **options)
            finally:
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counted
