"""Choose the compiled twin of a module with loops, or the interpreted one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

Twin = Literal["compiled", "interpreted"]


def choose(chooser: dict[str, Any], names: Sequence[str], most: Twin = "compiled", parts: tuple[str, ...] = ()) -> Twin:
    """Put these names of a twin into the module `chooser`, whose globals are given, and return which twin it is.

    The interpreted twin is chosen after a build without a C compiler, or an old build without some of the names. KVSPOOL_NO_EXTENSIONS=1 in
    the environment forces it, and so does `most`, the result of another chooser. parts: further sources that are compiled into the same
    module, next to the chooser's own.
    """
    stem = chooser["__name__"]
    twin = _compiled(stem, names) if most == "compiled" and os.environ.get("KVSPOOL_NO_EXTENSIONS") != "1" else None
    found = twin or interpreted(stem, parts)
    chooser.update({name: getattr(found, name) for name in names})
    return "interpreted" if twin is None else "compiled"


@cache
def interpreted(stem: str, parts: tuple[str, ...] = ()) -> ModuleType:
    """Return the interpreted twin: its source, or one module with the names of its source and all parts."""
    source = import_module(f"{stem}_py")
    if not parts:
        return source
    twin = ModuleType(source.__name__)
    for found in (source, *(import_module(f"{stem.rpartition('.')[0]}.{part}_py") for part in parts)):
        vars(twin).update({name: value for name, value in vars(found).items() if not name.startswith("__")})
    return twin


def _compiled(stem: str, names: Sequence[str]) -> ModuleType | None:
    try:
        twin = import_module(f"{stem}_c")
    except ImportError:
        return None
    return twin if all(hasattr(twin, name) for name in names) else None
