"""The writer of frames: takes the append lock, puts records after the end, and publishes them.

This source is compiled as a part of `frames_c`; see `frames_py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import kvspool.kernel.machine as native
from kvspool.errors import Corruption, Pinned, Reentered
from kvspool.kernel.end_py import RingEnd
from kvspool.kernel.frames_py import (
    BUSY,
    ERA_BITS,
    FORKED,
    HEADER,
    LARGEST,
    LOOK,
    MOVED,
    MOVED_ON,
    NO_KEY,
    NO_ROOM,
    OUTDATED,
    PENDING,
    UNSETTLED,
    WRITTEN_AHEAD,
)
from kvspool.kernel.ring_py import Ring
from kvspool.system.handles import refuse_copy


class FrameWriter(RingEnd):
    """The writing side: takes the append lock and puts records.

    Everything happens under the append lock. `append` and `append_many` take the lock themselves if no other handle holds it. Compiled,
    they are one step for threads and signal handlers (`machine.is_one_step`); interpreted, threads exclude each other by `guard`. The other
    methods are for work passed to `locked`.
    """

    def __init__(
        self,
        data: memoryview,
        control: memoryview,
        seed: int,
        lock: Any,
        holder: memoryview,
        keeps_unread: bool = False,
        keeper: Any = None,
        data_fd: int = -1,
        front: Any = None,
    ) -> None:
        """Use writable memory; `holder` are the words that name this handle while it has `lock`, an AppendLock (None: it is the only
        writer).

        keeps_unread: pending records of a durable reader are not overwritten. keeper: the owner of the descriptors; this keeps it alive.
        data_fd: of the file whose locked bytes are not overwritten; -1: there is none. front: the page before the ring; None: there is
        none. Raises ValueError for memory that can't be a log's, or is read-only.
        """
        RingEnd.__init__(self, data, control, seed, holder, keeps_unread, data_fd, front)
        self.lock = lock
        self.keeper = keeper
        self.guard: Any = threading.RLock()  # of the threads that share this handle; see `append`
        self.process = native.process_id()
        self.era = -1  # of the keys of the value that is being appended; -1: it has none
        # Between these times, ns since the Unix epoch, an append needs no check whether the log still exists; -1: no append needs it.
        self.looked_at = self.look_at = -1

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
        if native.is_one_step():
            return self.append_alone(key, value, type, codec, timestamp, era, patience)
        with self.guard:
            return self.append_alone(key, value, type, codec, timestamp, era, patience)

    def append_alone(self, key: bytes | None, value: bytes, type: int, codec: int, timestamp: int, era: int, patience: int) -> int:
        """Do the work of `append`, without another thread of this handle meanwhile, unless it sleeps."""
        now = native.now()
        if self.look_at >= 0 and not self.looked_at <= now <= self.look_at:
            return LOOK
        # Interpreted, a signal handler may raise as soon as the lock is taken, or append during an append.
        is_ours = not native.is_one_step() and not self.lock.is_taken
        try:
            if not self.lock.take():
                if not self.lock.take_within(patience):
                    return BUSY
                now = native.now()
            is_ours = True
            self.era = era
            sequence = self.append_locked(key, value, type, codec, now if timestamp < 0 else timestamp, now)
        finally:
            if is_ours:
                if native.is_one_step():  # nothing interrupts it, and a `try` takes time
                    self.lock.free()
                else:
                    self.free()
        if self.has_sleepers:
            self.ring()
        return sequence

    def free(self) -> None:
        """Free the append lock of this handle, also if a signal handler raises meanwhile."""
        try:
            self.lock.free()
        except BaseException:
            self.lock.free()
            raise

    def append_locked(self, key: bytes | None, value: bytes, type: int, codec: int, timestamp: int, now: int) -> int:
        """Under the lock: append one record and publish it."""
        if native.load(self.control, MOVED) != 0:
            return MOVED_ON
        if native.load(self.control, PENDING) != 0:
            return UNSETTLED
        RingEnd.begin(self)
        if self.era >= 0 and self.next_sequence >> ERA_BITS != self.era:
            return OUTDATED
        if self.keeps_unread and not self.admits(self.end_of_value(self.end, key, value)):
            return NO_ROOM
        self.clock = now
        try:
            self.put_value(key, value, type, codec, timestamp)
        except Pinned:
            return NO_ROOM
        RingEnd.publish(self)
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
        if self.look_at >= 0 and not self.looked_at <= now <= self.look_at:
            return None
        if not native.is_one_step():  # others may change the lists meanwhile
            keys, values = None if keys is None else keys[:], values[:]
        done: range | None = self.locked(Bulk(keys, values, type, timestamp))
        return done

    def append_bulk(self, bulk: Bulk) -> range | None:
        """Under the lock: do the work of `append_many`."""
        if native.load(self.control, MOVED) != 0 or native.load(self.control, PENDING) != 0:
            return None
        longest, stored = measure(bulk.keys, bulk.values)
        if longest < 0 or stored > min(self.capacity >> 2, LARGEST):
            return None
        first = RingEnd.begin(self)
        if self.has_pins() or (self.keeps_unread and not self.admits(self.end_of_many(self.end, bulk.keys, bulk.values))):
            return None
        try:
            self.put_many(bulk.keys, bulk.values, bulk.type, None, bulk.timestamp, stored)
        except Pinned:
            return None
        RingEnd.publish(self)
        return range(first, self.next_sequence)

    def locked(self, work: Callable[..., Any]) -> Any:
        """Take the append lock, return the result of `work(self)`, and free the lock; None if another handle holds it.

        Compiled, no signal handler can raise between the lock and the work, or between the work and the unlock. Raises Reentered if this
        handle holds the lock already: two appends would mix.
        """
        self.check_open()
        if native.is_one_step():
            return self.locked_alone(work)
        with self.guard:
            return self.locked_alone(work)

    def locked_alone(self, work: Callable[..., Any]) -> Any:
        """Do the work of `locked`, without another thread of this handle."""
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

    def put_value(self, key: bytes | None, value: bytes, type: int, codec: int, timestamp: int) -> None:
        """Put one record after the end, unpublished. A timestamp smaller than the last one is raised to it."""
        key_length = 0
        key_tag = NO_KEY
        if key is not None:
            key_length = key_tag = len(key)
        content = key_length + len(value)
        stored = (HEADER + content + 7) & ~7
        RingEnd.make_way(self, content)
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
            RingEnd.index(self, position, offset, self.next_sequence, timestamp)
        native.prefetch(self.data, offset + WRITTEN_AHEAD, stored)
        self.end = position + stored
        self.next_sequence += 1
        self.last_timestamp = timestamp

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
                limit = RingEnd.make_way(self, content)
                position, lap = self.end, self.lap
            if last < timestamp:
                last = timestamp
            if codecs is not None:
                codec = codecs[at]
            tags = type | (codec << 8) | (key_tag << 16)
            offset = position - lap
            native.put_frame(seed, data, words, offset, stored | (content << 32), sequence, last, tags, key, 0, key_length, value, 0)
            if position >= indexed:
                RingEnd.index(self, position, offset, sequence, last)
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
                limit = RingEnd.make_way(self, content)
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
                RingEnd.index(self, position, offset, sequence, last)
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
