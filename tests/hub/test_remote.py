"""A hub that is read from another host: tables and batches that are whole or errors with a type."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyarrow import flight
from serving import HubServer

import hub
import kvspool
from hub.client.remote import RemoteHub
from hub.errors import (
    Conflict,
    Fenced,
    HubFull,
    Malformed,
    NotAllowed,
    NotFound,
    QuotaExceeded,
    Restored,
    ShardDamaged,
    Unexpected,
    Unreachable,
)
from hub.protocol import reading
from hub.server.authentication import Standing
from kvspool import arrow
from kvspool.errors import Closed, GapError, OutOfRange
from kvspool.journal.format import JournalBatch
from kvspool.record import Gap


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root with one client of two shards, and one with a Gap."""
    hub.create(tmp_path / "hub").close()
    for name in ("JFK.1.000", "JFK.1.001"):
        with kvspool.create(tmp_path / "hub" / name, format="kvj") as log:
            for number in range(10):
                log.append(f"{name} {number}", timestamp=1_000_000_000 * number)
    with kvspool.create(tmp_path / "hub" / "EWR", format="kvj") as log:
        log.append_many([b"a", b"b"])
        log.append_batch(JournalBatch([b"c"]), at=9)
    return tmp_path / "hub"


@pytest.fixture
def server(root: Path) -> Iterator[HubServer]:
    """A hub that serves the root."""
    with HubServer(root) as server:
        yield server


@pytest.fixture
def remote(server: HubServer) -> Iterator[RemoteHub]:
    """That hub, seen from elsewhere."""
    with RemoteHub(server.location) as remote:
        yield remote


def test_a_hub_says_what_it_has(root: Path, remote: RemoteHub) -> None:
    assert remote.clients() == ["EWR", "JFK"]
    assert remote.clients("J*") == remote.clients("JFK") == ["JFK"]
    assert remote.clients("J") == []
    assert [(shard.shard, shard.bits, shard.first, shard.next) for shard in remote.shards("JFK")] == [(0, 1, 0, 10), (1, 1, 0, 10)]
    assert remote.server().level == "process"
    assert [shard.client for shard in remote.changes().shards] == ["EWR", "JFK", "JFK"]


def test_a_table_is_what_reading_the_log_gives(root: Path, remote: RemoteHub) -> None:
    with kvspool.open(root / "JFK.1.001") as log:
        assert remote.read_arrow("JFK", 1) == log.read_arrow()
    assert remote.read_arrow("JFK", 1, coded=True)["codec"].to_pylist() == [1] * 10
    assert remote.read_arrow("JFK", 0, "latest").num_rows == 0
    assert remote.read_arrow("JFK", 0, "latest").schema == arrow.SCHEMA


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"start": 3, "end": 5}, [3, 4]),
        ({"limit": 2}, [0, 1]),
        ({"start_time": 8_000_000_000}, [8, 9]),
        ({"start_time": datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC), "end_time": "1970-01-01T00:00:09Z"}, [7, 8]),
        ({"isolation": "synced", "end": 1}, [0]),
    ],
)
def test_a_range_is_read(remote: RemoteHub, asked: dict[str, Any], expected: list[int]) -> None:
    assert remote.read_arrow("JFK", 0, **asked)["sequence"].to_pylist() == expected


def test_a_gap_is_an_error_skipped_or_returned(remote: RemoteHub) -> None:
    with pytest.raises(GapError) as raised:
        remote.read_arrow("EWR", 0)
    assert (raised.value.gap.first, raised.value.gap.last, raised.value.gap.reason) == (2, 8, "missing")
    assert remote.location in str(raised.value)
    assert raised.value.partial["sequence"].to_pylist() == [0, 1]
    assert remote.read_arrow("EWR", 0, 9)["sequence"].to_pylist() == [9]
    assert remote.read_arrow("EWR", 0, on_gap="skip")["sequence"].to_pylist() == [0, 1, 9]
    items = list(remote.batches("EWR", 0))
    assert [item.count if isinstance(item, Gap) else item.num_rows for item in items] == [2, 7, 1]
    with pytest.raises(ValueError, match="cannot hold a Gap"):
        remote.read_arrow("EWR", 0, on_gap="yield")  # type: ignore[arg-type]


def test_records_are_read_as_those_of_a_log(root: Path, remote: RemoteHub) -> None:
    with hub.open(root) as local:
        records = [record for record in local.read(on_gap="skip") if (record.client, record.shard) == ("JFK", 1)]
        assert list(remote.read("JFK", 1)) == records
        assert list(remote.read_values("JFK", 1)) == [record.value for record in records]
        assert [remote.get("JFK", 1, number) for number in range(10)] == records == [local.get("JFK", 1, number) for number in range(10)]
    late = datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC)
    for start, end in ((7, 10), ("latest", 0), (late, 10)):
        assert [record.sequence for record in remote.read("JFK", 0, start)] == list(range(7, end))
        assert remote.read_arrow("JFK", 0, start)["sequence"].to_pylist() == list(range(7, end))
    assert [record.sequence for record in remote.read("JFK", 0, limit=3, isolation="synced")] == [0, 1, 2]
    for wrong in ({"limit": -1}, {"on_gap": "ignore"}, {"isolation": "committed"}):
        with pytest.raises(ValueError):
            remote.read("JFK", 0, **wrong)  # type: ignore[arg-type]
    for sequence in (10, 11):
        with pytest.raises(OutOfRange):
            remote.get("JFK", 0, sequence)


def test_a_gap_between_records_is_an_error_skipped_or_returned(remote: RemoteHub) -> None:
    with remote.read("EWR", 0) as reading:
        assert [next(reading).value, next(reading).value] == [b"a", b"b"]
        with pytest.raises(GapError):
            next(reading)
        assert next(reading).value == b"c"
        assert reading.missed == 7
    assert list(reading) == []
    assert [record.sequence for record in remote.read("EWR", 0, on_gap="skip")] == [0, 1, 9]
    assert [item.count for item in remote.read_values("EWR", 0, on_gap="yield") if isinstance(item, Gap)] == [7]
    with pytest.raises(GapError):
        remote.get("EWR", 0, 5)


def test_every_call_of_a_closed_connection_raises_closed(remote: RemoteHub) -> None:
    reading = remote.read("JFK", 0)
    next(reading)
    remote.close()
    remote.close()
    assert remote.closed
    for call in (remote.server, remote.clients, lambda: remote.shards("JFK"), lambda: remote.read_arrow("JFK", 0), remote.readers):
        with pytest.raises(Closed):
            call()


def test_errors_have_types(remote: RemoteHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound):
        remote.read_arrow("LGA", 0)
    with pytest.raises(NotFound):
        remote.shards("LGA")
    with pytest.raises(Unexpected) as raised:
        remote.read_arrow("JFK", 0, 11)
    assert raised.value.expected == 10
    with pytest.raises(Malformed, match="a client.s id may have only"):
        remote.read_arrow("../JFK", 0)
    with pytest.raises(Malformed):
        remote.changes("", 31)
    with pytest.raises(ValueError, match="zone"):
        remote.read_arrow("JFK", 0, start_time=datetime(2026, 1, 1))
    for right in ("may_read", "may_list"):
        monkeypatch.setattr(Standing, right, lambda self, name: False)
    for client in ("JFK", "LGA"):
        with pytest.raises(NotAllowed):
            remote.read_arrow(client, 0)
        with pytest.raises(NotAllowed):
            remote.shards(client)
    assert remote.clients() == []


def test_an_error_of_a_damaged_shard_has_the_records_before_the_damage(root: Path, remote: RemoteHub) -> None:
    (segment,) = (root / "JFK.1.000" / "kvj").iterdir()
    data = bytearray(segment.read_bytes())
    data[-2] ^= 0xFF
    segment.write_bytes(data)
    rows = 0
    with pytest.raises(ShardDamaged):
        for batch in remote.batches("JFK", 0):
            rows += batch.num_rows
    assert rows == 9
    with pytest.raises(ShardDamaged) as raised:
        remote.read_arrow("JFK", 0)
    assert raised.value.partial["sequence"].to_pylist() == list(range(9))
    with pytest.raises(ShardDamaged) as raised:
        remote.read_arrow("JFK", 0, coded=True)
    assert raised.value.partial.schema == arrow.CODED_SCHEMA
    assert raised.value.partial.num_rows == 9


def test_an_address_without_a_server_is_unreachable() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        location = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        with RemoteHub(location, timeout=5) as remote:
            for call in (remote.server, remote.clients, remote.changes, lambda: remote.shards("JFK"), lambda: remote.read_arrow("JFK", 0)):
                with pytest.raises(Unreachable):
                    call()


@pytest.mark.parametrize("location", ["hub", "http://hub:80", "grpc://user@hub:80", "grpc://hub"])
def test_what_is_no_location_is_refused(location: str) -> None:
    with pytest.raises(ValueError, match="a hub is"):
        RemoteHub(location)


SERVE = """
import sys, time
from hub.server.server import HubServer
from hub.security.access import Access
server = HubServer(sys.argv[1], access=Access.anonymous(), least_free=1 << 20, listen=('127.0.0.1', 0))
server.start()
print(server.location, flush=True)
time.sleep(600)
"""


def test_a_hub_that_crashes_during_a_read_gives_an_error_and_no_short_table(root: Path) -> None:
    with kvspool.create(root / "LGA", format="sej") as log:
        for _ in range(64):
            log.append_many([b"x" * 10_000] * 100)
    with subprocess.Popen([sys.executable, "-c", SERVE, str(root)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        with RemoteHub(child.stdout.readline().strip()) as remote:
            batches = remote.batches("LGA", 0)
            next(batches)
            child.send_signal(signal.SIGKILL)
            child.wait()
            with pytest.raises(Unreachable):
                for _ in batches:
                    pass


class Short(flight.FlightServerBase):  # type: ignore[misc]
    """Ends its streams without a word, as what stands between a client and a hub may do."""

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        return flight.GeneratorStream(arrow.SCHEMA, iter([]))


def test_a_stream_that_ends_without_a_word_was_cut() -> None:
    with Short("grpc://127.0.0.1:0") as server, RemoteHub(f"grpc://127.0.0.1:{server.port}") as remote:
        with pytest.raises(Unreachable, match="cut"):
            remote.read_arrow("JFK", 0)


def test_a_stream_that_takes_too_long_is_cut(root: Path, server: HubServer, remote: RemoteHub) -> None:
    with kvspool.create(root / "LGA", format="sej") as log:
        for _ in range(64):
            log.append_many([b"x" * 10_000] * 100)
    batches = remote.batches("LGA", 0, timeout=0.2)
    next(batches)
    with pytest.raises(Unreachable):
        for _ in batches:
            time.sleep(0.01)


class Endless(flight.FlightServerBase):  # type: ignore[misc]
    """Sends one record, and the next one when `is_over` is set."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.is_over = threading.Event()

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        def batches() -> Iterator[Any]:
            row = {"sequence": [0], "timestamp": [0], "type": [0], "key": [None], "value": [b""]}
            yield pa.RecordBatch.from_pydict(row, schema=arrow.SCHEMA)
            self.is_over.wait()

        return flight.GeneratorStream(arrow.SCHEMA, batches())


def test_closing_the_connection_ends_a_stream_that_another_thread_waits_for() -> None:
    errors: list[Exception] = []
    first = threading.Event()

    def read(remote: RemoteHub) -> None:
        try:
            for _ in remote.batches("JFK", 0):
                first.set()
        except Exception as error:
            errors.append(error)

    with Endless("grpc://127.0.0.1:0") as server:
        remote = RemoteHub(f"grpc://127.0.0.1:{server.port}")
        thread = threading.Thread(target=read, args=(remote,), daemon=True)
        thread.start()
        try:
            assert first.wait(60)
            remote.close()
            thread.join(60)
            assert not thread.is_alive()
        finally:
            server.is_over.set()  # or its shutdown waits for the stream
    (error,) = errors
    assert isinstance(error, Closed) and remote.location in str(error)


def test_every_error_of_a_hub_has_a_word_on_the_wire() -> None:
    kinds = [Malformed, NotAllowed, HubFull, QuotaExceeded, Conflict, Fenced, Restored, ShardDamaged, NotFound]
    for error in [*(kind("why") for kind in kinds), Unexpected("why", 7)]:
        told = reading.error_in(msgspec.json.encode(reading.failure(error)))
        assert type(told) is type(error)
        assert str(told) == "why"
        assert getattr(told, "expected", -1) == getattr(error, "expected", -1)
        assert getattr(told, "retry_after", -1) == getattr(error, "retry_after", -1)
    assert reading.error_in(b"") is reading.error_in(b"\xff") is reading.error_in(b"[]") is reading.error_in(None) is None


class Lying(flight.FlightServerBase):  # type: ignore[misc]
    """Sends a batch that no hub would send, with some metadata."""

    def __init__(self, columns: dict[str, pa.Array], beside: bytes = b"{}") -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema([arrow.SCHEMA.field(name) for name in columns]))
        self.beside = beside

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        return flight.GeneratorStream(self.batch.schema, iter([(self.batch, self.beside)]))


VALUES = pa.array([b"a", b"b", b"c"], pa.binary())
BROKEN = pa.Array.from_buffers(pa.binary(), 3, [None, pa.py_buffer(struct.pack("4i", 0, 9_000_000, 1, 2)), pa.py_buffer(b"abc")])


@pytest.mark.parametrize(
    ("columns", "beside"),
    [
        ({"sequence": pa.array([1, 3, 4]), "value": VALUES}, b"{}"),
        ({"sequence": pa.array([1, None, 3]), "value": VALUES}, b"{}"),
        ({"sequence": pa.array([None, 2, 3]), "value": VALUES}, b"{}"),
        ({"sequence": pa.array([-1, 0, 1]), "value": VALUES}, b"{}"),
        ({"sequence": pa.array([1, 2, 3]), "value": BROKEN}, b"{}"),
        ({"sequence": pa.array([1, 2, 3]), "value": pa.array([b"a", None, b"c"], pa.binary())}, b"{}"),
        ({"value": VALUES}, b"{}"),
        ({"value": VALUES}, b'{"first": -1}'),
        ({"value": VALUES}, b'{"first": 9223372036854775805}'),
        ({"value": VALUES}, b'{"first": "1"}'),
        ({"type": pa.array([1, 2, 3], pa.int32())}, b'{"first": 1}'),
    ],
)
def test_a_batch_that_no_hub_would_send_is_refused(columns: dict[str, pa.Array], beside: bytes) -> None:
    ticket = reading.Ticket("JFK", columns=[*columns] if "value" in columns else ["value"])
    with Lying(columns, beside) as server, RemoteHub(f"grpc://127.0.0.1:{server.port}") as remote, pytest.raises(Malformed):
        list(remote.items(ticket))
