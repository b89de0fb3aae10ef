"""Each record of a producer's batch is in the log once, whatever happens when; on spools and on journals."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import ClockPort, FailingPort, KillingPort
from images import Rebooted
from parts import leave_part
from schedules import some

import kvspool
from kvspool import system
from kvspool.engine import producer_table
from kvspool.engine.producer_table import BLOCK, EXPIRY, HOUR, PIECES, ProducerTable
from kvspool.errors import (
    BatchChanged,
    BatchOutOfOrder,
    Corruption,
    SpoolFull,
    TooLarge,
    TooManyPieces,
    TooManyProducers,
    UnknownVersion,
)
from kvspool.producers import Stored

Make = Callable[..., Any]


@pytest.fixture(params=["spool", "kvj"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make a log of one format or the other: `make(name)`."""

    def made(name: str = "log", **options: Any) -> Any:
        if request.param == "kvj":
            return kvspool.create(tmp_path / name, format="kvj", **options)
        return kvspool.create(tmp_path / name, **{"capacity": "256KiB", **options})

    return made


def values(log: Any) -> list[Any]:
    return [one.data for one in log.read(on_gap="skip")]


def batch(number: int, count: int = 10) -> list[str]:
    return [f"{number}.{at}" for at in range(count)]


# Promises.


def test_a_batch_is_stored_once_however_often_it_comes(make: Make) -> None:
    with make() as log:
        producer = log.producer("a")
        assert producer.last is None
        assert producer.append_many(batch(3), batch=3) == Stored(0, 10, False)
        log.append("between")
        assert producer.append_many(batch(3), batch=3) == Stored(0, 10, True)
        assert kvspool.open(log.path).producer("a").append_many(batch(3), batch=3).repeated
        assert producer.append_many(["anything"], batch=2) == Stored(None, 0, True)
        assert producer.append_many(batch(9), batch=9) == Stored(11, 10, False)
        assert producer.append_many([], batch=10) == Stored(None, 0, False)
        assert (producer.last, log.producer("b").last) == (10, None)
        assert values(log) == [*batch(3), "between", *batch(9)]


def test_keys_types_times_and_codecs_are_stored_as_always(make: Make) -> None:
    with make() as log:
        log.producer("a").append_many([b"raw", "text", {"n": 1}], keys=[b"k", None, b""], type=7, timestamp=5, batch=0)
        found = [(one.key, one.data, one.type, one.timestamp) for one in log.read()]
        assert found == [(b"k", b"raw", 7, 5), (None, "text", 7, 5), (b"", {"n": 1}, 7, 5)]


def test_rows_of_a_table_are_a_batch_too(make: Make) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"key": [b"a", None, b"c", b"d"], "value": ["1", "2", "3", "3"], "type": pa.array([1, 2, 3, 4], pa.int32())})
    parts = pa.Table.from_batches([*table.slice(0, 1).to_batches(), *table.slice(1).to_batches()])
    with make() as log:
        producer = log.producer("a")
        assert producer.append_arrow(parts, batch=1) == Stored(0, 4, False)
        assert producer.append_arrow(table, batch=1) == Stored(0, 4, True)
        leave_part(log, "a", [b"3", b"1", b"3"], 2, 1, keys=[b"d", b"e", b"d"])
        log.append(b"between")
        whole = pa.table({"key": [b"e", b"d", b"d"], "value": ["1", "3", "3"]})
        assert producer.append_arrow(whole, batch=2) == Stored(4, 3, False)
        assert [(one.key, one.value) for one in log.read(4)] == [(b"d", b"3"), (None, b"between"), (b"e", b"1"), (b"d", b"3")]
        assert [one.type for one in log.read(limit=4)] == [1, 2, 3, 4]


def test_what_a_killed_producer_has_left_is_completed_whatever_the_order(make: Make) -> None:
    with make() as log:
        leave_part(log, "a", batch(1), 1, 4)
        assert log.append("others") == 4, "the next writer makes sure that the appended part stays known"
        producer = log.producer("a")
        assert producer.last is None
        assert [(one.batch, one.rows, one.stored, one.last) for one in log.producers()] == [(1, 10, 4, None)]
        assert producer.append_many(batch(1)[::-1], batch=1) == Stored(0, 10, False)
        assert values(log) == [*batch(1)[:4], "others", *batch(1)[:3:-1]]
        assert producer.last == 1


def test_a_batch_that_is_there_but_not_on_disk_is_flushed_when_a_durable_one_is_repeated(make: Make) -> None:
    with make() as log:
        producer = log.producer("a")
        producer.append_many(batch(1), batch=1)
        assert log.stats().synced_sequence == 0
        assert producer.append_many(batch(1), batch=1).repeated
        assert log.stats().synced_sequence == 0
        assert producer.append_many(batch(1), batch=1, durable=True).repeated
        assert log.stats().synced_sequence == 10


def test_it_names_the_batch_to_continue_with(make: Make) -> None:
    with make() as log:
        producer = log.producer("a")
        assert producer.next == 0
        producer.append_many(batch(3), batch=3)
        assert producer.next == 4
        leave_part(log, "a", batch(7), 7, 4)
        assert producer.next == 7, "it is there in part"
        producer.append_many(batch(7), batch=7)
        assert producer.next == 8


def test_more_records_than_before_are_another_batch(make: Make) -> None:
    with make() as log:
        leave_part(log, "a", batch(1), 1, 4)
        producer = log.producer("a")
        with pytest.raises(BatchChanged, match="batch 1 of producer 'a' had 10 records, of which 4 are stored, and now it has 11"):
            producer.append_many([*batch(1), b"more"], batch=1)
        assert values(log) == batch(1)[:4]
        assert producer.append_many([*batch(1), b"more"], batch=1, changed="append") == Stored(0, 11, False)


def test_equal_records_of_a_batch_are_counted(make: Make) -> None:
    with make() as log:
        leave_part(log, "a", ["x", "x", "y", "x"], 1, 2)
        log.producer("a").append_many(["x", "y", "x", "x"], batch=1)
        assert Counter(values(log)) == {"x": 3, "y": 1}


def test_one_that_was_killed_before_or_after_all_of_it_has_left_nothing_to_do_or_all(make: Make) -> None:
    with make() as log:
        leave_part(log, "a", batch(1), 1, 0)
        assert log.producer("a").append_many(batch(1), batch=1) == Stored(0, 10, False)
        leave_part(log, "a", batch(2), 2, 10)
        assert log.producer("a").append_many(batch(2), batch=2) == Stored(10, 10, True)
        assert values(log) == batch(1) + batch(2)


def test_a_batch_that_is_killed_again_and_again_is_there_once_while_its_pieces_can_be_remembered(make: Make) -> None:
    with make() as log:
        whole = batch(1, 2 * PIECES)
        for at in range(PIECES - 1):
            leave_part(log, "a", whole, 1, 2)
            log.append(f"between {at}")
        assert log.producer("a").append_many(whole, batch=1).records == 2 * PIECES
        assert sorted(one for one in values(log) if "." in one) == sorted(whole)

        for _ in range(PIECES):
            leave_part(log, "a", batch(2, 20), 2, 1)
            log.append("between")
        with pytest.raises(TooManyPieces, match=f"is in {PIECES + 1} pieces"):
            log.producer("a").append_many(batch(2, 20), batch=2)
        assert log.append("goes on") >= 0


def test_pieces_without_anything_between_are_one(make: Make) -> None:
    with make() as log:
        whole = batch(1, 3 * PIECES)
        for _ in range(2 * PIECES):
            leave_part(log, "a", whole, 1, 1)
        assert log.producer("a").append_many(whole, batch=1) == Stored(0, len(whole), False)
        assert values(log) == whole


# Batches whose records have changed.


def test_a_batch_that_has_changed_is_refused_unless_what_is_there_may_stay(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with make() as log:
        leave_part(log, "a", batch(1), 1, 4)
        producer = log.producer("a")
        other = [*batch(1)[1:], "new"]
        with pytest.raises(BatchChanged, match=r"KVSPOOL_BATCH_CHANGED.*4 records of batch 1 of producer 'a' are stored, and 1 of them"):
            producer.append_many(other, batch=1)
        assert values(log) == batch(1)[:4]
        assert producer.append_many(other, batch=1, changed="append").records == 11
        assert sorted(values(log)) == sorted([*batch(1), "new"])
        assert "has changed: 1 of its stored records are no longer in it" in caplog.text
        assert producer.append_many(other, batch=1).repeated


def test_a_whole_batch_that_has_changed_gets_what_it_has_not(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with make() as log:
        producer = log.producer("a")
        producer.append_many(["a1", "a2", "a2"], batch=5)
        log.append("between")
        assert producer.append_many(["a2", "c1", "a1", "a2", "a2"], batch=5, changed="append") == Stored(0, 5, False)
        assert values(log) == ["a1", "a2", "a2", "between", "c1", "a2"]
        assert (producer.last, producer.next) == (5, 6)
        assert producer.append_many(["a1", "a2", "a2", "a2", "c1"], batch=5, changed="append") == Stored(0, 5, True)
        assert caplog.text == ""
        assert producer.append_many(["a1"], batch=5, changed="append") == Stored(0, 5, True)
        assert "batch 5 of producer a has changed: 4 of its stored records are no longer in it" in caplog.text
        assert producer.append_many(["anything"], batch=4, changed="append") == Stored(None, 0, True)
        assert len(values(log)) == 6


def test_killed_while_a_whole_batch_gets_more_it_is_one_that_is_there_in_part(make: Make) -> None:
    with make() as log:
        producer = log.producer("a")
        producer.append_many(["a"], batch=1)
        leave_part(log, "a", ["a", "b", "c"], 1, 1, changed="append")
        assert (producer.last, producer.next) == (None, 1)
        assert producer.append_many(["c", "b", "a"], batch=1) == Stored(0, 3, False)
        assert values(log) == ["a", "b", "c"]


def test_a_whole_batch_whose_records_were_overwritten_is_not_appended_again(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity="4KiB") as log:
        producer = log.producer("a")
        producer.append_many(batch(1), batch=1)
        for number in range(200):
            log.append(f"then {number}")
        assert producer.append_many(batch(1), batch=1, changed="append").repeated
        assert producer.append_many([*batch(1), "new"], batch=1, changed="append") == Stored(0, 11, False)
        assert values(log)[-2:] == ["then 199", "new"]


def test_a_changed_batch_that_is_there_but_not_on_disk_is_flushed_when_a_durable_one_is_repeated(make: Make) -> None:
    with make() as log:
        producer = log.producer("a")
        producer.append_many(batch(1), batch=1)
        assert producer.append_many(batch(1), batch=1, durable=True, changed="append").repeated
        assert log.stats().synced_sequence == 10


def test_a_later_batch_may_begin_where_one_was_left_in_part_and_that_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with make() as log:
        leave_part(log, "a", batch(4), 4, 3)
        with pytest.raises(BatchOutOfOrder, match="has begun batch 4; batch 2 is not known to be stored"):
            log.producer("a").append_many(["x"], batch=2)
        assert log.producer("a").append_many(batch(5), batch=5) == Stored(3, 10, False)
        assert "begins batch 5; of batch 4 3 records were appended, of 10" in caplog.text
        assert log.producer("a").append_many(batch(4), batch=4).repeated, "the caller has gone on"


def test_records_overwritten_since_count_as_the_first_of_the_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        leave_part(log, "a", batch(1), 1, 4)
        log.append_many([b"others"] * 200)
        assert log.producer("a").append_many(batch(1), batch=1) == Stored(0, 10, False)
        assert [one for one in values(log) if one != b"others"] == batch(1)[4:]
        assert "4 records that were appended before were overwritten since; as many are left out now" in caplog.text


def test_records_trimmed_since_count_as_the_first_of_the_batch(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=200) as log:
        leave_part(log, "a", batch(1), 1, 4)
        log.append_many([b"others"] * 20)
        log.trim(before=24, force=True)
        assert log.producer("a").append_many(batch(1), batch=1) == Stored(0, 10, False)
        assert [one for one in values(log) if one != b"others"] == batch(1)[4:]


# Room.


@pytest.mark.parametrize("policy", ["block", "raise"])
def test_a_batch_waits_for_room_as_a_whole_and_says_what_has_none(tmp_path: Path, policy: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy=policy, timeout=0.05) as log, log.reader("slow") as reader:
        producer = log.producer("a")
        producer.append_many([bytes(500)] * 4, batch=1)
        with pytest.raises(SpoolFull, match="has no room"):
            producer.append_many([bytes(500)] * 5, batch=2)
        with pytest.raises(TooLarge, match="it doesn't fit into a ring of 4096"):
            producer.append_many([bytes(500)] * 9, batch=2)
        assert (producer.last, len(values(log))) == (1, 4)
        list(reader.read())
        reader.commit()
        assert producer.append_many([bytes(500)] * 5, batch=2).records == 5


def test_a_batch_larger_than_the_ring_overwrites_as_any_other(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        assert log.producer("a").append_many([b"%d" % at for at in range(1000)], batch=1) == Stored(0, 1000, False)
        assert log.producer("a").append_many([b"%d" % at for at in range(1000)], batch=1).repeated


def test_values_that_can_not_be_stored_change_nothing(make: Make) -> None:
    with make() as log:
        producer = log.producer("a")
        for wrong in ([object()], ["x", b"v" * 100_000] if isinstance(log, kvspool.Spool) else [object()]):
            with pytest.raises((TypeError, TooLarge)):
                producer.append_many(wrong, batch=1)
        for number in (-1, 1 << 63):
            with pytest.raises(ValueError, match="the number of a batch is 0"):
                producer.append_many(["x"], batch=number)
        with pytest.raises(ValueError, match='changed is "raise" or "append"'):
            producer.append_many(["x"], batch=1, changed="skip")
        for name in ("", "x" * 1025):
            with pytest.raises(ValueError, match="the name of a producer has 1 to 1024 bytes"):
                log.producer(name)
        assert values(log) == [] and log.producers() == []


def test_other_formats_have_no_producers(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        with pytest.raises(ValueError, match="a log of the kind sej has no producers: only spools and kvj journals have"):
            log.producer("a")
        assert log.producers() == []


# Others at the same time.


def test_two_processes_with_one_producer_store_each_batch_once_and_others_append_between(make: Make) -> None:
    with make(**{}) as log:
        path, count = log.path, 30

        def work(seed: int) -> None:
            with kvspool.open(path) as ours:
                choose = random.Random(seed)
                for number in range(count):
                    rows = batch(number)
                    choose.shuffle(rows)
                    ours.producer("a").append_many(rows, batch=number)
                    ours.append("others")

        children = [fork(lambda seed=seed: work(seed)) for seed in range(3)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        found = Counter(values(log))
        assert found.pop("others") == 3 * count
        assert found == Counter(one for number in range(count) for one in batch(number))


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def test_threads_share_a_producer(make: Make) -> None:
    with make() as log:
        producer, stored = log.producer("a"), []
        threads = [threading.Thread(target=lambda: stored.append(producer.append_many(batch(1), batch=1))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(one.repeated for one in stored) == [False, True, True, True]
        assert values(log) == batch(1)


CALLS = ("open", "read", "write", "rename", "flush", "flush_data", "allocate", "close", "status")


@pytest.mark.parametrize("durable", [False, True])
def test_killed_at_any_call_to_the_system_it_is_completed_when_it_is_repeated(make: Make, durable: bool) -> None:
    """Rounds of one log: the process is killed at the first call, at the second one ...; the next one completes its batch."""
    with make() as log:
        path = log.path
        expected: list[str] = []
        for number in some(range(1, 200), 2, int(durable)):
            rows = batch(number)

            def work(number: int = number, rows: list[str] = rows) -> None:
                with system.replaced(KillingPort(number, CALLS)), kvspool.open(path) as ours:
                    ours.producer("a").append_many(rows, batch=number, durable=durable)

            status = os.waitpid(fork(work), 0)[1]
            assert status in (0, signal.SIGKILL)
            log.append("between")
            assert log.producer("a").append_many(rows[::-1], batch=number).records == 10
            expected += rows
            if status == 0:
                break
        else:
            raise AssertionError("it was killed each time")
        assert number > 15
        assert Counter(one for one in values(log) if one != "between") == Counter(expected)


def test_a_call_to_the_system_that_fails_is_reported_and_the_batch_can_be_repeated(make: Make) -> None:
    with make() as log:
        producer = log.producer("a")
        producer.append_many(batch(0), batch=0)
        number = 1
        while True:
            port = FailingPort(number, errno.EIO, only=("open", "read", "write", "status"))
            with system.replaced(port):
                try:
                    producer.append_many(batch(number), batch=number)
                except OSError:
                    assert port.failed
            assert producer.append_many(batch(number), batch=number).records == 10
            if not port.failed:
                break
            number += 1
        assert number > 4
        assert Counter(values(log)) == Counter(one for round in range(number + 1) for one in batch(round))


# A crash of the machine.


def test_what_a_crash_of_the_machine_took_is_not_taken_to_be_there(tmp_path: Path) -> None:
    """The log is an image of its files from before the last batches, the list of producers is of the very end."""
    for format in ("spool", "kvj"):
        options: dict[str, Any] = {"capacity": "64KiB"} if format == "spool" else {"format": "kvj"}
        path = tmp_path / format
        with kvspool.create(path, **options) as log:
            log.producer("kept").append_many(batch(1), batch=1)
            log.producer("lost").append_many(batch(5), batch=5)
            log.sync()
            images = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
            log.producer("lost").append_many(batch(6), batch=6)
            leave_part(log, "part", batch(7), 7, 5)
        for file, image in images.items():
            if file.name != producer_table.NAME:
                file.write_bytes(image)
        with system.replaced(Rebooted()), kvspool.open(path) as log:
            log.append("after the crash")
            assert {one.name: (one.batch, one.stored, one.last) for one in log.producers()} == {
                "kept": (1, 10, 1),
                "lost": (6, 0, None),
                "part": (7, 0, None),
            }
            assert log.producer("kept").append_many(batch(1), batch=1).repeated
            assert not log.producer("lost").append_many(batch(6), batch=6).repeated
            assert not log.producer("part").append_many(batch(7), batch=7).repeated
            assert values(log) == [*batch(1), *batch(5), "after the crash", *batch(6), *batch(7)]


def test_a_durable_batch_is_accounted_for_on_disk_before_it_is_published(make: Make) -> None:
    with make() as log:
        log.producer("a").append_many(batch(1), batch=1)
        steps: list[str] = []

        class Port(system.Port):
            def write(self, fd: int, data: bytes | bytearray, at: int) -> None:
                if os.readlink(f"/proc/self/fd/{fd}").endswith(producer_table.NAME):
                    steps.append("account")
                super().write(fd, data, at)

            def flush_data(self, fd: int) -> None:
                name = os.readlink(f"/proc/self/fd/{fd}")
                steps.append("account on disk" if name.endswith(producer_table.NAME) else "records on disk")
                super().flush_data(fd)

            def flush(self, fd: int) -> None:
                steps.append("records on disk")
                super().flush(fd)

        with system.replaced(Port()):
            log.producer("a").append_many(batch(2), batch=2, durable=True)
        assert steps[:3] == ["account", "account on disk", "account"] and "records on disk" in steps[3:]


# The file.


def test_the_bytes_of_the_list_are_golden(tmp_path: Path) -> None:
    class Port(ClockPort):
        def boot_id(self) -> bytes:
            return bytes(range(16))

        def random(self, size: int) -> bytes:
            return bytes(range(size))

    with system.replaced(Port(1_700_000_000_000_000_000)), kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.producer("orders/3").append_many([b"v"] * 3, batch=7)
    data = (tmp_path / "log" / producer_table.NAME).read_bytes()
    assert len(data) == BLOCK * 129 and not any(data[3 * BLOCK :])
    page = (Path(__file__).parent.parent / "docs" / "formats" / "producers.md").read_text(encoding="utf-8")
    lines = page.split("```")[1].strip().splitlines()
    for line in lines:
        at, _, content = line.partition(": ")
        assert data[int(at) :].startswith(bytes.fromhex(content)), line
    shown = {int(line.partition(": ")[0]): len(bytes.fromhex(line.partition(": ")[2])) for line in lines}
    rest = bytearray(data)
    for place, size in shown.items():
        rest[place : place + size] = bytes(size)
    assert not any(rest)


def test_the_page_of_the_format_has_its_tables() -> None:
    page = (Path(__file__).parent.parent / "docs" / "formats" / "producers.md").read_text(encoding="utf-8")
    assert producer_table.HEADER.table() in page
    assert producer_table.STATE.table() in page


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", Corruption),
        (bytes(BLOCK), Corruption),
        (b"KVSPROD1" + bytes(BLOCK), UnknownVersion),
        (b"KVSPROD1" + (1).to_bytes(4, "little") + bytes(BLOCK), Corruption),
        (b"KVSPROD1" + (2).to_bytes(4, "little") + bytes(BLOCK), UnknownVersion),
    ],
)
def test_a_file_that_is_no_list_is_refused_and_never_touched(make: Make, content: bytes, error: type[Exception]) -> None:
    with make() as log:
        (log.path / producer_table.NAME).write_bytes(content)
        with pytest.raises(error):
            log.producer("a").append_many(["x"], batch=1)
        assert log.append("others go on") == 0
        assert (log.path / producer_table.NAME).read_bytes() == content


def test_a_list_of_another_log_is_refused(make: Make) -> None:
    with make() as log, make("other") as other:
        log.producer("a").append_many(["x"], batch=1)
        (other.path / producer_table.NAME).write_bytes((log.path / producer_table.NAME).read_bytes())
        with pytest.raises(Corruption, match="is damaged, or of another log"):
            other.producer("a").append_many(["x"], batch=1)


def test_a_link_or_a_fifo_in_its_place_is_refused(make: Make, tmp_path: Path) -> None:
    with make() as log:
        os.mkfifo(log.path / producer_table.NAME)
        with pytest.raises((Corruption, OSError)):
            log.producer("a").append_many(["x"], batch=1)
        (log.path / producer_table.NAME).unlink()
        (log.path / producer_table.NAME).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="[Ss]ymbolic"):
            log.producer("a").append_many(["x"], batch=1)
        assert not (tmp_path / "elsewhere").exists()


def test_whatever_bit_is_flipped_no_record_is_lost_or_doubled_that_was_not_named(make: Make) -> None:
    """A damaged account is no account, or the one from before: its batch may be stored again. No other account suffers, nothing crashes."""
    with make() as log:
        for name in ("a", "b"):
            log.producer(name).append_many(batch(1), batch=1)
        whole = (log.path / producer_table.NAME).read_bytes()
        choose = random.Random(1)
        for _ in range(300):
            data = bytearray(whole)
            at = choose.randrange(BLOCK, 2 * BLOCK)  # the account of "a"
            data[at] ^= 1 << choose.randrange(8)
            (log.path / producer_table.NAME).write_bytes(data)
            assert log.producer("b").last == 1
            assert log.producer("a").last in (None, 1)
            with ProducerTable.open(log.path, log.log_id, to_read=True) as opened:
                assert opened.damaged() <= 1
        for size in range(0, len(whole), 97):
            (log.path / producer_table.NAME).write_bytes(whole[:size])
            try:
                assert log.producer("b").last in (None, 1)
            except Corruption:
                assert size < producer_table.HEADER.size
        assert log.append("others go on") == 20


def test_a_check_of_the_log_tells_what_is_wrong_with_the_list(make: Make) -> None:
    with make() as log:
        log.producer("a").append_many(batch(1), batch=1)
        assert log.verify().is_sound
        data = bytearray((log.path / producer_table.NAME).read_bytes())
        data[BLOCK + 100] ^= 1
        data[BLOCK + 400] ^= 1
        (log.path / producer_table.NAME).write_bytes(data)
        (problem,) = log.verify().problems
        assert "1 of the producers' states are damaged" in problem
        (log.path / producer_table.NAME).write_bytes(b"damaged")
        (problem,) = log.verify().problems
        assert "the list of producers can't be read" in problem


def test_a_word_that_names_no_account_is_taken_back(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with make() as log:
        log.append("first")
        producer = log.producer("a")
        for number in (1, 5000, 0xFFFFFFF0):
            producer._log.change_producers(lambda place, _, number=number: place.set_pending(number) or 0)
            assert log.append(f"after {number}") >= 0
        assert "no longer has a list of producers" in caplog.text
        producer.append_many(["x"], batch=1)
        for number in (1, 2, 5000):
            producer._log.change_producers(lambda place, _, number=number: place.set_pending(number) or 0)
            log.append(f"then {number}")
        assert producer.append_many(["x"], batch=1).repeated
        (log.path / producer_table.NAME).write_bytes(b"damaged")
        producer._log.change_producers(lambda place, _: place.set_pending(1) or 0)
        log.append("the last")
        assert len(values(log)) == 9


def test_a_full_list_forgets_only_producers_that_were_silent_for_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1024
    monkeypatch.setattr(producer_table, "MOST", most)
    now = 1_700_000_000_000_000_000
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        with system.replaced(ClockPort(now)):
            log.producer("first").append_many(["x"], batch=1)
        state = next(ProducerTable.open(log.path, log.log_id).states())[1]  # type: ignore[union-attr]

        def fill(place: Any, _: int) -> int:
            with ProducerTable.make(place.directory, place.log_id, place.mode) as opened, system.replaced(ClockPort(now + EXPIRY)):
                for number in range(1, most):
                    assert opened.claim() == number if number % 512 == 0 else True
                    if number >= len(opened):
                        opened.claim()
                    opened.store(number, state._replace(id=number.to_bytes(16, "big"), name=b"", name_bytes=0))
            return 0

        log.change_producers(fill)
        with system.replaced(ClockPort(now + EXPIRY)), pytest.raises(TooManyProducers, match="has 1024 producers"):
            log.producer("one more").append_many(["x"], batch=1)
        with system.replaced(ClockPort(now + EXPIRY + 1)):
            assert log.producer("one more").append_many(["x"], batch=1).records == 1
        assert log.producer("first").last is None
        assert log.forget_producers(["one more", "nobody"]) == 1
        assert log.producer("another").append_many(["x"], batch=1).records == 1


def test_a_log_has_room_for_tens_of_thousands_of_producers(make: Make) -> None:
    with make() as log:
        assert log.producer("first").append_many(["x"], batch=1).records == 1
        log.producer("second").append_many(["x"], batch=1)

        def fill(place: Any, _: int) -> int:
            with ProducerTable.make(place.directory, place.log_id, place.mode) as opened:
                numbers, state = [], next(opened.states())[1]
                while len(opened) < 5120:
                    numbers.append(opened.claim())
                    opened.store(numbers[-1], state._replace(id=len(numbers).to_bytes(16, "big"), name=b"", name_bytes=0))
            assert numbers == [*range(2, 2 + len(numbers))]
            return len(numbers)

        assert log.change_producers(fill) > 4096
        assert log.producer("last").append_many(["x"], batch=1).records == 1
        for name in ("first", "last"):
            assert log.producer(name).append_many(["x"], batch=1).repeated


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list has room for eight."""
    monkeypatch.setattr(producer_table, "MOST", 8)
    monkeypatch.setattr(producer_table, "STEP", 4)


def test_producers_that_append_nothing_more_make_room_the_oldest_first(make: Make, few: None) -> None:
    with make() as log:
        for number in range(8):
            log.producer(f"job:{number}/0").append_many(["x"], batch=0)
        with pytest.raises(TooManyProducers, match="has 8 producers"):
            log.producer("new").append_many(["x"], batch=0)
        assert [log.retire_producers(f"job:{number}/") for number in (5, 2, 9)] == [1, 1, 0]
        log.producer("new").append_many(["x"], batch=0)
        assert log.producer("job:2/0").append_many(["x"], batch=0).repeated, "it is known while there is room"
        log.producer("newer").append_many(["x"], batch=0)
        assert {one.name for one in log.producers()} == {"new", "newer", *(f"job:{number}/0" for number in (0, 1, 3, 4, 6, 7))}
        with pytest.raises(TooManyProducers):
            log.producer("one more").append_many(["x"], batch=0)


def test_a_list_grows_before_it_forgets_who_was_retired_within_an_hour(make: Make, few: None) -> None:
    now = 1_700_000_000_000_000_000
    with make() as log:
        with system.replaced(ClockPort(now)):
            for name in "abcd":
                log.producer(name).append_many(["x"], batch=0)
            assert log.retire_producers("a") == 1
        with system.replaced(ClockPort(now + HOUR)):
            log.producer("e").append_many(["x"], batch=0)
        assert [one.name for one in log.producers()] == ["a", "b", "c", "d", "e"]
        for name in "fgh":
            log.producer(name).append_many(["x"], batch=0)
        log.forget_producers(["h"])
        with system.replaced(ClockPort(now + HOUR + 1)):
            for name in "ij":
                log.producer(name).append_many(["x"], batch=0)
        assert [one.name for one in log.producers()] == ["b", "c", "d", "e", "f", "g", "i", "j"], "a free one is taken first"


def test_a_producer_says_for_how_long_it_is_kept_and_a_batch_that_is_not_whole_is_kept_longer(make: Make, few: None) -> None:
    now = 1_700_000_000_000_000_000
    with make() as log:
        with system.replaced(ClockPort(now)):
            leave_part(log, "killed", ["x", "y"], 0, 1)
            for number in range(7):
                producer = log.producer(f"{number}")
                producer.keep = 24 if number == 3 else 0
                producer.append_many(["x"], batch=0)
        with system.replaced(ClockPort(now + 24 * HOUR)), pytest.raises(TooManyProducers):
            log.producer("new").append_many(["x"], batch=0)
        with system.replaced(ClockPort(now + 24 * HOUR + 1)):
            log.producer("new").append_many(["x"], batch=0)
        assert [one.name for one in log.producers()] == ["0", "1", "2", "4", "5", "6", "killed", "new"]
        with system.replaced(ClockPort(now + 2 * EXPIRY)):
            for number in range(7):
                log.producer(f"newer {number}").append_many(["x"], batch=0)
            with pytest.raises(TooManyProducers):
                log.producer("one too many").append_many(["x"], batch=0)
        assert log.producer("killed").append_many(["x", "y"], batch=0) == Stored(0, 2, False)


def test_an_account_is_never_taken_by_a_newest_place_that_is_damaged(make: Make, few: None) -> None:
    with make() as log:
        for number in range(8):
            log.producer(f"{number}").append_many(["x"], batch=0)
        path = log.path / producer_table.NAME
        with path.open("r+b") as file:
            file.seek(BLOCK + producer_table.PLACE + producer_table.STATE.offset("phase"))
            file.write(b"\0")  # it looks free, and its older place is sound
            file.seek(4 * BLOCK)
            file.write(b"\1" * BLOCK)  # nothing of it is sound
        log.producer("new").append_many(["x"], batch=0)
        assert [one.name for one in log.producers()] == ["0", "1", "2", "4", "5", "6", "7", "new"]


def test_only_names_that_begin_so_are_retired(make: Make) -> None:
    with make() as log:
        for name in ("job:1/0", "job:10/0", "a job:1/0", "job:1/1", "other"):
            log.producer(name).append_many(["x"], batch=0)
        log.forget_producers(["job:1/1"])
        assert log.retire_producers("job:1/") == 1
        assert log.retire_producers("job:") == 2
        assert log.producer("job:1/0").append_many(["y"], batch=1).records == 1, "it is no more than a leave to forget it"


def test_a_log_that_is_resized_takes_its_producers_along(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=8192) as log:
        log.producer("a").append_many(batch(1), batch=1)
        leave_part(log, "b", batch(2), 2, 3)
        kvspool.resize(tmp_path / "log", 65536)
        assert log.producer("a").append_many(batch(1), batch=1).repeated
        assert log.producer("b").append_many(batch(2), batch=2).records == 10
        assert values(log) == batch(1) + batch(2)
        assert oct((tmp_path / "log" / producer_table.NAME).stat().st_mode & 0o777) == "0o600"


def test_a_journal_whose_lock_file_was_removed_still_knows_what_was_left(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        leave_part(log, "a", batch(1), 1, 4)
    (tmp_path / "log" / "lock").unlink()
    with kvspool.open(tmp_path / "log") as log:
        assert log.producer("a").append_many(batch(1), batch=1) == Stored(0, 10, False)
        assert values(log) == batch(1)


@pytest.mark.parametrize("seed", range(6))
def test_any_history_leaves_each_record_once(make: Make, seed: int) -> None:
    """Producers that are killed at any place, repeat themselves in any order and from other handles, and others between them."""
    choose = random.Random(seed)
    with make() as log:
        numbers, others = Counter[str](), 0
        for _ in range(120):
            name = choose.choice(["a", "b", "c"])
            rows = [f"{name}{one}" for one in batch(numbers[name], 12)]
            choose.shuffle(rows)
            step = choose.randrange(4)
            handle = log if choose.random() < 0.5 else kvspool.open(log.path)
            try:
                known = handle.producer(name)._look(None)
                if step == 0 and (known is None or known.batch < numbers[name]):
                    leave_part(handle, name, rows, numbers[name], choose.randrange(13))
                elif step == 1:
                    handle.append("other")
                    others += 1
                else:
                    handle.producer(name).append_many(rows, batch=numbers[name])
                    numbers[name] += choose.random() < 0.7
            finally:
                if handle is not log:
                    handle.close()
        for name in "abc":
            rows = [f"{name}{one}" for one in batch(numbers[name], 12)]
            log.producer(name).append_many(rows, batch=numbers[name])
        found = Counter(values(log))
        assert found.pop("other") == others
        assert found == Counter(f"{name}{one}" for name in "abc" for number in range(numbers[name] + 1) for one in batch(number, 12))
        assert log.verify().is_sound


class OnDisk(system.Port):
    """Keeps what the list of producers was when it was flushed last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = path.read_bytes()

    def flush_data(self, fd: int) -> None:
        super().flush_data(fd)
        if os.fstat(fd).st_ino == self.path.stat().st_ino:
            self.content = self.path.read_bytes()


def after_power_cut(path: Path, content: bytes) -> kvspool.Spool:
    """Open a log whose records have all reached the disk, with this list of producers."""
    (path / producer_table.NAME).write_bytes(content)
    with system.replaced(Rebooted()):
        return kvspool.open(path)


def test_after_a_power_cut_a_plain_batch_that_is_gone_is_not_mistaken_for_whole_because_of_a_durable_one_after_it(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log") as log:
        log.producer("a").append_many([b"0"], batch=0, durable=True)
        records = {name: (tmp_path / "log" / name).read_bytes() for name in ("spool.dat", "spool.ctl")}
        log.producer("a").append_many([b"1"], batch=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kvspool.Spool, "append_in_transaction", append_and_die)
            with pytest.raises(KeyboardInterrupt):
                log.producer("a").append_many([b"2"], batch=2, durable=True)
        content = (tmp_path / "log" / producer_table.NAME).read_bytes()
    for name, raw in records.items():
        (tmp_path / "log" / name).write_bytes(raw)
    with after_power_cut(tmp_path / "log", content) as log:
        assert [record.value for record in log.read(on_gap="skip")] == [b"0"]
        assert log.producer("a").last is None
        assert log.producer("a").next == 2
        assert not log.producer("a").append_many([b"2"], batch=2, durable=True).repeated
        assert log.producer("a").last == 2


def append_and_die(log: Any, batch: Any, transaction: Any, timeout: float | None, durable: bool) -> None:
    """As a process that is killed when the list of producers is on disk, and no record is."""

    def change(place: Any, next_sequence: int) -> int:
        with transaction.kept(next_sequence, place):
            raise KeyboardInterrupt

    log.change_producers(change)


def test_after_a_power_cut_records_that_others_appended_after_a_killed_batch_are_not_mistaken_for_it(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log") as log:
        log.producer("a").append_many([b"0"], batch=0)
        leave_part(log, "a", [b"%d" % number for number in range(10)], 1, 4)
        port = OnDisk(tmp_path / "log" / producer_table.NAME)  # a page may reach the disk at any time, and this one has
        with system.replaced(port):
            log.append_many([b"other"] * 10)
            log.sync()
    with after_power_cut(tmp_path / "log", port.content) as log:
        stored = log.producer("a").append_many([b"%d" % number for number in range(10)], batch=1)
        assert not stored.repeated
        found = Counter(record.value for record in log.read(on_gap="skip"))
        assert all(found[b"%d" % number] == 1 + (number == 0) for number in range(10)), found
