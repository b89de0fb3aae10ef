"""`kvspool append`: records from the lines of standard input."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Protocol, TypeVar

import msgspec

from kvspool.cli import options, queues
from kvspool.cli.lines import LineBatch, LineReader, standard_input
from kvspool.cli.options import BadInput
from kvspool.cli.summary import Summary
from kvspool.errors import Unencodable, appended_by

T_co = TypeVar("T_co", covariant=True)
LONGEST_LINE = 1 << 30  # bytes of a line for a journal: it is held in memory
NAME = "append"
SUMMARY = "append each line of standard input as a record"
DESCRIPTION = """\
Append each line of standard input as one record: as text, or, with --json-lines, as JSON data. A line that is not UTF-8 is
stored as raw bytes. Lines are appended in batches, and at once when the input pauses. An invalid line ends the command: nothing
of its batch is appended, and the summary lists the appended records."""
EXAMPLES = """\
  tail -f access.log | kvspool append events --key web
  kvspool append events --json-lines --key-field user < events.jsonl
  echo done | kvspool append events --durable --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    options.reads_input(parser, "append")
    parser.add_argument("--json-lines", action="store_true", help="each line is JSON, and is stored as structured data")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--key", metavar="TEXT", help="the key of every record")
    keys.add_argument(
        "--key-field", metavar="NAME", help="with --json-lines: the member that is the key (text as it is, null: no key, others as JSON)"
    )
    parser.add_argument("--type", type=options.count(0, 255), default=0, metavar="N", help="type of every record, 0 to 255")
    parser.add_argument(
        "--batch", type=options.count(1), default=1000, metavar="N", help="most lines to append at once (default: %(default)s)"
    )
    parser.add_argument("--durable", "--sync", action="store_true", help="flush each batch to disk before reading the next one")
    options.add_json(parser, "print the summary as a JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Append the lines, and print how many were appended, whatever ends it."""
    fd = open_input(arguments)
    summary = Summary(shows_progress=shows_progress(fd))
    with queues.open_log(arguments.path) as log:
        longest = log.capacity or LONGEST_LINE
        try:
            for batch in LineReader(fd, most=arguments.batch, longest=longest).batches():
                try:
                    summary.add(append_batch(log, batch, arguments))
                except BaseException as error:
                    summary.add(appended_by(error))
                    raise
        finally:
            summary.print(arguments)
    return 0


def open_input(arguments: argparse.Namespace) -> int:
    """Return the descriptor of the input; BadInput if it is closed, or the options contradict each other."""
    if arguments.key_field is not None and not arguments.json_lines:
        raise BadInput("--key-field needs --json-lines: a line of text has no members")
    return standard_input("append")


def shows_progress(fd: int) -> bool:
    """Return whether stderr is a terminal and the lines are not typed there."""
    return sys.stderr.isatty() and not os.isatty(fd)


class LineTarget(Protocol[T_co]):
    """A log that lines can be appended to; T: what `append_many` returns."""

    def append_many(self, values: list[Any], *, keys: list[bytes | None], type: int, durable: bool) -> T_co:
        """Append a record for each value; `durable`: return when they are on disk."""


def append_batch(log: LineTarget[T_co], batch: LineBatch, arguments: argparse.Namespace) -> T_co:
    """Append the lines of a batch according to the options. Raises BadInput for an invalid one; then none of them is appended."""
    values: list[Any] = []
    keys: list[bytes | None] = []
    for number, line in enumerate(batch.lines, start=batch.first):
        value = _parsed(line, number) if arguments.json_lines else _text(line)
        values.append(value)
        keys.append(_key(value, number, arguments))
    try:
        return log.append_many(values, keys=keys, type=arguments.type, durable=arguments.durable)
    except (Unencodable, ValueError) as error:  # too large, or, in a journal, with a field that its format can't store
        raise BadInput(f"{batch}: {error}") from error


def _parsed(line: bytes, number: int) -> Any:
    try:
        return msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"line {number} is not JSON: {error}") from error


def _text(line: bytes) -> str | bytes:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line


def _key(value: Any, number: int, arguments: argparse.Namespace) -> bytes | None:
    if arguments.key_field is None:
        return None if arguments.key is None else os.fsencode(arguments.key)
    if not isinstance(value, dict) or arguments.key_field not in value:
        raise BadInput(f"line {number} has no member {arguments.key_field!r} for its key")
    member = value[arguments.key_field]
    if isinstance(member, str):
        return member.encode()
    return None if member is None else msgspec.json.encode(member)
