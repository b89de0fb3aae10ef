"""`kvspool rename`: give a log another path."""

from __future__ import annotations

import argparse
from pathlib import Path

import kvspool
from kvspool.cli import options, output

NAME = "rename"
SUMMARY = "give a log another path"
DESCRIPTION = """\
Give the spool or journal at PATH the path NEW, on the same file system; the new name is on disk when the command returns. Records,
settings, permissions and durable readers stay. A log that is open for writing, or whose durable readers are open, is refused."""
EXAMPLES = """\
  kvspool rename events events-2025
  kvspool rename events archive/events --timeout 60"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("new", metavar="NEW", type=Path, help="its new path, at which nothing exists yet")
    options.add_in_use(parser)
    options.add_json(parser, "print both paths as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Rename the log."""
    kvspool.rename(arguments.path, arguments.new, timeout=arguments.timeout)
    old, new = (str(path.absolute()) for path in (arguments.path, arguments.new))
    if arguments.json:
        output.print_json({"renamed": old, "new": new})
    else:
        print(output.escape(f"renamed {old} to {new}"))
    return 0
