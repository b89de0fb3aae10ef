"""Appending to a journal: one lock, whole frames at the end of the last segment, then the page that says so.

What a process that dies in the midst of it leaves, and what the next writer does, both under the append lock:

| it died | it left | the next writer |
|---|---|---|
| while it wrote frames | more bytes than the page says | keeps the whole frames: a reader may have them already; cuts what is torn |
| before it wrote the page | the same | the same |
| while it made a segment | a page whose `end` is 0 | makes it, or completes its header |

The same look at the last segment's frames is taken where the page can't be believed: after a restart of the machine, when the original has
written, when the lock file is new. What was cut is reported, byte for byte; see `Torn`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from kvspool import system
from kvspool.errors import LogVanished, OutOfRange, Poisoned, Reentered
from kvspool.journal.control import MAGIC, NOT_BEGUN, Control, Page
from kvspool.journal.format import DAMAGED, JUMPED, SHORT, WHOLE, Batch, Format, Scan
from kvspool.journal.segments import Segment, Segments
from kvspool.record import NO_TIME

CHUNK = 1 << 20  # bytes read at once
SHOWN = 1 << 16  # bytes of what was cut that a report holds


class Torn(msgspec.Struct, frozen=True):
    """What was cut from the end of a journal, because it is no whole frame.

    segment: path of the file; position: byte where it was cut; sequence: of the record that would have begun there; size: bytes cut;
    data: the first 64 KiB of them.
    """

    segment: str
    position: int
    sequence: int
    size: int
    data: bytes


class Appender:
    """What one handle needs to append. Its methods are called by one thread at a time."""

    def __init__(self, segments: Segments, control: Control, mode: int, timeout: float, torn: list[Torn]) -> None:
        """Shut the original's writer out, and find the end; what has to be cut for that is added to `torn`. Raises LockTimeout,
        Corruption, Poisoned, or the system's OSError."""
        self.format: Format = segments.format
        self.segments = segments
        self.control = control
        self.process = system.port.process_id()
        self._torn = torn
        self._mode = mode
        self._segment: Segment | None = None
        self._is_busy = False
        control.enter(timeout)
        with self.locked(timeout):
            pass

    @contextmanager
    def locked(self, timeout: float) -> Iterator[Page]:
        """Hold the append lock inside the `with` block, and have the end of the journal, with its last segment open."""
        if self._is_busy:
            raise Reentered("a signal handler may not append to a handle in the middle of an append to it; let it use one of its own")
        self.control.lock(timeout)
        self._is_busy = True
        try:
            yield self._find_end()
        finally:
            self._is_busy = False
            self.control.unlock()

    def append(self, batch: Batch, page: Page, at: int | None = None) -> range:
        """Append all records of a batch, under the append lock, and return their sequences.

        at: the sequence that the first one must get; a later one than the next leaves those in between out. Raises OutOfRange if it can't.
        A batch that spans segments may fail between two of them: the error's note says which records are there.
        """
        if at is not None and at != page.next_sequence:
            if at < page.next_sequence or not self.format.may_leave_out:
                raise OutOfRange(f"{self.segments.path} goes on at sequence {page.next_sequence}, not at {at}; nothing was written")
            page = page._replace(next_sequence=at)
        first = page.next_sequence
        done = 0
        try:
            while done < len(batch.values):
                data, count = self.format.encode(batch, done, page.next_sequence, page.base, page.end)
                if count:
                    page = self._write(page, data, count, _last_time(batch, done + count, page))
                    done += count
                if not count or self.format.is_full(page.base, page.end, page.next_sequence):
                    page = self.roll(page)
        except (OSError, Poisoned) as error:
            error.add_note(f"{done} of {len(batch.values)} records were appended, from sequence {first} on; don't append those again")
            raise
        return range(first, page.next_sequence)

    def reopened(self, page: Page) -> Segment:
        """Return the last segment with a descriptor of its own, which the caller closes. Under the append lock."""
        return Segment(self.segments.path_of(page.base), page.base, is_writable=True)

    # The end.

    def _find_end(self) -> Page:
        page = self.control.read()
        if page.sync_error:
            raise Poisoned(
                f"{self.segments.path}: a flush to disk failed ({os.strerror(page.sync_error)}); it takes no more records. "
                "kvspool.repair writes all of it to disk anew"
            )
        if not self._agrees(page):
            page = self._recover(page)
        if self.format.is_full(page.base, page.end, page.next_sequence):
            page = self.roll(page)
        return page

    def _agrees(self, page: Page) -> bool:
        """Return whether the page is of this run of the machine, and the segment that it speaks of ends where it says."""
        if page.boot != self.control.boot_id or page.end == NOT_BEGUN and self.format.header_bytes:
            return False
        segment = self._segment
        if segment is None or segment.base != page.base or segment.is_gone():
            segment = self._open(page.base)
        return segment is not None and segment.size() == page.end

    def _open(self, base: int) -> Segment | None:
        """Have the segment that begins at `base` as the one that is written to; None if there is no such file."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        with suppress(FileNotFoundError):
            self._segment = Segment(self.segments.path_of(base), base, is_writable=True)
        return self._segment

    def _recover(self, page: Page) -> Page:
        """Find the end from the segments, cut what is torn, and write a new page."""
        try:
            bases = self.segments.bases()
        except FileNotFoundError:
            raise LogVanished(f"{self.segments.directory} is gone; open the path again if it exists") from None
        is_ours = page.boot == self.control.boot_id
        if not bases:
            return self._begin(self._page(page, page.next_sequence if is_ours else 0))
        base = bases[-1]
        segment = self._open(base)
        if segment is None:
            raise LogVanished(f"{self.segments.path_of(base)} was removed at this moment; try again")
        size = segment.size()
        begin = self.segments.begin_of(segment)
        if begin < len(self.format.header(base)):
            return self._begin(self._page(page, base))  # its header is torn, so there is no frame
        sequence = base
        if is_ours and base == page.base and begin <= page.end <= size:
            begin, sequence = page.end, page.next_sequence
        found = walk(self.format, segment, begin, sequence, size)
        if found.size < size:
            self._cut(segment, found, size)
        if is_ours and page.end == NOT_BEGUN and base < page.base == found.sequence:
            return self._begin(page)
        synced = min(page.synced_sequence, found.sequence) if is_ours else base  # a segment is on disk when the next one begins
        page = self._page(page, base, found.size, found.sequence)._replace(synced_sequence=synced)
        self.control.write(page)
        return page

    def _cut(self, segment: Segment, found: Scan, size: int) -> None:
        """Cut what is behind the last whole frame, after a note of it."""
        removed = segment.read(found.size, min(size - found.size, SHOWN))
        self._torn.append(Torn(str(segment.path), found.size, found.sequence, size - found.size, removed))
        system.port.truncate(segment.fd, found.size)
        system.port.flush(segment.fd)

    def _page(self, page: Page, base: int, end: int = NOT_BEGUN, sequence: int | None = None) -> Page:
        """Return the page with another end of the journal, and us as the last who appended."""
        sequence = base if sequence is None else sequence
        known = (page.last_timestamp, page.synced_sequence, page.sync_error)
        return Page(MAGIC, self.control.boot_id, base, end, sequence, *known, *self.control.holder, 0)

    # Writing.

    def _write(self, page: Page, data: bytes | bytearray, count: int, timestamp: int) -> Page:
        segment = self._segment
        assert segment is not None
        try:
            system.port.write(segment.fd, data, page.end)
        except OSError:
            with suppress(OSError):  # the next writer does it otherwise
                system.port.truncate(segment.fd, page.end)
            raise
        page = self._page(page, page.base, page.end + len(data), page.next_sequence + count)._replace(last_timestamp=timestamp)
        self.control.write(page)
        return page

    def roll(self, page: Page) -> Page:
        """Close the last segment, on disk, and begin a new one. Under the append lock."""
        segment = self._segment
        if segment is not None and segment.base == page.base:
            self._flush(segment, page)
        page = self._page(page, page.next_sequence)._replace(synced_sequence=page.next_sequence)
        self.control.write(page)  # from here on nobody appends to the old segment any more
        return self._begin(page)

    def _flush(self, segment: Segment, page: Page) -> None:
        try:
            system.port.flush(segment.fd)
        except OSError as error:
            self.control.write(page._replace(sync_error=error.errno or errno.EIO))
            raise Poisoned(f"{segment.path}: the flush to disk failed ({error}); the journal takes no more records") from error

    def _begin(self, page: Page) -> Page:
        """Make the segment that the page says is being made, on disk; whatever lies there of an earlier attempt holds no record."""
        path = self.segments.path_of(page.base)
        fd = system.port.open(path, os.O_RDWR | os.O_CREAT, self._mode)
        try:
            system.port.truncate(fd, 0)
            header = self.format.header(page.base)
            if header:
                system.port.write(fd, header, 0)
            system.port.flush(fd)
        finally:
            system.port.close(fd)
        flush_directory(path.parent)
        if self._open(page.base) is None:
            raise LogVanished(f"{path} was removed at this moment; try again")
        page = self._page(page, page.base, len(header), page.base)
        self.control.write(page)
        return page

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self.control.close()


def walk(
    format: Format, segment: Segment, begin: int, sequence: int, end: int, until: int | None = None, timestamp: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scan:  # fmt: skip
    """Pass over the frames of a segment from byte `begin` up to byte `end`; see `Format.pass_over`. `size` is the byte where it stopped."""
    bounds = {name: bound for name, bound in (("until", until), ("timestamp", timestamp)) if bound is not None}
    position, size = begin, CHUNK
    while True:
        data = segment.read(position, min(size, end - position))
        found = format.pass_over(data, sequence, **bounds)
        position, sequence = position + found.size, found.sequence
        if progress is not None:
            progress(position)
        is_last = position - found.size + len(data) >= end or not data
        if found.stop in (DAMAGED, JUMPED) or is_last or (found.stop == WHOLE and found.size < len(data)):
            return found._replace(size=position)
        if found.stop == SHORT and found.size == 0:
            size = max(2 * size, found.need)  # one frame, larger than what was read
        else:
            size = CHUNK


def flush_directory(path: Path) -> None:
    """Put the names in a directory on disk."""
    fd = system.port.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        system.port.flush(fd)
    finally:
        system.port.close(fd)


def _last_time(batch: Batch, end: int, page: Page) -> int:
    timestamp = batch.timestamp if batch.timestamps is None else batch.timestamps[end - 1]
    return max(page.last_timestamp, timestamp) if page.last_timestamp != NO_TIME else timestamp
