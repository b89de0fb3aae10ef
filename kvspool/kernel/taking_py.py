"""How workers are given the tasks of a window, and how tasks end; see `tasks_py`.

This source is compiled as a part of `tasks_c`.
"""

from __future__ import annotations

from typing import Any

import kvspool.kernel.machine as native
from kvspool.kernel.tasks_py import (
    AFTER,
    BUCKET,
    BUSY,
    CHANGES,
    COUNT_AT,
    COUNTS,
    DEAD,
    DELAYED,
    DONE,
    DUE,
    DYING,
    FREE,
    HELD,
    LEASES,
    LOST,
    LOW,
    MOVED,
    NEXT,
    NONE,
    OWNER_AT,
    OWNERS,
    READY,
    READY_FROM,
    REPEATED,
    SERIAL_AT,
    STATE,
    TAKEN,
    UNTIL,
)
from kvspool.kernel.waiting_py import TaskWaiters


class TaskWindow(TaskWaiters):
    """One worker's access to a window; see `TaskSlots`."""

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
        native.store(words, REPEATED, native.load(words, REPEATED) + count)
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
        mark = self.put(sequence, state, self.owner, count + 1 if count < COUNTS else count, (mark >> SERIAL_AT) + 1)
        sequences.append(sequence)
        marks.append(mark)

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

    # The order by key.

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

    def let_next(self, sequence: int) -> None:
        """With an order: let the next task of a chain be READY."""
        after = native.load(self.words, self.at(sequence) + AFTER)
        if after == 0 or after - 1 >= native.load(self.words, NEXT):
            return
        mark = self.mark_of(after - 1)
        if self.age(after - 1, mark) == 0 and mark & STATE == HELD:
            self.make_ready(after - 1, mark)

    # The end of a task.

    def finish(self, sequence: int, mark: int) -> int:
        """Let a task of this worker be DONE; return LOST if it has another mark, or BUSY; otherwise the value of CHANGES."""
        try:
            if not self.begin():
                return BUSY
            return self.leave(native.load(self.words, CHANGES) if self.finish_one(sequence, mark) else LOST)
        finally:
            self.end()

    def finish_task(self, task: Any) -> bool:
        """Let a task be DONE, and note that it is over; False if the caller has to take the long way."""
        if not self.is_open:
            return False
        sequence, mark, is_over = task.sequence, task.mark, task.is_over
        is_done = False
        try:
            if is_over or not self.begin():
                return bool(is_over)
            is_done = self.finish_one(sequence, mark)
            self.leave(0)
        finally:
            self.end()
        if is_done:
            task.is_over = True
        return is_done

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
                native.store(self.words, DEAD, native.load(self.words, DEAD) + 1)
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
            self.free_place(owner)
            return self.leave(count)
        finally:
            self.end()

    def pass_over(self, first: int, to: int) -> int:
        """Continue after the sequences from NEXT, which is `first`, up to `to`: they have no record. The window may allow less.

        Return the new NEXT, MOVED or BUSY.
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
