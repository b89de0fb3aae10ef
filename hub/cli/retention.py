"""`kvspool hub retention`: the retention rules of a hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub import HubRoot
from hub.root import retention
from hub.root.retention import EVERYBODY, HubRetention
from kvspool.cli import options, output
from kvspool.cli.options import BadInput
from kvspool.engine import sizes
from kvspool.journal import Floor, Retention

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
Show or change the retention rules of a hub. They are stored in the root, in .hub/retention.json. A running hub applies them within some
seconds, and `kvspool hub trim` does at once. Without rules all records are kept.

A PATTERN is a client's id, or a prefix and a *. Only the narrowest matching pattern applies to a client. --max-bytes limits all shards of a
client together: the oldest segment is removed first. --max-age (since the hub last wrote to a segment; with --by-record by the timestamps
of records, which clients choose), --by-readers and --floor apply to each shard. Whole segments are removed (64 MiB by default), and never
the last one of a shard. Without --force, records that a durable reader has yet to read stay; the floor is always kept. Readers get a gap
for removed records."""
EXAMPLES = """\
  kvspool hub retention /var/lib/hub                                        show the rules
  kvspool hub retention /var/lib/hub --max-age 30d                          for all clients
  kvspool hub retention /var/lib/hub --client 'jfk*' --max-bytes 50GiB --by-readers --floor records:1000000
  kvspool hub retention /var/lib/hub --client audit --none                  keep all records of this client
  kvspool hub retention /var/lib/hub --client 'jfk*' --forget               use the rules for all clients again"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = options.add_command(commands, "retention", "show or change a hub's retention rules", DESCRIPTION, EXAMPLES)
    parser.add_argument("path", metavar="ROOT", type=Path, help="the hub root")
    parser.add_argument("--client", metavar="PATTERN", help="clients that the rules apply to (default: all, '*')")
    add_limits(parser)
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--none", action="store_true", help="keep all records of these clients, even if a wider pattern has rules")
    less.add_argument("--forget", action="store_true", help="remove the rules for this pattern")
    options.add_json(parser, "print the rules as a JSON object, by pattern")
    parser.set_defaults(run=run)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options for limits."""
    options.add_retention(parser.add_argument_group("retention rules", "The journals of this page are those of a client's shards."))


def run(arguments: argparse.Namespace) -> int:
    """Change the rules if options are given, and show them."""
    HubRoot.open(arguments.path).close()
    rules = limits(arguments)
    if rules is not None and (arguments.none or arguments.forget):
        raise BadInput("--none and --forget can't be combined with limits")
    if rules is not None or arguments.none or arguments.forget:
        pattern = arguments.client or EVERYBODY
        wanted = None if arguments.forget else rules or Retention()
        found = _changed(arguments.path, pattern, wanted)
    elif arguments.client is not None:
        return _show_one(arguments)
    else:
        found = retention.load(arguments.path)
    if arguments.json:
        output.print_json(found.rules)
    elif found.rules:
        output.print_table(_table(found))
    else:
        print("all records are kept")
    return 0


def limits(arguments: argparse.Namespace) -> Retention | None:
    """Return the rules in the options; None without any. Raises BadInput for rules that would never remove anything."""
    rules = options.retention(arguments)
    if rules is not None and not rules.has_limit:
        raise BadInput("a floor or --force alone removes nothing: give --max-bytes, --max-age or --by-readers as well")
    return rules


def _changed(root: Path, pattern: str, rules: Retention | None) -> HubRetention:
    def change(now: HubRetention) -> HubRetention:
        if rules is None and pattern not in now.rules:
            raise BadInput(f"{root} has no rules for {pattern!r}; it has rules for: {', '.join(now.rules) or 'none'}")
        return now.with_rules(pattern, rules)

    with options.bad_input():
        return retention.change(root, change)


def _show_one(arguments: argparse.Namespace) -> int:
    """Show the rules for one client."""
    rules = retention.load(arguments.path).of(arguments.client)
    if arguments.json:
        output.print_json(rules)
    else:
        print(output.escape(f"{arguments.client}: {words(rules)}"))
    return 0


def words(rules: Retention | None) -> str:
    """Return rules as text."""
    if rules is None or not rules.has_limit:
        return "all records are kept"
    parts = []
    if rules.max_bytes is not None:
        parts.append(f"up to {sizes.show(rules.max_bytes)}")
    if rules.max_age is not None:
        parts.append(f"nothing older than {options.show_age(rules.max_age)}{' by its timestamps' if rules.by_record else ''}")
    if rules.by_consumers:
        parts.append("nothing that every durable reader has read")
    floor = rules.floors()
    if floor != Floor():
        known = [(name, value) for name in floor.__struct_fields__ if (value := getattr(floor, name)) is not None]
        parts.append("but keeps at least " + ", ".join(_floor(name, value) for name, value in known) + " of each shard")
    if rules.force:
        parts.append("even if durable readers have not read it")
    return ", ".join(parts)


def _floor(name: str, value: int) -> str:
    if name == "sequence":
        return f"all from sequence {value} on"
    return sizes.show(value) if name == "bytes" else f"{value:,} {name}"


def _table(found: HubRetention) -> Table:
    return output.rows(("clients", "retention rules"), [[pattern, words(rules)] for pattern, rules in sorted(found.rules.items())])
