"""A follower of a hub root: its processor time and its latency."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from cases.case import Bar, Bench, Row
from cases.crowd import PATIENCE, reading, received
from cases.wakeups import DIGITS, GAP, stamp

CLIENT = "client"
BITS = {1: 0, 128: 7, 1024: 10}  # for so many shards
WARM_UP = 20  # records before the first one that counts


class Times(NamedTuple):
    """The costs of a follower. cost: processor seconds per record; idle: share of a processor; wake_up: p99, in seconds."""

    cost: float
    idle: float
    wake_up: float


def on_root(connection: Connection, path: Path, count: int) -> None:
    """Follow a hub root, first with records, then without, until the last one; report `Times`."""
    import hub

    with hub.open(path) as root:
        following = root.follow("latest", timeout=PATIENCE)
        connection.send("ready")
        for _ in range(WARM_UP):
            next(following)
        before, found = time.process_time(), []
        for _ in range(count):
            sent = int(next(following).value)
            found.append(time.monotonic_ns() - sent)
        between, start = time.process_time(), time.monotonic()
        next(following)
        idle = (time.process_time() - between) / (time.monotonic() - start)
    connection.send(Times((between - before) / count, idle, _p99(found)))


def on_pipe(connection: Connection, path: Path, count: int) -> None:
    """Read as many messages from a named pipe; report `Times`."""
    fd = os.open(path, os.O_RDWR)
    connection.send("ready")
    for _ in range(WARM_UP):
        os.read(fd, DIGITS)
    before, found = time.process_time(), []
    for _ in range(count):
        sent = int(os.read(fd, DIGITS))
        found.append(time.monotonic_ns() - sent)
    cost = (time.process_time() - before) / count
    os.read(fd, DIGITS)
    connection.send(Times(cost, 0.0, _p99(found)))


def _p99(latencies: list[int]) -> float:
    return sorted(latencies)[int(len(latencies) * 0.99)] / 1e9


def fed(connection: Connection, count: int, idle: float, send: Callable[[bytes], object]) -> Times:
    """Send messages to a ready reader, a last one after some idle seconds, and return the report."""
    received(connection)
    time.sleep(0.1)
    for _ in range(WARM_UP + count):
        time.sleep(GAP)
        send(stamp())
    time.sleep(idle)
    send(stamp())
    return Times(*received(connection))


def followed(shards: int, bench: Bench) -> Iterator[Row]:
    """following a hub root (shards: {}): processor time, idle share and wake-up, compared with a reader on a pipe"""
    import hub

    count, path, pipe = bench.size(2000, 20), bench.folder / "root", bench.folder / "pipe"
    bits, idle = min(BITS[shards], bench.size(10, 1)), 6 * bench.seconds
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR)
    with hub.create(path) as root, root.create_client(CLIENT, bits=bits, capacity="64KiB") as client:

        def ours() -> Times:
            with reading(on_root, path, count) as connection:
                return fed(connection, count, idle, client.append)

        def bare() -> Times:
            with reading(on_pipe, pipe, count) as connection:
                return fed(connection, count, 0, lambda message: os.write(fd, message))

        pairs = bench.alternate(ours, bare)
    os.close(fd)
    of = f"hub root, {shards} shard{'s' if shards > 1 else ''}"
    yield Row(f"{of}: processor time a record", "us", "pipe", _scaled(pairs, "cost", 1e6), Bar(figure=15))
    yield Row(f"{of}: idle", "cores", "", [(one.idle, None) for one, _ in pairs], Bar(figure=0.003))
    yield Row(f"{of}: wake-up, p99", "us", "pipe", _scaled(pairs, "wake_up", 1e6), Bar(figure=1000))


def _scaled(pairs: list[tuple[Times, Times | None]], name: str, scale: float) -> list[tuple[float, float | None]]:
    return [(getattr(one, name) * scale, None if other is None else getattr(other, name) * scale) for one, other in pairs]
