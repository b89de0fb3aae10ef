"""The threads on which the calls of a listener block: one of them works at a time, while no work takes long.

Most work is short: a small batch is stored in a fifth of a millisecond, with a dozen system calls. At each of them a thread of Python
passes the interpreter to another one that waits for it, and waits itself to get it back. With several threads, a hub with a crowd of
clients spent as much time on these switches as on its work. So the next work begins when the present one has ended, or has taken longer
than `QUICK`. Then it probably waits for a disk or a lock, or moves much memory, and needs no interpreter for that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

from kvspool import system
from kvspool.system.handles import Handle

QUICK = 0.005  # seconds after which the next work begins on another thread: Python's own interval between two switches


class _Work:
    """A function that waits for a thread, and the future of its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:  # of the work, for its caller
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class WorkerPool(Executor, Handle):
    """Up to `most` threads, which are started when they are needed. Work begins in the order in which it came."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[_Work] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads
        self._began: dict[threading.Thread, float] = {}  # when the present work of each thread began
        self._is_called = False  # a thread was woken or started, and is on its way
        self._is_watched = False  # an idle thread waits for the time at which work has taken long
        self._is_closed = False

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Call a function on a thread, and return the future of its result.

        Raises RuntimeError after `shutdown`, and if the system permits no thread at all.
        """
        work = _Work(lambda: call(*arguments, **named))
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the pool was shut down")
            self._waiting.append(work)
            self._call_thread()
            if not self._threads:
                self._waiting.remove(work)
                raise RuntimeError("the system permits no thread for this work; increase its limit, such as TasksMax of systemd")
        return work.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work, and end the threads once all is done. wait: for that; cancel_futures: drop work that has not begun."""
        with self._changed:
            self._is_closed = True
            while cancel_futures and self._waiting:
                self._waiting.popleft().future.cancel()
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()

    def _call_thread(self) -> None:
        """With the lock: let a thread take the next work, or watch the present one, unless another thread does that."""
        if self._is_called or (self._began and self._is_watched):
            return
        if self._idle:
            self._is_called = True
            self._changed.notify()
        elif len(self._threads) < self._most:
            thread = threading.Thread(target=self._run, name=f"{self._name} {len(self._threads)}", daemon=True)
            with suppress(RuntimeError):  # the system permits no more threads: present ones do the work, but later
                thread.start()
                self._threads.append(thread)
                self._is_called = True

    def _run(self) -> None:
        own = threading.current_thread()
        with self._changed:
            self._is_called = False
        while (work := self._next(own)) is not None:
            work.run()
            del work  # an idle thread would keep the result
            with self._changed:
                del self._began[own]

    def _next(self, own: threading.Thread) -> _Work | None:
        """Wait for work that may begin, and return it; None: there will be no more."""
        with self._changed:
            while True:
                patience = self._patience()
                if self._waiting and patience <= 0:
                    self._began[own] = system.port.monotonic()
                    work = self._waiting.popleft()
                    if self._waiting:
                        self._call_thread()
                    return work
                if not self._waiting and self._is_closed:
                    self._changed.notify_all()  # another thread may wait for the end of work that was the last
                    return None
                self._wait(patience)

    def _patience(self) -> float:
        """Return the seconds until the next work may begin: until the present one has taken long."""
        return max(self._began.values()) + QUICK - system.port.monotonic() if self._began else 0.0

    def _wait(self, patience: float) -> None:
        """Wait for a change; while work waits, one thread waits only for `patience` seconds."""
        is_watching = bool(self._waiting) and not self._is_watched
        self._is_watched = self._is_watched or is_watching
        self._idle += 1
        self._changed.wait(patience if is_watching else None)
        self._idle -= 1
        self._is_called = False
        if is_watching:
            self._is_watched = False
