"""`kvspool verify`: check every record of a log."""

from __future__ import annotations

import argparse

import kvspool
from kvspool import VerifyReport
from kvspool.cli import options, output, progress, queues
from kvspool.engine import sizes
from kvspool.engine.damage import Damage
from kvspool.queue import QueueVerifyReport

NAME = "verify"
SUMMARY = "check every record of a log"
DESCRIPTION = """\
Check every present record, while writers and readers continue: against its checksum, or, in a journal whose format has none, by its sizes
and sequence; of a journal also names, settings and durable readers. Prints the damaged places; the exit code is 5 if there are any.
Records that writers overwrite, or trim, meanwhile are no damage.
Of a queue, whose format has no checksums, the pointers, lengths and references are checked; others wait meanwhile."""
EXAMPLES = """\
  kvspool verify events
  kvspool verify events --json | jq .damaged"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check, and print the result."""
    with progress.shown("checking") as tell:
        report = kvspool.verify(arguments.path, progress=tell)
    if arguments.json:
        output.print_json(report)
    elif isinstance(report, QueueVerifyReport):
        queues.show(report)
    else:
        show(report)
    return 0 if report.is_sound else 5


def show(report: VerifyReport) -> None:
    """Print a report, a line for each damaged place."""
    for place in report.damaged:
        lost = _sequences(place) if place.count > 0 else "no known record"
        found = f"damaged: {output.counted(place.size, 'byte')}" if place.size else "missing"
        print(output.escape(f"{found} at {place.where}: {lost}"))
    for problem in report.problems:
        print(output.escape(f"damaged: {problem}"))
    if report.sync_error:
        print(f"a flush to disk has failed (errno {report.sync_error}): the log takes no more records; see kvspool repair")
    for name in report.foreign:
        print(output.escape(f"an unknown file name: {name}"))
    if report.torn_bytes:
        print(f"an incomplete record of a killed writer at the end ({sizes.show(report.torn_bytes)}); the next append removes it")
    print(f"{output.counted(report.records, 'sound record')} ({sizes.show(report.bytes)}), {report.damaged_records:,} damaged")


def _sequences(place: Damage) -> str:
    return f"sequence {place.first}" if place.count == 1 else f"sequences {place.first} to {place.last}"
