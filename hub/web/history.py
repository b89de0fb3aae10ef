"""The load of a hub over time: rates of each second for 10 minutes, and of each minute for 24 hours, in limited memory.

A row of rates takes 12 bytes, a history 24,480; with its Python objects 27 KB. There is one for the hub and one for each of at most
`MOST_CLIENTS` clients: 14 MB in all. Clients beyond those have rates, but no history. Nothing is stored on disk.

Not thread-safe.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import msgspec

from hub.protocol.status import ClientStatus, HubStatus

SECONDS = 600  # rows of a second each
MINUTES = 24 * 60  # rows of a minute each
MOST_CLIENTS = 512  # with a history
RECENT = 60  # seconds covered by `recent`


class TrafficRates(msgspec.Struct, frozen=True):
    """Rates of ingest, and the number of connections."""

    records: float  # a second
    bytes: float  # a second
    connections: float


class RateSeries(msgspec.Struct, frozen=True):
    """Successive rates, the oldest first; NaN (null in JSON) without a sample."""

    step: int  # seconds from one row to the next
    records: list[float]
    bytes: list[float]
    connections: list[float]


class RateBuffer:
    """Rates of the last `length` steps. Samples of the same step are averaged; steps without samples are NaN."""

    def __init__(self, step: int, length: int) -> None:
        """Create an empty ring; `step` is in seconds."""
        self._step, self._length = step, length
        self._columns = [array("f", bytes(4 * length)) for _ in range(3)]
        self._first = self._last = -1  # steps, counted from the clock's zero
        self._averaged = 0  # number of samples averaged in the last row

    def add(self, at: float, rates: TrafficRates) -> None:
        """Add a sample; `at`: seconds of a monotonic clock."""
        step = int(at) // self._step
        if step != self._last:
            self._go_on(step)
        self._averaged += 1
        row = step % self._length
        for column, value in zip(self._columns, (rates.records, rates.bytes, rates.connections), strict=True):
            column[row] += (value - column[row]) / self._averaged

    def _go_on(self, step: int) -> None:
        if self._last < 0:
            self._first = self._last = step - 1
        for column in self._columns:
            for skipped in range(max(self._last + 1, step - self._length), step):
                column[skipped % self._length] = math.nan
            column[step % self._length] = 0
        self._first = max(self._first, step - self._length)
        self._last, self._averaged = step, 0

    def rows(self, most: int | None = None) -> RateSeries:
        """Return the last rows, at most `most`, or all."""
        first = self._first if most is None else max(self._first, self._last - most)
        places = [step % self._length for step in range(first + 1, self._last + 1)]
        return RateSeries(self._step, *([round(column[place], 2) for place in places] for column in self._columns))


class History:
    """The history of a hub or a client: `seconds` and `minutes`."""

    def __init__(self) -> None:
        """Create an empty history."""
        self.seconds = RateBuffer(1, SECONDS)
        self.minutes = RateBuffer(60, MINUTES)

    def add(self, at: float, rates: TrafficRates) -> None:
        """Add a sample; `at`: seconds of a monotonic clock."""
        self.seconds.add(at, rates)
        self.minutes.add(at, rates)


class Histories:
    """The history of a hub, and those of its clients; `hub_rates` and `client_rates` are the newest ones."""

    def __init__(self, most_clients: int = MOST_CLIENTS) -> None:
        """Create empty histories."""
        self.hub = History()
        self.hub_rates = TrafficRates(0.0, 0.0, 0.0)
        self.client_rates: dict[str, TrafficRates] = {}
        self._clients: dict[str, History] = {}
        self._most_clients = most_clients
        self._counted: dict[str, tuple[int, int]] = {}  # records and bytes of each client at the last sample
        self._at = math.inf  # time of the last sample

    def add(self, at: float, status: HubStatus) -> None:
        """Add the hub's present state; `at`: seconds of a monotonic clock. The first call only stores the counters."""
        elapsed, self._at = at - self._at, at
        if elapsed > 0:
            self.client_rates = {client.client: self._rates(client, elapsed) for client in status.clients}
            self.hub_rates = _total(self.client_rates.values(), status.connections)
            self.hub.add(at, self.hub_rates)
            self._add_clients(at)
        self._counted = {client.client: (client.records, client.bytes) for client in status.clients}

    def _rates(self, client: ClientStatus, elapsed: float) -> TrafficRates:
        """Return a client's rates since the last sample; a new client counts with all it has, a reset counter as 0."""
        records, size = self._counted.get(client.client, (0, 0))
        return TrafficRates(max(0, client.records - records) / elapsed, max(0, client.bytes - size) / elapsed, client.connections)

    def _add_clients(self, at: float) -> None:
        self._clients = {client: history for client, history in self._clients.items() if client in self.client_rates}
        for client, rates in self.client_rates.items():
            if client not in self._clients and len(self._clients) < self._most_clients:
                self._clients[client] = History()
            if client in self._clients:
                self._clients[client].add(at, rates)

    def client(self, client: str) -> History | None:
        """Return the history of a client; None if there is none."""
        return self._clients.get(client)

    def recent(self) -> dict[str, list[float]]:
        """Return for each client with a history its records per second in the last minute, the oldest first."""
        return {client: history.seconds.rows(RECENT).records for client, history in self._clients.items()}


def _total(rates: Iterable[TrafficRates], connections: int) -> TrafficRates:
    rates = list(rates)
    return TrafficRates(sum(moment.records for moment in rates), sum(moment.bytes for moment in rates), connections)
