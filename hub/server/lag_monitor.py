"""The lags of a hub root's durable readers, computed by its server without opening shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hub.protocol.status import MemberStatus, ReaderStatus, TaskListStatus
from hub.root import positions, requeued, tasks
from hub.root.holds import RetentionHolds
from hub.root.store import ShardSizes
from kvspool.groups.files import SUFFIX
from kvspool.groups.stats import look
from kvspool.system.pauses import Interval
from kvspool.tasks.stats import TaskStats, workers_of
from shard import route

INTERVAL = 10.0  # seconds between two checks


class LagMonitor:
    """`statuses` is the result of the last check. `look` is called by one thread."""

    def __init__(self, root: Path) -> None:
        self.statuses: list[ReaderStatus] = []
        self._root = root
        self._holds = RetentionHolds(root)
        self._interval = Interval(INTERVAL)

    def look(self, count: Callable[[], dict[str, dict[int, ShardSizes]]]) -> None:
        """Compare the readers' commits with the contents of the shards, which `count` returns, unless the last check was a moment ago.

        A reader without a position in a shard, or with unreadable ones, has read nothing of it; one with an owner doesn't read that shard.
        """
        if not self._interval.is_over():
            return
        sizes, readers = count(), self._holds.readers()
        lags = dict.fromkeys(readers, 0)
        for client, shards in sizes.items():
            for index, one in shards.items():
                for name, (places, owner) in readers.items():
                    place = places.get((client, index))
                    if place is not None or not owner:
                        lags[name] += max(0, one.next - max(one.first, 0 if place is None else place.sequence))
        keys = {route.directory_name(client, _bits(found), index): (client, index) for client, found in sizes.items() for index in found}
        self.statuses = [self._status(name, lag, keys, sizes) for name, lag in lags.items()]

    def _status(self, name: str, lag: int, keys: dict[str, positions.Key], sizes: dict[str, dict[int, ShardSizes]]) -> ReaderStatus:
        states = tasks.listing(self._root, name)
        if not states:
            return ReaderStatus(name=name, lag=lag, members=self._members(name, keys))
        found = _task_list(states, _unread(states, keys, sizes) + requeued.unread(self._root, name, states))
        return ReaderStatus(name=name, lag=found.given + found.waiting, tasks=found)

    def _members(self, name: str, shards: dict[str, positions.Key]) -> list[MemberStatus]:
        """Return the members of the group with a reader's name; none of a damaged one, which `kvspool group` reports."""
        found = look(positions.path_of(self._root, name).with_suffix(SUFFIX), shards)
        return [MemberStatus(process=one.process, joined=one.joined, shards=len(one.shards)) for one in found.members] if found else []


def _unread(states: list[TaskStats], keys: dict[str, positions.Key], sizes: dict[str, dict[int, ShardSizes]]) -> int:
    """Return the number of records that no worker of a task list was given."""
    reached = {one.shard: one.next for one in states}
    ends = ((sizes[client][index], reached.get(name, 0)) for name, (client, index) in keys.items())
    return sum(max(0, one.next - max(one.first, at)) for one, at in ends)


def _task_list(states: list[TaskStats], unread: int) -> TaskListStatus:
    """Return the state of a task list, given that in each shard."""
    return TaskListStatus(
        workers=workers_of(states),
        given=sum(one.taken + one.dying for one in states),
        waiting=unread + sum(one.ready + one.delayed + one.held for one in states),
        delayed=sum(one.delayed for one in states),
        retried=sum(one.repeated for one in states),
        dead=sum(one.dead for one in states),
        window=sum(one.window for one in states),
        used=sum(one.used for one in states),
        waits_for=[f"{one.shard}: {one.waits_for or one.problem}" for one in states if one.waits_for or one.problem],
    )


def _bits(shards: dict[int, ShardSizes]) -> int:
    """Return the bits of a client's set by the number of its shards."""
    return max(0, len(shards) - 1).bit_length()
