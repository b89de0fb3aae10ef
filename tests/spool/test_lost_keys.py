"""Handles of a keyed log that stay open while an older spool.ctl is written over the one they use: no record gets another record's keys."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import in_child, start

import kvspool
import shard
from kvspool import Record, Spool, arrow, errors, system
from kvspool.engine.iteration import Iteration
from kvspool.engine.rows import values_of
from kvspool.kernel import frames_py as frames
from kvspool.spool import format

CAPACITY = 65536
KEPT = "kept"  # a record names the lost key, so the recovery closes the key table
FORGOTTEN = "forgotten"  # no record names it, so another key gets its index


def opened(path: Path) -> Spool:
    return kvspool.open(path)  # type: ignore[return-value]


def restore(copy: bytes, path: Path) -> None:
    """Write an older spool.ctl over the one that is there; it stays the same inode."""
    fd = os.open(path / format.CONTROL_FILE, os.O_WRONLY)
    os.pwrite(fd, copy, 0)
    os.close(fd)


def copied(log: Spool) -> bytes:
    """Append the key "alpha", and return a copy of spool.ctl."""
    log.append({"alpha": 1})
    return (log.path / format.CONTROL_FILE).read_bytes()


def lose_beta(log: Spool, lost: str = FORGOTTEN, copy: bytes | None = None) -> None:
    """Let the key "beta", which the handle knows, be lost; another process recovers the log and appends the keys "delta" and "alpha"."""
    copy = copied(log) if copy is None else copy
    value = {"beta": 2}
    if lost == KEPT:
        log.append(value)
    else:
        log.prepare([value])
        log.append(b"published after the copy")
    restore(copy, log.path)

    def recover() -> None:
        with opened(log.path) as other:
            assert other.recovery is not None
            other.append({"delta": 3})
            other.append({"alpha": 4})

    in_child(recover)


def meanings(log: Spool) -> list[Any]:
    """Return what each keyed record says; None for one that can't be decoded."""
    return [meaning(record) for record in log.read(on_gap="skip") if record.codec != kvspool.Codec.RAW]


def meaning(record: Any) -> Any:
    try:
        return record.data
    except errors.Undecodable:
        return None


def columns(cursor: Any) -> list[Any]:
    """Return what each keyed record says that is gathered into columns; None for one that can't be decoded."""
    found: list[Any] = []
    while True:
        try:
            batch = arrow.next_batch(cursor, coded=True)
        except errors.Undecodable:
            found.append(None)
            continue
        if isinstance(batch, kvspool.Gap):
            continue
        if not batch.num_rows:
            return found
        rows = [row for row in batch.select(["codec", "value"]).to_pylist() if row["codec"] != kvspool.Codec.RAW]
        found += [msgspec.msgpack.decode(row["value"]) for row in rows]


def before(lost: str) -> list[Any]:
    return [{"alpha": 1}, *([None] if lost == KEPT else []), {"delta": 3}, {"alpha": 4}]


def check_all_read(log: Spool, expected: list[Any]) -> None:
    """Check that this handle, another process and a new handle read the same, each record with its own keys."""
    path = log.path

    def read() -> list[Any]:
        with opened(path) as other:
            assert other.recovery is None
            return meanings(other)

    assert in_child(read) == expected
    assert meanings(log) == expected
    with opened(path) as other:
        assert meanings(other) == expected


def by_append(log: Spool, values: list[Any]) -> None:
    for value in values:
        log.append(value)


def by_append_to_disk(log: Spool, values: list[Any]) -> None:
    for value in values:
        log.append(value, durable=True)


def by_append_many(log: Spool, values: list[Any]) -> None:
    log.append_many(values)


def by_a_writer(log: Spool, values: list[Any]) -> None:
    with log.writer() as writer:
        for value in values:
            writer.append(value)


def by_append_many_of_a_writer(log: Spool, values: list[Any]) -> None:
    with log.writer() as writer:
        writer.append_many(values)


def by_a_producer(log: Spool, values: list[Any]) -> None:
    assert not log.producer("p").append_many(values, batch=1).repeated
    assert log.producer("p").append_many(values, batch=1).repeated


def by_append_rows(log: Spool, values: list[Any]) -> None:
    log.append_rows(values_of(0, [msgspec.msgpack.encode(value) for value in values], kvspool.Codec.KEYED))


VERBS = [
    by_append,
    by_append_to_disk,
    by_append_many,
    by_a_writer,
    by_append_many_of_a_writer,
    by_a_producer,
    by_append_rows,
]  # fmt: skip


@pytest.mark.parametrize("lost", [KEPT, FORGOTTEN])
@pytest.mark.parametrize("verb", VERBS)
def test_an_open_handle_appends_each_record_with_its_own_keys_after_a_recovery(
    tmp_path: Path, verb: Callable[[Spool, list[Any]], None], lost: str
) -> None:
    values = [{"beta": 5}, {"alpha": 6, "gamma": [{"beta": 7}, {1: 2, "delta": 8}]}, {"delta": 9}]
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        lose_beta(log, lost)
        verb(log, values)
        check_all_read(log, [*before(lost), *values])
        assert log.verify().is_sound == (lost == FORGOTTEN)


def test_a_batch_that_was_prepared_before_a_recovery_keeps_its_keys(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        copy = copied(log)
        batch = log.prepare([{"alpha": 5}, {"beta": 6}, "text", {"beta": {"alpha": None}}])
        lose_beta(log, FORGOTTEN, copy)
        log.append_prepared(batch)
        assert meanings(log)[-4:] == [{"alpha": 5}, {"beta": 6}, "text", {"beta": {"alpha": None}}]
        check_all_read(log, meanings(log))


def test_a_batch_whose_keys_no_longer_fit_is_refused_whole(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        copy = copied(log)
        batch = log.prepare([{"alpha": 5}, [{"beta": None}] * 5000])
        lose_beta(log, KEPT, copy)
        with pytest.raises(errors.TooLarge):
            log.append_prepared(batch)
        check_all_read(log, before(KEPT))


def test_a_shard_set_appends_each_record_with_its_own_keys_after_a_recovery(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", bits=1, capacity=CAPACITY, codec="keyed") as shards:
        lose_beta(shards.shards[0])
        values = [{"beta": number} for number in range(20)]
        shards.append_many(values, keys=[b"%d" % number for number in range(20)])
        got = [record.data for record in shards.read(on_gap="skip")]
        assert [value for value in values if value not in got] == []
        with shard.open(tmp_path / "root") as others:
            assert [record.data for record in others.read(on_gap="skip")] == got


def test_a_child_of_a_fork_appends_each_record_with_its_own_keys_after_a_recovery(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        log.append({"alpha": 1})

        def lose_and_append() -> None:
            lose_beta(log)
            log.append({"beta": 5})

        in_child(lose_and_append)
        log.append({"beta": 6})
        check_all_read(log, [{"alpha": 1}, *before(FORGOTTEN), {"beta": 5}, {"beta": 6}])


def test_each_recovery_is_noticed_although_nothing_was_appended_after_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with kvspool.create(path, capacity=CAPACITY, codec="keyed") as log:
        log.append({"alpha": 1})
        copy = (path / format.CONTROL_FILE).read_bytes()
        log.append(b"published after the copy")
    restore(copy, path)
    with opened(path) as log:
        log.prepare([{"beta": 2}])  # its key is in the table, and no record is in the log
        first = log.end()
        restore(copy, path)

        def recover() -> None:
            with opened(path) as other:
                assert other.end() >> 32 > first >> 32
                other.append({"delta": 3})

        in_child(recover)
        log.append({"beta": 5})
        check_all_read(log, [{"alpha": 1}, {"delta": 3}, {"beta": 5}])


def test_a_resize_copies_the_keys_that_the_table_has_after_a_recovery(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        lose_beta(log)
        log.resize(2 * CAPACITY, timeout=10.0)
        log.append({"beta": 5})
        check_all_read(log, [*before(FORGOTTEN), {"beta": 5}])


@pytest.mark.parametrize("lost", [KEPT, FORGOTTEN])
def test_iterations_that_were_open_read_each_record_with_its_own_keys_after_a_recovery(tmp_path: Path, lost: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        copy = copied(log)
        log.prepare([{"beta": 0}])
        reader = log.reader("r")
        taking, following = log.read(1, on_gap="skip"), log.follow(1, timeout=0, on_gap="skip")
        durable = reader.follow(timeout=0, on_gap="skip")
        cursor = log.cursor(1)
        assert next(durable).data == {"alpha": 1}
        lose_beta(log, lost, copy)
        expected = before(lost)[1:]
        for iteration in (following, durable, log.read(1, on_gap="skip")):
            assert [meaning(record) for record in iteration if record.codec == kvspool.Codec.KEYED] == expected
        assert [record.sequence for record in taking] == []  # bounded: what was there when it began
        assert columns(cursor) == expected


def test_a_record_that_was_read_before_a_recovery_keeps_its_keys(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, codec="keyed") as log, opened(tmp_path / "log") as other:
        log.append({"alpha": 1})
        copy = (log.path / format.CONTROL_FILE).read_bytes()
        other.append({"beta": 2})
        records = list(log)
        while log.extent()[0] < 2:
            log.append(bytes(500))
        restore(copy, log.path)

        def recover() -> None:
            with opened(log.path) as another:
                another.append({"delta": 3})

        in_child(recover)
        assert meanings(log) == [{"delta": 3}]
        assert [record.data for record in records] == [{"alpha": 1}, {"beta": 2}]


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_records_that_are_copied_out_around_a_recovery_have_their_own_keys(tmp_path: Path, is_overwritten: bool) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, codec="keyed") as log, opened(tmp_path / "log") as other:
        copies = [copied(log)]

        def make(sequence: int, *fields: Any, **options: Any) -> Record:
            """Let the log be recovered during the first copying of record 1."""
            if copies and sequence == 1:
                copy = copies.pop()
                if not is_overwritten:
                    copy = (log.path / format.CONTROL_FILE).read_bytes()
                    other.append(b"published after the copy")
                while is_overwritten and log.extent()[0] < 2:
                    other.append(bytes(500))
                restore(copy, log.path)
                in_child(recover)
            return Record(sequence, *fields, **options)

        def recover() -> None:
            with opened(log.path) as another:
                another.append({"delta": 3})

        reading = Iteration(log.cursor(1), make=make)  # which doesn't know the key "beta" by now
        other.append({"beta": 2})
        got = [meaning(record) for record in reading if isinstance(record, Record) and record.codec != kvspool.Codec.RAW]
        assert got == ([{"delta": 3}] if is_overwritten else [{"beta": 2}, {"delta": 3}])


def test_the_loops_append_no_value_with_keys_of_another_era(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        writer = log.frame_writer()
        assert writer.append(None, b"", 0, kvspool.Codec.KEYED, -1, 1) == frames.OUTDATED
        assert [writer.append(None, b"", 0, 0, -1, era) for era in (0, -1)] == [0, 1]


def test_a_follower_that_sleeps_in_another_process_reads_with_the_right_keys_after_a_recovery(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=CAPACITY, codec="keyed") as log:
        copy = copied(log)
        awake, waker = os.pipe()

        def follow() -> list[Any]:
            with opened(log.path) as other:
                found = []
                for record in other.follow(timeout=60, on_gap="skip"):
                    if record.codec == kvspool.Codec.KEYED:
                        found.append(record.data)
                    if len(found) == 1:
                        other.prepare([{"beta": 2}])
                        os.write(waker, b"1")
                    if len(found) == 3:
                        break
                return found

        wait = start(follow)
        os.read(awake, 1)
        lose_beta(log, FORGOTTEN, copy)
        assert wait() == [{"alpha": 1}, {"delta": 3}, {"alpha": 4}]
        os.close(awake)
        os.close(waker)


class Interrupting(system.Port):
    """Calls a function during the first flush."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work

    def flush_data(self, fd: int) -> None:
        work, self.work = self.work, None
        if work is not None:
            work()
        super().flush_data(fd)


def test_no_recovery_comes_between_while_a_key_is_added(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with kvspool.create(path, capacity=CAPACITY, codec="keyed") as log:
        copy = copied(log)
        log.append(b"published after the copy")

        def recover() -> None:
            with pytest.raises(errors.LockTimeout, match="another process adds keys"):
                kvspool.open(path, timeout=0.0)

        def restore_and_recover() -> None:
            restore(copy, path)
            in_child(recover)

        with system.replaced(Interrupting(restore_and_recover)), pytest.raises(errors.Corruption):
            log.append({"beta": 2})
        with opened(path) as other:
            other.append({"delta": 3})
            log.append({"beta": 4})
            check_all_read(log, [{"alpha": 1}, {"delta": 3}, {"beta": 4}])
