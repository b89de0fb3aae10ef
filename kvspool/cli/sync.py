"""`kvspool sync`: put on disk what was appended."""

from __future__ import annotations

import argparse

from kvspool.cli import options, output, queues

NAME = "sync"
SUMMARY = "put what was appended on disk"
DESCRIPTION = """\
Put everything that was appended to a log so far on disk, whoever appended it. When the command returns, the death of the machine can't
take it. Writers and readers go on meanwhile."""
EXAMPLES = """\
  kvspool sync events
  kvspool sync events --json | jq .synced_sequence"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    options.add_path(parser, "the log")
    options.add_json(parser, "print path and synced_sequence, below which all is on disk, as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Sync the log, and say how far."""
    with queues.open_log(arguments.path) as log:
        synced = log.sync()
    if arguments.json:
        output.print_json({"path": str(log.path), "synced_sequence": synced})
    else:
        print(output.escape(f"{log.path}: all below sequence {synced} is on disk"))
    return 0
