"""Several hubs that are read as one, against the ledger of a client: random histories, and cuts at random bytes."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from histories import History, Part, Record, histories, log_id, record_of, store
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes_of_a_hub import Fault, HubProcess, Proxy
from serving import HubServer
from shipping import eventually

import hub
import kvspool
from hub import LogPosition, RemoteHub
from hub.errors import Conflict, Fenced, Malformed, NotFound, Unexpected, Unreachable
from hub.protocol.reading import Generation, Ticket
from hub.server import read_service
from kvspool import Gap
from kvspool.errors import Closed, OutOfRange

T = TypeVar("T")
CLIENTS = (f"c{number}" for number in itertools.count())


@pytest.fixture
def hubs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[HubServer, Proxy]]]:
    """Three hubs that send few records in a message, each with a proxy."""
    monkeypatch.setattr(read_service, "BATCH_BYTES", 60)
    servers = []
    for name in "abc":
        root = tmp_path_factory.mktemp(name) / "root"
        hub.create(root).close()
        server = HubServer(root).start()
        servers.append((server, Proxy(server.listener.address)))
    yield servers
    for server, proxy in servers:
        proxy.close()
        server.close()


def locations(hubs: list[tuple[HubServer, Proxy]]) -> list[str]:
    return [f"grpc://127.0.0.1:{proxy.address[1]}" for _, proxy in hubs]


FAULTS = st.lists(
    st.builds(
        lambda kind, at: ("down", kind, at), st.sampled_from(["cut", "reset", "truncate"]), st.integers(300, 6000)
    ),
    max_size=3,
)


def there(hubs: list[tuple[HubServer, Proxy]], history: History) -> tuple[str, set[Record]]:
    """Store a history at the hubs, as a new client. Return it, and the records that some hub has."""
    client = next(CLIENTS)
    found: set[Record] = set()
    for (server, _), parts, trim in zip(hubs, history.parts, history.trims, strict=True):
        found |= set(store(server, client, parts, trim, history.lengths))
    return client, found


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
@given(history=histories(3), faults=st.lists(FAULTS, min_size=3, max_size=3))
def test_each_record_that_a_hub_has_is_read_once_and_in_order(
    hubs: list[tuple[HubServer, Proxy]], history: History, faults: list[list[tuple[Any, ...]]]
) -> None:
    client, expected = there(hubs, history)
    for (_, proxy), ours in zip(hubs, faults, strict=True):
        proxy.clear()
        for way, kind, at in ours:
            proxy.add(Fault(kind, way, at))
    with RemoteHub(locations(hubs), timeout=5) as remote:
        if not expected:
            with pytest.raises(NotFound):
                again(lambda: remote.shards(client))
            return
        if history.order is None:
            for _, proxy in hubs:
                proxy.clear()  # or a hub that is cut off is not asked
            eventually(lambda: remote.clients(client) and not remote.away())
            with pytest.raises(Conflict):
                remote.read_arrow(client, 0)
            return
        program = Program(remote, client)
        again(program.read_all)
    assert program.found == sorted(expected)


class Program:
    """Reads a client's records as they come, and continues after an error."""

    def __init__(self, remote: RemoteHub, client: str) -> None:
        self.remote, self.client = remote, client
        self.begin()

    def begin(self) -> None:
        self.first = self.place = -1
        self.found: list[Record] = []

    def read_all(self) -> None:
        """Read until all hubs answer and nothing is new."""
        while True:
            try:
                whole = self.remote.shards(self.client)[0]
                if self.place < 0 or whole.first < self.first:  # a hub that was cut off at the beginning has older records
                    self.begin()
                    self.first = self.place = whole.first
                if self.place >= whole.next and not self.remote.away():
                    assert self.place == whole.next
                    return
                self.read()
            except Conflict as error:  # a hub that was cut off at the beginning is back
                assert "has returned with records of an earlier log" in str(error) or "order of the records is unknown" in str(error)
                self.begin()

    def read(self) -> None:
        for item in self.remote.read(self.client, 0, self.place, on_gap="yield"):
            if isinstance(item, Gap):
                assert item.first == self.place
                self.place = item.last + 1
            else:
                assert item.sequence == self.place
                self.place += 1
                self.found.append(record_of(item.value))


def again(call: Callable[[], T]) -> T:
    """Return the result of a call that may fail as often as there are faults: all hubs may be cut off at once."""
    for _ in range(9):
        try:
            return call()
        except Unreachable:
            continue
    return call()


# One after the other.


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[HubServer]]:
    servers = []
    for name in "ab":
        hub.create(tmp_path / name).close()
        servers.append(HubServer(tmp_path / name).start())
    yield servers
    for server in servers:
        server.close()


def both(servers: list[HubServer]) -> RemoteHub:
    return RemoteHub([server.location for server in servers], timeout=5)


def give(server: HubServer, *parts: Part, lengths: tuple[int, ...] = (100, 100)) -> None:
    store(server, "c", parts, 0.0, lengths)


def test_locations_are_a_list_or_a_text() -> None:
    names = ["grpc://h1:1", "grpc+tls://h2:2"]
    for given_as in (names, tuple(names), "grpc://h1:1,grpc+tls://h2:2", "grpc://h1:1 | grpc+tls://h2:2"):
        with RemoteHub(given_as) as remote:
            assert remote.locations == tuple(names)
    with pytest.raises(ValueError, match="named twice"):
        RemoteHub(["grpc://h1:1", "grpc://h1:1"])
    with pytest.raises(ValueError, match="a hub is"):
        RemoteHub([])


def test_a_hub_that_lags_is_not_the_end_and_its_gap_is_not_believed(two: list[HubServer]) -> None:
    give(two[0], Part(0, 0, 60, (20, 30)))
    give(two[1], Part(0, 10, 100, (40, 50)))
    with both(two) as remote:
        assert [record_of(value).sequence for value in remote.read_values("c", 0)] == list(range(100))
        assert remote.read_arrow("c", 0).num_rows == 100
        assert remote.read_arrow("c", 0, 25, end=45, coded=True)["sequence"].to_pylist() == list(range(25, 45))
        assert remote.read_arrow("c", 0, limit=70)["sequence"].to_pylist() == list(range(70))
        times = remote.read_arrow("c", 0, start_time=15, end_time=85)  # the time of a record is its sequence
        assert times["sequence"].to_pylist() == list(range(15, 85))
        assert remote.read_arrow("c", 0, "latest").num_rows == 0
        assert remote.get("c", 0, 99).value == b"log 0 record 99"
        with pytest.raises(OutOfRange):
            remote.get("c", 0, 100)
        assert remote.away() == {}
    with RemoteHub(two[0].location) as alone:
        assert [one.sequence for one in alone.read("c", 0, on_gap="skip")] == [*range(20), *range(30, 60)]


def test_only_what_all_hubs_lack_is_a_gap(two: list[HubServer]) -> None:
    give(two[0], Part(0, 0, 100, (20, 40)))
    give(two[1], Part(0, 0, 100, (30, 50)))
    with both(two) as remote:
        (gap,) = [item for item in remote.read("c", 0, on_gap="yield") if isinstance(item, Gap)]
        assert (gap.first, gap.last, gap.reason) == (30, 39, "missing")
        assert all(server.location in gap.path for server in two)
        two[1].close()
        with pytest.raises(Unreachable, match="no hub has sequence 20: .*hub unreachable since") as raised:
            list(remote.read("c", 0, on_gap="skip"))
        assert all(server.location in str(raised.value) for server in two)
        assert [*remote.away()] == [two[1].location]


def test_sequences_are_those_of_the_logs_whatever_each_hub_missed(two: list[HubServer]) -> None:
    give(two[0], Part(0, 0, 60), Part(1, 0, 50))
    give(two[1], Part(0, 0, 100), Part(1, 0, 100))
    for server, base in ((two[0], 60), (two[1], 100)):
        with RemoteHub(server.location) as alone:
            assert [one.base for one in alone.shards("c")[0].generations] == [0, base]
            assert record_of(alone.get("c", 0, base + 3).value) == (1, 3)
            there = alone.position("c", 0, base + 3)
            with both(two) as remote:
                assert there == LogPosition(log_id(1).hex(), 3)
                assert remote.sequence("c", 0, there) == 103
                assert [record_of(one.value) for one in remote.read("c", 0, there, limit=2)] == [(1, 3), (1, 4)]
    with both(two[::-1]) as remote:
        whole = remote.shards("c")[0]
        assert (whole.first, whole.next, [one.base for one in whole.generations]) == (0, 200, [0, 100])
        assert [record_of(value) for value in remote.read_values("c", 0, 55)][:6] == [(0, at) for at in range(55, 61)]
        with pytest.raises(NotFound, match="has no log"):
            remote.sequence("c", 0, LogPosition("0" * 32, 0))


def test_a_durable_reader_is_moved_at_all_hubs_and_its_highest_position_counts(two: list[HubServer], tmp_path: Path) -> None:
    give(two[0], Part(0, 0, 60), Part(1, 0, 50))
    give(two[1], Part(0, 0, 100), Part(1, 0, 100))
    with both(two) as remote, RemoteHub(two[0].location) as first, RemoteHub(two[1].location) as second:
        assert remote.commit("r", {("c", 0): 110}).places == 1
        assert [one.readers()[0].places[0].next for one in (remote, first, second)] == [110, 70, 110]
        remote.commit("r", {("c", 0): 180})
        assert [one.readers()[0].places[0].next for one in (remote, first, second)] == [180, 110, 180]  # the first one lags
        first.commit("r", {("c", 0): 5})
        assert remote.readers()[0].places[0].next == 180
        address = two[0].listener.address
        two[0].close()
        remote.commit("r", {("c", 0): 190})
        assert remote.away().keys() == {two[0].location}
        two[0] = HubServer(tmp_path / "a", listen=address).start()
        assert remote.readers()[0].places[0].next == 190

        def is_moved() -> bool:
            remote.commit("r", {})
            return first.readers()[0].places[0].next == 110

        eventually(is_moved)
        two[0].close()
        left = remote.delete_reader("r")
        assert left.keys() == {two[0].location} and "hub unreachable since" in left[two[0].location]
        assert second.readers() == []
        with pytest.raises(Unreachable):
            remote.delete_reader("r")  # the hub that is away may have it


def test_changes_of_all_hubs_are_reported_as_of_one(two: list[HubServer]) -> None:
    give(two[0], Part(0, 0, 60))
    give(two[1], Part(0, 0, 40))
    with both(two) as remote:
        changes = remote.changes()
        assert [(one.client, one.first, one.next) for one in changes.shards] == [("c", 0, 60)]
        assert remote.changes(changes.token).shards == []
        give(two[1], Part(0, 0, 80))
        changes = remote.changes(changes.token, 20)
        assert [one.next for one in changes.shards] == [80]
        assert remote.clients() == ["c"] and remote.server().version == 1
        two[0].close()
        give(two[1], Part(0, 0, 90))
        assert [one.next for one in remote.changes(changes.token, 20).shards] == [90]


def test_what_no_hub_has_is_an_error_that_names_all_of_them(two: list[HubServer]) -> None:
    with both(two) as remote:
        with pytest.raises(NotFound):
            remote.read_arrow("c", 0)
        give(two[0], Part(0, 0, 10))
        with pytest.raises(NotFound):
            remote.read_arrow("c", 1)
        with pytest.raises(Malformed):
            remote.read_arrow("../c", 0)
        with pytest.raises(Unexpected):
            remote.read_arrow("c", 0, 11)
        for server in two:
            server.close()
        for call in (remote.server, remote.clients, remote.changes, lambda: remote.shards("c"), lambda: remote.read_arrow("c", 0)):
            with pytest.raises(Unreachable) as raised:
                call()
            assert all(server.location in str(raised.value) for server in two)
    with pytest.raises(Closed):
        remote.clients()


def test_a_ticket_is_fenced_by_another_table_of_logs(two: list[HubServer]) -> None:
    give(two[0], Part(0, 0, 10), Part(1, 0, 10))
    known = Generation(log_id(1).hex(), 10)
    with RemoteHub(two[0].location) as remote:
        assert next(remote.items(Ticket("c", 0, 12, generation=known))).first == 12  # type: ignore[union-attr]
        for wrong in (Generation(known.log, 11), Generation("0" * 32, 10)):
            with pytest.raises(Fenced, match="has no records of log"):
                list(remote.items(Ticket("c", 0, 12, generation=wrong)))


# Hubs that end, and networks that say nothing more.

BIG = 40_000


@pytest.fixture
def big(tmp_path: Path) -> list[Path]:
    """Two roots with the same log of 20 MB."""
    roots = [tmp_path / "a", tmp_path / "b"]
    hub.create(roots[0]).close()
    with kvspool.create(roots[0] / "BIG", format="kvj") as log:
        for first in range(0, BIG, 1000):
            log.append_many([b"%0500d" % number for number in range(first, first + 1000)])
    shutil.copytree(roots[0] / "BIG", roots[1] / "BIG")
    return roots


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_hub_that_is_killed_or_stopped_during_a_read_costs_no_record(big: list[Path], signal_number: int) -> None:
    with HubProcess(big[0]) as a, HubProcess(big[1]) as b, RemoteHub([a.location, b.location], timeout=5) as remote:
        found = 0
        for record in remote.read("BIG", 0):
            assert record.sequence == found and int(record.value) == found
            found += 1
            if found == 5000:
                a.process.send_signal(signal_number)
        assert found == BIG
        assert remote.away().keys() == {a.location}
        assert remote.read_arrow("BIG", 0, limit=10).num_rows == 10
        a.go_on()


def test_each_cut_of_one_hub_and_then_of_the_other_costs_no_record(big: list[Path]) -> None:
    with HubServer(big[0]) as a, HubServer(big[1]) as b, Proxy(a.listener.address) as pa, Proxy(b.listener.address) as pb:
        faults = [proxy.add(Fault(kind, "down", 4_500_000)) for kind in ("cut", "reset", "truncate") for proxy in (pa, pb)]
        with RemoteHub([f"grpc://127.0.0.1:{proxy.address[1]}" for proxy in (pa, pb)], timeout=5) as remote:
            table = remote.read_arrow("BIG", 0)
        assert table["sequence"].to_pylist() == list(range(BIG))
        assert sum(fault.fired for fault in faults) >= 3
