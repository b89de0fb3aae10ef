"""The file system of a path, and whether processes share memory and locks there.

**btrfs** needs new blocks for a store through a mapping, reserved or not: on a full disk the kernel kills the storing process, or blocks it
for minutes. `chattr +C` only helps until metadata runs out or a user makes a snapshot. So spools and queues, which are written through
mappings, are refused there, and spools are opened read-only, unless the caller takes the risk. Journals are written by `write`, which
reports the full disk as an error.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from kvspool import system
from kvspool.errors import UnsafeFilesystem

SAFE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "f2fs", "bcachefs", "zfs", "overlay", "ramfs"})
COPYING = frozenset({"btrfs", "zfs", "bcachefs", "f2fs"})  # need new blocks to overwrite old ones: a store on a full disk kills its process
KILLING = frozenset({"btrfs"})  # those for which that was measured
ALLOWED = "KVSPOOL_ALLOW_UNSAFE_FS"  # environment variable that accepts the risk for the whole process, as "1"
_OCTAL = re.compile(r"\\([0-7]{3})")


def of(path: Path) -> str:
    """Return the kernel's name for the file system of an existing path; "unknown" if no mount has it."""
    real = f"{os.path.realpath(path)}/"
    best, name = -1, "unknown"
    for mount, kind in _parsed(system.port.mounts()):
        # Of mounts on the same directory the last one is on top.
        if len(mount) > best and real.startswith(mount):
            best, name = len(mount), kind
    return name


@lru_cache(maxsize=1)
def _parsed(mounts: str) -> list[tuple[str, str]]:
    """Return the directory of each mount, with a slash at its end, and the name of its file system, the last one first."""
    found = []
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        parts = fields.split()
        if len(parts) >= 5 and rest:
            mount = _OCTAL.sub(lambda match: chr(int(match[1], 8)), parts[4]).rstrip("/")
            found.append((f"{mount}/", rest.split()[0]))
    return found[::-1]


def are_unsafe_allowed() -> bool:
    """Return whether the environment accepts the risk."""
    return os.environ.get(ALLOWED) == "1"


def kills(path: Path) -> bool:
    """Return whether a store to a mapped file at an existing path may kill its process, and the environment doesn't accept that risk."""
    return not are_unsafe_allowed() and of(path) in KILLING


def killing(path: Path, done: str) -> UnsafeFilesystem:
    """Return the error for an operation refused because of `kills`; `done`: the result so far, in words."""
    return UnsafeFilesystem(
        f"{path} is on {of(path)}, where a store to a mapped file kills its process when the disk is full, though the space is reserved. "
        f"{done}; use a journal (format=\"kvj\"), or ext4, xfs or tmpfs. To take the risk, pass allow_unsafe_fs=True or set {ALLOWED}=1"
    )


def refuse_killing(directory: Path) -> None:
    """Raise UnsafeFilesystem if `kills` returns True."""
    if kills(directory):
        raise killing(directory, "Nothing was done")


def refuse_unsafe(directory: Path) -> None:
    """Raise UnsafeFilesystem unless mappings and locks in `directory` are shared between processes."""
    name = of(directory)
    if name not in SAFE and not are_unsafe_allowed():
        raise UnsafeFilesystem(
            f"{directory} is on {name}, where processes don't reliably share memory and locks; use a local disk or tmpfs, "
            "or pass allow_unsafe_fs=True if you know that they do"
        )
