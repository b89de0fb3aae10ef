"""Producers: writers of numbered batches, which may append each batch any number of times, since each of its records is stored once.

    producer = log.producer("orders/3")
    producer.append_many(values, keys=keys, batch=7)    # Stored(first=1200, records=500, repeated=False)
    producer.append_many(values, keys=keys, batch=7)    # the same, repeated=True: nothing was appended

A producer is a name. For each one, the log stores the number of the last batch and how much of it is stored, in its file `producers`; see
`engine.producer_table`. The program that makes the batches keeps their source until the log has them. After a crash it makes the last one
again, for example from the offsets of its source. Batch numbers must increase, but need not be consecutive.

**Crashes.** A process that is killed during a batch has appended the first k of its records. The next process that appends to the log notes
k before anything else. When the batch is sent again, these k are read back, and the others are appended, in any order. Records are the same
if key, value, type and codec are; times don't matter.

**Same records.** A batch must have the same records each time. If a stored one is missing: BatchChanged; see `changed`.

**Durability.** As for the appends. With `durable=True`, or in a log of the level "disk", the guarantee survives a crash of the machine: the
state is flushed before the records are published, while the append lock is held. Otherwise a crash of the machine may remove records of
the last batch, as of every append. They then count as not stored, and are appended when the batch is sent again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from kvspool import system
from kvspool.engine.iteration import Iteration
from kvspool.engine.producer_table import AT_REST, FREE, UNDER_WAY, ProducerState, ProducerTable, before, new_state
from kvspool.errors import AGAIN, BatchChanged, BatchOutOfOrder, LockTimeout, SpoolFull, say_what_is_stored
from kvspool.record import Codec
from kvspool.system import logger
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    import pyarrow

    from kvspool.engine.columns import Columns
    from kvspool.engine.cursor import Cursor
    from kvspool.kernel.frames import FrameWriter
    from kvspool.options import Durability

LARGEST_NAME = 1024  # bytes
MOST_BATCH = (1 << 63) - 1
Changed = Literal["raise", "append"]
Pieces = list[tuple["Columns", "memoryview | None"]]  # record batches, and the numbers (int32) of the selected rows; None: all


class Stored(NamedTuple):
    """The result of `append_many` and `append_arrow` of a producer.

    first: sequence of the first record; None if it is no longer known, or there is none. records: of the batch. repeated: whether all were
    stored already, so that nothing was appended.
    """

    first: int | None
    records: int
    repeated: bool


class BegunBatch(NamedTuple):
    """The last batch of a producer: `stored` of its `rows` records are stored. word: as its program gave it, 0: none."""

    batch: int
    rows: int
    stored: int
    is_done: bool
    word: int


class ProducerStats(msgspec.Struct, frozen=True):
    """The state that a log stores for a producer.

    name: the beginning of it. batch: the last one that was begun, of `rows` records; at least `stored` of them are stored. last: the last
    batch that is stored in full, None if none is known. updated: ns since the Unix epoch.
    """

    name: str
    batch: int
    rows: int
    stored: int
    last: int | None
    updated: int


class TableLocation(NamedTuple):
    """The location of a log's producer table, and its word `pending`, for the holder of the append lock.

    mode: permission bits of a new table. set_pending: stores the word, number + 1 of a state, or 0.
    """

    directory: Path
    log_id: bytes
    mode: int
    set_pending: Callable[[int], None]


class ProducerRows(Protocol):
    """Records to append, of any kind that the log takes."""

    count: int

    def records(self) -> list[tuple[bytes | None, bytes, int, int]]:
        """Return key, value, type and codec of each, as they would be stored."""

    def chosen(self, numbers: list[int]) -> ProducerRows:
        """Return some of them, in order."""


class ProducerLog(Protocol):
    """The part of `kvspool.Log` that a producer needs."""

    path: Path
    timeout: float  # seconds, if the caller gives none
    durability: Durability

    @property
    def log_id(self) -> bytes: ...

    def sync(self, timeout: float | None = None) -> int: ...

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Any: ...

    def columns_of(self, batch: Any, codec: int) -> Columns: ...

    def prepare_columns(self, parts: list[Any], rows: None = None, codec: int = Codec.RAW) -> Any: ...

    def append_in_transaction(self, rows: ProducerRows, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None: ...

    def change_producers(self, change: Callable[[TableLocation, int], int], timeout: float | None = None) -> int: ...

    def extent(self) -> tuple[int, int]: ...

    def cursor(self, start: int, *, bounded: bool = False, end: int | None = None) -> Cursor: ...


class Producer(Handle):
    """One producer of a log; get it from `log.producer(name)`. Any number of processes may use the same one: a batch is stored once."""

    def __init__(self, log: ProducerLog, name: str) -> None:
        """Raises ValueError for an invalid name."""
        if not 0 < len(name.encode()) <= LARGEST_NAME:
            raise ValueError(f"the name of a producer has 1 to {LARGEST_NAME} bytes of UTF-8")
        self.name = name
        self.keep = 0  # hours, up to 65535, to keep a new state after its last batch when room is short; 0: seven days
        self._log = log
        self._id = producer_id(name)
        self._hint = -1

    @property
    def next(self) -> int:
        """Return the number of the batch to continue with: the last begun one if it isn't stored in full, else the next one; 0 for a new
        producer. Raises the errors of `last`.
        """
        state = self._look(None)
        return 0 if state is None else state.batch + int(state.is_done)

    @property
    def last(self) -> int | None:
        """Return the number of the last batch that is stored in full; None if there is none, or a crash of the machine took some of it.

        Raises the system's OSError, Corruption, Closed; LockTimeout while another process appends a batch.
        """
        state = self._look(None)
        return None if state is None or not state.done else state.done - 1

    def append_many(
        self,
        values: Iterable[Any],
        *,
        batch: int,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
        changed: Changed = "raise",
    ) -> Stored:
        """Append the missing records of a batch under one lock; when this returns each is stored once, however often and by whichever
        process it was called.

        values, keys, type, timestamp, timeout, durable: as for the log's `append_many`. batch: 0..2**63-1; a number not above the last
        fully stored one is not checked. A larger one may begin while an earlier batch is incomplete: the missing records of that one are
        then up to the caller, and logged. changed: for a batch that is repeated with other records: "raise" if it is stored in part, or
        "append" all that isn't stored yet, also to the last fully stored one.

        Raises the errors of the log's `append_many`. Records of the batch that were appended before the error are accounted for; append the
        batch again. Also raises BatchChanged, BatchOutOfOrder, TooManyPieces, TooManyProducers.
        """
        self._check(batch, changed)
        if (done := self._answer(self._look(timeout), batch, timeout, durable, changed)) is not None:
            return done
        return self._append(ListedRows(self._log.prepare(values, keys, type, timestamp)), batch, timeout, durable, changed)

    def append_arrow(
        self,
        table: pyarrow.RecordBatch | pyarrow.Table | list[pyarrow.RecordBatch],
        *,
        batch: int,
        codec: int = Codec.RAW,
        timeout: float | None = None,
        durable: bool = False,
        changed: Changed = "raise",
    ) -> Stored:
        """Append a record for each row, as `append_many` does; columns and `codec` as for the log's `append_arrow`."""
        from kvspool.engine import columns

        self._check(batch, changed)
        if (done := self._answer(self._look(timeout), batch, timeout, durable, changed)) is not None:
            return done
        parts = table if isinstance(table, list) else columns.parts(table)
        pieces: Pieces = [(self._log.columns_of(part, codec), None) for part in parts]
        return self._append(self._checked(pieces, codec), batch, timeout, durable, changed)

    def append_pieces(
        self, pieces: Pieces, *, batch: int, codec: int = Codec.RAW, timeout: float | None = None, durable: bool = False,
        changed: Changed = "raise", word: int = 0,
    ) -> Stored:  # fmt: skip
        """Append some rows of each of several converted batches, as `append_arrow` does. word: stored with a new batch, see `begun`."""
        self._check(batch, changed)
        if (done := self._answer(self._look(timeout), batch, timeout, durable, changed)) is not None:
            return done
        return self._append(self._checked(pieces, codec), batch, timeout, durable, changed, word)

    def _checked(self, pieces: Pieces, codec: int) -> ColumnPieces:
        self._log.prepare_columns([part for part, _ in pieces], None, codec)  # raises errors of the columns
        return ColumnPieces(pieces, codec)

    def begun(self, timeout: float | None = None) -> BegunBatch | None:
        """Return the last batch that was begun, None for a new producer. Raises the errors of `last`."""
        state = self._look(timeout)
        return None if state is None else BegunBatch(state.batch, state.rows, state.stored, state.is_done, state.word)

    def others(self, prefix: str, batch: int, before: int) -> list[str]:
        """Return the other producers whose names begin with `prefix`, of at most 44 bytes, and that had appended to a batch before a time,
        in ns since the Unix epoch: of each name the beginning. Raises the system's OSError, Corruption, Closed.
        """
        table = _table_of(self._log)
        if table is None:
            return []
        with table:
            found = [state for _, state in table.named(prefix.encode()) if state.id != self._id]
        return sorted(one.shown for one in found if one.batch == batch and one.updated < before and one.pieces)

    def forget(self, timeout: float | None = None) -> None:
        """Delete the log's state of this producer; its records stay. Raises LockTimeout, the system's OSError."""
        forget(self._log, [self.name], timeout)

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} of {self._log.path}>"

    def _check(self, batch: int, changed: str) -> None:
        if not 0 <= batch <= MOST_BATCH:
            raise ValueError(f"the number of a batch is 0..2**63-1, not {batch}")
        if changed not in ("raise", "append"):
            raise ValueError(f'changed is "raise" or "append", not {changed!r}')

    def _look(self, timeout: float | None) -> ProducerState | None:
        """Return our state after the leftovers of a killed process were resolved."""
        state = self._find()
        if state is None or state.phase == AT_REST:
            return state
        self._log.change_producers(self._resolve_ours, timeout)
        return self._find()

    def _resolve_ours(self, location: TableLocation, next_sequence: int) -> int:
        """Under the append lock: resolve our state if no other process has to, since the word that named it is lost, for example with a
        lock file.
        """
        with ProducerTable.make(location.directory, location.log_id, location.mode) as table:
            found = table.find(self._id)
            if found is not None and found[1].phase == UNDER_WAY:
                table.store(found[0], found[1].resolved(before(next_sequence)), is_used=False)
        return 0

    def _find(self) -> ProducerState | None:
        table = _table_of(self._log)
        if table is None:
            return None
        with table:
            found = table.find(self._id, self._hint)
        self._hint = -1 if found is None else found[0]
        return None if found is None else found[1]

    def _answer(self, state: ProducerState | None, batch: int, timeout: float | None, durable: bool, changed: Changed) -> Stored | None:
        """Return the result for a batch of which nothing is to be appended, whatever its rows are; None otherwise."""
        done = self._there(state, batch, changed)
        return None if done is None else self._repeated(done, timeout, durable)

    def _repeated(self, done: Stored, timeout: float | None, durable: bool) -> Stored:
        """Return `done`. The process that appended it may have crashed before it was on disk, so a durable one is flushed."""
        if durable or self._log.durability == "disk":
            self._log.sync(timeout)
        return done

    def _there(self, state: ProducerState | None, batch: int, changed: Changed) -> Stored | None:
        if state is None or batch > state.batch:
            return None
        if batch == state.batch and state.is_done:
            return _all_of(state) if changed == "raise" else None
        if batch < state.done:
            return Stored(None, 0, True)
        if batch < state.batch:
            raise BatchOutOfOrder(
                f"{self._log.path}: producer {self.name!r} has begun batch {state.batch}; batch {batch} is not known to be stored in full"
            )
        return None

    def _append(self, rows: ProducerRows, batch: int, timeout: float | None, durable: bool, changed: Changed, word: int = 0) -> Stored:
        deadline = system.port.monotonic() + (self._log.timeout if timeout is None else timeout)
        appended = range(0)
        while True:
            seen = self._look(timeout)
            if (done := self._answer(seen, batch, timeout, durable, changed)) is not None:
                return done  # another process was quicker
            state = seen or new_state(self._id, self.name, self.keep)
            left = rows
            if batch == state.batch and seen is not None and state.stored:
                left = self._left(rows, state, changed)
                if state.is_done and not left.count:
                    return self._repeated(_all_of(state), timeout, durable)
            else:
                if seen is not None and not seen.is_done and seen.pieces:
                    logger.warn(
                        "producer %s begins batch %d; of batch %d %d records were appended, of %d",
                        self.name, batch, seen.batch, seen.stored, seen.rows,
                    )  # fmt: skip
                state = state.with_runs([])._replace(batch=batch, word=word)
            transaction = BatchTransaction(self._id, seen, state, left.count, durable or self._log.durability == "disk")
            try:
                self._log.append_in_transaction(left, transaction, timeout, durable)
            except (SpoolFull, LockTimeout) as error:
                if not appended:
                    raise
                say_what_is_stored(error, appended, rows.count, AGAIN)
                raise
            if transaction.stored is not None:
                return transaction.stored
            appended = transaction.appended or appended
            timeout = max(0.0, deadline - system.port.monotonic())

    def _left(self, rows: ProducerRows, state: ProducerState, changed: Changed) -> ProducerRows:
        """Return the rows of a batch that are not stored yet, if it is stored in part or has changed."""
        there: Counter[Any] = Counter()
        for first, count in state.runs:
            there.update((one.key, one.value, one.type, one.codec) for one in self._stored(first, count))
        gone = state.stored - there.total()
        left = []
        for number, row in enumerate(rows.records()):
            if there[row]:
                there[row] -= 1
            else:
                left.append(number)
        if others := there.total():
            if changed == "raise":
                raise BatchChanged(
                    f"[KVSPOOL_BATCH_CHANGED] {self._log.path}: {state.stored} records of batch {state.batch} of producer "
                    f"{self.name!r} are stored, and {others} of them are not in the repeated batch; nothing more was written. The program "
                    "must repeat its batches with the same records"
                )
            words = "batch %d of producer %s has changed: %d of its stored records are no longer in it"
            logger.warn(words, state.batch, self.name, others)
        if rows.count != state.rows and changed == "raise":
            raise BatchChanged(
                f"[KVSPOOL_BATCH_CHANGED] {self._log.path}: batch {state.batch} of producer {self.name!r} had {state.rows} records, "
                f"of which {state.stored} are stored, and now it has {rows.count}; nothing more was written. The program must repeat its "
                "batches with the same records"
            )
        if gone:
            # Which ones they were is unknown; in the same order they were the first ones.
            logger.warn(
                "batch %d of producer %s: %d records that were appended before were overwritten since; as many are left out now",
                state.batch, self.name, gone,
            )  # fmt: skip
        return rows.chosen(left[gone:])

    def _stored(self, first: int, count: int) -> Iterator[Any]:
        """Yield those of `count` records from `first` on that are still stored."""
        begin, end = max(first, self._log.extent()[0]), first + count
        if begin < end:
            with closing(self._log.cursor(begin, bounded=True, end=end)) as cursor:
                yield from (one for one in Iteration(cursor, None, "skip") if first <= one.sequence < end)


def _table_of(log: ProducerLog) -> ProducerTable | None:
    """Return the producer table of a log, open for reading; None if there is none."""
    return ProducerTable.open(log.path, log.log_id, to_read=True)


def _all_of(state: ProducerState) -> Stored:
    """Return the result for a batch that is stored in full."""
    return Stored(state.runs[0][0] if state.pieces else None, state.rows, True)


class BatchTransaction:
    """One attempt to append a batch: its entry in the producer table meanwhile.

    `stored`: the result. None: the batch has to be checked again, since another process was faster, or only the records `appended` are
    stored, and the producer table says so.
    """

    def __init__(self, id: bytes, seen: ProducerState | None, state: ProducerState, count: int, durable: bool) -> None:
        """seen: the state on which it relies. state: the same, including the stored records of this batch. count: records still to
        append.
        """
        self._id = id
        self._seen = seen
        self._state = state
        self._count = count
        self._is_durable = durable
        self.stored: Stored | None = None
        self.appended = range(0)

    @contextmanager
    def kept(self, first: int, location: TableLocation) -> Iterator[bool]:
        """Under the append lock: store the state for records from sequence `first` on, which are published inside the `with` block.

        It gets False if nothing may be appended. A crash of the process inside the block and an exception have the same effect: the next
        owner of the lock finds the word `pending`, and resolves the state.
        """
        with ProducerTable.make(location.directory, location.log_id, location.mode) as table:
            found = table.find(self._id)
            if (None if found is None else found[1]) != self._seen:
                yield False
                return
            runs = self._state.runs
            if self._count:
                is_next = bool(runs) and sum(runs[-1]) == first
                runs = [*runs[:-1], (runs[-1][0], runs[-1][1] + self._count)] if is_next else [*runs, (first, self._count)]
            state = self._state.with_runs(runs)
            state = state._replace(rows=state.stored, phase=UNDER_WAY, is_durable=int(self._is_durable))
            number = table.claim() if found is None else found[0]
            location.set_pending(number + 1)
            table.store(number, state)
            if self._is_durable:
                table.flush()
            yield True
            table.store(number, state._replace(phase=AT_REST, done=state.batch + 1))
            location.set_pending(0)
            self.stored = Stored(runs[0][0] if runs else None, state.rows, False)


class ListedRows:
    """Encoded records: a prepared batch of a spool or a journal."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.count = batch.rows

    def records(self) -> list[tuple[bytes | None, bytes, int, int]]:
        batch = self.batch
        keys = batch.keys or [None] * self.count
        codecs = bytes([batch.codec]) * self.count if batch.codecs is None else batch.codecs
        return [(key, value, batch.type, codec) for key, value, codec in zip(keys, batch.values, codecs, strict=True)]

    def chosen(self, numbers: list[int]) -> ListedRows:
        keys, values, codecs = self.batch.keys, self.batch.values, self.batch.codecs
        return ListedRows(
            self.batch._replace(
                keys=None if keys is None else [keys[number] for number in numbers],
                values=[values[number] for number in numbers],
                codecs=None if codecs is None else bytes(codecs[number] for number in numbers),
            )
        )


class ColumnPieces:
    """Rows of record batches, for a log that takes columns. A spool uses `put` and `end`: see `kvspool.spool.appending.RingBatch`."""

    packed = None  # no value refers to the log's key table

    def __init__(self, pieces: Pieces, codec: int) -> None:
        self.pieces = pieces
        self.codec = codec
        self.count = self.rows = sum(part.rows if rows is None else len(rows) for part, rows in pieces)

    def put(self, writer: FrameWriter) -> None:
        for part, rows in self.pieces:
            part.put(writer, rows, self.codec)

    def end(self, writer: FrameWriter) -> int:
        position: int = writer.end
        for part, rows in self.pieces:
            position = part.end(writer, position, rows)
        return position

    def since(self, number: int) -> ColumnPieces:
        return self.chosen(list(range(number, self.count)))

    def records(self) -> list[tuple[bytes | None, bytes, int, int]]:
        return [record for part, rows in self.pieces for record in part.records(rows, self.codec)]

    def chosen(self, numbers: list[int]) -> ColumnPieces:
        pieces: Pieces = []
        at = before = 0
        for part, rows in self.pieces:
            count = part.rows if rows is None else len(rows)
            taken = array("i")
            while at < len(numbers) and numbers[at] < before + count:
                number = numbers[at] - before
                taken.append(number if rows is None else rows[number])
                at += 1
            before += count
            if taken:
                pieces.append((part, memoryview(taken)))
        return ColumnPieces(pieces, self.codec)


def producer_id(name: str) -> bytes:
    """Return the 16 bytes by which a state is found."""
    from hashlib import blake2b

    return blake2b(name.encode(), digest_size=16).digest()


def listing(log: ProducerLog) -> list[ProducerStats]:
    """Return the statistics of a log's producers, by name."""
    table = _table_of(log)
    if table is None:
        return []
    with table:
        found = [state for _, state in table.states()]
    stats = [ProducerStats(one.shown, one.batch, one.rows, _known(one), one.done - 1 if one.done else None, one.updated) for one in found]
    return sorted(stats, key=lambda one: one.name)


def _known(state: ProducerState) -> int:
    """Return how many records of a batch are certainly stored."""
    return state.stored if state.phase == AT_REST else sum(count for _, count in state.runs[:-1])


def forget(log: ProducerLog, names: Iterable[str], timeout: float | None = None) -> int:
    """Delete a log's states of producers, and return how many it knew. Raises LockTimeout, or the system's OSError."""
    table = _table_of(log)
    if table is None:
        return 0
    table.close()

    def change(location: TableLocation, _: int) -> int:
        known = 0
        with ProducerTable.make(location.directory, location.log_id, location.mode) as table:
            for name in names:
                found = table.find(producer_id(name))
                if found is not None:
                    table.store(found[0], found[1]._replace(phase=FREE))
                    known += 1
        return known

    return log.change_producers(change, timeout)


def retire(log: ProducerLog, prefix: str, timeout: float | None = None) -> int:
    """Declare that the producers whose names begin with `prefix`, of at most 44 bytes, append nothing more. Their states may be reused
    after an hour, or when there is no other room. Returns their number. Raises LockTimeout, or the system's OSError.
    """
    start = prefix.encode()
    table = _table_of(log)
    if table is None:
        return 0
    with table:
        if next(table.named(start), None) is None:
            return 0  # don't wait for a lock that isn't needed

    def change(location: TableLocation, _: int) -> int:
        with ProducerTable.make(location.directory, location.log_id, location.mode) as table:
            found = list(table.named(start))
            for number, state in found:
                table.store(number, state._replace(is_over=1))
        return len(found)

    return log.change_producers(change, timeout)
