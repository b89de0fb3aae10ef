"""The records of a log that a command selects: by an end, a key, and a condition."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from kvspool.cli import options
from kvspool.cli.options import BadInput
from kvspool.cli.plugins import OpenLog
from kvspool.cli.where import FIELDS, Where
from kvspool.record import Gap


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the options --key and --where."""
    group = parser.add_argument_group("filters", "Records that don't match are left out; gaps are shown in any case.")
    group.add_argument("--key", metavar="TEXT", help="only records with this key")
    words = f"only records that match, as 'data.user == 7': {', '.join(FIELDS)}; and, or, not, in, comparisons; a missing member is None"
    group.add_argument("--where", type=condition, metavar="CONDITION", help=words)


def condition(text: str) -> Where:
    """Return a condition on records."""
    try:
        return Where(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def has_filters(arguments: argparse.Namespace) -> bool:
    """Return whether only some of the records are wanted."""
    return arguments.key is not None or arguments.where is not None


def filtered(items: Iterable[Any], arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield the records that match the filters, and all Gaps."""
    key = None if arguments.key is None else os.fsencode(arguments.key)
    for item in items:
        if isinstance(item, Gap) or ((key is None or item.key == key) and (arguments.where is None or arguments.where.matches(item))):
            yield item


def until(items: Iterable[Any], end: int | datetime | None) -> Iterator[Any]:
    """Yield the items before a sequence or a time, and Gaps that begin before it."""
    for item in items:
        if isinstance(end, datetime):
            if not isinstance(item, Gap) and item.time >= end:
                return
        elif end is not None and (item.first if isinstance(item, Gap) else item.sequence) >= end:
            return
        yield item


def limited(items: Iterable[Any], limit: int | None) -> Iterator[Any]:
    """Yield items until so many records were among them, without waiting for another one; None: all of them."""
    left = limit
    for item in items if left != 0 else ():
        yield item
        if left is not None and not isinstance(item, Gap):
            left -= 1
            if not left:
                return


def read(log: OpenLog, arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield the records of --start, --end, --key, --where and --limit. Raises BadInput for a sequence in a log of several logs."""
    refuse_sequences(log, arguments.start, arguments.end)
    narrows = arguments.end is not None or has_filters(arguments)
    limit = None if narrows else arguments.limit  # otherwise the limit counts selected records
    items = log.read(start=arguments.start, limit=limit, on_gap=arguments.gaps, **options.isolation(arguments))
    if not narrows:
        yield from items
        return
    with closing(items):  # type: ignore[type-var]  # iterations of logs can be closed
        yield from limited(filtered(until(items, arguments.end), arguments), arguments.limit)


def refuse_sequences(log: OpenLog, *places: object) -> None:
    """Raise BadInput for a sequence in a log of several logs, each of which has its own."""
    if any(isinstance(place, int) for place in places) and isinstance(log.stats(), list):
        raise BadInput("a log of several logs has no common sequence; give a time such as 2026-01-31T12:00:00Z, or an age such as -5m")


def sequence_of(log: Any, end: int | datetime | None) -> int | None:
    """Return the end of a range as a sequence of one log; for commands that stop at a sequence."""
    if not isinstance(end, datetime):
        return end
    return int(log.sequence_at(min(end, datetime.now(UTC))))
