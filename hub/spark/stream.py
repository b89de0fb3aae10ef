"""Stream reading: micro-batches of newly appended records, each the same when it is repeated.

Spark keeps one reader in a process on the driver for the life of a query, and asks it for offsets. The tasks of a batch read in other
processes, each with a fresh reader. Between two batches the driver asks some 90 times a second for new records, so that question costs
only a look at the shards.

**A batch** depends only on the offsets noted before it and for it. So a batch that is repeated after a failure has the same rows in the
same order. A new shard is noted at its first record, and read by the next batch: its beginning is then in the checkpoint.

**Lost records**, which were not read in time (overwritten, removed by retention; a log deleted, replaced or shortened), are an error with a
code, or with `failOnDataLoss=false` a warning, after which the query continues.

**Retention.** With `groupId` a durable reader follows the query's committed batches; without one, none is created.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from hub.client import timeline
from hub.spark import offsets, reading
from hub.spark.admission import Delay, share
from hub.spark.errors import DataLossError
from hub.spark.opening import open_shards
from hub.spark.options import ReadOptions
from hub.spark.planning import ReadTask, plan
from hub.spark.shards import Extent, ShardKey, SparkShards
from kvspool.errors import KvspoolError, LogNotFound, ReaderBusy

if TYPE_CHECKING:
    import pyarrow

CHECKPOINT = "an offset in the checkpoint"  # for messages
COMMIT_AGAIN = 60.0  # seconds
MOST_REPORTED = 1000  # losses that are remembered to warn of each one once

_logger = logging.getLogger("kvspool")

Json = dict[str, Any]
Ends = dict[ShardKey, int]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream of the shards in the options; see the module."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Store the options of a stream, and check the requested columns. Opens nothing: a task gets a copy of this object."""
        reading.check_columns(schema)
        self._options = options
        self._schema = schema
        self._shards: SparkShards | None = None  # the driver's, since its first look
        self._extents: dict[ShardKey, Extent] = {}  # of the last look
        self._expected: list[Json] = []  # the offsets last given to the shards
        self._initial: Json | None = None
        self._unfit: ValueError | KvspoolError | None = None  # why no new query can start with these options
        self._target: dict[ShardKey, Extent] | None = None  # where Trigger.AvailableNow ends
        self._idle: tuple[Json, dict[ShardKey, Extent]] | None = None  # offsets without records after them, and the shards at that time
        self._latest: tuple[dict[ShardKey, Extent], Json] = ({}, {})
        self._committed: Json | None = None  # the last position given to the durable reader
        self._committed_at = 0.0
        self._reported: set[str] = set()
        self._delay = None if options.min_offsets is None else Delay(options.min_offsets, options.max_delay, time.monotonic)

    def initialOffset(self) -> Json:
        """Return where a new query starts.

        Spark asks twice and needs the same answer. It asks again, in a new process, to repeat the first batch, whose end stores its start.

        The options may not fit the present shards. That concerns only a new query, so `latestOffset` raises the error.
        """
        if self._initial is None:
            extents = self._look()
            try:
                self._initial = offsets.note(self._starts(extents), extents)
            except (ValueError, KvspoolError) as error:
                self._initial, self._unfit = {}, error
        return self._initial

    def _starts(self, extents: dict[ShardKey, Extent]) -> Ends:
        """Return where a new query starts in each shard. Raises as `Bound.sequences`."""
        assert self._shards is not None
        starting, sequence_at = self._options.starting, self._shards.sequence_at
        is_lenient = self._options.is_lenient_on_time
        return starting.sequences("starting", extents, sequence_at, self._report, is_lenient_on_time=is_lenient)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch from the options; of two limits the larger, because Spark accepts only one."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        return ReadAllAvailable() if self._options.min_offsets is None else ReadMinRows(self._options.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the present ends: the query ends when it has read up to them."""
        self._target = dict(self._look())

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return where the next micro-batch ends, or `start` itself if there are no records for one.

        Raises DataLossError for lost records, ValueError for another source's checkpoint, and the error of the start of a new query.
        """
        if self._unfit is not None and start == self._initial:
            raise self._unfit
        extents = self._look(start)
        if self._idle == (start, extents):
            self._keep_committed(start)
            return start
        # Spark asks for more only after the previous batch is done and its checkpoint complete. Its own `commit` follows with the next
        # batch, which is too late for writers that wait for space, after the last batch of a run or before a long pause.
        self.commit(start)
        noted = offsets.parse(start, CHECKPOINT)
        places = offsets.go_on(noted, extents, self._report)
        available = self._available(places, extents)
        admitted = self._admitted(places, available, limit)
        following = offsets.note(admitted, extents, places)
        if not offsets.is_same_place(following, start):
            return {offsets.FROM: start, **following} if start == self._initial else following
        if admitted == available:
            self._idle = (start, extents)
            if self._target is not None:
                self.stop()  # a run ends here, and its process is killed: the durable reader's last position is committed now
        return start

    def _available(self, places: Ends, extents: dict[ShardKey, Extent]) -> Ends:
        """Return up to which sequence each shard can be read."""
        ends = {}
        for key, extent in extents.items():
            end = extent.end
            if self._target is not None:
                before = self._target.get(key)
                end = 0 if before is None else min(timeline.moved(before.logs, extent.logs, before.end), end)
            if key in places:
                ends[key] = max(places[key], end)
            elif self._target is None or key in self._target:
                ends[key] = extent.first
                self._welcome(key, extent)
        return ends

    def _welcome(self, key: ShardKey, extent: Extent) -> None:
        if extent.first > 0:
            words = "%s is new to the query, and is read from offset %d; earlier records no longer exist"
            _logger.warning(words, offsets.name(key), extent.first)

    def _admitted(self, places: Ends, available: Ends, limit: ReadLimit) -> Ends:
        """Return the ends of the next micro-batch."""
        if isinstance(limit, ReadAllAvailable):
            return available
        backlog = sum(available[key] - at for key, at in places.items())
        if self._target is None and self._delay is not None and self._delay.holds_back(backlog):
            return available | places
        return share(places, available, limit.max_rows) if isinstance(limit, ReadMaxRows) else available

    def reportLatestOffset(self) -> Json:
        """Return the ends of the shards at the last look, for the progress report, and hubs that don't answer."""
        if self._latest[0] is not self._extents:
            self._latest = (self._extents, offsets.note({key: extent.end for key, extent in self._extents.items()}, self._extents))
        away = {} if self._shards is None else self._shards.away()
        return {offsets.AWAY: away, **self._latest[1]} if away else self._latest[1]

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        """Return the tasks of a micro-batch. Raises as `latestOffset`."""
        extents = self._look(offsets.begin_of(start, end), end)
        assert self._shards is not None
        begin, stop = offsets.parse(offsets.begin_of(start, end), CHECKPOINT), offsets.parse(end, CHECKPOINT)
        spans = offsets.spans(begin, stop, extents, self._report)
        ranges = [self._shards.range(key, at, until) for key, (at, until) in spans.items() if at < until]
        tasks = plan(ranges, min_partitions=self._options.min_partitions, max_records=self._options.max_records)
        return list[InputPartition](tasks)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one task as record batches."""
        assert isinstance(partition, ReadTask)
        return reading.read(partition, self._schema, fail_on_data_loss=self._options.fail_on_data_loss)

    def commit(self, end: Json) -> None:
        """Move the durable reader, if there is one, to the end of the batches that are done."""
        if self._options.reader is not None and end != self._committed:
            extents = self._look(end)
            assert self._shards is not None
            noted = offsets.parse(end, CHECKPOINT)
            ours = [key for key in noted.next if key in extents and offsets.is_in_log(noted, key, extents[key])]
            try:
                self._shards.commit({key: noted.next[key] for key in ours})
            except ReaderBusy as error:
                _logger.warning("the durable reader is not moved for now: %s", error)
                return
            self._committed = end
            self._committed_at = time.monotonic()

    def _keep_committed(self, end: Json) -> None:
        """Commit again from time to time during pauses: other shards get records, which the durable reader must not hold back."""
        if time.monotonic() - self._committed_at > COMMIT_AGAIN and not self._options.selection.is_all:
            self._committed = None
            self.commit(end)

    def stop(self) -> None:
        """Close the logs. Spark doesn't always call this; a process that ends closes them too."""
        if self._shards is not None:
            self._shards.close()
            self._shards = None

    def _look(self, *noted: Json) -> dict[ShardKey, Extent]:
        """Return the shards. noted: offsets of the checkpoint that they must agree with."""
        try:
            if self._shards is None:
                self._shards, self._expected = open_shards(self._options, reading.columns_of(self._schema)), []
            for one in noted:
                if not any(one is known or one == known for known in self._expected):
                    self._shards.expect(offsets.parse(one, CHECKPOINT))
                    self._expected = [*self._expected[-1:], one]
            extents = self._shards.look()
        except LogNotFound as error:
            raise DataLossError(f"[KVSPOOL_SOURCE_NOT_FOUND] {error}") from error
        if extents != self._extents:
            self._extents = extents
        return self._extents

    def _report(self, loss: str) -> None:
        """Raise DataLossError, or warn once so that the query can continue."""
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{loss}. Set the option failOnDataLoss to false to continue without them")
        if loss not in self._reported:
            if len(self._reported) < MOST_REPORTED:
                self._reported.add(loss)
            _logger.warning("%s (loss %d of this query)", loss, len(self._reported))
