"""The search for every sound frame of a ring after a crash of the machine.

This source is compiled as a part of `frames_c`; see `frames_py`.
"""

from __future__ import annotations

import kvspool.kernel.machine as native
from kvspool.kernel.frames_py import BAD, BLOCK, FRAME, HEADER, INDEX, INDEX_WORDS, SKIP
from kvspool.kernel.ring_py import Ring


class FrameScanner(Ring):
    """Finds every sound frame in a ring in any state after a crash of the machine; erases leftovers, and fills the index.

    A *run* is a row of adjacent sound frames with consecutive sequences. `start`, `position` (its end), `first`, `last`, `newest` (the last
    timestamp) and `frames` describe the one found by `next_run`. A sound pad is a run without frames.
    """

    def __init__(self, data: memoryview, control: memoryview, seed: int) -> None:
        """Use the ring; it must be writable for `erase`, and the control block for `clear_index` and `enter_run`."""
        Ring.__init__(self, data, control, seed)
        self.may_erase = native.is_writable(data)
        self.start = 0
        self.position = 0
        self.first = 0
        self.last = 0
        self.newest = 0
        self.frames = 0

    def next_run(self, position: int, stop: int, least: int, split: int) -> bool:
        """Find the first run from `position` on whose sequences are at least `least`; False if none starts before `stop`.

        A run ends before the sequence `split`. Older sound frames are skipped whole; everywhere else every 8 bytes may start a frame, also
        after the header of a pad, where bytes may be of a later lap.
        """
        self.check_open()
        end = stop + self.capacity
        while position < stop:
            found = self.parse(position, end)
            if found == FRAME and self.is_sound(self.offset):
                if self.sequence_found >= least:
                    self.follow(position, stop, split)
                    return True
                position += self.stored
            elif found == SKIP and self.stored < HEADER:
                position += self.stored
            elif found == SKIP and self.sequence_found >= least:
                self.start = position
                self.position = position + self.stored
                self.first = self.last = self.sequence_found
                self.frames = 0
                return True
            else:
                position += self.step(position % self.capacity)
        return False

    def step(self, offset: int) -> int:
        """Return the distance to the next offset at which a frame may start: a page of zeros has none."""
        if offset & 4095 == 0 and offset + 4096 <= self.capacity and native.is_zero(self.data, offset, 4096):
            return 4096
        return 8

    def follow(self, position: int, stop: int, split: int) -> None:
        """Extend the run that begins with the frame just parsed, at `position`."""
        end = stop + self.capacity
        self.start = position
        self.first = self.sequence_found
        self.frames = 0
        while True:
            self.frames += 1
            self.last = self.sequence_found
            self.newest = self.timestamp
            position += self.stored
            if position >= stop or self.parse(position, end) != FRAME or self.sequence_found != self.last + 1:
                break
            if self.sequence_found == split or not self.is_sound(self.offset):
                break
        self.position = position

    def place_of(self, position: int, end: int, sequence: int) -> int:
        """Return the position of the frame with this sequence in the run between these positions; `end` if it has none."""
        self.check_open()
        while position < end and self.parse(position, end) == FRAME and self.sequence_found < sequence:
            position += self.stored
        return position

    def erase(self, position: int, end: int, least: int) -> None:
        """Overwrite the first word of each frame or pad of the run between these positions whose sequence is at least `least`."""
        self.check_erasable()
        while position < end and self.parse(position, end) != BAD:
            at = (position % self.capacity) >> 3
            position += self.stored
            if self.sequence_found >= least:
                self.words[at] = 0

    def cut(self, position: int, end: int, least: int) -> None:
        """Overwrite the first word of a damaged frame between these positions that would extend past `end`, into other data.

        A writer that makes room moves from header to header without comparing checksums, and would skip that data.
        """
        self.check_erasable()
        while position < end:
            found = self.parse(position, end + self.capacity)
            if found == BAD:
                break
            at = (position % self.capacity) >> 3
            position += self.stored
            if found == FRAME and position > end and self.sequence_found >= least:
                self.words[at] = 0

    def check_erasable(self) -> None:
        """Raise Closed as `check_open` does, and ValueError if the ring is read-only."""
        self.check_open()
        if not self.may_erase:
            raise ValueError("the memory of the ring is read-only")

    def clear_index(self) -> None:
        """Empty every entry of the index."""
        self.check_writable()
        blocks = (self.capacity + (1 << BLOCK) - 1) >> BLOCK
        for block in range(blocks):
            native.store(self.control, INDEX + INDEX_WORDS * block, 0)

    def enter_run(self, position: int, end: int) -> None:
        """Enter the first frame of each block between these positions in the index; every frame there is sound.

        Runs are entered in the order of their positions, into a cleared index.
        """
        self.check_writable()
        while position < end and self.parse(position, end) == FRAME:
            offset = position % self.capacity
            block = offset >> BLOCK
            at = INDEX + INDEX_WORDS * block
            known = native.load(self.control, at)
            if known & 1 == 0 or known < position - offset + (block << BLOCK):
                native.store(self.control, at, 0)
                native.store(self.control, at + 1, self.sequence_found)
                native.store(self.control, at + 2, self.timestamp)
                native.store(self.control, at, position | 1)
            position += self.stored
