"""Timestamps given by a caller: at most a day after the clock.

Timestamps in a spool, and in a kvj or sej journal, never decrease, so that a time can be looked up. A record with a time far in the future
would force this time on every later record, permanently. So such a time is refused before anything is written. A day tolerates wrong
clocks, and a log whose last time is a day ahead is right again a day later.

Resize and salvage keep the times of a spool. A journal keeps the times of records from another log: by a copy, by `append_batch`, or from a
client of a hub, whose own log has refused times ahead of the clock.
"""

from __future__ import annotations

from datetime import UTC, datetime

from kvspool import system

MOST_AHEAD = 86_400_000_000_000  # most ns of a caller's timestamp after the clock


def latest() -> int:
    """Return the latest permitted time of a record, ns since the Unix epoch."""
    return system.port.now() + MOST_AHEAD


def check(timestamp: int) -> None:
    """Raise ValueError for an invalid time."""
    if not 0 <= timestamp < 1 << 63:
        raise ValueError(f"a timestamp is ns since 1970, 0..2**63-1, not {timestamp}")
    refuse_ahead(timestamp)


def refuse_ahead(timestamp: int) -> None:
    """Raise ValueError for a time more than a day after the clock."""
    if timestamp > latest():
        raise ValueError(
            f"timestamp {timestamp} is more than a day after this machine's clock ({_shown(system.port.now())}): times in a log never "
            "decrease, so all later records would get it. Leave it out, or set the clock if that is wrong"
        )


def _shown(now: int) -> str:
    return datetime.fromtimestamp(now / 1e9, UTC).isoformat(timespec="seconds")
