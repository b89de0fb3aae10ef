"""A case: a function that measures kvspool alternately with a floor, and yields a row for each comparison."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from cases.floors import Floors

VALUE = b"x" * 100
THOUSAND = [VALUE] * 1000
RING = 64 << 20
FRAME = 136  # size of a value of 100 bytes in a ring
SECONDS = 0.5  # of each measurement
RATES = {"M/s": 1e6, "k/s": 1e3, "GB/s": 1e9}
COSTS = {"ns": 1e9, "us": 1e6, "ms": 1e3}  # the inverse: the time of one operation


class LeftOut(Exception):
    """A case or its floor cannot be measured on this machine; the message says what is missing."""


class Bar(NamedTuple):
    """The speed that a row must reach, by any one of the given measures.

    ratio: of the row's figure to its peer's; figure: in the row's unit; old: how many times as fast as the revision of `--against`.
    """

    ratio: float | None = None
    figure: float | None = None
    old: float | None = None

    def is_met(self, unit: str, *, ratio: float | None = None, figure: float | None = None, old: float | None = None) -> bool | None:
        """Return whether one of the measures reaches its bar; None if none does and a measure with a bar was not taken."""
        reaches = operator.ge if is_rate(unit) else operator.le
        checks = [(self.ratio, ratio, reaches), (self.figure, figure, reaches), (self.old, old, operator.ge)]
        answers = [None if found is None else bool(check(found, bar)) for bar, found, check in checks if bar is not None]
        return True if any(answers) else None if None in answers or not answers else False

    def words(self, unit: str) -> str:
        """Describe the bar; an empty string if there is none."""
        limit = "at least" if is_rate(unit) else "at most"
        words = [] if self.ratio is None else [f"ratio {limit} {self.ratio:g}"]
        words += [] if self.figure is None else [f"{limit} {self.figure:g} {unit}"]
        words += [] if self.old is None else [f"{self.old:g} times as fast as --against"]
        return " or ".join(words)


NO_BAR = Bar()


class Row(NamedTuple):
    """One comparison. pairs: kvspool's result and the peer's of each round, in `unit`; None for a peer that was not measured."""

    name: str
    unit: str
    peer: str
    pairs: list[tuple[float, float | None]]
    bar: Bar = NO_BAR
    processor: dict[str, float] | None = None  # microseconds per record, of servers and clients

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """Return the row that another process wrote as JSON."""
        return cls(**{**fields, "pairs": [tuple(both) for both in fields["pairs"]], "bar": Bar(*fields["bar"])})


class Bench:
    """The parameters of every case: its own folder, the number and duration of measurements, and the floors.

    is_short: measure next to nothing, to check that a case works. is_alone: measure without the peers.
    """

    def __init__(self, folder: Path, rounds: int = 1, *, is_short: bool = False, is_alone: bool = False) -> None:
        self.folder, self.rounds, self.is_short, self.is_alone = folder, rounds, is_short, is_alone
        self.seconds = 0.005 if is_short else SECONDS
        self.left_out: set[str] = set()  # why floors were not measured

    def size(self, normal: T, short: T) -> T:
        """Return the amount of work, normal or for a short run."""
        return short if self.is_short else normal

    @cached_property
    def floors(self) -> Floors:
        """Return the machine's own rates."""
        from cases.floors import Floors

        return Floors(self)

    @contextmanager
    def ring(self, capacity: int = RING, name: str = "ring") -> Iterator[Any]:
        """Create a spool, write all its pages twice, flush them, and write them again.

        Without the flush, the kernel would write them back during the measurement. After it, the first store to each page is a page fault.
        """
        import kvspool

        capacity = self.size(capacity, 1 << 20)
        with kvspool.create(self.folder / name, capacity=capacity) as log:
            calls_in_a_lap = capacity // (FRAME * len(THOUSAND)) + 1
            for _ in range(2 * calls_in_a_lap):
                log.append_many(THOUSAND)
            log.sync()
            for _ in range(calls_in_a_lap):
                log.append_many(THOUSAND)
            yield log

    def rate(self, things: int, work: Callable[[], object]) -> float:
        """Return the operations per second of `work`, which does `things` of them per call; the first call does not count."""
        work()
        done, start = 0, time.perf_counter()
        while True:
            work()
            done += things
            if (elapsed := time.perf_counter() - start) >= self.seconds:
                return done / elapsed

    def alternate(self, ours: Callable[[], Any], floor: Callable[[], Any]) -> list[tuple[Any, Any]]:
        """Measure both alternately, once per round."""
        return [(ours(), None if self.is_alone else self._measured(floor)) for _ in range(self.rounds)]

    def _measured(self, floor: Callable[[], Any]) -> Any:
        """Measure a floor; None if a requirement of it is missing."""
        try:
            return floor()
        except LeftOut as reason:
            self.left_out.add(str(reason))
            return None

    def row(self, name: str, unit: str, ours: Callable[[], float], peer: str, floor: Callable[[], float], bar: Bar = NO_BAR) -> Row:
        """Measure rates, in operations per second, and return them in `unit`."""
        pairs = [(in_unit(one, unit), None if other is None else in_unit(other, unit)) for one, other in self.alternate(ours, floor)]
        return Row(name, unit, peer, pairs, bar)


def is_rate(unit: str) -> bool:
    """Return whether more is better."""
    return unit in RATES


def in_unit(rate: float, unit: str) -> float:
    """Return a rate, in operations per second, in another unit."""
    return rate / RATES[unit] if unit in RATES else COSTS[unit] / rate


def timed(count: int, work: Callable[[], object]) -> float:
    """Return the operations per second of one call of `work`, which does `count`."""
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def exhaust(items: Iterable[object]) -> None:
    """Consume an iterable with a plain loop: a generator that counts the items would be measured, too."""
    for _ in items:
        pass


def median_of(figures: Iterable[float | None]) -> float | None:
    """Return the median of the measured values; None if there are none."""
    found = [figure for figure in figures if figure is not None]
    return statistics.median(found) if found else None
