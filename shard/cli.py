"""`kvspool shard`: create and fill a sharded log, and show the shard of a key."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvspool import system
from kvspool.cli import append, options, output
from kvspool.cli.lines import LineReader
from kvspool.cli.options import BadInput
from kvspool.cli.stats import members
from kvspool.cli.summary import Summary
from kvspool.engine import sizes
from shard import ShardSet, route
from shard.kernel.hash import hash16

EXTRA = "arrow"
LONGEST = 1 << 30  # bytes of a line for shards that are journals

DESCRIPTION = """\
A sharded log is a directory of logs. The hash of a record's key selects one of them, so that records of the same key stay in order, and
writers of different keys don't wait for each other. `kvspool read`, `tail` and `stats` accept the root of shards like a log."""
EXAMPLES = """\
  kvspool shard create orders --bits 4
  kvspool shard append orders --json-lines --key-field customer < orders.jsonl
  kvspool shard of customer-7 --bits 4
  kvspool tail orders --follow"""

CREATE = """\
Create a set of 2^BITS shards under ROOT, which is created if it is missing. Each shard's whole capacity is reserved on disk at once:
64MiB for all of them, unless --capacity says otherwise. A record takes at most a quarter of its shard. An incomplete set of an earlier
call is completed."""
CREATE_EXAMPLES = """\
  kvspool shard create orders --bits 4                           16 shards of 4MiB: orders/4.000 to orders/4.00f
  kvspool shard create root --prefix orders --bits 4             root/orders.4.000 to root/orders.4.00f
  kvspool shard create orders --bits 4 --capacity 1GiB --codec msgpack"""

APPEND = """\
Append each line of standard input as one record to the shard of its key; PATH is the root of the shards. Records without a key take
turns. Otherwise as `kvspool append`: each shard's part of a batch is appended at once. A batch with a bad line is not appended at all."""
APPEND_EXAMPLES = """\
  kvspool shard append orders --json-lines --key-field customer < orders.jsonl
  tail -f access.log | kvspool shard append root --prefix web --json"""

OF = """\
Show the shard of a key among 2^BITS shards, that shard's directory name, and the key's hash. No log is opened: the result is the same for
every sharded log."""
OF_EXAMPLES = """\
  kvspool shard of customer-7 --bits 4
  kvspool shard of customer-7 --bits 4 --prefix orders --json | jq -r .directory"""


def add_commands(subparsers: Any) -> None:
    """Add `kvspool shard` and its commands."""
    commands = options.add_group(subparsers, "shard", "create and fill a log that is spread over shards by key", DESCRIPTION, EXAMPLES)

    create = options.add_command(commands, "create", "create a sharded log", CREATE, CREATE_EXAMPLES)
    create.add_argument("path", metavar="ROOT", type=Path, help="directory of the shards; its parent must exist")
    _add_prefix(create, default="")
    _add_bits(create)
    create.add_argument(
        "--capacity",
        type=options.size,
        metavar="SIZE",
        help="of each shard; bytes, or with a unit (default: 64MiB for all shards together, but at least 1MiB for each)",
    )
    options.add_codec(create, "how structured values are stored (default: %(default)s)")
    create.add_argument("--exist-ok", action="store_true", help="accept an existing set")
    options.add_files(create)
    options.add_json(create, "print the statistics of each shard as a JSON list")
    create.set_defaults(run=_create)

    summary = "append each line of standard input to the shard of its key"
    appending = options.add_command(commands, "append", summary, APPEND, APPEND_EXAMPLES)
    append.add_arguments(appending)
    _add_prefix(appending, default=None)
    appending.set_defaults(run=_append)

    of = options.add_command(commands, "of", "show the shard of a key", OF, OF_EXAMPLES)
    of.add_argument("key", metavar="KEY", help="the key; an empty one is a key too")
    _add_prefix(of, default="")
    _add_bits(of)
    options.add_json(of, "print a JSON object")
    of.set_defaults(run=_of)


def open_log(path: Path) -> ShardSet | None:
    """Return the shard set at a path if it is the only one there and has no prefix; None otherwise, because a hub root may have others."""
    if not path.is_dir() or list(route.scan(path)) != [""]:
        return None
    system.port.allow_more_files()  # each shard needs some
    return ShardSet.open(path, prefix="")


def _add_prefix(parser: argparse.ArgumentParser, default: str | None) -> None:
    words = "prefix of the names of the shards" + ("; required if there are several" if default is None else " (default: nothing)")
    parser.add_argument("--prefix", type=_prefix, default=default, metavar="TEXT", help=words)


def _add_bits(parser: argparse.ArgumentParser) -> None:
    words = f"there are 2^N shards, N from 0 to {route.MOST_BITS}"
    parser.add_argument("--bits", type=options.count(0, route.MOST_BITS), required=True, metavar="N", help=words)


def _prefix(text: str) -> str:
    try:
        return route.check_prefix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _create(arguments: argparse.Namespace) -> int:
    """Create the set and describe it."""
    system.port.allow_more_files()
    try:
        shards = ShardSet.create(
            arguments.path,
            prefix=arguments.prefix,
            bits=arguments.bits,
            **({} if arguments.capacity is None else {"capacity": arguments.capacity}),
            codec=arguments.codec,
            mode=arguments.mode,
            exist_ok=arguments.exist_ok,
            allow_unsafe_fs=arguments.allow_unsafe_fs,
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    with shards:
        stats = shards.stats()
    if arguments.json:
        output.print_json(members(stats))
        return 0
    first, last = (Path(one.path).name for one in (stats[0], stats[-1]))
    names = first if first == last else f"{first} to {last}"
    size = f"{sizes.show(sum(one.capacity for one in stats))} in all"
    if len(stats) > 1:
        size = f"{len(stats):,} x {sizes.show(stats[0].capacity)}, {size}"
    print(output.escape(f"created {shards.root}: {names}, {size}, structured values as {stats[0].codec}"))
    return 0


def _append(arguments: argparse.Namespace) -> int:
    """Append the lines, and report the appended records, however it ends."""
    fd = append.open_input(arguments)
    with _open(arguments) as shards:
        summary = ShardSummary(shards, shows_progress=append.shows_progress(fd))
        longest = min((one.capacity for one in shards.shards if one.capacity), default=LONGEST)
        try:
            for batch in LineReader(fd, most=arguments.batch, longest=longest).batches():
                try:
                    summary.add_parts(append.append_batch(shards, batch, arguments))
                except BaseException as error:
                    summary.add_parts({shard: ranges[0] for shard, ranges in getattr(error, "parts", {}).items()})
                    raise
        finally:
            summary.print(arguments)
    return 0


class ShardSummary(Summary):
    """The appended records so far, and their shards."""

    def __init__(self, shards: ShardSet, *, shows_progress: bool) -> None:
        super().__init__(shows_progress=shows_progress)
        self._names = [one.path.name for one in shards.shards]
        self._counts = [0] * len(self._names)

    def add_parts(self, written: dict[int, range]) -> None:
        """Count a batch's records in each shard."""
        for shard, sequences in written.items():
            self._counts[shard] += len(sequences)
        total = sum(len(sequences) for sequences in written.values())
        if total:
            self.add(range(self.count, self.count + total))

    def _places(self) -> dict[str, Any]:
        return {"shards": self._filled()}

    def _where(self) -> str:
        filled = self._filled()
        return f" to {len(filled):,} of {len(self._names):,} shards" if filled else ""

    def _filled(self) -> dict[str, int]:
        """Return the number of records of each shard that has any."""
        return {name: count for name, count in zip(self._names, self._counts, strict=True) if count}


def _open(arguments: argparse.Namespace) -> ShardSet:
    system.port.allow_more_files()
    try:
        return ShardSet.open(arguments.path, prefix=arguments.prefix)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _of(arguments: argparse.Namespace) -> int:
    """Print the key's shard."""
    key = os.fsencode(arguments.key)
    shard = route.shard_of(key, arguments.bits)
    try:
        directory = route.directory_name(arguments.prefix, arguments.bits, shard)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if arguments.json:
        output.print_json({"shard": shard, "shards": 1 << arguments.bits, "directory": directory, "hash": hash16(key)})
    else:
        print(f"shard {shard} of {1 << arguments.bits}: {directory} (hash {hash16(key):04x})")
    return 0
