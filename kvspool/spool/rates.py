"""Rates: records appended, and gaps of readers, in the last 64 seconds, 64 minutes and 64 hours.

Writers count during publication; readers with write permission count their Gaps. The figures are approximate: a publication counts as a
whole in the second in which it was made, whatever timestamps its records have. A killed writer may have counted records that it didn't
publish, and two readers that count at once may lose a Gap. A bucket contains its time, so a clock that jumps leaves holes, but no lasting
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvspool.engine.stats import Bucket, Rate, Rates
from kvspool.kernel import frames_py as frames
from kvspool.spool import format

SECOND = 1_000_000_000  # ns
LENGTHS = (1, 60, 3600)  # seconds of a bucket in each series

_GAPS = format.GAPS_AT // 8
_GAP_WORDS = format.GAP_BUCKET.size // 8


def rates(words: Any, now: int) -> Rates:
    """Return the rates at time `now`, in ns since the epoch, from the words of a control block."""
    now //= SECOND
    return summed([_series(words, number, now) for number in range(3)], now)


def summed(series: Sequence[list[Bucket]], now: int) -> Rates:
    """Compute the rates at the second `now` from the three series."""
    seconds, minutes, hours = series
    this_minute = now - now % 60
    return Rates(
        now,
        _average(seconds, now - 1, now),
        _average(seconds, now - 60, now),
        _average(minutes, this_minute - 3600, this_minute),
        seconds,
        minutes,
        hours,
    )


def together(many: Iterable[Rates]) -> Rates:
    """Combine the rates of several logs, at the latest of their times."""
    many = list(many)
    series = []
    for name in ("seconds", "minutes", "hours"):
        sums: dict[int, Bucket] = {}
        for one in many:
            for bucket in getattr(one, name):
                so_far = sums.get(bucket.time, Bucket(bucket.time, 0, 0, 0))
                sums[bucket.time] = Bucket(
                    bucket.time, so_far.records + bucket.records, so_far.bytes + bucket.bytes, so_far.gaps + bucket.gaps
                )
        series.append([sums[time] for time in sorted(sums)])
    return summed(series, max((one.time for one in many), default=0))


def count_gap(words: Any, now: int) -> None:
    """Count one Gap returned to a reader at time `now`, in ns since the epoch."""
    for number, length in enumerate(LENGTHS):
        time = now // SECOND // length
        at = _GAPS + _GAP_WORDS * (number * frames.BUCKETS + time % frames.BUCKETS)
        known = words[at + 1] if words[at] == time else 0
        words[at + 1] = (known + 1) % (1 << 64)
        words[at] = time


def _series(words: Any, number: int, now: int) -> list[Bucket]:
    """Return the non-empty buckets of a series for the last 64 times."""
    length = LENGTHS[number]
    last = now // length
    found = []
    for time in range(max(0, last - frames.BUCKETS + 1), last + 1):
        place = number * frames.BUCKETS + time % frames.BUCKETS
        at, gaps_at = frames.RATES + frames.RATE_WORDS * place, _GAPS + _GAP_WORDS * place
        is_ours = words[at] == time
        records, size = (words[at + 1], words[at + 2]) if is_ours else (0, 0)
        gaps = words[gaps_at + 1] if words[gaps_at] == time else 0
        if records or gaps:
            found.append(Bucket(time * length, records, size, gaps))
    return found


def _average(buckets: list[Bucket], begin: int, end: int) -> Rate:
    """Return the average over the buckets from the second `begin` to before the second `end`."""
    inside = [bucket for bucket in buckets if begin <= bucket.time < end]
    seconds = max(1, end - begin)
    return Rate(
        sum(bucket.records for bucket in inside) / seconds,
        sum(bucket.bytes for bucket in inside) / seconds,
        sum(bucket.gaps for bucket in inside) / seconds,
    )
