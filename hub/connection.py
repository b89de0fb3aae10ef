"""A shipper's side of one call: what it says goes out on its own thread, what the hub says is noted on another."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import flight

from hub import columns, tickets, wire
from hub.errors import HubError, NotAllowed, Unreachable
from hub.wire import Done, Opened, Opening, Ping, Put, Refused, Stored
from kvspool import system

SILENCE = 15.0  # seconds without an answer after which a connection counts as dead
LAST_WORDS = 1.0  # seconds that may pass between a broken connection and the word of the hub that says why
# Each attempt looks for the hub itself: gRPC would make a new client wait for as long as the last ones have failed.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]


class Security(msgspec.Struct, frozen=True):
    """Who we are, and whom we believe. token: a bearer token; authorities, certificate, key: PEM. authorities None: the system's."""

    token: str | None = None
    authorities: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    def __repr__(self) -> str:
        return "<Security>"  # a token must not come into a log


def connect(location: str, security: Security) -> flight.FlightClient:
    """Return a client of a hub at `grpc://...` or `grpc+tls://...`; it connects when it is used."""
    options: dict[str, Any] = {"generic_options": _OPTIONS}
    if security.authorities is not None:
        options["tls_root_certs"] = security.authorities
    if security.certificate is not None:
        options |= {"cert_chain": security.certificate, "private_key": security.key}
    try:
        return flight.FlightClient(location, **options)
    except (pa.ArrowException, ValueError) as error:
        raise Unreachable(f"{location}: {error}") from None


def call_options(security: Security, timeout: float | None = None) -> flight.FlightCallOptions:
    """Return what goes along with each call. timeout: seconds."""
    headers = [] if security.token is None else [(b"authorization", f"Bearer {security.token}".encode())]
    return flight.FlightCallOptions(timeout=timeout, headers=headers)


def error_of(location: str, error: Exception) -> HubError:
    """Return what an error of Flight means to who speaks to a hub."""
    told = tickets.error_in(getattr(error, "extra_info", None))
    if told is not None:
        return told
    text = str(error).partition(". Detail:")[0].partition(". gRPC client debug context")[0]
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return NotAllowed(f"{location} doesn't let us in: {text}")
    return Unreachable(f"{location}: {text}")


class Connection:
    """One open call. One thread puts; whoever has to wait for answers waits on `changed`."""

    def __init__(self, location: str, security: Security, opening: Opening, silence: float = SILENCE) -> None:
        """Open the call, and return when the hub has answered. Raises Unreachable, NotAllowed, or what the hub refuses the call with."""
        self.location = location
        self.opened: Opened | None = None
        self.stored: dict[int, int] = {}
        self.refused: dict[int, HubError] = {}
        self.changed = threading.Condition()
        self.asked = 0  # questions so far
        self.answered = 0
        self._error: HubError | None = None
        self._silence = silence
        self._heard = system.port.monotonic()
        self._client = connect(location, security)
        self._is_closed = False
        try:
            descriptor = flight.FlightDescriptor.for_command(wire.encode(opening))
            self._writer, self._reader = self._client.do_exchange(descriptor, call_options(security))
        except (pa.ArrowException, OSError) as error:
            self._client.close()
            raise error_of(location, error) from None
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in self._runs()]
        for thread in self._threads:
            thread.start()
        try:
            self._say(lambda: self._writer.begin(columns.SCHEMA))
            with self.changed:
                self.changed.wait_for(lambda: self.opened is not None or self._error is not None)
            self.check()
        except BaseException:
            self.close()
            raise

    def _runs(self) -> list[tuple[str, Any]]:
        return [("kvspool acknowledgements", self._listen), ("kvspool watchdog", self._watch)]

    def put(self, put: Put, batch: pa.RecordBatch) -> None:
        """Send a batch; blocks while the hub can't take it. Raises what the connection broke with."""
        if put.ask:
            self._ask()
        self._say(lambda: self._writer.write_with_metadata(batch, wire.encode(put)))

    def ping(self, ends: dict[int, int]) -> None:
        """Ask what is stored, and say how far the logs go."""
        self._ask()
        self._say(lambda: self._writer.write_metadata(wire.encode(Ping(ends))))

    def check(self) -> None:
        """Raise what the connection broke with, if it did."""
        if self._error is not None:
            raise self._error

    @property
    def is_broken(self) -> bool:
        """Return whether the connection is of no more use; `check` says why."""
        return self._error is not None

    def finish(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until everything is acknowledged, and end the call on purpose."""
        self.ping({})
        with self.changed:
            self.changed.wait_for(lambda: self.answered >= self.asked or self._error is not None, timeout)
        self.check()
        self._say(lambda: self._writer.write_metadata(wire.encode(Done())))
        self._say(self._writer.done_writing)

    def close(self) -> None:
        """Cut the connection."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._reader.cancel()
        for thread in self._threads:
            thread.join()
        try:
            self._writer.close()
        except (pa.ArrowException, OSError):
            pass  # why it broke was said before
        self._client.close()

    def _ask(self) -> None:
        with self.changed:
            if self.asked == self.answered:
                self._heard = system.port.monotonic()
            self.asked += 1

    def _say(self, write: Any) -> None:
        self.check()
        try:
            write()
        except (pa.ArrowException, OSError, StopIteration) as error:
            self._threads[0].join(LAST_WORDS)  # the hub may have said why
            self._break(error_of(self.location, error))
            self.check()

    def _break(self, error: HubError) -> None:
        """Note why the connection is of no more use; the first reason counts."""
        with self.changed:
            self._error = self._error or error
            self.changed.notify_all()

    def _listen(self) -> None:
        """Note what the hub says, until it says no more."""
        try:
            while True:
                chunk = self._reader.read_chunk()
                if chunk.app_metadata is not None:
                    self._hear(wire.decode_from_hub(chunk.app_metadata.to_pybytes()))
        except StopIteration:
            self._break(Unreachable(f"{self.location} ended the connection"))
        except HubError as error:
            self._break(error)
        except (pa.ArrowException, OSError) as error:
            self._break(error_of(self.location, error))

    def _hear(self, message: wire.FromHub) -> None:
        with self.changed:
            self._heard = system.port.monotonic()
            if isinstance(message, Stored):
                self.answered = message.asked
                self.stored.update(message.places)
            elif isinstance(message, Refused):
                error = wire.error_of(message)
                if message.index < 0:
                    self._error = self._error or error
                self.refused[message.index] = error
            else:
                self.opened = message
            self.changed.notify_all()

    def _watch(self) -> None:
        """Cut the connection when the hub owes an answer for too long: nobody tells us that a network has gone."""
        while True:
            with self.changed:
                is_owed = self.opened is None or self.answered < self.asked
                left = self._heard + self._silence - system.port.monotonic() if is_owed else self._silence
                if left > 0:
                    self.changed.wait(left)
                if self._is_closed or self._error is not None:
                    return
                is_dead = is_owed and self._heard + self._silence <= system.port.monotonic()
            if is_dead:
                self._break(Unreachable(f"{self.location} has not answered for {self._silence:.0f} s"))
                self._reader.cancel()
                return

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
