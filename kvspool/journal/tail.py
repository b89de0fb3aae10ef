"""The layout of a journal's tail, the file that its writers map; the loops (`kernel.tail_py`) use its words by number."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from kvspool.engine.layout import Layout
from kvspool.kernel import group_py as groups
from kvspool.kernel import tail_py as tails


class TailWords(NamedTuple):
    """The words of a tail."""

    lock: Annotated[int, "Q", "the append lock: its owner may append; 0: free; writers sleep on its low half (a futex)"]
    state: Annotated[int, "Q", "bit 0: the page counts; bit 1: an append is under way; bit 2: the valid copy; 4 more with every change"]
    holder_pid: Annotated[int, "Q", "process id of the last writer; this and the next three name it to waiters"]
    holder_start: Annotated[int, "Q", "when that process started, clock ticks since boot"]
    holder_boot: Annotated[int, "Q", "the first 8 bytes of its boot id"]
    holder_namespace: Annotated[int, "Q", "inode of its pid namespace"]
    error: Annotated[int, "Q", "low half: errno of the first failed flush; high half: its checksum; 0: none"]
    rewinds: Annotated[int, "Q", "4 more when the journal's end may have moved back; append lock"]
    copies: Annotated[bytes, "128s", "two copies of the end of the journal; see the next table"]
    flushes: Annotated[int, "Q", "approximate number of releases of the flush lock; waiters sleep on its low half (a futex)"]
    came: Annotated[int, "Q", "approximate number of arrivals of waiters for a flush; this and the next two are hints"]
    began: Annotated[int, "Q", "`came` as it was when the last flush began; flush lock"]
    goal: Annotated[int, "Q", "value of `came` once all waiters woken by that flush have returned; flush lock"]
    leader_pid: Annotated[int, "Q", "process id of the leader of the last flush; this and the next three are as those of the holder"]
    leader_start: Annotated[int, "Q", ""]
    leader_boot: Annotated[int, "Q", ""]
    leader_namespace: Annotated[int, "Q", ""]


class TailCopy(NamedTuple):
    """One of the two copies of the journal's end."""

    base: Annotated[int, "Q", "first sequence of the last segment"]
    end: Annotated[int, "Q", "bytes of the last segment that are whole"]
    next_sequence: Annotated[int, "Q", "of the next record"]
    latest: Annotated[int, "q", "ns since the Unix epoch, the latest timestamp of a record; the smallest number: not known"]
    synced: Annotated[int, "Q", "every record below this sequence is on disk"]
    check: Annotated[int, "Q", "low half: checksum of the bytes before it; high half: all ones"]
    reserved: Annotated[bytes, "16s", "zeros"]


TAIL = Layout(TailWords)
COPY = Layout(TailCopy)

assert (TAIL.size, COPY.size) == (8 * tails.WORDS, 8 * tails.COPY_WORDS)
assert [TAIL.offset(name) // 8 for name in ("lock", "state", "holder_pid", "error", "rewinds", "copies", "flushes", "leader_pid")] == [
    *(tails.LOCK, tails.COUNT, tails.HOLDER, tails.ERROR, tails.REWINDS, tails.COPIES, tails.GROUP, tails.LEADER)
]
assert [TAIL.offset(name) // 8 - tails.GROUP for name in ("flushes", "came", "began", "goal")] == [
    *(groups.FLUSHES, groups.CAME, groups.BEGAN, groups.GOAL)
]
assert [COPY.offset(name) // 8 for name in ("base", "end", "next_sequence", "latest", "synced", "check")] == [
    *(tails.BASE, tails.END, tails.NEXT, tails.LATEST, tails.SYNCED, tails.CHECK)
]
