"""`kvspool hub stats`: what a hub has."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.cli import figures
from hub.cli.figures import HubFigures
from kvspool import sizes, system
from kvspool.cli import options, output
from kvspool.cli.stats import when

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
Show what a hub has: its clients with shards, records, bytes, generations (how many logs were shipped, one after the other, since a log
that is made anew begins another one) and the last record, and how far its durable readers are behind. Of a hub that runs it also shows
what it alone knows, if the address of its page is given: what is lost, what clients have that it hasn't, who is connected, quotas.
The exit code is 1 if a hub that runs can't do its work, or a shard is damaged; the figures of the others are shown."""
EXAMPLES = """\
  kvspool hub stats /var/lib/hub
  kvspool hub stats http://127.0.0.1:7071
  kvspool hub stats http://127.0.0.1:7071 --json | jq '.readers[] | select(.lag > 1000000)'
  kvspool hub stats /var/lib/hub --shards           a line for each shard"""
_URL = re.compile(r"https?://")


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("stats", help="show what a hub has", description=DESCRIPTION, epilog=f"Examples:\n{EXAMPLES}")
    parser.add_argument("source", metavar="ROOT|URL", help="the hub root, or http://HOST:PORT of a running hub's page")
    parser.add_argument("--shards", action="store_true", help="a line for each shard")
    options.add_json(parser, "the same as a JSON object, with the figures of each shard")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the figures."""
    found = load(arguments.source)
    if arguments.json:
        output.print_json(found)
    else:
        show(found, arguments.shards)
    return 1 if found.troubles else 0


def load(source: str) -> HubFigures:
    """Return the figures of a root, or of a running hub."""
    if _URL.match(source):
        return figures.of_page(source)
    system.port.allow_more_files()
    return figures.of_root(Path(source))


def show(found: HubFigures, by_shard: bool) -> None:
    """Print figures for people."""
    shards = sum(len(client.shards) for client in found.clients)
    records, used = sum(client.records for client in found.clients), sum(client.used for client in found.clients)
    words = f"{len(found.clients):,} clients, {shards:,} shards, {records:,} records, {sizes.show(used)}"
    print(output.escape(f"{found.source}: {words}"))
    for trouble in found.troubles:
        output.complain(trouble)
    if found.clients:
        output.console().print(_shards(found) if by_shard else _clients(found))
    if found.readers:
        output.console().print(_readers(found))


def _clients(found: HubFigures) -> Table:
    rows = []
    for one in found.clients:
        there, all = len(one.shards), 1 << one.bits
        figures = [one.generations, one.lost, one.behind, one.connections]
        rows.append(
            [
                one.client,
                f"{there:,}" if there == all else f"{there:,} of {all:,}",
                f"{one.records:,}",
                sizes.show(one.used) + (f" of {sizes.show(one.quota_bytes)}" if one.quota_bytes else ""),
                *map(_number, figures),
                when(one.last_timestamp),
            ]
        )
    return _table("client", ["shards", "records", "bytes", "generations", "lost", "behind", "connections"], "last record", rows)


def _shards(found: HubFigures) -> Table:
    rows = []
    for client in found.clients:
        for one in client.shards:
            places = [f"{one.first_sequence:,}", f"{one.next_sequence:,}", f"{one.records:,}", sizes.show(one.used)]
            rows.append(
                [f"{client.client} {one.index}", *places, *map(_number, (one.generations, one.lost, one.behind)), when(one.last_timestamp)]
            )
    return _table("shard", ["first", "next", "records", "bytes", "generations", "lost", "behind"], "last record", rows)


def _readers(found: HubFigures) -> Table:
    return _table("durable reader", ["records behind"], "", [[one.name, _number(one.lag), ""] for one in found.readers])


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _table(first: str, middle: list[str], last: str, rows: list[list[str]]) -> Table:
    """Return a table: names, figures, and what is neither."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold cyan")
    table.add_column(first, overflow="fold")
    for name in middle:
        table.add_column(name, justify="right")
    if last:
        table.add_column(last)
    for row in rows:
        table.add_row(*(Text(output.escape(cell)) for cell in (row if last else row[:-1])))
    return table
