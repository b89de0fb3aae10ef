"""On btrfs a full disk kills processes that store to mapped files: spools and queues are refused there, journals and readers work."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import in_child

import kvspool
from kvspool import errors
from kvspool.cli import main
from kvspool.system import filesystems

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
SIZE = 128 << 20  # bytes of the image; mkfs.btrfs takes no less than 109 MiB


def _run(*words: str | Path) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip(f"{words[0]} isn't installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine can't mount a btrfs image: {error.stderr.strip()}")


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a small btrfs."""
    if os.geteuid():
        pytest.skip("needs root to mount")
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs isn't installed (btrfs-progs)")
    image, mount = tmp_path / "image", tmp_path / "btrfs"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE)
    _run("mkfs.btrfs", "-q", image)
    _run("mount", "-o", "loop", image, mount)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True, timeout=60)


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take every path for one on btrfs."""
    monkeypatch.setattr(filesystems, "of", lambda path: "btrfs")
    return tmp_path


@pytest.fixture(params=["btrfs", "pretended"])
def place(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def fill(place: Path) -> None:
    """Write files until there is no room for a byte."""
    for number, size in enumerate((1 << 20, 65536, 4096)):
        fd = os.open(place / f"filler{number}", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(fd, os.urandom(size))
        except OSError as error:
            assert error.errno == errno.ENOSPC
            os.fsync(fd)
        finally:
            os.close(fd)


def test_what_stores_through_mappings_is_refused_and_a_journal_is_not(place: Path) -> None:
    before = sorted(os.listdir(place))
    for make in (kvspool.create, kvspool.queue.create):
        with pytest.raises(errors.UnsafeFilesystem, match=r"btrfs.*kills its process.*use a journal.*allow_unsafe_fs=True"):
            make(place / "log")
    assert main(["create", str(place / "log")]) == errors.UnsafeFilesystem.exit_code
    assert sorted(os.listdir(place)) == before
    for format in ("kvj", "sej", "fflg"):
        with kvspool.create(place / format, format=format) as log:  # type: ignore[call-overload]
            assert log.append(b"taken") == 0


def test_a_spool_that_is_there_can_be_read_and_changed_only_by_those_who_take_the_risk(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place / "log"
    with kvspool.create(path, capacity=65536, allow_unsafe_fs=True) as log:
        log.append_many([b"x"] * 10)
        log.reader("durable", 0).close()
        with kvspool.open(path) as reading:
            assert len(list(reading)) == len(list(reading.follow(0, timeout=0))) == 10
            assert reading.stats().records == reading.verify().records == 10
            refused: list[Callable[[], object]] = [
                lambda: reading.append(b"y"),
                lambda: reading.append_many([b"y"]),
                lambda: reading.reader("durable"),
                lambda: kvspool.resize(path, 8192),
                lambda: kvspool.repair(path),
            ]
            for change in refused:
                with pytest.raises(errors.UnsafeFilesystem, match="opened for reading only"):
                    change()
            assert log.append(b"y") == 10
            assert len(list(reading)) == 11
        assert in_child(lambda: log.append(b"from a child")) == 11
    with kvspool.open(path, allow_unsafe_fs=True) as log:
        assert log.append(b"z") == 12
    monkeypatch.setenv(filesystems.ALLOWED, "1")
    kvspool.resize(path, 8192)
    assert kvspool.repair(path).verify.is_sound
    with kvspool.open(path) as log:
        assert log.append(b"z") == 13
    kvspool.create(place / "another", capacity=4096).close()


def test_a_queue_that_is_there_is_opened_only_by_those_who_take_the_risk(place: Path) -> None:
    with kvspool.queue.create(place / "queue", allow_unsafe_fs=True, chunk_bytes=65536) as queue:
        queue.put(b"entry")
    with pytest.raises(errors.UnsafeFilesystem):
        kvspool.queue.open(place / "queue")
    assert kvspool.verify(place / "queue").entries == 1  # type: ignore[union-attr]
    with kvspool.queue.open(place / "queue", allow_unsafe_fs=True) as queue:
        assert queue.get(block=False) == b"entry"


def test_on_a_full_btrfs_no_process_crashes(btrfs: Path) -> None:
    with kvspool.create(btrfs / "spool", capacity=1 << 20, allow_unsafe_fs=True) as log:
        log.append_many([b"x"] * 10)
    kvspool.create(btrfs / "journal", format="kvj").close()
    fill(btrfs)

    def append_until_full() -> int:
        with kvspool.open(btrfs / "journal") as log:
            for _ in range(100):
                try:
                    log.append_many([bytes(1 << 20)] * 4)
                    log.sync()
                except (OSError, errors.Poisoned):
                    return 1
        return 0

    def read() -> int:
        with kvspool.open(btrfs / "spool") as log:
            with pytest.raises(errors.UnsafeFilesystem):
                log.append(b"y")
            return len(list(log.follow(0, timeout=0)))

    assert in_child(append_until_full) == 1
    assert in_child(read) == 10
