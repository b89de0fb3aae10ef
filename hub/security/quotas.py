"""How much a client may have, and how full the disk may become. Nothing here waits or knows the network: it says what to do.

**Quotas** are of a principal, whatever number of client ids it writes: else one that may write `jfk-*` would have as many quotas as it
likes. **Space** is of the hub: intake stops while there is still room for what the clients are allowed to hold in flight, so that no write
meets a full disk.
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

BURST = 1.0  # seconds of its rate that a client may take at once
INTERVAL = 0.1  # seconds between two looks at the disk
LONGEST_DEBT = 5.0  # seconds for which one who was too quick waits; who has to wait longer is refused until then
LATER = 1.0  # seconds after which one who was refused for want of room, or of a connection, may try again
MOST_CALLS = 1024  # of a principal at one time, or as many as its quota has connections: each has a thread of the server
MOST_OF_CONNECTION = 64  # calls of one connection at one time
LEAST_FILES = 256  # files that the disk must have room for, where it counts them
_logger = logging.getLogger("kvspool.hub")


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a principal may have; None: as much as there is.

    bytes: stored at one time. rate: bytes a second, in the mean. shards: of all its client ids. connections: on which calls are
    under way, to ship or to read. There are 64 calls of a connection at one time at most, and 1024 in all unless the quota has more
    connections.
    """

    bytes: int | None = None
    rate: int | None = None
    shards: int | None = None
    connections: int | None = None


UNLIMITED = Quota()
T = TypeVar("T", bound=Hashable)


class TokenBucket(Handle):
    """Lets `rate` a second pass, and `burst` at once. Thread-safe.

    What is taken is always granted, and paid for by waiting afterwards: so a piece larger than the burst passes too.
    """

    def __init__(self, rate: float, burst: float | None = None) -> None:
        """Begin with a full bucket. burst: None for what one second brings."""
        if rate <= 0:
            raise ValueError(f"a rate is above 0, not {rate}")
        self.rate = rate
        self._burst = rate * BURST if burst is None else burst
        self._level = self._burst
        self._filled_at = system.port.monotonic()
        self._lock = threading.Lock()

    def take(self, amount: float) -> float:
        """Take an amount; return how many seconds to wait before the next one, 0 if not at all."""
        with self._lock:
            self._fill()
            self._level -= amount
            return max(0.0, -self._level / self.rate)

    def try_take(self, amount: float) -> bool:
        """Take an amount if there is so much; return whether there was."""
        with self._lock:
            self._fill()
            has_enough = self._level >= amount
            if has_enough:
                self._level -= amount
            return has_enough

    def _fill(self) -> None:
        """Under the lock: add what has come in since the last time."""
        now = system.port.monotonic()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self.rate)
        self._filled_at = now


class Meter(Handle):
    """What one principal uses of its quota. Thread-safe."""

    def __init__(self, principal: str, quota: Quota = UNLIMITED) -> None:
        """Begin with nothing used; the hub says by `stored` what there is."""
        self.principal = principal
        self.quota = quota
        self._calls: Counter[Hashable] = Counter()  # under way, by connection
        self._claims: Counter[tuple[str, int]] = Counter()  # clients whose shards are being made, and how many each has
        self._stored = 0
        self._bucket = _bucket(quota)
        self._lock = threading.Lock()

    def change(self, quota: Quota) -> None:
        """Let another quota hold from now on. What is beyond it already stays."""
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
        """Count bytes that are about to be stored. Raises QuotaExceeded, and counts nothing, if they would be too many."""
        with self._lock:
            if self.quota.bytes is not None and self._stored + size > self.quota.bytes:
                raise self._exceeded("bytes", self.quota.bytes, LATER)
            self._stored += size

    def release(self, size: int) -> None:
        """Count bytes that were not stored after all, or that were removed."""
        with self._lock:
            self._stored = max(0, self._stored - size)

    def pace(self, size: int) -> float:
        """Count bytes that came in; return how many seconds to wait before more are taken from this principal.

        Raises QuotaExceeded, and counts nothing, if all its calls together didn't wait for what they brought before.
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
        """Count a client's shards while the `with` block runs, in which they are made. known: returns how many shards each client has.

        Raises QuotaExceeded if those of all clients, with what others are making at this time, are too many.
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
        """Return how many calls are under way."""
        return self._calls.total()

    @contextmanager
    def call(self, connection: Hashable) -> Iterator[None]:
        """Count a call of a connection while the `with` block runs. Raises QuotaExceeded if it, or its connection, is one too many."""
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
                raise QuotaExceeded(f"{self.principal} has {count} calls under way on {where}, and may have no more at one time", LATER)

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
        """Return a principal's meter, under the quota that it has now."""
        with self._lock:
            meter = self._meters.get(principal)
            if meter is None:
                meter = self._meters[principal] = Meter(principal, quota)
        if meter.quota != quota:
            meter.change(quota)
        return meter


class Space(Handle):
    """The room on the disk of a hub. Thread-safe.

    Intake stops when less than `low` bytes are free, and goes on when there are `high` again: without the distance between them it would
    flutter. Between two looks at the disk, what was let in since the last one is taken off.
    """

    def __init__(self, path: str | os.PathLike[str], low: int, high: int | None = None) -> None:
        """path: anything on the disk. low, high: bytes; high is an eighth above low unless given. Raises ValueError, and OSError."""
        self.path = Path(path)
        self.low = low
        self.high = low + low // 8 if high is None else high
        if not 0 <= self.low <= self.high:
            raise ValueError(f"the marks are 0 <= low <= high, not {self.low} and {self.high}")
        self._is_full = False
        self._free = 0
        self._looked_at = -INTERVAL
        self._lock = threading.Lock()
        self._look()

    @property
    def free(self) -> int:
        """Return how many bytes were free at the last look, without those let in since."""
        return self._free

    @property
    def is_full(self) -> bool:
        """Return whether intake has stopped."""
        return self._is_full

    def admit(self, size: int) -> None:
        """Let in so many bytes, which are about to be written. Raises HubFull, and the system's OSError if the disk can't be asked."""
        with self._lock:
            now = system.port.monotonic()
            if now - self._looked_at >= INTERVAL:
                self._look()
            if self._is_full:
                raise HubFull(f"{self.path}: {sizes.show(self._free)} are free, and intake goes on at {sizes.show(self.high)}", LATER)
            if self._free - size < self.low:
                # What was let in may have been there before, in files made beforehand: only a look at the disk tells.
                wait = max(0.01, self._looked_at + INTERVAL - now)
                raise HubFull(f"{self.path}: {sizes.show(size)} more would leave less than {sizes.show(self.low)} free", wait)
            self._free -= size

    def _look(self) -> None:
        """Under the lock: ask the disk."""
        found = system.port.free_space(self.path)
        self._free = found.f_bavail * found.f_frsize
        self._looked_at = system.port.monotonic()
        has_files = found.f_files == 0 or found.f_favail >= LEAST_FILES
        is_full = not has_files or self._free < (self.high if self._is_full else self.low)
        if is_full != self._is_full:
            self._is_full = is_full
            _logger.warning("%s: intake %s, %s are free", self.path, "stops" if is_full else "goes on", sizes.show(self._free))


def _bucket(quota: Quota) -> TokenBucket | None:
    return None if quota.rate is None else TokenBucket(quota.rate)
