"""Choose the compiled twin of the loops over chunks, or the interpreted one; the same switch as `kvspool.kernel.frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.chunks_py import Ends, copies, count

__all__ = ["Ends", "copies", "count"]
choose(globals(), __all__, TWIN)
