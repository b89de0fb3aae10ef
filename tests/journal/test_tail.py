"""The append in one step: the same bytes as the long way, and the long way wherever it can't be sure; the file that holds the tail."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from children import Died, in_child, start
from faults import NoFlushPort

import kvspool
from kvspool import system
from kvspool.errors import Closed, KvspoolError, LockTimeout, LogVanished, NotAFile, Poisoned
from kvspool.journal import Journal, JournalBatch, control
from kvspool.journal.appender import IS_ONE_STEP
from kvspool.journal.control import APPEND
from kvspool.journal.tail import COPY, TAIL
from kvspool.kernel import tail_py as tails
from kvspool.kernel.frames import crc32c
from kvspool.system import filesystems

FORMATS: dict[str, dict[str, Any]] = {
    "kvj": {"segment_bytes": 100_000},
    "sej": {"segment_bytes": 100_000},
    "fflg": {"segment_bytes": 100_000, "keep_consumed": 1},
    "fixed": {"item_bytes": 50, "items_per_blob": 1000},
}
only_compiled = pytest.mark.skipif(not IS_ONE_STEP, reason="the system fails there, not a port")


def create(path: Path, name: str, **limits: Any) -> Journal:
    return kvspool.create(path, format=name, **{**FORMATS[name], **limits})  # type: ignore[no-any-return,call-overload]


@pytest.fixture(params=FORMATS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with create(tmp_path / "log", request.param) as log:
        yield log


def reopened(log: Journal) -> Journal:
    return kvspool.open(log.path, timeout=5)  # type: ignore[return-value]


def value(number: int) -> bytes:
    return (b"%d " % number).ljust(50, b"x")


def values(log: Journal) -> list[bytes]:
    with reopened(log) as other:
        return [bytes(record.value) for record in other.read()]


def tail_file(log: Journal) -> Path:
    return control.tail_file(log.format.lock_file(log.path))


def last_segment(log: Journal) -> Path:
    segments = log.segments_apart()
    return segments.path_of(segments.bases()[-1])


def test_the_file_has_the_words_that_the_format_page_describes(log: Journal) -> None:
    log.append(value(0))
    log.append(value(1), durable=True)
    words = TAIL.unpack(tail_file(log).read_bytes())
    copy = COPY.unpack(words.copies, COPY.size * (words.state >> 2 & 1))
    assert words.state & 3 == 0 and words.lock & 0xFFFF == 0
    assert copy[:3] == (0, last_segment(log).stat().st_size, 2) and copy.synced == 2
    assert copy.check == tails.HIGH | crc32c(control._seed(system.port.boot_id(), tail_file(log).stat()), COPY.pack(copy)[:40])
    assert words.holder_pid == words.leader_pid == os.getpid()
    assert (words.error, words.came, words.flushes, words.began) == (0, 1, 1, 1)


def the_long_way() -> Any:
    """Return a patch that counts the appends by the long way."""
    return mock.patch.object(Journal, "append_many", autospec=True, side_effect=Journal.append_many)


# The same bytes.


@pytest.mark.parametrize("name", FORMATS)
def test_an_append_in_one_step_writes_the_bytes_of_the_long_way(tmp_path: Path, name: str) -> None:
    keyed, typed = name in ("kvj", "sej"), name in ("kvj", "sej")
    with create(tmp_path / "one", name) as one, create(tmp_path / "other", name) as other:
        with the_long_way() as long:
            for number in range(50):
                key = (b"", None, b"key", b"k" * 127)[number % 4] if keyed else None
                assert one.append(value(number), key=key, type=number * 5 if typed else 0) == number
            assert one.append(value(50).decode()) == 50
        assert long.call_count == 0
        records = list(one.read())
        batch = JournalBatch(
            [record.value for record in records[:50]],
            keys=[record.key for record in records[:50]] if keyed else None,
            types=[record.type for record in records[:50]] if typed else None,
            timestamps=[record.timestamp for record in records[:50]] if keyed else None,
        )
        if not keyed:
            batch = batch._replace(timestamp=0)
        other.append_batch(batch)
        with system.replaced(FixedClock(records[50].timestamp)):
            other.append_many([value(50).decode()])
        assert last_segment(one).read_bytes() == last_segment(other).read_bytes()
        assert one.verify().is_sound
        assert one.stats().next_sequence == 51


class FixedClock(system.Port):
    def __init__(self, time: int) -> None:
        self.time = time

    def now(self) -> int:
        return self.time


def test_a_record_that_has_no_room_or_no_place_goes_the_long_way(tmp_path: Path) -> None:
    with create(tmp_path / "log", "sej", segment_bytes=1000) as log:
        for number in range(100):
            assert log.append(value(number)) == number
        assert len(log.segments_apart().bases()) > 5
        with pytest.raises(kvspool.errors.TooLarge):
            log.append(b"", key=b"k" * 128)
        with pytest.raises(ValueError):
            log.append(b"", type=256)
        with pytest.raises(TypeError):
            log.append(b"", key=1)  # type: ignore[arg-type]
        with pytest.raises(kvspool.errors.Unencodable):
            log.append(object())
        assert log.append(b"x" * (2 << 20)) == 100
        assert log.verify().is_sound
    assert values(log)[:100] == [value(number) for number in range(100)]


def test_a_value_keeps_its_codec_whichever_way_it_goes(tmp_path: Path) -> None:
    with create(tmp_path / "log", "kvj", segment_bytes=200) as log, create(tmp_path / "other", "kvj") as other, the_long_way() as long:
        told: list[Any] = [one for number in range(20) for one in (f"text {number}", {"number": number}, b"bytes %d" % number)]
        for one in told:
            log.append(one)
        assert 5 < long.call_count < 60
        other.append_many(told)
        assert [(record.codec, record.value) for record in log.read()] == [(record.codec, record.value) for record in other.read()]


def test_a_journal_with_a_total_size_keeps_to_it(tmp_path: Path) -> None:
    with create(tmp_path / "log", "fflg", segment_bytes=10_000, total_bytes=30_000) as log:
        for number in range(2000):
            assert log.append(value(number)) == number
            assert sum(path.stat().st_size for path in log.path.iterdir()) <= 30_000
        assert log.verify().is_sound


# Others.


def test_handles_that_take_turns_see_what_the_other_has_appended(log: Journal) -> None:
    with reopened(log) as other, the_long_way() as long:
        for number in range(0, 100, 2):
            assert log.append(value(number)) == number
            assert other.append(value(number + 1)) == number + 1
        if IS_ONE_STEP:
            assert long.call_count == 1  # the first one of the other handle
    assert values(log) == [value(number) for number in range(100)]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_four_processes_at_once_lose_nothing_and_keep_the_order_of_time(log: Journal) -> None:
    def write(who: int) -> list[int]:
        with kvspool.open(log.path, timeout=60) as other:
            return [other.append(value(1000 * who + number)) for number in range(500)]

    waits = [start(lambda who=who: write(who)) for who in range(4)]  # type: ignore[misc]
    got = [wait() for wait in waits]
    assert sorted(sequence for one in got for sequence in one) == list(range(2000))
    records = list(log.read())
    for who, sequences in enumerate(got):
        assert sequences == sorted(sequences)
        assert [records[sequence].value for sequence in sequences] == [value(1000 * who + number) for number in range(500)]
    times = [record.timestamp for record in records]
    assert times == sorted(times)
    assert log.verify().is_sound


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_writers_killed_again_and_again_lose_nothing_that_was_acknowledged(log: Journal, tmp_path: Path) -> None:
    def write(who: int) -> None:
        with kvspool.open(log.path, timeout=60) as other, (tmp_path / f"ledger.{who}").open("ab", buffering=0) as file:
            number = 0
            while True:
                sequence = other.append(value(1000_000 * who + number))
                file.write(struct.pack("<3Q", who, number, sequence))
                number += 1

    for round_ in range(6):
        waits = [start(lambda who=who: write(who)) for who in range(3 * round_, 3 * round_ + 3)]  # type: ignore[misc]
        for who in range(3 * round_, 3 * round_ + 3):
            while not (tmp_path / f"ledger.{who}").exists() or (tmp_path / f"ledger.{who}").stat().st_size < 24 * 20:
                time.sleep(0.002)
        for wait in waits:
            os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with pytest.raises(Died):
                wait()
    records = values(log)
    for ledger in tmp_path.glob("ledger.*"):
        for who, number, sequence in struct.iter_unpack("<3Q", ledger.read_bytes()[: ledger.stat().st_size // 24 * 24]):
            assert records[sequence] == value(1000_000 * who + number)
    assert len(set(records)) == len(records)
    with reopened(log) as other:
        assert other.append(value(1)) == len(records)
        assert other.verify().is_sound


def test_threads_of_one_handle_append_at_once_while_one_syncs_and_one_reads(log: Journal) -> None:
    got: list[list[int]] = [[], [], []]

    def write(who: int) -> None:
        for number in range(300):
            got[who].append(log.append(value(1000 * who + number)))
            if who == 0 and number % 50 == 0:
                log.sync()

    threads = [threading.Thread(target=write, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sequence for one in got for sequence in one) == list(range(900))
    found = values(log)
    assert all(found[sequence] == value(1000 * who + number) for who in range(3) for number, sequence in enumerate(got[who]))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_threads_of_two_processes_append_single_records_and_batches_and_lose_nothing(log: Journal) -> None:
    def work(name: int) -> dict[int, bytes]:
        stored: dict[int, bytes] = {}
        with reopened(log) as ours:

            def append_batches() -> None:
                for batch in range(200):
                    items = [value(1_000_000 * name + 100 * batch + at) for at in range(50)]
                    stored.update(zip(ours.append_many(items, timeout=60), items, strict=True))

            batches = threading.Thread(target=append_batches)
            batches.start()
            number = 500_000
            while batches.is_alive():
                number += 1
                item = value(1_000_000 * name + number)
                stored[ours.append(item, timeout=60)] = item
            batches.join()
        return stored

    other = start(lambda: work(1))
    ours, theirs = work(2), other()
    assert not ours.keys() & theirs.keys()
    with reopened(log) as reader:
        assert {record.sequence: bytes(record.value) for record in reader.read()} == ours | theirs


def test_no_thread_frees_the_lock_that_another_one_of_its_handle_holds(log: Journal) -> None:
    log.append(value(0))
    log.append(value(1))
    held, done = threading.Event(), threading.Event()

    def hold(appender: Any, page: Any) -> None:
        held.set()
        assert done.wait(60)

    holder = threading.Thread(target=lambda: log.under_lock(60, hold))
    holder.start()
    assert held.wait(60)
    tail = log._open_appender(0).control.tail
    assert tail is not None and tail.lock.is_taken
    assert tail.append(value(2), None, 0, 0) in (tails.BUSY, tails.SLOW)
    assert tail.lock.is_taken
    with reopened(log) as other, pytest.raises(LockTimeout):
        other.append(value(3), timeout=0.01)
    done.set()
    holder.join()
    assert not tail.lock.is_taken

    assert tail.lock.take(tail), "as an append that another thread is in the middle of"
    log._open_appender(0).control.unlock()
    assert tail.lock.is_taken
    tail.lock.free()


def test_a_close_waits_for_the_append_of_another_thread(log: Journal) -> None:
    log.append(value(0))
    done: list[int] = []

    def write() -> None:
        with pytest.raises(Closed):
            while True:
                done.append(log.append(value(len(done) + 1)))

    thread = threading.Thread(target=write)
    thread.start()
    while len(done) < 20:
        time.sleep(0.001)
    log.close()
    thread.join()
    assert values(log) == [value(number) for number in range(len(done) + 1)]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_and_its_parent_both_append(log: Journal) -> None:
    log.append(value(0))
    assert in_child(lambda: [log.append(value(number)) for number in range(1, 4)]) == [1, 2, 3]
    assert [log.append(value(number)) for number in range(4, 6)] == [4, 5]
    assert values(log) == [value(number) for number in range(6)]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_stopped_owner_of_the_lock_is_waited_for_and_named_and_a_killed_one_replaced(log: Journal) -> None:
    log.append(value(0))
    read_end, write_end = os.pipe()

    def hold() -> None:
        with reopened(log) as other:
            other.under_lock(5, lambda *_: (os.write(write_end, b"!"), signal.pause()))

    wait = start(hold)
    os.read(read_end, 1)
    child: int = wait.pid  # type: ignore[attr-defined]
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(LockTimeout, match=f"process {child}"):
        log.append(value(1), timeout=0.05)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(Died):
        wait()
    assert log.append(value(1)) == 1
    os.close(read_end)
    os.close(write_end)


# Leftovers of a killed writer, and writes that fail.


@pytest.mark.parametrize("left", [b"", b"\0", b"\0\0\0\x01", value(7)])
def test_what_a_writer_left_that_was_killed_while_it_wrote_is_cut(log: Journal, left: bytes) -> None:
    for number in range(3):
        log.append(value(number))
    whole = last_segment(log).stat().st_size
    if log.format.name == "fflg" and left[:4] == b"\0\0\0\x01":
        left = b"\0\0\0\x02\0"  # one that isn't whole
    if log.format.name == "fflg" and left == value(7):
        left = struct.pack(">I", 50) + left[:20]
    with last_segment(log).open("ab") as file:
        file.write(left)
    mark(log, tails.WRITING)
    assert log.append(value(3)) == 3
    assert last_segment(log).stat().st_size == whole + whole_frame(log)
    assert [torn.size for torn in log.torn] == ([len(left)] if left else [])
    assert log.append(value(4)) == 4
    assert values(log) == [value(number) for number in range(5)]


def whole_frame(log: Journal) -> int:
    return {"kvj": 78, "sej": 76, "fflg": 54, "fixed": 54}[log.format.name]


def mark(log: Journal, bits: int) -> None:
    """Set bits of the tail's word `COUNT`."""
    with tail_file(log).open("r+b") as file:
        file.seek(8 * tails.COUNT)
        (count,) = struct.unpack("<Q", file.read(8))
        file.seek(8 * tails.COUNT)
        file.write(struct.pack("<Q", count | bits))


def test_a_record_that_a_killed_writer_wrote_whole_is_kept(log: Journal) -> None:
    log.append(value(0))
    before = last_segment(log).read_bytes(), tail_file(log).read_bytes()
    log.append(value(1))
    with tail_file(log).open("r+b") as file:  # killed before it could say so
        file.write(before[1])
    mark(log, tails.WRITING)
    assert log.append(value(2)) == 2
    assert values(log) == [value(0), value(1), value(2)]
    assert not log.torn


@only_compiled
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_write_that_is_cut_short_leaves_nothing_and_the_next_one_succeeds(log: Journal) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with reopened(log) as other:
            for number in range(5):
                other.append(value(number))
            size = last_segment(log).stat().st_size
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, most))
            with pytest.raises(OSError) as found:
                other.append(value(5))
            assert found.value.errno == errno.EFBIG
            assert last_segment(log).stat().st_size == size
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            assert other.append(value(5)) == 5
            assert other.verify().is_sound

    in_child(work)
    assert values(log) == [value(number) for number in range(6)]


# Changes of the files by other programs.


def test_a_segment_that_grew_by_another_hand_is_looked_at(log: Journal) -> None:
    for number in range(3):
        log.append(value(number))
    with last_segment(log).open("r+b") as file:
        data = file.read()
        file.write(frame_of(log, 3))
    assert log.append(value(4)) == 4
    assert values(log) == [value(number) for number in range(5)]
    assert last_segment(log).read_bytes().startswith(data)


def frame_of(log: Journal, sequence: int) -> bytes:
    data, *_ = log.format.encode(JournalBatch([value(sequence)]), 0, control_place(log, sequence))
    return bytes(data)


def control_place(log: Journal, sequence: int) -> Any:
    from kvspool.journal.format import Before

    latest = log.stats().last_timestamp
    return Before(sequence, log.segments_apart().bases()[-1], last_segment(log).stat().st_size, latest, latest)


@only_compiled
def test_the_first_append_to_a_new_journal_is_one_step(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "under_lock", lambda *_: pytest.fail("the long way"))
    monkeypatch.setattr(Journal, "_append_one", lambda *_: pytest.fail("with the lock between threads"))
    assert log.append(value(0)) == 0


def test_a_journal_that_was_moved_has_vanished(log: Journal) -> None:
    log.append(value(0))
    moved = log.path.with_name("moved")
    log.path.rename(moved)
    with pytest.raises(LogVanished):
        log.append(value(1))
    assert sum(path.stat().st_size for path in moved.rglob("0*")) > 0


def test_a_last_segment_that_was_replaced_is_reopened(log: Journal) -> None:
    log.append(value(0))
    path = last_segment(log)
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)
    assert log.append(value(1)) == 1
    assert values(log) == [value(0), value(1)]


def test_no_append_continues_after_a_failed_flush(log: Journal) -> None:
    log.append(value(0))
    with reopened(log) as other, system.replaced(NoFlushPort()), pytest.raises(Poisoned):
        other.append(value(1))
        other.sync()
    with pytest.raises(Poisoned):
        log.append(value(2))


# The file of the tail.


def lost(path: Path) -> None:
    path.unlink()


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(4096))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def random_bytes(path: Path) -> None:
    path.write_bytes(os.urandom(4096))


def all_ones(path: Path) -> None:
    path.write_bytes(b"\xff" * 4096)


def copied(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def a_link(path: Path) -> None:
    path.unlink()
    path.with_name("target").write_bytes(b"precious")
    path.symlink_to("target")


@pytest.mark.parametrize("change", [lost, zeroed, empty, random_bytes, all_ones, copied, a_link])
def test_a_tail_that_was_lost_or_replaced_misleads_no_reader(log: Journal, change: Any) -> None:
    for number in range(3):
        log.append(value(number))
    log.close()
    change(tail_file(log))
    with reopened(log) as one, reopened(log) as other:
        assert one.end() == 3
        for number in range(3, 9, 2):
            assert one.append(value(number)) == number
            if change is not a_link and IS_ONE_STEP:
                assert other.append(value(number + 1)) == number + 1
            else:
                assert one.append(value(number + 1)) == number + 1
        assert one.verify().is_sound
        times = [record.timestamp for record in one.read()]
        assert times == sorted(times)
    assert values(log) == [value(number) for number in range(9)]


def test_a_directory_in_the_place_of_a_tail_is_refused_until_it_is_moved_away(log: Journal) -> None:
    log.append(value(0))
    log.close()
    tail_file(log).unlink()
    tail_file(log).mkdir()
    with reopened(log) as other:
        with pytest.raises(NotAFile, match="tail is not a regular file, but a directory: move it away"):
            other.append(value(1))
        assert other.end() == 1
        tail_file(log).rmdir()
        assert other.append(value(1)) == 1
    assert values(log) == [value(0), value(1)]


def test_an_older_tail_that_was_restored_misleads_no_reader(log: Journal) -> None:
    log.append(value(0))
    log.close()
    older = tail_file(log).read_bytes()
    with reopened(log) as other:
        for number in range(1, 4):
            other.append(value(number))
    with tail_file(log).open("r+b") as file:
        file.write(older)
    with reopened(log) as other:
        assert other.end() == 4
        assert other.append(value(4)) == 4
    assert values(log) == [value(number) for number in range(5)]


@only_compiled
def test_words_that_change_under_a_writer_cost_no_record(log: Journal) -> None:
    log.append(value(0))
    for number in range(1, 30):
        with tail_file(log).open("r+b") as file:
            file.seek(8)
            file.write(os.urandom(8 * tails.WORDS - 8))
        assert log.append(value(number)) == number
    with tail_file(log).open("r+b") as file:
        file.write(struct.pack("<Q", 0x1234_0000_0000 | 77))  # an owner that is no process
    assert log.append(value(30)) == 30
    assert values(log) == [value(number) for number in range(31)]


@only_compiled
def test_no_writer_uses_another_tail_while_a_removed_one_is_in_use(log: Journal) -> None:
    log.append(value(0))
    tail_file(log).unlink()
    with kvspool.open(log.path, timeout=0.05) as other:
        with pytest.raises(LockTimeout, match="use an earlier"):
            other.append(value(1))
        assert log.append(value(1)) == 1
        log.close()
        assert other.append(value(2)) == 2
    assert values(log) == [value(number) for number in range(3)]


def test_the_tail_belongs_to_its_owner_alone(log: Journal) -> None:
    assert tail_file(log).stat().st_mode & 0o777 == 0o600
    assert tail_file(log).stat().st_size == 4096


@pytest.mark.parametrize("name", ["btrfs", "nfs4", "unknown"])
def test_where_memory_is_not_shared_safely_each_append_goes_the_long_way(tmp_path: Path, name: str) -> None:
    with mock.patch.object(filesystems, "of", lambda path: name), create(tmp_path / "log", "kvj", allow_unsafe_fs=True) as log:
        with kvspool.open(log.path) as other, the_long_way() as long:
            for number in range(0, 10, 2):
                assert log.append(value(number)) == number
                assert other.append(value(number + 1)) == number + 1
        assert long.call_count == 10
        assert not tail_file(log).exists()
    assert values(log) == [value(number) for number in range(10)]


# Other versions and the other twin.


def test_a_writer_that_locks_the_byte_for_each_append_and_one_that_has_a_tail_exclude_each_other(log: Journal) -> None:
    with open(log.format.lock_file(log.path), "r+b") as file:
        if IS_ONE_STEP:
            log.append(value(0))
            assert not system.port.try_lock(file.fileno(), APPEND)
        log.close()
        assert system.port.try_lock(file.fileno(), APPEND)
        with kvspool.open(log.path, timeout=0.05) as other:
            with pytest.raises(LockTimeout):
                other.append(value(1))
            system.port.unlock(file.fileno(), APPEND)
            assert other.append(value(1)) == (1 if IS_ONE_STEP else 0)


@only_compiled
def test_the_interpreted_twin_waits_until_compiled_writers_close(log: Journal) -> None:
    log.append(value(0))
    code = "import sys, kvspool; log = kvspool.open(sys.argv[1], timeout=0.2); print(log.append(b'1'.ljust(50)))"

    def run() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "KVSPOOL_NO_EXTENSIONS": "1"}
        return subprocess.run([sys.executable, "-c", code, str(log.path)], env=environment, capture_output=True, text=True, timeout=60)

    refused = run()
    assert refused.returncode and "LockTimeout" in refused.stderr
    log.close()
    assert run().stdout.strip() == "1"
    with reopened(log) as other:
        assert other.append(value(2)) == 2
    assert len(values(log)) == 3


def test_a_tail_refuses_what_it_cannot_use(log: Journal) -> None:
    from kvspool.kernel.tail import Tail

    with pytest.raises(ValueError):
        Tail(memoryview(bytearray(8)), None, -1, 0, memoryview(bytes(32)), 0, 0)
    with pytest.raises(ValueError):
        Tail(memoryview(bytes(4096)), None, -1, 0, memoryview(bytes(32)), 0, 0)


def test_a_failed_append_under_the_lock_leaves_the_next_one_right(log: Journal) -> None:
    log.append(value(0))

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        log.under_lock(1, stop)
    with pytest.raises(KvspoolError):
        log.under_lock(1, lambda *_: log.append(value(1)))
    assert log.append(value(1)) == 1
    assert values(log) == [value(0), value(1)]
