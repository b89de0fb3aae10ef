"""kvspool's own journal format: each frame has a checksum and the codec of its value.

It is for records that are kept long, or gathered from other logs: damage is detected, and costs only the damaged record; sequences may be
left out, so that a copy keeps the numbers of its source. Numbers are big-endian, as in the other journals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from kvspool.engine.checksums import checksum
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, TooLarge, UnknownVersion
from kvspool.journal import format
from kvspool.journal.format import LAST_SEQUENCE, LAST_TIME, AppendedColumns, AppendedRecords, Before, JournalBatch, Scan
from kvspool.journal.formats.arrangement import Nested
from kvspool.kernel import kvj, tail_py
from kvspool.kernel.kvj_py import HEAD as HEAD_BYTES
from kvspool.kernel.kvj_py import LARGEST, NO_KEY
from kvspool.kernel.kvj_py import LONGEST_KEY as LONGEST_KEY

SEGMENT_BYTES = 64 << 20
PIECE = 1 << 20  # bytes of frames encoded from columns at once: they are still in the cache when they are written


class KvjHeader(NamedTuple):
    """The beginning of a segment."""

    magic: Annotated[bytes, "7s", "kvjrnl and a zero byte"]
    version: Annotated[int, "B", "1"]
    base: Annotated[int, "Q", "sequence that the first record may have; the file's name says the same"]
    reserved: Annotated[int, "I", "0"]
    checksum: Annotated[int, "I", "CRC32C of what stands before it"]


class KvjHead(NamedTuple):
    """The head of a record, before its key; the value follows the key."""

    checksum: Annotated[int, "I", "CRC32C of the rest of the frame"]
    size: Annotated[int, "I", "bytes of the frame, these included"]
    sequence: Annotated[int, "Q", "number of the record; larger than the one before"]
    timestamp: Annotated[int, "q", "ns since the Unix epoch"]
    type: Annotated[int, "B", "the caller's number"]
    codec: Annotated[int, "B", "how the value is to be understood: `kvspool.Codec`"]
    key_size: Annotated[int, "H", "bytes of the key; 65535: no key"]


HEADER = Layout(KvjHeader, ">")
HEAD = Layout(KvjHead, ">")
MAGIC = b"kvjrnl\0"


class Kvj(Nested):
    """The kvj format; a new segment begins once one has reached `segment_bytes`."""

    name: ClassVar[str] = "kvj"
    number: ClassVar[int] = tail_py.KVJ
    suffix: ClassVar[str] = "kvj"
    has_keys = has_types = has_timestamps = has_codecs = has_checksums = has_archives = may_leave_out = has_columns = has_producers = True
    header_bytes = HEADER.size
    least_bytes = HEAD_BYTES

    def __init__(self, segment_bytes: int | str = SEGMENT_BYTES) -> None:
        super().__init__(segment_bytes)

    def lock_file(self, path: Path) -> Path:
        return path / "lock"

    def header(self, base: int) -> bytes:
        data = HEADER.pack(KvjHeader(MAGIC, 1, base, 0, 0))[:-4]
        return data + checksum(data).to_bytes(4, "big")

    def check_header(self, data: bytes, base: int) -> int:
        if len(data) < HEADER.size:
            return 0
        header = HEADER.unpack(data)
        if header.magic == MAGIC and header.version > 1:
            raise UnknownVersion(f"version {header.version} of the format kvj; this kvspool supports version 1. Upgrade, and open it again")
        if data[: HEADER.size] != self.header(base):
            raise Corruption(f"it does not begin with the header of a segment that starts at sequence {base}")
        return HEADER.size

    def check(self, batch: JournalBatch) -> None:
        longest = max(map(len, batch.values), default=0)
        self._check_sizes(longest, max((len(key) for key in batch.keys or () if key is not None), default=0))

    def check_columns(self, columns: AppendedColumns | AppendedRecords) -> None:
        self._check_sizes(columns.longest_value, columns.longest_key)

    def _check_sizes(self, longest: int, key: int) -> None:
        """Raise TooLarge for a longest value, or key, that doesn't fit into a frame."""
        if key > LONGEST_KEY:
            raise TooLarge(f"a key of {key} bytes: a kvj frame holds {LONGEST_KEY}; nothing was written")
        if HEAD_BYTES + longest + key > LARGEST:
            raise TooLarge(f"a value of {longest} bytes: a kvj frame holds {LARGEST - HEAD_BYTES} of key and value; nothing was written")

    def encode(self, batch: JournalBatch, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        values, keys, type, timestamp, types, timestamps, codec, codecs = batch
        time = place.now if timestamp is None else timestamp
        room = self._room(place.end)
        return kvj.encode(values, keys, types, timestamps, codecs, type, time, codec, start, place.sequence, room, place.last)

    def encode_columns(
        self, columns: AppendedColumns, rows: memoryview | None, start: int, place: Before
    ) -> tuple[bytes | bytearray, int, int]:
        count, room = columns.rows if rows is None else len(rows), min(PIECE, self._room(place.end))
        return kvj.encode_columns(rows, count, start, place.sequence, room, place.last, *columns.buffers(place.now))

    def encode_records(self, records: AppendedRecords, start: int, place: Before) -> tuple[memoryview, int, int]:
        room = min(PIECE, self._room(place.end))
        largest = HEAD_BYTES + records.longest_key + records.longest_value
        out = records.room(min(max(0, room) + largest, HEAD_BYTES * records.rows + records.size))
        size, count, last = kvj.encode_records(out, records.rows, start, place.sequence, room, place.last, *records.buffers)
        return memoryview(out)[:size], count, last

    def _room(self, end: int) -> int:
        """Return the bytes that still fit into a segment that ends at byte `end`; each segment takes at least a record."""
        return max(1, self.segment_bytes - end) if end <= HEADER.size else self.segment_bytes - end

    def scan(self, data: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> Scan:
        return Scan(*kvj.scan(data, sequence, most, make, items))

    def scanner(self) -> Callable[..., tuple[int, ...]]:
        return kvj.scan

    def gather(self, data: bytes, sequence: int, most: int, count: int, columns: tuple[Any, ...]) -> Scan:
        return Scan(*kvj.gather(data, sequence, most, count, *columns))

    def pass_over(self, data: bytes, sequence: int, until: int = LAST_SEQUENCE, timestamp: int = LAST_TIME) -> Scan:
        return Scan(*kvj.pass_over(data, sequence, until, timestamp))

    def head(self, data: bytes) -> format.FrameHead | None:
        if len(data) < HEAD.size:
            return None
        head = HEAD.unpack(data[: HEAD.size])
        key_size = 0 if head.key_size == NO_KEY else head.key_size
        is_possible = HEAD.size + key_size <= head.size <= LARGEST and head.sequence < LAST_SEQUENCE
        return format.FrameHead(head.sequence, head.timestamp, head.size) if is_possible else None

    def resume(self, data: bytes, sequence: int, until: int) -> tuple[int, int] | None:
        at = kvj.find(data, sequence + 1, until)
        return None if at < 0 else (at, kvj.sequence_at(data, at))
