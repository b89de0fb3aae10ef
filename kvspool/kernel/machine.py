"""The machine operations of the loops over frames: words, copies, fences, checksum, clocks, one lock byte, futexes.

This is the interpreted form. `machine.pxd` has the same functions as inline C for the compiled twin of `frames_py.py`. Here a *pointer*
is a memoryview (or any object that supports the same slices and indexes, so that a test can record every store). Locks, clocks, process id,
and sleeps and wake-ups on a word use the port in `system`. In the compiled twin they are direct system calls, which is why fault injection
runs on the interpreted one.

Words are aligned 64-bit little-endian. CPython moves an item of a `memoryview("Q")` with one 8-byte copy, so a word is never torn.
"""

from __future__ import annotations

import os
import struct
from array import array
from functools import cache
from typing import Any

from kvspool import system
from kvspool.errors import Closed

_HEAD = struct.Struct("<QQQI")


def bytes_at(view: memoryview) -> memoryview:
    """Return the pointer to the bytes of `view`."""
    return view


def words_at(view: memoryview) -> memoryview:
    """Return the pointer to the words of `view`, whose length is a multiple of 8. Compiled: ValueError unless its address is one, too."""
    return view.cast("Q")


def is_writable(view: memoryview) -> bool:
    """Return whether bytes may be stored in `view`."""
    return not getattr(view, "readonly", False)


def halves_at(view: memoryview) -> memoryview:
    """Return the pointer to the int32 of `view`, which may be at any address."""
    return view


def numbers_at(view: memoryview) -> memoryview:
    """Return the pointer to the int64 of `view`, which may be at any address."""
    return view


class _Released:
    """The pointer to released memory: every access raises Closed."""

    def __getitem__(self, at: Any) -> Any:
        raise Closed("the log was closed; open it again")

    def __setitem__(self, at: Any, value: Any) -> None:
        raise Closed("the log was closed; open it again")


_RELEASED = _Released()


def no_bytes() -> Any:
    """Return the pointer to no bytes, for released memory."""
    return _RELEASED


def no_words() -> Any:
    """Return the pointer to no words, for released memory."""
    return _RELEASED


def bytes_of(value: bytes) -> memoryview | bytes:
    """Return the pointer to the bytes of a `bytes` object."""
    return value


def one_state() -> list[int]:
    """Return the storage of a CRC32C register, for `copy_out`."""
    return [0]


def copy_out(data: memoryview, at: int, length: int, state: list[int]) -> bytes:
    """Return a private copy of `length` bytes at `at`, and update the CRC32C register in `state[0]` with the copy."""
    piece = bytes(data[at : at + length])
    state[0] = crc32c(state[0], piece, 0, length)
    return piece


def copy_frame(
    state: int,
    lengths: int,
    sequence: int,
    timestamp: int,
    tags: int,
    data: memoryview | bytes,
    at: int,
    keys: memoryview,
    key_to: int,
    key_length: int,
    values: memoryview,
    value_to: int,
) -> int:
    """Copy a key and the value after it, at `at` of the ring, to private targets; return the CRC32C register after header and copies.

    The first four numbers are the words of the frame's header, as the caller has read them.
    """
    state = crc32c_head(state, lengths, sequence, timestamp, tags & 0xFFFFFFFF)
    state = copy_over(state, keys, key_to, data, at, key_length)
    return copy_over(state, values, value_to, data, at + key_length, (lengths >> 32) - key_length)


def copy_over(state: int, target: memoryview, to: int, data: memoryview | bytes, at: int, length: int) -> int:
    """Copy `length` bytes at `at` of the ring to `to` of a private target, and return the CRC32C register after the copy."""
    piece = bytes(data[at : at + length])
    target[to : to + length] = piece
    return crc32c(state, piece, 0, length)


def copy_in(state: int, data: memoryview | bytearray, at: int, source: memoryview | bytes, start: int, length: int) -> int:
    """Copy `length` bytes at `start` of a private source to `at` of the ring, and return the CRC32C register after them."""
    data[at : at + length] = source[start : start + length]
    return crc32c(state, source, start, length)


def put_frame(
    state: int,
    data: memoryview | bytearray,
    words: memoryview,
    offset: int,
    lengths: int,
    sequence: int,
    timestamp: int,
    tags: int,
    key: memoryview | bytes,
    key_at: int,
    key_length: int,
    value: memoryview | bytes,
    value_at: int,
) -> None:
    """Store a frame at `offset` of the ring: zeros in its last word, key and value from private memory, then the header.

    `lengths` is the first word of the header, `tags` the lower half of the last one; `state` is the CRC32C register before the frame.
    """
    words[(offset + (lengths & 0xFFFFFFFF) - 8) >> 3] = 0
    state = crc32c_head(state, lengths, sequence, timestamp, tags)
    if key_length:
        state = copy_in(state, data, offset + 32, key, key_at, key_length)
    state = copy_in(state, data, offset + 32 + key_length, value, value_at, (lengths >> 32) - key_length)
    at = offset >> 3
    words[at] = lengths
    words[at + 1] = sequence
    words[at + 2] = timestamp
    words[at + 3] = tags | ((state ^ 0xFFFFFFFF) << 32)


def is_zero(data: memoryview, at: int, length: int) -> bool:
    """Return whether `length` bytes at `at` are all zero."""
    return not any(data[at : at + length])


def load(words: memoryview, at: int) -> int:
    """Load word `at` (acquire: no later access moves before it)."""
    return words[at]


def load_after_reads(words: memoryview, at: int) -> int:
    """Load word `at` after every earlier load is complete."""
    return words[at]


def store(words: memoryview, at: int, value: int) -> None:
    """Store word `at` (release: no earlier access moves after it)."""
    words[at] = value


def exchange(words: memoryview, at: int, value: int) -> int:
    """Store word `at` and return the previous value. Atomic when compiled; here a store between the two steps is lost."""
    before = words[at]
    words[at] = value
    return before


def swap(words: memoryview, at: int, expected: int, value: int) -> bool:
    """Store `value` in word `at` if it is `expected`, and return whether it was. Atomic when compiled; here in two steps."""
    if words[at] != expected:
        return False
    words[at] = value
    return True


def signed(word: int) -> int:
    """Return a word as a signed number in two's complement."""
    return word - (1 << 64) if word >> 63 else word


def unsigned(number: int) -> int:
    """Return a signed number as a word in two's complement."""
    return number & 0xFFFFFFFFFFFFFFFF


def new_tuple_of_two(kind: Any, first: Any, second: Any) -> Any:
    """Return an instance of a NamedTuple of two fields, without calling its `__new__`."""
    return tuple.__new__(kind, (first, second))


def add_one(words: memoryview, at: int) -> None:
    """Add one to word `at`. Atomic when compiled; here two concurrent additions may count as one."""
    words[at] = (words[at] + 1) & 0xFFFFFFFFFFFFFFFF


def wait_count(words: memoryview, at: int, goal: int, ns: int) -> None:
    """Yield the processor for up to `ns` until the counter in word `at` has reached `goal`, if it is near.

    Interpreted, other processes take so much longer that waiting gains nothing: it only sleeps for 0 s.
    """
    if 0 < goal - words[at] <= 1024:
        system.port.sleep(0)


def check_signals() -> None:
    """Run the handlers of pending signals. Interpreted, they have run already."""


def release() -> Any:
    """Let other threads run Python until `take_back` is called with the result; code between the two may not touch an object.

    The loop between them is a separate function, so that the compiler checks this. In the interpreted form it is the other way round.
    """


def take_back(thread: Any) -> None:
    """Reacquire the interpreter lock."""


def fence() -> None:
    """Order all earlier stores before all later loads."""
    system.port.fence()


def prefetch(data: memoryview, at: int, length: int) -> None:
    """Tell the processor that `length` bytes at `at` will soon be overwritten. No effect here; they may be after the end."""


def wait_word(words: memoryview, at: int, expected: int, longest: int) -> None:
    """Sleep while the low half of word `at` is `expected`, until another process wakes us; at most `longest` ns, and possibly less."""
    system.port.wait_word(words, at, expected & 0xFFFFFFFF, longest / 1e9)


def wake_word(words: memoryview, at: int) -> None:
    """Wake the longest sleeper in `wait_word` on word `at`."""
    system.port.wake_word(words, at, 1)


def wake_all(words: memoryview, at: int) -> None:
    """Wake all sleepers in `wait_word` on word `at`."""
    system.port.wake_word(words, at, 0x7FFFFFFF)


def wait_events(fd: int, seconds: float) -> bytes:
    """Return the pending events of an inotify descriptor, or wait up to `seconds` for some; none after that time, or after a signal.

    The C form makes the two system calls itself, so it is called only for the real port.
    """
    return system.port.read_events(fd) if system.port.wait_readable(fd, seconds) else b""


def half_of(data: memoryview | bytes, at: int) -> int:
    """Return the int32 at byte `at`, which may be at any address."""
    return int.from_bytes(data[at : at + 4], "little", signed=True)


def is_bytes(value: object) -> bool:
    """Return whether an object is exactly a `bytes` object, not of a subclass."""
    return value.__class__ is bytes


def length(value: bytes) -> int:
    """Return the length of a `bytes` object; no other object is permitted."""
    return len(value)


def is_bytes_in(items: list[Any], at: int) -> bool:
    """Return whether an item of a list is exactly a `bytes` object, not of a subclass."""
    return items[at].__class__ is bytes


def is_none_in(items: list[Any], at: int) -> bool:
    """Return whether an item of a list is None."""
    return items[at] is None


def length_in(items: list[Any], at: int) -> int:
    """Return the length of an item of a list, which must be a `bytes` object."""
    return len(items[at])


def bytes_in(items: list[Any], at: int) -> Any:
    """Return the pointer to the bytes of an item of a list, which must be a `bytes` object; valid while the list contains it."""
    return items[at]


def now() -> int:
    """Return the wall clock in ns since the Unix epoch."""
    return system.port.now()


def monotonic() -> int:
    """Return a clock in ns that never goes back."""
    return int(system.port.monotonic() * 1e9)


def process_id() -> int:
    """Return the id of this process, to detect a fork that Python didn't notice.

    The C form caches it; libc updates the cache in every child that is forked through libc.
    """
    return system.port.process_id()


def is_one_step() -> bool:
    """Return whether a method of the frame loops is atomic for all threads and signal handlers: only a compiled one is."""
    return False


def pause(ns: int) -> None:
    """Let the other hardware thread of this core run for some ns; compiled only."""


def sleep(ns: int) -> None:
    """Sleep for `ns`; other threads run meanwhile."""
    system.port.sleep(ns / 1e9)


def clear(data: memoryview, at: int, length: int) -> None:
    """Overwrite `length` bytes at `at` with zeros."""
    data[at : at + length] = bytes(length)


def try_lock(fd: int, at: int) -> bool:
    """Lock byte `at` exclusively, or return False if another open file description holds it."""
    return system.port.try_lock(fd, at)


def try_gate(fd: int, at: int) -> bool:
    """Lock byte `at` shared, or return False if another open file description holds it exclusively. Here lock it exclusively."""
    return system.port.try_lock(fd, at)


def has_sharers(fd: int, at: int) -> bool:
    """Return whether another open file description holds a shared lock on byte `at`."""
    return system.port.is_shared(fd, at)


def unlock(fd: int, at: int) -> None:
    """Release the lock on byte `at`."""
    system.port.unlock(fd, at)


def write_at(fd: int, data: bytearray, length: int, at: int) -> bool:
    """Write the first `length` bytes of `data` at byte `at` of a file, and return whether all were written; other threads run meanwhile."""
    try:
        system.port.write(fd, memoryview(data)[:length], at)
    except OSError:
        return False
    return True


def read_at(fd: int, length: int, at: int) -> bytes | None:
    """Return up to `length` bytes, at most 8192, at byte `at` of a file; None if it can't be read."""
    try:
        return system.port.read(fd, length, at)
    except OSError:
        return None


def size_at(path: bytes, device: int, number: int) -> int:
    """Return the size of the file at a path; -1 if there is none, or not the file with this number on this device.

    Compiled, its times are not requested: after that the kernel would write new ones with the next append, which costs as much again.
    """
    there = system.port.look_up(os.fsdecode(path))
    return there.st_size if there is not None and (there.st_dev, there.st_ino) == (device, number) else -1


def has_name(fd: int) -> bool:
    """Return whether an open file still has a name."""
    return system.port.status(fd).st_nlink > 0


def spin(owner: object, words: memoryview, at: int, value: int, ns: int) -> None:
    """Poll word `at` for up to `ns`, until it isn't `value`; `owner` keeps the memory alive.

    Other threads run meanwhile, signal handlers afterwards. Interpreted, both run between any two polls, so this does nothing.
    """


def locked_from(fd: int, at: int, length: int) -> int:
    """Return the start of the first lock of another open file description in these bytes of a file; -1 if there is none."""
    return system.port.locked_from(fd, at, length)


def crc32c(state: int, source: memoryview | bytes | bytearray, start: int, length: int) -> int:
    """Return the CRC32C register after `length` bytes at `start` of `source`.

    Begin with all ones; the checksum is the complement of the last register. It processes four bytes at a time by two tables of 65,536
    entries.
    """
    low, high = _tables()
    piece = source[start : start + length]
    whole = length & ~3
    for (word,) in struct.iter_unpack("<I", piece[:whole]):
        state ^= word
        state = low[state & 0xFFFF] ^ high[state >> 16]
    for byte in piece[whole:]:
        state = (state >> 8) ^ high[((state ^ byte) & 0xFF) << 8]
    return state


def crc32c_head(state: int, first: int, second: int, third: int, fourth: int) -> int:
    """Return the CRC32C register after the first 28 bytes of a frame: three words and a half."""
    return crc32c(state, _HEAD.pack(first, second, third, fourth), 0, _HEAD.size)


@cache
def _tables() -> tuple[array[int], array[int]]:
    """Return the tables for the low and the high half of a 32-bit register."""
    one = [0] * 256
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
        one[byte] = state
    high = array("I", bytes(4 * 65536))
    low = array("I", bytes(4 * 65536))
    for half in range(65536):
        state = (half >> 8) ^ one[half & 0xFF]
        state = (state >> 8) ^ one[state & 0xFF]
        high[half] = state
        state = (state >> 8) ^ one[state & 0xFF]
        low[half] = (state >> 8) ^ one[state & 0xFF]
    return low, high
