"""The bytes of a connection: over TLS they arrive in records of any size, and in pieces."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import pytest
import trustme

from hub.server.channel import ENCRYPTED, RECORD, ByteChannel, TlsChannel
from hub.server.tls import server_context

AUTHORITY = trustme.CA()


class Client:
    """The other end of a channel. Its encrypted bytes are sent in the pieces that a test wants."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cadata=AUTHORITY.cert_pem.bytes().decode())
        context.set_alpn_protocols(["h2"])
        self.tls = context.wrap_bio(self._incoming, self.outgoing, server_hostname="localhost")

    def receive(self) -> None:
        """Take over everything that has arrived."""
        try:
            while data := self._socket.recv(1 << 20):
                self._incoming.write(data)
        except BlockingIOError:
            pass

    def shake_hands(self) -> None:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        self.send()

    def send(self, most: int | None = None) -> None:
        """Send encrypted bytes, as many as the socket takes."""
        data = self.outgoing.read() if most is None else self.outgoing.read(most)
        self._socket.sendall(data)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection; neither blocks."""
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        for end in one, other:
            end.setblocking(False)
        yield one, other


@pytest.fixture
def connected(ends: tuple[socket.socket, socket.socket]) -> tuple[Client, TlsChannel]:
    """A client and a channel that have shaken hands."""
    pair = AUTHORITY.issue_cert("localhost")
    chain = b"".join(one.bytes() for one in pair.cert_chain_pems)
    channel = TlsChannel(ends[1], server_context(chain, pair.private_key_pem.bytes()), memoryview(bytearray(ENCRYPTED)))
    client = Client(ends[0])
    is_complete = False
    while not is_complete or client.tls.version() is None:
        client.receive()
        client.shake_hands()
        is_complete = is_complete or channel.shake_hands()
    return client, channel


def read(channel: ByteChannel, size: int) -> bytes:
    """Return what one read returns, with room for `size` bytes."""
    target = memoryview(bytearray(size))
    return bytes(target[: channel.read(target)])


def test_a_large_target_is_filled_by_many_records(connected: tuple[Client, TlsChannel]) -> None:
    client, channel = connected
    data = bytes(range(256)) * (3 * RECORD // 256)
    for at in range(0, len(data), RECORD):
        client.tls.write(data[at : at + RECORD])
    client.send()
    assert read(channel, len(data)) == data
    assert not channel.has_more and not channel.is_ended


def test_bytes_of_a_record_that_was_read_in_part_are_announced(connected: tuple[Client, TlsChannel]) -> None:
    client, channel = connected
    client.tls.write(b"abcdef")
    client.tls.write(b"ghi")
    client.send()
    assert read(channel, 4) == b"abcd"
    assert channel.has_more  # the socket has reported it, and won't again
    assert read(channel, 100) == b"efghi"
    assert not channel.has_more


def test_half_a_record_is_waited_for_and_not_announced(connected: tuple[Client, TlsChannel]) -> None:
    client, channel = connected
    client.tls.write(b"x" * 1000)
    client.send(500)
    assert read(channel, 2000) == b""
    assert not channel.has_more and not channel.is_ended  # or the hub would look for the rest without a pause
    client.send()
    assert read(channel, 2000) == b"x" * 1000


def test_tiny_records_end_a_turn(connected: tuple[Client, TlsChannel]) -> None:
    client, channel = connected
    for _ in range(500):
        client.tls.write(b"x")
    client.send()
    found = read(channel, RECORD)
    assert 0 < len(found) < 500  # the decryption of each costs as much as that of a larger one
    assert channel.has_more
    while channel.has_more:
        found += read(channel, RECORD)
    assert found == b"x" * 500


@pytest.mark.parametrize("is_orderly", [True, False])
def test_the_end_follows_the_last_bytes(
    ends: tuple[socket.socket, socket.socket], connected: tuple[Client, TlsChannel], is_orderly: bool
) -> None:
    client, channel = connected
    client.tls.write(b"last")
    if is_orderly:
        with pytest.raises(ssl.SSLWantReadError):
            client.tls.unwrap()
    client.send()
    client.receive()  # or the end would be a reset
    ends[0].close()
    assert read(channel, 100) == b"last"
    assert read(channel, 100) == b""
    assert channel.is_ended


def test_bytes_that_are_no_tls_are_an_error(ends: tuple[socket.socket, socket.socket], connected: tuple[Client, TlsChannel]) -> None:
    ends[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with pytest.raises(OSError):
        read(connected[1], 100)


def test_what_the_socket_does_not_take_is_sent_later(
    ends: tuple[socket.socket, socket.socket], connected: tuple[Client, TlsChannel]
) -> None:
    client, channel = connected
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    data = bytes(range(256)) * 4096
    channel.put(bytearray(data))
    assert not channel.flush()
    assert channel.unsent > 0
    found = b""
    while len(found) < len(data):
        client.receive()
        channel.flush()
        try:
            found += client.tls.read(1 << 20)
        except ssl.SSLWantReadError:
            continue
    assert found == data
    assert channel.flush() and not channel.unsent


def test_a_channel_without_tls_reads_sends_and_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = ByteChannel(ends[1])
    assert read(channel, 10) == b"" and not channel.is_ended
    ends[0].sendall(b"hello")
    assert read(channel, 10) == b"hello"
    channel.put(bytearray(b"world"))
    assert channel.flush() and not channel.unsent
    assert ends[0].recv(10) == b"world"
    ends[0].close()
    assert read(channel, 10) == b"" and channel.is_ended
