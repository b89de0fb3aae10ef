"""Journals that don't begin at sequence 0, and batches that leave sequences out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvspool
from kvspool import Gap
from kvspool.errors import Corruption, OutOfRange
from kvspool.journal import Journal, JournalBatch, settings
from kvspool.journal.formats import FORMATS

LIMITS: dict[str, dict[str, int]] = {"fixed": {"item_bytes": 1, "items_per_blob": 4}}
FIRST = 4_000_000


def sequences(log: Journal, start: int | None = None) -> list[int | tuple[int, int]]:
    items = log.read("earliest" if start is None else start, on_gap="yield")
    return [(item.first, item.last) if isinstance(item, Gap) else item.sequence for item in items]


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_record_has_the_sequence_that_was_asked_for(tmp_path: Path, format: str) -> None:
    with kvspool.create(tmp_path / "log", format=format, first_sequence=FIRST, **LIMITS.get(format, {})) as log:  # type: ignore[call-overload]
        assert (log.end(), sequences(log)) == (FIRST, [])
        assert log.append_many([b"a", b"b"]) == range(FIRST, FIRST + 2)
    with kvspool.open(tmp_path / "log", format=format, **LIMITS.get(format, {})) as log:  # type: ignore[call-overload]
        assert log.append(b"c") == FIRST + 2
        assert sequences(log) == [FIRST, FIRST + 1, FIRST + 2]
        assert log.stats().first_sequence == FIRST


@pytest.mark.parametrize("format", FORMATS)
def test_it_holds_until_there_is_a_segment(tmp_path: Path, format: str) -> None:
    """As if the machine had stopped before the first segment was on disk: neither that nor the writers' page is there."""
    with kvspool.create(tmp_path / "log", format=format, first_sequence=FIRST, **LIMITS.get(format, {})) as log:  # type: ignore[call-overload]
        lock = log.format.lock_file(tmp_path / "log")
        segment = log.format.segments_in(tmp_path / "log") / log.format.name_of(FIRST)
    lock.write_bytes(b"")
    segment.unlink()
    with kvspool.open(tmp_path / "log") as log:
        assert isinstance(log, Journal)
        assert (log.first(), log.end(), sequences(log)) == (FIRST, FIRST, [])
        assert log.append(b"a") == FIRST
        assert sequences(log) == [FIRST]


@pytest.mark.parametrize("sequence", [-1, (1 << 64) - 1, 6])
def test_settings_that_let_it_begin_where_no_record_is_are_damaged(tmp_path: Path, sequence: int) -> None:
    with kvspool.create(tmp_path / "log", format="fixed", item_bytes=1, items_per_blob=4) as log:
        file = log.format.sidecar(tmp_path / "log") / settings.NAME
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "first_sequence": sequence}))
    with pytest.raises(Corruption, match=r"doesn't contain the settings of the journal.*sequence"):
        kvspool.open(tmp_path / "log")


@pytest.mark.parametrize("sequence", [-1, (1 << 64) - 1])
def test_a_sequence_that_no_record_has_is_refused(tmp_path: Path, sequence: int) -> None:
    with pytest.raises(ValueError, match="no segment"):
        kvspool.create(tmp_path / "log", format="kvj", first_sequence=sequence)
    assert not (tmp_path / "log").exists()
    with pytest.raises(ValueError, match="a spool has the sequence 0"):
        kvspool.create(tmp_path / "log", first_sequence=1)


def leave_out(path: Path) -> Journal:
    log = kvspool.create(path, format="kvj", segment_bytes=300)
    for first in (0, 10, 12, 100):
        log.append_batch(JournalBatch([b"value"] * 2), at=first)
    return log


LEFT_OUT = [0, 1, (2, 9), 10, 11, 12, 13, (14, 99), 100, 101]


def test_sequences_are_left_out_and_read_as_missing(tmp_path: Path) -> None:
    with leave_out(tmp_path / "log") as log:
        assert sequences(log) == LEFT_OUT
        assert log.end() == 102
        assert sequences(log, 11) == [11, 12, 13, (14, 99), 100, 101]
        assert sequences(log, 7) == [(7, 9), 10, 11, 12, 13, (14, 99), 100, 101]
        assert sequences(log, 101) == [101]


@pytest.mark.parametrize("at", [0, 101])
def test_a_sequence_that_was_given_already_is_refused(tmp_path: Path, at: int) -> None:
    with leave_out(tmp_path / "log") as log:
        with pytest.raises(OutOfRange, match="continues at sequence 102"):
            log.append_batch(JournalBatch([b"value"]), at=at)
        assert sequences(log) == LEFT_OUT


@pytest.mark.parametrize("format", [name for name, form in FORMATS.items() if not form.may_leave_out])
def test_other_formats_leave_nothing_out(tmp_path: Path, format: str) -> None:
    with kvspool.create(tmp_path / "log", format=format, **LIMITS.get(format, {})) as log:  # type: ignore[call-overload]
        with pytest.raises(OutOfRange, match="continues at sequence 0"):
            log.append_batch(JournalBatch([b"a"]), at=1)
        assert log.append_batch(JournalBatch([b"a"]), at=0) == range(1)


@pytest.mark.parametrize("is_torn", [False, True])
def test_records_after_skipped_sequences_are_no_torn_end(tmp_path: Path, is_torn: bool) -> None:
    """The page that says where the journal ends is lost, as in a restart of the machine."""
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        for first in (0, 10, 12, 100):
            log.append_batch(JournalBatch([b"value"] * 2), at=first)
    (tmp_path / "log/lock").write_bytes(b"")
    if is_torn:
        with (tmp_path / "log/kvj/0000000000000000.kvj").open("ab") as file:
            file.write(b"torn")
    with kvspool.open(tmp_path / "log") as log:
        assert log.append(b"next") == 102
        assert sequences(log) == [*LEFT_OUT, 102]
        assert [torn.data for torn in log.torn] == [b"torn"] * is_torn
