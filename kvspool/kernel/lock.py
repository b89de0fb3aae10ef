"""Choose the compiled twin of the append lock, or the interpreted one: the same as the frame loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel import frames
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.lock_py import AppendLock

__all__ = ["AppendLock"]
choose(globals(), __all__, frames.TWIN)
