#!/usr/bin/env python3
"""An account outside all logs of the records that writers append, and the audit of a hub's shards against it.

Writer processes append to a spool or a shard set. They report in pipes each intended append before it, and its result after it. Run as a
program, this file is such a writer. The campaigns `network`,
`cluster` and `copies` use it.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import kvspool
import shard
from kvspool import Gap
from kvspool.record import Codec

ENTRY = struct.Struct("<QQ16sQ")  # number of a record << 32 | its writer's life; 0 before the append; log; shard << 48 | sequence


def payload(life: int, number: int) -> bytes:
    """Return the value of a record: who wrote it, which one it is, and bytes that follow from both."""
    dice = random.Random(life << 32 | number)
    size = 30_000 if dice.randrange(200) == 0 else dice.choice((0, 1, 10, 100, 300))
    return struct.pack("<II", life, number) + dice.randbytes(size)


class About(NamedTuple):
    """Everything of a record that follows from its value."""

    timestamp: int
    type: int
    key: bytes | None


def about(value: bytes) -> About:
    life, number = struct.unpack_from("<II", value)
    return About(life << 32 | number, number & 255, None if number % 3 == 0 else b"" if number % 3 == 1 else b"key %d" % (number % 100))


def write(path: str, bits: int, life: int, pipe: int, pause: float) -> None:
    """Append forever. pause: the longest one between two appends, in seconds."""
    dice = random.Random(life)
    logs = [kvspool.open(each, timeout=600) for each in places(Path(path), bits)]
    number = 0
    while True:
        at = dice.randrange(len(logs))
        log: Any = logs[at]
        count = dice.choice((1, 1, 2, 9))
        os.write(pipe, ENTRY.pack(number << 32 | life, 0, log.log_id, at << 48))
        for more in range(count):
            value = payload(life, number + more)
            details = about(value)
            sequence = log.append(value, key=details.key, type=details.type, timestamp=details.timestamp)
            os.write(pipe, ENTRY.pack((number + more) << 32 | life, 1, log.log_id, at << 48 | sequence))
        number += count
        time.sleep(dice.random() * pause)


class Writers:
    """The writers of one client, and the ledger of all that they said. `spawn` starts a process, as subprocess.Popen does.

    pause: the longest one between two appends of a writer, in seconds.
    """

    def __init__(
        self,
        path: Path,
        bits: int,
        first_life: int,
        *,
        most: int = 2,
        spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        pause: float = 0.004,
    ) -> None:
        self.path, self.bits, self.most, self.spawn, self.pause = path, bits, most, spawn, pause
        self.life = first_life
        self.intended: dict[int, tuple[bytes, int]] = {}  # number << 32 | life, of the first of up to 9: log and shard
        self.reported: dict[tuple[bytes, int], int] = {}  # by log, and shard << 48 | sequence: number << 32 | life
        self.running: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []

    def start(self) -> None:
        while len(self.running) < self.most:
            self.life += 1
            out, end = os.pipe()
            words = [sys.executable, __file__, str(self.path), str(self.bits), str(self.life), str(end), str(self.pause)]
            process = self.spawn(words, pass_fds=[end])
            os.close(end)
            thread = threading.Thread(target=self._listen, args=(out,))
            thread.start()
            self.running.append((process, thread))

    def _listen(self, out: int) -> None:
        with open(out, "rb") as pipe:
            while len(data := pipe.read(ENTRY.size)) == ENTRY.size:
                name, count, log, place = ENTRY.unpack(data)
                if count:
                    self.reported[log, place] = name
                else:
                    self.intended[name] = log, place >> 48

    def kill(self, most: int = 100) -> int:
        victims, self.running = self.running[:most], self.running[most:]
        for process, thread in victims:
            process.kill()
            process.wait()
            thread.join()
        return len(victims)


def make(path: Path, bits: int, options: dict[str, Any]) -> None:
    """Make the logs of a client."""
    if bits:
        shard.create(path, bits=bits, **options).close()
    else:
        kvspool.create(path, **options).close()


def places(path: Path, bits: int) -> list[Path]:
    """Return the directory of a client's logs."""
    return [path / f"{bits:x}.{index:03x}" for index in range(1 << bits)] if bits else [path]


def audit(counts: Counter[str], writers: Writers, stored: Path, place: Path, index: int, *, is_waiting: bool) -> None:
    """Compare one shard of the hub with the ledger, and with what its log still holds. Raises AssertionError."""
    from hub.root.store import GENERATIONS  # it imports Arrow, which writers have no use for

    table = json.loads((stored / GENERATIONS).read_bytes())
    logs = [(bytes.fromhex(each["log"]), each["base"]) for each in table]
    assert counts["log recreated"] or len(logs) == 1, f"{stored}: {len(logs)} generations"
    seen: set[int] = set()
    found: dict[bytes, dict[int, bytes]] = {log: {} for log, _ in logs}
    next_sequence = lost = 0
    time_before: int | None = None  # of the record before, if it is known: a spool's times never go back
    with kvspool.open(stored) as journal:
        for item in journal.read(0, on_gap="yield"):
            first = item.first if isinstance(item, Gap) else item.sequence
            assert first == next_sequence, f"{stored}: {first} instead of {next_sequence}"
            next_sequence = item.last + 1 if isinstance(item, Gap) else first + 1
            if isinstance(item, Gap):
                assert item.reason == "missing" and not is_waiting, f"{stored}: {item}"
                lost += item.count
                time_before = None
                continue
            log, base = next((log, base) for log, base in reversed(logs) if base <= item.sequence)
            if item.sequence == base:
                time_before = 0
            details = about(item.value)
            assert (item.codec, item.type, item.key) == (Codec.RAW, details.type, details.key), f"{stored}: {item}"
            expected = item.timestamp if time_before is None else max(time_before, details.timestamp)
            assert item.timestamp == expected >= details.timestamp, f"{stored}: {item}"
            time_before = item.timestamp
            life, number = struct.unpack_from("<II", item.value)
            assert item.value == payload(life, number), f"{stored}: {item.sequence} has other bytes"
            name = number << 32 | life
            assert name not in seen, f"{stored}: record {number} of {life} is there twice"
            seen.add(name)
            reported = writers.reported.get((log, index << 48 | item.sequence - base))
            if reported is None:  # the writer was killed before it could say so
                intents = [writers.intended.get(name - (back << 32)) for back in range(9)]
                assert (log, index) in intents, f"{stored}: no process meant to append {number} of {life}"
                counts["records not acknowledged to a writer"] += 1
            else:
                assert reported == name, f"{stored}: sequence {item.sequence - base} was reported to be {reported:x}, not {name:x}"
            found[log][item.sequence - base] = item.value
    with kvspool.open(place) as log:
        here: Any = log
        held = {record.sequence: record.value for record in here.read(on_gap="skip")}
        last = found[here.log_id]
        assert here.log_id == logs[-1][0] and next_sequence - logs[-1][1] == here.end(), f"{stored} ends elsewhere than its log"
        assert all(last.get(sequence) == value for sequence, value in held.items()), f"{stored} lacks what its log holds"
        first_held = min(held, default=here.end())
    for log_id, key in writers.reported:
        shard_of, sequence = key >> 48, key & ((1 << 48) - 1)
        if shard_of == index and log_id == logs[-1][0] and sequence not in last:
            assert not is_waiting and sequence < first_held, f"{stored}: sequence {sequence} was acknowledged, and is lost"
    counts["records"] += len(seen)
    counts["records lost to overruns, in Gaps"] += lost
    counts["generations"] += len(logs)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
