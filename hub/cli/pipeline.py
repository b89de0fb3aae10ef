"""`kvspool pipeline`: declared jobs, from logs through Spark to tables. Spark is imported when a job runs, not before."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.cli import signals
from kvspool import system
from kvspool.cli import options, output
from kvspool.cli.progress import reported
from kvspool.cli.stats import when

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from hub.pipeline.job import Job
    from hub.root.pipeline_progress import PipelineProgress

EXTRA = "spark"

_SECRET = re.compile(r"secret|password|token|credential|access.?key", re.IGNORECASE)

DESCRIPTION = """\
A pipeline is a job declared in a TOML file: the records to read from a log, a shard set, a hub root or hub servers, how to decode them,
what Spark SQL selects and aggregates, and the destination of the rows. It runs as one streaming query with exactly-once results: after a
crash at any moment and a restart, each record has had its effect once.

  [source]  path = "hub"                                a log, a shard set, a hub root; or hub = "grpc+tls://h1:7070",
                                                      or hubs with the same clients: "grpc+tls://h1:7070|grpc+tls://h2:7070"
  [decode]  codec = "json"                              json, msgpack, keyed, text, raw
            schema = "carrier string, dep_delay int"    or "infer"
  [select]  where = "dep_delay > 0"                     Spark SQL
  [sink]    path = "late"                               a Delta table

docs/pipeline.md has every key. It needs the extra spark, and Java 17 or newer."""
EXAMPLES = """\
  kvspool pipeline infer late.toml           infer a schema from the first records, for the file
  kvspool pipeline check late.toml           show what it will do, or its mistakes, without Spark
  kvspool pipeline run late.toml             run until Ctrl-C
  kvspool pipeline run late.toml --once      process the available records, then end
  kvspool pipeline status late.toml          show its progress, from anywhere on this host"""

RUN = """\
Run a job until Ctrl-C or SIGTERM, which let the current batch end. Each batch's rows and its number become visible in one step. Records
that can't be decoded go to the folder of bad records, with the reason, and are counted. If the query fails, its cause is printed in one
sentence, with the name of the log file that has Spark's own output.

With --json each batch, and each change of the pipeline's state, is a line, in the form of kvspool pipeline status."""
RUN_EXAMPLES = """\
  kvspool pipeline run late.toml
  kvspool pipeline run late.toml --once --json | jq '{batch, records, lag}'
  kvspool pipeline run late.toml --checkpoint /data/checkpoints/late"""
CHECK = """\
Read a job file, and report its mistakes or what it will do. Nothing is started, and only the file is opened. Expressions in Spark SQL are
not checked, because that takes Spark."""
INFER = """\
Read the first records of a job's source, and print a schema for them, for [decode] schema in the file. Whole numbers become bigint; text
stays text. A job with schema = "infer" does the same when it first runs, and keeps the schema afterwards."""
COMPACT = """\
Combine the small files of a job's table into large ones, while readers read and the pipeline runs. A pipeline with [compact] does so
automatically; this command combines all small files."""
STATUS = """\
Show the progress of a pipeline: records read and left, also of each shard, the times of the last batch, and the last update. The exit code
is 1 if the pipeline has failed, or should be running but sends no updates.

With --json it is one object. Times in it are ns since 1970, durations ms; batch and lag are -1 if unknown. A job that has not run yet has
the state "new"."""


def add_commands(subparsers: Any) -> None:
    """Add `kvspool pipeline` and its commands."""
    commands = options.add_group(subparsers, "pipeline", "run declared jobs with Spark", DESCRIPTION, EXAMPLES)

    run = _add(commands, "run", "run a job", RUN, RUN_EXAMPLES, _run)
    run.add_argument("--once", action="store_true", help="end when all available records are read")
    run.add_argument("--checkpoint", type=Path, metavar="DIR", help="Spark's checkpoint, instead of [sink] checkpoint")
    options.add_json(run, "print a JSON object for each batch")
    check = _add(commands, "check", "check a job file, without Spark", CHECK, "  kvspool pipeline check late.toml", _check)
    options.add_json(check, "print the job as a JSON object")
    infer = _add(commands, "infer", "print a schema from a sample", INFER, "  kvspool pipeline infer late.toml", _infer)
    options.add_json(infer, "print schema and notes as a JSON object")
    compact = _add(commands, "compact", "combine small files", COMPACT, "  kvspool pipeline compact late.toml", _compact)
    options.add_json(compact, "print the numbers of files before and after as a JSON object")
    status = _add(commands, "status", "show the progress of a job", STATUS, "  kvspool pipeline status late.toml --json | jq .lag", _status)
    options.add_json(status, "print a JSON object")


def _add(commands: Any, name: str, summary: str, description: str, examples: str, run: Callable[[argparse.Namespace], int]) -> Any:
    parser = options.add_command(commands, name, summary, description, examples)
    parser.add_argument("job", metavar="JOB.toml", type=Path, help="the job file")
    parser.set_defaults(run=run)
    return parser


def _load(arguments: argparse.Namespace) -> Job:
    from hub.pipeline.job import load

    return load(arguments.job)


# run


def _run(arguments: argparse.Namespace) -> int:
    """Run the job until it ends, or until a signal."""
    import msgspec

    job = _load(arguments)
    if arguments.checkpoint is not None:
        job = msgspec.structs.replace(job, sink=msgspec.structs.replace(job.sink, checkpoint=str(arguments.checkpoint.absolute())))
    from hub.pipeline.errors import PipelineFailed
    from hub.pipeline.run import PipelineRun

    warnings.filterwarnings("ignore", ".*pandas", FutureWarning)  # PySpark warns about a package that is not used here
    state = attrgetter("state", "batch") if arguments.json else attrgetter("state")
    with reported(f"{job.name}: starting Spark", _sentence, is_json=arguments.json, state=state) as report:
        running = PipelineRun(job, once=arguments.once, report=report)
        try:
            with signals.stopping(running.stop):
                done = running.run()
        except PipelineFailed:
            output.complain(f"{job.name} has failed; the cause is below, and Spark's own output is in {running.log}")
            raise
    if sys.stderr.isatty() and not arguments.json:
        print(output.escape(_sentence(done)), file=sys.stderr)
    return 0


def _sentence(progress: PipelineProgress) -> str:
    """Return the progress in a line."""
    words = [f"{progress.name}: {progress.state}"]
    if progress.batch >= 0:
        took = progress.durations.get("triggerExecution", 0) / 1000
        words.append(f"batch {progress.batch:,} of {output.counted(progress.batch_records, 'record')} in {took:.2f} s")
        words.append(f"{progress.rate:,.0f} records/s")
    words.append(f"{progress.records:,} read")
    if progress.lag >= 0:
        words.append(f"a lag of {progress.lag:,}")
    if progress.bad:
        words.append(f"{progress.bad:,} bad")
    if progress.late:
        words.append(f"{progress.late:,} late")
    if progress.away:
        words.append(f"without {' and '.join(progress.away)}")
    return ", ".join(words)


# check, infer, compact


def _check(arguments: argparse.Namespace) -> int:
    """Show what a job will do."""
    job = _load(arguments)
    _check_source(job)
    if arguments.json:
        output.print_json(_job_members(job))
        return 0
    for line in _plan(job):
        print(output.escape(line))
    return 0


def _job_members(job: Job) -> dict[str, Any]:
    import msgspec

    members: dict[str, Any] = msgspec.to_builtins(job, enc_hook=str)
    members["source"] = _public(job.source.options)
    members["sink"]["options"] = _public(job.sink.options)
    members["spark"]["conf"] = _public(job.spark.conf)
    return {**members, "mode": job.mode, "checkpoint": job.checkpoint, "bad_path": str(job.bad_path)}


def _check_source(job: Job) -> None:
    """Check the options of the source, without opening anything."""
    from hub.pipeline.errors import JobError
    from hub.pipeline.job import source_options
    from hub.spark.options import ReadOptions

    try:
        ReadOptions.parse(source_options(job)).for_stream()
    except ValueError as error:
        raise JobError(f"{job.path}: [source] {error}") from None


def _plan(job: Job) -> Iterator[str]:
    """Yield lines that describe a job."""
    yield f"{job.name}: {job.path}"
    yield "  reads      " + ", ".join(f"{name} {value}" for name, value in _public(job.source.options).items())
    yield f"  decodes    {job.decode.codec}" + (f" to {job.decode.schema}" if job.decode.schema else "")
    bad = "ends the query" if job.decode.bad == "fail" else f"goes to {job.bad_path}"
    yield f"  bad record {bad}"
    if job.select is not None:
        yield "  selects    " + ", ".join(job.select.columns) + (f" where {job.select.where}" if job.select.where else "")
    if job.watermark is not None:
        yield f"  waits      {job.watermark.delay} for late records, by {job.watermark.column}"
    if job.window is not None:
        slide = f" every {job.window.slide}" if job.window.slide else ""
        span = f" of {job.window.size}{slide}" if job.window.size else " over all time"
        group = f" by {', '.join(job.window.group)}" if job.window.group else ""
        yield f"  aggregates {', '.join(job.window.aggregates)}{group}{span}"
    how = {"append": "adds to", "complete": "replaces", "merge": "merges"}[job.mode]
    yield f"  {how:<10} {job.sink.format} at {job.sink.path}" + (
        f", partitioned by {', '.join(job.sink.partition_by)}" if job.sink.partition_by else ""
    )
    yield f"  batches    {'one run over the available records' if job.interval is None else f'every {job.sink.trigger}'}"
    yield f"  checkpoint {job.checkpoint}"
    if job.compact is not None:
        rules = job.compact
        yield f"  compacts   {rules.files} files of one magnitude up to {rules.target}"


def _public(settings: dict[str, str]) -> dict[str, str]:
    """Return options without secrets; `tokenFile` is only the path of a secret."""
    return {name: "(hidden)" if _SECRET.search(name) and name.lower() != "tokenfile" else value for name, value in settings.items()}


def _infer(arguments: argparse.Namespace) -> int:
    """Print a schema."""
    from hub.pipeline.sample import infer_job

    found = infer_job(_load(arguments))
    if arguments.json:
        output.print_json({"schema": found.ddl, "records": found.records, "notes": found.notes})
        return 0
    for note in found.notes:
        output.complain(note)
    print(output.escape(f'schema = "{_toml(found.ddl)}"'))
    return 0


def _toml(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _compact(arguments: argparse.Namespace) -> int:
    """Combine small files."""
    from hub.pipeline.errors import JobError
    from hub.pipeline.job import Compact
    from hub.pipeline.sinks import compact
    from hub.tables.delta import Table
    from hub.tables.place import TablePlace

    job = _load(arguments)
    if job.sink.format != "delta":
        raise JobError(f"{job.path}: [sink] format {job.sink.format} is not compacted here")
    table = Table(TablePlace.of(job.sink.path, job.sink.options))
    before, after = compact(table, job.compact or Compact(), everything=True)
    files = table.info().files
    if arguments.json:
        output.print_json({"before": before, "after": after, "files": files})
    else:
        print(output.escape(f"{output.counted(before, 'file')} became {after:,}; {job.sink.path} has {files:,}"))
    return 0


# status


def _status(arguments: argparse.Namespace) -> int:
    """Show the progress of a pipeline."""
    from hub.pipeline.errors import SinkError
    from hub.root import pipeline_progress as progresses

    job = _load(arguments)
    path = job.state / "progress.json"
    try:
        found = progresses.read(path)
    except FileNotFoundError:
        if arguments.json:
            output.print_json({"name": job.name, "state": "new", "silent": False})
        else:
            print(output.escape(f"{job.name} has not run yet"), file=sys.stderr)
        return 0
    except ValueError as error:
        raise SinkError(f"{path} has no valid progress: {error}") from None
    is_silent = found.is_silent(system.port.now())
    if arguments.json:
        output.print_json({**_members(found), "silent": is_silent})
    else:
        _show(found, is_silent)
    return 1 if is_silent or found.state == "failed" else 0


def _members(progress: PipelineProgress) -> dict[str, Any]:
    import msgspec

    members: dict[str, Any] = msgspec.to_builtins(progress)
    return members


def _show(progress: PipelineProgress, is_silent: bool) -> None:
    print(output.escape(_sentence(progress)))
    said = "no update since" if is_silent else "last update"
    print(output.escape(f"  {said} {when(progress.updated)}, started {when(progress.started)}, process {progress.pid}"))
    if progress.durations:
        print(output.escape("  last batch: " + ", ".join(f"{name} {value} ms" for name, value in progress.durations.items())))
    for location, why in progress.away.items():
        print(output.escape(f"  {location}: {why}"))
    if progress.error:
        print(output.escape(f"  {progress.error}"))
    if progress.shards:
        output.print_table(_shards(progress))


def _shards(progress: PipelineProgress) -> RichTable:
    rows = []
    for shard in progress.shards:
        known = [f"{shard.end:,}", f"{shard.lag:,}"] if shard.lag >= 0 else ["-", "-"]
        rows.append([shard.topic, str(shard.partition), f"{shard.next:,}", *known])
    numbers = ("partition", "next", "end", "behind")
    return output.rows(("topic", *numbers), rows, numbers)
