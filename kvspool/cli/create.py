"""`kvspool create`: create a log."""

from __future__ import annotations

import argparse
import inspect
import os
from typing import Any

import kvspool
from kvspool.cli import options, output
from kvspool.cli.options import BadInput
from kvspool.cli.stats import members
from kvspool.engine import sizes
from kvspool.journal.formats import FORMATS
from kvspool.options import DURABILITIES
from kvspool.spool import format

_OF_SPOOLS = ("capacity", "policy", "reader_expiry")
NAME = "create"
SUMMARY = "create a log"
DESCRIPTION = """\
Create a log at PATH. Its whole capacity, 64MiB by default, is reserved on disk at once, and never exceeded: when it is full, new records
overwrite the oldest ones, unless --policy lets writers wait for durable readers. With --format a journal is created instead: a growing
directory of segments, until kvspool trim, or the rules given here, remove the oldest ones. The log is on disk, complete, when the
command returns."""
EXAMPLES = """\
  kvspool create events
  kvspool create events --capacity 1GiB --codec keyed
  kvspool create events --policy block --reader-expiry 86400
  kvspool create events --durability disk
  kvspool create /dev/shm/events --mode 640        in memory, readable by the group
  kvspool create history --format sej --segment-bytes 128MiB --max-bytes 100GiB --floor segments:2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "path of the new log; its parent directory must exist")
    parser.add_argument(
        "--format", choices=("spool", *FORMATS), default="spool", help="a spool, or a journal in such a format (default: %(default)s)"
    )
    parser.add_argument("--capacity", type=options.size, metavar="SIZE", help="of a spool: bytes, or with a unit (default: 64MiB)")
    options.add_codec(
        parser, "how structured values are stored; keyed is MessagePack with each key of a map stored once (default: %(default)s)"
    )
    parser.add_argument(
        "--policy",
        choices=format.POLICIES,
        help="of a spool: if the ring is full of records that a durable reader has yet to commit: overwrite them, block until it moves on, "
        "or raise an error (default: overwrite)",
    )
    parser.add_argument(
        "--reader-expiry",
        type=options.seconds,
        metavar="S",
        help="with block and raise: no longer wait for a reader without progress for S seconds (default: always wait)",
    )
    parser.add_argument(
        "--durability",
        choices=DURABILITIES,
        default="memory",
        help="when an append is on disk: after a sync (memory), within the sync interval (os), or at once (disk) (default: %(default)s)",
    )
    parser.add_argument("--sync-interval", type=options.interval, metavar="S", help="with os: seconds between two flushes (default: 1)")
    parser.add_argument("--exist-ok", action="store_true", help="accept an existing log of the same settings")
    options.add_files(parser)
    options.add_json(parser, "print the `stats` of the new log as a JSON object")
    _add_limits(parser.add_argument_group("journals"))
    options.add_retention(parser.add_argument_group("retention of a journal (default: everything)"))


def _add_limits(parser: argparse._ActionsContainer) -> None:
    """Add an option for each limit of any format."""
    for name, formats in _limits().items():
        one = next(iter(formats.values()))
        is_size = name.endswith("bytes")
        default = "" if one.default is one.empty else f" (default: {sizes.show(one.default) if is_size else one.default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=options.size if is_size else options.count(0),
            metavar="SIZE" if is_size else "N",
            help=f"of {', '.join(formats)}{default}",
        )


def _limits() -> dict[str, dict[str, inspect.Parameter]]:
    """Return the parameters of the formats' constructors: by name, the parameter of each format."""
    found: dict[str, dict[str, inspect.Parameter]] = {}
    for known in FORMATS.values():
        for name, parameter in inspect.signature(known).parameters.items():
            found.setdefault(name, {})[known.name] = parameter
    return found


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options that apply to the format. Raises BadInput for any other."""
    is_spool = arguments.format == "spool"
    fitting = _OF_SPOOLS if is_spool else [name for name, formats in _limits().items() if arguments.format in formats]
    given = [name for name in (*_OF_SPOOLS, *_limits()) if getattr(arguments, name) is not None]
    for name in given:
        if name not in fitting:
            what = "spool" if is_spool else f"journal in the format {arguments.format}"
            others = ", ".join(f"--{one.replace('_', '-')}" for one in fitting) or "none"
            raise BadInput(f"--{name.replace('_', '-')} is not an option of a {what}; leave it out. It has these limits: {others}")
    return {name: getattr(arguments, name) for name in given}


def run(arguments: argparse.Namespace) -> int:
    """Create the log and print its settings."""
    rules = options.retention(arguments)
    if rules is not None and arguments.format == "spool":
        raise BadInput("retention is for journals; a spool keeps the records that fit into its capacity")
    done = "opened" if arguments.exist_ok and os.path.lexists(arguments.path) else "created"
    with options.bad_input(TypeError):
        log = kvspool.create(
            arguments.path,
            format=arguments.format,
            codec=arguments.codec,
            mode=arguments.mode,
            durability=arguments.durability,
            sync_interval=arguments.sync_interval,
            allow_unsafe_fs=arguments.allow_unsafe_fs,
            retention=rules,
            exist_ok=arguments.exist_ok,
            **_given(arguments),
        )
    with log:
        stats = log.stats()
    if arguments.json:
        output.print_json(members(stats))
    elif stats.capacity:
        print(output.escape(f"{done} {stats.path}: {sizes.show(stats.capacity)}, structured values as {stats.codec}"))
    else:
        print(output.escape(f"{done} {stats.path}: a journal in the format {stats.format}"))
    return 0
