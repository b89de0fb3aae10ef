"""Batches to be put into the ring: the records appended under one lock, and how many of them are stored after an error.

**Whole or not at all.** A batch is put only if there is room for all of it. Up to a quarter of the ring is published at once. A larger
batch is published in pieces, so an error may occur after some of them; this module knows the stored records then.

**Keys.** Values of codec KEYED name keys by their index, which can be another key's after a recovery. So a batch knows the era of its
indexes, and raises `Outdated` under the append lock if the log is in another one by then. It is then packed again and appended.

**In a row.** The sequences of a batch are consecutive. While a batch waits for room no lock is held, so others may append after its first
pieces. Then the rest of the batch is not appended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from kvspool import keyed
from kvspool.engine import times
from kvspool.errors import Pinned, TooLarge
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import measure
from kvspool.record import NO_TIME, Codec, decode, encode, encode_keys, listed
from kvspool.spool import format
from kvspool.spool.eviction import Eviction

if TYPE_CHECKING:
    from kvspool.engine.rows import Rows
    from kvspool.kernel.frames import FrameWriter

NOW = -1  # the timestamp of a record that gets the present time
Kept = Callable[[int], AbstractContextManager[bool]]  # stores the state of a batch; False: nothing may be appended


class Outdated(Exception):
    """The log was recovered after the values of a batch were packed. Nothing was appended; see `Appending.repack`."""


class RingBatch(Protocol):
    """Records ready to be put into a ring."""

    @property
    def rows(self) -> int:
        """Return the number of records."""

    @property
    def packed(self) -> keyed.Keys | None:
        """Return the keys that values of codec KEYED name; None if there is no such value."""

    def put(self, writer: FrameWriter) -> None:
        """Under the append lock: put all of them, unpublished at the end."""

    def end(self, writer: FrameWriter) -> int:
        """Under the append lock: return the position after the records if they are put now."""

    def since(self, number: int) -> RingBatch:
        """Return the batch without its first records."""


class Prepared(NamedTuple):
    """A batch ready to append: encoded, checked, one byte of `codecs` for each value; timestamp -1 means now.

    stored: bytes that it takes in the ring, without a pad. packed: the keys named by values of codec KEYED; None: there is no such value.
    """

    keys: list[bytes | None] | None
    values: list[bytes]
    type: int
    codecs: bytes
    timestamp: int
    stored: int = 0
    packed: keyed.Keys | None = None

    @property
    def rows(self) -> int:
        return len(self.values)

    def repacked(self, packer: keyed.Packer) -> Self:
        values = [_repacked(*each, self.packed, packer) for each in zip(self.values, self.codecs, strict=True)]
        return self._replace(values=values, packed=packer.keys, stored=measure(self.keys, values)[1])

    def put(self, writer: FrameWriter) -> None:
        writer.put_many(self.keys, self.values, self.type, self.codecs, self.timestamp, self.stored)

    def end(self, writer: FrameWriter) -> int:
        return int(writer.end_of_many(writer.end, self.keys, self.values))

    def since(self, number: int) -> Self:
        keys = None if self.keys is None else self.keys[number:]
        return self._replace(keys=keys, values=self.values[number:], codecs=self.codecs[number:], stored=0)


class RowBatch:
    """Unchanged records of another log or file, each with its type, codec and timestamp."""

    def __init__(self, rows: Rows, packed: keyed.Keys | None = None) -> None:
        """Take rows whose values of codec KEYED are packed with the keys `packed`."""
        self._rows = rows
        self.packed = packed
        self.keys = rows.keys
        self.values = rows.values

    @property
    def rows(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, rows: Rows, structured: Codec, packer: keyed.Packer | None) -> Self:
        """Check rows, and pack their values of codec KEYED for the log; without a packer they become MessagePack. Raises Undecodable."""
        for key, type, timestamp in zip(rows.keys, rows.types, rows.timestamps, strict=True):
            check_fields(key, type, max(timestamp, 0))
        if Codec.KEYED not in rows.codecs:
            return cls(rows)
        if packer is None:
            return cls(rows._replace(codecs=rows.codecs.replace(bytes([Codec.KEYED]), bytes([Codec.MSGPACK]))))
        packed = [
            encode(decode(value, Codec.MSGPACK, None), structured, packer.pack)[0] if codec == Codec.KEYED else value
            for value, codec in zip(rows.values, rows.codecs, strict=True)
        ]
        return cls(rows._replace(values=packed), packer.keys)

    def repacked(self, packer: keyed.Packer) -> RowBatch:
        values = [_repacked(*each, self.packed, packer) for each in zip(self.values, self._rows.codecs, strict=True)]
        return RowBatch(self._rows._replace(values=values), packer.keys)

    def put(self, writer: FrameWriter) -> None:
        rows = self._rows
        for key, value, type, codec, timestamp in zip(rows.keys, rows.values, rows.types, rows.codecs, rows.timestamps, strict=True):
            writer.put_many([key], [value], type, bytes((codec,)), NOW if timestamp == NO_TIME else max(timestamp, 0))

    def end(self, writer: FrameWriter) -> int:
        return int(writer.end_of_many(writer.end, self.keys, self.values))

    def since(self, number: int) -> RowBatch:
        return RowBatch(self._rows.part(number, self.rows), self.packed)


def _repacked(value: bytes, codec: int, keys: keyed.Keys | None, packer: keyed.Packer) -> bytes:
    return value if keys is None or codec != Codec.KEYED else packer.pack(keyed.unpack(value, keys))


class Appending:
    """One batch during its append. stored: the sequences of its published records, also after an error."""

    def __init__(self, batch: RingBatch, eviction: Eviction, kept: Kept | None = None) -> None:
        """kept: stores the state of a batch's producer."""
        self.stored = range(0)
        self.pinned: Pinned | None = None  # the error of the last attempt
        self._batch = batch
        self._eviction = eviction
        self._kept = kept

    def attempt(self, writer: FrameWriter) -> range | bool:
        """Under the append lock: put the missing records of the batch and publish them; return its sequences.

        False if there is no room yet: `pinned` says whether a view is the reason. A partly stored batch of a producer is not continued
        here: its stored part is accounted for by then, and the producer continues. Raises Outdated; TooLarge for a batch that never fits,
        Pinned if others have appended since a part of this one was stored.
        """
        self.pinned = None
        first = writer.begin()
        if self.stored and self._kept is not None:
            return self.stored
        batch = self._left(first)
        if batch.packed is not None and batch.packed.era != first >> frames.ERA_BITS:
            raise Outdated
        if writer.keeps_unread or writer.has_pins():
            end = batch.end(writer)
            if not self._eviction.admits(writer, end):
                if end - writer.end > writer.capacity:
                    raise TooLarge(f"a batch of {end - writer.end} bytes; it doesn't fit into a ring of {writer.capacity}")
                return False
            if writer.would_overwrite_pinned(end):
                self.pinned = Pinned("no room: an open view of some process pins the oldest records")
                return False
        try:
            self._put(batch, writer, first)
            self._store(first, writer.next_sequence)  # in here: a signal handler may raise before it
        except BaseException as error:
            self._store(first, writer.mark()[1])
            if not isinstance(error, Pinned):
                raise
            self.pinned = error
            return False
        return self.stored

    def repack(self, packer: keyed.Packer) -> int:
        """After Outdated: pack the values with the present keys; return the bytes of key and value of the largest record."""
        assert isinstance(self._batch, (Prepared, RowBatch))  # others have `packed` None
        self._batch = batch = self._batch.repacked(packer)
        return measure(batch.keys, batch.values)[0]

    def _left(self, first: int) -> RingBatch:
        """Return the rest of the batch from sequence `first` on."""
        if not self.stored:
            return self._batch
        if first != self.stored.stop:
            raise Pinned("a view pins the oldest records, and others have appended since the first piece of the batch")
        return self._batch.since(len(self.stored))

    def _put(self, batch: RingBatch, writer: FrameWriter, first: int) -> None:
        if self._kept is None:
            batch.put(writer)
            writer.publish()
            return
        with self._kept(first) as may_append:
            if may_append:
                batch.put(writer)
                writer.publish()

    def _store(self, first: int, end: int) -> None:
        self.stored = range(self.stored.start if self.stored else first, end)


def prepared(
    values: Iterable[Any], keys: Iterable[Any] | None, type: int, timestamp: int | None, structured: Codec, packer: keyed.Packer | None
) -> tuple[Prepared, int]:
    """Encode and check a batch; return it, and the bytes of key and value of its largest record. Raises every error of the values."""
    values = listed(values)  # our own list: it can't change while we wait for the lock
    stored_keys: Any = None if keys is None else listed(keys, "keys")
    check_fields(None, type, timestamp)
    codecs = packed = None
    longest, stored = measure(stored_keys, values)
    if longest < 0:
        stored_keys = encode_keys(stored_keys)
        _check_keys(stored_keys, values)
        packed = None if packer is None else packer.keys
        values, codecs = _encode_all(values, structured, None if packer is None else packer.pack)
        longest, stored = measure(stored_keys, values)
    batch = Prepared(stored_keys, values, type, codecs or bytes(len(values)), -1 if timestamp is None else timestamp, stored, packed)
    return batch, longest


def check_fields(key: bytes | None, type: int, timestamp: int | None) -> None:
    """Raise for arguments that don't fit into a frame."""
    if key is not None:
        if key.__class__ is not bytes:  # no subclass either: the loops copy bytes alone
            raise TypeError(f"a key is bytes, str or None, not {key.__class__.__name__}")
        if len(key) > format.LARGEST_KEY:
            raise TooLarge(f"a key of {len(key)} bytes; at most {format.LARGEST_KEY} are possible")
    if not 0 <= type <= 255:
        raise ValueError(f"a type is 0..255, not {type}")
    if timestamp is not None:
        times.check(timestamp)


def _check_keys(keys: list[Any] | None, values: list[Any]) -> None:
    """Raise for invalid keys, or a wrong number of them."""
    if keys is None:
        return
    if len(values) != len(keys):
        raise ValueError(f"{len(values)} values, but {len(keys)} keys")
    for key in keys:
        check_fields(key, 0, None)


def _encode_all(values: list[Any], structured: Codec, pack: Callable[[Any], bytes] | None) -> tuple[list[bytes], bytes]:
    """Return the stored bytes of all values, and one byte with the codec of each."""
    pairs = [encode(value, structured, pack) for value in values]
    return [value for value, _ in pairs], bytes(codec for _, codec in pairs)


def refuse_larger(content: int, capacity: int) -> None:
    """Raise TooLarge for a record with so many bytes of key and value that it doesn't fit into a ring of this capacity."""
    size, most = (frames.HEADER + content + 7) & ~7, format.largest_frame(capacity)
    if size > most:
        raise TooLarge(f"a record of {content} bytes takes {size} with its header; a ring of {capacity} bytes holds at most {most}")
