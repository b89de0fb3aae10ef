"""A hub whose disk becomes full, for real: it refuses what it has no room for, serves its readers, and goes on once there is room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shipping import contents, eventually, shipping

import kvspool
from hub.remote import RemoteHub
from kvspool.journal import Journal

DISK = 24 << 20  # bytes
FILLER = 20 << 20  # bytes of it that something else takes
RECORDS, SIZE = 8000, 1000  # of the log: more than what is left

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a small disk needs root")


class Hub:
    """`kvspool hub serve` with its root on a small disk, which only it can see, and who knows its number: `root` leads there."""

    def __init__(self, disk: Path, level: str, least_free: int) -> None:
        mount = f"mount --make-rprivate / && mount -t tmpfs -o size={DISK},mode=700 tmpfs {disk} && truncate -s 0 {disk}/filler"
        fill = f"dd if=/dev/zero of={disk}/filler bs=1M count={FILLER >> 20} status=none"
        words = ["--listen", "127.0.0.1:0", "--least-free", least_free, "--level", level, "--no-page", "--json", "--anonymous"]
        serve = " ".join([sys.executable, "-m", "kvspool.cli", "hub", "serve", "--root", f"{disk}/root", *map(str, words)])
        command = ["unshare", "--mount", "sh", "-c", f"{mount} && {fill} && exec {serve}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            pytest.skip(f"NOT TESTED HERE: this machine lets nobody mount: {self.process.communicate()[1].strip()}")
        self.location = json.loads(said)["location"]
        self.disk = Path(f"/proc/{self.process.pid}/root{disk}")

    def free(self) -> int:
        """Return the bytes that are free on its disk."""
        found = os.statvfs(self.disk)
        return found.f_bavail * found.f_frsize

    def end(self) -> str:
        """Return what it said, once it has ended."""
        self.process.terminate()
        _, said = self.process.communicate(timeout=30)
        return said


@pytest.fixture(params=[("process", 2 << 20), ("disk", 2 << 20), ("process", 0), ("disk", 0)], ids=lambda given: f"{given[0]}-{given[1]}")
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    """A hub that leaves some of its disk free, or none of it: then the system says that there is no room."""
    (tmp_path / "disk").mkdir()
    served = Hub(tmp_path / "disk", *request.param)
    yield served
    served.process.kill()
    served.process.communicate()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[kvspool.Spool]:
    with kvspool.create(tmp_path / "log", capacity="16MiB") as log:
        log.append_many([b"%08d" % number + os.urandom(SIZE - 8) for number in range(RECORDS)])
        yield log


def test_a_full_disk_refuses_serves_readers_and_goes_on(hub: Hub, log: kvspool.Spool) -> None:
    with shipping(log.path, hub.location) as shipper, RemoteHub(hub.location) as remote:
        eventually(lambda: "free" in shipper.status().error or "space" in shipper.status().error)
        stored = remote.read_arrow("client", 0)
        assert 0 < stored.num_rows < RECORDS
        assert stored.column("value").to_pylist() == [record.value for record in log.read(limit=stored.num_rows)]
        assert shipper.status().behind == RECORDS - stored.num_rows
        os.remove(hub.disk / "filler")
        eventually(lambda: shipper.status().behind == 0)
        assert shipper.status().lost == 0
    with kvspool.open(hub.disk / "root" / "client") as journal:
        assert isinstance(journal, Journal)
        assert contents(journal) == contents(log)
        assert journal.verify().is_sound
