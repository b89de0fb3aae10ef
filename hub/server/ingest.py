"""The ingest session: one call of a shipper, whose batches are stored and acknowledged.

The hub first sends `Opened`. Then each `Put` is stored, or `Refused`: after that nothing more of its shard is accepted in this call, while
the other shards continue. The hub acknowledges stored batches when the client asks for it, or after `UNASKED` bytes. At the level
"disk" a separate thread flushes each shard with new records before that. Batches that arrive meanwhile are covered by its next flush.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from hub.errors import HubError, HubFull, Malformed, ShardDamaged
from hub.protocol import ingest
from hub.protocol.ingest import Acknowledged, Done, Level, Opened, Opening, Ping, Put, ResumePoint, ShippedLog
from hub.root import columns
from hub.root.columns import SequencedBatch
from hub.root.store import Outcome, Shard, Store
from hub.server.clients import Client
from hub.server.event_log import escape
from hub.server.shard_index import is_scarce
from kvspool.errors import KvspoolError
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from pyarrow import flight

UNASKED = 8 << 20  # bytes of batches after which an acknowledgement is sent without a question
logger = logging.getLogger("kvspool.hub")


class IngestGuard(Protocol):
    """Admission control of one call. Each method raises a HubError for a refusal."""

    def begin(self, client: str, bits: int) -> None:
        """Called before anything is done for the client."""

    def admit(self, size: int) -> None:
        """Called before a batch of `size` bytes is stored; may sleep."""

    def progress(self, size: int) -> None:
        """Called after a batch, received as `size` bytes, was processed."""


class IngestSession:
    """One call of one client."""

    def __init__(self, store: Store, level: Level, guard: IngestGuard, opening: Opening, client: Client, largest: int) -> None:
        self._store = store
        self._level = level
        self._guard = guard
        self._opening = opening
        self._client = client
        self._largest = largest
        self._logs: dict[int, ShippedLog] = {}  # by shard; without refused ones
        self._shards: dict[int, Shard] = {}
        self._pending: dict[int, int] = {}  # shard: the sequence below which all is stored, not acknowledged yet
        self._unasked = 0
        self._asked = 0
        self._flushes: FlushWorker | None = None
        self.is_done = False

    def run(self, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter) -> None:
        """Process messages until the client ends the call, or is gone."""
        writer = _OneAtATime(writer)
        with ExitStack() as taken:
            self._open(writer, taken)
            if self._level == "disk":
                self._flushes = taken.enter_context(FlushWorker(lambda places, asked: self._flush(places, asked, writer)))
            for message, batch in self._messages(reader) if self._has_schema(reader) else ():
                if isinstance(message, Done):
                    self.is_done = True
                elif isinstance(message, Ping):
                    self._client.said({log.index: message.ends[log.index] for log in self._opening.logs if log.index in message.ends})
                    self._asked += 1
                    self._acknowledge(writer)
                else:
                    self._put(message, batch, writer)
            self._acknowledge(writer)

    def _open(self, writer: Any, taken: ExitStack) -> None:
        """Take the client's shards, and send where each continues; a log that can't be accepted is refused alone."""
        opening = self._opening
        self._store.enter(opening.client, opening.bits)
        places, refusals = [], []
        for log in opening.logs:
            try:
                shard = self._store.take(opening.client, opening.bits, log.index)
                taken.callback(self._store.give_back, opening.client, log.index)
                expected, is_known = shard.enter(log.id, log.end)
            except (KvspoolError, OSError) as error:
                refusals.append((self._refusal(log.index, error), log.index))
                continue
            self._logs[log.index], self._shards[log.index] = log, shard
            places.append(ResumePoint(log.index, expected, is_known))
            self._client.stored(log.index, Outcome(expected), 0)
        self._client.said({log.index: log.end for log in opening.logs})
        writer.write_metadata(ingest.encode(Opened(ingest.VERSION, self._level, self._largest, places)))
        for refused, index in refusals:
            self._refuse(writer, refused, index)

    def _has_schema(self, reader: Any) -> bool:
        """Return whether the client has sent a schema; it may be gone.

        Raises Malformed for other columns than ours, before any of them is decoded.
        """
        try:
            with _decoding():
                schema = reader.schema
        except OSError:  # nothing arrived
            return False
        if not schema.equals(columns.SCHEMA):
            raise Malformed(f"a batch must have the columns {columns.SCHEMA.names}, not {str(schema)[:500]!r}")
        return True

    def _messages(self, reader: Any) -> Iterator[tuple[ingest.FromClient, pa.RecordBatch | None]]:
        """Yield messages until the client ends the call or its connection does. Raises Malformed."""
        while not self.is_done:
            try:
                with _decoding():
                    chunk = reader.read_chunk()
            except StopIteration:
                return
            if chunk.app_metadata is None:
                raise Malformed("a batch without a message")
            yield ingest.decode_from_client(chunk.app_metadata.to_pybytes()), chunk.data

    def _put(self, put: Put, batch: pa.RecordBatch | None, writer: Any) -> None:
        """Store a batch, or refuse it."""
        if batch is None:
            raise Malformed("a put without a batch")
        records = columns.check(batch, self._largest)
        size = records.size
        log = self._logs.get(put.index)  # a flush on another thread may refuse the shard at any moment
        if log is not None:
            try:
                self._guard.admit(size)
                self._store_batch(put, log, SequencedBatch(put.first, batch, records), size)
            except KvspoolError as error:
                self._refuse(writer, self._refusal(put.index, error), put.index)
                if isinstance(error, Malformed):
                    raise
        elif not any(log.index == put.index for log in self._opening.logs):
            raise Malformed(f"a put for shard {put.index}, for which the call was not opened")
        self._guard.progress(batch.nbytes)
        self._unasked += size
        self._asked += put.ask
        if put.ask or self._unasked >= UNASKED:
            self._acknowledge(writer)

    def _store_batch(self, put: Put, log: ShippedLog, rows: SequencedBatch, size: int) -> None:
        outcome = self._shards[put.index].put(log.id, rows, put.after)
        self._client.said({put.index: put.end})
        self._client.stored(put.index, outcome, size)
        self._pending[put.index] = outcome.expected

    def _refusal(self, index: int, error: KvspoolError | OSError) -> HubError:
        """Return the refusal for an error of a shard: HubFull for a transient one.

        Any other means that the shard is damaged or was removed, and needs an operator.
        """
        if isinstance(error, HubError):
            return error
        if is_scarce(error):
            return HubFull(f"shard {index}: {error}")
        logger.error("%s shard %d: %s", self._opening.client, index, escape(str(error)))
        return ShardDamaged(str(error))

    def _refuse(self, writer: Any, error: HubError, index: int) -> None:
        """Refuse a shard, and accept nothing more of it in this call."""
        self._logs.pop(index, None)
        refused = ingest.refusal(error, index)
        self._client.refuse(refused.reason)
        logger.warning("refused %s shard %d: %s", self._opening.client, index, escape(str(error)))
        writer.write_metadata(ingest.encode(refused))

    def _acknowledge(self, writer: Any) -> None:
        """Acknowledge stored batches; at the level "disk" once they are on disk."""
        places, self._pending, self._unasked = self._pending, {}, 0
        if self._flushes is not None:
            self._flushes.ask(places, self._asked)
        else:
            writer.write_metadata(ingest.encode(Acknowledged(list(places.items()), self._asked)))

    def _flush(self, places: dict[int, int], asked: int, writer: Any) -> None:
        """Flush shards to disk, and acknowledge that."""
        stored = [(index, place) for index, place in places.items() if self._is_synced(index, writer)]
        writer.write_metadata(ingest.encode(Acknowledged(stored, asked)))

    def _is_synced(self, index: int, writer: Any) -> bool:
        try:
            self._shards[index].sync()
        except KvspoolError as error:
            self._refuse(writer, self._refusal(index, error), index)
        else:
            return True
        return False


class FlushWorker(Handle):
    """Performs requested flushes on its own thread; requests during a flush are combined in the next one."""

    def __init__(self, flush: Callable[[dict[int, int], int], None]) -> None:
        """flush: called with the positions of the requested shards, and the number of the last question."""
        self._flush = flush
        self._places: dict[int, int] = {}
        self._asked: int | None = None
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hub flushes", daemon=True)

    def ask(self, places: dict[int, int], asked: int) -> None:
        """Request a flush of these shards."""
        with self._changed:
            self._places |= places
            self._asked = asked
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked is not None or self._is_over)
                if self._asked is None:
                    return
                places, asked, self._places, self._asked = self._places, self._asked, {}, None
            try:
                self._flush(places, asked)
            except (pa.ArrowException, OSError):
                return  # the client is gone; the reading thread finds out

    def __enter__(self) -> FlushWorker:
        try:
            self._thread.start()
        except RuntimeError as error:
            raise HubFull(f"the hub can't start a thread now: {error}", 1.0) from None
        return self

    def __exit__(self, *_: object) -> None:
        """Complete the requested flushes, and end."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()


class _OneAtATime(Handle):
    """A writer for two threads: Flight's accepts one message at a time."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._lock = threading.Lock()

    def write_metadata(self, data: bytes) -> None:
        with self._lock:
            self._writer.write_metadata(data)


@contextmanager
def _decoding() -> Iterator[None]:
    """Raise Malformed for data that Arrow can't decode, HubFull for lack of memory."""
    try:
        yield
    except MemoryError as error:  # a compressed batch declares its size itself
        raise HubFull(f"a batch needs more memory than is available for all: {str(error)[:200]}") from None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise Malformed(f"not an Arrow batch: {str(error)[:200]}") from None
