"""`kvspool hub status`, `promote`, `drain` and `rejoin`: hubs that have copies of the same clients."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub import HubRoot
from hub.cli import security, signals
from hub.cli.ship import location
from kvspool import system
from kvspool.cli import options, output
from kvspool.cli.options import BadInput

if TYPE_CHECKING:

    from rich.table import Table

    from hub.client.comparison import Comparison

STATUS = """\
Compare the shards of several hubs: which hub has what, and how many records are at one hub, at two, and so on. Each line is a client; with
--shards it is a shard. Below are the shards that are at fewer hubs than --copies, with what to do. The exit code is 1 if there are any, or
if a hub doesn't answer. The user needs the right to list the clients."""
STATUS_EXAMPLES = """\
  kvspool hub status grpc+tls://hub1:7070 grpc+tls://hub2:7070 --ca ca.pem --token-file operator.token
  kvspool hub status hub://h1:7070 hub://h2:7070 hub://h3:7070 --copies 2 --json | jq '.shards[] | select(.complete < 2)'"""

PROMOTE = """\
Make a mirror a hub of its own: from now on it accepts the records of shippers, which continue after the records that are here. Stop the
mirror (`kvspool ship hub://... ROOT`) before; the hub that serves ROOT may run. Do this when the mirrored hub is lost: records that only
that hub had are sent again by shippers whose logs still hold them."""
PROMOTE_EXAMPLES = """\
  kvspool hub promote /var/lib/hub"""

DRAIN = """\
Take a hub out of service: it accepts no more records, and still serves readers and other hubs. With the addresses of OTHER hubs the command
then waits until they have every record of ROOT, and shows what is left; after that the hub can be stopped. --undo lets it accept records
again."""
DRAIN_EXAMPLES = """\
  kvspool hub drain /var/lib/hub grpc+tls://hub2:7070 --ca ca.pem --token-file operator.token
  kvspool hub drain /var/lib/hub --undo"""

REJOIN = """\
Bring ROOT up to date from another hub, before `kvspool hub serve` serves it: a new directory instead of a lost disk, a hub that was away
for long, or a mirror. All records, gaps and earlier logs of the other hub are pulled, to disk. Shards that have more than the other hub
stay as they are. Then shippers may write here; they continue after the records that are here. Stop the hub of ROOT before."""
REJOIN_EXAMPLES = """\
  kvspool hub rejoin /var/lib/hub grpc+tls://hub2:7070 --ca ca.pem --token-file operator.token"""


def add(commands: Any) -> None:
    """Add the commands."""
    status = commands.add_parser("status", help="compare hubs with copies", description=STATUS, epilog=f"Examples:\n{STATUS_EXAMPLES}")
    status.add_argument("hubs", metavar="HUB", nargs="+", type=location, help="grpc+tls://HOST:PORT (or hub://) of each hub")
    status.add_argument("--copies", type=options.count(1), metavar="N", help="hubs that each shard should be at (default: all)")
    status.add_argument("--shards", action="store_true", help="show a line for each shard")
    security.add(status)
    options.add_json(status, "print a JSON object, with all shards")
    status.set_defaults(run=_status)

    promote = commands.add_parser(
        "promote", help="let a mirror accept records", description=PROMOTE, epilog=f"Examples:\n{PROMOTE_EXAMPLES}"
    )
    promote.add_argument("path", metavar="ROOT", type=Path, help="the root of the mirror")
    promote.set_defaults(run=_promote)

    drain = commands.add_parser("drain", help="take a hub out of service", description=DRAIN, epilog=f"Examples:\n{DRAIN_EXAMPLES}")
    drain.add_argument("path", metavar="ROOT", type=Path, help="the hub root")
    drain.add_argument("others", metavar="OTHER", nargs="*", type=location, help="hubs that have to get all records")
    drain.add_argument("--undo", action="store_true", help="accept records again")
    drain.add_argument("--interval", type=options.interval, metavar="S", default=2.0, help="between two comparisons (default: %(default)s)")
    security.add(drain)
    drain.set_defaults(run=_drain)

    rejoin = commands.add_parser("rejoin", help="bring a root up to date", description=REJOIN, epilog=f"Examples:\n{REJOIN_EXAMPLES}")
    rejoin.add_argument("path", metavar="ROOT", type=Path, help="the hub root; a missing one is created")
    rejoin.add_argument("hub", metavar="HUB", type=location, help="grpc+tls://HOST:PORT (or hub://) of the hub that has the records")
    rejoin.add_argument("--level", choices=("process", "disk"), default="disk", help="durability of the pulled records (%(default)s)")
    security.add(rejoin)
    rejoin.set_defaults(run=_rejoin)


def _status(arguments: argparse.Namespace) -> int:
    """Compare the hubs."""
    from hub.client.comparison import compare

    if arguments.copies is not None and arguments.copies > len(arguments.hubs):
        raise BadInput(f"--copies is at most the number of hubs, {len(arguments.hubs)}, not {arguments.copies}")
    with options.bad_input():
        found = compare(arguments.hubs, security.load(arguments), arguments.copies)
    if arguments.json:
        output.print_json(found)
    else:
        output.print_table(_table(found, arguments.shards))
        for words in found.troubles():
            output.complain(words)
    return 1 if found.troubles() else 0


def _table(found: Comparison, by_shard: bool) -> Table:
    """Return a row for each client or shard, with the missing records at each hub."""
    counts = (f"at {output.counted(count + 1, 'hub')}" for count in range(len(found.hubs)))
    numbers = ("shard" if by_shard else "shards", "end", *found.hubs, *counts)
    rows = []
    groups: dict[tuple[str, int], list[Any]] = {}
    for one in found.shards:
        groups.setdefault((one.client, one.shard if by_shard else -1), []).append(one)
    for (client, shard), shards in groups.items():
        cells = [client, str(shard if by_shard else len(shards)), f"{sum(one.next for one in shards):,}"]
        for hub in found.hubs:
            there = [copy for one in shards for copy in one.copies if copy.hub == hub]
            lacking = sum(copy.missing for copy in there)
            is_damaged = any(copy.error for copy in there)
            cells.append("damaged" if is_damaged else "-" if not there else f"lacks {lacking:,}" if lacking else "all")
        cells += [f"{sum(one.stored[at] for one in shards if len(one.stored) > at):,}" for at in range(len(found.hubs))]
        rows.append(cells)
    return output.rows(("client", *numbers), rows, numbers)


def _promote(arguments: argparse.Namespace) -> int:
    """Remove the marks of a mirror."""
    from hub.root.promotion import promote

    with HubRoot.open(arguments.path) as root:
        path = root.path
    clients = promote(path)
    if not clients:
        print(output.escape(f"{path} is no mirror, or was promoted before: shippers may write to all of its clients"))
        return 0
    print(output.escape(f"promoted {path}: shippers may write to {len(clients):,} client{'s' * (len(clients) != 1)}: {', '.join(clients)}"))
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    """Refuse records, and wait until other hubs have all of them."""
    from hub.root.draining import set_draining
    from hub.root.store import PRIVATE

    if arguments.undo and arguments.others:
        raise BadInput("--undo takes no other hubs")
    secure = security.load(arguments)
    with HubRoot.open(arguments.path) as root:
        set_draining(root.path / PRIVATE, not arguments.undo)
        if arguments.undo:
            print(output.escape(f"{root.path} accepts records again"))
            return 0
        print(output.escape(f"{root.path} accepts no more records"), flush=True)
        if arguments.others:
            _wait_for_others(root, arguments, secure)
            print(output.escape(f"the other hubs have all records of {root.path}: its hub can be stopped"))
    return 0


def _wait_for_others(root: HubRoot, arguments: argparse.Namespace, secure: Any) -> None:
    """Return when other hubs have every record of a root; show what is left, when it changes."""
    from hub.client.comparison import missing_elsewhere

    shown = None
    system.port.sleep(1.5)  # a running hub notices the mark within a second
    while (left := missing_elsewhere(root, arguments.others, secure))[0]:
        if left != shown:
            output.complain(f"{output.counted(left[0], 'record')} of {output.counted(left[1], 'shard')} are only here")
            shown = left
        system.port.sleep(arguments.interval)


def _rejoin(arguments: argparse.Namespace) -> int:
    """Pull all records of another hub."""
    from hub.client.rejoining import rejoin

    security.load(arguments)  # reports an invalid file at once
    with ExitStack() as stack, options.bad_input():
        mirror = rejoin(
            arguments.path,
            arguments.hub,
            security=partial(security.load, arguments),
            level=arguments.level,
            began=lambda mirror: stack.enter_context(signals.stopping(mirror.stop)),
        )
    status = mirror.status()
    if mirror.is_stopped:
        output.complain(f"interrupted after {output.counted(status.pulled, 'record')}; call it again to continue")
        return 130
    counts = f"{output.counted(status.pulled, 'record')} of {output.counted(len(status.shards), 'shard')}"
    print(output.escape(f"pulled {counts} into {status.root}: serve it now"))
    return 0
