"""The key table: strings that were keys of maps, each of them once, so that records can name them by their number.

**Format.** The last part of `spool.ctl` before the index: a head with one word, `used`, then entries one behind the other: length, CRC32C,
UTF-8. The n-th entry has index n. It is append-only: an index means the same key for as long as the log lives.

**Durability.** Entries are flushed to disk before `used` publishes them, and only published ones are written into records. So no record
that survives a crash of the machine has a key that didn't. That is one flush for each map of a new shape, and there is an end to that:
the table is bounded, and where it is full keys stay in the records.

**Recovery.** None after a crash. A writer that is killed leaves at most entries behind `used` that no record names; the next one keeps
those that are sound, and writes over the first that isn't. An unsound entry before `used` is damage: no key is added any more, and
records that name it, or a later one, are undecodable.

**Closed.** An older copy of the control block may lack keys that records name. No index is ever given to a second key, so `used` is CLOSED
then, and the table takes no more keys; see `lost_keys`.

**Eras.** A key that no kept record names may be lost without that, and its index given to another key. So a KeyTable is valid for one era:
until a recovery, after which the numbers of the log go on at a later multiple of 2^32. It never learns keys of another era.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvspool import system
from kvspool.kernel import frames_py as frames
from kvspool.keyed import LONGEST_KEY, Keys
from kvspool.spool import format

HEAD = format.KEY_TABLE.size
CLOSED = (1 << 64) - 1  # in place of `used`: no key is added any more


class KeyTable:
    """The table of one log, as one handle knows it in one era: a private copy, looked at anew where something is missing."""

    def __init__(self, region: Any, log_id: bytes, control: Any = None) -> None:
        """Look at the table in `region`, all of its bytes. control: the words of the control block; None: nobody changes the log."""
        self._control = control
        self.era = 0
        self.keys = Keys()
        self.era = self.keys.era = self._era_now()
        self.keys.refresh = self.refresh
        self.indexes: dict[str, int] = {}  # of published keys
        self.is_full = False  # or damaged: no key can be added
        self._log_id = log_id
        self._region: Any = region
        self._words: Any = region.cast("Q")
        self._next = HEAD, 0  # where the next entry will stand, and its index
        self._seen = -1
        self.refresh()

    def close(self) -> None:
        """Let go of the memory; what is known stays known."""
        self._words = None  # first: a thread that finds words has got the region already
        self._region = None
        self._control = None

    @property
    def is_outdated(self) -> bool:
        """Return whether the log is in another era by now, which needs another KeyTable."""
        return self._era_now() != self.era

    def _era_now(self) -> int:
        """Return the era of the control block's next sequence. A mark that changes meanwhile is of a later publication."""
        words = self._control
        if words is None:
            return self.era
        mark = frames.MARKS if words[frames.MARKS] == words[frames.TAIL] else frames.MARKS + frames.MARK_WORDS
        return int(words[mark + 1] >> frames.ERA_BITS)

    def go_on(self, older: KeyTable) -> None:
        """Take over from the table of the files that the log lay in before it was resized: whoever looks keys up there finds ours too.

        Not if the log was recovered since.
        """
        if older.era != self.era:
            return
        older.keys.names.update(self.keys.names)
        self.keys = older.keys
        self.keys.refresh = self.refresh

    def copy_to(self, other: KeyTable) -> None:
        """Under the key lock: give a new, empty table all that is here; where this one ends for good, the other one does."""
        self.refresh()
        names = self.keys.names
        entries = b"".join(other._entry(names[index].encode(), index) for index in range(len(names)))
        other._region[HEAD : HEAD + len(entries)] = entries
        other._words[0] = self._words[0]
        other.refresh()

    def look(self) -> None:
        """Take in what was published since the last look, which costs one load if that is nothing."""
        words = self._words
        if words is not None and words[0] != self._seen:
            self.refresh()

    def refresh(self) -> None:
        """Take in all sound entries: those behind `used` too, of which a crash of the machine may have kept only the records.

        Threads may do this at once: each adds the same to what is only added to.
        """
        region, words = self._region, self._words
        if words is None:
            return
        used = words[0]
        found = list(self._sound(region))
        if self.is_outdated:
            return
        for key, index, end in found:
            self.keys.names[index] = key
            if end <= HEAD + used:
                self.indexes.setdefault(key, index)
                self._next = end, index + 1
        self._seen = used
        self.is_full = self._next[0] != HEAD + used or len(region) - self._next[0] < format.KEY_ENTRY.size + LONGEST_KEY

    def end(self) -> None:
        """Under all locks: let nobody add a key any more, in any process."""
        self._words[0] = CLOSED
        self.refresh()

    def is_whole(self) -> bool:
        """Return whether every key that was published is there; False for a table that was closed, too."""
        self.refresh()
        return self._next[0] == HEAD + self._seen

    def add(self, keys: list[str], flush: Callable[[], None]) -> None:
        """Under the key lock: add the keys that are not there yet, as far as there is room. `flush` puts spool.ctl on disk."""
        self.refresh()
        if self.is_full or self.is_outdated:
            return
        region = self._region
        at, index = start = self._next
        there = set(self.indexes)
        for key, found, end in self._sound(region):
            there.add(key)
            at, index = end, found + 1
        for key in keys:
            entry = self._entry(key.encode(), index)
            if key in there or at + len(entry) > len(region):
                continue
            region[at : at + len(entry)] = entry
            there.add(key)
            at, index = at + len(entry), index + 1
        if (at, index) == start:
            return
        flush()
        system.port.fence()
        self._words[0] = at - HEAD
        self.refresh()

    def _entry(self, key: bytes, index: int) -> bytes:
        crc = format.checksum(self._log_id, index.to_bytes(4, "little"), key)
        return format.KEY_ENTRY.pack(format.KeyEntry(len(key), crc)) + key

    def _sound(self, region: Any) -> Iterator[tuple[str, int, int]]:
        """Yield key, index and end of each further entry, up to the first that is none. Nothing is believed but a private copy."""
        start, index = self._next
        data = bytes(region[start : len(region)])
        at = 0
        while at + format.KEY_ENTRY.size < len(data):
            begin = at + format.KEY_ENTRY.size
            length = format.KEY_ENTRY.unpack(data, at).length
            key = data[begin : begin + length]
            if not 1 <= length == len(key) <= LONGEST_KEY or data[at : begin + length] != self._entry(key, index):
                return
            try:
                yield key.decode(), index, start + begin + length
            except UnicodeDecodeError:
                return
            at, index = begin + length, index + 1
