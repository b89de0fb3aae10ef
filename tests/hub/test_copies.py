"""Several hubs that are read as one, against the ledger of a client: random histories, and cuts at random bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from histories import History, Record, histories, record_of, store
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes_of_a_hub import Fault, Proxy
from serving import HubServer

import hub
from hub.client.remote import RemoteHub
from hub.errors import Conflict, NotFound, Unreachable
from hub.server import read_service
from kvspool import Gap

T = TypeVar("T")
CLIENTS = (f"c{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[HubServer, Proxy]]]:
    """Three hubs that send few records in a message, each behind a proxy."""
    patch = pytest.MonkeyPatch()
    patch.setattr(read_service, "BATCH_BYTES", 60)
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
    patch.undo()


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


@settings(max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
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
            with pytest.raises(Conflict):
                again(lambda: remote.read_arrow(client, 0))
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
