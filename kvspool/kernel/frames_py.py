"""The loops over frames: append, read, gather into columns, scan. Their input is plain memory, their output plain values.

This is the only source of these algorithms. `setup.py` compiles the same file under the name `frames_c` with the C types of
`frames_c.pxd`; `frames` chooses one of the two. It treats the ring and the control block as memory, and takes no decision visible to a
reader or a writer: policies, gaps, waiting and files belong to `spool`.

**A frame** is `stored` bytes long, a multiple of 8, and starts at a position that is one:

    word 0   stored (low half), content = bytes of key and value (high half)
    word 1   sequence
    word 2   timestamp, ns since the Unix epoch
    word 3   type (8 bits), codec (8), key length (16; NO_KEY: none), CRC32C (high half)
    then     key, value, zeros

The checksum covers the log id, the first 28 bytes of the frame, key and value. It is computed only from private bytes: by the writer before
it copies them in, by the reader after it has copied them out.

**A position** counts the bytes ever reserved and never wraps; the byte is at `position % capacity`. A frame never straddles the end of the
ring: a pad frame fills the rest, or nothing if not even a header fits.

**Publication.** `tail` and `next_seq` can't be stored together, so there are two *marks* (tail, next_seq, last timestamp). The writer fills
the one that doesn't belong to the current `tail`, and then stores `tail`. The mark whose tail equals `tail` is valid, at whatever
instruction a writer was killed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import kvspool.kernel.group_py as group
import kvspool.kernel.machine as native
from kvspool.errors import Closed, Corruption, Moved, Pinned, Poisoned, Reentered, TooLarge
from kvspool.system.handles import refuse_copy

HEADER = 32  # bytes before the key
PAD = 255  # codec of a pad frame
NO_KEY = 0xFFFF  # key length of a record without a key
DATA_START = 4096  # bytes of spool.dat before the ring
LARGEST = 1 << 30  # most bytes of a frame, in a ring of any size: columns of a batch of records use 32-bit offsets
LOW = 0xFFFFFFFF  # the low half of a word
MOST_POSITION = 0xFFFFF80000000000  # so far below 2^64 that no sum of a position and a length wraps
EVICTED = 1 << 32  # added to the generation of a commit for which writers no longer wait
BLOCK = 16  # the index has an entry for each 2**16 bytes of the ring
NOTHING = 0xFFFFFFFFFFFFFFFF  # no position, no sequence
ERA_BITS = 32  # a sequence without its lower bits is its era: after every recovery the log continues in a later one
AHEAD = 4096  # bytes of the ring that are prefetched
STEP = 4096  # bytes for which a batch makes room at once
WRITTEN_AHEAD = 8192  # as AHEAD, for a writer: more than a step, so that the headers it reads there have arrived

# Words of the control block; `spool.format` declares them and asserts that they agree.
HEAD = 32
MIN_SEQ = 33
SLOTS_CHANGED = 34
TAIL = 40
MARKS = 41
MARK_WORDS = 3
SYNCED_SEQ = 49
SYNC_ERROR = 50
FLUSH_GROUP = 52  # the first word of the flush group; see `group_py`
WANTED = 56
RINGS = 58
HOLDER = 64
HOLDER_WORDS = 6
PENDING = 70  # in the cache line of the holder's words, which each append reads
LOCK = 72  # the append lock; see `lock_py`
MOVED = 80
DROPPED = 81
KEPT = 82
PINS = 83
SLOTS_AT = 1536
SLOTS = 64
SLOT_WORDS = 32
SLOT_EVICTED = 1  # words within a slot, as the next two
SLOT_NAME = 8
SLOT_COMMITS = 16
COMMIT_WORDS = 4
TRIES = 100  # reads of a slot whose reader commits continuously
RATES = 512
RATE_WORDS = 3  # of a bucket
BUCKETS = 64  # of a series; there are three in a row: seconds, minutes, hours
INDEX = 8192
INDEX_WORDS = 3

ECHO = 64  # words of the page before the ring: the tail, and the head
HEAD_ECHO = 65

SYNC_LOCK = 1  # the byte of the control block that a flushing process locks

# Results of `parse` at a position.
FRAME = 0
SKIP = 1
BAD = 2

# Reasons why `fetch` and `gather` stopped.
END = 0
OVERRUN = 1
DAMAGED = 2
JUMPED = 3
FULL = 4
NO_ITEM = object()  # result of `step` without an item

# Results of `append` instead of a sequence.
BUSY = -1
FORKED = -2
LOOK = -3
NO_ROOM = -4
MOVED_ON = -5
UNSETTLED = -6
OUTDATED = -7

LOOK_EVERY = 1_000_000_000  # ns after which a writer must check whether its log still exists
WATCHES = 0  # byte of WANTED: a reader watches by inotify
SLEEPS = 1  # the other byte: a reader sleeps on RINGS
MOST_AHEAD = 86_400_000_000_000  # most ns of a caller's timestamp after the clock
SLICE = 50_000  # ns that a reader polls the tail without a break
BLIND = 5_000_000  # ns of a reader's sleep if writers can't wake it


class Ring(group.Progress):
    """The memory of one log: the ring's bytes and the control block's words. Methods return values, never views.

    **Safety.** Both views are checked once, when the object is created: they contain every byte that a method touches, whatever those bytes
    are. `close` releases them, and a concurrent call of another thread raises Closed. Compiled, a method is one step for all threads,
    unless it waits or calls Python: then it keeps the memory alive, and calls `check_open` before it continues. Interpreted, every access
    to released memory raises.
    """

    def __init__(self, data: memoryview, control: memoryview, seed: int) -> None:
        """Use the ring `data` and the control block `control`; `seed` is the CRC32C register after the log id.

        Raises ValueError for memory that is too short, has a length that isn't a multiple of 8, or doesn't begin at one.
        """
        self.attach(data, control, seed)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def attach(self, data: memoryview, control: memoryview, seed: int) -> None:
        """Do the work of `__init__`; nothing has changed if it raises."""
        check_sizes(len(data), len(control))
        data_bytes = native.bytes_at(data)
        data_words = native.words_at(data)
        control_words = native.words_at(control)
        control_bytes = native.bytes_at(control)
        may_store = native.is_writable(control)
        self.owner: Any = (data, control)
        self.data: Any = data_bytes
        self.words: Any = data_words
        self.control: Any = control_words
        self.flags: Any = control_bytes
        self.capacity = len(data)
        self.control_words = len(control) >> 3
        self.may_store = may_store
        self.lap = 0
        self.seed = seed
        self.closed = False
        self.passed = 0
        self.offset = 0
        self.stored = 0
        self.content = 0
        self.sequence_found = 0
        self.timestamp = 0
        self.tags = 0
        self.checksum = 0
        self.key_length = 0

    def close(self) -> None:
        """Release the memory. Every later call raises Closed."""
        self.closed = True
        self.owner = None
        self.data = self.flags = native.no_bytes()
        self.words = self.control = native.no_words()

    def check_open(self) -> None:
        """Raise Closed after `close`, or if `__init__` has not run."""
        if self.closed or self.owner is None:
            raise Closed("the log was closed; open it again")

    def check_writable(self) -> None:
        """Raise Closed as `check_open` does, and ValueError if the control block is read-only."""
        self.check_open()
        if not self.may_store:
            raise ValueError("the memory of the control block is read-only")

    def check_word(self, at: int) -> None:
        """Raise IndexError for a word that the control block doesn't have."""
        if not 0 <= at < self.control_words:
            raise IndexError(f"the control block has {self.control_words} words, and none with the number {at}")

    def head(self) -> int:
        """Return the position of the oldest frame."""
        self.check_open()
        head = native.load(self.control, HEAD)
        return self.bounded_head(head, native.load_after_reads(self.control, TAIL))

    def bounded_head(self, head: int, tail: int) -> int:
        """Return `head`, or its limit if it is impossible: the control block is not trusted."""
        if head > tail:
            return tail
        if tail - head > self.capacity:
            return tail - self.capacity
        return head & ~7

    def tail(self) -> int:
        """Return the position of the next frame. Raises Corruption for an impossible one."""
        self.check_open()
        tail = native.load(self.control, TAIL)
        self.check_position(tail)
        return tail

    def check_position(self, position: int) -> None:
        """Raise Corruption for a position that no log reaches: a loop up to it would never end."""
        if position & 7 or position > MOST_POSITION:
            raise Corruption("the control block has an impossible end of the log: it is damaged")

    def ask_for_bell(self, way: int) -> int:
        """Ask the next writer to wake readers that watch by inotify (WATCHES) or sleep on `rings` (SLEEPS); return the tail after that.

        Each kind has its own byte, so that concurrent readers don't undo each other's request.
        """
        self.check_writable()
        if not WATCHES <= way <= SLEEPS:
            raise IndexError(f"readers are woken in the ways {WATCHES} and {SLEEPS}, not {way}")
        if self.flags[WANTED * 8 + way] == 0:
            self.flags[WANTED * 8 + way] = 1
        native.fence()
        return native.load(self.control, TAIL)

    def ring_bell(self) -> bool:
        """After a store for which readers wait: wake sleepers, and return whether others watch by inotify. The memory must be writable."""
        self.check_writable()
        native.fence()
        if native.load(self.control, WANTED) == 0:
            return False
        asked = native.exchange(self.control, WANTED, 0)
        if asked > 0xFF:
            self.rouse()
        return asked & 0xFF != 0

    def rouse(self) -> None:
        """Wake all readers that sleep on `rings`, and keep those awake that are about to. The memory must be writable."""
        self.check_writable()
        native.add_one(self.control, RINGS)
        native.wake_all(self.control, RINGS)

    def look(self, sequence: int) -> int:
        """Return whether every record below `sequence` is on disk, for waiters of a flush; see `Progress`."""
        self.check_open()
        synced = native.load(self.control, SYNCED_SEQ)
        # Bytes after the end of the log are damage, and prove nothing.
        is_done = sequence <= synced and synced <= self.mark()[1]
        if native.load_after_reads(self.control, SYNC_ERROR) != 0:
            return group.FAILED
        return group.DONE if is_done else group.WAITS

    def has_moved(self) -> bool:
        """Return whether the log may be in new files. It must be open."""
        return native.load(self.control, MOVED) != 0

    def wait_word(self, at: int, expected: int, longest: int) -> None:
        """Sleep while word `at` of the control block is `expected`, at most `longest` ns; it may end early."""
        self.check_open()
        self.check_word(at)
        owner = self.owner  # keeps the memory alive while another thread closes
        native.wait_word(self.control, at, expected, longest)
        del owner

    def word(self, at: int) -> int:
        """Return word `at` of the control block."""
        self.check_open()
        self.check_word(at)
        return native.load(self.control, at)

    def mark(self) -> tuple[int, int, int]:
        """Return tail, next sequence and last timestamp as one writer published them.

        Raises Corruption if the control block has no mark for its tail.
        """
        self.check_open()
        for _ in range(1000):
            tail = self.tail()
            at = self.find_mark(tail)
            if at:
                sequence = native.load(self.control, at + 1)
                timestamp = native.load(self.control, at + 2)
                if native.load_after_reads(self.control, TAIL) == tail:
                    return tail, sequence, timestamp
            elif native.load_after_reads(self.control, TAIL) == tail:
                break
        raise Corruption("the control block has no mark for its tail: it is damaged")

    def find_mark(self, tail: int) -> int:
        """Return the word where the mark for `tail` begins, or 0."""
        if native.load(self.control, MARKS) == tail:
            return MARKS
        if native.load(self.control, MARKS + MARK_WORDS) == tail:
            return MARKS + MARK_WORDS
        return 0

    def offset_of(self, position: int) -> int:
        """Return the offset in the ring of the byte at `position`.

        The start of the lap is cached, since a division takes half the time of the other work for a frame.
        """
        if position < self.lap or position - self.lap >= self.capacity:
            self.lap = position - position % self.capacity
        return position - self.lap

    def parse(self, position: int, end: int) -> int:
        """Read the header at `position` into this object and return its kind; `end` bounds the values to trust.

        FRAME: a header with possible lengths. SKIP: no record; the next frame starts `stored` bytes later. BAD: neither. The checksum is
        not compared yet.
        """
        self.offset = offset = Ring.offset_of(self, position)
        room = self.capacity - offset
        if room < HEADER:
            self.stored = room
            return SKIP if position + room <= end else BAD
        at = offset >> 3
        lengths = self.words[at]
        stored = lengths & LOW
        self.stored = stored
        self.content = lengths >> 32
        self.sequence_found = self.words[at + 1]
        self.timestamp = self.words[at + 2]
        tags = self.words[at + 3]
        self.tags = tags & LOW
        self.checksum = tags >> 32
        self.key_length = self.tags >> 16
        if self.key_length == NO_KEY:
            self.key_length = 0
        if position + stored > end:
            return BAD
        if is_record(lengths, tags, room):
            return FRAME
        if ((tags >> 8) & 0xFF) == PAD and stored == room and self.content == 0 and self.is_sound(offset):
            return SKIP
        return BAD

    def is_sound(self, offset: int) -> bool:
        """Return whether the checksum of the frame that was just parsed matches its bytes in the ring."""
        state = native.crc32c_head(self.seed, self.stored | (self.content << 32), self.sequence_found, self.timestamp, self.tags)
        state = native.crc32c(state, self.data, offset + HEADER, self.content)
        return (state ^ LOW) == self.checksum

    def sequence_at(self, position: int, end: int) -> int:
        """Return the sequence of the first sound frame at or after skipped bytes at `position`, or NOTHING."""
        self.check_open()
        while position < end:
            found = self.parse(position, end)
            if found == SKIP:
                position += self.stored
            elif found == FRAME and self.is_sound(self.offset):
                return self.sequence_found
            else:
                break
        return NOTHING

    def find_frame(self, position: int, end: int, least: int, most: int) -> int:
        """Return the position of the next sound frame from `position` on whose sequence is least..most, or `end`.

        A reader or a writer uses it to find the chain again after damage: every 8 bytes may start a frame, and the checksum, which begins
        with the log id, decides.
        """
        self.check_open()
        return self.scan(position, end, least, most)

    def scan(self, position: int, end: int, least: int, most: int) -> int:
        """Do the work of `find_frame`."""
        while position < end:
            found = self.parse(position, end)
            if found == FRAME:
                if least <= self.sequence_found <= most and self.is_sound(self.offset):
                    return position
            elif found == SKIP and self.stored < HEADER:
                position += self.stored
                continue
            position += 8
        return end

    def walk(self, position: int, end: int, sequence: int, timestamp: int) -> int:
        """Follow the chain from `position` to the first frame with at least this sequence and timestamp; or to `end`.

        Stops at damage that may have been that frame: the caller reads on from there and finds the damage itself. Earlier damage is
        skipped; leftovers of an earlier lap after a crash of the machine have a smaller sequence. `passed` is the sequence after the last
        passed frame, 0 for none.
        """
        self.check_open()
        least = 0
        self.passed = 0
        while position < end:
            found = self.parse(position, end)
            if found == BAD or self.goes_back(found, least) or (found == FRAME and not self.is_sound(self.offset)):
                beyond = self.scan(position + 8, end, least, NOTHING)
                if beyond >= end or native.load_after_reads(self.control, HEAD) > position:
                    break
                if self.sequence_found >= sequence and self.timestamp >= timestamp:
                    break
                position = beyond
                continue
            if found == FRAME:
                if self.sequence_found >= sequence and self.timestamp >= timestamp:
                    break
                self.passed = least = self.sequence_found + 1
            position += self.stored
        return position

    def goes_back(self, found: int, least: int) -> bool:
        """Return whether the frame or pad that `parse` found belongs before sequence `least`, to an earlier lap.

        A crash of the machine may leave such frames in pages that were not written. A pad has the sequence of the record after it.
        """
        return (found == FRAME or self.stored >= HEADER) and self.sequence_found < least

    def entry(self, block: int) -> tuple[int, int, int]:
        """Return the index entry of a block: position, sequence and timestamp of a frame; or NOTHING, 0, 0.

        It is a hint: the writer may be changing it, and the frame may be overwritten. Check it against the frame.
        """
        self.check_open()
        if not 0 <= block <= (self.capacity - 1) >> BLOCK:
            raise IndexError(f"the index has no block {block}")
        at = INDEX + INDEX_WORDS * block
        position = native.load(self.control, at)
        sequence = native.load(self.control, at + 1)
        timestamp = native.load(self.control, at + 2)
        if not position & 1 or native.load_after_reads(self.control, at) != position:
            return NOTHING, 0, 0
        return position - 1, sequence, timestamp


class FrameReader(Ring):
    """A position in the log from which frames are copied out, one after the other, without a lock.

    `position` and `sequence` are those of the next expected frame. `stop` is the reason why the last call stopped: END, FULL (the caller's
    limit), OVERRUN (the frame at `position` is overwritten), DAMAGED (its bytes are wrong), or JUMPED (it is sound, but a later one than
    expected; its sequence is `sequence_found`). `edge` is the word of the control block up to which a follower reads: TAIL.
    """

    def __init__(self, data: memoryview, control: memoryview, seed: int, position: int, sequence: int) -> None:
        Ring.__init__(self, data, control, seed)
        self.position = position
        self.sequence = sequence
        self.stop = END
        self.state: Any = native.one_state()
        self.time: Any = 0  # the timestamp of the previous record: those of one batch share the object
        self.time_before = 0
        self.edge = TAIL
        self.is_woken = False

    def move(self, data: memoryview, control: memoryview, seed: int, position: int, sequence: int) -> None:
        """Continue in the memory of the log's new files; prefetched records stay in `items`."""
        self.check_open()
        self.attach(data, control, seed)
        self.position = position
        self.sequence = sequence

    def next_frame(self, end: int) -> bool:
        """Skip bytes without a record, and parse the frame at `position`; False if there is none, with the reason in `stop`."""
        while self.position < end:
            found = Ring.parse(self, self.position, end)
            if found == FRAME:
                return True
            if native.load_after_reads(self.control, HEAD) > self.position:
                self.stop = OVERRUN
                return False
            if found == BAD or self.goes_back(found, self.sequence):
                self.stop = DAMAGED
                return False
            self.position += self.stored
        self.stop = END
        return False

    def accept(self, state: int) -> bool:
        """Accept or reject the copied frame: `state` is the CRC32C register over the private copy."""
        if native.load_after_reads(self.control, HEAD) > self.position:
            self.stop = OVERRUN
            return False
        if (state ^ LOW) != self.checksum or self.sequence_found < self.sequence:
            self.stop = DAMAGED
            return False
        if self.sequence_found > self.sequence:
            self.stop = JUMPED
            return False
        self.position += self.stored
        self.sequence += 1
        return True

    def reaches_next(self, end: int) -> bool:
        """Skip bytes without a record; True if the frame at `position` then is the expected one. Otherwise `stop` has the reason."""
        if not self.next_frame(end):
            return False
        if self.sequence_found == self.sequence:
            return True
        # The checksum of the stored frame distinguishes a later record from damage; none of it is returned.
        self.accept(native.crc32c(self.head_state(), self.data, self.offset + HEADER, self.content))
        return False

    def find(self, end: int) -> tuple[int, int, int, int] | None:
        """Pass the next frame before `end`, checked in place: return offset and length of its value in the ring, then those of the frame.

        None if there is none, with the reason in `stop`. Its bytes stay the same only while they are pinned.
        """
        self.check_open()
        if not self.next_frame(end):
            return None
        offset = self.offset
        length = self.content - self.key_length
        state = native.crc32c(self.head_state(), self.data, offset + HEADER, self.content)
        if not self.accept(state):
            return None
        return offset + HEADER + self.key_length, length, offset, self.stored

    def check(self, end: int, limit: int) -> tuple[int, int]:
        """Pass up to `limit` frames before `end`, checked in place.

        Return their number, and the size of their keys and values. `stop` has the reason of the end, as for `fetch`.
        """
        self.check_open()
        data = self.data
        words = self.words
        position = self.position
        sequence = first = self.sequence
        offset = Ring.offset_of(self, position)
        size = 0
        stop = FULL
        while sequence - first < limit:
            at = offset >> 3
            is_plain = offset + HEADER <= self.capacity
            if is_plain:
                lengths = words[at]
                tags = words[at + 3]
                stored = lengths & LOW
                is_plain = words[at + 1] == sequence and is_record(lengths, tags, self.capacity - offset) and position + stored <= end
            if not is_plain:
                self.position = position
                self.sequence = sequence
                is_plain = self.reaches_next(end)
                position = self.position
                offset = self.offset
                if is_plain:
                    continue
                stop = self.stop
                break
            content = lengths >> 32
            state = native.crc32c_head(self.seed, lengths, sequence, words[at + 2], tags & LOW)
            state = native.crc32c(state, data, offset + HEADER, content)
            stop = judge(native.load_after_reads(self.control, HEAD), position, state, tags)
            if stop != FULL:
                break
            size += content
            position += stored
            offset += stored
            sequence += 1
        self.position = position
        self.sequence = sequence
        self.stop = stop
        return sequence - first, size

    def head_state(self) -> int:
        """Return the CRC32C register over the parsed header."""
        return native.crc32c_head(self.seed, self.stored | (self.content << 32), self.sequence_found, self.timestamp, self.tags)

    def fetch(self, end: int, limit: int, make: Callable[..., Any] | None, out: list[Any] | None = None) -> list[Any]:
        """Copy out up to `limit` frames before `end`, and return them.

        Each becomes `make(sequence, timestamp, type, key, value, codec)`, or only the value if `make` is None. out: an empty list for the
        items, for a caller that may be interrupted before it gets the result.
        """
        self.check_open()
        if out is None:
            out = []
        count = 0
        while count < limit:
            item = self.step(end, make)
            if item is NO_ITEM:
                return out
            out.append(item)
            if self.closed:  # by a signal handler, a destructor or another thread that ran during `make`
                return out
            count += 1
        self.stop = FULL
        return out

    def step(self, end: int, make: Callable[..., Any] | None) -> Any:
        """Copy out the next frame before `end` and return it as `fetch` does; NO_ITEM if there is none, with the reason in `stop`.

        The header is read once, into local variables; the object changes only if the frame is sound. The reader must be open.
        """
        while True:
            words = self.words
            position = self.position
            sequence = self.sequence
            offset = Ring.offset_of(self, position)
            room = self.capacity - offset
            if room >= HEADER:
                at = offset >> 3
                lengths = words[at]
                timestamp = words[at + 2]
                tags = words[at + 3]
                stored = lengths & LOW
                if words[at + 1] == sequence and is_record(lengths, tags, room) and position + stored <= end:
                    break
            if not self.reaches_next(end):
                return NO_ITEM
        state = self.state
        state[0] = native.crc32c_head(self.seed, lengths, sequence, timestamp, tags & LOW)
        content = lengths >> 32
        key_length = (tags >> 16) & NO_KEY
        key = None
        offset += HEADER
        if key_length != NO_KEY:
            key = native.copy_out(self.data, offset, key_length, state)
            offset += key_length
            content -= key_length
        value = native.copy_out(self.data, offset, content, state)
        stop = judge(native.load_after_reads(self.control, HEAD), position, state[0], tags)
        if stop != FULL:
            self.stop = stop
            return NO_ITEM
        self.position = position + stored
        self.sequence = sequence + 1
        if make is None:
            return value
        if timestamp != self.time_before:
            self.time = timestamp
            self.time_before = timestamp
        return make(sequence, self.time, tags & 0xFF, key, value, (tags >> 8) & 0xFF)

    def edge_now(self) -> int:
        """Return the position up to which a follower may read now. Raises Corruption for an impossible one."""
        tail = self.tail()
        self.check_word(self.edge)
        edge = native.load(self.control, self.edge)
        return edge if edge < tail else tail

    def has_more(self) -> bool:
        """Return whether a follower may have something to read: after `position`, or in the log's new files after a resize."""
        self.check_open()
        self.check_word(self.edge)
        return native.load(self.control, self.edge) > self.position or self.has_moved()

    def sleep_and_fetch(self, end: int, spin: int, ns: int, limit: int, make: Callable[..., Any] | None, out: list[Any]) -> list[Any]:
        """Fetch the present records. If there is none after `end`, wait for new ones: first poll for `spin` of `ns`, then sleep.

        Compiled, this is one step: everything between the wake-up and the record delays a reader.
        """
        if self.position >= end:
            if not self.spin(spin) and not self.closed:
                self.sleep(end, ns - spin)
            if self.closed:  # by another thread meanwhile
                return out
            end = self.edge_now()
        return self.fetch(end, limit, make, out)

    def sleep(self, end: int, ns: int) -> None:
        """Sleep until a writer rings, up to `ns`, unless there is something after `end`; or until a signal, whose handler may raise."""
        self.check_open()
        seen = native.load(self.control, RINGS)  # before the checks: a later wake-up ends the sleep, even before it begins
        if self.may_store:
            self.ask_for_bell(SLEEPS)
        if self.is_woken or self.edge_now() != end:
            self.is_woken = False
            return
        if not self.may_store or self.has_moved():  # no writer rings, or none rings here any more
            ns = min(ns, BLIND)
        owner = self.owner  # keeps the memory alive while another thread closes
        native.wait_word(self.control, RINGS, seen, ns)
        del owner
        native.check_signals()

    def wake(self) -> None:
        """End the sleep of the thread that reads here, or its next one. Any thread may call this."""
        self.is_woken = True
        if not self.closed and self.may_store:  # otherwise it sleeps only briefly
            try:
                self.rouse()
            except Closed:
                pass

    def spin(self, ns: int) -> bool:
        """Poll for up to `ns` for something to fetch, and return whether there is."""
        self.check_open()
        self.check_word(self.edge)
        owner = self.owner  # another thread may close this object meanwhile
        words = self.control
        until = native.monotonic() + ns
        while not self.closed and not self.is_woken and ns > 0:
            seen = native.load(words, self.edge)
            if self.edge_now() > self.position:
                return True
            left = until - native.monotonic()
            if left <= 0:
                break
            native.spin(owner, words, self.edge, seen, left if left < SLICE else SLICE)
        return False

    def gather(
        self,
        end: int,
        limit: int,
        sequences: memoryview,
        timestamps: memoryview,
        types: memoryview,
        key_offsets: memoryview,
        keys: memoryview,
        key_bits: memoryview,
        value_offsets: memoryview,
        values: memoryview,
        codecs: memoryview | None = None,
    ) -> int:
        """Copy up to `limit` frames before `end` into columns in Arrow's layout, and return their number.

        sequences, timestamps: int64, `limit` long; types: int32, `limit` long; key_offsets, value_offsets: int32, `limit + 1` long;
        key_bits: zeroed bytes, a set bit for each record that has a key; keys, values: bytes; codecs: `limit` bytes, or None. Stops with
        FULL if the next record doesn't fit into `keys` or `values`.
        """
        self.check_open()
        most = min(len(sequences), len(timestamps), len(types), len(key_offsets) - 1, len(value_offsets) - 1, len(key_bits) * 8)
        if limit > most or most < 0 or (codecs is not None and limit > len(codecs)):
            raise ValueError(f"the columns are too short for {limit} records")
        sequence_column = native.numbers_at(sequences)
        timestamp_column = native.numbers_at(timestamps)
        type_column = native.halves_at(types)
        key_places = native.halves_at(key_offsets)
        value_places = native.halves_at(value_offsets)
        bits = native.bytes_at(key_bits)
        key_data = native.bytes_at(keys)
        value_data = native.bytes_at(values)
        codec_column = native.no_bytes() if codecs is None else native.bytes_at(codecs)
        has_codecs = codecs is not None
        key_room = len(keys)
        value_room = len(values)
        data = self.data
        words = self.words
        control = self.control
        capacity = self.capacity
        seed = self.seed
        position = self.position
        sequence = first = self.sequence
        offset = Ring.offset_of(self, position)
        key_at = 0
        value_at = 0
        count = 0
        stop = FULL
        key_places[0] = 0
        value_places[0] = 0
        while count < limit:
            at = offset >> 3
            is_plain = offset + HEADER <= capacity
            if is_plain:
                lengths = words[at]
                timestamp = words[at + 2]
                tags = words[at + 3]
                stored = lengths & LOW
                is_plain = words[at + 1] == sequence and is_record(lengths, tags, capacity - offset) and position + stored <= end
            if not is_plain:
                self.position = position
                self.sequence = sequence
                is_plain = self.reaches_next(end)
                position = self.position
                offset = self.offset
                if is_plain:
                    continue
                stop = self.stop
                break
            key_length = (tags >> 16) & NO_KEY
            has_key = key_length != NO_KEY
            if not has_key:
                key_length = 0
            value_length = (lengths >> 32) - key_length
            if key_at + key_length > key_room or value_at + value_length > value_room:
                self.stored = stored
                break
            state = native.copy_frame(
                seed, lengths, sequence, timestamp, tags, data, offset + HEADER, key_data, key_at, key_length, value_data, value_at
            )
            stop = judge(native.load_after_reads(control, HEAD), position, state, tags)
            if stop != FULL:
                break
            timestamp_column[count] = timestamp
            type_column[count] = tags & 0xFF
            if has_codecs:
                codec_column[count] = (tags >> 8) & 0xFF
            if has_key:
                bits[count >> 3] = bits[count >> 3] | (1 << (count & 7))
            key_at += key_length
            value_at += value_length
            position += stored
            offset += stored
            sequence += 1
            count += 1
            key_places[count] = key_at
            value_places[count] = value_at
        self.position = position
        self.sequence = sequence
        self.stop = stop
        for at in range(count):
            sequence_column[at] = first + at
        return count


class Sleeper:
    """Lets a batch wait: sleeps until one log has more records, and copies them out."""

    def is_undisturbed(self) -> bool:
        """Return whether only records are expected."""
        raise NotImplementedError

    def fetch(self, ns: int, most: int, make: Callable[..., Any] | None, out: list[Any]) -> bool:
        """Add up to `most` records to `out`, after a sleep of up to `ns` if there is none; False if anything else has to be checked."""
        raise NotImplementedError


class RingSleeper(Sleeper):
    """Sleeps on the word `rings` of a spool, after polling for `spin` ns."""

    def __init__(self, reader: FrameReader, pair: Any, spin: int) -> None:
        self.reader = reader
        self.pair = pair
        self.spin = spin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def is_undisturbed(self) -> bool:
        """Return whether nothing was closed, and the log is not in new files."""
        return not (self.reader.closed or self.reader.has_moved() or self.pair.is_closed)

    def fetch(self, ns: int, most: int, make: Callable[..., Any] | None, out: list[Any]) -> bool:
        reader = self.reader
        reader.sleep_and_fetch(reader.edge_now(), min(self.spin, ns), ns, most, make, out)
        return reader.stop == END


class Batch:
    """Copied items that were not returned yet: the `items` from `at` on.

    left: how many may be returned; -1: no limit. While there are only records, the batch *runs*: when all are returned it copies the next
    ones itself. A follower's batch *dozes*: one step leads from the last record to the sleep, one from the wake-up to the next record.
    """

    def __init__(self, left: int) -> None:
        self.items: list[Any] = []
        self.at = 0
        self.left = left
        self.reader: FrameReader | None = None
        self.sleeper: Sleeper | None = None
        self.end = NOTHING
        self.longest = 0
        self.most = 0
        self.make: Callable[..., Any] | None = None
        self.dozed = 0
        self.dozing = 0  # calls under way: a thread that closes the log meanwhile leaves the release of its files to the waiting one

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def run(self, reader: Any, end: int, most: int, make: Callable[..., Any] | None) -> None:
        """Copy the next items when none is left, up to `most` of them: up to `end`, or up to the edge for NOTHING.

        `make` runs no Python, and a record needs nothing else. Everything else is left to `refill`. So is all of it if a step can be
        interrupted, since a record would be lost then, or if the reader is of the other twin.
        """
        if native.is_one_step() and isinstance(reader, FrameReader):
            self.end = end
            self.most = most
            self.make = make
            self.reader = reader

    def lie_down(self, sleeper: Sleeper, ns: int, most: int, make: Callable[..., Any] | None) -> None:
        """Wait from now on when no item is left, for up to `ns`; the rest is as for `Sleeper.fetch`."""
        self.reader = None
        self.longest = ns
        self.most = most
        self.make = make
        self.sleeper = sleeper

    def rise(self) -> int:
        """Stop running and dozing, and return for how many ns the last wait lasted, if it was in vain."""
        self.reader = None
        self.sleeper = self.make = None
        dozed = self.dozed
        self.dozed = 0
        return dozed

    def is_filled(self, items: list[Any]) -> bool:
        """Return whether there is an item to return, after records may have been copied into `items`."""
        if self.items is not items:  # a signal handler, or another thread, requested a record meanwhile
            self.items = self.items[self.at :] + items
            self.at = 0
        return self.at < len(self.items) and self.left != 0

    def doze(self, sleeper: Sleeper) -> bool:
        """Sleep until there is an item to return; False after the timeout, or if something else has to be checked."""
        began = native.monotonic()
        self.dozed = 0
        is_calm = True
        self.dozing += 1  # before reading `left`: a closing thread reads this after it has set that
        try:
            while is_calm and self.dozed < self.longest and self.left != 0 and self.sleeper is sleeper and sleeper.is_undisturbed():
                most = self.most if self.left < 0 or self.left > self.most else self.left
                items = self.clear()
                is_calm = sleeper.fetch(self.longest - self.dozed, most, self.make, items)
                if self.is_filled(items):
                    self.dozed = 0
                    return True
                self.dozed = native.monotonic() - began
            return False
        finally:
            self.dozing -= 1

    def clear(self) -> list[Any]:
        """Forget the items, and return the new empty list."""
        self.items = []
        self.at = 0
        return self.items

    def take(self, refill: Callable[[], Any]) -> Any:
        """Return the next item; if none is left, the result of `refill()`: it counts that one itself, and raises StopIteration."""
        if self.left == 0:
            return refill()
        if self.at >= len(self.items):
            reader = self.reader
            if reader is not None:
                item = self.next_of(reader)
                if item is NO_ITEM:
                    return refill()
                if self.left > 0:
                    self.left -= 1
                return item
            sleeper = self.sleeper
            if sleeper is None or not self.doze(sleeper):
                return refill()
        at = self.at
        self.at = at + 1
        if self.left > 0:
            self.left -= 1
        return self.items[at]

    def next_of(self, reader: FrameReader) -> Any:
        """Return the next record of the files over which the batch runs; NO_ITEM if `refill` has to check the log."""
        if reader.closed or self.most == 0:
            return NO_ITEM
        self.most -= 1
        return reader.step(self.end if self.end != NOTHING else reader.edge_now(), self.make)


class Items:
    """Iterates over the items of a batch, refilling it; a loop over this is faster than one over a Python object."""

    def __init__(self, batch: Batch, refill: Callable[[], Any]) -> None:
        self.batch = batch
        self.refill = refill

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.batch.take(self.refill)


class FrameWriter(Ring):
    """The writing side: frames are put after the tail, then published together.

    Everything here happens under the append lock. `append` takes the lock itself if no other handle holds it, and is one step for threads
    and signal handlers in the compiled twin (`is_one_step`). The other methods are for work passed to `locked`. `has_watchers`: readers
    that watch by inotify asked to be woken before a publication, and the caller wakes them.
    """

    def __init__(
        self,
        data: memoryview,
        control: memoryview,
        seed: int,
        lock: Any,
        holder: memoryview,
        keeps_unread: bool = False,
        expiry: int = 0,
        keeper: Any = None,
        data_fd: int = -1,
        front: Any = None,
    ) -> None:
        """Use writable memory; `holder` are the words that name this handle while it has `lock`, an AppendLock (None: it is the only
        writer).

        keeps_unread: pending records of a durable reader are not overwritten. expiry: ns without progress after which a reader is evicted;
        0: never. keeper: the owner of the descriptors; this keeps it alive. data_fd: of the file whose locked bytes are not
        overwritten; -1: there is none. front: the page before the ring; None: there is none. Raises ValueError for memory that can't be a
        log's, or is read-only.
        """
        Ring.__init__(self, data, control, seed)
        if not self.may_store or not native.is_writable(data):
            raise ValueError("a writer needs memory that it may write to; this is read-only")
        if len(holder) != HOLDER_WORDS * 8:
            raise ValueError(f"the words that name a holder have {HOLDER_WORDS * 8} bytes, not {len(holder)}")
        self.front_owner: Any = memoryview(bytearray(8 * HEAD_ECHO + 8)) if front is None else front
        self.front: Any = native.words_at(self.front_owner)
        self.lock = lock
        self.keeper = keeper
        self.data_fd = data_fd
        self.holder_owner: Any = holder
        self.holder: Any = native.words_at(holder)
        self.process = native.process_id()
        self.is_one_step = native.is_one_step()
        self.era = -1  # of the keys of the value that is being appended; -1: it has none
        self.look_at = -1  # no check is needed before this time, ns since the Unix epoch; -1: never
        self.has_watchers = self.has_sleepers = False  # each is cleared before the wake-up, so that none is lost between threads
        self.published = 0
        self.mark_at = 0
        self.end = 0
        self.batch_end = 0
        self.padded = 0  # bytes of unpublished pads
        self.indexed = 0
        self.next_sequence = 0
        self.last_timestamp = 0
        self.keeps_unread = keeps_unread
        self.expiry = expiry
        self.floor = 0
        self.slots_seen = 0
        self.place = 0
        self.moved = 0
        self.generation = 0
        self.counted = 0
        self.clock = 0

    def append(
        self, key: bytes | None, value: bytes, type: int, codec: int, timestamp: int, era: int = -1, patience: int = 0
    ) -> int:
        """Lock, append one record, publish, unlock; return its sequence. Nothing was done if the result is BUSY, FORKED, LOOK, NO_ROOM,
        MOVED_ON, UNSETTLED or OUTDATED.

        timestamp -1 means now. era: of the keys that the value names, -1 if it names none; OUTDATED if the log is in another one, see
        `ERA_BITS`. patience: ns to sleep for the lock, see `AppendLock.take_within`. Raises TooLarge, Poisoned, Corruption.
        """
        self.check_open()
        if native.process_id() != self.process:
            return FORKED
        now = native.now()
        if self.look_at >= 0 and not 0 <= self.look_at - now <= LOOK_EVERY:
            return LOOK
        if not self.lock.take():
            if not self.lock.take_within(patience):
                return BUSY
            now = native.now()
        self.era = era
        try:
            sequence = self.append_locked(key, value, type, codec, now if timestamp < 0 else timestamp, now)
        finally:
            self.lock.free()
        if self.has_sleepers:
            self.ring()
        return sequence

    def append_locked(self, key: bytes | None, value: bytes, type: int, codec: int, timestamp: int, now: int) -> int:
        """Under the lock: append one record and publish it."""
        if native.load(self.control, MOVED) != 0:
            return MOVED_ON
        if native.load(self.control, PENDING) != 0:
            return UNSETTLED
        self.begin()
        if self.era >= 0 and self.next_sequence >> ERA_BITS != self.era:
            return OUTDATED
        if self.keeps_unread and not self.admits(self.end_of_value(self.end, key, value)):
            return NO_ROOM
        self.clock = now
        try:
            self.put_value(key, value, type, codec, timestamp)
        except Pinned:
            return NO_ROOM
        self.publish()
        return self.next_sequence - 1

    @property
    def is_held(self) -> bool:
        """Return whether this handle has the append lock."""
        return bool(self.lock.is_taken)

    def append_many(self, keys: list[bytes | None] | None, values: list[Any], type: int, timestamp: int) -> range | None:
        """Lock, append a record for each value, publish all at once, unlock; return their sequences.

        None if nothing was done: `append` would have returned a result other than a sequence, or more work is needed. A key or value may
        have to be encoded or refused, or the records may be too many for one publication. Raises the errors of `append`.
        """
        self.check_open()
        if len(values) == 0 or not native.is_bytes_in(values, 0) or self.lock.is_taken or native.process_id() != self.process:
            return None
        now = native.now()
        if self.look_at >= 0 and not 0 <= self.look_at - now <= LOOK_EVERY:
            return None
        done: range | None = self.locked(Bulk(keys, values, type, timestamp))
        return done

    def append_bulk(self, bulk: Bulk) -> range | None:
        """Under the lock: do the work of `append_many`."""
        if native.load(self.control, MOVED) != 0 or native.load(self.control, PENDING) != 0:
            return None
        longest, stored = measure(bulk.keys, bulk.values)
        if longest < 0 or stored > min(self.capacity >> 2, LARGEST):
            return None
        first = self.begin()
        if self.has_pins() or (self.keeps_unread and not self.admits(self.end_of_many(self.end, bulk.keys, bulk.values))):
            return None
        try:
            self.put_many(bulk.keys, bulk.values, bulk.type, None, bulk.timestamp, stored)
        except Pinned:
            return None
        self.publish()
        return range(first, self.next_sequence)

    def locked(self, work: Callable[..., Any]) -> Any:
        """Take the append lock, return the result of `work(self)`, and free the lock; None if another handle holds it.

        Compiled, no signal handler can raise between the lock and the work, or between the work and the unlock. Raises Reentered if this
        handle holds the lock already: two appends would mix.
        """
        self.check_open()
        if self.lock.is_taken:
            raise Reentered("a signal handler or destructor may not append to a handle during an append to it")
        try:
            if not self.lock.take(work):
                return None
            return work(self)
        finally:
            # Interpreted, a signal handler may raise as soon as it is taken, and before it is freed.
            try:
                if self.lock.taken_by is work:
                    self.lock.free()
            except BaseException:
                if self.lock.taken_by is work:
                    self.lock.free()
                raise
            if self.has_sleepers:
                self.ring()

    def close(self) -> None:
        """Release the memory; the caller closes the lock's descriptor. During an append it raises Reentered, and closes nothing."""
        if self.lock is not None:
            if self.lock.is_taken:
                raise Reentered("a signal handler or destructor may not close a handle during an append to it")
            self.lock.close()
        self.front = native.no_words()
        self.front_owner = None
        Ring.close(self)
        self.published = self.end  # unpublished frames are never published

    def ring(self) -> None:
        """Wake the readers that asked and sleep. Not under the lock: a woken reader may run at once, on this processor."""
        self.has_sleepers = False
        if not self.closed:
            self.rouse()

    def begin(self) -> int:
        """Under the lock: load the end of the log, and return its next sequence. Raises Moved if new files may have replaced it."""
        self.check_open()
        if native.load(self.control, MOVED) != 0:
            raise Moved("the log was resized")
        self.sign()
        if native.load(self.control, SYNC_ERROR) != 0:
            raise Poisoned("a flush of this log to disk failed: it takes no more records; copy it to a working disk")
        tail = self.tail()
        at = self.find_mark(tail)
        if at == 0:
            raise Corruption("the control block has no mark for its tail: it is damaged")
        if native.load(self.front, ECHO) > tail:
            raise Corruption("the control block is older than the data: it was restored from a copy; open the log again, which recovers it")
        self.mark_at = at
        self.published = self.end = tail
        self.batch_end = self.indexed = self.padded = 0
        self.next_sequence = native.load(self.control, at + 1)
        self.last_timestamp = native.load(self.control, at + 2)
        self.counted = self.next_sequence
        if self.next_sequence >> 63:
            raise Corruption("the control block says that 2^63 records were appended: it is damaged")
        return self.next_sequence

    def sign(self) -> None:
        """Under the lock: store the holder, unless it was this handle before; finish the incomplete stores of the last one."""
        if native.load(self.control, HOLDER) == self.holder[0]:
            return
        for at in range(HOLDER_WORDS):
            native.store(self.control, HOLDER + at, self.holder[at])
        head = Ring.bounded_head(self, native.load(self.control, HEAD), native.load(self.control, TAIL))
        if native.load(self.front, HEAD_ECHO) < head:  # the last holder was killed between these two stores
            native.store(self.front, HEAD_ECHO, head)

    def admits(self, end: int) -> bool:
        """Under the lock, after `begin`: return whether frames up to `end` overwrite no pending record of a durable reader.

        The slots are read only if the `floor`, the lowest position found the last time, is in the way, or a slot was taken or moved back
        since. A reader that moved on meanwhile makes the floor too low, never too high.
        """
        if not self.keeps_unread:
            return True
        self.check_open()
        changed = native.load(self.control, SLOTS_CHANGED)
        if changed != self.slots_seen or end > self.floor + self.capacity:
            self.floor = self.find_floor(end)
            self.slots_seen = changed
        return end <= self.floor + self.capacity

    def find_floor(self, end: int) -> int:
        """Return the lowest position that a durable reader protects; `end` if none does."""
        head = native.load(self.control, HEAD)
        floor = end
        for slot in range(SLOTS):
            at = SLOTS_AT + slot * SLOT_WORDS
            if native.load(self.control, at) != 0:
                place = self.held_at(at, head, end)
                if place < floor:
                    floor = place
        return floor

    def held_at(self, at: int, head: int, end: int) -> int:
        """Return the position that the reader in the slot at word `at` protects; `end` if it was evicted.

        One with an unknown position, because its slot is damaged, protects everything: the operator has to decide.
        """
        if not self.find_commit(at):
            return head
        mark = EVICTED | self.generation
        if native.load(self.control, at + SLOT_EVICTED) == mark:
            return end
        place = self.place if self.place > head else head
        if end <= place + self.capacity or not self.is_expired(place):
            return place
        native.store(self.control, at + SLOT_EVICTED, mark)
        native.fence()
        # The reader commits, then checks whether it was evicted; the writer does it in the opposite order. One of them sees the other.
        if self.find_commit(at) and (EVICTED | self.generation) != mark:
            return self.place if self.place > head else head
        return end

    def is_expired(self, place: int) -> bool:
        """Return whether a reader that last moved at `moved` has had pending records at `place` for longer than `expiry`."""
        if self.expiry == 0 or place >= self.published:
            return False
        now = native.now()
        since = self.moved
        if self.sequence_at(place, self.published) != NOTHING:
            written = self.timestamp
            if since < written <= now:
                since = written
        return now - since > self.expiry

    def find_commit(self, at: int) -> bool:
        """Find the valid commit of the slot at word `at`, and set `place`, `moved` and `generation`; False if none is sound."""
        for _ in range(TRIES):
            state = native.crc32c(self.seed, self.flags, (at + SLOT_NAME) * 8, (SLOT_COMMITS - SLOT_NAME) * 8)
            found = False
            for which in range(2):
                commit = at + SLOT_COMMITS + which * COMMIT_WORDS
                place = native.load(self.control, commit)
                sequence = native.load(self.control, commit + 1)
                moved = native.load(self.control, commit + 2)
                tags = native.load(self.control, commit + 3)
                generation = tags & LOW
                if (native.crc32c_head(state, place, sequence, moved, generation) ^ LOW) != tags >> 32:
                    continue
                newer = (generation - self.generation) & LOW
                if not found or 0 < newer < 0x80000000:
                    found = True
                    self.place = place
                    self.moved = moved
                    self.generation = generation
            if found:
                return True
        return False

    def end_of(self, position: int, content: int) -> int:
        """Return the position after a frame with `content` bytes of key and value that is put at `position` or after a pad there."""
        stored = (HEADER + content + 7) & ~7
        room = self.capacity - self.offset_of(position)
        if room < stored:
            position += room
        return position + stored

    def end_of_value(self, position: int, key: bytes | None, value: bytes) -> int:
        """Return the position after a record that is put at `position`; a record that is too large is refused by `put`."""
        content = len(value) if key is None else len(key) + len(value)
        if HEADER + content > self.capacity >> 2:
            return position
        return self.end_of(position, content)

    def end_of_many(self, position: int, keys: list[bytes | None] | None, values: list[bytes]) -> int:
        """Return the position after the records if `put_many` put them at `position`."""
        for at, value in enumerate(values):
            position = self.end_of_value(position, None if keys is None else keys[at], value)
        return position

    def end_of_columns(
        self,
        position: int,
        rows: memoryview | None,
        count: int,
        key_offsets: memoryview,
        has_key: memoryview | None,
        value_offsets: memoryview,
    ) -> int:
        """Return the position after the records if `put_columns` put them at `position`."""
        for at in range(count):
            row = at if rows is None else rows[at]
            content = value_offsets[row + 1] - value_offsets[row]
            if has_key is not None and has_key[row]:
                content += key_offsets[row + 1] - key_offsets[row]
            position = self.end_of(position, content)
        return position

    def put_value(self, key: bytes | None, value: bytes, type: int, codec: int, timestamp: int) -> None:
        """Put one record after the end, unpublished. A timestamp smaller than the last one is raised to it."""
        key_length = 0
        key_tag = NO_KEY
        if key is not None:
            key_length = key_tag = len(key)
        content = key_length + len(value)
        stored = (HEADER + content + 7) & ~7
        self.make_way(content)
        if timestamp < self.last_timestamp:
            timestamp = self.last_timestamp
        position = self.end
        offset = position - self.lap
        native.put_frame(
            self.seed,
            self.data,
            self.words,
            offset,
            stored | (content << 32),
            self.next_sequence,
            timestamp,
            type | (codec << 8) | (key_tag << 16),
            native.bytes_of(value if key is None else key),
            0,
            key_length,
            native.bytes_of(value),
            0,
        )
        if position >= self.indexed:
            self.index(position, offset, self.next_sequence, timestamp)
        native.prefetch(self.data, offset + WRITTEN_AHEAD, stored)
        self.end = position + stored
        self.next_sequence += 1
        self.last_timestamp = timestamp

    def make_way(self, content: int) -> int:
        """Prepare to put a record of `content` bytes of key and value at `end`; return the position up to which frames need no other call.

        Publishes earlier frames if necessary, and drops the oldest ones. If the record doesn't fit before the end of the ring, a pad fills
        it, and `end` moves. Afterwards `lap` is that of all positions up to the returned one. Raises TooLarge, Pinned.
        """
        stored = (HEADER + content + 7) & ~7
        quarter = min(self.capacity >> 2, LARGEST)
        if stored > quarter:
            raise TooLarge(
                f"a record of {content} bytes takes {stored} with its header; a ring of {self.capacity} bytes holds at most {quarter}"
            )
        if self.end - self.published - self.padded + stored > quarter and self.end > self.published:
            # Unpublished frames must never fill the ring.
            self.publish()
        room = self.capacity - Ring.offset_of(self, self.end)
        head = self.make_room(self.end + stored if room >= stored else self.end + room + stored)
        if head == NOTHING:
            raise Pinned("no room: an open view of some process pins the oldest records")
        offset = Ring.offset_of(self, self.end)  # again: `make_room` may have changed `lap`
        if room < stored:
            self.put_pad(offset, room)
            room = self.capacity - Ring.offset_of(self, self.end)
        return min(self.end + room, head + self.capacity, self.published + self.padded + quarter)

    def put_pad(self, offset: int, room: int) -> None:
        """Fill the last `room` bytes of the ring, from `end` on, with a pad; if a header doesn't fit they stay unchanged."""
        self.padded = room
        if room >= HEADER:
            at = offset >> 3
            state = native.crc32c_head(self.seed, room, self.next_sequence, 0, PAD << 8)
            self.words[at] = room
            self.words[at + 1] = self.next_sequence
            self.words[at + 2] = 0
            self.words[at + 3] = (PAD << 8) | ((state ^ LOW) << 32)
            # Unpublished frames of a dead writer here must not be found after a damaged pad.
            native.clear(self.data, offset + HEADER, room - HEADER)
        self.end += room

    def make_room(self, end: int) -> int:
        """Drop the oldest frames until the bytes up to position `end` fit, before any byte of them is overwritten; return the head.

        Within a batch, up to `STEP` bytes more, if the batch needs them. NOTHING if one of the frames is pinned: then none was dropped.

        Damage is skipped up to the next sound frame: it never stops a writer. `min_seq` never decreases, and the head ends at a frame that
        belongs there: no frame with this sequence or a later one is a leftover of an earlier lap.
        """
        head = Ring.bounded_head(self, native.load(self.control, HEAD), self.published)
        if end - head <= self.capacity:
            return head
        end = max(end, min(self.batch_end, self.published + (self.capacity >> 2), end + STEP))
        words, capacity, published = self.words, self.capacity, self.published
        lap = self.lap  # of `end`; so that of the head needs no division
        while head < lap:
            lap -= capacity
        before = head
        least = least_before = native.load(self.control, MIN_SEQ)
        stored = NOTHING
        lengths = tags = 0
        while head < published:
            offset = head - lap
            if offset >= capacity:
                lap += capacity
                offset -= capacity
            room = min(capacity - offset, published - head)
            at = offset >> 3
            if room < stored or words[at] != lengths or words[at + 1] != least or (words[at + 3] & LOW) != tags:
                stored = length_of(words, offset, room, least)
                if stored == 0:
                    found = Ring.parse(self, head, published)
                    stored = NOTHING
                    if found == BAD or self.goes_back(found, least) or not self.may_be_oldest(found, least, head):
                        head = self.scan(head + 8, published, least, self.next_sequence - 1)
                        continue
                    if found != FRAME:
                        head += self.stored
                        continue
                    least = self.sequence_found
                    stored = self.stored
                lengths = words[at]
                tags = words[at + 3] & LOW
            if end - head <= capacity:
                break
            least += 1
            head += stored
        if native.load(self.control, PINS) != 0 and self.is_pinned(before, head):
            return NOTHING
        native.store(self.control, MIN_SEQ, least)
        native.store(self.control, HEAD, head)
        native.fence()
        if native.load(self.control, PINS) != 0 and self.is_pinned(before, head):
            # Pinned at this moment, by a reader that may have seen the old head. Nothing is overwritten yet.
            native.store(self.control, HEAD, before)
            native.store(self.control, MIN_SEQ, least_before)
            return NOTHING
        native.store(self.front, HEAD_ECHO, head)  # the head is final now, and nothing is overwritten yet
        return head

    def has_pins(self) -> bool:
        """Return whether parts of the ring may be pinned."""
        return native.load(self.control, PINS) != 0

    def would_overwrite_pinned(self, end: int) -> bool:
        """Under the lock, after `begin`: return whether frames up to position `end` would overwrite pinned bytes."""
        head = Ring.bounded_head(self, native.load(self.control, HEAD), self.published)
        if end - head <= self.capacity:
            return False
        stop = min(end - self.capacity, self.published)
        return self.has_pins() and self.is_pinned(head, stop)

    def is_pinned(self, start: int, end: int) -> bool:
        """Under the lock: return whether a byte between two positions is pinned; reset the word `pins` if none is.

        A reader locks, stores the word, then reads the head; so a lock after our last check stores it after us.
        """
        if self.data_fd < 0:
            return False
        offset = self.offset_of(start)
        length = min(end - start, self.capacity)
        first = min(length, self.capacity - offset)
        if native.locked_from(self.data_fd, DATA_START + offset, first) >= 0:
            return True
        if length > first and native.locked_from(self.data_fd, DATA_START, length - first) >= 0:
            return True
        if native.locked_from(self.data_fd, DATA_START, self.capacity) < 0:
            native.store(self.control, PINS, 0)
            native.fence()
            if native.locked_from(self.data_fd, DATA_START, self.capacity) >= 0:
                native.store(self.control, PINS, 1)
        return False

    def may_be_oldest(self, found: int, least: int, position: int) -> bool:
        """Return whether the frame or pad at `position` can be trusted; the checksum is compared only if the sequence isn't `least`."""
        if found == FRAME:
            if self.sequence_found == least:
                return True
            return self.sequence_found < self.next_sequence and self.is_sound(self.offset)
        return self.stored < HEADER or self.sequence_found <= self.next_sequence

    def index(self, position: int, offset: int, sequence: int, timestamp: int) -> None:
        """Enter the frame in the index if it is the first one of its block in this lap."""
        block = offset >> BLOCK
        at = INDEX + INDEX_WORDS * block
        first = position - offset + (block << BLOCK)
        self.indexed = first + (1 << BLOCK)
        known = native.load(self.control, at)
        if known & 1 and first <= known < position:
            return
        native.store(self.control, at, 0)
        native.store(self.control, at + 1, sequence)
        native.store(self.control, at + 2, timestamp)
        native.store(self.control, at, position | 1)

    def publish(self) -> None:
        """Make every put frame visible, and safe from a crash of this process, with one store."""
        if self.end == self.published:
            return
        self.count()
        other = MARKS + MARK_WORDS if self.mark_at == MARKS else MARKS
        native.store(self.control, other + 1, self.next_sequence)
        native.store(self.control, other + 2, self.last_timestamp)
        native.store(self.control, other, self.end)
        native.store(self.control, TAIL, self.end)
        native.store(self.front, ECHO, self.end)  # after the tail, so that it is never ahead of it
        self.mark_at = other
        self.published = self.end
        self.padded = 0
        native.fence()
        if native.load(self.control, WANTED) != 0:
            wanted = native.exchange(self.control, WANTED, 0)
            if wanted & 0xFF:
                self.has_watchers = True
            if wanted > 0xFF:
                self.has_sleepers = True

    def count(self) -> None:
        """Count the records to be published in the rates, at the clock's time.

        A bucket of another time, earlier or (after the clock was set back) later, is emptied first. A writer that is killed here has
        counted records that it never published, perhaps not in all three series.
        """
        at = RATES
        number = self.clock // 1_000_000_000
        for _series in range(3):
            bucket = at + RATE_WORDS * (number & (BUCKETS - 1))
            if native.load(self.control, bucket) != number:
                native.store(self.control, bucket, 0)
                native.store(self.control, bucket + 1, 0)
                native.store(self.control, bucket + 2, 0)
                native.store(self.control, bucket, number)
            native.store(self.control, bucket + 1, (native.load(self.control, bucket + 1) + self.next_sequence - self.counted) & NOTHING)
            native.store(self.control, bucket + 2, (native.load(self.control, bucket + 2) + self.end - self.published) & NOTHING)
            at += RATE_WORDS * BUCKETS
            number //= 60
        self.counted = self.next_sequence

    def put_many(
        self, keys: list[bytes | None] | None, values: list[bytes], type: int, codecs: bytes | None, timestamp: int, stored: int = 0
    ) -> None:
        """Put a record for each value; `codecs` has one byte for each (None: 0 for all). timestamp -1 means now.

        stored: least bytes of the ring for all records together; so much room is made at once. Raises TypeError if a value isn't `bytes`,
        or a key is invalid.
        """
        self.check_open()
        count = len(values)
        if (codecs is not None and count != len(codecs)) or (keys is not None and len(keys) != count):
            raise ValueError("there is not one codec and one key for each value")
        self.clock = native.now()
        if timestamp < 0:
            timestamp = self.clock
        self.batch_end = self.end + stored
        data, words, seed = self.data, self.words, self.seed
        indexed = self.indexed
        position = limit = self.end
        lap = self.lap
        sequence = self.next_sequence
        last = self.last_timestamp
        codec = 0
        for at in range(count):
            if not fits(keys, values, at):
                raise TypeError(f"a value is bytes, and a key is None or fewer than {NO_KEY} bytes")
            key = value = native.bytes_in(values, at)
            content = native.length_in(values, at)
            key_length = 0
            key_tag = NO_KEY
            if keys is not None and not native.is_none_in(keys, at):
                key = native.bytes_in(keys, at)
                key_length = key_tag = native.length_in(keys, at)
                content += key_length
            stored = (HEADER + content + 7) & ~7
            if position + stored > limit:
                self.end, self.next_sequence, self.last_timestamp = position, sequence, last
                limit = self.make_way(content)
                position, lap = self.end, self.lap
            if last < timestamp:
                last = timestamp
            if codecs is not None:
                codec = codecs[at]
            tags = type | (codec << 8) | (key_tag << 16)
            offset = position - lap
            native.put_frame(seed, data, words, offset, stored | (content << 32), sequence, last, tags, key, 0, key_length, value, 0)
            if position >= indexed:
                self.index(position, offset, sequence, last)
                indexed = self.indexed
            native.prefetch(data, offset + WRITTEN_AHEAD, stored)
            position += stored
            sequence += 1
        self.end, self.next_sequence, self.last_timestamp = position, sequence, last
        self.batch_end = 0

    def put_copy(self, sequence: int, timestamp: int, type: int, key: bytes | None, value: bytes, codec: int) -> None:
        """Put a record of another log with its own sequence, which must not be before the next one."""
        self.check_open()
        if sequence < self.next_sequence:
            raise Corruption(f"record {sequence} comes after record {self.next_sequence - 1}: the log is damaged")
        self.next_sequence = sequence
        self.put_value(key, value, type, codec, timestamp)

    def put_columns(
        self,
        rows: memoryview | None,
        count: int,
        key_offsets: memoryview,
        keys: memoryview,
        has_key: memoryview | None,
        value_offsets: memoryview,
        values: memoryview,
        types: memoryview | None,
        codec: int,
        timestamps: memoryview | None,
        stored: int = 0,
    ) -> None:
        """Put a record for each of the `count` row numbers in `rows` (int32; None: 0, 1, 2 ...), from columns in Arrow's layout.

        key_offsets, value_offsets: int32, one more than there are rows; has_key: a byte for each row, 0 for no key (None: no keys); types:
        a byte for each row (None: 0); timestamps: int64, -1 for now (None: now for all); stored: as in `put_many`.
        """
        self.check_open()
        key_data = native.bytes_at(keys)
        value_data = native.bytes_at(values)
        now = self.clock = native.now()
        self.batch_end = self.end + stored
        data, words, seed = self.data, self.words, self.seed
        indexed = self.indexed
        position = limit = self.end
        lap = self.lap
        sequence = self.next_sequence
        last = self.last_timestamp
        for at in range(count):
            row = at if rows is None else rows[at]
            value_from = value_offsets[row]
            content = value_offsets[row + 1] - value_from
            key_from = key_length = 0
            key_tag = NO_KEY
            if has_key is not None and has_key[row]:
                key_from = key_offsets[row]
                key_length = key_tag = key_offsets[row + 1] - key_from
                content += key_length
            stored = (HEADER + content + 7) & ~7
            if position + stored > limit:
                self.end, self.next_sequence, self.last_timestamp = position, sequence, last
                limit = self.make_way(content)
                position, lap = self.end, self.lap
            timestamp = now if timestamps is None else timestamps[row]
            if timestamp < 0:
                timestamp = now
            if last < timestamp:
                last = timestamp
            tags = (0 if types is None else types[row]) | (codec << 8) | (key_tag << 16)
            offset = position - lap
            lengths = stored | (content << 32)
            native.put_frame(
                seed, data, words, offset, lengths, sequence, last, tags, key_data, key_from, key_length, value_data, value_from
            )
            if position >= indexed:
                self.index(position, offset, sequence, last)
                indexed = self.indexed
            native.prefetch(data, offset + WRITTEN_AHEAD, stored)
            position += stored
            sequence += 1
        self.end, self.next_sequence, self.last_timestamp = position, sequence, last
        self.batch_end = 0


class Bulk:
    """Records for `FrameWriter.append_many`: the work under the lock."""

    def __init__(self, keys: list[bytes | None] | None, values: list[Any], type: int, timestamp: int) -> None:
        self.keys = keys
        self.values = values
        self.type = type
        self.timestamp = timestamp

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def __call__(self, writer: FrameWriter) -> range | None:
        return writer.append_bulk(self)


class Single:
    """The single appends of a log, with only compiled code between the caller and the loops."""

    def __init__(self) -> None:
        self._writer: FrameWriter | None = None
        self.is_durable = False

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> int:
        """Append one record and return its sequence; it survives a crash of this process when the call returns.

        value: bytes, str, or any value that the log's codec takes. key: bytes, str (stored as UTF-8), or None for no key. type: 0..255,
        chosen by the caller. timestamp: ns since the Unix epoch; by default the clock's, and at most a day after it. An earlier one than
        the last record's is raised to that. timeout: seconds to wait for the lock and for room (default: the handle's). durable: return
        when the record is on disk; all waiting callers share one flush. A handle of the level "disk" always does this.

        Raises Unencodable, TooLarge, Unsupported, TypeError and ValueError for the arguments. Raises LockTimeout, SpoolFull, Poisoned,
        Corruption, TimeUnknown, Closed, Reentered, LogVanished, or the system's OSError (no space, no permission). Nothing was written
        then. If only the flush fails, the record was appended, and the error is NotDurable, or Poisoned with a note.
        """
        sequence = self.append_at_once(value, key, type, timestamp, durable)
        if sequence >= 0:
            return sequence
        return self.append_slowly(value, key, type, timestamp, timeout, durable)

    def append_at_once(self, value: Any, key: Any, type: Any, timestamp: Any, durable: Any) -> int:
        """Append a record in one step and wake its waiters; see `FrameWriter.append`. BUSY if it needs more than one step."""
        if not isinstance(self._writer, FrameWriter) or durable or self.is_durable:
            return BUSY
        writer = self._writer
        if not writer.is_one_step:
            return BUSY
        if not native.is_bytes(value) or not are_plain(key, type, timestamp):
            return BUSY
        sequence = writer.append(key, value, type, 0, -1 if timestamp is None else timestamp)
        if sequence >= 0 and writer.has_watchers:
            self.ring(writer)
        return sequence

    def append_slowly(
        self, value: Any, key: bytes | str | None, type: int, timestamp: int | None, timeout: float | None, durable: bool
    ) -> int:
        """Append a record that needs more than one step: to encode the value, to wait for the lock or the disk, or to raise for the
        arguments.
        """
        raise NotImplementedError

    def ring(self, writer: FrameWriter) -> None:
        """Wake the readers that asked for it."""
        raise NotImplementedError


class FrameSurvey(Ring):
    """Finds every sound frame in a ring in any state after a crash of the machine; erases leftovers, and fills the index.

    A *run* is a row of adjacent sound frames with consecutive sequences. `start`, `position` (its end), `first`, `last`, `newest` (the last
    timestamp) and `frames` describe the one found by `next_run`. A sound pad is a run without frames.
    """

    def __init__(self, data: memoryview, control: memoryview, seed: int) -> None:
        """Use the ring; it must be writable for `erase`, and the control block for `clear_index` and `enter_run`."""
        Ring.__init__(self, data, control, seed)
        self.may_erase = native.is_writable(data)
        self.start = 0
        self.position = 0
        self.first = 0
        self.last = 0
        self.newest = 0
        self.frames = 0

    def next_run(self, position: int, stop: int, least: int, split: int) -> bool:
        """Find the first run from `position` on whose sequences are at least `least`; False if none starts before `stop`.

        A run ends before the sequence `split`. Older sound frames are skipped whole; everywhere else every 8 bytes may start a frame, also
        after the header of a pad, where bytes may be of a later lap.
        """
        self.check_open()
        end = stop + self.capacity
        while position < stop:
            found = self.parse(position, end)
            if found == FRAME and self.is_sound(self.offset):
                if self.sequence_found >= least:
                    self.follow(position, stop, split)
                    return True
                position += self.stored
            elif found == SKIP and self.stored < HEADER:
                position += self.stored
            elif found == SKIP and self.sequence_found >= least:
                self.start = position
                self.position = position + self.stored
                self.first = self.last = self.sequence_found
                self.frames = 0
                return True
            else:
                position += self.step(position % self.capacity)
        return False

    def step(self, offset: int) -> int:
        """Return the distance to the next offset at which a frame may start: a page of zeros has none."""
        if offset & 4095 == 0 and offset + 4096 <= self.capacity and native.is_zero(self.data, offset, 4096):
            return 4096
        return 8

    def follow(self, position: int, stop: int, split: int) -> None:
        """Extend the run that begins with the frame just parsed, at `position`."""
        end = stop + self.capacity
        self.start = position
        self.first = self.sequence_found
        self.frames = 0
        while True:
            self.frames += 1
            self.last = self.sequence_found
            self.newest = self.timestamp
            position += self.stored
            if position >= stop or self.parse(position, end) != FRAME or self.sequence_found != self.last + 1:
                break
            if self.sequence_found == split or not self.is_sound(self.offset):
                break
        self.position = position

    def place_of(self, position: int, end: int, sequence: int) -> int:
        """Return the position of the frame with this sequence in the run between these positions; `end` if it has none."""
        self.check_open()
        while position < end and self.parse(position, end) == FRAME and self.sequence_found < sequence:
            position += self.stored
        return position

    def erase(self, position: int, end: int, least: int) -> None:
        """Overwrite the first word of each frame or pad of the run between these positions whose sequence is at least `least`."""
        self.check_erasable()
        while position < end and self.parse(position, end) != BAD:
            at = (position % self.capacity) >> 3
            position += self.stored
            if self.sequence_found >= least:
                self.words[at] = 0

    def cut(self, position: int, end: int, least: int) -> None:
        """Overwrite the first word of a damaged frame between these positions that would extend past `end`, into other data.

        A writer that makes room moves from header to header without comparing checksums, and would skip that data.
        """
        self.check_erasable()
        while position < end:
            found = self.parse(position, end + self.capacity)
            if found == BAD:
                break
            at = (position % self.capacity) >> 3
            position += self.stored
            if found == FRAME and position > end and self.sequence_found >= least:
                self.words[at] = 0

    def check_erasable(self) -> None:
        """Raise Closed as `check_open` does, and ValueError if the ring is read-only."""
        self.check_open()
        if not self.may_erase:
            raise ValueError("the memory of the ring is read-only")

    def clear_index(self) -> None:
        """Empty every entry of the index."""
        self.check_writable()
        blocks = (self.capacity + (1 << BLOCK) - 1) >> BLOCK
        for block in range(blocks):
            native.store(self.control, INDEX + INDEX_WORDS * block, 0)

    def enter_run(self, position: int, end: int) -> None:
        """Enter the first frame of each block between these positions in the index; every frame there is sound.

        Runs are entered in the order of their positions, into a cleared index.
        """
        self.check_writable()
        while position < end and self.parse(position, end) == FRAME:
            offset = position % self.capacity
            block = offset >> BLOCK
            at = INDEX + INDEX_WORDS * block
            known = native.load(self.control, at)
            if known & 1 == 0 or known < position - offset + (block << BLOCK):
                native.store(self.control, at, 0)
                native.store(self.control, at + 1, self.sequence_found)
                native.store(self.control, at + 2, self.timestamp)
                native.store(self.control, at, position | 1)
            position += self.stored


def check_sizes(capacity: int, control: int) -> None:
    """Raise ValueError unless a ring and a control block of so many bytes belong together."""
    if capacity < HEADER or capacity & 7:
        raise ValueError(f"a ring has {HEADER} bytes at least, and a multiple of 8, not {capacity}")
    least = 8 * (INDEX + INDEX_WORDS * ((capacity + (1 << BLOCK) - 1) >> BLOCK))
    if control < least or control & 7:
        raise ValueError(f"the control block of a ring of {capacity} bytes has {least} bytes at least, and a multiple of 8, not {control}")


def is_record(lengths: int, tags: int, room: int) -> bool:
    """Return whether the words of a header, the first and the last one, can be those of a record in `room` bytes; a pad's are not."""
    stored = lengths & LOW
    content = lengths >> 32
    key_length = (tags >> 16) & NO_KEY
    if stored < HEADER or stored & 7 or stored > room or HEADER + content > stored:
        return False
    return (key_length == NO_KEY or key_length <= content) and ((tags >> 8) & 0xFF) != PAD


def judge(head: int, position: int, state: int, tags: int) -> int:
    """Return why the frame at `position`, which was copied out before `head` was loaded, is void; FULL if it is sound."""
    if head > position:
        return OVERRUN
    return FULL if (state ^ LOW) == tags >> 32 else DAMAGED


def are_plain(key: bytes | None, type: int, timestamp: int | None) -> bool:
    """Return whether these fit into a frame unchanged, and the log doesn't refuse the timestamp."""
    if key is not None and not (native.is_bytes(key) and len(key) < NO_KEY):
        return False
    return 0 <= type <= 255 and (timestamp is None or 0 <= timestamp <= native.now() + MOST_AHEAD)


def length_of(words: Any, offset: int, room: int, sequence: int) -> int:
    """Return the bytes that the frame at `offset` takes; 0 unless its header is possible, has this sequence, and stays within `room`."""
    if room < HEADER:
        return 0
    at = offset >> 3
    lengths = words[at]
    tags = words[at + 3]
    stored: int = lengths & LOW
    content = lengths >> 32
    key_tag = (tags >> 16) & NO_KEY
    if words[at + 1] != sequence or ((tags >> 8) & 0xFF) == PAD or (key_tag > content and key_tag != NO_KEY):
        return 0
    if stored & 7 or stored > room or HEADER + content > stored:
        return 0
    return stored


def fits(keys: list[Any] | None, values: list[Any], at: int) -> bool:
    """Return whether the value at an index is `bytes`, and the key, if there are any, None or `bytes` that are not too long."""
    if not native.is_bytes_in(values, at):
        return False
    if keys is None or native.is_none_in(keys, at):
        return True
    return native.is_bytes_in(keys, at) and native.length_in(keys, at) < NO_KEY


def measure(keys: list[Any] | None, values: list[Any]) -> tuple[int, int]:
    """Return the size of the longest record's key and value, and the bytes that all take in the ring without a pad.

    -1, 0 if something can't be stored: a value that isn't `bytes`, a key that is neither `bytes` nor None, or too long, or a wrong number
    of keys.
    """
    longest = 0
    total = 0
    if keys is not None and len(keys) != len(values):
        return -1, 0
    for at in range(len(values)):
        if not fits(keys, values, at):
            return -1, 0
        length = native.length_in(values, at)
        if keys is not None and not native.is_none_in(keys, at):
            length += native.length_in(keys, at)
        if length > longest:
            longest = length
        total += (HEADER + length + 7) & ~7
    return longest, total


def measure_columns(count: int, key_offsets: memoryview, has_key: memoryview | None, value_offsets: memoryview) -> tuple[int, int]:
    """Return the size of the longest key, and of the largest key and value together, of `count` rows for `put_columns`."""
    longest_key = 0
    largest = 0
    for row in range(count):
        content = value_offsets[row + 1] - value_offsets[row]
        if has_key is not None and has_key[row]:
            key_length = key_offsets[row + 1] - key_offsets[row]
            content += key_length
            if key_length > longest_key:
                longest_key = key_length
        if content > largest:
            largest = content
    return longest_key, largest


def crc32c(state: int, data: bytes) -> int:
    """Return the CRC32C register `state` after some further bytes."""
    return native.crc32c(state, native.bytes_of(data), 0, len(data))
