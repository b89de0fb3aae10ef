"""Choose the compiled twin of the loops over chunks, or the interpreted one; the same switch as `kvspool._frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN

if TYPE_CHECKING:
    from kvspool._chunks_py import Ends, copies, count
else:
    try:
        if TWIN == "interpreted":
            raise ImportError
        from kvspool._chunks_c import Ends, copies, count
    except ImportError:
        from kvspool._chunks_py import Ends, copies, count

__all__ = ["Ends", "copies", "count"]
