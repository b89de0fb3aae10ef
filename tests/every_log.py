"""A log of each kind with each file that it can have, and everything that can be done with it."""

from __future__ import annotations

import queue as queues
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import kvspool
from kvspool import queue
from kvspool.errors import KvspoolError
from kvspool.journal import FixedJournal, Journal, Retention
from kvspool.queue import ChunkQueue

SECONDS = 30  # after which a call counts as one that hangs
FORMATS: dict[str, dict[str, Any]] = {
    "kvj": {"segment_bytes": 200},
    "sej": {"segment_bytes": 200},
    "fflg": {"segment_bytes": 10_000},
    "fixed": {"item_bytes": 4, "items_per_blob": 4},
}
KINDS = ("spool", "resized", *FORMATS, "queue")


def make(kind: str, path: Path) -> None:
    """Make a log of a kind with records, a durable reader, a producer and settings; no handle of it stays open."""
    if kind == "queue":
        with queue.create(path, chunk_bytes=4096) as made:
            made.put_many([b"x" * 1000] * 9)
        return
    with _created(kind, path) as log:
        log.append_many([b"four"] * 20)
        if not isinstance(log, Journal) or log.format.has_producers:
            log.producer("one").append_many([b"four"] * 3, batch=0)
        with log.reader("place") as reader:
            next(iter(reader.read()))
            reader.commit()
        if isinstance(log, FixedJournal):
            log.rewind(18)
            log.prune(5)
        elif isinstance(log, Journal):
            log.set_retention(Retention(max_bytes=1 << 20))
            log.trim(before=3)
        if kind == "kvj":
            log.archive(before=8)
    if kind == "resized":
        kvspool.resize(path, 16384)


def _created(kind: str, path: Path) -> Any:
    if kind in FORMATS:
        return kvspool.create(path, format=kind, **FORMATS[kind])  # type: ignore[call-overload]
    return kvspool.create(path, capacity=8192)


def deeds(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield everything that can be done with the log at a path, and what it is called."""
    for name, deed in {
        "stats": lambda log: log.stats(),
        "read": lambda log: [] if isinstance(log, ChunkQueue) else list(log.read(on_gap="yield")),
        "peek": lambda log: log.peek_nowait() if isinstance(log, ChunkQueue) else None,
        "entries": lambda log: list(log) if isinstance(log, ChunkQueue) else None,
        "seek": lambda log: None if isinstance(log, ChunkQueue) else list(log.read(10, limit=1, on_gap="yield")),
        "readers": lambda log: None if isinstance(log, ChunkQueue) else log.readers(),
        "reader": _use_reader,
        "producers": lambda log: log.producers() if _has_producers(log) else None,
        "producer": lambda log: log.producer("one").append_many([b"four"], batch=1) if _has_producers(log) else None,
        "append": lambda log: log.put_nowait(b"four") if isinstance(log, ChunkQueue) else log.append(b"four"),
        "sync": lambda log: log.sync(),
        "trim": lambda log: log.trim(before=6) if isinstance(log, Journal) else None,
        "archive": lambda log: log.archive() if isinstance(log, Journal) and log.format.has_archives else None,
        "rewind": lambda log: log.rewind(17) if isinstance(log, FixedJournal) else None,
        "drain": lambda log: list(log.drain()) if isinstance(log, ChunkQueue) else None,
    }.items():
        yield name, lambda deed=deed: _done(path, deed)
    yield "verify", lambda: kvspool.verify(path)
    yield "repair", lambda: kvspool.repair(path, timeout=5)
    yield "open", lambda: _open(path).close()


def _done(path: Path, deed: Callable[[Any], object]) -> None:
    with closing(_open(path)) as log:
        deed(log)


def _open(path: Path) -> Any:
    return queue.open(path) if queue.is_queue(path) else kvspool.open(path)


def _has_producers(log: Any) -> bool:
    return not isinstance(log, ChunkQueue) and (not isinstance(log, Journal) or log.format.has_producers)


def _use_reader(log: Any) -> None:
    if not isinstance(log, ChunkQueue):
        with log.reader("place") as reader:
            list(reader.read(on_gap="yield"))
            reader.commit()


def said(deed: Callable[[], object]) -> str:
    """Return the error of the package's own that a call ends with; nothing if it ends well. Any other error passes, a hang is one."""
    with in_time():
        try:
            deed()
        except (KvspoolError, queues.Empty) as error:
            return str(error)
    return ""


@contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    """Raise TimeoutError for what hangs inside the `with` block."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
