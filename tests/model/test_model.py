"""The spool against a model: a plain list of what was appended, and the arithmetic of a ring.

Hypothesis chooses the operations. The ring is the smallest possible, and its counters begin at 0 or where a counter of 32 or 63 bits
would wrap, so that overruns, pads and wraps happen in every run.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvspool
from kvspool import Gap, Record, errors
from kvspool import _frames_py as frames
from kvspool.spool import format

CAPACITY = 4096
STARTS = [(0, 0), (4072, 5), (2**32 - 1024, 2**32 - 10), (2**63 - 2048, 2**63 - 20_000)]

keys = st.none() | st.binary(max_size=20)
sizes = st.integers(0, 60) | st.integers(0, 960) | st.sampled_from([8, 168, 200, 480, 960, 972])
stamps = st.none() | st.integers(0, 1000) | st.just(2**40)


class ModelRing:
    """Which frames lie where: [position, end, sequence or None for a rest that holds no record], the oldest first."""

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

    def first(self, otherwise: int) -> int:
        return next((sequence for _, _, sequence in self.pieces if sequence is not None), otherwise)


class SpoolMachine(RuleBasedStateMachine):
    """Every rule does the same to the log and to the list, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "log"
        self.handles: list[kvspool.Spool] = []
        self.follower: Any = None

    @initialize(start=st.sampled_from(STARTS))
    def create(self, start: tuple[int, int]) -> None:
        kvspool.create(self.path, capacity=CAPACITY).close()
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
        self.handles = [kvspool.open(self.path), kvspool.open(self.path)]

    @property
    def next(self) -> int:
        return self.base + len(self.records)

    def kept(self) -> list[Record]:
        return self.records[self.ring.first(self.next) - self.base :]

    def remember(self, key: bytes | None, value: bytes, type: int, timestamp: int) -> None:
        last = self.records[-1].timestamp if self.records else 0
        self.ring.put(self.next, len(key or b"") + len(value))
        self.records.append(Record(self.next, max(timestamp, last), type, key, value))

    @rule(which=st.integers(0, 1), key=keys, size=sizes, type=st.integers(0, 255), stamp=stamps)
    def append(self, which: int, key: bytes | None, size: int, type: int, stamp: int | None) -> None:
        stamp = stamp or 0
        value = bytes([len(self.records) % 251]) * size
        assert self.handles[which].append(value, key=key, type=type, timestamp=stamp) == self.next
        self.remember(key, value, type, stamp)

    @rule(which=st.integers(0, 1), items=st.lists(st.tuples(keys, sizes), max_size=12), type=st.integers(0, 255), stamp=stamps)
    def append_many(self, which: int, items: list[tuple[bytes | None, int]], type: int, stamp: int | None) -> None:
        stamp = stamp or 0
        values = [bytes([(len(self.records) + at) % 251]) * size for at, (_, size) in enumerate(items)]
        got = self.handles[which].append_many(values, keys=[key for key, _ in items], type=type, timestamp=stamp)
        assert got == range(self.next, self.next + len(items))
        for (key, _), value in zip(items, values, strict=True):
            self.remember(key, value, type, stamp)

    @rule(which=st.integers(0, 1), count=st.integers(1, 300))
    def overrun(self, which: int, count: int) -> None:
        self.handles[which].append_many([b"overrun"] * count, timestamp=0)
        for _ in range(count):
            self.remember(None, b"overrun", 0, 0)

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
        self.handles[which].close()
        self.handles[which] = kvspool.open(self.path)
        if self.follower is not None:
            self.follower.close()
            self.follower = None

    @rule(which=st.integers(0, 1))
    def sync(self, which: int) -> None:
        assert self.handles[which].sync() == self.next or not self.records

    @invariant()
    def the_log_is_the_end_of_the_list(self) -> None:
        if not self.handles:
            return
        for handle in self.handles:
            assert list(handle) == self.kept()
            stats = handle.stats()
            assert (stats.next_sequence, stats.first_sequence) == (self.next, self.ring.first(self.next))
            assert stats.records == len(self.kept())

    def teardown(self) -> None:
        if self.follower is not None:
            self.follower.close()
        for handle in self.handles:
            handle.close()
        shutil.rmtree(self.folder)


TestSpoolAgainstAList = SpoolMachine.TestCase
TestSpoolAgainstAList.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
