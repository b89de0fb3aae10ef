#!/usr/bin/env python3
"""A campaign against groups: members are killed, stopped and continued, leave and join, while records are appended.

    python tools/faults/groups.py SECONDS [--kind log|set|hub] [--format spool|kvj|sej] [--members N] [--silence S] [--seed N]

The ledger is memory outside of the logs. Each member notes there when it begins to handle a record of a shard and when it is done, and
after each commit the committed position. A member ends with an error, and so does the campaign:

- if a living member handles a record of the shard at that moment (without --silence: a member without its shards may still run);
- if a record is skipped, or comes out of order;
- if a record is handled again although the shard's last owner has neither ended nor been silent;
- if its shard's position is lower than a committed one.

At the end all members are killed, a last one handles the rest, and every record must have been handled and committed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import hub
import kvspool
import shard
from kvspool.errors import Revoked

INSIDE, HIGH, COMMITTED, OWNER, AGAIN, WORDS = range(6)  # words of a shard
BITS = 3
PATIENCE = 60.0  # seconds until an ended process must be gone, and until the rest must be handled
VALUE = struct.Struct("<Q")
VIOLATION = 77  # exit code


class Ledger:
    """The notes of the members, in shared memory."""

    def __init__(self, shards: int) -> None:
        self.words = memoryview(mmap.mmap(-1, 8 * WORDS * shards + 8 * 8)).cast("Q")
        self.shards = shards

    def get(self, shard: int, word: int) -> int:
        return self.words[shard * WORDS + word]

    def put(self, shard: int, word: int, value: int) -> None:
        self.words[shard * WORDS + word] = value


class Handler:
    """A member's handler, which checks the promises at each record."""

    def __init__(self, ledger: Ledger, is_strict: bool) -> None:
        self.ledger = ledger
        self.is_strict = is_strict
        self.last: dict[int, int] = {}  # the record handled last of each owned shard
        self.pid = os.getpid()

    def handle(self, index: int, sequence: int) -> None:
        """Handle a record; raises AssertionError for a broken promise."""
        ledger, pid = self.ledger, self.pid
        other = ledger.get(index, INSIDE)
        if self.is_strict and other not in (0, pid):
            wait_for_end(other, lambda: ledger.get(index, INSIDE) == other, f"shard {index}, record {sequence}")
        ledger.put(index, INSIDE, pid)
        high = ledger.get(index, HIGH)  # handled records
        last = self.last.get(index)
        if last is not None:
            assert sequence == last + 1, f"shard {index}: record {sequence} after {last}"
        elif sequence < high:
            before = ledger.get(index, OWNER)
            if self.is_strict and before != pid:
                wait_for_end(before, lambda: True, f"shard {index}: record {sequence} is handled again, {high} are")
            ledger.put(index, AGAIN, ledger.get(index, AGAIN) + high - sequence)
        if self.is_strict or last is None:
            assert sequence <= high, f"shard {index}: record {high} was skipped, {sequence} came"
            assert sequence >= ledger.get(index, COMMITTED), f"shard {index}: record {sequence} was committed"
        self.last[index] = sequence
        ledger.put(index, OWNER, pid)
        if sequence == high:
            ledger.put(index, HIGH, high + 1)
        if self.is_strict:
            inside = ledger.get(index, INSIDE)
            assert inside == pid, f"shard {index}: processes {inside} and {pid} handle its records"
        ledger.put(index, INSIDE, 0)

    def committed(self, positions: dict[Any, int]) -> None:
        """Note committed positions of shards that this member still owns."""
        for index, sequence in positions.items():
            if sequence > self.ledger.get(index, COMMITTED):
                self.ledger.put(index, COMMITTED, sequence)


def wait_for_end(pid: int, is_so: Any, words: str) -> None:
    """Wait until a process is gone that must have been killed: the kernel frees its locks a moment before."""
    deadline = time.monotonic() + PATIENCE
    while is_alive(pid):
        assert is_so(), f"{words}: process {pid} lives and handles this shard, too"
        assert time.monotonic() < deadline, f"{words}: process {pid} lives"
        time.sleep(1e-4)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Subject:
    """The log, shard set or hub root under attack."""

    def __init__(self, folder: Path, kind: str, format: str) -> None:
        self.path, self.kind = folder / "subject", kind
        capacity = "64MiB" if kind == "log" else "16MiB"
        options: dict[str, Any] = {"capacity": capacity} if format == "spool" else {"format": format}
        if kind == "log":
            self.writer: Any = kvspool.create(self.path, **options)
        elif kind == "set":
            self.writer = shard.create(self.path, bits=BITS, **options)
        else:
            self.writer = hub.create(self.path).create_client("A", bits=BITS, **options)
        self.shards = 1 if kind == "log" else 1 << BITS

    def open(self) -> Any:
        return {"log": kvspool.open, "set": shard.open, "hub": hub.open}[self.kind](self.path)

    def index(self, key: Any) -> int:
        return key[1] if isinstance(key, tuple) else key

    def append(self, count: int, noise: random.Random) -> None:
        values = [VALUE.pack(at) for at in range(count)]
        if self.kind == "log":
            self.writer.append_many(values)
        else:
            self.writer.append_many(values, keys=[noise.randbytes(4) for _ in values])

    def ends(self) -> list[int]:
        """Return how many records each shard has."""
        return [self.writer.end()] if self.kind == "log" else [end for _, end in self.writer.extent().values()]


def member(subject: Subject, ledger: Ledger, silence: float | None, seed: int) -> None:
    """Join, and handle records until this process is killed, or leaves by chance."""
    noise = random.Random(seed)
    handler = Handler(ledger, silence is None)
    every = noise.choice((1, 1, 7, 50)) if seed else 50
    left = noise.choice((200, 2000, 1 << 30)) if seed else 1 << 30

    with subject.open() as log, log.group("workers", max_silence=silence, timeout=PATIENCE) as one:
        owned: frozenset[Any] = frozenset()
        count = 0
        for record in follow(one):
            if one.assigned != owned:
                for key in owned - one.assigned:
                    handler.last.pop(subject.index(key), None)
                owned = one.assigned
            if record is not None:
                index = 0 if subject.kind == "log" else record.shard
                handler.handle(index, record.sequence)
                count += 1
            if record is None or count % every == 0:
                try:
                    handler.committed({subject.index(key): at for key, at in one.commit().items()})
                except Revoked:
                    handler.last.clear()
                if one.assigned != owned:
                    for key in owned - one.assigned:
                        handler.last.pop(subject.index(key), None)
                    owned = one.assigned
            if count >= left:
                break


def follow(one: Any) -> Any:
    """Yield the member's records, and None whenever there is none for a moment."""
    while True:
        yield from one.follow(timeout=0.02)
        yield None


class Campaign:
    """The members, and the counts."""

    def __init__(self, folder: Path, kind: str, format: str, members: int, silence: float | None, seed: int) -> None:
        self.subject = Subject(folder, kind, format)
        self.ledger = Ledger(self.subject.shards)
        self.noise = random.Random(seed)
        self.silence = silence
        self.members = members
        self.living: dict[int, float] = {}  # process: when it is to be continued; 0: it runs
        self.counts = dict.fromkeys(("records", "joined", "killed", "stopped", "left", "again"), 0)

    def begin(self, *, is_last: bool = False) -> None:
        seed = 0 if is_last else self.noise.randrange(1, 1 << 30)
        pid = os.fork()
        if pid == 0:
            code = VIOLATION
            try:
                member(self.subject, self.ledger, self.silence, seed)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        self.living[pid] = 0.0
        self.counts["joined"] += 1

    def reap(self) -> None:
        """Count members that have left; raise if one has found a broken promise."""
        while self.living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            self.living.pop(pid, None)
            if status == 0:
                self.counts["left"] += 1
            elif not os.WIFSIGNALED(status):
                raise AssertionError(f"member {pid} ended with status {status}")

    def strike(self) -> None:
        """Kill, stop or continue a member."""
        now = time.monotonic()
        for pid, until in list(self.living.items()):
            if until and now >= until:
                os.kill(pid, signal.SIGCONT)
                self.living[pid] = 0.0
        if not self.living:
            return
        pid = self.noise.choice(list(self.living))
        if self.noise.random() < 0.5:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self.living[pid]
            self.counts["killed"] += 1
        elif not self.living[pid]:
            os.kill(pid, signal.SIGSTOP)
            longest = 0.1 if self.silence is None or self.noise.random() < 0.7 else 2.5 * self.silence
            self.living[pid] = now + self.noise.random() * longest
            self.counts["stopped"] += 1

    def run(self, seconds: float, strikes: int = 1 << 62) -> dict[str, int]:
        """Attack the members for so many seconds, or until so many strikes; return the counts. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        try:
            done = 0
            while time.monotonic() < deadline and done < strikes:
                self.reap()
                while len(self.living) < self.members:
                    self.begin()
                self.subject.append(self.noise.choice((1, 10, 200)), self.noise)
                self.strike()
                done += 1
                time.sleep(self.noise.random() * 0.02 * max(1.0, self.members / 5))
            self.stop()
            self.finish()
        finally:
            self.stop()
        self.counts["records"] = sum(self.subject.ends())
        self.counts["again"] = sum(self.ledger.get(at, AGAIN) for at in range(self.subject.shards))
        return self.counts

    def stop(self) -> None:
        self.reap()
        for pid in list(self.living):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self.living[pid]

    def finish(self) -> None:
        """Let one member handle the rest, and check that all was handled and committed."""
        self.begin(is_last=True)
        ends = self.subject.ends()
        before, deadline = -1, 0.0
        while (found := [self.ledger.get(at, COMMITTED) for at in range(self.subject.shards)]) != ends:
            self.reap()
            assert self.living, "the last member has left"
            if sum(found) != before:
                before, deadline = sum(found), time.monotonic() + PATIENCE
            assert time.monotonic() < deadline, f"{ends} records, but handled and committed: {list(self.ledger.words)}"
            time.sleep(0.01)
        assert [self.ledger.get(at, HIGH) for at in range(self.subject.shards)] == ends


def campaign(
    seconds: float, kind: str, format: str, members: int, silence: float | None, seed: int, strikes: int = 1 << 62
) -> dict[str, int]:
    """Run a campaign in a new folder; see `Campaign.run`."""
    folder = Path(tempfile.mkdtemp(prefix="kvspool-groups-"))
    try:
        return Campaign(folder, kind, format, members, silence, seed).run(seconds, strikes)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--kind", choices=("log", "set", "hub"), default="set")
    parser.add_argument("--format", choices=("spool", "kvj", "sej"), default="spool")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--silence", type=float, help="max_silence of the members, in seconds, at least 1")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(arguments)
    print(campaign(**vars(arguments)))


if __name__ == "__main__":
    main()
