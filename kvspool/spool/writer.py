"""Bursts: a writer that keeps the append lock between its appends.

**Durability.** As without it: each record is published by itself, and survives the death of any process, when its append returns. A writer
that dies leaves a lock that the kernel frees, and a log that the next one continues.

**Others get their turn.** Who waits for the lock sets a word in the control block; the holder looks at it after each append and gives the
lock up, as soon as it has had it for a quantum (a millisecond). A holder that appends nothing for some milliseconds loses it to a thread of
this module. Then the next append takes the lock again.

The thread needs the interpreter's lock for that: one that code outside Python holds for a second holds the append lock for a second too. A
process that is stopped keeps it until it goes on; those who wait are told who it is.
"""

from __future__ import annotations

import _thread
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvspool import system
from kvspool._frames import Burst, FrameWriter
from kvspool.errors import Closed
from kvspool.handles import Handle

if TYPE_CHECKING:
    from kvspool.spool.appending import Prepared
    from kvspool.spool.spool import Spool

TICK = 2e-3  # seconds; who appends nothing for so long, and at most for twice that, gives the lock up


class Writer(Burst, Handle):
    """Appends to a log in bursts; get it from `Spool.writer`, and close it, best with `with`.

    It may be used by several threads at once, and beside other appends of the same handle, which then use its lock. In a forked child it
    takes a lock of its own.
    """

    _log: Spool | None = None
    _relief: Relief | None = None

    def __init__(self, log: Spool, timeout: float) -> None:
        self._log = log
        self._timeout = timeout
        Burst.__init__(self)
        log.frame_writer()  # or the error that appending would raise

    def append_slowly(self, value: Any, key: bytes | None, type: int, timestamp: int | None) -> int:
        """Append what needs more than one step: to encode the value, to take the lock; see `append`."""
        batch = self._live().prepare([value], [key], type, timestamp)
        frames = self.frames
        if frames is not None:
            era = -1 if batch.packed is None else batch.packed.era
            sequence = frames.append_kept(key, batch.values[0], type, batch.codecs[0], batch.timestamp, era)
            if sequence >= 0:
                if frames.bell:
                    self.ring()
                return sequence
        return self._append(batch)[0]

    def append_many(
        self, values: Iterable[Any], *, keys: Iterable[bytes | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> range:
        """Append a record for each value in one publication, and return their sequences; see `Spool.append_many`."""
        return self._append(self._live().prepare(values, keys, type, timestamp))

    def sync(self, timeout: float | None = None) -> int:
        """Put everything that was appended so far on disk; see `Spool.sync`. The append lock is given up before."""
        return self._live().sync(timeout)

    def ring(self) -> None:
        """Wake the readers that asked for it."""
        if self._log is not None and self.frames is not None:
            self._log.ring(self.frames)

    @property
    def closed(self) -> bool:
        """Return whether the writer was closed."""
        return self._log is None

    def close(self) -> None:
        """Give the lock up. Nothing that was appended needs it. Every later append raises Closed; the log stays open."""
        self._leave()
        if self._relief is not None:
            self._relief.join()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._leave()

    def __repr__(self) -> str:
        return f"<Writer of {'nothing: closed' if self._log is None else self._log.path}>"

    def _live(self) -> Spool:
        if self._log is None:
            raise Closed("the writer was closed; `writer()` of the log returns another one")
        return self._log

    def _leave(self) -> None:
        # Again, if it is interrupted: so it forgets nothing before it is done with it.
        self.frames = None
        if self._relief is not None:
            self._relief.end()
        if self._log is not None:
            self._log.give_up()
            self._log = None

    def _append(self, batch: Prepared) -> range:
        log = self._live()
        # Where each append waits for the disk, the lock is not kept meanwhile.
        return log.append_prepared(batch, self._timeout, keep=None if log.is_durable else self._keep)

    def _keep(self, frames: FrameWriter) -> None:
        """See to it that somebody gives the lock up when nobody appends; where no thread can be had, give it up at once."""
        log = self._log
        if log is not None and (self._relief is None or self._relief.frames is not frames):
            if self._relief is not None:
                self._relief.end()  # the log was resized, or this is a forked child
            self._relief = Relief(frames, log)
        relief = self._relief
        if relief is None or relief.is_over:  # closed by another thread meanwhile
            frames.give_up()
            return
        try:
            relief.watch()
        except RuntimeError:  # no more threads, or the interpreter ends
            frames.give_up()
            return
        self.frames = frames if frames.is_one_step else None


class Relief:
    """A thread that gives the append lock up when its holder is idle. It sleeps while the lock isn't kept, and ends with its writer.

    Whatever an exception out of a signal handler interrupts here, the thread is told in the end: so it is started by one call, and woken
    by a bare lock. A second one, if it ever comes to that, does no harm.
    """

    def __init__(self, frames: FrameWriter, log: Spool) -> None:
        self.frames = frames
        self.is_over = False
        self._give_up = weakref.WeakMethod(log.give_up)  # a log that is dropped without being closed goes all the same
        self._process = system.port.process_id()
        self._has_begun = False
        self._bell = _thread.allocate_lock()
        self._bell.acquire()
        self._end = _thread.allocate_lock()
        self._end.acquire()

    def watch(self) -> None:
        """Look after a lock that is kept from now on. Raises RuntimeError if there can be no thread."""
        if not self._has_begun:
            _thread.start_new_thread(self._run, ())
            self._has_begun = True
        _open(self._bell)

    def end(self) -> None:
        """Let the thread end, which it does soon."""
        self.is_over = True
        _open(self._bell)

    def join(self) -> None:
        """Wait until the thread has ended, a second at most. In a forked child there is none; none goes on while the interpreter ends."""
        if self._has_begun and self._process == system.port.process_id() and not sys.is_finalizing():
            self._end.acquire(timeout=1)
            _open(self._end)

    def _run(self) -> None:
        while not self.is_over:
            self._bell.acquire()
            self._relieve()
        _open(self._end)

    def _relieve(self) -> None:
        """Wait until the lock isn't kept, and give it up if nothing was appended in a tick."""
        seen = -1
        while self.frames.is_kept and not self.is_over:
            give_up = self._give_up() if self.frames.next_sequence == seen else None
            if give_up is not None:
                give_up()
                del give_up
            seen = self.frames.next_sequence
            system.port.sleep(TICK)


def _open(lock: _thread.LockType) -> None:
    with suppress(RuntimeError):  # it is open already
        lock.release()
