"""More logs than a process has descriptors for: an error that says how many they take, and nothing that stays open."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import in_child

import hub
import kvspool
import shard
from kvspool import system
from kvspool.errors import KvspoolError, appended_by, say_what_is_stored
from shard import TooFewDescriptors, descriptors

LIMIT = 256
BITS = 10  # 1,024 shards


class NoDisk(system.Port):
    """A system whose flushes take no time, and do nothing."""

    def flush(self, fd: int) -> None:
        pass

    def flush_data(self, fd: int) -> None:
        pass


def limited(use: Callable[[], Any], limit: int = LIMIT) -> Any:
    """Return what `use` returns in a child that may have so many descriptors."""

    def child() -> Any:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return use()

    return in_child(child)


def open_now() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def refused(use: Callable[[], Any]) -> str:
    """Return the error of a call that needs too many descriptors, after a look at what it left open."""
    before = open_now()
    try:
        use()
    except TooFewDescriptors as error:
        assert error.errno == errno.EMFILE and isinstance(error.__cause__, OSError)
        words = str(error)
    else:
        raise AssertionError("no error")
    assert open_now() == before
    return words


def fill_up() -> int:
    """Take every number below the highest descriptor of this process, and return that one."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (fd := os.dup(0)) < highest:
        pass
    os.close(fd)
    return max(highest, fd - 1)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 1,024 spools."""
    root = tmp_path_factory.mktemp("large") / "set"
    root.mkdir()
    with system.replaced(NoDisk()):
        for index in range(1 << BITS):
            kvspool.create(root / shard.route.directory_name("", BITS, index), capacity=4096).close()
    return root


def test_a_set_of_1024_shards_says_how_many_descriptors_it_takes_and_how_to_get_them(large: Path) -> None:
    words = limited(lambda: refused(lambda: shard.open(large)))
    assert re.match(f"{large}: 1,024 logs take up to 7,168 file descriptors, and this process may have 256 in all", words)
    assert "`ulimit -n 7424`" in words and "resource.setrlimit" in words


def test_what_the_error_names_is_enough(tmp_path: Path) -> None:
    """With so many descriptors a set is read, written, synced and followed, whatever else the process has open."""
    shard.create(tmp_path / "set", bits=6, capacity=4096).close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    words = limited(lambda: refused(lambda: shard.open(tmp_path / "set")), 256)
    (enough,) = re.findall(r"ulimit -n (\d+)", words)

    def use() -> int:
        with shard.open(tmp_path / "set") as shards:
            for one in shards.shards:
                one.append(b"x")
            shards.sync()
            with shards.follow(limit=64) as reading:
                return len(list(reading)) + len(list(shards.read()))

    assert limited(use, int(enough)) == 128
    for fd in others:
        os.close(fd)


def test_a_set_that_is_created_under_the_limit_is_there_and_opens_above_it(tmp_path: Path) -> None:
    words = limited(lambda: refused(lambda: shard.create(tmp_path / "set", bits=6, capacity=4096)), 128)
    assert "64 logs take up to 448 file descriptors" in words
    with shard.open(tmp_path / "set") as shards:
        assert len(shards.shards) == 64


@pytest.mark.parametrize("options", [{"capacity": 4096}, {"format": "kvj"}, {"format": "fflg"}], ids=["spool", "kvj", "fflg"])
@pytest.mark.parametrize("deed", ["append", "append_many", "sync", "read", "follow"])
def test_each_use_of_a_set_that_runs_out_says_so_and_continues_above_the_limit(tmp_path: Path, options: dict[str, Any], deed: str) -> None:
    with system.replaced(NoDisk()), shard.create(tmp_path / "set", bits=6, **options) as shards:
        if deed in ("read", "follow", "sync"):
            shards.append_many([b"x"] * 640)

    def use() -> tuple[str, bool]:
        with shard.open(tmp_path / "set") as shards:
            deeds: dict[str, Callable[[], object]] = {
                "append": lambda: [shards.append(b"x") for _ in range(64)],
                "append_many": lambda: shards.append_many([b"x"] * 64),
                "sync": shards.sync,
                "read": lambda: list(shards.read()),
                "follow": lambda: list(shards.follow(limit=640)),
            }
            highest = fill_up()
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            words = ""
            for spare in (2, 20):
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare, limit[1]))
                try:
                    deeds[deed]()
                except TooFewDescriptors as error:
                    words = words or str(error)
            gc.collect()
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            deeds[deed]()
            return words, True

    words, goes_on = in_child(use)
    assert goes_on
    # Spools have all that they read with from the beginning.
    assert "64 logs take up to 448 file descriptors" in words or (deed in ("read", "follow") and "capacity" in options)


def test_a_hub_root_says_so_too(large: Path) -> None:
    def use() -> list[str]:
        said = []
        with hub.open(large.parent) as root:
            for call in (root.stats, root.read, root.follow, lambda: root.reader("r")):
                try:
                    call()
                except TooFewDescriptors as error:
                    said.append(str(error))
        return said

    for index in range(1 << BITS):
        (large / shard.route.directory_name("", BITS, index)).rename(
            large.parent / shard.route.directory_name("jfk", BITS, index)
        )
    try:
        said = limited(use)
    finally:
        for index in range(1 << BITS):
            (large.parent / shard.route.directory_name("jfk", BITS, index)).rename(large / shard.route.directory_name("", BITS, index))
    assert len(said) == 4
    assert all("1,024 logs take up to 7,168 file descriptors" in words for words in said)


def test_a_hub_keeps_no_more_shards_open_than_its_limit_allows(tmp_path: Path) -> None:
    from hub.root.store import PER_JOURNAL, Store

    def use() -> int:
        (tmp_path / "root").mkdir()
        with system.replaced(NoDisk()), Store(tmp_path / "root") as store:
            store.enter("jfk", 7)
            for index in range(128):
                store.take("jfk", 7, index).sync()  # and not given back: its client is connected, and quiet
            return store.open_journals

    assert limited(use, 128) == 128 // 2 // PER_JOURNAL


def test_the_commands_take_what_they_may_have(large: Path) -> None:
    """Commands raise the soft limit; where the hard one is too low, too, they end with the sentence."""
    said = {}
    for hard in (LIMIT, 8192):
        script = (
            f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {hard}))\n"
            "from kvspool.cli import main\nimport sys\n"
            f"sys.exit(main(['stats', {str(large)!r}, '--json']))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        said[hard] = (done.returncode, done.stderr)
    assert said[LIMIT][0] == 1 and "1,024 logs take up to 7,168 file descriptors" in said[LIMIT][1] and "Traceback" not in said[LIMIT][1]
    assert said[8192][0] == 0


def test_a_machine_that_has_none_left_is_another_advice() -> None:
    with pytest.raises(TooFewDescriptors, match="raise fs.file-max") as caught:
        descriptors.explain(OSError(errno.ENFILE, "none"), "root", 4)
    assert caught.value.errno == errno.ENFILE


def test_other_errors_stay_what_they_are() -> None:
    for error in (OSError(errno.ENOSPC, "full"), PermissionError("no"), TooFewDescriptors("few", errno.EMFILE)):
        descriptors.explain(error, "root", 4)
        with pytest.raises(type(error)) as caught, descriptors.for_logs("root", 4):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(("limit", "part", "most"), [(256, 2, 18), (1 << 20, 2, 100), (8, 4, 1), (resource.RLIM_INFINITY, 2, 100)])
def test_as_many_logs_are_kept_open_as_can_be(limit: int, part: int, most: int) -> None:
    class Limited(system.Port):
        def file_limit(self) -> int:
            return sys.maxsize if limit == resource.RLIM_INFINITY else limit

    with system.replaced(Limited()):
        assert descriptors.affordable(100, part) == most


def test_the_error_is_of_both_kinds() -> None:
    assert issubclass(TooFewDescriptors, OSError) and issubclass(TooFewDescriptors, KvspoolError)


def test_a_machine_with_too_few_descriptors_still_says_what_was_appended() -> None:
    cause = OSError(errno.EMFILE, "none")
    say_what_is_stored(cause, range(3, 5), 4)
    cause.parts = {1: [range(3, 5)]}  # type: ignore[attr-defined]
    with pytest.raises(TooFewDescriptors) as caught, descriptors.for_logs("root", 4):
        raise cause
    assert appended_by(caught.value) == range(3, 5)
    assert caught.value.parts == {1: [range(3, 5)]}  # type: ignore[attr-defined]


def test_a_batch_that_runs_out_of_descriptors_half_way_says_what_a_shard_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = kvspool.Spool.append_prepared

    def run_out(log: kvspool.Spool, *arguments: Any, **options: Any) -> range:
        error = OSError(errno.EMFILE, "none")
        say_what_is_stored(error, append(log, *arguments, **options), 9)
        raise error

    with shard.ShardSet.create(tmp_path / "set", bits=0, prefix="p", capacity=65536) as log:
        monkeypatch.setattr(kvspool.Spool, "append_prepared", run_out)
        with pytest.raises(TooFewDescriptors) as caught:
            log.append_many([b"a", b"b"])
    assert caught.value.parts == {0: [range(2)]}  # type: ignore[attr-defined]
