"""Pipelines that run, in Spark: what comes out is what went in, once, though they are stopped, replayed and killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sessions import MARKS
from typed_rows import BY, EVERYTHING, everything, told

import hub
import shard
from hub.pipeline import PipelineFailed, SinkError, load
from hub.pipeline.job import Compact
from hub.pipeline.run import PipelineRun
from hub.pipeline.session import RUNTIME
from hub.pipeline.sinks import compact, remove_staged, table_schema, write_files
from hub.root import pipeline_progress
from hub.spark import read_table
from hub.tables.delta import Change, Table
from hub.tables.errors import TableError
from hub.tables.place import TablePlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

parquet = pytest.importorskip("pyarrow.parquet")
deltalake = pytest.importorskip("deltalake")
pytestmark = MARKS

BEGIN = datetime(2026, 1, 31, tzinfo=UTC)
JOB = """
[source]
path = "root"
{source}

[decode]
{decode}

{tables}

[sink]
path = "out"
trigger = "0 seconds"
{sink}
"""
WINDOWS = '[window]\nsize = "1 hour"\naggregates = ["count(*) AS flights"]'
CLOSED_WINDOWS = f'[watermark]\ndelay = "10 minutes"\n{WINDOWS}'
DECODE = 'schema = "row int, carrier string, at timestamp"\ntime = "at"'


def flight(row: int) -> dict[str, Any]:
    return {"row": row, "carrier": "AA UA DL".split()[row % 3], "at": (BEGIN + timedelta(minutes=row)).isoformat()}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A hub root with two clients and 300 flights."""
    hub.create(tmp_path / "root").close()
    for client in ("EWR", "JFK"):
        shard.create(tmp_path / "root", prefix=client, bits=1, capacity="1MiB").close()
    append(tmp_path / "root", range(300))
    return tmp_path / "root"


def append(root: Path, rows: range) -> None:
    for client, some in (("EWR", rows[::2]), ("JFK", rows[1::2])):
        with shard.open(root, prefix=client) as shards:
            shards.append_many([flight(row) for row in some], keys=[b"%d" % row for row in some])


def job_at(folder: Path, *, source: str = "", decode: str = DECODE, tables: str = "", sink: str = "") -> Any:
    path = folder / "delays.toml"
    path.write_text(JOB.format(source=source, decode=decode, tables=tables, sink=sink))
    return load(path)


def table_of(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a Delta table."""
    found: list[dict[str, Any]] = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    return found


def rows_of(path: Path) -> list[int]:
    return sorted(row["row"] for row in table_of(path))


def forget_last_commit(job: Any) -> int:
    """Take away what Spark notes when a batch is over, as if it had been killed before; return the batch's number."""
    last = max(Path(job.checkpoint, "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    return int(last.name)


def test_rows_are_there_once_through_restarts_replays_and_compaction(spark: SparkSession, root: Path) -> None:
    with shard.open(root, prefix="JFK") as shards:
        shards.append(b'{"row": "x"}', key=b"bad")
    job = job_at(root.parent, source="maxOffsetsPerTrigger = 120", sink='partition_by = ["carrier"]', tables="[compact]\nfiles = 2")
    said: list[pipeline_progress.PipelineProgress] = []
    done = PipelineRun(job, once=True, report=said.append).run(spark)
    assert (done.state, done.records, done.bad, done.lag) == ("done", 301, 1, 0)
    assert len({one.batch for one in said}) > 2 and said[-1] == pipeline_progress.read(pipeline_progress.path_in(root, "delays"))
    assert {shard.topic: 0 for shard in done.shards} == {"EWR": 0, "JFK": 0} and sum(shard.next for shard in done.shards) == 301
    assert rows_of(root.parent / "out") == list(range(300))
    (bad,) = parquet.read_table(job.bad_path).to_pylist()
    assert (bad["value"], bad["topic"], bad["key"]) == (b'{"row": "x"}', "JFK", b"bad") and "$.row" in bad["reason"]
    # The next run has what is new. A batch whose commit Spark does not know of is replayed, and known.
    append(root, range(300, 400))
    PipelineRun(job, once=True).run(spark)
    last = forget_last_commit(job)
    assert PipelineRun(job, once=True).run(spark).batch == last
    assert rows_of(root.parent / "out") == list(range(400))
    table = Table(root.parent / "out")
    compact(table, Compact(), everything=True)
    assert table.info().files == 3 and table.info().rows == 400
    assert rows_of(root.parent / "out") == list(range(400))
    found = read_table(spark, root.parent / "out")  # what Spark reads is the same
    assert sorted((row["row"], row["carrier"]) for row in found.collect()) == [(row, flight(row)["carrier"]) for row in range(400)]
    assert "_bad" not in os.listdir(root.parent / "out")


def test_rows_are_in_an_iceberg_table_once_through_restarts_and_replays(spark: SparkSession, root: Path) -> None:
    pytest.importorskip("pyiceberg")
    from hub.tables.iceberg import IcebergTable

    job = job_at(root.parent, sink='format = "iceberg"')
    assert PipelineRun(job, once=True).run(spark).records == 300
    append(root, range(300, 420))
    PipelineRun(job, once=True).run(spark)
    forget_last_commit(job)
    append(root, range(420, 450))
    PipelineRun(job, once=True).run(spark)
    table = IcebergTable(TablePlace.of(root.parent / "out")).table
    assert sorted(table.scan().to_arrow().column("row").to_pylist()) == list(range(450))
    found = table.scan(row_filter="row >= 300 and row < 303").to_arrow().to_pylist()
    assert sorted(row["carrier"] for row in found) == ["AA", "DL", "UA"] and {row["event_time"].tzinfo for row in found} != {None}
    shutil.rmtree(Path(job.checkpoint))
    with pytest.raises(PipelineFailed, match="KVSPOOL_SINK_OF_ANOTHER_QUERY"):
        PipelineRun(job, once=True).run(spark)


def test_the_thread_of_a_first_batch_ends_if_the_query_cannot_start(
    spark: SparkSession, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = []

    class Broken:
        def attach(self, frame: Any, query: Any, before: Any) -> Any:
            def ask() -> None:
                try:
                    query()
                except PipelineFailed as error:
                    raised.append(error)

            self.thread = threading.Thread(target=ask, daemon=True)
            self.thread.start()
            raise SinkError("this sink can't be written to")

    sink = Broken()
    monkeypatch.setattr("hub.pipeline.run.open_sink", lambda job: sink)
    with pytest.raises(SinkError):
        PipelineRun(job_at(root.parent), once=True).run(spark)
    sink.thread.join(60)
    assert len(raised) == 1 and "did not start" in str(raised[0])


def test_windows_close_with_the_watermark_and_hold_what_came(spark: SparkSession, root: Path) -> None:
    tables = """
[select]
columns = ["carrier", "event_time", "record.topic AS airport"]
where = "carrier != 'DL'"
[watermark]
delay = "10 minutes"
[window]
size = "1 hour"
group = ["carrier"]
aggregates = ["count(*) AS flights"]
"""
    job = job_at(root.parent, tables=tables)
    PipelineRun(job, once=True).run(spark)
    append(root, range(300, 420))
    PipelineRun(job, once=True).run(spark)
    expected = Counter((BEGIN + timedelta(hours=row // 60), flight(row)["carrier"]) for row in range(420) if flight(row)["carrier"] != "DL")
    found = table_of(root.parent / "out")
    counted = {(row["window_start"], row["carrier"]): row["flights"] for row in found}
    assert len(counted) == len(found)
    closed = {key: value for key, value in expected.items() if key[0] + timedelta(hours=1) <= BEGIN + timedelta(minutes=417 - 10)}
    assert counted == closed and len(closed) == 12


@pytest.mark.parametrize("tables", [WINDOWS, CLOSED_WINDOWS], ids=["complete", "append"])
def test_a_replayed_batch_of_windows_is_known(spark: SparkSession, root: Path, tables: str) -> None:
    job = job_at(root.parent, tables=tables)
    PipelineRun(job, once=True).run(spark)
    append(root, range(300, 420))
    PipelineRun(job, once=True).run(spark)
    before = table_of(root.parent / "out")
    last = forget_last_commit(job)
    assert PipelineRun(job, once=True).run(spark).batch >= last
    assert table_of(root.parent / "out") == before
    append(root, range(420, 480))  # the state of the windows is what it was
    PipelineRun(job, once=True).run(spark)
    counted = {row["window_start"]: row["flights"] for row in table_of(root.parent / "out")}
    assert set(counted.values()) == {60} and len(counted) > len(before)


def test_a_time_far_ahead_takes_no_other_record_with_it(spark: SparkSession, root: Path) -> None:
    with shard.open(root, prefix="JFK") as shards:
        shards.append(b'{"row": 1, "at": "2099-01-01T00:00:00Z"}', key=b"1")
    job = job_at(root.parent, tables=CLOSED_WINDOWS)
    assert PipelineRun(job, once=True).run(spark).bad == 1
    append(root, range(300, 420))
    assert PipelineRun(job, once=True).run(spark).late == 0
    assert sum(row["flights"] for row in table_of(root.parent / "out")) == 360


def test_a_value_that_is_too_long_for_a_folder_stops_no_other_process(spark: SparkSession, root: Path) -> None:
    longest = "/" * ((255 - len("carrier=")) // len("%2F"))
    with shard.open(root, prefix="JFK") as shards:
        for carrier in (longest, f"{longest}/", "x" * 300, "a\\u0000b"):
            shards.append(b'{"row": 300, "carrier": "%s", "at": "2026-01-31T00:00:00Z"}' % carrier.encode(), key=b"k")
    done = PipelineRun(job_at(root.parent, sink='partition_by = ["carrier"]'), once=True).run(spark)
    assert (done.state, done.records, done.bad) == ("done", 304, 3)
    found = table_of(root.parent / "out")
    assert [row["carrier"] for row in found if row["row"] == 300] == [longest] and len(found) == 301


SLIDING = CLOSED_WINDOWS.replace('size = "1 hour"', 'size = "1 hour"\nslide = "20 minutes"')
SELECTED = """
[select]
columns = ["carrier", "event_time"]
where = "row % 3 = 0"
"""


@pytest.mark.parametrize(
    ("tables", "share", "times"),
    [(CLOSED_WINDOWS, 1, 1), (SLIDING, 1, 3), (SELECTED + CLOSED_WINDOWS, 3, 1)],
    ids=["all", "sliding", "selected"],
)
def test_records_that_come_after_the_watermark_are_counted_each(
    spark: SparkSession, root: Path, tables: str, share: int, times: int
) -> None:
    assert "slide" in SLIDING
    job = job_at(root.parent, tables=tables)
    append(root, range(9_999, 10_000))  # a week ahead
    assert PipelineRun(job, once=True).run(spark).late == 0
    append(root, range(300, 420))
    done = PipelineRun(job, once=True).run(spark)
    assert (done.records, done.late) == (120, 120 // share)
    assert sum(row["flights"] for row in table_of(root.parent / "out")) == 300 // share * times


def test_a_row_is_late_when_the_watermark_has_reached_the_end_of_its_last_window(tmp_path: Path) -> None:
    import pyarrow

    from hub.pipeline.lateness import marking, watermark_before

    for slide, windows in (("", 1), ("20 minutes", 3)):
        tables = CLOSED_WINDOWS.replace('size = "1 hour"', f'size = "1 hour"\nslide = "{slide}"' if slide else 'size = "1 hour"')
        marked = marking(job_at(tmp_path, tables=tables), None)  # type: ignore[arg-type]
        assert marked is not None
        hour, step = 3600 * 10**6, 3600 * 10**6 // windows
        for watermark in (0, hour - 1, hour, hour + 1, 10 * hour, 10 * hour + step):
            times = [*range(-3 * hour, 12 * hour, step // 4), None]
            found = marked.marks(pyarrow.array(times, pyarrow.timestamp("us", "UTC")), watermark).to_pylist()
            assert found == [time is not None and time // step * step + hour <= watermark for time in times]
    for text in ("record.timestamp AS event_time", "struct(*) AS all", "date_trunc('hour', event_time) AS hour"):
        assert marking(job_at(tmp_path, tables=f'[select]\ncolumns = ["event_time", "{text}"]\n' + CLOSED_WINDOWS), None) is None  # type: ignore[arg-type]
    assert watermark_before(str(tmp_path / "none"), 0) == 0


@pytest.mark.parametrize("by", [(), tuple(name for name in BY if name != "u"), BY], ids=["plain", "by Spark", "by Arrow"])
def test_rows_of_every_type_are_written_by_spark_and_read_by_others(spark: SparkSession, tmp_path: Path, by: tuple[str, ...]) -> None:
    import polars
    import pyarrow
    from pyarrow import compute as pc

    whole = pyarrow.Table.from_pylist(everything(), EVERYTHING)
    parquet.write_table(whole, tmp_path / "rows.parquet", row_group_size=7)
    place, saved = TablePlace.of(tmp_path / "t"), spark.conf.get("spark.sql.parquet.outputTimestampType")
    spark.conf.set("spark.sql.parquet.outputTimestampType", RUNTIME["spark.sql.parquet.outputTimestampType"])
    try:
        frame = spark.read.parquet(str(tmp_path / "rows.parquet")).select(*EVERYTHING.names).repartition(3, "i8")
        schema = table_schema(frame)
        table = Table.make(place, schema, partition_by=by)
        for folder in ("_staged/part-1-of a killed driver", "_staged/other"):
            (tmp_path / "t" / folder).mkdir(parents=True)
        remove_staged(place, "part-1-")
        files = write_files(frame, place, schema, by, "part-1")
        assert os.listdir(tmp_path / "t" / "_staged") == ["other"]
        table.commit(files, {"q": Change(None, 0)})
    finally:
        spark.conf.set("spark.sql.parquet.outputTimestampType", saved)
    assert len(files) == 3 or by
    for file in files:
        assert (tmp_path / "t" / file.path).stat().st_mode & 0o777 == 0o600
    expected = told(everything())
    assert told(deltalake.DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist()) == expected
    assert told(table.dataset().to_table().to_pylist()) == expected
    lazy = polars.scan_delta(str(tmp_path / "t"))
    for column in ("i8", "i64", "f64", "s", "day"):
        for row in everything()[:20:3]:
            if row[column] is None or row[column] != row[column]:
                continue
            value = pyarrow.scalar(row[column], EVERYTHING.field(column).type)
            less = sorted(whole.filter(pc.less_equal(whole[column], value))["i8"].to_pylist())
            assert sorted(lazy.filter(polars.col(column) <= row[column]).collect()["i8"]) == less
            assert sorted(table.dataset().to_table(filter=pc.field(column) <= value)["i8"].to_pylist()) == less
    more = sorted(row["i8"] for row in everything() if row["f64"] != row["f64"] or row["f64"] > 1)
    assert sorted(lazy.filter(polars.col("f64") > 1).collect()["i8"]) == more, "NaN is the largest number to polars"


def test_aggregates_over_all_time_replace_each_other(spark: SparkSession, root: Path) -> None:
    tables = '[window]\ngroup = ["record.topic AS airport", "carrier"]\naggregates = ["count(*) AS n", "sum(row) AS total"]'
    job = job_at(root.parent, tables=tables, decode='schema = "infer"')
    PipelineRun(job, once=True).run(spark)
    append(root, range(300, 330))
    assert (job.state / "checkpoint.schema").read_text() == "row bigint, carrier string, at string"
    PipelineRun(job, once=True).run(spark)
    expected: Counter[tuple[str, str]] = Counter()
    for row in range(330):
        expected[("EWR" if row % 2 == 0 else "JFK", flight(row)["carrier"])] += row
    found = table_of(root.parent / "out")
    assert {(row["airport"], row["carrier"]): row["total"] for row in found} == expected
    assert sum(row["n"] for row in found) == 330


def test_rows_go_to_other_logs_once(spark: SparkSession, root: Path) -> None:
    (root.parent / "out").mkdir()
    tables = """
[select]
where = "carrier = 'AA'"
columns = ["record.key AS key", "to_json(struct(row, carrier)) AS value"]
"""
    sink = 'format = "kvspool"\noptions = { topic = "aa", bits = "1", capacity = "1MiB", codec = "json" }'
    job = job_at(root.parent, tables=tables, sink=sink)
    PipelineRun(job, once=True).run(spark)
    forget_last_commit(job)
    PipelineRun(job, once=True).run(spark)
    with shard.open(root.parent / "out", prefix="aa") as shards:
        found = [(record.data["row"], record.key) for record in shards.read()]
    assert sorted(found) == [(row, b"%d" % row) for row in range(0, 300, 3)]


def test_a_stop_lets_the_batch_end(spark: SparkSession, root: Path) -> None:
    job = job_at(root.parent)
    has_batch = threading.Event()
    run = PipelineRun(job, report=lambda told: has_batch.set() if told.batch >= 0 else None)
    threading.Thread(target=lambda: has_batch.wait(100) and run.stop(), daemon=True).start()
    done = run.run(spark)
    assert (done.state, done.records) == ("stopped", 300)
    assert rows_of(root.parent / "out") == list(range(300))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode": 'schema = "row string"\nbad = "fail"'}, "[KVSPOOL_BAD_RECORD] topic "),
        ({"tables": '[select]\nwhere = "carier = 1"'}, "[UNRESOLVED_COLUMN.WITH_SUGGESTION]"),
        ({"source": 'startingOffsets = "sometime"'}, "option startingOffsets"),
    ],
)
def test_a_failure_says_its_cause_first(spark: SparkSession, root: Path, changes: dict[str, str], words: str) -> None:
    job = job_at(root.parent, **changes)
    with pytest.raises(PipelineFailed) as caught:
        PipelineRun(job, once=True).run(spark)
    assert words in str(caught.value) and "\n" not in str(caught.value) and "\tat " not in str(caught.value)
    told = pipeline_progress.read(job.state / "progress.json")
    assert told.state == "failed" and words in told.error


def test_a_column_is_added_if_the_job_says_so_and_every_other_difference_is_named(spark: SparkSession, root: Path) -> None:
    PipelineRun(job_at(root.parent, tables='[select]\ncolumns = ["row"]'), once=True).run(spark)
    append(root, range(300, 310))
    more = '[select]\ncolumns = ["row", "carrier"]'
    with pytest.raises(TableError, match="KVSPOOL_TABLE_SCHEMA.* the rows have the column carrier, string, and .*/out has none"):
        PipelineRun(job_at(root.parent, tables=more), once=True).run(spark)
    PipelineRun(job_at(root.parent, tables=more, sink="evolve = true"), once=True).run(spark)
    found = {row["row"]: row["carrier"] for row in table_of(root.parent / "out")}
    assert len(found) == 310 and found[0] is None and found[300] == flight(300)["carrier"]
    other = '[select]\ncolumns = ["string(row) AS row", "carrier"]'
    with pytest.raises(TableError, match="column row is integer in .*/out, and string in the rows"):
        PipelineRun(job_at(root.parent, tables=other, sink="evolve = true"), once=True).run(spark)
    assert pipeline_progress.read(load(root.parent / "delays.toml").state / "progress.json").state == "failed"


def test_windows_are_merged_by_their_keys(spark: SparkSession, root: Path) -> None:
    tables = WINDOWS.replace("aggregates", 'group = ["nullif(carrier, \'DL\') AS carrier"]\naggregates')
    job = job_at(root.parent, tables=f'[watermark]\ndelay = "10 minutes"\n{tables}', sink='mode = "merge"')
    for rows in (range(300, 420), range(420, 450)):
        PipelineRun(job, once=True).run(spark)
        append(root, rows)
    forget_last_commit(job)
    PipelineRun(job, once=True).run(spark)
    PipelineRun(job, once=True).run(spark)
    found = [((row["window_start"], row["carrier"]), row["flights"]) for row in table_of(root.parent / "out")]
    names = {"AA": "AA", "UA": "UA", "DL": None}
    assert dict(found) == Counter((BEGIN + timedelta(hours=row // 60), names[flight(row)["carrier"]]) for row in range(450))
    assert len(found) == 24


def test_a_checkpoint_or_a_table_that_was_restored_is_noticed(spark: SparkSession, root: Path) -> None:
    job = job_at(root.parent)
    PipelineRun(job, once=True).run(spark)
    shutil.copytree(job.checkpoint, root.parent / "older")
    shutil.copytree(root.parent / "out", root.parent / "out.older")
    append(root, range(300, 310))
    PipelineRun(job, once=True).run(spark)
    shutil.copytree(root.parent / "out", root.parent / "out.newer")
    append(root, range(310, 320))
    (root.parent / "out").rename(root.parent / "away")
    (root.parent / "out.older").rename(root.parent / "out")
    with pytest.raises(PipelineFailed, match="KVSPOOL_SINK_DAMAGED.* ends with batch 0, but the checkpoint is at batch 2"):
        PipelineRun(job, once=True).run(spark)
    (root.parent / "out").rename(root.parent / "out.older")
    (root.parent / "out.newer").rename(root.parent / "out")
    shutil.rmtree(job.checkpoint)
    (root.parent / "older").rename(job.checkpoint)
    with pytest.raises(PipelineFailed, match="KVSPOOL_CHECKPOINT_RESTORED.* has batch 1, and the checkpoint repeats batch 1"):
        PipelineRun(job, once=True).run(spark)
    assert rows_of(root.parent / "out") == list(range(310))


def test_a_pipeline_writes_to_an_object_store(
    spark: SparkSession, root: Path, lake: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    address = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):  # the session's workers are older than these variables
        monkeypatch.setitem(spark.sparkContext.environment, name, os.environ[name])
    options = {"AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}
    told = ", ".join(f'{name} = "{value}"' for name, value in options.items())
    sink = f'path = "{lake}/out"\ncheckpoint = "checkpoint"\npartition_by = ["carrier"]\noptions = {{ {told} }}'
    path = root.parent / "delays.toml"
    job = job_at(root.parent, decode=f'{DECODE}\nbad_path = "bad"')
    path.write_text(path.read_text().replace('path = "out"', sink))
    job = load(path)
    PipelineRun(job, once=True).run(spark)
    forget_last_commit(job)
    append(root, range(300, 310))
    PipelineRun(job, once=True).run(spark)
    PipelineRun(job, once=True).run(spark)
    found = read_table(spark, f"{lake}/out", options=options).select("row", "carrier").collect()
    assert sorted((row["row"], row["carrier"]) for row in found) == [(row, flight(row)["carrier"]) for row in range(310)]
    files = [file for file in root.parent.rglob("*") if file.is_file()]  # job, checkpoint, progress, logs
    assert files and not [file for file in files if b"hush-hush" in file.read_bytes()]
    assert "hush-hush" not in "".join(capfd.readouterr())


def test_sparks_own_files_are_for_spark(spark: SparkSession, root: Path) -> None:
    job = job_at(root.parent, sink='format = "parquet"\npartition_by = ["carrier"]')
    PipelineRun(job, once=True).run(spark)
    forget_last_commit(job)
    PipelineRun(job, once=True).run(spark)
    found = spark.read.parquet(str(root.parent / "out")).collect()
    assert sorted(row["row"] for row in found) == list(range(300))
    shutil.rmtree(job.checkpoint)
    with pytest.raises(SinkError, match="KVSPOOL_SINK_OF_ANOTHER_QUERY"):
        PipelineRun(job, once=True).run(spark)


def test_a_spark_that_does_not_start_is_said_without_a_trace(root: Path) -> None:
    job = job_at(root.parent, tables='[spark.conf]\n"spark.jars.packages" = "nothing"')
    command = [sys.executable, "-m", "kvspool.cli", "pipeline", "run", str(job.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "[JAVA_GATEWAY_EXITED]" in done.stderr and str(job.state / "spark.log") in done.stderr and "Traceback" not in done.stderr
    assert "Maven Coordinates" in (job.state / "spark.log").read_text()


def test_a_job_that_would_add_to_what_was_to_be_replaced_is_refused(spark: SparkSession, root: Path) -> None:
    PipelineRun(job_at(root.parent, tables=WINDOWS), once=True).run(spark)
    before = table_of(root.parent / "out")
    append(root, range(300, 420))
    with pytest.raises(SinkError, match="KVSPOOL_SINK_OF_ANOTHER_MODE.* complete, and the job has append"):
        PipelineRun(job_at(root.parent, tables=CLOSED_WINDOWS), once=True).run(spark)
    assert table_of(root.parent / "out") == before


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), "An error occurred while calling o71"])
def test_a_jvm_that_has_ended_is_said(root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | str) -> None:
    from py4j.protocol import Py4JError

    class Gone:
        """A session or a query of a JVM that was killed."""

        def fail(self, *_: object) -> None:
            raise Py4JError(error) if isinstance(error, str) else error

        awaitTermination = set = stop = fail

        @property
        def conf(self) -> Gone:
            return self

    job, gone = job_at(root.parent), Gone()
    monkeypatch.setattr("hub.pipeline.session.start", lambda *_: gone)
    for _ in ("while the query starts", "while it runs"):
        with pytest.raises(PipelineFailed, match=r"Spark's JVM has ended.* \S+/spark\.log"):
            PipelineRun(job, once=True).run()
        told = pipeline_progress.read(job.state / "progress.json")
        assert told.state == "failed" and "JVM has ended" in told.error
        monkeypatch.setattr(PipelineRun, "_start", lambda run, *_: setattr(run, "_query", gone))


def test_a_checkpoint_that_is_gone_is_noticed(spark: SparkSession, root: Path) -> None:
    job = job_at(root.parent)
    PipelineRun(job, once=True).run(spark)
    Path(job.checkpoint).rename(job.state / "away")
    with pytest.raises(PipelineFailed, match="KVSPOOL_SINK_OF_ANOTHER_QUERY"):
        PipelineRun(job, once=True).run(spark)
    assert rows_of(root.parent / "out") == list(range(300))
