"""The thread that puts on disk what the handles of the level "os" have appended."""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import suppress
from typing import Any, Protocol

from kvspool import system
from kvspool.errors import KvspoolError, LockTimeout
from kvspool.system.handles import Handle

SYNC_INTERVAL = 1.0  # seconds between two flushes at the level "os"


class Flushes(Protocol):
    """The interface of a log for a background thread: `flush` for the records, `sync` for all."""

    def flush(self, timeout: float) -> Any: ...

    def sync(self, timeout: float) -> Any: ...


class Background(Handle):
    """The thread that flushes for a handle of the level "os". It ends when the handle is freed, or the log poisoned."""

    def __init__(self, flusher: Flushes, interval: float, timeout: float) -> None:
        self._flusher = flusher
        self._timeout = timeout
        self._is_over = threading.Event()
        # It must not keep an unused handle alive.
        self._thread = threading.Thread(
            target=_flush_at_intervals, args=(weakref.ref(flusher), self._is_over, interval, timeout), name="kvspool sync", daemon=True
        )
        self._process = system.port.process_id()
        self._thread.start()
        _backgrounds.add(self)

    @property
    def is_ours(self) -> bool:
        """Return whether the thread belongs to this process: a forked child has none."""
        return self._process == system.port.process_id()

    def end(self) -> None:
        """End the thread, and flush the remaining records."""
        _backgrounds.discard(self)
        self._is_over.set()
        self._thread.join(self._timeout)
        self._flusher.sync(self._timeout)


_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()


def _flush_at_intervals(flusher: weakref.ref[Flushes], is_over: threading.Event, interval: float, timeout: float) -> None:
    while not is_over.wait(interval):
        found = flusher()
        try:
            if found is None:
                return
            found.flush(timeout)
        except LockTimeout:
            pass  # another thread flushes, for us too
        except KvspoolError:
            return  # poisoned or closed: the next append reports it
        except OSError:
            pass  # for example no free descriptor: retry at the next interval
        found = None


@atexit.register
def _at_exit() -> None:
    """Close the handles that are still open, as `close` does."""
    for background in list(_backgrounds):
        if background.is_ours:
            with suppress(KvspoolError, OSError):
                background.end()
