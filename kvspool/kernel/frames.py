"""Choose the compiled twin of the frame loops, or the interpreted one; the other choosers follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.batch_py import Batch, Items, RingSleeper
    from kvspool.kernel.frames_py import crc32c
    from kvspool.kernel.reader_py import FrameReader
    from kvspool.kernel.ring_py import Ring
    from kvspool.kernel.scanner_py import FrameScanner
    from kvspool.kernel.single_py import Single
    from kvspool.kernel.writer_py import FrameWriter, measure, measure_columns

PARTS = ("ring", "reader", "batch", "end", "writer", "single", "scanner")
__all__ = [
    "TWIN",
    "Batch",
    "FrameReader",
    "FrameScanner",
    "FrameWriter",
    "Items",
    "Ring",
    "RingSleeper",
    "Single",
    "crc32c",
    "measure",
    "measure_columns",
]
TWIN = choose(globals(), [name for name in __all__ if name != "TWIN"], parts=PARTS)
