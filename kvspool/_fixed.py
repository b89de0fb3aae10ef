"""Choose the compiled twin of the loops over records with items of one length, or the interpreted one; the same switch as `_frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN
from kvspool._twins import choose

if TYPE_CHECKING:
    from kvspool._fixed_py import encode, first_unfit, item_of, last_sound, pass_over, scan

__all__ = ["encode", "first_unfit", "item_of", "last_sound", "pass_over", "scan"]
choose(globals(), __all__, TWIN)
