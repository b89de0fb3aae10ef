"""The log that messages of a program are appended to, opened when the first one arrives."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import kvspool
from kvspool.errors import Reentered
from kvspool.system import forks
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.log import Log

MOST_LATE = 1000  # messages of signal handlers that wait for the next append
Message = tuple[dict[str, Any] | bytes, bytes, int, int | None, bool]  # data, key, type, timestamp, durable


class MessageLog(Handle):
    """Appends messages to the log at a path, which is created if it doesn't exist."""

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        """options: those of `kvspool.create`."""
        self.path = os.path.abspath(path)  # a daemon changes its directory
        self._options = options
        self._log: Log | None = None
        self._opening = threading.RLock()
        self._late: deque[Message] = deque(maxlen=MOST_LATE)
        forks.register(self)

    def append(self, *message: Any) -> None:
        """Append a message. Raises the errors of `kvspool.create` and `Log.append`.

        One that a signal handler logs while the same thread appends is appended with the next one.
        """
        log = self._log or self.opened()
        try:
            self._append(log, *message)
        except Reentered:
            self._late.append(message)
            return
        while self._late:
            self._append(log, *self._late.popleft())

    def _append(self, log: Log, data: dict[str, Any] | bytes, key: bytes, type: int, timestamp: int | None, durable: bool) -> None:
        log.append(data, key=key, type=type, timestamp=timestamp, durable=durable)

    def opened(self) -> Log:
        """Return the log, opened or created. Raises the errors of `kvspool.create`."""
        with self._opening:
            if self._log is None:
                os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
                self._log = kvspool.create(self.path, exist_ok=True, **self._options)
            return self._log

    def forked(self) -> None:
        """Forget a lock that another thread of the parent may have held."""
        self._opening = threading.RLock()

    def sync(self) -> None:
        """Flush all messages to disk."""
        if self._log is not None:
            self._log.sync()

    def close(self) -> None:
        """Close the log. The next message opens it again."""
        with self._opening:
            log, self._log = self._log, None
            if log is not None:
                log.close()
