"""`kvspool ls`: the logs below a directory, as a tree."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool.cli import options, output, trees
from kvspool.cli.stats import when
from kvspool.cli.trees import FoundLog
from kvspool.engine import sizes

if TYPE_CHECKING:
    from rich.tree import Tree

NAME = "ls"
SUMMARY = "list the logs below a directory, as a tree"
DESCRIPTION = """\
List the logs, journals and queues below a directory with their kind, records, size on disk and newest record. Shard sets and hub roots are
directories with a log for each shard. Off a terminal it prints a line for each log: path, kind, records, bytes, time of the newest record,
separated by tabs. A log that can't be opened is listed with the reason."""
EXAMPLES = """\
  kvspool ls /var/spool
  kvspool ls /var/lib/hub --json | jq -r 'select(.records == 0).path'
  kvspool ls | sort -k 4 -n"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("path", metavar="PATH", type=Path, nargs="?", default=Path("."), help="a directory, or a log (default: .)")
    options.add_json(parser, "print a JSON object for each log")


def run(arguments: argparse.Namespace) -> int:
    """Print the logs."""
    top: Path = arguments.path
    screen = None if arguments.json or not output.is_terminal() else output.console()
    tree = None
    places: dict[Path, Tree] = {}
    for path, is_log in trees.walk(top):
        if screen is None:
            if is_log:
                _print(trees.look(path), is_json=arguments.json)
            continue
        if tree is None:
            from rich.tree import Tree

            tree = places[top] = Tree(output.escape(str(top)), guide_style="dim")
        words = _words(trees.look(path)) if is_log else ""
        places[path] = places[path.parent if path != top else top].add(f"{output.escape(path.name)}  {words}".rstrip())
    if tree is not None and screen is not None:
        screen.print(tree)
    return 0


def _print(log: FoundLog, *, is_json: bool) -> None:
    if is_json:
        output.print_json({**log._asdict(), "path": str(log.path)})
        return
    records = log.problem if log.records is None else str(log.records)
    newest = output.moment_of(log.newest) if log.newest else "-"
    print(*map(output.escape, (str(log.path), log.kind, records, str(log.usage), newest)), sep="\t")


def _words(log: FoundLog) -> str:
    if log.records is None:
        return output.escape(log.problem)
    newest = f", {when(log.newest)}" if log.newest else ""
    return f"{log.kind}: {output.counted(log.records, 'record')}, {sizes.show(log.usage)}{newest}"
