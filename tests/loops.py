"""The twins of the compiled modules, for tests that run on both."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

from kvspool.kernel import twins as choosing

# Whether this is the run of the interpreted twin, next to one of the compiled twin: it repeats only tests of code that differs by twin.
IS_SECOND_RUN = bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")) and importlib.util.find_spec("kvspool.kernel.frames_c") is not None


def twins(stem: str) -> list[ModuleType]:
    """Return the interpreted loops of a module, as "kvspool.kernel.frames", and after them the compiled ones if they were built.

    The run of the interpreted twin gets only its own: the other run has both.
    """
    found = [interpreted(stem)]
    if not os.environ.get("KVSPOOL_NO_EXTENSIONS") and importlib.util.find_spec(f"{stem}_c") is not None:
        found.append(importlib.import_module(f"{stem}_c"))
    return found


def interpreted(stem: str) -> ModuleType:
    """Return the interpreted loops of a module, of all its sources."""
    return choosing.interpreted(stem, getattr(importlib.import_module(stem), "PARTS", ()))


def twin_names() -> list[str]:
    """Return "interpreted" and, as in `twins`, "compiled": what a process of a test's own is to use."""
    return ["compiled" if module.__name__.endswith("_c") else "interpreted" for module in twins("kvspool.kernel.frames")]
