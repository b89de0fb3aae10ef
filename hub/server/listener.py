"""A server of gRPC: it accepts connections, bounds them from their first byte, and serves their calls.

    with Listener(service, ("127.0.0.1", 0), context=lambda: server_context(chain, key)) as listener:
        listener.address

One thread has the event loop: it accepts, splits frames, encrypts, and runs the coroutines of the handlers. A small pool has the threads in
which they block.

**Bounds**, each in `Limits`: connections, in all and of each address, unauthenticated and other; the time of the handshakes; streams of a
connection, calls of all, and calls that wait for the end of others; headers; the size of messages; three budgets of memory; control
frames. See `hub.server.http2` and `hub.server.streams`.

**Certificates.** `context` is asked for each accepted connection, so that a new one is used at once. It should return the same object
while nothing has changed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from operator import itemgetter

import msgspec

from hub.server.budget import Budget
from hub.server.call import Code, Service, Status
from hub.server.channel import ENCRYPTED, RECORD
from hub.server.connections import WireConnection
from hub.server.http2 import Budgets
from hub.server.limits import Address, ConnectionTable, Limits, Peer, Reason
from hub.server.slots import LATER, CallSlots
from hub.server.streams import WireStream
from hub.server.waiting_room import WaitingRoom
from hub.server.worker_pool import WorkerPool
from kvspool import system
from kvspool.errors import Closed
from kvspool.system.handles import Handle

BACKLOG = 512  # connections that the kernel queues until they are accepted
ACCEPTED_AT_ONCE = 64  # then present connections have their turn
RESERVE = 8  # part of the memory for clients that use little, while others use up the rest
TICK = 1.0  # seconds between two checks of the clock
ADMIT = 0.02  # seconds to gather places that get free, until those that wait for one get them
WAITS_FOR_PLACE = Reason.UNAUTHENTICATED, Reason.UNAUTHENTICATED_OF_ADDRESS
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
logger = logging.getLogger("kvspool.hub")


class ListenerStats(msgspec.Struct, frozen=True):
    """Statistics of a listener; counts of events are since its start."""

    open: int
    unauthenticated: int
    accepted: int
    refused: dict[Reason, int]
    cut: dict[Reason, int]
    calls: int  # being served
    queued_calls: int
    refused_calls: int
    received_memory: int
    working_memory: int
    unsent_memory: int


class Listener(Handle):
    """Listens, and serves calls. See the module."""

    def __init__(
        self,
        service: Service,
        listen: Address = ("127.0.0.1", 0),
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        limits: Limits | None = None,
        on_event: Callable[[Reason, Address], None] | None = None,
    ) -> None:
        """Prepare it. Port 0 means any free one. context: returns the TLS of a new connection; None: plain text.

        on_event: called on the event loop for each refused or cut connection; it must be quick.
        """
        self.limits = limits or Limits()
        self.buffer = memoryview(bytearray(RECORD))
        self.encrypted = memoryview(bytearray(ENCRYPTED))
        self._service = service
        self._listen_at = listen
        self._context = context
        self._on_event = on_event
        self._table = ConnectionTable(self.limits)
        self._waiting = WaitingRoom(self.limits.unauthenticated, self.limits.handshake_seconds)
        self._connections: set[WireConnection] = set()
        self._accepted = 0
        self._refused = dict.fromkeys(Reason, 0)
        self._cut = dict.fromkeys(Reason, 0)
        self._grace: float | None = None  # seconds; the listener ends
        self._is_accepting = False
        self._will_admit = False  # one of those that wait, soon
        self._ends = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # For its owner, in any thread.

    def start(self) -> Listener:
        """Listen, and set `address`; a second call has no effect. Raises OSError if the address can't be listened on."""
        if self._is_closed:
            raise Closed("the listener was closed; create a new one")
        if self._thread is not None:
            return self
        family = socket.AF_INET6 if ":" in self._listen_at[0] else socket.AF_INET
        self._listener = socket.create_server(self._listen_at, family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        limits = self.limits
        received = limits.received_bytes * 5 // 8
        self.memory = Budgets(
            Budget(received, self._loop, received // RESERVE),
            Budget(limits.received_bytes // 4, self._loop),
            Budget(limits.working_bytes, self._loop),
            Budget(limits.unsent_bytes, self._loop, limits.unsent_bytes // RESERVE),
            limits.received_bytes // 8,
        )
        self.slots = CallSlots(self._service, limits, self._loop)
        self.pool: Executor = WorkerPool(limits.threads, "hub worker")
        self._thread = threading.Thread(target=self._run, name="hub listener", daemon=True)
        self._thread.start()
        return self

    def run_soon(self, work: Callable[[], object]) -> None:
        """Call a function on the event loop. Callable in any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work)

    def cut(self, name: str, reason: Reason) -> None:
        """Cut all connections authenticated by a name, soon."""

        def cut_all() -> None:
            for connection in list(self._connections):
                if connection.name == name:
                    connection.cut(reason)

        self.run_soon(cut_all)

    def has_room(self, connections: int, calls: int) -> bool:
        """Return whether there may be so many connections and calls more now."""
        return self._table.has_room(connections) and self.slots.has_room(calls)

    def stats(self) -> ListenerStats:
        """Return the statistics so far."""
        return ListenerStats(
            open=len(self._connections),
            unauthenticated=self._table.unauthenticated,
            accepted=self._accepted,
            refused={reason: count for reason, count in self._refused.items() if count},
            cut={reason: count for reason, count in self._cut.items() if count},
            calls=self.slots.taken,
            queued_calls=self.slots.waiting,
            refused_calls=self.slots.refused,
            received_memory=self.memory.received.used + self.memory.standing.used + self.memory.held,
            working_memory=self.memory.working.used,
            unsent_memory=self.memory.unsent.used,
        )

    def close(self, grace: float = 0.0) -> None:
        """Stop listening, announce that, wait up to `grace` seconds for present calls, cut the rest, and wait for their handlers."""
        self._is_closed = True
        if self._thread is None:
            return

        def end() -> None:
            self._grace = grace
            self._ends.set()

        self.run_soon(end)
        self._thread.join()
        self.pool.shutdown()

    def __enter__(self) -> Listener:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # The loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        self._accept_again()
        ticking = self._loop.create_task(self._tick())
        await self._ends.wait()
        self._stop_accepting()
        self._waiting.close()
        for connection in list(self._connections):
            connection.retire(Reason.SHUTDOWN)
        until = system.port.monotonic() + (self._grace or 0.0)
        while self._connections and system.port.monotonic() < until:
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.cut(Reason.SHUTDOWN)
        await self.slots.idle()
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking

    def _accept_again(self) -> None:
        if not self._is_accepting and not self._ends.is_set():
            self._is_accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, remote = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:  # until the next tick, because the kernel reports the same again
                    self._stop_accepting()
                    self._note(self._refused, Reason.EXHAUSTED, self.address)
                    return
                continue  # the client has left
            self._arrived(sock, remote[:2])

    def _arrived(self, sock: socket.socket, remote: Address) -> None:
        now = system.port.monotonic()
        peer = Peer(remote, now)
        reason = self._table.enter(peer, now)
        if reason not in WAITS_FOR_PLACE or not self._waiting.add(sock, peer):
            self._admit(sock, peer, reason)

    def _admit_waiting(self, now: float) -> None:
        """Give free places to those that wait for one, and refuse those that have waited for too long."""
        for sock, peer, reason in self._waiting.leave(now, lambda peer: self._table.enter(peer, now)):
            peer.opened = peer.heard = now
            self._admit(sock, peer, reason)

    def _admit(self, sock: socket.socket, peer: Peer, reason: Reason | None) -> None:
        """Serve a connection that has a place, or refuse it for a reason."""
        if reason is not None:
            with suppress(OSError):
                sock.close()
            self._note(self._refused, reason, peer.remote)
            return
        self._accepted += 1
        try:
            self._connections.add(WireConnection(self, sock, peer, None if self._context is None else self._context()))
        except OSError:
            sock.close()
            self._table.leave(peer)

    def acquaint(self, connection: WireConnection, name: str) -> None:
        """Note the name of a connection. Raises HubFull."""
        self._table.acquaint(connection.peer, name)
        self._admit_waiting_soon()

    def _admit_waiting_soon(self) -> None:
        """Admit connections that wait, at most once in a while: there are hundreds of them when hundreds leave."""
        if self._waiting and not self._will_admit:
            self._will_admit = True
            self._loop.call_later(ADMIT, self._admit_now)

    def _admit_now(self) -> None:
        self._will_admit = False
        if not self._ends.is_set():
            self._admit_waiting(system.port.monotonic())

    def left(self, connection: WireConnection, reason: Reason | None) -> None:
        """Forget a closed connection."""
        self._connections.discard(connection)
        self._table.leave(connection.peer)
        self._admit_waiting_soon()
        if reason is not None:
            self._note(self._cut, reason, connection.peer.remote)

    def _note(self, counts: dict[Reason, int], reason: Reason, remote: Address) -> None:
        counts[reason] += 1
        if self._on_event is not None:
            self._on_event(reason, remote)

    async def _tick(self) -> None:
        limits = self.limits
        times = limits.handshake_seconds, limits.authentication_seconds, limits.idle_seconds, limits.queued_seconds, limits.stall_seconds
        step = min(TICK, min(times) / 4)
        while True:
            await asyncio.sleep(step)
            try:
                self._look(system.port.monotonic())
            except Exception:
                logger.exception("a check of the connections failed; the hub continues")

    def _look(self, now: float) -> None:
        """Accept again after a lack of descriptors, and end what is late."""
        self._accept_again()
        self._admit_waiting(now)
        for connection in list(self._connections):
            connection.look(now)
        self.slots.refuse_late(now)
        self._end_stalled(now)

    def _end_stalled(self, now: float) -> None:
        """End the slowest calls with memory for which others have waited long."""
        before = now - self.limits.stall_seconds
        streams = [stream for connection in self._connections for stream in connection.session.streams.values()]
        halves = ((stream.inward, stream) for stream in streams)
        partial = ((half.rate, half.partial, stream) for half, stream in halves if half.partial and half.began < before)
        self._end_slowest(bytes_missing(self.memory.received, before), partial, "its message takes too long")
        queues = ((stream.outward, stream) for stream in streams)
        unread = ((queue.stalled_since, queue.unsent, stream) for queue, stream in queues if queue.unsent and queue.stalled_since < before)
        self._end_slowest(bytes_missing(self.memory.unsent, before), unread, "its client doesn't read")

    def _end_slowest(self, needed: int, late: Iterable[tuple[float, int, WireStream]], words: str) -> None:
        """End calls until so many bytes are free. late: calls, each with a number that is smallest for the slowest one, and its bytes."""
        if not needed:
            return
        for _, size, stream in sorted(late, key=itemgetter(0)):
            if needed > 0:
                needed -= size
                self._abort(stream, words)

    def _abort(self, stream: WireStream, words: str) -> None:
        logger.info("ended a call: %s, and others need the memory", words)
        stream.abort(Status(Code.RESOURCE_EXHAUSTED, f"ended, because {words}, and others need the memory; retry in {LATER} s"))


def bytes_missing(budget: Budget, before: float) -> int:
    """Return how many bytes the next request lacks, if it has waited since before a time; else 0."""
    request = budget.next
    return 0 if request is None or request.since >= before else max(1, request.size - budget.room)
