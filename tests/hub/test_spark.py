"""The data source: what Spark reads is what was appended, and what its tasks write at once is there, whole."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hub
import kvspool
import shard
from hub.spark import register, session_settings
from kvspool import Record
from kvspool.record import Codec
from shard import route

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from hub.spark.reader import ShardReader

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.spark,
    # Said by PySpark when it is imported beside pandas 3, which nothing here uses.
    pytest.mark.filterwarnings("ignore:.*pandas:FutureWarning"),
]

SCHEMA = "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,type:int>"
BASE = 1_700_000_000_123_456_789  # ns
KEYS = [None, b"", b"a", b"hello", b"\xff\x00"]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session of two cores in which a task may fail once."""
    pytest.importorskip("pyspark")
    from pyspark.sql import SparkSession

    patch = pytest.MonkeyPatch()
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2,2]").appName("tests")
    settings = {
        **session_settings(cores=2),
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    register(session)
    yield session
    gateway = session.sparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)
    _forget_gateway()
    patch.undo()


def _forget_gateway() -> None:
    """Let go of what PySpark keeps in its classes, so that its sockets close here and not during another test."""
    from pyspark import SparkContext

    SparkContext._gateway = SparkContext._jvm = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def narrow_batches(spark: SparkSession) -> Iterator[None]:
    """Let a writer get its rows in batches of 100."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "100")
    yield
    spark.conf.set(name, before)


@pytest.fixture(autouse=True)
def forget_logs() -> Iterator[None]:
    """Close the logs that a reader in this process keeps open for its next task."""
    yield
    reader = sys.modules.get("hub.spark.reader")
    while reader is not None and reader._logs:
        reader._logs.popitem()[1].close()


def fill(log: Any, count: int = 20) -> None:
    for at in range(count):
        log.append(b"value-%d" % at, key=KEYS[at % len(KEYS)], type=at % 256, timestamp=BASE + at * 1_001_001)


def load(spark: SparkSession, path: Path, **options: str) -> DataFrame:
    return spark.read.format("kvspool").options(**options).load(str(path))


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return all rows by topic, partition and offset, as `expected` writes them."""
    names = ("key", "value", "topic", "partition", "offset", "unix_micros(timestamp)", "type")
    found = [
        (topic, partition, offset, None if key is None else bytes(key), bytes(value), micros, kind)
        for key, value, topic, partition, offset, micros, kind in frame.selectExpr(*names).collect()
    ]
    return sorted(found, key=lambda row: row[:3])


def expected(records: Iterable[Record], topic: str | None = None) -> list[tuple[Any, ...]]:
    found = [
        (
            getattr(record, "client", topic),
            getattr(record, "shard", 0),
            record.sequence,
            record.key,
            record.value,
            record.timestamp // 1000,
            record.type,
        )
        for record in records
    ]
    return sorted(found, key=lambda row: row[:3])


def told(failure: pytest.ExceptionInfo[BaseException]) -> str:
    """Return everything that an error from Spark says."""
    return str(failure.value)


# Reading.


def test_the_session_has_the_settings_that_are_offered(spark: SparkSession) -> None:
    for name, value in session_settings(cores=2).items():
        assert spark.conf.get(name) == value
    assert session_settings(cores=7)["spark.sql.shuffle.partitions"] == "7"
    assert session_settings()["spark.sql.shuffle.partitions"] == str(os.cpu_count())
    assert session_settings().keys() - session_settings(local_checkpoints=False).keys() == {
        "spark.sql.streaming.checkpointFileManagerClass"
    }


def test_one_log_is_read_with_all_its_columns(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "events", capacity="1MiB") as log:
        fill(log, 300)
        frame = load(spark, tmp_path / "events")
        assert frame.schema.simpleString() == SCHEMA
        assert all(field.nullable for field in frame.schema)
        assert frame.rdd.getNumPartitions() == 1
        assert rows(frame) == expected(log, "events")
        assert frame.where("key IS NULL").count() == 60
        assert frame.where("key = X''").count() == 60


def test_a_shard_set_is_read_with_a_partition_for_each_shard(spark: SparkSession, tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="orders", bits=2, capacity=65536) as shards:
        fill(shards, 100)
        frame = load(spark, tmp_path / "root")
        assert frame.rdd.getNumPartitions() == sum(stats.records > 0 for stats in shards.stats())
        assert rows(frame) == expected(shards, "orders")


def test_a_shard_set_without_prefix_has_an_empty_topic(spark: SparkSession, tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", bits=1, capacity=65536) as shards:
        fill(shards)
        assert rows(load(spark, tmp_path / "root")) == expected(shards, "")


def test_a_hub_root_is_read_with_the_client_as_topic(spark: SparkSession, tmp_path: Path) -> None:
    with hub.create(tmp_path / "root") as root:
        for client, bits in (("ewr", 0), ("jfk", 1), ("lga", 2)):
            with root.create_client(client, bits=bits, capacity=65536) as shards:
                fill(shards, 40)
        assert rows(load(spark, root.path)) == expected(root)
        counts = load(spark, root.path).groupBy("topic").count().collect()
        assert {row["topic"]: row["count"] for row in counts} == {"ewr": 40, "jfk": 40, "lga": 40}
        with root.client("jfk") as shards:
            assert rows(load(spark, root.path, prefix="jfk")) == expected(shards, "jfk")


def test_journals_under_a_root_are_read_as_spools_are(spark: SparkSession, tmp_path: Path) -> None:
    for name, first in (("JFK.1.000", 0), ("JFK.1.001", 7)):
        with kvspool.create(tmp_path / name, format="kvj", first_sequence=first) as journal:
            fill(journal, 5)
    shard.create(tmp_path, prefix="EWR", bits=0, capacity=4096).append_many([b"spool"])
    found = sorted(load(spark, tmp_path).select("topic", "partition", "offset").collect())
    assert found == [("EWR", 0, 0), *(("JFK", 0, at) for at in range(5)), *(("JFK", 1, at) for at in range(7, 12))]
    assert load(spark, tmp_path / "JFK.1.001").count() == 5


def test_sequences_that_a_journal_leaves_out_are_no_loss_of_the_query(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import pyarrow

    with kvspool.create(tmp_path / "log", format="kvj") as journal:
        fill(journal, 3)
        journal.append_arrow(pyarrow.table({"value": [b"later"]}), at=10)
    ours = reader(tmp_path / "log")
    (partition,) = ours.partitions()
    with caplog.at_level(logging.WARNING, logger="kvspool"):
        assert [at for batch in ours.read(partition) for at in batch.column("offset").to_pylist()] == [0, 1, 2, 10]
    assert "7 records lost (missing)" in caplog.text


def test_a_journal_that_was_replaced_between_planning_and_reading_fails_the_task(spark: SparkSession, tmp_path: Path) -> None:
    from hub.spark.reader import DataLossError

    ours = reader(tmp_path / "log")
    for count in (5, 9):
        shutil.rmtree(tmp_path / "log", ignore_errors=True)
        with kvspool.create(tmp_path / "log", format="kvj") as log:
            fill(log, count)
        (partition,) = ours.partitions()
        assert sum(batch.num_rows for batch in ours.read(partition)) == count
    shutil.rmtree(tmp_path / "log")
    kvspool.create(tmp_path / "log", format="kvj").close()
    with pytest.raises(DataLossError, match="KVSPOOL_LOG_REPLACED"):
        list(ours.read(partition))


def test_fewer_columns_in_another_order_are_read(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        fill(log, 10)
    reader = spark.read.format("kvspool")
    found = reader.schema("type int, offset bigint, topic string").load(str(tmp_path / "log")).collect()
    assert sorted(map(tuple, found)) == [(at, at, "log") for at in range(10)]
    found = reader.schema("value binary").load(str(tmp_path / "log")).collect()
    assert sorted(bytes(row[0]) for row in found) == sorted(b"value-%d" % at for at in range(10))


def test_a_root_is_read_through_sql_and_as_a_url(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        fill(log, 10)
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW logged USING kvspool OPTIONS (path '{tmp_path / 'log'}')")
    assert spark.sql("SELECT max(offset), count(key) FROM logged").collect()[0] == (9, 8)
    assert spark.read.format("kvspool").load(f"file://{tmp_path / 'log'}").count() == 10


def test_what_is_empty_is_read_as_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    with hub.create(tmp_path / "root") as root:
        assert load(spark, root.path).count() == 0
        root.create_client("a", bits=1, capacity=4096).close()
        for path in (tmp_path / "log", root.path):
            frame = load(spark, path)
            assert frame.count() == 0
            assert frame.schema.simpleString() == SCHEMA


def test_records_that_were_overwritten_before_the_query_are_not_missed(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append_many([b"%d" % at for at in range(500)])
        assert log.stats().first_sequence > 0
        assert rows(load(spark, tmp_path / "log")) == expected(log, "log")


def test_the_last_shards_of_a_set_being_made_may_be_missing(spark: SparkSession, tmp_path: Path) -> None:
    with shard.create(tmp_path, prefix="p", bits=2, capacity=65536) as shards:
        fill(shards, 40)
        records = [record for record in shards if record.shard < 3]
    shutil.rmtree(tmp_path / "p.2.003")
    assert rows(load(spark, tmp_path)) == expected(records, "p")


@pytest.fixture
def odd_root(tmp_path: Path) -> Path:
    """Return a directory with a log, shard sets of which some are wrong, and a file."""
    kvspool.create(tmp_path / "log", capacity=4096).close()
    (tmp_path / "file").write_text("no log", encoding="utf-8")
    for name, prefix in (("good", "p"), ("hole", "p"), ("two", "p"), ("two", "q"), ("broken", "p")):
        shard.create(tmp_path / name, prefix=prefix, bits=2, capacity=4096).close()
    shutil.rmtree(tmp_path / "hole" / "p.2.001")
    shutil.rmtree(tmp_path / "two" / "q.2.000")
    (tmp_path / "broken" / "p.2.002" / "spool.dat").write_bytes(b"KVSPDAT2")
    kvspool.create(tmp_path / "two" / "p.1.000", capacity=4096).close()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("log", {"colour": "red"}, "unknown option 'colour' for format kvspool; there are failondataloss, path, prefix"),
        ("log", {"bits": "2"}, "unknown option 'bits'"),
        ("log", {"failOnDataLoss": "maybe"}, "option failOnDataLoss is true or false, not 'maybe'"),
        ("log", {"prefix": "p"}, "is one log, not a root of shards: option prefix has no meaning there"),
        ("none", {}, "none does not exist, or is neither a log nor a root of shards"),
        ("file", {}, "is neither a log nor a root of shards"),
        ("good", {"prefix": "r"}, "has no shard set with prefix 'r'; it has 'p'"),
        ("good", {"prefix": "../x"}, "a prefix has the characters"),
        ("hole", {}, "1 of the 4 shards of prefix 'p' are missing: p.2.001"),
        ("two", {"prefix": "q"}, "1 of the 4 shards of prefix 'q' are missing: q.2.000"),
        ("two", {"prefix": "p"}, "prefix 'p' has shards of 1 and of 2 bits"),
        ("broken", {}, "less than its header"),
        ("hdfs://host/log", {}, "is not on this host; format kvspool reads local paths"),
    ],
)
def test_what_can_not_be_read_is_said_before_any_task_runs(
    spark: SparkSession, odd_root: Path, name: str, options: dict[str, str], words: str
) -> None:
    from pyspark.errors import AnalysisException

    path = name if "://" in name else str(odd_root / name)
    with pytest.raises(AnalysisException) as failure:
        spark.read.format("kvspool").options(**options).load(path).collect()
    assert words in told(failure)


def test_a_missing_path_is_said(spark: SparkSession) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="a path is missing"):
        spark.read.format("kvspool").load().collect()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("value binary, colour string", "no column colour string; format kvspool has key binary, value binary, topic string"),
        ("value string", "no column value string"),
        ("offset int", "no column offset int"),
    ],
)
def test_a_column_that_there_is_not_is_named(spark: SparkSession, odd_root: Path, schema: str, words: str) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException) as failure:
        spark.read.format("kvspool").schema(schema).load(str(odd_root / "log")).collect()
    assert words in told(failure)


# A reader in this process, as a task of Spark has it.


def reader(path: Path, *, prefix: str | None = None, fail: bool = True, schema: str | None = None) -> ShardReader:
    from pyspark.sql.types import StructType

    from hub.spark.reader import ShardReader
    from hub.spark.source import SCHEMA as ALL

    return ShardReader(path, prefix, fail, StructType.fromDDL(schema or ALL))


def test_rows_cross_as_record_batches_of_8_to_64_thousand(spark: SparkSession, tmp_path: Path) -> None:
    import pyarrow
    from pyspark.sql.pandas.types import to_arrow_schema

    with kvspool.create(tmp_path / "log", capacity="16MiB") as log:
        log.append_many([b"v"] * 100_000, timestamp=BASE)
    ours = reader(tmp_path / "log")
    (partition,) = ours.partitions()
    batches = list(ours.read(partition))
    assert {type(batch) for batch in batches} == {pyarrow.RecordBatch}
    assert all(8192 <= batch.num_rows <= 65_536 for batch in batches[:-1])
    assert batches[-1].num_rows <= 65_536
    assert len(batches) > 1
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(to_arrow_schema(ours.schema, timezone="UTC"))
    table = pyarrow.Table.from_batches(batches)
    assert table["offset"].to_pylist() == list(range(100_000))
    assert table["timestamp"].unique().cast(pyarrow.int64()).to_pylist() == [BASE // 1000]


def test_a_reader_asked_for_no_column_says_how_many_rows_there_are(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql.types import StructType

    from hub.spark.reader import ShardReader

    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        fill(log, 10)
    ours = ShardReader(tmp_path / "log", None, True, StructType([]))
    assert [(batch.num_rows, batch.num_columns) for batch in ours.read(ours.partitions()[0])] == [(10, 0)]


def test_records_appended_after_the_planning_are_not_read(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        fill(log, 10)
        ours = reader(tmp_path / "log")
        (partition,) = ours.partitions()
        fill(log, 10)
        assert sum(batch.num_rows for batch in ours.read(partition)) == 10


@pytest.mark.parametrize(("further", "is_partly_left"), [(60, True), (1000, False)])
def test_records_overwritten_between_planning_and_reading_fail_the_task_or_are_left_out(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, further: int, is_partly_left: bool
) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=4096) as shards:
        log = shards.shards[1]
        log.append_many([b"%020d" % at for at in range(60)])
        strict, lenient = reader(tmp_path / "root"), reader(tmp_path / "root", fail=False)
        (partition,) = strict.partitions()
        assert lenient.partitions() == [partition]
        log.append_many([b"%020d" % at for at in range(60, 60 + further)])
        first = log.stats().first_sequence
        assert (first < 60) == is_partly_left

    from hub.spark.reader import DataLossError

    lost = f"{min(first, 60)} records lost (overrun): sequences 0 to {min(first, 60) - 1}"
    with pytest.raises(DataLossError) as failure:
        list(strict.read(partition))
    assert told(failure).startswith(f"[KVSPOOL_DATA_LOSS] topic p, partition 1: {lost}")
    assert "Set the option failOnDataLoss to false" in told(failure)

    with caplog.at_level(logging.WARNING, logger="kvspool"):
        found = [offset for batch in lenient.read(partition) for offset in batch.column("offset").to_pylist()]
    assert found == list(range(first, 60))
    assert [record.message.partition(".")[0] for record in caplog.records] == [
        f"[KVSPOOL_DATA_LOSS] topic p, partition 1: {lost} of {tmp_path / 'root' / 'p'}"
    ]


def test_a_query_that_was_overtaken_fails_with_the_reason_or_leaves_out(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import PythonException

    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append_many([b"%020d" % at for at in range(60)])
        strict, lenient = load(spark, tmp_path / "log").rdd, load(spark, tmp_path / "log", failOnDataLoss="false").rdd
        assert strict.getNumPartitions() == lenient.getNumPartitions() == 1
        log.append_many([b"%020d" % at for at in range(60, 100)])
        first = log.stats().first_sequence
        assert 0 < first < 60
        with pytest.raises(PythonException, match=r"\[KVSPOOL_DATA_LOSS\] topic log, partition 0: .* records lost \(overrun\)"):
            strict.count()
        assert lenient.count() == 60 - first


@pytest.mark.parametrize("is_open", [False, True], ids=["not open yet", "open from an earlier task"])
def test_a_log_that_was_replaced_between_planning_and_reading_fails_the_task(
    spark: SparkSession, tmp_path: Path, is_open: bool
) -> None:
    from hub.spark.reader import DataLossError

    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        fill(log, 5)
    ours = reader(tmp_path / "log", fail=False)
    (partition,) = ours.partitions()
    if is_open:
        assert sum(batch.num_rows for batch in ours.read(partition)) == 5
    shutil.rmtree(tmp_path / "log")
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        fill(log, 9)
    with pytest.raises(DataLossError, match=r"\[KVSPOOL_LOG_REPLACED\] .*log is another log than when the query was planned"):
        list(ours.read(partition))
    (partition,) = ours.partitions()
    assert sum(batch.num_rows for batch in ours.read(partition)) == 9


def test_a_log_that_was_removed_between_planning_and_reading_fails_the_task(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        fill(log, 5)
    ours = reader(tmp_path / "log")
    (partition,) = ours.partitions()
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(kvspool.errors.LogNotFound):
        list(ours.read(partition))


# Writing.


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


def test_rows_without_a_key_take_turns_and_columns_may_be_few(spark: SparkSession, tmp_path: Path) -> None:
    shard.create(tmp_path / "root", prefix="p", bits=2, capacity="1MiB").close()
    save(numbered(spark, 400, "concat('é', id) AS value").coalesce(1), tmp_path / "root")
    with shard.open(tmp_path / "root") as shards:
        assert [stats.records for stats in shards.stats()] == [100] * 4
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
    save(numbered(spark, 10, "'v' AS value"), tmp_path, prefix="p", bits="1", capacity="1MiB")
    shutil.rmtree(tmp_path / "p.1.001")
    save(numbered(spark, 10, "'v' AS value"), tmp_path, prefix="p", bits="1", capacity="128KiB")
    with shard.open(tmp_path) as shards:
        assert [stats.capacity for stats in shards.stats()] == [65536, 131072]
        assert sum(stats.records for stats in shards.stats()) > 10


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
        (["'v' AS value", "id"], "column id can't be written to kvspool; there are value, key, type and timestamp: select those"),
        (["'k' AS key"], "a column named value is missing"),
        (["id AS value"], "column value is bigint; it must be binary or string"),
        (["'v' AS value", "id AS key"], "column key is bigint; it must be binary or string"),
        (["'v' AS value", "'t' AS type"], "column type is string; it must be tinyint or smallint or int or bigint"),
        (["'v' AS value", "id AS timestamp"], "column timestamp is bigint; it must be timestamp"),
    ],
)
def test_columns_that_can_not_be_written_are_named_before_any_task_runs(
    spark: SparkSession, tmp_path: Path, columns: list[str], words: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException) as failure:
        save(numbered(spark, 10, *columns), tmp_path / "root", bits="1")
    assert words in told(failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("new", {}, "has no complete shard set with prefix ''; option bits makes one"),
        ("good", {"prefix": "r"}, "has no complete shard set with prefix 'r'"),
        ("hole", {}, "has no complete shard set with prefix 'p'"),
        ("two", {"prefix": "p"}, "prefix 'p' has shards of 1 and of 2 bits"),
        ("new", {"bits": "many"}, "option bits is a number, not 'many'"),
        ("new", {"bits": "11"}, "bits are 0..10, for 1 to 1024 shards, not 11"),
        ("new", {"bits": "0"}, "a single shard without bits needs a prefix"),
        ("new", {"bits": "1", "prefix": "a.b"}, "a prefix has the characters"),
        ("new", {"bits": "1", "capacity": "huge"}, "a size is a number with a unit"),
        ("new", {"bits": "1", "codec": "pickle"}, "option codec is one of raw, text, json, msgpack, not 'pickle'"),
        ("good", {"failOnDataLoss": "true"}, "unknown option 'failondataloss'"),
        ("log", {"prefix": "p"}, "is one log, not a root of shards: options prefix and bits have no meaning there"),
        ("log", {"bits": "1"}, "is one log, not a root of shards: options prefix and bits have no meaning there"),
        ("none/new", {"bits": "1"}, "No such file or directory"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_any_task_runs(
    spark: SparkSession, odd_root: Path, name: str, options: dict[str, str], words: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException) as failure:
        save(numbered(spark, 10, "'v' AS value"), odd_root / name, **options)
    assert words in told(failure)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["if(id = 5, NULL, 'v') AS value"], "column value has nulls"),
        (["'v' AS value", "if(id = 5, 256, 1) AS type"], "column type doesn't fit"),
        (["if(id = 5, repeat('v', 20000), 'v') AS value"], "a ring of 65536 bytes holds at most 16384"),
        (["'v' AS value", "timestamp_seconds(id - 5) AS timestamp"], "column timestamp has times before 1970"),
    ],
)
def test_a_row_that_can_not_be_written_fails_the_job_with_the_reason(
    spark: SparkSession, tmp_path: Path, columns: list[str], words: str
) -> None:
    from pyspark.errors import PySparkException

    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=65536) as shards:
        with pytest.raises(PySparkException) as failure:
            save(numbered(spark, 10, *columns).coalesce(1), tmp_path / "root")
        assert words in told(failure)
        assert list(shards) == []


def test_a_task_whose_worker_is_killed_is_run_again_and_leaves_no_half_record(
    spark: SparkSession, tmp_path: Path, narrow_batches: None
) -> None:
    flag = str(tmp_path / "killed")

    def die_once(batches: Iterator[Any]) -> Iterator[Any]:
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            if rows > 2000:
                try:
                    os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
            yield batch

    frame = numbered(spark, 4000, "concat('key-', id % 20) AS key", "concat('value-', id) AS value").coalesce(1)
    frame = frame.mapInArrow(die_once, frame.schema)
    save(frame, tmp_path / "root", prefix="p", bits="2", capacity="4MiB")

    assert (tmp_path / "killed").exists()
    with shard.open(tmp_path / "root") as shards:
        counts = Counter(record.data for record in shards)
        for record in shards:
            assert record.shard == route.shard_of(record.key, 2)
            assert record.key == b"key-%d" % (int(record.data.removeprefix("value-")) % 20)
    assert counts.keys() == {f"value-{at}" for at in range(4000)}
    assert set(counts.values()) <= {1, 2}


def test_an_attempt_that_fails_half_way_leaves_its_whole_batches_and_the_next_one_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    import pyarrow
    from pyspark.sql.types import StructType

    from hub.spark.writer import ShardWriter

    batches = [
        pyarrow.RecordBatch.from_pydict({"key": [b"%d" % at for at in range(50)], "value": [b"%d-%d" % (number, at) for at in range(50)]})
        for number in range(4)
    ]

    def failing() -> Iterator[Any]:
        yield from batches[:2]
        raise OSError("the rows stopped coming")

    writer = ShardWriter(tmp_path / "root", "p", 2, "1MiB", None, StructType.fromDDL("key binary, value binary"))
    with pytest.raises(OSError, match="the rows stopped coming"):
        writer.write(failing())
    with shard.open(tmp_path / "root") as shards:
        assert Counter(record.value for record in shards) == Counter(value for batch in batches[:2] for value in batch["value"].to_pylist())

    assert writer.write(iter(batches)).records == 200
    with shard.open(tmp_path / "root") as shards:
        counts = Counter(record.value for record in shards)
    assert counts == {b"%d-%d" % (number, at): 2 if number < 2 else 1 for number in range(4) for at in range(50)}
