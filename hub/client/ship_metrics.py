"""The metrics of running shippers and mirrors, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from hub.client.ship_state import ShipState, WayStatus, failed, moved, names
from hub.client.ship_status import ShipStatus
from kvspool.errors import MissingExtra
from kvspool.otel.status import CollectorStatus

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra.of("hub", "metrics need a package that isn't installed", error) from error

S = TypeVar("S")
Figure = Callable[[WayStatus], float]
COUNTERS: tuple[tuple[str, str, Figure], ...] = (
    ("records", "Records moved, repeated ones counted again.", moved),
    ("bytes", "Bytes moved.", lambda one: one.bytes),
    ("lost_records", "Sequences that were lost before they could be moved.", lambda one: one.lost),
    ("outages", "Connections that broke or were refused.", lambda one: one.outages),
)
GAUGES: tuple[tuple[str, str, Figure], ...] = (
    ("connected", "1 if connected to the other end, 0 otherwise.", lambda one: one.state == "connected"),
    ("behind_records", "Records that are still to be moved.", lambda one: one.behind),
    ("failed_logs", "Logs or shards that are not moved now because of an error.", lambda one: len(failed(one))),
)
OF_COLLECTORS: tuple[tuple[str, str, Callable[[CollectorStatus], float]], ...] = (
    ("requests", "Requests that the collector accepted.", lambda one: one.requests),
    ("rejected_records", "Records that became dead letters.", lambda one: one.rejected),
    ("rejected_items", "Parts of accepted requests that the collector rejected, such as spans.", lambda one: one.rejected_items),
)
OF_COPIES: tuple[tuple[str, str, Callable[[ShipStatus], float]], ...] = (
    ("copies", "Hubs that get a copy of each record.", lambda one: len(one.by_hub)),
    ("required_copies", "Hubs that have to store a record before the log may forget it.", lambda one: one.acks),
    ("connected_copies", "Hubs that are connected now.", lambda one: sum(part.state == "connected" for part in one.by_hub)),
    ("unacknowledged_records", "Records that too few hubs have stored.", lambda one: one.behind),
)


def exposition(state: ShipState) -> bytes:
    """Return the metrics as text."""
    registry = CollectorRegistry()
    registry.register(_ShipCollector(state))
    return generate_latest(registry)


class _ShipCollector(Collector):
    def __init__(self, state: ShipState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of shippers, by client and hub or by client; of mirrors, by source and root; and of collectors."""
        state = self._state
        ways: tuple[tuple[str, tuple[str, str], Sequence[WayStatus]], ...] = (
            ("kvspool_ship", ("client", "hub"), [one for shipper in state.shippers for one in shipper.by_hub]),
            ("kvspool_mirror", ("source", "root"), state.mirrors),
            ("kvspool_otlp", ("log", "endpoint"), state.collectors),
        )
        for prefix, labels, found in ways:
            yield from _families(CounterMetricFamily, prefix, labels, COUNTERS, found, names)
            yield from _families(GaugeMetricFamily, prefix, labels, GAUGES, found, names)
        yield from _families(GaugeMetricFamily, "kvspool_ship", ("client",), OF_COPIES, state.shippers, lambda one: (one.client,))
        yield from _families(CounterMetricFamily, "kvspool_otlp", ("log", "endpoint"), OF_COLLECTORS, state.collectors, names)


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    prefix: str,
    labels: Sequence[str],
    figures: Iterable[tuple[str, str, Callable[[S], float]]],
    found: Sequence[S],
    labels_of: Callable[[S], Sequence[str]],
) -> Iterator[Metric]:
    """Yield a family for each figure, with a series for each state."""
    for name, text, figure in figures:
        family = kind(f"{prefix}_{name}", text, labels=labels)
        for one in found:
            family.add_metric(labels_of(one), float(figure(one)))
        yield family
