#!/usr/bin/env python3
"""A reader of several hubs that says in a pipe what it reads, and the account of that outside all logs.

Run as a program, this file is such a reader: it follows some shards at several hubs, one after the other. It passes on each record's
sequence, and which record it is (see `ledger`). A Gap, or a record with other bytes than its own, is a violation. The campaign `copies`
uses it.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ledger

ENTRY = struct.Struct("<IQQ")  # number of the shard; a record's sequence; number of the record << 32 | its writer's life
WRONG = (1 << 64) - 1  # instead of that: the record is another one, or it is in a Gap
PAUSE = 0.05  # seconds between two rounds through all shards

Key = tuple[str, int]  # client and shard


def read(plan: dict[str, Any], pipe: int) -> None:
    """Follow all shards forever, also through outages. plan: see `Witness.start`."""
    from hub.client.connection import Security
    from hub.client.remote import RemoteHub
    from hub.errors import HubFull, NotFound, Unexpected, Unreachable

    security = Security(token=Path(plan["token"]).read_text().strip(), authorities=Path(plan["authorities"]).read_bytes())
    keys: list[Key] = [(client, index) for client, index in plan["keys"]]
    places = dict(zip(keys, plan["starts"], strict=True))
    with RemoteHub(plan["hubs"], security=security) as hub:
        is_begun = not plan["reader"]
        while True:
            with suppress(Unreachable, HubFull, NotFound, Unexpected):  # there may be more later
                if not is_begun:
                    found = next((one for one in hub.readers() if one.name == plan["reader"]), None)
                    places |= {(place.client, place.shard): place.next for place in found.places} if found else {}
                    is_begun = True
                for number, key in enumerate(keys):
                    with suppress(NotFound, Unexpected):
                        for item in hub.read(*key, places[key], on_gap="yield"):
                            first, name = (item.first, WRONG) if not hasattr(item, "value") else (item.sequence, name_of(item))
                            os.write(pipe, ENTRY.pack(number, first, name))
                            places[key] = first + 1
                if plan["reader"]:
                    hub.commit(plan["reader"], places)
            time.sleep(PAUSE)


def name_of(record: Any) -> int:
    """Return which record it is; WRONG if it has other bytes."""
    life, number = struct.unpack_from("<II", record.value)
    about = ledger.about(record.value)
    is_right = record.value == ledger.payload(life, number) and (record.type, record.key) == (about.type, about.key)
    return number << 32 | life if is_right else WRONG


class Witness:
    """A reader, in one life after the other, and all that it has read. reader: its durable reader at the hubs, "" for none.

    Without one, a new life begins where the last one ended. With one it begins where it has committed, and may repeat records.
    """

    def __init__(self, keys: list[Key], reader: str, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
        self.keys, self.reader, self.spawn = keys, reader, spawn
        self.seen: list[list[int]] = [[] for _ in keys]  # by shard and sequence
        self.counts: Counter[str] = Counter()
        self.violation = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, plan: dict[str, Any], errors: Any) -> None:
        """Start it. plan: the locations of the hubs, `hubs`, and the files of `token` and `authorities`."""
        starts = [0 if self.reader else len(seen) for seen in self.seen]
        out, end = os.pipe()
        words = [sys.executable, __file__, json.dumps({**plan, "keys": self.keys, "starts": starts, "reader": self.reader}), str(end)]
        self.process = self.spawn(words, pass_fds=[end], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        os.close(end)
        self._thread = threading.Thread(target=self._listen, args=(out, [len(seen) for seen in self.seen]))
        self._thread.start()

    def _listen(self, out: int, expected: list[int]) -> None:
        """Take what a life says. expected: the sequence that comes next, by shard."""
        begun: set[int] = set()
        with open(out, "rb") as pipe:
            while len(data := pipe.read(ENTRY.size)) == ENTRY.size:
                number, sequence, name = ENTRY.unpack(data)
                if number not in begun and self.reader and sequence < expected[number]:
                    expected[number] = sequence
                begun.add(number)
                self._take(number, sequence, name, expected[number])
                expected[number] = sequence + 1

    def _take(self, number: int, sequence: int, name: int, expected: int) -> None:
        seen = self.seen[number]
        if name == WRONG or sequence != expected:
            kind = "a Gap, or other bytes than its own" if name == WRONG else f"{expected} comes next"
            self.violation = self.violation or f"{self.keys[number]}: record {sequence}: {kind}"
        elif sequence == len(seen):
            seen.append(name)
        elif seen[sequence] == name:
            self.counts["records read again, after a commit"] += 1
        else:
            self.violation = self.violation or f"{self.keys[number]}: record {sequence} was {seen[sequence]:x}, and is {name:x}"

    def kill(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._thread.join()
            self.process = None

    def audit(self, key: Key, writers: ledger.Writers, log: bytes) -> int:
        """Compare a shard with what its writers said; return the number of its records. Raises AssertionError."""
        assert not self.violation, self.violation
        seen = self.seen[self.keys.index(key)]
        reported = {place & ((1 << 48) - 1): name for (id, place), name in writers.reported.items() if id == log and place >> 48 == key[1]}
        missed = [sequence for sequence in reported if sequence >= len(seen)]
        assert not missed, f"{key}: {len(missed)} acknowledged records from {min(missed)} on were not read"
        for sequence, name in enumerate(seen):
            if sequence in reported:
                assert reported[sequence] == name, f"{key}: record {sequence} was reported as {reported[sequence]:x}, and read as {name:x}"
        assert len(set(seen)) == len(seen), f"{key}: a record was read under two sequences"
        return len(seen)


if __name__ == "__main__":
    read(json.loads(sys.argv[1]), int(sys.argv[2]))
