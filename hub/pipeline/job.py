"""A declared job: a TOML file, parsed into frozen structs, with errors that name the file, the table and the key.

This module doesn't need Spark, and opens only the file itself. Relative paths in it are relative to its own folder, so that a job does the
same wherever it is started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from hub.pipeline.errors import JobError, SchemaError
from hub.pipeline.schema import INFER, SchemaField, parse_schema
from hub.root.pipeline_progress import NAME
from hub.tables.place import SECRET
from kvspool.engine import sizes
from kvspool.errors import NotAFile
from kvspool.system import documents

Codec = Literal["json", "msgpack", "keyed", "text", "raw"]
CODECS: tuple[str, ...] = get_args(Codec)
ONE_COLUMN = {"text": "text", "raw": "value"}  # codecs without a schema, and the names of their columns
Format = Literal["delta", "iceberg", "parquet", "kvspool"]
OnBad = Literal["keep", "fail"]
Mode = Literal["append", "complete", "merge"]

LARGEST = 1 << 20  # bytes of a job file
DURATION = re.compile(r"(\d+) (millisecond|second|minute|hour|day|week)s?")
_SECONDS = {"millisecond": 0.001, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
AVAILABLE_NOW = "available-now"
PATHS = {"path", "tokenFile", "caFile", "certificateFile", "keyFile"}  # options of the source that are files of this host
STARTS = {"startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"}
TIME = "event_time"  # the column with a record's time
RECORD_TIME = "record.timestamp"  # its default, unless a field has it


class JobSource(msgspec.Struct, frozen=True):
    """The source of records. options: the connector's own, as text, including `path` or `hub`."""

    options: dict[str, str]

    @property
    def root(self) -> Path | None:
        """The local log, shard set or hub root; None for hub servers."""
        return Path(self.options["path"]) if "path" in self.options else None


class Decode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How values are decoded.

    schema: in Spark's notation, or "infer"; sample: records examined for that. time: the record's own timestamp, or a field. bad: the
    handling of records that can't be decoded; bad_path: the folder for them.
    """

    codec: Codec = "json"
    schema: str = ""
    sample: int = 1000
    time: str = RECORD_TIME
    bad: OnBad = "keep"
    bad_path: str = ""


class Select(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spark SQL: the selected rows, and their columns."""

    columns: tuple[str, ...] = ("*",)
    where: str = ""


class Watermark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How late a record may arrive, and how far its time, if it is a field, may be ahead of its timestamp. column: a timestamp."""

    delay: str
    column: str = TIME
    ahead: str = "1 day"


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Aggregates, in Spark SQL; without a size over all time."""

    aggregates: tuple[str, ...]
    group: tuple[str, ...] = ()
    column: str = TIME
    size: str = ""
    slide: str = ""


class JobSink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The destination of rows.

    mode: "complete": each batch replaces all rows; "merge": it replaces those of the same window and group. evolve: whether new columns may
    be added to the table. keep: how long files of replaced versions stay. options: of the format `delta` or `kvspool`.
    """

    path: str
    format: Format = "delta"
    mode: Mode | Literal[""] = ""
    partition_by: tuple[str, ...] = ()
    trigger: str = "10 seconds"
    checkpoint: str = ""
    evolve: bool = False
    keep: str = "1 day"
    options: dict[str, str] = {}


class Compact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When small files of a table are combined. target: size of a file. files: how many of one magnitude are combined."""

    target: str = "128MiB"
    files: int = 8

    @property
    def target_bytes(self) -> int:
        """The size from which a file is large enough."""
        return sizes.parse(self.target)


class Spark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The session. conf: more settings of Spark."""

    master: str = "local[*]"
    memory: str = "1g"
    conf: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A complete job. path: of its file. select, watermark, window, compact: None if the file has no such table."""

    name: str
    path: Path
    source: JobSource
    decode: Decode
    sink: JobSink
    spark: Spark
    select: Select | None = None
    watermark: Watermark | None = None
    window: Window | None = None
    compact: Compact | None = None

    @property
    def fields(self) -> tuple[SchemaField, ...] | None:
        """The fields of the schema; None if it is inferred."""
        return None if self.decode.schema == INFER else parse_schema(self.decode.schema) if self.decode.schema else ()

    @property
    def mode(self) -> Mode:
        """A batch's effect on the sink: aggregates that never close can only be written as a whole."""
        if self.sink.mode:
            return self.sink.mode
        is_closed = self.window is None or bool(self.window.size and self.watermark)
        return "append" if is_closed else "complete"

    @property
    def ahead(self) -> float | None:
        """Seconds that `event_time` may be ahead of a record's timestamp; otherwise it would move the watermark past all others.

        None: it is the timestamp, or moves no watermark.
        """
        if self.watermark is None or self.watermark.column != TIME or self.decode.time == RECORD_TIME:
            return None
        return seconds(self.watermark.ahead)

    @property
    def state(self) -> Path:
        """The folder of the pipeline's own files: next to the sink, or next to the job's file if the sink has a URL.

        A folder of Parquet belongs to one job. Several jobs may write to a log or a Delta table; each has its own folder.
        """
        if "://" in self.sink.path:
            return self.path.parent / f".{self.name}"
        sink = Path(self.sink.path)
        return sink.parent / f".{self._name_at_sink}"

    @property
    def checkpoint(self) -> str:
        """Spark's checkpoint: a path, or a URL."""
        return self.sink.checkpoint or str(self.state / "checkpoint")

    @property
    def bad_path(self) -> Path:
        """The folder for records that can't be decoded."""
        sink = Path(self.sink.path)
        return Path(self.decode.bad_path) if self.decode.bad_path else sink.parent / f"{self._name_at_sink}_bad"

    @property
    def _name_at_sink(self) -> str:
        sink = Path(self.sink.path)
        return sink.name if self.sink.format == "parquet" else f"{sink.name}.{self.name}"

    @property
    def interval(self) -> float | None:
        """Seconds from one batch to the next; None: one run over the available records."""
        return None if self.sink.trigger == AVAILABLE_NOW else seconds(self.sink.trigger)


TABLES: dict[str, type[msgspec.Struct]] = {
    "decode": Decode,
    "select": Select,
    "watermark": Watermark,
    "window": Window,
    "sink": JobSink,
    "compact": Compact,
    "spark": Spark,
}
OPTIONAL = ("select", "watermark", "window", "compact")


def seconds(text: str) -> float:
    """Return a duration written as "10 seconds". Raises ValueError."""
    found = DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f'a duration is written as "10 seconds", "5 minutes" or "1 hour", not {text!r}')
    return int(found[1]) * _SECONDS[found[2]]


def load(path: Path) -> Job:
    """Return the job that a file declares. Raises JobError, and the system's OSError."""
    try:
        data = documents.read(Path(os.path.realpath(path)), LARGEST)
    except (NotAFile, ValueError) as error:
        raise JobError(f"{path}: {error}") from None
    try:
        document = documents.from_toml(data)
    except ValueError as error:
        raise JobError(f"{path}: invalid TOML: {error}") from None
    return parse(document, path.absolute())


def parse(document: Mapping[str, Any], path: Path) -> Job:
    """Return the job that a document declares; path: the absolute path of its file. Raises JobError."""
    unknown = sorted(set(document) - {"name", "source", *TABLES})
    if unknown:
        raise JobError(f"{path}: there is no [{unknown[0]}]; a job has name, [source], {', '.join(f'[{name}]' for name in TABLES)}")
    missing = [name for name in ("source", "sink") if name not in document]
    if missing:
        raise JobError(f"{path}: [{missing[0]}] is missing")
    tables: dict[str, Any] = {name: _table(document, name, kind, path) for name, kind in TABLES.items()}
    name = document.get("name", path.stem)
    job = Job(name=name, path=path, source=_source(document["source"], path), **{**tables, "sink": _sink(tables["sink"], path)})
    job = msgspec.structs.replace(job, decode=_decode(job.decode, path))
    _check(job)
    return job


def source_options(job: Job) -> dict[str, str]:
    """Return the options of the source; by default a pipeline reads from the earliest records."""
    options = job.source.options
    begins = not STARTS.isdisjoint(name.lower() for name in options)
    return dict(options) if begins else {**options, "startingOffsets": "earliest"}


def check_time(job: Job, fields: tuple[SchemaField, ...]) -> None:
    """Raise JobError if the field for the time of a record isn't a timestamp among these fields, given or inferred."""
    time = job.decode.time
    kinds = {field.name: field.kind.ddl for field in fields}
    if time == RECORD_TIME or kinds.get(time) == "timestamp":
        return
    has = f"is {kinds[time]}" if time in kinds else "is no field"
    advice = f"; put the schema that kvspool pipeline infer prints into the file, with {time} timestamp" if job.fields is None else ""
    raise JobError(f"{job.path}: [decode] time: record.timestamp, or a field that is a timestamp; {time!r} {has}{advice}")


def _table(document: Mapping[str, Any], name: str, kind: type[msgspec.Struct], path: Path) -> Any:
    if name not in document:
        return None if name in OPTIONAL else kind()
    try:
        return msgspec.convert(document[name], kind)
    except msgspec.ValidationError as error:
        raise JobError(f"{path}: [{name}]{_place(str(error))}") from None


def _place(message: str) -> str:
    """Return msgspec's message with the key first: " codec: Invalid enum value 'xml'"."""
    words, at, place = message.partition(" - at `$")
    key = place.removesuffix("`").lstrip(".") if at else ""
    unknown = re.search(r"unknown field `([^`]*)`", words)
    if unknown:
        return f" {unknown[1]}: unknown key"
    missing = re.search(r"missing required field `([^`]*)`", words)
    if missing:
        return f" {missing[1]}: missing"
    return f" {key}: {words}" if key else f": {words}"


def _source(table: Any, path: Path) -> JobSource:
    if not isinstance(table, dict):
        raise JobError(f"{path}: [source] must be a table")
    options = {}
    for key, value in table.items():
        if isinstance(value, bool):
            options[key] = str(value).lower()
        elif isinstance(value, (str, int, float)):
            options[key] = str(value)
        elif isinstance(value, (dict, list)):  # offsets, which the connector expects as JSON; names, which it expects with commas
            is_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
            options[key] = ",".join(value) if is_names else msgspec.json.encode(value).decode()
        else:
            raise JobError(f"{path}: [source] {key}: a string, a number, true, false, a list or a table, not {value!r}")
    if ("path" in options) == ("hub" in options):
        raise JobError(f"{path}: [source] has either path (a log, a shard set or a hub root) or hub (addresses of hub servers)")
    for key in PATHS & set(options):
        options[key] = _next_to(path, options[key])
    return JobSource(options)


def _sink(sink: JobSink, path: Path) -> JobSink:
    if not sink.path:
        raise JobError(f"{path}: [sink] path: missing")
    checkpoint = _next_to(path, sink.checkpoint) if sink.checkpoint else ""
    return msgspec.structs.replace(sink, path=_next_to(path, sink.path), checkpoint=checkpoint)


def _decode(decode: Decode, path: Path) -> Decode:
    return msgspec.structs.replace(decode, bad_path=_next_to(path, decode.bad_path)) if decode.bad_path else decode


def _next_to(job: Path, text: str) -> str:
    return text if "://" in text else str(job.parent / text)


def _check(job: Job) -> None:
    """Raise JobError for contradictions between tables."""
    if not isinstance(job.name, str) or not NAME.fullmatch(job.name):
        raise JobError(f"{job.path}: name: up to 64 letters, digits, _ and -, beginning with a letter or digit, not {job.name!r}")
    _check_decode(job)
    _check_window(job)
    _check_sink(job)
    if job.select is not None and not all(column.strip() for column in job.select.columns or ("",)):
        raise JobError(f"{job.path}: [select] columns: at least one expression, none of them empty")
    if job.compact is not None:
        _check_compact(job, job.compact)


def _check_decode(job: Job) -> None:
    decode = job.decode
    if decode.codec in ONE_COLUMN and decode.schema:
        raise JobError(f"{job.path}: [decode] schema: codec {decode.codec} has one column, named {ONE_COLUMN[decode.codec]}")
    if decode.codec not in ONE_COLUMN and not decode.schema:
        raise JobError(f'{job.path}: [decode] schema: missing; give fields such as "carrier string, dep_delay int", or "infer"')
    if not 1 <= decode.sample <= 1_000_000:
        raise JobError(f"{job.path}: [decode] sample: 1 to 1,000,000 records, not {decode.sample}")
    try:
        fields = job.fields
    except SchemaError as error:
        raise JobError(f"{job.path}: [decode] schema: {error}") from None
    if fields is not None:
        check_time(job, fields)


def _check_window(job: Job) -> None:
    if job.watermark is not None:
        _check_duration(job, "watermark", "delay", job.watermark.delay)
        _check_duration(job, "watermark", "ahead", job.watermark.ahead)
        if not job.watermark.column:
            raise JobError(f"{job.path}: [watermark] column: missing")
    window = job.window
    if window is None:
        return
    if not window.aggregates:
        raise JobError(f'{job.path}: [window] aggregates: at least one, such as "count(*) AS records"')
    if window.slide and not window.size:
        raise JobError(f"{job.path}: [window] slide: only with size")
    for key in ("size", "slide"):
        if getattr(window, key):
            _check_duration(job, "window", key, getattr(window, key))
    if window.slide and seconds(window.slide) > seconds(window.size):
        raise JobError(f"{job.path}: [window] slide: at most size, or some records are in no window")


def _check_sink(job: Job) -> None:
    sink = job.sink
    if sink.trigger != AVAILABLE_NOW:
        _check_duration(job, "sink", "trigger", sink.trigger, may_be_0=True)
    _check_duration(job, "sink", "keep", sink.keep, may_be_0=True)
    if "://" in sink.path and sink.format != "delta":
        raise JobError(f"{job.path}: [sink] path: {sink.format} needs a file system that all tasks reach; use delta for an object store")
    if "://" in sink.path and not (sink.checkpoint and job.decode.bad_path):
        raise JobError(f"{job.path}: [sink] path: with an object store, [sink] checkpoint and [decode] bad_path must be given")
    if "://" in job.decode.bad_path:
        raise JobError(f"{job.path}: [decode] bad_path: must be on a file system that all tasks can reach")
    if sink.options and sink.format in ("parquet", "iceberg"):
        raise JobError(f"{job.path}: [sink] options: format {sink.format} has no options")
    if sink.partition_by and sink.format == "kvspool":
        raise JobError(f"{job.path}: [sink] partition_by: shards are chosen by the column key")
    if sink.partition_by and sink.format == "iceberg":
        raise JobError(f"{job.path}: [sink] partition_by: Iceberg tables are not partitioned; use delta")
    if job.window is None and sink.mode in ("complete", "merge"):
        raise JobError(f'{job.path}: [sink] mode: "{sink.mode}" is for a job with [window]')
    if job.mode == "append" and job.window is not None and not (job.window.size and job.watermark):
        raise JobError(f'{job.path}: [sink] mode: "append" needs [window] size and [watermark], or no aggregate is ever final')
    if job.mode != "append" and sink.format != "delta":
        what = {"kvspool": "a log", "parquet": "a folder of Parquet"}.get(sink.format, "an Iceberg table")
        raise JobError(f'{job.path}: [sink] mode: {what} can only be added to; format delta has "{job.mode}"')
    if sink.evolve and sink.format not in ("delta", "iceberg"):
        raise JobError(f"{job.path}: [sink] evolve is for the formats delta and iceberg")
    if job.compact is not None and sink.format != "delta":
        raise JobError(f"{job.path}: [compact] is for format delta")
    secret = next((name for name in sink.options if SECRET.search(name)), None)
    if sink.format == "delta" and secret is not None:
        raise JobError(f"{job.path}: [sink] options: {secret} is a secret; set the environment's variable of that name instead")


def _check_compact(job: Job, compact: Compact) -> None:
    try:
        is_large = compact.target_bytes >= 1 << 16
    except ValueError as error:
        raise JobError(f"{job.path}: [compact] target: {error}") from None
    if not is_large:
        raise JobError(f"{job.path}: [compact] target: at least 64KiB, not {compact.target}")
    if compact.files < 2:
        raise JobError(f"{job.path}: [compact] files: at least 2, not {compact.files}")


def _check_duration(job: Job, table: str, key: str, text: str, *, may_be_0: bool = False) -> None:
    try:
        length = seconds(text)
    except ValueError as error:
        raise JobError(f"{job.path}: [{table}] {key}: {error}") from None
    if length == 0 and not may_be_0:
        raise JobError(f"{job.path}: [{table}] {key}: must be longer than 0")

