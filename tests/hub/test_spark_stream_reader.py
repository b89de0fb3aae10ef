"""The streaming reader, called as Spark calls it but in this process: each record once, in batches that can be run again, or an error."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import BASE, MARKS

import hub
import kvspool
import shard
from kvspool.engine.retention import Retention

if TYPE_CHECKING:
    from hub.spark.stream import StreamReader

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = [mark for mark in MARKS if mark.name != "spark"]

Row = tuple[str, int, int, bytes]


def reader(path: Path, **options: str) -> StreamReader:
    from pyspark.sql.types import StructField, StructType

    from hub.spark.options import ReadOptions
    from hub.spark.reading import COLUMNS
    from hub.spark.stream import StreamReader

    schema = StructType([StructField(name, kind) for name, kind in COLUMNS.items()])
    return StreamReader(ReadOptions.parse({"path": str(path), "startingOffsets": "earliest", **options}).for_stream(), schema)


class Query:
    """Uses a reader and a checkpoint as Spark does. `run` runs the new records as one batch and returns its rows, if any."""

    def __init__(self, path: Path, checkpoint: list[str] | None = None, **options: str) -> None:
        self.reader = reader(path, **options)
        self.checkpoint = [] if checkpoint is None else checkpoint  # the offsets as text, as Spark keeps and compares them
        self.limit = self.reader.getDefaultReadLimit()
        self.polls = 0

    def latest(self) -> str:
        """Note and return where the next batch ends."""
        if not self.checkpoint:
            self.checkpoint.append(json.dumps(self.reader.initialOffset()))
        start = self.checkpoint[-1]
        latest = json.dumps(self.reader.latestOffset(json.loads(start), self.limit))
        self.polls += 1
        if latest != start:
            if len(self.checkpoint) == 1:
                assert json.dumps(self.reader.initialOffset()) == start  # Spark asks again
            self.checkpoint.append(latest)
        return latest

    def rows(self, start: int = -2, end: int = -1) -> list[Row]:
        """Return the rows of the batch between two entries of the checkpoint, by default of the last one."""
        tasks = self.reader.partitions(json.loads(self.checkpoint[start]), json.loads(self.checkpoint[end]))
        fresh = pickle.loads(pickle.dumps(reader(self.reader._options.path, failOnDataLoss=str(self.reader._options.fail_on_data_loss))))
        found = []
        for task in tasks:
            for batch in fresh.read(pickle.loads(pickle.dumps(task))):
                found += [(row["topic"], row["partition"], row["offset"], row["value"]) for row in batch.to_pylist()]
        return found

    def run(self) -> list[Row]:
        """Run a batch if there is something new, and commit it."""
        before = len(self.checkpoint)
        self.latest()
        if len(self.checkpoint) <= max(before, 1):
            return []
        rows = self.rows()
        self.reader.commit(json.loads(self.checkpoint[-1]))
        return rows

    def drain(self) -> list[Row]:
        """Return the rows of all batches until nothing is new."""
        rows: list[Row] = []
        while True:
            before = len(self.checkpoint)
            rows += self.run()
            if len(self.checkpoint) <= max(before, 1):
                return rows


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a hub root with the clients JFK, of two shards, and LAX, of one."""
    path = tmp_path / "root"
    with hub.create(path) as made:
        made.create_client("JFK", bits=1, capacity=1 << 16).close()
        made.create_client("LAX", bits=0, capacity=1 << 16).close()
    return path


def append(root: Path, client: str, count: int, begin: int = 0) -> None:
    with hub.open(root) as opened, opened.client(client) as shards:
        for at in range(begin, begin + count):
            shards.append(b"%s-%d" % (client.encode(), at), key=b"%d" % at, timestamp=BASE + at * 1_000_000)


def values(rows: list[Row]) -> list[bytes]:
    return sorted(row[3] for row in rows)


def named(client: str, begin: int, end: int) -> list[bytes]:
    return sorted(b"%s-%d" % (client.encode(), at) for at in range(begin, end))


def test_batch_after_batch_has_what_was_appended_meanwhile_in_order(root: Path) -> None:
    query = Query(root)
    assert query.run() == []
    for at in range(0, 60, 20):
        append(root, "JFK", 20, at)
        append(root, "LAX", 3, at)
        rows = query.run()
        assert values(rows) == sorted(named("JFK", at, at + 20) + named("LAX", at, at + 3))
        assert rows == sorted(rows, key=lambda row: row[:3])
        assert query.run() == []
    assert json.loads(query.checkpoint[-1])["LAX"] == {"0": 9}
    assert query.reader.reportLatestOffset() == json.loads(query.checkpoint[-1])


@pytest.mark.parametrize("starting", [{"startingOffsets": "latest"}, {"startingOffsets": "earliest"}])
def test_a_first_batch_that_is_run_again_begins_where_it_began(root: Path, starting: dict[str, str]) -> None:
    """Spark notes only where a batch ends, so the new process is asked where the query starts, and may see another place by then."""
    append(root, "JFK", 30)
    first = Query(root, groupId="g", **starting)
    first.latest()
    append(root, "JFK", 12, 30)
    first.latest()
    rows = sorted(first.rows(0, -1))
    assert len(rows) == (42 if starting["startingOffsets"] == "earliest" else 12)
    append(root, "JFK", 40, 42)
    with hub.open(root) as opened:
        held = {one.name: one.lag.records for one in opened.readers() if one.lag is not None}

    again = Query(root, groupId="g", **starting)  # after a kill, with the ends alone
    again.checkpoint = [json.dumps(again.reader.initialOffset()), *first.checkpoint[1:]]
    assert sorted(row for end in range(1, len(again.checkpoint)) for row in again.rows(end - 1, end)) == rows
    with hub.open(root) as opened:
        assert {one.name: one.lag.records for one in opened.readers() if one.lag is not None} == held, "its reader waits for the batch"
    assert values(again.drain()) == named("JFK", 42, 82)
    assert again.run() == []
    assert "/from" not in again.checkpoint[-1]


@pytest.mark.parametrize(
    ("starting", "code"),
    [
        ({"startingOffsets": '{"JFK": {"0": 2, "1": 1}, "LAX": {"0": 4}}'}, "OFFSETS_DO_NOT_MATCH"),
        ({"startingOffsetsByTimestamp": '{"JFK": {"0": 0, "1": 0}, "LAX": {"0": 0}}'}, "TIMESTAMPS_DO_NOT_MATCH"),
        ({"startingTimestamp": "0"}, "NO_OFFSET_AT_TIMESTAMP"),
    ],
)
def test_a_first_batch_is_run_again_although_the_starting_option_fits_no_more(
    root: Path, starting: dict[str, str], code: str
) -> None:
    append(root, "JFK", 30)
    append(root, "LAX", 10)
    first = Query(root, **starting)
    rows = first.run()
    assert rows
    with hub.open(root) as opened:
        opened.create_client("SFO", bits=0, capacity=4096).close()

    again = Query(root, **starting)  # after a kill, with the end alone
    again.checkpoint = [json.dumps(again.reader.initialOffset()), first.checkpoint[1]]
    assert again.rows() == rows
    append(root, "SFO", 3)
    append(root, "LAX", 2, 10)
    assert values(again.drain()) == sorted(named("SFO", 0, 3) + named("LAX", 10, 12))

    with hub.open(root) as opened:
        opened.create_client("ORD", bits=0, capacity=4096).close()
    new = Query(root, **starting)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^\[KVSPOOL_{code}\]"):
            new.latest()


def test_when_nothing_is_new_the_very_same_offset_is_returned(root: Path) -> None:
    append(root, "JFK", 5)
    query = Query(root)
    query.run()
    start = json.loads(query.checkpoint[-1])
    for _ in range(3):
        assert query.reader.latestOffset(start, query.limit) is start
    append(root, "JFK", 1, 5)
    assert query.reader.latestOffset(start, query.limit) != start


def test_a_batch_is_the_same_when_another_reader_runs_it_again(root: Path) -> None:
    append(root, "JFK", 50)
    query = Query(root)
    first = query.run()
    append(root, "JFK", 50, 50)
    again = Query(root, query.checkpoint)
    assert again.rows() == first
    assert values(again.run()) == named("JFK", 50, 100)
    assert again.rows(0, 1) == first


def test_a_query_starts_where_it_should_and_says_so_twice_alike(root: Path) -> None:
    append(root, "JFK", 10)
    append(root, "LAX", 10)
    latest = Query(root, startingOffsets="latest")
    first = latest.reader.initialOffset()
    append(root, "LAX", 2, 10)
    assert latest.reader.initialOffset() is first
    assert values(latest.run()) == named("LAX", 10, 12)
    places = {topic: partitions for topic, partitions in first.items() if topic != "/logs"}
    places["LAX"] = {"0": 4}
    assert values(Query(root, startingOffsets=json.dumps(places)).run()) == named("LAX", 4, 12)
    copied = {**first, "LAX": {"0": -1}}
    assert Query(root, startingOffsets=json.dumps(copied)).run() == []
    moment = BASE // 1_000_000 + 8  # ms, of record 8
    by_time = Query(root, startingTimestamp=str(moment), startingOffsetsByTimestampStrategy="latest").run()
    assert values(by_time) == sorted(named("JFK", 8, 10) + named("LAX", 8, 12))


def test_shares_are_in_proportion_and_each_record_comes_once(root: Path) -> None:
    append(root, "JFK", 100)
    append(root, "LAX", 10)
    query = Query(root, maxOffsetsPerTrigger="30")
    first = query.run()
    assert len(first) <= 30 and {row[:2] for row in first} == {("JFK", 0), ("JFK", 1), ("LAX", 0)}
    assert values(first + query.drain()) == sorted(named("JFK", 0, 100) + named("LAX", 0, 10))
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    once = Query(root, maxOffsetsPerTrigger="30")
    once.limit = ReadAllAvailable()  # as with Trigger.Once
    assert len(once.run()) == 110


def test_a_small_batch_waits_for_more_but_not_forever(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(root, "LAX", 1)
    query = Query(root, minOffsetsPerTrigger="5", maxTriggerDelay="1m")
    now = [100.0]
    assert query.reader._delay is not None
    monkeypatch.setattr(query.reader._delay, "clock", lambda: now[0])
    assert len(query.run()) == 1
    append(root, "LAX", 4, 1)
    assert query.run() == [] and query.run() == []
    append(root, "LAX", 1, 5)
    assert len(query.run()) == 5
    append(root, "LAX", 1, 6)
    assert query.run() == []
    now[0] += 60
    assert values(query.run()) == [b"LAX-6"]


def test_available_now_ends_at_what_was_there_whatever_comes_meanwhile(root: Path) -> None:
    append(root, "JFK", 40)
    query = Query(root, maxOffsetsPerTrigger="15", minOffsetsPerTrigger="10")
    query.reader.prepareForTriggerAvailableNow()
    rows = query.run()
    append(root, "JFK", 40, 40)
    with hub.open(root) as opened, opened.create_client("SFO", bits=0, capacity=4096) as shards:
        shards.append(b"SFO-0")
    assert values(rows + query.drain()) == named("JFK", 0, 40)
    following = Query(root, query.checkpoint)
    following.reader.prepareForTriggerAvailableNow()
    assert values(following.drain()) == sorted([*named("JFK", 40, 80), b"SFO-0"])


def test_new_clients_and_shards_appear_and_are_read_from_their_first_record(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(root, "JFK", 5)
    query = Query(root, subscribePattern="[A-Z]+")
    query.drain()
    with hub.open(root) as opened:
        opened.create_client("SFO", bits=0, capacity=4096).close()
        opened.create_client("small", bits=0, capacity=4096).close()
        append(root, "SFO", 3)
        append(root, "small", 3)
        with opened.create_client("ORD", bits=0, capacity=4096) as shards:
            for at in range(200):
                shards.append(b"ORD-%d" % at)
            first = shards.shards[0].stats().first_sequence
    query.run()  # notes them
    noted = json.loads(query.checkpoint[-1])
    assert (noted["SFO"], noted["ORD"]) == ({"0": 0}, {"0": first})
    append(root, "JFK", 2, 5)
    with caplog.at_level(logging.WARNING, "kvspool"):
        assert values(query.drain()) == sorted(named("SFO", 0, 3) + named("ORD", first, 200) + named("JFK", 5, 7))


def test_a_client_that_is_subscribed_to_before_it_is_there_is_read_when_it_comes(root: Path) -> None:
    append(root, "JFK", 3)
    query = Query(root, subscribe="SFO")
    assert query.drain() == []
    with hub.open(root) as opened:
        opened.create_client("SFO", bits=0, capacity=4096).close()
    append(root, "SFO", 3)
    assert values(query.drain()) == named("SFO", 0, 3)


def overwrite(root: Path, count: int = 5000) -> int:
    """Append so much to LAX that its ring comes round, and return its first sequence."""
    append(root, "LAX", count, 1_000_000)
    with hub.open(root) as opened, opened.client("LAX") as shards:
        return shards.shards[0].stats().first_sequence


def test_records_that_were_overwritten_fail_the_query_with_topic_partition_and_range(root: Path) -> None:
    append(root, "LAX", 10)
    query = Query(root)
    query.run()
    first = overwrite(root)
    assert first > 10
    with pytest.raises(kvspool.KvspoolError, match=rf"\[KVSPOOL_DATA_LOSS\] topic 'LAX', partition 0: offsets 10 to {first - 1} are lost"):
        query.latest()
    with pytest.raises(kvspool.KvspoolError, match=r"KVSPOOL_DATA_LOSS.*offsets 0 to"):
        query.rows()  # run again


def test_or_they_are_skipped_with_one_warning_and_the_query_continues(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(root, "LAX", 10)
    query = Query(root, failOnDataLoss="false")
    query.run()
    first = overwrite(root)
    with caplog.at_level(logging.WARNING, "kvspool"):
        rows = query.run()
    assert [row[2] for row in rows] == list(range(first, 5010))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"[KVSPOOL_DATA_LOSS] topic 'LAX', partition 0: offsets 10 to {first - 1} are lost, and were not read")
    assert message.endswith("(loss 1 of this query)")
    append(root, "LAX", 2, 0)
    assert values(query.run()) == [b"LAX-0", b"LAX-1"]


@pytest.mark.parametrize("fail", [True, False])
def test_records_that_are_overwritten_between_planning_and_reading_fail_the_task_or_are_left_out(
    root: Path, fail: bool, caplog: pytest.LogCaptureFixture
) -> None:
    append(root, "LAX", 10)
    query = Query(root, failOnDataLoss=str(fail))
    query.latest()
    (task,) = query.reader.partitions(*map(json.loads, query.checkpoint))
    overwrite(root)
    if fail:
        with pytest.raises(kvspool.KvspoolError, match=r"\[KVSPOOL_DATA_LOSS\] topic LAX, partition 0"):
            list(query.reader.read(task))
    else:
        with caplog.at_level(logging.WARNING, "kvspool"):
            assert sum(batch.num_rows for batch in query.reader.read(task)) == 0
        assert "[KVSPOOL_DATA_LOSS] topic LAX, partition 0" in caplog.text


def delete(root: Path) -> None:
    shutil.rmtree(root / "LAX")


def replace(root: Path) -> None:
    delete(root)
    with hub.open(root) as opened:
        opened.create_client("LAX", bits=0, capacity=4096).close()
    append(root, "LAX", 20)


def divide(root: Path) -> None:
    """Recreate the client, with two shards instead of one."""
    delete(root)
    with hub.open(root) as opened:
        opened.create_client("LAX", bits=1, capacity=4096).close()
    append(root, "LAX", 20)


def shrink(root: Path) -> None:
    """Put an older copy of the log in its place, as a restored backup does."""
    delete(root)
    shutil.copytree(root.parent / "copy", root / "LAX")


@pytest.mark.parametrize(
    ("change", "code", "then"),
    [
        (delete, r"\[KVSPOOL_PARTITIONS_DELETED\] topic 'LAX', partition 0 was removed; offset 10 was to be read next", []),
        (replace, r"\[KVSPOOL_LOG_REPLACED\] topic 'LAX', partition 0.*START_OFFSET_RESET", named("LAX", 0, 20)),
        (divide, r"\[KVSPOOL_LOG_REPLACED\] topic 'LAX', partition 0.*START_OFFSET_RESET", named("LAX", 0, 20)),
        (shrink, r"\[KVSPOOL_OFFSET_CHANGED\] topic 'LAX', partition 0: offset 10 was to be read next, but the log ends at 4", []),
    ],
)
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_a_log_that_is_deleted_replaced_or_shorter_is_a_loss(
    root: Path, change: Callable[[Path], None], code: str, then: list[bytes], restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    append(root, "LAX", 4)
    shutil.copytree(root / "LAX", root.parent / "copy")
    append(root, "LAX", 6, 4)
    query, lenient = Query(root), Query(root, failOnDataLoss="false")
    assert len(query.run()) == len(lenient.run()) == 10
    change(root)
    if restarted:
        query, lenient = Query(root, query.checkpoint), Query(root, lenient.checkpoint, failOnDataLoss="false")
    with pytest.raises(kvspool.KvspoolError, match=code):
        query.latest()
    with pytest.raises(kvspool.KvspoolError, match=r"^\[KVSPOOL_"):
        query.rows()  # of the batch before, run again
    with caplog.at_level(logging.WARNING, "kvspool"):
        assert values(lenient.drain()) == then
    assert "(loss 1 of this query)" in caplog.text
    assert lenient.drain() == []


def test_a_source_that_is_gone_fails_the_query_also_where_losses_are_allowed(root: Path) -> None:
    append(root, "LAX", 4)
    query = Query(root, failOnDataLoss="false")
    query.run()
    shutil.rmtree(root)
    for asked in (query, Query(root, query.checkpoint)):
        with pytest.raises(kvspool.KvspoolError, match=rf"^\[KVSPOOL_SOURCE_NOT_FOUND\] {root}"):
            asked.latest()


def test_a_checkpoint_that_is_not_one_is_refused(root: Path) -> None:
    for text in ('{"LAX": 3}', '{"LAX": {"0": -1}}', '{"offset": 7}', '{"LAX": {"0": 1e3}}'):
        with pytest.raises(ValueError, match=r"^\[KVSPOOL_INVALID_OFFSETS\] an offset in the checkpoint"):
            Query(root, [text]).latest()


def test_a_commit_moves_the_durable_reader_and_retention_follows_it(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "events", format="kvj", segment_bytes=4096) as log:
        for at in range(400):
            log.append(b"v" * 50, key=b"%d" % at)
        query = Query(tmp_path / "events", groupId="spark", maxOffsetsPerTrigger="150")
        rules = Retention(by_consumers=True)
        query.latest()
        assert [(found.name, found.sequence) for found in log.readers()] == [("spark", 0)]
        assert log.trim(rules).removed_records == 0
        query.rows()
        assert log.trim(rules).removed_records == 0  # read, but not committed
        query.reader.commit(json.loads(query.checkpoint[-1]))
        assert [found.sequence for found in log.readers()] == [150]
        assert 0 < log.trim(rules).removed_records <= 150
        query.latest()  # begins the batch after
        assert [found.sequence for found in log.readers()] == [150]
        assert [row[2] for row in query.rows() + query.drain()] == list(range(150, 400))
        assert [found.sequence for found in log.readers()] == [400]


def test_the_last_batch_before_a_silence_is_committed_without_a_word_of_spark(root: Path) -> None:
    append(root, "LAX", 4)
    query = Query(root, groupId="spark")
    query.latest()
    query.rows()
    query.latest()
    with hub.open(root) as opened:
        (found,) = opened.readers()
        assert found.lag is not None and found.lag.records == 0


def test_without_a_group_no_reader_is_made_and_records_may_go(root: Path) -> None:
    append(root, "LAX", 4)
    Query(root).run()
    with hub.open(root) as opened:
        assert opened.readers() == []
        Query(root, groupId="spark").run()
        assert [found.name for found in opened.readers()] == ["spark"]


def test_a_commit_of_offsets_of_a_log_that_was_replaced_moves_no_reader(root: Path) -> None:
    append(root, "LAX", 9)
    query = Query(root, groupId="spark")
    query.run()
    replace(root)
    query.reader.commit(json.loads(query.checkpoint[-1]))
    lenient = Query(root, query.checkpoint, groupId="spark", failOnDataLoss="false")
    assert values(lenient.drain()) == named("LAX", 0, 20)


def test_a_spool_that_is_resized_under_a_query_continues(root: Path) -> None:
    append(root, "LAX", 10)
    query = Query(root)
    rows = query.run()
    kvspool.resize(root / "LAX", 1 << 17)
    append(root, "LAX", 10, 10)
    assert values(rows + query.run()) == named("LAX", 0, 20)
    assert values(Query(root, query.checkpoint).rows(0, -1)) == named("LAX", 0, 20)


def test_one_log_and_a_shard_set_without_a_prefix_are_streamed_too(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append(b"a")
    with shard.create(tmp_path / "set", bits=1, capacity=4096) as shards:
        shards.append(b"b", key=b"k")
    query = Query(tmp_path / "log")
    assert query.run() == [("log", 0, 0, b"a")]
    assert '"log": {"0": 1}' in query.checkpoint[-1]
    ((topic, _, offset, value),) = Query(tmp_path / "set").run()
    assert (topic, offset, value) == ("", 0, b"b")


def test_small_ranges_of_many_shards_share_a_task(tmp_path: Path) -> None:
    with shard.create(tmp_path / "set", prefix="p", bits=4, capacity=4096) as shards:
        for log in shards.shards:
            log.append(b"v")
    query = Query(tmp_path / "set")
    query.latest()
    start, end = map(json.loads, query.checkpoint)
    (task,) = query.reader.partitions(start, end)
    (batch,) = query.reader.read(task)
    assert batch.column("partition").to_pylist() == list(range(16))
    assert query.reader.partitions(end, end) == []
    assert len(reader(tmp_path / "set", minPartitions="5").partitions(start, end)) == 5


@given(st.lists(st.sampled_from([1, 5, 700, 2047, 2048, 5000]), max_size=12))
def test_small_batches_go_together_and_no_row_is_lost_or_moved(sizes: list[int]) -> None:
    import pyarrow

    from hub.spark.reading import SMALL, together

    edges = [0, *accumulate(sizes)]
    parts = [pyarrow.record_batch({"at": pyarrow.array(range(*edge))}) for edge in zip(edges, edges[1:], strict=False)]
    found = list(together(iter(parts)))
    assert [at for batch in found for at in batch.column(0).to_pylist()] == list(range(edges[-1]))
    assert all(batch.num_rows < 2 * SMALL or batch in parts for batch in found)
    assert all(max(one.num_rows, two.num_rows) >= SMALL for one, two in zip(found, found[1:], strict=False))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endingOffsets": "latest"}, "ending offset not valid in streaming queries"),
        ({"endingTimestamp": "5"}, "ending timestamp not valid in streaming queries"),
        ({"startingOffsets": "soon"}, "KVSPOOL_INVALID_OFFSETS"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "minOffsetsPerTrigger, 9, is more than"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"maxOffsetsPerTrigger": "none"}, "maxOffsetsPerTrigger"),
        ({"startingTimestamp": "9223372036855"}, "startingTimestamp"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": 9223372036855}}'}, "startingOffsetsByTimestamp"),
    ],
)
def test_an_option_that_is_wrong_is_named(root: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader(root, **options)


def test_starting_offsets_name_every_shard_and_times_have_a_record(root: Path) -> None:
    with pytest.raises(ValueError, match=r"KVSPOOL_NO_OFFSET_AT_TIMESTAMP\] topic 'JFK', partition 0"):
        Query(root, startingTimestamp="4000000000000").latest()
    with pytest.raises(ValueError, match=r"KVSPOOL_OFFSETS_DO_NOT_MATCH.*missing: topic 'JFK', partition 0, topic 'JFK', partition 1"):
        Query(root, startingOffsets='{"LAX": {"0": 0}}').latest()
    with pytest.raises(ValueError, match=r"there is no such shard: topic 'SFO'"):
        Query(root, subscribe="LAX", startingOffsets='{"LAX": {"0": 0}, "SFO": {"0": 0}}').latest()


def test_a_reader_opens_nothing_before_it_is_used_and_closes_all_when_it_stops(root: Path, open_files: Callable[[], set[str]]) -> None:
    append(root, "LAX", 1)
    before = open_files()
    query = Query(root)
    assert open_files() == before
    query.latest()
    assert open_files() > before
    query.reader.stop()
    query.reader.stop()
    assert open_files() == before
