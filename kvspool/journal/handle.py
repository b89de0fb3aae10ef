"""The interface of an open journal for the modules that read, verify, repair, flush, trim and archive it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from kvspool.engine.retention import Retention
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Control, Page
    from kvspool.journal.cursor import SegmentCursor, SegmentPlace
    from kvspool.journal.format import Format
    from kvspool.journal.offsets import Offsets
    from kvspool.journal.segments import Segment, Segments
    from kvspool.options import Durability, Isolation, Start
    from kvspool.reader import Lag

T = TypeVar("T")


class JournalHandle(Protocol):
    """The part of `kvspool.journal.Journal` for these modules."""

    path: Path
    timeout: float
    durability: Durability
    sync_interval: float
    offsets: Offsets
    trim_error: Exception | None

    @property
    def format(self) -> Format: ...

    @property
    def kind(self) -> str: ...

    @property
    def retention(self) -> Retention | None: ...

    @property
    def log_id(self) -> bytes: ...

    def bases(self) -> list[int]: ...

    def check_open(self) -> None: ...

    def clamped(self, sequence: int) -> int: ...

    def committed(self) -> None: ...

    def control(self, timeout: float) -> Control: ...

    def cursor_from(self, place: SegmentPlace, end: int | None, isolation: Isolation = "appended") -> SegmentCursor: ...

    def end(self) -> int: ...

    def end_of_read(self, isolation: Isolation) -> int: ...

    def first(self) -> int: ...

    def flush_for_commit(self, sequence: int) -> None: ...

    def generation(self) -> int: ...

    def lag(self, sequence: int) -> Lag: ...

    def locked(self, timeout: float, work: Callable[[], T]) -> T: ...

    def place(self, start: Start) -> SegmentPlace: ...

    def place_seen(self, start: Start, isolation: Isolation) -> SegmentPlace: ...

    def readable_end(self) -> int: ...

    def refuse_another(self) -> None: ...

    def refuse_handler(self) -> None: ...

    def segment_of(self, sequence: int) -> Segment | None: ...

    def segments_apart(self) -> Segments: ...

    def under_lock(self, timeout: float, work: Callable[[Appender, Page], T]) -> T: ...
