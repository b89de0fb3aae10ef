"""A process killed at every opcode of its work on a log: acknowledged records are there, the operation is done or not done, and the next
process continues.

Each operation runs once, and every state that a kill could leave is tried, torn stores too; see `crash_states`. Then some are truly killed,
to see that they leave the states that they should. KVSPOOL_ALL_SCHEDULES=1 tears each change in many more ways, and
steps through more operations of the compiled twin.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow
import pytest
from crash_states import Copy, Run, Said, Shared, State, Stepped, Unsteppable, interpreted, traced
from images import Rebooted
from interleavings import account
from parts import leave_part
from schedules import ALL

import kvspool
import shard
from kvspool import Gap, Record, Spool, arrow, errors, system
from kvspool.engine.rows import columns_of
from kvspool.kernel import frames as frames_loops
from kvspool.kernel import frames_py as frames
from kvspool.spool import format
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system import holders

BEFORE = [b"before %d" % at + bytes(60) for at in range(50)]
BATCH = [b"%d" % at + bytes(120) for at in range(9)]  # a third of the ring: in pieces, over its end, with room made
KEYED = [{"key": at, f"key {at % 3}": None} for at in range(40)]
KILLS = 3  # true ones of each operation
CHOICES = 400 if ALL else 5  # ways to tear one change, at most


class Case:
    """An operation, what is there before it, and what must be true after a crash of it.

    said: what it has acknowledged. The directory holds `log`, with which most have to do.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said = Said()
        self.handle: Spool | None = None
        self.prepare()

    def prepare(self) -> None:
        with kvspool.create(self.root / "log", capacity=4096) as log:
            log.append_many(BEFORE)
            log.reader("old", 40).close()

    def warm(self) -> None:
        """Open what `run` needs, and use it once."""
        raise NotImplementedError

    def run(self) -> None:
        raise NotImplementedError

    def check(self, root: Path, said: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


# Appends.


class Append(Case):
    """Append `values` after `before`; `append` says how."""

    options: dict[str, Any] = {}
    before: list[Any] = BEFORE
    values: list[Any] = [b"one" * 40]
    is_open = False

    def prepare(self) -> None:
        with kvspool.create(self.root / "log", capacity=4096, **self.options) as log:
            log.append_many(self.before)
            assert log.stats().first_sequence > 0, "it makes room"
        if self.is_open:
            self.handle = kvspool.open(self.root / "log")
            self.handle.append(self.before[-1])
            self.before = [*self.before, self.before[-1]]

    def run(self) -> None:
        if self.handle is not None:
            self.append(self.handle)
        else:
            with kvspool.open(self.root / "log") as log:
                self.append(log)

    def append(self, log: Spool) -> None:
        self.said.append(log.append(self.values[0], key=b"key"))

    def check(self, root: Path, said: int) -> None:
        expected = dict(enumerate([*self.before, *self.values]))
        with kvspool.open(root / "log", timeout=0) as log:
            end = log.stats().next_sequence
            assert len(self.before) + said <= end <= len(self.before) + len(self.values)
            assert log.verify().is_sound
            assert log.append(b"after") == end
            found = account(log, field="data")
            assert found.pop(end) == b"after"
            assert found == {sequence: expected[sequence] for sequence in found}
            assert len(found) > 10 and log.verify().is_sound


class AppendOpen(Append):
    is_open = True

    def warm(self) -> None:
        self.handle = kvspool.open(self.root / "log")
        with self.handle.writer() as writer:
            for _ in range(2):
                writer.append(b"warm")


class AppendMany(Append):
    values = BATCH

    def append(self, log: Spool) -> None:
        self.said.extend(log.append_many(self.values))


class AppendManyOpen(AppendOpen, AppendMany):
    pass


class Burst(Append):
    values = BATCH

    def append(self, log: Spool) -> None:
        with log.writer() as writer:
            for value in self.values:
                self.said.append(writer.append(value))


class BurstOpen(AppendOpen, Burst):
    pass


class AppendRows(Append):
    values = BATCH

    def append(self, log: Spool) -> None:
        self.said.extend(log.append_rows(columns_of([Record(0, 1, 7, b"key", value) for value in self.values])))


class AppendArrow(Append):
    values = BATCH
    table = pyarrow.table({"value": BATCH, "key": [b"key"] * len(BATCH)})

    def append(self, log: Spool) -> None:
        assert arrow  # imported before, and not opcode by opcode
        self.said.extend(log.append_arrow(self.table))


class Produce(Append):
    """A producer's batch; the next writer resolves the state after a kill, and when the batch is sent again its rest is appended."""

    values = BATCH

    def prepare(self) -> None:
        super().prepare()
        with kvspool.open(self.root / "log") as log:
            log.producer("p").append_many([b"earlier"], batch=6)
        self.before = [*self.before, b"earlier"]

    def append(self, log: Spool) -> None:
        self.said.extend(range(log.producer("p").append_many(self.values, batch=7).records))

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            between = log.append(b"between")
            assert len(self.before) + said <= between <= len(self.before) + len(self.values)
            producer = log.producer("p")
            assert producer.last == (7 if between == len(self.before) + len(self.values) else 6)
            stored = producer.append_many(self.values[::-1], batch=7)
            assert (stored.records, stored.repeated) == (len(self.values), producer.last == 7 and stored.repeated)
            assert not said or stored.repeated
            assert producer.append_many(self.values, batch=7).repeated
            assert producer.append_many(self.values, batch=6).repeated
            found = account(log, field="data")
            batch = [value for sequence, value in found.items() if sequence >= len(self.before) and sequence != between]
            assert sorted(batch) == sorted(self.values) and log.verify().is_sound


class ProduceRest(Produce):
    """The rest of a batch, of which a killed producer has left a part."""

    def prepare(self) -> None:
        super().prepare()
        with kvspool.open(self.root / "log") as log:
            leave_part(log, "p", self.values, 7, 3)
            log.append(b"others")
        self.before = [*self.before, *self.values[:3], b"others"]

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            log.append(b"between")
            stored = log.producer("p").append_many(self.values[::-1], batch=7)
            assert stored.records == len(self.values) and (stored.repeated or not said)
            found = Counter(account(log, field="data").values())
            assert [found[value] for value in self.values] == [1] * len(self.values) and log.verify().is_sound


class AppendDurably(Append):
    options = {"durability": "disk"}

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0, durability="memory") as log:
            assert log.stats().synced_sequence >= said and len(self.before) + said <= log.stats().next_sequence
        super().check(root, said)


class AppendNewKeys(Append):
    options = {"codec": "keyed"}
    before = KEYED * 3
    values = [{"new": 1, "key": 2}, {"new": 2, "other": 3, "and another": [{"deep": None}]}]

    def append(self, log: Spool) -> None:
        for value in self.values:
            self.said.append(log.append(value))

    def check(self, root: Path, said: int) -> None:
        super().check(root, said)
        with kvspool.open(root / "log", timeout=0) as log:
            at = log.append({"new": 4, "newer": 5})
            assert account(log, field="data")[at] == {"new": 4, "newer": 5}
            table = log._live().key_table
            assert table is not None and table.is_whole() and len(set(table.keys.names.values())) == len(table.keys.names)


class Import(Append):
    values = [f"value {at} " + "x" * 100 for at in range(9)]

    def append(self, log: Spool) -> None:
        lines = "".join(f'{{"value": "{value}", "codec": "text"}}\n' for value in self.values)
        imported = kvspool.import_(log, io.BytesIO(lines.encode()), "jsonl")
        self.said.extend(range(imported.records))


class AppendForWaiting(Append):
    """Two readers wait, asleep on the word and by inotify."""

    def prepare(self) -> None:
        super().prepare()
        self.files = SpoolFiles(self.root / "log")
        for way in (frames.WATCHES, frames.SLEEPS):
            self.files.reader(0, 0).request_wake_up(way)

    def check(self, root: Path, said: int) -> None:
        super().check(root, said)
        # The process that took the word rang, or was killed before, which costs the sleeper one look. A sleeper that asks again is woken.
        with kvspool.open(root / "log", timeout=0) as log:
            control = log._live().control.cast("Q")
            assert control[frames.WANTED] == 0, "the check's own append took it"
            with log.follow("latest", timeout=0.001) as following:
                assert list(following) == []
                at = log.append(b"rings")
                assert next(following).sequence == at

    def close(self) -> None:
        self.files.close()


class Evict(Append):
    """One durable reader is silent and is evicted, another one is where the log ends."""

    options = {"policy": "block", "reader_expiry": 1e-9}
    values = BATCH

    def prepare(self) -> None:
        super().prepare()
        with kvspool.open(self.root / "log") as log:
            for name, start in (("silent", "earliest"), ("awake", "latest")):
                log.reader(name, start).close()  # type: ignore[arg-type]
            self.first = log.stats().first_sequence

    def append(self, log: Spool) -> None:
        self.said.extend(log.append_many(self.values))

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            end, first = log.stats().next_sequence, log.stats().first_sequence
            is_expired = {reader.name: reader.expired for reader in log.readers()}
            assert not is_expired["awake"] and (is_expired["silent"] or first == self.first)
            for name, start in (("silent", self.first), ("awake", len(self.before))):
                with log.reader(name) as reader:
                    items = list(reader.read(on_gap="yield"))
                    if first > start:
                        assert items.pop(0) == Gap(start, first - 1, "expired", str(root / "log"))
                    assert [item.sequence for item in items] == list(range(max(first, start), end))
        super().check(root, said)


# Durable readers.


class Commit(Case):
    options: dict[str, Any] = {}

    def prepare(self) -> None:
        with kvspool.create(self.root / "log", capacity=8192, **self.options) as log:
            log.append_many(BEFORE)
            log.reader("old", 40).close()

    def run(self) -> None:
        with kvspool.open(self.root / "log") as log, log.reader("old") as reader:
            assert len(list(reader.read(limit=3))) == 3
            self.said.append(reader.commit())

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log, log.reader("old") as reader:
            at = reader.sequence
            assert at in ((43,) if said else (40, 43))
            assert [record.sequence for record in reader.read()] == list(range(at, 50))
            reader.seek(41)
            assert reader.commit() == 41
            assert [one.sequence for one in log.readers()] == [41]


class CommitOpen(Commit):
    def warm(self) -> None:
        self.handle = kvspool.open(self.root / "log")
        self.reader = self.handle.reader("old")
        self.reader.commit()
        assert len(list(self.reader.read(limit=3))) == 3

    def run(self) -> None:
        self.said.append(self.reader.commit())


class CommitWhereWritersWait(Commit):
    options = {"policy": "block"}


class CommitBackwards(Commit):
    """Where writers wait, under the append lock."""

    options = {"policy": "raise"}

    def run(self) -> None:
        with kvspool.open(self.root / "log") as log, log.reader("old") as reader:
            reader.seek(10)
            self.said.append(reader.commit())

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log, log.reader("old") as reader:
            at = reader.sequence
            assert at in ((10,) if said else (10, 40))
            while True:
                try:
                    log.append(bytes(400))
                except errors.SpoolFull:
                    break
            assert next(reader.read()).sequence == at, "what it has yet to commit is there"


class OpenReader(Case):
    def run(self) -> None:
        with kvspool.open(self.root / "log") as log, log.reader("new") as reader:
            self.said.append(reader.sequence)

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            readers = {reader.name: reader for reader in log.readers()}
            assert set(readers) == {"new", "old"} or (set(readers) == {"old"} and not said)
            assert not any(reader.damaged for reader in readers.values())
            with log.reader("new") as reader:
                assert [record.sequence for record in reader.read()] == list(account(log, field="data"))
                assert reader.commit() == 50
            log.delete_reader("new")


class DeleteReader(Case):
    def run(self) -> None:
        with kvspool.open(self.root / "log") as log:
            log.delete_reader("old")
            self.said.append("old")

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            assert [reader.name for reader in log.readers() if not reader.damaged] in (([],) if said else ([], ["old"]))
            with log.reader("old", "latest") as reader:
                assert reader.sequence in ((50,) if said else (40, 50))


class Wait(Case):
    """A follower sleeps, and leaves."""

    def run(self) -> None:
        with kvspool.open(self.root / "log") as log, log.follow("latest", timeout=0.3) as following:
            assert list(following) == []
        self.said.append("left")

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            with log.follow("latest", timeout=0.001) as following:
                assert list(following) == []
                assert log.append(b"after") == next(following).sequence == 50


class View(Case):
    """A record is viewed in place."""

    def run(self) -> None:
        with kvspool.open(self.root / "log") as log, log.view(45) as value:
            self.said.append(bytes(value))

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            assert log.append_many(BATCH * 3) == range(50, 77), "no pin is left, and room is made"
            assert list(account(log).values())[-20:] == (BATCH * 3)[-20:]


# The disk.


class Sync(Case):
    def run(self) -> None:
        with kvspool.open(self.root / "log") as log:
            log.append(b"to be synced")
            self.said.append(log.sync())

    def check(self, root: Path, said: int) -> None:
        with kvspool.open(root / "log", timeout=0) as log:
            stats = log.stats()
            assert stats.synced_sequence in ((51,) if said else (0, 51)) and stats.synced_sequence <= stats.next_sequence <= 51
            assert stats.sync_error == 0
            assert log.append(b"after") == stats.next_sequence
            assert log.sync() == stats.next_sequence + 1
        with system.replaced(Rebooted()), kvspool.open(root / "log", timeout=0) as log:
            kept = [record.value for record in log.read(on_gap="skip")]
            assert (
                kept[-1] == b"after"
                and kept[:-1] in (expected := [*BEFORE, b"to be synced"])[-len(kept) + 1 :]
                or kept[:-1] == (expected[: stats.next_sequence][-len(kept) + 1 :])
            )


class CloseDurably(Sync):
    """A handle that syncs when it is closed."""

    def run(self) -> None:
        with kvspool.open(self.root / "log", durability="disk") as log:
            log.append_many([b"to be synced"])
        self.said.append(51)


class Create(Case):
    def prepare(self) -> None:
        pass

    def run(self) -> None:
        kvspool.create(self.root / "made", capacity=4096, allow_unsafe_fs=True).close()
        self.said.append("made")

    def check(self, root: Path, said: int) -> None:
        is_there = (root / "made").exists()
        assert is_there or not said
        opens = kvspool.open if is_there else lambda at: kvspool.create(at, capacity=4096)
        with opens(root / "made") as made:
            assert made.append(b"first") == 0
            assert made.verify().is_sound
        assert {path.name for path in (root / "made").iterdir()} == {"spool.ctl", "spool.dat"}


class CreateShards(Create):
    def run(self) -> None:
        shard.create(self.root / "made", prefix="p", bits=1, capacity=4096, allow_unsafe_fs=True).close()
        self.said.append("made")

    def check(self, root: Path, said: int) -> None:
        if said:
            shard.open(root / "made").close()
        with shard.create(root / "made", prefix="p", bits=1, capacity=4096, exist_ok=True) as shards:
            for at, one in enumerate(shards.shards):
                assert one.append(b"%d" % at) == 0
                assert one.verify().is_sound
        assert len(os.listdir(root / "made")) - len(list((root / "made").glob(".*.new"))) == 2


class Recover(Case):
    """The machine was restarted; the ring has a hole, and what was not synced is partly there."""

    def prepare(self) -> None:
        with kvspool.create(self.root / "log", capacity=4096, policy="raise") as log:
            log.append_many(BEFORE)
            log.sync()
            log.append_many([b"unsynced %d" % at * 8 for at in range(9)])
            log.reader("old", 55).close()
        with (self.root / "log" / format.DATA_FILE).open("r+b") as file:
            file.seek(format.DATA_START + 1600)
            file.write(bytes(512))
        with Copy(self.root.with_name("expected")) as copy:
            with Shared(self.root) as shared:
                copy.become(shared.state())
            self.expected = self.outcome(copy.root)

    def outcome(self, root: Path) -> Any:
        """Recover, and return all that must be the same."""
        with system.replaced(Rebooted()), kvspool.open(root / "log", timeout=0) as log:
            items = [(type(item), item.first, item.last) if isinstance(item, Gap) else item for item in log.read(0, on_gap="yield")]
            with log.reader("old") as reader:
                place = reader.sequence, [record.value for record in reader.read(on_gap="skip")]
            return items, place, log.append(b"goes on"), log.stats().recoveries, log.verify().damaged_records

    def run(self) -> None:
        with system.replaced(Rebooted()), kvspool.open(self.root / "log") as log:
            assert log.recovery is not None
            self.said.append(log.recovery)

    def check(self, root: Path, said: int) -> None:
        assert self.outcome(root) == self.expected


class Repair(Case):
    """A flush has failed, and the control block is damaged."""

    def prepare(self) -> None:
        super().prepare()
        with kvspool.open(self.root / "log") as log:
            log.append(b"last")
            self.expected = [record.value for record in log]
            words = log._live().control.cast("Q")
            words[frames.SYNC_ERROR], words[frames.MARKS], words[frames.MARKS + frames.MARK_WORDS] = 5, 1, 1

    def run(self) -> None:
        self.said.append(kvspool.repair(self.root / "log"))

    def check(self, root: Path, said: int) -> None:
        if not said:
            with kvspool.open(root / "log", timeout=0) as log:
                try:
                    log.append(b"after")
                    assert log.stats().sync_error == 0
                except (errors.Poisoned, errors.Corruption):
                    kvspool.repair(root / "log", timeout=0)
        with kvspool.open(root / "log", timeout=0) as log:
            log.append(b"after")
            assert log.stats().sync_error == 0 and log.verify().is_sound
            kept = [record.value for record in log.read(on_gap="skip")]
            assert [value for value in kept if value != b"after"] == self.expected[-(len(kept) - kept.count(b"after")) :]


# A resize.


class Resize(Case):
    """Other processes have the log open; they continue in the new files or the old ones."""

    before, after = 8192, 4096
    options: dict[str, Any] = {"codec": "keyed"}
    count = 5

    def prepare(self) -> None:
        with kvspool.create(self.root / "log", capacity=self.before, **self.options) as log:
            for at in range(self.count):
                log.append({"key": at, f"key {at % 3}": None})
            log.reader("durable", self.count).close()

    def run(self) -> None:
        self.said.append(kvspool.resize(self.root / "log", self.after))

    def check_with(self, copy: Copy, before: State, state: State) -> None:
        """As `check`, for those who had the log open before."""
        path = copy.become(before) / "log"
        with kvspool.open(path) as writing, kvspool.open(path) as reading, reading.reader("durable") as reader:
            following = reading.follow("latest", timeout=0)
            expected = list(reading)
            assert list(following) == []
            copy.become(state)
            with kvspool.open(path, timeout=0) as fresh:
                assert fresh.capacity in ((self.after,) if state.said else (self.before, self.after))
                assert list(fresh)[-len(expected) :] == expected
                value = {"key": self.count, "new": None}
                assert writing.append(value) == self.count
                for found in (following, reader.read(), fresh.read(self.count)):
                    assert [record.data for record in found] == [value]
                assert reader.commit() == self.count + 1 == fresh.readers()[0].sequence
                assert not fresh._live().may_have_moved, "a writer takes the word back"
                assert fresh.verify().is_sound
            kvspool.resize(path, 12288)
            assert os.listdir(path.parent) == ["log"], "a later resize removes what the killed one left"
            assert writing.append(value) == self.count + 1
            assert [record.sequence for record in following] == [self.count + 1]


class Grow(Resize):
    before, after = 4096, 8192


class ResizeAgain(Resize):
    """The locks have a file of their own since the first one."""

    options = {"codec": "keyed", "policy": "block"}

    def prepare(self) -> None:
        super().prepare()
        kvspool.resize(self.root / "log", 12288)
        self.before = 12288


APPENDS = [
    Append,
    AppendOpen,
    AppendMany,
    AppendManyOpen,
    Burst,
    BurstOpen,
    AppendRows,
    AppendArrow,
    AppendDurably,
    Produce,
    ProduceRest,
    AppendNewKeys,
    Import,
    AppendForWaiting,
    Evict,
]
READERS = [Commit, CommitWhereWritersWait, CommitBackwards, OpenReader, DeleteReader, Wait, View]
OTHERS = [Sync, CloseDurably, Create, CreateShards, Recover, Repair]
RESIZES = [Resize, Grow, ResizeAgain]
STEPPED = [AppendOpen, *([AppendManyOpen, BurstOpen, CommitOpen] if ALL else [])]
KILLED = [AppendMany, BurstOpen, AppendNewKeys, Evict, Commit, Sync, Create, Recover]


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a directory in memory: the state after a kill does not depend on a disk."""
    path = Path(tempfile.mkdtemp(prefix="kvspool-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(memory: Path) -> Iterator[Callable[[type[Case]], Case]]:
    """Prepare cases, on the interpreted twin, and as if another process had done it: its words are there as those of the last holder."""
    cases: list[Case] = []

    def one(kind: type[Case]) -> Case:
        (memory / "root").mkdir()
        with interpreted(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(holders, "ours", lambda: (1, 2, 3, 4))
            cases.append(kind(memory / "root"))
        return cases[-1]

    yield one
    for case in cases:
        case.close()


def run(case: Case) -> Run:
    with interpreted():
        return Run(case.run, case.root, lambda: len(case.said))


@pytest.mark.parametrize("kind", [*APPENDS, *READERS, *OTHERS], ids=lambda kind: kind.__name__)
def test_killed_at_any_opcode_it_is_done_or_not_and_the_next_one_continues(
    start: Callable[[type[Case]], Case], memory: Path, kind: type[Case]
) -> None:
    case = start(kind)
    done = run(case)
    assert case.said and len(done.states) > 1
    count = 0
    with Copy(memory / "copy") as copy:
        bystander = kvspool.open(copy.become(done.states[0]) / "log", timeout=0) if kind in APPENDS else None
        for state in done.crashes(CHOICES):
            case.check(copy.become(state), state.said)
            count += 1
            if bystander is not None:
                with kvspool.open(copy.root / "log", timeout=0) as fresh:
                    assert list(bystander) == list(fresh), "a handle from before the crash sees the same"
        if bystander is not None:
            bystander.close()
    print(f"{done.opcodes} opcodes, {len(done.states)} states, {count} with torn ones")


@pytest.mark.parametrize("kind", RESIZES, ids=lambda kind: kind.__name__)
def test_a_resize_killed_at_any_opcode_costs_no_record(start: Callable[[type[Case]], Case], memory: Path, kind: type[Resize]) -> None:
    case = start(kind)
    assert isinstance(case, Resize)
    done = run(case)
    count = 0
    for state in done.crashes(CHOICES):
        with Copy(memory / "copy") as copy:
            case.check_with(copy, done.states[0], state)
        count += 1
    print(f"{done.opcodes} opcodes, {len(done.states)} states, {count} with torn ones")


class Killer:
    """Says what is there before the n-th opcode, and kills the process."""

    def __init__(self, nth: int, case: Case, pipe: int) -> None:
        self.left, self.case, self.pipe = nth, case, pipe

    def __call__(self, frame: FrameType) -> None:
        self.left -= 1
        if self.left == 0:
            with Shared(self.case.root) as shared:
                state = shared.state()
            os.write(self.pipe, pickle.dumps((len(self.case.said), state.directories, state.names, state.files)))
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "kind", [AppendMany, BurstOpen, AppendNewKeys, Evict, Commit, Sync, Create, Recover], ids=lambda kind: kind.__name__
)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_is_truly_killed_leaves_the_state_that_it_saw_and_no_lock(
    start: Callable[[type[Case]], Case], memory: Path, kind: type[Case]
) -> None:
    case = start(kind)
    with Shared(case.root) as shared:
        before = shared.state()
    opcodes = 0

    def count(frame: FrameType) -> None:
        nonlocal opcodes
        opcodes += 1

    with interpreted():
        traced(case.run, count)
    for _ in range(KILLS):
        with Copy(case.root) as copy:
            copy.become(before)
            case.said.clear()
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    with interpreted():
                        traced(case.run, Killer(random.randrange(opcodes // 10, opcodes * 9 // 10), case, write_end))
                finally:
                    os._exit(1)
            os.close(write_end)
            with open(read_end, "rb") as pipe:
                said, *seen = pickle.loads(pipe.read())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            with Shared(case.root) as shared:
                assert shared.state() == State(*seen)
            case.check(case.root, said)


@pytest.mark.skipif(frames_loops.TWIN == "interpreted", reason="interpreted, the instructions are the interpreter's")
@pytest.mark.parametrize("kind", STEPPED, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_compiled_it_is_done_or_not_after_any_instruction_of_the_machine(memory: Path, kind: type[Case]) -> None:
    (memory / "root").mkdir()
    case = kind(memory / "root")
    if isinstance(case, Append):
        case.before = [*case.before, b"warm", b"warm"]
    try:
        done = Stepped(case.warm, case.run, case.root, lambda: len(case.said))
    except Unsteppable:
        pytest.skip("this process may not trace another one")
    assert done.instructions > 1000 and done.states[-1].said
    with Copy(memory / "copy") as copy:
        count = 0
        for state in done.crashes(0):
            case.check(copy.become(state), state.said)
            count += 1
    case.close()
    print(f"{done.instructions} instructions, {count} states")
