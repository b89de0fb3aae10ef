"""A writer: the appends of a log in a `with` block.

**Durability.** As for the log's own appends: when an append returns, its record is visible to other processes, and survives a crash of any
process. A writer holds no lock between its appends.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

from kvspool.errors import Closed
from kvspool.system.handles import Handle


class Append(Protocol):
    """Append one record and return its sequence."""

    def __call__(self, value: Any, *, key: bytes | str | None = None, type: int = 0, timestamp: int | None = None) -> int: ...


class Appendable(Protocol):
    """The methods of a log that a writer uses; see `kvspool.log.Log`."""

    path: Path

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
    ) -> int: ...

    def append_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
    ) -> range: ...

    def open_to_write(self) -> None: ...

    def sync(self, timeout: float | None = None) -> int: ...


class Writer(Handle):
    """Appends to a log until it is closed; get it from `Log.writer`. Threads may share it.

    append: the `append` of the log, with this writer's timeout.
    """

    append: Append

    def __init__(self, log: Appendable, timeout: float | None) -> None:
        self._log: Appendable | None = log
        self._timeout = timeout
        self.append = log.append if timeout is None else partial(log.append, timeout=timeout)
        log.open_to_write()  # or raise the error of an append

    def append_many(
        self, values: Iterable[Any], *, keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> range:
        """Append a record for each value in one publication, and return their sequences; see `Log.append_many`."""
        return self._live().append_many(values, keys=keys, type=type, timestamp=timestamp, timeout=self._timeout)

    def sync(self, timeout: float | None = None) -> int:
        """Flush all records appended so far to disk; see `Log.sync`."""
        return self._live().sync(timeout)

    @property
    def closed(self) -> bool:
        """Return whether the writer was closed."""
        return self._log is None

    def close(self) -> None:
        """Close the writer: every later append raises Closed. The log stays open."""
        self.append = _refuse
        self._log = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Writer of {'nothing: closed' if self._log is None else self._log.path}>"

    def _live(self) -> Appendable:
        return _refuse() if self._log is None else self._log


def _refuse(*_: object, **__: object) -> NoReturn:
    raise Closed("the writer was closed; `writer()` of the log returns another one")
