"""Errors of a call as its client gets them: a status of gRPC, with the trailers of Arrow Flight and the data that programs need.

They have neither paths nor tracebacks of the hub.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from hub.errors import HubError, HubFull, NotAllowed, NotAuthenticated, QuotaExceeded, ShardDamaged
from hub.protocol import reading
from hub.server.call import Code, Metadata, Status
from hub.server.shard_index import is_scarce, shown
from kvspool.errors import KvspoolError

_IO_ERROR = "5"  # Arrow's own code for every error of Flight
_KINDS = {
    NotAuthenticated: (Code.UNAUTHENTICATED, "Unauthenticated"),
    NotAllowed: (Code.PERMISSION_DENIED, "Unauthorized"),
    HubFull: (Code.UNAVAILABLE, "Unavailable"),
    QuotaExceeded: (Code.UNAVAILABLE, "Unavailable"),
    ShardDamaged: (Code.INTERNAL, "Internal"),
}
_OTHERS = Code.UNKNOWN, "Failed"
logger = logging.getLogger("kvspool.hub")


def status_of(error: Exception, root: Path) -> Status:
    """Return the status for an error, and log one that isn't a refusal."""
    known = hub_error_of(error, root)
    if not isinstance(error, HubError):
        logger.error("a call got the error %s", known, exc_info=None if isinstance(error, KvspoolError | OSError) else error)
    if isinstance(known, NotAuthenticated):
        return _status(known, str(known), b"")
    failure = reading.failure(known)
    return _status(known, failure.message, msgspec.json.encode(failure))


def _status(error: HubError, message: str, info: bytes) -> Status:
    code, detail = _KINDS.get(type(error), _OTHERS)
    trailers: Metadata = [
        ("x-arrow-status", _IO_ERROR),
        ("x-arrow-status-detail-bin", detail.encode()),
        ("x-arrow-status-message-bin", message.encode()),
    ]
    if info:
        trailers.append(("grpc-status-details-bin", info))
    return Status(code, message, trailers)


def hub_error_of(error: Exception, root: Path) -> HubError:
    """Return the HubError for an error of a log."""
    if isinstance(error, HubError):
        return error
    if is_scarce(error):
        return HubFull(f"the hub lacks space for that now: {shown(error, root)}")
    if isinstance(error, MemoryError):
        return HubFull("the hub lacks memory for that now", 1.0)
    if isinstance(error, KvspoolError | OSError):
        return ShardDamaged(f"the hub can't continue reading: {shown(error, root)}")
    return ShardDamaged("the hub failed; its own log has the reason")
