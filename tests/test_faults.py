"""Every second call to the system fails once, or from then on, in each operation; all of them with KVSPOOL_ALL_SCHEDULES=1.

The operation reports it with the system's own error or with kvspool's, no acknowledged record is lost, nothing stays open, no file is
left over, and without the fault the same operation works at once.
"""

from __future__ import annotations

import errno
import gc
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import FILE_CALLS, FailingPort
from schedules import ALL, some

import hub.root.root
import kvspool
import shard
from kvspool import errors, system
from kvspool.spool.format import CONTROL_FILE
from shard.kernel import merge_py

CALLS = (*FILE_CALLS, "remove", "remove_directory", "names", "is_locked")
FAULTS = [(errno.EIO, False), (errno.EMFILE, False), (errno.ENOSPC, True)]


def append(root: Path) -> None:
    with kvspool.open(root / "log") as log:
        log.append(b"new")


def append_keyed(root: Path) -> None:
    with kvspool.open(root / "keyed") as log:
        log.append({"a new key": 1})


def sync(root: Path) -> None:
    with kvspool.open(root / "log") as log:
        log.sync()


def read(root: Path) -> None:
    with kvspool.open(root / "log") as log:
        assert len(list(log)) >= 3


def follow(root: Path) -> None:
    with kvspool.open(root / "log") as log, log.follow(timeout=0) as following:
        assert len(list(following)) >= 3


def open_reader(root: Path) -> None:
    with kvspool.open(root / "log") as log, log.reader("new") as reader:
        assert reader.sequence == 0


def commit(root: Path) -> None:
    with kvspool.open(root / "log") as log, log.reader("old") as reader:
        list(reader.read(limit=1))
        reader.commit()


def list_readers(root: Path) -> None:
    with kvspool.open(root / "log") as log:
        assert {reader.name for reader in log.readers()} >= {"old"}


def delete_reader(root: Path) -> None:
    with kvspool.open(root / "log") as log:
        log.delete_reader("gone" if any(reader.name == "gone" for reader in log.readers()) else "old")


def create(root: Path) -> None:
    kvspool.create(root / "made", capacity=4096).close()


def create_shards(root: Path) -> None:
    shard.create(root / "made", prefix="made", bits=0, capacity=4096).close()


def append_to_shards(root: Path) -> None:
    with shard.open(root / "shards") as shards:
        shards.append_many([b"a", b"b"], keys=[b"1", b"2"])


def open_hub(root: Path) -> None:
    with hub.open(root / "hub") as opened:
        assert len(list(opened)) >= 1


def create_client(root: Path) -> None:
    with hub.open(root / "hub") as opened:
        opened.create_client("made", bits=0, capacity=4096).close()


OPERATIONS = [
    *((operation, "log") for operation in (append, sync, read, follow, create, create_shards)),
    *((operation, "log") for operation in (open_reader, commit, list_readers, delete_reader)),
    (append_keyed, "keyed"),
    (append_to_shards, "shards"),
    *((operation, "hub") for operation in (open_hub, create_client)),
]
CREATIONS = (create, create_shards, create_client)


class InterpretedMerge(merge_py.Merging, Iterator[Any]):
    """The merge that reads a hub root here: a compiled merge can't use the interpreted readers."""


@pytest.fixture
def interpreted_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.merged.Merge", InterpretedMerge)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    with kvspool.create(root / "log", capacity=4096) as log:
        log.append_many([b"one", b"two", b"three"])
        for name in ("old", "gone"):
            log.reader(name).close()
    with kvspool.create(root / "keyed", capacity=4096, codec="keyed") as log:
        log.append({"key": 0})
    with shard.create(root / "shards", bits=1, capacity=4096) as shards:
        shards.append(b"one", key=b"1")
    with hub.create(root / "hub") as made, made.create_client("client", bits=0, capacity=4096) as client:
        client.append(b"one")
    return root


ACKNOWLEDGED = {"log": [b"one", b"two", b"three"], "keyed": [{"key": 0}], "shards": [b"one"], "hub": [b"one"]}


def acknowledged(template: Path, root: Path, part: str) -> list[Any]:
    """Return what was appended before the fault, all of which must be there after it, in the same logs."""
    found: list[Any] = []
    for control in (template / part).rglob(CONTROL_FILE):  # one by one: a compiled merge can't use interpreted readers
        with kvspool.open(root / control.parent.relative_to(template)) as log:
            found += [record.data if part == "keyed" else record.value for record in log.read()]
    return [each for each in ACKNOWLEDGED[part] if each in found]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a destructor's close that fails too
@pytest.mark.parametrize(("number", "every"), FAULTS, ids=["EIO once", "EMFILE once", "ENOSPC from then on"])
@pytest.mark.parametrize(("operation", "part"), OPERATIONS, ids=[operation.__name__ for operation, _ in OPERATIONS])
def test_a_failed_call_is_reported_and_costs_nothing(
    interpreted: None,
    interpreted_merges: None,
    template: Path,
    tmp_path: Path,
    operation: Callable[[Path], None],
    part: str,
    number: int,
    every: bool,
    open_files: Callable[[], set[str]],
) -> None:
    held = open_files()
    failed = set()
    silent: list[tuple[str, set[str]]] = []
    for nth in some(range(1, 1000), 2, FAULTS.index((number, every)) % 2):
        root = tmp_path / str(nth)
        shutil.copytree(template / part, root / part)
        port = FailingPort(nth, number, CALLS, every)
        told = False
        with system.replaced(port), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                operation(root)
            except OSError as error:
                told = True
                assert error.errno == number, f"call {nth}, {port.failed}"
            except errors.Poisoned:
                told = True
                assert port.failed in ("flush_data", "write"), f"call {nth}, {port.failed}"
            gc.collect()
        if not port.failed:
            assert not told
            complete = {path.name for path in root.rglob("*")}
            assert [at for at, names in silent if operation in CREATIONS and names != complete] == []
            break
        failed.add(port.failed)
        at = f"call {nth}, {port.failed}"
        # Where a follower can't have a watch it looks by itself: that costs latency only. After its last flush, a creation leaves the check
        # of the name to the next writer.
        assert told or operation in (follow, *CREATIONS), f"{at}: no error was reported"
        assert open_files() == held, at
        names = {path.name for path in root.rglob("*")}
        if not told:
            silent.append((at, names))
        if not every:  # when nothing can be removed any more, some files are left over
            assert not {name for name in names if name.endswith(".new")}, at
        assert acknowledged(template, root, part) == ACKNOWLEDGED[part], at
        is_poisoned = port.failed in ("flush_data", "write") and operation in (sync, append_keyed)
        if told and not is_poisoned and not any(name.startswith("made") for name in names):
            operation(root)
        shutil.rmtree(root)
    assert not ALL or {"open", "status", "map", "close"} <= failed or operation in (create_shards, create_client)
    assert nth > 8
