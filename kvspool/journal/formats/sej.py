"""The format of h12.me/sej: segmented journals whose messages have an offset, a time, a type, a key and a value.

Source: `seeds/001` and the bytes that its program writes. There is no file header, no magic and no checksum. A message can only be checked
by its offset, which must be the next one, and its sizes, which must be possible and equal before and after it. A flipped bit in a key, a
value, a type or a timestamp can't be detected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from kvspool.engine.layout import Layout
from kvspool.errors import TooLarge
from kvspool.journal import format
from kvspool.journal.format import LAST_SEQUENCE, LAST_TIME, Before, JournalBatch, Scan
from kvspool.journal.formats.arrangement import Nested
from kvspool.kernel import sej, tail_py
from kvspool.kernel.sej_py import LONGEST_KEY, LONGEST_VALUE, SIZES

SEGMENT_BYTES = 1 << 30


class SejHead(NamedTuple):
    """The head of a message, before its key."""

    offset: Annotated[int, "Q", "sequence of the record"]
    timestamp: Annotated[int, "q", "ns since the Unix epoch; the smallest number: no time"]
    type: Annotated[int, "B", "the caller's number"]
    key_size: Annotated[int, "b", "k, 0..127; no key is an empty key"]


HEAD = Layout(SejHead, ">")


class Sej(Nested):
    """The sej format; a new segment begins once one has reached `segment_bytes`."""

    name: ClassVar[str] = "sej"
    number: ClassVar[int] = tail_py.SEJ
    suffix: ClassVar[str] = "jnl"
    has_keys = has_types = has_timestamps = True
    ends_with_size: ClassVar[bool] = True
    has_empty_keys: ClassVar[bool] = False
    least_bytes = SIZES

    def __init__(self, segment_bytes: int | str = SEGMENT_BYTES) -> None:
        super().__init__(segment_bytes)

    def lock_file(self, path: Path) -> Path:
        return path / "jnl.lck"

    def check(self, batch: JournalBatch) -> None:
        longest = max(map(len, batch.values), default=0)
        if longest > LONGEST_VALUE:
            raise TooLarge(f"a value of {longest} bytes: a sej message holds {LONGEST_VALUE}; nothing was written")
        key = max((len(key) for key in batch.keys or () if key is not None), default=0)
        if key > LONGEST_KEY:
            raise TooLarge(f"a key of {key} bytes: a sej message holds {LONGEST_KEY}; nothing was written")

    def encode(self, batch: JournalBatch, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        values, keys, type, timestamp, types, timestamps, *_ = batch
        time = place.now if timestamp is None else timestamp
        return sej.encode(
            values, keys, types, timestamps, type, time, start, place.sequence, self.segment_bytes - place.end, place.last
        )

    def scan(self, data: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> Scan:
        return Scan(*sej.scan(data, sequence, most, make, items))

    def scanner(self) -> Callable[..., tuple[int, ...]]:
        return sej.scan

    def guess(self, data: bytes, sequence: int, until: int) -> tuple[int, int] | None:
        """Return a whole message with a possible offset that is followed by another one, or the end."""
        last = min(until - 1, sequence + len(data) // SIZES + 1)
        low, high = (sequence + 1).to_bytes(8, "big"), max(last, 0).to_bytes(8, "big")
        alike = next((at for at in range(8) if low[at] != high[at]), 8)  # bytes with which all of these offsets begin
        span = b"[" + re.escape(low[alike : alike + 1]) + b"-" + re.escape(high[alike : alike + 1]) + b"]" if alike < 8 else b""
        for match in re.finditer(b"(?=" + re.escape(low[:alike]) + span + b")", data) if last > sequence else ():
            position = match.start()
            found = int.from_bytes(data[position : position + 8], "big")
            size = self._size_of(data, position) if sequence < found <= last else 0
            after = data[position + size : position + size + 8]
            if size and (found + 1).to_bytes(8, "big").startswith(after):
                return position, found
        return None

    def _size_of(self, data: bytes, at: int) -> int:
        """Return the size of the message that seems to begin here, if it is whole; else 0."""
        key_size = data[at + 17] if at + HEAD.size <= len(data) else LONGEST_KEY + 1
        if key_size > LONGEST_KEY:
            return 0
        value_at = at + HEAD.size + key_size
        size = SIZES + key_size + int.from_bytes(data[value_at : value_at + 4], "big")
        end = at + size
        return size if end <= len(data) and data[end - 4 : end] == size.to_bytes(4, "big") else 0

    def size_of_last(self, tail: bytes) -> int:
        return int.from_bytes(tail[-4:], "big") if len(tail) >= 4 else 0

    def pass_over(self, data: bytes, sequence: int, until: int = LAST_SEQUENCE, timestamp: int = LAST_TIME) -> Scan:
        return Scan(*sej.pass_over(data, sequence, until, timestamp))

    def head(self, data: bytes) -> format.FrameHead | None:
        if len(data) < HEAD.size:
            return None
        head = HEAD.unpack(data[: HEAD.size])
        sizes = HEAD.size + head.key_size
        if head.key_size < 0 or len(data) < sizes + 4:
            return None
        return format.FrameHead(head.offset, head.timestamp, SIZES + head.key_size + int.from_bytes(data[sizes : sizes + 4], "big"))

    def after_jump(self, data: bytes, sequence: int, found: int) -> tuple[int, int] | None:
        """A single wrong offset among correct ones is damage; otherwise messages are missing."""
        size = 0 if found >= LAST_SEQUENCE else sej.pass_over(data, found, found + 1, LAST_TIME)[0]
        after = data[size:]
        goes_on = sej.pass_over(after, sequence + 1, sequence + 2, LAST_TIME)[0] > 0
        if size and (goes_on or not after):
            return size, sequence + 1
        return super().after_jump(data, sequence, found) if size else None
