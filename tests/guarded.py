"""A tiny Flight server protected by `hub.server.authentication`, and its answers to a client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow
from pyarrow import flight

from hub.security.access import Access
from hub.security.certificates import KeyPair
from hub.security.tokens import Token
from hub.server.authentication import KEY, Authentication


class GuardedServer(flight.FlightServerBase):  # type: ignore[misc]
    """Tells who calls, lets him append a batch to a client, and counts what reached a handler."""

    def __init__(self, location: str, authentication: Authentication, **options: Any) -> None:
        super().__init__(location, middleware={KEY: authentication}, **options)
        self.authentication = authentication
        self.calls = 0

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        """`whoami`: the name of the caller's principal. `write`: whether he may write the client in the body."""
        self.calls += 1
        principal = self.authentication.principal(context)
        if action.type == "write":
            client = action.body.to_pybytes().decode()
            self.authentication.check(context, principal, principal.may_write(client), f"write {client}")
        yield principal.name.encode()

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Acknowledge each batch while the caller still has the same identity."""
        self.calls += 1
        principal = self.authentication.principal(context)
        for _ in reader:
            principal = self.authentication.renewed(context, principal)
            writer.write(pyarrow.py_buffer(principal.name.encode()))


@contextmanager
def served(access: Access, pair: KeyPair | None = None, authority: bytes | None = None) -> Iterator[GuardedServer]:
    """Run a server on a loopback address: with TLS if there is a pair, for clients with certificates if there is an authority."""
    options: dict[str, Any] = {} if pair is None else {"tls_certificates": [(pair.chain, pair.key)]}
    if authority is not None:
        options |= {"verify_client": True, "root_certificates": authority}
    authentication = Authentication(access, uses_certificates=authority is not None)
    server = GuardedServer(f"grpc{'' if pair is None else '+tls'}://127.0.0.1:0", authentication, **options)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.wait()


def options(token: Token | str | None = None) -> flight.FlightCallOptions:
    """Return the options of a call that shows a token; a text is the whole header."""
    if token is None:
        return flight.FlightCallOptions(timeout=10)
    header = token.header if isinstance(token, Token) else (b"authorization", token.encode())
    return flight.FlightCallOptions(timeout=10, headers=[header])


def ask(location: str, token: Token | str | None = None, action: str = "whoami", body: bytes = b"", **tls: Any) -> str:
    """Return what the server answers to one action."""
    with flight.FlightClient(location, **tls) as client:
        (answer,) = client.do_action(flight.Action(action, body), options(token))
        return str(answer.body.to_pybytes().decode())
