"""Redis Streams, on a Unix socket."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from cases.case import LeftOut

from peers.peer import PATIENCE, Peer, Place, Writer, library, names, server

FSYNC = {"process": "everysec", "disk": "always"}
PAGE = 1000  # entries of one answer


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Path]:
    """Run Redis with a socket in a folder; yield its path. Raises LeftOut without the server or its client."""
    redis = _library()
    program = shutil.which("redis-server")
    if program is None:
        raise LeftOut("redis-server is missing; on Debian: apt-get install redis-server")
    path = folder / "redis.socket"
    command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder), *options]

    def answers() -> bool:
        try:
            with connected(path) as client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False

    with server(command, answers, "redis-server"):
        yield path


@contextmanager
def connected(path: Path | str) -> Iterator[Any]:
    """Yield a client of the server with this socket."""
    with _library().Redis(unix_socket_path=str(path), protocol=2) as client:
        yield client


def _library() -> Any:
    return library("redis", "redis")


class _StreamWriter:
    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name

    def append(self, value: bytes) -> None:
        """XADD, and wait for the answer."""
        self._client.xadd(self._name, {b"value": value})

    def append_many(self, values: list[bytes]) -> None:
        """XADD all values in one pipeline."""
        pipe = self._client.pipeline(transaction=False)
        for value in values:
            pipe.xadd(self._name, {b"value": value})
        pipe.execute()


class RedisStreams(Peer):
    """A stream in a server with an append-only file."""

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Start the server."""
        found = names()
        with redis_server(folder, "--appendonly", "yes", "--appendfsync", FSYNC[level]) as path:
            yield lambda: Place(str(path), next(found), level)

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Connect."""
        with connected(place.address) as client:
            yield _StreamWriter(client, place.name)

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """XRANGE, a thousand entries at a time."""
        with connected(place.address) as client:
            yield from islice(_entries(client, place.name), count)

    @contextmanager
    def follow(self, place: Place) -> Iterator[Iterator[bytes]]:
        """XREAD that blocks."""
        with connected(place.address) as client:
            last = client.xadd(place.name, {b"value": b""})
            yield _new_values(client, place.name, last)


def _entries(client: Any, name: str) -> Iterator[object]:
    last = b"-"
    while entries := client.xrange(name, last, count=PAGE):
        yield from entries
        last = b"(" + entries[-1][0]


def _new_values(client: Any, name: str, last: bytes) -> Iterator[bytes]:
    while True:
        [(_, entries)] = client.xread({name: last}, block=round(PATIENCE * 1000))
        yield from (fields[b"value"] for _, fields in entries)
        last = entries[-1][0]


PEERS = {"redis": RedisStreams("redis", "Redis Streams")}
