"""How workers of a task list wait: two of them watch the log, and the others rest until one is called; see `tasks_py`.

A worker that *watches* wakes when a record is appended, when a task is available again, and when another worker ends. It sleeps on inotify.
A worker that *rests* sleeps on CALLS, and costs a writer nothing. Before a worker that watches returns a task, it frees its place and calls
one that rests, which takes the place and watches. So an append wakes two workers, however many wait.

**No wake-up is lost.** A worker rests only if two others have the places of WATCHERS, and each of these checks for tasks between taking its
place and its sleep. Whichever frees a place changes CALLS, so that a worker that is about to rest doesn't. The called worker may have been
killed, or be stopped: so each worker that takes a place calls again while the other place is free. A called worker that finds a task before
it has a place passes the call on. If a worker that watches is killed, the other one frees its place. A worker that doesn't renew its place
for a while, since it is stopped, loses it to the next one that looks. So only if both are killed or stopped at once, a record waits until
one that rests looks without a call, for at most half a second.

A worker that watches without a place, as in an event loop, or after it lost its place, does no harm. This source is compiled as a part of
`tasks_c`.
"""

from __future__ import annotations

import kvspool.kernel.machine as native
from kvspool.kernel.tasks_py import BUSY, CALLS, WATCHERS, WATCHES, TaskSlots

CALL_BITS = 0xFFFFFFFF


class TaskWaiters(TaskSlots):
    """One worker's place among those that wait; see `TaskSlots`. These methods change no task, and leave DIRTY alone."""

    def stand_watch(self, patience: int) -> int:
        """Take or renew a place of WATCHERS, and return WATCHES. Check for tasks after this and before sleeping.

        patience: ns after which a place that was not renewed is free.
        If others have both places: return the value of CALLS, with which the worker may rest. BUSY if another process has the lock.
        """
        self.check_open()
        try:
            if not self.lock.take(self):
                return BUSY
            clock = native.monotonic()
            place = self.place_for(clock, patience)
            if place < 0:
                return native.load(self.words, CALLS) & CALL_BITS
            native.store(self.words, WATCHERS + 2 * place + 1, clock)
            native.store(self.words, WATCHERS + 2 * place, self.owner)
            if self.is_free(1 - place, clock, patience):
                self.note_call()
            return WATCHES
        finally:
            self.end()

    def place_for(self, clock: int, patience: int) -> int:
        """Return the place of this worker, or a free one; -1 if there is none."""
        if native.load(self.words, WATCHERS) == self.owner:
            return 0
        if native.load(self.words, WATCHERS + 2) == self.owner:
            return 1
        return 0 if self.is_free(0, clock, patience) else 1 if self.is_free(1, clock, patience) else -1

    def is_free(self, place: int, clock: int, patience: int) -> bool:
        """Return whether no worker has a place, or one that has not renewed it for too long."""
        since = native.load(self.words, WATCHERS + 2 * place + 1)
        return native.load(self.words, WATCHERS + 2 * place) == 0 or since > clock or clock - since > patience

    def end_watch(self, patience: int) -> int:
        """Free the place of this worker, which has a task, or no longer waits. If a place is free, call a worker. Return 0 or BUSY.

        patience: as in `stand_watch`.
        """
        self.check_open()
        try:
            if not self.lock.take(self):
                return BUSY
            self.free_place(self.owner)
            clock = native.monotonic()
            if self.is_free(0, clock, patience) or self.is_free(1, clock, patience):
                self.note_call()
            return 0
        finally:
            self.end()

    def free_place(self, owner: int) -> None:
        """Under the lock: free the place of a worker, if it has one."""
        place = 0
        while place < 2:
            if native.load(self.words, WATCHERS + 2 * place) == owner:
                native.store(self.words, WATCHERS + 2 * place, 0)
                self.note_call()
            place += 1

    def note_call(self) -> None:
        """Let no worker begin to rest that looked before this. Call one that rests afterwards, without the lock."""
        native.add_one(self.words, CALLS)
        self.must_call = True

    def call_one(self) -> None:
        """Wake a worker that rests."""
        self.must_call = False
        if self.is_open:
            native.wake_word(self.words, CALLS)

    def call_all(self) -> None:
        """Wake all workers that rest: one of them was closed."""
        if self.is_open:
            native.add_one(self.words, CALLS)
            native.wake_all(self.words, CALLS)

    def rest(self, calls: int, ns: int) -> None:
        """Sleep until another worker calls, up to `ns`, unless CALLS has changed; or until a signal, whose handler may raise."""
        self.check_open()
        memory = self.memory  # keeps it mapped while another thread closes
        native.wait_word(self.words, CALLS, calls, ns)
        del memory
        native.check_signals()
