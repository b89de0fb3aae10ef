"""One call of a client that ships: batches come in, what is stored is acknowledged.

The hub says `Opened` first. Then each `Put` is stored, or `Refused`: then nothing more of its shard is taken in this call, the other shards
go on. What was stored is acknowledged when the client asks for it, or when `UNASKED` bytes have come without that; at the level "disk"
after one flush of each shard that something came for, on a thread of its own: meanwhile more comes in, and the next flush covers all of it.
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
from kvspool.handles import Handle

if TYPE_CHECKING:
    from pyarrow import flight

UNASKED = 8 << 20  # bytes of batches after which is acknowledged what nobody asked about
logger = logging.getLogger("kvspool.hub")


class IngestGuard(Protocol):
    """Who says, for one call, what may come in. Each method raises a HubError for what may not."""

    def begin(self, client: str, bits: int) -> None:
        """Before anything is done for the client."""

    def admit(self, size: int) -> None:
        """Before a batch of so many bytes is stored; may sleep."""

    def progress(self, size: int) -> None:
        """A batch that came in as so many bytes was dealt with."""


class IngestSession:
    """One call of one client."""

    def __init__(self, store: Store, level: Level, guard: IngestGuard, opening: Opening, client: Client, largest: int) -> None:
        self._store = store
        self._level = level
        self._guard = guard
        self._opening = opening
        self._client = client
        self._largest = largest
        self._logs: dict[int, ShippedLog] = {}  # by shard; without those that were refused
        self._shards: dict[int, Shard] = {}
        self._pending: dict[int, int] = {}  # shard: the sequence below which all is stored, not acknowledged yet
        self._unasked = 0
        self._asked = 0
        self._flushes: FlushWorker | None = None
        self.is_done = False

    def run(self, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter) -> None:
        """Take in what comes until the client ends the call, or is gone."""
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
        """Take the client's shards, and say where each goes on; a log that can't be taken in is refused for itself."""
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
        """Return whether the client has said which columns come: it may be gone. Raises Malformed for others than ours, before anything of
        them is decoded."""
        try:
            with _decoding():
                schema = reader.schema
        except OSError:  # nothing came
            return False
        if not schema.equals(columns.SCHEMA):
            raise Malformed(f"a batch has the columns {columns.SCHEMA.names} and their types, not {str(schema)[:500]!r}")
        return True

    def _messages(self, reader: Any) -> Iterator[tuple[ingest.FromClient, pa.RecordBatch | None]]:
        """Yield what comes, until the client ends the call or its connection does. Raises Malformed."""
        while not self.is_done:
            try:
                with _decoding():
                    chunk = reader.read_chunk()
            except StopIteration:
                return
            if chunk.app_metadata is None:
                raise Malformed("a batch without a message beside it")
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
            raise Malformed(f"a put for shard {put.index}, which the call was not opened for")
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
        """Return how to say what is wrong with a shard: what may pass is said as HubFull, and all else, that it is damaged or was removed:
        a person has to look."""
        if isinstance(error, HubError):
            return error
        if is_scarce(error):
            return HubFull(f"shard {index}: {error}")
        logger.error("%s shard %d: %s", self._opening.client, index, escape(str(error)))
        return ShardDamaged(str(error))

    def _refuse(self, writer: Any, error: HubError, index: int) -> None:
        """Say no to a shard, and take nothing more of it in this call."""
        self._logs.pop(index, None)
        refused = ingest.refusal(error, index)
        self._client.refuse(refused.reason)
        logger.warning("refused %s shard %d: %s", self._opening.client, index, escape(str(error)))
        writer.write_metadata(ingest.encode(refused))

    def _acknowledge(self, writer: Any) -> None:
        """Say what is stored; at the level "disk" once it is there."""
        places, self._pending, self._unasked = self._pending, {}, 0
        if self._flushes is not None:
            self._flushes.ask(places, self._asked)
        else:
            writer.write_metadata(ingest.encode(Acknowledged(list(places.items()), self._asked)))

    def _flush(self, places: dict[int, int], asked: int, writer: Any) -> None:
        """Put shards on disk, and say so."""
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
    """Does flushes that are asked for, one after the other, on a thread of its own; those asked for during one are done together."""

    def __init__(self, flush: Callable[[dict[int, int], int], None]) -> None:
        """flush: called with the place of each shard that was asked for since, and the last number of a question."""
        self._flush = flush
        self._places: dict[int, int] = {}
        self._asked: int | None = None
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hub flushes", daemon=True)

    def ask(self, places: dict[int, int], asked: int) -> None:
        """Have these shards flushed, soon."""
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
                return  # the client is gone; whoever reads from it finds out

    def __enter__(self) -> FlushWorker:
        try:
            self._thread.start()
        except RuntimeError as error:
            raise HubFull(f"the hub has no thread for that now: {error}", 1.0) from None
        return self

    def __exit__(self, *_: object) -> None:
        """Do what is left, and end."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()


class _OneAtATime(Handle):
    """A writer that two threads may use: Flight's takes one message at a time."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._lock = threading.Lock()

    def write_metadata(self, data: bytes) -> None:
        with self._lock:
            self._writer.write_metadata(data)


@contextmanager
def _decoding() -> Iterator[None]:
    """Raise Malformed for what Arrow can't decode, HubFull for what it has no room for."""
    try:
        yield
    except MemoryError as error:  # a compressed batch says itself how large it becomes
        raise HubFull(f"a batch needs more memory than there is for all: {str(error)[:200]}") from None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise Malformed(f"no Arrow batch: {str(error)[:200]}") from None
