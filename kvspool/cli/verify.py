"""`kvspool verify`: whether every record of a log is sound."""

from __future__ import annotations

import argparse

import kvspool
from kvspool import VerifyReport, queue, sizes
from kvspool.cli import options, output, progress, queues

NAME = "verify"
SUMMARY = "check every record of a log"
DESCRIPTION = """\
Check every record that is there now against its checksum, while writers and readers go on. Prints the places that are damaged;
the exit code is 5 if there are any. Records that writers overwrite meanwhile are no damage.
Of a queue, whose format has no checksums, the pointers, lengths and references are checked; others wait meanwhile."""
EXAMPLES = """\
  kvspool verify events
  kvspool verify events --json | jq .damaged"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    options.add_path(parser, "the log")
    options.add_json(parser, "the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check, and print what was found."""
    if queue.is_queue(arguments.path):
        found = queue.verify(arguments.path)
        output.print_json(found) if arguments.json else queues.show(found)
        return 0 if found.is_sound else 5
    with progress.shown("checking") as tell:
        report = kvspool.verify(arguments.path, progress=tell)
    if arguments.json:
        output.print_json(report)
    else:
        show(report)
    return 0 if report.is_sound else 5


def show(report: VerifyReport) -> None:
    """Print a report, a line for each damaged place."""
    for place in report.damaged:
        lost = f"sequences {place.first} to {place.last}" if place.count else "no record that is known of"
        print(f"damaged: {place.size} bytes at position {place.position}: {lost}")
    for problem in report.problems:
        print(output.escape(f"damaged: {problem}"))
    if report.sync_error:
        print(f"a flush to disk has failed (errno {report.sync_error}): the log takes no more records; see kvspool repair")
    print(f"{report.records:,} records are sound ({sizes.show(report.bytes)}), {report.damaged_records:,} damaged")
