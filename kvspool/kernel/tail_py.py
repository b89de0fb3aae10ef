"""The tail of a journal: its end, in memory that its writers share, and the append of one record there as one step.

The words contain the end of the last segment, the next sequence, and the latest timestamp. There are two copies, and `COUNT` names the
valid one; so they change together, whatever instruction a writer is killed at. The checksum of a copy includes the boot of the machine and
the inode number of the file: a restored or foreign copy is invalid. A copy also contains the synced sequence. The words of a group commit
(`group_py`) follow the copies.

Under the append lock (`lock_py`), an append goes the short way only if

- the end is stored here, and not in the lock file's page (`ELSEWHERE`): any operation but the short append marks that here first;
- no writer was killed during an append (`WRITING`), and no write failed;
- the segment is the one that this handle has open: it ends where the words say, its path leads to it, and the lock file has a name. These
  checks cost more than the write. So in a series of appends without a `pause` they count for a while (`fresh`);
- the record fits into the segment, so that no new one begins.

Otherwise it returns `SLOW`, and nothing counts as done: the long way (`journal.appender`) determines the state. The same happens if the
write fails, or is cut short: the long way cuts off torn bytes, and tries again, with all its errors.

**A flush** concerns the last segment, since earlier ones are on disk. Its leader stores the end of the journal (`begin_flush`), flushes
without the append lock, and then stores the synced sequence in the copy (`end_flush`), under that lock. That is valid only if the journal's
end has not moved back meanwhile (`REWINDS`): other records may have got the same sequences. An error is stored in `ERROR` at once, without
a lock: from then on no append goes the short way. A writer that has not mapped the words changes `ERROR`, `REWINDS` and the `CHECK` of both
copies by `pwrite`.

This source is also compiled, like `frames_py`.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import kvspool.kernel.fflg_py as fflg
import kvspool.kernel.fixed_py as fixed
import kvspool.kernel.group_py as group
import kvspool.kernel.kvj_py as kvj
import kvspool.kernel.machine as native
import kvspool.kernel.network as network
import kvspool.kernel.sej_py as sej
from kvspool.errors import Closed
from kvspool.system.handles import refuse_copy

# Words of the memory.
LOCK = 0  # the append lock
COUNT = 1  # bit 0: ELSEWHERE; bit 1: WRITING; bit 2: the valid copy; increased by STEP with every change of them
HOLDER = 2  # the last writer: four words, see `holders`
HOLDER_WORDS = 4
ERROR = 6  # low half: errno of the first failed flush; high half: its checksum; 0: none
REWINDS = 7  # how often the journal's end may have moved back
COPIES = 8  # two of them
COPY_WORDS = 8
BASE, END, NEXT, LATEST, SYNCED, CHECK = 0, 1, 2, 3, 4, 5  # words of a copy; LATEST is a timestamp, and so signed
GROUP = 24  # of waiters for a flush
LEADER = 28  # the process that led the last flush: as HOLDER
WORDS = 32

ELSEWHERE, WRITING = 1, 2
STEP = 4
LOW = 0xFFFFFFFF  # the low half of a word
WORD = 0xFFFFFFFFFFFFFFFF
HIGH = 0xFFFFFFFF00000000  # set in CHECK, so that no word of zeros is valid

SLOW, BUSY = -1, -2  # results of `append` instead of a sequence, and of a flush instead of 0
KVJ, SEJ, FFLG, FIXED = 1, 2, 3, 4  # formats
LARGEST = 1 << 20  # bytes of a value; a larger one takes the long way
MOST = 0xFFFFFFFFFFFFFF00  # sequences from here on take the long way
SMALL = 64  # more bytes than the head and tail of any frame
LONGEST_KEY = 127  # bytes, which fit into every format with keys; a longer one takes the long way in sej
LONGEST_KVJ_KEY = 65534


def error_word(seed: int, error: int) -> int:
    """Return the word for a failed flush with this errno; 0 for none."""
    if error == 0:
        return 0
    state = native.crc32c_head(seed, error, 0, 0, 0)
    return error | state << 32


def error_in(seed: int, word: int) -> int:
    """Return the errno in a result of `error_word`; 0 for any other word."""
    error = word & LOW
    return error if word == error_word(seed, error) else 0


class Tail(group.Progress):
    """The tail of one journal, for one handle. Threads that share it exclude each other."""

    def __init__(self, memory: memoryview, lock: Any, lock_fd: int, seed: int, holder: memoryview, fresh: int, pause: int) -> None:
        """Use writable memory of `WORDS` words, of which `lock`, an AppendLock, has the first.

        lock_fd: the journal's lock file. seed: of the checksums; it identifies this memory. holder: the words that name this process.
        fresh, pause: ns for which a check of the names counts, and the most between two of the appends for which it does.
        """
        if len(memory) < 8 * WORDS or not native.is_writable(memory) or len(holder) != 8 * HOLDER_WORDS:
            raise ValueError(f"the tail of a journal is {8 * WORDS} writable bytes, and its holder {8 * HOLDER_WORDS}")
        self.owner: Any = memory
        self.data: Any = native.bytes_at(memory)
        self.words: Any = native.words_at(memory)
        self.lock = lock
        self.lock_fd = lock_fd
        self.seed = seed
        self.holder_owner: Any = holder
        self.holder: Any = native.words_at(holder)
        self.guard: Any = threading.RLock()  # of the threads that share this handle, for the interpreted twin
        self.process = native.process_id()
        self.fresh = fresh
        self.pause = pause
        self.room = bytearray(512)
        self.is_busy = False
        self.format = 0
        self.item_bytes = 0
        self.fd = -1  # of the last segment
        self.path = b""
        self.device = 0
        self.number = 0
        self.base = 0
        self.left_at = 0  # when the last append ended
        self.looked_at = 0  # when it was last in place, by the monotonic clock
        self.limit = 0  # bytes that the segment doesn't reach by the short way; 0: there is none
        self.flush_to = 0  # the sequence below which the present flush puts all records on disk
        self.flush_end = 0  # end of the last segment before that
        self.rewinds_seen = 0  # REWINDS when it began
        self.is_open = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    # For the owner of the append lock.

    def attach(self, format: int, item_bytes: int, fd: int, path: bytes, device: int, number: int, base: int, limit: int) -> None:
        """Append to this segment: an open file of a format, with its path and its identity."""
        self.limit = self.looked_at = self.left_at = 0
        self.format = format
        self.item_bytes = item_bytes
        self.fd = fd
        self.path = path
        self.device = device
        self.number = number
        self.base = base
        self.limit = limit

    def detach(self) -> None:
        """Stop appending to the segment, which is about to be closed."""
        self.limit = 0
        self.fd = -1

    def found(self) -> tuple[int, int, int, int, int] | None:
        """Return the base of the last segment, its end, the next sequence, the latest timestamp, and the synced sequence; None if they are
        stored elsewhere.
        """
        if not self.is_open:
            return None
        count = native.load(self.words, COUNT)
        at = self.copy(count)
        if count & ELSEWHERE or not self.is_sound(at):
            return None
        words = self.words
        latest = native.signed(native.load(words, at + LATEST))
        base, end = native.load(words, at + BASE), native.load(words, at + END)
        return base, end, native.load(words, at + NEXT), latest, native.load(words, at + SYNCED)

    def synced(self) -> int:
        """Return the synced sequence according to the words, also if the end is stored elsewhere."""
        if not self.is_open:
            return 0
        at = self.copy(native.load(self.words, COUNT))
        return native.load(self.words, at + SYNCED) if self.is_sound(at) else 0

    def tell_elsewhere(self) -> None:
        """Mark that the page of the lock file counts from now on."""
        if self.is_open:
            native.store(self.words, COUNT, native.load(self.words, COUNT) | ELSEWHERE)

    def note_rewind(self) -> None:
        """Mark that the journal's end may have moved back: earlier flushes don't count until `tell`."""
        if self.is_open:
            native.store(self.words, COUNT, native.load(self.words, COUNT) | ELSEWHERE)
            native.store(self.words, self.copy(native.load(self.words, COUNT)) + CHECK, 0)
            native.store(self.words, REWINDS, (native.load(self.words, REWINDS) + STEP) & WORD)

    def tell(self, base: int, end: int, sequence: int, latest: int, synced: int) -> None:
        """Store the end of the journal, and the synced sequence."""
        if self.is_open:
            word = native.load(self.words, ERROR)
            if word != 0 and self.error() == 0:  # damage, which would keep all writers from the short way
                native.swap(self.words, ERROR, word, 0)
            self.publish(base, end, sequence, latest, synced)

    def rewinds(self) -> int:
        """Return a number that changes, under the append lock, whenever the journal's end may have moved back."""
        return native.load(self.words, REWINDS) if self.is_open else 0

    def is_valid(self) -> bool:
        """Return whether the words are valid, and no append is under way."""
        return self.is_open and native.load(self.words, COUNT) & (ELSEWHERE | WRITING) == 0

    def sign(self, place: int = HOLDER) -> None:
        """Store this process as owner of the append lock, or with LEADER as leader of a flush, for waiters."""
        if self.is_open:
            for at in range(HOLDER_WORDS):
                native.store(self.words, place + at, native.load(self.holder, at))

    def signed_by(self, place: int = HOLDER) -> tuple[int, int, int, int]:
        """Return the words of the process that last signed there; zeros if unknown."""
        if not self.is_open:
            return 0, 0, 0, 0
        words = self.words
        return native.load(words, place), native.load(words, place + 1), native.load(words, place + 2), native.load(words, place + 3)

    # The short way.

    def append(self, value: bytes, key: bytes | None, type: Any, codec: int) -> int:
        """Append one record with the present time, if possible in one step, and return its sequence; otherwise SLOW, or BUSY if another
        handle has the append lock. Then nothing was done that counts.
        """
        if self.limit == 0 or not self.is_open or native.process_id() != self.process:
            return SLOW
        if native.is_one_step():
            return self.append_alone(value, key, type, codec)
        if self.lock.is_taken and not self.is_busy:  # for work of several steps, probably by another thread
            return BUSY
        with self.guard:
            return self.append_alone(value, key, type, codec)

    def append_alone(self, value: bytes, key: bytes | None, type: Any, codec: int) -> int:
        """Do the work of `append`; interpreted, without another thread of this handle meanwhile."""
        if self.is_busy:  # compiled, by another thread; otherwise this is a signal handler during an append
            return BUSY if native.is_one_step() else SLOW
        size = self.most(value, key, type)
        if size < 0:
            return SLOW
        self.is_busy = True
        try:
            return self.append_locked(value, key, type, codec, size) if self.lock.take(self) else BUSY
        finally:
            try:
                self.leave()
            except BaseException:  # from a signal handler, perhaps before the lock was freed
                self.leave()
                raise

    def leave(self) -> None:
        """End an append: free the lock, unless another thread of this handle has it, or the append that this one interrupted."""
        if self.lock.taken_by is self:
            self.lock.free()
        self.is_busy = False

    def most(self, value: bytes, key: bytes | None, type: Any) -> int:
        """Return the most bytes of a record's frame; -1 for one that takes the long way, which may refuse it."""
        if not isinstance(type, int) or not 0 <= type <= 255:
            return -1
        if not native.is_bytes(value) or not (key is None or native.is_bytes(key)):
            return -1
        size = native.length(value)
        if self.format == FIXED and size != self.item_bytes or size > LARGEST:
            return -1
        if self.format != KVJ and self.format != SEJ:
            return -1 if key is not None or type != 0 else SMALL + size
        if key is not None:
            key_size = native.length(key)
            if key_size > (LONGEST_KVJ_KEY if self.format == KVJ else LONGEST_KEY):
                return -1
            size += key_size
        return SMALL + size

    def append_locked(self, value: bytes, key: bytes | None, type: int, codec: int, size: int) -> int:
        count = native.load(self.words, COUNT)
        at = self.copy(count)
        if count & (ELSEWHERE | WRITING) or not self.is_sound(at) or native.load(self.words, at + BASE) != self.base:
            return SLOW
        if native.load(self.words, ERROR) != 0:
            return SLOW
        end = native.load(self.words, at + END)
        sequence = native.load(self.words, at + NEXT)
        latest = native.signed(native.load(self.words, at + LATEST))
        if end >= self.limit or size >= self.limit - end or sequence >= MOST:
            return SLOW
        if not self.is_in_place(end):
            return SLOW
        if size > len(self.room):
            self.room = bytearray(2 * size)
        data = network.room_in(self.room)
        if self.format == KVJ or self.format == SEJ:
            now = native.now()
            if now > latest:
                latest = now
        if self.format == KVJ:
            size = kvj.put(data, 0, sequence, latest, type, codec, key, value)
        elif self.format == SEJ:
            size = sej.put(data, 0, sequence, latest, type, key, value)
        elif self.format == FFLG:
            size = fflg.put(data, 0, value)
        else:
            size = fixed.put(data, 0, self.item_bytes, value)
        self.sign()
        native.store(self.words, COUNT, count | WRITING)
        if not native.write_at(self.fd, self.room, size, end):
            return SLOW
        if not self.is_open:  # by a destructor in another thread: the record is stored, and the next writer finds it
            return sequence
        self.publish(self.base, end + size, sequence + 1, latest, native.load(self.words, at + SYNCED))
        self.left_at = native.monotonic()
        return sequence

    def is_in_place(self, end: int) -> bool:
        """Return whether the segment ends there and is at its path, and the lock file has a name; see `__init__`."""
        now = native.monotonic()
        if now - self.left_at < self.pause and now - self.looked_at < self.fresh and native.is_one_step():
            return True
        if native.size_at(self.path, self.device, self.number) != end or not native.has_name(self.lock_fd):
            return False
        self.looked_at = now
        return True

    # Flushes.

    def look(self, sequence: int) -> int:
        """Return whether every record below `sequence` is on disk, for waiters of a flush; see `Progress`."""
        if not self.is_open:
            raise Closed("the log was closed; open it again")
        at = self.copy(native.load(self.words, COUNT))
        is_done = sequence <= native.load(self.words, at + SYNCED) and self.is_sound(at)
        if self.error() != 0:
            return group.FAILED
        return group.DONE if is_done else group.WAITS

    def begin_flush(self, base: int, path: bytes, device: int, number: int) -> int:
        """Store the goal of a flush of the last segment that begins now: `flush_to`, `flush_end`. Return 0; SLOW if the last segment is not
        the one that begins at `base`, in the file identified by `device` and `number`, at `path`.
        """
        if not self.is_open:
            return SLOW
        self.rewinds_seen = native.load(self.words, REWINDS)
        count = native.load(self.words, COUNT)
        at = self.copy(count)
        # A writer may replace them meanwhile. Each was stored after its records had been written.
        self.flush_to = native.load(self.words, at + NEXT)
        self.flush_end = native.load(self.words, at + END)
        if count & ELSEWHERE or native.load(self.words, at + BASE) != base or not self.is_sound(at):
            return SLOW
        size = native.size_at(path, device, number)
        return SLOW if size < 0 or native.unsigned(size) < self.flush_end else 0

    def end_flush(self) -> bool:
        """Under the append lock: mark the goal of `begin_flush` as on disk. False if that is no longer certain."""
        if not self.is_open or self.error() != 0:  # another flush has failed: for example of a reader, which takes no lock
            return False
        words = self.words
        count = native.load(words, COUNT)
        at = self.copy(count)
        if count & (ELSEWHERE | WRITING) or not self.is_sound(at) or native.load(words, REWINDS) != self.rewinds_seen:
            return False
        if native.load(words, at + SYNCED) < self.flush_to:
            latest = native.signed(native.load(words, at + LATEST))
            self.publish(native.load(words, at + BASE), native.load(words, at + END), native.load(words, at + NEXT), latest, self.flush_to)
        return True

    def error(self) -> int:
        """Return the errno of the first failed flush; 0 if there was none."""
        if not self.is_open:
            return 0
        return error_in(self.seed, native.load(self.words, ERROR))

    def fail(self, error: int) -> None:
        """Store that a flush has failed, with this errno; 0: all was written again since."""
        if self.is_open:
            native.store(self.words, ERROR, error_word(self.seed, error))

    # The words.

    def copy(self, count: int) -> int:
        """Return the first word of the valid copy."""
        return COPIES + COPY_WORDS * ((count >> 2) & 1)

    def is_sound(self, at: int) -> bool:
        """Return whether the copy at a word was stored by a writer of this journal in this boot of the machine."""
        return native.load(self.words, at + CHECK) == self.check(at)

    def check(self, at: int) -> int:
        return HIGH | native.crc32c(self.seed, self.data, 8 * at, 8 * CHECK)

    def publish(self, base: int, end: int, sequence: int, latest: int, synced: int) -> None:
        """Store the other copy, and then make it the valid one."""
        words = self.words
        count = native.load(words, COUNT)
        at = self.copy(count + STEP)
        native.store(words, at + BASE, base)
        native.store(words, at + END, end)
        native.store(words, at + NEXT, sequence)
        native.store(words, at + LATEST, native.unsigned(latest))
        native.store(words, at + SYNCED, synced)
        native.store(words, at + CHECK, self.check(at))
        native.store(words, COUNT, (count + STEP) & ~(ELSEWHERE | WRITING) & WORD)

    def close(self) -> None:
        """Forget the memory. No append goes the short way any more."""
        if self.is_open:
            self.is_open = False
            self.detach()
            self.lock.close()
        self.words = native.no_words()
        self.data = native.no_bytes()
        self.owner = None
