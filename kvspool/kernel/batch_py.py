"""Copied records that were not returned yet, the iteration over them, and the wait for the next ones.

This source is compiled as a part of `frames_c`; see `frames_py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import kvspool.kernel.machine as native
from kvspool.kernel.frames_py import END, NO_ITEM, NOTHING
from kvspool.kernel.reader_py import FrameReader
from kvspool.system.handles import refuse_copy


class Sleeper:
    """Lets a batch wait: sleeps until one log has more records, and copies them out."""

    def is_undisturbed(self) -> bool:
        """Return whether only records are expected."""
        raise NotImplementedError

    def fetch(self, ns: int, most: int, make: Callable[..., Any] | None, out: list[Any]) -> bool:
        """Add up to `most` records to `out`, after a sleep of up to `ns` if there is none; False if anything else has to be checked."""
        raise NotImplementedError


class RingSleeper(Sleeper):
    """Sleeps on the word `rings` of a spool, after polling for `spin` ns."""

    def __init__(self, reader: FrameReader, files: Any, spin: int, slice: int, blind: int) -> None:
        """slice, blind: see `FrameReader.spin` and `sleep`."""
        self.reader = reader
        self.files = files
        self.spin = spin
        self.slice = slice
        self.blind = blind

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def is_undisturbed(self) -> bool:
        """Return whether nothing was closed, and the log is not in new files."""
        return not (self.reader.closed or self.reader.has_moved() or self.files.is_closed)

    def fetch(self, ns: int, most: int, make: Callable[..., Any] | None, out: list[Any]) -> bool:
        reader = self.reader
        reader.sleep_and_fetch(reader.edge_now(), min(self.spin, ns), self.slice, ns, self.blind, most, make, out)
        return reader.stop == END


class Batch:
    """Copied items that were not returned yet: the `items` from `at` on.

    left: how many may be returned; -1: no limit. While there are only records, the batch *runs*: when all are returned it copies the next
    ones itself. A follower's batch *waits*: one step leads from the last record to the sleep, one from the wake-up to the next record.
    """

    def __init__(self, left: int) -> None:
        self.items: list[Any] = []
        self.at = 0
        self.left = left
        self.reader: FrameReader | None = None
        self.sleeper: Sleeper | None = None
        self.end = NOTHING
        self.longest = 0
        self.most = 0
        self.make: Callable[..., Any] | None = None
        self.waited = 0
        self.waiting = 0  # calls under way: a thread that closes the log meanwhile leaves the release of its files to the waiting one

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def run(self, reader: Any, end: int, most: int, make: Callable[..., Any] | None) -> None:
        """Copy the next items when none is left, up to `most` of them: up to `end`, or up to the edge for NOTHING.

        `make` runs no Python, and a record needs nothing else. Everything else is left to `refill`, and so is all of it if the reader is of
        the other twin.
        """
        if isinstance(reader, FrameReader):
            self.end = end
            self.most = most
            self.make = make
            self.reader = reader

    def park(self, sleeper: Sleeper, ns: int, most: int, make: Callable[..., Any] | None) -> None:
        """Wait from now on when no item is left, for up to `ns`; the rest is as for `Sleeper.fetch`."""
        self.reader = None
        self.longest = ns
        self.most = most
        self.make = make
        self.sleeper = sleeper

    def unpark(self) -> int:
        """Stop running and waiting, and return for how many ns the last wait lasted, if it was in vain."""
        self.reader = None
        self.sleeper = self.make = None
        waited = self.waited
        self.waited = 0
        return waited

    def is_filled(self, items: list[Any]) -> bool:
        """Return whether there is an item to return, after records may have been copied into `items`."""
        if self.items is not items:  # a signal handler, or another thread, requested a record meanwhile
            self.items = self.items[self.at :] + items
            self.at = 0
        return self.at < len(self.items) and self.left != 0

    def wait(self, sleeper: Sleeper) -> bool:
        """Sleep until there is an item to return; False after the timeout, or if something else has to be checked."""
        began = native.monotonic()
        self.waited = 0
        is_calm = True
        self.waiting += 1  # before reading `left`: a closing thread reads this after it has set that
        try:
            while is_calm and self.waited < self.longest and self.left != 0 and self.sleeper is sleeper and sleeper.is_undisturbed():
                most = self.most if self.left < 0 or self.left > self.most else self.left
                items = self.clear()
                is_calm = sleeper.fetch(self.longest - self.waited, most, self.make, items)
                if self.is_filled(items):
                    self.waited = 0
                    return True
                self.waited = native.monotonic() - began
            return False
        finally:
            self.waiting -= 1

    def clear(self) -> list[Any]:
        """Forget the items, and return the new empty list."""
        self.items = []
        self.at = 0
        return self.items

    def take(self, refill: Callable[[], Any]) -> Any:
        """Return the next item; if none is left, the result of `refill()`: it counts that one itself, and raises StopIteration."""
        if self.left == 0:
            return refill()
        if self.at >= len(self.items):
            reader = self.reader
            if reader is not None:
                item = self.next_of(reader)
                if item is NO_ITEM:
                    return refill()
                if self.left > 0:
                    self.left -= 1
                return item
            sleeper = self.sleeper
            if sleeper is None or not self.wait(sleeper):
                return refill()
        at = self.at
        self.at = at + 1
        if self.left > 0:
            self.left -= 1
        return self.items[at]

    def next_of(self, reader: FrameReader) -> Any:
        """Return the next record of the files over which the batch runs; NO_ITEM if `refill` has to check the log."""
        if reader.closed or self.most == 0:
            return NO_ITEM
        self.most -= 1
        if native.is_one_step():
            end = self.end if self.end != NOTHING else reader.edge_now()
            return reader.step(end, self.make)
        position, sequence = reader.position, reader.sequence
        self.waiting += 1  # as in `wait`: a thread that closes the log meanwhile leaves its files to this one
        try:
            if reader.closed:
                return NO_ITEM
            end = self.end if self.end != NOTHING else reader.edge_now()
            return reader.step(end, self.make)
        except BaseException:  # of a signal handler, perhaps after the reader has moved on
            reader.position, reader.sequence = position, sequence
            raise
        finally:
            self.waiting -= 1


class Items:
    """Iterates over the items of a batch, refilling it; a loop over this is faster than one over a Python object."""

    def __init__(self, batch: Batch, refill: Callable[[], Any]) -> None:
        self.batch = batch
        self.refill = refill

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.batch.take(self.refill)
