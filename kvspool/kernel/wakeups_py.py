"""The wait for events of inotify, and the keys that they concern. Compiled as `wakeups_c`; `wakeups` chooses one of the two.

It waits through the port in `system`; compiled, by its own call while the port is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import kvspool.kernel.batch_py as batches
import kvspool.kernel.machine as native
from kvspool import system
from kvspool.system.handles import refuse_copy

REAL = system.REAL
OVERFLOW = 0x4000  # inotify's bits: events were lost
IGNORED = 0x8000  # the watched file was removed, and its watch with it
WRITTEN = 0x2  # a byte of the watched file was written
LINKS = 0x4  # the file's metadata changed; possibly one of its names was removed
HEAD = 16  # bytes of an event: watch, mask, cookie, length of the name after them
ROOM = 8192  # bytes of a file that are read at once after a wake-up


class Waiting:
    """Waits for events in one thread of one process; another thread may end the wait.

    _keys: the caller's key of each watch. unlinked: keys of files that may have lost a name, as of the last wait that returned any keys.
    changes: all bits of inotify in the last wait.
    """

    def __init__(self, poll: float, blind_poll: float) -> None:
        """poll: most seconds until the caller is to check everything, even without events; blind_poll: if no event can arrive."""
        self._poll = poll
        self._blind_poll = blind_poll
        self._keys: dict[int, Hashable] = {}
        self._descriptors: dict[Hashable, set[int]] = {}  # of each key
        self._notifier: Any = None
        self._fd = -1
        self._process = native.process_id()
        self._users = 0  # calls under way
        self._is_woken = False
        self.is_blind = False
        self.unlinked: set[Any] = set()
        self.changes = 0

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def _is_ours(self) -> bool:
        """Return whether this is the process that began to watch, and not a forked child of it."""
        return self._process == native.process_id()

    def wait(self, timeout: float) -> set[Any] | None:
        """Sleep up to `timeout` seconds. Return the keys of the changes; None: anything may have changed, check all."""
        self._users += 1  # before reading what other threads set: they read this after setting it
        notifier = self._notifier
        self.changes = 0
        try:
            if self._is_woken:
                return None
            if notifier is None or self.is_blind or not self._is_ours():
                # A forked child would steal events from the parent.
                system.port.sleep(min(timeout, self._blind_poll))
                return None
            port = system.port
            longest = timeout if timeout < self._poll else self._poll
            if port is REAL:
                data = native.wait_events(self._fd, longest)
            else:
                data = port.read_events(self._fd) if port.wait_readable(self._fd, longest) else b""
            if not data:
                return set() if timeout < self._poll else None
            return self.keys_of(data)
        finally:
            self._leave(notifier)

    def _leave(self, notifier: Any) -> None:
        """End a call that uses the notifier."""
        self._users -= 1
        if notifier is not None and self._notifier is None and self._users == 0:
            notifier.close()  # another thread closed it meanwhile: its number must not be reused while we use it

    def keys_of(self, data: bytes) -> set[Any] | None:
        """Return the keys concerned by some events; None if the kernel lost others."""
        events = native.bytes_of(data)
        found: set[Any] = set()
        if self.unlinked:
            self.unlinked = set()
        at = 0
        end = len(data)
        while at + HEAD <= end:
            watch = native.half_of(events, at)
            mask = native.half_of(events, at + 4)
            at += HEAD + native.half_of(events, at + 12)
            self.changes |= mask
            if mask & OVERFLOW:
                return None
            key = self._keys.get(watch, self)
            if key is self:
                continue
            found.add(key)
            if mask & (IGNORED | LINKS):
                self.unlinked.add(key)
            if mask & IGNORED:
                del self._keys[watch]
                self._descriptors.get(key, set()).discard(watch)
        return found


class FileSleeper(batches.Sleeper):
    """Sleeps until frames are written to a file, and copies the next ones out; for a cursor that expects nothing else.

    Every other event is left to the caller: the file or its directory may be removed, or the next file may exist.
    """

    def __init__(self, waiting: Waiting, cursor: Any, scan: Callable[..., Any], fd: int) -> None:
        """Read the open file from the cursor's position on, with `scan`, see `journal.format.Format.scanner`. `waiting` watches the file.

        Only writes were reported since the end of the file was found there.
        """
        self.waiting = waiting
        self.cursor = cursor
        self.scan = scan
        self.fd = fd
        self.has_more = True  # there may be a record, as far as known without a check

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def close(self) -> None:
        """Stop reading the file: it is about to be closed, or the cursor to be moved by others."""
        self.fd = -1

    def is_undisturbed(self) -> bool:
        """Return whether the file is open, and the machine may be called without the port."""
        return self.fd >= 0 and system.port is REAL

    def fetch(self, ns: int, most: int, make: Callable[..., Any] | None, out: list[Any]) -> bool:
        if not self.has_more:
            self.has_more = True  # if a signal handler raises: the events that it cost are not repeated
            keys = self.waiting.wait(ns / 1e9)
            if not keys:
                self.has_more = False
                return keys is not None
            if self.waiting.changes != WRITTEN or self.fd < 0:
                return False
        cursor = self.cursor
        position = cursor.position
        sequence = cursor.sequence
        data = native.read_at(self.fd, ROOM, position)
        if data is None:
            return False
        try:
            found = self.scan(data, sequence, most, make, out)
            size = found[0]
            cursor.position = position + size
            cursor.sequence = found[1]
        except BaseException:
            out.clear()
            cursor.position, cursor.sequence = position, sequence  # before them
            raise
        self.has_more = size > 0 and (size < len(data) or size == ROOM)
        return size > 0 or len(data) == 0
