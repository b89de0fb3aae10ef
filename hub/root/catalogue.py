"""The catalogue of a hub root: the shards of each client, in memory.

A hub with thousands of clients can't list its root for each call. The catalogue lists it once. After that it reads the events of one
inotify watch before each answer. The kernel queues an event before the call that creates or removes a name returns, so an answer has every
earlier change. If the queue overflows, the root is listed again. If the kernel has no watch left, it is listed after each change of the
directory.

A client with a single shard has a directory without a number in its name. Only its files show that it is a log, so they are checked again
before each answer about it.
"""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hub.root.file_version import UNSTABLE, FileVersion
from kvspool import system
from kvspool.engine.wakeups import CREATE, EXHAUSTED, MOVED_TO, ONLYDIR
from kvspool.system.handles import Handle
from shard import route
from shard.route import ShardDirectories

if TYPE_CHECKING:
    from inotify_simple import INotify

MOVED_FROM, DELETE = 0x40, 0x200  # flags of inotify(7)
OVERFLOW, IGNORED = 0x4000, 0x8000  # events were lost; the root was removed
NAMES = CREATE | MOVED_TO | MOVED_FROM | DELETE | ONLYDIR
_EVENT = struct.Struct("=iIII")  # watch, mask, cookie, length of the name after them


class Catalogue(Handle):
    """The shards under one root. Its methods can be called by several threads.

    `changes` counts the changes so far. An object that was returned never changes; a later call returns another one.
    """

    def __init__(self, root: Path) -> None:
        self._notifier: INotify | None = None
        self.root = root
        self.changes = 0
        self._lock = threading.Lock()
        self._found: dict[str, ShardDirectories] = {}
        self._single: set[str] = set()  # names without a number, whether they are logs now or not
        self._version = UNSTABLE  # of the root, if it can't be watched
        self._is_listed = False
        try:
            self._notifier = system.port.inotify()
            system.port.add_watch(self._notifier, root, NAMES)
        except OSError as error:
            self.close()
            if error.errno not in EXHAUSTED:
                raise

    def client(self, name: str) -> ShardDirectories | None:
        """Return the shards of a client; None if there is none."""
        with self._lock:
            self._refresh()
            if name in self._single:
                self._check_single(name)
            return self._found.get(name)

    def clients(self) -> dict[str, ShardDirectories]:
        """Return the shards of all clients, by name, in order."""
        with self._lock:
            self._refresh()
            for name in list(self._single):
                self._check_single(name)
            return {name: self._found[name] for name in sorted(self._found) if name}

    def close(self) -> None:
        """Release the descriptor. The catalogue remains usable."""
        notifier, self._notifier = self._notifier, None
        if notifier is not None:
            notifier.close()

    def __del__(self) -> None:
        if hasattr(self, "_notifier"):  # otherwise `__init__` never ran
            self.close()

    def _refresh(self) -> None:
        """Apply the changes since the last call."""
        if self._notifier is None:
            version = FileVersion.of(self.root)
            if version is None or version != self._version or not version.is_stable:
                self._list()
            self._version = version or UNSTABLE
            return
        names = self._changed_names(self._notifier.fileno())
        if names is None or not self._is_listed:
            self._list()
            return
        for name in names:
            self._look(name)

    def _changed_names(self, fd: int) -> set[str] | None:
        """Return the names with events; None if events were lost."""
        found: set[str] = set()
        is_complete = True
        while system.port.wait_readable(fd, 0.0):
            data = system.port.read_events(fd)
            at = 0
            while at + _EVENT.size <= len(data):
                _, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                found.add(data[at : at + length].rstrip(b"\0").decode(errors="surrogateescape"))
                at += length
                is_complete = is_complete and not mask & (OVERFLOW | IGNORED)
        return found if is_complete else None

    def _list(self) -> None:
        """List the root."""
        names = system.port.names(self.root)
        self._found = route.found_in(self.root, names)
        self._single = {name for name in names if _may_be_single(name)}
        self._is_listed = True
        self.changes += 1

    def _look(self, name: str) -> None:
        """Look at one name."""
        parsed = route.parse_name(name)
        if parsed is not None:
            self._note(*parsed, is_there=system.port.look_up(self.root / name) is not None)
        elif _may_be_single(name):
            self._single.add(name)
            self._check_single(name)

    def _check_single(self, name: str) -> None:
        """Look at a name without a number."""
        self._note(name, 0, 0, is_there=bool(route.found_in(self.root, [name])))
        if system.port.look_up(self.root / name) is None:
            self._single.discard(name)

    def _note(self, client: str, bits: int, index: int, *, is_there: bool) -> None:
        before = self._found.get(client)
        indexes = {} if before is None else before.indexes
        if (index in indexes.get(bits, ())) == is_there:
            return
        changed = {**indexes, bits: indexes.get(bits, set()) ^ {index}}
        changed = {some: shards for some, shards in changed.items() if shards}
        self.changes += 1
        if changed:
            self._found[client] = ShardDirectories(client, changed)
        else:
            self._found.pop(client, None)


def _may_be_single(name: str) -> bool:
    """Return whether a directory of this name may be a client's single shard."""
    return bool(name) and route.is_prefix(name)
