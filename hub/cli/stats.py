"""`kvspool hub stats`: the content of a hub."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.cli import counts
from hub.cli.counts import ClientCounts, HubCounts, ShardCounts
from kvspool import system
from kvspool.cli import options, output
from kvspool.cli.stats import when
from kvspool.engine import sizes

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
Show the content of a hub: its clients with shards, records, bytes, generations (the number of logs shipped one after the other; a recreated
log begins a new one) and last record, and the lag of its durable readers. With the address of its page, a running hub also reports lost
records, records that only clients have, connections, and quotas. The exit code is 1 if a running hub can't work, or a shard is damaged;
the other shards are shown nevertheless."""
EXAMPLES = """\
  kvspool hub stats /var/lib/hub
  kvspool hub stats http://127.0.0.1:7071
  kvspool hub stats http://127.0.0.1:7071 --json | jq '.readers[] | select(.lag > 1000000)'
  kvspool hub stats /var/lib/hub --shards           a line for each shard"""
_URL = re.compile(r"https?://")


def add(commands: Any) -> None:
    """Add the command."""
    parser = options.add_command(commands, "stats", "show the content of a hub", DESCRIPTION, EXAMPLES)
    parser.add_argument("source", metavar="ROOT|URL", help="the hub root, or http://HOST:PORT of a running hub's page")
    parser.add_argument("--shards", action="store_true", help="show a line for each shard")
    options.add_json(parser, "print a JSON object, with the statistics of each shard")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the statistics."""
    found = load(arguments.source)
    if arguments.json:
        output.print_json(found)
    else:
        show(found, arguments.shards)
    return 1 if found.troubles else 0


def load(source: str) -> HubCounts:
    """Return the statistics of a root, or of a running hub."""
    if _URL.match(source):
        return counts.of_page(source)
    system.port.allow_more_files()
    return counts.of_root(Path(source))


def show(found: HubCounts, by_shard: bool) -> None:
    """Print statistics as tables."""
    shards = sum(len(client.shards) for client in found.clients)
    records, used = sum(client.records for client in found.clients), sum(client.used for client in found.clients)
    words = ", ".join(map(output.counted, (len(found.clients), shards, records), ("client", "shard", "record")))
    print(output.escape(f"{found.source}: {words}, {sizes.show(used)}"))
    for trouble in found.troubles:
        output.complain(trouble)
    if found.clients:
        output.print_table(_shards(found) if by_shard else _clients(found))
    if found.readers:
        output.print_table(_readers(found))


def _clients(found: HubCounts) -> Table:
    rows = []
    for one in found.clients:
        there, all = len(one.shards), 1 << one.bits
        rows.append(
            [
                one.client,
                f"{there:,}" if there == all else f"{there:,} of {all:,}",
                f"{one.records:,}",
                sizes.show(one.used) + (f" of {sizes.show(one.quota_bytes)}" if one.quota_bytes else ""),
                *map(_number, (one.generations, one.lost)),
                _missing(one),
                _number(one.connections),
                when(one.last_timestamp),
            ]
        )
    numbers = ("shards", "records", "bytes", "generations", "lost", "behind", "connections")
    return output.rows(("client", *numbers, "last record"), rows, numbers)


def _shards(found: HubCounts) -> Table:
    rows = []
    for client in found.clients:
        for one in client.shards:
            places = [f"{one.first_sequence:,}", f"{one.next_sequence:,}", f"{one.records:,}", sizes.show(one.used)]
            counts = [_number(one.generations), _number(one.lost), _missing(one)]
            rows.append([f"{client.client} {one.index}", *places, *counts, when(one.last_timestamp)])
    numbers = ("first", "next", "records", "bytes", "generations", "lost", "behind")
    return output.rows(("shard", *numbers, "last record"), rows, numbers)


def _missing(one: ClientCounts | ShardCounts) -> str:
    """Return the records that only the client has; an estimate is marked."""
    return f"{'≈ ' if one.behind_is_estimate else ''}{_number(one.behind)}"


def _readers(found: HubCounts) -> Table:
    rows = [[one.name, _number(one.lag)] for one in found.readers]
    return output.rows(("durable reader", "lag in records"), rows, ["lag in records"])


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
