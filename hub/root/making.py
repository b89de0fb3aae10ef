"""New shards: made in a hidden directory, flushed together, and put in place by renames.

A journal that is made alone takes six flushes. For many clients that come for the first time, that would be minutes. So their threads
form a group: one of them makes the shards of all that wait, and flushes them at once. Then it renames them, and flushes the root. A crash
leaves whole shards, and a hidden directory that the next server removes.

The files of a new journal are copies of those of a model, which `kvspool.create` makes. Only the id differs.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

import kvspool
from hub.protocol.reading import Generation
from hub.root.generations import GENERATIONS, encode
from kvspool import system
from kvspool.journal import settings
from kvspool.journal.control import tail_file
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

FEW = 64  # files and directories that are flushed one by one; for more, the whole file system is flushed once
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # the errors of a rename to a name that has something else


class NewShard(msgspec.Struct, frozen=True):
    """A shard to be made. log: the log that will be shipped to it, in hex, or nothing."""

    name: str
    log: str = ""


class _Order:
    """The new shards of one client, until they are made."""

    def __init__(self, shards: list[NewShard]) -> None:
        self.shards = shards
        self.is_done = False
        self.error: OSError | None = None


class ShardMaker(Handle):
    """Makes shards under one root. Its methods can be called by several threads."""

    def __init__(self, root: Path, private: Path) -> None:
        """private: a directory of the hub on the same file system."""
        self._root = root
        self._place = private / "new"
        self._model: list[tuple[str, bytes | None]] | None = None  # names of its files and directories (None), in order
        self._orders: list[_Order] = []
        self._ordering = threading.Lock()
        self._making = threading.Lock()

    def clean(self) -> None:
        """Remove what a crash has left."""
        shutil.rmtree(self._place, ignore_errors=True)

    def make(self, shards: list[NewShard]) -> None:
        """Make shards, on disk on return; a name that is taken meanwhile is left as it is. Raises the system's OSError."""
        order = _Order(shards)
        with self._ordering:
            self._orders.append(order)
        with self._making:  # the others wait here, and find their order done
            if not order.is_done:
                with self._ordering:
                    orders, self._orders = self._orders, []
                self._make_all(orders)
        if order.error is not None:
            raise OSError(order.error.errno, f"{order.error.strerror or order.error}") from order.error

    def _make_all(self, orders: list[_Order]) -> None:
        """Make the shards of all orders, and note the error of each."""
        try:
            self._load_model()
            made = [order for order in orders if self._is_built(order)]
            self._flush([path for order in made for path in self._built(order)])
            for order in made:
                self._put_in_place(order)
            disk.flush_directory(self._root)
        except OSError as error:
            for order in orders:
                order.error = order.error or error
        finally:
            for order in orders:
                order.is_done = True
            self.clean()

    def _is_built(self, order: _Order) -> bool:
        """Build the shards of an order. Return whether that worked."""
        assert self._model is not None
        try:
            for shard in order.shards:
                folder = f"{self._place}/{shard.name}"
                system.port.make_directory(folder)
                for name, data in self._model:
                    if data is None:
                        system.port.make_directory(f"{folder}/{name}")
                    else:
                        _write(f"{folder}/{name}", _with_new_id(data) if name == settings.NAME else data)
                if shard.log:
                    _write(f"{folder}/{GENERATIONS}", encode([Generation(shard.log, 0)]))
        except OSError as error:
            order.error = error
            return False
        return True

    def _built(self, order: _Order) -> Iterator[tuple[str, bool]]:
        """Yield the paths of what was built, and whether each is a directory: directories after their contents."""
        assert self._model is not None
        for shard in order.shards:
            folder = f"{self._place}/{shard.name}"
            if shard.log:
                yield f"{folder}/{GENERATIONS}", False
            for name, data in sorted(self._model, key=lambda one: one[1] is None):
                yield f"{folder}/{name}", data is None
            yield folder, True

    def _flush(self, paths: list[tuple[str, bool]]) -> None:
        """Flush files and directories to disk."""
        if len(paths) > FEW:
            with Descriptor(self._place, os.O_RDONLY | os.O_DIRECTORY) as fd:
                system.port.flush_filesystem(fd)
            return
        for path, is_directory in paths:
            with Descriptor(path, os.O_RDONLY | (os.O_DIRECTORY if is_directory else 0)) as fd:
                system.port.flush(fd)

    def _put_in_place(self, order: _Order) -> None:
        try:
            for shard in order.shards:  # in the order of their numbers: a set without its last ones is being made
                try:
                    system.port.rename(self._place / shard.name, self._root / shard.name)
                except OSError as error:
                    if error.errno not in TAKEN:
                        raise
        except OSError as error:
            order.error = error

    def _load_model(self) -> None:
        """Make the model, the first time, and the directory for new shards."""
        self.clean()
        system.port.make_directory(self._place)
        if self._model is None:
            path = self._place / "model"
            kvspool.create(path, format="kvj").close()
            tail = tail_file(path / "lock").name
            found = [one for one in sorted(path.rglob("*")) if one.name != tail]
            self._model = [(str(one.relative_to(path)), None if one.is_dir() else one.read_bytes()) for one in found]
            shutil.rmtree(path)


def _with_new_id(data: bytes) -> bytes:
    found = msgspec.json.decode(data, type=settings.Settings)
    return msgspec.json.encode(msgspec.structs.replace(found, id=settings.new_id()))


def _write(path: str, data: bytes) -> None:
    with Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        system.port.write(fd, data, 0)
