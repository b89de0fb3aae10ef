"""What the commands do with a queue in QewQew's files, in place of what they do with a log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvspool.cli import output
from kvspool.cli.options import BadInput
from kvspool.journal import Journal
from kvspool.opening import logs
from kvspool.options import Isolation, OnGap, Start
from kvspool.queue import ChunkQueue, QueueRepairReport, QueueStats, QueueVerifyReport, is_queue
from kvspool.record import Record
from kvspool.spool import Spool
from kvspool.system.handles import Handle


class QueueLog(Handle):
    """A queue as a log that can be looked at: its entries have numbers from the front on, and neither keys nor times."""

    def __init__(self, queue: ChunkQueue) -> None:
        self.queue = queue

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Iterator[Record]:
        """Yield the entries that are there; none is taken out."""
        if start == "latest":
            return
        first = 0 if start == "earliest" else start
        if not isinstance(first, int) or isolation != "appended":
            raise BadInput(f"{self.queue.path} is a queue: its entries have no times, and it isn't known which of them are on disk")
        entries = islice(enumerate(self.queue), first, None if limit is None else first + limit)
        for number, entry in entries:
            yield Record(number, 0, 0, None, entry)

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> Iterator[Record]:
        """Refuse: who waits for the entries of a queue takes them out."""
        raise BadInput(f"{self.queue.path} is a queue: its entries can be read, but who waits for them takes them out")

    def stats(self) -> QueueStats:
        """Return what the queue holds."""
        return self.queue.stats()

    def close(self) -> None:
        """Close the queue. Nothing was taken out, so its files stay."""
        self.queue.close()


def open_log(path: Path) -> Spool | Journal:
    """Open a log for a command that means nothing for a queue. Raises BadInput, besides what `kvspool.open` does."""
    if is_queue(path):
        raise BadInput(f"{path} is a queue, which this command does not know; see kvspool.queue in the library")
    return logs.open_store(path)


def open_spool(path: Path) -> Spool:
    """Open a spool for a command that means nothing for other logs. Raises BadInput, besides what `kvspool.open` does."""
    log = open_log(path)
    if isinstance(log, Journal):
        log.close()
        raise BadInput(f"{path} is a journal, which this command does not know")
    return log


def show(report: QueueVerifyReport) -> None:
    """Print what a look at every file found."""
    for problem in report.problems:
        print(output.escape(f"damaged: {problem}"))
    print(f"{report.entries:,} entries in {report.chunks:,} chunks add up; the format has no checksums")


def show_repair(report: QueueRepairReport) -> None:
    """Print what a repair did."""
    for line in report.done:
        print(output.escape(line))
    show(report.verify)
