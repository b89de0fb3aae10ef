"""The shipper and a hub, with real servers, spools and shard sets: whatever happens to either, the hub has what the client had."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import sleep
from typing import Any

import append_lock
import pytest
from children import start
from processes_of_a_hub import Fault, HubProcess, Process, Proxy
from serving import HubServer
from shipping import contents, eventually, gaps, shipping, stored

import kvspool
import shard
from hub.client import hubs
from hub.client.connection import Connection
from hub.client.hubs import PREFIX
from hub.client.log_sender import PATIENCE, LogSender
from hub.client.shipper import Shipper
from hub.errors import Conflict, Fenced, Restored, ShardDamaged, Unreachable
from hub.protocol.ingest import Put, ResumePoint
from hub.root import stored_shard
from hub.root.store import GENERATIONS, Shard, Store
from kvspool import Codec
from kvspool.errors import LockTimeout, LogVanished, NotALog, ReaderBusy, TooLarge
from kvspool.kernel import frames
from kvspool.queue import ChunkQueue


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


@pytest.fixture
def server(root: Path) -> Iterator[HubServer]:
    with HubServer(root) as server:
        yield server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shippers check often for changes without an event: a deleted or recreated log, a quarantined log that is due."""
    for name in ("hub_shipper.POLL", "hub_shipper.LOOK_AGAIN", "log_sender.LOOK_AGAIN", "log_sender.TRY_AGAIN"):
        monkeypatch.setattr(f"hub.client.{name}", 0.05)


def ship(path: Path, server: HubServer | HubProcess, client: str = "client", **options: Any) -> Shipper:
    """Ship all that is there now."""
    with Shipper(path, options.pop("hub", server.location), client=client, **options) as shipper:
        shipper.run(until_empty=True)
        return shipper


def test_all_kinds_of_records_arrive_as_they_are(server: HubServer, root: Path, path: Path) -> None:
    with kvspool.create(path, capacity="1MiB") as log:
        log.append(b"")
        log.append(b"", key=b"")
        log.append("text", key=b"k" * 300, type=255, timestamp=0)
        log.frame_writer().append(b"\0", b'{"a":[1,null]}', 0, Codec.JSON, 1 << 62)  # of a version that took any time
        log.append_many([b"%d" % number for number in range(20_000)], keys=[b"%d" % (number % 7) for number in range(20_000)])
        ship(path, server)
        assert stored(root / "client") == contents(log)
        assert log.readers()[0].sequence == 20_004


def test_keyed_records_arrive_as_messagepack(server: HubServer, root: Path, path: Path) -> None:
    with kvspool.create(path, codec="keyed") as log:
        for number in range(100):
            log.append({f"key{number % 5}": number, "speed": None})
        ship(path, server)
        assert stored(root / "client") == contents(log)
        with kvspool.open(root / "client") as journal:
            assert [record.data for record in journal.read()] == [record.data for record in log.read()]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("format", ["kvj", "sej"])
def test_a_journal_is_shipped_and_recreated(server: HubServer, root: Path, path: Path, format: Any) -> None:
    with kvspool.create(path, format=format) as log:
        log.append_many([b"%d" % number for number in range(3000)], keys=[b"key"] * 3000)
        ship(path, server)
        assert stored(root / "client") == contents(log)
        with shipping(path, server.location) as shipper:
            log.append(b"more", key=b"")
            eventually(lambda: shipper.status().lanes[0].acknowledged == 3001)
            shutil.rmtree(path)
            with kvspool.create(path, format=format) as new:
                new.append_many([b"new", b"newer"], keys=[b"key"] * 2)
                eventually(lambda: shipper.status().lanes[0].acknowledged == 2)
    assert [row.value for row in stored(root / "client").values()][3000:] == [b"more", b"new", b"newer"]


@pytest.mark.parametrize("count", [1, 6, 7, 11, 12, 13, 24, 500])
def test_a_backlog_is_asked_about_a_few_times_in_a_window_and_at_its_end(
    server: HubServer, root: Path, path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 6 records, a window of 8 batches; nothing but a question of the shipper brings an answer."""
    monkeypatch.setattr("hub.client.hub_shipper.PING_INTERVAL", 1e6)
    asked: list[bool] = []
    send = Connection.put

    def put(connection: Connection, message: Put, batch: Any) -> None:
        asked.append(message.ask)
        send(connection, message, batch)

    monkeypatch.setattr(Connection, "put", put)
    with kvspool.create(path, capacity="1MiB") as log:
        log.append_many([b"%d" % number + b"x" * 1000 for number in range(count)])
        with shipping(path, server.location, batch_bytes=8000, window=64_000) as shipper:
            eventually(lambda: shipper.status().lanes[0].acknowledged == count)
        assert stored(root / "client") == contents(log)
    assert len(asked) >= count // 7
    assert sum(asked) <= len(asked) // 2 + 1


@pytest.mark.parametrize("window", [0, 3000, 32_000])
def test_the_window_holds_for_all_lanes_together(
    server: HubServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Unanswered bytes of the shipper are counted at each batch, of up to 8000 bytes: eight lanes with a backlog."""
    sent: list[tuple[int, int]] = []  # the question that covers a batch, and its bytes
    most = 0
    send = Connection.put

    def put(connection: Connection, message: Put, batch: Any) -> None:
        nonlocal most
        sent.append((connection.asked + 1, batch.nbytes))
        most = max(most, sum(size for question, size in sent if question > connection.answered))
        send(connection, message, batch)

    monkeypatch.setattr(Connection, "put", put)
    with shard.create(tmp_path / "set", bits=3, capacity="1MiB") as logs:
        for log in logs.shards:
            log.append_many([b"x" * 1000] * 100)
        ship(tmp_path / "set", server, batch_bytes=8000, window=window)
        assert all(stored(root / f"client.3.{index:03x}") == contents(log) for index, log in enumerate(logs.shards))
    assert window <= most <= window + 8000


@pytest.mark.parametrize("bits", [0, 2])
def test_nothing_more_is_sent_of_a_shard_that_is_refused_while_a_batch_waits_for_room(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """The last shard is refused. The shipper hears that in its second round: before that comes to it, or when its batch is to be sent."""
    last = (1 << bits) - 1
    sent: list[int] = []
    send, store = Connection.put, Shard.put

    def put(connection: Connection, message: Put, batch: Any) -> None:
        sent.append(message.index)
        send(connection, message, batch)

    def refuse(stored_in: Shard, *arguments: Any) -> Any:
        if stored_in.path.name in ("client", "client.2.003"):
            raise Conflict("other records")
        return store(stored_in, *arguments)

    monkeypatch.setattr(Connection, "put", put)
    monkeypatch.setattr(Shard, "put", refuse)
    with shard.create(tmp_path / "set", prefix="a", bits=bits, capacity="1MiB") as logs:
        for log in logs.shards:
            log.append_many([b"x" * 1000] * 100)
        with pytest.raises(Conflict, match="other records"):
            ship(tmp_path / "set", server, batch_bytes=8000, window=1)
        assert server.clients.of("client").records == 100 * last
    assert sent.count(last) == 1


def test_what_the_hub_stored_before_a_cut_is_not_sent_again(
    server: HubServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was sent is stored when the connection breaks, and none of it acknowledged: but for one record of each lane, which the hub
    compares, nothing comes twice."""
    send, records = Connection.put, 0
    hear = Connection.hear

    def put(connection: Connection, message: Put, batch: Any) -> None:
        nonlocal records
        if records > 100:
            eventually(lambda: server.clients.of("client").records == records)
            monkeypatch.setattr(Connection, "put", send)
            monkeypatch.setattr(Connection, "hear", hear)
            raise Unreachable("cut")
        records += batch.num_rows
        send(connection, message, batch)

    monkeypatch.setattr(Connection, "put", put)
    monkeypatch.setattr(Connection, "hear", lambda _: pytest.fail("there was room in the window"))
    with shard.create(tmp_path / "set", bits=2, capacity="1MiB") as logs:
        for log in logs.shards:
            log.append_many([b"x" * 1000] * 100)
        assert ship(tmp_path / "set", server, batch_bytes=8000).status().outages == 1
        assert server.clients.of("client").duplicates == 4
        assert all(stored(root / f"client.2.{index:03x}") == contents(log) for index, log in enumerate(logs.shards))


def test_large_records_go_alone(server: HubServer, root: Path, path: Path) -> None:
    with kvspool.create(path, capacity="128MiB") as log:
        large = 30 << 20 if frames.TWIN == "compiled" else 3 << 20  # the other twin takes a second for each MiB
        for size in (large, 10, large, 2 << 20, 20):
            log.append(os.urandom(1000) * (size // 1000 + 1))
        ship(path, server)
        assert stored(root / "client") == contents(log)


def test_a_record_that_the_hub_does_not_take_stops_its_shard_alone(root: Path, tmp_path: Path) -> None:
    with shard.create(tmp_path / "set", bits=1, capacity="1MiB") as logs, HubServer(root, largest_batch=10_000) as server:
        logs.shards[0].append(b"x" * 20_000)
        for number in range(500):
            logs.shards[1].append(b"x" * 100 + b"%d" % number)
        with Shipper(tmp_path / "set", server.location, client="client") as shipper, pytest.raises(TooLarge, match="the hub accepts 10000"):
            shipper.run(until_empty=True)
        assert stored(root / "client.1.001") == contents(logs.shards[1])
        assert stored(root / "client.1.000") == {}


def test_a_shard_set_arrives_shard_by_shard(server: HubServer, root: Path, tmp_path: Path) -> None:
    with shard.create(tmp_path / "set", bits=2, capacity="1MiB") as logs:
        for number in range(1000):
            logs.append(b"%d" % number, key=b"key %d" % (number % 50))
        ship(tmp_path / "set", server, "JFK")
        for index, log in enumerate(logs.shards):
            assert stored(root / f"JFK.2.{index:03x}") == contents(log) != {}


def test_what_was_overwritten_is_a_gap_at_the_hub_and_counted_once(server: HubServer, root: Path, path: Path) -> None:
    with kvspool.create(path, capacity=4096) as log:
        log.append_many([b"%d" % number for number in range(30)])
        assert ship(path, server).status().lost == 0
        log.append_many([b"%d" % number for number in range(30, 1000)])
        begin = next(iter(log.read())).sequence
        assert begin > 31
        assert ship(path, server).status().lost == begin - 30
        assert ship(path, server).status().lost == 0
        with kvspool.open(root / "client") as journal:
            assert gaps(journal) == [(30, begin - 1)]
            assert {**contents(journal), **contents(log)} == contents(journal)


def test_a_log_that_is_shipped_already_is_busy(server: HubServer, path: Path) -> None:
    kvspool.create(path).close()
    with Shipper(path, server.location, client="client"), pytest.raises(ReaderBusy):
        Shipper(path, server.location, client="client")
    Shipper(path, server.location, client="client").close()


def test_a_queue_is_not_shipped(server: HubServer, path: Path) -> None:
    ChunkQueue.create(path).close()
    with pytest.raises(NotALog):
        Shipper(path, server.location, client="client")


def test_a_hub_that_is_there_later_gets_all(root: Path, path: Path) -> None:
    with HubProcess(root) as hub, kvspool.create(path) as log:
        hub.kill()
        log.append_many([b"x"] * 100)
        with shipping(path, hub.location) as shipper:
            eventually(lambda: shipper.status().outages > 1)
            assert shipper.status().state in ("waiting", "connecting") and shipper.status().behind == 100
            hub.start()
            eventually(lambda: shipper.status().behind == 0)
        assert stored(root / "client") == contents(log)


@pytest.mark.usefixtures("impatient")
def test_a_log_that_was_recreated_while_it_is_shipped_becomes_a_generation(server: HubServer, root: Path, path: Path) -> None:
    log = kvspool.create(path)
    log.append_many([b"old %d" % number for number in range(10)])
    with shipping(path, server.location) as shipper:
        eventually(lambda: shipper.status().behind == 0 and shipper.status().sent == 10)
        log.append_many([b"last %d" % number for number in range(5)])
        shutil.rmtree(path)
        eventually(lambda: shipper.status().lanes[0].error)
        assert "deleted" in shipper.status().lanes[0].error
        with kvspool.create(path) as new:
            new.append_many([b"new %d" % number for number in range(3)])
            eventually(lambda: not shipper.status().lanes[0].error and shipper.status().lanes[0].acknowledged == 3)
    log.close()
    values = [row.value.partition(b" ")[0] for row in stored(root / "client").values()]
    assert values == [b"old"] * 10 + [b"last"] * 5 + [b"new"] * 3


@pytest.mark.usefixtures("impatient")
def test_a_log_that_vanishes_does_not_stop_the_others(server: HubServer, root: Path, tmp_path: Path) -> None:
    with shard.create(tmp_path / "set", bits=1) as logs, shipping(tmp_path / "set", server.location) as shipper:
        for log in logs.shards:
            log.append(b"one")
        eventually(lambda: shipper.status().behind == 0 and shipper.status().sent == 2)
        shutil.rmtree(logs.shards[0].path)
        eventually(lambda: shipper.status().lanes[0].error)
        logs.shards[1].append(b"two")
        eventually(lambda: len(stored(root / "client.1.001")) == 2)
        with kvspool.create(logs.shards[0].path) as new:
            new.append(b"three")
            eventually(lambda: len(stored(root / "client.1.000")) == 2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("method", ["open", "sync", "next_rows", "commit"])
@pytest.mark.parametrize("error", [LockTimeout("held"), OSError(errno.EMFILE, "too many"), OSError(errno.ENOSPC, "full")], ids=repr)
def test_what_goes_wrong_for_a_while_stops_its_shard_for_a_while(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    error: Exception,
) -> None:
    work, has_failed = getattr(LogSender, method), False

    def fail(sender: LogSender, *arguments: Any) -> Any:
        nonlocal has_failed
        if sender.index == 0 and not has_failed:
            has_failed = True
            raise error
        return work(sender, *arguments)

    with shard.create(tmp_path / "set", bits=1) as logs, HubServer(root, level="disk") as server:
        for log in logs.shards:
            log.append(b"one")
        monkeypatch.setattr(LogSender, method, fail)
        with shipping(tmp_path / "set", server.location) as shipper:
            eventually(lambda: has_failed and shipper.status().behind == 0)
        assert f"shard 0 of client is quarantined for 0 s: {error}" in caplog.text
        for index, log in enumerate(logs.shards):
            assert stored(root / f"client.1.{index:03x}") == contents(log)
            log.append(b"two")
        has_failed = False
        with pytest.raises(type(error)) as caught:
            ship(tmp_path / "set", server)
        assert caught.value is error
        assert stored(root / "client.1.001") == contents(logs.shards[1])


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_is_held_for_too_long_stops_its_shard_until_it_is_free(root: Path, tmp_path: Path) -> None:
    with shard.create(tmp_path / "set", bits=1, format="kvj") as logs, HubServer(root, level="disk") as server:
        one, two = logs.shards
        with shipping(tmp_path / "set", server.location) as shipper, kvspool.open(one.path, format="kvj") as other:
            assert {sender.log.timeout for sender in shipper.hubs[0].senders} == {PATIENCE}  # type: ignore[union-attr]
            one.append(b"one")
            with append_lock.held(other):
                eventually(lambda: shipper.status().lanes[0].error)
                assert "no lock within" in shipper.status().lanes[0].error
                two.append(b"two")
                eventually(lambda: len(stored(root / "client.1.001")) == 1)
            eventually(lambda: shipper.status().behind == 0 and not shipper.status().lanes[0].error)
        assert stored(root / "client.1.000") == contents(one)


def test_a_shard_that_is_locked_at_the_hub_holds_up_no_other(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program that appends to it is stopped: the call continues with the other shards, and a later one takes the shard again."""
    monkeypatch.setattr(stored_shard, "PATIENCE", 0.05)
    with shard.create(tmp_path / "set", bits=1) as logs, HubServer(root) as server:
        for log in logs.shards:
            log.append(b"one")
        ship(tmp_path / "set", server)
        with shipping(tmp_path / "set", server.location) as shipper, kvspool.open(root / "client.1.000", format="kvj") as other:
            with append_lock.held(other):
                logs.shards[0].append(b"two")
                eventually(lambda: "no lock within" in shipper.status().lanes[0].error)
                for number in range(3):
                    logs.shards[1].append(b"two")
                    eventually(lambda number=number: len(stored(root / "client.1.001")) == 2 + number)
                assert shipper.status().outages == 0
            eventually(lambda: shipper.status().behind == 0)
            assert shipper.status().outages == 0
        for index, log in enumerate(logs.shards):
            assert stored(root / f"client.1.{index:03x}") == contents(log)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("obstacle", ["busy", "empty"])
def test_a_recreated_log_that_can_not_be_taken_at_once_is_taken_later(
    server: HubServer, root: Path, tmp_path: Path, obstacle: str
) -> None:
    """Another process has its durable reader, or it is being created: only its directory is there. The others continue."""
    with shard.create(tmp_path / "set", bits=1) as logs, shipping(tmp_path / "set", server.location) as shipper:
        for log in logs.shards:
            log.append(b"one")
        eventually(lambda: shipper.status().behind == 0 and shipper.status().sent == 2)
        path = logs.shards[0].path
        with kvspool.create(tmp_path / "new") as new:
            new.append(b"three")
            reader = new.reader(PREFIX + hubs.name(server.location))
            shutil.rmtree(path)
            if obstacle == "busy":
                os.rename(tmp_path / "new", path)
            else:
                reader.close()
                path.mkdir()
            expected = "is open in process" if obstacle == "busy" else "neither a log"
            eventually(lambda: expected in shipper.status().lanes[0].error)
            logs.shards[1].append(b"two")
            eventually(lambda: len(stored(root / "client.1.001")) == 2)
            reader.close()
            if obstacle == "empty":
                os.rename(tmp_path / "new", path)
            eventually(lambda: len(stored(root / "client.1.000")) == 2)


def test_what_can_not_pass_stops_its_shard_for_good(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with shard.create(tmp_path / "set", bits=1, capacity="1MiB") as logs, HubServer(root, largest_batch=10_000) as server:
        logs.shards[0].append(b"x" * 20_000)
        with shipping(tmp_path / "set", server.location) as shipper:
            eventually(lambda: shipper.status().lanes[0].error)
            assert shipper.hubs[0].senders[0].retry_at is None
        assert "shard 0 of client is quarantined until the shipper is restarted: " in caplog.text


def test_a_hub_that_fails_as_a_whole_is_waited_for(
    server: HubServer, root: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.client.hub_shipper.ASK_AGAIN", 0.1)
    enter = Store.enter

    def fail(*_: Any) -> None:
        raise ValueError("a bug of the hub")

    monkeypatch.setattr(Store, "enter", fail)
    with kvspool.create(path) as log:
        log.append(b"one")
        with pytest.raises(ShardDamaged, match="its own log has the reason"):
            ship(path, server)
        with shipping(path, server.location) as shipper:
            eventually(lambda: shipper.status().outages > 1)
            assert "its own log has the reason" in shipper.status().error
            monkeypatch.setattr(Store, "enter", enter)
            eventually(lambda: shipper.status().behind == 0)
        assert stored(root / "client") == contents(log)


@pytest.fixture
def second(tmp_path: Path) -> Iterator[HubServer]:
    """Another hub."""
    (tmp_path / "second").mkdir()
    with HubServer(tmp_path / "second") as server:
        yield server


def test_a_log_that_moves_continues_after_what_the_first_hub_has_and_loses_nothing(
    server: HubServer, second: HubServer, tmp_path: Path, path: Path
) -> None:
    with kvspool.create(path) as log:
        log.append_many([b"%d" % number for number in range(100)])
        ship(path, server)
        log.append(b"new")
        status = ship(path, second).status()
        assert (status.sent, status.lost, status.behind) == (1, 0, 0)
        assert list(stored(tmp_path / "second" / "client")) == [100]
        (client,) = second.status().clients
        assert (client.gaps, client.lost) == (0, 0)  # the first hub has the others
        log.append(b"newer")
        status = ship(path, second).status()
        assert (status.sent, status.lost) == (2, 0)  # the last one that the hub has, too
        assert list(stored(tmp_path / "second" / "client")) == [100, 101]


@pytest.mark.parametrize("call", ["__init__", "put"])
def test_a_move_that_is_interrupted_before_anything_arrived_continues_where_it_began(
    server: HubServer, second: HubServer, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The shipper is killed before it has reached the new hub, or when that knows the log and has no record of it."""
    with kvspool.create(path) as log:
        log.append_many([b"%d" % number for number in range(100)])
        ship(path, server)
        log.append_many([b"new", b"newer"])
        with monkeypatch.context() as patched:

            def cut(*_: Any) -> None:
                raise Unreachable("cut")

            patched.setattr(Connection, call, cut)
            with shipping(path, second.location) as shipper:
                eventually(lambda: shipper.status().outages)
        status = ship(path, second).status()
        assert (status.sent, status.lost) == (2, 0)
        assert list(stored(tmp_path / "second" / "client")) == [100, 101]


def test_a_hub_that_has_acknowledged_something_after_a_move_and_lost_it_gets_all_that_is_there(path: Path) -> None:
    with kvspool.create(path) as log:
        log.append_many([b"x"] * 10)
        log.reader(f"{PREFIX}first", "latest").close()
        log.append_many([b"x"] * 10)
        with closing(LogSender(0, log, "grpc://second:1")) as sender:
            sender.open(ResumePoint(0, 0, False), "appended")
            assert (sender.acked, sender.behind) == (10, 10)
            sender.acknowledge(15)
            sender.open(ResumePoint(0, 0, False), "appended")
            assert (sender.acked, sender.behind) == (0, 20)


def test_records_overwritten_after_a_move_are_lost_and_those_before_it_are_not(
    server: HubServer, second: HubServer, tmp_path: Path, path: Path
) -> None:
    with kvspool.create(path, capacity=4096) as log:
        log.append_many([b"%d" % number for number in range(30)])
        ship(path, server)
        log.append_many([b"%d" % number for number in range(30, 1000)])
        begin = next(iter(log.read())).sequence
        assert ship(path, second).status().lost == begin - 30 > 0
        with kvspool.open(tmp_path / "second" / "client") as journal:
            assert gaps(journal) == [(0, begin - 1)]


def test_a_hub_that_lost_everything_gets_all_that_is_there_though_another_one_is_ahead(
    server: HubServer, second: HubServer, tmp_path: Path, path: Path
) -> None:
    with kvspool.create(path) as log:
        for hub in (second, server):
            log.append_many([b"%d" % number for number in range(10)])
            ship(path, hub)
        shutil.rmtree(tmp_path / "second" / "client")
        ship(path, second)
        assert stored(tmp_path / "second" / "client") == contents(log)


def test_until_empty_says_that_the_log_vanished(server: HubServer, path: Path) -> None:
    kvspool.create(path).close()
    with Shipper(path, server.location, client="client") as shipper:
        shutil.rmtree(path)
        shipper.hubs[0].senders[0].fail(LogVanished("gone"))
        with pytest.raises(LogVanished):
            shipper.run(until_empty=True)


def test_a_log_that_was_restored_is_refused_for_good(server: HubServer, root: Path, path: Path, tmp_path: Path) -> None:
    with kvspool.create(path) as log:
        log.append_many([b"one", b"two"])
    shutil.copytree(path, tmp_path / "backup")
    with kvspool.open(path) as log:
        log.append(b"three")
        ship(path, server)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    with pytest.raises(Restored, match="older state"):
        ship(path, server)
    with kvspool.open(path) as log:
        log.append(b"another third")
    with pytest.raises(Conflict, match="record 2 was sent again"):
        ship(path, server)
    assert [row.value for row in stored(root / "client").values()] == [b"one", b"two", b"three"]


def test_a_restored_log_whose_last_shipped_record_was_overwritten_is_refused(
    server: HubServer, root: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub can't compare its last record any more. The time of the backup's last heartbeat shows where the log comes from."""
    with kvspool.create(path, capacity=4096) as log:
        log.append_many([b"%d" % number for number in range(10)])
    ship(path, server)
    shutil.copytree(path, tmp_path / "backup")
    monkeypatch.setattr("hub.client.log_sender.RESTORED_AFTER", 0)
    with kvspool.open(path) as log:
        log.append_many([b"%d" % number for number in range(10, 20)])
    ship(path, server)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    with kvspool.open(path) as log:
        log.append_many([b"another %d" % number for number in range(10, 500)])
        assert log.extent()[0] > 20
    for _ in range(2):  # the refused shipper's heartbeats don't hide it
        with pytest.raises(Restored, match="restored from an older state"):
            ship(path, server)
    assert [row.value for row in stored(root / "client").values()] == [b"%d" % number for number in range(20)]


def test_a_log_whose_shipper_was_killed_is_not_refused_as_restored(server: HubServer, root: Path, path: Path) -> None:
    """The hub has more than the durable reader says, and its last record was overwritten before the shipper is started again."""
    with kvspool.create(path, capacity=4096) as log:
        log.append_many([b"%d" % number for number in range(20)])
        ship(path, server)
        with log.reader(PREFIX + hubs.name(server.location)) as reader:
            reader.seek(5)
            reader.commit()
        log.append_many([b"%d" % number for number in range(20, 500)])
        begin = log.extent()[0]
        assert begin > 20
        assert ship(path, server).status().lost == begin - 20
        with kvspool.open(root / "client") as journal:
            assert gaps(journal) == [(20, begin - 1)]


@pytest.mark.usefixtures("impatient")
def test_a_log_that_was_damaged_is_shipped_on_once_it_is_repaired(server: HubServer, root: Path, tmp_path: Path) -> None:
    with shard.create(tmp_path / "set", bits=1, format="kvj") as logs:
        one, two = logs.shards
        for log in (one, two):
            log.append_many([b"record %03d" % number for number in range(100)])
        segment = next((one.path / "kvj").iterdir())
        at = segment.read_bytes().index(b"record 099")  # the last one: no later frame shows how much is damaged
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(b"RECORD")
        with shipping(tmp_path / "set", server.location) as shipper:
            eventually(lambda: "no frame is found" in shipper.status().lanes[0].error)
            two.append(b"more")
            eventually(lambda: len(stored(root / "client.1.001")) == 101)
            connections = server.status().clients[0].connections
            retries = shipper.hubs[0].senders[0].retry_at
            eventually(lambda: shipper.hubs[0].senders[0].retry_at != retries)  # it was looked at again, and is still damaged
            assert server.status().clients[0].connections == connections == 1
            kvspool.repair(one.path)
            with kvspool.open(one.path, format="kvj") as repaired:
                repaired.append(b"after the repair")
            eventually(lambda: not shipper.status().lanes[0].error and shipper.status().behind == 0)
            assert shipper.status().outages == 0
        assert stored(root / "client.1.000") == contents(one)
        assert gaps(one) == [(99, 99)]


def test_a_log_that_was_replaced_by_another_is_fenced(server: HubServer, root: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        with kvspool.create(tmp_path / name) as log:
            log.append(name.encode())
        ship(tmp_path / name, server)
    with pytest.raises(Fenced):
        ship(tmp_path / "one", server)
    assert [row.value for row in stored(root / "client").values()] == [b"one", b"two"]


def test_another_number_of_shards_is_a_conflict(server: HubServer, path: Path, tmp_path: Path) -> None:
    kvspool.create(path).close()
    ship(path, server)
    shard.create(tmp_path / "set", bits=1).close()
    with pytest.raises(Conflict, match="has 1 shards here, not 2"):
        ship(tmp_path / "set", server)


def test_a_shard_that_is_damaged_at_the_hub_stops_alone_and_continues_when_it_is_repaired(
    server: HubServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.client.log_sender.ASK_AGAIN", 0.2)
    with shard.create(tmp_path / "set", bits=1) as logs:
        for log in logs.shards:
            log.append_many([b"one", b"two"])
        ship(tmp_path / "set", server)
        table = root / "client.1.000" / GENERATIONS
        good = table.read_bytes()
        table.write_bytes(b"garbage")
        for log in logs.shards:
            log.append(b"three")
        with pytest.raises(ShardDamaged, match="table of generations"):
            ship(tmp_path / "set", server)
        assert len(stored(root / "client.1.001")) == 3
        with shipping(tmp_path / "set", server.location) as shipper:
            eventually(lambda: shipper.status().lanes[0].error)
            table.write_bytes(good)
            eventually(lambda: shipper.status().behind == 0)
        assert stored(root / "client.1.000") == contents(logs.shards[0])


def test_a_log_may_be_resized_while_it_is_shipped(server: HubServer, root: Path, path: Path) -> None:
    with kvspool.create(path, capacity="64KiB") as log, shipping(path, server.location) as shipper:
        for size in ("128KiB", "32KiB", "1MiB", "64KiB"):
            log.append_many([b"x" * 50] * 100)
            eventually(lambda: shipper.status().behind == 0)
            kvspool.resize(path, size)
        log.append_many([b"y"] * 10)
        eventually(lambda: shipper.status().behind == 0)
        assert list(stored(root / "client")) == list(range(410))


def test_writers_that_wait_for_the_shipper_lose_nothing_through_an_outage(root: Path, path: Path) -> None:
    """A ring of 4 KiB whose writers wait; the hub is stopped, then killed, for longer than writers wait for a silent reader."""
    log = kvspool.create(path, capacity=4096, policy="block", reader_expiry=2)
    with HubProcess(root, "disk") as hub, shipping(path, hub.location, silence=3) as shipper:
        writing = start(lambda: write(path, 600))
        eventually(lambda: shipper.status().sent > 100)
        hub.stop()
        eventually(lambda: shipper.status().outages)
        hub.kill()
        eventually(lambda: shipper.status().outages > 1)
        assert shipper.status().behind > 0 and not log.readers()[0].expired
        hub.start()
        writing()
        eventually(lambda: shipper.status().behind == 0)
        assert shipper.status().lost == 0
    assert [row.value for row in stored(root / "client").values()] == [b"%d" % number for number in range(600)]
    log.close()


def write(path: Path, count: int) -> None:
    with kvspool.open(path, timeout=60) as log:
        for number in range(count):
            log.append(b"%d" % number)


def test_synced_records_alone_are_shipped_to_a_hub_that_is_on_disk(root: Path, path: Path) -> None:
    with kvspool.create(path) as log, HubServer(root, level="disk") as server:
        log.append_many([b"%d" % number for number in range(100)])
        ship(path, server)
        assert log.stats().synced_sequence == 100
        assert stored(root / "client") == contents(log)


def test_shippers_and_hubs_that_are_killed_and_stopped_lose_nothing(root: Path, path: Path) -> None:
    with kvspool.create(path, capacity="64KiB", policy="block", reader_expiry=60) as log, HubProcess(root) as hub:
        ship(path, hub)
        with Process("ship", path, hub.location, "client", 1) as shipper:
            writing = start(lambda: write(path, 10_000))
            for turn in range(4):
                end = log.end()
                eventually(lambda end=end: log.readers()[0].sequence > end or log.end() == 10_000)
                (hub, shipper)[turn % 2].stop()
                sleep(0.05)
                (hub, shipper)[turn % 2].kill()
                (hub, shipper)[turn % 2].start()
            hub.stop()
            sleep(1.5)  # longer than the shipper waits for it
            hub.go_on()
            writing()
            eventually(lambda: log.readers()[0].sequence == 10_000)
    assert [row.value for row in stored(root / "client").values()] == [b"%d" % number for number in range(10_000)]


def test_a_network_that_is_slower_than_the_shipper_is_patient_gets_it_all_through(root: Path, path: Path) -> None:
    """One record takes 1.5 s on its way; at first the shipper waits less than that for its acknowledgement."""
    with HubProcess(root) as hub, Proxy(("127.0.0.1", hub.port)) as proxy, kvspool.create(path, capacity="4MiB") as log:
        slow = proxy.add(Fault("bandwidth", amount=200_000, times=None))
        log.append(os.urandom(300_000))
        with Shipper(path, f"grpc://127.0.0.1:{proxy.address[1]}", client="client", silence=0.5) as shipper:
            shipper.run(until_empty=True)
            assert shipper.status().outages > 0 and slow.fired > 1
        assert stored(root / "client") == contents(log)


@pytest.mark.parametrize("kind", ["cut", "reset", "half-open", "stall", "truncate", "duplicate"])
def test_a_connection_that_breaks_during_a_batch_costs_nothing(root: Path, path: Path, kind: str) -> None:
    with HubProcess(root) as hub, Proxy(("127.0.0.1", hub.port)) as proxy, kvspool.create(path) as log:
        broken = proxy.add(Fault("cut" if kind == "duplicate" else kind, at=20_000))
        if kind == "duplicate":
            again = proxy.add(Fault(kind))
        log.append_many([b"%d" % number for number in range(5000)])
        ship(path, hub, silence=1.0, hub=f"grpc://127.0.0.1:{proxy.address[1]}")
        assert broken.fired == 1
        if kind == "duplicate":
            assert again.fired == 1
        assert stored(root / "client") == contents(log)
