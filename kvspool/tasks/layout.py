"""The bytes of a task list's file; `docs/formats/tasks.md` has the tables.

A header, which never changes; a table of the workers; and the memory that all workers map: its words and slots, see `kernel.tasks_py`.
No byte is trusted before it was checked: the marks of a slot have no impossible values, only improbable ones.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from kvspool.engine.checksums import name_after, with_name
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, UnknownVersion
from kvspool.kernel import group_py as groups
from kvspool.kernel import tasks_py as tasks

MAGIC = b"KVTASKS\0"
VERSION = 1
ORDERED = 1  # a flag
LONGEST_NAME = 256  # bytes of UTF-8
LEAST_WINDOW, MOST_WINDOW = 64, 1 << 20
MOST_WORKERS = 1024
PAGE = 4096
RING_AT = PAGE - 8  # a byte that is written to wake workers
WORKERS_AT = PAGE

# Bytes that are locked; they need not be in the file. Those of the lock of the window are in `lock_py`.
FLUSH_LOCK = 1 << 20  # by the worker that flushes
CHANGE_LOCK = FLUSH_LOCK + 1  # while a worker enters or leaves
KEEP_LOCK = FLUSH_LOCK + 2  # while the position of the durable reader is stored
BURY_LOCK = FLUSH_LOCK + 3  # while a record is moved to the dead-letter log
LIFE = FLUSH_LOCK + 15  # + number of a worker: by the worker, while it is one


class TaskHead(NamedTuple):
    """The first bytes of the file; the name of the list follows."""

    magic: Annotated[bytes, "8s", 'the bytes "KVTASKS" and a zero']
    version: Annotated[int, "I", "1"]
    window: Annotated[int, "I", "slots, a power of two, 64..1048576"]
    flags: Annotated[int, "I", "bit 0: records with the same key are in order"]
    name_length: Annotated[int, "I", "bytes of the name, 1..256"]
    log_id: Annotated[bytes, "16s", "of the log; zeros: it has none"]
    checksum: Annotated[int, "I", "CRC32C of the bytes before it, and of the name"]


class WorkerWords(NamedTuple):
    """A worker in the table."""

    pid: Annotated[int, "Q", "its process; 0: there is none"]
    start: Annotated[int, "Q", "when the process started, in clock ticks since boot"]
    boot: Annotated[int, "Q", "the first 8 bytes of the boot's id"]
    namespace: Annotated[int, "Q", "inode of the pid namespace"]
    joined: Annotated[int, "Q", "when it began, ns since the Unix epoch"]
    reserved: Annotated[bytes, "24s", "zeros"]


class ListWords(NamedTuple):
    """The first words of the shared memory."""

    lock: Annotated[int, "Q", "the lock of the window, as the append lock of a spool; 0: it is free"]
    dirty: Annotated[int, "Q", "1: a process changes the words, or was killed then; the next one derives them again"]
    low: Annotated[int, "Q", "every task below this sequence is done"]
    next: Annotated[int, "Q", "the first sequence that was given to no worker; with an order: that was not admitted"]
    ready_from: Annotated[int, "Q", "no task below this sequence is READY; all ones: none is"]
    due: Annotated[int, "Q", "no DELAYED task is due before, ns since the Unix epoch; all ones: there is none"]
    leases: Annotated[int, "Q", "no lease ends before, ns of the monotonic clock; all ones: there is none"]
    asked: Annotated[int, "Q", "1: workers sleep, and want the byte 4088 to be written when there is a task"]
    flushes: Annotated[int, "Q", "releases of the flush lock; this and the next three as in the tail of a journal"]
    came: Annotated[int, "Q", "arrivals of waiters for a flush"]
    began: Annotated[int, "Q", "`came` when the last flush began"]
    goal: Annotated[int, "Q", "`came` once all waiters woken by that flush have returned"]
    changes: Annotated[int, "Q", "approximate number of tasks that were done"]
    synced: Annotated[int, "Q", "value of `changes` that is on disk"]
    error: Annotated[int, "Q", "errno of the first failed flush; 0: none"]
    safe: Annotated[int, "Q", "after a crash of the machine, only acknowledgements below this sequence count"]
    boot: Annotated[bytes, "16s", "the boot of the machine in which the words were last derived"]
    buried_from: Annotated[int, "Q", "end of the dead-letter log before the last record was moved there"]
    burying: Annotated[int, "Q", "sequence + 1 of the record that is being moved there; 0: none"]
    workers: Annotated[int, "Q", "the highest number that a worker had"]
    kept: Annotated[int, "Q", "the position of the durable reader, as last stored by a worker"]
    repeated: Annotated[int, "Q", "approximate number of deliveries of tasks that had been given before"]
    dead: Annotated[int, "Q", "approximate number of tasks whose records were moved to the dead-letter log"]
    watcher: Annotated[int, "Q", "number of a worker that waits, and watches the log; 0: none"]
    watched: Annotated[int, "Q", "when it said so last, ns of the monotonic clock"]
    watcher_2: Annotated[int, "Q", "a second such worker; 0: none"]
    watched_2: Annotated[int, "Q", "when it said so last"]
    calls: Annotated[int, "Q", "changes when a watcher stops; the other waiting workers sleep on its low half (a futex)"]
    reserved: Annotated[bytes, "280s", "zeros"]


class SlotWords(NamedTuple):
    """A slot without an order has the first two words."""

    mark: Annotated[int, "Q", "state, owner, deliveries, turn and lap; see the next table"]
    until: Annotated[int, "Q", "of a TAKEN task: the end of its lease, monotonic; of a DELAYED one: when it is due; all ones: never"]
    bucket: Annotated[int, "Q", "the CRC32C of the key, modulo the window; without a key the sequence"]
    after: Annotated[int, "Q", "sequence + 1 of the next record with the same bucket; 0: there is none"]


HEADER, WORKER, LIST, SLOT = Layout(TaskHead), Layout(WorkerWords), Layout(ListWords), Layout(SlotWords)
MEMORY_AT = WORKERS_AT + MOST_WORKERS * WORKER.size

assert (LIST.size, SLOT.size) == (8 * tasks.WORDS, 8 * tasks.ORDERED_STRIDE)
assert [LIST.offset(name) // 8 for name in "lock dirty low next ready_from due leases asked changes synced error safe boot".split()] == [
    *(tasks.LOCK, tasks.DIRTY, tasks.LOW, tasks.NEXT, tasks.READY_FROM, tasks.DUE, tasks.LEASES, tasks.ASKED),
    *(tasks.CHANGES, tasks.SYNCED, tasks.ERROR, tasks.SAFE, tasks.BOOT),
]
assert [LIST.offset(name) // 8 for name in "buried_from burying workers kept repeated dead watcher watcher_2 calls".split()] == [
    *(tasks.BURIED_FROM, tasks.BURYING, tasks.WORKERS, tasks.KEPT, tasks.REPEATED, tasks.DEAD),
    *(tasks.WATCHERS, tasks.WATCHERS + 2, tasks.CALLS),
]
assert [LIST.offset(name) // 8 - tasks.GROUP for name in "flushes came began goal".split()] == [
    *(groups.FLUSHES, groups.CAME, groups.BEGAN, groups.GOAL)
]


class Wanted(NamedTuple):
    """The settings of a new list. window: slots for each log."""

    window: int
    is_ordered: bool


class TaskHeader(NamedTuple):
    """A checked header."""

    name: str
    window: int
    is_ordered: bool
    log_id: bytes

    @property
    def size(self) -> int:
        """Return the bytes of the whole file."""
        return MEMORY_AT + 8 * tasks.words_of(self.window, self.is_ordered)


def pack_header(header: TaskHeader) -> bytes:
    """Return the first bytes of a file. Raises ValueError for an invalid name."""
    flags = ORDERED if header.is_ordered else 0
    head = TaskHead(MAGIC, VERSION, header.window, flags, len(header.name.encode()), header.log_id.ljust(16, b"\0"), 0)
    return with_name(HEADER.pack(head), header.name, "a task list", LONGEST_NAME)


def parse_header(data: bytes) -> TaskHeader:
    """Return the header in the first bytes of a file. Raises ValueError with the reason, UnknownVersion."""
    if len(data) < HEADER.size:
        raise ValueError(f"it has {len(data)} bytes, fewer than a header")
    header = HEADER.unpack(data)
    if header.magic != MAGIC:
        raise ValueError("it does not begin as the file of a task list")
    if header.version != VERSION or header.flags & ~ORDERED:
        raise UnknownVersion(f"it has version {header.version} with flags {header.flags}, this kvspool knows {VERSION}")
    is_power = header.window & (header.window - 1) == 0
    if not (LEAST_WINDOW <= header.window <= MOST_WINDOW and is_power and 1 <= header.name_length <= LONGEST_NAME):
        raise ValueError("its header has impossible sizes")
    name = name_after(data, HEADER.size, header.name_length)
    return TaskHeader(name, header.window, bool(header.flags & ORDERED), header.log_id)


def check_window(window: int) -> int:
    """Return the slots of a window for a number of tasks: the next power of two. Raises ValueError, TypeError."""
    if not isinstance(window, int):
        raise TypeError(f"window is a number of tasks, not {type(window).__name__}")
    if not 1 <= window <= MOST_WINDOW:
        raise ValueError(f"window is 1 to {MOST_WINDOW} tasks, not {window}")
    return max(LEAST_WINDOW, 1 << (window - 1).bit_length())


def damaged(path: object, reason: object) -> Corruption:
    """Return the error of a damaged file."""
    return Corruption(
        f"{path} is no sound file of a task list: {reason}; stop the workers and remove it: "
        "then the tasks after the stored position are given out again"
    )
