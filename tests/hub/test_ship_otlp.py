"""`kvspool ship --otlp`: the command, its wrong words, kills of the shipper, and a collector of the OpenTelemetry project."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Run

import kvspool
import shard

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_server import OtlpServer, Response, rejection

from hub.cli.collectors import headers
from hub.client.ship_metrics import exposition
from hub.client.ship_state import ShipState
from kvspool.otel.shipper import CollectorShipper

KVSPOOL = [sys.executable, "-m", "kvspool.cli"]
COLLECTOR = Path(__file__).parents[2] / "tools" / "collector" / "otelcol"


def request(name: str) -> bytes:
    """Return the request for one span."""
    found = ExportTraceServiceRequest()
    found.resource_spans.add().scope_spans.add().spans.add(name=name, trace_id=bytes(range(16)), span_id=bytes(range(8)))
    return found.SerializeToString()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with 200 requests of one span each."""
    with kvspool.create(tmp_path / "telemetry", format="kvj") as made:
        made.append_many([request(f"span {number}") for number in range(200)], keys=[b"traces"] * 200)
    return tmp_path / "telemetry"


def test_a_log_and_a_shard_set_are_delivered_with_the_headers_of_the_environment(
    log: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a%20b, x-key=1")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    with shard.create(tmp_path / "set", bits=1, format="kvj") as made:
        made.append_many([request("set 0"), request("set 1")], keys=[b"traces"] * 2)
    with OtlpServer() as server:
        said = run("ship", log, tmp_path / "set", "--otlp", server.endpoint, "--once", "--token-file", tmp_path / "token").err
    assert sorted(server.items) == sorted([*(f"span {number}" for number in range(200)), "set 0", "set 1"])
    sent = server.requests[0][1]
    assert (sent["x-tenant"], sent["x-key"], sent["Authorization"]) == ("a b", "1", "Bearer secret")
    assert f"{log}: 200 records" in said and f"to {server.endpoint}, 0 left" in said


@pytest.mark.parametrize(
    ("words", "variables", "error"),
    [
        (["ship", "{log}"], {}, "ship needs a hub after the sources: kvspool ship LOG HUB, or --otlp ENDPOINT for a collector"),
        (["ship", "{log}", "--otlp", "localhost:4318"], {}, "an endpoint is http(s)://HOST:PORT, such as http://localhost:4318"),
        (["ship", "{log}", "--otlp", "http://localhost", "--client", "web"], {}, "--client is for hubs; leave it out with --otlp"),
        (["ship", "{log}", "--otlp", "http://localhost", "--copies", "2"], {}, "--copies and --accept-loss are for hubs"),
        (["ship", "{log}", "--otlp", "http://localhost"], {"OTEL_EXPORTER_OTLP_HEADERS": "a=1,secret"}, "part 2 of it isn't"),
        (["ship", "{log}", "--otlp", "http://localhost"], {"OTEL_EXPORTER_OTLP_HEADERS": "a=1%0aX: 2"}, "part 1 of it isn't"),
        (["ship", "{log}", "--otlp", "http://localhost"], {"OTEL_EXPORTER_OTLP_COMPRESSION": "zip"}, "is gzip or none, not 'zip'"),
        (["ship", "{log}", "--otlp", "http://example.org", "--token-file", "{log}.token"], {}, "would get the token in plain text"),
        (["ship", "{log}", "--otlp", "https://localhost", "--key", "{log}.token"], {}, "--certificate and --key go together"),
        (["ship", "{log}", "--otlp", "https://localhost", "--ca", "{log}.token"], {}, "can't be used for TLS"),
    ],
)
def test_wrong_words_are_reported_with_a_way_out(
    log: Path, words: list[str], variables: dict[str, str], error: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = Path(f"{log}.token")
    token.write_text("secret")
    token.chmod(0o600)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = run(*(word.format(log=log) for word in words), code=2).err
    assert error in said and "secret" not in said


def test_headers_are_read_as_other_exporters_read_them() -> None:
    assert headers("") == {} and headers("a=b=c, d=%C3%A9".replace("%C3%A9", "e")) == {"a": "b=c", "d": "e"}


def ship(log: Path, server: OtlpServer) -> subprocess.Popen[str]:
    words = [*KVSPOOL, "ship", str(log), "--otlp", server.endpoint, "--once"]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def test_a_shipper_that_is_killed_delivers_every_request_at_least_once(log: Path) -> None:
    """It is killed while the collector has its request and before the answer; and again after the answer, before or after its commit."""
    got, go_on = threading.Event(), threading.Event()

    def answer(items: list[str]) -> Response | None:
        got.set()
        go_on.wait(60)
        return None

    with OtlpServer(answer) as server:
        first = ship(log, server)
        assert got.wait(60)
        first.kill()
        first.communicate()
        go_on.set()
        server.wait_for(200)
        second = ship(log, server)
        server.wait_for(400)
        second.kill()
        second.communicate()
        third = ship(log, server)
        assert third.communicate(timeout=60)[0] is None and third.returncode == 0
    assert set(server.items) == {f"span {number}" for number in range(200)}
    with kvspool.open(log) as opened:
        assert opened.readers()[0].sequence == 200


def test_a_signal_ends_the_command_quietly_and_the_state_is_shown(log: Path, tmp_path: Path, run: Run) -> None:
    with OtlpServer(lambda _: rejection(401, "unknown token")) as server:
        words = [*KVSPOOL, "ship", str(log), "--otlp", server.endpoint, "--status", str(tmp_path / "status.sock")]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        while not server.requests:
            time.sleep(0.02)
        while "unknown token" not in run("ship", "status", tmp_path / "status.sock", code=1).err:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors
    assert "answers 401 Unauthorized: unknown token; check the token, and the headers in OTEL_EXPORTER_OTLP_HEADERS" in errors


def test_the_metrics_count_what_was_delivered_and_rejected(log: Path) -> None:
    with kvspool.open(log) as opened:
        opened.append(b"other", key=b"events")
    with OtlpServer() as server, CollectorShipper(log, server.endpoint) as shipper:
        shipper.run(until_empty=True)
        lines = exposition(ShipState.of([shipper])).decode().splitlines()
    labels = f'{{endpoint="{server.endpoint}",log="{log}"}}'
    assert {f"kvspool_otlp_records_total{labels} 200.0", f"kvspool_otlp_rejected_records_total{labels} 1.0"} <= set(lines)


def otelcol() -> str | None:
    """Return the path of a collector, if there is one: tools/collector builds it."""
    return shutil.which("otelcol") or (str(COLLECTOR) if COLLECTOR.exists() else None)


@pytest.mark.skipif(otelcol() is None, reason="no otelcol; HACKING.md says how to build it")
def test_the_collector_of_opentelemetry_takes_every_request(log: Path, tmp_path: Path) -> None:
    """It is started after the shipper, killed in between, and started again; a request that it rejects is a dead letter."""
    with kvspool.open(log) as opened:
        opened.append(b"\xff", key=b"logs")
    received = tmp_path / "received.json"
    configuration = tmp_path / "otelcol.yaml"
    with OtlpServer() as unused:
        port = unused.port
    configuration.write_text(
        f"receivers: {{otlp: {{protocols: {{http: {{endpoint: 127.0.0.1:{port}}}}}}}}}\n"
        f"exporters: {{file: {{path: {received}, append: true}}}}\n"
        "service:\n"
        "  telemetry: {metrics: {level: none}}\n"
        "  pipelines:\n"
        "    traces: {receivers: [otlp], exporters: [file]}\n"
        "    logs: {receivers: [otlp], exporters: [file]}\n"
    )
    with CollectorShipper(log, f"http://127.0.0.1:{port}") as shipper:
        thread = threading.Thread(target=shipper.run)
        thread.start()
        try:
            for round in range(2):
                with subprocess.Popen([str(otelcol()), "--config", configuration], stderr=subprocess.DEVNULL) as process:
                    try:
                        while shipper.status().behind:
                            assert process.poll() is None
                            time.sleep(0.02)
                    finally:
                        process.send_signal(signal.SIGTERM if round else signal.SIGINT)
                if not round:
                    with kvspool.open(log) as opened:
                        opened.append_many([request(f"late {number}") for number in range(100)], keys=[b"traces"] * 100)
        finally:
            shipper.stop()
            thread.join()
        status = shipper.status()
    assert (status.rejected, status.lost) == (1, 0)
    assert spans(received) == {*(f"span {number}" for number in range(200)), *(f"late {number}" for number in range(100))}
    with kvspool.open(log) as opened:
        (letter,) = opened.dead_letters("otlp")
    assert "answers 400 Bad Request" in letter.error and os.fspath(log) == letter.log


def spans(received: Path) -> set[str]:
    """Return the names of the spans in the file of a collector."""
    found: set[str] = set()
    for line in received.read_text().splitlines():
        data: dict[str, Any] = json.loads(line)
        found |= {span["name"] for one in data.get("resourceSpans", ()) for scope in one["scopeSpans"] for span in scope["spans"]}
    return found
