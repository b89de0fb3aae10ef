"""The wait for events of inotify, and which keys they are about. Compiled as `wakeups_c`; `wakeups` chooses one of the two.

It waits through the port in `system`; compiled, by a call of its own while nobody has replaced the port.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import kvspool.kernel.frames_py as frames
import kvspool.kernel.machine as native
from kvspool import system
from kvspool.system.handles import refuse_copy

REAL = system.REAL
POLL = 0.5  # seconds between two looks at everything, however quiet it is
BLIND_POLL = 0.005  # seconds between two looks where no event will come
OVERFLOW = 0x4000  # inotify's bits: events were lost
IGNORED = 0x8000  # the watched file is gone, and its watch with it
WRITTEN = 0x2  # a byte of the watched file was written
LINKS = 0x4  # the file's metadata changed; one of its names was removed, perhaps
HEAD = 16  # bytes of an event: watch, mask, cookie, length of the name after them
ROOM = 8192  # bytes of a file that are read at once after a wake-up


class Waiting:
    """Waits for events in one thread of one process; another thread may end the wait.

    _keys: the caller's key of each watch. unlinked: keys of files that may have lost a name, as of the last wait that returned any keys.
    changes: inotify's bits of all that the last wait has reported.
    """

    def __init__(self) -> None:
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
        """Return whether this is the process that began to watch, and no forked child of it."""
        return self._process == native.process_id()

    def wait(self, timeout: float) -> set[Any] | None:
        """Sleep up to `timeout` seconds. Return the keys of what changed; None: it may be anything, look at all."""
        self._users += 1  # before the look at what other threads set: they look here after they have set it
        notifier = self._notifier
        self.changes = 0
        try:
            if self._is_woken:
                return None
            if notifier is None or self.is_blind or not self._is_ours():
                # In a forked child the events would be stolen from the parent.
                system.port.sleep(min(timeout, BLIND_POLL))
                return None
            port = system.port
            longest = timeout if timeout < POLL else POLL
            if port is REAL:
                data = native.wait_events(self._fd, longest)
            else:
                data = port.read_events(self._fd) if port.wait_readable(self._fd, longest) else b""
            if not data:
                return set() if timeout < POLL else None
            return self.keys_of(data)
        finally:
            self._leave(notifier)

    def _leave(self, notifier: Any) -> None:
        """End a call that uses the notifier."""
        self._users -= 1
        if notifier is not None and self._notifier is None and self._users == 0:
            notifier.close()  # another thread closed us meanwhile: its number must not be another file's while we use it

    def keys_of(self, data: bytes) -> set[Any] | None:
        """Return the keys that some events are about; None if the kernel lost others."""
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


class FileSleeper(frames.Sleeper):
    """Sleeps until a file is written that frames are appended to, and copies the next ones out; for a cursor that expects nothing else.

    Every other event is left to the caller: the file or its directory may be gone, or the next file be there.
    """

    def __init__(self, waiting: Waiting, cursor: Any, scan: Callable[..., Any], fd: int) -> None:
        """Read the open file on where the cursor stands, with `scan`, see `journal.format.Format.scanner`. `waiting` watches the file.

        No event but writes was reported since the file was found to end there.
        """
        self.waiting = waiting
        self.cursor = cursor
        self.scan = scan
        self.fd = fd
        self.has_more = True  # there may be something, as far as is known without a look

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def close(self) -> None:
        """Read the file no more: it is about to be closed, or the cursor to be moved by others."""
        self.fd = -1

    def is_undisturbed(self) -> bool:
        """Return whether the file is open, and the machine may be called without the port."""
        return self.fd >= 0 and system.port is REAL

    def fetch(self, ns: int, most: int, make: Callable[..., Any] | None, out: list[Any]) -> bool:
        if not self.has_more:
            keys = self.waiting.wait(ns / 1e9)
            if not keys:
                return keys is not None
            if self.waiting.changes != WRITTEN or self.fd < 0:
                return False
        cursor = self.cursor
        position = cursor.position
        data = native.read_at(self.fd, ROOM, position)
        if data is None:
            return False
        try:
            found = self.scan(data, cursor.sequence, most, make, out)
            size = found[0]
        except BaseException:
            out.clear()  # the cursor still stands before them
            raise
        cursor.position = position + size
        cursor.sequence = found[1]
        self.has_more = size > 0 and (size < len(data) or size == ROOM)
        return size > 0 or len(data) == 0
