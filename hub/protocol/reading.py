"""The messages between a reader and a hub: JSON that is easy to write in any language; see docs/formats/hub.md.

A ticket names the records to read. It is neither a secret nor a capability: the hub checks the right to read each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec

from hub.client_ids import check_client
from hub.errors import HubError, Malformed
from hub.protocol.ingest import LAST, LONGEST_ECHO, Level, Reason, error_of, refusal
from hub.protocol.ingest import Refused as _Refused
from kvspool.options import Isolation
from kvspool.record import Gap
from shard.route import MOST_BITS, directory_name

LARGEST_TICKET = 4096  # bytes
LARGEST_ANSWER = 64 << 20  # largest answer of a hub, in bytes
LARGEST_COMMIT = 2 << 20  # bytes
MOST_PLACES = 8192  # positions that a reader can move at once
COMMIT_BYTES = 512 << 10  # of a client's commits: a hub limits the bytes of a connection until its first request is complete
LONGEST_WAIT = 30.0  # seconds
_COLUMNS = frozenset({"sequence", "timestamp", "type", "key", "value", "codec"})
_FRACTION = re.compile(r"\.([0-9]+)")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
T = TypeVar("T")

Time = int | str
"""ns since 1970, or a time with a zone in the form of RFC 3339."""


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The command of a descriptor: a question about a client. shard: None for all; other fields as in a ticket."""

    client: str
    shard: int | None = None
    start: int | str = "earliest"
    end: int | None = None
    start_time: Time | None = None
    end_time: Time | None = None
    limit: int | None = None
    coded: bool = False
    isolation: Isolation = "appended"


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One log of a client. log: its id, in hex; base: the sequence of the journal that its record 0 has."""

    log: str
    base: int


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The records to read of one shard, up to its end when the hub gets the ticket.

    start: a sequence, "earliest" or "latest"; end: the first sequence not to read. start_time, end_time: begin with the first record at
    or after the one, stop before the first at or after the other. limit: largest number of records. coded: with the column codec.
    isolation: "synced" returns only records on disk; the hub first syncs the shard. columns: only these, in the order of the table; None
    for all. log: id of the shard's first generation; another one is refused as "fenced"; "" for any. generation: one that the shard must
    have, log and base; else it is refused as "fenced".
    """

    client: str
    shard: int = 0
    start: int | str = "earliest"
    end: int | None = None
    start_time: Time | None = None
    end_time: Time | None = None
    limit: int | None = None
    coded: bool = False
    isolation: Isolation = "appended"
    columns: list[str] | None = None
    log: str = ""
    generation: Generation | None = None

    @property
    def first_time(self) -> int | None:
        """Return `start_time` in ns. Raises Malformed."""
        return None if self.start_time is None else nanoseconds(self.start_time)

    @property
    def last_time(self) -> int | None:
        """Return `end_time` in ns. Raises Malformed."""
        return None if self.end_time is None else nanoseconds(self.end_time)

    @property
    def begin(self) -> int | str | datetime:
        """Return the start in the form of logs; a time is cut to microseconds."""
        time = self.first_time
        return self.start if time is None else _EPOCH + timedelta(microseconds=time // 1000)


class GapNote(msgspec.Struct, frozen=True):
    """The records first..last, both included, that no reader can get any more, and the reason."""

    first: int
    last: int
    reason: str


class BatchMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metadata of a batch.

    gap: the lost records before the next batch, with a batch without rows. next: the stream ends here in order, and this is the sequence of
    the next record; a stream that ends without it was broken.

    first: with rows, if the column sequence wasn't requested: the sequence of the first row; the others follow without a gap.
    """

    gap: GapNote | None = None
    next: int | None = None
    first: int | None = None


class ShardState(msgspec.Struct, frozen=True):
    """One shard of 2^bits.

    first: sequence of its oldest record; next: of the next one; generations: the logs of its records; error: why it can't be read, or "".
    """

    client: str
    bits: int
    shard: int
    first: int
    next: int
    generations: list[Generation]
    error: str = ""


class ClientState(msgspec.Struct, frozen=True):
    """The metadata of a flight: the shards of its endpoints, in the same order."""

    client: str
    bits: int
    shards: list[ShardState]


class Since(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of the action "changes". since: the token of the last answer, empty for all shards; wait: seconds for a change."""

    since: str = ""
    wait: float = 0.0


class Changes(msgspec.Struct, frozen=True):
    """The answer of the action "changes". root: id of the hub root; token: for the next question; shards: the changed ones."""

    root: str
    token: str
    shards: list[ShardState]


class ServerInfo(msgspec.Struct, frozen=True):
    """The answer of the action "server".

    version: of the protocol; level: durability of stored records; root: id of the hub root; time: the hub's clock, ns since 1970.
    """

    version: int
    level: Level
    root: str
    time: int


class ReaderPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A durable reader's position in one shard. next: the sequence that it reads next; records before it may be removed."""

    client: str
    shard: int
    next: int


class CommitPositions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of the action "commit-positions". reader: its name; places: new positions; those in other shards don't change."""

    reader: str
    places: list[ReaderPlace]


def parts(places: list[ReaderPlace]) -> Iterator[list[ReaderPlace]]:
    """Yield the positions of one commit in parts that a hub accepts in one call; one empty part if there are none."""
    part: list[ReaderPlace] = []
    size = 0
    for place in places:
        bytes_of_place = len(msgspec.json.encode(place)) + 1
        if part and (size + bytes_of_place > COMMIT_BYTES or len(part) == MOST_PLACES):
            yield part
            part, size = [], 0
        part.append(place)
        size += bytes_of_place
    yield part


class Committed(msgspec.Struct, frozen=True):
    """The answer of the action "commit-positions". places: the reader's number of positions; missing: number of named shards that don't
    exist.
    """

    places: int
    missing: int = 0


class ReaderName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of the action "delete-reader"."""

    reader: str


class ReaderState(msgspec.Struct, frozen=True):
    """A durable reader that is moved over the network. owner: the principal that may move it; updated: its last commit, ns since 1970."""

    name: str
    owner: str
    updated: int
    places: list[ReaderPlace]


class Readers(msgspec.Struct, frozen=True):
    """The answer of the actions "readers" and "delete-reader": the existing readers, by name."""

    readers: list[ReaderState]


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The extra info of an error, for programs. expected: the next sequence, for "unexpected"; retry_after: in seconds."""

    reason: Reason
    message: str
    expected: int = -1
    retry_after: float = 0.0


def decode(kind: type[T], data: bytes, largest: int = LARGEST_TICKET) -> T:
    """Return a decoded message from the wire. Raises Malformed."""
    if len(data) > largest:
        raise Malformed(f"a {kind.__name__.lower()} of {len(data)} bytes; the limit is {largest}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"no {kind.__name__.lower()}: {str(error)[:LONGEST_ECHO]}") from None


def decode_query(path: list[bytes], command: bytes | None) -> Query:
    """Return the question of a descriptor: a path `[client]` or `[client, shard]`, or a command. Raises Malformed."""
    if not path:
        return _checked(decode(Query, command or b""))
    if len(path) > 2 or max(map(len, path)) > LARGEST_TICKET:
        raise Malformed("a descriptor's path must be [client] or [client, shard]")
    try:
        return _checked(Query(path[0].decode(), int(path[1].decode()) if len(path) > 1 else None))
    except ValueError:
        raise Malformed("a descriptor's path must be [client] or [client, shard], the latter a number") from None


def decode_ticket(data: bytes) -> Ticket:
    """Return a decoded ticket. Raises Malformed."""
    ticket = _checked(decode(Ticket, data))
    columns = ticket.columns
    if columns is not None and not (columns and len(set(columns)) == len(columns) <= len(_COLUMNS) and _COLUMNS.issuperset(columns)):
        raise Malformed(f"columns must be some of {', '.join(sorted(_COLUMNS))}, each once")
    if columns is not None and "codec" in columns and not ticket.coded:
        raise Malformed("the column codec needs a ticket with coded")
    return ticket


def ticket_of(query: Query) -> Ticket:
    """Return the ticket for the first shard of a query."""
    fields = {name: getattr(query, name) for name in query.__struct_fields__}
    return Ticket(**(fields | {"shard": 0}))


Q = TypeVar("Q", Query, Ticket)


def _checked(query: Q) -> Q:
    """Return a query or a ticket. Raises Malformed if it contradicts itself or has impossible values."""
    try:
        check_client(query.client)
    except ValueError as error:
        raise Malformed(str(error)) from None
    if query.shard is not None and not 0 <= query.shard < 1 << MOST_BITS:
        raise Malformed(f"a shard must be 0 to {(1 << MOST_BITS) - 1}, not {query.shard}")
    for name, number in (("start", query.start), ("end", query.end), ("limit", query.limit)):
        if isinstance(number, int) and not 0 <= number < LAST:
            raise Malformed(f"{name} must be a number from 0 to 2^63 - 2, not {number}")
    if isinstance(query.start, str) and query.start not in ("earliest", "latest"):
        raise Malformed(f'start must be a sequence, "earliest" or "latest", not {query.start[:50]!r}; use start_time for times')
    if query.start_time is not None and query.start != "earliest":
        raise Malformed("start and start_time exclude each other")
    if isinstance(query.start, int) and query.end is not None and query.end < query.start:
        raise Malformed(f"end {query.end} is before start {query.start}")
    times = [nanoseconds(time) for time in (query.start_time, query.end_time) if time is not None]
    if len(times) == 2 and times[1] < times[0]:
        raise Malformed("end_time is before start_time")
    return query


def nanoseconds(time: Time) -> int:
    """Return a time as ns since 1970. Raises Malformed."""
    if isinstance(time, int):
        found = time
    else:
        try:
            if len(time) > 64 or not time.isascii():
                raise ValueError
            fraction = _FRACTION.search(time)
            moment = datetime.fromisoformat(_FRACTION.sub("", time, count=1))
            since = moment - _EPOCH  # TypeError without a zone
        except (ValueError, TypeError, OverflowError):
            raise Malformed(f"a time must be ns since 1970, or like 2026-01-31T12:00:00Z, with its zone, not {time[:70]!r}") from None
        digits = "" if fraction is None else fraction[1]
        found = (since.days * 86400 + since.seconds) * 1_000_000_000 + int((digits + "0" * 9)[:9])
    if not 0 <= found < LAST:
        raise Malformed(f"a time must be between 1970 and 2262, not at {found} ns")
    return found


def check_state(state: ShardState) -> ShardState:
    """Return a hub's description of a shard. Raises Malformed for an impossible one."""
    try:
        directory_name(check_client(state.client), state.bits, state.shard)
    except ValueError as error:
        raise Malformed(f"the hub names an impossible shard: {error}") from None
    logs = state.generations
    if not 0 <= state.first <= state.next < LAST or any(one.base > other.base for one, other in zip(logs, logs[1:], strict=False)):
        raise Malformed(f"the hub's description of client {state.client}, shard {state.shard}, is impossible")
    if any(not re.fullmatch("[0-9a-f]{32}", log.log) or not 0 <= log.base < LAST for log in logs):
        raise Malformed(f"the hub names an impossible log of client {state.client}, shard {state.shard}")
    return state


def gap_note(gap: Gap) -> GapNote:
    """Return the description of a Gap, without its path, which is internal."""
    return GapNote(gap.first, gap.last, gap.reason)


def failure(error: HubError) -> Failure:
    """Return the description of an error."""
    refused = refusal(error)
    return Failure(refused.reason, refused.message, refused.expected, refused.retry_after)


def error_in(extra_info: bytes | None) -> HubError | None:
    """Return the hub's error in the extra info; None without one."""
    try:
        found = msgspec.json.decode(extra_info or b"", type=Failure)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return error_of(_Refused(found.reason, found.message, expected=found.expected, retry_after=found.retry_after))
