"""A shipper's side of a call, against hubs with answers that kvspool's hub would never give, or no answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from pyarrow import flight
from shipping import LOG, numbered

from hub.client.connection import Connection, Security
from hub.errors import Conflict, HubError, HubFull, Malformed, NotAllowed, Silent, Unreachable
from hub.protocol import ingest, reading
from hub.protocol.ingest import Acknowledged, Opened, Opening, Put, Refused, ResumePoint, ShippedLog

OPENING = Opening(ingest.VERSION, "client", 1, [ShippedLog(1, LOG, 10)])
OPENED = Opened(ingest.VERSION, "process", 1 << 20, [ResumePoint(1, 5, True)])
Play = Callable[[Any, Any, threading.Event], None]


class Actor(flight.FlightServerBase):  # type: ignore[misc]
    """A hub that plays a part."""

    def __init__(self, play: Play) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.play = play
        self.is_over = threading.Event()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        assert ingest.decode_opening(descriptor.command) == OPENING
        self.play(reader, writer, self.is_over)


@contextmanager
def playing(play: Play) -> Iterator[str]:
    actor = Actor(play)
    thread = threading.Thread(target=actor.serve)
    thread.start()
    try:
        yield f"grpc://127.0.0.1:{actor.port}"
    finally:
        actor.is_over.set()
        actor.shutdown()
        thread.join()


def say(writer: Any, message: Any) -> None:
    writer.write_metadata(message if isinstance(message, bytes) else ingest.encode(message))


def opened(then: Play) -> Play:
    """Return a hub that opens the call as it should be."""

    def play(reader: Any, writer: Any, is_over: threading.Event) -> None:
        say(writer, OPENED)
        then(reader, writer, is_over)

    return play


def speaking(*messages: Any) -> Play:
    """Return a hub that says this, and then nothing."""

    def play(reader: Any, writer: Any, is_over: threading.Event) -> None:
        for message in messages:
            say(writer, message)
        is_over.wait()

    return play


def asked(location: str, silence: float = 20.0) -> HubError:
    """Open a call, ask once, and return what it breaks with."""
    with pytest.raises(HubError) as caught, Connection(location, Security(), OPENING, silence) as connection:
        connection.ping({1: 10})
        while True:
            connection.hear()
    return caught.value


def test_a_hub_that_is_not_there_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        Connection("grpc://127.0.0.1:1", Security(), OPENING)


@pytest.mark.parametrize(
    "first",
    [
        b"garbage",
        ingest.encode(Opened(2, "disk", 1, [])),
        Opened(1, "disk", 1, [ResumePoint(0, 0, True)]),  # it was not asked about
        Opened(1, "disk", 1, [ResumePoint(1, 0, True), ResumePoint(1, 2, True)]),
        Acknowledged([(7, 1)], 0),
    ],
    ids=repr,
)
def test_a_hub_that_opens_a_call_wrongly_is_refused(first: Any) -> None:
    with playing(speaking(first)) as location, pytest.raises(Malformed):
        Connection(location, Security(), OPENING, 20)


@pytest.mark.parametrize("word", [b"garbage", Acknowledged([(0, 7)], 1), Acknowledged([], 2), Acknowledged([], -1)], ids=repr)
def test_a_hub_that_answers_wrongly_is_refused(word: Any) -> None:
    with playing(speaking(OPENED, word)) as location:
        assert isinstance(asked(location), Malformed)


def test_a_hub_that_says_nothing_is_silent_before_and_after_the_opening() -> None:
    with playing(speaking()) as location, pytest.raises(Silent):
        Connection(location, Security(), OPENING, 0.3)
    with playing(speaking(OPENED)) as location:
        assert isinstance(asked(location, 0.3), Silent)


def test_a_hub_that_does_not_read_is_silent_though_it_was_not_asked_anything() -> None:
    with playing(speaking(OPENED)) as location, Connection(location, Security(), OPENING, 0.5) as connection, pytest.raises(Silent):
        rows = numbered(0, 20_000)
        while True:
            connection.put(Put(1, 0, 0, 10, False), rows.batch)


def test_a_hub_that_ends_the_call_is_unreachable() -> None:
    def end(reader: Any, writer: Any, is_over: threading.Event) -> None:
        return None

    def fail(reader: Any, writer: Any, is_over: threading.Event) -> None:
        raise ValueError("a secret of the hub")

    for then in (end, fail):
        with playing(opened(then)) as location:
            assert type(asked(location)) is Unreachable
        with playing(then) as location, pytest.raises(Unreachable):
            Connection(location, Security(), OPENING, 20)


def test_an_action_that_the_hub_allows_no_user_is_refused() -> None:
    def refuse(reader: Any, writer: Any, is_over: threading.Event) -> None:
        raise flight.FlightUnauthenticatedError("no")

    with playing(refuse) as location, pytest.raises(NotAllowed):
        Connection(location, Security(token="t"), OPENING, 20)


def test_a_call_that_is_refused_says_why_although_it_ends_at_once() -> None:
    def refuse(reader: Any, writer: Any, is_over: threading.Event) -> None:
        say(writer, Refused("conflict", "another number of shards"))
        error = Conflict("another number of shards")
        raise flight.FlightServerError(str(error), msgspec.json.encode(reading.failure(error)))

    for play in (refuse, opened(refuse)):
        with playing(play) as location, pytest.raises(Conflict, match="another number"):
            with Connection(location, Security(), OPENING, 20) as connection:
                while True:
                    connection.put(Put(1, 0, 0, 10, False), numbered(0, 10).batch)


def test_what_is_stored_and_refused_is_noted() -> None:
    with playing(speaking(OPENED, Acknowledged([(1, 7)], 0), Refused("full", "wait", 1, retry_after=2.5))) as location:
        with Connection(location, Security(), OPENING, 20) as connection:
            connection.hear()
            connection.hear()
            assert connection.opened == OPENED and connection.stored == {1: 7}
            error = connection.refused[1]
            assert isinstance(error, HubFull) and error.retry_after == 2.5


def test_secrets_are_in_no_representation() -> None:
    assert "token" not in repr(Security(token="secret")) and "secret" not in repr(Security(token="secret"))


@pytest.mark.parametrize(
    ("serves", "asks", "name", "trusts", "words"),
    [
        ("tls", "grpc+tls", "hub.example.org", True, "its certificate has another name; use a name"),
        ("tls", "grpc+tls", "localhost", False, "its certificate is from an authority that isn't trusted; give that one with --ca"),
        ("tls", "grpc", "localhost", True, "if the hub uses TLS, use grpc+tls://"),
        ("plain", "grpc+tls", "localhost", True, "it doesn't use TLS; check the port, or use grpc://"),
        ("nothing", "grpc", "localhost", True, "connection refused: no hub listens there; start it, or check the address"),
    ],
)
def test_an_address_or_a_certificate_that_is_wrong_is_named(serves: str, asks: str, name: str, trusts: bool, words: str) -> None:
    """gRPC reports all of them as unavailable."""
    trustme = pytest.importorskip("trustme")
    authority, other = trustme.CA(), trustme.CA()
    issued = authority.issue_cert(name)
    pair = (issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes())
    options = {"tls_certificates": [pair]} if serves == "tls" else {}
    with flight.FlightServerBase(f"grpc{'+tls' * (serves == 'tls')}://127.0.0.1:0", **options) as server:
        port = 1 if serves == "nothing" else server.port
        trusted = (authority if trusts else other).cert_pem.bytes()
        location = f"{asks}://localhost:{port}"
        with pytest.raises(Unreachable) as raised, Connection(location, Security(authorities=trusted), OPENING, 10) as connection:
            connection.finish()
    assert str(raised.value).startswith(f"{location}: ") and words in str(raised.value)
    assert "Flight returned" not in str(raised.value)
