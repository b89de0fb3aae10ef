"""Windows of task lists in plain memory, which several workers share, and a memory whose stores can be counted and cut off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from faults import Killed
from loops import interpreted

from kvspool.kernel import tasks_py as words
from kvspool.kernel.lock import AppendLock
from kvspool.kernel.tasks import TaskWindow

INTERPRETED: Any = interpreted("kvspool.kernel.tasks").TaskWindow


class FreeLock:
    """A lock in one thread: it is always free for the next caller, as after the end of its owner."""

    def __init__(self) -> None:
        self.taken_by: Any = None

    def take(self, token: Any) -> bool:
        self.taken_by = token
        return True

    def free(self) -> None:
        self.taken_by = None


class CountedWords:
    """Words of memory. After `left` more stores each further one raises Killed."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.left = -1
        self.stores = 0

    def __getitem__(self, at: int) -> int:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1
        self.stores += 1
        self._words[at] = value


class Shared:
    """The memory of a list, for windows of any number of workers."""

    def __init__(self, size: int, *, is_ordered: bool = False, start: int = 0, kind: Any = INTERPRETED, path: Path | None = None) -> None:
        """path: of a file for the locks of compiled windows."""
        self.size = size
        self.is_ordered = is_ordered
        self.kind = kind
        self.memory = memoryview(bytearray(8 * words.words_of(size, is_ordered)))
        self.counted = CountedWords(self.memory.cast("Q"))
        self._path = path
        self._files: list[int] = []
        self.window(1).start_at(start)

    def window(self, owner: int) -> Any:
        """Return the window of a worker."""
        if self.kind is TaskWindow and TaskWindow is not INTERPRETED:
            assert self._path is not None
            self._files.append(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            lock = AppendLock(self.memory, 0, self._files[-1], owner << 20, 0, (1, 0), (1000, 1000))
            return self.kind(self.memory, lock, self.size, self.is_ordered, owner)
        window = self.kind(self.memory, FreeLock(), self.size, self.is_ordered, owner)
        window.words = self.counted
        return window

    def close(self) -> None:
        for file in self._files:
            os.close(file)
