"""Choose the compiled twin of the loops of a merge, or the interpreted one; the same switch as `kvspool._frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN
from kvspool._twins import choose

if TYPE_CHECKING:
    from shard._merge_py import FollowingLoops, MergeSource, Merging, placed

__all__ = ["FollowingLoops", "MergeSource", "Merging", "placed"]
choose(globals(), __all__, TWIN)
