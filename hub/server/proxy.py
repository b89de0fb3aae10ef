"""A TCP proxy that accepts the hub's connections, limits the cost of each, and relays their bytes unread.

The hub's server is an Arrow Flight server. That can't limit the number, duration or volume of connections, and keeps its certificates for
its whole life. It waits forever for a call whose client sends nothing. The proxy adds these limits:

    client --- TLS ---> proxy ---> server, on its own loopback port or unix socket
                          ^           |
                          `-----------' reports of the handlers: the caller's identity, and processed batches

  - Limits: see `Limits`. Connections beyond them are refused, or cut by a reset, with a `Reason`.
  - Certificates: TLS is relayed without decryption. Start a second server with new certificates and `retarget` the proxy to it. Existing
    connections stay with the first one, which ends after they have ended.
  - Shutdown: `close` waits for connections to end, then cuts them, which ends every call of the server.

One thread does all of this; an idle connection costs two descriptors and no thread. The proxy never reads bytes that it can't relay. So the
server's back-pressure reaches the client, and a slow reader stops only its own connection. An end of stream in one direction is relayed
as such, and a reset as a reset: truncated bytes never look like an end.

A handler finds its connection by `proxy.connection(context.peer())`: the server's peer is the proxy's own address, which differs for each
connection. That works for both kinds of target, but Flight speaks TLS only over TCP. On a unix socket the proxy gives each of its ends a
name, because a nameless one would appear as "unix:" alone. None means that the call didn't come through the proxy, as a local user's
on a loopback port: refuse it.

The proxy cannot detect a single slow message: through TLS it looks like the pings of an idle client. Several calls of one client may
share a connection. Each processed message allows only as many new bytes as it had. So many small messages of one call don't allow a huge
one of another.
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
from kvspool.system.handles import Handle

Target = Address | str  # of a server: its address, or the path of its unix socket

_BACKLOG = 512  # connections that the kernel queues until they are accepted
_ACCEPTED_AT_ONCE = 64  # then present connections have their turn
_EXTRA = 1024  # bytes of a message on the wire in addition to its own: headers, and those of Arrow, HTTP/2 and TLS
_PATIENCE = 60  # times `idle_seconds` for which a reader of a stream may be silent: it may be processing records
_FIRST_BYTES = 1 << 16  # from an unauthenticated client, at once; the first message of a shipper has at most half of that
_FIRST_RATE = 1 << 20  # bytes a second that it may send after those
_TRIES = 8  # attempts to reach the server from an unused port
_LONGEST_TICK = 1.0  # seconds between two checks of the clock
_HANG_UP = struct.pack("ii", 1, 0)  # close by a reset, without lingering
_INCOMING = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_OUTGOING = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR

_logger = logging.getLogger("kvspool")


class ProxyStats(msgspec.Struct, frozen=True):
    """Statistics of a proxy since its start. Bytes in are those that clients sent."""

    open: int
    unauthenticated: int
    accepted: int
    refused: dict[Reason, int]
    cut: dict[Reason, int]
    bytes_in: int
    bytes_out: int


class ProxiedConnection(Handle):
    """A client's connection to the server through the proxy. Handlers get it from `TcpProxy.connection`, and may use it in any thread."""

    def __init__(self, proxy: TcpProxy, remote_peer: Peer, client: socket.socket, server: socket.socket, peer: str) -> None:
        """Created only by the proxy."""
        self.peer = peer  # the peer's name at the server
        self.remote_peer = remote_peer
        self.client, self.server = client, server
        self.inward = Relay(client, server, proxy._carriers)
        self.outward = Relay(server, client, proxy._carriers)
        self.is_reached = False  # the server has accepted
        self.opened = self.heard = proxy._now
        self._dealt_with = 0  # bytes of processed messages: no pending message can contain them
        self._streams = 0  # streams being sent
        self._lock = threading.Lock()  # handlers of several calls use it
        self._proxy = proxy

    @property
    def remote(self) -> Address:
        """Return the client's address."""
        return self.remote_peer.remote

    @property
    def name(self) -> str | None:
        """Return the authenticated name of the client; None without authentication."""
        return self.remote_peer.name

    def authenticated(self, name: str) -> None:
        """Lift the limits of unauthenticated connections. Call it for each accepted call; the first name stays."""
        if self._proxy._table.acquaint(self.remote_peer, name):
            self._proxy._do_soon(self, None)

    def progress(self, size: int = 0) -> None:
        """Allow as many new bytes as a processed message had: a stored batch, an answered request.

        Call it for a sent batch as well, with the few bytes by which the client receives it.
        """
        with self._lock:
            self._dealt_with = min(self.inward.count, self._dealt_with + size + (size >> 8) + _EXTRA)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Tolerate a silent client for longer inside the `with` block, in which it reads a stream at its own pace."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                self.heard = max(self.heard, self._proxy._now)

    def close(self) -> None:
        """Cut the connection soon. It may have ended already."""
        self._proxy._do_soon(self, Reason.BY_HANDLER)

    def allowance(self, limits: Limits) -> int:
        """Return how many bytes of the client may be relayed at once.

        An unauthenticated client is only delayed: its first batch arrives right after the headers that name the client. It may send
        `_FIRST_BYTES` at once and the rest slowly, because each call that it begins takes only 15 bytes, but some KiB of memory.
        """
        if self.name is not None:
            return CHUNK
        so_far = _FIRST_BYTES + int((self._proxy._now - self.opened) * _FIRST_RATE)
        return max(0, min(CHUNK, min(limits.authentication_bytes, so_far) - self.inward.count))

    def is_excessive(self, limits: Limits) -> bool:
        """Return whether more unprocessed bytes arrived than permitted."""
        return self.inward.count - self._dealt_with > limits.progress_bytes

    def is_late(self, limits: Limits, now: float) -> Reason | None:
        """Return the exceeded time limit."""
        if self.name is None and now - self.opened > limits.authentication_seconds:
            return Reason.AUTHENTICATION_SECONDS
        if self.inward.is_stalled:
            self.heard = now  # it may have sent more, but the server isn't reading
        elif now - self.heard > limits.idle_seconds * (_PATIENCE if self._streams else 1):
            return Reason.IDLE
        return None

    def __repr__(self) -> str:
        return f"<ProxiedConnection of {self.name or 'an unknown client'} from {self.remote[0]} port {self.remote[1]}>"


class TcpProxy(Handle):
    """Listens, and relays connections to a server. See the module's docstring."""

    def __init__(
        self,
        listen: Address = ("127.0.0.1", 0),
        target: Target = ("127.0.0.1", 0),
        limits: Limits | None = None,
        on_event: Callable[[Reason, Address], None] | None = None,
    ) -> None:
        """Prepare a proxy that listens at an IP address and port, and relays to another one, or to the path of a unix socket.

        Port 0 means any free port. `on_event` is called for each refused or cut connection, in the proxy's thread: it must be quick, and
        may not close the proxy. Raises ValueError for addresses that are no IP addresses.
        """
        self.limits = limits or Limits()
        self._listen_at = listen
        self._target = _checked(target)
        _checked(listen)
        self._on_event = on_event
        self._table = ConnectionTable(self.limits)
        self._connections: dict[str, ProxiedConnection] = {}  # by the peer's name at the server
        self._sockets: dict[int, ProxiedConnection] = {}
        self._ready: dict[Relay, ProxiedConnection] = {}  # may have bytes to relay, in the order of their turns
        self._to_do: deque[tuple[ProxiedConnection, Reason | None]] = deque()  # requests of handlers
        self._accepted = self._bytes_in = self._bytes_out = 0
        self._refused = dict.fromkeys(Reason, 0)
        self._cut = dict.fromkeys(Reason, 0)
        self._tick = max(0.01, min(_LONGEST_TICK, self.limits.authentication_seconds / 4, self.limits.idle_seconds / 4))
        self._is_resting = False  # accepts nothing until the next tick
        self._ends_at: float | None = None  # no more connections are accepted, and at this time the rest is cut
        self._wakeup = _Wakeup()
        self._thread: threading.Thread | None = None

    def start(self) -> TcpProxy:
        """Listen, set `address`, and begin to relay; a second call has no effect.

        Raises OSError with the address if it can't be listened on; Closed if the proxy was closed.
        """
        if self._ends_at is not None:
            raise Closed("the proxy was closed; create a new one")
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
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        return self

    def retarget(self, target: Target) -> None:
        """Relay new connections to another server; existing ones stay. Raises ValueError as the constructor."""
        self._target = _checked(target)

    def connection(self, peer: str) -> ProxiedConnection | None:
        """Return the connection of a call, by its `context.peer()`; None if it didn't come through this proxy, or has ended."""
        return self._connections.get(peer)

    def cut(self, name: str, reason: Reason) -> None:
        """Cut all connections authenticated by a name, soon, and those of unauthenticated clients that sent much. Callable in any thread.
        """
        for connection in list(self._connections.values()):
            if connection.name == name or (connection.name is None and connection.inward.count > _FIRST_BYTES // 2):
                self._do_soon(connection, reason)

    def stats(self) -> ProxyStats:
        """Return the statistics so far."""
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
        """Stop listening, wait up to `grace` seconds for connections to end, cut the rest, and return."""
        self._ends_at = system.port.monotonic() + grace
        self._wakeup.ring()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> TcpProxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Everything below runs in the proxy's thread.

    def _run(self) -> None:
        # A write to a socket that its peer has closed raises a signal, which `splice` can't suppress.
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
        """Return how long to wait without events; None: forever."""
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
        """Note a socket's readiness. The kernel reports it once, so it is kept until a turn finds otherwise."""
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
            self._fail(connection)  # reading would not reveal that
            return
        if mask & _INCOMING:
            self._ready[coming] = connection
        if mask & _OUTGOING and going.is_stalled:
            self._ready[going] = connection

    # Arrivals.

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, remote = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Waiting clients stay in the kernel's queue, which would wake us again at once; so pause for a moment.
                _logger.warning("the proxy accepts no connections for a moment: %s", error)
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
        """Create a connection for an admitted client. Raises OSError, and leaves nothing then."""
        target = self._target
        with ExitStack() as undo:
            for _ in range(_TRIES):
                server, peer = self._reach_path(target) if isinstance(target, str) else _reach(target)
                undo.enter_context(server)
                # The kernel may assign the same port for the old target and for the new one.
                if peer not in self._connections:
                    break
            else:
                raise OSError(errno.EADDRINUSE, "no port is free to reach the server from")
            _prepare(client)
            self._register(ProxiedConnection(self, remote_peer, client, server, peer))
            undo.pop_all()

    def _reach_path(self, path: str) -> tuple[socket.socket, str]:
        name = f"kvspool-gate-{system.port.random(16).hex()}"  # unguessable, so that no other process can take it first
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

    # Relaying.

    def _take_turn(self, relay: Relay, connection: ProxiedConnection) -> None:
        """Relay one chunk; then the next one has its turn."""
        if self._ready.pop(relay, None) is None:
            return  # its connection has just ended
        try:
            if self._pass_on(relay, connection):
                self._ready[relay] = connection
        except OSError:
            self._fail(connection)

    def _pass_on(self, relay: Relay, connection: ProxiedConnection) -> bool:
        """Relay at most a chunk. Return whether there may be more."""
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
        """End a connection with a broken end."""
        if connection.is_reached:
            self._end(connection, Reason.RESET)
        else:
            self._end(connection, Reason.UNREACHABLE, self._refused)

    # Departures.

    def _do_soon(self, connection: ProxiedConnection, reason: Reason | None) -> None:
        """In any thread: make the proxy's thread cut a connection; without a reason, resume reading from a delayed client."""
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
            connection.progress()  # pings are always allowed
            if connection.name is None:
                self._ready[connection.inward] = connection  # its allowance has grown
            reason = connection.is_late(self.limits, self._now)
            if reason is not None:
                self._end(connection, reason)
        if self._is_resting and self._ends_at is None:
            self._epoll.register(self._listener, select.EPOLLIN)
            self._is_resting = False

    def _end(self, connection: ProxiedConnection, reason: Reason | None, tally: dict[Reason, int] | None = None) -> None:
        """Close a connection, once: without a reason both sides have ended, otherwise both are reset."""
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
                _logger.exception("the callback for refused and cut connections failed")


class _Wakeup(Handle):
    """Wakes the proxy's thread; can be rung by any thread, at any time."""

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
    """Return an address. Raises ValueError for one that needs a name lookup."""
    if not isinstance(place, str):
        host, port = place
        ipaddress.ip_address(host)
        if not 0 <= port <= 65535:
            raise ValueError(f"a port must be a number up to 65535, not {port}")
    return place


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        error.add_note(f"while the proxy tried to listen at {address[0]} port {address[1]}")
        raise
    listener.setblocking(False)
    return listener


def _reach(address: Address) -> tuple[socket.socket, str]:
    """Begin to connect to a server. Return the socket, and the server's name for this end, in gRPC's notation."""
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
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # relayed bytes leave at once


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP)
    end.close()
