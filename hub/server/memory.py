"""The limit of Arrow's memory in this process, which holds before anything is decoded.

A compressed batch declares its size itself, and Arrow allocates that much before any other code can check it. So all of Arrow's memory in a
hub comes from one range of addresses. Its allocator, mimalloc, reserves the range when it is loaded, and may not leave it. An allocation
beyond it is a MemoryError of that batch alone. Addresses that were never written to cost no memory.
"""

from __future__ import annotations

import os
import sys

from kvspool import system

LEAST = 64 << 20  # bytes that a hub needs at least
_TRIAL = 1 << 20  # bytes
_EXTRA = 1 << 30  # bytes of addresses for other uses: libraries, thread stacks

# The names of mimalloc's option since version 2.1, and before.
_NO_MORE = ("MIMALLOC_DISALLOW_OS_ALLOC", "MIMALLOC_LIMIT_OS_ALLOC")


def half_of_all() -> int:
    """Return half of this machine's memory, in bytes; less if a process may not have so many addresses."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    while size > LEAST and not _can_be_had(size + _EXTRA):
        size //= 2
    return max(LEAST, size)


def _can_be_had(size: int) -> bool:
    try:
        system.port.private_memory(size).close()
    except OSError:
        return False
    return True


def bound(size: int) -> bool:
    """Limit Arrow to `size` bytes from now on. Return whether that is effective.

    It isn't if Arrow was loaded before, or was built without mimalloc. Raises ValueError for less than `LEAST`, and MemoryError if so many
    addresses are not available: then Arrow can't be used in this process any more.
    """
    if size < LEAST:
        raise ValueError(f"a hub needs at least {LEAST >> 20} MiB for batches, not {size} bytes")
    if "pyarrow" not in sys.modules:
        os.environ.update(dict.fromkeys(_NO_MORE, "1"))
        os.environ["MIMALLOC_RESERVE_OS_MEMORY"] = f"{size >> 10}KiB"  # without a unit it would be bytes
        os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "mimalloc"
    import pyarrow as pa

    pa.allocate_buffer(_TRIAL)
    try:
        pa.allocate_buffer(size)  # never written to
    except MemoryError:
        return True
    return False
