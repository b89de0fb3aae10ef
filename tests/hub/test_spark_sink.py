"""A written stream has each record once, in the order of its key, whatever fails, is killed or is repeated."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from parts import leave_part
from sessions import MARKS, once, told

import kvspool
import shard
from shard import ShardSet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = MARKS

PER_FILE = 400


def put_file(folder: Path, number: int) -> None:
    """Put a file of PER_FILE lines where a stream of text files finds it: whole, by its name."""
    lines = "".join(f"{number * PER_FILE + at}\n" for at in range(PER_FILE))
    (folder.parent / "part").write_text(lines, encoding="utf-8")
    os.utime(folder.parent / "part", (1_700_000_000 + number, 1_700_000_000 + number))  # a stream takes files by their times
    (folder.parent / "part").rename(folder / f"{number:03}.txt")


def stream(spark: SparkSession, folder: Path, *, files: int = 1) -> DataFrame:
    lines = spark.readStream.option("maxFilesPerTrigger", files).text(str(folder))
    return lines.selectExpr("concat('key-', cast(value AS int) % 20) AS key", "value")


def run(frame: DataFrame, root: Path, checkpoint: Path, format: str = "kvspool", **options: str) -> Any:
    """Let a query take what is there; it ends then."""
    writer = frame.writeStream.format(format).options(checkpointLocation=str(checkpoint), **options).trigger(availableNow=True)
    query = writer.start(str(root))
    query.awaitTermination(100)
    assert not query.isActive
    return query


def values(root: Path) -> list[int]:
    """Return the values that are there, after a look at the order of each key: within a batch it is that of the rows."""
    with shard.open(root) as shards:
        last: Counter[bytes] = Counter()
        found = []
        for log in shards.shards:
            for record in log.read():
                number = int(record.data)
                assert record.key == b"key-%d" % (number % 20)
                assert number >= last[record.key], "a key's records stay in their order"
                last[record.key] = number
                found.append(number)
    return sorted(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, so three batches; and a set of four shards."""
    (tmp_path / "in").mkdir()
    for number in range(3):
        put_file(tmp_path / "in", number)
    shard.create(tmp_path / "root", prefix="p", bits=2, capacity="1MiB").close()
    return tmp_path / "in"


def last_batches(root: Path) -> set[int | None]:
    with shard.open(root) as shards:
        return {one.last for log in shards.shards for one in log.producers()}


def test_a_batch_that_is_replayed_adds_nothing(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    root, checkpoint = tmp_path / "root", tmp_path / "checkpoint"
    run(stream(spark, folder), root, checkpoint)
    assert values(root) == list(range(3 * PER_FILE))
    assert last_batches(root) == {2}

    for name in ("2", ".2.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)  # as if the driver had been killed before it was written
    put_file(folder, 3)
    query = run(stream(spark, folder), root, checkpoint)
    assert [progress["batchId"] for progress in query.recentProgress][:2] == [2, 3]
    assert values(root) == list(range(4 * PER_FILE))


def test_a_batch_that_is_repeated_in_other_partitions_is_an_error(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    root, checkpoint = tmp_path / "root", tmp_path / "checkpoint"
    run(stream(spark, folder, files=3).repartition(3, "key"), root, checkpoint)
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    with pytest.raises(StreamingQueryException, match="KVSPOOL_BATCH_CHANGED.*must make the same partitions"):
        run(stream(spark, folder, files=3).repartition(2, "key"), root, checkpoint)
    with shard.open(root) as shards:
        assert sorted(int(record.data) for record in shards.read()) == list(range(3 * PER_FILE)), "nothing more was written"


def test_parts_of_a_batch_in_partitions_that_it_has_no_more_are_an_error(tmp_path: Path) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from hub.spark.appending import Appended, BatchPart
    from hub.spark.sink import ShardSink
    from hub.spark.target import SinkTarget, SparkSinkError

    kvspool.create(tmp_path / "log", capacity="1MiB").close()
    fields = StructType([StructField("value", StringType())])
    told = [Appended(1, 0, BatchPart("q/0", 7), {"log": {0: []}}), Appended(1, 0, BatchPart("q/1", 7), {"log": {0: ["q/0"]}})]
    sink = ShardSink(SinkTarget.parse({"path": str(tmp_path / "log")}, fields))
    sink.commit([*told, None], 7)
    told[1].shards["log"][0].append("q/2")
    with pytest.raises(SparkSinkError, match=r"KVSPOOL_BATCH_CHANGED.*batch 7 has 2 partitions.*as q/2"):
        sink.commit([*told], 7)
    ShardSink(SinkTarget.parse({"path": str(tmp_path / "log"), "changedBatch": "append"}, fields)).commit([*told], 7)


def write_part(sink: Any, query: str, batch: int, partition: int, values: list[int]) -> Any:
    """Let a sink write the rows of a task."""
    import pyarrow
    from pyspark import TaskContext

    class Context:
        def partitionId(self) -> int:
            return partition

        def getLocalProperty(self, name: str) -> str:
            return {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch)}[name]

    rows = pyarrow.RecordBatch.from_pydict({"key": [b"%d" % one for one in values], "value": [b"%d" % one for one in values]})
    with mock.patch.object(TaskContext, "get", Context):
        return sink.write(iter([rows]))


def sink_of(root: Path, **options: str) -> Any:
    from pyspark.sql.types import BinaryType, StructField, StructType

    from hub.spark.sink import ShardSink
    from hub.spark.target import SinkTarget

    fields = StructType([StructField(name, BinaryType()) for name in ("key", "value")])
    return ShardSink(SinkTarget.parse({"path": str(root), **options}, fields))


@pytest.mark.parametrize("is_log", [False, True])
def test_other_partitions_are_an_error_before_a_row_is_stored_twice(tmp_path: Path, is_log: bool) -> None:
    from hub.spark import staged
    from hub.spark.target import SparkSinkError

    root = tmp_path / "root"
    if is_log:
        kvspool.create(root, capacity="1MiB").close()
    else:
        shard.create(root, prefix="p", bits=2, capacity="1MiB").close()

    def stored() -> list[int]:
        with kvspool.open(root) if is_log else shard.open(root) as found:
            return sorted(int(record.value) for record in found.read())

    def part(partition: int, count: int) -> list[int]:
        return [number for number in range(300) if number % count == partition]

    first = sink_of(root)
    done = [write_part(first, "q", 7, partition, part(partition, 3)) for partition in (1, 2)]
    assert not any(one.staged for one in done)
    first.abort([None, *done], 7)
    there = sorted([*part(1, 3), *part(2, 3)])
    assert stored() == there

    second = sink_of(root)
    done = [write_part(second, "q", 7, 0, part(0, 2))]
    with pytest.raises(SparkSinkError, match="KVSPOOL_BATCH_CHANGED.*now it has"):
        write_part(second, "q", 7, 1, part(1, 2))
    second.abort([*done, None], 7)
    assert not staged.folder_of(second.target).exists()
    third = sink_of(root)
    done = [write_part(third, "q", 7, 0, range(0, 300, 3)), None]  # as if partition 1 had no rows, and 2 did not exist
    with pytest.raises(SparkSinkError, match=r"KVSPOOL_BATCH_CHANGED.*batch 7 has 2 partitions.*q/1, q/2: nothing more was written"):
        third.commit(done, 7)
    assert stored() == there and not staged.folder_of(third.target).exists()

    killed, fourth = sink_of(root), sink_of(root)
    write_part(killed, "q", 7, 0, part(0, 3))  # its driver is killed before the commit
    other = write_part(killed, "other", 0, 0, [1000])
    assert not other.staged
    assert len(list(staged.folder_of(killed.target).iterdir())) == 1
    done = [write_part(fourth, "q", 7, partition, part(partition, 3)) for partition in range(3)]
    assert [bool(one.staged) for one in done] == [True, False, False]
    assert stored() == [*there, 1000]
    fourth.commit(done, 7)
    assert stored() == [*range(300), 1000] and not staged.folder_of(fourth.target).exists()
    fourth.commit([write_part(sink_of(root), "q", 7, partition, part(partition, 3)) for partition in range(3)], 7)
    assert stored() == [*range(300), 1000]


def test_staged_rows_of_abandoned_queries_are_removed_after_a_week(tmp_path: Path) -> None:
    from hub.spark import staged

    kvspool.create(tmp_path / "log", capacity="1MiB").close()
    sink = sink_of(tmp_path / "log")
    folder = staged.folder_of(sink.target)
    folder.mkdir()
    for name, age in (("gone/-1.arrow", 8), ("new-1.arrow", 6), ("no file of ours", 8)):
        (folder / name.replace("/", "%2F")).touch()
        when = time.time() - age * 24 * 3600
        os.utime(folder / name.replace("/", "%2F"), (when, when))
    sink.commit([write_part(sink, "q", 0, 0, [1])], 0)
    assert sorted(path.name for path in folder.iterdir()) == ["new-1.arrow", "no file of ours"]


def test_an_older_checkpoint_is_noticed_by_the_word_of_the_last_batch(tmp_path: Path) -> None:
    from hub.spark.target import SparkSinkError

    shard.create(tmp_path / "root", prefix="p", bits=1, capacity="1MiB").close()
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "3").write_text("one")
    for location in (str(checkpoint), f"file://{checkpoint}"):
        sink = sink_of(tmp_path / "root", checkpointLocation=location)
        sink.commit([write_part(sink, "q", 3, 0, [1, 2, 3])], 3)
    (checkpoint / "offsets" / "3").write_text("another one")
    sink = sink_of(tmp_path / "root", checkpointLocation=str(checkpoint))
    with pytest.raises(SparkSinkError, match=r"KVSPOOL_CHECKPOINT_RESTORED.*batch 3 of q/0"):
        write_part(sink, "q", 3, 0, [4, 5, 6])
    with shard.open(tmp_path / "root") as shards:
        assert sorted(record.value for record in shards.read()) == [b"1", b"2", b"3"]
    (checkpoint / "offsets" / "4").write_text("another one")
    sink.commit([write_part(sink, "q", 4, 0, [4, 5, 6])], 4)


def test_a_checkpoint_that_was_restored_is_noticed(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    root, checkpoint, saved = tmp_path / "root", tmp_path / "checkpoint", tmp_path / "saved"
    (folder / "002.txt").unlink()
    (folder / "001.txt").unlink()
    run(stream(spark, folder), root, checkpoint)
    shutil.copytree(checkpoint, saved)
    put_file(folder, 1)
    run(stream(spark, folder), root, checkpoint)
    assert values(root) == list(range(2 * PER_FILE))
    shutil.rmtree(checkpoint)
    saved.rename(checkpoint)
    (folder / "001.txt").unlink()
    put_file(folder, 2)  # as many rows as the batch that is stored
    with pytest.raises(StreamingQueryException, match="KVSPOOL_CHECKPOINT_RESTORED"):
        run(stream(spark, folder), root, checkpoint)
    assert values(root) == list(range(2 * PER_FILE))


def test_tasks_that_find_other_logs_than_the_driver_are_an_error_unless_each_host_may_have_its_own(tmp_path: Path) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from hub.spark.appending import Appended, BatchPart
    from hub.spark.sink import ShardSink
    from hub.spark.target import SinkTarget, SparkSinkError
    from hub.spark.writer import ShardWriter

    shard.create(tmp_path / "root", prefix="p", bits=1, capacity="64KiB").close()
    fields = StructType([StructField("value", StringType()), StructField("topic", StringType())])
    options = {"path": str(tmp_path / "root"), "topic": "p"}
    one, own = SinkTarget.parse(options, fields), SinkTarget.parse({**options, "hosts": "own"}, fields)
    one.open("p").close()
    (tmp_path / "root").rename(tmp_path / "driver")  # this is another host now
    shard.create(tmp_path / "root", prefix="p", bits=1, capacity="64KiB").close()
    with pytest.raises(SparkSinkError, match="KVSPOOL_OTHER_LOGS.*root on .* has other logs than on the driver's host.*hosts=own"):
        one.open("p")
    own.open("p").close()
    # The driver doesn't know the topics of a column before their rows.
    any_topic = SinkTarget.parse({"path": str(tmp_path / "root")}, fields)
    told = [Appended(1, 0, BatchPart(f"q/{host}", 0), {"p": {host: []}}, f"host{host}", {"p": (f"id{host}", "id")}) for host in (0, 1)]
    for sink in (ShardSink(any_topic).commit, lambda tasks, batch: ShardWriter(any_topic).commit(tasks)):
        with pytest.raises(SparkSinkError, match="KVSPOOL_OTHER_LOGS.*topic 'p' has other logs on host0 than on host1"):
            sink([*told], 0)
        sink([told[0], told[0], None], 0)
    ShardSink(own).commit([*told], 0)


def task(sink: Any, query: str, number: int, batch: int, values: str) -> Any:
    """Let a sink write values, parted by blanks, as it does in a task."""
    import pyarrow
    from pyspark import TaskContext

    class Context:
        def partitionId(self) -> int:
            return number

        def getLocalProperty(self, name: str) -> str:
            return {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch)}[name]

    with mock.patch.object(TaskContext, "get", Context):
        return sink.write(iter([pyarrow.RecordBatch.from_pydict({"value": values.split()})]))


def test_rows_that_a_whole_part_of_a_batch_has_not_are_appended_if_it_may_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from hub.spark.sink import ShardSink
    from hub.spark.target import SinkTarget, SparkSinkError

    fields = StructType([StructField("value", StringType())])
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        strict = ShardSink(SinkTarget.parse({"path": str(tmp_path / "log")}, fields))
        task(strict, "q", 0, 5, "a1 a2")
        task(strict, "q", 1, 5, "b1 b2")
        with pytest.raises(SparkSinkError, match="2 records of batch 5 of q/0 are stored, and now it has 3"):
            task(strict, "q", 0, 5, "a1 a2 c1")
        sink = ShardSink(SinkTarget.parse({"path": str(tmp_path / "log"), "changedBatch": "append"}, fields))
        done = [task(sink, "q", 0, 5, "a1 a2 c1"), task(sink, "q", 1, 5, "c2 b1 b2")]
        sink.commit(done, 5)
        assert [one.data for one in log.read()] == ["a1", "a2", "b1", "b2", "c1", "c2"]
        assert [(one.records, one.repeated) for one in done] == [(3, 0), (3, 0)]
        assert task(sink, "q", 1, 5, "b2 b1").repeated == 3
        assert "1 of its stored records are no longer in it" in caplog.text
        for one in (strict, sink):
            with pytest.raises(SparkSinkError, match="q/0 has appended a later batch than 4, so it is unknown which records of this one"):
                task(one, "q", 0, 4, "d")
        assert len(list(log.read())) == 6


def test_a_batch_that_failed_loses_no_row_in_other_partitions_if_it_may_change(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    from pyspark import TaskContext
    from pyspark.errors import StreamingQueryException
    from pyspark.sql.datasource import DataSource

    from hub.spark.sink import ShardSink
    from hub.spark.target import SinkTarget

    class Failing(ShardSink):
        def write(self, iterator: Iterator[Any]) -> Any:
            context = TaskContext.get()
            assert context is not None
            if context.partitionId() == 2:
                raise OSError("the last task fails")
            return super().write(iterator)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "failing_part"

        def streamWriter(self, schema: Any, overwrite: bool) -> Failing:
            return Failing(SinkTarget.parse(self.options, schema))

    spark.dataSource.register(Source)
    root, checkpoint = tmp_path / "root", tmp_path / "checkpoint"
    with pytest.raises(StreamingQueryException, match="the last task fails"):
        run(stream(spark, folder, files=3).repartition(3, "key"), root, checkpoint, "failing_part")
    run(stream(spark, folder, files=3).repartition(2, "key"), root, checkpoint, changedBatch="append")
    with shard.open(root) as shards:
        assert {int(record.data) for record in shards.read()} == set(range(3 * PER_FILE)), "some may be there twice, none is missing"


def test_the_rest_of_a_batch_is_appended_when_it_is_repeated(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    root, checkpoint = tmp_path / "root", tmp_path / "checkpoint"
    run(stream(spark, folder), root, checkpoint)
    (name,) = {one.name for log in ShardSet.open(root).shards for one in log.producers()}
    batch = [number for number in range(3 * PER_FILE, 4 * PER_FILE)]
    with shard.open(root) as shards:  # a task of the next batch that was killed before its end
        for at, log in enumerate(shards.shards):
            ours = [number for number in batch if shards.shard_of(b"key-%d" % (number % 20)) == at]
            keys: list[bytes | None] = [b"key-%d" % (number % 20) for number in ours]
            leave_part(log, name, [str(number) for number in ours], 3, len(ours) // 3, keys)
    put_file(folder, 3)
    run(stream(spark, folder), root, checkpoint)
    assert values(root) == list(range(4 * PER_FILE))


@pytest.mark.parametrize("where", ["write", "commit"])
def test_a_task_or_a_commit_that_fails_after_all_was_appended_adds_nothing(
    spark: SparkSession, folder: Path, tmp_path: Path, where: str
) -> None:
    from pyspark.errors import StreamingQueryException
    from pyspark.sql.datasource import DataSource

    from hub.spark.sink import ShardSink
    from hub.spark.target import SinkTarget

    is_first = once(tmp_path / "failed")

    class Failing(ShardSink):
        def write(self, iterator: Iterator[Any]) -> Any:
            done = super().write(iterator)
            if where == "write" and is_first():
                raise OSError("the task failed after it had appended")
            return done

        def commit(self, messages: Any, batchId: int) -> None:
            if where == "commit" and batchId == 1 and is_first():
                raise OSError("the commit failed")
            super().commit(messages, batchId)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"failing_{where}"

        def streamWriter(self, schema: Any, overwrite: bool) -> Failing:
            return Failing(SinkTarget.parse(self.options, schema))

    spark.dataSource.register(Source)
    root, checkpoint = tmp_path / "root", tmp_path / "checkpoint"
    if where == "commit":
        with pytest.raises(StreamingQueryException, match="the commit failed"):
            run(stream(spark, folder), root, checkpoint, f"failing_{where}")
        assert values(root) == list(range(2 * PER_FILE)), "the batch is there, and not committed"
    run(stream(spark, folder), root, checkpoint, f"failing_{where}")
    assert (tmp_path / "failed").exists()
    assert values(root) == list(range(3 * PER_FILE))


@pytest.mark.parametrize(("mode", "words"), [("complete", "can't replace its content with the whole result"), ("update", "Update mode")])
def test_only_the_output_mode_append_is_possible(spark: SparkSession, folder: Path, tmp_path: Path, mode: str, words: str) -> None:
    counts = stream(spark, folder, files=3).groupBy("key").count().selectExpr("key", "cast(count AS string) AS value")
    writer = counts.writeStream.format("kvspool").outputMode(mode).option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(Exception) as failure:
        writer.trigger(availableNow=True).start(str(tmp_path / "root")).awaitTermination(100)
    assert words in told(failure)
    assert values(tmp_path / "root") == []


def test_tasks_of_two_queries_append_to_the_same_shards_at_once(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    frame = stream(spark, folder, files=3).repartition(3)
    queries = []
    for number in range(2):
        writer = frame.writeStream.format("kvspool").option("checkpointLocation", str(tmp_path / f"checkpoint-{number}"))
        queries.append(writer.trigger(availableNow=True).option("durability", "disk").start(str(tmp_path / "root")))
    for query in queries:
        assert query.awaitTermination(100)
    with shard.open(tmp_path / "root") as shards:
        assert Counter(int(record.data) for record in shards) == Counter(dict.fromkeys(range(3 * PER_FILE), 2))
        assert all(len(log.producers()) == 6 for log in shards.shards)
        assert all(log.stats().unsynced_records == 0 for log in shards.shards)  # type: ignore[union-attr]


def test_one_journal_takes_a_stream_too(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        run(stream(spark, folder), tmp_path / "log", tmp_path / "checkpoint")
        assert [int(record.data) for record in log.read()] == list(range(3 * PER_FILE))
        assert [(one.batch, one.last, one.rows) for one in log.producers()] == [(2, 2, PER_FILE)]
