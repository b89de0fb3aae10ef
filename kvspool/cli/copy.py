"""`kvspool copy`: the records of one log into another one, of any format."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

import kvspool
from kvspool.cli import options, output, progress, queues, selection
from kvspool.engine import sizes
from kvspool.journal.formats import FORMATS
from kvspool.transfer.copier import CopyPlan, CopyReport
from kvspool.transfer.progress import CopyProgress

NAME = "copy"
SUMMARY = "copy the records of one log into another one, of any format"
DESCRIPTION = """\
Copy the present records of SRC to DST, which is created if necessary: spools, journals of every format, queues; and directories of
kvspool v1 as SRC. Sequence, timestamp, type, key and codec are kept if the format of DST can store them. Fields that it can't store are
listed before the copy starts, and end the command unless --lossy is given. The copy is on disk when the command returns.

After an interruption, even by a kill, the same command continues: no record is duplicated or left out. It also copies newer records of
SRC. No other program should append to DST meanwhile."""
EXAMPLES = """\
  kvspool copy events archive --format kvj
  kvspool copy events for-go --format sej --lossy
  kvspool copy events items --format fixed --item-bytes 32 --items-per-blob 100000 --lossy
  kvspool copy /var/spool/old events --capacity 1GiB      a directory of kvspool v1
  kvspool copy archive part --start 1000 --end 2000"""

LIMITS = ("segment_bytes", "total_bytes", "item_bytes", "items_per_blob", "chunk_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", metavar="SRC", type=Path, help="the source; it is not changed")
    parser.add_argument("target", metavar="DST", type=Path, help="the target; it is created if it doesn't exist")
    options.add_range(parser, "copy from START on")
    options.add_gaps(parser, "raise")
    parser.add_argument("--lossy", action="store_true", help="continue although DST can't store all fields of the records")
    parser.add_argument("--append", action="store_true", help="copy after other records of DST")
    made = parser.add_argument_group("a new DST")
    made.add_argument("--format", choices=("spool", "queue", *FORMATS), help="default: that of SRC")
    options.add_codec(made, "of structured values (default: as in SRC)", default=None)
    made.add_argument("--capacity", type=options.size, metavar="SIZE", help="of a spool (default: room for all)")
    made.add_argument("--segment-bytes", type=options.size, metavar="SIZE", help="of kvj, sej and fflg")
    made.add_argument("--total-bytes", type=options.size, metavar="SIZE", help="of fflg")
    made.add_argument("--item-bytes", type=options.size, metavar="SIZE", help="of fixed")
    made.add_argument("--items-per-blob", type=options.count(1), metavar="N", help="of fixed")
    made.add_argument("--chunk-bytes", type=options.size, metavar="SIZE", help="of a queue")
    origin = parser.add_argument_group("a SRC of another program")
    origin.add_argument("--source-format", choices=("spool", "queue", "v1", *FORMATS), help="default: detected")
    origin.add_argument("--source-item-bytes", type=options.size, metavar="SIZE", help="of fixed")
    origin.add_argument("--source-items-per-blob", type=options.count(1), metavar="N", help="of fixed")
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Copy, and print the result."""
    given = {name: getattr(arguments, name) for name in ("codec", "capacity", *LIMITS)}
    origin = {name: getattr(arguments, f"source_{name}") for name in ("item_bytes", "items_per_blob")}
    with progress.shown("copying") as show:
        with options.bad_input(TypeError):
            report = kvspool.copy(
                arguments.source,
                arguments.target,
                format=arguments.format,
                start=arguments.start,
                end=_end(arguments),
                limit=arguments.limit,
                on_gap="raise" if arguments.gaps == "raise" else "skip",
                lossy=arguments.lossy,
                append=arguments.append,
                source_format=arguments.source_format,
                source_options=_said(origin),
                before=None if arguments.json else _announce,
                progress=lambda done: show(done.records, done.all, _words(done)),
                **_said(given),
            )
    if arguments.json:
        output.print_json(report)
    else:
        _say(report, names_gaps=arguments.gaps == "yield")
    return 0


def _end(arguments: argparse.Namespace) -> int | None:
    """Return the sequence to stop at."""
    if not isinstance(arguments.end, datetime):
        return arguments.end  # type: ignore[no-any-return]
    with queues.open_log(arguments.source) as log:
        return selection.sequence_of(log, arguments.end)


def _said(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _words(done: CopyProgress) -> str:
    return f"copied {done.records:,} records, {sizes.show(done.bytes)}"


def _announce(plan: CopyPlan) -> None:
    """Print the plan."""
    words = "continuing" if plan.is_continued else "copying"
    output.complain(f"{words} {plan.source} ({plan.source_format}) to {plan.target} ({plan.format}), from sequence {plan.first_sequence}")
    if not plan.keeps_sequences:
        output.complain("sequences are not kept" + ("" if plan.target_sequence is None else f": the next one is {plan.target_sequence}"))
    if plan.may_lose:
        output.complain(f"{plan.format} can't store {', '.join(plan.may_lose)} of {plan.source_format}")


def _say(report: CopyReport, *, names_gaps: bool) -> None:
    for gap in report.gaps if names_gaps else ():
        output.complain(str(gap))
    for place in report.torn:
        output.complain(f"{place}: incomplete frame; the rest of the file was left out")
    words = f"copied {output.counted(report.records, 'record')}, {sizes.show(report.bytes)}"
    if report.first_sequence is not None:
        words += f": sequences {report.first_sequence} to {report.last_sequence}"
        if report.target_first_sequence not in (None, report.first_sequence):
            words += f", now {report.target_first_sequence} to {report.target_last_sequence}"
    if report.not_kept:
        words += f"; not kept: {', '.join(report.not_kept)}"
    print(output.escape(words))
