"""Spark reads from two hubs with the same client, of which one is killed during a task and during a micro-batch, and from one that hangs.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes_of_a_hub import Fault, HubProcess, Proxy
from sessions import MARKS, PATIENCE, told, until
from shipping import eventually

import hub
import kvspool

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyarrow")
pytestmark = MARKS
COUNT = 10_000


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Two roots with the same log of 5 MB."""
    roots = [tmp_path / "a", tmp_path / "b"]
    hub.create(roots[0]).close()
    with kvspool.create(roots[0] / "BIG", format="kvj") as log:
        log.append_many([b"%0500d" % number for number in range(COUNT)])
    shutil.copytree(roots[0] / "BIG", roots[1] / "BIG")
    return roots


@pytest.fixture
def hubs(roots: list[Path]) -> Iterator[tuple[HubProcess, Fault, str]]:
    """The first hub, the fault that slows down its streams after some records, and the option."""
    with HubProcess(roots[0]) as a, HubProcess(roots[1]) as b, Proxy(("127.0.0.1", a.port)) as proxy:
        slow = proxy.add(Fault("bandwidth", "down", 1_000_000, amount=100_000, times=None))
        yield a, slow, f"grpc://127.0.0.1:{proxy.address[1]}|{b.location}"


def kill_when_it_sends(a: HubProcess, slow: Fault) -> threading.Thread:
    def watch() -> None:
        eventually(lambda: slow.fired)
        a.kill()
        a.process.wait()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_batch_whose_hub_is_killed_has_each_record_once(spark: SparkSession, hubs: tuple[HubProcess, Fault, str]) -> None:
    a, slow, option = hubs
    thread = kill_when_it_sends(a, slow)
    frame = spark.read.format("kvspool").option("hub", option).schema("offset bigint, value binary").load()
    found = sorted((row.offset, int(row.value)) for row in frame.collect())
    thread.join()
    assert found == [(at, at) for at in range(COUNT)]


def test_a_micro_batch_whose_hub_is_killed_has_each_record_once_and_reports_the_outage(
    spark: SparkSession, hubs: tuple[HubProcess, Fault, str], roots: list[Path], tmp_path: Path
) -> None:
    a, slow, option = hubs
    found: list[tuple[int, int]] = []

    def take(frame: DataFrame, number: int) -> None:
        found.extend((row.offset, int(row.value)) for row in frame.select("offset", "value").collect())

    thread = kill_when_it_sends(a, slow)
    frame = spark.readStream.format("kvspool").options(hub=option, startingOffsets="earliest").load()
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        until(query, lambda: len(found) >= COUNT)
        with kvspool.open(roots[1] / "BIG") as log:
            log.append(b"%0500d" % COUNT)
        until(query, lambda: len(found) > COUNT)
        until(query, lambda: "hub unreachable since" in str(query.lastProgress["sources"][0]["latestOffset"]))
        assert sorted(found) == [(at, at) for at in range(COUNT + 1)]
        assert query.isActive
    finally:
        query.stop()
        thread.join(PATIENCE)


def test_a_batch_whose_hub_says_nothing_more_fails_and_its_repeated_task_does_not_wait_again(
    spark: SparkSession, roots: list[Path]
) -> None:
    with HubProcess(roots[0]) as server, Proxy(("127.0.0.1", server.port)) as proxy:
        slow = proxy.add(Fault("bandwidth", "down", 1_000_000, amount=100_000, times=None))

        def watch() -> None:
            eventually(lambda: slow.fired)
            server.process.send_signal(signal.SIGSTOP)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            location = f"grpc://127.0.0.1:{proxy.address[1]}"
            frame = spark.read.format("kvspool").options(hub=location, hubTimeout="1s").schema("offset bigint, value binary").load()
            with pytest.raises(Exception) as raised:
                frame.collect()
            assert f"[KVSPOOL_HUB_UNREACHABLE] {location}: hub unreachable since" in told(raised)
            assert proxy.connections == 3, "of the driver, of the task, and one of the repeated task"
        finally:
            thread.join(PATIENCE)
            server.process.send_signal(signal.SIGCONT)
