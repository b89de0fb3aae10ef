"""Keep a Delta table up to date from logs, without Spark, each record once.

    from hub.pipeline.appender import AppendSource, TableAppender

    with TableAppender(AppendSource(Path("hub")), "flights", codec="json", schema="carrier string, dep_delay int") as appender:
        appender.run(once=True)

**Exactly once.** Each commit has rows, and the next sequence of each shard as an application transaction whose name has the log's id. The
table is the truth: an appender continues after what is in it, whatever was killed when. Two appenders of one table and source are safe; the
second one finds itself overtaken, and continues after the first one's rows.

**Retention.** A durable reader, or a group, holds back records that are not in the table yet. It moves after the commit, and at the start.
Otherwise an appender that was killed between the two could leave a writer that waits for room. Members of a group share the shards. The
table alone decides which records are in it, so a shard that changes its owner is appended once, too.

**Bad records** are in Parquet files next to the table, named after the shard and the first sequence of the commit. A repetition begins at
the same sequence, and replaces the file.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
import pyarrow as pa

from hub.pipeline.decode import RECORD_FIELDS, BadFile, Decoder, Plan
from hub.pipeline.errors import BadRecords, SchemaError
from hub.pipeline.holds import GroupHold, Hold, ReaderHold
from hub.pipeline.infer import infer
from hub.pipeline.job import CODECS, ONE_COLUMN, RECORD_TIME, Codec
from hub.pipeline.sample import first_values, plain_decoder
from hub.pipeline.schema import INFER, SchemaField, ddl, parse_schema
from hub.spark.errors import DataLossError
from hub.spark.local import LocalRange, LocalShards
from hub.spark.selection import ALL, Selection
from hub.spark.shards import Extent, ShardKey
from hub.tables.delta import PROPERTY, Change, Table, exists, retention
from hub.tables.errors import Overtaken, TableError
from hub.tables.files import DataFile, FileWriter, remove_files
from hub.tables.place import TablePlace
from kvspool import Gap, arrow, system
from kvspool.system.handles import ClosingHandle

EVERY = 5.0  # seconds between two commits of a follower, at least
ROWS = 2_000_000  # records of a commit, at most
LOOK = 0.05  # seconds between two looks of a waiting follower
THREADS = 2  # that read, decode and write files; Arrow and the loops of logs work without Python's lock
LEAST = 50_000  # records of a thread
SAMPLE = 1000  # records that a schema is inferred from
SCHEMA = "kvspool.schema"  # the property of the table with the schema of the values
LEFT_OUT = ("machine restart", "missing")  # reasons of Gaps that never had a record in the log
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class AppendSource(msgspec.Struct, frozen=True):
    """Logs of this host: one log, a shard set, or a hub root. topics: only these of a root."""

    path: Path
    topics: tuple[str, ...] = ()

    @property
    def selection(self) -> Selection:
        """The selected shards."""
        return Selection(topics=frozenset(self.topics)) if self.topics else ALL


class AppendProgress(msgspec.Struct, frozen=True):
    """The work of an appender since it was started.

    lag: records that are not in the table yet; for a member of a group, those of its shards. rate: records a second in the last commit.
    seconds: time of all commits, without waits.
    """

    version: int
    records: int = 0
    rows: int = 0
    bad: int = 0
    lost: int = 0
    commits: int = 0
    lag: int = 0
    rate: float = 0.0
    seconds: float = 0.0


class Backlog(NamedTuple):
    """A shard to append. at: the sequence up to which the table has it, None before its first commit."""

    extent: Extent
    at: int | None

    @property
    def first(self) -> int:
        """The first record that exists and is not in the table."""
        return max(self.extent.first, self.at or 0)

    @property
    def waiting(self) -> int:
        """The number of such records."""
        return self.extent.end - self.first


Report = Callable[[AppendProgress], None]
Span = tuple[ShardKey, int, int]  # the sequences first..end-1 of a shard


class TableAppender(ClosingHandle):
    """Appends the records of logs to a table. Use it in one thread; `stop` may be called from a signal handler."""

    def __init__(
        self,
        source: AppendSource,
        target: TablePlace | str,
        *,
        codec: Codec = "json",
        schema: str = "",
        time: str = RECORD_TIME,
        name: str = "table",
        group: str = "",
        partition_by: Iterable[str] = (),
        evolve: bool = False,
        keep_bad: bool = True,
        fail_on_data_loss: bool = True,
        rows: int = ROWS,
        hours: int = 24,
    ) -> None:
        """Open the source and the table, which is created if it is missing.

        codec, schema, time: as in [decode] of a pipeline; "" takes the schema that the table was created with, "infer" a sample's. name:
        of the durable reader; "" for none. group: instead of a reader, the name of a group whose members share the shards. keep_bad:
        undecodable records go to files next to the table; False: they are an error. rows: records of a commit at most. hours: how long a
        new table keeps files of old versions. Raises the errors of opening logs and tables, and of `group` of a log.
        """
        self.place = target if isinstance(target, TablePlace) else TablePlace.of(target)
        if codec not in CODECS:
            raise ValueError(f"codec is {', '.join(CODECS)}, not {codec!r}")
        if group and source.topics:
            raise ValueError(f"the group {group!r} shares all shards of {source.path}: leave out the topics, or use a durable reader")
        name = group or name
        if name and not _NAME.fullmatch(name):
            raise ValueError(f"the name of a reader or a group has up to 64 letters, digits, _, - and ., not {name!r}")
        if keep_bad and self.place.local is None:
            raise ValueError("undecodable records can't be kept next to a table on an object store; let them be errors")
        self._source, self._rows, self._name = source, rows, name
        self._keep_bad, self._fails = keep_bad, fail_on_data_loss
        self._stop = threading.Event()
        self.shards = LocalShards(source.path, source.selection, reader=None if group else name or None)
        self._keys: set[ShardKey] = set()  # the shards of the last look
        self._held: dict[ShardKey, int] = {}  # the positions that the logs know from us
        self._hold: Hold = ReaderHold(self.shards)
        try:
            if group:
                self._hold = GroupHold(source.path, self.shards, group)
            fields = () if codec in ONE_COLUMN else self._fields(codec, schema)
            bad = "" if self.place.local is None else f"{self.place.uri}_bad"
            self.plan = Plan(codec, fields, time, bad, not keep_bad, name or "table", folders=tuple(partition_by))
            columns = pa.schema([pa.field(field.name, field.kind.arrow) for field in self.plan.columns])
            self._schema = columns
            self._by = tuple(partition_by)
            properties = {SCHEMA: ddl(fields)}
            if not exists(self.place):
                properties |= {PROPERTY: "append", **retention(hours)}
            self.table = Table.make(self.place, columns, partition_by=self._by, evolve=evolve, properties=properties)
            if self.table.properties.get(PROPERTY, "append") != "append":
                raise TableError(f"[KVSPOOL_SINK_OF_ANOTHER_MODE] {self.place.uri} is written by a pipeline that replaces or merges rows")
        except BaseException:
            self._hold.close()
            self.shards.close()
            raise
        self._lock = threading.Lock()  # of the files of bad records and the progress
        self._is_failing = False  # a thread of the current step has failed
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvspool-table")
        self.progress = AppendProgress(self.table.version)

    def _fields(self, codec: str, schema: str) -> tuple[SchemaField, ...]:
        """Return the fields to decode to."""
        stored = Table(self.place).properties.get(SCHEMA, "") if exists(self.place) else ""
        if schema == INFER and not stored:
            return infer(first_values(self.shards, SAMPLE), plain_decoder(codec)).fields
        text = stored if schema in ("", INFER) else schema
        if not text:
            raise SchemaError(f'{self.place.uri} is new, and codec {codec} needs a schema, such as "carrier string, dep_delay int"')
        return parse_schema(text)

    # Work.

    def run(self, *, once: bool = False, every: float = EVERY, report: Report = lambda progress: None) -> AppendProgress:
        """Append until all present records are in the table (`once`), or until `stop`. Return the final progress.

        Of a group, the records are those of the shards that this member owns. every: seconds between two commits of a follower, unless
        `rows` records wait. Raises DataLossError, BadRecords, TableError, and the errors of reading; committed rows stay.
        """
        last = -float("inf")
        while not self._stop.is_set():
            backlogs = self._look()
            self._keep_up(backlogs)
            waiting = lag_of(backlogs)
            is_due = system.port.monotonic() - last >= every or waiting >= self._rows
            if waiting and (once or is_due):
                last = system.port.monotonic()
                self.step()
                report(self.progress)
            elif once:
                break
            else:
                self._stop.wait(LOOK)
        return self.progress

    def stop(self) -> None:
        """Make `run` return after the current commit."""
        self._stop.set()

    def step(self) -> int:
        """Commit up to `rows` records; return how many. Raises as `run`."""
        began = time.monotonic()
        self.table.refresh()
        backlogs = self._look()
        spans = self._spans(backlogs)
        if not spans:
            return 0
        changes = {app_of(key, backlogs[key].extent): Change(backlogs[key].at, end) for key, (_, end) in spans.items()}
        done = sum(end - first for first, end in spans.values())
        files, bad = self._written(spans)
        rows = sum(file.rows for file in files)
        try:
            version = self.table.commit(files, changes, note={"by": self._name or "table", "batch": self.table.version + 1})
        except Overtaken:  # another appender has committed these records; the next step continues after them
            return 0  # the files stay for `vacuum`: our own commit may have them, if only its result was lost
        backlogs = self._look()
        self._keep_up(backlogs)
        was = self.progress
        seconds = max(1e-6, time.monotonic() - began)
        self.progress = AppendProgress(
            version=version,
            records=was.records + done,
            rows=was.rows + rows,
            bad=was.bad + bad,
            lost=was.lost,
            commits=was.commits + 1,
            lag=lag_of(backlogs),
            rate=done / seconds,
            seconds=was.seconds + seconds,
        )
        return done

    def _look(self) -> dict[ShardKey, Backlog]:
        """Return the shards to append. Raises DataLossError for a log that ends before the table's position.

        Its next records would otherwise be left out silently, up to that position.
        """
        self._hold.attend()
        extents = self._extents()
        if extents.keys() != self._keys:  # a new shard may be that of another appender, whose commits we have not seen
            self.table.refresh()
            self._keys, extents = set(extents), self._extents()  # looked at after the table, which is never ahead of a log
        backlogs = {}
        for key, extent in extents.items():
            one = backlogs[key] = Backlog(extent, self.table.last(app_of(key, extent)))
            if one.waiting < 0:
                raise DataLossError(
                    f"[KVSPOOL_OFFSET_CHANGED] topic {key.topic!r}, partition {key.partition}: the table has the records before {one.at}, "
                    f"but the log ends at {extent.end}: it was restored or replaced; move the table away to start again"
                )
        return backlogs

    def _extents(self) -> dict[ShardKey, Extent]:
        """Return the extents of the shards that this process is to append."""
        return {key: extent for key, extent in self.shards.look().items() if self._hold.owns(key)}

    def _keep_up(self, backlogs: Mapping[ShardKey, Backlog]) -> None:
        """Let the logs know how far the table is, where they don't yet."""
        ends = {key: one.at for key, one in backlogs.items() if one.at is not None}
        if ends != self._held and self._hold.commit(ends):
            self._held = ends

    def _spans(self, backlogs: Mapping[ShardKey, Backlog]) -> dict[ShardKey, tuple[int, int]]:
        """Return the sequences of the next commit in each shard: a share of every one. Raises DataLossError."""
        for key, one in backlogs.items():
            if one.at is not None and one.at < one.first:
                self._lose(key, Gap(one.at, one.first - 1, "removed"))
        total = lag_of(backlogs)
        share = min(1.0, self._rows / total) if total else 0.0
        return {key: (one.first, one.first + max(1, int(one.waiting * share))) for key, one in backlogs.items() if one.waiting}

    def _written(self, spans: dict[ShardKey, tuple[int, int]]) -> tuple[list[DataFile], int]:
        """Write the rows of some records, in several threads; return the files, on disk, and the number of bad records."""
        name = f"part-{self._name or 'table'}-{system.port.random(4).hex()}"
        with ExitStack() as stack:
            kept = {key: stack.enter_context(self._bad_file(key, first)) for key, (first, _) in spans.items()} if self._keep_bad else {}
            parts = [[self.shards.range(*span) for span in part] for part in divided(spans, THREADS)]
            futures = [self._pool.submit(self._write, part, kept, f"{name}-{number}") for number, part in enumerate(parts)]
            try:
                done = [future.result() for future in futures]
            except BaseException:
                self._is_failing = True
                wait(futures)
                remove_files(self.place, (file for future in futures if future.exception() is None for file in future.result()[0]))
                raise
            finally:
                self._is_failing = False
        return [file for files, _ in done for file in files], sum(bad for _, bad in done)

    def _bad_file(self, key: ShardKey, first: int) -> BadFile:
        name = f"{self._name or 'table'}.{quote(key.topic, safe='')}-{key.partition}-{first:020}.parquet"
        return BadFile(Path(self.plan.bad) / name)

    def _write(self, ranges: list[LocalRange], kept: Mapping[ShardKey, BadFile], name: str) -> tuple[list[DataFile], int]:
        """Write the rows of one thread's records; return the files and the number of bad records."""
        decoder, count = Decoder(self.plan), 0
        with FileWriter(self.place, self._schema, self._by, name) as writer:
            for one in ranges:
                for batch in one.batches(arrow.BATCH):
                    if self._is_failing:
                        raise InterruptedError("another thread has failed")
                    if isinstance(batch, Gap):
                        self._lose(one.key, batch)
                        continue
                    good, bad = decoder.split(with_origin(batch, one.key))
                    if bad.num_rows:
                        self._refuse(bad)
                        with self._lock:
                            kept[one.key].add(bad)
                        count += bad.num_rows
                    writer.write(good)
            return writer.close(), count

    def _refuse(self, bad: pa.RecordBatch) -> None:
        if not self._keep_bad:
            first = {name: bad.column(name)[0].as_py() for name in ("topic", "partition", "offset", "reason")}
            raise BadRecords(
                f"[KVSPOOL_BAD_RECORD] topic {first['topic']}, partition {first['partition']}, offset {first['offset']}: {first['reason']}"
            )

    def _lose(self, key: ShardKey, gap: Gap) -> None:
        """Count lost records, or raise DataLossError."""
        if gap.reason in LEFT_OUT:
            return
        if self._fails:
            raise DataLossError(
                f"[KVSPOOL_DATA_LOSS] topic {key.topic!r}, partition {key.partition}: {gap}. Allow losses to continue without them. A "
                "larger capacity, or retention that waits for the durable reader, keeps records longer"
            )
        with self._lock:
            self.progress = msgspec.structs.replace(self.progress, lost=self.progress.lost + gap.count)

    def close(self) -> None:
        """Close the logs. Rows of an unfinished step are not in the table."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        try:
            self._hold.close()
        finally:
            self.shards.close()


def lag_of(backlogs: Mapping[ShardKey, Backlog]) -> int:
    """Return how many records are not in the table."""
    return sum(one.waiting for one in backlogs.values())


def divided(spans: Mapping[ShardKey, tuple[int, int]], most: int) -> list[list[Span]]:
    """Divide sequences into up to `most` parts of about the same number of records, at least `LEAST` if possible."""
    total = sum(end - first for first, end in spans.values())
    share = max(-(-total // most), LEAST)
    parts: list[list[Span]] = []
    left = 0
    for key, (first, end) in spans.items():
        while first < end:
            if not left:
                parts.append([])
                left = share
            until = min(end, first + left)
            parts[-1].append((key, first, until))
            left -= until - first
            first = until
    return parts


def app_of(key: ShardKey, extent: Extent) -> str:
    """Return the name of the application transaction with the next sequence of a shard."""
    return f"kvspool/{extent.log_id or 'log'}/{key.topic}/{key.partition}"


def with_origin(batch: pa.RecordBatch, key: ShardKey) -> pa.RecordBatch:
    """Return a batch of a log with the columns that the decoder expects: those of `format("kvspool")`."""
    count = batch.num_rows
    same = {"topic": pa.scalar(key.topic, pa.string()), "partition": pa.scalar(key.partition, pa.int32())}
    made = {name: pa.repeat(value, count) for name, value in same.items()}
    names = [field.name for field in RECORD_FIELDS]
    columns = [made[name] if name in made else batch.column("sequence" if name == "offset" else name) for name in names]
    return pa.RecordBatch.from_arrays([*columns, batch.column("value")], names=[*names, "value"])
