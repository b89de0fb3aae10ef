"""One accepted connection: its socket, TLS, and the calls of its HTTP/2 session. Everything is on the event loop, and nothing blocks."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hub.server.budget import Share
from hub.server.call import Call, Caller, Code, Resources, Status
from hub.server.channel import ByteChannel, TlsChannel
from hub.server.http2 import Budgets, Http2Session, Violation
from hub.server.limits import Limits, Peer, Reason
from hub.server.slots import CallSlots
from hub.server.status_headers import CallHeaders
from hub.server.tls import identity
from kvspool import system
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from hub.server.streams import WireStream

CHUNK = 1 << 17  # bytes to be sent that are collected
TURN = 8  # reads or writes of one connection before others have their turn
FRAMES = 4  # the same, of its frames that h2 handles: each may begin a call
MOST_UNSENT_CONTROL = 1 << 16  # bytes
logger = logging.getLogger("kvspool.hub")


class ConnectionHost(Protocol):
    """The listener of a connection."""

    limits: Limits
    memory: Budgets
    pool: Executor
    slots: CallSlots
    buffer: memoryview  # for received bytes, of all connections alternately
    encrypted: memoryview  # for those of TLS

    def acquaint(self, connection: WireConnection, name: str) -> None:
        """Note the name of a connection. Raises HubFull if that has too many."""

    def left(self, connection: WireConnection, reason: Reason | None) -> None:
        """Forget a closed connection. reason: why it was cut."""

    def run_soon(self, work: Callable[[], object]) -> None:
        """Call a function on the event loop. Callable in any thread."""


class WireConnection(Handle):
    """A connection of a client. It is the calls' `Link`."""

    def __init__(self, host: ConnectionHost, sock: socket.socket, peer: Peer, context: ssl.SSLContext | None) -> None:
        """Take over an accepted socket."""
        self.caller = Caller(peer.remote)
        self.peer = peer
        peer.cut = self.cut
        self.is_open = True
        self.session = Http2Session(host.limits, host.memory, self)
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._resources = Resources(
            host.pool,
            host.memory.working,
            Share(max(host.memory.working.most // 2, 1)),
            host.memory.unsent,
            Share(max(host.memory.unsent.most // 2, 1)),
        )
        self._is_writing = False  # the socket's buffer is full
        self._will_send = False
        self._will_continue = False
        self._rest = memoryview(b"")  # received, and not used yet
        self._is_handshaking = context is not None
        self._closes_when_sent: Reason | None = None
        self._is_pinged = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel = ByteChannel(sock) if context is None else TlsChannel(sock, context, host.encrypted)
        self._fd = sock.fileno()
        self._loop.add_reader(self._fd, self._readable)
        if context is None:
            self.has_output()

    @property
    def name(self) -> str | None:
        """Return the authenticated name of the client; None before."""
        return self.peer.name

    @property
    def is_ready(self) -> bool:
        """Return whether the handshakes of TLS and HTTP/2 are complete."""
        return self.session.is_ready

    def authenticated(self, name: str) -> None:
        """Lift the limits of unauthenticated connections. The first name stays. Raises HubFull if that has too many connections."""
        self._host.acquaint(self, name)
        for share in (self.session.received_share, self._resources.working_share, self._resources.unsent_share):
            share.owner = self.name, self.peer.origin

    def close(self) -> None:
        """Cut the connection soon. Callable in any thread."""
        self._host.run_soon(lambda: self.cut(Reason.BY_HANDLER))

    # In.

    def _readable(self) -> None:
        if self._will_continue:
            return
        try:
            self.peer.heard = system.port.monotonic()
            self._is_pinged = False
            if not self._is_handshaking or self._shake_hands():
                self._receive()
        except Violation as error:
            self._violated(error)
        except OSError:  # TLS's errors too
            self.cut(Reason.RESET)
        except Exception:
            logger.exception("a connection of %s port %s is cut", *self.peer.remote)
            self.cut(Reason.PROTOCOL)

    def _continue(self) -> None:
        self._will_continue = False
        if self.is_open:
            self._readable()

    def _receive(self) -> None:
        """Receive what there is, within a turn. Raises OSError and Violation."""
        channel, session = self._channel, self.session
        session.frames_left = FRAMES
        self._rest = self._rest[session.receive(self._rest) :]
        for _ in range(TURN):
            if self._rest or session.frames_left <= 0 or not self.is_open:
                break
            target = session.destination()
            if target is not None:
                room, size = len(target), channel.read(target)
                if size:
                    session.arrived(size)
            else:
                buffer = self._host.buffer
                room, size = len(buffer), channel.read(buffer)
                used = session.receive(buffer[:size])
                self._rest = memoryview(bytes(buffer[used:size]))  # others need the buffer
            if channel.is_ended:
                self.cut(None if self.is_ready and not session.streams else Reason.RESET)
            if size < room:
                break
        if self.is_open:
            self._look_at_channel()

    def _look_at_channel(self) -> None:
        """Continue soon with bytes that were received, and send TLS's own; cut a client that asks for answers, and doesn't read them."""
        channel = self._channel
        if (channel.has_more or self._rest) and not self._will_continue:
            self._will_continue = True
            self._loop.call_soon(self._continue)
        if not channel.unsent:
            return
        if self._is_writing and self.session.unsent_control + max(0, channel.unsent - 2 * CHUNK) > MOST_UNSENT_CONTROL:
            self.cut(Reason.UNSENT)
        self.has_output()

    def _shake_hands(self) -> bool:
        """Continue the handshake of TLS, and return whether it is complete. Raises OSError."""
        channel = self._channel
        assert isinstance(channel, TlsChannel)
        is_complete = channel.shake_hands()
        if channel.unsent:
            self._loop.add_writer(self._fd, self._writable)
        if not is_complete:
            return False
        self._is_handshaking = False
        tls = channel.tls
        if tls.selected_alpn_protocol() != "h2":
            raise OSError("the client doesn't speak HTTP/2")
        certificate = tls.getpeercert()
        if certificate:
            self.caller = Caller(self.peer.remote, identity(certificate), tls.getpeercert(binary_form=True) or b"")
        self.has_output()
        return True

    def _violated(self, error: Violation) -> None:
        logger.debug("%s port %s: %s", *self.peer.remote, error)
        self.session.close()
        self.session.say_goodbye(error.code, str(error))
        self._send(last=True)
        self.cut(error.reason)

    # Out.

    def has_output(self) -> None:
        """Send soon."""
        if not self._will_send and not self._is_writing and not self._is_handshaking and self.is_open:
            self._will_send = True
            self._loop.call_soon(self._send)

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        if self._is_handshaking:
            self._readable()
            return
        self._is_writing = False
        self._send()

    def _send(self, last: bool = False) -> None:
        self._will_send = False
        if not self.is_open or self._is_writing or self._is_handshaking:
            return
        try:
            for _ in range(TURN):
                if not self._channel.flush():
                    self._wait_for_room(last)
                    return
                data = self.session.output(CHUNK)
                if not data:
                    self._sent_all()
                    return
                self._channel.put(data)
            self.has_output()
        except OSError:
            if not last:
                self.cut(Reason.RESET)

    def _wait_for_room(self, last: bool) -> None:
        if not last:
            self._is_writing = True
            self._loop.add_writer(self._fd, self._writable)

    def _sent_all(self) -> None:
        if self.session.is_ending and not self.session.streams and self._closes_when_sent is not None:
            self.cut(None)

    def retire(self, reason: Reason) -> None:
        """Announce the end, and close when the present calls have ended."""
        self._closes_when_sent = reason
        if self._is_handshaking or not self.is_ready:
            self.cut(None)
        else:
            self.session.say_goodbye()
            self.has_output()

    def cut(self, reason: Reason | None) -> None:
        """Close now, with all calls; a second time has no effect."""
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self.session.close()
        self._channel.close(is_orderly=reason is None)
        self._host.left(self, reason)

    # Time.

    def look(self, now: float) -> None:
        """Cut the connection if it is late."""
        limits = self._host.limits
        if not self.is_ready:
            if now - self.peer.opened > limits.handshake_seconds:
                self.cut(Reason.HANDSHAKE)
        elif self.name is None and now - self.peer.opened > limits.authentication_seconds:
            self.cut(Reason.AUTHENTICATION_SECONDS)
        elif now - self.peer.heard > limits.idle_seconds:
            if not self.session.streams:
                self.retire(Reason.IDLE)
            elif not self._is_pinged:
                self._is_pinged = True
                self.session.ping()
            elif now - self.peer.heard > 2 * limits.idle_seconds:
                self.cut(Reason.IDLE)

    # Calls.

    def begin(self, stream: WireStream, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin a call."""
        try:
            request = CallHeaders(headers)
            call = Call(request.method, request.metadata, self, request.deadline, stream, self._resources)
            stream.cancel = self._host.slots.begin(call, stream.finish)
        except Status as status:
            stream.finish(status)
        except Exception:
            logger.exception("a call was not admitted")
            stream.finish(Status(Code.INTERNAL, "the hub has failed; its log has the reason"))
