"""Sleep until one of many files or directories changes: one inotify descriptor for all of them.

The contract: a wait may end early, may end for nothing, and never lasts longer than its timeout. So a wake-up never decides what is true;
whoever wakes looks again. Where the kernel has no more inotify instances or watches to give, or its queue overflows, the
wait is cut into short sleeps instead: that costs latency, never a record.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Hashable

from inotify_simple import INotify, flags, parse_events

from kvspool import system
from kvspool.handles import Handle

CHANGED = flags.MODIFY  # a byte of the file was written
ENTERED = flags.CREATE | flags.MOVED_TO | flags.ONLYDIR  # a name appeared in the directory
POLL = 0.5  # seconds between two looks at everything, however quiet it is
BLIND_POLL = 0.005  # seconds between two looks where no event will come
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM)  # no instance or watch is left


class Watcher(Handle):
    """Watches files and directories, each under a key of the caller's. Use it in one thread of one process; another may close it."""

    _notifier: INotify | None = None
    _sleepers = 0

    def __init__(self) -> None:
        self._keys: dict[int, Hashable] = {}
        self._descriptors: dict[Hashable, set[int]] = {}  # for each key
        self._process = system.port.process_id()
        self._sleepers = 0
        self._is_woken = False
        self.is_blind = False
        try:
            self._notifier = system.port.inotify()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self.is_blind = True

    def watch(self, path: str | os.PathLike[str], mask: int, key: Hashable) -> None:
        """Wake for changes of `path` from now on, and report them as `key`. What is not there any more will not change."""
        if self._notifier is None:
            return
        try:
            descriptor = system.port.add_watch(self._notifier, path, mask)
            self._keys[descriptor] = key
            self._descriptors.setdefault(key, set()).add(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self.is_blind = True

    def unwatch(self, key: Hashable) -> None:
        """Watch nothing more of what was watched under a key. Its last changes may still be reported."""
        notifier = self._notifier if self._process == system.port.process_id() else None  # in a forked child they are the parent's
        for descriptor in self._descriptors.pop(key, ()):
            if self._keys.pop(descriptor, self) is not self and notifier is not None:
                system.port.remove_watch(notifier, descriptor)

    def wait(self, timeout: float) -> set[object] | None:
        """Sleep up to `timeout` seconds. Returns the keys of what changed; None: it may be anything, look at all."""
        self._sleepers += 1  # before the look at what other threads set: they look here after they have set it
        notifier = self._notifier
        try:
            if self._is_woken:
                return None
            if notifier is None or self.is_blind or self._process != system.port.process_id():
                # In a forked child the events would be stolen from the parent.
                system.port.sleep(min(timeout, BLIND_POLL))
                return None
            return self._sleep(notifier, timeout)
        finally:
            self._sleepers -= 1
            if notifier is not None and self._notifier is None and self._sleepers == 0:
                notifier.close()  # another thread closed us meanwhile: its number must not be another file's while we read

    def wake(self) -> None:
        """End the wait of another thread, and every later one, at once."""
        notifier, self._is_woken = self._notifier, True
        if self._sleepers and notifier is not None and self._process == system.port.process_id():
            _stir(notifier, [*self._keys])

    def _sleep(self, notifier: INotify, timeout: float) -> set[object] | None:
        fd = notifier.fileno()
        if not system.port.wait_readable(fd, min(timeout, POLL)):
            return set() if timeout < POLL else None
        keys: set[object] = set()
        for event in parse_events(system.port.read_events(fd)):
            if event.mask & flags.Q_OVERFLOW:
                return None
            key = self._keys.get(event.wd, self)
            if key is not self:
                keys.add(key)
                if event.mask & flags.IGNORED:  # the file is gone, and its watch with it
                    del self._keys[event.wd]
                    self._descriptors.get(key, set()).discard(event.wd)
        return keys

    def close(self) -> None:
        """Give the descriptor back; the wait of another thread ends at once, and a later one only sleeps."""
        notifier, self._notifier = self._notifier, None
        if notifier is None:
            return
        if self._sleepers == 0 or self._process != system.port.process_id():  # in a forked child they are threads of the parent
            notifier.close()
        else:
            _stir(notifier, [*self._keys])

    def __del__(self) -> None:
        self.close()


def _stir(notifier: INotify, descriptors: list[int]) -> None:
    """Wake the thread that sleeps on a notifier: the kernel reports each watch that is removed."""
    for descriptor in descriptors[:1]:
        system.port.remove_watch(notifier, descriptor)
