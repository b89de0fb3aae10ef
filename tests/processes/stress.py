"""Writers and readers at once on a small ring, writers killed and restarted at random, and an audit of every sequence at the end.

    python stress.py DIRECTORY SEED SECONDS

Run in a process of its own so that the environment chooses the twin. It prints what happened as JSON, or dies of an AssertionError.

The *ledger* is kept outside the log: a writer says through a pipe which records it means to append, before, and which sequences it got,
after. So of every record that lies in the log it is known who wrote it, and of every acknowledged one where it must be.
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
from kvspool import Gap, _frames

WRITERS = 4
READERS = 3
CAPACITY = 16384
END = 255  # type of the last record

INTENT = 1  # a writer is about to append records `first` .. `first + count - 1` of its life
ACKNOWLEDGED = 2  # and got the sequences from `sequence` on for them
ENTRY = struct.Struct("<IIQQQ")  # kind, life, first, count, sequence
ITEM = struct.Struct("<QQqII")  # first sequence, last sequence, timestamp (-1: a Gap), life, number in it


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
    target = log.writer() if life % 2 else log  # every other writer keeps the lock as long as it may
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
                out.write(ITEM.pack(item.first, item.last, -1, 0, 0))
                continue
            if item.type == END:
                out.write(ITEM.pack(item.sequence, item.sequence, item.timestamp, 0, 0))
                return
            life, number = struct.unpack_from("<II", item.value)
            assert item.value == payload(life, number), f"reader {name}: sequence {item.sequence} has bytes that nobody wrote"
            assert item.key == b"%d" % life
            out.write(ITEM.pack(item.sequence, item.sequence, item.timestamp, life, number))


def _items(log: kvspool.Spool, name: int, noise: random.Random) -> Iterator[kvspool.Record | Gap]:
    if name == 0:  # as fast as it can
        yield from log.follow(0, on_gap="yield")
    elif name == 1:  # falls behind now and then
        for item in log.follow(0, on_gap="yield"):
            yield item
            if noise.random() < 0.001:
                time.sleep(noise.random() * 0.05)
    else:  # begins anew at the next sequence each time
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
    """What every writer said, life by life."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.meant: dict[int, tuple[int, int]] = {}  # the last intent of a life: first number, count
        self.acknowledged: dict[int, tuple[int, int]] = {}  # sequence: life, number
        self.numbers: dict[int, int] = {}  # of a life: how many records were acknowledged

    def listen(self, pipe: int) -> None:
        self.selector.register(pipe, selectors.EVENT_READ)

    def take(self, timeout: float) -> None:
        """Write down what lies in the pipes; an entry is one atomic write."""
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


def main(directory: Path, seed: int, seconds: float) -> dict[str, object]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until a writer is ready to be told to stop
    noise = random.Random(seed)
    path = directory / "log"
    kvspool.create(path, capacity=CAPACITY).close()
    results = [directory / f"reader{name}" for name in range(READERS)]
    readers = [spawn(read, path, name, results[name]) for name in range(READERS)]
    ledger, killed = Ledger(), set()
    lives = 0
    writers: dict[int, int] = {}

    def begin_life() -> None:
        nonlocal lives
        lives += 1
        read_end, write_end = os.pipe()
        writers[spawn(write, path, lives, noise.randrange(1 << 30), write_end)] = lives
        os.close(write_end)
        ledger.listen(read_end)

    for _ in range(WRITERS):
        begin_life()
    deadline = time.monotonic() + seconds
    kill_at = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        ledger.take(0.01)
        if time.monotonic() >= kill_at:
            victim = noise.choice(list(writers))
            os.kill(victim, signal.SIGKILL)
            assert os.waitpid(victim, 0)[1] == signal.SIGKILL
            killed.add(writers.pop(victim))
            begin_life()
            kill_at = time.monotonic() + noise.random() * 0.04
    for writer in writers:
        os.kill(writer, signal.SIGTERM)
    while not ledger.is_empty():
        ledger.take(1)
    for writer in writers:
        assert os.waitpid(writer, 0)[1] == 0
    log = kvspool.open(path)
    last = log.append(b"", type=END)
    for reader in readers:
        assert os.waitpid(reader, 0)[1] == 0
    return audit(ledger, killed, last, results) | {"kills": len(killed), "twin": _frames.TWIN, "kept": log.stats().records}


def audit(ledger: Ledger, killed: set[int], last: int, results: list[Path]) -> dict[str, object]:
    """Compare what was acknowledged, what lies in the log, and what each reader accounts for."""
    # Stored but not acknowledged: only what a killed writer was about to append when it died, from the first of its batch on.
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
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
