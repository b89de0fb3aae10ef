"""`kvspool repair`: let a log take records again after a failed flush, or with a damaged control block."""

from __future__ import annotations

import argparse

import kvspool
from kvspool import RepairReport
from kvspool.cli import options, output, queues, verify
from kvspool.journal.repair import JournalRepairReport
from kvspool.queue import QueueRepairReport

NAME = "repair"
SUMMARY = "put a log in order after a failed flush or damage"
DESCRIPTION = """\
Put a log in order whose flush to disk failed, or that is damaged. Where a spool's control block can't be true, it is made anew from
the records. What is damaged in the segments of a journal is taken out, into files of its own beside them. Then what may not be on
disk is written again, and only if that succeeds the log takes records again. No sound record is discarded. Refused while a writer
holds the log. The exit code is 5 if records are damaged or missing.
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
    report = kvspool.repair(arguments.path, timeout=arguments.timeout)
    if arguments.json:
        output.print_json(report)
    else:
        _show(report)
    return 0 if report.verify.is_sound else 5


def _show(report: RepairReport | JournalRepairReport | QueueRepairReport) -> None:
    if isinstance(report, QueueRepairReport):
        queues.show_repair(report)
        return
    if isinstance(report, JournalRepairReport):
        _show_segments(report)
    elif report.recovery is not None:
        print(output.escape(str(report.recovery)))
    if report.sync_error:
        print(f"the flush that had failed (errno {report.sync_error}) has succeeded now; the log takes records again")
    verify.show(report.verify)


def _show_segments(report: JournalRepairReport) -> None:
    for one in report.removed:
        words = f"took {one.size:,} bytes out of {one.segment} at position {one.position}, where sequence {one.sequence} should be"
        print(output.escape(f"{words}; they lie in {one.kept}"))
    for base in report.headers:
        print(f"wrote the header of the segment from sequence {base} on anew")
    for base in report.begun:
        print(f"a segment begins at sequence {base} now")
