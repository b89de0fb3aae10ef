"""`kvspool stats`: show the statistics of a log at this moment."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvspool.cli import options, output, plugins, watch
from kvspool.engine import sizes
from kvspool.engine.stats import LogStats, Rates

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

NAME = "stats"
SUMMARY = "show the statistics of a log"
DESCRIPTION = """\
Show the statistics of a log at this moment: size, records, sequences, ages. A log of several logs has a row for each of them.
With --watch the rates are drawn live until Ctrl-C: records and bytes a second, over the last 64 seconds and 64 minutes.
With --json it is one object, or a list of them, with the field names of the library; times are ns since 1970."""
EXAMPLES = """\
  kvspool stats events
  kvspool stats events --json | jq .records
  kvspool stats events --watch --interval 0.5"""

_TIMES = ("first_timestamp", "last_timestamp", "created", "recovered")
_SIZES = ("capacity", "used", "bytes", "size")
_DETAILS = (
    "rates",
    "path",
    "format",
    "log_id",
    "policy",
    "reader_expiry",
    "codec",
    "created",
    "first_timestamp",
    "durability",
    "sync_interval",
    "synced_sequence",
    "unsynced_bytes",
    "sync_error",
    "recoveries",
    "recovered",
    "lost_records",
    "lost_bytes",
)
_UNITS = ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "h"), (120, 60, "min"), (0, 1, "s"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("--watch", action="store_true", help="show rates as charts, until Ctrl-C; with --json an object for each interval")
    parser.add_argument(
        "--interval", type=options.interval, default=1.0, metavar="S", help="with --watch: seconds between updates (default: %(default)s)"
    )
    options.add_json(parser, "print the statistics as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the statistics."""
    with plugins.opened(arguments.path) as log:
        if arguments.watch:
            watch.run(log, arguments.interval, is_json=arguments.json)
        stats = log.stats()
    if arguments.json:
        output.print_json(members(stats))
    else:
        output.print_table(_rows(stats) if isinstance(stats, list) else _card(stats))
    return 0


def members(stats: Any) -> Any:
    """Return statistics for JSON: of a log only the fields that its kind has."""
    if isinstance(stats, list):
        return [members(one) for one in stats]
    return {name: getattr(stats, name) for name in stats.shown()} if isinstance(stats, LogStats) else stats


def _card(stats: Any) -> Table:
    """Return one log's fields, one below the other."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name in _shown(stats):
        table.add_row(name.replace("_", " "), Text(output.escape(_cell(stats, name))))
        if name == "used" and getattr(stats, "capacity", None):
            table.add_row("percent used", _bar(stats))
    return table


def _shown(stats: Any) -> Sequence[str]:
    """Return the names of the fields to show."""
    return stats.shown() if isinstance(stats, LogStats) else stats.__struct_fields__


def _rows(many: list[Any]) -> Table:
    """Return a row for each of several logs, with the fields that identify them and those that change."""
    names = [name for name in (_shown(many[0]) if many else ()) if name not in _DETAILS]
    rows = []
    for stats in many:
        label = str(getattr(stats, "path", "")).rpartition("/")[2]
        rows.append([label, *(_cell(stats, name) for name in names)])
    titles = {name: name.replace("_", " ") for name in names}
    return output.rows(("log", *titles.values()), rows, [title for name, title in titles.items() if name not in _TIMES])


def _cell(stats: Any, name: str) -> str:
    value: Any = getattr(stats, name, "")
    if name in _TIMES:
        return when(value)
    if isinstance(value, Rates):
        return _rates(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return sizes.show(value) if name.rpartition("_")[2] in _SIZES else f"{value:,}"
    if name == "readers":
        return ", ".join(f"{one.name} ({one.problem or f'{one.lag:,} behind'})" for one in value)
    return str(value)


def _rates(rates: Rates) -> str:
    words = (("second", rates.last_second), ("minute", rates.last_minute), ("hour", rates.last_hour))
    return ", ".join(f"{rate.records:,.1f} records/s ({sizes.show(rate.bytes)}/s) over the last {name}" for name, rate in words)


def _bar(stats: Any) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_row(f"{100 * stats.used / stats.capacity:.1f} %", ProgressBar(total=stats.capacity, completed=stats.used, width=20))
    return grid


def when(timestamp: int) -> str:
    """Return a time and its age; empty for 0, which means no record."""
    if not timestamp:
        return "-"
    when = datetime.fromtimestamp(timestamp // 1_000_000_000, UTC)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC ({_age(time.time() - timestamp / 1e9)})"


def _age(seconds: float) -> str:
    if seconds < 0:
        return "in the future"
    for least, length, words in _UNITS:
        if seconds >= least:
            return f"{seconds / length:.0f} {words} ago"
    raise AssertionError("the last unit takes every age")
