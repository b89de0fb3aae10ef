"""The waiting half of a merge: which logs to check after a wake-up, and when to check all of them. Compiled as a part of `merge_c`.

Waits go through the port in `system`; the compiled twin reads the clock and waits for events by its own system calls while the port is not
replaced.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import kvspool.kernel.machine as native
from kvspool import system
from kvspool.engine.iteration import check_timeout
from kvspool.engine.wakeups import BLIND_POLL, POLL
from kvspool.options import OnGap
from shard.kernel.merge_py import MergeSource, Merging

REST = 4  # multiple of the duration of a check of all logs that must pass before the next one, without wake-ups
LONGEST_REST = 30.0  # seconds between two searches for new logs that are not reported
PART = 1e-3  # share of our time for checks for lost wake-ups
NEVER = float("inf")
FEW = 64  # logs, at most, that are all checked twice a second, whatever share of our time that takes

REAL = system.REAL


class FollowingLoops(Merging):
    """Waits if there are no records; see `FollowingMerge`, which arms the watcher."""

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise", timeout: float | None = None) -> None:
        Merging.__init__(self, limit, on_gap)
        self.timeout = check_timeout(timeout)
        self._watcher: Any = None
        self._has_mute = False  # there are idle logs without wake-ups
        self._still_to_check: list[MergeSource] = []  # logs left in the present turn of checks
        self._is_lost = False  # events were lost, so any log may have changed
        self._must_look = 0.0  # when to check for lost wake-ups, in any case
        self._may_look = 0.0  # not to check earlier than this, without wake-ups
        self._must_seek = 0.0  # when to search for new logs, in any case

    def drop(self, key: Hashable) -> None:
        source = self.sources[key]
        Merging.drop(self, key)
        self._must_seek = 0.0  # another log may have replaced it
        if self._watcher is not None:
            self._watcher.unwatch(source)

    def fall_silent(self, source: MergeSource) -> None:
        source.is_silent = True
        if source.frames is not None or not source.will_wake():  # every write to a watched journal wakes us
            self._is_to_be_looked_at(source)

    def arm(self) -> Any:
        """Return a watcher, with the watches other than those of logs."""
        raise NotImplementedError

    def notice(self, key: Any) -> None:
        """Handle a wake-up with `key`, which belongs to no log."""

    def seek(self) -> None:
        """Search for new logs."""

    def look_after(self, source: MergeSource) -> None:
        """Raise LogVanished if the files of a log were removed."""
        source.cursor.refuse_vanished()

    def _armed(self) -> Any:
        if self._watcher is None:
            self._watcher = self.arm()
        return self._watcher

    def _now(self) -> float:
        return native.monotonic() / 1e9 if system.port is REAL else system.port.monotonic()

    def _are_few(self) -> bool:
        return len(self.sources) <= FEW

    def _silent(self) -> list[MergeSource]:
        return [source for source in self.sources.values() if source.is_silent]

    def listen(self, source: MergeSource) -> bool:
        """Return whether a log has records now; otherwise it will wake us."""
        if not source.ask():
            return False
        if source.step(self._most):
            return True
        while True:
            if not source.is_watched():  # it is new, was resized, or continues in another segment
                self._watch(source)
            source.cursor.ask()
            if source.step(self._most):
                return True
            if source.is_watched():
                break
        self._has_mute |= source.is_mute
        return False

    def _watch(self, source: MergeSource) -> None:
        watcher = self._armed()
        try:
            source.watch(watcher)
        except BaseException:
            self._disarm()
            raise

    def _disarm(self) -> None:
        """Close the watcher; the next check of all logs starts again."""
        for source in self.sources.values():
            source.unwatch()
            self._is_to_be_looked_at(source)
        self._must_look = 0.0
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def look_around(self) -> None:
        self.look_at_new()
        self._heed(0.0)

    def wait(self) -> bool:
        deadline = NEVER if self.timeout is None else self._now() + self.timeout
        while not self._is_closed and not self._failures:
            if self.look_at_new():
                break
            now = self._now()
            left = deadline - now
            if left <= 0 or now >= self._must_look:  # also for changes before there was a watcher
                if now >= self._must_look:
                    self._look_for_missed(now)
                if left <= 0 and not self._ready:
                    self.look_at_each(self._silent())
                if left <= 0 or self._ready:
                    break
                continue
            until = self._must_look
            if (self._has_mute or self._is_lost) and self._may_look < until:
                until = self._may_look
            if left > until - now:
                left = until - now
            if self._heed(left if left > 0 else 0.0):
                break
        return len(self._ready) > 0 or len(self._failures) > 0

    def _heed(self, longest: float) -> bool:
        """Wait up to `longest` seconds, and check the logs that woke us, or all logs when that is due. Return whether there are records, or
        another thread has closed us.
        """
        watcher = self._armed()
        was_lost = self._is_lost
        self._is_lost = True  # until all events are read: a signal handler's exception may interrupt that
        keys = watcher.wait(longest)
        if self._is_closed:
            return True
        if keys is not None:
            if keys:
                self._look_at_keys(keys)
            self._is_lost = was_lost
            if keys and self._ready:
                return True
        now = self._now()
        if now >= self._must_look:
            return self._look_for_missed(now)
        if now >= self._may_look:
            if self._is_lost:
                self._look_at_all(now)
            elif self._has_mute:
                self._look_at_mute(now)
        return len(self._ready) > 0

    def _look_at_keys(self, keys: set[Any]) -> None:
        """Check the logs that woke us, and handle other wake-ups."""
        unlinked = self._watcher.unlinked
        for key in keys:
            if type(key) is MergeSource:
                self._is_to_be_looked_at(key)
        self.look_at_new()
        for key in keys:
            if type(key) is not MergeSource:
                self.notice(key)
            elif unlinked and key in unlinked and key.is_silent:
                self.look_after(key)
        if self._must_seek == 0:
            self._seek()

    def _look_at_all(self, now: float) -> None:
        """Check all logs at once: events were lost, or there will be none."""
        self._is_lost = False
        try:
            if self._armed().is_blind:
                self.look_at_each(self._silent())
            else:
                self._seek()
                for source in self._silent():
                    self._is_to_be_looked_at(source)  # they may have used up their request for a wake-up
                self.look_at_new()
        finally:
            self._rest(now)

    def _look_at_mute(self, now: float) -> None:
        mute = [source for source in self.sources.values() if source.is_mute]
        self._has_mute = len(mute) > 0
        try:
            self.look_at_each([source for source in mute if source.is_silent])
        finally:
            self._rest(now)

    def look_at_each(self, sources: list[MergeSource]) -> None:
        """Check logs without wake-ups: those whose memory shows more records, and those without mapped memory."""
        self.look_at([source for source in sources if source.frames is None or source.has_more()])

    def _rest(self, since: float) -> None:
        now = self._now()
        self._may_look = now + max(BLIND_POLL, REST * (now - since))

    def _look_for_missed(self, now: float) -> bool:
        """Check for lost wake-ups: in the memory of all logs, and in the files of some.

        That takes at most a share of our time, for any number of logs; if they are few, all are checked.
        """
        self._must_look = now + POLL
        self.look_at([source for source in self.sources.values() if source.is_silent and source.has_more()])
        if self._is_lost and now >= self._may_look:
            self._look_at_all(now)
        self._look_at_next()
        if now >= self._must_seek or self._are_few():
            self._seek()
        return len(self._ready) > 0

    def _seek(self) -> None:
        began = self._now()
        self.seek()
        ended = self._now()
        self._must_seek = ended + min(LONGEST_REST, (ended - began) / PART)

    def _look_at_next(self) -> None:
        """Check the files of some idle logs, and of the next ones next time; of all logs if they are few."""
        until = self._now() + POLL * PART
        if not self._still_to_check:
            self._still_to_check = self._silent()
        while self._still_to_check:
            source = self._still_to_check.pop()
            if source.is_silent and not self.look_at([source]):
                self.look_after(source)
            if not self._are_few() and self._now() > until:
                break

    def close(self) -> None:
        try:
            Merging.close(self)
        finally:
            if self._watcher is not None:
                self._watcher.close()
