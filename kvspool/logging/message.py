"""The data of a log message, and its line for people.

A message is a map with `level`, `logger`, `message` and `process`; and, if known, `thread`, `file`, `line`, `function`, `exception`,
`stack`, and `extra`, a map with the fields that the caller added.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

import msgspec

STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
COLORS = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
LONGEST = 100_000  # characters of one text
_encode = msgspec.json.Encoder().encode


def of_record(record: logging.LogRecord) -> dict[str, Any]:
    """Return the data of a record of the module logging."""
    data: dict[str, Any] = {
        "level": record.levelname,
        "logger": record.name,
        "message": _cut(_message(record)),
        "process": record.process,
        "thread": record.threadName,
        "file": record.pathname,
        "line": record.lineno,
        "function": record.funcName,
    }
    if record.exc_info and record.exc_info[1] is not None:
        data["exception"] = _cut("".join(traceback.format_exception(record.exc_info[1])))
    if record.stack_info:
        data["stack"] = _cut(record.stack_info)
    extra = {name: plain(value) for name, value in vars(record).items() if name not in STANDARD}
    return {**data, "extra": extra} if extra else data


def plain(value: Any) -> Any:
    """Return a value that JSON can represent; anything else as text."""
    try:
        _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _cut(str(value))
    return value


def line(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the parts of a message's line, each with its style on a terminal; the last part may have several lines."""
    level = str(data.get("level", "")).upper()
    words = [(f"{level:<8}", COLORS.get(level, "")), (str(data.get("logger", "")), "cyan"), (str(data.get("message", "")), "")]
    extra = data.get("extra")
    if isinstance(extra, dict):
        words += [(f"{name}={value if isinstance(value, str) else _encode(value).decode()}", "magenta") for name, value in extra.items()]
    words.append((f"[{data.get('process', '?')}]", "dim"))
    return [(text, style) for text, style in words if text]


def further_lines(data: dict[str, Any]) -> list[str]:
    """Return the lines of the exception and the stack."""
    texts = [data.get(name) for name in ("exception", "stack")]
    return [one for text in texts if isinstance(text, str) for one in text.rstrip().splitlines()]


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # the arguments don't fit the format
        return f"{record.msg} {record.args!r} ({error})"


def _cut(text: str) -> str:
    """Return a text that can be stored: not too long, and without lone surrogates."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"
