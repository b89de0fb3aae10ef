"""`kvspool import`: append the records of a file to a log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import kvspool
from kvspool.cli import options, output, queues
from kvspool.cli.options import BadInput
from kvspool.cli.summary import ProgressLine
from kvspool.engine.exporting import FORMATS
from kvspool.opening import v1
from kvspool.transfer import exchange

NAME = "import"
SUMMARY = "append the records of a file to a log"
DESCRIPTION = """\
Append the records of a file that `kvspool export` wrote, in order: JSON lines, or Parquet if its name ends in .parquet. A directory is
read as one of kvspool v1, with files NAME-N.sp; files that kvspool v1 wrote since December 2017 can't be read. Timestamps, types, keys,
codecs and values stay the same; sequences are new. An invalid line, or a record with a field that the log's format can't store, ends the
command, which prints its number, the reason and the number of imported records. The log must exist."""
EXAMPLES = """\
  kvspool import events.jsonl events
  gunzip < events.jsonl.gz | kvspool import - events
  kvspool import --from-v1 /var/spool/old events"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="file to import; - is standard input")
    options.add_path(parser, "the log")
    parser.add_argument("--format", choices=FORMATS, help="of the file (default: by its name)")
    parser.add_argument("--from-v1", action="store_true", help="FILE is a spool directory of kvspool v1")
    parser.add_argument("--unread", action="store_true", help="of kvspool v1: only records that its reader has not read")
    options.add_json(parser, "print the summary as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Append the records and print a summary."""
    progress = ProgressLine(shows=sys.stderr.isatty())
    with queues.open_log(arguments.path) as log:
        try:
            done = _import(log, arguments, lambda count: progress.say(f"imported {count:,} records"))
        finally:
            progress.stop()
    if arguments.json:
        output.print_json(done)
        return 0
    for place in done.torn:
        output.complain(f"{place}: incomplete frame; the rest of the file was left out")
    words = f"imported {output.counted(done.records, 'record')}"
    print(words + (f": sequences {done.first_sequence} to {done.last_sequence}" if done.records else ""), file=sys.stderr)
    return 0


def _import(log: kvspool.Log, arguments: argparse.Namespace, progress: exchange.Progress) -> exchange.Imported:
    if arguments.file == "-":
        if arguments.format == "parquet":
            raise BadInput("a Parquet file is read from its end, which a pipe can't do; name a file")
        return exchange.import_(log, sys.stdin.buffer, progress=progress)
    path = Path(arguments.file)
    if arguments.from_v1 or v1.is_spool(path) or v1.is_ring(path):
        return exchange.import_v1(log, path, unread=arguments.unread, progress=progress)
    format = arguments.format or ("parquet" if path.suffix == ".parquet" else "jsonl")
    with open(path, "rb") as file:
        return exchange.import_(log, file, format, progress=progress)
