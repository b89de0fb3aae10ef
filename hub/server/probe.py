"""The hub's probe of itself: it connects like any client, authenticates, asks for the list of changes, and ships a record.

    [root]/.hub/probe/     its own store, created at each start; readers and mirrors don't see it

A hub may answer its page while it does no work. A full pool, a held lock or a disk that hangs stops every client, and no counter shows it.
Each probe goes the whole way, at the hub's level, step by step. If it has waited in a step for `LIMIT`, and no client has completed that
step meanwhile, the hub is unhealthy. When thousands of clients connect at once, the probe waits among them. The hub is slow then, but it
works, and a restart would send all of them to the end of the queue.

With `--client-ca` a caller needs a certificate, which the hub doesn't have for itself. Then the probe lists and stores without the network.
So it does while clients take all connections or calls that the hub may have. A full hub refuses others, but it works.
"""

from __future__ import annotations

import logging
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

import kvspool
from hub.client.connection import Connection, Security
from hub.client.remote import RemoteHub
from hub.protocol.ingest import VERSION, Opening, Put, ShippedLog
from hub.root import columns
from hub.root.columns import SequencedBatch
from hub.root.store import PRIVATE, Store
from hub.server.shard_index import ShardIndex
from hub.server.steps import Step, Steps
from kvspool import system
from kvspool.journal import Journal, Retention
from kvspool.system.handles import Handle
from shard import route

PRINCIPAL = ".probe"  # no access file can have this name
INTERVAL = 2.0  # seconds between two probes
CONNECTIONS, CALLS = 2, 1  # of the probe, at a time
CALL = 20.0  # seconds after which a call of the probe is ended
LIMIT = 6.0  # seconds in a step that no client completes, after which the hub counts as unhealthy
ENDING = 10.0  # seconds to wait for a probe in progress, at the end
SEGMENT = 1 << 16  # bytes of a segment of the probe's shard
TRIMMED = 500  # probes after which full segments are removed
logger = logging.getLogger("kvspool.hub")


class ProbedAddress(NamedTuple):
    """Where and how the probe connects. location None: without the network."""

    location: str | None
    security: Security = Security()


class Probe(Handle):
    """Probes a hub on its own thread, from `start` to `close`. Other threads call `trouble`."""

    def __init__(self, root: Path, index: ShardIndex, address: Callable[[], ProbedAddress], steps: Steps) -> None:
        """address: returns the present one, for each probe. steps: those that clients have completed, the probe among them."""
        self.client = f"probe-{system.port.random(16).hex()}"  # no other client knows it
        self._index = index
        self._address = address
        self._steps = steps
        folder = root / PRIVATE / "probe"
        shutil.rmtree(folder, ignore_errors=True)
        system.port.make_directory(folder)
        self._path = folder / route.directory_name(self.client, 0, 0)
        kvspool.create(self._path, format="kvj", segment_bytes=SEGMENT).close()
        self.store = Store(folder)
        self._log = system.port.random(16)
        self._token = index.token  # of the last list of changes; a list of all shards would cost the most just after a start
        self._probes = 0
        self._succeeded = 0  # probes
        self._waits: dict[Step, float] = {}  # since when the probe has tried to complete a step; without those that it has completed
        self._error = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub probe", daemon=True)

    def start(self) -> None:
        """Begin to probe."""
        self._thread.start()

    def close(self) -> None:
        """End, after the probe in progress."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(ENDING)
        self.store.close()

    def trouble(self) -> str:
        """Return why the hub doesn't do its work, in a sentence; empty if it does."""
        now = system.port.monotonic()
        for step, since in list(self._waits.items()):
            seconds = now - max(since, self._steps.last(step))
            if seconds > LIMIT:
                error = self._error  # the thread may replace it
                result = f"failed: {error}" if error else "is not answered"
                return f"the hub has not done its work for {seconds:.0f} s: it has {step}, and its own probe {result}"
        return ""

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL):
            try:
                self.probe()
            except Exception as error:
                words = f"{type(error).__name__}: {error}"[:500]
                if not self._error:
                    logger.warning("the hub's probe failed: %s", words)
                self._error = words
            else:
                self._succeeded, self._error = self._succeeded + 1, ""

    def probe(self) -> None:
        """Do once what clients do. Raises the error that they would get."""
        location, security = self._address()
        self._probes += 1
        if location is None:
            self._within()
        else:
            self._over_network(location, security)
        if self._probes % TRIMMED == 0:
            with self._step(Step.STORE):
                self._trim()

    def _trim(self) -> None:
        journal: Journal = kvspool.open(self._path, format="kvj")
        with journal:
            journal.trim(Retention(max_bytes=0))

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        """Complete a step inside the `with` block. After an error, the step remains one that the probe waits for."""
        self._waits.setdefault(step, system.port.monotonic())
        yield
        del self._waits[step]

    def _over_network(self, location: str, security: Security) -> None:
        with ExitStack() as stack:
            with self._step(Step.CONNECT):
                remote = stack.enter_context(RemoteHub(location, security=security, timeout=CALL))
                remote.server()
            with self._step(Step.LIST):
                self._token = remote.changes(self._token).token
        opening = Opening(VERSION, self.client, 0, [ShippedLog(0, self._log, self._probes)])
        with self._step(Step.OPEN):
            connection = Connection(location, security, opening, CALL)
        with connection, self._step(Step.STORE):
            next = connection.opened.places[0].next
            connection.put(Put(0, next, next, next + 1, True), record(next).batch)
            while connection.stored.get(0, 0) <= next and not connection.refused:
                connection.hear()
            for error in connection.refused.values():
                raise error
            connection.finish()

    def _within(self) -> None:
        self._waits.pop(Step.CONNECT, None)  # no client can do more than wait for a place
        with self._step(Step.LIST):
            self._token = self._index.look(self._token, lambda client: False).token
        with self._step(Step.OPEN):
            self.store.enter(self.client, 0)
            shard = self.store.take(self.client, 0, 0)
        try:
            with self._step(Step.STORE):
                next, _ = shard.enter(self._log, max(self._probes, shard.journal.end()))
                shard.put(self._log, record(next), next)
                shard.sync()
        finally:
            self.store.give_back(self.client, 0)


def record(sequence: int) -> SequencedBatch:
    """Return a record of the probe. It is laid out by hand: `pa.array` would import pandas, where that is installed, in the hub."""
    value = b"probe"
    buffers = {
        "timestamp": [struct.pack("<q", system.port.now())],
        "type": [struct.pack("<i", 0)],
        "value": [struct.pack("<ii", 0, len(value)), value],
        "codec": [bytes(1)],
    }
    arrays = [
        pa.Array.from_buffers(field.type, 1, [None, *map(pa.py_buffer, buffers[field.name])])
        if field.name in buffers
        else pa.nulls(1, field.type)
        for field in columns.SCHEMA
    ]
    return SequencedBatch(sequence, pa.RecordBatch.from_arrays(arrays, schema=columns.SCHEMA))
