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

from kvspool import system
from kvspool.engine.iteration import Iteration, check_spin, check_timeout
from kvspool.engine.wakeups import CHANGED, LINKS, POLL
from kvspool.errors import Closed, LogVanished
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import RingSleeper
from kvspool.options import Isolation, OnGap, check_isolation
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
BATCH = 256  # records copied at once; few, so that a limit or a slow consumer costs little
RUN = 4096  # records that are then copied one by one until the next check whether the log was closed


class Cursor(Handle):
    """Moves a FrameReader over the log, and converts unreadable parts into Gaps.

    `end` is the end of a bounded read: a position and its sequence; None to continue indefinitely. `missed` counts the sequences that were
    in Gaps; `count_gap` is called for each Gap. With the isolation "synced" no record is read that is not on disk; a Gap may extend past
    those that are.
    """

    def __init__(
        self, files: SpoolFiles, start: tuple[int, int], end: tuple[int, int] | None, reason: str, isolation: Isolation = "appended"
    ) -> None:
        self.files = files  # others after a resize
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
        """Return the sequence that comes next."""
        return int(self.reader.sequence)

    def go_to(self, sequence: int) -> None:
        """Go to a sequence that was copied already, or to the one after it."""
        self.reader.position, self.reader.sequence = search.find(self.reader, sequence)

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
        """Release the memory."""
        self.reader.close()

    # Iterations, also of readers of several logs at once.

    def reading(self, make: Callable[..., Any] | None, limit: int | None = None, on_gap: OnGap = "yield") -> Reading:
        """Return an iteration over the records up to the cursor's end, made by `make`; None: the values alone."""
        return Reading(self, limit, on_gap, make)

    def following(self, limit: int | None, on_gap: OnGap, timeout: float | None, spin: float) -> Following:
        """Return an iteration that waits for more."""
        return Following(self, limit, on_gap, check_timeout(timeout), spin=spin)

    @property
    def frames(self) -> FrameReader | None:
        """Return the reader of frames, which can check whether there may be more."""
        return self.reader

    @property
    def is_plain(self) -> bool:
        """Return whether only the next record is expected, so that a follower may let `frames` fetch it."""
        return self.end is None and self.key_table is None and not self._overruns and self._reason == AFTER_RECORDS

    def watch(self, watcher: Watcher | LoopWatcher, key: object) -> None:
        """Let the watcher wake when a writer of this log rings, or its files are removed."""
        watch(watcher, self.files, key, LINKS)

    def ask(self) -> None:
        """Ask the next writer to wake the watchers. Check once more after this and before sleeping."""
        ask(self)

    @property
    def is_rung(self) -> bool:
        """Return whether writers can be asked; otherwise the caller has to poll."""
        return self.files.can_ask

    def refuse_vanished(self) -> None:
        """Raise LogVanished if the log's files were deleted, Closed if they were closed."""
        refuse_vanished(self.files)

    def has_vanished(self) -> bool:
        """Return whether the log's files were deleted."""
        return self.files.has_vanished()


class Reading(Iteration[Cursor]):
    """Iterates over the present records of a spool, or over those before the cursor's end."""

    AT_ONCE = BATCH

    def __init__(self, cursor: Cursor, limit: int | None, on_gap: OnGap, make: Callable[..., Any] | None = Record) -> None:
        super().__init__(cursor, limit, on_gap)
        table = cursor.key_table
        self._make = self._make_bare = make
        self._keys: Keys | None = None
        if table is not None and make is not None:
            self._use(table.keys)
        self._reader = cursor.reader

    @property
    def is_at_edge(self) -> bool:
        """Return whether there is no record to read now."""
        return self._reader.position >= self._reader.word(self._reader.edge)

    def _next_batch(self, most: int) -> list[Any]:
        """Return the result of `_fetch`; after records, the next ones are fetched without a Python step between them."""
        self._batch.rise()
        batch = self._fetch(most)
        if batch and not isinstance(batch[0], Gap):
            self._run()
        return batch

    def _run(self) -> None:
        """Let the batch fetch the next records alone, if they need nothing else."""
        if self._make is None or self._make is Record:
            end = frames.NOTHING if self.cursor.end is None else self.cursor.end[0]
            self._batch.run(self._reader, end, RUN, self._make)

    def _fetch(self, most: int) -> list[Any]:
        return self._take(self._reader.fetch, most, self._make)

    def _take(self, take: Callable[..., list[Any]], *rest: Any) -> list[Any]:
        """Return the records copied by `take(end, *rest, batch)`, or a Gap. They wait in the batch: a signal handler may raise before they
        are returned, and then the next call continues with them.
        """
        items = self._batch.clear()
        got = self.cursor.advance(take, *rest, items)
        if self._keys is not None:
            got = self._with_keys(got, items)
        return [got] if isinstance(got, Gap) else items

    def _use(self, keys: Keys) -> None:
        """Set the key table of the next records."""
        self._keys = keys
        self._make = partial(self._make_bare or Record, key_table=keys)

    def _with_keys(self, got: list[Any] | Gap, items: list[Any]) -> list[Any] | Gap:
        """Look keys up now, so that the records can be decoded after the log is closed. If the log was recovered meanwhile, copy the
        records again: their indexes may refer to keys that the table has lost.
        """
        while (table := self.cursor.key_table) is not None:
            table.look()
            if table.keys is self._keys and not table.is_outdated:
                break
            self._use(table.keys)
            if items:
                first, count = items[0].sequence, len(items)
                items.clear()
                self.cursor.go_to(first)
                got = self.cursor.advance(self._reader.fetch, count, self._make, items)
        return got


class Following(Reading):
    """Reads like Reading, and sleeps on the word `rings` if there is no record; ends after `timeout` seconds without one.

    timeout: None: never. spin: seconds to poll before sleeping: that uses a core, and saves the wake-up.
    """

    def __init__(
        self,
        cursor: Cursor,
        limit: int | None,
        on_gap: OnGap,
        timeout: float | None,
        make: Callable[..., Any] | None = Record,
        spin: float = 0.0,
    ) -> None:
        super().__init__(cursor, limit, on_gap, make)
        self._timeout = timeout
        self._spin = check_spin(spin)

    def _next_batch(self, most: int) -> list[Any]:
        """Return the next records as soon as there are any; nothing after the timeout, or after another thread has closed the iteration."""
        dozed = self._batch.rise()
        self.waker = self._reader  # for another thread that closes the iteration from here on
        batch = self._fetch(most)
        if not batch and dozed and not self.is_over:
            refuse_vanished(self.cursor.files)
        deadline = None if batch or self._timeout is None else system.port.monotonic() + self._timeout - dozed / 1e9
        while not batch and not self.is_over:
            left = POLL if deadline is None else min(POLL, deadline - system.port.monotonic())
            if left <= 0:
                break
            batch = self._take(self._reader.sleep_and_fetch, round(min(self._spin, left) * 1e9), round(left * 1e9), most, self._make)
            if not batch and not self.is_over:
                refuse_vanished(self.cursor.files)
        if batch and not isinstance(batch[0], Gap):
            self._park()
        return batch

    def _park(self) -> None:
        """Let the next records be fetched without a Python step between them, if they need nothing else."""
        if self._make is Record:
            longest = POLL if self._timeout is None else min(POLL, self._timeout)
            sleeper = RingSleeper(self._reader, self.cursor.files, round(min(self._spin, longest) * 1e9))
            self._batch.lie_down(sleeper, round(longest * 1e9), BATCH, Record)


def watch(watcher: Watcher | LoopWatcher, files: SpoolFiles, key: object, more: int = 0) -> None:
    """Let the watcher wake when a writer of this log rings, and for `more` events of its file."""
    watcher.watch(files.path / CONTROL_FILE, CHANGED | more, key)


def ask(cursor: Cursor) -> None:
    """Ask the next writer to wake the watchers by inotify. Check once more after this and before sleeping."""
    if cursor.files.can_ask:
        cursor.reader.ask_for_bell(frames.WATCHES)


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
