"""Records that Spark's tasks write concurrently are stored, each task's whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from faults import ClockPort
from sessions import MARKS, load, once, told

import hub
import kvspool
import shard
from kvspool import KvspoolError, system
from kvspool.engine import producer_table
from kvspool.record import Codec
from shard import ShardSet, route

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = MARKS


def schema(columns: str) -> Any:
    from pyspark.sql import types

    kinds = {"string": types.StringType, "binary": types.BinaryType, "int": types.IntegerType, "bigint": types.LongType}
    kinds["timestamp"] = types.TimestampType
    return types.StructType([types.StructField(name, kinds[kind]()) for name, kind in (one.split() for one in columns.split(","))])


def target(path: Path, columns: str, **options: str) -> Any:
    from hub.spark.target import SinkTarget

    return SinkTarget.parse({"path": str(path), **options}, schema(columns))


def of_rows(kinds: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    import pyarrow

    return pyarrow.RecordBatch.from_pylist(rows, pyarrow.schema(kinds))


def numbered(spark: SparkSession, count: int, *columns: str) -> DataFrame:
    return spark.range(count).selectExpr(*columns)


def save(frame: DataFrame, path: Path, **options: str) -> None:
    frame.write.format("kvspool").options(**options).mode("append").save(str(path))


def test_every_task_appends_to_the_same_shards_at_once_and_nothing_is_lost(
    spark: SparkSession, tmp_path: Path, narrow_batches: None
) -> None:
    frame = numbered(
        spark,
        20_000,
        "concat('key-', id % 50) AS key",
        "concat('{\"n\":', id, '}') AS value",
        "cast(id % 200 AS int) AS type",
        "timestamp_micros(1700000000000000) AS timestamp",
    ).repartition(4)
    save(frame, tmp_path / "root", prefix="p", bits="2", capacity="4MiB", codec="json")

    with shard.open(tmp_path / "root") as shards:
        assert (shards.prefix, shards.bits, shards.shards[0].capacity) == ("p", 2, 4 << 20)
        records = list(shards)
    assert sorted(record.data["n"] for record in records) == list(range(20_000))
    for record in records:
        number = record.data["n"]
        assert record.key == b"key-%d" % (number % 50)
        assert record.shard == route.shard_of(record.key, 2)
        assert record.type == number % 200
        assert record.codec == Codec.JSON
        assert record.timestamp == 1_700_000_000_000_000_000


def test_what_was_written_is_read_back(spark: SparkSession, tmp_path: Path) -> None:
    frame = numbered(
        spark,
        1000,
        "if(id % 7 = 0, NULL, cast(concat('k', id % 20) AS binary)) AS key",
        "cast(concat('value-', id) AS binary) AS value",
        "cast(id % 256 AS int) AS type",
    )
    with hub.create(tmp_path / "root") as root:
        root.create_client("a", bits=2, capacity="1MiB").close()
        root.create_client("b", bits=1, capacity="1MiB").close()
        save(frame, root.path, prefix="a")
        read = load(spark, root.path, prefix="a").select("key", "value", "type")
        assert read.exceptAll(frame).count() == 0
        assert frame.exceptAll(read).count() == 0
        assert {record.client for record in root} == {"a"}
        assert {record.codec for record in root} == {Codec.RAW}


def test_rows_without_a_key_are_spread_by_their_values_and_columns_may_be_few(spark: SparkSession, tmp_path: Path) -> None:
    shard.create(tmp_path / "root", prefix="p", bits=2, capacity="1MiB").close()
    save(numbered(spark, 400, "concat('é', id) AS value").coalesce(1), tmp_path / "root")
    with shard.open(tmp_path / "root") as shards:
        assert all(70 < stats.records < 130 for stats in shards.stats())
        assert all(record.shard == route.shard_of(record.value, 2) for record in shards)
        assert sorted(record.data for record in shards) == sorted(f"é{at}" for at in range(400))
        assert {(record.key, record.type, record.codec) for record in shards} == {(None, 0, Codec.TEXT)}


def test_one_log_is_appended_to(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        log.append("first")
        save(numbered(spark, 100, "concat('v', id) AS value", "cast(id AS tinyint) AS type").repartition(2), tmp_path / "log")
        assert [record.sequence for record in log] == list(range(101))
        assert Counter(record.data for record in log) == Counter(["first", *(f"v{at}" for at in range(100))])
        assert {(record.data, record.type) for record in log} == {("first", 0), *((f"v{at}", at) for at in range(100))}


def test_a_frame_without_rows_makes_the_set_and_appends_nothing(spark: SparkSession, tmp_path: Path) -> None:
    save(numbered(spark, 0, "'v' AS value"), tmp_path / "root", bits="1", capacity="64KiB")
    with shard.open(tmp_path / "root") as shards:
        assert (shards.prefix, shards.bits, list(shards)) == ("", 1, [])


def test_a_set_that_is_there_is_used_whatever_the_capacity_and_an_unfinished_one_is_completed(spark: SparkSession, tmp_path: Path) -> None:
    shard.create(tmp_path, prefix="p", bits=1, capacity=65536).close()
    save(numbered(spark, 100, "concat('v', id) AS value"), tmp_path, prefix="p", bits="1", capacity="1MiB")
    shutil.rmtree(tmp_path / "p.1.001")
    save(numbered(spark, 100, "concat('v', id) AS value"), tmp_path, prefix="p", bits="1", capacity="128KiB")
    with shard.open(tmp_path) as shards:
        assert [stats.capacity for stats in shards.stats()] == [65536, 131072]
        assert sum(stats.records for stats in shards.stats()) > 100


@pytest.mark.parametrize(
    ("mode", "words"),
    [("overwrite", 'format kvspool only appends: use .mode("append")'), ("errorifexists", "SAVE_MODE"), ("ignore", "SAVE_MODE")],
)
def test_another_mode_than_append_is_refused_and_nothing_is_touched(spark: SparkSession, tmp_path: Path, mode: str, words: str) -> None:
    from pyspark.errors import PySparkException

    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=65536) as shards:
        shards.append("kept")
        with pytest.raises(PySparkException) as failure:
            numbered(spark, 10, "'v' AS value").write.format("kvspool").mode(mode).save(str(tmp_path / "root"))
        assert words in told(failure)
        assert [record.data for record in shards] == ["kept"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("value string, id bigint", "column id can't be written to kvspool; there are value, key, topic, partition, timestamp and type"),
        ("key string", "a column named value is missing"),
        ("value string, VALUE string", "two columns have the same name"),
        ("value bigint", "column value is bigint; it must be binary or string"),
        ("value string, key bigint", "column key is bigint; it must be binary or string"),
        ("value string, type string", "column type is string; it must be tinyint or smallint or int or bigint"),
        ("value string, timestamp bigint", "column timestamp is bigint; it must be timestamp or timestamp_ntz"),
        ("value string, topic bigint", "column topic is bigint; it must be string"),
        ("value string, partition bigint", "column partition is bigint; it must be int or tinyint or smallint"),
        ("value string, headers binary", "column headers can't be written to kvspool: records have none"),
    ],
)
def test_columns_that_can_not_be_written_are_named(tmp_path: Path, columns: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        target(tmp_path / "root", columns, bits="1")
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_written_is_said_before_any_task_runs(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import AnalysisException

    for columns, options, words in (
        (["'v' AS value", "id"], {"bits": "1"}, "column id can't be written to kvspool"),
        (["'v' AS value"], {}, "has no complete shard set with prefix ''; option bits creates one"),
    ):
        with pytest.raises(AnalysisException) as failure:
            save(numbered(spark, 10, *columns), tmp_path / "root", **options)
        assert words in told(failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("new", {}, "has no complete shard set with prefix ''; option bits creates one"),
        ("good", {"prefix": "r"}, "has no complete shard set with prefix 'r'"),
        ("hole", {}, "has no complete shard set with prefix 'p'"),
        ("two", {"prefix": "p"}, "prefix 'p' has shards of 1 and of 2 bits"),
        ("new", {"bits": "many"}, "option bits is a number, not 'many'"),
        ("new", {"bits": "11"}, "bits must be 0..10, for 1 to 1024 shards, not 11"),
        ("new", {"bits": "0"}, "a single shard without bits needs a prefix"),
        ("new", {"bits": "1", "prefix": "a.b"}, "a prefix may have only the characters"),
        ("new", {"bits": "1", "capacity": "huge"}, "a size is a number with a unit"),
        ("new", {"bits": "1", "codec": "pickle"}, "option codec is one of raw, text, json, msgpack, not 'pickle'"),
        ("good", {"failOnDataLoss": "true"}, "unknown option 'failondataloss' for writing with format kvspool"),
        ("good", {"topics": "p"}, "did you mean topic?"),
        ("good", {"kafka.bootstrap.servers": "h:9092"}, "there is no broker"),
        ("good", {"topic": "p", "prefix": "p"}, "options topic and prefix mean the same: give one"),
        ("good", {"topic": "../p"}, "option topic: a prefix may have only the characters"),
        ("good", {"durability": "os"}, "option durability is one of memory, disk, not 'os'"),
        ("good", {"memory": "1kB"}, "option memory is at least 1MiB, not '1kB'"),
        ("log", {"topic": "other"}, "is one log, so its topic is 'log', not 'other'; leave option topic out"),
        ("log", {"prefix": "p"}, "is one log, not a root of shards: options prefix and bits have no meaning there"),
        ("log", {"bits": "1"}, "is one log, not a root of shards: options prefix and bits have no meaning there"),
        ("none/new", {"bits": "1"}, "none is not a directory; create it first"),
    ],
)
def test_where_nothing_can_be_written_is_said(odd_root: Path, name: str, options: dict[str, str], words: str) -> None:
    with pytest.raises((KvspoolError, OSError, ValueError)) as failure:
        target(odd_root / name, "value string", **options)
    assert words in str(failure.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"value": None}, "column value has nulls"),
        ({"type": 256}, "column type doesn't fit"),
        ({"value": "v" * 20000}, "a ring of 65536 bytes holds at most 16384"),
        ({"timestamp": -1}, "column timestamp has times before 1970"),
        ({"topic": None}, "[KVSPOOL_NULL_TOPIC_IN_DATA] column topic is null in a row"),
        ({"topic": "q"}, "[KVSPOOL_UNKNOWN_TOPIC] "),
        ({"topic": "q"}, "has no complete shard set with prefix 'q'; option bits creates one"),
        ({"topic": "../../etc"}, "[KVSPOOL_UNKNOWN_TOPIC] column topic: a prefix may have only the characters"),
        ({"topic": ""}, "[KVSPOOL_UNKNOWN_TOPIC] column topic is empty in a row"),
        ({"partition": 9}, "[KVSPOOL_UNKNOWN_PARTITION] column partition is 9 in a row; topic 'p' has the partitions 0 to 1"),
        ({"partition": -1}, "column partition is -1 in a row"),
    ],
)
def test_a_row_that_can_not_be_written_fails_the_task_with_the_reason(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    import pyarrow

    from hub.spark.appending import BatchPart, append

    kinds = {"value": pyarrow.string(), "topic": pyarrow.string(), "partition": pyarrow.int32()}
    kinds |= {"type": pyarrow.int32(), "timestamp": pyarrow.timestamp("us", "UTC")}
    good = {"value": "v", "topic": "p", "partition": 0, "type": 1, "timestamp": 1}
    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=65536) as shards:
        writing = target(tmp_path / "root", "value string, topic string, partition int, type int, timestamp timestamp")
        with pytest.raises((KvspoolError, ValueError), match=re.escape(words)):
            append(writing, iter([of_rows(kinds, [good]), of_rows(kinds, [good, good | row, good])]), BatchPart("job/0", 0))
        assert list(shards) == []
        assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["p.1.000", "p.1.001"]
        assert append(writing, iter([of_rows(kinds, [good])]), BatchPart("job/0", 0)).records == len(list(shards)) == 1


def test_a_row_that_can_not_be_written_fails_the_job_with_the_reason(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=65536) as shards:
        with pytest.raises(PySparkException) as failure:
            save(numbered(spark, 10, "'v' AS value", "if(id = 5, NULL, 'p') AS topic").coalesce(1), tmp_path / "root")
        assert "[KVSPOOL_NULL_TOPIC_IN_DATA] column topic is null in a row" in told(failure)
        assert list(shards) == []


@pytest.mark.parametrize("format", ["spool", "kvj"])
def test_a_task_that_fails_after_it_has_appended_is_run_again_and_adds_nothing(
    spark: SparkSession, tmp_path: Path, format: str
) -> None:
    from pyspark.sql.datasource import DataSource

    from hub.spark.target import SinkTarget
    from hub.spark.writer import ShardWriter

    fails = once(tmp_path / "failed")

    class Failing(ShardWriter):
        def write(self, iterator: Iterator[Any]) -> Any:
            done = super().write(iterator)
            if fails():
                raise OSError("the task failed after it had appended")
            return done

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"failing_{format}"

        def writer(self, schema: Any, overwrite: bool) -> Failing:
            return Failing(SinkTarget.parse(self.options, schema))

    spark.dataSource.register(Source)
    columns = ("if(id % 3 = 0, NULL, concat('key-', id % 20)) AS key", "concat('value-', id) AS value")
    writer = numbered(spark, 4000, *columns).repartition(3).write.format(f"failing_{format}").mode("append")
    writer.options(prefix="p", bits="2", capacity="4MiB", format=format).save(str(tmp_path / "root"))

    assert (tmp_path / "failed").exists()
    with shard.open(tmp_path / "root") as shards:
        assert sorted(record.data for record in shards) == sorted(f"value-{at}" for at in range(4000))
        tasks = {one.name for log in shards.shards for one in log.producers()}
    assert len(tasks) == 3, "a copy of a task that still runs would find its account"


def test_jobs_in_any_number_find_room_and_a_copy_of_a_task_that_is_over_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hub.spark.writer import ShardWriter

    monkeypatch.setattr(producer_table, "MOST", 12)
    monkeypatch.setattr(producer_table, "STEP", 4)
    writing = target(tmp_path / "root", "value binary", prefix="p", bits="1", capacity="1MiB")
    jobs = 40
    running = ShardWriter(writing)
    assert run_task(running, 0).repeated == 0
    for number in range(jobs):
        job = ShardWriter(writing)
        messages = [run_task(job, task) for task in range(3)]
        (job.abort if number % 5 == 0 else job.commit)([*messages, None] if number % 3 else messages)
        assert run_task(job, 2).repeated == 20, "a copy of the task that Spark has abandoned"
    assert run_task(running, 0).repeated == 20, "it is run again, after many jobs"
    with shard.open(tmp_path / "root") as shards:
        assert len(list(shards)) == 20 * (3 * jobs + 1)


def test_a_job_that_runs_for_days_keeps_what_it_knows_of_its_tasks(tmp_path: Path) -> None:
    from hub.spark.writer import ShardWriter

    writing = target(tmp_path / "root", "value binary", prefix="p", bits="1", capacity="1MiB")
    now = 1_700_000_000_000_000_000
    with system.replaced(ClockPort(now)):
        running, other = ShardWriter(writing), ShardWriter(writing)
        run_task(running, 0)
    for hours in range(1, 7 * 24, 20):
        with system.replaced(ClockPort(now + hours * 3600 * 10**9)):
            other.commit([run_task(other, hours)])
    assert run_task(running, 0).repeated == 20
    with shard.open(tmp_path / "root") as shards:
        assert all(len(log.producers()) == 10 for log in shards.shards)


def test_where_the_driver_has_no_logs_none_are_made_when_a_job_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hub.spark.writer import ShardWriter

    caplog.set_level("INFO", "kvspool")
    writer = ShardWriter(target(tmp_path / "root", "value binary", prefix="p", bits="1", capacity="1MiB"))
    done = run_task(writer, 0)
    shutil.rmtree(tmp_path / "root")
    writer.commit([done])
    assert not (tmp_path / "root").exists()
    assert "topic p can't store that a job is over" in caplog.text


def run_task(writer: Any, task: int) -> Any:
    """Let a writer write 20 rows, as it does in a task of that number."""
    import pyarrow
    from pyspark import TaskContext

    class Context:
        def partitionId(self) -> int:
            return task

    rows = pyarrow.RecordBatch.from_pydict({"value": [b"%d" % at for at in range(20)]})
    with mock.patch.object(TaskContext, "get", Context):
        return writer.write(iter([rows]))


def test_a_task_whose_worker_is_killed_is_run_again_and_each_row_is_there_once(
    spark: SparkSession, tmp_path: Path, narrow_batches: None
) -> None:
    dies = once(tmp_path / "killed")

    def die_once(batches: Iterator[Any]) -> Iterator[Any]:
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            if rows > 2000 and dies():
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    frame = numbered(spark, 4000, "concat('key-', id % 20) AS key", "concat('value-', id) AS value").coalesce(1)
    frame = frame.mapInArrow(die_once, frame.schema)
    save(frame, tmp_path / "root", prefix="p", bits="2", capacity="4MiB")

    assert (tmp_path / "killed").exists()
    with shard.open(tmp_path / "root") as shards:
        assert sorted(record.data for record in shards) == sorted(f"value-{at}" for at in range(4000))
        by_key: dict[bytes, list[int]] = {}
        for record in shards:
            assert record.shard == route.shard_of(record.key, 2)
            by_key.setdefault(record.key, []).append(int(record.data.removeprefix("value-")))
        assert all(numbers == sorted(numbers) for numbers in by_key.values()), "a key's rows stay in their order"


def test_rows_go_to_the_topic_and_the_partition_that_they_name(spark: SparkSession, tmp_path: Path) -> None:
    shard.create(tmp_path / "root", prefix="there", bits=1, capacity="1MiB").close()
    frame = numbered(
        spark,
        300,
        "concat('v', id) AS value",
        "if(id % 3 = 0, 'there', concat('new-', id % 3)) AS topic",
        "cast(if(id % 2 = 0, 1, NULL) AS int) AS partition",
        "id AS offset",
        "0 AS timestampType",
    ).repartition(2)
    save(frame, tmp_path / "root", bits="1", capacity="64KiB")
    for number, topic in enumerate(("there", "new-1", "new-2")):
        with shard.open(tmp_path / "root", prefix=topic) as shards:
            found = {int(record.data[1:]): record.shard for record in shards}
            assert found.keys() == {at for at in range(300) if at % 3 == number}
            assert all(where == (1 if at % 2 == 0 else route.shard_of(b"v%d" % at, 1)) for at, where in found.items())


def test_option_topic_comes_before_the_column(spark: SparkSession, tmp_path: Path) -> None:
    save(numbered(spark, 10, "'v' AS value", "'other' AS topic"), tmp_path / "root", topic="p", bits="1", capacity="64KiB")
    with shard.open(tmp_path / "root") as shards:
        assert (shards.prefix, len(list(shards))) == ("p", 10)


def test_a_log_takes_rows_of_its_own_topic_only(tmp_path: Path) -> None:
    import pyarrow

    from hub.spark.appending import BatchPart, append

    kinds = {"value": pyarrow.string(), "topic": pyarrow.string()}
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        writing = target(tmp_path / "log", "value string, topic string", durability="disk")
        append(writing, iter([of_rows(kinds, [{"value": "v", "topic": "log"}])]), BatchPart("job/0", 0))
        assert [record.data for record in log.read()] == ["v"]
        with pytest.raises(KvspoolError, match="is one log, of the topic 'log', and a row has 'other'; drop the column topic"):
            append(writing, iter([of_rows(kinds, [{"value": "v", "topic": "other"}])]), BatchPart("job/0", 1))
    kvspool.create(tmp_path / "sej", format="sej").close()
    with pytest.raises(ValueError, match="a log of the kind sej has no producers: only spools and kvj journals have"):
        target(tmp_path / "sej", "value string")


def test_more_rows_than_fit_into_memory_go_by_a_file(tmp_path: Path) -> None:
    import pyarrow

    from hub.spark.appending import BatchPart, append

    def batches() -> Iterator[Any]:
        for number in range(40):
            values = [b"%d-%d " % (number, at) + bytes(1000) for at in range(100)]
            yield pyarrow.RecordBatch.from_pydict({"key": [b"%d" % at for at in range(100)], "value": values})

    before = os.listdir(tempfile.gettempdir())
    writing = target(tmp_path / "root", "key binary, value binary", prefix="p", bits="1", capacity="16MiB", memory="1MiB")
    done = append(writing, batches(), BatchPart("job/0", 0))
    assert (done.records, done.repeated) == (4000, 0)
    assert append(writing, batches(), BatchPart("job/0", 0)).repeated == 4000
    with shard.open(tmp_path / "root") as shards:
        assert Counter(record.value for record in shards) == Counter(value for batch in batches() for value in batch["value"].to_pylist())
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("kvspool-sink") and name not in before]


def test_rows_of_many_topics_take_no_more_memory_than_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow

    from hub.spark import appending

    kinds = {"key": pyarrow.binary(), "value": pyarrow.binary(), "topic": pyarrow.string()}
    held, before = [0], pyarrow.total_allocated_bytes()
    append = appending._Topic.append

    def watched(self: Any, *arguments: Any) -> Any:
        held.append(pyarrow.total_allocated_bytes() - before)
        return append(self, *arguments)

    def batches() -> Iterator[Any]:
        for number in range(40):
            rows = [{"key": b"%d" % (at % 7), "value": b"%d-%d " % (number, at) + bytes(5000), "topic": f"t{at % 3}"} for at in range(100)]
            yield of_rows(kinds, rows)

    monkeypatch.setattr(appending._Topic, "append", watched)
    writing = target(tmp_path / "root", "key binary, value binary, topic string", bits="1", capacity="32MiB", memory="2MiB")
    done = appending.append(writing, batches(), appending.BatchPart("job/0", 0))
    assert (done.records, sorted(done.shards)) == (4000, ["t0", "t1", "t2"])
    assert 1 << 20 < max(held) < 3 << 20, "20 MiB of rows, of which 2 MiB may be in memory"
    for topic in range(3):
        with shard.open(tmp_path / "root", prefix=f"t{topic}") as shards:
            records, last = list(shards), Counter[bytes]()
            for record in records:
                number, at = map(int, record.value.rstrip(b"\0").split(b"-"))
                assert at % 3 == topic and record.key == b"%d" % (at % 7)
                assert last[record.key] <= 100 * number + at, "a key's rows stay in their order"
                last[record.key] = 100 * number + at
            assert len(records) == (1360, 1320, 1320)[topic]


def test_a_task_with_hundreds_of_topics_keeps_few_logs_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow

    from hub.spark import appending

    topics, found = 200, [0]
    kinds = {"value": pyarrow.binary(), "topic": pyarrow.string()}
    rows = [{"value": b"%d" % at, "topic": f"t{at % topics}"} for at in range(1000)]
    batches = [of_rows(kinds, rows[:500]), of_rows(kinds, rows[500:])]
    append = appending._Topic.append

    def watched(self: Any, *arguments: Any) -> Any:
        found.append(len(os.listdir("/proc/self/fd")))
        return append(self, *arguments)

    monkeypatch.setattr(appending._Topic, "append", watched)
    monkeypatch.setattr(appending, "MOST_OPEN", 8)
    writing = target(tmp_path / "root", "value binary, topic string", bits="1", format="kvj")
    before = len(os.listdir("/proc/self/fd"))
    done = appending.append(writing, iter(batches), appending.BatchPart("job/0", 0))
    assert len(found) == topics + 1
    assert max(found) - before < 100, "400 logs were appended to"
    assert done.records == 1000 and len(done.shards) == topics
    stored = Counter(record.value for name in route.scan(tmp_path / "root") for record in ShardSet.open(tmp_path / "root", prefix=name))
    assert stored == Counter(b"%d" % at for at in range(1000))


def test_a_row_that_fits_its_topic_may_be_next_to_rows_of_a_smaller_one(tmp_path: Path) -> None:
    import pyarrow

    from hub.spark.appending import BatchPart, append

    shard.create(tmp_path / "root", prefix="large", bits=1, capacity="1MiB").close()
    shard.create(tmp_path / "root", prefix="small", bits=1, capacity="64KiB").close()
    kinds = {"value": pyarrow.string(), "topic": pyarrow.string()}
    rows = [{"value": "v" * 20000, "topic": "large"}, {"value": "v", "topic": "small"}, {"value": "w", "topic": "large"}]
    assert append(target(tmp_path / "root", "value string, topic string"), iter([of_rows(kinds, rows)]), BatchPart("job/0", 0)).records == 3


def test_an_attempt_whose_rows_stop_coming_has_appended_nothing(tmp_path: Path) -> None:
    import pyarrow

    from hub.spark.writer import ShardWriter

    batches = [pyarrow.RecordBatch.from_pydict({"value": [b"%d-%d" % (number, at) for at in range(50)]}) for number in range(4)]

    def failing() -> Iterator[Any]:
        yield from batches[:2]
        raise OSError("the rows stopped coming")

    writer = ShardWriter(target(tmp_path / "root", "value binary", prefix="p", bits="2", capacity="1MiB"))
    with pytest.raises(OSError, match="the rows stopped coming"):
        writer.write(failing())
    assert (writer.write(iter(batches)).records, writer.write(iter(batches)).repeated) == (200, 200)
    with shard.open(tmp_path / "root") as shards:
        assert Counter(record.value for record in shards) == Counter(value for batch in batches for value in batch["value"].to_pylist())
