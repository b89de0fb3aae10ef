"""The output of the commands: records as lines, as JSON or as bytes; messages on stderr.

Records may be untrusted, so none of their control characters reaches a terminal: a hostile value can't move the cursor, change the title,
or reverse the direction of the line. Only `--values` writes raw bytes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvspool.cli.pipes import ending_with_reader
from kvspool.engine import sizes
from kvspool.errors import Undecodable
from kvspool.record import Codec, Gap, Record, codec_name

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

LONGEST = 500  # characters of a value in lines; --json prints all of it
WIDEST = 1000  # characters of a table that isn't on a terminal
_MARKS = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # characters that JSON doesn't escape, and a terminal obeys
_UNSAFE = re.compile(f"[\x00-\x1f{_MARKS}\ud800-\udfff]")
_UNSAFE_IN_JSON = re.compile(f"[{_MARKS}]")
_BEYOND_JSON = (Undecodable, TypeError, ValueError, OverflowError, RecursionError)
_encode = msgspec.json.Encoder().encode

Show = Callable[[Any], None]
Line = list[tuple[str, str]]  # the parts of a line, each with its style on a terminal


def prepare() -> None:
    """Let both streams accept any text, whatever the terminal's encoding."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def set_up() -> None:
    """Flush the output; if its reader has closed it, discard it, so that the interpreter exits silently."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def complain(words: str) -> None:
    """Write one line to stderr."""
    print(f"kvspool: {escape(words)}", file=sys.stderr)


def escape(text: str) -> str:
    """Return the text with every character that a terminal would obey written as \\x1b."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def counted(count: int, noun: str) -> str:
    """Return a number of things in words: "1 record", "2,000 entries"."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else many}"


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def console(*, stderr: bool = False, color: str = "auto") -> Console:
    """Return a rich console; created on demand, since importing rich is slow. color: "auto", "always" or "never"."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Piped output isn't wrapped.
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else WIDEST,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=True if color == "always" else None,
        no_color=True if color == "never" else None,
    )


def rows(titles: Iterable[str], found: Iterable[Iterable[str | Text]], numbers: Collection[str] = ()) -> Table:
    """Return a table with these rows: with lines on a terminal, in plain columns elsewhere, for programs such as awk.

    numbers: the titles of columns that are aligned to the right. A cell is text, which is escaped, or a `Text`, which is shown as it is.
    """
    from rich.table import Table
    from rich.text import Text

    filled = Table(header_style="bold cyan") if is_terminal() else Table(box=None, pad_edge=False, header_style="")
    for title in titles:
        filled.add_column(Text(title), justify="right" if title in numbers else "left", overflow="fold")
    for cells in found:
        filled.add_row(*(Text(escape(cell)) if isinstance(cell, str) else cell for cell in cells))
    return filled


def print_table(found: RenderableType) -> None:
    """Print a table; elsewhere than on a terminal, no line ends with spaces."""
    screen = console()
    if screen.is_terminal:
        screen.print(found)
        return
    with screen.capture() as text:
        screen.print(found)
    print("\n".join(line.rstrip() for line in text.get().splitlines()))


def print_records(items: Iterable[Any], arguments: Namespace) -> None:
    """Write records and gaps in the requested form. Iterators of logs hold descriptors, so they are closed at the end."""
    show = _form(arguments)
    try:
        for item in items:
            show(item)
    finally:
        if hasattr(items, "close"):
            items.close()


def print_live(items: Any, arguments: Namespace, select: Callable[[Iterable[Any]], Iterable[Any]]) -> None:
    """Write what `select` takes of the items of a follower, each at once, until they end or the reader of the output has closed it."""
    show = _form(arguments)
    try:
        with ending_with_reader(items.close):
            for item in select(items):
                show(item)
                sys.stdout.flush()
    finally:
        items.close()


def _form(arguments: Namespace) -> Show:
    if arguments.json:
        return lambda item: print_json(_gap_members(item) if isinstance(item, Gap) else _members(item))
    if arguments.values:
        return _print_value
    lines = message_lines if arguments.logs else lambda item: [parts(item)]
    if sys.stdout.isatty() or arguments.color == "always":
        return _terminal(arguments.color, lines, is_cut=not arguments.logs)
    return lambda item: print("\n".join("  ".join(text for text, _ in line) for line in lines(item)))


def _print_value(item: Any) -> None:
    if isinstance(item, Gap):
        complain(str(item))
    else:
        sys.stdout.buffer.write(item.value + b"\n")


def _terminal(color: str, lines: Callable[[Any], list[Line]], *, is_cut: bool) -> Show:
    """Return a function that prints the lines of an item in colours, cut to the width of the terminal or folded."""
    from rich.text import Text

    screen = console(color=color)

    def show(item: Any) -> None:
        for line in lines(item):
            text = Text("  ").join(Text(words, style) for words, style in line)
            screen.print(text, no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold")

    return show


def message_lines(item: Any) -> list[Line]:
    """Return the lines of a message of `kvspool.logging`; a record with other data has its usual line."""
    from kvspool.logging import message

    data = None if isinstance(item, Gap) else _data(item)
    if not isinstance(data, dict) or "message" not in data:
        return [parts(item)]
    words = [(moment(item.time), "dim"), *((escape(text), style) for text, style in message.line(data))]
    return [words, *([(f"    {escape(line)}", "red")] for line in message.further_lines(data))]


def _data(record: Record) -> Any:
    """Return the appended value; None if it can't be decoded."""
    try:
        return record.data
    except Undecodable:
        return None


def parts(item: Any) -> Line:
    """Return the columns of an item's line, each with its style on a terminal."""
    if isinstance(item, Gap):
        return [(escape(f"-- {item}"), "bold red")]
    further = [(escape(f"{name}={_plain(value)}"), "magenta") for name, value in _further(item).items()]
    kind = [(f"type={item.type}", "blue")] if item.type else []
    return [
        (moment(item.time), "dim"),
        (f"{item.sequence:>8}", "yellow"),
        *further,
        *kind,
        (_short("-" if item.key is None else _plain(item.key) or '""'), "cyan"),
        (_short(_value_text(item)), ""),
    ]


def moment(when: datetime) -> str:
    """Return a time in UTC as 2026-01-31T12:00:00.000000Z, which --start accepts."""
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def moment_of(timestamp: int) -> str:
    """Return a timestamp in ns as `moment` does."""
    return moment(datetime.fromtimestamp(timestamp // 1_000_000_000, UTC).replace(microsecond=timestamp // 1000 % 1_000_000))


def _further(record: Record) -> dict[str, Any]:
    """Return the fields that a log of several logs adds to its records, such as `shard` or `client`."""
    if type(record) is Record:
        return {}
    return {name: getattr(record, name) for name in record.__struct_fields__ if name not in Record.__struct_fields__}


def _plain(value: Any) -> str:
    """Return a value as readable text; bytes as text if they are UTF-8."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return repr(value)


def _value_text(record: Record) -> str:
    if record.codec not in (Codec.MSGPACK, Codec.KEYED):
        return _plain(record.value)
    try:
        return _encode(record.data).decode()
    except _BEYOND_JSON:
        return repr(record.value)


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return escape(text)
    return f"{escape(text[:LONGEST])}… ({sizes.show(len(text))})"


def print_json(value: Any) -> None:
    """Write a value as one line of JSON."""
    try:
        line = _encode(value)
    except UnicodeEncodeError:
        # A path that is not UTF-8 has lone surrogates, which can only be written as escapes.
        line = json.dumps(msgspec.to_builtins(value)).encode()
    if not line.isascii() or b"\x7f" in line:
        line = _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", line.decode()).encode()
    sys.stdout.buffer.write(line + b"\n")


def _members(record: Record) -> dict[str, Any]:
    return {
        "sequence": record.sequence,
        "timestamp": record.timestamp,
        "time": moment(record.time),
        **{name: _text_or_base64(value) if isinstance(value, bytes) else value for name, value in _further(record).items()},
        "type": record.type,
        "codec": codec_name(record.codec),
        "key": None if record.key is None else _text_or_base64(record.key),
        "value": _value_member(record),
    }


def _value_member(record: Record) -> Any:
    """Return the appended value, if JSON can represent it; its bytes in base64 otherwise."""
    try:
        data = record.data
        return _text_or_base64(data) if isinstance(data, bytes) else msgspec.Raw(_encode(data))
    except _BEYOND_JSON:
        return _base64(record.value)


def _text_or_base64(value: bytes) -> str | dict[Literal["base64"], str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _base64(value)


def _base64(value: bytes) -> dict[Literal["base64"], str]:
    return {"base64": base64.b64encode(value).decode()}


def _gap_members(gap: Gap) -> dict[str, Any]:
    members = {name: getattr(gap, name) for name in gap.__struct_fields__}
    path = members.pop("path")
    return {"gap": {**members, "count": gap.count, "path": path}}
