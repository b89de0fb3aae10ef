"""Durable readers: exclusive, exact about what was committed, through kills, forks, overruns and restarts."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults import ReadOnlyPort
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvspool
from kvspool import Gap, GapError, Spool, system
from kvspool.errors import Corruption, NoSuchReader, ReaderBusy, TooManyReaders
from kvspool.spool import format, search
from kvspool.spool.slots import Slots, encode_name

HOLDER = """
import sys, kvspool
with kvspool.open(sys.argv[1]) as log:
    reader = log.reader(sys.argv[2])
    taken = [record.sequence for record in reader.read(limit=3)]
    reader.commit()
    next(reader.read())
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        yield log


@pytest.fixture
def holder(spool: Spool) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has read 4 of 10 records as "billing", and committed 3."""
    spool.append_many([b"%d" % at for at in range(10)])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(spool.path), "billing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(kvspool.__file__).parents[1])},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        yield process
        process.kill()


def sequences(items: Any) -> list[int]:
    return [item.sequence for item in items]


def test_interrupted_while_it_copies_out_nothing_is_passed_over(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.append_many([b"x"] * 20)
    with spool.reader("r") as reader:
        items = reader.read()
        note, left = items._make, [7]

        def interrupted(*fields: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return note(*fields)  # type: ignore[misc]

        items._make = interrupted
        with pytest.raises(KeyboardInterrupt):
            next(items)
        assert reader.sequence == 0
        assert sequences(items) == list(range(20))


def test_a_second_opener_learns_which_process_has_it(spool: Spool, holder: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ReaderBusy, match=f"'billing'.*process {holder.pid} "):
        spool.reader("billing")
    with pytest.raises(ReaderBusy):
        spool.delete_reader("billing")
    with spool.reader("other") as reader:
        assert reader.sequence == 0
    (billing, other) = spool.readers()
    assert (billing.name, billing.sequence, billing.open) == ("billing", 3, True)
    assert (other.name, other.sequence, other.open) == ("other", 0, False)


def test_a_killed_holder_frees_the_name_and_keeps_the_commit(spool: Spool, holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    with spool.reader("billing") as reader:
        assert sequences(reader.read()) == list(range(3, 10))


class Lingering(system.Port):
    """The lock of a reader stays for some more looks, as while another process examines the descriptors of its holder."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def try_lock(self, fd: int, at: int) -> bool:
        if at >= format.READER_LOCKS and self.looks:
            self.looks -= 1
            return False
        return super().try_lock(fd, at)


def test_the_lock_of_a_killed_holder_may_stay_for_a_moment(spool: Spool, holder: subprocess.Popen[bytes]) -> None:
    with system.replaced(Lingering(3)), pytest.raises(ReaderBusy, match=f"process {holder.pid} "):
        spool.reader("billing")
    holder.kill()
    holder.wait()
    with system.replaced(Lingering(10**9)), pytest.raises(ReaderBusy, match=f"no longer process {holder.pid}"):
        spool.reader("billing")
    with system.replaced(Lingering(3)) as port, spool.reader("billing") as reader:
        assert reader.committed == 3
    assert isinstance(port, Lingering) and port.looks == 0


def test_what_is_closed_is_free_although_a_child_that_is_just_being_forked_has_the_descriptors_too(spool: Spool) -> None:
    # A duplicate shares the open file description, as the child's would.
    spool.append(b"pinned")
    reader = spool.reader("r")
    following = reader.follow(timeout=0.01)
    list(following)
    with spool.view(0) as value:
        assert value == b"pinned"
        copies = [os.dup(int(fd)) for fd in os.listdir("/proc/self/fd") if "/spool." in os.readlink(f"/proc/self/fd/{fd}")]
    following.close()
    reader.close()
    try:
        with spool.reader("r"):
            pass
        assert not system.port.is_locked(spool._live().lock_file_fd, format.READER_LOCKS)
        assert system.port.locked_from(spool._live().data_fd, 0, 1 << 20) < 0
    finally:
        for fd in copies:
            os.close(fd)


def test_an_iterator_that_is_dropped_releases_its_place_at_once(spool: Spool) -> None:
    with spool.reader("r") as reader:
        gc.collect()
        gc.disable()
        try:
            for follow in (partial(spool.follow, "latest"), reader.follow):
                following = follow(timeout=0.01)
                list(following)
                cursor = weakref.ref(following.cursor)
                del following
                assert cursor() is None
        finally:
            gc.enable()


def test_a_stopped_holder_is_named(spool: Spool, holder: subprocess.Popen[bytes]) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    with pytest.raises(ReaderBusy, match=rf"process {holder.pid} \(stopped\)"):
        spool.reader("billing")


def test_a_forked_child_does_not_share_the_lock(spool: Spool) -> None:
    spool.append_many([b"x"] * 5)
    with spool.reader("r") as reader:
        items = reader.read()
        next(items)
        reader.commit()
        next(items)
        come, go = os.pipe()
        heard, said = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(go)
                try:
                    reader.commit()
                except ReaderBusy:
                    code = 2
                os.write(said, b"1")
                os.read(come, 1)  # until the parent has closed it
                code = code * 10 + next(items).sequence
            finally:
                os._exit(code)
        os.close(come)
        try:
            assert os.read(heard, 1) == b"1"
            next(items)
            reader.commit()
            with pytest.raises(ReaderBusy):  # whatever the child closed
                spool.reader("r")
        finally:
            reader.close()
            for fd in (go, heard, said):
                os.close(fd)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 23


def test_after_a_raw_fork_the_child_does_not_share_the_lock(spool: Spool) -> None:
    with spool.reader("r") as reader:
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            code = 1
            try:
                reader.commit()
            except ReaderBusy:
                code = 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        reader.commit()
        with pytest.raises(ReaderBusy):
            spool.reader("r")


def test_an_overrun_commit_gives_the_exact_gap(spool: Spool) -> None:
    spool.append_many([b"x"] * 10)
    with spool.reader("r", start=5) as reader:
        assert sequences(reader.read(limit=2)) == [5, 6]
        reader.commit()
    spool.append_many([bytes(1000)] * 200)
    first = spool.stats().first_sequence
    with spool.reader("r") as reader:
        assert reader.lag().records == 210 - first
        with pytest.raises(GapError) as caught:
            next(reader.read())
        assert caught.value.gap == Gap(7, first - 1, "overrun", str(spool.path))
        assert reader.sequence == first
        assert next(reader.read()).sequence == first
    with spool.reader("r") as reader:
        assert [item for item in reader.read(on_gap="yield") if isinstance(item, Gap)] == [caught.value.gap]
        reader.commit()
    with spool.reader("r") as reader:
        assert sequences(reader.read()) == []


def test_lag(spool: Spool) -> None:
    with spool.reader("r") as reader:
        assert (reader.lag().records, reader.lag().bytes, reader.lag().seconds) == (0, 0, 0)
        spool.append_many([b"x"] * 3, timestamp=system.port.now() - 10**10)
        assert (reader.lag().records, reader.lag().bytes) == (3, 120) and reader.lag().seconds >= 10
        next(reader.read())
        assert (reader.lag().records, reader.lag().bytes) == (2, 80)
        (listed,) = spool.readers()
        assert listed.lag is not None and listed.lag.records == 3  # of what is committed


def test_there_are_64_readers(spool: Spool) -> None:
    for at in range(64):
        spool.reader(f"r{at}").close()
    with pytest.raises(TooManyReaders):
        spool.reader("r64")
    spool.delete_reader("r17")
    spool.reader("r64").close()
    spool.reader("r63").close()
    assert len(spool.readers()) == 64


def test_a_slot_that_no_reader_has_is_not_deleted(spool: Spool) -> None:
    for number in (0, 64, -1):
        with pytest.raises(NoSuchReader):
            spool.delete_reader(number)


def test_a_damaged_slot_is_refused_and_others_work(spool: Spool) -> None:
    spool.append_many([b"x"] * 3)
    spool.reader("one").close()
    spool.reader("two").close()
    for at in (format.SLOTS_AT + 64, format.SLOTS_AT + 256 + 160):  # a name; the only commit
        with open(spool.path / format.CONTROL_FILE, "r+b") as file:
            file.seek(at)
            file.write(b"\xff")
    for name in ("one", "two"):
        with pytest.raises(Corruption, match="damaged"):
            spool.reader(name)
    with spool.reader("three") as reader:
        assert sequences(reader.read()) == [0, 1, 2]
    assert sorted((one.slot, one.damaged) for one in spool.readers()) == [(0, True), (1, True), (2, False)]
    spool.delete_reader(0)
    spool.delete_reader("two")
    for name in ("one", "two"):
        with spool.reader(name) as reader:
            assert reader.sequence == 0


def test_a_place_that_is_not_the_committed_record_is_looked_up(spool: Spool) -> None:
    """As after a crash of the machine: the log was cut off before the place, or is another one there."""
    spool.append_many([b"x"] * 3)
    files = spool._live()
    for number, (position, sequence, found) in enumerate([(8, 1, 1), (80, 1, 1), (4000, 2, 2), (120, 2, 2), (40, 1, 1), (9999, 3, 3)]):
        Slots(files.control, files.header.log_id).slot(number).take(encode_name(f"r{number}"), (position, sequence), 1)
        with spool.reader(f"r{number}") as reader:
            assert sequences(reader.read()) == list(range(found, 3))
    Slots(files.control, files.header.log_id).slot(7).take(encode_name("ahead"), (9999, 4), 1)
    with pytest.raises(Corruption, match="ahead of the log"):
        spool.reader("ahead")


def test_a_user_without_write_permission_has_no_durable_reader_but_reads(spool: Spool) -> None:
    spool.append_many([b"x"] * 3)
    with spool.reader("r"), system.replaced(ReadOnlyPort()), kvspool.open(spool.path) as log:
        with pytest.raises(PermissionError):
            log.reader("r")
        with pytest.raises(PermissionError):
            log.delete_reader("r")
        assert sequences(log.read()) == sequences(log.follow(timeout=0)) == [0, 1, 2]
        assert [one.open for one in log.readers()] == [True]


def test_readers_leave_no_open_descriptor(spool: Spool) -> None:
    spool.append(b"x")
    spool.reader("warm").close()
    gc.collect()  # objects of other tests must not be collected during this one
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with spool.reader("r") as reader:
            for _record in reader.follow(timeout=0):
                break
            with pytest.raises(ReaderBusy):
                spool.reader("r")
    assert sorted(os.listdir("/proc/self/fd")) == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_resuming_is_exact(tmp_path: Path, data: st.DataObject) -> None:
    """Against a model: any mix of appending, reading, seeking, committing and dying; a ring that now and then overruns the reader."""
    path = tmp_path / os.urandom(8).hex()
    with kvspool.create(path, capacity=4096) as log:
        written, place, committed = 0, 0, 0
        reader = log.reader("r")
        steps = data.draw(st.lists(st.sampled_from(["append", "append", "read", "read", "follow", "commit", "seek", "die"]), max_size=30))
        for step in steps:
            first = log.stats().first_sequence
            if step == "append":
                count = data.draw(st.integers(1, 30))
                log.append_many([b"%d" % at for at in range(written, written + count)])
                written += count
            elif step in ("read", "follow"):
                limit = data.draw(st.integers(0, 40))
                options: dict[str, Any] = {"limit": limit, "on_gap": "yield", **({"timeout": 0} if step == "follow" else {})}
                for item in getattr(reader, step)(**options):
                    if isinstance(item, Gap):
                        assert (item.first, item.last) == (place, first - 1)
                        place = first
                    else:
                        assert (item.sequence, item.value) == (place, b"%d" % place)
                        place += 1
                        limit -= 1
                assert limit == 0 or place == written
            elif step == "commit":
                assert reader.commit() == place
                committed = place
            elif step == "seek":
                place = data.draw(st.integers(first, written))
                reader.seek(place)
            else:
                reader.close()
                reader = log.reader("r", start="latest")
                place = committed
            assert (reader.sequence, reader.committed) == (place, committed)
        reader.close()


@pytest.mark.parametrize("verb", ["read", "follow"])
def test_a_commit_stores_the_byte_position_of_the_next_record_wherever_the_iteration_is(tmp_path: Path, verb: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=1 << 20) as spool:
        spool.append_many([bytes(at % 50) for at in range(4000)])
        frames = spool._live().reader(0, 0)
        stops = sorted(random.Random(7).sample(range(1, 4000), 12))
        with spool.reader("r") as reader:
            items = getattr(reader, verb)()
            for before, stop in itertools.pairwise([0, *stops]):
                for _ in range(stop - before):
                    next(items)
                assert (reader.commit(), reader._committed.position) == (stop, search.find(frames, stop)[0])
        for stop in stops:
            with spool.reader(f"dropped {stop}") as reader:
                for record in getattr(reader, verb)():
                    if record.sequence == stop - 1:
                        break
                assert (reader.commit(), reader._committed.position) == (stop, search.find(frames, stop)[0])
            spool.delete_reader(f"dropped {stop}")


def test_a_reader_whose_next_record_was_overwritten_before_its_commit_gets_the_gap(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as spool, spool.reader("r") as reader:
        spool.append_many([b"%08d" % at for at in range(60)])
        for record in reader.read():
            if record.sequence == 20:
                break
        spool.append_many([b"%08d" % at for at in range(60, 200)])
        first = spool.stats().first_sequence
        assert first > 21
        assert (reader.commit(), reader.lag().records) == (21, 200 - first)
        with pytest.raises(GapError) as raised:
            next(reader.read())
        assert (raised.value.gap.first, raised.value.gap.last, raised.value.gap.reason) == (21, first - 1, "overrun")
        assert sequences(reader.read()) == list(range(first, 200))
