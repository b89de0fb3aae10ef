"""Records that a collector refuses, kept as dead letters: `kvspool tasks LOG otlp --dead` lists them, and `--requeue` sends them again."""

from __future__ import annotations

import os

import kvspool
from kvspool import system
from kvspool.log import Log
from kvspool.record import Codec, Record, plain
from kvspool.system import holders
from kvspool.system.handles import Handle
from kvspool.tasks.dead import DeadLetter, path_beside


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
        letter = DeadLetter(
            tasks=self._name,
            log=os.fspath(self._origin.path),
            log_id=self._origin.log_id,
            shard="",
            sequence=record.sequence,
            deliveries=1,
            error=why,
            worker=holders.describe(holders.ours()),
            time=system.port.now(),
            timestamp=record.timestamp,
            value=plain(record),
            codec=Codec.MSGPACK if record.codec == Codec.KEYED else record.codec,
        )
        self._log.append(letter, key=record.key, type=record.type, durable=True)

    def close(self) -> None:
        """Close the dead-letter log."""
        log, self._log = self._log, None
        if log is not None:
            log.close()
