"""Choose the compiled twin of the frame loops, or the interpreted one.

KVSPOOL_NO_EXTENSIONS=1 in the environment forces the interpreted one; so does a build without a C compiler.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvspool._frames_py import (
        Batch,
        Bell,
        Burst,
        FlushGroup,
        FrameReader,
        FrameSurvey,
        FrameWriter,
        Items,
        Ring,
        Single,
        crc32c,
        measure,
    )

    TWIN = "interpreted"
else:
    try:
        if os.environ.get("KVSPOOL_NO_EXTENSIONS") == "1":
            raise ImportError
        from kvspool._frames_c import (
            Batch,
            Bell,
            Burst,
            FlushGroup,
            FrameReader,
            FrameSurvey,
            FrameWriter,
            Items,
            Ring,
            Single,
            crc32c,
            measure,
        )

        TWIN = "compiled"
    except ImportError:
        from kvspool._frames_py import (
            Batch,
            Bell,
            Burst,
            FlushGroup,
            FrameReader,
            FrameSurvey,
            FrameWriter,
            Items,
            Ring,
            Single,
            crc32c,
            measure,
        )

        TWIN = "interpreted"

__all__ = [
    "TWIN",
    "Batch",
    "Bell",
    "Burst",
    "FlushGroup",
    "FrameReader",
    "FrameSurvey",
    "FrameWriter",
    "Items",
    "Ring",
    "Single",
    "crc32c",
    "measure",
]
