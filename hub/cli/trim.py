"""`kvspool hub trim`: remove the oldest segments of clients."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub import HubRoot
from hub.cli.retention import add_limits, limits
from hub.root import retention
from hub.root.retention import EVERYBODY
from hub.root.trimmer import ShardTrim, Trimmer
from hub.security.access import Patterns
from kvspool import system
from kvspool.cli import options, output, trim
from kvspool.cli.options import BadInput
from kvspool.engine import sizes
from kvspool.errors import KvspoolError
from kvspool.journal import Retention

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
Remove the oldest segments of clients now: by the rules of `kvspool hub retention`, or by the options, which then replace them. This also
works next to a running hub. With --dry-run only list the segments to remove, with the reasons. Clients of removed segments keep shipping;
readers get a gap for unread records."""
EXAMPLES = """\
  kvspool hub trim /var/lib/hub --dry-run
  kvspool hub trim /var/lib/hub --client 'jfk*' --max-bytes 50GiB --dry-run
  kvspool hub trim /var/lib/hub --by-readers
  kvspool hub trim /var/lib/hub --client lga --max-age 7d --force --json | jq .removed_bytes"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = options.add_command(commands, "trim", "remove the oldest segments of clients", DESCRIPTION, EXAMPLES)
    parser.add_argument("path", metavar="ROOT", type=Path, help="the hub root")
    parser.add_argument("--client", metavar="PATTERN", default=EVERYBODY, help="clients to trim: an id, or a prefix and *")
    add_limits(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed, and change nothing")
    options.add_json(parser, "print one JSON object for each shard")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trim client by client; an error of one doesn't stop the others."""
    given = limits(arguments)
    system.port.allow_more_files()
    with HubRoot.open(arguments.path) as root:
        found, path = root.clients(), root.path
    clients = _matching(found, arguments.client)
    rules = {client: given or _rules(path, client) for client in clients}
    if clients and not any(rules.values()):
        raise BadInput(
            f"there are no rules: give --max-bytes, --max-age or --by-readers, or set rules with kvspool hub retention {path}"
        )
    trimmer, done, code = Trimmer(path), [], 0
    for client, own in rules.items():
        try:
            done += trimmer.trim(client, own, dry_run=arguments.dry_run) if own is not None else []
        except (KvspoolError, OSError) as error:
            output.complain(f"{client}: {error}")
            code = error.exit_code if isinstance(error, KvspoolError) else 1
    _show(done, arguments)
    return code


def _matching(clients: list[str], pattern: str) -> list[str]:
    try:
        patterns = Patterns.parse((pattern,))
    except ValueError as error:
        raise BadInput(str(error)) from error
    found = [client for client in clients if patterns.matches(client)]
    if not found and pattern != EVERYBODY:
        raise BadInput(f"no client is {pattern!r}; kvspool hub clients lists those that there are")
    return found


def _rules(root: Path, client: str) -> Retention | None:
    rules = retention.load(root).of(client)
    return rules if rules is not None and rules.has_limit else None


def _show(done: list[ShardTrim], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for one in done:
            output.print_json(
                {"client": one.client, "shard": one.shard, **{name: getattr(one.report, name) for name in one.report.__struct_fields__}}
            )
        return
    rows = [one for one in done if arguments.dry_run or one.report.removed_segments]
    if rows:
        output.print_table(_table(rows))
    segments, records, size = (
        sum(getattr(one.report, name) for one in done) for name in ("removed_segments", "removed_records", "removed_bytes")
    )
    does = "would remove" if arguments.dry_run else "removed"
    counts = f"{output.counted(segments, 'segment')} of {output.counted(len(done), 'shard')}: {output.counted(records, 'record')}"
    print(f"{does} {counts}, {sizes.show(size)}")
    for one in done:
        for left in one.report.left_behind:
            print(output.escape(f"{one.client} {one.shard}: the durable reader {left.name!r} loses sequences {left.first} to {left.last}"))


def _table(found: list[ShardTrim]) -> Table:
    """Return a row for each segment: the action and its reason."""
    segments = [[f"{one.client} {one.shard}", *cells] for one in found for cells in trim.rows(one.report)]
    return output.rows(("shard", *trim.TITLES), segments, trim.NUMBERS)
