"""Local shards: a look at them sees everything, and costs next to nothing while nothing changes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from children import in_child, let_others_read
from sessions import BASE

import hub
import kvspool
import shard
from hub.spark import local
from hub.spark.errors import DataLossError
from hub.spark.local import LocalShards
from hub.spark.selection import Selection
from hub.spark.shards import Extent, ShardKey
from kvspool import Gap, system
from kvspool.errors import LogNotFound, NotALog, ReaderBusy
from shard.errors import IncompleteShardSet

pytest.importorskip("pyarrow")

FORMATS = ["spool", "kvj", "sej", "fflg"]
KEY = ShardKey("log", 0)


@pytest.fixture
def look_at() -> Iterator[Callable[..., LocalShards]]:
    """Make shards that are closed when the test is over."""
    made: list[LocalShards] = []

    def make(path: Path, **options: Any) -> LocalShards:
        made.append(LocalShards(path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def create(path: Path, format: str = "spool") -> Any:
    return kvspool.create(path, capacity=65536) if format == "spool" else kvspool.create(path, format=format)  # type: ignore[call-overload]


def ends(shards: LocalShards) -> dict[tuple[str, int], int]:
    return {tuple(key): extent.end for key, extent in shards.look().items()}


def sequences(shards: LocalShards, key: ShardKey, first: int, end: int) -> list[int]:
    found = []
    for batch in shards.range(key, first, end).batches():
        assert not isinstance(batch, Gap)
        found += batch.column("sequence").to_pylist()
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_one_log_is_seen_as_it_grows_and_its_ranges_are_read(tmp_path: Path, look_at: Callable[..., LocalShards], format: str) -> None:
    with create(tmp_path / "log", format) as log:
        shards = look_at(tmp_path / "log")
        for count in range(5):
            assert shards.look() == {KEY: Extent(0, count, log.log_id.hex())}
            log.append(b"v")
        assert sequences(shards, KEY, 1, 4) == [1, 2, 3]
        with pytest.raises(DataLossError, match="KVSPOOL_LOG_REPLACED"):
            sequences(shards, KEY, 1, 9)


def test_segments_that_come_and_go_are_seen(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes="64KiB") as log:
        shards = look_at(tmp_path / "log")
        for batch in range(10):
            log.append_many([bytes(1000)] * 50)
            assert shards.look()[KEY][:2] == (0, 50 * (batch + 1))
        log.trim(before=300)
        assert 0 < log.first() <= 300
        assert shards.look()[KEY][:2] == (log.first(), 500)


def test_overwriting_and_a_resize_are_seen_and_the_log_stays_the_same(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        shards = look_at(tmp_path / "log")
        log.append_many([b"%020d" % at for at in range(500)])
        before = shards.look()[KEY]
        assert before[:2] == (log.stats().first_sequence, 500)
        planned = shards.range(KEY, before.first, before.end)
        kvspool.resize(tmp_path / "log", "64KiB")
        assert shards.look()[KEY] == before
        log.append_many([b"%020d" % at for at in range(500, 600)])
        assert shards.look()[KEY] == before._replace(end=600)
        assert sum(batch.num_rows for batch in planned.batches() if not isinstance(batch, Gap)) == before.end - before.first


@pytest.mark.parametrize("format", FORMATS)
def test_a_log_that_was_recreated_has_another_id(tmp_path: Path, look_at: Callable[..., LocalShards], format: str) -> None:
    with create(tmp_path / "log", format) as log:
        log.append_many([b"v"] * 5)
    shards = look_at(tmp_path / "log")
    before = shards.look()[KEY]
    planned = shards.range(KEY, 0, 5)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogNotFound, match="log is gone"):
        shards.look()
    sidecar = tmp_path / ".log.kvspool"
    if sidecar.exists():
        shutil.rmtree(sidecar)
    with create(tmp_path / "log", format) as log:
        log.append_many([b"v"] * 7)
    after = shards.look()[KEY]
    assert after[:2] == (0, 7)
    assert after.log_id != before.log_id
    with pytest.raises(DataLossError, match="KVSPOOL_LOG_REPLACED"):
        list(planned.batches())


def test_clients_and_shards_appear_and_go_automatically(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    with hub.create(tmp_path / "root") as root:
        shards = look_at(root.path)
        assert shards.look() == {}
        with root.create_client("jfk", bits=1, capacity=65536) as jfk:
            jfk.shards[1].append(b"v")
            assert ends(shards) == {("jfk", 0): 0, ("jfk", 1): 1}
        root.create_client("ewr", bits=0, capacity=65536).close()
        assert ends(shards) == {("ewr", 0): 0, ("jfk", 0): 0, ("jfk", 1): 1}
        shutil.rmtree(root.path / "jfk.1.000")
        assert ends(shards) == {("ewr", 0): 0, ("jfk", 1): 1}
        shutil.rmtree(root.path / "jfk.1.001")
        assert ends(shards) == {("ewr", 0): 0}
        shutil.rmtree(root.path)
        with pytest.raises(LogNotFound, match="is gone"):
            shards.look()


def test_a_shard_that_was_recreated_under_a_root_has_another_id(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    shard.create(tmp_path, prefix="p", bits=1, capacity=4096).append_many([b"v"] * 5)
    shards = look_at(tmp_path)
    key = ShardKey("p", 1)
    before = shards.look()[key].log_id
    shutil.rmtree(tmp_path / "p.1.001")
    kvspool.create(tmp_path / "p.1.001", capacity=4096).close()
    after = shards.look()[key]
    assert after.end == 0
    assert after.log_id != before


@pytest.mark.parametrize("format", FORMATS)
def test_a_topic_that_was_recreated_with_another_number_of_shards_is_seen_as_it_is(
    tmp_path: Path, look_at: Callable[..., LocalShards], monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    for at in range(2):
        create(tmp_path / f"p.1.00{at}", format).close()
    shards = look_at(tmp_path)
    before = shards.look()
    assert len(before) == 2
    for path in list(tmp_path.iterdir()):
        shutil.rmtree(path)
    for at in range(4):
        with create(tmp_path / f"p.2.00{at}", format) as log:
            log.append_many([b"v"] * 10)
    after = shards.look()
    assert {tuple(key): extent.end for key, extent in after.items()} == {("p", at): 10 for at in range(4)}
    assert not {extent.log_id for extent in before.values()} & {extent.log_id for extent in after.values()}
    for key in after:
        assert sequences(shards, key, 0, 10) == list(range(10))
    monkeypatch.setattr(system.port, "now", lambda: time.time_ns() + 10**9, raising=False)
    shards.look()
    port = Counting()
    monkeypatch.setattr(system, "port", port)
    for _ in range(20):
        assert shards.look() == after
    assert port.calls == []


def test_a_topic_that_was_recreated_with_a_hole_is_an_error(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    shard.create(tmp_path, prefix="p", bits=1, capacity=4096).close()
    shards = look_at(tmp_path)
    assert ends(shards) == {("p", 0): 0, ("p", 1): 0}
    for at in range(2):
        shutil.rmtree(tmp_path / f"p.1.00{at}")
    for at in (0, 2):
        kvspool.create(tmp_path / f"p.2.00{at}", capacity=4096).close()
    with pytest.raises(IncompleteShardSet, match=r"p\.2\.001"):
        shards.look()


def test_a_set_that_is_being_made_is_no_error_and_one_with_a_hole_is(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    shards = look_at(tmp_path)
    (tmp_path / "p.1.000").mkdir()
    assert shards.look() == {}
    kvspool.create(tmp_path / "p.1.000", capacity=4096).close()
    assert ends(shards) == {("p", 0): 0}
    kvspool.create(tmp_path / "p.1.001", format="kvj").close()
    assert ends(shards) == {("p", 0): 0, ("p", 1): 0}
    kvspool.create(tmp_path / "q.1.001", capacity=4096).close()
    with pytest.raises(IncompleteShardSet, match=r"q\.1\.000"):
        shards.look()
    assert look_at(tmp_path, selection=Selection(topics=frozenset("p"))).look().keys() == {("p", 0), ("p", 1)}


def test_a_directory_that_is_no_shard_is_reported(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name in ("none", "file"):
        with pytest.raises(LogNotFound, match="is neither a log nor a root of shards"):
            look_at(tmp_path / name)
    (tmp_path / "root" / "p.1.000").mkdir(parents=True)
    (tmp_path / "root" / "p.1.000" / "notes").write_bytes(b"")
    with pytest.raises(NotALog):
        look_at(tmp_path / "root").look()
    create(tmp_path / "log").close()
    with pytest.raises(ValueError, match="is one log, not a root of shards: .* leave out subscribe a"):
        look_at(tmp_path / "log", selection=Selection(topics=frozenset("a")))


class Counting(system.Port):
    """Counts directories that are listed and files that are opened."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def names(self, path: str | os.PathLike[str]) -> list[str]:
        self.calls.append(f"names {path}")
        return super().names(path)

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
        self.calls.append(f"open {path}")
        return super().open(path, flags, mode)


@pytest.mark.parametrize("format", FORMATS)
def test_a_look_at_what_has_not_changed_opens_nothing_and_lists_nothing(
    tmp_path: Path, look_at: Callable[..., LocalShards], monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    for at in range(4):
        with create(tmp_path / f"p.2.00{at}", format) as log:
            log.append(b"v")
    shards = look_at(tmp_path)
    first = shards.look()
    then = system.port.now() + 10**9
    monkeypatch.setattr(system.port, "now", lambda: then, raising=False)  # a second later
    assert shards.look() == first
    port = Counting()
    monkeypatch.setattr(system, "port", port)
    monkeypatch.setattr(port, "now", lambda: then)
    for _ in range(20):
        assert shards.look() == first
    assert port.calls == []
    with kvspool.open(tmp_path / "p.2.002") as log:
        log.append(b"v")
    assert shards.look()[ShardKey("p", 2)].end == 2


@pytest.mark.parametrize("format", ["spool", "kvj"])
def test_a_time_is_found_to_the_nanosecond(tmp_path: Path, look_at: Callable[..., LocalShards], format: str) -> None:
    with create(tmp_path / "log", format) as log:
        for at in range(10):
            log.append(b"v", timestamp=BASE + 500 * at)
        shards = look_at(tmp_path / "log")
        shards.look()
        for time in (0, BASE - 1, *range(BASE, BASE + 5000, 250)):
            expected = next((record.sequence for record in log if record.timestamp >= time), None)
            assert shards.sequence_at(KEY, time) == expected
        assert shards.has_ordered_times(KEY) == (format == "spool")


@pytest.mark.parametrize("format", ["spool", "kvj"])
def test_only_what_is_on_disk_counts_where_that_is_asked_for(tmp_path: Path, look_at: Callable[..., LocalShards], format: str) -> None:
    with create(tmp_path / "log", format) as log:
        shards = look_at(tmp_path / "log", isolation="synced")
        log.append_many([b"v"] * 5)
        log.sync()
        log.append_many([b"v"] * 5)
        assert shards.look()[KEY][:2] == (0, 5)
        log.sync()
        assert shards.look()[KEY][:2] == (0, 10)


@pytest.mark.parametrize("format", FORMATS)
def test_a_commit_moves_the_reader_of_a_log_and_leaves_it_free(tmp_path: Path, look_at: Callable[..., LocalShards], format: str) -> None:
    with create(tmp_path / "log", format) as log:
        log.append_many([b"v"] * 10)
        shards = look_at(tmp_path / "log", reader="spark")
        with log.reader("spark") as reader:  # no process has it open
            assert reader.sequence == 0
            with pytest.raises(ReaderBusy):
                shards.commit({KEY: 4})
        shards.commit({KEY: 4})
        shards.commit({KEY: 6})
        look_at(tmp_path / "log", reader="spark")
        with log.reader("spark") as reader:
            assert reader.sequence == 6


def test_a_commit_moves_the_reader_of_a_root_which_holds_back_nothing_else(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    with hub.create(tmp_path / "root") as root:
        for client in ("ewr", "jfk"):
            with root.create_client(client, bits=1, capacity=65536) as made:
                for log in made.shards:
                    log.append_many([b"v"] * 10)
        shards = look_at(root.path, selection=Selection(topics=frozenset(("jfk",))), reader="spark")
        shards.look()
        assert [root.held(client, 0) for client in ("ewr", "jfk")] == [10, 0]
        shards.commit({ShardKey("jfk", 0): 4, ShardKey("jfk", 1): 99})
        assert [root.held("jfk", at) for at in (0, 1)] == [4, 10]
        with root.reader("spark") as reader:
            assert reader.positions == {("ewr", 0): 10, ("ewr", 1): 10, ("jfk", 0): 4, ("jfk", 1): 10}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("format", FORMATS)
def test_a_user_without_write_permission_reads_and_can_have_no_durable_reader(tmp_path: Path, format: str) -> None:
    with create(tmp_path / "log", format) as log:
        log.append_many([b"v"] * 3)
    let_others_read(tmp_path)

    import kvspool.arrow  # noqa: F401 - the other user may have no right to import it

    def read() -> None:
        os.setgid(65534)
        os.setuid(65534)
        shards = LocalShards(tmp_path / "log")
        assert ends(shards) == {("log", 0): 3}
        assert sequences(shards, KEY, 0, 3) == [0, 1, 2]
        shards.commit({KEY: 3})
        with pytest.raises(PermissionError, match="the durable reader 'spark' of option groupId needs the right to write"):
            LocalShards(tmp_path / "log", reader="spark")

    in_child(read)


def test_a_process_keeps_few_logs_open(tmp_path: Path, look_at: Callable[..., LocalShards], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOST_OPEN", 2)
    with shard.create(tmp_path, prefix="p", bits=2, capacity=65536) as made:
        for log in made.shards:
            log.append(b"v")
    shards = look_at(tmp_path)
    for _ in range(2):
        for key in shards.look():
            assert sequences(shards, key, 0, 1) == [0]
            assert len(local._logs) <= 2
    local.close_logs()


def test_moments_before_1970_are_found_too(tmp_path: Path, look_at: Callable[..., LocalShards]) -> None:
    with create(tmp_path / "log", "kvj") as log:
        log.append(b"v", timestamp=-5_000_000_001)
        shards = look_at(tmp_path / "log")
        shards.look()
        assert shards.sequence_at(KEY, -6_000_000_000) == 0
        assert shards.sequence_at(KEY, int(datetime(1970, 1, 2, tzinfo=UTC).timestamp()) * 10**9) is None
