"""A pipeline that reads a hub server, as in production: over TLS, with tokens for readers, shipped records, and kills meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serving import HubServer
from sessions import MARKS

import hub
import shard
from hub.client.connection import Security
from hub.client.shipper import Shipper
from hub.pipeline import load
from hub.pipeline.run import PipelineRun
from hub.security.access import Access
from hub.security.certificates import Certificates
from kvspool.cli import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyarrow")
deltalake = pytest.importorskip("deltalake")
pytestmark = MARKS

JOB = """
[source]
hub = "{hub}"
caFile = "pki/ca.pem"
tokenFile = "spark.token"
groupId = "totals"
{source}

[decode]
schema = "row int, carrier string"

[sink]
path = "out"
trigger = "0 seconds"

[compact]
files = 2

[spark]
master = "local[1]"
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    """A hub with TLS that knows JFK, who ships, and Spark, which reads."""
    assert main(["hub", "certificate", "init", str(tmp_path / "pki"), "--name", "127.0.0.1"]) == 0
    for name, *words in (("JFK",), ("spark", "--role", "reader", "--read", "*")):
        added = ["hub", "token", "add", str(tmp_path / "access.toml"), "--name", name, *words, "--output", str(tmp_path / f"{name}.token")]
        assert main(added) == 0
    hub.create(tmp_path / "root").close()
    certificates = Certificates(tmp_path / "pki" / "server.pem", tmp_path / "pki" / "server.key")
    with HubServer(tmp_path / "root", access=Access.load(tmp_path / "access.toml"), certificates=certificates) as server:
        yield server


def ship(folder: Path, server: HubServer, rows: range) -> None:
    """Append flights to the client's shards, and bring them to the hub."""
    with shard.open(folder / "source", prefix="f") as shards:
        shards.append_many([{"row": row, "carrier": "AA UA DL".split()[row % 3]} for row in rows], keys=[b"%d" % row for row in rows])
    security = Security((folder / "JFK.token").read_text().strip(), (folder / "pki" / "ca.pem").read_bytes())
    with Shipper(folder / "source", server.location, client="JFK", security=security) as shipper:
        shipper.run(until_empty=True)


def job_at(folder: Path, server: HubServer, *, source: str = "") -> Any:
    path = folder / "totals.toml"
    path.write_text(JOB.format(hub=server.location, source=source))
    return load(path)


def rows_of(path: Path) -> list[int]:
    return sorted(deltalake.DeltaTable(path).to_pyarrow_table().column("row").to_pylist())


def killed_in_the_midst(job: Any) -> None:
    """Run a pipeline as the command does, and kill it between two batches or in one."""
    command = [sys.executable, "-m", "kvspool.cli", "pipeline", "run", str(job.path), "--json"]
    environment = {**os.environ, "KVSPOOL_TOKEN": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["batch"] >= 1:
                break
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL


def test_what_was_shipped_to_a_hub_is_in_a_table_once_though_the_pipeline_is_killed(
    spark: SparkSession, server: HubServer, tmp_path: Path
) -> None:
    shard.create(tmp_path / "source", prefix="f", bits=2, capacity="1MiB").close()
    ship(tmp_path, server, range(2000))
    killed_in_the_midst(job_at(tmp_path, server, source="maxOffsetsPerTrigger = 100"))
    found = rows_of(tmp_path / "out")
    assert 200 <= len(found) <= 2000 and len(set(found)) == len(found)  # a slow machine may have come to the end
    ship(tmp_path, server, range(2000, 2300))
    done = PipelineRun(job_at(tmp_path, server), once=True).run(spark)
    assert (done.state, done.lag) == ("done", 0)
    assert rows_of(tmp_path / "out") == list(range(2300))
    with hub.open(tmp_path / "root") as there:
        (reader,) = there.readers()
    assert (reader.name, reader.owner) == ("totals", "spark")
    assert reader.lag is not None and reader.lag.records == 0  # retention may follow to where the run ended
