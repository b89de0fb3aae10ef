"""Choose the compiled twin of the loops over records with items of one length, or the interpreted one; the same switch as `_frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN

if TYPE_CHECKING:
    from kvspool._fixed_py import encode, first_unfit, item_of, last_sound, pass_over, scan
else:
    try:
        if TWIN == "interpreted":
            raise ImportError
        from kvspool._fixed_c import encode, first_unfit, item_of, last_sound, pass_over, scan
    except ImportError:
        from kvspool._fixed_py import encode, first_unfit, item_of, last_sound, pass_over, scan

__all__ = ["encode", "first_unfit", "item_of", "last_sound", "pass_over", "scan"]
