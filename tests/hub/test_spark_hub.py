"""Spark reads from hub servers: batches equal to those of the root itself, and streams through restarts of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes_of_a_hub import HubProcess
from serving import HubServer
from sessions import MARKS, PATIENCE, expected, fill, rows, told, until

import hub
import kvspool
from hub.security.access import Access
from hub.security.certificates import Certificates
from kvspool.cli import main
from kvspool.journal.format import JournalBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytest.importorskip("pyarrow")
pytestmark = MARKS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root with two clients, one of two shards, and a Gap in the other one."""
    hub.create(tmp_path / "root").close()
    for name in ("JFK.1.000", "JFK.1.001", "EWR"):
        with kvspool.create(tmp_path / "root" / name, format="kvj") as log:
            fill(log, 50)
    with kvspool.open(tmp_path / "root" / "EWR") as log:
        log.append_batch(JournalBatch([b"later"]), at=60)
    return tmp_path / "root"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for this host, and tokens: all may read everything, some only JFK."""
    path = tmp_path_factory.mktemp("secrets")
    assert main(["hub", "certificate", "init", str(path / "pki"), "--name", "localhost", "--name", "127.0.0.1"]) == 0
    for name, pattern in (("all", "*"), ("some", "JFK")):
        words = ["--name", name, "--role", "reader", "--read", pattern, "--output", str(path / name)]
        assert main(["hub", "token", "add", str(path / "access.toml"), *words]) == 0
    return path


@pytest.fixture
def server(root: Path, secrets: Path) -> Iterator[HubServer]:
    """A hub with TLS that knows who asks."""
    certificates = Certificates(secrets / "pki" / "server.pem", secrets / "pki" / "server.key")
    with HubServer(root, access=Access.load(secrets / "access.toml"), certificates=certificates) as server:
        yield server


def options(server: HubServer, secrets: Path, who: str = "all") -> dict[str, str]:
    return {"hub": server.location, "caFile": str(secrets / "pki" / "ca.pem"), "tokenFile": str(secrets / who)}


def from_hub(spark: SparkSession, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("kvspool").options(**options)
    return (reader if schema is None else reader.schema(schema)).load()


def test_a_batch_is_what_the_root_itself_gives(spark: SparkSession, server: HubServer, root: Path, secrets: Path) -> None:
    ours = options(server, secrets)
    with hub.open(root) as there:
        whole = expected(there.read(on_gap="skip"))
    assert len(whole) == 151
    assert rows(from_hub(spark, minPartitions="5", **ours)) == whole
    few = from_hub(spark, "value binary, partition int", assign='{"JFK": [1]}', startingOffsets='{"JFK": {"1": 40}}', **ours)
    assert sorted((bytes(value), partition) for value, partition in few.collect()) == [(b"value-%d" % at, 1) for at in range(40, 50)]
    since = from_hub(spark, "topic string", startingTimestamp="1700000000133", subscribe="JFK", **ours)
    assert since.collect() == [("JFK",)] * 80


def test_what_goes_wrong_has_a_code_and_names_the_hub(spark: SparkSession, server: HubServer, secrets: Path, tmp_path: Path) -> None:
    ours = options(server, secrets)
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("kvs_12345678_" + "x" * 43)
    no_one = {"hub": "grpc://127.0.0.1:1", "hubTimeout": "300ms"}
    for given, words in (
        ({**ours, "tokenFile": str(wrong)}, ["[KVSPOOL_NOT_ALLOWED]", server.location]),
        ({**options(server, secrets, "some"), "subscribe": "EWR"}, ["[KVSPOOL_NOT_ALLOWED]", "may not read client EWR"]),
        (no_one, ["[KVSPOOL_HUB_UNREACHABLE] grpc://127.0.0.1:1"]),
    ):
        with pytest.raises(Exception) as raised:
            from_hub(spark, **given).count()
        for word in words:
            assert word in told(raised)
        assert "x" * 43 not in told(raised)


class Sink:
    """Collects the rows of a stream."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, bytes]] = []
        self.batches = 0

    def take(self, frame: DataFrame, number: int) -> None:
        found = frame.select("topic", "partition", "offset", "value").collect()
        self.rows += [(row.topic, row.partition, row.offset, bytes(row.value)) for row in found]
        self.batches += bool(found)


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., StreamingQuery]]:
    """Start a query into a sink: `start(sink, now=True, **options)`."""
    queries: list[StreamingQuery] = []

    def begin(sink: Sink, *, now: bool, **options: str) -> StreamingQuery:
        frame = spark.readStream.format("kvspool").options(startingOffsets="earliest", **options).load()
        writer = frame.writeStream.foreachBatch(sink.take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        queries.append((writer.trigger(availableNow=True) if now else writer.trigger(processingTime="20 milliseconds")).start())
        return queries[-1]

    yield begin
    for query in queries:
        query.stop()


def test_a_stream_reads_what_is_there_and_continues_there(
    start: Callable[..., StreamingQuery], server: HubServer, root: Path, secrets: Path
) -> None:
    ours = {**options(server, secrets), "groupId": "query", "maxOffsetsPerTrigger": "60"}
    sink = Sink()
    assert start(sink, now=True, **ours).awaitTermination(PATIENCE)
    with hub.open(root) as there:
        whole = sorted((one.client, one.shard, one.sequence, one.value) for one in there.read(on_gap="skip"))
        (reader,) = there.readers()
    assert sorted(sink.rows) == whole and sink.batches > 1
    assert (reader.name, reader.owner) == ("query", "all")
    assert reader.lag is not None and reader.lag.records == 0  # said at the end of a run, though it was shorter than a second
    with kvspool.open(root / "JFK.1.001") as log:
        log.append(b"more")
    again = Sink()
    query = start(again, now=False, **ours)
    until(query, lambda: again.rows)
    assert again.rows == [("JFK", 1, 50, b"more")]

    def has_moved() -> bool:
        with hub.open(root) as there:
            (reader,) = there.readers()
        return reader.lag is not None and reader.lag.records == 0

    until(query, has_moved)  # it does so once a second


def test_a_stream_continues_when_the_hub_was_killed_and_a_client_that_comes_is_read(
    start: Callable[..., StreamingQuery], root: Path
) -> None:
    sink = Sink()
    with HubProcess(root) as server:
        query = start(sink, now=False, hub=server.location, maxOffsetsPerTrigger="30", groupId="query")
        until(query, lambda: sink.batches)
        server.kill()
        with kvspool.create(root / "LGA", format="kvj") as log:
            fill(log, 40)
        server.start()
        until(query, lambda: len(sink.rows) == 191)
        server.kill()
        with kvspool.open(root / "JFK.1.000") as log:
            log.append(b"meanwhile")
        server.start()
        until(query, lambda: len(sink.rows) == 192)
        with hub.open(root) as there:
            whole = sorted((one.client, one.shard, one.sequence, one.value) for one in there.read(on_gap="skip"))
        assert sorted(sink.rows) == whole


def test_a_hub_that_stays_away_ends_the_query_with_an_error_that_names_it(start: Callable[..., StreamingQuery], root: Path) -> None:
    sink = Sink()
    with HubProcess(root) as server:
        query = start(sink, now=False, hub=server.location, hubTimeout="500ms")
        until(query, lambda: sink.batches)
        server.kill()
        with pytest.raises(Exception) as raised:
            query.awaitTermination(PATIENCE)
        assert f"[KVSPOOL_HUB_UNREACHABLE] {server.location}" in told(raised)
