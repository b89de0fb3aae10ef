"""`kvspool.otel`: exporters append, and the shipper delivers to a collector, whatever the collector answers."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

import kvspool
from kvspool.errors import KvspoolError, TooLarge
from kvspool.journal import Retention

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_server import PROTOBUF, OtlpServer, Response, names, rejection

from kvspool.otel import LogExporter, SpanExporter
from kvspool.otel.collector import Collector, CollectorAccess, CollectorEndpoint
from kvspool.otel.errors import CollectorAway, CollectorRefuses, RequestRejected
from kvspool.otel.shipper import CollectorShipper

KILLED = """
import os, signal, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from kvspool.otel import SpanExporter
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(SpanExporter(sys.argv[1])))
for number in range(20):
    with provider.get_tracer("app").start_as_current_span(f"{sys.argv[2]} {number}"):
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "telemetry"


def append(path: Path, *spans: str, **options: Any) -> None:
    """Export each span in a request of its own."""
    provider = TracerProvider(resource=Resource({"service.name": "shop"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(SpanExporter(path, **options)))
    for name in spans:
        provider.get_tracer("app").start_span(name, attributes={"user": 7}).end()
    provider.shutdown()


def deliver(path: Path, endpoint: str, **options: Any) -> Any:
    """Deliver all records, and return the status."""
    with CollectorShipper(path, endpoint, **options) as shipper:
        shipper.run(until_empty=True)
        return shipper.status()


@contextmanager
def running(shipper: CollectorShipper) -> Iterator[None]:
    """Deliver in a thread inside the `with` block."""
    thread = threading.Thread(target=shipper.run)
    thread.start()
    try:
        yield
    finally:
        shipper.stop()
        thread.join()


def test_logs_and_spans_reach_the_collector_as_they_were_exported(log: Path) -> None:
    traces = TracerProvider(resource=Resource({"service.name": "shop"}), shutdown_on_exit=False)
    traces.add_span_processor(BatchSpanProcessor(SpanExporter(log)))
    for number in range(100):
        traces.get_tracer("app").start_span(f"span {number}", attributes={"user": number}).end()
    traces.shutdown()
    logs = LoggerProvider(resource=Resource({"service.name": "shop"}), shutdown_on_exit=False)
    logs.add_log_record_processor(SimpleLogRecordProcessor(LogExporter(log, durable=True)))
    logs.get_logger("app").emit(body="failed: disk", severity_text="ERROR")
    logs.shutdown()
    with OtlpServer() as server:
        status = deliver(log, server.endpoint)
    assert server.items == ["failed: disk", *(f"span {number}" for number in range(100))]
    assert (status.state, status.behind, status.rejected, status.lost) == ("stopped", 0, 0, 0)
    (_, _, request_of_logs), (path, headers, spans) = server.requests
    assert request_of_logs.resource_logs[0].resource.attributes[0].value.string_value == "shop"
    assert (path, headers["Content-Encoding"]) == ("/v1/traces", "gzip")
    assert spans.resource_spans[0].scope_spans[0].spans[7].attributes[0].value.int_value == 7


def test_spans_of_killed_processes_are_delivered_each_once(log: Path) -> None:
    """Each process is killed by SIGKILL right after its last span ended; no collector is there at that time."""
    workers = [subprocess.Popen([sys.executable, "-c", KILLED, log, str(worker)]) for worker in range(2)]
    assert [worker.wait(60) for worker in workers] == [-signal.SIGKILL] * 2
    with OtlpServer() as server:
        deliver(log, server.endpoint)
    assert sorted(server.items) == sorted(f"{worker} {number}" for worker in range(2) for number in range(20))


def test_a_forked_child_exports_with_the_parents_exporter(log: Path) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(SpanExporter(log)))
    provider.get_tracer("app").start_span("parent").end()
    child = os.fork()
    if child == 0:
        provider.get_tracer("app").start_span("child").end()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with OtlpServer() as server:
        deliver(log, server.endpoint)
    assert server.items == ["parent", "child"]


def test_a_batch_that_is_too_large_for_the_log_is_appended_in_parts(log: Path) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    finished = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(finished))
    for number in range(8):
        provider.get_tracer("app").start_span(f"{number}" + "x" * 6000).end()
    exporter = SpanExporter(log, format="spool", capacity="64KiB", reader=None)
    exporter.export(finished.get_finished_spans())
    with kvspool.open(log) as opened:
        sizes = [len(record.value) for record in opened.read()]
    assert len(sizes) > 1
    provider.get_tracer("app").start_span("x" * 20_000).end()
    with pytest.raises(TooLarge):
        exporter.export(finished.get_finished_spans()[-1:])
    with OtlpServer() as server:
        deliver(log, server.endpoint)
    assert [name[0] for name in server.items] == list("01234567")


def test_retention_keeps_records_until_they_are_delivered(log: Path) -> None:
    options: dict[str, Any] = {"retention": Retention(max_bytes=1, by_consumers=True), "segment_bytes": "64KiB"}
    append(log, *(f"{number}" + "x" * 3000 for number in range(60)), **options)
    with kvspool.open(log) as opened:
        assert opened.extent()[0] == 0
    with OtlpServer() as server:
        deliver(log, server.endpoint)
    assert len(server.items) == 60
    append(log, *("x" * 3000 for _ in range(60)), **options)
    with kvspool.open(log) as opened:
        assert opened.extent()[0] > 0


def later(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


PARTIAL = ExportTraceServiceResponse()
PARTIAL.partial_success.rejected_spans = 3
PARTIAL.partial_success.error_message = "too\nold"
HTML = (200, "text/html", b"<html>log in</html>", {})


@pytest.mark.parametrize(
    ("response", "has_accepted", "outcome"),
    [
        ((200, PROTOBUF, b"", {}), False, (0, "")),
        ((202, "", b"", {}), False, (0, "")),
        ((200, PROTOBUF, PARTIAL.SerializeToString(), {}), False, (3, "too old")),
        ((200, "application/json", b'{"partialSuccess": {"rejectedSpans": "3", "new": 1}}', {}), False, (3, "")),
        ((200, PROTOBUF, b"\xff", {}), False, CollectorRefuses),
        (HTML, False, CollectorRefuses),
        (rejection(400, "bad span"), False, RequestRejected),
        (rejection(500, "permanent"), False, RequestRejected),
        ((413, "text/html", b"too large", {}), False, RequestRejected),
        ((400, "text/plain", b"Client sent an HTTP request to an HTTPS server.", {}), False, CollectorRefuses),
        ((400, "text/plain", b"bad", {}), True, RequestRejected),
        ((500, "text/html", b"proxy", {}), True, CollectorRefuses),
        (rejection(401, "who?"), True, CollectorRefuses),
        (rejection(403, "no"), True, CollectorRefuses),
        (rejection(404, "nothing"), True, CollectorRefuses),
        ((302, "", b"", {"Location": "https://elsewhere/"}), True, CollectorRefuses),
        (rejection(429, "slowly", **{"Retry-After": "7"}), True, 7),
        (rejection(503, "later", **{"Retry-After": later(9000)}), False, 9000),
        (rejection(503, "later", **{"Retry-After": "soon"}), False, None),
        ((502, "text/html", b"proxy", {}), False, None),
        ((504, "text/html", b"proxy", {}), False, None),
    ],
)
def test_the_answer_decides_what_happens_to_a_request(response: Response, has_accepted: bool, outcome: Any) -> None:
    """outcome: the content of an accepted answer, an error, or the seconds that the collector asks to wait."""
    answers = [*([None] if has_accepted else []), response]
    with OtlpServer(lambda _: answers.pop(0)) as server:
        collector = Collector(CollectorEndpoint.parse(server.endpoint), CollectorAccess)
        if has_accepted:
            collector.send(b"traces", b"")
        try:
            answer = collector.send(b"traces", b"")
            found: Any = (answer.rejected, answer.message)
        except KvspoolError as error:
            assert str(error).startswith(server.endpoint)
            found = type(error)
            if isinstance(error, CollectorAway):
                found = error.retry_after if error.retry_after in (None, 7) else round(error.retry_after, -3)
        finally:
            collector.close()
    assert found == outcome


def poisoned(items: list[str]) -> Response | None:
    return rejection(400, "the name poison is not allowed") if "poison" in items else None


def test_a_rejected_request_becomes_a_dead_letter_and_all_others_are_delivered(log: Path) -> None:
    append(log, "0", "1", "2", "poison", "4", "5")
    with kvspool.open(log) as opened:
        opened.append({"no": "request"}, key=b"logs")
        opened.append(b"other", key=b"events")
    with OtlpServer(poisoned) as server:
        status = deliver(log, server.endpoint)
    assert server.items == ["0", "1", "2", "4", "5"]
    assert (status.sent, status.rejected, status.behind) == (5, 3, 0)
    with kvspool.open(log) as opened:
        letters = {letter.sequence: letter.error for letter in opened.dead_letters("otlp")}
        assert sorted(letters) == [3, 6, 7]
        assert letters[3] == f"{server.endpoint} answers 400 Bad Request: the name poison is not allowed"
        assert "codec json" in letters[6] and "its key is b'events'" in letters[7]
        assert opened.requeue("otlp") == 3
    with OtlpServer() as server:
        assert deliver(log, server.endpoint).rejected == 2
    assert server.items == ["poison"]


def test_rejected_items_of_accepted_requests_are_counted_and_kept(log: Path) -> None:
    append(log, "one", "two")
    with OtlpServer(lambda _: (200, PROTOBUF, PARTIAL.SerializeToString(), {})) as server:
        status = deliver(log, server.endpoint)
    assert (status.sent, status.rejected, status.rejected_items, status.warning) == (2, 2, 3, "too old")
    with kvspool.open(log) as opened:
        kept = [names(ExportTraceServiceRequest.FromString(letter.value)) for letter in opened.dead_letters("otlp")]
    assert kept == [["one"], ["two"]]


def test_overwritten_records_of_a_ring_are_counted_as_lost(log: Path) -> None:
    append(log, "0" * 5000, *("x" * 5000 for _ in range(40)), format="spool", capacity="64KiB")
    with OtlpServer() as server:
        status = deliver(log, server.endpoint)
    assert status.lost > 0 and status.lost + len(server.items) == 41 and not any(name.startswith("0") for name in server.items)


def test_requests_that_were_not_answered_are_sent_again_until_they_are(log: Path) -> None:
    """The collector is away, then asks for retries, then is too slow; each time the shipper keeps its position."""
    append(log, "one", "two")
    slow = threading.Event()
    answers = iter([rejection(503, "later", **{"Retry-After": "0"}), rejection(429, "later"), "slow", None])

    def answer(items: list[str]) -> Response | None:
        found: Any = next(answers)
        if found == "slow":
            slow.wait(20)
            return rejection(503, "the client has gone")
        return found  # type: ignore[no-any-return]

    with OtlpServer() as closed:
        port = closed.port
    with CollectorShipper(log, f"http://127.0.0.1:{port}", silence=0.2) as shipper, running(shipper):
        while shipper.status().outages == 0:
            threading.Event().wait(0.01)
        assert shipper.status().state == "waiting" and "Connection refused" in shipper.status().error
        with OtlpServer(answer, port=port) as server:
            server.wait_for(2)
            slow.set()
    with kvspool.open(log) as opened:
        assert [reader.sequence for reader in opened.readers()] == [2]


def test_a_stop_during_an_outage_keeps_the_position(log: Path) -> None:
    append(log, "one")
    with OtlpServer() as closed:
        endpoint = closed.endpoint
    with CollectorShipper(log, endpoint) as shipper:
        with running(shipper):
            while shipper.status().outages == 0:
                threading.Event().wait(0.01)
        assert shipper.status().behind == 1
    with OtlpServer() as server:
        deliver(log, server.endpoint)
    assert server.items == ["one"]


@pytest.fixture
def authority() -> Any:
    return pytest.importorskip("trustme").CA()


def contexts(authority: Any, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server with this name and of a client."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(name).configure_cert(server)
    authority.configure_trust(client)
    return server, client


def test_headers_reach_the_collector_over_tls(log: Path, authority: Any) -> None:
    server_context, client = contexts(authority, "localhost")
    append(log, "one")
    with OtlpServer(tls=server_context) as server:
        deliver(log, server.endpoint, access=lambda: CollectorAccess({"Authorization": "Bearer secret"}, client))
    assert server.requests[0][1]["Authorization"] == "Bearer secret" and server.items == ["one"]
    assert "secret" not in repr(CollectorAccess({"Authorization": "Bearer secret"}))


def send_logs(endpoint: str, context: ssl.SSLContext) -> None:
    Collector(CollectorEndpoint.parse(endpoint), lambda: CollectorAccess(context=context)).send(b"logs", b"")


def test_a_wrong_certificate_or_protocol_is_reported_as_such(authority: Any) -> None:
    server_context, client = contexts(authority, "other.example.org")
    with OtlpServer(tls=server_context) as server:
        with pytest.raises(CollectorRefuses, match="Hostname mismatch.*check the name in the address, and --ca"):
            send_logs(server.endpoint, client)
        with pytest.raises(CollectorRefuses, match=r"unable to get local issuer certificate"):
            send_logs(server.endpoint, ssl.create_default_context())
    with OtlpServer() as plain:
        with pytest.raises(CollectorRefuses, match="doesn't speak TLS at this port; use http://"):
            send_logs(plain.endpoint.replace("http:", "https:"), client)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://localhost:4318", "http://localhost:4318"),
        ("https://collector.example.org/otlp/", "https://collector.example.org:443/otlp"),
        ("http://[::1]", "http://[::1]:80"),
        ("localhost:4318", None),
        ("grpc://localhost:4317", None),
        ("http://", None),
        ("http://host:port", None),
        ("http://user:password@host", None),
        ("http://host/?key=1", None),
        ("http://host/a b", None),
    ],
)
def test_an_endpoint_is_a_url_without_credentials(text: str, shown: str | None) -> None:
    if shown is not None:
        assert str(CollectorEndpoint.parse(text)) == shown
        return
    with pytest.raises(ValueError, match="an endpoint") as raised:
        CollectorEndpoint.parse(text)
    assert "password" not in str(raised.value)


def test_small_requests_are_sent_as_they_are_and_compression_can_be_off(log: Path) -> None:
    append(log, *("x" * 500 for _ in range(5)))
    with OtlpServer() as server:
        deliver(log, server.endpoint, compresses=False)
    assert "Content-Encoding" not in server.requests[0][1] and len(server.items) == 5
