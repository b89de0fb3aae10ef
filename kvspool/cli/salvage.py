"""`kvspool salvage`: copy what is sound out of a damaged log."""

from __future__ import annotations

import argparse
from pathlib import Path

import kvspool
from kvspool.cli import options, output, progress
from kvspool.engine import sizes

NAME = "salvage"
SUMMARY = "copy what is sound out of a damaged log"
DESCRIPTION = """\
Make a new log at TARGET with every sound record that can be found in the files at SOURCE, even if spool.ctl is gone. Order, times,
types, keys and values stay; sequences are new, from 0. The new log is as large as what was found, rounded up to a power of two; kvspool
resize gives it another size. SOURCE is only read; nobody may be using it."""
EXAMPLES = """\
  kvspool salvage events events-salvaged
  kvspool salvage events events-salvaged --json | jq .missing"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the directory of the damaged log")
    parser.add_argument("target", metavar="TARGET", type=Path, help="where the new log is to lie; its parent directory must exist")
    options.add_json(parser, "the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Copy, and say what was copied."""
    instead = "its segments are read as they are, with a gap where they are damaged; kvspool repair takes out what is damaged"
    options.refuse_journal(arguments.source, instead)
    with progress.shown("copying") as tell:
        report = kvspool.salvage(arguments.source, arguments.target, progress=tell)
    if arguments.json:
        output.print_json(report)
        return 0
    for words in report.damage:
        print(output.escape(words))
    words = f"copied {report.records:,} records ({sizes.show(report.bytes)}) to {report.target}"
    print(output.escape(f"{words}; they are numbered anew, from 0"))
    if report.missing:
        print(f"{report.missing:,} numbers between {report.first_sequence} and {report.last_sequence} have no record")
    if report.undecodable:
        print(f"{report.undecodable:,} values name keys that are lost; their bytes are kept, as raw values")
    return 0
