"""`kvspool create`: make a log."""

from __future__ import annotations

import argparse

import kvspool
from kvspool import sizes
from kvspool.cli import options, output
from kvspool.cli.options import BadInput
from kvspool.record import STRUCTURED
from kvspool.spool import format

NAME = "create"
SUMMARY = "make a log"
DESCRIPTION = """\
Make a log at PATH. Its whole capacity is reserved on disk at once, and bounds what it will ever take: when it is full the
oldest records make room for new ones, unless --policy says that writers wait for durable readers. The log is on disk,
complete, when the command returns."""
EXAMPLES = """\
  kvspool create events
  kvspool create events --capacity 1GiB --codec keyed
  kvspool create events --policy block --reader-expiry 86400
  kvspool create events --durability disk
  kvspool create /dev/shm/events --mode 640        in memory, readable by the group"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    options.add_path(parser, "where the log is to lie; its parent directory must exist")
    parser.add_argument(
        "--capacity", type=options.size, default="64MiB", metavar="SIZE", help="bytes, or with a unit (default: %(default)s)"
    )
    parser.add_argument(
        "--codec",
        choices=tuple(STRUCTURED),
        default="json",
        help="how structured values are stored; keyed is MessagePack with each key of a map stored once (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=format.POLICIES,
        default="overwrite",
        help="when the ring is full of what a durable reader has yet to commit: overwrite it, block until the reader moves on, "
        "or raise an error (default: %(default)s)",
    )
    parser.add_argument(
        "--reader-expiry",
        type=options.seconds,
        metavar="S",
        help="with block and raise: wait no more for a reader that has not moved for so many seconds (default: always wait)",
    )
    parser.add_argument(
        "--durability",
        choices=format.DURABILITIES,
        default="memory",
        help="when an append is on disk: after a sync (memory), within the sync interval (os), or at once (disk) (default: %(default)s)",
    )
    parser.add_argument(
        "--sync-interval", type=options.interval, metavar="S", help="with os: seconds between two flushes (default: 1)"
    )
    parser.add_argument(
        "--mode", type=options.mode, default="600", help="permission bits of the files, in octal (default: %(default)s)"
    )
    parser.add_argument(
        "--allow-unsafe-fs",
        action="store_true",
        help="also on a file system that is not known to share memory and locks between processes",
    )
    options.add_json(parser, "print what `stats` says of the new log as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Make the log and say what it is."""
    try:
        log = kvspool.create(
            arguments.path,
            capacity=arguments.capacity,
            codec=arguments.codec,
            mode=arguments.mode,
            policy=arguments.policy,
            reader_expiry=arguments.reader_expiry,
            durability=arguments.durability,
            sync_interval=arguments.sync_interval,
            allow_unsafe_fs=arguments.allow_unsafe_fs,
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    with log:
        stats = log.stats()
    if arguments.json:
        output.print_json(stats)
    else:
        print(output.escape(f"created {stats.path}: {sizes.show(stats.capacity)}, structured values as {stats.codec}"))
    return 0
