"""Choose the compiled twin of a module with loops, or the interpreted one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

Twin = Literal["compiled", "interpreted"]


def choose(chooser: dict[str, Any], names: Sequence[str], most: Twin = "compiled") -> Twin:
    """Put these names of a twin into the module `chooser`, whose globals are given, and return which twin it is.

    The interpreted twin is chosen after a build without a C compiler, or an old build without some of the names. KVSPOOL_NO_EXTENSIONS=1 in
    the environment forces it, and so does `most`, the result of another chooser.
    """
    stem = chooser["__name__"]
    twin = _compiled(stem, names) if most == "compiled" and os.environ.get("KVSPOOL_NO_EXTENSIONS") != "1" else None
    found = twin or import_module(f"{stem}_py")
    chooser.update({name: getattr(found, name) for name in names})
    return "interpreted" if twin is None else "compiled"


def _compiled(stem: str, names: Sequence[str]) -> ModuleType | None:
    try:
        twin = import_module(f"{stem}_c")
    except ImportError:
        return None
    return twin if all(hasattr(twin, name) for name in names) else None
