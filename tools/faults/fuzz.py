"""Feed the parsers whatever atheris thinks of: they may refuse it with an error of ours, and nothing else.

    .venv/bin/python tools/faults/fuzz.py TARGET SECONDS [CORPUS]

Targets: reader and writer (a ring and a control block, a page of each fuzzed), header (both files' headers), slots, keys (the key table),
keyed (decoding a keyed value). It runs on the interpreted twin, in which atheris sees the branches. The last line counts the inputs.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

os.environ["KVSPOOL_NO_EXTENSIONS"] = "1"

import atheris

with atheris.instrument_imports(include=["kvspool"]):
    from kvspool import _frames_py as frames
    from kvspool import errors, keyed
    from kvspool.spool import format, pair, search, slots
    from kvspool.spool.keys import KeyTable

CAPACITY = 4096
LOG_ID = bytes(range(16))
SEED = format.frame_seed(LOG_ID)
CHANGED = 256  # bytes of the control block that an input sets, from 256 on
EXPECTED = (errors.KvspoolError, ValueError)


def memory(data: bytes) -> tuple[memoryview, memoryview]:
    """Return a ring and a control block that hold some records, with the input laid over both."""
    ring, control = memoryview(bytearray(CAPACITY)), memoryview(bytearray(format.control_bytes(CAPACITY)))
    writer = frames.FrameWriter(ring, control, SEED, -1, memoryview(bytes(48)))
    writer.begin()
    writer.put_many([b"key", None, b""], [b"one", b"two" * 50, b""], 7, b"\0\0\0", 1)
    writer.publish()
    at = 256
    control[at : at + len(data[:CHANGED])] = data[:CHANGED]
    rest = data[CHANGED : CHANGED + CAPACITY]
    ring[: len(rest)] = rest
    return ring, control


def reader(data: bytes) -> None:
    ring, control = memory(data)
    one = frames.FrameReader(ring, control, SEED, 0, 0)
    position, sequence = search.find(one, "earliest")
    one.position, one.sequence = position, sequence
    for _ in range(200):
        if not one.fetch(one.tail(), 16, None) and one.stop != frames.FULL:
            break
    one.find_frame(position, min(one.tail(), position + CAPACITY), 0, frames.NOTHING)
    one.entry(0)


def writer(data: bytes) -> None:
    ring, control = memory(data)
    one = frames.FrameWriter(ring, control, SEED, -1, memoryview(bytes(48)))
    one.begin()
    one.put_many(None, [b"new", bytes(500)], 0, b"\0\0", 1)
    one.publish()
    assert one.next_sequence == one.mark()[1]


def header(data: bytes) -> None:
    path = Path("fuzz")
    for layout, magic in ((format.HEADER, format.CONTROL_MAGIC), (format.DATA_HEADER, format.DATA_MAGIC)):
        for raw in (data, magic + struct.pack("<I", format.VERSION) + data[: layout.size - 16]):
            body = raw[: layout.size - 4].ljust(layout.size - 4, b"\0")
            for sealed in (raw, body + format.checksum(body).to_bytes(4, "little")):
                try:
                    found = pair._checked(layout, sealed, path, magic)  # type: ignore[type-var]
                    pair._check_capacity(found.capacity, found.data_start, path)
                except EXPECTED:
                    continue


def in_slots(data: bytes) -> None:
    control = memoryview(bytearray(format.control_bytes(CAPACITY)))
    control[format.SLOTS_AT : format.SLOTS_AT + len(data[:16384])] = data[:16384]
    all_slots = slots.Slots(control, LOG_ID)
    for slot in islice(all_slots.taken(), 4):
        assert slot.name is not None and slot.holder
        slot.newest()
    all_slots.find(slots.encode_name("reader"))


def keys(data: bytes) -> None:
    region = bytearray(format.INDEX_AT - format.KEYS_AT)
    region[: len(data[: len(region)])] = data[: len(region)]
    table = KeyTable(memoryview(region), LOG_ID)
    table.add(["fuzz"], lambda: None)
    assert table.is_full or "fuzz" in table.indexes


def decode(data: bytes) -> None:
    names = keyed.Keys()
    names.names.update({0: "a", 1: "b"})
    keyed.unpack(data, names)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "reader": reader,
    "writer": writer,
    "header": header,
    "slots": in_slots,
    "keys": keys,
    "keyed": decode,
}


def main() -> None:
    target, seconds, *corpus = sys.argv[1:]
    count = 0
    started = time.monotonic()

    def once(data: bytes) -> None:
        nonlocal count
        count += 1
        try:
            TARGETS[target](data)
        except EXPECTED:
            pass
        if time.monotonic() - started > float(seconds):
            print(f"{target}: {count} inputs in {time.monotonic() - started:.0f} s, none that broke it", flush=True)
            os._exit(0)

    atheris.Setup([sys.argv[0], "-max_len=8192", "-rss_limit_mb=1024", "-timeout=10", "-verbosity=0", *corpus], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
