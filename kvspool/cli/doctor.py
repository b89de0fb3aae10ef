"""`kvspool doctor`: check this host, a directory, or a log."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from kvspool.cli import checks, options, output, plugins
from kvspool.cli.checks import Check

NAME = "doctor"
SUMMARY = "check this host, and the log at a path"
DESCRIPTION = """\
Check kvspool's requirements on this host, and say how to meet missing ones. With the PATH of a directory check its file system; with that
of a log read all of it and check every checksum. The exit code is 1 if a check failed; warnings don't count."""
EXAMPLES = """\
  kvspool doctor
  kvspool doctor /var/spool/events
  kvspool doctor events --json | jq '.checks[] | select(.state != "ok")'"""

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", metavar="PATH", type=Path, nargs="?", help="a log, or a directory for logs")
    options.add_json(parser, "print the results as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check, and print the results."""
    place = Path(tempfile.gettempdir()) if arguments.path is None else arguments.path.absolute()
    of_log = () if arguments.path is None else checks.of_log(place)
    done = list(chain(checks.of_host(), plugins.checks(), checks.of_place(place), of_log))
    is_fit = all(check.state != "fail" for check in done)
    if arguments.json:
        output.print_json({"ok": is_fit, "checks": done})
    else:
        _print(done)
    return 0 if is_fit else 1


def _print(done: Sequence[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for check in done:
        found = Text(output.escape(check.found))
        if check.advice:
            found.append(f"\n{output.escape(check.advice)}", style="italic")
        table.add_row(Text(*_MARKS[check.state]), Text(check.name, style="cyan"), found)
    output.print_table(table)
    states = [check.state for check in done]
    print(f"\n{states.count('ok')} ok, {output.counted(states.count('warn'), 'warning')}, {states.count('fail')} failed")
