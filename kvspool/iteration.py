"""What is the same in iterations over logs of every kind: a limit, what is copied out in advance, and what becomes of Gaps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from kvspool._frames import Batch, Items
from kvspool.errors import GapError
from kvspool.handles import Handle
from kvspool.record import Gap

OnGap = Literal["raise", "yield", "skip"]


class Moving(Protocol):
    """A cursor, as far as an iteration needs to know it. lost: how many sequences lay in Gaps so far."""

    lost: int

    def close(self) -> None:
        """Let go of the log."""


C = TypeVar("C", bound=Moving)


class Iteration(Iterator[Any], Generic[C], Handle):
    """Iterates over records, and over Gaps as `on_gap` says.

    "raise": GapError, and the next call goes on behind it. "yield": the Gap in place of the records. "skip": only counted, in
    `lost`. Not to be shared between threads.
    """

    AT_ONCE: ClassVar[int]  # records copied out at once

    def __init__(self, cursor: C, limit: int | None, on_gap: OnGap) -> None:
        check(limit, on_gap)
        self.cursor = cursor
        self._batch = Batch(-1 if limit is None else limit)
        self._on_gap = on_gap

    @property
    def lost(self) -> int:
        """Return how many sequences lay in Gaps so far."""
        return self.cursor.lost

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will be handed out: the limit was reached, or we were closed."""
        return self._batch.left == 0

    @property
    def has_items(self) -> bool:
        """Return whether the next record was copied out already."""
        return self._batch.at < len(self._batch.items)

    def poll(self, most: int | None = None) -> list[Any]:
        """Return what is there now, up to `most` records (None: as many as are copied out at once), without blocking: records, or one Gap,
        or nothing.

        Raises nothing for a Gap, whatever `on_gap` is: the caller sees it.
        """
        batch = self._fetch(self.AT_ONCE if most is None else most)
        self._batch.clear()
        return batch

    def next_or_none(self) -> Any:
        """Return the next record, or a Gap, without blocking; None if there is nothing now."""
        if self._batch.at == len(self._batch.items):
            batch = self._fetch(self.AT_ONCE)
            if not batch or isinstance(batch[0], Gap):
                return batch[0] if batch else None
        self._batch.at += 1
        return self._batch.items[self._batch.at - 1]

    @abstractmethod
    def _fetch(self, most: int) -> list[Any]:
        """Copy up to `most` records out, into the batch, and return them, or one Gap; called once everything was handed out."""

    def __iter__(self) -> Iterator[Any]:
        return Items(self._batch, self._refill)

    def __next__(self) -> Any:
        return self._batch.take(self._refill)

    def _refill(self) -> Any:
        """Return the next record, or Gap, when all that was copied out is handed out."""
        while (left := self._batch.left) != 0:
            batch = self._next_batch(self.AT_ONCE if left < 0 else min(self.AT_ONCE, left))
            if not batch:
                break
            item = batch[0]
            if not isinstance(item, Gap):
                self._batch.at = 1
                self._batch.left -= left > 0
                return item
            if self._on_gap == "raise":
                raise GapError(item)
            if self._on_gap == "yield":
                return item
        raise StopIteration

    def _next_batch(self, most: int) -> list[Any]:
        """Return what `_fetch` does; who follows a log waits for it."""
        return self._fetch(most)

    def close(self) -> None:
        """Let go of the log; the iteration is over."""
        self._batch.left = 0
        self.cursor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check(limit: int | None, on_gap: OnGap) -> None:
    """Raise ValueError for a limit, or a way to treat Gaps, that is none."""
    if on_gap not in ("raise", "yield", "skip"):
        raise ValueError(f'on_gap is "raise", "yield" or "skip", not {on_gap!r}')
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of records, not {limit}")
