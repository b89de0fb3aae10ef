"""The size of a micro-batch: Kafka's maxOffsetsPerTrigger, minOffsetsPerTrigger and maxTriggerDelay.

Pure functions, except that `Delay` keeps the time of the last batch; the clock is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hub.spark.shards import ShardKey


def share(starts: Mapping[ShardKey, int], ends: Mapping[ShardKey, int], most: int) -> dict[ShardKey, int]:
    """Return up to which sequence to read each shard of `ends`, for `most` records in all.

    starts: the next sequence of each shard; shards without one are read up to their end.

    Shards share in proportion to their backlog, so that all tasks have work, and all shards reach their ends at once. Each shard with a
    backlog gets at least one record, even if that exceeds `most`: large shards don't starve small ones.
    """
    backlogs = {key: end - starts[key] for key, end in ends.items() if end > starts.get(key, end)}
    spare, total = max(most - len(backlogs), 0), sum(backlogs.values()) - len(backlogs)
    if spare >= total:
        return dict(ends)
    shares = {key: 1 + spare * (backlog - 1) // total for key, backlog in backlogs.items()}
    left = max(most - sum(shares.values()), 0)  # left over by rounding down, so fewer than the rounded shares
    for key in [key for key, backlog in backlogs.items() if spare * (backlog - 1) % total][:left]:
        shares[key] += 1
    return {key: starts[key] + shares[key] if key in shares else end for key, end in ends.items()}


@dataclass
class Delay:
    """Holds a micro-batch back until `least` records are available, but at most `longest` seconds after the last one. clock: seconds."""

    least: int
    longest: float
    clock: Callable[[], float]
    _last: float | None = field(default=None, init=False)

    def holds_back(self, available: int) -> bool:
        """Return whether to wait for more records. A query's first batch, or one after a long pause, is not held back."""
        if available == 0:
            return False  # nothing to hold back
        now = self.clock()
        if available < self.least and self._last is not None and now - self._last < self.longest:
            return True
        self._last = now
        return False
