"""Choose the compiled twin of the window of a task list, or the interpreted one: the same as the frame loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel import frames
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.taking_py import TaskWindow

PARTS = ("waiting", "taking")
__all__ = ["TaskWindow"]
choose(globals(), __all__, frames.TWIN, PARTS)
