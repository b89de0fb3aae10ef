"""Every call to the system fails once, or from then on: at the first call of an operation, at the second, and so on to the last."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from faults import FILE_CALLS, FailingPort
from schedules import ALL, some

from kvspool import errors, system
from kvspool.queue import ChunkQueue, repair, verify

CALLS = (*FILE_CALLS, "remove", "names", "try_share", "lock_owner")
FAULTS = [(errno.EIO, False), (errno.EMFILE, False), (errno.ENOSPC, True)]
BEFORE = [b"%020d" % at for at in range(5)]


def put(path: Path) -> None:
    with ChunkQueue.open(path) as one:
        one.put(b"new")


def put_in_a_new_chunk(path: Path) -> None:
    with ChunkQueue.open(path) as one:
        one.put(b"n" * 50)


def put_durably(path: Path) -> None:
    with ChunkQueue.open(path, durability="disk") as one:
        one.put(b"n" * 50)


def get(path: Path) -> None:
    with ChunkQueue.open(path) as one:
        taken.append(one.get())


def get_batch_durably(path: Path) -> None:
    with ChunkQueue.open(path, durability="disk") as one:
        try:
            taken.extend(one.get_many(3))
        except errors.Unsettled as error:
            taken.extend(error.taken)
            raise


def wait(path: Path) -> None:
    with ChunkQueue.open(path.with_name("empty")) as one:
        one.get(timeout=0.001)


def look(path: Path) -> None:
    with ChunkQueue.open(path) as one:
        assert list(one) == BEFORE
        assert one.stats().entries == 5


def sync(path: Path) -> None:
    with ChunkQueue.open(path) as one:
        one.sync()


def clear(path: Path) -> None:
    with ChunkQueue.open(path) as one:
        one.clear()


def create(path: Path) -> None:
    ChunkQueue.create(path.with_name("made")).close()


def check(path: Path) -> None:
    assert verify(path).is_sound


def mend(path: Path) -> None:
    assert repair(path).verify.is_sound


taken: list[bytes] = []
OPERATIONS = [put, put_in_a_new_chunk, put_durably, get, get_batch_durably, wait, look, sync, clear, create, check, mend]


def open_files(place: Path) -> list[str]:
    """Return what this process has open and mapped in a folder, and its inotify descriptors."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [name for name in (*links, *mapped) if str(place) in name or "inotify" in name]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a destructor's close that fails too
@pytest.mark.parametrize(("number", "every"), FAULTS, ids=["EIO once", "EMFILE once", "ENOSPC from then on"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_failed_call_is_reported_and_loses_nothing(
    interpreted: None, tmp_path: Path, operation: Callable[[Path], None], number: int, every: bool
) -> None:
    template = tmp_path / "template"
    template.mkdir()
    with ChunkQueue.create(template / "queue", chunk_bytes=64) as one:
        one.put_many(BEFORE)
    ChunkQueue.create(template / "empty").close()
    told = 0
    for nth in some(range(1, 1000), 4, number % 4):
        place = tmp_path / "place"
        shutil.copytree(template, place)
        taken.clear()
        before = open_files(place)
        port = FailingPort(nth, number, CALLS, every)
        with system.replaced(port), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                operation(place / "queue")
            except (OSError, errors.KvspoolError) as error:
                told += not isinstance(error, errors.QueueEmpty)
            if open_files(place) != before:
                gc.collect()
        assert open_files(place) == before, f"{port.failed} failed, and something stays open"
        if not port.failed:
            break
        if operation is clear and not (place / "queue").exists():
            shutil.rmtree(place)  # it was closed, too
            continue
        with ChunkQueue.open(place / "queue", timeout=0) as one:
            rest = list(one)
            new = [b"new"] if operation is put else [b"n" * 50]
            if operation is clear:
                assert rest == BEFORE[5 - len(rest) :]
            elif operation in (put, put_in_a_new_chunk, put_durably):
                assert rest in (BEFORE, BEFORE + new)
            else:
                assert taken + rest == BEFORE, f"{port.failed} failed"
            one.put(b"x" * 50)
            assert list(one) == [*rest, b"x" * 50]
        if operation is create and (place / "made").exists():
            ChunkQueue.open(place / "made").close()
        shutil.rmtree(place)
    assert not port.failed, "every call was tried"
    assert told > (5 if ALL else 2)
