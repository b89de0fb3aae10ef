"""The statistics of a log at one moment."""

from __future__ import annotations

import msgspec


class Bucket(msgspec.Struct, frozen=True):
    """The counts from `time` on (seconds since the Unix epoch), for the length of the bucket. bytes: of the ring. gaps: approximate."""

    time: int
    records: int
    bytes: int
    gaps: int


class Rate(msgspec.Struct, frozen=True):
    """Per second, on average."""

    records: float = 0.0
    bytes: float = 0.0
    gaps: float = 0.0


class Rates(msgspec.Struct, frozen=True):
    """Rates over the last whole second, the last 60 whole seconds and the last 60 whole minutes; and the series from which they are
    computed. `time` is 0 for a log that doesn't count them.

    The series contain only non-empty buckets, the oldest first; the last one may still grow.
    """

    time: int = 0
    last_second: Rate = Rate()
    last_minute: Rate = Rate()
    last_hour: Rate = Rate()
    seconds: list[Bucket] = []
    minutes: list[Bucket] = []
    hours: list[Bucket] = []


class Consumer(msgspec.Struct, frozen=True):
    """A durable reader of a journal.

    sequence: of its next record; lag: records from there to the end; problem: why its position can't be read.
    """

    name: str
    sequence: int | None
    lag: int
    problem: str = ""


class LogStats(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a log at one moment. Fields that a kind of log doesn't have keep their default; `shown` leaves them out.

    format: the kind. log_id: in hex, empty for a journal without one. used: bytes of the ring with frames in them, or of all segments.
    first_sequence: of the oldest record; next_sequence: of the next one to be appended. first_timestamp, last_timestamp: ns since the Unix
    epoch, 0 if unknown. durability: the level of this handle; sync_interval: seconds, for the level "os". synced_sequence: every record
    below it is on disk; unsynced_records: from there on. sync_error: errno of the first failed flush, 0 if there was none.

    Of a spool: capacity: bytes of the ring. policy; reader_expiry: seconds, 0 for never. unsynced_bytes: of the ring. created: ns since the
    Unix epoch. rates: of appends and Gaps. recoveries: how often the log was recovered after a restart of the machine; recovered: the last
    time, ns since the Unix epoch, 0 for never; lost_records, lost_bytes: records of the control block that the last recovery did not find.

    Of a journal: segments: files. readers: its durable readers; `Log.readers` returns those of every log.
    """

    path: str
    format: str
    log_id: str
    codec: str
    policy: str = ""
    reader_expiry: float = 0.0
    capacity: int = 0
    segments: int = 0
    used: int
    records: int
    first_sequence: int
    next_sequence: int
    first_timestamp: int
    last_timestamp: int
    durability: str
    sync_interval: float
    synced_sequence: int
    unsynced_records: int
    unsynced_bytes: int = 0
    sync_error: int
    created: int = 0
    rates: Rates = Rates()
    recoveries: int = 0
    recovered: int = 0
    lost_records: int = 0
    lost_bytes: int = 0
    readers: list[Consumer] = []

    def shown(self) -> list[str]:
        """Return the names of the fields that this kind of log has."""
        others = _OF_JOURNALS if self.capacity else _OF_SPOOLS
        return [name for name in self.__struct_fields__ if name not in others]


_OF_JOURNALS = ("segments", "readers")
_OF_SPOOLS = tuple("policy reader_expiry capacity unsynced_bytes created rates recoveries recovered lost_records lost_bytes".split())
