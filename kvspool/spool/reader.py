"""A durable reader: a name, and a position in the log that outlives the process.

A reader is open only once at a time: it holds the lock of its slot, on its own descriptor, which the kernel frees when the process ends.
Its position moves with each record and Gap that it returns. `commit` stores it, in two alternating records, so that after a crash it is
either the previous or the new one.

**Durability.** A stored commit survives a crash of any process. A crash of the machine may restore an earlier commit, unless the log was
synced since: records are then read again, never skipped.

**After a crash of the machine** the log may be cut off or rewritten at a position. So a position counts only if the frame there has the
committed sequence; otherwise the sequence is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import Closed, Corruption, NoSuchReader, OutOfRange, Pinned, ReaderBusy, SpoolFull, TooManyReaders
from kvspool.kernel import frames_py as frames
from kvspool.kernel import machine
from kvspool.options import Isolation, Start
from kvspool.reader import Lag, Reader, ReaderStats
from kvspool.spool import format, search, slots, views
from kvspool.spool.cursor import RingCursor, end_of
from kvspool.system import forks
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.kernel.frames import FrameReader
    from kvspool.spool.search import Place
    from kvspool.spool.spool_files import SpoolFiles

AFTER_DEATH = 50  # polls, 2 ms apart, of a lock whose holder has ended


class SpoolReader(Reader):
    """A durable reader of a spool.

    In a forked child it is opened again on use, from the last commit. That fails with ReaderBusy while the parent has it open.
    """

    HELPERS = frozenset(("may_wait_for",))
    _slots: slots.Slots
    _slot: slots.Slot
    _committed: format.Commit
    _slot_files: SpoolFiles  # with the slot, and the position of `_known`
    _known: Place  # the reader's, or an earlier one of its cursor

    def __init__(
        self, live: Callable[[], SpoolFiles], name: str, start: Start, timeout: float, isolation: Isolation = "appended"
    ) -> None:
        super().__init__(name, isolation)
        self._raw_name = slots.encode_name(name)
        self._live = live
        self._start = start
        self._timeout = timeout
        self._file: Descriptor | None = None
        self._process = -1  # that took the lock
        self._attach()
        forks.register(self)

    @property
    def committed(self) -> int:
        return self._committed.sequence

    # Reading.

    def _cursor(self, end: int | None) -> RingCursor:
        cursor = _Cursor(self._files(), self._place(), None, self)
        if end is not None:
            cursor.end = search.find(cursor.reader, end)
        return cursor

    def _end(self) -> int:
        return end_of(self._files().reader(0, 0), self.isolation)[1]

    def _view(self, cursor: Any) -> AbstractContextManager[memoryview]:
        return views.view(cursor)

    def _note(self, cursor: Any) -> None:
        if cursor.files is self._slot_files:
            self._known = cursor.reader.position, cursor.reader.sequence

    def _place(self) -> Place:
        """Return the place of the reader's position."""
        turn = None if self._turn is None else self._turn()
        if turn is not None and turn.cursor.sequence == self._sequence:
            self._note(turn.cursor)
        if self._known[1] != self._sequence:
            self._known = search.onward(self._slot_files.reader(0, 0), self._known, self._sequence)
        return self._known

    def may_wait_for(self, sequence: int) -> bool:
        """Return whether writers had to keep the record `sequence` for this reader."""
        return bool(self._live().header.policy) and sequence >= self._committed.sequence

    # Moving.

    def _find(self, start: Start) -> int:
        self._known = self._place_of(self._files(), start)
        return self._known[1]

    def _place_of(self, files: SpoolFiles, start: Start) -> Place:
        reader = files.reader(0, 0)
        return end_of(reader, self.isolation) if start == "latest" else search.find(reader, start)

    def _lag(self) -> Lag:
        return measure(self._slot_files.reader(0, 0), self._place())

    def _store(self) -> None:
        if self.fence is None:
            self._store_everywhere()
            return
        self.fence()
        self._store_everywhere()
        self.fence()  # otherwise it was stored in a slot that no reader uses any more; see `displace`

    def _store_everywhere(self) -> None:
        files = self._slot_files
        self._store_in(files)
        machine.fence()
        while files.may_have_moved:
            # A resize may have copied the slot before we stored: wait until it is over, and then check where the log is.
            with self._appending():
                pass
            before, files = files, self._files()
            if files is before:
                break
            self._store_in(files)

    def _store_in(self, files: SpoolFiles) -> None:
        """Store the reader's position in its slot in these files."""
        place = self._place()
        if not files.header.policy:
            self._committed = self._slot.move(place, system.port.now(), self._committed)
        elif place[0] < self._committed.position or self._slot.is_evicted(self._committed):
            # No writer may overwrite anything meanwhile, and all must reread the slots afterwards.
            with self._appending():
                self._slots.announce()
                self._committed = self._slot.move(place, system.port.now(), self._committed)
        else:
            before = self._committed
            self._committed = self._slot.move(place, system.port.now(), before)
            machine.fence()
            if self._slot.is_evicted(before):
                # A writer has just evicted the reader, and may not have seen this commit.
                with self._appending():
                    self._slots.announce()

    # Opening and closing.

    def _check_open(self) -> None:
        self._files()

    def _files(self) -> SpoolFiles:
        """Return the open files; in a forked child, take the slot again first."""
        if self._is_closed:
            raise Closed(self._closed_words())
        if self._file is not None and self._process != system.port.process_id():
            self.forked()  # a raw fork without notification
        if self._file is None:
            self._attach()
        files = self._live()
        if files is not self._slot_files:
            self._move(files)
        return files

    def _move(self, files: SpoolFiles) -> None:
        """Continue in the log's files after a resize. The slot has the same number there, and the same lock."""
        all_slots = slots.Slots(files.control, files.header.log_id)
        slot = all_slots.slot(self._slot.number)
        self._committed = slot.commit()
        self._slots, self._slot = all_slots, slot
        self._known = search.find(files.reader(0, 0), self._sequence)[0], self._sequence
        self._slot_files = files
        self._turn = None

    def _attach(self) -> None:
        """Take the slot and its lock, and move to the committed position."""
        with administering(self._live, self._timeout) as admin:
            files = admin.files
            self._slots = slots.Slots(files.control, files.header.log_id)
            slot = self._slots.find(self._raw_name)
            if slot is not None:
                admin.lock(slot)
                self._committed = slot.commit()
                self._known = resume(files.reader(0, 0), self.name, self._committed)
                slot.sign()
            else:
                slot = admin.lock_free(self._slots)
                slot.sign()
                self._take(files, admin.file, slot)
            self._slot = slot
            self._slot_files = files
            self._sequence = self._known[1]
            self._process = system.port.process_id()
            self._file = admin.keep()

    def _take(self, files: SpoolFiles, file: Descriptor, slot: slots.Slot) -> None:
        """Assign a free slot to this reader. If writers wait for readers, none may overwrite anything meanwhile."""
        with _appending(files, file, self._timeout) if files.header.policy else nullcontext():
            self._known = self._place_of(files, self._start)
            if files.header.policy:
                self._slots.announce()
            self._committed = slot.take(self._raw_name, self._known, system.port.now())

    @contextmanager
    def _appending(self) -> Iterator[None]:
        files = self._files()
        assert self._file is not None
        with _appending(files, self._file, self._timeout):
            yield

    def _release(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        self._turn = None
        if file is not None:
            locks.give_back(file, self._process)

    def forked(self) -> None:
        """In a forked child: the lock is the parent's; only our copy of its descriptor goes."""
        self._release()

    def __del__(self) -> None:
        self._release()


class _Cursor(RingCursor):
    """A cursor that knows whether the writers should have waited for it."""

    def __init__(self, files: SpoolFiles, place: Place, end: Place | None, owner: SpoolReader) -> None:
        super().__init__(files, place, end, "overrun", owner.isolation)
        self._owner = owner

    def overrun_reason(self) -> str:
        return "expired" if self._owner.may_wait_for(self.sequence) else "overrun"


class Admin(Handle):
    """A descriptor that holds the admin lock, and further locks."""

    def __init__(self, files: SpoolFiles, file: Descriptor) -> None:
        self.files = files
        self.file = file
        self.fd = file.number
        self.is_kept = False

    def lock(self, slot: slots.Slot) -> None:
        """Take the lock of a reader's slot. Raises ReaderBusy.

        A killed process may hold it for a moment longer, while another process reads its descriptors in /proc.
        """
        for _ in range(AFTER_DEATH):
            if system.port.try_lock(self.fd, format.READER_LOCKS + slot.number):
                return
            if not slot.has_lost_its_holder:
                break
            system.port.sleep(locks.LONGEST_PAUSE)
        raise ReaderBusy(f"the reader {slot.name!r} of {self.files.path} is open in {slot.holder}")

    def lock_free(self, all_slots: slots.Slots) -> slots.Slot:
        """Return a free slot, locked. Raises TooManyReaders."""
        for slot in map(all_slots.slot, format.SLOTS):
            if not slot.is_taken and system.port.try_lock(self.fd, format.READER_LOCKS + slot.number):
                return slot
        raise TooManyReaders(f"{self.files.path} has {len(format.SLOTS)} durable readers, which is the maximum; delete one")

    def keep(self) -> Descriptor:
        """Return the descriptor with its slot's lock; it stays open."""
        self.is_kept = True
        return self.file


@contextmanager
def administering(live: Callable[[], SpoolFiles], timeout: float) -> Iterator[Admin]:
    """Hold the admin lock for the `with` block, on its own descriptor; meanwhile no process resizes the log that `live` returns."""
    files = live()
    if not files.can_ask:
        raise files.refusal("keep readers in")
    process = system.port.process_id()
    file = files.open_lock()
    admin = Admin(files, file)
    try:
        with locks.held(file, format.ADMIN_LOCK, timeout, lambda: "another process opens or deletes a reader, or resizes the log"):
            admin.files = live()
            admin.files.refuse_elsewhere()  # it was deleted or renamed before we got the lock, and another log may be at its path
            yield admin
    finally:
        if not admin.is_kept:
            locks.give_back(file, process)


@contextmanager
def _appending(files: SpoolFiles, file: Descriptor, timeout: float) -> Iterator[None]:
    with locks.appending(files.append_lock_by(file.number), timeout, lambda: "another process appends", file):
        yield


def resume(reader: FrameReader, name: str, commit: format.Commit) -> Place:
    """Return the present position of a commit."""
    tail, next_sequence, _ = reader.mark()
    if commit.position < reader.head():
        return commit.position, commit.sequence  # overrun: the next read reports the lost records
    if commit.position < tail and reader.sequence_at(commit.position, tail) == commit.sequence:
        return commit.position, commit.sequence
    if (commit.position, commit.sequence) == (tail, next_sequence):
        return tail, next_sequence
    try:
        return search.find(reader, commit.sequence)
    except OutOfRange as error:
        raise Corruption(f"the reader {name!r} is ahead of the log: {error}; delete it, and create a new one") from error


def measure(reader: FrameReader, place: Place) -> Lag:
    """Return the lag of a position."""
    tail, next_sequence, _ = reader.mark()
    position, sequence = place
    if position < reader.head() or position > tail:
        position, first = search.find(reader, "earliest")
        sequence = max(sequence, first)
    found = reader.sequence_at(position, tail) if position < tail else frames.NOTHING
    age = 0.0 if found == frames.NOTHING else max(0.0, (system.port.now() - reader.timestamp) / 1e9)
    return Lag(search.count(reader, sequence, (tail, next_sequence)), max(0, tail - position), age)


def listing(files: SpoolFiles) -> list[ReaderStats]:
    """Return the state of each durable reader, by name."""
    found = []
    for slot in slots.Slots(files.control, files.header.log_id).taken():
        is_open = files.is_locked(format.READER_LOCKS + slot.number)
        commit = slot.newest()
        if commit is None:
            found.append(ReaderStats(slot.name, None, None, 0, is_open, False, True, slot.number))
            continue
        lag = measure(files.reader(0, 0), (commit.position, commit.sequence))
        is_expired = slot.is_evicted(commit)
        found.append(ReaderStats(slot.name, commit.sequence, lag, commit.updated, is_open, is_expired, False, slot.number))
    return sorted(found, key=lambda one: (one.name, one.slot))


def slowest(files: SpoolFiles) -> str:
    """Name the reader for which writers wait; a hint, since all of them may have moved on meanwhile."""
    waited_for = None
    for slot in slots.Slots(files.control, files.header.log_id).taken():
        commit = slot.newest()
        if commit is None:
            return f"the reader {slot.name!r} is damaged (slot {slot.number}); delete it"
        if not slot.is_evicted(commit) and (waited_for is None or commit.position < waited_for[1].position):
            waited_for = slot, commit
    if waited_for is None:
        return "no reader has pending records any more; try again"
    slot, commit = waited_for
    is_open = files.is_locked(format.READER_LOCKS + slot.number)
    pending = measure(files.reader(0, 0), (commit.position, commit.sequence)).records
    return f"the reader {slot.name!r} has {pending} pending records ({f'open in {slot.holder}' if is_open else 'not open'})"


def no_room(files: SpoolFiles, pinned: Pinned | None, waited: str) -> SpoolFull | Pinned:
    """Return the error of a writer that has no room. waited: how long it has waited, in words; pinned: the views in the way."""
    if pinned is not None:
        return Pinned(f"{files.path}: {pinned}{waited and f', and none became free{waited}'}")
    return SpoolFull(f"{files.path} has no room{waited}: {slowest(files)}")


def displace(live: Callable[[], SpoolFiles], name: str, pid: int, timeout: float) -> None:
    """Move a reader to another slot, since the process `pid` holds the lock of its slot, and may be stopped during a store.

    Its fence is closed already. While it holds the lock of the old slot, no other reader gets that slot, so a late store
    changes nothing that counts.
    """
    with administering(live, timeout) as admin:
        files = admin.files
        all_slots = slots.Slots(files.control, files.header.log_id)
        raw_name = slots.encode_name(name)
        old = all_slots.find(raw_name)
        if old is None or old.holder_pid != pid or system.port.try_lock(admin.fd, format.READER_LOCKS + old.number):
            return
        commit = old.commit()
        was_evicted = old.is_evicted(commit)
        new = admin.lock_free(all_slots)
        with _appending(files, admin.file, timeout) if files.header.policy else nullcontext():
            if files.header.policy:
                all_slots.announce()
            new.take(raw_name, (commit.position, commit.sequence), commit.updated)
            if was_evicted:
                new.evict()
            for slot in list(all_slots.taken()):
                if slot.number != new.number and slot.raw_name == raw_name:
                    slot.release()


def delete(live: Callable[[], SpoolFiles], name: str | int, timeout: float) -> None:
    """Free the slot of a reader by name, or by number."""
    with administering(live, timeout) as admin:
        files = admin.files
        all_slots = slots.Slots(files.control, files.header.log_id)
        if isinstance(name, str):
            slot = all_slots.find(slots.encode_name(name))
        else:
            slot = all_slots.slot(name) if name in format.SLOTS else None
        if slot is None or not slot.is_taken:
            _refuse_unknown(files, name)
        admin.lock(slot)
        slot.release()


def _refuse_unknown(files: SpoolFiles, name: str | int) -> NoReturn:
    raise NoSuchReader(f"{files.path} has no durable reader {name!r}")
