"""The spool's files, byte for byte.

    NAME/spool.ctl   the control block: small, mapped by all processes
    NAME/spool.dat   one page with header and checkpoints, then the ring

    NAME/spool.lck   only after a resize: the file whose bytes are locked

    spool.ctl    0 HEADER   128 EPOCHS   256 HEAD   320 TAIL   384 SYNCED   448 WANTED   512 HOLDER   576 LOCK   640 MOVES
                 4096 RATES   8704 GAPS   12288 SLOTS   28672 KEY TABLE   65536 INDEX
    spool.dat    0 HEADER   512 ECHOES   1024 CHECKPOINTS   4096 ring

Integers are little-endian; each changing word is 8 bytes, aligned, and stored atomically. Words with different writers are in different
cache lines. Each record below names its writers. A file is never truncated or shrunk.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from kvspool.engine import sizes
from kvspool.engine.layout import Layout
from kvspool.kernel import frames_py as frames
from kvspool.kernel import group_py as group
from kvspool.kernel import lock_py as appendlock
from kvspool.kernel.frames import crc32c

CONTROL_FILE = "spool.ctl"
DATA_FILE = "spool.dat"
LOCK_FILE = "spool.lck"  # of a log that was resized: a link to the spool.ctl that it began with
CONTROL_MAGIC = b"KVSPOOL2"
DATA_MAGIC = b"KVSPDAT2"
VERSION = 2  # of the layouts below; any other number is refused

PAGE = 4096
STRIDE = 1 << 32  # sequences: after a crash of the machine a log continues at a multiple of it
LEAST_CAPACITY = PAGE
MOST_CAPACITY = 1 << 42  # the index of a larger ring would not stay small
LARGEST_KEY = frames.NO_KEY - 1

# Locked bytes of spool.ctl, or of spool.lck if it exists (open file description locks), one each.
GATE = appendlock.GATE  # compiled writers hold it shared; an interpreted one exclusively while it has the append lock
SYNC_LOCK = frames.SYNC_LOCK  # one process flushes for all waiting callers: SYNCED, and CHECKPOINTS of spool.dat
ADMIN_LOCK = 2  # to take or free a reader's slot; recovery, repair, resize
KEYS_LOCK = 3  # to add to the key table
READER_LOCKS = 1024  # + slot: an open durable reader
WRITER_LOCKS = appendlock.WRITER_SLOTS_AT  # + slot: a handle that writes, see LOCK

POLICIES = ("overwrite", "block", "raise")  # what a writer does with a full ring; the number in the header is the index here
BLOCK = POLICIES.index("block")


class ControlHeader(NamedTuple):
    """Written by the creator, never changed."""

    magic: Annotated[bytes, "8s", "`KVSPOOL2`"]
    version: Annotated[int, "I", "2"]
    data_start: Annotated[int, "I", "bytes before the ring in spool.dat"]
    control_bytes: Annotated[int, "Q", "size of spool.ctl"]
    capacity: Annotated[int, "Q", "size of the ring; a multiple of 4096"]
    log_id: Annotated[bytes, "16s", "random; the same in both files"]
    created: Annotated[int, "q", "ns since the Unix epoch"]
    policy: Annotated[int, "B", "what a writer does with a full ring: 0 overwrite, 1 block, 2 raise"]
    codec: Annotated[int, "B", "for values that are neither bytes nor str: 2 JSON, 3 MessagePack, 4 keyed MessagePack"]
    durability: Annotated[int, "B", "when an append is on disk, unless a handle says otherwise: 0 memory, 1 os, 2 disk"]
    spare: Annotated[bytes, "5s", "zeros"]
    reader_expiry: Annotated[int, "Q", "ns without progress after which writers no longer wait for a reader; 0: never"]
    sync_interval: Annotated[int, "Q", "ns between two flushes with the durability os; 0: not given"]
    origin: Annotated[bytes, "16s", "log_id of the log before its first resize; zeros before that"]
    resizes: Annotated[int, "Q", "how often it was resized; not 0: locks are those of spool.lck"]
    reserved: Annotated[bytes, "20s", "zeros"]
    crc: Annotated[int, "I", "CRC32C of the bytes before"]


class Epoch(NamedTuple):
    """The boot of the machine in which the changing words are true. Two of them, 64 bytes apart; a recovery overwrites the older one."""

    boot_id: Annotated[bytes, "16s", "the boot of the machine"]
    first_seq: Annotated[int, "Q", "records appended in this epoch have this sequence or a later one"]
    recovered: Annotated[int, "Q", "when the log was recovered, ns since the Unix epoch; 0: it was created"]
    recoveries: Annotated[int, "Q", "number of recoveries; of two sound records the one with the higher number counts"]
    lost_records: Annotated[int, "Q", "records of the control block that the last recovery did not find: sequences"]
    lost_bytes: Annotated[int, "Q", "and bytes after the end that it found"]
    state: Annotated[int, "I", "1: the words are written and the ring is on disk; 2: the checkpoint is on disk too, and the words are true"]
    crc: Annotated[int, "I", "CRC32C of the log id and the bytes before; stored together with the state"]


class DataHeader(NamedTuple):
    """The start of spool.dat. Written by the creator, never changed."""

    magic: Annotated[bytes, "8s", "`KVSPDAT2`"]
    version: Annotated[int, "I", "2"]
    data_start: Annotated[int, "I", "bytes before the ring"]
    capacity: Annotated[int, "Q", "size of the ring"]
    log_id: Annotated[bytes, "16s", "the same as in spool.ctl"]
    reserved: Annotated[bytes, "84s", "zeros"]
    crc: Annotated[int, "I", "CRC32C of the bytes before"]


class ControlWords(NamedTuple):
    """The changing words, from byte 256 of spool.ctl on."""

    head: Annotated[int, "Q", "position of the oldest frame kept; writers, append lock"]
    min_seq: Annotated[int, "Q", "its sequence, or a later one that a killed writer had planned; writers, append lock"]
    slots_changed: Annotated[int, "Q", "counts how often a reader's slot was taken or moved back; readers, append lock"]
    head_reserved: Annotated[bytes, "40s", "zeros"]
    tail: Annotated[int, "Q", "position of the next frame; this store publishes; writers, append lock"]
    mark_a_tail: Annotated[int, "Q", "the tail that this mark belongs to"]
    mark_a_next_seq: Annotated[int, "Q", "sequence of the next frame at that tail"]
    mark_a_timestamp: Annotated[int, "Q", "timestamp of the last frame before that tail"]
    mark_b_tail: Annotated[int, "Q", "the other mark; the one whose tail is `tail` counts"]
    mark_b_next_seq: Annotated[int, "Q", ""]
    mark_b_timestamp: Annotated[int, "Q", ""]
    tail_reserved: Annotated[bytes, "8s", "zeros"]
    synced: Annotated[int, "Q", "every frame before this position is on disk; sync lock"]
    synced_seq: Annotated[int, "Q", "and so every sequence below this one"]
    sync_error: Annotated[int, "Q", "errno of the first failed flush; not 0: no more records are taken"]
    synced_reserved: Annotated[bytes, "8s", "zeros"]
    flushes: Annotated[int, "Q", "approximate number of releases of the sync lock; waiters sleep on its low half (a futex)"]
    came: Annotated[int, "Q", "approximate number of arrivals of waiters for a flush; this and the next two are hints"]
    began: Annotated[int, "Q", "`came` as it was when the last flush began; sync lock"]
    goal: Annotated[int, "Q", "value of `came` once all waiters woken by that flush have returned; sync lock"]
    wanted: Annotated[int, "Q", "byte 0: a reader watches by inotify; byte 1: a reader sleeps on `rings`; publishers and flushers wake it"]
    wake: Annotated[int, "Q", "a writer wakes by writing a byte here through the file, which inotify sees"]
    rings: Annotated[int, "Q", "approximate number of wake-ups of sleeping readers; they sleep on its low half (a futex)"]
    wanted_reserved: Annotated[bytes, "40s", "zeros"]
    holder_id_low: Annotated[int, "Q", "last holder of the append lock: random id of the handle"]
    holder_id_high: Annotated[int, "Q", ""]
    holder_pid: Annotated[int, "Q", "process id"]
    holder_start: Annotated[int, "Q", "when that process started, clock ticks since boot"]
    holder_boot: Annotated[int, "Q", "the first 8 bytes of the boot id"]
    holder_namespace: Annotated[int, "Q", "inode of the process's pid namespace"]
    pending: Annotated[int, "Q", "not 0: number + 1 of the state of a batch under way; the next owner of the append lock resolves it"]
    holder_reserved: Annotated[bytes, "8s", "zeros"]
    lock: Annotated[int, "Q", "the append lock: its owner may append; 0: free; writers sleep on its low half (a futex)"]
    lock_reserved: Annotated[bytes, "56s", "zeros"]


class Moves(NamedTuple):
    """Traces of a resize, and the flag of pins in the ring; from byte 640 of spool.ctl on."""

    moved: Annotated[int, "Q", "not 0: check the path: the log may be in new files, or its name not on disk; creator, resize, append lock"]
    dropped: Annotated[int, "Q", "records from this sequence on, and before `kept`, had no room in a resize; resize"]
    kept: Annotated[int, "Q", "the first one that had room; 0: all had room"]
    pins: Annotated[int, "Q", "not 0: parts of the ring may be pinned; readers set it, writers clear it when nothing is pinned"]
    moves_reserved: Annotated[bytes, "32s", "zeros"]


class Checkpoint(NamedTuple):
    """A state of the log, written before the flush that puts all of it on disk. Two of them; each flush overwrites the older one."""

    generation: Annotated[int, "Q", "1, 2, 3 ...; the sound one with the higher number counts"]
    head: Annotated[int, "Q", "position of the oldest frame"]
    min_seq: Annotated[int, "Q", "its sequence"]
    tail: Annotated[int, "Q", "position after the last frame"]
    next_seq: Annotated[int, "Q", "sequence of the frame after it"]
    timestamp: Annotated[int, "Q", "timestamp of the last frame"]
    synced: Annotated[int, "Q", "position before which everything was already on disk when this was written"]
    boot_id: Annotated[bytes, "16s", "the boot of the machine in which it was written"]
    reserved: Annotated[int, "I", "zero"]
    crc: Annotated[int, "I", "CRC32C of the log id and the bytes before"]


class Echo(NamedTuple):
    """Words of spool.ctl repeated in spool.dat, so that an older copy of spool.ctl is detected."""

    echo: Annotated[int, "Q", "`tail`, stored after it; larger than `tail`: spool.ctl is older; 0: none was stored; writers, append lock"]
    head_echo: Annotated[int, "Q", "`head`, likewise; stored before a byte of a frame that `head` has passed is overwritten"]


class ReaderSlot(NamedTuple):
    """A durable reader; 64 of them, 256 bytes each: this, two commits, 64 bytes of zeros. Changed under the slot's lock."""

    taken: Annotated[int, "Q", "0: free, and nothing else here counts; this store takes and frees; admin lock"]
    evicted: Annotated[int, "Q", "2^32 + generation of the commit for which writers no longer wait; writers, append lock; 0: none"]
    holder_pid: Annotated[int, "Q", "last process that opened it: process id"]
    holder_start: Annotated[int, "Q", "when that process started, clock ticks since boot"]
    holder_boot: Annotated[int, "Q", "the first 8 bytes of the boot id"]
    holder_namespace: Annotated[int, "Q", "inode of the process's pid namespace"]
    reserved: Annotated[bytes, "16s", "zeros"]
    name: Annotated[bytes, "64s", "UTF-8, zeros after it"]


class Commit(NamedTuple):
    """A committed position of a durable reader. Two of them, for even and for odd generations; its last word is stored last."""

    position: Annotated[int, "Q", "position after the last processed frame"]
    sequence: Annotated[int, "Q", "sequence of the next one"]
    updated: Annotated[int, "q", "when it was committed, ns since the Unix epoch"]
    generation: Annotated[int, "I", "1, 2, 3 ... modulo 2^32; the sound one that is further on counts"]
    crc: Annotated[int, "I", "CRC32C of the log id, the 64 bytes of the name, and the 28 bytes before"]


class RateBucket(NamedTuple):
    """Publications in one second, minute or hour; writers, append lock."""

    time: Annotated[int, "Q", "number of the second, minute or hour since the Unix epoch; the bucket is number this modulo 64"]
    records: Annotated[int, "Q", "records that were published in it"]
    bytes: Annotated[int, "Q", "bytes of the ring that they take"]


class GapBucket(NamedTuple):
    """Gaps returned to readers in one second, minute or hour; readers with write permission, without a lock."""

    time: Annotated[int, "Q", "as in the other buckets"]
    gaps: Annotated[int, "Q", "approximate: readers that count at the same moment may lose one"]


class KeyTableHead(NamedTuple):
    """The head of the key table; entries follow it, one after the other, from index 0 on."""

    used: Annotated[int, "Q", "bytes of entries that are published; 2^64 - 1: closed, no key is added any more; key lock"]
    reserved: Annotated[bytes, "56s", "zeros"]


class KeyEntry(NamedTuple):
    """A key in the table; its UTF-8 follows. Never changed once it is published."""

    length: Annotated[int, "H", "bytes of the key, 1..64; the first entry that isn't sound is the end of the table"]
    crc: Annotated[int, "I", "CRC32C of log id, index (4 bytes) and key"]


class IndexEntry(NamedTuple):
    """One for each 64 KiB of the ring: the first frame that starts there in the newest lap. A hint, to be checked."""

    position: Annotated[int, "Q", "its position + 1; 0 while the entry is being changed"]
    sequence: Annotated[int, "Q", "its sequence"]
    timestamp: Annotated[int, "Q", "its timestamp"]


class Frame(NamedTuple):
    """A record in the ring; a multiple of 8 bytes, zeros after the value."""

    stored: Annotated[int, "I", "bytes that the frame takes in the ring"]
    content: Annotated[int, "I", "bytes of key and value"]
    sequence: Annotated[int, "Q", ""]
    timestamp: Annotated[int, "Q", "ns since the Unix epoch"]
    type: Annotated[int, "B", "the caller's"]
    codec: Annotated[int, "B", "0 raw, 1 text (UTF-8), 2 JSON, 3 MessagePack, 4 keyed MessagePack, 255 pad"]
    key_length: Annotated[int, "H", "65535: no key"]
    crc: Annotated[int, "I", "CRC32C of log id, the 28 bytes before, key and value"]


HEADER = Layout(ControlHeader)
EPOCH = Layout(Epoch)
DATA_HEADER = Layout(DataHeader)
CONTROL = Layout(ControlWords)
MOVES = Layout(Moves)
CHECKPOINT = Layout(Checkpoint)
ECHO = Layout(Echo)
SLOT = Layout(ReaderSlot)
COMMIT = Layout(Commit)
RATE_BUCKET = Layout(RateBucket)
GAP_BUCKET = Layout(GapBucket)
KEY_TABLE = Layout(KeyTableHead)
KEY_ENTRY = Layout(KeyEntry)
INDEX_ENTRY = Layout(IndexEntry)
FRAME = Layout(Frame)

EPOCHS_AT = (128, 192)
SEALED, TRUE = 1, 2  # states of an epoch
CONTROL_AT = 256
MOVES_AT = frames.MOVED * 8
ECHO_AT = frames.ECHO * 8  # in spool.dat, like the checkpoints
CHECKPOINTS_AT = (1024, 1536)  # in spool.dat: each in a sector of its own
RATES_AT = PAGE
GAPS_AT = 8704
SLOTS_AT = frames.SLOTS_AT * 8
SLOTS = range(frames.SLOTS)
KEYS_AT = 28672
INDEX_AT = 65536
DATA_START = PAGE

SYNCED = (CONTROL_AT + CONTROL.offset("synced")) // 8
SYNCED_SEQ = (CONTROL_AT + CONTROL.offset("synced_seq")) // 8
WAKE_AT = CONTROL_AT + CONTROL.offset("wake")

assert HEADER.size == DATA_HEADER.size == 128
assert CHECKPOINT.size == 80
assert MOVES.size == 64 and MOVES_AT == 640
assert (MOVES.offset("dropped"), MOVES.offset("kept"), MOVES.offset("pins")) == tuple(
    (at - frames.MOVED) * 8 for at in (frames.DROPPED, frames.KEPT, frames.PINS)
)
assert EPOCH.size == 64
assert ECHO.offset("head_echo") == (frames.HEAD_ECHO - frames.ECHO) * 8
assert FRAME.size == frames.HEADER
assert SLOT.size == frames.SLOT_COMMITS * 8 == 128
assert COMMIT.size == frames.COMMIT_WORDS * 8 == 32
assert SLOTS_AT + frames.SLOTS * frames.SLOT_WORDS * 8 == 28672
assert (SLOT.offset("evicted"), SLOT.offset("name")) == (frames.SLOT_EVICTED * 8, frames.SLOT_NAME * 8)
assert INDEX_ENTRY.size == frames.INDEX_WORDS * 8
assert frames.INDEX * 8 == INDEX_AT
assert frames.RATES * 8 == RATES_AT and frames.RATE_WORDS * 8 == RATE_BUCKET.size
assert RATES_AT + 3 * frames.BUCKETS * RATE_BUCKET.size == GAPS_AT
assert GAPS_AT + 3 * frames.BUCKETS * GAP_BUCKET.size <= SLOTS_AT
for _word, _name in (
    (frames.HEAD, "head"),
    (frames.MIN_SEQ, "min_seq"),
    (frames.SLOTS_CHANGED, "slots_changed"),
    (frames.TAIL, "tail"),
    (frames.MARKS, "mark_a_tail"),
    (frames.MARKS + frames.MARK_WORDS, "mark_b_tail"),
    (frames.SYNCED_SEQ, "synced_seq"),
    (frames.SYNC_ERROR, "sync_error"),
    (frames.FLUSH_GROUP + group.FLUSHES, "flushes"),
    (frames.FLUSH_GROUP + group.CAME, "came"),
    (frames.FLUSH_GROUP + group.BEGAN, "began"),
    (frames.FLUSH_GROUP + group.GOAL, "goal"),
    (frames.WANTED, "wanted"),
    (frames.RINGS, "rings"),
    (frames.HOLDER, "holder_id_low"),
    (frames.PENDING, "pending"),
    (frames.LOCK, "lock"),
):
    assert _word * 8 == CONTROL_AT + CONTROL.offset(_name)


def largest_frame(capacity: int) -> int:
    """Return how many bytes a frame may take in a ring of `capacity` bytes."""
    return min(capacity >> 2, frames.LARGEST)


def frame_seed(log_id: bytes) -> int:
    """Return the CRC32C register with which the checksum of each frame of this log begins."""
    return crc32c(0xFFFFFFFF, log_id)


def blocks(capacity: int) -> int:
    """Return the number of entries in the index of a ring."""
    return -(-capacity >> frames.BLOCK)


def control_bytes(capacity: int) -> int:
    """Return the size of spool.ctl for a ring of `capacity` bytes."""
    return -(-(INDEX_AT + blocks(capacity) * INDEX_ENTRY.size) // PAGE) * PAGE


def ring_size(capacity: int | str) -> int:
    """Return the bytes of a ring of this capacity, rounded up to pages. Raises ValueError for one that is too small or too large."""
    size = -(-sizes.parse(capacity) // PAGE) * PAGE
    if not LEAST_CAPACITY <= size <= MOST_CAPACITY:
        raise ValueError(f"a capacity is {LEAST_CAPACITY} bytes to {sizes.show(MOST_CAPACITY)}, not {capacity}")
    return size
