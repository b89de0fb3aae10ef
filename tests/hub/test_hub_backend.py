"""The address on which the server after the proxy listens: a socket without a name, whatever the path of the root is."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from pathlib import Path

import pytest
from processes_of_a_hub import HubProcess
from pyarrow import flight
from serving import HubServer
from shipping import contents, eventually, shipping, stored

import hub
import kvspool
from hub.root.store import PRIVATE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root whose path is longer than that of any socket may be."""
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    hub.create(folder / "root").close()
    return folder / "root"


def ship_some(location: str, root: Path, path: Path, client: str = "client") -> None:
    with kvspool.create(path) as log, shipping(path, location, client) as shipper:
        log.append_many([b"%d" % number for number in range(100)])
        eventually(lambda: shipper.status().lanes[0].acknowledged == 100)
        assert stored(root / client) == contents(log)


def test_it_is_a_socket_without_a_name(root: Path, tmp_path: Path) -> None:
    before = descriptors()
    with HubServer(root) as server:
        assert server.location.startswith("grpc://127.0.0.1:")
        assert not any(path.is_socket() for path in (root / PRIVATE).iterdir())
        ship_some(server.location, root, tmp_path / "log")
        shutil.copytree(root, tmp_path / "copy")  # as a backup of a root that is served
    assert not {path for path in descriptors() - before if str(root) in path}


def descriptors() -> set[str]:
    return {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_one_that_a_killed_hub_has_left_is_replaced(root: Path, tmp_path: Path) -> None:
    (root / PRIVATE).mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as left:
        folder = os.open(root / PRIVATE, os.O_PATH | os.O_DIRECTORY)
        left.bind(f"/proc/self/fd/{folder}/backend")
        os.close(folder)
    assert (root / PRIVATE / "backend").is_socket()
    with HubProcess(root) as server:
        ship_some(server.location, root, tmp_path / "log")
        server.kill()
        server.start()
        ship_some(server.location, root, tmp_path / "other", "other")


def test_where_none_can_be_it_is_a_loopback_port(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / PRIVATE).mkdir(mode=0o700, exist_ok=True)
    (root / PRIVATE / "backend").mkdir()  # as little a socket as what a file system without them has
    with caplog.at_level(logging.WARNING, "kvspool.hub"), HubServer(root) as server:
        assert "takes a loopback port" in caplog.text
        ship_some(server.location, root, tmp_path / "log")


def test_a_connection_past_the_proxy_is_refused(root: Path) -> None:
    with HubServer(root) as server:
        assert server._backend is not None
        with (
            flight.FlightClient(f"grpc+unix://{server._backend.target}") as client,
            pytest.raises(flight.FlightUnauthenticatedError),
        ):
            list(client.list_flights())
