"""The statistics of a journal."""

from __future__ import annotations

import msgspec

from kvspool import system
from kvspool.journal import control
from kvspool.journal.format import LAST_TIME
from kvspool.journal.places import Places
from kvspool.journal.reader import Consumer
from kvspool.record import NO_TIME, Codec


class JournalStats(msgspec.Struct, frozen=True):
    """The contents of a journal at one moment.

    segments, used: files, and their size in bytes. first_sequence: of the oldest record; next_sequence: of the next one to be appended.
    first_timestamp, last_timestamp: ns since the Unix epoch, 0 if unknown. synced_sequence: every record below it is on disk. sync_error:
    errno of the first failed flush, 0 if there was none.
    """

    path: str
    format: str
    codec: str
    segments: int
    used: int
    records: int
    first_sequence: int
    next_sequence: int
    first_timestamp: int
    last_timestamp: int
    durability: str
    sync_interval: float
    synced_sequence: int
    sync_error: int
    readers: list[Consumer]

    @property
    def capacity(self) -> int:
        """Return 0: a journal is unbounded."""
        return 0


def collect(places: Places, codec: Codec, durability: str, sync_interval: float, readers: list[Consumer]) -> JournalStats:
    """Return the statistics of a journal now; the last four parameters are those of the handle."""
    bases = places.bases()
    format, first, end = places.format, places.first(), places.end(bases)[0]
    page = control.look(format.lock_file(places.path))
    sizes = [system.port.look_up(places.segments.path_of(base)) for base in bases]
    return JournalStats(
        path=str(places.path),
        format=format.name,
        codec=codec.name.lower(),
        segments=sum(status is not None for status in sizes),
        used=sum(status.st_size for status in sizes if status is not None),
        records=max(0, end.sequence - first),
        first_sequence=first,
        next_sequence=end.sequence,
        first_timestamp=_shown(places.first_time(bases[0])) if format.has_timestamps else 0,
        last_timestamp=_shown(page.last_timestamp) if format.has_timestamps else 0,
        durability=durability,
        sync_interval=sync_interval,
        synced_sequence=page.synced_sequence,
        sync_error=page.sync_error,
        readers=readers,
    )


def _shown(timestamp: int) -> int:
    return 0 if timestamp in (NO_TIME, LAST_TIME) else timestamp
