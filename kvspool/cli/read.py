"""`kvspool read`: print the present records."""

from __future__ import annotations

import argparse

from kvspool.cli import options, output, plugins, selection

NAME = "read"
SUMMARY = "print the present records"
DESCRIPTION = f"""\
Print records, one a line: time (UTC), sequence, key, value. Long values are cut at {output.LONGEST} characters, or to the width of
the terminal; --json prints them whole. For lost records a line says which and why.
The entries of a queue in QewQew's files are printed with their numbers from the front; none is taken out.

With --json each line is an object with sequence, timestamp (ns since 1970), time, type, codec, key and value. Keys and values that
are not text are {{"base64": ...}}. Lost records are {{"gap": {{first, last, reason, count, path}}}}."""
EXAMPLES = """\
  kvspool read events --start 1000 --limit 20
  kvspool read events --start 2026-01-31T12:00:00Z --json | jq .value
  kvspool read events --start -1h --end -30m --where 'data.user == 7 and data.event in ["login", "logout"]'
  kvspool read events --values --gaps raise > values.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log")
    options.add_range(parser)
    selection.add_filters(parser)
    options.add_isolation(parser)
    options.add_output(parser, has_logs=True)


def run(arguments: argparse.Namespace) -> int:
    """Print the records."""
    with plugins.opened(arguments.path) as log:
        output.print_records(selection.read(log, arguments), arguments)
    return 0
