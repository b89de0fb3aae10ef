"""Choose the compiled twin of the loops over chunks, or the interpreted one; the same switch as `kvspool._frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN
from kvspool._twins import choose

if TYPE_CHECKING:
    from kvspool._chunks_py import Ends, copies, count

__all__ = ["Ends", "copies", "count"]
choose(globals(), __all__, TWIN)
