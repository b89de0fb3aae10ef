"""Durable readers that are moved over the network: whose they are, what they hold back, and what is refused."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import Run
from pyarrow import flight
from serving import HubServer

import hub
import kvspool
from hub.client.connection import Security
from hub.client.remote import RemoteHub
from hub.errors import Conflict, Malformed, NotAllowed, NotFound, QuotaExceeded, ShardDamaged, Unexpected
from hub.protocol import reading
from hub.protocol.reading import CommitPositions, ReaderPlace
from hub.root import positions
from hub.root.lease import ReaderLease
from hub.root.positions import Key, Position, StoredPositions
from hub.security.access import Access
from hub.server import consumers
from hub.server.consumers import Consumers
from hub.server.shard_index import ShardIndex
from kvspool import system
from kvspool.cli import main
from kvspool.engine import locks
from kvspool.errors import ReaderBusy
from kvspool.journal import Retention


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root with ten records in a journal, JFK, and in a spool, EWR."""
    hub.create(tmp_path / "root").close()
    for name, options in (("JFK", {"format": "kvj"}), ("EWR", {"capacity": "64KiB"})):
        with kvspool.create(tmp_path / "root" / name, **options) as log:
            log.append_many([b"record"] * 10)
    return tmp_path / "root"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An access file, and the tokens: a and b may read JFK, all everything, boss is the admin."""
    path = tmp_path_factory.mktemp("secrets")
    for name, *words in (("a", "--read", "JFK"), ("b", "--read", "JFK"), ("all", "--read", "*"), ("boss",)):
        role = ["--role", "admin" if name == "boss" else "reader"]
        command = ["hub", "token", "add", str(path / "access.toml"), "--name", name, *role, *words, "--output", str(path / name)]
        assert main(command) == 0
    return path


@pytest.fixture
def server(root: Path, secrets: Path) -> Iterator[HubServer]:
    """A hub that lets these in."""
    with HubServer(root, access=Access.load(secrets / "access.toml")) as server:
        yield server


@pytest.fixture
def connect(server: HubServer, secrets: Path) -> Iterator[dict[str, RemoteHub]]:
    """The hub as everybody sees it."""
    hubs = {name: RemoteHub(server.location, security=Security((secrets / name).read_text().strip())) for name in ("a", "b", "all", "boss")}
    yield hubs
    for one in hubs.values():
        one.close()


def test_a_reader_is_moved_in_the_shards_that_are_named_and_stays_in_the_others(connect: dict[str, RemoteHub], root: Path) -> None:
    assert connect["all"].commit("q", {("JFK", 0): 3}).places == 1
    assert connect["all"].commit("q", {("EWR", 0): 10, ("LGA", 0): 1}) == reading.Committed(2, missing=1)
    assert connect["all"].commit("q", {("JFK", 0): 2}).places == 2
    (found,) = connect["all"].readers()
    assert (found.name, found.owner) == ("q", "all")
    assert found.places == [ReaderPlace("EWR", 0, 10), ReaderPlace("JFK", 0, 2)]
    stored = positions.load(positions.path_of(root, "q"))
    assert stored is not None and stored.places[("EWR", 0)].log and stored.places[("JFK", 0)].log


def test_it_holds_back_what_it_has_a_place_in_and_nothing_else(connect: dict[str, RemoteHub], root: Path) -> None:
    connect["a"].commit("q", {})
    with hub.open(root) as there:
        assert (there.held("JFK", 0), there.held("EWR", 0)) == (None, None)
        connect["a"].commit("q", {("JFK", 0): 4})
        assert (there.held("JFK", 0), there.held("EWR", 0)) == (4, None)
        (found,) = there.readers()
        assert found.lag is not None and (found.owner, found.lag.records, len(found.lag.shards)) == ("a", 6, 1)
        with pytest.raises(ReaderBusy, match="the reader 'q' belongs to a"):
            there.reader("q")


def test_retention_follows_it(connect: dict[str, RemoteHub], server: HubServer, root: Path) -> None:
    from hub.root.trimmer import Trimmer

    with kvspool.create(root / "LGA", format="kvj", segment_bytes=65536) as log:
        for number in range(40):
            log.append(b"%010000d" % number)
    trimmer, rules = Trimmer(root), Retention(by_consumers=True)
    firsts = []
    for place in (0, 20, 40):
        connect["all"].commit("q", {("LGA", 0): place})
        trimmer.trim("LGA", rules)
        with kvspool.open(root / "LGA") as log:
            firsts.append(log.first())
    assert firsts[0] == 0 < firsts[1] <= 20 < firsts[2]


def test_a_reader_is_its_owners_alone(connect: dict[str, RemoteHub], root: Path) -> None:
    connect["a"].commit("q", {("JFK", 0): 3})
    for name in ("b", "all", "boss"):
        with pytest.raises(NotAllowed, match=r"the reader 'q' belongs to a|may not read"):
            connect[name].commit("q", {("JFK", 0): 9})
    assert connect["b"].readers() == []
    with pytest.raises(NotFound):
        connect["b"].delete_reader("q")
    with hub.open(root) as there:
        assert there.held("JFK", 0) == 3
        there.reader("local").close()
    with pytest.raises(NotAllowed, match="belongs to the hub's own host"):
        connect["a"].commit("local", {("JFK", 0): 9})
    assert [one.name for one in connect["boss"].readers()] == ["q"]
    connect["boss"].delete_reader("q")
    assert connect["a"].readers() == []
    connect["a"].commit("q", {})
    connect["a"].delete_reader("q")


def test_what_may_not_be_read_is_not_moved_in(connect: dict[str, RemoteHub], root: Path) -> None:
    for client in ("EWR", "LGA"):
        with pytest.raises(NotAllowed, match=f"may not read client {client}"):
            connect["a"].commit("q", {("JFK", 0): 1, (client, 0): 1})
    assert positions.names(root) == []


NO_COMMITS = [
    b"",
    b"[]",
    b'{"reader": "q"}',
    b'{"reader": "../q", "places": []}',
    b'{"reader": "", "places": []}',
    b'{"reader": "q", "places": [{"client": "../JFK", "shard": 0, "next": 1}]}',
    b'{"reader": "q", "places": [{"client": "JFK", "shard": -1, "next": 1}]}',
    b'{"reader": "q", "places": [{"client": "JFK", "shard": 1024, "next": 1}]}',
    b'{"reader": "q", "places": [{"client": "JFK", "shard": 0, "next": -1}]}',
    b'{"reader": "q", "places": [{"client": "JFK", "shard": 0, "next": 9223372036854775807}]}',
    b'{"reader": "q", "places": [{"client": "JFK", "shard": 0, "next": 1.5}]}',
    b'{"reader": "q", "places": [{"client": "JFK", "shard": 0, "next": 1, "x": 1}]}',
    b'{"reader": "q", "places": [{"client": "JFK", "shard": 0, "next": 1}, {"client": "JFK", "shard": 0, "next": 2}]}',
    b'{"reader": "q", "places": []}' + b" " * reading.LARGEST_COMMIT,
]


def test_what_is_no_commit_is_refused_and_nothing_is_stored(connect: dict[str, RemoteHub], root: Path) -> None:
    for body in NO_COMMITS:
        with pytest.raises(Malformed):
            connect["a"]._hub._act("commit-positions", body, reading.Committed)
    assert positions.names(root) == []


def test_a_sequence_that_is_not_written_is_refused(connect: dict[str, RemoteHub], root: Path) -> None:
    with pytest.raises(Unexpected) as raised:
        connect["a"].commit("q", {("JFK", 0): 11})
    assert raised.value.expected == 10
    assert positions.names(root) == []
    assert not list(root.glob(".hub/readers/*"))  # nor a lock


def test_there_are_so_many_readers_and_no_more(connect: dict[str, RemoteHub], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "MOST_OF_ONE", 2)
    monkeypatch.setattr(consumers, "MOST_READERS", 3)
    for name in ("q", "r"):
        connect["a"].commit(name, {})
    with pytest.raises(QuotaExceeded, match="a has 2 durable readers"):
        connect["a"].commit("s", {})
    connect["a"].commit("q", {("JFK", 0): 1})
    connect["b"].commit("s", {})
    with pytest.raises(QuotaExceeded, match="of at most 3"):
        connect["b"].commit("t", {})
    assert sorted(path.name for path in root.glob(".hub/readers/*.lock")) == ["q.lock", "r.lock", "s.lock"]
    too_many = CommitPositions("q", [ReaderPlace("JFK", index, 0) for index in range(consumers.MOST_PLACES + 1)])
    with pytest.raises(Malformed, match="up to 8,192 shards"):
        connect["a"]._hub._act("commit-positions", msgspec.json.encode(too_many), reading.Committed)


def test_more_places_than_fit_go_in_several_calls(connect: dict[str, RemoteHub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_PLACES", 1)
    assert connect["all"].commit("q", {("JFK", 0): 1, ("EWR", 0): 2, ("LGA", 0): 3}) == reading.Committed(2, missing=1)


def test_a_damaged_file_is_an_error_and_is_not_replaced(connect: dict[str, RemoteHub], root: Path) -> None:
    connect["a"].commit("q", {("JFK", 0): 1})
    path = positions.path_of(root, "q")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ShardDamaged):
        connect["a"].commit("q", {("JFK", 0): 2})
    assert connect["boss"].readers() == []
    with hub.open(root) as there:
        assert there.held("EWR", 0) == 0  # it may stand anywhere


def test_a_reader_whose_name_is_taken_at_this_moment_is_a_conflict(connect: dict[str, RemoteHub], root: Path) -> None:
    positions.make_directory(root)
    with closing(ReaderLease(positions.path_of(root, "q").with_suffix(".lock"), "q")), pytest.raises(Conflict, match="is already open"):
        connect["a"].commit("q", {})
    with hub.open(root) as there, there.reader("r"), pytest.raises(NotAllowed, match="belongs to the hub's own host"):
        connect["a"].commit("r", {})


def test_a_shard_that_went_is_forgotten_with_the_next_commit(server: HubServer, connect: dict[str, RemoteHub], root: Path) -> None:
    connect["all"].commit("q", {("JFK", 0): 1, ("EWR", 0): 2})
    shutil.rmtree(root / "EWR")
    assert connect["all"].commit("q", {("JFK", 0): 2}).places == 1


def test_the_actions_are_listed(server: HubServer, secrets: Path) -> None:
    with flight.FlightClient(server.location) as client:
        options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer " + (secrets / "a").read_bytes().strip())])
        assert {name for name, _ in consumers.ACTIONS} <= {action.type for action in client.list_actions(options)}


def test_the_command_shows_whose_it_is_and_deletes_it(
    connect: dict[str, RemoteHub], root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    connect["a"].commit("q", {("JFK", 0): 4})
    assert "moved by a" in run("hub", "readers", root).out
    (found,) = run("hub", "readers", root, "--json").object
    assert (found["name"], found["owner"], found["lag"]["records"]) == ("q", "a", 6)
    run("hub", "readers", root, "--delete", "q")
    assert connect["a"].readers() == []


def test_the_page_counts_only_shards_in_which_it_has_a_place(server: HubServer, connect: dict[str, RemoteHub]) -> None:
    from hub.server.lag_monitor import LagMonitor

    connect["a"].commit("q", {("JFK", 0): 4})
    server.store.count(0)
    lags = LagMonitor(server.root)
    lags.look(server.store.sizes)
    assert [(one.name, one.lag) for one in lags.statuses] == [("q", 6)]


def test_the_page_shows_the_workers_and_the_counts_of_a_task_list(server: HubServer) -> None:
    from hub.server.lag_monitor import LagMonitor

    server.store.count(0)
    with hub.open(server.root) as root, root.tasks("mails", max_deliveries=2) as worker:
        done, back, later, bad = worker.take(4)
        done.ack()
        back.retry()
        later.retry(delay=1000)
        bad.reject("no address")
        given = 0
        while (again := worker.take(1)[0]).deliveries == 1:
            given += 1
        again.retry()  # for the last time
        monitor = LagMonitor(server.root)
        monitor.look(server.store.sizes)
    (status,) = monitor.statuses
    found = status.tasks
    assert found is not None
    assert (status.name, status.lag, status.members) == ("mails", 17, [])
    assert (found.given, found.waiting, found.delayed, found.retried, found.dead) == (given, 17 - given, 1, 1, 2)
    assert (found.window, found.used, found.waits_for) == (65536, given + 2, [])
    assert [one.tasks for one in found.workers] == [given]
    assert f"process {os.getpid()}" in found.workers[0].process


def test_the_file_has_an_owner_and_any_other_byte_is_noticed() -> None:
    places = {("a", 0): Position(1, 77, "0" * 32, 5), ("b", 0): Position(0, 1)}
    content = positions.pack(places, "spark")
    assert content.startswith(b"kvspool-hub-positions 2 ")
    assert positions.parse(content) == StoredPositions(places, "spark")
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        with pytest.raises((ValueError, kvspool.errors.UnknownVersion)):
            positions.parse(bytes(changed))


def test_a_commit_looks_at_the_root_once_whatever_it_names(
    server: HubServer, connect: dict[str, RemoteHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    find_paths = ShardIndex._find_paths

    def find(self: ShardIndex) -> None:
        looks.append(self.root)
        find_paths(self)

    monkeypatch.setattr(ShardIndex, "_find_paths", find)
    answer = connect["all"].commit("r", {("JFK", 0): 5} | {("XXX", shard): 0 for shard in range(100)})
    assert (answer.places, answer.missing) == (1, 100)
    assert len(looks) == 1


def test_a_commit_that_takes_long_holds_up_no_other(
    server: HubServer, connect: dict[str, RemoteHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    place = Consumers._place

    def slow(self: Consumers, key: Key, path: Path, next: int) -> Position:
        if key == ("EWR", 0):
            begun.set()
            assert goes_on.wait(20)
        return place(self, key, path, next)

    monkeypatch.setattr(Consumers, "_place", slow)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(connect["all"].commit, "slow", {("EWR", 0): 5})
        try:
            assert begun.wait(20)
            assert connect["a"].commit("quick", {("JFK", 0): 5}).places == 1
        finally:
            goes_on.set()
        assert waits.result(20).places == 1


def test_a_lease_that_is_dropped_frees_the_name_though_a_forked_child_has_the_descriptor(tmp_path: Path) -> None:
    lease = ReaderLease(tmp_path / "r.lock", "r")
    assert lease._file is not None
    child_s = os.dup(lease._file.number)  # what a child has until it runs a program of its own
    try:
        del lease
        gc.collect()
        ReaderLease(tmp_path / "r.lock", "r").close()
    finally:
        os.close(child_s)


class Alarm(Exception):
    """Raised by a signal handler."""


def test_an_exception_out_of_a_signal_handler_comes_through_a_lease_whose_file_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Removed(system.Port):
        def look_up(self, path: Any) -> None:
            return None

    give_back, calls = locks.give_back, []

    def interrupted(file: Any, process: int) -> None:
        give_back(file, process)
        calls.append(file)
        if len(calls) == 1:
            raise Alarm

    monkeypatch.setattr(locks, "give_back", interrupted)
    with system.replaced(Removed()), pytest.raises(Alarm):
        ReaderLease(tmp_path / "r.lock", "r")
    assert calls[0].is_closed


def test_positions_of_more_than_a_mebibyte_are_committed_over_a_new_connection(server: HubServer, secrets: Path) -> None:
    places = {(f"{number:0100d}", 0): 0 for number in range(12_000)} | {("JFK", 0): 7}
    with RemoteHub(server.location, security=Security((secrets / "all").read_text().strip())) as remote:
        assert remote.commit("large", places) == reading.Committed(1, missing=12_000)
        assert [one.places for one in remote.readers()] == [[ReaderPlace("JFK", 0, 7)]]


@pytest.mark.parametrize("count", [0, 1, reading.MOST_PLACES, reading.MOST_PLACES + 1, 30_000])
@pytest.mark.parametrize("length", [1, 100])
def test_a_commit_has_all_its_positions_in_parts_that_a_hub_accepts(count: int, length: int) -> None:
    places = [ReaderPlace("a" * length, number % 1024, number) for number in range(count)]
    found = list(reading.parts(places))
    assert [place for part in found for place in part] == places
    assert found
    for part in found:
        assert len(part) <= reading.MOST_PLACES
        assert len(msgspec.json.encode(CommitPositions("r" * 100, part))) < reading.COMMIT_BYTES + 1000
