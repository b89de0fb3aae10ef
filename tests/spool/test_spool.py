"""The verbs of a spool, as its users meet them."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import Died, in_child, start
from faults import BlindPort, ClockPort, FailingPort

import kvspool
from kvspool import Codec, Gap, GapError, Record, Spool, errors, system
from kvspool.engine import locks
from kvspool.engine.checksums import checksum
from kvspool.kernel import frames_py as frames
from kvspool.kernel.lock_py import WAITERS
from kvspool.spool import format

T0 = 1_700_000_000_000_000_000  # 2023-11-14 22:13:20 UTC


def values(items: Any) -> list[Any]:
    return [item.value for item in items]


# Appending.


def test_append_returns_the_sequence_and_keeps_everything_given(log: Spool) -> None:
    assert log.append(b"a") == 0
    later = time.time_ns() + 3600 * 10**9
    assert log.append(b"b", key=b"k", type=255, timestamp=later) == 1
    first, second = log
    assert (first.sequence, first.key, first.value, first.type, first.codec) == (0, None, b"a", 0, Codec.RAW)
    assert second == Record(1, later, 255, b"k", b"b", Codec.RAW)


def test_the_timestamp_is_the_clocks_unless_it_is_given(log: Spool) -> None:
    before = time.time_ns()
    log.append(b"")
    log.append_many([b"", b""])
    after = time.time_ns()
    stamps = [record.timestamp for record in log]
    assert before <= stamps[0] <= stamps[1] <= stamps[2] <= after


def test_no_key_and_an_empty_key_differ(log: Spool) -> None:
    log.append(b"", key=None)
    log.append(b"", key=b"")
    log.append_many([b"", b"", b""], keys=[b"", None, b"k"])
    assert [record.key for record in log] == [None, b"", b"", None, b"k"]


class Event(msgspec.Struct):
    user: int


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "stored", "codec", "data"),
    [
        (b"raw \0\xff", b"raw \0\xff", Codec.RAW, b"raw \0\xff"),
        (bytearray(b"array"), b"array", Codec.RAW, b"array"),
        (memoryview(b"abcdef")[::2], b"ace", Codec.RAW, b"ace"),
        ("grüße", "grüße".encode(), Codec.TEXT, "grüße"),
        ("", b"", Codec.TEXT, ""),
        ({"a": [1, None]}, b'{"a":[1,null]}', Codec.JSON, {"a": [1, None]}),
        ([1.5, True], b"[1.5,true]", Codec.JSON, [1.5, True]),
        (None, b"null", Codec.JSON, None),
        (7, b"7", Codec.JSON, 7),
        (Event(7), b'{"user":7}', Codec.JSON, {"user": 7}),
        (Point(3), b'{"x":3}', Codec.JSON, {"x": 3}),
    ],
    ids=str,
)
def test_each_kind_of_value_is_stored_by_its_codec(log: Spool, value: Any, stored: bytes, codec: Codec, data: Any) -> None:
    log.append(value)
    log.append_many([value, b"other"])
    for record in list(log)[:2]:
        assert (record.value, record.codec, record.data) == (stored, codec, data)


def test_a_log_of_messagepack_stores_what_has_structure_so(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, codec="msgpack") as log:
        log.append({"a": b"bytes"})
        log.append("text")
    with kvspool.open(tmp_path / "log") as log:
        log.append_many([[1], b"raw"])
        assert [record.codec for record in log] == [Codec.MSGPACK, Codec.TEXT, Codec.MSGPACK, Codec.RAW]
        assert [record.data for record in log] == [{"a": b"bytes"}, "text", [1], b"raw"]
        assert log.stats().codec == "msgpack"


@pytest.mark.parametrize("value", [object(), {1: object()}, "\ud800", 1 << 70, {"a": {object}}, lambda: 0], ids=repr)
def test_a_value_that_no_codec_takes_is_refused_with_nothing_written(tmp_path: Path, value: Any) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, codec="msgpack") as log:
        log.append(b"before")
        for write in (lambda: log.append(value), lambda: log.append_many([b"fine", value])):
            with pytest.raises(errors.Unencodable):
                write()
        assert values(log) == [b"before"]
        assert log.append(b"after") == 1


def test_a_value_that_contains_itself_is_unencodable(log: Spool) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(errors.Unencodable):
        log.append(endless)


def test_a_time_before_1970_is_refused_with_nothing_written(log: Spool) -> None:
    with pytest.raises(ValueError):
        log.append(b"x", timestamp=-1)
    with pytest.raises(ValueError):
        log.append_many([b"x"], timestamp=-1)
    assert log.stats().next_sequence == 0


def held(log: Spool) -> tuple[int, int, int]:
    """Return what a log holds, whatever the time is."""
    stats = log.stats()
    return stats.first_sequence, stats.next_sequence, stats.used


def test_the_largest_record_and_the_largest_key_fit_and_one_byte_more_is_too_large(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=1 << 19) as log:
        largest = (1 << 17) - 32
        log.append(bytes(largest))
        log.append(bytes(largest - 65534), key=b"k" * 65534)
        log.append_many([bytes(largest), b""], keys=[b"", b"k" * 65534])
        before = held(log)
        for write in (
            lambda: log.append(bytes(largest + 1)),
            lambda: log.append(bytes(largest), key=b"k"),
            lambda: log.append(b"", key=b"k" * 65535),
            lambda: log.append_many([b"fine", bytes(largest + 1)]),
            lambda: log.append_many([b"fine", bytes(largest)], keys=[None, b"k"]),
            lambda: log.append_many([b""], keys=[b"k" * 65535]),
        ):
            with pytest.raises(errors.TooLarge):
                write()
        assert held(log) == before
        assert [(len(record.key or b""), len(record.value)) for record in log][-1] == (65534, 0)


def test_a_batch_larger_than_the_ring_leaves_its_end(log: Spool) -> None:
    assert log.append_many(b"%04d" % at for at in range(1000)) == range(1000)
    assert values(log) == [b"%04d" % at for at in range(1000 - 102, 1000)]


def test_timestamps_never_decrease_when_the_clock_jumps_back(interpreted: None, log: Spool) -> None:
    for now in (T0, T0 + 5, T0 - 10**18, 0, T0 + 7, T0 + 6):
        with system.replaced(ClockPort(now)):
            log.append(b"")
    with system.replaced(ClockPort(T0 + 6)):
        log.append_many([b"", b""])
    assert [record.timestamp - T0 for record in log] == [0, 5, 5, 5, 7, 7, 7, 7]


# Reading.


# Gaps.


def test_a_damaged_record_is_a_gap_of_its_own_and_can_be_passed(log: Spool) -> None:
    log.append_many([b"%08d" % at for at in range(6)])
    with open(log.path / format.DATA_FILE, "r+b") as file:
        file.seek(format.DATA_START + 2 * 40 + 35)
        file.write(b"!")
    reading = log.read()
    assert [next(reading).sequence, next(reading).sequence] == [0, 1]
    with pytest.raises(GapError) as caught:
        next(reading)
    assert caught.value.gap == Gap(2, 2, "damaged", str(log.path))
    assert [record.sequence for record in reading] == [3, 4, 5]


def test_a_read_that_is_overrun_in_its_midst_accounts_for_every_sequence(log: Spool) -> None:
    log.append_many([b"%08d" % at for at in range(90)])
    reading = log.read(limit=None, on_gap="yield")
    got: list[Record | Gap] = [next(reading)]
    log.append_many([b"%08d" % at for at in range(90, 400)])
    got += reading
    expected = 0
    for item in got:
        first, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
        assert first == expected
        expected = last + 1
    assert expected == 90


# Following.


def test_a_follower_that_is_dropped_gives_its_descriptor_back_without_a_warning(log: Spool, open_files: Callable[[], set[str]]) -> None:
    log.append(b"x")
    held = open_files()
    for record in log.follow("latest", timeout=0):
        raise AssertionError(record)
    assert open_files() == held


@pytest.mark.parametrize("has_waited", [False, True])
@pytest.mark.parametrize("blind", [False, True])
def test_a_follower_of_a_log_that_is_deleted_says_that_it_vanished(log: Spool, blind: bool, has_waited: bool) -> None:
    log.append(b"x")
    port = BlindPort(instances=True) if blind else system.Port()
    with system.replaced(port), closing(log.follow(timeout=0)) as following:
        assert next(following).value == b"x"
        if has_waited:
            assert list(following) == []
        following._timeout = None
        shutil.rmtree(log.path)
        with pytest.raises(errors.LogVanished, match="deleted"):
            next(following)


# Waiting for the lock.


def hold_lock(path: Path, held: int) -> None:
    """Take the append lock as a writer does, say so through the pipe, and hold it until killed."""
    log = kvspool.open(path)

    def work(writer: Any) -> None:
        writer.begin()
        os.write(held, b"!")
        signal.pause()

    log._locked(work, 0)


@pytest.fixture
def holder(log: Spool) -> Any:
    """A child that holds the lock of `log` until it is killed."""
    read_end, write_end = os.pipe()
    wait = start(lambda: hold_lock(log.path, write_end))
    os.read(read_end, 1)
    yield wait
    for fd in (read_end, write_end):
        os.close(fd)
    try:
        os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(Died):
            wait()
    except ProcessLookupError:
        pass


def test_a_stopped_holder_is_named_and_keeps_its_lock(log: Spool, holder: Any) -> None:
    log.timeout = 0.05
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
    for _ in range(3):
        with pytest.raises(errors.LockTimeout, match=rf"no lock within 0\.05 s: .*process {holder.pid} \(stopped\)"):
            log.append(b"x")
    with pytest.raises(TimeoutError):
        log.append_many([b"x"])
    assert list(log) == []
    os.kill(holder.pid, signal.SIGCONT)
    with pytest.raises(errors.LockTimeout, match=rf"process {holder.pid} \(sleeping\)"):
        log.append(b"x")
    assert log.stats().next_sequence == 0


def test_readers_and_sync_need_no_append_lock(log: Spool, holder: Any) -> None:
    assert list(log.read()) == []
    assert log.stats().records == 0
    assert log.sync() == 0


def test_the_lock_of_a_killed_holder_is_free_at_once(log: Spool, holder: Any) -> None:
    log.timeout = 0.05
    with pytest.raises(errors.LockTimeout):
        log.append(b"x")
    os.kill(holder.pid, signal.SIGKILL)
    with pytest.raises(Died):
        holder()
    log.timeout = 0.0
    assert log.append(b"x") == 0


def test_a_waiter_gets_the_lock_when_its_holder_is_killed(log: Spool, holder: Any) -> None:
    log.timeout = 60.0
    waiting = threading.Event()

    class Waiting(system.Port):
        def sleep(self, seconds: float) -> None:
            waiting.set()
            super().sleep(seconds)

    got: list[int] = []
    lock = log._live().control.cast("Q")[frames.LOCK :]
    with system.replaced(Waiting()):
        thread = threading.Thread(target=lambda: got.append(log.append(b"at last")))
        thread.start()
        while not (waiting.is_set() or lock[0] & WAITERS):  # interpreted, it polls; compiled, it sleeps on the word
            time.sleep(0.001)
        os.kill(holder.pid, signal.SIGKILL)
        thread.join()
    assert got == [0]
    assert values(log) == [b"at last"]


def test_a_holder_that_is_gone_or_elsewhere_is_described_as_such(log: Spool) -> None:
    log.append(b"x")
    log.timeout = 0.0
    other = kvspool.open(log.path)
    words = log._live().control.cast("Q")
    assert other._live().append_lock.take()
    try:
        words[frames.HOLDER + 3] += 1
        with pytest.raises(errors.LockTimeout, match=f"no longer process {os.getpid()}"):
            log.append(b"x")
        words[frames.HOLDER + 5] += 1
        with pytest.raises(errors.LockTimeout, match=f"process {os.getpid()} of another container"):
            log.append(b"x")
    finally:
        words.release()
        other.close()


# Syncing.


def checkpoints(log: Spool) -> list[format.Checkpoint]:
    raw = (log.path / format.DATA_FILE).read_bytes()
    found = []
    for at in format.CHECKPOINTS_AT:
        part = raw[at : at + format.CHECKPOINT.size]
        checkpoint = format.CHECKPOINT.unpack(part)
        if checkpoint.generation:
            assert checkpoint.crc == checksum(log.log_id, part[:-4])
            found.append(checkpoint)
    return sorted(found)


def test_sync_says_what_is_on_disk_and_writes_it_down(log: Spool) -> None:
    assert log.sync() == 0
    log.append_many([b"x"] * 5)
    assert log.stats().synced_sequence == 0
    assert log.sync() == 5
    assert log.stats().synced_sequence == 5
    later = time.time_ns() + 3600 * 10**9
    log.append(b"y", timestamp=later)
    assert log.sync() == 6
    older, newer = checkpoints(log)
    assert (older.generation, older.next_seq, newer.generation, newer.next_seq) == (1, 5, 2, 6)
    assert (newer.tail, newer.timestamp, newer.boot_id) == (240, later, system.port.boot_id())
    log.append(b"z")
    log.sync()
    assert [checkpoint.generation for checkpoint in checkpoints(log)] == [2, 3]


def test_sync_writes_the_checkpoint_before_the_one_flush_of_the_data_and_flushes_what_readers_commit(log: Spool) -> None:
    calls: list[str] = []

    class Watching(system.Port):
        def flush_data(self, fd: int) -> None:
            calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            super().flush_data(fd)

        def write(self, fd: int, data: bytes, at: int) -> None:
            calls.append(f"checkpoint {at}")
            super().write(fd, data, at)

    log.append(b"x")
    with system.replaced(Watching()):
        log.sync()
        log.sync()
    assert calls == ["checkpoint 1024", format.DATA_FILE, format.CONTROL_FILE, format.CONTROL_FILE]


def test_syncers_at_once_share_a_flush_and_all_get_a_true_answer(log: Spool) -> None:
    flushing, go_on = threading.Event(), threading.Event()
    flushes: list[int] = []

    class Slow(system.Port):
        def flush_data(self, fd: int) -> None:
            flushes.append(fd)
            flushing.set()
            go_on.wait(30)
            super().flush_data(fd)

    answers: queue.Queue[tuple[int, int]] = queue.Queue()

    def append_and_sync() -> None:
        sequence = log.append(b"x")
        answers.put((sequence, log.sync()))

    def flushes_of_six() -> int:
        """Return how many flushes six threads needed; each flush is of two files."""
        flushes.clear()
        flushing.clear()
        go_on.clear()
        threads = [threading.Thread(target=append_and_sync) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert flushing.wait(30)
        log.append(b"appends go on meanwhile")
        go_on.set()
        for thread in threads:
            thread.join()
        assert all(sequence < synced for sequence, synced in (answers.get() for _ in range(6)))
        return len(flushes)

    with system.replaced(Slow()):  # on a busy machine, the threads may come one after another
        assert any(flushes_of_six() < 12 for _ in range(50))


def test_a_sync_that_waits_too_long_for_another_ones_flush_says_so(log: Spool) -> None:
    log.append(b"x")
    fd = os.open(log.path / format.CONTROL_FILE, os.O_RDWR)
    locks.acquire(fd, format.SYNC_LOCK, 0, str)
    with pytest.raises(errors.LockTimeout, match="another process flushes"):
        log.sync(timeout=0.01)
    os.close(fd)
    assert log.sync() == 1


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_failed_flush_poisons_the_log_for_every_writer_and_for_no_reader(log: Spool, nth: int, number: int) -> None:
    log.append_many([b"one", b"two"])
    with kvspool.open(log.path) as other:
        other.append(b"three")
        with system.replaced(FailingPort(nth, number, ("flush_data", "write"))) as port:
            with pytest.raises(errors.Poisoned):
                log.sync()
            assert port.failed  # type: ignore[attr-defined]
        for handle in (log, other):
            for write in (lambda h=handle: h.append(b"x"), lambda h=handle: h.append_many([b"x"]), handle.sync):
                with pytest.raises(errors.Poisoned):
                    write()
            assert values(handle) == [b"one", b"two", b"three"]
            assert handle.stats().sync_error == number
            assert handle.stats().synced_sequence == (3 if nth == 3 else 0), "a flush of spool.ctl that fails takes nothing back"
    with kvspool.open(log.path) as third, pytest.raises(errors.Poisoned):
        third.append(b"x")


# Maintenance.


def test_the_stats_of_an_empty_log(log: Spool) -> None:
    stats = log.stats()
    assert (stats.path, stats.format, stats.policy, stats.codec) == (str(log.path), "spool", "overwrite", "json")
    assert (stats.capacity, stats.used, stats.records, stats.first_sequence, stats.next_sequence) == (4096, 0, 0, 0, 0)
    assert (stats.first_timestamp, stats.last_timestamp, stats.synced_sequence, stats.sync_error) == (0, 0, 0, 0)
    assert bytes.fromhex(stats.log_id) == log.log_id
    assert 0 < time.time_ns() - stats.created < 3600 * 10**9


def test_the_stats_count_what_is_kept(log: Spool) -> None:
    for at in range(100):
        log.append(bytes(68), timestamp=1000 + at)
    stats = log.stats()
    assert stats.next_sequence == 100
    assert stats.records == 100 - stats.first_sequence == len(list(log))
    assert stats.first_timestamp == 1000 + stats.first_sequence
    assert stats.last_timestamp == 1099
    assert stats.records * 104 <= stats.used <= 4096


def test_the_stats_of_a_log_whose_oldest_bytes_are_a_pad(log: Spool) -> None:
    for at in range(40 + 13):
        log.append(bytes(68), timestamp=1000 + at)
    for _ in range(3):
        log.append(bytes(200), timestamp=2000)
        stats = log.stats()
        assert stats.first_timestamp == next(iter(log)).timestamp
        assert stats.first_sequence == next(iter(log)).sequence


def test_a_with_block_closes_the_log_also_on_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), kvspool.create(tmp_path / "log", capacity=4096) as log:
        assert not log.closed
        assert repr(log) == f"<Spool {tmp_path / 'log'}>"
        raise ZeroDivisionError
    assert log.closed
    assert repr(log) == f"<Spool {tmp_path / 'log'} closed>"


def test_a_handle_that_was_never_closed_leaves_no_warning(tmp_path: Path, open_files: Callable[[], set[str]]) -> None:
    held = open_files()
    log = kvspool.create(tmp_path / "log", capacity=4096)
    log.append(b"x")
    del log
    assert open_files() == held


def test_an_interrupt_between_any_two_calls_leaves_the_lock_free(interpreted: None, log: Spool) -> None:
    class Interrupted(system.Port):
        def now(self) -> int:
            raise KeyboardInterrupt

        def fence(self) -> None:
            raise KeyboardInterrupt

    log.timeout = 0.0
    for write in (lambda: log.append(b"x"), lambda: log.append_many([b"x"])):
        with system.replaced(Interrupted()), pytest.raises(KeyboardInterrupt):
            write()
        with kvspool.open(log.path, timeout=0.0) as other:
            other.append(b"y")
    assert in_child(lambda: values(kvspool.open(log.path))) == [b"y", b"y"]


@pytest.mark.parametrize("append", [lambda log: log.append(b"outer"), lambda log: log.append_many([b"outer"])], ids=["one", "many"])
def test_an_append_in_the_middle_of_another_one_is_refused_and_harms_neither(
    interpreted: None, log: Spool, append: Callable[[Spool], object]
) -> None:
    log.append(b"first")
    refused: list[errors.Reentered] = []

    class Interrupted(system.Port):
        """A signal arrives just when the lock was taken, and its handler appends to the same handle."""

        def try_lock(self, fd: int, at: int) -> bool:
            got = super().try_lock(fd, at)
            for inner in (lambda: log.append(b"inner"), lambda: log.append_many([b"inner"])):
                with pytest.raises(errors.Reentered) as caught:
                    inner()
                refused.append(caught.value)
            return got

    with system.replaced(Interrupted()):
        append(log)
    assert len(refused) == 2
    assert log.append(b"last") == 2
    assert values(log) == [b"first", b"outer", b"last"]


def test_the_extent_is_what_can_be_read(log: Spool) -> None:
    assert log.extent() == log.extent("synced") == (0, 0)
    for _ in range(3):
        log.append_many([b"%020d" % at for at in range(100)])
        assert log.extent() == (next(log.read()).sequence, log.end())
    assert log.extent("synced") == (log.extent()[0],) * 2  # of what is on disk nothing is left
    log.sync()
    log.append(b"not on disk yet")
    assert log.extent("synced") == (log.extent()[0], 300)
    with pytest.raises(ValueError, match="isolation"):
        log.extent("dirty")  # type: ignore[arg-type]
