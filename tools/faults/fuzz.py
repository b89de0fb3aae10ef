"""Feed the parsers any input of atheris: they may refuse it with an error of this project, and nothing else.

    .venv/bin/python tools/faults/fuzz.py TARGET[,TARGET...] SECONDS [CORPUS]

Several targets are fuzzed one after the other, so many seconds each. Targets: reader and writer (a ring and a control block, a page of
each fuzzed), header (both files' headers), checkpoint, slots, keys (the key table), keyed (decoding a keyed value), lines (the input of
`kvspool append`); sej, kvj, fixed (a journal of that format, with one file fuzzed: a segment, the lock file, the settings, a reader's
place, a sparse index; the whole of it is read, verified and appended to). It runs on the interpreted twin, in which atheris sees the
branches, and begins with the golden bytes of tests/formats, or a journal's own. The last line counts the inputs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from itertools import islice
from pathlib import Path

os.environ["KVSPOOL_NO_EXTENSIONS"] = "1"

import atheris

with atheris.instrument_imports(include=["kvspool"]):
    from kvspool import errors, keyed, record, system
    from kvspool.cli import append as command
    from kvspool.cli import lines
    from kvspool.cli.options import BadInput
    from kvspool.engine.checksums import checksum
    from kvspool.journal import Journal, files, index
    from kvspool.journal.formats import FORMATS
    from kvspool.journal.settings import Settings
    from kvspool.kernel import frames as loops
    from kvspool.kernel import frames_py as frames
    from kvspool.spool import checkpoints, format, headers, search, slots
    from kvspool.spool.keys import KeyTable

CAPACITY = 4096
LOG_ID = bytes(range(16))
SEED = format.frame_seed(LOG_ID)
CHANGED = 256  # bytes of the control block that an input sets, from 256 on
EXPECTED = (errors.KvspoolError, ValueError)
GOLDENS = Path(__file__).parents[2] / "tests" / "formats"

frames.TRIES = 1  # no process changes these slots meanwhile; a hundred looks at each unsound one took nearly all of the time


def memory(data: bytes) -> tuple[memoryview, memoryview]:
    """Return a ring and a control block that hold some records, with the input laid over both."""
    ring, control = memoryview(bytearray(CAPACITY)), memoryview(bytearray(format.control_bytes(CAPACITY)))
    writer = loops.FrameWriter(ring, control, SEED, None, memoryview(bytes(48)))
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
    one = loops.FrameReader(ring, control, SEED, 0, 0)
    position, sequence = search.find(one, "earliest")
    one.position, one.sequence = position, sequence
    for _ in range(200):
        if not one.fetch(one.tail(), 16, None) and one.stop != frames.FULL:
            break
    one.find_frame(position, min(one.tail(), position + CAPACITY), 0, frames.NOTHING)
    one.entry(0)


def writer(data: bytes) -> None:
    ring, control = memory(data)
    one = loops.FrameWriter(ring, control, SEED, None, memoryview(bytes(48)))
    one.begin()
    one.put_many(None, [b"new", bytes(500)], 0, b"\0\0", 1)
    one.publish()
    assert one.next_sequence == one.mark()[1]


def header(data: bytes) -> None:
    path = Path("fuzz")
    for layout, magic in ((format.HEADER, format.CONTROL_MAGIC), (format.DATA_HEADER, format.DATA_MAGIC)):
        for raw in (data, magic + struct.pack("<I", format.VERSION) + data[: layout.size - 16]):
            body = raw[: layout.size - 4].ljust(layout.size - 4, b"\0")
            for sealed in (raw, body + checksum(body).to_bytes(4, "little")):
                try:
                    found = headers.checked(layout, sealed, path, magic)  # type: ignore[type-var]
                    headers.check_capacity(found.capacity, found.data_start, path)
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


def checkpoint(data: bytes) -> None:
    front = memoryview(bytearray(format.DATA_START))
    header = format.HEADER.unpack(bytes(format.HEADER.size))._replace(capacity=CAPACITY, log_id=LOG_ID)
    first, second = format.CHECKPOINTS_AT
    size = format.CHECKPOINT.size
    body = data[: size - 4].ljust(size - 4, b"\0")
    sealed = body + checksum(LOG_ID, body).to_bytes(4, "little")
    rest = data[size - 4 :][:size].ljust(size, b"\0")
    for one, other in ((sealed, rest), (rest, sealed), (sealed, sealed), (rest, rest)):
        front[first : first + size], front[second : second + size] = one, other
        which, found = checkpoints.newest(front, header)
        assert which in (None, 0, 1) and found.head <= found.tail <= found.head + CAPACITY
        at, raw = checkpoints.successor(front, header, checkpoints.State(0, 0, 0, 0, 0), 0, bytes(16))
        front[at : at + size] = raw
        newer = checkpoints.newest(front, header)[1]
        assert newer.generation == found.generation + 1 or newer == found


class Appended:
    """Takes what the command appends, and looks at it as a log would."""

    def append_many(self, values: list[object], *, keys: list[bytes | None], type: int, durable: bool) -> int:
        assert len(values) == len(keys) and all(key is None or isinstance(key, bytes) for key in keys)
        for value in values:
            record.encode(value, record.Codec.JSON)
        return len(values)


def in_lines(data: bytes) -> None:
    bits, content = (data[0], data[1:]) if data else (0, b"")
    arguments = argparse.Namespace(
        json_lines=bool(bits & 1), key_field="k" if bits & 3 == 3 else None, key="key" if bits & 4 else None, type=0, durable=False
    )
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        file.seek(0)
        count = 0
        try:
            for batch in lines.LineReader(file.fileno(), most=1 + (bits >> 4), longest=1000).batches():
                assert batch.first == count + 1
                count += len(batch.lines)
                command.append_batch(Appended(), batch, arguments)
        except BadInput:
            return
    assert count == content.count(b"\n") + (not content.endswith(b"\n") and bool(content))


class Quick(system.Port):
    """Flushes cost nothing."""

    def flush(self, fd: int) -> None:
        pass

    def flush_data(self, fd: int) -> None:
        pass


scratch: list[Path] = []  # directories that go at the end


class Fuzzed:
    """A small journal, of which one file gets other bytes."""

    limits = {"sej": {"segment_bytes": 300}, "kvj": {"segment_bytes": 300}, "fixed": {"item_bytes": 40, "items_per_blob": 4}}

    def __init__(self, form: str) -> None:
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        scratch.append(self.root)
        self.path = self.root / "log"
        system.port = Quick()
        with self._create(form) as log:
            log.append_many([b"%040d" % number for number in range(12)])
            log.reader("r").close()
            self.first, *_, self.last = (log._segments.path_of(base) for base in log.bases())
            sidecar = log.format.sidecar(self.path)
            places = next(self.root.rglob("r.ofs"))
            hint = sidecar / "index" / f"{log.bases()[0]:016x}.idx"
            index.store(hint, 0, [index.SegmentIndexEntry(66, 1, 0)])
            self.parts = [self.first, self.last, log.format.lock_file(self.path), sidecar / "kvspool.json", places, hint]
        self.good = {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}

    def _create(self, form: str) -> Journal:
        chosen = FORMATS[form](**self.limits[form])
        return files.create(self.path, chosen, Settings(format=form, limits=chosen.limits()), mode=0o600, timeout=1)

    def __call__(self, data: bytes) -> None:
        which, content = (data[0] % len(self.parts), data[1:]) if data else (0, b"")
        for path in self.root.rglob("*"):
            if path.is_file() and path not in self.good:
                path.unlink()
        for path, good in self.good.items():
            path.write_bytes(content if path == self.parts[which] else good)
        for act in (self.read, self.look, self.consume, self.append, self.read):
            try:
                found = files.find(self.path)
                if found is not None:
                    with files.open(self.path, found, timeout=1) as log:
                        act(log, len(content))
            except EXPECTED:
                continue

    def read(self, log: Journal, size: int) -> None:
        items = list(islice(log.read(on_gap="yield"), 100_000))
        assert len(items) < 100 + size, "more than there is room for"
        sequences = [item.sequence if isinstance(item, record.Record) else item.first for item in items]
        assert sequences == sorted(set(sequences))

    def look(self, log: Journal, size: int) -> None:
        log.stats()
        log.verify()
        for start in (1, 7, 11):
            list(log.read(start, on_gap="skip", limit=3))

    def consume(self, log: Journal, size: int) -> None:
        with log.reader("r") as reader:
            list(reader.read(on_gap="skip"))
            assert reader.commit() <= log.end() or log.readable_end() != log.end()

    def append(self, log: Journal, size: int) -> None:
        at = log.append(b"x" * 40)
        assert log.end() == at + 1
        assert [item.value for item in log.read(at)] == [b"x" * 40]


def journal(form: str) -> Callable[[bytes], None]:
    """Return a target, whose journal is made when it is first needed."""
    made: list[Fuzzed] = []

    def once(data: bytes) -> None:
        if not made:
            made.append(Fuzzed(form))
        made[0](data)

    return once


TARGETS: dict[str, Callable[[bytes], None]] = {
    **{form: journal(form) for form in Fuzzed.limits},
    "reader": reader,
    "writer": writer,
    "header": header,
    "checkpoint": checkpoint,
    "slots": in_slots,
    "keys": keys,
    "keyed": decode,
    "lines": in_lines,
}


def golden(name: str) -> bytes:
    """Return the bytes of a file of the golden log."""
    content = bytearray(format.control_bytes(CAPACITY))
    for line in tomllib.loads((GOLDENS / "spool-2.toml").read_text(encoding="utf-8"))[name].splitlines():
        at, _, row = line.partition(":")
        if row:
            raw = bytes.fromhex(row)
            content[int(at, 16) : int(at, 16) + len(raw)] = raw
    return bytes(content)


def seeds(target: str) -> list[bytes]:
    """Return what the parser gets on a good day."""
    control, data = golden(format.CONTROL_FILE), golden(format.DATA_FILE)
    state = control[format.CONTROL_AT :][:CHANGED]
    if target in ("reader", "writer"):
        rows = tomllib.loads((GOLDENS / "frames-1.toml").read_text(encoding="utf-8"))["frame"]
        return [state + data[format.DATA_START :][:CAPACITY], *(state + bytes.fromhex(row["hex"]) for row in rows)]
    if target in Fuzzed.limits:
        whole = Fuzzed(target)
        shutil.rmtree(whole.root)
        return [bytes((number,)) + whole.good[path] for number, path in enumerate(whole.parts)]
    if target == "header":
        return [control[: format.HEADER.size], data[: format.DATA_HEADER.size]]
    if target == "checkpoint":
        return [control[at : at + format.CHECKPOINT.size] for at in format.CHECKPOINTS_AT]
    if target == "slots":
        made = memoryview(bytearray(format.control_bytes(CAPACITY)))
        for number, name in enumerate(("reader", "another")):
            slot = slots.Slots(made, LOG_ID).slot(number)
            slot.move((4096, 7), 2, slot.take(slots.encode_name(name), (0, 0), 1))
        return [bytes(made[format.SLOTS_AT :][:512])]
    if target == "keys":
        region = bytearray(format.INDEX_AT - format.KEYS_AT)
        KeyTable(memoryview(region), LOG_ID).add(["user", "é"], lambda: None)
        return [bytes(region[:128])]
    if target == "keyed":
        return [bytes.fromhex("83 00 01 01 81 00 91 c3 91 05 c0")]
    return [b"\3" + b'{"k": "a", "x": [1, 2.5, null]}\n{"k": null}\n{"k": {}}', b"\x14one\ntwo\xff\n\n"]


def main() -> int:
    targets, seconds, *corpus = sys.argv[1:]
    failed = 0
    for target in targets.split(","):
        child = os.fork()  # a fuzzer ends with its process; what it fuzzes is loaded only once
        if not child:
            fuzz(target, float(seconds), corpus)
        failed |= os.waitpid(child, 0)[1]
    return int(failed != 0)


def fuzz(target: str, seconds: float, corpus: list[str]) -> None:
    """Fuzz a target in this process, which ends with it."""
    count = 0
    started = time.monotonic()

    def once(data: bytes) -> None:
        nonlocal count
        count += 1
        try:
            TARGETS[target](data)
        except EXPECTED:
            pass
        if time.monotonic() - started > seconds:
            print(f"{target}: {count} inputs in {time.monotonic() - started:.0f} s, none that broke it", flush=True)
            for folder in (begin_with, *scratch):
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)

    begin_with = Path(tempfile.mkdtemp())
    for number, seed in enumerate(seeds(target)):
        (begin_with / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], "-max_len=8192", "-rss_limit_mb=1024", "-timeout=10", "-verbosity=0", *corpus, str(begin_with)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
