"""Choose the compiled twin of the loops over records with items of one length, or the interpreted one; the same switch as `frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.fixed_py import encode, first_unfit, item_of, last_sound, pass_over, scan

__all__ = ["encode", "first_unfit", "item_of", "last_sound", "pass_over", "scan"]
choose(globals(), __all__, TWIN)
