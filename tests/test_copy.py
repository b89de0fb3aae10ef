"""Copies between every two formats: kept fields, reported losses, and where a killed copy continues."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import children
import pytest
from commands import Run
from faults import FailingPort, KillingPort
from schedules import ALL
from test_exchange import frame, old_spool, spool_file

import kvspool
from kvspool import Codec, CopyPlan, CopyReport, Gap, GapError, Record, system
from kvspool.engine.rows import columns_of
from kvspool.errors import (
    Corruption,
    LockTimeout,
    LogNotFound,
    NotKept,
    OtherRecords,
    OutOfRange,
    SpoolFull,
    TooLarge,
)
from kvspool.journal import JournalBatch
from kvspool.journal.formats import FORMATS
from kvspool.kernel import sej
from kvspool.record import NO_TIME
from kvspool.transfer import note, queues, sources, targets

TARGETS = ["spool", *FORMATS, *(["queue"] if find_spec("kvspool.queue") else [])]
SOURCES = [*TARGETS, "v1"]
FULL = ("spool", "kvj")  # keep everything
OPTIONS: dict[str, dict[str, Any]] = {"spool": {"capacity": "64KiB"}, "fixed": {"item_bytes": 8, "items_per_blob": 5}}
COUNT = 23
TIME = 1_500_000_000_000_000_000

Item = tuple[int, int, int, bytes | None, bytes, int]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of at most 4 records."""
    monkeypatch.setattr(sources, "ROWS", 4)


def items(first: int = 0, count: int = COUNT) -> list[Item]:
    """Records with everything that a record can have, in values of 8 bytes."""
    found: list[Item] = []
    for at in range(first, first + count):
        key = (None, b"k%d" % at, b"\0\xff")[at % 3]
        found.append((at, TIME + at, at % 5, key, b"%08d" % (at + 10**7), (Codec.RAW, Codec.TEXT, Codec.JSON)[at % 3]))
    return found


def opened(path: Path, format: str) -> Any:
    return queues.open(path) if format == "queue" else kvspool.open(path)


def fill(log: Any, records: list[Item]) -> None:
    """Append records, as far as the log has room for what they have."""
    values = [value for *_, value, _ in records]
    if isinstance(log, kvspool.Spool):
        log.append_rows(columns_of([Record(*fields) for fields in records]))
    elif hasattr(log, "put_many"):
        log.put_many(values)
    else:
        form = log.format
        log.append_batch(
            JournalBatch(
                values,
                [key for _, _, _, key, _, _ in records] if form.has_keys else None,
                types=[type for _, _, type, _, _, _ in records] if form.has_types else None,
                timestamps=[time for _, time, *_ in records] if form.has_timestamps else None,
                codecs=bytes(codec for *_, codec in records) if form.has_codecs else None,
            )
        )


def make(path: Path, format: str, count: int = COUNT, first: int = 0) -> Path:
    """Make a log with records from a sequence on."""
    if format == "v1":
        return old_spool(path, {"kv.1-0.sp": spool_file([frame({"n": str(at)}) for at in range(count)])})
    if format == "queue":
        log = queues.create(path)
    else:
        begin = {"first_sequence": first} if first else {}
        log = kvspool.create(path, format=format, **OPTIONS.get(format, {}), **begin)  # type: ignore[call-overload]
    with log:
        if count:
            fill(log, items(first, count))
        if format == "queue" and not count:
            log._is_used = False
    return path


def content(path: Path, format: str) -> list[Item | Gap]:
    """Return what a log holds."""
    with opened(path, format) as log:
        if format == "queue":
            return [(at, 0, 0, None, value, 0) for at, value in enumerate(log)]
        found = list(log.read(on_gap="yield"))
        return [one if isinstance(one, Gap) else (one.sequence, one.timestamp, one.type, one.key, one.value, one.codec) for one in found]


def expected(source: str, target: str) -> list[Item]:
    """Return what a copy holds, but for times that the target had to make up, which are -1."""
    room = {"v1": (), "queue": ()}.get(source)
    found: list[Item] = []
    form, end = FORMATS.get(source), FORMATS.get(target)
    for sequence, time_, type, key, value, codec in items():
        if form is not None or room is not None:
            key = key if form is not None and form.has_keys else None
            type = type if form is not None and form.has_types else 0
            time_ = time_ if form is not None and form.has_timestamps else (-1 if target == "spool" else NO_TIME)
            codec = codec if form is not None and form.has_codecs else 0
        if source == "v1":
            value, codec = b"\x81\xa1n" + (b"\xa1%d" if sequence < 10 else b"\xa2%d") % sequence, Codec.MSGPACK
        if end is not None or target == "queue":
            key = key if end is not None and end.has_keys else None
            type = type if end is not None and end.has_types else 0
            time_ = time_ if end is not None and end.has_timestamps else 0
            codec = codec if end is not None and end.has_codecs else 0
        found.append((sequence, time_, type, key, value, codec))
    return found


def without_made_up(found: list[Item | Gap], source: str, target: str) -> list[Item | Gap]:
    """Return records, those times as -1 that a spool gives to what has none."""
    has_times = source == "spool" or (source in FORMATS and FORMATS[source].has_timestamps)
    if has_times or target != "spool":
        return found
    assert all(time.time_ns() - 600e9 < one[1] < time.time_ns() for one in found if not isinstance(one, Gap))
    return [one if isinstance(one, Gap) else (one[0], -1, *one[2:]) for one in found]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.usefixtures("small_batches")
def test_from_every_format_into_every_other_one(tmp_path: Path, source: str, target: str) -> None:
    if source == "v1" and target == "fixed":
        pytest.skip("those values have not all the same length")
    make(tmp_path / "source", source)
    report = copied(tmp_path, target, lossy=True)
    assert (report.source_format, report.format, report.records, report.gaps) == (source, target, COUNT, [])
    assert (report.first_sequence, report.last_sequence) == (0, COUNT - 1)
    ends = (None, None) if target == "queue" else (0, COUNT - 1)
    assert (report.target_first_sequence, report.target_last_sequence) == ends
    assert without_made_up(content(tmp_path / "target", target), source, target) == expected(source, target)
    again = copied(tmp_path, target, lossy=True)
    assert (again.records, again.is_continued) == (0, True)
    assert without_made_up(content(tmp_path / "target", target), source, target) == expected(source, target)
    if source != "v1":
        assert len(content(tmp_path / "source", source)) == COUNT


def copied(folder: Path, format: str | None = None, **options: Any) -> CopyReport:
    made = OPTIONS.get(format or "", {})
    return kvspool.copy(folder / "source", folder / "target", format=format, **made, **options)


LOSSES = {"spool": {}, "kvj": {}, "sej": {"codecs": 1}}
EVERYTHING = {"keys": 1, "types": 1, "timestamps": 0, "codecs": 1}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", FULL)
def test_what_a_target_cant_keep_is_refused_before_it_gets_anything(tmp_path: Path, source: str, target: str) -> None:
    make(tmp_path / "source", source)
    loses = LOSSES.get(target, EVERYTHING)
    if loses:
        with pytest.raises(NotKept) as caught:
            copied(tmp_path, target)
        assert all(f"{kind} (sequence {sequence})" in str(caught.value) for kind, sequence in loses.items())
        assert content(tmp_path / "target", target) == []
    plans: list[CopyPlan] = []
    report = copied(tmp_path, target, lossy=True, before=plans.append)
    assert set(plans[0].may_lose) >= set(loses)
    assert set(report.not_kept) - {"sequences"} == set(loses)
    assert plans[0].keeps_sequences == (target != "queue") == ("sequences" not in report.not_kept)


def test_records_that_have_nothing_to_lose_need_no_permission(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "source", format="kvj") as log:
        log.append_many([b"%08d" % at for at in range(9)], timestamp=NO_TIME)
    for target in TARGETS[1:]:
        report = kvspool.copy(tmp_path / "source", tmp_path / target, format=target, **OPTIONS.get(target, {}))
        assert report.not_kept == (["sequences"] if target == "queue" else [])


def test_an_empty_key_is_none_in_a_sej_journal(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "source", format="kvj") as log:
        log.append_many([b"a", b"b"], keys=[None, b""])
    with pytest.raises(NotKept, match=r"empty keys \(sequence 1\)"):
        copied(tmp_path, "sej")
    assert copied(tmp_path, "sej", lossy=True).not_kept == ["empty keys"]
    assert copied(tmp_path, "sej").records == 0


def going_back(path: Path) -> None:
    """Make a journal whose timestamps decrease, as another program may write it."""
    kvspool.create(path, format="sej").close()
    with open(path / "jnl" / "0000000000000000.jnl", "wb") as file:
        for at, (value, time) in enumerate(zip(b"abcd", [5, 4, NO_TIME, 9], strict=True)):
            file.write(sej.encode([bytes([value])], None, None, None, 0, time, 0, at, 1, NO_TIME)[0])


def test_times_that_decrease_are_raised_in_a_journal(tmp_path: Path) -> None:
    going_back(tmp_path / "source")
    with pytest.raises(NotKept, match=r"timestamps \(sequence 1\)"):
        copied(tmp_path, "kvj")
    for _ in range(2):
        copied(tmp_path, "kvj", lossy=True)
    with kvspool.open(tmp_path / "target", format="kvj") as log:
        assert [record.timestamp for record in log] == [5, 5, NO_TIME, 9]


def test_times_that_decrease_are_raised_in_a_spool(tmp_path: Path) -> None:
    going_back(tmp_path / "source")
    with pytest.raises(NotKept, match=r"timestamps \(sequence 1\)"):
        copied(tmp_path, "spool")
    assert copied(tmp_path, "spool", lossy=True).not_kept == ["timestamps"]
    with kvspool.open(tmp_path / "target", format="spool") as spool:
        times = [record.timestamp for record in spool]
    assert times[:2] == [5, 5] and times == sorted(times)


@pytest.mark.parametrize("codec", ["json", "msgpack", "keyed"])
def test_a_spool_comes_back_as_it_was(tmp_path: Path, codec: str) -> None:
    with kvspool.create(tmp_path / "source", codec=codec, capacity="1MiB") as log:
        log.append_many([{"a": at, "b": {"c": [at]}} for at in range(100)], keys=[b"%d" % at for at in range(100)], type=3)
        log.append_many([b"raw", "text", b""], keys=[None, b"", b"x"])
        before = list(log)
        assert kvspool.copy(log.path, tmp_path / "kvj", format="kvj").not_kept == []
        assert kvspool.copy(tmp_path / "kvj", tmp_path / "back", format="spool", codec=codec).not_kept == []
        assert kvspool.copy(log.path, tmp_path / "alike").not_kept == []
        with kvspool.open(tmp_path / "kvj", format="kvj") as journal:
            assert [record.data for record in journal] == [record.data for record in before]
        for name in ("back", "alike"):
            with kvspool.open(tmp_path / name, format="spool") as back:
                if codec == "keyed" and name == "back":
                    assert [record.data for record in back] == [record.data for record in before]
                    assert {record.codec for record in back} == {Codec.MSGPACK, Codec.RAW, Codec.TEXT}
                    continue
                assert [_bare(record) for record in back] == [_bare(record) for record in before]


def _bare(record: Record) -> tuple[Any, ...]:
    """A record, its value decoded where its bytes depend on the log's key table."""
    value = record.data if record.codec == Codec.KEYED else record.value
    return (record.sequence, record.timestamp, record.type, record.key, value, record.codec)


# Sequences.


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [name for name in FORMATS if name != "fixed"])
def test_a_journal_begins_where_its_source_does(tmp_path: Path, source: str, target: str) -> None:
    first = 1_000_000
    make(tmp_path / "source", source, first=first)
    report = copied(tmp_path, target, lossy=True)
    keeps = target in FORMATS
    assert ("sequences" in report.not_kept) == (not keeps)
    assert report.target_first_sequence == (None if target == "queue" else first if keeps else 0)
    found = [item for item in content(tmp_path / "target", target) if not isinstance(item, Gap)]
    assert [item[0] for item in found] == list(range(first if keeps else 0, (first if keeps else 0) + COUNT))
    assert [item[4] for item in found] == [item[4] for item in items(first)]
    with opened(tmp_path / "source", source) as log:
        fill(log, items(first + COUNT, 3))
    more = copied(tmp_path, target, lossy=True)
    assert (more.records, more.first_sequence, more.is_continued) == (3, first + COUNT, True)
    assert [item[4] for item in content(tmp_path / "target", target) if not isinstance(item, Gap)] == [
        item[4] for item in items(first, COUNT + 3)
    ]


def with_gaps(path: Path) -> Path:
    with kvspool.create(path, format="kvj") as log:
        for first in (3, 8, 20):
            log.append_batch(JournalBatch([b"%08d" % at for at in range(first, first + 3)], timestamp=NO_TIME), at=first)
    return path


@pytest.mark.usefixtures("small_batches")
def test_gaps_are_left_out_sequences_in_kvj(tmp_path: Path) -> None:
    with_gaps(tmp_path / "source")
    before = content(tmp_path / "source", "kvj")
    for _ in range(2):
        report = copied(tmp_path, "kvj", start=3)
        after = content(tmp_path / "target", "kvj")
        assert [strip(item) for item in after] == [strip(item) for item in before if not (isinstance(item, Gap) and item.first == 0)]
    assert report.records == 0


def strip(item: Item | Gap) -> Any:
    return (item.first, item.last) if isinstance(item, Gap) else item


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "kvj"])
def test_elsewhere_gaps_are_refused_or_reported(tmp_path: Path, target: str) -> None:
    with_gaps(tmp_path / "source")
    with pytest.raises(GapError, match="6 to 7"):
        copied(tmp_path, target, start=3, lossy=True)
    assert len(content(tmp_path / "target", target)) == 3
    report = copied(tmp_path, target, start=3, lossy=True, on_gap="skip")
    assert [(gap.first, gap.last) for gap in report.gaps] == [(6, 7), (11, 19)]
    assert (report.records, report.is_continued) == (6, True)
    assert "sequences" in report.not_kept
    again = copied(tmp_path, target, start=3, lossy=True, on_gap="skip")
    assert (again.records, again.gaps) == (0, [])
    values = [item[4] for item in content(tmp_path / "target", target) if not isinstance(item, Gap)]
    assert values == [b"%08d" % at for at in (3, 4, 5, 8, 9, 10, 20, 21, 22)]
    with kvspool.open(tmp_path / "source", format="kvj") as log:
        log.append_many([b"%08d" % at for at in (23, 24)], timestamp=NO_TIME)
    assert copied(tmp_path, target, start=3, lossy=True).records == 2


def test_what_a_spool_has_overwritten_between_two_runs_is_a_gap(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "source", capacity=4096) as log:
        log.append_many([b"x" * 100] * 5)
        copied(tmp_path, "kvj")
        log.append_many([b"y" * 100] * 100)
        first = log.stats().first_sequence
        with pytest.raises(OtherRecords):
            copied(tmp_path, "kvj")
        report = copied(tmp_path, "kvj", on_gap="skip")
    assert [(gap.first, gap.last, gap.reason) for gap in report.gaps] == [(5, first - 1, "overrun")]
    assert (report.first_sequence, report.last_sequence, report.not_kept) == (first, 104, [])
    found = content(tmp_path / "target", "kvj")
    assert [strip(item) if isinstance(item, Gap) else item[0] for item in found] == [*range(5), (5, first - 1), *range(first, 105)]


def test_start_end_and_limit_say_what_is_copied_in_all_runs(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj")
    for target, options, numbers in (
        ("sej", {"start": 5}, range(5, COUNT)),
        ("kvj", {"end": 7}, range(7)),
        ("kvj", {"start": 4, "end": 900}, range(4, COUNT)),
        ("spool", {"start": 4, "limit": 6}, range(4, 10)),
        ("kvj", {"limit": 6}, range(6)),
        ("kvj", {"limit": 0}, range(0)),
        ("kvj", {"start": "latest"}, range(0)),
    ):
        path = tmp_path / f"{target}{len(list(tmp_path.iterdir()))}"
        for run in range(2):
            report = kvspool.copy(tmp_path / "source", path, format=target, lossy=True, **options)
            assert report.records == (0 if run else len(numbers))
        assert [item[4] for item in content(path, target) if not isinstance(item, Gap)] == [
            item[4] for item in items() if item[0] in numbers
        ]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES[:-1])
def test_an_empty_source_gives_an_empty_target(tmp_path: Path, source: str, target: str) -> None:
    make(tmp_path / "source", source, count=0)
    report = copied(tmp_path, target)
    assert (report.records, report.first_sequence, report.target_last_sequence) == (0, None, None)
    assert content(tmp_path / "target", target) == []


# Refused copies.


def test_a_log_isnt_copied_into_itself(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "kvj")
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link", source / "copy", source / "kvj"):
        with pytest.raises(ValueError, match="into itself"):
            kvspool.copy(source, target)
    assert content(source, "kvj") == items()


def test_wrong_arguments_make_nothing(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj")
    before = sorted(tmp_path.iterdir())
    for options in ({"format": "tar"}, {"end": -1}, {"limit": -1}, {"on_gap": "ignore"}):
        with pytest.raises(ValueError, match=r"format|end|limit|on_gap"):
            copied(tmp_path, **options)
    with pytest.raises(LogNotFound):
        kvspool.copy(tmp_path / "nothing", tmp_path / "target")
    with pytest.raises(FileNotFoundError, match="create it first"):
        kvspool.copy(tmp_path / "source", tmp_path / "nothing/target")
    with pytest.raises(ValueError, match="segment"):
        copied(tmp_path, "sej", segment_bytes=0)
    assert sorted(path for path in tmp_path.iterdir() if path.name != ".target.copy") == before
    assert copied(tmp_path).records == COUNT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    with pytest.raises(ValueError, match="has the format kvj, not sej"):
        copied(tmp_path, "sej")


def test_other_records_are_left_alone_unless_the_copy_comes_after_them(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj")
    with kvspool.create(tmp_path / "target", format="kvj") as log:
        log.append_many([b"other"] * 7)
    with pytest.raises(OtherRecords, match="--append"):
        copied(tmp_path)
    with pytest.raises(NotKept, match="timestamps"):  # the other records are later
        copied(tmp_path, append=True)
    for run in range(2):
        report = copied(tmp_path, append=True, lossy=True)
        assert report.records == (0 if run else COUNT)
        assert set(report.not_kept) == ({"sequences"} if run else {"timestamps", "sequences"})
    found = content(tmp_path / "target", "kvj")
    assert [item[4] for item in found if not isinstance(item, Gap)] == [b"other"] * 7 + [item[4] for item in items()]
    with kvspool.open(tmp_path / "target", format="kvj") as log:
        log.append(b"in between")
    with pytest.raises(OtherRecords, match="has new records"):
        copied(tmp_path, append=True, lossy=True)


def test_another_process_that_appends_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS", 4)
    for target in ("kvj", "sej", "spool"):
        folder = tmp_path / target
        folder.mkdir()
        make(folder / "source", "kvj")

        def disturb(progress: Any, folder: Path = folder) -> None:
            with kvspool.open(folder / "target") as log:
                log.append(b"x")

        with pytest.raises(OtherRecords, match="another program appends"):
            copied(folder, target, lossy=True, progress=disturb)


def test_one_copy_at_a_time_fills_a_target(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj")

    def meanwhile(plan: CopyPlan) -> None:
        with pytest.raises(LockTimeout, match="another copy"):
            copied(tmp_path)

    assert copied(tmp_path, before=meanwhile).records == COUNT


def test_a_record_without_room_is_named_and_its_batch_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS", 4)
    with kvspool.create(tmp_path / "source", format="kvj") as log:
        log.append_many([b"8 bytes."] * 6, timestamp=NO_TIME)
        log.append(b"9 bytes..", key=bytes(200), timestamp=NO_TIME)
        log.append(bytes(70_000), timestamp=NO_TIME)
    for target, sequence in (("sej", 6), ("fixed", 6), ("queue", 7), ("spool", 7)):
        if target not in TARGETS:
            continue
        with pytest.raises(TooLarge, match=f"record {sequence} does not fit"):
            kvspool.copy(tmp_path / "source", tmp_path / target, format=target, lossy=target != "spool", **OPTIONS.get(target, {}))
        assert len(content(tmp_path / target, target)) == 4


def test_a_spool_that_is_full_of_the_copy_takes_no_more_unless_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS", 20)
    with kvspool.create(tmp_path / "source", format="kvj") as log:
        log.append_many([b"%0100d" % at for at in range(1000)])
    for _ in range(2):
        with pytest.raises(SpoolFull, match="would overwrite"):
            kvspool.copy(tmp_path / "source", tmp_path / "target", format="spool", capacity="64KiB")
    found = content(tmp_path / "target", "spool")
    assert 400 < len(found) < 500 and [item[0] for item in found if not isinstance(item, Gap)] == list(range(len(found)))
    kvspool.resize(tmp_path / "target", "1MiB")
    assert copied(tmp_path).records == 1000 - len(found)
    assert len(content(tmp_path / "target", "spool")) == 1000
    report = kvspool.copy(tmp_path / "source", tmp_path / "ring", format="spool", capacity="64KiB", lossy=True)
    assert (report.records, report.target_last_sequence) == (1000, 999)


def test_a_spool_gets_room_for_all(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "source", format="sej") as log:
        for _ in range(10):
            log.append_many([b""] * 100_000)
    assert kvspool.copy(tmp_path / "source", tmp_path / "target", format="spool").records == 1_000_000
    with kvspool.open(tmp_path / "target", format="spool") as spool:
        assert spool.stats().records == 1_000_000


def test_damage_ends_the_copy_with_what_was_sound_before(tmp_path: Path) -> None:
    make(tmp_path / "source", "sej")
    path = tmp_path / "source/jnl/0000000000000000.jnl"
    data = bytearray(path.read_bytes())
    data[-30:] = b"\xff" * 30
    path.write_bytes(data)
    with pytest.raises(Corruption):
        copied(tmp_path, "kvj")


def test_a_damaged_note_is_no_place_to_continue_from(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj", first=5)
    copied(tmp_path, "spool")
    path = tmp_path / ".target.copy/note"
    sound = json.loads(path.read_bytes())
    for wrong in ({"at": []}, {"at": [1, 2]}, {"at": [-1]}, {"sequence": -1}, {"at": ["1"]}, {"more": 1}, None):
        path.write_bytes(b"{" if wrong is None else json.dumps(sound | wrong).encode())
        with pytest.raises(Corruption, match=r"\.target\.copy"):
            copied(tmp_path, "spool")
    for wrong in ({"at": [1]}, {"at": [1 << 60]}, {"sequence": 1 << 60}, {"sequence": 6}):
        path.write_bytes(json.dumps(sound | wrong).encode())
        with pytest.raises((OtherRecords, OutOfRange)):
            copied(tmp_path, "spool")
    path.write_bytes(json.dumps(sound).encode())
    assert copied(tmp_path, "spool").records == 0


def test_a_journal_that_was_emptied_continues_where_it_was(tmp_path: Path) -> None:
    """Or one that was made for the later records alone."""
    make(tmp_path / "source", "kvj")
    with kvspool.create(tmp_path / "target", format="sej", first_sequence=10):
        pass
    report = copied(tmp_path, lossy=True)
    assert (report.records, report.first_sequence, report.target_first_sequence, report.not_kept) == (COUNT - 10, 10, 10, ["codecs"])


@pytest.mark.skipif("queue" not in TARGETS, reason="there is no queue")
@pytest.mark.usefixtures("small_batches")
def test_entries_that_were_taken_out_of_a_queue_are_not_copied_again(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj")
    copied(tmp_path, "queue", lossy=True, limit=9)
    with queues.open(tmp_path / "target") as queue:
        taken = queue.get_many(5)
        assert copied(tmp_path, "queue", lossy=True).records == COUNT - 9
        taken += queue.get_many(COUNT)
        assert taken == [item[4] for item in items()]
    for name in ("", ".1"):
        assert not (tmp_path / f"target{name}").exists()  # its last user has removed it
    with pytest.raises(OtherRecords, match="taken out"):
        copied(tmp_path, "queue", lossy=True)


@pytest.mark.skipif("queue" not in TARGETS, reason="there is no queue")
def test_a_queue_that_was_drained_or_filled_by_others_is_no_place_to_continue(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj")
    copied(tmp_path, "queue", lossy=True, limit=9)
    with queues.open(tmp_path / "target") as queue:
        queue.put(b"of another one")
        with pytest.raises(OtherRecords, match="has new records"):
            copied(tmp_path, "queue", lossy=True)
        queue.get_many(COUNT)
        queue.get_many(COUNT, block=False) if queue.qsize() else None
        with pytest.raises(OtherRecords):
            copied(tmp_path, "queue", lossy=True)


@pytest.mark.skipif("queue" not in TARGETS, reason="there is no queue")
def test_a_queue_whose_first_entries_were_taken_is_another_source(tmp_path: Path) -> None:
    make(tmp_path / "source", "queue")
    copied(tmp_path, "kvj", limit=9)
    with queues.open(tmp_path / "source") as queue:
        queue.get()
    with pytest.raises(OtherRecords):
        copied(tmp_path, "kvj")


# Killed at any moment.


CALLS = ("open", "write", "truncate", "flush", "flush_data", "rename", "remove", "make_directory", "remove_directory")


def killed(folder: Path, target: str, nth: int, *, is_behind: bool, first: int) -> bool:
    """Copy in a child that is killed at a call; return whether it came so far."""

    def run() -> None:
        system.port = KillingPort(nth, CALLS, when="after" if is_behind else "before")
        copied(folder, target, lossy=True, start=first)

    try:
        children.in_child(run)
    except children.Died as death:
        assert death.signal == signal.SIGKILL
        return True
    return False


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_a_copy_that_was_killed_at_any_call_continues(tmp_path: Path, target: str, first: int) -> None:
    """No record comes twice, and none is left out: not in the middle of making the target, of a batch, or of a note."""
    nth, tried = 1, 0
    step = 1 if ALL else 20
    rng = random.Random(first)
    while True:
        folder = tmp_path / str(nth)
        folder.mkdir()
        make(folder / "source", "kvj")
        if not killed(folder, target, nth, is_behind=nth % 2 == 0, first=first):
            break
        report = copied(folder, target, lossy=True, start=first)
        found = [item for item in content(folder / "target", target) if not isinstance(item, Gap)]
        assert [item[4] for item in found] == [item[4] for item in items()][first:], nth
        assert report.records <= COUNT - first
        assert copied(folder, target, lossy=True, start=first).records == 0
        tried += 1
        nth += step if step == 1 else rng.randint(1, step)
    assert tried > (20 if ALL else 3)


@pytest.mark.parametrize("target", TARGETS)
def test_a_copy_that_was_killed_at_any_moment_continues(tmp_path: Path, target: str) -> None:
    with kvspool.create(tmp_path / "source", format="sej") as log:
        for at in range(0, 200_000, 1000):
            log.append_many([b"%08d" % number for number in range(at, at + 1000)])
    made = {"spool": {"capacity": "64MiB"}}.get(
        target, {**OPTIONS.get(target, {}), **({"items_per_blob": 7000} if target == "fixed" else {})}
    )

    def run() -> CopyReport:
        return kvspool.copy(tmp_path / "source", tmp_path / "target", format=target, lossy=True, start=17, **made)

    rng = random.Random(target)
    deaths = 0
    for turn in range(200 if ALL else 7):
        wait = children.start(run)
        time.sleep(rng.uniform(0.0, 0.015 * (1 + turn * (1 if ALL else 2) % 20)))
        os.kill(wait.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        try:
            wait()
        except children.Died:
            deaths += 1
    run()
    with opened(tmp_path / "target", target) as log:
        values = list(log) if target == "queue" else [record.value for record in log]
    assert values == [b"%08d" % number for number in range(17, 200_000)]
    assert deaths > 0


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("target", ["kvj", "sej"])
def test_a_call_that_fails_leaves_a_copy_that_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    nth = 0
    while True:
        nth += 1 if ALL else 7
        folder = tmp_path / str(nth)
        folder.mkdir()
        make(folder / "source", "kvj")
        port = FailingPort(nth, errno.ENOSPC, only=("write", "rename", "make_directory"))
        monkeypatch.setattr(system, "port", port)
        try:
            copied(folder, target, lossy=True)
        except OSError as error:
            assert error.errno == errno.ENOSPC
        finally:
            monkeypatch.setattr(system, "port", system.Port())
        if not port.failed:
            break
        copied(folder, target, lossy=True)
        assert [item[4] for item in content(folder / "target", target) if not isinstance(item, Gap)] == [item[4] for item in items()]
    assert nth > 7


# The command.


def test_the_command_copies_and_says_what_it_did(tmp_path: Path, run: Run) -> None:
    make(tmp_path / "source", "kvj")
    arguments = ["copy", str(tmp_path / "source"), str(tmp_path / "target"), "--format", "sej", "--segment-bytes", "200"]
    assert "codecs (sequence 1)" in run(*arguments, code=2).err
    shown = run(*arguments, "--lossy")
    assert shown.out == f"copied {COUNT} records, {_size()}: sequences 0 to 22; not kept: codecs\n"
    assert "sej can't store codecs, empty keys of kvj" in shown.err
    assert run(*arguments, "--json").object["records"] == 0
    assert len(list((tmp_path / "target/jnl").iterdir())) > 3


def _size() -> str:
    return f"{sum(8 + len(item[3] or b'') for item in items())} B"


def test_the_command_names_gaps_and_ends_with_7_unless_told_otherwise(tmp_path: Path, run: Run) -> None:
    with_gaps(tmp_path / "source")
    arguments = ["copy", str(tmp_path / "source"), str(tmp_path / "target"), "--format", "sej", "--start", "3"]
    run(*arguments, code=7)
    shown = run(*arguments, "--gaps", "yield")
    assert "2 records lost (missing): sequences 6 to 7" in shown.err
    assert shown.out == "copied 6 records, 48 B: sequences 8 to 22, now 6 to 11; not kept: sequences\n"


def test_the_command_refuses_what_makes_no_sense(tmp_path: Path, run: Run) -> None:
    make(tmp_path / "source", "kvj")
    for arguments in (["--format", "fixed"], ["--format", "sej", "--item-bytes", "3"], ["--end", "-1"], ["--format", "v1"]):
        assert run("copy", tmp_path / "source", tmp_path / "target", *arguments, code=2).err
    run("copy", tmp_path / "source", tmp_path / "source", code=2)
    assert not (tmp_path / "target").exists()


def test_targets_and_notes_are_for_their_owner_alone(tmp_path: Path) -> None:
    make(tmp_path / "source", "kvj", first=5)
    copied(tmp_path, "spool")
    assert (tmp_path / ".target.copy").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / ".target.copy" / note.NOTE).stat().st_mode & 0o777 == 0o600
    assert targets.exists(tmp_path / "target")


def test_unknown_options_are_refused_also_for_a_target_that_is_there(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "source", capacity=4096).close()
    for _ in range(2):
        with pytest.raises(TypeError, match=r"copy\(\) got an unexpected keyword argument 'capcity'; did you mean 'capacity'"):
            kvspool.copy(tmp_path / "source", tmp_path / "target", capcity=4096)
        kvspool.copy(tmp_path / "source", tmp_path / "target", capacity=4096)
