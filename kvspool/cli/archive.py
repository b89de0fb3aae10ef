"""`kvspool archive`: compress the sealed segments of a journal, or restore them."""

from __future__ import annotations

import argparse

import kvspool
from kvspool.cli import options, output, progress
from kvspool.engine import sizes
from kvspool.journal import ArchiveReport
from kvspool.journal.archive import LEVELS, Progress

NAME = "archive"
SUMMARY = "compress the full segments of a journal"
DESCRIPTION = """\
Compress full segments of a journal of the format kvj in place, into files that `zstd -d` also reads. They stay readable from any sequence
or time, while others append and read; the last segment is never touched. --undo restores the segments, byte for byte. The next run
finishes an interrupted one. Needs the extra `archive`: pip install 'kvspool[archive]'."""
EXAMPLES = """\
  kvspool archive events --dry-run
  kvspool archive events --older-than 1d --level 9
  kvspool archive events --undo"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the journal")
    parser.add_argument(
        "--level", type=options.count(LEVELS[0], LEVELS[-1]), default=3, metavar="N", help="of zstd, 1 to 22 (default: %(default)s)"
    )
    parser.add_argument("--before", type=options.count(0), metavar="SEQUENCE", help="only segments wholly before this sequence")
    words = "only segments without a write for so long; in seconds, or as 90m, 12h, 30d"
    parser.add_argument("--older-than", type=options.seconds, metavar="AGE", help=words)
    parser.add_argument("--undo", action="store_true", help="restore archived segments")
    parser.add_argument("--dry-run", action="store_true", help="only print which segments would change")
    options.add_timeout(parser, 60.0)
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Archive or restore, and print the result."""
    with kvspool.open(arguments.path, timeout=arguments.timeout) as log:
        with progress.shown("making segments" if arguments.undo else "compressing") as tell:
            report = _convert(log, arguments, tell)
    if arguments.json:
        output.print_json(
            {
                "path": report.path,
                "dry_run": report.dry_run,
                "undo": report.undo,
                "segments": report.segments,
                "bytes_before": report.bytes_before,
                "bytes_after": report.bytes_after,
            }
        )
    else:
        print(output.escape(_words(report)))
    return 0


def _convert(log: kvspool.Log, arguments: argparse.Namespace, tell: Progress) -> ArchiveReport:
    limits = {"older_than": arguments.older_than, "dry_run": arguments.dry_run, "progress": tell}
    with options.bad_input():
        if arguments.undo:
            return log.unarchive(arguments.before, **limits)
        return log.archive(arguments.before, level=arguments.level, **limits)


def _words(report: ArchiveReport) -> str:
    count = len(report.segments)
    segments = f"{output.counted(count, 'segment')} of {report.path}"
    done = "unarchive" if report.undo else "archive"
    if report.bytes_after is None:
        return f"would {done} {segments}, {sizes.show(report.bytes_before)}"
    return f"{done}d {segments}: {sizes.show(report.bytes_before)} to {sizes.show(report.bytes_after)}"
