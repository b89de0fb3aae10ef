"""A worker of a task list: it gets tasks of a log, or of all shards of a shard set or a hub root, and acknowledges them.

A worker notices others in its own calls: while it waits, and at least every 5 ms between two tasks. It starts no thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from kvspool import system
from kvspool.engine.iteration import AsyncReading, Iterations, TurnReading
from kvspool.engine.wakeups import BLIND_POLL, POLL, Watcher
from kvspool.errors import Closed, GapError, Reentered
from kvspool.gap import Gap
from kvspool.kernel.tasks_py import WATCHES
from kvspool.kernel.wakeups_py import OVERFLOW
from kvspool.options import OnGap
from kvspool.system import forks
from kvspool.system.handles import ClosingHandle, Handle
from kvspool.tasks.dead import DeadLetters
from kvspool.tasks.files import CLOSED
from kvspool.tasks.source import WORKERS, TaskSource, lost_error
from kvspool.tasks.task import Task

R = TypeVar("R")
SOON, SOON_TIMES = 0.002, 10  # seconds, and number, of the sleeps after an event: a process that ends frees its byte a moment later


class Sources(ABC, Handle):
    """Opens the sources of a worker: one for a log, one for each shard of a shard set or a hub root."""

    @abstractmethod
    def open(self, worker: TaskWorker) -> list[TaskSource]:
        """Return the sources that exist, opened in this process."""

    def renewed(self, worker: TaskWorker, sources: list[TaskSource]) -> list[TaskSource]:
        """Return the sources with those of new shards, and without those of removed ones, which are closed."""
        return sources

    def watch(self, watcher: Watcher) -> None:
        """Let a watcher wake when there may be new shards."""
        return None

    def close(self) -> None:
        """Release what belongs to no source."""
        return None


class TaskWorker(ClosingHandle):
    """An open worker. Get it from `tasks`; threads may share it. `with` closes it, and gives tasks that are not over back.

    It survives a fork: the child is another worker. Tasks from before the fork are the parent's; in the child their calls raise LeaseLost.
    """

    HELPERS = frozenset(
        "arm end end_watch forked hurry lease_ns longest_sleep poll quick refuse_closed rest rouse stand_watch watched".split()
    )

    def __init__(self, name: str, sources: Sources, lease_ns: int, max_deliveries: int | None, dead_letters: DeadLetters) -> None:
        self.name = name
        self.lease_ns = lease_ns
        self.max_deliveries = max_deliveries
        self.dead_letters = dead_letters
        self._opening = sources
        self._guard = threading.RLock()
        self._is_inside = False
        self._is_closed = False
        self._iterations = Iterations()
        self._turn = 0  # of the source that is asked first
        self._look_after = 0.0
        self._sources: list[TaskSource] | None = None
        self._only: TaskSource | None = None  # the source, if there is only one
        self._home: TaskSource | None = None  # with the places of workers that watch: the same one for all that know the same shards
        self._use(sources.open(self))
        forks.register(self)

    # Tasks.

    def follow(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> TaskReading:
        """Iterate over tasks, one at a time, and wait for more.

        Ends after `timeout` seconds without a task; None: never. limit: maximum number of tasks. on_gap: for records that were lost before
        a worker got them; see `kvspool.Log.read`. Of all workers, one gets the Gap. Raises Closed as soon as any thread closes the worker;
        LogVanished, LockTimeout, and the errors of reading the log.
        """
        self.refuse_closed()
        return self._iterations.add(TaskReading(self, limit, on_gap, timeout))

    def follow_async(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> AsyncReading[Any]:
        """Iterate with `async for` over tasks, and wait in the event loop; see `follow`. Other calls may block for a short time."""
        self.refuse_closed()
        reading = self._iterations.add(TaskReading(self, None, on_gap, 0.0))
        return AsyncReading(reading, reading.sleep, limit, timeout)

    def take(self, most: int = 1, *, wait: float | None = 0.0, on_gap: OnGap = "raise") -> list[Task]:
        """Return up to `most` tasks; as soon as there is one, all that are there now. wait: seconds to wait for one; None: no limit.

        Raises the errors of `follow`.
        """
        if most < 1:
            raise ValueError(f"take returns at least 1 task, not {most}")
        self.refuse_closed()
        found = self._present(most, on_gap)
        if found or wait == 0.0:
            return found
        with self._iterations.add(TaskReading(self, 1, on_gap, wait)) as reading:
            found = list(reading)
        return found + (self._present(most - 1, on_gap) if found and most > 1 else [])

    def _present(self, most: int, on_gap: OnGap) -> list[Any]:
        """Return the tasks that are there now; with "yield" perhaps one Gap."""
        while (items := self.poll(most)) and items[0].__class__ is Gap:
            if on_gap == "raise":
                raise GapError(items[0])
            if on_gap == "yield":
                break
        return items

    def ack(self, task: Task) -> None:
        """Acknowledge a task; see `Task.ack`."""
        task.source.ack(task)

    def ack_many(self, tasks: Iterable[Task]) -> None:
        """Acknowledge many tasks at once; those that are over don't count. Raises LeaseLost after all others were acknowledged, and the
        errors of `Task.ack`.
        """
        listed = tasks if isinstance(tasks, list) else list(tasks)
        if not listed:
            return
        source = listed[0].source
        if self._sources is not None and len(self._sources) == 1:
            lost = source.ack_many(listed)
        else:
            lost = []
            by_source: dict[int, list[Task]] = {}
            for one in listed:
                by_source.setdefault(id(one.source), []).append(one)
            for some in by_source.values():
                lost += some[0].source.ack_many(some)
        if lost:
            raise lost_error(self.name, lost)

    def retry(self, task: Task, delay: float = 0.0, error: str = "") -> None:
        """Give a task back; see `Task.retry`."""
        task.source.retry(task, delay, error)

    def reject(self, task: Task, reason: str) -> None:
        """Move the record of a task to the dead-letter log; see `Task.reject`."""
        task.source.reject(task, reason)

    def extend(self, task: Task, lease: float | None = None) -> None:
        """Let the lease of a task begin again; see `Task.extend`."""
        task.source.extend(task, lease)

    # For the iterations.

    def quick(self) -> Any:
        """Return the next task if it takes no other work; otherwise None."""
        source = self._only
        return None if source is None else source.window.next_ahead(self.lease_ns, Task, source)

    def poll(self, most: int) -> list[Any]:
        """Return up to `most` tasks that are there now, or one Gap."""
        source, quick = self._only, None
        if source is not None:
            quick = source.window.take_ahead(most, self.lease_ns, Task, source)
            if quick is not None and len(quick) == most:
                return quick
        with self._guard:
            if self._is_inside:
                raise Reentered("a signal handler may not take tasks from a worker that takes some; let it use its own worker")
            self._is_inside = True
            try:
                return self._poll(most) if quick is None else quick + self._poll(most - len(quick))
            finally:
                self._is_inside = False

    def _poll(self, most: int) -> list[Any]:
        """Return up to `most` tasks of one source, or one Gap."""
        sources = self._sources
        if sources is None:
            sources = self._reopened()
        now = system.port.monotonic()
        count = len(sources)
        for at in range(count):
            source = sources[(self._turn + at) % count]
            source.tick(now)
            found = source.take(most)
            if found:
                self._turn = (self._turn + at + 1) % count
                return found
            if source.gaps:
                return [source.gaps.pop(0)]
        if now >= self._look_after:
            self._look_after = now + POLL
            self._look()
        return []

    def _look(self) -> None:
        """Look for new shards, and for workers that ended unnoticed."""
        assert self._sources is not None
        self._use(self._opening.renewed(self, self._sources))
        for source in self._sources:
            source.reap(looks=True)

    def hurry(self) -> None:
        """Let the next `poll` notice workers that ended."""
        for source in self._sources or ():
            source.hurry()

    # Sleeping. Two of a list's waiting workers watch its files; see `kernel.waiting_py`. The places are those of one source's window.

    def stand_watch(self) -> int:
        """Become a worker that watches, and return WATCHES; or return the value for `rest`: two others watch."""
        with self._guard:
            if self._sources is None:
                self._reopened()
            return WATCHES if self._home is None else self._home.stand_watch()

    def end_watch(self) -> None:
        """Let another waiting worker watch."""
        with self._guard:
            if self._home is not None:
                self._home.end_watch()

    def rest(self, calls: int, seconds: float) -> None:
        """Sleep until another worker stops watching, up to `seconds`; before that, store positions."""
        with self._guard:
            home = self._home
            for source in self._sources or ():
                source.keep()
                source.refuse_vanished()
        if home is not None:
            home.window.rest(calls, round(seconds * 1e9))

    def rouse(self) -> None:
        """Wake the threads that rest here: an iteration was closed."""
        home = self._home
        if home is not None:
            home.window.call_all()

    def watched(self) -> tuple[Any, ...]:
        """Return what a watcher has to watch: the sources, and the files of their logs. They may change."""
        with self._guard:
            sources = self._reopened() if self._sources is None else self._sources
            return tuple((id(source), id(source.watched)) for source in sources)

    def arm(self, watcher: Watcher | None) -> Watcher:
        """Before a sleep: store positions, and ask to be woken. Return the watcher; a new one for None. Check for tasks after this."""
        with self._guard:
            sources = self._reopened() if self._sources is None else self._sources
            if watcher is None:
                watcher = Watcher()
                self._opening.watch(watcher)
                for source in sources:
                    source.watch(watcher)
                self.hurry()  # a worker may have ended before the watch
            for source in sources:
                source.keep()
                source.refuse_vanished()
                source.ask()
            return watcher

    def longest_sleep(self, watcher: Watcher) -> float:
        """Return the longest time, in seconds, until there may be a task without an event."""
        longest = min((source.longest_sleep for source in self._sources or ()), default=POLL)
        return min(longest, BLIND_POLL) if watcher.is_blind else longest

    # Open and closed.

    @property
    def closed(self) -> bool:
        """Return whether the worker was closed."""
        return self._is_closed

    def refuse_closed(self) -> None:
        """Raise Closed if the worker was closed."""
        if self._is_closed:
            raise Closed(self._closed_words())

    def _reopened(self) -> list[TaskSource]:
        """In a forked child: enter as another worker."""
        self.refuse_closed()
        return self._use(self._opening.open(self))

    def _use(self, sources: list[TaskSource]) -> list[TaskSource]:
        before, self._home = self._home, min(sources, key=lambda one: one.file.path, default=None)
        if before is not None and before is not self._home:
            before.end_watch()
        self._sources = sources
        self._only = sources[0] if len(sources) == 1 else None
        return sources

    def forked(self) -> None:
        """In a forked child: the sources are the parent's."""
        self._guard = threading.RLock()
        self._is_inside = False
        sources, self._sources, self._only, self._home = self._sources, None, None, None
        for source in sources or ():
            source.forked()
        self._iterations.end("this iteration belongs to the parent process; follow the worker again in this one")
        self._iterations = Iterations()

    def close(self) -> None:
        """Give tasks that are not over back, and leave the list. Iterations raise Closed, waiting ones at once."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.end(self._closed_words())
        finally:
            with self._guard:
                sources, self._sources, self._only, self._home = self._sources, [], None, None
                try:
                    for source in sources or ():
                        source.leave()
                finally:
                    for source in sources or ():
                        source.close()
                    self._opening.close()
                    self.dead_letters.close()

    def end(self, why: str) -> None:
        """End all iterations: the worker, or its log, was closed."""
        self._iterations.end(why)

    def _closed_words(self) -> str:
        return f"the worker of the tasks {self.name!r} was closed; open another one"

    def __repr__(self) -> str:
        return f"<TaskWorker of {self.name!r}{' closed' if self.closed else ''}>"


class TaskReading(TurnReading, Iterator[Any]):
    """Iterates over tasks, and waits for more. `missed` counts sequences in Gaps."""

    def __init__(self, worker: TaskWorker, limit: int | None, on_gap: OnGap, timeout: float | None) -> None:
        super().__init__(limit, on_gap, timeout)
        self._worker = worker
        self._watcher: Watcher | None = None
        self._watched: object = None  # by the watcher
        self._has_waited = False  # since the last item: it may have a place of the workers that watch, or have been called to take one
        self._is_armed = False  # it has asked to be woken, and no check for a task has found one since
        self._rests = False
        self._soon = 0  # short sleeps that are left

    def __next__(self) -> Any:
        worker = self._worker
        deadline = None
        try:
            while self._left != 0:
                try:
                    item = worker.quick()
                    if item is not None:
                        if self._left > 0:
                            self._left -= 1
                        return item
                    items = worker.poll(1)
                except Exception:
                    if self._why:  # another thread has closed the worker meanwhile
                        raise Closed(self._why) from None
                    raise
                if not items:
                    deadline, left = self._wait_until(deadline)
                    if left <= 0:
                        break
                    self._sleep(left)
                    continue
                item = items[0]
                if item.__class__ is not Gap:
                    if self._left > 0:
                        self._left -= 1
                    return item
                if self._shows(item):
                    return item
        finally:
            if self._has_waited:
                self._has_waited = self._is_armed = False
                worker.end_watch()
        if self._why:
            raise Closed(self._why)
        raise StopIteration

    def _sleep(self, left: float) -> None:
        self._has_waited = True
        calls = WATCHES if self._is_armed else self._ready(self._worker.stand_watch, WATCHES)
        if calls != WATCHES:
            self._rest(calls, left)
            return
        longest = self._ready(self._prepared, 0.0)
        watcher = self._watcher
        if longest > 0 and watcher is not None and not self._is_closed:
            self._note(watcher, watcher.wait(min(left, longest)))

    def _rest(self, calls: int, left: float) -> None:
        self._rests = True
        try:
            if not self._is_closed:
                self._ready(lambda: self._worker.rest(calls, left), None)
        finally:
            self._rests = False

    async def sleep(self, left: float) -> None:
        """Sleep in a task of the event loop until there may be a task of the list. It watches without a place."""
        longest = self._prepared()
        watcher = self._watcher
        if longest > 0 and watcher is not None and not self._is_closed:
            await watcher.sleep(min(left, longest))
            self._note(watcher, watcher.wait(0.0))

    def _ready(self, method: Callable[[], R], closed: R) -> R:
        """Return the result of a method of the worker; `closed` if another thread closes the worker meanwhile."""
        try:
            return method()
        except Exception:
            if self._why:
                return closed
            raise

    def _prepared(self) -> float:
        """Return the longest time to sleep, in seconds; 0: check for a task first, since there may have been one before we asked."""
        worker = self._worker
        was_armed, self._is_armed = self._is_armed, False
        watched = worker.watched()
        if not was_armed or self._watched != watched:
            if self._watched != watched:
                self.release()
            self._watcher, self._watched = worker.arm(self._watcher), watched
            self._is_armed = True
            if self._is_closed:
                self.release()
            return 0.0
        watcher = self._watcher
        longest = 0.0 if watcher is None else worker.longest_sleep(watcher)
        if self._soon > 0:
            self._soon -= 1
            return min(longest, SOON)
        return longest

    def _note(self, watcher: Watcher, keys: set[Any] | None) -> None:
        if keys is None or WORKERS in keys:
            self._worker.hurry()
        if watcher.changes & (CLOSED | OVERFLOW):
            self._soon = SOON_TIMES

    def release(self) -> None:
        """Close the watcher, and wake a thread that sleeps."""
        watcher, self._watcher, self._watched = self._watcher, None, None
        if watcher is not None:
            watcher.close()
        if self._rests:
            self._worker.rouse()
