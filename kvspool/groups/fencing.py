"""Replace a file so that a former owner, which may be stopped at any instruction, can't replace it any more.

The owner writes a temporary file of its own, checks that it still is the owner, and renames the file. A successor first makes that check
fail, and then removes the temporary files. So a rename of the former owner either precedes the removal, and the successor reads its result,
or finds no file. No lock is held that a stopped process could keep.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.errors import Revoked
from kvspool.groups.share import Fence
from kvspool.system import disk

_SUFFIX = ".fenced"


def replace_fenced(path: Path, data: bytes, mode: int, done: str, fence: Fence) -> None:
    """Replace a file as `disk.replace` does. Raises Revoked, and then the file does not change."""
    temporary = path.with_name(f"{path.name}.{system.port.random(8).hex()}{_SUFFIX}")
    try:
        disk.replace(path, data, mode, temporary=temporary, done=done, check=fence)
    except FileNotFoundError:
        fence()  # removed by a successor
        raise
    except Revoked:
        with suppress(OSError):
            system.port.remove(temporary)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files of former owners, after their fence was closed."""
    with suppress(FileNotFoundError):
        for name in system.port.names(path.parent):
            if name.startswith(f"{path.name}.") and name.endswith(_SUFFIX):
                with suppress(FileNotFoundError):
                    system.port.remove(path.with_name(name))
