"""What a journal's format has to say of its bytes; everything else about a journal is the same for all of them.

A journal is a directory of segments. A segment is a file that begins with a header, which may be empty, and holds frames back to back,
one for each record, without a gap in their sequences; its name tells the sequence of the first one. Bytes below the end of a file are
never rewritten. A frame that isn't whole yet is *not yet* there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from kvspool.errors import Unsupported
from kvspool.journal import settings
from kvspool.log import CAPABILITIES
from kvspool.record import NO_TIME, Codec

if TYPE_CHECKING:
    from kvspool.journal.columns import JournalColumns, Records
    from kvspool.journal.offsets import Offsets
    from kvspool.journal.segments import Segment, Segments

WHOLE, SHORT, DAMAGED, JUMPED = range(4)
"""Why a scan stopped: enough was taken or the data ended between two frames; in the midst of one; at what can't be a frame; at a frame with
another sequence than the next one."""

LAST_SEQUENCE = (1 << 64) - 1  # no record has it
LAST_TIME = (1 << 63) - 1  # ns
LARGEST_SEGMENT = (1 << 63) - 1  # bytes, the most that a file can have


class Rows(Protocol):
    """Records that an appender takes: lists of them, a `Batch`; or columns, `journal.columns.ColumnRows` or `Records`."""

    @property
    def rows(self) -> int:
        """Return how many they are."""

    def encode(self, format: Format, start: int, place: Before) -> tuple[bytes | bytearray | memoryview, int, int]:
        """Return what `Format.encode` does, for the records from `start` on; it counts until the next call."""


class Before(NamedTuple):
    """What comes before the records that are encoded next, as it is under the append lock.

    sequence: that the first of them gets; base, end: of the segment that they go into; now: the present time; last: the latest timestamp of
    the journal, NO_TIME if it has none.
    """

    sequence: int
    base: int
    end: int
    now: int
    last: int


class Batch(NamedTuple):
    """Records to be appended: encoded values, and their keys, or None for none. `types`, `timestamps` and `codecs` have one for each value,
    in place of `type`, `timestamp` (None: that of the append) and `codec`, where they differ."""

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


def joined(batches: list[Batch]) -> Batch:
    """Return batches that have the same columns as one."""
    if len(batches) < 2:
        return batches[0] if batches else Batch([])
    first, columns = batches[0], dict[str, Any]()
    for name in ("values", "keys", "types", "timestamps", "codecs"):
        if getattr(first, name) is not None:
            columns[name] = list(chain.from_iterable(getattr(batch, name) for batch in batches))
    if first.codecs is not None:
        columns["codecs"] = bytes(columns["codecs"])
    return first._replace(**columns)


class Scan(NamedTuple):
    """What a scan came to. size: bytes of the whole frames that it passed; sequence: of the next frame; stop: why it ended there. need: for
    SHORT, the bytes that the next frame takes, 0 if that can't be said yet; for JUMPED, the sequence that was found; see also `gather`.
    latest: of `pass_over`, the latest timestamp of what it passed; NO_TIME if there was none."""

    size: int
    sequence: int
    stop: int
    need: int = 0
    latest: int = NO_TIME


class Head(NamedTuple):
    """The fields of a frame's head that metadata needs. size: bytes of the whole frame."""

    sequence: int
    timestamp: int
    size: int


class Format(ABC):
    """One on-disk format, with the limits of one journal."""

    name: ClassVar[str]
    has_keys: ClassVar[bool] = False
    has_empty_keys: ClassVar[bool] = True  # where there are keys: one of no bytes is another thing than none
    has_types: ClassVar[bool] = False
    has_timestamps: ClassVar[bool] = False
    has_codecs: ClassVar[bool] = False
    has_checksums: ClassVar[bool] = False
    has_other_names: ClassVar[bool] = False  # segments may be called otherwise than `name_of` has it
    reads_zeros: ClassVar[bool] = False  # zeros read as frames: see `true_end`
    trims_consumed: bool = False  # segments that every durable reader has passed go by themselves
    total_bytes: int = 0  # that all segments may take, the oldest go; 0: any number
    has_archives: ClassVar[bool] = False  # sealed segments may lie there compressed: nobody else's program reads them
    may_leave_out: ClassVar[bool] = False  # sequences between two frames: `pass_over` goes on behind them, `scan` says JUMPED
    has_producers: ClassVar[bool] = False  # it may have a list of producers beside the segments; see `kvspool.producers`
    has_columns: ClassVar[bool] = False  # frames go to and from columns as Arrow has them, without an object for a record
    header_bytes: int = 0
    ends_with_size: ClassVar[bool] = False  # a frame repeats its size at its end: see `size_of_last`
    number: ClassVar[int]  # of those that `tail_py` knows
    least_bytes: int = 1  # of a frame
    item_bytes: int = 0  # of each value, where all have one length
    full_at: int  # bytes of a segment; an append that doesn't come to them begins no new one
    most_bytes: int = (1 << 63) - 1  # of a segment; what lies behind them is nobody's

    @abstractmethod
    def limits(self) -> dict[str, int]:
        """Return the numbers that the constructor was called with, by name; they are kept in the journal's settings."""

    @classmethod
    def limit_names(cls) -> tuple[str, ...]:
        """Return the names of what the constructor takes."""
        code = cls.__init__.__code__
        return code.co_varnames[1 : code.co_argcount]

    @classmethod
    def settled(cls, stored: dict[str, int], given: dict[str, int]) -> dict[str, int]:
        """Return what the constructor takes for a journal whose settings have the limits `stored`, opened with some that are `given`."""
        return {**stored, **given}

    # Where things lie.

    @classmethod
    @abstractmethod
    def lies_at(cls, path: Path, *, is_sure: bool) -> bool:
        """Return whether a journal of this format lies at a path. is_sure: somebody says so, and only what contradicts it counts."""

    @abstractmethod
    def segments_in(self, path: Path) -> Path:
        """Return the directory of the segments."""

    @abstractmethod
    def lock_file(self, path: Path) -> Path:
        """Return the file whose locks the writers hold; see `control`."""

    @classmethod
    @abstractmethod
    def sidecar(cls, path: Path) -> Path:
        """Return the directory for what is ours alone, where the program whose format it is doesn't trip over it."""

    def prepare(self, path: Path, *, is_new: bool = False) -> None:
        """Make what a writer needs beside the segments. is_new: nothing that an earlier journal left there counts. Raises UnsafeFilesystem
        where writers could not see each other's locks."""
        return None

    @abstractmethod
    def name_of(self, base: int) -> str | None:
        """Return the name of the segment whose first record has the sequence `base`; None if no segment begins there."""

    @abstractmethod
    def base_of(self, name: str) -> int | None:
        """Return the sequence of the first record of the segment with this name; None if it is no segment's."""

    @abstractmethod
    def offsets(self, path: Path, mode: int) -> Offsets:
        """Return where the durable readers' places are kept; new files get the permission bits `mode`."""

    def first(self, path: Path) -> int:
        """Return the sequence that the first record of a journal gets that has no segment at all. Raises Corruption for damaged
        settings."""
        found = settings.load(self.sidecar(path))
        return 0 if found is None or found.format != self.name else found.first_sequence

    # What the bytes mean.

    def header(self, base: int) -> bytes:
        """Return the first bytes of a new segment."""
        return b""

    def check_header(self, data: bytes, base: int) -> int:
        """Return the size of the header that `data` begins with; 0 if that is not all there yet. Raises Corruption for another one."""
        return 0

    def begin_of(self, segment: Segment) -> int:
        """Return the byte of a segment where its first frame begins; 0 if its header is not all there yet. Raises Corruption."""
        if not self.header_bytes:
            return 0
        data, header = segment.read(0, self.header_bytes + 1), self.header(segment.base)
        if len(data) <= self.header_bytes and data != header and header.startswith(data.rstrip(b"\0")):
            return 0  # a crash of the machine may leave the length and not the bytes
        return self.check_header(data[: self.header_bytes], segment.base)

    @abstractmethod
    def check(self, batch: Batch) -> None:
        """Raise TooLarge, or ValueError for what a record of this format has no room for."""

    @abstractmethod
    def encode(self, batch: Batch, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        """Return the frames of the records from `start` on that go into the segment at `place`, how many they are, and the latest timestamp
        of the journal with them.

        No timestamp is earlier than the one before it: it becomes that one. NO_TIME stays. No record: the next one begins a new segment.
        """

    def check_columns(self, columns: JournalColumns | Records) -> None:
        """As `check`, where the format has columns."""
        raise NotImplementedError

    def encode_columns(
        self, columns: JournalColumns, rows: memoryview | None, start: int, place: Before
    ) -> tuple[bytes | bytearray, int, int]:
        """As `encode`, where the format has columns; rows: int32 numbers of those that are meant, None for all."""
        raise NotImplementedError

    def encode_records(self, records: Records, start: int, place: Before) -> tuple[memoryview, int, int]:
        """As `encode`, where the format has columns, into the records' own room."""
        raise NotImplementedError

    def gather(self, data: bytes, sequence: int, most: int, count: int, columns: tuple[Any, ...]) -> Scan:
        """As `scan`, where the format has columns: into some that hold `count` rows, until they hold `most`. A record that they have no
        room for is WHOLE, and `need` says its bytes."""
        raise NotImplementedError

    def is_full(self, base: int, end: int, sequence: int) -> bool:
        """Return whether a segment that ends at byte `end`, before `sequence`, is followed by a new one at once."""
        return False

    @abstractmethod
    def scan(self, data: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> Scan:
        """Append to `items` up to `most` records of the frames in `data`, the first of which has this sequence.

        make: called with sequence, timestamp, type, key, value and, where the format keeps it, codec; None: the values alone.
        """

    def scanner(self) -> Callable[..., tuple[int, ...]]:
        """Return what a follower calls in place of `scan`: it may return a plain tuple, which begins with the size and the sequence."""
        return self.scan

    @abstractmethod
    def pass_over(self, data: bytes, sequence: int, until: int = LAST_SEQUENCE, timestamp: int = LAST_TIME) -> Scan:
        """Check frames without taking records out, up to the one with the sequence `until`, or the first one later than `timestamp`."""

    def head(self, data: bytes) -> Head | None:
        """Return the head of the frame that `data` begins with, or None if no frame begins so. The checksum is not compared."""
        return None

    def place_in(self, base: int, sequence: int) -> int | None:
        """Return the byte of a segment where the frame of a sequence begins, if that can be told without looking."""
        return None

    def behind_damage(self, position: int, sequence: int) -> tuple[int, int] | None:
        """Return where a damaged frame ends and which sequence follows, if that can be told; else the rest of the segment is lost."""
        return None

    def resume(self, data: bytes, sequence: int, until: int) -> tuple[int, int] | None:
        """In what begins with a damaged frame: return where the next sound one begins, and its sequence, above `sequence` and below
        `until`."""
        return None

    def guess(self, data: bytes, sequence: int, until: int) -> tuple[int, int] | None:
        """As `resume`, on a person's word: in a format without checksums, where the next frame seems to begin, as far as sizes tell."""
        return self.resume(data, sequence, until)

    def behind_jump(self, data: bytes, sequence: int, found: int) -> tuple[int, int] | None:
        """At a whole frame whose sequence is `found` and not the next one: return how many bytes to pass, and which sequence follows.

        By default frames are missing there, if it is a later one. None: the rest of the segment is lost.
        """
        return (0, found) if found > sequence else None

    def knows(self, name: str) -> bool:
        """Return whether a file beside the segments, which is none itself, belongs to the format."""
        return False

    def size_of_last(self, tail: bytes) -> int:
        """Return the size of the frame that ends where `tail`, the last bytes of a segment, ends; 0 if it doesn't say so itself."""
        return 0

    def end_in(self, segment: Segment, begin: int, size: int) -> tuple[int, int] | None:
        """Return the byte behind the last frame of a segment of `size` bytes, not before `begin`, and the sequence that follows; None if
        one has to pass over all."""
        return None

    def finish(self, segments: Segments, mode: int) -> None:
        """Under the append lock, before the end is looked for: finish what a writer that died had begun, besides appending.

        Raises Corruption if the segments can't be what writers leave, so that nothing is appended to them.
        """
        return None

    def true_end(self, segment: Segment, begin: int, found: Scan, synced: int) -> Scan:
        """Return where a segment ends after a crash of the machine, which may have left what only looks like frames. `found`: the end of
        what looks so, `size` being its byte; `begin`: of the first one; records below `synced` are known to be on disk."""
        return found

    # Times.

    def refuse_time(self) -> None:
        """Raise Unsupported if records of this format have no time that could be looked for."""
        if not self.has_timestamps:
            raise Unsupported(self.name, "timestamps", CAPABILITIES["timestamps"])
