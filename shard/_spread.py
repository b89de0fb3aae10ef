"""Choose the compiled twin of the appends of a shard set, or the interpreted one; the same switch as `kvspool._frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN
from kvspool._twins import choose

if TYPE_CHECKING:
    from shard._spread_py import Spread

__all__ = ["Spread"]
choose(globals(), __all__, TWIN)
