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
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from kvspool import system
from kvspool.engine.cursor import Cursor
from kvspool.engine.iteration import check_spin
from kvspool.engine.wakeups import BLIND_POLL, Watcher
from kvspool.options import OnGap
from kvspool.record import Gap
from kvspool.system.handles import ClosingHandle
from shard.kernel.following_py import FEW, REST
from shard.kernel.merge import FollowingLoops, MergeSource, Merging
from shard.kernel.merge_py import LOOK_AROUND, UNREADABLE

__all__ = ["FEW", "LOOK_AROUND", "REST", "UNREADABLE", "Cursor", "FollowingMerge", "Merge", "NoGaps", "Values"]

R = TypeVar("R", covariant=True)
NoGaps = Literal["raise", "skip"]  # kinds of `OnGap` for which an iteration returns only records


class Merge(Merging, Iterator[R], ClosingHandle):
    """Iterates over several bounded logs. `limit` and `on_gap`: as in `kvspool.Log.read`."""

    if TYPE_CHECKING:

        def __iter__(self) -> Self: ...
        def __next__(self) -> R: ...


class Values(Iterator[R], ClosingHandle, Generic[R]):
    """Iterates over the stored bytes of the records of a merge, and over its Gaps."""

    def __init__(self, merge: Merge[Any]) -> None:
        self._merge = merge

    @property
    def missed(self) -> int:
        """Return how many sequences were in Gaps so far."""
        return int(self._merge.missed)

    def __next__(self) -> R:
        item: Any = next(self._merge)
        value: R = item if type(item) is Gap else item.value  # type: ignore[assignment]  # `R` includes Gap then
        return value

    def close(self) -> None:
        """Close all logs and end the iteration."""
        self._merge.close()


class SpinningWatcher(Watcher):
    """A watcher that polls before it sleeps. Only for callers that want it: a wait in Python takes 7 us more than a compiled one."""

    def __init__(self, spin: float) -> None:
        """spin: seconds to poll before sleeping: that uses a core, and saves the wake-up."""
        super().__init__()
        self._spin = spin

    def wait(self, timeout: float) -> set[Any] | None:
        spin = 0.0 if self.is_blind else min(self._spin, timeout)
        until = system.port.monotonic() + spin
        while system.port.monotonic() < until:
            keys = super().wait(0.0)
            if keys or keys is None:
                return keys
        return super().wait(timeout - spin)


class FollowingMerge(FollowingLoops, Merge[R], Generic[R]):
    """Like Merge, but waits for records on one inotify descriptor; ends after `timeout` seconds without a record.

    An idle log is asked once for a wake-up, and read again after it; the module lists the checks in case a wake-up is lost. Logs send no
    wake-ups if the kernel has no watch left, or its queue overflowed. Nor does a log that we may not write to, because we can't ask. Then
    all are checked every `BLIND_POLL` seconds, but for at most a share of our time, for any number of logs.
    """

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise", timeout: float | None = None, spin: float = 0.0) -> None:
        super().__init__(limit, on_gap, timeout)
        self._spin = check_spin(spin)

    def arm(self) -> Watcher:
        """Return a watcher, with the watches other than those of logs."""
        return SpinningWatcher(self._spin) if self._spin else Watcher()

    def take_events(self) -> Watcher | None:
        """Take the wake-ups that have arrived, without waiting. Return the watcher to sleep on; None if there were some.

        For a merge with the timeout 0: its next call checks the logs. A later record wakes the watcher.
        """
        watcher = self._watcher
        if not isinstance(watcher, Watcher):
            self._watcher = self.arm()
            return None
        keys = watcher.wait(0.0)
        for key in keys or ():
            if not isinstance(key, MergeSource):
                self.notice(key)
        return None if keys else watcher

    async def sleep(self, left: float) -> None:
        """Sleep in a task until a log may have records, up to `left` seconds; not at all if wake-ups have arrived since the last check."""
        watcher = self.take_events()
        if watcher is not None:
            can_ask = all(source.cursor.is_rung for source in self.sources.values())
            await watcher.sleep(left if can_ask else min(left, BLIND_POLL))
