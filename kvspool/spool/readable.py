"""The verbs of a spool that concern its durable readers."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from kvspool.log import Log
from kvspool.options import Isolation, Start
from kvspool.reader import Lag, ReaderStats
from kvspool.spool import search
from kvspool.spool.reader import SpoolReader, delete, displace, listing, measure

if TYPE_CHECKING:
    from kvspool.spool.spool_files import SpoolFiles


class ReadableSpool(Log):
    """The part of `kvspool.spool.spool.Spool` for durable readers and groups."""

    @abstractmethod
    def _live(self) -> SpoolFiles:
        """Return the open files. Raises Closed, LogVanished."""

    def open_reader(self, name: str, start: Start = "earliest", *, isolation: Isolation = "appended") -> SpoolReader:
        return self._iterations.add(SpoolReader(self._live, name, start, self.timeout, isolation))

    def readers(self) -> list[ReaderStats]:
        return listing(self._live())

    def remove_reader(self, name: str | int) -> None:
        delete(self._live, name, self.timeout)

    def displace_reader(self, name: str, pid: int) -> None:
        displace(self._live, name, pid, self.timeout)

    def lag(self, sequence: int) -> Lag:
        reader = self._live().reader(0, 0)
        first, end = self.extent()
        return measure(reader, search.find(reader, min(max(sequence, first), end)))
