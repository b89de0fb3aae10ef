"""The statistics of a journal."""

from __future__ import annotations

from typing import NamedTuple

from kvspool import system
from kvspool.engine.stats import Consumer, LogStats
from kvspool.journal import control
from kvspool.journal.format import LAST_TIME
from kvspool.journal.places import Places
from kvspool.record import NO_TIME, Codec


def collect(places: Places, log_id: bytes, codec: Codec, durability: str, sync_interval: float, readers: list[Consumer]) -> LogStats:
    """Return the statistics of a journal now; the last parameters are those of the handle."""
    bases = places.bases()
    format, first, end = places.format, places.first(bases), places.end(bases)[0]
    page = control.look(format.lock_file(places.path))
    sizes = [system.port.look_up(places.segments.path_of(base)) for base in bases]
    return LogStats(
        path=str(places.path),
        format=format.name,
        log_id=log_id.hex(),
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
        unsynced_records=max(0, end.sequence - max(page.synced_sequence, first)),
        sync_error=page.sync_error,
        readers=readers,
    )


class Glance(NamedTuple):
    """The content of a journal. first, next: sequences; used: bytes of all segments; last_timestamp: ns since 1970, 0 for none."""

    first: int
    next: int
    used: int
    segments: int
    last_timestamp: int


def glance(places: Places, bases: list[int]) -> Glance | None:
    """Return the content by names, sizes and the writers' page, without opening a segment; None if only the frames have it.

    bases: those of the segments, from `Places.bases`.
    """
    format, segments = places.format, places.segments
    sizes = [system.port.look_up(segments.path_of(base)) for base in bases]
    page = control.look(format.lock_file(places.path))
    last = sizes[-1]
    if last is None or page.base != bases[-1] or page.end != last.st_size or not page.end:
        return None
    return Glance(
        bases[0],
        page.next_sequence,
        sum(status.st_size for status in sizes if status is not None),
        sum(status is not None for status in sizes),
        _shown(page.last_timestamp) if format.has_timestamps else 0,
    )


def _shown(timestamp: int) -> int:
    return 0 if timestamp in (NO_TIME, LAST_TIME) else timestamp
