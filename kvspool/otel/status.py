"""The state of a shipper to a collector."""

from __future__ import annotations

import msgspec

from kvspool.system.attempts import AttemptState


class CollectorStatus(msgspec.Struct, frozen=True):
    """The state of a shipper to a collector.

    reader: its durable reader. sent: accepted records, repeated ones counted again, in so many requests with so many bytes before
    compression. behind: records that are still to be sent. lost: sequences that were overwritten, removed or damaged before they were sent.
    rejected: records that became dead letters, because the collector refused them or some of their items, `rejected_items`. outages: failed
    attempts. retry_in: seconds until the next attempt, in the state "waiting". error: why it failed. warning: the last words of the
    collector about accepted requests.
    """

    log: str
    reader: str
    endpoint: str
    state: AttemptState
    behind: int
    sent: int
    requests: int
    bytes: int
    lost: int
    rejected: int
    rejected_items: int
    outages: int
    retry_in: float
    error: str
    warning: str
