"""The errors of deliveries to a collector.

KvspoolError
`-- CollectorError          a request was not accepted
    |-- CollectorAway       the collector can't be reached, or asks for a retry
    |   `-- CollectorSilent it was reached, but didn't answer in time
    |-- CollectorRefuses    the address, the credentials or the server are wrong: no request would be accepted
    `-- RequestRejected     the collector will never accept this request
"""

from __future__ import annotations

from kvspool.errors import KvspoolError


class CollectorError(KvspoolError):
    """The collector did not accept a request. The records are still in the log.

    `retry_after`: seconds that the collector asks to wait; None: it didn't say.
    """

    exit_code = 9
    retry_after: float | None = None


class CollectorAway(CollectorError):
    """The collector can't be reached, doesn't answer, or asks for a retry."""


class CollectorSilent(CollectorAway):
    """The collector did not answer in time. It may have accepted the request."""


class CollectorRefuses(CollectorError):
    """The collector accepts no request at this address with these credentials, or the server is none. Check both."""


class RequestRejected(CollectorError):
    """The collector will never accept this request."""
