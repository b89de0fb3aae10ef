"""Private memory for the columns of large batches: lent, and reused when no object shares it any more.

Clearing new pages takes a third of the time of gathering records. So memory returns to the pool when the last buffer, array, slice or view
that shares it is freed. The kernel may reclaim the pages of unused memory whenever it needs them.

**Safety.** Memory is reused only if the mapping has no export left: the interpreter counts them, for views of every kind. The pool checks
this when the view that it lent is freed.
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
        """size: bytes of a piece; spare: how many unused pieces are kept."""
        self.size = size
        self._spare: deque[mmap.mmap] = deque(maxlen=spare)

    def lend(self, size: int) -> memoryview:
        """Return at least `size` bytes of any content, valid while the view or anything that shares its memory exists.

        Memory that is larger than a piece is not reused. Raises OSError if there is no address space.
        """
        if size > self.size:
            return memoryview(system.port.private_memory(size))
        try:
            memory = self._spare.pop()  # the last returned one: its pages are most likely still present
        except IndexError:
            memory = system.port.private_memory(self.size)
        view = memoryview(memory)
        finalize(view, self._take_back, memory).atexit = False
        return view

    def _take_back(self, memory: mmap.mmap) -> None:
        """Keep a piece for the next caller; unmap it if too many are unused."""
        with suppress(BufferError, OSError):  # still shared: it is freed with the last view
            system.port.release_pages(memory)
            self._spare.append(memory)
