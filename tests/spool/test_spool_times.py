"""Times that a caller gives: one too far ahead is refused, so that it can't become the time of all later records."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvspool
import shard
from kvspool import Spool, system
from kvspool.engine import times
from kvspool.engine.rows import columns_of
from kvspool.errors import NotImportable
from kvspool.journal import JournalBatch
from kvspool.record import NO_TIME, Record

HOUR = 3600 * 10**9
WORDS = r"is more than a day after this machine's clock \(20\d\d-.*\): times in a log never decrease"


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        yield log


def burst(log: Spool, timestamp: int) -> None:
    with log.writer() as writer:
        writer.append(b"x")  # the next one has the lock
        writer.append(b"x", timestamp=timestamp)


def burst_of_many(log: Spool, timestamp: int) -> None:
    with log.writer() as writer:
        writer.append_many([b"x"], timestamp=timestamp)


def arrow(log: Spool, timestamp: int) -> None:
    pa = pytest.importorskip("pyarrow")
    log.append_arrow(pa.record_batch({"value": [b"x", b"x"], "timestamp": pa.array([None, timestamp], pa.int64())}))


def imported(log: Spool, timestamp: int) -> None:
    line = json.dumps({"value": "x", "codec": "text", "timestamp": timestamp})
    kvspool.import_(log, io.BytesIO(line.encode()))


WAYS: dict[str, Callable[[Spool, int], Any]] = {
    "append": lambda log, timestamp: log.append(b"x", timestamp=timestamp),
    "append text": lambda log, timestamp: log.append("x", timestamp=timestamp),
    "append durably": lambda log, timestamp: log.append(b"x", timestamp=timestamp, durable=True),
    "append_many": lambda log, timestamp: log.append_many([b"x"] * 2, timestamp=timestamp),
    "append_rows": lambda log, timestamp: log.append_rows(columns_of([Record(0, at, 0, None, b"x") for at in (NO_TIME, timestamp)])),
    "writer": burst,
    "writer of many": burst_of_many,
    "append_arrow": arrow,
    "producer": lambda log, timestamp: log.producer("p").append_many([b"x"], batch=1, timestamp=timestamp),
    "import_": imported,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_time_that_is_far_ahead_is_refused_and_one_within_a_day_is_kept(log: Spool, way: Callable[[Spool, int], Any]) -> None:
    log.append(b"first")
    for timestamp in (2**63 - 1, system.port.now() + times.MOST_AHEAD + HOUR):
        with pytest.raises(ValueError, match=WORDS):
            way(log, timestamp)
        assert log.append(b"next") == log.end() - 1
        assert [record.timestamp for record in log][-1] <= system.port.now(), "the clock's"
        assert all(record.value in (b"first", b"next") for record in log if way is not burst)
    within = system.port.now() + times.MOST_AHEAD - HOUR
    way(log, within)
    assert [record.timestamp for record in log][-1] == within


def test_a_sharded_log_refuses_it_before_any_shard_has_a_part(tmp_path: Path) -> None:
    with shard.ShardSet.create(tmp_path / "set", bits=1, capacity=65536) as shards:
        for append in (shards.append, lambda value, **options: shards.append_many([value] * 10, **options)):
            with pytest.raises(ValueError, match=WORDS):
                append(b"x", timestamp=2**63 - 1)
        assert list(shards) == []


def test_an_import_names_the_line(log: Spool) -> None:
    with pytest.raises(NotImportable, match=f"line 1: timestamp {2**63 - 1} {WORDS}.*0 records were imported before"):
        imported(log, 2**63 - 1)


JOURNAL_WAYS = {name: WAYS[name] for name in ("append", "append text", "append durably", "append_many", "append_arrow")}


@pytest.mark.parametrize("format", ["kvj", "sej"])
@pytest.mark.parametrize("way", JOURNAL_WAYS.values(), ids=JOURNAL_WAYS)
def test_a_journal_refuses_such_a_time_too_and_keeps_that_of_a_copied_record(
    tmp_path: Path, format: str, way: Callable[[Any, int], Any]
) -> None:
    with kvspool.create(tmp_path / "log", format=format) as log:
        with pytest.raises(ValueError, match=WORDS):
            way(log, 2**63 - 1)
        log.append(b"y")
        assert [record.timestamp <= system.port.now() for record in log] == [True]
        log.append_batch(JournalBatch([b"copied"], timestamps=[2**63 - 1]))
        assert [record.timestamp for record in log][-1] == 2**63 - 1


@pytest.mark.parametrize("source", ["kvj", "spool"])
def test_a_copy_into_a_spool_names_the_record_and_a_lossy_one_gives_it_the_present_time(tmp_path: Path, source: str) -> None:
    with kvspool.create(tmp_path / "source", format=source, **({"capacity": 65536} if source == "spool" else {})) as log:
        log.append(b"0", timestamp=5)
        if isinstance(log, Spool):
            far_ahead(log, b"1")
        else:
            log.append_batch(JournalBatch([b"1"], timestamps=[2**63 - 1]))
    with pytest.raises(ValueError, match=f"record 1 does not fit into .*: timestamp {2**63 - 1} {WORDS}"):
        kvspool.copy(tmp_path / "source", tmp_path / "copy", format="spool", capacity=65536)
    done = kvspool.copy(tmp_path / "source", tmp_path / "copy", format="spool", capacity=65536, lossy=True)
    assert "timestamps" in done.not_kept
    with kvspool.open(tmp_path / "copy") as copy:
        first, second = copy  # type: ignore[misc]
        assert (first.timestamp, first.value, second.value) == (5, b"0", b"1")
        assert second.timestamp <= system.port.now()


def far_ahead(log: Spool, value: bytes) -> None:
    """Append a record as a version of kvspool did that took any time."""
    log.frame_writer().append(None, value, 0, 0, 2**63 - 1)


def test_a_log_with_a_time_far_ahead_continues_and_keeps_it(log: Spool) -> None:
    far_ahead(log, b"0")
    log.append(b"1")
    log.append(b"2", timestamp=5)
    kvspool.resize(log.path, 131072)
    assert log.append(b"3") == 3
    assert [record.timestamp for record in log] == [2**63 - 1] * 4
