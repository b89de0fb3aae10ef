"""Statuses of hubs that never were, for the tests of what shows them."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from hub.status import ClientStatus, HubStatus, ReaderStatus, ShardStatus

AIRPORTS = ("JFK", "LGA", "EWR", "ATL", "BOS", "CLT", "DEN", "DFW", "IAH", "LAX", "MCO", "MIA", "ORD", "PHX", "SEA", "SFO")
SECOND = 10**9
DAY = 86_400 * SECOND
GIB = 1 << 30


def shard(index: int = 0, **fields: Any) -> ShardStatus:
    """A shard with 1000 records and nothing wrong."""
    known = dict(generation=1, first_sequence=0, next_sequence=1000, records=1000, used=128_000, lost=0, last_timestamp=0, behind=0)
    return ShardStatus(index=index, **{**known, **fields})


def client(name: str, bits: int = 1, **fields: Any) -> ClientStatus:
    """A connected client with nothing wrong, that has sent nothing since the hub started."""
    known: dict[str, Any] = dict(shards=[shard(index) for index in range(1 << bits)], connections=1, last_seen=0, records=0, bytes=0)
    known |= dict(gaps=0, duplicates=0, refused={}, quota_bytes=0)
    return ClientStatus(client=name, bits=bits, **{**known, **fields})


def hub(clients: list[ClientStatus] | tuple[ClientStatus, ...] = (), **fields: Any) -> HubStatus:
    """A healthy hub with these clients."""
    now = time.time_ns()
    known: dict[str, Any] = dict(root="/var/lib/kvspool/hub", version="1.0", started=now - 3600 * SECOND, now=now, level="disk")
    known |= dict(address="hub.example.org:8815", is_secure=True, free_bytes=60 * GIB, disk_bytes=100 * GIB, least_free=5 * GIB)
    known |= dict(certificate_expires=now + 90 * DAY, connections=sum(one.connections for one in clients), cut={}, readers=[])
    return HubStatus(clients=list(clients), **{**known, **fields})


class Told:
    """A hub that says what it was told to say: a status, or an error. Called by the page, told by the test."""

    def __init__(self, status: HubStatus) -> None:
        self._lock = threading.Lock()
        self._answer: HubStatus | Exception = status
        self.asked = 0

    def tell(self, answer: HubStatus | Exception) -> None:
        with self._lock:
            self._answer = answer

    def __call__(self) -> HubStatus:
        with self._lock:
            self.asked += 1
            if isinstance(self._answer, Exception):
                raise self._answer
            return msgspec.structs.replace(self._answer, now=time.time_ns())


class Busy:
    """A hub whose clients send all the time, each at a rate of its own, with troubles here and there."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._started = time.time_ns() - 2 * DAY - 5000 * SECOND
        self._now = time.time_ns()

    def __call__(self) -> HubStatus:
        now = time.time_ns()
        readers = [ReaderStatus(name="spark-flights", lag=1523), ReaderStatus(name="archive", lag=0)]
        clients = [self._client(number, now) for number in range(self._clients)]
        cut = {"idle": 4, "handshake": 31} if self._clients > 3 else {}
        return hub(clients, started=self._started, now=now, readers=readers, cut=cut)

    def _client(self, number: int, now: int) -> ClientStatus:
        name = AIRPORTS[number % len(AIRPORTS)] + (f"-gate-{number // len(AIRPORTS)}" if number >= len(AIRPORTS) else "")
        rate = 1 + (number * 7919) % 4000 * (1 + now // SECOND % 7)
        is_away = number % 11 == 5
        seconds = 3600 if is_away else 3600 + (now - self._now) / SECOND
        records = int(seconds * rate)
        behind = 25 * number if number % 4 == 1 else 0
        shards = [
            shard(
                index,
                generation=1 + (number % 5 == 2),
                next_sequence=records,
                records=records // 2,
                used=records * 60,
                lost=120 * (number % 9 == 7),
                last_timestamp=now - number * SECOND,
                behind=-1 if is_away else behind,
            )
            for index in range(2 if self._clients <= 3 else 8)
        ]
        return client(
            name,
            bits=1 if self._clients <= 3 else 3,
            shards=shards,
            connections=0 if is_away else 1 + number % 2,
            last_seen=now - (7300 * SECOND if is_away else SECOND // 5),
            records=records,
            bytes=records * 118,
            gaps=number % 9 == 7,
            duplicates=number * 3,
            refused={"quota": 12} if number % 17 == 3 else {},
            quota_bytes=GIB if number % 3 == 0 else 0,
        )
