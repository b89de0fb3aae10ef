"""`kvspool repair`: repair a log after a failed flush, or with damage."""

from __future__ import annotations

import argparse

import kvspool
from kvspool import RepairReport
from kvspool.cli import options, output, queues, verify
from kvspool.queue import QueueRepairReport

NAME = "repair"
SUMMARY = "repair a log after a failed flush or damage"
DESCRIPTION = """\
Repair a log that is damaged, or whose flush to disk failed. An impossible control block of a spool is rebuilt from the records. Damaged
bytes in the segments of a journal are moved to separate files next to them. Then all bytes that may not be on disk are written again, and
only if that succeeds the log takes records again. No sound record is discarded. Refused while a writer holds the log. The exit code is 5
if records are damaged or missing.
Of a queue, the pointers and references are fixed; chunks that are not part of the chain are renamed to NAME.ID.lost."""
EXAMPLES = """\
  kvspool repair events
  kvspool repair events --timeout 60"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    options.add_timeout(parser, 10.0)
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Repair, and print the result."""
    report = kvspool.repair(arguments.path, timeout=arguments.timeout)
    if arguments.json:
        output.print_json(report)
    else:
        _show(report)
    return 0 if report.verify.is_sound else 5


def _show(report: RepairReport | QueueRepairReport) -> None:
    if isinstance(report, QueueRepairReport):
        queues.show_repair(report)
        return
    if report.recovery is not None:
        print(output.escape(str(report.recovery)))
    _show_segments(report)
    if report.sync_error:
        print(f"the failed flush (errno {report.sync_error}) has now succeeded; the log takes records again")
    verify.show(report.verify)


def _show_segments(report: RepairReport) -> None:
    for one in report.removed:
        words = f"removed {one.size:,} bytes from {one.segment} at position {one.position}, where sequence {one.sequence} should be"
        print(output.escape(f"{words}; they are kept in {one.kept}"))
    for base in report.headers:
        print(f"rewrote the header of the segment from sequence {base} on")
    for base in report.begun:
        print(f"a segment now begins at sequence {base}")
