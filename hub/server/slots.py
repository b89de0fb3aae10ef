"""The calls of a listener: how many are served at once, which wait for that, and how each of them ends."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from hub.server.call import Call, Code, Service, Status
from hub.server.limits import Limits
from kvspool import system
from kvspool.system.handles import Handle

LATER = 2  # seconds after which a refused call may be repeated
logger = logging.getLogger("kvspool.hub")


class _Job:
    """A call and its handler. done: called with the status of its end, once."""

    def __init__(self, call: Call, done: Callable[[Status], None]) -> None:
        self.call = call
        self.done = done
        self.since = system.port.monotonic()
        self.task: asyncio.Task[Status] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False
        self.status = Status(Code.CANCELLED, "the call was cancelled")  # if it is cancelled


class CallSlots(Handle):
    """Serves calls: `calls` at once, while up to `queued_calls` wait. Used on the event loop."""

    def __init__(self, service: Service, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.taken = 0
        self.refused = 0
        self._service = service
        self._limits = limits
        self._loop = loop
        self._jobs: set[_Job] = set()
        self._queue: deque[_Job] = deque()

    @property
    def waiting(self) -> int:
        """Return how many calls wait."""
        return len(self._queue)

    def has_room(self, calls: int) -> bool:
        """Return whether so many calls more may be served at once."""
        return self.taken + calls <= self._limits.calls

    def begin(self, call: Call, done: Callable[[Status], None]) -> Callable[[], None]:
        """Admit a call, and serve it now or when others have ended; then call `done`. Return how to cancel it.

        Raises Status if it is not admitted, or too many wait.
        """
        try:
            self._service.admit(call)
            if not self.has_room(1) and len(self._queue) >= self._limits.queued_calls:
                raise self._full()
        except BaseException:
            call.end()
            raise
        job = _Job(call, done)
        self._jobs.add(job)
        if call.time_left is not None:
            job.timer = self._loop.call_later(max(0.0, call.time_left), self._expire, job)
        self._queue.append(job)
        self._begin_next()
        return lambda: self._cancel(job)

    def refuse_late(self, now: float) -> None:
        """Refuse calls that have waited too long."""
        while self._queue and now - self._queue[0].since > self._limits.queued_seconds:
            job = self._queue.popleft()
            if not job.is_over:
                self._end(job, self._full())

    async def idle(self) -> None:
        """Wait for the end of all handlers."""
        while tasks := [job.task for job in self._jobs if job.task is not None]:
            await asyncio.wait(tasks)

    def _full(self) -> Status:
        self.refused += 1
        return Status(Code.RESOURCE_EXHAUSTED, f"the hub has {self._limits.calls} concurrent calls, which is the limit; retry in {LATER} s")

    def _begin_next(self) -> None:
        while self._queue and self.has_room(1):
            job = self._queue.popleft()
            if not job.is_over:
                self.taken += 1
                job.task = self._loop.create_task(self._handle(job.call))
                job.task.add_done_callback(partial(self._handled, job))

    def _handled(self, job: _Job, task: asyncio.Task[Status]) -> None:
        self._end(job, job.status if task.cancelled() else task.result())

    async def _handle(self, call: Call) -> Status:
        try:
            await self._service.serve(call)
        except Status as error:
            return error
        except Exception:
            logger.exception("a handler of %s failed", call.method)
            return Status(Code.INTERNAL, "the hub has failed; its log has the reason")
        return Status(Code.OK, "", call.trailers)

    def _expire(self, job: _Job) -> None:
        if not job.call.cancelled.is_set():
            job.status = Status(Code.DEADLINE_EXCEEDED, "the deadline of the call has passed")
        self._cancel(job)

    def _cancel(self, job: _Job) -> None:
        if job.call.cancelled.is_set():
            return  # a second cancellation would interrupt what the handler releases after the first one
        job.call.cancelled.set()
        if job.task is None:
            self._end(job, job.status)
        elif not job.is_over:
            job.task.cancel()

    def _end(self, job: _Job, status: Status) -> None:
        if job.is_over:
            return
        job.is_over = True
        if job.timer is not None:
            job.timer.cancel()
        self._jobs.discard(job)
        try:
            job.call.end()
        except Exception:
            logger.exception("the end of a call of %s failed", job.call.method)
        job.done(status)
        if job.task is not None:
            self.taken -= 1
            self._begin_next()
