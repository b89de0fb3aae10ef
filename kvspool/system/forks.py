"""Handles that survive a fork.

A forked child shares its parent's open file descriptions: the parent's lock would count as the child's, and the child's unlock would
release the parent's. So each handle registers here, closes its lock descriptor in the child before anything else runs there, and opens its
own on next use. A fork() from C bypasses this, so the writing path also compares process ids. Only a child made by a bare system call, past
libc, is not noticed.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """A handle that must be notified in a forked child."""

    def forked(self) -> None:
        """Drop everything that must not be shared with the parent. Runs in the child, which has only one thread."""


_handles: weakref.WeakSet[Forkable] = weakref.WeakSet()


def register(handle: Forkable) -> None:
    """Call `handle.forked()` in every child that this process forks while the handle is alive."""
    _handles.add(handle)


def _in_child() -> None:
    for handle in list(_handles):
        handle.forked()


os.register_at_fork(after_in_child=_in_child)
