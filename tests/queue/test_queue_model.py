"""A queue compared with a deque: handles in any order, chunks so small that each entry or two fills one."""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvspool.queue import ChunkQueue, QueueEmpty, QueueFull, verify

entries = st.binary(max_size=52)
handles = st.integers(0, 2)


class Machine(RuleBasedStateMachine):
    """Three handles of one queue, each closed and opened now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.path = Path(self.folder.name) / "queue"
        self.model: deque[bytes] = deque()

    @initialize(most=st.sampled_from([1, 2, 3, 65534]))
    def create(self, most: int) -> None:
        self.most = most
        self.handles = [self.open() for _ in range(3)]

    def open(self) -> ChunkQueue:
        return ChunkQueue.create(self.path, chunk_bytes=64, max_chunks=self.most, exist_ok=True, timeout=0)

    @rule(at=handles, entry=entries)
    def put(self, at: int, entry: bytes) -> None:
        try:
            self.handles[at].put_nowait(entry)
        except QueueFull:
            assert len(self.handles[at]) == self.most
        else:
            self.model.append(entry)

    @rule(at=handles, batch=st.lists(entries, max_size=6))
    def put_many(self, at: int, batch: list[bytes]) -> None:
        try:
            self.handles[at].put_many(batch, block=False)
            placed = len(batch)
        except QueueFull as error:
            placed = error.placed
            assert placed < len(batch)
        self.model.extend(batch[:placed])

    @rule(at=handles)
    def get(self, at: int) -> None:
        try:
            assert self.handles[at].get_nowait() == self.model.popleft()
        except (QueueEmpty, IndexError) as error:
            assert isinstance(error, QueueEmpty)
            assert not self.model

    @rule(at=handles, limit=st.integers(1, 5))
    def get_many(self, at: int, limit: int) -> None:
        try:
            got = self.handles[at].get_many(limit, block=False)
        except QueueEmpty:
            assert not self.model
        else:
            assert got == [self.model.popleft() for _ in range(min(limit, len(self.model)))]

    @rule(at=handles, length=st.integers(0, 52))
    def get_if(self, at: int, length: int) -> None:
        try:
            got = self.handles[at].get_if(lambda entry: len(entry) > length, block=False)
        except QueueEmpty:
            assert not self.model
        else:
            assert got == (self.model.popleft() if len(self.model[0]) > length else None)

    @rule(at=handles)
    def look(self, at: int) -> None:
        one = self.handles[at]
        assert (one.qsize(), one.empty(), list(one)) == (len(self.model), not self.model, list(self.model))
        if self.model:
            assert one.peek_nowait() == self.model[0]

    @rule(at=handles)
    def clear(self, at: int) -> None:
        self.handles[at].clear()
        self.model.clear()

    @rule(at=handles)
    def reopen(self, at: int) -> None:
        self.handles[at].close()
        self.handles[at] = self.open()

    @rule()
    def reopen_all(self) -> None:
        for one in self.handles:
            one.close()
        self.handles = [self.open() for _ in range(3)]

    @invariant()
    def every_file_is_sound_and_has_its_place(self) -> None:
        if hasattr(self, "handles"):
            report = verify(self.path)
            assert (report.entries, report.problems, report.leftovers) == (len(self.model), [], [])
            assert report.chunks <= self.most

    def teardown(self) -> None:
        for one in getattr(self, "handles", ()):
            one.close()
        self.folder.cleanup()


class InterpretedMachine(Machine):
    """The same with the interpreted loops, whatever was built."""


Machine.TestCase.settings = InterpretedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = Machine.TestCase


@pytest.mark.usefixtures("interpreted")
class TestInterpretedQueue(InterpretedMachine.TestCase):  # type: ignore[misc, name-defined]
    """unittest's cases take pytest's fixtures by mark."""
