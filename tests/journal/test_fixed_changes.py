"""Prune, rewind and open_for_sync of a journal with the format fixed: against a list, alongside readers, and when they are cut short."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import signal
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import append_lock
import pytest
from children import Died, in_child, start
from faults import FILE_CALLS, FailingPort, KillingPort
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from schedules import ALL, some

import kvspool
from kvspool import Gap, errors, system
from kvspool.journal.control import NO_RUN
from kvspool.journal.fixed import FixedJournal

CHANGING = (*FILE_CALLS, "truncate", "remove", "look_up", "names")


def made(path: Path, count: int, per_blob: int) -> FixedJournal:
    log = kvspool.create(path, format="fixed", item_bytes=4, items_per_blob=per_blob)
    assert isinstance(log, FixedJournal)
    log.append_many([item(position) for position in range(count)])
    return log


def opened(path: Path) -> FixedJournal:
    log = kvspool.open(path)
    assert isinstance(log, FixedJournal)
    return log


def item(position: int, turn: int = 0) -> bytes:
    return struct.pack(">HH", position, turn)


def there(log: FixedJournal, start: Any = "earliest") -> dict[int, bytes]:
    return {record.sequence: record.value for record in log.read(start)}


def refuse_what_the_original_refuses(path: Path, per_blob: int, record: int = 8) -> None:
    """The checks of the original's `init`: names, no gap between them, all but the last one full."""
    names = sorted(os.listdir(path))
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in names)
    indexes = [int(name, 16) for name in names]
    assert indexes == list(range(indexes[0], indexes[-1] + 1))
    sizes = [(path / name).stat().st_size for name in names]
    assert set(sizes[:-1]) <= {per_blob * record}
    assert sizes[-1] < per_blob * record


class Machine(RuleBasedStateMachine):
    """The model: the items that are there, by position, the position of the next one, and where the durable reader stands."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.path = self.directory / "log"
        self.turn = 0

    @initialize(per_blob=st.integers(1, 3))
    def make(self, per_blob: int) -> None:
        self.per_blob = per_blob
        self.log = made(self.path, 0, per_blob)
        self.items: dict[int, bytes] = {}
        self.first = self.size = 0
        self.stands: int | None = None

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
        shutil.rmtree(self.directory)

    @rule(count=st.integers(1, 8))
    def append(self, count: int) -> None:
        self.turn += 1
        new = {position: item(position, self.turn) for position in range(self.size, self.size + count)}
        assert self.log.append_many(list(new.values())) == range(self.size, self.size + count)
        self.items.update(new)
        self.size += count

    @rule(minimum=st.integers(0, 40))
    def prune(self, minimum: int) -> None:
        self._prune(minimum)
        assert self.log.prune(minimum) == self.first

    def _prune(self, minimum: int) -> None:
        end = min(minimum, self.size)
        self.first = max(self.first, end - end % self.per_blob)
        self._keep(self.first, self.size)

    def _keep(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.items = {position: value for position, value in self.items.items() if first <= position < size}

    @rule(size=st.integers(0, 40))
    def rewind(self, size: int) -> None:
        if size > self.size:
            with pytest.raises(errors.OutOfRange):
                self.log.rewind(size)
        elif size < self.first:
            with pytest.raises(errors.Pruned):
                self.log.rewind(size)
        else:
            self._rewind(size)
            self.log.rewind(size)

    def _rewind(self, size: int) -> None:
        self._keep(self.first, size)
        if self.stands is not None:
            self.stands = min(self.stands, size)

    @rule(lower=st.integers(0, 30), count=st.integers(1, 12))
    def open_for_sync(self, lower: int, count: int) -> None:
        upper = lower + count - 1
        if self.size <= lower:
            self._keep(lower, lower)
        elif self.first > upper:
            self._rewind(lower)
            self.first = lower
        else:
            self._prune(lower)
            if self.size > upper + 1:
                self._rewind(upper + 1)
        assert self.log.open_for_sync(lower, upper) == range(self.first, self.size)

    @rule(limit=st.integers(0, 9))
    def consume(self, limit: int) -> None:
        with self.log.reader("r") as reader:
            begin = self.first if self.stands is None else self.stands
            found = list(reader.read(limit=limit, on_gap="skip"))
            expected = [p for p in sorted(self.items) if p >= begin][:limit]
            assert [one.sequence for one in found] == expected
            if found or self.stands is None:
                self.stands = reader.commit()
                assert self.stands == (expected[-1] + 1 if expected else begin)

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = opened(self.path)

    @rule()
    def restart_the_machine(self) -> None:
        """Nothing is known any more of where the writers stood."""
        self.log.close()
        self.log.format.lock_file(self.path).unlink(missing_ok=True)
        self.log = opened(self.path)

    @invariant()
    def holds_its_items(self) -> None:
        if not hasattr(self, "log"):
            return
        assert (self.log.oldest(), self.log.end()) == (self.first, self.size)
        assert there(self.log) == self.items
        assert list(self.log.replay()) == list(self.items.values())
        for position in range(max(0, self.first - 4), self.size + 4):
            if position in self.items:
                assert self.log.item(position) == self.items[position]
            else:
                with pytest.raises(errors.Pruned if position < self.first else errors.OutOfRange):
                    self.log.item(position)
        gaps = [(found.first, found.last, found.reason) for found in self.log.read(0, on_gap="yield") if isinstance(found, Gap)]
        assert [position for first, last, _ in gaps for position in range(first, last + 1)] == list(range(self.first))
        assert {reason for _, _, reason in gaps} <= {"trimmed"}
        stats = self.log.stats()
        assert (stats.first_sequence, stats.records) == (self.first, len(self.items))
        refuse_what_the_original_refuses(self.path, self.per_blob)


def test_every_verb_against_a_list() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=int(os.environ.get("KVSPOOL_EXAMPLES", "20")), stateful_step_count=25, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_fresh_begin_in_the_middle_of_a_blob_is_filled_up_as_the_original_does(tmp_path: Path) -> None:
    with made(tmp_path / "log", 5, 10) as log:
        assert log.open_for_sync(25, 30) == range(25, 25)
        assert log.append(item(25)) == 25
        assert os.listdir(tmp_path / "log") == [f"{2:016x}"]
        assert (tmp_path / "log" / f"{2:016x}").read_bytes()[:40] == bytes(40)
        with pytest.raises(errors.Pruned):
            log.item(24)
        assert there(log) == {25: item(25)}


# Alongside readers.


def take(follower: Any, count: int) -> list[Any]:
    """Return the next items; each poll returns those of one blob."""
    found: list[Any] = []
    while len(found) < count:
        batch = follower.poll(count - len(found))
        assert batch
        found += batch
    return found


def test_a_follower_that_has_not_read_what_is_taken_back_continues(tmp_path: Path) -> None:
    with made(tmp_path / "log", 10, 3) as log, log.follow(timeout=0.1, limit=None) as follower:
        assert [one.value for one in take(follower, 5)] == [item(position) for position in range(5)]
        for size in (9, 6, 5):
            log.rewind(size)
            log.append_many([item(position, size) for position in range(size, 10)])
        assert [one.value for one in follower] == [item(position, 5) for position in range(5, 10)]


@pytest.mark.parametrize("size", range(5))
@pytest.mark.parametrize("more", [0, 1, 4, 20])
def test_a_follower_that_has_read_what_is_taken_back_gets_truncated(tmp_path: Path, size: int, more: int) -> None:
    """Whatever came to these positions since."""
    with made(tmp_path / "log", 10, 3) as log, log.follow(timeout=0.1) as follower:
        take(follower, 5)
        opened(tmp_path / "log").rewind(size)
        if more:
            log.append_many([item(size + row, 1) for row in range(more)])
        with pytest.raises(errors.Truncated, match=f"rewound to {size} items, after 5 were read"):
            follower.poll()


@pytest.mark.parametrize("use", [lambda reader: reader.lag(), lambda reader: next(reader.read())], ids=["lag", "read"])
def test_a_rewind_after_the_stored_position_commits_nothing(tmp_path: Path, use: Any) -> None:
    with made(tmp_path / "log", 50, 10) as log:
        with log.reader("r") as reader:
            assert len(list(reader.read(limit=10))) == 10
            reader.commit()
            assert len(list(reader.read(limit=35))) == 35
            opened(tmp_path / "log").rewind(43)
            with pytest.raises(errors.Truncated, match="rewound to 43 items"):
                use(reader)
            assert reader.sequence == 43
        with log.reader("r") as reader:
            assert reader.sequence == 10


def test_leftovers_of_a_killed_rewind_are_not_returned(tmp_path: Path) -> None:
    """Up to its new end one may read; the next writer finishes it."""
    with made(tmp_path / "log", 10, 3) as log, log.follow(timeout=0.05) as follower, log.follow(timeout=0.05) as beyond:
        take(follower, 2)
        take(beyond, 8)
        with append_lock.held(log) as (appender, page):
            appender.control.write(page._replace(boot=NO_RUN))
            log._bounds.begin_rewind(6, 0o600)
        with pytest.raises(errors.Truncated, match="rewound to 6 items, after 8"):
            beyond.poll()
        assert [one.value for one in take(follower, 4)] == [item(position) for position in range(2, 6)]
        assert follower.poll() == follower.poll() == []
        assert (log.end(), sorted(there(log))) == (6, list(range(6)))
        assert log.append(item(6, 1)) == 6
        assert [one.value for one in follower] == [item(6, 1)]


def test_a_reader_in_a_pruned_blob_gets_a_gap(tmp_path: Path) -> None:
    with made(tmp_path / "log", 10, 3) as log, log.follow(timeout=0.1, on_gap="yield") as follower:
        take(follower, 2)
        assert log.prune(8) == 6
        found = follower.poll()
        assert found == [Gap(2, 5, "trimmed", str(tmp_path / "log"))]
        assert [one.sequence for one in follower] == [6, 7, 8, 9]
        assert log.open_for_sync(25, 30) == range(25, 25)
        log.append(item(25))
        assert [(one.first, one.last) if isinstance(one, Gap) else one.sequence for one in follower] == [(10, 23), (24, 24), 25]


def test_a_durable_reader_stands_at_the_new_end(tmp_path: Path) -> None:
    with made(tmp_path / "log", 10, 3) as log:
        with log.reader("closed") as reader:
            list(reader.read(limit=8))
            reader.commit()
        with log.reader("open") as reader, log.reader("behind") as behind:
            list(reader.read(limit=9))
            reader.commit()
            list(behind.read(limit=4))
            log.rewind(4)
            log.append_many([item(position, 1) for position in range(4, 12)])
            assert {one.name: one.sequence for one in log.readers()} == {"behind": 0, "closed": 4, "open": 4}
            assert behind.commit() == 4
            with pytest.raises(errors.Truncated, match="rewound to 4 items; the reader 'open' had read 9"):
                reader.commit()
            assert reader.sequence == reader.committed == 4
            assert [one.value for one in reader.read(limit=2)] == [item(4, 1), item(5, 1)]
            assert reader.commit() == 6
            list(reader.read())
            log.rewind(5)
            with pytest.raises(errors.Truncated, match="rewound to 5"):
                list(reader.read())
            assert list(reader.read()) == []
        with log.reader("closed") as reader:
            assert reader.sequence == 4


def test_records_on_disk_are_not_mistaken_for_those_that_came_instead(tmp_path: Path) -> None:
    """A flush that overlaps a rewind does not cover the items that were appended after the rewind."""
    with made(tmp_path / "log", 8, 100) as log:
        other = opened(tmp_path / "log")
        synced: list[int] = []

        class Port(system.Port):
            def flush_data(self, fd: int) -> None:
                super().flush_data(fd)
                synced.append(log.stats().synced_sequence)
                if len(synced) == 1:
                    other.rewind(3)
                    other.append_many([item(position, 1) for position in range(3, 20)])

        with system.replaced(Port()):
            log.sync()
        assert len(synced) == 2 and synced[1] <= 3, "the first flush says nothing of what came instead"
        assert log.sync() == 20
        assert log.stats().synced_sequence == 20


def test_readers_next_to_a_process_that_rewinds_never_get_wrong_items(tmp_path: Path) -> None:
    """Each item holds the turn in which it was appended; in one iteration turns never decrease, and every position is returned."""
    log = made(tmp_path / "log", 0, 4)

    def write() -> int:
        with opened(tmp_path / "log") as writer:
            for turn in range(1, 400):
                end = writer.end()
                writer.append_many([item(position, turn) for position in range(end, end + 1 + turn % 7)])
                if turn % 3 == 0:
                    writer.rewind(max(writer.oldest(), writer.end() - turn % 11))
                if turn % 20 == 0:
                    writer.prune(writer.end() - 9)
            return writer.end()

    wait = start(write)
    truncated = handed = 0
    with log:
        while select.select([], [], [], 0)[0] == [] and os.waitid(os.P_PID, wait.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            last_position, last_turn = -1, 0
            try:
                with log.follow(on_gap="yield", timeout=0.005) as follower:
                    while batch := follower.poll(5):
                        for one in batch:
                            if isinstance(one, Gap):
                                assert one.reason == "trimmed" and one.first == max(last_position + 1, one.first)
                                last_position = one.last
                                continue
                            position, turn = struct.unpack(">HH", one.value)
                            assert position == one.sequence
                            assert last_position in (-1, position - 1)
                            assert turn >= last_turn
                            last_position, last_turn = position, turn
                            handed += 1
            except errors.Truncated:
                truncated += 1
            except errors.LogNotFound:
                continue
        assert wait() == log.end()
    assert handed > 0


# Cut short.


CALLS = ("open", "write", "truncate", "flush", "flush_data", "rename", "remove", "make_directory")
OLD = {position: item(position) for position in range(3, 11)}
OPERATIONS: dict[str, tuple[Callable[[FixedJournal], object], dict[int, bytes], int, int]] = {
    "append": (lambda log: log.append_many([item(n, 1) for n in range(11, 20)]), OLD | {n: item(n, 1) for n in range(11, 20)}, 3, 20),
    "prune": (lambda log: log.prune(10), {n: item(n) for n in (9, 10)}, 9, 11),
    "rewind": (lambda log: log.rewind(5), {3: item(3), 4: item(4)}, 3, 5),
    "rewind to a begin": (lambda log: log.rewind(6), {n: item(n) for n in (3, 4, 5)}, 3, 6),
    "fresh": (lambda log: log.open_for_sync(16, 20), {}, 16, 16),
    "fresh in the same blob": (lambda log: log.open_for_sync(11, 20), {}, 11, 11),
    "both ends": (lambda log: log.open_for_sync(6, 8), {n: item(n) for n in (6, 7, 8)}, 6, 9),
    "before": (lambda log: log.open_for_sync(1, 2), {}, 1, 1),
}


def prepared(path: Path) -> FixedJournal:
    """Positions 3 to 10, three a blob; a durable reader stands at 8."""
    log = made(path, 11, 3)
    log.prune(3)
    with log.reader("r", start=8):
        pass
    return log


def check_outcome(path: Path, operation: str) -> None:
    """Check that the old items, the new ones, or a state in between is there; then all works again."""
    _, new, new_first, new_size = OPERATIONS[operation]
    union = OLD | new
    with opened(path) as log:
        end = log.append(b"next")
        assert 11 <= end <= 20 if operation == "append" else end in (11, new_size)
        found = there(log)
        assert found.items() <= (union | {end: b"next"}).items()
        assert sorted(found) == list(range(log.oldest(), end + 1))
        assert log.oldest() in (3, 6, new_first)
        assert [log.item(position) for position in found] == list(found.values())
        with log.reader("r") as reader:
            assert reader.sequence == min(8, end)
    refuse_what_the_original_refuses(path, 3)


@pytest.mark.parametrize("turn", range(4) if ALL else [0])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_every_call(tmp_path: Path, operation: str, turn: int) -> None:
    """Before the call or during it, and with or without a reboot: in turn, or at each call all four."""
    killed = 0
    for nth in some(range(1, 400), 9):
        half, reboots = divmod((nth + turn) % 4, 2)
        path = tmp_path / str(nth) / "log"
        path.parent.mkdir()
        prepared(path).close()

        def work(nth: int = nth, path: Path = path, half: bool = bool(half)) -> bool:
            log = opened(path)
            with system.replaced(KillingPort(nth, CALLS, when="half" if half else "before")):
                OPERATIONS[operation][0](log)
            return True

        try:
            in_child(work)
        except Died as died:
            assert died.signal == signal.SIGKILL
            killed += 1
        else:
            break
        with opened(path) as log:  # no writer has repaired it yet
            union = OLD | OPERATIONS[operation][1]
            for one in log.read(on_gap="yield"):
                assert isinstance(one, Gap) or union[one.sequence] == one.value
            if reboots:
                log.format.lock_file(path).unlink(missing_ok=True)
        check_outcome(path, operation)
        shutil.rmtree(path.parent)
    assert killed >= (8 if ALL else 2)
    with opened(path) as log:
        _, new, first, size = OPERATIONS[operation]
        assert (there(log), log.oldest(), log.end()) == (new, first, size)


@pytest.mark.parametrize(("number", "first"), [(errno.ENOSPC, 0), (errno.EIO, 1)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_call_that_fails(tmp_path: Path, operation: str, number: int, first: int) -> None:
    failed = 0
    for nth in some(range(1, 600), 9, 4 * first):
        path = tmp_path / str(nth) / "log"
        path.parent.mkdir()
        with prepared(path) as log:
            port = FailingPort(nth, number, CHANGING)
            try:
                with system.replaced(port):
                    OPERATIONS[operation][0](log)
            except (OSError, errors.KvspoolError):
                failed += 1
        if not port.failed:
            break
        try:
            check_outcome(path, operation)
        except errors.Poisoned:
            assert port.failed in ("flush", "flush_data")
        shutil.rmtree(path.parent)
    assert failed >= (8 if ALL else 2)


def test_threads_get_items_while_others_append(tmp_path: Path) -> None:
    wrong: list[int] = []
    with made(tmp_path / "log", 300, 2) as log:

        def read() -> None:
            wrong.extend(position for position in range(300) if log.item(position) != item(position))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for position in range(300, 400):
            log.append(item(position))
        for thread in threads:
            thread.join()
    assert wrong == []


def test_processes_append_at_once_and_are_killed(tmp_path: Path) -> None:
    """Each item that was acknowledged, to a pipe outside, is there at its position, once."""
    path = tmp_path / "log"
    made(path, 0, 7).close()
    acknowledged: dict[int, bytes] = {}
    turns = 0
    while turns < 12 or len(acknowledged) <= 100:
        turns += 1
        pipes, children = [], []
        for writer in range(3):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                log = opened(path)
                for count in range(10_000):
                    value = struct.pack(">BBH", turns % 256, writer, count)
                    os.write(write_end, struct.pack(">I4s", log.append(value), value))
                os._exit(0)
            os.close(write_end)
            pipes.append(read_end)
            children.append(pid)
        select.select(pipes, [], [], 10)
        select.select([], [], [], 0.01 + turns % 12 * 0.003)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for read_end, pid in zip(pipes, children, strict=True):
            with open(read_end, "rb") as pipe:
                data = pipe.read()
            os.waitpid(pid, 0)
            for at in range(0, len(data) - len(data) % 8, 8):
                position, value = struct.unpack_from(">I4s", data, at)
                assert acknowledged.setdefault(position, value) == value
    with opened(path) as log:
        log.append(b"last")
        found = there(log)
        assert sorted(found) == list(range(log.end()))
        assert len(set(found.values())) == len(found)
        assert acknowledged.items() <= found.items()
        assert len(found) - 1 - len(acknowledged) <= turns * 3  # each killed writer may have appended one unacknowledged item
    refuse_what_the_original_refuses(path, 7)


def test_a_running_iteration_tells_a_rewind_once_and_its_reader_stands_at_the_new_end(tmp_path: Path) -> None:
    with made(tmp_path / "log", 30, 8) as log, log.reader("me") as reader:
        reading = reader.read()
        for _ in range(16):
            next(reading)
        log.rewind(5)
        with pytest.raises(errors.Truncated):
            next(reading)
        assert (reader.sequence, reader.commit()) == (5, 5)


def test_a_commit_after_a_rewind_stores_what_it_returns(tmp_path: Path) -> None:
    with made(tmp_path / "log", 30, 8) as log, log.reader("me") as reader:
        assert len(list(reader.read(limit=16))) == 16
        reader.commit()
        reader.seek(3)
        log.rewind(5)
        log.append_many([item(position, 1) for position in range(5, 25)])
        assert len(list(reader.read(limit=13))) == 13
        assert reader.commit() == 16
        reader.close()
        with log.reader("me") as again:
            assert again.sequence == 16


@pytest.mark.parametrize("size", [0, 5, 27, 29])
@pytest.mark.parametrize("verb", ["extent", "_cursor_at"])
def test_last_next_to_a_rewind_returns_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, size: int) -> None:
    with made(tmp_path / "log", 30, 8) as log, opened(tmp_path / "log") as other:
        look: Callable[..., Any] = getattr(log, verb)

        def look_before_a_rewind(*arguments: Any, **options: Any) -> Any:
            found = look(*arguments, **options)
            other.rewind(min(size, other.end()))
            return found

        monkeypatch.setattr(log, verb, look_before_a_rewind)
        assert [record.sequence for record in log.last(3)] == list(range(max(0, size - 3), size))
