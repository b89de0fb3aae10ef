"""Everything that can go wrong between a hub and who speaks to it.

    KvspoolError
    `-- HubError
        |-- Malformed           what came over the wire is no message of this protocol
        |-- NotAllowed          nobody gave this client the right to that
        |-- HubFull             no room, or no more connections, at this moment: try again later
        |-- QuotaExceeded       the client has used up what it may have
        |-- Conflict            the shard holds other records than those that were sent
        |   |-- Fenced          the log was replaced by another one in its shard
        |   `-- Restored        the log ends before what the hub has of it
        |-- Unexpected          records are missing before those that were sent, and nobody said that they are lost
        |-- ShardDamaged        the hub's own shard is damaged, or was removed
        |-- RootInUse           another hub serves this root
        `-- Unreachable         the hub can't be reached
            `-- Silent          the hub was reached, and doesn't answer
"""

from __future__ import annotations

from kvspool.errors import KvspoolError


class HubError(KvspoolError):
    """Base of what a hub refuses. Nothing was stored of what the message speaks of."""

    exit_code = 8


class Malformed(HubError):
    """What came over the wire is no message of this protocol, or breaks a limit of it."""


class NotAllowed(HubError):
    """Nobody gave the right to do that to who asked. Ask whoever looks after the hub."""


class HubFull(HubError):
    """There is no room at this moment. Try again after `retry_after` seconds; what was acknowledged is kept."""

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(HubError):
    """The client has used up what it may have. Try again after `retry_after` seconds: something may have been trimmed by then."""

    def __init__(self, message: str, retry_after: float = 60.0) -> None:
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


class RootInUse(HubError):
    """Another hub serves this root. Stop it first; two would give the same room away twice."""


class Unreachable(HubError):
    """The hub can't be reached, or doesn't answer. What was acknowledged is there; the rest is kept by the client."""


class Silent(Unreachable):
    """The hub, or the network, has stopped in the midst of a call; or what was sent takes longer than one waits."""
