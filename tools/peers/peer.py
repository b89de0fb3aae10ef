"""The verbs of a peer, and the measurements that are made of them."""

from __future__ import annotations

import importlib
import socket
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count as numbers
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cases.case import THOUSAND, VALUE, Bench, LeftOut, timed
from cases.crowd import Work, together
from cases.wakeups import latencies

LEVELS = {"process": "a crash of the process", "disk": "a power failure"}
PIECE = 10  # records between two looks at the clock
WRITERS = 4
PATIENCE = 60.0  # seconds
RETRY = 0.05  # seconds between two attempts to reach a server that starts


class Place(NamedTuple):
    """A log of a peer. address: of the server, or the folder; name: of the log there; level: of LEVELS."""

    address: str
    name: str
    level: str

    @property
    def path(self) -> Path:
        """Where the log of a peer without a server is."""
        return Path(self.address, self.name)


class Writer(Protocol):
    """An open log of a peer. Both verbs return when the peer has accepted the values, at the level of the place."""

    def append(self, value: bytes, /) -> object:
        """Append one value."""

    def append_many(self, values: list[bytes], /) -> object:
        """Append many values in the fastest way that the peer documents."""


class Peer(ABC):
    """A product, by its key in `peers.MODULES`. replayed: records of a replay; follows: whether a reader can wait for a record."""

    follows = True
    shares = True  # several processes may append
    batches = True
    flushes = True  # it has the level "disk"
    replayed = 100_000

    def __init__(self, key: str, title: str) -> None:
        self.key, self.title = key, title

    @abstractmethod
    def serve(self, folder: Path, level: str) -> AbstractContextManager[Callable[[], Place]]:
        """Start the server, if there is one; yield a function that creates an empty log. Raises LeftOut if something is missing."""

    @abstractmethod
    def write(self, place: Place) -> AbstractContextManager[Writer]:
        """Open a log for appends."""

    @abstractmethod
    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Read so many records from the beginning of a log."""

    def follow(self, place: Place) -> AbstractContextManager[Iterator[bytes]]:
        """Enter to be at the end of a log; then yield each new value."""
        raise NotImplementedError(f"{self.title} cannot follow")

    # Measurements.

    def appended(self, bench: Bench, place: Place) -> float:
        """Return the records per second of one writer, one record per call."""
        with self.write(place) as writer:
            return bench.rate(PIECE, partial(appends, writer))

    def batched(self, bench: Bench, place: Place) -> float:
        """Return the records per second of one writer, 1000 per call."""
        with self.write(place) as writer:
            return bench.rate(len(THOUSAND), partial(writer.append_many, THOUSAND))

    def shared(self, bench: Bench, place: Place) -> float:
        """Return the records per second of four processes in all, one record per call."""
        return together(partial(appending, self), place, bench.size(WRITERS, 2), bench.seconds)

    def replayed_rate(self, bench: Bench, place: Place) -> float:
        """Return the records per second of a reader that begins at the first record."""
        count = bench.size(self.replayed, 1000)
        with self.write(place) as writer:
            for _ in repeat(None, count // len(THOUSAND)):
                writer.append_many(THOUSAND)
        read = 0

        def work() -> None:
            nonlocal read
            for _ in self.replay(place, count):
                read += 1

        rate = timed(count, work)
        if read != count:
            raise SystemExit(f"{self.title} returned {read} of {count} records")
        return rate

    def wake_up(self, bench: Bench, place: Place) -> float:
        """Return the median of the times from an append to its receipt by a waiting process, as a rate per second."""
        with self.write(place) as writer:
            return 1e9 / statistics.median(latencies(bench, partial(following, self), writer.append, place))


def appends(writer: Writer, count: int = PIECE) -> None:
    """Append values one by one."""
    for _ in repeat(None, count):
        writer.append(VALUE)


@contextmanager
def appending(peer: Peer, place: Place) -> Iterator[Work]:
    """Open a peer's log for a process of a crowd."""
    with peer.write(place) as writer:
        yield PIECE, partial(appends, writer)


def following(peer: Peer, connection: Connection, count: int, place: Place) -> None:
    """Follow a peer's log, and report the latency of each record, in ns."""
    with peer.follow(place) as values:
        connection.send("ready")
        connection.send([time.monotonic_ns() - int(value) for _, value in zip(range(count), values, strict=False)])


# Clients and servers.


def library(module: str, package: str) -> Any:
    """Return the module of a peer's client. Raises LeftOut without its package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LeftOut(f"the package {package} is missing; in .venv: pip install {package}, or the extra peers") from None


@contextmanager
def server(command: list[str], is_ready: Callable[[], bool], what: str, **options: Any) -> Iterator[None]:
    """Run a server, once it answers. options: those of `subprocess.Popen`. Raises TimeoutError."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)
    try:
        wait_for(is_ready, what)
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def listens(port: int) -> bool:
    """Return whether a server listens on a port of the loopback interface."""
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def wait_for(is_ready: Callable[[], bool], what: str) -> None:
    """Wait until a server answers. Raises TimeoutError."""
    end = time.monotonic() + PATIENCE
    while not is_ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not answer within {PATIENCE:g} s")
        time.sleep(RETRY)


def names() -> Iterator[str]:
    """Yield names of logs."""
    return (f"log{number}" for number in numbers())
