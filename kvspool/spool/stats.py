"""The contents of a spool at one moment: what `stats` returns."""

from __future__ import annotations

import msgspec

from kvspool import system
from kvspool.kernel import frames_py as frames
from kvspool.record import Codec
from kvspool.spool import epochs, format, rates, search
from kvspool.spool.spool_files import SpoolFiles


class SpoolStats(msgspec.Struct, frozen=True):
    """The contents of a spool at one moment.

    capacity, used: bytes of the ring, in all and with frames in them. first_sequence: of the oldest record; next_sequence: of the next one
    to be appended. first_timestamp, last_timestamp, created: ns since the Unix epoch, 0 if there is no record. synced_sequence: every
    record below it is on disk; unsynced_records, unsynced_bytes: from there on. reader_expiry: seconds, 0 for never. durability: the level
    of this handle; sync_interval: seconds, for the level "os". sync_error: errno of the first failed flush, 0 if there was none. rates: of
    appends and Gaps. recoveries: how often the log was recovered after a restart of the machine; recovered: the last time, ns since the
    Unix epoch, 0 for never; lost_records, lost_bytes: records of the control block that the last recovery did not find.
    """

    path: str
    format: str
    log_id: str
    policy: str
    reader_expiry: float
    codec: str
    capacity: int
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
    unsynced_bytes: int
    sync_error: int
    created: int
    rates: rates.Rates
    recoveries: int = 0
    recovered: int = 0
    lost_records: int = 0
    lost_bytes: int = 0


def stats(files: SpoolFiles, durability: str, sync_interval: float) -> SpoolStats:
    """Return the statistics of a log. durability, sync_interval: of the handle."""
    reader = files.reader(0, 0)
    synced, synced_sequence = reader.word(format.SYNCED), reader.word(format.SYNCED_SEQ)
    position, first = search.find(reader, "earliest")
    tail, next_sequence, last = reader.mark()
    reader.walk(position, tail, 0, 0)
    first_timestamp = reader.timestamp if position < tail else 0
    return SpoolStats(
        path=str(files.path),
        format="spool",
        log_id=files.origin.hex(),
        policy=format.POLICIES[files.header.policy],
        reader_expiry=files.header.reader_expiry / 1e9,
        codec=Codec(files.header.codec).name.lower(),
        capacity=files.header.capacity,
        used=tail - position,
        records=search.count(reader, first, (tail, next_sequence)),
        first_sequence=first,
        next_sequence=next_sequence,
        first_timestamp=first_timestamp,
        last_timestamp=last,
        durability=durability,
        sync_interval=sync_interval if durability == "os" else 0.0,
        synced_sequence=synced_sequence,
        unsynced_records=max(0, next_sequence - max(synced_sequence, first)),
        unsynced_bytes=max(0, tail - max(synced, position)),
        sync_error=reader.word(frames.SYNC_ERROR),
        created=files.header.created,
        rates=rates.rates(files.control.cast("Q"), system.port.now()),
        **_recovered(files),
    )


def _recovered(files: SpoolFiles) -> dict[str, int]:
    """Return the fields of SpoolStats about the last recovery."""
    found = epochs.newest(files.control, files.header.log_id)
    names = ("recoveries", "recovered", "lost_records", "lost_bytes")
    return {name: 0 if found is None else getattr(found[1], name) for name in names}
