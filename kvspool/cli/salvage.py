"""`kvspool salvage`: copy the sound records out of a damaged log."""

from __future__ import annotations

import argparse
from pathlib import Path

import kvspool
from kvspool.cli import options, output, progress
from kvspool.engine import sizes

NAME = "salvage"
SUMMARY = "copy the sound records out of a damaged log"
DESCRIPTION = """\
Create a new log at TARGET with every sound record in the files at SOURCE, even if spool.ctl is missing. Order, times, types, keys and
values stay; sequences are new, from 0. The new log has the size of the records found, rounded up to a power of two; kvspool resize
changes it. SOURCE is only read; it must not be in use."""
EXAMPLES = """\
  kvspool salvage events events-salvaged
  kvspool salvage events events-salvaged --json | jq .missing"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the directory of the damaged log")
    parser.add_argument("target", metavar="TARGET", type=Path, help="path of the new log; its parent directory must exist")
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Copy, and print the result."""
    instead = "its segments can be read, with a gap for damaged records; kvspool repair removes the damage"
    options.refuse_journal(arguments.source, instead)
    with progress.shown("copying") as tell:
        report = kvspool.salvage(arguments.source, arguments.target, progress=tell)
    if arguments.json:
        output.print_json(report)
        return 0
    for words in report.damage:
        print(output.escape(words))
    words = f"copied {output.counted(report.records, 'record')} ({sizes.show(report.bytes)}) to {report.target}"
    print(output.escape(f"{words}; their sequences are new, from 0"))
    if report.missing:
        print(f"between {report.first_sequence} and {report.last_sequence}, {output.counted(report.missing, 'record')} are missing")
    if report.undecodable:
        print(f"kept as raw bytes, because their keys are lost: {output.counted(report.undecodable, 'value')}")
    return 0
