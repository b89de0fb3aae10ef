"""`kvspool rename`: give a log another name."""

from __future__ import annotations

import argparse
from pathlib import Path

import kvspool
from kvspool.cli import options, output

NAME = "rename"
SUMMARY = "give a log another name"
DESCRIPTION = """\
Give the spool or journal at PATH the path TARGET, in the same file system; the new name is on disk when the command returns. Records,
settings and durable readers stay what they are. A log that is open for writing, or whose durable readers are, is refused."""
EXAMPLES = """\
  kvspool rename events events-2025
  kvspool rename events archive/events --timeout 60"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    options.add_path(parser, "the log")
    parser.add_argument("target", metavar="TARGET", type=Path, help="its new path, at which there is nothing yet")
    options.add_in_use(parser)
    options.add_json(parser, "print both paths as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Rename the log."""
    kvspool.rename(arguments.path, arguments.target, timeout=arguments.timeout)
    source, target = (str(path.absolute()) for path in (arguments.path, arguments.target))
    if arguments.json:
        output.print_json({"renamed": source, "target": target})
    else:
        print(output.escape(f"renamed {source} to {target}"))
    return 0
