"""The hub's statistics of its clients since it started: connections, received records, refusals."""

from __future__ import annotations

import threading
from collections import Counter

from hub.root.store import Outcome
from kvspool import system
from kvspool.system.handles import Handle

MOST = 10_000  # remembered clients; only authorized clients count


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
        self.ends: dict[int, int] = {}  # of each shard: the next sequence of its log, as last reported by the client
        self.places: dict[int, int] = {}  # of each shard: the sequence of its log that the hub expects
        self._lock = threading.Lock()

    def connected(self, change: int) -> None:
        """Count a connection that begins (1) or ends (-1)."""
        with self._lock:
            self.connections += change
            self.last_seen = system.port.now()

    def said(self, ends: dict[int, int]) -> None:
        """Note the reported ends of the client's logs."""
        with self._lock:
            self.ends.update(ends)
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

    def behind(self, index: int) -> int:
        """Return how many records of a shard's log the hub doesn't have yet; -1 if the client hasn't reported it."""
        with self._lock:
            end = self.ends.get(index)
            return -1 if end is None else max(0, end - self.places.get(index, 0))


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
