"""`kvspool readers`: show, set or delete the durable readers of a log."""

from __future__ import annotations

import argparse
from datetime import datetime
from typing import TYPE_CHECKING, Any

import kvspool
from kvspool.cli import options, output, plugins
from kvspool.cli.options import BadInput
from kvspool.cli.stats import when
from kvspool.engine import sizes
from kvspool.engine.stats import Consumer

if TYPE_CHECKING:
    from rich.table import Table

    from kvspool.reader import ReaderStats

NAME = "readers"
ALIASES = ("offsets",)
SUMMARY = "show, set or delete the durable readers of a log"
DESCRIPTION = """\
Show the durable readers of a log: position, lag and the time of the last commit; of a spool also whether it is open. With --json one
object for each, with the field names of the library; of a journal only the position and the lag in records.
`kvspool offsets` is the same command: journals call the position of a reader an
offset."""
EXAMPLES = """\
  kvspool readers events
  kvspool readers events --json | jq 'select(.lag.seconds > 60).name'
  kvspool readers events --set billing 1000      it must not be open; created if it doesn't exist
  kvspool readers events --delete billing        it must not be open; a new one has no position
  kvspool readers events --delete-slot 3         for one whose name is damaged"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    options.add_json(parser, "one JSON object for each reader")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--delete", metavar="NAME", help="delete this reader and its position")
    which.add_argument("--delete-slot", metavar="N", type=options.count(0, 63), help="of a spool: delete the reader in this slot")
    which.add_argument("--set", metavar=("NAME", "START"), nargs=2, help=f"set this reader to {options.START_WORDS}")


def run(arguments: argparse.Namespace) -> int:
    """Print the readers, or set or delete one."""
    with plugins.opened(arguments.path) as log:
        if not isinstance(log, kvspool.Log):
            raise BadInput(f"{arguments.path} holds several logs, or is a queue; readers belong to one of them")
        if arguments.set is not None:
            _set(log, *arguments.set)
            return 0
        name = arguments.delete if arguments.delete_slot is None else arguments.delete_slot
        if name is not None:
            _delete(log, name)
            return 0
        found = log.readers()
    if arguments.json:
        for one in found:
            output.print_json(one if one.slot >= 0 else _in_journal(one))
    else:
        output.print_table(_table(found))
    return 0


def _set(log: Any, name: str, text: str) -> None:
    with options.bad_input(argparse.ArgumentTypeError):
        start = options.start(text)
        with log.reader(name, start=start) as reader:
            if isinstance(start, datetime):
                reader.seek_time(start)
            elif start == "earliest":
                reader.rewind()
            else:
                reader.seek(log.stats().next_sequence if start == "latest" else start)
            sequence = reader.commit()
    print(output.escape(f"the reader {name!r} continues at sequence {sequence}"))


def _delete(log: Any, name: str | int) -> None:
    with options.bad_input():
        log.delete_reader(name)
    print(output.escape(f"deleted the reader {name!r}" if isinstance(name, str) else f"deleted the reader in slot {name}"))


def _in_journal(one: ReaderStats) -> Consumer:
    """Return the state of a reader of a journal, of which JSON has only the position."""
    return Consumer(one.name, one.sequence, 0 if one.lag is None else one.lag.records, one.problem)


def _table(found: list[ReaderStats]) -> Table:
    """Return a row for each reader."""
    numbers = ("slot", "next", "record lag", "byte lag", "time lag")
    rows = [[one.name, str(one.slot) if one.slot >= 0 else "-", *_place(one), when(one.updated), _state(one)] for one in found]
    return output.rows(("reader", *numbers, "committed", "state"), rows, numbers)


def _place(one: ReaderStats) -> list[str]:
    if one.sequence is None or one.lag is None:
        return ["-"] * 4
    return [f"{one.sequence:,}", f"{one.lag.records:,}", sizes.show(one.lag.bytes), f"{one.lag.seconds:,.1f}"]


def _state(one: ReaderStats) -> str:
    words = [word for word, is_so in (("damaged", one.damaged), ("expired", one.expired), ("open", one.open)) if is_so]
    return one.problem or ", ".join(words) or ("closed" if one.open is not None else "-")
