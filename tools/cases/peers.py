"""kvspool and other products: the same verbs, values and level, measured alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from peers import peer
from peers.peer import WRITERS, Peer, Place

from cases.case import Bench, Row

OURS = "kvspool"


def compared(key: str, bench: Bench) -> Iterator[Row]:
    """a spool of kvspool, compared with {}: appends, a replay, and a wake-up; see docs/comparison.md"""
    ours, other = peer(OURS), peer(key)
    with _served(bench, ours, other, "process") as both:
        yield from _rows(bench, both, "one a call", "k/s", "appended")
        if other.batches:
            yield from _rows(bench, both, "1000 a call", "k/s", "batched")
        if other.shares:
            yield from _rows(bench, both, f"one a call, {WRITERS} writers", "k/s", "shared")
        yield from _rows(bench, both, "replay", "k/s", "replayed_rate")
        if other.follows:
            yield from _rows(bench, both, "wake-up, median", "us", "wake_up")
    if other.flushes:
        with _served(bench, ours, other, "disk") as both:
            yield from _rows(bench, both, "durable, one a call", "k/s", "appended")
            if other.shares:
                yield from _rows(bench, both, f"durable, one a call, {WRITERS} writers", "k/s", "shared")


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


def _rows(bench: Bench, both: Both, name: str, unit: str, measure: str) -> Iterator[Row]:
    """Measure both alternately with a method of `Peer`, each round with new logs."""
    ours, theirs = (partial(_measured, which, create, measure, bench) for which, create in both)
    yield bench.row(name, unit, ours, both[1][0].title, theirs)


def _measured(which: Peer, create: Callable[[], Place], measure: str, bench: Bench) -> float:
    return float(getattr(which, measure)(bench, create()))
