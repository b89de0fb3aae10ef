"""`kvspool hub verify`: check everything under a hub root."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hub.errors import AccessError
from hub.root.retention import EVERYBODY
from hub.security.access import Access, Patterns
from kvspool import system
from kvspool.cli import options, output, progress, verify
from kvspool.cli.options import BadInput
from kvspool.engine import sizes

DESCRIPTION = """\
Check every record of all shards under a hub root, while the hub and its clients run; also the tables of generations, the positions of
durable readers, the retention rules and, with --access, the access file. Prints all damage; the exit code is 5 if there is any, and 3 if
only the access file can't be used. Data that is being written, trimmed or removed during the check is not reported as damage.

`kvspool repair` repairs a damaged shard, while its hub is stopped; the other shards are not affected."""
EXAMPLES = """\
  kvspool hub verify /var/lib/hub
  kvspool hub verify /var/lib/hub --client 'jfk*' --access /etc/kvspool/access.toml
  kvspool hub verify /var/lib/hub --json | jq 'select(.is_sound | not)'"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = options.add_command(commands, "verify", "check everything under a hub root", DESCRIPTION, EXAMPLES)
    parser.add_argument("path", metavar="ROOT", type=Path, help="the hub root")
    parser.add_argument("--client", metavar="PATTERN", default=EVERYBODY, help="clients to check: an id, or a prefix and *")
    parser.add_argument("--access", type=Path, metavar="FILE", help="check this access file, too")
    options.add_json(parser, "print one JSON object for each shard, and one for the root")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, and print the findings."""
    from hub.root.audit import Audit, ShardReport

    system.port.allow_more_files()
    audit = Audit(arguments.path, _patterns(arguments.client).matches)
    reports: list[ShardReport] = []
    paths = audit.paths()
    if not paths and arguments.client != EVERYBODY:
        raise BadInput(f"no client is {arguments.client!r}; kvspool hub clients lists those that there are")
    with progress.shown("checking") as show:
        for done, (client, index, path) in enumerate(paths):
            report = audit.look(client, index, path, lambda at, all, done=done: show(done * all + at, len(paths) * all))  # type: ignore[misc]
            if report is not None:
                reports.append(report)
    problems = audit.problems()
    access = _access_problem(arguments.access)
    if arguments.json:
        for report in reports:
            output.print_json({"is_sound": report.is_sound, **{name: getattr(report, name) for name in report.__struct_fields__}})
        output.print_json({"root": str(audit.root), "is_sound": not problems and not access, "problems": [*problems, *access]})
    else:
        _show(reports, [*problems, *access])
    if problems or not all(report.is_sound for report in reports):
        return 5
    return AccessError.exit_code if access else 0


def _patterns(pattern: str) -> Patterns:
    try:
        return Patterns.parse((pattern,))
    except ValueError as error:
        raise BadInput(str(error)) from error


def _access_problem(path: Path | None) -> list[str]:
    try:
        if path is not None:
            Access.load(path)
    except (AccessError, OSError) as error:
        return [str(error)]
    return []


def _show(reports: list[Any], problems: list[str]) -> None:
    for one in reports:
        if not one.is_sound:
            print(output.escape(f"{one.client} shard {one.shard}:"))
            for problem in one.problems:
                print(output.escape(f"damaged: {problem}"))
            if one.report is not None:
                verify.show(one.report)
    for problem in problems:
        print(output.escape(f"damaged: {problem}"))
    sound = [one.report for one in reports if one.report is not None]
    records, size = sum(one.records for one in sound), sum(one.bytes for one in sound)
    bad = sum(not one.is_sound for one in reports)
    counts = f"{output.counted(len(reports), 'shard')}: {output.counted(records, 'sound record')} ({sizes.show(size)})"
    print(f"{counts}; {output.counted(bad, 'damaged shard')}")
