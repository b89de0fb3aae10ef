"""`kvspool readers`: who keeps a place in a log."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvspool import sizes
from kvspool.cli import options, output, plugins
from kvspool.cli.options import BadInput
from kvspool.cli.stats import when

if TYPE_CHECKING:
    from rich.table import Table

NAME = "readers"
SUMMARY = "show or delete the durable readers of a log"
DESCRIPTION = """\
Show the durable readers of a log: where each stands, how far it is behind, when it last committed, and whether somebody has it
open. With --json one object for each, with the field names of the library."""
EXAMPLES = """\
  kvspool readers events
  kvspool readers events --json | jq 'select(.lag.seconds > 60).name'
  kvspool readers events --delete billing        it must not be open; a new one begins anew
  kvspool readers events --delete-slot 3         for one whose name is damaged"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    options.add_path(parser, "the log")
    options.add_json(parser, "one JSON object for each reader")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--delete", metavar="NAME", help="forget this reader and its place")
    which.add_argument("--delete-slot", metavar="N", type=options.count(0, 63), help="forget the reader in this slot")


def run(arguments: argparse.Namespace) -> int:
    """Print the readers, or delete one."""
    with plugins.opened(arguments.path, arguments.plugins) as log:
        if not hasattr(log, "readers"):
            raise BadInput(f"{arguments.path} holds several logs, or is a queue; readers belong to one log")
        name = arguments.delete if arguments.delete_slot is None else arguments.delete_slot
        if name is not None:
            _delete(log, name)
            return 0
        found = log.readers()
    if arguments.json:
        for one in found:
            output.print_json(one)
    else:
        output.console().print(_table(found))
    return 0


def _delete(log: Any, name: str | int) -> None:
    try:
        log.delete_reader(name)
    except ValueError as error:
        raise BadInput(str(error)) from error
    print(output.escape(f"deleted the reader {name!r}" if isinstance(name, str) else f"deleted the reader in slot {name}"))


def _table(found: list[Any]) -> Table:
    """Return a row for each reader."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold cyan")
    for title in ("reader", "slot", "next", "records behind", "bytes behind", "seconds behind", "committed", "state"):
        right = title in ("slot", "next") or title.endswith("behind")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for one in found:
        cells = [one.name, str(one.slot), *_place(one), when(one.updated), _state(one)]
        table.add_row(*(Text(output.escape(cell)) for cell in cells))
    return table


def _place(one: Any) -> list[str]:
    if one.lag is None:
        return ["-"] * 4
    return [f"{one.sequence:,}", f"{one.lag.records:,}", sizes.show(one.lag.bytes), f"{one.lag.seconds:,.1f}"]


def _state(one: Any) -> str:
    words = [word for word, is_so in (("damaged", one.damaged), ("expired", one.expired), ("open", one.open)) if is_so]
    return ", ".join(words) or "closed"
