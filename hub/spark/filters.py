"""Filters that Spark pushes into a batch read: they select shards, sequences and rows.

They arrive as a conjunction. A filter on topic or partition excludes shards. One on offset or timestamp excludes a part of each shard, if
the log's index can determine it. The rest is decided row by row in the task, before rows are sent to the JVM. So accepted filters are
applied exactly, to the values that Spark would see: timestamps are cut to microseconds. Other filters go back to Spark.

SQL's nulls: neither a comparison with null nor its negation holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource as spark

from hub.spark.shards import ShardKey

if TYPE_CHECKING:
    import pyarrow

MOST_VALUES = 10_000  # of an IN
LEAST, MOST = -(1 << 63), (1 << 63) - 1
MICROSECOND = 1000  # ns
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

KINDS: dict[str, type] = {
    "key": bytes,
    "value": bytes,
    "topic": str,
    "partition": int,
    "offset": int,
    "timestamp": datetime,
    "type": int,
}
OF_SHARDS = ("topic", "partition")  # columns with one value in all rows of a shard
_OPERATORS: dict[type, str] = {
    spark.EqualTo: "equal",
    spark.EqualNullSafe: "is",
    spark.LessThan: "less",
    spark.LessThanOrEqual: "less_equal",
    spark.GreaterThan: "greater",
    spark.GreaterThanOrEqual: "greater_equal",
    spark.In: "in",
    spark.IsNull: "null",
    spark.IsNotNull: "not_null",
    spark.StringStartsWith: "starts_with",
    spark.StringEndsWith: "ends_with",
    spark.StringContains: "contains",
}
_OF_TEXT = ("starts_with", "ends_with", "contains")
_NEGATED = {"less": "greater_equal", "less_equal": "greater", "greater": "less_equal", "greater_equal": "less"}
_SCALAR: dict[str, Callable[[Any, Any], bool]] = {
    "equal": lambda one, other: bool(one == other),
    "is": lambda one, other: bool(one == other),
    "less": lambda one, other: bool(one < other),
    "less_equal": lambda one, other: bool(one <= other),
    "greater": lambda one, other: bool(one > other),
    "greater_equal": lambda one, other: bool(one >= other),
    "in": lambda one, other: one in other,
    "null": lambda one, other: False,
    "not_null": lambda one, other: True,
    "starts_with": lambda one, other: bool(one.startswith(other)),
    "ends_with": lambda one, other: bool(one.endswith(other)),
    "contains": lambda one, other: other in one,
}


@dataclass(frozen=True)
class Term:
    """A column compared with a value that isn't null."""

    column: str
    operator: str
    value: Any
    is_negated: bool

    @classmethod
    def of(cls, filter: spark.Filter) -> Term | None:
        """Return the term of a filter of Spark; None for a filter that can't be accepted."""
        is_negated = isinstance(filter, spark.Not)
        inner = filter.child if isinstance(filter, spark.Not) else filter
        operator = _OPERATORS.get(type(inner))
        attribute: Any = getattr(inner, "attribute", ())
        if operator is None or len(attribute) != 1 or attribute[0] not in KINDS:
            return None
        column: str = attribute[0]
        value: Any = getattr(inner, "value", None)
        if operator in _NEGATED and is_negated:
            operator, is_negated = _NEGATED[operator], False
        if operator == "in":
            value = tuple(value)
        if operator in _OF_TEXT and KINDS[column] is not str:
            return None
        return cls(column, operator, value, is_negated) if _is_fit(operator, value, KINDS[column]) else None

    def holds(self, value: Any) -> bool:
        """Return whether the term holds for a value that isn't null."""
        return _SCALAR[self.operator](value, self.value) != self.is_negated

    @property
    def interval(self) -> tuple[int, int]:
        """Return the least and the largest number for which the term may hold; of a timestamp, in microseconds since 1970."""
        values = [_number(one) for one in (self.value if self.operator == "in" else (self.value,)) if one is not None]
        if self.is_negated or not (values or self.operator == "in"):
            return LEAST, MOST
        low, high = min(values, default=MOST), max(values, default=LEAST)
        return {
            "less": (LEAST, high - 1),
            "less_equal": (LEAST, high),
            "greater": (low + 1, MOST),
            "greater_equal": (low, MOST),
        }.get(self.operator, (low, high))

    @property
    def is_interval(self) -> bool:
        """Return whether the term holds for all numbers of the interval: for offsets, which are never null."""
        return not self.is_negated and self.operator not in ("in", "null")

    def mask(self, column: pyarrow.Array) -> pyarrow.Array:
        """Return for each row whether the term holds."""
        import pyarrow
        from pyarrow import compute

        if self.operator in ("null", "not_null"):
            return column.is_null() if (self.operator == "null") != self.is_negated else column.is_valid()
        if self.operator == "in":
            found = compute.is_in(column, value_set=pyarrow.array(self.value, column.type))
        else:
            name = "equal" if self.operator == "is" else self.operator
            found = compute.call_function(name, [column, pyarrow.scalar(self.value, column.type)]).fill_null(False)
        if self.is_negated:
            found = compute.invert(found)
        return found if self.operator == "is" else compute.and_(found, column.is_valid())


@dataclass(frozen=True)
class Pushed:
    """A conjunction of terms."""

    terms: tuple[Term, ...] = ()

    def has(self, key: ShardKey) -> bool:
        """Return whether a shard may have matching rows."""
        return all(term.holds(getattr(key, term.column)) for term in self.terms if term.column in OF_SHARDS)

    def offsets(self, first: int, end: int) -> tuple[int, int]:
        """Return the first and the end of the sequences of a range that may match; equal for none."""
        for low, high in self._intervals("offset"):
            first, end = max(first, low), min(end, high + 1)
        return first, max(first, end)

    @property
    def times(self) -> tuple[int | None, int | None]:
        """Return the earliest time of matching records, and the time before which all are: ns since 1970, both later; None for no bound.

        Times before 1970 are cut to microseconds in the other direction, so they set no bound here.
        """
        low = max((one for one, _ in self._intervals("timestamp")), default=LEAST)
        high = min((one for _, one in self._intervals("timestamp")), default=MOST)
        since = low * MICROSECOND if 0 < low <= MOST // MICROSECOND else None
        before = (high + 1) * MICROSECOND if 0 < high < MOST // MICROSECOND else None
        return since, before

    def _intervals(self, column: str) -> list[tuple[int, int]]:
        return [term.interval for term in self.terms if term.column == column]

    @property
    def of_rows(self) -> tuple[Term, ...]:
        """Return the terms that are decided for each row."""
        return tuple(term for term in self.terms if term.column not in OF_SHARDS and not (term.column == "offset" and term.is_interval))


def pushed(filters: Iterable[spark.Filter]) -> tuple[Pushed, list[spark.Filter]]:
    """Return the accepted filters, and those that Spark must apply."""
    terms, left = [], []
    for filter in filters:
        term = Term.of(filter)
        if term is None:
            left.append(filter)
        else:
            terms.append(term)
    return Pushed(tuple(terms)), left


def select(batch: pyarrow.RecordBatch, terms: Iterable[Term]) -> pyarrow.RecordBatch:
    """Return the rows of a batch for which all terms hold; the same batch if all of them do."""
    from pyarrow import compute

    mask = None
    for term in terms:
        found = term.mask(batch.column(term.column))
        mask = found if mask is None else compute.and_(mask, found)
    return batch if mask is None or mask.true_count == batch.num_rows else batch.filter(mask)


def _is_fit(operator: str, value: Any, kind: type) -> bool:
    """Return whether a column of a type can be compared with a value exactly."""
    if operator in ("null", "not_null"):
        return True
    if operator == "in":
        return len(value) <= MOST_VALUES and all(_is_fit("equal", one, kind) for one in value)
    if kind is datetime:
        return isinstance(value, datetime) and value.tzinfo is not None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _number(value: Any) -> int:
    return (value - EPOCH) // timedelta(microseconds=1) if isinstance(value, datetime) else int(value)
