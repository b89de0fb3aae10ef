"""`kvspool repair`: let a log take records again after a failed flush, or with a damaged control block."""

from __future__ import annotations

import argparse

import kvspool
from kvspool import queue
from kvspool.cli import options, output, queues, verify

NAME = "repair"
SUMMARY = "put a log in order after a failed flush or damage"
DESCRIPTION = """\
Put a log in order whose flush to disk failed, or whose control block is damaged. Where the control block can't be true, it is
made anew from the records. Then all of the log is written to disk again, and only if that succeeds it takes records again. No
sound record is discarded. Refused while a writer holds the log. The exit code is 5 if records are damaged.
Of a queue, the pointers and references are mended; chunks that have no place in it are renamed to NAME.ID.lost."""
EXAMPLES = """\
  kvspool repair events
  kvspool repair events --timeout 60"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    options.add_path(parser, "the log")
    parser.add_argument(
        "--timeout", type=options.seconds, default=10.0, metavar="S", help="seconds to wait for each lock (default: %(default)g)"
    )
    options.add_json(parser, "the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Repair, and say what was done."""
    if queue.is_queue(arguments.path):
        done = queue.repair(arguments.path, timeout=arguments.timeout)
        output.print_json(done) if arguments.json else queues.show_repair(done)
        return 0 if done.verify.is_sound else 5
    report = kvspool.repair(arguments.path, timeout=arguments.timeout)
    if arguments.json:
        output.print_json(report)
    else:
        if report.recovery is not None:
            print(output.escape(str(report.recovery)))
        if report.sync_error:
            print(f"the flush that had failed (errno {report.sync_error}) has succeeded now; the log takes records again")
        verify.show(report.verify)
    return 0 if report.verify.is_sound else 5
