"""The calls, threads and memory that clients can take from a hub are bounded, and end with their connections."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults import CountingPort
from processes_of_a_hub import ServeCommand
from pyarrow import flight
from raw_http2 import RawClient, ticket
from serving import HubServer
from shipping import LOG, PATIENCE

import hub
import kvspool
from hub.client.connection import Security
from hub.client.remote import RemoteHub
from hub.protocol import ingest, reading
from hub.protocol.ingest import Opening, ShippedLog
from hub.server.limits import Limits
from hub.server.read_service import ReadService
from kvspool import system
from kvspool.journal.cursor import CHUNK

SERVER = b"\x0a\x06server"  # the action that asks what a hub is
FEW = 40  # threads of a hub: its workers, its flushes, the listener, the housekeeping; those of Arrow, and of gRPC for the probe, vary

pytestmark = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="the twins have nothing to do with calls")


def until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def threads_of(pid: int) -> int:
    """Return how many threads a process has."""
    return int(Path(f"/proc/{pid}/status").read_text(encoding="ascii").split("Threads:")[1].split()[0])


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """An access file with two principals, and their tokens."""
    from kvspool.cli import main

    found = {}
    for name in ("attacker", "reader"):
        path = tmp_path / f"{name}.token"
        words = ["hub", "token", "add", tmp_path / "access.toml", "--name", name, "--read", "*", "--output", path]
        assert main([str(word) for word in words]) == 0
        found[name] = path.read_text().strip()
    return found


def serve(tmp_path: Path, *words: object) -> ServeCommand:
    return ServeCommand(tmp_path / "root", "--access", tmp_path / "access.toml", "--least-free", "1MiB", *words)


def serves(hub: ServeCommand, tokens: dict[str, str]) -> bool:
    """Return whether the reader gets an answer on a new connection."""
    with RemoteHub(hub.location, security=Security(token=tokens["reader"])) as remote:
        return remote.clients() == []


def calls_of(server: HubServer) -> int:
    return server.listener.stats().calls


# Calls without a message.


def test_calls_without_a_message_take_no_thread(tmp_path: Path, tokens: dict[str, str]) -> None:
    with serve(tmp_path) as hub:
        assert serves(hub, tokens)
        pid = hub.process.pid
        with ExitStack() as stack:
            for _ in range(8):
                attacker = stack.enter_context(RawClient(hub.location, tokens["attacker"]))
                attacker.ask("DoAction", SERVER)
                attacker.begin("DoExchange", 60)
            for _ in range(5):
                assert serves(hub, tokens)
                assert threads_of(pid) <= FEW
        assert serves(hub, tokens)
        assert threads_of(pid) <= FEW


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_calls_beyond_the_streams_of_a_connection_are_refused_and_others_are_served(
    tmp_path: Path, tokens: dict[str, str], is_known: bool
) -> None:
    with serve(tmp_path) as hub, RemoteHub(hub.location, security=Security(token=tokens["reader"])) as remote:
        assert remote.clients() == []
        with RawClient(hub.location, tokens["attacker"]) as attacker, pytest.raises(OSError):
            if is_known:
                attacker.ask("DoAction", SERVER)
            for _ in range(1000):
                attacker.begin("DoExchange", 500)
                assert remote.clients() == []
        assert remote.clients() == []
        assert threads_of(hub.process.pid) <= FEW


def test_connections_of_a_principal_are_limited_whatever_their_addresses(root: Path) -> None:
    limits = Limits(connections_per_principal=2)
    with HubServer(root, limits=limits) as server, ExitStack() as stack:
        for _ in range(2):
            assert stack.enter_context(RemoteHub(server.location)).clients() == []
        with flight.FlightClient(server.location) as third, pytest.raises(flight.FlightUnavailableError, match="2 connections, which is"):
            list(third.list_flights())
        stack.close()
        until(lambda: server.listener.stats().open == 0)
        with RemoteHub(server.location) as remote:
            assert remote.clients() == []


def test_a_call_of_a_shipper_that_waits_for_messages_ends_with_its_connection(root: Path) -> None:
    with HubServer(root) as server:
        client = flight.FlightClient(server.location)
        opening = ingest.encode(Opening(ingest.VERSION, "jfk", 0, [ShippedLog(0, LOG, 1)]))
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(opening))
        writer.write_metadata(ingest.encode(ingest.Ping({})))
        until(lambda: server.clients.of("jfk").connections == 1)
        reader.cancel()
        with pytest.raises(flight.FlightError):
            writer.close()
        client.close()
        until(lambda: calls_of(server) == server.clients.of("jfk").connections == 0)


def test_a_call_that_waits_for_changes_ends_with_its_connection(root: Path) -> None:
    with HubServer(root) as server, RawClient(server.location) as client:
        body = b'{"wait": 30}'
        client.call("DoAction", b"\x0a\x07changes\x12" + bytes([len(body)]) + body, 20)
        until(lambda: len(server.read_service.index._waiting) == 20)
        client.close()
        until(lambda: calls_of(server) == 0, 20)
        assert not server.read_service.index._waiting


def test_calls_that_wait_leave_the_threads_to_others(root: Path) -> None:
    limits = Limits(threads=1)
    with HubServer(root, limits=limits) as server, ExitStack() as stack:
        body = b'{"wait": 30}'
        client = stack.enter_context(RawClient(server.location))
        client.call("DoAction", b"\x0a\x07changes\x12" + bytes([len(body)]) + body, 20)
        until(lambda: len(server.read_service.index._waiting) == 20)
        for number in range(20):
            call = stack.enter_context(flight.FlightClient(server.location))
            opening = Opening(ingest.VERSION, f"client-{number}", 0, [ShippedLog(0, LOG, 1)])
            stack.enter_context(call.do_exchange(flight.FlightDescriptor.for_command(ingest.encode(opening)))[0])
        until(lambda: sum(client.connections for client in server.clients.all()) == 20)
        with RemoteHub(server.location) as remote:
            until(lambda: len(remote.clients()) == 20)


# Streams that no client reads.

RECORD = 8 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root."""
    hub.create(tmp_path / "root").close()
    return tmp_path / "root"


@pytest.fixture
def large(root: Path) -> Iterator[Path]:
    """A hub root with a client of two large records."""
    with kvspool.create(root / "jfk", format="kvj") as log:
        for _ in range(2):
            log.append(b"x" * RECORD)
    yield root


def test_unread_streams_hold_bounded_memory_and_end_with_their_connections(large: Path) -> None:
    streams = 40
    limits = Limits(unsent_bytes=8 * RECORD, stall_seconds=10 * PATIENCE)  # no call ends because it isn't read
    with (
        system.replaced(CountingPort()) as port,
        HubServer(large, limits=limits, largest_batch=RECORD) as server,
        RawClient(server.location) as client,
    ):
        assert isinstance(port, CountingPort)
        client.call("DoGet", ticket(b'{"client": "jfk"}'), streams)
        until(lambda: calls_of(server) == streams and server.listener.stats().unsent_memory > RECORD)
        client.close()
        until(lambda: calls_of(server) == 0)
        assert server.listener.stats().unsent_memory == 0
        assert port.count < 8 * RECORD + streams * 2 * CHUNK, "a record is read only with memory for it"


def test_a_search_through_a_log_looks_at_its_client_between_batches(root: Path) -> None:
    with kvspool.create(root / "jfk", format="kvj") as log:
        log.append_many([b"x" * (1 << 20)] * 16, timestamp=1)
    parts = ReadService(root, "process")._stream(
        root / "jfk", reading.decode_ticket(b'{"client": "jfk", "start_time": 2}'), lambda client: True, 1 << 30
    )
    found = [bool(part.pieces) for part in parts]
    assert found == [True, *[False] * (len(found) - 2), True], "the schema, nothing for each 2 MiB at most, the end"
    assert len(found) >= 10


def test_readers_continue_next_to_others_that_take_nothing(large: Path) -> None:
    limits = Limits(unsent_bytes=3 * RECORD, stall_seconds=0.5)
    with HubServer(large, limits=limits, largest_batch=RECORD) as server, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(server.location)) for _ in range(8)]
        for client in clients:
            client.call("DoGet", ticket(b'{"client": "jfk"}'), 1)
        until(lambda: server.listener.stats().unsent_memory >= RECORD)
        with RemoteHub(server.location) as remote:
            assert remote.read_arrow("jfk", 0).num_rows == 2


def test_memory_of_the_process_is_bounded_whatever_is_not_read(tmp_path: Path) -> None:
    def most() -> int:
        told = Path(f"/proc/{hub.process.pid}/status").read_text(encoding="ascii")
        return int(told.split("VmHWM:")[1].split()[0]) << 10

    words = ("--anonymous", "--least-free", "1MiB", "--memory", "128MiB", "--largest-batch", "16MiB")
    with (
        ServeCommand(tmp_path / "root", *words) as hub,
        kvspool.create(tmp_path / "root" / "jfk", format="kvj") as log,
        ExitStack() as stack,
    ):
        log.append(b"x" * RECORD)
        with RemoteHub(hub.location) as remote:
            assert remote.read_arrow("jfk", 0).num_rows == 1
        before = most()
        clients = [stack.enter_context(RawClient(hub.location)) for _ in range(4)]
        for client in clients:
            client.call("DoGet", ticket(b'{"client": "jfk"}'), 60)
        until(lambda: most() > before + RECORD)
        with RemoteHub(hub.location) as remote:
            until(lambda: remote.read_arrow("jfk", 0).num_rows == 1)
        for client in clients:
            client.close()
        assert most() < before + (128 << 20) + Limits().threads * 2 * RECORD, "and what the threads are working with"
        assert threads_of(hub.process.pid) <= FEW
