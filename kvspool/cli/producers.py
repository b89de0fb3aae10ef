"""`kvspool producers`: show or forget the producers of a log."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import kvspool
from kvspool.cli import options, output, plugins
from kvspool.cli.options import BadInput
from kvspool.cli.stats import when

if TYPE_CHECKING:
    from rich.table import Table

    from kvspool.producers import ProducerStats

NAME = "producers"
SUMMARY = "show or forget the producers of a log"
DESCRIPTION = """\
Show the producers of a log. They append numbered batches, of which each record is stored once, as Spark's sinks do. Shows for each one the
last batch, how many of its records are stored, and the last batch that is stored in full. The log keeps 44 bytes of each name. With --json
one object for each, with the field names of the library. The records of a forgotten producer stay; if it repeats a batch, the records are
appended again."""
EXAMPLES = """\
  kvspool producers events
  kvspool producers events --json | jq 'select(.last != .batch).name'    those whose last batch is not stored in full
  kvspool producers events --forget 8e1d2c3a-6b1f-4d55-9a77-02d1c2b3a4f5/0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    options.add_json(parser, "one JSON object for each producer")
    parser.add_argument("--forget", metavar="NAME", action="append", help="forget this producer; may be given several times")


def run(arguments: argparse.Namespace) -> int:
    """Print the producers, or forget some."""
    with plugins.opened(arguments.path) as log:
        if not isinstance(log, kvspool.Log):
            raise BadInput(f"{arguments.path} holds several logs, or is a queue; producers belong to one spool or journal")
        if arguments.forget:
            known = log.forget_producers(arguments.forget)
            if not known:
                names = " or ".join(map(repr, arguments.forget))
                raise BadInput(f"{arguments.path} has no producer {names}; `kvspool producers` lists them")
            others = "" if known == len(arguments.forget) else "; the log doesn't know the others"
            print(f"forgot {known} of {output.counted(len(arguments.forget), 'producer')}{others}")
            return 0
        found = log.producers()
    if arguments.json:
        for one in found:
            output.print_json(one)
    else:
        output.print_table(_table(found))
    return 0


def _table(found: list[ProducerStats]) -> Table:
    rows = []
    for one in found:
        last = "-" if one.last is None else str(one.last)
        rows.append([one.name, str(one.batch), f"{one.stored:,}", f"{one.rows:,}", last, when(one.updated)])
    numbers = ("batch", "records", "of", "last whole batch")
    return output.rows(("producer", *numbers, "written"), rows, numbers)
