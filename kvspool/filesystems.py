"""On which file system a path lies, and whether processes share memory and locks there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvspool import system
from kvspool.errors import UnsafeFilesystem

SAFE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "f2fs", "bcachefs", "zfs", "overlay", "ramfs"})
COPYING = frozenset({"btrfs", "zfs", "bcachefs", "f2fs"})  # need new blocks to overwrite old ones: a full disk kills whoever stores
_OCTAL = re.compile(r"\\([0-7]{3})")


def of(path: Path) -> str:
    """Return the kernel's name for the file system that an existing path lies on; "unknown" if no mount has it."""
    path = Path(os.path.realpath(path))
    best, name = -1, "unknown"
    for line in system.port.mounts().splitlines():
        fields, _, rest = line.partition(" - ")
        parts = fields.split()
        if len(parts) < 5 or not rest:
            continue
        mount = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), parts[4]))
        # Of mounts on the same directory the last one is on top.
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, name = len(mount.parts), rest.split()[0]
    return name


def refuse_unsafe(directory: Path) -> None:
    """Raise UnsafeFilesystem unless `directory` lies where mappings and locks are shared between processes."""
    name = of(directory)
    if name not in SAFE:
        raise UnsafeFilesystem(
            f"{directory} lies on {name}, where processes don't reliably share memory and locks; use a local disk or tmpfs, "
            "or pass allow_unsafe_fs=True if you know that they do"
        )
