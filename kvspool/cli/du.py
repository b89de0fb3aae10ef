"""`kvspool du`: what logs take on disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvspool.cli import options, output, trees
from kvspool.engine import sizes
from kvspool.errors import LogNotFound

NAME = "du"
SUMMARY = "show the bytes on disk of logs"
DESCRIPTION = """\
Show the bytes on disk of each log at or below the paths, the largest first, and the sum. A spool takes its whole capacity at once, a
journal grows. Off a terminal sizes are bytes, followed by a tab and the path, and there is no sum."""
EXAMPLES = """\
  kvspool du /var/spool
  kvspool du events history --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="*", default=[Path(".")], help="a log, or a directory (default: .)")
    options.add_json(parser, "print a JSON object for each log")


def run(arguments: argparse.Namespace) -> int:
    """Print the sizes."""
    for path in arguments.paths:
        if not path.exists():
            raise LogNotFound(f"{path} does not exist")
    found = {log: trees.usage_of(log) for path in arguments.paths for log, is_log in trees.walk(path) if is_log}
    for log, usage in sorted(found.items(), key=lambda item: (-item[1], item[0])):
        if arguments.json:
            output.print_json({"path": str(log), "bytes": usage})
        elif output.is_terminal():
            print(f"{sizes.show(usage):>10}  {output.escape(str(log))}")
        else:
            print(f"{usage}\t{output.escape(str(log))}")
    if output.is_terminal() and not arguments.json:
        print(f"{sizes.show(sum(found.values())):>10}  in all")
    return 0
