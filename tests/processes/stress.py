"""Writers and readers at once on a small ring, killed, stopped and restarted at random, and an audit of every sequence at the end.

    python stress.py DIRECTORY SEED SECONDS [POLICY]

Writers and durable readers are killed and begin a new life, or are stopped for a while at any point. With the policy "block" a
durable reader must get every record; with "overwrite" exact Gaps.

Run in a process of its own so that the environment chooses the twin. It prints the result as JSON, or ends with an AssertionError.

The *ledger* is kept outside the log. A writer reports through a pipe which records it means to append, before an append, and their
sequences, after it. So the writer of every record in the log is known, and the sequence of every acknowledged one. A durable reader
notes the records that it got before it commits, and then the commit.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import kvspool
from kvspool import Gap
from kvspool.errors import ReaderBusy
from kvspool.kernel import frames
from kvspool.spool import Reader

WRITERS = 4
READERS = 3
DURABLE = 2
CAPACITY = 16384
END = 255  # type of the last record

INTENT = 1  # a writer is about to append records `first` .. `first + count - 1` of its life
ACKNOWLEDGED = 2  # and got the sequences from `sequence` on for them
ENTRY = struct.Struct("<IIQQQ")  # kind, life, first, count, sequence
ITEM = struct.Struct("<QQqII")  # first sequence, last sequence, timestamp or one of the following, life, number in it
GAP = -1
BEGIN = -2  # a life of a durable reader begins at this sequence
COMMITTING = -3  # it is about to commit it
COMMITTED = -4  # and has
BUSY = -5  # the slot of its killed predecessor was not free at once


def payload(life: int, number: int) -> bytes:
    """Return the value of one record: who wrote it, which one it is, and bytes that follow from both."""
    noise = random.Random(life << 32 | number)
    return struct.pack("<II", life, number) + noise.randbytes(noise.randrange(0, 300))


def write(path: Path, life: int, seed: int, pipe: int) -> None:
    """Append until killed or told to stop by SIGTERM, and keep the ledger."""
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    noise = random.Random(seed)
    number = 0
    log = kvspool.open(path, timeout=60)
    target = log.writer() if life % 2 else log  # every other one by a writer object
    while not stopped:
        count = noise.choice((1, 1, 1, 2, 5, 40))
        os.write(pipe, ENTRY.pack(INTENT, life, number, count, 0))
        values = [payload(life, number + at) for at in range(count)]
        if count == 1:
            sequence = target.append(values[0], key=b"%d" % life)
        else:
            got = target.append_many(values, keys=[b"%d" % life] * count)
            assert len(got) == count
            sequence = got.start
        os.write(pipe, ENTRY.pack(ACKNOWLEDGED, life, number, count, sequence))
        number += count
        if noise.random() < 0.02:
            log.close()
            log = kvspool.open(path, timeout=60)
            target = log.writer() if life % 2 else log


def read(path: Path, name: int, result: Path) -> None:
    """Account for every sequence from 0 to the last record; each reader has its own manner."""
    noise = random.Random(name)
    with open(result, "wb", buffering=1 << 20) as out:
        for item in _items(kvspool.open(path), name, noise):
            if isinstance(item, Gap):
                assert item.reason == "overrun", item
                out.write(ITEM.pack(item.first, item.last, GAP, 0, 0))
                continue
            if item.type == END:
                out.write(ITEM.pack(item.sequence, item.sequence, item.timestamp, 0, 0))
                return
            life, number = struct.unpack_from("<II", item.value)
            assert item.value == payload(life, number), f"reader {name}: sequence {item.sequence} has bytes that no writer wrote"
            assert item.key == b"%d" % life
            out.write(ITEM.pack(item.sequence, item.sequence, item.timestamp, life, number))


def consume(path: Path, name: int, seed: int, result: Path) -> None:
    """Be a durable reader for one life: take some records, write them down, commit, until the last record is committed."""
    noise = random.Random(seed)
    log = kvspool.open(path, timeout=60)
    out = os.open(result, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open_durable(log, name, out) as reader:
        os.write(out, ITEM.pack(reader.sequence, 0, BEGIN, 0, 0))
        while True:
            entries, is_last = [], False
            for item in reader.follow(timeout=1, limit=noise.choice((1, 3, 20)), on_gap="yield"):
                if isinstance(item, Gap):
                    assert item.reason == "overrun", item
                    entries.append(ITEM.pack(item.first, item.last, GAP, 0, 0))
                    continue
                is_last = item.type == END
                life, number = (0, 0) if is_last else struct.unpack_from("<II", item.value)
                assert is_last or item.value == payload(life, number), f"sequence {item.sequence} has bytes that no writer wrote"
                entries.append(ITEM.pack(item.sequence, item.sequence, item.timestamp, life, number))
            os.write(out, b"".join(entries) + ITEM.pack(reader.sequence, 0, COMMITTING, 0, 0))
            os.write(out, ITEM.pack(reader.commit(), 0, COMMITTED, 0, 0))
            if is_last:
                return


def open_durable(log: kvspool.Spool, name: int, out: int) -> Reader:
    """Open the durable reader of a killed process. Its slot is freed a moment later if another process examines its descriptors."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return log.reader(f"durable {name}")
        except ReaderBusy:
            os.write(out, ITEM.pack(0, 0, BUSY, 0, 0))
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _items(log: kvspool.Spool, name: int, noise: random.Random) -> Iterator[kvspool.Record | Gap]:
    if name == 0:  # as fast as it can
        yield from log.follow(0, on_gap="yield")
    elif name == 1:  # lags now and then
        for item in log.follow(0, on_gap="yield"):
            yield item
            if noise.random() < 0.001:
                time.sleep(noise.random() * 0.05)
    else:  # starts again at the next sequence each time
        expected = 0
        while True:
            for item in log.read(expected, limit=noise.randrange(1, 600), on_gap="yield"):
                expected = (item.last if isinstance(item, Gap) else item.sequence) + 1
                yield item
                if noise.random() < 0.005:
                    assert log.stats().next_sequence >= expected


def spawn(function: Callable[..., None], *args: object) -> int:
    """Run a function in a forked child; its exit code is 0 if it returned."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Ledger:
    """The reports of every writer, life by life."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.meant: dict[int, tuple[int, int]] = {}  # the last intent of a life: first number, count
        self.acknowledged: dict[int, tuple[int, int]] = {}  # sequence: life, number
        self.numbers: dict[int, int] = {}  # of a life: how many records were acknowledged

    def listen(self, pipe: int) -> None:
        self.selector.register(pipe, selectors.EVENT_READ)

    def take(self, timeout: float) -> None:
        """Note the entries in the pipes; an entry is one atomic write."""
        for key, _ in self.selector.select(timeout):
            data = os.read(key.fd, ENTRY.size * 1000)
            if not data:
                self.selector.unregister(key.fd)
                os.close(key.fd)
            for kind, life, first, count, sequence in ENTRY.iter_unpack(data):
                if kind == INTENT:
                    assert first == self.numbers.get(life, 0)
                    self.meant[life] = (first, count)
                    continue
                assert self.meant[life] == (first, count)
                self.numbers[life] = first + count
                for at in range(count):
                    assert sequence + at not in self.acknowledged, f"sequence {sequence + at} was given twice"
                    self.acknowledged[sequence + at] = (life, first + at)

    def is_empty(self) -> bool:
        return not self.selector.get_map()


class Herd:
    """The processes that are killed, stopped and started again."""

    def __init__(self, path: Path, noise: random.Random, ledger: Ledger, results: list[Path]) -> None:
        self.path = path
        self.noise = noise
        self.ledger = ledger
        self.results = results
        self.lives = 0
        self.stops = 0
        self.writers: dict[int, int] = {}  # process: life
        self.durable: dict[int, int] = {}  # process: name
        self.stopped: dict[int, float] = {}  # process: when it continues
        self.dead_writers: set[int] = set()  # lives
        self.dead_readers = 0

    def begin_writer(self) -> None:
        self.lives += 1
        read_end, write_end = os.pipe()
        self.writers[spawn(write, self.path, self.lives, self.noise.randrange(1 << 30), write_end)] = self.lives
        os.close(write_end)
        self.ledger.listen(read_end)

    def begin_durable(self, name: int) -> None:
        self.durable[spawn(consume, self.path, name, self.noise.randrange(1 << 30), self.results[name])] = name

    def strike(self) -> None:
        """Kill a process, or stop it for a while."""
        victim = self.noise.choice([*self.writers, *self.durable])
        if self.noise.random() < 0.5:
            os.kill(victim, signal.SIGSTOP)
            self.stops += victim not in self.stopped
            self.stopped[victim] = time.monotonic() + self.noise.random() * 0.05
            return
        os.kill(victim, signal.SIGKILL)
        assert os.waitpid(victim, 0)[1] == signal.SIGKILL
        self.stopped.pop(victim, None)
        if victim in self.writers:
            self.dead_writers.add(self.writers.pop(victim))
            self.begin_writer()
        else:
            self.dead_readers += 1
            self.begin_durable(self.durable.pop(victim))

    def has_struck(self, often: int) -> bool:
        """Return whether writers and durable readers were killed, and processes stopped, so often; a busy machine needs longer."""
        return min(len(self.dead_writers), self.dead_readers, self.stops) >= often

    def let_go_on(self, now: float) -> None:
        for process in [process for process, until in self.stopped.items() if until <= now]:
            os.kill(process, signal.SIGCONT)
            del self.stopped[process]


def main(directory: Path, seed: int, seconds: float, policy: str = "overwrite") -> dict[str, object]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until a writer is ready for the signal to stop
    noise = random.Random(seed)
    path = directory / "log"
    with kvspool.create(path, capacity=CAPACITY, policy=policy) as log:
        for name in range(DURABLE):
            log.reader(f"durable {name}").close()
    results = [directory / f"reader{name}" for name in range(READERS)]
    committed = [directory / f"durable{name}" for name in range(DURABLE)]
    readers = [spawn(read, path, name, results[name]) for name in range(READERS)]
    ledger = Ledger()
    herd = Herd(path, noise, ledger, committed)
    for _ in range(WRITERS):
        herd.begin_writer()
    for name in range(DURABLE):
        herd.begin_durable(name)
    deadline = time.monotonic() + seconds
    strike_at = time.monotonic() + 0.1
    while time.monotonic() < deadline or not herd.has_struck(5) or len(ledger.acknowledged) < 1000:
        ledger.take(0.005)
        herd.let_go_on(time.monotonic())
        if time.monotonic() >= strike_at:
            herd.strike()
            strike_at = time.monotonic() + noise.random() * 0.03
    herd.let_go_on(float("inf"))
    for writer in herd.writers:
        os.kill(writer, signal.SIGTERM)
    while not ledger.is_empty():
        ledger.take(1)
    for writer in herd.writers:
        assert os.waitpid(writer, 0)[1] == 0
    log = kvspool.open(path, timeout=60)
    last = log.append(b"", type=END)
    for reader in [*readers, *herd.durable]:
        assert os.waitpid(reader, 0)[1] == 0
    found = audit(ledger, herd.dead_writers, last, results)
    gaps, busy = zip(*(audit_durable(result, last, ledger, policy) for result in committed), strict=True)
    return found | {
        "gaps of durable readers": sum(gaps),
        "busy slots": sum(busy),
        "kills": len(herd.dead_writers),
        "kills of durable readers": herd.dead_readers,
        "stops": herd.stops,
        "twin": frames.TWIN,
        "kept": log.stats().records,
    }


def audit_durable(result: Path, last: int, ledger: Ledger, policy: str) -> tuple[int, int]:
    """Follow a durable reader through all its lives: each continues exactly at the last commit, or at the one that it was killed in.

    Return how many Gaps it got, and how often its slot was still busy.
    """
    expected = committed = meant = gaps = busy = 0
    for first, to, when, life, number in ITEM.iter_unpack(result.read_bytes()):
        if when == BUSY:
            busy += 1
            continue
        if when == BEGIN:
            assert first in (committed, meant), f"{result.name}: began at {first}, having committed {committed}"
            expected = committed = meant = first
            continue
        assert first == expected, f"{result.name}: {first} came where {expected} was due"
        if when == COMMITTING:
            meant = first
        elif when == COMMITTED:
            committed = first
        else:
            expected = to + 1
            gaps += when == GAP
            if when != GAP and first in ledger.acknowledged:
                assert ledger.acknowledged[first] == (life, number)
    assert committed == last + 1, f"{result.name} accounts for {committed} of {last + 1}"
    assert policy == "overwrite" or not gaps, f"{result.name} lost records that it had yet to commit"
    return gaps, busy


def audit(ledger: Ledger, killed: set[int], last: int, results: list[Path]) -> dict[str, object]:
    """Compare the acknowledged records, the records in the log, and the ones that each reader accounts for."""
    # Stored but not acknowledged: only records that a writer was about to append when it was killed, from the first of its batch on.
    pending = {
        life: ledger.meant[life]
        for life in killed
        if life in ledger.meant and ledger.meant[life][0] == ledger.numbers.get(life, 0)
    }
    unacknowledged = [sequence for sequence in range(last) if sequence not in ledger.acknowledged]
    assert len(unacknowledged) <= sum(count for _, count in pending.values())
    assert all(sequence < last for sequence in ledger.acknowledged)
    assert len(ledger.acknowledged) + len(unacknowledged) == last

    seen: dict[int, tuple[int, int]] = {}
    gaps = records = 0
    for result in results:
        expected, timestamp = 0, 0
        for first, to, when, life, number in ITEM.iter_unpack(result.read_bytes()):
            assert first == expected, f"{result.name}: {first} came where {expected} was due"
            assert to >= first
            expected = to + 1
            if when < 0:
                gaps += 1
                continue
            assert when >= timestamp
            timestamp = when
            if first == last:
                break
            records += 1
            assert seen.setdefault(first, (life, number)) == (life, number), f"readers disagree on sequence {first}"
        assert expected == last + 1, f"{result.name} accounts for {expected} of {last + 1}"

    recovered: dict[int, list[int]] = {}
    for sequence, (life, number) in sorted(seen.items()):
        if sequence in ledger.acknowledged:
            assert ledger.acknowledged[sequence] == (life, number), f"sequence {sequence} holds another record than was acknowledged"
        else:
            recovered.setdefault(life, []).append(number)
    for life, numbers in recovered.items():
        first, count = pending[life]
        assert set(numbers) <= set(range(first, first + count))
        assert numbers == sorted(set(numbers))
    return {
        "appended": last,
        "acknowledged": len(ledger.acknowledged),
        "unacknowledged": len(unacknowledged),
        "read": records,
        "gaps": gaps,
        "seen": len(seen),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])))
