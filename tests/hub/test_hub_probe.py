"""The hub's probe of itself: a hub that doesn't do its work is unhealthy, whatever its threads answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from clocks import StoppedClock
from raw_http2 import RawClient
from serving import HubServer
from shipping import LOG, eventually, numbered

import hub
import kvspool
from hub.client.connection import Connection, Security
from hub.client.remote import RemoteHub
from hub.errors import HubError, NotAllowed
from hub.protocol.ingest import VERSION, Opening, Put, ShippedLog
from hub.root.stored_shard import Shard
from hub.security import authority
from hub.security.access import Access
from hub.security.certificates import Certificates
from hub.server import probe as probes
from hub.server.limits import Limits
from hub.server.probe import Probe
from hub.server.shard_index import ShardIndex
from hub.server.steps import Step, Steps
from kvspool import system
from kvspool.cli import main

INTERVAL = probes.INTERVAL


@pytest.fixture
def root(tmp_path: Path) -> Path:
    hub.create(tmp_path / "root").close()
    with kvspool.create(tmp_path / "root" / "JFK", format="kvj") as log:
        log.append(b"record")
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "INTERVAL", 0.01)


def access_of(tmp_path: Path) -> Access:
    path = tmp_path / "access.toml"
    assert main(["hub", "token", "add", str(path), "--name", "JFK", "--output", str(tmp_path / "token")]) == 0
    return Access.load(path)


def succeeds(server: HubServer) -> None:
    """Return after another probe than the first one has succeeded."""
    probe = server.probe
    assert probe is not None
    first = probe._succeeded
    eventually(lambda: probe._succeeded > first or probe._error)
    assert not probe._error
    after = probe._succeeded
    eventually(lambda: probe._succeeded > after or probe._error)
    assert not probe._error
    assert server.status().error == ""


@pytest.mark.parametrize("level", ["process", "disk"])
def test_the_probe_goes_the_whole_way_of_a_client_and_no_reader_sees_it(root: Path, level: Any) -> None:
    with HubServer(root, probes=True, level=level) as server:
        succeeds(server)
        with RemoteHub(server.location) as remote:
            assert list(remote.clients()) == ["JFK"]
        assert [one.client for one in server.status().clients] == ["JFK"]
        assert server.probe is not None
        with kvspool.open(server.probe._path) as stored:
            assert {record.value for record in stored.read()} == {b"probe"}
    with hub.open(root) as found:
        assert found.clients() == ["JFK"]
    with HubServer(root, probes=True) as server:  # what the last one left is removed
        assert len(list((root / ".hub" / "probe").glob("probe-*"))) == 1
        succeeds(server)


@pytest.mark.parametrize("names", [["localhost"], ["hub.example.com", "10.0.0.7"], ["127.0.0.1"]])
def test_the_probe_authenticates_over_tls_by_the_certificate_that_the_hub_serves(root: Path, tmp_path: Path, names: list[str]) -> None:
    authority.make_authority(tmp_path / "pki", names)
    certificates = Certificates(tmp_path / "pki" / "server.pem", tmp_path / "pki" / "server.key")
    with HubServer(root, probes=True, access=access_of(tmp_path), certificates=certificates) as server:
        succeeds(server)
        assert server.authentication.failures == 0


def test_where_callers_need_a_certificate_the_probe_lists_and_stores_without_the_network(root: Path, tmp_path: Path) -> None:
    authority.make_authority(tmp_path / "pki", ["localhost"])
    pki = tmp_path / "pki"
    certificates = Certificates(pki / "server.pem", pki / "server.key", pki / "ca.pem")
    with HubServer(root, probes=True, access=access_of(tmp_path), certificates=certificates) as server:
        succeeds(server)


def test_the_probe_s_token_gives_no_other_right(root: Path, tmp_path: Path) -> None:
    with HubServer(root, probes=True, access=access_of(tmp_path)) as server:
        address = server._probed_address()
        assert address.location is not None
        with RemoteHub(address.location, security=address.security) as remote:
            assert list(remote.clients()) == []
            with pytest.raises(NotAllowed):
                list(remote.read("JFK", 0))


@pytest.mark.parametrize("full", ["connections", "calls"])
def test_a_hub_whose_clients_take_all_connections_or_calls_is_healthy_until_it_stores_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Idle clients that fill a limit don't make the hub unhealthy: it works, and a restart would help no client."""
    monkeypatch.setattr(probes, "LIMIT", 1.0)
    limits = Limits(connections=4) if full == "connections" else Limits(calls=8, queued_calls=1, queued_seconds=0.1)
    with HubServer(root, probes=True, limits=limits) as server, ExitStack() as stack:
        succeeds(server)
        for client in [stack.enter_context(RawClient(server.location)) for _ in range(4 if full == "connections" else 1)]:
            client.begin("DoExchange", 8)
        eventually(lambda: server.listener.stats().calls >= 8)
        if full == "connections":
            with pytest.raises(OSError), RawClient(server.location) as refused:
                refused.ask("ListActions", b"")
        succeeds(server)
        with monkeypatch.context() as patched:
            patched.setattr(Shard, "put", lambda *_: threading.Event().wait(3.0))
            eventually(lambda: "it has stored no record" in server.status().error)
        eventually(lambda: server.status().error == "")


def test_a_hub_whose_disk_hangs_while_the_probe_trims_is_unhealthy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LIMIT", 0.2)
    monkeypatch.setattr(probes, "TRIMMED", 2)
    continues = threading.Event()
    monkeypatch.setattr(Probe, "_trim", lambda probe: continues.wait(60))
    with HubServer(root, probes=True) as server:
        eventually(lambda: "it has stored no record" in server.status().error)
        continues.set()
        eventually(lambda: server.status().error == "")


@pytest.mark.parametrize("stage", ["list", "store"])
def test_a_hub_that_hangs_in_its_work_is_unhealthy_until_it_works_again(root: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    monkeypatch.setattr(probes, "LIMIT", 1.0)
    monkeypatch.setattr(probes, "CALL", 0.5)
    goes_on = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        goes_on.wait(60)
        raise OSError("it hung")

    with HubServer(root, probes=True) as server, monkeypatch.context() as patched:
        succeeds(server)
        if stage == "list":
            patched.setattr(server.read_service.index, "changes", hang)
        else:
            assert server.probe is not None
            patched.setattr(server.probe.store, "take", hang)
        eventually(lambda: "has not done its work for" in server.status().error)
        assert server.status().troubles()
        patched.undo()
        goes_on.set()
        eventually(lambda: server.status().error == "")


def test_a_hub_is_unhealthy_less_than_ten_seconds_after_the_last_probe_that_succeeded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the second between two samples of the page."""
    clock = StoppedClock()
    with system.replaced(clock):
        index = ShardIndex(root)
        probe = Probe(root, index, lambda: probes.ProbedAddress(None), Steps())
        try:
            probe.probe()
            clock.pass_(100)
            assert probe.trouble() == "", "no probe has begun since"
            fail_to_take(probe, monkeypatch)
            clock.pass_(probes.LIMIT)
            assert probe.trouble() == ""
            clock.pass_(0.5)
            assert "it has opened no call of a shipper, and its own probe is not answered" in probe.trouble()
            assert INTERVAL + probes.LIMIT + 0.5 + 1 < 10
        finally:
            probe.close()
            index.close()


def fail_to_take(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a probe fail to open its shard."""

    def fail(*_: object) -> None:
        raise OSError("no shard")

    monkeypatch.setattr(probe.store, "take", fail)
    with pytest.raises(OSError, match="no shard"):
        probe.probe()


def test_probes_that_fail_one_after_the_other_wait_since_the_first_one_and_a_client_that_is_served_proves_the_hub_alive(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, steps = StoppedClock(), Steps()
    with system.replaced(clock):
        index = ShardIndex(root)
        probe = Probe(root, index, lambda: probes.ProbedAddress(None), steps)
        try:
            for _ in range(3):
                fail_to_take(probe, monkeypatch)
                clock.pass_(probes.LIMIT / 2)
            assert probe.trouble()
            for step in (Step.CONNECT, Step.LIST, Step.STORE):
                steps.complete(step)
            assert probe.trouble(), "that is other work"
            steps.complete(Step.OPEN)
            assert probe.trouble() == ""
            clock.pass_(probes.LIMIT + 1)
            assert probe.trouble(), "no client was served since"
        finally:
            probe.close()
            index.close()


# A hub whose clients are served, while its probe waits.


def list_clients(server: HubServer) -> None:
    """Connect and list, as a reader."""
    with RemoteHub(server.location) as remote:
        remote.clients()


def ship(server: HubServer) -> None:
    """Connect and store a record, as a shipper."""
    with Connection(server.location, Security(), Opening(VERSION, "client", 0, [ShippedLog(0, LOG, 1)])) as connection:
        connection.put(Put(0, 0, 0, 1, True), numbered(0, 1).batch)
        while not connection.stored:
            connection.hear()
        connection.finish()


@contextmanager
def again_and_again(work: Callable[[HubServer], None], server: HubServer) -> Iterator[None]:
    """Work on another thread until the end of the `with` block."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            with suppress(HubError):
                work(server)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def hold_up(step: Step, server: HubServer, is_held: threading.Event, patched: pytest.MonkeyPatch) -> None:
    """Let the probe wait in a step, and nothing else in the hub."""
    assert server.probe is not None
    index, store, put = server.read_service.index, server.probe.store, Shard.put

    def wait() -> None:
        while is_held.is_set():
            threading.Event().wait(0.01)

    if step is Step.CONNECT:
        refused = server.listener.address[0], 1  # where no hub listens
        address = f"grpc://{refused[0]}:{refused[1]}"
        patched.setattr(server.probe, "_address", lambda: probes.ProbedAddress(address))
    elif step is Step.LIST:
        changes = index.changes

        async def late(*arguments: Any) -> Any:
            await arguments[-1](wait)
            return await changes(*arguments)

        patched.setattr(index, "changes", late)
    elif step is Step.OPEN:
        take = store.take

        def take_late(*arguments: Any) -> Any:
            wait()
            return take(*arguments)

        patched.setattr(store, "take", take_late)
    else:

        def put_late(shard: Shard, *arguments: Any) -> Any:
            if shard.path.is_relative_to(store.root):
                wait()
            return put(shard, *arguments)

        patched.setattr(Shard, "put", put_late)


@pytest.mark.parametrize(
    ("step", "work"), [(Step.CONNECT, list_clients), (Step.LIST, list_clients), (Step.OPEN, ship), (Step.STORE, ship)]
)
def test_a_hub_that_serves_clients_while_its_probe_waits_is_healthy_and_unhealthy_once_it_serves_none(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: Step, work: Callable[[HubServer], None]
) -> None:
    monkeypatch.setattr(probes, "LIMIT", 1.0)
    is_held = threading.Event()
    is_held.set()
    with HubServer(root, probes=True) as server, monkeypatch.context() as patched:
        probe = server.probe
        assert probe is not None
        succeeds(server)
        with again_and_again(work, server):
            served = server.steps.last(step)
            hold_up(step, server, is_held, patched)
            eventually(lambda: step in probe._waits)
            while system.port.monotonic() < probe._waits[step] + 3 * probes.LIMIT:
                last, trouble = server.steps.last(step), probe.trouble()
                # A machine that is busy with other work may not have served a client for so long.
                assert not trouble or system.port.monotonic() > last + probes.LIMIT
                threading.Event().wait(0.01)
            assert server.steps.last(step) > served
        eventually(lambda: f"it has {step}" in server.status().error)
        is_held.clear()
        patched.undo()
        eventually(lambda: server.status().error == "")


@pytest.fixture
def without_network(root: Path) -> Iterator[Probe]:
    index = ShardIndex(root)
    probe = Probe(root, index, lambda: probes.ProbedAddress(None), Steps())
    yield probe
    probe.close()
    index.close()


def test_the_probe_s_shard_stays_small(without_network: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TRIMMED", 100)
    for _ in range(4000):
        without_network.probe()
    with kvspool.open(without_network._path) as log:
        assert log.stats().used < 3 * probes.SEGMENT
        assert log.end() == 4000
