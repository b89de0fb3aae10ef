"""`kvspool mv`: rename a log."""

from __future__ import annotations

import argparse

import kvspool
from kvspool.cli import options, output

NAME = "mv"
SUMMARY = "rename a log"
DESCRIPTION = """\
Rename a log, within one file system. Nothing is replaced: something at the new path, even an empty directory, is an error. A log is refused
while a process has it open for appending, or has a durable reader of it open; the error names the processes. Journals of the formats fflg
and fixed can't be renamed, since their settings are in a second directory: copy them with `kvspool copy`."""
EXAMPLES = """\
  kvspool mv events events.old
  kvspool mv /data/new/events /data/events"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("new", metavar="NEW", help="its new path; nothing may be there")
    options.add_timeout(parser, 10.0)


def run(arguments: argparse.Namespace) -> int:
    """Rename the log, and print both paths."""
    kvspool.rename(arguments.path, arguments.new, timeout=arguments.timeout)
    print(output.escape(f"renamed {arguments.path} to {arguments.new}"))
    return 0
