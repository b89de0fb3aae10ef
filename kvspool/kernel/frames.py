"""Choose the compiled twin of the frame loops, or the interpreted one; the other choosers follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.frames_py import (
        Batch,
        FrameReader,
        FrameSurvey,
        FrameWriter,
        Items,
        Ring,
        RingSleeper,
        Single,
        crc32c,
        measure,
        measure_columns,
    )

__all__ = [
    "TWIN",
    "Batch",
    "FrameReader",
    "FrameSurvey",
    "FrameWriter",
    "Items",
    "Ring",
    "RingSleeper",
    "Single",
    "crc32c",
    "measure",
    "measure_columns",
]
TWIN = choose(globals(), [name for name in __all__ if name != "TWIN"])
