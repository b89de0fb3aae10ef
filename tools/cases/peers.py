"""kvspool and other products: the same verbs, values and level, measured alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from peers import peer
from peers.peer import WRITERS, Peer, Place

from cases.case import Bench, Row

OURS = "kvspool"
Measure = Callable[[Peer, Bench, Place], float]


def compared(key: str, bench: Bench) -> Iterator[Row]:
    """a spool of kvspool, compared with {}: appends, a replay, and a wake-up; see docs/comparison.md"""
    ours, other = peer(OURS), peer(key)
    with _served(bench, ours, other, "process") as both:
        yield from _rows(bench, both, "one a call", "k/s", Peer.appended)
        if other.batches:
            yield from _rows(bench, both, "1000 a call", "k/s", Peer.batched)
        if other.shares:
            yield from _rows(bench, both, f"one a call, {WRITERS} writers", "k/s", Peer.shared)
        yield from _rows(bench, both, "replay", "k/s", Peer.replayed_rate)
        if other.follows:
            yield from _rows(bench, both, "wake-up, median", "us", Peer.wake_up)
    if other.flushes:
        with _served(bench, ours, other, "disk") as both:
            yield from _rows(bench, both, "durable, one a call", "k/s", Peer.appended)
            if other.shares:
                yield from _rows(bench, both, f"durable, one a call, {WRITERS} writers", "k/s", Peer.shared)


Both = tuple[tuple[Peer, Callable[[], Place]], tuple[Peer, Callable[[], Place]]]


@contextmanager
def _served(bench: Bench, ours: Peer, other: Peer, level: str) -> Iterator[Both]:
    """Start the servers of both."""
    with ExitStack() as stack:
        creates = []
        for which, name in ((ours, "ours"), (other, "other")):
            folder = bench.folder / f"{name}-{level}"
            folder.mkdir()
            creates.append(stack.enter_context(which.serve(folder, level)))
        yield (ours, creates[0]), (other, creates[1])


def _rows(bench: Bench, both: Both, name: str, unit: str, measure: Measure) -> Iterator[Row]:
    """Measure both alternately, each round with new logs."""
    ours, theirs = (partial(_measured, measure, which, create, bench) for which, create in both)
    yield bench.row(f"{name}", unit, ours, both[1][0].title, theirs)


def _measured(measure: Measure, which: Peer, create: Callable[[], Place], bench: Bench) -> float:
    return getattr(which, measure.__name__)(bench, create())  # type: ignore[no-any-return]
