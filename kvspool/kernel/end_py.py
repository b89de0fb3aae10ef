"""The end of a ring for the owner of the append lock: the next frame, the room for it, and its publication.

This source is compiled as a part of `frames_c`; see `frames_py`.
"""

from __future__ import annotations

from typing import Any

import kvspool.kernel.machine as native
from kvspool.errors import Corruption, Moved, Pinned, Poisoned, TooLarge
from kvspool.kernel.frames_py import (
    BAD,
    BLOCK,
    BUCKETS,
    COMMIT_WORDS,
    DATA_START,
    ECHO,
    EVICTED,
    FRAME,
    HEAD,
    HEAD_ECHO,
    HEADER,
    HOLDER,
    HOLDER_WORDS,
    INDEX,
    INDEX_WORDS,
    LARGEST,
    LOW,
    MARK_WORDS,
    MARKS,
    MIN_SEQ,
    MOVED,
    NOTHING,
    PAD,
    PINS,
    RATE_WORDS,
    RATES,
    SLOT_COMMITS,
    SLOT_EVICTED,
    SLOT_NAME,
    SLOT_WORDS,
    SLOTS,
    SLOTS_AT,
    SLOTS_CHANGED,
    STEP,
    SYNC_ERROR,
    TAIL,
    TRIES,
    WANTED,
    length_of,
)
from kvspool.kernel.ring_py import Ring


class RingEnd(Ring):
    """The end of the log under the append lock: frames are put after the tail, then published together.

    `has_watchers`: readers that watch by inotify asked to be woken before a publication, and the caller wakes them; `has_sleepers`: others
    sleep on `rings`. `floor`: the lowest position that a durable reader protected at the last check; see `admits`.
    """

    def __init__(
        self,
        data: memoryview,
        control: memoryview,
        seed: int,
        holder: memoryview,
        keeps_unread: bool = False,
        data_fd: int = -1,
        front: Any = None,
    ) -> None:
        """Use writable memory; see `FrameWriter`."""
        Ring.__init__(self, data, control, seed)
        if not self.may_store or not native.is_writable(data):
            raise ValueError("a writer needs memory that it may write to; this is read-only")
        if len(holder) != HOLDER_WORDS * 8:
            raise ValueError(f"the words that name a holder have {HOLDER_WORDS * 8} bytes, not {len(holder)}")
        self.front_owner: Any = memoryview(bytearray(8 * HEAD_ECHO + 8)) if front is None else front
        self.front: Any = native.words_at(self.front_owner)
        self.data_fd = data_fd
        self.holder_owner: Any = holder
        self.holder: Any = native.words_at(holder)
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
        self.floor = 0
        self.slots_seen = 0
        self.place = 0
        self.moved = 0
        self.generation = 0
        self.counted = 0
        self.clock = 0

    def begin(self) -> int:
        """Under the lock: load the end of the log, and return its next sequence. Raises Moved if new files may have replaced it."""
        self.check_open()
        if native.load(self.control, MOVED) != 0:
            raise Moved("the log was resized")
        RingEnd.sign(self)
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

    def publish(self) -> None:
        """Make every put frame visible, and safe from a crash of this process, with one store."""
        if self.end == self.published:
            return
        RingEnd.count(self)
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
        if native.load(self.control, at + SLOT_EVICTED) == EVICTED | self.generation:
            return end
        return self.place if self.place > head else head

    def commit_in(self, slot: int) -> tuple[int, int, int] | None:
        """Return the position of the commit in a reader's slot, its time and its generation; None if writers don't wait for a reader there,
        or its commits are damaged.
        """
        at = self.slot_at(slot)
        if native.load(self.control, at) == 0 or not self.find_commit(at):
            return None
        if native.load(self.control, at + SLOT_EVICTED) == EVICTED | self.generation:
            return None
        return self.place, self.moved, self.generation

    def evict(self, slot: int, generation: int) -> None:
        """Under the lock: stop waiting for the reader in a slot while its commit has this generation. Then call `admits`.

        The reader commits, then checks whether it was evicted; the writer does it in the opposite order. One of them sees the other.
        """
        native.store(self.control, self.slot_at(slot) + SLOT_EVICTED, EVICTED | (generation & LOW))
        native.fence()

    def slot_at(self, slot: int) -> int:
        """Return the first word of a reader's slot. Raises Closed, and IndexError for a slot that doesn't exist."""
        self.check_open()
        if not 0 <= slot < SLOTS:
            raise IndexError(f"there are slots for {SLOTS} readers, and none with the number {slot}")
        return SLOTS_AT + slot * SLOT_WORDS

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
            RingEnd.publish(self)
        room = self.capacity - Ring.offset_of(self, self.end)
        head = RingEnd.make_room(self, self.end + stored if room >= stored else self.end + room + stored)
        if head == NOTHING:
            raise Pinned("no room: an open view of some process pins the oldest records")
        offset = Ring.offset_of(self, self.end)  # again: `make_room` may have changed `lap`
        if room < stored:
            RingEnd.put_pad(self, offset, room)
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
