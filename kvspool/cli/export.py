"""`kvspool export`: write the records of a log to a file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

import kvspool
from kvspool.cli import options, output, queues, selection
from kvspool.cli.summary import ProgressLine
from kvspool.engine import exporting
from kvspool.engine.reports import Exported

NAME = "export"
SUMMARY = "write the records of a log to a file"
DESCRIPTION = """\
Write the present records of a log of any kind as JSON lines or as a Parquet file. JSON lines have the members sequence, timestamp (ns
since 1970; none for a record without a time), type,
codec, key and value; bytes that JSON can't represent are in base64 in key_base64 and value_base64. `kvspool import` reads both. The
file appears when it is complete. Lost records are named on stderr; with --gaps raise they end the command with code 7."""
EXAMPLES = """\
  kvspool export events -o events.jsonl
  kvspool export events --format parquet --start 1000 --end 2000 -o events.parquet
  kvspool export events | gzip > events.jsonl.gz"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    parser.add_argument("--format", choices=exporting.FORMATS, default="jsonl", help="of the file (default: %(default)s)")
    options.add_range(parser, "export")
    words = "output file; - is standard output (default: %(default)s)"
    parser.add_argument("-o", "--output", dest="file", default="-", metavar="FILE", help=words)
    options.add_gaps(parser, "yield")
    options.add_json(parser, "print the summary as a JSON object, on standard error if the records go to standard output")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print a summary."""
    progress = ProgressLine(shows=sys.stderr.isatty())
    with queues.open_log(arguments.path) as log:
        try:
            if arguments.file == "-":
                done = _export(log, sys.stdout.buffer, arguments, progress)
            else:
                part = Path(f"{arguments.file}.part")
                try:
                    with open(part, "wb") as file:
                        done = _export(log, file, arguments, progress)
                    os.replace(part, arguments.file)
                except BaseException:
                    part.unlink(missing_ok=True)
                    raise
        finally:
            progress.stop()
    _say(done, arguments)
    return 0


def _export(log: kvspool.Log, file: object, arguments: argparse.Namespace, progress: ProgressLine) -> Exported:
    return exporting.export(
        log,
        file,  # type: ignore[arg-type]
        arguments.format,
        start=arguments.start,
        end=selection.sequence_of(log, arguments.end),
        limit=arguments.limit,
        on_gap="raise" if arguments.gaps == "raise" else "yield",
        progress=lambda count: progress.say(f"exported {count:,} records"),
    )


def _say(done: Exported, arguments: argparse.Namespace) -> None:
    if arguments.json:
        if arguments.file == "-":
            sys.stdout.flush()
            print(msgspec.json.encode(done).decode(), file=sys.stderr)
        else:
            output.print_json(done)
        return
    for gap in done.gaps if arguments.gaps == "yield" else ():
        output.complain(str(gap))
    print(f"exported {output.counted(done.records, 'record')}" + (f"; {done.lost:,} were lost" if done.lost else ""), file=sys.stderr)
