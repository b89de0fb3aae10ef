"""Retention of a hub: rules by pattern, whole segments, no records that are held, and clients that continue exactly where they were."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hub
import kvspool
from hub.client.shipper import Shipper
from hub.errors import AccessError, ShardReplaced
from hub.root import columns, retention, trimmer
from hub.root.audit import Audit
from hub.root.columns import SequencedBatch
from hub.root.retention import HubRetention
from hub.root.store import Store
from hub.root.trimmer import Keeper, Trimmer, beginnings
from hub.security import private
from hub.security.access import Access
from hub.server.server import HubServer
from kvspool import Gap
from kvspool.engine.retention import PlannedSegment, TrimPlan
from kvspool.errors import Corruption, ReaderBusy
from kvspool.journal import Floor, Retention

LOG = b"a" * 16
SEGMENT = 8192  # bytes
AGO = 1_700_000_000_000_000_000
PATIENCE = 30.0  # seconds after which a test gives up
needs_network = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers are tested with the compiled twin")


def rows(first: int, end: int, ago: int = AGO) -> SequencedBatch:
    """Records of some 100 bytes, as a shipper sends them."""
    numbers = range(first, end)
    times = pa.array([ago + number for number in numbers], pa.int64()).cast(columns.SCHEMA.field("timestamp").type)
    count = len(numbers)
    values = [[1] * count, [b"k"] * count, [b"%090d" % number for number in numbers], [0] * count]
    arrays = [times, *(pa.array(each, field.type) for each, field in zip(values, list(columns.SCHEMA)[1:], strict=True))]
    return SequencedBatch(first, pa.RecordBatch.from_arrays(arrays, schema=columns.SCHEMA))


def make_client(root: Path, client: str, bits: int = 1) -> list[Path]:
    """Make a client's shards, with small segments."""
    paths = [root / (f"{client}.{bits}.{index:03x}" if bits else client) for index in range(1 << bits)]
    for path in paths:
        kvspool.create(path, format="kvj", segment_bytes=SEGMENT).close()
    return paths


def put(root: Path, client: str, index: int, new: SequencedBatch, bits: int = 1) -> int:
    """Store records as a restarted server does; return the sequence that it expects next."""
    with Store(root) as store:
        shard = store.take(client, bits, index)
        assert shard.enter(LOG, new.end) == (new.first, new.first > 0)
        for first in range(new.first, new.end, 50):
            outcome = shard.put(LOG, new.part(first, min(first + 50, new.end)), first)
        store.give_back(client, index)
        return outcome.expected


def stats(path: Path) -> Any:
    with kvspool.open(path) as log:
        return log.stats()


def span(path: Path) -> tuple[int, int]:
    found = stats(path)
    return found.first_sequence, found.next_sequence


def used(*paths: Path) -> int:
    return sum(stats(path).used for path in paths)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the client jfk, whose first shard has older records than the second, and more."""
    hub.create(tmp_path / "root").close()
    make_client(tmp_path / "root", "jfk")
    put(tmp_path / "root", "jfk", 0, rows(0, 1000))
    put(tmp_path / "root", "jfk", 1, rows(0, 500, AGO + 10**15))
    return tmp_path / "root"


# Rules.


def test_the_narrowest_pattern_says_alone_what_is_kept(root: Path) -> None:
    everybody, some, one = Retention(max_age=1.0), Retention(max_bytes=2), Retention()
    rules = HubRetention(rules={"*": everybody, "j*": Retention(max_bytes=1), "jf*": some, "jfk": one})
    assert [rules.of(client) for client in ("lga", "jfz", "jfk")] == [everybody, some, one]
    assert HubRetention(rules={"jf*": some}).of("lga") is None
    with pytest.raises(ValueError):
        HubRetention(rules={"../x": one})


def test_rules_are_in_the_root_for_its_owner_alone_and_are_read_again(root: Path) -> None:
    assert retention.load(root) == HubRetention()
    first = Retention(max_bytes=5, floor=Floor(records=3))
    assert retention.change(root, lambda now: now.with_rules("jfk", first)).rules == {"jfk": first}
    assert retention.change(root, lambda now: now.with_rules("*", Retention(max_age=1.0))).of("jfk") == first
    path = retention.path_of(root)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    with pytest.raises(AccessError, match="can be written by others"):
        retention.load(root)
    path.chmod(0o600)
    for data in ('{"version": 2}', '{"rules": {"a/b": {}}}', '{"rules": {"a": {"max_byte": 1}}}', "[", '{"rules": {"a": {"max_age": -1}}}'):
        path.write_text(data)
        with pytest.raises(Corruption, match=r"retention\.json"):
            retention.load(root)


# Removed segments.


SEGMENTS = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=6)


@given(st.lists(SEGMENTS, min_size=1, max_size=4), st.integers(0, 500))
def test_what_is_oldest_goes_first_whichever_shard_it_is_in_and_no_more_than_has_to(shards: list[list[tuple[int, int]]], most: int) -> None:
    plans = {}
    for index, segments in enumerate(shards):
        planned = [PlannedSegment(at, 1, size, newest, 0.0, False, "", []) for at, (newest, size) in enumerate(segments)]
        plans[index] = TrimPlan("", planned, [])
    before = beginnings(plans, most)
    gone = {index: [one for one in plan.segments if one.base < before[index]] for index, plan in plans.items()}
    kept = sum(one.bytes for index, plan in plans.items() for one in plan.segments[len(gone[index]) :])
    assert all(len(gone[index]) < len(plan.segments) for index, plan in plans.items())
    assert kept <= most or all(len(gone[index]) == len(plan.segments) - 1 for index, plan in plans.items())
    oldest = [max(one.newest for one in segments) for segments in gone.values() if segments]
    last = [segments[-1].bytes for segments in gone.values() if segments and max(one.newest for one in segments) == max(oldest)]
    assert not last or kept + max(last) > most


def test_bytes_are_those_of_all_shards_together(root: Path) -> None:
    old, new = root / "jfk.1.000", root / "jfk.1.001"
    most = used(old, new) - 3 * SEGMENT
    would = Trimmer(root).trim("jfk", Retention(max_bytes=most), dry_run=True)
    assert (span(old)[0], span(new)[0]) == (0, 0)
    done = Trimmer(root).trim("jfk", Retention(max_bytes=most))
    assert [one.report.removed_segments for one in done] == [one.report.removed_segments for one in would]
    assert most - 2 * SEGMENT < used(old, new) <= most
    assert (span(old)[0] > 0, span(new)[0]) == (True, 0)
    assert [one.why for one in done[0].report.plan.segments if one.goes][0].startswith("jfk has ")
    assert Trimmer(root).trim("jfk", Retention(max_bytes=0))[1].report.removed_segments > 0
    assert [span(path)[1] for path in (old, new)] == [1000, 500]
    assert stats(old).segments == stats(new).segments == 1


def test_age_is_that_of_the_hub_s_last_write_whatever_times_a_client_gives(root: Path) -> None:
    path = root / "jfk.1.000"
    assert sum(one.report.removed_segments for one in Trimmer(root).trim("jfk", Retention(max_age=3600.0))) == 0
    long_ago = time.time() - 7200
    with kvspool.open(path) as log:
        for base in log.bases()[:3]:
            os.utime(log.segments_apart().path_of(base), (long_ago, long_ago))
    segments = stats(path).segments
    Trimmer(root).trim("jfk", Retention(max_age=3600.0))
    assert (stats(path).segments, span(path)[1]) == (segments - 3, 1000)


def test_age_is_that_of_the_records_where_asked(root: Path) -> None:
    """Segments that were written just now, with old records, as of a backlog that arrives late."""
    path = root / "lga"
    now = time.time_ns()
    hours = [300, 200, 100, 3, 2, 1]
    with kvspool.create(path, format="kvj", segment_bytes=200) as log:
        for age in hours:
            for _ in range(5):
                log.append(b"x" * 100, timestamp=now - age * 3600 * 10**9)
    by_write, by_record = (Retention(max_age=24 * 3600.0, by_record=by_record) for by_record in (False, True))
    trimmer = Trimmer(root)
    assert sum(one.report.removed_segments for one in trimmer.trim("lga", by_write)) == 0
    assert sum(one.report.removed_segments for one in trimmer.trim("lga", by_record)) > 0
    with kvspool.open(path) as log:
        ages = [round((now - record.timestamp) / 3600e9) for record in log.read(on_gap="skip")]
    assert [age for age in ages if age <= 24] == [3] * 5 + [2] * 5 + [1] * 5
    assert 0 < len([age for age in ages if age > 24]) <= 2  # the segment before the first new record may have a few
    with pytest.raises(ValueError, match="give max_age"):
        Retention(by_record=True)


def test_what_a_reader_of_the_hub_has_yet_to_read_stays_and_with_force_it_gets_a_gap(root: Path) -> None:
    with hub.open(root) as opened, opened.reader("spark") as reader:
        for _ in reader.read(limit=600):
            pass
        places = reader.commit()
        assert places == {("jfk", 0): 600, ("jfk", 1): 0}
        (old, new) = Trimmer(root).trim("jfk", Retention(max_bytes=0))
        assert 500 < old.report.first_sequence <= 600
        assert new.report.removed_segments == 0
        assert old.report.plan.segments[-2].held_by == ["hub:spark"]
        (old, new) = Trimmer(root).trim("jfk", Retention(max_bytes=0, force=True))
        left = [(one.name, one.first) for one in old.report.left_behind + new.report.left_behind]
        assert left == [("hub:spark", 600), ("hub:spark", 0)]
        found = list(reader.read(on_gap="yield"))
    gaps = {(item.first, item.last, item.reason) for item in found if isinstance(item, Gap)}
    assert gaps == {(600, old.report.first_sequence - 1, "trimmed"), (0, new.report.first_sequence - 1, "trimmed")}
    assert len([item for item in found if not isinstance(item, Gap)]) == 1500 - old.report.first_sequence - new.report.first_sequence


def test_the_slowest_of_all_durable_readers_counts(root: Path) -> None:
    path, rules = root / "jfk.1.000", Retention(by_consumers=True)
    assert sum(one.report.removed_segments for one in Trimmer(root).trim("jfk", rules)) == 0  # there are no readers
    with hub.open(root) as opened, opened.reader("spark") as reader:
        for _ in reader.read():
            pass
        reader.commit()
        with kvspool.open(path) as log, log.reader("own") as own:
            for _ in own.read(limit=300):
                pass
            own.commit()
            Trimmer(root).trim("jfk", rules)
            assert 200 < span(path)[0] <= 300
            assert span(root / "jfk.1.001")[0] > 400
    hub.open(root).delete_reader("spark")


@pytest.mark.parametrize("floor", [Floor(records=400), Floor(segments=2), Floor(bytes=3 * SEGMENT), Floor(sequence=200)], ids=repr)
def test_no_floor_is_passed_by_force_either(root: Path, floor: Floor) -> None:
    for one in Trimmer(root).trim("jfk", Retention(max_bytes=0, force=True, floor=floor)):
        path = root / f"jfk.1.{one.shard:03x}"
        found = stats(path)
        assert one.report.removed_segments > 0
        assert found.records >= (floor.records or 0)
        assert found.segments >= (floor.segments or 0)
        assert found.used >= (floor.bytes or 0)
        assert found.first_sequence <= (1000 if floor.sequence is None else floor.sequence)


@pytest.mark.parametrize("count", [600, 2000])
def test_a_recreated_log_is_kept_whole_until_its_readers_are_in_it(root: Path, count: int) -> None:
    rules, path = Retention(by_consumers=True), root / "jfk.1.000"
    with hub.open(root) as opened, opened.reader("spark") as reader:
        read_all(reader)
        assert reader.commit()["jfk", 0] == 1000
    shutil.rmtree(path)
    with kvspool.create(path, format="kvj", segment_bytes=SEGMENT) as log:
        log.append_many([b"new"] * count)
    (report,) = [one.report for one in Trimmer(root).trim("jfk", rules) if one.shard == 0]
    assert report.removed_segments == 0
    with hub.open(root) as opened, opened.reader("spark") as reader:
        with pytest.raises(ShardReplaced, match="recreated"):
            read_all(reader)
        assert read_all(reader) == count
        reader.commit()
    (report,) = [one.report for one in Trimmer(root).trim("jfk", rules) if one.shard == 0]
    assert report.removed_segments > 0


def read_all(reader: hub.HubReader) -> int:
    return sum(1 for _ in reader.read())


def test_a_reader_whose_places_cannot_be_read_holds_back_everything(root: Path) -> None:
    hub.open(root).reader("spark").close()
    (root / ".hub" / "readers" / "spark.positions").write_text("rubbish")
    assert sum(one.report.removed_segments for one in Trimmer(root).trim("jfk", Retention(max_bytes=0))) == 0
    done = Trimmer(root).trim("jfk", Retention(max_bytes=0, force=True))
    assert all(one.report.removed_segments > 0 and not one.report.left_behind for one in done)


# Exactly once.


def test_a_client_whose_shard_was_trimmed_continues_exactly_where_it_was(root: Path) -> None:
    Trimmer(root).trim("jfk", Retention(max_bytes=0))
    first, end = span(root / "jfk.1.000")
    with Store(root) as store:
        shard = store.take("jfk", 1, 0)
        assert shard.enter(LOG, 1200) == (1000, True)
        assert shard.put(LOG, rows(100, 150), 100)[:3] == (1000, 0, 50)  # gone: known, and not stored again
        assert shard.put(LOG, rows(950, 1050), 950)[:3] == (1050, 50, 50)
        store.give_back("jfk", 0)
    assert put(root, "jfk", 0, rows(1050, 1200)) == 1200
    with kvspool.open(root / "jfk.1.000") as log:
        assert [record.sequence for record in log.read()] == list(range(first, 1200))
    assert end == 1000


def test_rules_that_cannot_be_read_are_an_error_until_they_are_fixed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_STABLE", -(1 << 62))  # what was read once isn't read again
    file = retention.RetentionFile(root)
    path = retention.path_of(root)
    private.write(path, b"[")
    for _ in range(3):
        with pytest.raises(Corruption, match=r"retention\.json"):
            file.load()
    private.write(path, b"{}", replaces=True)
    assert file.load() == retention.HubRetention()


# The keeper.


def test_the_keeper_trims_what_the_rules_say_and_tells_what_goes_wrong(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimmer, "INTERVAL", 0.0)
    keeper = Keeper(root, lambda: {"jfk": 1 << 30, "lga": 0})
    keeper.round()
    assert (keeper.removed, keeper.error, span(root / "jfk.1.000")[0]) == (0, "", 0)
    retention.change(root, lambda now: now.with_rules("j*", Retention(max_bytes=4 * SEGMENT)))
    before = used(root / "jfk.1.000", root / "jfk.1.001")
    for _ in range(10):
        keeper.round()
    left = used(root / "jfk.1.000", root / "jfk.1.001")
    assert left <= 4 * SEGMENT
    assert keeper.removed == before - left
    retention.path_of(root).write_text("[")
    keeper.round()
    assert "retention.json" in keeper.error
    retention.path_of(root).unlink()
    (root / "jfk.1.000" / "kvspool.json").write_text("[")
    retention.change(root, lambda now: now.with_rules("*", Retention(max_age=1.0)))
    keeper.round()
    assert "of jfk" in keeper.error


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("hub.server.server.ROUND", 0.05)
    monkeypatch.setattr(trimmer, "INTERVAL", 0.05)
    yield


@needs_network
def test_a_hub_that_runs_trims_and_its_client_ships_on(tmp_path: Path, quick: None) -> None:
    root = tmp_path / "root"
    hub.create(root).close()
    (path,) = make_client(root, "jfk", bits=0)
    source = kvspool.create(tmp_path / "log", capacity="4MiB")
    retention.change(root, lambda now: now.with_rules("*", Retention(max_bytes=3 * SEGMENT)))
    for number in range(4):
        with HubServer(root, access=Access.anonymous(), listen=("127.0.0.1", 0), least_free=0) as server:
            source.append_many([b"%090d" % (number * 500 + at) for at in range(500)])
            with Shipper(tmp_path / "log", server.location, client="jfk") as shipper:
                shipper.run(until_empty=True)
            end = time.monotonic() + PATIENCE
            while used(path) > 3 * SEGMENT:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert server.status().error == ""
    first, end_of_hub = span(path)
    assert (first > 1000, end_of_hub) == (True, 2000)
    with kvspool.open(path) as log:
        assert [int(record.value) for record in log.read()] == list(range(first, 2000))
    source.close()


def test_trimming_meets_writers_and_readers_without_harm(root: Path) -> None:
    with Store(root) as store, hub.open(root) as opened:
        shard = store.take("jfk", 1, 0)
        with pytest.raises(ReaderBusy), opened.reader("r"):
            opened.reader("r")
        following = opened.client("jfk").follow(timeout=0, on_gap="yield")
        next(following)
        for round in range(5):
            shard.put(LOG, rows(1000 + round * 100, 1100 + round * 100), 1000 + round * 100)
            Trimmer(root).trim("jfk", Retention(max_bytes=0, force=True))
        assert [item.last for item in following if isinstance(item, Gap) and item.reason != "trimmed"] == []
        following.close()
        assert shard.next(LOG) == 1500


def test_an_audit_next_to_writers_trims_and_commits_has_no_false_alarm(root: Path) -> None:
    is_over, problems = threading.Event(), []

    def write() -> None:
        with Store(root) as store:
            for number in range(1000):
                shard, log = store.take("jfk", 1, 1), b"%016d" % number  # each one a recreated log
                shard.enter(log, 60)
                shard.put(log, rows(0, 60), 0)
                store.give_back("jfk", 1)
                if is_over.is_set():
                    break

    def trim_and_read() -> None:
        with hub.open(root) as opened, opened.reader("spark") as reader:
            while not is_over.is_set():
                for _ in reader.read(limit=100, on_gap="skip"):
                    pass
                reader.commit()
                retention.change(root, lambda now: now.with_rules("*", Retention(max_bytes=0, force=True)))
                Trimmer(root).trim("jfk", Retention(max_bytes=0, force=True))

    threads = [threading.Thread(target=each) for each in (write, trim_and_read)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            audit = Audit(root)
            problems += [audit.look(*each, lambda done, all: None) for each in audit.paths()]
            assert audit.problems() == []
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(problems) == 200
    assert [one for one in problems if one is None or not one.is_sound] == []
