"""The errors between a hub and its clients.

    KvspoolError
    `-- HubError
        |-- Malformed           a message breaks the protocol
        |-- NotAuthenticated    the caller has no valid identity
        |-- NotAllowed          the caller is known, but lacks the right
        |-- HubFull             no space, or too many connections, at this moment: retry later
        |-- QuotaExceeded       a client has used up its quota
        |-- Conflict            the shard holds other records than the sent ones
        |   |-- Fenced          the log was replaced by another one in its shard
        |   `-- Restored        the log ends before the hub's copy of it
        |-- Unexpected          records before the sent ones are missing, and were not declared lost
        |-- ShardDamaged        the hub's own shard is damaged, or was removed
        |-- ShardReplaced       a durable reader's position is in a log that no longer exists
        |-- NotFound            the hub has no such client or shard
        |-- RootInUse           another hub serves this root
        |-- Unreachable         the hub can't be reached
        |   `-- Silent          the hub was reached, but doesn't answer
        |-- CopyUnreachable     a hub that can't be asked may have a record that the log no longer has
        |-- AccessError         the access file, or another secret file, can't be used
        `-- CertificateError    a certificate or its key can't be used, or exists already
"""

from __future__ import annotations

from kvspool.errors import KvspoolError


class HubError(KvspoolError):
    """Base of a hub's refusals. Nothing of the refused message was stored.

    `retry_after`: seconds after which a retry may succeed; None: waiting alone doesn't help.
    """

    exit_code = 9
    retry_after: float | None = None


class Malformed(HubError):
    """A received message breaks the protocol, or one of its limits."""


class NotAuthenticated(HubError):
    """A token, certificate or call without a known principal. The message is for the hub's log, never for the caller.

    `principal` is the intended name, as far as it is known.
    """

    def __init__(self, why: str, principal: str | None = None) -> None:
        super().__init__(why)
        self.principal = principal


class NotAllowed(HubError):
    """The caller may not do this. Nothing happened; the hub's access file grants rights."""


class QuotaExceeded(HubError):
    """A client has reached its quota of bytes, shards or connections. Nothing was stored."""

    exit_code = 8

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HubFull(HubError):
    """There is no space at this moment. Nothing was stored; retry after `retry_after` seconds."""

    exit_code = 8

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Conflict(HubError):
    """The shard holds other records than the sent ones. Nothing was changed; a person has to decide which ones are right."""


class Fenced(Conflict):
    """Another log has replaced this one in the shard. Two clients have one id, or a log is an old copy: only the newest is accepted."""


class Restored(Conflict):
    """The log ends before the hub's copy of it: it was restored from an older state, and would assign sequences a second time."""


class Unexpected(HubError):
    """Records before the sent ones are missing. `expected` is the next sequence."""

    def __init__(self, message: str, expected: int) -> None:
        super().__init__(message)
        self.expected = expected


class ShardDamaged(HubError):
    """The hub's shard is damaged, or was removed. The operator of the hub has to repair it; other shards are not affected."""


class ShardReplaced(HubError):
    """A shard has another log than the one of a durable reader's position: it was recreated, or restored from an older copy.

    Unread records of the old log are lost; their number is unknown. `sequence` is the reader's position in the old log. The reader is
    now at the earliest record of the new log, `first`: read the next record to continue, or `seek`.
    """

    exit_code = 7

    def __init__(self, path: str, client: str, shard: int, sequence: int, first: int, why: str) -> None:
        super().__init__(f"{path}: {why}; the reader's position was {sequence}; it continues at the earliest record, {first}")
        self.path, self.client, self.shard, self.sequence, self.first = path, client, shard, sequence, first


class NotFound(HubError):
    """The hub has no such client, or no such shard of it, yet. A caller without the right to read the client always gets NotAllowed."""


class RootInUse(HubError):
    """Another hub serves this root. Stop it first; two hubs would both assign the same space."""


class Unreachable(HubError):
    """The hub can't be reached, or doesn't answer. Acknowledged records are stored; the client keeps the others."""


class Silent(Unreachable):
    """The hub or the network stopped responding during a call, or a message takes longer than the timeout."""


class CopyUnreachable(HubError):
    """A log no longer has a record that another hub may have, and that hub can't be asked. The record was not declared lost."""


class AccessError(HubError):
    """The access file, or another secret file, can't be used: others may read it, or its content is invalid. It was not changed."""

    exit_code = 3


class CertificateError(HubError):
    """A certificate or its key can't be used, or would be overwritten. Nothing was changed."""

    exit_code = 3
