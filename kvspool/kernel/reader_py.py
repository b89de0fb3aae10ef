"""The reader of frames: copies them out one by one, or into columns, checks them in place, and waits for more.

This source is compiled as a part of `frames_c`; see `frames_py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvspool.kernel.machine as native
from kvspool.errors import Closed
from kvspool.kernel.frames_py import (
    BAD,
    DAMAGED,
    END,
    FRAME,
    FULL,
    HEAD,
    HEADER,
    JUMPED,
    LOW,
    NO_ITEM,
    NO_KEY,
    OVERRUN,
    RINGS,
    SLEEPS,
    TAIL,
    is_record,
    judge,
)
from kvspool.kernel.ring_py import Ring


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
        position = self.position
        sequence = self.sequence
        try:
            while count < limit:
                item = self.step(end, make)
                if item is NO_ITEM:
                    return out
                out.append(item)
                if self.closed:  # by a signal handler, a destructor or another thread that ran during `make`
                    return out
                position = self.position
                sequence = self.sequence
                count += 1
        except BaseException:  # of a signal handler, perhaps after the reader has moved on
            if len(out) == count:
                self.position = position
                self.sequence = sequence
            raise
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

    def sleep_and_fetch(
        self, end: int, spin: int, slice: int, ns: int, blind: int, limit: int, make: Callable[..., Any] | None, out: list[Any]
    ) -> list[Any]:
        """Fetch the present records. If there is none after `end`, wait for new ones: first poll for `spin` of `ns`, then sleep.

        slice, blind: see `spin` and `sleep`. Compiled, this is one step: everything between the wake-up and the record delays a reader.
        """
        if self.position >= end:
            if not self.spin(spin, slice) and not self.closed:
                self.sleep(end, ns - spin, blind)
            if self.closed:  # by another thread meanwhile
                return out
            end = self.edge_now()
        return self.fetch(end, limit, make, out)

    def sleep(self, end: int, ns: int, blind: int) -> None:
        """Sleep until a writer rings, up to `ns`, unless there is something after `end`; or until a signal, whose handler may raise.

        blind: most ns of the sleep if no writer can end it.
        """
        self.check_open()
        seen = native.load(self.control, RINGS)  # before the checks: a later wake-up ends the sleep, even before it begins
        if self.may_store:
            self.request_wake_up(SLEEPS)
        if self.is_woken or self.edge_now() != end:
            self.is_woken = False
            return
        if not self.may_store or self.has_moved():  # no writer rings, or none rings here any more
            ns = min(ns, blind)
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

    def spin(self, ns: int, slice: int) -> bool:
        """Poll for up to `ns` for something to fetch, and return whether there is.

        slice: ns of polling until handlers of signals may run, and the caller's other threads may close this.
        """
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
            native.spin(owner, words, self.edge, seen, left if left < slice else slice)
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
