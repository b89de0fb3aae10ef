"""The loops over the frames of the kvj format: encode, scan, pass over, find; and the conversion to and from columns in Arrow's layout.

The table is in `journal.formats.kvj`. This source is also compiled, like `frames_py`. Data is immutable `bytes`; none of it is trusted
before the checksum is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvspool.kernel.machine as native
import kvspool.kernel.network as network
from kvspool.record import NO_TIME

HEAD = 28  # bytes before the key: checksum, size, sequence, timestamp, type, codec, key size
NO_KEY = 0xFFFF
LONGEST_KEY = NO_KEY - 1
LARGEST = (1 << 31) - 1  # bytes of a frame
ONES = 0xFFFF_FFFF

WHOLE, SHORT, DAMAGED, JUMPED = 0, 1, 2, 3  # as in `journal.format`
SOUND, OFFSETS, TYPES, CODECS = 0, 1, 2, 3  # faults found by `check_columns`


def encode(
    values: list[bytes],
    keys: list[bytes | None] | None,
    types: list[int] | None,
    timestamps: list[int] | None,
    codecs: bytes | None,
    type: int,
    timestamp: int,
    codec: int,
    start: int,
    sequence: int,
    room: int,
    last: int,
) -> tuple[bytearray, int, int]:
    """Return the frames of the values from `start` on, up to the first one whose end reaches `room`, their number, and the latest
    timestamp.

    last: the latest timestamp before them. An earlier one is raised to the latest one before it; NO_TIME stays. Everything was checked
    before: values and keys are bytes of an allowed length, the lists have the length of `values`.
    """
    end = start
    total = 0
    while end < len(values) and total < room:
        value = values[end]
        total += HEAD + len(value)
        if keys is not None:
            key = keys[end]
            if key is not None:
                total += len(key)
        end += 1
    out = bytearray(total)
    data = network.room_in(out)
    at = 0
    for row in range(start, end):
        key = None
        if types is not None:
            type = types[row]
        if timestamps is not None:
            timestamp = timestamps[row]
        if timestamp > last:
            last = timestamp
        elif timestamp != NO_TIME:
            timestamp = last
        if codecs is not None:
            codec = codecs[row]
        if keys is not None:
            key = keys[row]
        at = put(data, at, sequence, timestamp, type, codec, key, values[row])
        sequence += 1
    return out, end - start, last


def put(data: bytearray, at: int, sequence: int, timestamp: int, type: int, codec: int, key: bytes | None, value: bytes) -> int:
    """Store one frame at an offset with enough room, and return its end."""
    size = HEAD + len(value)
    key_size = NO_KEY
    after = at + HEAD
    if key is not None:
        key_size = len(key)
        size += key_size
        network.put_bytes(data, after, key, key_size)
        after += key_size
    network.put_bytes(data, after, value, len(value))
    network.put_u32(data, at + 4, size)
    network.put_u64(data, at + 8, sequence)
    network.put_i64(data, at + 16, timestamp)
    network.put_u8(data, at + 24, type)
    network.put_u8(data, at + 25, codec)
    network.put_u16(data, at + 26, key_size)
    network.put_u32(data, at, native.crc32c(ONES, data, at + 4, size - 4) ^ ONES)
    return at + size


def encode_columns(
    rows: memoryview | None,
    count: int,
    start: int,
    sequence: int,
    room: int,
    last: int,
    key_offsets: memoryview,
    keys: memoryview | bytes,
    has_key: memoryview | None,
    value_offsets: memoryview,
    values: memoryview,
    types: memoryview | None,
    timestamps: memoryview | None,
    codecs: memoryview | None,
    timestamp: int,
    codec: int,
) -> tuple[bytearray, int, int]:
    """Do as `encode`, from columns: for the row numbers in `rows` (int32; None: 0, 1, 2 ...) from `start` on, of which there are `count`.

    key_offsets, value_offsets: int32, one more than there are rows; has_key: a byte for each row, 0 for no key (None: no keys); types,
    codecs: a byte for each row (None: type 0, and `codec`); timestamps: int64 (None: `timestamp`).
    """
    end = start
    total = 0
    while end < count and total < room:
        row = end if rows is None else rows[end]
        total += HEAD + (value_offsets[row + 1] - value_offsets[row])
        if has_key is not None and has_key[row]:
            total += key_offsets[row + 1] - key_offsets[row]
        end += 1
    out = bytearray(total)
    data = network.room_in(out)
    key_data = native.bytes_at(keys)  # type: ignore[arg-type]
    value_data = native.bytes_at(values)
    at = 0
    for turn in range(start, end):
        row = turn if rows is None else rows[turn]
        value_from = value_offsets[row]
        value_length = value_offsets[row + 1] - value_from
        size = HEAD + value_length
        key_size = NO_KEY
        if has_key is not None and has_key[row]:
            key_size = key_offsets[row + 1] - key_offsets[row]
            size += key_size
        time = timestamp if timestamps is None else timestamps[row]
        if time > last:
            last = time
        elif time != NO_TIME:
            time = last
        network.put_u32(data, at + 4, size)
        network.put_u64(data, at + 8, sequence)
        network.put_i64(data, at + 16, time)
        network.put_u8(data, at + 24, 0 if types is None else types[row])
        network.put_u8(data, at + 25, codec if codecs is None else codecs[row])
        network.put_u16(data, at + 26, key_size)
        state = native.crc32c(ONES, data, at + 4, HEAD - 4)
        after = at + HEAD
        if key_size != NO_KEY:
            state = native.copy_in(state, data, after, key_data, key_offsets[row], key_size)
            after += key_size
        state = native.copy_in(state, data, after, value_data, value_from, value_length)
        network.put_u32(data, at, state ^ ONES)
        at += size
        sequence += 1
    return out, end - start, last


def check_columns(
    rows: int,
    key_bits: memoryview | None,
    key_bit: int,
    key_offsets: memoryview,
    key_room: int,
    value_offsets: memoryview,
    value_room: int,
    types: memoryview,
    codecs: memoryview,
    most: int,
) -> tuple[int, int, int, int]:
    """Check the columns of `encode_records`, which are untrusted except for their number of rows.

    key_room, value_room: bytes to which their offsets may refer; most: largest codec. Return SOUND, or the fault, how many rows have a key,
    and the size of the longest key and of the longest value.
    """
    fault = SOUND
    found = 0
    longest_key = 0
    longest_value = 0
    key_places = native.halves_at(key_offsets)
    value_places = native.halves_at(value_offsets)
    kinds = native.halves_at(types)
    if value_places[0] < 0 or value_places[rows] > value_room or key_places[0] < 0 or key_places[rows] > key_room:
        fault = OFFSETS
    place = value_places[0]
    for row in range(rows):
        after = value_places[row + 1]
        size = after - place  # of a wider type than offsets: the difference of any two fits
        place = after
        if size < 0:
            fault = OFFSETS
        if size > longest_value:
            longest_value = size
    place = key_places[0]
    for row in range(rows):
        after = key_places[row + 1]
        size = after - place
        place = after
        if size < 0:
            fault = OFFSETS
        if key_bits is None or (key_bits[(key_bit + row) >> 3] >> ((key_bit + row) & 7)) & 1:
            found += 1
            if size > longest_key:
                longest_key = size
    for row in range(rows):
        if kinds[row] < 0 or kinds[row] > 255:
            fault = TYPES
    for row in range(rows):
        if codecs[row] > most:
            fault = CODECS
    return fault, found, longest_key, longest_value


def encode_records(
    out: bytearray,
    rows: int,
    start: int,
    sequence: int,
    room: int,
    last: int,
    key_bits: memoryview | None,
    key_bit: int,
    key_offsets: memoryview,
    keys: memoryview | bytes,
    value_offsets: memoryview,
    values: memoryview | bytes,
    types: memoryview,
    timestamps: memoryview,
    codecs: memoryview,
) -> tuple[int, int, int]:
    """Do as `encode_columns`, from row `start` on, into `out`, which has room for one record more than `room`; other threads run meanwhile.

    Columns in Arrow's layout, at any address: key_bits: from bit `key_bit` on, one for each row, 0 for no key (None: each has one); offsets
    and types: int32; timestamps: int64; codecs: bytes. They are consistent: see `check_columns`. Return the number of bytes, the rows,
    and the latest timestamp.
    """
    key_places = native.halves_at(key_offsets)
    value_places = native.halves_at(value_offsets)
    end = start
    total = 0
    while end < rows and total < room:
        total += HEAD + (value_places[end + 1] - value_places[end])
        if key_bits is None or (key_bits[(key_bit + end) >> 3] >> ((key_bit + end) & 7)) & 1:
            total += key_places[end + 1] - key_places[end]
        end += 1
    if total > len(out):
        raise ValueError(f"{total} bytes of frames don't fit into {len(out)}")
    data = network.room_in(out)
    bits = native.no_bytes() if key_bits is None else native.bytes_at(key_bits)
    key_data = native.bytes_at(keys)  # type: ignore[arg-type]
    value_data = native.bytes_at(values)  # type: ignore[arg-type]
    kinds = native.halves_at(types)
    times = native.numbers_at(timestamps)
    marks = native.bytes_at(codecs)
    thread = native.release()
    last = fill(data, start, end, sequence, bits, key_bit, key_places, key_data, value_places, value_data, kinds, times, marks, last)
    native.take_back(thread)
    return total, end - start, last


def fill(
    data: bytearray,
    row: int,
    end: int,
    sequence: int,
    bits: memoryview | None,
    bit: int,
    key_places: memoryview,
    keys: memoryview,
    value_places: memoryview,
    values: memoryview,
    types: memoryview,
    timestamps: memoryview,
    codecs: memoryview,
    last: int,
) -> int:
    """Put the frames of the rows from `row` up to `end` into `data`, and return the latest timestamp; see `encode`."""
    at = 0
    while row < end:
        value_from = value_places[row]
        value_length = value_places[row + 1] - value_from
        size = HEAD + value_length
        key_size = NO_KEY
        if bits == native.no_bytes() or (bits[(bit + row) >> 3] >> ((bit + row) & 7)) & 1:  # type: ignore[index]
            key_size = key_places[row + 1] - key_places[row]
            size += key_size
        word = sequence & ONES
        time = timestamps[row]
        if time > last:
            last = time
        elif time != NO_TIME:
            time = last
        low = time & ONES
        tail = types[row]
        tail = (tail << 24) | (codecs[row] << 16) | key_size
        # In words, as the checksum reads them: a word combined from smaller stores has to leave the processor first.
        network.put_u64(data, at + 4, (size << 32) | (sequence >> 32))
        network.put_u64(data, at + 12, (word << 32) | ((time >> 32) & ONES))
        network.put_u64(data, at + 20, (low << 32) | tail)
        state = native.crc32c(ONES, data, at + 4, HEAD - 4)
        after = at + HEAD
        if key_size != NO_KEY:
            state = native.copy_in(state, data, after, keys, key_places[row], key_size)
            after += key_size
        state = native.copy_in(state, data, after, values, value_from, value_length)
        network.put_u32(data, at, state ^ ONES)
        at += size
        sequence += 1
        row += 1
    return last


def gather(
    content: bytes,
    sequence: int,
    most: int,
    count: int,
    sequences: memoryview,
    timestamps: memoryview,
    types: memoryview,
    key_offsets: memoryview,
    keys: memoryview,
    key_bits: memoryview,
    value_offsets: memoryview,
    values: memoryview,
    codecs: memoryview | None,
) -> tuple[int, int, int, int]:
    """Copy frames into columns that contain `count` rows already, until they have `most`; else as `scan`.

    The columns are those of `frames_py.FrameReader.gather`; the first item of `key_offsets` and of `value_offsets` is 0. If the next
    record doesn't fit into `keys` or `values`, it stops with WHOLE, and with the size of the frame as the last item of the result.
    """
    data = network.bytes_in(content)
    length = len(content)
    key_data = native.bytes_at(keys)
    value_data = native.bytes_at(values)
    key_room = len(keys)
    value_room = len(values)
    key_at = key_offsets[count]
    value_at = value_offsets[count]
    at = 0
    while count < most:
        left = length - at
        size = network.get_u32(data, at + 4) if left >= HEAD else 0
        tag = network.get_u16(data, at + 26) if left >= HEAD else NO_KEY
        key_length = 0 if tag == NO_KEY else tag
        value_length = size - HEAD - key_length
        if size > left or value_length < 0 or network.get_u64(data, at + 8) != sequence:
            return at, sequence, *why(data, at, left, size_of(data, at, left))
        if key_length > key_room - key_at or value_length > value_room - value_at:
            return at, sequence, WHOLE, size
        state = native.crc32c(ONES, data, at + 4, HEAD - 4)
        if key_length:
            state = native.copy_over(state, key_data, key_at, data, at + HEAD, key_length)
        state = native.copy_over(state, value_data, value_at, data, at + HEAD + key_length, value_length)
        if state ^ ONES != network.get_u32(data, at):
            return at, sequence, *why(data, at, left, 0)
        sequences[count] = sequence
        timestamps[count] = network.get_i64(data, at + 16)
        types[count] = network.get_u8(data, at + 24)
        if codecs is not None:
            codecs[count] = network.get_u8(data, at + 25)
        if tag != NO_KEY:
            key_bits[count >> 3] = key_bits[count >> 3] | (1 << (count & 7))
        key_at += key_length
        value_at += value_length
        count += 1
        key_offsets[count] = key_at
        value_offsets[count] = value_at
        at += size
        sequence += 1
    return at, sequence, WHOLE, 0


def scan(content: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> tuple[int, int, int, int]:
    """Append the records of up to `most` frames to `items`; see `journal.format.Format.scan`."""
    data = network.bytes_in(content)
    length = len(content)
    at = 0
    for _ in range(most):
        size = size_of(data, at, length - at)
        if size == 0 or network.get_u64(data, at + 8) != sequence:
            return at, sequence, *why(data, at, length - at, size)
        key_size = network.get_u16(data, at + 26)
        begin = HEAD if key_size == NO_KEY else HEAD + key_size
        value = network.cut(data, at + begin, size - begin)
        if make is None:
            items.append(value)
        else:
            key = None if key_size == NO_KEY else network.cut(data, at + HEAD, key_size)
            time = network.get_i64(data, at + 16)
            items.append(make(sequence, time, network.get_u8(data, at + 24), key, value, network.get_u8(data, at + 25)))
        at += size
        sequence += 1
    return at, sequence, WHOLE, 0


def pass_over(content: bytes, sequence: int, until: int, timestamp: int) -> tuple[int, int, int, int, int]:
    """Check frames, up to the first one that isn't below the sequence `until`, or is later than `timestamp`. Sequences may be left out.

    The last item of the result is the latest timestamp passed.
    """
    data = network.bytes_in(content)
    length = len(content)
    at = 0
    latest = NO_TIME
    while sequence < until:
        size = size_of(data, at, length - at)
        found = network.get_u64(data, at + 8) if size else 0
        if size == 0 or found < sequence:
            return at, sequence, *why(data, at, length - at, size), latest
        time = network.get_i64(data, at + 16)
        if found >= until or time > timestamp:
            break
        if time > latest:
            latest = time
        at += size
        sequence = found + 1
    return at, sequence, WHOLE, 0, latest


def find(content: bytes, sequence: int, until: int) -> int:
    """Return the offset of the first sound frame whose sequence is at least `sequence` and below `until`; -1 if there is none."""
    data = network.bytes_in(content)
    length = len(content)
    for at in range(length - HEAD + 1):
        if network.get_u32(data, at + 4) <= length - at and sequence <= network.get_u64(data, at + 8) < until:
            if size_of(data, at, length - at):
                return at
    return -1


def sequence_at(content: bytes, at: int) -> int:
    """Return the sequence of the frame at an offset."""
    return network.get_u64(network.bytes_in(content), at + 8)


def size_of(data: bytes, at: int, left: int) -> int:
    """Return the size of the frame at an offset, if it is whole and sound in the `left` bytes from there on; 0 otherwise."""
    if left < HEAD:
        return 0
    size = network.get_u32(data, at + 4)
    if size < HEAD or size > left:
        return 0
    key_size = network.get_u16(data, at + 26)
    if key_size != NO_KEY and HEAD + key_size > size:
        return 0
    if native.crc32c(ONES, data, at + 4, size - 4) ^ ONES != network.get_u32(data, at):
        return 0
    return size


def why(data: bytes, at: int, left: int, size: int) -> tuple[int, int]:
    """Return why the next frame isn't at an offset, where `size` is the result of `size_of`: a stop, and the `need` of `Scan`."""
    if size:
        return JUMPED, network.get_u64(data, at + 8)
    if left < 8:
        return (SHORT if left else WHOLE), 0
    size = network.get_u32(data, at + 4)
    if size < HEAD or size > LARGEST or size <= left:
        return DAMAGED, 0
    return SHORT, size
