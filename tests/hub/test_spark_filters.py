"""Filters that a read takes leave exactly the rows that Spark would have left."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sessions import MARKS

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
import pyarrow
from pyspark.sql import datasource as spark

from hub.spark.filters import MICROSECOND, pushed, select
from hub.spark.shards import ShardKey

pytestmark = MARKS[1:]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KEY = ShardKey("JFK", 2)
NUMBERS = st.integers(0, 12)
TIMES = st.integers(-3, 12).map(lambda micros: EPOCH + timedelta(microseconds=micros))
VALUES = {
    "key": st.sampled_from([b"", b"a", b"ab", b"\xff"]),
    "value": st.sampled_from([b"", b"a", b"ab", b"\xff"]),
    "topic": st.sampled_from(["", "JFK", "JF", "K", "LGA"]),
    "partition": st.integers(0, 4),
    "offset": NUMBERS,
    "timestamp": TIMES,
    "type": NUMBERS,
}
COMPARISONS = [
    spark.EqualTo,
    spark.EqualNullSafe,
    spark.LessThan,
    spark.LessThanOrEqual,
    spark.GreaterThan,
    spark.GreaterThanOrEqual,
]
OF_TEXT = [spark.StringStartsWith, spark.StringEndsWith, spark.StringContains]


@st.composite
def filters(draw: st.DrawFn) -> spark.Filter:
    column = draw(st.sampled_from(sorted(VALUES)))
    kind = draw(st.sampled_from([*COMPARISONS, spark.In, spark.IsNull, spark.IsNotNull, *(OF_TEXT if column == "topic" else [])]))
    if kind in (spark.IsNull, spark.IsNotNull):
        one = kind((column,))
    elif kind is spark.In:
        one = spark.In((column,), draw(st.lists(VALUES[column], max_size=3)))
    else:
        one = kind((column,), draw(VALUES[column]))
    return spark.Not(one) if draw(st.booleans()) else one


def holds(one: spark.Filter, row: dict[str, Any]) -> bool | None:
    """Return the SQL result of a filter for a row: None is null."""
    if isinstance(one, spark.Not):
        inner = holds(one.child, row)
        return None if inner is None else not inner
    value = row[one.attribute[0]]  # type: ignore[attr-defined]
    if isinstance(one, spark.IsNull):
        return value is None
    if isinstance(one, spark.IsNotNull):
        return value is not None
    if isinstance(one, spark.EqualNullSafe):
        return bool(value == one.value)
    if value is None:
        return None
    if isinstance(one, spark.In):
        return value in one.value
    return {
        spark.EqualTo: lambda one, other: one == other,
        spark.LessThan: lambda one, other: one < other,
        spark.LessThanOrEqual: lambda one, other: one <= other,
        spark.GreaterThan: lambda one, other: one > other,
        spark.GreaterThanOrEqual: lambda one, other: one >= other,
        spark.StringStartsWith: str.startswith,
        spark.StringEndsWith: str.endswith,
        spark.StringContains: str.__contains__,
    }[type(one)](value, one.value)  # type: ignore[attr-defined]


RECORDS = st.lists(
    st.fixed_dictionaries(
        {"key": st.none() | VALUES["key"], "value": VALUES["value"], "nanoseconds": st.integers(0, 12_000), "type": NUMBERS}
    ),
    max_size=12,
)


def rows_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what Spark sees of the records of a spool: their times never decrease, and are cut to microseconds."""
    times = sorted(record["nanoseconds"] for record in records)
    return [
        {
            "key": record["key"],
            "value": record["value"],
            "topic": KEY.topic,
            "partition": KEY.partition,
            "offset": at,
            "nanoseconds": time,
            "timestamp": EPOCH + timedelta(microseconds=time // 1000),
            "type": record["type"],
        }
        for at, (record, time) in enumerate(zip(records, times, strict=True))
    ]


def batch_of(rows: list[dict[str, Any]]) -> Any:
    types = {"key": pyarrow.binary(), "value": pyarrow.binary(), "offset": pyarrow.int64(), "type": pyarrow.int32()}
    types |= {"timestamp": pyarrow.timestamp("us", "UTC")}
    return pyarrow.RecordBatch.from_pydict(
        {name: pyarrow.array([row[name] for row in rows], kind) for name, kind in types.items()}, schema=pyarrow.schema(types.items())
    )


@given(RECORDS, st.lists(filters(), max_size=3))
@example([{"key": None, "value": b"", "nanoseconds": 0, "type": 0}], [spark.Not(spark.IsNotNull(("offset",)))])
def test_what_is_left_is_what_sql_leaves(records: list[dict[str, Any]], given_filters: list[spark.Filter]) -> None:
    rows = rows_of(records)
    wanted, left = pushed(given_filters)
    assert left == []
    expected = [row["offset"] for row in rows if all(holds(one, row) for one in given_filters)]

    first, end = wanted.offsets(0, len(rows))
    since, before = wanted.times
    rows = [
        row
        for row in rows[first:end]
        if (since is None or row["nanoseconds"] >= since) and (before is None or row["nanoseconds"] < before)
    ]
    found = select(batch_of(rows), wanted.of_rows).column("offset").to_pylist() if wanted.has(KEY) else []
    assert found == expected


@pytest.mark.parametrize(
    "one",
    [
        spark.EqualTo(("colour",), 1),
        spark.EqualTo(("value", "field"), b"a"),
        spark.EqualTo(("offset",), None),
        spark.EqualTo(("offset",), 1.5),
        spark.EqualTo(("offset",), True),
        spark.EqualTo(("key",), "text"),
        spark.EqualTo(("timestamp",), datetime(2026, 1, 1)),
        spark.In(("offset",), [1, None]),
        spark.In(("offset",), list(range(10_001))),
        spark.StringContains(("key",), "a"),
        spark.Not(spark.Not(spark.EqualTo(("offset",), 1))),
    ],
    ids=repr,
)
def test_what_is_not_understood_goes_back_to_spark(one: spark.Filter) -> None:
    wanted, left = pushed([one, spark.GreaterThan(("offset",), 3)])
    assert left == [one]
    assert wanted.offsets(0, 10) == (4, 10)


def test_the_edges_of_times_are_those_of_microseconds() -> None:
    at = EPOCH + timedelta(microseconds=5)
    for one, times in [
        (spark.EqualTo(("timestamp",), at), (5 * MICROSECOND, 6 * MICROSECOND)),
        (spark.GreaterThan(("timestamp",), at), (6 * MICROSECOND, None)),
        (spark.GreaterThanOrEqual(("timestamp",), at), (5 * MICROSECOND, None)),
        (spark.LessThan(("timestamp",), at), (None, 5 * MICROSECOND)),
        (spark.LessThanOrEqual(("timestamp",), at), (None, 6 * MICROSECOND)),
        (spark.Not(spark.LessThan(("timestamp",), at)), (5 * MICROSECOND, None)),
        (spark.Not(spark.EqualTo(("timestamp",), at)), (None, None)),
        (spark.GreaterThan(("timestamp",), datetime.max.replace(tzinfo=UTC)), (None, None)),
    ]:
        assert pushed([one])[0].times == times
