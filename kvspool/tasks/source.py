"""One log of a task list, as one worker sees it: its window, the records of the tasks, and the position of the durable reader.

**Claim, then read.** A worker first claims sequences in the window, then reads their records, mostly from those that it has read ahead.
Without other workers that is the next record in memory. Records that were given out before are read again at their sequences.

**The durable reader** of the list's name has a position for retention and the policies of spools. No process keeps it open: a worker opens
it for a moment to store LOW, often enough while it works, and before it sleeps. It never is after LOW, and the window knows better.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.cursor import Cursor
from kvspool.engine.flushing import flush_for_all
from kvspool.engine.wakeups import BLIND_POLL, POLL, Watcher
from kvspool.errors import Closed, LeaseLost, LockTimeout, LogVanished, OutOfRange, Poisoned, ReaderBusy, Truncated
from kvspool.gap import Gap
from kvspool.kernel import tasks_py as words
from kvspool.kernel.frames import crc32c
from kvspool.kernel.frames_py import LOW as NO_BITS
from kvspool.kernel.group import FlushGroup
from kvspool.record import Record
from kvspool.system.handles import Handle
from kvspool.tasks import layout
from kvspool.tasks.task import Task

if TYPE_CHECKING:
    from kvspool.tasks.dead import DeadLetters
    from kvspool.tasks.files import TaskFile

MOST_AHEAD = 1024  # records that are read ahead
LEAST_ADMITTED = 64  # records that are admitted at once, with an order
MOST_KEPT = 8192  # records that were admitted and are kept for later, with an order
KEEP_LEAST, KEEP_MOST = 0.01, 1.0  # seconds between two stores of the durable reader's position
KEEP_SHARE = 20  # at least so many times the time that a store takes
WORKERS = "workers"  # key of the watches for other workers
PATIENCE = 1_500_000_000  # ns; a worker that watches renews its place every half second, and loses it after this time
REAP_AFTER = 0.005  # seconds between two checks whether a worker has ended, while tasks follow each other


class TaskLog(Protocol):
    """The part of a log that a task list needs; see `kvspool.Log`."""

    path: Any
    timeout: float
    durability: Any

    @property
    def log_id(self) -> bytes: ...

    def cursor(self, start: Any = ..., *, bounded: bool = ..., end: int | None = ...) -> Cursor: ...

    def end(self) -> int: ...

    def has_vanished(self) -> bool: ...

    def flush_for_commit(self, sequence: int) -> None: ...

    def open_reader(self, name: str, start: Any, *, isolation: Any = ...) -> Any: ...


class TaskSettings(Protocol):
    """The settings of a worker that concern its tasks."""

    name: str
    lease_ns: int
    max_deliveries: int | None
    dead_letters: DeadLetters


Keep = Callable[[int], bool]
"""Stores a position of the durable reader of a list, if it is later than the stored one, with the records before it on disk. Returns False
if that has to be later."""


def keep_in_reader(log: TaskLog, name: str, low: int) -> bool:
    """Store a position of the durable reader of a log; see `Keep`."""
    try:
        with log.open_reader(name, "earliest") as reader:
            if reader.sequence < low:
                reader.seek(low)
                reader.commit()
    except (ReaderBusy, LockTimeout):
        return False
    return True


class TaskSource(Handle):
    """The tasks of one log. Threads share it: only `take` and `close` need the lock of the worker."""

    def __init__(
        self,
        log: TaskLog,
        shard: Hashable,
        file: TaskFile,
        settings: TaskSettings,
        keep: Keep,
        make: Callable[..., Any] = Record,
    ) -> None:
        """Enter the list as a worker. make: creates the records."""
        self.shard: Any = shard
        self.log = log
        self.file = file
        self.window = file.window
        self.burying = threading.Lock()  # of the threads that move records to the dead letters
        self.log_id = log.log_id
        self.max_deliveries = settings.max_deliveries
        self._is_foreign = False  # in a forked child
        self._settings = settings
        self._store = keep
        self._make = make
        self._is_durable = log.durability == "disk"
        self._flushes = FlushGroup(self.window, file.memory, words.GROUP, layout.FLUSH_LOCK)
        self._flushes.lock_fd = file.fd
        self._forward: Cursor | None = None  # at the first record that was not read yet
        self._back: Cursor | None = None  # at a record that was given out before
        self._gap: Gap | None = None  # that was read ahead, and is next
        self.gaps: list[Gap] = []  # that the user was not told
        self._known = 0  # records below this sequence exist
        self._size = 1  # records to read ahead
        self._kept: dict[int, Any] = {}
        self._sequences: list[int] = []  # claimed, and not returned yet
        self._marks: list[int] = []
        self._kept_at = self.window.word(words.KEPT)
        self._keep_after = 0.0
        self._reap_after = 0.0
        self._enter()

    def _enter(self) -> None:
        with self.file.locked(layout.CHANGE_LOCK, "enters or leaves"):
            number = self.file.enter()
            self._trust()
            self.call(lambda: self.window.release(number))
            self.file.sign()
        self.reap(looks=True)

    def _trust(self) -> None:
        """After a crash of the machine, or if the log was cut: let everything that is not known to be done be given out again."""
        window = self.window
        boot = system.port.boot_id()
        halves = [int.from_bytes(boot[at : at + 8], "little") for at in (0, 8)]
        is_same = [window.word(words.BOOT + half) for half in range(2)] == halves
        after = window.word(words.NEXT)  # before the end: others append, and take new records meanwhile
        end = self.log.end()
        self._known = min(end, after)
        if is_same and end >= after:
            return
        safe = end if is_same else min(window.word(words.SAFE), end)
        self.call(lambda: window.restart(safe, end))
        if not is_same:
            window.set_word(words.SYNCED, window.word(words.CHANGES))
            window.set_word(words.ERROR, 0)
            for half in range(2):
                window.set_word(words.BOOT + half, halves[half])

    def moved_to(self, position: int) -> None:
        """Let everything below the position of the durable reader be done, as far as it is not."""
        if position > self.window.word(words.LOW):
            self.call(lambda: self.window.skip_below(position))
        self.window.set_word(words.KEPT, position)
        self._kept_at = position

    # Calls of the window.

    def call(self, method: Callable[[], int]) -> int:
        """Return the result of a method of the window, once no other process has its lock. Raises LockTimeout, Closed."""
        result = method()
        if result == words.BUSY:
            result = self._wait(method)
        if self.window.must_ring:
            self.file.ring()
        if self.window.must_call:
            self.window.call_one()
        return result

    def _wait(self, method: Callable[[], int]) -> int:
        def attempt() -> int | None:
            result = method()
            return None if result == words.BUSY else result

        def holder() -> str:
            return f"another worker changes {self.file.path}; it may be stopped"

        return locks.wait_for(attempt, self.file.timeout, holder, lambda pause: locks.rest(self.file.lock, pause))

    # Taking.

    def take(self, most: int) -> list[Task]:
        """Return up to `most` tasks; nothing if there is none now. Never waits for one. Gaps are added to `gaps`."""
        if not self._sequences:
            self._claim(most)
        found = self._returned() if self._sequences else []
        while len(found) < most and self._read_ahead(most - len(found)):
            gap, self._gap = self._gap, None
            if gap is not None:
                if not found:
                    self._pass_gap(gap)
                break
            if not self._claim(most - len(found)):
                break
            found += self._returned()
        return found

    def _claim(self, most: int) -> int:
        """Claim up to `most` tasks; return how many."""
        lease = self._settings.lease_ns
        count = self.window.take(most, self._known, lease, self._sequences, self._marks)
        if count < 0:
            count = self._wait(lambda: self.window.take(most, self._known, lease, self._sequences, self._marks))
        if self.window.must_ring:
            self.file.ring()
        return count

    def _returned(self) -> list[Task]:
        """Return the claimed tasks with their records."""
        sequences, marks = self._sequences, self._marks
        records = [self._record(sequence) for sequence in sequences]
        found = [Task(record, sequence, mark, self) for record, sequence, mark in zip(records, sequences, marks, strict=True)]
        self._sequences, self._marks = [], []
        return self._checked(found)

    def _checked(self, tasks: list[Task]) -> list[Task]:
        """Return the tasks without those whose records are lost, and those that become dead letters."""
        found = []
        most = self.max_deliveries
        for task in tasks:
            if isinstance(task.record, Gap):
                self.finish(task)
                self.gaps.append(task.record)
            elif task.mark & words.STATE == words.DYING:
                self._bury(task, "its worker ended before it had stored the reason")
            elif most is not None and task.deliveries > most:
                self.reject(task, f"its worker ended, or its lease did; it was given out {most} times")
            else:
                found.append(task)
        return found

    def _record(self, sequence: int) -> Any:
        """Return a claimed record; a Gap if it is lost."""
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            return kept
        at = sequence - self.window.ahead_first
        if 0 <= at < len(self.window.ahead):
            return self.window.ahead[at]
        return self._read_again(sequence)

    def _read_again(self, sequence: int) -> Any:
        back = self._back
        try:
            if back is None or back.sequence != sequence:
                if back is not None:
                    back.close()
                back = self._back = self.log.cursor(sequence)
            items: list[Any] = []
            gap = back.fetch(1, self._make, items)
        except (OutOfRange, Truncated):  # it was cut off after it had been given out
            return Gap(sequence, sequence, "damaged", str(self.log.path))
        if items and items[0].sequence == sequence:
            return items[0]
        reason = "damaged" if gap is None else gap.reason
        back.close()
        self._back = None
        return Gap(sequence, sequence, reason, str(self.log.path))

    def _read_ahead(self, most: int) -> bool:
        """Read records ahead, from the first one on that was not given out; or one Gap. Return whether there are any."""
        window = self.window
        after = window.word(words.NEXT)
        if self._position(after) != after:
            self._move_to(after)
        elif after < window.ahead_first + len(window.ahead):
            return self._admit(after) if window.is_ordered else True
        if after - window.word(words.LOW) >= window.window:
            return False  # it is full
        self._size = min(MOST_AHEAD, 4 * self._size) if after == window.ahead_first + len(window.ahead) else 1
        forward = self._cursor()
        found: list[Any] = []
        gap = forward.fetch(max(self._size, most, LEAST_ADMITTED if window.is_ordered else 1), self._make, found)
        self._set_ahead(found)
        if gap is not None:
            self._gap = gap
        elif found:
            self._known = max(self._known, forward.sequence)
            return self._admit(after) if window.is_ordered else True
        return gap is not None

    def _set_ahead(self, records: list[Any]) -> None:
        window = self.window
        window.ahead = records
        window.ahead_first = records[0].sequence if records else 0

    def _position(self, after: int) -> int:
        """Return `after` if that record was read ahead; otherwise the sequence of the next record that will be, -1 if it is unknown."""
        window = self.window
        if window.ahead_first <= after < window.ahead_first + len(window.ahead):
            return after
        return -1 if self._forward is None else self._forward.sequence

    def _move_to(self, sequence: int) -> None:
        """Continue to read ahead at another sequence."""
        self._set_ahead([])
        forward = self._forward
        if forward is not None and not forward.skip_to(sequence):
            self._forward = None
            forward.close()

    def _cursor(self) -> Cursor:
        """Return the forward cursor."""
        if self._forward is None:
            self._forward = self.log.cursor(self.window.word(words.NEXT))
        return self._forward

    def _admit(self, first: int) -> bool:
        """With an order: admit records read ahead, from the sequence `first` on. Return whether there is a change."""
        window = self.window
        ahead = window.ahead[first - window.ahead_first :]
        hashes = [one.sequence if one.key is None else crc32c(NO_BITS, one.key) ^ NO_BITS for one in ahead]
        count = self.call(lambda: window.admit(first, hashes))
        if count < 0:
            self._set_ahead([])
            return True
        for one in ahead[:count]:
            self._kept[one.sequence] = one
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return count > 0

    def _pass_gap(self, gap: Gap) -> None:
        """Let the window continue after a Gap that was read ahead; this worker gets the part that it passed."""
        reached = self.call(lambda: self.window.pass_over(gap.first, gap.last + 1))
        if reached > gap.first:
            self.gaps.append(Gap(gap.first, reached - 1, gap.reason, gap.path))

    # The end of a task.

    def ack(self, task: Task) -> None:
        """Acknowledge a task; see `Task.ack`."""
        if self._is_durable or not self.window.finish_task(task):
            self._ack_slowly(task)
        elif self.window.must_ring:
            self.file.ring()

    def _ack_slowly(self, task: Task) -> None:
        if task.is_over:
            return
        self._check_process([task])
        result = self.call(lambda: self.window.finish(task.sequence, task.mark))
        self._end_of(task, result)
        if self._is_durable:
            self.flush(result)

    def _check_process(self, tasks: list[Task]) -> None:
        """Raise LeaseLost in a forked child, for tasks of the parent."""
        if self._is_foreign:
            for one in tasks:
                one.is_over = True
            raise self._lost(tasks)

    def finish(self, task: Task) -> None:
        """Let a task be done whose record is lost. A lost lease doesn't matter."""
        self.call(lambda: self.window.finish(task.sequence, task.mark))
        task.is_over = True

    def ack_many(self, tasks: list[Task]) -> list[Task]:
        """Acknowledge tasks of this source; return those that were lost."""
        self._check_process(tasks)
        lost: list[Task] = []
        result = self.call(lambda: self.window.finish_all(tasks, lost))
        if self._is_durable:
            self.flush(result)
        return lost

    def retry(self, task: Task, delay: float, error: str) -> None:
        """Give a task back; see `Task.retry`."""
        if not 0 <= delay <= 1e9:
            raise ValueError(f"delay is a number of seconds up to 1e9, not {delay}")
        if task.is_over:
            return
        self._check_process([task])
        most = self.max_deliveries
        if most is not None and task.deliveries >= most:
            self.reject(task, error or f"it was given back {most} times")
            return
        due = system.port.now() + round(delay * 1e9) if delay else 0
        self._end_of(task, self.call(lambda: self.window.put_back(task.sequence, task.mark, due)))

    def reject(self, task: Task, reason: str) -> None:
        """Move the record of a task to the dead-letter log; see `Task.reject`."""
        if task.is_over:
            return
        self._check_process([task])
        mark = task.mark
        self._end_of(task, self.call(lambda: self.window.condemn(task.sequence, mark)))
        self._bury(task, reason)

    def _bury(self, task: Task, reason: str) -> None:
        self._settings.dead_letters.bury(self, task, reason)
        task.is_over = True
        if self._is_durable:
            self.flush(self.window.word(words.CHANGES))

    def extend(self, task: Task, lease: float | None) -> None:
        """Let the lease of a task begin again; see `Task.extend`."""
        ns = self._settings.lease_ns if lease is None else lease_ns(lease)
        if task.is_over or not ns:
            return
        until = int(system.port.monotonic() * 1e9) + ns
        result = self.call(lambda: self.window.prolong(task.sequence, task.mark, until))
        if result == words.LOST:
            self._end_of(task, result)

    def _end_of(self, task: Task, result: int) -> None:
        task.is_over = True
        if result == words.LOST:
            raise self._lost([task])

    def _lost(self, tasks: list[Task]) -> LeaseLost:
        return lost_error(self._settings.name, tasks)

    # The disk.

    def flush(self, change: int) -> None:
        """Return when the first `change` acknowledgements are on disk, whichever worker flushes them. Raises Poisoned, LockTimeout."""
        while self.window.word(words.SYNCED) < change:
            flush_for_all(self._flushes, change, self.file.timeout, self._flush, self.file.path, lambda: self.window.word(words.ERROR))

    def _flush(self) -> None:
        window = self.window
        changes, after = window.word(words.CHANGES), window.word(words.NEXT)
        self.log.flush_for_commit(after)  # or a crash of the machine could leave acknowledgements of records that it removes
        window.set_word(words.SAFE, max(after, window.word(words.SAFE)))
        try:
            self.file.flush()
        except OSError as error:
            window.set_word(words.ERROR, error.errno or 5)
            what = f"the flush to disk failed ({error}); stop the workers, and copy the log to a working disk"
            raise Poisoned(f"{self.file.path}: {what}") from error
        window.set_word(words.SYNCED, max(changes, window.word(words.SYNCED)))

    # Others.

    def tick(self, now: float) -> None:
        """Between two tasks: notice workers that ended, and store the durable reader's position, if that was some time ago."""
        if now >= self._reap_after:
            self._reap_after = now + REAP_AFTER
            self.reap(looks=False)
        if now >= self._keep_after:
            self.keep()
        self.window.tick_after = int(min(self._reap_after, self._keep_after) * 1e9)

    def hurry(self) -> None:
        """Let the next `tick` notice others."""
        self._reap_after = 0.0

    def reap(self, *, looks: bool) -> bool:
        """Let the tasks of workers that have ended be given to others; return whether there were any."""
        ended = self.file.ended(looks=looks)
        for number in ended:
            self.call(lambda number=number: self.window.release(number))  # type: ignore[misc]
            self.file.erase(number)
        return bool(ended)

    def keep(self) -> None:
        """Store LOW as the position of the durable reader, if no other worker does at this moment."""
        low = self.window.word(words.LOW)
        began = system.port.monotonic()
        if low != self._kept_at and low > self.window.word(words.KEPT) and self.file.try_lock(layout.KEEP_LOCK):
            try:
                if self._store(low):
                    self.window.set_word(words.SAFE, max(low, self.window.word(words.SAFE)))
                    self.window.set_word(words.KEPT, low)
                else:
                    low = self._kept_at  # later
            finally:
                self.file.unlock(layout.KEEP_LOCK)
        self._kept_at = low
        now = system.port.monotonic()
        self._keep_after = now + min(KEEP_MOST, max(KEEP_LEAST, KEEP_SHARE * (now - began)))

    # Sleeping.

    def stand_watch(self) -> int:
        """Become a worker that watches, and return WATCHES; or return the value for `rest`. Raises LockTimeout."""
        return self.call(lambda: self.window.stand_watch(PATIENCE))

    def end_watch(self) -> None:
        """Let another waiting worker watch: this one has a task, or no longer waits. If the lock is busy for long, others notice later."""
        with suppress(Closed, LockTimeout):
            self.call(lambda: self.window.end_watch(PATIENCE))

    def watch(self, watcher: Watcher) -> None:
        """Let a watcher wake when there may be a task."""
        self.file.watch(watcher, WORKERS)
        self._reading().watch(watcher, self)

    def _reading(self) -> Cursor:
        """Return the forward cursor, where the next record is expected."""
        after = self.window.word(words.NEXT)
        if self._position(after) != after:
            self._move_to(after)
        return self._cursor()

    @property
    def watched(self) -> object:
        """Return the log's files that `watch` watches; they may change."""
        return self._reading().files

    def ask(self) -> None:
        """Ask to be woken. Try to take a task once more after this and before sleeping."""
        self.window.ask()
        self._reading().ask()

    @property
    def longest_sleep(self) -> float:
        """Return the longest time, in seconds, until there may be a task without an event."""
        longest = POLL if self._reading().is_rung else BLIND_POLL
        due, leases = self.window.word(words.DUE), self.window.word(words.LEASES)
        if due != words.NONE:
            longest = min(longest, (due - system.port.now()) / 1e9)
        if leases != words.NONE:
            longest = min(longest, leases / 1e9 - system.port.monotonic())
        return max(0.0, longest)

    def refuse_vanished(self) -> None:
        """Raise LogVanished if the log was deleted."""
        self._reading().refuse_vanished()

    # The end.

    def leave(self) -> None:
        """Give all tasks back, and leave the list. In a forked child only close the files."""
        file = self.file
        try:
            if file.is_ours and self.window.is_open:
                with file.locked(layout.CHANGE_LOCK, "enters or leaves"):
                    self.call(lambda: self.window.release(file.number))
                    file.erase(file.number)
                if not file.window.word(words.ERROR) and self.log.durability != "memory":
                    self._flush()
                with suppress(Closed, LogVanished):  # the log: then the position stays as it was stored last
                    self.keep()
        finally:
            self.close()

    def forked(self) -> None:
        """In a forked child: all tasks are the parent's."""
        self._is_foreign = True
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._flushes.close()
        self.file.close()
        for cursor in (self._forward, self._back):
            if cursor is not None:
                cursor.close()
        self._forward = self._back = None


def lease_ns(lease: float | None) -> int:
    """Return a lease in ns; 0 for none. Raises ValueError."""
    if lease is None:
        return 0
    if not 1e-3 <= lease <= 1e9:
        raise ValueError(f"lease is 0.001 to 1e9 seconds, or None, not {lease}")
    return round(lease * 1e9)


def lost_error(name: str, tasks: list[Task]) -> LeaseLost:
    """Return the error for tasks that are no longer this worker's."""
    first = tasks[0].sequence
    others = f" and {len(tasks) - 1} others" if len(tasks) > 1 else ""
    return LeaseLost(
        f"the task {first}{others} of {name!r} is no longer this worker's: its lease ended, or it was taken before a fork; "
        "another worker has it, or had it",
        tuple(one.sequence for one in tasks),
    )
