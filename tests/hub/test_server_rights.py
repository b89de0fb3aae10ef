"""Limits that a server enforces at each call and batch: rights, quotas, room on the disk; and new certificates."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from clocks import StoppedClock
from pyarrow import flight

import hub
import kvspool
from hub.client.connection import Connection, Security, call_options
from hub.client.remote import RemoteHub
from hub.errors import HubFull, NotAllowed, QuotaExceeded
from hub.protocol.ingest import Opening, Put, ShippedLog
from hub.root import columns
from hub.security import authority
from hub.security.access import Access
from hub.security.certificates import Certificates
from hub.security.quotas import Quota
from hub.server.event_log import LINES
from hub.server.limits import Limits, Reason
from hub.server.server import HubServer
from kvspool import system
from kvspool.cli import main

pytestmark = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers are tested with the compiled twin")
LOG = b"a" * 16
PATIENCE = 30.0  # seconds after which a test gives up


def batch(size: int = 100) -> pa.RecordBatch:
    """One record, as a shipper sends it."""
    values = [[1], [1], [b"k"], [b"x" * size], [0]]
    arrays = [pa.array(value, field.type) for value, field in zip(values, columns.SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns.SCHEMA)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    hub.create(tmp_path / "root").close()
    return tmp_path / "root"


@pytest.fixture
def access(tmp_path: Path) -> Path:
    """An access file with a token for jfk, in jfk.token, and a quota of 100 KiB."""
    path = tmp_path / "access.toml"
    assert main(["hub", "token", "add", str(path), "--name", "jfk", "--output", str(tmp_path / "jfk.token")]) == 0
    path.write_text(path.read_text() + '\n[quota]\nbytes = "100KiB"\n')
    return path


@pytest.fixture
def security(access: Path, tmp_path: Path) -> Security:
    return Security(token=(tmp_path / "jfk.token").read_text().strip())


@pytest.fixture
def server(root: Path, access: Path, security: Security) -> Iterator[HubServer]:
    server = HubServer(root, access=Access.load(access), listen=("127.0.0.1", 0), least_free=0).start()
    yield server
    server.close(grace=0.1)


def connection(server: HubServer, client: str, security: Security, end: int = 0) -> Connection:
    """Open a call for a log that has `end` records."""
    return Connection(server.location, security, Opening(1, client, 0, [ShippedLog(0, LOG, end)]))


def send(call: Connection, number: int, size: int = 100) -> None:
    """Send record `number`, and wait for the answer."""
    call.put(Put(0, number, number, number + 1, True), batch(size))
    while call.is_owed and not call.refused:
        call.hear()


def test_a_client_ships_its_own_id_alone(server: HubServer, root: Path, security: Security) -> None:
    with connection(server, "jfk", security) as call:
        send(call, 0)
        assert (call.stored, call.refused) == ({0: 1}, {})
    for client in ("lga", "jf", "jfkx"):
        with pytest.raises(NotAllowed):
            connection(server, client, security)
    assert sorted(path.name for path in root.iterdir()) == [".hub", "jfk"]


def test_a_right_that_is_taken_away_ends_with_the_next_batches(
    server: HubServer, access: Path, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.server.authentication.RENEWAL", 0.0)
    monkeypatch.setattr("hub.security.access.INTERVAL", 0.0)
    with connection(server, "jfk", security) as call:
        send(call, 0)
        assert security.token is not None
        assert main(["hub", "token", "revoke", str(access), security.token.split("_")[1]]) == 0
        with pytest.raises(NotAllowed):
            for number in range(1, 500):
                send(call, number)
                if call.refused:
                    raise call.refused[0]
                time.sleep(0.02)
    with pytest.raises(NotAllowed):
        connection(server, "jfk", security)
    stored = server.store.sizes()["jfk"][0].next
    assert stored < 500


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub look at the access file, and at who makes a call, each time; comes before the hub."""
    monkeypatch.setattr("hub.server.authentication.RENEWAL", 0.0)
    monkeypatch.setattr("hub.security.access.INTERVAL", 0.0)


@pytest.fixture
def reading(watchful: None, access: Path, tmp_path: Path) -> Security:
    """Return the security of a client with permission to read jfk."""
    token = tmp_path / "spark.token"
    assert main(["hub", "token", "add", str(access), "--name", "spark", "--output", str(token), "--role", "reader", "--read", "jfk"]) == 0
    return Security(token=token.read_text().strip())


def revoke(access: Path, security: Security) -> None:
    assert security.token is not None
    assert main(["hub", "token", "revoke", str(access), security.token.split("_")[1]]) == 0


def take_right(access: Path, security: Security) -> None:
    access.write_text(access.read_text().replace('read = ["jfk"]', "read = []"))


@pytest.mark.parametrize("lose", [revoke, take_right])
def test_who_loses_the_right_to_read_gets_the_batches_that_are_under_way_and_no_more(
    lose: Callable[[Path, Security], None], reading: Security, server: HubServer, root: Path, access: Path
) -> None:
    count = 100
    with kvspool.create(root / "jfk", format="kvj") as log:
        for _ in range(count):
            log.append(b"x" * (1 << 20))
    with RemoteHub(server.location, security=reading) as remote:
        batches = remote.batches("jfk", 0)
        assert next(batches).num_rows
        lose(access, reading)
        with pytest.raises(NotAllowed):
            list(batches)
        with pytest.raises(NotAllowed):
            remote.read_arrow("jfk", 0)


def test_a_waiter_that_loses_the_right_to_read_gets_nothing(
    reading: Security, server: HubServer, root: Path, access: Path
) -> None:
    with kvspool.create(root / "jfk", format="kvj") as log, RemoteHub(server.location, security=reading) as remote:
        token = remote.changes().token
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(remote.changes, token, 20.0)
            until(lambda: server.meters.of("spark", Quota()).calls == 1)
            revoke(access, reading)
            log.append(b"secret")
            with pytest.raises(NotAllowed):
                waits.result(PATIENCE)


def test_flights_need_the_right_to_list_and_records_the_right_to_read(
    watchful: None, server: HubServer, root: Path, access: Path, security: Security, tmp_path: Path
) -> None:
    for client in ("jfk", "jfk-2", "lga", "ewr", "lga-secret"):
        kvspool.create(root / client, format="kvj").close()
    path = tmp_path / "operator.token"
    assert main(["hub", "token", "add", str(access), "--name", "operator", "--output", str(path), "--role", "admin"]) == 0
    with RemoteHub(server.location, security=Security(token=path.read_text().strip())) as operator:
        assert operator.clients() == ["ewr", "jfk", "jfk-2", "lga", "lga-secret"]
        for call in (lambda: operator.read_arrow("lga", 0), lambda: operator.shards("lga")):
            with pytest.raises(NotAllowed):
                call()
        assert operator.changes().shards == []
    with RemoteHub(server.location, security=security) as jfk:
        assert jfk.clients() == ["jfk", "jfk-2"]
        access.write_text(access.read_text().replace('name = "jfk"', 'name = "jfk"\nlist = ["lga*"]\ndeny = ["lga-secret"]', 1))
        assert jfk.clients() == ["jfk", "jfk-2", "lga"]


def test_reading_calls_are_counted_until_their_last_answer(
    reading: Security, server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.security.quotas.MOST_OF_CONNECTION", 4)
    meter = server.meters.of("spark", Quota())
    with kvspool.create(root / "jfk", format="kvj") as log:
        for _ in range(32):
            log.append(b"x" * (1 << 20))
    with RemoteHub(server.location, security=reading) as remote:
        streams = [remote.batches("jfk", 0) for _ in range(4)]
        for stream in streams:
            next(stream)
        assert meter.calls == 4
        for call in (lambda: next(remote.batches("jfk", 0)), remote.changes, remote.clients, lambda: remote.shards("jfk")):
            with pytest.raises(QuotaExceeded) as caught:
                call()
            assert caught.value.retry_after
        with RemoteHub(server.location, security=reading) as another:
            assert another.clients() == ["jfk"]
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        until(lambda: meter.calls == 0)
        assert remote.read_arrow("jfk", 0).num_rows == 32
        until(lambda: meter.calls == 0)


def test_the_quota_of_connections_is_held_during_a_read(
    reading: Security, server: HubServer, root: Path, access: Path
) -> None:
    access.write_text(access.read_text().replace("[quota]", "[quota]\nconnections = 1"))
    with kvspool.create(root / "jfk", format="kvj"), RemoteHub(server.location, security=reading) as remote:
        token = remote.changes().token
        with ThreadPoolExecutor(1) as pool, RemoteHub(server.location, security=reading) as another:
            waits = pool.submit(remote.changes, token, 20.0)
            until(lambda: server.meters.of("spark", Quota(bytes=102_400, connections=1)).calls == 1)
            with pytest.raises(QuotaExceeded, match="connections"):
                another.clients()
            assert remote.clients() == ["jfk"]
            server.read_service.close()  # waiters get an answer
            assert waits.result(PATIENCE).shards == []


@pytest.mark.parametrize("name", ["x\n2026-01-31 WARNING forged", "x" * 900_000], ids=["line", "long"])
def test_what_a_client_says_forges_no_line_of_the_log_and_does_not_come_back_at_length(
    server: HubServer, security: Security, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    opening = {"version": 1, "client": "jfk", "bits": 0, "logs": [], name: 1}
    with flight.FlightClient(server.location) as client:
        call = client.do_exchange(flight.FlightDescriptor.for_command(msgspec.msgpack.encode(opening)), call_options(security, PATIENCE))
        with suppress(pa.ArrowException, OSError):  # the hub may have ended the call already
            call[0].begin(columns.SCHEMA)
        try:
            told = call[1].read_chunk().app_metadata.to_pybytes()
        except flight.FlightError as error:
            told = error.extra_info
    assert 0 < len(told) < 1000
    (line,) = [record.getMessage() for record in caplog.records if "refused a call" in record.getMessage()]
    assert len(line) < 1000
    assert line.isprintable()


def test_a_flood_of_connections_does_not_flood_the_log(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with system.replaced(StoppedClock()) as clock, ExitStack() as ends:
        assert isinstance(clock, StoppedClock)
        server = HubServer(
            root, access=Access.anonymous(), listen=("127.0.0.1", 0), limits=Limits(connections=1), least_free=0
        ).start()
        ends.callback(server.close, 0.0)

        def dial(count: int) -> None:
            for _ in range(count):
                ends.enter_context(socket.create_connection(server.listener.address))

        dial(1)
        until(lambda: server.listener.stats().open == 1)
        dial(LINES + 7)
        until(lambda: server.listener.stats().refused.get(Reason.CONNECTIONS) == LINES + 7)
        assert len(caplog.records) == LINES
        clock.pass_(10)
        dial(1)
        until(lambda: len(caplog.records) == LINES + 2)
        told = [record.getMessage() for record in caplog.records[LINES:]]
        assert told[0] == "7 more refused or cut connections were not logged"
        assert told[1].endswith(Reason.CONNECTIONS)


@pytest.fixture
def narrow(root: Path) -> Iterator[HubServer]:
    """A hub that has memory for 8 MiB of received messages, and lets everybody in."""
    server = HubServer(
        root, access=Access.anonymous(), listen=("127.0.0.1", 0), limits=Limits(received_bytes=8 << 20), largest_batch=2 << 20, least_free=0
    ).start()
    yield server
    server.close(grace=0.1)


def test_requests_that_were_answered_count_no_more(narrow: HubServer) -> None:
    with flight.FlightClient(narrow.location) as client:
        for _ in range(40):
            assert len(list(client.do_action(flight.Action("server", b" " * (1 << 19))))) == 1


def test_a_reader_may_pause_between_two_batches(root: Path) -> None:
    count = 100
    with kvspool.create(root / "jfk", format="kvj") as log:
        for _ in range(count):
            log.append(b"x" * (1 << 20))
    limits = Limits(idle_seconds=0.2)
    with (
        HubServer(root, access=Access.anonymous(), listen=("127.0.0.1", 0), limits=limits, least_free=0) as server,
        RemoteHub(server.location) as remote,
    ):
        batches = remote.batches("jfk", 0)
        rows = next(batches).num_rows
        time.sleep(1)
        assert rows + sum(batch.num_rows for batch in batches) == count


def test_a_connection_ships_and_reads_without_a_limit_of_time(narrow: HubServer) -> None:
    with connection(narrow, "jfk", Security()) as call, RemoteHub(narrow.location) as remote:
        for number in range(20):
            send(call, number, 1 << 20)
        assert call.stored == {0: 20}
        assert remote.read_arrow("jfk", 0).num_rows == 20


def test_a_quota_is_held_batch_by_batch(server: HubServer, security: Security) -> None:
    with connection(server, "jfk", security) as call:
        send(call, 0, 60_000)
        send(call, 1, 60_000)
        assert isinstance(call.refused[0], QuotaExceeded)
        assert call.stored == {0: 1}
    assert server.status().clients[0].refused == {"quota": 1}


def test_who_sends_quicker_than_its_quota_is_refused_until_that_is_made_up_for(
    watchful: None, server: HubServer, access: Path, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.server.admission.LONGEST_DEBT", 0.0)  # no call waits
    access.write_text(access.read_text().replace("[quota]", "[quota]\nrate = 100"))
    with connection(server, "jfk", security) as call:
        send(call, 0, 5_000)
        send(call, 1, 5_000)
        assert isinstance(call.refused[0], QuotaExceeded)
        assert 10 < (call.refused[0].retry_after or 0) < 60
        assert call.stored == {0: 1}
    assert server.store.sizes()["jfk"][0].next == 1


def test_shards_count_against_the_quota_once_they_are_made(
    watchful: None, server: HubServer, access: Path, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.store, "count", lambda most: 0)  # their turn never comes
    access.write_text(access.read_text().replace("[quota]", "[quota]\nshards = 4"))
    openings = [Opening(1, f"jfk-{number}", 1, [ShippedLog(0, LOG, 0)]) for number in range(3)]
    for opening in openings[:2]:
        Connection(server.location, security, opening).close()
    with pytest.raises(QuotaExceeded, match="shards"):
        Connection(server.location, security, openings[2])
    Connection(server.location, security, openings[0]).close()


def test_without_room_a_hub_refuses_and_continues_automatically(
    server: HubServer, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connection(server, "jfk", security) as call:
        send(call, 0)
        monkeypatch.setattr(server.space, "low", 1 << 62)
        monkeypatch.setattr(server.space, "high", 1 << 62)
        time.sleep(0.2)  # until the disk is looked at again
        send(call, 1)
        assert isinstance(call.refused[0], HubFull)
        assert call.refused[0].retry_after
    assert any("batches are refused" in trouble for trouble in server.status().troubles())
    monkeypatch.undo()

    def is_taken() -> bool:
        try:
            with connection(server, "jfk", security, 2) as call:
                send(call, 1)
                return call.stored == {0: 2}
        except (HubFull, OSError):  # gRPC may say that the call is over before it says why
            return False

    until(is_taken)


def test_new_certificates_are_served_without_a_restart_and_calls_continue(
    root: Path, access: Path, security: Security, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.server.server.ROUND", 0.05)
    pki = tmp_path / "pki"
    authority.make_authority(pki, ["127.0.0.1"])
    certificates = Certificates(pki / "server.pem", pki / "server.key")
    monkeypatch.setattr(Certificates, "refresh", lambda self: self._take())  # without waiting for the second look
    secure = Security(token=security.token, authorities=(pki / "ca.pem").read_bytes())
    server = HubServer(root, access=Access.load(access), certificates=certificates, listen=("127.0.0.1", 0), least_free=0).start()
    try:
        first = ssl.get_server_certificate(server.listener.address)
        with connection(server, "jfk", secure) as call:
            send(call, 0)
            authority.make_server(pki, ["127.0.0.1"], replaces=True)
            until(lambda: other_certificate(server, first))
            send(call, 1)
            assert call.stored == {0: 2}
            call.finish()
        with connection(server, "jfk", secure, 3) as call:
            send(call, 2)
            assert call.stored == {0: 3}
    finally:
        server.close(grace=0.1)


def test_certificates_that_cannot_be_served_yet_are_an_error_and_are_served_later(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.server.server.ROUND", 0.05)
    monkeypatch.setattr(Certificates, "refresh", lambda self: self._take())  # without waiting for the second look
    pki = tmp_path / "pki"
    authority.make_authority(pki, ["127.0.0.1"])
    certificates = Certificates(pki / "server.pem", pki / "server.key")
    with HubServer(root, access=Access.anonymous(), certificates=certificates, listen=("127.0.0.1", 0), least_free=0) as server:
        first, expires = ssl.get_server_certificate(server.listener.address), server.status().certificate_expires
        assert expires == certificates.not_after
        with monkeypatch.context() as exhausted:
            exhausted.setattr("hub.server.server.server_context", no_context)
            authority.make_server(pki, ["127.0.0.1"], days=7, replaces=True)
            until(lambda: "isn't served yet" in server.status().error)
            assert server.status().certificate_expires == expires
            assert ssl.get_server_certificate(server.listener.address) == first
        until(lambda: server.status().error == "")
        until(lambda: other_certificate(server, first))
        assert server.status().certificate_expires == certificates.not_after < expires
        (pki / "server.pem").write_text("no certificate")
        until(lambda: "server.pem" in server.status().error)


def other_certificate(server: HubServer, known: str) -> bool:
    """Return whether another certificate is served; connections during the exchange may be reset."""
    try:
        return ssl.get_server_certificate(server.listener.address) != known
    except OSError:
        return False


def no_context(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
