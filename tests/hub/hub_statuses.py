"""Statuses of hubs that never were, for the tests of what shows them."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import msgspec

from hub.protocol.status import ClientStatus, HubStatus, PipelineStatus, ReaderStatus, ShardStatus, TaskListStatus
from kvspool.tasks.stats import TaskWorkerStats

AIRPORTS = ("JFK", "LGA", "EWR", "ATL", "BOS", "CLT", "DEN", "DFW", "IAH", "LAX", "MCO", "MIA", "ORD", "PHX", "SEA", "SFO")
SECOND = 10**9
DAY = 86_400 * SECOND
GIB = 1 << 30
TASKS = TaskListStatus(
    workers=[TaskWorkerStats(7, "process 7", 1, 2)],
    **{"given": 2, "waiting": 7, "delayed": 1, "retried": 4, "dead": 3, "window": 64, "used": 5},
    waits_for=["it is full"],
)


def shard(index: int = 0, **fields: Any) -> ShardStatus:
    """A shard with 1000 records and nothing wrong."""
    known = dict(generation=1, first_sequence=0, next_sequence=1000, records=1000, used=128_000, lost=0, last_timestamp=0, behind=0)
    return ShardStatus(index=index, **{**known, **fields})


def client(name: str, bits: int = 1, **fields: Any) -> ClientStatus:
    """A connected client with nothing wrong, that has sent nothing since the hub started."""
    known: dict[str, Any] = dict(shards=[shard(index) for index in range(1 << bits)], connections=1, last_seen=0, records=0, bytes=0)
    known |= dict(gaps=0, duplicates=0, refused={}, quota_bytes=0)
    return ClientStatus(client=name, bits=bits, **{**known, **fields})


def pipeline(name: str, **fields: Any) -> PipelineStatus:
    """A pipeline that runs, with nothing wrong."""
    known: dict[str, Any] = dict(state="running", records=5000, rate=250.5, lag=12, bad=3, late=4, batch=7)
    known |= dict(batch_seconds=1.5, error="")
    now = time.time_ns()
    return PipelineStatus(name=name, **{**known, "batch_ended": now - 2 * SECOND, "updated": now, **fields})


def hub(clients: list[ClientStatus] | tuple[ClientStatus, ...] = (), **fields: Any) -> HubStatus:
    """A healthy hub with these clients."""
    now = time.time_ns()
    known: dict[str, Any] = dict(root="/var/lib/kvspool/hub", version="1.0", started=now - 3600 * SECOND, now=now, level="disk")
    known |= dict(address="hub.example.org:8815", is_secure=True, free_bytes=60 * GIB, disk_bytes=100 * GIB, least_free=5 * GIB)
    known |= dict(certificate_expires=now + 90 * DAY, connections=sum(one.connections for one in clients), cut={}, readers=[])
    return HubStatus(clients=list(clients), **{**known, **fields})


class Told:
    """A hub that answers the page as the test has set it: with a status, or an error."""

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
    """A hub whose clients send all the time, each at a rate of its own that goes up and down; some have troubles."""

    def __init__(self, clients: int) -> None:
        self._sent = [0.0] * clients
        self._then = time.time_ns()
        self._started = self._then - 2 * DAY - 5000 * SECOND

    def __call__(self) -> HubStatus:
        return self.at(time.time_ns())

    def at(self, now: int) -> HubStatus:
        """Return the status at a time; later calls must not pass an earlier one."""
        elapsed, self._then = (now - self._then) / SECOND, now
        for number, _ in enumerate(self._sent):
            wave = 1 + 0.8 * math.sin(now / SECOND / (20 + number % 60))
            self._sent[number] += 0 if number % 11 == 5 else elapsed * wave * (1 + (number * 7919) % 4000)
        clients = [self._client(number, now) for number in range(len(self._sent))]
        readers = [ReaderStatus(name="spark-flights", lag=1523), ReaderStatus(name="archive", lag=0)]
        pipelines = [pipeline("delays"), pipeline("late", state="silent", updated=now - 600 * SECOND)]
        cut = {"idle": 4, "handshake": 31} if len(clients) > 3 else {}
        return hub(clients, started=self._started, now=now, readers=readers, pipelines=pipelines, cut=cut)

    def _client(self, number: int, now: int) -> ClientStatus:
        bits = 1 if len(self._sent) <= 3 else 3
        is_away = number % 11 == 5
        sent = int(self._sent[number])
        every = dict(first_sequence=sent // 3, next_sequence=sent, records=sent - sent // 3, used=sent * 60)
        every |= dict(generation=1 + (number % 5 == 2))
        every |= dict(lost=120 * (number % 9 == 7), behind=-1 if is_away else 25 * number * (number % 4 == 1))
        return client(
            AIRPORTS[number % len(AIRPORTS)] + (f"-gate-{number // len(AIRPORTS)}" if number >= len(AIRPORTS) else ""),
            bits=bits,
            shards=[shard(index, **every, last_timestamp=now - number * SECOND) for index in range(1 << bits)],
            connections=0 if is_away else 1 + number % 2,
            last_seen=now - (7300 * SECOND if is_away else SECOND // 5),
            records=sent,
            bytes=sent * 118,
            gaps=int(number % 9 == 7),
            duplicates=number * 3,
            refused={"quota": 12} if number % 17 == 3 else {},
            quota_bytes=GIB if number % 3 == 0 else 0,
        )
