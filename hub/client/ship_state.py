"""The state of running shippers and mirrors, as other programs see it: JSON, Prometheus metrics, and whether all is well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from hub.client.mirror import Mirror, MirrorStatus
from hub.client.ship_status import ShipStatus
from hub.client.shipper import Shipper
from kvspool.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra.of("hub", "metrics need a package that isn't installed", error) from error

Figure = Callable[[ShipStatus | MirrorStatus], float]
COUNTERS: tuple[tuple[str, str, Figure], ...] = (
    ("records", "Records moved, repeated ones counted again.", lambda one: one.pulled if isinstance(one, MirrorStatus) else one.sent),
    ("bytes", "Bytes moved.", lambda one: one.bytes),
    ("lost_records", "Sequences that were lost before they could be moved.", lambda one: one.lost),
    ("outages", "Connections that broke or were refused.", lambda one: one.outages),
)
GAUGES: tuple[tuple[str, str, Figure], ...] = (
    ("connected", "1 if connected to the hub, 0 otherwise.", lambda one: one.state == "connected"),
    ("behind_records", "Records that are still to be moved.", lambda one: one.behind),
    ("failed_logs", "Logs or shards that are not moved now because of an error.", lambda one: len(failed(one))),
)
OF_COPIES: tuple[tuple[str, str, Callable[[ShipStatus], float]], ...] = (
    ("copies", "Hubs that get a copy of each record.", lambda one: len(one.by_hub)),
    ("required_copies", "Hubs that have to store a record before the log may forget it.", lambda one: one.acks),
    ("connected_copies", "Hubs that are connected now.", lambda one: sum(part.state == "connected" for part in one.by_hub)),
    ("unacknowledged_records", "Records that too few hubs have stored.", lambda one: one.behind),
)


class ShipState(msgspec.Struct, frozen=True):
    """The states of all shippers and mirrors of a process."""

    shippers: list[ShipStatus]
    mirrors: list[MirrorStatus]

    @classmethod
    def of(cls, ways: Sequence[Shipper | Mirror]) -> ShipState:
        """Return the present state."""
        shippers = [way.status() for way in ways if isinstance(way, Shipper)]
        return cls(shippers, [way.status() for way in ways if isinstance(way, Mirror)])

    @property
    def all(self) -> list[ShipStatus | MirrorStatus]:
        """Return the states of both kinds; of a shipper, that at each hub."""
        return [*(one for shipper in self.shippers for one in shipper.by_hub), *self.mirrors]

    def troubles(self) -> list[str]:
        """Return why something isn't moved, a sentence each; empty if all is well."""
        found = []
        for one in self.all:
            name, target = names(one)
            if one.state != "connected":
                where = "" if isinstance(one, MirrorStatus) else f" to {target}"
                found.append(f"{name}: not connected{where} ({one.state}){f': {one.error}' if one.error else ''}")
            found += [f"{name}: {words}" for words in failed(one)]
        return found


def names(status: ShipStatus | MirrorStatus) -> tuple[str, str]:
    """Return the source and the target."""
    return (status.source, status.root) if isinstance(status, MirrorStatus) else (status.client, status.hub)


def failed(status: ShipStatus | MirrorStatus) -> list[str]:
    """Return the errors of logs or shards that are not moved now."""
    if isinstance(status, MirrorStatus):
        return [f"shard {one.shard} of {one.client} is not pulled: {one.error}" for one in status.shards if one.error]
    return [f"shard {one.shard} is not shipped: {one.error}" for one in status.lanes if one.error]


def exposition(state: ShipState) -> bytes:
    """Return the metrics as text."""
    registry = CollectorRegistry()
    registry.register(_ShipCollector(state))
    return generate_latest(registry)


class _ShipCollector(Collector):
    def __init__(self, state: ShipState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of shippers, by client and hub or by client, and of mirrors, by source and root."""
        yield from _metrics("kvspool_ship", ("client", "hub"), [one for shipper in self._state.shippers for one in shipper.by_hub])
        yield from _copies(self._state.shippers)
        yield from _metrics("kvspool_mirror", ("source", "root"), self._state.mirrors)


def _copies(shippers: Sequence[ShipStatus]) -> Iterator[Metric]:
    for name, text, figure in OF_COPIES:
        metric = GaugeMetricFamily(f"kvspool_ship_{name}", text, labels=("client",))
        for one in shippers:
            metric.add_metric((one.client,), float(figure(one)))
        yield metric


def _metrics(prefix: str, labels: tuple[str, str], found: Sequence[ShipStatus | MirrorStatus]) -> Iterator[Metric]:
    for family, figures in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
        for name, text, figure in figures:
            metric = family(f"{prefix}_{name}", text, labels=labels)
            for one in found:
                metric.add_metric(names(one), float(figure(one)))
            yield metric
