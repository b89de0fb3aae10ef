"""A member of a group: it reads the shards that it owns, and commits their positions.

**Positions** are those of the durable reader with the group's name. So retention and the policies of full spools see them, and a durable
reader of that name can't be open at the same time.

**Changes.** A member notices changes of the group in its own calls: while it waits for records, at least every 5 ms between two records,
and in `commit`. From a shard that it is to release it returns no more records. It releases the shard once all returned records are
committed. After the end of a member, others get its shards, and handle again what it had not committed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from kvspool import system
from kvspool.engine.iteration import NOTHING, AsyncReading, Iterations, TurnReading
from kvspool.engine.wakeups import POLL, Watcher
from kvspool.errors import Closed, Revoked
from kvspool.gap import Gap
from kvspool.groups.membership import Membership
from kvspool.groups.share import GroupLag, GroupShare, GroupSource
from kvspool.options import OnGap
from kvspool.system.handles import ClosingHandle

K = TypeVar("K", bound=Hashable)
Callback = Callable[["GroupMember[Any]", frozenset[Any]], object]

BUSY_CHECK = 0.005  # seconds between two checks of the group while records follow each other
_CHANGED = "the group"  # key of its watches


class GroupMember(ClosingHandle, Generic[K]):
    """An open member of a group. Get it from `group`; use it in one thread. `with` closes it. Closing does not commit.

    Shards are named as in the records: 0 for a single log, the number in a shard set, client and number in a hub root. A forked child can't
    use it, and joins the group with a member of its own.
    """

    HELPERS = frozenset("arm end generation hurry note passed refuse_closed source tick turn".split())

    def __init__(
        self, name: str, share: GroupShare[K], membership: Membership[K], on_assigned: Callback | None, on_revoked: Callback | None
    ) -> None:
        self.name = name
        self.turn: GroupReading[Any] | None = None  # the iteration that reads from our positions
        self.generation = 0  # of the shards to read: a changed one needs another source
        self._share = share
        self._membership = membership
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._passed: dict[K, Any] = {}  # the last returned item of each shard, since the last `note`
        self._draining: set[K] = set()  # shards of which we return no more records
        self._lost: set[K] = set()  # with returned records that were not committed
        self._tick_after = 0.0
        self._look_after = 0.0
        self._process = system.port.process_id()
        self._is_closed = False
        self._iterations = Iterations()

    # Reading.

    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> GroupReading[K]:
        """Iterate over the present records of the owned shards, from their positions on; see `kvspool.Log.read`."""
        self.refuse_closed()
        return self._iterations.add(GroupReading(self, limit, on_gap, None, is_bounded=True))

    def follow(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> GroupReading[K]:
        """Iterate over the records of the owned shards, and wait for more, and for more shards; see `kvspool.Log.follow`.

        The order is that of `read` of the log, shard set or hub root; in each shard always that of its sequences. Ends after `timeout`
        seconds without a record (None: never), also if the member owns no shard. Raises Closed as soon as any thread closes the member.
        """
        self.refuse_closed()
        return self._iterations.add(GroupReading(self, limit, on_gap, timeout, is_bounded=False))

    def follow_async(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> AsyncReading[Any]:
        """Iterate with `async for`, and wait in the event loop; see `follow`. The other calls of the member may block for a short time."""
        self.refuse_closed()
        reading = self._iterations.add(GroupReading(self, None, on_gap, 0.0, is_bounded=False))
        return AsyncReading(reading, reading.sleep, limit, timeout)

    def commit(self) -> dict[K, int]:
        """Store the positions after all returned records of the owned shards, and return them; then release shards that others are to own.

        Durable as `commit` of the durable readers; one shard after the other, and all shards of a hub root at once. Raises Revoked if
        shards were taken from a silent member: records of them will be handled again by others, and all other shards were committed. Raises
        Closed, LogVanished, Poisoned, LockTimeout, or the system's OSError: then some shards may be committed. Commit again.
        """
        self.refuse_closed()
        membership = self._membership
        if membership.is_fenced:
            self._attend(looks=False)
        self.note()
        revoked: Revoked | None = None
        try:
            self._share.commit(list(membership.owned))
        except Revoked as error:
            revoked = error
        positions = {key: self._share.position(key) for key in membership.owned if revoked is None or key not in revoked.shards}
        if revoked is not None or membership.leaving:
            self._attend(looks=False)
        lost, self._lost = self._lost, set()
        if lost or revoked is not None:
            keys = tuple(lost or (revoked.shards if revoked is not None else ()))
            raise Revoked(
                f"the group {self.name!r} gave {len(keys)} shards of this member to others, since it was silent for longer than its "
                f"max_silence: {', '.join(map(repr, sorted(keys, key=repr)[:8]))}. Their records since the last commit are handled again",
                keys,
            )
        return positions

    # Shards and positions.

    @property
    def assigned(self) -> frozenset[K]:
        """Return the shards that this member owns, as far as it knows: those of its last call."""
        return frozenset(self._membership.owned)

    @property
    def positions(self) -> dict[K, int]:
        """Return the sequence of the next record of each owned shard, after the returned ones.

        Store them in one transaction with the effect of the records. Give them to `seek` in `on_assigned`, and each record takes effect
        exactly once.
        """
        self.refuse_closed()
        self.note()
        return {key: self._share.position(key) for key in self._membership.owned}

    def seek(self, places: Mapping[K, int]) -> None:
        """Continue at these sequences in the given shards, which the member must own; the others don't change. Does not commit.

        A lost record gives a Gap. Raises ValueError for a shard that the member doesn't own, OutOfRange, TypeError, Closed.
        """
        self.refuse_closed()
        strange = [key for key in places if key not in self._membership.owned]
        if strange:
            raise ValueError(f"this member of the group {self.name!r} does not own the shard {strange[0]!r}")
        self.note()
        self._share.seek(places)
        self.generation += 1

    def lag(self) -> GroupLag:
        """Return the lag of the positions in the owned shards."""
        self.refuse_closed()
        self.note()
        return self._share.lag(list(self._membership.owned))

    def attend(self) -> frozenset[K]:
        """Notice changes of the group now, and return the owned shards; iterations and `commit` do that themselves."""
        self.refuse_closed()
        self._attend(looks=True)
        return self.assigned

    # Changes of the group.

    def tick(self) -> None:
        """Notice changes of the group, if that was some time ago."""
        now = system.port.monotonic()
        if now >= self._tick_after:
            self._attend(looks=now >= self._look_after)
            self._tick_after = system.port.monotonic() + BUSY_CHECK
            if now >= self._look_after:
                self._look_after = now + POLL

    def hurry(self, *, looks: bool) -> None:
        """Let the next `tick` check the group."""
        self._tick_after = 0.0
        if looks:
            self._look_after = 0.0

    def _attend(self, *, looks: bool) -> None:
        membership = self._membership
        self.note()  # while we know what we own: a shard that is lost now may have records that were not committed
        before = set(membership.owned)
        try:
            acquired = membership.attend(looks=looks)
        finally:
            self._drop(before - set(membership.owned))
        if membership.leaving != self._draining:
            self._drain(membership.leaving - self._draining)
        if membership.leaving:
            self._release_clean()
        if acquired:
            self.generation += 1
            if self._on_assigned is not None:
                self._on_assigned(self, frozenset(acquired))

    def _drop(self, lost: set[K]) -> None:
        """Close shards that we don't own any more: they were taken, or removed."""
        if not lost:
            return
        existing = set(self._share.shards().values())
        self._lost.update(key for key in lost if key in existing and not self._share.is_clean(key))
        self._share.drop(lost)
        self._draining -= lost
        self.generation += 1
        if self._on_revoked is not None:
            self._on_revoked(self, frozenset(lost))

    def _drain(self, leaving: set[K]) -> None:
        """Return no more records of shards that others are to own."""
        self._draining = set(self._membership.leaving)
        self.generation += 1
        if leaving and self._on_revoked is not None:
            self._on_revoked(self, frozenset(leaving))

    def _release_clean(self) -> None:
        """Release the shards that others are to own, if all their returned records are committed."""
        self.note()
        clean = [key for key in self._membership.leaving if self._share.is_clean(key)]
        if clean:
            self._membership.release(clean)
            self._draining -= set(clean)
            self.generation += 1

    # For the iterations.

    def note(self) -> None:
        """Tell the share the last returned item of each shard."""
        if self._passed:
            passed, self._passed = self._passed, {}
            self._share.passed({key: item for key, item in passed.items() if key in self._membership.owned})

    @property
    def passed(self) -> dict[K, Any]:
        """Return the dict for the last returned item of each shard; `note` replaces it."""
        return self._passed

    def source(self, *, bounded: bool) -> GroupSource:
        """Return the records of the shards to read, from their positions on."""
        self.note()
        keys = [key for key in self._membership.owned if key not in self._draining]
        return self._share.source(keys, bounded=bounded, arm=self.arm)

    def arm(self, watcher: Watcher) -> None:
        """Let a watcher wake when the group changes."""
        self._membership.files.watch(watcher, _CHANGED)

    def refuse_closed(self) -> None:
        """Raise Closed if the member was closed, or belongs to the parent of this process."""
        if self._is_closed:
            raise Closed(self._closed_words())
        if self._process != system.port.process_id():
            raise Closed(f"this member of the group {self.name!r} belongs to the parent process; join the group again in this one")

    # Open and closed.

    @property
    def closed(self) -> bool:
        """Return whether the member was closed."""
        return self._is_closed

    def close(self) -> None:
        """Leave the group without a commit: other members own the shards at once. Iterations raise Closed, waiting ones at once."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.end(self._closed_words())
        finally:
            try:
                self._membership.leave()
            finally:
                self._share.close()

    def end(self, why: str) -> None:
        """End all iterations: the member, or its log, was closed."""
        self._iterations.end(why)

    def _closed_words(self) -> str:
        return f"the member of the group {self.name!r} was closed; join again"

    def __repr__(self) -> str:
        return f"<GroupMember of {self.name!r} with {len(self.assigned)} shards{' closed' if self.closed else ''}>"


class GroupReading(TurnReading, Iterator[Any], Generic[K]):
    """Moves the member's positions with each returned item. `missed` counts sequences in Gaps.

    Several iterations of a member alternate: each begins at the member's positions. `seek` has the same effect, even within a loop.
    """

    def __init__(self, member: GroupMember[K], limit: int | None, on_gap: OnGap, timeout: float | None, *, is_bounded: bool) -> None:
        super().__init__(limit, on_gap, timeout)
        self._member = member
        self._is_bounded = is_bounded
        self._source: GroupSource | None = None
        self._generation = -1  # of the source

    def __next__(self) -> Any:
        member = self._member
        deadline = None
        while self._left != 0:
            try:
                member.tick()
                source = self._source
                if source is None or self._generation != member.generation or member.turn is not self:
                    source = self._begin()
                item = self._take(source)
            except Exception:
                if self._why:  # another thread has closed the member meanwhile
                    raise Closed(self._why) from None
                raise
            if item is NOTHING:
                if self._is_bounded:
                    self.close()
                    break
                deadline, left = self._wait_until(deadline)
                if left <= 0:
                    break
                self._sleep(source, left)
                continue
            if item.__class__ is not Gap:
                if self._left > 0:
                    self._left -= 1
                return item
            if self._shows(item):
                return item
        if self._why:
            raise Closed(self._why)
        raise StopIteration

    def _take(self, source: GroupSource) -> Any:
        """Return the next item; NOTHING if there is none now."""
        member = self._member
        try:
            item = next(source)
            member.passed[source.last] = item
            return item
        except StopIteration:
            if self._why:
                raise Closed(self._why) from None
            return NOTHING
        except Exception:
            raise
        except BaseException:
            self._generation = -1  # interrupted: an item may have been taken that was not returned
            raise

    def _begin(self) -> GroupSource:
        """Read from the member's positions on; read-ahead of the former source counts as not returned."""
        member = self._member
        member.refuse_closed()
        member.turn = self
        self.release()
        self._generation = member.generation
        source = self._source = member.source(bounded=self._is_bounded)
        if self._is_closed:
            source.close()
        return source

    def _sleep(self, source: GroupSource, left: float) -> None:
        watcher, longest = source.idle()
        if watcher is not None and not self._is_closed:
            watcher.wait(min(left, longest))
        self._member.hurry(looks=True)

    async def sleep(self, left: float) -> None:
        """Sleep in a task until there may be more, or the group has changed."""
        source = self._source
        watcher, longest = (None, 0.0) if source is None else source.idle()
        if watcher is not None and not self._is_closed:
            await watcher.sleep(min(left, longest))
        self._member.hurry(looks=True)

    def release(self) -> None:
        """Close the shards' files; the next call reopens them."""
        source, self._source = self._source, None
        if source is not None:
            source.close()
