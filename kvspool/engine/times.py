"""Times that a caller gives: not later than a day after the clock.

Timestamps in a spool, and in a kvj or sej journal, never decrease, so that a time can be looked up. A record with a time far in the future
would give this time to every record after it, for good. So such a time is refused before anything is written. A day
leaves room for clocks that are set wrong, and a log whose last time is a day ahead is right again a day later.

Resize and salvage keep the times that a spool has. A journal keeps those of records that come from another log: by a copy, by
`append_batch`, or from a client of a hub, whose own log has refused times ahead of the clock.
"""

from __future__ import annotations

from datetime import UTC, datetime

from kvspool import system
from kvspool.kernel import frames_py as frames


def latest() -> int:
    """Return the latest time that a record may have now, ns since the Unix epoch."""
    return system.port.now() + frames.MOST_AHEAD


def check(timestamp: int) -> None:
    """Raise ValueError for a time that a record can't have."""
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
