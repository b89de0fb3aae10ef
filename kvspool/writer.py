"""A writer: the appends of a log or of a shard set in a `with` block.

**Durability.** As for the log's own appends: when an append returns, its record is visible to other processes, and survives a crash of any
process. A writer holds no lock between its appends.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

from kvspool.errors import Closed
from kvspool.system.handles import ClosingHandle

One = TypeVar("One", covariant=True)  # the place of a record: its sequence in a log
Many = TypeVar("Many", covariant=True)  # those of a batch
Synced = TypeVar("Synced", covariant=True)  # the end of what is on disk


class Append(Protocol[One]):
    """Append one record and return its place: its sequence in a log."""

    def __call__(self, value: Any, *, key: bytes | str | None = None, type: int = 0, timestamp: int | None = None) -> One: ...


class Appendable(Protocol[One, Many, Synced]):
    """The part of a log or of a shard set for writers."""

    @property
    def path(self) -> Path: ...

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
    ) -> One: ...

    def append_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
    ) -> Many: ...

    def sync(self, timeout: float | None = None) -> Synced: ...


class OpenWriter(ClosingHandle, Generic[One, Many, Synced]):
    """Appends to a log or a shard set until it is closed. Threads may share it.

    append: the `append` of the log, with this writer's timeout.
    """

    append: Append[One]
    _kind: ClassVar[str]

    def __init__(self, log: Appendable[One, Many, Synced], timeout: float | None) -> None:
        self._log: Appendable[One, Many, Synced] | None = log
        self._timeout = timeout
        self.append = log.append if timeout is None else partial(log.append, timeout=timeout)

    def append_many(
        self, values: Iterable[Any], *, keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Many:
        """Append a record for each value, and return their sequences; see `append_many` of the log."""
        return self._live().append_many(values, keys=keys, type=type, timestamp=timestamp, timeout=self._timeout)

    def sync(self, timeout: float | None = None) -> Synced:
        """Flush all records appended so far to disk; see `sync` of the log."""
        return self._live().sync(timeout)

    @property
    def closed(self) -> bool:
        """Return whether the writer was closed."""
        return self._log is None

    def close(self) -> None:
        """Close the writer: every later append raises Closed. The log stays open."""
        self.append = self._refuse
        self._log = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {'nothing: closed' if self._log is None else self._log.path}>"

    def _live(self) -> Appendable[One, Many, Synced]:
        return self._refuse() if self._log is None else self._log

    @classmethod
    def _refuse(cls, *_: object, **__: object) -> NoReturn:
        raise Closed(f"the writer was closed; `writer()` of the {cls._kind} returns another one")


class Writer(OpenWriter[int, range, int]):
    """Appends to a log until it is closed; get it from `Log.writer`. Threads may share it."""

    _kind = "log"
