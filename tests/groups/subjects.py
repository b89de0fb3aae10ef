"""Logs, shard sets and hub roots whose shards a group shares, and members in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub
import kvspool
import shard

KINDS = ("spool", "kvj", "sej", "fflg", "set", "set of kvj", "hub", "hub of spools")
SHARED = ("set", "set of kvj", "hub", "hub of spools")


class Subject:
    """A log, a shard set or a hub root with four shards."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.open_it: Callable[..., Any] = kvspool.open
        if kind.startswith("set"):
            self.writer: Any = shard.create(path, bits=2, **_options("kvj" if "kvj" in kind else "spool"))
            self.open_it = shard.open
        elif kind.startswith("hub"):
            self.writer = hub.create(path).create_client("A", bits=2, **_options("spool" if "spool" in kind else "kvj"))
            self.open_it = hub.open
        else:
            self.writer = kvspool.create(path, **_options(kind))

    def open(self) -> Any:
        return self.open_it(self.path)

    def append(self, count: int) -> None:
        """Append records, of all keys."""
        values = [b"%d" % at for at in range(count)]
        if self.kind in ("spool", "kvj", "sej", "fflg"):
            self.writer.append_many(values)
        else:
            self.writer.append_many(values, keys=values)

    def shard_of(self, record: Any) -> Any:
        """Return the name of the record's shard in the group."""
        return (record.client, record.shard) if self.kind.startswith("hub") else getattr(record, "shard", 0)

    @property
    def shards(self) -> int:
        return 4 if self.kind in SHARED else 1


def _options(kind: str) -> dict[str, Any]:
    return {"capacity": "1MiB"} if kind == "spool" else {"format": kind}
