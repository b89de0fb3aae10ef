"""The state of groups, as seen from outside: from their files and the positions of their durable readers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvspool.errors import Corruption, UnknownVersion
from kvspool.groups import files, layout
from kvspool.groups.files import SUFFIX
from kvspool.groups.share import GroupLag
from kvspool.system import disk, holders


class GroupMemberStats(msgspec.Struct, frozen=True):
    """A member of a group. pid and process: the number, and a description. joined: ns since the Unix epoch. max_silence: seconds, or None.

    shards: those that it owns, as in the records.
    """

    pid: int
    process: str
    joined: int
    max_silence: float | None
    shards: list[Any]


class GroupStats(msgspec.Struct, frozen=True):
    """The state of a group: its members in the order in which they joined, and its lag from the committed positions.

    shards: their number; unowned: those without an owner now. lag: None if it can't be read. problem: why the group can't be read.
    """

    name: str
    members: list[GroupMemberStats]
    shards: int
    unowned: list[Any]
    lag: GroupLag | None
    problem: str = ""


def group_files(directory: Path) -> list[Path]:
    """Return the paths of the group files in a directory, which may not exist."""
    return [directory / name for name in sorted(disk.names(directory)) if name.endswith(SUFFIX)]


def look(path: Path, shards: Mapping[str, Any], lag: GroupLag | None = None) -> GroupStats | None:
    """Return the state of a group by its file; None if there is none. A damaged one is shown with the name of its file."""
    try:
        found = files.peek(path)
    except (Corruption, UnknownVersion) as error:
        return GroupStats(path.name.removesuffix(SUFFIX), [], 0, [], lag, str(error))
    if found is None:
        return None
    name, state, alive = found
    keys = {layout.digest(one): key for one, key in shards.items()}
    members = [
        GroupMemberStats(
            one.holder[0],
            holders.describe(one.holder),
            one.joined,
            one.silence / 1000 if one.silence else None,
            [keys[shard.digest] for shard in state.shards if shard.owner == one.slot and shard.digest in keys],
        )
        for one in state.members
        if one.slot in alive
    ]
    owned = [key for member in members for key in member.shards]
    return GroupStats(name, members, len(keys), [key for key in keys.values() if key not in owned], lag)
