"""The gate in front of the hub's server: it accepts the connections, bounds what each may cost, and passes their bytes on unread.

The server behind it is an Arrow Flight server, which says to whom it listens, but not to how many, for how long, or how much; which
keeps its certificates as long as it runs, and which waits for ever for a call whose client sends nothing. The gate has the answers to that:

    client --- TLS ---> gate ---> server, on a loopback port or a unix socket of its own
                         ^           |
                         `-----------' what the handlers know: who it is, and that a batch was stored

  - Limits: see `Limits`. What is beyond them is refused or cut by a reset, with a `Reason`.
  - Certificates: TLS goes through undecrypted. Start a second server with the new ones and `retarget` the gate to it; who is connected
    stays with the first one, which ends when they are gone.
  - Shutdown: `close` lets connections end, then cuts them, and so every call of the server ends.

One thread does all of this; a connection that stands still costs two descriptors and no thread. It never reads what it can't pass on,
so the server's back-pressure reaches the client, and one that reads slowly stops its own connection alone. An end of stream in one
direction is passed on as such, and a reset as a reset: bytes that were cut off never look like an end.

A handler finds its connection by `proxy.connection(context.peer())`: the peer that the server sees is the gate's own address, which is
another one for each connection. That works for both kinds of target (on a unix socket the gate gives each of its ends a name, since a
nameless one would show as "unix:" alone), but Flight speaks TLS on TCP only. None means that the call came by another way than through
the gate, as any local user's may on a loopback port: refuse it.

What can't be told here: how fast a single message comes. Through TLS a slow one looks like the pings of a client that has nothing to send.
Several calls of one client may share a connection: each message that was dealt with makes room for its own bytes and no more, so that the
many small ones of one call don't let a huge one of another through.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import select
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from hub.server.limits import Address, ConnectionTable, Limits, Peer, Reason
from hub.server.relay import CHUNK, EXHAUSTED, Carriers, Relay
from kvspool import system
from kvspool.errors import Closed
from kvspool.handles import Handle

Target = Address | str  # of a server: its address, or the path of its unix socket

_BACKLOG = 512  # connections that the kernel keeps until they are accepted
_ACCEPTED_AT_ONCE = 64  # then those who are inside have their turn
_BESIDE = 1024  # bytes that a message takes on the wire besides its own: headers, and what Arrow, HTTP/2 and TLS put around it
_PATIENCE = 60  # times `idle_seconds` for which one that reads a stream may be silent: it may have enough to do with what it has
_FIRST_BYTES = 1 << 16  # of a client that has yet to be authenticated, at once; the first message of a shipper has half of that at most
_FIRST_RATE = 1 << 20  # bytes a second that it may send after those
_TRIES = 8  # to reach the server from a port that no other connection has
_LONGEST_TICK = 1.0  # seconds between two looks at the clock
_HANG_UP = struct.pack("ii", 1, 0)  # close by a reset, and keep nothing
_INCOMING = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_OUTGOING = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR

_logger = logging.getLogger("kvspool")


class ProxyStats(msgspec.Struct, frozen=True):
    """What went through a gate since it was started. Bytes in are those that clients sent."""

    open: int
    unauthenticated: int
    accepted: int
    refused: dict[Reason, int]
    cut: dict[Reason, int]
    bytes_in: int
    bytes_out: int


class ProxiedConnection(Handle):
    """A client's connection to the server behind the gate. Handlers get it from `TcpProxy.connection`, and may use it in any thread."""

    def __init__(self, proxy: TcpProxy, remote_peer: Peer, client: socket.socket, server: socket.socket, peer: str) -> None:
        """Made by the gate alone."""
        self.peer = peer  # what the server sees
        self.remote_peer = remote_peer
        self.client, self.server = client, server
        self.inward = Relay(client, server, proxy._carriers)
        self.outward = Relay(server, client, proxy._carriers)
        self.is_reached = False  # the server has accepted
        self.opened = self.heard = proxy._now
        self._dealt_with = 0  # bytes that came in, and that no message on its way can be made of any more
        self._streams = 0  # that are being sent
        self._lock = threading.Lock()  # handlers of several calls use it
        self._proxy = proxy

    @property
    def remote(self) -> Address:
        """Return the address that the client comes from."""
        return self.remote_peer.remote

    @property
    def name(self) -> str | None:
        """Return by which name the client was authenticated; None: it was not."""
        return self.remote_peer.name

    def authenticated(self, name: str) -> None:
        """Lift the limits of those who are not authenticated. Call it for each call that was let in; the first name stays."""
        if self._proxy._table.acquaint(self.remote_peer, name):
            self._proxy._do_soon(self, None)

    def progress(self, size: int = 0) -> None:
        """Make room for as many bytes as a message had that was dealt with: a batch that was stored, a request that was answered.

        Call it for a batch that was sent as well, with the little that the client sent to take it.
        """
        with self._lock:
            self._dealt_with = min(self.inward.count, self._dealt_with + size + (size >> 8) + _BESIDE)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Be more patient with a silent client while the `with` block runs, in which it is sent a stream that it takes as it likes."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                self.heard = max(self.heard, self._proxy._now)

    def close(self) -> None:
        """Cut the connection, soon. It may have ended already."""
        self._proxy._do_soon(self, Reason.BY_HANDLER)

    def allowance(self, limits: Limits) -> int:
        """Return how many bytes of the client may be passed on at once.

        One that has yet to be authenticated is only made to wait: its first batch arrives right after the headers that name the client. It
        may send `_FIRST_BYTES` at once and the rest slowly, since each call that it begins takes 15 bytes of it, and some KiB of memory.
        """
        if self.name is not None:
            return CHUNK
        so_far = _FIRST_BYTES + int((self._proxy._now - self.opened) * _FIRST_RATE)
        return max(0, min(CHUNK, min(limits.authentication_bytes, so_far) - self.inward.count))

    def is_excessive(self, limits: Limits) -> bool:
        """Return whether more bytes came in that no handler has dealt with than may be."""
        return self.inward.count - self._dealt_with > limits.progress_bytes

    def is_late(self, limits: Limits, now: float) -> Reason | None:
        """Return which limit of time the connection exceeds."""
        if self.name is None and now - self.opened > limits.authentication_seconds:
            return Reason.AUTHENTICATION_SECONDS
        if self.inward.is_stalled:
            self.heard = now  # it may have sent more, but the server takes nothing
        elif now - self.heard > limits.idle_seconds * (_PATIENCE if self._streams else 1):
            return Reason.IDLE
        return None

    def __repr__(self) -> str:
        return f"<ProxiedConnection of {self.name or 'nobody known'} from {self.remote[0]} port {self.remote[1]}>"


class TcpProxy(Handle):
    """Listens, and passes connections on to a server. See the module's docstring."""

    def __init__(
        self,
        listen: Address = ("127.0.0.1", 0),
        target: Target = ("127.0.0.1", 0),
        limits: Limits | None = None,
        on_event: Callable[[Reason, Address], None] | None = None,
    ) -> None:
        """Prepare a gate that listens at an IP address and port, and passes on to another one, or to the path of a unix socket.

        Port 0 takes any that is free. `on_event` hears of each connection that is refused or cut, in the gate's thread: it has to be
        quick, and may not close the gate. ValueError for addresses that are no IP addresses.
        """
        self.limits = limits or Limits()
        self._listen_at = listen
        self._target = _checked(target)
        _checked(listen)
        self._on_event = on_event
        self._table = ConnectionTable(self.limits)
        self._connections: dict[str, ProxiedConnection] = {}  # by what the server sees
        self._sockets: dict[int, ProxiedConnection] = {}
        self._ready: dict[Relay, ProxiedConnection] = {}  # may have something to pass on, in the order of their turns
        self._to_do: deque[tuple[ProxiedConnection, Reason | None]] = deque()  # for handlers
        self._accepted = self._bytes_in = self._bytes_out = 0
        self._refused = dict.fromkeys(Reason, 0)
        self._cut = dict.fromkeys(Reason, 0)
        self._tick = max(0.01, min(_LONGEST_TICK, self.limits.authentication_seconds / 4, self.limits.idle_seconds / 4))
        self._is_resting = False  # accepts nothing until the next tick
        self._ends_at: float | None = None  # no more are accepted, and at this time the rest is cut
        self._wakeup = _Wakeup()
        self._thread: threading.Thread | None = None

    def start(self) -> TcpProxy:
        """Listen at what is `address` from then on, and begin to pass on; a second call changes nothing.

        Raises OSError, with the address, where nobody may listen; Closed if the gate was closed.
        """
        if self._ends_at is not None:
            raise Closed("the gate was closed; make a new one")
        if self._thread is not None:
            return self
        self._now = self._next_tick = system.port.monotonic()
        with ExitStack() as undo:
            self._listener = undo.enter_context(_listen(self._listen_at))
            self._epoll = undo.enter_context(select.epoll())
            self._epoll.register(self._listener, select.EPOLLIN)
            self._epoll.register(self._wakeup.hang(), select.EPOLLIN)
            undo.callback(self._wakeup.close)
            self._carriers = Carriers()
            undo.pop_all()
        self.address: Address = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()
        return self

    def retarget(self, target: Target) -> None:
        """Pass new connections on to another server; those that are there stay where they are. ValueError as for the constructor."""
        self._target = _checked(target)

    def connection(self, peer: str) -> ProxiedConnection | None:
        """Return the connection that a call came by, by its `context.peer()`; None if it didn't come through here, or has ended."""
        return self._connections.get(peer)

    def cut(self, name: str, reason: Reason) -> None:
        """Cut all connections that were authenticated by a name, soon, and those of clients that sent much and were not authenticated yet.
        In any thread."""
        for connection in list(self._connections.values()):
            if connection.name == name or (connection.name is None and connection.inward.count > _FIRST_BYTES // 2):
                self._do_soon(connection, reason)

    def stats(self) -> ProxyStats:
        """Return what went through so far."""
        return ProxyStats(
            open=len(self._connections),
            unauthenticated=self._table.unauthenticated,
            accepted=self._accepted,
            refused={reason: count for reason, count in self._refused.items() if count},
            cut={reason: count for reason, count in self._cut.items() if count},
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
        )

    def close(self, grace: float = 0.0) -> None:
        """Listen no more, wait up to `grace` seconds until the last connection has ended, cut those that are left, and return."""
        self._ends_at = system.port.monotonic() + grace
        self._wakeup.ring()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> TcpProxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # All that follows runs in the gate's thread.

    def _run(self) -> None:
        # A write to a socket that its peer has closed raises a signal, and `splice` can't be told not to.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            while not self._is_over():
                events = self._epoll.poll(self._wait())
                self._now = system.port.monotonic()
                for fd, mask in events:
                    self._notice(fd, mask)
                for relay, connection in list(self._ready.items()):
                    self._take_turn(relay, connection)
                while self._to_do:
                    self._do(*self._to_do.popleft())
                if self._now >= self._next_tick:
                    self._look_at_the_clock()
        finally:
            self._leave()

    def _wait(self) -> float | None:
        """Return how long nothing has to be done if nothing happens; None: for ever."""
        if self._ready:
            return 0
        if self._ends_at is not None:
            return max(0, min(self._ends_at - self._now, self._tick))
        return self._tick if self._connections or self._is_resting else None

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        self._stop_listening()
        return not self._connections or self._now >= self._ends_at

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            if not self._is_resting:
                self._epoll.unregister(self._listener)
            self._listener.close()

    def _leave(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection, Reason.SHUTDOWN)
        self._stop_listening()
        self._wakeup.close()
        self._epoll.close()
        self._carriers.close()

    def _notice(self, fd: int, mask: int) -> None:
        """Take note of what a socket is ready for. The kernel says so once, so what is ready stays so until a turn finds otherwise."""
        connection = self._sockets.get(fd)
        if connection is None:
            if fd == self._listener.fileno():
                self._accept()
            else:
                self._wakeup.hush()
            return
        if fd == connection.server.fileno() and mask & select.EPOLLOUT and not mask & select.EPOLLERR:
            connection.is_reached = True
        is_client = fd == connection.client.fileno()
        coming, going = (connection.inward, connection.outward) if is_client else (connection.outward, connection.inward)
        is_waiting = is_client and not connection.allowance(self.limits)
        if mask & select.EPOLLERR and (coming.has_ended or is_waiting):
            self._fail(connection)  # which nobody would notice by reading
            return
        if mask & _INCOMING:
            self._ready[coming] = connection
        if mask & _OUTGOING and going.is_stalled:
            self._ready[going] = connection

    # Who comes in.

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, remote = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Who waits stays in the kernel's queue: it would wake us at once for the same, so look away for a moment.
                _logger.warning("the gate accepts no connections for a moment: %s", error)
                self._rest()
                return
            self._accepted += 1
            self._admit(client, remote[:2])

    def _rest(self) -> None:
        if not self._is_resting:
            self._is_resting = True
            self._next_tick = self._now + self._tick
            self._epoll.unregister(self._listener)

    def _admit(self, client: socket.socket, remote: Address) -> None:
        remote_peer = Peer(remote)
        reason = self._table.enter(remote_peer)
        if reason is None:
            try:
                self._connect(client, remote_peer)
            except OSError as error:
                self._table.leave(remote_peer)
                reason = Reason.EXHAUSTED if error.errno in EXHAUSTED else Reason.UNREACHABLE
        if reason is not None:
            self._count(self._refused, reason, remote)
            _reset(client)

    def _connect(self, client: socket.socket, remote_peer: Peer) -> None:
        """Make a connection for a client that may come in. Raises OSError, and leaves nothing then."""
        target = self._target
        with ExitStack() as undo:
            for _ in range(_TRIES):
                server, peer = self._reach_path(target) if isinstance(target, str) else _reach(target)
                undo.enter_context(server)
                # The kernel may give the same port out for the old target and for the new one.
                if peer not in self._connections:
                    break
            else:
                raise OSError(errno.EADDRINUSE, "no port is free to reach the server from")
            _prepare(client)
            self._register(ProxiedConnection(self, remote_peer, client, server, peer))
            undo.pop_all()

    def _reach_path(self, path: str) -> tuple[socket.socket, str]:
        name = f"kvspool-gate-{system.port.random(16).hex()}"  # who could guess it could take it first
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            server.bind("\0" + name)
            server.connect(path)
        except BaseException:
            server.close()
            raise
        return server, f"unix-abstract:{name}"

    def _register(self, connection: ProxiedConnection) -> None:
        everything = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
        self._epoll.register(connection.client, everything)
        try:
            self._epoll.register(connection.server, everything)
        except BaseException:
            self._epoll.unregister(connection.client)
            raise
        for end in (connection.client, connection.server):
            self._sockets[end.fileno()] = connection
        self._connections[connection.peer] = connection

    # What passes through.

    def _take_turn(self, relay: Relay, connection: ProxiedConnection) -> None:
        """Let a flow pass on one chunk; then it is the next one's turn."""
        if self._ready.pop(relay, None) is None:
            return  # its connection ended a moment ago
        try:
            if self._pass_on(relay, connection):
                self._ready[relay] = connection
        except OSError:
            self._fail(connection)

    def _pass_on(self, relay: Relay, connection: ProxiedConnection) -> bool:
        """Pass on what a flow has, a chunk at most; returns whether there may be more."""
        if not relay.send():
            return False
        limit = connection.allowance(self.limits) if relay is connection.inward else CHUNK
        received = relay.receive(limit) if limit else None
        if received is None:
            return False
        if received == 0:
            if not relay.has_ended:
                relay.end()
            if connection.inward.has_ended and connection.outward.has_ended:
                self._end(connection, None)
            return False
        if relay is connection.inward:
            self._bytes_in += received
            connection.heard = self._now
            if connection.is_excessive(self.limits):
                self._end(connection, Reason.PROGRESS_BYTES)
                return False
        else:
            self._bytes_out += received
        return relay.send()

    def _fail(self, connection: ProxiedConnection) -> None:
        """End a connection one end of which is broken."""
        if connection.is_reached:
            self._end(connection, Reason.RESET)
        else:
            self._end(connection, Reason.UNREACHABLE, self._refused)

    # Who goes.

    def _do_soon(self, connection: ProxiedConnection, reason: Reason | None) -> None:
        """In any thread: let the gate's thread cut a connection; without a reason, read again from the client that had to wait."""
        self._to_do.append((connection, reason))
        self._wakeup.ring()

    def _do(self, connection: ProxiedConnection, reason: Reason | None) -> None:
        if reason is not None:
            self._end(connection, reason)
        elif self._connections.get(connection.peer) is connection:
            self._ready[connection.inward] = connection

    def _look_at_the_clock(self) -> None:
        self._next_tick = self._now + self._tick
        for connection in list(self._connections.values()):
            connection.progress()  # pings are dealt with by themselves
            if connection.name is None:
                self._ready[connection.inward] = connection  # it may send more than a moment ago
            reason = connection.is_late(self.limits, self._now)
            if reason is not None:
                self._end(connection, reason)
        if self._is_resting and self._ends_at is None:
            self._epoll.register(self._listener, select.EPOLLIN)
            self._is_resting = False

    def _end(self, connection: ProxiedConnection, reason: Reason | None, tally: dict[Reason, int] | None = None) -> None:
        """Let go of a connection, if it wasn't yet: without a reason both sides have ended, otherwise both are reset."""
        if self._connections.get(connection.peer) is not connection:
            return
        del self._connections[connection.peer]
        self._table.leave(connection.remote_peer)
        if reason is not None:
            self._count(self._cut if tally is None else tally, reason, connection.remote)
        for relay in (connection.inward, connection.outward):
            self._ready.pop(relay, None)
            relay.drop()
        for end in (connection.client, connection.server):
            del self._sockets[end.fileno()]
            self._epoll.unregister(end)
            end.close() if reason is None else _reset(end)

    def _count(self, tally: dict[Reason, int], reason: Reason, remote: Address) -> None:
        tally[reason] += 1
        if self._on_event is not None:
            try:
                self._on_event(reason, remote)
            except Exception:
                _logger.exception("what was to hear of refused and cut connections failed")


class _Wakeup(Handle):
    """Wakes the gate's thread; rung by any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1

    def hang(self) -> int:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self._fd

    def ring(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


def _checked(place: Target) -> Target:
    """Return an address, or raise ValueError if it would have to be looked up first."""
    if not isinstance(place, str):
        host, port = place
        ipaddress.ip_address(host)
        if not 0 <= port <= 65535:
            raise ValueError(f"a port is a number up to 65535, not {port}")
    return place


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        error.add_note(f"the gate was to listen at {address[0]} port {address[1]}")
        raise
    listener.setblocking(False)
    return listener


def _reach(address: Address) -> tuple[socket.socket, str]:
    """Begin to connect to a server; return the socket, and how the server sees this end, in the words of gRPC."""
    server = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        _prepare(server)
        with suppress(BlockingIOError):
            server.connect(address)
        host, port = server.getsockname()[:2]
    except BaseException:
        server.close()
        raise
    return server, f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _prepare(end: socket.socket) -> None:
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what came goes on at once


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP)
    end.close()
