"""A hub's answers to calls that kvspool's shipper would never make."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from clocks import StoppedClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import flight
from serving import HubServer
from shipping import LOG, OTHER, Row, batch, eventually, numbered, stored

from hub.errors import HubFull
from hub.protocol import ingest, reading
from hub.protocol.ingest import Acknowledged, Done, Opened, Opening, Ping, Put, Refused, ShippedLog
from hub.root import columns
from hub.root.store import Shard
from hub.security.quotas import UNLIMITED
from hub.server import openings
from hub.server.admission import Admission
from hub.server.ingest import IngestSession
from hub.server.openings import LONGEST_WAIT, MOST, Openings
from hub.server.worker_pool import WorkerPool
from kvspool import system
from kvspool.errors import Poisoned

OPENING = Opening(ingest.VERSION, "client", 0, [ShippedLog(0, LOG, 0)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


@pytest.fixture
def server(root: Path) -> Iterator[HubServer]:
    with HubServer(root, largest_batch=1 << 20) as server:
        yield server


class Call:
    """A call whose messages are written manually."""

    def __init__(self, server: HubServer, opening: Opening | bytes = OPENING, schema: pa.Schema = columns.SCHEMA) -> None:
        command = opening if isinstance(opening, bytes) else ingest.encode(opening)
        self._client = flight.FlightClient(server.location)
        options = flight.FlightCallOptions(timeout=30)
        self.writer, self.reader = self._client.do_exchange(flight.FlightDescriptor.for_command(command), options)
        with suppress(pa.ArrowException, OSError):  # the hub may have ended the call already
            self.writer.begin(schema)

    def say(self, message: Any) -> None:
        self.writer.write_metadata(message if isinstance(message, bytes) else ingest.encode(message))

    def put(self, put: Put | bytes, rows: pa.RecordBatch) -> None:
        self.writer.write_with_metadata(rows, put if isinstance(put, bytes) else ingest.encode(put))

    def hear(self) -> Any:
        """Return the hub's next word. The last one of a call comes as its error, too: that is what is left to a client that can't write."""
        try:
            return ingest.decode_from_hub(self.reader.read_chunk().app_metadata.to_pybytes())
        except flight.FlightServerError as error:
            told = reading.error_in(error.extra_info)
            assert told is not None
            return ingest.refusal(told)

    def end(self) -> None:
        """The client says no more; nor does the hub, at last, or it says once more what it refused."""
        with suppress(pa.ArrowException, OSError):  # the hub may have ended the call already
            self.writer.done_writing()
        with pytest.raises((StopIteration, flight.FlightServerError)) as caught:
            while True:
                self.reader.read_chunk()
        assert isinstance(caught.value, StopIteration) or reading.error_in(caught.value.extra_info) is not None

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.cancel()
        with suppress(pa.ArrowException, OSError):
            self.writer.close()
        self._client.close()


def rows(first: int, end: int, text: str = "record") -> pa.RecordBatch:
    return numbered(first, end, text).batch


def test_a_call_from_its_opening_to_its_end(server: HubServer, root: Path) -> None:
    with Call(server) as call:
        assert call.hear() == Opened(ingest.VERSION, "process", 1 << 20, [ingest.ResumePoint(0, 0, False)])
        call.put(Put(0, 0, 0, 3, False), rows(0, 2))
        call.put(Put(0, 2, 2, 3, True), rows(2, 3))
        assert call.hear() == Acknowledged([(0, 3)], 1)
        call.say(Ping({0: 3}))
        assert call.hear() == Acknowledged([], 2)
        call.say(Done())
        call.end()
    eventually(lambda: server.clients.of("client").connections == 0)
    assert list(stored(root / "client")) == [0, 1, 2]


def test_what_came_before_a_cut_is_stored(server: HubServer, root: Path) -> None:
    with Call(server) as call:
        call.hear()
        call.put(Put(0, 0, 0, 3, True), rows(0, 3))
        call.hear()
    eventually(lambda: server.clients.of("client").connections == 0)
    assert list(stored(root / "client")) == [0, 1, 2]
    with Call(server, Opening(1, "client", 0, [ShippedLog(0, LOG, 5)])) as call:
        assert call.hear().places == [ingest.ResumePoint(0, 3, True, 2)]


def test_two_calls_at_once_store_everything_once(server: HubServer, root: Path) -> None:
    """The connection broke, and the shipper reconnects before the hub has seen that; then the end of the old one arrives."""
    with Call(server) as old:
        old.hear()
        old.put(Put(0, 0, 0, 9, True), rows(0, 3))
        old.hear()
        with Call(server, Opening(1, "client", 0, [ShippedLog(0, LOG, 9)])) as new:
            assert new.hear().places == [ingest.ResumePoint(0, 3, True, 2)]
            with suppress(flight.FlightError):  # the hub ends the old call
                old.put(Put(0, 3, 3, 9, True), rows(3, 6))
            new.put(Put(0, 2, 2, 9, True), rows(2, 9))
            assert new.hear() == Acknowledged([(0, 9)], 1)
    assert list(stored(root / "client")) == list(range(9))


def test_a_new_log_ends_the_call_of_the_old_one(server: HubServer, root: Path) -> None:
    with Call(server) as old:
        old.hear()
        old.put(Put(0, 0, 0, 9, True), rows(0, 3))
        old.hear()
        with Call(server, Opening(1, "client", 0, [ShippedLog(0, OTHER, 0)])) as new:
            assert new.hear().places == [ingest.ResumePoint(0, 0, False)]
            old.put(Put(0, 3, 3, 9, True), rows(3, 6))
            assert old.hear().reason == "fenced"
            assert old.hear() == Acknowledged([], 2)
            new.put(Put(0, 0, 0, 9, True), rows(0, 1, "new"))
            assert new.hear() == Acknowledged([(0, 1)], 1)
    assert len(stored(root / "client")) == 4


def test_a_shard_that_is_refused_takes_nothing_more_and_the_others_continue(server: HubServer, root: Path) -> None:
    with Call(server, Opening(1, "client", 1, [ShippedLog(0, LOG, 0), ShippedLog(1, OTHER, 0)])) as call:
        call.hear()
        call.put(Put(0, 5, 5, 9, False), rows(5, 6))
        refused = call.hear()
        assert isinstance(refused, Refused) and (refused.reason, refused.index, refused.expected) == ("unexpected", 0, 0)
        call.put(Put(0, 0, 0, 9, False), rows(0, 1))
        call.put(Put(1, 0, 0, 9, True), rows(0, 1))
        assert call.hear() == Acknowledged([(1, 1)], 1)
    assert stored(root / "client.1.000") == {} and len(stored(root / "client.1.001")) == 1


OTHER_SCHEMAS = [
    columns.SCHEMA.append(pa.field("more", pa.int8())),
    pa.schema([]),
    pa.schema([pa.field("value", pa.dictionary(pa.int32(), pa.binary()))]),
    columns.SCHEMA.set(3, pa.field("value", pa.large_binary())),
]


@pytest.mark.parametrize("schema", OTHER_SCHEMAS, ids=lambda schema: str(len(schema)) + str(schema.types[-1:]))
def test_other_columns_are_refused_before_any_batch_is_decoded(server: HubServer, schema: pa.Schema) -> None:
    with Call(server, schema=schema) as call:
        assert isinstance(call.hear(), Opened)
        assert call.hear().reason == "malformed"


BAD_PUTS: list[Any] = [
    (b"garbage", rows(0, 1)),
    (ingest.encode(Put(1, 0, 0, 1, False)), rows(0, 1)),  # a shard that the call was not opened for
    (ingest.encode(Put(0, 0, 1, 1, False)), rows(0, 1)),
    (ingest.encode(Put(0, 0, 0, 1, False)), rows(0, 1).slice(0, 0)),
    (ingest.encode(Put(0, 0, 0, 1, False)), batch(Row(b"x", type=256))),
    (ingest.encode(Put(0, 0, 0, 1, False)), batch(Row(b"x", codec=99))),
    (ingest.encode(Put(0, 0, 0, 1, False)), batch(Row(b"x" * (2 << 20)))),
    (ingest.encode(Put(0, ingest.LAST - 1, 0, 1, False)), rows(0, 5)),
]


@pytest.mark.parametrize("number", range(len(BAD_PUTS)))
def test_a_put_that_can_not_be_ends_the_call_and_stores_nothing(server: HubServer, root: Path, number: int) -> None:
    with Call(server) as call:
        call.hear()
        call.put(*BAD_PUTS[number])
        assert call.hear().reason == "malformed"
        call.end()
    assert stored(root / "client") == {}
    with Call(server) as call:
        call.hear()
        call.put(Put(0, 0, 0, 1, True), rows(0, 1))
        assert call.hear() == Acknowledged([(0, 1)], 1)


@pytest.mark.parametrize("message", [b"garbage", ingest.encode(Put(0, 0, 0, 1, False)), ingest.encode(Acknowledged([], 0))])
def test_a_message_that_can_not_be_ends_the_call(server: HubServer, message: bytes) -> None:
    with Call(server) as call:
        call.hear()
        call.say(message)
        assert call.hear().reason == "malformed"


def test_a_batch_without_a_message_ends_the_call(server: HubServer) -> None:
    with Call(server) as call:
        call.hear()
        call.writer.write_batch(rows(0, 1))
        assert call.hear().reason == "malformed"


@pytest.mark.parametrize("opening", [b"", b"garbage", b"\xff" * 100, ingest.encode(Opening(9, "client", 0, [ShippedLog(0, LOG, 0)]))])
def test_an_opening_that_can_not_be_is_refused(server: HubServer, root: Path, opening: bytes) -> None:
    with Call(server, opening) as call:
        refused = call.hear()
        assert (refused.reason, refused.index) == ("malformed", -1)
    assert [each.name for each in root.iterdir()] == [".hub"]
    assert server.clients.all() == []


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(opening=st.binary(max_size=100), message=st.binary(max_size=100))
def test_whatever_a_stranger_says_the_hub_continues(server: HubServer, opening: bytes, message: bytes) -> None:
    for said in (opening, OPENING):
        with Call(server, said) as call:
            with suppress(pa.ArrowException, OSError):
                call.say(message)
                call.end()
    with Call(server) as call:
        assert isinstance(call.hear(), Opened)


def test_a_client_that_asks_for_nothing_is_notified_all_the_same(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.server.ingest.UNASKED", 1000)
    with Call(server) as call:
        call.hear()
        for number in range(100):
            call.put(Put(0, number, number, 100, False), rows(number, number + 1))
        assert call.hear().asked == 0


def test_only_its_own_shards_are_remembered_of_what_a_client_says(server: HubServer) -> None:
    with Call(server) as call:
        call.hear()
        call.say(Ping({number: 5 for number in range(1024)}))
        call.hear()
        assert {index: said.end for index, said in server.clients.of("client").ends.items()} == {0: 5}


TWO = Opening(ingest.VERSION, "client", 1, [ShippedLog(0, LOG, 0), ShippedLog(1, OTHER, 0)])


@pytest.mark.parametrize(("number", "reason"), [(errno.EIO, "damaged"), (errno.EMFILE, "full")])
def test_a_shard_that_can_not_be_opened_is_refused_and_the_other_one_continues(
    server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    take = server.store.take

    def failing(client: str, bits: int, index: int) -> Any:
        if index == 0:
            raise OSError(number, os.strerror(number))
        return take(client, bits, index)

    monkeypatch.setattr(server.store, "take", failing)
    with Call(server, TWO) as call:
        assert call.hear().places == [ingest.ResumePoint(1, 0, False)]
        refused = call.hear()
        assert (refused.reason, refused.index) == (reason, 0)
        call.put(Put(1, 0, 0, 3, True), rows(0, 3))
        assert call.hear() == Acknowledged([(1, 3)], 1)
        call.say(Done())
        call.end()
    assert list(stored(root / "client.1.001")) == [0, 1, 2]


def test_a_shard_that_a_flush_refuses_while_a_batch_of_it_waits_is_refused_and_no_more(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting, has_refused = threading.Event(), threading.Event()
    real_admit, real_refuse = Admission.admit, IngestSession._refuse

    def admit(self: Admission, size: int) -> float:
        """Wait until the flush of the batch before was refused."""
        pause = real_admit(self, size)
        if waits:
            is_waiting.set()
            assert has_refused.wait(30)
        waits.append(size)
        return pause

    def refuse(self: IngestSession, *arguments: Any) -> Any:
        refused = real_refuse(self, *arguments)
        has_refused.set()
        return refused

    def fail(self: Shard) -> None:
        if self.path.name == "client.1.000":
            assert is_waiting.wait(30)
            raise Poisoned("the disk fails")

    waits: list[int] = []
    monkeypatch.setattr(Admission, "admit", admit)
    monkeypatch.setattr(IngestSession, "_refuse", refuse)
    monkeypatch.setattr(Shard, "sync", fail)
    with HubServer(root, level="disk") as server, Call(server, TWO) as call:
        call.hear()
        call.put(Put(0, 0, 0, 3, True), rows(0, 2))
        call.put(Put(0, 2, 2, 3, True), rows(2, 3))
        call.put(Put(1, 0, 0, 3, True), rows(0, 3))
        said = [call.hear()]
        while not (isinstance(said[-1], Acknowledged) and said[-1].asked == 3):
            said.append(call.hear())
        assert {(one.reason, one.index) for one in said if isinstance(one, Refused)} == {("damaged", 0)}
        assert (1, 3) in {place for one in said if isinstance(one, Acknowledged) for place in one.places}


def test_a_new_call_of_a_client_supersedes_its_old_one(server: HubServer) -> None:
    with Call(server) as old:
        assert isinstance(old.hear(), Opened)
        with Call(server) as new:
            assert isinstance(new.hear(), Opened)
            new.put(Put(0, 0, 0, 3, True), rows(0, 3))
            assert new.hear() == Acknowledged([(0, 3)], 1)
            refused = old.hear()
            assert isinstance(refused, Refused) and refused.reason == "full" and "another call" in refused.message
            assert refused.retry_after == 1.0
            with pytest.raises(flight.FlightError, match="another call"):
                old.hear()
            new.put(Put(0, 3, 3, 5, True), rows(3, 5))
            assert new.hear() == Acknowledged([(0, 5)], 2)


def test_a_call_that_is_cancelled_as_it_ends_gives_its_shards_back(server: HubServer) -> None:
    go_on = threading.Event()
    with Call(server) as call:
        assert isinstance(call.hear(), Opened)
        (job,) = server.listener.slots._jobs
        pool = cast(WorkerPool, server.listener.pool)
        for _ in range(server.listener.limits.threads):
            pool.submit(go_on.wait)
        try:
            eventually(lambda: not pool._waiting)
            call.writer.done_writing()
            eventually(lambda: len(pool._waiting) == 1)
            call.reader.cancel()
            eventually(job.call.cancelled.is_set)
        finally:
            go_on.set()
        eventually(lambda: not server.store._used)


def test_a_call_that_is_refused_as_it_begins_is_forgotten(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> None:
        raise HubFull("no space")

    monkeypatch.setattr(server.space, "admit", full)
    with Call(server) as call:
        assert isinstance(call.hear(), Refused)
    eventually(lambda: not server.listener.stats().calls)
    assert not server.clients.of("client")._calls


def test_a_superseded_call_counts_no_longer(server: HubServer) -> None:
    with Call(server) as old:
        assert isinstance(old.hear(), Opened)
        meter = server.meters.of("anonymous", UNLIMITED)
        before = meter.calls
        with Call(server) as new:
            assert isinstance(new.hear(), Opened)
            eventually(lambda: meter.calls == before == 1)


def test_refused_calls_are_repeated_one_after_the_other_and_one_slow_call_is_no_rule() -> None:
    clock = StoppedClock()
    with system.replaced(clock):
        openings = Openings(most=1)
        with openings.admitted():
            waits = []
            for _ in range(500):
                with pytest.raises(HubFull) as caught, openings.admitted():
                    pass
                waits.append(caught.value.retry_after or 0.0)
            clock.pass_(60.0)
        assert waits == sorted(waits) and waits[0] == 1.0 and 2.4 < waits[-1] < 2.6
        with openings.admitted(), pytest.raises(HubFull) as caught, openings.admitted():
            pass
        assert caught.value.retry_after == 1.0


def test_refused_calls_of_a_large_crowd_do_not_all_return_at_once() -> None:
    clock = StoppedClock()
    with system.replaced(clock):
        ours = Openings()
        with ExitStack() as others:
            others.enter_context(ours.admitted())  # it is never idle
            for _ in range(200):
                with ours.admitted():
                    clock.pass_(1.0)
            while len(ours) < MOST:
                others.enter_context(ours.admitted())
            waits = []
            for _ in range(2000):
                with pytest.raises(HubFull) as caught, ours.admitted():
                    pass
                waits.append(caught.value.retry_after or 0.0)
        assert waits[:100] == sorted(waits[:100])
        last = waits[1000:]
        assert LONGEST_WAIT / 3 <= min(last) < LONGEST_WAIT / 2 < max(last) <= LONGEST_WAIT


def test_a_call_that_could_not_be_opened_for_long_is_refused_before_its_client_gives_up(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings, "PATIENCE", 0.1)
    slots, server.openings.slots = server.openings.slots, asyncio.Semaphore(0)
    with Call(server) as late:
        refused = late.hear()
        assert isinstance(refused, Refused) and refused.reason == "full"
        assert refused.retry_after is not None and refused.retry_after >= 1
    assert (server.openings.refused, len(server.openings)) == (1, 0)
    server.openings.slots = slots
    with Call(server) as later:
        assert isinstance(later.hear(), Opened)


def test_records_of_opened_calls_are_stored_while_others_wait_to_be_opened(server: HubServer) -> None:
    with Call(server) as opened:
        assert isinstance(opened.hear(), Opened)
        slots = server.openings.slots = asyncio.Semaphore(0)
        with Call(server, Opening(1, "other", 0, [ShippedLog(0, LOG, 0)])) as waiting:
            eventually(lambda: len(server.openings) == 1)
            opened.put(Put(0, 0, 0, 3, True), rows(0, 3))
            assert opened.hear() == Acknowledged([(0, 3)], 1)
            server.listener.run_soon(slots.release)
            assert isinstance(waiting.hear(), Opened)


def test_a_client_that_heard_nothing_for_long_gets_an_acknowledgement_without_a_question(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.server.ingest.UNHEARD", 0.0)
    with Call(server) as call:
        assert isinstance(call.hear(), Opened)
        call.put(Put(0, 0, 0, 9, False), rows(0, 3))
        assert call.hear() == Acknowledged([(0, 3)], 0)


def test_calls_beyond_those_that_can_be_opened_soon_are_refused_with_a_time_to_retry(server: HubServer, root: Path) -> None:
    server.openings._most = 1
    with server.openings.admitted(), Call(server) as late:
        refused = late.hear()
        assert isinstance(refused, Refused) and refused.reason == "full"
        assert refused.retry_after is not None and refused.retry_after >= 1
    assert os.listdir(root) == [".hub"], "nothing was done for it"
    assert (server.openings.refused, len(server.openings)) == (1, 0)
    with Call(server) as later:
        assert isinstance(later.hear(), Opened)
