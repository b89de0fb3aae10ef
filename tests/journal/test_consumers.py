"""The index of an FFLG journal: what it says, what damage does to it, and what a commit leaves whatever happens to it."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broken import CHANGES, RestartedPort, UnflushedPort, failing
from children import Died, in_child, start
from faults import KillingPort, RecordingPort

import kvspool
from kvspool import system
from kvspool.errors import Corruption, NoSuchReader, Poisoned, ReaderBusy
from kvspool.journal.consumers import StoredConsumers, pack_index, parse_index

CAFE = bytes.fromhex("00000005 0000000000000001 636166c3a9")
OTHER = bytes.fromhex("00000001 0000000000000002 62")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[kvspool.Journal]:
    with kvspool.create(tmp_path / "log", format="fflg") as log:
        log.append_many([b"%d" % number for number in range(10)])
        yield log
    gc.collect()  # a descriptor that the collector closes during a later test would be one of its calls


def read_and_commit(log: kvspool.Journal, name: str, count: int) -> int:
    with log.reader(name) as reader:
        for _ in reader.read(limit=count):
            pass
        return reader.commit()


def test_golden_entry_in_both_directions(log: kvspool.Journal, tmp_path: Path) -> None:
    read_and_commit(log, "café", 1)
    assert (tmp_path / "log/index").read_bytes() == CAFE
    (tmp_path / "log/index").write_bytes(CAFE + OTHER)
    assert [(reader.name, reader.sequence, reader.lag and reader.lag.records) for reader in log.readers()] == [("b", 2, 8), ("café", 1, 9)]
    with log.reader("b") as reader:
        assert next(reader.read()).value == b"2"


def test_a_commit_keeps_what_another_program_wrote_in_its_order(log: kvspool.Journal, tmp_path: Path) -> None:
    no_utf8 = bytes.fromhex("00000002 0000000000000003 ff61")
    nameless = bytes.fromhex("00000000 0000000000000004")
    (tmp_path / "log/index").write_bytes(OTHER + no_utf8 + nameless + CAFE)
    read_and_commit(log, "café", 3)
    assert (tmp_path / "log/index").read_bytes() == OTHER + no_utf8 + nameless + CAFE.replace(b"\x01", b"\x04")
    assert [reader.name for reader in log.readers()] == ["", "\\xffa", "b", "café"]
    log.delete_reader("\\xffa")
    log.delete_reader("")
    assert [reader.name for reader in log.readers()] == ["b", "café"]
    with pytest.raises(NoSuchReader):
        log.delete_reader("c")


def test_of_two_entries_with_one_id_the_later_one_counts(log: kvspool.Journal, tmp_path: Path) -> None:
    (tmp_path / "log/index").write_bytes(CAFE.replace(b"\x01", b"\x09") + OTHER + CAFE)
    assert log.offsets.load("café") == 1
    assert log.offsets.slowest() == 1
    read_and_commit(log, "b", 1)
    assert parse_index((tmp_path / "log/index").read_bytes()).entries == [("café".encode(), 1), (b"b", 3)]


@pytest.mark.parametrize("length", range(len(CAFE + OTHER)))
def test_of_a_torn_index_the_whole_entries_are_served_and_nothing_is_lost(log: kvspool.Journal, tmp_path: Path, length: int) -> None:
    path = tmp_path / "log/index"
    torn = (CAFE + OTHER)[:length]
    path.write_bytes(torn)
    if length in (0, len(CAFE)):
        assert log.offsets.load("b") is None
        return
    with pytest.raises(Corruption, match=f"no whole entry at byte {0 if length < len(CAFE) else len(CAFE)}"):
        log.offsets.load("b")
    with pytest.raises(Corruption):
        log.offsets.store("b", 1)
    with pytest.raises(Corruption):
        log.offsets.slowest()
    assert path.read_bytes() == torn
    if length > len(CAFE):
        read_and_commit(log, "café", 4)
        assert path.read_bytes() == torn.replace(b"\x01", b"\x05", 1)


def test_a_huge_length_or_a_huge_file_allocates_nothing(log: kvspool.Journal, tmp_path: Path) -> None:
    index = parse_index(CAFE + b"\xff" * 4 + bytes(8) + b"x")
    assert index.entries == [("café".encode(), 1)] and len(index.rest) == 13
    with open(tmp_path / "log/index", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Corruption, match="larger than"):
        log.readers()
    with pytest.raises(Corruption):
        log.offsets.store("a", 1)


def test_every_flipped_bit_leaves_an_index_that_is_parsed_and_packed_to_the_same_bytes() -> None:
    data = CAFE + OTHER + CAFE
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert pack_index(parse_index(bytes(flipped))) == flipped


@pytest.mark.parametrize("name", ["../../x", "a/b", "/", ".", "..", "\0", "", "x" * 4096, "café", "\n", "💣"])
def test_no_id_becomes_a_part_of_a_path(log: kvspool.Journal, tmp_path: Path, name: str) -> None:
    before = set(tmp_path.rglob("*"))
    with log.reader(name), pytest.raises(ReaderBusy):
        log.reader(name)
    made = set(tmp_path.rglob("*")) - before
    assert {path.parent for path in made} == {tmp_path / ".log.kvspool", tmp_path / "log"}
    assert [reader.name for reader in log.readers()] == [name]
    assert parse_index((tmp_path / "log/index").read_bytes()) == StoredConsumers([(name.encode(), 0)], b"")


def test_an_id_that_is_too_long_or_no_text_is_refused(log: kvspool.Journal) -> None:
    for name in ("x" * 4097, "é" * 2049, "\udc80"):
        with pytest.raises(ValueError):
            log.reader(name)
    assert log.readers() == []


@pytest.mark.parametrize("new", [False, True])
def test_killed_at_each_step_of_a_commit_the_old_index_or_the_new_one_stands(log: kvspool.Journal, tmp_path: Path, new: bool) -> None:
    path = tmp_path / "log/index"
    log.offsets.store("a", 1)
    log.offsets.store("b", 2)
    before, name = path.read_bytes(), "c" if new else "a"
    after = pack_index(StoredConsumers([(b"a", 1), (b"b", 2), (b"c", 7)] if new else [(b"a", 7), (b"b", 2)], b""))
    seen = set()

    def commit(nth: int) -> None:
        with system.replaced(KillingPort(nth, CHANGES)):
            log.offsets.store(name, 7)

    for nth in range(1, 100):
        path.write_bytes(before)
        try:
            in_child(lambda nth=nth: commit(nth))
        except Died:
            found = path.read_bytes()
            assert found in (before, after)
            seen.add(found)
            log.offsets.store(name, 7)  # the lock is free, and leftover files do not matter
            assert path.read_bytes() == after
        else:
            break
    else:
        raise AssertionError("a commit makes fewer calls than that")
    assert seen == {before, after}
    assert path.read_bytes() == after


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_commit_whose_nth_call_fails_leaves_the_old_index_or_the_new_one(log: kvspool.Journal, tmp_path: Path, number: int) -> None:
    path = tmp_path / "log/index"
    log.offsets.store("a", 1)
    before, after = pack_index(StoredConsumers([(b"a", 1)], b"")), pack_index(StoredConsumers([(b"a", 7)], b""))
    failed = []
    for nth in range(1, 100):
        path.write_bytes(before)
        with system.replaced(failing(nth, number)) as port:
            try:
                log.offsets.store("a", 7)
            except OSError as error:
                assert error.errno == number
                failed.append(port.failed)
                assert path.read_bytes() in (before, after)
            else:
                assert path.read_bytes() == after
                if not port.failed:  # an error of the close of a lock, which had nothing to write, is ignored
                    break
        log.offsets.store("a", 7)
        assert path.read_bytes() == after
    assert {"write", "flush", "rename", "open"} <= set(failed)


def test_the_new_index_is_on_disk_before_it_takes_the_place_and_the_directory_after(log: kvspool.Journal) -> None:
    with system.replaced(RecordingPort()) as port:
        log.offsets.store("a", 7)
    calls = [call for call in port.calls if call in ("write", "flush", "rename")]
    assert calls == ["write", "flush", "rename", "flush"]


def test_records_are_on_disk_before_a_consumer_says_that_it_has_read_them(log: kvspool.Journal) -> None:
    with log.reader("a") as reader:
        for _ in reader.read(limit=5):
            pass
        with system.replaced(RecordingPort()) as port:
            reader.commit()
        assert port.calls.index("flush_data") < port.calls.index("rename")
        log.sync()
        for _ in reader.read(limit=1):
            pass
        with system.replaced(RecordingPort()) as port:
            reader.commit()
        assert "flush_data" not in port.calls


def test_a_disk_that_fails_at_a_commit_poisons_the_journal_and_commits_nothing(log: kvspool.Journal) -> None:
    with log.reader("a") as reader:
        for _ in reader.read(limit=5):
            pass
        with system.replaced(UnflushedPort()) as port, pytest.raises(Poisoned):

            def fail(fd: int) -> None:
                raise OSError(errno.EIO, "the disk failed")

            port.flush_data = fail  # type: ignore[method-assign]
            reader.commit()
    assert log.offsets.load("a") == 0
    with pytest.raises(Poisoned):
        log.append(b"x")


def test_processes_that_commit_at_once_lose_nothing_of_each_other(log: kvspool.Journal) -> None:
    def commit(name: str) -> None:
        with system.replaced(UnflushedPort()):
            for sequence in range(1, 101):
                log.offsets.store(name, sequence)

    for wait in [start(lambda name=name: commit(name)) for name in ("a", "b", "ä", "../b")]:
        wait()
    assert {name: log.offsets.load(name) for name in log.offsets.names()} == {"a": 100, "b": 100, "ä": 100, "../b": 100}


def test_a_consumer_is_never_ahead_of_what_a_crash_of_the_machine_left(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="fflg") as log:
        log.append_many([b"x" * 10] * 10)
        on_disk = (tmp_path / "log" / f"{0:016x}").stat().st_size
        read_and_commit(log, "a", 10)
        log.append_many([b"y" * 10] * 5)
    with open(tmp_path / "log" / f"{0:016x}", "r+b") as file:
        file.truncate(on_disk)  # what was flushed when the commit returned
    with system.replaced(RestartedPort()), kvspool.open(tmp_path / "log") as log:
        assert log.append(b"z") == 10
        with log.reader("a") as reader:
            assert [record.value for record in reader.read()] == [b"z"]


def test_a_journal_without_a_segment_begins_where_its_consumers_stand(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/index").write_bytes(CAFE.replace(b"\x01", b"\x14") + OTHER)
    with kvspool.open(tmp_path / "log") as log:
        assert (log.format.name, log.end(), list(log), log.stats().segments) == ("fflg", 20, [], 0)
        assert log.follow(timeout=0.01).poll() == []
        with log.reader("café") as reader:
            assert list(reader.read()) == []
            assert log.append(b"hi") == 20
            assert [record.sequence for record in reader.read()] == [20]
    data = (tmp_path / "log/0000000000000014").read_bytes()
    assert data == bytes.fromhex("46464c47 00000000 0000000000000014 00000002") + b"hi"


def test_a_new_index_keeps_the_rights_of_the_old_one_and_is_ours_alone_otherwise(log: kvspool.Journal, tmp_path: Path) -> None:
    path = tmp_path / "log/index"
    log.offsets.store("a", 1)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    log.offsets.store("a", 2)
    assert path.stat().st_mode & 0o777 == 0o640
    assert all(other.stat().st_mode & 0o077 == 0 for other in (tmp_path / ".log.kvspool").rglob("*"))


@pytest.mark.parametrize("form", ["kvj", "sej"])
def test_a_reader_that_is_dropped_frees_its_name_though_a_forked_child_has_the_descriptor(tmp_path: Path, form: str) -> None:
    with kvspool.create(tmp_path / "another", format=form) as log:
        reader = log.reader("r")
        child_s = os.dup(reader._lease._file.number)  # what a child has until it runs a program of its own
        try:
            with pytest.raises(ReaderBusy):
                log.reader("r")
            del reader
            gc.collect()
            log.reader("r").close()
        finally:
            os.close(child_s)


@pytest.mark.parametrize("on_gap", ["raise", "yield", "skip"])
def test_a_gap_beyond_the_end_of_a_read_leaves_the_reader_at_that_end(tmp_path: Path, on_gap: Any) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=400) as log, log.reader("me") as reader:
        log.append_many([b"%04d" % number for number in range(30)])
        reading = reader.read(on_gap=on_gap)
        log.append_many([b"x"] * 30)
        log.trim(before=50, force=True)
        first = log.extent()[0]
        assert first > 30
        if on_gap == "yield":
            assert next(reading) == kvspool.Gap(0, 29, "trimmed", str(log.path))
        with pytest.raises(kvspool.GapError if on_gap == "raise" else StopIteration):
            next(reading)
        assert reader.sequence == 30
        assert next(reader.read(on_gap="yield")) == kvspool.Gap(30, first - 1, "trimmed", str(log.path))


def test_a_view_of_a_missing_segment_raises_its_gap(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=400) as log, log.reader("me") as reader:
        log.append_many([b"%04d" % number for number in range(60)])
        base = log.bases()[1]
        log.segments_apart().path_of(base).unlink()
        reader.seek(base)
        with pytest.raises(kvspool.GapError, match="damaged"), reader.view():
            pass
        behind = log.bases()[1]
        with reader.view() as value:
            assert bytes(value) == b"%04d" % behind
