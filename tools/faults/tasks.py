#!/usr/bin/env python3
"""A campaign against tasks: workers are killed, stopped and continued, leave and join, give tasks back and reject them.

    python tools/faults/tasks.py SECONDS [--kind log|set|hub] [--format spool|kvj|sej] [--policy P] [--order] [--lease S] [--seed N]

Half of the workers are killed after a random number of Python's opcodes within kvspool, the others at random times. With
KVSPOOL_NO_EXTENSIONS=1 the opcodes are those of the whole window.

The ledger is memory outside of the logs, with words for each record. A worker notes there when it begins to handle a record, and before and
after its acknowledgement or rejection. A worker ends with an error, and so does the campaign:

- if a record is given out after its acknowledgement has returned;
- if another living worker handles it at that moment (without --lease: a worker whose lease ended may still run);
- with --order: if a record with the same key is being handled, or a later one of the key was acknowledged.

At the end all workers are killed, and a last one handles the rest. Then every record must have been acknowledged, or be in the dead-letter
log, where each rejected one is exactly once. With --lease, a record may have ended before a late worker begins with it. Its calls raise
LeaseLost then. With --policy overwrite, a record may be lost that the log has lost; a small log of a policy is often full.
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
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import hub
import kvspool
import shard
from kvspool.errors import LeaseLost, LockTimeout, SpoolFull

INSIDE, ENDED, GIVEN, REJECTED, WORDS = range(5)  # words of a record
BEGUN, DONE = 1, 2  # of ENDED and REJECTED
KEYS = 64
MOST = 1 << 20  # records
MOST_WORKERS = 1 << 17  # that are started
BITS = 2
PATIENCE = 60.0  # seconds until an ended process must be gone, and until the rest must be handled
ENDING = 2.0  # seconds after its kill within which a process that has given its locks up is gone
MOST_OPCODES = 30_000
VIOLATION = 77  # exit code
SMALL = "64KiB"  # capacity of a log with a policy
CODE = tuple(os.path.dirname(one.__file__) for one in (kvspool, shard, hub))


class Ledger:
    """The notes of the workers, in shared memory. Workers have numbers, since process ids are reused."""

    def __init__(self) -> None:
        self.words = memoryview(mmap.mmap(-1, 8 * (WORDS * MOST + 2 * KEYS))).cast("Q")
        self.processes = memoryview(mmap.mmap(-1, 8 * MOST_WORKERS)).cast("Q")  # of each worker; 0: it has ended
        self.number = 0  # of the worker in this process

    def get(self, record: int, word: int) -> int:
        return self.words[record * WORDS + word]

    def put(self, record: int, word: int, value: int) -> None:
        self.words[record * WORDS + word] = value

    def is_alive(self, number: int) -> bool:
        """Return whether a worker lives. One that was killed frees its locks a moment before it has ended."""
        deadline = time.monotonic() + ENDING
        while time.monotonic() < deadline:
            pid = self.processes[number]
            if not pid or not is_alive(pid):
                return False
            time.sleep(0.01)
        return True


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
        if other and not self._has_lease and self._ledger.is_alive(other):
            fail(f"record {record} is handled by the workers {other} and {self._ledger.number}")
        if self._is_ordered and not self._has_lease:
            self._check_order(record)
        self._ledger.put(record, INSIDE, self._ledger.number)
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
        if other and other != self._ledger.number and self._ledger.is_alive(other):
            fail(f"two records of the key of {record} are handled at once, by {other} and {self._ledger.number}")
        if record + 1 < high:
            fail(f"record {record} comes after {high - 1} of the same key")
        self._ledger.words[at] = self._ledger.number

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


def create(path: Path, kind: str, form: str, policy: str | None) -> Any:
    """Create the log, and return the handle that appends to it."""
    options: dict[str, Any] = {"capacity": "32MiB"} if form == "spool" else {"format": form}
    if policy is not None:
        options = {"capacity": SMALL, "policy": policy, "timeout": 0.05}
    if kind == "log":
        return kvspool.create(path, **options)
    return shard.create(path, bits=BITS, **options) if kind == "set" else hub.create(path).create_client("A", bits=BITS, **options)


def opened(path: Path, kind: str) -> Any:
    """Open the log, shard set or hub root."""
    return {"set": shard.open, "hub": hub.open}.get(kind, kvspool.open)(path)


class Fuse:
    """Kills this process after a number of opcodes of kvspool in the `with` block."""

    def __init__(self, opcodes: int) -> None:
        self._left = opcodes

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._step


def work(path: Path, kind: str, options: dict[str, Any], ledger: Ledger, seed: int, *, loses: bool, rest: bool) -> None:
    """Be a worker until the process ends, or with `rest` until there is no task left. loses: records may be overwritten."""
    chance = random.Random(seed)
    handler = Handler(ledger, options.get("lease") is not None, "order" in options, seed)
    with opened(path, kind) as log:
        while True:
            with log.tasks("t", **options) as worker:
                for _ in range(chance.randrange(1, 400)):
                    found = worker.take(chance.choice([1, 1, 5, 50]), wait=1.0 if rest else 0.2, on_gap="yield")
                    tasks = [task for task in found if not isinstance(task, kvspool.Gap)]
                    if len(tasks) < len(found) and not loses:
                        fail(f"records are lost: {found}")
                    for task in tasks:
                        handler.begin(task)
                        if chance.random() < 0.01:
                            time.sleep(0.002)
                        if "order" not in options:
                            continue
                        handler.end(task)
                    for task in tasks if "order" not in options else ():
                        handler.end(task)
                    if rest and not found:
                        return


class Campaign:
    """The workers, and the counts."""

    def __init__(
        self, folder: Path, kind: str, form: str, policy: str | None, workers: int, options: dict[str, Any], seed: int, opcodes: float
    ) -> None:
        self.path = folder / "log"
        self.kind = kind
        self.policy = policy
        self.workers = workers
        self.options = options
        self.opcodes = opcodes  # the part of the workers that are killed after a number of them
        self.chance = random.Random(seed)
        self.ledger = Ledger()
        self.writer = create(self.path, kind, form, policy)
        with opened(self.path, kind) as log:
            log.tasks("t", **options).close()  # otherwise a full log drops records before there is a list
        self.living: dict[int, int] = {}  # processes, and the numbers of their workers
        self.stopped: dict[int, float] = {}  # processes, and when they are to be continued
        self.started = 0
        self.counts = {"records": 0, "killed": 0, "killed at an opcode": 0, "stopped": 0}

    def start(self, *, rest: bool = False) -> int:
        """Start a worker in a process; return its id."""
        self.started += 1
        number, seed = self.started, self.chance.randrange(1 << 30)
        fuse = Fuse(self.chance.randrange(1, MOST_OPCODES)) if not rest and self.chance.random() < self.opcodes else None
        pid = os.fork()
        if pid:
            self.ledger.processes[number] = pid
            self.living[pid] = number
            return pid
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.ledger.number = number
            self.ledger.processes[number] = os.getpid()
            with nullcontext() if fuse is None else fuse:
                work(self.path, self.kind, self.options, self.ledger, seed, loses=self.policy == "overwrite", rest=rest)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def reap(self, pid: int, *, is_killed: bool) -> bool:
        """Note a worker that has ended; return whether it has. Raises AssertionError if it found a violation, or failed."""
        deadline = time.monotonic() + PATIENCE
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if not is_killed:
                return False
            assert time.monotonic() < deadline, f"process {pid} does not end"
            time.sleep(0.0005)
        code = os.waitstatus_to_exitcode(found[1])
        self.ledger.processes[self.living.pop(pid)] = 0
        self.stopped.pop(pid, None)
        assert code in (0, -signal.SIGKILL), f"process {pid} ended with {code}"
        if code:
            self.counts["killed" if is_killed else "killed at an opcode"] += 1
        return True

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.reap(pid, is_killed=True)

    def run(self, seconds: float, strikes: int | None) -> dict[str, int]:
        """Attack the workers for so many seconds, or until so many strikes; return the counts. Raises AssertionError."""
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self.started < MOST_WORKERS - 1 and (strikes is None or self._strikes() < strikes):
                self._append()
                for pid in list(self.living):
                    self.reap(pid, is_killed=False)
                while len(self.living) < self.workers:
                    self.start()
                self._strike()
                time.sleep(self.chance.random() * 0.003)
            struck = dict(self.counts)
            for pid in list(self.living):
                self.kill(pid)
            self.counts = struck
            self._finish()
            _check_end(self.path, self.kind, self.policy, self.ledger, self.counts, self.options["max_deliveries"])
            self.writer.close()
            return self.counts
        finally:
            for pid in self.living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _strikes(self) -> int:
        return self.counts["killed"] + self.counts["killed at an opcode"] + self.counts["stopped"]

    def _append(self) -> None:
        first = self.counts["records"]
        most = 40 if self.policy is None or self.chance.random() < 0.8 else 3000  # more than a small log has room for
        count = min(self.chance.randrange(1, most), MOST - first)
        values = [b"%d" % number for number in range(first, first + count)]
        if self.policy is None:
            self.writer.append_many(values, keys=[b"%d" % (number % KEYS) for number in range(first, first + count)])
            self.counts["records"] += count
            return
        for number in range(first, first + count):
            try:
                self.writer.append(values[number - first], key=b"%d" % (number % KEYS))
            except (SpoolFull, LockTimeout):
                break
            self.counts["records"] += 1

    def _strike(self) -> None:
        """Kill or stop a worker; continue others."""
        now = time.monotonic()
        for pid in [pid for pid, until in self.stopped.items() if now >= until]:
            os.kill(pid, signal.SIGCONT)
            del self.stopped[pid]
        victim = self.chance.choice(list(self.living))
        choice = self.chance.random()
        if choice < 0.5:
            self.kill(victim)
        elif choice < 0.8 and victim not in self.stopped:
            os.kill(victim, signal.SIGSTOP)
            self.stopped[victim] = now + self.chance.random() * 0.05
            self.counts["stopped"] += 1

    def _finish(self) -> None:
        """Let one worker handle the rest."""
        pid = self.start(rest=True)
        deadline = time.monotonic() + PATIENCE
        while not self.reap(pid, is_killed=False):
            assert time.monotonic() < deadline, f"the rest is not handled within {PATIENCE:g} s"
            time.sleep(0.01)


def campaign(
    seconds: float,
    kind: str,
    form: str,
    workers: int,
    lease: float | None,
    is_ordered: bool,
    seed: int,
    strikes: int | None = None,
    policy: str | None = None,
    deliveries: int | None = None,
    opcodes: float = 0.5,
) -> dict[str, int]:
    """Run the campaign; return counts. Raises AssertionError if a promise is broken."""
    options: dict[str, Any] = {"lease": lease, "max_deliveries": deliveries, "window": 4096} | ({"order": "key"} if is_ordered else {})
    folder = Path(tempfile.mkdtemp(prefix="tasks-", dir="/dev/shm"))
    try:
        return Campaign(folder, kind, form, policy, workers, options, seed, opcodes).run(seconds, strikes)
    finally:
        shutil.rmtree(folder)


def _check_end(path: Path, kind: str, policy: str | None, ledger: Ledger, counts: dict[str, int], deliveries: int | None) -> None:
    """Check that each record was acknowledged, or is a dead letter once, or was overwritten."""
    with opened(path, kind) as log:
        states = log.task_stats()
        assert all(one.low == one.next for one in states), states
        letters = log.dead_letters("t")
        least = log.extent()[0] if policy == "overwrite" else 0
    dead = [int(letter.value) for letter in letters]
    assert len(dead) == len(set(dead)), "a record is in the dead letters twice"
    often = {int(letter.value) for letter in letters if deliveries is not None and letter.deliveries >= deliveries}
    buried = set(dead)
    counts["dead"] = len(dead)
    counts["again"] = sum(ledger.get(record, GIVEN) > 1 for record in range(counts["records"]))
    counts["lost"] = 0
    for record in range(counts["records"]):
        if ledger.get(record, REJECTED) == DONE:
            assert record in buried, f"record {record} was rejected, and is not in the dead letters"
        if record in buried:
            assert ledger.get(record, REJECTED) or record in often, f"record {record} is in the dead letters, and was not rejected"
        elif not ledger.get(record, ENDED):
            assert record < least, f"record {record} was forgotten"
            counts["lost"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--kind", choices=("log", "set", "hub"), default="log")
    parser.add_argument("--format", choices=("spool", "kvj", "sej"), default="spool")
    parser.add_argument("--policy", choices=("overwrite", "block", "raise"), help="of a single small spool (default: a large one)")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--lease", type=float)
    parser.add_argument("--deliveries", type=int, help="max_deliveries (default: none)")
    parser.add_argument("--order", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--opcodes", type=float, default=0.5, help="part of the workers that are killed at one (default: %(default)s)")
    one = parser.parse_args()
    if one.policy is not None and (one.kind, one.format) != ("log", "spool"):
        parser.error("--policy is for --kind log --format spool")
    print(one, flush=True)
    print(
        campaign(
            *(one.seconds, one.kind, one.format, one.workers, one.lease, one.order, one.seed),
            policy=one.policy,
            deliveries=one.deliveries,
            opcodes=one.opcodes,
        )
    )


if __name__ == "__main__":
    main()
