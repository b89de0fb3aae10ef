"""Who makes a call, as far as Arrow Flight can tell; it knows Flight, `hub.security.access` does not.

    authentication = Authentication(access, uses_certificates=True)
    class Server(flight.FlightServerBase): ...      with middleware={KEY: authentication}
    principal = authentication.principal(context)                                           first thing in every handler
    authentication.check(context, principal, principal.may_write(client), f"write {client}")
    standing = authentication.standing(context, principal); standing.principal              for each batch of a long stream

**A token** is looked at before the call's first message is read, when nothing but the headers is known: nobody without one gets the hub to
take in a message, and of Flight there is no limit to the size of one. The price is that the log can't name the address then; the gate
in front of the server knows it of each connection, and cuts one that nobody was recognised on. `address` is how it tells the handlers.

**A certificate** was verified before that, by TLS: whom our CA didn't sign gets no call through. Its identity - the first name in it,
or its common name if it has no other - is known in the handler alone, so a call without a token passes the middleware where certificates
are used, and `principal` recognises it or refuses it. With both, the token says who it is, and a revoked certificate is refused all the
same.

**Calls are counted** from their headers on, too: see `hub.server.calls`.

He who is refused isn't told why.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from hub.errors import HubError, NotAuthenticated
from hub.protocol import reading
from hub.security.access import Access, Principal
from hub.server.calls import Call, Calls
from hub.server.event_log import EventLog
from kvspool import system
from kvspool.errors import MissingExtra

try:
    from pyarrow import flight
except ImportError as _error:
    raise MissingExtra(f"the hub's server needs the package pyarrow ({_error}); pip install 'kvspool[hub]'") from _error

KEY = "kvspool-authentication"
ANYBODY = "a caller without a token"  # all of them share what one principal may have before its first message
RENEWAL = 1.0  # seconds after which is looked again what somebody may, while his call goes on


class Authentication(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Recognises who makes each call of a Flight server; see the module. Used by all its threads."""

    def __init__(
        self,
        access: Access,
        *,
        uses_certificates: bool = False,
        address: Callable[[str], str] | None = None,
        calls: Calls | None = None,
    ) -> None:
        """uses_certificates: the server verifies clients' certificates. address: makes what is logged of what Flight calls the peer.
        calls: counts and bounds the calls.

        Behind a gate the peer is the gate's own end of a connection, so `address` has to ask the gate whose that is.
        """
        super().__init__()
        self.access = access
        self.calls = Calls() if calls is None else calls
        self.log = EventLog("refused calls")
        self.excess = EventLog("calls beyond a bound")
        self.failures = 0  # calls by somebody who wasn't recognised
        self.denials = 0  # calls by somebody who may not make them
        self._uses_certificates = uses_certificates
        self._address = _unquoted if address is None else address

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> _Caller:
        """Look at a call's token before anything else of it is read; called by Flight."""
        principal = self._shown(info, headers)
        name = ANYBODY if principal is None else principal.name
        try:
            return _Caller(principal, self.calls.begin(info.method.name, name))
        except HubError as error:
            self.excess.warn("refused a call of %s: %s", name, error)
            raise flight.FlightUnavailableError(str(error), msgspec.json.encode(reading.failure(error))) from None

    def _shown(self, info: Any, headers: dict[str, list[str | bytes]]) -> Principal | None:
        """Return the principal of a call's token; None if only the handler can know. Raises FlightUnauthenticatedError."""
        if self.access.is_anonymous:
            return None
        shown = next((values for name, values in headers.items() if name.lower() == "authorization"), [])
        if not shown and self._uses_certificates:
            return None
        try:
            return self.access.authenticate(_bearer(shown))
        except NotAuthenticated as error:
            self.calls.refuse(ANYBODY)
            raise self._refused(error, f"method {info.method.name}") from None

    def principal(self, context: Any) -> Principal:
        """Return who makes the call of a handler. Raises FlightUnauthenticatedError."""
        caller: _Caller = context.get_middleware(KEY)
        caller.call.open()
        identity = context.peer_identity().decode("utf-8", "backslashreplace") if self._uses_certificates else ""
        try:
            if caller.principal is None:
                return self.access.identify(identity)
            self.access.check_identity(identity)
        except NotAuthenticated as error:
            raise self._refused(error, self.address(context)) from None
        return caller.principal

    def renewed(self, context: Any, principal: Principal) -> Principal:
        """Return what somebody may do now, some time after his call began. Raises FlightUnauthenticatedError if he was revoked."""
        try:
            return self.access.renewed(principal)
        except NotAuthenticated as error:
            raise self._refused(error, self.address(context)) from None

    def standing(self, context: Any, principal: Principal) -> Standing:
        """Return what somebody may do for as long as his call lasts."""
        return Standing(self, context, principal)

    def held(self, context: Any) -> ExitStack:
        """Return what is closed when a call is over, and its last answer sent: Flight sends them after the handler has returned."""
        caller: _Caller = context.get_middleware(KEY)
        return caller.held

    def check(self, context: Any, principal: Principal, is_allowed: bool, what: str) -> None:
        """Raise FlightUnauthorizedError, and log it, unless it `is_allowed`; `what` follows on "may not"."""
        if not is_allowed:
            self.denials += 1
            self.log.warn("%s may not %s, from %s", principal.name, what, self.address(context))
            raise flight.FlightUnauthorizedError(f"{principal.name} may not {what}")

    def address(self, context: Any) -> str:
        """Return the address of him who makes the call of a handler."""
        return self._address(context.peer())

    def _refused(self, error: NotAuthenticated, where: str) -> Exception:
        self.failures += 1
        self.log.warn("authentication failed: %s; principal %s, %s", error, error.principal or "unknown", where)
        return flight.FlightUnauthenticatedError("not authenticated")  # type: ignore[no-any-return]


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]
    """Who makes a call, if the token says it."""

    def __init__(self, principal: Principal | None, call: Call) -> None:
        super().__init__()
        self.principal = principal
        self.call = call
        self.held = ExitStack()

    def call_completed(self, exception: Exception | None) -> None:
        """Let go of what the call held; called by Flight, however it ended."""
        try:
            self.held.close()
        finally:
            self.call.end()


class Standing:
    """Who makes a call, and what he may do now: looked at again once a second at most. Used by the call's own thread."""

    def __init__(self, authentication: Authentication, context: Any, principal: Principal) -> None:
        self._authentication = authentication
        self._context = context
        self._principal = principal
        self._renew_at = system.port.monotonic() + RENEWAL

    @property
    def principal(self) -> Principal:
        """Return him with the rights that he has now. Raises FlightUnauthenticatedError if he was revoked."""
        now = system.port.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + RENEWAL
            self._principal = self._authentication.renewed(self._context, self._principal)
        return self._principal

    def check(self, is_allowed: bool, what: str) -> None:
        """Raise FlightUnauthorizedError, and log it, unless it `is_allowed`; `what` follows on "may not"."""
        self._authentication.check(self._context, self._principal, is_allowed, what)

    def may_read(self, client: str) -> bool:
        """Return whether he may read a client now. Raises FlightUnauthenticatedError if he was revoked."""
        return self.principal.may_read(client)

    def may_list(self, client: str) -> bool:
        """Return whether he may see now that a client is there. Raises FlightUnauthenticatedError if he was revoked."""
        return self.principal.may_list(client)


def _bearer(values: list[str | bytes]) -> str:
    """Return the token of an authorization header. Raises NotAuthenticated if there is not exactly one."""
    if not values:
        raise NotAuthenticated("no token was shown")
    if len(values) > 1 or not isinstance(values[0], str):
        raise NotAuthenticated("more than one token was shown, or one that is no text")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer":
        raise NotAuthenticated("what was shown is no bearer token")
    return token.strip()


def _unquoted(peer: str) -> str:
    return urllib.parse.unquote(peer)
