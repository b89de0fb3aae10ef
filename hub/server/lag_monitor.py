"""The lags of a hub root's durable readers, computed by its server without opening shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hub.protocol.status import MemberStatus, ReaderStatus
from hub.root import positions
from hub.root.holds import RetentionHolds
from hub.root.store import ShardSizes
from kvspool import system
from kvspool.groups.files import SUFFIX
from kvspool.groups.stats import look
from shard import route

INTERVAL = 10.0  # seconds between two checks


class LagMonitor:
    """`statuses` is the result of the last check. `look` is called by one thread."""

    def __init__(self, root: Path) -> None:
        self.statuses: list[ReaderStatus] = []
        self._root = root
        self._holds = RetentionHolds(root)
        self._looks_at = 0.0

    def look(self, count: Callable[[], dict[str, dict[int, ShardSizes]]]) -> None:
        """Compare the readers' commits with the contents of the shards, which `count` returns, unless the last check was a moment ago.

        A reader without a position in a shard, or with unreadable ones, has read nothing of it; one with an owner doesn't read that shard.
        """
        now = system.port.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + INTERVAL
        sizes, readers = count(), self._holds.readers()
        lags = dict.fromkeys(readers, 0)
        for client, shards in sizes.items():
            for index, one in shards.items():
                for name, (places, owner) in readers.items():
                    place = places.get((client, index))
                    if place is not None or not owner:
                        lags[name] += max(0, one.next - max(one.first, 0 if place is None else place.sequence))
        keys = {route.directory_name(client, _bits(found), index): (client, index) for client, found in sizes.items() for index in found}
        self.statuses = [ReaderStatus(name=name, lag=lag, members=self._members(name, keys)) for name, lag in lags.items()]

    def _members(self, name: str, shards: dict[str, positions.Key]) -> list[MemberStatus]:
        """Return the members of the group with a reader's name; none of a damaged one, which `kvspool group` reports."""
        found = look(positions.path_of(self._root, name).with_suffix(SUFFIX), shards)
        return [MemberStatus(process=one.process, joined=one.joined, shards=len(one.shards)) for one in found.members] if found else []


def _bits(shards: dict[int, ShardSizes]) -> int:
    """Return the bits of a client's set by the number of its shards."""
    return max(0, len(shards) - 1).bit_length()
