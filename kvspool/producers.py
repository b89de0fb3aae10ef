"""Producers: who appends numbered batches, and may append each as often as it likes, since every record of it is stored once.

    producer = log.producer("orders/3")
    producer.append_many(values, keys=keys, batch=7)    # Stored(first=1200, records=500, repeated=False)
    producer.append_many(values, keys=keys, batch=7)    # the same, repeated=True: nothing was appended

A producer is a name. The log remembers for each one the last batch, and how much of it is there, in its file `producers`; see `ledger`.
Whoever makes the batches keeps what they are made of until the log has them, and after a crash makes the last one again: from the offsets
of its source, say. The numbers go up; what lies between two doesn't matter.

**What a kill leaves.** A process that dies in the midst of a batch has appended the first k of its records. Whoever appends next to the
log notes k, before anything else. When the batch comes again, these k are read back, and the others are appended: in whatever order they
come. Records count as the same if key, value, type and codec are; times don't matter.

**What the batch must be.** The same records each time. If one that is stored is not among them: BatchChanged; see `changed`.

**Durability.** As that of the appends. `durable=True`, or a log of the level "disk": the promise holds over the death of the machine; the
account is flushed before the records are published, while the append lock is held. Otherwise a crash of the machine may take records of the
last batch, as of every append. Then they are not taken to be there, and come with the batch when it is appended again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from kvspool import system
from kvspool.engine.ledger import AT_REST, FREE, UNDER_WAY, Account, Ledger, before, new_account
from kvspool.errors import AGAIN, BatchChanged, BatchOutOfOrder, LockTimeout, SpoolFull, say_what_is_stored
from kvspool.record import Codec
from kvspool.system import logger
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    import pyarrow

    from kvspool.engine.columns import Columns
    from kvspool.kernel.frames import FrameWriter

LARGEST_NAME = 1024  # bytes
MOST_BATCH = (1 << 63) - 1
Changed = Literal["raise", "append"]
Pieces = list[tuple["Columns", "memoryview | None"]]  # record batches, and the numbers (int32) of the rows that are meant; None: all


class Stored(NamedTuple):
    """What `append_many` and `append_arrow` of a producer return. first: sequence of the first record, None if it isn't known any more, or
    there is none. records: of the batch. repeated: whether all were there already, so that nothing was appended."""

    first: int | None
    records: int
    repeated: bool


class ProducerStats(msgspec.Struct, frozen=True):
    """What a log remembers of a producer. name: the beginning of it. batch: the last one that was begun, of `rows` records; `stored` of
    them are there at least. last: the last batch that is there in full, None if none is known to be. updated: ns since the Unix epoch."""

    name: str
    batch: int
    rows: int
    stored: int
    last: int | None
    updated: int


class Place(Protocol):
    """The end of a log, for who holds its append lock: where a ledger lies, and the word `pending`."""

    @property
    def directory(self) -> Path: ...

    @property
    def log_id(self) -> bytes: ...

    @property
    def mode(self) -> int:
        """Return the permission bits of a ledger that is made there."""

    def set_pending(self, number: int) -> None:
        """Store the word: number + 1 of an account, or 0."""


class Rows(Protocol):
    """Records to be appended, of whatever kind the log takes."""

    count: int

    def records(self) -> list[tuple[bytes | None, bytes, int, int]]:
        """Return key, value, type and codec of each, as they would be stored."""

    def chosen(self, numbers: list[int]) -> Rows:
        """Return some of them, in order."""


class ProducerLog(Protocol):
    """What a producer needs of a log."""

    path: Path
    timeout: float  # seconds, where a caller gives none

    @property
    def is_durable(self) -> bool:
        """Return whether every append is to be on disk when it returns."""

    def sync(self, timeout: float | None) -> None:
        """Put all that was appended on disk."""

    def prepared_rows(self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None, type: int, timestamp: int | None) -> Rows: ...

    def column_rows(self, pieces: Pieces, codec: int) -> Rows: ...

    def append_booked(self, rows: Rows, booking: Booking, timeout: float | None, durable: bool) -> None:
        """Append rows under one hold of the append lock, inside `booking.kept`."""

    def change(self, change: Callable[[Place, int], int], timeout: float | None = None) -> int:
        """Return what `change` returns, which gets the log's end and its next sequence under the append lock: what a killed process has
        left is settled by then."""

    def ledger(self) -> Ledger | None:
        """Return the open ledger, to be read."""

    def columns(self, batch: Any, codec: int) -> Columns:
        """Lay a record batch out for this log."""

    def stored_records(self, first: int, count: int) -> Iterator[Any]:
        """Yield those of `count` records from `first` on that are still there."""


class Producer(Handle):
    """One producer of a log; get it from `log.producer(name)`. As many processes as like may have the same one: a batch is stored once."""

    def __init__(self, log: ProducerLog, name: str) -> None:
        """Raises ValueError for a name that is none."""
        if not 0 < len(name.encode()) <= LARGEST_NAME:
            raise ValueError(f"the name of a producer has 1 to {LARGEST_NAME} bytes of UTF-8")
        self.name = name
        self.keep = 0  # hours, up to 65535, for which a new account is kept behind its last batch, where room is short; 0: seven days
        self._log = log
        self._id = producer_id(name)
        self._hint = -1

    @property
    def next(self) -> int:
        """Return the number of the batch to go on with: the last one that was begun if it isn't there in full, else the one behind it; 0
        for a new producer. Raises what `last` does."""
        account = self._look(None)
        return 0 if account is None else account.batch + int(account.is_done)

    @property
    def last(self) -> int | None:
        """Return the number of the last batch that is there in full; None if there is none, or a crash of the machine took some of it.

        Raises the system's OSError, Corruption, Closed; LockTimeout where a batch is under way in another process.
        """
        account = self._look(None)
        return None if account is None or not account.done else account.done - 1

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
        """Append the records of a batch that are not there yet, under one lock; each is there once when this returns, however often it is
        called, and by whom.

        values, keys, type, timestamp, timeout, durable: as for the log's `append_many`. batch: 0..2**63-1; one that is not above the last
        one that is there in full is not looked at. A larger one may begin where an earlier one is not there in full: what is missing of
        that one is then up to the caller, and logged. changed: what becomes of a batch that has come before and is another one now:
        "raise" if it is there in part, or "append" all that isn't there yet, also to the last one that is there in full.

        Raises what `append_many` of the log does: what of the batch was appended before is accounted for, append it again. And
        BatchChanged, BatchOutOfOrder, TooManyPieces, TooManyProducers.
        """
        self._check(batch, changed)
        if (done := self._answer(self._look(timeout), batch, timeout, durable, changed)) is not None:
            return done
        return self._append(self._log.prepared_rows(values, keys, type, timestamp), batch, timeout, durable, changed)

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
        """As `append_many`, a record for each row; columns and `codec` as for the log's `append_arrow`."""
        from kvspool.engine import columns

        self._check(batch, changed)
        if (done := self._answer(self._look(timeout), batch, timeout, durable, changed)) is not None:
            return done
        parts = table if isinstance(table, list) else columns.parts(table)
        pieces: Pieces = [(self._log.columns(part, codec), None) for part in parts]
        return self._append(self._log.column_rows(pieces, codec), batch, timeout, durable, changed)

    def append_pieces(
        self, pieces: Pieces, *, batch: int, codec: int = Codec.RAW, timeout: float | None = None, durable: bool = False,
        changed: Changed = "raise",
    ) -> Stored:  # fmt: skip
        """As `append_arrow`, some rows of each of several batches, which are laid out already."""
        self._check(batch, changed)
        if (done := self._answer(self._look(timeout), batch, timeout, durable, changed)) is not None:
            return done
        return self._append(self._log.column_rows(pieces, codec), batch, timeout, durable, changed)

    def forget(self, timeout: float | None = None) -> None:
        """Let the log forget this producer; its records stay. Raises LockTimeout, the system's OSError."""
        forget(self._log, [self.name], timeout)

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} of {self._log.path}>"

    def _check(self, batch: int, changed: str) -> None:
        if not 0 <= batch <= MOST_BATCH:
            raise ValueError(f"the number of a batch is 0..2**63-1, not {batch}")
        if changed not in ("raise", "append"):
            raise ValueError(f'changed is "raise" or "append", not {changed!r}')

    def _look(self, timeout: float | None) -> Account | None:
        """Return our account, at rest: what a killed process has left is settled."""
        account = self._find()
        if account is None or account.state == AT_REST:
            return account
        self._log.change(self._settle_ours, timeout)
        return self._find()

    def _settle_ours(self, place: Place, next_sequence: int) -> int:
        """Under the append lock: settle our account if nobody else has to: the word that named it is gone, with a lock file, say."""
        with Ledger.make(place.directory, place.log_id, place.mode) as ledger:
            found = ledger.find(self._id)
            if found is not None and found[1].state == UNDER_WAY:
                ledger.store(found[0], found[1].settled(before(next_sequence)), is_used=False)
        return 0

    def _find(self) -> Account | None:
        ledger = self._log.ledger()
        if ledger is None:
            return None
        with ledger:
            found = ledger.find(self._id, self._hint)
        self._hint = -1 if found is None else found[0]
        return None if found is None else found[1]

    def _answer(self, account: Account | None, batch: int, timeout: float | None, durable: bool, changed: Changed) -> Stored | None:
        """Return what there is to say of a batch of which nothing is to be appended, whatever its rows are; None otherwise."""
        done = self._there(account, batch, changed)
        return None if done is None else self._repeated(done, timeout, durable)

    def _repeated(self, done: Stored, timeout: float | None, durable: bool) -> Stored:
        """Return `done`. Who appended it may have died before it was on disk, so a durable one is flushed."""
        if durable or self._log.is_durable:
            self._log.sync(timeout)
        return done

    def _there(self, account: Account | None, batch: int, changed: Changed) -> Stored | None:
        if account is None or batch > account.batch:
            return None
        if batch == account.batch and account.is_done:
            return _all_of(account) if changed == "raise" else None
        if batch < account.done:
            return Stored(None, 0, True)
        if batch < account.batch:
            raise BatchOutOfOrder(
                f"{self._log.path}: producer {self.name!r} has begun batch {account.batch}; batch {batch} is not known to be there in full"
            )
        return None

    def _append(self, rows: Rows, batch: int, timeout: float | None, durable: bool, changed: Changed) -> Stored:
        deadline = system.port.monotonic() + (self._log.timeout if timeout is None else timeout)
        appended = range(0)
        while True:
            seen = self._look(timeout)
            if (done := self._answer(seen, batch, timeout, durable, changed)) is not None:
                return done  # another process was quicker
            account = seen or new_account(self._id, self.name, self.keep)
            left = rows
            if batch == account.batch and seen is not None and account.stored:
                left = self._left(rows, account, changed)
                if account.is_done and not left.count:
                    return self._repeated(_all_of(account), timeout, durable)
            else:
                if seen is not None and not seen.is_done and seen.pieces:
                    logger.warn(
                        "producer %s begins batch %d; of batch %d %d records were appended, of %d",
                        self.name, batch, seen.batch, seen.stored, seen.rows,
                    )  # fmt: skip
                account = account.with_runs([])._replace(batch=batch)
            booking = Booking(self._id, seen, account, left.count, durable)
            try:
                self._log.append_booked(left, booking, timeout, durable)
            except (SpoolFull, LockTimeout) as error:
                if not appended:
                    raise
                say_what_is_stored(error, appended, rows.count, AGAIN)
                raise
            if booking.stored is not None:
                return booking.stored
            appended = booking.appended or appended
            timeout = max(0.0, deadline - system.port.monotonic())

    def _left(self, rows: Rows, account: Account, changed: Changed) -> Rows:
        """Return the rows of a batch that are not there yet, of one that is there in part, or as it was."""
        there: Counter[Any] = Counter()
        for first, count in account.runs:
            there.update((one.key, one.value, one.type, one.codec) for one in self._log.stored_records(first, count))
        gone = account.stored - there.total()
        left = []
        for number, row in enumerate(rows.records()):
            if there[row]:
                there[row] -= 1
            else:
                left.append(number)
        if others := there.total():
            if changed == "raise":
                raise BatchChanged(
                    f"[KVSPOOL_BATCH_CHANGED] {self._log.path}: {account.stored} records of batch {account.batch} of producer "
                    f"{self.name!r} are there, and {others} of them are not in the batch as it comes now; nothing more was written. What "
                    "makes the batches must make the same ones again"
                )
            words = "batch %d of producer %s has changed: %d records of it stay that are not in it any more"
            logger.warn(words, account.batch, self.name, others)
        if rows.count != account.rows and changed == "raise":
            raise BatchChanged(
                f"[KVSPOOL_BATCH_CHANGED] {self._log.path}: batch {account.batch} of producer {self.name!r} had {account.rows} records, "
                f"of which {account.stored} are there, and now it has {rows.count}; nothing more was written. What makes the batches "
                "must make the same ones again"
            )
        if gone:
            # Nobody can say which ones they were; in the same order they were the first ones.
            logger.warn(
                "batch %d of producer %s: %d records that were appended before were overwritten since; as many are left out now",
                account.batch, self.name, gone,
            )  # fmt: skip
        return rows.chosen(left[gone:])


def _all_of(account: Account) -> Stored:
    """Return what is said of a batch that is there in full."""
    return Stored(account.runs[0][0] if account.pieces else None, account.rows, True)


class Booking:
    """One attempt to append a batch: what stands in the ledger while it is under way. `stored`: what came of it; None: the batch has to be
    looked at again, since another process was quicker, or only the records `appended` are stored, and accounted for."""

    def __init__(self, id: bytes, seen: Account | None, account: Account, count: int, durable: bool) -> None:
        """seen: the account that it relies on. account: the same, with what is there of this batch. count: records that are still to be
        appended."""
        self._id = id
        self._seen = seen
        self._account = account
        self._count = count
        self.is_durable = durable
        self.stored: Stored | None = None
        self.appended = range(0)

    @contextmanager
    def kept(self, first: int, place: Place) -> Iterator[bool]:
        """Under the append lock: account for records from sequence `first` on, which are published inside the `with` block.

        It gets False if nothing may be appended. What happens if the process dies inside, or an exception leaves it, is the same: the
        next one who takes the lock finds the word `pending`, and settles.
        """
        with Ledger.make(place.directory, place.log_id, place.mode) as ledger:
            found = ledger.find(self._id)
            if (None if found is None else found[1]) != self._seen:
                yield False
                return
            runs = self._account.runs
            if self._count:
                is_next = bool(runs) and sum(runs[-1]) == first
                runs = [*runs[:-1], (runs[-1][0], runs[-1][1] + self._count)] if is_next else [*runs, (first, self._count)]
            account = self._account.with_runs(runs)
            account = account._replace(rows=account.stored, state=UNDER_WAY, is_durable=int(self.is_durable))
            number = ledger.claim() if found is None else found[0]
            place.set_pending(number + 1)
            ledger.store(number, account)
            if self.is_durable:
                ledger.flush()
            yield True
            ledger.store(number, account._replace(state=AT_REST, done=account.batch + 1))
            place.set_pending(0)
            self.stored = Stored(runs[0][0] if runs else None, account.rows, False)


class ColumnPieces:
    """Rows of record batches, for a log that takes columns. `put` and `end` are for a spool: see `kvspool.spool.appending.Batch`."""

    packed = None  # no value names keys of the log's table

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
    """Return the 16 bytes by which an account is found."""
    from hashlib import blake2b

    return blake2b(name.encode(), digest_size=16).digest()


def listing(log: ProducerLog) -> list[ProducerStats]:
    """Return what the log remembers of its producers, by name."""
    ledger = log.ledger()
    if ledger is None:
        return []
    with ledger:
        found = [account for _, account in ledger.accounts()]
    stats = [ProducerStats(one.shown, one.batch, one.rows, _known(one), one.done - 1 if one.done else None, one.updated) for one in found]
    return sorted(stats, key=lambda one: one.name)


def _known(account: Account) -> int:
    """Return how many records of a batch are there for sure."""
    return account.stored if account.state == AT_REST else sum(count for _, count in account.runs[:-1])


def forget(log: ProducerLog, names: Iterable[str], timeout: float | None = None) -> int:
    """Let a log forget producers; returns how many it knew. Raises LockTimeout, or the system's OSError."""
    ledger = log.ledger()
    if ledger is None:
        return 0
    ledger.close()

    def change(place: Place, _: int) -> int:
        known = 0
        with Ledger.make(place.directory, place.log_id, place.mode) as ledger:
            for name in names:
                found = ledger.find(producer_id(name))
                if found is not None:
                    ledger.store(found[0], found[1]._replace(state=FREE))
                    known += 1
        return known

    return log.change(change, timeout)


def retire(log: ProducerLog, prefix: str, timeout: float | None = None) -> int:
    """Let a log know that the producers whose names begin with `prefix`, of at most 44 bytes, append nothing more: other ones may have
    their accounts, an hour later, or where there is no other room. Returns how many they are. Raises LockTimeout, or the system's OSError.
    """
    start = prefix.encode()
    ledger = log.ledger()
    if ledger is None:
        return 0
    with ledger:
        if next(ledger.named(start), None) is None:
            return 0  # nobody waits for a lock that isn't needed

    def change(place: Place, _: int) -> int:
        with Ledger.make(place.directory, place.log_id, place.mode) as ledger:
            found = list(ledger.named(start))
            for number, account in found:
                ledger.store(number, account._replace(is_over=1))
        return len(found)

    return log.change(change, timeout)
