"""A handler of the module logging."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from kvspool.logging import message
from kvspool.logging.messages import MessageLog
from kvspool.system import handles

NEVER = 1 << 30  # a level that no message has


class Handler(handles.Handle, logging.Handler):
    """Appends each message to a log as structured data; any number of processes may use the same log.

    A record has the message's time, the logger's name as its key, the number of the level (at most 255) as its type, and the data of
    `kvspool.logging.message`. The handler may be used in a forked child, and is safe for threads and signal handlers.
    """

    def __init__(
        self, path: str | os.PathLike[str], level: int | str = logging.NOTSET, *, durable: int | str | None = None, **options: Any
    ) -> None:
        """path: of the log, which is created by the first message if it doesn't exist, as its directory is.

        durable: messages of this level and above are on disk when the logger returns; None: none of them. options: those of
        `kvspool.create`, such as `capacity` or `format`. Errors, of the first message also those of `kvspool.create`, are handled as by all
        handlers: printed while `logging.raiseExceptions` is true, and never raised.
        """
        super().__init__(level)
        self.durable = NEVER if durable is None else logging.getLevelNamesMapping()[durable] if isinstance(durable, str) else durable
        self._target = MessageLog(path, {"timeout": 5.0, **options})
        self._in_thread = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record; it survives a crash of the process when this returns."""
        if getattr(self._in_thread, "emits", False) and record.name.startswith("kvspool"):
            return  # a message of kvspool about this append
        self._in_thread.emits = True
        try:
            data = message.of_record(record)
            key = record.name.encode("utf-8", "replace")
            self._target.append(data, key, min(record.levelno, 255), int(record.created * 1e9), record.levelno >= self.durable)
        except Exception:
            self.handleError(record)
        finally:
            self._in_thread.emits = False

    def flush(self) -> None:
        """Do nothing: a message is in the log when the logger returns. `sync` flushes to disk."""

    def sync(self) -> None:
        """Flush all messages to disk. Raises the errors of `Log.sync`."""
        self._target.sync()

    def close(self) -> None:
        """Close the log; a later message opens it again."""
        self._target.close()
        super().close()
