"""The open journals of a hub: at most a given number of them, however many shards have a shipper.

A shard that was not used for a while has no open file. Its next batch opens the journal again, which takes less than a millisecond.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from kvspool.journal import Journal
from kvspool.system.handles import Handle, close_all


class OpenJournal(Handle):
    """One journal, open while it is used, and afterwards until others need its place. Its methods can be called by several threads."""

    def __init__(self, pool: OpenJournals, opened: Callable[[], Journal]) -> None:
        """opened: opens the journal; raises if another one is at its path now."""
        self.journal: Journal | None = None
        self.users = 0  # calls under way, which keep it open
        self.is_closed = False
        self._pool = pool
        self._open = opened
        self._opening = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[Journal]:
        """Keep the journal open inside the `with` block, which gets it."""
        journal = self._pool.take(self)
        if journal is None:
            with self._opening:  # and no lock of all journals
                journal = self._pool.take(self)
                if journal is None:
                    journal = self._open()
                    self._pool.add(self, journal)
            self._pool.close_idle()
        try:
            yield journal
        finally:
            self._pool.release(self)

    def close(self) -> None:
        """Close the journal. Calls under way get an error; a later one opens it again."""
        self._pool.remove(self)


class OpenJournals(Handle):
    """The journals that are open, up to `most` and those in use. Can be shared by threads."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()  # held for a few steps, never while a journal is opened or closed
        self._all: OrderedDict[OpenJournal, None] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._all)

    def take(self, one: OpenJournal) -> Journal | None:
        """Count a user of a journal, and return it; None if it isn't open."""
        with self._lock:
            if one.journal is None or one.journal.closed:
                return None
            one.users += 1
            self._all.move_to_end(one)
            return one.journal

    def add(self, one: OpenJournal, journal: Journal) -> None:
        """Add a journal that was opened, with its first user."""
        with self._lock:
            one.journal = journal
            one.users += 1
            self._all[one] = None
            self._all.move_to_end(one)

    def release(self, one: OpenJournal) -> None:
        """Stop counting a user."""
        with self._lock:
            one.users -= 1

    def remove(self, one: OpenJournal) -> None:
        """Close a journal."""
        with self._lock:
            journal = self._forget(one)
        if journal is not None:
            journal.close()

    def close_idle(self) -> None:
        """Close journals without users until at most `most` are open."""
        with self._lock:
            excess = len(self._all) - self.most
            idle = list(islice((one for one in self._all if not one.users), max(0, excess)))
            journals = [self._forget(one) for one in idle]
        close_all([journal for journal in journals if journal is not None])

    def _forget(self, one: OpenJournal) -> Journal | None:
        self._all.pop(one, None)
        journal, one.journal = one.journal, None
        return journal
