"""A disk, descriptors, memory and file sizes run out: a clear error, nothing lost, nothing left over, and all works once there is room.

In children, so that the limits, the mounts and a SIGBUS affect only these.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from children import addresses, in_child, start
from loops import IS_SECOND_RUN

import kvspool
import shard
from kvspool import Gap, Record
from kvspool.errors import NotDurable, SpoolFull
from kvspool.spool import format
from shard.errors import IncompleteShardSet

DISK = 1 << 20  # bytes
LAPS, LAP = 8, 700  # times that the log is filled, and with how many records
CLONE_NEWNS = 0x20000
EXACT = DISK - format.DATA_START - format.control_bytes(DISK // 2)  # a ring that leaves not one block of the disk

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: mounting a small disk needs root")


def on_small_disk(tmp_path: Path, use: Callable[[Path], Any], seconds: int = 60) -> Any:
    """Return what `use` returns in a child that alone sees a tmpfs of 1 MiB mounted at the path it is given."""
    root = tmp_path / "disk"
    root.mkdir()

    def mount() -> Any:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS):
            return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
        for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", root]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return done.stderr
        return (use(root),)

    answer = in_child(mount, seconds)
    if isinstance(answer, str):
        pytest.skip(f"NOT TESTED HERE: this machine lets nobody mount: {answer.strip()}")
    assert os.listdir(root) == [], "it was mounted for the child alone"
    return answer[0]


def free(root: Path) -> int:
    return os.statvfs(root).f_bavail * os.statvfs(root).f_frsize


def refused(number: int, call: Callable[[], object]) -> str:
    """Return the notes of the error that the call raises, which must have this errno."""
    try:
        call()
    except OSError as error:
        assert error.errno == number, error
        return " ".join(getattr(error, "__notes__", []))
    raise AssertionError(f"no {errno.errorcode[number]} was raised")


def value_of(sequence: int) -> bytes:
    return b"%d:" % sequence + bytes([sequence % 251]) * (sequence * 37 % 3000)


def account(items: Iterator[Record | Gap], expected: int = 0) -> tuple[int, int]:
    """Check every record, and that each sequence is one or is in a Gap; return the next sequence and the number of records."""
    count = 0
    for item in items:
        first, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
        assert first == expected
        expected = last + 1
        if isinstance(item, Record):
            assert item.value == value_of(item.sequence)
            count += 1
    return expected, count


@needs_root
def test_a_log_that_fills_the_disk_to_the_last_block_works_forever_and_one_larger_is_refused(tmp_path: Path) -> None:
    def use(root: Path) -> tuple[int, int]:
        for capacity in (EXACT + 4096, 2 * DISK, 1 << 40):
            assert "nothing is left" in refused(errno.ENOSPC, lambda size=capacity: kvspool.create(root / "log", capacity=size))  # type: ignore[misc]
            assert os.listdir(root) == [] and free(root) == DISK
        log = kvspool.create(root / "log", capacity=EXACT)
        assert free(root) == 0
        log.reader("child").close()

        def follow() -> int:
            with kvspool.open(root / "log") as own, own.reader("child") as reader:
                expected = count = 0
                while expected < LAPS * LAP:
                    expected, more = account(reader.follow(on_gap="yield", limit=100, timeout=0.1), expected)
                    reader.commit()
                    count += more
                return count

        wait = start(follow)
        written = 0
        with log, log.reader("reader") as reader:
            place = 0
            for lap in range(LAPS):
                until = written + LAP
                while written < until:
                    if lap & 1:
                        assert log.append(value_of(written)) == written
                        written += 1
                    else:
                        batch = [value_of(at) for at in range(written, written + 7)]
                        assert log.append_many(batch) == range(written, written + 7)
                        written += 7
                assert log.sync() == written
                place = account(reader.read(on_gap="yield"), place)[0]
                reader.commit()
                assert place == written
            for number in range(60):
                log.reader(f"another {number}").close()
            assert account(log.read(0, on_gap="yield"))[0] == written
            tail = log._live().reader(0, 0).tail()
        assert free(root) == 0
        return wait(), tail // EXACT

    followed, laps = on_small_disk(tmp_path, use)
    assert followed > 0
    assert laps >= 6


@needs_root
def test_keys_and_durable_appends_need_no_more_of_a_full_disk(tmp_path: Path) -> None:
    def use(root: Path) -> tuple[int, bool]:
        written = 0
        with kvspool.create(root / "log", capacity=EXACT, codec="keyed", policy="raise", durability="disk") as log:
            assert free(root) == 0
            with log.reader("reader") as reader:
                while True:
                    batch = [{f"key {number} {'x' * 40}": number for number in range(at, at + 20)} for at in range(written, written + 100)]
                    try:
                        assert log.append_many(batch) == range(written, written + 100)
                    except SpoolFull:
                        break
                    written += 100
                got = [record.data for record in reader.read()]
                assert got == [{f"key {number} {'x' * 40}": number for number in range(at, at + 20)} for at in range(written)]
                reader.commit()
                assert log.append_many(batch) == range(written, written + 100)
                table = log._live().key_table
                assert table is not None
        return written, table.is_full

    written, is_full = on_small_disk(tmp_path, use)
    assert written > 500
    assert is_full


@needs_root
def test_a_shard_set_for_which_the_disk_is_too_small_is_refused_until_it_is_completed(tmp_path: Path) -> None:
    def use(root: Path) -> tuple[int, ...]:
        made = []
        filler = root / "filler"
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 300 << 10)
        for _ in range(2):
            refused(errno.ENOSPC, lambda: shard.create(root / "set", bits=3, capacity="64KiB"))
            made.append(len(os.listdir(root / "set")))
            assert not [name for name in os.listdir(root / "set") if name.startswith(".")]
            with pytest.raises(IncompleteShardSet, match="missing"):
                shard.open(root / "set")
            first, *_ = sorted(os.listdir(root / "set"))
            with kvspool.open(root / "set" / first) as log:
                log.append(b"%d" % len(made))
        filler.unlink()
        refused(errno.ENOSPC, lambda: shard.create(root / "set", bits=3, capacity="64KiB"))
        made.append(len(os.listdir(root / "set")))
        subprocess.run(["mount", "-o", f"remount,size={2 * DISK}", root], check=True)
        with shard.create(root / "set", bits=3, capacity="64KiB") as shards:
            made.append(len(shards.shards))
            assert [record.value for record in shards] == [b"1", b"2"]
            shards.append_many([b"more"] * 50)
            assert len(list(shards)) == 52
        return tuple(made)

    made = on_small_disk(tmp_path, use)
    assert made == (5, 5, 7, 8)


@contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    """Set a soft limit of this process inside the `with` block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_files_may_not_grow(tmp_path: Path) -> None:
    def use() -> None:
        with kvspool.create(tmp_path / "log", capacity=1 << 20) as log, log.reader("reader") as reader:
            for size in (0, 1, 4096, format.control_bytes(4096) - 1, 1 << 20):
                with limit(resource.RLIMIT_FSIZE, size):
                    assert "nothing is left" in refused(errno.EFBIG, lambda: kvspool.create(tmp_path / "another", capacity=2 << 20))
                    assert os.listdir(tmp_path) == ["log"]
                    # Existing files don't grow; only the written byte that wakes inotify watchers may be refused.
                    log._live().reader(0, 0).request_wake_up(0)
                    expected = log.stats().next_sequence
                    assert log.append(value_of(expected)) == expected
                    last = [value_of(expected + 1)]
                    if size < format.CHECKPOINTS_AT[0]:
                        # Where no checkpoint can be written nothing counts as being on disk; but no handle is poisoned.
                        with pytest.raises(NotDurable, match=f"sequences {expected + 1} to {expected + 1} were appended"):
                            log.append_many(last, durable=True)
                        refused(errno.EFBIG, log.sync)
                    else:
                        assert log.append_many(last, durable=True) == range(expected + 1, expected + 2)
                        assert log.sync() == log.stats().synced_sequence == expected + 2
                    assert account(reader.read(), expected) == (expected + 2, 2)
                    reader.commit()
            assert account(log.read())[0] == 10

    in_child(use)


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def work(path: Path) -> None:
    with kvspool.open(path) as log:
        sequence = log.append(value_of(log.stats().next_sequence))
        assert log.sync() == sequence + 1
        assert account(log.read())[0] == sequence + 1
        with log.reader("reader") as reader:
            with reader.follow(timeout=0) as following:
                account(following, reader.sequence)
            reader.commit()


def test_few_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kvspool.create(path, capacity=1 << 20).close()

    def use() -> tuple[int, int]:
        gc.collect()  # what earlier tests left to the collector must not go while one counts
        highest = max(map(int, descriptors()))
        while os.dup(0) < highest:  # no number is free below the highest one
            pass
        held = descriptors()
        failed = succeeded = 0
        for most in range(highest + 1, highest + 16):
            with limit(resource.RLIMIT_NOFILE, most):
                try:
                    work(path)
                except OSError as error:
                    assert error.errno == errno.EMFILE
                    failed += 1
                else:
                    succeeded += 1
                try:
                    kvspool.create(tmp_path / "made", capacity=4096).close()
                except OSError as error:
                    assert error.errno == errno.EMFILE
                    assert not (tmp_path / "made").exists()
                else:
                    remove(tmp_path / "made")
            gc.collect()
            assert descriptors() == held
            assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]
        work(path)
        return failed, succeeded

    failed, succeeded = in_child(use)
    assert failed >= 3
    assert succeeded >= 3


def remove(path: Path) -> None:
    """Remove a log without a descriptor for the directory: there may be none."""
    for name in (format.CONTROL_FILE, format.DATA_FILE):
        (path / name).unlink()
    path.rmdir()


def test_little_memory_to_map_a_log(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "large", capacity="48MiB") as log:
        log.append_many([value_of(at) for at in range(20)])
    kvspool.create(tmp_path / "small", capacity=4096).close()

    def use() -> None:
        held = descriptors()
        with limit(resource.RLIMIT_AS, addresses() + (16 << 20)):
            refused(errno.ENOMEM, lambda: kvspool.open(tmp_path / "large"))
            refused(errno.ENOMEM, lambda: kvspool.create(tmp_path / "made", capacity="48MiB"))
            with kvspool.open(tmp_path / "small") as small:
                small.append(b"fits")
        assert descriptors() == held
        assert sorted(os.listdir(tmp_path)) == ["large", "small"]
        with kvspool.open(tmp_path / "large") as log:
            with limit(resource.RLIMIT_AS, addresses() + (16 << 20)):
                refused(errno.ENOMEM, lambda: log.append(b"a writer maps the ring once more"))
                assert account(log.read()) == (20, 20)
            assert log.append(value_of(20)) == 20
            assert account(log.read()) == (21, 21)

    in_child(use)


def test_little_memory_to_read_a_large_record(tmp_path: Path) -> None:
    large = 33 << 20  # so much comes from the system, if nothing that was freed before has room for it
    values = [b"one", b"two", bytes(large), b"three", bytes(large), b"four"]

    def use() -> tuple[int, list[int]]:
        with kvspool.create(tmp_path / "log", capacity="140MiB") as log, log.reader("reader") as reader:
            log.append_many(values)
            hoard: list[bytes] = []  # all of the memory that was freed before and has room for a large value
            with limit(resource.RLIMIT_AS, addresses()), suppress(MemoryError):
                while True:
                    hoard.append(bytes(large))
            readings: list[Iterator[Record]] = [log.read(), log.follow(timeout=0), reader.read()]
            failures = []
            for reading in readings[-1:] if IS_SECOND_RUN else readings:
                got: list[bytes] = []
                failures.append(0)
                while len(got) < len(values):
                    is_short = failures[-1] <= len(got)  # so that each large record is tried without memory, too
                    with limit(resource.RLIMIT_AS, addresses() + (large // 2 if is_short else 3 * large)):
                        try:
                            got.append(next(reading).value)
                        except MemoryError:
                            failures[-1] += 1
                    assert failures[-1] < 100
                assert got == values, "each once, in order"
                del got
            return reader.commit(), failures

    committed, failures = in_child(use, 240)
    assert committed == len(values)
    assert min(failures) >= 1
