"""The state of a shipper and of a mirror: lines, `kvspool ship status`, /metrics and /healthz."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from clocks import StoppedClock
from commands import Run
from prometheus_client.parser import text_string_to_metric_families
from serving import HubServer
from shipping import eventually, shipping

import hub
import kvspool
import shard
from hub.cli import ship
from hub.client.mirror import Mirror
from hub.client.ship_state import ShipState
from hub.client.ship_status import ShipStatus
from hub.client.state_listener import StateListener, ask, parse_address
from kvspool import system


@pytest.fixture
def root(tmp_path: Path) -> Path:
    hub.create(tmp_path / "root").close()
    return tmp_path / "root"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Any]:
    with kvspool.create(tmp_path / "events", capacity="1MiB") as made:
        made.append_many([b"record"] * 10)
        yield made


@contextmanager
def pulling(location: str, root: Path) -> Iterator[Mirror]:
    with Mirror(location, root) as mirror:
        thread = threading.Thread(target=mirror.run)
        thread.start()
        try:
            yield mirror
        finally:
            mirror.stop()
            thread.join(30)


def listening(address: Any, *ways: Any) -> StateListener:
    return StateListener(address, lambda: ShipState.of(ways))


def metrics_at(address: Any) -> dict[str, float]:
    code, body = ask(address, "/metrics")
    assert code == 200
    return {sample.name: sample.value for family in text_string_to_metric_families(body.decode()) for sample in family.samples}


def test_a_shipper_and_a_mirror_serve_their_state(root: Path, log: Any, tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "ship.sock")
    with ExitStack() as stack:
        server = stack.enter_context(HubServer(root))
        shipper = stack.enter_context(shipping(log.path, server.location, "web"))
        mirror = stack.enter_context(pulling(server.location, tmp_path / "mirror"))
        stack.enter_context(listening(path, shipper, mirror))
        assert os.stat(path).st_mode & 0o777 == 0o600
        eventually(lambda: shipper.status().behind == 0 and mirror.status().pulled == 10)
        assert ask(path, "/healthz") == (200, b"ok\n")
        found = metrics_at(path)
        assert (found["kvspool_ship_connected"], found["kvspool_ship_behind_records"], found["kvspool_ship_failed_logs"]) == (1, 0, 0)
        assert (found["kvspool_ship_records_total"], found["kvspool_mirror_records_total"]) == (10, 10)
        assert (found["kvspool_mirror_connected"], found["kvspool_mirror_behind_records"]) == (1, 0)
        state = json.loads(ask(path, "/status")[1])
        assert (state["shippers"][0]["client"], state["mirrors"][0]["source"]) == ("web", server.location)
        assert "web" in run("ship", "status", path).out
        assert run("ship", "status", path, "--json").object["shippers"][0]["sent"] == 10
        server.close()
        eventually(lambda: ask(path, "/healthz")[0] == 503 and b"web: not connected to grpc://" in ask(path, "/healthz")[1])
        log.append(b"more")
        eventually(lambda: metrics_at(path)["kvspool_ship_behind_records"] == 1)
        assert "not connected" in run("ship", "status", path, code=1).err
    assert not os.path.exists(path)
    run("ship", "status", path, code=1)


def test_a_log_that_is_not_shipped_makes_a_shipper_unhealthy(root: Path, tmp_path: Path) -> None:
    with HubServer(root, largest_batch=1000) as server, shard.create(tmp_path / "set", bits=1) as logs:
        logs.shards[0].append(b"x" * 5000)
        with shipping(tmp_path / "set", server.location) as shipper, listening(("127.0.0.1", 0), shipper) as listener:
            address = parse_address(listener.address)
            eventually(lambda: shipper.status().lanes[0].error)
            code, body = ask(address, "/healthz")
            assert code == 503 and b"client: shard 0 is not shipped: " in body
            assert metrics_at(address)["kvspool_ship_failed_logs"] == 1


def test_a_port_answers_only_to_names_of_the_loopback() -> None:
    with listening(("127.0.0.1", 0)) as listener:
        host, _, port = listener.address.partition(":")
        for name, code in ((f"localhost:{port}", b"200"), (f"127.0.0.1:{port}", b"200"), (f"evil.example:{port}", b"421")):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
                assert client.recv(100).split()[1] == code
        assert ask((host, int(port)), "/other")[0] == 404


@pytest.mark.parametrize("wrong", ["0.0.0.0:9000", "192.0.2.1:9000", "hub.example.org:9000", "9000", "localhost:x", "[::]:9000"])
def test_only_a_loopback_address_or_a_socket_is_taken(wrong: str, tmp_path: Path, run: Run) -> None:
    with pytest.raises(ValueError):
        parse_address(wrong)
    kvspool.create(tmp_path / "log").close()
    assert run("ship", f"web={tmp_path / 'log'}", "grpc://127.0.0.1:1", "--once", "--status", wrong, code=2).err


def test_a_socket_of_a_killed_shipper_is_replaced_and_no_other_file_is(tmp_path: Path) -> None:
    path = str(tmp_path / "ship.sock")
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(path)
    left.close()
    with listening(path):
        assert ask(path, "/healthz")[0] == 200
        with pytest.raises(OSError):
            listening(path)
        assert ask(path, "/healthz")[0] == 200
    (tmp_path / "ship.sock").write_text("mine")
    with pytest.raises(OSError):
        listening(path)
    assert (tmp_path / "ship.sock").read_text() == "mine"


def status(state: Any, error: str = "", retry_in: float = 0.0) -> ShipStatus:
    return ShipStatus("web", "grpc://hub:7070", state, 7, 3, 0, 0, 0, retry_in, error, [])


def test_without_a_terminal_a_change_is_a_line_and_so_is_each_minute(capfd: pytest.CaptureFixture[str]) -> None:
    def lines() -> list[str]:
        return capfd.readouterr().err.splitlines()

    with system.replaced(StoppedClock()) as clock:
        assert isinstance(clock, StoppedClock)
        say: Callable[[Any], None] = ship._StateLines().say
        say([status("connecting")])
        assert lines() == ["kvspool: web: connecting; 3 records to grpc://hub:7070, 7 left"]
        say([status("connecting")])
        assert lines() == []
        say([status("connected")])
        assert lines() == ["kvspool: web: connected; 3 records to grpc://hub:7070, 7 left"]
        for _ in range(59):
            clock.pass_(1)
            say([status("connected")])
        assert lines() == []
        clock.pass_(1)
        say([status("connected")])
        assert len(lines()) == 1
        say([status("waiting", "no route", 5)])
        assert lines() == ["kvspool: web: waiting, again in 5 s; 3 records to grpc://hub:7070, 7 left", "kvspool: web: no route"]
