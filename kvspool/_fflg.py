"""Choose the compiled twin of the loops over FFLG entries, or the interpreted one; the same switch as `_frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN

if TYPE_CHECKING:
    from kvspool._fflg_py import encode, pass_over, scan
else:
    try:
        if TWIN == "interpreted":
            raise ImportError
        from kvspool._fflg_c import encode, pass_over, scan
    except ImportError:
        from kvspool._fflg_py import encode, pass_over, scan

__all__ = ["encode", "pass_over", "scan"]
