"""A hub's status as Prometheus metrics.

Each client has its own series, up to `MOST_CLIENTS`, the first by their ids; `kvspool_hub_clients_unlisted` counts the others. Shards have
none: 8 for each of 200 clients would be too many. The text format is version 0.0.4, which every scraper supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from hub.protocol.status import ClientStatus, HubStatus, PipelineStatus, TaskListStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_CLIENTS = 1000  # with their own series
MOST_READERS = 100  # with their own series
MOST_PIPELINES = 100  # with their own series
MOST_REASONS = 20  # of one kind, with their own series
NS = 1e9  # per second

NamedClient = tuple[str, ClientStatus]
Figure = Callable[[ClientStatus], float]
CLIENT_COUNTERS: tuple[tuple[str, str, Figure], ...] = (
    ("records", "Records received from the client since the hub started.", lambda client: client.records),
    ("bytes", "Bytes received from the client since the hub started.", lambda client: client.bytes),
    ("gaps", "Gaps that the client declared since the hub started.", lambda client: client.gaps),
    ("duplicate_records", "Records that were already stored, acknowledged without a write.", lambda client: client.duplicates),
)
CLIENT_GAUGES: tuple[tuple[str, str, Figure], ...] = (
    ("connections", "Connections that the client has now.", lambda client: client.connections),
    ("shards", "Shards of the client.", lambda client: len(client.shards)),
    ("stored_records", "Records of the client that the hub holds now.", lambda client: client.stored),
    ("stored_bytes", "Bytes that the client's shards take on disk.", lambda client: client.used),
    ("lost_records", "Sequences of the client in Gaps: lost before they reached the hub.", lambda client: client.lost),
    ("last_seen_timestamp_seconds", "When the client last sent anything, in seconds since 1970.", lambda client: client.last_seen / NS),
)

TASK_GAUGES: tuple[tuple[str, str, Callable[[TaskListStatus], float]], ...] = (
    ("workers", "Workers of the task list.", lambda one: len(one.workers)),
    ("given", "Tasks that a worker has.", lambda one: one.given),
    ("waiting", "Records that no worker has, and that are not acknowledged.", lambda one: one.waiting),
    ("delayed", "Tasks that were given back until a later time.", lambda one: one.delayed),
    ("window", "Most tasks from the lowest one that is not acknowledged to the highest one that was given out.", lambda one: one.window),
    ("window_used", "Tasks from the lowest one that is not acknowledged to the highest one that was given out.", lambda one: one.used),
)
TASK_COUNTERS: tuple[tuple[str, str, Callable[[TaskListStatus], float]], ...] = (
    ("retried", "Deliveries of tasks that had been given before, since the list was created.", lambda one: one.retried),
    ("dead", "Records that became dead letters, since the list was created.", lambda one: one.dead),
)
PIPELINE_GAUGES: tuple[tuple[str, str, Callable[[PipelineStatus], float]], ...] = (
    ("up", "1 if the pipeline runs and sends updates, 0 otherwise.", lambda one: one.state in ("starting", "running")),
    ("failed", "1 if the pipeline ended with an error, 0 otherwise.", lambda one: one.state == "failed"),
    ("records_read", "Records that the pipeline has read since it started.", lambda one: one.records),
    ("records_per_second", "Records a second of the pipeline's last batch.", lambda one: one.rate),
    ("bad_records", "Records that the pipeline could not decode, since it started.", lambda one: one.bad),
    ("late_records", "Rows later than the pipeline's watermark, in no window, since it started.", lambda one: one.late),
    ("last_batch_seconds", "Duration of the pipeline's last batch.", lambda one: one.batch_seconds),
    ("last_batch_timestamp_seconds", "When the pipeline's last batch ended, in seconds since 1970.", lambda one: one.batch_ended / NS),
    ("heard_timestamp_seconds", "When the pipeline last sent an update, in seconds since 1970.", lambda one: one.updated / NS),
)


def exposition(status: HubStatus) -> bytes:
    """Return the metrics of a hub as text."""
    registry = CollectorRegistry()
    registry.register(HubCollector(status))
    return generate_latest(registry)


class HubCollector(Collector):
    """The metrics of one status."""

    def __init__(self, status: HubStatus) -> None:
        """Store a hub's status."""
        self._status = status
        self._clients = sorted({client.client: client for client in status.clients}.items())[:MOST_CLIENTS]

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._hub()
        yield from self._disk()
        yield from self._client_metrics()
        yield from self._readers()
        yield from self._pipelines()

    def _hub(self) -> Iterator[Metric]:
        status = self._status
        facts = {"version": status.version, "root": status.root, "level": status.level, "address": status.address}
        yield InfoMetricFamily("kvspool_hub", "Description of the hub.", facts)
        yield _gauge("healthy", "1 if the hub can do its work, 0 otherwise.", not status.troubles())
        yield _gauge("secure", "1 if clients connect with TLS, 0 otherwise.", status.is_secure)
        yield _gauge("start_time_seconds", "When the hub started, in seconds since 1970.", status.started / NS)
        yield _gauge("connections", "Connections that are open now.", status.connections)
        yield _gauge("clients", "Clients that the hub knows.", len(status.clients))
        yield _gauge("clients_unlisted", "Clients without their own series.", len(status.clients) - len(self._clients))
        yield _by_reason("connections_cut", "Connections that the hub ended.", [((), status.cut)])
        for name, text, count in (("calls", "Calls under way.", status.calls), ("threads", "Threads of the hub.", status.threads)):
            if count is not None:
                yield _gauge(name, text, count)
        if status.refusals is not None:
            yield _by_reason("calls_refused", "Calls that were refused before any work.", [((), status.refusals)])
        if status.certificate_expires:
            expires = status.certificate_expires / NS
            yield _gauge("certificate_expiry_timestamp_seconds", "When the certificate expires, in seconds since 1970.", expires)

    def _disk(self) -> Iterator[Metric]:
        yield _gauge("disk_free_bytes", "Free bytes of the disk that the hub stores on.", self._status.free_bytes)
        yield _gauge("disk_size_bytes", "Size of the disk that the hub stores on.", self._status.disk_bytes)
        yield _gauge("disk_least_free_bytes", "With less free than this the hub refuses batches.", self._status.least_free)

    def _client_metrics(self) -> Iterator[Metric]:
        for name, text, figure in CLIENT_COUNTERS:
            yield _of_clients(CounterMetricFamily, name, text, self._clients, figure)
        for name, text, figure in CLIENT_GAUGES:
            yield _of_clients(GaugeMetricFamily, name, text, self._clients, figure)
        known = [(name, client) for name, client in self._clients if client.behind >= 0]
        text = "Records that the client has and the hub has not, reported or estimated; no value if unknown."
        yield _of_clients(GaugeMetricFamily, "behind_records", text, known, lambda client: client.behind)
        text = "1 if the client is silent, and its lag estimated from its last report and rate; 0 otherwise."
        yield _of_clients(GaugeMetricFamily, "behind_is_estimate", text, known, lambda client: client.behind_is_estimate)
        limited = [(name, client) for name, client in self._clients if client.quota_bytes]
        text = "Bytes that the client may store; no value without a limit."
        yield _of_clients(GaugeMetricFamily, "quota_bytes", text, limited, lambda client: client.quota_bytes)
        refused = [((name,), client.refused) for name, client in self._clients]
        yield _by_reason("client_batches_refused", "Batches that were refused.", refused, "client")

    def _readers(self) -> Iterator[Metric]:
        lag = GaugeMetricFamily("kvspool_hub_reader_lag_records", "Records that a durable reader hasn't committed yet.", labels=["reader"])
        for name, reader in sorted({reader.name: reader for reader in self._status.readers}.items())[:MOST_READERS]:
            lag.add_metric([name], reader.lag)
        yield lag
        text = "Members of a group of processes that shares the shards under a reader's name."
        members = GaugeMetricFamily("kvspool_hub_group_members", text, labels=["group"])
        for reader in self._status.readers[:MOST_READERS]:
            if reader.members:
                members.add_metric([reader.name], len(reader.members))
        yield members
        lists = [(one.name, one.tasks) for one in self._status.readers[:MOST_READERS] if one.tasks is not None]
        for kind, figures in ((GaugeMetricFamily, TASK_GAUGES), (CounterMetricFamily, TASK_COUNTERS)):
            for name, text, figure in figures:
                family = kind(f"kvspool_hub_tasks_{name}", text, labels=["tasks"])
                for one, state in lists:
                    family.add_metric([one], float(figure(state)))
                yield family

    def _pipelines(self) -> Iterator[Metric]:
        found = sorted({one.name: one for one in self._status.pipelines}.items())[:MOST_PIPELINES]
        for name, text, figure in PIPELINE_GAUGES:
            yield _of_pipelines(name, text, found, figure)
        known = [(name, one) for name, one in found if one.lag >= 0]
        text = "Records that the pipeline has yet to read; no value if unknown."
        yield _of_pipelines("lag_records", text, known, lambda one: one.lag)


def _of_pipelines(name: str, text: str, found: Iterable[tuple[str, PipelineStatus]], figure: Callable[[PipelineStatus], float]) -> Metric:
    metric = GaugeMetricFamily(f"kvspool_hub_pipeline_{name}", text, labels=["pipeline"])
    for pipeline, status in found:
        metric.add_metric([pipeline], float(figure(status)))
    return metric


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvspool_hub_{name}", text, value=float(value))


def _of_clients(
    family: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, clients: Iterable[NamedClient], figure: Figure
) -> Metric:
    metric = family(f"kvspool_hub_client_{name}", text, labels=["client"])
    for client, status in clients:
        metric.add_metric([client], figure(status))
    return metric


def _by_reason(name: str, text: str, counts: Iterable[tuple[tuple[str, ...], dict[str, int]]], *labels: str) -> Metric:
    """Return a counter by reason, each with the same other labels before it."""
    family = CounterMetricFamily(f"kvspool_hub_{name}", text, labels=[*labels, "reason"])
    for values, reasons in counts:
        for reason, count in sorted(reasons.items())[:MOST_REASONS]:
            family.add_metric([*values, reason], count)
    return family
