"""Types of option values, and options shared by several commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kvspool
from kvspool import system
from kvspool.cli.parsing import Parser
from kvspool.engine import sizes
from kvspool.errors import KvspoolError
from kvspool.journal import Floor, Retention
from kvspool.journal import files as journals
from kvspool.options import Start
from kvspool.record import STRUCTURED
from kvspool.spool.format import CONTROL_FILE

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
END = datetime(2262, 1, 1, tzinfo=UTC)  # 2**63 ns after the epoch is in that year

START_WORDS = "earliest, latest, a sequence, an age such as -5m, or a time such as 2026-01-31T12:00:00Z (without a zone: UTC)"
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BadInput(KvspoolError, ValueError):
    """Invalid input of the user. Nothing of it was stored."""

    exit_code = 2


@contextmanager
def bad_input(*also: type[Exception]) -> Iterator[None]:
    """Raise BadInput with the words of a ValueError in the `with` block, or of an error of `also`. Errors of kvspool pass unchanged."""
    kinds: tuple[type[Exception], ...] = (ValueError, *also)
    try:
        yield
    except KvspoolError:
        raise
    except kinds as error:
        raise BadInput(str(error)) from error


def add_command(commands: Any, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Add a command to those of `argparse`, and return its parser. summary: for the list of commands; examples: lines for its help."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description, epilog=f"Examples:\n{examples}")
    return parser


def add_group(commands: Any, name: str, summary: str, description: str, examples: str) -> Any:
    """Add a command that has commands of its own, and return these; alone it prints its help, and ends with 2."""

    def print_help(arguments: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser = add_command(commands, name, summary, description, examples)
    parser.set_defaults(run=print_help)
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def add_path(parser: argparse.ArgumentParser, words: str) -> None:
    """Add the argument PATH."""
    parser.add_argument("path", metavar="PATH", type=path, help=words)


def reads_input(parser: argparse.ArgumentParser, command: str) -> None:
    """Let the parser say how a value is given to a command that reads standard input."""
    if isinstance(parser, Parser):
        parser.input_words = f"{command} reads standard input: echo VALUE | kvspool {command} PATH"


def add_json(parser: argparse._ActionsContainer, words: str) -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help=words)


def add_codec(parser: argparse._ActionsContainer, words: str, default: str | None = "json") -> None:
    """Add the option --codec of a new log."""
    parser.add_argument("--codec", choices=tuple(STRUCTURED), default=default, help=words)


def add_files(parser: argparse._ActionsContainer) -> None:
    """Add the options for the files of a new log."""
    parser.add_argument("--mode", type=mode, default="600", help="permission bits of the files, in octal (default: %(default)s)")
    parser.add_argument(
        "--allow-unsafe-fs",
        action="store_true",
        help="also on a file system that is not known to share memory and locks between processes, and on btrfs, where a full disk kills "
        "processes that append to a spool (later commands append there with KVSPOOL_ALLOW_UNSAFE_FS=1)",
    )


def add_output(parser: argparse.ArgumentParser, *, has_logs: bool = False) -> None:
    """Add the options for the output of records; has_logs: also as messages of `kvspool.logging`."""
    add_gaps(parser, "yield")
    forms = add_form(parser)
    if has_logs:
        forms.add_argument("--logs", action="store_true", help="messages of kvspool.logging: time, level, logger, text, fields, traceback")


def add_form(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options for the form of printed records, and return their group."""
    forms = parser.add_mutually_exclusive_group()
    add_json(forms, "one JSON object for each record, with all of its fields")
    forms.add_argument("--values", action="store_true", help="only the stored bytes of the values, one value a line")
    parser.set_defaults(logs=False)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal (default: %(default)s)")
    return forms


def add_range(parser: argparse.ArgumentParser, verb: str = "print") -> None:
    """Add the options --start, --end and --limit, which mean the same in every command."""
    parser.add_argument("--start", type=start, default="earliest", metavar="START", help=f"first record: {START_WORDS}")
    parser.add_argument("--end", type=end, metavar="END", help="up to a sequence, time or age like --start, which is not included")
    parser.add_argument("--limit", type=count(0), metavar="N", help=f"most records to {verb}")


def add_gaps(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option --gaps, which means the same in every command; its default is how a command treats lost records without it."""
    words = "lost records: name the gap (yield), end with code 7 (raise), or continue silently (skip) (default: %(default)s)"
    parser.add_argument("--gaps", choices=("raise", "yield", "skip"), default=default, help=words)


def add_timeout(parser: argparse.ArgumentParser, default: float) -> None:
    """Add the option --timeout of commands that wait for a lock."""
    words = "seconds to wait for each lock (default: %(default)g)"
    parser.add_argument("--timeout", type=seconds, default=default, metavar="S", help=words)


def add_isolation(parser: argparse.ArgumentParser) -> None:
    """Add the option --synced."""
    parser.add_argument("--synced", action="store_true", help="only records on disk, which a crash of the machine can't remove")


def isolation(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of `read` and `follow` for --synced; empty without it, for logs that don't support it."""
    return {"isolation": "synced"} if arguments.synced else {}


def add_retention(parser: argparse._ActionsContainer) -> None:
    """Add the options for the retention of a journal."""
    parser.add_argument("--max-bytes", type=size, metavar="SIZE", help="of a journal: remove the oldest segments beyond this size")
    words = "of a journal: remove segments with only older records; in seconds, or as 90m, 12h, 30d"
    parser.add_argument("--max-age", type=seconds, metavar="AGE", help=words)
    parser.add_argument(
        "--by-record", action="store_true", help="of a journal: --max-age counts the timestamps of records, not the time of the last write"
    )
    parser.add_argument("--by-readers", action="store_true", help="of a journal: remove records that every durable reader has committed")
    parser.add_argument(
        "--floor",
        type=floor,
        metavar="FLOOR",
        help="of a journal: records to keep in any case: a sequence from which on all are kept, or records:N, bytes:SIZE, segments:N "
        "of the newest, or several separated by commas",
    )
    parser.add_argument("--force", action="store_true", help="of a journal: the limits don't wait for durable readers; those get a gap")


def retention(arguments: argparse.Namespace) -> Retention | None:
    """Return the rules of the options; None without any."""
    if arguments.by_record and arguments.max_age is None:
        raise BadInput("--by-record says how --max-age counts: give both")
    rules = Retention(
        max_bytes=arguments.max_bytes,
        max_age=arguments.max_age,
        by_record=arguments.by_record,
        by_consumers=arguments.by_readers,
        floor=arguments.floor,
        force=arguments.force,
    )
    return None if rules == Retention() else rules


@contextmanager
def opened_journal(path: Path, otherwise: str) -> Iterator[kvspool.Log]:
    """Open the journal at a path for the `with` block. Raises BadInput for another log, with the text `otherwise`."""
    with kvspool.open(path) as log:
        if "trim" not in log.capabilities:
            raise BadInput(f"{path} is not a journal: {otherwise}")
        yield log


def refuse_journal(path: Path, instead: str) -> None:
    """Raise BadInput for a journal in a command for spools, with an alternative."""
    if not os.path.lexists(path / CONTROL_FILE) and journals.find(path) is not None:
        raise BadInput(f"{path} is a journal, not a spool: {instead}")


def path(text: str) -> Path:
    """Return the path of a log, which is no address of a hub."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"a path on this host, not {text!r}; kvspool ship hub://HOST:PORT DIR pulls the records of a hub, and kvspool hub stats "
            "http://HOST:PORT shows its state"
        )
    return Path(text)


def size(text: str) -> int:
    """Return a size in bytes."""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def mode(text: str) -> int:
    """Return permission bits, written in octal."""
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a mode is octal digits such as 600 or 640, not {text!r}") from None


def start(text: str) -> Start:
    """Return a start. Times are printed in UTC, so one without a zone is in UTC; an age such as -5m is a time, too."""
    return text if text in ("earliest", "latest") else _position(text, f"a start is {START_WORDS}")


def end(text: str) -> int | datetime:
    """Return an end: a sequence or a time."""
    return _position(text, "an end is a sequence, an age such as -5m or a time such as 2026-01-31T12:00:00Z")


def since(text: str) -> datetime:
    """Return the time that was so long ago, or a time."""
    is_age = text[-1:].lower() in _AGES and not text.startswith("-")
    found = _position(f"-{text}" if is_age else text, "an age such as 10m, or a time")
    if isinstance(found, int):
        raise argparse.ArgumentTypeError(f"an age has a unit, as 30s, 10m, 12h or 7d, not {text!r}")
    return found


def _position(text: str, words: str) -> int | datetime:
    try:
        if text.isascii() and text.isdigit():
            return int(text)
        when = _ago(text) if text.startswith("-") else datetime.fromisoformat(text)
    except (ValueError, OverflowError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{words}, not {text!r}") from None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    if not EPOCH <= when < END:
        raise argparse.ArgumentTypeError(f"records have times from {EPOCH:%Y} to {END:%Y}, not {text!r}")
    return when


def _ago(text: str) -> datetime:
    """Return the time that was so long ago; "-5m" is five minutes ago."""
    if text[-1].lower() not in _AGES:
        raise ValueError(text)
    return datetime.fromtimestamp(system.port.now() / 1e9 - seconds(text[1:]), UTC)


def count(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser for whole numbers within limits."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"a whole number {limits}, not {text!r}")
        return number

    return parse


def seconds(text: str) -> float:
    """Return a duration in seconds, written in seconds, or with a unit as 30s, 10m, 12h or 7d."""
    unit = _AGES.get(text[-1:].lower())
    try:
        number = float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"a number of seconds, or a duration such as 30s, 10m, 12h or 7d, not {text!r}")
    return number


def show_age(seconds: float) -> str:
    """Return a duration for people: 90 s, 12.5 h."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} s"


def floor(text: str) -> Floor:
    """Return a retention floor."""
    parts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.rpartition(":")
        name = name or "sequence"
        if name not in Floor.__struct_fields__:
            raise argparse.ArgumentTypeError(f"a floor is a sequence, or records:N, bytes:SIZE, segments:N, not {part!r}")
        parts[name] = size(number) if name == "bytes" else count(0)(number)
    return Floor(**parts)


def interval(text: str) -> float:
    """Return a duration greater than 0."""
    number = seconds(text)
    if number < 0.01:
        raise argparse.ArgumentTypeError(f"at least 0.01 seconds, not {text!r}")
    return number
