"""`kvspool tail`: print the last records, and follow new ones.

The last records of one log are found by their sequences. A log of several logs has no common sequence, so there the search goes back in
time, further at each step. If a step finds too few, because numbers were left out or records lost, the next one is longer.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from kvspool.cli import options, output, plugins, selection
from kvspool.cli.plugins import OpenLog
from kvspool.errors import GapError, KvspoolError
from kvspool.options import Start
from kvspool.record import Gap

NAME = "tail"
SUMMARY = "print the last records, and follow new ones"
DESCRIPTION = """\
Print the last records of a log; with --follow continue with new ones, until Ctrl-C (exit code 130) or --timeout. The lines are those of
`kvspool read`."""
EXAMPLES = """\
  kvspool tail events -n 100
  kvspool tail events --follow --json
  kvspool tail events -n 0 -f --timeout 5        only new records, until none arrives for 5 seconds
  kvspool tail events --since 10m -f --where 'data.level == "error"'
  kvspool tail logs/app --logs -f --where 'type >= 40'        messages of kvspool.logging from ERROR on
  kvspool tail events --key user7 -n 3           the last three records of a key"""

_STEPS = 12  # each four times the previous one; after the last one everything is read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    amount = parser.add_mutually_exclusive_group()
    words = "how many of those that match the filters (default: %(default)s)"
    amount.add_argument("-n", "--last", type=options.count(0), default=10, dest="lines", metavar="N", help=words)
    amount.add_argument("--since", type=options.since, metavar="AGE", help="all records of the last 30s, 10m, 12h or 7d, or since a time")
    amount.add_argument("--start", type=options.start, metavar="START", help=f"all records from there on: {options.START_WORDS}")
    parser.add_argument("--limit", type=options.count(0), metavar="N", help="most records to print; with --follow, end after them")
    parser.add_argument("-f", "--follow", action="store_true", help="continue with new records")
    parser.add_argument("--timeout", type=options.seconds, metavar="S", help="with --follow: end after S seconds without a record")
    selection.add_filters(parser)
    options.add_isolation(parser)
    options.add_output(parser, has_logs=True)


def run(arguments: argparse.Namespace) -> int:
    """Print the last records, then new ones."""
    with plugins.opened(arguments.path) as log:
        isolation = options.isolation(arguments)
        given = arguments.since if arguments.start is None else arguments.start
        if given is not None:
            selection.refuse_sequences(log, given)
            start: Start = given
            if not arguments.follow:
                items = log.read(start=start, on_gap=arguments.gaps, **isolation)
                output.print_records(selection.limited(selection.filtered(items, arguments), arguments.limit), arguments)
                return 0
        else:
            stats = log.stats()
            last, failure = _last(log, stats, arguments, isolation)
            if failure is not None and not last:
                raise failure
            if not arguments.follow:
                output.print_records(selection.limited(_shown(arguments.gaps, last, failure), arguments.limit), arguments)
                return 0
            start = _place(last, stats, arguments)
        items = log.follow(start=start, timeout=arguments.timeout, on_gap=arguments.gaps, **isolation)
        output.print_live(items, arguments, lambda items: selection.limited(selection.filtered(items, arguments), arguments.limit))
    return 0


def _last(log: OpenLog, stats: Any, arguments: argparse.Namespace, isolation: dict[str, Any]) -> tuple[deque[Any], Exception | None]:
    """Return the last present records that match, and Gaps, and the error that prevents reading on from there, if there is one."""
    count = arguments.lines
    last: deque[Any] = deque()
    failure: Exception | None = None
    for start in _starts(stats, count) if count else ():
        last, failure = deque(maxlen=count), None
        try:
            last.extend(selection.filtered(log.read(start=start, on_gap="yield", **isolation), arguments))
        except (KvspoolError, OSError) as error:
            failure = error
        if len(last) == count:
            break
    return last, failure


def _starts(stats: Any, count: int) -> Iterator[Start]:
    """Yield ever earlier starts."""
    if _has_sequences(stats):
        for step in range(_STEPS):
            sequence = stats.next_sequence - count * 4**step
            if sequence <= stats.first_sequence:
                break
            yield sequence
    else:
        logs = stats if isinstance(stats, list) else [stats]
        newest = max((getattr(one, "last_timestamp", 0) for one in logs), default=0)
        for step in range(_STEPS if newest else 0):
            yield datetime.fromtimestamp(max(0, newest / 1e9 - 4**step), UTC)
    yield "earliest"


def _has_sequences(stats: Any) -> bool:
    return hasattr(stats, "next_sequence") and hasattr(stats, "first_sequence")


def _place(last: deque[Any], stats: Any, arguments: argparse.Namespace) -> Start:
    """Return where to follow from, so that the last records are printed first and none between them and the new ones is missed.

    In a log of several logs that is the time of the first of them: others of the same microsecond are shown with it.
    """
    if _has_sequences(stats):
        return int(_sequence(last[0]) if last else stats.synced_sequence if arguments.synced else stats.next_sequence)
    times = [item.time for item in last if not isinstance(item, Gap)]
    earliest: datetime | None = min(times, default=None)
    return earliest or ("earliest" if arguments.lines else "latest")


def _sequence(item: Any) -> int:
    return int(item.first if isinstance(item, Gap) else item.sequence)


def _shown(wish: str, items: deque[Any], failure: Exception | None) -> Iterator[Any]:
    """Yield the items with Gaps raised or left out, according to `wish`; then raise the error that ended the read."""
    for item in items:
        if isinstance(item, Gap) and wish == "raise":
            raise GapError(item)
        if not isinstance(item, Gap) or wish == "yield":
            yield item
    if failure is not None:
        raise failure
