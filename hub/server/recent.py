"""The newest records of a shard for the hub's page: only for callers that may read the client, decoded, and cut to a screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import msgspec

from hub.errors import Malformed
from hub.protocol.recent import LONGEST_KEY, LONGEST_VALUE, MOST, RecentRecord, RecentRecords
from hub.server.authentication import Authentication
from hub.server.shard_index import ShardIndex
from kvspool.errors import Undecodable
from kvspool.options import TIMEOUT
from kvspool.record import NO_TIME, Codec, Gap, Record, codec_name
from shard.merged import Log
from shard.shardset import open_shard

LARGEST_DECODED = 1 << 16  # bytes of a value that is decoded; of a larger one its first bytes are shown
_BEYOND_JSON = (Undecodable, TypeError, ValueError, OverflowError, RecursionError)
_encode = msgspec.json.Encoder().encode


class RecentReader:
    """Reads the ends of shards. It can be called by any thread; each call opens the shard."""

    def __init__(self, authentication: Authentication, index: ShardIndex) -> None:
        self._authentication = authentication
        self._index = index

    def read(self, shown: list[str], client: str, shard: int, before: int | None, where: str) -> RecentRecords:
        """Return at most `MOST` records below the sequence `before`, or at the end, the newest first.

        shown: the values of the caller's authorization headers. where: its address, for the log. Raises NotAuthenticated, NotAllowed,
        NotFound, Malformed, Corruption, LockTimeout.
        """
        caller = self._authentication.bearer(shown, where)
        caller.check(caller.may_read(client), f"read {client}")
        if before is not None and before < 0:
            raise Malformed(f"a sequence is not negative, as {before} is")
        with closing(open_shard(self._index.path(client, shard), TIMEOUT)) as log:
            first, end = log.extent()
            stop = end if before is None else max(first, min(before, end))
            found = list(_shown(log, max(first, stop - MOST), stop))
        return RecentRecords(client=client, shard=shard, first=first, next=end, records=found[::-1])


def _shown(log: Log, start: int, stop: int) -> Iterator[RecentRecord]:
    """Yield the records and Gaps in a range of sequences, one value in memory at a time."""
    if start >= stop:
        return
    with closing(log.read(start, on_gap="yield")) as reading:
        for item in reading:
            if (item.first if isinstance(item, Gap) else item.sequence) >= stop:
                return
            yield _gap(item, stop) if isinstance(item, Gap) else _record(item)


def _gap(gap: Gap, stop: int) -> RecentRecord:
    return RecentRecord(sequence=gap.first, lost=min(gap.last + 1, stop) - gap.first)


def _record(record: Record) -> RecentRecord:
    value, codec = _value(record), codec_name(record.codec)
    key = None if record.key is None else _text(record.key, 4 * LONGEST_KEY)[:LONGEST_KEY]
    return RecentRecord(
        sequence=record.sequence,
        timestamp=0 if record.timestamp == NO_TIME else record.timestamp,
        type=record.type,
        codec=codec if isinstance(codec, str) else "",
        key=key,
        size=len(record.value),
        value=value[:LONGEST_VALUE],
        is_cut=len(value) > LONGEST_VALUE,
    )


def _value(record: Record) -> str:
    """Return the beginning of a value as text, with at least one character more than is shown if there is more."""
    if record.codec in (Codec.MSGPACK, Codec.KEYED) and len(record.value) <= LARGEST_DECODED:
        try:
            return _encode(record.data).decode()
        except _BEYOND_JSON:
            pass
    return _text(record.value, 4 * (LONGEST_VALUE + 1))


def _text(value: bytes, most: int) -> str:
    """Return at most the first `most` bytes as text if they are UTF-8, in hex otherwise. The last character may be cut with its bytes."""
    beginning = value[:most]
    for cut in range(4 if len(value) > most else 1):
        try:
            return beginning[: len(beginning) - cut].decode()
        except UnicodeDecodeError:
            continue
    return beginning.hex(" ")
