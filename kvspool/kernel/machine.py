"""What the loops over frames need from the machine: words, copies, fences, checksum, clocks, one lock byte, futexes.

This is the interpreted form. `machine.pxd` has the same functions as inline C, and the compiled twin of
`frames_py.py` uses those; here a *pointer* is a memoryview (or any object that slices and indexes alike, so that a test
can record every store). Locks, clocks, process id, and sleeps and wake-ups on a word go through the port in `system`; in the compiled
twin they are direct system calls, which is why fault injection runs on the interpreted one.

Words are aligned 64-bit little-endian. CPython moves an item of a `memoryview("Q")` with one 8-byte copy, so a
word is never torn.
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
    """Return the pointer to the words of `view`, whose length is a multiple of 8. Compiled: ValueError unless its address is one too."""
    return view.cast("Q")


def is_writable(view: memoryview) -> bool:
    """Return whether bytes may be stored through `view`."""
    return not getattr(view, "readonly", False)


def halves_at(view: memoryview) -> memoryview:
    """Return the pointer to the int32 of `view`, which may lie at any address."""
    return view


def numbers_at(view: memoryview) -> memoryview:
    """Return the pointer to the int64 of `view`, which may lie at any address."""
    return view


class _Released:
    """The pointer to memory that was released: every access raises Closed."""

    def __getitem__(self, at: Any) -> Any:
        raise Closed("the log was closed; open it again")

    def __setitem__(self, at: Any, value: Any) -> None:
        raise Closed("the log was closed; open it again")


_RELEASED = _Released()


def no_bytes() -> Any:
    """Return the pointer to no bytes, for memory that was released."""
    return _RELEASED


def no_words() -> Any:
    """Return the pointer to no words, for memory that was released."""
    return _RELEASED


def bytes_of(value: bytes) -> memoryview | bytes:
    """Return the pointer to the bytes of a `bytes` object."""
    return value


def one_state() -> list[int]:
    """Return the place of a CRC32C register, for `copy_out`."""
    return [0]


def copy_out(data: memoryview, at: int, length: int, state: list[int]) -> bytes:
    """Return a private copy of `length` bytes at `at`, and move the CRC32C register in `state[0]` over the copy."""
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
    """Store a frame at `offset` of the ring: zeros in its last word, key and value out of private memory, then the header.

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


def swap(words: memoryview, at: int, expected: int, value: int) -> bool:
    """Store `value` in word `at` if it is `expected`, and return whether it was. One step when compiled; here it is two."""
    if words[at] != expected:
        return False
    words[at] = value
    return True


def signed(word: int) -> int:
    """Return the number in two's complement that a word is."""
    return word - (1 << 64) if word >> 63 else word


def unsigned(number: int) -> int:
    """Return the word that a signed number is in two's complement."""
    return number & 0xFFFFFFFFFFFFFFFF


def new_pair(kind: Any, first: Any, second: Any) -> Any:
    """Return an object of a NamedTuple of two fields, without a call of its `__new__`."""
    return tuple.__new__(kind, (first, second))


def add_one(words: memoryview, at: int) -> None:
    """Add one to word `at`. At once when compiled; here two who do it at the same moment may count as one."""
    words[at] = (words[at] + 1) & 0xFFFFFFFFFFFFFFFF


def wait_count(words: memoryview, at: int, goal: int, ns: int) -> None:
    """Let others run, for up to `ns`, until the counter in word `at` has come to `goal`, if it is near.

    Here they need a processor for so much longer that nothing is gained: it is a sleep of no length.
    """
    if 0 < goal - words[at] <= 1024:
        system.port.sleep(0)


def check_signals() -> None:
    """Run the handlers of signals that have come. Interpreted, they have run already."""


def release() -> Any:
    """Let other threads run Python until `take_back` is called with what this returns; nothing between them may touch an object.

    The loop between them is a function of its own, so that the compiler sees to that. Interpreted, it has to be the other way round.
    """


def take_back(thread: Any) -> None:
    """Run Python again."""


def fence() -> None:
    """Let no store before it move behind a load after it."""
    system.port.fence()


def prefetch(data: memoryview, at: int, length: int) -> None:
    """Tell the processor that `length` bytes at `at` will soon be overwritten. Nothing here; they may lie behind the end."""


def wait_word(words: memoryview, at: int, expected: int, longest: int) -> None:
    """Sleep while word `at` is `expected`, in its low half, until another process wakes us; `longest` ns at most, and it may end early."""
    system.port.wait_word(words, at, expected & 0xFFFFFFFF, longest / 1e9)


def wake_word(words: memoryview, at: int) -> None:
    """Wake the one that has slept longest in `wait_word` on word `at`."""
    system.port.wake_word(words, at, 1)


def wake_all(words: memoryview, at: int) -> None:
    """Wake all that sleep in `wait_word` on word `at`."""
    system.port.wake_word(words, at, 0x7FFFFFFF)


def wait_events(fd: int, seconds: float) -> bytes:
    """Return the events that wait on an inotify descriptor, or come within so many seconds; none if that takes longer, or a signal comes.

    The C form makes the two system calls itself, which is why it is called for the real port alone.
    """
    return system.port.read_events(fd) if system.port.wait_readable(fd, seconds) else b""


def half_of(data: memoryview | bytes, at: int) -> int:
    """Return the int32 at byte `at`, which may lie at any address."""
    return int.from_bytes(data[at : at + 4], "little", signed=True)


def is_bytes(value: object) -> bool:
    """Return whether it is a `bytes` object, and not one of a subclass."""
    return value.__class__ is bytes


def length(value: bytes) -> int:
    """Return how many bytes a `bytes` object has; nothing else may be asked."""
    return len(value)


def is_bytes_in(items: list[Any], at: int) -> bool:
    """Return whether an item of a list is a `bytes` object, and not one of a subclass."""
    return items[at].__class__ is bytes


def is_none_in(items: list[Any], at: int) -> bool:
    """Return whether an item of a list is None."""
    return items[at] is None


def length_in(items: list[Any], at: int) -> int:
    """Return how many bytes an item of a list has; it must be a `bytes` object."""
    return len(items[at])


def bytes_in(items: list[Any], at: int) -> Any:
    """Return the pointer to the bytes of an item of a list, which must be a `bytes` object; it is good while the list has the item."""
    return items[at]


def now() -> int:
    """Return the wall clock in ns since the Unix epoch."""
    return system.port.now()


def monotonic() -> int:
    """Return a clock in ns that never goes back."""
    return int(system.port.monotonic() * 1e9)


def process_id() -> int:
    """Return the id of this process, so that a fork which Python wasn't told of is noticed.

    The C form keeps it in memory, and libc changes it there in every child that is forked through libc.
    """
    return system.port.process_id()


def is_one_step() -> bool:
    """Return whether a method of the frame loops is one step for all threads and signal handlers: only a compiled one is."""
    return False


def pause(ns: int) -> None:
    """Let the other thread of this processor's core run for some ns; compiled only."""


def sleep(ns: int) -> None:
    """Sleep for `ns`; other threads run meanwhile."""
    system.port.sleep(ns / 1e9)


def clear(data: memoryview, at: int, length: int) -> None:
    """Overwrite `length` bytes at `at` with zeros."""
    data[at : at + length] = bytes(length)


def try_lock(fd: int, at: int) -> bool:
    """Take the lock on byte `at` exclusively, or return False if another open file description holds it."""
    return system.port.try_lock(fd, at)


def try_gate(fd: int, at: int) -> bool:
    """Take a share of the lock on byte `at`, or return False if another open file description holds all of it. Here take all of it."""
    return system.port.try_lock(fd, at)


def has_sharers(fd: int, at: int) -> bool:
    """Return whether another open file description has a share of the lock on byte `at`."""
    return system.port.is_shared(fd, at)


def unlock(fd: int, at: int) -> None:
    """Release the lock on byte `at`."""
    system.port.unlock(fd, at)


def write_at(fd: int, data: bytearray, length: int, at: int) -> bool:
    """Write the first `length` bytes of `data` at byte `at` of a file, and return whether all of them were; other threads run meanwhile."""
    try:
        system.port.write(fd, memoryview(data)[:length], at)
    except OSError:
        return False
    return True


def read_at(fd: int, length: int, at: int) -> bytes | None:
    """Return up to `length` bytes, 8192 at most, at byte `at` of a file; None if it can't be read."""
    try:
        return system.port.read(fd, length, at)
    except OSError:
        return None


def size_at(path: bytes, device: int, number: int) -> int:
    """Return the size of the file that a path leads to; -1 if it is none, or not the file with this number on this device.

    Compiled, its times are not asked for: after a look at them the kernel writes new ones with the next append, which costs as much again.
    """
    there = system.port.look_up(os.fsdecode(path))
    return there.st_size if there is not None and (there.st_dev, there.st_ino) == (device, number) else -1


def has_name(fd: int) -> bool:
    """Return whether a name stands for an open file."""
    return system.port.status(fd).st_nlink > 0


def spin(owner: object, words: memoryview, at: int, value: int, ns: int) -> None:
    """Look at word `at`, for up to `ns`, until it isn't `value`; `owner` keeps the memory.

    Other threads run meanwhile, signal handlers after. Interpreted, both come between any two looks: there is nothing to do here.
    """


def locked_from(fd: int, at: int, length: int) -> int:
    """Return where the first lock of another open file description begins in these bytes of a file; -1 if there is none."""
    return system.port.locked_from(fd, at, length)


def crc32c(state: int, source: memoryview | bytes | bytearray, start: int, length: int) -> int:
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
