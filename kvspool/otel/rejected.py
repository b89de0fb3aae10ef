"""Records that a collector refuses, kept as dead letters: `kvspool tasks LOG otlp --dead` lists them, and `--requeue` sends them again."""

from __future__ import annotations

import kvspool
from kvspool.log import Log
from kvspool.record import Record
from kvspool.system.handles import Handle
from kvspool.tasks.dead import letter_of, path_beside


class Rejected(Handle):
    """The dead-letter log next to a log, which is created for the first rejected record."""

    def __init__(self, origin: Log, name: str) -> None:
        """name: of the durable reader that ships the log."""
        self.path = path_beside(origin.path, name)
        self._origin = origin
        self._name = name
        self._log: Log | None = None

    def append(self, record: Record, why: str) -> None:
        """Append a record with a reason; on disk when this returns. After a crash it may be there twice."""
        if self._log is None:
            self._log = kvspool.create(self.path, format="kvj", codec="msgpack", exist_ok=True)
        letter = letter_of(record, self._name, self._origin.path, self._origin.log_id, "", 1, why)
        self._log.append(letter, key=record.key, type=record.type, durable=True)

    def close(self) -> None:
        """Close the dead-letter log."""
        log, self._log = self._log, None
        if log is not None:
            log.close()
