"""Records as Arrow columns, without a Python object for a row: batches, and tables of them. Needs the extra `arrow`.

The frame loops copy directly from the ring or the segments to the buffers of Arrow arrays, with all checks of checksums and overruns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from kvspool.engine.cursor import Cursor
from kvspool.engine.iteration import keeping
from kvspool.engine.pool import Pool
from kvspool.errors import GapError, MissingExtra
from kvspool.gap import Gap
from kvspool.options import OnGap

try:
    import pyarrow as pa

    from kvspool.engine.columns import CODED_SCHEMA, SCHEMA, items_of
except ModuleNotFoundError as error:
    raise MissingExtra.of("arrow", "Arrow columns need the package pyarrow", error) from error

BATCH = 32_768  # records of a batch: enough to hide its fixed costs, few enough for the caches
WINDOW = 16 << 20  # bytes of keys, and of values, in a batch
LARGE = 8 << 20  # remaining bytes of the ring from which on larger batches use lent memory, and a table has large ones
LARGE_BATCH = 1 << 17  # records of a large one


def read(cursor: Cursor, limit: int | None, on_gap: OnGap) -> pa.Table:
    """Read the bounded cursor, up to `limit` records; see `Log.read_arrow`."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of records, not {limit}")
    return table(batches(cursor, limit, LARGE_BATCH), SCHEMA, on_gap)


def table(items: Iterable[pa.RecordBatch | Gap], schema: pa.Schema, on_gap: OnGap) -> pa.Table:
    """Return the batches as one table. on_gap: "skip" leaves Gaps out, "raise" raises GapError at the first one.

    An error that ends `items`, and a GapError, have the table of all records before it as `partial`.
    """
    if on_gap not in ("raise", "skip"):
        raise ValueError(f'on_gap is "raise" or "skip" here, not {on_gap!r}: a table cannot hold a Gap')
    got: list[pa.RecordBatch] = []
    with keeping(lambda: pa.Table.from_batches(got, schema=schema)):
        for item in items:
            if not isinstance(item, Gap):
                got.append(item)
            elif on_gap == "raise":
                raise GapError(item)
    return pa.Table.from_batches(got, schema=schema)


def batches(
    cursor: Cursor, limit: int | None = None, most: int = BATCH, *, coded: bool = False, bytes: int = WINDOW
) -> Iterator[pa.RecordBatch | Gap]:
    """Yield the records of the cursor that are present now, as batches of up to `most` records, and Gaps between them; see `next_batch`."""
    left = limit
    while left is None or left > 0:
        batch = next_batch(cursor, most if left is None else min(most, left), coded=coded, bytes=bytes)
        if isinstance(batch, Gap):
            yield batch
            continue
        if batch.num_rows == 0:
            return
        yield batch
        if left is not None:
            left -= batch.num_rows


def next_batch(cursor: Cursor, most: int = BATCH, *, coded: bool = False, bytes: int = WINDOW) -> pa.RecordBatch | Gap:
    """Return up to `most` records without blocking; or a Gap; or an empty batch if there is none.

    coded: with `CODED_SCHEMA`. bytes: most bytes of all values, and of all keys; a larger record is a batch of its own. A batch may have
    fewer records than possible: it never continues over a Gap or, in a journal, into the next segment.

    Raises the errors of reading the log; Undecodable for a keyed value, if it is `coded`; OutOfRange for sequences from 2^63 on, which
    don't fit into the column. Records before an error are returned first, and the next call raises it. The call after an Undecodable
    continues with the next record.
    """
    if bytes < 1:
        raise ValueError(f"a batch has at least 1 byte, not {bytes}")
    found: pa.RecordBatch | Gap = cursor.next_batch(most, coded, bytes)
    return found


class ColumnBuffers:
    """Buffers into which a batch is gathered. count: rows in them."""

    def __init__(self, most: int, room: int, allocate: Callable[[int], pa.Buffer], coded: bool) -> None:
        self.count = 0
        self.coded = coded
        self.make_room(most, room, allocate)

    def make_room(self, most: int, room: int, allocate: Callable[[int], pa.Buffer]) -> None:
        """Replace the buffers: for `most` rows, with `room` bytes of keys and of values."""
        self.most = most
        self._key_bits = pa.py_buffer(bytearray(most // 8 + 1))
        # One allocation for all: its unused part is never touched, and costs nothing.
        sizes = [8 * most, 8 * most, 4 * most, 4 * (most + 2), 4 * (most + 2), room, room, most if self.coded else 0]
        memory = allocate(sum(sizes))
        places = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        view = items_of(memory, "B")
        self._views = [view[place].cast(code) for place, code in zip(places, "qqiiiBBB", strict=True)]  # type: ignore[call-overload]
        self._columns = [memory.slice(place.start, place.stop - place.start) for place in places]
        self._views[3][0] = self._views[4][0] = 0  # the start of the first key and the first value

    def __len__(self) -> int:
        return self.count

    @property
    def views(self) -> tuple[memoryview | None, ...]:
        """Return the buffers in the order in which the loops take them."""
        sequences, timestamps, types, key_offsets, value_offsets, values, keys, codecs = self._views
        key_bits = items_of(self._key_bits, "B")
        return sequences, timestamps, types, key_offsets, keys, key_bits, value_offsets, values, codecs if self.coded else None

    def finish(self) -> pa.RecordBatch:
        """Return the batch; it shares the buffers."""
        count = self.count
        sequences, timestamps, types, key_offsets, value_offsets, values, keys, codecs = self._columns
        arrays = [
            pa.Array.from_buffers(pa.int64(), count, [None, sequences]),
            pa.Array.from_buffers(pa.timestamp("ns", "UTC"), count, [None, timestamps]),
            pa.Array.from_buffers(pa.int32(), count, [None, types]),
            pa.Array.from_buffers(pa.binary(), count, [self._key_bits, key_offsets, keys]),
            pa.Array.from_buffers(pa.binary(), count, [None, value_offsets, values]),
        ]
        if self.coded:
            arrays.append(pa.Array.from_buffers(pa.uint8(), count, [None, codecs]))
        return pa.RecordBatch.from_arrays(arrays, schema=CODED_SCHEMA if self.coded else SCHEMA)


_pools = [Pool(6 << 20, spare=16), Pool(36 << 20, spare=64)]
"""Memory for the batches of large reads: of 2 MiB of values, and any. Values of 100 bytes fill half of a large piece with a large
batch; the spare ones have room for the records of a ring of 1 GiB."""


def lent(size: int) -> pa.Buffer:
    """Return a buffer of reused memory, or of memory that the kernel clears in large pages; any other if neither is available.

    Only the buffer holds the view that was lent. Arrow's own pool reuses memory, too, but only with some of its allocators. Raises
    MemoryError.
    """
    pool = next((pool for pool in _pools if size <= pool.size), _pools[-1])
    try:
        return pa.py_buffer(pool.lend(size))
    except OSError:  # no address space for it, but perhaps Arrow's pool has memory
        return pa.allocate_buffer(size)
