"""`kvspool queue`: put entries into a queue in QewQew's files, and take them out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from kvspool.cli import lines, options, output
from kvspool.cli.lines import LineReader
from kvspool.cli.options import BadInput
from kvspool.cli.pipes import ending_with_reader
from kvspool.errors import Closed, TooLarge
from kvspool.queue import ChunkQueue, QueueEmpty

NAME = "queue"
SUMMARY = "put entries into a queue, and take them out"
DESCRIPTION = """\
A queue in QewQew's files: each entry is taken out once, by one of many processes. `kvspool read`, `stats`, `verify` and `repair` know
queues, too."""
EXAMPLES = """\
  kvspool queue put jobs < jobs.txt
  kvspool queue get jobs"""
PUT = """\
Put each line of standard input into the queue as an entry, at once when the input pauses. The queue is created if it doesn't exist. An
entry has at most 65,535 bytes."""
GET = """\
Take entries out, and print each as a line. An entry is gone from the queue when it is printed. Without --follow the command ends if the
queue is empty, with code 1 if nothing was taken. A queue without entries is removed by its last user."""
LONGEST = 65535  # bytes of an entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands below this one."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    examples = "  seq 100 | kvspool queue put jobs\n  kvspool queue put jobs --durable --json < jobs.txt"
    put = options.add_command(commands, "put", "put each line of standard input into a queue", PUT, examples)
    options.add_path(put, "the queue")
    options.reads_input(put, "queue put")
    put.add_argument("--batch", type=options.count(1), default=1000, metavar="N", help="most lines at once (default: %(default)s)")
    put.add_argument("--durable", action="store_true", help="flush each batch to disk before reading the next one")
    options.add_json(put, "print the summary as a JSON object")
    put.set_defaults(run=_put)
    examples = '  kvspool queue get jobs --limit 10\n  kvspool queue get jobs --follow | while read -r job; do echo "$job"; done'
    get = options.add_command(commands, "get", "take entries out of a queue", GET, examples)
    options.add_path(get, "the queue")
    get.add_argument("--limit", type=options.count(1), metavar="N", help="most entries (default: 1, or all with --follow)")
    get.add_argument("-f", "--follow", action="store_true", help="wait for entries")
    get.add_argument("--timeout", type=options.seconds, metavar="S", help="with --follow: end after S seconds without an entry")
    get.add_argument("--durable", action="store_true", help="each removal is on disk before the entry is printed")
    get.set_defaults(run=_get)


def run(arguments: argparse.Namespace) -> int:
    """Print the help: the command alone does nothing."""
    arguments.parser.children()[NAME].print_help(sys.stderr)
    return 2


def _refuse_directory(path: Path) -> None:
    """Raise BadInput for a directory, such as a log: the files of a queue are no directory."""
    if path.is_dir():
        raise BadInput(f"{path} is a directory, not a queue; if it is a log, see `kvspool append` and `kvspool read`")


def _put(arguments: argparse.Namespace) -> int:
    """Put the lines, and report how many, whatever ends it."""
    count = 0
    _refuse_directory(arguments.path)
    with ChunkQueue.create(arguments.path, exist_ok=True, durability=_durability(arguments)) as queue:
        try:
            for batch in LineReader(lines.standard_input("put"), most=arguments.batch, longest=LONGEST).batches():
                try:
                    queue.put_many(batch.lines)
                except TooLarge as error:
                    raise BadInput(f"{batch}: {error}") from error
                count += len(batch.lines)
        finally:
            if arguments.json:
                output.print_json({"put": count, "synced": arguments.durable})
            else:
                print(f"put {output.counted(count, 'entry')}", file=sys.stderr)
    return 0


def _durability(arguments: argparse.Namespace) -> Literal["memory", "disk"]:
    return "disk" if arguments.durable else "memory"


def _get(arguments: argparse.Namespace) -> int:
    """Take entries, and print them."""
    limit = arguments.limit or (None if arguments.follow else 1)
    taken = 0
    with _to_get(arguments) as queue, ending_with_reader(queue.close):
        while limit is None or taken < limit:
            try:
                entry = queue.get(block=arguments.follow, timeout=arguments.timeout)
            except QueueEmpty:
                break
            except Closed:
                return 0  # the reader of the output has closed it
            taken += 1
            sys.stdout.buffer.write(entry + b"\n")
            sys.stdout.flush()
    if not taken and not arguments.follow:
        output.complain(f"{arguments.path} is empty; --follow waits for an entry")
        return QueueEmpty.exit_code
    return 0


def _to_get(arguments: argparse.Namespace) -> ChunkQueue:
    """Open the queue; one to wait for is created if it doesn't exist, as its last user removes an empty one."""
    _refuse_directory(arguments.path)
    if arguments.follow:
        return ChunkQueue.create(arguments.path, exist_ok=True, durability=_durability(arguments))
    return ChunkQueue.open(arguments.path, durability=_durability(arguments))
