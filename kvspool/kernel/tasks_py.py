"""The window of a task list: which records are given to which worker, in memory that all workers share.

The memory has words for the list, and a slot for each of the last `window` sequences: sequence s has slot s % window. The first word of a
slot is its *mark*:

    bits 0..2     state: FREE, READY, DELAYED, TAKEN, HELD, DONE, DYING
    bits 3..13    owner: number of the worker that has the task; 0: none
    bits 14..27   deliveries: how often it was given to a worker
    bits 28..35   serial: changes whenever it is given, so that a late call of a former owner finds another mark
    bits 36..63   lap: s // window, less its high bits

**Each transition is one store of a mark.** So a process that is killed at any instruction leaves each task in its old or new state. A slot
gets the next lap only after its task was DONE. So a mark of a later lap means DONE, and after a crash of the machine any mixture of old and
new pages is true: nothing that was done is lost unless its page is, and nothing becomes done that was not.

**All other words are derived.** LOW (all tasks below it are done), NEXT (the first sequence that was not given out yet), and the words that
save a search are only changed under the lock, while DIRTY is set. A process that gets the lock and finds DIRTY set derives them again.

**Order by key.** Records with the same key, or a key with the same bucket, form a chain: a slot's AFTER is the next one. Only the first one
of a chain that is not done is given out; the others are HELD. The buckets are derived, too: after a crash all records from LOW on are
admitted again, and marks that exist keep their states.

The lock is an append lock (`lock_py`) of its own. Each method takes it, and returns BUSY if it can't: the caller rests, and calls again.
No method calls Python code of others, except `append` of lists. This source is also compiled, like `frames_py`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import kvspool.kernel.group_py as group
import kvspool.kernel.machine as native
from kvspool.errors import Closed
from kvspool.system.handles import refuse_copy

# Words of a list.
LOCK = 0  # the lock
DIRTY = 1  # 1 while a method changes the words: they have to be derived again
LOW = 2  # every task below is done
NEXT = 3  # the first sequence that no worker was given
READY_FROM = 4  # no task below is READY; NONE: none is
DUE = 5  # the time of the day from which a DELAYED task may be due, ns since the Unix epoch; NONE: none is
LEASES = 6  # the time of the monotonic clock from which a lease may have ended, ns; NONE: none has an end
ASKED = 7  # 1: workers sleep, and want to be woken
GROUP = 8  # four words of the flush group
CHANGES = 12  # number of tasks that were done, as far as known here
SYNCED = 13  # the value of CHANGES that is on disk
ERROR = 14  # errno of the first failed flush
SAFE = 15  # acknowledgements below this sequence count after a crash of the machine
BOOT = 16  # two words: the boot of the machine in which the words were last derived
BURIED_FROM = 18  # end of the dead-letter log before the last record was moved there
BURYING = 19  # sequence + 1 of the record that is being moved there; 0: none
WORKERS = 20  # the highest number that a worker had
KEPT = 21  # the position of the durable reader, as last stored
REPEATED = 22  # how often a task was given that had been given before, as far as known here
DEAD = 23  # number of tasks whose records were moved to the dead-letter log, as far as known here
WATCHERS = 24  # two pairs of words: the number of a worker that watches, and when it said so, ns of the monotonic clock
CALLS = 28  # changes when a place of WATCHERS becomes free; workers that rest sleep on its low half (a futex)
WORDS = 64

FREE, READY, DELAYED, TAKEN, HELD, DONE, DYING = 0, 1, 2, 3, 4, 5, 6
STATE = 7  # mask
OWNER_AT, COUNT_AT, SERIAL_AT, LAP_AT = 3, 14, 28, 36
OWNERS = 0x7FF
COUNTS = 0x3FFF
SERIALS = 0xFF
LAPS = 0xFFFFFFF
HALF_LAPS = 0x8000000
NONE = 0xFFFFFFFFFFFFFFFF

# Words of a slot; the last two only with an order.
MARK, UNTIL, BUCKET, AFTER = 0, 1, 2, 3
PLAIN_STRIDE, ORDERED_STRIDE = 2, 4

# Results.
BUSY = -1  # another process has the lock
LOST = -2  # the task is no longer this worker's
MOVED = -3  # NEXT is elsewhere
WATCHES = -4  # the worker has a place of WATCHERS


class TaskSlots(group.Progress):
    """One worker's access to a window: its marks, its lock, and the words that are derived. Threads may share it: a method that finds the
    lock taken by another one returns BUSY.
    """

    def __init__(self, memory: memoryview, lock: Any, window: int, is_ordered: bool, owner: int) -> None:
        """Use writable memory of `words_of(window, is_ordered)` words, of which `lock`, an AppendLock, has the first one.

        window: a power of two. owner: the number of this worker, 1..2047. Raises ValueError for other memory.
        """
        if window < 1 or window & (window - 1) or len(memory) < 8 * words_of(window, is_ordered) or not native.is_writable(memory):
            raise ValueError(f"a window of {window} tasks is a power of two, in {8 * words_of(window, is_ordered)} writable bytes")
        self.memory: Any = memory
        self.words: Any = native.words_at(memory)
        self.lock = lock
        self.window = window
        self.bits = window.bit_length() - 1
        self.is_ordered = is_ordered
        self.stride = ORDERED_STRIDE if is_ordered else PLAIN_STRIDE
        self.buckets = WORDS + window * self.stride
        self.owner = owner
        self.is_open = True
        self.has_news = False  # the last call made a task available to others, or made room
        self.must_ring = False  # and others sleep
        self.must_call = False  # a place of WATCHERS is free
        self.ahead: list[Any] = []  # records with consecutive sequences, read ahead
        self.ahead_first = 0  # sequence of the first one
        self.tick_after = 0  # time of the monotonic clock, ns, from which the caller has other work

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    # Marks.

    def at(self, sequence: int) -> int:
        """Return the first word of a sequence's slot."""
        return WORDS + (sequence & (self.window - 1)) * self.stride

    def mark_of(self, sequence: int) -> int:
        """Return the mark in a sequence's slot, of any lap."""
        return native.load(self.words, self.at(sequence))

    def age(self, sequence: int, mark: int) -> int:
        """Return the laps by which a mark in the sequence's slot is later than the sequence: 0 if it is that one's mark."""
        found = ((mark >> LAP_AT) - (sequence >> self.bits)) & LAPS
        return found - LAPS - 1 if found >= HALF_LAPS else found

    def is_done(self, sequence: int) -> bool:
        """Return whether the task of a sequence of the window is done."""
        mark = self.mark_of(sequence)
        age = self.age(sequence, mark)
        return age > 0 or (age == 0 and mark & STATE == DONE)

    def put(self, sequence: int, state: int, owner: int, count: int, serial: int) -> int:
        """Store a mark, and return it."""
        lap = (sequence >> self.bits) & LAPS
        mark = state | owner << OWNER_AT | count << COUNT_AT | (serial & SERIALS) << SERIAL_AT | lap << LAP_AT
        native.store(self.words, self.at(sequence), mark)
        return mark

    def change(self, sequence: int, mark: int, state: int, owner: int) -> int:
        """Store a mark with another state and owner, and return it."""
        return self.put(sequence, state, owner, mark >> COUNT_AT & COUNTS, mark >> SERIAL_AT)

    def blank(self, sequence: int) -> None:
        """Let the slot of a sequence be that of the previous lap, done: no worker was given the sequence."""
        lap = ((sequence >> self.bits) - 1) & LAPS
        native.store(self.words, self.at(sequence), DONE | lap << LAP_AT)

    # The lock, and derived words.

    def check_open(self) -> None:
        """Raise Closed after `close`."""
        if not self.is_open:
            raise Closed("this worker was closed; open another one")

    def begin(self) -> bool:
        """Take the lock, and derive the words if the last owner was killed; return False if another process has it. Raises Closed."""
        self.check_open()
        if not self.lock.take(self):
            return False
        self.has_news = False
        if native.load(self.words, DIRTY) != 0:
            self.derive()
        native.store(self.words, DIRTY, 1)
        return True

    def leave(self, result: int) -> int:
        """At the end of a method that holds the lock: return its result. Without this call, as after an interrupt, DIRTY stays set."""
        if self.has_news and native.load(self.words, ASKED) != 0:
            native.store(self.words, ASKED, 0)
            self.must_ring = True
        native.store(self.words, DIRTY, 0)
        return result

    def end(self) -> None:
        """Release the lock, if this call has it."""
        if self.lock.taken_by is self:
            self.lock.free()

    def derive(self) -> None:
        """Derive all words but LOW from the marks, and let LOW advance."""
        words = self.words
        native.store(words, READY_FROM, 0)
        native.store(words, DUE, 0)
        native.store(words, LEASES, 0)
        low = native.load(words, LOW)
        if self.is_ordered:
            self.forget_buckets()
            native.store(words, NEXT, low)
        else:
            after = max(low, native.load(words, NEXT))
            while after - low < self.window:
                mark = self.mark_of(after)
                if self.age(after, mark) != 0 or mark & STATE == FREE:
                    break
                after += 1
            native.store(words, NEXT, after)
        self.advance()

    def forget_buckets(self) -> None:
        """Clear the buckets: the records from LOW on are admitted again."""
        bucket = 0
        while bucket < self.window:
            native.store(self.words, self.buckets + bucket, 0)
            bucket += 1

    def advance(self) -> None:
        """Let LOW advance over tasks that are done."""
        low, after = native.load(self.words, LOW), native.load(self.words, NEXT)
        first = low
        while low < after and self.is_done(low):
            low += 1
        if low != first:
            native.store(self.words, LOW, low)
            if after - first >= self.window:
                self.has_news = True  # there is room

    def look_at_times(self, now: int, clock: int) -> None:
        """Let DELAYED tasks that are due, and tasks whose lease has ended, be READY; find the next such times."""
        words = self.words
        low, after = native.load(words, LOW), native.load(words, NEXT)
        due, leases = NONE, NONE
        sequence = low
        while sequence < after:
            mark = self.mark_of(sequence)
            if self.age(sequence, mark) == 0:
                state = mark & STATE
                until = native.load(words, self.at(sequence) + UNTIL)
                if state == DELAYED:
                    if until <= now:
                        self.make_ready(sequence, mark)
                    else:
                        due = min(due, until)
                elif state == TAKEN:
                    if until <= clock:
                        self.make_ready(sequence, mark)
                    else:
                        leases = min(leases, until)
            sequence += 1
        native.store(words, DUE, due)
        native.store(words, LEASES, leases)

    def make_ready(self, sequence: int, mark: int) -> None:
        """Let a task be READY, or one that was to become a dead letter be DYING without an owner."""
        if sequence < native.load(self.words, READY_FROM):
            native.store(self.words, READY_FROM, sequence)
        self.change(sequence, mark, DYING if mark & STATE == DYING else READY, 0)
        self.has_news = True

    def is_due(self) -> bool:
        """Return whether a task may be due, or a lease may have ended."""
        due, leases = native.load(self.words, DUE), native.load(self.words, LEASES)
        return (due != NONE and due <= native.now()) or (leases != NONE and leases <= native.monotonic())

    # Beginnings: under the lock, or for memory that no other process uses.

    def skip_below(self, sequence: int) -> int:
        """Let all tasks below a sequence be done: the durable reader was moved there. Return 0 or BUSY."""
        try:
            if not self.begin():
                return BUSY
            words = self.words
            low, after = native.load(words, LOW), native.load(words, NEXT)
            if sequence >= after and sequence > low:
                self.start_at(sequence)
                return self.leave(0)
            while low < sequence:
                self.put(low, DONE, 0, 0, 0)
                low += 1
            self.advance()
            return self.leave(0)
        finally:
            self.end()

    def start_at(self, sequence: int) -> None:
        """Under the lock, or for memory that no other process uses: begin with this sequence. Every task before is done."""
        words = self.words
        end = sequence + self.window
        at = sequence
        while at < end:
            self.blank(at)
            at += 1
        native.store(words, LOW, sequence)
        native.store(words, NEXT, sequence)
        native.store(words, READY_FROM, NONE)
        native.store(words, DUE, NONE)
        native.store(words, LEASES, NONE)
        if self.is_ordered:
            self.forget_buckets()

    def restart(self, safe: int, end: int) -> int:
        """After a crash of the machine: let all tasks that are not done be given out again. Return 0 or BUSY.

        Acknowledgements from the sequence `safe` on don't count: the log may have given their sequences to other records. Records below
        `end` exist.
        """
        try:
            if not self.begin():
                return BUSY
            words = self.words
            low = max(native.load(words, LOW), self.least_low())
            if low > safe:
                self.start_at(safe)
                return self.leave(0)
            native.store(words, LOW, low)
            sequence = low
            hole = 0
            while sequence < low + self.window:
                mark = self.mark_of(sequence)
                age = self.age(sequence, mark)
                if age == 0 and (mark & STATE == FREE or sequence >= end):
                    self.blank(sequence)
                    age = -1
                if age == 0 and (mark & STATE != DONE or sequence >= safe):
                    self.change(sequence, mark, DYING if mark & STATE == DYING else READY, 0)
                if age != 0 and hole == 0:
                    hole = sequence + 1
                sequence += 1
            self.forget_times(low if self.is_ordered else sequence if hole == 0 else hole - 1)
            self.advance()
            return self.leave(0)
        finally:
            self.end()

    def forget_times(self, after: int) -> None:
        """Let NEXT be `after`, and let the words for times and ready tasks be found again."""
        words = self.words
        if self.is_ordered:
            self.forget_buckets()
        native.store(words, NEXT, after)
        native.store(words, READY_FROM, 0)
        native.store(words, DUE, 0)
        native.store(words, LEASES, 0)

    def least_low(self) -> int:
        """Return the lowest sequence that LOW had when the latest mark was stored."""
        low = native.load(self.words, LOW)
        latest = low
        sequence = low
        while sequence < low + self.window:
            mark = self.mark_of(sequence)
            age = self.age(sequence, mark)
            if age > 0 or (age == 0 and mark & STATE != FREE):
                latest = max(latest, sequence + age * self.window + 1)
            sequence += 1
        return max(low, latest - self.window) if latest > self.window else low

    # Without the lock.

    def look(self, sequence: int) -> int:
        """Return whether the first `sequence` changes are on disk; see `group_py`. Raises Closed."""
        self.check_open()
        if native.load(self.words, ERROR) != 0:
            return group.FAILED
        return group.DONE if native.load(self.words, SYNCED) >= sequence else group.WAITS

    def word(self, at: int) -> int:
        """Return a word of the list. Raises Closed."""
        self.check_open()
        return native.load(self.words, at)

    def counts(self) -> list[int]:
        """Return the number of tasks of the window in each state. Others may change them meanwhile. Raises Closed."""
        sequence, after = self.word(LOW), self.word(NEXT)
        found = [0] * (STATE + 1)
        while sequence < after:
            found[self.state_of(sequence)] += 1
            sequence += 1
        return found

    def state_of(self, sequence: int) -> int:
        """Return the state of a task; DONE if its slot has a later lap, FREE if an earlier one. Raises Closed."""
        self.check_open()
        mark = self.mark_of(sequence)
        age = self.age(sequence, mark)
        return DONE if age > 0 else FREE if age < 0 else mark & STATE

    def set_word(self, at: int, value: int) -> None:
        """Store a word of the list that the lock doesn't protect. Raises Closed."""
        self.check_open()
        native.store(self.words, at, value)

    def ask(self) -> None:
        """Ask to be woken when a task is available. Check once more after this and before sleeping."""
        if self.is_open:
            native.store(self.words, ASKED, 1)
            native.fence()

    def close(self) -> None:
        """Forget the memory. Every later call raises Closed."""
        self.is_open = False
        self.memory = None
        self.words = native.no_words()


def words_of(window: int, is_ordered: bool) -> int:
    """Return the number of words of a window's memory."""
    return WORDS + window * (ORDERED_STRIDE + 1 if is_ordered else PLAIN_STRIDE)
