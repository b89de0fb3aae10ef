"""Tokens presented to a real server: which callers are admitted, the errors that others get, and the log entries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import guarded
import pyarrow
import pytest
from clocks import StoppedClock
from guarded import GuardedServer, ask, served
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from hub.errors import NotAuthenticated
from hub.security import access_file
from hub.security.access import Access
from hub.security.private import WatchedFile
from hub.security.tokens import Token
from hub.server.authentication import Authentication
from hub.server.call import Caller
from hub.server.event_log import LINES, LONGEST, escape
from kvspool import system


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.toml"


@pytest.fixture
def token(path: Path) -> Token:
    token = Token.make()
    access_file.add_token(path, token, "jfk")
    return token


@pytest.fixture
def server(path: Path, token: Token) -> Iterator[GuardedServer]:
    """A server on a loopback address without TLS, to which `token` is known."""
    with served(Access.load(path)) as server:
        yield server


def location(server: GuardedServer) -> str:
    return f"grpc://127.0.0.1:{server.port}"


def test_a_token_says_who_calls(server: GuardedServer, token: Token) -> None:
    assert ask(location(server), token) == "jfk"
    assert ask(location(server), f"bearer  {token.reveal()}") == "jfk"
    assert ask(location(server), token, "write", b"jfk-2") == "jfk"


WRONG = {
    "none": None,
    "empty": "",
    "no scheme": "{token}",
    "other scheme": "Basic {token}",
    "unknown": "Bearer kvs_00000000_" + "A" * 43,
    "other secret": "Bearer kvs_{id}_" + "A" * 43,
    "cut": "Bearer {cut}",
    "two": "Bearer {token} {token}",
    "long": "Bearer " + "A" * 5000,
}


@pytest.mark.parametrize("header", WRONG.values(), ids=WRONG.keys())
def test_without_a_good_token_no_handler_runs_and_no_reason_is_given(
    server: GuardedServer, token: Token, header: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    shown = header and header.format(token=token.reveal(), id=token.id, cut=token.reveal()[:-1])
    with pytest.raises(flight.FlightUnauthenticatedError) as caught:
        ask(location(server), shown)
    assert "not authenticated" in str(caught.value)
    assert token.id not in str(caught.value)
    assert server.calls == 0
    assert server.authentication.failures == 1
    (record,) = caplog.records
    assert record.name == "kvspool.hub" and record.levelname == "WARNING"
    assert "method DoAction, from 127.0.0.1 port " in record.getMessage()
    assert token.reveal()[13:] not in record.getMessage()
    assert "AAAA" not in record.getMessage()
    assert ("principal jfk" in record.getMessage()) == (header == WRONG["other secret"])


def test_two_authorization_headers_are_refused(server: GuardedServer, token: Token) -> None:
    headers = [token.header, (b"authorization", b"Bearer other")]
    with flight.FlightClient(location(server)) as client, pytest.raises(flight.FlightUnauthenticatedError):
        list(client.do_action(flight.Action("whoami", b""), flight.FlightCallOptions(timeout=10, headers=headers)))


HEADER = st.one_of(st.text(max_size=80), st.binary(max_size=80), st.text(max_size=5).map(lambda text: f"Bearer {text}"))


@given(st.dictionaries(st.sampled_from(["authorization", "cookie"]), st.lists(HEADER, max_size=3)))
def test_whatever_the_headers_are_no_call_gets_in_and_nothing_breaks(headers: dict[str, list[str | bytes]]) -> None:
    access = Access(WatchedFile("/nowhere", is_secret=True))
    access._looks_at = float("inf")
    caller = Caller(("127.0.0.1", 7))
    call: Any = SimpleNamespace(method="/DoPut", caller=caller, values=lambda name: headers.get(name, []))
    with pytest.raises(NotAuthenticated):
        Authentication(access).caller(call)


def test_a_put_without_a_token_is_refused_before_its_first_message_is_read(server: GuardedServer) -> None:
    schema = pyarrow.schema([("a", pyarrow.int64())])
    with flight.FlightClient(location(server)) as client, pytest.raises(flight.FlightUnauthenticatedError):
        writer, reader = client.do_put(flight.FlightDescriptor.for_path("x"), schema, guarded.options())
        reader.read()
        writer.close()
    assert server.calls == 0


def test_an_authentication_that_breaks_lets_no_call_through(
    server: GuardedServer, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(server.authentication.access, "authenticate", broken)
    with pytest.raises(pyarrow.ArrowException):
        ask(location(server), token)
    assert server.calls == 0


def test_a_denial_names_the_right_and_is_logged_with_the_address(
    server: GuardedServer, token: Token, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(flight.FlightUnauthorizedError, match="jfk may not write lga"):
        ask(location(server), token, "write", b"lga")
    with pytest.raises(flight.FlightUnauthorizedError):
        ask(location(server), token, "write", b"lga\r\n\x1b[2J\xc2\x9b fake line")
    assert server.authentication.denials == 2
    first, second = (record.getMessage() for record in caplog.records)
    assert "jfk may not write lga, from 127.0.0.1 port " in first
    assert second.isascii() and second.isprintable()
    assert "\\r\\n\\x1b[2J" in second


def test_a_token_that_is_revoked_ends_the_stream_that_it_began(server: GuardedServer, path: Path, token: Token) -> None:
    batch = pyarrow.record_batch({"a": [1]})
    with system.replaced(StoppedClock()) as clock, flight.FlightClient(location(server)) as client:
        assert isinstance(clock, StoppedClock)
        server.authentication.access._looks_at = 0.0
        writer, reader = client.do_put(flight.FlightDescriptor.for_path("x"), batch.schema, guarded.options(token))
        writer.write_batch(batch)
        assert reader.read().to_pybytes() == b"jfk"
        access_file.revoke(path, token=token.id)
        clock.pass_(2)
        with pytest.raises(flight.FlightUnauthenticatedError):
            writer.write_batch(batch)
            assert reader.read() is None
            writer.close()
        with pytest.raises(flight.FlightUnauthenticatedError):
            ask(location(server), token)


def test_a_new_token_is_accepted_next_to_the_old_one_and_outlives_it(server: GuardedServer, path: Path, token: Token) -> None:
    with system.replaced(StoppedClock()) as clock:
        assert isinstance(clock, StoppedClock)
        server.authentication.access._looks_at = 0.0
        new = Token.make()
        access_file.add_token(path, new, "jfk")
        clock.pass_(2)
        assert ask(location(server), new) == ask(location(server), token) == "jfk"
        access_file.revoke(path, token=token.id)
        clock.pass_(2)
        assert ask(location(server), new) == "jfk"
        with pytest.raises(flight.FlightUnauthenticatedError):
            ask(location(server), token)


def test_anonymous_access_takes_everybody() -> None:
    with served(Access.anonymous()) as server:
        assert ask(location(server)) == ask(location(server), "Bearer x") == "anonymous"
        assert ask(location(server), None, "write", b"lga") == "anonymous"


def test_a_flood_of_refused_calls_does_not_flood_the_log(
    path: Path, token: Token, caplog: pytest.LogCaptureFixture
) -> None:
    with system.replaced(StoppedClock()) as clock, served(Access.load(path)) as server, flight.FlightClient(location(server)) as client:
        assert isinstance(clock, StoppedClock)
        for _ in range(LINES + 7):
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(flight.Action("whoami", b""), guarded.options("Bearer x")))
        assert len(caplog.records) == LINES
        clock.pass_(10)
        with pytest.raises(flight.FlightUnauthenticatedError):
            ask(location(server), "Bearer x")
        assert "7 more refused calls" in caplog.records[-2].getMessage()
        assert server.authentication.failures == LINES + 8


def test_what_is_logged_is_plain_and_short() -> None:
    assert escape("a\nb\x1b\u202eé") == "a\\nb\\x1b\\u202e\\xe9"
    assert len(escape("x" * 100_000)) == LONGEST
