"""Move records from a source to a target: the loop of copies, imports, exports and the salvage of a damaged log.

A source is an iterator of `Rows` and Gaps. The mover checks each batch against the target, appends it, counts it, and reports progress. So
what is counted when an error ends the move was appended.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from kvspool.engine.rows import Room, Rows, latest, lost, may_lose
from kvspool.errors import GapError, NotKept
from kvspool.gap import Gap
from kvspool.options import OnGap
from kvspool.record import NO_TIME


class Target(ABC):
    """A target. format: its name; room: fields that its records can store; most: bytes that are appended at once."""

    format: str
    room: Room
    most = sys.maxsize
    last_time = NO_TIME

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, rows: Rows) -> None:  # noqa: B027
        """Raise TooLarge, or ValueError, for rows that can't be appended."""

    def too_late(self, rows: Rows) -> int | None:
        """Return the sequence of the first record whose time is too far ahead for the target; None if there is none."""
        return None

    @abstractmethod
    def append(self, rows: Rows, at: int | None = None) -> range:
        """Append rows, and return their sequences. at: the first one; raises OtherRecords if another program appends, too."""

    @abstractmethod
    def close(self) -> None:
        """Release all files and locks."""

    def refuse_unfit(self, rows: Rows) -> None:
        """Raise TooLarge, or ValueError, naming the record that can't be appended."""
        try:
            self.check(rows)
        except ValueError:
            for row in range(len(rows.values)):
                try:
                    self.check(rows.part(row, row + 1))
                except ValueError as error:
                    raise type(error)(f"record {rows.first + row} does not fit into {self.path}: {error}") from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mover:
    """One move, and its counts.

    records, bytes: moved so far; bytes are those of keys and values. gaps: of the source. first, last: sequences of the moved records in
    the target, None for no record. lost: fields that the target can't store, with the sequence of the first such record.
    """

    def __init__(self, target: Target, room: Room, *, name: str = "", on_gap: OnGap = "raise", is_lossy: bool = False) -> None:
        """room: of the source; name: of the source, for errors. is_lossy: move records without the fields that the target can't store."""
        self.target = target
        self.name = name
        self.kinds = may_lose(room, target.room)
        self.is_lossy = is_lossy
        self.on_gap = on_gap
        self.records = self.bytes = 0
        self.gaps: list[Gap] = []
        self.first: int | None = None
        self.last: int | None = None
        self.lost: dict[str, int] = {}

    def move(self, items: Iterable[Rows | Gap], progress: Callable[[], object] | None = None) -> None:
        """Move all records of a source. progress: called after each batch.

        Raises GapError, NotKept, and the errors of the source and the target.
        """
        for item in items:
            if isinstance(item, Gap):
                self.skip(item)
                continue
            self.put(item)
            if progress is not None:
                progress()

    def skip(self, gap: Gap) -> None:
        """Continue after lost records of the source."""
        self.gaps.append(gap)
        if self.on_gap == "raise":
            raise GapError(gap)

    def put(self, rows: Rows, at: int | None = None) -> None:
        """Append a batch whose first record gets the sequence `at`; None: the next one."""
        self.target.refuse_unfit(rows)
        if self.kinds:
            found = lost(rows, self.kinds, self.target.room, self.target.last_time)
            if not self.is_lossy:
                self.refuse_loss(found)
            self.lost = {**found, **self.lost}
        if (late := self.target.too_late(rows)) is not None:
            self.lost = {"timestamps": late, **self.lost}
        for part in rows.parts(self.target.most):
            appended = self.target.append(part, at)
            self.first = appended.start if self.first is None else self.first
            self.last = appended.stop - 1
            self.records += len(part.values)
            self.bytes += part.size
            at = None if at is None else appended.stop
        self.target.last_time = latest(rows, self.target.last_time, self.target.room)

    def refuse_loss(self, found: dict[str, int]) -> None:
        """Raise NotKept for fields that the target can't store."""
        if found:
            words = ", ".join(f"{kind} (sequence {sequence})" for kind, sequence in found.items())
            raise NotKept(
                f"records of {self.name} have fields that the format {self.target.format} can't store: {words}; "
                "choose another one, or lossy=True (--lossy)"
            )


def limited(items: Iterator[Rows | Gap], left: int | None) -> Iterator[Rows | Gap]:
    """Yield rows and gaps up to a number of records."""
    for item in items:
        if left is None or isinstance(item, Gap):
            if left != 0:
                yield item
            continue
        if left < len(item.values):
            item = item.part(0, left)
        if not item.values:
            return
        left -= len(item.values)
        yield item
