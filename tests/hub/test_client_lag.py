"""The lag of a client, as the hub knows it: reported, or estimated once the client is silent."""

from __future__ import annotations

import pytest
from clocks import StoppedClock

from hub.root.store import Outcome
from hub.server.clients import SILENT, Client, ClientLag


def client_at(clock: StoppedClock, rate: int, seconds: int = 600) -> Client:
    """Return a client whose log grew at a rate, and was stored at once, until now."""
    client = Client("jfk")
    for second in range(seconds + 1):
        client.said({0: second * rate})
        client.stored(0, Outcome(second * rate), 0)
        clock.pass_(1)
    clock.pass_(-1)
    return client


def test_a_client_that_never_reported_has_an_unknown_lag(clock: StoppedClock) -> None:
    assert Client("jfk").behind(0) == ClientLag(-1)


def test_the_lag_of_a_silent_client_grows_at_its_last_rate_and_is_marked(clock: StoppedClock) -> None:
    client = client_at(clock, 100)
    assert client.behind(0) == ClientLag(0)
    client.said({0: 60_008})
    assert client.behind(0) == ClientLag(8)
    clock.pass_(SILENT)
    assert client.behind(0) == ClientLag(8)  # it may just have nothing to say
    clock.pass_(105)
    records, is_estimate = client.behind(0)
    assert is_estimate
    assert records == pytest.approx(8 + 120 * 100, rel=0.1)
    clock.pass_(3600)
    assert client.behind(0).records == pytest.approx(8 + 3720 * 100, rel=0.1)


def test_a_report_replaces_the_estimate(clock: StoppedClock) -> None:
    client = client_at(clock, 100)
    clock.pass_(1000)
    assert client.behind(0).is_estimate
    client.said({0: 60_000})
    assert client.behind(0) == ClientLag(0)
    clock.pass_(SILENT + 1)
    assert client.behind(0) == ClientLag(0, is_estimate=True)  # it grew by nothing for a long time


def test_a_rate_of_the_past_fades(clock: StoppedClock) -> None:
    client = client_at(clock, 1000)
    for _ in range(100):
        clock.pass_(5)
        client.said({0: 600_000})
    clock.pass_(100)
    assert client.behind(0).records < 1000


def test_a_recreated_log_has_no_negative_rate(clock: StoppedClock) -> None:
    client = client_at(clock, 100)
    client.said({0: 5})
    client.stored(0, Outcome(5), 0)
    clock.pass_(SILENT + 1)
    assert client.behind(0).records >= 0


def test_several_reports_at_once_are_one(clock: StoppedClock) -> None:
    client = Client("jfk")
    for end in (10, 30, 20):
        client.said({0: end})
    assert client.behind(0) == ClientLag(30)
