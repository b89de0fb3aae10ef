"""Choose the compiled twin of a journal's tail, or the interpreted one: the same as the append lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool import _frames
from kvspool._twins import choose

if TYPE_CHECKING:
    from kvspool._tail_py import Tail

__all__ = ["Tail"]
choose(globals(), __all__, _frames.TWIN)
