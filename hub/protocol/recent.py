"""The newest records of a shard, in short, for the hub's page. Keys and values come from clients: code that shows them escapes them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

MOST = 20  # records of an answer
LONGEST_VALUE = 1000  # characters
LONGEST_KEY = 200  # characters


class RecentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record, or a Gap before a record: then `lost` is the number of its sequences, and nothing else but `sequence` counts."""

    sequence: int  # of a Gap: its first one
    lost: int = 0
    timestamp: int = 0  # ns since 1970; 0: none
    type: int = 0
    codec: str = ""  # "" if this kvspool doesn't know it
    key: str | None = None  # None: no key
    size: int = 0  # bytes of the value
    value: str = ""  # as text; structured ones as JSON, other bytes in hex
    is_cut: bool = False  # whether `value` is only the beginning


class RecentRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a shard, the newest first. first, next: the sequences of its oldest and of its next record."""

    client: str
    shard: int
    first: int
    next: int
    records: list[RecentRecord]


RecordsOf = Callable[[list[str], str, int, int | None, str], RecentRecords]
"""Returns the newest records of a shard. Arguments: the values of the caller's authorization headers, the client, the shard, the sequence
before which the records are (None: the end), the caller's address for the log. Raises NotAuthenticated, NotAllowed, NotFound and the
errors of reading a log."""
