"""Words for the offsets of batches in Spark's checkpoint, by which a sink notices an older checkpoint.

Spark writes the offsets of a batch once, before the batch, and repeats the batch with them. A checkpoint that was restored from an older
copy may use the number of the batch again, with other offsets.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def word_of(checkpoint: str, batch: int) -> int:
    """Return a number for the offsets of a batch; 0 if they are not in a file that this process can read."""
    path = checkpoint.removeprefix("file://")
    if not path or "://" in path:
        return 0
    try:
        return number_of(Path(path, "offsets", str(batch)).read_bytes())
    except OSError:
        return 0


def number_of(data: bytes) -> int:
    """Return a positive number of 62 bits for some bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2 | 1
