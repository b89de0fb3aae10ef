"""The hub's statistics of its clients since it started: connections, received records, refusals."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from hub.root.store import Outcome
from kvspool import system
from kvspool.system.handles import Handle

LogKey = tuple[int, bytes]  # shard and log id
MOST = 10_000  # remembered clients; only authorized clients count
SILENT = 15.0  # seconds without a report of a log's end after which its lag is estimated: a connected shipper reports every 5 s
MEMORY = 60.0  # seconds after which a former rate hardly counts


class LogEnd(NamedTuple):
    """The end of a client's log, as last reported. at: seconds of the monotonic clock; rate: records a second, before that."""

    end: int
    at: float
    rate: float = 0.0

    def followed_by(self, end: int, at: float) -> LogEnd:
        """Return the next report, with the average of the rates, in which later ones count more."""
        elapsed = at - self.at
        if elapsed <= 0:
            return LogEnd(max(end, self.end), self.at, self.rate)
        weight = -math.expm1(-elapsed / MEMORY)
        return LogEnd(end, at, self.rate + weight * (max(0, end - self.end) / elapsed - self.rate))


class ClientLag(NamedTuple):
    """Records that a hub doesn't have yet; -1: unknown. is_estimate: the client is silent, and its log probably grows at its last rate."""

    records: int
    is_estimate: bool = False


class Client(Handle):
    """One client's statistics since the hub started. Its methods can be called by several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.last_seen = 0  # ns since 1970
        self.records = 0
        self.bytes = 0
        self.lost: Counter[int] = Counter()  # of each shard: sequences that the client declared lost
        self.duplicates = 0  # records that were sent again
        self.refused: Counter[str] = Counter()
        self.ends: dict[int, LogEnd] = {}  # of each shard, as last reported by the client
        self.places: dict[int, int] = {}  # of each shard: the sequence of its log that the hub expects
        self._calls: dict[LogKey, Callable[[], object]] = {}  # of each log: ends the call that ships it
        self._lock = threading.Lock()

    def take_over(self, logs: Collection[LogKey], end: Callable[[], object]) -> None:
        """Note a new call that ships these logs, and end earlier ones that ship any of them: the client has given them up.

        A call that ships another log of a shard goes on; it is fenced.

        end: called at most once, when a later call takes over; it must return quickly.
        """
        with self._lock:
            earlier = {id(call): call for log in logs if (call := self._calls.get(log)) is not None}
            self._calls = {log: call for log, call in self._calls.items() if id(call) not in earlier}
            self._calls.update(dict.fromkeys(logs, end))
        for call in earlier.values():
            call()

    def end_call(self, end: Callable[[], object]) -> None:
        """Forget a call of `take_over`."""
        with self._lock:
            self._calls = {log: call for log, call in self._calls.items() if call is not end}

    def connected(self, change: int) -> None:
        """Count a connection that begins (1) or ends (-1)."""
        with self._lock:
            self.connections += change
            self.last_seen = system.port.now()

    def said(self, ends: dict[int, int]) -> None:
        """Note the reported ends of the client's logs."""
        now = system.port.monotonic()
        with self._lock:
            for index, end in ends.items():
                known = self.ends.get(index)
                self.ends[index] = LogEnd(end, now) if known is None else known.followed_by(end, now)
            self.last_seen = system.port.now()

    def stored(self, index: int, outcome: Outcome, size: int) -> None:
        """Count a batch of so many bytes."""
        with self._lock:
            self.places[index] = outcome.expected
            self.records += outcome.stored
            self.bytes += size
            self.lost[index] += outcome.lost
            self.duplicates += outcome.duplicates

    def refuse(self, reason: str) -> None:
        """Count a refusal."""
        with self._lock:
            self.refused[reason] += 1

    def behind(self, index: int) -> ClientLag:
        """Return how many records of a shard's log the hub doesn't have yet: by the client's last report, later also by its rate."""
        now = system.port.monotonic()
        with self._lock:
            known = self.ends.get(index)
            if known is None:
                return ClientLag(-1)
            is_silent = now - known.at > SILENT
            grown = int(known.rate * (now - known.at)) if is_silent else 0
            return ClientLag(max(0, known.end + grown - self.places.get(index, 0)), is_silent)


class Clients(Handle):
    """All clients seen since the hub started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}

    def of(self, name: str) -> Client:
        """Return a client's statistics."""
        with self._lock:
            client = self._clients.get(name)
            if client is None:
                client = self._clients[name] = Client(name)
                while len(self._clients) > MOST:
                    del self._clients[next(iter(self._clients))]
            return client

    def all(self) -> list[Client]:
        """Return all clients, sorted by name."""
        with self._lock:
            return sorted(self._clients.values(), key=lambda client: client.name)
