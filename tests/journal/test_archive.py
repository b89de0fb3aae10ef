"""Archived segments: the same bytes, the same records, at every moment, whatever fails, whatever is killed, and whatever the file holds."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import zstandard
from children import Died, bound_addresses, in_child, start
from faults import FILE_CALLS, FailingPort, KillingPort, RecordingPort
from schedules import some

import kvspool
from kvspool import Gap, Record, cli, system
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, LockTimeout, MissingExtra, TooLarge
from kvspool.journal import Journal, JournalBatch, seekable
from kvspool.journal.control import ADMIN, Control
from kvspool.journal.segment import Archived, Segment
from kvspool.journal.segments import Segments
from kvspool.system import Port

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
CALLS = tuple(
    dict.fromkeys((*FILE_CALLS, "remove", "names", "truncate", "look_up", "set_times", "set_owner", "unlock", "unlock_all", "boot_id"))
)
MORE_MEMORY = 200 << 20  # bytes that hostile files may make a process take


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seekable, "BLOCK", 700)


def filled(path: Path, count: int = 300, segment_bytes: int = 2500) -> Journal:
    """A journal of several segments of several blocks, with values of many lengths; three records have the same time."""
    log = kvspool.create(path, format="kvj", segment_bytes=segment_bytes)
    random_ = random.Random(1)
    values = [b"%d " % number + random_.randbytes(random_.choice([0, 3, 40, 900 if number % 60 == 7 else 1])) for number in range(count)]
    start = round(BEGIN.timestamp()) * 10**9
    log.append_batch(JournalBatch(values, timestamps=[start + number // 3 * 10**9 for number in range(count)]))
    return log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Journal]:
    with filled(tmp_path / "log") as log:
        yield log


def reopened(log: Journal) -> Journal:
    return kvspool.open(log.path)  # type: ignore[return-value]


def files(log: Journal) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((log.path / "kvj").iterdir())}


def archives(log: Journal) -> list[Path]:
    return sorted((log.path / "kvj").glob("*.zst"))


def every_other(log: Journal) -> None:
    """Archive all sealed segments, then make every other one a segment again."""
    log.archive()
    for path in archives(log)[::2]:
        plain = path.with_suffix("")
        plain.write_bytes(zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read())
        path.unlink()


# Contents of archives.


def test_an_archive_is_what_every_zstd_decoder_takes(log: Journal, tmp_path: Path) -> None:
    before = files(log)
    report = log.archive()
    assert [one.base for one in report.segments] == log._segments.bases()[:-1]
    after = files(log)
    last = max(before)
    assert set(after) == {name + ".zst" for name in before if name != last} | {last}
    assert (report.bytes_before, report.bytes_after) == (
        sum(len(data) for name, data in before.items() if name != last),
        sum(len(data) for name, data in after.items() if name != last),
    )
    for name, data in after.items():
        if name == last:
            continue
        plain = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        assert plain == before[name.removesuffix(".zst")]
        if shutil.which("zstd"):
            done = subprocess.run(["zstd", "-d", "-c"], input=data, capture_output=True, check=True)
            assert done.stdout == plain


def test_the_table_is_that_of_the_seekable_format(log: Journal) -> None:
    before = files(log)
    log.archive()
    for path in archives(log):
        data, plain = path.read_bytes(), before[path.stem]
        blocks, descriptor, magic = struct.unpack("<IBI", data[-9:])
        assert (descriptor, magic) == (0x80, 0x8F92EAB1)
        assert blocks == -(-len(plain) // 700) > 2
        begin = len(data) - 9 - 12 * blocks - 8
        assert struct.unpack_from("<II", data, begin) == (0x184D2A5E, 12 * blocks + 9)
        at = done = 0
        for stored, size, checksum in struct.iter_unpack("<III", data[begin + 8 : -9]):
            frame = data[at : at + stored]
            assert zstandard.ZstdDecompressor().decompress(frame) == plain[done : done + size]
            assert zstandard.get_frame_parameters(frame).has_checksum
            assert frame[-4:] == checksum.to_bytes(4, "little"), "zstd ends a frame with the lower half of XXH64 of its content"
            at, done = at + stored, done + size
        assert (at, done) == (begin, len(plain))


def test_undone_it_is_byte_for_byte_what_it_was(log: Journal) -> None:
    before = files(log)
    times = {path.name: path.stat().st_mtime_ns for path in (log.path / "kvj").iterdir()}
    path = log._segments.plain_path(0)
    path.chmod(0o640)
    os.utime(path, ns=(1, 10**18))
    times[path.name] = 10**18
    log.archive(level=19)
    assert archives(log)[0].stat().st_mode & 0o777 == 0o640
    assert {one.stem: one.stat().st_mtime_ns for one in archives(log)} == {name: at for name, at in times.items() if name != max(times)}
    report = log.unarchive()
    assert report.undo and len(report.segments) == len(before) - 1
    assert files(log) == before
    assert {path.name: path.stat().st_mtime_ns for path in (log.path / "kvj").iterdir()} == times
    assert path.stat().st_mode & 0o777 == 0o640


def test_which_segments(log: Journal) -> None:
    bases = log._segments.bases()
    os.utime(log._segments.plain_path(bases[1]), ns=(0, system.port.now() - 100 * 10**9))
    assert [one.base for one in log.archive(bases[3] + 1, dry_run=True).segments] == bases[:3]
    assert [one.base for one in log.archive(older_than=99, dry_run=True).segments] == [bases[1]]
    dry = log.archive(dry_run=True)
    assert [one.base for one in dry.segments] == bases[:-1] and dry.bytes_after is None and archives(log) == []
    assert [one.base for one in log.archive(bases[3] - 1).segments] == bases[:2]
    assert [one.base for one in log.archive(older_than=0).segments] == bases[2:-1], "what is archived is done"
    assert log.archive().segments == []
    assert [one.base for one in log.unarchive(bases[2], older_than=99).segments] == [bases[1]]


def test_what_can_not_be_archived(log: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvspool.create(tmp_path / "sej", format="sej") as other:
        for wrong in (other.archive, other.unarchive):
            with pytest.raises(ValueError, match="sej"):
                wrong()
    with pytest.raises(ValueError, match="level"):
        log.archive(level=0)
    monkeypatch.setattr(seekable, "LARGEST_TABLE", 12)
    before = files(log)
    with pytest.raises(TooLarge):
        log.archive()
    assert files(log) == before


def test_an_archive_is_never_written_to(log: Journal) -> None:
    log.archive()
    with pytest.raises(ValueError, match="archive"):
        Segment(log._segments.path_of(0), 0, is_writable=True)


def test_progress(log: Journal) -> None:
    for convert in (log.archive, log.unarchive):
        told: list[tuple[int, int]] = []
        report = convert(progress=lambda *both, told=told: told.append(both))  # type: ignore[misc]
        assert told == sorted(told) and {of for _, of in told} == {report.bytes_before} and told[-1][0] == report.bytes_before
        assert len(told) > 2 * len(report.segments)


@pytest.mark.parametrize("layout", [seekable.HEAD, seekable.ENTRY, seekable.FOOTER], ids=lambda layout: layout.record.__name__)
def test_the_page_has_the_table_of_each_layout(layout: Layout[Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "archives.md").read_text(encoding="utf-8")
    assert layout.table() in page


# Reading.


def test_from_every_sequence_and_time(log: Journal) -> None:
    whole = list(log)
    every_other(log)
    assert 2 < len(archives(log)) < len(log._segments.bases()) - 2
    with reopened(log) as other:
        for first in range(len(whole) + 1):
            assert list(other.read(first, limit=70)) == whole[first : first + 70]
        for second in range(len(whole) // 3):
            for time in (BEGIN + timedelta(seconds=second), BEGIN + timedelta(seconds=second - 0.5)):
                assert list(other.read(time, limit=40)) == whole[3 * second : 3 * second + 40]
        assert list(other.read()) == whole
        assert other.stats().next_sequence == len(whole)
        assert other.stats().used == sum(map(len, files(log).values()))
        with other.reader("r", start=7) as reader:
            assert list(reader.read()) == whole[7:]


def test_a_read_in_the_middle_takes_one_block(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [(base, log._segments.get(base).read(0, 1 << 20)) for base in log._segments.bases()[:-1]]  # type: ignore[union-attr]
    log.archive()
    asked: list[int] = []
    real = seekable.decompressed
    monkeypatch.setattr(seekable, "decompressed", lambda fd, at, entry: asked.append(at) or real(fd, at, entry))  # type: ignore[func-returns-value]
    for base, plain in whole:
        segment = Archived(log._segments.archive_path(base), base)
        assert segment.size() == len(plain)
        for at in (0, 699, 700, 1500, len(plain) - 1):
            asked.clear()
            assert segment.read(at, 1) == plain[at : at + 1]
            assert len(asked) <= 1
        for at in range(0, len(plain), 13):
            for size in (0, 1, 699, 700, 701, 5000):
                assert segment.read(at, size) == plain[at : at + size]
        asked.clear()
        for at in range(0, len(plain), 10):
            segment.read(at, 400)
        assert len(asked) <= len(segment.table), "each block once, where one reads on"
        segment.close()


def test_a_cursor_continues_in_the_other_form(log: Journal) -> None:
    whole = list(log)
    with reopened(log) as other, other.read() as reading:
        found = list(reading.poll(2))
        log.archive()
        found += reading.poll(30)
        log.unarchive()
        found += reading.poll(50)
        log.archive()
        assert found + list(reading) == whole


def test_a_segment_that_is_gone_is_a_gap_between_archives_too(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=200) as log:
        log.append_many([b"x" * 100] * 6)
        bases = log._segments.bases()
        log._segments.plain_path(bases[1]).unlink()
        with reopened(log) as other, other.read(on_gap="yield") as reading:
            first = next(reading)
            assert first.sequence == 0
            log.archive()
            found = [one.reason if isinstance(one, Gap) else one.sequence for one in reading]
        assert found[: bases[1] - 1] == list(range(1, bases[1])) and found[bases[1] - 1] == "damaged"


class RacingPort(Port):
    """Does something when one name was just looked for, once."""

    def __init__(self, then: Callable[[], object], call: str, suffix: str) -> None:
        super().__init__()
        self.then: Callable[[], object] | None = then
        for name in (call,):
            setattr(self, name, self._first(getattr(self, name), suffix))

    def _first(self, call: Callable[..., Any], suffix: str) -> Callable[..., Any]:
        def wrapped(path: Any, *rest: Any) -> Any:
            try:
                return call(path, *rest)
            finally:
                if str(path).endswith(suffix) and self.then is not None:
                    then, self.then = self.then, None
                    with system.replaced(Port()):
                        then()

        return wrapped


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("suffix", [".kvj", ".zst"])
def test_a_lookup_of_a_segment_finds_one_of_its_forms(log: Journal, undo: bool, suffix: str) -> None:
    if undo:
        log.archive()
    with reopened(log) as other:
        for look in (lambda: other._segments.get(0) is not None, lambda: other._segments.exists(0)):
            call = "open" if look is not None and look.__code__.co_names[1] == "get" else "look_up"
            with system.replaced(RacingPort(log.unarchive if undo else log.archive, call, suffix)):
                assert look()
            (log.archive if undo else log.unarchive)()
            other._segments.close()


def test_a_listing_that_misses_a_segment_is_taken_twice(log: Journal) -> None:
    bases = log._segments.bases()

    class Port_(Port):
        looks = 0

        def names(self, path: Any) -> list[str]:
            self.looks += 1
            return [name for name in super().names(path) if self.looks != 1 or not name.startswith("0000000000000000.")]

    with system.replaced(Port_()):
        assert log._segments.bases() == bases


def test_others_append_follow_and_seek_while_one_archives(tmp_path: Path) -> None:
    with filled(tmp_path / "log", 100) as log:
        more = 1500

        def archiving() -> int:
            rounds = 0
            with reopened(log) as other:
                while other.end() < 100 + more:
                    other.archive()
                    other.unarchive(other.end() // 2)
                    rounds += 1
            return rounds

        def appending() -> None:
            with reopened(log) as other:
                for number in range(100, 100 + more):
                    other.append(b"%d " % number)

        def seeking() -> int:
            random_, count = random.Random(3), 0
            with reopened(log) as other:
                while (end := other.end()) < 100 + more:
                    sequence = random_.randrange(end)
                    assert [one.sequence for one in other.read(sequence, limit=3)][0] == sequence
                    count += 1
            return count

        others = [start(archiving), start(seeking), start(appending)]
        with reopened(log) as other, other.follow(timeout=30) as following:
            for number in range(100 + more):
                record = next(following)
                assert record.sequence == number and record.value.startswith(b"%d " % number)
        assert [wait() for wait in reversed(others)][1:] > [0, 0]
        assert [record.sequence for record in log] == list(range(100 + more))


# Kills and failures.


def small(path: Path) -> Journal:
    return filled(path, 60, 1000)


def convert(path: Path, undo: bool) -> None:
    with kvspool.open(path) as log:
        assert isinstance(log, Journal)
        (log.unarchive if undo else log.archive)(log._segments.bases()[2])


def is_whole_and_can_be_finished(path: Path, whole: list[Record], before: dict[str, bytes], undo: bool) -> None:
    with kvspool.open(path) as log:
        assert isinstance(log, Journal)
        assert list(log) == whole
        (log.unarchive if undo else log.archive)()
        assert list(log) == whole
        forms = (log._segments.plain_path, log._segments.archive_path)
        bases = log._segments.bases()
        wanted = [forms[not undo](base) for base in bases[:-1]] + [forms[0](bases[-1])]
        assert sorted((log.path / "kvj").iterdir()) == wanted, "no other files are left"
        log.unarchive()
        assert files(log) == before


@pytest.mark.parametrize("undo", [False, True])
def test_killed_at_each_call(tmp_path: Path, undo: bool) -> None:
    with small(tmp_path / "log") as log:
        whole, before = list(log), files(log)
        if undo:
            log.archive()
    for nth in some(range(1, 1000), 7, undo):
        copy = tmp_path / f"{nth}"
        shutil.copytree(tmp_path / "log", copy)
        try:
            in_child(lambda nth=nth, copy=copy: _under(KillingPort(nth, CALLS), copy, undo))  # type: ignore[misc]
        except Died as died:
            assert died.signal == signal.SIGKILL
            is_whole_and_can_be_finished(copy, whole, before, undo)
            shutil.rmtree(copy)
        else:
            break
    assert 60 < nth < 999


def _under(port: Port, path: Path, undo: bool) -> None:
    with system.replaced(port):
        convert(path, undo)


@pytest.mark.parametrize(("number", "every"), [(errno.EIO, False), (errno.ENOSPC, True)])
@pytest.mark.parametrize("undo", [False, True])
def test_each_call_fails(tmp_path: Path, undo: bool, number: int, every: bool) -> None:
    with small(tmp_path / "log") as log:
        whole, before = list(log), files(log)
        if undo:
            log.archive()
    failed, opened = set(), len(os.listdir("/proc/self/fd"))
    for nth in some(range(1, 1000), 2, every):
        copy = tmp_path / f"{nth}"
        shutil.copytree(tmp_path / "log", copy)
        port = FailingPort(nth, number, CALLS, every)
        try:
            _under(port, copy, undo)
        except (OSError, kvspool.KvspoolError):
            pass
        if len(os.listdir("/proc/self/fd")) != opened:
            gc.collect()  # handles whose close failed
        assert len(os.listdir("/proc/self/fd")) == opened
        if not port.failed:
            break
        failed.add(port.failed)
        with kvspool.open(copy) as log:
            assert list(log) == whole
        if not every:
            leftovers = [path.name for path in (copy / "kvj").iterdir() if path.name.endswith(".tmp")]
            assert leftovers == [] or port.failed == "remove"
        is_whole_and_can_be_finished(copy, whole, before, undo)
        shutil.rmtree(copy)
    assert 60 < nth < 999
    assert failed > {"open", "read", "write", "flush", "rename", "remove", "set_mode", "set_times", "close", "names"}


def test_the_old_form_goes_when_the_new_one_is_on_disk(log: Journal) -> None:
    """The rename comes when the file was flushed, the removal when the directory was: no crash of the machine can take both."""
    for convert in (log.archive, log.unarchive):
        with system.replaced(RecordingPort()) as port:
            convert(log._segments.bases()[1])
        assert isinstance(port, RecordingPort)
        calls = [call for call in port.calls if call in ("write", "flush", "rename", "remove")]
        at = calls.index("rename")
        assert calls[at - 2 : at + 4] == ["write", "flush", "rename", "flush", "remove", "flush"]


def test_both_forms_are_there(log: Journal) -> None:
    whole, before = list(log), files(log)
    archive = log._segments.archive_path(0)
    archive.write_bytes(b"begun, and nothing that could be read")
    with reopened(log) as other:
        assert other._segments.bases() == log._segments.bases() and other._segments.path_of(0) == log._segments.plain_path(0)
        assert list(other) == whole, "the uncompressed one counts"
        assert other.stats().used == sum(map(len, before.values()))
    log.archive()
    assert not log._segments.plain_path(0).exists() and list(log) == whole
    for left in (archive.read_bytes(), b"begun, and nothing that could be read"):
        log._segments.plain_path(0).write_bytes(before[min(before)])
        archive.write_bytes(left)
        log.unarchive()
        assert files(log) == before


def test_what_was_trimmed_meanwhile_does_not_come_back(log: Journal) -> None:
    for convert, path_of in ((log.archive, log._segments.plain_path), (log.unarchive, log._segments.archive_path)):
        first, second = log._segments.bases()[:2]
        old = path_of(first)

        def trim(*_: int, path: Path = old, base: int = first) -> None:
            if path.exists():
                log._segments.remove(base)

        report = convert(second, progress=trim)
        assert report.segments == []
        assert log._segments.bases()[0] == second
        assert not [path for path in (log.path / "kvj").iterdir() if path.name.startswith(f"{first:016x}")]
        log.archive()


def test_what_was_changed_meanwhile_is_left_alone(log: Journal) -> None:
    path = log._segments.plain_path(0)

    def repair(*_: int) -> None:
        path.write_bytes(path.read_bytes()[:500])

    assert log.archive(log._segments.bases()[1], progress=repair).segments == []
    assert path.stat().st_size == 500 and archives(log) == []


def test_a_disk_that_does_not_keep_what_was_written_is_noticed(log: Journal) -> None:
    before = files(log)

    class Port_(Port):
        def write(self, fd: int, data: bytes | bytearray, at: int) -> None:
            super().write(fd, bytes(data[:-6]) + bytes(6) if 0 < at < 1000 and len(data) > 100 else data, at)

    with system.replaced(Port_()), pytest.raises(Corruption):
        log.archive()
    assert files(log) == before


def test_one_archives_at_a_time(log: Journal) -> None:
    control = Control(log.format.lock_file(log.path), None)
    assert system.port.try_lock(control.fd, ADMIN)
    with pytest.raises(LockTimeout, match="another process archives"):
        log.archive(timeout=0.01)
    control.close()
    assert log.archive().segments


def test_a_segment_goes_with_all_that_belongs_to_it(log: Journal) -> None:
    first = log._segments.bases()[0]
    log.archive()
    index = log._segments.index_path(first)
    index.parent.mkdir(exist_ok=True)
    index.write_bytes(b"")
    log._segments.plain_path(first).write_bytes(b"")
    log._segments.remove(first)
    log._segments.remove_index(first)
    assert [path for path in log.path.rglob("*") if f"{first:016x}" in path.name] == []
    log._segments.remove(first)
    log._segments.remove_index(first)


# An archive that is the last segment: the segments after it were removed, or do not exist yet.


def test_an_append_continues_after_an_archive(log: Journal) -> None:
    log.archive()
    bases = log._segments.bases()
    log._segments.plain_path(bases[-1]).unlink()
    log.format.lock_file(log.path).unlink()
    archived = files(log)
    with reopened(log) as other:
        assert other.end() == bases[-1]
        assert other.append(b"new") == bases[-1]
        assert [record.sequence for record in other] == list(range(bases[-1] + 1))
    assert archived.items() < files(log).items()


def test_no_sequence_is_guessed_after_a_damaged_archive(log: Journal) -> None:
    log.archive()
    bases = log._segments.bases()
    log._segments.plain_path(bases[-1]).unlink()
    path = log._segments.archive_path(bases[-2])
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    before = files(log)
    with reopened(log) as other, pytest.raises(Corruption, match="next sequence"):
        other.append(b"new")
    assert files(log) == before


# Damaged files.


def limited(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process that can't take much more memory."""

    def run() -> Any:
        bound_addresses(MORE_MEMORY)
        return function()

    return in_child(run, seconds=90)


def found_in(path: Path) -> list[Any] | None:
    """The sequences that are read, and the Gaps; None for Corruption that names the file."""
    with kvspool.open(path) as log:
        try:
            return list(log.read(on_gap="yield"))
        except Corruption as error:
            assert ".kvj.zst" in str(error)
            return None


def is_right(found: list[Any] | None, whole: list[Record]) -> bool:
    """Return whether each record was returned unchanged, or is in a Gap with the reason "damaged", once."""
    if found is None:
        return True
    rest = iter(whole)
    for one in found:
        if isinstance(one, Gap):
            if one.reason != "damaged" or [next(rest).sequence for _ in range(one.count)] != list(range(one.first, one.last + 1)):
                return False
        elif one != next(rest):
            return False
    return next(rest, None) is None


def hostile(log: Journal, variants: Iterator[bytes]) -> tuple[int, int, int]:
    """Put each variant in the place of the second segment's archive; returns how many gave all, a Gap, and Corruption."""
    whole = list(log)
    log.archive()
    path = archives(log)[1]

    def run() -> tuple[int, int, int]:
        counts = [0, 0, 0]
        for number, data in enumerate(variants):
            path.write_bytes(data)
            found = found_in(log.path)
            assert is_right(found, whole), number
            counts[2 if found is None else any(isinstance(one, Gap) for one in found)] += 1
        return counts[0], counts[1], counts[2]

    return limited(run)  # type: ignore[no-any-return]


def test_every_flipped_bit(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=1500) as log:
        log.append_many([b"value %d" % number for number in range(120)], timestamp=1)
        variants = (_flipped(data, bit) for data in [_second(log)] for bit in some(range(8 * len(data)), 7))
        all_, gaps, corruptions = hostile(log, variants)
        assert all_ > 0 and gaps > 4 * corruptions > 0


def _second(log: Journal) -> bytes:
    log.archive()
    return archives(log)[1].read_bytes()


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_every_truncation(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=1500) as log:
        log.append_many([b"value %d" % number for number in range(120)], timestamp=1)
        data = _second(log)
        assert hostile(log, (data[:size] for size in range(len(data)))) == (0, 0, len(data))
    with kvspool.create(tmp_path / "other", format="kvj", segment_bytes=1500) as log:
        log.append_many([b"value %d" % number for number in range(120)], timestamp=1)
        data = _second(log)
        assert hostile(log, (data[size:] for size in range(1, len(data) + 1))) == (0, 0, len(data))


def test_a_damaged_block_costs_its_records_and_says_which_it_is(log: Journal) -> None:
    whole, sizes = list(log), {path.stem: path.stat().st_size for path in (log.path / "kvj").iterdir()}
    log.archive()
    for path in archives(log):
        data = path.read_bytes()
        base = int(path.stem.removesuffix(".kvj"), 16)
        segment = Archived(path, base)
        number = len(segment.table) // 2
        place = sum(one.stored for one in segment.table[:number])
        path.write_bytes(_flipped(data, 8 * (place + 14)))
        found = found_in(log.path)
        assert found is not None and is_right(found, whole)
        gap = [one for one in found if isinstance(one, Gap)]
        assert len(gap) == 1 and len(found) > len(whole) - gap[0].count - 1 and gap[0].count < sizes[path.name[:-8]] // 30
        with reopened(log) as other:
            for record in found:
                if isinstance(record, Record):
                    assert next(iter(other.read(record.sequence))) == record
        with pytest.raises(Corruption, match=rf"{path.name}: block {number} of \d+, at byte {place}, with bytes {700 * number} to "):
            log.unarchive()
        path.write_bytes(data)
        segment.close()
        log.archive()


def bombs() -> list[bytes]:
    """Files that say, or are, much more than they seem."""
    million = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 20))
    billion = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 30))
    untold = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(bytes(1 << 30))
    wide = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_checksum=True, write_content_size=False)
    ).compress(bytes(1 << 20))

    def entry(frame: bytes, size: int) -> seekable.BlockEntry:
        return seekable.BlockEntry(len(frame), size, int.from_bytes(frame[-4:], "little"))

    made = []
    for frame in (billion, untold, wide):
        made += [frame + seekable.packed([entry(frame, size)]) for size in (1 << 30, seekable.LARGEST_BLOCK, 1 << 20, 100)]
    footer = struct.pack("<IBI", 0xFFFFFFFF, 0x80, seekable.SEEKABLE)
    made += [footer, bytes(1000) + footer, million + seekable.packed([entry(million, 0xFFFFFFFF)])]
    made += [seekable.packed([seekable.BlockEntry(0, 1 << 20, 0)] * 80000), seekable.packed([seekable.BlockEntry(0xFFFFFFFF, 1, 0)])]
    made += [million * 80 + seekable.packed([entry(million, 1 << 20)] * 80), seekable.packed([])]
    return made


def test_bombs(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=1500) as log:
        log.append_many([b"value %d" % number for number in range(120)], timestamp=1)
        all_, gaps, corruptions = hostile(log, iter(bombs()))
        assert all_ == 0 and gaps + corruptions == len(bombs()) and corruptions >= 8


# Without the extra.


def test_without_the_package(log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    bases, whole, before = log._segments.bases(), list(log), files(log)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "zstandard", None)
        with pytest.raises(MissingExtra, match="The extra archive has it: pip install"):
            log.archive()
        assert files(log) == before
    log.archive(bases[1])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "zstandard", None)
        with reopened(log) as other:
            assert list(other.read(bases[1])) == whole[bases[1] :], "what isn't archived needs no package"
            assert other.append(b"new") == len(whole)
            with pytest.raises(MissingExtra, match="The extra archive has it: pip install"):
                list(other)
            with pytest.raises(MissingExtra):
                other.unarchive()
    assert len(list(log)) == len(whole) + 1


# The command.


def test_the_command(log: Journal, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before, bases = files(log), log._segments.bases()
    path = str(log.path)
    assert cli.main(["archive", path, "--dry-run"]) == 0
    assert capfd.readouterr().out.startswith(f"would archive {len(bases) - 1} segments of {path}, ")
    assert files(log) == before
    assert cli.main(["archive", path, "--before", str(bases[2]), "--level", "9", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert [one["base"] for one in said["segments"]] == bases[:2]
    assert said["bytes_before"] == sum(one["before"] for one in said["segments"])
    assert said["bytes_after"] == sum(path.stat().st_size for path in archives(log))
    assert cli.main(["archive", path]) == 0
    assert capfd.readouterr().out.startswith(f"archived {len(bases) - 3} segments of {path}: ")
    assert cli.main(["archive", path, "--undo"]) == 0
    assert capfd.readouterr().out.startswith(f"unarchived {len(bases) - 1} segments of ")
    assert files(log) == before
    kvspool.create(tmp_path / "spool", capacity=4096).close()
    kvspool.create(tmp_path / "sej", format="sej").close()
    for name in ("spool", "sej"):
        assert cli.main(["archive", str(tmp_path / name)]) == 2


def test_other_formats_look_for_one_form_only(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=1) as log:
        log.append_many([b"a", b"b"])
        path = log._segments.plain_path(0)
        path.rename(path.with_name(path.name + ".zst"))
        assert Segments(log.path, log.format).bases() == [1, 2]
        assert not log._segments.exists(0) and log._segments.get(0) is None


def test_the_lag_of_a_reader_counts_the_bytes_that_archives_were_made_from(log: Journal) -> None:
    with log.reader("r") as reader:
        reader.seek(100)
        reader.commit()
        before, others = reader.lag(), log.readers()[0].lag
        assert before.bytes > 1000
        count = len(log)
        log.archive()
        assert reader.lag().bytes == before.bytes
        assert others is not None
        assert log.readers()[0].lag.bytes == others.bytes  # type: ignore[union-attr]
        assert len(log) == count == 300
        archive = log._segments.path_of(log.bases()[-2])
        archive.write_bytes(archive.read_bytes()[:-1])
        assert 0 < reader.lag().bytes < before.bytes
