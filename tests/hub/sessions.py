"""Helpers of tests with a Spark session: filled logs, the rows that a query returns, and the expected ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvspool import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

MARKS = [
    pytest.mark.spark,
    # A warning of PySpark when it is imported alongside pandas 3, which nothing here uses.
    pytest.mark.filterwarnings("ignore:.*pandas:FutureWarning"),
]
SCHEMA = "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,type:int>"
BASE = 1_700_000_000_123_456_789  # ns
PATIENCE = 60  # seconds, against a hang
KEYS = [None, b"", b"a", b"hello", b"\xff\x00"]


def fill(log: Any, count: int = 20) -> None:
    for at in range(count):
        log.append(b"value-%d" % at, key=KEYS[at % len(KEYS)], type=at % 256, timestamp=BASE + at * 1_001_001)


def load(spark: SparkSession, path: Path, **options: str) -> DataFrame:
    return spark.read.format("kvspool").options(**options).load(str(path))


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return all rows by topic, partition and offset, as `expected` writes them."""
    names = ("key", "value", "topic", "partition", "offset", "unix_micros(timestamp)", "type")
    found = [
        (topic, partition, offset, None if key is None else bytes(key), bytes(value), micros, kind)
        for key, value, topic, partition, offset, micros, kind in frame.selectExpr(*names).collect()
    ]
    return sorted(found, key=lambda row: row[:3])


def expected(records: Iterable[Record], topic: str | None = None) -> list[tuple[Any, ...]]:
    found = [
        (
            getattr(record, "client", topic),
            getattr(record, "shard", 0),
            record.sequence,
            record.key,
            record.value,
            record.timestamp // 1000,
            record.type,
        )
        for record in records
    ]
    return sorted(found, key=lambda row: row[:3])


def told(failure: pytest.ExceptionInfo[BaseException]) -> str:
    """Return everything that an error from Spark says."""
    return str(failure.value)


def once(flag: Path) -> Callable[[], bool]:
    """Return what is true the first time that it is called, in whatever process that is. Spark pickles it as it is."""
    name = str(flag)

    def is_first() -> bool:
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    return is_first


def until(query: StreamingQuery, condition: Callable[[], object]) -> None:
    """Wait for something that a running query brings about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.01)
