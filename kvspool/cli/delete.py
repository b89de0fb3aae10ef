"""`kvspool delete`: delete a log."""

from __future__ import annotations

import argparse
import sys

import kvspool
from kvspool.cli import options, output
from kvspool.cli.options import BadInput

NAME = "delete"
SUMMARY = "delete a log, with all of its records"
DESCRIPTION = """\
Delete the spool or journal at PATH, with all of its records and durable readers; it is gone from the disk when the command returns. On a
terminal the command asks first; elsewhere it needs --yes. A log that is open for writing, or whose durable readers are open, is refused,
and so is a directory that holds other files."""
EXAMPLES = """\
  kvspool delete events
  kvspool delete events --yes --timeout 60"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("--yes", action="store_true", help="don't ask")
    options.add_in_use(parser)
    options.add_json(parser, "print the path of the deleted log as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Delete the log, once the user agrees."""
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise BadInput("standard input is not a terminal, so the command can't ask: give --yes to delete the log")
        print(output.escape(f"Delete {arguments.path} with all of its records? [y/N] "), end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            output.complain("nothing was deleted")
            return 1
    kvspool.delete(arguments.path, timeout=arguments.timeout)
    if arguments.json:
        output.print_json({"deleted": str(arguments.path.absolute())})
    else:
        print(output.escape(f"deleted {arguments.path.absolute()}"))
    return 0
