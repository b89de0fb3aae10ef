"""A tiny Flight service protected by `hub.server.authentication`, and its answers to a client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import flight

from hub.security.access import Access
from hub.security.certificates import CertifiedKey
from hub.security.tokens import Token
from hub.server.authentication import Authentication, Standing
from hub.server.call import Call
from hub.server.flight import Action, Data, encode_result
from hub.server.listener import Listener
from hub.server.refusals import status_of
from hub.server.tls import server_context


class GuardedServer:
    """Tells who calls, lets him append a batch to a client, and counts what reached a handler."""

    def __init__(self, authentication: Authentication) -> None:
        self.authentication = authentication
        self.calls = 0
        self.port = 0
        self._callers: dict[Call, Standing] = {}

    def admit(self, call: Call) -> None:
        """Authenticate a call."""
        try:
            self._callers[call] = self.authentication.caller(call)
        except Exception as error:
            raise status_of(error, Path("root")) from None

    async def serve(self, call: Call) -> None:
        """Answer a call."""
        self.calls += 1
        try:
            await (self._do_action if call.method.endswith("/DoAction") else self._do_put)(call, self._callers.pop(call))
        except Exception as error:
            raise status_of(error, Path("root")) from None

    async def _do_action(self, call: Call, caller: Standing) -> None:
        """`whoami`: the name of the caller's principal. `write`: whether he may write the client in the body."""
        message = await call.read()
        assert message is not None
        with message:
            action = Action.parse(message.data)
        if action.kind == "write":
            client = action.body.decode()
            caller.check(caller.principal.may_write(client), f"write {client}")
        await call.write(encode_result(caller.principal.name.encode()))

    async def _do_put(self, call: Call, caller: Standing) -> None:
        """Acknowledge each batch while the caller still has the same identity."""
        async for message in call:
            with message:
                has_batch = bool(Data.parse(message.data).body)
            if has_batch:
                await call.write(encode_result(caller.principal.name.encode()))


@contextmanager
def served(access: Access, pair: CertifiedKey | None = None, authority: bytes | None = None) -> Iterator[GuardedServer]:
    """Run a server on a loopback address: with TLS if there is a pair, for clients with certificates if there is an authority."""
    server = GuardedServer(Authentication(access, uses_certificates=authority is not None))
    context = None if pair is None else server_context(pair.chain, pair.key, authority)
    with Listener(server, ("127.0.0.1", 0), context=None if context is None else lambda: context) as listener:
        server.port = listener.address[1]
        yield server


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
