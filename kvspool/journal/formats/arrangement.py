"""The two layouts of a journal's files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from kvspool.engine import sizes
from kvspool.journal import sidecars
from kvspool.journal.format import LARGEST_SEGMENT, Format
from kvspool.journal.offsets import OffsetFiles, Offsets

_STEM = re.compile(r"[0-9a-f]{16}")


class Nested(Format):
    """The journal's directory contains one for the segments, named after their suffix, and `ofs` for the readers; kvspool's own is next to
    them.

    A segment's name gives the sequence of its first record. A new one begins once one has reached `segment_bytes`.
    """

    suffix: ClassVar[str]
    can_be_renamed = begins_anywhere = True

    def __init__(self, segment_bytes: int | str) -> None:
        self.segment_bytes = self.full_at = sizes.parse(segment_bytes)
        if not 1 <= self.segment_bytes <= LARGEST_SEGMENT:
            raise ValueError(f"a segment has 1 to {LARGEST_SEGMENT} bytes, not {segment_bytes}")

    def limits(self) -> dict[str, int]:
        return {"segment_bytes": self.segment_bytes}

    @classmethod
    def lies_at(cls, path: Path, *, is_sure: bool) -> bool:
        return (path / cls.suffix).is_dir()

    def segments_in(self, path: Path) -> Path:
        return path / self.suffix

    @classmethod
    def sidecar(cls, path: Path) -> Path:
        return path

    def offsets(self, path: Path, mode: int) -> Offsets:
        return OffsetFiles(path / "ofs", mode)

    def name_of(self, base: int) -> str | None:
        return f"{base:016x}.{self.suffix}"

    def base_of(self, name: str) -> int | None:
        stem, _, suffix = name.rpartition(".")
        return int(stem, 16) if suffix == self.suffix and _STEM.fullmatch(stem) else None

    def is_full(self, base: int, end: int, sequence: int) -> bool:
        return end >= self.segment_bytes and sequence > base


class Bare(Format):
    """The journal's directory contains only the segments; kvspool's files are in a hidden directory next to it: see `sidecars`."""

    def segments_in(self, path: Path) -> Path:
        return path

    def lock_file(self, path: Path) -> Path:
        return sidecars.lock_file(path)

    @classmethod
    def sidecar(cls, path: Path) -> Path:
        return sidecars.beside(path)

    def prepare(self, path: Path, *, is_new: bool = False) -> None:
        sidecars.prepare(path, is_new=is_new)
