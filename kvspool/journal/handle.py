"""The interface of an open journal for the modules that verify, repair, flush, trim and archive it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from kvspool.engine.retention import Retention
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Control, Page
    from kvspool.journal.format import Format
    from kvspool.journal.offsets import Offsets
    from kvspool.journal.segments import Segment, Segments
    from kvspool.options import Durability

T = TypeVar("T")


class JournalHandle(Protocol):
    """The part of `kvspool.journal.Journal` for trims and retention."""

    path: Path
    format: Format
    timeout: float
    durability: Durability
    sync_interval: float
    offsets: Offsets
    trim_error: Exception | None

    @property
    def kind(self) -> str: ...

    @property
    def retention(self) -> Retention | None: ...

    @property
    def log_id(self) -> bytes: ...

    def bases(self) -> list[int]: ...

    def control(self, timeout: float) -> Control: ...

    def end(self) -> int: ...

    def first(self) -> int: ...

    def generation(self) -> int: ...

    def locked(self, timeout: float, work: Callable[[], T]) -> T: ...

    def refuse_another(self) -> None: ...

    def refuse_handler(self) -> None: ...

    def segment_of(self, sequence: int) -> Segment | None: ...

    def segments_apart(self) -> Segments: ...

    def under_lock(self, timeout: float, work: Callable[[Appender, Page], T]) -> T: ...
