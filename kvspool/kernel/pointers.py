"""Further machine operations of the loops over chunks: big-endian numbers in a mapping, a doorbell, and queries of a file.

This is the interpreted form; `pointers.pxd` has the same functions as inline C. Files are queried through the port in `system`, in the
compiled twin by direct system calls.

A pointer of a chunk is aligned and moved as one piece of 4 bytes. So no process sees it torn, not even after a kill.
"""

from __future__ import annotations

from contextlib import suppress

from kvspool import system


def pointer(data: memoryview, at: int) -> int:
    """Load the signed pointer at `at` (acquire)."""
    return int.from_bytes(data[at : at + 4], "big", signed=True)


def store_pointer(data: memoryview, at: int, value: int) -> None:
    """Store the pointer at `at` (release: no earlier store moves after it)."""
    data[at : at + 4].cast("I")[0] = int.from_bytes(value.to_bytes(4, "big"), "little")


def number(data: memoryview, at: int) -> int:
    """Load the u16 at `at`, which may be odd."""
    return int.from_bytes(data[at : at + 2], "big")


def copy_in(data: memoryview, at: int, entry: bytes, length: int) -> None:
    """Store the length of an entry at `at`, and its bytes after it."""
    data[at : at + 2] = length.to_bytes(2, "big")
    data[at + 2 : at + 2 + length] = entry


def copy_out(data: memoryview, at: int, length: int) -> bytes:
    """Return a copy of `length` bytes at `at`."""
    return bytes(data[at : at + length])


def ring(fd: int, data: memoryview, at: int) -> None:
    """Rewrite the 4 bytes at `at`, so that inotify wakes waiters; a store through a mapping causes no event.

    Errors are ignored: waiters also poll.
    """
    with suppress(OSError):
        system.port.write(fd, bytes(data[at : at + 4]), at)


def reference(fd: int) -> int:
    """Return the u16 at the start of a file; -1 if it is shorter."""
    found = system.port.read(fd, 2, 0)
    return int.from_bytes(found, "big") if len(found) == 2 else -1


def size_of(fd: int) -> int:
    """Return the size of a file; -1 if it no longer has a name."""
    status = system.port.status(fd)
    return status.st_size if status.st_nlink else -1
