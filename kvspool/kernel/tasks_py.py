"""The window of a task list: which records are given to which worker, in memory that all workers share.

The memory has words for the list, and a slot for each of the last `window` sequences: sequence s has slot s % window. The first word of a
slot is its *mark*:

    bits 0..2     state: FREE, READY, DELAYED, TAKEN, HELD, DONE, DYING
    bits 3..13    owner: number of the worker that has the task; 0: none
    bits 14..27   deliveries: how often it was given to a worker
    bits 28..35   turn: changes whenever it is given, so that a late call of a former owner finds another mark
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
WORDS = 64

FREE, READY, DELAYED, TAKEN, HELD, DONE, DYING = 0, 1, 2, 3, 4, 5, 6
STATE = 7  # mask
OWNER_AT, COUNT_AT, TURN_AT, LAP_AT = 3, 14, 28, 36
OWNERS = 0x7FF
COUNTS = 0x3FFF
TURNS = 0xFF
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


class TaskWindow(group.Progress):
    """One worker's access to a window. Threads may share it: a method that finds the lock taken by another one returns BUSY."""

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

    def put(self, sequence: int, state: int, owner: int, count: int, turn: int) -> int:
        """Store a mark, and return it."""
        lap = (sequence >> self.bits) & LAPS
        mark = state | owner << OWNER_AT | count << COUNT_AT | (turn & TURNS) << TURN_AT | lap << LAP_AT
        native.store(self.words, self.at(sequence), mark)
        return mark

    def change(self, sequence: int, mark: int, state: int, owner: int) -> int:
        """Store a mark with another state and owner, and return it."""
        return self.put(sequence, state, owner, mark >> COUNT_AT & COUNTS, mark >> TURN_AT)

    def blank(self, sequence: int) -> None:
        """Let the slot of a sequence be that of the previous lap, done: no worker was given the sequence."""
        lap = ((sequence >> self.bits) - 1) & LAPS
        native.store(self.words, self.at(sequence), DONE | lap << LAP_AT)

    # The lock.

    def begin(self) -> bool:
        """Take the lock, and derive the words if the last owner was killed; return False if another process has it. Raises Closed."""
        if not self.is_open:
            raise Closed("this worker was closed; open another one")
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

    # Giving tasks out.

    def take(self, most: int, end: int, lease: int, sequences: list[int], marks: list[int]) -> int:
        """Give up to `most` tasks to this worker: add their sequences and marks to the lists, and return their number; BUSY.

        First those that were given before. end: records below this sequence exist. lease: ns until the lease ends; 0: it has no end.
        """
        try:
            if not self.begin():
                return BUSY
            words = self.words
            if self.is_due():
                self.look_at_times(native.now(), native.monotonic())
            until = NONE if lease == 0 else native.monotonic() + lease
            count = self.take_again(most, until, sequences, marks)
            if count < most and not self.is_ordered:
                count += self.take_new(most - count, end, until, sequences, marks)
            if count != 0 and until < native.load(words, LEASES):
                native.store(words, LEASES, until)
            return self.leave(count)
        finally:
            self.end()

    # The short way: the next record was read ahead, and nothing else is to be done.

    def next_ahead(self, lease: int, make: Any, source: Any) -> Any:
        """Claim the next task, and return `make(record, sequence, mark, source)`; None if the caller has to take the long way."""
        ahead, first = self.ahead, self.ahead_first
        clock = native.monotonic()
        if clock >= self.tick_after or not self.is_open or self.is_ordered:
            return None
        sequence = mark = 0
        try:
            if not self.begin():
                return None
            sequence = native.load(self.words, NEXT)
            if self.can_continue(sequence, 1, first, len(ahead)) != 0:
                mark = self.claim_next(sequence, lease, clock)
            self.leave(0)
        finally:
            self.end()
        return None if mark == 0 else make(ahead[sequence - first], sequence, mark, source)

    def take_ahead(self, most: int, lease: int, make: Any, source: Any) -> list[Any] | None:
        """Claim up to `most` tasks as `next_ahead` does, and return a list of them; None if the caller has to take the long way."""
        ahead, first = self.ahead, self.ahead_first
        clock = native.monotonic()
        if clock >= self.tick_after or not self.is_open or self.is_ordered:
            return None
        marks: list[int] = []
        count = at = sequence = 0
        try:
            if not self.begin():
                return None
            sequence = native.load(self.words, NEXT)
            count = self.can_continue(sequence, most, first, len(ahead))
            while at < count:
                mark = self.claim_next(sequence + at, lease, clock)
                if mark == 0:
                    break
                marks.append(mark)
                at += 1
            self.leave(0)
        finally:
            self.end()
        return [make(ahead[sequence - first + at], sequence + at, marks[at], source) for at in range(len(marks))] or None

    def can_continue(self, sequence: int, most: int, first: int, size: int) -> int:
        """Return how many tasks, up to `most`, can be given out from NEXT on, by their records read ahead; 0: first, others are due."""
        words = self.words
        low = native.load(words, LOW)
        if sequence < first or sequence >= first + size or sequence - low >= self.window:
            return 0
        if native.load(words, READY_FROM) < sequence or self.is_due():
            return 0
        return min(most, min(first + size - sequence, low + self.window - sequence))

    def claim_next(self, sequence: int, lease: int, clock: int) -> int:
        """Give the task NEXT to this worker, and return its mark; 0 if it has a mark of this lap."""
        words = self.words
        at = self.at(sequence)
        if self.age(sequence, native.load(words, at)) == 0:
            return 0
        until = NONE if lease == 0 else clock + lease
        if until < native.load(words, LEASES):
            native.store(words, LEASES, until)
        native.store(words, at + UNTIL, until)
        mark = self.put(sequence, TAKEN, self.owner, 1, 1)
        native.store(words, NEXT, sequence + 1)
        return mark

    def finish_task(self, task: Any) -> bool:
        """Let a task be DONE, and note that it is over; False if the caller has to take the long way."""
        if not self.is_open:
            return False
        sequence, mark, is_over = task.sequence, task.mark, task.is_over
        is_done = False
        try:
            if is_over or not self.begin():
                return is_over
            is_done = self.finish_one(sequence, mark)
            self.leave(0)
        finally:
            self.end()
        if is_done:
            task.is_over = True
        return is_done

    def is_due(self) -> bool:
        """Return whether a task may be due, or a lease may have ended."""
        due, leases = native.load(self.words, DUE), native.load(self.words, LEASES)
        return (due != NONE and due <= native.now()) or (leases != NONE and leases <= native.monotonic())

    def take_again(self, most: int, until: int, sequences: list[int], marks: list[int]) -> int:
        """Give out tasks that are READY, or DYING without an owner."""
        words = self.words
        sequence, after = native.load(words, READY_FROM), native.load(words, NEXT)
        if sequence >= after:
            return 0
        sequence = max(sequence, native.load(words, LOW))
        count = 0
        while sequence < after and count < most:
            mark = self.mark_of(sequence)
            if self.age(sequence, mark) == 0:
                state = mark & STATE
                if state == READY:
                    self.give(sequence, mark, TAKEN, until, sequences, marks)
                    count += 1
                elif state == DYING and mark >> OWNER_AT & OWNERS == 0:
                    self.give(sequence, mark, DYING, NONE, sequences, marks)
                    count += 1
            sequence += 1
        native.store(words, READY_FROM, sequence if sequence < after else NONE)
        return count

    def take_new(self, most: int, end: int, until: int, sequences: list[int], marks: list[int]) -> int:
        """Give out tasks that no worker had before."""
        words = self.words
        sequence = native.load(words, NEXT)
        end = min(end, native.load(words, LOW) + self.window)
        count = 0
        while sequence < end and count < most:
            mark = self.mark_of(sequence)
            if self.age(sequence, mark) != 0 or mark & STATE == FREE:
                self.give(sequence, 0, TAKEN, until, sequences, marks)
                count += 1
            elif mark & STATE == READY:  # after a crash of the machine, as all of these
                self.give(sequence, mark, TAKEN, until, sequences, marks)
                count += 1
            elif mark & STATE == DYING:
                self.make_ready(sequence, mark)
            sequence += 1
            native.store(words, NEXT, sequence)
        self.advance()
        return count

    def give(self, sequence: int, mark: int, state: int, until: int, sequences: list[int], marks: list[int]) -> None:
        """Give a task to this worker."""
        count = mark >> COUNT_AT & COUNTS
        native.store(self.words, self.at(sequence) + UNTIL, until)
        mark = self.put(sequence, state, self.owner, count + 1 if count < COUNTS else count, (mark >> TURN_AT) + 1)
        sequences.append(sequence)
        marks.append(mark)

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

    def admit(self, first: int, hashes: list[int]) -> int:
        """With an order: admit records from sequence `first` on, given the hash of each key; return how many were; MOVED, BUSY."""
        try:
            if not self.begin():
                return BUSY
            words = self.words
            sequence = native.load(words, NEXT)
            if sequence != first:
                return self.leave(MOVED)
            end = min(first + len(hashes), native.load(words, LOW) + self.window)
            while sequence < end:
                self.admit_one(sequence, hashes[sequence - first] & (self.window - 1))
                sequence += 1
                native.store(words, NEXT, sequence)
            self.advance()
            return self.leave(sequence - first)
        finally:
            self.end()

    def admit_one(self, sequence: int, bucket: int) -> None:
        """Add a record to the chain of its bucket. If its task has a mark already, it keeps the state."""
        words = self.words
        at = self.at(sequence)
        mark = native.load(words, at)
        is_new = self.age(sequence, mark) != 0 or mark & STATE == FREE
        if not is_new and mark & STATE == DONE:
            return
        last = native.load(words, self.buckets + bucket)  # sequence + 1
        is_first = last == 0 or last - 1 < native.load(words, LOW) or self.is_done(last - 1)
        native.store(words, at + BUCKET, bucket)
        native.store(words, at + AFTER, 0)
        if is_new:
            native.store(words, at + UNTIL, NONE)
            mark = self.put(sequence, HELD, 0, 0, 0)
        if is_first:
            if mark & STATE == HELD:
                self.make_ready(sequence, mark)
        else:
            if mark & STATE == READY:
                self.change(sequence, mark, HELD, 0)
            native.store(words, self.at(last - 1) + AFTER, sequence + 1)
        if not is_new:  # find its time, and whether it is ready, again
            native.store(words, READY_FROM, min(sequence, native.load(words, READY_FROM)))
            native.store(words, DUE, 0)
            native.store(words, LEASES, 0)
        native.store(words, self.buckets + bucket, sequence + 1)

    # The end of a task.

    def finish(self, sequence: int, mark: int) -> int:
        """Let a task of this worker, with this mark, be DONE; return LOST if it is no longer its, or BUSY; otherwise the value of CHANGES."""
        try:
            if not self.begin():
                return BUSY
            return self.leave(native.load(self.words, CHANGES) if self.finish_one(sequence, mark) else LOST)
        finally:
            self.end()

    def finish_all(self, tasks: list[Any], lost: list[Any]) -> int:
        """Let all these tasks be DONE and over; return BUSY, or the value of CHANGES. Lost ones are added to `lost`."""
        try:
            if not self.begin():
                return BUSY
            for task in tasks:
                if task.is_over:
                    continue
                if not self.finish_one(task.sequence, task.mark):
                    lost.append(task)
                task.is_over = True
            return self.leave(native.load(self.words, CHANGES))
        finally:
            self.end()

    def finish_one(self, sequence: int, mark: int) -> bool:
        """Let a task be DONE if it has this mark; return whether it had."""
        words = self.words
        if native.load(words, self.at(sequence)) != mark:
            return False
        self.change(sequence, mark, DONE, 0)
        native.store(words, CHANGES, native.load(words, CHANGES) + 1)
        if self.is_ordered:
            self.let_next(sequence)
        if sequence == native.load(words, LOW):
            self.advance()
        return True

    def let_next(self, sequence: int) -> None:
        """With an order: let the next task of a chain be READY."""
        after = native.load(self.words, self.at(sequence) + AFTER)
        if after == 0 or after - 1 >= native.load(self.words, NEXT):
            return
        mark = self.mark_of(after - 1)
        if self.age(after - 1, mark) == 0 and mark & STATE == HELD:
            self.make_ready(after - 1, mark)

    def put_back(self, sequence: int, mark: int, due: int) -> int:
        """Let others be given a task of this worker, from the time of the day `due` on, 0: now. Return 0, LOST or BUSY."""
        try:
            if not self.begin():
                return BUSY
            words = self.words
            if native.load(words, self.at(sequence)) != mark:
                return self.leave(LOST)
            if due == 0:
                self.make_ready(sequence, mark)
                return self.leave(0)
            native.store(words, self.at(sequence) + UNTIL, due)
            if due < native.load(words, DUE):
                native.store(words, DUE, due)
            self.change(sequence, mark, DELAYED, 0)
            self.has_news = True  # sleepers have to wake for it in time
            return self.leave(0)
        finally:
            self.end()

    def prolong(self, sequence: int, mark: int, until: int) -> int:
        """Let the lease of a task of this worker end at `until`, of the monotonic clock; NONE: never. Return 0, LOST or BUSY."""
        try:
            if not self.begin():
                return BUSY
            words = self.words
            if native.load(words, self.at(sequence)) != mark:
                return self.leave(LOST)
            native.store(words, self.at(sequence) + UNTIL, until)
            if until < native.load(words, LEASES):
                native.store(words, LEASES, until)
            return self.leave(0)
        finally:
            self.end()

    def condemn(self, sequence: int, mark: int) -> int:
        """Let a task of this worker be DYING: it becomes a dead letter, whichever process is killed. Return 0, LOST or BUSY."""
        try:
            if not self.begin():
                return BUSY
            if native.load(self.words, self.at(sequence)) != mark:
                return self.leave(LOST)
            self.change(sequence, mark, DYING, self.owner)
            return self.leave(0)
        finally:
            self.end()

    def bury(self, sequence: int) -> int:
        """Let a DYING task of any worker be DONE: its record is in the dead-letter log. Return 0 or BUSY."""
        try:
            if not self.begin():
                return BUSY
            mark = self.mark_of(sequence)
            if self.age(sequence, mark) == 0 and mark & STATE == DYING:
                self.finish_one(sequence, mark)
            return self.leave(0)
        finally:
            self.end()

    # Workers that ended, and records that don't exist.

    def release(self, owner: int) -> int:
        """Let all tasks of a worker that ended be given to others; return how many there were, or BUSY."""
        try:
            if not self.begin():
                return BUSY
            low = native.load(self.words, LOW)
            count = 0
            sequence = low
            while sequence < low + self.window:
                mark = self.mark_of(sequence)
                is_held = mark & STATE == TAKEN or mark & STATE == DYING
                if is_held and mark >> OWNER_AT & OWNERS == owner and self.age(sequence, mark) == 0:
                    self.make_ready(sequence, mark)
                    count += 1
                sequence += 1
            return self.leave(count)
        finally:
            self.end()

    def pass_over(self, first: int, to: int) -> int:
        """The sequences from NEXT, which is `first`, up to `to` have no record: go on after them, as far as the window allows. Return the
        new NEXT, MOVED or BUSY.
        """
        try:
            if not self.begin():
                return BUSY
            words = self.words
            low, sequence = native.load(words, LOW), native.load(words, NEXT)
            if sequence != first:
                return self.leave(MOVED)
            if to - low > self.window and low == sequence:
                self.start_at(to)
                return self.leave(to)
            to = min(to, low + self.window)
            while sequence < to:
                if not self.is_done(sequence):
                    self.put(sequence, DONE, 0, 0, 0)
                sequence += 1
                native.store(words, NEXT, sequence)
            self.advance()
            return self.leave(sequence)
        finally:
            self.end()

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
        if not self.is_open:
            raise Closed("this worker was closed; open another one")
        if native.load(self.words, ERROR) != 0:
            return group.FAILED
        return group.DONE if native.load(self.words, SYNCED) >= sequence else group.WAITS

    def word(self, at: int) -> int:
        """Return a word of the list. Raises Closed."""
        if not self.is_open:
            raise Closed("this worker was closed; open another one")
        return native.load(self.words, at)

    def state_of(self, sequence: int) -> int:
        """Return the state of a task; DONE if its slot has a later lap, FREE if an earlier one. Raises Closed."""
        if not self.is_open:
            raise Closed("this worker was closed; open another one")
        mark = self.mark_of(sequence)
        age = self.age(sequence, mark)
        return DONE if age > 0 else FREE if age < 0 else mark & STATE

    def set_word(self, at: int, value: int) -> None:
        """Store a word of the list that the lock doesn't protect. Raises Closed."""
        if not self.is_open:
            raise Closed("this worker was closed; open another one")
        native.store(self.words, at, value)

    def ask(self) -> None:
        """Ask to be woken when a task is available. Check once more after this and before sleeping."""
        if self.is_open:
            native.store(self.words, ASKED, 1)
            native.fence()

    def counts(self) -> list[int]:
        """Return the number of tasks of the window in each state. Others may change them meanwhile. Raises Closed."""
        sequence, after = self.word(LOW), self.word(NEXT)
        found = [0] * (STATE + 1)
        while sequence < after:
            found[self.state_of(sequence)] += 1
            sequence += 1
        return found

    def close(self) -> None:
        """Forget the memory. Every later call raises Closed."""
        self.is_open = False
        self.memory = None
        self.words = native.no_words()


def words_of(window: int, is_ordered: bool) -> int:
    """Return the number of words of a window's memory."""
    return WORDS + window * (ORDERED_STRIDE + 1 if is_ordered else PLAIN_STRIDE)
