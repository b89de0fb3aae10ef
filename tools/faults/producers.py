"""A storm on producers: processes that append numbered batches are killed at random and restarted; each record must be stored once.

    python tools/faults/producers.py SECONDS [--format kvj] [--seed N]

Four producers, each in a separate process that is killed after a random time, append batches of random sizes to one log. A batch's number
determines its records; their order differs from one start to the next. Two processes append other records meanwhile, one by one; they
are killed too. At the end every producer appends its last batch again, and the log is compared with the expected records.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kvspool

PRODUCERS = 4
OTHERS = 2


def batch(name: int, number: int, seed: int) -> list[bytes]:
    """Return the records of a batch: always the same ones, a few of them equal to each other."""
    choose = random.Random(f"{seed} {name} {number}")
    count = choose.choice([1, 3, 20, 300, 2000])
    return [b"%d:%d:%d" % (name, number, at // 2) for at in range(count)]


def produce(path: Path, name: int, seed: int) -> None:
    with kvspool.open(path, timeout=60) as log:
        producer = log.producer(f"producer-{name}")
        last = producer.last
        number = 0 if last is None else last + choose_back()
        while True:
            rows = batch(name, number, seed)
            random.shuffle(rows)
            stored = producer.append_many(rows, batch=number)
            assert stored.records == len(rows) or stored.repeated
            number += 1


def choose_back() -> int:
    """Return how many batches before the last one the producer continues: stored ones are sent again, too."""
    return random.choice([1, 1, 0])


def append(path: Path) -> None:
    with kvspool.open(path, timeout=60) as log:
        while True:
            log.append(b"other")


def start(work: Any, *arguments: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            random.seed()
            work(*arguments)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    return child


def storm(seconds: float, format: str, seed: int) -> dict[str, int]:
    """Run the storm; return what was counted. AssertionError for a record that is missing, or there twice."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        path = folder / "log"
        options: dict[str, Any] = {"capacity": "2GiB"} if format == "spool" else {"format": format, "segment_bytes": 1 << 20}
        log: Any = kvspool.create(path, **options)
        works: list[tuple[Any, ...]] = [(produce, path, name, seed) for name in range(PRODUCERS)] + [(append, path)] * OTHERS
        children = {at: start(*work) for at, work in enumerate(works)}
        killed, until = 0, time.monotonic() + seconds
        while time.monotonic() < until or not has_begun(log):
            time.sleep(random.expovariate(100))
            at = random.randrange(len(works))
            os.kill(children[at], signal.SIGKILL)
            status = os.waitpid(children[at], 0)[1]
            assert status == signal.SIGKILL, f"process {at} ended by itself: {status}"
            killed += 1
            children[at] = start(*works[at])
        for child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return {"killed": killed, **audit(log, seed)}
    finally:
        shutil.rmtree(folder)


def has_begun(log: Any) -> bool:
    """Return whether producers and other writers have appended, which takes longer than the storm on a busy machine."""
    return any(one.batch >= 0 for one in log.producers()) and b"other" in log.read_values()


def audit(log: Any, seed: int) -> dict[str, int]:
    expected: Counter[bytes] = Counter()
    batches = completed = 0
    for one in log.producers():
        name = int(one.name.removeprefix("producer-"))
        stored = log.producer(one.name).append_many(batch(name, one.batch, seed), batch=one.batch)
        completed += not stored.repeated
        batches += one.batch + 1
        for number in range(one.batch + 1):
            expected.update(batch(name, number, seed))
    found = Counter(record.value for record in log.read())
    others = found.pop(b"other", 0)
    assert found == expected, f"{(found - expected).total()} too many, {(expected - found).total()} missing"
    assert log.verify().is_sound
    return {"batches": batches, "records": expected.total(), "others": others, "completed in the end": completed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--format", choices=("spool", "kvj"), default="spool")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    counted = storm(arguments.seconds, arguments.format, arguments.seed)
    print(", ".join(f"{name} {count:,}" for name, count in counted.items()), "- 0 violations")


if __name__ == "__main__":
    main()
