#!/usr/bin/env python3
"""A campaign against tasks: workers are killed, stopped and continued, leave and join, give tasks back and reject them.

    python tools/faults/tasks.py SECONDS [--kind log|set|hub] [--format spool|kvj|sej] [--workers N] [--lease S] [--order] [--seed N]

The ledger is memory outside of the logs, with words for each record. A worker notes there when it begins to handle a record, and before and
after its acknowledgement or rejection. A worker ends with an error, and so does the campaign:

- if a record is given out after its acknowledgement has returned;
- if another living worker handles it at that moment (without --lease: a worker whose lease ended may still run);
- with --order: if a record with the same key is being handled, or a later one of the key was acknowledged.

At the end all workers are killed, and a last one handles the rest. Then every record must have been acknowledged, or be in the dead-letter
log, where each rejected one is exactly once. With --lease, a record may have ended before a late worker begins with it. Its calls raise
LeaseLost then.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import hub
import kvspool
import shard
from kvspool.errors import LeaseLost

INSIDE, ENDED, GIVEN, REJECTED, WORDS = range(5)  # words of a record
BEGUN, DONE = 1, 2  # of ENDED and REJECTED
KEYS = 64
MOST = 1 << 18  # records
BITS = 2
PATIENCE = 60.0  # seconds until an ended process must be gone, and until the rest must be handled
VIOLATION = 77  # exit code


class Ledger:
    """The notes of the workers, in shared memory."""

    def __init__(self) -> None:
        self.words = memoryview(mmap.mmap(-1, 8 * (WORDS * MOST + 2 * KEYS))).cast("Q")

    def get(self, record: int, word: int) -> int:
        return self.words[record * WORDS + word]

    def put(self, record: int, word: int, value: int) -> None:
        self.words[record * WORDS + word] = value


class Handler:
    """A worker's handler, which checks the promises at each task."""

    def __init__(self, ledger: Ledger, has_lease: bool, is_ordered: bool, seed: int) -> None:
        self._ledger = ledger
        self._has_lease = has_lease
        self._is_ordered = is_ordered
        self._random = random.Random(seed)

    def begin(self, task: Any) -> None:
        record = int(task.value)
        if self._ledger.get(record, ENDED) == DONE or self._ledger.get(record, REJECTED) == DONE:
            if not self._is_late(task):
                fail(f"record {record} was given out after its end, delivery {task.deliveries}")
            return
        other = self._ledger.get(record, INSIDE)
        if other and not self._has_lease and is_alive(other):
            fail(f"record {record} is handled by the processes {other} and {os.getpid()}")
        if self._is_ordered and not self._has_lease:
            self._check_order(record)
        self._ledger.put(record, INSIDE, os.getpid())
        self._ledger.put(record, GIVEN, self._ledger.get(record, GIVEN) + 1)

    def _is_late(self, task: Any) -> bool:
        """Return whether the lease of a task ended before this worker began with it: then another one may have ended the task."""
        try:
            task.ack()
        except LeaseLost:
            return self._has_lease
        return False

    def _check_order(self, record: int) -> None:
        at = WORDS * MOST + 2 * (record % KEYS)
        other, high = self._ledger.words[at : at + 2]
        if other and other != os.getpid() and is_alive(other):
            fail(f"two records of the key of {record} are handled at once, by {other} and {os.getpid()}")
        if record + 1 < high:
            fail(f"record {record} comes after {high - 1} of the same key")
        self._ledger.words[at] = os.getpid()

    def end(self, task: Any) -> None:
        """Acknowledge, give back or reject a task."""
        if task.is_over:
            return
        record = int(task.value)
        choice = self._random.random()
        try:
            if choice < 0.85:
                self._end(record, ENDED, task.ack)
            elif choice < 0.97:
                self._leave(record)
                task.retry(delay=self._random.choice([0.0, 0.0, 0.01]))
            else:
                self._end(record, REJECTED, lambda: task.reject("chosen"))
        except LeaseLost:
            if not self._has_lease:
                raise

    def _end(self, record: int, word: int, call: Any) -> None:
        self._ledger.put(record, word, max(BEGUN, self._ledger.get(record, word)))
        at = WORDS * MOST + 2 * (record % KEYS)
        self._ledger.words[at + 1] = max(record + 1, self._ledger.words[at + 1])
        self._leave(record)
        call()
        self._ledger.put(record, word, DONE)

    def _leave(self, record: int) -> None:
        self._ledger.put(record, INSIDE, 0)
        self._ledger.words[WORDS * MOST + 2 * (record % KEYS)] = 0


def fail(words: str) -> None:
    """End the process with a violation."""
    print(f"VIOLATION: {words}", file=sys.stderr, flush=True)
    os._exit(VIOLATION)


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def create(path: Path, kind: str, form: str) -> Any:
    """Create the log, and return the handle that appends to it."""
    options: dict[str, Any] = {"capacity": "32MiB"} if form == "spool" else {"format": form}
    if kind == "log":
        return kvspool.create(path, **options)
    return shard.create(path, bits=BITS, **options) if kind == "set" else hub.create(path).create_client("A", bits=BITS, **options)


def opened(path: Path, kind: str) -> Any:
    """Open the log, shard set or hub root."""
    return {"set": shard.open, "hub": hub.open}.get(kind, kvspool.open)(path)


def work(path: Path, kind: str, options: dict[str, Any], ledger: Ledger, seed: int, *, rest: bool = False) -> None:
    """Be a worker until the process ends, or with `rest` until there is no task left."""
    chance = random.Random(seed)
    handler = Handler(ledger, "lease" in options, "order" in options, seed)
    with opened(path, kind) as log:
        while True:
            with log.tasks("t", max_deliveries=None, **options) as worker:
                for _ in range(chance.randrange(1, 400)):
                    tasks = worker.take(chance.choice([1, 1, 5, 50]), wait=1.0 if rest else 0.2, on_gap="raise")
                    for task in tasks:
                        handler.begin(task)
                        if chance.random() < 0.01:
                            time.sleep(0.002)
                        if "order" not in options:
                            continue
                        handler.end(task)
                    for task in tasks if "order" not in options else ():
                        handler.end(task)
                    if rest and not tasks:
                        return


def start(path: Path, kind: str, options: dict[str, Any], ledger: Ledger, seed: int, *, rest: bool = False) -> int:
    """Start a worker in a process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        work(path, kind, options, ledger, seed, rest=rest)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ended(pid: int, *, may_be_killed: bool) -> None:
    """Wait for a process. Raises AssertionError if it found a violation, or failed."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0 or (may_be_killed and code == -signal.SIGKILL), f"process {pid} ended with {code}"


def campaign(
    seconds: float, kind: str, form: str, workers: int, lease: float | None, is_ordered: bool, seed: int, strikes: int | None = None
) -> dict[str, int]:
    """Run the campaign; return counts. Raises AssertionError if a promise is broken."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="tasks-", dir="/dev/shm"))
    path = folder / "log"
    ledger = Ledger()
    options: dict[str, Any] = ({} if lease is None else {"lease": lease}) | ({"order": "key"} if is_ordered else {})
    options["window"] = 4096
    counts = {"records": 0, "killed": 0, "stopped": 0}
    pids: list[int] = []
    try:
        writer = create(path, kind, form)
        pids = [start(path, kind, options, ledger, seed + number) for number in range(workers)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (strikes is None or counts["killed"] + counts["stopped"] < strikes):
            first = counts["records"]
            count = min(chance.randrange(1, 200), MOST - first)
            values = [b"%d" % number for number in range(first, first + count)]
            writer.append_many(values, keys=[b"%d" % (number % KEYS) for number in range(first, first + count)])
            counts["records"] += count
            time.sleep(chance.random() * 0.03)
            _strike(chance, pids, counts, lambda: start(path, kind, options, ledger, chance.randrange(1 << 30)))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            ended(pid, may_be_killed=True)
        pids = [start(path, kind, options, ledger, seed, rest=True)]
        ended(pids.pop(), may_be_killed=False)
        _check_end(path, kind, ledger, counts)
        writer.close()
        return counts
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


def _strike(chance: random.Random, pids: list[int], counts: dict[str, int], begin: Any) -> None:
    """Kill or stop a worker, and start another one for each that ended."""
    victim = chance.choice(pids)
    if chance.random() < 0.5:
        os.kill(victim, signal.SIGKILL)
        ended(victim, may_be_killed=True)
        counts["killed"] += 1
        pids[pids.index(victim)] = begin()
    elif chance.random() < 0.6:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(chance.random() * 0.05)
        os.kill(victim, signal.SIGCONT)
        counts["stopped"] += 1
    for pid in pids:
        found, status = os.waitpid(pid, os.WNOHANG)
        assert not found, f"process {pid} ended with {os.waitstatus_to_exitcode(status)}"


def _check_end(path: Path, kind: str, ledger: Ledger, counts: dict[str, int]) -> None:
    """Check that each record was acknowledged, or is a dead letter once."""
    with opened(path, kind) as log:
        states = log.task_stats()
        assert all(one.low == one.next for one in states), states
        dead = [int(letter.value) for letter in log.dead_letters("t")]
    assert len(dead) == len(set(dead)), "a record is in the dead letters twice"
    buried = set(dead)
    counts["dead"] = len(dead)
    counts["again"] = sum(ledger.get(record, GIVEN) > 1 for record in range(counts["records"]))
    for record in range(counts["records"]):
        if ledger.get(record, REJECTED) == DONE:
            assert record in buried, f"record {record} was rejected, and is not in the dead letters"
        if record in buried:
            assert ledger.get(record, REJECTED), f"record {record} is in the dead letters, and was not rejected"
        else:
            assert ledger.get(record, ENDED), f"record {record} was forgotten"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--kind", choices=("log", "set", "hub"), default="log")
    parser.add_argument("--format", choices=("spool", "kvj", "sej"), default="spool")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lease", type=float)
    parser.add_argument("--order", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    form = arguments.format
    print(campaign(arguments.seconds, arguments.kind, form, arguments.workers, arguments.lease, arguments.order, arguments.seed))


if __name__ == "__main__":
    main()
