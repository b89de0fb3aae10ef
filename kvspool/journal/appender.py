"""Append to a journal by the slow path: one lock, whole frames at the end of the last segment, then the page that records the end.

An append of one record in one step is in `kernel.tail_py`. It comes here only if that step is not possible, and after a crash during it.

The traces of a process that crashes meanwhile, and the work of the next writer, both under the append lock:

| crashed | trace | the next writer |
|---|---|---|
| while writing frames | more bytes than the page says | keeps the whole frames, since a reader may have them; cuts a torn one |
| before writing the page | the same | the same |
| while creating a segment | a page whose `end` is the largest number | creates it, or completes its header; on disk, with its name |

The frames of the last segment are checked in the same way if the page can't be trusted: after a restart of the machine, after a write of
the original program, with a new lock file. Cut bytes are reported; see `Torn`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvspool import system
from kvspool.engine import locks, producer_table
from kvspool.errors import DO_NOT_REPEAT, Corruption, KvspoolError, LogVanished, OutOfRange, Poisoned, Reentered, say_what_is_stored
from kvspool.journal.control import MAGIC, NOT_BEGUN, Control, Page, flush_noted
from kvspool.journal.damage import find_after
from kvspool.journal.format import LAST_SEQUENCE, WHOLE, Before, Format, JournalRows, Scan
from kvspool.journal.segment import Archived
from kvspool.journal.segments import Segment, Segments
from kvspool.journal.times import latest_time
from kvspool.journal.walking import last_whole, walk
from kvspool.kernel import tail_py as tails
from kvspool.kernel.frames import TWIN
from kvspool.record import NO_TIME
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.journal.dropping import AppenderRetention
    from kvspool.journal.home import Home

IS_ONE_STEP = TWIN == "compiled"  # an append to the tail: it needs no lock between threads, and no signal handler interrupts it
SHOWN = 1 << 16  # bytes of a cut that a report contains
OnRoll = Callable[[int], None]
T = TypeVar("T")


class Torn(msgspec.Struct, frozen=True):
    """Bytes cut from the end of a journal, because they are not a whole frame.

    segment: path of the file; position: byte where it was cut; sequence: of the record that would have begun there; size: bytes cut; data:
    the first 64 KiB of them.
    """

    segment: str
    position: int
    sequence: int
    size: int
    data: bytes


class ProducerStates:
    """Updates of producers' states at the end of a journal; see `kvspool.engine.producer_table`."""

    def __init__(self, directory: Path, log_id: Callable[[], bytes]) -> None:
        self._directory = directory
        self._log_id = log_id

    def resolve(self, control: Control, next_sequence: int) -> None:
        """Under the append lock: note how much was appended of a batch of a killed process."""
        producer_table.resolve(self._directory, self._log_id(), control.pending - 1, next_sequence)
        control.set_pending(0)

    def restarted(self, end: int) -> None:
        """Under the append lock, after a restart of the machine: the journal continues at this sequence, so all later records are lost."""
        if system.port.look_up(self._directory / producer_table.NAME) is None:
            return  # the journal's id isn't needed then, either
        producer_table.restarted(self._directory, self._log_id(), producer_table.before(end))


class Appender(Handle):
    """The state of one handle for appending. Only one thread at a time calls its methods."""

    def __init__(
        self,
        home: Home,
        segments: Segments,
        control: Control,
        mode: int,
        timeout: float,
        torn: list[Torn],
        room: AppenderRetention | None = None,
        on_roll: OnRoll | None = None,
        producers: ProducerStates | None = None,
    ) -> None:
        """Keep the original's writer out, and find the end; bytes cut for that are added to `torn`. Raises LockTimeout, LogVanished,
        Corruption, Poisoned, or the system's OSError.

        room: called before anything is written. on_roll: called under the append lock, with the sequence of the next record, after a
        segment was begun; must not raise. producers: their states.
        """
        self.format: Format = segments.format
        self.segments = segments
        self.control = control
        self.process = system.port.process_id()
        self._torn = torn
        self.room = room
        self._mode = mode
        self._segment: Segment | None = None
        self._thread = 0  # the thread that holds the append lock through this handle
        self._on_roll = on_roll
        self._producers = producers
        self._home = home
        self._renewals = -1  # of the lock file, at the last check that the journal is still in place
        control.enter(timeout)
        self.under_lock(timeout, lambda page: None)

    def under_lock(self, timeout: float, work: Callable[[Page], T]) -> T:
        """Do as `locked`, for work that needs the end of the journal, and its last segment open."""

        def step() -> T:
            result = work(self._resolved_end())
            self._tell()
            return result

        return self.locked(timeout, step)

    def locked(self, timeout: float, work: Callable[[], T]) -> T:
        """Hold the append lock while `work` runs, and return its result; the end of the journal is not determined.

        The lock is released whenever and whatever a signal handler raises. A context manager could not guarantee that: an exception at the
        beginning of its `__exit__` skips the release. Raises Reentered, LockTimeout, LogVanished.
        """
        self._refuse_reentry()
        self._thread = threading.get_ident()
        try:
            self._enter(timeout)
            return work()
        finally:
            try:
                self._leave()
            except BaseException:  # from a handler, perhaps before the lock was released
                self._leave()
                raise

    def append_one(self, value: bytes, key: bytes | None, type: int, codec: int, timeout: float) -> int:
        """Append one record with the present time in one step, if possible, and return its sequence. `tail_py.SLOW`: nothing was done, and
        the caller must use `append`. Raises LockTimeout.
        """
        tail = self.control.tail
        if tail is None or self._thread:
            return tails.SLOW

        def attempt() -> int | None:
            found: int = tail.append(value, key, type, codec)
            return None if found == tails.BUSY else found

        return locks.wait_for(attempt, timeout, self.control.who, partial(locks.rest, tail.lock))

    def refuse_handler(self) -> None:
        """Raise Reentered if this thread holds the append lock through this handle: then this is a signal handler."""
        if self._thread == threading.get_ident():
            raise Reentered("a signal handler may not use a handle during an append to it; let it use its own handle")

    def _refuse_reentry(self) -> None:
        """Do as `refuse_handler`, for the thread with the thread lock: then an interpreted append in one step is its own, too."""
        self.refuse_handler()
        tail = self.control.tail
        if tail is not None and tail.is_busy and not IS_ONE_STEP:  # compiled, another thread's: wait for it
            raise Reentered("a signal handler may not append to a handle during an append to it; let it use its own handle")

    def _enter(self, timeout: float) -> None:
        """Take the append lock."""
        self.control.lock(timeout)
        if self.control.renewals != self._renewals:
            self._home.refuse_another()
            self._renewals = self.control.renewals

    def _resolved_end(self) -> Page:
        """Return the end of the journal, after fixing all leftovers of a killed writer."""
        page = self._find_end()
        if self._producers is not None and self.control.pending:
            self._producers.resolve(self.control, page.next_sequence)
        return page

    def _tell(self) -> None:
        """Under the append lock, after success: let the next append be one step. Never raises an OSError: the work is done."""
        with suppress(OSError):
            self._attach()

    def _attach(self) -> None:
        segment, tail, room = self._segment, self.control.tail, self.room
        if segment is None or tail is None or not self.control.tell(segment.base):
            return
        limit = self.format.full_at if room is None else min(self.format.full_at, room.most(segment.base))
        status = system.port.status(segment.fd)
        path = os.fsencode(segment.path)
        tail.attach(self.format.number, self.format.item_bytes, segment.fd, path, status.st_dev, status.st_ino, segment.base, limit)

    def _detach(self) -> None:
        """Keep appends in one step from the segment, which is about to be closed; wait for one of another thread."""
        tail = self.control.tail
        if tail is not None:
            tail.detach()
            while tail.is_busy and IS_ONE_STEP and self.process == system.port.process_id():
                system.port.sleep(locks.FIRST_PAUSE)

    def _leave(self) -> None:
        """Release the append lock, if it is held; repeating this is harmless."""
        self.control.unlock()
        self._thread = 0

    def append(self, batch: JournalRows, page: Page, at: int | None = None, advice: str = DO_NOT_REPEAT) -> range:
        """Append all records of a batch, under the append lock, and return their sequences.

        at: the required sequence of the first one; one later than the next leaves out those in between. Raises OutOfRange if it is
        impossible. A batch may fail between two records, on a full disk: the error has the stored ones, see `errors.appended_by`, and with
        `advice` what to do about them.
        """
        if at is not None and at != page.next_sequence:
            if at < page.next_sequence or not self.format.may_leave_out:
                raise OutOfRange(f"{self.segments.path} continues at sequence {page.next_sequence}, not at {at}; nothing was written")
            # No segment begins here, since the last one isn't full. To a reader it would look like a missing segment file.
            page = page._replace(next_sequence=at)
        first, number = page.next_sequence, batch.rows
        if number > LAST_SEQUENCE - first:
            raise OutOfRange(f"{self.segments.path} has no more numbers for {number} records from {first} on; create another one")
        done = 0
        now = system.port.now() if self.format.has_timestamps else 0
        try:
            while done < number:
                place = Before(page.next_sequence, page.base, page.end, now, page.last_timestamp)
                data, count, last = batch.encode(self.format, done, place)
                if count:
                    before = page
                    try:
                        page = self._write(page, data, count, last)
                    except BaseException:
                        done += self._kept(before)
                        raise
                    done += count
                if not count or self.format.is_full(page.base, page.end, page.next_sequence):
                    page = self.roll(page)
        except BaseException as error:
            if not done and not isinstance(error, (OSError, Poisoned)):
                raise
            say_what_is_stored(error, range(first, first + done), number, advice)
            raise
        return range(first, page.next_sequence)

    def reopened(self, page: Page) -> Segment:
        """Return the last segment with its own descriptor, which the caller closes. Under the append lock."""
        return Segment(self.segments.plain_path(page.base), page.base, is_writable=True)

    def end_at(self, page: Page, base: int, end: int, sequence: int) -> Page:
        """Under the lock: continue after another record, at the present end of the segments."""
        self._open(base)
        page = self._page(page, base, end, sequence)._replace(synced_sequence=min(page.synced_sequence, sequence))
        self.control.write(page)
        return page

    # The end.

    def _find_end(self) -> Page:
        if self.control.is_gone():
            raise LogVanished(f"{self.control.path} was removed, and other processes lock a new file; open the journal again")
        page = self.control.read()
        if page.sync_error:
            if self.control.owes_error:  # the next boot of the machine learns it only from the page
                self.control.write(page)
            raise Poisoned(
                f"{self.segments.path}: a flush to disk failed ({os.strerror(page.sync_error)}); it takes no more records. "
                "kvspool.repair writes all of it to disk again"
            )
        if not self._agrees(page):
            page = self._recover(page)
        if self.format.is_full(page.base, page.end, page.next_sequence):
            page = self.roll(page)
        return page

    def _agrees(self, page: Page) -> bool:
        """Return whether the page is of this boot of the machine, and its segment ends where it says."""
        if page.boot != self.control.boot_id or page.end == NOT_BEGUN:
            return False
        segment = self._segment
        if segment is None or segment.base != page.base or not segment.is_in_place():
            self._home.refuse_another()
            segment = self._open(page.base)
        return segment is not None and segment.size() == page.end

    def _open(self, base: int) -> Segment | None:
        """Open the segment that begins at `base` for writing; None if there is no such file."""
        self._detach()
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
        with suppress(FileNotFoundError):
            self._segment = Segment(self.segments.plain_path(base), base, is_writable=True)
        return self._segment

    def _recover(self, page: Page) -> Page:
        """Find the end from the segments, cut torn bytes, and write a new page."""
        self._home.refuse_another()
        self.format.finish(self.segments.path, self._mode)
        bases = self.segments.bases()
        is_ours = page.boot == self.control.boot_id
        if not bases:
            known = page.next_sequence if is_ours else 0
            return self._begin(self._end_of(page, max(known, self.format.first(self.segments.path))))
        base = bases[-1]
        segment = self._open(base)
        if segment is None and isinstance(archived := self.segments.get(base), Archived):
            after = self._after(archived)
            return self._begin(self._end_of(self._timed(page), after))
        if segment is None:
            raise LogVanished(f"{self.segments.path_of(base)} was removed at this moment; try again")
        size = segment.size()
        begin = self.segments.begin_of(segment)
        if not begin and self.format.header_bytes:
            return self._begin(self._end_of(self._timed(page), base))  # its header is torn, so there is no frame
        if size <= begin:  # its creator may not have finished it
            self._flush(segment, page)
            disk.flush_directory(segment.path.parent)
        sequence = base
        is_reported = is_ours and base == page.base and begin <= page.end <= size  # of all records before `page.end`
        if is_reported:
            begin, sequence = page.end, page.next_sequence
        found = last_whole(self.format, segment, begin, sequence, size)
        if page.magic == MAGIC and not is_ours:
            found = self.format.true_end(segment, begin, found, page.synced_sequence)
        if found.size < size:
            if found.stop != WHOLE and (begin != page.end or not is_ours):  # a killed writer doesn't change the start of frames
                self._refuse_to_lose(segment, found, size)
            self._cut(segment, found, size)
        if found.latest == NO_TIME and not is_reported:
            page = self._timed(page)
        # Records lost in a restart may have been read: later ones get no earlier time.
        page = page._replace(last_timestamp=max(page.last_timestamp, found.latest))
        if is_ours and page.end == NOT_BEGUN and base < page.base == found.sequence:
            return self._begin(page)
        if is_ours and self.format.begins_anywhere and base < page.base and found.sequence < page.next_sequence:
            return self._begin(self._end_of(page, page.next_sequence))  # the last file is gone: no sequence is given twice
        synced = min(page.synced_sequence, found.sequence)
        if not is_ours or found.sequence < page.next_sequence:  # the page's synced sequence may be about other records
            self._flush(segment, page)
            synced = found.sequence
        page = self._end_of(page, base, found.size, found.sequence)._replace(synced_sequence=synced)
        self.control.write(page)
        if self.format.reads_zeros:
            system.port.flush(self.control.fd)
        return page

    def _end_of(self, page: Page, base: int, end: int = NOT_BEGUN, sequence: int | None = None) -> Page:
        """Return the page with the end that was found; after a restart of the machine later records are known to be lost."""
        if self._producers is not None and page.boot != self.control.boot_id:
            self._producers.restarted(base if sequence is None else sequence)
        return self._page(page, base, end, sequence)

    def _timed(self, page: Page) -> Page:
        """Return a page, possibly stale or empty, with the latest timestamp of the page or the segments."""
        return page._replace(last_timestamp=max(page.last_timestamp, latest_time(self.segments)))

    def _refuse_to_lose(self, segment: Segment, found: Scan, size: int) -> None:
        """Raise Corruption if sound frames seem to follow the damage: then it is no torn end, and only the operator may remove bytes."""
        if self.format.end_in(segment, found.size, size) is not None:
            return  # it has searched for the last sound frame itself
        after = find_after(self.segments, segment, found, size, None)
        if after is not None:
            raise Corruption(
                f"{segment.path}: byte {found.size} is damaged, where sequence {found.sequence} should be, and after it, at byte "
                f"{after[0]}, records continue; nothing was changed. kvspool repair removes the damage and keeps the rest"
            )

    def _after(self, archived: Archived) -> int:
        """Return the sequence after an archive that is the last segment, since later ones were removed, or not copied."""
        found = walk(self.format, archived, self.segments.begin_of(archived), archived.base, archived.size())
        if found.size < archived.size():
            raise Corruption(
                f"{archived.path}: byte {found.size} of the segment is damaged, and no segment follows it, so the next sequence can't "
                "be known; restore the segments after it. Nothing was changed"
            )
        return found.sequence

    def _cut(self, segment: Segment, found: Scan, size: int) -> None:
        """Cut the bytes after the last whole frame, after reporting them."""
        removed = segment.read(found.size, min(size - found.size, SHOWN))
        self._torn.append(Torn(str(segment.path), found.size, found.sequence, size - found.size, removed))
        system.port.truncate(segment.fd, found.size)
        system.port.flush(segment.fd)

    def _page(self, page: Page, base: int, end: int = NOT_BEGUN, sequence: int | None = None) -> Page:
        """Return the page with another end of the journal, and this process as the last writer."""
        sequence = base if sequence is None else sequence
        known = (page.last_timestamp, page.synced_sequence, page.sync_error)
        return Page(MAGIC, self.control.boot_id, base, end, sequence, *known, *self.control.holder, 0)

    # Writing.

    def _write(self, page: Page, data: bytes | bytearray | memoryview, count: int, timestamp: int) -> Page:
        segment = self._segment
        assert segment is not None
        if self.room is not None:
            self.room.make(self.segments, page, len(data))
        system.port.write(segment.fd, data, page.end)
        page = self._page(page, page.base, page.end + len(data), page.next_sequence + count)._replace(last_timestamp=timestamp)
        with suppress(OSError):  # the records are stored nevertheless; the next writer finds them
            self.control.write(page)
        return page

    def _kept(self, page: Page) -> int:
        """After a failed write: cut torn bytes, and return the number of whole records left, which a reader may have already.

        page: the one to write from. It may leave sequences out, but not if no record is left: so the last write counts.
        """
        try:
            return max(0, self._recover(self.control.read()).next_sequence - page.next_sequence)
        except (OSError, KvspoolError):  # the next writer does it instead
            return 0

    def roll(self, page: Page) -> Page:
        """Close the last segment, on disk, and begin a new one. Under the append lock."""
        segment = self._segment
        if self.room is not None:
            self.room.make(self.segments, page, len(self.format.header(page.next_sequence)))
        if segment is not None and segment.base == page.base:
            self._flush(segment, page)
        page = self._page(page, page.next_sequence)._replace(synced_sequence=page.next_sequence)
        self.control.write(page)  # from here on no writer appends to the old segment any more
        page = self._begin(page)
        if self._on_roll is not None:
            self._on_roll(page.next_sequence)
        if self.room is not None:
            self.room.rolled(self.segments)
        return page

    def _flush(self, segment: Segment, page: Page) -> None:
        try:
            flush_noted(lambda: system.port.flush(segment.fd), self.control.note_error)
        except OSError as error:
            self.control.write(page._replace(sync_error=error.errno or errno.EIO))
            raise Poisoned(f"{segment.path}: the flush to disk failed ({error}); the journal takes no more records") from error

    def _begin(self, page: Page) -> Page:
        """Create the segment that the page announces, on disk; a file of an earlier attempt contains no record."""
        path = self.segments.plain_path(page.base)
        if path.name != (name := self.format.name_of(page.base)):
            path = self.segments.renamed(page.base, str(name))
        with Descriptor(path, os.O_RDWR | os.O_CREAT, self._mode) as fd:
            header = self.format.header(page.base)
            if system.port.read(fd, len(header) + 1, 0) != header:  # otherwise a reader may already be after it
                system.port.truncate(fd, 0)
                system.port.write(fd, header, 0)
            system.port.flush(fd)
        disk.flush_directory(path.parent)
        if self._open(page.base) is None:
            raise LogVanished(f"{path} was removed at this moment; try again")
        page = self._page(page, page.base, len(header), page.base)._replace(synced_sequence=page.base)
        self.control.write(page)
        if self.format.reads_zeros:
            system.port.flush(self.control.fd)  # after a crash of the machine it shows that nothing followed the header
        return page

    def close(self) -> None:
        self._detach()
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
        self.control.close()
