"""NATS JetStream with a file store."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cases.case import LeftOut

from peers.peer import PATIENCE, Peer, Place, Writer, free_port, library, listens, names, server

T = TypeVar("T")
SYNC = {"process": "2m", "disk": "always"}  # the default, and a flush before each acknowledgement
CONFIGURATION = """\
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{folder}", sync_interval: {sync} }}
"""
PAGE = 1000  # messages between two returns from the event loop
GO = Path.home() / "go" / "bin"  # where `go install` puts programs


class _Client:
    """A connection with an event loop of its own, so that plain functions can use it."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.nats = self.run(_library().connect(address, allow_reconnect=False, connect_timeout=1))
        self.stream = self.nats.jetstream()

    def run(self, work: Awaitable[T]) -> T:
        """Wait for a coroutine."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Close the connection and the loop."""
        self.run(self.nats.close())
        self._loop.close()


@contextmanager
def connected(address: str) -> Iterator[_Client]:
    """Yield a client of a server."""
    client = _Client(address)
    try:
        yield client
    finally:
        client.close()


def _library() -> Any:
    return library("nats", "nats-py")


class _StreamWriter:
    def __init__(self, client: _Client, name: str) -> None:
        self._client, self._name = client, name

    def append(self, value: bytes) -> None:
        """Publish, and wait for the acknowledgement."""
        self._client.run(self._client.stream.publish(self._name, value))

    def append_many(self, values: list[bytes]) -> None:
        """Publish all values, then wait for their acknowledgements."""
        self._client.run(self._publish(values))

    async def _publish(self, values: list[bytes]) -> None:
        await asyncio.gather(*[self._client.stream.publish(self._name, value) for value in values])


class JetStream(Peer):
    """A stream of one server."""

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Start the server."""
        _library()
        program = shutil.which("nats-server", path=os.pathsep.join([os.environ.get("PATH", os.defpath), str(GO)]))
        if program is None:
            raise LeftOut("nats-server is missing; go install github.com/nats-io/nats-server/v2@latest, or Debian's nats-server")
        port, found = free_port(), names()
        file = folder / "nats.conf"
        file.write_text(CONFIGURATION.format(port=port, folder=folder / "jetstream", sync=SYNC[level]))
        address = f"nats://127.0.0.1:{port}"

        def create() -> Place:
            place = Place(address, next(found), level)
            with connected(address) as client:
                client.run(client.stream.add_stream(name=place.name, subjects=[place.name]))
            return place

        with server([program, "-c", str(file)], lambda: listens(port), "nats-server", stderr=subprocess.DEVNULL):
            yield create

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Connect."""
        with connected(place.address) as client:
            yield _StreamWriter(client, place.name)

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Read with an ordered consumer, to which the server pushes."""
        with connected(place.address) as client:
            read = client.run(client.stream.subscribe(place.name, ordered_consumer=True))
            for start in range(0, count, PAGE):
                yield from client.run(_messages(read, min(PAGE, count - start)))
            client.run(read.unsubscribe())

    @contextmanager
    def follow(self, place: Place) -> Iterator[Iterator[bytes]]:
        """Read new messages with an ordered consumer."""
        from nats.js.api import DeliverPolicy

        with connected(place.address) as client:
            read = client.run(client.stream.subscribe(place.name, ordered_consumer=True, deliver_policy=DeliverPolicy.NEW))

            def values() -> Iterator[bytes]:
                while True:
                    yield client.run(read.next_msg(timeout=PATIENCE)).data

            yield values()
            client.run(read.unsubscribe())


async def _messages(read: Any, count: int) -> list[object]:
    return [await read.next_msg(timeout=PATIENCE) for _ in range(count)]


PEERS = {"nats": JetStream("nats", "NATS JetStream")}
