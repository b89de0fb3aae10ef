"""The format fixed: its bytes, its positions, and its damage."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import struct
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from children import in_child
from loops import twins
from schedules import some
from trees import tree

import kvspool
from kvspool import Gap, GapError, errors
from kvspool.engine.layout import Layout
from kvspool.journal import sidecars
from kvspool.journal.bounds import ALL_ONES, FIRST, REWIND, First, Rewind
from kvspool.journal.fixed import FixedJournal
from kvspool.journal.formats import Fixed
from kvspool.journal.formats.fixed import TAIL


def record(item: bytes) -> bytes:
    """Return the bytes that the original writes for an item."""
    return item + struct.pack(">I", zlib.crc32(item))


def item(position: int) -> bytes:
    return struct.pack(">H", position ^ 0x5A5A)


def originals(path: Path, items: list[bytes], per_blob: int, first_blob: int = 0) -> Path:
    """Make the directory that the original would have made of some items."""
    path.mkdir()
    for index in range(len(items) // per_blob + 1):
        blob = b"".join(map(record, items[index * per_blob : (index + 1) * per_blob]))
        (path / f"{first_blob + index:016x}").write_bytes(blob)
    return path


def made(path: Path, count: int = 8, per_blob: int = 3) -> FixedJournal:
    log = kvspool.create(path, format="fixed", item_bytes=2, items_per_blob=per_blob)
    assert isinstance(log, FixedJournal)
    log.append_many([item(position) for position in range(count)])
    return log


def opened(path: Path, per_blob: int = 3) -> FixedJournal:
    log = kvspool.open(path, format="fixed", item_bytes=2, items_per_blob=per_blob)
    assert isinstance(log, FixedJournal)
    return log


def blobs(path: Path) -> dict[str, bytes]:
    return {found.name: found.read_bytes() for found in sorted(path.iterdir())}


def what_is_read(log: Any, start: Any = "earliest") -> list[Any]:
    """Each item with its position, and each gap's first and last one with the reason."""
    found = log.read(start, on_gap="yield")
    return [(x.first, x.last, x.reason) if isinstance(x, Gap) else (x.sequence, x.value) for x in found]


def numbered(*positions: int) -> list[tuple[int, bytes]]:
    return [(position, item(position)) for position in positions]


# Bytes.


def test_golden_bytes(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="fixed", item_bytes=5, items_per_blob=2) as log:
        assert log.append(b"hello") == 0
        assert log.append_many([b"world", b"\0\0\0\0\0"]) == range(1, 3)
    first = b"hello" + struct.pack(">I", 0x3610A686) + b"world" + struct.pack(">I", 0x3A771143)
    assert zlib.crc32(b"hello") == 0x3610A686
    assert blobs(tmp_path / "log") == {"0" * 16: first, "0" * 15 + "1": b"\0" * 5 + struct.pack(">I", zlib.crc32(b"\0" * 5))}


def test_what_we_write_is_what_the_original_writes(tmp_path: Path) -> None:
    items = [os.urandom(7) for _ in range(23)]
    with kvspool.create(tmp_path / "ours", format="fixed", item_bytes=7, items_per_blob=5) as log:
        for start in range(0, 23, 4):
            log.append_many(items[start : start + 4])
    assert blobs(tmp_path / "ours") == blobs(originals(tmp_path / "theirs", items, 5))


def test_a_full_last_blob_is_followed_by_an_empty_one(tmp_path: Path) -> None:
    with made(tmp_path / "log", 6):
        assert [len(blob) for blob in blobs(tmp_path / "log").values()] == [18, 18, 0]


def test_what_the_original_wrote_is_read_and_continued(tmp_path: Path) -> None:
    items = [item(position) for position in range(8)]
    path = originals(tmp_path / "theirs", items, 3, first_blob=16)  # it was pruned
    with opened(path) as log:
        assert list(log.replay()) == items
        assert [found.sequence for found in log] == list(range(48, 56))
        assert log.append(b"xx") == 56
    assert blobs(path) == blobs(originals(tmp_path / "more", [*items, b"xx"], 3, first_blob=16))


def test_a_full_blob_of_the_originals_gets_a_new_one_at_the_first_append(tmp_path: Path) -> None:
    path = originals(tmp_path / "theirs", [item(0), item(1), item(2)], 3)
    (path / f"{1:016x}").unlink()
    with opened(path) as log:
        assert log.append(b"xx") == 3
    assert blobs(path) == {"0" * 16: b"".join(record(item(n)) for n in range(3)), "0" * 15 + "1": record(b"xx")}


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = originals(tmp_path / "theirs", [item(position) for position in range(8)], 3)
    with (path / f"{2:016x}").open("ab") as blob:
        blob.write(b"torn")
    before = tree(tmp_path)
    with opened(path) as log:
        assert len(list(log.replay())) == 8
        assert log.item(7) == item(7)
        assert log.stats().records == 8
        assert list(log.follow(7, timeout=0.01)) == list(log.read(7))
        assert log.readers() == []
    assert tree(tmp_path) == before


def test_our_files_are_next_to_the_directory(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log, log.reader("r") as reader:
        next(reader.read())
        reader.commit()
    assert {len(name) for name in os.listdir(tmp_path / "log")} == {16}
    lock, readers = sidecars.lock_file(tmp_path / "log").name, sidecars.reader_lock(tmp_path / "log", b"r").name
    assert sorted(os.listdir(tmp_path / ".log.kvspool")) == sorted(["kvspool.json", lock, f"{lock}.tail", readers, "r.ofs"])
    assert (tmp_path / ".log.kvspool").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*")} == {0o600}


def test_leftovers_of_a_deleted_journal_are_not_used_by_a_new_one(tmp_path: Path) -> None:
    for _ in range(2):
        with made(tmp_path / "log") as log:
            assert log.readers() == []
            assert (log.oldest(), log.end(), log.generation()) == (0, 8, 0)
            with log.reader("r", start=7):
                log.rewind(7)
                log.open_for_sync(20, 30)
        shutil.rmtree(tmp_path / "log")


def test_the_settings_are_known(tmp_path: Path) -> None:
    made(tmp_path / "log").close()
    with kvspool.open(tmp_path / "log") as log:
        assert isinstance(log, FixedJournal)
        assert log.format.limits() == {"item_bytes": 2, "items_per_blob": 3}
    with pytest.raises(ValueError, match="created with item_bytes=2, not 3"):
        kvspool.open(tmp_path / "log", format="fixed", item_bytes=3, items_per_blob=3)
    with pytest.raises(errors.NotALog):
        kvspool.open(originals(tmp_path / "theirs", [], 3))


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), (-1, 1), (1 << 31, 1), (8, 1 << 60)])
def test_impossible_limits(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Fixed(*limits)


@pytest.mark.parametrize("twin", twins("kvspool.kernel.fixed"))
def test_the_loops(twin: ModuleType) -> None:
    for size in [*range(1, 70), 4095, 4096, 4097]:
        items = [os.urandom(size) for _ in range(3)]
        data = bytes(twin.encode(items, 1, 2, size))
        assert data == record(items[1]) + record(items[2])
        found: list[Any] = []
        assert twin.scan(data, 7, 9, size, None, found) == (len(data), 9, 0, size + 4)
        assert found == items[1:]
        assert twin.scan(data[:-1], 7, 1, size, None, []) == (size + 4, 8, 0, 0)
        assert twin.scan(data[:-1], 7, 2, size, lambda *_: None, []) == (size + 4, 8, 1, size + 4)
        damaged = data[:-1] + bytes([data[-1] ^ 1])
        assert twin.scan(damaged, 7, 9, size, None, []) == twin.pass_over(damaged, 7, 9, size) == (size + 4, 8, 2, 0)
        assert twin.last_sound(damaged, size) == size + 4
        assert twin.last_sound(data, size) == twin.last_sound(data + b"x", size) == len(data)
        assert twin.last_sound(damaged[size + 4 :], size) == 0
        assert twin.item_of(record(items[0]), size) == items[0]
        assert twin.item_of(damaged[size + 4 :], size) is twin.item_of(data, size) is twin.item_of(b"", size) is None
    assert twin.first_unfit([b"ab", b"cd"], 2) == -1
    assert twin.first_unfit([b"ab", b"c", b"def"], 2) == 1


def test_zeros_are_no_item_and_no_bound() -> None:
    assert [size for size in range(1, 3000) if zlib.crc32(bytes(size)) == 0] == []
    for layout in (FIRST, REWIND):
        assert kvspool.journal.bounds.crc32c(ALL_ONES, bytes(layout.size - 4)) != 0  # type: ignore[attr-defined]
    assert First._fields[-1] == Rewind._fields[-1] == "checksum"


# Arguments.


def test_items_have_one_length(tmp_path: Path) -> None:
    with made(tmp_path / "log", 2) as log:
        with pytest.raises(errors.TooLarge, match="item 1 of 2 has 3 bytes; this journal has items of 2"):
            log.append_many([b"ok", b"abc"])
        with pytest.raises(ValueError, match="item 0 of 1 has 1 bytes"):
            log.append(b"a")
        for wrong in ({"key": b"k"}, {"type": 1}):
            with pytest.raises(ValueError):
                log.append(b"ok", **wrong)  # type: ignore[arg-type]
        assert log.end() == 2


def test_three_errors_of_get(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        assert [log.item(position) for position in range(8)] == [item(position) for position in range(8)]
        log.prune(3)
        with (tmp_path / "log" / f"{1:016x}").open("r+b") as blob:
            blob.write(b"!")
        for kind, position, offset, index in [
            (errors.OutOfRange, 8, 12, 2),
            (errors.OutOfRange, 1 << 70, (1 << 70) % 3 * 6, (1 << 70) // 3),
            (errors.Pruned, 2, 12, 0),
            (errors.ChecksumMismatch, 3, 0, 1),
        ]:
            with pytest.raises(kind) as raised:
                log.item(position)
            path = str(tmp_path / "log" / f"{index:016x}")
            assert type(raised.value) is kind
            assert (raised.value.position, raised.value.path, raised.value.offset) == (position, path, offset)  # type: ignore[attr-defined]
            assert f"byte {offset} of {path}" in str(raised.value)
        with pytest.raises(ValueError):
            log.item(-1)
        assert log.item(4) == item(4)
    with pytest.raises(errors.Closed):
        log.item(4)
    assert issubclass(errors.ChecksumMismatch, errors.Corruption)
    assert not issubclass(errors.Pruned, errors.OutOfRange) and not issubclass(errors.Pruned, errors.Corruption)


# Damage.


@pytest.mark.parametrize("size", range(13))
def test_every_length_of_the_last_blob(tmp_path: Path, size: int) -> None:
    """Whole items are read; the first append cuts the rest, and says so."""
    path = originals(tmp_path / "log", [item(position) for position in range(8)], 3)
    os.truncate(path / f"{2:016x}", size)
    whole = 6 + size // 6
    with opened(path) as log:
        assert what_is_read(log) == numbered(*range(whole))
        with pytest.raises(errors.OutOfRange):
            log.item(whole)
        assert log.append(b"xx") == whole
        torn = [(found.position, found.sequence, found.size) for found in log.torn]
        assert torn == ([(size // 6 * 6, whole, size % 6)] if size % 6 else [])
        assert what_is_read(log) == [*numbered(*range(whole)), (whole, b"xx")]


@pytest.mark.parametrize("size", range(18))
def test_every_length_of_a_blob_in_the_middle(tmp_path: Path, size: int) -> None:
    """Missing items are a Gap of exactly these; nothing is appended after it."""
    path = originals(tmp_path / "log", [item(position) for position in range(8)], 3)
    os.truncate(path / f"{1:016x}", size)
    before = tree(path)
    whole = 3 + size // 6
    with opened(path) as log:
        expected = [*numbered(*range(whole)), (whole, 5, "damaged"), *numbered(6, 7)]
        assert what_is_read(log) == expected
        for start in range(3, 6):
            assert what_is_read(log, start) == [entry for entry in expected if start <= entry[0] < whole] + [
                (max(start, whole), 5, "damaged"),
                *numbered(6, 7),
            ]
        with pytest.raises(errors.Corruption, match="missing, or too short for item 5"):
            log.item(5)
        with pytest.raises(errors.Corruption, match=f"{1:016x} has {size} bytes instead of 18"):
            log.append(b"xx")
    assert tree(path) == before


@pytest.mark.parametrize("knows_the_end", [True, False])
def test_every_bit_flip_costs_exactly_its_item(tmp_path: Path, knows_the_end: bool) -> None:
    with made(tmp_path / "log") as log:
        if knows_the_end:
            path = tmp_path / "log"
        else:
            path = originals(tmp_path / "theirs", [item(position) for position in range(8)], 3)
            log = opened(path)
        for index, blob in enumerate(blobs(path).values()):
            for bit in some(range(len(blob) * 8), 5):
                lost = index * 3 + bit // 48
                damaged = bytearray(blob)
                damaged[bit // 8] ^= 1 << bit % 8
                (path / f"{index:016x}").write_bytes(damaged)
                rest = numbered(*range(lost + 1, 8))
                gap: list[Any] = [(lost, lost, "damaged")] if knows_the_end or rest else []  # a last one that is damaged is torn
                assert what_is_read(log) == numbered(*range(lost)) + gap + rest
                with pytest.raises(errors.ChecksumMismatch if gap else errors.OutOfRange):
                    log.item(lost)
                with pytest.raises(GapError) if gap else pytest.raises(StopIteration):
                    next(log.replay(min(lost, log.end())))
            (path / f"{index:016x}").write_bytes(blob)
        assert what_is_read(log) == numbered(*range(8))
        log.close()


@pytest.mark.parametrize("damaged", [[7], [6, 7], [5, 6, 7], [4, 7]])
def test_damaged_items_at_the_end_are_dropped_until_a_sound_one(tmp_path: Path, damaged: list[int]) -> None:
    path = originals(tmp_path / "log", [item(position) for position in range(8)], 3)
    for position in damaged:
        with (path / f"{position // 3:016x}").open("r+b") as blob:
            blob.seek(position % 3 * 6 + 5)
            blob.write(b"?")
    dropped = [position for position in damaged if position >= 6]
    with opened(path) as log:
        assert log.end() == min(dropped)
        assert log.append(b"xx") == min(dropped)
        assert [(torn.sequence, torn.size) for torn in log.torn] == [(min(dropped), 6 * len(dropped))]
        rest: list[Any] = numbered(*range(min(dropped)))
        for position in set(damaged) - set(dropped):
            rest[position] = (position, position, "damaged")
        assert what_is_read(log) == [*rest, (min(dropped), b"xx")]


def test_the_end_is_found_after_megabytes_of_damage(tmp_path: Path) -> None:
    """As a file system leaves them that has lengthened a file and not written it."""
    path = originals(tmp_path / "log", [item(0)], 1_000_000)
    os.truncate(path / f"{0:016x}", 5_000_000)
    with opened(path, 1_000_000) as log:
        assert log.end() == 1
        assert log.append(b"xx") == 1
        assert (path / f"{0:016x}").stat().st_size == 12


def test_a_missing_blob_is_a_gap_and_no_place_to_append(tmp_path: Path) -> None:
    path = originals(tmp_path / "log", [item(position) for position in range(11)], 3)
    (path / f"{1:016x}").unlink()
    with opened(path) as log:
        assert what_is_read(log) == [*numbered(0, 1, 2), (3, 5, "damaged"), *numbered(*range(6, 11))]
        assert what_is_read(log, 4) == [(4, 5, "damaged"), *numbered(*range(6, 11))]
        with pytest.raises(errors.Corruption, match=f"{1:016x} is missing"):
            log.item(4)
        with pytest.raises(errors.Corruption, match=f"{1:016x} is missing"):
            log.append(b"xx")
        with pytest.raises(errors.Corruption, match=f"{1:016x} is missing"):
            log.rewind(2)


def test_blobs_that_are_too_long(tmp_path: Path) -> None:
    """No blob has more than its items, whatever bytes follow them."""
    for index in range(3):
        path = originals(tmp_path / str(index), [item(position) for position in range(9)], 3)
        (path / f"{3:016x}").unlink()
        with (path / f"{index:016x}").open("ab") as blob:
            blob.write(record(b"xx") * 2)
        with opened(path) as log:
            assert what_is_read(log) == numbered(*range(9))
            with pytest.raises(errors.Corruption, match=f"{index:016x} has 30 bytes instead of 18"):
                log.append(b"xx")


def test_foreign_names_are_left_alone(tmp_path: Path) -> None:
    path = originals(tmp_path / "log", [item(position) for position in range(4)], 3)
    names = ["notes.txt", "000000000000000G", "00000000000000A1", "0" * 17, "1" * 15, ".0000000000000009"]
    for name in names:
        (path / name).write_bytes(b"mine")
    with opened(path) as log:
        assert what_is_read(log) == numbered(0, 1, 2, 3)
        assert log.append(b"xx") == 4
        log.prune(4)
        log.rewind(3)
    assert {name: (path / name).read_bytes() for name in names} == dict.fromkeys(names, b"mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_bytes(b"mine")
    with pytest.raises(errors.NotALog):
        opened(tmp_path / "other")


def test_damaged_bounds_are_refused(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        log.prune(4)
        log.rewind(7)
    for name in (".first", ".rewinds"):
        path = sidecars.lock_file(tmp_path / "log").with_suffix(name)
        sound = path.read_bytes()
        for damaged in (bytes(len(sound) - 12) + bytes(12), sound[:-1] + b"?", bytes(12)):
            path.write_bytes(damaged)
            with pytest.raises(errors.Corruption, match=name), kvspool.open(tmp_path / "log") as log:
                assert isinstance(log, FixedJournal)
                if name == ".rewinds":
                    log._bounds.lowest(0, 2)
                log.oldest()
        path.write_bytes(sound)


# Many blobs.


def test_ten_thousand_blobs_take_a_few_descriptors(tmp_path: Path) -> None:
    items = [struct.pack(">I", position) for position in range(10_000)]
    path = originals(tmp_path / "log", items, 1)

    def work() -> tuple[int, bool, list[int], int]:
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 24
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with kvspool.open(path, format="fixed", item_bytes=4, items_per_blob=1) as log:
            assert isinstance(log, FixedJournal)
            replayed = list(log.replay()) == items
            order = random.Random(1).sample(range(10_000), 2000)
            wrong = [position for position in order if log.item(position) != items[position]]
            followed = sum(1 for _ in log.follow(timeout=0.01))
            log.append_many(items[:50])
            return log.end(), replayed, wrong, followed

    assert in_child(work) == (10_050, True, [], 10_000)


# The page.

PAGE = (Path(__file__).parents[2] / "docs/formats/fixed.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("layout", [TAIL, FIRST, REWIND], ids=lambda layout: layout.record.__name__)
def test_the_page_has_the_table_of_each_layout(layout: Layout[Any]) -> None:
    assert layout.table() in PAGE


def test_the_example_of_the_page_is_what_is_stored() -> None:
    assert bytes.fromhex(PAGE.split("`hello` is stored as `")[1].split("`")[0]) == record(b"hello")


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`tests/journal/(\w+\.py)::(\w+)`", PAGE)
    assert len(named) == 5
    for file, test in named:
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
