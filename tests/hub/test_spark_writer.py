"""What Spark's tasks write at once is there, whole."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sessions import MARKS, load, told

import hub
import kvspool
import shard
from kvspool.record import Codec
from shard import route

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = MARKS


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
