"""Job files, schemas and samples, without Spark: what is wrong is said with file, table and key."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import Run

import hub
import kvspool
import shard
from hub.pipeline import JobError, PipelineRuns, SchemaError, SinkError, load
from hub.pipeline.failures import cause
from hub.pipeline.infer import infer
from hub.pipeline.job import parse, seconds, source_options
from hub.pipeline.run import PipelineRun, only_one, pinned_fields, progress_paths, schema_path
from hub.pipeline.schema import Kind, ddl, parse_schema
from hub.pipeline.session import errors_to
from hub.pipeline.sinks import DeltaSink, open_sink
from kvspool.errors import MissingExtra, NotAFile

deltalake = pytest.importorskip("deltalake")

LEAST = """
[source]
path = "root"

[decode]
schema = "row bigint, carrier string"

[sink]
path = "out"
"""
ALL = """
name = "delays"

[source]
hub = "grpc+tls://one:7070,grpc+tls://two:7070"
subscribe = ["EWR", "JFK"]
tokenFile = "reader.token"
startingOffsets = { JFK = { 0 = 23 } }
maxOffsetsPerTrigger = 100_000
failOnDataLoss = false

[decode]
codec = "msgpack"
schema = "at timestamp, carrier string, delay int"
time = "at"
bad = "fail"
bad_path = "wrong"

[select]
columns = ["*", "upper(carrier) AS code"]
where = "delay > 0"

[watermark]
delay = "10 minutes"

[window]
size = "1 hour"
slide = "30 minutes"
group = ["code"]
aggregates = ["count(*) AS flights"]

[sink]
path = "late"
partition_by = ["code"]
trigger = "5 seconds"
checkpoint = "/data/late.checkpoint"

[compact]
target = "64MiB"
files = 4

[spark]
master = "spark://host:7077"
memory = "2g"
conf = { "spark.cores.max" = "4" }
"""


def job_of(text: str, folder: Path = Path("/jobs")) -> Any:
    return parse(tomllib.loads(text), folder / "delays.toml")


def test_a_job_of_the_least_has_defaults_and_paths_next_to_its_file() -> None:
    job = job_of(LEAST)
    assert (job.name, job.mode, job.interval) == ("delays", "append", 10.0)
    assert (job.source.options, job.source.root) == ({"path": "/jobs/root"}, Path("/jobs/root"))
    assert (job.sink.path, job.sink.format, job.bad_path) == ("/jobs/out", "delta", Path("/jobs/out.delays_bad"))
    assert (job.checkpoint, job.state) == ("/jobs/.out.delays/checkpoint", Path("/jobs/.out.delays"))
    assert [field.name for field in job.fields] == ["row", "carrier"]
    assert source_options(job)["startingOffsets"] == "earliest"
    assert job.select is job.watermark is job.window is job.compact is None


def test_a_time_may_be_so_far_ahead_if_a_field_tells_it_and_it_moves_the_watermark() -> None:
    assert job_of(ALL).ahead == 86400 and job_of(ALL.replace("[watermark]", '[watermark]\nahead = "2 hours"')).ahead == 7200
    for other in (ALL.replace("[watermark]", '[watermark]\ncolumn = "at"'), ALL.replace('time = "at"', ""), LEAST):
        assert job_of(other).ahead is None


@pytest.mark.parametrize("form", ["kvspool", "delta"])
def test_jobs_that_write_to_one_place_share_nothing_else(form: str) -> None:
    one, two = (job_of(f'name = "{name}"\n{LEAST}format = "{form}"\n') for name in ("one", "two"))
    assert (one.state, one.bad_path) == (Path("/jobs/.out.one"), Path("/jobs/out.one_bad"))
    assert (two.state, two.bad_path) == (Path("/jobs/.out.two"), Path("/jobs/out.two_bad"))
    assert one.checkpoint != two.checkpoint


@pytest.mark.parametrize("option", ["startingOffsets", "StartingTimestamp", "startingOffsetsByTimestamp"])
def test_a_pipeline_begins_at_the_earliest_record_by_default(option: str) -> None:
    lenient = job_of(LEAST.replace("[decode]", 'startingOffsetsByTimestampStrategy = "latest"\n[decode]'))
    assert source_options(lenient)["startingOffsets"] == "earliest"
    told = job_of(LEAST.replace("[decode]", f'{option} = "7"\n[decode]'))
    assert source_options(told) == {"path": "/jobs/root", option: "7"}


def examples() -> tuple[str, str]:
    """Return the job files of the page: the one to infer from, and the whole one."""
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    first = page.partition("$ cat delays.toml\n")[2].partition("\n$")[0]
    return first, page.partition("```toml\n")[2].partition("```")[0]


def test_the_examples_of_the_page_are_jobs() -> None:
    first, second = examples()
    assert job_of(first).fields is None
    job = job_of(second)
    assert (job.mode, job.sink.path, job.window.size) == ("complete", "/jobs/output/hourly", "1 hour")


def test_a_job_with_everything() -> None:
    job = job_of(ALL)
    assert job.source.options == {
        "hub": "grpc+tls://one:7070,grpc+tls://two:7070",
        "subscribe": "EWR,JFK",
        "tokenFile": "/jobs/reader.token",
        "startingOffsets": '{"JFK":{"0":23}}',
        "maxOffsetsPerTrigger": "100000",
        "failOnDataLoss": "false",
    }
    assert source_options(job) == job.source.options and job.source.root is None
    assert (job.mode, job.interval, job.bad_path) == ("append", 5.0, Path("/jobs/wrong"))
    assert job.checkpoint == "/data/late.checkpoint"
    assert job.compact.target_bytes == 64 << 20


def test_aggregates_that_never_close_replace_the_sink() -> None:
    never = LEAST + '[window]\ngroup = ["carrier"]\naggregates = ["count(*) AS n"]\n'
    assert job_of(never).mode == "complete"
    assert job_of(never + 'size = "1 hour"\n').mode == "complete"
    assert job_of(never + 'size = "1 hour"\n[watermark]\ndelay = "1 minute"\n').mode == "append"


def changed(text: str, **tables: Any) -> dict[str, Any]:
    """Return a document with keys replaced: `source={"path": ...}`; None takes one away."""
    document = tomllib.loads(text)
    for name, table in tables.items():
        if not isinstance(table, dict):
            document[name] = table
            continue
        for key, value in table.items():
            if value is None:
                document[name].pop(key)
            else:
                document.setdefault(name, {})[key] = value
    return {name: table for name, table in document.items() if table is not None}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (LEAST, {"sinks": {"path": "x"}}, "there is no [sinks]"),
    (LEAST, {"source": None}, "[source] is missing"),
    (LEAST, {"sink": None}, "[sink] is missing"),
    (LEAST, {"source": 7}, "[source] must be a table"),
    (LEAST, {"source": {"path": None}}, "[source] has either path"),
    (LEAST, {"source": {"hub": "grpc://h:1"}}, "[source] has either path"),
    (LEAST, {"name": "a/b"}, "name: up to 64 letters"),
    (LEAST, {"name": 7}, "name: up to 64 letters"),
    (LEAST, {"decode": {"codec": "xml"}}, "[decode] codec: Invalid enum value 'xml'"),
    (LEAST, {"decode": {"skema": "a int"}}, "[decode] skema: unknown key"),
    (LEAST, {"decode": {"schema": None}}, "[decode] schema: missing"),
    (LEAST, {"decode": {"schema": "row bigint carrier"}}, "[decode] schema: a comma or the end expected at character 12, not 'carrier'"),
    (LEAST, {"decode": {"schema": "row number"}}, "[decode] schema: a type (bigint, binary"),
    (LEAST, {"decode": {"schema": "a int, A int"}}, "is repeated"),
    (LEAST, {"decode": {"schema": "record string"}}, "can't be named 'record'"),
    (LEAST, {"decode": {"codec": "raw"}}, "codec raw has one column, named value"),
    (LEAST, {"decode": {"sample": 0}}, "[decode] sample: 1 to 1,000,000"),
    (LEAST, {"decode": {"time": "at"}}, "[decode] time: record.timestamp, or a field that is a timestamp; 'at' is no field"),
    (LEAST, {"decode": {"time": "row"}}, "'row' is bigint"),
    (LEAST, {"decode": {"bad": "drop"}}, "[decode] bad: Invalid enum value 'drop'"),
    (LEAST, {"select": {"columns": [""]}}, "[select] columns: at least one expression"),
    (LEAST, {"watermark": {"column": "at"}}, "[watermark] delay: missing"),
    (LEAST, {"watermark": {"delay": "soon"}}, '[watermark] delay: a duration is written as "10 seconds"'),
    (ALL, {"watermark": {"ahead": "0 days"}}, "[watermark] ahead: must be longer than 0"),
    (LEAST, {"window": {"aggregates": []}}, "[window] aggregates: at least one"),
    (LEAST, {"window": {"size": "1 hour"}}, "[window] aggregates: missing"),
    (LEAST, {"window": {"aggregates": ["count(*) AS n"], "slide": "1 hour"}}, "[window] slide: only with size"),
    (ALL, {"window": {"slide": "2 hours"}}, "[window] slide: at most size"),
    (ALL, {"window": {"size": "0 hours"}}, "[window] size: must be longer than 0"),
    (LEAST, {"sink": {"path": ""}}, "[sink] path: missing"),
    (LEAST, {"sink": {"format": "orc"}}, "[sink] format: Invalid enum value 'orc'"),
    (LEAST, {"sink": {"path": "s3a://bucket/out", "format": "parquet"}}, "[sink] path: parquet needs a file system"),
    (LEAST, {"sink": {"path": "s3://bucket/out"}}, "[sink] path: with an object store, [sink] checkpoint"),
    (LEAST, {"sink": {"options": {"AWS_SECRET_ACCESS_KEY": "x"}}}, "[sink] options: AWS_SECRET_ACCESS_KEY is a secret; set the env"),
    (LEAST, {"decode": {"bad_path": "s3a://bucket/bad"}}, "[decode] bad_path: must be on a file system"),
    (LEAST, {"sink": {"trigger": "often"}}, "[sink] trigger: a duration"),
    (LEAST, {"sink": {"options": {"a": "b"}, "format": "parquet"}}, "[sink] options: format parquet has no options"),
    (LEAST, {"sink": {"mode": "complete"}}, '[sink] mode: "complete" is for a job with [window]'),
    (LEAST, {"sink": {"mode": "merge"}}, '[sink] mode: "merge" is for a job with [window]'),
    (LEAST, {"sink": {"keep": "long"}}, "[sink] keep: a duration"),
    (LEAST, {"sink": {"format": "parquet", "evolve": True}}, "[sink] evolve is for the formats delta and iceberg"),
    (LEAST, {"window": {"aggregates": ["count(*) AS n"]}, "sink": {"mode": "append"}}, '[sink] mode: "append" needs [window] size'),
    (LEAST, {"window": {"aggregates": ["count(*) AS n"]}, "sink": {"format": "kvspool"}}, "[sink] mode: a log can only be added to"),
    (LEAST, {"window": {"aggregates": ["count(*) AS n"]}, "sink": {"format": "parquet"}}, "[sink] mode: a folder of Parquet can only be"),
    (LEAST, {"sink": {"format": "kvspool", "partition_by": ["a"]}}, "[sink] partition_by: shards are chosen by"),
    (LEAST, {"sink": {"format": "iceberg", "partition_by": ["carrier"]}}, "Iceberg tables are not partitioned"),
    (LEAST, {"sink": {"format": "iceberg", "options": {"a": "b"}}}, "format iceberg has no options"),
    (LEAST, {"sink": {"format": "kvspool"}, "compact": {"files": 4}}, "[compact] is for format delta"),
    (LEAST, {"compact": {"target": "large"}}, "[compact] target"),
    (LEAST, {"compact": {"target": "1KiB"}}, "[compact] target: at least 64KiB"),
    (LEAST, {"compact": {"files": 1}}, "[compact] files: at least 2"),
    (LEAST, {"spark": {"master": 7}}, "[spark] master: Expected `str`, got `int`"),
]


@pytest.mark.parametrize(("text", "tables", "words"), WRONG, ids=[words[:40] for _, _, words in WRONG])
def test_what_is_wrong_is_said_with_file_table_and_key(text: str, tables: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        parse(changed(text, **tables), Path("/jobs/delays.toml"))
    assert str(caught.value).startswith("/jobs/delays.toml: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("content", [b"= 1", b"\xff", b"a = [" * 5000, b"#" * ((1 << 20) + 1)])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.toml").write_bytes(content)
    with pytest.raises(JobError, match=r"job\.toml"):
        load(tmp_path / "job.toml")


def test_a_job_file_that_is_a_fifo_or_a_directory_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "job.toml").symlink_to("fifo.toml")
    (tmp_path / "directory.toml").mkdir()
    for name, kind in (("fifo", "a FIFO"), ("job", "a FIFO"), ("directory", "a directory")):
        with pytest.raises(JobError, match=rf"{name}\.toml: .* is not a regular file, but {kind}"):
            load(tmp_path / f"{name}.toml")


def test_a_job_file_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there.toml").write_text(LEAST)
    (tmp_path / "job.toml").symlink_to("there.toml")
    assert load(tmp_path / "job.toml").name == "job"


def test_a_log_of_a_session_that_is_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(NotAFile), errors_to(tmp_path / "log"):
        raise AssertionError("the block ran")
    with errors_to(tmp_path / "file"):
        os.write(2, b"said")
    assert (tmp_path / "file").read_bytes() == b"said"


def test_durations() -> None:
    assert [seconds(text) for text in ("1 second", "250 milliseconds", "2 hours", "1 week")] == [1, 0.25, 7200, 604800]


# Schemas.


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a int", "a int"),
        ("  a:LONG ,b  Integer", "a bigint, b int"),
        ("`flight-no` string, `a``b` date", "`flight-no` string, `a``b` date"),
        ("a array<map<string, struct<x: int, y: array<double>>>>", "a array<map<string, struct<x: int, y: array<double>>>>"),
    ],
)
def test_a_schema_is_read_as_spark_writes_it(text: str, written: str) -> None:
    fields = parse_schema(text)
    assert ddl(fields) == written
    assert parse_schema(written) == fields
    assert str(fields[0].kind.arrow)


@pytest.mark.parametrize("text", ["", ",", "a", "a int,", "a array", "a array<int", "a map<int, int>", "a struct<x int>", "é int"])
def test_a_schema_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        parse_schema(text)


def test_a_schema_is_no_way_to_the_end_of_the_stack() -> None:
    with pytest.raises(SchemaError, match="nested types"):
        parse_schema("a " + "array<" * 5000)


def inferred(*values: Any) -> Any:
    return infer([json.dumps(value).encode() for value in values], msgspec.json.decode)


def test_a_schema_is_inferred_from_what_most_records_have() -> None:
    found = inferred({"a": 1, "b": 1, "c": None}, {"a": 2, "b": 2.5, "d": [None, "x"]}, {"a": "two", "e": {"f": True}})
    assert found.ddl == "a bigint, b double, d array<string>, e struct<f: boolean>"
    assert found.records == 3
    assert any("a is string, and bigint in most" in note for note in found.notes)


def test_records_that_are_no_maps_are_noted() -> None:
    found = infer([b'{"a": 1}', b"{", b"7"], msgspec.json.decode)
    assert found.fields[0].kind == Kind("bigint")
    assert len(found.notes) == 2


@pytest.mark.parametrize("values", [[], [b"7"], [b'{"a": null}'], [b'{"record": 1}'], [b'{"a": 1, "A": 2}']])
def test_a_sample_that_says_nothing_is_refused(values: list[bytes]) -> None:
    with pytest.raises(SchemaError):
        infer(values, msgspec.json.decode)


# Commands that need no Spark.


def test_check_says_what_a_job_will_do(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "late.toml"
    path.write_text(ALL)
    said = run("pipeline", "check", path).out
    assert "aggregates count(*) AS flights by code of 1 hour every 30 minutes" in said
    assert f"adds to    delta at {tmp_path}/late, partitioned by code" in said
    assert "bad record ends the query" in said
    path.write_text(LEAST.replace('path = "root"', 'path = "root"\nsubscribbe = "JFK"'))
    said = run("pipeline", "check", path, code=2).err
    assert f"{path}: [source]" in said and "did you mean subscribe?" in said


def test_check_does_not_repeat_a_token(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "late.toml"
    path.write_text(ALL.replace('tokenFile = "reader.token"', 'token = "secret"'))
    for form in ([], ["--json"]):
        said = run("pipeline", "check", path, *form)
        assert "(hidden)" in said.out and "secret" not in said.out + said.err


def test_check_repeats_no_secret_of_sink_and_session(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "late.toml"
    conf = 'conf = { "spark.hadoop.fs.s3a.access.key" = "hush", "spark.ssl.keyPassword" = "hush", "spark.cores.max" = "4" }'
    sink = 'format = "kvspool"\noptions = { token = "hush", Secret = "hush", tokenFile = "here", topic = "x" }'
    path.write_text(f"{LEAST}{sink}\n[spark]\n{conf}\n")
    said = run("pipeline", "check", path, "--json").out
    assert "hush" not in said
    found = json.loads(said)
    assert found["sink"]["options"] == {"token": "(hidden)", "Secret": "(hidden)", "tokenFile": "here", "topic": "x"}
    assert found["spark"]["conf"]["spark.cores.max"] == "4"


def test_the_first_command_of_the_page_infers_a_schema(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "output").mkdir()
    with shard.create(tmp_path / "output" / "hub", prefix="JFK", bits=1, capacity="64KiB") as shards:
        shards.append_many([{"row": row, "carrier": "AA"} for row in range(4)], keys=[b"%d" % row for row in range(4)])
    (tmp_path / "delays.toml").write_text(examples()[0])
    assert run("pipeline", "infer", tmp_path / "delays.toml").out == 'schema = "row bigint, carrier string"\n'


def timed_job(folder: Path) -> Any:
    """A job that infers its schema, and takes the time from a field."""
    return job_of(LEAST.replace('schema = "row bigint, carrier string"', 'codec = "msgpack"\nschema = "infer"\ntime = "at"'), folder)


@pytest.mark.parametrize(
    ("value", "has"),
    [({"at": 1769860800}, "is bigint"), ({"at": "2026-01-31"}, "is string"), ({"t": 1}, "is no field"), ({"at": datetime.now(UTC)}, "")],
)
def test_the_time_is_looked_for_among_the_fields_that_are_inferred(tmp_path: Path, value: dict[str, Any], has: str) -> None:
    pytest.importorskip("pyarrow")
    with shard.create(tmp_path / "root", prefix="JFK", bits=1, capacity="64KiB") as shards:
        shards.append(msgspec.msgpack.encode(value), key=b"k")
    job = timed_job(tmp_path)
    if has:
        with pytest.raises(JobError, match=rf"delays\.toml: \[decode\] time: .* 'at' {has}; put the schema .* with at timestamp"):
            pinned_fields(job)
    else:
        assert ddl(pinned_fields(job)) == ddl(pinned_fields(job)) == "at timestamp"
    assert schema_path(job).exists() != bool(has)


def test_the_time_is_looked_for_in_a_schema_that_was_pinned(tmp_path: Path) -> None:
    job = timed_job(tmp_path)
    schema_path(job).parent.mkdir()
    schema_path(job).write_text("at bigint")
    with pytest.raises(JobError, match="'at' is bigint"):
        pinned_fields(job)


@pytest.mark.parametrize("limits", [{"format": "fixed", "item_bytes": 8, "items_per_blob": 10}, {"format": "sej"}, {"format": "kvj"}])
def test_nothing_is_put_into_a_log_that_is_the_source(tmp_path: Path, limits: dict[str, Any]) -> None:
    kvspool.create(tmp_path / "root", **limits).close()
    before = sorted((tmp_path / "root").rglob("*"))
    job = job_of(LEAST, tmp_path)
    assert progress_paths(job) == [job.state / "progress.json"]
    assert sorted((tmp_path / "root").rglob("*")) == before


def test_progress_is_put_into_a_hub_root_that_is_the_source(tmp_path: Path) -> None:
    hub.create(tmp_path / "root").close()
    assert progress_paths(job_of(LEAST, tmp_path))[1:] == [tmp_path / "root" / ".hub" / "pipelines" / "delays.json"]


def test_a_job_runs_once_at_a_time(tmp_path: Path) -> None:
    job = job_of(LEAST, tmp_path)
    with only_one(job):
        with pytest.raises(PipelineRuns, match="another process runs delays"):
            PipelineRun(job, once=True).run()
        with only_one(msgspec.structs.replace(job, name="other")):
            pass
    with only_one(job):  # it isn't left locked
        pass


def test_a_table_of_rows_that_no_pipeline_wrote_is_not_replaced(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    deltalake.write_deltalake(tmp_path / "out", pa.table({"n": [1]}))
    never = LEAST + '[window]\naggregates = ["count(*) AS n"]\n'
    with pytest.raises(SinkError, match="KVSPOOL_SINK_TAKEN.* has rows that no pipeline wrote"):
        DeltaSink(job_of(never, tmp_path)).check_mode()
    DeltaSink(job_of(LEAST, tmp_path)).check_mode()


def test_without_the_package_of_delta_tables_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(MissingExtra, match="The extra tables has it: pip install"):
        open_sink(job_of(LEAST, tmp_path))


def test_status_of_a_job_that_has_not_run(tmp_path: Path, run: Run) -> None:
    (tmp_path / "late.toml").write_text(LEAST)
    assert "has not run yet" in run("pipeline", "status", tmp_path / "late.toml").err
    assert run("pipeline", "status", tmp_path / "late.toml", "--json").object == {"name": "late", "state": "new", "silent": False}


# The cause of a failure.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[STREAM_FAILED] Query x\n  File a\nhub.x.DataLossError: [KVSPOOL_DATA_LOSS] topic JFK, partition 0: gone\n\tat org.x",
            "[KVSPOOL_DATA_LOSS] topic",
        ),
        ("[STREAM_FAILED] Query\n[PYTHON_EXCEPTION] Traceback:\n  File\nValueError: it is odd\n\tat java", "ValueError: it is odd"),
        ("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column named `x`. SQLSTATE: 42703;\n'Project", "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A"),
        (
            "[STREAM_FAILED] Query\nTraceback:\npy4j.protocol.Py4JJavaError: An error occurred while calling o1.save.\n"
            ": java.lang.NoSuchMethodError: 'void org.X'\n\tat x",
            "java.lang.NoSuchMethodError: 'void org.X",
        ),
        (
            "[STREAM_FAILED] Query\n: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed.\n\tat x\n"
            "Caused by: java.io.IOException: Mkdirs failed to create c=A\n\tat x\nCaused by: py4j.Py4JException: Python Proxy\n",
            "java.io.IOException: Mkdirs failed to create c=A",
        ),
        ("just words\nand more", "just words"),
    ],
)
def test_the_cause_comes_first(text: str, words: str) -> None:
    assert cause(RuntimeError(text)).startswith(words)
    assert "\n" not in cause(RuntimeError(text))


def test_the_cause_is_looked_for_in_the_trace_that_spark_does_not_print() -> None:
    error = RuntimeError("[STREAM_FAILED] Query x terminated with exception: Exception thrown in awaitResult:")
    error._stackTrace = (  # type: ignore[attr-defined]
        "org.x.StreamingQueryException: Exception thrown in awaitResult:\nCaused by: org.apache.spark.SparkException: Exception thrown in "
        "awaitResult:\n\tat x\nCaused by: org.x.state.ValidationFailed: [STATE_STORE_VALIDATION_FAILED] batch 1.\nExpected 2\n"
    )
    assert cause(error) == "[STATE_STORE_VALIDATION_FAILED] batch 1."
