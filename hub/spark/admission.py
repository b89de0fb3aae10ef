"""How much of what is there goes into one micro-batch: Kafka's maxOffsetsPerTrigger, minOffsetsPerTrigger and maxTriggerDelay.

Pure, but for the moment of the last batch that `Delay` keeps; the clock is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hub.spark.shards import ShardKey


def share(starts: Mapping[ShardKey, int], ends: Mapping[ShardKey, int], most: int) -> dict[ShardKey, int]:
    """Return how far to read each shard of `ends`, so that it is `most` records in all. starts: the next of each; those that it leaves out
    are read up to their end.

    Shards share in proportion to what is there of them, so that all tasks have work, and all of them come to their ends at once. Each one
    that has something gets one at least, even if those alone are more than `most`: a small one is not starved by large ones.
    """
    backlogs = {key: end - starts[key] for key, end in ends.items() if end > starts.get(key, end)}
    spare, total = max(most - len(backlogs), 0), sum(backlogs.values()) - len(backlogs)
    if spare >= total:
        return dict(ends)
    shares = {key: 1 + spare * (backlog - 1) // total for key, backlog in backlogs.items()}
    left = max(most - sum(shares.values()), 0)  # by rounding down, so it is fewer than those that were
    for key in [key for key, backlog in backlogs.items() if spare * (backlog - 1) % total][:left]:
        shares[key] += 1
    return {key: starts[key] + shares[key] if key in shares else end for key, end in ends.items()}


@dataclass
class Delay:
    """Holds a micro-batch back until `least` records are there, but no longer than `longest` seconds after the last one. clock: seconds."""

    least: int
    longest: float
    clock: Callable[[], float]
    _last: float | None = field(default=None, init=False)

    def holds_back(self, available: int) -> bool:
        """Return whether to wait for more than these records. A query's first batch is not held back, nor one after a long silence."""
        if available == 0:
            return False  # there is nothing to hold back, and no batch either
        now = self.clock()
        if available < self.least and self._last is not None and now - self._last < self.longest:
            return True
        self._last = now
        return False
