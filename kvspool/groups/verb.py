"""The verb `group` of logs, shard sets and hub roots. Most logs have no group: `group` imports the rest of this room."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvspool.engine.iteration import Iterations
from kvspool.options import TIMEOUT, Isolation, check_isolation

if TYPE_CHECKING:
    from kvspool.groups.member import Callback, GroupMember
    from kvspool.groups.share import GroupShare
    from kvspool.groups.stats import GroupStats


class HasGroups(ABC):
    """A log, a shard set or a hub root, whose shards a group of processes can share."""

    _iterations: Iterations

    def group(
        self,
        name: str,
        start: Any = "earliest",
        *,
        isolation: Isolation = "appended",
        max_silence: float | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        timeout: float = TIMEOUT,
    ) -> GroupMember[Any]:
        """Join the group `name`, whose members share the shards: each shard has one owner, which reads and commits it.

        name: as of a durable reader. The positions are those of the durable reader of that name, which can't be open at the same time.
        start and isolation: as in `reader`. max_silence: after so many seconds without a call, at least 1, others may take the shards of
        this member, although it lives; None: never. on_assigned, on_revoked: called as `f(member, shards)` in calls of the member: before
        it returns records of new shards, and before it releases shards, or after they were taken. timeout: seconds to wait for the lock of
        the group's state.

        Raises ReaderBusy while a durable reader of that name is open, TooManyMembers, ValueError, LockTimeout, Corruption, Unsupported, and
        the errors of `reader`. Raises PermissionError if this process may not write to the log.
        """
        from kvspool.groups.files import GroupFiles
        from kvspool.groups.member import GroupMember
        from kvspool.groups.membership import SHORTEST_SILENCE, Membership

        check_isolation(isolation)
        if max_silence is not None and not SHORTEST_SILENCE <= max_silence <= 1e9:
            raise ValueError(f"max_silence is at least {SHORTEST_SILENCE:g} seconds, not {max_silence}; None for no limit")
        path, most_shards = self._group_file(name)
        share = self._share_of(name, start, isolation)
        try:
            files = GroupFiles(path, name, most_shards, timeout)
            try:
                membership = Membership(files, share, max_silence)
            except BaseException:
                files.close()
                raise
            member: GroupMember[Any] = GroupMember(name, share, membership, on_assigned, on_revoked)
        except BaseException:
            share.close()
            raise
        try:
            member.attend()
        except BaseException:
            member.close()
            raise
        return self._iterations.add(member)

    @abstractmethod
    def groups(self) -> list[GroupStats]:
        """Return the state of each group, by name: its members, their shards, and its lag. Raises Closed."""

    @abstractmethod
    def reset_group(self, name: str, start: Any) -> None:
        """Move the positions of a group that has no member: to "earliest", "latest", or an aware datetime. On disk as a commit.

        Raises ReaderBusy while it has members, or its durable reader is open; NoSuchReader, OutOfRange, Unsupported, and the errors of
        `reader`.
        """

    @abstractmethod
    def _group_file(self, name: str) -> tuple[Path, int]:
        """Return the path of a group's file, in an existing directory, and its largest number of shards. Raises ValueError for a name."""

    @abstractmethod
    def _share_of(self, name: str, start: Any, isolation: Isolation) -> GroupShare[Any]:
        """Return the shards of a group."""
