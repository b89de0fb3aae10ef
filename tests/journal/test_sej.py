"""The sej format: its bytes, and what every journal can do, in it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from faults import FailingPort

import kvspool
from kvspool import system
from kvspool.errors import LogVanished
from kvspool.journal import Batch

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


def test_segments_begin_behind_the_message_that_fills_one(tmp_path: Path) -> None:
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
        assert log.append_batch(Batch([b"a", b"b"], types=[1, 2], timestamps=[5, 6])) == range(10, 12)
        assert log.sync() == 12
        assert [record.type for record in reader.follow(timeout=0.1)] == [1, 2]


def test_what_was_cut_when_a_handle_first_appends_is_reported(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"a")
    with open(tmp_path / "log/jnl/0000000000000000.jnl", "ab") as file:
        file.write(b"torn")
    with kvspool.open(tmp_path / "log") as log:
        assert log.append(b"b") == 1
        assert [(torn.sequence, torn.data) for torn in log.torn] == [(1, b"torn")]


def test_a_lock_file_that_was_removed_ends_its_handles(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"a")
        (tmp_path / "log/jnl.lck").unlink()
        with kvspool.open(tmp_path / "log") as other:
            assert other.append(b"b") == 1
            with pytest.raises(LogVanished):
                log.append(b"c")
            assert [record.value for record in other] == [b"a", b"b"]


def test_an_append_whose_note_fails_is_taken_back(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"a")
        with system.replaced(FailingPort(2, errno.EIO, only=("write",))), pytest.raises(OSError, match="0 of 1|Input"):
            log.append(b"b")
        assert [record.value for record in log] == [b"a"]
        assert log.append(b"c") == 1


def test_a_damaged_offset_is_shown_beside_the_readers_that_are_sound(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej") as log:
        log.append(b"a")
        log.reader("sound").close()
        (tmp_path / "log/ofs/torn.ofs").write_bytes(b"123")
        sound, torn = log.readers()
        assert (sound.sequence, sound.problem, torn.sequence) == (0, "", None)
        assert "has not 8 bytes but 3" in torn.problem


def test_a_directory_without_a_segment_is_an_empty_journal(tmp_path: Path) -> None:
    (tmp_path / "log/jnl").mkdir(parents=True)
    with kvspool.open(tmp_path / "log") as log, log.follow(timeout=5) as following:
        assert (log.end(), list(log), following.poll()) == (0, [], [])
        assert log.append(b"a") == 0
        assert next(following).value == b"a"
