"""Choose the compiled twin of the loops of a merge, or the interpreted one; the same switch as `kvspool.kernel.frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from shard.kernel.following_py import FollowingLoops
    from shard.kernel.merge_py import MergeSource, Merging, placed

PARTS = ("following",)
__all__ = ["FollowingLoops", "MergeSource", "Merging", "placed"]
choose(globals(), __all__, TWIN, PARTS)
