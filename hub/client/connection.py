"""A shipper's side of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import flight

from hub.client.unavailable import why
from hub.errors import HubError, Malformed, NotAllowed, Silent, Unreachable
from hub.protocol import ingest, reading
from hub.protocol.ingest import Done, Opened, Opening, Ping, Put, Refused
from hub.root import columns
from kvspool import system
from kvspool.system.handles import ClosingHandle
from kvspool.system.pauses import growing

SILENCE = 30.0  # seconds without an answer after which a connection counts as dead
SHORT_ATTEMPT = 3.0  # seconds for an attempt to connect, if another hub may have the records
FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 30.0  # seconds
KEPT = 1 << 20  # bytes
_BROKEN = (pa.ArrowException, OSError, StopIteration)  # errors of Flight on a broken connection
# Each attempt resolves and connects itself: gRPC would make a new client wait for the backoff of earlier ones.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 5000)]
# A hub or network that says nothing more is noticed within 5 s, while a call is open.
_WATCHED = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
]


class Security(msgspec.Struct, frozen=True):
    """Credentials and trusted authorities. token: a bearer token; authorities, certificate, key: PEM. authorities None: the system's.
    server_name: the name in the server's certificate; None: that of its location.
    """

    token: str | None = None
    authorities: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None

    def __repr__(self) -> str:
        return "<Security>"  # keeps the token out of logs


_users: set[int] = set()  # the process that has connected to a hub; its children inherit this, but not gRPC's threads


def connect(location: str, security: Security, *, is_watched: bool = False, attempt: float = SILENCE) -> flight.FlightClient:
    """Return a client of a hub at `grpc://...` or `grpc+tls://...`; it connects on first use.

    is_watched: find out within seconds that the hub or the network says nothing more. attempt: seconds for an attempt to connect; a hub to
    which thousands of clients connect at once needs a while for each handshake. Raises HubError in a process that was forked from one that
    had already connected: gRPC would hang there.
    """
    _keep_free_memory()
    process = system.port.process_id()
    if _users and process not in _users:
        raise HubError(f"{location}: this process was forked from one that had connected to a hub; start it with spawn instead")
    _users.add(process)
    patience = ("grpc.min_reconnect_backoff_ms", round(1000 * attempt))
    options: dict[str, Any] = {"generic_options": [*_OPTIONS, patience, *(_WATCHED if is_watched else ())]}
    if security.authorities is not None:
        options["tls_root_certs"] = security.authorities
    if security.certificate is not None:
        options |= {"cert_chain": security.certificate, "private_key": security.key}
    if security.server_name is not None:
        options["override_hostname"] = security.server_name
    try:
        return flight.FlightClient(location, **options)
    except (pa.ArrowException, ValueError) as error:
        raise Unreachable(f"{location}: {error}") from None


class Channel(ClosingHandle):
    """A client that is used for one call after the other, while its credentials stay the same. For one thread."""

    def __init__(self, *, is_watched: bool = False) -> None:
        """is_watched: as for `connect`."""
        self._is_watched = is_watched
        self._client: flight.FlightClient | None = None
        self._credentials: tuple[str, Security] | None = None

    def to(self, location: str, security: Security) -> flight.FlightClient:
        """Return the client of a hub. Raises as `connect`."""
        if self._client is None or self._credentials != (location, security):
            self.close()
            self._client = connect(location, security, is_watched=self._is_watched)
            self._credentials = location, security
        return self._client

    def close(self) -> None:
        """Close the connection; the next call makes another one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _keep_free_memory() -> None:
    """Let glibc keep up to twice `KEPT` of free memory in a heap: it does after a piece of this size was freed.

    Otherwise it keeps 128 KiB. gRPC encrypts each batch into new memory, which the kernel would clear: a fifth of a client's time.
    """
    bytes(KEPT)


def call_options(security: Security, timeout: float | None = None) -> flight.FlightCallOptions:
    """Return the options of each call. timeout: seconds."""
    headers = [] if security.token is None else [(b"authorization", f"Bearer {security.token}".encode())]
    return flight.FlightCallOptions(timeout=timeout, headers=headers)


def error_of(location: str, error: Exception) -> HubError:
    """Return the HubError for an error of Flight."""
    reported = reading.error_in(getattr(error, "extra_info", None))
    if reported is not None:
        return reported
    text = str(error).partition(". Detail:")[0].partition(". gRPC client debug context")[0]
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return NotAllowed(f"{location} refused access: {text}")
    return Unreachable(f"{location}: {why(location, text)}")


def backoff(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row."""
    return growing(failures, FIRST_BACKOFF, LONGEST_BACKOFF)


class Connection(ClosingHandle):
    """One open call, used by one thread.

    That thread writes and reads in turn. If a read finds the call ended, Flight's client ends the writing half itself, and aborts the
    process if another thread is writing then. A watchdog cancels calls that take too long, which is safe at any time.
    """

    def __init__(
        self, location: str, security: Security, opening: Opening, silence: float = SILENCE, client: flight.FlightClient | None = None
    ) -> None:
        """Open the call, and return when the hub has answered. Raises Unreachable, NotAllowed, or the hub's refusal.

        client: of `connect`, which stays open; None: one of its own.
        """
        self.location = location
        self.stored: dict[int, int] = {}
        self.refused: dict[int, HubError] = {}
        self.asked = 0  # number of questions
        self.answered = 0
        self._silence = silence
        self._indexes = {log.index for log in opening.logs}
        self._busy_since: float | None = None  # since when we wait for the hub
        self._is_dead = False
        self._is_over = threading.Event()
        self._client = connect(location, security) if client is None else client
        self._own = self._client if client is None else None
        try:
            descriptor = flight.FlightDescriptor.for_command(ingest.encode(opening))
            self._writer, self._reader = self._client.do_exchange(descriptor, call_options(security))
        except _BROKEN as error:
            self._disconnect()
            raise error_of(location, error) from None
        self._watchdog = threading.Thread(target=self._watch, name="kvspool watchdog", daemon=True)
        self._watchdog.start()
        try:
            self._do(self._writer.begin, columns.SCHEMA)
            self.opened = self._first_word()
        except BaseException:
            self.close()
            raise

    def put(self, put: Put, batch: pa.RecordBatch) -> None:
        """Send a batch; blocks while the hub can't accept it. Raises the error that broke the connection."""
        self.asked += put.ask
        self._do(self._writer.write_with_metadata, batch, ingest.encode(put))

    def ping(self, ends: dict[int, int]) -> None:
        """Ask for an acknowledgement, and report the ends of the logs."""
        self.asked += 1
        self._do(self._writer.write_metadata, ingest.encode(Ping(ends)))

    @property
    def is_owed(self) -> bool:
        """Return whether a question is unanswered."""
        return self.answered < self.asked

    def hear(self) -> None:
        """Wait for the hub's next message, and note it in `stored`, `refused` and `answered`. Raises the error that broke the connection.
        """
        message = self._read()
        if isinstance(message, Refused):
            if message.index < 0:
                raise ingest.error_of(message)
            self._check_indexes({message.index})
            self.refused[message.index] = ingest.error_of(message)
        elif isinstance(message, Opened):
            raise Malformed(f"{self.location} opens an open call again")
        else:
            self._check_indexes({index for index, _ in message.places})
            if not self.answered <= message.asked <= self.asked:
                raise Malformed(f"{self.location} has answered {message.asked} questions of {self.asked}")
            self.answered = message.asked
            self.stored.update(message.places)

    def finish(self) -> None:
        """Wait until everything is acknowledged, and end the call in order."""
        self.ping({})
        while self.is_owed:
            self.hear()
        self._do(self._writer.write_metadata, ingest.encode(Done()))
        self._do(self._writer.close)
        self._is_over.set()

    def close(self) -> None:
        """Cancel the call, if it was not finished."""
        if not self._is_over.is_set():
            self._reader.cancel()
        self._is_over.set()
        self._watchdog.join()
        with suppress(*_BROKEN):  # the reason was reported before
            self._writer.close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._own is not None:
            self._own.close()

    def _first_word(self) -> Opened:
        message = self._read()
        if isinstance(message, Refused):
            raise ingest.error_of(message)
        if not isinstance(message, Opened):
            raise Malformed(f"{self.location} does not answer like a hub")
        self._check_indexes({place.index for place in message.places})
        return message

    def _check_indexes(self, indexes: set[int]) -> None:
        if not indexes <= self._indexes:
            raise Malformed(f"{self.location} reports shards that were not requested")

    def _read(self) -> ingest.FromHub:
        while True:
            chunk = self._do(self._reader.read_chunk)
            if chunk.app_metadata is not None:
                return ingest.decode_from_hub(chunk.app_metadata.to_pybytes())

    def _do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call of Flight; its errors are converted to HubError."""
        self._busy_since = system.port.monotonic()  # a write blocks while the hub doesn't read
        try:
            return work(*arguments)
        except _BROKEN as error:
            if self._is_dead:
                raise Silent(f"{self.location} has not answered for {self._silence:.0f} s") from None
            if isinstance(error, StopIteration):
                raise Unreachable(f"{self.location} ended the connection") from None
            raise error_of(self.location, error) from None
        finally:
            self._busy_since = None

    def _watch(self) -> None:
        """Cancel the call when the hub owes an answer for too long, because a broken network is not reported."""
        while not self._is_over.wait(self._silence / 8):
            since = self._busy_since
            if since is not None and system.port.monotonic() - since > self._silence:
                self._is_dead = True
                self._reader.cancel()
                return
