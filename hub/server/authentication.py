"""Authentication of calls, from their headers and the connection's certificate, before any message is read.

    authentication = Authentication(access, uses_certificates=True)
    caller = authentication.caller(call)                                                    first in every handler
    caller.check(caller.principal.may_write(client), f"write {client}")
    caller.principal                                                                        again for each batch of a long stream

A **token** identifies its owner. A **certificate** was verified by TLS before that: a certificate of another authority gets no connection.
Its identity is the first name in it, or its common name if it has no other. With both, the token determines the principal, and a revoked
certificate is refused nevertheless.

Refused callers get no reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hub.errors import NotAllowed, NotAuthenticated
from hub.security.access import Access, Principal
from hub.server.event_log import EventLog
from kvspool import system

if TYPE_CHECKING:
    from hub.server.call import Call

RENEWAL = 1.0  # seconds after which rights are checked again during a call


class Authentication:
    """Authenticates the calls of a server. Used by all its threads."""

    def __init__(self, access: Access, *, uses_certificates: bool = False) -> None:
        """uses_certificates: the server verifies clients' certificates."""
        self.access = access
        self.log = EventLog("refused calls")
        self.failures = 0  # unauthenticated calls
        self.denials = 0  # calls without the right to make them
        self._uses_certificates = uses_certificates

    def caller(self, call: Call) -> Standing:
        """Return the caller of a call. Raises NotAuthenticated."""
        where = address_of(call)
        try:
            principal = self._principal(call)
        except NotAuthenticated as error:
            raise self._refused(error, f"method {call.method.rpartition('/')[2]}, from {where}") from None
        return Standing(self, principal, where)

    def bearer(self, shown: list[str], where: str) -> Standing:
        """Return the caller of a connection that can't show a certificate. Raises NotAuthenticated.

        shown: the values of its authorization headers.
        """
        try:
            if self._uses_certificates and not self.access.is_anonymous:
                raise NotAuthenticated("this hub requires certificates of its clients, which the page can't check")
            return Standing(self, self.access.authenticate("" if self.access.is_anonymous else _bearer(shown)), where)
        except NotAuthenticated as error:
            raise self._refused(error, f"of the page, from {where}") from None

    def _principal(self, call: Call) -> Principal:
        if self.access.is_anonymous:
            return self.access.authenticate("")
        shown = call.values("authorization")
        if not self._uses_certificates:
            return self.access.authenticate(_bearer(shown))
        if not shown:
            return self.access.identify(call.caller.identity)
        self.access.check_identity(call.caller.identity)
        return self.access.authenticate(_bearer(shown))

    def renewed(self, principal: Principal, where: str) -> Principal:
        """Return the principal's present rights, later in a call. Raises NotAuthenticated after a revocation."""
        try:
            return self.access.renewed(principal)
        except NotAuthenticated as error:
            raise self._refused(error, f"from {where}") from None

    def check(self, principal: Principal, is_allowed: bool, what: str, where: str) -> None:
        """Raise NotAllowed, and log it, unless `is_allowed`; `what` completes "may not"."""
        if not is_allowed:
            self.denials += 1
            self.log.warn("%s may not %s, from %s", principal.name, what, where)
            raise NotAllowed(f"{principal.name} may not {what}")

    def _refused(self, error: NotAuthenticated, where: str) -> NotAuthenticated:
        self.failures += 1
        self.log.warn("authentication failed: %s; principal %s, %s", error, error.principal or "unknown", where)
        return NotAuthenticated("not authenticated")


class Standing:
    """A caller and its present rights, checked again at most once a second. Used by one thread at a time."""

    def __init__(self, authentication: Authentication, principal: Principal, where: str) -> None:
        self._authentication = authentication
        self._principal = principal
        self._where = where
        self._renew_at = system.port.monotonic() + RENEWAL

    @property
    def principal(self) -> Principal:
        """Return the principal with its present rights. Raises NotAuthenticated after a revocation."""
        now = system.port.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + RENEWAL
            self._principal = self._authentication.renewed(self._principal, self._where)
        return self._principal

    def check(self, is_allowed: bool, what: str) -> None:
        """Raise NotAllowed, and log it, unless `is_allowed`; `what` completes "may not"."""
        self._authentication.check(self._principal, is_allowed, what, self._where)

    def may_read(self, client: str) -> bool:
        """Return whether the caller may read a client now. Raises NotAuthenticated after a revocation."""
        return self.principal.may_read(client)

    def may_list(self, client: str) -> bool:
        """Return whether the caller may list a client now. Raises NotAuthenticated after a revocation."""
        return self.principal.may_list(client)


def address_of(call: Call) -> str:
    """Return the address of a call's client, for the log."""
    host, port = call.caller.address
    return f"{host} port {port}"


def _bearer(values: Sequence[str | bytes]) -> str:
    """Return the token of an authorization header. Raises NotAuthenticated if there is not exactly one."""
    if not values:
        raise NotAuthenticated("no token was sent")
    if len(values) > 1 or not isinstance(values[0], str):
        raise NotAuthenticated("several tokens were sent, or one that is no text")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer":
        raise NotAuthenticated("the authorization header has no bearer token")
    return token.strip()
