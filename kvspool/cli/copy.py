"""`kvspool copy`: the records of one log into another one, of any format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import kvspool
from kvspool.cli import options, output, progress
from kvspool.cli.options import BadInput
from kvspool.engine import sizes
from kvspool.journal.formats import FORMATS
from kvspool.transfer.copier import CopyPlan, CopyReport
from kvspool.transfer.progress import CopyProgress

NAME = "copy"
SUMMARY = "copy the records of one log into another one, of any format"
DESCRIPTION = """\
Copy the records that are in SRC now into DST, which is made if there is none: spools, journals of every format, queues; and directories of
kvspool v1 as SRC. Sequence, timestamp, type, key and codec stay what they are where the format of DST has room for them. What it can't
keep is said before the copy starts, and ends the command unless --lossy is given. The copy is on disk when the command returns.

If it was ended, even by a kill, the same command goes on: no record comes twice, none is left out. It also copies what is new in SRC
since. Nobody else should append to DST meanwhile."""
EXAMPLES = """\
  kvspool copy events archive --format kvj
  kvspool copy events for-go --format sej --lossy
  kvspool copy events items --format fixed --item-bytes 32 --items-per-blob 100000 --lossy
  kvspool copy /var/spool/old events --capacity 1GiB      a directory of kvspool v1
  kvspool copy archive part --start 1000 --end 2000"""

LIMITS = ("segment_bytes", "total_bytes", "item_bytes", "items_per_blob", "chunk_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("source", metavar="SRC", type=Path, help="what is copied; nothing of it is changed")
    parser.add_argument("target", metavar="DST", type=Path, help="where to; it is made if there is nothing")
    parser.add_argument("--start", type=options.start, default="earliest", metavar="START", help="a sequence or a time, as `read` has it")
    parser.add_argument("--end", type=options.count(0), metavar="N", help="up to this sequence, which is not included")
    parser.add_argument("--limit", type=options.count(0), metavar="N", help="at most so many records from START on")
    parser.add_argument(
        "--gaps",
        choices=("raise", "skip"),
        default="raise",
        help="what SRC has lost: end with code 7, or go on and name it (default: %(default)s); kvj leaves the sequences out in any case",
    )
    parser.add_argument("--lossy", action="store_true", help="go on although DST can't keep all that records have")
    parser.add_argument("--append", action="store_true", help="behind other records that DST holds")
    made = parser.add_argument_group("a DST that is made")
    made.add_argument("--format", choices=("spool", "queue", *FORMATS), help="default: that of SRC")
    options.add_codec(made, "of structured values (default: as in SRC)", default=None)
    made.add_argument("--capacity", type=options.size, metavar="SIZE", help="of a spool (default: room for all)")
    made.add_argument("--segment-bytes", type=options.size, metavar="SIZE", help="of kvj, sej and fflg")
    made.add_argument("--total-bytes", type=options.size, metavar="SIZE", help="of fflg")
    made.add_argument("--item-bytes", type=options.size, metavar="SIZE", help="of fixed")
    made.add_argument("--items-per-blob", type=options.count(1), metavar="N", help="of fixed")
    made.add_argument("--chunk-bytes", type=options.size, metavar="SIZE", help="of a queue")
    origin = parser.add_argument_group("a SRC that another program has made")
    origin.add_argument("--source-format", choices=("spool", "queue", "v1", *FORMATS), help="default: found out")
    origin.add_argument("--source-item-bytes", type=options.size, metavar="SIZE", help="of fixed")
    origin.add_argument("--source-items-per-blob", type=options.count(1), metavar="N", help="of fixed")
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Copy, and say what was copied."""
    given = {name: getattr(arguments, name) for name in ("codec", "capacity", *LIMITS)}
    origin = {name: getattr(arguments, f"source_{name}") for name in ("item_bytes", "items_per_blob")}
    with progress.shown("copying") as show:
        try:
            report = kvspool.copy(
                arguments.source,
                arguments.target,
                format=arguments.format,
                start=arguments.start,
                end=arguments.end,
                limit=arguments.limit,
                on_gap=arguments.gaps,
                lossy=arguments.lossy,
                append=arguments.append,
                source_format=arguments.source_format,
                source_options=_said(origin),
                before=None if arguments.json else _announce,
                progress=lambda done: show(done.records, done.all, _words(done)),
                **_said(given),
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, kvspool.KvspoolError):
                raise
            raise BadInput(str(error)) from error
    if arguments.json:
        output.print_json(report)
    else:
        _say(report)
    return 0


def _said(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _words(done: CopyProgress) -> str:
    return f"copied {done.records:,} records, {sizes.show(done.bytes)}"


def _announce(plan: CopyPlan) -> None:
    """Say what is going to be done."""
    words = "going on with" if plan.is_continued else "copying"
    output.complain(f"{words} {plan.source} ({plan.source_format}) to {plan.target} ({plan.format}), from sequence {plan.first_sequence}")
    if not plan.keeps_sequences:
        output.complain("sequences are not kept" + ("" if plan.target_sequence is None else f": the next one is {plan.target_sequence}"))
    if plan.may_lose:
        output.complain(f"{plan.format} has no room for {', '.join(plan.may_lose)} as {plan.source_format} has them")


def _say(report: CopyReport) -> None:
    for gap in report.gaps:
        output.complain(str(gap))
    for place in report.torn:
        output.complain(f"{place}: cut off there; the rest of the file was left out")
    words = f"copied {report.records:,} {'record' if report.records == 1 else 'records'}, {sizes.show(report.bytes)}"
    if report.first_sequence is not None:
        words += f": sequences {report.first_sequence} to {report.last_sequence}"
        if report.target_first_sequence not in (None, report.first_sequence):
            words += f", now {report.target_first_sequence} to {report.target_last_sequence}"
    if report.not_kept:
        words += f"; not kept: {', '.join(report.not_kept)}"
    print(output.escape(words))
