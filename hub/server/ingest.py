"""One call of a shipper, whose batches are stored and acknowledged.

The hub first sends `Opened`. Then each `Put` is stored, or `Refused`: after that nothing more of its shard is accepted in this call, while
the other shards continue. The hub acknowledges stored batches when the client asks for it, after `UNASKED` bytes, or after `UNHEARD`
seconds. Without that, a client that hears nothing for long would close its connection and open another one. At the level "disk" the hub
flushes the shards with new records first. Batches that arrive meanwhile are covered by its next flush.

An `IngestSession` stores, and says what to answer; it knows nothing of the network. `Exchange` reads and writes the messages of a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, ExitStack

import pyarrow as pa

from hub.errors import HubError, HubFull, Malformed, NotAllowed, NotAuthenticated, ShardDamaged
from hub.protocol import ingest
from hub.protocol.ingest import Acknowledged, Done, FromHub, Level, Opened, Opening, Ping, Put, ResumePoint, ShippedLog
from hub.root import columns, draining
from hub.root.columns import SequencedBatch
from hub.root.store import Outcome, Shard, Store
from hub.server import ipc
from hub.server.admission import Admission
from hub.server.call import Call, completed, run_on
from hub.server.clients import Client
from hub.server.event_log import escape
from hub.server.flight import Data, encode_data
from hub.server.ipc import EncodedBatch
from hub.server.shard_index import is_scarce
from hub.server.steps import Step, Steps
from kvspool import system
from kvspool.errors import KvspoolError
from kvspool.system.handles import Handle

UNASKED = 8 << 20  # bytes of batches after which an acknowledgement is sent without a question
UNHEARD = 5.0  # seconds after which the same happens with the next batch
logger = logging.getLogger("kvspool.hub")


class IngestSession:
    """The records of one call of one client. Its methods but `flush` are called one at a time."""

    def __init__(self, store: Store, level: Level, guard: Admission, opening: Opening, client: Client, largest: int) -> None:
        self.level = level
        self.largest = largest
        self._store = store
        self._guard = guard
        self._opening = opening
        self._client = client
        self._logs: dict[int, ShippedLog] = {}  # by shard; without refused ones
        self._shards: dict[int, Shard] = {}
        self._pending: dict[int, int] = {}  # shard: the sequence below which all is stored, not acknowledged yet
        self._unasked = 0
        self._asked = 0
        self._answered = system.port.monotonic()  # when the client was last sent something
        self.pause = 0.0  # seconds that the client has to wait for its rate, since the last batch

    def open(self, taken: ExitStack) -> list[FromHub]:
        """Take the client's shards until `taken` is closed, and return where each continues; a refused log is refused alone."""
        opening = self._opening
        self._store.enter(opening.client, opening.bits, {log.index: log.id for log in opening.logs})
        places: list[ResumePoint] = []
        refusals: list[FromHub] = []
        for log in opening.logs:
            try:
                shard = self._store.take(opening.client, opening.bits, log.index)
                taken.callback(self._store.give_back, opening.client, log.index)
                expected, is_known = shard.enter(log.id, log.end)
            except (KvspoolError, OSError) as error:
                refusals.append(self._refuse(log.index, error))
                continue
            self._logs[log.index], self._shards[log.index] = log, shard
            time = shard.sizes.last_timestamp if is_known and expected else 0
            places.append(ResumePoint(log.index, expected, is_known, time))
            self._client.stored(log.index, Outcome(expected), 0)
        self._client.said({log.index: log.end for log in opening.logs})
        self._answered = system.port.monotonic()
        return [Opened(ingest.VERSION, self.level, self.largest, places), *refusals]

    def put(self, put: Put, batch: pa.RecordBatch) -> list[FromHub]:
        """Store a batch, or return the refusal of its shard. Raises Malformed for one that no client sends."""
        records = columns.check(batch, self.largest)
        self._asked += put.ask
        self._unasked += records.size
        log = self._logs.get(put.index)  # a flush may refuse the shard at any moment
        if log is None:
            if not any(log.index == put.index for log in self._opening.logs):
                raise Malformed(f"a put for shard {put.index}, for which the call was not opened")
            return []
        try:
            if self._store.drain.is_set:
                raise HubFull(draining.WORDS, draining.RETRY)
            self.pause = self._guard.admit(records.size)
            outcome = self._shards[put.index].put(log.id, SequencedBatch(put.first, batch, records), put.after)
        except (Malformed, NotAllowed, NotAuthenticated):
            raise  # they end the call
        except KvspoolError as error:
            return [self._refuse(put.index, error)]
        self._client.said({put.index: put.end})
        elsewhere = min(outcome.lost, max(0, min(put.elsewhere, put.first) - put.after))
        self._client.stored(put.index, outcome._replace(lost=outcome.lost - elsewhere), records.size)
        self._pending[put.index] = outcome.expected
        return []

    def ping(self, ping: Ping) -> None:
        """Note the ends of the client's logs, and its question."""
        self._client.said({log.index: ping.ends[log.index] for log in self._opening.logs if log.index in ping.ends})
        self._asked += 1

    def is_due(self, message: Put | Ping) -> bool:
        """Return whether an acknowledgement is due after a message."""
        if isinstance(message, Ping) or message.ask or self._unasked >= UNASKED:
            return True
        return system.port.monotonic() > self._answered + UNHEARD

    def take_stored(self) -> Acknowledged:
        """Return the acknowledgement of what was stored since the last one."""
        places, self._pending, self._unasked, self._answered = self._pending, {}, 0, system.port.monotonic()
        return Acknowledged(list(places.items()), self._asked)

    def flush(self, stored: Acknowledged) -> list[FromHub]:
        """Flush shards to disk, and return the acknowledgement of that, after the refusals of those that can't be flushed."""
        refusals: dict[int, FromHub] = {}
        for index, _ in stored.places:
            try:
                self._shards[index].sync()
            except KvspoolError as error:
                refusals[index] = self._refuse(index, error)
        places = [(index, place) for index, place in stored.places if index not in refusals]
        return [*refusals.values(), Acknowledged(places, stored.asked)]

    def _refuse(self, index: int, error: KvspoolError | OSError) -> FromHub:
        """Accept nothing more of a shard in this call, and return its refusal."""
        self._logs.pop(index, None)
        refused = ingest.refusal(self._known(index, error), index)
        self._client.refuse(refused.reason)
        logger.warning("refused %s shard %d: %s", self._opening.client, index, escape(refused.message))
        return refused

    def _known(self, index: int, error: KvspoolError | OSError) -> HubError:
        """Return the refusal for an error of a shard: HubFull for a transient one.

        Any other means that the shard is damaged or was removed, and needs an operator.
        """
        if isinstance(error, HubError):
            return error
        if is_scarce(error):
            return HubFull(f"shard {index}: {error}")
        logger.error("%s shard %d: %s", self._opening.client, index, escape(str(error)))
        return ShardDamaged(str(error))


class Exchange(Handle):
    """The messages of one call. flushers: for flushing at the level "disk"; turn: waits until the call may be opened; steps: gets those
    that the call completes.
    """

    def __init__(
        self,
        call: Call,
        session: IngestSession,
        flushers: Executor,
        turn: Callable[[], AbstractAsyncContextManager[None]],
        steps: Steps,
    ) -> None:
        self._call = call
        self._turn = turn
        self._session = session
        self._steps = steps
        self._has_schema = False
        self._flushes = FlushRequests(lambda stored: self._flush(stored, flushers)) if session.level == "disk" else None

    async def run(self, first: Data, opened: ExitStack) -> bool:
        """Answer messages until the client ends the call. Return whether it said that it was done. Raises HubError.

        opened: is closed once the call is open.
        """
        taken = ExitStack()
        try:
            with opened:
                async with self._turn():
                    answers = await self._call.run(self._session.open, taken)
            await self._answer(answers)
            self._steps.complete(Step.OPEN)
            is_done = await self._listen(first)
            await self._acknowledge()
            if self._flushes is not None:
                await self._flushes.finish()
            return is_done
        finally:
            try:
                if self._flushes is not None:
                    await self._flushes.cancel()
            finally:
                await self._call.release(taken.close)

    async def _listen(self, first: Data) -> bool:
        """Process messages until the end of the call."""
        if (first.header or first.metadata) and await self._take(first):
            return True
        while (message := await self._call.read()) is not None:
            with message:
                if await self._take(Data.parse(message.data)):
                    return True
            pause, self._session.pause = self._session.pause, 0.0
            if pause:
                await asyncio.sleep(pause)
        return False

    async def _take(self, data: Data) -> bool:
        """Process a message. Return whether it was the last one."""
        if not self._has_schema and data.header:
            self._check_schema(data)
            if not data.metadata:
                return False
            data = data._replace(header=b"")
        if not data.metadata:
            raise Malformed("a batch without a message")
        message = ingest.decode_from_client(bytes(data.metadata))
        if isinstance(message, Done):
            return True
        if isinstance(message, Ping):
            self._session.ping(message)
        else:
            await self._put(message, data)
        if self._session.is_due(message):
            await self._acknowledge()
        return False

    def _check_schema(self, data: Data) -> None:
        """Raise Malformed for other columns than ours, before any of them is decoded."""
        schema = ipc.read_schema(data.header)
        if not schema.equals(columns.SCHEMA):
            raise Malformed(f"a batch must have the columns {columns.SCHEMA.names}, not {str(schema)[:500]!r}")
        self._has_schema = True

    async def _put(self, put: Put, data: Data) -> None:
        if not data.header:
            raise Malformed("a put without a batch")
        encoded = EncodedBatch.parse(data.header, data.body, columns.SCHEMA)
        if encoded.allocated > self._session.largest:
            raise Malformed(f"a batch of {encoded.allocated} bytes; this hub accepts {self._session.largest}")
        with await self._call.grant(encoded.allocated):
            await self._answer(await self._call.run(lambda: self._session.put(put, encoded.decode())))

    async def _acknowledge(self) -> None:
        stored = self._session.take_stored()
        if self._flushes is None:
            await self._answer([stored])
        else:
            self._flushes.ask(stored)

    async def _flush(self, stored: Acknowledged, flushers: Executor) -> None:
        await self._answer(await run_on(flushers, self._session.flush, stored))

    async def _answer(self, messages: list[FromHub]) -> None:
        for message in messages:
            await self._call.write(encode_data(metadata=ingest.encode(message)))
            if isinstance(message, Acknowledged) and message.places:
                self._steps.complete(Step.STORE)


class FlushRequests(Handle):
    """Performs requested flushes one after another; requests during a flush are combined in the next one."""

    def __init__(self, flush: Callable[[Acknowledged], Awaitable[None]]) -> None:
        """flush: flushes shards up to their places, and acknowledges that."""
        self._flush = flush
        self._requested: Acknowledged | None = None
        self._task: asyncio.Task[None] | None = None

    def ask(self, stored: Acknowledged) -> None:
        """Request a flush. Raises the error of the last one."""
        if self._requested is not None:
            stored = Acknowledged(list({**dict(self._requested.places), **dict(stored.places)}.items()), stored.asked)
        self._requested = stored
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._requested is not None:
            stored, self._requested = self._requested, None
            await self._flush(stored)

    async def finish(self) -> None:
        """Complete the requested flushes. Raises the error of the last one."""
        if self._task is not None:
            await self._task

    async def cancel(self) -> None:
        """End, without the requested flushes."""
        if self._task is not None:
            self._task.cancel()
            await completed(self._task)
            if not self._task.cancelled():
                self._task.exception()  # it was reported, or the call has ended
