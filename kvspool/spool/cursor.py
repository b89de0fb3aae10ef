"""A position in a spool that moves forward, exactly, over frames and over lost records.

A reader takes no lock. It copies frames out, and each time rereads `head`: bytes before it may have been overwritten during the copy and
are void. So every sequence from the start on is either returned, once and in order, or is in a Gap.

- *overrun*: the position is before `head`. The cursor continues at `head` or, if a fast writer keeps overtaking it, further ahead;
  the first sound frame found there gives the exact lost sequences.
- *damaged*: the bytes at a live position don't match their checksum. The cursor continues at the next sound frame.
- *resized*: the log was made smaller, and the oldest records had no room.
- *machine restart*: sequences that were left out on purpose after a crash of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvspool.engine import cursor
from kvspool.engine.cursor import Make
from kvspool.engine.wakeups import BLIND_POLL, CHANGED, LINKS, SLICE
from kvspool.errors import Closed, LogVanished
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import Batch, RingSleeper
from kvspool.options import Isolation, check_isolation
from kvspool.record import Gap, Record
from kvspool.spool import search
from kvspool.spool.format import CONTROL_FILE, SYNCED, SYNCED_SEQ
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.eventloops import LoopWatcher
    from kvspool.engine.wakeups import Watcher
    from kvspool.kernel.frames import FrameReader
    from kvspool.keyed import Keys
    from kvspool.spool.keys import KeyTable
    from kvspool.spool.spool_files import SpoolFiles

T = TypeVar("T", bound=Sized)
AFTER_RECORDS = "machine restart"  # the reason for sequences missing directly after records
BLIND = round(BLIND_POLL * 1e9)  # most ns of a sleep that no writer can end
BATCH = 256  # records copied at once; few, so that a limit or a slow consumer costs little
RUN = 4096  # records that are then copied one by one until the next check whether the log was closed


class RingCursor(cursor.Cursor):
    """Moves a FrameReader over the log.

    `end` is the end of a bounded read: a position and its sequence; None to continue indefinitely. `count_gap` is called for each Gap. With
    the isolation "synced" no record is read that is not on disk; a Gap may extend past those that are.
    """

    AT_ONCE = BATCH
    files: SpoolFiles = None  # type: ignore[assignment]  # those that it reads: others after a resize

    def __init__(
        self, files: SpoolFiles, start: tuple[int, int], end: tuple[int, int] | None, reason: str, isolation: Isolation = "appended"
    ) -> None:
        self.files = files
        self._is_synced = check_isolation(isolation) == "synced"
        self.count_gap = files.count_gap
        self.reader: FrameReader = files.reader(*start)
        if self._is_synced:
            self.reader.edge = SYNCED
        self.end = end
        self.missed = 0
        self._reason = reason  # of the gap before a later frame than expected
        self._overruns = 0  # in a row

    @property
    def key_table(self) -> KeyTable | None:
        """Return the log's key table, if it has one; see `SpoolFiles.key_table`."""
        return self.files.key_table

    @property
    def sequence(self) -> int:
        return int(self.reader.sequence)

    def go_to(self, sequence: int) -> None:
        """Go to a sequence that was copied already, or to the one after it."""
        self.reader.position, self.reader.sequence = search.find(self.reader, sequence)

    def skip_to(self, sequence: int) -> bool:
        if self.files.is_closed or self.files.may_have_moved:
            return False
        self.go_to(sequence)
        self._overruns, self._reason = 0, AFTER_RECORDS
        return True

    def fetch(self, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        return self.copy_out(self.reader.fetch, most, make, items)

    def copy_out(self, take: Callable[..., list[Any]], most: int, make: Make | None, items: list[Any]) -> Gap | None:
        """Do the work of `fetch` with `take(end, most, make, items)`, which copies frames before the position `end`."""
        table = self.key_table
        if make is None or table is None:
            got = self.advance(take, most, make, items)
        else:
            got = self._copy_with_keys(table.keys, take, most, make, items)
        return got if isinstance(got, Gap) else None

    def _copy_with_keys(self, keys: Keys, take: Callable[..., list[Any]], most: int, make: Make, items: list[Any]) -> list[Any] | Gap:
        """Look keys up now, so that the records can be decoded after the log is closed. If the log was recovered meanwhile, copy the
        records again: their indexes may refer to keys that the table has lost.
        """
        got = self.advance(take, most, partial(make, key_table=keys), items)
        while (table := self.key_table) is not None:
            table.look()
            if table.keys is keys and not table.is_outdated:
                break
            keys = table.keys
            if items:
                count = len(items)
                self._put_back(items)
                got = self.advance(self.reader.fetch, count, partial(make, key_table=keys), items)
        return got

    def _put_back(self, items: list[Any]) -> None:
        """Go back to before the copied records, and forget them; also if a signal handler interrupts this."""
        first = items[0].sequence
        try:
            items.clear()
            self.go_to(first)
        except BaseException:
            items.clear()
            self.go_to(first)
            raise

    def advance(self, take: Callable[..., T], *rest: Any) -> T | Gap:
        """Return the result of `take(end, *rest)` without blocking; a Gap instead; an empty result if there is no record."""
        if self.files.is_closed:
            raise Closed(f"{self.files.path} was closed; open it again")
        while True:
            end = self.reader.edge_now() if self.end is None else self.end[0]
            taken = take(end, *rest)
            if len(taken):
                self._overruns = 0
                self._reason = AFTER_RECORDS
                return taken
            stop = self.reader.stop
            if stop == frames.FULL or (stop == frames.END and not self._ends_short()):
                if stop == frames.END and self._moves_on(end):
                    continue
                return taken
            gap = self._pass_over(stop, self.reader.tail() if self.end is None else end)
            if gap is not None:
                self.missed += gap.count
                self.count_gap()
                return gap

    def overrun_reason(self) -> str:
        """Return why the frames at the cursor's position are lost."""
        return "overrun"

    def _ends_short(self) -> bool:
        """Return whether a bounded read has reached its end without the sequences that should be before it: they are lost."""
        return self.end is not None and self.reader.position >= self.end[0] and self.reader.sequence < self.end[1]

    def _moves_on(self, end: int) -> bool:
        """At the end of the records: return whether there may be more, because the log was resized.

        The old files are first read to their end, or to the end of their records on disk: in the new files all of them are. A bounded read
        ends there, since the old memory no longer changes.
        """
        reader = self.reader
        if self.end is not None or reader.closed or not self.files.may_have_moved:
            return False
        if reader.tail() != end and not self._is_synced:
            return True  # appended before the resize, after our last check
        successor = self.files.successor()
        if successor is None:
            return False
        position, _ = search.find(successor.reader(0, 0), reader.sequence)
        _, ring, control = successor.memory
        reader.move(ring, control, successor.seed, position, reader.sequence)
        self.files = successor
        self.count_gap = successor.count_gap
        self._reason = "overrun"
        return True

    def _pass_over(self, stop: int, end: int) -> Gap | None:
        """Move past unreadable bytes; return the Gap if the lost sequences are known by now."""
        reader = self.reader
        if self.end is not None and stop == frames.END:
            return self._skip_to(self.end)
        if stop == frames.JUMPED:
            return self._gap_to(reader.sequence_found)
        if stop == frames.OVERRUN:
            self._reason = self.overrun_reason()
            return self._catch_up()
        self._reason = "damaged"
        least, most = reader.sequence, reader.mark()[1] - 1
        found = reader.find_frame(reader.position + 8, end, least, most)
        if reader.head() > reader.position:
            return None  # overrun meanwhile: the next call reports it
        if found < end:
            reader.position = found
            return None
        if self.end is not None:
            return self._skip_to(self.end)
        place = reader.mark()[:2]
        # Records appended meanwhile are after the damage: check again, there is a sound frame now.
        return self._skip_to(place) if place[0] == end else None

    def _catch_up(self) -> Gap | None:
        """After an overrun: move to a position that the writer doesn't overwrite. First the head; while that is overrun too, ever further
        ahead.
        """
        reader = self.reader
        head, tail = reader.head(), reader.tail()
        self._overruns += 1
        if self.end is not None and head >= self.end[0]:
            return self._skip_to(self.end)
        if self._overruns == 1:
            reader.position = head
            return None
        if self._overruns < 8:
            block = (head + (tail - head) * self._overruns // 8) % reader.capacity >> frames.BLOCK
            position = reader.entry(block)[0]
            if head < position < (tail if self.end is None else self.end[0]):
                reader.position = position
                return None
        place = reader.mark()[:2]
        return self._skip_to(place if self.end is None or place < self.end else self.end)

    def _skip_to(self, place: tuple[int, int]) -> Gap | None:
        self.reader.position = place[0]
        return self._gap_to(place[1])

    def _gap_to(self, sequence: int) -> Gap | None:
        """Expect `sequence` next; return the Gap before it, if there is one."""
        first, self.reader.sequence = self.reader.sequence, sequence
        if sequence <= first:
            return None
        return Gap(first, sequence - 1, self._why(sequence), str(self.files.path))

    def _why(self, sequence: int) -> str:
        """Return the reason of a Gap that ends before `sequence`."""
        is_overrun = self._reason in ("overrun", "expired")
        return "resized" if is_overrun and sequence == self.reader.word(frames.KEPT) else self._reason

    def close(self) -> None:
        self.reader.close()

    def next_batch(self, most: int, coded: bool, room: int) -> Any:
        from kvspool.spool import gathering

        return gathering.next_batch(self, most, coded, room)

    # For iterations, and readers of several logs at once.

    def run(self, batch: Batch, make: Make | None) -> None:
        if make is None or (make is Record and self.key_table is None):
            batch.run(self.reader, frames.NOTHING if self.end is None else self.end[0], RUN, make)

    def waiter(self, spin: float) -> RingWaiter:
        return RingWaiter(self, spin)

    @property
    def frames(self) -> FrameReader:
        return self.reader

    @property
    def is_plain(self) -> bool:
        return self.end is None and self.key_table is None and not self._overruns and self._reason == AFTER_RECORDS

    def watch(self, watcher: Watcher | LoopWatcher, key: object) -> None:
        watcher.watch(self.files.path / CONTROL_FILE, CHANGED | LINKS, key)

    def ask(self) -> None:
        if self.files.can_ask:
            self.reader.request_wake_up(frames.WATCHES)

    @property
    def is_rung(self) -> bool:
        return self.files.can_ask

    def refuse_vanished(self) -> None:
        """Raise LogVanished if the log's files were deleted, Closed if they were closed."""
        refuse_vanished(self.files)

    def has_vanished(self) -> bool:
        return self.files.has_vanished()


class RingWaiter(Handle):
    """Sleeps on the word `rings` of a spool, or polls for the first `spin` seconds."""

    def __init__(self, cursor: RingCursor, spin: float) -> None:
        self._cursor = cursor
        self._reader = cursor.reader
        self._spin = spin

    def fetch(self, seconds: float, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        spin, ns = self._polling(seconds), round(seconds * 1e9)

        def take(end: int, most: int, make: Make | None, items: list[Any]) -> list[Any]:
            return self._reader.sleep_and_fetch(end, spin, SLICE, ns, BLIND, most, make, items)

        gap = self._cursor.copy_out(take, most, make, items)
        if gap is None and not items:
            self._cursor.refuse_vanished()
        return gap

    def park(self, batch: Batch, seconds: float) -> None:
        if self._cursor.key_table is None:
            sleeper = RingSleeper(self._reader, self._cursor.files, self._polling(seconds), SLICE, BLIND)
            batch.park(sleeper, round(seconds * 1e9), BATCH, Record)

    def _polling(self, seconds: float) -> int:
        return round(min(self._spin, seconds) * 1e9)

    def unpark(self) -> None:
        """Do nothing: the sleeper moves the cursor with each record."""

    def wake(self) -> None:
        self._reader.wake()

    def close(self) -> None:
        """Do nothing: the cursor has the memory."""


def refuse_vanished(files: SpoolFiles) -> None:
    """Raise LogVanished if the log's files were deleted, Closed if they were closed."""
    if files.has_vanished():
        raise LogVanished(f"{files.path} was deleted or replaced while it was open; open it again if it exists")


def end_of(reader: FrameReader, isolation: Isolation) -> search.Place:
    """Return the place after the last present record; with the isolation "synced", after the last one on disk."""
    tail, next_sequence, _ = reader.mark()
    synced = reader.word(SYNCED_SEQ)
    if check_isolation(isolation) == "appended" or synced >= next_sequence:
        return tail, next_sequence
    return search.find(reader, synced)
