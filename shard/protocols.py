"""The verbs that logs, shard sets and hub roots share, for type checkers. A function for all of them takes a `Readable` or a `Writable`.

    def newest(source: shard.Readable) -> list[str]:
        return [record.time.isoformat() for record in source.last(10)]
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from kvspool.options import Isolation, OnGap
from kvspool.record import Record
from shard.place import Place

Start = Literal["earliest", "latest"] | datetime
"""The starts that all of them take. Sequences belong to one log: a shard set takes one for each shard."""


class RecordIteration(Iterator[Any], Protocol):
    """An iteration over records, and over Gaps according to `on_gap`. `missed`: sequences in Gaps so far."""

    @property
    def missed(self) -> int: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class AsyncRecordIteration(Protocol):
    """An iteration for `async for`; see `RecordIteration`."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    async def __anext__(self) -> Any: ...

    @property
    def missed(self) -> int: ...

    async def aclose(self) -> None: ...


class OpenHandle(Protocol):
    """A handle of the files at `path`, open until `close`; use it in a `with` block."""

    @property
    def path(self) -> Path: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Readable(OpenHandle, Protocol):
    """A log, a shard set or a hub root; see `kvspool.Log` for the verbs."""

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> RecordIteration: ...

    def read_values(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> RecordIteration: ...

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
        spin: float = 0.0,
    ) -> RecordIteration: ...

    def follow_async(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> AsyncRecordIteration: ...

    def last(self, count: int = 1) -> Sequence[Record]: ...

    def __iter__(self) -> RecordIteration: ...

    def __len__(self) -> int: ...


class Writes(Protocol):
    """The appends of a `with` block; see `kvspool.writer.Writer`."""

    @property
    def append(self) -> Callable[..., int | Place]: ...

    def append_many(
        self, values: Iterable[Any], *, keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> range | dict[int, range]: ...

    def sync(self, timeout: float | None = None) -> int | dict[int, int]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: Any) -> None: ...


class Writable(OpenHandle, Protocol):
    """A log or a shard set; see `kvspool.Log` for the verbs. A log returns sequences, a shard set the sequences of each shard."""

    @property
    def capabilities(self) -> frozenset[str]: ...

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> int | Place: ...

    def append_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> range | dict[int, range]: ...

    def writer(self, timeout: float | None = None) -> Writes: ...

    def sync(self, timeout: float | None = None) -> int | dict[int, int]: ...
