"""The cause of a failed query in a sentence: the useful line of a Java trace with a Python trace in it."""

from __future__ import annotations

import re

LONGEST = 2000  # characters
_OURS = re.compile(r"\[KVSPOOL_[A-Z_.]+\][^\n]*")
_SPARKS = re.compile(r"\[[A-Z][A-Z0-9_.]+\][^\n]*")
_PYTHON = re.compile(r"^(?:[a-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Exit)): ([^\n]+)", re.MULTILINE)
_JAVA = re.compile(r"^: ((?:[a-z_]\w*\.)+[A-Z][\w$]*: [^\n]+)", re.MULTILINE)  # after "Py4JJavaError: An error occurred while calling ..."
_CAUSED = re.compile(r"^Caused by: ((?:[a-z_]\w*\.)+[A-Z][\w$]*: [^\n]+)", re.MULTILINE)  # the innermost is last
_WRAPPERS = tuple(
    f"[{name}]"
    for name in "STREAM_FAILED PYTHON_EXCEPTION FOREACH_BATCH_USER_FUNCTION_ERROR PYTHON_DATA_SOURCE_ERROR TASK_WRITE_FAILED".split()
)


def of_spark() -> tuple[type[Exception], ...]:
    """Return the types of Spark's errors: some errors of its JVM arrive unchanged, as do errors of the connection when it has ended."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError, ConnectionError


def is_gone(error: BaseException) -> bool:
    """Return whether an error means that Spark's JVM no longer answers, rather than an error inside it."""
    from py4j.protocol import Py4JError, Py4JJavaError

    is_from_there = isinstance(error, Py4JJavaError) or "Trace:" in str(error)
    return isinstance(error, (ConnectionError, Py4JError)) and not is_from_there


def cause(error: BaseException) -> str:
    """Return the cause: our own error with its code if there is one, then a Python error, then Spark's, or Java's innermost."""
    text = f"{error}\n{_java_message(error)}"
    ours = _OURS.findall(text)
    if ours:
        return _short(ours[-1])
    python = [f"{name}: {words}" for name, words in _PYTHON.findall(text) if not name.startswith("Py4J")]
    if python and any(wrapper in text for wrapper in _WRAPPERS):
        return _short(python[-1])
    sparks = [line for line in _SPARKS.findall(text) if not line.startswith(_WRAPPERS)]
    said = sparks[:1] or _innermost(f"{text}\n{_java_trace(error)}") or _JAVA.findall(text)[-1:] or text.strip().splitlines()[:1]
    return _short(said[0] if said else type(error).__name__)


def _java_message(error: BaseException) -> str:
    found = getattr(error, "java_exception", None)
    return "" if found is None else str(found)


def _java_trace(error: BaseException) -> str:
    """Return the trace of an exception in the JVM, which PySpark keeps but doesn't print."""
    return str(getattr(error, "_stackTrace", ""))


def _innermost(text: str) -> list[str]:
    """Return the last "Caused by" that isn't about the connection of Java and Python, if there is one; from its code on, if it has one."""
    caused = [line for line in _CAUSED.findall(text) if not line.startswith("py4j.")]
    return [found[0] if (found := _SPARKS.search(line)) else line for line in caused[-1:]]


def _short(line: str) -> str:
    line = line.strip().rstrip("'\"")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
