"""The state of a shipper: of each log, of each hub, and of all hubs together; and that of a mirror."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvspool.system.attempts import AttemptState

State = Literal[AttemptState, "degraded"]
"""degraded: of several hubs, some are connected and others are not."""


class SenderStatus(msgspec.Struct, frozen=True):
    """The state of one shipped log.

    sent: records sent, repeated ones counted again; acknowledged: the hub has stored every sequence below it. Records that the hub has not
    stored are `behind`. lost: sequences that were overwritten before they were sent; error: why the log is not shipped now. Of several
    hubs, enough must have a record until it counts as stored.
    """

    shard: int
    path: str
    sent: int
    acknowledged: int
    behind: int
    lost: int
    error: str


class ShipStatus(msgspec.Struct, frozen=True):
    """The state of a shipper. outages: broken connections; retry_in: seconds until the next attempt, in the state "waiting".

    copies: the state at each hub, if there are several; then `hub` has all locations. acks: hubs that have to store a record.
    """

    client: str
    hub: str
    state: State
    behind: int
    sent: int
    bytes: int
    lost: int
    outages: int
    retry_in: float
    error: str
    lanes: list[SenderStatus]
    copies: list[ShipStatus] = []
    acks: int = 1

    @property
    def by_hub(self) -> list[ShipStatus]:
        """Return the state at each hub."""
        return self.copies or [self]


class ShardMirrorStatus(msgspec.Struct, frozen=True):
    """The state of one shard.

    pulled: records; next: sequence below which all is stored here; behind: sequences that only the source has; lost: sequences that no
    reader can get any more; error: why the shard is not pulled at this moment.
    """

    client: str
    shard: int
    path: str
    pulled: int
    next: int
    behind: int
    lost: int
    error: str


class MirrorStatus(msgspec.Struct, frozen=True):
    """The state of a mirror. outages: broken connections; retry_in: seconds until the next attempt, in the state "waiting"."""

    source: str
    root: str
    state: AttemptState
    behind: int
    pulled: int
    bytes: int
    lost: int
    outages: int
    retry_in: float
    error: str
    shards: list[ShardMirrorStatus]
