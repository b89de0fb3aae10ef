"""The campaign of crash images, for the tests that take a slice of it or its disks in memory; and a restarted machine."""

from __future__ import annotations

import os

from campaigns import campaign

from kvspool import system

OTHER_BOOT = bytes(range(16))


crash_images = campaign("crash_images")


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
