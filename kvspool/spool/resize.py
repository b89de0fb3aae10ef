"""Make a log larger or smaller while it is in use.

A file that others have mapped is never shrunk. So a resize creates a new pair next to the old one, copies the records, and exchanges the
two directories atomically. Sequences, timestamps, keys and durable readers stay the same; positions don't.

**Open handles continue in the new pair.** Before the exchange the word `moved` of the old pair is set: it means "check the path". A writer
checks it under the append lock, a reader at the end of the old ring, a durable reader after each commit. The lock file stays the same: the
new directory has a link to it, so that an open reader stays open, and writers of both pairs exclude each other.

**Waiting writers.** Most records are copied while others append; the rest, and other changing data, under the append lock.

**A crash.** Killed before the exchange, a resize leaves the old log unchanged, and a directory under a temporary name; killed after it,
that directory is the old log. The next resize removes it. The new pair is flushed before the exchange, the parent directory after it.

**No append before the flush of the parent directory.** The new pair begins with its word `moved` set, too, and the resize resets it after
that flush. If the flush fails, the resize is done nevertheless: all handles continue in the new files, and it raises NameNotDurable.
Writers that find the word set flush the directory themselves before they append (`SpoolFiles.stay`). So no crash of the machine that
restores the old files can cost a record appended to the new ones.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.reports import Resized
from kvspool.errors import Corruption, NameNotDurable, Poisoned, SpoolFull
from kvspool.kernel import frames_py as frames
from kvspool.kernel import machine
from kvspool.options import DURABILITIES
from kvspool.spool import creation, epochs, format, restored, search, slots
from kvspool.spool.durability import SpoolFlusher
from kvspool.spool.reader import administering
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system import disk, holders
from kvspool.system.descriptor import Descriptor

if TYPE_CHECKING:
    from kvspool.spool.search import Place

BATCH = 256  # records copied at once
NEARLY = 1 << 20  # bytes; at most so many are left to copy while writers wait
ROUNDS = 8  # of copying records appended meanwhile; then writers wait for the rest
_SUFFIX = ".resize"  # of the temporary name
NAMES = frozenset((format.CONTROL_FILE, format.DATA_FILE, format.LOCK_FILE, *creation.PRODUCER_FILES))  # of a spool's files

Progress = Callable[[int, int], None]


def resize(live: Callable[[], SpoolFiles], capacity: int, timeout: float, progress: Progress | None = None) -> Resized:
    """Change the log whose open files `live` returns to a ring of `capacity` bytes; see `kvspool.resize`."""
    # Held open: if a thread closes the handle meanwhile, we keep the files, which show whether the two were exchanged.
    with administering(live, timeout) as admin, admin.files.held_open():
        old = admin.files
        path = Path(os.path.realpath(old.path))
        if not (old.can_write and old.can_ask):
            raise old.refusal("resize")
        if old.reader(0, 0).word(frames.SYNC_ERROR):
            raise Poisoned(f"{path}: an earlier flush to disk failed; copy it to a working disk")
        _refuse_others_files(path)
        remove_leftovers(path)
        log_id = system.port.random(16)
        building = path.with_name(f".{path.name}.{log_id.hex()}{_SUFFIX}")
        try:
            resizing = _build(old, building, log_id, capacity)
            try:
                done = resizing.run(path, admin.file, timeout, progress)
            finally:
                resizing.new.close()
        except BaseException as error:
            if isinstance(error, OSError) and not isinstance(error, NameNotDurable):
                error.add_note(f"while resizing the spool {path} to {capacity} bytes")
            if old.is_in_place():
                creation.discard(building)  # otherwise it is the old log, which the next resize removes
            raise
        creation.discard(building)
        return done


def _refuse_others_files(path: Path) -> None:
    others = set(system.port.names(path)) - NAMES
    if others:
        words = f"the log's directory holds other files ({', '.join(sorted(others)[:3])}); move them away before the resize"
        raise OSError(errno.ENOTEMPTY, words, os.fspath(path))


def remove_leftovers(path: Path) -> None:
    """Under the admin lock: remove the leftovers of a resize that was killed, or whose last flush failed."""
    left = [name for name in system.port.names(path.parent) if _is_leftover(name, path)]
    if left:
        disk.flush_directory(path.parent)  # they may be the old files, and on disk still have the log's name
    for name in left:
        creation.discard(path.parent / name)


@contextmanager
def all_locks(files: SpoolFiles, file: Descriptor, timeout: float) -> Iterator[None]:
    """Hold the locks against all changes of a pair, in the common order. `file` holds the admin lock, and gets the others."""
    with (
        locks.held(file, format.SYNC_LOCK, timeout, lambda: "another process flushes"),
        locks.held(file, format.KEYS_LOCK, timeout, lambda: "another process adds keys"),
        locks.appending(files.append_lock_by(file.number), timeout, lambda: "another process appends", file),
    ):
        yield


def _is_leftover(name: str, path: Path) -> bool:
    log_id = name.removeprefix(f".{path.name}.").removesuffix(_SUFFIX)
    return name == f".{path.name}.{log_id}{_SUFFIX}" and len(log_id) == 32


def _build(old: SpoolFiles, building: Path, log_id: bytes, capacity: int) -> _Resizing:
    """Create the new, empty pair with the permissions and the lock file of the old one."""
    header = old.header._replace(
        control_bytes=format.control_bytes(capacity),
        capacity=capacity,
        log_id=log_id,
        origin=old.origin,
        resizes=old.header.resizes + 1,
    )
    epoch = epochs.newest(old.control, old.header.log_id)
    system.port.make_directory(building, 0o700)
    touched = creation.touchable(capacity) if DURABILITIES[old.header.durability] != "disk" else 0
    creation.fill(building, header, 0o600, None if epoch is None else epoch[1], touched)
    lock_file = format.LOCK_FILE if old.header.resizes else format.CONTROL_FILE
    system.port.link(old.path / lock_file, building / format.LOCK_FILE)
    for name in (format.DATA_FILE, format.CONTROL_FILE, ""):
        _give_rights(old.path / name, building / name)
    return _Resizing(old, SpoolFiles(building, allow_unsafe_fs=old.allow_unsafe_fs))


def _give_rights(old: Path, new: Path) -> None:
    """Give a new file or directory the owner and the permission bits of the old one."""
    flags = os.O_RDONLY | (os.O_DIRECTORY if os.path.isdir(old) else 0)
    with Descriptor(os.path.realpath(old), flags) as fd:
        wanted = system.port.status(fd)
    with Descriptor(new, flags) as fd:
        found = system.port.status(fd)
        if (found.st_uid, found.st_gid) != (wanted.st_uid, wanted.st_gid):
            system.port.set_owner(fd, wanted.st_uid, wanted.st_gid)
        system.port.set_mode(fd, wanted.st_mode & 0o7777)
        system.port.flush(fd)


class _Resizing:
    """Copies one pair into another that no other process sees yet."""

    def __init__(self, old: SpoolFiles, new: SpoolFiles) -> None:
        """Begin at the first record that can have room. The new ring begins after position 0: earlier positions are overrun ones."""
        self.old = old
        self.new = new
        self.capacity = new.header.capacity
        self.reader = old.reader(0, 0)
        self.words: Any = new.control.cast("Q")
        self.oldest = search.find(self.reader, "earliest")
        self.reader.position, self.reader.sequence = self._first_place()
        for at in (frames.HEAD, frames.TAIL, frames.MARKS):
            self.words[at] = self.capacity
        for at in (frames.MIN_SEQ, frames.MARKS + 1):
            self.words[at] = self.reader.sequence
        self.writer = new.writer(system.port.random(16) + struct.pack("<4Q", *holders.ours()))
        self.writer.begin()

    def _first_place(self) -> Place:
        """Return the place of a record before which none can have room."""
        tail = self.reader.tail()
        position, sequence = self.oldest
        wanted = tail - self.capacity - (2 << frames.BLOCK)
        if wanted <= position:
            return position, sequence
        found, number, _ = self.reader.entry(wanted % self.reader.capacity >> frames.BLOCK)
        if position < found < tail - self.capacity and self.reader.sequence_at(found, tail) == number:
            return found, number
        return position, sequence

    def run(self, path: Path, file: Descriptor, timeout: float, progress: Progress | None) -> Resized:
        """Copy, and exchange the two. `file` holds the admin lock, and gets the others."""
        for _ in range(ROUNDS):
            self._copy(progress)
            if self.reader.tail() - self.reader.position <= NEARLY:
                break
        self._flush()
        with self._all_locks(file, timeout):
            old_words = self.old.control.cast("Q")
            try:
                old_words[frames.MOVED] = 1
                # From now on a durable reader checks the path after a commit; earlier commits are copied.
                machine.fence()
                done = self._finish(progress)
                self._refuse_older()
                system.port.exchange(self.new.path, path)
            except BaseException:
                if self.old.is_in_place():
                    old_words[frames.MOVED] = 0
                raise
            self.reader.rouse()  # all readers wake and sleep again on the new one
            self.old.wake()
            disk.flush_directory(path.parent, done=f"{path} was resized to {self.capacity} bytes")
            self.words[frames.MOVED] = 0
        return done

    def _all_locks(self, file: Descriptor, timeout: float) -> AbstractContextManager[None]:
        return all_locks(self.old, file, timeout)

    def _copy(self, progress: Progress | None) -> None:
        """Copy the present records. If a record was overwritten before we reached it, all earlier ones are lost, too."""
        reader, writer = self.reader, self.writer
        end = reader.tail()
        while True:
            if progress is not None:
                progress(reader.position, end)
            reader.fetch(end, BATCH, writer.put_copy)
            if reader.stop == frames.END:
                break
            if reader.stop == frames.JUMPED:
                reader.sequence = reader.sequence_found  # numbers that were left out; `put_copy` leaves them out, too
            elif reader.stop == frames.OVERRUN:
                self._begin_again()
            elif reader.stop == frames.DAMAGED:
                raise Corruption(f"{self.old.path} is damaged at record {reader.sequence}: a resize would lose salvageable records")
        writer.publish()

    def _begin_again(self) -> None:
        """Continue at the present oldest record; all copied records are older than it, and no longer in the log."""
        self.writer.publish()
        self.oldest = search.find(self.old.reader(0, 0), "earliest")
        self.reader.position, self.reader.sequence = self.oldest
        self.words[frames.HEAD] = self.words[frames.TAIL]
        self.words[frames.MIN_SEQ] = self.oldest[1]

    def _finish(self, progress: Progress | None) -> Resized:
        """Under all locks: copy the rest and other changing data, and flush it."""
        self._copy(progress)
        old, new = self.old, self.new
        tail, next_sequence, timestamp = old.reader(0, 0).mark()
        at = frames.MARKS if self.words[frames.MARKS] == self.words[frames.TAIL] else frames.MARKS + frames.MARK_WORDS
        self.words[at + 1], self.words[at + 2] = next_sequence, timestamp
        reader = new.reader(0, 0)
        first, kept = search.find(old.reader(0, 0), "earliest")[1], search.find(reader, "earliest")[1]
        if kept > first:
            self._refuse_unread(first, kept)
            self.words[frames.DROPPED], self.words[frames.KEPT] = first, kept
        elif old.reader(0, 0).word(frames.KEPT) == kept:
            for word in (frames.DROPPED, frames.KEPT):
                self.words[word] = old.reader(0, 0).word(word)
        if old.key_table is not None and new.key_table is not None:
            old.key_table.copy_to(new.key_table)
        new.control[format.RATES_AT : format.SLOTS_AT] = old.control[format.RATES_AT : format.SLOTS_AT]
        self._copy_slots(reader, kept)
        old.copy_producers(new)
        self.words[frames.MOVED] = 1  # until the directory is on disk
        self._flush()
        return Resized(str(old.path), old.header.capacity, self.capacity, next_sequence - kept, max(0, kept - first))

    def _refuse_older(self) -> None:
        """Raise Corruption if spool.ctl was restored from an older copy meanwhile: records after its tail would be lost."""
        if restored.is_older(self.old.front, self.old.control):
            older = f"{self.old.path / format.CONTROL_FILE} is older than the data: it was restored from a copy during the resize"
            raise Corruption(f"{older}; nothing was changed: open the log again, which recovers it, and then resize it")

    def _refuse_unread(self, first: int, kept: int) -> None:
        """Raise SpoolFull if the policy keeps records without room for a durable reader."""
        if not self.old.header.policy:
            return
        for slot in slots.Slots(self.old.control, self.old.header.log_id).taken():
            commit = slot.newest()
            if commit is None or (commit.sequence < kept and not slot.is_evicted(commit)):
                left = f"{kept - max(first, commit.sequence)} pending records" if commit is not None else f"a damaged slot ({slot.number})"
                raise SpoolFull(
                    f"{self.old.path} has no room in {self.capacity} bytes: the reader {slot.name!r} has {left} before record {kept}"
                )

    def _copy_slots(self, reader: Any, kept: int) -> None:
        """Copy every durable reader's slot, its newest commit at the new position of its record."""
        next_sequence = reader.mark()[1]
        ours = slots.Slots(self.new.control, self.new.header.log_id)
        for slot in slots.Slots(self.old.control, self.old.header.log_id).taken():
            commit = slot.newest()
            place = (0, 0)
            if commit is not None:
                position = 0 if commit.sequence < kept else search.find(reader, min(commit.sequence, next_sequence))[0]
                place = position, commit.sequence
            ours.slot(slot.number).adopt(slot, commit, place)

    def _flush(self) -> None:
        """Flush the new pair."""
        try:
            SpoolFlusher(self.new).flush_alone()
        except Poisoned as error:  # not of the log, but of its replacement
            raise error.__cause__ or error from None
