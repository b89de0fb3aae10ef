"""The target of Spark's sinks, and the form of rows: options and columns, checked on the driver before a task runs.

A target is one log, or the shard sets under a root, by topic. It is small and pickled for the tasks, which open it on their own hosts. Its
path must mean the same log there. A task that finds another one fails, because Spark may repeat it on another host, where it would append
the rows again. With option `hosts=own` each host may have logs of its own.

Columns are those of Kafka's sink: `value`; optionally `key`, `topic`, `partition`, `timestamp`, `type`. `offset` and `timestampType`, which
a read returns, are ignored: the log assigns offsets.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.spark.naming import named
from hub.spark.options import choice, local_path
from kvspool import Codec, system
from kvspool.engine import sizes
from kvspool.errors import KvspoolError, LogExists, LogNotFound
from kvspool.opening import logs
from kvspool.record import PORTABLE
from shard import ShardSet, route
from shard.merged import Log
from shard.shardset import open_shard

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMATS = ("spool", "kvj")
NAMES = ("path", "topic", "prefix", "bits", "capacity", "format", "codec", "durability", "changedBatch", "memory", "hosts")
CHECKPOINT = "checkpointlocation"
IGNORED = frozenset({CHECKPOINT, "queryname"})  # Spark's own options of every stream
MEMORY = "256MiB"
COLUMNS = ("key", "value", "topic", "partition", "timestamp", "type")
LEFT_OUT = ("offset", "timestamptype")  # columns of a read that the log sets itself

_REFUSED = {
    "kafka.bootstrap.servers": "there is no broker: save(path) or start(path) writes to logs of the host where a task runs",
    "kafka.": "it configures a client of Kafka, which is not used; leave it out",
    "includeheaders": "records have no headers; leave it out",
    "hub": "hub servers accept records only from shippers; write to logs of this host, and send them with `kvspool ship`",
}


OWN_LOGS = (
    "A task that Spark repeats on another host would append its rows again there. Keep the executors of a writing query on one host; or "
    "set the option hosts=own to accept that rows may be stored more than once"
)


class SparkSinkError(KvspoolError):
    """A row, or a whole job, can't be written. The message begins with a code in brackets, because Spark keeps only the message."""

    exit_code = 2


@dataclass(frozen=True)
class SinkTarget:
    """The log or root to write to; get it from `parse`.

    path: a log, if `is_log`, or a root. topic: of all rows, instead of their column; None: use the column, or the only topic. bits,
    capacity, format: of sets to create. codec: of the values. is_durable: each task returns when its records are on disk. takes_changed: of
    a batch that was partly stored and has other rows now, append the missing rows. memory: bytes of rows that a task keeps; more go to a
    temporary file. has_own_logs: each host may have its own logs. log_ids: of the topic's shards on the driver's host, if it was opened.
    checkpoint: of the streaming query, if it is an option. place: identifies the path on the driver's host.
    """

    path: Path
    is_log: bool
    topic: str | None
    bits: int | None
    capacity: str
    format: str
    codec: int
    is_durable: bool
    takes_changed: bool
    memory: int
    has_own_logs: bool = False
    log_ids: tuple[str, ...] = ()
    checkpoint: str = ""
    place: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, str], schema: StructType) -> SinkTarget:
        """Return the target of options and columns. Creates the missing set of a `topic`, if `bits` is given.

        Raises ValueError with the name of an option or column that is unknown, missing or wrong; LogNotFound, ShardError, and the errors of
        opening the logs.
        """
        asked = {name: value for name, value in given.items() if name.lower() not in IGNORED}
        options = named(asked, NAMES, _REFUSED, "writing with format kvspool")
        if not options.get("path"):
            raise ValueError("a path is missing: save(path) or start(path), of a log or of a root of shards")
        path = local_path(options["path"])
        target = cls(
            path=path,
            is_log=logs.lies_at(path),
            topic=_topic(options),
            bits=_bits(options),
            capacity=options.get("capacity", "64MiB"),
            format=choice(options, "format", FORMATS),
            codec=_codec(options.get("codec"), schema),
            is_durable=choice(options, "durability", ("memory", "disk")) == "disk",
            takes_changed=choice(options, "changedBatch", ("fail", "append")) == "append",
            memory=_memory(options.get("memory", MEMORY)),
            has_own_logs=choice(options, "hosts", ("one", "own")) == "own",
            checkpoint=next((value for name, value in given.items() if name.lower() == CHECKPOINT), ""),
        )
        check_columns(schema)
        found = target._of_log(options) if target.is_log else target._of_root(schema)
        return replace(found, place=found._place())

    def is_at_driver(self) -> bool:
        """Return whether this process has the path of the driver's host: the driver reaches what is written there."""
        return self.place != "" and self.place == self._place()

    def _place(self) -> str:
        status = system.port.look_up(self.path)
        return "" if status is None else f"{system.port.boot_id().hex()}/{status.st_dev}/{status.st_ino}"

    def _of_log(self, options: Mapping[str, str]) -> SinkTarget:
        if given := [name for name in ("prefix", "bits") if name in options]:
            raise ValueError(f"{self.path} is one log, not a root of shards: options prefix and bits have no meaning there ({given[0]})")
        if self.topic not in (None, self.path.name):
            raise ValueError(f"{self.path} is one log, so its topic is {self.path.name!r}, not {self.topic!r}; leave option topic out")
        with open_shard(self.path, 10.0) as log:
            return self._checked([log])

    def _checked(self, opened: Sequence[Log]) -> SinkTarget:
        """Return the target with the ids of its logs, which must be able to have producers."""
        for log in opened:
            log.producer("check")
        return replace(self, log_ids=ids_of(opened))

    def _of_root(self, schema: StructType) -> SinkTarget:
        """Return the target with the only set's topic, if the rows have none; creates sets that are requested by name."""
        sets = route.scan(self.path) if self.path.is_dir() else {}
        has_column = "topic" in [name.lower() for name in schema.names]
        topic = self.topic
        if topic is None and has_column:
            if not self.path.is_dir() and self.bits is None:
                raise LogNotFound(f"{self.path} does not exist, or is neither a log nor a root of shards; option bits creates sets there")
            return self
        if topic is None:
            if len(sets) > 1:
                raise ValueError(f"{self.path} holds shard sets {', '.join(map(repr, sets))}: give option topic, or a column topic")
            topic = next(iter(sets), "")
        target = SinkTarget(**{**self.__dict__, "topic": topic})
        with target.open(topic) as shards:
            if self.bits not in (None, shards.bits):
                raise ValueError(f"shard set {topic!r} has {shards.bits} bits, not {self.bits}: leave option bits out")
            return target._checked(shards.shards)

    def open(self, topic: str) -> ShardSet:
        """Open the shards of a topic; create missing ones if `bits` is given. Tasks call this too.

        Raises SparkSinkError for a missing topic without `bits`, or for other logs than the driver's; and the errors of opening logs.
        """
        shards = self._open(topic)
        found = ids_of(shards.shards)
        if self.log_ids and found and found != self.log_ids and not self.has_own_logs:
            shards.close()
            raise SparkSinkError(
                f"[KVSPOOL_OTHER_LOGS] {self.path} on {socket.gethostname()} has other logs than on the driver's host. {OWN_LOGS}"
            )
        return shards

    def _open(self, topic: str) -> ShardSet:
        if self.is_log:
            return ShardSet(self.path.parent, self.path.name, [open_shard(self.path, 10.0)])
        found = (route.scan(self.path) if self.path.is_dir() else {}).get(topic)
        if found is not None and not found.missing:
            return ShardSet.open(self.path, prefix=topic)
        if self.bits is None:
            raise SparkSinkError(
                f"[KVSPOOL_UNKNOWN_TOPIC] {self.path} has no complete shard set with prefix {topic!r}; "
                "option bits creates one, of 2^bits shards, each of the size of option capacity"
            )
        made: dict[str, Any] = {"capacity": self.capacity} if self.format == "spool" else {"format": self.format}
        try:
            return ShardSet.create(self.path, prefix=topic, bits=self.bits, **made)
        except LogExists:  # another task has made the last shard meanwhile
            return ShardSet.open(self.path, prefix=topic)

    def check_topic(self, topic: str | None) -> str:
        """Return a row's topic. Raises SparkSinkError for a missing or impossible one, and for another one than the log's."""
        if topic is None:
            raise SparkSinkError(
                "[KVSPOOL_NULL_TOPIC_IN_DATA] column topic is null in a row; fill it, drop those rows, or give option topic for all"
            )
        if self.is_log:
            if topic != self.path.name:
                raise SparkSinkError(
                    f"[KVSPOOL_UNKNOWN_TOPIC] {self.path} is one log, of the topic {self.path.name!r}, and a row has {topic!r}; drop the "
                    "column topic, or give option topic"
                )
            return topic
        try:
            route.check_prefix(topic)
        except ValueError as error:
            raise SparkSinkError(f"[KVSPOOL_UNKNOWN_TOPIC] column topic: {error}") from None
        if not topic:
            raise SparkSinkError("[KVSPOOL_UNKNOWN_TOPIC] column topic is empty in a row")
        return topic


def check_columns(schema: StructType) -> None:
    """Raise ValueError with the name of a column that is missing, unknown, or of a type that can't be stored."""
    from pyspark.sql import types

    many, whole = (types.BinaryType, types.StringType), (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
    kinds: dict[str, tuple[type[types.DataType], ...]] = {
        "key": many,
        "value": many,
        "topic": (types.StringType,),
        "partition": (types.IntegerType, types.ByteType, types.ShortType),
        "timestamp": (types.TimestampType, types.TimestampNTZType),
        "type": whole,
    }
    for field in schema.fields:
        name = field.name.lower()
        if name == "headers":
            raise ValueError("column headers can't be written to kvspool: records have none; put them into the value, or drop the column")
        if name in LEFT_OUT:
            continue
        if name not in kinds:
            raise ValueError(
                f"column {field.name} can't be written to kvspool; there are value, key, topic, partition, timestamp and type: select those"
            )
        if not isinstance(field.dataType, kinds[name]):
            names = " or ".join(kind().simpleString() for kind in kinds[name])
            raise ValueError(f"column {field.name} is {field.dataType.simpleString()}; it must be {names}")
    names_given = [field.name.lower() for field in schema.fields]
    if "value" not in names_given:
        raise ValueError("a column named value is missing")
    if len(set(names_given)) < len(names_given):
        raise ValueError("two columns have the same name")


def _topic(options: Mapping[str, str]) -> str | None:
    if "topic" in options and "prefix" in options:
        raise ValueError("options topic and prefix mean the same: give one")
    for name in ("topic", "prefix"):
        if name in options:
            try:
                return route.check_prefix(options[name])
            except ValueError as error:
                raise ValueError(f"option {name}: {error}") from None
    return None


def _bits(options: Mapping[str, str]) -> int | None:
    if "bits" not in options:
        return None
    try:
        bits = int(options["bits"])
    except ValueError:
        raise ValueError(f"option bits is a number, not {options['bits']!r}") from None
    return route.check_bits(bits)


def _memory(text: str) -> int:
    size = sizes.parse(text)
    if size < 1 << 20:
        raise ValueError(f"option memory is at least 1MiB, not {text!r}")
    return size


def _codec(name: str | None, schema: StructType) -> int:
    from pyspark.sql.types import StringType

    if name is None:
        is_text = any(field.name.lower() == "value" and isinstance(field.dataType, StringType) for field in schema.fields)
        return Codec.TEXT if is_text else Codec.RAW
    if name not in PORTABLE:
        raise ValueError(f"option codec is one of {', '.join(PORTABLE)}, not {name!r}")
    return PORTABLE[name]


def ids_of(opened: Sequence[Log]) -> tuple[str, ...]:
    """Return the ids of logs; none if one of them has no id."""
    found = tuple(log.log_id.hex() for log in opened)
    return found if all(found) else ()
