"""`kvspool table`: show a Delta table, keep it up to date from logs, combine its files, and remove old ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.cli import signals
from kvspool.cli import options, output
from kvspool.cli.options import BadInput
from kvspool.cli.progress import reported
from kvspool.cli.stats import when
from kvspool.engine import sizes

if TYPE_CHECKING:
    from hub.pipeline.appender import AppendProgress
    from hub.tables.delta import TableInfo

EXTRA = "tables"
TARGET = "128MiB"

DESCRIPTION = """\
Show a Delta table: version, rows, files, size, columns, and the last commit by kvspool. PATH is a folder, or a URL such as
s3://bucket/name, with credentials in the environment (AWS_ACCESS_KEY_ID and the like).

  kvspool table PATH                   show the table
  kvspool table append SOURCE PATH     append the records of a log, a shard set or a hub root
  kvspool table optimize PATH          combine small files, while readers read
  kvspool table vacuum PATH            remove the files of old versions

append works without Spark. Each record is in the table once, whatever is killed when: a commit has the rows, and how far they go in each
shard. It follows the source until Ctrl-C or SIGTERM; --once ends when all present records are in the table. Rows have the fields of
--schema, and two more: record has key, topic, partition, offset, timestamp and type; event_time is the record's time. Records that can't be
decoded go to files in PATH_bad. A durable reader holds back records that are not in the table yet. Processes with the same --group share
the shards of the source, on its host.

A table with one of these names is given as ./append."""
EXAMPLES = """\
  kvspool table append hub flights --schema "carrier string, dep_delay int"
  kvspool table append events events.delta --codec raw --once
  kvspool table append hub s3://lake/flights --schema infer --bad fail
  kvspool table flights --json | jq .rows"""
VERBS = {"append": 2, "optimize": 1, "vacuum": 1}  # with the number of their paths


def add_commands(subparsers: Any) -> None:
    """Add `kvspool table`."""
    parser = subparsers.add_parser(
        "table", help="Delta tables: show them, append records to them", description=DESCRIPTION, epilog=f"Examples:\n{EXAMPLES}"
    )
    parser.add_argument("words", metavar="PATH", nargs="+", help="a table; or append SOURCE PATH, optimize PATH, vacuum PATH")
    options.add_json(parser, "print a JSON object; of append, one for each commit")
    append = parser.add_argument_group("append")
    append.add_argument("--codec", choices=("json", "msgpack", "keyed", "text", "raw"), default="json", help="of the values (json)")
    append.add_argument("--schema", metavar="DDL", default="", help='such as "carrier string, dep_delay int"; or infer (the table\'s)')
    append.add_argument("--time", metavar="FIELD", default="record.timestamp", help="the source of event_time (%(default)s)")
    append.add_argument("--topic", metavar="NAME", action="append", default=[], help="only this client or prefix; repeatable (all)")
    hold = append.add_mutually_exclusive_group()
    hold.add_argument("--reader", metavar="NAME", default="table", help='of the durable reader; "" for none (%(default)s)')
    hold.add_argument("--group", metavar="NAME", default="", help="instead of a reader: share the shards with other processes")
    append.add_argument("--partition-by", metavar="A,B", default="", help="columns that become folders")
    append.add_argument("--evolve", action="store_true", help="add new columns to the table")
    append.add_argument("--bad", choices=("keep", "fail"), default="keep", help="records that can't be decoded (keep)")
    append.add_argument("--allow-loss", action="store_true", help="continue without records that were removed before they were read")
    append.add_argument("--once", action="store_true", help="end when all present records are in the table")
    append.add_argument("--every", type=options.seconds, metavar="S", default=5.0, help="between two commits, seconds (%(default)s)")
    append.add_argument("--rows", type=options.count(1), metavar="N", default=2_000_000, help="records of a commit at most (%(default)s)")
    care = parser.add_argument_group("optimize, vacuum")
    care.add_argument("--target", type=options.size, metavar="SIZE", default=TARGET, help="size of a large file (%(default)s)")
    care.add_argument("--hours", type=options.count(0), metavar="N", default=24, help="keep the files of versions as young (%(default)s)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    verb, *paths = arguments.words
    if verb not in VERBS:
        verb, paths = "show", arguments.words
    if len(paths) != VERBS.get(verb, 1):
        if verb == "show":
            known = "kvspool table PATH, or append SOURCE PATH, optimize PATH or vacuum PATH"
            raise BadInput(f"there is no command {arguments.words[0]}; use {known}")
        needed = "SOURCE and PATH" if VERBS[verb] == 2 else "one PATH"
        raise BadInput(f"kvspool table {verb} needs {needed}; kvspool table --help has examples")
    with options.bad_input():
        return RUNS[verb](arguments, *paths)


def _show(arguments: argparse.Namespace, path: str) -> int:
    """Show a table."""
    from hub.tables.delta import Table

    info = Table(path).info()
    if arguments.json:
        output.print_json(info)
        return 0
    for line in _lines(info):
        print(output.escape(line))
    return 0


def _lines(info: TableInfo) -> Iterator[str]:
    counts = f"{output.counted(info.rows, 'row')}, {output.counted(info.files, 'file')}"
    yield f"{info.path}: version {info.version:,}, {counts}, {sizes.show(info.bytes)}"
    yield f"  updated {when(info.updated)}" + (f", partitioned by {', '.join(info.partition_by)}" if info.partition_by else "")
    if info.last is not None:
        rows = output.counted(info.last.rows, "row")
        yield f"  last commit by {info.last.by}: batch {info.last.batch:,}, {rows}, version {info.last.version:,}"
    yield from (f"  {name}: {kind}" for name, kind in info.columns.items())


def _append(arguments: argparse.Namespace, source: str, path: str) -> int:
    """Append the records of a source until its end, or until a signal."""
    from hub.pipeline.appender import AppendSource, TableAppender

    by = tuple(name.strip() for name in arguments.partition_by.split(",") if name.strip())
    appender = TableAppender(
        AppendSource(Path(source), tuple(arguments.topic)),
        path,
        codec=arguments.codec,
        schema=arguments.schema,
        time=arguments.time,
        name=arguments.reader,
        group=arguments.group,
        partition_by=by,
        evolve=arguments.evolve,
        keep_bad=arguments.bad == "keep",
        fail_on_data_loss=not arguments.allow_loss,
        rows=arguments.rows,
    )
    with appender, reported("waiting for records", _sentence, is_json=arguments.json) as report, signals.stopping(appender.stop):
        done = appender.run(once=arguments.once, every=arguments.every, report=report)
    if not arguments.json:
        print(output.escape(f"{path}: {_sentence(done)}"), file=sys.stderr)
    return 0


def _sentence(progress: AppendProgress) -> str:
    words = [f"version {progress.version:,}", f"{output.counted(progress.records, 'record')} appended"]
    if progress.commits:
        words.append(f"{progress.rate:,.0f} records/s in the last commit")
    words.append(f"a lag of {progress.lag:,}")
    words += [f"{count:,} {name}" for name, count in (("bad", progress.bad), ("lost", progress.lost)) if count]
    return ", ".join(words)


def _optimize(arguments: argparse.Namespace, path: str) -> int:
    """Combine small files."""
    from hub.tables.delta import Table

    before, after = Table(path).optimize(arguments.target)
    if arguments.json:
        output.print_json({"before": before, "after": after})
    else:
        done = f"{output.counted(before, 'file')} became {after:,}" if before else "there are no small files to combine"
        print(output.escape(f"{path}: {done}"))
    return 0


def _vacuum(arguments: argparse.Namespace, path: str) -> int:
    """Remove files that no kept version has."""
    from hub.tables.delta import Table

    removed = Table(path).vacuum(arguments.hours, everything=True)
    if arguments.json:
        output.print_json({"removed": removed})
    else:
        print(output.escape(f"{path}: {output.counted(removed, 'file')} removed"))
    return 0


RUNS: dict[str, Callable[..., int]] = {"show": _show, "append": _append, "optimize": _optimize, "vacuum": _vacuum}
