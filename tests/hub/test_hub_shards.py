"""Hubs as a query sees them, without Spark: shards and their extents, streamed ranges, hubs that disappear and return."""

from __future__ import annotations

import logging
import pickle
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from children import in_child
from clocks import StoppedClock
from processes_of_a_hub import Fault, Proxy
from serving import HubServer
from shipping import eventually

import hub
import kvspool
from hub.client import outage as outages
from hub.client.one_hub import OneHub
from hub.client.outage import FIRST_BACKOFF, Outage
from hub.client.shipper import Shipper
from hub.errors import Conflict, HubError, HubFull, Malformed, NotAllowed, NotFound, QuotaExceeded, ShardDamaged, Unreachable
from hub.protocol.reading import Generation, Ticket
from hub.root.columns import SequencedBatch
from hub.spark import endpoints, ranges, remote
from hub.spark.endpoints import HubEndpoint
from hub.spark.errors import DataLossError
from hub.spark.local import LocalShards
from hub.spark.opening import open_shards
from hub.spark.options import Credentials, ReadOptions
from hub.spark.ranges import HubRange
from hub.spark.remote import HubShards
from hub.spark.selection import Selection
from hub.spark.shards import ShardKey
from kvspool import Gap, arrow
from kvspool.cli import main
from kvspool.journal import Retention
from kvspool.journal.format import JournalBatch

JFK, EWR = ShardKey("JFK", 0), ShardKey("EWR", 0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let pauses be short, and close what a worker would keep."""
    monkeypatch.setattr(outages, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(remote, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(ranges, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(outages, "LONGEST_BACKOFF", 0.05)
    monkeypatch.setattr(remote, "COMMITS", 0.0)
    yield
    endpoints.close_connections()


def fill(path: Path, count: int, text: str = "record", first: int = 0) -> None:
    """Append records to a journal, which is made if it isn't there."""
    with kvspool.open(path) if path.exists() else kvspool.create(path, format="kvj") as log:
        for number in range(first, first + count):
            log.append(f"{text} {number}", timestamp=1_000_000_000 * (number + 1))


def ship(source: Path, location: str, client: str) -> None:
    with Shipper(source, location, client=client) as shipper:
        shipper.run(until_empty=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root with 100 records of JFK, and a Gap in those of EWR."""
    hub.create(tmp_path / "root").close()
    fill(tmp_path / "root" / "JFK", 100)
    fill(tmp_path / "root" / "EWR", 3)
    with kvspool.open(tmp_path / "root" / "EWR") as log:
        log.append_batch(JournalBatch([b"later"]), at=9)
    return tmp_path / "root"


@pytest.fixture
def server(root: Path) -> Iterator[HubServer]:
    with HubServer(root) as server:
        yield server


def shards(*locations: str, timeout: float = 20.0, **options: Any) -> HubShards:
    return HubShards(locations, timeout=timeout, **options)


def sequences(one: Any) -> list[int]:
    """Return what a range has, Gaps left out."""
    return [at for item in one.batches() if not isinstance(item, Gap) for at in item.column("sequence").to_pylist()]


def gaps(one: Any) -> list[tuple[int, int, str]]:
    return [(item.first, item.last, item.reason) for item in one.batches() if isinstance(item, Gap)]


# Shards and their extents.


def test_keyed_values_are_the_same_from_a_path_and_from_a_hub(tmp_path: Path) -> None:
    values = [{"flight": at, "late": {"minutes": at % 7}} if at % 3 else b"\x81\x00\x01" for at in range(100)]
    with kvspool.create(tmp_path / "JFK", capacity="64KiB", codec="keyed") as log:
        log.append_many(values)
        log.append({"new": 1})
    hub.create(tmp_path / "hub").close()
    with HubServer(tmp_path / "hub") as server:
        ship(tmp_path / "JFK", server.location, "JFK")
        found = []
        for shards in (LocalShards(tmp_path / "JFK"), HubShards((server.location,))):
            assert shards.look()[JFK].end == 101
            found.append(pa.Table.from_batches(list(shards.range(JFK, 0, 101).batches())))  # type: ignore[arg-type]
            shards.close()
    assert found[0].equals(found[1])
    decoded = [msgspec.msgpack.decode(value) if at % 3 else value for at, value in enumerate(found[0].column("value").to_pylist())]
    assert decoded[:100] == values


def test_a_keyed_value_whose_keys_are_lost_stays_as_it_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with kvspool.create(path, capacity="64KiB", codec="keyed") as log:
        log.append({"alpha": 7})
        copy = (path / "spool.ctl").read_bytes()
        log.append_many([{"beta": 7}, {"beta": 8}, {"alpha": 9}])
    (path / "spool.ctl").write_bytes(copy)
    with kvspool.open(path) as log:
        log.append({"alpha": 10})
    shards = LocalShards(path)
    (key,) = found = shards.look()
    items = list(shards.range(key, 0, found[key].end).batches())
    table = pa.Table.from_batches([item for item in items if not isinstance(item, Gap)])
    shards.close()
    assert [msgspec.msgpack.decode(value, strict=False) for value in table.column("value").to_pylist()] == [
        {"alpha": 7}, {1: 7}, {1: 8}, {"alpha": 9}, {"alpha": 10}
    ]  # fmt: skip


def test_a_look_shows_all_shards_and_new_ones_appear(server: HubServer, root: Path) -> None:
    with kvspool.open(root / "JFK") as log:
        log.append("one more")
    ours = shards(server.location)
    assert {key: (one.first, one.end) for key, one in ours.look().items()} == {EWR: (0, 10), JFK: (0, 101)}
    assert ours.look() is ours.look()
    fill(root / "LGA", 2)
    eventually(lambda: ShardKey("LGA", 0) in ours.look())
    fill(root / "JFK", 1)
    eventually(lambda: ours.look()[JFK].end == 102)
    ours.close()


def test_an_idle_look_is_one_small_call(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shards(server.location)
    ours.look()
    calls: list[int] = []
    ask = OneHub.changes

    def counted(self: OneHub, *asked: Any) -> Any:
        answer = ask(self, *asked)
        calls.append(len(answer.shards))
        return answer

    monkeypatch.setattr(OneHub, "changes", counted)
    for _ in range(5):
        ours.look()
    assert calls == [0] * 5
    ours.close()


def test_a_query_that_has_nothing_to_do_waits_at_the_hub_and_one_that_reads_does_not(
    server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    ask = OneHub.changes
    monkeypatch.setattr(OneHub, "changes", lambda self, since="", wait=0.0: waits.append(wait) or ask(self, since, wait))
    monkeypatch.setattr(remote, "IDLE", 2)
    monkeypatch.setattr(remote, "WAIT", 30.0)
    ours = shards(server.location)
    for _ in range(3):
        ours.look()
    fill(root / "JFK", 1)  # or the next one would wait for long
    assert ours.look()[JFK].end == 101
    for _ in range(5):
        ours.look()
        ours.range(JFK, 0, 1)
    assert waits == [0.0] * 3 + [30.0] + [0.0] * 5
    ours.close()


def test_only_what_is_asked_for_is_seen(server: HubServer, root: Path) -> None:
    fill(root / "E.1.000", 1)
    for selection, topics in (
        (Selection(topics=frozenset({"JFK", "LGA"})), {"JFK"}),
        (Selection(pattern="E.*"), {"EWR", "E"}),
        (Selection(shards=frozenset({EWR})), {"EWR"}),
    ):
        ours = shards(server.location, selection=selection)
        assert {key.topic for key in ours.look()} == topics
        ours.close()


def test_a_shard_without_a_record_does_not_exist_yet_and_a_removed_one_disappears(
    server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvspool.create(root / "LGA", format="kvj").close()
    ours = shards(server.location)
    assert ours.look().keys() == {EWR, JFK}
    monkeypatch.setattr(remote, "EVERYTHING", 0.0)
    shutil.rmtree(root / "EWR")
    ours._hubs[0]._everything_at = 0.0
    eventually(lambda: ours.look().keys() == {JFK})
    with pytest.raises(NotFound, match="no partition 0 of EWR"):
        ours.range(EWR, 0, 1)
    ours.close()


def test_the_first_sequence_of_a_time_is_found(server: HubServer) -> None:
    ours = shards(server.location)
    assert ours.sequence_at(JFK, 0) == 0
    assert ours.sequence_at(JFK, 40_000_000_000) == 39
    assert ours.sequence_at(JFK, 40_000_000_001) == 40
    assert ours.sequence_at(JFK, 100_000_000_001) is None
    ours.close()


def test_the_options_of_a_read_name_hubs(server: HubServer, root: Path) -> None:
    ours = open_shards(ReadOptions.parse({"hub": server.location, "hubTimeout": "5s", "localRoot": str(root), "assign": '{"JFK": [0]}'}))
    assert isinstance(ours, HubShards)
    assert (ours.locations, ours.look().keys()) == ((server.location,), {JFK})
    one = ours.range(JFK, 0, 1)
    assert (one.parts[0].endpoint.timeout, one.local_root) == (5.0, root)
    ours.close()
    for name, value in (("hubTimeout", "5s"), ("localRoot", "/hub")):
        with pytest.raises(ValueError, match=f"option {name} is for hub servers"):
            ReadOptions.parse({"path": "/hub", name: value})


# Records that a task reads.


def test_a_range_is_what_reading_the_log_gives_and_can_be_pickled(server: HubServer, root: Path) -> None:
    ours = shards(server.location, credentials=Credentials(token="kvs_secret"))
    one = ours.range(JFK, 10, 90)
    assert "kvs_secret" not in repr(one) + repr(ours)
    one = pickle.loads(pickle.dumps(one))
    with kvspool.open(root / "JFK") as log:
        expected = pa.Table.from_batches(arrow.batches(log.cursor(10, bounded=True, end=90)))
    assert pa.Table.from_batches(one.batches()) == expected
    assert sequences(ours.range(JFK, 5, 5)) == []
    assert (sequences(ours.range(EWR, 0, 10)), gaps(ours.range(EWR, 0, 10))) == ([0, 1, 2, 9], [(3, 8, "missing")])
    assert (sequences(ours.range(EWR, 4, 7)), gaps(ours.range(EWR, 4, 7))) == ([], [(4, 6, "missing")])
    ours.close()


@pytest.mark.parametrize("names", [{"value"}, {"key", "type"}, {"sequence", "timestamp"}])
def test_only_the_columns_that_are_asked_for_are_sent(server: HubServer, root: Path, names: set[str]) -> None:
    ours = shards(server.location, columns=frozenset(names))
    with kvspool.open(root / "EWR") as log:
        expected = log.read_arrow(0, on_gap="skip").select([name for name in arrow.SCHEMA.names if name in names])
    assert pa.Table.from_batches([item for item in ours.range(EWR, 0, 10).batches() if not isinstance(item, Gap)]) == expected
    ours.close()


def test_what_was_trimmed_since_is_a_gap(server: HubServer, root: Path) -> None:
    path = root / "LGA"
    with kvspool.create(path, format="kvj", segment_bytes=65536) as log:
        for number in range(50):
            log.append(b"%010000d" % number)
        ours = shards(server.location)
        one = ours.range(ShardKey("LGA", 0), 0, 50)
        log.trim(Retention(), before=20)
        first = log.first()
    assert 0 < first <= 20
    assert gaps(one) == [(0, first - 1, "trimmed")]
    assert sequences(one) == list(range(first, 50))
    ours.close()


def test_another_log_at_the_same_path_is_reported(server: HubServer, root: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        with kvspool.create(tmp_path / name, capacity="64KiB") as log:
            log.append_many([b"record"] * 20)
    ship(tmp_path / "one", server.location, "LGA")
    ours = shards(server.location)
    key = ShardKey("LGA", 0)
    assert len(ours.look()[key].log_id) == 32
    one = ours.range(key, 0, 20)
    assert sequences(one) == list(range(20))
    server.close()
    shutil.rmtree(root / "LGA")
    with HubServer(root, listen=server.listener.address) as server:
        with pytest.raises(DataLossError, match=r"\[KVSPOOL_LOG_REPLACED\] topic LGA, partition 0"):
            list(one.batches())
        ship(tmp_path / "other", server.location, "LGA")
        with pytest.raises(DataLossError, match="another log has replaced"):
            list(one.batches())
        with pytest.raises(DataLossError, match="it ends at sequence 20"):
            list(ours.range(key, 0, 20).__class__(key, "", 0, 30, one.parts).batches())
    ours.close()


def test_a_hub_that_sends_something_else_is_found_out(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shards(server.location)
    one = ours.range(JFK, 0, 100)
    items = OneHub.items

    def wrong(self: OneHub, ticket: Ticket, timeout: float | None = None) -> Iterator[Any]:
        for item in items(self, ticket, timeout):
            yield replace(item, first=item.first + 1) if isinstance(item, SequencedBatch) else item

    monkeypatch.setattr(OneHub, "items", wrong)
    with pytest.raises(Malformed, match=r"\[KVSPOOL_DATA_LOSS\].*sequence 0 is missing"):
        list(one.batches())
    ours.close()


def test_damage_in_the_middle_is_a_gap_and_at_the_end_an_error_after_what_is_sound(server: HubServer, root: Path) -> None:
    ours = shards(server.location)
    one = ours.range(JFK, 0, 100)
    (segment,) = (root / "JFK" / "kvj").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b"record 50")] ^= 1
    data[data.index(b"record 99")] ^= 1
    segment.write_bytes(data)
    got = []
    with pytest.raises(ShardDamaged, match=r"\[KVSPOOL_SHARD_DAMAGED\] .*/JFK/0, from sequence 99"):
        for item in one.batches():
            got += [(item.first, item.last, item.reason)] if isinstance(item, Gap) else item.column("sequence").to_pylist()
    assert got == [*range(50), (50, 50, "damaged"), *range(51, 99)]
    ours.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"client": "../JFK"},
        {"client": ""},
        {"shard": 1},
        {"bits": 11},
        {"first": -1},
        {"first": 101},
        {"next": -5},
        {"generations": [Generation("../../etc", 0)]},
        {"generations": [Generation("0" * 32, -1)]},
    ],
)
def test_a_shard_that_cannot_be_is_refused(server: HubServer, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]) -> None:
    ask = OneHub.changes

    def lying(self: OneHub, since: str = "", wait: float = 0.0) -> Any:
        answer = ask(self, since, wait)
        return msgspec.structs.replace(answer, shards=[msgspec.structs.replace(one, **wrong) for one in answer.shards])

    monkeypatch.setattr(OneHub, "changes", lying)
    ours = shards(server.location)
    with pytest.raises(Malformed):
        ours.look()
    ours.close()


def test_a_task_on_the_hubs_own_host_reads_the_directory(server: HubServer, root: Path, tmp_path: Path) -> None:
    ours = shards(server.location, local_root=root, columns=frozenset({"sequence", "value"}))
    one = ours.range(JFK, 10, 20)
    server.close()
    assert sequences(one) == list(range(10, 20))
    assert next(iter(one.batches())).schema.names == ["sequence", "value"]
    hub.create(tmp_path / "other").close()
    hub.root.store.root_id(tmp_path / "other")
    endpoint = endpoints.HubEndpoint(server.location, timeout=0.1)
    parts = tuple(part._replace(endpoint=endpoint) for part in one.parts)
    other = HubRange(JFK, one.log_id, 10, 20, parts, local_root=tmp_path / "other")
    with pytest.raises(Unreachable):
        list(other.batches())
    ours.close()


# A network, and hubs, that fail.


def test_a_stream_that_is_cut_continues_and_nothing_comes_twice(root: Path) -> None:
    big = root / "BIG"
    with kvspool.create(big, format="kvj") as log:
        log.append_many([b"%0200d" % number for number in range(60_000)])
    with HubServer(root) as server, Proxy(server.listener.address) as proxy:
        location = f"grpc://127.0.0.1:{proxy.address[1]}"
        ours = shards(location)
        one = ours.range(ShardKey("BIG", 0), 0, 60_000)
        faults = [proxy.add(Fault(kind, "down", at)) for kind, at in (("cut", 2_500_000), ("reset", 700_000), ("truncate", 3_000_000))]
        endpoints.close_connections()
        assert sequences(one) == list(range(60_000))
        assert [fault.fired for fault in faults] == [1, 1, 1]
        ours.close()


def test_a_network_that_says_nothing_more_is_abandoned_and_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubEndpoint, "stream", 0.3)
    with HubServer(root) as server, Proxy(server.listener.address) as proxy:
        ours = shards(f"grpc://127.0.0.1:{proxy.address[1]}")
        one = ours.range(JFK, 0, 100)
        fault = proxy.add(Fault("half-open", "down", 500))
        assert sequences(one) == list(range(100))
        assert fault.fired == 1
        ours.close()


def test_a_hub_that_is_restarted_is_waited_for(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = HubServer(root).start()
    ours = shards(server.location)
    before = ours.look()
    one = ours.range(JFK, 0, 100)
    server.close()
    with caplog.at_level(logging.WARNING, logger="kvspool"):
        eventually(lambda: ours.look() == before and "doesn't answer" in caplog.text)
    fill(root / "JFK", 5)
    with HubServer(root, listen=server.listener.address):
        eventually(lambda: ours.look()[JFK] == before[JFK]._replace(end=105))
        assert sequences(one) == list(range(100))
    ours.close()


def test_a_hub_that_is_down_for_too_long_is_an_error_that_names_it(root: Path) -> None:
    server = HubServer(root).start()
    ours = shards(server.location, timeout=0.2)
    ours.look()
    one = ours.range(JFK, 0, 100)
    server.close()
    told = rf"\[KVSPOOL_HUB_UNREACHABLE\] {server.location}: hub unreachable since "

    def is_given_up() -> bool:
        try:
            ours.look()
        except Unreachable as error:
            assert told.replace("\\", "") in str(error)
            return True
        return False

    eventually(is_given_up)
    with pytest.raises(Unreachable, match=told):
        list(one.batches())
    new = shards(server.location, timeout=0.1)
    with pytest.raises(Unreachable, match=told):
        new.look()
    for one_of_them in (ours, new):
        one_of_them.close()


def test_another_root_at_the_same_address_is_an_error(root: Path, tmp_path: Path) -> None:
    server = HubServer(root).start()
    ours = shards(server.location)
    ours.look()
    server.close()
    hub.create(tmp_path / "other").close()
    with HubServer(tmp_path / "other", listen=server.listener.address):

        def is_told() -> bool:
            try:
                ours.look()
            except Conflict as error:
                return "[KVSPOOL_HUB_REPLACED]" in str(error)
            return False

        eventually(is_told)
    ours.close()


def test_a_shard_that_cannot_be_read_is_an_error_unless_it_is_being_made(
    server: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "BAD").mkdir()
    (root / "BAD" / "spool.ctl").write_bytes(b"nothing")
    monkeypatch.setattr(remote, "DAMAGE", 0.3)
    ours = shards(server.location)
    with pytest.raises(ShardDamaged, match=r"\[KVSPOOL_SHARD_DAMAGED\] .*topic BAD, partition 0 can't be read"):
        ours.look()
    ours.close()
    chosen = shards(server.location, selection=Selection(topics=frozenset({"JFK"})))
    assert chosen.look().keys() == {JFK}
    chosen.close()


def test_a_fork_of_a_process_that_spoke_to_a_hub_gets_an_error_and_does_not_hang(server: HubServer) -> None:
    ours = shards(server.location)
    one = ours.range(JFK, 0, 100)
    assert sequences(one) == list(range(100))

    def child() -> str:
        try:
            list(one.batches())
        except HubError as error:
            return str(error)
        return ""

    assert "was forked from one that had connected to a hub" in in_child(child, seconds=20)
    assert sequences(one) == list(range(100))
    ours.close()


# Several hubs.


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[HubServer, HubServer]]:
    for name in ("a", "b"):
        hub.create(tmp_path / name).close()
    with HubServer(tmp_path / "a") as a, HubServer(tmp_path / "b") as b:
        yield a, b


def test_clients_of_several_hubs_are_read_as_of_one(two: tuple[HubServer, HubServer], tmp_path: Path) -> None:
    for name, server in zip(("x", "y"), two, strict=True):
        with kvspool.create(tmp_path / name, capacity="64KiB") as log:
            log.append_many([name.encode()] * 5)
        ship(tmp_path / name, server.location, name)
    ours = shards(*(server.location for server in two))
    assert [(key.topic, one.end) for key, one in ours.look().items()] == [("x", 5), ("y", 5)]
    for key in ours.look():
        assert {value for item in ours.range(key, 0, 5).batches() for value in item.column("value").to_pylist()} == {key.topic.encode()}
    ours.close()


def test_a_client_that_moved_is_read_from_both_hubs(two: tuple[HubServer, HubServer], tmp_path: Path) -> None:
    key = ShardKey("c", 0)
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        for number in range(30):
            log.append(b"%d" % number)
        ship(tmp_path / "log", two[0].location, "c")
        for number in range(30, 50):
            log.append(b"%d" % number)
        ship(tmp_path / "log", two[1].location, "c")
    for locations in ([0, 1], [1, 0]):
        ours = shards(*(two[at].location for at in locations))
        assert ours.look()[key][:2] == (0, 50)
        for first, end in ((0, 50), (10, 20), (25, 35), (40, 50)):
            one = ours.range(key, first, end)
            assert sequences(one) == list(range(first, end))
            assert gaps(one) == []
        ours.close()
    alone = shards(two[1].location)
    assert gaps(alone.range(key, 0, 50)) == [(0, 29, "missing")]
    alone.close()


def test_a_client_whose_logs_at_two_hubs_are_others_is_an_error(two: tuple[HubServer, HubServer], tmp_path: Path) -> None:
    for name, server in zip(("x", "y"), two, strict=True):
        with kvspool.create(tmp_path / name, capacity="64KiB") as log:
            log.append(b"record")
        ship(tmp_path / name, server.location, "c")
    ours = shards(*(server.location for server in two))
    with pytest.raises(Conflict, match=r"\[KVSPOOL_CLIENT_AT_TWO_HUBS\] client c, shard 0: .* different logs"):
        ours.look()
    ours.close()


def test_a_running_query_waits_until_the_hubs_know_the_order_of_two_logs(two: tuple[HubServer, HubServer], tmp_path: Path) -> None:
    key = ShardKey("c", 0)
    for name in ("first", "second"):
        with kvspool.create(tmp_path / name, capacity="64KiB") as log:
            log.append(name.encode())
    ship(tmp_path / "first", two[0].location, "c")
    ours = shards("|".join(server.location for server in two))
    assert ours.look()[key].end == 1
    ship(tmp_path / "second", two[1].location, "c")  # the first hub was away then

    def return_to_the_first_hub() -> None:
        eventually(lambda: ours._disputed_since is not None)
        ship(tmp_path / "second", two[0].location, "c")

    with ThreadPoolExecutor(1) as pool:
        returned = pool.submit(return_to_the_first_hub)
        eventually(lambda: ours.look()[key].end == 2)
        returned.result()
    assert [value for item in ours.range(key, 0, 2).batches() for value in item.column("value").to_pylist()] == [b"first", b"second"]
    ours.close()


def test_a_running_query_fails_if_the_order_of_two_logs_stays_unknown(two: tuple[HubServer, HubServer], tmp_path: Path) -> None:
    for name in ("first", "second"):
        with kvspool.create(tmp_path / name, capacity="64KiB") as log:
            log.append(name.encode())
    ship(tmp_path / "first", two[0].location, "c")
    ours = shards("|".join(server.location for server in two), timeout=0.2)
    assert ours.look()[ShardKey("c", 0)].end == 1
    ship(tmp_path / "second", two[1].location, "c")
    with pytest.raises(Conflict, match=r"\[KVSPOOL_CLIENT_AT_TWO_HUBS\]"):
        eventually(lambda: ours.look() and False)
    ours.close()


def test_one_hub_of_two_that_is_down_leaves_the_other_ones_clients(two: tuple[HubServer, HubServer], tmp_path: Path) -> None:
    for name, server in zip(("x", "y"), two, strict=True):
        with kvspool.create(tmp_path / name, capacity="64KiB") as log:
            log.append(b"record")
        ship(tmp_path / name, server.location, name)
    ours = shards(*(server.location for server in two))
    ours.look()
    two[0].close()
    with kvspool.open(tmp_path / "y") as log:
        log.append(b"record")
    ship(tmp_path / "y", two[1].location, "y")
    eventually(lambda: ours.look()[ShardKey("y", 0)].end == 2)
    assert ours.look()[ShardKey("x", 0)].end == 1
    ours.close()


# Rights, and the durable reader.


@pytest.fixture
def guarded(root: Path, tmp_path: Path) -> Iterator[HubServer]:
    """A hub at which spark may read JFK, and other may read all."""
    access = str(tmp_path / "access.toml")
    for name, pattern in (("spark", "JFK"), ("other", "*")):
        words = ["--name", name, "--role", "reader", "--read", pattern, "--output", str(tmp_path / f"{name}.token")]
        assert main(["hub", "token", "add", access, *words]) == 0
    from hub.security.access import Access

    with HubServer(root, access=Access.load(access)) as server:
        yield server


def test_a_wrong_token_and_a_client_that_may_not_be_read_are_errors_at_once(guarded: HubServer, tmp_path: Path) -> None:
    for credentials in (Credentials(), Credentials(token="kvs_12345678_" + "x" * 43)):
        ours = shards(guarded.location, credentials=credentials)
        with pytest.raises(NotAllowed, match=r"\[KVSPOOL_NOT_ALLOWED\] .*refused access"):
            ours.look()
        ours.close()
    spark = Credentials(token_file=tmp_path / "spark.token")
    ours = shards(guarded.location, credentials=spark, selection=Selection(topics=frozenset({"EWR", "JFK"})))
    with pytest.raises(NotAllowed, match=r"\[KVSPOOL_NOT_ALLOWED\] .*may not read client EWR"):
        ours.look()
    ours.close()
    ours = shards(guarded.location, credentials=spark)
    assert ours.look().keys() == {JFK}
    one = ours.range(JFK, 0, 100)
    assert sequences(one) == list(range(100))
    ours.close()
    forbidden = HubRange(EWR, "", 0, 4, one.parts)
    with pytest.raises(NotAllowed, match=r"\[KVSPOOL_NOT_ALLOWED\] .*you may not read client EWR"):
        list(forbidden.batches())


def test_a_new_token_in_the_file_is_taken(guarded: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.security.access.INTERVAL", 0.0)
    path = tmp_path / "mine.token"
    path.touch(0o600)
    path.write_bytes((tmp_path / "spark.token").read_bytes())
    ours = shards(guarded.location, credentials=Credentials(token_file=path))
    one = ours.range(JFK, 0, 100)
    assert sequences(one) == list(range(100))
    access = str(tmp_path / "access.toml")
    assert main(["hub", "token", "revoke", access, path.read_text().split("_")[1]]) == 0
    path.write_bytes((tmp_path / "other.token").read_bytes())
    assert sequences(one) == list(range(100))
    eventually(lambda: ours.look().keys() == {EWR, JFK})
    ours.close()


def test_a_durable_reader_is_at_the_position_of_the_query(server: HubServer, root: Path) -> None:
    ours = shards(server.location, reader="q", selection=Selection(topics=frozenset({"JFK"})))
    ours.look()
    with hub.open(root) as there:
        assert (there.held("JFK", 0), there.held("EWR", 0)) == (0, None)
        ours.commit({JFK: 40, EWR: 3})
        assert there.held("JFK", 0) == 40
        ours.commit({JFK: 100})
        ours.close()
        (found,) = there.readers()
        assert found.lag is not None
        assert (found.name, found.owner, found.lag.records, len(found.lag.shards)) == ("q", "anonymous", 0, 1)
        again = shards(server.location, reader="q", selection=Selection(topics=frozenset({"JFK"})))
        again.look()
        assert there.held("JFK", 0) == 100
        again.close()


def test_a_reader_is_moved_when_the_hub_is_back_and_new_clients_are_held(root: Path) -> None:
    server = HubServer(root).start()
    ours = shards(server.location, reader="q")
    ours.look()
    server.close()
    ours.commit({JFK: 50})
    fill(root / "LGA", 2)
    with HubServer(root, listen=server.listener.address), hub.open(root) as there:
        eventually(lambda: ours.look() and there.held("JFK", 0) == 50)
        eventually(lambda: ours.look() and there.readers()[0].lag is not None and len(there.readers()[0].lag.shards) == 3)
        assert there.held("LGA", 0) == 0
    ours.close()


@pytest.mark.parametrize("kind", [HubFull, QuotaExceeded])
def test_a_hub_that_refuses_for_too_long_is_not_said_to_be_down(kind: type[HubFull | QuotaExceeded]) -> None:
    backoff = Outage("grpc://hub:7070", 0.0)
    with pytest.raises(kind, match=r"^\[KVSPOOL_HUB_REFUSES\] grpc://hub:7070 has answered for 0 s: delete one$"):
        backoff.failed(kind("delete one"))


def outage(backoff: Outage, clock: StoppedClock, call: float) -> float:
    """Return the seconds of failing calls, of `call` seconds each, until the hub counts as unreachable."""
    began = clock.monotonic()
    while True:
        try:
            backoff.begin()
            clock.pass_(call)
            backoff.failed(Unreachable("no route"))
            backoff.pause()
        except Unreachable as error:
            seconds = clock.monotonic() - began
            since = datetime.fromtimestamp(clock.now() / 1e9 - seconds, UTC)
            assert f"hub unreachable since {since:%Y-%m-%d %H:%M}" in str(error)
            return seconds


@pytest.mark.parametrize("call", [0.0, 5.0])
def test_a_hub_counts_as_unreachable_within_the_timeout_since_the_first_call_that_failed(clock: StoppedClock, call: float) -> None:
    backoff = Outage("grpc://hub:7070", 60.0)
    clock.pass_(3600)  # an idle query asks rarely
    assert 60 <= outage(backoff, clock, call) <= 60 + call + FIRST_BACKOFF
    backoff.succeeded()
    assert outage(backoff, clock, call) >= 60


def test_four_attempts_of_a_task_wait_no_longer_than_one(clock: StoppedClock) -> None:
    answered = clock.now() / 1e9
    first = outage(Outage("grpc://hub:7070", 60.0), clock, 1.0)
    repeated = 0.0
    for _ in range(3):
        began = clock.monotonic()
        with pytest.raises(Unreachable, match="hub unreachable since"):
            repeat_until_unreachable(Outage("grpc://hub:7070", 60.0, answered), clock)
        repeated += clock.monotonic() - began
    assert first + repeated <= 60 + FIRST_BACKOFF + 1 + 3 * 1


def repeat_until_unreachable(backoff: Outage, clock: StoppedClock) -> None:
    while True:
        backoff.begin()
        clock.pass_(1.0)
        backoff.failed(Unreachable("no route"))
        backoff.pause()


def test_a_repeated_task_that_was_answered_waits_for_the_hub_again(clock: StoppedClock) -> None:
    backoff = Outage("grpc://hub:7070", 60.0, clock.now() / 1e9 - 3600)
    backoff.succeeded()
    assert outage(backoff, clock, 1.0) >= 60


def test_a_repeated_task_of_a_range_does_not_wait(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HubServer(root).start()
    ours = shards(server.location, timeout=3600.0)
    ours.look()
    one = ours.range(JFK, 0, 100)
    server.close()
    ours.close()
    monkeypatch.setattr("hub.spark.endpoints.is_repeated", lambda: True)
    (part,) = one.parts
    assert part.answered > 0
    late = replace(one, parts=(part._replace(answered=part.answered - 3600),))
    with pytest.raises(Unreachable, match="hub unreachable since"):
        list(late.batches())


def count_attempts(listener: socket.socket) -> int:
    """Return how many connections were opened to a listener."""
    listener.setblocking(False)
    found = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return found
        found += 1


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_hub_that_says_nothing_is_asked_within_the_timeout_and_once_by_a_repeated_task(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_repeated: bool
) -> None:
    """A stream may take longer than the timeout; a hub that is asked first, and says nothing, does not."""
    monkeypatch.setattr("hub.spark.endpoints.is_repeated", lambda: is_repeated)
    monkeypatch.setattr(endpoints, "CALL", 0.1)
    monkeypatch.setattr(endpoints, "AGAIN", 0.1)
    with HubServer(root) as server:
        ours = shards(server.location, timeout=60.0 if is_repeated else 3.0)
        ours.look()
        one = ours.range(JFK, 0, 100)
        ours.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (part,) = one.parts
        silence = replace(part.endpoint, location=f"grpc://127.0.0.1:{silent.getsockname()[1]}")
        late = replace(one, parts=(part._replace(endpoint=silence, answered=part.answered - 3600),))
        with pytest.raises(Unreachable, match="hub unreachable since"):
            list(late.batches())
        attempts = count_attempts(silent)
    assert attempts == 1 if is_repeated else attempts > 1
