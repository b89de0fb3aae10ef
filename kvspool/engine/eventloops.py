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
from kvspool.engine.wakeups import BLIND_POLL, EXHAUSTED, POLL
from kvspool.system.handles import Handle

_desks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Desk] = weakref.WeakKeyDictionary()


class LoopWatcher(Handle):
    """The equivalent of `Watcher` for a task of the running event loop. Use it in one task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bed = _Bed()
        self._desk: _Desk | None = None
        try:
            self._desk = _desk_of(self._loop)
            self._desk.enter(self._bed)
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
        self.is_blind = self._desk is None

    def watch(self, path: str | os.PathLike[str], mask: int, key: object) -> None:
        """Wake for changes of `path` from now on, and report them as `key`. A path that no longer exists will not change."""
        if self._desk is None or self.is_blind:
            return
        try:
            self._desk.watch(path, mask, self._bed, key)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self.is_blind = True

    async def wait(self, timeout: float) -> set[object] | None:
        """Sleep up to `timeout` seconds. Returns the keys of the changes; None: anything may have changed, check all."""
        if self.is_blind or self._desk is None:
            await asyncio.sleep(min(timeout, BLIND_POLL))
            return None
        changed = self._bed.changed
        if changed is not None and not changed:
            await self._bed.sleep(self._loop, min(timeout, POLL))
        changed = self.take()
        return None if not changed and timeout >= POLL else changed

    def take(self) -> set[object] | None:
        """Return the keys of the changes since the last call, without sleeping; None: anything may have changed, check all."""
        changed, self._bed.changed = self._bed.changed, set()
        return None if self.is_blind else changed

    def wake(self) -> None:
        """End the wait at once, or the next one. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._bed.stir)

    def close(self) -> None:
        """Stop watching; a later wait only sleeps."""
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.leave(self._bed, self._loop)

    def __del__(self) -> None:
        # The collector runs in any thread; a loop's watches may be changed only in its own thread.
        desk, self._desk = getattr(self, "_desk", None), None
        if desk is None:
            return
        if self._loop.is_closed() or _running() is self._loop:
            desk.leave(self._bed, self._loop)
        else:
            with suppress(RuntimeError):  # closed at this moment: the desk closes the descriptor
                self._loop.call_soon_threadsafe(desk.leave, self._bed, self._loop)


class _Bed:
    """The place where one task sleeps, and the changes meanwhile; None for anything."""

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


class _Desk(Handle):
    """The inotify descriptor of a loop, and its waiting tasks with their watches and keys."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._notifier: INotify | None = system.port.inotify()
        self._process = system.port.process_id()
        self._beds: dict[int, dict[_Bed, object]] = {}
        self._guests: weakref.WeakSet[_Bed] = weakref.WeakSet()
        loop.add_reader(self._notifier.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        """Return whether this process may use it: a forked child would steal events from the parent."""
        return self._notifier is not None and self._process == system.port.process_id()

    def enter(self, bed: _Bed) -> None:
        """Stay open while this task uses it."""
        self._guests.add(bed)

    def watch(self, path: str | os.PathLike[str], mask: int, bed: _Bed, key: object) -> None:
        """Wake `bed` for changes of `path`. The same file watched twice has one watch."""
        if self._notifier is not None:
            self._beds.setdefault(system.port.add_watch(self._notifier, path, mask), {})[bed] = key

    def _read(self) -> None:
        """Wake the tasks concerned by the pending events. Called by the loop."""
        if self._notifier is None or not self.is_open:
            return
        for event in parse_events(system.port.read_events(self._notifier.fileno())):
            if event.mask & flags.Q_OVERFLOW:
                for bed in self._guests:
                    bed.stir()
            for bed, key in self._beds.get(event.wd, {}).items():
                if bed.changed is not None:
                    bed.changed.add(key)
                bed.wake()

    def leave(self, bed: _Bed, loop: asyncio.AbstractEventLoop) -> None:
        """Stop waking `bed`; the last one closes the descriptor."""
        self._guests.discard(bed)
        for descriptor, beds in list(self._beds.items()):
            if beds.pop(bed, self) is not self and not beds:
                del self._beds[descriptor]
                if self._notifier is not None and self.is_open:
                    system.port.remove_watch(self._notifier, descriptor)
        if not self._guests:
            self._close(loop)

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._notifier is not None:
            if self.is_open and not loop.is_closed():
                loop.remove_reader(self._notifier.fileno())
            self._notifier.close()
            self._notifier = None

    def __del__(self) -> None:
        notifier = getattr(self, "_notifier", None)
        if notifier is not None:
            notifier.close()


def _desk_of(loop: asyncio.AbstractEventLoop) -> _Desk:
    """Return the desk of a loop; a new one if there is none, or it was closed."""
    desk = _desks.get(loop)
    if desk is None or not desk.is_open:
        desk = _desks[loop] = _Desk(loop)
    return desk


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
