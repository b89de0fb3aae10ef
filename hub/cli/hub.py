"""`kvspool hub`: create, inspect, serve and maintain a hub root."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub import ClientStats, HubReaderStats, HubRoot
from hub.cli import access, copies, counts, demo, retention, serve, ship, trim, verify
from hub.cli import stats as hub_stats
from kvspool import system
from kvspool.cli import options, output, stats
from kvspool.cli.checks import Check
from kvspool.engine import sizes
from kvspool.errors import Corruption

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
A hub root is a directory that holds the shards of many clients, each with its id as their prefix. Readers of the root read all shards,
including those of later clients. `kvspool read`, `tail` and `stats` accept a hub root like a log."""
EXAMPLES = """\
  kvspool hub create flights
  kvspool shard create flights --prefix JFK --bits 2        a client of the hub root: the prefix is its id
  kvspool hub serve --root flights --anonymous              the root over the network; see its --help for safe options
  kvspool hub clients flights
  kvspool hub readers flights
  kvspool hub retention flights --max-age 30d --by-readers
  kvspool tail flights --follow"""

CREATE = """\
Create an empty directory for a hub root, accessible only to its owner. Clients create their shards there, with `kvspool shard create`
or in a program; the id of a client has up to 100 letters, digits, _ and -."""
CREATE_EXAMPLES = """\
  kvspool hub create flights
  kvspool hub create /dev/shm/flights --json        in memory"""

CLIENTS = """\
List the clients of a hub root: the number of shards, the number of logs that were shipped to them one after the other (generations),
records, fill level, and time of the last record. `kvspool hub stats` shows more about a running hub. With --json it is one list, with
the field names of the library and the statistics of each shard; times are ns since 1970."""
CLIENTS_EXAMPLES = """\
  kvspool hub clients flights
  kvspool hub clients flights --json | jq '.[] | {client, records}'"""

READERS = """\
List the durable readers of a hub root: lag in records over all shards, time of the last commit, and holder. With --json it is one list,
with the field names of the library and the position in each shard."""
READERS_EXAMPLES = """\
  kvspool hub readers flights
  kvspool hub readers flights --json | jq '.[] | {name, behind: .lag.records}'
  kvspool hub readers flights --delete spark        it must not be open"""


def add_commands(subparsers: Any) -> None:
    """Add `kvspool hub` and its commands."""
    commands = options.add_group(subparsers, "hub", "serve a hub; inspect and maintain it", DESCRIPTION, EXAMPLES)

    create = options.add_command(commands, "create", "create a hub root", CREATE, CREATE_EXAMPLES)
    create.add_argument("path", metavar="ROOT", type=Path, help="path of the new directory; its parent must exist")
    options.add_json(create, "print the path as a JSON object")
    create.set_defaults(run=_create)

    clients = options.add_command(commands, "clients", "list the clients of a hub root", CLIENTS, CLIENTS_EXAMPLES)
    clients.add_argument("path", metavar="ROOT", type=Path, help="the hub root")
    options.add_json(clients, "print a JSON list, with the statistics of each shard")
    clients.set_defaults(run=_clients)
    readers = options.add_command(commands, "readers", "list the durable readers, or delete one", READERS, READERS_EXAMPLES)
    readers.add_argument("path", metavar="ROOT", type=Path, help="the hub root")
    which = readers.add_mutually_exclusive_group()
    options.add_json(which, "print a JSON list, with the position in each shard")
    which.add_argument("--delete", metavar="NAME", help="delete this reader and its positions")
    readers.set_defaults(run=_readers)

    for command in (hub_stats, copies, retention, trim, verify, access, serve):
        command.add(commands)
    ship.add(subparsers)
    demo.add(subparsers)


def open_log(path: Path) -> HubRoot | None:
    """Return the hub root at a path if it has clients; None otherwise, because names that are no client ids may form a shard set."""
    if not path.is_dir():
        return None
    system.port.allow_more_files()  # each shard needs some
    root = _ShardByShard.open(path)
    if root.clients():
        return root
    root.close()
    return None


def checks() -> Iterator[Check]:
    """Yield the checks of `kvspool doctor` for hubs. Only Spark needs Java, so its absence is no failure."""
    from hub.spark.java import JavaNotFound, find_java

    try:
        yield Check("Java", "ok", str(find_java()))
    except JavaNotFound as error:
        found, _, advice = str(error).partition(". ")
        yield Check("Java", "warn", found, advice)


class _ShardByShard(HubRoot):
    """A hub root with the statistics of its shards, as the commands show a log that consists of several."""

    def stats(self, damaged: list[str] | None = None) -> Any:
        return [shard for client in super().stats(damaged).clients for shard in client.shards]


def _create(arguments: argparse.Namespace) -> int:
    """Create the directory."""
    with HubRoot.create(arguments.path) as root:
        if arguments.json:
            output.print_json({"path": str(root.path)})
        else:
            print(output.escape(f"created {root.path}: clients create their shards there"))
    return 0


def _clients(arguments: argparse.Namespace) -> int:
    """Print the clients."""
    system.port.allow_more_files()
    with HubRoot.open(arguments.path) as root:
        damaged: list[str] = []
        found = root.stats(damaged).clients
    if arguments.json:
        output.print_json(found)
    elif found:
        output.print_table(_table(found))
    else:
        print("no clients yet", file=sys.stderr)
    for words in damaged:
        output.complain(words)
    return Corruption.exit_code if damaged else 0


def _readers(arguments: argparse.Namespace) -> int:
    """Print the durable readers, or delete one."""
    system.port.allow_more_files()
    with HubRoot.open(arguments.path) as root:
        if arguments.delete is not None:
            return _delete(root, arguments.delete)
        found = root.readers()
    if arguments.json:
        output.print_json(found)
    elif found:
        output.print_table(_table_of_readers(found))
    else:
        print("no durable readers", file=sys.stderr)
    return 0


def _delete(root: HubRoot, name: str) -> int:
    with options.bad_input():
        root.delete_reader(name)
    print(output.escape(f"deleted the reader {name!r}"))
    return 0


def _table_of_readers(readers: list[HubReaderStats]) -> Table:
    """Return a row for each reader."""
    rows = []
    for one in readers:
        lag = ["-", "-"] if one.lag is None else [f"{len(one.lag.shards):,}", f"{one.lag.records:,}"]
        state = one.problem or (f"open: {one.holder}" if one.holder else f"moved by {one.owner}" if one.owner else "closed")
        rows.append([one.name, *lag, stats.when(one.updated), state])
    numbers = ("shards", "lag in records")
    return output.rows(("reader", *numbers, "committed", "state"), rows, numbers)


def _table(clients: list[ClientStats]) -> Table:
    """Return a row for each client."""
    rows = []
    for client in clients:
        there, all = len(client.shards), 1 << client.bits
        shards = f"{there:,}" if there == all else f"{there:,} of {all:,}"
        capacity = sizes.show(client.capacity) if client.capacity else "-"
        last = stats.when(client.last_timestamp)
        rows.append([client.client, shards, f"{client.records:,}", _used(client), capacity, _generations(client), last])
    numbers = ("shards", "records", "used", "capacity", "generations")
    return output.rows(("client", *numbers, "last record"), rows, numbers)


def _used(client: ClientStats) -> str:
    """Return the bytes of a client's records; with their share of the capacity, which journals don't have."""
    share = f" ({100 * client.used / client.capacity:.0f} %)" if client.capacity else ""
    return f"{sizes.show(client.used)}{share}"


def _generations(client: ClientStats) -> str:
    """Return the largest number of logs shipped to one shard; "-" for a client of this host, which writes directly."""
    most = max((counts.generations(Path(one.path)) or 0 for one in client.shards), default=0)
    return f"{most:,}" if most else "-"
