"""The hub over the network: an Arrow Flight server that stores shippers' records and serves them to readers. Needs the extra `hub`.

    client --- TLS ---> listener ---> Flight's methods ---> ingest, read service ---> store

The listener speaks gRPC and limits the cost of connections and calls; see `hub.server.listener`. It knows neither Flight nor records.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

import kvspool
from hub.client.connection import Security
from hub.errors import HubError, Malformed, NotAuthenticated
from hub.protocol import ingest
from hub.protocol.ingest import LARGEST_BATCH, LARGEST_MESSAGE, Level
from hub.protocol.status import ClientStatus, HubStatus, ShardStatus
from hub.root.catalogue import Catalogue
from hub.root.store import Store
from hub.root.trimmer import Keeper
from hub.security.access import Access
from hub.security.quotas import Meters, Space
from hub.server.addresses import needs_tls
from hub.server.admission import Admission
from hub.server.authentication import Authentication, Standing
from hub.server.call import Call
from hub.server.clients import Clients
from hub.server.consumers import Consumers
from hub.server.event_log import EventLog
from hub.server.flight import Data, FlightDescriptor, encode_data
from hub.server.flight_service import FlightService
from hub.server.ingest import Exchange, IngestSession
from hub.server.lag_monitor import LagMonitor
from hub.server.limits import Address, Limits, Reason
from hub.server.listener import Listener
from hub.server.mirrors import MirrorMarks
from hub.server.openings import Openings
from hub.server.owners import Owners
from hub.server.pipelines import Pipelines
from hub.server.probe import CALLS, CONNECTIONS, PRINCIPAL, Probe, ProbedAddress
from hub.server.read_service import ReadService
from hub.server.recent import RecentReader
from hub.server.steps import Steps
from hub.server.tls import server_context
from kvspool import system
from kvspool.engine import sizes
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from hub.security.certificates import Certificates

PORT = 7070
GRACE = 5.0  # seconds that calls have to end when the hub is closed
LEAST_FREE = 1 << 30  # bytes of the disk that stay free
ROUND = 1.0  # seconds between two checks of certificates and stored bytes
COUNTED_AT_ONCE = 64  # shards that are counted per round
REST = 0.5  # seconds without a shipper's call that is being opened, after which the first count continues
LONGEST_DELAY = 60.0  # seconds, of that count
FIRST_COUNT = 5.0  # seconds after the start until which a status waits for the first count of all shards
PAUSE = 50  # times the duration of adding up the stored bytes, before the next time
SHOWN = 20  # times the duration of describing all clients, before the next time, if that is longer than a round
FLUSHES = 16  # concurrent flushes at the level "disk"
SHARES = 8  # batches of the largest size that the memory of a hub must suffice for
_HEADERS = 1 << 16  # bytes of a message besides its batch and its metadata
logger = logging.getLogger("kvspool.hub")


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
        memory: int | None = None,
        probes: bool = False,
    ) -> None:
        """Open the existing root. Raises RootInUse, LogNotFound, NotALog, AccessError, and ValueError for unsafe options.

        access: the callers' rights; an anonymous one is allowed only on a loopback address. certificates: required on other addresses.
        level: durability of an acknowledged record. least_free: bytes of the disk to keep free; with less, records are refused.
        largest_batch: bytes. memory: bytes for all batches, instead of the limits of memory in `limits`. probes: whether the hub probes
        itself; see `hub.server.probe`.
        """
        if needs_tls(listen[0]) and certificates is None:
            needs = "a certificate there; kvspool hub certificate init makes one"
            raise ValueError(f"{listen[0]} can be reached from elsewhere, so the hub needs {needs}")
        if needs_tls(listen[0]) and access.is_anonymous:
            needs = "an access file there; kvspool hub token add makes one"
            raise ValueError(f"{listen[0]} can be reached from elsewhere, so the hub needs {needs}")
        self.root = Path(os.path.abspath(root))
        self.level: Level = level
        self.certificates = certificates
        self.clients = Clients()
        self.openings = Openings()
        self.steps = Steps()
        self.catalogue = Catalogue(self.root)
        self.read_service = ReadService(self.root, level, self.catalogue)
        self.consumers = Consumers(self.read_service.index)
        self.store = Store(self.root, self.read_service.index.note, self.catalogue)
        self.read_service.index.look_up = self.store.look
        self.space = Space(self.root, least_free)
        self.meters = Meters()
        self.owners = Owners()
        self.lag_monitor = LagMonitor(self.root)
        self.mirrors = MirrorMarks(self.root, self.catalogue)
        self.pipelines = Pipelines(self.root)
        self.retention = Keeper(self.root, self.store.used, self.catalogue, self.store.has_sealed)
        self._cuts = EventLog("refused or cut connections")
        self.authentication = Authentication(access, uses_certificates=certificates is not None and certificates.authority is not None)
        self.recent = RecentReader(self.authentication, self.read_service.index)
        self.service = FlightService(
            self.root, self.authentication, self.meters, self.read_service, self.consumers, self._exchange, self.steps
        )
        self.listener = Listener(
            self.service,
            listen,
            context=None if certificates is None else lambda: self._context,
            limits=_limits(limits or Limits(), largest_batch, memory),
            on_event=self._log_cut,
        )
        self._flushers = ThreadPoolExecutor(FLUSHES, "hub flush")
        self.probe = Probe(self.root, self.read_service.index, self._probed_address, self.steps) if probes else None
        self._probe_token = access.add_own(PRINCIPAL, self.probe.client) if self.probe is not None else None
        self._largest = largest_batch
        self._context: ssl.SSLContext  # of new connections
        self._expires = 0  # when the served certificate ends, ns since 1970; 0 without one
        self._is_outdated = False  # the served certificates are no longer the newest ones
        self._exchange_error = ""
        self._started = 0
        self._counts_until = 0.0  # when a status no longer waits for the first count
        self._adds_up_at = 0.0  # the stored bytes of the principals
        self._described: list[ClientStatus] = []
        self._describes_at = -math.inf  # all clients again
        self._is_over = threading.Event()
        self._is_counted = threading.Event()  # every shard was counted once
        self._keeper = threading.Thread(target=self._keep, name="hub keeper", daemon=True)

    # Serving.

    def start(self) -> HubServer:
        """Start to serve. Raises OSError if the address can't be listened on."""
        self._serve_certificates()
        self.listener.start()
        self._started = system.port.now()
        self._counts_until = system.port.monotonic() + FIRST_COUNT
        self.store.count(0)
        self._keeper.start()
        if self.probe is not None:
            self.probe.start()
        return self

    @property
    def location(self) -> str:
        """Return the address for clients on this host."""
        host, port = self.listener.address
        scheme = "grpc" if self.certificates is None else "grpc+tls"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _exchange(self, call: Call, caller: Standing) -> None:
        """Serve one call of a shipper."""
        name = caller.principal.name
        try:
            first = await _first(call)
            await self._take_in(call, caller, ingest.decode_opening(FlightDescriptor.parse(first.descriptor).command), first)
        except HubError as error:
            self.authentication.log.warn("refused a call of %s: %s", name, error)
            if not isinstance(error, NotAuthenticated):  # for a client that reads; one that writes finds the error
                await call.write(encode_data(metadata=ingest.encode(ingest.refusal(error))))
            raise

    async def _take_in(self, call: Call, caller: Standing, opening: ingest.Opening, first: Data) -> None:
        """Serve an opened call, until a later one of the same client takes its place."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end() -> None:
            guard.supersede()
            loop.call_soon_threadsafe(task.cancel)

        def take_over() -> None:
            client = self.clients.of(opening.client)
            taken.callback(client.end_call, end)
            client.take_over([(log.index, log.id) for log in opening.logs], end)

        is_probe = self.probe is not None and opening.client == self.probe.client
        store = self.probe.store if self.probe is not None and is_probe else self.store
        with ExitStack() as taken:
            opened = taken.enter_context(ExitStack())  # closed as soon as the call is open
            if not is_probe:
                opened.enter_context(self.openings.admitted())
            turn = nullcontext if is_probe else self.openings.turn
            guard = taken.enter_context(closing(Admission(caller, self.meters, self.space, store)))
            try:
                await call.run(guard.begin, opening.client, opening.bits, take_over)
                session = IngestSession(store, self.level, guard, opening, self.clients.of(opening.client), self._largest)
                await self._ship(Exchange(call, session, self._flushers, turn, self.steps), opening, first, opened)
            except asyncio.CancelledError:
                if call.cancelled.is_set() or not guard.is_superseded:
                    raise
                task.uncancel()
                raise guard.superseded() from None

    async def _ship(self, exchange: Exchange, opening: ingest.Opening, first: Data, opened: ExitStack) -> None:
        client = self.clients.of(opening.client)
        is_done = False
        client.connected(1)
        try:
            is_done = await exchange.run(first, opened)
        finally:
            client.connected(-1)
            if not is_done:
                logger.info("the connection of %s was cut", opening.client)

    def close(self, grace: float = GRACE) -> None:
        """End all calls, after up to `grace` seconds, and release the root. Acknowledged records are kept."""
        self._is_over.set()
        if self.probe is not None:
            self.probe.close()
        if self._keeper.is_alive():
            self._keeper.join()
        self.read_service.close()
        self.listener.close(grace)
        self._flushers.shutdown(cancel_futures=True)
        self.store.close()

    def _log_cut(self, reason: Reason, remote: Address) -> None:
        self._cuts.warn("%s port %s: %s", *remote, reason)

    def _keep(self) -> None:
        """Count stored bytes; from time to time check certificates, quotas, readers and retention."""
        self._care(self._count_all)
        works = self._exchange_certificates, self._count_stored, self._look_at_readers, self.retention.round
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
        """Count every shard once, while no shipper's call is being opened; until then, shards without a shipper count as empty.

        After a restart, thousands of shippers come back at once. Each of their shards is counted by its call, and not again here.
        """
        until = system.port.monotonic() + LONGEST_DELAY
        try:
            while self.store.count(COUNTED_AT_ONCE) and not self._is_over.is_set():
                while self.openings.rest < REST and system.port.monotonic() < until:
                    if self._is_over.wait(REST / 4):
                        return
        finally:
            self._is_counted.set()

    def _exchange_certificates(self) -> None:
        """Use new certificates, if there are any, for new connections; if that fails, a later round retries."""
        if self.certificates is None:
            return
        self._is_outdated = self.certificates.refresh() or self._is_outdated
        if not self._is_outdated:
            return
        try:
            self._serve_certificates()
        except (OSError, ValueError) as error:  # of the system, or of OpenSSL
            words = f"the new certificate isn't served yet; the previous one is still in use: {error}"
            if words != self._exchange_error:
                logger.error("%s", words)
            self._exchange_error = words
            return
        self._is_outdated, self._exchange_error = False, ""

    def _serve_certificates(self) -> None:
        """Use the present certificates for new connections. Raises OSError."""
        if self.certificates is not None:
            own, expires = self.certificates.server_key, self.certificates.not_after
            self._context = server_context(own.chain, own.key, self.certificates.authority)
            self._expires = expires

    def _count_stored(self) -> None:
        """Count some of the shards, and give the results to the quotas, less often if that takes long."""
        self.store.count(COUNTED_AT_ONCE)
        began = system.port.monotonic()
        if began < self._adds_up_at:
            return
        writers = self.authentication.access.writers()
        stored = dict.fromkeys((principal.name for principal in writers), 0)
        for client, used in self.store.used().items():
            for principal in self.owners.of(client, writers):
                stored[principal.name] += used
        for principal in writers:
            self.meters.of(principal.name, principal.quota).stored = stored[principal.name]
        self._adds_up_at = began + PAUSE * (system.port.monotonic() - began)

    def _look_at_readers(self) -> None:
        self.lag_monitor.look(self.store.sizes)
        self.mirrors.look()
        self.pipelines.look()

    # Maintenance.

    def status(self) -> HubStatus:
        """Return the hub's current state. Just after the start it waits for the first count of all shards, but not for long.

        With very many shards, the clients' figures are some seconds old: describing them takes a twentieth of a processor at most.
        """
        if self._keeper.is_alive():
            self._is_counted.wait(max(0.0, self._counts_until - system.port.monotonic()))
        space = os.statvfs(self.root)
        cut = self.listener.stats()
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
            certificate_expires=self._expires,
            connections=cut.open,
            cut={str(reason): count for reason, count in (Counter(cut.refused) + Counter(cut.cut)).items()},
            calls=cut.calls,
            threads=threading.active_count(),
            refusals={"calls": cut.refused_calls, "openings": self.openings.refused},
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
        yield self.probe.trouble() if self.probe is not None else None

    def _probed_address(self) -> ProbedAddress:
        """Return where the probe connects: to the hub's own listener, by the certificate that it serves. Nowhere while the hub is full."""
        if not self.listener.has_room(CONNECTIONS, CALLS):
            return ProbedAddress(None)
        host, port = self.listener.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        token = None if self._probe_token is None or self.authentication.access.is_anonymous else self._probe_token.reveal()
        if self.certificates is None:
            return ProbedAddress(f"grpc://{address}", Security(token))
        if self.certificates.authority is not None:
            return ProbedAddress(None)
        own = self.certificates.server_key
        return ProbedAddress(f"grpc+tls://{address}", Security(token, own.chain, server_name=next(iter(own.certificate.names), None)))

    def _client_statuses(self) -> list[ClientStatus]:
        """Return the state of each client, or the last one for a while if it takes long."""
        began = system.port.monotonic()
        if began >= self._describes_at:
            self._described = self._describe_clients()
            pause = SHOWN * (system.port.monotonic() - began)
            self._describes_at = began + pause if pause > ROUND else -math.inf
        return self._described

    def _describe_clients(self) -> list[ClientStatus]:
        writers = self.authentication.access.writers()
        found = []
        for name, shards in self.store.sizes().items():
            client = self.clients.of(name)
            lags = {index: client.behind(index) for index in shards}
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
                            behind=lags[index].records,
                            behind_is_estimate=lags[index].is_estimate,
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
                    is_mirrored=name in self.mirrors.clients,
                    quota_bytes=min((one.quota.bytes for one in self.owners.of(name, writers) if one.quota.bytes is not None), default=0),
                )
            )
        return found

    def __enter__(self) -> HubServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


async def _first(call: Call) -> Data:
    """Return the first message of a shipper. Raises Malformed."""
    message = await call.read()
    if message is None:
        raise Malformed("a call without a message")
    with message:
        if len(message) > 2 * LARGEST_MESSAGE:
            raise Malformed(f"a first message of {len(message)} bytes")
        return Data.parse(bytes(message.data))


def _limits(limits: Limits, largest: int, memory: int | None) -> Limits:
    """Return the limits of a hub that accepts batches of `largest` bytes. Raises ValueError for too little memory."""
    limits = msgspec.structs.replace(limits, message_bytes=largest + LARGEST_MESSAGE + _HEADERS)
    if memory is None:
        return limits
    if memory < SHARES * largest:
        words = f"a hub needs memory for {SHARES} batches of {sizes.show(largest)}, not {sizes.show(memory)}"
        raise ValueError(f"{words}; give it more, or accept smaller batches")
    part = memory // 8
    return msgspec.structs.replace(limits, received_bytes=3 * part, working_bytes=2 * part, unsent_bytes=3 * part)
