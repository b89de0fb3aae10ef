"""The two files of a group: its state, and the locks that prove that its members live. `layout` has their bytes.

**Life.** A member locks its byte of the members file while it is one; the kernel frees the byte when the process ends. The member keeps the
file open for writing, so its end also closes the file, and inotify reports that to every other member (IN_CLOSE_WRITE). So the others wait
in the kernel, without a heartbeat or a thread. The event is only a wake-up: the byte decides. See docs/decisions/0041-groups.md.

**Changes** are made under the lock of byte LOCK of the members file. Readers take no lock: a copy that is being overwritten is not sound,
and the other copy is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.wakeups import CHANGED, Watcher
from kvspool.errors import Corruption, UnknownVersion
from kvspool.groups import layout
from kvspool.groups.layout import GroupState
from kvspool.system import disk, holders
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

CLOSED = 0x8  # IN_CLOSE_WRITE
SUFFIX, MEMBERS_SUFFIX = ".group", ".members"
_TRIES = 20  # reads of a state that others change


def members_path(path: Path) -> Path:
    """Return the path of the members file of a group file."""
    return path.with_suffix(MEMBERS_SUFFIX)


class GroupFiles(Handle):
    """The open files of a group, of one member. `close` frees its byte; in a forked child it only closes."""

    def __init__(self, path: Path, name: str, most_shards: int, timeout: float) -> None:
        """Open the files of a group, or create them in an existing directory.

        timeout: seconds to wait for the lock. Raises Corruption, UnknownVersion, LockTimeout, or the system's OSError.
        """
        self.path = path
        self.timeout = timeout
        self._process = system.port.process_id()
        self._members = Descriptor(members_path(path), os.O_RDWR | os.O_CREAT)
        self._state: Descriptor | None = None
        try:
            self._state = self._open_state(name, most_shards)
            self.most_shards = self._check_header(name)
        except BaseException:
            self.close()
            raise
        self._room = layout.room(self.most_shards)
        self._seen: tuple[bytes, GroupState] | None = None

    def _open_state(self, name: str, most_shards: int) -> Descriptor:
        """Open the group file; under the lock, create it if there is none."""
        with suppress(FileNotFoundError):
            return Descriptor(self.path, os.O_RDWR)
        with self.locked():
            if system.port.look_up(self.path) is None:
                header = layout.pack_header(name, most_shards).ljust(layout.STATE_AT, b"\0")
                disk.replace(self.path, header + layout.pack_state(GroupState()), 0o600)
            return Descriptor(self.path, os.O_RDWR)

    def _check_header(self, name: str) -> int:
        try:
            found, most_shards = layout.parse_header(system.port.read(self._number(), layout.STATE_AT, 0))
        except UnknownVersion as error:
            raise UnknownVersion(f"{self.path}: {error}; upgrade") from None
        except ValueError as error:
            raise layout.damaged(self.path, error) from None
        if found != name:
            raise Corruption(f"{self.path} is the file of the group {found!r}, not of {name!r}; remove it if it was copied")
        return most_shards

    def _number(self) -> int:
        assert self._state is not None
        return self._state.number

    # The state.

    @contextmanager
    def locked(self, timeout: float | None = None) -> Iterator[None]:
        """Hold the lock of the state for the `with` block. Raises LockTimeout, which names the file.

        timeout: seconds to wait (default: that of the files).
        """
        longest = self.timeout if timeout is None else timeout
        with locks.held(self._members, layout.LOCK, longest, lambda: f"another member changes {self.path}; it may be stopped"):
            yield

    def load(self) -> GroupState:
        """Return the state. Raises Corruption, or the system's OSError."""
        for _ in range(_TRIES):
            heads = [system.port.read(self._number(), layout.HEAD.size, at) for at in self._places()]
            if self._seen is not None and self._seen[0] == b"".join(heads):
                return self._seen[1]
            with suppress(ValueError):
                state = self._newest()
                self._seen = (b"".join(heads), state)
                return state
        with self.locked():
            return self.load_locked()

    def load_locked(self) -> GroupState:
        """Under the lock: return the state. Raises Corruption."""
        try:
            return self._newest()
        except ValueError as error:
            raise layout.damaged(self.path, error) from None

    def _newest(self) -> GroupState:
        return layout.newest([self._copy(at) for at in self._places()], self.most_shards)

    def _copy(self, at: int) -> bytes:
        """Return the bytes of a copy: as many as its head announces, at most the room."""
        head = system.port.read(self._number(), layout.HEAD.size, at)
        if len(head) < layout.HEAD.size:
            return head
        _, members, shards, _, _ = layout.HEAD.unpack(head)
        size = layout.HEAD.size + members * layout.MEMBER.size + shards * layout.SHARD.size
        return system.port.read(self._number(), min(size, self._room), at)

    def _places(self) -> tuple[int, int]:
        return layout.STATE_AT, layout.STATE_AT + self._room

    def store(self, state: GroupState) -> GroupState:
        """Under the lock: store a changed state as the next one, and return it. Others are woken."""
        copies = [self._copy(at) for at in self._places()]
        numbers = [_number_of(copy, self.most_shards) for copy in copies]
        oldest = numbers.index(min(numbers))
        state = state._replace(number=max(numbers) + 1)
        system.port.write(self._number(), layout.pack_state(state), self._places()[oldest])
        return state

    # Life.

    def live(self, slot: int) -> bool:
        """Lock the byte of a slot for this member; False if another one holds it."""
        return system.port.try_lock(self._members.number, layout.LIFE + slot - 1)

    def is_alive(self, slot: int) -> bool:
        """Return whether another member holds the byte of a slot."""
        return system.port.is_locked(self._members.number, layout.LIFE + slot - 1)

    def count(self, slot: int, number: int) -> None:
        """Store the counter of a member, which others compare with its `max_silence`."""
        system.port.write(self._members.number, layout.COUNTER.pack(number), _counter_at(slot))

    def counter(self, slot: int) -> int:
        """Return the counter of a member."""
        data = system.port.read(self._members.number, layout.COUNTER.size, _counter_at(slot))
        return int(layout.COUNTER.unpack(data)[0]) if len(data) == layout.COUNTER.size else 0

    def watch(self, watcher: Watcher, key: str) -> None:
        """Let a watcher wake when the state changes, and when a process with the members file ends."""
        watcher.watch(self.path, CHANGED, key)
        watcher.watch(members_path(self.path), CLOSED, key)

    @property
    def is_ours(self) -> bool:
        """Return whether this process opened the files."""
        return self._process == system.port.process_id()

    def close(self) -> None:
        """Free the member's byte, and close the files."""
        locks.give_back(self._members, self._process)
        if self._state is not None:
            self._state.close()


def _counter_at(slot: int) -> int:
    return layout.COUNTERS_AT + (slot - 1) * layout.COUNTER.size


def _number_of(copy: bytes, most_shards: int) -> int:
    """Return the number of the state in a copy; -1 if it isn't sound."""
    try:
        return layout.parse_state(copy, most_shards).number
    except ValueError:
        return -1


def peek(path: Path) -> tuple[str, GroupState, set[int]] | None:
    """Return the name, the state and the slots of living members of a group file, without a lock; None if there is none.

    Raises Corruption, UnknownVersion, or the system's OSError.
    """
    try:
        file = Descriptor(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with file as fd:
        error: Exception = ValueError("it changes all the time")
        for _ in range(_TRIES):
            try:
                name, most_shards = layout.parse_header(system.port.read(fd, layout.STATE_AT, 0))
                room = layout.room(most_shards)
                copies = [system.port.read(fd, room, layout.STATE_AT + at) for at in (0, room)]
                state = layout.newest(copies, most_shards)
                break
            except UnknownVersion as unknown:
                raise UnknownVersion(f"{path}: {unknown}; upgrade") from None
            except ValueError as reason:
                error = reason
                system.port.sleep(locks.LONGEST_PAUSE)
        else:
            raise layout.damaged(path, error) from None
    try:
        members = Descriptor(members_path(path), os.O_RDONLY)
    except FileNotFoundError:
        return name, state, set()
    with members as fd:
        alive = {one.slot for one in state.members if system.port.is_locked(fd, layout.LIFE + one.slot - 1)}
    return name, state, alive


def is_gone(member: layout.Member) -> bool:
    """Return whether a member's process has ended although its lock is held: by a child that a C library forked."""
    return holders.is_gone(member.holder)
