"""Notice that the reader of the output has closed it, while a command waits for something else.

A write would notice, but a follower of a quiet log writes nothing: `kvspool tail -f log | head` would wait for the next record.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ending_with_reader(end: Callable[[], object]) -> Iterator[None]:
    """Call `end` in another thread once standard output is a pipe or socket that has no reader any more, during the `with` block."""
    fd = _pipe()
    if fd is None:
        yield
        return
    stopping, stop = os.pipe()
    thread = threading.Thread(target=_watch, args=(fd, stopping, end), name="kvspool-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(stop)
        thread.join()
        os.close(stopping)


def _watch(fd: int, stopping: int, end: Callable[[], object]) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # no reader: POLLERR or POLLHUP, which are always reported
    poller.register(stopping, 0)
    if any(found == fd for found, _ in poller.poll()):
        end()


def _pipe() -> int | None:
    """Return the descriptor of standard output if its reader can close it."""
    try:
        fd = sys.stdout.fileno()
        mode = os.fstat(fd).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    return fd if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
