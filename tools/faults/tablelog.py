"""A Delta table as its log describes it: the protocol alone, without delta-rs, which writes the log.

A version has the files that its commits have added and not removed, from the first commit on. Commits stay for 30 days, so a campaign needs
no checkpoints of the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyarrow.parquet import ParquetFile


class TableLog:
    """One version of a table. metadata, added: the actions of the protocol, those of files by path; version: -1 before the first commit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = -1
        self.metadata: dict[str, Any] = {}
        self.added: dict[str, dict[str, Any]] = {}

    def look(self) -> int:
        """Move to the newest version; return its number."""
        with suppress(FileNotFoundError):
            while True:
                commit = (self.path / "_delta_log" / f"{self.version + 1:020}.json").read_text(encoding="utf-8")
                for line in commit.rstrip("\n").split("\n"):
                    self._apply(json.loads(line))
                self.version += 1
        return self.version

    def _apply(self, action: dict[str, Any]) -> None:
        self.metadata = action.get("metaData", self.metadata)
        if "add" in action:
            self.added[action["add"]["path"]] = action["add"]
        if "remove" in action:
            del self.added[action["remove"]["path"]]

    def rows(self) -> int:
        """Return the number of rows, by the statistics."""
        return sum(json.loads(one["stats"])["numRecords"] for one in self.added.values())

    def values(self, column: str) -> Iterator[Any]:
        """Yield the values of a column that is in the files: one that does not partition the table."""
        for path in self.added:
            yield from ParquetFile(self.path / unquote(path)).read([column])[column].to_pylist()
