"""Quotas of clients, and the limit of the disk. This module neither waits nor knows the network: it tells its caller what to do.

**Quotas** apply to a principal, for any number of client ids that it writes. Otherwise one that may write `jfk-*` would have any number of
quotas. **Space** applies to the hub. Ingest stops while there is still space for all data that clients may have in flight. So no write
fails on a full disk.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from hub.errors import HubFull, QuotaExceeded
from kvspool import system
from kvspool.engine import sizes
from kvspool.system.handles import Handle

BURST = 1.0  # seconds of its rate that a client may use at once
INTERVAL = 0.1  # seconds between two checks of the disk
LONGEST_DEBT = 5.0  # longest delay of a client that exceeds its rate, in seconds; a longer one is a refusal
LATER = 1.0  # seconds until the retry after a refusal for lack of space or connections
MOST_CALLS = 1024  # concurrent calls of a principal, or as many as its quota has connections: each has a thread of the server
MOST_OF_CONNECTION = 64  # concurrent calls of one connection
LEAST_FILES = 256  # free files that the disk must have, if it counts them
_logger = logging.getLogger("kvspool.hub")


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The quota of a principal; None: unlimited.

    bytes: stored at one time. rate: bytes a second, on average. shards: of all its client ids. connections: with calls in progress, to ship
    or to read. A connection has at most 64 concurrent calls, and a principal 1024, unless the quota has more connections.
    """

    bytes: int | None = None
    rate: int | None = None
    shards: int | None = None
    connections: int | None = None


UNLIMITED = Quota()
T = TypeVar("T", bound=Hashable)


class TokenBucket(Handle):
    """Admits `rate` per second, and `burst` at once. Thread-safe.

    Every amount is granted, and the caller waits afterwards: so an amount larger than the burst is possible, too.
    """

    def __init__(self, rate: float, burst: float | None = None) -> None:
        """Begin with a full bucket. burst: None for the rate of one second."""
        if rate <= 0:
            raise ValueError(f"a rate must be above 0, not {rate}")
        self.rate = rate
        self._burst = rate * BURST if burst is None else burst
        self._level = self._burst
        self._filled_at = system.port.monotonic()
        self._lock = threading.Lock()

    def take(self, amount: float) -> float:
        """Take an amount. Return how many seconds to wait before the next one, 0 for none."""
        with self._lock:
            self._fill()
            self._level -= amount
            return max(0.0, -self._level / self.rate)

    def try_take(self, amount: float) -> bool:
        """Take an amount if it is available. Return whether it was."""
        with self._lock:
            self._fill()
            has_enough = self._level >= amount
            if has_enough:
                self._level -= amount
            return has_enough

    def _fill(self) -> None:
        """Under the lock: add the amount since the last call."""
        now = system.port.monotonic()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self.rate)
        self._filled_at = now


class Meter(Handle):
    """The usage of one principal's quota. Thread-safe."""

    def __init__(self, principal: str, quota: Quota = UNLIMITED) -> None:
        """Begin without usage; the hub sets `stored`."""
        self.principal = principal
        self.quota = quota
        self._calls: Counter[Hashable] = Counter()  # in progress, by connection
        self._claims: Counter[tuple[str, int]] = Counter()  # clients whose shards are being created, and their numbers
        self._stored = 0
        self._bucket = _bucket(quota)
        self._lock = threading.Lock()

    def change(self, quota: Quota) -> None:
        """Use another quota from now on. Usage that already exceeds it stays."""
        with self._lock:
            if quota.rate != self.quota.rate:
                self._bucket = _bucket(quota)
            self.quota = quota

    @property
    def stored(self) -> int:
        """Return how many bytes are stored."""
        return self._stored

    @stored.setter
    def stored(self, size: int) -> None:
        with self._lock:
            self._stored = size

    def store(self, size: int) -> None:
        """Count bytes that are about to be stored. Raises QuotaExceeded, without counting, if they would be too many."""
        with self._lock:
            if self.quota.bytes is not None and self._stored + size > self.quota.bytes:
                raise self._exceeded("bytes", self.quota.bytes, LATER)
            self._stored += size

    def release(self, size: int) -> None:
        """Count bytes that were not stored in the end, or were removed."""
        with self._lock:
            self._stored = max(0, self._stored - size)

    def pace(self, size: int) -> float:
        """Count received bytes. Return how many seconds to wait before more are accepted from this principal.

        Raises QuotaExceeded, without counting, if its concurrent calls have not waited long enough for earlier bytes.
        """
        with self._lock:
            if self._bucket is None:
                return 0.0
            debt = self._bucket.take(0)
            if debt > LONGEST_DEBT:
                raise self._exceeded("bytes a second", int(self._bucket.rate), debt)
            return self._bucket.take(size)

    @contextmanager
    def shards(self, client: str, count: int, known: Callable[[], dict[str, int]]) -> Iterator[None]:
        """Count a client's shards inside the `with` block, in which they are created. known: returns the number of each client's shards.

        Raises QuotaExceeded if those of all clients, with shards in concurrent creation, are too many.
        """
        claim = client, count
        with self._lock:
            limit = self.quota.shards
            if limit is not None and sum(dict([*known().items(), *self._claims, claim]).values()) > limit:
                raise self._exceeded("shards", limit)
            self._claims[claim] += 1
        try:
            yield
        finally:
            with self._lock:
                _take_one(self._claims, claim)

    @property
    def calls(self) -> int:
        """Return the number of calls in progress."""
        return self._calls.total()

    @contextmanager
    def call(self, connection: Hashable) -> Iterator[None]:
        """Count a call of a connection inside the `with` block. Raises QuotaExceeded if it, or its connection, exceeds the limit."""
        with self._lock:
            self._check_call(connection)
            self._calls[connection] += 1
        try:
            yield
        finally:
            with self._lock:
                _take_one(self._calls, connection)

    def _check_call(self, connection: Hashable) -> None:
        connections = self.quota.connections
        if connections is not None and connection not in self._calls and len(self._calls) >= connections:
            raise self._exceeded("connections", connections, LATER)
        for count, limit, where in (
            (self._calls[connection], MOST_OF_CONNECTION, "one connection"),
            (self.calls, max(MOST_CALLS, connections or 0), "all its connections"),
        ):
            if count >= limit:
                raise QuotaExceeded(f"{self.principal} has {count} concurrent calls on {where}, which is the limit", LATER)

    def _exceeded(self, what: str, limit: int, retry_after: float | None = None) -> QuotaExceeded:
        return QuotaExceeded(f"{self.principal} may have no more {what}: its quota is {limit}", retry_after)


def _take_one(count: Counter[T], key: T) -> None:
    count[key] -= 1
    if not count[key]:
        del count[key]


class Meters(Handle):
    """A meter for each principal. Thread-safe."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}
        self._lock = threading.Lock()

    def of(self, principal: str, quota: Quota) -> Meter:
        """Return a principal's meter, with its present quota."""
        with self._lock:
            meter = self._meters.get(principal)
            if meter is None:
                meter = self._meters[principal] = Meter(principal, quota)
        if meter.quota != quota:
            meter.change(quota)
        return meter


class Space(Handle):
    """The free space on a hub's disk. Thread-safe.

    Ingest stops when less than `low` bytes are free, and continues when there are `high` again; the difference prevents rapid changes.
    Between two checks of the disk, bytes admitted since the last one are subtracted.
    """

    def __init__(self, path: str | os.PathLike[str], low: int, high: int | None = None) -> None:
        """path: anything on the disk. low, high: bytes; high is an eighth above low by default. Raises ValueError, and OSError."""
        self.path = Path(path)
        self.low = low
        self.high = low + low // 8 if high is None else high
        if not 0 <= self.low <= self.high:
            raise ValueError(f"the marks must be 0 <= low <= high, not {self.low} and {self.high}")
        self._is_full = False
        self._free = 0
        self._looked_at = -INTERVAL
        self._lock = threading.Lock()
        self._look()

    @property
    def free(self) -> int:
        """Return how many bytes were free at the last check, less those admitted since."""
        return self._free

    @property
    def is_full(self) -> bool:
        """Return whether ingest has stopped."""
        return self._is_full

    def admit(self, size: int) -> None:
        """Admit bytes that are about to be written. Raises HubFull, and the system's OSError if the disk can't be queried."""
        with self._lock:
            now = system.port.monotonic()
            if now - self._looked_at >= INTERVAL:
                self._look()
            if self._is_full:
                raise HubFull(f"{self.path}: {sizes.show(self._free)} are free; ingest continues at {sizes.show(self.high)}", LATER)
            if self._free - size < self.low:
                # Admitted bytes may not need new space, in preallocated files: only a check of the disk can tell.
                wait = max(0.01, self._looked_at + INTERVAL - now)
                raise HubFull(f"{self.path}: {sizes.show(size)} more would leave less than {sizes.show(self.low)} free", wait)
            self._free -= size

    def _look(self) -> None:
        """Under the lock: query the disk."""
        found = system.port.free_space(self.path)
        self._free = found.f_bavail * found.f_frsize
        self._looked_at = system.port.monotonic()
        has_files = found.f_files == 0 or found.f_favail >= LEAST_FILES
        is_full = not has_files or self._free < (self.high if self._is_full else self.low)
        if is_full != self._is_full:
            self._is_full = is_full
            _logger.warning("%s: ingest %s, %s are free", self.path, "stops" if is_full else "continues", sizes.show(self._free))


def _bucket(quota: Quota) -> TokenBucket | None:
    return None if quota.rate is None else TokenBucket(quota.rate)
