"""`kvspool man`: write man pages, made from the help."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

import kvspool
from kvspool.cli.command import make_parser
from kvspool.cli.completion import commands, options

if TYPE_CHECKING:
    from kvspool.cli.parsing import Parser

NAME = "man"
SUMMARY = "write man pages, made from the help"
DESCRIPTION = """\
Write a man page for the command, and one for each command below it, into a directory: kvspool.1, kvspool-tail.1, kvspool-hub-serve.1. They
are made from the help of all packages that are installed now."""
EXAMPLES = """\
  kvspool man ~/.local/share/man/man1 && man kvspool-tail
  kvspool man pages && man -l pages/kvspool.1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory, which is created if it doesn't exist")


def run(arguments: argparse.Namespace) -> int:
    """Write the pages."""
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    summaries = {"kvspool": "a log that you open like a file"}
    count = 0
    for path, parser in commands(make_parser()):
        summaries |= {f"{path} {name}": text for name, text in parser.summaries().items()}
        (directory / f"{path.replace(' ', '-')}.1").write_text(page(path, parser, summaries[path]), encoding="utf-8")
        count += 1
    print(f"wrote {count} pages to {directory}")
    return 0


def page(path: str, parser: Parser, summary: str) -> str:
    """Return the page of one command in the language of troff's macros `man`."""
    name = path.replace(" ", "-")
    lines = [
        f'.TH {name.upper()} 1 "" "kvspool {kvspool.__version__}" "kvspool"',
        *(".SH NAME", f"{_text(name)} \\- {_text(summary)}"),
        *(".SH SYNOPSIS", ".nf", *(_text(line.strip()) for line in _usage(parser)), ".fi"),
        *(".SH DESCRIPTION", *_paragraphs(parser.description or "")),
    ]
    children = parser.summaries()
    for child, words in children.items():
        lines += [
            ".TP" if child != next(iter(children)) else ".SH COMMANDS\n.TP",
            f".B {_text(child)}",
            f"{_text(words)}; see {_text(name)}-{child}(1)",
        ]
    positional = [action for action in parser._actions if not action.option_strings and not children]
    for title, actions in (("ARGUMENTS", positional), ("OPTIONS", options(parser))):
        if actions:
            lines.append(f".SH {title}")
        for action in actions:
            lines += [".TP", f".B {_text(_shape(action))}", _text(_help(action)) or "\\&"]
    lines += _epilog(parser.epilog or "")
    if " " in path:
        lines += [".SH SEE ALSO", f"{_text(name.rpartition('-')[0])}(1)"]
    return "\n".join(lines) + "\n"


def _usage(parser: Parser) -> list[str]:
    """Return the lines of the usage, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", parser.format_usage())
    return [line for line in text.removeprefix("Usage: ").removeprefix("usage: ").splitlines() if line.strip()]


def _shape(action: argparse.Action) -> str:
    """Return an option's names and its value: "-n, --last N"."""
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return str(value)
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": "kvspool"} if action.help else ""


def _paragraphs(text: str) -> list[str]:
    return [_text(line) if line.strip() else ".PP" for line in text.splitlines()]


def _epilog(text: str) -> list[str]:
    """Return the sections after the options: "Examples:" and a block of lines, as they are."""
    lines: list[str] = []
    for block in re.split(r"\n\n", text):
        title, _, body = block.partition(":\n")
        if body:
            lines += [f".SH {title.upper()}", ".nf", *(_text(line) for line in body.splitlines()), ".fi"]
        elif block.strip():
            lines += [".PP", *_paragraphs(block)]
    return lines


def _text(text: str) -> str:
    """Return a line with nothing in it that troff would obey."""
    escaped = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\`").replace("'", "\\(aq").replace("^", "\\(ha").replace("~", "\\(ti")
    )
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
