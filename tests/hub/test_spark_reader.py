"""Spark reads exactly the appended records."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sessions import BASE, MARKS, SCHEMA, expected, fill, load, rows

import hub
import kvspool
import shard
from hub.spark import session_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = MARKS


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


def test_small_shards_share_a_task_unless_more_are_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="orders", bits=2, capacity=65536) as shards:
        fill(shards, 100)
        frame = load(spark, tmp_path / "root")
        assert frame.rdd.getNumPartitions() == 1
        assert rows(frame) == expected(shards, "orders")
        frame = load(spark, tmp_path / "root", minPartitions="6")
        assert frame.rdd.getNumPartitions() == 6
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


def test_what_is_wrong_with_a_query_is_said_before_any_task_runs(spark: SparkSession, odd_root: Path) -> None:
    from pyspark.errors import AnalysisException

    read = spark.read.format("kvspool")
    with pytest.raises(AnalysisException, match="a path is missing"):
        read.load()
    with pytest.raises(AnalysisException, match=r"1 of the 4 shards of prefix 'p' are missing: p\.2\.001"):
        read.load(str(odd_root / "hole")).collect()


def test_a_query_that_was_overtaken_fails_with_the_reason(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.errors import PythonException

    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append_many([b"%020d" % at for at in range(60)])
        planned = load(spark, tmp_path / "log").rdd
        assert planned.getNumPartitions() == 1
        log.append_many([b"%020d" % at for at in range(60, 100)])
        first = log.stats().first_sequence
        assert 0 < first < 60
        with pytest.raises(PythonException, match=r"\[KVSPOOL_DATA_LOSS\] topic log, partition 0: .* records lost \(overrun\)"):
            planned.count()


# A part of what is there.


def offsets(frame: DataFrame) -> list[tuple[str, int, int]]:
    return sorted(tuple(row) for row in frame.select("topic", "partition", "offset").collect())


def test_a_range_is_read_by_offset_or_by_time(spark: SparkSession, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        log.append_many([b"old"] * 5, timestamp=BASE)
        log.append_many([b"new"] * 5, timestamp=BASE + 3_600_000_000_000)
    millis = BASE // 1_000_000
    for options, expected_offsets in [
        ({"startingOffsets": '{"log": {"0": 3}}', "endingOffsets": '{"log": {"0": 7}}'}, range(3, 7)),
        ({"startingOffsets": '{"log": {"0": -2}}', "endingOffsets": '{"log": {"0": -1}}'}, range(10)),
        ({"STARTINGOFFSETS": "earliest", "endingoffsets": "latest"}, range(10)),
        ({"startingTimestamp": str(millis + 1)}, range(5, 10)),
        ({"endingTimestamp": str(millis + 1)}, range(5)),
        ({"startingOffsetsByTimestamp": f'{{"log": {{"0": {millis + 1}}}}}', "startingOffsets": "earliest"}, range(5, 10)),
        ({"startingTimestamp": str(millis * 2), "startingOffsetsByTimestampStrategy": "latest"}, range(0)),
    ]:
        assert offsets(load(spark, tmp_path / "log", **options)) == [("log", 0, at) for at in expected_offsets]


def test_clients_and_shards_are_chosen(spark: SparkSession, tmp_path: Path) -> None:
    with hub.create(tmp_path / "root") as root:
        for client in ("ewr", "jfk", "lga"):
            with root.create_client(client, bits=1, capacity=65536) as shards:
                for log in shards.shards:
                    log.append(b"v")
        for options, topics in [
            ({"subscribe": "ewr, lga"}, {"ewr", "lga"}),
            ({"subscribePattern": "[e-j].*"}, {"ewr", "jfk"}),
        ]:
            assert offsets(load(spark, root.path, **options)) == [(topic, at, 0) for topic in sorted(topics) for at in (0, 1)]
        assert offsets(load(spark, root.path, assign='{"ewr": [1], "lga": [0]}')) == [("ewr", 1, 0), ("lga", 0, 0)]


def test_rows_have_the_same_order_each_time(spark: SparkSession, tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=2, capacity="1MiB") as shards:
        shards.append_many([b"%d" % at for at in range(4000)])
    for options in ({}, {"minPartitions": "3"}, {"maxRecordsPerPartition": "300"}):
        first, again = (load(spark, tmp_path / "root", **options).select("partition", "offset").collect() for _ in range(2))
        assert first == again == sorted(first)
        assert len(first) == 4000


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[None]:
    """Let the session push filters into Python sources."""
    name = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(name)
    spark.conf.set(name, "true")
    yield
    spark.conf.set(name, before)


FILTERS = [
    ("offset >= 10 AND offset < 15", range(10, 15)),
    ("topic = 'events' AND partition IN (0, 3) AND offset = 7", [7]),
    ("topic = 'other'", []),
    ("timestamp > timestamp_micros(1700000000123456) AND timestamp <= timestamp_micros(1700000000125459)", [1, 2]),
    ("key = X'61' AND NOT offset IN (2, 12)", range(7, 300, 5)),
    ("type = 3 OR offset = 5", [3, 5, 259]),
]


@pytest.mark.parametrize("is_pushed", [True, False])
def test_filters_leave_the_same_rows_whether_they_are_pushed_or_not(
    spark: SparkSession, tmp_path: Path, is_pushed: bool, request: pytest.FixtureRequest
) -> None:
    if is_pushed:
        request.getfixturevalue("pushing")
    with kvspool.create(tmp_path / "events", capacity="1MiB") as log:
        fill(log, 300)
    for condition, wanted in FILTERS:
        frame = load(spark, tmp_path / "events").where(condition)
        expected_offsets = [("events", 0, at) for at in wanted if at != 12 or "NOT" not in condition]
        assert offsets(frame) == expected_offsets, condition
        plan = frame._jdf.queryExecution().executedPlan().toString()
        assert ("Filter (" in plan) == (not is_pushed or " OR " in condition)


def test_filters_are_pushed_by_request_and_never_against_it(spark: SparkSession, tmp_path: Path, pushing: None) -> None:
    from pyspark.errors import AnalysisException

    with kvspool.create(tmp_path / "events", capacity="1MiB") as log:
        fill(log, 30)
    for told_so in ("true", "false"):
        assert offsets(load(spark, tmp_path / "events", filterPushdown=told_so).where("offset = 3")) == [("events", 0, 3)]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    with pytest.raises(AnalysisException, match=r"spark\.sql\.python\.filterPushdown\.enabled"):
        load(spark, tmp_path / "events", filterPushdown="true").count()
