"""`kvspool hub verify`: whether everything under a hub root is sound."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hub.errors import AccessError
from hub.root.retention import EVERYBODY
from hub.security.access import Access, Patterns
from kvspool import sizes, system
from kvspool.cli import options, output, progress, verify
from kvspool.cli.options import BadInput

DESCRIPTION = """\
Check every record of all shards under a hub root, while the hub and its clients go on; also the tables of generations, the places of
durable readers, the rules of retention and, with --access, the access file. Prints what is damaged; the exit code is 5 if anything is,
and 3 if only the access file can't be used. What is being written, trimmed or removed meanwhile is no damage.

A shard that is damaged is put in order by `kvspool repair`, while its hub is stopped; the other shards don't wait for that."""
EXAMPLES = """\
  kvspool hub verify /var/lib/hub
  kvspool hub verify /var/lib/hub --client 'jfk*' --access /etc/kvspool/access.toml
  kvspool hub verify /var/lib/hub --json | jq 'select(.is_sound | not)'"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify", help="check everything under a hub root", description=DESCRIPTION, epilog=f"Examples:\n{EXAMPLES}"
    )
    parser.add_argument("path", metavar="ROOT", type=Path, help="the hub root")
    parser.add_argument("--client", metavar="PATTERN", default=EVERYBODY, help="whose shards: an id, or how one begins and a *")
    parser.add_argument("--access", type=Path, metavar="FILE", help="the access file, to be checked as well")
    options.add_json(parser, "one JSON object for each shard, and one for the root")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, and print what was found."""
    from hub.root.audit import Audit, ShardReport

    system.port.allow_more_files()
    audit = Audit(arguments.path, _patterns(arguments.client).matches)
    reports: list[ShardReport] = []
    paths = audit.paths()
    if not paths and arguments.client != EVERYBODY:
        raise BadInput(f"no client is {arguments.client!r}; kvspool hub clients lists those that there are")
    with progress.shown("checking") as tell:
        for done, (client, index, path) in enumerate(paths):
            report = audit.look(client, index, path, lambda at, all, done=done: tell(done * all + at, len(paths) * all))  # type: ignore[misc]
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
    print(f"{len(reports):,} shards: {records:,} records are sound ({sizes.show(size)}); {bad:,} shards are damaged")
