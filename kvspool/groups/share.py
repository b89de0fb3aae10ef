"""The shards of a group, and the records of those that one member owns. Logs, shard sets and hub roots each have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from kvspool.engine.wakeups import Watcher
from kvspool.system.handles import Handle

K = TypeVar("K", bound=Hashable)  # the address of a shard
Fence = Callable[[], None]  # raises Revoked unless the member still owns a shard
Arm = Callable[[Watcher], None]  # adds the group's files to a watcher


class GroupLag(msgspec.Struct, frozen=True):
    """The distance of the positions from the ends of the shards: records, bytes, and the age of the oldest pending record in seconds.

    bytes and seconds are None where they are unknown.
    """

    records: int
    bytes: int | None = None
    seconds: float | None = None


class GroupSource(Protocol):
    """The records of the owned shards, from their positions on, without waiting."""

    @property
    def last(self) -> Any:
        """Return the shard of the last item."""

    def __next__(self) -> Any:
        """Return the next record or Gap. Raises StopIteration if there is none now."""

    def idle(self) -> tuple[Watcher | None, float]:
        """Return the watcher to sleep on, and the longest time in seconds; None: there may be more, or the group has changed."""

    def close(self) -> None:
        """Release the shards' files, and wake a thread that sleeps."""


class GroupShare(ABC, Handle, Generic[K]):
    """The shards of a group, and the positions of the member in those that it owns."""

    kind: str  # in error messages

    @abstractmethod
    def shards(self) -> dict[str, K]:
        """Return the existing shards: their names in the group, and their addresses, in order."""

    def look(self) -> bool:
        """Look for new and removed shards. Return whether `shards` has changed."""
        return False

    def entered(self, token: int) -> None:
        """Note the number that identifies the member from now on."""

    @abstractmethod
    def take(self, key: K, fence: Fence) -> None:
        """Open a shard that the member owns now, at its committed position.

        fence: called before a commit counts. Raises ReaderBusy if a durable reader of the same name is open there.
        """

    @abstractmethod
    def give(self, keys: Collection[K]) -> None:
        """Under the group's lock: close shards that the member owned, without a commit. A revoked one may not be open."""

    @abstractmethod
    def drop(self, keys: Collection[K]) -> None:
        """Close shards that others may own already: their positions are not touched."""

    @abstractmethod
    def displace(self, key: K, pid: int) -> None:
        """Under the group's lock: make a shard available whose reader is locked by a former owner, the process `pid`."""

    def recover(self, tokens: Collection[int]) -> None:
        """Under the group's lock: keep the positions of members other than these, which own nothing any more."""

    @abstractmethod
    def position(self, key: K) -> int:
        """Return the sequence of the next record of an owned shard."""

    @abstractmethod
    def is_clean(self, key: K) -> bool:
        """Return whether all returned records of an owned shard were committed."""

    @abstractmethod
    def passed(self, items: Mapping[K, Any]) -> None:
        """Move after the last returned record or Gap of each shard."""

    @abstractmethod
    def commit(self, keys: Iterable[K]) -> None:
        """Store the positions of owned shards. Raises Revoked, and the errors of `kvspool.reader.Reader.commit`."""

    @abstractmethod
    def seek(self, places: Mapping[K, int]) -> None:
        """Move to sequences in owned shards, without a commit. Raises OutOfRange, TypeError."""

    @abstractmethod
    def lag(self, keys: Collection[K]) -> GroupLag:
        """Return the lag of the positions in owned shards."""

    @abstractmethod
    def source(self, keys: Collection[K], *, bounded: bool, arm: Arm) -> GroupSource:
        """Return the records of some owned shards from their positions on. bounded: only the present ones; the end is StopIteration.

        arm: adds the group's files to the watcher with which the source sleeps.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything, without a commit."""


def file_name(name: str) -> str:
    """Return the name of the file of a group whose name may have characters that a file name can't have."""
    from hashlib import blake2b

    return f"group-{blake2b(name.encode(), digest_size=16).hexdigest()}.group"


LISTS = r"(group|tasks)-[0-9a-f]{32}\.(group(\.tmp)?|members|tasks(\.[0-9a-f]{16}\.tmp)?)"
"""The names of the files in `beside`, of groups and of task lists."""


def beside(path: Path) -> Path:
    """Return the directory of the group files of one log: the hidden one next to it, as of a journal's sidecars."""
    from os.path import realpath

    real = Path(realpath(path))
    return real.with_name(f".{real.name}.kvspool")
