"""Files without a library: one file that all append to, and a directory with a file for each record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count as numbers
from itertools import islice
from pathlib import Path

from cases.case import VALUE
from cases.wakeups import DIGITS

from peers.peer import Peer, Place, Writer, names

CREATE = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class _FileWriter:
    """Appends to one file. A record has no frame: readers must know its size."""

    def __init__(self, path: Path, level: str) -> None:
        self.fd, self._is_durable = os.open(path, CREATE), level == "disk"

    def append(self, value: bytes) -> None:
        """Write one value."""
        os.write(self.fd, value)
        if self._is_durable:
            os.fdatasync(self.fd)

    def append_many(self, values: list[bytes]) -> None:
        """Write all values with one call."""
        self.append(b"".join(values))


class File(Peer):
    """A file opened with O_APPEND, without frames and checksums."""

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Yield a function that creates a file."""
        found = names()

        def create() -> Place:
            place = Place(str(folder), f"{self.key}-{next(found)}", level)
            place.path.touch()
            return place

        yield create

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Open the file."""
        writer = _FileWriter(place.path, place.level)
        try:
            yield writer
        finally:
            os.close(writer.fd)

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Read values of the known size through a buffer of 1 MiB."""
        with open(place.path, "rb", buffering=1 << 20) as file:
            yield from islice(iter(lambda: file.read(len(VALUE)), b""), count)

    @contextmanager
    def follow(self, place: Place) -> Iterator[Iterator[bytes]]:
        """Wait for inotify."""
        from inotify_simple import INotify, flags

        with INotify() as notifier, open(place.path, "rb", buffering=0) as file:
            notifier.add_watch(place.path, flags.MODIFY)

            def values() -> Iterator[bytes]:
                while True:
                    os.read(notifier.fileno(), 4096)
                    while value := file.read(DIGITS):
                        yield value

            yield values()


class _DirectoryWriter:
    """Writes a file for each value under a name that only this process uses, then moves it to the place that readers watch."""

    def __init__(self, path: Path, level: str) -> None:
        self._path, self._is_durable = path, level == "disk"
        self._new = os.open(path / "new", os.O_RDONLY | os.O_DIRECTORY)
        self._numbers = numbers()

    def append(self, value: bytes) -> None:
        """Write one value to a file."""
        name = f"{time.time_ns()}.{os.getpid()}.{next(self._numbers)}"
        source = f"{self._path}/tmp/{name}"
        fd = os.open(source, CREATE)
        os.write(fd, value)
        if self._is_durable:
            os.fsync(fd)
        os.close(fd)
        os.rename(source, f"{self._path}/new/{name}")
        if self._is_durable:
            os.fsync(self._new)

    def append_many(self, values: list[bytes]) -> None:
        """Write each value: there is no faster way for many."""
        for value in values:
            self.append(value)

    def close(self) -> None:
        """Close the directory."""
        os.close(self._new)


class Directory(Peer):
    """A directory with a file for each record, as in a Maildir."""

    replayed = 20_000

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Yield a function that creates a directory."""
        found = names()

        def create() -> Place:
            place = Place(str(folder), f"{self.key}-{next(found)}", level)
            for name in ("tmp", "new"):
                (place.path / name).mkdir(parents=True)
            return place

        yield create

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Open the directory."""
        writer = _DirectoryWriter(place.path, place.level)
        try:
            yield writer
        finally:
            writer.close()

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Read the files in the order of their names."""
        for name in sorted(os.listdir(place.path / "new"))[:count]:
            yield (place.path / "new" / name).read_bytes()

    @contextmanager
    def follow(self, place: Place) -> Iterator[Iterator[bytes]]:
        """Wait for inotify, and read each new file."""
        from inotify_simple import INotify, flags

        with INotify() as notifier:
            notifier.add_watch(place.path / "new", flags.MOVED_TO)

            def values() -> Iterator[bytes]:
                while True:
                    for event in notifier.read():
                        yield (place.path / "new" / event.name).read_bytes()

            yield values()


PEERS = {"file": File("file", "a plain file"), "directory": Directory("directory", "a directory of files")}
