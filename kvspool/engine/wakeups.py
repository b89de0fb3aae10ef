"""Sleep until one of many files or directories changes: one inotify descriptor for all of them.

The contract: a wait may end early, may end without a change, and never lasts longer than its timeout. So a wake-up decides nothing; the
woken thread checks again. If the kernel has no free inotify instances or watches, or its queue overflows, the wait is split into short
sleeps instead: that costs latency, never a record.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.errors import NoEventLoop
from kvspool.kernel.wakeups import Waiting
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    import asyncio

    from inotify_simple import INotify

# The flags of inotify(7).
MODIFY, ATTRIB, MOVED_TO, CREATE, ONLYDIR = 0x2, 0x4, 0x80, 0x100, 0x1000000
CHANGED = MODIFY  # a byte of the file was written
ENTERED = CREATE | MOVED_TO | ONLYDIR  # a name appeared in the directory
LINKS = ATTRIB  # a name of the file was removed, or other metadata changed
POLL = 0.5  # seconds between two checks of everything, even without events
BLIND_POLL = 0.005  # seconds between two checks if no event can arrive
SLICE = 50_000  # ns that a thread polls memory without a break
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM)  # no instance or watch is free


class Watcher(Waiting, Handle):
    """Watches files and directories, each under a key of the caller's. Use it in one thread of one process; another may close it."""

    def __init__(self) -> None:
        super().__init__(POLL, BLIND_POLL)
        try:
            self._notifier = system.port.inotify()
            self._fd = self._notifier.fileno()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self.is_blind = True

    def watch(self, path: str | os.PathLike[str], mask: int, key: Hashable) -> None:
        """Wake for changes of `path` from now on, and report them as `key`. A path that no longer exists will not change."""
        with self._in_use() as notifier:
            if notifier is None:
                return
            try:
                descriptor = system.port.add_watch(notifier, path, mask)
                self._keys[descriptor] = key
                self._descriptors.setdefault(key, set()).add(descriptor)
            except (FileNotFoundError, NotADirectoryError):
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                self.is_blind = True

    def unwatch(self, key: Hashable) -> None:
        """Stop watching everything under a key. Its last changes may still be reported."""
        with self._in_use() as notifier:
            is_ours = self._is_ours()  # in a forked child they are the parent's
            for descriptor in self._descriptors.pop(key, ()):
                if self._keys.pop(descriptor, self) is not self and notifier is not None and is_ours:
                    system.port.remove_watch(notifier, descriptor)

    async def sleep(self, timeout: float) -> None:
        """Sleep in a task until there are events to `wait` for, or another thread closes the watcher; at most `timeout` seconds."""
        import asyncio

        loop = running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        with self._in_use() as notifier:
            if notifier is None or self.is_blind:
                await asyncio.sleep(min(timeout, BLIND_POLL))
                return
            alarm = loop.call_later(timeout, _wake, woken)
            loop.add_reader(notifier.fileno(), _wake, woken)
            try:
                await woken
            finally:
                loop.remove_reader(notifier.fileno())
                alarm.cancel()

    @contextmanager
    def _in_use(self) -> Iterator[INotify | None]:
        """Keep the notifier open during the `with` block, which gets None if it is closed already."""
        self._users += 1  # before reading what other threads set: they read this after setting it
        notifier = self._notifier
        try:
            yield notifier
        finally:
            self._leave(notifier)

    def wake(self) -> None:
        """End the wait of another thread, and every later one, at once."""
        notifier, self._is_woken = self._notifier, True
        if self._users and notifier is not None and self._is_ours():
            _stir(notifier, [*self._keys])

    def close(self) -> None:
        """Release the descriptor; the wait of another thread ends at once, and a later one only sleeps."""
        notifier, self._notifier = self._notifier, None
        if notifier is None:
            return
        if self._users == 0 or not self._is_ours():  # in a forked child they are threads of the parent
            notifier.close()
        else:
            _stir(notifier, [*self._keys])

    def __del__(self) -> None:
        if hasattr(self, "_notifier"):  # otherwise `__init__` never ran
            self.close()


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


def _stir(notifier: INotify, descriptors: list[int]) -> None:
    """Wake the thread that sleeps on a notifier: the kernel reports each removed watch."""
    for descriptor in descriptors[:1]:
        system.port.remove_watch(notifier, descriptor)


# Event loops.


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the calling task. Raises NoEventLoop if asyncio runs none, as under trio."""
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise NoEventLoop from None


async def let_others_run() -> None:
    """Let other tasks of the event loop run, which a log that always has more records must not block. Raises NoEventLoop."""
    import asyncio

    running_loop()
    await asyncio.sleep(0)
