"""What the loops over frames need from the machine: words, copies, fences, checksum, clock, one lock byte.

This is the interpreted form. `_machine.pxd` has the same functions as inline C, and the compiled twin of
`_frames_py.py` uses those; here a *pointer* is a memoryview (or any object that slices and indexes alike, so that a test
can record every store). Locks, clock and process id go through the port in `system`; in the compiled twin they are
direct system calls, which is why fault injection runs on the interpreted one.

Words are aligned 64-bit little-endian. CPython moves an item of a `memoryview("Q")` with one 8-byte copy, so a
word is never torn.
"""

from __future__ import annotations

import struct
from array import array
from functools import cache
from typing import Any

from kvspool import system

_HEAD = struct.Struct("<QQQI")


def bytes_at(view: memoryview) -> memoryview:
    """Return the pointer to the bytes of `view`."""
    return view


def words_at(view: memoryview) -> memoryview:
    """Return the pointer to the words of `view`, whose length is a multiple of 8."""
    return view.cast("Q")


def no_bytes() -> Any:
    """Return the pointer to no bytes, for a memory that was let go."""
    return None


def no_words() -> Any:
    """Return the pointer to no words, for a memory that was let go."""
    return None


def bytes_of(value: bytes) -> memoryview | bytes:
    """Return the pointer to the bytes of a `bytes` object."""
    return value


def copy_out(data: memoryview, at: int, length: int) -> bytes:
    """Return a private copy of `length` bytes at `at`."""
    return bytes(data[at : at + length])


def copy_in(data: memoryview, at: int, source: memoryview | bytes, start: int, length: int) -> None:
    """Copy `length` bytes at `start` of `source` to `at` of `data`."""
    data[at : at + length] = source[start : start + length]


def is_zero(data: memoryview, at: int, length: int) -> bool:
    """Return whether `length` bytes at `at` are all zero."""
    return not any(data[at : at + length])


def load(words: memoryview, at: int) -> int:
    """Load word `at` (acquire: no later access moves before it)."""
    return words[at]


def load_after_reads(words: memoryview, at: int) -> int:
    """Load word `at` after every earlier load is done."""
    return words[at]


def store(words: memoryview, at: int, value: int) -> None:
    """Store word `at` (release: no earlier access moves behind it)."""
    words[at] = value


def exchange(words: memoryview, at: int, value: int) -> int:
    """Store word `at` and return what it was. At once when compiled; here something stored between the two is lost."""
    before = words[at]
    words[at] = value
    return before


def fence() -> None:
    """Let no store before it move behind a load after it."""
    system.port.fence()


def now() -> int:
    """Return the wall clock in ns since the Unix epoch."""
    return system.port.now()


def process_id() -> int:
    """Return the id of this process, so that a fork which Python wasn't told of is noticed.

    The C form keeps it in memory, and libc changes it there in every child that is forked through libc.
    """
    return system.port.process_id()


def is_one_step() -> bool:
    """Return whether a method of the frame loops is one step for all threads and signal handlers: only a compiled one is."""
    return False


def clear(data: memoryview, at: int, length: int) -> None:
    """Overwrite `length` bytes at `at` with zeros."""
    data[at : at + length] = bytes(length)


def try_lock(fd: int, at: int) -> bool:
    """Take the lock on byte `at` exclusively, or return False if another open file description holds it."""
    return system.port.try_lock(fd, at)


def unlock(fd: int, at: int) -> None:
    """Release the lock on byte `at`."""
    system.port.unlock(fd, at)


def crc32c(state: int, source: memoryview | bytes, start: int, length: int) -> int:
    """Return the CRC32C register after `length` bytes at `start` of `source`.

    Begin with all ones; the checksum is the complement of the last register. Four bytes go at a time through
    two tables of 65,536 entries.
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
