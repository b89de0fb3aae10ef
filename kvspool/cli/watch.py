"""`kvspool stats --watch`: rates as small charts, live."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvspool import system
from kvspool.cli import output
from kvspool.cli.options import BadInput
from kvspool.engine import sizes
from kvspool.engine.stats import Bucket, Rates
from kvspool.kernel import frames_py as frames
from kvspool.spool.rates import together

if TYPE_CHECKING:
    from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"


def run(log: Any, interval: float, *, is_json: bool) -> None:
    """Show the rates repeatedly, until an exception such as Ctrl-C. Raises BadInput for a journal."""
    if not getattr(log.stats(), "rates", Rates(1)).time:
        raise BadInput(f"{log.path} is a journal, which has no rates; kvspool stats shows its contents")
    if is_json:
        while True:
            output.print_json(_rates(log))
            sys.stdout.flush()
            system.port.sleep(interval)
    from rich.live import Live

    console = output.console()
    if not console.is_terminal:
        while True:
            console.print(charts(_rates(log)))
            sys.stdout.flush()
            system.port.sleep(interval)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(charts(_rates(log)), refresh=True)
            system.port.sleep(interval)


def charts(rates: Rates) -> Text:
    """Return the charts: records and bytes a second, by second and by minute."""
    from rich.text import Text

    text = Text(no_wrap=True)
    shown = (("64 seconds", rates.seconds, 1, rates.last_second), ("64 minutes", rates.minutes, 60, rates.last_minute))
    for span, series, length, last in shown:
        for what, style, now in (("records", "green", last.records), ("bytes", "blue", last.bytes)):
            values = _values(series, what, rates.time // length, length)
            show = _count if what == "records" else sizes.show
            label = f"{what}/s, last {span}"
            text.append(f"{label:<32}", "bold").append(f"now {show(now):>11}   most {show(max(values)):>11}\n")
            text.append(f"{bars(values)}\n", style).append("─" * frames.BUCKETS + "\n", "dim")
    gaps = sum(bucket.gaps for bucket in rates.hours)
    if gaps:
        text.append(f"gaps of readers in the last 64 hours: {gaps:,}\n", "bold red")
    return text


def bars(values: list[float]) -> str:
    """Return a bar for each value, the largest in full height; a space for 0."""
    most = max(values)
    return "".join(_LEVELS[min(7, int(8 * value / most))] if value > 0 else " " for value in values)


def _values(series: list[Bucket], what: str, last: int, length: int) -> list[float]:
    """Return the values per second in each of the 64 buckets up to number `last`, the oldest first."""
    known = {bucket.time // length: getattr(bucket, what) / length for bucket in series}
    return [known.get(number, 0.0) for number in range(last - frames.BUCKETS + 1, last + 1)]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2f}"


def _rates(log: Any) -> Rates:
    return together(_found(log.stats()))


def _found(stats: Any) -> Iterator[Rates]:
    """Yield the rates of every log in the statistics."""
    if isinstance(stats, list):
        for one in stats:
            yield from _found(one)
    elif hasattr(stats, "rates"):
        yield stats.rates
    else:
        yield from _found(list(getattr(stats, "clients", getattr(stats, "shards", []))))
