"""The layout of frames and of the control block's words, and the checks of a frame's header.

This source is compiled together with the other sources of the frame loops: `ring_py`, `reader_py`, `batch_py`, `end_py`, `writer_py`,
`single_py` and `scanner_py`. `setup.py` makes one module of them, `frames_c`, with the C types of `frames_c.pxd`, so that they call each
other directly. `frames` chooses one of the two twins. The loops treat the ring and the control block as memory. They take no decision
visible to a reader or a writer: eviction, gaps and files belong to `spool`, the lengths of waits to `engine`.

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

from typing import Any

import kvspool.kernel.machine as native

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

WATCHES = 0  # byte of WANTED: a reader watches by inotify
SLEEPS = 1  # the other byte: a reader sleeps on RINGS


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


def crc32c(state: int, data: bytes) -> int:
    """Return the CRC32C register `state` after some further bytes."""
    return native.crc32c(state, native.bytes_of(data), 0, len(data))
