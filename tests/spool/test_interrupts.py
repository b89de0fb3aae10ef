"""Interruptions: exceptions from signal handlers, other threads, a wake-up that fails. No record and no lock is lost."""

from __future__ import annotations

import errno
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from alarms import Interrupt, Tracer, interrupted
from schedules import ALL

import kvspool
import shard
from kvspool import Spool, errors, system
from kvspool.errors import Reentered
from kvspool.kernel import frames, machine
from kvspool.record import Record
from kvspool.spool import format


@pytest.mark.timeout(120, method="thread")  # the alarm is ours
@pytest.mark.skipif(frames.TWIN == "interpreted", reason="interpreted, the lock and the work are several steps")
@pytest.mark.parametrize("count", [1, 3])
def test_an_exception_out_of_a_signal_handler_leaves_no_lock_held(no_collector: None, log: Spool, count: int) -> None:
    noise = random.Random(count)
    interrupts = 0
    log.append(b"the first one opens what writing needs")
    with kvspool.open(log.path, timeout=0) as other:
        for _ in range(400):
            try:
                with interrupted(noise.uniform(1e-5, 3e-4)):
                    while True:
                        log.append_many([b"x"] * count)
            except Interrupt:
                interrupts += 1
            other.append(b"other")  # the lock is free
            log.append(b"same")  # and so is the handle
    assert interrupts >= 400
    items = list(log.read(0, on_gap="yield"))
    assert items[-1].sequence == log.stats().next_sequence - 1


@pytest.mark.skipif(frames.TWIN == "compiled", reason="compiled, no handler comes in there")
def test_an_exception_out_of_a_signal_handler_at_the_unlock_leaves_the_lock_free(log: Spool) -> None:
    log.append(b"the first one opens what writing needs")
    unlock = machine.unlock
    attempts: list[int] = []

    def interrupted_once(fd: int, at: int) -> None:
        attempts.append(at)
        if len(attempts) == 1:
            raise Interrupt
        unlock(fd, at)

    with mock.patch.object(machine, "unlock", interrupted_once), pytest.raises(Interrupt):
        log.append(b"x")
    with kvspool.open(log.path, timeout=0) as other:
        other.append(b"other")
    log.append(b"same", timeout=0)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.skipif(frames.TWIN == "interpreted", reason="interpreted, the lock and the work are several steps")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt within `__del__`
def test_an_exception_out_of_a_signal_handler_leaves_no_lock_kept(no_collector: None, log: Spool) -> None:
    noise = random.Random(5)
    interrupts = written = 0
    with kvspool.open(log.path, timeout=60) as other:
        while interrupts < 200 or written < 1000:
            with suppress(Interrupt), interrupted(noise.uniform(1e-5, 1e-3), 0.1):
                try:
                    with log.writer() as w:
                        while True:
                            w.append(b"x")
                            written += 1
                except Interrupt:
                    interrupts += 1
                    raise
            other.append(b"other")
            log.append(b"same")
    items = list(log.read(0, on_gap="yield"))
    assert items[-1].sequence == log.stats().next_sequence - 1


@pytest.mark.timeout(120, method="thread")
def test_an_exception_out_of_a_signal_handler_costs_a_reader_at_most_the_record_in_its_hands(no_collector: None, tmp_path: Path) -> None:
    noise = random.Random(7)
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        log.append_many([b"x"] * 20_000)
        total = 0
        while total < 10:
            reading, interrupts, is_over = log.read(), 0, False
            got: list[int] = []

            def read(reading: Iterator[Record] = reading, got: list[int] = got) -> None:
                # Not in the `with` block itself: an exception at the jump that ends such a loop leaves it without its exit in Python 3.13.
                while (record := next(reading, None)) is not None:
                    got.append(record.sequence)

            while not is_over:
                try:
                    with interrupted(noise.uniform(1e-5, 1e-3)):
                        read()
                        is_over = True
                except Interrupt:
                    interrupts += 1
            assert got == sorted(set(got))
            if frames.TWIN == "compiled":
                assert 20_000 - len(got) <= interrupts
                assert all(later - sooner <= 2 for sooner, later in zip(got, got[1:], strict=False))
            total += interrupts


@pytest.mark.timeout(120, method="thread")
def test_an_exception_out_of_a_signal_handler_hides_no_gap_from_a_durable_reader(
    no_collector: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # of alarms within destructors; the hook of pytest would be interrupted, too
    noise = random.Random(1)
    wrong: list[tuple[int, int]] = []
    interrupts = 0
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        for at in range(0, 1500, 5):  # two records, and three sequences left out
            log.append_batch(log.prepare([b"a"] * 2), at=at)
        while interrupts < (3000 if frames.TWIN == "compiled" else 300):
            with log.reader("r") as reader:
                reader.rewind()
                reading, expected = reader.read(on_gap="raise"), reader.sequence

                def read(reading: Any = reading) -> None:
                    nonlocal expected
                    while True:
                        try:
                            record = next(reading)
                            first, expected, before = record.sequence, record.sequence + 1, expected
                        except errors.GapError as error:
                            first, expected, before = error.gap.first, error.gap.last + 1, expected
                        except StopIteration:
                            return
                        if first != before:
                            wrong.append((before, first))

                is_over = False
                while not is_over:
                    try:
                        with interrupted(noise.uniform(2e-5, 4e-4 if frames.TWIN == "compiled" else 4e-3)):
                            read()
                            is_over = True
                    except Interrupt:
                        interrupts += 1
                        expected = reader.sequence  # the record or Gap in the hands of `read` does not count
    assert wrong == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt within `__del__`
@pytest.mark.parametrize("on_gap", ["raise", "yield", "skip"])
def test_an_interrupted_durable_reader_counts_no_gap_twice(no_collector: None, tmp_path: Path, on_gap: Any) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        for at in range(0, 15, 5):  # two records, and three sequences left out
            log.append_batch(log.prepare([b"a"] * 2), at=at)
        is_interrupted, places = True, itertools.count(1, 1 if ALL else 7 if frames.TWIN == "compiled" else 17)
        while is_interrupted:
            nth = next(places)
            with log.reader("r") as reader:
                reader.rewind()
                reading = reader.read(on_gap=on_gap)

                def take(reading: Any = reading) -> None:
                    while True:
                        try:
                            next(reading)
                        except errors.GapError:
                            pass
                        except StopIteration:
                            return

                is_interrupted = Tracer(nth).run(take)
                take()
                assert reader.sequence == 12
                assert reading.missed == 6, nth
    assert nth > 20


@pytest.mark.parametrize("codec", ["json", "keyed"])
def test_a_copy_that_is_interrupted_at_any_place_loses_no_record(tmp_path: Path, codec: Any) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, codec=codec) as log:
        log.append_many([{"a": 1}] * 5)
        is_interrupted, nth = True, 0
        while is_interrupted:
            nth += 1
            first: list[Any] = []
            rest: list[Any] = []
            with closing(log.cursor()) as cursor:
                is_interrupted = Tracer(nth).run(lambda: cursor.fetch(3, Record, first))  # noqa: B023
                cursor.fetch(5, Record, rest)
                assert [record.sequence for record in first + rest] == list(range(5)), nth
    assert nth > (1 if frames.TWIN == "compiled" else 10)


@pytest.mark.parametrize("verb", ["read", "read_values", "follow"])
def test_an_iteration_that_is_interrupted_at_any_place_loses_at_most_the_record_that_it_returns(tmp_path: Path, verb: str) -> None:
    values = [b"%d" % number for number in range(5)]
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append_many(values)
        is_interrupted, nth = True, 0
        while is_interrupted:
            nth += 1
            got: list[Any] = []
            tracer = Tracer(nth)
            with closing(log.follow(timeout=0.001) if verb == "follow" else getattr(log, verb)()) as reading:
                is_interrupted = tracer.run(lambda: got.extend(reading))  # noqa: B023
                got.extend(reading)
            found = [item if isinstance(item, bytes) else item.value for item in got]
            missing = [value for value in values if value not in found]
            assert found == [value for value in values if value not in missing], nth
            assert not missing or len(missing) == 1 and is_handing_over(tracer.error), nth
    assert nth > (1 if frames.TWIN == "compiled" else 10)


def is_handing_over(error: Interrupt | None) -> bool:
    """Return whether an exception was raised after a record had left the loops, on its way to the caller."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)] if error else []
    return [name for name in names if name not in ("_trace", "_come")][-1] in ("__next__", "take")


def test_copied_records_that_are_put_back_are_copied_again_also_after_an_interrupt(log: Spool) -> None:
    log.append_many([b"x"] * 5)
    is_interrupted, nth = True, 0
    while is_interrupted:
        nth += 1
        items: list[Any] = []
        rest: list[Any] = []
        with closing(log.cursor()) as cursor:
            cursor.fetch(5, Record, items)
            is_interrupted = Tracer(nth).run(lambda: cursor._put_back(items))  # noqa: B023
            cursor.fetch(5, Record, rest)
            assert [record.sequence for record in items + rest] == list(range(5)), nth
    assert nth > 2


def test_an_exception_as_a_record_is_made_loses_no_record(log: Spool) -> None:
    log.append_many([b"x"] * 5)
    calls = 0

    def make(sequence: int, *_: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Interrupt
        return sequence

    got: list[Any] = []
    rest: list[Any] = []
    with closing(log.cursor()) as cursor:
        with pytest.raises(Interrupt):
            cursor.fetch(5, make, got)
        assert got == [0, 1]
        cursor.fetch(5, make, rest)
    assert rest == [2, 3, 4]


def test_a_sync_while_another_thread_closes_the_handle_harms_no_other_thread(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    for _ in range(60):
        log = kvspool.open(tmp_path / "log")
        log.append(b"x")
        found: list[BaseException] = []

        def sync(log: Spool = log, found: list[BaseException] = found) -> None:
            with pytest.raises(Exception) as caught:
                while True:
                    log.append(b"y")
                    log.sync()
            found.append(caught.value)

        thread = threading.Thread(target=sync)
        thread.start()
        log.close()
        thread.join()
        assert [type(error) for error in found] == [errors.Closed]
    with kvspool.open(tmp_path / "log") as log:
        assert log.stats().sync_error == 0
        log.append(b"goes on")


def test_a_wake_up_that_fails_is_not_the_appenders_business(log: Spool) -> None:
    def fail(*_: object) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    port = system.Port()
    port.write = fail  # type: ignore[method-assign]
    assert log._files is not None
    with log.follow(timeout=0) as following:
        assert list(following) == []
        log._files.reader(0, 0).request_wake_up(0)
        with system.replaced(port):
            assert log.append(b"stored") == 0
        assert [record.value for record in following] == [b"stored"]


def test_a_list_that_changes_while_the_writer_waits_for_the_lock_changes_nothing(interpreted: None, log: Spool) -> None:
    values: list[Any] = [b"a", b"b"]
    keys: list[bytes | None] = [b"k", None]

    class Meddling(system.Port):
        def try_lock(self, fd: int, at: int) -> bool:
            values.extend([b"c"] * 1000)
            keys.clear()
            return super().try_lock(fd, at)

    with system.replaced(Meddling()):
        assert log.append_many(values, keys=keys) == range(2)
    assert [(record.key, record.value) for record in log] == [(b"k", b"a"), (None, b"b")]


def test_a_codec_that_is_none_is_refused_before_anything_is_written(log: Spool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    batch = pyarrow.record_batch({"value": [b"x"]})
    for codec in (-1, 5, 255, 256, 300, 65537):
        with pytest.raises(ValueError, match="codec"):
            log.append_arrow(batch, codec=codec)
    assert log.stats().next_sequence == 0


def test_a_record_is_bounded_however_large_the_ring_is() -> None:
    assert format.largest_frame(4096) == 1024
    assert format.largest_frame(1 << 40) == 1 << 30


@pytest.mark.parametrize("tail", [2**64 - 1, 2**64 - 8, 2**64 - 4096, 2**63 + 4])
@pytest.mark.parametrize("head", [0, 2**64 - 4104, 2**64 - 4097, 2**64 - 1])
def test_a_control_block_that_ends_nowhere_is_an_error_and_never_an_endless_loop(log: Spool, tail: int, head: int) -> None:
    log.append_many([b"x"] * 10)
    assert log._files is not None
    words = log._files.control.cast("Q")
    words[32], words[40], words[41] = head, tail, tail  # head, tail, and the mark of this tail
    for use in (lambda: list(log.read(0, on_gap="skip")), lambda: log.append(b"x"), log.stats):
        with pytest.raises(errors.Corruption):
            use()


def test_an_error_of_one_shard_costs_no_record_of_another_one(tmp_path: Path) -> None:
    with shard.create(tmp_path / "root", prefix="p", bits=1, capacity=4096) as shards:
        for at, one in enumerate(shards.shards):
            one.append_many([b"%d" % at] * 3, timestamp=at + 1)
        reading = shards.read()
        second = reading.sources[1].reading
        fill, failures = second.fill, [Interrupt(), Interrupt()]

        def fail_first(most: int) -> Any:
            if failures:
                raise failures.pop()
            return fill(most)

        second.fill = fail_first  # type: ignore[method-assign]
        got = []
        for _ in range(20):
            try:
                got.extend(record.value for record in reading)
            except Interrupt:
                continue
    assert not failures
    assert got == [b"0"] * 3 + [b"1"] * 3


def test_a_handle_is_not_closed_during_an_append_to_it(log: Spool) -> None:
    refused: list[type[Exception]] = []

    def handler(*_: object) -> None:
        try:
            log.close()
        except Reentered as error:
            refused.append(type(error))

    def work(writer: Any) -> bool:
        handler()  # as the handler of a signal that comes just now
        writer.begin()
        writer.put_many(None, [b"goes on"], 0, b"\0", 7)
        writer.publish()
        return True

    assert log._locked(work, 1.0)
    assert refused == [Reentered]
    assert [record.value for record in log] == [b"goes on"]
    log.close()
    assert log.closed


@pytest.mark.parametrize("durability", ["memory", "os", "disk"])
def test_a_close_that_is_interrupted_at_any_line_leaves_a_handle_that_works_or_is_closed(tmp_path: Path, durability: Any) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    codes = {function.__code__ for function in (Spool.close, Spool._flush_level, getattr(Spool, "_let_go", Spool._flush_level))}
    lines = 0
    while True:
        log: Any = kvspool.open(tmp_path / "log", format="spool", durability=durability)
        log.append(b"x")
        lines += 1
        if not interrupted_at_line(lines, codes, log.close):
            break
        for use in (log.sync, lambda log=log: log.append(b"y")):
            with suppress(errors.Closed):
                use()
        log.close()
        assert log.closed
    assert lines > 10


def interrupted_at_line(number: int, codes: set[Any], act: Any) -> bool:
    """Raise Interrupt before the given line that is run of these functions; return whether there was one."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code not in codes:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False
