"""Batch writing: every task appends its rows, from its own process, to the same shards at once.

**Durability.** Each batch of rows is in the log, whole, when the task goes on: the death of the task leaves no half record.

**Duplicates.** A task that fails is run again by Spark from its first row; what its first attempt has appended stays. So a record may be
there twice after a failure, never in part, and none is missing when the job ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

import kvspool
from kvspool import Codec, Spool
from kvspool.spool.format import CONTROL_FILE
from shard import ShardSet, route

if TYPE_CHECKING:
    import pyarrow

CODECS = {"raw": Codec.RAW, "text": Codec.TEXT, "json": Codec.JSON, "msgpack": Codec.MSGPACK}
_BYTES = (BinaryType, StringType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_TIME = (TimestampType, TimestampNTZType)
_TYPES = {"value": _BYTES, "key": _BYTES, "type": _WHOLE, "timestamp": _TIME}


@dataclass
class Appended(WriterCommitMessage):
    """What one task has appended."""

    records: int


class ShardWriter(DataSourceArrowWriter):
    """Appends rows to a log, or to the shard set with a prefix; see the module."""

    def __init__(
        self, path: Path, prefix: str | None, bits: int | None, capacity: str, codec: str | None, schema: StructType
    ) -> None:
        """Check the columns, and make the shard set if it isn't there and `bits` says how. Runs on the driver, once for a job."""
        self.path = path
        self.prefix = prefix
        self.codec = _codec(codec, schema)
        _check_columns(schema)
        self.is_log = (path / CONTROL_FILE).exists()
        if self.is_log:
            if prefix is not None or bits is not None:
                raise ValueError(f"{path} is one log, not a root of shards: options prefix and bits have no meaning there")
            kvspool.open(path, format="spool").close()
        else:
            self._prepare_shards(bits, capacity)

    def _prepare_shards(self, bits: int | None, capacity: str) -> None:
        sets = route.scan(self.path) if self.path.is_dir() else {}
        if self.prefix is None and len(sets) == 1:
            self.prefix = next(iter(sets))
        if (self.prefix or "") in sets and not sets[self.prefix or ""].missing:
            with ShardSet.open(self.path, prefix=self.prefix or "") as shards:
                if bits not in (None, shards.bits):
                    raise ValueError(f"shard set {shards.prefix!r} has {shards.bits} bits, not {bits}: leave option bits out")
        elif bits is None:
            raise ValueError(
                f"{self.path} has no complete shard set with prefix {self.prefix or ''!r}; "
                "option bits makes one, of 2^bits shards, each as large as option capacity says"
            )
        else:
            ShardSet.create(self.path, prefix=self.prefix or "", bits=bits, capacity=capacity, exist_ok=True).close()

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Appended:
        """Append the rows of one task."""
        records = 0
        with self._open() as target:
            for batch in iterator:
                target.append_arrow(batch, codec=self.codec)
                records += batch.num_rows
        return Appended(records)

    def _open(self) -> Spool | ShardSet:
        return kvspool.open(self.path, format="spool") if self.is_log else ShardSet.open(self.path, prefix=self.prefix or "")


def _check_columns(schema: StructType) -> None:
    """Raise ValueError that names a column which is missing, unknown, or of a type that can't be stored."""
    for field in schema.fields:
        if field.name not in _TYPES:
            raise ValueError(f"column {field.name} can't be written to kvspool; there are value, key, type and timestamp: select those")
        if not isinstance(field.dataType, _TYPES[field.name]):
            names = " or ".join(kind().simpleString() for kind in _TYPES[field.name])
            raise ValueError(f"column {field.name} is {field.dataType.simpleString()}; it must be {names}")
    if "value" not in schema.names:
        raise ValueError("a column named value is missing")


def _codec(name: str | None, schema: StructType) -> int:
    if name is None:
        is_text = "value" in schema.names and isinstance(schema["value"].dataType, StringType)
        return Codec.TEXT if is_text else Codec.RAW
    if name not in CODECS:
        raise ValueError(f"option codec is one of {', '.join(CODECS)}, not {name!r}")
    return CODECS[name]
