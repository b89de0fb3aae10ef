"""A durable reader of a hub root against a model: a list of records for each shard, and a number for each that is committed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hub
from hub import HubReader, HubRoot, ShardReplaced
from kvspool import Gap, system
from kvspool.engine.retention import Retention
from kvspool.journal import Journal

CLIENTS = ("a", "b", "c")


class ReaderMachine(RuleBasedStateMachine):
    """Each record holds a unique number, so that a recreated shard differs from the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.port = system.Port()
        self.port.flush = self.port.flush_data = lambda fd: None  # type: ignore[method-assign]
        self.replaced = system.replaced(self.port)
        self.replaced.__enter__()
        self.root: HubRoot = hub.create(self.folder / "root")
        self.number = 0
        self.stored: dict[tuple[str, int], list[int]] = {}  # each shard's records, by sequence
        self.place: dict[tuple[str, int], int] = {}  # of the reader
        self.committed: dict[tuple[str, int], int] = {}
        self.first: dict[tuple[str, int], int] = {}  # sequence of the oldest record
        self.stale: dict[str, set[tuple[str, int]]] = {"place": set(), "committed": set()}  # places in logs that were replaced
        self.reader: HubReader | None = None

    @initialize(kinds=st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=2, max_size=2))
    def begin(self, kinds: list[tuple[int, bool]]) -> None:
        for client, (bits, is_journal) in zip(CLIENTS, kinds, strict=False):
            self.make(client, bits, is_journal)
        self.reader = self.root.reader("r")
        self.place, self.committed = dict(self.first), dict(self.first)

    def teardown(self) -> None:
        self.root.close()
        if self.reader is not None:
            self.reader.close()
        self.replaced.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    # Clients.

    def shards_of(self, client: str) -> list[tuple[str, int]]:
        return [key for key in self.stored if key[0] == client]

    @precondition(lambda self: len(self.root.clients()) < len(CLIENTS))
    @rule(bits=st.integers(0, 1), is_journal=st.booleans())
    def create(self, bits: int, is_journal: bool) -> None:
        self.make(min(set(CLIENTS) - set(self.root.clients())), bits, is_journal)

    def make(self, client: str, bits: int, is_journal: bool) -> None:
        options: dict[str, Any] = {"format": "kvj", "segment_bytes": 4096} if is_journal else {"capacity": 65536}
        self.root.create_client(client, bits=bits, **options).close()
        for index in range(1 << bits):
            key = (client, index)
            self.stored[key], self.first[key] = [], 0

    @precondition(lambda self: len(self.root.clients()) > 1)
    @rule(data=st.data(), again=st.none() | st.tuples(st.integers(0, 1), st.booleans()))
    def remove(self, data: st.DataObject, again: tuple[int, bool] | None) -> None:
        client = data.draw(st.sampled_from(self.root.clients()))
        self.take_away(client)
        if again is not None:
            self.make(client, *again)

    def take_away(self, client: str) -> None:
        for path in [self.root.path / client, *self.root.path.glob(f"{client}.*"), *self.root.path.glob(f".{client}.*")]:
            shutil.rmtree(path, ignore_errors=True)
        for key in self.shards_of(client):
            del self.stored[key], self.first[key]
            # A commit drops these; before that, a log of the same name is another one.
            for which, places in (("place", self.place), ("committed", self.committed)):
                if key in places:
                    self.stale[which].add(key)

    @rule(data=st.data(), count=st.sampled_from([1, 7, 50, 150]))
    def append(self, data: st.DataObject, count: int) -> None:
        client = data.draw(st.sampled_from(self.root.clients()))
        keys = self.shards_of(client)
        with self.root.client(client) as shards:
            for at in range(count):
                key = keys[at % len(keys)]
                self.put(shards.shards[key[1]], key, 1)

    def put(self, log: Any, key: tuple[str, int], count: int) -> None:
        log.append_many([b"%d" % (self.number + at) + b" " * 90 for at in range(count)])
        self.stored[key] += range(self.number, self.number + count)
        self.number += count

    @rule(force=st.booleans())
    def trim(self, force: bool) -> None:
        """Trim records that all readers have committed; with `force`, others too."""
        for key in self.stored:
            with self.root.client(key[0]) as shards:
                log = shards.shards[key[1]]
                if not isinstance(log, Journal):
                    continue
                if force:
                    self.put(log, key, 80)  # so that there are segments of which nothing was read
                held = self.root.held(*key)
                end = len(self.stored[key])
                assert held is not None
                if not force and key in self.stale["committed"]:
                    continue  # a place in the log that was there before may be ahead of what was read of this one
                before = end if force else min(held, end)
                log.trim(Retention(force=True), before=before)
                assert force or log.first() <= max(held, self.first[key])
                self.first[key] = log.first()

    # The reader.

    @precondition(lambda self: self.reader is not None)
    @rule(limit=st.none() | st.integers(0, 50), follow=st.booleans())
    def read(self, limit: int | None, follow: bool) -> None:
        assert self.reader is not None
        reading = self.reader.follow(timeout=0, limit=limit, on_gap="yield") if follow else self.reader.read(limit=limit, on_gap="yield")
        begin_anew = limit != 0
        told = set()
        got = 0
        while True:
            try:
                item = next(reading)
            except StopIteration:
                break
            except ShardReplaced as error:
                told.add((error.client, error.shard))
                continue
            key = reading._merge.last if isinstance(item, Gap) else (item.client, item.shard)  # type: ignore[union-attr]
            if key in self.stale["place"]:
                self.place.pop(key, None)  # it starts again, whether that was reported or the number of shards is another one
                self.stale["place"].discard(key)
            expected = self.place.get(key, self.first[key])
            if isinstance(item, Gap):
                assert (item.first, item.last) == (expected, self.first[key] - 1)
                self.place[key] = item.last + 1
                continue
            assert item.sequence == expected
            assert int(item.value) == self.stored[key][item.sequence]
            self.place[key] = item.sequence + 1
            got += 1
        reading.close()
        if begin_anew:
            for key in self.stored:  # all shards that are there have a place now
                if key in self.stale["place"]:
                    self.stale["place"].discard(key)
                    self.place[key] = self.first[key]
                self.place.setdefault(key, self.first[key])
        if limit is None:
            assert {key: self.place[key] for key in self.stored} == {key: len(records) for key, records in self.stored.items()}
        else:
            assert got <= limit

    @precondition(lambda self: self.reader is not None)
    @rule()
    def commit(self) -> None:
        assert self.reader is not None
        stored = self.reader.commit()
        for key in [key for key in self.place if key not in stored]:
            del self.place[key]
            self.stale["place"].discard(key)
        assert set(stored) >= {key for key in self.stored if key in self.place and key not in self.stale["place"]}
        for key, sequence in stored.items():
            if key not in self.stale["place"]:
                assert sequence == self.place[key]
        self.committed = dict(self.place)
        self.stale["committed"] = set(self.stale["place"])

    @precondition(lambda self: self.reader is not None)
    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        assert self.reader is not None
        key = data.draw(st.sampled_from([None, *sorted(self.stored)]))
        if key is None:
            self.reader.rewind()
            moved = dict(self.first)
        else:
            moved = {key: data.draw(st.integers(0, len(self.stored[key])))}
            self.reader.seek(moved)
        self.place.update(moved)
        self.stale["place"] -= moved.keys()

    @rule(is_crash=st.booleans())
    def reopen(self, is_crash: bool) -> None:
        """A crash leaves the lock to the kernel; all the same for the positions."""
        if self.reader is not None:
            self.reader._release() if is_crash else self.reader.close()
        if is_crash:
            self.root.close()
            self.root = hub.open(self.folder / "root")
        self.reader = self.root.reader("r")
        self.place = dict(self.committed)
        self.stale["place"] = set(self.stale["committed"])

    @invariant()
    def what_is_committed_is_held(self) -> None:
        for key in self.stored:
            held = self.root.held(*key)
            if self.reader is not None and key not in self.stale["committed"]:
                assert held == self.committed.get(key, 0)

    @invariant()
    def no_reader_is_a_client(self) -> None:
        assert self.root.clients() == sorted({client for client, _ in self.stored})


ReaderMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestReaderMachine = ReaderMachine.TestCase
