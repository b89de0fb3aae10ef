"""Choose the compiled twin of the loops over sej messages, or the interpreted one; the same switch as `frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.sej_py import encode, pass_over, scan

__all__ = ["encode", "pass_over", "scan"]
choose(globals(), __all__, TWIN)
