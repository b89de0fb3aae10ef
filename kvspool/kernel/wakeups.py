"""Choose the compiled twin of the wait for events, or the interpreted one; the same switch as `kvspool.kernel.frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.wakeups_py import FileSleeper, Waiting

__all__ = ["FileSleeper", "Waiting"]
choose(globals(), __all__, TWIN)
