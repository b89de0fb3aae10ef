"""How much memory Arrow may take in this process, in all: a bound that holds before anything is decoded.

A compressed batch says itself how large it becomes, and Arrow makes room for that before anybody else can look. So everything that Arrow
allocates in a hub comes out of one range of addresses that its allocator, mimalloc, reserves when it is loaded, and may not leave. What
goes beyond is a MemoryError for the batch that asked for it, and for nobody else. Addresses that were never written to cost no memory.
"""

from __future__ import annotations

import os
import sys

from kvspool import system

LEAST = 64 << 20  # bytes with which a hub can work
_TRIAL = 1 << 20  # bytes
_BESIDE = 1 << 30  # bytes of addresses that all else takes: libraries, stacks of threads

# Its names in mimalloc from version 2.1 on, and before.
_NO_MORE = ("MIMALLOC_DISALLOW_OS_ALLOC", "MIMALLOC_LIMIT_OS_ALLOC")


def half_of_all() -> int:
    """Return half of this machine's memory, in bytes; less where a process may not have so many addresses."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    while size > LEAST and not _can_be_had(size + _BESIDE):
        size //= 2
    return max(LEAST, size)


def _can_be_had(size: int) -> bool:
    try:
        system.port.private_memory(size).close()
    except OSError:
        return False
    return True


def bound(size: int) -> bool:
    """Let Arrow take at most `size` bytes from now on; return whether that holds.

    It doesn't if Arrow was loaded before, or was built without mimalloc. Raises ValueError for less than `LEAST`, and MemoryError where so
    many addresses can't be had: then Arrow can't be used in this process any more.
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
