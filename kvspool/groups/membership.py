"""The membership of one process in a group: join, notice that others joined or ended, own shards and release them, leave.

All changes are those of `sharing`, under the group's lock. A member waits for changes only in its own calls: it has no thread and sends no
heartbeat. With `max_silence` it stores a counter from time to time. Others that see the same number for that long take its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import LockTimeout, ReaderBusy, Revoked, TooManyMembers
from kvspool.groups import layout, sharing
from kvspool.groups.files import GroupFiles, is_gone
from kvspool.groups.layout import GroupState, Member
from kvspool.groups.share import GroupShare
from kvspool.system import forks, holders
from kvspool.system.handles import Handle

K = TypeVar("K", bound=Hashable)

SHORTEST_SILENCE = 1.0  # seconds
_DYING, _PAUSE = 100, 0.002  # checks, and seconds between them, of a lock whose holder has just ended


class Membership(Handle, Generic[K]):
    """One member of a group, and the shards that it owns.

    owned: addresses and epochs of the shards that it owns. leaving: those of them that it is to release after a commit. Both change only
    in `attend`, `release` and `leave`.
    """

    def __init__(self, files: GroupFiles, share: GroupShare[K], max_silence: float | None) -> None:
        """Take over the open files, and join. Raises TooManyMembers, LockTimeout, Corruption."""
        self.files = files
        self.share = share
        self.owned: dict[K, int] = {}
        self.leaving: set[K] = set()
        self.slot = 0
        self._silence = 0 if max_silence is None else round(max_silence * 1000)
        self._counted = 0
        self._count_after = 0.0
        self._observed: dict[int, tuple[int, int, float]] = {}  # by slot: token, counter, and since when
        self._digests: dict[str, bytes] = {}
        self.joined = system.port.now()
        self._token = int.from_bytes(system.port.random(8), "little")
        with files.locked():
            self._update(files.load_locked(), True)
        forks.register(self)

    @property
    def token(self) -> int:
        """Return the number that identifies this member."""
        return self._token

    def _join(self, state: GroupState) -> GroupState:
        """Under the lock: enter the state, in our slot or in a free one."""
        taken = {one.slot for one in state.members}
        if self.slot:
            self._token = int.from_bytes(system.port.random(8), "little")  # what was stored under the former one is not ours any more
        else:
            free = (slot for slot in range(1, layout.MOST_MEMBERS + 1) if slot not in taken and self.files.live(slot))
            self.slot = next(free, 0)
            if not self.slot:
                raise TooManyMembers(f"the group of {self.files.path} has {layout.MOST_MEMBERS} members, which is the maximum")
        self._count()
        self.share.entered(self._token)
        member = Member(self.slot, self._token, self.joined, self._silence, holders.ours())
        return self.files.store(sharing.joined(state, member))

    # Changes.

    def attend(self, *, looks: bool) -> set[K]:
        """Notice changes of the group, and acquire the shards that are due. Return the acquired ones, which the share has open.

        looks: also look for new and removed shards. A shard of which we are no longer the target is in `leaving` afterwards; a lost one
        is no longer in `owned`. Raises ReaderBusy, Corruption, LockTimeout, or the system's OSError.
        """
        self.count()
        has_new_shards = looks and self.share.look()
        deadline = system.port.monotonic() + self.files.timeout
        while True:
            state = self.files.load()
            if not has_new_shards and not self._is_changed(state, looks):
                return self._adopt(state)
            try:
                with self.files.locked(0.0):
                    state = self.files.load_locked()
                    if has_new_shards or self._is_changed(state, looks):
                        state = self._update(state, looks)
                return self._adopt(state)
            except LockTimeout:
                # Another member changes the state, perhaps as we would. It may be killed or stopped: so look again.
                if system.port.monotonic() >= deadline:
                    raise
                system.port.sleep(locks.LONGEST_PAUSE)

    def _is_changed(self, state: GroupState, looks: bool) -> bool:
        """Return whether a member has to change the state: one has ended or is silent, or a shard is due to us."""
        if not self._is_in(state):
            return True
        for one in state.shards:
            if one.owner == layout.ABSENT and one.target == self.slot:
                return True
        return bool(self._ended(state, looks)[0])

    def _is_in(self, state: GroupState) -> bool:
        return any(one.token == self._token for one in state.members)

    def _ended(self, state: GroupState, looks: bool) -> tuple[set[int], set[int]]:
        """Return the slots of members that have ended or are silent, and those of them that may still hold locks.

        looks: also check whether a lock is only held by a child that a C library forked; that takes longer.
        """
        ended, displaced = set(), set()
        now = system.port.monotonic()
        for one in state.members:
            if one.token == self._token:
                continue
            if not self.files.is_alive(one.slot):
                ended.add(one.slot)
            elif (looks and is_gone(one)) or (one.silence and self._is_silent(one, now)):
                ended.add(one.slot)
                displaced.add(one.slot)
        return ended, displaced

    def _is_silent(self, member: Member, now: float) -> bool:
        """Return whether a member's counter has not changed for its `max_silence`, as far as we have seen."""
        number = self.files.counter(member.slot)
        seen = self._observed.get(member.slot)
        if seen is None or seen[:2] != (member.token, number):
            self._observed[member.slot] = (member.token, number, now)
            return False
        return now - seen[2] > member.silence / 1000

    def _update(self, state: GroupState, looks: bool) -> GroupState:
        """Under the lock: bring the state up to date, and acquire what is due to us."""
        before = state
        ended, displaced = self._ended(state, looks)
        if ended:
            state = self.files.store(sharing.without(state, ended, displaced=displaced))  # from here on their commits fail
        self.share.look()
        shards = self.share.shards()
        digests = [self._digest(name) for name in shards]
        if len(digests) > self.files.most_shards:
            raise TooManyMembers(f"{self.files.path} has room for {self.files.most_shards} shards, not {len(digests)}")
        if digests != [one.digest for one in state.shards]:
            state = sharing.with_shards(state, digests)
        if not self._is_in(state):
            state = self._join(state)
        self.share.recover({one.token for one in state.members})
        keys = dict(zip(digests, shards.values(), strict=True))
        state = self._displaced(state, keys)
        state = sharing.acquired(state, self.slot)
        return state if state == before else self.files.store(state)

    def _displaced(self, state: GroupState, keys: dict[bytes, K]) -> GroupState:
        """Under the lock: make the shards available that are to be ours, and whose former owner may hold their locks."""
        done = set()
        for one in state.shards:
            if one.owner == layout.ABSENT and one.target == self.slot and one.former:
                try:
                    self.share.displace(keys[one.digest], one.former)
                except LockTimeout:
                    continue  # a later attempt: the former owner was stopped within a change that can't be undone
                done.add(one.digest)
        return sharing.cleared(state, done) if done else state

    def _adopt(self, state: GroupState) -> set[K]:
        """Compare our shards with those of the state; open new ones."""
        ours = {one.digest: one for one in state.shards if one.owner == self.slot} if self._is_in(state) else {}
        by_digest = {self._digest(name): key for name, key in self.share.shards().items()} if ours or self.owned else {}
        present = {by_digest[digest]: one for digest, one in ours.items() if digest in by_digest}
        for key in [key for key, epoch in self.owned.items() if key not in present or present[key].epoch != epoch]:
            del self.owned[key]
        self.leaving = {key for key, one in present.items() if key in self.owned and one.target != self.slot}
        acquired = set()
        for key, one in present.items():
            if key not in self.owned:
                self._take(key, one.epoch)
                acquired.add(key)
        return acquired

    def _take(self, key: K, epoch: int) -> None:
        for left in range(_DYING, -1, -1):
            try:
                self.share.take(key, self._fence(key, epoch))
                break
            except ReaderBusy:  # the kernel frees the locks of an ended process one after the other
                if not left:
                    raise
                system.port.sleep(_PAUSE)
        self.owned[key] = epoch

    def _fence(self, key: K, epoch: int) -> Callable[[], None]:
        def check() -> None:
            if not self.is_fenced:
                return
            digest = next((self._digest(name) for name, one in self.share.shards().items() if one == key), b"")
            state = self.files.load()
            found = sharing.owned(state, self.slot).get(digest) if self._is_in(state) else None
            if found is None or found.epoch != epoch:
                raise Revoked(f"the shard {key!r} was given to another member, since this one was silent for too long", (key,))

        return check

    @property
    def is_fenced(self) -> bool:
        """Return whether others may take shards from this member while it lives."""
        return self._silence > 0

    def release(self, keys: Collection[K]) -> None:
        """Release shards that the member owns, for their targets; the share closes them."""
        digests = {self._digest(name) for name, key in self.share.shards().items() if key in keys}
        with self.files.locked():
            state = self.files.load_locked()
            self.share.give(keys)
            for key in keys:
                self.owned.pop(key, None)
                self.leaving.discard(key)
            if self._is_in(state):
                self.files.store(sharing.released(state, self.slot, digests))

    def leave(self) -> None:
        """Leave the group: others own the shards at once."""
        if not self.files.is_ours:
            self.files.close()
            return
        try:
            with self.files.locked():
                self.share.give(list(self.owned))
                state = self.files.load_locked()
                if self._is_in(state):
                    self.files.store(sharing.without(state, {self.slot}))
        finally:
            self.owned.clear()
            self.files.close()

    # Signs of life.

    def count(self) -> None:
        """With `max_silence`: change our counter, if that was some time ago."""
        if self._silence and system.port.monotonic() >= self._count_after:
            self._count()

    def _count(self) -> None:
        self._counted = (self._counted + 1) % (1 << 64)
        self.files.count(self.slot, self._counted)
        self._count_after = system.port.monotonic() + self._silence / 5000

    def _digest(self, name: str) -> bytes:
        digest = self._digests.get(name)
        if digest is None:
            digest = self._digests[name] = layout.digest(name)
        return digest

    def forked(self) -> None:
        """In a forked child: the member is the parent's; only our copies of its descriptors are closed."""
        self.files.close()
