"""A running pipeline: one query of Spark, watched by the process that started it.

**Stopping.** `stop` lets the current batch end. A process that is killed during one leaves the state after the last commit; the next run
repeats the batch with the same records.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hub.pipeline import failures, query, session
from hub.pipeline.decode import clear_bad, count_bad
from hub.pipeline.errors import PipelineFailed, PipelineRuns, SchemaError
from hub.pipeline.job import Job, check_time
from hub.pipeline.lateness import late_of
from hub.pipeline.schema import SchemaField, ddl, parse_schema
from hub.pipeline.sinks import Sink, open_sink
from hub.root import pipeline_progress as progresses
from hub.root.pipeline_progress import PipelineProgress, ShardProgress
from hub.tables.place import make_folders
from kvspool import system
from kvspool.errors import KvspoolError
from kvspool.opening import logs
from kvspool.system import disk, documents
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOOK = 0.25  # seconds between two checks of the query
SAY = 1.0  # seconds between two updates of the progress files
PATIENCE = 60.0  # seconds that a stop waits for the current batch
OUTPUT = {"append": "append", "complete": "complete", "merge": "update"}  # Spark's names of the modes
LONGEST_SCHEMA = 1 << 20  # bytes of the file next to the checkpoint

Report = Callable[[PipelineProgress], None]


class PipelineRun(Handle):
    """One run of a job. Call `run` once; `stop` may be called from a signal handler."""

    def __init__(self, job: Job, *, once: bool = False, report: Report = lambda progress: None) -> None:
        """Store the job. once: end after all available records. report: called with the progress."""
        self.job = job
        self.log = job.state / "spark.log"
        self._is_once = once or job.interval is None
        self._report = report
        self._stop = threading.Event()
        self._started = threading.Event()  # the query has an id, or could not start
        self._query: StreamingQuery | None = None
        now = system.port.now()
        self._progress = PipelineProgress(
            name=job.name, job=str(job.path), sink=job.sink.path, state="starting", pid=os.getpid(), started=now, updated=now
        )
        self._said_at = 0.0
        self._taken: set[tuple[int, str]] = set()  # batch and time of the reports at the last check

    def stop(self) -> None:
        """Make `run` return after the current batch."""
        self._stop.set()

    def run(self, spark: SparkSession | None = None) -> PipelineProgress:
        """Run until all records are read (`once`), or until `stop`. Return the final progress.

        spark: a session to use; it is not stopped, and the settings of `session.RUNTIME` are set in it. Without one a session is started
        and stopped. Raises PipelineFailed, and the errors of opening the source, the sink and the schema; committed batches stay.
        """
        with ExitStack() as stack:
            stack.enter_context(only_one(self.job))
            sink = open_sink(self.job)
            self._say()
            try:
                fields = pinned_fields(self.job)
                if spark is None:
                    spark = self._session()
                    stack.callback(_end_session, spark)
                self._start(spark, sink, fields)
                self._watch()
            except BaseException as error:
                self._note(state="failed", error=failures.cause(error))
                raise
            self._note(state="stopped" if self._stop.is_set() else "done")
        return self._progress

    # The query.

    def _session(self) -> SparkSession:
        try:
            return session.start(self.job, self.log)
        except KvspoolError:  # for example, Spark is missing, and its error classes too
            raise
        except failures.of_spark() as error:
            raise self._failed(error) from error

    def _start(self, spark: SparkSession, sink: Sink, fields: tuple[SchemaField, ...]) -> None:
        job = self.job
        try:
            for name, value in session.RUNTIME.items():
                spark.conf.set(name, value)
            rows = query.rows(job, fields, query.stream(job, spark))
            writer = sink.attach(rows, self._id, self._clear_bad)
            writer = writer.outputMode(OUTPUT[job.mode]).queryName(job.name).option("checkpointLocation", job.checkpoint)
            interval = job.interval or 0.0
            if self._is_once:
                writer = writer.trigger(availableNow=True)
            else:
                writer = writer.trigger(processingTime=f"{round(interval * 1000)} milliseconds")
            self._query = writer.start()
        except failures.of_spark() as error:
            raise self._failed(error) from error
        finally:
            self._started.set()  # also if it did not start: the thread of a first batch must not wait forever
        self._note(state="running")

    def _failed(self, error: Exception) -> PipelineFailed:
        """Return the exception to raise for an error of Spark."""
        if failures.is_gone(error):
            return PipelineFailed(f"Spark's JVM has ended, perhaps killed for lack of memory; its last output: {self.log}")
        return PipelineFailed(failures.cause(error))

    def _id(self) -> str:
        """Return the query's id, also in the thread of its first batch. Raises PipelineFailed if the query did not start."""
        self._started.wait()
        if self._query is None:
            raise PipelineFailed(f"the query of {self.job.name} did not start")
        return str(self._query.id)

    def _clear_bad(self, batch: int) -> None:
        """Remove the files of an earlier attempt at a batch from the bad folder: with another schema it may have had other tasks."""
        clear_bad(self.job.bad_path, self.job.name, batch)

    def _watch(self) -> None:
        from pyspark.errors import StreamingQueryException

        assert self._query is not None
        try:
            while not self._query.awaitTermination(LOOK):  # type: ignore[arg-type]
                self._look()
                if self._stop.is_set():
                    self._end()
            self._look()
        except StreamingQueryException as error:
            with suppress(*failures.of_spark()):
                self._look()
            raise self._failed(error) from error
        except failures.of_spark() as error:
            raise self._failed(error) from error

    def _end(self) -> None:
        """Stop the query between two batches."""
        assert self._query is not None
        batch, end = self._progress.batch, time.monotonic() + PATIENCE
        while self._query.isActive and self._query.status["isTriggerActive"] and time.monotonic() < end:
            self._look()
            if self._progress.batch != batch:
                break
            time.sleep(LOOK / 10)
        self._query.stop()

    # Progress.

    def _look(self) -> None:
        """Process the query's reports since the last check."""
        assert self._query is not None
        reports = self._query.recentProgress
        new = [one for one in reports if (one.batchId, one.timestamp) not in self._taken]
        self._taken = {(one.batchId, one.timestamp) for one in reports}
        for found in new:
            noted = json.loads(found.json)
            if noted["batchId"] > self._progress.batch or (noted["batchId"] == self._progress.batch and noted["numInputRows"] == 0):
                self._take(noted)
        if time.monotonic() - self._said_at >= SAY:
            self._note()

    def _take(self, noted: dict[str, Any]) -> None:
        is_new = noted["batchId"] > self._progress.batch
        records = int(noted["numInputRows"]) if is_new else 0
        shards = shards_of(noted["sources"][0]) if noted["sources"] else ()
        lags = [shard.lag for shard in shards if shard.lag >= 0]
        changes: dict[str, Any] = {"shards": shards, "lag": sum(lags) if lags else -1, "away": away_of(noted["sources"])}
        if is_new:
            duration = noted.get("durationMs", {})
            changes |= {
                "batch": noted["batchId"],
                "batch_ended": system.port.now(),
                "records": self._progress.records + records,
                "batch_records": records,
                "bad": self._progress.bad + (count_bad(self.job.bad_path, self.job.name, noted["batchId"]) if records else 0),
                "late": self._progress.late + late_of(noted),
                "durations": {name: int(value) for name, value in duration.items()},
            }
            if records:
                changes["rate"] = 1000 * records / max(1, duration.get("triggerExecution", 1))
        self._note(**changes)

    def _note(self, **changes: Any) -> None:
        self._progress = msgspec.structs.replace(self._progress, updated=system.port.now(), **changes)
        self._say()

    def _say(self) -> None:
        """Write the progress. A full disk must not end a query that writes elsewhere."""
        self._said_at = time.monotonic()
        for path in progress_paths(self.job):
            with suppress(OSError):
                progresses.write(path, self._progress)
        self._report(self._progress)


@contextmanager
def only_one(job: Job) -> Iterator[None]:
    """Keep other processes of this host from running the job. Raises PipelineRuns."""
    make_folders(job.state)
    file = Descriptor(job.state / "lock", os.O_RDWR | os.O_CREAT)
    try:
        if not system.port.try_lock_file(file.number, shared=False):
            raise PipelineRuns(f"another process runs {job.name}, with the checkpoint {job.checkpoint}")
        yield
    finally:
        file.close()


def _end_session(spark: SparkSession) -> None:
    """Stop a session, even if its JVM has ended."""
    with suppress(*failures.of_spark()):
        spark.stop()


def progress_paths(job: Job) -> list[Path]:
    """Return the paths of a job's progress: next to the sink, and in the hub root that it reads. Creates the folders."""
    paths = []
    with suppress(OSError):
        job.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.append(job.state / "progress.json")
    root = job.source.root
    if root is not None and root.is_dir() and not _is_one_log(root):
        with suppress(OSError):
            progresses.make_directory(root)
            paths.append(progresses.path_in(root, job.name))
    return paths


def _is_one_log(path: Path) -> bool:
    """Return whether a path has a log of any format: nothing may be created in another program's directory."""
    try:
        return logs.lies_at(path)
    except (KvspoolError, ValueError):  # a journal that can't be read
        return True


def shards_of(source: dict[str, Any]) -> tuple[ShardProgress, ...]:
    """Return the shards in a source's report."""
    from hub.spark import offsets

    try:
        done = offsets.parse(source.get("endOffset") or {}, "the end of the batch").next
        ends = offsets.parse(source.get("latestOffset") or {}, "the latest offsets").next
    except ValueError:
        return ()
    return tuple(ShardProgress(key.topic, key.partition, place, ends.get(key, -1)) for key, place in sorted(done.items()))


def away_of(sources: list[dict[str, Any]]) -> dict[str, str]:
    """Return the hubs that don't answer in the report of the first source, with the reasons."""
    from hub.spark.offsets import AWAY

    latest = sources[0].get("latestOffset") if sources else None
    found = latest.get(AWAY) if isinstance(latest, dict) else None
    return {str(location): str(why) for location, why in found.items()} if isinstance(found, dict) else {}


def pinned_fields(job: Job) -> tuple[SchemaField, ...]:
    """Return the fields to decode to. An inferred schema is stored next to the checkpoint, and doesn't change later.

    Raises SchemaError, JobError if no field has the job's time, and KvspoolError for a source that can't be read.
    """
    if job.fields is not None:
        return job.fields
    path = schema_path(job)
    with suppress(FileNotFoundError):
        fields = _pinned(path)
        check_time(job, fields)
        return fields
    from hub.pipeline.sample import infer_job

    found = infer_job(job)
    check_time(job, found.fields)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk.replace(path, ddl(found.fields).encode(), 0o600)
    return found.fields


def _pinned(path: Path) -> tuple[SchemaField, ...]:
    """Return the stored fields. Raises SchemaError, and the system's OSError."""
    try:
        return parse_schema(documents.text(documents.read(path, LONGEST_SCHEMA)))
    except (ValueError, SchemaError) as error:
        raise SchemaError(f"[KVSPOOL_NO_SCHEMA] {path} holds no schema: {error}; give [decode] schema") from None


def schema_path(job: Job) -> Path:
    """Return the path of an inferred schema."""
    return job.state / "checkpoint.schema"
