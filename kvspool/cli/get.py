"""`kvspool get`: print the records with given sequences."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from kvspool.cli import options, output, plugins, selection
from kvspool.cli.options import BadInput
from kvspool.cli.plugins import OpenLog
from kvspool.errors import GapError
from kvspool.record import Gap

NAME = "get"
SUMMARY = "print the records with given sequences"
DESCRIPTION = """\
Print the records with these sequences, in this order, as `kvspool read` does. A sequence that no record has yet ends the command with code
2, one whose record was lost with code 7. Nothing is printed for either."""
EXAMPLES = """\
  kvspool get events 1000
  kvspool get events 17 4 --json
  kvspool get images 3 --values > image.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("sequences", metavar="SEQUENCE", type=options.count(0), nargs="+", help="of a record, as `read` shows it")
    options.add_isolation(parser)
    options.add_form(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the records."""
    with plugins.opened(arguments.path) as log:
        selection.refuse_sequences(log, *arguments.sequences)
        output.print_records(_records(log, arguments), arguments)
    return 0


def _records(log: OpenLog, arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield the records. Raises GapError for a lost one, and BadInput for one that does not exist."""
    for sequence in arguments.sequences:
        with closing(log.read(start=sequence, limit=1, on_gap="yield", **options.isolation(arguments))) as items:  # type: ignore[type-var]
            item = next(items, None)
        if isinstance(item, Gap) and item.first <= sequence <= item.last:
            raise GapError(item)
        if item is None or isinstance(item, Gap) or item.sequence != sequence:
            raise BadInput(f"{arguments.path} has no record {sequence}; `kvspool stats` shows the sequences that it has")
        yield item
