"""A journal of sej with small segments, and damage at a place in it."""

from __future__ import annotations

from pathlib import Path

import kvspool
from kvspool.journal import Journal

EACH, SIZE = 10, 36  # messages of a segment, and bytes of a message


def make(path: Path) -> Journal:
    """Make a journal of three full segments and one of five records."""
    log = kvspool.create(path, format="sej", segment_bytes=EACH * SIZE)
    log.append_many([b"%010d" % number for number in range(35)])
    return log


def segment(log: Journal, base: int) -> Path:
    """Return the file of the segment that begins with the sequence `base`."""
    return log.segments_apart().path_of(base)


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
