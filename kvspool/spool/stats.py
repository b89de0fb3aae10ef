"""The contents of a spool at one moment: what `stats` returns."""

from __future__ import annotations

from typing import Any

from kvspool import system
from kvspool.engine.stats import LogStats
from kvspool.kernel import frames_py as frames
from kvspool.record import Codec
from kvspool.spool import epochs, format, rates, search
from kvspool.spool.spool_files import SpoolFiles


def stats(files: SpoolFiles, durability: str, sync_interval: float) -> LogStats:
    """Return the statistics of a log. durability, sync_interval: of the handle."""
    reader = files.reader(0, 0)
    synced, synced_sequence = reader.word(format.SYNCED), reader.word(format.SYNCED_SEQ)
    position, first = search.find(reader, "earliest")
    tail, next_sequence, last = reader.mark()
    reader.walk(position, tail, 0, 0)
    first_timestamp = reader.timestamp if position < tail else 0
    return LogStats(
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


def _recovered(files: SpoolFiles) -> dict[str, Any]:
    """Return the fields of LogStats about the last recovery."""
    found = epochs.newest(files.control, files.header.log_id)
    names = ("recoveries", "recovered", "lost_records", "lost_bytes")
    return {name: 0 if found is None else getattr(found[1], name) for name in names}
