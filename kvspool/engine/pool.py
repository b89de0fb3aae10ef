"""Private memory for the columns of large batches: lent, and lent again once nothing shares it any more.

Clearing new pages takes a third of the time in which records are gathered. So memory returns to the pool when the last buffer, array,
slice or view that shares it is gone. The kernel may take the pages of waiting memory whenever it needs them.

**Safety.** Memory is lent again only if the mapping has no export left: the interpreter counts them, for views of every kind. The pool
looks when the view that it lent is freed.
"""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress
from weakref import finalize

from kvspool import system


class Pool:
    """Lends pieces of private memory of one size. Threads may share it."""

    def __init__(self, size: int, spare: int) -> None:
        """size: bytes of a piece; spare: how many pieces may wait to be lent again."""
        self.size = size
        self._spare: deque[mmap.mmap] = deque(maxlen=spare)

    def lend(self, size: int) -> memoryview:
        """Return at least `size` bytes with anything in them, for as long as the view or anything that shares its memory exists.

        Memory that is larger than a piece is not lent again. Raises OSError where the address space has no room.
        """
        if size > self.size:
            return memoryview(system.port.private_memory(size))
        try:
            memory = self._spare.pop()  # the one that came last: its pages are most likely there
        except IndexError:
            memory = system.port.private_memory(self.size)
        view = memoryview(memory)
        finalize(view, self._take_back, memory).atexit = False
        return view

    def _take_back(self, memory: mmap.mmap) -> None:
        """Keep a piece for the next one to ask; unmap it where too many wait."""
        with suppress(BufferError, OSError):  # somebody still sees it: it goes with the last view
            system.port.release_pages(memory)
            self._spare.append(memory)
