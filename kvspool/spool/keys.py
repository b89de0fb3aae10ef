"""The key table: keys of maps as strings, each stored once, so that records can refer to them by index.

**Format.** The last part of `spool.ctl` before the index: a head with one word, `used`, then entries one after the other: length, CRC32C,
UTF-8. The n-th entry has index n. The table is append-only: an index means the same key during the life of the log.

**Durability.** Entries are flushed to disk before `used` publishes them, and only published ones are written into records. So no record
that survives a crash of the machine has a key that didn't. This costs one flush for each map of a new shape. Their number is limited: the
table is bounded, and when it is full keys stay in the records.

**Recovery.** None after a crash of a process. A killed writer leaves at most entries after `used` that no record names; the next one keeps
the sound ones, and overwrites the first unsound one. An unsound entry before `used` is damage: no key is added any more, and records that
name it, or a later one, are undecodable.

**Closed.** An older copy of the control block may lack keys that records name. No index is ever assigned to a second key, so `used` is then
CLOSED, and the table takes no more keys; see `lost_keys`.

**Eras.** A key that no kept record names may be lost without that, and its index assigned to another key. So a KeyTable is valid for one
era: until a recovery, after which the sequences continue at a later multiple of 2^32. It never learns keys of another era.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvspool import system
from kvspool.engine.checksums import checksum
from kvspool.kernel import frames_py as frames
from kvspool.keyed import LONGEST_KEY, Keys
from kvspool.spool import format

HEAD = format.KEY_TABLE.size
CLOSED = (1 << 64) - 1  # instead of `used`: no key is added any more


class KeyTable:
    """The table of one log, as known to one handle in one era: a private copy, reread if a key is missing."""

    def __init__(self, region: Any, log_id: bytes, control: Any = None) -> None:
        """Read the table in `region`, all of its bytes. control: the words of the control block; None: the log is not in use."""
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
        self._next = HEAD, 0  # offset of the next entry, and its index
        self._seen = -1
        self.refresh()

    def close(self) -> None:
        """Release the memory; known keys stay known."""
        self._words = None  # first: a thread that sees the words also has the region
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
        """Take over from the table of the log's files before a resize: lookups there also find our keys.

        Not if the log was recovered since.
        """
        if older.era != self.era:
            return
        older.keys.names.update(self.keys.names)
        self.keys = older.keys
        self.keys.refresh = self.refresh

    def copy_to(self, other: KeyTable) -> None:
        """Under the key lock: copy all entries to a new, empty table; if this one is closed, close the other one, too."""
        self.refresh()
        names = self.keys.names
        entries = b"".join(other._entry(names[index].encode(), index) for index in range(len(names)))
        other._region[HEAD : HEAD + len(entries)] = entries
        other._words[0] = self._words[0]
        other.refresh()

    def look(self) -> None:
        """Read entries published since the last call; if there are none this costs one load."""
        words = self._words
        if words is not None and words[0] != self._seen:
            self.refresh()

    def refresh(self) -> None:
        """Read all sound entries, also those after `used`, of which a crash of the machine may have kept only the records.

        Threads may do this at once: each adds the same entries, and none is removed.
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
        """Under all locks: close the table for all processes."""
        self._words[0] = CLOSED
        self.refresh()

    def is_whole(self) -> bool:
        """Return whether every published key is present; False for a closed table, too."""
        self.refresh()
        return self._next[0] == HEAD + self._seen

    def add(self, keys: list[str], flush: Callable[[], None]) -> None:
        """Under the key lock: add the missing keys while there is room. `flush` flushes spool.ctl."""
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
        crc = checksum(self._log_id, index.to_bytes(4, "little"), key)
        return format.KEY_ENTRY.pack(format.KeyEntry(len(key), crc)) + key

    def _sound(self, region: Any) -> Iterator[tuple[str, int, int]]:
        """Yield key, index and end of each further entry, up to the first unsound one. Only a private copy is trusted."""
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
