"""The commands for a queue in QewQew's files, instead of a log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvspool.cli import output
from kvspool.cli.options import BadInput
from kvspool.log import Log
from kvspool.opening import logs
from kvspool.options import Isolation, OnGap, Start
from kvspool.queue import ChunkQueue, QueueRepairReport, QueueStats, QueueVerifyReport, is_queue
from kvspool.record import Record
from kvspool.system.handles import Handle


class QueueLog(Handle):
    """A queue as a readable log: its entries are numbered from the front, and have neither keys nor times."""

    def __init__(self, queue: ChunkQueue) -> None:
        self.queue = queue

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Iterator[Record]:
        """Yield the present entries; none is taken out."""
        if start == "latest":
            return
        first = 0 if start == "earliest" else start
        if not isinstance(first, int) or isolation != "appended":
            raise BadInput(f"{self.queue.path} is a queue: its entries have no times, and which of them are on disk is unknown")
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
        """Refuse: waiting for the entries of a queue takes them out."""
        raise BadInput(f"{self.queue.path} is a queue: its entries can be read, but not followed; waiting for them takes them out")

    def stats(self) -> QueueStats:
        """Return the statistics of the queue."""
        return self.queue.stats()

    def close(self) -> None:
        """Close the queue. Nothing was taken out, so its files stay."""
        self.queue.close()


def open_log(path: Path) -> Log:
    """Open a log for a command that doesn't support queues. Raises BadInput, and the errors of `kvspool.open`."""
    if is_queue(path):
        raise BadInput(f"{path} is a queue, which this command does not support; see `kvspool queue`")
    return logs.open_store(path)


def show(report: QueueVerifyReport) -> None:
    """Print the result of a check."""
    for problem in report.problems:
        print(output.escape(f"damaged: {problem}"))
    print(summary(report))


def summary(report: QueueVerifyReport) -> str:
    """Return the counts of a check in one line."""
    counts = f"{output.counted(report.entries, 'entry')} in {output.counted(report.chunks, 'chunk')}"
    return f"consistent: {counts}; the format has no checksums"


def show_repair(report: QueueRepairReport) -> None:
    """Print the result of a repair."""
    for line in report.done:
        print(output.escape(line))
    show(report.verify)
