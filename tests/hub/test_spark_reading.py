"""A reader in this process, as a task of Spark has it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sessions import BASE, MARKS, fill, told

import kvspool
import shard
from kvspool.errors import LogNotFound, Truncated
from shard.errors import ConflictingShardSets, IncompleteShardSet

if TYPE_CHECKING:
    from hub.spark.reader import ShardReader

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
from pyspark.sql.types import DataType, IntegerType, StringType, StructField, StructType

from hub.spark.errors import DataLossError
from hub.spark.reading import COLUMNS
from hub.spark.source import KvspoolDataSource

pytestmark = MARKS


def reader(path: Path, columns: Iterable[str] = COLUMNS, **options: str) -> ShardReader:
    source = KvspoolDataSource({"path": str(path), **options})
    return source.reader(StructType([StructField(name, COLUMNS[name]) for name in columns]))


def test_rows_cross_as_record_batches_of_8_to_64_thousand(tmp_path: Path) -> None:
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


def test_columns_are_named_by_a_schema(tmp_path: Path) -> None:
    import hub.spark

    assert hub.spark.columns("offset", "value") == "offset bigint, value binary"
    assert hub.spark.columns() == KvspoolDataSource({"path": str(tmp_path)}).schema()
    with pytest.raises(ValueError, match="no column headers; format kvspool has key, value"):
        hub.spark.columns("value", "headers")


def test_a_reader_asked_for_no_column_says_how_many_rows_there_are(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        fill(log, 10)
    ours = reader(tmp_path / "log", [])
    assert [(batch.num_rows, batch.num_columns) for batch in ours.read(ours.partitions()[0])] == [(10, 0)]


def test_records_appended_after_the_planning_are_not_read(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        fill(log, 10)
        ours = reader(tmp_path / "log")
        (partition,) = ours.partitions()
        fill(log, 10)
        assert sum(batch.num_rows for batch in ours.read(partition)) == 10


@pytest.mark.parametrize(("further", "is_partly_left"), [(60, True), (1000, False)])
def test_records_overwritten_between_planning_and_reading_fail_the_task_or_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, further: int, is_partly_left: bool
) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=4096) as shards:
        log = shards.shards[1]
        log.append_many([b"%020d" % at for at in range(60)])
        strict, lenient = reader(tmp_path / "root"), reader(tmp_path / "root", failOnDataLoss="false")
        (partition,) = strict.partitions()
        assert lenient.partitions() == [partition]
        log.append_many([b"%020d" % at for at in range(60, 60 + further)])
        first = log.stats().first_sequence
        assert (first < 60) == is_partly_left

    lost = f"{min(first, 60)} records lost (overrun): sequences 0 to {min(first, 60) - 1}"
    with pytest.raises(DataLossError) as failure:
        list(strict.read(partition))
    assert told(failure).startswith(f"[KVSPOOL_DATA_LOSS] topic p, partition 1: {lost}")
    assert "Set the option failOnDataLoss to false" in told(failure)

    with caplog.at_level(logging.WARNING, logger="kvspool"):
        found = [offset for batch in lenient.read(partition) for offset in batch.column("offset").to_pylist()]
    assert found == list(range(first, 60))
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"[KVSPOOL_DATA_LOSS] topic p, partition 1: {lost} of {tmp_path / 'root' / 'p'}.")


@pytest.mark.parametrize("is_open", [False, True], ids=["not open yet", "open from an earlier task"])
def test_a_log_that_was_replaced_between_planning_and_reading_fails_the_task(tmp_path: Path, is_open: bool) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        fill(log, 5)
    ours = reader(tmp_path / "log", failOnDataLoss="false")
    (partition,) = ours.partitions()
    if is_open:
        assert sum(batch.num_rows for batch in ours.read(partition)) == 5
    shutil.rmtree(tmp_path / "log")
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        fill(log, 9)
    with pytest.raises(DataLossError, match=r"\[KVSPOOL_LOG_REPLACED\] .*log was replaced by another log since the query was planned"):
        list(ours.read(partition))
    (partition,) = ours.partitions()
    assert sum(batch.num_rows for batch in ours.read(partition)) == 9


def test_a_log_that_was_removed_between_planning_and_reading_fails_the_task(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        fill(log, 5)
    ours = reader(tmp_path / "log")
    (partition,) = ours.partitions()
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(kvspool.errors.LogNotFound):
        list(ours.read(partition))


def test_sequences_that_a_journal_leaves_out_are_no_loss_of_the_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import pyarrow

    with kvspool.create(tmp_path / "log", format="kvj") as journal:
        fill(journal, 3)
        journal.append_arrow(pyarrow.table({"value": [b"later"]}), at=10)
    ours = reader(tmp_path / "log")
    (partition,) = ours.partitions()
    with caplog.at_level(logging.WARNING, logger="kvspool"):
        assert [at for batch in ours.read(partition) for at in batch.column("offset").to_pylist()] == [0, 1, 2, 10]
    assert "7 records lost (missing)" in caplog.text


def test_a_segment_whose_file_is_gone_is_a_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=100) as journal:
        fill(journal, 10)
        first, lost, until = journal._segments.bases()[:3]
        journal._segments.path_of(lost).unlink()
    strict, lenient = reader(tmp_path / "log"), reader(tmp_path / "log", failOnDataLoss="false")
    (partition,) = strict.partitions()
    words = rf"\(damaged\): sequences {lost} to {until - 1} of .*kvspool verify"
    with pytest.raises(DataLossError, match=rf"\[KVSPOOL_DATA_LOSS\] topic log, partition 0: {until - lost} records lost {words}"):
        list(strict.read(partition))
    with caplog.at_level(logging.WARNING, logger="kvspool"):
        found = [at for batch in lenient.read(partition) for at in batch.column("offset").to_pylist()]
    assert found == [*range(first, lost), *range(until, 10)]
    assert "KVSPOOL_DATA_LOSS" in caplog.text


@pytest.mark.parametrize("is_planned_before", [True, False])
def test_a_last_segment_whose_file_is_gone_is_a_loss(tmp_path: Path, is_planned_before: bool) -> None:
    ours = reader(tmp_path / "log")
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=100) as journal:
        fill(journal, 9)
        partitions = ours.partitions() if is_planned_before else []
        lost = journal._segments.bases()[-1]
        journal._segments.path_of(lost).unlink()
    (partition,) = partitions or ours.partitions()
    with pytest.raises(DataLossError, match=rf"\[KVSPOOL_DATA_LOSS\].* \(damaged\): sequences? {lost}.*kvspool verify"):
        list(ours.read(partition))


def test_a_journal_that_was_replaced_between_planning_and_reading_fails_the_task(tmp_path: Path) -> None:
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


# Unreadable logs are reported when the query is planned.


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("log", {"prefix": "p"}, ValueError, "is one log, not a root of shards: it has no topics to select"),
        ("none", {}, LogNotFound, "none does not exist, or is neither a log nor a root of shards"),
        ("file", {}, LogNotFound, "is neither a log nor a root of shards"),
        ("good", {"prefix": "r"}, LogNotFound, "has no 'r'; of the requested ones it has none"),
        ("good", {"subscribe": "p,r"}, LogNotFound, "has no 'r'; of the requested ones it has 'p'"),
        ("good", {"assign": '{"p": [0, 4]}'}, LogNotFound, "has no 'partition 4 of p'"),
        ("hole", {}, IncompleteShardSet, "1 of the 4 shards of prefix 'p' are missing: p.2.001"),
        ("two", {"prefix": "q"}, IncompleteShardSet, "1 of the 4 shards of prefix 'q' are missing: q.2.000"),
        ("two", {"prefix": "p"}, ConflictingShardSets, "prefix 'p' has shards of 1 and of 2 bits"),
        ("broken", {}, Truncated, "less than its header"),
        ("good", {"startingOffsets": '{"p": {"0": 1, "1": 0, "2": 0, "3": 0}}'}, DataLossError, "[KVSPOOL_OFFSET_CHANGED]"),
        ("good", {"startingOffsets": '{"p": {"0": 5}}'}, ValueError, "[KVSPOOL_OFFSETS_DO_NOT_MATCH]"),
        ("good", {"startingTimestamp": "9000000000000"}, ValueError, "[KVSPOOL_NO_OFFSET_AT_TIMESTAMP]"),
    ],
)
def test_what_can_not_be_read_is_said_before_any_task_runs(
    odd_root: Path, name: str, options: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as failure:
        reader(odd_root / name, **options).partitions()
    assert words in told(failure)


def test_a_start_after_the_end_is_refused(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        fill(log, 10)
    ours = reader(tmp_path / "log", startingOffsets='{"log": {"0": 5}}', endingOffsets='{"log": {"0": 4}}')
    with pytest.raises(ValueError, match="KVSPOOL_START_OFFSET_GREATER_THAN_END_OFFSET"):
        ours.partitions()


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("colour", StringType(), "no column colour string; format kvspool has key binary, value binary, topic string"),
        ("value", StringType(), "no column value string"),
        ("offset", IntegerType(), "no column offset int"),
    ],
)
def test_a_column_that_there_is_not_is_named(name: str, kind: DataType, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KvspoolDataSource({"path": "log"}).reader(StructType([StructField(name, kind)]))
