"""Stream reading: micro-batch after micro-batch of what was appended meanwhile, each the same when it is run again.

Spark keeps one reader in a process on the driver for the life of a query, and asks it for offsets; the tasks of a batch read in other
processes, each with a fresh reader. Between two batches the driver asks some 90 times a second whether there is something new, so that
question costs no more than a look at the shards.

**What a batch is.** The offsets noted before it and for it, and nothing else, so a batch that is run again after a failure has the same
rows in the same order. A shard that appears is noted at its first record, and read by the batch after: where it began is then in the
checkpoint.

**What is gone** before it was read (overwritten, removed by retention, a log that was deleted, replaced or is shorter than it was) is an
error with a code, or with `failOnDataLoss=false` a warning, and the query goes on behind it.

**Retention.** With `groupId` a durable reader stands where the query is, as far as batches are committed; without one, none is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from hub.spark import offsets, reading
from hub.spark.admission import Delay, share
from hub.spark.errors import DataLossError
from hub.spark.opening import open_shards
from hub.spark.options import ReadOptions
from hub.spark.planning import Task, plan
from hub.spark.shards import Extent, ShardKey, Shards
from kvspool.errors import KvspoolError, LogNotFound, ReaderBusy

if TYPE_CHECKING:
    import pyarrow

CHECKPOINT = "an offset in the checkpoint"  # for messages
COMMIT_AGAIN = 60.0  # seconds
MOST_REPORTED = 1000  # losses that are remembered so as to warn of each one once

_logger = logging.getLogger("kvspool")

Json = dict[str, Any]
Ends = dict[ShardKey, int]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream of what the options name; see the module."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Take the options of a stream, and check the columns asked for. Opens nothing: a task gets a copy of this."""
        reading.check_columns(schema)
        self._options = options
        self._schema = schema
        self._shards: Shards | None = None  # the driver's, from its first look on
        self._extents: dict[ShardKey, Extent] = {}  # of the last look
        self._initial: Json | None = None
        self._unfit: ValueError | KvspoolError | None = None  # why no new query can start as the options say
        self._target: Ends | None = None  # where Trigger.AvailableNow ends
        self._idle: tuple[Json, dict[ShardKey, Extent]] | None = None  # offsets behind which nothing was, as the shards were then
        self._latest: tuple[dict[ShardKey, Extent], Json] = ({}, {})
        self._committed: Json | None = None  # as far as the durable reader was told to go
        self._committed_at = 0.0
        self._reported: set[str] = set()
        self._delay = None if options.min_offsets is None else Delay(options.min_offsets, options.max_delay, time.monotonic)

    def initialOffset(self) -> Json:
        """Return where a new query starts. Spark asks twice, and means the same; and again in a new process if the first batch has to be
        run again, which begins where its end says.

        What the options say may not fit the shards of today. Only a new query needs it: what is wrong is raised by `latestOffset`.
        """
        if self._initial is None:
            extents = self._look()
            try:
                self._initial = offsets.note(self._starts(extents), extents)
            except (ValueError, KvspoolError) as error:
                self._initial, self._unfit = {}, error
        return self._initial

    def _starts(self, extents: dict[ShardKey, Extent]) -> Ends:
        """Return where a new query starts in each shard. Raises what `Bound.sequences` does."""
        assert self._shards is not None
        starting, sequence_at = self._options.starting, self._shards.sequence_at
        is_lenient = self._options.is_lenient_on_time
        return starting.sequences("starting", extents, sequence_at, self._report, is_lenient_on_time=is_lenient)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return what the options say of a micro-batch's size; of two of them the larger, since Spark takes but one."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        return ReadAllAvailable() if self._options.min_offsets is None else ReadMinRows(self._options.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        """Note what is there now: the query ends when it has read that."""
        self._target = {key: extent.end for key, extent in self._look().items()}

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return where the next micro-batch ends, and `start` itself if there is nothing for one.

        Raises DataLossError for what is gone, ValueError for a checkpoint that isn't one of this source, and for a new query what is wrong
        with its start.
        """
        if self._unfit is not None and start == self._initial:
            raise self._unfit
        extents = self._look()
        if self._idle == (start, extents):
            self._keep_committed(start)
            return start
        # Spark asks for more only when the batch before is done and its checkpoint complete; its own `commit` comes with the next batch,
        # which after the last one of a run, or before a long silence, is too late for those who wait for room.
        self.commit(start)
        noted = offsets.parse(start, CHECKPOINT)
        places = offsets.go_on(noted, extents, self._report)
        available = self._available(places, extents)
        admitted = self._admitted(places, available, limit)
        following = offsets.note(admitted, extents)
        if following != {name: value for name, value in start.items() if name != offsets.FROM}:
            return {offsets.FROM: start, **following} if start == self._initial else following
        if admitted == available:
            self._idle = (start, extents)
            if self._target is not None:
                self.stop()  # a run ends here, and its process is killed: what the durable reader has yet to be told is told now
        return start

    def _available(self, places: Ends, extents: dict[ShardKey, Extent]) -> Ends:
        """Return how far each shard could be read."""
        ends = {}
        for key, extent in extents.items():
            end = extent.end if self._target is None else min(self._target.get(key, 0), extent.end)
            if key in places:
                ends[key] = max(places[key], end)
            elif self._target is None or key in self._target:
                ends[key] = extent.first
                self._welcome(key, extent)
        return ends

    def _welcome(self, key: ShardKey, extent: Extent) -> None:
        if extent.first > 0:
            words = "%s is new to the query, and is read from offset %d on; there is nothing before it any more"
            _logger.warning(words, offsets.name(key), extent.first)

    def _admitted(self, places: Ends, available: Ends, limit: ReadLimit) -> Ends:
        """Return how much of that goes into the next micro-batch."""
        if isinstance(limit, ReadAllAvailable):
            return available
        backlog = sum(available[key] - at for key, at in places.items())
        if self._target is None and self._delay is not None and self._delay.holds_back(backlog):
            return available | places
        return share(places, available, limit.max_rows) if isinstance(limit, ReadMaxRows) else available

    def reportLatestOffset(self) -> Json:
        """Return the end of what is there, for the progress report; as of the last look."""
        if self._latest[0] is not self._extents:
            self._latest = (self._extents, offsets.note({key: extent.end for key, extent in self._extents.items()}, self._extents))
        return self._latest[1]

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        """Return the tasks of a micro-batch. Raises what `latestOffset` does."""
        extents = self._look()
        assert self._shards is not None
        begin, stop = offsets.parse(offsets.begin_of(start, end), CHECKPOINT), offsets.parse(end, CHECKPOINT)
        spans = offsets.spans(begin, stop, extents, self._report)
        ranges = [self._shards.range(key, at, until) for key, (at, until) in spans.items() if at < until]
        tasks = plan(ranges, min_partitions=self._options.min_partitions, max_records=self._options.max_records)
        return list[InputPartition](tasks)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one task as record batches."""
        assert isinstance(partition, Task)
        return reading.read(partition, self._schema, fail_on_data_loss=self._options.fail_on_data_loss)

    def commit(self, end: Json) -> None:
        """Let the durable reader, if there is one, go on to what was read by all batches up to this one."""
        if self._options.reader is not None and end != self._committed:
            extents = self._look()
            assert self._shards is not None
            noted = offsets.parse(end, CHECKPOINT)
            is_same = {key: offsets.is_same_log(noted.logs.get(key, ""), extent.log_id) for key, extent in extents.items()}
            try:
                self._shards.commit({key: at for key, at in noted.next.items() if is_same.get(key)})
            except ReaderBusy as error:
                _logger.warning("the durable reader stays where it is for now: %s", error)
                return
            self._committed = end
            self._committed_at = time.monotonic()

    def _keep_committed(self, end: Json) -> None:
        """Commit again from time to time while there is nothing to read: shards that the query doesn't ask for go on, and its durable
        reader must not hold them back."""
        if time.monotonic() - self._committed_at > COMMIT_AGAIN and not self._options.selection.is_all:
            self._committed = None
            self.commit(end)

    def stop(self) -> None:
        """Close the logs. Spark doesn't always call this; a process that ends closes them too."""
        if self._shards is not None:
            self._shards.close()
            self._shards = None

    def _look(self) -> dict[ShardKey, Extent]:
        try:
            if self._shards is None:
                self._shards = open_shards(self._options, reading.columns_of(self._schema))
            extents = self._shards.look()
        except LogNotFound as error:
            raise DataLossError(f"[KVSPOOL_SOURCE_NOT_FOUND] {error}") from error
        if extents != self._extents:
            self._extents = extents
        return self._extents

    def _report(self, loss: str) -> None:
        """Raise DataLossError, or warn once and let the query go on."""
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{loss}. Set the option failOnDataLoss to false to go on without that")
        if loss not in self._reported:
            if len(self._reported) < MOST_REPORTED:
                self._reported.add(loss)
            _logger.warning("%s (loss %d of this query)", loss, len(self._reported))
