"""The group commit: one flush for all waiting callers, in words that processes share.

A handle that needs its records on disk passes the sequence below which they are. If no other one flushes, it leads: it locks a byte,
flushes for all, and leaves. The others sleep until it has left, and check the synced sequence: they are done, or one of them leads. A
`Progress` of the log knows the synced sequence; see `ring_py` and `tail_py`.

**A byte proves life.** The lock is one of an open file description: the kernel frees it when the leader ends. That wakes no process, so a
waiter sleeps for a limited time.

**Gathering.** A leader may wait for callers that the last one expected, before it flushes. The words `CAME`, `BEGAN` and `GOAL` for this
are hints.

**The wait is here**, since it is on the way of every durable append: the next flush can't begin before a waiter has run. Everything else
belongs to `engine.flushing`: how long a caller sleeps, whether a leader gathers others and for how long, the flush itself and its errors.

This source is also compiled, like `frames_py`.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import kvspool.kernel.machine as native
from kvspool.errors import Closed
from kvspool.system.handles import refuse_copy

# Words of a group.
FLUSHES = 0  # how often a leader has left: the word on which the others sleep
CAME = 1  # number of arrivals
BEGAN = 2  # `CAME` when the last flush began
GOAL = 3  # `CAME` when all woken ones have returned
WORDS = 4

# Results of `look` and `come`.
WAITS = 0
DONE = 1
LEADS = 2
LATE = 3
FAILED = 4

WORD = 0xFFFFFFFFFFFFFFFF


class Progress:
    """The synced sequence of a log, for which a group waits."""

    def look(self, sequence: int) -> int:
        """Return DONE if every record below `sequence` is on disk, FAILED if a flush failed, otherwise WAITS. Raises Closed, Corruption."""
        raise NotImplementedError


class FlushGroup:
    """One handle's part in a group. Threads of one handle share the lock, so at most one of them is the `leader`."""

    def __init__(self, progress: Progress, memory: memoryview, at: int, lock_byte: int) -> None:
        """Use `WORDS` words of writable memory, from word `at` on. Set `lock_fd`, the descriptor of the lock, before `come`."""
        if at < 0 or len(memory) < 8 * (at + WORDS) or not native.is_writable(memory):
            raise ValueError(f"a flush group has {WORDS} words of memory that may be written to, not read-only; {at} is the first one")
        self.progress = progress
        self.owner: Any = memory
        self.words: Any = native.words_at(memory)
        self.at = at
        self.lock_byte = lock_byte
        self.lock_fd = -1
        self.leader = 0  # the thread of this handle that flushes
        self.guard: Any = threading.RLock()
        self.is_open = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def check_open(self) -> None:
        """Raise Closed after `close`, or if `__init__` has not run."""
        if not self.is_open:
            raise Closed("the log was closed; open it again")

    def close(self) -> None:
        """Forget the memory and the descriptor, which the caller closes: that releases the lock. Every later call raises Closed."""
        self.is_open = False
        self.lock_fd = -1
        self.owner = None
        self.words = native.no_words()

    def come(self, sequence: int, thread: int, ns: int, longest: int) -> int:
        """Wait, up to `ns`, until every record below `sequence` is on disk: DONE, LATE, or FAILED if a flush failed, even an earlier one.

        LEADS: no other handle flushes. The caller must do it, and then `leave`, whatever happens; also if this raises. longest: ns of a
        sleep until the next check whether the leader is alive.
        """
        self.check_open()
        owner = self.owner  # keeps the memory alive while another thread closes
        native.add_one(self.words, self.at + CAME)
        until = native.monotonic() + ns
        while True:
            seen = native.load(self.words, self.at + FLUSHES)
            found = self.progress.look(sequence)
            if found != WAITS:
                return found
            self.check_open()
            if self.lead(thread):
                found = self.progress.look(sequence)
                if found != WAITS:
                    return found
                del owner
                return LEADS
            left = until - native.monotonic()
            if left <= 0:
                return LATE
            native.wait_word(self.words, self.at + FLUSHES, seen, min(left, longest))
            native.check_signals()
            self.check_open()

    def lead(self, thread: int) -> bool:
        """Take the lock for this thread, or return False if another thread or process has it."""
        with self.guard:
            if self.leader != 0:
                return False
            self.leader = thread
        if self.lock_fd >= 0 and native.try_lock(self.lock_fd, self.lock_byte):  # another thread may close it meanwhile
            return True
        self.leader = 0
        return False

    def gather(self, ns: int) -> int:
        """As leader: wait, up to `ns`, for the callers that the last leader expected. Return how many came since its flush began."""
        self.check_open()
        owner = self.owner  # keeps the memory alive while another thread closes
        native.wait_count(self.words, self.at + CAME, native.load(self.words, self.at + GOAL), ns)
        self.check_open()
        came = native.load(self.words, self.at + CAME)
        size = (came - native.load(self.words, self.at + BEGAN)) & WORD
        native.store(self.words, self.at + BEGAN, came)
        del owner
        return size

    def leave(self, thread: int, expected: int) -> None:
        """If this thread leads: release the lock, and wake all. They see the result, or one of them leads.

        expected: callers for whom the next leader waits when it gathers; 0: as before. If a signal handler raises during this, call it
        again.
        """
        if self.leader != thread:
            return
        if expected != 0 and self.is_open:
            native.store(self.words, self.at + GOAL, (native.load(self.words, self.at + CAME) + expected) & WORD)
        try:
            # Whether we hold it or not: a signal handler may have raised before we knew.
            if self.lock_fd >= 0:
                native.unlock(self.lock_fd, self.lock_byte)
        except BaseException:  # from a signal handler, perhaps before the lock was released, or the system's: then it fails again
            try:
                if self.lock_fd >= 0:
                    native.unlock(self.lock_fd, self.lock_byte)
            finally:
                self.leader = 0
            raise
        self.leader = 0
        if self.is_open:
            native.add_one(self.words, self.at + FLUSHES)  # after the unlock: a handle that saw it locked, but is awake yet, will not sleep
            native.wake_all(self.words, self.at + FLUSHES)
