"""The tail of a journal: where it ends, in memory that its writers share, and the append of one record there as one step.

The words say where the last segment ends, which sequence comes next, and what the latest timestamp is. There are two copies, and `COUNT`
says which of them counts; so they change all at once, whatever instruction a writer is killed at. The checksum of a copy includes the run
of the machine and the number of the file: what was restored, or comes from elsewhere, counts for nothing. A copy also says how far the
journal is on disk. The words of a group commit (`group_py`) follow the copies.

Under the append lock (`lock_py`), an append goes the short way only if

- the tail is told here, and not in the lock file's page (`ELSEWHERE`): whoever does anything but the short append says so there first;
- nobody was killed in the midst of an append (`WRITING`), and no write failed;
- the segment is the one that this handle has open: it ends where the words say, its path leads to it, and the lock file has a name. These
  looks cost more than the write. So they count for `FRESH` ns in a row of appends without a `GAP`;
- the record has room in the segment, so that no new one begins.

Otherwise it returns `SLOW`, and nothing counts as done: the long way (`journal.appender`) finds out what is true. That is also the
answer if the write fails, or is cut short: the long way cuts off what is torn, and tries again, with all its errors.

**A flush** is one of the last segment, since earlier ones are on disk. Its leader notes where the journal ends (`begin_flush`), flushes
without the append lock, and then says in the copy how far all is on disk (`end_flush`), under that lock. That counts only if the journal's
end has not gone back meanwhile (`TURNS`): other records may have got the same sequences. An error is stored in `ERROR` at once, without a
lock: from then on nothing goes the short way. A writer that has not mapped the words changes `ERROR`, `TURNS` and the `CHECK` of both
copies by `pwrite`.

This source is also compiled, like `frames_py`.
"""

from __future__ import annotations

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
COUNT = 1  # bit 0: ELSEWHERE; bit 1: WRITING; bit 2: which copy counts; STEP more with every change of them
HOLDER = 2  # who appended last: four words, see `holders`
HOLDER_WORDS = 4
ERROR = 6  # low half: errno of the first failed flush; high half: its checksum; 0: none
TURNS = 7  # how often the journal's end may have gone back
COPIES = 8  # two of them
COPY_WORDS = 8
BASE, END, NEXT, LATEST, SYNCED, CHECK = 0, 1, 2, 3, 4, 5  # words of a copy; LATEST is a timestamp, and so signed
GROUP = 24  # of those who wait for a flush
LEADER = 28  # which process led the last flush: as HOLDER
WORDS = 32

ELSEWHERE, WRITING = 1, 2
STEP = 4
LOW = 0xFFFFFFFF  # the low half of a word
WORD = 0xFFFFFFFFFFFFFFFF
HIGH = 0xFFFFFFFF00000000  # set in CHECK, so that no word of zeros is one

SLOW, BUSY = -1, -2  # what `append` returns in place of a sequence, and a flush in place of 0
KVJ, SEJ, FFLG, FIXED = 1, 2, 3, 4  # formats
LARGEST = 1 << 20  # bytes of a value; a larger one takes the long way
FRESH = 50_000  # ns; about what the long way needs between its look and its write
GAP = 2_000  # ns between two appends, in which nothing can be renamed or removed by who calls them
MOST = 0xFFFFFFFFFFFFFF00  # sequences from here on take the long way
SMALL = 64  # more bytes than any frame has around its key and value
LONGEST_KEY = 127  # bytes, which every format with keys has room for, and more than that takes the long way in sej
LONGEST_KVJ_KEY = 65534


def error_word(seed: int, error: int) -> int:
    """Return the word that says that a flush has failed with this errno; 0 for none."""
    if error == 0:
        return 0
    state = native.crc32c_head(seed, error, 0, 0, 0)
    return error | state << 32


def error_in(seed: int, word: int) -> int:
    """Return the errno in what `error_word` has returned; 0 for any other word."""
    error = word & LOW
    return error if word == error_word(seed, error) else 0


class Tail(group.Progress):
    """The tail of one journal, for one handle. Threads that share it exclude each other."""

    def __init__(self, memory: memoryview, lock: Any, lock_fd: int, seed: int, holder: memoryview) -> None:
        """Look at writable memory of `WORDS` words, of which `lock`, an AppendLock, has the first.

        lock_fd: the journal's lock file. seed: of the checksums; it tells this memory from any other. holder: the words that name us.
        """
        if len(memory) < 8 * WORDS or not native.is_writable(memory) or len(holder) != 8 * HOLDER_WORDS:
            raise ValueError(f"the tail of a journal is {8 * WORDS} bytes that may be written to, and its holder {8 * HOLDER_WORDS}")
        self.owner: Any = memory
        self.data: Any = native.bytes_at(memory)
        self.words: Any = native.words_at(memory)
        self.lock = lock
        self.lock_fd = lock_fd
        self.seed = seed
        self.holder_owner: Any = holder
        self.holder: Any = native.words_at(holder)
        self.process = native.process_id()
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
        self.looked_at = 0  # when it was in place, by the clock that never goes back
        self.limit = 0  # bytes that the segment doesn't come to by the short way; 0: there is none
        self.flush_to = 0  # the sequence below which a flush that is under way puts all on disk
        self.flush_end = 0  # where the last segment ends before that
        self.turn = 0  # TURNS when it began
        self.is_open = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    # For who holds the append lock.

    def attach(self, format: int, item_bytes: int, fd: int, path: bytes, device: int, number: int, base: int, limit: int) -> None:
        """Append to this segment: an open file of a format, with its path and what tells it from other files."""
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
        """Append nothing more to the segment, which is about to be closed."""
        self.limit = 0
        self.fd = -1

    def found(self) -> tuple[int, int, int, int, int] | None:
        """Return the base of the last segment, its end, the next sequence, the latest timestamp, and the sequence below which all is on
        disk; None if they are told elsewhere."""
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
        """Return the sequence below which all is on disk, as far as the words say so, also where the end is told elsewhere."""
        if not self.is_open:
            return 0
        at = self.copy(native.load(self.words, COUNT))
        return native.load(self.words, at + SYNCED) if self.is_sound(at) else 0

    def tell_elsewhere(self) -> None:
        """Say that the page of the lock file counts from now on."""
        if self.is_open:
            native.store(self.words, COUNT, native.load(self.words, COUNT) | ELSEWHERE)

    def turn_back(self) -> None:
        """Say that the journal's end may have gone back: nothing that was flushed before is known to be on disk until `tell`."""
        if self.is_open:
            native.store(self.words, COUNT, native.load(self.words, COUNT) | ELSEWHERE)
            native.store(self.words, self.copy(native.load(self.words, COUNT)) + CHECK, 0)
            native.store(self.words, TURNS, (native.load(self.words, TURNS) + STEP) & WORD)

    def tell(self, base: int, end: int, sequence: int, latest: int, synced: int) -> None:
        """Say where the journal ends, and how far it is on disk."""
        if self.is_open:
            word = native.load(self.words, ERROR)
            if word != 0 and self.error() == 0:  # damage, which would keep everybody from the short way
                native.swap(self.words, ERROR, word, 0)
            self.publish(base, end, sequence, latest, synced)

    def turns(self) -> int:
        """Return a number that changes, under the append lock, whenever the journal's end may have gone back."""
        return native.load(self.words, TURNS) if self.is_open else 0

    def is_told(self) -> bool:
        """Return whether the words count, and no append is under way."""
        return self.is_open and native.load(self.words, COUNT) & (ELSEWHERE | WRITING) == 0

    def sign(self, place: int = HOLDER) -> None:
        """Note that we have the append lock, or with LEADER that we lead a flush, for those who wait."""
        if self.is_open:
            for at in range(HOLDER_WORDS):
                native.store(self.words, place + at, native.load(self.holder, at))

    def signed_by(self, place: int = HOLDER) -> tuple[int, int, int, int]:
        """Return the words of the process that signed there last; zeros if that isn't known."""
        if not self.is_open:
            return 0, 0, 0, 0
        words = self.words
        return native.load(words, place), native.load(words, place + 1), native.load(words, place + 2), native.load(words, place + 3)

    # The short way.

    def append(self, value: bytes, key: bytes | None, type: Any, codec: int) -> int:
        """Append one record with the present time, if it can be done in one step, and return its sequence; otherwise SLOW, or BUSY if
        another handle has the append lock. Nothing was done then that counts."""
        if self.is_busy:  # compiled, by another thread; otherwise a signal handler is in the midst of it
            return BUSY if native.is_one_step() else SLOW
        if self.limit == 0 or not self.is_open or native.process_id() != self.process:
            return SLOW
        size = self.most(value, key, type)
        if size < 0:
            return SLOW
        self.is_busy = True
        try:
            return self.append_locked(value, key, type, codec, size) if self.lock.take(self) else BUSY
        finally:
            try:
                self.leave()
            except BaseException:  # out of a signal handler, perhaps before the lock was freed
                self.leave()
                raise

    def leave(self) -> None:
        """End an append: free the lock, unless another thread of this handle has it, or who was interrupted by this append."""
        if self.lock.taken_by is self:
            self.lock.free()
        self.is_busy = False

    def most(self, value: bytes, key: bytes | None, type: Any) -> int:
        """Return bytes that the frame of a record has at most; -1 for one that takes the long way, which may refuse it."""
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
        if not self.is_open:  # by a destructor in another thread: the record is there, and the next writer finds it
            return sequence
        self.publish(self.base, end + size, sequence + 1, latest, native.load(self.words, at + SYNCED))
        self.left_at = native.monotonic()
        return sequence

    def is_in_place(self, end: int) -> bool:
        """Return whether the segment ends there and lies at its path, and the lock file has a name; see `FRESH`."""
        now = native.monotonic()
        if now - self.left_at < GAP and now - self.looked_at < FRESH and native.is_one_step():
            return True
        if native.size_at(self.path, self.device, self.number) != end or not native.has_name(self.lock_fd):
            return False
        self.looked_at = now
        return True

    # Flushes.

    def look(self, sequence: int) -> int:
        """Say whether every record below `sequence` is on disk, for those who wait for a flush; see `Progress`."""
        if not self.is_open:
            raise Closed("the log was closed; open it again")
        at = self.copy(native.load(self.words, COUNT))
        is_done = sequence <= native.load(self.words, at + SYNCED) and self.is_sound(at)
        if self.error() != 0:
            return group.FAILED
        return group.DONE if is_done else group.WAITS

    def begin_flush(self, base: int, path: bytes, device: int, number: int) -> int:
        """Note what a flush of the last segment, which begins now, puts on disk: `flush_to`, `flush_end`. Returns 0; SLOW if the last
        segment is not the one that begins at `base`, in a file that tells itself from others by `device` and `number`, at `path`."""
        if not self.is_open:
            return SLOW
        self.turn = native.load(self.words, TURNS)
        count = native.load(self.words, COUNT)
        at = self.copy(count)
        # A writer may replace them meanwhile. Each was stored after the records that it speaks of had been written.
        self.flush_to = native.load(self.words, at + NEXT)
        self.flush_end = native.load(self.words, at + END)
        if count & ELSEWHERE or native.load(self.words, at + BASE) != base or not self.is_sound(at):
            return SLOW
        size = native.size_at(path, device, number)
        return SLOW if size < 0 or native.unsigned(size) < self.flush_end else 0

    def end_flush(self) -> bool:
        """Under the append lock: say that the flush has put on disk what `begin_flush` has noted. False if that can't be known any more."""
        if not self.is_open or self.error() != 0:  # another flush has failed: of a reader, say, which takes no lock
            return False
        words = self.words
        count = native.load(words, COUNT)
        at = self.copy(count)
        if count & (ELSEWHERE | WRITING) or not self.is_sound(at) or native.load(words, TURNS) != self.turn:
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
        """Say that a flush has failed, with this errno; 0: that all was written anew since."""
        if self.is_open:
            native.store(self.words, ERROR, error_word(self.seed, error))

    # The words.

    def copy(self, count: int) -> int:
        """Return the word that the copy begins at which counts."""
        return COPIES + COPY_WORDS * ((count >> 2) & 1)

    def is_sound(self, at: int) -> bool:
        """Return whether the copy at a word is one that we, or another writer of this journal, have stored in this run of the machine."""
        return native.load(self.words, at + CHECK) == self.check(at)

    def check(self, at: int) -> int:
        return HIGH | native.crc32c(self.seed, self.data, 8 * at, 8 * CHECK)

    def publish(self, base: int, end: int, sequence: int, latest: int, synced: int) -> None:
        """Store the other copy, and then say that it counts."""
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
        """Forget the memory. Nothing goes the short way any more."""
        if self.is_open:
            self.is_open = False
            self.detach()
            self.lock.close()
        self.words = native.no_words()
        self.data = native.no_bytes()
        self.owner = None
