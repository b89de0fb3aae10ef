"""Handles that survive a fork.

A forked child shares its parent's open file descriptions: the parent's lock would count as the child's, and the child's unlock would free
the parent's. So each handle registers here, gives up its lock descriptor in the child before anything else runs there, and opens its
own when it is next used. A fork() from C passes this by; the writing path therefore compares process ids too. Only a child made by a bare
system call, past libc, is not noticed.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """A handle that wants to know that it now lives in a forked child."""

    def forked(self) -> None:
        """Give up what must not be shared with the parent. Runs in the child, where only one thread is left."""


_handles: weakref.WeakSet[Forkable] = weakref.WeakSet()


def register(handle: Forkable) -> None:
    """Call `handle.forked()` in every child that this process forks while the handle is alive."""
    _handles.add(handle)


def _in_child() -> None:
    for handle in list(_handles):
        handle.forked()


os.register_at_fork(after_in_child=_in_child)
