"""The hub's probe of itself: a hub that doesn't do its work is unhealthy, whatever its threads answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import StoppedClock
from serving import HubServer
from shipping import eventually

import hub
import kvspool
from hub.client.remote import RemoteHub
from hub.errors import NotAllowed
from hub.security import authority
from hub.security.access import Access
from hub.security.certificates import Certificates
from hub.server import probe as probes
from hub.server.probe import Probe
from hub.server.shard_index import ShardIndex
from kvspool import system
from kvspool.cli import main


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


def test_a_hub_is_unhealthy_less_than_ten_seconds_after_the_last_probe_that_succeeded(root: Path) -> None:
    """With the second between two samples of the page."""
    clock = StoppedClock()
    with system.replaced(clock):
        index = ShardIndex(root)
        probe = Probe(root, index, lambda: probes.ProbedAddress(None))
        try:
            probe.probe()
            clock.pass_(probes.LIMIT)
            assert probe.trouble() == ""
            clock.pass_(0.5)
            assert "is not answered" in probe.trouble()
            assert probes.LIMIT + 0.5 + 1 < 10
        finally:
            probe.close()
            index.close()


@pytest.fixture
def without_network(root: Path) -> Iterator[Probe]:
    index = ShardIndex(root)
    probe = Probe(root, index, lambda: probes.ProbedAddress(None))
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
