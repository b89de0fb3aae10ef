"""The interface of a journal's format to its bytes; everything else about a journal is the same for all formats.

A journal is a directory of segments. A segment is a file that begins with a header, which may be empty, and contains consecutive frames,
one for each record, without a gap in their sequences; its name gives the sequence of the first one. Bytes below the end of a file are never
rewritten. An incomplete frame does *not yet* exist.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from kvspool.journal import settings
from kvspool.log import unsupported
from kvspool.record import NO_TIME, Codec

if TYPE_CHECKING:
    from kvspool.engine.rows import Room
    from kvspool.journal.offsets import Offsets
    from kvspool.journal.segment import Segment

WHOLE, SHORT, DAMAGED, JUMPED = range(4)
"""Why a scan stopped: it has enough records, or the data ended between two frames; within a frame; at bytes that are no frame; at a frame
with another sequence than the next one."""

LAST_SEQUENCE = (1 << 64) - 1  # no record has it
LAST_TIME = (1 << 63) - 1  # ns
LARGEST_SEGMENT = (1 << 63) - 1  # bytes, the maximum of a file


class JournalRows(Protocol):
    """Records for an appender: lists of them, a `JournalBatch`; or columns, `journal.columns.ColumnRows` or `Records`."""

    @property
    def rows(self) -> int:
        """Return the number of records."""

    def encode(self, format: Format, start: int, place: Before) -> tuple[bytes | bytearray | memoryview, int, int]:
        """Return the result of `Format.encode` for the records from `start` on; valid until the next call."""


class AppendedColumns(Protocol):
    """Columns to append, as a format with columns encodes them: `journal.columns.JournalColumns`."""

    rows: int

    @property
    def longest_key(self) -> int: ...

    @property
    def longest_value(self) -> int: ...

    def buffers(self, now: int) -> tuple[Any, ...]: ...


class AppendedRecords(Protocol):
    """Columns whose buffers become frames: `journal.columns.Records`."""

    rows: int
    size: int
    longest_key: int
    longest_value: int
    buffers: tuple[Any, ...]

    def room(self, size: int) -> bytearray: ...


class Before(NamedTuple):
    """The state before the next encoded records, under the append lock.

    sequence: of the first of them; base, end: of their segment; now: the present time; last: the latest timestamp of the journal, NO_TIME
    if it has none.
    """

    sequence: int
    base: int
    end: int
    now: int
    last: int


class JournalBatch(NamedTuple):
    """Records to append: encoded values, and their keys, or None for none. `types`, `timestamps` and `codecs` have one for each value,
    instead of `type`, `timestamp` (None: that of the append) and `codec`, if they differ.
    """

    values: list[bytes]
    keys: list[bytes | None] | None = None
    type: int = 0
    timestamp: int | None = 0
    types: list[int] | None = None
    timestamps: list[int] | None = None
    codec: int = Codec.RAW
    codecs: bytes | None = None

    @property
    def rows(self) -> int:
        return len(self.values)

    def encode(self, format: Format, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        return format.encode(self, start, place)


def joined(batches: list[JournalBatch]) -> JournalBatch:
    """Join batches that have the same columns."""
    if len(batches) < 2:
        return batches[0] if batches else JournalBatch([])
    first, columns = batches[0], dict[str, Any]()
    for name in ("values", "keys", "types", "timestamps", "codecs"):
        if getattr(first, name) is not None:
            columns[name] = list(chain.from_iterable(getattr(batch, name) for batch in batches))
    if first.codecs is not None:
        columns["codecs"] = bytes(columns["codecs"])
    return first._replace(**columns)


class Scan(NamedTuple):
    """The result of a scan.

    size: bytes of the whole frames passed; sequence: of the next frame; stop: why it ended there. need: for SHORT, the size of the next
    frame, 0 if unknown; for JUMPED, the sequence found; see also `gather`. latest: of `pass_over`, the latest timestamp passed; NO_TIME if
    there was none.
    """

    size: int
    sequence: int
    stop: int
    need: int = 0
    latest: int = NO_TIME


class FrameHead(NamedTuple):
    """The fields of a frame's head for metadata. size: bytes of the whole frame."""

    sequence: int
    timestamp: int
    size: int


class Format(ABC):
    """An on-disk format, with the limits of one journal."""

    name: ClassVar[str]
    has_keys: ClassVar[bool] = False
    has_empty_keys: ClassVar[bool] = True  # for formats with keys: an empty key differs from none
    has_types: ClassVar[bool] = False
    has_timestamps: ClassVar[bool] = False
    has_codecs: ClassVar[bool] = False
    has_checksums: ClassVar[bool] = False
    has_other_names: ClassVar[bool] = False  # segments may have names other than those of `name_of`
    reads_zeros: ClassVar[bool] = False  # zeros read as frames: see `true_end`
    trims_consumed: bool = False  # segments that every durable reader has passed are removed automatically
    total_bytes: int = 0  # of all segments; beyond it the oldest are removed; 0: no limit
    can_be_renamed: ClassVar[bool] = False  # one directory contains all files of a journal
    has_archives: ClassVar[bool] = False  # sealed segments may be compressed: no other program reads them
    may_leave_out: ClassVar[bool] = False  # sequences between two frames: `pass_over` continues after them, `scan` returns JUMPED
    begins_anywhere: ClassVar[bool] = False  # a segment may begin at any sequence
    keeps_sequences: ClassVar[bool] = True  # a record that was read once keeps its sequence: there are no rewinds
    has_producers: ClassVar[bool] = False  # it may have a list of producers next to the segments; see `kvspool.producers`
    has_columns: ClassVar[bool] = False  # frames are converted from and to Arrow columns, without an object for a record
    header_bytes: int = 0
    ends_with_size: ClassVar[bool] = False  # a frame repeats its size at its end: see `size_of_last`
    number: ClassVar[int]  # its number in `tail_py`
    least_bytes: int = 1  # of a frame
    item_bytes: int = 0  # of each value, if all have one length
    full_at: int  # bytes of a segment; an append that doesn't reach it begins no new one
    most_bytes: int = (1 << 63) - 1  # of a segment; bytes after them are ignored

    @property
    def room(self) -> Room:
        """Return the fields that records can store."""
        from kvspool.engine.rows import Room

        return Room(
            keys=self.has_keys,
            empty_keys=self.has_keys and self.has_empty_keys,
            types=self.has_types,
            timestamps=self.has_timestamps,
            is_raised=self.has_timestamps,
            codecs=self.has_codecs,
        )

    @abstractmethod
    def limits(self) -> dict[str, int]:
        """Return the arguments of the constructor, by name; they are stored in the journal's settings."""

    @classmethod
    def limit_names(cls) -> tuple[str, ...]:
        """Return the names of the constructor's parameters."""
        code = cls.__init__.__code__
        return code.co_varnames[1 : code.co_argcount]

    @classmethod
    def needed_limits(cls) -> tuple[str, ...]:
        """Return the names of the parameters that have no default."""
        names, defaults = cls.limit_names(), cls.__init__.__defaults__ or ()
        return names[: len(names) - len(defaults)]

    @classmethod
    def chosen_limits(cls, stored: dict[str, int], given: dict[str, int]) -> dict[str, int]:
        """Return the constructor's arguments for a journal whose settings have the limits `stored`, opened with `given` ones."""
        return {**stored, **given}

    # Files.

    @classmethod
    @abstractmethod
    def lies_at(cls, path: Path, *, is_sure: bool) -> bool:
        """Return whether there is a journal of this format at a path. is_sure: the caller says so, and only contradictions count."""

    @abstractmethod
    def segments_in(self, path: Path) -> Path:
        """Return the directory of the segments."""

    @abstractmethod
    def lock_file(self, path: Path) -> Path:
        """Return the file whose locks the writers hold; see `control`."""

    @classmethod
    @abstractmethod
    def sidecar(cls, path: Path) -> Path:
        """Return the directory for kvspool's own files, where the program that owns the format doesn't read them."""

    def prepare(self, path: Path, *, is_new: bool = False) -> None:
        """Create the files that a writer needs next to the segments. is_new: ignore files of an earlier journal. Raises UnsafeFilesystem if
        writers could not see each other's locks.
        """
        return None

    @abstractmethod
    def name_of(self, base: int) -> str | None:
        """Return the name of the segment whose first record has the sequence `base`; None if no segment begins there."""

    @abstractmethod
    def base_of(self, name: str) -> int | None:
        """Return the sequence of the first record of the segment with this name; None if it isn't a segment's."""

    @abstractmethod
    def offsets(self, path: Path, mode: int) -> Offsets:
        """Return the storage of the durable readers' positions; new files get the permission bits `mode`."""

    def first(self, path: Path) -> int:
        """Return the sequence of the first record of a journal without any segment. Raises Corruption for damaged settings."""
        found = settings.load(self.sidecar(path))
        return 0 if found is None or found.format != self.name else found.first_sequence

    # Bytes.

    def header(self, base: int) -> bytes:
        """Return the first bytes of a new segment."""
        return b""

    def check_header(self, data: bytes, base: int) -> int:
        """Return the size of the header at the start of `data`; 0 if it is incomplete. Raises Corruption for another one."""
        return 0

    def begin_of(self, segment: Segment) -> int:
        """Return the byte of a segment where its first frame begins; 0 if its header is incomplete. Raises Corruption."""
        if not self.header_bytes:
            return 0
        data, header = segment.read(0, self.header_bytes + 1), self.header(segment.base)
        if len(data) <= self.header_bytes and data != header and header.startswith(data.rstrip(b"\0")):
            return 0  # a crash of the machine may leave the length without the bytes
        return self.check_header(data[: self.header_bytes], segment.base)

    @abstractmethod
    def check(self, batch: JournalBatch) -> None:
        """Raise TooLarge, or ValueError for fields that a record of this format can't store."""

    @abstractmethod
    def encode(self, batch: JournalBatch, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        """Return the frames of the records from `start` on that go into the segment at `place`, their number, and the latest timestamp of
        the journal with them.

        A timestamp earlier than the one before it is raised to that. NO_TIME stays. No record: the next one begins a new segment.
        """

    def check_columns(self, columns: AppendedColumns | AppendedRecords) -> None:
        """Do as `check`, for a format with columns."""
        raise NotImplementedError

    def encode_columns(
        self, columns: AppendedColumns, rows: memoryview | None, start: int, place: Before
    ) -> tuple[bytes | bytearray, int, int]:
        """Do as `encode`, for a format with columns; rows: int32 numbers of the selected rows, None for all."""
        raise NotImplementedError

    def encode_records(self, records: AppendedRecords, start: int, place: Before) -> tuple[memoryview, int, int]:
        """Do as `encode`, for a format with columns, into the records' own buffer."""
        raise NotImplementedError

    def gather(self, data: bytes, sequence: int, most: int, count: int, columns: tuple[Any, ...]) -> Scan:
        """Do as `scan`, for a format with columns: into columns that contain `count` rows, until they have `most`. For a record that
        doesn't fit the result is WHOLE, with its size as `need`.
        """
        raise NotImplementedError

    def is_full(self, base: int, end: int, sequence: int) -> bool:
        """Return whether a new segment follows at once after one that ends at byte `end`, before `sequence`."""
        return False

    @abstractmethod
    def scan(self, data: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> Scan:
        """Append to `items` up to `most` records of the frames in `data`, the first of which has this sequence.

        make: called with sequence, timestamp, type, key, value and, if the format stores it, codec; None: only the values.
        """

    def scanner(self) -> Callable[..., tuple[int, ...]]:
        """Return the function that a follower calls instead of `scan`: it may return a plain tuple, which begins with the size and the
        sequence.
        """
        return self.scan

    @abstractmethod
    def pass_over(self, data: bytes, sequence: int, until: int = LAST_SEQUENCE, timestamp: int = LAST_TIME) -> Scan:
        """Check frames without returning records, up to the one with the sequence `until`, or the first one later than `timestamp`."""

    def head(self, data: bytes) -> FrameHead | None:
        """Return the head of the frame at the start of `data`, or None if there is none. The checksum is not compared."""
        return None

    def place_in(self, base: int, sequence: int) -> int | None:
        """Return the byte of a segment where the frame of a sequence begins, if that is known without reading."""
        return None

    def after_damage(self, position: int, sequence: int) -> tuple[int, int] | None:
        """Return where a damaged frame ends and which sequence follows, if that is known; else the rest of the segment is lost."""
        return None

    def resume(self, data: bytes, sequence: int, until: int) -> tuple[int, int] | None:
        """In bytes that begin with a damaged frame: return where the next sound one begins, and its sequence, above `sequence` and below
        `until`.
        """
        return None

    def guess(self, data: bytes, sequence: int, until: int) -> tuple[int, int] | None:
        """Do as `resume`, on an operator's request: in a format without checksums, return where the next frame seems to begin, according to
        sizes.
        """
        return self.resume(data, sequence, until)

    def after_jump(self, data: bytes, sequence: int, found: int) -> tuple[int, int] | None:
        """At a whole frame with the sequence `found` instead of the next one: return how many bytes to skip, and which sequence follows.

        By default frames are missing there, if it is a later one. None: the rest of the segment is lost.
        """
        return (0, found) if found > sequence else None

    def knows(self, name: str) -> bool:
        """Return whether a file next to the segments belongs to the format."""
        return False

    def size_of_last(self, tail: bytes) -> int:
        """Return the size of the frame that ends at the end of `tail`, the last bytes of a segment; 0 if the frame doesn't contain it."""
        return 0

    def end_in(self, segment: Segment, begin: int, size: int) -> tuple[int, int] | None:
        """Return the byte after the last frame of a segment of `size` bytes, not before `begin`, and the next sequence; None if all frames
        have to be passed.
        """
        return None

    def finish(self, path: Path, mode: int) -> None:
        """Under the append lock of the journal at a path, before its end is determined: finish operations of a dead writer, except appends.

        Raises Corruption if writers can't have left the segments like this, so that nothing is appended to them.
        """
        return None

    def true_end(self, segment: Segment, begin: int, found: Scan, synced: int) -> Scan:
        """Return the true end of a segment after a crash of the machine, which may have left bytes that only look like frames.

        found: the apparent end, `size` being its byte; begin: of the first frame; synced: records below it are known to be on disk.
        """
        return found

    # Times.

    def refuse_time(self) -> None:
        """Raise Unsupported if records of this format have no time to look up."""
        if not self.has_timestamps:
            raise unsupported(self.name, "timestamps")
