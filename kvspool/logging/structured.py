"""A processor of structlog."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import MutableMapping
from typing import Any

from kvspool.logging.message import plain
from kvspool.logging.messages import MessageLog
from kvspool.system.handles import Handle

OWN = ("event", "level", "logger", "timestamp", "exception", "stack")


class StructlogProcessor(Handle):
    """Appends each event to a log, as `Handler` does, and passes it on; place it before the renderer.

    structlog.configure(processors=[structlog.stdlib.add_log_level, StructlogProcessor("logs/app"), structlog.dev.ConsoleRenderer()])
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: str | None = None, **options: Any) -> None:
        """path, options: as of `Handler`. durable: events of this level ("error") and above are on disk when the processor returns."""
        self._durable = 1 << 30 if durable is None else logging.getLevelNamesMapping()[durable.upper()]
        self._target = MessageLog(path, options)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Append the event, which survives a crash of the process when this returns. Raises the errors of `Log.append`."""
        level = str(event.get("level", method)).upper()
        number = logging.getLevelNamesMapping().get(level, logging.INFO)
        name = str(event.get("logger") or getattr(logger, "name", None) or "")
        data: dict[str, Any] = {"level": level, "logger": name, "message": plain(event.get("event")), "process": os.getpid()}
        data |= {field: str(event[field]) for field in ("exception", "stack") if event.get(field)}
        extra = {str(field): plain(value) for field, value in event.items() if field not in OWN}
        if extra:
            data["extra"] = extra
        self._target.append(data, name.encode("utf-8", "replace"), min(number, 255), time.time_ns(), number >= self._durable)
        return event

    def close(self) -> None:
        """Close the log; a later event opens it again."""
        self._target.close()
