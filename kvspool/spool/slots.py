"""The bytes of the durable readers: 64 slots in the control block, each with a name and a position in the log.

A slot holds two *commits*. A new one overwrites the older of the two, so the newer one survives if its writer is killed at any instruction.
Each has a CRC32C that begins with the log id and the name. So a torn commit doesn't count, and if the name itself is damaged the commits
still identify the reader.

Writers: `taken`, the name and the first commit: the owner of the admin lock and the slot's lock; further commits: the slot's holder;
`evicted`: a writer. Every store is one aligned word. No byte is trusted before it was checked on a copy.
"""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Iterator

from kvspool.errors import Corruption
from kvspool.kernel import frames_py as frames
from kvspool.kernel import machine
from kvspool.kernel.frames import crc32c
from kvspool.spool import format
from kvspool.system import holders

NAME_BYTES = 64
_MODULUS = 1 << 32
_PLACE = struct.Struct("<QQqI")
_HOLDER = format.SLOT.offset("holder_pid") // 8


def encode_name(name: str) -> bytes:
    """Return the 64 bytes of a reader's name; ValueError for an invalid one."""
    if not isinstance(name, str):
        raise TypeError(f"a reader's name is a str, not {type(name).__name__}")
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") for character in name):
        raise ValueError(f"a reader's name has no control characters: {name!r}")
    raw = name.encode()
    if not 1 <= len(raw) <= NAME_BYTES:
        raise ValueError(f"a reader's name has 1 to {NAME_BYTES} bytes of UTF-8, not {len(raw)}: {name!r}")
    return raw.ljust(NAME_BYTES, b"\0")


class Slots:
    """The slots of one control block."""

    def __init__(self, control: memoryview, log_id: bytes) -> None:
        self._control = control
        self._words = control.cast("Q")
        self._log_id = log_id

    def taken(self) -> Iterator[Slot]:
        """Yield the slots that are taken."""
        return (self.slot(number) for number in format.SLOTS if self._words[frames.SLOTS_AT + number * frames.SLOT_WORDS])

    def slot(self, number: int) -> Slot:
        """Return a slot, taken or not."""
        return Slot(self._words, self._control, self._log_id, number)

    def find(self, name: bytes) -> Slot | None:
        """Return the slot of a reader; None if there is none. `name` has 64 bytes."""
        for slot in self.taken():
            if slot.raw_name == name or (slot.newest() is None and slot.newest(name) is not None):
                return slot
        return None

    def announce(self) -> None:
        """Under the append lock: let every writer reread all slots before it overwrites anything."""
        self._words[frames.SLOTS_CHANGED] = (self._words[frames.SLOTS_CHANGED] + 1) % (1 << 64)


class Slot:
    """One slot."""

    def __init__(self, words: memoryview, control: memoryview, log_id: bytes, number: int) -> None:
        self.number = number
        self._words = words
        self._control = control
        self._log_id = log_id
        self._at = frames.SLOTS_AT + number * frames.SLOT_WORDS  # word
        self._state = 0  # CRC32C register after the log id and the name

    @property
    def is_taken(self) -> bool:
        return bool(self._words[self._at])

    @property
    def raw_name(self) -> bytes:
        """Return the 64 bytes of the name, which may be damaged."""
        at = (self._at + frames.SLOT_NAME) * 8
        return bytes(self._control[at : at + NAME_BYTES])

    @property
    def name(self) -> str:
        """Return the name as far as it is readable."""
        return self.raw_name.rstrip(b"\0").decode(errors="backslashreplace")

    @property
    def holder(self) -> str:
        """Describe its last holder in readable words."""
        return holders.describe(self._holder())

    @property
    def has_lost_its_holder(self) -> bool:
        """Return whether the process that last opened the reader has ended, as far as that can be known here."""
        return holders.is_gone(self._holder())

    def _holder(self) -> list[int]:
        return [self._words[self._at + _HOLDER + at] for at in range(4)]

    def newest(self, name: bytes | None = None) -> format.Commit | None:
        """Return the commit that counts, None if none is sound; `name` replaces the name in the slot."""
        for _ in range(frames.TRIES):
            sound = [found for found, is_sound in self._commits(name) if is_sound]
            if sound:
                return sound[0] if len(sound) == 1 or _is_later(sound[0], sound[1]) else sound[1]
        return None

    def commit(self) -> format.Commit:
        """Return the commit that counts. Raises Corruption if none is sound."""
        found = self.newest()
        if found is not None:
            self._state = self._register(self.raw_name)
            return found
        raise Corruption(f"the position of the reader {self.name!r} is damaged (slot {self.number}); delete it, and create a new one")

    def is_evicted(self, commit: format.Commit) -> bool:
        """Return whether writers no longer wait for the reader while this is its commit."""
        return bool(self._words[self._at + frames.SLOT_EVICTED] == frames.EVICTED | commit.generation)

    @property
    def holder_pid(self) -> int:
        """Return the process that opened it last."""
        return self._holder()[0]

    def evict(self) -> None:
        """Under the append lock: let no writer wait for the reader until its next commit."""
        self._words[self._at + frames.SLOT_EVICTED] = frames.EVICTED | self.commit().generation

    def sign(self) -> None:
        """Under the slot's lock: store the holder."""
        for at, word in enumerate(holders.ours()):
            self._words[self._at + _HOLDER + at] = word

    def take(self, name: bytes, place: tuple[int, int], updated: int) -> format.Commit:
        """Under the admin lock and the slot's: assign a free slot to a reader. Killed before the last store, it is still free."""
        self._words[self._at + frames.SLOT_EVICTED] = 0
        for at, word in enumerate(struct.unpack("<8Q", name)):
            self._words[self._at + frames.SLOT_NAME + at] = word
        for at in range(2 * frames.COMMIT_WORDS):
            self._words[self._at + frames.SLOT_COMMITS + at] = 0
        self._state = self._register(name)
        commit = self._store(place, updated, 1)
        machine.fence()
        self._words[self._at] = 1
        return commit

    def adopt(self, other: Slot, commit: format.Commit | None, place: tuple[int, int]) -> None:
        """Copy the slot `other` of the old files to a free slot of new files; `place` is the new position of its commit. A damaged one
        stays damaged.
        """
        for at in range(1, frames.SLOT_WORDS):
            self._words[self._at + at] = other._words[other._at + at]
        if commit is not None:
            for at in range(2 * frames.COMMIT_WORDS):
                self._words[self._at + frames.SLOT_COMMITS + at] = 0
            self._state = self._register(self.raw_name)
            self._store(place, commit.updated, commit.generation)
        self._words[self._at] = 1

    def release(self) -> None:
        """Under the admin lock and the slot's: free it."""
        self._words[self._at] = 0

    def move(self, place: tuple[int, int], updated: int, before: format.Commit) -> format.Commit:
        """Under the slot's lock, after `commit` or `take`: commit a position. Killed at any store, the commit `before` still counts."""
        return self._store(place, updated, (before.generation + 1) % _MODULUS)

    def replace(self, position: int) -> None:
        """Under all locks, without users: store the new position of the commit's next record. An evicted reader stays evicted."""
        before = self.commit()
        was_evicted = self.is_evicted(before)
        after = self.move((position, before.sequence), before.updated, before)
        if was_evicted:
            self._words[self._at + frames.SLOT_EVICTED] = frames.EVICTED | after.generation

    def _commits(self, name: bytes | None) -> list[tuple[format.Commit, bool]]:
        """Return both commits, and whether they are sound."""
        state = self._register(self.raw_name if name is None else name)
        commits = []
        for which in range(2):
            at = (self._at + frames.SLOT_COMMITS + which * frames.COMMIT_WORDS) * 8
            raw = bytes(self._control[at : at + format.COMMIT.size])
            commit = format.COMMIT.unpack(raw)
            commits.append((commit, crc32c(state, raw[:28]) ^ frames.LOW == commit.crc))
        return commits

    def _register(self, name: bytes) -> int:
        """Return the CRC32C register after the log id and the name, with which the checksum of a commit begins."""
        return crc32c(format.frame_seed(self._log_id), name)

    def _store(self, place: tuple[int, int], updated: int, generation: int) -> format.Commit:
        crc = crc32c(self._state, _PLACE.pack(*place, updated, generation)) ^ frames.LOW
        commit = format.Commit(*place, updated, generation, crc)
        at = self._at + frames.SLOT_COMMITS + (generation & 1) * frames.COMMIT_WORDS
        for further, word in enumerate(struct.unpack("<4Q", format.COMMIT.pack(commit))):
            self._words[at + further] = word
        return commit


def _is_later(one: format.Commit, other: format.Commit) -> bool:
    """Return whether a commit was made after another one; generations wrap after 2**32."""
    return 0 < (one.generation - other.generation) % _MODULUS < _MODULUS // 2
