"""`kvspool group`: show the groups of a log, a shard set or a hub root, or reset one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvspool.cli import options, output, plugins
from kvspool.cli.options import BadInput
from kvspool.cli.stats import when
from kvspool.engine import sizes
from kvspool.errors import NoSuchReader
from kvspool.groups.verb import HasGroups

if TYPE_CHECKING:
    from rich.table import Table

    from kvspool.groups.stats import GroupStats

NAME = "group"
SUMMARY = "show the groups of processes that share a log, a shard set or a hub root"
DESCRIPTION = """\
Show groups: the processes that share the shards of a log, a shard set or a hub root, since when, their shards, and the lag of the group in
records, bytes and seconds. With --json one object for each group, with the field names of the library. A group without members is shown,
too: its positions are those of the durable reader of its name."""
EXAMPLES = """\
  kvspool group root
  kvspool group root billing --json | jq .lag.records
  kvspool group root billing --reset earliest                  it must have no member
  kvspool group root billing --reset 2026-01-31T12:00:00Z"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log, shard set or hub root")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the group (default: all)")
    options.add_json(parser, "one JSON object for each group")
    words = "move the group to earliest, latest, an age such as -5m, or a time such as 2026-01-31T12:00:00Z; it must have no member"
    parser.add_argument("--reset", metavar="START", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Print the groups, or reset one."""
    with plugins.opened(arguments.path) as log:
        if not isinstance(log, HasGroups):
            raise BadInput(f"{arguments.path} is a queue; queues have no groups")
        if arguments.reset is not None:
            _reset(log, arguments.name, arguments.reset)
            return 0
        found = [one for one in log.groups() if arguments.name in (None, one.name)]
    if arguments.name is not None and not found:
        raise NoSuchReader(f"{arguments.path} has no group {arguments.name!r}")
    if arguments.json:
        for one in found:
            output.print_json(one)
    else:
        for one in found:
            _print(one)
        if not found:
            print(f"{output.escape(str(arguments.path))} has no group")
    return 0


def _reset(log: Any, name: str | None, text: str) -> None:
    if name is None:
        raise BadInput("--reset needs the NAME of a group")
    with options.bad_input(argparse.ArgumentTypeError):
        start = options.start(text)
        if isinstance(start, int):
            raise BadInput("each shard has its own sequences: reset a group to earliest, latest, or a time")
        log.reset_group(name, start)
    print(output.escape(f"the group {name!r} continues at {text}"))


def _print(one: GroupStats) -> None:
    lag = one.lag
    words = "unknown"
    if lag is not None:
        words = f"{output.counted(lag.records, 'record')}, {sizes.show(lag.bytes or 0)}, {lag.seconds or 0:,.1f} s"
    counts = f"{output.counted(len(one.members), 'member')}, {output.counted(one.shards, 'shard')}, {len(one.unowned)} without an owner"
    print(output.escape(f"{one.name}: {counts}; lag {words}"))
    if one.problem:
        print(output.escape(one.problem))
    if one.members:
        output.print_table(_table(one))


def _table(one: GroupStats) -> Table:
    """Return a row for each member."""
    rows = []
    for member in one.members:
        silence = "-" if member.max_silence is None else f"{member.max_silence:g} s"
        rows.append([member.process, when(member.joined), silence, str(len(member.shards)), ", ".join(map(_shown, member.shards))])
    return output.rows(("process", "joined", "max silence", "shards", "which"), rows, ["shards"])


def _shown(shard: Any) -> str:
    return f"{shard[0]}/{shard[1]}" if isinstance(shard, tuple) else str(shard)
