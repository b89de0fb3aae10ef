"""Groups: the rate of four members over 16 shards, and the time until another member owns the shards of a killed one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cases.case import THOUSAND, Bar, Bench, Row
from cases.together import shared_rate, takeover_rows, takeover_time

BITS, MEMBERS, COMMIT = 4, 4, 1000
RECORDS = 2_000_000
PART = 0.8  # of one reader's rate, for each core
TAKEOVER = Bar(figure=10)  # ms, the median


def shared(bench: Bench) -> Iterator[Row]:
    """a group of four over 16 shards of a hub root, committing each 1000 records, compared with one durable reader for each core"""
    import hub

    path, records = bench.folder / "root", bench.size(RECORDS, 16_000)
    cores = min(MEMBERS, len(os.sched_getaffinity(0)))
    with hub.create(path) as root, root.create_client("bench", bits=BITS, capacity="32MiB") as client:
        for _ in range(records // len(THOUSAND)):
            client.append_many(THOUSAND)
    names = iter(range(1 << 30))
    ours = partial(group_rate, path, records, names)
    one = partial(reader_rate, path, records, names)
    yield bench.row(f"group of {MEMBERS}", "k/s", ours, f"{cores} times one reader", lambda: cores * one(), Bar(PART))


def reader_rate(path: Path, records: int, names: Iterator[int]) -> float:
    """Return the records per second of one durable reader."""
    import hub

    with hub.open(path) as root, root.reader(f"reader-{next(names)}") as reader:
        began = time.perf_counter()
        for number, _ in enumerate(reader.follow(limit=records), 1):
            if number % COMMIT == 0:
                reader.commit()
        return records / (time.perf_counter() - began)


def group_rate(path: Path, records: int, names: Iterator[int]) -> float:
    """Return the records per second of all members together, from the moment at which each owns its share."""
    return shared_rate(partial(_follow, path, f"group-{next(names)}"), MEMBERS, records, COMMIT)


def _follow(path: Path, name: str, ready: int, go: int, done: int) -> None:
    import hub

    share = (1 << BITS) // MEMBERS
    with hub.open(path) as root, root.group(name) as member:
        while len(member.attend()) != share:
            time.sleep(0.001)
        os.write(ready, b".")
        os.read(go, 1)
        count = 0
        while True:
            for _ in member.follow(timeout=0.05):
                count += 1
                if count % COMMIT == 0:
                    member.commit()
                    os.write(done, b"\1")
            rest = count % COMMIT
            if rest:
                member.commit()
                os.write(done, b"\1" if rest >= COMMIT // 2 else b"")
                count -= rest


def takeover(bench: Bench) -> Iterator[Row]:
    """the time from SIGKILL of a member until another one owns its shards"""
    import kvspool

    path = bench.folder / "log"
    kvspool.create(path, capacity="1MiB").close()
    times = [takeover_time(partial(_own, path), partial(_stand_by, path)) for _ in range(bench.size(50, 2))]
    yield from takeover_rows(bench, "takeover", times, TAKEOVER)


def _own(path: Path, ready: int) -> None:
    import kvspool

    with kvspool.open(path) as log, log.group("g") as member:
        while not member.attend():
            time.sleep(0.001)
        os.write(ready, b".")
        signal.pause()


def _stand_by(path: Path, ready: int, took: int) -> None:
    import kvspool

    def owns(*_: Any) -> None:
        os.write(took, time.monotonic_ns().to_bytes(8, "little"))

    with kvspool.open(path) as log, log.group("g", on_assigned=owns) as member:
        os.write(ready, b".")
        for _ in member.follow():
            pass
