"""One blocked reader in another process, woken by a record each millisecond."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cases.case import NO_BAR, Bar, Bench, Row
from cases.crowd import PATIENCE, reading, received

DIGITS = len(b"%d" % time.monotonic_ns())  # the same for all clocks of a machine, so that messages can be separated
GAP = 0.001  # seconds between two records
SHARES = {"p50": 0.5, "p99": 0.99}


def stamp() -> bytes:
    """Return the time as a message."""
    return b"%d" % time.monotonic_ns()


def on_log(connection: Connection, count: int, path: Path, options: dict[str, float]) -> None:
    """Follow a log, and report the latency of each record, in ns."""
    import kvspool

    with kvspool.open(path) as log:
        following = log.follow("latest", limit=count, timeout=PATIENCE, **options)
        connection.send("ready")
        connection.send([time.monotonic_ns() - int(record.value) for record in following])


def on_pipe(connection: Connection, count: int, path: Path) -> None:
    """Read a named pipe, and report the latency of each message."""
    fd = os.open(path, os.O_RDWR)  # for writing, too, so that opening doesn't wait for the writer
    connection.send("ready")
    connection.send([-int(os.read(fd, DIGITS)) + time.monotonic_ns() for _ in range(count)])


def on_file(connection: Connection, count: int, path: Path) -> None:
    """Wait for inotify to report each change of a file, and report the latency of each message."""
    from inotify_simple import INotify, flags

    with INotify() as notifier, open(path, "rb", buffering=0) as file:
        notifier.add_watch(path, flags.MODIFY)
        connection.send("ready")
        found: list[int] = []
        while len(found) < count:
            os.read(notifier.fileno(), 4096)
            while message := file.read(DIGITS):
                found.append(time.monotonic_ns() - int(message))
        connection.send(found)


def latencies(bench: Bench, reader: Callable[..., None], send: Callable[[bytes], object], *arguments: Any) -> list[int]:
    """Return a reader's latencies of many messages, in ns, sorted."""
    count = bench.size(1000, 20)
    with reading(reader, count, *arguments) as connection:
        received(connection)
        time.sleep(0.05)  # it reports that it is ready just before it blocks
        for _ in range(count):
            time.sleep(GAP)
            send(stamp())
        return sorted(received(connection))


def on_bare_pipe(bench: Bench) -> list[int]:
    """Return the latencies of a reader on a pipe."""
    path = bench.folder / "pipe"
    if not path.exists():
        os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    try:
        return latencies(bench, on_pipe, partial(os.write, fd), path)
    finally:
        os.close(fd)


def on_bare_file(bench: Bench) -> list[int]:
    """Return the latencies of a reader that waits for inotify on a file."""
    path = bench.folder / "watched"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    try:
        return latencies(bench, on_file, partial(os.write, fd), path)
    finally:
        os.close(fd)


def rows(name: str, peer: str, pairs: list[tuple[list[int], list[int] | None]], bars: dict[str, Bar]) -> Iterator[Row]:
    """Yield p50 and p99 of latencies in ns, in microseconds."""
    for share, part in SHARES.items():
        found = [(_share(ours, part), None if floor is None else _share(floor, part)) for ours, floor in pairs]
        yield Row(f"{name}, {share}", "us", peer, found, bars.get(share, NO_BAR))


def _share(ordered: list[int], part: float) -> float:
    return ordered[int(len(ordered) * part)] / 1000


def blocked(bench: Bench) -> Iterator[Row]:
    """wake-up of one blocked reader, compared with a reader on a pipe"""
    yield from _followed(bench, "wake-up of a blocked reader", {}, {"p50": Bar(ratio=1.2), "p99": Bar(ratio=2)})


def spinning(bench: Bench) -> Iterator[Row]:
    """wake-up of one reader that spins for 2 ms, compared with a reader on a pipe"""
    yield from _followed(bench, "wake-up of a spinning reader", {"spin": 0.002}, {"p50": Bar(ratio=0.45)})


def _followed(bench: Bench, name: str, options: dict[str, float], bars: dict[str, Bar]) -> Iterator[Row]:
    import kvspool

    with kvspool.create(bench.folder / "bell", capacity="1MiB") as log:
        pairs = bench.alternate(lambda: latencies(bench, on_log, log.append, log.path, options), lambda: on_bare_pipe(bench))
    yield from rows(name, "pipe", pairs, bars)


def journal(bench: Bench) -> Iterator[Row]:
    """wake-up of a journal's follower, compared with a reader blocked on inotify on a file that is written"""
    import kvspool

    with ExitStack() as stack:
        for form in ("kvj", "sej"):
            log = stack.enter_context(kvspool.create(bench.folder / form, format=form))
            pairs = bench.alternate(lambda log=log: latencies(bench, on_log, log.append, log.path, {}), lambda: on_bare_file(bench))
            yield from rows(f"wake-up of a follower of a {form}", "inotify", pairs, {"p50": Bar(ratio=1.3)})
