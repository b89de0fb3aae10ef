"""Records between a log and the wire, as Arrow columns: sent, checked, compared and stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from hub.errors import HubFull, Malformed
from hub.protocol.ingest import BATCH_BYTES, LARGEST_BATCH, MOST_ROWS
from hub.protocol.reading import Ticket
from kvspool import arrow
from kvspool.errors import Corruption
from kvspool.journal.formats.kvj import LONGEST_KEY
from kvspool.record import NO_TIME, Gap

if TYPE_CHECKING:
    from kvspool.engine.cursor import Cursor
    from kvspool.journal import Journal

SCHEMA = arrow.RECORDS
"""The columns on the wire. A null key is no key; other columns have no nulls. The sequences are in the message of the batch."""

_DECOMPRESSION = re.compile(r"\b(zstd|lz4)\b", re.IGNORECASE)  # in Arrow's errors of these codecs


def schema_of(ticket: Ticket) -> pa.Schema:
    """Return the columns of a reader's ticket."""
    every = arrow.CODED_SCHEMA if ticket.coded else arrow.SCHEMA
    return every if ticket.columns is None else pa.schema([field for field in every if field.name in ticket.columns])


@dataclass(frozen=True, eq=False)
class SequencedBatch:
    """Consecutive records; `first` is the sequence of the first one."""

    first: int
    batch: pa.RecordBatch
    laid_out: arrow.Records | None = None  # the same records, if already checked

    @cached_property
    def size(self) -> int:
        """Return the bytes of the batch."""
        return int(self.batch.nbytes)

    @property
    def end(self) -> int:
        """Return the sequence after the last one."""
        return self.first + int(self.batch.num_rows)

    def part(self, begin: int, end: int) -> SequencedBatch:
        """Return the records with sequences from `begin` up to `end`, excluding it, without a copy."""
        return SequencedBatch(begin, self.batch.slice(begin - self.first, end - begin))

    def cut(self, size: int) -> tuple[SequencedBatch, SequencedBatch | None]:
        """Return the first records, up to `size` bytes but at least one, and the rest, if any."""
        some = self
        while some.batch.num_rows > 1 and some.size > size:
            some = self.part(self.first, some.end - some.batch.num_rows // 2)
        return (self, None) if some is self else (some, self.part(some.end, self.end))


def check(batch: pa.RecordBatch, largest: int = LARGEST_BATCH) -> arrow.Records:
    """Check a batch from outside. Raises Malformed; `largest`: bytes of one.

    After that its buffers agree with its offsets, so that compiled loops may read them. Return the records in the form for those loops.
    """
    if not batch.schema.equals(SCHEMA):
        raise Malformed(f"a batch must have the columns {SCHEMA.names}, not {str(batch.schema)[:500]!r}")
    if not 0 < batch.num_rows <= MOST_ROWS:
        raise Malformed(f"a batch must have 1 to {MOST_ROWS} records, not {batch.num_rows}")
    try:
        batch.validate()  # the lengths of the buffers, which `nbytes` uses; `Records` checks their content
        if batch.nbytes > largest:
            raise Malformed(f"a batch of {batch.nbytes} bytes; this hub accepts {largest}")
        records = arrow.Records(batch)
    except (pa.ArrowInvalid, ValueError) as error:
        raise Malformed(f"a batch whose columns contradict themselves: {error}") from None
    if records.longest_key > LONGEST_KEY:
        raise Malformed(f"column key has one of more than {LONGEST_KEY} bytes")
    return records


@contextmanager
def decoding() -> Iterator[None]:
    """Raise Malformed for data from outside that Arrow can't decode, HubFull for lack of memory.

    Arrow reports damaged compressed data as an OSError without a number. Other OSErrors, of a broken connection, are raised unchanged.
    """
    try:
        yield
    except MemoryError as error:  # a compressed batch declares its size itself
        raise HubFull(f"a batch needs more memory than is available for all: {str(error)[:200]}") from None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise Malformed(f"not an Arrow batch: {str(error)[:200]}") from None
    except OSError as error:
        if error.errno is not None or not _DECOMPRESSION.search(str(error)):
            raise
        raise Malformed(f"a compressed batch that is damaged: {str(error)[:200]}") from None


def append(journal: Journal, rows: SequencedBatch) -> None:
    """Append records with their sequences. Raises OutOfRange if the journal is beyond the first one, or the system's OSError."""
    with rows.laid_out or arrow.Records(rows.batch) as records:
        journal.append_records(records, rows.first)


def next_rows(cursor: Cursor, most: int, size: int = BATCH_BYTES) -> SequencedBatch | Gap | None:
    """Return the next available records, up to `most` and `size` bytes, or a Gap before them; None if there are none."""
    found = arrow.next_batch(cursor, most, coded=True, bytes=size)
    if isinstance(found, Gap):
        return found
    return SequencedBatch(found.column("sequence")[0].as_py(), found.select(SCHEMA.names)) if found.num_rows else None


def first_difference(journal: Journal, rows: SequencedBatch) -> int | None:
    """Return the sequence of the first record that differs in the journal, or is skipped there; None if they agree.

    Records that the journal has trimmed, or damaged ones, can't be compared, and count as equal.
    """
    begin = max(rows.first, journal.first())
    cursor = journal.cursor(begin, bounded=True, end=rows.end)
    try:
        while begin < rows.end:
            found = next_rows(cursor, rows.end - begin)
            if isinstance(found, Gap):
                if found.reason == "missing" and found.last >= begin:
                    return max(found.first, begin)
                begin = max(begin, found.last + 1)
            elif found is None:
                break
            else:
                end = min(found.end, rows.end)
                row = _difference(found.part(found.first, end).batch, rows.part(found.first, end).batch)
                if row is not None:
                    return found.first + row
                begin = end
    except Corruption:
        return None  # at the very end; records after it can still be appended
    finally:
        cursor.close()
    return None


def _difference(stored: pa.RecordBatch, sent: pa.RecordBatch) -> int | None:
    """Return the number of the first row that differs."""
    if stored.equals(sent):
        return None
    kept = _as_stored(sent, stored.column("timestamp").cast(pa.int64()).to_pylist())
    return next((row for row in range(stored.num_rows) if not stored.slice(row, 1).equals(kept.slice(row, 1))), None)


def _as_stored(sent: pa.RecordBatch, stored: list[int]) -> pa.RecordBatch:
    """Return the records with the times that a journal stores: each is at least the latest time before it.

    The journal may have later times before any of these records: records lost in a crash were sent again after later ones. So a later
    `stored` time is used.
    """
    times = sent.column("timestamp").cast(pa.int64()).to_pylist()
    latest = NO_TIME
    for row, time in enumerate(times):
        if time != NO_TIME:
            latest = max(time, stored[row], latest)
            times[row] = latest
    at = sent.schema.get_field_index("timestamp")
    return sent.set_column(at, sent.schema.field(at), pa.array(times, pa.int64()).cast(sent.schema.field(at).type))
