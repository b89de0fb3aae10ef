"""A client's log, a shipper and a hub, and a model of what the hub has to hold, through whatever Hypothesis makes of them.

The hub is the real server's intake over the real store; between it and the lanes, which are the shipper's own, the test says what arrives.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from shipping import Row, contents, gaps, row_of

import kvspool
from hub.client.log_sender import LogSender
from hub.protocol import ingest
from hub.protocol.ingest import Acknowledged, Opened, Opening, Put, Refused, ShippedLog
from hub.root.store import Store
from hub.server.clients import Client
from hub.server.ingest import IngestSession
from kvspool.errors import LogVanished

CAPACITY = 4096


class Call:
    """A call: messages of the shipper are kept in `sent` until the test lets them arrive; the hub's answers are in `heard`."""

    def __init__(self, store: Store, sender: LogSender) -> None:
        self.sender = sender
        self.sent: list[tuple[Put, pa.RecordBatch]] = []
        self.heard: list[Any] = []
        opening = ingest.decode_opening(ingest.encode(Opening(ingest.VERSION, "client", 0, [ShippedLog(0, sender.id, sender.log.end())])))
        self._intake = IngestSession(store, "process", _Anybody(), opening, Client("client"), 1 << 20)
        self._taken = ExitStack()
        self._hear(self._intake.open(self._taken))

    def _hear(self, answers: list[Any]) -> None:
        self.heard += [ingest.decode_from_hub(ingest.encode(answer)) for answer in answers]

    def arrive(self, count: int) -> None:
        """Let the first messages that are on their way come to the hub."""
        for put, rows in self.sent[:count]:
            message = ingest.decode_from_client(ingest.encode(put))
            assert isinstance(message, Put)
            self._hear(self._intake.put(message, rows))
            if self._intake.is_due(message):
                self._hear([self._intake.take_stored()])
        del self.sent[:count]

    def end(self) -> None:
        """The hub has seen that the call is over."""
        self._taken.close()


class _Anybody:
    def admit(self, size: int) -> float:
        return 0.0


class Hub(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "hub").mkdir()
        kvspool.create(self.path, format="kvj", segment_bytes=600).close()
        self.store = Store(self.folder / "hub")
        self.base = 0  # of the log in the hub's journal
        self.all: dict[int, Row] = {}  # every record that the client's logs ever had, by the journal's sequence
        self.call: Call | None = None
        self.old: list[Call] = []  # cut, but what was sent may still arrive
        self.number = 0

    @initialize()
    def begin(self) -> None:
        kvspool.create(self.folder / "log", capacity=CAPACITY).close()
        self.open()

    def open(self) -> None:
        log = kvspool.open(self.folder / "log")
        self.log = log
        self.sender = LogSender(0, log, "hub")  # type: ignore[arg-type]

    @property
    def path(self) -> Path:
        return self.folder / "hub" / "client"

    # The client's log.

    @rule(count=st.integers(1, 12), size=st.sampled_from([0, 5, 60]))
    def append(self, count: int, size: int) -> None:
        for _ in range(count):
            self.number += 1
            key = [None, b"", b"key"][self.number % 3]
            sequence = self.log.append(b"%d" % self.number + b"x" * size, key=key, type=self.number % 256, timestamp=self.number << 40)
            self.all[self.base + sequence] = Row(b"%d" % self.number + b"x" * size, key, self.number % 256, self.number << 40)

    @rule()
    def overrun(self) -> None:
        self.append(80, 60)

    @rule(size=st.sampled_from([4096, 8192, 65536]))
    def resize(self, size: int) -> None:
        kvspool.resize(self.folder / "log", size)

    @rule()
    def recreate(self) -> None:
        """Delete and recreate the log. Records that the hub had not received by then never reach it, unless they are on their way."""
        self.cut()
        for call in self.old:
            call.sent.clear()
        end = self.at_hub()
        for sequence in [sequence for sequence in self.all if sequence >= end]:
            del self.all[sequence]
        shutil.rmtree(self.folder / "log")
        kvspool.create(self.folder / "log", capacity=CAPACITY).close()
        self.sender.fail(LogVanished("deleted"))
        self.sender.retry_at = 0.0
        assert self.sender.is_due()
        self.log = self.sender.log  # type: ignore[assignment]
        self.base = end

    def at_hub(self) -> int:
        """Return the sequence that the hub's journal expects."""
        with kvspool.open(self.path) as journal:
            return int(journal.end())  # type: ignore[union-attr]

    @rule(more=st.integers(0, 3))
    def restore(self, more: int) -> None:
        """A log with the same id, as from a backup, has fewer records than the hub has of it, or others: it is refused."""
        known = self.at_hub() - self.base
        if known < 1 or self.is_trimmed_to_the_end():
            return
        count = min(max(0, known - 2 + more), 60)
        with kvspool.create(self.folder / "restored", capacity=CAPACITY) as old:
            old.append_many([b"from a backup"] * count)
            sender = LogSender(0, old, "hub")  # type: ignore[arg-type]
            sender.id = self.sender.id
            call = self.opened(sender)
            if sender.cursor is not None:
                self.send_all(call)
            assert [word.reason for word in call.heard if isinstance(word, Refused)] == ["restored" if count < known else "conflict"]
            call.end()
            sender.close()
        shutil.rmtree(self.folder / "restored")

    def is_trimmed_to_the_end(self) -> bool:
        with kvspool.open(self.path) as journal:
            return bool(journal.first() == journal.end())  # type: ignore[union-attr]

    # The network.

    def opened(self, sender: LogSender) -> Call:
        call = Call(self.store, sender)
        opened = call.heard.pop(0)
        assert isinstance(opened, Opened)
        for place in opened.places:
            sender.open(place, "appended")
        return call

    @rule(batches=st.integers(1, 4), most=st.integers(1, 20), size=st.sampled_from([100, 1 << 20]), arrivals=st.integers(0, 5))
    def ship(self, batches: int, most: int, size: int, arrivals: int) -> None:
        """Send some of what is there, and let some of what was sent arrive."""
        if self.call is None:
            self.call = self.opened(self.sender)
            assert self.call.heard == [] and self.sender.cursor is not None, self.call.heard
        for number in range(batches):
            rows = self.sender.next_rows(most, size)
            if rows is not None:
                self.call.sent.append((self.sender.put(rows, number % 2 == 0, 1 << 20), rows.batch))
        self.call.arrive(arrivals)
        self.hear(self.call)

    def hear(self, call: Call) -> None:
        for word in call.heard:
            assert isinstance(word, Acknowledged), word
            for _, sequence in word.places:
                self.sender.acknowledge(sequence)
        call.heard.clear()
        self.sender.commit()

    @rule(data=st.data())
    def mix_up(self, data: st.DataObject) -> None:
        """Deliver only some messages, in another order: nothing is stored out of order, and the call is of no more use."""
        self.append(3, 5)
        self.ship(3, 1, 1 << 20, 0)
        call = self.call
        assert call is not None
        call.sent = data.draw(st.permutations(call.sent))[1:]
        call.arrive(len(call.sent))
        assert all(isinstance(word, Acknowledged) or word.reason == "unexpected" for word in call.heard)
        call.heard.clear()
        self.cut()

    @precondition(lambda self: any(call.sent for call in self.old))
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        """Deliver messages of a connection that the shipper has abandoned; the hub's answers are dropped."""
        call = data.draw(st.sampled_from([call for call in self.old if call.sent]))
        call.arrive(data.draw(st.integers(1, 3)))

    @precondition(lambda self: self.call is not None)
    @rule()
    def cut(self) -> None:
        if self.call is not None:
            self.old.append(self.call)
            self.sender.close_cursor()
            self.call = None

    @precondition(lambda self: self.call is not None and self.call.sent)
    @rule()
    def repeat(self) -> None:
        """Deliver each sent message twice."""
        assert self.call is not None
        self.call.sent = [each for each in self.call.sent for _ in range(2)]

    def send_all(self, call: Call) -> None:
        while (rows := call.sender.next_rows(50, 1 << 20)) is not None:
            call.sent.append((call.sender.put(rows, False, 1 << 20), rows.batch))
        call.arrive(len(call.sent))

    # The shipper and the hub.

    @rule()
    def kill_shipper(self) -> None:
        self.cut()
        self.sender.close()
        self.open()

    @rule()
    def kill_hub(self) -> None:
        self.cut()
        for call in self.old:
            call.end()
        self.old.clear()
        self.store.close()
        self.store = Store(self.folder / "hub")

    @rule()
    def trim(self) -> None:
        with kvspool.open(self.path) as journal:
            journal.trim(before=journal.end())  # type: ignore[union-attr]

    # Invariants.

    @invariant()
    def holds_nothing_else(self) -> None:
        """Each record at the hub is the client's own, in its place; the places between are Gaps."""
        with kvspool.open(self.path) as journal:
            found, missing = contents(journal), gaps(journal)
            assert found == {sequence: self.all[sequence] for sequence in found}
            places = sorted([*found, *(sequence for first, last in missing for sequence in range(first, last + 1))])
            assert places == list(range(journal.end()))  # type: ignore[union-attr]

    def teardown(self) -> None:
        if not hasattr(self, "lane"):
            return
        try:
            self.cut()
            call = self.opened(self.sender)
            self.send_all(call)
            assert not any(isinstance(word, Refused) for word in call.heard)
            self.holds_nothing_else()
            with kvspool.open(self.path) as journal:
                found = contents(journal)
                held = {self.base + record.sequence: row_of(record) for record in self.log.read(on_gap="skip")}
                first = journal.first()  # type: ignore[union-attr]
                assert {sequence: row for sequence, row in held.items() if sequence >= first}.items() <= found.items()
            call.end()
        finally:
            self.store.close()
            self.sender.close()
            shutil.rmtree(self.folder)


TestHub = Hub.TestCase
TestHub.settings = settings(max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
