"""Sleeping until a file or a directory changes."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from faults import BlindPort

import kvspool
from kvspool import system
from kvspool.engine.wakeups import BLIND_POLL, CHANGED, ENTERED, LINKS, POLL, Watcher


class Patient(system.Port):
    """Remembers how long each sleep was allowed to last."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps: list[float] = []
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)

    def wait_readable(self, fd: int, timeout: float) -> bool:
        self.waits.append(timeout)
        return super().wait_readable(fd, 0)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(b"0000")
    return paths


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    with closing(Watcher()) as watcher:
        yield watcher


def touch(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    system.port.write(fd, b"1", 2)
    os.close(fd)


def test_a_wait_returns_the_keys_of_what_changed(watcher: Watcher, files: list[Path]) -> None:
    watcher.watch(files[0], CHANGED, "first")
    watcher.watch(files[1], CHANGED, ("second",))
    touch(files[1])
    assert watcher.wait(60) == {("second",)}
    touch(files[0])
    touch(files[1])
    touch(files[0])
    assert watcher.wait(60) == {"first", ("second",)}


def test_a_name_that_appears_in_a_directory_wakes(watcher: Watcher, tmp_path: Path) -> None:
    watcher.watch(tmp_path, ENTERED, "root")
    (tmp_path / "new").mkdir()
    assert watcher.wait(60) == {"root"}
    (tmp_path / "new").rename(tmp_path / "newer")
    assert watcher.wait(60) == {"root"}


def test_a_wait_is_never_longer_than_asked_and_looks_at_all_now_and_then(watcher: Watcher, files: list[Path]) -> None:
    watcher.watch(files[0], CHANGED, 0)
    port = Patient()
    with system.replaced(port):
        assert watcher.wait(0.01) == set()
        assert watcher.wait(POLL) is None
        assert watcher.wait(1000) is None
    assert port.waits == [0.01, POLL, POLL]
    assert port.sleeps == []


@pytest.mark.parametrize("instances", [True, False])
def test_without_inotify_the_wait_is_a_short_sleep_and_says_look_at_all(files: list[Path], instances: bool) -> None:
    with system.replaced(BlindPort(instances=instances)), closing(Watcher()) as watcher:
        watcher.watch(files[0], CHANGED, 0)
        assert watcher.is_blind
        port = Patient()
        with system.replaced(port):
            assert watcher.wait(1000) is None
            assert watcher.wait(0.001) is None
        assert port.sleeps == [BLIND_POLL, 0.001]
        assert port.waits == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM], ids=errno.errorcode.get)
def test_every_kind_of_exhaustion_is_borne(files: list[Path], number: int) -> None:
    class Exhausted(system.Port):
        def inotify(self) -> Any:
            raise OSError(number, os.strerror(number))

    with system.replaced(Exhausted()):
        assert Watcher().is_blind


def test_removed_files_are_not_watched_and_wake_no_reader(watcher: Watcher, files: list[Path], tmp_path: Path) -> None:
    watcher.watch(tmp_path / "missing", CHANGED, 0)
    watcher.watch(files[0], ENTERED, 1)  # no directory
    watcher.watch(files[1], CHANGED, 2)
    assert not watcher.is_blind
    touch(files[0])
    touch(files[1])
    assert watcher.wait(60) == {2}


def test_other_errors_are_not_hidden(watcher: Watcher, files: list[Path]) -> None:
    class Forbidden(system.Port):
        def inotify(self) -> Any:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        def add_watch(self, notifier: Any, path: Any, mask: int) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with system.replaced(Forbidden()):
        with pytest.raises(PermissionError):
            Watcher()
        with pytest.raises(PermissionError):
            watcher.watch(files[0], CHANGED, 0)


def test_a_thread_that_closes_the_watcher_takes_no_descriptor_from_one_that_begins_to_watch(files: list[Path]) -> None:
    class Closing(system.Port):
        """Another thread closes the watcher at the moment of the call."""

        def add_watch(self, notifier: Any, path: Any, mask: int) -> int:
            other = threading.Thread(target=watcher.close)
            other.start()
            other.join()
            return super().add_watch(notifier, path, mask)

    watcher = Watcher()
    watcher.watch(files[0], CHANGED, 0)
    notifier = watcher._notifier
    assert notifier is not None
    with system.replaced(Closing()):
        watcher.watch(files[1], CHANGED, 1)
    assert notifier.closed
    assert watcher.wait(0) is None


def test_a_file_that_loses_its_name_is_reported_as_unlinked(watcher: Watcher, files: list[Path]) -> None:
    for key, path in enumerate(files):
        watcher.watch(path, CHANGED | LINKS, key)
    touch(files[0])
    assert watcher.wait(60) == {0}
    assert watcher.unlinked == set()
    with open(files[1], "rb"):
        files[1].unlink()
        assert watcher.wait(60) == {1}
        assert watcher.unlinked == {1}


def test_an_overflow_of_the_queue_means_look_at_all(watcher: Watcher, files: list[Path]) -> None:
    class Overflowed(system.Port):
        def wait_readable(self, fd: int, timeout: float) -> bool:
            return True

        def read_events(self, fd: int) -> bytes:
            return struct.pack("iIII", -1, 0x4000, 0, 0)

    watcher.watch(files[0], CHANGED, 0)
    with system.replaced(Overflowed()):
        assert watcher.wait(60) is None


def test_the_queue_of_the_kernel_overflows_and_nothing_is_missed(watcher: Watcher, files: list[Path]) -> None:
    for key, path in enumerate(files):
        watcher.watch(path, CHANGED, key)
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    descriptors = [os.open(path, os.O_RDWR) for path in files]
    for _ in range(most // 2 + 1):  # in turn: two events that are the same become one
        for fd in descriptors:
            os.pwrite(fd, b"1", 2)
    for fd in descriptors:
        os.close(fd)
    answers = [watcher.wait(60) for _ in range(3)]
    while None not in answers:
        answers.append(watcher.wait(60))
        assert len(answers) < most
    assert watcher.wait(0) == set()
    touch(files[1])
    assert watcher.wait(60) == {1}, "it wakes as before"


LIMITED = """
import os, sys, threading
import kvspool
from kvspool.engine.wakeups import CHANGED, Watcher

path = sys.argv[1]
first = Watcher()
first.watch(os.path.join(path, "spool.ctl"), CHANGED, 0)
second = Watcher()
second.watch(os.path.join(path, "spool.dat"), CHANGED, 0)
print(first.is_blind, second.is_blind)

with kvspool.create(path + ".journal", format="kvj") as log:
    followers = [log.follow(limit=20) for _ in range(3)]
    got = [[] for _ in followers]
    threads = [threading.Thread(target=into.extend, args=(following,)) for into, following in zip(got, followers)]
    for thread in threads:
        thread.start()
    for at in range(20):
        log.append(b"%d" % at)
    for thread in threads:
        thread.join()
    print([[int(record.value) for record in into] == list(range(20)) for into in got])
"""


@pytest.mark.parametrize("limit", ["max_inotify_instances", "max_inotify_watches"])
def test_with_one_instance_or_one_watch_for_the_user_every_record_comes(tmp_path: Path, limit: str) -> None:
    script = f"echo 1 > /proc/sys/user/{limit} || exit 77; exec {sys.executable} -c '{LIMITED}' {tmp_path / 'log'}"
    kvspool.create(tmp_path / "log", capacity=65536).close()
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this host gives no user namespace, so its inotify limits can't be lowered")
    done = subprocess.run([unshare, "-Ur", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(f"the limit can't be set in a user namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False True", "[True, True, True]"]


def test_events_of_watches_that_are_gone_are_passed_over(watcher: Watcher, files: list[Path]) -> None:
    class Stray(system.Port):
        def wait_readable(self, fd: int, timeout: float) -> bool:
            return True

        def read_events(self, fd: int) -> bytes:
            return struct.pack("iIII", 999, 2, 0, 0)

    watcher.watch(files[0], CHANGED, 0)
    with system.replaced(Stray()):
        assert watcher.wait(60) == set()


def test_a_forked_child_steals_no_event_from_its_parent(watcher: Watcher, files: list[Path]) -> None:
    watcher.watch(files[0], CHANGED, "mine")
    touch(files[0])
    assert in_child(lambda: watcher.wait(0.001)) is None
    assert watcher.wait(60) == {"mine"}


def test_a_closed_watcher_only_sleeps_and_holds_nothing(files: list[Path], open_files: Callable[[], set[str]]) -> None:
    held = open_files()
    watcher = Watcher()
    watcher.watch(files[0], CHANGED, 0)
    assert open_files() != held
    watcher.close()
    watcher.close()
    assert open_files() == held
    port = Patient()
    with system.replaced(port):
        watcher.watch(files[1], CHANGED, 0)
        assert watcher.wait(9) is None
    assert port.sleeps == [BLIND_POLL]


def test_a_watcher_that_is_dropped_holds_nothing_and_leaves_no_warning(files: list[Path], open_files: Callable[[], set[str]]) -> None:
    held = open_files()
    watcher = Watcher()
    watcher.watch(files[0], CHANGED, 0)
    del watcher
    assert open_files() == held


def test_a_watcher_that_another_thread_closes_reads_nothing_from_the_next_file_of_its_number(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    watcher = Watcher()
    watcher.watch(file, CHANGED, "file")
    asleep = threading.Event()

    class Port(system.Port):
        def wait_readable(self, fd: int, timeout: float) -> bool:
            asleep.set()
            found = super().wait_readable(fd, timeout)
            closed.wait()
            return found

    closed = threading.Event()
    got: list[set[object] | None] = []
    with system.replaced(Port()):
        sleeper = threading.Thread(target=lambda: got.append(watcher.wait(5)))
        sleeper.start()
        asleep.wait()
        file.write_bytes(b"x")
        watcher.close()
        reading, writing = os.pipe()
        os.write(writing, b"precious")
        closed.set()
        sleeper.join()
    assert got == [{"file"}]
    assert os.read(reading, 100) == b"precious"
    for fd in (reading, writing):
        os.close(fd)
