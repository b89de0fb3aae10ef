"""Choose the compiled twin of the hash and its appends, or the interpreted one; the same switch as `kvspool.kernel.frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from shard.kernel.hash_py import Spread, group, hash16, hash_column

__all__ = ["Spread", "group", "hash16", "hash_column"]
choose(globals(), __all__, TWIN)
