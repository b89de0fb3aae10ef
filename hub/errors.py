"""What a hub refuses, and why.

    KvspoolError
    `-- HubError
        |-- NotAuthenticated    nobody knows who asks
        |-- NotAllowed          it is known who asks, and that he may not
        |-- QuotaExceeded       a client has used what is his
        |-- HubFull             no room on the hub's disk for now
        |-- AccessError         the file that says who may do what can't be used
        `-- CertificateError    a certificate or its key can't be used, or is there already
"""

from __future__ import annotations

from kvspool import KvspoolError


class HubError(KvspoolError):
    """Base of what a hub says. `retry_after` is how many seconds later the same may succeed; None: not by waiting alone."""

    retry_after: float | None = None


class NotAuthenticated(HubError):
    """A token, certificate or call that stands for nobody. The message is for the hub's log, never for him who asks.

    `principal` is the name that was meant, as far as it is known.
    """

    def __init__(self, why: str, principal: str | None = None) -> None:
        super().__init__(why)
        self.principal = principal


class NotAllowed(HubError):
    """He who asks may not do this. Nothing happened; the access file of the hub says who may."""


class QuotaExceeded(HubError):
    """A client has as much as its quota allows: `what` is bytes, shards or connections. Nothing was stored."""

    exit_code = 8

    def __init__(self, principal: str, what: str, limit: int, retry_after: float | None = None) -> None:
        super().__init__(f"{principal} may have no more {what}: its quota is {limit}")
        self.principal, self.what, self.limit, self.retry_after = principal, what, limit, retry_after


class HubFull(HubError):
    """The hub's disk is as full as it may become. Nothing was stored; the same succeeds when there is room again."""

    exit_code = 8

    def __init__(self, why: str, retry_after: float) -> None:
        super().__init__(f"{why}; try again in {retry_after:.1f} s")
        self.retry_after = retry_after


class AccessError(HubError):
    """The access file, or another secret file, can't be used: others may read it, or it doesn't say what it should. It was not touched."""

    exit_code = 3


class CertificateError(HubError):
    """A certificate or its key can't be used, or would be overwritten. Nothing was changed."""

    exit_code = 3
