"""The file system of a path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvspool import errors, system
from kvspool.system import filesystems

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:20 / /mnt rw - nfs4 server:/export rw
24 23 0:21 / /mnt/fast rw,nosuid master:3 shared:7 - tmpfs tmpfs rw
25 22 0:22 / /with\040space rw - fuse.sshfs host: rw
26 22 0:23 / /over rw - ext4 /dev/vdb rw
27 26 0:24 / /over rw - 9p host rw
broken line
28 22
"""


class Mounted(system.Port):
    """A machine with these mounts."""

    def mounts(self) -> str:
        return MOUNTS


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "ext4"),
        ("/nonexistent/a", "ext4"),
        ("/mnt", "nfs4"),
        ("/mnt/slow", "nfs4"),
        ("/mnt/fast/deep/er", "tmpfs"),
        ("/mnt/faster", "nfs4"),
        ("/with space/a", "fuse.sshfs"),
        ("/over/a", "9p"),
    ],
)
def test_the_deepest_mount_that_is_on_top_counts(path: str, name: str) -> None:
    with system.replaced(Mounted()):
        assert filesystems.of(Path(path)) == name


def test_links_are_followed_to_where_the_path_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/mnt/fast")
    with system.replaced(Mounted()):
        assert filesystems.of(tmp_path / "link") == "tmpfs"


@pytest.mark.parametrize("path", ["/mnt", "/with space", "/over"])
def test_where_processes_do_not_share_memory_is_refused_by_name(path: str) -> None:
    with system.replaced(Mounted()), pytest.raises(errors.UnsafeFilesystem, match="allow_unsafe_fs=True"):
        filesystems.refuse_unsafe(Path(path))


def test_local_disks_and_tmpfs_are_taken() -> None:
    with system.replaced(Mounted()):
        filesystems.refuse_unsafe(Path("/"))
        filesystems.refuse_unsafe(Path("/mnt/fast"))


def test_no_mounts_are_an_unknown_file_system_and_refused() -> None:
    class Bare(system.Port):
        def mounts(self) -> str:
            return ""

    with system.replaced(Bare()):
        assert filesystems.of(Path("/")) == "unknown"
        with pytest.raises(errors.UnsafeFilesystem):
            filesystems.refuse_unsafe(Path("/"))


def test_this_machine_knows_its_own() -> None:
    if os.path.ismount("/dev/shm"):
        assert filesystems.of(Path("/dev/shm")) == "tmpfs"
    assert filesystems.of(Path("/proc/self")) == "proc"
