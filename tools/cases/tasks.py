"""Tasks: taking and acknowledging records, next to other queues, the cost of waiting workers, and the takeover from a killed worker."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from peers.persist_queue import package
from peers.redis_streams import connected, redis_server

from cases.case import NO_BAR, THOUSAND, VALUE, Bar, Bench, Row, timed
from cases.crowd import PATIENCE, reading, received
from cases.sleepers import append_times
from cases.together import shared_rate, takeover_rows, takeover_time
from cases.wakeups import on_log

BATCH, WORKERS, WAITING = 100, 4, 16
NAME = "bench"  # of the task list, the stream and the table
OF_REDIS = {1: Bar(ratio=20), BATCH: NO_BAR}  # by the number of records that are taken at once
OURS = {1: Bar(figure=300), BATCH: Bar(figure=2000)}  # k/s
TOGETHER = Bar(figure=1000)  # k/s
AS_READERS = Bar(ratio=1.1)
TAKEOVER = Bar(figure=10)  # ms, the median


# Ours.


def _filled(path: Path, records: int) -> None:
    import kvspool

    with kvspool.create(path, capacity=records * 160 + (16 << 20)) as log:
        for _ in range(records // len(THOUSAND)):
            log.append_many(THOUSAND)


def worked(path: Path, names: Iterator[int], count: int, batch: int) -> float:
    """Return how many records per second a worker takes and acknowledges, `batch` of them at once."""
    import kvspool

    with kvspool.open(path) as log, log.tasks(f"{NAME}-{next(names)}", window=1 << 16) as worker:
        return timed(count, partial(_one_by_one if batch == 1 else _by_batch, worker, count))


def _one_by_one(worker: Any, count: int) -> None:
    for task in worker.follow(limit=count):
        task.ack()


def _by_batch(worker: Any, count: int) -> None:
    left = count
    while left > 0:
        tasks = worker.take(min(BATCH, left))
        worker.ack_many(tasks)
        left -= len(tasks)


def worked_together(path: Path, names: Iterator[int], count: int) -> float:
    """Return how many records per second four workers take and acknowledge in all."""
    return shared_rate(partial(_share, path, f"{NAME}-{next(names)}"), WORKERS, count)


def _share(path: Path, name: str, ready: int, go: int, done: int) -> None:
    import kvspool

    with kvspool.open(path) as log, log.tasks(name) as worker:
        os.write(ready, b".")
        os.read(go, 1)
        while tasks := worker.take(BATCH, wait=PATIENCE):
            worker.ack_many(tasks)
            os.write(done, bytes((len(tasks),)))


# Others.


def redis_streams(folder: Path, count: int, batch: int) -> float:
    """Return how many entries per second XREADGROUP and XACK process, `batch` of them at once."""
    with redis_server(folder, "--appendonly", "no") as path, connected(path) as client:
        for _ in range(count // batch):
            pipe = client.pipeline(transaction=False)
            for _ in range(batch):
                pipe.xadd(NAME, {b"value": VALUE})
            pipe.execute()
        client.xgroup_create(NAME, NAME, id="0")

        def work() -> None:
            for _ in range(count // batch):
                ((_, entries),) = client.xreadgroup(NAME, "worker", {NAME: ">"}, count=batch)
                client.xack(NAME, NAME, *(entry for entry, _ in entries))

        return timed(count // batch * batch, work)


def persist_queue(folder: Path, count: int) -> float:
    """Return how many values per second persist-queue's `SQLiteAckQueue` gives out and acknowledges."""
    path = folder / "persist"
    queue = package().SQLiteAckQueue(str(path), auto_commit=True)
    for _ in range(count):
        queue.put(VALUE)

    def work() -> None:
        for _ in range(count):
            queue.ack(queue.get())

    try:
        return timed(count, work)
    finally:
        queue.close()
        shutil.rmtree(path)


TABLE = "CREATE TABLE task (id INTEGER PRIMARY KEY, value BLOB, worker TEXT)"
TAKE = "UPDATE task SET worker = 'one' WHERE id IN (SELECT id FROM task WHERE worker IS NULL ORDER BY id LIMIT ?) RETURNING id, value"


def sqlite_queue(folder: Path, count: int, batch: int) -> float:
    """Return how many rows per second a table of SQLite gives out and deletes; in WAL mode without flushes, as our level "os"."""
    path = folder / "queue.sqlite"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(TABLE)
    connection.execute("CREATE INDEX waiting ON task (id) WHERE worker IS NULL")
    with connection:
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO task (value) VALUES (?)", [(VALUE,)] * count)

    def work() -> None:
        left = count
        while left > 0:
            rows = connection.execute(TAKE, (batch,)).fetchall()
            connection.execute("BEGIN")
            connection.executemany("DELETE FROM task WHERE id = ?", [(row,) for row, _ in rows])
            connection.execute("COMMIT")
            left -= len(rows)

    try:
        return timed(count, work)
    finally:
        connection.close()
        for file in folder.glob("queue.sqlite*"):
            file.unlink()


# Cases.


def taken(bench: Bench) -> Iterator[Row]:
    """take and acknowledge tasks, compared with Redis Streams, persist-queue and a table of SQLite"""
    path, names = bench.folder / "log", iter(range(1 << 30))
    records = bench.size(2_000_000, 2_000)
    _filled(path, records)
    for batch, name in ((1, "one by one"), (BATCH, f"by {BATCH}")):
        ours = partial(worked, path, names, records if batch > 1 else records // 4, batch)
        few = bench.size(20_000, 200) * (1 if batch == 1 else 10)
        peers: list[tuple[str, Callable[[], float], Bar]] = [
            ("Redis Streams, XREADGROUP and XACK", partial(redis_streams, bench.folder, few, batch), OF_REDIS[batch]),
            ("a table of SQLite", partial(sqlite_queue, bench.folder, few, batch), OURS[batch]),
        ]
        if batch == 1:
            peers.append(("persist-queue", partial(persist_queue, bench.folder, bench.size(2_000, 20)), NO_BAR))
        for peer, floor, bar in peers:
            yield bench.row(f"tasks: take and ack {name}", "k/s", ours, peer, floor, bar if not bench.is_short else NO_BAR)
    ours = partial(worked_together, path, names, records)
    yield bench.row(
        f"tasks: {WORKERS} workers, by {BATCH}", "k/s", ours, "one worker", partial(worked, path, names, records, BATCH), TOGETHER
    )


def waited(bench: Bench) -> Iterator[Row]:
    """append while 16 workers wait, compared with 16 waiting readers; the same with members of a group, and for a journal"""
    import kvspool

    number, count = bench.size(WAITING, 2), bench.size(250, 5)

    def of(options: dict[str, Any], target: Callable[..., None]) -> float:
        with kvspool.create(bench.folder / f"calls-{next(names)}", **options) as log, ExitStack() as stack:
            connections = [stack.enter_context(reading(target, count, log.path, {})) for _ in range(number)]
            for connection in connections:
                received(connection)
            time.sleep(0.1)
            found = statistics.median(append_times(log, count))
            for connection in connections:
                received(connection)
        return 1e9 / found

    names = iter(range(1 << 30))
    spool, journal = {"capacity": "1MiB"}, {"format": "kvj"}
    for options, who, target in ((spool, "workers", on_tasks), (spool, "members", on_group), (journal, "workers of a journal", on_tasks)):
        readers = f"{number} readers{' of a journal' if options is journal else ''} wait"
        ours, theirs = partial(of, options, target), partial(of, options, on_log)
        yield bench.row(f"append while {number} {who} wait", "us", ours, readers, theirs, AS_READERS)


def on_group(connection: Any, count: int, path: Path, options: dict[str, float]) -> None:
    """Be a member of a group until there are no more records."""
    import kvspool

    with kvspool.open(path) as log, log.group(NAME, start="latest") as member:
        connection.send("ready")
        for _ in member.follow(timeout=1.0):
            pass
        connection.send([])


def on_tasks(connection: Any, count: int, path: Path, options: dict[str, float]) -> None:
    """Take and acknowledge tasks until there are no more."""
    import kvspool

    with kvspool.open(path) as log, log.tasks(NAME, start="latest") as worker:
        connection.send("ready")
        for task in worker.follow(timeout=1.0):
            task.ack()
        connection.send([])


def takeover(bench: Bench) -> Iterator[Row]:
    """the time from SIGKILL of a worker until another one has its task"""
    import kvspool

    path = bench.folder / "log"
    with kvspool.create(path, capacity="1MiB") as log:
        times = [task_takeover_time(log) for _ in range(bench.size(50, 2))]
    yield from takeover_rows(bench, "task's takeover", times, TAKEOVER)


def task_takeover_time(log: Any) -> float:
    """Return the seconds until a worker that waits has the task of a killed one."""
    log.append(VALUE)
    return takeover_time(partial(_hold, log.path), partial(_stand_by, log.path))


def _hold(path: Path, ready: int) -> None:
    import kvspool

    with kvspool.open(path) as log, log.tasks(NAME) as worker:
        held = worker.take(wait=PATIENCE)
        os.write(ready, b"." * len(held))
        signal.pause()


def _stand_by(path: Path, ready: int, took: int) -> None:
    import kvspool

    with kvspool.open(path) as log, log.tasks(NAME) as worker:
        os.write(ready, b".")
        for task in worker.follow():
            os.write(took, time.monotonic_ns().to_bytes(8, "little"))
            task.ack()
            signal.pause()
