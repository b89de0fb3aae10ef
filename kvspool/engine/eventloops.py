"""Sleep in a task of an event loop until one of many files or directories changes: one inotify descriptor for each running loop.

The contract is that of `wakeups`: a wait may end early, may end without a change, and never lasts longer than its timeout. All waiting
tasks of a loop share its descriptor, and the last one closes it.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from contextlib import suppress

from inotify_simple import INotify, flags, parse_events

from kvspool import system
from kvspool.engine.wakeups import BLIND_POLL, EXHAUSTED, POLL, running_loop
from kvspool.system.handles import Handle

_notifiers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopNotifier] = weakref.WeakKeyDictionary()


class LoopWatcher(Handle):
    """The equivalent of `Watcher` for a task of the running event loop. Use it in one task."""

    def __init__(self) -> None:
        self._loop = running_loop()
        self._waiter = _Waiter()
        self._notifier: _LoopNotifier | None = None
        try:
            self._notifier = _notifier_of(self._loop)
            self._notifier.enter(self._waiter)
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
        self.is_blind = self._notifier is None

    def watch(self, path: str | os.PathLike[str], mask: int, key: object) -> None:
        """Wake for changes of `path` from now on, and report them as `key`. A path that no longer exists will not change."""
        if self._notifier is None or self.is_blind:
            return
        try:
            self._notifier.watch(path, mask, self._waiter, key)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self.is_blind = True

    async def wait(self, timeout: float) -> set[object] | None:
        """Sleep up to `timeout` seconds. Returns the keys of the changes; None: anything may have changed, check all."""
        if self.is_blind or self._notifier is None:
            await asyncio.sleep(min(timeout, BLIND_POLL))
            return None
        changed = self._waiter.changed
        if changed is not None and not changed:
            await self._waiter.sleep(self._loop, min(timeout, POLL))
        changed = self.take()
        return None if not changed and timeout >= POLL else changed

    def take(self) -> set[object] | None:
        """Return the keys of the changes since the last call, without sleeping; None: anything may have changed, check all."""
        changed, self._waiter.changed = self._waiter.changed, set()
        return None if self.is_blind else changed

    def wake(self) -> None:
        """End the wait at once, or the next one. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._waiter.stir)

    def close(self) -> None:
        """Stop watching; a later wait only sleeps."""
        notifier, self._notifier = self._notifier, None
        if notifier is not None:
            notifier.leave(self._waiter, self._loop)

    def __del__(self) -> None:
        # The collector runs in any thread; a loop's watches may be changed only in its own thread.
        notifier, self._notifier = getattr(self, "_notifier", None), None
        if notifier is None:
            return
        if self._loop.is_closed() or _running() is self._loop:
            notifier.leave(self._waiter, self._loop)
        else:
            with suppress(RuntimeError):  # closed at this moment: the notifier closes the descriptor
                self._loop.call_soon_threadsafe(notifier.leave, self._waiter, self._loop)


class _Waiter:
    """A waiting task, and the changes meanwhile; None for anything."""

    def __init__(self) -> None:
        self.changed: set[object] | None = set()
        self._sleeper: asyncio.Future[None] | None = None

    async def sleep(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self._sleeper = loop.create_future()
        alarm = loop.call_later(timeout, self.wake)
        try:
            await self._sleeper
        finally:
            alarm.cancel()
            self._sleeper = None

    def stir(self) -> None:
        """Wake the task, and let it check everything."""
        self.changed = None
        self.wake()

    def wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)


class _LoopNotifier(Handle):
    """The inotify descriptor of a loop, and its waiting tasks with their watches and keys."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._inotify: INotify | None = system.port.inotify()
        self._process = system.port.process_id()
        self._waiters: dict[int, dict[_Waiter, object]] = {}
        self._users: weakref.WeakSet[_Waiter] = weakref.WeakSet()
        loop.add_reader(self._inotify.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        """Return whether this process may use it: a forked child would steal events from the parent."""
        return self._inotify is not None and self._process == system.port.process_id()

    def enter(self, waiter: _Waiter) -> None:
        """Stay open while this task uses it."""
        self._users.add(waiter)

    def watch(self, path: str | os.PathLike[str], mask: int, waiter: _Waiter, key: object) -> None:
        """Wake `waiter` for changes of `path`. The same file watched twice has one watch."""
        if self._inotify is not None:
            self._waiters.setdefault(system.port.add_watch(self._inotify, path, mask), {})[waiter] = key

    def _read(self) -> None:
        """Wake the tasks concerned by the pending events. Called by the loop."""
        if self._inotify is None or not self.is_open:
            return
        for event in parse_events(system.port.read_events(self._inotify.fileno())):
            if event.mask & flags.Q_OVERFLOW:
                for waiter in self._users:
                    waiter.stir()
            for waiter, key in self._waiters.get(event.wd, {}).items():
                if waiter.changed is not None:
                    waiter.changed.add(key)
                waiter.wake()

    def leave(self, waiter: _Waiter, loop: asyncio.AbstractEventLoop) -> None:
        """Stop waking `waiter`; the last one closes the descriptor."""
        self._users.discard(waiter)
        for descriptor, waiters in list(self._waiters.items()):
            if waiters.pop(waiter, self) is not self and not waiters:
                del self._waiters[descriptor]
                if self._inotify is not None and self.is_open:
                    system.port.remove_watch(self._inotify, descriptor)
        if not self._users:
            self._close(loop)

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._inotify is not None:
            if self.is_open and not loop.is_closed():
                loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def __del__(self) -> None:
        inotify = getattr(self, "_inotify", None)
        if inotify is not None:
            inotify.close()


def _notifier_of(loop: asyncio.AbstractEventLoop) -> _LoopNotifier:
    """Return the notifier of a loop; a new one if there is none, or it was closed."""
    notifier = _notifiers.get(loop)
    if notifier is None or not notifier.is_open:
        notifier = _notifiers[loop] = _LoopNotifier(loop)
    return notifier


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
