"""Calls of the hub's server with the clients that users have: gRPC's for Python, and Arrow Flight's."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pyarrow as pa
import pytest
import trustme
from echo_service import EchoService, FrameClient, frame, headers, listening, message, until
from pyarrow import flight

from hub.server import limits as limits_module
from hub.server.call import Call
from hub.server.limits import Reason
from hub.server.listener import Listener
from hub.server.tls import server_context

OPTIONS = [("grpc.max_receive_message_length", 1 << 28), ("grpc.use_local_subchannel_pool", 1)]


class Certified:
    """An authority, and certificates of a server and a client."""

    def __init__(self) -> None:
        self.authority = trustme.CA()
        self.client = self.authority.issue_cert("shipper.example", common_name="other")

    def context(self, verify: bool = False) -> ssl.SSLContext:
        pair = self.authority.issue_cert("localhost", "127.0.0.1")
        chain = b"".join(one.bytes() for one in pair.cert_chain_pems)
        return server_context(chain, pair.private_key_pem.bytes(), self.authority.cert_pem.bytes() if verify else None)

    def credentials(self, with_certificate: bool = False) -> grpc.ChannelCredentials:
        if not with_certificate:
            return grpc.ssl_channel_credentials(self.authority.cert_pem.bytes())
        chain = b"".join(one.bytes() for one in self.client.cert_chain_pems)
        return grpc.ssl_channel_credentials(self.authority.cert_pem.bytes(), self.client.private_key_pem.bytes(), chain)


CERTIFIED = Certified()


def channel_to(listener: Listener, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    where = f"localhost:{listener.address[1]}"
    return grpc.insecure_channel(where, OPTIONS) if credentials is None else grpc.secure_channel(where, credentials, OPTIONS)


def used(listener: Listener) -> tuple[int, int, int, int]:
    """Return the calls of a listener, and the bytes of its three kinds of memory."""
    found = listener.stats()
    return found.calls, found.received_memory, found.working_memory, found.unsent_memory


@pytest.fixture(params=["plain", "TLS"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Listener, EchoService, grpc.Channel]]:
    """A listener with the echo service, and a channel to it."""
    context = CERTIFIED.context()
    is_plain = request.param == "plain"
    with listening(context=None if is_plain else lambda: context) as (listener, service, _):
        with channel_to(listener, None if is_plain else CERTIFIED.credentials()) as channel:
            yield listener, service, channel
        until(lambda: listener.stats().open == 0, "the end of the connection")
        until(lambda: used(listener) == (0, 0, 0, 0), "the end of the handlers")


@pytest.mark.parametrize("size", [0, 1, 16379, 65535, 100_000, 5_000_000, 40_000_000])
def test_messages_of_each_size_go_and_come(served: Any, size: int) -> None:
    _, _, channel = served
    sent = [bytes([number]) * size for number in range(4)]
    assert list(channel.stream_stream("/test/Echo")(iter(sent), timeout=60)) == sent


def test_many_small_messages_on_many_calls_at_once(served: Any) -> None:
    _, _, channel = served
    sent = [str(number).encode() * (number % 50) for number in range(500)]
    found: list[list[bytes]] = [[] for _ in range(10)]

    def run(at: int) -> None:
        found[at] = list(channel.stream_stream("/test/Echo")(iter(sent), timeout=120))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == sent for one in found)


def test_calls_one_after_the_other_never_count_as_a_flood(served: Any) -> None:
    _, _, channel = served
    echo = channel.unary_unary("/test/Echo")
    for number in range(2000):
        assert echo(str(number).encode(), timeout=60) == str(number).encode()


def test_a_status_comes_with_its_metadata(served: Any) -> None:
    _, _, channel = served
    call = channel.unary_stream("/test/Refuse")(b"", timeout=60)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert caught.value.details() == "it exists"
    assert ("begin", "yes") in call.initial_metadata()
    assert dict(call.trailing_metadata()) == {"reason": "twice", "reason-bin": b"\x00\xff"}


def test_metadata_arrives_as_it_was_sent(served: Any) -> None:
    _, _, channel = served
    metadata = (("x-text", "a b"), ("x-text", "c"), ("x-bytes-bin", b"\x00\xff\x10"))
    answer, call = channel.unary_unary("/test/Say").with_call(b"", metadata=metadata, timeout=60)
    assert answer == b"x-bytes-bin=b'\\x00\\xff\\x10'; x-text='a b'; x-text='c'|"
    assert dict(call.trailing_metadata())["last"] == "yes"


def test_a_refused_caller_gets_the_reason_and_no_handler(served: Any) -> None:
    _, service, channel = served
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test/Echo")(b"", metadata=(("token", "wrong"),), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.details() == "not authenticated: 100 % – sicher"
    assert service.begun == 0


def test_an_unforeseen_error_of_a_handler_is_logged_and_not_shown(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, _, channel = served
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test/Fail")(b"", timeout=60)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "unforeseen" not in caught.value.details()
    assert "unforeseen" in caplog.text


def test_a_deadline_ends_the_handler(served: Any) -> None:
    _, service, channel = served
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test/Idle")(b"", timeout=1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    service.wait("cancelled", 1)


def test_a_cancelled_call_ends_its_handler(served: Any) -> None:
    _, service, channel = served
    call = channel.unary_unary("/test/Idle").future(b"", timeout=60)
    service.wait("begun", 1)
    call.cancel()
    service.wait("cancelled", 1)
    assert service.calls[0].cancelled.is_set()


def test_a_closed_connection_ends_its_handlers(served: Any) -> None:
    _, service, channel = served
    calls = [channel.unary_unary("/test/Idle").future(b"", timeout=60) for _ in range(5)]
    service.wait("begun", 5)
    channel.close()
    service.wait("cancelled", 5)
    assert all(call.done() for call in calls)


def test_a_handler_in_a_thread_is_waited_for_and_its_call_is_cancelled(served: Any) -> None:
    listener, service, channel = served
    call = channel.unary_unary("/test/Block").future(b"", timeout=60)
    service.wait("blocked", 1)
    call.cancel()
    assert service.calls[0].cancelled.wait(60)
    assert listener.stats().calls == 1 and service.ended == 0
    service.gate.set()
    service.wait("cancelled", 1)


def test_an_unread_answer_holds_a_bounded_memory(served: Any) -> None:
    listener, service, channel = served
    calls = [channel.unary_stream("/test/Wide")(b"", timeout=60) for _ in range(8)]
    for call in calls:
        assert len(next(call)) == 1 << 20
    service.wait("begun", 8)
    assert 0 < listener.stats().unsent_memory <= 8 * (3 << 20)
    for call in calls:
        call.cancel()
    service.wait("cancelled", 8)


class Storing(EchoService):
    """Takes DoPut, and sends the messages of DoExchange back, but for the first one, which has no schema."""

    async def doput(self, call: Call) -> None:
        await self.keep(call)

    async def doexchange(self, call: Call) -> None:
        first = await call.read()
        assert first is not None
        first.release()
        await self.echo(call)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_flights_client_writes_and_reads(secure: bool) -> None:
    context = CERTIFIED.context()
    options = {"tls_root_certs": CERTIFIED.authority.cert_pem.bytes()} if secure else {}
    batch = pa.record_batch({"a": pa.array([b"x" * 100] * 16000)})
    with listening(Storing(), context=(lambda: context) if secure else None) as (listener, service, _):
        with flight.FlightClient(f"grpc{'+tls' if secure else ''}://localhost:{listener.address[1]}", **options) as client:
            writer, _ = client.do_put(flight.FlightDescriptor.for_path("a"), batch.schema)
            for _ in range(20):
                writer.write_batch(batch)
            writer.close()
            assert len(service.read) == 21  # the schema is a message
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("a"))
            writer.begin(batch.schema)
            for _ in range(5):
                writer.write_batch(batch)
                assert reader.read_chunk().data.equals(batch)
            writer.close()


def test_a_client_certificate_is_required_and_names_its_client() -> None:
    context = CERTIFIED.context(verify=True)
    with listening(context=lambda: context) as (listener, _, _):
        with channel_to(listener, CERTIFIED.credentials(with_certificate=True)) as channel:
            assert channel.unary_unary("/test/Say")(b"", timeout=60) == b"|shipper.example"
        with channel_to(listener, CERTIFIED.credentials()) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test/Say")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_new_certificates_are_used_at_once_and_old_connections_stay() -> None:
    new = Certified()
    contexts = [CERTIFIED.context()]
    with listening(context=lambda: contexts[-1]) as (listener, _, _), channel_to(listener, CERTIFIED.credentials()) as old:
        assert old.unary_unary("/test/Echo")(b"1", timeout=60) == b"1"
        contexts.append(new.context())
        with channel_to(listener, new.credentials()) as channel:
            assert channel.unary_unary("/test/Echo")(b"2", timeout=60) == b"2"
        assert old.unary_unary("/test/Echo")(b"3", timeout=60) == b"3"
        with channel_to(listener, CERTIFIED.credentials()) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/test/Echo")(b"4", timeout=60)


def test_calls_beyond_the_slots_wait_and_those_beyond_the_queue_are_refused() -> None:
    limits = {"calls": 2, "queued_calls": 2, "queued_seconds": 1000.0}
    with listening(limits=limits) as (listener, service, _), channel_to(listener) as channel:
        blocked = [channel.unary_unary("/test/Idle").future(b"", timeout=60) for _ in range(2)]
        service.wait("begun", 2)
        waiting = [channel.unary_unary("/test/Echo").future(b"x", timeout=60) for _ in range(2)]
        until(lambda: listener.stats().queued_calls == 2, "two calls wait")
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test/Echo")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry in 2 s" in caught.value.details()
        blocked[0].cancel()
        assert [one.result() for one in waiting] == [b"x", b"x"]
        assert listener.stats().refused_calls == 1


def test_a_call_that_waits_too_long_is_refused() -> None:
    with listening(limits={"calls": 1, "queued_seconds": 0.2}) as (listener, service, _), channel_to(listener) as channel:
        blocked = channel.unary_unary("/test/Idle").future(b"", timeout=60)
        service.wait("begun", 1)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/test/Echo")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        blocked.cancel()
        service.wait("cancelled", 1)


@pytest.mark.parametrize(
    ("limits", "count", "reason"),
    [
        ({"connections": 2}, 2, Reason.CONNECTIONS),
        ({"unauthenticated": 2, "handshake_seconds": 0.3}, 2, Reason.UNAUTHENTICATED),
        ({"unauthenticated_per_address": 2, "handshake_seconds": 0.3}, 2, Reason.UNAUTHENTICATED_OF_ADDRESS),
    ],
)
def test_connections_beyond_a_limit_are_refused_if_they_wait_in_vain(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], count: int, reason: Reason
) -> None:
    monkeypatch.setattr(limits_module, "SILENT", 1000.0)
    monkeypatch.setattr(limits_module, "LATE", 1000.0)
    with listening(limits=limits) as (listener, _, events):
        present = [FrameClient(listener.address) for _ in range(count)]
        assert all(client.is_alive() for client in present)
        with FrameClient(listener.address, begin=False) as refused:
            assert refused.next() is None
        until(lambda: [one for one, _ in events] == [reason], "the event")
        for client in present:
            client.close()
        until(lambda: listener.stats().open == 0, "room")
        with FrameClient(listener.address) as client:
            assert client.is_alive()


@pytest.mark.parametrize("limit", ["unauthenticated", "unauthenticated_per_address"])
def test_a_connection_for_which_there_is_no_place_waits_for_one(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(limits_module, "SILENT", 1000.0)
    monkeypatch.setattr(limits_module, "LATE", 1000.0)
    with listening(limits={limit: 2, "handshake_seconds": 1000.0}) as (listener, service, events):
        present = [FrameClient(listener.address) for _ in range(2)]
        assert all(client.is_alive() for client in present)
        waiting = [FrameClient(listener.address) for _ in range(2)]
        for at, client in enumerate(waiting):
            client.send(headers(1, "Idle"))
            present[at].close()
            service.wait("begun", at + 1)
        assert listener.stats().open == 2 and not events
        for client in waiting:
            client.close()


@pytest.mark.parametrize("limit", ["unauthenticated", "unauthenticated_per_address"])
@pytest.mark.parametrize("rule", ["SILENT", "LATE"])
def test_a_newcomer_takes_the_place_of_a_connection_without_a_name_that_is_silent_or_late(
    monkeypatch: pytest.MonkeyPatch, limit: str, rule: str
) -> None:
    for name in ("SILENT", "LATE"):
        monkeypatch.setattr(limits_module, name, 0.0 if name == rule else 1000.0)
    with listening(limits={limit: 2}) as (listener, service, _):
        oldest, other = FrameClient(listener.address, begin=False), FrameClient(listener.address, begin=False)
        until(lambda: listener.stats().open == 2, "both connections")
        with FrameClient(listener.address) as newcomer:
            newcomer.send(headers(1, "Idle"))
            service.wait("begun", 1)
            oldest.error()
            assert listener.stats().open == 2
            assert listener.stats().unauthenticated == 1
        oldest.close()
        other.close()


def test_authenticated_clients_of_one_address_do_not_count_for_it() -> None:
    limits = {"unauthenticated": 1, "unauthenticated_per_address": 1}
    with listening(limits=limits) as (listener, service, events), ExitStack() as stack:
        for number in range(5):
            client = stack.enter_context(FrameClient(listener.address))
            client.send(headers(1, "Idle"))
            service.wait("begun", number + 1)
        assert listener.stats().open == 5 and not events


@pytest.mark.parametrize(
    ("begins", "limits", "reason"),
    [
        (False, {"handshake_seconds": 0.3}, Reason.HANDSHAKE),
        (True, {"authentication_seconds": 0.3}, Reason.AUTHENTICATION_SECONDS),
    ],
)
def test_a_connection_that_does_nothing_is_cut(begins: bool, limits: dict[str, float], reason: Reason) -> None:
    with listening(limits=limits) as (listener, _, events), FrameClient(listener.address, begin=begins) as client:
        client.error()
        until(lambda: [one for one, _ in events] == [reason], "the event")


def test_a_check_of_the_connections_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []

    def fail_once(now: float) -> None:
        if not failures:
            failures.append(now)
            raise ZeroDivisionError("unforeseen")

    with listening(limits={"handshake_seconds": 1.0}) as (listener, _, events):
        monkeypatch.setattr(listener.slots, "refuse_late", fail_once)
        until(lambda: failures, "the failure")
        with FrameClient(listener.address, begin=False) as client:
            client.error()
        until(lambda: [one for one, _ in events] == [Reason.HANDSHAKE], "the event")


def test_a_tls_handshake_that_never_ends_is_cut() -> None:
    context = CERTIFIED.context()
    with listening(context=lambda: context, limits={"handshake_seconds": 0.3}) as (listener, _, events):
        with FrameClient(listener.address, begin=False) as client:
            client.send(b"\x16\x03\x01\x02\x00\x01")
            client.error()
        until(lambda: [one for one, _ in events] == [Reason.HANDSHAKE], "the event")


def test_an_idle_client_is_asked_for_a_sign_of_life_and_a_dead_one_is_cut() -> None:
    with listening(limits={"idle_seconds": 0.3}) as (listener, service, events), FrameClient(listener.address) as client:
        client.send(headers(1, "Idle"))
        service.wait("begun", 1)
        for _ in range(3):
            ping = client.find(6)
            assert ping is not None
            client.send(frame(6, 1, 0, ping[3]))
        assert not events
        client.error()
        service.wait("cancelled", 1)
        assert [one for one, _ in events] == [Reason.IDLE]


def test_an_idle_connection_without_calls_is_closed_in_order() -> None:
    with listening(limits={"idle_seconds": 0.3}) as (listener, _, events), FrameClient(listener.address) as client:
        client.send(headers(1, "Echo"), frame(0, 1, 1, message(b"x")))
        assert client.error() == 0
        until(lambda: listener.stats().open == 0, "the end")
        assert not events


def test_a_name_can_be_cut() -> None:
    with listening() as (listener, service, events), FrameClient(listener.address) as client, FrameClient(listener.address) as other:
        client.send(headers(1, "Idle"))
        service.wait("begun", 1)
        listener.cut("caller", Reason.IDLE)
        service.wait("cancelled", 1)
        assert other.is_alive()
        assert [one for one, _ in events] == [Reason.IDLE]


class Greedy:
    """A service whose calls ask for working memory."""

    def admit(self, call: Call) -> None:
        call.link.authenticated("caller")

    async def serve(self, call: Call) -> None:
        async for one in call:
            with one, await call.grant(int(bytes(one.data))) as grant:
                await call.write(str(grant.size).encode())


def test_working_memory_is_granted_or_refused() -> None:
    with listening(Greedy(), limits={"working_bytes": 1000}) as (listener, _, _), channel_to(listener) as channel:
        echo = channel.stream_stream("/test/Any")
        assert list(echo(iter([b"400", b"500", b"500"]), timeout=60)) == [b"400", b"500", b"500"]
        with pytest.raises(grpc.RpcError) as caught:
            list(echo(iter([b"501"]), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert listener.stats().working_memory == 0


def test_a_listener_can_be_closed_at_once_and_again() -> None:
    listener = Listener(EchoService()).start()
    listener.close()
    listener.close()
    assert listener.stats().accepted == 0
