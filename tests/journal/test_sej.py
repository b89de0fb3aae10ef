"""The sej format: its bytes, and what every journal can do, in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

import kvspool
from kvspool import Gap, Record
from kvspool.errors import Corruption, LockTimeout, LogVanished
from kvspool.journal import JournalBatch

TIME = 1500000000123456789
GOLDEN = bytes.fromhex(
    "0000000000000000 14d1120d8271cd15 07 02 6b31 00000002 7631 0000001e 0000000000000001 14d1120d8271cd15 00 00 00000002 7632 0000001c"
)


def test_golden_bytes(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        assert log.append(b"v1", key=b"k1", type=7, timestamp=TIME) == 0
        assert log.append(b"v2", timestamp=TIME) == 1
    assert (tmp_path / "log/jnl/0000000000000000.jnl").read_bytes() == GOLDEN
    with kvspool.open(tmp_path / "log") as log:
        first, second = log
    assert (first.sequence, first.timestamp, first.type, first.key, first.value) == (0, TIME, 7, b"k1", b"v1")
    assert (second.sequence, second.timestamp, second.type, second.key, second.value) == (1, TIME, 0, None, b"v2")


def test_segments_begin_after_the_message_that_fills_one(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=100) as log:
        assert log.append_many([b"x" * 10] * 10) == range(10)
        assert log.stats().segments == 4
        assert [record.sequence for record in log] == list(range(10))
        with log.reader("r") as reader:
            for _ in reader.read(limit=5):
                pass
            reader.commit()
    with kvspool.open(tmp_path / "log") as log, log.reader("r") as reader:
        assert [record.sequence for record in reader.read()] == list(range(5, 10))
        assert log.append_batch(JournalBatch([b"a", b"b"], types=[1, 2], timestamps=[5, 6])) == range(10, 12)
        assert log.sync() == 12
        assert [record.type for record in reader.follow(timeout=0.1)] == [1, 2]


# The program whose format it is.


class Original:
    """The original's writer: locks the whole lock file, and removes it when it closes."""

    def __init__(self, path: Path) -> None:
        self.path = path / "jnl.lck"
        self.fd = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        self.path.unlink()
        os.close(self.fd)


def message(sequence: int, value: bytes, key: bytes = b"", type: int = 0, time: int = TIME) -> bytes:
    """Return the bytes of a message, made without our code."""
    head = struct.pack(f">QqBb{len(key)}si", sequence, time, type, len(key), key, len(value))
    return head + value + struct.pack(">i", len(head) + len(value) + 4)


def test_the_original_and_ours_exclude_each_other(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"ours")
        with pytest.raises(BlockingIOError):
            Original(log.path)
        with kvspool.open(tmp_path / "log") as other:
            assert other.append(b"ours too") == 1
    theirs = Original(log.path)
    with kvspool.open(tmp_path / "log") as log:
        assert [record.value for record in log.read()] == [b"ours", b"ours too"]
        with pytest.raises(LockTimeout, match="another program"):
            log.append(b"", timeout=0.01)
        with (log.path / "jnl/0000000000000000.jnl").open("ab") as file:
            file.write(message(2, b"theirs"))
        assert log.end() == 3
        threading.Timer(0.05, theirs.close).start()
        assert log.append(b"ours again", timeout=10) == 3
        assert [record.value for record in log.read(2)] == [b"theirs", b"ours again"]
        assert log.torn == []


def test_what_the_original_has_made_is_opened(tmp_path: Path) -> None:
    (tmp_path / "log/jnl").mkdir(parents=True)
    (tmp_path / "log/ofs").mkdir()
    (tmp_path / "log/ofs/reader1.ofs").write_bytes(bytes.fromhex("000000001f9e521f"))
    (tmp_path / "log/jnl/000000001f9e521e.jnl").write_bytes(message(0x1F9E521E, b"a") + message(0x1F9E521F, b"b", b"k", 9))
    (tmp_path / "log/jnl/000000001f9e5220.jnl").write_bytes(b"")  # as a clean rotation leaves it
    with kvspool.open(tmp_path / "log") as log:
        assert log.stats().next_sequence == 0x1F9E5220
        with log.reader("reader1") as reader:
            assert [record.value for record in reader.read()] == [b"b"]
            reader.commit()
        assert log.append(b"c") == 0x1F9E5220
    assert (tmp_path / "log/ofs/reader1.ofs").read_bytes() == bytes.fromhex("000000001f9e5220")
    assert {path.name for path in (tmp_path / "log/ofs").iterdir()} == {"reader1.ofs", "reader1.lck"}


def test_a_record_without_a_time(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"v", timestamp=-(1 << 63))
        (record,) = log
        assert record.timestamp == -(1 << 63)
        assert record.time == datetime(1, 1, 1, tzinfo=UTC)
        assert log.stats().first_timestamp == 0


# Its faults.


def test_a_message_without_a_key_doesnt_inherit_one(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append_many([b"a", b"b", b"c"], keys=[b"k", None, b""])
        assert [record.key for record in log] == [b"k", None, None]


def test_the_end_of_a_torn_journal_is_after_its_last_whole_message(tmp_path: Path) -> None:
    (tmp_path / "log/jnl").mkdir(parents=True)
    (tmp_path / "log/jnl/0000000000000000.jnl").write_bytes(message(0, b"a") + message(1, b"b") + message(2, b"torn")[:-1])
    with kvspool.open(tmp_path / "log") as log:
        assert log.end() == 2
        assert log.append(b"c") == 2
        (torn,) = log.torn
        assert (torn.position, torn.sequence, torn.size, torn.data) == (54, 2, 29, message(2, b"torn")[:-1])
        assert [record.value for record in log] == [b"a", b"b", b"c"]


def test_every_message_is_checked_and_not_only_the_last(tmp_path: Path) -> None:
    (tmp_path / "log/jnl").mkdir(parents=True)
    (tmp_path / "log/jnl/0000000000000000.jnl").write_bytes(message(0, b"a") + message(5, b"from nowhere") + message(2, b"c"))
    with kvspool.open(tmp_path / "log") as log:
        found = list(log.read(on_gap="yield"))
        assert isinstance(found[1], Gap)
        assert (found[1].first, found[1].last, found[1].reason) == (1, 1, "damaged")
        assert found[2].value == b"c"


def test_messages_that_are_not_there_are_damage(tmp_path: Path) -> None:
    (tmp_path / "log/jnl").mkdir(parents=True)
    (tmp_path / "log/jnl/0000000000000000.jnl").write_bytes(message(0, b"a") + message(5, b"f") + message(6, b"g"))
    with kvspool.open(tmp_path / "log") as log:
        found = list(log.read(on_gap="yield"))
        assert isinstance(found[1], Gap)
        assert (found[1].first, found[1].last, found[1].reason) == (1, 4, "damaged")
        assert [record.value for record in found[2:]] == [b"f", b"g"]


# Damage.


@pytest.mark.parametrize("cut", range(1, 201))
def test_any_cut_end_loses_only_the_messages_that_it_cuts(tmp_path: Path, cut: int) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append_many([b"%d" % number * (number % 5) for number in range(12)])
    path = log.path / "jnl/0000000000000000.jnl"
    whole = path.read_bytes()
    os.truncate(path, len(whole) - cut)
    for has_page in (True, False):
        if not has_page:
            (log.path / "jnl.lck").unlink(missing_ok=True)
        with kvspool.open(log.path) as log:
            values = [record.value for record in log.read()]
    assert values == [b"%d" % number * (number % 5) for number in range(len(values))]
    kept = sum(26 + len(value) for value in values)
    assert len(whole) - cut - kept < 26 + 8
    with kvspool.open(log.path) as log:
        assert log.append(b"next") == len(values)
        assert len(log.torn) == (kept != len(whole) - cut)
        assert [record.value for record in log.read()] == [*values, b"next"]


def test_every_flipped_bit_is_found_or_is_in_unused_bytes(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=100) as log:
        log.append_many([b"value %d" % number for number in range(9)], keys=[b"key"] * 9, timestamp=TIME)
    path = log.path / "jnl/0000000000000003.jnl"
    whole = path.read_bytes()
    size = 26 + len(b"value 0") + len(b"key")
    for bit in range(8 * len(whole)):
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        with kvspool.open(log.path) as log:
            found = list(log.read(on_gap="yield"))
        at = bit // 8 % size
        is_known = at < 8 or at == 17 or 21 <= at < 25 or at >= size - 4
        gaps = [item for item in found if isinstance(item, Gap)]
        assert bool(gaps) == is_known, (bit, at)
        sequences = [
            sequence for item in found for sequence in ([item.sequence] if isinstance(item, Record) else range(item.first, item.last + 1))
        ]
        assert sequences == list(range(9))
        assert sum(gap.count for gap in gaps) <= 3, "records in other segments are not lost"


def test_a_size_in_the_last_segment_that_reaches_beyond_its_end_is_no_partial_message(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append_many([b"a", b"b", b"c"])
        path = log.path / "jnl/0000000000000000.jnl"
        data = bytearray(path.read_bytes())
        data[27 + 18 + 1] = 1  # 65536 more bytes of value
        path.write_bytes(data)
        reading = log.read()
        assert next(reading).value == b"a"
        with pytest.raises(Corruption, match="byte 27, where sequence 1 should be"):
            next(reading)


def test_what_was_cut_when_a_handle_first_appends_is_reported(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"a")
    with open(tmp_path / "log/jnl/0000000000000000.jnl", "ab") as file:
        file.write(b"torn")
    with kvspool.open(tmp_path / "log") as log:
        assert log.append(b"b") == 1
        assert [(torn.sequence, torn.data) for torn in log.torn] == [(1, b"torn")]


def test_a_journal_in_the_place_of_another_one_gets_none_of_its_records(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"a")
        (tmp_path / "log").rename(tmp_path / "moved")
        with kvspool.create(tmp_path / "log", format="sej") as other:
            other.append(b"b")
            with pytest.raises(LogVanished):
                log.append(b"c")
            shutil.rmtree(tmp_path / "moved")
            with pytest.raises(LogVanished):
                log.append(b"c")
            assert [record.value for record in other] == [b"b"]


def test_a_damaged_offset_is_shown_next_to_the_readers_that_are_sound(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"a")
        log.reader("sound").close()
        (tmp_path / "log/ofs/torn.ofs").write_bytes(b"123")
        sound, torn = log.readers()
        assert (sound.sequence, sound.problem, torn.sequence) == (0, "", None)
        assert "doesn't have 8 bytes but 3" in torn.problem


def test_a_directory_without_a_segment_is_an_empty_journal(tmp_path: Path) -> None:
    (tmp_path / "log/jnl").mkdir(parents=True)
    with kvspool.open(tmp_path / "log") as log, log.follow(timeout=5) as following:
        assert (log.end(), list(log), following.poll()) == (0, [], [])
        assert log.append(b"a") == 0
        assert next(following).value == b"a"
