"""The spool against a model: a plain list of what was appended, and the arithmetic of a ring.

Hypothesis chooses the operations. The ring is the smallest possible, and its counters begin at 0 or where a counter of 32 or 63 bits
would wrap, so that overruns, pads and wraps happen in every run. KVSPOOL_MODEL_EXAMPLES is how many histories are tried (default: 30).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvspool
from kvspool import Gap, Record, errors
from kvspool.kernel import frames_py as frames
from kvspool.spool import format

CAPACITY = 4096
STARTS = [(0, 0), (4072, 5), (2**32 - 1024, 2**32 - 10), (2**63 - 2048, 2**63 - 20_000), (2**63 - 24, 2**32 - 3), (2**32 - 8, 2**63 - 9000)]
EXAMPLES = int(os.environ.get("KVSPOOL_MODEL_EXAMPLES", "30"))
NAMES = ("a", "b")

keys = st.none() | st.binary(max_size=20)
sizes = st.integers(0, 60) | st.integers(0, 960) | st.sampled_from([8, 168, 200, 480, 960, 972])
mappings = st.dictionaries(st.sampled_from(["user", "é", "long " * 12, "too long " * 9, ""]), st.integers(0, 2**60) | st.text(max_size=9))
stamps = st.none() | st.integers(0, 1000) | st.just(2**40)


class ModelRing:
    """The frames of a ring: [position, end, sequence or None for a rest that holds no record], the oldest first."""

    def __init__(self, position: int) -> None:
        self.end = self.head = position
        self.pieces: list[tuple[int, int, int | None]] = []

    def put(self, sequence: int, content: int) -> None:
        stored = -(-(32 + content) // 8) * 8
        rest = CAPACITY - self.end % CAPACITY
        if rest < stored:
            self.pieces.append((self.end, self.end + rest, None))
            self.end += rest
        self.pieces.append((self.end, self.end + stored, sequence))
        self.end += stored
        while self.end - self.head > CAPACITY:
            self.head = self.pieces.pop(0)[1]

    def end_of(self, contents: list[int]) -> int:
        """Return where the ring would end after records of these sizes."""
        end = self.end
        for content in contents:
            stored = -(-(32 + content) // 8) * 8
            rest = CAPACITY - end % CAPACITY
            end += stored + (rest if rest < stored else 0)
        return end

    def places(self, sequence: int) -> tuple[int, int]:
        """Return the least and the most position that `sequence` may have been committed at: there may be a rest without a record."""
        least = most = self.head
        for position, end, found in self.pieces:
            if found is not None and found < sequence:
                least = most = end
            elif found is None and most == position:
                most = end
        return least, most

    def first(self, otherwise: int) -> int:
        return next((sequence for _, _, sequence in self.pieces if sequence is not None), otherwise)


@dataclass
class ModelReader:
    """A durable reader: where it stands, what it has committed, and its handle while it is open."""

    sequence: int
    committed: int
    handle: Any


class SpoolMachine(RuleBasedStateMachine):
    """Every rule does the same to the log and to the list, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "log"
        self.handles: list[kvspool.Spool] = []
        self.follower: Any = None

    @initialize(start=st.sampled_from(STARTS), policy=st.sampled_from(["overwrite", "overwrite", "block", "raise"]))
    def create(self, start: tuple[int, int], policy: str) -> None:
        kvspool.create(self.path, capacity=CAPACITY, codec="keyed", policy=policy).close()
        self.policy = policy
        self.readers: dict[str, ModelReader] = {}
        position, self.base = start
        with open(self.path / format.CONTROL_FILE, "r+b") as file:
            for word, value in (
                *((at, position) for at in (frames.HEAD, frames.TAIL, frames.MARKS, frames.MARKS + frames.MARK_WORDS)),
                *((at, self.base) for at in (frames.MIN_SEQ, frames.MARKS + 1, frames.MARKS + frames.MARK_WORDS + 1)),
            ):
                file.seek(word * 8)
                file.write(value.to_bytes(8, "little"))
        self.ring = ModelRing(position)
        self.records: list[Record] = []
        self.synced = self.base
        self.handles = [kvspool.open(self.path, timeout=0), kvspool.open(self.path, timeout=0)]

    @property
    def next(self) -> int:
        return self.base + len(self.records)

    def kept(self) -> list[Record]:
        return self.records[self.ring.first(self.next) - self.base :]

    def remember(self, key: bytes | None, value: bytes, type: int, timestamp: int) -> None:
        last = self.records[-1].timestamp if self.records else 0
        self.ring.put(self.next, len(key or b"") + len(value))
        self.records.append(Record(self.next, max(timestamp, last), type, key, value))

    def put(self, append: Callable[[list[bytes]], range], sizes: list[int], keys: list[bytes | None], type: int = 0, at: int = 0) -> None:
        """Append values of these sizes: all of them, or none where a durable reader still waits for what would be overwritten."""
        values = [bytes([(len(self.records) + number) % 251]) * size for number, size in enumerate(sizes)]
        contents = [len(key or b"") + size for key, size in zip(keys, sizes, strict=True)]
        end = self.ring.end_of(contents)
        places = [self.ring.places(reader.committed) for reader in self.readers.values()] if self.policy != "overwrite" else []
        before = self.next
        try:
            got = append(values)
        except (errors.SpoolFull, errors.TooLarge) as error:
            assert any(end - least > CAPACITY for least, _ in places), "there was room"
            assert isinstance(error, errors.SpoolFull) or end - self.ring.end > CAPACITY
            return
        assert all(end - most <= CAPACITY for _, most in places), "something that a reader has yet to commit was overwritten"
        assert got == range(before, before + len(sizes))
        for key, value in zip(keys, values, strict=True):
            self.remember(key, value, type, at)

    @rule(which=st.integers(0, 1), key=keys, size=sizes, type=st.integers(0, 255), stamp=stamps)
    def append(self, which: int, key: bytes | None, size: int, type: int, stamp: int | None) -> None:
        def one(values: list[bytes]) -> range:
            sequence = self.handles[which].append(values[0], key=key, type=type, timestamp=stamp or 0)
            return range(sequence, sequence + 1)

        self.put(one, [size], [key], type, stamp or 0)

    @rule(which=st.integers(0, 1), items=st.lists(st.tuples(keys, sizes), max_size=12), type=st.integers(0, 255), stamp=stamps)
    def append_many(self, which: int, items: list[tuple[bytes | None, int]], type: int, stamp: int | None) -> None:
        keys = [key for key, _ in items]
        self.put(
            lambda values: self.handles[which].append_many(values, keys=keys, type=type, timestamp=stamp or 0),
            [size for _, size in items],
            keys,
            type,
            stamp or 0,
        )

    @rule(which=st.integers(0, 1), values=st.lists(mappings, max_size=4))
    def append_data(self, which: int, values: list[dict[str, Any]]) -> None:
        """Append keyed values. Their stored sizes are read from the log afterwards; their data are compared with the arguments."""
        before = self.next
        try:
            got = self.handles[which].append_many(values, timestamp=0)
        except errors.SpoolFull:
            assert self.policy != "overwrite" and self.readers
            return
        assert got == range(before, before + len(values))
        stored = list(self.handles[1 - which].read(before))
        assert [record.data for record in stored] == values
        for record in stored:
            self.ring.put(record.sequence, len(record.value))
            self.records.append(record)

    @rule(which=st.integers(0, 1), sizes=st.lists(sizes, min_size=1, max_size=8), batch=st.integers(0, 3))
    def burst(self, which: int, sizes: list[int], batch: int) -> None:
        """One record after the other by a writer, then some by the handle itself."""
        with self.handles[which].writer() as writer:
            for size in sizes:
                self.put(lambda values: range(found := writer.append(values[0], timestamp=0), found + 1), [size], [None])
            self.put(lambda values: writer.append_many(values, timestamp=0), [9] * batch, [None] * batch)
            self.put(lambda values: self.handles[which].append_many(values, timestamp=0), [9], [None])

    @rule(which=st.integers(0, 1), count=st.integers(1, 300))
    def overrun(self, which: int, count: int) -> None:
        for at in range(0, count, 20):
            few = min(20, count - at)
            self.put(lambda values: self.handles[which].append_many(values, timestamp=0), [7] * few, [None] * few)

    # Durable readers.

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), start=st.sampled_from(["earliest", "latest"]))
    def open_reader(self, which: int, name: str, start: str) -> None:
        reader = self.readers.get(name)
        if reader is not None and reader.handle is not None:
            with pytest.raises(errors.ReaderBusy):
                self.handles[which].reader(name)
            return
        handle = self.handles[which].reader(name, start)
        if reader is None:
            place = self.next if start == "latest" else self.ring.first(self.next)
            self.readers[name] = ModelReader(place, place, handle)
        else:
            reader.sequence, reader.handle = reader.committed, handle
        assert handle.sequence == handle.committed == self.readers[name].sequence

    def opened(self, name: str) -> ModelReader | None:
        reader = self.readers.get(name)
        return None if reader is None or reader.handle is None else reader

    @rule(name=st.sampled_from(NAMES), limit=st.none() | st.integers(0, 60), commits=st.booleans())
    def take(self, name: str, limit: int | None, commits: bool) -> None:
        reader = self.opened(name)
        if reader is None:
            return
        got = list(reader.handle.read(limit=limit, on_gap="yield"))
        first = self.ring.first(self.next)
        expected: list[Any] = list(self.records[max(reader.sequence, first) - self.base :][:limit])
        if reader.sequence < first and limit != 0:
            gap = got.pop(0)
            assert (gap.first, gap.last, gap.reason in ("overrun", "expired")) == (reader.sequence, first - 1, True)
            reader.sequence = first
        assert got == expected
        reader.sequence += len(got)
        assert reader.handle.sequence == reader.sequence
        if commits:
            assert reader.handle.commit() == reader.sequence
            reader.committed = reader.sequence

    @rule(name=st.sampled_from(NAMES), back=st.integers(0, 200))
    def move(self, name: str, back: int) -> None:
        reader = self.opened(name)
        if reader is not None:
            reader.sequence = max(self.ring.first(self.next), self.next - back)
            reader.handle.seek(reader.sequence)

    @rule(name=st.sampled_from(NAMES))
    def commit(self, name: str) -> None:
        reader = self.opened(name)
        if reader is not None:
            assert reader.handle.commit() == reader.sequence
            reader.committed = reader.sequence

    @rule(name=st.sampled_from(NAMES))
    def close_reader(self, name: str) -> None:
        reader = self.opened(name)
        if reader is not None:
            reader.handle.close()
            reader.handle = None

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES))
    def delete_reader(self, which: int, name: str) -> None:
        reader = self.readers.get(name)
        if reader is None:
            with pytest.raises(errors.NoSuchReader):
                self.handles[which].delete_reader(name)
        elif reader.handle is None:
            self.handles[which].delete_reader(name)
            del self.readers[name]

    @rule(which=st.integers(0, 1), back=st.integers(0, 200))
    def read_synced(self, which: int, back: int) -> None:
        first = self.ring.first(self.next)
        start = max(self.base, self.synced - back)
        got = list(self.handles[which].read(start, on_gap="skip", isolation="synced"))
        assert got == self.records[max(start, first) - self.base : max(0, self.synced - self.base)]

    @rule(which=st.integers(0, 1), size=st.integers(993, 5000))
    def append_too_large(self, which: int, size: int) -> None:
        with pytest.raises(errors.TooLarge):
            self.handles[which].append(bytes(size))
        with pytest.raises(errors.TooLarge):
            self.handles[which].append_many([b"fits", bytes(size)])

    @rule(which=st.integers(0, 1), back=st.integers(0, 400), limit=st.none() | st.integers(0, 40))
    def read_from(self, which: int, back: int, limit: int | None) -> None:
        start = max(self.base, self.next - back)
        got = list(self.handles[which].read(start, limit=limit, on_gap="yield"))
        first = self.ring.first(self.next)
        expected: list[Record | Gap] = list(self.records[max(start, first) - self.base :][:limit])
        if start < first and limit != 0:
            expected.insert(0, Gap(start, first - 1, "overrun", str(self.path)))
        assert got == expected

    @rule(which=st.integers(0, 1), ahead=st.integers(1, 100))
    def read_ahead(self, which: int, ahead: int) -> None:
        with pytest.raises(errors.OutOfRange):
            self.handles[which].read(self.next + ahead)

    @rule(which=st.integers(0, 1), back=st.integers(0, 200))
    def begin_following(self, which: int, back: int) -> None:
        if self.follower is not None:
            self.follower.close()
        self.expected = max(self.base, self.next - back)
        self.follower = self.handles[which].follow(self.expected, timeout=0, on_gap="yield")

    @rule(count=st.integers(1, 300))
    def go_on_following(self, count: int) -> None:
        if self.follower is None:
            return
        for _ in range(count):
            item = next(self.follower, None)
            if item is None:
                assert self.expected == self.next
                break
            if isinstance(item, Gap):
                assert (item.first, item.reason) == (self.expected, "overrun")
                assert item.last < self.ring.first(self.next), "a record that is still there is not lost"
                self.expected = item.last + 1
            else:
                assert item == self.records[self.expected - self.base]
                self.expected += 1

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        for name in NAMES:
            self.close_reader(name)
        self.handles[which].close()
        self.handles[which] = kvspool.open(self.path, timeout=0)
        if self.follower is not None:
            self.follower.close()
            self.follower = None

    @rule(which=st.integers(0, 1))
    def sync(self, which: int) -> None:
        assert self.handles[which].sync() == self.next or not self.records
        self.synced = self.next

    @invariant()
    def the_log_is_the_end_of_the_list(self) -> None:
        if not self.handles:
            return
        for handle in self.handles:
            assert list(handle) == self.kept()
            stats = handle.stats()
            assert (stats.next_sequence, stats.first_sequence) == (self.next, self.ring.first(self.next))
            assert stats.records == len(self.kept())
        found = {one.name: (one.sequence, one.open, one.damaged) for one in self.handles[0].readers()}
        assert found == {name: (one.committed, one.handle is not None, False) for name, one in self.readers.items()}

    def teardown(self) -> None:
        if self.follower is not None:
            self.follower.close()
        for name in NAMES if self.handles else ():
            self.close_reader(name)
        for handle in self.handles:
            handle.close()
        shutil.rmtree(self.folder)


TestSpoolAgainstAList = SpoolMachine.TestCase
TestSpoolAgainstAList.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
