"""Which of several hubs a client goes to."""

from __future__ import annotations

from collections import Counter

import pytest

from hub.client import hubs

HUBS = [f"grpc+tls://hub{number}.example:4242" for number in range(4)]
CLIENTS = [f"client{number}" for number in range(4000)]


def test_clients_are_spread_evenly() -> None:
    counts = Counter(hubs.chosen(client, HUBS)[0] for client in CLIENTS)
    assert all(850 < counts[hub] < 1150 for hub in HUBS)


def test_a_hub_that_is_added_or_removed_moves_its_own_clients_alone() -> None:
    before = {client: hubs.chosen(client, HUBS)[0] for client in CLIENTS}
    for client in CLIENTS:
        assert hubs.chosen(client, HUBS[:3])[0] == before[client] or before[client] == HUBS[3]
        assert hubs.chosen(client, [*HUBS, "grpc://new:1"])[0] in (before[client], "grpc://new:1")


def test_the_order_of_the_list_counts_only_for_the_first() -> None:
    assert all(hubs.chosen(client, HUBS)[0] == hubs.chosen(client, HUBS[::-1])[0] for client in CLIENTS[:100])
    assert hubs.chosen("client", HUBS[::-1], "first") == [HUBS[3]]


@pytest.mark.parametrize("location", ["", "hub:1", "http://hub:1", "grpc://hub", "grpc://hub:", "grpc://user@hub:1", "grpc://a b:1", "grpc://hub:1/x"])
def test_what_is_no_location_is_refused(location: str) -> None:
    with pytest.raises(ValueError, match="a hub is"):
        hubs.chosen("client", [*HUBS, location])


def test_without_a_hub_there_is_none_to_choose() -> None:
    with pytest.raises(ValueError, match="at least one"):
        hubs.chosen("client", [])


def test_names_are_short_and_differ() -> None:
    assert len({hubs.name(hub) for hub in HUBS}) == 4 and all(len(hubs.name(hub)) == 12 for hub in HUBS)
