"""The TCP proxy, with real sockets: bytes that pass through, each limit, every way in which an end breaks, and that nothing remains."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hub.server import proxy, relay
from hub.server.limits import Peer
from hub.server.proxy import Address, Limits, ProxiedConnection, Reason, TcpProxy
from kvspool import system
from kvspool.errors import Closed

GUARD = 20.0  # seconds after which a test hangs
HERE = "127.0.0.1"
ELSEWHERE = "127.0.0.2"
MANY = Limits(connections=1000, connections_per_address=1000, unauthenticated=1000, unauthenticated_per_address=1000)


class Street:
    """A listening socket without a server program, a gate before it, and clients; `events` holds the gate's reports."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.events: list[tuple[Reason, Address]] = []
        self.server = self.listen()

    def listen(self) -> socket.socket:
        server = self.stack.enter_context(socket.create_server((HERE, 0), backlog=512))
        server.settimeout(GUARD)
        return server

    def build(self, limits: Limits | None = None, target: Any = None) -> TcpProxy:
        self.proxy = TcpProxy((HERE, 0), target or self.server.getsockname(), limits, self.hear)
        return self.stack.enter_context(self.proxy)

    def hear(self, reason: Reason, remote: Address) -> None:
        self.events.append((reason, remote))

    def client(self, source: str = HERE) -> socket.socket:
        return self.stack.enter_context(socket.create_connection(self.proxy.address, timeout=GUARD, source_address=(source, 0)))

    def is_refused(self) -> bool:
        """Return whether a new client is reset: at once, or as soon as it reads."""
        try:
            return is_reset(self.client())
        except ConnectionResetError:
            return True

    def accept(self, server: socket.socket | None = None) -> socket.socket:
        end, self.peer = (server or self.server).accept()
        end.settimeout(GUARD)
        return self.stack.enter_context(end)

    def pair(self, source: str = HERE) -> tuple[socket.socket, socket.socket, ProxiedConnection]:
        """Return both ends of a connection, and the connection."""
        client = self.client(source)
        server = self.accept()
        connection = self.connection(f"ipv4:{HERE}:{self.peer[1]}")
        assert connection.remote == client.getsockname()
        return client, server, connection

    def connection(self, peer: str) -> ProxiedConnection:
        """Return a connection that the server's end accepted: before a byte of it has come, the gate may not know it yet."""
        wait_until(lambda: self.proxy.connection(peer) is not None)
        connection = self.proxy.connection(peer)
        assert connection is not None
        return connection

    def wait_for(self, reason: Reason, number: int = 1) -> None:
        wait_until(lambda: [told for told, _ in self.events].count(reason) == number)


@pytest.fixture
def street() -> Iterator[Street]:
    with contextlib.ExitStack() as stack:
        yield Street(stack)


def wait_until(happened: Callable[[], bool]) -> None:
    ends = time.monotonic() + GUARD
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.002)


def read(end: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = end.recv(min(size, 1 << 20))
        assert part, "the stream ended early"
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def is_reset(end: socket.socket) -> bool:
    """Read to the end; return whether it was a reset."""
    try:
        while end.recv(1 << 20):
            pass
    except ConnectionResetError:
        return True
    return False


def reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def fill(end: socket.socket) -> int:
    """Send until the other side takes no more; return the number of bytes."""
    end.settimeout(0.1)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while True:
            sent += end.send(b"x" * 65536)
    end.settimeout(GUARD)
    return sent


def echo(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := end.recv(1 << 20):
            end.sendall(data)
        end.shutdown(socket.SHUT_WR)


def serve_echo(street: Street) -> None:
    """Let every connection to the server be echoed, in a thread each."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=echo, args=(street.accept(),), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


# Bytes that pass through.


@pytest.mark.parametrize("splices", [True, False], ids=["splice", "copy"])
def test_bytes_pass_both_ways_unchanged(street: Street, splices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not splices:
        monkeypatch.setattr(relay, "sockets_can_splice", lambda: False)
    proxy = street.build(MANY)
    client, server, connection = street.pair()
    connection.authenticated("one")
    threading.Thread(target=echo, args=(server,), daemon=True).start()
    data = os.urandom(1 << 20) * 20
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    assert read(client, len(data)) == data
    sender.join()
    assert (proxy.stats().bytes_in, proxy.stats().bytes_out) == (len(data), len(data))


def test_sockets_can_be_spliced_here() -> None:
    assert relay.sockets_can_splice()


def test_where_no_pipe_is_to_be_had_the_bytes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pipe(flags: int) -> tuple[int, int]:
        raise OSError(24, "too many open files")

    carriers = relay.Carriers()
    monkeypatch.setattr(os, "pipe2", no_pipe)
    assert isinstance(carriers.take(), relay.Buffer)
    monkeypatch.undo()
    pipe = carriers.take()
    assert isinstance(pipe, relay.Pipe)
    carriers.give_back(pipe)
    carriers.close()


def test_an_end_of_one_direction_is_passed_on_and_the_other_continues(street: Street) -> None:
    street.build()
    client, server, _ = street.pair()
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    assert read(server, 8) == b"question"
    assert server.recv(1) == b""
    server.sendall(b"answer")
    assert read(client, 6) == b"answer"
    server.close()
    assert client.recv(1) == b""
    wait_until(lambda: street.proxy.stats().open == 0)
    assert street.events == []


def test_a_server_may_end_first(street: Street) -> None:
    street.build()
    client, server, _ = street.pair()
    server.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    client.sendall(b"still here")
    client.close()
    assert read(server, 10) == b"still here"
    assert server.recv(1) == b""
    wait_until(lambda: street.proxy.stats().open == 0)


def test_a_server_that_takes_nothing_stops_the_client_and_loses_nothing(street: Street) -> None:
    street.build()
    client, server, connection = street.pair()
    connection.authenticated("one")
    sent = fill(client)
    client.shutdown(socket.SHUT_WR)
    received = 0
    while data := server.recv(1 << 20):
        received += len(data)
    assert received == sent


def test_a_client_that_reads_nothing_stops_its_own_connection_alone(street: Street) -> None:
    street.build()
    slow, to_slow, _ = street.pair()
    sent = fill(to_slow)
    other, to_other, _ = street.pair()
    for number in range(100):
        other.sendall(b"%d" % number)
        to_other.sendall(read(to_other, len(str(number))))
        assert read(other, len(str(number))) == b"%d" % number
    assert len(read(slow, sent)) == sent


def test_what_was_on_its_way_when_a_connection_was_cut_never_comes_to_another_one(street: Street) -> None:
    street.build()
    slow, to_slow, connection = street.pair()
    fill(to_slow)
    connection.close()
    street.wait_for(Reason.BY_HANDLER)
    client, server, _ = street.pair()
    for end, other in ((client, server), (server, client)):
        end.sendall(b"mine")
        assert other.recv(100) == b"mine"


def test_three_hundred_clients_at_once_get_what_is_theirs(street: Street) -> None:
    serve_echo(street)
    proxy = street.build(MANY)
    clients = [street.client() for _ in range(300)]
    for number, client in enumerate(clients):
        client.sendall(struct.pack("<I", number) * 2500)
    wait_until(lambda: proxy.stats().open == 300)
    for number, client in enumerate(clients):
        assert read(client, 10_000) == struct.pack("<I", number) * 2500
        client.close()
    wait_until(lambda: proxy.stats().open == 0)
    assert proxy.stats().accepted == 300
    assert street.events == []


# Ends that break.


def test_a_reset_by_the_client_is_one_for_the_server(street: Street) -> None:
    street.build()
    client, server, _ = street.pair()
    reset(client)
    assert is_reset(server)
    street.wait_for(Reason.RESET)


def test_the_last_words_of_a_server_that_resets_reach_the_client_before_it_does(street: Street) -> None:
    street.build()
    client, server, _ = street.pair()
    server.sendall(b"go away")
    reset(server)
    assert read(client, 7) == b"go away"
    assert is_reset(client)
    street.wait_for(Reason.RESET)


def test_a_reset_of_a_client_that_had_sent_its_end_is_noticed(street: Street) -> None:
    street.build()
    client, server, _ = street.pair()
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    reset(client)
    street.wait_for(Reason.RESET)
    wait_until(lambda: street.proxy.stats().open == 0)


def test_a_client_is_reset_without_a_server_and_served_after_a_retarget(street: Street) -> None:
    gone = street.listen()
    street.build(target=gone.getsockname())
    gone.close()
    assert street.is_refused()
    street.wait_for(Reason.UNREACHABLE)
    assert street.proxy.stats().refused == {Reason.UNREACHABLE: 1}
    street.proxy.retarget(street.server.getsockname())
    client, server, _ = street.pair()
    client.sendall(b"now")
    assert read(server, 3) == b"now"


def test_a_client_is_reset_when_there_is_no_unix_socket(street: Street, tmp_path: Path) -> None:
    proxy = street.build(Limits(connections=1), target=str(tmp_path / "nothing"))
    for _ in range(2):  # and takes no place
        assert street.is_refused()
    assert proxy.stats().refused == {Reason.UNREACHABLE: 2}


def test_a_listener_of_events_that_raises_stops_nothing(street: Street) -> None:
    def fails(reason: Reason, remote: Address) -> None:
        raise RuntimeError("on purpose")

    street.hear = fails  # type: ignore[method-assign]
    street.build()
    client, server, connection = street.pair()
    connection.close()
    assert is_reset(client)
    street.pair()
    assert street.proxy.stats().cut == {Reason.BY_HANDLER: 1}


# Targets.


def test_connections_on_a_unix_socket_are_known_by_a_name_of_their_own(street: Street, tmp_path: Path) -> None:
    server = street.stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(tmp_path / "server"))
    server.listen()
    server.settimeout(GUARD)
    street.build(target=str(tmp_path / "server"))
    names = []
    for _ in range(2):
        client = street.client()
        end = street.accept(server)
        names.append(street.peer[1:].decode())
        connection = street.connection("unix-abstract:" + names[-1])
        assert connection.remote == client.getsockname()
        client.sendall(b"through")
        assert read(end, 7) == b"through"
    # Every local user sees the names that there are: who could guess the next one from them could take it.
    assert len(os.path.commonprefix(names)) < len(names[0]) / 2


def test_a_retarget_leaves_the_connections_that_are_there(street: Street) -> None:
    proxy = street.build()
    before, to_before, _ = street.pair()
    street.server = street.listen()
    proxy.retarget(street.server.getsockname())
    after, to_after, _ = street.pair()
    for client, server in ((before, to_before), (after, to_after)):
        client.sendall(b"where to")
        assert read(server, 8) == b"where to"


def test_who_did_not_come_through_the_gate_is_not_known(street: Street) -> None:
    proxy = street.build()
    direct = street.stack.enter_context(socket.create_connection(street.server.getsockname()))
    assert proxy.connection(f"ipv4:{HERE}:{direct.getsockname()[1]}") is None
    assert proxy.connection("unix:") is None


@pytest.mark.parametrize("address", [("localhost", 1), ("hub.example", 1), (HERE, 65536), (HERE, -1)])
def test_addresses_that_would_have_to_be_looked_up_are_refused(address: Address) -> None:
    with pytest.raises(ValueError):
        TcpProxy(listen=address)
    with pytest.raises(ValueError):
        TcpProxy(target=address)


def test_an_ipv6_address_can_be_listened_at_and_reached() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server, TcpProxy(("::1", 0), server.getsockname()[:2]) as proxy:
        with socket.create_connection(proxy.address, timeout=GUARD) as client:
            end, peer = server.accept()
            with end:
                client.sendall(b"!")
                assert read(end, 1) == b"!"
                connection = proxy.connection(f"ipv6:%5B::1%5D:{peer[1]}")
                assert connection is not None
                assert connection.remote == client.getsockname()[:2]


def test_an_address_that_is_taken_is_named(street: Street) -> None:
    with pytest.raises(OSError) as caught:
        TcpProxy(street.server.getsockname()).start()
    assert str(street.server.getsockname()[1]) in caught.value.__notes__[0]


# Limits.


def test_limits_are_above_zero() -> None:
    with pytest.raises(ValueError, match="idle_seconds"):
        Limits(idle_seconds=0)


@pytest.mark.parametrize(
    ("limits", "reason", "lifted"),
    [
        (Limits(connections=2), Reason.CONNECTIONS, False),
        (Limits(connections_per_address=2), Reason.CONNECTIONS_OF_ADDRESS, False),
        (Limits(unauthenticated=2), Reason.UNAUTHENTICATED, True),
        (Limits(unauthenticated_per_address=2), Reason.UNAUTHENTICATED_OF_ADDRESS, True),
    ],
    ids=lambda value: value.name if isinstance(value, Reason) else "",
)
def test_the_number_of_connections_is_bounded(street: Street, limits: Limits, reason: Reason, lifted: bool) -> None:
    proxy = street.build(limits)
    pairs = [street.pair() for _ in range(2)]
    assert street.is_refused()
    assert [(told, remote[0]) for told, remote in street.events] == [(reason, HERE)]
    if limits.connections_per_address == 2 or limits.unauthenticated_per_address == 2:
        street.pair(ELSEWHERE)  # another address has a count of its own
    pairs[0][2].authenticated("known")
    if lifted:
        street.pair()
    else:
        assert street.is_refused()
        pairs[1][2].close()  # a connection that ends makes room
        assert is_reset(pairs[1][0])
        street.wait_for(Reason.BY_HANDLER)
        street.pair()
    assert proxy.stats().refused == {reason: 1 if lifted else 2}


def test_an_authentication_counts_once_and_not_after_the_end(street: Street) -> None:
    proxy = street.build()
    client, server, connection = street.pair()
    assert proxy.stats().unauthenticated == 1
    for name in ("first", "second"):
        connection.authenticated(name)
    assert connection.name == "first"
    assert proxy.stats().unauthenticated == 0
    stranger, _, late = street.pair()
    reset(stranger)
    street.wait_for(Reason.RESET)
    late.authenticated("too late")
    late.progress()
    late.close()
    assert proxy.stats().unauthenticated == 0
    client.sendall(b"!")
    assert read(server, 1) == b"!"
    reset(client)
    street.wait_for(Reason.RESET, 2)
    assert proxy.stats().unauthenticated == 0


@pytest.mark.parametrize(
    ("remote", "origin"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_the_addresses_of_one_network_count_as_one(remote: str, origin: str) -> None:
    assert Peer((remote, 1)).origin == origin


def test_who_is_not_authenticated_in_time_is_cut(street: Street) -> None:
    street.build(Limits(authentication_seconds=0.1))
    known, to_known, connection = street.pair()
    connection.authenticated("known")
    stranger, to_stranger, _ = street.pair()
    assert is_reset(stranger)
    assert is_reset(to_stranger)
    assert street.events == [(Reason.AUTHENTICATION_SECONDS, stranger.getsockname())]
    known.sendall(b"still here")
    assert read(to_known, 10) == b"still here"


def test_what_a_stranger_sends_waits_until_it_is_authenticated(street: Street) -> None:
    proxy = street.build(Limits(authentication_bytes=1000))
    client, server, connection = street.pair()
    client.sendall(b"h" * 1000 + b"b" * 5000)
    assert read(server, 1000) == b"h" * 1000
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
        server.recv(1)
    assert proxy.stats().bytes_in == 1000
    server.settimeout(GUARD)
    connection.authenticated("known")
    assert read(server, 5000) == b"b" * 5000


def test_a_stranger_sends_a_little_at_once_and_the_rest_slowly(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.server.proxy._FIRST_BYTES", 100)
    monkeypatch.setattr("hub.server.proxy._FIRST_RATE", 100)
    proxy = street.build(Limits(authentication_bytes=200, authentication_seconds=60))
    client, server, _ = street.pair()
    client.sendall(b"x" * 1000)
    assert read(server, 200) == b"x" * 200
    assert proxy.stats().bytes_in == 200


def test_a_flood_cuts_those_of_its_name_and_strangers_that_sent_much(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.server.proxy._FIRST_BYTES", 100)
    proxy = street.build()
    flooding, quiet, loud, stranger = (street.pair() for _ in range(4))
    for (client, server, connection), name in ((flooding, "jfk"), (quiet, "lga")):
        connection.authenticated(name)
        client.sendall(b"x" * 90)
        read(server, 90)
    for (client, server, _), size in ((loud, 90), (stranger, 10)):
        client.sendall(b"x" * size)
        read(server, size)
    proxy.cut("jfk", Reason.FLOOD)
    assert is_reset(flooding[0])
    assert is_reset(loud[0])
    for client, server, _ in (quiet, stranger):
        client.sendall(b"y")
        assert read(server, 1) == b"y"
    assert [reason for reason, _ in street.events] == [Reason.FLOOD] * 2


def test_a_stranger_that_has_to_wait_and_resets_is_noticed(street: Street) -> None:
    street.build(Limits(authentication_bytes=10))
    client, server, _ = street.pair()
    client.sendall(b"x" * 20)
    assert read(server, 10) == b"x" * 10
    reset(client)
    street.wait_for(Reason.RESET)
    assert is_reset(server)


def test_a_stranger_that_has_to_wait_hears_why_it_is_refused(street: Street) -> None:
    street.build(Limits(authentication_bytes=10))
    client, server, _ = street.pair()
    client.sendall(b"x" * 20)
    assert read(server, 10) == b"x" * 10
    server.sendall(b"who are you")
    reset(server)
    assert read(client, 11) == b"who are you"
    assert is_reset(client)


def test_who_sends_more_than_a_batch_may_have_is_cut_and_the_server_never_gets_it(street: Street) -> None:
    street.build(Limits(progress_bytes=100_000))
    client, server, connection = street.pair()
    connection.authenticated("known")
    for _ in range(5):
        client.sendall(b"x" * 90_000)
        read(server, 90_000)
        connection.progress(90_000)
    client.sendall(b"x" * 90_000)
    read(server, 90_000)
    client.sendall(b"x" * 20_000)
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while data := server.recv(1 << 20):
            received += len(data)
    assert received < 20_000
    street.wait_for(Reason.PROGRESS_BYTES)
    assert is_reset(client)


def test_the_small_messages_of_one_call_let_no_huge_one_of_another_through(street: Street) -> None:
    street.build(Limits(progress_bytes=1_000_000))
    client, server, connection = street.pair()
    connection.authenticated("known")
    received = 0
    with contextlib.suppress(ConnectionResetError):
        for _ in range(1000):
            client.sendall(b"x" * 10_000)
            received += len(read(server, 10_000))
            connection.progress(10)
    street.wait_for(Reason.PROGRESS_BYTES)
    assert received < 2_000_000


class Clock(system.Port):
    """A clock that moves only when a test moves it."""

    time = 1000.0

    def monotonic(self) -> float:
        return self.time


def test_who_sends_nothing_is_cut_and_a_byte_now_and_then_is_enough(street: Street) -> None:
    clock = Clock()
    with system.replaced(clock):
        proxy = street.build(Limits(idle_seconds=60, authentication_seconds=0.04))  # looks at the clock every 10 ms
        client, server, connection = street.pair()
        connection.authenticated("known")
        for _ in range(3):
            clock.time += 50
            client.sendall(b".")
            assert read(server, 1) == b"."
        assert proxy.stats().open == 1
        server.sendall(b"an answer")  # what the server sends is no sign of the client
        assert read(client, 9) == b"an answer"
        clock.time += 61
        assert is_reset(client)
        street.wait_for(Reason.IDLE)
        proxy.close()


def test_who_can_send_nothing_since_the_server_takes_nothing_is_not_idle(street: Street) -> None:
    clock = Clock()
    with system.replaced(clock):
        proxy = street.build(Limits(idle_seconds=60, authentication_seconds=0.04))
        client, server, connection = street.pair()
        connection.authenticated("known")
        sent = fill(client)
        for _ in range(3):
            clock.time += 50
            time.sleep(0.05)  # the gate looks at the clock several times
        assert proxy.stats().open == 1
        assert len(read(server, sent)) == sent
        wait_until(lambda: proxy.stats().bytes_in == sent)
        clock.time += 61
        assert is_reset(client)
        street.wait_for(Reason.IDLE)
        proxy.close()


def test_a_reader_of_a_stream_may_pause_for_longer(street: Street) -> None:
    clock = Clock()
    with system.replaced(clock):
        proxy = street.build(Limits(idle_seconds=60, authentication_seconds=0.04))
        client, _, connection = street.pair()
        connection.authenticated("known")
        with connection.streaming():
            clock.time += 59 * 60
            time.sleep(0.05)  # the gate looks at the clock several times
            assert proxy.stats().open == 1
        time.sleep(0.05)
        assert proxy.stats().open == 1  # the call that is over was a sign of life
        clock.time += 61
        assert is_reset(client)
        street.wait_for(Reason.IDLE)
        client, _, connection = street.pair()
        connection.authenticated("known")
        with connection.streaming():
            clock.time += 61 * 60
            assert is_reset(client)
        proxy.close()


def test_without_descriptors_clients_wait_and_the_gate_rests(street: Street, caplog: pytest.LogCaptureFixture) -> None:
    proxy = street.build()
    old, to_old, _ = street.pair()
    waiting = street.stack.enter_context(socket.socket())
    waiting.settimeout(GUARD)
    with few_descriptors(0):
        waiting.connect(proxy.address)
        wait_until(lambda: bool(caplog.records))
        for _ in range(100):  # others continue
            old.sendall(b"?")
            assert read(to_old, 1) == b"?"
        time.sleep(0.1)
    assert 1 <= len(caplog.records) < 5  # it looks again once a second
    server = street.accept()
    waiting.sendall(b"at last")
    assert read(server, 7) == b"at last"


def test_a_client_without_room_for_a_second_descriptor_is_refused(street: Street) -> None:
    street.build()
    client = street.stack.enter_context(socket.socket())
    client.settimeout(GUARD)
    with few_descriptors(1), contextlib.suppress(ConnectionResetError):
        client.connect(street.proxy.address)
        assert is_reset(client)
    street.wait_for(Reason.EXHAUSTED)
    street.pair()


@contextlib.contextmanager
def few_descriptors(number: int) -> Iterator[None]:
    """Leave this process only some descriptors that it can still open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 16, before[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(number):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in held:
            os.close(fd)


# The end.


def test_a_close_waits_for_the_connections_to_end(street: Street) -> None:
    proxy = street.build()
    client, server, _ = street.pair()
    closing = threading.Thread(target=proxy.close, kwargs={"grace": GUARD * 2})
    closing.start()
    wait_until(lambda: is_free(proxy.address))
    client.sendall(b"the last one")
    client.close()
    assert read(server, 12) == b"the last one"
    assert closing.is_alive()
    server.close()
    closing.join(GUARD)
    assert not closing.is_alive()
    assert street.events == []


def is_free(address: Address) -> bool:
    """Return whether no process listens there any more."""
    try:
        socket.create_server(address).close()
    except OSError:
        return False
    return True


def test_a_close_cuts_who_stays_longer_than_the_grace(street: Street) -> None:
    proxy = street.build()
    client, server, _ = street.pair()
    proxy.close(grace=0.05)
    assert is_reset(client)
    assert is_reset(server)
    assert [reason for reason, _ in street.events] == [Reason.SHUTDOWN]
    proxy.close()  # twice is no harm
    with pytest.raises(Closed):
        proxy.start()


def test_a_second_start_changes_nothing(street: Street) -> None:
    proxy = street.build()
    address = proxy.address
    assert proxy.start().address == address
    street.pair()


def test_a_gate_that_was_never_started_can_be_closed() -> None:
    TcpProxy().close()


def test_nothing_stays_open_whatever_became_of_the_connections(street: Street) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        street.stack = stack
        street.build()
        stalled = [street.pair() for _ in range(4)]
        for _, server, _ in stalled:
            fill(server)
        reset(stalled[0][0])
        stalled[1][2].close()
        stalled[2][0].close()
        street.wait_for(Reason.BY_HANDLER)
        street.proxy.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "proxy"]


def test_the_handlers_of_a_flight_server_find_their_connections_and_closing_the_gate_ends_its_shutdown(street: Street) -> None:
    flight = pytest.importorskip("pyarrow.flight")
    found: list[ProxiedConnection | None] = []
    is_inside = threading.Event()

    class Server(flight.FlightServerBase):  # type: ignore[misc,name-defined]
        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            found.append(street.proxy.connection(context.peer()))
            is_inside.set()
            reader.read_chunk()  # which never comes

    with Server(f"grpc://{HERE}:0") as server:
        proxy = street.build(target=(HERE, server.port))
        client = flight.connect(f"grpc://{HERE}:{proxy.address[1]}")
        writer, _ = client.do_exchange(flight.FlightDescriptor.for_path("x"))
        assert is_inside.wait(GUARD)
        (connection,) = found
        assert connection is not None
        assert connection.remote[0] == HERE
        connection.authenticated("client")
        assert proxy.stats().unauthenticated == 0
        proxy.close()
        server.shutdown()  # would wait forever for a handler that still reads
        with pytest.raises(flight.FlightUnavailableError):
            writer.close()
        client.close()


def test_reasons_have_names_of_their_own() -> None:
    assert len({reason.value for reason in Reason}) == len(Reason) == len(proxy.Reason.__members__)
