"""Writers: the appends of a log in a `with` block, until it is closed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import Died, start

import kvspool
from kvspool import Record, Spool, Writer, errors
from kvspool.kernel import frames as frames_loops
from kvspool.kernel import frames_py as frames

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        yield log


def words(log: Spool) -> memoryview:
    assert log._files is not None
    return log._files.control.cast("Q")


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


# Appended values.


def test_each_record_is_there_for_others_when_its_append_returns(log: Spool) -> None:
    with kvspool.open(log.path) as other, log.writer() as w:
        for number in range(300):
            assert w.append(b"%d" % number) == number
            assert other.stats().next_sequence == number + 1
            assert next(other.read(number)).value == b"%d" % number


class Bytes(bytes):
    """Not `bytes` itself."""


class Point(msgspec.Struct):
    x: int


LATER = time.time_ns() + 12 * 3600 * 10**9


@pytest.mark.parametrize(
    "value", [b"", b"raw", Bytes(b"sub"), bytearray(b"array"), memoryview(b"view"), "é", {"a": 1}, [1], None, 7, Point(1)]
)
@pytest.mark.parametrize("options", [{}, {"key": b""}, {"key": b"k" * 65534, "type": 255, "timestamp": LATER}, {"type": True}])
def test_it_stores_what_the_log_itself_would_store(log: Spool, value: Any, options: dict[str, Any]) -> None:
    log.append(value, **options)
    with log.writer() as w:
        for _ in range(2):  # takes the lock, then has it
            w.append(value, **options)
    first, *others = log
    for other in others:
        assert (other.type, other.key, other.value, other.codec) == (first.type, first.key, first.value, first.codec)
        assert "timestamp" not in options or other.timestamp == options["timestamp"]


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (object(), {}), (b"", {"key": ["text"]}), (b"", {"key": b"k" * 65535}), (b"", {"type": 256}), (b"", {"type": -1}),
        (b"", {"type": "x"}), (b"", {"timestamp": -1}), (b"", {"timestamp": 2**63}), (b"x" * 300_000, {}), (b"", {"unknown": 1}),
    ],
)  # fmt: skip
def test_it_refuses_what_the_log_itself_would_refuse(log: Spool, value: Any, options: dict[str, Any]) -> None:
    with pytest.raises(Exception) as expected:
        log.append(value, **options)
    with log.writer() as w:
        for number in range(2):
            with pytest.raises(expected.type):
                w.append(value, **options)
            assert w.append(b"good") == number
    assert [record.value for record in log] == [b"good"] * 2


def test_a_follower_that_sleeps_is_woken(log: Spool) -> None:
    got: list[Record] = []
    following = log.follow(limit=50)
    thread = threading.Thread(target=lambda: got.extend(following))
    thread.start()
    with log.writer() as w:
        for _ in range(50):
            w.append(b"x")
    thread.join()
    following.close()
    assert [record.sequence for record in got] == list(range(50))


def test_another_handle_gets_its_appends_in_next_to_a_busy_writer(log: Spool) -> None:
    got: list[int] = []

    def append() -> None:
        with kvspool.open(log.path, timeout=60) as other:
            got.extend(other.append(b"theirs") for _ in range(20))
            got.extend(other.append_many([b"theirs"] * 2))

    with log.writer() as w:
        w.append(b"mine")
        thread = threading.Thread(target=append)
        thread.start()
        while thread.is_alive():
            w.append(b"mine")
    assert len(got) == 22
    assert got == sorted(set(got))


def test_threads_share_one_writer_while_other_handles_append(log: Spool) -> None:
    got: dict[int, bytes] = {}

    def append(to: Writer | Spool, name: int) -> None:
        mine = {}
        for number in range(200):
            value = b"%d %d" % (name, number)
            mine[to.append(value)] = value
            if number % 20 == 0:
                mine[to.append_many([value])[0]] = value
        got.update(mine)

    with kvspool.open(log.path, timeout=60) as other, log.writer(timeout=60) as w, other.writer(timeout=60) as theirs:
        appenders = [threading.Thread(target=append, args=(to, name)) for name, to in enumerate((w, w, w, log, theirs, theirs, other))]
        for thread in appenders:
            thread.start()
        for thread in appenders:
            thread.join()
    assert sorted(got) == list(range(7 * 210))
    assert {record.sequence: record.value for record in log} == got


def burst(path: Path, name: int, count: int) -> dict[int, bytes]:
    with kvspool.open(path, timeout=60) as log, log.writer() as w:
        return {w.append(b"%d %d" % (name, number)): b"%d %d" % (name, number) for number in range(count)}


def test_each_of_four_processes_gets_its_records_in(log: Spool) -> None:
    count = 3000 if frames_loops.TWIN == "compiled" else 300
    with kvspool.create(log.path.with_name("large"), capacity="4MiB") as large:
        waits = [start(lambda name=name: burst(large.path, name, count)) for name in range(4)]
        followed = list(large.follow(0, limit=4 * count, timeout=60))
        written: dict[int, bytes] = {}
        for wait in waits:
            mine = wait()
            assert list(mine) == sorted(mine)
            written |= mine
    assert sorted(written) == list(range(4 * count))
    assert {record.sequence: record.value for record in followed} == written


# Holders that are killed, are stopped or fork.


def hold(path: Path, said: int) -> None:
    """Append until killed, and say each sequence after it was acknowledged."""
    with kvspool.open(path) as log, log.writer() as w:
        while True:
            os.write(said, w.append(b"of the child").to_bytes(8, "little"))


@pytest.fixture
def holder(log: Spool) -> Iterator[Any]:
    """Yield a child during a burst, and the pipe with the sequences that it got."""
    read_end, write_end = os.pipe()
    child = start(lambda: hold(log.path, write_end))
    os.close(write_end)
    yield child, read_end
    os.close(read_end)
    try:
        os.kill(child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(Died):
            child()
    except ProcessLookupError:
        pass


def test_a_killed_writer_frees_the_lock_and_loses_nothing(log: Spool, holder: Any) -> None:
    child, said = holder
    acknowledged = 0
    while acknowledged < 100:
        acknowledged = int.from_bytes(os.read(said, 8), "little") + 1
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(Died):
        child()
    while entry := os.read(said, 8):
        acknowledged = int.from_bytes(entry, "little") + 1
    log.timeout = 0
    end = log.append(b"the next")
    assert acknowledged <= end <= acknowledged + 1
    assert [record.sequence for record in log] == list(range(end + 1))


@pytest.mark.parametrize("has_appended", [True, False])
def test_parent_and_child_continue_with_a_writer_from_before_the_fork(log: Spool, has_appended: bool) -> None:
    def appended(name: bytes) -> dict[int, bytes]:
        return {w.append(name): name for _ in range(300)}

    with log.writer(timeout=60) as w:
        got = appended(b"before") if has_appended else {}
        wait = start(lambda: appended(b"child"))
        got |= appended(b"parent")
        got |= wait()
    assert sorted(got) == list(range(len(got)))
    assert {record.sequence: record.value for record in log} == got


# The end.


@pytest.mark.parametrize("end", ["close", "drop", "raise", "close the log"])
def test_a_writer_that_ended_refuses_and_blocks_no_other_writer(log: Spool, end: str) -> None:
    with kvspool.open(log.path, timeout=0) as other:
        if end == "raise":
            with pytest.raises(ZeroDivisionError), log.writer() as w:
                w.append(b"x")
                raise ZeroDivisionError
        else:
            w = log.writer()
            w.append(b"x")
            if end == "close":
                w.close()
            elif end == "close the log":
                log.close()
        if end != "drop":
            with pytest.raises(errors.Closed):
                w.append(b"x")
            with pytest.raises(errors.Closed):
                w.append_many([b"x"])
        if end != "close the log":
            del w
        gc.collect()
        assert other.append(b"free") == 1
        assert other.writer().closed is False
    if end == "close the log":
        w.close()


def test_a_process_that_ends_with_an_open_writer_ends(tmp_path: Path) -> None:
    code = """if True:
        import kvspool, sys
        log = kvspool.create(sys.argv[1], capacity=4096)
        w = log.writer()
        w.append(b"x")
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "log"], check=True, timeout=60)
    with kvspool.open(tmp_path / "log", timeout=0) as log:
        assert log.append(b"y") == 1


def test_importing_and_opening_start_no_thread(log: Spool) -> None:
    code = "import sys, threading, kvspool; w = kvspool.open(sys.argv[1]).writer(); sys.exit(threading.active_count() - 1)"
    subprocess.run([sys.executable, "-c", code, log.path], check=True, timeout=60)


def test_a_writer_is_handed_to_no_other_process(log: Spool) -> None:
    with log.writer() as w, pytest.raises(TypeError):
        multiprocessing.reduction.ForkingPickler.dumps(w)


# Errors, as in `append`.


@pytest.mark.parametrize("policy", ["raise", "block"])
def test_a_full_log_refuses_until_its_reader_moves(tmp_path: Path, policy: str) -> None:
    with kvspool.create(tmp_path / "full", capacity=4096, policy=policy, timeout=0.05) as log, log.reader("r") as reader, log.writer() as w:
        with pytest.raises(errors.SpoolFull, match="r"):
            for _ in range(100):
                w.append(bytes(100))
        end = log.stats().next_sequence
        assert end > 20
        list(reader.read())
        reader.commit()
        assert w.append(bytes(100)) == end


def test_a_blocked_writer_continues_when_the_reader_does(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "full", capacity=4096, policy="block", timeout=60) as log, log.reader("r") as reader:
        got = []

        def drain() -> None:
            for record in reader.follow(timeout=60, limit=200):
                got.append(record.sequence)
                reader.commit()

        thread = threading.Thread(target=drain)
        thread.start()
        with log.writer() as w:
            for number in range(200):
                assert w.append(bytes(100)) == number
        thread.join()
        assert got == list(range(200))


def test_a_poisoned_log_takes_no_more_records(log: Spool) -> None:
    with log.writer() as w:
        w.append(b"x")
        control = words(log)
        control[frames.SYNC_ERROR] = 5
        for _ in range(2):
            with pytest.raises(errors.Poisoned):
                w.append(b"x")
        control.release()
    assert log.stats().next_sequence == 1


def test_a_log_that_was_deleted_is_noticed(log: Spool) -> None:
    with log.writer() as w:
        w.append(b"x")
        shutil.rmtree(log.path)
        log.frame_writer().look_at = 0  # a second has passed
        with pytest.raises(errors.LogVanished):
            w.append(b"x")


def test_a_damaged_control_block_is_an_error_and_not_written_to(log: Spool) -> None:
    with log.writer() as w:
        w.append(b"x")
        control = words(log)
        control[frames.TAIL] += 8
        with pytest.raises(errors.Corruption):
            w.append(b"x")
        control[frames.TAIL] -= 8
        control.release()
        assert w.append(b"y") == 1
    assert [record.value for record in log] == [b"x", b"y"]


def test_a_user_without_write_permission_gets_no_writer(log: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert log._files is not None
    log._files.can_write = False
    with pytest.raises(PermissionError):
        log.writer()
