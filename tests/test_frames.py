"""The loops over frames, both twins: what they write, what they accept, and what a kill or a flipped bit leaves."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
import tomllib
from array import array
from collections.abc import Callable, Iterator
from ctypes import CDLL, addressof, c_char_p, c_size_t, c_uint32, create_string_buffer
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from children import in_child
from faults import Killed
from loops import interpreted
from rings import HOLDER, SEED, Ring, Watched
from schedules import ALL, some

from kvspool.errors import Closed, Corruption, Poisoned, TooLarge
from kvspool.kernel import end_py, machine
from kvspool.kernel import frames as frames_loops
from kvspool.kernel import frames_py as frames
from kvspool.record import Gap, Record
from kvspool.spool import search

MakeRing = Callable[..., Ring]
frames_py = interpreted("kvspool.kernel.frames")
GOLDEN = tomllib.loads((Path(__file__).parent / "formats" / "frames-1.toml").read_text(encoding="utf-8"))
STARTS = [(0, 0), (2**32 - 512, 2**32 - 3), (2**63 - 512, 2**63 - 200)]
"""Positions and sequences where a counter of fewer bits would wrap."""

PAD_TAG = frames.PAD << 8  # what the last word of a header differs by between codec 0 and a pad

RFC_3720 = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (
        bytes.fromhex("01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"),
        0xD9963A56,
    ),
    (b"123456789", 0xE3069283),
]


def sequences(items: list[Record | Gap]) -> list[int]:
    return [item.sequence for item in items if isinstance(item, Record)]


def gaps(items: list[Record | Gap]) -> list[tuple[int, int, str]]:
    return [(item.first, item.last, item.reason) for item in items if isinstance(item, Gap)]


def assert_accounted(items: list[Record | Gap], first: int, end: int) -> None:
    """Check that each sequence from `first` to before `end` is in `items` once, in order: as a record or inside a Gap."""
    expected = first
    for item in items:
        here, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
        assert here == expected and last >= here
        expected = last + 1
    assert expected == end


# The bytes of a frame.


@pytest.mark.parametrize("golden", GOLDEN["frame"], ids=lambda golden: golden["name"])
def test_a_frame_has_its_golden_bytes_and_is_read_back_from_them(twin: ModuleType, make_ring: MakeRing, golden: dict[str, Any]) -> None:
    key = bytes.fromhex(golden["key"]) if "key" in golden else None
    value, data = bytes.fromhex(golden["value"]), bytes.fromhex(golden["hex"])
    ring = make_ring(twin, sequence=golden["sequence"])
    ring.data[:] = b"\xee" * ring.capacity

    assert ring.writer().append(key, value, golden["type"], golden["codec"], golden["timestamp"]) == golden["sequence"]

    assert bytes(ring.data[: len(data)]).hex() == data.hex()
    assert set(ring.data[len(data) :]) == {0xEE}
    fresh = make_ring(twin, sequence=golden["sequence"])
    fresh.data[: len(data)] = data
    got = fresh.reader(0, golden["sequence"]).fetch(len(data), 10, Record)
    assert got == [Record(golden["sequence"], golden["timestamp"], golden["type"], key, value, golden["codec"])]


def test_a_pad_frame_has_its_golden_bytes(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    ring.data[:] = b"\xee" * 1024
    ring.fill([bytes(128)] * 7)

    pad = bytes.fromhex(GOLDEN["pad"]["hex"])
    assert bytes(ring.data[960 : 960 + len(pad)]).hex() == pad.hex()
    assert bytes(ring.data[960 + len(pad) :]) == bytes(32)


def test_the_checksum_is_crc32c_as_rfc_3720_defines_it() -> None:
    for data, expected in RFC_3720:
        assert machine.crc32c(0xFFFFFFFF, data, 0, len(data)) ^ 0xFFFFFFFF == expected


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_c_checksums_agree_with_rfc_3720_with_and_without_the_instruction(tmp_path: Path) -> None:
    source = tmp_path / "crc.c"
    source.write_text(
        '#include "crc32c.h"\n'
        "uint32_t best(uint32_t s, const uint8_t *p, size_t n) { return kv_crc32c(s, p, n); }\n"
        "uint32_t tables(uint32_t s, const uint8_t *p, size_t n) { return kv_crc32c_tables(s, p, n); }\n"
        "static uint8_t to[20000];\n"
        "uint32_t copy(uint32_t s, const uint8_t *p, size_t n) {\n"
        "    to[n] = 77;\n"
        "    s = kv_crc32c_copy(s, to, p, n);\n"
        "    return memcmp(to, p, n) || to[n] != 77 ? 0 : s;\n"
        "}\n"
        "uint32_t plain_copy(uint32_t s, const uint8_t *p, size_t n) {\n"
        "    int before = kv_hardware;\n"
        "    kv_hardware = 0;\n"
        "    s = copy(s, p, n);\n"
        "    kv_hardware = before;\n"
        "    return s;\n"
        "}\n",
        encoding="utf-8",
    )
    library = tmp_path / "crc.so"
    folder = Path(machine.__file__).parent
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{folder}", "-o", library, source], check=True)
    loaded = CDLL(str(library))
    noise = random.Random(3720).randbytes(10_100)
    buffer = create_string_buffer(noise)
    for name in ("best", "tables", "copy", "plain_copy"):
        function = getattr(loaded, name)
        function.restype, function.argtypes = c_uint32, [c_uint32, c_char_p, c_size_t]
        for data, expected in RFC_3720:
            assert function(0xFFFFFFFF, data, len(data)) ^ 0xFFFFFFFF == expected
        function.argtypes = [c_uint32, c_size_t, c_size_t]
        address = addressof(buffer)
        for length in [*range(70), *range(180, 250), *range(1000, 1050), *range(3060, 3090), *range(6130, 6160), 9215, 9216, 9217, 10_000]:
            for start in (0, 1, 3, 7, 13):
                state = machine.crc32c(0x12345678, noise, start, length)
                assert function(0x12345678, address + start, length) == state, (name, length, start)


def test_the_twins_agree_on_the_checksum_of_lengths_to_16000_at_odd_alignments(make_ring: MakeRing) -> None:
    compiled = pytest.importorskip("kvspool.kernel.frames_c")
    noise = memoryview(random.Random(1).randbytes(16_050))
    ring = make_ring(compiled, 1 << 16)
    writer = ring.writer()
    keys, no_key, types, stamps = b"\0", b"\0", b"\0", array("q", [5])
    for length in (*range(2_100), *range(2_100, 10_001, 1 if ALL else 11), 12_287, 12_288, 12_289, 16_000):
        start = length * 7 % 41
        writer.begin()
        writer.put_columns(
            None,
            1,
            memoryview(array("i", [0, 0])),
            keys,
            no_key,
            memoryview(array("i", [start, start + length])),
            noise,
            types,
            0,
            memoryview(stamps),
        )
        writer.publish()
        tail, next_sequence, _ = ring.mark()
        position = tail - ((32 + length + 7) & ~7)
        assert ring.reader(position, next_sequence - 1).fetch(tail, 1, None) == [noise[start : start + length]]
        at = position % ring.capacity
        state = machine.crc32c(SEED, bytes(ring.data[at : at + 28]), 0, 28)
        state = machine.crc32c(state, noise, start, length) ^ 0xFFFFFFFF
        assert int.from_bytes(ring.data[at + 28 : at + 32], "little") == state, (length, start)


def test_what_one_twin_writes_the_other_reads(make_ring: MakeRing) -> None:
    compiled = pytest.importorskip("kvspool.kernel.frames_c")
    noise = random.Random(2)
    for writing, reading in ((compiled, frames_py), (frames_py, compiled)):
        ring = make_ring(writing, 1 << 14)
        values = [noise.randbytes(noise.randrange(400)) for _ in range(200)]
        keys = [None if at % 3 == 0 else noise.randbytes(noise.randrange(9)) for at in range(200)]
        writer = ring.writer()
        for at in range(200):
            writer.append(keys[at], values[at], at, at % 4, 1000 + at)
        ring.twin = reading
        got = ring.read()
        first = got[0].sequence  # type: ignore[union-attr]
        assert 0 < first < 199
        assert got == [Record(at, 1000 + at, at, keys[at], values[at], at % 4) for at in range(first, 200)]


def test_the_module_that_chooses_a_twin_honours_the_environment() -> None:
    code = "from kvspool.kernel import frames; print(frames.TWIN, frames.FrameWriter.__module__)"
    forced = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "KVSPOOL_NO_EXTENSIONS": "1"}, check=True, capture_output=True, text=True
    )
    assert forced.stdout.split() == ["interpreted", "kvspool.kernel.writer_py"]
    names = ("reader", "writer") if frames_loops.TWIN == "interpreted" else ()
    expected = [f"kvspool.kernel.{name}_py" for name in names] or ["kvspool.kernel.frames_c"] * 2
    assert [frames_loops.FrameReader.__module__, frames_loops.FrameWriter.__module__] == expected


# Positions of frames.


def test_a_pad_fills_the_end_of_the_ring_where_the_next_frame_does_not_fit(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([bytes(128)] * 7)

    assert ring.mark()[:2] == (1024 + 160, 7)
    assert int.from_bytes(ring.data[960:964], "little") == 64
    assert ring.data[960 + 25] == frames.PAD
    assert sequences(ring.read()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("capacity", "stored"), [(1024, 200), (1024, 168), (1032, 256)])
def test_a_rest_smaller_than_a_header_is_left_as_it_is(twin: ModuleType, make_ring: MakeRing, capacity: int, stored: int) -> None:
    ring = make_ring(twin, capacity)
    fitting, rest = divmod(capacity, stored)
    assert rest in (8, 16, 24)
    ring.data[:] = b"\xee" * capacity
    ring.fill([bytes(stored - 32)] * (fitting + 1))

    assert bytes(ring.data[capacity - rest :]) == b"\xee" * rest
    assert ring.mark()[:2] == (capacity + stored, fitting + 1)
    assert sequences(ring.read()) == list(range(1, fitting + 1))


def test_a_rest_smaller_than_a_header_is_skipped_whatever_is_there(twin: ModuleType, make_ring: MakeRing) -> None:
    for junk in (bytes(24), b"\xff" * 24, b"\x20\0\0\0" * 6):
        ring = make_ring(twin, 1024)
        ring.fill([bytes(168)] * 5)
        ring.data[1000:] = junk
        ring.fill([b"next"])
        assert sequences(ring.read()) == [1, 2, 3, 4, 5]


def test_frames_that_fill_the_ring_exactly_need_no_pad(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([bytes(224)] * 4)
    assert ring.mark()[:2] == (1024, 4)
    assert sequences(ring.read()) == [0, 1, 2, 3]
    ring.fill([bytes(224)])
    assert ring.mark()[:2] == (1280, 5)
    assert sequences(ring.read()) == [1, 2, 3, 4]


def test_a_frame_of_exactly_a_quarter_fits_and_one_byte_more_is_refused_with_nothing_written(
    twin: ModuleType, make_ring: MakeRing
) -> None:
    ring = make_ring(twin, 1024)
    writer = ring.writer()
    assert writer.append(b"key", bytes(221), 0, 0, 7) == 0
    assert ring.mark()[0] == 256
    before = ring.snapshot()

    with pytest.raises(TooLarge, match="225 bytes takes 264"):
        writer.append(b"key", bytes(222), 0, 0, 7)
    with pytest.raises(TooLarge):
        writer.append(None, bytes(10_000), 0, 0, 7)

    assert ring.snapshot() == before
    assert writer.append(None, b"the lock is free", 0, 0, 7) == 1


def test_a_batch_larger_than_a_quarter_is_published_in_pieces(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    writer = ring.writer()
    assert writer.begin() == 0
    writer.put_many(None, [bytes(96)] * 2, 0, bytes(2), 7)
    assert ring.mark()[1] == 0, "two frames are a quarter: nothing needs publishing yet"
    writer.put_many(None, [bytes(96)] * 60, 0, bytes(60), 7)
    assert 50 < ring.mark()[1] < 62
    writer.publish()
    assert ring.mark()[1] == 62
    assert sequences(ring.read()) == list(range(54, 62))


@pytest.mark.parametrize("left", [32, 40, 120])
def test_a_batch_of_a_quarter_is_published_at_once_also_where_a_pad_ends_the_ring(
    twin: ModuleType, make_ring: MakeRing, left: int
) -> None:
    ring = make_ring(twin, 1024)
    writer = ring.writer()
    writer.begin()
    writer.put_many(None, [bytes(96)] * 6, 0, bytes(6), 7)
    writer.put_many(None, [bytes(96), bytes(96 - left)] if left < 100 else [bytes(224 - left)], 0, b"\0\0"[left >= 100 :], 7)
    writer.publish()
    assert ring.mark()[0] == 1024 - left
    before = ring.mark()[1]
    writer.begin()
    writer.put_many(None, [bytes(96)] * 2, 0, bytes(2), 7)
    assert ring.mark()[1] == before, "two frames are a quarter: the pad before them publishes nothing"
    writer.put_many(None, [b""], 0, b"\0", 7)
    assert ring.mark()[1] == before + 2
    writer.publish()
    assert ring.mark()[1] == before + 3


def test_a_timestamp_that_precedes_the_last_one_becomes_that_one(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    writer = ring.writer()
    for timestamp in (50, 40, 60, 0, 60):
        writer.append(None, b"", 0, 0, timestamp)
    assert [record.timestamp for record in ring.read()] == [50, 50, 60, 60, 60]  # type: ignore[union-attr]
    again = ring.writer()
    again.append(None, b"", 0, 0, 10)
    assert ring.read()[-1].timestamp == 60  # type: ignore[union-attr]


def test_minus_one_means_the_clock(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    before = time.time_ns()
    ring.writer().append(None, b"", 0, 0, -1)
    assert before <= ring.read()[0].timestamp <= time.time_ns()  # type: ignore[union-attr]


@pytest.mark.parametrize(("position", "sequence"), STARTS)
def test_counters_continue_where_fewer_bits_would_wrap(twin: ModuleType, make_ring: MakeRing, position: int, sequence: int) -> None:
    ring = make_ring(twin, 1024, position=position, sequence=sequence)
    values = [bytes([at]) * (at % 9 * 20) for at in range(60)]
    writer = ring.writer()
    for at, value in enumerate(values):
        assert writer.append(None, value, 0, 0, 7) == sequence + at
        got = ring.read((position, sequence))
        assert_accounted(got, sequence, sequence + at + 1)
        assert all(item.value == values[item.sequence - sequence] for item in got if isinstance(item, Record))
        assert got[-1].sequence == sequence + at  # type: ignore[union-attr]
    assert ring.mark()[0] > position + 4096


def test_the_index_names_the_first_frame_of_each_block(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1 << 18)
    ring.fill([bytes(968)] * 700)
    reader = ring.reader(0, 0)
    for block in range(4):
        position, sequence, timestamp = reader.entry(block)
        assert position % ring.capacity >> 16 == block
        assert (position % ring.capacity) & 0xFFFF < 1000, "an earlier frame would have fitted into the block"
        assert reader.sequence_at(position, ring.mark()[0]) == sequence
        assert timestamp == 7
        assert position + ring.capacity >= ring.mark()[0] - 1000


def test_an_index_entry_that_is_being_changed_says_nothing(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    reader = ring.reader(0, 0)
    assert reader.entry(0) == (frames.NOTHING, 0, 0)
    ring.fill([b"x"])
    assert reader.entry(0) == (0, 0, 7)
    ring.words[frames.INDEX] = 0
    assert reader.entry(0) == (frames.NOTHING, 0, 0)


# Checks of a writer before it stores, and requests of a reader.


def test_a_closed_ring_refuses_every_call(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    reader, writer = ring.reader(0, 0), ring.writer()
    reader.close()
    writer.close()
    for call in (
        reader.head,
        reader.tail,
        reader.mark,
        lambda: reader.request_wake_up(0),
        lambda: reader.word(0),
        lambda: reader.entry(0),
        lambda: reader.sequence_at(0, 100),
        lambda: reader.find_frame(0, 100, 0, 9),
        lambda: reader.walk(0, 100, 0, 0),
        lambda: reader.fetch(100, 1, Record),
        writer.begin,
        lambda: writer.append(None, b"", 0, 0, 0),
        lambda: writer.put_many(None, [b""], 0, b"\0", 0),
    ):
        with pytest.raises(Closed):
            call()


def test_a_reader_that_is_closed_during_a_fetch_looks_at_nothing_more(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    ring.fill([b"a", b"b", b"c"])
    reader = ring.reader(0, 0)

    def make(*fields: Any) -> Record:
        if fields[0] == 1:
            reader.close()  # as a destructor or a signal handler would, that runs at this moment
        return Record(*fields)

    assert [record.value for record in reader.fetch(ring.mark()[0], 10, make)] == [b"a", b"b"]


def test_a_poisoned_log_takes_no_record(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    ring.words[frames.SYNC_ERROR] = 5
    writer = ring.writer()
    before = ring.snapshot()
    with pytest.raises(Poisoned):
        writer.append(None, b"x", 0, 0, 7)
    with pytest.raises(Poisoned):
        writer.begin()
    assert ring.snapshot() == before


def test_a_tail_without_a_mark_is_corruption_for_readers_and_writers(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    ring.fill([b"x"])
    ring.words[frames.TAIL] ^= 64
    before = ring.snapshot()
    with pytest.raises(Corruption, match="mark"):
        ring.mark()
    with pytest.raises(Corruption, match="mark"):
        ring.writer().append(None, b"x", 0, 0, 7)
    assert ring.snapshot() == before


def test_the_holder_signs_only_when_another_one_held_the_lock_before(make_ring: MakeRing) -> None:
    stores: list[int] = []
    ring = make_ring(frames_py)
    writer = ring.writer(control=Watched("control", ring.control, lambda _, offset, __: stores.append(offset // 8)))
    holder = range(frames.HOLDER, frames.HOLDER + frames.HOLDER_WORDS)

    writer.append(None, b"x", 0, 0, 7)
    assert [at for at in stores if at in holder] == list(holder)
    assert bytes(ring.control[frames.HOLDER * 8 :][:48]) == HOLDER
    stores.clear()
    writer.append(None, b"x", 0, 0, 7)
    assert not [at for at in stores if at in holder]


def test_a_lock_that_another_one_holds_makes_append_say_busy(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    other, writer = ring.append_lock(), ring.writer()
    assert other.take()
    before = ring.snapshot()
    assert writer.append(None, b"x", 0, 0, 7) == frames.BUSY
    assert ring.snapshot() == before
    other.free()
    assert writer.append(None, b"x", 0, 0, 7) == 0


def test_a_writer_in_another_process_than_its_own_says_so(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    writer = ring.writer()
    assert in_child(lambda: writer.append(None, b"x", 0, 0, 7)) == frames.FORKED
    assert ring.mark()[1] == 0


def test_a_reader_that_asked_is_rung_for_once(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    writer = ring.writer()
    writer.append(None, b"x", 0, 0, 7)
    assert not writer.has_watchers
    rings = ring.words[frames.RINGS]
    for way in (frames.WATCHES, frames.SLEEPS):
        assert ring.reader(0, 0).request_wake_up(way) == ring.mark()[0]
    assert ring.words[frames.WANTED] == 1 | 1 << 8
    writer.append(None, b"x", 0, 0, 7)
    assert writer.has_watchers, "the caller wakes those that watch by inotify"
    assert ring.words[frames.WANTED] == 0
    assert ring.words[frames.RINGS] == rings + 1
    writer.has_watchers = False
    writer.append(None, b"x", 0, 0, 7)
    assert not writer.has_watchers
    assert ring.words[frames.RINGS] == rings + 1


def test_a_reader_sleeps_only_if_nothing_came_since_its_look_and_no_wake_up(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    reader = ring.reader(0, 0)
    end = reader.edge_now()
    hours = 3600 * 10**9
    reader.wake()
    reader.sleep(end, hours, hours)  # it was woken before it slept
    ring.writer().append(None, b"x", 0, 0, 7)
    reader.sleep(end, hours, hours)
    assert ring.words[frames.WANTED] == 1 << 8 * frames.SLEEPS, "it asked before it looked"
    assert [record.value for record in reader.sleep_and_fetch(end, 0, 1, hours, hours, 9, Record, [])] == [b"x"]


# The order of the stores (interpreted twin: the compiled one is made of the same source).


def watched_writer(ring: Ring, before: Callable[[str, int, int], None]) -> Any:
    return ring.writer(Watched("data", ring.data, before), Watched("control", ring.control, before))


def batch(writer: Any, values: list[bytes]) -> None:
    writer.begin()
    writer.put_many(None, values, 0, bytes(len(values)), 7, frames_py.measure(None, values)[1])
    writer.publish()


@pytest.fixture(params=[64, 4096])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches make room in steps smaller than a batch, and larger."""
    monkeypatch.setattr(end_py, "STEP", request.param)


@pytest.mark.usefixtures("step")
@pytest.mark.parametrize(("position", "sequence"), STARTS)
def test_head_and_min_seq_advance_before_a_byte_that_they_protect_is_overwritten(
    make_ring: MakeRing, position: int, sequence: int
) -> None:
    ring = make_ring(frames_py, 1024, position=position, sequence=sequence)
    checked = 0

    def check(name: str, offset: int, size: int) -> None:
        nonlocal checked
        head, tail = ring.words[frames.HEAD], ring.words[frames.TAIL]
        oldest = ring.reader(0, 0).sequence_at(head, tail)
        if oldest != frames.NOTHING:
            assert ring.words[frames.MIN_SEQ] >= oldest
        if name == "data":
            first_live = (offset - head) % 1024
            assert first_live >= tail - head, f"{size} bytes at {offset} were still protected"
            assert first_live + size <= 1024
            checked += 1

    writer = watched_writer(ring, check)
    for at in range(80):
        if at % 4:
            writer.append(None, bytes(at * 11 % 200), 0, 0, 7)
        else:
            batch(writer, [bytes(at * 7 % 150)] * (at % 9 + 1))
    assert checked > 1000
    assert ring.words[frames.HEAD] > position + 4096


def test_the_mark_of_the_current_tail_is_true_at_every_store(make_ring: MakeRing) -> None:
    ring = make_ring(frames_py, 1024)
    seen: set[tuple[int, int, int]] = set()
    writer = watched_writer(ring, lambda *_: seen.add(ring.mark()))
    published = {ring.mark()}
    for at in range(40):
        batch(writer, [bytes(30)] * (at % 3 + 1))
        published.add(ring.mark())
    assert seen <= published
    assert len(seen) == 40


def test_the_tail_is_stored_once_for_a_publication_and_after_everything_it_publishes(make_ring: MakeRing) -> None:
    ring = make_ring(frames_py, 1024)
    stores: list[tuple[str, int]] = []
    writer = watched_writer(ring, lambda name, offset, _: stores.append((name, offset // 8)))
    for _ in range(20):
        stores.clear()
        batch(writer, [b"x"] * 3)
        assert [store for store in stores if store == ("control", frames.TAIL)] == [stores[-1]]


def test_min_seq_is_stored_before_head(make_ring: MakeRing) -> None:
    ring = make_ring(frames_py, 1024)
    stores: list[int] = []
    writer = watched_writer(ring, lambda name, offset, _: stores.append(offset // 8 if name == "control" else -1))
    for _ in range(60):
        writer.append(None, bytes(50), 0, 0, 7)
    moves = [at for at in stores if at in (frames.HEAD, frames.MIN_SEQ)]
    assert len(moves) > 40
    assert moves[::2] == [frames.MIN_SEQ] * (len(moves) // 2)
    assert moves[1::2] == [frames.HEAD] * (len(moves) // 2)


def kill_at_each_store(make_ring: MakeRing, prefill: int, values: list[bytes], start: tuple[int, int]) -> Iterator[tuple[Ring, bool]]:
    """Yield a ring whose writer was killed before its n-th store of putting `values`, for each second n; at last one where it wasn't."""
    ring = make_ring(frames_py, 1024, position=start[0], sequence=start[1])
    ring.fill([b"before %d" % at + bytes(at * 29 % 120) for at in range(prefill)])
    filled = ring.snapshot()
    for last in some(range(1, 1_000_000), 2, prefill % 2):
        ring.restore(filled)
        left = last

        def count(*_: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        writer = watched_writer(ring, count)
        try:
            if len(values) == 1:
                writer.append(None, values[0], 0, 0, 7)
            else:
                batch(writer, values)
        except Killed:
            ring.kill()
            yield ring, True
        else:
            yield ring, False
            return


@pytest.mark.usefixtures("step")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_writer_killed_between_any_two_stores_leaves_a_log_that_the_next_one_continues(
    make_ring: MakeRing, count: int, start: tuple[int, int]
) -> None:
    kills = survivors = 0
    values = [b"killed %d" % at + bytes(60) for at in range(count)]
    for prefill in (0, 1, 6, 7, 8, 9, 10, 11, 25):
        place, acknowledged = (start[0], start[1]), start[1] + prefill
        for ring, was_killed in kill_at_each_store(make_ring, prefill, values, start):
            recovered = ring.mark()[1]
            assert acknowledged <= recovered <= acknowledged + count
            if not was_killed:
                assert recovered == acknowledged + count
            before = ring.read(place)
            assert_accounted(before, place[1], recovered)

            ring.fill([b"after"])
            after = ring.read(place)
            assert_accounted(after, place[1], recovered + 1)
            for item in after:
                if isinstance(item, Gap):
                    assert item.reason == "overrun"
                    assert item.last < acknowledged or count == 9
                elif item.sequence < acknowledged:
                    assert item.value.startswith(b"before %d" % (item.sequence - start[1]))
                elif item.sequence < recovered:
                    assert item.value == values[item.sequence - acknowledged]
                else:
                    assert item.value == b"after"
            kills += was_killed
            survivors += recovered > acknowledged
    assert kills > (200 if ALL else 100)
    assert survivors >= 9


# Hostile bytes.


def noisy_ring(make_ring: MakeRing, twin: ModuleType) -> tuple[Ring, dict[int, range], tuple[int, int]]:
    """Return a guarded ring of 512 bytes that has wrapped, the range of the checked bytes of each record, and the oldest position."""
    ring = make_ring(twin, 512, guarded=True)
    ring.fill([bytes([at]) * (at * 5 % 37) for at in range(17)])
    where = {}
    position, end = ring.words[frames.HEAD], ring.mark()[0]
    reader = ring.reader(position, 0)
    place = ring.earliest()
    reader.sequence = place[1]
    while got := reader.fetch(end, 1, Record):
        start = (reader.position - ((32 + len(got[0].value) + 7) & ~7)) % 512
        where[got[0].sequence] = range(start, start + 32 + len(got[0].value))
    assert len(where) > 7
    assert place[0] > 0, "the ring has wrapped"
    return ring, where, place


def test_a_flipped_bit_costs_the_record_it_is_in_and_no_other(twin: ModuleType, make_ring: MakeRing) -> None:
    ring, where, place = noisy_ring(make_ring, twin)
    whole = ring.read(place)
    assert gaps(whole) == []

    def flip_each() -> int:
        lost = 0
        for bit in range(512 * 8):
            ring.data[bit >> 3] ^= 1 << (bit & 7)
            hit = [sequence for sequence, bytes_of in where.items() if bit >> 3 in bytes_of]
            expected = [Gap(item.sequence, item.sequence, "damaged", "ring") if item.sequence in hit else item for item in whole]
            assert ring.read(place) == expected, f"bit {bit}"
            lost += len(hit)
            ring.data[bit >> 3] ^= 1 << (bit & 7)
        return lost

    assert in_child(flip_each) == 8 * sum(map(len, where.values()))


def test_a_flipped_bit_never_makes_the_earliest_place_pass_over_a_sound_record(twin: ModuleType, make_ring: MakeRing) -> None:
    ring, where, place = noisy_ring(make_ring, twin)
    first, end = place[1], ring.mark()[1]

    def flip_each() -> None:
        for bit in range(512 * 8):
            ring.data[bit >> 3] ^= 1 << (bit & 7)
            hit = {sequence for sequence, bytes_of in where.items() if bit >> 3 in bytes_of}
            got = ring.read()
            assert sequences(got) == [at for at in range(first, end) if at not in hit], f"bit {bit}"
            assert_accounted(got, first, end)
            ring.data[bit >> 3] ^= 1 << (bit & 7)

    in_child(flip_each)


def test_a_flipped_bit_never_leads_a_search_past_a_sound_record(twin: ModuleType, make_ring: MakeRing) -> None:
    ring, where, place = noisy_ring(make_ring, twin)
    end = ring.mark()[1]

    def flip_each() -> None:
        for bit in some(range(512 * 8), 5):
            ring.data[bit >> 3] ^= 1 << (bit & 7)
            hit = {sequence for sequence, bytes_of in where.items() if bit >> 3 in bytes_of}
            for start in range(place[1], end):
                got = ring.read(search.find(ring.reader(0, 0), start))
                assert sequences(got) == [at for at in range(start, end) if at not in hit], f"bit {bit}, from {start}"
                assert_accounted(got, start, end)
            ring.data[bit >> 3] ^= 1 << (bit & 7)

    in_child(flip_each)


def test_a_word_of_the_ring_replaced_costs_the_record_it_is_in_and_no_other(twin: ModuleType, make_ring: MakeRing) -> None:
    ring, where, place = noisy_ring(make_ring, twin)
    whole = ring.read(place)
    # The last ones are lengths that agree with each other, and with nothing else.
    hostile = [0, 2**64 - 1, 2**63, 0xFFFFFFF8, 0x20, 2**64 - 8, 0xFFFFFFFF_00000020, 0x1F_00000040, 512, 0x7FFFFFF8, 0x0000FFFF_0000FF00]
    hostile += [stored | (stored - 32) << 32 for stored in range(32, 520, 8)]

    def replace_each() -> None:
        words = ring.data.cast("Q")
        for at in range(64):
            kept = words[at]
            for value in hostile:
                words[at] = value
                hit = [
                    sequence
                    for sequence, bytes_of in where.items()
                    if any((kept ^ value) >> 8 * (byte & 7) & 0xFF for byte in bytes_of if byte >> 3 == at)
                ]
                expected = [Gap(item.sequence, item.sequence, "damaged", "ring") if item.sequence in hit else item for item in whole]
                assert ring.read(place) == expected, f"word {at} = {value:#x}"
            words[at] = kept

    in_child(replace_each)


def test_a_flipped_bit_of_a_pad_costs_no_record(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([bytes(128)] * 8)
    whole = ring.read((160, 1))
    assert sequences(whole) == [2, 3, 4, 5, 6, 7]
    assert ring.data[960 + 25] == frames.PAD
    for bit in range(960 * 8, 992 * 8):
        ring.data[bit >> 3] ^= 1 << (bit & 7)
        assert ring.read((160, 1)) == whole, f"bit {bit}"
        ring.data[bit >> 3] ^= 1 << (bit & 7)


def test_damage_of_neighbours_is_one_gap(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([bytes(32)] * 10)
    for sequence in (3, 4, 5):
        ring.data[sequence * 64 + 40] ^= 1
    got = ring.read((0, 0))
    assert gaps(got) == [(3, 5, "damaged")]
    assert sequences(got) == [0, 1, 2, 6, 7, 8, 9]


def test_stale_frames_of_an_earlier_lap_and_frames_of_another_log_are_not_records(twin: ModuleType, make_ring: MakeRing) -> None:
    ring, other = make_ring(twin, 1024), make_ring(twin, 1024)
    ring.fill([bytes(32)] * 20)
    lap = bytes(ring.data)
    ring.fill([bytes(32)] * 12)
    place = ring.earliest()
    ring.data[256:320] = lap[256:320]
    assert gaps(ring.read(place)) == [(20, 20, "damaged")]

    other.twin.FrameWriter(other.data, other.control, SEED ^ 1, other.append_lock(), memoryview(HOLDER)).append(None, bytes(32), 0, 0, 7)
    fresh = make_ring(twin, 1024)
    fresh.fill([bytes(32)] * 2)
    fresh.data[:64] = other.data[:64]
    assert gaps(fresh.read((0, 0))) == [(0, 0, "damaged")]


def test_a_value_that_looks_like_frames_is_not_mistaken_for_them_after_damage(twin: ModuleType, make_ring: MakeRing) -> None:
    forged = make_ring(twin, 1024)
    forged.fill([b"a", b"b", b"forged"])
    ring = make_ring(twin, 1024)
    ring.fill([b"first", bytes(8) + bytes(forged.data[80:128]), b"last"])
    ring.data[0] ^= 8  # the first record's length, so that the next sound frame must be searched
    assert ring.read((0, 0))[-1].value == b"last"  # type: ignore[union-attr]
    assert sequences(ring.read((0, 0))) == [1, 2]


def test_writers_continue_over_any_flipped_bit_and_any_replaced_word(twin: ModuleType, make_ring: MakeRing) -> None:
    ring, _, place = noisy_ring(make_ring, twin)
    filled = ring.snapshot()
    words = ring.data.cast("Q")
    originals = ring.read(place)
    next_sequence = ring.mark()[1]
    damages = [(at, words[at] ^ 1 << bit) for at in range(64) for bit in some(range(64), 11, at % 11)]
    damages += [(at, value) for at in range(64) for value in (0, 2**64 - 1, 0x20, 0xFFFFFFF8, 0x00FFFFFF_00000040)]

    def damage_each() -> None:
        for at, value in damages:
            ring.restore(filled)
            words[at] = value
            writer = ring.writer()
            for added in range(12):
                assert writer.append(None, b"new %d" % added, 0, 0, 9) == next_sequence + added
                head, tail = ring.words[frames.HEAD], ring.words[frames.TAIL]
                assert tail - 512 <= head <= tail
            got = ring.read(place)
            assert_accounted(got, place[1], next_sequence + 12)
            for item in got:
                if isinstance(item, Record):
                    if item.sequence < next_sequence:
                        assert item == originals[item.sequence - place[1]]
                    else:
                        assert item.value == b"new %d" % (item.sequence - next_sequence)
            assert sequences(got)[-8:] == list(range(next_sequence + 4, next_sequence + 12)), (at, hex(value))

    in_child(damage_each, 120)


CONTROL_WORDS = [frames.HEAD, frames.MIN_SEQ, frames.TAIL, *range(frames.MARKS, frames.MARKS + 6), frames.WANTED, frames.INDEX]


@pytest.mark.parametrize("at", CONTROL_WORDS)
@pytest.mark.parametrize(("position", "sequence"), STARTS)
def test_a_hostile_word_of_the_control_block_never_crashes_or_hangs_a_reader(
    twin: ModuleType, make_ring: MakeRing, at: int, position: int, sequence: int
) -> None:
    ring = make_ring(twin, 512, position=position, sequence=sequence, guarded=True)
    ring.fill([bytes(9)] * 20)
    filled = ring.snapshot()

    def replace() -> None:
        for value in hostile_values(ring.words[at]):
            ring.restore(filled)
            ring.words[at] = value
            for start in ("earliest", "latest", sequence + 15, sequence, datetime.now(UTC)):
                try:
                    place = search.find(ring.reader(0, 0), start)
                    got = ring.read(place)
                except (Corruption, ValueError):
                    continue
                assert all(record.value == bytes(9) for record in got if isinstance(record, Record))

    in_child(replace, 3)


@pytest.mark.parametrize("at", CONTROL_WORDS)
@pytest.mark.parametrize(("position", "sequence"), STARTS)
def test_a_hostile_word_of_the_control_block_never_crashes_or_hangs_a_writer(
    twin: ModuleType, make_ring: MakeRing, at: int, position: int, sequence: int
) -> None:
    ring = make_ring(twin, 512, position=position, sequence=sequence, guarded=True)
    ring.fill([bytes(9)] * 20)
    filled = ring.snapshot()

    def replace() -> None:
        for value in hostile_values(ring.words[at]):
            ring.restore(filled)
            ring.words[at] = value
            try:
                for _ in range(12):
                    ring.writer().append(None, bytes(9), 0, 0, 7)
                ring.read()
            except (Corruption, ValueError):
                continue  # the interpreted twin finds that a number has no successor in 64 bits

    in_child(replace, 3)


def hostile_values(kept: int) -> list[int]:
    return [0, 1, 7, 2**64 - 1, 2**64 - 8, 2**63, 2**62, kept ^ 1, kept ^ 8, kept ^ 1 << 40, kept ^ 1 << 62]


# Copying out.


def columns(rows: int, key_bytes: int = 4096, value_bytes: int = 4096) -> dict[str, Any]:
    """Return empty columns as Arrow lays them out, in the order in which `gather` takes them."""
    return {
        "sequences": array("q", [-1] * rows),
        "timestamps": array("q", [-1] * rows),
        "types": array("i", [-1] * rows),
        "key_offsets": array("i", [-1] * (rows + 1)),
        "keys": bytearray(key_bytes),
        "key_bits": bytearray(-(-rows // 8) or 1),
        "value_offsets": array("i", [-1] * (rows + 1)),
        "values": bytearray(value_bytes),
    }


def gather(reader: Any, end: int, limit: int, into: dict[str, Any]) -> int:
    return reader.gather(end, limit, *(memoryview(column) for column in into.values()))  # type: ignore[no-any-return]


def test_gather_gives_the_columns_of_what_fetch_gives_as_records(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1 << 14)
    writer = ring.writer()
    for at in range(30):
        writer.append(None if at % 3 == 0 else b"k" * (at % 5), b"v" * (at % 11), at, at % 4, 100 + at)
    records = ring.reader(0, 0).fetch(ring.mark()[0], 100, Record)
    into = columns(30)
    reader = ring.reader(0, 0)

    assert gather(reader, ring.mark()[0], 30, into) == 30

    assert reader.stop == frames.FULL
    assert (reader.position, reader.sequence) == ring.mark()[:2]
    for at, record in enumerate(records):
        assert (into["sequences"][at], into["timestamps"][at], into["types"][at]) == (record.sequence, record.timestamp, record.type)
        key = bytes(into["keys"][into["key_offsets"][at] : into["key_offsets"][at + 1]])
        has_key = into["key_bits"][at >> 3] >> (at & 7) & 1
        assert (key if has_key else None) == record.key
        assert bytes(into["values"][into["value_offsets"][at] : into["value_offsets"][at + 1]]) == record.value
    assert gather(reader, ring.mark()[0], 30, columns(30)) == 0
    assert reader.stop == frames.END


@pytest.mark.parametrize(("key_bytes", "value_bytes", "expected"), [(4096, 35, 3), (7, 4096, 3), (0, 4096, 0), (4096, 9, 0), (8, 40, 4)])
def test_gather_stops_before_a_record_that_does_not_fit(
    twin: ModuleType, make_ring: MakeRing, key_bytes: int, value_bytes: int, expected: int
) -> None:
    ring = make_ring(twin)
    writer = ring.writer()
    for _ in range(6):
        writer.append(b"kk", bytes(10), 0, 0, 7)
    into = columns(6, key_bytes + 1, value_bytes + 1)
    into["keys"], into["values"] = bytearray(key_bytes or 1), bytearray(value_bytes)
    reader = ring.reader(0, 0)
    assert gather(reader, ring.mark()[0], 6, into) == expected
    assert reader.stop == frames.FULL
    assert reader.sequence == expected
    assert gather(reader, ring.mark()[0], 6, columns(6)) == 6 - expected


def test_gather_stops_at_damage_and_at_an_overrun_as_fetch_does(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([bytes(32)] * 8)
    ring.data[3 * 64 + 50] ^= 1
    reader = ring.reader(0, 0)
    assert gather(reader, ring.mark()[0], 8, columns(8)) == 3
    assert (reader.stop, reader.position, reader.sequence) == (frames.DAMAGED, 192, 3)
    ring.fill([bytes(32)] * 14)
    assert gather(reader, ring.mark()[0], 8, columns(8)) == 0
    assert reader.stop == frames.OVERRUN


@pytest.mark.parametrize("start", STARTS)
def test_every_way_to_read_stops_at_the_same_frame_for_the_same_reason(
    twin: ModuleType, make_ring: MakeRing, start: tuple[int, int]
) -> None:
    noise = random.Random(start[0])
    reasons = set()
    for _ in range(150):
        ring = make_ring(twin, 1024, position=start[0], sequence=start[1])
        writer = ring.writer()
        for at in range(noise.randrange(1, 60)):
            key = None if noise.random() < 0.5 else noise.randbytes(noise.randrange(9))
            writer.append(key, noise.randbytes(noise.randrange(90)), at & 0xFF, at % 4, 7 + at)
        place, end = ring.earliest(), ring.mark()[0]
        if noise.random() < 0.6:
            at = noise.randrange(0, 1024, 8)
            change = noise.choice([1, 2, 8, 1 << 32, 1 << 40, 1 << 63, PAD_TAG])
            words = ring.data.cast("Q")
            words[at >> 3] ^= change
        if place[1] and noise.random() < 0.3:
            place = place[0], place[1] - 1  # the frame there is a later one than expected
        if noise.random() < 0.2:
            ring.words[frames.HEAD] = min(end, ring.words[frames.HEAD] + noise.randrange(0, 400, 8))
        limit = noise.choice([3, 60])

        def by_records(reader: Any, limit: int = limit, end: int = end) -> tuple[int, int]:
            records = reader.fetch(end, limit, lambda *fields: fields)
            return len(records), sum(len(key or b"") + len(value) for *_, key, value, _ in records)

        def by_values(reader: Any, limit: int = limit, end: int = end) -> int:
            return len(reader.fetch(end, limit, None))

        def by_columns(reader: Any, limit: int = limit, end: int = end) -> tuple[int, int]:
            into = columns(60, 8192, 8192)
            count = gather(reader, end, limit, into)
            return count, into["key_offsets"][count] + into["value_offsets"][count]

        def outcome(read: Callable[[Any], Any], place: tuple[int, int] = place, ring: Ring = ring) -> tuple[Any, ...]:
            reader = ring.reader(*place)
            got = read(reader)
            found = reader.sequence_found if reader.stop == frames.JUMPED else None
            return got, reader.stop, reader.position, reader.sequence, found

        expected = outcome(by_records)
        assert outcome(by_columns) == expected
        assert outcome(lambda reader, limit=limit, end=end: reader.check(end, limit)) == expected
        assert outcome(by_values) == (expected[0][0], *expected[1:])
        reasons.add(expected[1])
    assert reasons >= {frames.END, frames.OVERRUN, frames.DAMAGED, frames.FULL}
    assert frames.JUMPED in reasons or not start[1]


def test_a_frame_that_was_overwritten_while_it_was_copied_is_not_returned(make_ring: MakeRing) -> None:
    """Interpreted: only there a test comes between the copy and the look at the head."""
    for read in ("records", "values", "columns", "check"):
        ring = make_ring(frames_py, 1024)
        ring.fill([bytes([at]) * 32 for at in range(8)])

        class Overrun:
            """The ring, in which a writer gives up the frame at 128 after its bytes were read."""

            def cast(self, code: str, ring: Ring = ring) -> memoryview:
                return ring.data.cast(code)  # type: ignore[call-overload, no-any-return]

            def __len__(self, ring: Ring = ring) -> int:
                return len(ring.data)

            def __getitem__(self, at: slice, ring: Ring = ring) -> memoryview:
                if at.start == 128 + frames.HEADER:
                    ring.words[frames.HEAD] = 192
                return ring.data[at]

        reader = frames_py.FrameReader(Overrun(), ring.control, SEED, 0, 0)  # type: ignore[arg-type]
        end = ring.mark()[0]
        if read == "columns":
            into = columns(8)
            count = gather(reader, end, 8, into)
        elif read == "check":
            count, _ = reader.check(end, 8)
        else:
            count = len(reader.fetch(end, 8, Record if read == "records" else None))
        assert (count, reader.stop, reader.position, reader.sequence) == (2, frames.OVERRUN, 128, 2), read


def test_put_columns_writes_the_frames_that_put_many_writes(twin: ModuleType, make_ring: MakeRing) -> None:
    keys: list[bytes | None] = [None, b"", b"abc", b"z"]
    values = [b"one", b"", b"three" * 9, b"4"]
    one, other = make_ring(twin), make_ring(twin)
    batch_writer, column_writer = one.writer(), other.writer()
    batch_writer.begin()
    batch_writer.put_many([keys[2], keys[0], keys[1], keys[3]], [values[2], values[0], values[1], values[3]], 5, bytes([3] * 4), 77)
    batch_writer.publish()
    column_writer.begin()
    column_writer.put_columns(
        memoryview(array("i", [2, 0, 1, 3])),
        4,
        memoryview(array("i", [0, 0, 0, 3, 4])),
        b"abcz",
        bytes([0, 1, 1, 1]),
        memoryview(array("i", [0, 3, 3, 48, 49])),
        b"".join(values),
        bytes([5] * 4),
        3,
        memoryview(array("q", [77] * 4)),
    )
    column_writer.publish()
    assert one.snapshot() == other.snapshot()
    assert [record.key for record in other.read()] == [b"abc", None, b"", b"z"]  # type: ignore[union-attr]


def test_measure_columns_finds_the_longest_key_and_the_largest_record(twin: ModuleType) -> None:
    offsets, has_key = memoryview(array("i", [2, 2, 9, 10])), bytes([1, 0, 1])
    assert twin.measure_columns(0, offsets, None, offsets) == (0, 0)
    assert twin.measure_columns(3, memoryview(array("i", [0])), None, offsets) == (0, 7)
    assert twin.measure_columns(3, memoryview(array("i", [0, 3, 8, 10])), has_key, offsets) == (3, 7)
    assert twin.measure_columns(3, memoryview(array("i", [0, 8, 8, 10])), has_key, offsets) == (8, 8)


@pytest.mark.parametrize("stored", [136, 168])
def test_a_writer_of_batches_touches_nothing_after_the_ring(twin: ModuleType, make_ring: MakeRing, stored: int) -> None:
    ring = make_ring(twin, 4096, guarded=True)
    assert 4096 % stored in (16, 64)
    writer = ring.writer()
    for _ in range(40):
        batch(writer, [bytes(stored - 32)] * 5)
    assert sequences(ring.read()) == list(range(200 - 4096 // stored, 200))


def test_append_many_publishes_all_records_at_once(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 4096)
    writer = ring.writer()
    assert writer.append_many(None, [b"one", b"two"], 5, 7) == range(2)
    assert writer.append_many([None, b"key", b""], [b"three", b"", b"five"], 6, 8) == range(2, 5)
    assert ring.read() == [
        Record(0, 7, 5, None, b"one"),
        Record(1, 7, 5, None, b"two"),
        Record(2, 8, 6, None, b"three"),
        Record(3, 8, 6, b"key", b""),
        Record(4, 8, 6, b"", b"five"),
    ]
    for _ in range(30):
        assert writer.append_many(None, [bytes(96)] * 8, 0, 9) is not None
    assert sequences(ring.read()) == list(range(213, 245))


def test_append_many_does_nothing_where_it_takes_more_than_one_step(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 4096)
    writer = ring.writer()
    writer.append_many(None, [b"before"], 0, 7)
    before = ring.snapshot()
    cases: list[tuple[list[Any] | None, list[Any]]] = [
        (None, []),
        (None, ["text"]),
        (None, [b"bytes", "text"]),
        (None, [b"bytes", bytearray(b"others")]),
        ([b"too few"], [b"1", b"2"]),
        (["text"], [b"1"]),
        ([bytes(0xFFFF)], [b"1"]),
        (None, [bytes(100)] * 8),
        (None, [bytes(1000)]),
    ]
    for keys, values in cases:
        assert writer.append_many(keys, values, 0, 7) is None
    for word in (frames.PENDING, frames.MOVED, frames.PINS):
        ring.words[word] = 1
        assert writer.append_many(None, [b"1"], 0, 7) is None
        ring.words[word] = 0
    other = ring.append_lock()
    assert other.take()
    assert writer.append_many(None, [b"1"], 0, 7) is None
    other.free()
    assert writer.locked(lambda held: held.append_many(None, [b"1"], 0, 7)) is None
    assert ring.snapshot() == before
    assert writer.append_many(None, [b"after"], 0, 7) == range(1, 2)


def test_measure_finds_the_longest_value_and_what_is_not_bytes(twin: ModuleType) -> None:
    assert twin.measure(None, []) == twin.measure([], []) == (0, 0)
    assert twin.measure(None, [b"", b"abc", b"z"]) == (3, 32 + 40 + 40)
    assert twin.measure([None, b"12345678", b""], [b"", b"abc", b"z"]) == (11, 32 + 48 + 40)
    for keys in ([], [None, b""], [None, "k", None], [None, bytes(65535), None]):
        assert twin.measure(keys, [b"", b"abc", b"z"]) == (-1, 0)
    for other in ("text", bytearray(9), None, 7):
        assert twin.measure(None, [b"abc", other, b"z"]) == (-1, 0)


def test_a_batch_returns_in_order_as_many_as_it_may_and_then_asks_for_more(twin: ModuleType) -> None:
    asked = []

    def refill() -> str:
        asked.append(batch.at)
        if len(asked) == 3:
            raise StopIteration
        batch.clear().extend(["second", "third"])
        batch.at = 1
        return "second"

    batch = twin.Batch(-1)
    batch.items.append("first")
    items = twin.Items(batch, refill)
    assert iter(items) is items
    assert list(items) == ["first", *["second", "third"] * 2]
    assert asked == [1, 2, 2]


def test_a_batch_gives_no_more_than_it_may(twin: ModuleType) -> None:
    batch = twin.Batch(2)
    batch.items.extend("abc")
    assert [batch.take(lambda: "refilled") for _ in range(4)] == ["a", "b", "refilled", "refilled"]
    assert (batch.left, batch.at) == (0, 2)
    assert (batch.clear(), batch.items, batch.at) == ([], [], 0)


def test_fetch_gives_values_alone_where_no_record_is_wanted(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin)
    ring.fill([b"a", b"", b"ccc"])
    reader = ring.reader(0, 0)
    assert reader.fetch(ring.mark()[0], 2, None) == [b"a", b""]
    assert reader.stop == frames.FULL
    assert reader.fetch(ring.mark()[0], 2, None) == [b"ccc"]
    assert reader.stop == frames.END


def test_a_copy_made_while_the_writer_ran_over_it_is_void(make_ring: MakeRing) -> None:
    ring = make_ring(frames_py, 1024)
    ring.fill([bytes([at]) * 32 for at in range(10)])
    other = ring.writer()
    moves = iter([14])

    class Overwritten(Watched):
        """Lets a writer run over the ring between the header's read and the copy."""

        def __getitem__(self, at: Any) -> Any:
            if isinstance(at, slice):
                for _ in range(next(moves, 0)):
                    other.append(None, b"\xff" * 32, 0, 0, 7)
            return self.view[at]

    reader = frames_py.FrameReader(Overwritten("data", ring.data, lambda *_: None), ring.control, SEED, 0, 0)  # type: ignore[arg-type]
    assert reader.fetch(640, 10, Record) == []
    assert reader.stop == frames.OVERRUN
    assert (reader.position, reader.sequence) == (0, 0)


def test_every_reserved_word_has_a_line_of_its_own() -> None:
    lines = [frames.HEAD, frames.TAIL, frames.SYNC_ERROR, frames.WANTED, frames.HOLDER]
    assert all(later // 8 - earlier // 8 >= 1 for earlier, later in pairwise(lines))


def leftover_ring(twin: ModuleType, make_ring: MakeRing) -> Ring:
    """Return a ring with the records 10..19, in which 13 and 14 are records of the lap before, as a crash of the machine may leave it."""
    ring = make_ring(twin, 1024)
    ring.fill([b"%02d" % at * 30 for at in range(10)])
    before = bytes(ring.data)
    ring.fill([b"%02d" % at * 30 for at in range(10, 20)])
    ring.data[288:480] = before[288:480]
    return ring


def test_a_reader_passes_over_frames_of_an_earlier_lap(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = leftover_ring(twin, make_ring)
    items = ring.read()
    assert [item.sequence for item in items if isinstance(item, Record)] == [10, 11, 12, 15, 16, 17, 18, 19]
    assert [(item.first, item.last, item.reason) for item in items if isinstance(item, Gap)] == [(13, 14, "damaged")]


@pytest.mark.parametrize("sequence", range(10, 21))
def test_a_search_passes_over_frames_of_an_earlier_lap(twin: ModuleType, make_ring: MakeRing, sequence: int) -> None:
    ring = leftover_ring(twin, make_ring)
    items = ring.read(search.find(ring.reader(0, 0), sequence))
    expected = [at for at in range(sequence, 20) if at not in (13, 14)]
    assert [item.sequence for item in items if isinstance(item, Record)] == expected
    assert [(item.first, item.last) for item in items if isinstance(item, Gap)] == ([(max(13, sequence), 14)] if sequence < 15 else [])


def test_a_pad_of_an_earlier_lap_hides_no_record(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = make_ring(twin, 1024)
    ring.fill([b"%02d" % at * 30 for at in range(11)])  # the eleventh doesn't fit, and follows a pad of 64 bytes
    pad = bytes(ring.data[960:992])
    ring.fill([b"%02d" % at * 30 for at in range(11, 20)])
    ring.fill([b"", b""])  # where the pad was
    assert [item.sequence for item in ring.read()][-2:] == [20, 21]
    ring.data[960:992] = pad
    items = ring.read()
    assert [(item.first, item.last, item.reason) for item in items if isinstance(item, Gap)] == [(20, 20, "damaged")]
    assert items[-1].sequence == 21  # type: ignore[union-attr]


def test_making_room_never_lowers_min_seq_and_the_head_never_stands_at_a_frame_of_an_earlier_lap(
    twin: ModuleType, make_ring: MakeRing
) -> None:
    ring = leftover_ring(twin, make_ring)
    least = 10
    for at in range(20, 40):
        ring.fill([b"%02d" % at * 30])
        head, first = ring.earliest()
        assert ring.words[frames.MIN_SEQ] == first >= least, "exact, and never smaller than before"
        assert first not in (13, 14)
        least = first
        assert [item.sequence for item in ring.read() if isinstance(item, Record)][0] == first
    assert least > 20


def test_a_scan_finds_every_run_and_pad_and_erases_the_given_ones(twin: ModuleType, make_ring: MakeRing) -> None:
    ring = leftover_ring(twin, make_ring)

    def found(least: int = 0, split: int = frames.NOTHING) -> list[tuple[int, int, int, int, int]]:
        scanner = twin.FrameScanner(ring.data, ring.control, SEED)
        runs, position = [], 0
        while scanner.next_run(position, 1024, least, split):
            runs.append((scanner.start, scanner.position, scanner.first, scanner.last, scanner.frames))
            position = scanner.position if scanner.frames else scanner.start + frames.HEADER
        scanner.close()
        return runs

    assert found() == [(0, 288, 10, 12, 3), (288, 480, 3, 4, 2), (480, 960, 15, 19, 5), (960, 1024, 10, 10, 0)]
    assert found(least=11) == [(96, 288, 11, 12, 2), (480, 960, 15, 19, 5)]
    assert found(split=17)[2:] == [(480, 672, 15, 16, 2), (672, 960, 17, 19, 3), (960, 1024, 10, 10, 0)]
    scanner = twin.FrameScanner(ring.data, ring.control, SEED)
    assert [scanner.place_of(480, 960, sequence) for sequence in (0, 15, 17, 19, 20)] == [480, 480, 672, 864, 960]
    before = bytes(ring.data)
    scanner.erase(288, 480, 4)
    scanner.erase(960, 1024, 10)
    assert found() == [(0, 288, 10, 12, 3), (288, 384, 3, 3, 1), (480, 960, 15, 19, 5)]
    assert bytes(ring.data) == before[:384] + bytes(8) + before[392:960] + bytes(8) + before[968:], "one word each"
    scanner.clear_index()
    scanner.enter_run(1024 + 480, 1024 + 960)
    assert ring.reader(0, 0).entry(0) == (1024 + 480, 15, 7)
    with pytest.raises(Closed):
        scanner.close()
        scanner.next_run(0, 1024, 0, 0)
