"""The hub over the network: an Arrow Flight server that stores shippers' records and serves them to readers. Needs the extra `hub`.

    client --- TLS ---> proxy ---> backend, a Flight server of its own ---> ingest, read service ---> store

The proxy limits the cost of connections; see `hub.server.proxy`. A backend keeps its certificates for its whole life: new certificates
start a new backend, and the old one ends with its last connection.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import flight

import kvspool
from hub.errors import HubError
from hub.protocol import ingest
from hub.protocol.ingest import LARGEST_BATCH, Level
from hub.protocol.status import ClientStatus, HubStatus, ShardStatus
from hub.root.store import PRIVATE, Store
from hub.root.trimmer import Keeper
from hub.security.access import Access
from hub.security.quotas import Meters, Space
from hub.server import consumers, read_service, reads
from hub.server.addresses import needs_tls
from hub.server.admission import Admission
from hub.server.authentication import KEY, Authentication, Standing
from hub.server.calls import Calls
from hub.server.clients import Clients
from hub.server.consumers import Consumers
from hub.server.event_log import EventLog
from hub.server.ingest import IngestSession
from hub.server.lag_monitor import LagMonitor
from hub.server.limits import Address, Limits, Reason
from hub.server.owners import Owners
from hub.server.pipelines import Pipelines
from hub.server.proxy import ProxiedConnection, Target, TcpProxy
from hub.server.read_service import ReadService
from hub.server.reads import Reads
from hub.server.shard_index import MayRead
from hub.server.threads import Threads
from kvspool import system
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from hub.security.certificates import Certificates

PORT = 7070
GRACE = 5.0  # seconds that connections have to end when the hub is closed
LEAST_FREE = 1 << 30  # bytes of the disk that stay free
ROUND = 1.0  # seconds between two checks of certificates and stored bytes
COUNTED_AT_ONCE = 64  # shards that are counted per round
logger = logging.getLogger("kvspool.hub")


class _Backend(flight.FlightServerBase, Handle):  # type: ignore[misc]
    """The methods that Flight calls on its own threads. A backend serves with one pair of certificates.

    With TLS it listens on a loopback port, because Flight speaks TLS only over TCP. Without TLS it listens on a Unix socket, which needs
    less processor time. The socket is created in the hub's private directory and unlinked at once: no other process can reach it, and no
    file remains.
    """

    def __init__(self, hub: HubServer, certificates: Certificates | None) -> None:
        self._hub = hub
        self.expires = 0 if certificates is None else certificates.not_after  # ns since 1970; 0: it has no certificate
        self._socket: Descriptor | None = None  # its file
        self._private: Descriptor | None = None  # the directory, because Flight removes the name at its end, and the socket's file
        options: dict[str, Any] = {"middleware": {KEY: hub.authentication}}
        # It serves from here on; Flight's own `serve` would only wait, and install its own signal handlers.
        if certificates is None:
            self._serve_on_socket(hub.root / PRIVATE, options)
            return
        options["tls_certificates"] = [(certificates.pair.chain, certificates.pair.key)]
        if certificates.authority is not None:
            options |= {"verify_client": True, "root_certificates": certificates.authority}
        super().__init__("grpc+tls://127.0.0.1:0", **options)

    def _serve_on_socket(self, folder: Path, options: dict[str, Any]) -> None:
        """Serve on a socket in the given folder, or on a loopback port if sockets can't be created there."""
        self._private = Descriptor(folder, os.O_PATH | os.O_DIRECTORY)
        name = f"/proc/self/fd/{self._private.number}/backend"  # because the path of a socket has at most 107 bytes
        try:
            super().__init__(f"grpc+unix://{name}", **options)
        except (pa.ArrowException, OSError) as error:  # not every file system has sockets
            logger.warning("no socket in %s, so the hub takes a loopback port: %s", folder, error)
            self._close_descriptors()
            super().__init__("grpc://127.0.0.1:0", **options)
        else:
            self._socket = Descriptor(name, os.O_PATH)
            system.port.remove(Path(name))

    @property
    def target(self) -> Target:
        """Return the address for the proxy."""
        return ("127.0.0.1", self.port) if self._socket is None else f"/proc/self/fd/{self._socket.number}"

    def end(self) -> None:
        """Wait for the last call, and stop serving."""
        self.shutdown()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for file in (self._socket, self._private):
            if file is not None:
                file.close()
        self._socket = self._private = None

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Store a shipper's records."""
        self._answer(context, lambda caller, connection: self._take_in(context, caller, connection, descriptor, reader, writer))

    def _take_in(self, context: Any, caller: Standing, connection: ProxiedConnection, descriptor: Any, reader: Any, writer: Any) -> None:
        try:
            opening = ingest.decode_opening(descriptor.command or b"")
            self._hub.take_in(caller, connection, opening, reader, writer, context.is_cancelled)
        except HubError as error:
            self._hub.authentication.log.warn("refused a call of %s: %s", caller.principal.name, error)
            writer.write_metadata(ingest.encode(ingest.refusal(error)))  # for a client that reads; one that writes finds the error
            raise

    def list_flights(self, context: Any, criteria: bytes) -> Any:
        """Return the list of clients."""

        def list_them(caller: Standing, _: ProxiedConnection) -> Iterator[flight.FlightInfo]:
            return self._hub.read_service.flights(criteria, self._hub.listing_right(caller), context.is_cancelled)

        return self._answer_once(context, len(criteria), list_them)

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        """Return the description of a client."""
        size = len(descriptor.command or b"") + sum(map(len, descriptor.path or []))

        def say(caller: Standing, _: ProxiedConnection) -> flight.FlightInfo:
            return self._hub.read_service.info(descriptor, self._hub.reading_right(caller), context.is_cancelled)

        return self._answer_once(context, size, say)

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        """Serve the records of a shard."""

        def read(caller: Standing, connection: ProxiedConnection) -> flight.FlightDataStream:
            self._hub.authentication.resources(context).enter_context(connection.streaming())
            # For each batch a client sends a few bytes; more than one byte for each 256 would be abnormal.
            right = self._hub.reading_right(caller)
            return self._hub.read_service.read(
                ticket.ticket, right, lambda size: connection.progress(size >> 8), context.is_cancelled, connection.close
            )

        return self._answer_once(context, len(ticket.ticket), read)

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """Return the list of actions."""
        return read_service.ACTIONS + consumers.ACTIONS

    def do_action(self, context: Any, action: Any) -> Any:
        """Answer a question about the whole hub."""
        asked = action.type, action.body.to_pybytes()
        return self._answer_once(context, len(asked[1]), lambda caller, _: self._hub.act(caller, *asked, context.is_cancelled))

    def _answer_once(self, context: Any, size: int, reply: Callable[[Standing, ProxiedConnection], Any]) -> Any:
        """Answer a reading call with a request of `size` bytes; it counts as one of its caller's calls until the last answer is sent."""

        def answer(caller: Standing, connection: ProxiedConnection) -> Any:
            resources = self._hub.authentication.resources(context)
            resources.callback(connection.progress, size)
            resources.enter_context(self._hub.meters.of(caller.principal.name, caller.principal.quota).call(connection))
            return reply(caller, connection)

        return self._answer(context, answer)

    def _answer(self, context: Any, answer: Callable[[Standing, ProxiedConnection], Any]) -> Any:
        """Answer a call of an authenticated caller that came through the proxy."""
        principal = self._hub.authentication.principal(context)
        connection = self._hub.proxy.connection(context.peer())
        if connection is None:
            raise flight.FlightUnauthenticatedError("not authenticated")
        connection.authenticated(principal.name)
        with read_service.refusing(self._hub.root):
            return answer(self._hub.authentication.standing(context, principal), connection)


class HubServer(Handle):
    """A hub root on the network. `start` serves it on its own threads; `close` ends that."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        access: Access,
        certificates: Certificates | None = None,
        listen: Address = ("127.0.0.1", PORT),
        level: Level = "process",
        limits: Limits | None = None,
        least_free: int = LEAST_FREE,
        largest_batch: int = LARGEST_BATCH,
        most_unread: int = reads.MOST,
        threads: Threads | None = None,
    ) -> None:
        """Open the existing root. Raises RootInUse, LogNotFound, NotALog, AccessError, and ValueError for unsafe options.

        access: the callers' rights; an anonymous one is allowed only on a loopback address. certificates: required on other addresses.
        level: durability of an acknowledged record. least_free: bytes of the disk to keep free; with less, records are refused.
        largest_batch: bytes. most_unread: bytes of batches that were sent to readers and not yet received. threads: limit of threads of
        this process, if it is used only by the hub.
        """
        if needs_tls(listen[0]) and certificates is None:
            raise ValueError(f"{listen[0]} can be reached from elsewhere, so the hub needs a certificate there")
        if needs_tls(listen[0]) and access.is_anonymous:
            raise ValueError(f"{listen[0]} can be reached from elsewhere, so the hub needs an access file there")
        self.root = Path(os.path.abspath(root))
        self.level: Level = level
        self.certificates = certificates
        self.clients = Clients()
        self.read_service = ReadService(self.root, level, Reads(most_unread))
        self.consumers = Consumers(self.read_service.index)
        self.store = Store(self.root, self.read_service.index.note)
        self.space = Space(self.root, least_free)
        self.meters = Meters()
        self.owners = Owners()
        self.lag_monitor = LagMonitor(self.root)
        self.pipelines = Pipelines(self.root)
        self.retention = Keeper(self.root, self._stored)
        self._cuts = EventLog("refused or cut connections")
        self.proxy = TcpProxy(listen, limits=limits, on_event=self._log_cut)
        self._threads = threads
        self.calls = Calls(
            lambda count: None if threads is None else threads.follow(count), lambda name: self.proxy.cut(name, Reason.FLOOD)
        )
        self.authentication = Authentication(
            access,
            uses_certificates=certificates is not None and certificates.authority is not None,
            address=self._remote,
            calls=self.calls,
        )
        self._largest = largest_batch
        self._backend: _Backend | None = None
        self._is_outdated = False  # the backend's certificates are no longer the newest ones
        self._exchange_error = ""
        self._started = 0
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="hub keeper", daemon=True)

    # Serving.

    def start(self) -> HubServer:
        """Start to serve. Raises OSError if the address can't be listened on."""
        self._backend = _Backend(self, self.certificates)
        self.proxy.retarget(self._backend.target)
        try:
            self.proxy.start()
        except BaseException:
            self._backend.end()
            raise
        self._started = system.port.now()
        self.store.count(0)
        self._keeper.start()
        if self._threads is not None and not self._threads.start():
            logger.warning("the kernel doesn't limit root's threads: run the hub as another user, or limit them by its cgroup")
        return self

    @property
    def location(self) -> str:
        """Return the address for clients on this host."""
        host, port = self.proxy.address
        scheme = "grpc" if self.certificates is None else "grpc+tls"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def reading_right(self, caller: Standing) -> MayRead:
        """Return the predicate of the clients that a caller may read during its call."""
        return caller.may_read

    def listing_right(self, caller: Standing) -> MayRead:
        """Return the predicate of the clients that a caller may list during its call."""
        return caller.may_list

    def act(self, caller: Standing, kind: str, body: bytes, is_over: Callable[[], bool]) -> Iterator[bytes]:
        """Return the answer of an action to a caller. is_over: whether the caller is gone."""
        may_read = self.reading_right(caller)
        if kind in (name for name, _ in consumers.ACTIONS):
            return iter([self.consumers.act(kind, body, caller.principal, may_read)])
        return self.read_service.act(kind, body, may_read, is_over)

    def take_in(
        self,
        caller: Standing,
        connection: ProxiedConnection,
        opening: ingest.Opening,
        reader: Any,
        writer: Any,
        is_over: Callable[[], bool],
    ) -> None:
        """Serve one call of a shipper. is_over: whether it is gone. Raises HubError if the whole call is refused."""
        guard = Admission(caller, connection, self.meters, self.space, self.store, is_over)
        try:
            guard.begin(opening.client, opening.bits)
            client = self.clients.of(opening.client)
            session = IngestSession(self.store, self.level, guard, opening, client, self._largest)
            client.connected(1)
            try:
                session.run(reader, writer)
            finally:
                client.connected(-1)
                if not session.is_done:
                    logger.info("the connection of %s was cut", opening.client)
        finally:
            guard.close()

    def close(self, grace: float = GRACE) -> None:
        """End all calls, after up to `grace` seconds, and release the root. Acknowledged records are kept."""
        self._is_over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self.read_service.close()
        if self._threads is not None:
            self._threads.close()
        if self._backend is not None:
            self.proxy.close(grace)
            self._backend.end()
        self.calls.restore_switch_interval(at_once=True)
        self.store.close()

    def _remote(self, peer: str) -> str:
        """Return the address of a client, for the log."""
        connection = self.proxy.connection(peer)
        return "unknown" if connection is None else f"{connection.remote[0]} port {connection.remote[1]}"

    def _log_cut(self, reason: Reason, remote: Address) -> None:
        self._cuts.warn("%s port %s: %s", *remote, reason)

    def _keep(self) -> None:
        """Count stored bytes; from time to time check certificates, quotas, readers and retention."""
        self._care(self._count_all)
        works = self._look_at_threads, self._exchange_certificates, self._count_stored, self._look_at_readers, self.retention.round
        while True:
            for work in works:
                self._care(work)
            if self._is_over.wait(ROUND):
                return

    def _care(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            logger.exception("maintenance of the hub failed; the hub continues")

    def _count_all(self) -> None:
        """Count every shard once, in parallel with the first calls; until then, shards without a shipper count as empty."""
        while self.store.count(COUNTED_AT_ONCE) and not self._is_over.is_set():
            pass

    def _exchange_certificates(self) -> None:
        """Use new certificates, if there are any, for new connections; if that fails, a later round retries."""
        if self.certificates is None:
            return
        self._is_outdated = self.certificates.refresh() or self._is_outdated
        if not self._is_outdated:
            return
        try:
            new = _Backend(self, self.certificates)
        except (pa.ArrowException, OSError) as error:
            words = f"the new certificate isn't served yet; the previous one is still in use: {error}"
            if words != self._exchange_error:
                logger.error("%s", words)
            self._exchange_error = words
            return
        old, self._backend = self._backend, new
        self._is_outdated, self._exchange_error = False, ""
        self.proxy.retarget(new.target)
        assert old is not None
        threading.Thread(target=old.end, name="hub retired backend", daemon=True).start()  # waits for its last call

    def _count_stored(self) -> None:
        """Count some of the shards, and give the results to the quotas."""
        self.store.count(COUNTED_AT_ONCE)
        writers = self.authentication.access.writers()
        stored = dict.fromkeys((principal.name for principal in writers), 0)
        for client, used in self._stored().items():
            for principal in self.owners.of(client, writers):
                stored[principal.name] += used
        for principal in writers:
            self.meters.of(principal.name, principal.quota).stored = stored[principal.name]

    def _look_at_threads(self) -> None:
        self.calls.restore_switch_interval()
        if self._threads is not None:
            self._threads.look()

    def _look_at_readers(self) -> None:
        self.lag_monitor.look(self.store.sizes())
        self.pipelines.look()

    def _stored(self) -> dict[str, int]:
        """Return the counted bytes of each client."""
        return {client: sum(one.used for one in shards.values()) for client, shards in self.store.sizes().items()}

    # Maintenance.

    def status(self) -> HubStatus:
        """Return the hub's current state."""
        space = os.statvfs(self.root)
        cut = self.proxy.stats()
        return HubStatus(
            root=str(self.root),
            version=kvspool.__version__,
            started=self._started,
            now=system.port.now(),
            level=self.level,
            address=self.location,
            is_secure=self.certificates is not None,
            free_bytes=space.f_bavail * space.f_frsize,
            disk_bytes=space.f_blocks * space.f_frsize,
            least_free=self.space.low,
            certificate_expires=0 if self._backend is None else self._backend.expires,
            connections=cut.open,
            cut={str(reason): count for reason, count in (Counter(cut.refused) + Counter(cut.cut)).items()},
            clients=self._client_statuses(),
            readers=self.lag_monitor.statuses,
            pipelines=self.pipelines.statuses,
            error="; ".join(filter(None, self._errors())),
        )

    def _errors(self) -> Iterator[str | None]:
        yield self.authentication.access.error
        if self.certificates is not None:
            yield self.certificates.error
        yield self._exchange_error
        yield self.retention.error

    def _client_statuses(self) -> list[ClientStatus]:
        writers = self.authentication.access.writers()
        found = []
        for name, shards in self.store.sizes().items():
            client = self.clients.of(name)
            found.append(
                ClientStatus(
                    client=name,
                    bits=max(sizes.bits for sizes in shards.values()),
                    shards=[
                        ShardStatus(
                            index=index,
                            generation=sizes.generation,
                            first_sequence=sizes.first,
                            next_sequence=sizes.next,
                            records=max(0, sizes.next - sizes.first),
                            used=sizes.used,
                            lost=client.lost[index],
                            last_timestamp=sizes.last_timestamp,
                            behind=client.behind(index),
                        )
                        for index, sizes in sorted(shards.items())
                    ],
                    connections=client.connections,
                    last_seen=client.last_seen,
                    records=client.records,
                    bytes=client.bytes,
                    gaps=client.lost.total(),
                    duplicates=client.duplicates,
                    refused=dict(client.refused),
                    quota_bytes=min((one.quota.bytes for one in self.owners.of(name, writers) if one.quota.bytes is not None), default=0),
                )
            )
        return found

    def __enter__(self) -> HubServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
