"""Many logs read as one: by timestamp within what is there, each log in its own order.

A record is handed out when it has the smallest timestamp of all that can be read at that moment; nothing waits for a log that is silent.
So over logs that were written before, the order is that of the timestamps; while following, a record that arrives later than another
one comes after it, whatever its timestamp. Within one log the order is always that of its sequences.

**Cost.** A record costs the logarithm of the number of logs that have something; a wake-up costs the logs that changed, however many
others are silent. Twice a second a look at the memory of all spools finds records whose wake-up was lost. All other looks without a
wake-up, at journals and for new and removed logs, come as often with up to 64 logs. With more they take turns: they get a thousandth of
the time. Where the kernel gives no wake-ups, looks at everything take a fifth of the time at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from kvspool.engine.wakeups import Watcher
from kvspool.system.handles import Handle
from shard.kernel.merge import FollowingLoops, Merging
from shard.kernel.merge_py import FEW, LOOK_AROUND, REST, UNREADABLE, Cursor

__all__ = ["FEW", "LOOK_AROUND", "REST", "UNREADABLE", "Cursor", "FollowingMerge", "Merge"]


class Merge(Merging, Iterator[Any], Handle):
    """Iterates over several logs that are bounded. `limit` and `on_gap` as `kvspool.Log.read` has them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FollowingMerge(FollowingLoops, Merge):
    """Like Merge, and sleeps on one inotify descriptor where nothing is there; ends after `timeout` seconds without a record.

    A log that falls silent is asked once to wake us, and is read again when it does; the module says which looks back the wake-ups up.
    Where no wake-up will come, because the kernel has no watch left, its queue overflowed, or we may not write to a log and so
    can't ask, all are looked at as often as `BLIND_POLL` says; and not for more than a part of our time, however many there are.
    """

    def arm(self) -> Watcher:
        """Return a watcher of what is to be watched beside the logs."""
        return Watcher()
