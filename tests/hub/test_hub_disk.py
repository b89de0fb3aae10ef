"""A hub whose disk really becomes full: it refuses batches, serves its readers, and accepts batches again once there is room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes_of_a_hub import ServeCommand
from shipping import contents, eventually, shipping

import kvspool
from hub.client.remote import RemoteHub
from kvspool.journal import Journal

DISK = 24 << 20  # bytes
FILLER = 20 << 20  # bytes of it that something else takes
RECORDS, SIZE = 8000, 1000  # of the log: more than what is left

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a small disk needs root")


class Hub(ServeCommand):
    """A hub whose root is on a small disk, which only it can see, and who knows its number: `disk` leads there."""

    def __init__(self, disk: Path, level: str, least_free: int) -> None:
        mount = f"mount --make-rprivate / && mount -t tmpfs -o size={DISK},mode=700 tmpfs {disk}"
        fill = f"dd if=/dev/zero of={disk}/filler bs=1M count={FILLER >> 20} status=none"
        before = ["unshare", "--mount", "sh", "-c", f'{mount} && {fill} && exec "$@"', "sh"]
        super().__init__(disk / "root", "--anonymous", "--least-free", least_free, "--level", level, before=before)
        if not self.said:
            pytest.skip(f"NOT TESTED HERE: this machine lets nobody mount: {self.kill().strip()}")
        self.disk = Path(f"/proc/{self.process.pid}/root{disk}")


@pytest.fixture(params=[("process", 2 << 20), ("disk", 2 << 20), ("process", 0), ("disk", 0)], ids=lambda given: f"{given[0]}-{given[1]}")
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    """A hub that leaves some of its disk free, or none of it: then the system says that there is no room."""
    (tmp_path / "disk").mkdir()
    with Hub(tmp_path / "disk", *request.param) as served:
        yield served


@pytest.fixture
def log(tmp_path: Path) -> Iterator[kvspool.Spool]:
    with kvspool.create(tmp_path / "log", capacity="16MiB") as log:
        log.append_many([b"%08d" % number + os.urandom(SIZE - 8) for number in range(RECORDS)])
        yield log


def test_a_full_disk_refuses_serves_readers_and_continues(hub: Hub, log: kvspool.Spool) -> None:
    with shipping(log.path, hub.location) as shipper, RemoteHub(hub.location) as remote:
        eventually(lambda: "free" in shipper.status().error or "space" in shipper.status().error)
        stored = remote.read_arrow("client", 0)
        assert 0 < stored.num_rows < RECORDS
        assert stored.column("value").to_pylist() == [record.value for record in log.read(limit=stored.num_rows)]
        # The refusal may come before the acknowledgement; then the shipper learns at its next attempt what is stored.
        eventually(lambda: shipper.status().behind == RECORDS - stored.num_rows)
        os.remove(hub.disk / "filler")
        eventually(lambda: shipper.status().behind == 0)
        assert shipper.status().lost == 0
    with kvspool.open(hub.disk / "root" / "client") as journal:
        assert isinstance(journal, Journal)
        assert contents(journal) == contents(log)
        assert journal.verify().is_sound
