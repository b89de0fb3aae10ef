"""Random histories of a client at several hubs, and the records that must be read from them.

A client has logs, one after the other. Each hub has some of them, and of each log some records: it was away, was trimmed, or has lost its
disk. The expected records are computed from the ledger of the client alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st
from serving import HubServer
from shipping import numbered

from kvspool.journal import Retention


class Record(NamedTuple):
    """A record's identity: the number of its log, and its sequence in that."""

    log: int
    sequence: int


@dataclass(frozen=True)
class Part:
    """The part of one log that one hub gets: the sequences first..end-1, without `hole`. Those before the first one were declared lost."""

    log: int
    first: int
    end: int
    hole: tuple[int, int] | None = None

    @property
    def sequences(self) -> list[int]:
        gone = range(*self.hole) if self.hole else range(0)
        return [at for at in range(self.first, self.end) if at not in gone]


@dataclass(frozen=True)
class History:
    """The logs of a client at each hub; `trims`: share of each hub's records that it has removed."""

    lengths: tuple[int, ...]
    parts: tuple[tuple[Part, ...], ...]
    trims: tuple[float, ...]

    @property
    def order(self) -> list[int] | None:
        """Return the logs in the order that the hubs show; None if that is not the only one."""
        logs = sorted({part.log for parts in self.parts for part in parts})
        beside = {(a.log, b.log) for parts in self.parts for a, b in zip(parts, parts[1:], strict=False)}
        return logs if all(pair in beside for pair in zip(logs, logs[1:], strict=False)) else None


def log_id(log: int) -> bytes:
    return b"%d%015d" % (log, 0)  # a checkpoint has the first four bytes


@st.composite
def histories(draw: st.DrawFn, hubs: int, longest: int = 40) -> History:
    lengths = tuple(draw(st.lists(st.integers(1, longest), min_size=1, max_size=3)))
    parts = []
    for _ in range(hubs):
        ours = []
        for log, length in enumerate(lengths):
            if draw(st.integers(0, 5)) == 0:
                continue
            end = draw(st.sampled_from([length, length, length, draw(st.integers(1, length))]))
            first = draw(st.sampled_from([0, 0, draw(st.integers(0, end - 1))]))
            hole = None
            if end - first > 3 and draw(st.integers(0, 3)) == 0:
                begin = draw(st.integers(first + 1, end - 2))
                hole = begin, draw(st.integers(begin + 1, end - 1))
            ours.append(Part(log, first, end, hole))
        parts.append(tuple(ours))
    trims = tuple(draw(st.sampled_from([0.0, 0.0, 0.3, 0.8])) for _ in range(hubs))
    return History(lengths, tuple(parts), trims)


def store(server: HubServer, client: str, parts: Sequence[Part], trim: float, lengths: Sequence[int]) -> list[Record]:
    """Let a hub have its parts of a client. Return the records that it has."""
    kept: dict[int, Record] = {}
    if not parts:
        return []
    server.store.enter(client, 0)
    shard = server.store.take(client, 0, 0)
    try:
        for part in parts:
            log = log_id(part.log)
            shard.enter(log, lengths[part.log])
            pieces = [(part.first, part.end)]
            if part.hole is not None:
                pieces = [(part.first, part.hole[0]), (part.hole[1], part.end)]
            for first, end in pieces:
                after = shard.next(log)
                shard.put(log, numbered(first, end, f"log {part.log} record"), after)
            base = shard.generations[-1].base
            kept |= {base + at: Record(part.log, at) for at in part.sequences}
        with shard.using() as journal:
            if trim:
                wanted = sorted(kept)[int(len(kept) * trim)]
                journal.trim(Retention(), before=wanted)
            first = journal.first()
        server.read_service.index.note(client, 0)
        return [record for at, record in kept.items() if at >= first]
    finally:
        server.store.give_back(client, 0)


def value(record: Record) -> bytes:
    return b"log %d record %d" % record


def record_of(value: Any) -> Record:
    _, log, _, sequence = bytes(value).split()
    return Record(int(log), int(sequence))
