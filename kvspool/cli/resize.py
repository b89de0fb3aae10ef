"""`kvspool resize`: change the size of a log."""

from __future__ import annotations

import argparse
import sys

import kvspool
from kvspool.cli import options, output
from kvspool.cli.summary import ProgressLine
from kvspool.engine import sizes

NAME = "resize"
SUMMARY = "change the size of a log while it is in use"
DESCRIPTION = """\
Change the size of a log's ring. Others may append to it and read it meanwhile, and continue automatically. Records keep their sequences,
durable readers their positions. A smaller ring keeps the newest records, and readers get a gap for the others; with the policies block
and raise it is refused while a durable reader has yet to read them. Until it is done it takes the disk space of both rings."""
EXAMPLES = """\
  kvspool resize events 4GiB
  kvspool resize events 64MiB --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("capacity", type=options.size, metavar="SIZE", help="bytes, or with a unit such as 64MiB")
    options.add_timeout(parser, 60.0)
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Resize the log and print the result."""
    options.refuse_journal(arguments.path, "it has no capacity; kvspool trim removes its oldest segments")
    progress = ProgressLine(shows=sys.stderr.isatty())
    try:
        with options.bad_input():
            done = kvspool.resize(
                arguments.path,
                arguments.capacity,
                timeout=arguments.timeout,
                progress=lambda at, end: progress.say(f"copying, {sizes.show(max(0, end - at))} to go"),
            )
    finally:
        progress.stop()
    if arguments.json:
        output.print_json(done)
    else:
        words = f"resized {done.path}: {sizes.show(done.before)} to {sizes.show(done.capacity)}, {output.counted(done.records, 'record')}"
        print(output.escape(words + (f"; {done.dropped:,} had no room" if done.dropped else "")))
    return 0
