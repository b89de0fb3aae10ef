#!/usr/bin/env python3
"""A campaign against the append lock: writers of one ring are killed, most of them while they own the lock.

    python tools/faults/owners.py KILLS [--owners N] [--writers N] [--seconds S] [--seed N]

It ends after KILLS writers were killed, of which at least N owned the lock at that moment. Most victims are the owners that the lock's word
names: they are stopped, the word is read again, and then they are killed. Others are killed at any point; some owners are stopped and
continued. The word of a stopped owner is certain: no other process takes the lock from it.

The ledger is memory that the writers share with the campaign: each stores the sequence of each of its records there. After every hundred
kills all writers have ended, and the log is audited: every acknowledged record is there, with its sequence; each record of a writer is
there once and in order; the log verifies as sound; and an append gets the lock at once. A writer that waits for the lock for longer
than PATIENCE ends with an error, and so does the campaign.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import kvspool
from kvspool.engine import locks
from kvspool.kernel import frames as frames_loops
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import FrameWriter
from kvspool.kernel.lock import AppendLock
from kvspool.kernel.lock_py import OWNER
from kvspool.spool.spool_files import SpoolFiles

CAPACITY = 64 << 20
MOST = 4000  # records of one life: what a round appends fits into the ring
SIZE = 8 * (MOST + 2)  # bytes of a ledger: slot, number meant, and a sequence + 1 for each record
ROUND = 100  # kills between two audits
APPENDS = 25  # between two rests
WHOLE = 10  # one life of so many opens the log itself
REST = 3e-3  # seconds that a writer rests at most after so many appends
PATIENCE = 60.0  # seconds that a writer waits for the lock
Append = Callable[[list[bytes]], int]
NAME = struct.Struct("<II")  # of a record: life, number


class Writer:
    """A process that appends until it is killed, and its ledger."""

    def __init__(self, files: SpoolFiles, life: int, ledger: mmap.mmap, seed: int) -> None:
        self.life = life
        self.words = memoryview(ledger).cast("Q")
        ledger[:] = _NOTHING
        self.is_dead = False
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.write(files, random.Random(seed))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def write(self, files: SpoolFiles, noise: random.Random) -> None:
        """Append one record or several at a time, and write down which sequences they got."""
        words, life = self.words, self.life
        counts = noise.choices((1, 1, 1, 1, 3, 10), k=APPENDS)
        number = 0
        append, lock = opened(files.path) if life % WHOLE == 0 else inherited(files)
        while number + 10 * APPENDS <= MOST:
            for count in counts:
                values = [NAME.pack(life, number + at).ljust(100, b".") for at in range(count)]
                words[1] = number + count
                first = append(values)
                for at in range(count):
                    words[2 + number + at] = first + at + 1
                number += count
                if not words[0]:
                    words[0] = lock.own & OWNER
            time.sleep(noise.random() * REST)
        signal.pause()

    @property
    def slot(self) -> int:
        """Return the bits of the lock's word that name this writer; 0 before its first append."""
        return self.words[0]

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """Kill the writer, and let its process be there no more."""
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        self.is_dead = True
        assert status == signal.SIGKILL, f"writer {self.life} ended by itself: {status}"

    def read(self) -> tuple[int, list[int]]:
        """Return how many records the writer meant to append, and the sequences that were acknowledged."""
        sequences = self.words[2:].tolist()
        return self.words[1], [sequence - 1 for sequence in sequences[: sequences.index(0) if 0 in sequences else MOST]]


_NOTHING = bytes(SIZE)


def opened(path: Path) -> tuple[Append, AppendLock]:
    """Open the log, and return what appends values and returns the first one's sequence; and the lock."""
    log = kvspool.open(path, timeout=PATIENCE)
    files = log._files
    assert files is not None
    return lambda values: log.append(values[0]) if len(values) == 1 else log.append_many(values).start, files.append_lock


def inherited(files: SpoolFiles) -> tuple[Append, AppendLock]:
    """As `opened`, through the parent's files: to open the log takes longer than a writer lives. The lock is this process's own."""
    writer = files.writer(struct.pack("<6Q", 0, os.getpid(), os.getpid(), 0, 0, 0))

    def put(values: list[bytes], _: FrameWriter) -> int:
        first = writer.begin()
        writer.put_many(None, values, 0, bytes(len(values)), -1)
        writer.publish()
        return first

    def append(values: list[bytes]) -> int:
        def attempt() -> int | None:
            sequence = writer.append(None, values[0], 0, 0, -1)
            assert sequence in (frames.BUSY, abs(sequence))
            return sequence if sequence >= 0 else None

        once = attempt if len(values) == 1 else partial(writer.locked, partial(put, values))
        first: int = locks.wait_for(once, PATIENCE, lambda: "another writer", partial(locks.rest, writer.lock))
        return first

    return append, writer.lock


class Campaign:
    """A log, its writers, and the counts."""

    def __init__(self, path: Path, writers: int, seed: int) -> None:
        self.path = path
        self.noise = random.Random(seed)
        self.lives = 0
        self.next = 0  # the first sequence that was not audited
        self.dead: dict[int, tuple[int, list[int]]] = {}  # life: what it meant and what was acknowledged, since the last audit
        self.counts = dict.fromkeys(("killed", "owners", "stopped and continued", "acknowledged", "unacknowledged", "audits"), 0)
        kvspool.create(path, capacity=CAPACITY).close()
        self.files = SpoolFiles(path)
        self.control = self.files.control.cast("Q")
        self.ledgers = [mmap.mmap(-1, SIZE) for _ in range(writers)]
        self.writers: list[Writer] = []

    def run(self, kills: int, owners: int, seconds: float) -> dict[str, int]:
        """Kill so many writers, so many of them owners of the lock, or for so many seconds at most; return what was counted."""
        deadline = time.monotonic() + seconds
        try:
            while (self.counts["killed"] < kills or self.counts["owners"] < owners) and time.monotonic() < deadline:
                self.writers = [self.begin(ledger) for ledger in self.ledgers]
                for _ in range(ROUND):
                    self.strike()
                while self.writers:
                    self.end(self.writers[-1])
                    self.writers.pop()
                self.audit()
        finally:
            for writer in self.writers:
                if not writer.is_dead:
                    writer.kill()
        return self.counts

    def begin(self, ledger: mmap.mmap) -> Writer:
        self.lives += 1
        return Writer(self.files, self.lives, ledger, self.noise.randrange(1 << 30))

    def owner(self) -> Writer | None:
        """Return the writer that the word of the lock names."""
        slot = self.control[frames.LOCK] & OWNER
        return next((writer for writer in self.writers if slot and writer.slot == slot), None)

    def victim(self) -> Writer:
        """Wait for a writer that has appended, and return it: the owner of the lock most of the time."""
        is_aimed = self.noise.random() < 0.8
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ready = [writer for writer in self.writers if writer.slot]
            found = self.owner() if is_aimed else None
            if found is not None or (ready and not is_aimed):
                return found or self.noise.choice(ready)
            is_aimed = is_aimed and self.noise.random() < 0.99  # all may have come to their end
            time.sleep(2e-5)
        raise AssertionError(f"no writer got the lock within {PATIENCE:g} s")

    def strike(self) -> None:
        """Kill a writer, and begin another one in its place."""
        victim = self.victim()
        if self.noise.random() < 0.8:
            victim.stop()
            if self.noise.random() < 0.05:
                self.counts["stopped and continued"] += 1
                os.kill(victim.pid, signal.SIGCONT)
        at = self.writers.index(victim)
        self.end(victim)
        self.writers[at] = self.begin(self.ledgers[at])

    def end(self, writer: Writer) -> None:
        """Kill a writer, and keep what its ledger says."""
        slot = writer.slot
        is_stopped = process_state(writer.pid) == "T"
        owned = bool(slot) and self.control[frames.LOCK] & OWNER == slot
        writer.kill()
        # A stopped owner stays the owner; of another one, only a word that still names it after its end proves that it was.
        if owned and not is_stopped:
            owned = self.control[frames.LOCK] & OWNER == slot
        self.counts["killed"] += 1
        self.counts["owners"] += owned
        self.dead[writer.life] = writer.read()

    def audit(self) -> None:
        """Compare the log with the ledgers; all writers are dead."""
        seen = dict.fromkeys(self.dead, 0)
        with kvspool.open(self.path, timeout=0) as log:
            end = log.append(NAME.pack(0, 0))
            for sequence, record in enumerate(log.read(self.next), self.next):
                assert record.sequence == sequence, f"{record.sequence} came where {sequence} was due"
                life, number = NAME.unpack_from(record.value)
                if life == 0:
                    continue
                assert number == seen[life], f"record {number} of writer {life} came where {seen[life]} was due"
                seen[life] = number + 1
                acknowledged = self.dead[life][1]
                if number < len(acknowledged):
                    assert acknowledged[number] == sequence, f"record {number} of writer {life} has another sequence than was returned"
            assert sequence == end
            report = log.verify()
            assert report.is_sound, report
        for life, (meant, acknowledged) in self.dead.items():
            right = f"{len(acknowledged)} to {meant}"
            assert len(acknowledged) <= seen[life] <= meant, f"{seen[life]} records of writer {life} are there, not {right}"
            self.counts["acknowledged"] += len(acknowledged)
            self.counts["unacknowledged"] += seen[life] - len(acknowledged)
        self.next = end + 1
        self.dead.clear()
        self.counts["audits"] += 1


def process_state(pid: int) -> str:
    """Return the letter that the kernel has for the state of a process."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def campaign(kills: int, owners: int, writers: int = 4, seconds: float = float("inf"), seed: int = 1) -> dict[str, int]:
    """Run the campaign on a log of its own; return what was counted. AssertionError for a record that is lost or there twice."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        return Campaign(folder / "log", writers, seed).run(kills, owners, seconds)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int)
    parser.add_argument("--owners", type=int, default=0, help="how many of them at least must own the lock (default: a tenth)")
    parser.add_argument("--writers", type=int, default=4, help="writers at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the end, whatever was reached")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    counts = campaign(options.kills, options.owners or options.kills // 10, options.writers, options.seconds, options.seed)
    said = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    print(f"{frames_loops.TWIN}, {time.monotonic() - began:.0f} s: {said} - 0 violations", flush=True)


if __name__ == "__main__":
    main()
