"""The hub over the network: an Arrow Flight server that takes in what shippers send, and hands out what it keeps. Needs the extra `hub`."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyarrow import flight

from hub import wire
from hub.clients import Clients
from hub.errors import HubError
from hub.intake import Guard, Intake
from hub.store import Store
from hub.wire import LARGEST_BATCH, Level

MOST_UNHEARD = 1000  # batches that a client may still send when its call was refused
logger = logging.getLogger("kvspool.hub")


class _Open:
    """Lets everything in."""

    def begin(self, client: str, bits: int) -> None:
        return None

    def admit(self, size: int) -> None:
        return None

    def progress(self) -> None:
        return None


class _Flight(flight.FlightServerBase):  # type: ignore[misc]
    """What Flight calls, on its own threads."""

    def __init__(self, hub: HubServer, location: str) -> None:
        self._hub = hub
        super().__init__(location)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Take in what a shipper sends."""
        try:
            opening = wire.decode_opening(descriptor.command or b"")
            self._hub.take_in(opening, context, reader, writer)
        except HubError as error:
            logger.warning("refused a call of %s: %s", context.peer(), error)
            writer.write_metadata(wire.encode(wire.refusal(error)))
            _let_hear(reader)


def _let_hear(reader: Any) -> None:
    """Read on until the client has heard why it is refused, and ends the call: a client of Flight that can't write any more throws away
    what it has not read yet."""
    with suppress(pa.ArrowException, OSError, StopIteration):
        for _ in range(MOST_UNHEARD):
            reader.read_chunk()


class HubServer:
    """A hub root on the network. `start` serves it on threads of its own; `close` ends that."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        level: Level = "process",
        largest_batch: int = LARGEST_BATCH,
    ) -> None:
        self.root = Path(os.path.abspath(root))
        self.level: Level = level
        self.clients = Clients()
        self._largest = largest_batch
        self._store = Store(self.root)
        self._flight = _Flight(self, f"grpc://{listen[0]}:{listen[1]}")
        self._thread = threading.Thread(target=self._flight.serve, name="hub", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def location(self) -> str:
        """Return where clients find it."""
        return f"grpc://127.0.0.1:{self._flight.port}"

    def take_in(self, opening: wire.Opening, context: Any, reader: Any, writer: Any) -> None:
        """Serve one call of a shipper. Raises HubError for what is refused as a whole."""
        guard: Guard = _Open()
        guard.begin(opening.client, opening.bits)
        client = self.clients.of(opening.client)
        intake = Intake(self._store, self.level, guard, opening, client, self._largest)
        client.connected(1)
        try:
            intake.run(reader, writer)
        finally:
            client.connected(-1)
            if not intake.is_done:
                logger.info("the connection of %s was cut", opening.client)

    def close(self) -> None:
        """End all calls, and give the root back."""
        self._flight.shutdown()
        self._store.close()

    def __enter__(self) -> HubServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
