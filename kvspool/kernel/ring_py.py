"""The memory of one log: the words of its control block, its frames in place, and the search among them.

This source is compiled as a part of `frames_c`; see `frames_py`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import kvspool.kernel.group_py as group
import kvspool.kernel.machine as native
from kvspool.errors import Closed, Corruption
from kvspool.kernel.frames_py import (
    BAD,
    BLOCK,
    FRAME,
    HEAD,
    HEADER,
    INDEX,
    INDEX_WORDS,
    LOW,
    MARK_WORDS,
    MARKS,
    MOST_POSITION,
    MOVED,
    NO_KEY,
    NOTHING,
    PAD,
    RINGS,
    SKIP,
    SLEEPS,
    SYNC_ERROR,
    SYNCED_SEQ,
    TAIL,
    WANTED,
    WATCHES,
    check_sizes,
    is_record,
)
from kvspool.system.handles import refuse_copy


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

    def request_wake_up(self, way: int) -> int:
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

    def wake_readers(self) -> bool:
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
