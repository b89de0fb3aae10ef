"""The contents of a directory, so that a test can say that nothing of it changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def tree(root: Path) -> dict[str, object]:
    """Return every path under `root` with its mode, and what a file holds or where a link points."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        status = os.lstat(path)
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (status.st_mode, content)
    return found
