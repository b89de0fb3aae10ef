"""The append lock: a word in shared memory names its owner, and locked bytes of a file prove that the owner is alive.

Taking and freeing the lock are two atomic operations on the word, without a system call, while no other handle wants it. The word is

    bits 0..15    slot + 1 of the owner; 0: the lock is free, if the other bits are 0 too
    bits 16..30   low bits of the owner's generation, a number that changes with every take
    bit 31        WAITERS: at least one process sleeps on the low half of the word (a futex)
    bits 32..63   high bits of the generation

**A slot proves life.** A compiled handle that writes locks its own byte, `WRITER_SLOTS_AT` + slot, exclusively, when it first takes the
word, and keeps it until its descriptor is closed: it is a lock of the open file description. The kernel frees the byte when the process
ends, in any PID namespace, and a restart of the machine frees all.

**A dead owner is replaced.** A handle that finds the lock taken queries the owner's byte. If that is free, the owner is dead, and the
handle swaps exactly this word for its own. The generation, which begins at a random number of 47 bits in every handle, makes the swap fail
if any other process was faster. A stopped owner keeps its byte, and so the lock.

**The interpreted twin** has no compare-and-swap. It locks the byte `GATE` exclusively for each append; compiled handles share it while they
may write. So an interpreted handle swaps the word while no other handle can, and the twins exclude each other on one log.

**How long to poll and to sleep** is decided by `engine.locks`, which creates the lock with these numbers. It also waits longer than one
step may, and raises the error at the end.

The words of a hostile or restored file do no harm: no living process holds the byte of a slot that no process took, so the next waiter
replaces that owner.
"""

from __future__ import annotations

from typing import Any, NoReturn

import kvspool.kernel.machine as native
from kvspool.errors import Closed
from kvspool.system.handles import refuse_copy

GATE = 0  # the byte that compiled writers share, and an interpreted one locks exclusively during an append
WRITER_SLOTS_AT = 65536  # + slot: the byte of a compiled writer; not a slot of a durable reader, see `frames_py`
WRITER_SLOTS = 65534  # most open writers
OWNER = 0xFFFF  # the bits of the word that contain the owner's slot + 1
WAITERS = 1 << 31
STEP = 1 << 16  # from one generation to the next
WORD = 0xFFFFFFFFFFFFFFFF


class AppendLock:
    """The lock of one handle on one word. Threads that share it exclude each other before they call `take`."""

    def __init__(
        self, control: memoryview, at: int, fd: int, generation: int, gate: int, polls: tuple[int, int], sleeps: tuple[int, int]
    ) -> None:
        """Use word `at` of writable memory; `fd`, its own open file description, is for the bytes of the file.

        generation: a random number, so that no two handles use the same one for the same slot. gate: the byte for both twins, usually GATE.
        polls: ns before the first and the last poll of `take`, each twice as long as the one before; (1, 0): none. sleeps: ns of the first
        sleep of `take_within`, and the most of one. Raises ValueError for memory without that word, or read-only memory.
        """
        if at < 0 or len(control) < 8 * at + 8 or not native.is_writable(control):
            raise ValueError(f"the append lock is word {at} of writable memory")
        self.owner: Any = control
        self.words: Any = native.words_at(control)
        self.at = at
        self.fd = fd
        self.gate = gate
        self.first_poll, self.last_poll = polls
        self.first_sleep, self.longest_sleep = sleeps
        self.own = (generation << 16) & WORD & ~(OWNER | WAITERS)  # the word while this handle has the lock
        self.is_inside = False  # past the gate
        self.is_taken = False
        self.taken_by: object = None  # the token of its owner
        self.has_slept = False

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def take(self, token: object = None) -> bool:
        """Take the lock if it is free, becomes free soon, or has a dead owner; return whether it was taken. Then `taken_by` is the token.

        No system call if the lock is free, after the first time. Raises Closed, and the system's OSError.
        """
        if self.fd < 0:
            raise Closed("this handle of the log was closed; open it again")
        if self.is_taken:
            return False
        is_ours = False
        try:
            self.is_taken = True  # first: a signal handler that appends during this is refused
            self.taken_by = token
            is_ours = (self.is_inside or self.pass_gate()) and self.take_word()
        finally:
            if not is_ours:
                self.free()
        return is_ours

    def take_within(self, ns: int) -> bool:
        """Sleep until the lock is free and take it; False if it was not within `ns`, which must be short: no signal handler runs."""
        until = native.monotonic() + ns
        pause = self.first_sleep
        while True:
            left = until - native.monotonic()
            if left <= 0:
                return False
            self.rest(pause if pause < left else left)
            if self.take():
                return True
            pause = min(2 * pause, self.longest_sleep)

    def take_word(self) -> bool:
        """Store the name of this handle in the word, with a new generation, and return whether that succeeded."""
        self.own = (((self.own | WAITERS) + STEP) & WORD) & ~WAITERS  # the carry passes bit 31
        own = self.own | WAITERS if self.has_slept else self.own  # others may still sleep
        if native.swap(self.words, self.at, 0, own) or self.take_soon(own) or self.replace_dead(own):
            self.has_slept = False
            return True
        return False

    def pass_gate(self) -> bool:
        """Lock the gate, shared, or exclusively in the interpreted twin; and a slot, if there is none yet. False if that is impossible."""
        if not native.try_gate(self.fd, self.gate):
            return False
        if self.own & OWNER == 0 and not self.find_slot():
            native.unlock(self.fd, self.gate)
            return False
        self.is_inside = True
        return True

    def is_gate_open(self) -> bool:
        """Return whether this handle could pass the gate; only an interpreted one can't, while compiled handles may write."""
        return native.is_one_step() or not native.has_sharers(self.fd, self.gate)

    def find_slot(self) -> bool:
        """Lock the byte of a free slot, which stays locked until the descriptor is closed; False if every slot is in use."""
        slot = (self.own >> 32) % WRITER_SLOTS
        for _try in range(WRITER_SLOTS):
            if native.try_lock(self.fd, WRITER_SLOTS_AT + slot):
                self.own |= slot + 1
                return True
            slot = slot + 1 if slot + 1 < WRITER_SLOTS else 0
        return False

    def take_soon(self, own: int) -> bool:
        """Poll a few times whether the owner frees the word, and take it then."""
        pause = self.first_poll
        while pause <= self.last_poll and native.is_one_step():
            native.pause(pause)
            if native.load(self.words, self.at) == 0 and native.swap(self.words, self.at, 0, own):
                return True
            pause *= 2
        return False

    def replace_dead(self, own: int) -> bool:
        """Take the lock from a dead owner; return whether it was dead."""
        seen = native.load(self.words, self.at)
        return not self.is_alive(seen) and native.swap(self.words, self.at, seen, own | WAITERS)

    def is_alive(self, word: int) -> bool:
        """Return whether a process holds the byte of the slot in `word`. Our own byte doesn't count: we don't own the word."""
        slot = word & OWNER
        return slot != 0 and native.locked_from(self.fd, WRITER_SLOTS_AT + slot - 1, 1) >= 0

    def rest(self, ns: int) -> None:
        """Sleep until the owner frees the word, at most `ns`; it may end early. Other threads run meanwhile."""
        if self.fd < 0:
            return
        if not self.is_inside:  # an interpreted writer holds the gate, whose release wakes no process
            native.sleep(min(ns, self.longest_sleep))
            return
        seen = native.load(self.words, self.at)
        if seen == 0:
            return
        if seen & WAITERS == 0:
            if not native.swap(self.words, self.at, seen, seen | WAITERS):
                return
            seen |= WAITERS
        self.has_slept = True
        owner = self.owner  # keeps the memory alive while another thread closes
        native.wait_word(self.words, self.at, seen, ns)
        del owner

    def free(self) -> None:
        """Free the lock that `take` took, and wake one waiter. Never frees a lock of another handle, whatever happened in between.

        If a signal handler raises during this, call it again.
        """
        if self.is_taken:
            if self.free_word():
                native.wake_word(self.words, self.at)
            self.leave()
            self.taken_by = None
            self.is_taken = False

    def free_word(self) -> bool:
        """Free the word if it names this handle with its present generation; return whether others may sleep on it."""
        return not native.swap(self.words, self.at, self.own, 0) and native.swap(self.words, self.at, self.own | WAITERS, 0)

    def leave(self) -> None:
        """Release the gate; a compiled handle keeps its shared lock on it."""
        if not native.is_one_step() and self.fd >= 0:
            self.is_inside = False
            native.unlock(self.fd, self.gate)

    def close(self) -> None:
        """Forget the memory and the descriptor, which the caller closes: that frees the slot."""
        self.fd = -1
        self.is_inside = self.is_taken = False
        self.owner = self.taken_by = None
        self.words = native.no_words()
