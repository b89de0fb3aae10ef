"""Run a function in a forked child, and get its result, or the signal that ended the child."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvspool import Spool
from kvspool.engine import locks


class Died(Exception):
    """The child was ended by a signal; `signal` says which. SIGALRM: it hung."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def in_child(function: Callable[[], Any], seconds: int = 60, fork: Callable[[], int] = os.fork) -> Any:
    """Return what `function` returns in a forked child; AssertionError with its traceback if it raised, `Died` if a signal ended it."""
    return start(function, seconds, fork)()


def start(function: Callable[[], Any], seconds: int = 60, fork: Callable[[], int] = os.fork) -> Callable[[], Any]:
    """Start `function` in a forked child and return the function that waits for its result; see `in_child`."""
    read_end, write_end = os.pipe()
    child = fork()
    if child == 0:
        _run(function, seconds, write_end)
    os.close(write_end)

    def wait() -> Any:
        with open(read_end, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            raise Died(os.WTERMSIG(status))
        succeeded, result = pickle.loads(answer)
        if not succeeded:
            raise AssertionError(f"in the child:\n{result}")
        return result

    wait.pid = child  # type: ignore[attr-defined]
    return wait


@contextmanager
def process(work: Callable[[Callable[[bytes], None]], None]) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Run `work(say)` in a forked process. Yield its id, and a function that returns its next byte; it is killed at the end."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reads)
            work(lambda word: os.write(writes, word) and None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writes)
    try:
        yield pid, lambda: os.read(reads, 1)
    finally:
        os.close(reads)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _run(function: Callable[[], Any], seconds: int, write_end: int) -> None:
    # A loop in compiled code never lets a Python handler run, so the alarm keeps its default action: it ends the child.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    try:
        answer = pickle.dumps((True, function()))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    with open(write_end, "wb") as pipe:
        pipe.write(answer)
    os._exit(0)


def let_others_read(path: Path) -> None:
    """Let every user read what is at the path and below it, and come there through the directories of the tests."""
    for each in [path, *path.rglob("*")]:
        each.chmod(0o755 if each.is_dir() else 0o644)
    for parent in path.parents:
        if parent.is_relative_to(tempfile.gettempdir()) and not parent.stat().st_mode & 0o001:
            parent.chmod(0o711)


def addresses() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def bound_addresses(more: int) -> None:
    """Let this process's address space grow by that many bytes at most, however large it already is: many earlier tests make it large."""
    size = addresses() + more
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@contextmanager
def writing(log: Spool) -> Iterator[Any]:
    """Hold the append lock of a log, and its handle against other threads, as a writer does during an append."""
    with log._thread_lock:
        writer = log._open_writer()
        with locks.appending(writer.lock, log.timeout, lambda: "a test"):
            yield writer
