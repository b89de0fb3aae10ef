"""Faults under a journal at the worst moment: full disks, removed lock files, torn ends that are replaced, forks, power cuts."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import append_lock
import pytest
from children import start
from faults import FILE_CALLS, FailingPort
from images import Rebooted
from schedules import some

import kvspool
from kvspool import Gap, Record, system
from kvspool.errors import Closed, KvspoolError, LogVanished, NotDurable, Poisoned, ReaderBusy, appended_by
from kvspool.journal import Journal, JournalBatch
from kvspool.journal import control as page_file
from kvspool.journal.format import Before
from kvspool.system import Port

FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("sej", {"segment_bytes": 200}),
    ("kvj", {"segment_bytes": 200}),
    ("fixed", {"item_bytes": 50, "items_per_blob": 4}),
]
NAMES = [name for name, _ in FORMATS]
CALLS = tuple(name for name in FILE_CALLS if name not in ("close", "mounts"))  # the failed close of a dead object could appear in any test


@pytest.fixture(params=FORMATS, ids=NAMES)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    name, limits = request.param
    with kvspool.create(tmp_path / "log", format=name, **limits) as log:
        yield log


@pytest.fixture
def memory() -> Any:
    """A directory where flushes cost nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def sej(tmp_path: Path) -> Any:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=500) as log:
        yield log


def value(number: int) -> bytes:
    return (b"%d " % number).ljust(50, b"x")


def reopened(log: Journal) -> Journal:
    return kvspool.open(log.path)  # type: ignore[return-value]


def numbers(log: Journal) -> list[int]:
    return [int(record.value.split()[0]) for record in log.read()]


# A full disk.


class FullDisk(Port):
    """Has room for some bytes of what is written to segments; then for none."""

    def __init__(self, room: int, directory: Path) -> None:
        super().__init__()
        self.room = room
        self.directory = str(directory)
        self.on_full = lambda: None

    def write(self, fd: int, data: bytes | bytearray, at: int) -> None:
        if os.path.dirname(os.readlink(f"/proc/self/fd/{fd}")) != self.directory:
            return super().write(fd, data, at)
        fits = bytes(data[: self.room])
        self.room -= len(fits)
        super().write(fd, fits, at)
        if len(fits) < len(data):
            self.on_full()
            raise OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize("room", range(0, 400, 17))
def test_what_a_follower_has_read_of_a_batch_that_found_the_disk_full_stays(log: Journal, room: int) -> None:
    log.append(value(0))
    with log.follow(timeout=0) as following:
        taken = [record.value for record in following]
        port = FullDisk(room, log._segments.directory)
        port.on_full = lambda: taken.extend(record.value for record in following)
        with system.replaced(port), pytest.raises(OSError, match="full") as error:
            log.append_many([value(number) for number in range(1, 9)])
        there = [record.value for record in log.read()]
        assert there[: len(taken)] == taken
        assert any(f"{len(there) - 1} of 8 records were appended" in note for note in error.value.__notes__)
        assert appended_by(error.value) == range(1, len(there))
        assert log.append(value(99)) == len(there)
        taken += [record.value for record in following]
        assert taken == [*there, value(99)]


@pytest.mark.parametrize("room", range(0, 300, 17))
def test_sequences_before_a_batch_that_found_the_disk_full_are_left_out_only_if_a_record_is_there(tmp_path: Path, room: int) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append(value(0))
        port = FullDisk(room, log._segments.directory)
        with system.replaced(port), pytest.raises(OSError, match="full") as error:
            log.append_batch(JournalBatch([value(number) for number in range(20, 28)]), at=20)
        there = len(list(log.read(on_gap="skip"))) - 1
        assert any(note.startswith(f"{there} of 8 records were appended") for note in error.value.__notes__)
        assert appended_by(error.value) == range(20, 20 + there)
        assert log.end() == (20 + there if there else 1)
        assert log.verify().is_sound
        assert log.append_batch(JournalBatch([value(30)]), at=30) == range(30, 31)
        gaps = [(gap.first, gap.last, gap.reason) for gap in log.read(on_gap="yield") if isinstance(gap, Gap)]
        assert gaps == ([(1, 19, "missing"), (20 + there, 29, "missing")] if there else [(1, 29, "missing")])


class Refusing(Port):
    """Writes no page of a lock file."""

    def write(self, fd: int, data: bytes | bytearray, at: int) -> None:
        if bytes(data[:8]) == page_file.MAGIC:
            raise OSError(errno.EIO, "no page")
        super().write(fd, data, at)


def test_an_append_whose_page_can_not_be_written_is_no_failure_for_its_record_is_there(log: Journal) -> None:
    log.append(value(0))
    with system.replaced(Refusing()):
        assert log.append(value(1)) == 1
    with reopened(log) as other:
        assert other.append(value(2)) == 2
    assert log.append(value(3)) == 3
    assert numbers(log) == [0, 1, 2, 3]


# Every call.


def act(log: Journal, acknowledged: list[int]) -> None:
    """Append over the end of a segment, sync, read, follow, commit, and trim."""
    for number in range(6):
        log.append(value(number), durable=number == 4)
        acknowledged.append(number)
    log.sync()
    assert numbers(log) == list(range(6))
    with log.reader("r") as reader:
        assert len(list(reader.read(limit=5))) == 5
        reader.commit()
        assert len(list(reader.follow(timeout=0))) == 1
    log.trim(before=3)


@pytest.mark.parametrize("first", range(1, 220, 20))
def test_any_call_may_fail_and_nothing_acknowledged_is_lost(memory: Path, first: int) -> None:
    for name, limits in FORMATS:
        for nth in some(range(first, first + 20), 2, first // 20 % 2):
            path = memory / f"{name}{nth}"
            number = (errno.ENOSPC, errno.EIO, errno.EMFILE)[nth % 3]
            acknowledged: list[int] = []
            kvspool.create(path, format=name, **limits).close()  # type: ignore[call-overload]
            with kvspool.open(path) as log, system.replaced(FailingPort(nth, number, only=CALLS)) as port:
                try:
                    act(log, acknowledged)  # type: ignore[arg-type]
                except (OSError, Poisoned, NotDurable, KvspoolError):
                    assert isinstance(port, FailingPort) and port.failed
                port.left = 1 << 60  # type: ignore[attr-defined]
            with kvspool.open(path) as log:
                assert isinstance(log, Journal)
                found = list(log.read())
                assert [record.sequence for record in found] == list(range(log.first(), log.end()))
                assert log.end() >= len(acknowledged) and log.first() <= 3
                assert [record.value for record in found] == [value(record.sequence) for record in found]
                assert all(one.sequence is None or one.sequence <= log.end() for one in log.readers())
                if not log.stats().sync_error:
                    assert log.append(value(9)) == len(found) + log.first()


@pytest.mark.parametrize("name", NAMES)
def test_a_create_that_fails_at_any_call_leaves_room_for_another(memory: Path, name: str) -> None:
    limits = dict(FORMATS)[name]
    for nth in range(1, 60):
        path = memory / f"log{nth}"
        with system.replaced(FailingPort(nth, errno.ENOSPC, only=CALLS)):
            try:
                kvspool.create(path, format=name, **limits).close()  # type: ignore[call-overload]
                break
            except OSError:
                pass
        kvspool.create(path, format=name, **limits).close()  # type: ignore[call-overload]
    assert nth > 15


# A lock file that goes away.


def test_writers_meet_again_when_the_lock_file_was_removed(log: Journal) -> None:
    with reopened(log) as other:
        log.append(value(0))
        other.append(value(1))
        log.format.lock_file(log.path).unlink()
        for number in range(2, 20, 2):
            assert other.append(value(number)) == number
            assert log.append(value(number + 1)) == number + 1
        with append_lock.held(other), pytest.raises(KvspoolError):
            log.append(value(0), timeout=0.01)
    assert numbers(log) == list(range(20))


def test_a_journal_that_was_removed_with_its_lock_file_has_vanished(sej: Journal) -> None:
    sej.append(b"a")
    shutil.rmtree(sej.path)
    with pytest.raises(LogVanished):
        sej.append(b"b")


def test_a_lock_file_that_is_removed_while_processes_append(log: Journal) -> None:
    def write(who: int) -> list[int]:
        with reopened(log) as other:
            return [other.append(value(1000 * who + number)) for number in range(200)]

    waits = [start(lambda who=who: write(who)) for who in range(1, 4)]  # type: ignore[misc]
    got = sorted(sequence for wait in waits for sequence in wait())
    assert got == list(range(600))
    assert len(set(numbers(log))) == 600


# Torn ends.


def test_a_torn_end_that_is_cut_and_replaced_by_as_many_bytes_is_read_again(sej: Journal) -> None:
    sej.append(b"first")
    path = sej._segments.path_of(0)
    with sej.follow(timeout=0) as following, path.open("ab") as file:
        assert next(following).value == b"first"
        frame, *_ = sej.format.encode(kvspool.journal.JournalBatch([b"x" * 90]), 0, Before(1, 0, 0, 0, 0))
        size = len(sej.format.encode(kvspool.journal.JournalBatch([b"y" * 20]), 0, Before(1, 0, 0, 0, 0))[0])
        file.write(frame[:size])
        file.flush()
        segments = following.cursor.segments
        segment = segments.get(0)
        assert segment is not None
        read = segment.read

        def and_then(at: int, length: int) -> bytes:
            data = read(at, length)
            segment.read = read  # type: ignore[method-assign]
            assert reopened(sej).append(b"y" * 20) == 1
            return data

        segment.read = and_then  # type: ignore[method-assign]
        assert next(following).value == b"y" * 20


def test_a_frame_that_becomes_whole_before_the_next_segment_is_seen_is_no_damage(sej: Journal) -> None:
    sej.append(b"first")
    path = sej._segments.path_of(0)
    whole, *_ = sej.format.encode(kvspool.journal.JournalBatch([b"x" * 600]), 0, Before(1, 0, 0, 0, 0))
    with sej.follow(timeout=0) as following, path.open("ab", buffering=0) as file:
        assert next(following).value == b"first"
        file.write(whole[:100])
        later = following.cursor._later

        def and_then() -> list[int]:
            following.cursor._later = later  # type: ignore[method-assign]
            file.write(whole[100:])
            with reopened(sej) as other:
                other.append(b"third")
            return later()

        following.cursor._later = and_then  # type: ignore[method-assign]
        assert [record.value for record in following] == [b"x" * 600, b"third"]


def test_a_new_segment_whose_directory_could_not_be_flushed_is_flushed_by_the_next_writer(sej: Journal) -> None:
    """Otherwise its name could be lost although its records were synced."""
    flushed: list[str] = []

    class Directories(Port):
        fails = True

        def flush(self, fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.isdir(path):
                if self.fails:
                    raise OSError(errno.EIO, "no directory")
                flushed.append(path)
            super().flush(fd)

    port = Directories()
    with system.replaced(port):
        with pytest.raises(OSError, match="no directory"):
            sej.append(b"x" * 600)
        port.fails = False
        with reopened(sej) as other:
            assert other.append(b"next") == 1
    assert str(sej._segments.directory) in flushed


def test_a_header_of_zeros_is_one_that_was_not_written(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=100) as log:
        log.append(b"x" * 100)
        last = log._segments.path_of(1)
        last.write_bytes(bytes(last.stat().st_size))
        with system.replaced(Rebooted()):
            assert len(list(log.read())) == 1
            with reopened(log) as other:  # type: ignore[arg-type]
                assert other.append(b"y") == 1
                assert [record.value for record in other.read()] == [b"x" * 100, b"y"]


def test_a_reader_after_a_header_is_not_disturbed_by_the_completion_of_the_segment(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        with log.follow(timeout=0) as following:
            assert list(following) == []
            log.format.lock_file(log.path).unlink()
            truncated: list[int] = []

            class Watching(Port):
                def truncate(self, fd: int, size: int) -> None:
                    truncated.append(size)
                    super().truncate(fd, size)

            with system.replaced(Watching()), reopened(log) as other:  # type: ignore[arg-type]
                other.append(b"a")
            assert truncated == []
            assert next(following).value == b"a"


def test_the_end_is_reported_while_a_segment_gets_its_header(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=100) as log:
        log.append(b"x" * 100)
        segment = log._segments.get(1)
        assert segment is not None
        whole, sizes = segment.size(), [0]
        segment.size = lambda: sizes.pop() if sizes else whole  # type: ignore[method-assign]
        assert log.end() == 1, "the size was looked at before the header was written"
        assert sizes == []
        for size in range(whole):
            os.truncate(segment.path, size)
            assert log.end() == 1
            assert [record.sequence for record in log.read()] == [0]


# Syncs.


def test_a_sync_that_meets_a_half_written_page_flushes_all_the_same(log: Journal) -> None:
    log.append(value(0))
    control = log.control(1)
    path, content = control.path, control.path.read_bytes()
    flushes: list[int] = []

    class Flushes(Port):
        def flush_data(self, fd: int) -> None:
            flushes.append(fd)
            super().flush_data(fd)

        def flush(self, fd: int) -> None:
            flushes.append(fd)
            super().flush(fd)

    path.write_bytes(content[:40] + bytes(len(content) - 40))
    with system.replaced(Flushes()):
        assert log.sync() == 1
    assert flushes


def test_a_page_of_another_run_of_the_machine_promises_nothing_about_what_was_put_back(log: Journal) -> None:
    """Records from a backup, and a lock file that says that more was on disk than is there."""
    log.append_many([value(number) for number in range(12)])
    log.sync()
    for base in log.bases()[1:]:
        log._segments.path_of(base).unlink()
    first = log._segments.path_of(0)
    os.truncate(first, log.format.header_bytes)
    with system.replaced(Rebooted()), reopened(log) as other:
        assert other.append(value(0)) == 0
        assert other.stats().synced_sequence == 0


# Durable readers.


def test_a_commit_flushes_the_records_that_it_passes(log: Journal) -> None:
    log.append_many([value(number) for number in range(2)])
    order: list[str] = []

    class Ordered(Port):
        def flush_data(self, fd: int) -> None:
            order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

        def rename(self, source: Any, target: Any) -> None:
            order.append(Path(target).name)
            super().rename(source, target)

    with log.reader("r") as reader:
        list(reader.read(limit=1))
        with system.replaced(Ordered()):
            reader.commit()
    assert order == [log._segments.path_of(0).name, "r.ofs"]


def test_a_commit_whose_records_can_not_be_flushed_is_refused_and_the_journal_poisoned(log: Journal) -> None:
    log.append(value(0))
    with log.reader("r") as reader:
        list(reader.read())
        with system.replaced(FailingPort(1, errno.EIO, only=("flush_data",))), pytest.raises(Poisoned):
            reader.commit()
        assert reader.committed == 0
    assert log.stats().sync_error == errno.EIO


def test_a_reader_ahead_of_what_is_there_stands_at_the_end_before_its_numbers_are_given_again(log: Journal) -> None:
    log.append_many([value(number) for number in range(3)])
    log.reader("r").close()
    log.offsets.store("r", 7)
    with log.reader("r") as reader:
        assert (reader.sequence, reader.committed) == (3, 3)
    log.append_many([value(number) for number in range(3, 9)])
    with log.reader("r") as reader:
        assert [record.sequence for record in reader.read()] == list(range(3, 9))


def test_a_forked_child_does_not_keep_its_parents_reader(log: Journal) -> None:
    """The child outlives its parent, until the test closes a pipe."""
    log.append(value(0))
    stop, running = os.pipe()

    def parent() -> None:
        os.close(running)
        reader = log.reader("r")
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            try:
                with pytest.raises(Closed):
                    reader.commit()
                os.write(write_end, b"x")
                os.read(stop, 1)
            finally:
                os._exit(0)
        assert os.read(read_end, 1) == b"x"
        with pytest.raises(ReaderBusy):
            log.reader("r")
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            parent()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    log.reader("r").close()
    os.close(running)
    os.close(stop)


def test_random_records_survive_every_cut_of_the_end(memory: Path) -> None:
    """Every length of the last segment, in another run of the machine: what is whole stays, in order."""
    choose = random.Random(1)
    for name, limits in FORMATS:
        path = memory / name
        with kvspool.create(path, format=name, **limits) as log:  # type: ignore[call-overload]
            log.append_many([value(choose.randrange(100)) for _ in range(6)])
            log.sync()
            kept = [record.value for record in log.read()]
            last = log._segments.path_of(log.bases()[-1])
            before = log.bases()[-1]
        content = last.read_bytes()
        for cut in range(len(content), -1, -1):
            last.write_bytes(content[:cut])
            with system.replaced(Rebooted()), kvspool.open(path) as log:
                there = [record.value for record in log.read() if isinstance(record, Record)]
                assert there == kept[: len(there)] and len(there) >= before
                assert log.append(value(7)) == len(there)
                assert [record.value for record in log.read()] == [*there, value(7)]
            for other in last.parent.glob(last.name[:4] + "*"):
                if other.name > last.name:
                    other.unlink()
