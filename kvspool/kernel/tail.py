"""Choose the compiled twin of a journal's tail, or the interpreted one: the same as the append lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel import frames
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.tail_py import Tail

__all__ = ["Tail"]
choose(globals(), __all__, frames.TWIN)
