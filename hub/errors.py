"""Everything that can go wrong between a hub and who speaks to it.

    KvspoolError
    `-- HubError
        |-- Malformed           what came over the wire is no message of this protocol
        |-- NotAuthenticated    nobody knows who asks
        |-- NotAllowed          it is known who asks, and that he may not
        |-- HubFull             no room, or no more connections, at this moment: try again later
        |-- QuotaExceeded       a client has used what is his
        |-- Conflict            the shard holds other records than those that were sent
        |   |-- Fenced          the log was replaced by another one in its shard
        |   `-- Restored        the log ends before what the hub has of it
        |-- Unexpected          records are missing before those that were sent, and nobody said that they are lost
        |-- ShardDamaged        the hub's own shard is damaged, or was removed
        |-- ShardReplaced       a durable reader's place is in a log that is there no more
        |-- NotFound            the hub has no such client, or no such shard
        |-- RootInUse           another hub serves this root
        |-- Unreachable         the hub can't be reached
        |   `-- Silent          the hub was reached, and doesn't answer
        |-- AccessError         the file that says who may do what can't be used
        `-- CertificateError    a certificate or its key can't be used, or is there already
"""

from __future__ import annotations

from kvspool.errors import KvspoolError


class HubError(KvspoolError):
    """Base of what a hub refuses. Nothing was stored of what the message speaks of.

    `retry_after` is how many seconds later the same may succeed; None: not by waiting alone.
    """

    exit_code = 9
    retry_after: float | None = None


class Malformed(HubError):
    """What came over the wire is no message of this protocol, or breaks a limit of it."""


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
    """A client has as much as its quota allows, of bytes, shards or connections. Nothing was stored."""

    exit_code = 8

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HubFull(HubError):
    """There is no room at this moment. Nothing was stored; try again after `retry_after` seconds."""

    exit_code = 8

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Conflict(HubError):
    """The shard holds other records than those that were sent. Nothing was changed; a person has to look which ones are right."""


class Fenced(Conflict):
    """Another log has taken this one's place in the shard. Two clients with one id, or an old copy of a log: only the newest is taken."""


class Restored(Conflict):
    """The log ends before what the hub has of it: it was restored from an older state, and would give sequences out again."""


class Unexpected(HubError):
    """Records are missing before those that were sent. `expected` is the sequence that comes next."""

    def __init__(self, message: str, expected: int) -> None:
        super().__init__(message)
        self.expected = expected


class ShardDamaged(HubError):
    """The hub's shard is damaged, or was removed. Whoever looks after the hub has to repair it; the other shards go on."""


class ShardReplaced(HubError):
    """The log of a shard isn't the one in which a durable reader has its place: it was made anew, or restored from an older copy.

    What the reader had not read of the old one can't be had any more; how much that was, nobody knows. `sequence` is the place it had
    there. The reader stands at the earliest record of the new log, `first`: take the next record to go on, or `seek`.
    """

    exit_code = 7

    def __init__(self, path: str, client: str, shard: int, sequence: int, first: int, why: str) -> None:
        super().__init__(f"{path}: {why}; the reader's place was {sequence}, and it goes on at the earliest record, {first}")
        self.path, self.client, self.shard, self.sequence, self.first = path, client, shard, sequence, first


class NotFound(HubError):
    """The hub has no such client, or no such shard of it, yet. Who may not read the client gets NotAllowed, whether it is there or not."""


class RootInUse(HubError):
    """Another hub serves this root. Stop it first; two would give the same room away twice."""


class Unreachable(HubError):
    """The hub can't be reached, or doesn't answer. What was acknowledged is there; the rest is kept by the client."""


class Silent(Unreachable):
    """The hub, or the network, has stopped in the midst of a call; or what was sent takes longer than one waits."""


class AccessError(HubError):
    """The access file, or another secret file, can't be used: others may read it, or it doesn't say what it should. It was not touched."""

    exit_code = 3


class CertificateError(HubError):
    """A certificate or its key can't be used, or would be overwritten. Nothing was changed."""

    exit_code = 3
