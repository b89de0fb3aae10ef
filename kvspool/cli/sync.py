"""`kvspool sync`: flush a log to disk."""

from __future__ import annotations

import argparse

from kvspool.cli import options, output, queues

NAME = "sync"
SUMMARY = "flush all appended records to disk"
DESCRIPTION = """\
Flush all records that any process has appended to a log so far to disk. When the command returns, they survive a crash of the machine.
Writers and readers continue meanwhile."""
EXAMPLES = """\
  kvspool sync events
  kvspool sync events --json | jq .synced_sequence"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    options.add_json(parser, "print path and synced_sequence, below which all records are on disk, as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Sync the log, and print the end of the synced records."""
    with queues.open_log(arguments.path) as log:
        synced = log.sync()
    if arguments.json:
        output.print_json({"path": str(log.path), "synced_sequence": synced})
    else:
        print(output.escape(f"{log.path}: all records below sequence {synced} are on disk"))
    return 0
