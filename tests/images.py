"""The campaign of crash images, for the tests that take a slice of it or its disks in memory; and a restarted machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from kvspool import system

OTHER_BOOT = bytes(range(16))


def _load() -> ModuleType:
    path = Path(__file__).parent.parent / "tools" / "faults" / "crash_images.py"
    spec = importlib.util.spec_from_file_location("crash_images", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["crash_images"] = module
    spec.loader.exec_module(module)
    return module


crash_images = _load()


class Rebooted(system.Port):
    """A restarted machine."""

    def boot_id(self) -> bytes:
        return OTHER_BOOT


class ReadOnly(Rebooted):
    """A restarted machine, for a user without permission to write."""

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
        if flags & os.O_RDWR and not flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return super().open(path, flags, mode)
