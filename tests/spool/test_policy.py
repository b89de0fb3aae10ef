"""A writer's policies for a full ring: overwrite, block, raise; and the readers that it waits for, and for how long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvspool
from kvspool import Gap, Spool, system
from kvspool.engine import times
from kvspool.errors import SpoolFull, TooLarge
from kvspool.kernel import frames_py as frames
from kvspool.spool import format

RING = 4096
VALUE = bytes(88)  # 120 bytes with its header, of which 34 fit
NOW = 10**18

DRAINER = """
import sys, kvspool
path, name, writers, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with kvspool.open(path) as log, log.reader(name) as reader:
    print("open", flush=True)
    sequence, seen = 0, [0] * writers
    for record in reader.follow(timeout=60, limit=writers * count):
        writer, number = map(int, record.value.split(b" ", 2)[:2])
        assert record.sequence == sequence and number == seen[writer], (record, sequence, seen)
        sequence, seen[writer] = sequence + 1, number + 1
        if sequence % 7 == 0 or sequence == writers * count:
            reader.commit()
    assert seen == [count] * writers and reader.lag().records == 0
    print("done", flush=True)
"""
WRITER = """
import sys, kvspool
with kvspool.open(sys.argv[1], timeout=60) as log:
    number = 0
    count = int(sys.argv[3])
    while number < count:
        batch = [b"%s %d " % (sys.argv[2].encode(), at) + bytes(at % 50) for at in range(number, min(number + number % 5, count))]
        if len(batch) > 1:
            log.append_many(batch)
            number += len(batch)
        else:
            log.append(b"%s %d " % (sys.argv[2].encode(), number))
            number += 1
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Spool]]:
    made: list[Spool] = []

    def make(policy: str = "raise", **options: Any) -> Spool:
        made.append(kvspool.create(tmp_path / f"log{len(made)}", capacity=RING, policy=policy, **options))
        return made[-1]

    yield make
    for log in made:
        log.close()


def fill(log: Spool, **options: Any) -> int:
    """Append until there is no room, and return how many went in."""
    for count in range(1000):
        try:
            log.append(VALUE, **options)
        except SpoolFull:
            return count
    raise AssertionError("never full")


def fates(log: Spool) -> list[Any]:
    with log.reader("r") as reader:
        return [(item.first, item.last, item.reason) if isinstance(item, Gap) else item.sequence for item in reader.read(on_gap="yield")]


class ClockPort(system.Port):
    """A stopped clock. Adding to `time` lets time pass; adding to `set_ahead` sets the time of the day."""

    time = NOW
    set_ahead = 0

    def now(self) -> int:
        return self.time + self.set_ahead

    def monotonic(self) -> float:
        return super().monotonic() + (self.time - NOW) / 1e9


@pytest.fixture
def clock(interpreted: None) -> Iterator[ClockPort]:
    """Yield a clock that does not move; the loops are interpreted, since the compiled ones take the time directly from the system."""
    with system.replaced(ClockPort()) as port:
        yield port  # type: ignore[misc]


@pytest.mark.parametrize("policy", format.POLICIES)
def test_the_policy_is_the_log_s_own(make: Callable[..., Spool], policy: str) -> None:
    expiry = None if policy == "overwrite" else 1.5
    log = make(policy, reader_expiry=expiry)
    with kvspool.open(log.path) as again:
        assert (again.stats().policy, again.stats().reader_expiry) == (policy, expiry or 0)


@pytest.mark.parametrize(
    "options",
    [{"policy": "drop"}, {"reader_expiry": 1}, *({"policy": "block", "reader_expiry": bad} for bad in (0, -1, 1e10, float("nan")))],
)
def test_what_is_no_policy_makes_no_log(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        kvspool.create(tmp_path / "log", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", format.POLICIES)
def test_without_a_durable_reader_every_policy_overwrites(make: Callable[..., Spool], policy: str) -> None:
    log = make(policy)
    log.append_many([VALUE] * 100)
    for _ in range(100):
        log.append(VALUE)
    assert log.stats().next_sequence == 200


def test_overwrite_waits_for_no_reader(make: Callable[..., Spool]) -> None:
    log = make("overwrite")
    log.reader("r").close()
    log.append_many([VALUE] * 100)
    first = log.stats().first_sequence
    assert fates(log) == [(0, first - 1, "overrun"), *range(first, 100)]


@pytest.mark.parametrize("policy", ["block", "raise"])
def test_full_and_nothing_partly_written(make: Callable[..., Spool], policy: str) -> None:
    log = make(policy)
    log.reader("billing").close()
    count = fill(log, timeout=0)
    assert count == RING // 120
    for values in ([VALUE], [b""] * 2, [VALUE] * 34):
        with pytest.raises(SpoolFull, match="'billing' has 34 pending records"):
            log.append_many(values, timeout=0)
    assert [record.sequence for record in log.read()] == list(range(count))
    with log.reader("billing") as reader:
        for _ in reader.read(limit=3):
            pass
        with pytest.raises(SpoolFull, match=f"open in process {os.getpid()}"):
            log.append(VALUE, timeout=0)  # read, but not committed
        reader.commit()
        assert log.append_many([VALUE] * 3) == range(34, 37)
        with pytest.raises(SpoolFull):
            log.append(VALUE, timeout=0)
        assert [record.sequence for record in reader.read()] == list(range(3, 37))


def test_a_batch_that_never_fits_is_too_large(make: Callable[..., Spool]) -> None:
    log = make("block")
    with log.reader("r"):
        with pytest.raises(TooLarge):
            log.append_many([VALUE] * 35)
        with pytest.raises(TooLarge):
            log.append(bytes(RING // 4))
        fill(log, timeout=0)
        with pytest.raises(TooLarge):
            log.append(bytes(RING // 4))
    assert log.stats().next_sequence == 34


def test_arrow_batches_wait_as_well(make: Callable[..., Spool]) -> None:
    pa = pytest.importorskip("pyarrow")
    log = make("raise")
    log.reader("r").close()
    batch = pa.record_batch({"key": pa.array([b"k", None] * 10, pa.binary()), "value": pa.array([VALUE] * 20, pa.binary())})
    assert log.append_arrow(batch) == range(20)
    with pytest.raises(SpoolFull):
        log.append_arrow(batch)
    with pytest.raises(TooLarge):
        log.append_arrow(pa.Table.from_batches([batch, batch]))
    assert log.stats().next_sequence == 20


def test_a_reader_that_comes_later_or_goes_back_is_waited_for(make: Callable[..., Spool]) -> None:
    log = make("raise")
    log.append_many([VALUE] * 50)  # no reader to wait for: this handle has looked
    with log.reader("late", start=40) as late:
        kept = [record.sequence for record in late.read()]
        assert kept == list(range(40, 50))
        assert fill(log) > 0
        late.seek(40)
        assert next(late.read()).sequence == 40
        late.seek(60)
        late.commit()
        assert fill(log) > 0  # the floor is known now
        late.seek(70)
        late.commit()
        late.seek(65)
        late.commit()  # goes back
        fill(log)
        assert next(late.read()).sequence == 65
        log.reader("earliest").close()
        first = log.stats().first_sequence
        late.seek(log.stats().next_sequence)
        late.commit()
        fill(log)
        assert log.stats().first_sequence == first
    log.delete_reader("earliest")
    assert fill(log) > 0


def test_a_damaged_slot_holds_the_log_until_it_is_deleted(make: Callable[..., Spool]) -> None:
    log = make("raise")
    log.reader("r").close()
    with open(log.path / format.CONTROL_FILE, "r+b") as file:
        file.seek(format.SLOTS_AT + 160)
        file.write(b"\xff")
    fill(log)
    with pytest.raises(SpoolFull, match="damaged"):
        log.append(VALUE)
    log.delete_reader("r")
    log.append(VALUE)


def test_a_blocked_writer_continues_when_the_reader_commits(make: Callable[..., Spool]) -> None:
    log = make("block")
    with log.reader("r") as reader:
        fill(log, timeout=0)
        waits = threading.Event()

        class WaitingPort(system.Port):
            def sleep(self, seconds: float) -> None:
                waits.set()
                super().sleep(seconds)

        with system.replaced(WaitingPort()):
            writer = threading.Thread(target=lambda: log.append_many([VALUE] * 5, timeout=60))
            writer.start()
            assert waits.wait(30)
            for _ in reader.read(limit=5):
                pass
            reader.commit()
            writer.join(30)
        assert not writer.is_alive()
        assert [record.sequence for record in reader.read()] == list(range(5, 39))


def test_block_gives_up_after_its_timeout(make: Callable[..., Spool]) -> None:
    log = make("block", timeout=0.01)
    log.reader("r").close()
    fill(log)
    with pytest.raises(SpoolFull, match="within 0.01 s"):
        log.append(VALUE)
    with pytest.raises(SpoolFull, match="within 0.02 s"):
        log.append(VALUE, timeout=0.02)


def test_three_writers_and_two_slow_readers_lose_nothing(make: Callable[..., Spool]) -> None:
    log = make("block")
    environment = {**os.environ, "PYTHONPATH": str(Path(kvspool.__file__).parents[1])}
    count = 400

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(log.path), *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)

    readers = [start(DRAINER, name, 3, count) for name in ("one", "two")]
    for reader in readers:
        assert reader.stdout is not None and reader.stdout.readline() == "open\n"
    writers = [start(WRITER, number, count) for number in range(3)]
    for process in (*writers, *readers):
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output == ("done\n" if process in readers else "")
    assert log.stats().next_sequence == 3 * count
    assert [one.sequence for one in log.readers()] == [3 * count] * 2


def test_a_reader_that_does_not_move_expires(make: Callable[..., Spool], clock: ClockPort) -> None:
    log = make("raise", reader_expiry=10)
    log.reader("r").close()
    clock.time += 8 * 10**9
    assert fill(log) == 34
    clock.time += 10 * 10**9  # the record that it should read is not older than that
    assert fill(log) == 0
    assert [one.expired for one in log.readers()] == [False]
    clock.time += 1
    assert log.append(VALUE) == 34
    assert [one.expired for one in log.readers()] == [True]
    log.append_many([VALUE] * 50)
    first = log.stats().first_sequence
    assert fates(log) == [(0, first - 1, "expired"), *range(first, 85)]
    with log.reader("r") as reader:
        reader.seek(first)
        reader.commit()  # from here on it is waited for again
        fill(log)
        assert log.stats().first_sequence == first
        assert [one.expired for one in log.readers()] == [False]
        with pytest.raises(SpoolFull):
            log.append(VALUE)


def test_a_reader_that_commits_is_alive(make: Callable[..., Spool], clock: ClockPort) -> None:
    log = make("raise", reader_expiry=10)
    with log.reader("r") as reader:
        fill(log)
        clock.time += 11 * 10**9
        reader.commit()
        assert fill(log) == 0
        clock.time += 11 * 10**9
        assert log.append(VALUE) == 34


def test_a_reader_that_has_nothing_to_read_is_not_abandoned(make: Callable[..., Spool], clock: ClockPort) -> None:
    log = make("raise", reader_expiry=10)
    log.reader("r").close()
    clock.time += 11 * 10**9
    with pytest.raises(TooLarge):
        log.append_many([VALUE] * 100)
    assert [one.expired for one in log.readers()] == [False]
    assert fill(log) == 34


@pytest.mark.parametrize("offset", [-1, times.MOST_AHEAD])
def test_times_of_the_caller_s_do_not_keep_a_ghost(make: Callable[..., Spool], clock: ClockPort, offset: int) -> None:
    log = make("raise", reader_expiry=10)
    log.reader("r").close()
    clock.time += 11 * 10**9
    for _ in range(34):
        log.append(VALUE, timestamp=NOW + offset)
    assert log.append(VALUE) == 34


def test_a_clock_that_went_back_evicts_no_reader(make: Callable[..., Spool], clock: ClockPort) -> None:
    log = make("raise", reader_expiry=10)
    log.reader("r").close()
    clock.set_ahead -= 10**12
    assert fill(log) == 34


def test_a_mark_of_eviction_counts_only_for_the_commit_that_it_names(make: Callable[..., Spool]) -> None:
    log = make("raise", reader_expiry=10)
    log.reader("r").close()
    fill(log)

    def work(writer: Any) -> bool:
        writer.begin()
        end = writer.end + 200
        (slot,) = (number for number in range(frames.SLOTS) if writer.commit_in(number) is not None)
        position, _, generation = writer.commit_in(slot)
        assert position == 0 and not writer.admits(end)
        for other in (generation - 1, generation + 1):
            writer.evict(slot, other)
            assert writer.commit_in(slot) is not None and not writer.admits(end)
        writer.evict(slot, generation)
        assert writer.commit_in(slot) is None and writer.admits(end)
        for impossible in (-1, frames.SLOTS):
            with pytest.raises(IndexError):
                writer.commit_in(impossible)
            with pytest.raises(IndexError):
                writer.evict(impossible, 1)
        return True

    assert log._locked(work, 1)
def test_a_clock_that_is_set_ahead_evicts_no_reader_that_lives(make: Callable[..., Spool], clock: ClockPort) -> None:
    log = make("raise", reader_expiry=10)
    with log.reader("living") as living:
        assert fill(log) == 34
        clock.set_ahead += 3600 * 10**9
        assert fill(log) == 0  # it looks as if the reader had not moved for an hour
        assert [one.expired for one in log.readers()] == [False]
        clock.time += 9 * 10**9
        living.commit()
        clock.time += 2 * 10**9
        assert fill(log) == 0
        assert [one.expired for one in log.readers()] == [False]
    clock.time += 11 * 10**9  # since its commit, by the new time
    assert log.append(VALUE) == 34
    assert [one.expired for one in log.readers()] == [True]


def test_without_an_expiry_writers_wait_forever(make: Callable[..., Spool], clock: ClockPort) -> None:
    log = make("raise")
    log.reader("r").close()
    fill(log)
    clock.time += 10**18
    assert fill(log) == 0


def test_compiled_or_not_old_commits_expire(make: Callable[..., Spool]) -> None:
    log = make("raise", reader_expiry=3600)
    with system.replaced(ClockPort()):
        log.reader("old").close()
    for _ in range(50):
        log.append(VALUE, timestamp=NOW)
    assert log.stats().next_sequence == 50
    log.reader("new", start="latest").close()
    assert fill(log) == 34


@pytest.mark.parametrize("verb", ["read", "follow"])
def test_evicted_in_the_middle_of_a_batch_it_gets_the_exact_gap(make: Callable[..., Spool], clock: ClockPort, verb: str) -> None:
    log = make("raise", reader_expiry=10)
    with log.reader("r") as reader:
        fill(log)
        for record in getattr(reader, verb)():
            if record.sequence == 10:
                break
        clock.time += 11 * 10**9
        for _ in range(100):
            log.append(VALUE)
        gap = next(getattr(reader, verb)(on_gap="yield"))
        assert (gap.first, gap.last, gap.reason) == (11, log.stats().first_sequence - 1, "expired")


def test_evicted_just_while_it_commits_it_is_waited_for_again(make: Callable[..., Spool], clock: ClockPort, monkeypatch: Any) -> None:
    """The writer gives the reader up between the reader's look and its store: one of the two must notice."""
    log = make("raise", reader_expiry=10)
    with log.reader("r") as reader:
        fill(log)
        clock.time += 11 * 10**9
        for _ in reader.read(limit=10):
            pass
        move = reader._slot.move

        def late(*arguments: Any) -> Any:
            log.append(VALUE)
            return move(*arguments)

        monkeypatch.setattr(reader._slot, "move", late)
        reader.commit()
        assert fill(log) == 9
        assert next(reader.read()).sequence == 10


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_that_a_reader_has_yet_to_commit_is_overwritten(tmp_path: Path, data: st.DataObject) -> None:
    """Two handles write, readers come, go, commit, go back: every reader can always read everything from its last commit on."""
    path = tmp_path / os.urandom(8).hex()
    with kvspool.create(path, capacity=RING, policy="raise") as one, kvspool.open(path) as two:
        readers: dict[str, Any] = {}
        for step in data.draw(st.lists(st.sampled_from(["append", "append", "append", "open", "move", "delete"]), max_size=40)):
            name = data.draw(st.sampled_from(["a", "b", "c"]))
            if step == "append":
                log = data.draw(st.sampled_from([one, two]))
                sizes = data.draw(st.lists(st.integers(0, 900), min_size=1, max_size=6))
                before = log.stats().next_sequence
                try:
                    assert log.append_many([bytes(size) for size in sizes]) == range(before, before + len(sizes))
                except (SpoolFull, TooLarge):
                    assert readers and log.stats().next_sequence == before
            elif step == "open" and name not in readers:
                readers[name] = one.reader(name, start=data.draw(st.sampled_from(["earliest", "latest"])))
            elif step == "move" and name in readers:
                first, end = one.stats().first_sequence, one.stats().next_sequence
                readers[name].seek(data.draw(st.integers(first, end)))
                readers[name].commit()
            elif step == "delete" and name in readers:
                readers.pop(name).close()
                two.delete_reader(name)
            for reader in readers.values():
                reader.seek(reader.committed)
                found = [record.sequence for record in reader.read()]
                assert found == list(range(reader.committed, one.stats().next_sequence))
        for reader in readers.values():
            reader.close()
