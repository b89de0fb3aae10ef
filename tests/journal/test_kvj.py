"""Our own journal format: its bytes, what its checksums find, and that values keep their codecs."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import pytest

import kvspool
from kvspool import Codec, Gap, Record
from kvspool.errors import Corruption, GapError, TooLarge, UnknownVersion
from kvspool.journal import Journal, JournalBatch
from kvspool.journal.cursor import CHUNK
from kvspool.journal.format import Before
from kvspool.journal.formats.kvj import HEAD, HEADER, Kvj
from kvspool.record import NO_TIME

TIME = 1500000000123456789
GOLDEN_HEADER = bytes.fromhex("6b766a726e6c00 01 0000000000000000 00000000")
GOLDEN_FRAME = bytes.fromhex("00000022 0000000000000000 14d1120d8271cd15 07 02 0002 6b31 7b7d 7631")


def crc32c(data: bytes) -> int:
    """The checksum, bit by bit."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_a_large_range_without_records_costs_list_no_memory(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_many([b"a", b"b", b"c"])
        log.append_batch(JournalBatch([b"d"]), at=10**18)
        assert 4 <= len(log) < 100
        with pytest.raises(GapError):  # and no MemoryError
            list(log)
        assert [record.value for record in log.read(on_gap="skip")] == [b"a", b"b", b"c", b"d"]


def test_last_passes_over_sequences_that_were_left_out(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=200) as log:
        log.append_many([b"a"] * 9)
        for at in (12, 1000, 10**18):
            log.append_batch(JournalBatch([b"b"] * 2), at=at)
        sequences = [*range(9), 12, 13, 1000, 1001, 10**18, 10**18 + 1]
        for count in range(20):
            assert [record.sequence for record in log.last(count)] == sequences[len(sequences) - min(count, len(sequences)) :]


def test_a_record_beyond_a_cursor_s_largest_one_is_read_once_that_is_permitted(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_many([b"small", b"x" * (1 << 20), b"last"])
        with closing(log.cursor("earliest", bounded=True)) as cursor:
            cursor.largest = 1 << 19
            assert (cursor.next_batch(10, True, 1 << 16)["value"].to_pylist(), cursor.needs) == ([b"small"], 0)
            for _ in range(2):
                assert (cursor.next_batch(10, True, 1 << 16).num_rows, cursor.needs) == (0, (1 << 20) + 28)
            assert len(cursor._data) <= CHUNK
            cursor.largest = cursor.needs
            assert [cursor.next_batch(10, True, 1 << 16).num_rows, cursor.needs] == [1, 0]
            assert (cursor.next_batch(10, True, 1 << 16)["value"].to_pylist(), cursor.needs) == ([b"last"], 0)
            assert (cursor.next_batch(10, True, 1 << 16).num_rows, cursor.needs) == (0, 0)


def test_a_damaged_size_beyond_a_cursor_s_largest_record_is_a_gap_once_that_is_permitted(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_many([b"first", *[b"x" * (1 << 18)] * 4])
        segment = next((tmp_path / "log" / "kvj").iterdir())
        with segment.open("r+b") as file:
            file.seek(segment.read_bytes().index(b"first") - 24)
            file.write((1 << 20).to_bytes(4, "big"))
        with closing(log.cursor("earliest", bounded=True)) as cursor:
            cursor.largest = 1 << 19
            assert (cursor.next_batch(10, True, 1 << 16).num_rows, cursor.needs) == (0, 1 << 20)
            cursor.largest = cursor.needs
            gap = cursor.next_batch(10, True, 1 << 16)
            assert isinstance(gap, Gap) and (gap.first, gap.last, gap.reason, cursor.needs) == (0, 0, "damaged", 0)
            assert cursor.next_batch(10, True, 1 << 16).num_rows == 1


def test_golden_bytes(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append({}, key=b"k1", type=7, timestamp=TIME)
        log.append(b"", key=b"", timestamp=TIME + 1)
    frames = GOLDEN_FRAME[:-2].replace(b"\0\0\0\x22", b"\0\0\0\x20", 1)
    second = bytes.fromhex("0000001c 0000000000000001") + (TIME + 1).to_bytes(8, "big") + bytes(4)
    expected = b"".join(
        (
            GOLDEN_HEADER + crc32c(GOLDEN_HEADER).to_bytes(4, "big"),
            crc32c(frames).to_bytes(4, "big") + frames,
            crc32c(second).to_bytes(4, "big") + second,
        )
    )
    assert (tmp_path / "log/kvj/0000000000000000.kvj").read_bytes() == expected
    with kvspool.open(tmp_path / "log") as log:
        assert list(log) == [Record(0, TIME, 7, b"k1", b"{}", Codec.JSON), Record(1, TIME + 1, 0, b"", b"", Codec.RAW)]
    assert (HEADER.size, HEAD.size) == (24, 28)


def test_values_come_back_as_they_were_appended(tmp_path: Path) -> None:
    values = [b"raw", "text", {"a": [1, None]}, 7]
    with kvspool.create(tmp_path / "log", format="kvj", codec="msgpack") as log:
        log.append_many(values)
        assert [record.data for record in log] == values


def test_limits(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        with pytest.raises(TooLarge, match="65534"):
            log.append(b"", key=bytes(65535))
        log.append(b"", key=bytes(65534))
        assert [len(record.key or b"") for record in log] == [65534]


def whole_version(segment: bytes) -> int:
    return segment[7]


@pytest.mark.parametrize("segment_bytes", [1, 24, 25])
def test_a_segment_that_is_smaller_than_its_header_holds_one_record(tmp_path: Path, segment_bytes: int) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=segment_bytes) as log:
        log.append_many([b"a", b"b"])
        log.append(b"c")
        assert [record.value for record in log] == [b"a", b"b", b"c"]
        assert log._segments.bases() == [0, 1, 2, 3]


def flips(path: Path) -> list[bytes]:
    whole = path.read_bytes()
    return [whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :] for bit in range(8 * len(whole))]


def test_every_flipped_bit_costs_the_record_that_it_hits(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=150) as log:
        log.append_many([b"value %d" % number for number in range(12)], keys=[b"key"] * 12)
        path = log._segments.path_of(4)
    for at, flipped in enumerate(flips(path)):
        path.write_bytes(flipped)
        with kvspool.open(tmp_path / "log") as log:
            if at // 8 == 7:
                with pytest.raises((Corruption, UnknownVersion), match=r"0004\.kvj") if whole_version(flipped) > 1 else nullcontext():
                    list(log.read(on_gap="yield"))
                continue
            found = list(log.read(on_gap="yield"))
            if at < 8 * HEADER.size:  # the name says the same
                assert [one.sequence for one in found] == list(range(12))
                continue
        record = 4 + (at // 8 - HEADER.size) // (28 + 10)
        assert [(one.first, one.last, one.reason) for one in found if isinstance(one, Gap)] == [(record, record, "damaged")]
        assert [one.sequence for one in found if isinstance(one, Record)] == [number for number in range(12) if number != record]


@pytest.mark.parametrize("size", [0, 1, HEADER.size - 1, HEADER.size])
def test_a_segment_without_a_frame_hides_nothing_after_it(tmp_path: Path, size: int) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=150) as log:
        log.append_many([b"value %d" % number for number in range(12)], keys=[b"key"] * 12)
        path = log._segments.path_of(4)
        path.write_bytes(path.read_bytes()[:size])
        found = list(log.read(on_gap="yield"))
        assert [one.sequence for one in found if isinstance(one, Record)] == [0, 1, 2, 3, 8, 9, 10, 11]
        assert [(one.first, one.last) for one in found if isinstance(one, Gap)] == [(4, 7)]


def test_from_every_sequence_after_damage(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=1000) as log:
        log.append_many([b"value %02d" % number for number in range(60)])
        path = log._segments.path_of(log._segments.bases()[1])
        first, data = log._segments.bases()[1], bytearray(path.read_bytes())
        for number in (3, 4, 9):
            data[24 + 36 * number + 30] ^= 1
        path.write_bytes(data)
        lost = {first + 3, first + 4, first + 9}
        for start in range(60):
            found = list(log.read(start, on_gap="yield"))
            assert [one.sequence for one in found if isinstance(one, Record)] == [one for one in range(start, 60) if one not in lost]
            gaps = [number for one in found if isinstance(one, Gap) for number in range(one.first, one.last + 1)]
            assert gaps == [one for one in sorted(lost) if one >= start]
            assert {one.reason for one in found if isinstance(one, Gap)} <= {"damaged"}
            with log.reader(f"r{start}", start) as reader:
                assert reader.sequence == start
                assert list(reader.read(on_gap="yield")) == found


def test_damage_in_the_last_segment_hides_nothing_after_it(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_many([b"x" * 100] * 10000)
        path = log._segments.path_of(0)
        data = bytearray(path.read_bytes())
        data[24 + 128 * 7 : 24 + 128 * 5000] = bytes(128 * 4993)
        path.write_bytes(data)
        found = list(log.read(on_gap="yield"))
        gaps = [one for one in found if isinstance(one, Gap)]
        assert [(gap.first, gap.last) for gap in gaps] == [(7, 4999)]
        assert len(found) == 1 + 7 + 5000


def test_sequences_may_be_left_out(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        assert isinstance(log.format, Kvj)
        log.append(b"a")
        frame = _frame(log, 7)
    with (tmp_path / "log/kvj/0000000000000000.kvj").open("ab") as file:
        file.write(frame)
    with kvspool.open(tmp_path / "log") as log:
        found = list(log.read(on_gap="yield"))
        assert [(one.first, one.last, one.reason) if isinstance(one, Gap) else one.sequence for one in found] == [0, (1, 6, "missing"), 7]


@pytest.mark.parametrize("step", [2, 3, 7])
def test_skipped_sequences_are_distinguished_from_segments_that_are_gone(tmp_path: Path, step: int) -> None:
    """Numbers are left out before every record, so also where segments meet; then each segment but the last is removed."""
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=150) as log:
        for sequence in range(0, 20 * step, step):
            log.append_batch(JournalBatch([b"x" * 20]), at=sequence)
        assert log.verify().is_sound
        left_out = {number for number in range(log.end()) if number % step}
        assert gaps(log) == {number: "missing" for number in left_out}
        bases = log._segments.bases()
        assert len(bases) > 5
        for base, until in zip(bases[1:-1], bases[2:], strict=True):
            path = log._segments.path_of(base)
            path.rename(tmp_path / "gone")
            lost = set(range(base, until))
            assert gaps(log) == {number: "damaged" if number in lost else "missing" for number in left_out | lost}
            assert log.verify().damaged_records == len(lost)
            (tmp_path / "gone").rename(path)


def test_a_bounded_read_ends_before_its_end_also_after_sequences_that_were_left_out(tmp_path: Path) -> None:
    arrow = pytest.importorskip("kvspool.arrow")
    there = [2, 3, 4, 8, 9]
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_batch(JournalBatch([b"2", b"3", b"4"]), at=2)
        log.append_batch(JournalBatch([b"8", b"9"]), at=8)
        for first in range(10):
            for end in range(first, 11):
                with closing(log.cursor(first, bounded=True, end=end)) as cursor:
                    items = list(arrow.batches(cursor))
                found = [at for item in items if not isinstance(item, Gap) for at in item.column("sequence").to_pylist()]
                assert found == [at for at in there if first <= at < end], (first, end)


def gaps(log: Journal) -> dict[int, str]:
    """Return why each number is not there."""
    found = [gap for gap in log.read(on_gap="yield") if isinstance(gap, Gap)]
    return {number: gap.reason for gap in found for number in range(gap.first, gap.last + 1)}


def _frame(log: Journal, sequence: int) -> bytes:
    data, count, _ = log.format.encode(JournalBatch([b"x"]), 0, Before(sequence, 0, 0, 0, NO_TIME))
    assert count == 1
    return bytes(data)
