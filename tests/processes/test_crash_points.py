"""A process killed at every bytecode of what it does to a log, appends apart: what it acknowledged is there, and the next one goes on.

KVSPOOL_ALL_SCHEDULES=1 tries every opcode; the default is an even sample. `test_opcodes` does it for appends.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from test_opcodes import crash

import kvspool
from kvspool import Spool

CRASHES = 10**9 if os.environ.get("KVSPOOL_ALL_SCHEDULES") == "1" else 25
BEFORE = [b"%d" % at for at in range(10)]


def commit(path: Path) -> range:
    with kvspool.open(path / "log") as log, log.reader("old") as reader:
        for _ in reader.read(limit=3):
            pass
        return range(reader.commit())


def commit_is_old_or_new(path: Path, log: Spool) -> None:
    with log.reader("old") as reader:
        before = reader.sequence
        assert before % 3 == 0 or before == 10, "the place before, or the one after"
        assert len(list(reader.read())) == 10 - before
        reader.rewind()
        assert reader.commit() == 0


def open_reader(path: Path) -> range:
    with kvspool.open(path / "log") as log, log.reader("new") as reader:
        return range(reader.sequence)


def reader_is_there_or_not(path: Path, log: Spool) -> None:
    assert [reader.name for reader in log.readers() if not reader.damaged] in (["new", "old"], ["old"])
    with log.reader("new") as reader:
        assert len(list(reader.read())) == 10
    log.delete_reader("new")


def delete_reader(path: Path) -> range:
    with kvspool.open(path / "log") as log:
        log.delete_reader("old")
        return range(0)


def reader_was_deleted_or_not(path: Path, log: Spool) -> None:
    assert [reader.name for reader in log.readers() if not reader.damaged] in ([], ["old"])
    log.reader("old").close()


def sync(path: Path) -> range:
    with kvspool.open(path / "log") as log:
        log.append(b"to be synced")
        return range(log.sync())


def synced_tells_the_truth(path: Path, log: Spool) -> None:
    stats = log.stats()
    assert stats.synced_sequence <= stats.next_sequence
    assert stats.sync_error == 0
    assert log.append(b"after") == stats.next_sequence
    assert log.sync() == stats.next_sequence + 1


def create(path: Path) -> range:
    kvspool.create(path / "made", capacity=4096, allow_unsafe_fs=True).close()  # without a look at all mounts, opcode by opcode
    return range(0)


def log_is_whole_or_not_there(path: Path, log: Spool) -> None:
    opens = kvspool.open if (path / "made").exists() else lambda at: kvspool.create(at, capacity=4096)
    with opens(path / "made") as made:
        assert made.append(b"first") == 0
    for file in (path / "made").iterdir():
        file.unlink()
    (path / "made").rmdir()


def intern(path: Path) -> range:
    with kvspool.open(path / "keyed") as log:
        return range(log.append({f"key {random.getrandbits(40):x}": 1}))


def every_key_is_known(path: Path, log: Spool) -> None:
    with kvspool.open(path / "keyed", timeout=0) as keyed:
        at = keyed.append({"key": 2})
        data = [record.data for record in keyed]
        assert data[-1] == {"key": 2} and all(list(one.values()) in ([1], [2]) for one in data)
        assert keyed.stats().next_sequence == at + 1


CASES: list[tuple[Callable[[Path], range], Callable[[Path, Spool], None]]] = [
    (commit, commit_is_old_or_new),
    (open_reader, reader_is_there_or_not),
    (delete_reader, reader_was_deleted_or_not),
    (sync, synced_tells_the_truth),
    (create, log_is_whole_or_not_there),
    (intern, every_key_is_known),
]


@pytest.mark.parametrize(("operation", "check"), CASES, ids=[operation.__name__ for operation, _ in CASES])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_killed_at_any_opcode_it_is_done_or_not_and_the_next_one_goes_on(
    interpreted: None, tmp_path: Path, operation: Callable[[Path], range], check: Callable[[Path, Spool], None]
) -> None:
    with kvspool.create(tmp_path / "log", capacity=1 << 20) as log:  # room for what all those that were killed appended
        log.append_many(BEFORE)
        log.reader("old").close()
        kvspool.create(tmp_path / "keyed", capacity=8192, codec="keyed").close()
        killed, acknowledged, opcodes = crash(lambda: operation(tmp_path), -1)
        assert not killed and acknowledged is not None
        with kvspool.open(tmp_path / "log", timeout=0) as after:
            check(tmp_path, after)
        kills = 0
        step = max(1, opcodes // (min(CRASHES, 8) if operation is intern else CRASHES))  # which has ten times as many
        for last in count(1 + random.randrange(step), step):
            killed, acknowledged, _ = crash(lambda: operation(tmp_path), last)
            if not killed:
                break
            kills += 1
            assert acknowledged is None
            with kvspool.open(tmp_path / "log", timeout=0) as after:
                check(tmp_path, after)
                assert [record.value for record in after][:10] == BEFORE
        assert kills >= 4
        print(f"{kills} kills in {opcodes} opcodes")
