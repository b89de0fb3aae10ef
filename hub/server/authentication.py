"""Authentication of calls of Arrow Flight; it depends on Flight, `hub.security.access` does not.

    authentication = Authentication(access, uses_certificates=True)
    class Server(flight.FlightServerBase): ...      with middleware={KEY: authentication}
    principal = authentication.principal(context)                                           first in every handler
    authentication.check(context, principal, principal.may_write(client), f"write {client}")
    standing = authentication.standing(context, principal); standing.principal              for each batch of a long stream

**A token** is checked before the call's first message is read, when only the headers are known. So callers without one can't make the hub
receive a message, whose size Flight doesn't limit. The price is that the log can't name the address at that moment. The proxy knows the
address of each connection, and ends connections without authentication. `address` gives it to the handlers.

**A certificate** was verified by TLS before that: a certificate of another authority gets no call. Its identity is the first name in it, or
its common name if it has no other. Only the handler knows it. So if certificates are used, a call without a token passes the
middleware, and `principal` accepts or refuses it. With both, the token determines the principal, and a revoked certificate is refused
nevertheless.

**Calls are counted** from their headers on: see `hub.server.calls`.

Refused callers get no reason.
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
ANYBODY = "a caller without a token"  # all of them share one principal's limits until their first message
RENEWAL = 1.0  # seconds after which rights are checked again during a call


class Authentication(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Authenticates the calls of a Flight server; see the module. Used by all its threads."""

    def __init__(
        self,
        access: Access,
        *,
        uses_certificates: bool = False,
        address: Callable[[str], str] | None = None,
        calls: Calls | None = None,
    ) -> None:
        """uses_certificates: the server verifies clients' certificates. address: converts Flight's name of the peer for the log. calls:
        counts and limits the calls.

        Behind a proxy, the peer is the proxy's own end of a connection, so `address` has to ask the proxy for the client's address.
        """
        super().__init__()
        self.access = access
        self.calls = Calls() if calls is None else calls
        self.log = EventLog("refused calls")
        self.excess = EventLog("calls beyond a bound")
        self.failures = 0  # unauthenticated calls
        self.denials = 0  # calls without the right to make them
        self._uses_certificates = uses_certificates
        self._address = _unquoted if address is None else address

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> _Caller:
        """Check a call's token before anything else of the call is read. Flight calls this."""
        principal = self._shown(info, headers)
        name = ANYBODY if principal is None else principal.name
        try:
            return _Caller(principal, self.calls.begin(info.method.name, name))
        except HubError as error:
            self.excess.warn("refused a call of %s: %s", name, error)
            raise flight.FlightUnavailableError(str(error), msgspec.json.encode(reading.failure(error))) from None

    def _shown(self, info: Any, headers: dict[str, list[str | bytes]]) -> Principal | None:
        """Return the principal of a call's token; None if only the handler can know it. Raises FlightUnauthenticatedError."""
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
        """Return the principal of a handler's call. Raises FlightUnauthenticatedError."""
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
        """Return the principal's present rights, later in a call. Raises FlightUnauthenticatedError after a revocation."""
        try:
            return self.access.renewed(principal)
        except NotAuthenticated as error:
            raise self._refused(error, self.address(context)) from None

    def standing(self, context: Any, principal: Principal) -> Standing:
        """Return the principal's rights, kept current during its call."""
        return Standing(self, context, principal)

    def resources(self, context: Any) -> ExitStack:
        """Return a stack that is closed when a call is over and its last answer was sent, after the handler has returned."""
        caller: _Caller = context.get_middleware(KEY)
        return caller.resources

    def check(self, context: Any, principal: Principal, is_allowed: bool, what: str) -> None:
        """Raise FlightUnauthorizedError, and log it, unless `is_allowed`; `what` completes "may not"."""
        if not is_allowed:
            self.denials += 1
            self.log.warn("%s may not %s, from %s", principal.name, what, self.address(context))
            raise flight.FlightUnauthorizedError(f"{principal.name} may not {what}")

    def address(self, context: Any) -> str:
        """Return the client address of a handler's call."""
        return self._address(context.peer())

    def _refused(self, error: NotAuthenticated, where: str) -> Exception:
        self.failures += 1
        self.log.warn("authentication failed: %s; principal %s, %s", error, error.principal or "unknown", where)
        return flight.FlightUnauthenticatedError("not authenticated")  # type: ignore[no-any-return]


class _Caller(flight.ServerMiddleware):  # type: ignore[misc]
    """The caller, if its token identifies it."""

    def __init__(self, principal: Principal | None, call: Call) -> None:
        super().__init__()
        self.principal = principal
        self.call = call
        self.resources = ExitStack()

    def call_completed(self, exception: Exception | None) -> None:
        """Release the call's resources. Flight calls this, however the call ended."""
        try:
            self.resources.close()
        finally:
            self.call.end()


class Standing:
    """A caller and its present rights, checked again at most once a second. Used by the call's own thread."""

    def __init__(self, authentication: Authentication, context: Any, principal: Principal) -> None:
        self._authentication = authentication
        self._context = context
        self._principal = principal
        self._renew_at = system.port.monotonic() + RENEWAL

    @property
    def principal(self) -> Principal:
        """Return the principal with its present rights. Raises FlightUnauthenticatedError after a revocation."""
        now = system.port.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + RENEWAL
            self._principal = self._authentication.renewed(self._context, self._principal)
        return self._principal

    def check(self, is_allowed: bool, what: str) -> None:
        """Raise FlightUnauthorizedError, and log it, unless `is_allowed`; `what` completes "may not"."""
        self._authentication.check(self._context, self._principal, is_allowed, what)

    def may_read(self, client: str) -> bool:
        """Return whether the caller may read a client now. Raises FlightUnauthenticatedError after a revocation."""
        return self.principal.may_read(client)

    def may_list(self, client: str) -> bool:
        """Return whether the caller may list a client now. Raises FlightUnauthenticatedError after a revocation."""
        return self.principal.may_list(client)


def _bearer(values: list[str | bytes]) -> str:
    """Return the token of an authorization header. Raises NotAuthenticated if there is not exactly one."""
    if not values:
        raise NotAuthenticated("no token was sent")
    if len(values) > 1 or not isinstance(values[0], str):
        raise NotAuthenticated("several tokens were sent, or one that is no text")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer":
        raise NotAuthenticated("the authorization header has no bearer token")
    return token.strip()


def _unquoted(peer: str) -> str:
    return urllib.parse.unquote(peer)
