"""Streams in a real session: each record once, after a restart, after a failure, and while clients come and logs change."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sessions import BASE, MARKS, PATIENCE, told, until

import hub
import kvspool
from kvspool.engine.retention import Retention

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytest.importorskip("pyarrow")
pytestmark = MARKS


class Sink:
    """Collects the rows of each micro-batch by its number; fails as often as the test asks for, after the rows of the batch were read."""

    def __init__(self, failures: int = 0) -> None:
        self.batches: list[tuple[int, list[tuple[str, int, int, str]]]] = []
        self.failures = failures

    def take(self, frame: DataFrame, number: int) -> None:
        rows = [tuple(row) for row in frame.selectExpr("topic", "partition", "offset", "CAST(value AS STRING)").collect()]
        self.batches.append((number, rows))  # type: ignore[arg-type]
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the sink fails once")

    def values(self) -> list[str]:
        return sorted(row[3] for _, rows in self.batches for row in rows)


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path) -> Callable[..., StreamingQuery]:
    """Start a query of a path into a sink: `start(path, sink, now=True, **options)`; the checkpoint is that of the test."""
    queries: list[StreamingQuery] = []

    def begin(path: Path, sink: Sink, *, now: bool = True, **options: str) -> StreamingQuery:
        stream = spark.readStream.format("kvspool").options(**{"startingOffsets": "earliest", **options}).load(str(path))
        writer = stream.writeStream.foreachBatch(sink.take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="20 milliseconds")).start()
        queries.append(query)
        return query

    yield begin
    for query in queries:
        query.stop()


def run(start: Callable[..., StreamingQuery], path: Path, sink: Sink | None = None, **options: str) -> Sink:
    """Run a query to the end of what is there now."""
    sink = sink or Sink()
    query = start(path, sink, **options)
    assert query.awaitTermination(PATIENCE)
    return sink


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a hub root with the client JFK, of two shards."""
    path = tmp_path / "root"
    with hub.create(path) as made:
        made.create_client("JFK", bits=1, capacity=1 << 16).close()
    return path


def append(root: Path, client: str, begin: int, end: int) -> list[str]:
    with hub.open(root) as opened, opened.client(client) as shards:
        for at in range(begin, end):
            shards.append(b"%s-%d" % (client.encode(), at), key=b"%d" % at, timestamp=BASE + at * 1_000_000)
    return [f"{client}-{at}" for at in range(begin, end)]


def test_available_now_reads_everything_in_limited_batches_and_a_restart_continues_there(
    start: Callable[..., StreamingQuery], root: Path
) -> None:
    first = append(root, "JFK", 0, 100)
    sink = Sink()
    query = start(root, sink, maxOffsetsPerTrigger="40")
    assert query.awaitTermination(PATIENCE)
    assert [len(rows) <= 40 for _, rows in sink.batches] == [True] * 3
    assert sink.values() == sorted(first)
    assert all({row[1] for row in rows} == {0, 1} for _, rows in sink.batches)
    (source,) = query.lastProgress["sources"]
    end = json.loads(source["endOffset"])
    assert sum(end["JFK"].values()) == 100 and end["/logs"].keys() == {"JFK"}
    assert source["latestOffset"] == source["endOffset"]
    second = append(root, "JFK", 100, 130)
    assert run(start, root, maxOffsetsPerTrigger="40").values() == sorted(second)
    assert run(start, root).batches == []


def test_a_batch_that_failed_is_run_again_with_the_same_rows(start: Callable[..., StreamingQuery], root: Path) -> None:
    append(root, "JFK", 0, 30)
    sink = Sink(failures=1)
    query = start(root, sink)
    with pytest.raises(Exception, match="the sink fails once"):
        query.awaitTermination(PATIENCE)
    append(root, "JFK", 30, 40)
    run(start, root, sink)
    numbers = [number for number, _ in sink.batches]
    assert numbers == [0, 0, 1]
    assert sink.batches[0] == sink.batches[1] and len(sink.batches[0][1]) == 30
    assert len(sink.batches[2][1]) == 10


def test_clients_that_come_while_the_query_runs_and_a_spool_that_is_resized_are_read(
    start: Callable[..., StreamingQuery], root: Path
) -> None:
    sink = Sink()
    query = start(root, sink, now=False)
    expected = append(root, "JFK", 0, 20)
    until(query, lambda: len(sink.values()) == 20)
    with hub.open(root) as opened:
        opened.create_client("LAX", bits=0, capacity=4096).close()
    expected += append(root, "LAX", 0, 5)
    until(query, lambda: len(sink.values()) == 25)
    kvspool.resize(root / "LAX", 1 << 16)
    expected += append(root, "LAX", 5, 400) + append(root, "JFK", 20, 25)
    until(query, lambda: len(sink.values()) >= len(expected))
    assert sink.values() == sorted(expected)


def test_only_what_comes_after_the_start_is_read_from_latest_and_from_a_time(
    start: Callable[..., StreamingQuery], root: Path
) -> None:
    append(root, "JFK", 0, 10)
    sink = Sink()
    query = start(root, sink, now=False, startingOffsets="latest")
    until(query, lambda: query.lastProgress is not None)
    expected = append(root, "JFK", 10, 20)
    until(query, lambda: len(sink.values()) >= 10)
    assert sink.values() == sorted(expected)


def test_a_first_batch_that_failed_is_run_again_from_where_it_began(start: Callable[..., StreamingQuery], root: Path) -> None:
    append(root, "JFK", 0, 10)
    with pytest.raises(Exception, match="the sink fails once"):
        start(root, Sink(failures=1)).awaitTermination(PATIENCE)
    append(root, "JFK", 10, 6000)
    with pytest.raises(Exception, match="KVSPOOL_DATA_LOSS"):  # although the query would start after them now
        start(root, Sink()).awaitTermination(PATIENCE)


def test_a_first_batch_that_failed_is_run_again_although_a_client_has_joined(start: Callable[..., StreamingQuery], root: Path) -> None:
    first = append(root, "JFK", 0, 10)
    options = {"startingOffsets": '{"JFK": {"0": 0, "1": 0}}'}
    with pytest.raises(Exception, match="the sink fails once"):
        start(root, Sink(failures=1), **options).awaitTermination(PATIENCE)
    with hub.open(root) as opened:
        opened.create_client("LAX", bits=0, capacity=1 << 16).close()
    later = append(root, "LAX", 0, 5)
    assert run(start, root, **options).values() == sorted(first + later)


def test_a_start_by_time_reads_what_is_not_older(start: Callable[..., StreamingQuery], root: Path) -> None:
    append(root, "JFK", 0, 10)
    late = run(start, root, startingTimestamp=str(BASE // 1_000_000 + 6), startingOffsetsByTimestampStrategy="latest")
    assert late.values() == ["JFK-6", "JFK-7", "JFK-8", "JFK-9"]


def test_what_was_overwritten_fails_the_query_with_its_place_or_is_left_out(start: Callable[..., StreamingQuery], root: Path) -> None:
    append(root, "JFK", 0, 10)
    run(start, root)
    append(root, "JFK", 10, 6000)
    with pytest.raises(Exception, match="KVSPOOL_DATA_LOSS") as failure:
        start(root, Sink()).awaitTermination(PATIENCE)
    assert "topic 'JFK', partition 0: offsets" in told(failure) and "failOnDataLoss" in told(failure)
    sink = run(start, root, failOnDataLoss="false")
    assert "JFK-5999" in sink.values() and "JFK-10" not in sink.values()
    found = sink.values()
    assert len(set(found)) == len(found)


def test_retention_that_passes_what_a_stream_has_not_read_is_an_error_or_a_counted_gap(
    start: Callable[..., StreamingQuery], tmp_path: Path
) -> None:
    path = tmp_path / "events"
    with kvspool.create(path, format="kvj", segment_bytes=4096) as log:
        log.append_many([b"%050d" % at for at in range(100)])
        found = run(start, path).values()
        log.append_many([b"%050d" % at for at in range(100, 1000)])
        assert log.trim(Retention(max_bytes=16384)).removed_records > 100
        first = log.stats().first_sequence
    with pytest.raises(Exception, match="KVSPOOL_DATA_LOSS") as failure:
        run(start, path)
    assert f"topic 'events', partition 0: offsets 100 to {first - 1}" in told(failure)
    found += run(start, path, failOnDataLoss="false").values()
    assert found == [f"{at:050}" for at in (*range(100), *range(first, 1000))]


def test_a_log_that_was_replaced_under_a_checkpoint_is_noticed(start: Callable[..., StreamingQuery], tmp_path: Path) -> None:
    path = tmp_path / "events"
    for _ in range(2):
        with kvspool.create(path, capacity=4096) as log:
            for at in range(10):
                log.append(b"%d" % at)
        if not (tmp_path / "checkpoint").exists():
            run(start, path)
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    with pytest.raises(Exception, match="KVSPOOL_LOG_REPLACED"):
        start(path, Sink()).awaitTermination(PATIENCE)
    assert len(run(start, path, failOnDataLoss="false").values()) == 10


def test_a_commit_lets_retention_follow(start: Callable[..., StreamingQuery], tmp_path: Path) -> None:
    rules = Retention(by_consumers=True)
    with kvspool.create(tmp_path / "events", format="kvj", segment_bytes=4096) as log:
        for at in range(400):
            log.append(b"v" * 50, key=b"%d" % at)
        sink = Sink()
        places = []

        def noting(frame: DataFrame, number: int) -> None:
            places.append(log.readers()[0].sequence)
            take(frame, number)

        take, sink.take = sink.take, noting  # type: ignore[method-assign]
        assert len(run(start, tmp_path / "events", sink, groupId="spark", maxOffsetsPerTrigger="200").values()) == 400
        (reader,) = log.readers()
        assert (places, reader.name, reader.sequence) == ([0, 200], "spark", 400)
        assert log.trim(rules).removed_records > 200


def test_fewer_columns_are_streamed_by_workers_that_serve_many_batches(
    spark: SparkSession, start: Callable[..., StreamingQuery], root: Path, tmp_path: Path
) -> None:
    append(root, "JFK", 0, 60)
    found: list[tuple[Any, ...]] = []

    def take(frame: DataFrame, number: int) -> None:
        assert frame.columns == ["offset", "value"]
        found.extend((number, row.offset, bytes(row.value)) for row in frame.collect())

    stream = spark.readStream.format("kvspool").schema("offset bigint, value binary")
    stream = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "20").option("minPartitions", "3")
    writer = stream.load(str(root)).writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "columns"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE)
    assert {number for number, _, _ in found} == {0, 1, 2}
    assert sorted(value for _, _, value in found) == sorted(b"JFK-%d" % at for at in range(60))


def test_what_a_worker_has_loaded_is_not_looked_at_after_each_task(
    spark: SparkSession, start: Callable[..., StreamingQuery], root: Path
) -> None:
    append(root, "JFK", 0, 10)
    frozen = gc.get_freeze_count()  # by the program that runs the tests
    counts: list[int] = []

    def count(batches: Iterator[Any]) -> Iterator[Any]:
        import gc

        import pyarrow

        for batch in batches:
            yield pyarrow.record_batch({"frozen": pyarrow.repeat(gc.get_freeze_count(), batch.num_rows)})

    class Counting(Sink):
        def take(self, frame: DataFrame, number: int) -> None:
            frame.collect()
            counts.extend(row.frozen for row in frame.mapInArrow(count, "frozen bigint").collect())

    run(start, root, Counting(), minPartitions="2")
    assert counts
    assert any(counts)  # of a worker that has served a read before
    assert gc.get_freeze_count() <= frozen  # this process is no worker


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endingOffsets": "latest"}, "ending offset not valid in streaming queries"),
        ({"startingOffsets": '{"JFK": {"0": 0}}'}, "KVSPOOL_OFFSETS_DO_NOT_MATCH"),
    ],
)
def test_an_option_that_is_wrong_ends_the_query_with_its_name(
    start: Callable[..., StreamingQuery], root: Path, options: dict[str, str], words: str
) -> None:
    with pytest.raises(Exception, match=words):
        start(root, Sink(), **options).awaitTermination(PATIENCE)


def test_a_root_that_is_not_there_is_named(start: Callable[..., StreamingQuery], tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"KVSPOOL_SOURCE_NOT_FOUND.*nothing does not exist"):
        start(tmp_path / "nothing", Sink()).awaitTermination(PATIENCE)
