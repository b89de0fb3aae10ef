"""A log that changes its size while it is in use: processes notice only a Gap, and no crash costs a record."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, start
from faults import FailingPort, KillingPort
from schedules import ALL

import hub
import kvspool
import shard
from kvspool import Gap, Record, Spool, system
from kvspool.engine import locks
from kvspool.errors import Corruption, LockTimeout, LogVanished, MismatchedFiles, Poisoned, SpoolFull, TooLarge
from kvspool.kernel import frames_py
from kvspool.spool import format
from kvspool.spool.spool_files import SpoolFiles

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
SIZES = (4096, 65536, 8192, 1 << 20, 4096, 16384)


def fill(log: Spool, count: int) -> None:
    for at in range(count):
        log.append(b"%d " % at * 10, key=b"k%d" % at if at % 3 else None, type=at % 256, timestamp=1000 + at // 2)


def everything(path: Path) -> list[Record | Gap]:
    with kvspool.open(path) as log:
        return list(log.read(0, on_gap="yield"))


def neighbours(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path.parent) if name.startswith(".log"))


@pytest.mark.parametrize("codec", ["json", "keyed"])
def test_records_keep_what_they_are_and_a_larger_ring_takes_more(tmp_path: Path, codec: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=8192, codec=codec, mode=0o640) as log:
        fill(log, 150)
        log.append_many([{"a": 1, "b": {"c": None}}, "text"], keys=[b"", None])
        before, stats = list(log), log.stats()
        assert before[0].sequence > 0, "the ring went round"
        done = kvspool.resize(log.path, "64KiB")
        assert (done.before, done.capacity, done.records, done.dropped) == (8192, 65536, len(before), 0)
        assert list(log) == before
        assert [record.data for record in log] == [record.data for record in before]
        after = log.stats()
        same = ("log_id", "policy", "codec", "records", "first_sequence", "next_sequence", "first_timestamp", "last_timestamp", "created")
        assert all(getattr(after, name) == getattr(stats, name) for name in same)
        assert (after.capacity, after.synced_sequence) == (65536, after.next_sequence)
        assert after.rates.hours == stats.rates.hours
        assert log.append(b"on", timestamp=1) == stats.next_sequence
        assert [record.timestamp for record in log][-1] == stats.last_timestamp
        for name in (format.CONTROL_FILE, format.DATA_FILE):
            assert stat.S_IMODE(os.stat(log.path / name).st_mode) == 0o640
        assert stat.S_IMODE(os.stat(log.path).st_mode) == 0o750
    assert neighbours(tmp_path / "log") == []


def test_in_a_smaller_ring_the_newest_records_stay_and_readers_get_a_gap_for_the_others(log: Spool) -> None:
    kvspool.resize(log.path, 65536)
    fill(log, 700)
    following = log.follow(on_gap="yield", timeout=0)
    assert [next(following).sequence for _ in range(3)] == [0, 1, 2]
    before = list(log)
    with log.reader("behind", 10) as behind, log.reader("ahead", 690) as ahead:
        done = kvspool.resize(log.path, 4096)
        kept = list(log)
        assert kept == before[-len(kept) :]
        assert 4096 - 200 < log.stats().used <= 4096
        assert (done.records, done.dropped) == (len(kept), 700 - len(kept))
        gap = Gap(10, 699 - len(kept), "resized", str(log.path))
        assert list(behind.read(on_gap="yield")) == [gap, *kept]
        assert [record.sequence for record in ahead.read()] == list(range(690, 700))
        assert next(log.read(5, on_gap="yield")) == Gap(5, gap.last, "resized", str(log.path))
    # The records that it had reached are still in the old memory.
    assert [item.sequence for item in following] == list(range(3, 700))
    log.append_many([bytes(100)] * 20)
    assert next(log.read(5, on_gap="yield")).reason == "overrun"


def test_an_empty_log_keeps_its_place(log: Spool) -> None:
    log.append_many([bytes(500)] * 20, timestamp=77)
    kvspool.resize(log.path, 4096)
    fill(log, 0)
    kvspool.resize(log.path, 1 << 16)
    assert log.append(b"next", timestamp=1) == 20
    assert list(log)[-1].timestamp == 77
    with kvspool.create(log.path.with_name("empty"), capacity=4096) as empty:
        kvspool.resize(empty.path, 8192)
        kvspool.resize(empty.path, 4096)
        assert empty.append(b"first") == 0
        assert empty.log_id == kvspool.open(empty.path).log_id


def test_left_out_numbers_stay_left_out(log: Spool) -> None:
    log.append(b"before")
    with log._thread_lock:
        writer = log._open_writer()
        writer.locked(lambda writer: (writer.begin(), writer.put_copy(1 << 32, 5, 0, None, b"after a restart", 0), writer.publish()))
    before = list(log.read(on_gap="yield"))
    assert [type(item) for item in before] == [Record, Gap, Record]
    kvspool.resize(log.path, 65536)
    assert list(log.read(on_gap="yield")) == before
    assert log.append(b"x") == (1 << 32) + 1


def test_durable_readers_keep_their_slots_and_places_and_open_ones_stay_open(log: Spool) -> None:
    kvspool.resize(log.path, 8192)
    fill(log, 60)
    closed = log.reader("closed", 20)
    closed.close()
    with log.reader("open", 30) as reader:
        iterator = reader.follow(timeout=0)
        assert next(iterator).sequence == 30
        before = log.readers()
        for size in SIZES:
            kvspool.resize(log.path, size)
            with pytest.raises(kvspool.errors.ReaderBusy):
                kvspool.open(log.path).reader("open")
        assert [(one.name, one.sequence, one.slot, one.updated) for one in log.readers()] == [
            (one.name, one.sequence, one.slot, one.updated) for one in before
        ]
        assert reader.commit() == 31
        assert next(iterator).sequence == 31
        kvspool.resize(log.path, 65536)
        reader.seek(59)
        assert [record.sequence for record in reader.read()] == [59]
        assert reader.commit() == 60
    with kvspool.open(log.path) as other, other.reader("open") as reader:
        assert reader.sequence == 60
        other.delete_reader("closed")
    assert [one.name for one in log.readers()] == ["open"]


@pytest.mark.parametrize("policy", ["block", "raise"])
def test_what_a_durable_reader_has_yet_to_read_is_never_dropped(tmp_path: Path, policy: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=8192, policy=policy, timeout=0) as log:
        reader = log.reader("slow")
        fill(log, 80)
        with pytest.raises(SpoolFull, match="'slow' has .* pending records"):
            kvspool.resize(log.path, 4096)
        assert (log.capacity, neighbours(log.path)) == (8192, [])
        assert [record.sequence for record in reader.read(limit=60)] == list(range(60))
        reader.commit()
        kvspool.resize(log.path, 4096)
        with pytest.raises(SpoolFull):
            log.append_many([bytes(800)] * 4)
        assert [record.sequence for record in reader.read()] == list(range(60, 80))
        reader.commit()
        log.append_many([bytes(800)] * 4)


def test_a_record_that_would_not_fit_a_damaged_log_and_others_files_are_refused(log: Spool) -> None:
    kvspool.resize(log.path, 65536)
    log.append(bytes(5000))
    with pytest.raises(TooLarge):
        kvspool.resize(log.path, 16384)
    (log.path / "notes").write_text("mine")
    with pytest.raises(OSError, match="holds other files") as raised:
        kvspool.resize(log.path, 131072)
    assert raised.value.errno == errno.ENOTEMPTY
    (log.path / "notes").unlink()
    with open(log.path / format.DATA_FILE, "r+b") as data:
        data.seek(4096 + 100)
        data.write(b"!")
    with pytest.raises(Corruption, match="damaged at record 0"):
        kvspool.resize(log.path, 131072)
    with pytest.raises(ValueError, match="capacity"):
        kvspool.resize(log.path, 1 << 43)
    log._live().control.cast("Q")[frames_py.SYNC_ERROR] = 5
    with pytest.raises(Poisoned):
        kvspool.resize(log.path, 131072)
    assert (log.capacity, neighbours(log.path)) == (65536, [])


def test_a_failure_at_any_call_leaves_the_log_as_it_was_or_as_it_was_to_be(interpreted: None, log: Spool) -> None:
    fill(log, 40)
    expected = list(log)
    outcomes = set()
    for nth in range(1, 500):
        port = FailingPort(nth, errno.EIO)
        capacity = log.capacity
        with system.replaced(port):
            try:
                kvspool.resize(log.path, 8192)
            except (OSError, Poisoned, kvspool.errors.KvspoolError):
                pass
        if not port.failed:
            break
        outcomes.add(log.capacity)
        assert list(log) == expected
        with kvspool.open(log.path) as fresh:
            assert list(fresh) == expected
            assert fresh.capacity == log.capacity
        kvspool.resize(log.path, capacity)
        assert neighbours(log.path) == []
    assert outcomes == {4096, 8192} or outcomes == {4096}
    assert nth > 50


def test_a_resize_that_is_killed_at_any_call_costs_no_record(tmp_path: Path) -> None:
    # For every opcode see `tests/processes/test_crash_points.py`.
    path = tmp_path / "log"
    kvspool.create(path, capacity=4096, codec="keyed").close()
    kills = moved = ended = sequence = 0
    with kvspool.open(path) as writing, kvspool.open(path) as reading, reading.reader("durable") as reader:
        following = reading.follow(timeout=0)
        while ended < 2:
            before = writing.capacity

            def killed(nth: int = kills + 1, capacity: int = 12288 - before) -> None:
                with system.replaced(KillingPort(nth)):
                    kvspool.resize(path, capacity)

            try:
                in_child(killed)
                ended += 1
            except Died as died:
                assert died.signal == signal.SIGKILL
                kills += 1
            with kvspool.open(path) as fresh:
                moved += fresh.capacity != before
                value = {"key": sequence, f"k{sequence % 8}": None}
                assert writing.append(value) == sequence
                assert [record.data for record in following] == [value]
                assert [record.data for record in reader.read()] == [value]
                sequence += 1
                assert reader.commit() == sequence
                assert list(fresh)[-1].data == value
                assert fresh.readers()[0].sequence == sequence
                assert not fresh._live().may_have_moved, "a writer takes the word back"
        assert neighbours(path) == [], "a later resize has removed what the killed ones left"
    assert kills > 60
    assert moved > 2, "some were killed after the change"


class Watching(system.Port):
    """Keeps what each file had when it was last flushed, and what was on disk when the directories changed places."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: dict[tuple[int, int], bytes] = {}
        self.names_flushed: dict[str, list[str]] = {}
        self.calls: list[str] = []
        self.differing: list[list[int]] = []

    def flush(self, fd: int) -> None:
        super().flush(fd)
        self._note(fd)

    def flush_data(self, fd: int) -> None:
        super().flush_data(fd)
        self._note(fd)

    def _note(self, fd: int) -> None:
        found = os.fstat(fd)
        self.calls.append(os.readlink(f"/proc/self/fd/{fd}"))
        if stat.S_ISDIR(found.st_mode):
            self.names_flushed[self.calls[-1]] = sorted(os.listdir(fd))
        else:
            self.flushed[found.st_dev, found.st_ino] = os.pread(fd, found.st_size, 0)

    def exchange(self, one: Any, other: Any) -> None:
        assert self.names_flushed[str(one)] == sorted(os.listdir(one)) == [format.CONTROL_FILE, format.DATA_FILE, format.LOCK_FILE]
        for name in (format.DATA_FILE, format.CONTROL_FILE):
            found = os.stat(Path(one) / name)
            had, now = self.flushed[found.st_dev, found.st_ino], (Path(one) / name).read_bytes()
            self.differing.append([at for at in range(0, len(now), 8) if had[at : at + 8] != now[at : at + 8]])
        self.calls.append("exchange")
        super().exchange(one, other)


def test_the_new_files_are_on_disk_before_they_take_the_place_and_the_directory_after(log: Spool) -> None:
    fill(log, 30)
    with system.replaced(Watching()) as port:
        kvspool.resize(log.path, 8192)
    assert isinstance(port, Watching)
    assert port.differing == [[], []]
    at = port.calls.index("exchange")
    assert any(name.endswith(".resize") for name in port.calls[:at]), "and the entries of the new directory"
    assert str(log.path.parent) in port.calls[at:]


def test_a_foreign_log_is_not_mistaken_for_the_new_files(log: Spool, tmp_path: Path) -> None:
    log.append(b"ours")
    following = log.follow(timeout=0)
    assert next(following).value == b"ours"
    with kvspool.create(tmp_path / "foreign", capacity=4096) as foreign:
        foreign.append_many([b"theirs"] * 3)
    os.rename(log.path, tmp_path / "away")
    os.rename(tmp_path / "foreign", log.path)
    SpoolFiles(tmp_path / "away").control.cast("Q")[frames_py.MOVED] = 1
    for use in (lambda: next(following), lambda: log.append(b"x"), log.sync):
        with pytest.raises(MismatchedFiles):
            use()
    with kvspool.open(tmp_path / "log") as there:
        assert len(list(there)) == 3


def test_a_log_that_is_deleted_after_it_was_resized_is_missed(log: Spool) -> None:
    following = log.follow(timeout=1)
    kvspool.resize(log.path, 8192)
    for name in os.listdir(log.path):
        os.remove(log.path / name)
    os.rmdir(log.path)
    with pytest.raises(LogVanished):
        next(following)
    with pytest.raises(LogVanished):
        log.append(b"x")


def test_a_resize_waits_for_no_longer_than_it_may(log: Spool) -> None:
    file = log._live().open_lock()
    with locks.appending(log._live().append_lock_by(file.number), 0, str), pytest.raises(LockTimeout):
        kvspool.resize(log.path, 8192, timeout=0)
    file.close()
    assert (log.append(b"x"), log.capacity, neighbours(log.path)) == (0, 4096, [])


def test_a_sleeper_wakes_and_continues_in_the_new_files(log: Spool) -> None:
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(record.sequence for record in log.follow(timeout=30, limit=3)))
    thread.start()
    log.append(b"a")
    kvspool.resize(log.path, 8192)
    with kvspool.open(log.path) as other:
        other.append(b"b")
        kvspool.resize(log.path, 4096)
        other.append(b"c")
    thread.join(30)
    assert got == [0, 1, 2]


def test_shard_sets_and_hub_roots_follow(tmp_path: Path) -> None:
    with shard.create(tmp_path, prefix="client", bits=1, capacity=4096) as shards, hub.open(tmp_path) as root:
        following, merged = root.follow(timeout=0), shards.follow(timeout=0)
        for turn, size in enumerate(SIZES):
            for index in range(2):
                kvspool.resize(shards.shards[index].path, size)
                shards.shards[index].append(b"%d" % turn)
            assert sorted((item.shard, item.value) for item in following) == [(0, b"%d" % turn), (1, b"%d" % turn)]
            assert sorted((item.shard, item.value) for item in merged) == [(0, b"%d" % turn), (1, b"%d" % turn)]
        assert all(log.capacity == SIZES[-1] for log in shards.shards)


def test_handles_follow_through_a_fork_too(log: Spool) -> None:
    log.append(b"before")
    with log.reader("durable") as reader:
        kvspool.resize(log.path, 8192)
        assert in_child(lambda: log.append(b"child")) == 1
        assert [record.value for record in reader.read()] == [b"before", b"child"]
        assert reader.commit() == 2
    assert in_child(lambda: kvspool.resize(log.path, 65536).records) == 2
    assert log.append(b"parent") == 2


def write(path: Path, name: int, stop: int) -> list[tuple[int, bytes]]:
    """Append until `stop` can be read; return what was acknowledged."""
    acknowledged = []
    os.set_blocking(stop, False)
    with kvspool.open(path, timeout=60) as log:
        for number in range(1 << 30):
            value = {"writer": name, "number": number, f"k{number % 40}": None}
            if number % 7:
                acknowledged.append((log.append(value), number))
            else:
                sequences = log.append_many([value, {**value, "second": True}], keys=[b"a", None])
                acknowledged += [(sequence, number) for sequence in sequences]
            if number % 16 == 0:
                try:
                    os.read(stop, 1)
                    return acknowledged
                except BlockingIOError:
                    pass
    raise AssertionError


def account(path: Path, name: str, start: int) -> list[tuple[int, int, Any]]:
    """Read from sequence `start` on to the end of all; return what every sequence was."""
    items: list[tuple[int, int, Any]] = []
    with kvspool.open(path, timeout=60) as log:
        if name == "follow":
            source: Any = log.follow(start, on_gap="yield", timeout=60)
        else:
            reader = log.reader(name, start)
            source = reader.follow(on_gap="yield", timeout=60)
        for item in source:
            if isinstance(item, Gap):
                items.append((item.first, item.last, item.reason))
                continue
            items.append((item.sequence, item.sequence, item.data))
            if name != "follow" and item.sequence % 50 == 0:
                assert reader.commit() == item.sequence + 1
            if item.type == 255:
                return items
    raise AssertionError("the last record never came")


def test_writers_and_readers_account_for_every_sequence_while_the_log_is_resized_and_resizers_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kvspool.create(path, capacity=65536, codec="keyed").close()
    stops = [os.pipe() for _ in range(3)]
    writers = [start(lambda at=at: write(path, at, stops[at][0]), 240) for at in range(3)]
    readers = [start(lambda name=name: account(path, name, 0), 240) for name in ("follow", "one", "two")]

    def change(size: int, nth: int) -> None:
        with system.replaced(KillingPort(nth)):
            kvspool.resize(path, size, timeout=60)

    for turn in range(24 if ALL else 12):
        size = (16384, 262144, 65536)[turn % 3]  # never the size that it has
        if turn % 2:
            with pytest.raises(Died):  # a resize makes more than 60 calls
                in_child(lambda size=size, nth=(2 if ALL else 5) * turn: change(size, nth))
        else:
            in_child(lambda size=size: change(size, 0))
    for stop in stops:
        os.write(stop[1], b"!")
    acknowledged = dict(pair for writer in writers for pair in writer())
    with kvspool.open(path) as log:
        last = log.append(None, type=255)
    for reader in readers:
        items = reader()
        expected = 0
        for first, until, what in items:
            assert first == expected
            expected = until + 1
            if isinstance(what, dict) and first in acknowledged:
                assert what["number"] == acknowledged[first]
            elif isinstance(what, str):
                assert what in ("overrun", "resized")
        assert expected == last + 1
    assert set(range(last)) == set(acknowledged), "every sequence was acknowledged, and none twice"
    for ends in stops:
        for fd in ends:
            os.close(fd)


def test_a_handle_from_before_a_resize_sees_that_another_log_has_taken_the_place(log: Spool) -> None:
    kvspool.resize(log.path, 8192)
    assert not log.has_vanished()
    shutil.rmtree(log.path)
    kvspool.create(log.path, capacity=4096).close()
    assert log.has_vanished()


def test_a_sync_and_a_new_key_between_which_the_log_is_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvspool.create(tmp_path / "keyed", capacity=4096, codec="keyed") as log:
        opened = log._open_writer

        def resized() -> Any:
            writer = opened()
            monkeypatch.setattr(log, "_open_writer", opened)
            in_child(lambda: kvspool.resize(log.path, log.capacity * 2).records)
            return writer

        monkeypatch.setattr(log, "_open_writer", resized)
        assert log.sync() == 0
        monkeypatch.setattr(log, "_open_writer", resized)
        assert log.append({"a key": 1}) == 0
        assert [record.data for record in log] == [{"a key": 1}]


def test_a_resize_of_a_handle_that_is_closed_meanwhile_leaves_nothing(log: Spool) -> None:
    log.append_many([bytes(100)] * 50)
    there = [record.sequence for record in log]

    def close(done: int, size: int) -> None:
        log.close()

    assert log.resize(2 * log.capacity, timeout=5.0, progress=close).records == len(there)
    assert [path.name for path in log.path.parent.iterdir()] == [log.path.name]
    with kvspool.open(log.path, format="spool") as again:
        assert [record.sequence for record in again] == there


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_resize_of_a_log_that_was_moved_away_changes_no_file(tmp_path: Path, is_replaced: bool) -> None:
    path, moved = tmp_path / "log", tmp_path / "moved"
    with kvspool.create(path, capacity=8192) as log:
        log.append(b"old")

        class Late(system.Port):  # the log is moved away before the resize has the lock, after it found the files
            is_moved = False

            def try_lock(self, fd: int, at: int) -> bool:
                if not self.is_moved:
                    self.is_moved = True
                    path.rename(moved)
                    if is_replaced:
                        kvspool.create(path, capacity=8192).append(b"new")
                return super().try_lock(fd, at)

        with system.replaced(Late()), pytest.raises(LogVanished, match="deleted, moved or replaced"):
            log.resize("64KiB")
    assert [record.value for record in kvspool.open(moved)] == [b"old"]
    if is_replaced:
        with kvspool.open(path) as other:
            assert (other.capacity, [record.value for record in other]) == (8192, [b"new"])
    assert sorted(os.listdir(tmp_path)) == (["log", "moved"] if is_replaced else ["moved"])
