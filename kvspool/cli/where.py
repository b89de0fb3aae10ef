"""Conditions on records, as in `--where 'data.user == 7 and "login" in data.event'`.

A condition is Python's syntax of comparisons, without calls: it is parsed, checked node by node, and evaluated here, so that it can neither
run code nor take long. Fields of a record are `data`, `value`, `key`, `sequence`, `time`, `type` and `codec`, and fields that a log of
several logs adds. `data.user` and `data["user"]` are members; a missing one is None. Comparisons of values that have no order are false.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvspool.cli.words import suggestion
from kvspool.errors import Undecodable
from kvspool.record import Codec, Record

LONGEST = 4000  # characters of a condition
OF_SEVERAL = ("client", "shard")  # further fields of the records of a shard set or a hub root
FIELDS = ("data", "value", "key", "sequence", "time", "timestamp", "type", "codec")

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
Value = Callable[[Record], Any]


class Where:
    """A checked condition; `matches(record)` evaluates it."""

    def __init__(self, text: str) -> None:
        """Raises ValueError, with the reason, for a text that is no condition."""
        if len(text) > LONGEST:
            raise ValueError(f"a condition has at most {LONGEST} characters")
        try:
            tree = ast.parse(text.strip(), mode="eval")
            self._value = _compiled(tree.body)
        except SyntaxError as error:
            hint = "; compare with ==" if re.search(r"[^=!<>]=[^=]", text) else ""
            raise ValueError(f"{text!r} is no condition: {error.msg}{hint}") from None
        except (RecursionError, MemoryError):
            raise ValueError(f"{text[:40]!r}... is nested too deeply") from None

    def matches(self, record: Record) -> bool:
        """Return whether the condition is true of a record."""
        return bool(self._value(record))


def _compiled(node: ast.expr) -> Value:
    """Return the function that computes a node. Raises ValueError for one that conditions don't have."""
    match node:
        case ast.Constant(value=value):
            return lambda record: value
        case ast.Name(id=name):
            return _field(name)
        case ast.Attribute(value=of, attr=name):
            return _member(_compiled(of), lambda record: name)
        case ast.Subscript(value=of, slice=at) if not isinstance(at, ast.Slice):
            return _member(_compiled(of), _compiled(at))
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            values = [_compiled(part) for part in parts]
            return lambda record: [value(record) for value in values]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _compiled(operand)
            return lambda record: not inner(record)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda record: -number
        case ast.BoolOp(op=op, values=parts):
            terms = [_compiled(part) for part in parts]
            choose = all if isinstance(op, ast.And) else any
            return lambda record: choose(term(record) for term in terms)
        case ast.Compare():
            return _comparison(node)
    raise ValueError(f"{ast.unparse(node)!r} is not possible in a condition: it has fields, constants, comparisons, and, or, not, in")


def _comparison(node: ast.Compare) -> Value:
    """Return the function of `a < b`, or of a chain such as `a < b <= c`."""
    values = [_compiled(part) for part in (node.left, *node.comparators)]
    tests = [_COMPARISONS[type(op)] for op in node.ops]
    return lambda record: all(_holds(test, values[at](record), values[at + 1](record)) for at, test in enumerate(tests))


def _holds(test: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    """Return the result of a comparison; a text is compared with a time as a time. False if the two have no order."""
    try:
        if isinstance(left, datetime) and isinstance(right, str):
            right = _time(right)
        elif isinstance(right, datetime) and isinstance(left, str):
            left = _time(left)
        return bool(test(left, right))
    except (TypeError, ValueError):
        return False


def _time(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _field(name: str) -> Value:
    """Return the function of a field of the record."""
    if name in ("true", "false", "null"):
        constant = {"true": True, "false": False, "null": None}[name]
        return lambda record: constant
    if name == "data":
        return _data
    if name in ("key", "value"):
        return lambda record: _text(getattr(record, name))
    if name == "codec":
        return lambda record: Codec(record.codec).name.lower() if record.codec in list(Codec) else record.codec
    if name in FIELDS:
        return lambda record: getattr(record, name)
    if name in OF_SEVERAL:
        return lambda record: getattr(record, name, None) if name in record.__struct_fields__ else None
    raise ValueError(f"there is no field {name}{suggestion(name, FIELDS)}; a record has {', '.join(FIELDS)}; members are data.{name}")


def _data(record: Record) -> Any:
    """Return the appended value; its bytes if they can't be decoded."""
    try:
        return _text(record.data)
    except Undecodable:
        return _text(record.value)


def _text(value: Any) -> Any:
    """Return bytes as text if they are UTF-8, since conditions are text."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _member(of: Value, name: Value) -> Value:
    """Return the function of a member of a map or list; None if there is none. Only data has members, never objects of Python."""

    def value(record: Record) -> Any:
        container, at = of(record), name(record)
        try:
            if isinstance(container, Mapping) or (isinstance(container, Sequence) and isinstance(at, int)):
                return container[at]
        except (LookupError, TypeError):
            pass
        return None

    return value
