"""The hub's page: its answers, permissions, and protections."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hub_statuses import DAY, GIB, SECOND, TASKS, Told, client, hub, pipeline, shard
from prometheus_client.parser import text_string_to_metric_families

import hub as hub_package
from hub.protocol.status import HubStatus, MemberStatus, ReaderStatus
from hub.web import history, metrics, page, site
from hub.web.history import Histories, RateBuffer, TrafficRates
from hub.web.page import HubPage
from kvspool.errors import Closed

HOSTILE = '"><script>alert(1)</script>\n</style>\\{}'
PATHS = ["/", "/hub.css", "/hub.js", "/api/status", "/api/history?client=JFK", "/api/records?client=JFK&shard=0", "/metrics", "/healthz"]
PATHS += ["/nowhere"]
STATIC = Path(hub_package.__file__).parent / "web" / "static"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def told() -> Told:
    return some_hub()


@pytest.fixture
def served(told: Told) -> Iterator[HubPage]:
    """A page of the test's own, of a hub that it may tell what to say."""
    with HubPage(told) as served:
        yield served


@pytest.fixture(scope="module")
def steady() -> Iterator[HubPage]:
    """A page for all tests that only ask."""
    with HubPage(some_hub(), ("127.0.0.1", 0), names=["hub.example.org", "2001:DB8::1"]) as served:
        wait_for(lambda: fetch(served, "/api/history?client=JFK").status_code == 200)
        yield served


@pytest.fixture
def get(steady: HubPage) -> Callable[..., httpx.Response]:
    """Ask the steady page: `get(path, **headers)`, with _ for - in the names of the headers."""
    return partial(fetch, steady)


def some_hub() -> Told:
    return Told(hub([client("JFK", records=5, bytes=500, last_seen=SECOND), client("LGA", connections=0)]))


def browser(served: HubPage) -> httpx.Client:
    return httpx.Client(base_url=served.url, trust_env=False, verify=False, timeout=30)


def fetch(served: HubPage, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    with browser(served) as asking:
        return asking.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})


def wait_for(what: Callable[[], Any]) -> Any:
    """Return the first true result; fail if there is none in time."""
    for _ in range(3000):
        if found := what():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come about")


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the data of a stream of server-sent events."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


# Answers.


def test_the_page_and_what_belongs_to_it_come_from_here(get: Callable[..., httpx.Response]) -> None:
    scripts = [(f"/{name}", name, "text/javascript") for name in site.SCRIPTS]
    for path, name, kind in (("/", "hub.html", "text/html"), ("/hub.css", "hub.css", "text/css"), *scripts):
        answer = get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert answer.content == (STATIC / name).read_bytes()


def test_nothing_of_the_page_is_inline_or_comes_from_elsewhere() -> None:
    text = (STATIC / "hub.html").read_text(encoding="utf-8")
    assert "<style" not in text and " style=" not in text and " on" not in text.replace(" on a host", "").lower().split("<body>")[0]
    assert text.count("<script") == len(site.SCRIPTS)
    assert all(f'<script src="{name}" defer></script>' in text for name in site.SCRIPTS)
    assert {path.name for path in STATIC.iterdir()} == {"hub.html", "hub.css", *site.SCRIPTS}
    everything = "".join(path.read_text(encoding="utf-8") for path in sorted(STATIC.iterdir()))
    for stranger in ("https:", "//cdn", "@import", "url(", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert stranger not in everything
    assert everything.replace("http://www.w3.org/2000/svg", "").count("http:") == 0


def test_the_status_comes_as_json_with_rates_and_history(told: Told, served: HubPage) -> None:
    get = partial(fetch, served)
    first = get("/api/status").json()
    assert [one["client"] for one in first["status"]["clients"]] == ["JFK", "LGA"]
    assert first["status"]["clients"][0]["shards"][1]["next_sequence"] == 1000
    assert (first["failure"], first["troubles"], first["status"]["error"]) == ("", [], "")
    told.tell(hub([client("JFK", records=5000, bytes=500_000, connections=2)]))
    rates = wait_for(lambda: get("/api/status").json()["clients"].get("JFK", {}).get("records"))
    assert rates > 0
    report = get("/api/status").json()
    rows = report["history"]["seconds"]
    assert rows["step"] == 1 and report["history"]["minutes"]["step"] == 60
    assert max(rows["records"]) > 0 and max(rows["bytes"]) > max(rows["records"]) and rows["connections"][-1] == 2
    assert max(report["recent"]["JFK"]) > 0
    own = get("/api/history?client=JFK").json()
    assert max(own["seconds"]["records"]) > 0 and len(own["minutes"]["bytes"]) >= 1
    assert get("/api/history?client=LGA").status_code == 404  # it is gone


def test_events_come_without_being_asked_for_and_end_with_the_page(told: Told, served: HubPage) -> None:
    with browser(served) as asking, asking.stream("GET", "/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        stream = events(answer)
        assert [one["client"] for one in next(stream)["status"]["clients"]] == ["JFK", "LGA"]
        told.tell(hub([client("SEA")]))
        assert any([one["client"] for one in event["status"]["clients"]] == ["SEA"] for event in stream)
        told.tell(RuntimeError("the root is gone"))
        failed = next(event for event in stream if event["failure"])
        assert failed["failure"] == "the hub's status failed: RuntimeError: the root is gone"
        assert failed["status"]["clients"][0]["client"] == "SEA"  # what it said last
        threading.Thread(target=served.close).start()
        list(stream)  # it ends, and is whole: otherwise httpx raises RemoteProtocolError
    wait_for(lambda: served.listeners == 0)


def test_a_stream_stops_when_its_browser_goes_and_the_number_of_streams_is_bounded(
    served: HubPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "MOST_LISTENERS", 2)
    with browser(served) as asking:
        with asking.stream("GET", "/events") as first, asking.stream("GET", "/events") as second:
            assert first.status_code == second.status_code == 200
            assert served.listeners == 2
            refused = asking.get("/events")
            assert (refused.status_code, refused.text) == (503, "2 pages are already open; close one\n")
        wait_for(lambda: served.listeners == 0)
        with asking.stream("GET", "/events") as third:
            assert third.status_code == 200


def test_a_hub_is_asked_once_a_second_however_many_look(told: Told, served: HubPage) -> None:
    started, before = time.monotonic(), told.asked
    for _ in range(50):
        assert fetch(served, "/metrics").status_code == 200
    assert told.asked - before <= time.monotonic() - started + 1


# Health.


def test_a_healthy_hub_is_ok(get: Callable[..., httpx.Response]) -> None:
    assert (get("/healthz").status_code, get("/healthz").text) == (200, "ok\n")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(free_bytes=4 * GIB), "the disk has 4.0 GiB free, less than its mark of 5.0 GiB: batches are refused"),
        (dict(certificate_expires=SECOND), "the certificate has expired: clients refuse to connect"),
        (dict(error="the listener ended"), "the listener ended"),
        (dict(error="a", free_bytes=0), "a; the disk has 0 B free, less than its mark of 5.0 GiB: batches are refused"),
    ],
)
def test_what_keeps_a_hub_from_its_work_is_said(told: Told, fields: dict[str, Any], reason: str) -> None:
    told.tell(hub([], **fields))
    with HubPage(told) as served:
        answer = fetch(served, "/healthz")
        assert (answer.status_code, answer.text) == (503, f"{reason}\n")
        assert fetch(served, "/api/status").json()["troubles"] == reason.split("; ")
        assert "kvspool_hub_healthy 0.0" in fetch(served, "/metrics").text


@pytest.mark.parametrize("fields", [dict(certificate_expires=0, is_secure=False), dict(free_bytes=5 * GIB), dict(connections=9)])
def test_what_keeps_no_hub_from_its_work_is_no_trouble(fields: dict[str, Any]) -> None:
    assert hub([], **fields).troubles() == []


def test_a_status_that_fails_is_said_and_no_figures_pass_for_new(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.tell(PermissionError(f"{HOSTILE}\udcff"))
    with HubPage(told) as served:
        reason = "the hub's status failed: PermissionError: "
        for path in ("/healthz", "/metrics"):
            answer = fetch(served, path)
            assert answer.status_code == 503 and answer.text.startswith(reason)
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        report = fetch(served, "/api/status").json()
        assert report["status"] is None and report["failure"].startswith(reason)
        asked = told.asked
        wait_for(lambda: told.asked > asked)
        told.tell(hub([]))
        wait_for(lambda: fetch(served, "/healthz").status_code == 200)
    assert [line.message for line in caplog.records] == ["the hub's page can't get the status"]  # once


def test_a_hub_that_hangs_is_not_healthy_and_does_not_keep_the_page_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "STALE", 0.05)
    monkeypatch.setattr(site, "HEARTBEAT", 0.1)
    monkeypatch.setattr(page, "STOP", 0.1)
    hangs, goes_on = threading.Event(), threading.Event()
    answers = iter([hub([])])

    def status() -> HubStatus:
        for answer in answers:
            return answer
        hangs.set()
        goes_on.wait()
        return hub([])

    before = set(threading.enumerate())
    served = HubPage(status).start()
    assert hangs.wait(30)
    answer = fetch(served, "/healthz")
    assert answer.status_code == 503 and re.fullmatch(r"the hub has sent no status for \d s\n", answer.text)
    with browser(served) as asking, asking.stream("GET", "/events") as stream:
        assert any(event["failure"].startswith("the hub has sent no status for") for event in events(stream))
    served.close()
    assert [thread.name for thread in threading.enumerate() if thread not in before] == ["hub-page-status"]
    goes_on.set()
    wait_for(lambda: set(threading.enumerate()) <= before)


# Metrics.


def scraped(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return samples as Prometheus reads them: the name, the values of the labels, the value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith((".", "no value if unknown", "no value without a limit")), family.name
        for name, labels, value, *_ in family.samples:
            values = tuple(labels.values())
            assert values not in found.setdefault(name, {}), f"{name}{values} comes twice"
            found[name][values] = value
    return found


def test_prometheus_reads_the_metrics(get: Callable[..., httpx.Response]) -> None:
    answer = get("/metrics", Accept="application/openmetrics-text; version=1e999")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = scraped(answer.text)
    assert found["kvspool_hub_client_records_total"] == {("JFK",): 5, ("LGA",): 0}
    assert found["kvspool_hub_client_bytes_total"] == {("JFK",): 500, ("LGA",): 0}
    assert found["kvspool_hub_client_connections"] == {("JFK",): 1, ("LGA",): 0}
    assert found["kvspool_hub_client_stored_records"] == {("JFK",): 2000, ("LGA",): 2000}
    assert found["kvspool_hub_client_last_seen_timestamp_seconds"] == {("JFK",): 1, ("LGA",): 0}
    assert found["kvspool_hub_healthy"] == {(): 1}
    assert found["kvspool_hub_disk_free_bytes"] == {(): 60 * GIB}


def test_every_figure_has_a_metric() -> None:
    shards = [shard(0, lost=3, behind=-1, used=10), shard(1, lost=4, behind=7, used=20)]
    one = client("JFK", shards=shards, gaps=2, duplicates=8, refused={"quota": 4, "conflict": 1}, quota_bytes=GIB)
    unknown = client("LGA", shards=[shard(0, behind=-1)])
    status = hub([one, unknown], cut={"idle": 6}, readers=[ReaderStatus(name="spark", lag=11)], certificate_expires=DAY)
    found = scraped(metrics.exposition(status).decode())
    assert found["kvspool_hub_client_lost_records"] == {("JFK",): 7, ("LGA",): 0}
    assert found["kvspool_hub_client_behind_records"] == {("JFK",): 7}
    assert found["kvspool_hub_client_behind_is_estimate"] == {("JFK",): 0}
    assert found["kvspool_hub_client_stored_bytes"][("JFK",)] == 30
    assert found["kvspool_hub_client_shards"][("JFK",)] == 2
    assert found["kvspool_hub_client_gaps_total"][("JFK",)] == 2
    assert found["kvspool_hub_client_duplicate_records_total"][("JFK",)] == 8
    assert found["kvspool_hub_client_batches_refused_total"] == {("JFK", "conflict"): 1, ("JFK", "quota"): 4}
    assert found["kvspool_hub_client_quota_bytes"] == {("JFK",): GIB}
    assert found["kvspool_hub_connections_cut_total"] == {("idle",): 6}
    assert found["kvspool_hub_reader_lag_records"] == {("spark",): 11}
    assert found["kvspool_hub_certificate_expiry_timestamp_seconds"] == {(): 86_400}
    assert set(found["kvspool_hub_info"].popitem()[0]) == {"1.0", "/var/lib/kvspool/hub", "disk", "hub.example.org:8815"}
    assert found["kvspool_hub_start_time_seconds"] == {(): status.started / 1e9}
    assert found["kvspool_hub_disk_size_bytes"] == {(): 100 * GIB} and found["kvspool_hub_disk_least_free_bytes"] == {(): 5 * GIB}
    assert found["kvspool_hub_connections"] == {(): 2} and found["kvspool_hub_secure"] == {(): 1}


def test_an_estimated_lag_and_figures_of_calls_have_metrics() -> None:
    silent = client("JFK", shards=[shard(0, behind=12_000, behind_is_estimate=True), shard(1, behind=1)])
    found = scraped(metrics.exposition(hub([silent], calls=3, threads=20, refusals={"full": 2})).decode())
    assert found["kvspool_hub_client_behind_records"] == {("JFK",): 12_001}
    assert found["kvspool_hub_client_behind_is_estimate"] == {("JFK",): 1}
    assert (found["kvspool_hub_calls"], found["kvspool_hub_threads"]) == ({(): 3}, {(): 20})
    assert found["kvspool_hub_calls_refused_total"] == {("full",): 2}
    found = scraped(metrics.exposition(hub([])).decode())
    assert not {"kvspool_hub_calls", "kvspool_hub_threads", "kvspool_hub_calls_refused_total"} & found.keys()


def test_pipelines_have_metrics() -> None:
    running = pipeline("delays", updated=5 * 10**9)
    found = scraped(metrics.exposition(hub([], pipelines=[running, pipeline("dead", state="silent", lag=-1)])).decode())
    assert found["kvspool_hub_pipeline_up"] == {("delays",): 1, ("dead",): 0}
    assert found["kvspool_hub_pipeline_failed"] == {("delays",): 0, ("dead",): 0}
    assert found["kvspool_hub_pipeline_lag_records"] == {("delays",): 12}
    assert found["kvspool_hub_pipeline_records_read"][("delays",)] == 5000
    assert found["kvspool_hub_pipeline_records_per_second"][("delays",)] == 250.5
    assert found["kvspool_hub_pipeline_bad_records"][("delays",)] == 3
    assert found["kvspool_hub_pipeline_late_records"][("delays",)] == 4
    assert found["kvspool_hub_pipeline_last_batch_seconds"][("delays",)] == 1.5
    assert found["kvspool_hub_pipeline_heard_timestamp_seconds"][("delays",)] == 5


def test_task_lists_have_metrics() -> None:
    readers = [ReaderStatus(name="thumbnails", lag=9, tasks=TASKS), ReaderStatus(name="spark", lag=1)]
    found = scraped(metrics.exposition(hub([], readers=readers)).decode())
    figures = {name.removeprefix("kvspool_hub_tasks_"): one for name, one in found.items() if name.startswith("kvspool_hub_tasks_")}
    counted = {"given": 2, "waiting": 7, "delayed": 1, "retried_total": 4, "dead_total": 3, "window": 64, "window_used": 5, "workers": 1}
    assert figures == {name: {("thumbnails",): figure} for name, figure in counted.items()}


def test_the_docs_name_every_metric() -> None:
    text = (ROOT / "docs" / "hub-page.md").read_text(encoding="utf-8")
    one = client("JFK", quota_bytes=1, refused={"quota": 1})
    readers = [ReaderStatus(name="spark", lag=1, members=[MemberStatus(process="1", joined=1, shards=1)], tasks=TASKS)]
    status = hub([one], cut={"idle": 1}, readers=readers, pipelines=[pipeline("delays")], calls=1, threads=1, refusals={"full": 1})
    for name in scraped(metrics.exposition(status).decode()):
        short = name.removeprefix("kvspool_hub").removeprefix("_client" if "_client_" in name else "")
        assert f"`{short}`" in text or f"`{name}`" in text, name


def test_labels_are_bounded_and_hostile_names_stay_names() -> None:
    names = [f"client-{number:04}" for number in range(metrics.MOST_CLIENTS)]
    status = hub([client(name, bits=0) for name in [*names, "zzz", HOSTILE]], readers=[ReaderStatus(name=HOSTILE, lag=1)] * 2)
    found = scraped(metrics.exposition(status).decode())
    assert [*found["kvspool_hub_client_records_total"]] == sorted([(name,) for name in names[:-1]] + [(HOSTILE,)])
    assert found["kvspool_hub_clients"] == {(): metrics.MOST_CLIENTS + 2}
    assert found["kvspool_hub_clients_unlisted"] == {(): 2}
    assert found["kvspool_hub_reader_lag_records"] == {(HOSTILE,): 1}


# Permissions.


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_strict_headers(get: Callable[..., httpx.Response], path: str) -> None:
    for answer in (get(path), get(path, Host="evil.example"), get(path, Sec_Fetch_Site="cross-site")):
        headers = answer.headers
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'" and policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers and "server" not in headers and "set-cookie" not in headers


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "127.0.0.1:8816", "[::1]", "[::1]:8816", "hub.example.org", "HUB.example.org:80", "[2001:db8::1]:8816"],
)
def test_the_page_answers_to_its_names(get: Callable[..., httpx.Response], host: str) -> None:
    assert get("/api/status", Host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:127.0.0.1", "127.0.0.2", "0.0.0.0", "", "localhost:80:80", "::1"],
)
def test_a_foreign_name_for_this_address_is_refused(get: Callable[..., httpx.Response], host: str) -> None:
    for path in PATHS:
        answer = get(path, Host=host)
        assert answer.status_code == 421 and "has no such name" in answer.text


def test_two_hosts_or_none_are_refused(served: HubPage) -> None:
    for host in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(served.address) as connection:
            connection.settimeout(30)
            connection.sendall(b"GET /api/status HTTP/1.0\r\n" + host + b"\r\n")
            assert connection.recv(1000).split()[1] in (b"421", b"400")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"])
def test_there_is_nothing_here_but_to_get(steady: HubPage, method: str) -> None:
    for path in PATHS:
        answer = fetch(steady, path, method)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


def test_another_site_may_link_here_and_fetch_nothing(get: Callable[..., httpx.Response]) -> None:
    for site_ in ("cross-site", "same-site"):
        assert get("/", Sec_Fetch_Site=site_).status_code == 200
        assert {get(path, Sec_Fetch_Site=site_).status_code for path in PATHS[1:]} == {403}
    for site_ in ("none", "same-origin"):
        assert get("/api/status", Sec_Fetch_Site=site_).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/static/hub.js", "/../site.py", "/%2e%2e/site.py", "/hub.js/", "/api/history"])
def test_there_is_nothing_elsewhere(get: Callable[..., httpx.Response], path: str) -> None:
    assert get(path).status_code in (404, 307)
    assert "import" not in get(path).text


def test_hostile_names_are_data(told: Told, served: HubPage) -> None:
    get = partial(fetch, served)
    told.tell(hub([client(HOSTILE, refused={HOSTILE: 1})], root=HOSTILE, readers=[ReaderStatus(name=HOSTILE, lag=1)], cut={HOSTILE: 1}))
    report = wait_for(lambda: found if (found := get("/api/status").json())["status"]["root"] == HOSTILE else None)
    assert report["status"]["clients"][0]["client"] == HOSTILE
    assert get("/").content == (STATIC / "hub.html").read_bytes()  # nothing is put into it
    assert scraped(get("/metrics").text)["kvspool_hub_client_batches_refused_total"] == {(HOSTILE, HOSTILE): 1}
    assert get("/api/history", Cookie=HOSTILE.replace("\n", "")).headers["content-type"] == "text/plain; charset=utf-8"


def test_a_hostile_name_does_not_end_an_event_early(told: Told) -> None:
    told.tell(hub([client("a\n\ndata: {}\n\n")]))
    with HubPage(told) as served, browser(served) as asking, asking.stream("GET", "/events") as answer:
        assert next(events(answer))["status"]["clients"][0]["client"] == "a\n\ndata: {}\n\n"


# Connections.


def is_cut(connection: socket.socket) -> bool:
    """Wait until the other side ends a connection."""
    connection.settimeout(30)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_who_asks_nothing_or_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PATIENCE", 0.3)
    clients = [client(f"{'a' * 90}-{number}", bits=5) for number in range(300)]  # an event is more than the kernel holds for one
    with HubPage(Told(hub(clients))) as served:
        idle, slow, deaf = (socket.socket() for _ in range(3))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with idle, slow, deaf:
            for connection in (idle, slow, deaf):
                connection.connect(served.address)
            slow.sendall(b"GET / HTTP/1.1\r\nHost: loc")
            deaf.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_for(lambda: served.listeners == 1)
            assert is_cut(idle) and is_cut(slow)
            wait_for(lambda: served.listeners == 0)


def test_a_stream_lives_longer_than_a_question_may_take(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(page, "PATIENCE", 0.2)
    with HubPage(told) as served, browser(served) as asking, asking.stream("GET", "/events") as answer:
        stream = events(answer)
        assert all(next(stream)["status"] for _ in range(3))


def test_the_number_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(page, "MOST_CONNECTIONS", 3)
    with HubPage(told) as served:
        held = [socket.create_connection(served.address) for _ in range(3)]
        assert is_cut(held_one_more := socket.create_connection(served.address))
        held_one_more.close()
        held.pop().close()
        wait_for(lambda: answers(served))
        for connection in held:
            connection.close()


def answers(served: HubPage) -> bool:
    try:
        return fetch(served, "/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_garbage_is_refused_without_filling_the_log(served: HubPage, caplog: pytest.LogCaptureFixture) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\n\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"GET / HTTP/9\r\n\r\n"):
        with socket.create_connection(served.address) as connection:
            try:
                connection.sendall(garbage)
            except ConnectionError:
                continue
            assert is_cut(connection)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "MTIzNDU2Nzg5MA=="}
    assert fetch(served, "/api/status", **upgrade).json()["status"]  # it continues as HTTP
    assert caplog.records == []
    assert fetch(served, "/healthz").status_code == 200


# Starting and stopping.


def test_it_starts_and_stops_and_leaves_nothing(told: Told) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = threading.active_count()
        with HubPage(told) as served:
            assert served.url == f"http://127.0.0.1:{served.address[1]}/"
            assert fetch(served, "/").status_code == 200
            address = served.address
        served.close()
        assert threading.active_count() == threads
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address).close()
        with HubPage(told, address) as again:  # the same port, at once
            assert again.address == address


def test_a_page_is_of_one_use(told: Told) -> None:
    served = HubPage(told)
    with pytest.raises(Closed, match="before it is started"):
        served.address  # noqa: B018
    served.close()
    with pytest.raises(Closed, match="create another one"):
        served.start()


def test_a_port_that_is_taken_is_said(served: HubPage, told: Told) -> None:
    with pytest.raises(OSError, match="in use") as raised:
        HubPage(told, served.address).start()
    assert raised.value.__notes__ == [f"while the hub's page tried to listen on 127.0.0.1 port {served.address[1]}"]


def test_it_listens_on_ipv6(told: Told) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"there is no IPv6 here ({error})")
    with HubPage(told, ("::1", 0)) as served:
        assert served.url.startswith("http://[::1]:")
        assert fetch(served, "/healthz").text == "ok\n"


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "prometheus_client"])
def test_without_the_extra_it_says_what_to_install(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import hub.web.page"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert "kvspool.errors.MissingExtra: the hub's page needs a package that isn't installed" in done.stderr
    assert re.search(rf"The extra hub has it: pip install .*'{package.replace('_', '-')}>=", done.stderr)


def test_nothing_is_left_open_however_often_it_starts(told: Told) -> None:
    before = None
    for _ in range(5):
        with HubPage(told) as served, browser(served) as asking, asking.stream("GET", "/events") as answer:
            next(events(answer))
        left = (len(os.listdir("/proc/self/fd")), threading.active_count())
        assert left == (before := before or left)


def test_several_pages_serve_side_by_side() -> None:
    with HubPage(Told(hub([client("A")]))) as one, HubPage(Told(hub([client("B")]))) as other:
        names = [fetch(each, "/api/status").json()["status"]["clients"][0]["client"] for each in (one, other)]
        assert names == ["A", "B"]


# History.


def test_a_ring_keeps_the_last_steps_and_says_where_no_sample_was_taken() -> None:
    ring = RateBuffer(1, 4)
    assert ring.rows() == history.RateSeries(1, [], [], [])
    for at, records in ((10.5, 1), (11.4, 2), (11.6, 4), (13.5, 5)):
        ring.add(at, TrafficRates(records, 10 * records, 1))
    rows = ring.rows()
    assert rows.records[:2] == [1, 3] and math.isnan(rows.records[2]) and rows.records[3] == 5
    assert rows.bytes[1] == 30
    ring.add(14.5, TrafficRates(6, 0, 0))
    assert ring.rows().records[0] == 3 and len(ring.rows().records) == 4
    assert ring.rows(2).records == [5, 6]
    ring.add(1e9, TrafficRates(7, 0, 0))
    assert [value for value in ring.rows().records if not math.isnan(value)] == [7]


def test_minutes_are_the_mean_of_their_seconds() -> None:
    one = history.History()
    for second in range(7200):
        one.add(second + 0.5, TrafficRates(second // 60, 0, 0))
    assert one.minutes.rows().records == list(range(120))
    assert one.seconds.rows().records == [second // 60 for second in range(7200 - history.SECONDS, 7200)]


def test_rates_are_what_came_between_two_looks() -> None:
    histories = Histories()
    histories.add(10.5, hub([client("a", records=1000, bytes=9000)]))
    assert histories.client_rates == {} and histories.hub.seconds.rows().records == []
    histories.add(12.5, hub([client("a", records=1100, bytes=9500, connections=3), client("new", records=8)]))
    assert histories.client_rates == {"a": TrafficRates(50, 250, 3), "new": TrafficRates(4, 0, 1)}
    assert histories.hub_rates == TrafficRates(54, 250, 4)
    histories.add(13.5, hub([client("a", records=5), client("new", records=8)]))  # it counts anew: nothing is known, and nothing invented
    assert histories.client_rates["a"].records == 0
    histories.add(13.5, hub([]))  # no time has passed
    assert histories.hub_rates == TrafficRates(0, 0, 2)
    assert histories.recent() == {"a": [50, 0], "new": [4, 0]}


def test_histories_are_of_so_many_clients_and_go_with_them() -> None:
    histories = Histories(most_clients=2)
    for at in (1.5, 2.5):
        histories.add(at, hub([client("a"), client("b"), client("c", records=int(at))]))
    assert [histories.client(name) is not None for name in "abc"] == [True, True, False]
    assert histories.client_rates["c"].records == 1  # it has its rates all the same
    histories.add(3.5, hub([client("b"), client("c")]))
    assert [histories.client(name) is not None for name in "abc"] == [False, True, True]


def test_a_history_takes_the_memory_that_it_says() -> None:
    columns = [column for ring in (history.History().seconds, history.History().minutes) for column in ring._columns]
    assert sum(len(column) * column.itemsize for column in columns) == 24_480
