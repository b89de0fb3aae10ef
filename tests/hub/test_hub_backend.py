"""Where the server behind the gate listens: on a socket in the hub's private directory, whatever the path of the root is."""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path

import pytest
from processes_of_a_hub import HubProcess
from serving import HubServer
from shipping import contents, eventually, shipping, stored

import hub
import kvspool
from hub.store import PRIVATE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root whose path is longer than that of any socket may be."""
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    hub.create(folder / "root").close()
    return folder / "root"


def ship_some(location: str, root: Path, path: Path) -> None:
    with kvspool.create(path) as log, shipping(path, location) as shipper:
        log.append_many([b"%d" % number for number in range(100)])
        eventually(lambda: shipper.status().lanes[0].acknowledged == 100)
        assert stored(root / "client") == contents(log)


def test_it_is_a_socket_that_nobody_else_can_reach(root: Path, tmp_path: Path) -> None:
    with HubServer(root) as server:
        backend = root / PRIVATE / "backend"
        assert stat.S_ISSOCK(backend.lstat().st_mode)
        assert backend.parent.stat().st_mode & 0o077 == 0
        assert server.location.startswith("grpc://127.0.0.1:")
        ship_some(server.location, root, tmp_path / "log")
    assert f"{root / PRIVATE}" not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_one_that_a_killed_hub_has_left_is_replaced(root: Path, tmp_path: Path) -> None:
    with HubProcess(root) as server:
        server.kill()
        assert stat.S_ISSOCK((root / PRIVATE / "backend").lstat().st_mode)
        server.start()
        ship_some(server.location, root, tmp_path / "log")


def test_where_none_can_be_it_is_a_loopback_port(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / PRIVATE).mkdir(mode=0o700, exist_ok=True)
    (root / PRIVATE / "backend").mkdir()  # as little a socket as what a file system without them has
    with caplog.at_level(logging.WARNING, "kvspool.hub"), HubServer(root) as server:
        assert "takes a loopback port" in caplog.text
        ship_some(server.location, root, tmp_path / "log")


def test_who_comes_by_another_way_than_the_gate_is_refused(root: Path) -> None:
    from pyarrow import flight

    with HubServer(root):
        folder = os.open(root / PRIVATE, os.O_PATH | os.O_DIRECTORY)
        try:
            path = f"/proc/self/fd/{folder}/backend"
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(path)
            with flight.FlightClient(f"grpc+unix://{path}") as client, pytest.raises(flight.FlightUnauthenticatedError):
                list(client.list_flights())
        finally:
            os.close(folder)
