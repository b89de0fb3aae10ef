"""Journals of any format, tested with sej: many writers, followers, durable readers, durability, forks."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import append_lock
import pytest
from children import Died, in_child, let_others_read, start
from faults import FailingPort

import kvspool
from kvspool import Gap, GapError, system
from kvspool.errors import (
    LockTimeout,
    LogExists,
    LogNotFound,
    LogVanished,
    Poisoned,
    ReaderBusy,
    TooLarge,
    Truncated,
)
from kvspool.journal import Journal, JournalBatch
from kvspool.system import Port

SMALL = {"format": "sej", "segment_bytes": 200}


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with kvspool.create(tmp_path / "log", **SMALL) as log:  # type: ignore[call-overload]
        yield log


def reopened(log: Journal) -> Journal:
    return kvspool.open(log.path)  # type: ignore[return-value]


# Making and opening.


def test_create_refuses_what_is_there(log: Journal) -> None:
    with pytest.raises(LogExists):
        kvspool.create(log.path, format="sej")


def test_an_empty_directory_may_become_a_journal(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    kvspool.create(tmp_path / "log", format="sej").close()
    with kvspool.open(tmp_path / "log", format="sej") as log:
        assert log.stats().records == 0


@pytest.mark.parametrize("nth", range(1, 30))
def test_a_create_that_fails_leaves_nothing(tmp_path: Path, nth: int) -> None:
    port = FailingPort(nth, errno.ENOSPC)
    try:
        with system.replaced(port):
            kvspool.create(tmp_path / "log", format="sej").close()
    except OSError:
        if port.failed != "close":
            assert not any(tmp_path.iterdir()), port.failed
    else:
        assert nth > 15, port.failed  # what fails after the first segment exists is done by the next append
        with kvspool.open(tmp_path / "log") as log:
            assert log.append(b"a") == 0


def test_rights(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"")
        log.reader("r").close()
    for path in (tmp_path / "log").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    with kvspool.create(tmp_path / "shown", format="sej", mode=0o640, segment_bytes=1) as log:
        log.append(b"")
    for path in (tmp_path / "shown").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_a_vanished_journal_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(LogNotFound):
        kvspool.open(tmp_path / "none")


def test_the_settings_are_kept(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", format="sej", segment_bytes="1MiB", codec="msgpack", durability="disk").close()
    with kvspool.open(tmp_path / "log") as log:
        assert isinstance(log, Journal)
        assert log.format.limits() == {"segment_bytes": 1 << 20}
        assert log.durability == "disk"
        log.append({"a": 1})
        assert log.stats().synced_sequence == 1
        assert [record.value for record in log] == [b"\x81\xa1a\x01"]


# Arguments.


def test_a_key_without_room_is_refused_before_anything_is_written(log: Journal) -> None:
    with pytest.raises(TooLarge):
        log.append(b"v", key=b"k" * 128)
    assert log.stats().next_sequence == 0


# Gaps.


def test_what_was_trimmed_is_a_gap(log: Journal) -> None:
    log.append_many([b"x" * 50] * 9)
    with log.read(on_gap="yield") as reading:
        first = next(reading)
        for base in (0, 3):
            log._segments.path_of(base).unlink()
        rest = list(reading)
    assert first.sequence == 0
    # Records that were read ahead, or whose segment is still open, are returned; removed ones are one Gap.
    gaps = [item for item in rest if isinstance(item, Gap)]
    assert [(gap.first, gap.last, gap.reason) for gap in gaps] == [(3, 5, "trimmed")]
    assert [item.sequence for item in rest if not isinstance(item, Gap)] == [1, 2, 6, 7, 8]
    with pytest.raises(GapError) as error:
        next(log.read(0))
    assert (error.value.gap.first, error.value.gap.last) == (0, 5)
    with log.reader("late") as reader:
        assert reader.sequence == 6


def test_a_segment_that_is_gone_is_a_gap(log: Journal) -> None:
    log.append_many([b"x" * 50] * 9)
    log._segments.path_of(3).unlink()
    found = list(log.read(on_gap="yield"))
    assert [(one.first, one.last, one.reason) if isinstance(one, Gap) else one.sequence for one in found] == [
        0, 1, 2, (3, 5, "damaged"), 6, 7, 8,
    ]  # fmt: skip
    gap = next(log.read(4, on_gap="yield"))
    assert (gap.first, gap.last) == (4, 5)
    assert log.verify().damaged_records == 3


@pytest.mark.parametrize("form", ["sej", "kvj"])
def test_a_last_segment_that_is_gone_is_damage_and_its_sequences_are_not_given_again(tmp_path: Path, form: Any) -> None:
    with kvspool.create(tmp_path / "log", format=form, segment_bytes=200) as log:
        assert isinstance(log, Journal)
        log.append_many([b"x" * 50] * 5)
        *_, last = log._segments.bases()
        assert last < 5
        following = log.follow(on_gap="yield", timeout=5)
        assert [next(following).sequence for _ in range(last)] == [*range(last)]
        log._segments.path_of(last).unlink()
        lost = [*range(last), (last, 4, "damaged")]
        assert _shown(log.read(on_gap="yield")) == lost
        assert log.extent() == (0, 5)
        assert log.stats().next_sequence == 5
        assert _shown([next(following)]) == lost[-1:]
        following.close()
        assert _shown(log.read(4, on_gap="yield")) == [(4, 4, "damaged")]
        with log.follow(5, timeout=5) as after:
            assert log.append(b"new") == 5
            assert next(after).sequence == 5
        assert _shown(log.read(on_gap="yield")) == [*lost, 5]


def test_a_last_segment_that_is_gone_before_anything_was_in_it_is_no_damage(log: Journal) -> None:
    log.append_many([b"x" * 200])
    log._segments.path_of(1).unlink()
    assert _shown(log.read(on_gap="yield")) == [0]
    assert log.append(b"x") == 1
    assert _shown(log.read(on_gap="yield")) == [0, 1]


def _shown(items: Any) -> list[Any]:
    return [(one.first, one.last, one.reason) if isinstance(one, Gap) else one.sequence for one in items]


def test_a_file_that_was_cut_under_a_reader_fails_fast(log: Journal) -> None:
    log.append_many([b"x"] * 3)
    with log.follow(timeout=5) as following:
        assert next(following).sequence == 0
        assert [next(following).sequence, next(following).sequence] == [1, 2]
        os.truncate(log._segments.path_of(0), 10)
        with pytest.raises(Truncated, match="was cut to 10 bytes"):
            next(following)


# Followers.


def test_a_partial_message_is_not_yet_there(log: Journal) -> None:
    log.append(b"whole")
    path = log._segments.path_of(0)
    whole = path.read_bytes()
    with kvspool.open(log.path) as writer:
        writer.append(b"later")
    later = path.read_bytes()
    for cut in range(len(whole), len(later)):
        os.truncate(path, cut)
        log.format.lock_file(log.path).unlink(missing_ok=True)  # or the page would say that more was there
        with log.follow(timeout=0) as following:
            assert [record.value for record in following] == [b"whole"]
            with path.open("r+b") as file:
                file.write(later)
            assert [record.value for record in following] == [b"later"]


# Many writers.


def test_processes_append_at_once(log: Journal) -> None:
    def write(who: int) -> Any:
        with reopened(log) as other:
            return [other.append_many([b"%d %d" % (who, number)] * 3)[0] for number in range(50)]

    waits = [start(lambda who=who: write(who)) for who in range(4)]  # type: ignore[misc]
    taken = [first for wait in waits for first in wait()]
    assert sorted(taken) == list(range(0, 600, 3))
    found = list(log.read())
    assert [record.sequence for record in found] == list(range(600))
    for who in range(4):
        mine = [record.value for record in found if record.value.startswith(b"%d " % who)]
        assert mine == [b"%d %d" % (who, number) for number in range(50) for _ in range(3)]


def test_killed_writers_lose_nothing_that_was_acknowledged(log: Journal, tmp_path: Path) -> None:
    # A writer has a ledger of its own: a kill may cut a line short where it crosses a page of the file.
    def write(who: int) -> None:
        with reopened(log) as other, (tmp_path / f"ledger.{who}").open("ab", buffering=0) as file:
            number = 0
            while True:
                sequence = other.append(b"%d %d" % (who, number))
                file.write(b"%d %d %d\n" % (who, number, sequence))
                number += 1

    for round_ in range(8):
        pair = range(2 * round_, 2 * round_ + 2)
        waits = [start(lambda who=who: write(who)) for who in pair]  # type: ignore[misc]
        while any(not ledger.exists() or ledger.read_bytes().count(b"\n") < 5 for ledger in [tmp_path / f"ledger.{who}" for who in pair]):
            time.sleep(0.01)
        for wait in waits:
            os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(Died):
                wait()
    found = {record.sequence: record.value for record in log.read()}
    whole = [line for file in tmp_path.glob("ledger.*") for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    lines = [line.decode().split() for line in whole]
    assert len(lines) > 50
    for who, number, sequence in lines:
        assert found[int(sequence)] == f"{who} {number}".encode()
    assert len(set(found.values())) == len(found), "a record is there twice"


def test_a_writer_that_holds_the_lock_is_named(log: Journal) -> None:
    log.append(b"")
    with reopened(log) as other, append_lock.held(log), pytest.raises(LockTimeout, match=rf"process {os.getpid()} .*last"):
        in_child(lambda: None)
        other.append(b"", timeout=0.01)


def test_fork(log: Journal) -> None:
    log.append(b"parent")
    reading = log.follow(timeout=1)
    assert next(reading).value == b"parent"
    assert in_child(lambda: log.append(b"child")) == 1
    assert log.append(b"parent") == 2
    assert [record.value for record in log.read()] == [b"parent", b"child", b"parent"]

    def while_locked() -> None:
        with pytest.raises(LockTimeout):
            log.append(b"", timeout=0.01)

    with append_lock.held(log):
        in_child(while_locked)
    assert [next(reading).value, next(reading).value] == [b"child", b"parent"]


# Durable readers.


def test_a_reader_is_exclusive_until_its_process_ends(log: Journal) -> None:
    with log.reader("r"):
        with pytest.raises(ReaderBusy, match="'r'"):
            log.reader("r")
        with pytest.raises(ReaderBusy):
            log.delete_reader("r")
        with log.reader("other"):
            pass

    def hold() -> None:
        reader = log.reader("r")
        os.kill(os.getpid(), signal.SIGKILL)
        reader.close()

    with pytest.raises(Died):
        in_child(hold)
    log.reader("r").close()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\0", "-x", "x" * 201, "ä"])
def test_a_name_never_becomes_another_path(log: Journal, name: str) -> None:
    before = sorted(log.path.rglob("*"))
    with pytest.raises(ValueError, match="reader's name"):
        log.reader(name)
    assert [path for path in sorted(log.path.rglob("*")) if path.name != "ofs"] == before


def test_a_reader_moves_over_gaps(log: Journal) -> None:
    log.append_many([b"x" * 50] * 9)
    log.reader("r").close()
    log._segments.path_of(0).unlink()
    with log.reader("r") as reader:
        with pytest.raises(GapError):
            next(reader.read())
        assert next(reader.read()).sequence == 3
        assert reader.commit() == 4


# Durability.


class Flushes(Port):
    """Notes what is flushed, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.fails = False

    def flush_data(self, fd: int) -> None:
        self.paths.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        if self.fails:
            raise OSError(errno.EIO, "broken")
        super().flush_data(fd)

    def flush(self, fd: int) -> None:
        self.paths.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        super().flush(fd)


def test_durable_appends_flush_before_they_return(log: Journal) -> None:
    with system.replaced(Flushes()) as port:
        assert isinstance(port, Flushes)
        log.append(b"a")
        assert port.paths == []
        log.append(b"b", durable=True)
        assert port.paths == ["0000000000000000.jnl"]
        log.sync()
        assert len(port.paths) == 1, "all was there already"


def test_a_segment_is_on_disk_before_the_next_one_is_there(log: Journal) -> None:
    with system.replaced(Flushes()) as port:
        assert isinstance(port, Flushes)
        log.append(b"x" * 300)
        assert port.paths == ["0000000000000000.jnl", "0000000000000001.jnl", "jnl"]
    assert log.stats().synced_sequence == 1


def test_the_first_failed_flush_poisons_the_journal(log: Journal) -> None:
    with system.replaced(Flushes()) as port:
        assert isinstance(port, Flushes)
        log.append(b"a")
        port.fails = True
        with pytest.raises(Poisoned, match="broken"):
            log.sync()
    with pytest.raises(Poisoned, match="kvspool.repair"):
        log.append(b"b")
    with reopened(log) as other, pytest.raises(Poisoned):
        other.append(b"b")
    assert [record.value for record in log.read()] == [b"a"]
    assert log.stats().sync_error == errno.EIO


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("nth", range(1, 25))
def test_any_call_of_an_append_may_fail(log: Journal, nth: int, number: int) -> None:
    log.append(b"before")
    acknowledged = 1
    with system.replaced(FailingPort(nth, number)):
        for _ in range(4):  # over the end of a segment
            try:
                acknowledged = log.append(b"x" * 90) + 1
            except (OSError, Poisoned):
                break
    with reopened(log) as other:
        values = [record.value for record in other.read()]
        assert len(values) >= acknowledged
        if not other.stats().sync_error:
            assert other.append(b"after") == len(values)
            assert [record.value for record in other.read()] == [*values, b"after"]


def test_a_reader_without_rights_to_write(log: Journal) -> None:
    if os.getuid() != 0:
        pytest.skip("needs another user")
    log.append_many([b"x" * 30] * 20)
    let_others_read(log.path)

    def read() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with reopened(log) as other:
            assert [record.sequence for record in other.read()] == list(range(20))
            assert other.stats().next_sequence == 20
            with pytest.raises(PermissionError):
                other.append(b"")

    in_child(read)


def test_a_journal_that_is_deleted_ends_who_follows_it(log: Journal) -> None:
    log.append(b"a")
    with log.follow(timeout=30) as following:
        assert next(following).value == b"a"
        shutil.rmtree(log.path)
        with pytest.raises(LogVanished):
            next(following)
    with pytest.raises((LogNotFound, LogVanished)):
        log.append(b"b")


def test_threads_look_for_places_at_once(log: Journal) -> None:
    log.append_batch(JournalBatch([b"%d" % number * 10 for number in range(200)], timestamps=list(range(200))))
    assert log.stats().segments > 30, "more than are kept open"
    wrong: list[object] = []

    def look(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(300):
                sequence = choose.randrange(200)
                is_right = log.place(sequence).sequence == sequence and log.stats().next_sequence == 200
                if not is_right or log._places.first_time(log.bases()[3]) < 0:
                    wrong.append(sequence)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_extent_is_what_can_be_read(log: Journal) -> None:
    assert log.extent() == (0, 0)
    for count in range(1, 4):
        log.append_many([b"x" * 30] * 20)
        assert log.extent() == (0, 20 * count)
    log.sync()
    log.append(b"not on disk yet")
    assert log.extent() == (0, 61)
    assert log.extent("synced")[1] <= 60
    log.trim(before=40)
    assert log.extent() == (log.first(), 61)
    with pytest.raises(ValueError, match="isolation"):
        log.extent("dirty")  # type: ignore[arg-type]
