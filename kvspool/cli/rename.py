"""`kvspool rename`: rename a log."""

from __future__ import annotations

import argparse
from pathlib import Path

import kvspool
from kvspool.cli import options, output

NAME = "rename"
SUMMARY = "rename a log"
DESCRIPTION = """\
Rename the spool or journal at PATH to TARGET, in the same file system; the new name is on disk when the command returns. Records,
settings and durable readers stay the same. A log that is open for writing, or has an open durable reader, is refused."""
EXAMPLES = """\
  kvspool rename events events-2025
  kvspool rename events archive/events --timeout 60"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("target", metavar="TARGET", type=Path, help="its new path, which must not exist")
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
