"""`kvspool rm`: delete logs."""

from __future__ import annotations

import argparse

import kvspool
from kvspool.cli import options, output

NAME = "rm"
SUMMARY = "delete logs"
DESCRIPTION = """\
Delete logs with their records, durable readers, producers and settings. A log is refused while a process has it open for appending, or has
a durable reader of it open; the error names the processes. Other readers get an error at their next read. Files that don't belong to the
log are never removed: the log is refused, and the error names them. A crash leaves the whole log or nothing; the next `kvspool rm` or
`kvspool create` of the same path removes the rest. With several logs, those before a refused one are deleted."""
EXAMPLES = """\
  kvspool rm events
  kvspool rm old/*.log
  kvspool rm events --missing-ok && kvspool create events"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="the logs")
    parser.add_argument("--missing-ok", action="store_true", help="ignore paths that don't exist")
    options.add_timeout(parser, 10.0)


def run(arguments: argparse.Namespace) -> int:
    """Delete the logs, in order, and print each."""
    for path in arguments.paths:
        kvspool.delete(path, timeout=arguments.timeout, missing_ok=arguments.missing_ok)
        print(output.escape(f"deleted {path}"))
    return 0
