"""Read many logs as one: by timestamp among the available records, each log in its own order.

A record is returned when it has the smallest timestamp of all available records; the merge never waits for an idle log. So finished logs
are read in the order of the timestamps. While following, a record that arrives later than another one is returned after it, whatever
its timestamp. Within one log the order is always that of its sequences.

**Cost.** A record costs the logarithm of the number of logs with records. A wake-up costs the number of changed logs, not of idle ones.
Twice a second a check of the memory of all spools finds records whose wake-up was lost. All other checks without a wake-up, of journals and
for new and removed logs, are as frequent with up to 64 logs. With more logs they take turns, and get a thousandth of the time. If the
kernel sends no wake-ups, checks of all logs take at most a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from kvspool.engine.cursor import Cursor
from kvspool.engine.wakeups import Watcher
from kvspool.system.handles import Handle
from shard.kernel.merge import FollowingLoops, Merging
from shard.kernel.merge_py import FEW, LOOK_AROUND, REST, UNREADABLE

__all__ = ["FEW", "LOOK_AROUND", "REST", "UNREADABLE", "Cursor", "FollowingMerge", "Merge"]


class Merge(Merging, Iterator[Any], Handle):
    """Iterates over several bounded logs. `limit` and `on_gap`: as in `kvspool.Log.read`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FollowingMerge(FollowingLoops, Merge):
    """Like Merge, but waits for records on one inotify descriptor; ends after `timeout` seconds without a record.

    An idle log is asked once for a wake-up, and read again after it; the module lists the checks in case a wake-up is lost. Logs send no
    wake-ups if the kernel has no watch left, its queue overflowed, or we may not write to a log and so can't ask. Then all are checked
    every `BLIND_POLL` seconds, but for at most a share of our time, for any number of logs.
    """

    def arm(self) -> Watcher:
        """Return a watcher, with the watches other than those of logs."""
        return Watcher()
