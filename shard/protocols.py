"""What a log, a shard set and a hub root have in common, for type checkers: a function for all of them takes a `Readable` or a `Writable`.

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


class Records(Iterator[Any], Protocol):
    """An iteration over records, and over Gaps according to `on_gap`. `lost`: sequences in Gaps so far."""

    @property
    def lost(self) -> int: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class AsyncRecords(Protocol):
    """An iteration for `async for`; see `Records`."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    async def __anext__(self) -> Any: ...

    @property
    def lost(self) -> int: ...

    async def aclose(self) -> None: ...


class Opened(Protocol):
    """A handle of the files at `path`, open until `close`; use it in a `with` block."""

    @property
    def path(self) -> Path: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Readable(Opened, Protocol):
    """A log, a shard set or a hub root; see `kvspool.Log` for the verbs."""

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Records: ...

    def read_values(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Records: ...

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
        spin: float = 0.0,
    ) -> Records: ...

    def follow_async(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> AsyncRecords: ...

    def last(self, count: int = 1) -> Sequence[Record]: ...

    def __iter__(self) -> Records: ...

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


class Writable(Opened, Protocol):
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
