"""The format FFLG: segments of plain blobs, numbered, and one file with the positions of all consumers.

Source: `seeds/000`, a document, and the bytes that its program writes, which differ in the header. Both are read, the program's is written.
There are no keys, types, timestamps or checksums, and nothing after an entry marks it as whole. An entry can only be checked by its size,
which must lead to another entry, or to the end of the file.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from kvspool import system
from kvspool.engine import sizes
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, NotAFile, TooLarge, UnknownVersion
from kvspool.journal.consumers import INDEX, ConsumerIndex, parse_index, read_index
from kvspool.journal.format import LARGEST_SEGMENT, LAST_SEQUENCE, LAST_TIME, WHOLE, Before, JournalBatch, Scan
from kvspool.journal.formats.arrangement import Bare
from kvspool.journal.offsets import Offsets
from kvspool.journal.segments import Segment
from kvspool.journal.walking import walk
from kvspool.kernel import fflg, tail_py
from kvspool.kernel.fflg_py import SIZE
from kvspool.system import disk

MAGIC = b"FFLG"
VERSION = 0
SEGMENT_BYTES = 100_000_000
LEAST_SEGMENT = 10_000
LONGEST_BLOB = (1 << 32) - 1
CHUNK = 1 << 20  # bytes read at once
AT_ONCE = 1 << 17  # bytes of entries written at once, and a little more
ENTRIES_COMPARED = 1000  # that are read both ways if a header is ambiguous
_NAME = re.compile(r"[0-9a-fA-F]{8,20}")


class FflgHeader(NamedTuple):
    """The header of a segment of the program."""

    magic: Annotated[bytes, "4s", "`FFLG`"]
    version: Annotated[int, "I", "0"]
    base: Annotated[int, "Q", "sequence of the first entry"]


class DocumentHeader(NamedTuple):
    """The header of a segment of the document."""

    magic: Annotated[bytes, "4s", "`FFLG`"]
    version: Annotated[int, "H", "0"]
    base: Annotated[int, "Q", "sequence of the first entry"]


class BlobHead(NamedTuple):
    """The head of a blob."""

    size: Annotated[int, "I", "bytes of the blob"]


HEADER, DOCUMENT_HEADER, ENTRY = Layout(FflgHeader, ">"), Layout(DocumentHeader, ">"), Layout(BlobHead, ">")


class Fflg(Bare):
    """The FFLG format.

    segment_bytes: a new segment begins before an entry that would make the last one larger, including its header. total_bytes: of all
    segments; before more is written the oldest ones are removed, whether they were read or not; 0: any number. keep_consumed: 1 keeps
    segments that every durable reader has passed; 0 removes them.
    """

    name: ClassVar[str] = "fflg"
    number: ClassVar[int] = tail_py.FFLG
    has_other_names: ClassVar[bool] = True
    reads_zeros: ClassVar[bool] = True
    header_bytes = HEADER.size
    least_bytes = SIZE

    def __init__(self, segment_bytes: int | str = SEGMENT_BYTES, total_bytes: int | str = 0, keep_consumed: int = 0) -> None:
        self.segment_bytes, self.total_bytes = sizes.parse(segment_bytes), sizes.parse(total_bytes)
        self.full_at = self.segment_bytes
        if not LEAST_SEGMENT <= self.segment_bytes <= LARGEST_SEGMENT:
            raise ValueError(f"a segment has {LEAST_SEGMENT:,} to {LARGEST_SEGMENT} bytes, not {segment_bytes}")
        if self.total_bytes and self.total_bytes < self.segment_bytes:
            raise ValueError(f"total_bytes is at least segment_bytes, {self.segment_bytes:,}, or 0 for any number; not {total_bytes}")
        if keep_consumed not in (0, 1):
            raise ValueError(f"keep_consumed is 0 or 1, not {keep_consumed!r}")
        self.trims_consumed = not keep_consumed

    def limits(self) -> dict[str, int]:
        return {"segment_bytes": self.segment_bytes, "total_bytes": self.total_bytes, "keep_consumed": int(not self.trims_consumed)}

    # Files.

    @classmethod
    def lies_at(cls, path: Path, *, is_sure: bool) -> bool:
        if not path.is_dir():
            return False
        names = system.port.names(path)
        segments = sorted(name for name in names if _base_of(name) is not None)
        begins = [_first_bytes(path / name, is_sure) for name in dict.fromkeys(segments[:1] + segments[-1:])]
        if is_sure:
            return all(MAGIC.startswith(begin) for begin in begins) and (bool(segments) or names in ([], [INDEX]))
        if segments:
            return MAGIC in begins
        with suppress(Corruption, OSError):
            return names == [INDEX] and not parse_index(read_index(path)).rest
        return False

    def name_of(self, base: int) -> str | None:
        return f"{base:016x}"

    def base_of(self, name: str) -> int | None:
        return _base_of(name)

    def offsets(self, path: Path, mode: int) -> Offsets:
        return ConsumerIndex(path, mode)

    def first(self, path: Path) -> int:
        """After all positions of consumers, too: none of them may be ahead of the stored records."""
        consumed = max((place for _, place in parse_index(read_index(path)).entries), default=0)
        return max(super().first(path), min(consumed, LAST_SEQUENCE))

    # Headers.

    def header(self, base: int) -> bytes:
        return HEADER.pack(FflgHeader(MAGIC, VERSION, base))

    def begin_of(self, segment: Segment) -> int:
        data = segment.read(0, HEADER.size)
        if not MAGIC.startswith(data[:4]):
            raise Corruption(f"it doesn't begin with {MAGIC.decode()}")
        layouts = [layout for layout in (HEADER, DOCUMENT_HEADER) if len(data) >= layout.size]
        versions = {layout.size: found.version for layout in layouts if (found := layout.unpack(data)).base == segment.base}
        if not versions:
            if any(header.startswith(data) for header in _headers(segment.base)):
                return 0
            raise Corruption(f"its header contradicts its name, according to which it begins with sequence {segment.base}")
        if VERSION not in versions.values():
            raise UnknownVersion(f"{segment.path} has the version {min(versions.values())}; this kvspool reads version {VERSION}")
        if segment.base == 0 and self.header(0).startswith(data):
            return self._likelier(segment, len(segment.path.name) == len(f"{0:016x}"))
        return next(iter(versions))

    def _likelier(self, segment: Segment, is_named_by_program: bool) -> int:
        """Return where the entries begin after an ambiguous header: sequence 0, and zeros after the shorter one.

        A name of 16 digits suggests the program, another one the document. That counts unless the entries, read so, lead to no end, but
        read the other way they end at the end of the file, and not all of them are empty.
        """
        first, second = HEADER.size, DOCUMENT_HEADER.size
        if not is_named_by_program:
            first, second = second, first
        size = segment.size()
        if size <= HEADER.size:  # there is no entry yet
            return first if first <= size else 0
        found = walk(self, segment, first, 0, size, until=ENTRIES_COMPARED)
        if found.stop == WHOLE:
            return first
        other = walk(self, segment, second, 0, size)
        is_clean = other.stop == WHOLE and size - second > SIZE * other.sequence
        return second if is_clean else first

    # Bytes.

    def check(self, batch: JournalBatch) -> None:
        longest = max(map(len, batch.values), default=0)
        most = min(self.segment_bytes - HEADER.size - SIZE, LONGEST_BLOB)
        if longest > most:
            raise TooLarge(f"a value of {longest} bytes: a segment of {self.segment_bytes} bytes holds {most}; nothing was written")

    def encode(self, batch: JournalBatch, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        left = LAST_SEQUENCE - place.sequence
        if left <= 0:
            raise TooLarge(f"no sequence is left after {place.sequence - 1}; nothing was written")
        data, count = fflg.encode(batch.values, start, min(left, len(batch.values)), self.segment_bytes - place.end, AT_ONCE)
        if not count and place.end <= HEADER.size:
            raise TooLarge(f"a value of {len(batch.values[start])} bytes doesn't fit into a segment of {self.segment_bytes}")
        return data, count, place.last

    def scan(self, data: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> Scan:
        return Scan(*fflg.scan(data, sequence, min(most, LAST_SEQUENCE - sequence), make, items))

    def pass_over(self, data: bytes, sequence: int, until: int = LAST_SEQUENCE, timestamp: int = LAST_TIME) -> Scan:
        return Scan(*fflg.pass_over(data, sequence, until))

    def true_end(self, segment: Segment, begin: int, found: Scan, synced: int) -> Scan:
        """Return the first entry of the run of zeros that reaches the end of the file: they would read as empty entries. Records below
        `synced` are excluded.
        """
        zeros = _zeros_at_end(segment, begin)
        if zeros >= found.size:
            return found
        end = walk(self, segment, begin, segment.base, zeros)
        if end.size < zeros:  # an entry that begins before the zeros, and ends in them
            end = walk(self, segment, end.size, end.sequence, found.size, until=end.sequence + 1)
        if end.sequence < synced:
            end = walk(self, segment, end.size, end.sequence, found.size, until=synced)
        return end


def _base_of(name: str) -> int | None:
    base = int(name, 16) if _NAME.fullmatch(name) else LAST_SEQUENCE
    return base if base < LAST_SEQUENCE else None


def _headers(base: int) -> list[bytes]:
    return [HEADER.pack(FflgHeader(MAGIC, VERSION, base)), DOCUMENT_HEADER.pack(DocumentHeader(MAGIC, VERSION, base))]


def _first_bytes(path: Path, is_sure: bool) -> bytes:
    """Return the bytes at the position of the magic; others if it isn't a file. Raises NotAFile if it is certainly a segment's."""
    try:
        return disk.read(path, len(MAGIC))
    except NotAFile:
        if is_sure:
            raise
        return b"no file"
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return b"" if error.errno == errno.ENOENT else b"link"


def _zeros_at_end(segment: Segment, begin: int) -> int:
    """Return the start of the zeros at the end of a segment; its size if there are none."""
    end = segment.size()
    while end > begin:
        at = max(begin, end - CHUNK)
        other = segment.read(at, end - at).rstrip(b"\0")
        if other:
            return at + len(other)
        end = at
    return begin
