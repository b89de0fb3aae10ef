"""The parser of the command `kvspool`, and the common parts of all commands.

Each command is a module of this package with `NAME`, `SUMMARY`, `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments) ->
int`; other names for it are its `ALIASES`. `EXTRA`, of the module or its package, is the extra with the packages that it may lack. Other
packages add further commands; see `plugins`. An expected error is printed as one sentence on stderr, and its class gives the exit code;
everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import kvspool
from kvspool.cli import output, plugins
from kvspool.cli.parsing import Parser
from kvspool.cli.words import of_command
from kvspool.errors import KvspoolError, MissingExtra

# Their modules; that of `import` can't have its name.
COMMANDS = (
    *("create", "append", "sync", "read", "tail", "get", "export", "import_", "copy", "readers", "group", "tasks", "work", "producers"),
    *("trim", "resize", "mv", "rm", "ls", "du", "stats", "verify", "repair", "salvage", "archive", "queue", "doctor", "completion", "man"),
)

DESCRIPTION = """\
A log that you open like a file. Any number of processes append to it and read it at once; appended records survive a
crash of any of them."""

EPILOG = """\
Examples:
  kvspool create events --capacity 1GiB
  echo '{"user": 7, "event": "login"}' | kvspool append events --json-lines --key-field user
  kvspool tail events --follow

Exit codes:
  0    done
  1    another failure, such as a full disk, or a check of `doctor` that failed
  2    wrong usage, or input that can't be stored
  3    path: does not exist, exists already, or is on an unsafe file system
  4    format: not a log, or one of a newer kvspool
  5    damage: a log or a record can't be trusted
  6    no lock: another process holds it, or has the log open
  7    records were lost before they could be read (with --gaps raise)
  8    full: no room for a record that must wait for a reader, or for another reader
  9    a hub refused it, or can't be reached
  130  interrupted

`kvspool COMMAND --help` explains a command and gives examples."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; see `kvspool.cli.main`."""
    output.prepare()
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the output has closed it, as `head` does.
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except KvspoolError as error:
        output.complain(of_command(str(error)))
        code = error.exit_code
    except OSError as error:
        output.complain(of_command(_sentence(error)))
        code = 1
    output.set_up()
    return code


def _run(argv: list[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    arguments = _parser_for(words).parse_args(words)
    if arguments.run is None:
        arguments.parser.print_help(sys.stderr)
        return 2
    try:
        return int(arguments.run(arguments))
    except ModuleNotFoundError as error:
        raise MissingExtra.of(_extra(arguments.run), "the command needs a package that isn't installed", error) from error


def _extra(run: Callable[[Namespace], int]) -> str:
    """Return the extra of a command: `EXTRA` of its module, or of the package of that."""
    package, _, _ = run.__module__.rpartition(".")
    names = vars(sys.modules[package]) | vars(sys.modules[run.__module__])
    return str(names["EXTRA"])


def make_parser() -> Parser:
    """Return the parser of all commands, also of plugins. It sets `arguments.run` to the command's function, and `parser` to itself."""
    parser, subparsers = _make_parser(COMMANDS)
    plugins.add_commands(subparsers)
    return parser


def _parser_for(words: list[str]) -> Parser:
    """Return a parser that knows the command in the first word, or all commands: the imports of all take 0.2 s."""
    word = words[0] if words else ""
    named = [name for name in COMMANDS if word == name.removesuffix("_")]
    parser, subparsers = _make_parser(named)
    if not named and word[:1] not in ("", "-"):
        plugins.add_commands(subparsers)
    return parser if word in subparsers.choices else make_parser()


def _make_parser(names: Iterable[str]) -> tuple[Parser, Any]:
    """Return a parser of these commands, and argparse's object for adding more."""
    parser = Parser(prog="kvspool", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"kvspool {kvspool.__version__}")
    parser.set_defaults(run=None, parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for name in names:
        command = import_module(f"kvspool.cli.{name}")
        subparser = subparsers.add_parser(
            command.NAME,
            aliases=getattr(command, "ALIASES", ()),
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            epilog=f"Examples:\n{command.EXAMPLES}",
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser, subparsers


def _sentence(error: OSError) -> str:
    """Return the system's error as one sentence: what failed, at which file, during which operation."""
    words = str(error) if error.strerror is None else error.strerror
    if error.strerror is not None and error.filename is not None:
        words = f"{words}: {error.filename}"
    return "; ".join([words, *getattr(error, "__notes__", ())])
