"""`kvspool trim`: remove the oldest segments of a journal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

import kvspool
from kvspool import KvspoolError
from kvspool.cli import options, output
from kvspool.cli.options import BadInput
from kvspool.engine import sizes
from kvspool.engine.retention import TrimReport
from kvspool.journal import Retention

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

NAME = "trim"
SUMMARY = "remove the oldest segments of a journal"
DESCRIPTION = """\
Remove the oldest whole segments of a journal, never the last one, while others append and read. A segment is removed if a limit says so
(--max-bytes, --max-age, --by-readers, --before), unless the floor keeps it, or a durable reader has yet to read it. With --force it is
removed before that reader has read it; the reader gets a gap. The floor always holds. Without a limit the journal's own rules apply.
With --dry-run only print the segments to remove, and why. With --set the rules are stored with the journal, and applied by the writer
that begins a segment; with --set and no rule the stored rules are deleted."""
EXAMPLES = """\
  kvspool trim events --max-bytes 10GiB --dry-run
  kvspool trim events --by-readers --floor records:1000000
  kvspool trim events --max-age 30d --force --set
  kvspool trim events --before 5000000 --json | jq .removed_bytes"""


NUMBERS = ("segment from", "records", "size", "age")
TITLES = (*NUMBERS, "", "why", "not read by")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the journal")
    options.add_retention(parser)
    parser.add_argument("--before", type=options.count(0), metavar="SEQUENCE", help="remove segments wholly before this sequence")
    parser.add_argument("--dry-run", action="store_true", help="print the segments to remove, and change nothing")
    parser.add_argument("--set", action="store_true", help="store these rules with the journal, and apply them now")
    options.add_timeout(parser, 10.0)
    options.add_json(parser, "print the report as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Trim, and print the result."""
    rules = options.retention(arguments)
    with options.opened_journal(arguments.path, "it overwrites its oldest records when it is full") as log:
        if arguments.set and not arguments.dry_run:
            log.set_retention(rules, arguments.timeout)
            if rules is None and arguments.before is None:
                print(output.escape(f"{log.path}: segments are no longer removed automatically"))
                return 0
        report = _trimmed(log, rules, arguments)
    if arguments.json:
        output.print_json(report)
    else:
        output.print_table(_table(report))
        _say(report)
    return 0


def _trimmed(log: kvspool.Log, rules: Retention | None, arguments: argparse.Namespace) -> TrimReport:
    if rules is not None and not rules.has_limit and arguments.before is None:
        rules = _together(log.retention, rules)
    try:
        return log.trim(rules, before=arguments.before, force=arguments.force, dry_run=arguments.dry_run, timeout=arguments.timeout)
    except KvspoolError:
        raise
    except ValueError as error:
        words = "no rule to apply: give --max-bytes, --max-age, --by-readers or --before"
        raise BadInput(f"{words}; {log.path} has no rules of its own") from error


def _together(own: Retention | None, rules: Retention) -> Retention:
    """Return the journal's own rules with another floor, or with force."""
    if own is None:
        return rules
    floor = own.floor if rules.floor is None else rules.floor
    return msgspec.structs.replace(own, floor=floor, force=own.force or rules.force)


def _table(report: TrimReport) -> Table:
    return output.rows(TITLES, rows(report), NUMBERS)


def rows(report: TrimReport) -> Iterator[list[str | Text]]:
    """Yield a row for each segment: whether it is removed, and why."""
    from rich.text import Text

    for one in report.plan.segments:
        what = ("would go" if report.dry_run else "goes", "yellow") if one.goes else ("stays", "green")
        numbers = [f"{one.base:,}", f"{one.records:,}", sizes.show(one.bytes), options.show_age(one.age)]
        yield [*numbers, Text(*what), one.why, ", ".join(one.held_by)]


def _say(report: TrimReport) -> None:
    words = "would remove" if report.dry_run else "removed"
    segments, records = output.counted(report.removed_segments, "segment"), output.counted(report.removed_records, "record")
    print(f"{words} {segments}: {records}, {sizes.show(report.removed_bytes)}")
    for one in report.left_behind:
        print(output.escape(f"the durable reader {one.name!r} loses sequences {one.first} to {one.last}: it gets a gap"))
