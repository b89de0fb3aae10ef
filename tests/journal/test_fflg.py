"""The format FFLG: its bytes, both headers, what damage does, what a crash leaves, and which segments go."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import append_lock
import pytest
from broken import CHANGES, MeanwhilePort, RestartedPort, UnflushedPort, failing
from children import Died, bound_addresses, in_child, start
from faults import KillingPort
from loops import twins

import kvspool
from kvspool import system
from kvspool.engine.layout import Layout
from kvspool.errors import (
    Corruption,
    KvspoolError,
    LogVanished,
    NotALog,
    OutOfRange,
    Poisoned,
    TooLarge,
    UnknownVersion,
    UnsafeFilesystem,
    Unsupported,
)
from kvspool.journal import Journal
from kvspool.journal.consumers import PLACE, StoredConsumers, pack_index
from kvspool.journal.formats import Fflg, fflg
from kvspool.kernel import fflg_py
from kvspool.record import Gap

LIMIT = 10_000  # the least size of a segment


@pytest.fixture(params=twins("kvspool.kernel.fflg"), ids=lambda module: module.__name__.rpartition(".")[2])
def loops(request: pytest.FixtureRequest) -> ModuleType:
    return request.param  # type: ignore[no-any-return]


def create(path: Path, **options: Any) -> Journal:
    return kvspool.create(path, format="fflg", **{"segment_bytes": LIMIT, **options})


def header(base: int) -> bytes:
    return b"FFLG" + bytes(4) + base.to_bytes(8, "big")


def document_header(base: int) -> bytes:
    return b"FFLG" + bytes(2) + base.to_bytes(8, "big")


def entries(*values: bytes) -> bytes:
    return b"".join(len(value).to_bytes(4, "big") + value for value in values)


def made_elsewhere(path: Path, segments: dict[str, bytes]) -> Path:
    """Write the files of a journal as another program does: nothing else is there."""
    path.mkdir()
    for name, data in segments.items():
        (path / name).write_bytes(data)
    return path


def items(log: Journal, start: Any = "earliest") -> list[Any]:
    """Return values, and Gaps as (first, last, reason)."""
    found = log.read(start, on_gap="yield")
    return [(item.first, item.last, item.reason) if isinstance(item, Gap) else item.value for item in found]


def bases(path: Path) -> list[int]:
    return sorted(int(name, 16) for name in os.listdir(path) if name != "index")


# The bytes.


def test_golden_segment_in_both_directions(tmp_path: Path) -> None:
    golden = bytes.fromhex("46464c47 00000000 0000000000000014 00000002 6869 00000000 00000001 21")
    made_elsewhere(tmp_path / "log", {"index": bytes.fromhex("00000005 0000000000000014 636166c3a9")})
    with kvspool.open(tmp_path / "log") as log:
        assert log.append_many([b"hi", b"", b"!"]) == range(20, 23)
    assert (tmp_path / "log/0000000000000014").read_bytes() == golden
    made_elsewhere(tmp_path / "other", {"0000000000000014": golden})
    with kvspool.open(tmp_path / "other") as log:
        assert [(record.sequence, record.timestamp, record.type, record.key, record.value) for record in log] == [
            (20, 0, 0, None, b"hi"),
            (21, 0, 0, None, b""),
            (22, 0, 0, None, b"!"),
        ]
        assert list(log.read_values()) == [b"hi", b"", b"!"]


def test_the_directory_holds_nothing_but_segments_and_the_index(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        log.append_many([b"x" * 4000] * 5)
        log.sync()
        with log.reader("a") as reader:
            for _ in reader.follow(limit=3):
                pass
            reader.commit()
    assert sorted(os.listdir(tmp_path / "log")) == [f"{2:016x}", f"{4:016x}", "index"]
    assert sorted(os.listdir(tmp_path)) == [".log.kvspool", "log"]
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "log", tmp_path / ".log.kvspool")] == [0o700, 0o700]


def test_the_twins_agree(loops: ModuleType) -> None:
    seeded = random.Random(4)
    for _ in range(300):
        values = [seeded.randbytes(seeded.randrange(40)) for _ in range(seeded.randrange(20))]
        start, most = seeded.randrange(len(values) + 1), seeded.randrange(25)
        room, enough = seeded.randrange(400), seeded.randrange(400)
        data, count = loops.encode(values, start, most, room, enough)
        assert (data, count) == fflg_py.encode(values, start, most, room, enough)
        assert data == entries(*values[start : start + count]) and len(data) <= room
        damaged = bytearray(data)
        if damaged:
            damaged[seeded.randrange(len(damaged))] ^= 1 << seeded.randrange(8)
        for content in (bytes(data), bytes(data)[: seeded.randrange(len(data) + 1)], bytes(damaged)):
            taken: list[Any] = []
            expected: list[Any] = []
            sequence, until = (1 << 64) - 1 - seeded.randrange(1, 30), (1 << 64) - 1
            most = min(most, until - sequence)
            make = seeded.choice([None, lambda *fields: fields])
            assert loops.scan(content, sequence, most, make, taken) == fflg_py.scan(content, sequence, most, make, expected)
            assert taken == expected
            assert loops.pass_over(content, sequence, until) == fflg_py.pass_over(content, sequence, until)


def test_what_has_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        for options in ({"keys": [b"k", None]}, {"type": 1}):
            with pytest.raises(Unsupported, match="a log of the kind fflg has no (keys|types)"):
                log.append_many([b"a", b"b"], **options)  # type: ignore[arg-type]
        with pytest.raises(TooLarge, match="9980"):
            log.append_many([b"a", b"x" * 9981])
        assert list(log) == []
        assert log.append(b"x" * 9980) == 0
        assert (tmp_path / "log" / f"{0:016x}").stat().st_size == LIMIT
    for wrong in ({"segment_bytes": 9_999}, {"total_bytes": 9_999}, {"keep_consumed": 2}, {"blob_bytes": 1}):
        with pytest.raises((ValueError, TypeError)):
            create(tmp_path / "wrong", **wrong)
    assert not (tmp_path / "wrong").exists() and not (tmp_path / ".wrong.kvspool").exists()


def test_a_segment_begins_before_the_entry_that_would_make_the_last_one_too_large(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        log.append(b"x" * 4980)
        log.append(b"x" * 4996)  # 16 + 4984 + 5000 = 10000
        assert bases(tmp_path / "log") == [0]
        log.append(b"")
        assert bases(tmp_path / "log") == [0, 2]
        log.append_many([b"x" * 4976, b"x" * 4997])  # 16 + 4 + 4980 + 5001 = 10001
        assert bases(tmp_path / "log") == [0, 2, 4]
        assert [len(value) for value in log.read_values()] == [4980, 4996, 0, 4976, 4997]
    assert max(path.stat().st_size for path in (tmp_path / "log").iterdir()) == LIMIT


def test_the_last_sequences_are_given_out_and_then_none(tmp_path: Path) -> None:
    base = (1 << 64) - 3
    made_elsewhere(tmp_path / "log", {f"{base:016x}": header(base)})
    with kvspool.open(tmp_path / "log") as log:
        with pytest.raises(OutOfRange, match="no more numbers"):
            log.append_many([b"a", b"b", b"c"])
        assert items(log) == []
        assert log.append_many([b"a", b"b"]) == range(base, base + 2)
        with pytest.raises(OutOfRange):
            log.append(b"c")
        assert items(log) == [b"a", b"b"]


# Both variants.


@pytest.mark.parametrize("width", [8, 10, 15, 16, 20])
@pytest.mark.parametrize("make", [header, document_header])
@pytest.mark.parametrize("base", [0, 1, 255, 256, 65536, 1 << 32, 0x0101010101010101])
def test_both_headers_are_read_under_names_of_any_width_and_appended_to(tmp_path: Path, make: Any, base: int, width: int) -> None:
    names = [f"{at:0{width}x}" for at in (base, base + 3)]
    first, second = make(base) + entries(b"a" * 70, b"", b"c"), make(base + 3) + entries(b"d")
    made_elsewhere(tmp_path / "log", {names[0]: first, names[1]: second})
    with kvspool.open(tmp_path / "log", format="fflg", segment_bytes=LIMIT) as log:
        assert [record.sequence for record in log] == [base, base + 1, base + 2, base + 3]
        assert items(log) == [b"a" * 70, b"", b"c", b"d"]
        assert items(log, base + 2) == [b"c", b"d"]
        assert log.append(b"e") == base + 4
        assert (tmp_path / "log" / names[1]).read_bytes() == second + entries(b"e")
        assert log.append(b"f" * 9979) == base + 5
        assert (tmp_path / "log" / f"{base + 5:016x}").read_bytes() == header(base + 5) + entries(b"f" * 9979)
        assert items(log, base + 1) == [b"", b"c", b"d", b"e", b"f" * 9979]
        assert log.trim(before=base + 3).removed_segments == 1
        assert not (tmp_path / "log" / names[0]).exists()


AMBIGUOUS = {  # where base is 0 and both headers fit: the name, the bytes after `FFLG` and 10 zeros, and what is read
    "the program's entries end where the file ends": ("0" * 16, bytes(2) + entries(b"ab", b"c"), [b"ab", b"c"]),
    "the document's do": ("0" * 16, entries(b"ab", b"c"), [b"ab", b"c"]),
    "the document's do, under a name of its own": ("0" * 10, entries(b"ab", b"c"), [b"ab", b"c"]),
    "the program's do, under the document's name": ("0" * 10, bytes(2) + entries(b"ab", b"c"), [b"ab", b"c"]),
    "the program's, torn": ("0" * 16, bytes(2) + entries(b"ab", b"c" * 9)[:-1], [b"ab"]),
    "the document's, torn, under its own name": ("0" * 10, entries(b"ab", b"c" * 9)[:-1], [b"ab"]),
    "only zeros, the program's name": ("0" * 16, bytes(2 + 8), [b"", b""]),
    "only zeros, the document's name": ("0" * 10, bytes(8), [b"", b""]),
    "no entry, the program's header": ("0" * 16, bytes(2), []),
    "no entry, the document's header": ("0" * 10, b"", []),
    "the document's header under the program's name": ("0" * 16, b"", []),
    "the document's with a blob whose size takes three bytes": ("0" * 16, entries(b"x" * 65536), [b"x" * 65536]),
    "the program's with one": ("0" * 16, bytes(2) + entries(b"x" * 65536), [b"x" * 65536]),
    "the document's, an empty one first": ("0" * 16, entries(b"", b"abc"), [b"", b"abc"]),
}


@pytest.mark.parametrize("name, rest, expected", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_where_both_headers_fit_the_entries_and_the_name_decide(tmp_path: Path, name: str, rest: bytes, expected: list[bytes]) -> None:
    made_elsewhere(tmp_path / "log", {name: document_header(0) + rest})
    with kvspool.open(tmp_path / "log") as log:
        assert items(log) == expected
        assert log.append(b"more") == len(expected)
        assert items(log) == [*expected, b"more"]
    with kvspool.open(tmp_path / "log") as log:
        assert items(log) == [*expected, b"more"]


def test_a_header_of_another_base_or_version_is_refused(tmp_path: Path) -> None:
    made_elsewhere(tmp_path / "log", {f"{5:016x}": header(6) + entries(b"a")})
    with kvspool.open(tmp_path / "log") as log:
        with pytest.raises(Corruption, match="0000000000000005: its header contradicts its name"):
            list(log)
        with pytest.raises(Corruption):
            log.append(b"x")
    for data in (b"FFLG" + bytes([0, 0, 0, 1]) + (5).to_bytes(8, "big"), b"FFLG" + bytes([0, 1]) + (5).to_bytes(8, "big")):
        (tmp_path / "log" / f"{5:016x}").write_bytes(data + entries(b"a"))
        with kvspool.open(tmp_path / "log") as log, pytest.raises(UnknownVersion, match="version 1"):
            list(log)


def test_a_damaged_header_costs_its_segment_and_no_other(tmp_path: Path) -> None:
    made_elsewhere(tmp_path / "log", {f"{0:016x}": header(0) + entries(b"a"), f"{1:016x}": b"FFLX", f"{2:016x}": header(2) + entries(b"c")})
    with kvspool.open(tmp_path / "log") as log:
        assert items(log) == [b"a", (1, 1, "damaged"), b"c"]


def test_of_two_files_for_one_sequence_the_programs_name_counts(tmp_path: Path) -> None:
    made_elsewhere(tmp_path / "log", {f"{0:010x}": document_header(0) + entries(b"no"), f"{0:016x}": header(0) + entries(b"yes")})
    with kvspool.open(tmp_path / "log") as log:
        assert items(log) == [b"yes"]


def test_segments_of_another_programs_writer_are_followed(tmp_path: Path) -> None:
    path = made_elsewhere(tmp_path / "log", {"0000000005": document_header(5) + entries(b"a")})
    with kvspool.open(path) as log, log.follow(timeout=5) as following:
        assert next(following).value == b"a"
        (path / "0000000006").write_bytes(document_header(6)[:9])
        assert following.poll() == []
        (path / "0000000006").write_bytes(document_header(6) + entries(b"bc")[:5])
        assert following.poll() == []
        (path / "0000000006").write_bytes(document_header(6) + entries(b"bc"))
        assert (record := next(following)).value == b"bc" and record.sequence == 6


@pytest.mark.parametrize("nth", range(1, 16))
@pytest.mark.parametrize("torn", [0, 3, 4, 9])
@pytest.mark.parametrize("more", [[], [b"c" * 9900, b"d" * 9900]], ids=["in place", "rolling"])
def test_what_is_written_while_a_follower_looks_is_not_damage(tmp_path: Path, nth: int, torn: int, more: list[bytes]) -> None:
    path = tmp_path / "log" / f"{0:016x}"
    with create(tmp_path / "log") as log, kvspool.open(tmp_path / "log") as other, log.follow(timeout=10, limit=7) as following:
        log.append(b"a")
        assert following.poll()[0].value == b"a"
        with open(path, "ab") as file:
            file.write(entries(b"b" * 10)[:torn])
        with system.replaced(MeanwhilePort(nth, lambda: other.append_many([b"b" * 10, *more]))) as port:
            found = [record.value[:1] for _ in range(20) for record in following.poll()]
            assert found == ([b"b", *(value[:1] for value in more)] if port.left <= 0 else [])


@pytest.mark.parametrize("nth", range(1, 16))
@pytest.mark.parametrize("length", [0, 7, 15])
def test_a_segment_that_is_begun_while_a_follower_looks_is_not_damaged(tmp_path: Path, nth: int, length: int) -> None:
    path = made_elsewhere(tmp_path / "log", {f"{0:016x}": header(0) + entries(b"a")})

    def go_on() -> None:
        (path / f"{1:016x}").write_bytes(header(1) + entries(b"b" * 100, b"c"))
        (path / f"{3:016x}").write_bytes(header(3) + entries(b"d"))

    with kvspool.open(path) as log, log.follow(timeout=10) as following:
        assert following.poll()[0].value == b"a"
        (path / f"{1:016x}").write_bytes(header(1)[:length])
        with system.replaced(MeanwhilePort(nth, go_on)):
            found = [record.value[:1] for _ in range(20) for record in following.poll()]
            assert found == [b"b", b"c", b"d"]


# Recognition of its directory.


def test_a_log_is_distinguished_from_other_things(tmp_path: Path) -> None:
    for name, files in {
        "blobs": {f"{0:016x}": b"no magic"},
        "index": {"index": b"\xff" * 20},
        "both": {"index": b"", "other": b""},
        "empty": {},
    }.items():
        with pytest.raises(NotALog):
            kvspool.open(made_elsewhere(tmp_path / name, files))
    with pytest.raises(NotALog):
        kvspool.open(tmp_path / "blobs", format="fflg")
    for name, files in {"torn": {f"{0:016x}": b"FF"}, "none": {}}.items():
        path = made_elsewhere(tmp_path / name, files)
        with kvspool.open(path, format="fflg") as log:
            assert log.append(b"a") == 0 and items(log) == [b"a"]


def test_moved_without_its_sidecar_it_opens_with_the_defaults(tmp_path: Path) -> None:
    with create(tmp_path / "log", codec="msgpack") as log:
        log.append_many([{"a": 1}] * 3000)
        with log.reader("a") as reader:
            next(iter(reader.read()))
            reader.commit()
    (tmp_path / "log").rename(tmp_path / "moved")
    with kvspool.open(tmp_path / "moved") as log:
        assert log.format.limits() == Fflg().limits()
        assert log.append(b"x") == 3000
        assert log.torn == []
        with log.reader("a") as reader:
            assert [record.sequence for record in reader.read()] == list(range(1, 3001))


def test_files_that_an_earlier_journal_left_are_not_used_for_another_one(tmp_path: Path) -> None:
    with create(tmp_path / "log", codec="msgpack") as old:
        old.append_many([b"x" * 100] * 50)
        shutil.rmtree(tmp_path / "log")
        with create(tmp_path / "log") as log:
            assert log.append(b"new") == 0
            with pytest.raises(LogVanished):
                old.append(b"lost")
            assert items(log) == [b"new"]
    shutil.rmtree(tmp_path / "log")
    made_elsewhere(tmp_path / "other", {f"{0:016x}": header(0) + entries(b"", b"", b"", b"")[:-1] + b"\0"}).rename(tmp_path / "log")
    with kvspool.open(tmp_path / "log") as log:  # as many bytes as before, and more entries
        assert log.end() == 4


def test_a_writer_to_a_journal_that_was_moved_away_gets_an_error(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        log.append(b"a")
        (tmp_path / "log").rename(tmp_path / "moved")
        with pytest.raises(LogVanished):
            log.append(b"b")
        with kvspool.open(tmp_path / "moved") as moved:
            assert moved.append(b"b") == 1
        (tmp_path / "moved").rename(tmp_path / "log")
        assert log.append(b"c") == 2
        assert items(log) == [b"a", b"b", b"c"]


def test_a_link_leads_to_the_same_locks(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with create(tmp_path / "log") as log:
        (tmp_path / "elsewhere/link").symlink_to(tmp_path / "log")
        with kvspool.open(tmp_path / "elsewhere/link") as other:
            assert [log.append(b"a"), other.append(b"b"), log.append(b"c")] == [0, 1, 2]
            assert other.format.lock_file(other.path) == log.format.lock_file(log.path)
    assert os.listdir(tmp_path / "elsewhere") == ["link"]


def test_a_mount_is_refused_for_writing_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_elsewhere(tmp_path / "log", {f"{0:016x}": header(0) + entries(b"a")})
    monkeypatch.setattr(os.path, "ismount", lambda other: str(other) == str(path))
    with kvspool.open(path) as log:
        with pytest.raises(UnsafeFilesystem, match="mount its parent"):
            log.append(b"b")
        with pytest.raises(UnsafeFilesystem):
            log.reader("a")
        assert items(log) == [b"a"]


def test_a_hidden_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = made_elsewhere(tmp_path / "log", {f"{0:016x}": header(0) + entries(b"a")})
    (tmp_path / "theirs").mkdir()
    (tmp_path / ".log.kvspool").symlink_to(tmp_path / "theirs")
    with kvspool.open(path) as log, pytest.raises(PermissionError, match="not a directory of the owner"):
        log.append(b"b")
    assert os.listdir(tmp_path / "theirs") == []


# Damage.


@pytest.fixture
def unflushed() -> Iterator[None]:
    with system.replaced(UnflushedPort()):
        yield


VALUES = [b"%03d" % number * (1 + number % 3) for number in range(20)] + [b"", b"\0" * 9, b"last"]


def test_of_every_truncation_the_whole_entries_stay_and_appending_continues_after_them(tmp_path: Path, unflushed: None) -> None:
    whole = header(0) + entries(*VALUES)
    assert len(whole) > 200
    for length in range(len(whole) - 200, len(whole) + 1):
        path = made_elsewhere(tmp_path / str(length), {f"{0:016x}": whole[:length]})
        kept = [value for number, value in enumerate(VALUES) if len(header(0) + entries(*VALUES[: number + 1])) <= length]
        end = len(header(0) + entries(*kept))
        with kvspool.open(path) as log:
            assert items(log) == kept
            assert log.append(b"new") == len(kept)
            assert items(log) == [*kept, b"new"]
            cut = [(torn.position, torn.sequence, torn.data) for torn in log.torn]
            assert cut == ([(end, len(kept), whole[end:length])] if end < length else [])
        assert (path / f"{0:016x}").read_bytes() == whole[:end] + entries(b"new")


@pytest.mark.parametrize("length", range(17))
def test_a_torn_header_holds_no_record(tmp_path: Path, unflushed: None, length: int) -> None:
    path = made_elsewhere(tmp_path / "log", {f"{0:016x}": header(0) + entries(b"a"), f"{1:016x}": header(1)[:length]})
    with kvspool.open(path) as log:
        assert items(log) == [b"a"]
        assert log.append(b"b") == 1
        assert items(log) == [b"a", b"b"]
    assert (path / f"{1:016x}").read_bytes() == header(1) + entries(b"b")


def flipped(data: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(data)):
        copy = bytearray(data)
        copy[bit // 8] ^= 1 << bit % 8
        yield bytes(copy)


@pytest.mark.parametrize("make", [header, document_header])
def test_no_flipped_bit_hangs_kills_or_asks_for_memory_and_no_sequence_comes_twice(tmp_path: Path, make: Any) -> None:
    path = made_elsewhere(tmp_path / "log", {})
    segments = {
        f"{0:016x}": make(0) + entries(b"abc", b"", b"defgh"),
        f"{3:016x}": make(3) + entries(b"ij", b"k"),
        f"{5:016x}": make(5) + entries(b"lmn"),
    }

    def try_all() -> tuple[int, int]:
        bound_addresses(512 << 20)
        found = silent = 0
        with system.replaced(UnflushedPort()):
            for name in segments:
                for damaged in flipped(segments[name]):
                    for other, data in segments.items():
                        (path / other).write_bytes(data)
                    (path / name).write_bytes(damaged)
                    outcome = _read_and_append(path)
                    found += outcome
                    silent += not outcome
                    shutil.rmtree(path.with_name(".log.kvspool"), ignore_errors=True)
                    for extra in set(os.listdir(path)) - set(segments):
                        os.unlink(path / extra)
        return found, silent

    found, silent = in_child(try_all, 250)
    bits = 8 * sum(map(len, segments.values()))
    assert found + silent == bits
    blobs = 8 * len(b"abcdefghijklmn")
    assert silent >= blobs  # nothing can be known of those
    assert found >= bits - blobs - 3 * 8 * 4  # sizes of the last entry of a segment may grow or shrink it, unseen


def _read_and_append(path: Path) -> bool:
    """Return whether the damage was noticed: an error, a Gap, or something cut."""
    seen: list[int] = []
    noticed = False
    try:
        with kvspool.open(path, format="fflg", segment_bytes=LIMIT) as log:
            for item in log.read(on_gap="yield"):
                noticed |= isinstance(item, Gap)
                seen += range(item.first, item.last + 1) if isinstance(item, Gap) else [item.sequence]
            assert seen == list(range(seen[0], seen[0] + len(seen))) if seen else True
            sequence = log.append(b"new")
            noticed |= bool(log.torn)
            assert [item.value for item in log.read(sequence)] == [b"new"]
            noticed |= sequence != 6
    except KvspoolError:
        noticed = True
    return noticed


def test_a_damaged_size_in_the_middle_of_a_large_segment_ends_nothing_but_its_segment(tmp_path: Path) -> None:
    first = header(0) + entries(b"a", b"b" * (1 << 20), b"c")
    huge = first[:21] + b"\xff" * 4 + first[25:]
    made_elsewhere(tmp_path / "log", {f"{0:016x}": huge, f"{3:016x}": header(3) + entries(b"d")})

    def read() -> list[Any]:
        bound_addresses(512 << 20)
        with kvspool.open(tmp_path / "log") as log:
            assert log.follow(on_gap="yield", timeout=0.05).poll()[0].value == b"a"
            return items(log)

    assert in_child(read, 20) == [b"a", (1, 2, "damaged"), b"d"]


def test_a_segment_with_too_many_or_too_few_entries_gives_no_sequence_twice(tmp_path: Path) -> None:
    made_elsewhere(tmp_path / "log", {f"{0:016x}": header(0) + entries(b"a"), f"{3:016x}": header(3) + entries(b"d", b"e")})
    with kvspool.open(tmp_path / "log") as log:
        assert items(log) == [b"a", (1, 2, "damaged"), b"d", b"e"]
    made_elsewhere(tmp_path / "more", {f"{0:016x}": header(0) + entries(b"a", b"b", b"c"), f"{2:016x}": header(2) + entries(b"d", b"e")})
    with kvspool.open(tmp_path / "more") as log:
        assert [(record.sequence, record.value) for record in log] == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"e")]
    many = {f"{0:016x}": header(0) + entries(*[b"a"] * 5), f"{2:016x}": header(2) + entries(b"b"), f"{6:016x}": header(6) + entries(b"c")}
    with kvspool.open(made_elsewhere(tmp_path / "many", many)) as log:
        assert items(log) == [b"a"] * 5 + [(5, 5, "damaged"), b"c"]
        assert [item.value for item in log.follow(timeout=10, limit=6, on_gap="skip")] == [b"a"] * 5 + [b"c"]


# Crashes.


@pytest.mark.parametrize("zeros", [1, 3, 4, 7, 8, 4096, (1 << 20) + 5])
def test_a_run_of_zeros_after_what_was_synced_is_cut_after_a_crash_of_the_machine(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "log" / f"{0:016x}"
    with create(tmp_path / "log", segment_bytes=1 << 24) as log:
        log.append_many([b"a", b"", b""])
        log.sync()
        log.append_many([b"b\0\0", b"c"])
        whole = path.read_bytes()
    path.write_bytes(whole + bytes(zeros))
    with system.replaced(RestartedPort()), kvspool.open(tmp_path / "log") as log:
        assert log.end() == 5
        assert items(log) == [b"a", b"", b"", b"b\0\0", b"c"]
        following = log.follow(timeout=0)
        assert len(following.poll()) == 5 and following.poll() == []
        assert path.stat().st_size == len(whole) + zeros
        assert log.append(b"new") == 5
        assert [(torn.position, torn.sequence, torn.size, torn.data) for torn in log.torn] == [
            (len(whole), 5, zeros, bytes(min(zeros, 65536)))
        ]
        assert [record.value for record in following.poll()] == [b"new"]
    assert path.read_bytes() == whole + entries(b"new")


def test_empty_records_that_were_synced_survive_a_crash_of_the_machine_and_later_ones_are_reported(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        log.append_many([b"a", b"", b""])
        log.sync()
        log.append_many([b"", b""])
    with system.replaced(RestartedPort(1)), kvspool.open(tmp_path / "log") as log:
        assert items(log) == [b"a", b"", b""]
        assert log.append(b"") == 3
        assert [torn.size for torn in log.torn] == [8]
        assert log.sync() == 4
    with system.replaced(RestartedPort(2)), kvspool.open(tmp_path / "log") as log:
        assert items(log) == [b"a", b"", b"", b""]
        assert log.append(b"b") == 4
        assert log.torn == []


def test_what_was_synced_of_zeros_is_written_down_on_disk(tmp_path: Path) -> None:
    class Noting(UnflushedPort):
        def __init__(self) -> None:
            super().__init__()
            self.flushed: list[str] = []

        def flush_data(self, fd: int) -> None:
            self.flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)

    with create(tmp_path / "log") as log, system.replaced(Noting()) as port:
        log.append(b"a")
        log.sync()
        assert port.flushed == [""]
        log.append(b"")
        log.sync()
        assert port.flushed == ["", "", ".lck"]


def test_where_nothing_is_known_zeros_are_the_empty_records_that_they_may_be(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        log.append_many([b"a", b"", b""])
    (tmp_path / "log").rename(tmp_path / "moved")
    with system.replaced(RestartedPort()), kvspool.open(tmp_path / "moved") as log:
        assert items(log) == [b"a", b"", b""]
        assert log.append(b"b") == 3
        assert log.torn == []


def test_an_entry_that_begins_before_the_zeros_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log" / f"{0:016x}"
    with create(tmp_path / "log") as log:
        log.append(b"a")
    with open(path, "ab") as file:
        file.write(entries(bytes(256)) + bytes(9))
    with system.replaced(RestartedPort()), kvspool.open(tmp_path / "log") as log:
        assert items(log) == [b"a", bytes(256)]
        assert log.append(b"b") == 2
        assert [torn.size for torn in log.torn] == [9]


def test_killed_at_any_call_an_append_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    def append(path: Path, nth: int) -> None:
        with system.replaced(UnflushedPort()), kvspool.open(path) as log:
            log.append(b"x" * 3000)
            with system.replaced(KillingPort(nth, CHANGES)):
                log.append_many([b"y" * 3000] * 4)

    for nth in range(1, 100):
        path = tmp_path / str(nth)
        with system.replaced(UnflushedPort()), create(path) as log:
            log.append_many([b"a" * 3000] * 2)
        try:
            in_child(lambda path=path, nth=nth: append(path, nth))
            survived = 4
        except Died:
            survived = 0
        with system.replaced(UnflushedPort()), kvspool.open(path) as log:
            found = [value[:1] for value in log.read_values()]
            assert b"aax" + b"y" * survived == b"".join(found)[: 3 + survived]
            assert found == [b"a", b"a", b"x"] + [b"y"] * (len(found) - 3)
            assert log.append(b"z") == len(found)
            assert [value[:1] for value in log.read_values()] == [*found, b"z"]
        if survived:
            return
    raise AssertionError("an append makes fewer calls than that")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_append_whose_nth_call_fails_says_how_much_is_there(tmp_path: Path, number: int) -> None:
    failed = set()
    for nth in range(1, 100):
        with system.replaced(UnflushedPort()), create(tmp_path / str(nth)) as log:
            log.append(b"a" * 3000)
            with system.replaced(failing(nth, number)) as port:
                try:
                    log.append_many([b"y" * 3000] * 6)
                    done = 6
                except (OSError, KvspoolError) as error:
                    notes = "".join(getattr(error, "__notes__", ["0 of 6"]))
                    done = int(notes.split()[0])
            failed.add(port.failed)
            with kvspool.open(tmp_path / str(nth)) as other:
                assert [value[:1] for value in other.read_values()] == [b"a"] + [b"y"] * done
                try:
                    assert other.append(b"z") == 1 + done
                    assert other.torn == []
                except Poisoned:
                    assert port.failed == "flush"
        if not port.failed:
            break
    assert {"write", "flush", "open"} <= failed


# Removed segments.


def test_a_segment_goes_when_every_consumer_is_at_or_past_the_next_one(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log, log.reader("slow") as slow, log.reader("fast") as fast:
        log.append_many([b"x" * 3300] * 10)  # three in a segment
        assert bases(tmp_path / "log") == [0, 3, 6, 9]
        fast.seek(10)
        fast.commit()
        assert bases(tmp_path / "log") == [0, 3, 6, 9]
        slow.seek(2)
        slow.commit()
        assert bases(tmp_path / "log") == [0, 3, 6, 9]
        slow.seek(3)
        assert bases(tmp_path / "log") == [0, 3, 6, 9]
        slow.commit()
        assert bases(tmp_path / "log") == [3, 6, 9]
        slow.seek(8)
        slow.commit()
        assert bases(tmp_path / "log") == [6, 9]  # partly consumed: it stays
        slow.seek(10)
        slow.commit()
        assert bases(tmp_path / "log") == [9]  # the last one never goes
        assert log.append(b"y") == 10
        assert [record.sequence for record in slow.read()] == [10]


def test_nothing_goes_without_a_consumer_or_with_a_damaged_index_or_when_told_to_keep_it(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        log.append_many([b"x" * 9000] * 3)
        assert bases(tmp_path / "log") == [0, 1, 2]
        log.offsets.store("a", 1)
        with open(tmp_path / "log/index", "ab") as index:
            index.write(b"torn")
        with log.reader("a") as reader:
            reader.seek(3)
            reader.commit()
        log.append(b"x" * 9000)
        assert bases(tmp_path / "log") == [0, 1, 2, 3]
    with create(tmp_path / "kept", keep_consumed=1) as log, log.reader("a", "latest") as reader:
        log.append_many([b"x" * 9000] * 3)
        reader.seek(3)
        reader.commit()
        log.append_many([b"x" * 9000] * 3)
        assert bases(tmp_path / "kept") == [0, 1, 2, 3, 4, 5]


def test_the_writer_that_begins_a_segment_drops_consumed_ones(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log:
        log.append_many([b"x" * 9000] * 3)
        log.offsets.store("a", 2)  # by another program, say
        assert bases(tmp_path / "log") == [0, 1, 2]
        log.append(b"x" * 9000)
        assert bases(tmp_path / "log") == [2, 3]


def test_a_trim_that_fails_is_not_the_commits_business(tmp_path: Path) -> None:
    with create(tmp_path / "log") as log, log.reader("a") as reader:
        log.append_many([b"x" * 9000] * 3)
        reader.seek(2)

        def fail(path: Any) -> None:
            raise OSError(errno.EIO, "no")

        with system.replaced(UnflushedPort()) as port:
            port.remove = fail  # type: ignore[method-assign]
            assert reader.commit() == 2
        assert bases(tmp_path / "log") == [0, 1, 2]
        with append_lock.held(log), kvspool.open(tmp_path / "log") as other, other.reader("b") as busy:
            busy.seek(3)
            assert busy.commit() == 3
        reader.seek(3)
        reader.commit()
        assert bases(tmp_path / "log") == [2]


def test_before_the_total_size_is_passed_the_oldest_segments_go_and_the_last_one_never(tmp_path: Path) -> None:
    def total() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "log").iterdir() if path.name != "index")

    with create(tmp_path / "log", total_bytes=25_000) as log, log.reader("behind") as behind:
        log.append_many([b"x" * 9980] * 2)
        assert (bases(tmp_path / "log"), total()) == ([0, 1], 20_000)
        log.append(b"x" * 4980)
        assert (bases(tmp_path / "log"), total()) == ([0, 1, 2], 25_000)  # exactly
        log.append(b"")
        assert (bases(tmp_path / "log"), total()) == ([1, 2], 15_004)
        log.append_many([b"x" * 9980] * 20)
        assert (bases(tmp_path / "log"), total()) == ([22, 23], 20_000)
        with pytest.raises(kvspool.GapError) as caught:
            next(iter(behind.read()))
        gap = caught.value.gap
        assert (gap.first, gap.last, gap.reason) == (0, 21, "trimmed")
        assert [record.sequence for record in behind.read()] == [22, 23]
    with create(tmp_path / "least", total_bytes=LIMIT) as log:
        log.append_many([b"x" * 9980] * 3)
        assert bases(tmp_path / "least") == [2]
        assert items(log, 0) == [(0, 1, "trimmed"), b"x" * 9980]


def test_the_total_size_holds_for_writers_that_take_turns(tmp_path: Path) -> None:
    with create(tmp_path / "log", total_bytes=35_000) as one, kvspool.open(tmp_path / "log") as other:
        for number in range(40):
            (one, other)[number % 2].append(b"x" * (1000 + 500 * (number % 7)))
            assert sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) <= 35_000
        assert one.stats().first_sequence > 10
        assert len(bases(tmp_path / "log")) >= 3


@pytest.mark.parametrize("last", [False, True])
def test_a_kill_during_the_removal_of_segments_leaves_no_hole(tmp_path: Path, last: bool) -> None:
    def drop(path: Path, nth: int) -> None:
        with system.replaced(UnflushedPort()), kvspool.open(path) as log:
            log.sync()
            with system.replaced(KillingPort(nth, CHANGES)):
                log.trim(before=5, force=True) if last else log.append(b"x" * 9000)

    left = set()
    for nth in range(1, 60):
        path = tmp_path / str(nth)
        with system.replaced(UnflushedPort()), create(path, segment_bytes=LIMIT, total_bytes=50_000) as log:
            log.append_many([b"x" * 9000] * 5)
            log.offsets.store("a", 3)
        try:
            in_child(lambda path=path, nth=nth: drop(path, nth))
            died = False
        except Died:
            died = True
        found = bases(path)
        assert found == list(range(found[0], found[-1] + 1))
        left.add(found[0])
        with system.replaced(UnflushedPort()), kvspool.open(path) as log:
            assert [record.sequence for record in log] == list(range(found[0], log.end()))
            assert log.append(b"y") == log.end() - 1
        if not died:
            break
    assert left == ({0, 1, 2, 3, 4} if last else {0, 1, 2, 3})


def test_writers_that_are_killed_and_a_consumer_that_trims_lose_and_repeat_nothing(tmp_path: Path) -> None:
    create(tmp_path / "log").close()

    def write(number: int, acks: Path) -> None:
        with system.replaced(UnflushedPort()), kvspool.open(tmp_path / "log") as log, open(acks, "ab", buffering=0) as file:
            for count in range(10**6):
                log.append_many([b"%d %d %d" % (number, os.getpid(), count) + b" " * 150] * (1 + count % 3))
                file.write(b"%d %d\n" % (os.getpid(), count))

    acks = [tmp_path / f"acks {number}" for number in range(3)]
    seen: list[tuple[int, int, int, int]] = []
    seeded = random.Random(20)
    with kvspool.open(tmp_path / "log") as log, log.reader("a") as reader, system.replaced(UnflushedPort()):
        for _ in range(6):
            writers = [start(lambda number=number: write(number, acks[number]), 20) for number in range(3)]
            limit = 500 + seeded.randrange(500)
            seen += [(record.sequence, *map(int, record.value.split())) for record in reader.follow(timeout=10, limit=limit)]
            for wait in writers:
                os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            for wait in writers:
                with pytest.raises(Died):
                    wait()
            reader.commit()
        seen += [(record.sequence, *map(int, record.value.split())) for record in reader.read()]
        reader.commit()
        log.append(b"")
        assert [sequence for sequence, *_ in seen] == list(range(len(seen)))
        assert len(bases(tmp_path / "log")) == 1
    for number in range(3):
        acked = [tuple(map(int, line.split())) for line in acks[number].read_text().splitlines()]
        mine = [(process, count) for _, writer, process, count in seen if writer == number]
        for process in {process for process, _ in mine} | {process for process, _ in acked}:
            counts = [count for other, count in mine if other == process]
            done = [count for other, count in acked if other == process]
            whole = [count for count in range(len(done)) for _ in range(1 + count % 3)]
            assert counts[: len(whole)] == whole  # all that was acknowledged, in order and once
            assert set(counts[len(whole) :]) <= {len(done)} and len(counts) - len(whole) <= 1 + len(done) % 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_create_whose_nth_call_fails_leaves_nothing(tmp_path: Path, number: int) -> None:
    failed = set()
    for nth in range(1, 100):
        with system.replaced(failing(nth, number)) as port:
            try:
                log = create(tmp_path / "log")
            except (OSError, KvspoolError):
                failed.add(port.failed)
                assert os.listdir(tmp_path) == []
                continue
        log.close()
        if not port.failed:
            break
        shutil.rmtree(tmp_path / "log")
        shutil.rmtree(tmp_path / ".log.kvspool")
    assert {"open", "write", "flush", "rename", "make_directory"} <= failed
    with kvspool.open(tmp_path / "log") as log:
        assert log.append(b"a") == 0


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    create(tmp_path / "log").close()
    settings = tmp_path / ".log.kvspool/kvspool.json"
    for limits in ('{"segment_bytes":1}', '{"x":1}', "[]", ""):
        settings.write_text('{"format":"fflg","limits":' + limits + "}")
        with pytest.raises(Corruption, match="remove it to open with the defaults"):
            kvspool.open(tmp_path / "log")
    settings.unlink()
    assert kvspool.open(tmp_path / "log").format.limits() == Fflg().limits()


# Its documentation.

PAGE = (Path(__file__).parents[2] / "docs/formats/fflg.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("layout", [fflg.HEADER, fflg.DOCUMENT_HEADER, fflg.ENTRY, PLACE], ids=lambda layout: layout.record.__name__)
def test_the_page_has_the_table_of_each_layout(layout: Layout[Any]) -> None:
    assert layout.table() in PAGE


def test_the_tests_that_the_page_names_are_there() -> None:
    for path, name in re.findall(r"`(tests/[^`:]+)::([^`]+)`", PAGE):
        assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8")


def test_the_examples_of_the_page_are_what_is_written() -> None:
    segment, place = re.search(r"Segment 20 begins with `([^`]+)`. The consumer .* is `([^`]+)`", " ".join(PAGE.split())).groups()  # type: ignore[union-attr]
    assert bytes.fromhex(segment) == Fflg().header(20)
    assert bytes.fromhex(place) == pack_index(StoredConsumers([("café".encode(), 1)], b""))
