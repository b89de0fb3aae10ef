"""Writers, durable readers and a follower at once on a journal, killed, stopped and restarted at random, and an audit at the end.

    python stress.py DIRECTORY SEED SECONDS FORMAT

The *ledger* is kept outside the journal, one file for each life of a process. A writer notes the records that it means to append before
an append, and their sequences after it. A durable reader notes the records that it got, then that it is about to commit, and then that it
has. So the writer of every record in the journal is known, the sequence of every acknowledged one, and whether a reader has left one out.
The program prints the result as JSON, or ends with an AssertionError.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import kvspool
from kvspool.errors import ReaderBusy
from kvspool.journal import Journal
from kvspool.kernel import sej

WRITERS, DURABLE = 4, 2
LIMITS: dict[str, dict[str, Any]] = {
    "sej": {"segment_bytes": 20000},
    "kvj": {"segment_bytes": 20000},
    "fflg": {"segment_bytes": 10_000, "keep_consumed": 1},
    "fixed": {"item_bytes": 60, "items_per_blob": 300},
}
INTENT, ACKNOWLEDGED, BEGIN, READ, COMMITTING, COMMITTED, BUSY = range(7)
ENTRY = struct.Struct("<IIQQ")  # kind, count or checksum, first number or sequence, sequence


def payload(form: str, life: int, number: int) -> bytes:
    """Return the value of one record: who wrote it, which one it is, and bytes that follow from both."""
    noise = random.Random(life << 32 | number)
    return struct.pack("<II", life, number) + noise.randbytes(52 if form == "fixed" else noise.randrange(0, 300))


class Ledger:
    """One life's words; a word that was said survives the process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, kind: int, count: int, first: int, sequence: int) -> None:
        os.write(self._fd, ENTRY.pack(kind, count, first, sequence))


def write(log: Journal, life: int, ledger: Ledger, choose: random.Random) -> None:
    """Append until killed."""
    number = 0
    while True:
        count = choose.choice((1, 1, 1, 2, 9, 40))
        ledger.say(INTENT, count, number, 0)
        values = [payload(log.format.name, life, number + more) for more in range(count)]
        taken = log.append_many(values, timeout=60, durable=choose.randrange(50) == 0)
        ledger.say(ACKNOWLEDGED, count, number, taken.start)
        number += count


def consume(log: Journal, name: str, ledger: Ledger, choose: random.Random) -> None:
    """Read and commit until killed."""
    while True:
        try:
            reader = log.reader(name)
            break
        except ReaderBusy:
            ledger.say(BUSY, 0, 0, 0)
            time.sleep(0.01)
    ledger.say(BEGIN, 0, 0, reader.sequence)
    while True:
        for record in reader.follow(limit=choose.randrange(1, 300), timeout=0.05):
            ledger.say(READ, zlib.crc32(record.value), 0, record.sequence)
        ledger.say(COMMITTING, 0, 0, reader.sequence)
        ledger.say(COMMITTED, 0, 0, reader.commit())


def follow(log: Journal, ledger: Ledger) -> None:
    """Follow until killed."""
    ledger.say(BEGIN, 0, 0, 0)
    for record in log.follow():
        ledger.say(READ, zlib.crc32(record.value), 0, record.sequence)


class Storm:
    def __init__(self, folder: Path, seed: int, form: str) -> None:
        self.folder, self.form = folder, form
        self.choose = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.lives: dict[str, list[int]] = {}  # of each place, by name
        self.running: dict[str, int] = {}
        self.next_life = 0
        kvspool.create(folder / "log", format=form, **LIMITS[form]).close()  # type: ignore[call-overload]

    def begin(self, place: str) -> None:
        life = self.next_life
        self.next_life += 1
        self.lives.setdefault(place, []).append(life)
        seed = self.choose.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            try:
                self._live(place, life, seed)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.running[place] = pid

    def _live(self, place: str, life: int, seed: int) -> None:
        ledger, choose = Ledger(self.folder / f"ledger{life}"), random.Random(seed)
        log = kvspool.open(self.folder / "log", timeout=60)
        assert isinstance(log, Journal)
        if place.startswith("writer"):
            write(log, life, ledger, choose)
        elif place == "follower":
            follow(log, ledger)
        else:
            consume(log, place, ledger, choose)

    def run(self, seconds: float) -> None:
        mortal = [f"writer{number}" for number in range(WRITERS)] + [f"reader{number}" for number in range(DURABLE)]
        for place in [*mortal, "follower"]:
            self.begin(place)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or not self.has_enough():
            time.sleep(self.choose.random() * 0.04)
            place = self.choose.choice(mortal)
            pid = self.running[place]
            if self.choose.randrange(3) == 0:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.choose.random() * 0.05)
                if self.choose.randrange(2):
                    os.kill(pid, signal.SIGCONT)
                    self.counts["stops"] += 1
                    continue
            self.end(place)
            self.counts["kills" if place.startswith("writer") else "kills of durable readers"] += 1
            self.begin(place)
        for place in mortal[:WRITERS]:
            self.end(place)
        self.catch_up()
        for place in [*mortal[WRITERS:], "follower"]:
            self.end(place)

    def has_enough(self) -> bool:
        """Return whether each kind was killed twice, and two appends and commits succeeded; a busy machine needs longer."""
        if min(self.counts["kills"], self.counts["kills of durable readers"]) < 2:
            return False
        kinds = Counter(entry[0] for life in range(self.next_life) for entry in self.entries(life))
        return min(kinds[ACKNOWLEDGED], kinds[COMMITTED]) >= 2

    def end(self, place: str) -> None:
        pid = self.running.pop(place)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"{place} ended without a signal"

    def catch_up(self) -> None:
        """Append a last record, and wait until those who read have come to it."""
        with kvspool.open(self.folder / "log") as log:
            last = log.append(payload(self.form, 0xFFFFFFFF, 0))
            assert isinstance(log, Journal)
            deadline = time.monotonic() + 60
            while any(one.sequence != last + 1 for one in log.readers()) or self.read("follower")[-1:] != [last]:
                assert time.monotonic() < deadline, f"not at {last}: {log.readers()}, {self.read('follower')[-1:]}"
                time.sleep(0.05)

    def entries(self, life: int) -> list[tuple[int, int, int, int]]:
        path = self.folder / f"ledger{life}"
        data = path.read_bytes() if path.exists() else b""
        return list(ENTRY.iter_unpack(data[: len(data) // ENTRY.size * ENTRY.size]))

    def read(self, place: str) -> list[int]:
        return [entry[3] for entry in self.entries(self.lives[place][-1]) if entry[0] == READ]

    def audit(self) -> None:
        with kvspool.open(self.folder / "log") as log:
            values = []
            for number, record in enumerate(log.read()):
                assert record.sequence == number
                values.append(record.value)
            assert isinstance(log, Journal) and log.verify().is_sound
            self.counts["segments"] = log.stats().segments
        self.counts["appended"] = len(values)
        self._audit_writers(values)
        for place in self.lives:
            if not place.startswith("writer"):
                self._audit_reader(place, values)

    def _audit_writers(self, values: list[bytes]) -> None:
        where: dict[tuple[int, int], int] = {}
        for sequence, value in enumerate(values[:-1]):
            who = struct.unpack_from("<II", value)
            assert who not in where, f"{who} is there twice: {where[who]} and {sequence}"
            assert value == payload(self.form, *who), f"{sequence} has other bytes"
            where[who] = sequence
        for place, lives in self.lives.items():
            for life in lives if place.startswith("writer") else ():
                meant = 0
                for kind, count, first, sequence in self.entries(life):
                    if kind == INTENT:
                        meant = first + count
                    else:
                        self.counts["acknowledged"] += count
                        assert [where.get((life, first + more)) for more in range(count)] == list(range(sequence, sequence + count))
                mine = sorted((number, at) for (who, number), at in where.items() if who == life)
                assert [number for number, _ in mine] == list(range(len(mine))) and len(mine) <= meant
                assert [at for _, at in mine] == sorted(at for _, at in mine)

    def _audit_reader(self, place: str, values: list[bytes]) -> None:
        allowed = {0}  # where a life may begin
        for life in self.lives[place]:
            at = -1
            for kind, checksum, _, sequence in self.entries(life):
                if kind == BUSY:
                    self.counts["busy"] += 1
                elif kind == BEGIN:
                    assert sequence in allowed, f"{place} begins at {sequence}, not at one of {allowed}"
                    at = sequence
                elif kind == READ:
                    assert sequence == at, f"{place} got {sequence} where {at} was due"
                    assert zlib.crc32(values[sequence]) == checksum, f"{place} got another record {sequence}"
                    at += 1
                    self.counts["read"] += 1
                elif kind == COMMITTING:
                    assert sequence == at
                    allowed.add(sequence)
                else:
                    allowed = {sequence}
                    self.counts["commits"] += 1


def main() -> None:
    folder, seed, seconds, form = sys.argv[1:]
    storm = Storm(Path(folder), int(seed), form)
    try:
        storm.run(float(seconds))
    finally:
        for place in list(storm.running):
            storm.end(place)
    storm.audit()
    twin = "compiled" if sej.scan.__module__.endswith("_c") else "interpreted"
    print(json.dumps({**storm.counts, "twin": twin}))


if __name__ == "__main__":
    main()
